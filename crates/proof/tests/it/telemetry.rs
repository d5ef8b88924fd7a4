//! Traces of a running server: posted to a collector as OTLP, and no burden where there is none.

use std::time::Duration;

use atoll_proof::{Options, Server, Tier, Value, json, wait};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

/// Takes what is posted to it and hands on each path with its body.
async fn collector() -> (String, mpsc::UnboundedReceiver<(String, Value)>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let (posted, posts) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Ok((connection, _)) = listener.accept().await {
            let posted = posted.clone();
            tokio::spawn(async move {
                let mut connection = connection;
                while let Some(post) = read_post(&mut connection).await {
                    let _over = posted.send(post);
                    let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}";
                    connection.write_all(answer).await.unwrap();
                }
            });
        }
    });
    (endpoint, posts)
}

async fn read_post(connection: &mut TcpStream) -> Option<(String, Value)> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(connection.read_u8().await.ok()?);
    }
    let head = String::from_utf8(head).ok()?.to_ascii_lowercase();
    let path = head.split(' ').nth(1)?.to_owned();
    let length = head
        .lines()
        .find_map(|line| line.strip_prefix("content-length: "))?;
    let mut body = vec![0; length.parse().ok()?];
    connection.read_exact(&mut body).await.ok()?;
    Some((path, serde_json::from_slice(&body).ok()?))
}

fn attribute<'a>(span: &'a Value, key: &str) -> &'a Value {
    let all = span["attributes"].as_array().unwrap();
    all.iter()
        .find(|attribute| attribute["key"] == key)
        .map_or(&Value::Null, |attribute| &attribute["value"])
}

fn is_hex(value: &Value, digits: usize) -> bool {
    let text = value.as_str().unwrap();
    text.len() == digits && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

#[tokio::test]
async fn requests_are_spans_at_the_collector() {
    let (endpoint, mut posts) = collector().await;
    let options = Options::default().config(&format!("otlp_endpoint = \"{endpoint}\""));
    let mut server = Server::start(Tier::Jail, options).await;
    server
        .client()
        .get("/v1/sandboxes/sbx_00000000000000000000")
        .await;
    let mut spans = Vec::new();
    wait::within("the spans arrive", Duration::from_secs(30), async {
        while !spans
            .iter()
            .any(|span: &Value| attribute(span, "status")["intValue"] == "404")
        {
            let (path, body) = posts.recv().await.unwrap();
            assert_eq!(path, "/v1/traces");
            let resource = &body["resourceSpans"][0];
            assert_eq!(
                attribute(&resource["resource"], "service.name"),
                &json!({"stringValue": "atoll"})
            );
            spans.extend(resource["scopeSpans"][0]["spans"].as_array().unwrap().clone());
        }
    })
    .await;
    for span in &spans {
        assert!(
            is_hex(&span["traceId"], 32) && is_hex(&span["spanId"], 16),
            "{span}"
        );
        let nanos = |field: &str| span[field].as_str().unwrap().parse::<u128>().unwrap();
        assert!(nanos("startTimeUnixNano") <= nanos("endTimeUnixNano"), "{span}");
    }
    let missed = spans
        .iter()
        .find(|span| attribute(span, "status")["intValue"] == "404")
        .unwrap();
    assert_eq!(
        attribute(missed, "sandbox")["stringValue"],
        "sbx_00000000000000000000",
        "{missed}"
    );
    // What had not been posted yet is, before the server ends.
    server.client().get("/v1/info").await.ok();
    // Elsewhere, so that the collector can answer meanwhile.
    let stopped = tokio::task::spawn_blocking(move || {
        assert!(server.stop().success());
        server
    });
    let server = stopped.await.unwrap();
    let mut routes = Vec::new();
    while let Ok((_, body)) = posts.try_recv() {
        let last = body["resourceSpans"][0]["scopeSpans"][0]["spans"]
            .as_array()
            .unwrap()
            .clone();
        routes.extend(
            last.iter()
                .map(|span| attribute(span, "route")["stringValue"].clone()),
        );
    }
    assert!(routes.contains(&json!("/v1/info")), "{routes:?}");
    assert!(
        server.log().contains("serving"),
        "the log is as without: {}",
        server.log()
    );
}

#[tokio::test]
async fn a_collector_that_is_not_there_costs_a_line_in_the_log() {
    let nobody = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", nobody.local_addr().unwrap());
    drop(nobody);
    let options = Options::default().config(&format!("otlp_endpoint = \"{endpoint}\""));
    let mut server = Server::start(Tier::Jail, options).await;
    wait::until("the loss is told", Duration::from_secs(30), || async {
        server.client().get("/v1/info").await.ok();
        server
            .log()
            .contains("the trace collector did not take the spans")
            .then_some(())
    })
    .await;
    assert!(server.stop().success());
}
