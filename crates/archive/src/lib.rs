//! Directory trees as tar streams, both ways, on the host, safe against whatever is in them.
//!
//! ```text
//!   a jail's writable layer ──┐                                     ┌──> the layer of another jail
//!                             ├── pack ──> PAX tar stream ── unpack ┤
//!   a volume ─────────────────┘                                     └──> a volume
//! ```
//! Two dialects of one format, told apart by [`Dialect`]: a *layer* also says what overlayfs has to know (whiteouts as
//! device 0:0, opaque and moved directories as `SCHILY.xattr.trusted.overlay.*`), a *plain* tree is what any `tar` reads.
//! Both keep names of any bytes, modes, ids, times to the nanosecond, symlinks, hard links and holes. What stands in a header
//! is read by [`format`], which others who read archives use as well.
//!
//! What must hold:
//! - The tree is hostile, and may change under our hands (a volume in use). Every step goes from an open directory to one
//!   of its entries without following a link or leaving the filesystem; nothing is opened for reading that was not
//!   found to be a plain file. So no name and no race can make us read or write outside the tree, or hang on a FIFO.
//! - The stream is hostile. Names are bounded and may not climb, nothing is allocated because a length says so, device
//!   nodes are not made (but for whiteouts, which are none). A stream that ends early is an error, not a smaller tree.
//! - Memory grows with the number of names at most, never with the length of paths: the names of the directories being
//!   read, one name for each directory that was unpacked (its time is set last), one for each file of several names.
//! - How much a stream may make is said by [`Budget`] where the place that it goes to has no limit of its own.
//! - The same tree gives the same bytes, so that a store can see what did not change.

mod fill;
pub mod format;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod header;
mod paths;
mod sparse;
#[cfg(test)]
mod tests;
mod walk;

use std::io;

pub use fill::{unpack, unpack_within};
pub use sparse::{Map as SparseMap, read_map as read_sparse_map};
pub use walk::pack;

/// What the stream is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// The upper directory of an overlay.
    Layer {
        /// Where this mount of overlayfs keeps its notes.
        notes: Notes,
        /// Entries of the tree's root that belong to whoever builds the overlay; left out of the stream, and passed over
        /// when they stand in it.
        not_ours: &'static [&'static str],
    },
    /// The same, unpacked onto what such an overlay shows, from inside: what the layer hides is removed. Mount points are
    /// passed over, with all that is below. Not for packing.
    Applied { not_ours: &'static [&'static str] },
    /// Just files. Sockets, FIFOs and devices are passed over.
    Plain,
}

impl Dialect {
    fn not_ours(self, name: &[u8]) -> bool {
        match self {
            Self::Layer { not_ours, .. } | Self::Applied { not_ours } => {
                not_ours.iter().any(|ours| ours.as_bytes() == name)
            }
            Self::Plain => false,
        }
    }
}

/// The namespace of overlayfs' extended attributes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Notes {
    Trusted,
    /// Of a mount made by an ordinary user. It does not follow moved directories.
    User,
}

impl Notes {
    fn name(self, what: &str) -> String {
        match self {
            Self::Trusted => format!("trusted.overlay.{what}"),
            Self::User => format!("user.overlay.{what}"),
        }
    }
}

/// How ids in the stream relate to those in the tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ids {
    /// They are the same.
    Same,
    /// `first` in the tree is 0 in the stream; there are `count`. What lies outside becomes [`NOBODY`].
    Range { first: u32, count: u32 },
    /// Everything in the stream belongs to 0, and in the tree to whoever unpacks it.
    Own,
}

/// The id of what belongs to nobody who could be named.
pub const NOBODY: u32 = 65534;

impl Ids {
    fn to_stream(self, id: u32) -> u32 {
        match self {
            Self::Same => id,
            Self::Range { first, count } => id.checked_sub(first).filter(|id| *id < count).unwrap_or(NOBODY),
            Self::Own => 0,
        }
    }

    /// `None`: leave it as it is.
    fn to_tree(self, id: u32) -> Option<u32> {
        match self {
            Self::Same => Some(id),
            Self::Range { first, count } => Some(first + if id < count { id } else { NOBODY.min(count - 1) }),
            Self::Own => None,
        }
    }
}

/// What may still be unpacked. One may be spent by several streams, which then have so much together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget {
    /// Sizes of files, holes included: whoever reads them reads zeros.
    pub bytes: u64,
    /// Files, links and directories, those too that are made because something lies in them.
    pub entries: u64,
    /// Levels of directories. Whoever walks or removes the tree may do so with a stack.
    pub depth: usize,
    /// For the eyes of whoever unpacks it: no setuid, setgid or sticky bits, and the owner can read and remove it all,
    /// whatever the stream says.
    pub private: bool,
}

impl Budget {
    /// For places that are bounded themselves.
    const ENDLESS: Self = Self {
        bytes: u64::MAX,
        entries: u64::MAX,
        depth: usize::MAX,
        private: false,
    };

    fn spend(left: &mut u64, much: u64, what: &str) -> io::Result<()> {
        *left = left.checked_sub(much).ok_or_else(|| too_much(what))?;
        Ok(())
    }
}

/// What went through.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    pub entries: u64,
    /// Contents of files, holes left out.
    pub bytes: u64,
    pub skipped: Skipped,
}

/// What was there and has no place in the stream or tree.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Skipped {
    pub sockets: u64,
    pub fifos: u64,
    pub devices: u64,
    /// A path longer than [`LONGEST_PATH`], with all that is below.
    pub too_long: u64,
    /// A mount point, with all that is below.
    pub mounts: u64,
}

impl Skipped {
    pub fn total(&self) -> u64 {
        self.sockets + self.fifos + self.devices + self.too_long + self.mounts
    }
}

/// Of a whole path in the stream. No program can name such a one in a single call (that ends at 4096), but a directory
/// can be entered step by step; and a path stands before each entry, so an endless one would make an endless stream.
pub const LONGEST_PATH: usize = 32 * 1024;
const LONGEST_NAME: usize = 255;
/// Larger than any file that could be stored; keeps all sums far from overflow.
const LARGEST_FILE: u64 = 1 << 50;
/// Of a symlink's target; the kernel's limit.
const LONGEST_TARGET: usize = 4095;

fn too_much(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::FileTooLarge, what)
}

/// Whether a stream was refused because it would have gone beyond its [`Budget`].
pub fn is_too_much(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::FileTooLarge
}

fn invalid(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.into())
}

/// How a path is shown in a message.
fn shown(path: &[u8]) -> String {
    let text = String::from_utf8_lossy(&path[..path.len().min(200)]);
    text.escape_debug().to_string()
}

/// Says which path an error is about.
fn at(path: &[u8]) -> impl Fn(rustix::io::Errno) -> io::Error + '_ {
    move |error| about(path, &error.into())
}

fn about(path: &[u8], error: &io::Error) -> io::Error {
    // A name that leads through a link is the stream's fault (the kind of that error has no stable name).
    let kind = match error.raw_os_error() {
        Some(code) if code == rustix::io::Errno::LOOP.raw_os_error() => io::ErrorKind::InvalidData,
        _ => error.kind(),
    };
    io::Error::new(kind, format!("{}: {error}", shown(path)))
}

/// Whether the disk, or what a size limit left of it, was full.
pub fn is_full(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
    )
}
