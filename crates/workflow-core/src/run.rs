//! A run: one execution of a workflow, its events and what is pending in it.

use std::collections::BTreeMap;

use prost::Message as _;

use crate::limits::Limits;
use crate::size::Sizes;
use crate::state::{Letter, Outgoing, State};
use crate::time::{Nanos, stamp};
use crate::update::Registry;
use crate::words::{Event, HistoryEvent, enums, history};

/// What every decision is given from outside: the time, one id that nobody has used, and how much is allowed.
#[derive(Debug, Clone, Copy)]
pub struct Turn<'a> {
    pub now: Nanos,
    /// For the run that may follow this one.
    pub fresh_run_id: &'a str,
    pub limits: &'a Limits,
}

/// What a task queue has to be told, once the events are durable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    WorkflowTask {
        queue: String,
        /// `queue` belongs to one worker.
        sticky: bool,
        stamp: i64,
    },
    ActivityTask {
        queue: String,
        scheduled_id: i64,
        stamp: i64,
    },
}

/// See the crate's documentation.
#[derive(Debug, Clone)]
pub struct Run {
    pub state: State,
    /// All of them; the first has id one.
    pub events: Vec<HistoryEvent>,
    pub(crate) registry: Registry,
    pub(crate) effects: Vec<Effect>,
    pub(crate) successor: Option<Box<Self>>,
    /// Something had arrived before the commands of the task at hand are carried out.
    pub(crate) had_buffered: bool,
    /// Commands are being carried out: what they cause waits until all of them are.
    pub(crate) holding: bool,
    /// Who completes the task at hand.
    pub(crate) answering: String,
    /// How many of the events are durable.
    saved: usize,
    pub(crate) sizes: Sizes,
    /// Counts changes of what it is searched by.
    pub search_changes: u64,
}

impl Run {
    pub(crate) fn new(state: State) -> Self {
        Self {
            state,
            events: Vec::new(),
            registry: Registry::default(),
            effects: Vec::new(),
            successor: None,
            had_buffered: false,
            holding: false,
            answering: String::new(),
            saved: 0,
            sizes: Sizes::default(),
            search_changes: 0,
        }
    }

    /// A run as it was written. What was only in memory is gone: speculative tasks and updates that nobody accepted.
    pub fn restore(state: State, events: Vec<HistoryEvent>) -> Self {
        let mut run = Self::new(state);
        run.saved = events.len();
        run.events = events;
        if run.state.task.as_ref().is_some_and(|task| task.speculative) {
            run.state.task = None;
        }
        run.restore_admitted();
        run
    }

    pub fn is_running(&self) -> bool {
        self.state.status == i32::from(enums::WorkflowExecutionStatus::Running)
    }

    /// The first event's attributes.
    pub fn started(&self) -> &history::WorkflowExecutionStartedEventAttributes {
        static NONE: std::sync::LazyLock<history::WorkflowExecutionStartedEventAttributes> =
            std::sync::LazyLock::new(Default::default);
        match self.events.first().and_then(|event| event.attributes.as_ref()) {
            Some(Event::WorkflowExecutionStartedEventAttributes(started)) => started,
            _ => &NONE,
        }
    }

    pub fn workflow_type(&self) -> &str {
        self.started()
            .workflow_type
            .as_ref()
            .map_or("", |name| name.name.as_str())
    }

    /// The queue that its workers poll.
    pub fn task_queue(&self) -> &str {
        self.started()
            .task_queue
            .as_ref()
            .map_or("", |queue| queue.name.as_str())
    }

    pub fn event(&self, id: i64) -> Option<&HistoryEvent> {
        self.events.get(usize::try_from(id).ok()?.checked_sub(1)?)
    }

    pub(crate) fn attributes(&self, id: i64) -> Option<&Event> {
        self.event(id)?.attributes.as_ref()
    }

    pub fn last_event_id(&self) -> i64 {
        i64::try_from(self.events.len()).unwrap_or(i64::MAX)
    }

    pub(crate) fn next_event_id(&self) -> i64 {
        self.last_event_id() + 1
    }

