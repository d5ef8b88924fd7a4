//! Waiting for conditions. Level, not edge: whoever comes late still sees it.

use std::future::Future;
use std::time::{Duration, Instant};

/// How often a condition is looked at.
const STEP: Duration = Duration::from_millis(10);

/// Waits until `look` finds something, and returns it. Panics with `what` after `limit`.
pub async fn until<T, F: Future<Output = Option<T>>>(
    what: &str,
    limit: Duration,
    mut look: impl FnMut() -> F,
) -> T {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(Instant::now() < deadline, "still waiting after {limit:?}: {what}");
        tokio::time::sleep(STEP).await;
    }
}

/// The same for what needs no await.
pub async fn until_sync<T>(what: &str, limit: Duration, mut look: impl FnMut() -> Option<T>) -> T {
    until(what, limit, || std::future::ready(look())).await
}

/// Whether a condition comes true in time; for the end of a test, where a panic would hide the first one.
pub fn becomes_true(limit: Duration, mut look: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + limit;
    loop {
        if look() {
            return true;
        }
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::sleep(STEP);
    }
}

/// Panics with `what` if `work` takes longer than `limit`: nothing may hang.
pub async fn within<T>(what: &str, limit: Duration, work: impl Future<Output = T>) -> T {
    match tokio::time::timeout(limit, work).await {
        Ok(value) => value,
        Err(_) => panic!("took longer than {limit:?}: {what}"),
    }
}
