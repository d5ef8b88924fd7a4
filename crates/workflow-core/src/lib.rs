//! What a durable workflow does next: the transition function of a run, without a clock, randomness or I/O.
//!
//! ```text
//!   start ──> Run { state, events } <── signal, cancel, terminate, update, reset
//!                │        ▲
//!                │        └── tick(now): timers, timeouts, retries that have become due
//!                ▼
//!      workflow task: scheduled ──> started ──> completed: one event per command ── or failed, timed out
//!                                     │
//!                                     └── what arrives meanwhile waits in `state.buffered`
//! ```
//!
//! The words are those of Temporal's messages, because a history is handed to workers byte by byte: translating it would
//! only add a place to get it wrong.
//!
//! What must hold:
//! - Same run, same input, same time: same events and same effects.
//! - Event ids count from one without a gap, and what is in `state` follows from the events plus what workers are not told
//!   about (attempts, heartbeats).
//! - A workflow task is shown to a worker with its `WorkflowTaskStarted` as the last event. While it is started, nothing
//!   else is appended; what comes from outside waits and is flushed after the commands, things that finish after things
//!   that start.
//! - A refused input changes nothing.
//! - Everything that must happen outside of the run is either derivable from its state (tasks, deadlines) or lies in its
//!   outbox until somebody says that it was delivered, so nothing is lost between two commits.

#![allow(
    deprecated,
    reason = "clients still send, and read, what the wire has deprecated"
)]

mod activity;
mod calendar;
mod children;
mod close;
mod commands;
mod cron;
mod describe;
mod external;
mod limits;
mod pausing;
mod refusal;
mod reset;
mod retry;
mod run;
mod schedule;
mod scheduler;
mod search;
mod size;
mod start;
mod state;
mod task;
mod tick;
mod time;
mod update;
pub mod validate;
mod words;

pub use activity::{ActivityFinish, ActivityStart, Heartbeat};
pub use children::{ChildEnd, StartChildFailure};
pub use close::Terminate;
pub use cron::{Cron, CronError};
pub use external::{CancelRequest, Delivery, SignalRequest};
pub use limits::Limits;
pub use pausing::{GoOn, Which};
pub use refusal::Refusal;
pub use reset::ResetPoint;
pub use run::{Effect, Run, Turn};
pub use schedule::{Next, Spec as ScheduleSpec, SpecError};
pub use scheduler::{Act, Scheduler, Waiting, Wake};
pub use search::Work;
pub use start::{Parent, Start};
pub use state::{Letter, Outgoing, State, letter};
pub use task::{Completion, CompletionReply, StartedTask, TaskToken};
pub use time::{Nanos, duration, nanos, parse_length, parse_time, stamp, time_text, unstamp};
pub use update::{Stage, UpdateStatus};
