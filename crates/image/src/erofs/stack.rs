//! One image in several files: a plain one below, and layers on it.
//!
//! ```text
//! address   0            a                b                end
//!           | base       | layer          | layer, the top |
//!             whole tree   what changed     what changed then
//! ```
//! The files are one address space, each above the one below it, and all inode numbers and block addresses are meant in it.
//! So a directory of the top names an unchanged file, or a whole unchanged subtree, by the number that it has had since the
//! file below was written, and a file whose owner changed has its data where it was. Nothing is merged when it is read: the
//! root of the top is the root of it all.
//!
//! The top lists those below it in a device table, from the top down, by digest, size and address. Its own digest thereby
//! stands for all of them. That is the order in which files are listed everywhere.
//!
//! What must hold: no object lies in two files, so that whoever maps them needs no more than the right one. The files may
//! come from elsewhere or be torn: a stack whose files are not those that its top means is refused, and so is an address
//! outside of them. `..` of a directory that is unchanged may be a number that its parent had once; nobody goes by it.

use std::sync::Arc;

use super::{
    BLOCK, BLOCK_BITS, COMPAT_CHECKSUM, DEVICE, DEVICE_ADDRESS_AT, DEVICE_BLOCKS_AT, DEVICES_AT,
    INCOMPAT_LAYER, INCOMPAT_ZERO_PADDING, MAGIC, SUPERBLOCK_AT, SUPERBLOCK_LEN, WIDE_ROOT_AT, u16_at,
    u32_at, u64_at,
};
use crate::content::{Backing, Content};
use crate::error::{Error, Result};
use crate::tree::Mtime;

/// How many files an image may have: all of them fit into the table of an index ([`super::write_index`]), whose place is the
/// first block.
pub const MAX_FILES: usize = (BLOCK as usize - DEVICES_AT as usize) / DEVICE;

/// The files of an image.
#[derive(Debug)]
pub struct Stack {
    /// From the top down.
    files: Vec<File>,
    pub(super) meta_at: u64,
    pub(super) root: u64,
    pub(super) build_time: Mtime,
}

#[derive(Debug)]
struct File {
    digest: String,
    start: u64,
    backing: Arc<Backing>,
}

impl Stack {
    /// The files from the top down, each with its digest; that they have these is for the caller to know.
    pub fn open(files: Vec<(String, Arc<Backing>)>) -> Result<Self> {
        let Some((_, top)) = files.first() else {
            return Err(Error::Invalid("an image of no files".into()));
        };
        let sb = Superblock::read(top)?;
        let (top, count) = (Arc::clone(top), files.len() - 1);
        if sb.lower.len() != count {
            let why = format!("it lies on {} others, and there are {count}", sb.lower.len());
            return Err(bad(&top, &why));
        }
        let mut start = 0;
        let mut placed = Vec::with_capacity(files.len());
        for (index, (digest, backing)) in files.into_iter().enumerate().rev() {
            if let Some(lower) = index.checked_sub(1).map(|index| &sb.lower[index])
                && (lower.digest != digest
                    || lower.bytes != backing.len()
                    || lower.start != start
                    || lower.bytes == 0)
            {
                return Err(bad(&top, "one of those that it lies on is another one, or torn"));
            }
            let end = backing.len().checked_add(start);
            placed.push(File {
                digest,
                start,
                backing,
            });
            start = end
                .filter(|end| end.div_ceil(BLOCK) <= u64::from(u32::MAX))
                .ok_or_else(|| bad(&top, "too large"))?;
        }
        placed.reverse();
        Ok(Self {
            files: placed,
            meta_at: sb.meta_at,
            root: sb.root,
            build_time: sb.build_time,
        })
    }

    /// A plain image that has no name.
    pub(super) fn alone(backing: &Arc<Backing>) -> Result<Self> {
        Self::open(vec![(String::new(), Arc::clone(backing))])
    }

    /// The digest of the top, which stands for them all.
    pub fn digest(&self) -> &str {
        &self.files[0].digest
    }

    /// The size of all files together.
    pub fn size(&self) -> u64 {
        self.files[0].start + self.files[0].backing.len()
    }

    /// Whether one more may lie on it. One that others wrote may not be as we need it.
    pub(crate) fn takes_another(&self) -> bool {
        self.files.len() < MAX_FILES && self.meta_at == 0 && self.size().is_multiple_of(BLOCK)
    }

    /// The plain image that all others lie on.
    pub(crate) fn lowest(&self) -> Result<Self> {
        let lowest = self
            .files
            .last()
            .map(|file| (file.digest.clone(), Arc::clone(&file.backing)));
        Self::open(lowest.into_iter().collect())
    }

    /// Digest, size and address of each, from the top down.
    pub(super) fn table(&self) -> impl ExactSizeIterator<Item = (&str, u64, u64)> {
        let files = self.files.iter();
        files.map(|file| (file.digest.as_str(), file.backing.len(), file.start))
    }

