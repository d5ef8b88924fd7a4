//! The agents in instances: found by the instance's id, and told who they are.

use std::time::Duration;

use async_trait::async_trait;
use atoll_guest_protocol::{Configure, Request};
use atoll_runtime::channel::{ChannelError, Guest, Stream};
use atoll_types::{Hook, InstanceId, ReadyCheck};

use crate::greeting;
use crate::node::Guests;
use crate::words::{Begins, Failed, Greeting};
use crate::{LocalNode, hooks, wall_clock};

impl LocalNode {
    /// The way to the agent of an instance.
    pub(crate) fn guest(&self, instance: &InstanceId) -> Result<Guest, ChannelError> {
        let instances = self.instances();
        let known = instances.get(instance).ok_or(ChannelError::Closed)?;
        Ok(known.guest.clone())
    }
}

#[async_trait]
impl Guests for LocalNode {
    async fn greet(&self, greeting: Greeting) -> Result<Option<Begins>, Failed> {
        let Greeting {
            instance,
            identity,
            admission,
            command,
        } = greeting;
        let guest = self.guest(&instance)?;
        // One that was claimed: from now on whoever greets it knows it.
        self.held().remove(&instance);
        let configure = Request::Configure(Configure {
            now_millis: u64::try_from(wall_clock().0).unwrap_or(0),
            network: self.guest_network(admission.as_ref())?,
            ..identity
        });
        Ok(greeting::greet(&guest, &configure, command.as_ref()).await?)
    }

    async fn await_ready(&self, instance: &InstanceId, ready: &ReadyCheck) -> Result<Vec<u8>, Failed> {
        Ok(greeting::await_ready(&self.guest(instance)?, ready).await??)
    }

    async fn run_hooks(
        &self,
        instance: &InstanceId,
        hooks: &[Hook],
    ) -> Result<Result<(), hooks::Failed>, ChannelError> {
        // Nobody is asked for nothing, not even whether they are there.
        if hooks.is_empty() {
            return Ok(Ok(()));
        }
        hooks::run(&self.guest(instance)?, hooks).await
    }

    async fn open(&self, instance: &InstanceId, request: &Request) -> Result<Stream, ChannelError> {
        self.guest(instance)?.open(request).await
    }

    async fn is_silent(&self, instance: &InstanceId, within: Duration) -> bool {
        match self.guest(instance) {
            Ok(guest) => !guest.is_there(within).await && !guest.is_closed(),
            Err(_) => false,
        }
    }

    fn hang_up(&self, instance: &InstanceId) {
        let known = self.instances().remove(instance);
        // Whoever is in the middle of something hears of it.
        if let Some(known) = known {
            known.guest.close();
        }
    }
}
