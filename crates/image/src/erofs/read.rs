//! Turns an image back into a tree, whose contents are ranges of that image. Reads what we write and what
//! `mkfs.erofs` writes without compression. An image may come from elsewhere, so nothing in it is believed: offsets are
//! checked, a directory is entered once, growth is limited.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::{
    BLOCK, BLOCK_BITS, COMPAT_CHECKSUM, DIRENT, LAYOUT_INLINE, LAYOUT_PLAIN, MAGIC, S_IFDIR, S_IFIFO,
    S_IFLNK, S_IFMT, S_IFREG, SLOT, SUPERBLOCK_AT, SUPERBLOCK_LEN,
};
use crate::content::{Backing, Content};
use crate::error::{Error, Result, show};
use crate::tree::{Entries, Kind, Limits, MAX_SYMLINK, Meta, Mtime, NodeId, Tree};

/// Compression is the only incompatible feature that a plain image may claim: older `mkfs.erofs` sets it always.
const INCOMPAT_ZERO_PADDING: u32 = 1;
const MAX_DIRECTORY: u64 = 1 << 30;

pub fn read_tree(backing: &Arc<Backing>, limits: Limits) -> Result<Tree> {
    let image = Image::open(backing)?;
    let mut tree = Tree::new(limits);
    let root = image.inode(image.root)?;
    if root.mode & S_IFMT != S_IFDIR {
        return Err(image.bad("the root is not a directory"));
    }
    *tree.meta_mut(Tree::ROOT) = root.meta();
    let mut files: HashMap<u64, NodeId> = HashMap::new();
    let mut pending = vec![(root, Tree::ROOT, 1u64)];
    let mut entered = HashSet::from([image.root]);
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

struct Image<'a> {
    backing: &'a Arc<Backing>,
    meta_at: u64,
    root: u64,
    build_time: Mtime,
}

struct Inode {
    mode: u16,
    uid: u32,
    gid: u32,
    mtime: Mtime,
    size: u64,
    /// Where the data that lies in blocks begins.
    data_at: u64,
    /// Where the tail lies that does not, if there is one.
    tail_at: Option<u64>,
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
    fn open(backing: &'a Arc<Backing>) -> Result<Self> {
        let mut image = Self {
            backing,
            meta_at: 0,
            root: 0,
            build_time: Mtime::default(),
        };
        if backing.len() < BLOCK {
            return Err(image.bad("too small"));
        }
        let mut block = vec![0; (BLOCK - SUPERBLOCK_AT) as usize];
        backing.read_exact_at(&mut block, SUPERBLOCK_AT)?;
        let sb = block[..SUPERBLOCK_LEN].to_vec();
        if u32_at(&sb, 0) != MAGIC {
            return Err(image.bad("it has no EROFS superblock"));
        }
        if sb[12] != BLOCK_BITS {
            return Err(image.bad("its blocks are not of 4096 bytes"));
        }
        if u32_at(&sb, 8) & COMPAT_CHECKSUM != 0 {
            block[4..8].fill(0);
            if !crc32c::crc32c(&block) != u32_at(&sb, 4) {
                return Err(image.bad("the checksum of its superblock is wrong"));
            }
        }
        if u32_at(&sb, 80) & !INCOMPAT_ZERO_PADDING != 0 {
            return Err(image.bad("it uses compression or another feature that is not supported"));
        }
        image.root = u64::from(u16_at(&sb, 14));
        image.meta_at = u64::from(u32_at(&sb, 40)) * BLOCK;
        image.build_time = Mtime {
            secs: u64_at(&sb, 24),
            nanos: u32_at(&sb, 32),
        };
        Ok(image)
    }

    fn inode(&self, nid: u64) -> Result<Inode> {
        let at = nid
            .checked_mul(SLOT)
            .and_then(|offset| offset.checked_add(self.meta_at))
            .filter(|at| at.saturating_add(SLOT) <= self.backing.len())
            .ok_or_else(|| self.bad("an inode outside of the image"))?;
        let mut raw = [0; 64];
        self.backing.read_exact_at(&mut raw[..32], at)?;
        let format = u16_at(&raw, 0);
        let extended = format & 1 == 1;
        let len = if extended { 64 } else { 32 };
        if extended {
            if at + 64 > self.backing.len() {
                return Err(self.bad("an inode outside of the image"));
            }
            self.backing.read_exact_at(&mut raw, at)?;
        }
        let (size, uid, gid, mtime) = if extended {
            let mtime = Mtime {
                secs: u64_at(&raw, 32),
                nanos: u32_at(&raw, 40),
            };
            (u64_at(&raw, 8), u32_at(&raw, 24), u32_at(&raw, 28), mtime)
        } else {
            let (uid, gid) = (u16_at(&raw, 24), u16_at(&raw, 26));
            (
                u64::from(u32_at(&raw, 8)),
                uid.into(),
                gid.into(),
                self.build_time,
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
            size,
            data_at: u64::from(u32_at(&raw, 16)) * BLOCK,
            tail_at,
        })
    }

    /// The content of a regular file, by reference unless it is cut in two.
    fn content(&self, inode: &Inode) -> Result<Content> {
        match inode.tail_at {
            None if inode.size == 0 => Ok(Content::bytes(Vec::new())),
            None => Content::range(self.backing, inode.data_at, inode.size),
            Some(tail_at) if inode.size < BLOCK => Content::range(self.backing, tail_at, inode.size),
            Some(_) => Ok(Content::bytes(self.bytes(inode, MAX_DIRECTORY)?)),
        }
    }

    fn bytes(&self, inode: &Inode, limit: u64) -> Result<Vec<u8>> {
        if inode.size > limit || inode.size > self.backing.len() {
            return Err(self.bad("a directory or link that is too long"));
        }
        let tail = match inode.tail_at {
            Some(_) => inode.size % BLOCK,
            None => 0,
        };
        let mut all = Vec::new();
        if inode.size > tail {
            all = Content::range(self.backing, inode.data_at, inode.size - tail)?.read_to_vec(limit)?;
        }
        if let Some(at) = inode.tail_at {
            all.extend(Content::range(self.backing, at, tail)?.read_to_vec(limit)?);
        }
        Ok(all)
    }

    fn entries(&self, dir: &Inode) -> Result<Vec<(Vec<u8>, u64)>> {
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
        Error::Erofs {
            path: self.backing.path().to_owned(),
            why: why.into(),
        }
    }
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}
