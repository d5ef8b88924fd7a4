//! The messages inside frames. Paths are bytes, because file names in a guest need not be UTF-8.

use serde::{Deserialize, Serialize};

/// First thing that a host says. Whatever the guest was doing for an earlier host's streams, it stops (commands go on).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    pub generation: u32,
    /// Echoed in `Welcome`; the host ignores everything before it, which was meant for its predecessor.
    pub nonce: u64,
    /// The guest was saved and restored, so nobody hung up: commands that belong to a stream (`kill_on_close`) go on
    /// without it.
    pub restored: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    pub generation: u32,
    pub nonce: u64,
}

/// What a stream is opened for. The comment behind each says what travels on the stream before its `End`.
///
/// `user` says who acts, with the permissions that they have in the guest; an empty name is the configured user. `None` is
/// the sandbox's owner, who may all; what is created then belongs to the configured user.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// A request too long for one frame: the host sends it as `Data`, `length` bytes of its encoding in all. Then as if
    /// the stream had been opened with it.
    Long { length: u32 },
    /// Gives a pooled instance its identity. Nothing.
    Configure(Configure),
    /// Makes the way out known to programs that start from now on, in place of what an earlier one said. Nothing.
    Network(Network),
    /// Starts a command and attaches to it from offset 0. First `Message::Started`; then as `Attach`. If it cannot be
    /// started (no such file, no permission, unknown user) the stream ends with that failure.
    Exec(Exec),
    /// Attaches to a command's output from an offset of its log. Guest: `Message::Dropped` if the log no longer reaches
    /// back that far; `Data` on `SUB_STDOUT`/`SUB_STDERR`; `Message::Exited` when it is over. Host: `Data` on `SUB_MAIN` is
    /// stdin (empty: end of stdin), `Message::Resize`, `Message::Signal`. Closing the stream detaches; the command goes on.
    Attach { command: String, from: u64 },
    /// `Message::Commands`.
    ListCommands,
    /// Signals a command's process group. Nothing.
    Signal { command: String, signal: i32 },
    /// Follows the ends of commands. `Message::Commands` of all that are known now, `Message::Watching`, then
    /// `Message::Commands` with each that ends, until closed; a later one takes over from an earlier one. An attached
    /// stream says `Exited` only after this one has told of that end.
    FollowCommands,
    /// Forgets an exited command and its log. Nothing.
    Forget { command: String },
    /// `Message::Stat` of the file, then `Data` from `offset`, at most `length` bytes.
    ReadFile {
        path: Vec<u8>,
        user: Option<String>,
        offset: u64,
        length: Option<u64>,
    },
    /// Host sends `Data`, an empty one at the end. `Message::Stat` of the result. The file appears under its name only
    /// when complete (`Replace`), unless appended to.
    WriteFile(WriteFile),
    /// `Message::Stat`. Does not follow a final symlink.
    Stat { path: Vec<u8>, user: Option<String> },
    /// `Message::Entries` batches in no particular order; `depth` 1 lists the directory itself. Never follows symlinks.
    List {
        path: Vec<u8>,
        user: Option<String>,
        depth: u32,
    },
    /// `mkdir -p`. `Message::Created(bool)`: whether it was new.
    MakeDir {
        path: Vec<u8>,
        user: Option<String>,
        mode: u32,
    },
    /// Nothing.
    Rename {
        from: Vec<u8>,
        to: Vec<u8>,
        user: Option<String>,
    },
    /// Nothing. A directory needs `recursive`.
    Remove {
        path: Vec<u8>,
        user: Option<String>,
        recursive: bool,
    },
    /// Nothing.
    SetMode {
        path: Vec<u8>,
        user: Option<String>,
        mode: u32,
    },
    /// `owner` is `user`, `user:group` or numbers. Nothing.
    SetOwner {
        path: Vec<u8>,
        user: Option<String>,
        owner: String,
    },
    /// Nothing.
    Symlink {
        path: Vec<u8>,
        target: Vec<u8>,
        user: Option<String>,
    },
    /// `Message::Watching` once the watch stands, then `Message::Changed` until closed.
    Watch {
        path: Vec<u8>,
        user: Option<String>,
        recursive: bool,
    },
    /// `Data`: a tar stream of the path (a file or a directory), names relative to its parent.
    TarOut {
        path: Vec<u8>,
        user: Option<String>,
        /// Directories that are mount points are empty in the archive.
        one_file_system: bool,
    },
    /// Host sends `Data`, a tar stream, an empty one at the end; it is unpacked below `path`, which is created. Members
    /// that would land outside are refused.
    TarIn { path: Vec<u8>, user: Option<String> },
    /// `Message::Ports`: what listens on TCP in the guest.
    ListPorts,
    /// A byte stream to a loopback port of the guest. `Message::Connected`, then `Data` both ways on `SUB_MAIN`; an empty
    /// `Data` is a half-close. `End` when both directions are over.
    Connect { port: u16 },
    /// `Message::Usage`.
    Usage,
    /// Extended attributes of files, those whose name begins with `prefix`. `Message::Attributes`, one entry for each path,
    /// in order; what cannot be read has none.
    Attributes {
        paths: Vec<Vec<u8>>,
        user: Option<String>,
        prefix: String,
    },
    /// Replaces all extended attributes whose name begins with `prefix`; the names given here go without it. Nothing.
    SetAttributes {
        path: Vec<u8>,
        user: Option<String>,
        prefix: String,
        attributes: Attributes,
    },
}

