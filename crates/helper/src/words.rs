//! What the two halves can say to each other, and nothing else.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use atoll_runtime::channel::{AgentState, ChannelError, Connect};
use atoll_runtime::probe::Probe;
use atoll_runtime::{Error, InstanceEnd, Mount, SaveKind, Saves, Told};
use atoll_types::{InstanceId, Isolation, Resources, Usage};
use atoll_volumes::elsewhere::{Answer as VolumeAnswer, Op, Refusal};
use serde::{Deserialize, Serialize};

/// The front's questions.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Ask {
    /// What there is; once, first.
    Setup,
    Start {
        isolation: Isolation,
        spec: Box<Spec>,
    },
    Adopt {
        isolation: Isolation,
        id: InstanceId,
    },
    Discover {
        isolation: Isolation,
    },
    Resize {
        isolation: Isolation,
        id: InstanceId,
        resources: Resources,
    },
    Usage {
        isolation: Isolation,
        id: InstanceId,
    },
    /// Into the sink with this number.
    Save {
        isolation: Isolation,
        id: InstanceId,
        kind: SaveKind,
        sink: u64,
    },
    Thaw {
        isolation: Isolation,
        id: InstanceId,
    },
    Destroy {
        isolation: Isolation,
        id: InstanceId,
    },
    /// Opens the gateway. Its sockets come beside the answer.
    Links,
    Lease {
        id: InstanceId,
    },
    Leased,
    Release {
        id: InstanceId,
    },
    CloseLinks,
    AnswerFrom {
        asked: SocketAddr,
    },
    /// Beside it the ends of pipes, as the call has input and output.
    Volume {
        op: Op,
        input: bool,
        output: bool,
    },
    /// Beside it the file to write. Progress is told with this number.
    Debian {
        suite: String,
        packages: Vec<String>,
        number: u64,
    },
    /// One of the few files of the data directory that are not the front's.
    Keep {
        what: Kept,
        bytes: Vec<u8>,
    },
    /// There is no server any more.
    Retire,
}

/// What the front may have written for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kept {
    /// Where it listens.
    ServerFile,
    AdminKey,
}

/// What to boot, in the front's words. What it says of files is looked at; what is not in here is the helper's to know.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Spec {
    pub(crate) id: InstanceId,
    pub(crate) image: Vec<PathBuf>,
    pub(crate) resources: Resources,
    pub(crate) hostname: String,
    pub(crate) mounts: Vec<Mount>,
    /// The link that this instance has leased is its network.
    pub(crate) network: bool,
    pub(crate) restore: Option<Restore>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Restore {
    pub(crate) kind: SaveKind,
    /// The source with this number has these streams.
    pub(crate) source: u64,
    pub(crate) names: Vec<String>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Answer {
    Done,
    Setup(Setup),
    Ids(Vec<InstanceId>),
    Usage(Usage),
    /// Which of six sockets are beside it, and who has a link.
    Links {
        sockets: [bool; 6],
        leases: Vec<(Ipv4Addr, InstanceId)>,
    },
    Slot(Ipv4Addr),
    Closed(bool),
    Volume(Result<VolumeAnswer, Refusal>),
    /// An instance's failure.
    Failed(Failure),
    /// Any other.
    Refused(String),
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Setup {
    pub tiers: Vec<Probe>,
    /// The runtimes that work, strongest first, and what they can save.
    pub runtimes: Vec<(Isolation, Saves)>,
}

/// The helper's questions.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Beg {
    /// Beside it the FIFOs: to the agent, and from it.
    Greet {
        id: InstanceId,
        how: How,
    },
    /// Has the agent unpack the layer of this source.
    Unpack {
        id: InstanceId,
        source: u64,
    },
    Hold {
        id: InstanceId,
    },
    Release {
        id: InstanceId,
    },
    Taken {
        id: InstanceId,
        millis: u64,
    },
    Delivered {
        id: InstanceId,
        millis: u64,
    },
    Answers {
        id: InstanceId,
        millis: u64,
    },
    /// A file comes back.
    Source {
        source: u64,
        name: String,
        at_least: bool,
    },
    Stream {
        sink: u64,
        name: String,
    },
    Scratch {
        sink: u64,
    },
    /// Beside it the file.
    Part {
        sink: u64,
        name: String,
    },
    Growing {
        sink: u64,
        name: String,
    },
    Whole {
        sink: u64,
        name: String,
    },
    Finish {
        sink: u64,
        name: String,
    },
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Gift {
    Done,
    Yes(bool),
    /// Beside it, if it is so.
    File(bool),
    NotGreeted(NotGreeted),
    Refused(Told),
}

/// What the helper tells without being asked.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum News {
    Ended {
        id: InstanceId,
        end: InstanceEnd,
    },
    Progress {
        number: u64,
        stage: String,
        done: u64,
        total: u64,
        message: String,
    },
}

/// What the front tells.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Word {
    /// Nobody waits for this build any more.
    Stop { number: u64 },
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) enum How {
    Booting(u64),
    Running(u64),
    Restored(u64),
}

