//! Files as E2B's clients see them.

use std::collections::HashMap;

use atoll_guest_protocol::{Attributes, EntryKind, FileStat};
use atoll_sandboxes::FilePath;
use atoll_types::{Fault, FaultKind};

use super::Call;
use super::messages::{EntryInfo, FileType, Time};

/// Extended attributes with this prefix are a file's metadata.
pub(crate) const METADATA: &str = "user.e2b.";
/// Symlinks in a row, as in the kernel.
const LINKS: usize = 40;
/// How many files are asked for their attributes at once.
pub(crate) const ASKED: usize = 256;

impl Call {
    /// A path as the clients write it: `~` and the empty one are where relative paths begin.
    pub(crate) fn at(&self, path: &str) -> FilePath {
        let path = match path.strip_prefix('~') {
            Some("") => ".",
            Some(rest) if rest.starts_with('/') => rest.trim_start_matches('/'),
            _ => path,
        };
        let path = if path.is_empty() { "." } else { path };
        FilePath {
            path: path.as_bytes().to_vec(),
            user: self.user.clone(),
        }
    }

    /// A path that the agent has told us.
    pub(crate) fn exactly(&self, path: &[u8]) -> FilePath {
        FilePath {
            path: path.to_vec(),
            user: self.user.clone(),
        }
    }

    /// A path from the root on, for messages; as it was given where that cannot be told.
    pub(crate) async fn whole(&self, path: &str) -> String {
        let below = self.at(path).path;
        let below = String::from_utf8_lossy(&below);
        if below.starts_with('/') {
            return below.into_owned();
        }
        match self.stat(self.at(".")).await {
            Ok(base) => joined(&String::from_utf8_lossy(&base.path), &below),
            Err(_) => path.to_owned(),
        }
    }

    pub(crate) async fn stat(&self, at: FilePath) -> Result<FileStat, Fault> {
        self.app
            .sandboxes
            .stat(&self.target.caller, &self.target.id, at)
            .await
    }

    /// Where a chain of symlinks ends; `None`: nowhere.
    pub(crate) async fn resolve(&self, stat: &FileStat) -> Result<Option<FileStat>, Fault> {
        let mut stat = stat.clone();
        for _ in 0..LINKS {
            let Some(target) = stat.target.take().filter(|_| stat.kind == EntryKind::Symlink) else {
                return Ok(Some(stat));
            };
            let next = beside(&stat.path, &target);
            stat = match self.stat(self.exactly(&next)).await {
                Ok(stat) => stat,
                Err(fault) if matches!(fault.kind(), FaultKind::NotFound | FaultKind::Invalid) => {
                    return Ok(None);
                }
                Err(fault) => return Err(fault),
            };
        }
        Ok(None)
    }

    /// The metadata of at most [`ASKED`] files.
    pub(crate) async fn attributes(&self, paths: Vec<Vec<u8>>) -> Result<Vec<Attributes>, Fault> {
        let (caller, id) = (&self.target.caller, &self.target.id);
        let user = self.user.clone();
        let found = self.app.sandboxes.attributes(caller, id, paths, user, METADATA);
        found.await
    }

    pub(crate) async fn entry(&self, at: FilePath) -> Result<EntryInfo, Fault> {
        let stat = self.stat(at).await?;
        let attributes = self.attributes(vec![stat.path.clone()]).await?;
        let resolved = self.resolve(&stat).await?;
        Ok(entry(
            &stat,
            resolved.as_ref(),
            attributes.into_iter().next().unwrap_or_default(),
        ))
    }
}

