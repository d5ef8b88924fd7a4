//! Sandboxes: their rows with idempotency keys and last uses, the times that they ran, secrets, network totals, artifacts.
//!
//! What is committed together:
//! - The row of a sandbox, its labels, its idempotency key, the volumes that it sees ([`crate::saved`]), the removal of hidden
//!   snapshots that its record does not name any more ([`crate::saved`]), and the facts of the change.
//! - The quota of a project and the row that is counted against it: the limit is exact, however many are created at once.
//! - The facts of a sandbox's starts and ends, and of what it used, and the rows of its instances.
//! - A secret and its facts; an artifact and its facts. What the network has carried is added up alone.
//!
//! What is kept in front of it, and how that stays true:
//! - A server holds the row of each live sandbox (`Cell` in `atoll-sandboxes`) and replaces it by the row that a write gives
//!   back. A row that changed elsewhere is found out by its version: the write is refused with
//!   [`Error::VersionConflict`](crate::Error::VersionConflict) and nothing is written.
//! - The broker holds every secret, opened. It is told after the commit by whoever changed one; other servers would learn of
//!   it from the ledger (`secret.set`, `secret.rotated`, `secret.deleted`).
//! - Last uses are gathered in memory and written later. [`SandboxRowStore::due_sandboxes`] takes those of its own server into
//!   account; a sandbox is used through the server that runs it.
//! - [`SandboxRowStore::live_sandboxes`] and [`SandboxRowStore::due_sandboxes`] are of all projects, and whoever reads them takes
//!   them for its own: rows do not say yet which server runs a sandbox.
//!
//! What the locks of callers protect:
//! - `Cell::row` lets decisions on one sandbox happen one after the other on the server that runs it. That no two of them both
//!   win is the version's doing.
//! - `secret_lock` orders the commit of a secret and what the broker is told of it, in one server.
//! - `artifact_lock` keeps the bytes of an artifact from being removed between [`ArtifactStore::digest_in_use`] and a new row
//!   with the same digest. It is good for one server, whose disk the bytes are on.

mod artifacts;
mod instances;
mod network;
mod rows;
mod secrets;

pub use artifacts::{ArtifactKind, ArtifactRow, ArtifactStore};
pub use instances::{InstanceQuery, InstanceRow, InstanceStore};
pub use network::{NetworkTotal, NetworkUsageStore};
pub use rows::{Idempotency, Inserted, NewSandbox, SandboxQuery, SandboxRow, SandboxRowStore};
pub use secrets::{SecretRow, SecretStore};

/// All that is remembered of sandboxes.
pub trait SandboxStore:
    SandboxRowStore + InstanceStore + SecretStore + NetworkUsageStore + ArtifactStore
{
}

impl<T: SandboxRowStore + InstanceStore + SecretStore + NetworkUsageStore + ArtifactStore> SandboxStore
    for T
{
}
