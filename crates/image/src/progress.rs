//! How a build tells what it is doing, and how it is stopped.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{Error, Result};

/// One step further. `done` and `total` are in the unit of the stage: bytes, or steps where `total` is small.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Update<'a> {
    /// What is going on, in few words; a new stage starts a new bar.
    pub stage: &'a str,
    pub done: u64,
    /// Zero when it is not known.
    pub total: u64,
    /// A line of detail or of a build step's output; may be empty.
    pub message: &'a str,
}

/// Hears about a build's progress. Called often, from any thread: must be quick and must not block.
pub trait Progress: Send + Sync {
    fn update(&self, update: Update<'_>);
}

impl<F: Fn(Update<'_>) + Send + Sync> Progress for F {
    fn update(&self, update: Update<'_>) {
        self(update);
    }
}

/// For callers that do not care.
#[derive(Debug, Clone, Copy)]
pub struct Quiet;

impl Progress for Quiet {
    fn update(&self, _: Update<'_>) {}
}

/// What every part of a build is handed: where to report, and whether to go on.
#[derive(Clone)]
pub(crate) struct Job {
    progress: Arc<dyn Progress>,
    stopped: Arc<AtomicBool>,
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Job").finish_non_exhaustive()
    }
}

impl Job {
    pub(crate) fn new(progress: Arc<dyn Progress>) -> Self {
        Self {
            progress,
            stopped: Arc::default(),
        }
    }

    /// Reports, and fails when nobody waits for the result any more.
    pub(crate) fn report(&self, stage: &str, done: u64, total: u64, message: &str) -> Result<()> {
        self.check()?;
        self.progress.update(Update {
            stage,
            done,
            total,
            message,
        });
        Ok(())
    }

    pub(crate) fn check(&self) -> Result<()> {
        if self.stopped.load(Ordering::Relaxed) {
            return Err(Error::Stopped);
        }
        Ok(())
    }

    /// Runs file work on a thread of its own. Cancel-safe: when the future is dropped, `work` fails at its next report
    /// and what it holds (a scratch directory above all) is cleaned up there.
    pub(crate) async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Self) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        struct StopOnDrop(Option<Arc<AtomicBool>>);
        impl Drop for StopOnDrop {
            fn drop(&mut self) {
                if let Some(flag) = &self.0 {
                    flag.store(true, Ordering::Relaxed);
                }
            }
        }
        let mut guard = StopOnDrop(Some(Arc::clone(&self.stopped)));
        let job = self.clone();
        let result = tokio::task::spawn_blocking(move || work(&job)).await;
        guard.0 = None;
        result.unwrap_or_else(|error| {
            Err(Error::Invalid(format!(
                "a build task failed unexpectedly: {error}; this is a fault in Atoll"
            )))
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn dropping_the_future_stops_the_work() {
        let job = Job::new(Arc::new(Quiet));
        let (sender, receiver) = mpsc::channel();
        let work = job.blocking(move |job| {
            loop {
                if let Err(error) = job.report("working", 0, 0, "") {
                    sender.send(error.to_string()).ok();
                    return Err::<(), _>(error);
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        assert!(
            tokio::time::timeout(Duration::from_millis(30), work)
                .await
                .is_err()
        );
        let seen = tokio::task::spawn_blocking(move || receiver.recv_timeout(Duration::from_secs(10)));
        assert!(seen.await.unwrap().unwrap().contains("stopped"));
    }
}
