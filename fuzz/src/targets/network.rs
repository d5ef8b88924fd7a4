//! What guests and resolvers say on the way out, and what decides about it; host names on the way in.

use std::io::Cursor;
use std::time::Duration;

use atoll_egress::fuzzing as egress;
use atoll_policy::{Floor, FloorConfig, Flow, HttpRequest, Name, Policy, Question};
use atoll_types::{EgressVerdict, NetworkPolicy, NetworkRule, RuleAction, Timestamp};
use hickory_proto::op::Message;
use http::header::HOST;
use http::{HeaderMap, Uri};

use super::{block_on, texts};

/// Where rustls sees a name, we see the same one or refuse; and a hello is read the same when more bytes follow it.
pub fn tls_hello(input: &[u8]) {
    let ours = egress::hello(input);
    let taken = egress::classify(input);
    match (&ours, &taken) {
        (Some(Some((name, encrypted))), egress::Taken::Tls(same, same_encrypted)) => {
            assert_eq!((name, encrypted), (same, same_encrypted));
        }
        (_, egress::Taken::Tls(..)) => panic!("a hello is a hello to one reader only"),
        _ => {}
    }
    if let Some(Some(read)) = &ours {
        let more = [input, b"\x17\x03\x03\x00\x01x"].concat();
        assert_eq!(
            egress::hello(&more),
            Some(Some(read.clone())),
            "what follows a hello changed it"
        );
    }
    let mut acceptor = rustls::server::Acceptor::default();
    let mut cursor = Cursor::new(input);
    while cursor.position() < input.len() as u64 {
        match acceptor.read_tls(&mut cursor) {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        let accepted = match acceptor.accept() {
            Ok(Some(accepted)) => accepted,
            Ok(None) => continue,
            Err(_) => return,
        };
        let hello = accepted.client_hello();
        let Some(theirs) = hello.server_name() else { return };
        match &ours {
            // Refused: another reader may have understood it, and we do not take the risk.
            None => {}
            Some(Some((Some(name), _))) => assert_eq!(name.as_str(), theirs.to_ascii_lowercase()),
            other => panic!("rustls reads a hello for {theirs}, we read {other:?}"),
        }
        return;
    }
}

/// Where httparse (which is what reads the request later) sees hosts, we see the one that it sees, or none.
pub fn http_head(input: &[u8]) {
    let taken = egress::classify(input);
    let host = egress::host_of(input);
    let mut headers = [httparse::EMPTY_HEADER; 256];
    let mut request = httparse::Request::new(&mut headers);
    let Ok(httparse::Status::Complete(_)) = request.parse(input) else {
        return;
    };
    // Line breaks before a request are passed over by those who read many on one connection; the first has none.
    if matches!(input.first(), Some(b'\r' | b'\n')) {
        return;
    }
    assert_ne!(taken, egress::Taken::More, "a whole request is waited for");
    let hosts: Vec<&[u8]> = request
        .headers
        .iter()
        .filter(|header| header.name.eq_ignore_ascii_case("host"))
        .map(|header| header.value)
        .collect();
    let Some(Some(name)) = host else { return };
    let [theirs] = hosts.as_slice() else {
        panic!("{} hosts, of which we take {name}", hosts.len());
    };
    let text = String::from_utf8_lossy(theirs).to_ascii_lowercase();
    let without_port = text.rsplit_once(':').map_or(text.as_str(), |(host, _)| host);
    assert_eq!(
        name.as_str(),
        without_port.trim(),
        "another host than httparse reads"
    );
}

/// An answer is an answer to the question, and fits where it goes.
pub fn dns_question(input: &[u8]) {
    let (stream, question) = match input.split_first() {
        Some((first, rest)) => (first & 1 == 1, rest),
        None => return,
    };
    let policy = NetworkPolicy {
        rules: vec![NetworkRule::new(RuleAction::Allow, "models.atoll.internal")],
        ..NetworkPolicy::default()
    };
    let Some(answer) = block_on(egress::answer_question(question, &policy, stream)) else {
        return;
    };
    assert_eq!(answer[..2], question[..2], "an answer to somebody else");
    assert!(answer[2] & 0x80 != 0, "a question is answered with a question");
    let read = Message::from_vec(&answer).expect("our answers can be read");
    let has_edns = egress::message(question).is_some_and(|asked| asked.edns.is_some());
    let most = match (stream, has_edns) {
        (true, _) => 65_535,
        (false, true) => 1232,
        (false, false) => 512,
    };
    assert!(
        answer.len() <= most,
        "an answer of {} bytes where {most} fit",
        answer.len()
    );
    assert!(
        read.answers.len() <= 1,
        "{} answers about one name",
        read.answers.len()
    );
}

/// What is kept of an answer is bounded, and for how long.
pub fn dns_answer(input: &[u8]) {
    let name = egress::message(input)
        .and_then(|message| Name::from_labels(message.queries.first()?.name.iter()).ok());
    let Some(name) = name.or_else(|| Name::parse("a.example").ok()) else {
        return;
    };
    for kind in [1, 28, 5, 16, 33] {
        let Some((records, ttl)) = egress::read_reply(input, &name, kind) else {
            return;
        };
        assert!(records <= 64, "{records} records are kept");
        assert!(
            ttl >= Duration::from_secs(5) && ttl <= Duration::from_secs(300),
            "kept for {ttl:?}"
        );
    }
}

/// A target, a method and a policy: decisions and explanations agree, a denial of everything denies it.
pub fn policy(input: &[u8]) {
    let Some(texts) = texts(input) else { return };
    let [target, method, words] = texts[..] else {
        return;
    };
    if let Ok(name) = Name::parse(target) {
        assert_eq!(
            Name::parse(name.as_str()).as_ref(),
            Ok(&name),
            "a name is not what it reads as"
        );
    }
    let Some(policy) = atoll_api_native::fuzzing::policy(words.as_bytes())
        .or_else(|| serde_json::from_str::<NetworkPolicy>(words).ok())
    else {
        return;
    };
    let text = serde_json::to_string(&policy).expect("a policy has a text form");
    assert_eq!(
        serde_json::from_str::<NetworkPolicy>(&text).ok().as_ref(),
        Some(&policy)
    );
    let floor = Floor::new(&FloorConfig::default()).expect("the floor stands by itself");
    let Ok(compiled) = Policy::compile(&policy, &floor, &[]) else {
        return;
    };
    let Ok(question) = Question::parse(target, Some(method).filter(|method| !method.is_empty())) else {
        return;
    };
    let flow = Flow {
        protocol: question.protocol,
        port: question.port,
        name: question.name.as_ref(),
        address: question.address,
        kind: question.kind,
        claimed: question.name.as_ref(),
    };
    let request = question.path.as_deref().map(|path| HttpRequest {
        flow,
        method: &question.method,
        path,
    });
    let decide = |policy: &Policy| match &request {
        Some(request) => policy.request(request),
        None => policy.connect(&flow),
    };
    let decision = decide(&compiled);
    let explained = compiled.explain(&question, Timestamp(0)).decision;
    assert_eq!(
        explained.verdict, decision.verdict,
        "{target}: {decision:?} {explained:?}"
    );
    if decision.is_allowed() {
        assert!(
            compiled.connect(&flow).is_allowed(),
            "a request is allowed on a connection that is not"
        );
    }
    let mut denied = policy;
    for to in ["*", "0.0.0.0/0", "::/0"] {
        denied.rules.push(NetworkRule::new(RuleAction::Deny, to));
    }
    if let Ok(denied) = Policy::compile(&denied, &floor, &[]) {
        assert_eq!(
            decide(&denied).verdict,
            EgressVerdict::Denied,
            "a denial of everything does not win"
        );
    }
}

/// A host that names a port is written in one way: what was read from it, written again, is the beginning of its name.
pub fn host_names(input: &[u8]) {
    use atoll_front::host::{Target, target};
    let Some(host) = texts(input).map(|texts| texts[0]) else {
        return;
    };
    let Ok(value) = host.parse() else {
        return;
    };
    let domains = ["localhost".to_owned(), "boxes.example.org".to_owned()];
    let headers = HeaderMap::from_iter([(HOST, value)]);
    if let Target::Port { sandbox, port } = target(&Uri::default(), &headers, &domains) {
        let name = host
            .rsplit_once('@')
            .map_or(host, |(_, name)| name)
            .to_ascii_lowercase();
        let bare = sandbox.bare();
        assert!(
            name.starts_with(&format!("{port}-{bare}.")) || name.starts_with(&format!("{port}-{bare}-")),
            "{host:?} is read as port {port} of {sandbox}"
        );
    }
}
