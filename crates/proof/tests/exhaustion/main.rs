//! Attacks on the server's memory, descriptors and patience, on every route of every API, before and after authentication.
//!
//! What must hold: without a key nothing of a body is read; with one, what is buffered stays within limits; silence and slowness
//! end; meanwhile others are served; and afterwards nothing is held. Each test prints what became of its attacks as a table.

#![allow(clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]

mod answers;
mod grpc;
mod http2;
mod raw;
mod routes;

use std::collections::BTreeMap;
use std::time::Duration;

use atoll_proof::{MIB, Options, Sandbox, Server, host, json, on_every_tier, wait};
use futures_util::StreamExt as _;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;

use answers::{
    answers_that_nobody_reads_are_paid_for, downloads_that_nobody_reads_leave_threads_for_others,
    listings_that_nobody_reads_are_paid_for, readers_of_events_pay_for_what_was_read_for_them,
    short_messages_that_stand_for_much_are_not_decoded, what_is_kept_for_a_sandbox_is_bounded,
};
use raw::{ATTACKS, Attack, Outcome, attack, until_closed};

on_every_tier!(
    with crate::options();
    no_route_is_exhausted,
    the_calls_of_workflows_are_not_exhausted,
    short_messages_that_stand_for_much_are_not_decoded,
    answers_that_nobody_reads_are_paid_for,
    listings_that_nobody_reads_are_paid_for,
    readers_of_events_pay_for_what_was_read_for_them,
    downloads_that_nobody_reads_leave_threads_for_others,
    what_is_kept_for_a_sandbox_is_bounded,
    connections_do_not_run_out,
    large_calls_of_models_stay_within_limits,
    a_sandbox_cannot_fill_the_server,
    metrics_are_for_operators,
    a_parameter_that_nobody_reads_is_refused_by_every_route,
);

/// Small limits and short waits, so that they are reached soon.
fn options() -> Options {
    Options::default().own_templates().config(
        r#"
[limits]
buffered = "64M"
buffered_per_project = "40M"
buffered_per_sandbox = "24M"
connections = 1024
strangers = 100
strangers_per_address = 64
head_timeout = "2s"
idle_timeout = "10s"
body_timeout = "2s"
upload_timeout = "3s"
"#,
    )
}

/// How much the server may grow under any attack: what it may buffer, and as much again for all else.
const ALLOWANCE: u64 = 160 * MIB;

/// What the neighbour's own requests may hold meanwhile.
const SMALL: u64 = 64 * 1024;

async fn gauge(server: &Server, name: &str) -> u64 {
    let text = server.client().get("/metrics").await.expect(200).text();
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(name))
        .unwrap_or_default();
    line.trim()
        .parse()
        .unwrap_or_else(|_| panic!("no {name} in\n{text}"))
}

/// Waits until nothing of requests is held, and asserts that the server did not grow beyond measure.
async fn assert_nothing_held(server: &Server, before: u64) {
    wait::until("nothing is buffered", Duration::from_secs(60), || async {
        (gauge(server, "atoll_buffered_bytes ").await == 0).then_some(())
    })
    .await;
    let grown = server.peak_memory().saturating_sub(before);
    println!("the server grew by at most {} MiB", grown / MIB);
    assert!(grown < ALLOWANCE, "the server grew by {} MiB", grown / MIB);
}

/// A sandbox of a project that has no part in it.
async fn neighbour(server: &Server) -> Sandbox {
    tenant(server, "neighbour").await
}

/// A sandbox of a project of its own.
async fn tenant(server: &Server, name: &str) -> Sandbox {
    let operator = server.client();
    operator
        .post("/v1/projects", &json!({"name": name}))
        .await
        .expect(201);
    let key = operator
        .post("/v1/keys", &json!({"name": name, "project": name}))
        .await
        .ok();
    let client = operator.with_key(key["secret"].as_str());
    let created = client
        .post("/v1/sandboxes", &server.request(&json!({})))
        .await
        .expect(201)
        .json();
    Sandbox::of(&client, &created)
}

