//! One machine that runs sandboxes: instances and what they need of the host, behind one trait.
//!
//! ```text
//!   control (crate `sandboxes`)   rows, decisions, quotas, names, facts, who may
//!      │  effects, each with its own answer; streams to guests        ▲  events
//!      ▼                                                              │
//!   trait Node ──────────────────────────────────────────────────────────────────
//!      │
//!   LocalNode   instances ── runtimes: boot, adopt, resize, measure, destroy
//!               pool         instances booted ahead
//!               cables       a link for each instance, and who is admitted behind it
//!               guests       greeting, hooks, streams; byte streams go straight through
//!               saves        held still, written into the vault or, for a moment, into files without a name
//!               builds       templates, and the instances that the steps of a Dockerfile run in
//! ```
//! Bytes lie on the node (images of templates, saved state, volumes), what is said of them lies with control: rows of
//! snapshots and volumes are its own, and it reads the catalogue of templates (manifests and names) itself.
//!
//! What must hold:
//! - A node knows instances and ids. It knows no row, no caller and no right of anybody: what it is told to do was decided.
//! - It decides nothing that outlives it: what is here follows from what control says and what is found on the machine.
//! - Instances that are its own (pooled, of builds) are named by no row; they go when it stops, and the next control
//!   destroys what a killed one left.
//! - What crosses [`Node`] could cross a wire: ids, specs, answers, events, streams. No closure, no shared cell.

pub mod blocking;
mod boots;
mod builds;
mod cables;
pub mod entropy;
mod faults;
mod greeting;
mod guests;
mod hooks;
mod instances;
mod local;
mod node;
mod pieces;
mod pool;
mod saves;
mod stand_in;
mod state_files;
mod steps;
#[cfg(feature = "testing")]
pub mod testing;
#[cfg(not(feature = "testing"))]
mod testing;
mod volumes;
mod witness;
mod words;

pub use atoll_egress::{EgressEvent, EventKind, Tenant, Used};
pub use atoll_runtime::Saves;
pub use atoll_runtime::channel::{
    ANSWER_WITHIN, ChannelError, Incoming, Stream, StreamReceiver, StreamSender,
};
pub use atoll_runtime::probe::{Probe, Verdict};
pub use atoll_volumes::{
    Entry as VolumeEntry, EntryKind, LARGEST_LISTING, Metadata as VolumeMetadata, WriteFile as WriteInVolume,
};
pub use builds::{
    BuildEvent, BuildFrom, BuildStart, BuildTemplate, Builder, RegistryLogin, Template, find_template,
    known_template, on_templates,
};
pub use cables::{Outside, WayOut, allows_nothing};
pub use faults::{from_image, server_full};
pub use greeting::identity;
pub use hooks::Failed as HookFailed;
pub use local::{Bytes, LocalNode};
pub use node::{Cables, Guests, Instances, Node, SavedState, VolumeBytes};
pub use witness::Recorder;
pub use words::{
    Admission, Begins, Boot, ByteSource, ByteStream, Claimed, Event, Failed, Greeting, NetworkOffer,
    NetworkUsage, Offer, Origin, PoolSetting, PoolView, Save, SavedBytes, SavedGarbage, Settings, State,
    VolumeLook, Wanted, wall_clock,
};
