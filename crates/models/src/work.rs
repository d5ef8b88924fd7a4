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

use atoll_turns::Turns;
use atoll_types::{Fault, ProjectId};

use crate::Models;

/// From so many bytes of JSON on, reading and writing them anew is not done in passing: it may take milliseconds.
pub(crate) const LONG: usize = 32 * 1024;
/// Looking at bytes, or hashing them, is so much quicker than reading them as JSON.
pub(crate) const QUICKER: usize = 16;

/// Who may work at a time: as many as there are processors, and half of that of one project.
pub(crate) fn places() -> Turns<ProjectId> {
    let all = std::thread::available_parallelism().map_or(1, usize::from).max(2);
    Turns::new(all / 2, all)
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
        let place = self.inner.places.take(project).await;
        let span = tracing::Span::current();
        let working = self.inner.runtime.spawn_blocking(move || {
            let _place = place;
            span.in_scope(work)
        });
        working.await.map_err(|_| unfinished())
    }
}
