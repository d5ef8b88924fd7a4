//! The programs that this binary carries for the other side of the wall, and their place on disk.
//!
//! They are written to a directory named by their content, so that a newer server never changes the files under the
//! instances of an older one.

use std::fs;
use std::path::{Path, PathBuf};

use atoll_client::output::{Doing, Result};
use sha2::{Digest, Sha256};

use crate::data::write_whole;

static GUEST: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/atoll-guest"));
static JAILER: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/atoll-jailer"));

#[derive(Debug, Clone)]
pub(crate) struct Assets {
    pub(crate) guest_binary: PathBuf,
    pub(crate) guest_image: PathBuf,
    pub(crate) jailer_binary: PathBuf,
}

/// Puts the programs below `<data>/bin`, unless they are there.
pub(crate) fn install(data: &Path) -> Result<Assets> {
    let digest = Sha256::new().chain_update(GUEST).chain_update(JAILER).finalize();
    let dir = data.join("bin").join(&hex::encode(digest)[..16]);
    fs::create_dir_all(&dir).doing(format_args!("cannot create {}", dir.display()))?;
    let guest_binary = dir.join("atoll-guest");
    let jailer_binary = dir.join("atoll-jailer");
    for (path, bytes) in [(&guest_binary, GUEST), (&jailer_binary, JAILER)] {
        if fs::metadata(path).map(|found| found.len()).ok() != Some(bytes.len() as u64) {
            write_whole(path, bytes, 0o755)?;
        }
    }
    let guest_image =
        atoll_image::agent_image(&guest_binary, &dir).doing("cannot make the image of the guest agent")?;
    Ok(Assets {
        guest_binary,
        guest_image,
        jailer_binary,
    })
}
