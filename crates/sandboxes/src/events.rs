//! What a node tells unasked: instances that ended, and what was seen at the way out.

use atoll_lifecycle::Input;
use atoll_node::{EgressEvent, Event, EventKind};
use atoll_store::{Fact, NetworkDecision, NewFact};
use atoll_types::EgressVerdict;
use tokio::sync::mpsc;

use crate::Sandboxes;

impl Sandboxes {
    /// Hears them one after the other; what is to be done about one does not keep the next waiting.
    pub(crate) async fn hear(&self, mut events: mpsc::Receiver<Event>) {
        let mut lost = 0_u64;
        loop {
            let event = tokio::select! {
                biased;
                event = events.recv() => event,
                () = self.inner.stop.cancelled() => return self.hear_the_last(events).await,
            };
            match event {
                None => return,
                Some(Event::Ended {
                    sandbox,
                    instance,
                    fate,
                }) => {
                    let Some(cell) = self.live_cell(&sandbox) else {
                        continue;
                    };
                    let service = self.clone();
                    self.inner.tasks.spawn(async move {
                        service.record(&cell, Input::Ended { instance, fate }).await;
                    });
                }
                Some(Event::Saw { event, is_sandbox }) => {
                    // The detail is lost when more happens than the ledger takes; sums are not.
                    match self.inner.facts.try_send(seen(event, is_sandbox)) {
                        Ok(()) if lost > 0 => {
                            tracing::warn!(lost, "more happened at the way out than the ledger could take");
                            lost = 0;
                        }
                        Ok(()) => {}
                        Err(_) => lost += 1,
                    }
                }
            }
        }
    }

    /// What was seen until the server stopped. How instances ended, the next one finds out.
    async fn hear_the_last(&self, mut events: mpsc::Receiver<Event>) {
        let mut facts = Vec::new();
        while let Ok(event) = events.try_recv() {
            if let Event::Saw { event, is_sandbox } = event {
                facts.push(seen(event, is_sandbox));
            }
        }
        if !facts.is_empty()
            && let Err(error) = self.store().ledger.append_facts(facts).await
        {
            tracing::error!(%error, "what was seen at the way out could not be recorded");
        }
    }
}

fn seen(event: EgressEvent, is_sandbox: bool) -> NewFact {
    NewFact {
        at: event.at,
        project: event.project.clone(),
        sandbox: is_sandbox.then(|| event.sandbox.clone()),
        fact: fact_of(event),
    }
}

fn fact_of(event: EgressEvent) -> Fact {
    if let EventKind::SecretUsed(secret) = event.kind {
        return Fact::SecretUsed {
            secret: secret.name,
            host: event.host.unwrap_or_default(),
            port: event.port,
            count: event.count,
        };
    }
    let decision = NetworkDecision {
        protocol: event.protocol.name().to_owned(),
        host: event.host,
        address: event.address.map(|address| address.to_string()),
        port: event.port,
        rule: event.rule,
        reason: event.reason,
        count: event.count,
        bytes_up: event.bytes_up,
        bytes_down: event.bytes_down,
    };
    match event.verdict {
        EgressVerdict::Allowed => Fact::NetworkAllowed(decision),
        EgressVerdict::Denied => Fact::NetworkDenied(decision),
    }
}
