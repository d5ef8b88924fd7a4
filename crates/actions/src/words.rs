//! What is asked and answered, as JSON: the words of Atoll's own API, which the actions share with it.
//!
//! What must hold: a request refuses fields that it does not know, and turns into a command of the application or into a fault
//! that names the field; an answer is made of what the application shows. Each describes itself by a schema.

pub mod command;
mod creation;
mod file;
mod life;
mod network;
mod rest;
mod sandbox;
mod saved;

pub use creation::{CreateSandboxRequest, ResourcesRequest};
pub use file::FileView;
pub use life::{ActionName, Idle, IfExists, IsolationName, StateName};
pub use network::{PolicyWords, Ports, SecretUseWords};
pub use rest::{Copies, ForkRequest, PauseRequest, ResumeRequest};
pub use sandbox::{ResourcesView, SandboxView};
pub use saved::{ArtifactView, SaveArtifactRequest, SnapshotRequest, SnapshotView};