    /// Events that are not durable yet.
    pub fn unsaved(&self) -> &[HistoryEvent] {
        &self.events[self.saved..]
    }

    pub fn mark_saved(&mut self) {
        self.saved = self.events.len();
    }

    pub fn take_effects(&mut self) -> Vec<Effect> {
        std::mem::take(&mut self.effects)
    }

    /// The run that follows this one, to be written in the same transaction.
    pub fn take_successor(&mut self) -> Option<Self> {
        self.successor.take().map(|run| *run)
    }

    /// The effects that a restart has lost: everything that is on a queue.
    pub fn dispatch_again(&self) -> Vec<Effect> {
        let mut effects = Vec::new();
        if !self.is_running() {
            return effects;
        }
        if let Some(task) = self.state.task.as_ref().filter(|task| task.started_id == 0) {
            effects.push(self.task_effect(task));
        }
        for activity in self.state.activities.values() {
            if activity.dispatched && activity.started_at == 0 && !activity.paused {
                effects.extend(self.activity_effect(activity));
            }
        }
        effects
    }

    /// Something waits that no deadline will bring up: a task on a queue, or a letter.
    pub fn is_ready(&self) -> bool {
        if !self.state.outbox.is_empty() {
            return true;
        }
        self.is_running()
            && (self.state.task.as_ref().is_some_and(|task| task.started_id == 0)
                || self
                    .state
                    .activities
                    .values()
                    .any(|activity| activity.dispatched && activity.started_at == 0 && !activity.paused))
    }

    pub(crate) fn next_stamp(&mut self) -> i64 {
        self.state.next_stamp += 1;
        self.state.next_stamp
    }

    pub(crate) fn post(&mut self, body: Outgoing) {
        let number = self.next_stamp();
        self.state.outbox.push(Letter {
            number,
            body: Some(body),
        });
    }

    /// A letter has arrived, or never will. False if it was not there (any more).
    pub fn discard_letter(&mut self, number: i64) -> bool {
        let before = self.state.outbox.len();
        self.state.outbox.retain(|letter| letter.number != number);
        before != self.state.outbox.len()
    }

    /// Appends an event that belongs to the workflow task at hand, or to the run itself.
    pub(crate) fn append(&mut self, now: Nanos, event: Event) -> i64 {
        let mut event = unnumbered(now, event);
        event.event_id = self.next_event_id();
        self.push(event)
    }

    pub(crate) fn push(&mut self, mut event: HistoryEvent) -> i64 {
        let id = self.next_event_id();
        event.event_id = id;
        event.task_id = id;
        self.state.history_bytes += i64::try_from(event.encoded_len()).unwrap_or(0);
        self.events.push(event);
        id
    }

    /// Takes what happened outside of the workflow's own code: appended now, or kept until the started workflow task is
    /// over.
    pub(crate) fn record(&mut self, now: Nanos, event: Event) {
        self.record_event(unnumbered(now, event));
    }

    pub(crate) fn record_event(&mut self, event: HistoryEvent) {
        if self.holding || self.state.task.as_ref().is_some_and(|task| task.started_id != 0) {
            self.write_speculative();
            let bytes = self.buffered_bytes() + event.encoded_len();
            self.sizes.buffered = Some(bytes);
            self.state.buffered.push(event);
        } else {
            // A speculative task that nobody has yet is written behind it, when the next task is asked for.
            self.push(event);
        }
    }

    /// Takes back what waits.
    pub(crate) fn unbuffer(&mut self, at: usize) -> HistoryEvent {
        self.sizes.buffered = None;
        self.state.buffered.remove(at)
    }

