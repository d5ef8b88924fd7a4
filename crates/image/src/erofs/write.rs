//! Writes a tree as an image, or as a layer on one, front to back, hashing as it goes. The whole layout is computed first,
//! so nothing is patched afterwards and the output may be a pipe.

use std::io::Write;
use std::path::Path;

use sha2::{Digest, Sha256};

use super::same::Same;
use super::stack::Stack;
use super::{
    BLOCK, BLOCK_BITS, COMPAT_CHECKSUM, COMPAT_MTIME, DEVICE, DEVICE_ADDRESS_AT, DEVICE_BLOCKS_AT,
    DEVICES_AT, DIRENT, INCOMPAT_DEVICES, INCOMPAT_LAYER, INODE, LAYOUT_INLINE, LAYOUT_PLAIN, MAGIC, S_IFDIR,
    S_IFIFO, S_IFLNK, S_IFREG, SLOT, SUPERBLOCK_AT, SUPERBLOCK_LEN, WIDE_ROOT_AT,
};
use crate::error::{Error, IoContext, Result};
use crate::tree::{Entries, Kind, Node, NodeId, Tree};

/// What was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Written {
    /// SHA-256 of the file, in hex.
    pub digest: String,
    /// Of the file: what a layer lies on is not counted.
    pub size: u64,
    pub inodes: u64,
    /// Extended attributes that the image does not carry.
    pub xattrs_dropped: u64,
}

/// Writes the image to `out`; `progress` hears bytes done and bytes in all, and may stop it by an error.
pub fn write_image(
    tree: &Tree,
    out: &mut dyn Write,
    progress: impl FnMut(u64, u64) -> Result<()>,
) -> Result<Written> {
    write(tree, &Layout::of(tree, On::Nothing)?, out, progress)
}

/// Writes the inodes and directories of a tree, whose data lies in the files that it was read from: a plain image of a few
/// megabytes, for kernels, which look for data in other devices and for nothing else. They mount it with these files, from the
/// top down.
pub fn write_index(tree: &Tree, files: &Stack, out: &mut dyn Write) -> Result<Written> {
    write(tree, &Layout::of(tree, On::Data(files))?, out, |_, _| Ok(()))
}

/// Writes what differs from the image below as a layer on it. `None`: nothing does, and nothing was written.
pub fn write_layer(
    tree: &Tree,
    below: &Stack,
    out: &mut dyn Write,
    progress: impl FnMut(u64, u64) -> Result<()>,
) -> Result<Option<Written>> {
    if !below.takes_another() {
        return Err(Error::Invalid("no layer can lie on this image".into()));
    }
    let same = Same::of(tree, below)?;
    if same.nid(Tree::ROOT).is_some() {
        return Ok(None);
    }
    let layout = Layout::of(tree, On::Image(below, same))?;
    write(tree, &layout, out, progress).map(Some)
}

fn write(
    tree: &Tree,
    layout: &Layout<'_>,
    out: &mut dyn Write,
    mut progress: impl FnMut(u64, u64) -> Result<()>,
) -> Result<Written> {
    let start = layout.start();
    let total = layout.end * BLOCK - start;
    let mut out = Sink {
        out,
        sha: Sha256::new(),
        at: start,
    };
    out.put(&layout.superblock()?)?;
    for place in &layout.places {
        out.pad_to(place.nid * SLOT)?;
        out.put(&place.inode(tree.node(place.node)))?;
        match &tree.node(place.node).kind {
            Kind::Symlink(target) if place.inline() => out.put(target)?,
            Kind::Directory(entries) if place.inline() => out.put(&layout.dirents(tree, place, entries))?,
            Kind::Directory(_) | Kind::Symlink(_) | Kind::File(_) | Kind::Fifo => {}
        }
    }
    let mut buf = vec![0; 1 << 20];
    for index in layout.data_order() {
        let place = &layout.places[index];
        let Data::Blocks { first } = place.data else {
            continue;
        };
        out.pad_to(first * BLOCK)?;
        match &tree.node(place.node).kind {
            Kind::Directory(entries) => out.put(&layout.dirents(tree, place, entries))?,
            Kind::File(content) => content.for_each_piece(&mut buf, |piece| {
                out.put(piece)?;
                progress(out.at - start, total)
            })?,
            Kind::Symlink(target) => out.put(target)?,
            Kind::Fifo => {}
        }
    }
    out.pad_to(start + total)?;
    out.out.flush().doing("write", Path::new("the image"))?;
    progress(total, total)?;
    Ok(Written {
        digest: hex::encode(out.sha.finalize()),
        size: total,
        inodes: layout.places.len() as u64,
        xattrs_dropped: layout.xattrs,
    })
}

