//! The one place that connects to the world.
//!
//! What must hold: the policy is asked about the very address that is connected to, right before, and a name that it does
//! not allow is not even resolved. No answer of a resolver, however it changes, leads past the floor, nor to the host
//! itself, whose addresses may change as well.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use atoll_policy::{Decision, Flow, Name};
use nix::sys::socket::{setsockopt, sockopt};
use tokio::net::{TcpSocket, TcpStream, UdpSocket};
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::config::{Service, Timeouts};
use crate::resolve::{ResolveError, Resolver};
use crate::tenants::TenantState;

/// How long one address may take before the next is tried beside it.
const STAGGER: Duration = Duration::from_millis(250);
/// Addresses of a name that are tried.
const MOST: usize = 8;
/// Silence after which a peer is asked whether it is still there, in seconds; then how often, and how long between.
const KEEPALIVE: (u32, u32, u32) = (120, 4, 15);

#[derive(Debug)]
pub(crate) struct Dialer {
    pub resolver: Resolver,
    service: Option<Service>,
    connect: Duration,
}

/// A connection that the policy allowed.
#[derive(Debug)]
pub(crate) struct Dialled {
    pub stream: TcpStream,
    pub address: IpAddr,
    pub decision: Decision,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum DialError {
    #[error("{}", .decision.reason)]
    Denied {
        decision: Decision,
        /// The address that it is about, if any.
        address: Option<IpAddr>,
    },
    #[error("there is no name `{0}`")]
    NoSuchName(Name),
    #[error("`{0}` has no address")]
    NoAddress(Name),
    #[error("cannot resolve `{name}`: {source}")]
    Unresolved { name: Name, source: ResolveError },
    #[error("cannot connect: {0}")]
    Unreachable(io::Error),
    #[error("cannot connect: it took too long")]
    TimedOut,
}

impl Dialer {
    pub(crate) fn new(resolvers: Vec<SocketAddr>, service: Option<Service>, timeouts: &Timeouts) -> Self {
        let own = service.as_ref().map(|service| service.name.clone());
        Self {
            resolver: Resolver::new(resolvers, own, timeouts.resolve),
            service,
            connect: timeouts.connect,
        }
    }

    /// Whether `flow` would be allowed, and by what, without connecting. Where the rules about its name do not allow
    /// it, those about its addresses may; then it is resolved.
    pub(crate) async fn decide(&self, tenant: &TenantState, flow: &Flow<'_>) -> Result<Decision, DialError> {
        let decision = tenant.policy().connect(flow);
        if decision.is_allowed() || flow.address.is_some() {
            return Ok(decision);
        }
        match self.candidates(tenant, flow).await {
            Ok(allowed) => Ok(allowed
                .into_iter()
                .next()
                .map_or(decision, |(_, decision)| decision)),
            Err(DialError::Denied { decision, .. }) => Ok(decision),
            Err(other) => Err(other),
        }
    }

    /// Connects to where `flow` leads, by the first of its addresses that is allowed and answers.
    pub(crate) async fn connect(&self, tenant: &TenantState, flow: &Flow<'_>) -> Result<Dialled, DialError> {
        let candidates = self.candidates(tenant, flow).await?;
        if let Some(service) = self.service_of(flow) {
            return self.connect_service(tenant, service, flow, candidates).await;
        }
        timeout(self.connect, race(candidates, flow.port))
            .await
            .map_err(|_| DialError::TimedOut)?
            .map_err(DialError::Unreachable)
    }

    /// Atoll's own, where the flow leads there by its name. Nothing that a resolver or a guest says makes it so.
    fn service_of(&self, flow: &Flow<'_>) -> Option<&Service> {
        self.service
            .as_ref()
            .filter(|service| flow.name == Some(&service.name))
    }

    /// Whether this name leads to Atoll's own service.
    pub(crate) fn is_service(&self, name: &Name) -> bool {
        self.service.as_ref().is_some_and(|service| service.name == *name)
    }

