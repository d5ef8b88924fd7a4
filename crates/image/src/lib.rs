//! Templates: immutable root filesystems as EROFS images, made from Debian packages, OCI images or Dockerfiles.
//!
//! Everything starts at [`Templates::open`]. A build reads what it is made from into a [`Tree`] in memory (names and
//! metadata; contents stay where they are), edits it there, and writes it out once as an image named by its own digest.
//! Nothing from a package, layer or archive is ever unpacked onto the host's filesystem.
//!
//! ```text
//! mmdebstrap ──┐                                       ┌─> blobs/<sha256>.erofs
//! OCI layers ──┼─ tar ─> Tree ─ edits, whiteouts ──────┤   manifests/<id>.json
//! Dockerfile ──┘          ^                            └─> names/<name>
//!                         └── an image that exists (FROM a template): then what differs is a layer on it
//! ```

//!
//! | to | call |
//! |---|---|
//! | build from Debian packages (the default template: [`DebianOptions::base`]) | [`Templates::build_debian`] |
//! | build from a registry, an OCI layout or `docker save` | [`Templates::build_oci`] |
//! | build from a Dockerfile, with sandboxes lent by a [`StepRunner`] | [`Templates::build_dockerfile`] |
//! | see as a project does, find, list, name, remove, share, check | [`Templates::of`], [`resolve`](Templates::resolve), [`list`](Templates::list), [`inspect`](Templates::inspect), [`name`](Templates::name), [`delete`](Templates::delete), [`share`](Templates::share), [`unshare`](Templates::unshare), [`prune`](Templates::prune), [`verify`](Templates::verify) |
//! | mount a template | [`Templates::image_files`], [`Templates::kernel_files`] |
//! | carry the guest agent into a sandbox | [`agent_image`] |
//!
//! Builds are async, cancel-safe, and report to a [`Progress`]; everything else blocks briefly on the disk.

mod agent;
mod content;
mod debian;
mod dockerfile;
mod erofs;
mod error;
#[cfg(test)]
mod fixture;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod layer;
mod machine;
mod oci;
mod progress;
mod store;
mod tarball;
mod tree;

pub use agent::{AGENT_PATH, agent_image};
pub use content::{Backing, Content};
pub use debian::{BASE_PACKAGES, DebianOptions, Installer};
pub use dockerfile::{
    BuildSandbox, Command, Copy, Dockerfile, DockerfileOptions, Instruction, Output, RunCommand, Source,
    Stage, Step, StepRunner, parse_dockerfile,
};
pub use erofs::{
    MAX_FILES, Stack, Written, lower_of, read_stack, read_tree, write_image, write_index, write_layer,
};
pub use error::{Error, Result};
pub use layer::{LayerReport, Whiteouts, apply as apply_layer};
pub use oci::{ImageConfig, ImageSource, Login, OciOptions, Reach};
pub use progress::{Progress, Quiet, Update};
pub use store::{Listed, Needed, Needs, Pruned, Recipe, Room, Scratch, Settings, Templates, check_name};
pub use tree::{Entries, Kind, LastLink, Limits, Meta, Mtime, Node, NodeId, Tree};
