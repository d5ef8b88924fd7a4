//! Work that keeps a processor for long, done where nobody else waits for one.
//!
//! How large a request is its caller chooses, and how large an answer is its provider, who may be the same. Reading, screening,
//! translating and hashing take the longer the larger it is; done by the threads that serve requests, a few of them would hold up
//! everybody. So what is long is done by threads for what blocks: as many at a time as there are processors, and for one
//! project half of them.
//!
//! What must hold: nothing that grows with what others send is done on the threads that serve requests once it is [`LONG`].
//! Who waits for a place of their own project holds none of the others', so a project that has all of its own waits for itself
//! alone, and others wait for one turn of each project at most. Who hangs up while waiting has not begun.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use atoll_types::{Fault, ProjectId};
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::Models;

/// From so many bytes of JSON on, reading and writing them anew is not done in passing: it may take milliseconds.
pub(crate) const LONG: usize = 32 * 1024;
/// Looking at bytes, or hashing them, is so much quicker than reading them as JSON.
pub(crate) const QUICKER: usize = 16;

/// Who may work at a time.
#[derive(Debug)]
pub(crate) struct Places {
    all: Arc<Semaphore>,
    of_one: usize,
    /// Of those who work or wait.
    projects: Mutex<HashMap<ProjectId, Weak<Semaphore>>>,
}

/// A place, until it is dropped.
#[derive(Debug)]
struct Place {
    _of_project: OwnedSemaphorePermit,
    _of_all: OwnedSemaphorePermit,
}

impl Default for Places {
    fn default() -> Self {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        Self::new(processors.max(2))
    }
}

impl Places {
    fn new(all: usize) -> Self {
        Self {
            all: Arc::new(Semaphore::new(all)),
            of_one: (all / 2).max(1),
            projects: Mutex::default(),
        }
    }

    /// Waits for a place. `None` does not happen: nobody closes what is waited for.
    async fn enter(&self, project: &ProjectId) -> Option<Place> {
        let own = self.of(project);
        let of_project = own.acquire_owned().await.ok()?;
        let of_all = Arc::clone(&self.all).acquire_owned().await.ok()?;
        Some(Place {
            _of_project: of_project,
            _of_all: of_all,
        })
    }

    fn of(&self, project: &ProjectId) -> Arc<Semaphore> {
        let mut projects = self.projects.lock();
        if let Some(own) = projects.get(project).and_then(Weak::upgrade) {
            return own;
        }
        projects.retain(|_, other| other.strong_count() > 0);
        let own = Arc::new(Semaphore::new(self.of_one));
        projects.insert(project.clone(), Arc::downgrade(&own));
        own
    }
}

impl Models {
    /// Does something that grows with `bytes`: here where they are few, else where nobody else waits.
    pub(crate) async fn apart<T: Send + 'static>(
        &self,
        project: &ProjectId,
        bytes: usize,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Fault> {
        if bytes < LONG {
            return Ok(work());
        }
        let unfinished = || Fault::internal("what is large about the call could not be worked through");
        let place = self.inner.places.enter(project).await.ok_or_else(unfinished)?;
        let span = tracing::Span::current();
        let working = self.inner.runtime.spawn_blocking(move || {
            let _place = place;
            span.in_scope(work)
        });
        working.await.map_err(|_| unfinished())
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    fn project(n: u8) -> ProjectId {
        ProjectId::from_entropy([n; 20])
    }

    #[test]
    fn a_project_waits_for_itself_and_leaves_places_to_others() {
        let places = Places::new(4);
        let enter = |n| places.enter(&project(n)).now_or_never().flatten();
        let held: Vec<Place> = [enter(1), enter(1), enter(2)].into_iter().flatten().collect();
        assert_eq!(held.len(), 3);
        let one = project(1);
        let mut third = Box::pin(places.enter(&one));
        assert!((&mut third).now_or_never().is_none(), "it has half of them");
        let last = enter(3);
        assert!(last.is_some(), "who waits for its own holds up nobody");
        assert!(enter(2).is_none(), "there are four");
        drop(last);
        assert!((&mut third).now_or_never().is_none(), "still half");
        drop(held);
        assert!(third.now_or_never().flatten().is_some());
    }

    #[test]
    fn nothing_is_remembered_of_those_who_have_gone() {
        let places = Places::new(2);
        for n in 0..50 {
            drop(places.enter(&project(n)).now_or_never());
        }
        assert!(places.projects.lock().len() <= 1);
    }
}
