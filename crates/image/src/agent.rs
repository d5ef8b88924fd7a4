//! The tiny image that carries the guest agent into a sandbox, mounted beside the template.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::content::Content;
use crate::erofs::write_image;
use crate::error::{Error, IoContext, Result};
use crate::tree::{Meta, Tree};

/// The agent's path inside the image.
pub const AGENT_PATH: &str = "/atoll-guest";

/// Writes an image whose only file is the agent, mode 0755, into `dir` and returns its path. The file is named by the
/// agent's digest, so a second call with the same binary finds it and writes nothing.
pub fn agent_image(binary: &Path, dir: &Path) -> Result<PathBuf> {
    let bytes = fs::read(binary).doing("read", binary)?;
    let key = hex::encode(&Sha256::digest(&bytes)[..16]);
    let path = dir.join(format!("agent-{key}.erofs"));
    if path.exists() {
        return Ok(path);
    }
    fs::create_dir_all(dir).doing("make", dir)?;
    let mut tree = Tree::default();
    tree.put_file(AGENT_PATH.as_bytes(), Meta::root(0o755), Content::bytes(bytes))?;
    let mut random = [0; 8];
    getrandom::fill(&mut random).map_err(|error| Error::Invalid(format!("no randomness: {error}")))?;
    let staged = dir.join(format!(".agent-{}.new", hex::encode(random)));
    let result = (|| {
        let mut file = File::create(&staged).doing("write", &staged)?;
        write_image(&tree, &mut file, |_, _| Ok(()))?;
        file.set_permissions(fs::Permissions::from_mode(0o444))
            .and_then(|()| file.sync_all())
            .doing("write", &staged)?;
        fs::rename(&staged, &path).doing("write", &path)
    })();
    if result.is_err() {
        let _already_gone = fs::remove_file(&staged);
    }
    result.map(|()| path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Backing, Limits, read_tree};

    #[test]
    fn the_agent_image_is_made_once_per_binary() {
        let dir = tempfile::tempdir().unwrap();
        let binary = dir.path().join("agent");
        fs::write(&binary, "#!agent").unwrap();
        let first = agent_image(&binary, dir.path()).unwrap();
        assert_eq!(agent_image(&binary, dir.path()).unwrap(), first);
        let tree = read_tree(&Backing::open(&first).unwrap(), Limits::default()).unwrap();
        assert_eq!(tree.read(b"atoll-guest", 100).unwrap().unwrap(), b"#!agent");
        fs::write(&binary, "#!other").unwrap();
        assert_ne!(agent_image(&binary, dir.path()).unwrap(), first);
    }
}