struct Sink<'a> {
    out: &'a mut dyn Write,
    sha: Sha256,
    /// The address of what comes next.
    at: u64,
}

impl Sink<'_> {
    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.out.write_all(bytes).doing("write", Path::new("the image"))?;
        self.sha.update(bytes);
        self.at += bytes.len() as u64;
        Ok(())
    }

    fn pad_to(&mut self, offset: u64) -> Result<()> {
        const ZEROS: [u8; BLOCK as usize] = [0; BLOCK as usize];
        debug_assert!(self.at <= offset, "the layout overlaps: {} > {offset}", self.at);
        while self.at < offset {
            let want = ZEROS
                .len()
                .min(usize::try_from(offset - self.at).unwrap_or(usize::MAX));
            self.put(&ZEROS[..want])?;
        }
        Ok(())
    }
}

/// Where one inode and its data go.
struct Place {
    node: NodeId,
    parent: NodeId,
    nid: u64,
    /// Counts from 1; only shown to 32-bit programs.
    ino: u32,
    nlink: u32,
    is_dir: bool,
    size: u64,
    data: Data,
}

#[derive(Clone, Copy)]
enum Data {
    None,
    Inline,
    Blocks {
        first: u64,
    },
    /// In another file.
    Elsewhere {
        first: u64,
    },
}

/// What is there already.
enum On<'a> {
    Nothing,
    /// The image that a layer lies on, and what of the tree is in it.
    Image(&'a Stack, Same),
    /// The files that hold the data. They come behind this one, since a device cannot be at address 0.
    Data(&'a Stack),
}

struct Layout<'a> {
    on: On<'a>,
    /// In the order of their nids.
    places: Vec<Place>,
    /// Index into `places` by node.
    by_node: Vec<u32>,
    /// The first block behind it all.
    end: u64,
    xattrs: u64,
}

const UNPLACED: u32 = u32::MAX;

impl<'a> Layout<'a> {
    fn of(tree: &Tree, on: On<'a>) -> Result<Self> {
        let mut layout = Self {
            on,
            places: Vec::new(),
            by_node: vec![UNPLACED; tree.arena_len()],
            end: 0,
            xattrs: 0,
        };
        // Inodes of one directory lie together: `ls -l` then touches few pages.
        let mut cursor = layout.start() + BLOCK;
        layout.place(tree, Tree::ROOT, Tree::ROOT, &mut cursor)?;
        let mut next = 0;
        while next < layout.places.len() {
            let dir = layout.places[next].node;
            next += 1;
            let Some(entries) = tree.entries(dir) else {
                continue;
            };
            for &child in entries.values() {
                layout.place(tree, child, dir, &mut cursor)?;
            }
        }
        let mut block = cursor.div_ceil(BLOCK);
        for index in layout.data_order() {
            let place = &mut layout.places[index];
            if let Data::Blocks { first } = &mut place.data {
                *first = block;
                block += place.size.div_ceil(BLOCK);
            }
        }
        layout.end = block;
        let mut last = block;
        if let On::Data(files) = layout.on {
            last += files.size() / BLOCK;
            for place in &mut layout.places {
                if let Data::Elsewhere { first } = &mut place.data {
                    *first += block;
                }
            }
        }
        if u32::try_from(last).is_err() {
            return Err(Error::Limit {
                what: "the size of the image".into(),
                limit: u64::from(u32::MAX) * BLOCK,
            });
        }
        Ok(layout)
    }

    /// The address of the file.
    fn start(&self) -> u64 {
        match &self.on {
            On::Image(below, _) => below.size(),
            On::Nothing | On::Data(_) => 0,
        }
    }

    /// The inode below that a node is the same as.
    fn below(&self, id: NodeId) -> Option<u64> {
        match &self.on {
            On::Image(_, same) => same.nid(id),
            On::Nothing | On::Data(_) => None,
        }
    }

