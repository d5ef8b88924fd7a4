//! Applies one layer, a tar archive, onto a tree by the rules of OCI images.
//!
//! Later entries win over earlier ones, whiteouts remove what lower layers brought, paths through symbolic links are
//! resolved inside the tree. Device nodes and sockets are left out: a sandbox has its own /dev. `..` in a name is
//! refused: no honest tool writes it.

use crate::content::Content;
use crate::error::{Error, Result};
use crate::tarball::{Entry, EntryKind, Tarball};
use crate::tree::{Entries, Kind, LastLink, Meta, NodeId, Tree, split_last};

const WHITEOUT: &[u8] = b".wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";

/// How a layer says that something of the layers below is gone.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Whiteouts {
    /// Files named `.wh.<name>`.
    #[default]
    Oci,
    /// Character devices 0:0, as overlayfs and `runsc tar rootfs-upper` write them.
    Overlay,
    /// None: the archive is a whole filesystem, and a file may be named `.wh.x`.
    None,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LayerReport {
    pub entries: u64,
    pub devices_dropped: u64,
}

/// `progress` hears how many bytes of the archive are done, and may stop the work by an error.
pub fn apply(
    tree: &mut Tree,
    archive: Content,
    whiteouts: Whiteouts,
    mut progress: impl FnMut(u64) -> Result<()>,
) -> Result<LayerReport> {
    let mut tarball = Tarball::new(archive);
    let mut report = LayerReport::default();
    tree.begin_layer();
    while let Some(entry) = tarball.next_entry()? {
        report.entries += 1;
        if report.entries.is_multiple_of(512) {
            progress(tarball.position())?;
        }
        apply_entry(tree, entry, whiteouts, &mut report)?;
    }
    progress(tarball.position())?;
    Ok(report)
}

fn apply_entry(tree: &mut Tree, entry: Entry, whiteouts: Whiteouts, report: &mut LayerReport) -> Result<()> {
    let Entry { path, meta, kind } = entry;
    if has_dotdot(&path) {
        return Err(Error::layer(&path, "`..` in a path"));
    }
    let Some((parent_path, name)) = split_last(&path) else {
        if matches!(kind, EntryKind::Directory) {
            *tree.meta_mut(Tree::ROOT) = meta;
        }
        return Ok(());
    };
    let context = |error| in_entry(&path, error);
    if whiteouts == Whiteouts::Oci
        && let Some(hidden) = name.strip_prefix(WHITEOUT)
    {
        return whiteout(tree, &path, parent_path, name, hidden);
    }
    let parent = tree.make_dirs(parent_path, &Meta::root(0o755)).map_err(context)?;
    let kind = match kind {
        EntryKind::File(content) => Kind::File(content),
        EntryKind::Directory => Kind::Directory(Entries::new()),
        EntryKind::Symlink(target) => Kind::Symlink(target.into()),
        EntryKind::Fifo => Kind::Fifo,
        EntryKind::HardLink(target) => return hard_link(tree, parent, name, &path, &target),
        EntryKind::CharDevice { major: 0, minor: 0 } if whiteouts == Whiteouts::Overlay => {
            tree.whiteout(parent, name);
            return Ok(());
        }
        EntryKind::CharDevice { .. } | EntryKind::BlockDevice => {
            report.devices_dropped += 1;
            return Ok(());
        }
    };
    tree.put_in(parent, name, meta, kind).map(drop).map_err(context)
}

fn whiteout(tree: &mut Tree, path: &[u8], parent_path: &[u8], name: &[u8], hidden: &[u8]) -> Result<()> {
    // A whiteout below something that does not exist removes nothing, and must not create it either.
    let parent = tree
        .lookup(parent_path, LastLink::Follow)
        .map_err(|error| in_entry(path, error))?;
    let Some(parent) = parent.filter(|&id| tree.entries(id).is_some()) else {
        return Ok(());
    };
    if name == OPAQUE {
        tree.opaque(parent);
    } else if hidden.starts_with(WHITEOUT) {
        // `.wh..wh.plnk` and the like: bookkeeping of aufs.
    } else if hidden.is_empty() || hidden == b"." || hidden == b".." {
        return Err(Error::layer(path, "a whiteout that names nothing"));
    } else {
        tree.whiteout(parent, hidden);
    }
    Ok(())
}

fn hard_link(tree: &mut Tree, parent: NodeId, name: &[u8], path: &[u8], target: &[u8]) -> Result<()> {
    if has_dotdot(target) {
        return Err(Error::layer(path, "a hard link to a path with `..`"));
    }
    let node = tree
        .lookup(target, LastLink::Keep)
        .map_err(|error| in_entry(path, error))?
        .ok_or_else(|| Error::layer(path, "a hard link to a file that is not in the image"))?;
    if tree.entries(node).is_some() {
        return Err(Error::layer(path, "a hard link to a directory"));
    }
    tree.link_in(parent, name, node)
        .map_err(|error| in_entry(path, error))
}

fn in_entry(path: &[u8], error: Error) -> Error {
    match error {
        Error::Path { path: part, why } => Error::layer(path, format!("`{part}`: {why}")),
        other => other,
    }
}

fn has_dotdot(path: &[u8]) -> bool {
    path.split(|&b| b == b'/').any(|name| name == b"..")
}

#[cfg(test)]
mod tests;
