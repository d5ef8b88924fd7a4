//! EROFS images: the one form in which every runtime reads a template.
//!
//! We write the plainest form there is: no compression, 64-byte inodes, the data of regular files in whole blocks
//! (gVisor maps them into the guest and refuses any other layout), small directories and symbolic links behind their
//! inode (gVisor and Linux both read those, and it saves a block each). The same tree gives the same bytes: no time of
//! building, no random id.
//!
//! Extended attributes are left out on purpose: gVisor answers ENOTSUP for every inode that has one.
//!
//! ```text
//! block 0          1 ...                       ...                    ...
//! | superblock     | inodes, small dirs, links | large directories    | data of files |
//! ```
//!
//! What differs little from an image is a layer on it: a file that holds what changed, with numbers that lead into the
//! files below for all the rest. See [`stack`] for how several files make one image, and [`same`] for what changed means.

mod read;
mod same;
mod stack;
mod write;

pub use read::{read_stack, read_tree};
pub use stack::{MAX_FILES, Stack, lower_of};
pub use write::{Written, write_image, write_index, write_layer};

const MAGIC: u32 = 0xe0f5_e1e2;
const SUPERBLOCK_AT: u64 = 1024;
const SUPERBLOCK_LEN: usize = 128;
const BLOCK: u64 = 4096;
const BLOCK_BITS: u8 = 12;
const SLOT: u64 = 32;
const INODE: u64 = 64;
const DIRENT: usize = 12;

const COMPAT_CHECKSUM: u32 = 1;
const COMPAT_MTIME: u32 = 2;

/// Compression is the only incompatible feature that a plain image may claim: older `mkfs.erofs` sets it always.
const INCOMPAT_ZERO_PADDING: u32 = 1;
/// What a layer claims: a device table, which is EROFS's, and a bit that is nobody's but ours, since no other implementation
/// looks for inodes in a device. So nobody mounts a layer alone by mistake.
const INCOMPAT_LAYER: u32 = 1 << 31 | INCOMPAT_DEVICES;
const INCOMPAT_DEVICES: u32 = 1 << 3;

/// The device table lies behind the superblock, in the same block and under the same checksum.
const DEVICE: usize = 128;
const DEVICES_AT: u64 = SUPERBLOCK_AT + SUPERBLOCK_LEN as u64;
const DEVICE_BLOCKS_AT: usize = 64;
const DEVICE_ADDRESS_AT: usize = 68;
/// Where in the superblock the number of a layer's root is: too large for the place that plain images have for it. EROFS's
/// 48-bit layout has it there too.
const WIDE_ROOT_AT: usize = 112;

const LAYOUT_PLAIN: u16 = 0;
const LAYOUT_INLINE: u16 = 2;

const S_IFIFO: u16 = 0o010_000;
const S_IFDIR: u16 = 0o040_000;
const S_IFREG: u16 = 0o100_000;
const S_IFLNK: u16 = 0o120_000;
const S_IFMT: u16 = 0o170_000;

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

#[cfg(test)]
mod tests;
