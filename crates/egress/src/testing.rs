//! A small world on the loopback interface: guests, a resolver, and somebody to take notes.
//!
//! Guests are told apart by their source address, as everywhere: 127.0.1.x. Where a guest "dialled" is written down here
//! before it connects, because on the loopback interface nothing can arrive at 198.18.0.0/16.

mod resolver;

use parking_lot::Mutex;
use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, UdpSocket};
use std::sync::Arc;

use atoll_broker::{Broker, MasterKey, TrustId};
use atoll_policy::{Floor, FloorConfig, Policy};
use atoll_types::{NetworkPolicy, ProjectId, SandboxId};
use hickory_proto::op::{Edns, Message, Query};
use hickory_proto::rr::{Name as WireName, RData, RecordType};
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::Notify;

use crate::{
    Answers, Config, Egress, EgressEvent, InterceptConfig, Origin, Service, Sockets, Tenant, Timeouts, Used,
    Witness,
};
pub(crate) use resolver::{Manner, TestResolver};

pub(crate) struct World {
    pub egress: Egress,
    pub resolver: TestResolver,
    pub seen: Arc<Seen>,
    tcp: SocketAddr,
    dns: SocketAddr,
    udp: SocketAddr,
    origins: Arc<Origins>,
}

/// A guest of a [`World`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Guest(pub u8);

impl Guest {
    pub(crate) fn source(self) -> IpAddr {
        Ipv4Addr::new(127, 0, 1, self.0).into()
    }

    pub(crate) fn sandbox(self) -> SandboxId {
        SandboxId::from_entropy([self.0; 20])
    }
}

#[derive(Debug, Default)]
struct Origins(Mutex<HashMap<SocketAddr, SocketAddr>>);

impl Origin for Origins {
    fn of(&self, local: SocketAddr, peer: SocketAddr) -> SocketAddr {
        self.0.lock().get(&peer).copied().unwrap_or(local)
    }
}

impl Answers for Origins {
    fn from(&self, _: SocketAddr) -> io::Result<UdpSocket> {
        UdpSocket::bind("127.0.0.1:0")
    }
}

/// Keeps all events.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    events: Mutex<Vec<EgressEvent>>,
    more: Notify,
}

impl Witness for Seen {
    fn saw(&self, event: EgressEvent) {
        self.events.lock().push(event);
        self.more.notify_waiters();
    }
}

impl Seen {
    /// The first event, past or to come, of which `what` is true.
    pub(crate) async fn find(&self, what: impl Fn(&EgressEvent) -> bool) -> EgressEvent {
        loop {
            let more = self.more.notified();
            tokio::pin!(more);
            more.as_mut().enable();
            if let Some(event) = self.all().into_iter().find(&what) {
                return event;
            }
            more.await;
        }
    }

    pub(crate) fn all(&self) -> Vec<EgressEvent> {
        self.events.lock().clone()
    }
}

/// Two addresses of this machine may be dialled. Its others are refused as its own, and all else that is not public.
pub(crate) fn floor() -> Floor {
    Floor::new(&FloorConfig {
        allow_private: ["127.0.0.0/8", "127.0.0.1", "127.0.0.77"]
            .map(String::from)
            .to_vec(),
        internal: vec!["service.internal".parse().unwrap()],
        ..FloorConfig::default()
    })
    .unwrap()
}

/// A policy in JSON.
pub(crate) fn policy(json: &serde_json::Value) -> Arc<Policy> {
    let words: NetworkPolicy = serde_json::from_value(json.clone()).unwrap();
    Arc::new(Policy::compile(&words, &floor(), &[]).unwrap())
}

/// One rule that allows `to` at `ports`; at the usual ones where there are none.
pub(crate) fn allow(to: &str, ports: &[u16]) -> serde_json::Value {
    serde_json::json!({ "rules": [{ "action": "allow", "to": to, "ports": ports }] })
}

impl World {
    pub(crate) async fn new() -> Self {
        Self::with(Timeouts::default()).await
    }

    pub(crate) async fn with(timeouts: Timeouts) -> Self {
        Self::sized(timeouts, 2000).await
    }

    /// One with room for so many connections in all.
    pub(crate) async fn sized(timeouts: Timeouts, max_connections: usize) -> Self {
        Self::configured(timeouts, max_connections, None).await
    }

    /// One with something of Atoll's own at `service.internal`.
    pub(crate) async fn serving(address: SocketAddr) -> Self {
        let service = Service {
            name: "service.internal".parse().unwrap(),
            callers: crate::Callers::default(),
            address,
        };
        Self::configured(Timeouts::default(), 1000, Some(service)).await
    }

