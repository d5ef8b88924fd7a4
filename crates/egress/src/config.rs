//! What the proxy is given: its settings, and the sockets on which the guests arrive.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

use atoll_policy::Name;
use atoll_types::SandboxId;

use crate::intercept::InterceptConfig;

#[derive(Debug)]
pub struct Config {
    /// Where names are resolved. Empty: the host's own resolvers, as `/etc/resolv.conf` says at the time.
    pub resolvers: Vec<SocketAddr>,
    /// Connections of all sandboxes together. Each takes up to two descriptors.
    pub max_connections: usize,
    /// Connections of a sandbox whose policy sets no limit, and the most that one may set.
    pub max_connections_each: usize,
    pub timeouts: Timeouts,
    pub intercept: InterceptConfig,
    /// Something of Atoll's own that sandboxes may be allowed to reach.
    pub service: Option<Service>,
}

/// Who is about to come to a [`Service`], by the address that they come from; whoever serves it takes them out.
pub type Callers = Arc<Mutex<HashMap<SocketAddr, SandboxId>>>;

/// A name that exists for sandboxes only, and where connections to its port 80 lead. A policy has to allow the name like any
/// other; it stands for nothing but this address, so the floor stays whole.
#[derive(Debug, Clone)]
pub struct Service {
    pub name: Name,
    pub address: SocketAddr,
    pub callers: Callers,
}

impl Config {
    pub fn new(intercept: InterceptConfig) -> Self {
        Self {
            resolvers: Vec::new(),
            max_connections: 8192,
            max_connections_each: 1024,
            timeouts: Timeouts::default(),
            intercept,
            service: None,
        }
    }
}

/// How long somebody may take. Every wait for a guest or a server is under one of these.
#[derive(Debug, Clone, Copy)]
pub struct Timeouts {
    /// For the first bytes of a connection to say what it is.
    pub peek: Duration,
    /// For a silent client to be taken for one that waits for the server, where that is allowed.
    pub patience: Duration,
    /// For one name, over all resolvers.
    pub resolve: Duration,
    /// For one connection, over all addresses of a name.
    pub connect: Duration,
    /// Without a byte in either direction.
    pub idle: Duration,
    /// The same when one side has finished.
    pub half_closed: Duration,
    /// Without a datagram in either direction.
    pub udp_idle: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            peek: Duration::from_secs(10),
            patience: Duration::from_millis(300),
            resolve: Duration::from_secs(6),
            connect: Duration::from_secs(10),
            idle: Duration::from_secs(3600),
            half_closed: Duration::from_secs(120),
            udp_idle: Duration::from_secs(60),
        }
    }
}

/// Sockets on which whatever the guests send arrives, whichever address it was sent to.
///
/// TCP connections have the address that the guest dialled as their own ("local") address. Datagrams tell theirs in
/// control messages, which are switched on here.
pub struct Sockets {
    pub tcp4: TcpListener,
    pub tcp6: Option<TcpListener>,
    /// What guests send to UDP port 53; answered from the address that they asked.
    pub dns4: UdpSocket,
    pub dns6: Option<UdpSocket>,
    /// All other datagrams.
    pub udp4: UdpSocket,
    pub udp6: Option<UdpSocket>,
    pub answers: Arc<dyn Answers>,
    pub origin: Arc<dyn Origin>,
}

impl fmt::Debug for Sockets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sockets")
            .field("tcp4", &self.tcp4)
            .field("dns4", &self.dns4)
            .field("udp4", &self.udp4)
            .finish_non_exhaustive()
    }
}

/// Opens sockets where the guests are.
pub trait Answers: Send + Sync {
    /// A UDP socket that sends from `address`, which is one that a guest sent a datagram to. Nothing is received on it.
    fn from(&self, address: SocketAddr) -> io::Result<UdpSocket>;
}

/// Tells where a guest wanted to go.
pub trait Origin: Send + Sync {
    /// `local` is the address at which the connection or datagram of `peer` arrived.
    fn of(&self, local: SocketAddr, peer: SocketAddr) -> SocketAddr;
}

/// Guests arrive at the address that they dialled, which is so behind `sk_lookup` and TPROXY.
#[derive(Debug, Clone, Copy)]
pub struct AsDialled;

impl Origin for AsDialled {
    fn of(&self, local: SocketAddr, _: SocketAddr) -> SocketAddr {
        local
    }
}
