//! The only way out of a sandbox: its names are answered here, its connections end here, and what its policy allows is
//! dialled from here.
//!
//! ```text
//!   guest ── UDP/TCP 53 ──> dns ──── policy.name ────> resolve (upstream) ──> a synthetic address that stands for the name
//!     │
//!     └──── TCP, any ─────> flow ─── peek ── policy.connect ──┬── splice ───────────┐
//!     │                      │                                └── intercept (HTTP) ─┼──> dial: resolve, check, connect
//!     └──── UDP, others ──> udp ───────────────────────────────────────────────────┘
//!                            │
//!                            └── events: each decision and each end, to the witness
//! ```
//! What must hold:
//! - Whoever is not admitted gets nothing. Who a guest is follows from its source address alone, which whoever opened the
//!   sockets has tied to the guest's link.
//! - [`dial`] is the only place that connects, and it asks the policy about the very address that it connects to.
//! - An allowed name is what is dialled: neither the address that the guest used nor what it says about itself can move
//!   a connection elsewhere.
//! - Memory and descriptors are bounded for each sandbox and in total, whatever a guest sends, and however slowly.
//! - A flow, and each request on one that is read, ends when it is no longer allowed: by the policy, by the secrets that
//!   it was sent with, or because its sandbox is dismissed. What still waits in its buffers is not delivered then.
//! - Nothing that a guest or a server sent is ever logged but names, addresses, methods and sizes.

mod config;
mod datagram;
mod dial;
mod dns;
mod error;
mod events;
mod flow;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod intercept;
mod limits;
mod resolve;
mod seam;
mod sever;
mod tenants;
#[cfg(test)]
mod testing;
mod udp;

use std::io;
use std::iter;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use atoll_broker::{Broker, TrustId};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

pub use config::{Answers, AsDialled, Callers, Config, Origin, Service, Sockets, Timeouts};
pub use dial::is_own;
pub use error::{Error, Result};
pub use events::{EgressEvent, EgressProtocol, EventKind, Witness};
pub use intercept::{InterceptConfig, InterceptError};
pub use limits::Used;
pub use tenants::Tenant;

use datagram::Datagrams;
use dial::Dialer;
use events::Collector;
use intercept::Interceptor;
use limits::Total;
use tenants::{TenantState, Tenants};

/// The running proxy; cheap to clone. It stops, and every flow with it, when the last clone is dropped.
#[derive(Debug, Clone)]
pub struct Egress {
    inner: Arc<Running>,
}

#[derive(Debug)]
struct Running {
    shared: Arc<Shared>,
    /// Aborted on drop.
    _loops: JoinSet<()>,
}

/// What all listeners have in common.
pub(crate) struct Shared {
    pub config: Config,
    pub tenants: Tenants,
    pub dialer: Arc<Dialer>,
    pub total: Total,
    pub collector: Arc<Collector>,
    pub interceptor: Interceptor,
    pub pool: flow::Pool,
    pub origin: Arc<dyn Origin>,
    pub answers: Arc<dyn Answers>,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared")
            .field("tenants", &self.tenants)
            .finish_non_exhaustive()
    }
}

impl Egress {
    /// Begins to serve whoever arrives at `sockets` and is admitted. Must be called within a tokio runtime, on which
    /// everything then runs.
    pub fn start(
        config: Config,
        sockets: Sockets,
        broker: Arc<Broker>,
        witness: Arc<dyn Witness>,
    ) -> Result<Self> {
        let collector = Collector::new(witness);
        let shared = Arc::new(Shared {
            tenants: Tenants::default(),
            dialer: Arc::new(Dialer::new(
                config.resolvers.clone(),
                config.service.clone(),
                &config.timeouts,
            )),
            total: Total::new(config.max_connections),
            collector: Arc::clone(&collector),
            interceptor: Interceptor::new(&config.intercept, broker)?,
            pool: flow::Pool::default(),
            origin: sockets.origin,
            answers: sockets.answers,
            config,
        });
        let mut loops = JoinSet::new();
        loops.spawn(collector.run());
        for listener in iter::once(sockets.tcp4).chain(sockets.tcp6) {
            let listener = listen_tcp(listener).map_err(|source| Error::Listen {
                what: "connections",
                source,
            })?;
            loops.spawn(flow::listen(Arc::clone(&shared), listener));
        }
        for socket in iter::once(sockets.dns4).chain(sockets.dns6) {
            let socket = Datagrams::new(socket).map_err(|source| Error::Listen {
                what: "DNS questions",
                source,
            })?;
            loops.spawn(dns::serve_datagrams(Arc::clone(&shared), socket));
        }
        for socket in iter::once(sockets.udp4).chain(sockets.udp6) {
            let socket = Datagrams::new(socket).map_err(|source| Error::Listen {
                what: "datagrams",
                source,
            })?;
            loops.spawn(udp::relay(Arc::clone(&shared), socket));
        }
        Ok(Self {
            inner: Arc::new(Running {
                shared,
                _loops: loops,
            }),
        })
    }

    /// Puts `tenant` behind `sources`, the addresses of one link. Where it is there already this is a change of its
    /// policy: flows that it no longer allows end, budgets and names stay. Whoever else was there is dismissed.
    pub fn admit(&self, sources: &[IpAddr], tenant: Tenant) {
        let shared = &self.inner.shared;
        shared.tenants.admit(sources, tenant, |tenant| {
            TenantState::new(
                tenant,
                Arc::clone(&shared.collector),
                shared.config.max_connections_each,
            )
        });
    }

    /// Ends every flow of whoever is behind `sources`, and refuses what comes from there. Nothing happens where nobody
    /// is.
    pub fn dismiss(&self, sources: &[IpAddr]) {
        self.inner.shared.tenants.dismiss(sources);
    }

    /// The certificate, in PEM form, that sandboxes of this lineage must trust to be read where their policy says so.
    pub fn authority_pem(&self, trust: &TrustId) -> Result<String> {
        Ok(self.inner.shared.interceptor.authority_pem(trust)?)
    }

    /// What the sandbox behind `source` has used of its budgets. To be given back as [`Tenant::used`] when it is
    /// admitted by another process.
    pub fn used(&self, source: IpAddr) -> Option<Used> {
        let tenant = self.inner.shared.tenants.of(source)?;
        Some(tenant.allowance.used())
    }

    /// How long the sandbox behind `source` has had no flow open, of connections or datagrams: no time at all while it has
    /// one, `None` if it has had none since it was admitted.
    pub fn quiet_for(&self, source: IpAddr) -> Option<Duration> {
        self.inner.shared.tenants.of(source)?.allowance.quiet_for()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.shared.collector.flush_all();
    }
}

fn listen_tcp(listener: std::net::TcpListener) -> io::Result<TcpListener> {
    listener.set_nonblocking(true)?;
    TcpListener::from_std(listener)
}
