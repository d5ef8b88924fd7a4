//! What stands in front of every API: how much is held for whom, how long anybody is waited for, who may connect, and whom
//! a `Host` names.
//!
//! ```text
//!   listener ── Connections::admit ── Guarded<stream> ── head ── Visit ──> an API: who is it? ── Visit::admit
//!                 stranger until a key                             │                               │ pays from here on
//!                 is seen; the oldest gives way                    └── Visit::read ── body, paced and paid for, or refused
//! ```
//!
//! What must hold:
//! - **Nobody is read before they are known.** [`Visit::read`] refuses as long as nobody was admitted to pay for it.
//! - **Every buffered byte is somebody's**, in requests and in answers: of the server, of one project, and of one sandbox where
//!   one calls. What goes over a limit is refused before it is allocated, and given back when the last copy is dropped.
//! - **Every wait ends**: for the first head, for the rest of a head, for the next piece of a body, for a body as a whole,
//!   for a message of a WebSocket that has begun, for whoever does not read the answer.
//! - **Strangers cannot keep others out.** When there are too many of them, the one that came first is cut, so whoever comes
//!   with a key gets in.
//! - A fault has one status in HTTP and one in gRPC: [`status`] is the only table.
//! - **Requests are read in one way** ([`extract`], [`query`], [`range`], [`multipart`], [`upload`]): bounded, strict about what
//!   nobody knows. Each API has its own shape of an error, which it says in one trait ([`extract::Wire`]), and nothing else.
//! - A `Host` means one thing: [`host`] is the only parser of `{port}-{sandbox}.{domain}`.

mod answer;
pub mod apis;
pub mod body;
pub mod connections;
mod download;
pub mod extract;
mod guarded;
pub mod host;
pub mod meter;
pub mod multipart;
pub mod proto;
pub mod proxy;
pub mod query;
pub mod range;
pub mod serve;
pub mod status;
mod unread;
pub mod upload;
mod visit;
pub mod websocket;

use std::time::Duration;

pub use atoll_memory as memory;

pub use apis::{Api, Apis, Asked};
pub use atoll_memory::{Account, Memory, Permit, Slot, Slots};
pub use body::{Held, Refused};
pub use connections::{Connections, Line, Peer};
pub use download::Download;
pub use guarded::Guarded;
pub use unread::{Unread, Watched};
pub use visit::Visit;

/// What a server allows. The defaults are for a machine whose memory is not known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    pub memory: memory::Limits,
    pub connections: connections::Limits,
    pub patience: Patience,
}

impl Limits {
    /// For a machine with so many bytes of memory, and a process with so many descriptors.
    pub fn for_machine(memory_bytes: u64, descriptors: u64) -> Self {
        Self {
            memory: memory::Limits::for_machine(memory_bytes),
            connections: connections::Limits::for_descriptors(descriptors),
            patience: Patience::default(),
        }
    }
}

/// How long somebody is waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patience {
    /// For the head of a request, from its first byte, or from the beginning of the connection.
    pub head: Duration,
    /// For the next request on a connection.
    pub idle: Duration,
    /// For the next piece of a body.
    pub body: Duration,
    /// For the next piece of a body that is passed on as it comes, and for whoever does not read what is written.
    pub stream: Duration,
    /// A body that is gathered or kept has to bring so many bytes a second, on the average, once `body` or `stream` has passed.
    pub body_rate: u64,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            head: Duration::from_secs(15),
            idle: Duration::from_secs(75),
            body: Duration::from_secs(15),
            stream: Duration::from_secs(600),
            body_rate: 16 * 1024,
        }
    }
}

/// What all listeners of a server share; cheap to clone.
#[derive(Debug, Clone)]
pub struct Front {
    pub memory: Memory,
    pub connections: Connections,
    pub patience: Patience,
    pub meter: meter::Meter,
}

impl Front {
    pub fn new(limits: Limits) -> Self {
        Self {
            memory: Memory::new(limits.memory),
            connections: Connections::new(limits.connections, limits.patience),
            patience: limits.patience,
            meter: meter::Meter::default(),
        }
    }

    /// One request that came by a connection, or from inside this process (`None`).
    pub fn visit(&self, line: Option<Line>) -> Visit {
        Visit::new(self.clone(), line, 0)
    }
}