    /// What was allowed is the name; the address that stood in for it belongs to nobody.
    async fn connect_service(
        &self,
        tenant: &TenantState,
        service: &Service,
        flow: &Flow<'_>,
        allowed: Vec<(IpAddr, Decision)>,
    ) -> Result<Dialled, DialError> {
        let Some((address, decision)) = allowed.into_iter().next().filter(|_| flow.port == 80) else {
            return Err(DialError::Unreachable(io::ErrorKind::ConnectionRefused.into()));
        };
        let stream = timeout(self.connect, announced(tenant, service))
            .await
            .map_err(|_| DialError::TimedOut)?
            .map_err(DialError::Unreachable)?;
        prepare(&stream);
        Ok(Dialled {
            stream,
            address,
            decision,
        })
    }

    /// A socket that speaks with where `flow` leads, and with nobody else.
    pub(crate) async fn datagrams(
        &self,
        tenant: &TenantState,
        flow: &Flow<'_>,
    ) -> Result<(UdpSocket, IpAddr, Decision), DialError> {
        let candidates = self.candidates(tenant, flow).await?;
        let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
        for (address, decision) in candidates {
            match open_datagrams(SocketAddr::new(address, flow.port)).await {
                Ok(socket) => return Ok((socket, address, decision)),
                Err(error) => last = error,
            }
        }
        Err(DialError::Unreachable(last))
    }

    /// The addresses of `flow` that the policy allows; at least one, or the reason why there is none.
    async fn candidates(
        &self,
        tenant: &TenantState,
        flow: &Flow<'_>,
    ) -> Result<Vec<(IpAddr, Decision)>, DialError> {
        let addresses = match (flow.name, flow.address) {
            (_, Some(address)) => vec![address],
            (Some(name), None) => self.resolve(tenant, name).await?,
            (None, None) => Vec::new(),
        };
        // Not before: the policy may have changed while the name was resolved.
        let policy = tenant.policy();
        let mut allowed = Vec::new();
        let mut refused = None;
        for address in alternate(addresses) {
            let address = address.to_canonical();
            let mut decision = match policy.address(address) {
                Some(floor) => floor,
                None => policy.connect(&Flow {
                    address: Some(address),
                    ..*flow
                }),
            };
            if decision.is_allowed()
                && let Some(own) = policy.own_address(address, is_own)
            {
                decision = own;
            }
            if decision.is_allowed() {
                allowed.push((address, decision));
            } else {
                refused.get_or_insert((address, decision));
            }
        }
        allowed.truncate(MOST);
        match refused {
            _ if !allowed.is_empty() => Ok(allowed),
            Some((address, decision)) => Err(DialError::Denied {
                decision,
                address: Some(address),
            }),
            None => Err(DialError::Unreachable(io::ErrorKind::AddrNotAvailable.into())),
        }
    }

