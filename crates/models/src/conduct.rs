//! Hearing a provider out, whether or not the caller still listens.
//!
//! A provider charges for what it has written, not for what somebody has heard of it. So where a budget applies, what the
//! caller hangs up on is read to its end by a task of its own, which settles it at what it used. That is bounded in time, in
//! bytes and in number; what lies beyond is settled at what was reserved. Where no budget applies the provider is hung up on,
//! too, which is cheaper, unless its model has stopped already and only the usage is still to come.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use atoll_types::Fault;
use tokio::sync::oneshot;

use crate::Models;

/// For how long nobody's answer is read.
const LONGEST: Duration = Duration::from_secs(300);
/// How much of it.
pub(crate) const MOST_BYTES: u64 = 64 * 1024 * 1024;
/// How many at once.
const MOST_AT_ONCE: u64 = 1024;

/// One of those that are heard out.
struct Place<'a>(&'a Models);

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.inner.drains.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Models {
    /// Does what must not end in the middle because a caller hangs up. `gone` becomes true when that happens; from then on
    /// it goes on only if `to_its_end`.
    pub(crate) async fn conduct<T: Send + 'static>(
        &self,
        gone: Arc<AtomicBool>,
        to_its_end: bool,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Result<T, Fault> {
        let (mut tell, told) = oneshot::channel();
        let models = self.clone();
        let mut work = Box::pin(work);
        self.inner.runtime.spawn(async move {
            let done = tokio::select! {
                done = &mut work => done,
                () = tell.closed() => {
                    gone.store(true, Ordering::Relaxed);
                    if to_its_end {
                        let _waited_for = models.inner.tasks.token();
                        drop(models.hear_out(work).await);
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
    pub(crate) async fn hear_out<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        if self.inner.drains.fetch_add(1, Ordering::Relaxed) >= MOST_AT_ONCE {
            self.inner.drains.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        let _place = Place(self);
        tokio::select! {
            done = tokio::time::timeout(LONGEST, work) => done.ok(),
            () = self.inner.stopping.cancelled() => None,
        }
    }
}
