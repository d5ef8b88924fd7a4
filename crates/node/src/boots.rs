//! Boots under way, and those that wait for their turn. More at once than the machine has cores for only slow each other down;
//! and a guest that goes on from saved state may take its time to answer.
//!
//! What must hold: a project takes its own places only, and whoever is destroyed while it waits is not booted.

use parking_lot::Mutex;
use std::collections::HashMap;

use atoll_turns::{Turn, Turns};
use atoll_types::{InstanceId, ProjectId};
use tokio_util::sync::CancellationToken;

use crate::local::CROWD;

/// Whose boot it is; `None`: the node's own, for a pool.
type Whose = Option<ProjectId>;

#[derive(Debug)]
pub(crate) struct Boots {
    turns: Turns<Whose>,
    waiting: Mutex<HashMap<InstanceId, CancellationToken>>,
}

impl Boots {
    pub(crate) fn new(of_one: usize) -> Self {
        Self {
            turns: Turns::new(of_one, CROWD * of_one),
            waiting: Mutex::default(),
        }
    }

    /// Waits for a place; `None` if the instance is not wanted any more.
    pub(crate) async fn take(&self, whose: Whose, instance: &InstanceId) -> Option<Turn> {
        let unwanted = CancellationToken::new();
        self.waiting.lock().insert(instance.clone(), unwanted.clone());
        let _line = Line {
            boots: self,
            instance,
        };
        tokio::select! {
            biased;
            () = unwanted.cancelled() => None,
            turn = self.turns.take(&whose) => Some(turn),
        }
    }

    /// Whoever waits to boot this need not any more.
    pub(crate) fn give_up(&self, instance: &InstanceId) {
        if let Some(unwanted) = self.waiting.lock().get(instance) {
            unwanted.cancel();
        }
    }
}

struct Line<'a> {
    boots: &'a Boots,
    instance: &'a InstanceId,
}

impl Drop for Line<'_> {
    fn drop(&mut self) {
        self.boots.waiting.lock().remove(self.instance);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_project_takes_its_own_places_and_what_is_destroyed_leaves_the_line() {
        let boots = Boots::new(2);
        let instance = |n: u8| InstanceId::from_entropy([n; 20]);
        let project = |n: u8| Some(ProjectId::from_entropy([n; 20]));
        let first = boots.take(project(1), &instance(1)).await.unwrap();
        let second = boots.take(project(1), &instance(2)).await.unwrap();
        let soon = Duration::from_secs(1);
        let third = instance(3);
        assert!(
            tokio::time::timeout(soon, boots.take(project(1), &third))
                .await
                .is_err()
        );
        // Others do not wait for it.
        let other = boots.take(project(2), &instance(4)).await.unwrap();
        let pooled = boots.take(None, &instance(5)).await.unwrap();
        drop((other, pooled));
        let (waited, ()) = tokio::join!(boots.take(project(1), &third), async { boots.give_up(&third) });
        assert!(waited.is_none());
        let (waited, ()) = tokio::join!(boots.take(project(1), &third), async { drop(first) });
        assert!(waited.is_some());
        drop((second, waited));
        assert!(boots.waiting.lock().is_empty());
    }
}
