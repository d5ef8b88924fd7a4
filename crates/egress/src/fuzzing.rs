//! What the fuzzer may see: the first bytes of connections, questions of guests, answers of resolvers.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use atoll_broker::TrustId;
use atoll_policy::{Floor, FloorConfig, Name, Policy};
use atoll_types::{NetworkPolicy, ProjectId, SandboxId};
use hickory_proto::op::Message;
use hickory_proto::rr::RecordType;

use crate::dns::answer::{Room, answer};
use crate::dns::parse;
use crate::events::{Collector, EgressEvent, Witness};
use crate::flow::classify::{self, First};
use crate::flow::hello;
use crate::resolve::Resolver;
use crate::resolve::answer::Answer;
use crate::resolve::upstream::Query;
use crate::tenants::{Tenant, TenantState};

/// What the first bytes of a connection were taken for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Taken {
    More,
    /// The name that it is for, and whether another may be hidden in it.
    Tls(Option<Name>, bool),
    BadTls,
    Http,
    Other,
}

pub fn classify(bytes: &[u8]) -> Taken {
    match classify::classify(bytes) {
        First::More => Taken::More,
        First::Tls(hello) => Taken::Tls(hello.name, hello.encrypted),
        First::BadTls(_) => Taken::BadTls,
        First::Http => Taken::Http,
        First::PostgresTls | First::PostgresGss | First::Opaque => Taken::Other,
    }
}

/// Reads a ClientHello: `Some(None)` until it is complete, `None` if it is refused.
#[expect(clippy::option_option, reason = "complete, incomplete, refused")]
pub fn hello(bytes: &[u8]) -> Option<Option<(Option<Name>, bool)>> {
    match hello::read(bytes) {
        Ok(hello) => Some(Some((hello.name, hello.encrypted))),
        Err(hello::HelloError::Incomplete) => Some(None),
        Err(_) => None,
    }
}

/// The one host of a request's head; `None` until the head is complete.
#[expect(clippy::option_option, reason = "not known yet, known to be none")]
pub fn host_of(head: &[u8]) -> Option<Option<Name>> {
    classify::host_of(head).ok()
}

struct Blind;

impl Witness for Blind {
    fn saw(&self, _: EgressEvent) {}
}

/// Answers a guest's question: all names are refused but this server's own, so that nobody else is ever asked.
pub async fn answer_question(question: &[u8], policy: &NetworkPolicy, stream: bool) -> Option<Vec<u8>> {
    let own = Name::parse("models.atoll.internal").ok();
    let floor = Floor::new(&FloorConfig::default()).ok()?;
    let tenant = Tenant {
        sandbox: SandboxId::from_entropy([1; 20]),
        project: ProjectId::from_entropy([1; 20]),
        policy: Arc::new(Policy::compile(policy, &floor, &[]).ok()?),
        used: Default::default(),
        placeholders: Vec::new(),
        trust: TrustId::new("trust"),
    };
    let tenant = TenantState::new(tenant, Collector::new(Arc::new(Blind)), 1);
    let nobody = SocketAddr::from(([127, 0, 0, 1], 9));
    let resolver = Resolver::new(vec![nobody], own, Duration::from_millis(10));
    let room = if stream { Room::Stream } else { Room::Datagram };
    answer(&resolver, &tenant, question, room).await
}

/// Reads a message, as guests and resolvers send them.
pub fn message(bytes: &[u8]) -> Option<Message> {
    parse(bytes)
}

/// Reads a resolver's answer about a name; how many records are kept of it, and for how long.
pub fn read_reply(reply: &[u8], name: &Name, kind: u16) -> Option<(usize, Duration)> {
    let message = parse(reply)?;
    let query = Query::new(name, RecordType::from(kind)).ok()?;
    let (answer, _) = Answer::read(&message, &query, None);
    Some((answer.records.len(), answer.ttl))
}
