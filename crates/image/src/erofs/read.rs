//! Turns an image back into a tree, whose contents are ranges of that image. Reads what we write and what
//! `mkfs.erofs` writes without compression. An image may come from elsewhere, so nothing in it is believed: offsets are
//! checked, a directory is entered once, growth is limited.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::stack::Stack;
use super::{
    BLOCK, DIRENT, LAYOUT_INLINE, LAYOUT_PLAIN, S_IFDIR, S_IFIFO, S_IFLNK, S_IFMT, S_IFREG, SLOT, u16_at,
    u32_at, u64_at,
};
use crate::content::{Backing, Content};
use crate::error::{Error, Result, show};
use crate::tree::{Entries, Kind, Limits, MAX_SYMLINK, Meta, Mtime, NodeId, Tree};

const MAX_DIRECTORY: u64 = 1 << 30;
/// How much is read at once where inodes are: those of a directory lie together.
const WINDOW: u64 = 16 * 1024;

/// The tree of a plain image.
pub fn read_tree(backing: &Arc<Backing>, limits: Limits) -> Result<Tree> {
    tree_of(&Stack::alone(backing)?, limits)
}

/// The tree of an image that a layer can be written on: it remembers where it came from.
pub fn read_stack(stack: &Arc<Stack>, limits: Limits) -> Result<Tree> {
    let mut tree = tree_of(stack, limits)?;
    tree.set_below(Arc::clone(stack));
    Ok(tree)
}

fn tree_of(stack: &Stack, limits: Limits) -> Result<Tree> {
    let image = Image::of(stack);
    let mut tree = Tree::new(limits);
    let root = image.inode(stack.root)?;
    if root.mode & S_IFMT != S_IFDIR {
        return Err(image.bad("the root is not a directory"));
    }
    *tree.meta_mut(Tree::ROOT) = root.meta();
    let mut files: HashMap<u64, NodeId> = HashMap::new();
    let mut pending = vec![(root, Tree::ROOT, 1u64)];
    let mut entered = HashSet::from([stack.root]);
    while let Some((dir, id, depth)) = pending.pop() {
        if depth > limits.depth {
            return Err(Error::Limit {
                what: "the depth of directories".into(),
                limit: limits.depth,
            });
        }
        for (name, nid) in image.entries(&dir)? {
            if let Some(&known) = files.get(&nid) {
                tree.link_in(id, &name, known)?;
                continue;
            }
            let inode = image.inode(nid)?;
            let kind = match inode.mode & S_IFMT {
                S_IFDIR => {
                    if !entered.insert(nid) {
                        return Err(image.bad("a directory with two names"));
                    }
                    Kind::Directory(Entries::new())
                }
                S_IFREG => Kind::File(image.content(&inode)?),
                S_IFLNK => Kind::Symlink(image.bytes(&inode, MAX_SYMLINK as u64)?.into()),
                S_IFIFO => Kind::Fifo,
                _ => continue, // devices and sockets: as in layers
            };
            let is_dir = matches!(kind, Kind::Directory(_));
            let child = tree.put_in(id, &name, inode.meta(), kind)?;
            if is_dir {
                pending.push((inode, child, depth + 1));
            } else {
                files.insert(nid, child);
            }
        }
    }
    Ok(tree)
}

/// An image to look into.
pub(super) struct Image<'a> {
    stack: &'a Stack,
    /// What was read last, and where it lies.
    window: RefCell<(u64, Vec<u8>)>,
}

pub(super) struct Inode {
    pub(super) mode: u16,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) mtime: Mtime,
    pub(super) nlink: u32,
    pub(super) size: u64,
    /// Where the data that lies in blocks begins.
    pub(super) data_at: u64,
    /// Where the tail lies that does not, if there is one.
    pub(super) tail_at: Option<u64>,
}

impl Inode {
    fn meta(&self) -> Meta {
        Meta {
            mode: self.mode & 0o7777,
            uid: self.uid,
            gid: self.gid,
            mtime: self.mtime,
            xattrs: Default::default(),
        }
    }
}

impl<'a> Image<'a> {
    pub(super) fn of(stack: &'a Stack) -> Self {
        Self {
            stack,
            window: RefCell::default(),
        }
    }

    /// Fills the buffer with what lies there. For small things among many.
    fn read(&self, buf: &mut [u8], at: u64) -> Result<()> {
        let wanted = buf.len() as u64;
        let mut window = self.window.borrow_mut();
        let (start, bytes) = &mut *window;
        let seen = at >= *start && at - *start + wanted <= bytes.len() as u64;
        if !seen {
            let len = self.stack.rest(at).min(WINDOW.max(wanted));
            if len < wanted {
                return Err(self.bad("something outside of the image"));
            }
            bytes.resize(len as usize, 0);
            *start = at;
            self.stack.read(bytes, at)?;
        }
        let from = (at - *start) as usize;
        buf.copy_from_slice(&bytes[from..from + buf.len()]);
        Ok(())
    }

