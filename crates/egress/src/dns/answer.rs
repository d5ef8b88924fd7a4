//! One question, one answer.

use atoll_policy::{Decision, Name, RuleName};
use atoll_types::EgressVerdict;
use hickory_proto::op::{Edns, Message, MessageType, OpCode, ResponseCode};
use hickory_proto::rr::rdata::opt::EdnsOption;
use hickory_proto::rr::rdata::{A, AAAA, PTR};
use hickory_proto::rr::{DNSClass, Name as WireName, RData, Record, RecordType};

use super::names::{Names, Target};
use crate::events::{EgressProtocol, Note};
use crate::resolve::{ResolveError, Resolver};
use crate::tenants::TenantState;

/// What fits into a datagram of somebody who does not say, and the most for somebody who does.
const PLAIN: usize = 512;
const MOST: u16 = 1232;
/// How long a guest may keep a synthetic address. Short: it costs us little to be asked again, and policies change.
const KEEP: u32 = 60;
const EXTENDED_ERROR: u16 = 15;
const LONGEST_TEXT: usize = 200;

/// How long an answer may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Room {
    Datagram,
    Stream,
}

/// Why there is no proper answer (RFC 8914).
#[derive(Debug, Clone, Copy)]
enum Extended {
    Other = 0,
    Blocked = 15,
    NotSupported = 21,
    NoReachableAuthority = 22,
}

/// The answer to `question`; `None` where it is no question.
pub(crate) async fn answer(
    resolver: &Resolver,
    tenant: &TenantState,
    question: &[u8],
    room: Room,
) -> Option<Vec<u8>> {
    let asked = match read(question) {
        Read::Question(asked) => asked,
        Read::Malformed(id) => return encode(&Message::error_msg(id, OpCode::Query, ResponseCode::FormErr)),
        Read::Nothing => return None,
    };
    let limit = match room {
        Room::Stream => usize::from(u16::MAX),
        Room::Datagram => asked
            .edns
            .as_ref()
            .map_or(PLAIN, |edns| edns.max_payload().min(MOST).into())
            .max(PLAIN),
    };
    let reply = decide(resolver, tenant, &asked).await;
    let encoded = encode(&reply)?;
    if encoded.len() <= limit {
        return Some(encoded);
    }
    let mut short = reply;
    short.answers.clear();
    short.metadata.truncation = true;
    encode(&short)
}

/// The answer to somebody who asks too much.
pub(super) fn busy(tenant: &TenantState, question: &[u8]) -> Option<Vec<u8>> {
    let Read::Question(asked) = read(question) else {
        return None;
    };
    let decision = Decision {
        verdict: EgressVerdict::Denied,
        rule: RuleName::from("limits: dns"),
        reason: "the sandbox asks for more names than are answered at a time; ask less often".to_owned(),
    };
    tenant
        .events
        .note(Note::decided(&decision, EgressProtocol::Dns, None, None, 53));
    let mut reply = begin(&asked);
    fail(
        &mut reply,
        ResponseCode::Refused,
        Extended::Other,
        &decision.reason,
    );
    encode(&reply)
}

enum Read {
    Question(Message),
    /// Like a question, with this id, but not to be understood.
    Malformed(u16),
    Nothing,
}

fn read(bytes: &[u8]) -> Read {
    // Answers are never answered.
    let [high, low, flags, _, _, _, _, _, _, _, _, _, ..] = bytes else {
        return Read::Nothing;
    };
    if flags & 0x80 != 0 {
        return Read::Nothing;
    }
    match super::parse(bytes) {
        Some(message) if message.metadata.message_type == MessageType::Query => Read::Question(message),
        _ => Read::Malformed(u16::from_be_bytes([*high, *low])),
    }
}

fn encode(message: &Message) -> Option<Vec<u8>> {
    message.to_vec().ok()
}

/// An answer in which everything is but the answer.
fn begin(asked: &Message) -> Message {
    let mut reply = Message::response(asked.metadata.id, asked.metadata.op_code);
    reply.metadata.recursion_desired = asked.metadata.recursion_desired;
    reply.metadata.recursion_available = true;
    reply.queries.extend(asked.queries.first().cloned());
    if asked.edns.is_some() {
        let mut edns = Edns::new();
        edns.set_max_payload(MOST);
        reply.set_edns(edns);
    }
    reply
}

fn fail(reply: &mut Message, code: ResponseCode, extended: Extended, text: &str) {
    reply.metadata.response_code = code;
    if let Some(edns) = &mut reply.edns {
        let mut data = (extended as u16).to_be_bytes().to_vec();
        data.extend(text.bytes().take(LONGEST_TEXT));
        edns.options_mut()
            .insert(EdnsOption::Unknown(EXTENDED_ERROR, data));
    }
}