/// `resolved` is what it leads to: itself, unless it is a symlink; `None` if that is nowhere.
pub(crate) fn entry(stat: &FileStat, resolved: Option<&FileStat>, attributes: Attributes) -> EntryInfo {
    let is_symlink = stat.kind == EntryKind::Symlink;
    let kind = match resolved.map(|resolved| resolved.kind) {
        Some(EntryKind::File) => FileType::File,
        Some(EntryKind::Directory) => FileType::Directory,
        Some(EntryKind::Symlink | EntryKind::Other) | None => FileType::Unspecified,
    };
    let number = |name: &Option<String>, id: u32| name.clone().unwrap_or_else(|| id.to_string());
    EntryInfo {
        name: file_name(&stat.path),
        r#type: kind.into(),
        path: String::from_utf8_lossy(&stat.path).into_owned(),
        size: i64::try_from(stat.size).unwrap_or(i64::MAX),
        mode: resolved.unwrap_or(stat).mode & 0o777,
        permissions: permissions(stat),
        owner: number(&stat.owner, stat.uid),
        group: number(&stat.group, stat.gid),
        modified_time: Some(Time {
            seconds: stat.modified_millis.div_euclid(1000),
            nanos: i32::try_from(stat.modified_millis.rem_euclid(1000) * 1_000_000).unwrap_or(0),
        }),
        symlink_target: is_symlink.then(|| match (resolved, &stat.target) {
            (Some(resolved), _) => String::from_utf8_lossy(&resolved.path).into_owned(),
            (None, Some(target)) => String::from_utf8_lossy(target).into_owned(),
            (None, None) => String::new(),
        }),
        metadata: metadata(attributes),
        is_symlink,
    }
}

pub(crate) fn metadata(attributes: Attributes) -> HashMap<String, String> {
    attributes
        .into_iter()
        .filter_map(|(name, value)| Some((name, String::from_utf8(value).ok()?)))
        .collect()
}

pub(crate) fn file_name(path: &[u8]) -> String {
    match path.rsplit(|byte| *byte == b'/').next() {
        Some(b"") | None => "/".into(),
        Some(name) => String::from_utf8_lossy(name).into_owned(),
    }
}

/// What a symlink at `path` points to, as a path.
fn beside(path: &[u8], target: &[u8]) -> Vec<u8> {
    let whole = if target.starts_with(b"/") {
        target.to_vec()
    } else {
        let parent = match path.iter().rposition(|byte| *byte == b'/') {
            Some(at) => &path[..at],
            None => b"",
        };
        [parent, b"/", target].concat()
    };
    // By the text alone, as people read paths; what a link in the middle means is left to the agent.
    let mut parts: Vec<&[u8]> = Vec::new();
    for part in whole.split(|byte| *byte == b'/') {
        match part {
            b"" | b"." => {}
            b".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    [b"/".to_vec(), parts.join(&b'/')].concat()
}

/// As Go's `os.FileMode` writes it.
fn permissions(stat: &FileStat) -> String {
    let kind = match stat.kind {
        EntryKind::Directory => 'd',
        EntryKind::Symlink => 'L',
        EntryKind::File | EntryKind::Other => '-',
    };
    let mut text = String::with_capacity(10);
    text.push(kind);
    for shift in [6, 3, 0] {
        let bits = (stat.mode >> shift) & 7;
        for (bit, letter) in [(4, 'r'), (2, 'w'), (1, 'x')] {
            text.push(if bits & bit != 0 { letter } else { '-' });
        }
    }
    text
}

/// A path below a directory, without parts that mean nothing.
fn joined(base: &str, below: &str) -> String {
    let parts = below.split('/').filter(|part| !matches!(*part, "" | "."));
    let mut whole = base.trim_end_matches('/').to_owned();
    for part in parts {
        whole.push('/');
        whole.push_str(part);
    }
    if whole.is_empty() { "/".to_owned() } else { whole }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_lead_where_they_say() {
        for (path, target, leads) in [
            ("/a/b", "c", "/a/c"),
            ("/a/b", "../c", "/c"),
            ("/a/b", "/x/./y", "/x/y"),
            ("/b", "../../c", "/c"),
        ] {
            let found = beside(path.as_bytes(), target.as_bytes());
            assert_eq!(String::from_utf8_lossy(&found), leads);
        }
    }

    #[test]
    fn names_and_permissions() {
        assert_eq!(file_name(b"/a/b.txt"), "b.txt");
        assert_eq!(file_name(b"/"), "/");
        let stat = FileStat {
            path: b"/d".to_vec(),
            kind: EntryKind::Directory,
            size: 0,
            mode: 0o750,
            uid: 0,
            gid: 0,
            owner: None,
            group: None,
            modified_millis: -1,
            target: None,
        };
        assert_eq!(permissions(&stat), "drwxr-x---");
        let entry = entry(&stat, Some(&stat), Vec::new());
        assert_eq!(entry.owner, "0");
        let time = entry.modified_time.unwrap();
        assert_eq!((time.seconds, time.nanos), (-1, 999_000_000));
    }
}
