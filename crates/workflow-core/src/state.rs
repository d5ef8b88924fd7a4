//! What is remembered of a run beside its events.
//!
//! The structs are messages of their own, so that rows written by one version are read by the next: a tag is never given
//! to another meaning. Inputs and results stay in the history; only what changes without an event is kept here.

use std::collections::BTreeMap;

use crate::words::{HistoryEvent, common, failure};

/// See [`crate::Run`]. Times are nanoseconds since 1970, lengths are nanoseconds, zero is "not set".
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct State {
    #[prost(string, tag = "1")]
    pub namespace: String,
    #[prost(string, tag = "2")]
    pub workflow_id: String,
    #[prost(string, tag = "3")]
    pub run_id: String,
    /// As the wire numbers it: 1 is running.
    #[prost(int32, tag = "4")]
    pub status: i32,
    #[prost(int64, tag = "5")]
    pub started_at: i64,
    #[prost(int64, tag = "6")]
    pub closed_at: i64,
    /// When the first workflow task was, or will be, scheduled: later than the start if there is a delay.
    #[prost(int64, tag = "7")]
    pub first_task_at: i64,
    #[prost(int64, tag = "8")]
    pub run_expires_at: i64,
    #[prost(int64, tag = "9")]
    pub execution_expires_at: i64,
    #[prost(int64, tag = "10")]
    pub history_bytes: i64,
    #[prost(int64, tag = "11")]
    pub transitions: i64,
    /// The request that started the run; the same one again finds it.
    #[prost(string, tag = "12")]
    pub start_request_id: String,
    /// Requests that found this run already there and were attached to it.
    #[prost(string, repeated, tag = "13")]
    pub attached_request_ids: Vec<String>,
    /// What whoever started the chain may do, and its steps at most: its children, runs that follow it and those that it is
    /// reset to have the same. Empty in what was started before this was kept, and where nobody has said.
    #[prost(string, tag = "14")]
    pub rights: String,

    #[prost(message, optional, tag = "20")]
    pub task: Option<WorkflowTask>,
    /// Attempt of the workflow task that is, or will next be, scheduled.
    #[prost(int32, tag = "21")]
    pub task_attempt: i32,
    /// `WorkflowTaskStarted` of the last task that was completed.
    #[prost(int64, tag = "22")]
    pub last_started_id: i64,
    #[prost(int64, tag = "23")]
    pub last_completed_id: i64,
    #[prost(message, optional, tag = "24")]
    pub sticky: Option<Sticky>,
    /// Tells one dispatch of a task from the next, so that a late worker is recognized.
    #[prost(int64, tag = "25")]
    pub next_stamp: i64,

    #[prost(btree_map = "int64, message", tag = "30")]
    pub activities: BTreeMap<i64, Activity>,
    #[prost(btree_map = "string, message", tag = "31")]
    pub timers: BTreeMap<String, Timer>,
    #[prost(btree_map = "int64, message", tag = "32")]
    pub children: BTreeMap<i64, Child>,
    /// Signals to other workflows that were not answered yet, by the event that asked for them.
    #[prost(int64, repeated, tag = "33")]
    pub signals_out: Vec<i64>,
    #[prost(int64, repeated, tag = "34")]
    pub cancels_out: Vec<i64>,
    #[prost(message, repeated, tag = "35")]
    pub buffered: Vec<HistoryEvent>,
    #[prost(btree_map = "string, message", tag = "36")]
    pub updates: BTreeMap<String, Update>,
    #[prost(message, repeated, tag = "37")]
    pub outbox: Vec<Letter>,

    #[prost(bool, tag = "40")]
    pub cancel_requested: bool,
    #[prost(string, tag = "41")]
    pub cancel_request_id: String,
    #[prost(string, repeated, tag = "42")]
    pub signal_request_ids: Vec<String>,
    #[prost(int64, tag = "43")]
    pub signals: i64,
    #[prost(message, optional, tag = "44")]
    pub memo: Option<common::Memo>,
    #[prost(message, optional, tag = "45")]
    pub search_attributes: Option<common::SearchAttributes>,
    /// The run that this one was replaced by: continued, retried or reset.
    #[prost(string, tag = "46")]
    pub successor: String,
    #[prost(int64, tag = "47")]
    pub reset_at: i64,
    #[prost(message, optional, tag = "48")]
    pub priority: Option<common::Priority>,
    /// Events of this run that came from another one when it was reset: ids up to here are copies.
    #[prost(int64, tag = "50")]
    pub copied_events: i64,
}

/// A task for the workflow's own code.
///
/// ```text
///   Normal       scheduled and started are in the history
///   attempt > 1  neither is, until a worker completes it: a task that fails over and over leaves no trace of each try
///   Speculative  neither is, so that a rejected update leaves no trace at all; lost in a crash
/// ```
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct WorkflowTask {
    #[prost(int64, tag = "1")]
    pub scheduled_id: i64,
    /// Zero until a worker has it.
    #[prost(int64, tag = "2")]
    pub started_id: i64,
    #[prost(int64, tag = "3")]
    pub scheduled_at: i64,
    #[prost(int64, tag = "4")]
    pub started_at: i64,
    #[prost(int64, tag = "5")]
    pub original_scheduled_at: i64,
    #[prost(int32, tag = "6")]
    pub attempt: i32,
    #[prost(int64, tag = "7")]
    pub stamp: i64,
    /// Both events are in the history.
    #[prost(bool, tag = "8")]
    pub written: bool,
    #[prost(bool, tag = "9")]
    pub speculative: bool,
    /// The queue of one worker, which remembers the workflow, rather than the workflow's.
    #[prost(string, tag = "10")]
    pub sticky_queue: String,
    #[prost(int64, tag = "11")]
    pub timeout: i64,
    /// When it goes to the workflow's own queue instead.
    #[prost(int64, tag = "12")]
    pub start_by: i64,
    #[prost(string, tag = "13")]
    pub identity: String,
    #[prost(string, tag = "14")]
    pub request_id: String,
    #[prost(bool, tag = "15")]
    pub suggest_continue: bool,
    #[prost(int64, tag = "16")]
    pub history_bytes: i64,
}

