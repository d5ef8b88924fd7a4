//! Applies one layer, a tar archive, onto a tree: by the rules of OCI images, or by those of overlayfs, as a sandbox's changes come.
//!
//! Later entries win over earlier ones, whiteouts remove what lower layers brought, paths through symbolic links are
//! resolved inside the tree. Device nodes and sockets are left out: a sandbox has its own /dev. `..` in a name is
//! refused: no honest tool writes it.

use std::collections::{BTreeMap, BTreeSet};

use crate::content::Content;
use crate::error::{Error, Result};
use crate::tarball::{Entry, EntryKind, Tarball};
use crate::tree::{Entries, Kind, LastLink, Meta, NodeId, Tree, split_last};

const WHITEOUT: &[u8] = b".wh.";
/// How many whiteouts of an archive may be linked to; where there are links at all, they are to one.
const MOST_LINKED: usize = 1024;
/// How many directories one layer may have renamed.
const MOST_MOVED: usize = 4096;
const OPAQUE: &[u8] = b".wh..wh..opq";

/// How a layer says that something of the layers below is gone.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Whiteouts {
    /// Files named `.wh.<name>`.
    #[default]
    Oci,
    /// Character devices 0:0, and an attribute of directories that hide all, as overlayfs has them.
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
    let mut hidden = BTreeSet::new();
    let mut moved = match whiteouts {
        Whiteouts::Overlay => take_moved(tree, tarball.clone())?,
        Whiteouts::Oci | Whiteouts::None => BTreeMap::new(),
    };
    while let Some(entry) = tarball.next_entry()? {
        report.entries += 1;
        if report.entries.is_multiple_of(512) {
            progress(tarball.position())?;
        }
        if whiteouts == Whiteouts::Overlay && hides(&entry, &mut hidden) {
            remove(tree, &entry.path)?;
            continue;
        }
        if let Some(taken) = moved.remove(&plain(&entry.path)) {
            place(tree, &entry, taken)?;
            continue;
        }
        apply_entry(tree, entry, whiteouts, &mut report)?;
    }
    progress(tarball.position())?;
    Ok(report)
}

/// Whether an entry is only there to hide another. gVisor has one whiteout, and links to it, so those that came are in `hidden`.
fn hides(entry: &Entry, hidden: &mut BTreeSet<Vec<u8>>) -> bool {
    match &entry.kind {
        EntryKind::CharDevice { major: 0, minor: 0 } => {
            if hidden.len() < MOST_LINKED {
                hidden.insert(entry.path.clone());
            }
            true
        }
        EntryKind::HardLink(target) => hidden.contains(target),
        _ => false,
    }
}

/// The directories that were renamed, by where they are now. Taken away from where they were before anything else is looked at: what
/// hides their old names may come before or after them, and others may have been inside of them.
fn take_moved(tree: &mut Tree, mut tarball: Tarball) -> Result<BTreeMap<Vec<u8>, NodeId>> {
    // Where each is, and where it was, from the top down.
    let mut all: BTreeMap<Vec<u8>, Vec<u8>> = BTreeMap::new();
    while let Some(entry) = tarball.next_entry()? {
        let Some(redirect) = entry.redirect.filter(|_| !entry.opaque) else {
            continue;
        };
        if has_dotdot(&redirect) || has_dotdot(&entry.path) {
            return Err(Error::layer(&entry.path, "`..` in a path"));
        }
        if all.len() >= MOST_MOVED {
            let why = format!("more than {MOST_MOVED} directories of the template were renamed");
            return Err(Error::layer(&entry.path, why));
        }
        let path = plain(&entry.path);
        let was = match redirect.strip_prefix(b"/") {
            Some(absolute) => plain(absolute),
            // Beside its old parent, which may have been renamed, too.
            None => {
                let (parent, _) = split_last(&path).unwrap_or((b"", b""));
                let above = all.iter().filter(|(at, _)| {
                    parent == at.as_slice() || (parent.starts_with(at) && parent.get(at.len()) == Some(&b'/'))
                });
                let parent = match above.max_by_key(|(at, _)| at.len()) {
                    Some((at, was)) => [was.as_slice(), &parent[at.len()..]].concat(),
                    None => parent.to_vec(),
                };
                match parent.is_empty() {
                    true => redirect,
                    false => [parent.as_slice(), b"/", &redirect].concat(),
                }
            }
        };
        all.insert(path, was);
    }
    // Those further down first, so that none is taken along by another.
    let mut order: Vec<_> = all.into_iter().collect();
    order.sort_by_key(|(_, was)| std::cmp::Reverse(was.len()));
    let mut taken = BTreeMap::new();
    for (path, was) in order {
        if let Some(id) = tree.take(&was)? {
            taken.insert(path, id);
        }
    }
    Ok(taken)
}

/// A path as others are compared with it.
fn plain(path: &[u8]) -> Vec<u8> {
    let parts = path.split(|byte| *byte == b'/');
    let parts: Vec<&[u8]> = parts.filter(|part| !part.is_empty() && *part != b".").collect();
    parts.join(&b'/')
}

fn place(tree: &mut Tree, entry: &Entry, taken: NodeId) -> Result<()> {
    let Some((parent_path, name)) = split_last(&entry.path) else {
        return Ok(());
    };
    let context = |error| in_entry(&entry.path, error);
    let parent = tree.make_dirs(parent_path, &Meta::root(0o755)).map_err(context)?;
    tree.place(parent, name, entry.meta.clone(), taken)
        .map_err(context)
}

fn remove(tree: &mut Tree, path: &[u8]) -> Result<()> {
    if has_dotdot(path) {
        return Err(Error::layer(path, "`..` in a path"));
    }
    let Some((parent_path, name)) = split_last(path) else {
        return Ok(());
    };
    let parent = tree.make_dirs(parent_path, &Meta::root(0o755));
    let parent = parent.map_err(|error| in_entry(path, error))?;
    tree.whiteout(parent, name);
    Ok(())
}

fn apply_entry(tree: &mut Tree, entry: Entry, whiteouts: Whiteouts, report: &mut LayerReport) -> Result<()> {
    let Entry {
        path,
        meta,
        kind,
        opaque,
        redirect: _,
    } = entry;
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
        EntryKind::CharDevice { .. } | EntryKind::BlockDevice => {
            report.devices_dropped += 1;
            return Ok(());
        }
    };
    let id = tree.put_in(parent, name, meta, kind).map_err(context)?;
    if opaque && whiteouts == Whiteouts::Overlay {
        tree.opaque(id);
    }
    Ok(())
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