/// Serves somebody else until the attack is over.
async fn meanwhile<T>(server: &Server, neighbour: &Sandbox, attack: impl Future<Output = T>) -> T {
    let others = async {
        loop {
            server.assert_answers().await;
            wait::within(
                "a neighbour is served",
                Duration::from_secs(30),
                neighbour.assert_works(),
            )
            .await;
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    };
    tokio::select! {
        done = attack => done,
        () = others => unreachable!("it goes on for ever"),
    }
}

async fn no_route_is_exhausted(server: &Server) {
    let neighbour = neighbour(server).await;
    let own = server.sandbox().await;
    let (id, token) = routes::e2b_sandbox(server).await;
    assert!(!token.is_empty(), "the sandbox has a token");
    let routes = routes::all(server, (&id, &token), &own).await;
    assert!(routes.len() > 150, "only {} routes", routes.len());
    let before = server.memory();
    let files = host::open_files(server.pid());
    let authority = server.client().authority().to_owned();

    let mut attacks = Vec::new();
    for route in &routes {
        for kind in ATTACKS {
            for who in ["no key", "a wrong key", "the right key"] {
                let mut head = route.head.clone();
                match (&route.opens, who) {
                    (None, "no key") | (Some(_), "no key") => {}
                    (None, _) => continue,
                    (Some((name, wrong, _)), "a wrong key") => {
                        head.headers.push(((*name).into(), wrong.clone()));
                    }
                    (Some((name, _, right)), _) => head.headers.push(((*name).into(), right.clone())),
                }
                attacks.push((route, kind, who, head));
            }
        }
    }
    let all = futures_util::stream::iter(attacks)
        .map(|(route, kind, who, head)| {
            let authority = authority.clone();
            async move { (route, kind, who, attack(&authority, &head, kind).await) }
        })
        .buffer_unordered(40)
        .collect::<Vec<_>>();
    let outcomes = meanwhile(server, &neighbour, all).await;

    let mut table: BTreeMap<_, BTreeMap<Outcome, usize>> = BTreeMap::new();
    let mut wrong = Vec::new();
    for (route, kind, who, outcome) in outcomes {
        let refused = match (&route.opens, who) {
            // Health and documentation answer anybody, and read nothing.
            (None, _) => matches!(outcome, Outcome::Status(200)),
            (Some(_), "the right key") => true,
            // Refused by the head alone, whatever becomes of the body; who goes on sending may not hear it.
            (Some(_), _) => match outcome {
                Outcome::Status(status) => matches!(status, 400 | 401 | 403 | 404 | 405),
                Outcome::Closed => matches!(kind, Attack::Big | Attack::Endless),
            },
        };
        if !refused {
            wrong.push(format!(
                "{} {} with {who}, {kind:?}: {outcome}",
                route.head.method, route.head.path
            ));
        }
        if outcome == Outcome::Status(500) {
            wrong.push(format!("{} {}: 500", route.head.method, route.head.path));
        }
        let row = table.entry((route.class, who, kind)).or_default();
        *row.entry(outcome).or_default() += 1;
    }
    println!("| routes | caller | attack | outcomes |\n|---|---|---|---|");
    for ((class, who, kind), outcomes) in table {
        let outcomes: Vec<String> = outcomes
            .iter()
            .map(|(outcome, count)| format!("{outcome} ({count})"))
            .collect();
        println!("| {class} | {who} | {kind:?} | {} |", outcomes.join(", "));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert_nothing_held(server, before).await;
    wait::until("descriptors are given back", Duration::from_secs(60), || async {
        (host::open_files(server.pid()) <= files + 40).then_some(())
    })
    .await;
    neighbour.kill().await;
}

async fn the_calls_of_workflows_are_not_exhausted(server: &Server) {
    let neighbour = neighbour(server).await;
    let authority = grpc::authority(server);
    let before = server.memory();
    let right = format!("Bearer {}", server.client().key().unwrap());
    let start = "/temporal.api.workflowservice.v1.WorkflowService/StartWorkflowExecution";
    let register = "/temporal.api.workflowservice.v1.WorkflowService/RegisterNamespace";
    let operator = "/temporal.api.operatorservice.v1.OperatorService/ListSearchAttributes";
    let health = "/grpc.health.v1.Health/Check";
    // The length of the message is promised, 3 MB and 4 GB, and a little of it sent.
    let begun = [&[0, 0, 0x2d, 0xc6, 0xc0][..], &[0; 1000]].concat();
    let huge = [&[0, 0xff, 0xff, 0xff, 0xff][..], &[0; 1000]].concat();
    let attacks = async {
        println!("| call | caller | message | outcome |\n|---|---|---|---|");
        for path in [start, register, operator, health] {
            for (who, key) in [
                ("no key", None),
                ("a wrong key", Some("Bearer atl_wrong")),
                ("the right key", Some(right.as_str())),
            ] {
                for (what, message) in [("none", &[][..]), ("begun", &begun), ("of 4 GB", &huge)] {
                    let mut tcp = grpc::connect(&authority).await;
                    tcp.write_all(&grpc::call(1, path, key, message)).await.unwrap();
                    let name = format!("{path} with {who}, {what}");
                    let how = grpc::until_answered(&mut tcp, 1, &name).await;
                    println!(
                        "| {} | {who} | {what} | {how} |",
                        path.rsplit('/').next().unwrap()
                    );
                }
            }
        }
        // Who says nothing, and who begins no call, is cut.
        let mut silent = TcpStream::connect(&authority).await.unwrap();
        until_closed(&mut silent, "a silent connection").await;
        let mut idle = grpc::connect(&authority).await;
        until_closed(&mut idle, "a connection without a call").await;
        // A crowd of calls, of which none is finished.
        let mut crowd = Vec::new();
        for _ in 0..20 {
            let mut tcp = grpc::connect(&authority).await;
            for call in 0..30 {
                let begun = grpc::call(2 * call + 1, start, Some(&right), &begun);
                tcp.write_all(&begun).await.unwrap();
            }
            crowd.push(tcp);
        }
        for tcp in &mut crowd {
            grpc::until_answered(tcp, 1, "a call of a crowd").await;
        }
        // Large heads of calls that need no key, and wait for the rest of a message of 4,000 bytes: 190 MB of them.
        let mut crowd = Vec::new();
        for _ in 0..16 {
            let mut tcp = grpc::connect(&authority).await;
            for call in 0..1000 {
                let begun = grpc::with_large_head(2 * call + 1, health, &[0, 0, 0, 0x0f, 0xa0, 0]);
                tcp.write_all(&begun).await.unwrap();
            }
            crowd.push(tcp);
        }
        for tcp in &mut crowd {
            grpc::until_answered(tcp, 1999, "a call with a large head").await;
        }
        // Calls that are taken back at once, until we are told to go.
        let mut tcp = grpc::connect(&authority).await;
        for call in 0..20_000_u32 {
            let mut begun = grpc::call(2 * call + 1, start, None, &[]);
            begun.extend([0, 0, 4, 3, 0]);
            begun.extend((2 * call + 1).to_be_bytes());
            begun.extend(8_u32.to_be_bytes());
            if tcp.write_all(&begun).await.is_err() {
                break;
            }
        }
    };
    meanwhile(server, &neighbour, attacks).await;
    assert_nothing_held(server, before).await;
    neighbour.kill().await;
}

async fn connections_do_not_run_out(server: &Server) {
    let neighbour = neighbour(server).await;
    let before = server.memory();
    let files = host::open_files(server.pid());
    let authority = server.client().authority().to_owned();
    let attacks = async {
        // Five times as many as strangers may have, of which some say nothing, some begin a head, and some do nothing more.
        let mut crowd = Vec::new();
        for number in 0..320 {
            let mut tcp = TcpStream::connect(&authority).await.unwrap();
            let said: &[u8] = match number % 4 {
                0 => b"",
                1 => b"GET /",
                2 => b"GET / HTTP/1.1\r\nhost: x\r\nx: ",
                _ => b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n",
            };
            let _cut = tcp.write_all(said).await;
            crowd.push(tcp);
        }
        let open = host::open_files(server.pid());
        println!(
            "320 connections of strangers: {} descriptors more",
            open.saturating_sub(files)
        );
        assert!(open < files + 200, "{open} descriptors, {files} before");
        for tcp in &mut crowd {
            until_closed(tcp, "a crowd").await;
        }
        // A head that comes slowly, on a new connection and on one that was used before.
        for first in [&b""[..], b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"] {
            let mut tcp = TcpStream::connect(&authority).await.unwrap();
            tcp.write_all(first).await.unwrap();
            let (mut read, mut write) = tcp.into_split();
            let dribbling = async {
                let head = b"GET /healthz HTTP/1.1\r\nhost: x\r\nx: ";
                for byte in head.iter().chain(std::iter::repeat(&b'x')) {
                    if write.write_all(&[*byte]).await.is_err() {
                        return;
                    }
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            };
            let reading = async {
                let mut piece = [0; 1024];
                use tokio::io::AsyncReadExt as _;
                while matches!(read.read(&mut piece).await, Ok(count) if count > 0) {}
            };
            let ended = async {
                tokio::select! { () = dribbling => {}, () = reading => {} }
            };
            wait::within("a slow head is cut", raw::NEVER, ended).await;
        }
        // A head that is too large.
        let mut tcp = TcpStream::connect(&authority).await.unwrap();
        let large = format!("GET / HTTP/1.1\r\nhost: x\r\nx: {}", "y".repeat(200_000));
        let _refused = tcp.write_all(large.as_bytes()).await;
        until_closed(&mut tcp, "a large head").await;
    };
    meanwhile(server, &neighbour, attacks).await;
    assert_nothing_held(server, before).await;
    neighbour.kill().await;
}

/// The attack that once took a gigabyte in four seconds.
async fn large_calls_of_models_stay_within_limits(server: &Server) {
    let neighbour = neighbour(server).await;
    let before = server.memory();
    let authority = server.client().authority().to_owned();
    let key = server.client().key().unwrap().to_owned();
    let send = |key: Option<String>, sent: usize| {
        let authority = authority.clone();
        async move {
            let mut tcp = TcpStream::connect(&authority).await.unwrap();
            let opened = key.map_or(String::new(), |key| format!("authorization: Bearer {key}\r\n"));
            let head = format!(
                "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n{opened}content-type: application/json\r\n\
                 content-length: {}\r\n\r\n",
                32 << 20
            );
            tcp.write_all(head.as_bytes()).await.unwrap();
            let piece = vec![b' '; 1 << 20];
            for _ in 0..sent >> 20 {
                if tcp.write_all(&piece).await.is_err() {
                    break;
                }
            }
            tcp
        }
    };
    let attacks = async {
        for key in [None, Some(key.clone())] {
            let crowd = (0..30).map(|_| send(key.clone(), 31 << 20));
            let mut crowd = futures_util::future::join_all(crowd).await;
            let held = gauge(server, "atoll_buffered_bytes ").await;
            println!(
                "30 calls of 32 MiB, key: {}: {} MiB held",
                key.is_some(),
                held / MIB
            );
            assert!(held <= 40 * MIB, "{held}");
            assert!(key.is_some() || held < SMALL, "{held} bytes of strangers");
            for tcp in &mut crowd {
                until_closed(tcp, "a large call").await;
            }
        }
    };
    meanwhile(server, &neighbour, attacks).await;
    assert_nothing_held(server, before).await;
    neighbour.kill().await;
}

const FROM_INSIDE: &str = r#"
import os, socket, sys, time
token = os.environ["OPENAI_API_KEY"] if sys.argv[1] == "token" else "ats_wrong"
crowd = []
for n in range(30):
    s = socket.create_connection(("models.atoll.internal", 80), 10)
    s.settimeout(5)
    try:
        s.sendall(("POST /v1/chat/completions HTTP/1.1\r\nhost: models.atoll.internal\r\nauthorization: Bearer %s\r\n"
            "content-type: application/json\r\ncontent-length: 33554432\r\n\r\n" % token).encode())
        for _ in range(31): s.sendall(b" " * (1 << 20))
    except OSError: pass
    crowd.append(s)
print("sent", flush=True)
time.sleep(1000)
"#;

async fn a_sandbox_cannot_fill_the_server(server: &Server) {
    let allowed = json!({"network": {"rules": [{"action": "allow", "to": "models.atoll.internal"}]}});
    let neighbour = neighbour(server).await;
    let created = server
        .client()
        .post("/v1/sandboxes", &server.request(&allowed))
        .await
        .json();
    if created["error"]["code"] == "network_unavailable" {
        eprintln!("SKIPPED: sandboxes reach nothing on this machine");
        neighbour.kill().await;
        return;
    }
    let mut attacker = Sandbox::of(server.client(), &created);
    let before = server.memory();
    for token in ["none", "token"] {
        let body = json!({"argv": ["python3", "-c", FROM_INSIDE, token], "background": true});
        let started = attacker.exec(&body).await.ok();
        let command = started["command"].as_str().unwrap().to_owned();
        let attack = async {
            loop {
                let held = gauge(server, "atoll_buffered_bytes ").await;
                assert!(held <= 24 * MIB, "{held}");
                assert!(token == "token" || held < SMALL, "{held} bytes without a token");
                let log = attacker.logs(&command).await;
                if log.contains("sent") {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        };
        let attack = wait::within("the attack is over", Duration::from_secs(300), attack);
        meanwhile(server, &neighbour, attack).await;
        // Whatever it had sent goes with it.
        attacker.kill().await;
        assert_nothing_held(server, before).await;
        attacker = server.sandbox_with(&allowed).await;
    }
    neighbour.kill().await;
}

async fn metrics_are_for_operators(server: &Server) {
    let made = server
        .client()
        .post("/v1/projects", &json!({"name": "tenant"}))
        .await;
    assert!(made.status < 300, "{made:?}");
    let key = server
        .client()
        .post("/v1/keys", &json!({"name": "tenant", "project": "tenant"}))
        .await
        .ok();
    let tenant = server.client().with_key(key["secret"].as_str());
    let stranger = server.client().with_key(None);
    for path in ["/metrics", "/metrics/models"] {
        server.client().get(path).await.expect(200);
        stranger.get(path).await.refused(401, "missing_key");
        tenant.get(path).await.refused(403, "operators_only");
        server
            .client()
            .get(&format!("{path}?x=1"))
            .await
            .refused(400, "invalid_query");
    }
    // Health tells strangers one word.
    let health = stranger.get("/healthz").await.expect(200);
    assert_eq!(health.text(), "ok\n");
}

async fn a_parameter_that_nobody_reads_is_refused_by_every_route(server: &Server) {
    let own = server.sandbox().await;
    let (id, token) = routes::e2b_sandbox(server).await;
    let mut wrong = Vec::new();
    let mut count = 0;
    for route in routes::all(server, (&id, &token), &own).await {
        // What a server in a sandbox makes of a query is its own affair; calls to the agent have none.
        let path = route.head.path.clone();
        if route.class == "port" || (route.class == "envd" && !path.starts_with("/files?")) {
            continue;
        }
        let joint = if path.contains('?') { '&' } else { '?' };
        let mut request = server.client().with_key(None).request(
            route.head.method.parse().unwrap(),
            &format!("{path}{joint}nonsense=1"),
        );
        for (name, value) in &route.head.headers {
            request = request.header(name, value);
        }
        if let Some((name, _, right)) = &route.opens {
            request = request.header(*name, right);
        }
        let answer = server.client().send(request.body("{}")).await;
        // A volume that there is not opens to nobody, and a link to upload to that is none to nobody either.
        let closed = path.starts_with("/volumecontent/") && answer.status == 401;
        if !closed && (answer.status != 400 || !answer.text().contains("nonsense")) {
            wrong.push(format!("{answer:?}"));
        }
        count += 1;
    }
    assert!(count > 130, "{count}");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    // The one that made a key of an operator instead of a tenant's.
    let named = server
        .client()
        .request(reqwest::Method::POST, "/v1/keys?project=tenant");
    let refused = server.client().send(named.json(&json!({"name": "x"}))).await;
    assert!(
        refused.refused(400, "invalid_query")["message"]
            .as_str()
            .unwrap()
            .contains("`project`")
    );
    let twice = server
        .client()
        .get("/v1/keys?project=default&project=tenant")
        .await;
    twice.refused(400, "invalid_query");
}
