//! One question to the upstream resolvers: by UDP, again by UDP, and by TCP where an answer is too long or UDP is of no
//! use.

use parking_lot::Mutex;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use atoll_policy::Name;
use hickory_proto::op::{Edns, Message, MessageType, OpCode, Query as Question, ResponseCode};
use hickory_proto::rr::{DNSClass, Name as WireName, RecordType};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};
use tokio::time::{Instant, timeout};

use super::ResolveError;
use crate::dns::parse;

/// What we can take by UDP without fragments.
const UDP_SIZE: u16 = 1232;
/// How long one resolver may take, first, second and by TCP.
const TURNS: [Duration; 3] = [
    Duration::from_millis(1000),
    Duration::from_millis(1500),
    Duration::from_millis(2000),
];
/// Resolvers that are asked; `/etc/resolv.conf` allows as many.
const MOST: usize = 3;
/// How often the host's list is read at most.
const REREAD: Duration = Duration::from_secs(5);
const HOST_LIST: &str = "/etc/resolv.conf";

/// A question as it goes out.
#[derive(Debug, Clone)]
pub(crate) struct Query {
    name: WireName,
    kind: RecordType,
}

impl Query {
    pub(crate) fn new(name: &Name, kind: RecordType) -> Result<Self, ResolveError> {
        let mut name = WireName::from_labels(name.labels().map(str::as_bytes))
            .map_err(|error| ResolveError::Failed(error.to_string()))?;
        name.set_fqdn(true);
        Ok(Self { name, kind })
    }

    /// The same about another name.
    pub(super) fn about(&self, name: WireName) -> Self {
        Self {
            name,
            kind: self.kind,
        }
    }

    pub(super) fn name(&self) -> &WireName {
        &self.name
    }

    pub(super) fn kind(&self) -> RecordType {
        self.kind
    }

    /// A message with an id and a spelling of its own.
    fn message(&self) -> Message {
        let mut name = self.name.clone();
        name.randomize_label_case();
        let mut message = Message::query();
        message.metadata.recursion_desired = true;
        message.add_query(Question::query(name, self.kind));
        let mut edns = Edns::new();
        edns.set_max_payload(UDP_SIZE);
        message.set_edns(edns);
        message
    }
}

/// Whether `reply` answers this very question.
fn answers(reply: &Message, asked: &Message) -> bool {
    let (Some(question), [repeated]) = (asked.queries.first(), reply.queries.as_slice()) else {
        return false;
    };
    reply.metadata.id == asked.metadata.id
        && reply.metadata.message_type == MessageType::Response
        && reply.metadata.op_code == OpCode::Query
        && repeated.query_type == question.query_type
        && repeated.query_class == DNSClass::IN
        && repeated.name.eq_case(&question.name)
}

#[derive(Debug)]
pub(super) struct Upstreams {
    configured: Vec<SocketAddr>,
    host: Mutex<Option<(Instant, Vec<SocketAddr>)>>,
}

impl Upstreams {
    /// Those of the host where none are configured.
    pub(super) fn new(configured: Vec<SocketAddr>) -> Self {
        Self {
            configured,
            host: Mutex::new(None),
        }
    }

    /// The first usable answer of any of them.
    pub(super) async fn ask(&self, query: &Query) -> Result<Message, ResolveError> {
        let resolvers = self.list();
        let mut last = ResolveError::NoResolver;
        for (turn, patience) in TURNS.into_iter().enumerate() {
            for resolver in resolvers.iter().take(MOST) {
                let by_tcp = turn + 1 == TURNS.len();
                match timeout(patience, exchange(*resolver, query, by_tcp)).await {
                    Err(_) => last = ResolveError::TimedOut,
                    Ok(Err(error)) => last = ResolveError::Failed(error.to_string()),
                    Ok(Ok(reply)) => match reply.metadata.response_code {
                        ResponseCode::NoError | ResponseCode::NXDomain => return Ok(reply),
                        other => last = ResolveError::Failed(other.to_string()),
                    },
                }
            }
        }
        Err(last)
    }