async fn decide(resolver: &Resolver, tenant: &TenantState, asked: &Message) -> Message {
    let mut reply = begin(asked);
    if asked.metadata.op_code != OpCode::Query {
        fail(
            &mut reply,
            ResponseCode::NotImp,
            Extended::NotSupported,
            "only queries are answered",
        );
        return reply;
    }
    let [question] = asked.queries.as_slice() else {
        fail(
            &mut reply,
            ResponseCode::FormErr,
            Extended::Other,
            "exactly one question is answered",
        );
        return reply;
    };
    if question.query_class != DNSClass::IN {
        fail(
            &mut reply,
            ResponseCode::Refused,
            Extended::NotSupported,
            "only the class IN is answered",
        );
        return reply;
    }
    let (wire_name, kind) = (&question.name, question.query_type);
    if is_reverse(wire_name) {
        reverse(&tenant.names, wire_name, kind, &mut reply);
        return reply;
    }
    let name = match Name::from_labels(wire_name.iter()) {
        Ok(name) => name,
        Err(error) => {
            // Not told by name: it may be anything.
            let decision = Decision {
                verdict: EgressVerdict::Denied,
                rule: RuleName::from("name"),
                reason: format!("not a name that can be allowed: {error}"),
            };
            refuse(tenant, &mut reply, &decision, None);
            return reply;
        }
    };
    let decision = tenant.policy().name(&name);
    if !decision.is_allowed() {
        refuse(tenant, &mut reply, &decision, Some(&name));
        return reply;
    }
    tenant.events.note(Note::decided(
        &decision,
        EgressProtocol::Dns,
        Some(name.as_str()),
        None,
        53,
    ));
    let outcome = match kind {
        RecordType::A | RecordType::AAAA => addresses(resolver, tenant, &name, kind, &mut reply).await,
        RecordType::TXT
        | RecordType::MX
        | RecordType::SRV
        | RecordType::NS
        | RecordType::CAA
        | RecordType::SOA
        | RecordType::NAPTR
        | RecordType::CNAME => records(resolver, tenant, &name, kind, &mut reply).await,
        _ => Ok(()),
    };
    // The policy may have changed while it was asked for.
    let still = tenant.policy().name(&name);
    if !still.is_allowed() {
        let mut reply = begin(asked);
        refuse(tenant, &mut reply, &still, Some(&name));
        return reply;
    }
    if let Err(error) = outcome {
        let text = error.to_string();
        fail(
            &mut reply,
            ResponseCode::ServFail,
            Extended::NoReachableAuthority,
            &text,
        );
    }
    reply
}

fn refuse(tenant: &TenantState, reply: &mut Message, decision: &Decision, name: Option<&Name>) {
    let host = name.map(Name::as_str);
    tenant
        .events
        .note(Note::decided(decision, EgressProtocol::Dns, host, None, 53));
    let text = format!("{}: {}", decision.rule, decision.reason);
    // Not REFUSED, which libraries take for a reason to ask somebody else.
    fail(reply, ResponseCode::NXDomain, Extended::Blocked, &text);
}

/// The synthetic address, provided that the name has a real one that could be dialled.
async fn addresses(
    resolver: &Resolver,
    tenant: &TenantState,
    name: &Name,
    kind: RecordType,
    reply: &mut Message,
) -> Result<(), ResolveError> {
    let found = resolver.addresses(name, tenant.questions_held()).await?;
    let Some(list) = found.list else {
        reply.metadata.response_code = ResponseCode::NXDomain;
        return Ok(());
    };
    let policy = tenant.policy();
    let mut refused = None;
    let usable = list.iter().any(|address| match policy.address(*address) {
        Some(decision) => {
            refused.get_or_insert(decision);
            false
        }
        None => true,
    });
    match refused {
        Some(decision) if !usable => refuse(tenant, reply, &decision, Some(name)),
        _ if usable => {
            let (four, six) = tenant.names.addresses_of(name);
            let data = match kind {
                RecordType::AAAA => RData::AAAA(AAAA(six)),
                _ => RData::A(A(four)),
            };
            let ttl = u32::try_from(found.ttl.as_secs()).unwrap_or(KEEP).min(KEEP);
            add(reply, ttl, data);
        }
        _ => {}
    }
    Ok(())
}

/// What upstream has, as if it were the name's own: aliases on the way are left out.
async fn records(
    resolver: &Resolver,
    tenant: &TenantState,
    name: &Name,
    kind: RecordType,
    reply: &mut Message,
) -> Result<(), ResolveError> {
    let found = resolver.records(name, kind, tenant.questions_held()).await?;
    if !found.exists {
        reply.metadata.response_code = ResponseCode::NXDomain;
    }
    for record in &found.records {
        add(reply, record.ttl.min(KEEP), record.data.clone());
    }
    Ok(())
}

fn add(reply: &mut Message, ttl: u32, data: RData) {
    if let Some(question) = reply.queries.first() {
        let record = Record::from_rdata(question.name.clone(), ttl, data);
        reply.add_answer(record);
    }
}

fn is_reverse(name: &WireName) -> bool {
    let mut labels = name.iter().rev();
    let last = labels
        .next()
        .is_some_and(|label| label.eq_ignore_ascii_case(b"arpa"));
    last && labels
        .next()
        .is_some_and(|label| label.eq_ignore_ascii_case(b"in-addr") || label.eq_ignore_ascii_case(b"ip6"))
}

/// The name behind a synthetic address. Of real ones nothing is told: it could be asked of anybody.
fn reverse(names: &Names, wire_name: &WireName, kind: RecordType, reply: &mut Message) {
    let target = wire_name
        .parse_arpa_name()
        .ok()
        .filter(|net| net.prefix_len() == net.max_prefix_len())
        .map(|net| names.target(net.addr()));
    let name = match target {
        Some(Target::Name(name)) => WireName::from_labels(name.labels().map(str::as_bytes)).ok(),
        _ => None,
    };
    match name {
        Some(mut name) => {
            name.set_fqdn(true);
            if kind == RecordType::PTR {
                add(reply, KEEP, RData::PTR(PTR(name)));
            }
        }
        None => reply.metadata.response_code = ResponseCode::NXDomain,
    }
}
