//! The way to a sandbox's agent: an instance, and the node that it is on.

use std::sync::Arc;
use std::time::Duration;

use atoll_guest_protocol::{Message, Request};
use atoll_node::{ChannelError, Node, Stream};
use atoll_types::InstanceId;

/// Cheap to clone. Dropping it hangs up on nobody.
#[derive(Debug, Clone)]
pub(crate) struct Guest {
    node: Arc<dyn Node>,
    pub(crate) id: InstanceId,
}

impl Guest {
    pub(crate) fn new(node: Arc<dyn Node>, id: InstanceId) -> Self {
        Self { node, id }
    }

    /// Opens a stream. Waits while the guest does not read; cancel-safe.
    pub(crate) async fn open(&self, request: &Request) -> Result<Stream, ChannelError> {
        self.node.open(&self.id, request).await
    }

    /// A request that is answered at once, with at most one message.
    pub(crate) async fn call(&self, request: &Request) -> Result<Option<Message>, ChannelError> {
        self.node.call(&self.id, request).await
    }

    /// Whether it is there and says nothing.
    pub(crate) async fn is_silent(&self, within: Duration) -> bool {
        self.node.is_silent(&self.id, within).await
    }

    /// Ends all streams, now.
    pub(crate) fn hang_up(&self) {
        self.node.hang_up(&self.id);
    }
}
