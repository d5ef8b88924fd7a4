//! What has gone in and out of sandboxes over their whole lives: what budgets are held against.

use std::fmt;

use async_trait::async_trait;
use atoll_types::SandboxId;

use crate::Error;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NetworkTotal {
    pub bytes_up: u64,
    pub bytes_down: u64,
    pub connections: u64,
}

#[async_trait]
pub trait NetworkUsageStore: fmt::Debug + Send + Sync + 'static {
    /// Adds to what was counted; nothing happens where the sandbox is forgotten by now.
    async fn add_network_usage(&self, sandbox: &SandboxId, more: NetworkTotal) -> Result<(), Error>;

    /// All that was counted; nothing for one that is not known.
    async fn network_usage(&self, sandbox: &SandboxId) -> Result<NetworkTotal, Error>;
}
