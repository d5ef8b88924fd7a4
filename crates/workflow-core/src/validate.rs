//! What every history must satisfy, whoever wrote it. Used by simulations and after crashes.

use std::collections::BTreeSet;

use crate::words::enums::EventType;
use crate::words::{Event, HistoryEvent};

/// Says what is wrong with a history, if anything is.
pub fn check(events: &[HistoryEvent]) -> Result<(), String> {
    let mut checker = Checker::default();
    for (at, event) in events.iter().enumerate() {
        let id = i64::try_from(at + 1).unwrap_or(i64::MAX);
        if event.event_id != id {
            return Err(format!("event {id} has id {}", event.event_id));
        }
        let Some(attributes) = &event.attributes else {
            return Err(format!("event {id} has no attributes"));
        };
        if event.event_type != i32::from(attributes.event_type()) {
            return Err(format!("event {id} is not of the type that it says"));
        }
        if event.event_time.is_none() {
            return Err(format!("event {id} has no time"));
        }
        checker
            .event(id, attributes)
            .map_err(|text| format!("event {id} ({:?}): {text}", attributes.event_type()))?;
    }
    Ok(())
}

#[derive(Default)]
struct Checker {
    scheduled: i64,
    started: i64,
    completed: i64,
    closed: bool,
    activities: BTreeSet<i64>,
    activity_started: BTreeSet<i64>,
    timers: BTreeSet<(String, i64)>,
    children: BTreeSet<i64>,
    children_started: BTreeSet<i64>,
    updates: BTreeSet<i64>,
}

impl Checker {
    fn event(&mut self, id: i64, event: &Event) -> Result<(), String> {
        let kind = event.event_type();
        ensure(!self.closed, "comes after the end")?;
        ensure(
            (id == 1) == (kind == EventType::WorkflowExecutionStarted),
            "a history starts with its start, once",
        )?;
        let task_event = matches!(
            kind,
            EventType::WorkflowTaskCompleted
                | EventType::WorkflowTaskFailed
                | EventType::WorkflowTaskTimedOut
        );
        ensure(
            self.started == 0 || task_event,
            "nothing is appended while a workflow task is started",
        )?;
        self.task(id, event)?;
        self.activity(id, event)?;
        self.timer_or_child(id, event)?;
        self.update(id, event)?;
        self.closed = matches!(
            kind,
            EventType::WorkflowExecutionCompleted
                | EventType::WorkflowExecutionFailed
                | EventType::WorkflowExecutionTimedOut
                | EventType::WorkflowExecutionCanceled
                | EventType::WorkflowExecutionTerminated
                | EventType::WorkflowExecutionContinuedAsNew
        );
        Ok(())
    }

    fn task(&mut self, id: i64, event: &Event) -> Result<(), String> {
        match event {
            Event::WorkflowTaskScheduledEventAttributes(_) => {
                ensure(self.scheduled == 0, "a workflow task is pending already")?;
                self.scheduled = id;
            }
            Event::WorkflowTaskStartedEventAttributes(started) => {
                ensure(
                    self.scheduled != 0 && started.scheduled_event_id == self.scheduled,
                    "starts a workflow task that was not scheduled",
                )?;
                self.started = id;
            }
            Event::WorkflowTaskCompletedEventAttributes(done) => {
                self.end_task(done.scheduled_event_id, done.started_event_id)?;
                self.completed = id;
            }
            Event::WorkflowTaskFailedEventAttributes(done) => {
                self.end_task(done.scheduled_event_id, done.started_event_id)?;
            }
            Event::WorkflowTaskTimedOutEventAttributes(done) => {
                self.end_task(done.scheduled_event_id, done.started_event_id)?;
            }
            _ => {}
        }
        Ok(())
    }

    fn end_task(&mut self, scheduled: i64, started: i64) -> Result<(), String> {
        ensure(
            scheduled == self.scheduled && started == self.started && scheduled != 0,
            "ends another workflow task than the pending one",
        )?;
        self.scheduled = 0;
        self.started = 0;
        Ok(())
    }

