//! One at a time of each project: whoever asks for many at once waits for themselves.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

#[derive(Debug, Default)]
pub(super) struct Turns(Mutex<HashMap<String, Arc<Semaphore>>>);

/// A turn; the next one of the project begins when it is dropped.
#[derive(Debug)]
pub(super) struct Turn<'a> {
    turns: &'a Turns,
    project: &'a str,
    permit: Option<OwnedSemaphorePermit>,
}

impl Turns {
    pub(super) async fn take<'a>(&'a self, project: &'a str) -> Turn<'a> {
        let mut turn = Turn {
            turns: self,
            project,
            permit: None,
        };
        let own = {
            let mut all = self.0.lock();
            let own = all.entry(project.to_owned());
            Arc::clone(own.or_insert_with(|| Arc::new(Semaphore::new(1))))
        };
        // It is never closed.
        turn.permit = own.acquire_owned().await.ok();
        turn
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.permit = None;
        let mut all = self.turns.0.lock();
        // Those who wait hold it.
        if all
            .get(self.project)
            .is_some_and(|own| Arc::strong_count(own) == 1)
        {
            all.remove(self.project);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn each_project_has_a_turn_at_a_time() {
        let turns = Turns::default();
        let first = turns.take("a").await;
        let wait = Duration::from_secs(1);
        assert!(tokio::time::timeout(wait, turns.take("a")).await.is_err());
        let other = turns.take("b").await;
        let (second, ()) = tokio::join!(turns.take("a"), async { drop(first) });
        drop((second, other));
        assert!(turns.0.lock().is_empty());
    }
}