    pub(super) fn inode(&self, nid: u64) -> Result<Inode> {
        let at = nid
            .checked_mul(SLOT)
            .and_then(|offset| offset.checked_add(self.stack.meta_at))
            .filter(|at| at.saturating_add(SLOT) <= self.stack.size())
            .ok_or_else(|| self.bad("an inode outside of the image"))?;
        let mut raw = [0; 64];
        self.read(&mut raw[..32], at)?;
        let format = u16_at(&raw, 0);
        let extended = format & 1 == 1;
        let len = if extended { 64 } else { 32 };
        if extended {
            self.read(&mut raw, at)?;
        }
        let (size, uid, gid, mtime, nlink) = if extended {
            let mtime = Mtime {
                secs: u64_at(&raw, 32),
                nanos: u32_at(&raw, 40),
            };
            (
                u64_at(&raw, 8),
                u32_at(&raw, 24),
                u32_at(&raw, 28),
                mtime,
                u32_at(&raw, 44),
            )
        } else {
            let (uid, gid) = (u16_at(&raw, 24), u16_at(&raw, 26));
            (
                u64::from(u32_at(&raw, 8)),
                uid.into(),
                gid.into(),
                self.stack.build_time,
                u32::from(u16_at(&raw, 6)),
            )
        };
        let xattrs = match u64::from(u16_at(&raw, 2)) {
            0 => 0,
            count => 12 + 4 * (count - 1),
        };
        let tail_at = match format >> 1 & 7 {
            LAYOUT_PLAIN => None,
            LAYOUT_INLINE => Some(at + len + xattrs),
            _ => return Err(self.bad("a file is compressed; write the image without compression")),
        };
        Ok(Inode {
            mode: u16_at(&raw, 4),
            uid,
            gid,
            mtime,
            nlink,
            size,
            data_at: u64::from(u32_at(&raw, 16)) * BLOCK,
            tail_at,
        })
    }

    /// The content of a regular file, by reference unless it is cut in two.
    fn content(&self, inode: &Inode) -> Result<Content> {
        match inode.tail_at {
            None if inode.size == 0 => Ok(Content::bytes(Vec::new())),
            None => self.stack.range(inode.data_at, inode.size),
            Some(tail_at) if inode.size < BLOCK => self.stack.range(tail_at, inode.size),
            Some(_) => Ok(Content::bytes(self.bytes(inode, MAX_DIRECTORY)?)),
        }
    }

    pub(super) fn bytes(&self, inode: &Inode, limit: u64) -> Result<Vec<u8>> {
        if inode.size > limit || inode.size > self.stack.size() {
            return Err(self.bad("a directory or link that is too long"));
        }
        let tail = match inode.tail_at {
            Some(_) => inode.size % BLOCK,
            None => 0,
        };
        let mut all = Vec::new();
        if inode.size > tail {
            let whole = self.stack.range(inode.data_at, inode.size - tail)?;
            all = whole.read_to_vec(limit)?;
        }
        if let Some(at) = inode.tail_at {
            let before = all.len();
            all.resize(before + tail as usize, 0);
            self.read(&mut all[before..], at)?;
        }
        Ok(all)
    }

    pub(super) fn entries(&self, dir: &Inode) -> Result<Vec<(Vec<u8>, u64)>> {
        let data = self.bytes(dir, MAX_DIRECTORY)?;
        let mut all = Vec::new();
        for block in data.chunks(BLOCK as usize) {
            let bad = || self.bad("a damaged directory");
            let names_at = usize::from(u16_at(block.get(..DIRENT).ok_or_else(bad)?, 8));
            if names_at < DIRENT || names_at > block.len() || !names_at.is_multiple_of(DIRENT) {
                return Err(bad());
            }
            let count = names_at / DIRENT;
            for index in 0..count {
                let entry = &block[index * DIRENT..];
                let start = usize::from(u16_at(entry, 8));
                let end = if index + 1 < count {
                    usize::from(u16_at(entry, DIRENT + 8))
                } else {
                    block.len()
                };
                let name = block.get(start..end).ok_or_else(bad)?;
                let name = name.split(|&b| b == 0).next().unwrap_or_default();
                if name.contains(&b'/') || name.is_empty() {
                    return Err(self.bad(&format!("a directory entry `{}`", show(name))));
                }
                if name != b"." && name != b".." {
                    all.push((name.to_vec(), u64_at(entry, 0)));
                }
            }
        }
        Ok(all)
    }

    fn bad(&self, why: &str) -> Error {
        self.stack.bad(why)
    }
}