    fn place(&mut self, tree: &Tree, id: NodeId, parent: NodeId, cursor: &mut u64) -> Result<()> {
        if self.below(id).is_some() {
            return Ok(());
        }
        let known = self.by_node[id.index()];
        if known != UNPLACED {
            self.places[known as usize].nlink += 1;
            return Ok(());
        }
        let node = tree.node(id);
        self.xattrs += node.meta.xattrs.len() as u64;
        let (size, nlink) = match &node.kind {
            Kind::Directory(entries) => {
                let subdirs = entries
                    .values()
                    .filter(|&&child| tree.entries(child).is_some())
                    .count();
                (dir_size(entries), 2 + subdirs as u32)
            }
            Kind::File(content) => (content.len(), 1),
            Kind::Symlink(target) => (target.len() as u64, 1),
            Kind::Fifo => (0, 1),
        };
        let in_place = match (&self.on, &node.kind) {
            (On::Image(stack, _) | On::Data(stack), Kind::File(content)) if size > 0 => {
                stack.address_of(content)
            }
            _ => None,
        };
        let data = match (&node.kind, in_place) {
            (_, Some(at)) => Data::Elsewhere { first: at / BLOCK },
            (Kind::Directory(_) | Kind::Symlink(_), _) if size <= BLOCK - INODE => Data::Inline,
            (Kind::Directory(_) | Kind::Symlink(_) | Kind::File(_), _) if size > 0 => {
                Data::Blocks { first: 0 }
            }
            _ => Data::None,
        };
        let need = INODE + if let Data::Inline = data { size } else { 0 };
        if *cursor % BLOCK + need > BLOCK {
            *cursor = cursor.next_multiple_of(BLOCK);
        }
        let index = u32::try_from(self.places.len()).unwrap_or(UNPLACED);
        self.by_node[id.index()] = index;
        self.places.push(Place {
            node: id,
            parent,
            nid: *cursor / SLOT,
            ino: index + 1,
            nlink,
            is_dir: tree.entries(id).is_some(),
            size,
            data,
        });
        *cursor = (*cursor + need).next_multiple_of(SLOT);
        Ok(())
    }

    /// Directories first, then the rest, each in the order of their inodes.
    fn data_order(&self) -> Vec<usize> {
        let (dirs, rest): (Vec<usize>, Vec<usize>) =
            (0..self.places.len()).partition(|&index| self.places[index].is_dir);
        dirs.into_iter().chain(rest).collect()
    }

    fn superblock(&self) -> Result<Vec<u8>> {
        let mut block = vec![0; BLOCK as usize];
        let at = SUPERBLOCK_AT as usize;
        let sb = &mut block[at..at + SUPERBLOCK_LEN];
        put(sb, 0, &MAGIC.to_le_bytes());
        put(sb, 8, &(COMPAT_CHECKSUM | COMPAT_MTIME).to_le_bytes());
        sb[12] = BLOCK_BITS;
        let root = self.places[0].nid;
        match &self.on {
            On::Image(below, _) => {
                put(sb, 24, &below.build_time.secs.to_le_bytes());
                put(sb, 32, &below.build_time.nanos.to_le_bytes());
                put(sb, 80, &INCOMPAT_LAYER.to_le_bytes());
                put(sb, WIDE_ROOT_AT, &root.to_le_bytes());
            }
            On::Nothing | On::Data(_) => {
                let root = u16::try_from(root).map_err(|_| Error::Limit {
                    what: "the number of the root inode".into(),
                    limit: u64::from(u16::MAX),
                })?;
                put(sb, 14, &root.to_le_bytes());
            }
        }
        put(sb, 16, &(self.places.len() as u64).to_le_bytes());
        let blocks = self.end - self.start() / BLOCK;
        put(sb, 36, &(blocks as u32).to_le_bytes());
        let table = match &self.on {
            On::Nothing => None,
            On::Image(below, _) => Some((*below, 0)),
            On::Data(files) => {
                put(sb, 80, &INCOMPAT_DEVICES.to_le_bytes());
                Some((*files, self.end))
            }
        };
        if let Some((files, above)) = table {
            put(sb, 86, &(files.table().len() as u16).to_le_bytes());
            put(sb, 88, &(DEVICES_AT as u16 / DEVICE as u16).to_le_bytes());
            let slots = block[DEVICES_AT as usize..].chunks_exact_mut(DEVICE);
            for (slot, (digest, bytes, start)) in slots.zip(files.table()) {
                put(slot, 0, digest.as_bytes());
                put(slot, DEVICE_BLOCKS_AT, &((bytes / BLOCK) as u32).to_le_bytes());
                put(
                    slot,
                    DEVICE_ADDRESS_AT,
                    &((above + start / BLOCK) as u32).to_le_bytes(),
                );
            }
        }
        // Seeded with ones and not inverted at the end, unlike the usual CRC-32C.
        let checksum = !crc32c::crc32c(&block[at..]);
        put(&mut block[at..], 4, &checksum.to_le_bytes());
        Ok(block)
    }

    /// The directory's data: each block has its entries first, then their names; sorted by bytes, `.` and `..` included.
    fn dirents(&self, tree: &Tree, place: &Place, entries: &Entries) -> Vec<u8> {
        let mut data = Vec::with_capacity(place.size as usize);
        let named = with_dots(place.node, place.parent, entries);
        for group in groups(&named) {
            data.resize(data.len().next_multiple_of(BLOCK as usize), 0);
            let mut name_at = group.len() * DIRENT;
            for (name, id) in group {
                let nid = match self.below(*id) {
                    Some(nid) => nid,
                    None => self.places[self.by_node[id.index()] as usize].nid,
                };
                data.extend_from_slice(&nid.to_le_bytes());
                data.extend_from_slice(&(name_at as u16).to_le_bytes());
                data.extend_from_slice(&[file_type(&tree.node(*id).kind), 0]);
                name_at += name.len();
            }
            for (name, _) in group {
                data.extend_from_slice(name);
            }
        }
        data
    }
}