    /// The file that an address lies in, and where in it.
    fn find(&self, at: u64) -> (&Arc<Backing>, u64) {
        let file = self.files.iter().find(|file| at >= file.start);
        // The last begins at 0.
        let file = file.unwrap_or(&self.files[0]);
        (&file.backing, at.saturating_sub(file.start))
    }

    /// What lies there, as far as it lies in one file.
    pub(super) fn range(&self, at: u64, len: u64) -> Result<Content> {
        let (backing, at) = self.find(at);
        Content::range(backing, at, len)
    }

    /// How much lies there in the same file, from there to its end.
    pub(super) fn rest(&self, at: u64) -> u64 {
        let (backing, at) = self.find(at);
        backing.len().saturating_sub(at)
    }

    /// Fills the buffer with what lies there.
    pub(super) fn read(&self, buf: &mut [u8], at: u64) -> Result<()> {
        let (backing, at) = self.find(at);
        match at.checked_add(buf.len() as u64) {
            Some(end) if end <= backing.len() => backing.read_exact_at(buf, at),
            _ => Err(self.bad("something outside of the image")),
        }
    }

    /// Where content lies in this image, if it does, and in whole blocks.
    pub(super) fn address_of(&self, content: &Content) -> Option<u64> {
        let (backing, offset) = content.file_range()?;
        let file = self
            .files
            .iter()
            .find(|file| Arc::ptr_eq(&file.backing, backing))?;
        (file.start + offset)
            .is_multiple_of(BLOCK)
            .then_some(file.start + offset)
    }

    pub(super) fn bad(&self, why: &str) -> Error {
        bad(&self.files[0].backing, why)
    }
}

/// The digests of the files that an image lies on, from the top down; none for a plain one.
pub fn lower_of(top: &Backing) -> Result<Vec<String>> {
    let lower = Superblock::read(top)?.lower;
    Ok(lower.into_iter().map(|lower| lower.digest).collect())
}

struct Superblock {
    meta_at: u64,
    root: u64,
    build_time: Mtime,
    lower: Vec<Lower>,
}

struct Lower {
    digest: String,
    bytes: u64,
    start: u64,
}

impl Superblock {
    fn read(file: &Backing) -> Result<Self> {
        if file.len() < BLOCK {
            return Err(bad(file, "too small"));
        }
        let mut block = vec![0; (BLOCK - SUPERBLOCK_AT) as usize];
        file.read_exact_at(&mut block, SUPERBLOCK_AT)?;
        let sb = block[..SUPERBLOCK_LEN].to_vec();
        if u32_at(&sb, 0) != MAGIC {
            return Err(bad(file, "it has no EROFS superblock"));
        }
        if sb[12] != BLOCK_BITS {
            return Err(bad(file, "its blocks are not of 4096 bytes"));
        }
        let layer = u32_at(&sb, 80) == INCOMPAT_LAYER;
        if layer || u32_at(&sb, 8) & COMPAT_CHECKSUM != 0 {
            block[4..8].fill(0);
            if !crc32c::crc32c(&block) != u32_at(&sb, 4) {
                return Err(bad(file, "the checksum of its superblock is wrong"));
            }
        }
        if !layer && u32_at(&sb, 80) & !INCOMPAT_ZERO_PADDING != 0 {
            return Err(bad(
                file,
                "it uses compression or another feature that is not supported",
            ));
        }
        let mut read = Self {
            meta_at: u64::from(u32_at(&sb, 40)) * BLOCK,
            root: u64::from(u16_at(&sb, 14)),
            build_time: Mtime {
                secs: u64_at(&sb, 24),
                nanos: u32_at(&sb, 32),
            },
            lower: Vec::new(),
        };
        if layer {
            read.root = u64_at(&sb, WIDE_ROOT_AT);
            read.devices(file, &block, usize::from(u16_at(&sb, 86)), u16_at(&sb, 88))?;
        }
        Ok(read)
    }

    /// `block` begins with the superblock.
    fn devices(&mut self, file: &Backing, block: &[u8], count: usize, at: u16) -> Result<()> {
        let fits = (1..MAX_FILES).contains(&count) && u64::from(at) * DEVICE as u64 == DEVICES_AT;
        if !fits || self.meta_at != 0 {
            return Err(bad(file, "a table of devices that is not supported"));
        }
        for slot in block[SUPERBLOCK_LEN..].chunks_exact(DEVICE).take(count) {
            let tag = std::str::from_utf8(&slot[..DEVICE_BLOCKS_AT]).unwrap_or_default();
            // It will be part of a path.
            if !crate::store::is_digest(tag) {
                return Err(bad(file, "it lies on something that has no digest"));
            }
            self.lower.push(Lower {
                digest: tag.to_owned(),
                bytes: u64::from(u32_at(slot, DEVICE_BLOCKS_AT)) * BLOCK,
                start: u64::from(u32_at(slot, DEVICE_ADDRESS_AT)) * BLOCK,
            });
        }
        Ok(())
    }
}

fn bad(file: &Backing, why: &str) -> Error {
    Error::Erofs {
        path: file.path().to_owned(),
        why: why.into(),
    }
}
