//! An upstream resolver that answers from a table, by UDP and TCP, and misbehaves on request.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use hickory_proto::op::{Message, OpCode, ResponseCode};
use hickory_proto::rr::rdata::{A, AAAA, CNAME};
use hickory_proto::rr::{Name, RData, Record, RecordType};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, UdpSocket};
use tokio::task::JoinSet;

pub(crate) struct TestResolver {
    address: SocketAddr,
    zone: Arc<Zone>,
    _serving: JoinSet<()>,
}

#[derive(Default)]
struct Zone {
    records: Mutex<HashMap<Name, Vec<RData>>>,
    asked: Mutex<Vec<(String, RecordType)>>,
    manner: Mutex<Manner>,
}

/// How it answers by UDP. By TCP it is always honest.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Manner {
    #[default]
    Honest,
    /// All answers are said to be too long.
    Truncated,
    /// The name is spelt in lower case, as a few old servers do.
    Respelt,
    /// A forged answer comes before each real one.
    Forged,
    /// No answer at all.
    Silent,
    /// No answer about what is below `slow.example`.
    SlowSilent,
    /// Every question is refused.
    Failing,
}

impl TestResolver {
    pub(crate) async fn start() -> Self {
        // The same port for both; another process may have the one that we get for the other.
        let (udp, tcp) = loop {
            let udp = UdpSocket::bind("127.0.0.1:0").await.unwrap();
            if let Ok(tcp) = TcpListener::bind(udp.local_addr().unwrap()).await {
                break (udp, tcp);
            }
        };
        let zone = Arc::new(Zone::default());
        let address = udp.local_addr().unwrap();
        let mut serving = JoinSet::new();
        serving.spawn(serve_udp(udp, Arc::clone(&zone)));
        serving.spawn(serve_tcp(tcp, Arc::clone(&zone)));
        Self {
            address,
            zone,
            _serving: serving,
        }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Says that `name` has this, beside what it has already.
    pub(crate) fn add(&self, name: &str, data: RData) {
        let name = Name::from_ascii(format!("{name}.")).unwrap();
        self.zone.records.lock().entry(name).or_default().push(data);
    }

    pub(crate) fn address_for(&self, name: &str, address: &str) {
        let data = match address.parse().unwrap() {
            IpAddr::V4(address) => RData::A(A(address)),
            IpAddr::V6(address) => RData::AAAA(AAAA(address)),
        };
        self.add(name, data);
    }

    pub(crate) fn alias(&self, name: &str, of: &str) {
        let of = Name::from_ascii(format!("{of}.")).unwrap();
        self.add(name, RData::CNAME(CNAME(of)));
    }

    pub(crate) fn remove(&self, name: &str) {
        let name = Name::from_ascii(format!("{name}.")).unwrap();
        self.zone.records.lock().remove(&name);
    }

    pub(crate) fn behave(&self, manner: Manner) {
        *self.zone.manner.lock() = manner;
    }

    /// What it was asked so far, names in lower case.
    pub(crate) fn asked(&self) -> Vec<(String, RecordType)> {
        self.zone.asked.lock().clone()
    }
}

impl Zone {
    fn answer(&self, question: &[u8]) -> Option<Message> {
        let asked = Message::from_vec(question).ok()?;
        let query = asked.queries.first()?.clone();
        self.asked
            .lock()
            .push((query.name.to_lowercase().to_ascii(), query.query_type));
        let mut reply = Message::response(asked.metadata.id, OpCode::Query);
        let records = self.records.lock();
        match records.get(&query.name) {
            None => reply.metadata.response_code = ResponseCode::NXDomain,
            Some(all) => {
                for data in all {
                    let kind = data.record_type();
                    // An alias is told and left to the client to follow.
                    if kind == query.query_type || kind == RecordType::CNAME {
                        reply.add_answer(Record::from_rdata(query.name.clone(), 60, data.clone()));
                    }
                }
            }
        }
        reply.add_query(query);
        Some(reply)
    }
}

async fn serve_udp(socket: UdpSocket, zone: Arc<Zone>) {
    let mut buffer = [0; 4096];
    loop {
        let (len, from) = socket.recv_from(&mut buffer).await.unwrap();
        let Some(mut reply) = zone.answer(&buffer[..len]) else {
            continue;
        };
        let manner = *zone.manner.lock();
        match manner {
            Manner::Honest => {}
            Manner::Truncated => {
                reply.answers.clear();
                reply.metadata.truncation = true;
            }
            Manner::Respelt => reply.queries[0].name = reply.queries[0].name.to_lowercase(),
            Manner::Forged => {
                let mut forged = reply.clone();
                forged.metadata.id ^= 0x5555;
                forged.answers = vec![Record::from_rdata(
                    forged.queries[0].name.clone(),
                    60,
                    RData::A(A([192, 0, 2, 66].into())),
                )];
                socket.send_to(&forged.to_vec().unwrap(), from).await.unwrap();
                socket.send_to(b"not even a message", from).await.unwrap();
            }
            Manner::Silent => continue,
            Manner::SlowSilent => {
                let slow = Name::from_ascii("slow.example.").unwrap();
                if slow.zone_of(&reply.queries[0].name.to_lowercase()) {
                    continue;
                }
            }
            Manner::Failing => {
                reply.answers.clear();
                reply.metadata.response_code = ResponseCode::ServFail;
            }
        }
        socket.send_to(&reply.to_vec().unwrap(), from).await.unwrap();
    }
}

async fn serve_tcp(listener: TcpListener, zone: Arc<Zone>) {
    loop {
        let (mut stream, _) = listener.accept().await.unwrap();
        let Ok(len) = stream.read_u16().await else {
            continue;
        };
        let mut question = vec![0; usize::from(len)];
        if stream.read_exact(&mut question).await.is_err() {
            continue;
        }
        let Some(mut reply) = zone.answer(&question) else {
            continue;
        };
        if *zone.manner.lock() == Manner::Failing {
            reply.answers.clear();
            reply.metadata.response_code = ResponseCode::ServFail;
        }
        let bytes = reply.to_vec().unwrap();
        let len = u16::try_from(bytes.len()).unwrap();
        let _ = stream.write_all(&len.to_be_bytes()).await;
        let _ = stream.write_all(&bytes).await;
    }
}
