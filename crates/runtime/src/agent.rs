//! The agent of an instance as its runtime knows it. The channel to it may be held by another process than the one that
//! holds the instance: then the runtime has powers and hears nothing that a guest says, and whoever hears it has none.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use atoll_types::{InstanceId, Isolation};
use tokio::sync::watch;

use crate::channel::{ChannelError, Connect, Fifos, Guest, WeakGuest};
use crate::{Cause, Error, Instance, InstanceEnd, InstanceSpec, Kind, Runtime, SaveSource};

/// What a runtime asks of the channel around a save; see `channel/still.rs`. Nothing happens where the channel is gone.
#[async_trait]
pub trait Agent: Debug + Send + Sync {
    fn is_open(&self) -> bool;

    /// Whose agent it is, where another process speaks with it.
    fn instance(&self) -> Option<InstanceId> {
        None
    }

    async fn hold(&self);
    async fn release(&self);
    async fn taken(&self, within: Duration) -> bool;
    async fn delivered(&self, within: Duration) -> bool;
    async fn answers(&self, within: Duration) -> bool;
    /// The instance is over.
    fn finish(&self);
}

/// Without keeping it open.
#[async_trait]
impl Agent for WeakGuest {
    fn is_open(&self) -> bool {
        self.upgrade().is_some()
    }

    async fn hold(&self) {
        if let Some(guest) = self.upgrade() {
            guest.hold();
        }
    }

    async fn release(&self) {
        if let Some(guest) = self.upgrade() {
            guest.release();
        }
    }

    async fn taken(&self, within: Duration) -> bool {
        match self.upgrade() {
            Some(guest) => guest.taken(within).await,
            None => false,
        }
    }

    async fn delivered(&self, within: Duration) -> bool {
        match self.upgrade() {
            Some(guest) => guest.delivered(within).await,
            None => false,
        }
    }

    async fn answers(&self, within: Duration) -> bool {
        match self.upgrade() {
            Some(guest) => guest.answers(within).await,
            None => false,
        }
    }

    fn finish(&self) {
        if let Some(guest) = self.upgrade() {
            guest.finish();
        }
    }
}

/// An agent that has answered.
#[derive(Debug)]
pub struct Greeted {
    pub agent: Arc<dyn Agent>,
    /// The channel, if it is in this process.
    guest: Option<Guest>,
}

impl Greeted {
    /// By another process.
    pub fn elsewhere(agent: Arc<dyn Agent>) -> Self {
        Self { agent, guest: None }
    }
}

/// Whoever speaks with agents.
#[async_trait]
pub trait Greeter: Debug + Send + Sync {
    async fn greet(&self, id: &InstanceId, fifos: &Fifos, how: Connect) -> Result<Greeted, ChannelError>;

    /// Has the agent unpack a saved layer over its root.
    async fn unpack(&self, greeted: &Greeted, source: &Arc<dyn SaveSource>) -> Result<(), Cause>;
}

/// Speaks with agents in this process.
#[derive(Debug, Clone, Copy)]
pub struct Here;

#[async_trait]
impl Greeter for Here {
    async fn greet(&self, _: &InstanceId, fifos: &Fifos, how: Connect) -> Result<Greeted, ChannelError> {
        let guest = Guest::connect(&fifos.to_guest, &fifos.from_guest, how).await?;
        Ok(Greeted {
            agent: Arc::new(guest.downgrade()),
            guest: Some(guest),
        })
    }

    async fn unpack(&self, greeted: &Greeted, source: &Arc<dyn SaveSource>) -> Result<(), Cause> {
        match &greeted.guest {
            Some(guest) => crate::gvisor::unpack_layer(guest, source).await,
            None => Err(Cause::new(Kind::Agent, "its agent is another process's")),
        }
    }
}

/// A running instance, whoever speaks with its agent.
#[derive(Debug)]
pub struct Raised {
    pub id: InstanceId,
    pub isolation: Isolation,
    pub greeted: Greeted,
    /// As in [`Instance`].
    pub end: watch::Receiver<Option<InstanceEnd>>,
}

impl Raised {
    pub(crate) fn here(self) -> Result<Instance, Error> {
        let guest = self.greeted.guest.ok_or_else(|| {
            let lost = std::io::Error::other("its agent is another process's");
            Error::io(format!("speaking with {}", self.id), lost)
        })?;
        Ok(Instance {
            id: self.id,
            isolation: self.isolation,
            guest,
            end: self.end,
        })
    }
}

/// A runtime that holds instances whose agents others may speak with.
#[async_trait]
pub trait Raiser: Runtime {
    /// As [`Runtime::start`].
    async fn raise(&self, spec: InstanceSpec, greeter: Arc<dyn Greeter>) -> Result<Raised, Error>;

    /// As [`Runtime::adopt`].
    async fn take_over(&self, id: &InstanceId, greeter: Arc<dyn Greeter>) -> Result<Raised, Error>;
}