    async fn resolve(&self, tenant: &TenantState, name: &Name) -> Result<Vec<IpAddr>, DialError> {
        let decision = tenant.policy().name(name);
        if !decision.is_allowed() {
            return Err(DialError::Denied {
                decision,
                address: None,
            });
        }
        // Within the sandbox's own share: whoever dials many names that nobody answers waits for itself.
        let (_question, held) = tenant.question().await;
        let addresses =
            self.resolver
                .addresses(name, held)
                .await
                .map_err(|source| DialError::Unresolved {
                    name: name.clone(),
                    source,
                })?;
        match addresses.list {
            None => Err(DialError::NoSuchName(name.clone())),
            Some(list) if list.is_empty() => Err(DialError::NoAddress(name.clone())),
            Some(list) => Ok(list),
        }
    }
}

/// Whether the host would speak with itself there. The kernel knows: what it sends to itself it sends from the very
/// address, or from that of the loopback interface. Nothing is sent; it takes microseconds. Where that cannot be found out
/// it is taken for the host's own.
pub fn is_own(address: IpAddr) -> bool {
    let local = |socket: std::net::UdpSocket| match socket.connect((address, 9)) {
        Ok(()) => socket.local_addr().map(|local| Some(local.ip())),
        // Nobody can be reached there from here, and so nobody will.
        Err(_) => Ok(None),
    };
    match std::net::UdpSocket::bind((unspecified(address), 0)).and_then(local) {
        Ok(Some(local)) => local == address || local.is_loopback(),
        Ok(None) => false,
        // A host without this version of the protocol.
        Err(error) => error.raw_os_error() != Some(nix::errno::Errno::EAFNOSUPPORT as i32),
    }
}

fn unspecified(like: IpAddr) -> IpAddr {
    match like {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    }
}

/// Version 6 and version 4 in turn, so that a family that does not work costs little.
fn alternate(addresses: Vec<IpAddr>) -> Vec<IpAddr> {
    let (six, four): (Vec<_>, Vec<_>) = addresses.into_iter().partition(IpAddr::is_ipv6);
    let longest = six.len().max(four.len());
    (0..longest)
        .flat_map(|n| [six.get(n), four.get(n)])
        .flatten()
        .copied()
        .collect()
}

/// Tries one address after the other, the next when one failed or takes its time. The first that answers wins.
async fn race(candidates: Vec<(IpAddr, Decision)>, port: u16) -> io::Result<Dialled> {
    let mut waiting = candidates.into_iter();
    let mut tries = JoinSet::new();
    let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
    loop {
        let more = waiting.len() > 0;
        if let Some((address, decision)) = waiting.next() {
            tries.spawn(async move {
                let stream = TcpStream::connect(SocketAddr::new(address, port)).await?;
                Ok::<_, io::Error>(Dialled {
                    stream,
                    address,
                    decision,
                })
            });
        }
        let outcome = if more {
            match timeout(STAGGER, tries.join_next()).await {
                Ok(outcome) => outcome,
                Err(_) => continue,
            }
        } else {
            tries.join_next().await
        };
        match outcome {
            Some(Ok(Ok(dialled))) => {
                prepare(&dialled.stream);
                return Ok(dialled);
            }
            Some(Ok(Err(error))) => last = error,
            Some(Err(panicked)) => last = io::Error::other(panicked),
            None if waiting.len() == 0 => return Err(last),
            None => {}
        }
    }
}

/// Small writes go out at once, and a peer that is gone is noticed. Neither is worth failing for.
pub(crate) fn prepare(stream: &TcpStream) {
    let (idle, count, interval) = KEEPALIVE;
    let _ = stream.set_nodelay(true);
    let _ = setsockopt(stream, sockopt::KeepAlive, &true);
    let _ = setsockopt(stream, sockopt::TcpKeepIdle, &idle);
    let _ = setsockopt(stream, sockopt::TcpKeepCount, &count);
    let _ = setsockopt(stream, sockopt::TcpKeepInterval, &interval);
}

/// Connects to a service that is told which sandbox comes, before it comes.
async fn announced(tenant: &TenantState, service: &Service) -> io::Result<TcpStream> {
    /// Taken back unless the connection comes about, also when nobody waits for it any longer.
    struct Announcement<'a>(&'a Service, SocketAddr, bool);
    impl Drop for Announcement<'_> {
        fn drop(&mut self) {
            if !self.2 {
                let mut callers = self.0.callers.lock();
                callers.remove(&self.1);
            }
        }
    }
    let (socket, any) = match service.address.ip() {
        IpAddr::V4(_) => (TcpSocket::new_v4()?, IpAddr::from(Ipv4Addr::LOCALHOST)),
        IpAddr::V6(_) => (TcpSocket::new_v6()?, IpAddr::from(Ipv6Addr::LOCALHOST)),
    };
    // Ports of connections that are just over can be had again.
    socket.set_reuseaddr(true)?;
    socket.bind(SocketAddr::new(any, 0))?;
    let own = socket.local_addr()?;
    let mut announcement = Announcement(service, own, false);
    service.callers.lock().insert(own, tenant.now().sandbox.clone());
    let stream = socket.connect(service.address).await?;
    announcement.2 = true;
    Ok(stream)
}

async fn open_datagrams(to: SocketAddr) -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind((unspecified(to.ip()), 0)).await?;
    socket.connect(to).await?;
    Ok(socket)
}
