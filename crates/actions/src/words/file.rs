//! A file of a sandbox.

use atoll_guest_protocol::{EntryKind, FileStat};
use atoll_types::Timestamp;
use serde::Serialize;
use utoipa::ToSchema;

use crate::spelling;

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum FileKind {
    File,
    Directory,
    Symlink,
    Other,
}

#[derive(Debug, Serialize, ToSchema)]
pub struct FileView {
    /// Readable; where the name is not UTF-8, `path_base64` has it exactly.
    path: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    path_base64: Option<String>,
    kind: FileKind,
    size_bytes: u64,
    /// Octal permission bits.
    #[schema(examples("0644"))]
    mode: String,
    uid: u32,
    gid: u32,
    owner: Option<String>,
    group: Option<String>,
    #[schema(format = DateTime)]
    modified_at: String,
    /// What a symlink points to.
    #[serde(skip_serializing_if = "Option::is_none")]
    target: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    target_base64: Option<String>,
    /// In a listing: how far below the directory asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    depth: Option<u32>,
}

impl FileView {
    pub fn of(stat: &FileStat) -> Self {
        let (path, path_base64) = spelling::readable(&stat.path);
        let (target, target_base64) = match &stat.target {
            Some(target) => {
                let (target, encoded) = spelling::readable(target);
                (Some(target), encoded)
            }
            None => (None, None),
        };
        Self {
            path,
            path_base64,
            kind: match stat.kind {
                EntryKind::File => FileKind::File,
                EntryKind::Directory => FileKind::Directory,
                EntryKind::Symlink => FileKind::Symlink,
                EntryKind::Other => FileKind::Other,
            },
            size_bytes: stat.size,
            mode: spelling::show_mode(stat.mode),
            uid: stat.uid,
            gid: stat.gid,
            owner: stat.owner.clone(),
            group: stat.group.clone(),
            modified_at: spelling::time(Timestamp(stat.modified_millis)),
            target,
            target_base64,
            depth: None,
        }
    }

    /// In a listing.
    #[must_use]
    pub fn at_depth(self, depth: u32) -> Self {
        Self {
            depth: Some(depth),
            ..self
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_shown_with_exact_names() {
        let stat = FileStat {
            path: b"/a\xff".to_vec(),
            kind: EntryKind::Symlink,
            size: 5,
            mode: 0o120_777,
            uid: 1,
            gid: 2,
            owner: Some("user".into()),
            group: None,
            modified_millis: 0,
            target: Some(b"/b".to_vec()),
        };
        let json = serde_json::to_value(FileView::of(&stat)).unwrap();
        assert_eq!(
            json,
            serde_json::json!({
                "path": "/a\u{fffd}", "path_base64": "L2H/", "kind": "symlink", "size_bytes": 5, "mode": "0777",
                "uid": 1, "gid": 2, "owner": "user", "group": null, "modified_at": "1970-01-01T00:00:00.000Z",
                "target": "/b",
            })
        );
    }
}
