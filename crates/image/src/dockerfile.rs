//! Templates from Dockerfiles.
//!
//! Only `RUN` needs a sandbox; everything else edits the tree in memory. The application lends sandboxes through
//! [`StepRunner`]: a step gets a fresh one on the image of the state so far, and what it changed there comes back as a tar
//! archive. Nothing of the base is read again but its inodes: what a state adds becomes a layer on it. States are kept in the store's cache under a key of all that led to them (base image, instructions, digests
//! of copied files, environment), so a step that was run before is not run again.
//!
//! ```text
//! state ── ENV, WORKDIR, USER, COPY, ADD ──> edited tree ── RUN: image ─> sandbox ─> tar ─> tree ──> state
//!                                                             └── key known? ── image from the cache ──┘
//! ```

mod build;
mod copy;
pub(crate) mod expand;
mod parse;
pub(crate) mod pattern;
mod state;
#[cfg(test)]
mod tests;
mod transfer;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use async_trait::async_trait;
use atoll_types::{NetworkPolicy, Timestamp};

pub use parse::{Command, Copy, Dockerfile, Instruction, Source, Stage, Step, parse as parse_dockerfile};

use crate::layer::Whiteouts;
use crate::oci::Login;

#[derive(Debug, Clone)]
pub struct DockerfileOptions {
    /// What the template is called.
    pub name: String,
    /// The directory that COPY and ADD read from.
    pub context: PathBuf,
    /// The Dockerfile's text. Whoever received the context has read it, with care for what its name may point to.
    pub dockerfile: String,
    /// Values for `ARG`.
    pub args: BTreeMap<String, String>,
    /// The stage to build; the last one if not given.
    pub target: Option<String>,
    /// Run ENTRYPOINT and CMD as the template's start command.
    pub start: bool,
    /// Run every step again.
    pub no_cache: bool,
    /// What steps may reach, as the runner sees to it; nothing unless said. A step that may reach something else is
    /// another step.
    pub network: Option<NetworkPolicy>,
    /// For base images from a registry; it should say which, because the Dockerfile names them.
    pub login: Option<Login>,
    pub now: Timestamp,
}

/// Lends sandboxes to a build.
#[async_trait]
pub trait StepRunner: Send + Sync {
    /// Starts a sandbox on an image of the store, given by its digest. An error is a sentence for people.
    async fn start(&self, image: &str) -> Result<Box<dyn BuildSandbox>, String>;
}

/// Where a step's output goes, piece by piece.
pub type Output<'a> = dyn Fn(&[u8]) + Send + Sync + 'a;

/// One sandbox for one `RUN`. Dropping it must end it, as a cancelled build does.
#[async_trait]
pub trait BuildSandbox: Send {
    /// Runs a command to its end and returns its exit code. Its output goes to `output` as it comes.
    async fn run(&mut self, command: RunCommand, output: &Output<'_>) -> Result<i32, String>;

    /// Writes what differs from the image as a plain tar archive to a file that does not exist yet, and says how it tells what
    /// is gone. Mounts (`/proc`, `/sys`, `/dev`, `/.atoll`, `/tmp` if it is one) need not be left out: the build drops what is
    /// in the first four. Nothing else is asked of the sandbox after that.
    async fn export(&mut self, archive: &Path) -> Result<Whiteouts, String>;

    async fn destroy(self: Box<Self>);
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunCommand {
    pub argv: Vec<String>,
    pub env: BTreeMap<String, String>,
    pub workdir: String,
    /// As in the Dockerfile: name or number, perhaps with a group: `user`, `1000:1000`.
    pub user: String,
}