    fn activity(&mut self, id: i64, event: &Event) -> Result<(), String> {
        let (scheduled, started) = match event {
            Event::ActivityTaskScheduledEventAttributes(scheduled) => {
                self.of_last_task(scheduled.workflow_task_completed_event_id)?;
                self.activities.insert(id);
                return Ok(());
            }
            Event::ActivityTaskStartedEventAttributes(started) => {
                ensure(
                    self.activities.contains(&started.scheduled_event_id),
                    "starts an activity that is not pending",
                )?;
                self.activity_started.insert(id);
                return Ok(());
            }
            Event::ActivityTaskCompletedEventAttributes(end) => {
                (end.scheduled_event_id, end.started_event_id)
            }
            Event::ActivityTaskFailedEventAttributes(end) => (end.scheduled_event_id, end.started_event_id),
            Event::ActivityTaskTimedOutEventAttributes(end) => (end.scheduled_event_id, end.started_event_id),
            Event::ActivityTaskCanceledEventAttributes(end) => (end.scheduled_event_id, end.started_event_id),
            _ => return Ok(()),
        };
        ensure(
            self.activities.remove(&scheduled),
            "ends an activity that is not pending",
        )?;
        ensure(
            started == 0 || self.activity_started.remove(&started),
            "names a start that is not its own",
        )
    }

    fn timer_or_child(&mut self, id: i64, event: &Event) -> Result<(), String> {
        match event {
            Event::TimerStartedEventAttributes(timer) => {
                self.of_last_task(timer.workflow_task_completed_event_id)?;
                self.timers.insert((timer.timer_id.clone(), id));
                Ok(())
            }
            Event::TimerFiredEventAttributes(timer) => ensure(
                self.timers
                    .remove(&(timer.timer_id.clone(), timer.started_event_id)),
                "fires a timer that is not pending",
            ),
            Event::TimerCanceledEventAttributes(timer) => ensure(
                self.timers
                    .remove(&(timer.timer_id.clone(), timer.started_event_id)),
                "cancels a timer that is not pending",
            ),
            Event::StartChildWorkflowExecutionInitiatedEventAttributes(child) => {
                self.of_last_task(child.workflow_task_completed_event_id)?;
                self.children.insert(id);
                Ok(())
            }
            Event::ChildWorkflowExecutionStartedEventAttributes(child) => {
                self.children_started.insert(id);
                ensure(
                    self.children.contains(&child.initiated_event_id),
                    "starts a child that was not asked for",
                )
            }
            Event::ChildWorkflowExecutionCompletedEventAttributes(child) => ensure(
                self.children.remove(&child.initiated_event_id)
                    && self.children_started.remove(&child.started_event_id),
                "ends a child that is not pending",
            ),
            Event::ChildWorkflowExecutionFailedEventAttributes(child) => ensure(
                self.children.remove(&child.initiated_event_id)
                    && self.children_started.remove(&child.started_event_id),
                "ends a child that is not pending",
            ),
            _ => Ok(()),
        }
    }

    fn update(&mut self, id: i64, event: &Event) -> Result<(), String> {
        match event {
            Event::WorkflowExecutionUpdateAcceptedEventAttributes(_) => {
                self.updates.insert(id);
                Ok(())
            }
            Event::WorkflowExecutionUpdateCompletedEventAttributes(done) => ensure(
                self.updates.remove(&done.accepted_event_id),
                "completes an update that was not accepted",
            ),
            _ => Ok(()),
        }
    }

    fn of_last_task(&self, completed: i64) -> Result<(), String> {
        ensure(
            completed == self.completed,
            "belongs to another workflow task than the last one",
        )
    }
}

fn ensure(condition: bool, text: &str) -> Result<(), String> {
    if condition { Ok(()) } else { Err(text.to_owned()) }
}
