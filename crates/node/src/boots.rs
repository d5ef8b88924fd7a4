//! Boots under way, and those that wait for their turn. More at once than the machine has cores for only slow each other down;
//! and a guest that goes on from saved state may take its time to answer.
//!
//! What must hold: a project takes its own places only, and whoever is destroyed while it waits is not booted.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;

use atoll_types::{InstanceId, ProjectId};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;

/// Whose boot it is; `None`: the node's own, for a pool.
type Whose = Option<ProjectId>;

#[derive(Debug)]
pub(crate) struct Boots {
    /// Twice as many as of one project, so that no project waits for another one alone.
    all: Arc<Semaphore>,
    of_one: usize,
    projects: Mutex<HashMap<Whose, Arc<Semaphore>>>,
    waiting: Mutex<HashMap<InstanceId, CancellationToken>>,
}

/// A place, until it is dropped.
#[derive(Debug)]
pub(crate) struct Turn<'a> {
    boots: &'a Boots,
    whose: Whose,
    permits: Option<(OwnedSemaphorePermit, OwnedSemaphorePermit)>,
}

impl Boots {
    pub(crate) fn new(of_one: usize) -> Self {
        Self {
            all: Arc::new(Semaphore::new(2 * of_one)),
            of_one,
            projects: Mutex::default(),
            waiting: Mutex::default(),
        }
    }

    /// Waits for a place; `None` if the instance is not wanted any more.
    pub(crate) async fn take(&self, whose: Whose, instance: &InstanceId) -> Option<Turn<'_>> {
        let unwanted = CancellationToken::new();
        self.waiting.lock().insert(instance.clone(), unwanted.clone());
        let _line = Line {
            boots: self,
            instance,
        };
        let mut turn = Turn {
            boots: self,
            whose: whose.clone(),
            permits: None,
        };
        let own = {
            let mut projects = self.projects.lock();
            let own = projects.entry(whose);
            Arc::clone(own.or_insert_with(|| Arc::new(Semaphore::new(self.of_one))))
        };
        let permits = async {
            let own = own.acquire_owned().await.ok()?;
            Some((own, Arc::clone(&self.all).acquire_owned().await.ok()?))
        };
        turn.permits = tokio::select! {
            biased;
            () = unwanted.cancelled() => None,
            permits = permits => permits,
        };
        turn.permits.is_some().then_some(turn)
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

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.permits = None;
        let mut projects = self.boots.projects.lock();
        // Those who wait hold it.
        if projects
            .get(&self.whose)
            .is_some_and(|own| Arc::strong_count(own) == 1)
        {
            projects.remove(&self.whose);
        }
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
        assert!(boots.projects.lock().is_empty() && boots.waiting.lock().is_empty());
        assert_eq!(boots.all.available_permits(), 4);
    }
}