/// Names and values of extended attributes.
pub type Attributes = Vec<(String, Vec<u8>)>;

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Configure {
    pub hostname: String,
    /// Environment of every command from now on, before its own.
    pub env: Vec<(String, String)>,
    /// Who commands run as, and where, unless they say otherwise.
    pub user: String,
    pub workdir: String,
    /// Wall clock of the host in milliseconds, for guests whose clock can be set.
    pub now_millis: u64,
    /// Started once, in the background, with the id `start`.
    pub start: Option<Start>,
    /// As `Request::Network`; nothing changes without it.
    pub network: Option<Network>,
}

/// What the inside has to know of the way out.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Network {
    /// For `/etc/resolv.conf`. Left alone if empty.
    pub nameserver: String,
    /// Certificate of an authority (PEM) that programs are to trust beside the public ones; without one, one that was
    /// given before is taken back.
    pub authority: Option<String>,
    /// Environment of every command from now on, before the configured one: placeholders of secrets.
    pub env: Vec<(String, String)>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Start {
    pub argv: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exec {
    /// Chosen by the host; the guest refuses one that exists (`AlreadyExists`), which makes retries safe.
    pub command: String,
    pub argv: Vec<Vec<u8>>,
    /// Added to the configured environment.
    pub env: Vec<(String, String)>,
    pub cwd: Option<Vec<u8>>,
    /// A name, a number, or `user:group`.
    pub user: Option<String>,
    pub pty: Option<PtySize>,
    /// Whether stdin is a pipe that the host feeds (else `/dev/null`).
    pub stdin: bool,
    /// Kills the process group when exceeded.
    pub timeout_millis: Option<u64>,
    /// How many bytes of output are kept for those who attach later.
    pub log_bytes: u32,
    /// Whether output waits for the attached reader (foreground) or overwrites the oldest when the log is full.
    pub wait_for_reader: bool,
    /// Whether the command belongs to this stream: closing it (or the host's death) kills the command, and when its end
    /// has been delivered it is forgotten.
    pub kill_on_close: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PtySize {
    pub rows: u16,
    pub cols: u16,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WriteFile {
    pub path: Vec<u8>,
    /// Owner of what is created.
    pub user: Option<String>,
    /// Permission bits; 0o644 if absent and new, unchanged if absent and existing.
    pub mode: Option<u32>,
    pub write: WriteMode,
    /// Creates missing parents, owned by `user`.
    pub parents: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum WriteMode {
    /// Replace or create, atomically.
    Replace,
    Append,
    /// Fails if it exists.
    CreateNew,
    /// Cut to nothing and written where it is, so that those who have it open, and its other names, see the new content;
    /// a stream that breaks off leaves what had come. It belongs to `user` afterwards.
    InPlace,
}

/// What travels in `Message` frames.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Message {
    // guest to host
    Started {
        pid: u32,
    },
    /// `next` is the log offset from which output follows.
    Dropped {
        bytes: u64,
        next: u64,
    },
    Exited(CommandState),
    Commands(Vec<CommandInfo>),
    Stat(FileStat),
    Entries(Vec<FileEntry>),
    Created(bool),
    Watching,
    Changed(Vec<WatchEvent>),
    Ports(Vec<ListeningPort>),
    Connected,
    Usage(GuestUsage),
    Attributes(Vec<Attributes>),
    // host to guest
    Resize(PtySize),
    Signal(i32),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum CommandState {
    Running,
    Exited {
        code: i32,
    },
    Signaled {
        signal: i32,
    },
    /// Killed because its `timeout_millis` was over.
    TimedOut,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommandInfo {
    pub command: String,
    pub pid: u32,
    pub argv: Vec<Vec<u8>>,
    pub state: CommandState,
    pub started_millis: u64,
    pub ended_millis: Option<u64>,
    pub pty: bool,
    /// Bytes that its stdin has taken so far.
    pub input_bytes: u64,
    /// Bytes of output so far; the log holds the last of them.
    pub output_bytes: u64,
    pub log_start: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum EntryKind {
    File,
    Directory,
    Symlink,
    Other,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileStat {
    /// The absolute path that was looked at.
    pub path: Vec<u8>,
    pub kind: EntryKind,
    pub size: u64,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub owner: Option<String>,
    pub group: Option<String>,
    pub modified_millis: i64,
    pub target: Option<Vec<u8>>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    pub stat: FileStat,
    pub depth: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum WatchKind {
    Created,
    Written,
    Removed,
    RenamedFrom,
    RenamedTo,
    Attributes,
    /// Events were lost (too many at once); look for yourself.
    Overflow,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WatchEvent {
    pub kind: WatchKind,
    /// Relative to the watched path; empty for the path itself.
    pub name: Vec<u8>,
    pub directory: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListeningPort {
    pub port: u16,
    pub address: String,
}

/// What the guest sees of itself. For people, never for billing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestUsage {
    pub memory_total_bytes: u64,
    pub memory_available_bytes: u64,
    pub disk_total_bytes: u64,
    pub disk_used_bytes: u64,
    pub processes: u32,
    pub load_1m_milli: u32,
}

/// Why a stream ended without success.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    pub kind: FailureKind,
    pub message: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum FailureKind {
    Invalid,
    NotFound,
    AlreadyExists,
    PermissionDenied,
    NotADirectory,
    IsADirectory,
    DirectoryNotEmpty,
    NoSpace,
    TooLarge,
    Busy,
    Refused,
    Unsupported,
    Io,
    /// A user that the sandbox does not have. Older agents call it invalid.
    NoSuchUser,
}