impl Place {
    fn inline(&self) -> bool {
        matches!(self.data, Data::Inline)
    }

    fn inode(&self, node: &Node) -> [u8; INODE as usize] {
        let mut inode = [0; INODE as usize];
        let (layout, block) = match self.data {
            Data::Inline => (LAYOUT_INLINE, 0),
            Data::Blocks { first } | Data::Elsewhere { first } => (LAYOUT_PLAIN, first as u32),
            Data::None => (LAYOUT_PLAIN, 0),
        };
        let format = match node.kind {
            Kind::Directory(_) => S_IFDIR,
            Kind::File(_) => S_IFREG,
            Kind::Symlink(_) => S_IFLNK,
            Kind::Fifo => S_IFIFO,
        };
        put(&mut inode, 0, &(1 | layout << 1).to_le_bytes());
        put(&mut inode, 4, &(format | node.meta.mode & 0o7777).to_le_bytes());
        put(&mut inode, 8, &self.size.to_le_bytes());
        put(&mut inode, 16, &block.to_le_bytes());
        put(&mut inode, 20, &self.ino.to_le_bytes());
        put(&mut inode, 24, &node.meta.uid.to_le_bytes());
        put(&mut inode, 28, &node.meta.gid.to_le_bytes());
        put(&mut inode, 32, &node.meta.mtime.secs.to_le_bytes());
        put(&mut inode, 40, &node.meta.mtime.nanos.to_le_bytes());
        put(&mut inode, 44, &self.nlink.to_le_bytes());
        inode
    }
}

fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    bytes[at..at + value.len()].copy_from_slice(value);
}

fn file_type(kind: &Kind) -> u8 {
    match kind {
        Kind::File(_) => 1,
        Kind::Directory(_) => 2,
        Kind::Fifo => 5,
        Kind::Symlink(_) => 7,
    }
}

type Named<'a> = (&'a [u8], NodeId);

fn with_dots(this: NodeId, parent: NodeId, entries: &Entries) -> Vec<Named<'_>> {
    let mut all: Vec<Named<'_>> = Vec::with_capacity(entries.len() + 2);
    all.push((b".", this));
    all.push((b"..", parent));
    all.extend(entries.iter().map(|(name, id)| (&**name, *id)));
    all.sort_by_key(|(name, _)| *name);
    all
}

/// Splits sorted entries into what fits into one block each.
fn groups<'a, 'b>(named: &'a [Named<'b>]) -> Vec<&'a [Named<'b>]> {
    let mut groups = Vec::new();
    let (mut start, mut used) = (0, 0);
    for (index, (name, _)) in named.iter().enumerate() {
        let need = DIRENT + name.len();
        if used + need > BLOCK as usize {
            groups.push(&named[start..index]);
            (start, used) = (index, 0);
        }
        used += need;
    }
    groups.push(&named[start..]);
    groups
}

fn dir_size(entries: &Entries) -> u64 {
    let named = with_dots(Tree::ROOT, Tree::ROOT, entries);
    let groups = groups(&named);
    let last: usize = groups
        .last()
        .map_or(0, |group| group.iter().map(|(name, _)| DIRENT + name.len()).sum());
    (groups.len() as u64 - 1) * BLOCK + last as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::content::Content;
    use crate::tree::Meta;

    #[test]
    fn files_beyond_4_gib_have_all_their_bits() {
        let dir = tempfile::tempdir().unwrap();
        let sparse = dir.path().join("sparse");
        let len = (4 << 30) + 5000;
        std::fs::File::create(&sparse).unwrap().set_len(len).unwrap();
        let mut tree = Tree::default();
        tree.put_file(b"big", Meta::root(0o644), Content::whole_file(&sparse).unwrap())
            .unwrap();
        tree.put_file(b"last", Meta::root(0o644), Content::bytes(*b"end"))
            .unwrap();
        let layout = Layout::of(&tree, On::Nothing).unwrap();
        let [_, big, last] = &layout.places[..] else {
            panic!("three inodes")
        };
        assert_eq!(big.inode(tree.node(big.node))[8..16], len.to_le_bytes());
        let (Data::Blocks { first }, Data::Blocks { first: next }) = (big.data, last.data) else {
            panic!("both in blocks")
        };
        assert_eq!(next - first, len.div_ceil(BLOCK));
    }
}