#[derive(Clone, PartialEq, ::prost::Message)]
pub struct Sticky {
    #[prost(string, tag = "1")]
    pub queue: String,
    #[prost(int64, tag = "2")]
    pub timeout: i64,
}

/// An activity that has not finished. Attempts are not events, so they are counted here.
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct Activity {
    #[prost(int64, tag = "1")]
    pub scheduled_id: i64,
    #[prost(string, tag = "2")]
    pub activity_id: String,
    #[prost(int64, tag = "3")]
    pub scheduled_at: i64,
    #[prost(int32, tag = "4")]
    pub attempt: i32,
    /// When this attempt may start: later than now while it waits to be retried.
    #[prost(int64, tag = "5")]
    pub due_at: i64,
    /// Zero until a worker has it.
    #[prost(int64, tag = "6")]
    pub started_at: i64,
    #[prost(int64, tag = "7")]
    pub stamp: i64,
    /// It was put on its queue.
    #[prost(bool, tag = "8")]
    pub dispatched: bool,
    #[prost(string, tag = "9")]
    pub identity: String,
    #[prost(string, tag = "10")]
    pub request_id: String,
    #[prost(int64, tag = "11")]
    pub heartbeat_at: i64,
    #[prost(message, optional, tag = "12")]
    pub heartbeat: Option<common::Payloads>,
    #[prost(message, optional, tag = "13")]
    pub last_failure: Option<failure::Failure>,
    /// The event that asked for cancellation.
    #[prost(int64, tag = "14")]
    pub cancel_requested_id: i64,
    #[prost(int64, tag = "15")]
    pub attempt_ended_at: i64,
    #[prost(bool, tag = "16")]
    pub paused: bool,
    #[prost(message, optional, tag = "17")]
    pub pause: Option<Pause>,
    /// Attempts are to be counted anew after the one that runs.
    #[prost(bool, tag = "18")]
    pub reset: bool,
    /// What it last said is then forgotten too.
    #[prost(bool, tag = "19")]
    pub reset_heartbeat: bool,
}

/// Who paused an activity, when and why.
#[derive(Clone, PartialEq, Eq, ::prost::Message)]
pub struct Pause {
    #[prost(int64, tag = "1")]
    pub at: i64,
    #[prost(string, tag = "2")]
    pub identity: String,
    #[prost(string, tag = "3")]
    pub reason: String,
}

#[derive(Clone, PartialEq, ::prost::Message)]
pub struct Timer {
    #[prost(int64, tag = "1")]
    pub started_id: i64,
    #[prost(int64, tag = "2")]
    pub fire_at: i64,
}

#[derive(Clone, PartialEq, ::prost::Message)]
pub struct Child {
    #[prost(int64, tag = "1")]
    pub initiated_id: i64,
    #[prost(int64, tag = "2")]
    pub started_id: i64,
    #[prost(string, tag = "3")]
    pub workflow_id: String,
    /// Empty until it has started.
    #[prost(string, tag = "4")]
    pub run_id: String,
    #[prost(int32, tag = "5")]
    pub close_policy: i32,
    #[prost(string, tag = "6")]
    pub workflow_type: String,
}

/// An update that was accepted. Those that were not live in memory only.
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct Update {
    #[prost(int64, tag = "1")]
    pub accepted_id: i64,
    /// Zero until it has completed.
    #[prost(int64, tag = "2")]
    pub completed_id: i64,
    /// It was admitted again by a reset, and waits to be shown to a worker.
    #[prost(int64, tag = "3")]
    pub admitted_id: i64,
}

/// Something for another run. It stays in the outbox until it was delivered.
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct Letter {
    #[prost(int64, tag = "1")]
    pub number: i64,
    #[prost(oneof = "letter::Body", tags = "2, 3, 4, 5, 6, 7")]
    pub body: Option<letter::Body>,
}

pub use letter::Body as Outgoing;

pub mod letter {
    use crate::words::HistoryEvent;

    #[derive(Clone, PartialEq, ::prost::Oneof)]
    #[expect(
        clippy::large_enum_variant,
        reason = "a run has few letters, and none for long"
    )]
    pub enum Body {
        /// Start the child that this event asks for.
        #[prost(int64, tag = "2")]
        StartChild(i64),
        #[prost(int64, tag = "3")]
        Signal(i64),
        #[prost(int64, tag = "4")]
        Cancel(i64),
        /// Tell the parent how this run ended.
        #[prost(message, tag = "5")]
        Ended(HistoryEvent),
        /// The parent is gone: end the child too.
        #[prost(message, tag = "6")]
        TerminateChild(Target),
        #[prost(message, tag = "7")]
        CancelChild(Target),
    }

    #[derive(Clone, PartialEq, Eq, ::prost::Message)]
    pub struct Target {
        #[prost(string, tag = "1")]
        pub workflow_id: String,
        #[prost(string, tag = "2")]
        pub run_id: String,
        #[prost(int64, tag = "3")]
        pub initiated_id: i64,
    }
}