    /// Appends what was kept: what starts things first, then what ends them, each in the order of arrival. An end names
    /// the event of its start, which has its number only now.
    pub(crate) fn flush(&mut self) -> bool {
        let buffered = std::mem::take(&mut self.state.buffered);
        self.sizes.buffered = None;
        if buffered.is_empty() {
            return false;
        }
        let (ends, others): (Vec<_>, Vec<_>) = buffered
            .into_iter()
            .partition(|event| event.attributes.as_ref().is_some_and(is_end));
        let mut started = BTreeMap::new();
        for mut event in others.into_iter().chain(ends) {
            if let Some(attributes) = &mut event.attributes {
                point_to_start(attributes, &started);
            }
            let key = event.attributes.as_ref().and_then(starts);
            let id = self.push(event);
            if let Some(key) = key {
                started.insert(key, id);
                if let Some(child) = self.state.children.get_mut(&key) {
                    child.started_id = id;
                }
            }
        }
        true
    }
}

pub(crate) fn unnumbered(now: Nanos, mut event: Event) -> HistoryEvent {
    crate::size::make_event_shallow(&mut event);
    HistoryEvent {
        event_time: Some(stamp(now)),
        event_type: event.event_type().into(),
        attributes: Some(event),
        ..Default::default()
    }
}

/// The event that the thing which starts here is known by.
fn starts(event: &Event) -> Option<i64> {
    match event {
        Event::ActivityTaskStartedEventAttributes(started) => Some(started.scheduled_event_id),
        Event::ChildWorkflowExecutionStartedEventAttributes(started) => Some(started.initiated_event_id),
        _ => None,
    }
}

fn is_end(event: &Event) -> bool {
    matches!(
        event,
        Event::ActivityTaskCompletedEventAttributes(_)
            | Event::ActivityTaskFailedEventAttributes(_)
            | Event::ActivityTaskTimedOutEventAttributes(_)
            | Event::ActivityTaskCanceledEventAttributes(_)
            | Event::ChildWorkflowExecutionCompletedEventAttributes(_)
            | Event::ChildWorkflowExecutionFailedEventAttributes(_)
            | Event::ChildWorkflowExecutionTimedOutEventAttributes(_)
            | Event::ChildWorkflowExecutionCanceledEventAttributes(_)
            | Event::ChildWorkflowExecutionTerminatedEventAttributes(_)
            | Event::StartChildWorkflowExecutionFailedEventAttributes(_)
    )
}

/// The scheduled event of an activity whose end this is.
pub(crate) fn ended_activity(event: &Event) -> Option<i64> {
    match event {
        Event::ActivityTaskCompletedEventAttributes(end) => Some(end.scheduled_event_id),
        Event::ActivityTaskFailedEventAttributes(end) => Some(end.scheduled_event_id),
        Event::ActivityTaskTimedOutEventAttributes(end) => Some(end.scheduled_event_id),
        Event::ActivityTaskCanceledEventAttributes(end) => Some(end.scheduled_event_id),
        _ => None,
    }
}

fn point_to_start(event: &mut Event, started: &BTreeMap<i64, i64>) {
    let (key, field) = match event {
        Event::ActivityTaskCompletedEventAttributes(end) => {
            (end.scheduled_event_id, &mut end.started_event_id)
        }
        Event::ActivityTaskFailedEventAttributes(end) => (end.scheduled_event_id, &mut end.started_event_id),
        Event::ActivityTaskTimedOutEventAttributes(end) => {
            (end.scheduled_event_id, &mut end.started_event_id)
        }
        Event::ActivityTaskCanceledEventAttributes(end) => {
            (end.scheduled_event_id, &mut end.started_event_id)
        }
        Event::ChildWorkflowExecutionCompletedEventAttributes(end) => {
            (end.initiated_event_id, &mut end.started_event_id)
        }
        Event::ChildWorkflowExecutionFailedEventAttributes(end) => {
            (end.initiated_event_id, &mut end.started_event_id)
        }
        Event::ChildWorkflowExecutionTimedOutEventAttributes(end) => {
            (end.initiated_event_id, &mut end.started_event_id)
        }
        Event::ChildWorkflowExecutionCanceledEventAttributes(end) => {
            (end.initiated_event_id, &mut end.started_event_id)
        }
        Event::ChildWorkflowExecutionTerminatedEventAttributes(end) => {
            (end.initiated_event_id, &mut end.started_event_id)
        }
        _ => return,
    };
    if let Some(id) = started.get(&key) {
        *field = *id;
    }
}
