//! Whatever a connection has running beside it ends with it.

use std::future::Future;

use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

#[derive(Debug, Clone)]
pub(super) struct Tasks {
    end: CancellationToken,
    awaited: TaskTracker,
}

impl Tasks {
    pub(super) fn new() -> Self {
        Self {
            end: CancellationToken::new(),
            awaited: TaskTracker::new(),
        }
    }

    /// To be held by the one who serves the connection, and by nobody else.
    pub(super) fn end_on_drop(&self) -> DropGuard {
        self.end.clone().drop_guard()
    }

    pub(super) fn spawn<F>(&self, task: F)
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        tokio::spawn(self.end.clone().run_until_cancelled_owned(task));
    }

    /// One that goes on when the connection is over as far as HTTP is concerned.
    pub(super) fn spawn_awaited<F>(&self, task: F)
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        self.awaited
            .spawn(self.end.clone().run_until_cancelled_owned(task));
    }

    pub(super) async fn wait(&self) {
        self.awaited.close();
        self.awaited.wait().await;
    }
}

impl<F> hyper::rt::Executor<F> for Tasks
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    fn execute(&self, task: F) {
        self.spawn(task);
    }
}
