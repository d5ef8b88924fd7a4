//! What callers hand in and get back: plain data, in our own words. Front ends translate to and from these.

use std::collections::BTreeMap;

use atoll_guest_protocol::{Attributes, CommandState, FileStat, PtySize, WriteMode};
use atoll_types::{
    ArtifactId, CommandId, EndReason, InstanceId, Isolation, OwnedBy, ProjectId, ResourcesAsked, SandboxId,
    SandboxSpec, SandboxState, Saved, TemplateId, Timestamp, Usage,
};
use bytes::Bytes;

#[derive(Debug, Clone)]
pub struct CreateSandbox {
    pub spec: SandboxSpec,
    /// The size that was asked for; the rest is that of the snapshot that it is made of, or what its template names, or else
    /// what the operator has set. What the specification says of it does not count.
    pub resources: ResourcesAsked,
    /// The same key with the same request finds the sandbox that was already made.
    pub idempotency_key: Option<String>,
}

/// A sandbox as callers see it.
#[derive(Debug, Clone)]
pub struct Sandbox {
    pub id: SandboxId,
    pub project: ProjectId,
    pub spec: SandboxSpec,
    pub template: TemplateId,
    pub isolation: Isolation,
    pub state: SandboxState,
    pub instance: Option<InstanceId>,
    pub created_at: Timestamp,
    pub started_at: Option<Timestamp>,
    pub ended_at: Option<Timestamp>,
    pub deadline: Option<Timestamp>,
    /// What it comes back from, while it rests and until it is back.
    pub saved: Option<Saved>,
    pub end: Option<EndReason>,
}

#[derive(Debug, Clone, Default)]
pub struct ListSandboxes {
    pub labels: BTreeMap<String, String>,
    pub owner: Option<OwnedBy>,
    /// Empty: every state that is live.
    pub states: Vec<SandboxState>,
    pub cursor: Option<String>,
    /// 1 to 100.
    pub limit: usize,
}

#[derive(Debug, Clone)]
pub struct Page<T> {
    pub items: Vec<T>,
    /// Pass it back to get what follows; `None` at the end.
    pub next: Option<String>,
}

#[derive(Debug, Clone)]
pub struct ExecSpec {
    pub argv: Vec<Vec<u8>>,
    pub env: Vec<(String, String)>,
    pub cwd: Option<Vec<u8>>,
    pub user: Option<String>,
    pub pty: Option<PtySize>,
    pub stdin: bool,
    pub timeout_millis: Option<u64>,
    /// A background command goes on when nobody is attached; a foreground one dies with its stream.
    pub background: bool,
    /// Whether a background command waits for whoever is attached to it, rather than lose output that they have not read.
    pub lossless: bool,
    /// A request that comes again with the same key finds the command that the first one started. Such a command goes on
    /// when its caller hangs up: who comes again wants its end.
    pub idempotency_key: Option<String>,
}

impl ExecSpec {
    pub fn new(argv: impl IntoIterator<Item = impl Into<Vec<u8>>>) -> Self {
        Self {
            argv: argv.into_iter().map(Into::into).collect(),
            env: Vec::new(),
            cwd: None,
            user: None,
            pty: None,
            stdin: false,
            timeout_millis: None,
            background: false,
            lossless: false,
            idempotency_key: None,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutputStream {
    Stdout,
    Stderr,
}

/// What happens to a command, in order. After `Exited` nothing follows.
#[derive(Debug, Clone)]
pub enum ExecEvent {
    Started {
        pid: u32,
    },
    Output {
        stream: OutputStream,
        bytes: Bytes,
    },
    /// The log no longer reached back to the offset asked for.
    Dropped {
        bytes: u64,
    },
    Exited(CommandState),
}

/// A command as listed.
#[derive(Debug, Clone)]
pub struct Command {
    pub id: CommandId,
    pub argv: Vec<Vec<u8>>,
    pub pid: u32,
    pub pty: bool,
    pub state: CommandState,
    pub started_at: Timestamp,
    pub ended_at: Option<Timestamp>,
    pub output_bytes: u64,
}

/// Where in a sandbox, and as whom.
#[derive(Debug, Clone)]
pub struct FilePath {
    pub path: Vec<u8>,
    pub user: Option<String>,
}

#[derive(Debug, Clone)]
pub struct WriteSpec {
    pub at: FilePath,
    pub mode: Option<u32>,
    pub write: WriteMode,
    pub parents: bool,
}

/// A change to the filesystem other than writing content.
#[derive(Debug, Clone)]
pub enum FileChange {
    MakeDir {
        mode: u32,
    },
    RenameTo {
        to: Vec<u8>,
    },
    Remove {
        recursive: bool,
    },
    SetMode {
        mode: u32,
    },
    SetOwner {
        owner: String,
    },
    /// Replaces the extended attributes whose name begins with `prefix`; they are named here without it.
    SetAttributes {
        prefix: String,
        attributes: Attributes,
    },
    Symlink {
        target: Vec<u8>,
    },
}

/// A file's metadata and a stream of its bytes.
pub struct FileContent {
    pub stat: FileStat,
    pub body: crate::ByteStream,
}

impl std::fmt::Debug for FileContent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FileContent")
            .field("stat", &self.stat)
            .finish_non_exhaustive()
    }
}

#[derive(Debug, Clone)]
pub struct Metrics {
    pub usage: Usage,
    pub guest: Option<atoll_guest_protocol::GuestUsage>,
    pub at: Timestamp,
}

#[derive(Debug, Clone)]
pub struct SaveArtifact {
    pub name: String,
    pub at: FilePath,
    pub retention_millis: Option<u64>,
}

#[derive(Debug, Clone)]
pub struct Artifact {
    pub id: ArtifactId,
    pub name: String,
    /// Where it came from, as long as that is on record.
    pub sandbox: Option<SandboxId>,
    /// Whether the content is a tar stream of a directory rather than the file itself.
    pub directory: bool,
    pub digest: String,
    pub size_bytes: u64,
    pub created_at: Timestamp,
    pub expires_at: Option<Timestamp>,
}
