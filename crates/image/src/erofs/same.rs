//! What of a tree is in the image below already, and need not be written again.
//!
//! A tree is compared with the image name by name, from the root down. A node is the same as the inode of that name when
//! everything that a guest can see is the same: metadata, number of names, and data, which must lie where it lay (nobody
//! reads it to compare). A directory is the same when each of its names leads to a node that is. What differs is written
//! again with all directories above it, and nothing else.

use std::collections::{BTreeMap, HashMap};

use super::read::{Image, Inode};
use super::stack::Stack;
use super::{S_IFDIR, S_IFIFO, S_IFLNK, S_IFMT, S_IFREG};
use crate::error::Result;
use crate::tree::{Entries, Kind, MAX_SYMLINK, Meta, NodeId, Tree};

/// The inode of the image below that each node is the same as.
pub(super) struct Same {
    nids: Vec<Option<u64>>,
}

impl Same {
    pub(super) fn of(tree: &Tree, below: &Stack) -> Result<Self> {
        let mut comparing = Comparing {
            tree,
            below,
            image: Image::of(below),
            names: count_names(tree),
            done: vec![None; tree.arena_len()],
            taken: HashMap::new(),
        };
        comparing.compare(Tree::ROOT, Some(below.root))?;
        let nids = comparing.done.into_iter().map(Option::flatten).collect();
        Ok(Self { nids })
    }

    pub(super) fn nid(&self, node: NodeId) -> Option<u64> {
        self.nids[node.index()]
    }
}

struct Comparing<'a> {
    tree: &'a Tree,
    below: &'a Stack,
    image: Image<'a>,
    /// How many names each node has.
    names: Vec<u32>,
    /// What came out for each node, as far as it was looked at.
    done: Vec<Option<Option<u64>>>,
    /// Which node is each inode: two nodes that look the same are still two.
    taken: HashMap<u64, NodeId>,
}

impl Comparing<'_> {
    /// Directories lie no deeper than the tree's limit allows.
    fn compare(&mut self, id: NodeId, nid: Option<u64>) -> Result<Option<u64>> {
        if let Some(known) = self.done[id.index()] {
            return Ok(known);
        }
        let inode = nid.map(|nid| self.image.inode(nid)).transpose()?;
        let node = self.tree.node(id);
        let same = match &node.kind {
            Kind::Directory(entries) => self.directory(entries, &node.meta, inode.as_ref())?,
            _ => match &inode {
                Some(inode) => self.leaf(id, inode)?,
                None => false,
            },
        };
        let same = nid.filter(|nid| same && *self.taken.entry(*nid).or_insert(id) == id);
        self.done[id.index()] = Some(same);
        Ok(same)
    }

    fn directory(&mut self, entries: &Entries, meta: &Meta, inode: Option<&Inode>) -> Result<bool> {
        let inode = inode.filter(|inode| inode.mode & S_IFMT == S_IFDIR);
        let below: BTreeMap<Vec<u8>, u64> = match inode {
            Some(inode) => self.image.entries(inode)?.into_iter().collect(),
            None => BTreeMap::new(),
        };
        let mut same = inode.is_some_and(|inode| looks_same(inode, meta)) && entries.len() == below.len();
        for (name, &child) in entries {
            let nid = below.get(&**name).copied();
            let found = self.compare(child, nid)?;
            same &= found.is_some() && found == nid;
        }
        Ok(same)
    }

    fn leaf(&self, id: NodeId, inode: &Inode) -> Result<bool> {
        let node = self.tree.node(id);
        if !looks_same(inode, &node.meta) || inode.nlink != self.names[id.index()] {
            return Ok(false);
        }
        Ok(match (&node.kind, inode.mode & S_IFMT) {
            (Kind::File(content), S_IFREG) => {
                let in_place = inode.tail_at.is_none()
                    && (content.is_empty() || self.below.address_of(content) == Some(inode.data_at));
                content.len() == inode.size && in_place
            }
            (Kind::Symlink(target), S_IFLNK) => {
                inode.size == target.len() as u64 && *self.image.bytes(inode, MAX_SYMLINK as u64)? == **target
            }
            (Kind::Fifo, S_IFIFO) => true,
            _ => false,
        })
    }
}

/// Attributes are left out: no image has any.
fn looks_same(inode: &Inode, meta: &Meta) -> bool {
    inode.mode & !S_IFMT == meta.mode & 0o7777
        && (inode.uid, inode.gid, inode.mtime) == (meta.uid, meta.gid, meta.mtime)
}

fn count_names(tree: &Tree) -> Vec<u32> {
    let mut names = vec![0; tree.arena_len()];
    let mut pending = vec![Tree::ROOT];
    while let Some(dir) = pending.pop() {
        for &child in tree.entries(dir).into_iter().flat_map(Entries::values) {
            names[child.index()] += 1;
            if tree.entries(child).is_some() {
                pending.push(child);
            }
        }
    }
    names
}
