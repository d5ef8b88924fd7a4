//! What people do to an activity that has not finished: hold it back, let it go on, count its attempts anew.
//!
//! An attempt that a worker holds is never taken away. Its worker hears of it with the next heartbeat, and decides.

use crate::refusal::Refusal;
use crate::run::{Run, Turn};
use crate::state::{Activity, Pause};

/// Which activities are meant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Which {
    Id(String),
    Type(String),
    All,
}

/// How an activity goes on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GoOn {
    pub reset_attempts: bool,
    pub reset_heartbeat: bool,
}

impl Run {
    fn chosen(&self, which: &Which) -> Result<Vec<i64>, Refusal> {
        if !self.is_running() {
            return Err(Refusal::completed());
        }
        let is_chosen = |activity: &Activity| match which {
            Which::Id(id) => activity.activity_id == *id,
            Which::Type(wanted) => self
                .scheduled_activity(activity.scheduled_id)
                .and_then(|scheduled| scheduled.activity_type.as_ref())
                .is_some_and(|kind| kind.name == *wanted),
            Which::All => true,
        };
        let chosen: Vec<_> = self
            .state
            .activities
            .values()
            .filter(|activity| is_chosen(activity))
            .map(|activity| activity.scheduled_id)
            .collect();
        if chosen.is_empty() && *which != Which::All {
            return Err(Refusal::NotFound(
                "invalid activityID or activity already timed out or invoking workflow is completed"
                    .to_owned(),
            ));
        }
        Ok(chosen)
    }

    /// Whether an activity on this queue is among those that are chosen.
    pub fn chooses_one_on(&self, which: &Which, queue: &str) -> Result<bool, Refusal> {
        let chosen = self.chosen(which)?;
        Ok(chosen
            .into_iter()
            .any(|id| self.activity_queue(id) == Some(queue)))
    }

    /// No further attempt begins. Pausing again changes nothing.
    pub fn pause_activities(
        &mut self,
        which: &Which,
        identity: &str,
        reason: &str,
        turn: Turn<'_>,
    ) -> Result<(), Refusal> {
        for id in self.chosen(which)? {
            let stamp = self.next_stamp();
            let Some(activity) = self.state.activities.get_mut(&id).filter(|known| !known.paused) else {
                continue;
            };
            activity.paused = true;
            activity.pause = Some(Pause {
                at: turn.now,
                identity: identity.to_owned(),
                reason: reason.to_owned(),
            });
            if activity.started_at == 0 {
                // A worker that finds it on the queue is told that it is gone.
                activity.stamp = stamp;
                activity.dispatched = false;
            }
            self.state.transitions += 1;
        }
        Ok(())
    }

    pub fn unpause_activities(&mut self, which: &Which, how: GoOn, turn: Turn<'_>) -> Result<(), Refusal> {
        for id in self.chosen(which)? {
            let Some(activity) = self.state.activities.get_mut(&id).filter(|known| known.paused) else {
                continue;
            };
            activity.paused = false;
            activity.pause = None;
            how.apply(activity);
            if activity.started_at == 0 {
                activity.due_at = turn.now;
            }
            self.state.transitions += 1;
        }
        self.dispatch_due_activities(turn.now);
        Ok(())
    }

    /// Counts attempts from one again. An attempt that waits begins at once; one that runs is told, and what it fails with
    /// counts as it would have.
    pub fn reset_activities(
        &mut self,
        which: &Which,
        keep_paused: bool,
        reset_heartbeat: bool,
        turn: Turn<'_>,
    ) -> Result<(), Refusal> {
        for id in self.chosen(which)? {
            let stamp = self.next_stamp();
            let Some(activity) = self.state.activities.get_mut(&id) else {
                continue;
            };
            if !keep_paused {
                activity.paused = false;
                activity.pause = None;
            }
            if activity.started_at == 0 {
                activity.stamp = stamp;
                activity.dispatched = false;
                activity.due_at = turn.now;
                let how = GoOn {
                    reset_attempts: true,
                    reset_heartbeat,
                };
                how.apply(activity);
            } else {
                activity.reset = true;
                activity.reset_heartbeat = reset_heartbeat;
            }
            self.state.transitions += 1;
        }
        self.dispatch_due_activities(turn.now);
        Ok(())
    }
}

impl GoOn {
    fn apply(self, activity: &mut Activity) {
        if self.reset_attempts {
            activity.attempt = 1;
        }
        if self.reset_heartbeat {
            activity.heartbeat = None;
        }
    }
}