impl From<Connect> for How {
    fn from(connect: Connect) -> Self {
        let millis = connect.within.as_millis() as u64;
        match connect.agent {
            AgentState::Booting => Self::Booting(millis),
            AgentState::Running => Self::Running(millis),
            AgentState::Restored => Self::Restored(millis),
        }
    }
}

impl From<How> for Connect {
    fn from(how: How) -> Self {
        let (agent, millis) = match how {
            How::Booting(millis) => (AgentState::Booting, millis),
            How::Running(millis) => (AgentState::Running, millis),
            How::Restored(millis) => (AgentState::Restored, millis),
        };
        Self {
            agent,
            within: Duration::from_millis(millis),
        }
    }
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum NotGreeted {
    TimedOut(u64),
    Generation { host: u32, guest: u32 },
    Other(String),
}

impl From<ChannelError> for NotGreeted {
    fn from(error: ChannelError) -> Self {
        match error {
            ChannelError::TimedOut(within) => Self::TimedOut(within.as_millis() as u64),
            ChannelError::Generation { host, guest } => Self::Generation { host, guest },
            other => Self::Other(other.to_string()),
        }
    }
}

impl From<NotGreeted> for ChannelError {
    fn from(error: NotGreeted) -> Self {
        match error {
            NotGreeted::TimedOut(millis) => Self::TimedOut(Duration::from_millis(millis)),
            NotGreeted::Generation { host, guest } => Self::Generation { host, guest },
            NotGreeted::Other(why) => Self::Io {
                what: "greeting the agent".into(),
                source: std::sync::Arc::new(io::Error::other(why)),
            },
        }
    }
}

/// An [`Error`] of a runtime that can be sent.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Failure {
    Start { isolation: Isolation, why: Told },
    NotFound(InstanceId),
    Adopt { id: InstanceId, why: Told },
    Generation { id: InstanceId, host: u32, guest: u32 },
    Save { id: InstanceId, why: Told },
    Io { what: String, why: Told },
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        match error {
            Error::Start { isolation, source } => Self::Start {
                isolation,
                why: source.into(),
            },
            Error::NotFound(id) => Self::NotFound(id),
            Error::Adopt { id, source } => Self::Adopt {
                id,
                why: source.into(),
            },
            Error::Generation { id, host, guest } => Self::Generation { id, host, guest },
            Error::Save { id, source } => Self::Save {
                id,
                why: source.into(),
            },
            Error::Io { what, source } => Self::Io {
                what,
                why: (&source).into(),
            },
        }
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Start { isolation, why } => Self::Start {
                isolation,
                source: why.into(),
            },
            Failure::NotFound(id) => Self::NotFound(id),
            Failure::Adopt { id, why } => Self::Adopt {
                id,
                source: why.into(),
            },
            Failure::Generation { id, host, guest } => Self::Generation { id, host, guest },
            Failure::Save { id, why } => Self::Save {
                id,
                source: why.into(),
            },
            Failure::Io { what, why } => Self::Io {
                what,
                source: why.into(),
            },
        }
    }
}

/// The answer was to another question.
pub(crate) fn confused() -> io::Error {
    io::Error::other("the other half of the server answered something else")
}

#[cfg(test)]
mod tests {
    use atoll_runtime::{Cause, Kind};

    use super::*;

    #[test]
    fn a_failure_arrives_as_it_was_sent() {
        let full = || io::Error::from(io::ErrorKind::StorageFull);
        let id = InstanceId::from_entropy([1; 20]);
        let cause = |what: &str, source| Cause::Io {
            what: what.into(),
            source,
        };
        let errors = [
            Error::Start {
                isolation: Isolation::Jail,
                source: cause("making its writable layer", full()),
            },
            // What the sink of the front said, on its way back.
            Error::Save {
                id: id.clone(),
                source: cause("making room for it", Told::from(&full()).into()),
            },
            Error::Adopt {
                id,
                source: Cause::new(Kind::TimedOut, "no answer within 30 s"),
            },
            Error::Io {
                what: "recording its size".into(),
                source: full(),
            },
        ];
        for error in errors {
            let (kind, text) = (error.kind(), error.to_string());
            let arrived = Error::from(Failure::from(error));
            assert_eq!((arrived.kind(), arrived.to_string()), (kind, text));
            assert!(matches!(kind, Kind::HostFull | Kind::TimedOut), "{kind:?}");
        }
    }
}