    async fn configured(timeouts: Timeouts, max_connections: usize, service: Option<Service>) -> Self {
        let resolver = TestResolver::start().await;
        let mut config = Config::new(InterceptConfig {
            key: MasterKey::new([7; 32]),
            extra_roots: None,
        });
        config.resolvers = vec![resolver.address()];
        config.timeouts = timeouts;
        config.max_connections = max_connections;
        config.service = service;
        let origins = Arc::new(Origins::default());
        let sockets = Sockets {
            tcp4: TcpListener::bind("127.0.0.1:0").unwrap(),
            tcp6: None,
            dns4: UdpSocket::bind("127.0.0.1:0").unwrap(),
            dns6: None,
            udp4: UdpSocket::bind("127.0.0.1:0").unwrap(),
            udp6: None,
            answers: Arc::clone(&origins) as _,
            origin: Arc::clone(&origins) as _,
        };
        let [tcp, dns, udp] = [
            sockets.tcp4.local_addr(),
            sockets.dns4.local_addr(),
            sockets.udp4.local_addr(),
        ]
        .map(Result::unwrap);
        let seen = Arc::new(Seen::default());
        let broker = Arc::new(Broker::new(&config.intercept.key).unwrap());
        Self {
            egress: Egress::start(config, sockets, broker, Arc::clone(&seen) as _).unwrap(),
            resolver,
            seen,
            tcp,
            dns,
            udp,
            origins,
        }
    }

    /// Admits a guest, or gives it another policy.
    pub(crate) fn admit(&self, guest: Guest, json: &serde_json::Value) {
        self.admit_as(guest, guest.source(), json);
    }

    /// The same behind another address.
    pub(crate) fn admit_as(&self, guest: Guest, source: IpAddr, json: &serde_json::Value) {
        self.egress.admit(
            &[source],
            Tenant {
                sandbox: guest.sandbox(),
                project: ProjectId::from_entropy([1; 20]),
                policy: policy(json),
                used: Used::default(),
                placeholders: Vec::new(),
                trust: TrustId::new("trust"),
            },
        );
    }

    /// Connects as `guest` to what it knows as `to`.
    pub(crate) async fn connect(&self, guest: Guest, to: SocketAddr) -> TcpStream {
        self.try_connect(guest, to).await.unwrap()
    }

    /// The same where the connection may be broken off before it is even noticed.
    pub(crate) async fn try_connect(&self, guest: Guest, to: SocketAddr) -> io::Result<TcpStream> {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(SocketAddr::new(guest.source(), 0)).unwrap();
        let from = socket.local_addr().unwrap();
        self.origins.0.lock().insert(from, to);
        socket.connect(self.tcp).await
    }

    /// Resolves as `guest` and connects to the address that it was told.
    pub(crate) async fn connect_name(&self, guest: Guest, name: &str, port: u16) -> TcpStream {
        let address = self.address_of(guest, name).await.expect("an address");
        self.connect(guest, SocketAddr::new(address, port)).await
    }

    pub(crate) async fn address_of(&self, guest: Guest, name: &str) -> Option<IpAddr> {
        let reply = self.ask(guest, name, RecordType::A).await;
        reply.answers.first().map(|record| match record.data {
            RData::A(address) => IpAddr::V4(address.0),
            ref other => panic!("{other}"),
        })
    }

    pub(crate) async fn ask(&self, guest: Guest, name: &str, kind: RecordType) -> Message {
        let question = question(name, kind);
        self.exchange(guest, &question.to_vec().unwrap()).await
    }

    /// Sends `question` as it is, and waits for the answer.
    pub(crate) async fn exchange(&self, guest: Guest, question: &[u8]) -> Message {
        let socket = tokio::net::UdpSocket::bind((guest.source(), 0)).await.unwrap();
        socket.send_to(question, self.dns).await.unwrap();
        let mut buffer = vec![0; 4096];
        let (len, from) = socket.recv_from(&mut buffer).await.unwrap();
        assert_eq!(from, self.dns, "answered from where it was asked");
        Message::from_vec(&buffer[..len]).unwrap()
    }

    /// A socket of `guest` whose datagrams go to what it knows as `to`.
    pub(crate) async fn datagrams(&self, guest: Guest, to: SocketAddr) -> tokio::net::UdpSocket {
        let socket = tokio::net::UdpSocket::bind((guest.source(), 0)).await.unwrap();
        let from = socket.local_addr().unwrap();
        self.origins.0.lock().insert(from, to);
        socket
    }

    /// Where all datagrams of guests arrive.
    pub(crate) fn relay(&self) -> SocketAddr {
        self.udp
    }
}

pub(crate) fn question(name: &str, kind: RecordType) -> Message {
    let mut message = Message::query();
    message.metadata.recursion_desired = true;
    message.add_query(Query::query(WireName::from_ascii(name).unwrap(), kind));
    message.set_edns(Edns::new());
    message
}
