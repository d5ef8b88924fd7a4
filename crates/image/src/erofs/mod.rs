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

mod read;
mod write;

pub use read::read_tree;
pub use write::{Written, write_image};

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

const LAYOUT_PLAIN: u16 = 0;
const LAYOUT_INLINE: u16 = 2;

const S_IFIFO: u16 = 0o010_000;
const S_IFDIR: u16 = 0o040_000;
const S_IFREG: u16 = 0o100_000;
const S_IFLNK: u16 = 0o120_000;
const S_IFMT: u16 = 0o170_000;

#[cfg(test)]
mod tests;