    fn list(&self) -> Vec<SocketAddr> {
        if !self.configured.is_empty() {
            return self.configured.clone();
        }
        let now = Instant::now();
        let mut host = self.host.lock();
        match &*host {
            Some((read, list)) if now < *read + REREAD => list.clone(),
            _ => {
                // A few hundred bytes that are in memory: not worth a thread.
                let list = parse_list(&std::fs::read_to_string(HOST_LIST).unwrap_or_default());
                *host = Some((now, list.clone()));
                list
            }
        }
    }
}

/// The resolvers in the words of `resolv.conf`. Nothing else in it matters to us, least of all its search domains.
fn parse_list(text: &str) -> Vec<SocketAddr> {
    text.lines()
        .filter_map(|line| {
            let mut words = line.split_ascii_whitespace();
            (words.next() == Some("nameserver"))
                .then(|| words.next())
                .flatten()
        })
        .filter_map(|address| address.parse().ok())
        .map(|address| SocketAddr::new(address, 53))
        .collect()
}

async fn exchange(resolver: SocketAddr, query: &Query, by_tcp: bool) -> io::Result<Message> {
    let asked = query.message();
    let bytes = asked.to_vec().map_err(io::Error::other)?;
    if by_tcp {
        return by_stream(resolver, &asked, &bytes).await;
    }
    let reply = by_datagram(resolver, &asked, &bytes).await?;
    if reply.metadata.truncation {
        return by_stream(resolver, &asked, &bytes).await;
    }
    Ok(reply)
}

/// From a port that the kernel picks at random, and connected, so that only the resolver is heard.
async fn by_datagram(resolver: SocketAddr, asked: &Message, bytes: &[u8]) -> io::Result<Message> {
    let any: IpAddr = match resolver {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0)).await?;
    socket.connect(resolver).await?;
    socket.send(bytes).await?;
    let mut buffer = vec![0; 4096];
    loop {
        let len = socket.recv(&mut buffer).await?;
        // What does not answer this question was sent by somebody who guesses: go on listening.
        if let Some(reply) = parse(&buffer[..len])
            && answers(&reply, asked)
        {
            return Ok(reply);
        }
    }
}

async fn by_stream(resolver: SocketAddr, asked: &Message, bytes: &[u8]) -> io::Result<Message> {
    let mut stream = TcpStream::connect(resolver).await?;
    let len = u16::try_from(bytes.len()).map_err(io::Error::other)?;
    let mut framed = Vec::with_capacity(bytes.len() + 2);
    framed.extend_from_slice(&len.to_be_bytes());
    framed.extend_from_slice(bytes);
    stream.write_all(&framed).await?;
    let len = stream.read_u16().await?;
    let mut buffer = vec![0; usize::from(len)];
    stream.read_exact(&mut buffer).await?;
    parse(&buffer)
        .filter(|reply| answers(reply, asked))
        .ok_or_else(|| io::Error::other("not an answer to what was asked"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hosts_list_is_read_for_its_resolvers_only() {
        let text = "# comment\nsearch corp.example\nnameserver 192.0.2.1\n nameserver\t2001:db8::1 # second\nnameserver x\noptions rotate\n";
        assert_eq!(
            parse_list(text),
            [
                "192.0.2.1:53".parse().unwrap(),
                "[2001:db8::1]:53".parse().unwrap()
            ]
        );
    }

    #[test]
    fn an_answer_must_repeat_what_only_the_resolver_was_told() {
        let query = Query::new(
            &Name::parse("abcdefghijklmnopqrstuvwxyz.example").unwrap(),
            RecordType::A,
        )
        .unwrap();
        let asked = query.message();
        let mut good = Message::response(asked.metadata.id, OpCode::Query);
        good.queries = asked.queries.clone();
        assert!(answers(&good, &asked));

        let mut other_id = good.clone();
        other_id.metadata.id ^= 1;
        let mut other_spelling = good.clone();
        other_spelling.queries[0].name = query.name;
        let mut other_type = good.clone();
        other_type.queries[0].query_type = RecordType::AAAA;
        let mut a_question = good.clone();
        a_question.metadata.message_type = MessageType::Query;
        let mut nothing = good;
        nothing.queries.clear();
        for bad in [other_id, other_spelling, other_type, a_question, nothing] {
            assert!(!answers(&bad, &asked));
        }
    }
}
