//! The server in two processes: a helper with powers and without ears, and a front with ears and without powers.
//!
//! ```text
//!   front: HTTP, TLS, gRPC, DNS, the proxy,            helper: instances, cgroups, links, volumes,
//!          rows, saved state, templates, agents                mmdebstrap; starts every program there is
//!     │  Start, Save, Destroy, Lease, Attach, ... ──────────────────────────>  │
//!     │  <── Greet: here are the FIFOs of an agent; Hold; a file to save into  │
//!     └────────────────────── one socket, descriptors beside words ────────────┘
//! ```
//! The front is what an attacker meets: everything that arrives from the network or from guests is parsed there. It can ask
//! the helper for what [`words`] lets it say and for nothing else; the helper believes none of it.
//!
//! What must hold:
//! - The helper reads nothing that a guest or a client sent, with two exceptions: an archive that is unpacked into a volume, as
//!   that takes owners of files, and what a sentry answers on its control socket. Channels to agents, bodies and saved state
//!   are files and pipes whose descriptors it passes on.
//! - No word names a program, a namespace, a cgroup, a user or a place on the host that is the helper's to choose. Templates,
//!   volumes and images to be sealed are named, and have to lie where those lie ([`served`]).
//! - What the helper relies on (programs, records, bundles) lies where the front may not write.
//! - When the front dies, the helper goes; sandboxes stay. When the helper dies, the front goes too: it could do nothing.

pub mod front;
mod peer;
pub mod served;
mod stream;
mod words;

pub use peer::{Peer, pair};
