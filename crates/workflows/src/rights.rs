//! What whoever asks may do, for what they start: a step of a workflow may do no more than who started it.
//!
//! What must hold: rights come from whoever let the caller in, never from a message. What is started with them keeps them,
//! through children, runs that follow and schedules. The words are the caller's; nobody here reads them.

use std::future::Future;

tokio::task_local! {
    static RIGHTS: String;
}

/// Does something for somebody who may do this much.
pub async fn acting_with<T>(rights: String, doing: impl Future<Output = T>) -> T {
    RIGHTS.scope(rights, doing).await
}

/// Of whoever is being answered; empty where the server itself acts.
pub(crate) fn current() -> String {
    RIGHTS.try_with(String::clone).unwrap_or_default()
}
