//! Saved state: snapshots, volumes, and what a project has on disk. The bytes lie elsewhere, by id.
//!
//! What is committed together:
//! - The hidden snapshot of a sandbox and the row that rests on it ([`SnapshotStore::commit_saved`]), with the facts of both.
//! - A snapshot or a volume and its facts. Whether a volume is in use is looked at in the commit that deletes it; who uses it
//!   is written with the sandbox's row ([`crate::sandboxes`]). So the two domains are one database.
//!
//! What is kept in front of it, and how that stays true: nothing. Rows are read where they are needed.
//!
//! What the locks of callers protect:
//! - `volume_lock` keeps a volume from being let go on the host that was just attached there. It protects mounts of one host,
//!   not rows.
//! - A server's list of unfinished snapshots keeps bytes that have no row yet from being collected as garbage. It is good for
//!   one server, whose vault they are in.

mod snapshots;
mod volumes;

pub use snapshots::{ProjectStorage, SnapshotRow, SnapshotStore};
pub use volumes::{Attachment, VolumeRow, VolumeState, VolumeStore};

/// All that is remembered of saved state.
pub trait SavedStore: SnapshotStore + VolumeStore {}

impl<T: SnapshotStore + VolumeStore> SavedStore for T {}
