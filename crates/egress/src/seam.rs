//! Between a flow that was looked at and the part that reads it. For plain HTTP to a name, and for TLS to a name that the
//! policy inspects, `flow` calls
//!
//! ```text
//!   interceptor.serve(stream, prefix, flow) -> io::Result<()>
//! ```
//! with a stream that already counts bytes and keeps to the tenant's bandwidth and budget, and `prefix`, which was read
//! from it before (and counted). It is dropped when the policy no longer allows the connection; whether the requests on it
//! are still allowed is its own to watch.

use std::net::IpAddr;
use std::sync::Arc;

use atoll_policy::{Decision, FlowKind, Name};
use atoll_types::{EgressVerdict, Protocol, SecretRef};
use tokio::sync::watch;

use crate::Tenant;
use crate::dial::{DialError, Dialer};
use crate::events::{EgressProtocol, EventKind, Note};
use crate::intercept::{Route, Undialled};
use crate::sever::{Severable, Severed};
use crate::tenants::TenantState;

/// The longest method that is told; a guest may send any word.
const LONGEST_METHOD: usize = 32;

/// A connection that is to be read.
#[derive(Debug)]
pub(crate) struct Flow {
    pub tenant: Arc<TenantState>,
    /// What is dialled, and what each request must name.
    pub name: Name,
    pub port: u16,
    /// Whether `prefix` begins with a ClientHello, rather than with a request.
    pub tls: bool,
    pub dialer: Arc<Dialer>,
    pub severed: Severed,
}

impl Flow {
    fn note(&self, decision: &Decision, address: Option<IpAddr>, method: Option<&str>) -> Note {
        let protocol = if self.tls {
            EgressProtocol::Tls
        } else {
            EgressProtocol::Http
        };
        Note {
            method: method.map(|method| method.chars().take(LONGEST_METHOD).collect()),
            ..Note::decided(decision, protocol, Some(self.name.as_str()), address, self.port)
        }
    }
}

impl Route for Flow {
    type Stream = Severable;

    fn name(&self) -> &Name {
        &self.name
    }

    fn port(&self) -> u16 {
        self.port
    }

    fn tls(&self) -> bool {
        self.tls
    }

    fn tenant(&self) -> Arc<Tenant> {
        self.tenant.now()
    }

    async fn dial(&self) -> Result<(Severable, IpAddr), Undialled> {
        let room = match self.dialer.is_service(&self.name) {
            true => Some(self.tenant.service_room().map_err(|exhausted| {
                let decision = exhausted.decision();
                self.tenant.events.note(self.note(&decision, None, None));
                Undialled::Denied(decision)
            })?),
            false => None,
        };
        let question = atoll_policy::Flow {
            protocol: Protocol::Tcp,
            port: self.port,
            name: Some(&self.name),
            address: None,
            kind: if self.tls { FlowKind::Tls } else { FlowKind::Http },
            // Each request was, or will be, held against it.
            claimed: Some(&self.name),
        };
        match self.dialer.connect(&self.tenant, &question).await {
            Ok(dialled) => {
                let stream = Severable::new(dialled.stream, self.severed.clone(), room);
                Ok((stream, dialled.address))
            }
            Err(DialError::Denied { decision, address }) => {
                self.tenant.events.note(self.note(&decision, address, None));
                Err(Undialled::Denied(decision))
            }
            Err(error) => {
                let failed = Decision {
                    verdict: EgressVerdict::Allowed,
                    rule: "".into(),
                    reason: error.to_string(),
                };
                self.tenant.events.note(Note {
                    kind: EventKind::Failed,
                    ..self.note(&failed, None, None)
                });
                Err(Undialled::Failed(failed.reason))
            }
        }
    }

    fn changes(&self) -> watch::Receiver<u64> {
        self.tenant.changes()
    }

    fn sever(&self) {
        self.severed.sever();
    }

    fn decided(&self, decision: &Decision, address: Option<IpAddr>, method: &str) {
        self.tenant
            .events
            .note(self.note(decision, address, Some(method)));
    }

    fn used(&self, secret: &SecretRef, address: Option<IpAddr>, method: &str) {
        let used = Decision {
            verdict: EgressVerdict::Allowed,
            rule: format!("secret {}", secret.name).into(),
            reason: format!("the secret `{}` was put into a request", secret.name),
        };
        self.tenant.events.note(Note {
            kind: EventKind::SecretUsed(secret.clone()),
            ..self.note(&used, address, Some(method))
        });
    }
}
