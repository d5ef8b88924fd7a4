//! Hearing a provider out, whether or not the caller still listens.
//!
//! A provider charges for what it has written, not for what somebody has heard of it. So where a budget applies, what the
//! caller hangs up on is read to its end by a task of its own, which settles it at what it used. That is bounded in time, in
//! bytes and in number; what lies beyond is settled at what was reserved. Where no budget applies the provider is hung up on,
//! too, which is cheaper, unless its model has stopped already and only the usage is still to come.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use atoll_types::{Fault, ProjectId};
use tokio::sync::oneshot;

use crate::Models;

/// For how long nobody's answer is read.
const LONGEST: Duration = Duration::from_secs(300);
/// How much of it.
pub(crate) const MOST_BYTES: u64 = 64 * 1024 * 1024;
/// How many of one project at once; what one leaves unheard is not to cost another its place.
const MOST_AT_ONCE: usize = 256;

/// Answers that are heard out though nobody listens any more, by project.
#[derive(Debug, Default)]
pub(crate) struct Unheard(Mutex<HashMap<ProjectId, usize>>);

/// One of them.
struct Place<'a>(&'a Unheard, &'a ProjectId);

impl Unheard {
    fn enter<'a>(&'a self, project: &'a ProjectId) -> Option<Place<'a>> {
        let mut counts = self.0.lock();
        let count = counts.entry(project.clone()).or_default();
        if *count >= MOST_AT_ONCE {
            return None;
        }
        *count += 1;
        Some(Place(self, project))
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut counts = self.0.0.lock();
        if let Some(count) = counts.get_mut(self.1) {
            *count -= 1;
            if *count == 0 {
                counts.remove(self.1);
            }
        }
    }
}

impl Models {
    /// Does what must not end in the middle because a caller hangs up. `gone` becomes true when that happens; from then on
    /// it goes on only if `to_its_end`.
    pub(crate) async fn conduct<T: Send + 'static>(
        &self,
        project: ProjectId,
        gone: Arc<AtomicBool>,
        to_its_end: bool,
        mut work: Pin<Box<impl Future<Output = T> + Send + 'static>>,
    ) -> Result<T, Fault> {
        let (mut tell, told) = oneshot::channel();
        let models = self.clone();
        self.inner.runtime.spawn(async move {
            let done = tokio::select! {
                done = &mut work => done,
                () = tell.closed() => {
                    gone.store(true, Ordering::Relaxed);
                    if to_its_end {
                        let _waited_for = models.inner.tasks.token();
                        drop(models.hear_out(&project, work).await);
                    }
                    return;
                }
            };
            // A stream that nobody takes is dropped here, and knows what to do.
            drop(tell.send(done));
        });
        told.await
            .map_err(|_| Fault::internal("the call could not be finished"))
    }

    /// Waits for the end of something, but not for ever; `None`: it was not waited for.
    pub(crate) async fn hear_out<T>(&self, project: &ProjectId, work: impl Future<Output = T>) -> Option<T> {
        let _place = self.inner.unheard.enter(project)?;
        tokio::select! {
            done = tokio::time::timeout(LONGEST, work) => done.ok(),
            () = self.inner.stopping.cancelled() => None,
        }
    }
}
