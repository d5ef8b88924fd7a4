//! What time brings. There is one deadline per run, the soonest of all that is pending; whoever keeps the time calls
//! [`Run::tick`] when it has come, early or late, once or twice.
//!
//! Time may go back, between two servers. Timers, delays and the end of a run are points in time, and stay where they are. What
//! a worker is given is a length of time, counted from when it began; if that has not come yet, it is counted from now
//! ([`Run::set_back`]), so that nobody waits for a worker as long as the clock was wrong.

use crate::run::{Run, Turn};
use crate::state::{Activity, WorkflowTask};
use crate::time::{Nanos, earlier, is_due};
use crate::words::{Event, history};

impl Run {
    /// When to call [`Run::tick`] next; zero means never.
    pub fn deadline(&self) -> Nanos {
        if !self.is_running() {
            return 0;
        }
        let mut soonest = self.state.run_expires_at;
        match &self.state.task {
            Some(task) if task.started_id != 0 => {
                soonest = earlier(soonest, task.started_at.saturating_add(task.timeout));
            }
            Some(task) => soonest = earlier(soonest, task.start_by),
            None if self.state.last_completed_id == 0 && self.awaits_first_task() => {
                soonest = earlier(soonest, self.state.first_task_at);
            }
            None => {}
        }
        for timer in self.state.timers.values() {
            soonest = earlier(soonest, timer.fire_at);
        }
        for activity in self.state.activities.values() {
            soonest = earlier(soonest, self.activity_deadline(activity));
        }
        soonest
    }

    /// The first workflow task has not been scheduled: the run waits for its time.
    pub(crate) fn awaits_first_task(&self) -> bool {
        self.state.task.is_none() && self.state.last_started_id == 0 && self.state.next_stamp == 0
    }

    /// Something that is waited for began later than now: the clock was set back since.
    pub fn is_ahead(&self, now: Nanos) -> bool {
        let task = self.state.task.as_ref();
        self.is_running()
            && (task.is_some_and(|task| task.latest() > now)
                || self
                    .state
                    .activities
                    .values()
                    .any(|activity| activity.latest() > now))
    }

    /// Counts from now what began later than that.
    pub fn set_back(&mut self, now: Nanos) {
        if let Some(task) = &mut self.state.task {
            task.set_back(now);
        }
        for activity in self.state.activities.values_mut() {
            activity.set_back(now);
        }
    }

    /// Does what has become due. Does nothing if nothing has.
    pub fn tick(&mut self, turn: Turn<'_>) {
        if !self.is_running() {
            return;
        }
        if is_due(self.state.run_expires_at, turn.now) {
            self.state.transitions += 1;
            self.time_out(turn);
            return;
        }
        if self.awaits_first_task() && self.state.first_task_at <= turn.now {
            self.schedule_task(turn.now);
        }
        if let Some(task) = self.state.task.clone() {
            if task.started_id != 0 {
                if is_due(task.started_at.saturating_add(task.timeout), turn.now) {
                    self.time_out_task(turn);
                }
            } else if is_due(task.start_by, turn.now) {
                self.time_out_sticky(turn);
            }
        }
        self.fire_timers(turn);
        self.time_out_activities(turn);
    }

    fn fire_timers(&mut self, turn: Turn<'_>) {
        let mut due: Vec<_> = self
            .state
            .timers
            .iter()
            .filter(|(_, timer)| is_due(timer.fire_at, turn.now))
            .map(|(id, timer)| (timer.fire_at, timer.started_id, id.clone()))
            .collect();
        due.sort();
        for (_, started_event_id, timer_id) in due {
            self.state.timers.remove(&timer_id);
            self.record(
                turn.now,
                Event::TimerFiredEventAttributes(history::TimerFiredEventAttributes {
                    timer_id,
                    started_event_id,
                }),
            );
            self.schedule_task(turn.now);
        }
    }
}

impl WorkflowTask {
    fn latest(&self) -> Nanos {
        self.scheduled_at.max(self.started_at)
    }

    fn set_back(&mut self, now: Nanos) {
        let by = self.scheduled_at.saturating_sub(now).max(0);
        if self.start_by != 0 {
            self.start_by -= by;
        }
        self.scheduled_at -= by;
        self.started_at = self.started_at.min(now);
    }
}

impl Activity {
    fn latest(&self) -> Nanos {
        // One that is on its queue was due when it was put there; another may be meant for later.
        let due = if self.dispatched { self.due_at } else { 0 };
        [
            self.scheduled_at,
            self.started_at,
            self.heartbeat_at,
            self.attempt_ended_at,
        ]
        .into_iter()
        .fold(due, Nanos::max)
    }

    fn set_back(&mut self, now: Nanos) {
        let since = self.scheduled_at.max(self.attempt_ended_at);
        self.due_at -= since.saturating_sub(now).max(0);
        if self.dispatched {
            self.due_at = self.due_at.min(now);
        }
        for at in [
            &mut self.scheduled_at,
            &mut self.started_at,
            &mut self.heartbeat_at,
            &mut self.attempt_ended_at,
        ] {
            *at = (*at).min(now);
        }
    }
}
