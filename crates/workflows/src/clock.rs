//! The clock: one entry per deadline of a run. An entry that has become wrong is harmless, the run knows better.

use parking_lot::Mutex;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

use atoll_workflow_core::{Nanos, Refusal};
use tokio::sync::Notify;

use crate::Engine;
use crate::cells::Key;

/// How often the time is looked at: somebody may have set the machine's clock on.
const LOOK: Duration = Duration::from_secs(5);

/// How long until it is looked again whether there is room by now.
const NO_ROOM: Nanos = 10_000_000_000;

#[derive(Debug, Default)]
pub(crate) struct Clock {
    due: Mutex<BinaryHeap<Reverse<(Nanos, Key, String)>>>,
    sooner: Notify,
}

impl Clock {
    pub(crate) fn arm(&self, at: Nanos, key: &Key, run_id: &str) {
        let mut due = self.due.lock();
        let sooner = due.peek().is_none_or(|Reverse((first, _, _))| at < *first);
        due.push(Reverse((at, key.clone(), run_id.to_owned())));
        drop(due);
        if sooner {
            self.sooner.notify_one();
        }
    }

    /// What is due, or how long until something is.
    fn take(&self, now: Nanos) -> Result<(Key, String), Option<Duration>> {
        let mut due = self.due.lock();
        match due.peek() {
            Some(Reverse((at, _, _))) if *at <= now => match due.pop() {
                Some(Reverse((_, key, run_id))) => Ok((key, run_id)),
                None => Err(None),
            },
            Some(Reverse((at, _, _))) => {
                Err(Some(Duration::from_nanos(u64::try_from(at - now).unwrap_or(0))))
            }
            None => Err(None),
        }
    }
}

impl Engine {
    pub(crate) async fn keep_time(self) {
        loop {
            match self.inner.clock.take(self.now()) {
                Ok((key, run_id)) => {
                    tokio::spawn(self.clone().tick(key, run_id));
                }
                Err(wait) => {
                    let wait = wait.map_or(LOOK, |wait| wait.min(LOOK));
                    tokio::select! {
                        () = self.inner.stop.cancelled() => return,
                        () = self.inner.clock.sooner.notified() => {}
                        () = tokio::time::sleep(wait) => {}
                    }
                }
            }
        }
    }

    async fn tick(self, key: Key, run_id: String) {
        let result = self.change_if_due(key.clone(), &run_id).await;
        match result {
            Ok(()) | Err(Refusal::NotFound(_) | Refusal::NamespaceNotFound(_)) => {}
            // Its project has no room for what follows.
            Err(Refusal::ResourceExhausted(_)) => {
                let again = self.now() + NO_ROOM;
                self.inner.clock.arm(again, &key, &run_id);
            }
            Err(error) => {
                // It is still due: try again soon rather than lose it.
                tracing::warn!(run_id, %error, "a deadline could not be handled");
                let again = self.now() + 1_000_000_000;
                self.inner.clock.arm(again, &key, &run_id);
            }
        }
    }

    async fn change_if_due(&self, key: Key, run_id: &str) -> Result<(), Refusal> {
        let mut locked = self.lock(&key).await?;
        let run_id = locked.resolve(run_id).await?;
        let now = locked.now();
        let slot = locked.slot(&run_id)?;
        slot.rearm(0);
        // The engine's time has gone back, which it does at a start alone.
        if slot.run.is_ahead(now) {
            locked.decide(&run_id, |slot, turn| {
                slot.run.set_back(turn.now);
                Ok(())
            })?;
            return locked.commit().await;
        }
        let slot = locked.slot(&run_id)?;
        let deadline = slot.run.deadline();
        if deadline == 0 {
            return Ok(());
        }
        if deadline > now {
            slot.rearm(deadline);
            self.inner.clock.arm(deadline, &key, &run_id);
            return Ok(());
        }
        locked.decide(&run_id, |slot, turn| {
            slot.run.tick(turn);
            Ok(())
        })?;
        locked.commit().await
    }
}
