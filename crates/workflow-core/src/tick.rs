//! What time brings. There is one deadline per run, the soonest of all that is pending; whoever keeps the time calls
//! [`Run::tick`] when it has come, early or late, once or twice.

use crate::run::{Run, Turn};
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
            None if self.state.last_completed_id == 0 && self.last_task_event_missing() => {
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
    fn last_task_event_missing(&self) -> bool {
        self.state.task.is_none() && self.state.last_started_id == 0 && self.state.next_stamp == 0
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
        if self.last_task_event_missing() && self.state.first_task_at <= turn.now {
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
