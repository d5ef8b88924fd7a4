//! Servers inside a sandbox, reached from outside.

use std::time::Duration;

use atoll_proof::{Answer, Sandbox, Server, Value, json, on_every_tier, stream};
use futures_util::{SinkExt as _, StreamExt as _};
use reqwest::Method;
use tokio_tungstenite::tungstenite::Message;

on_every_tier!(
    a_server_inside_is_reached_with_its_token,
    without_the_token_nothing_passes,
    two_sandboxes_have_two_ports,
    a_websocket_passes_through,
    bodies_stream_through,
    what_does_not_listen_is_said,
);

/// The way to a port, once something listens there.
async fn access(sandbox: &Sandbox, port: u16) -> (String, String) {
    atoll_proof::wait::until(
        &format!("port {port} listens"),
        Duration::from_secs(30),
        || async {
            let list = sandbox.client.get(&sandbox.path("/ports")).await.ok();
            let found = list["items"]
                .as_array()
                .unwrap()
                .iter()
                .any(|item| item["port"] == json!(port));
            found.then_some(())
        },
    )
    .await;
    let access = sandbox
        .client
        .get(&sandbox.path(&format!("/ports/{port}")))
        .await
        .ok();
    let text = |name: &str| access[name].as_str().unwrap().to_owned();
    (text("url"), text("token"))
}

fn host(sandbox: &Sandbox, port: u16) -> String {
    let own = sandbox.client.authority().rsplit_once(':').unwrap().1;
    format!("{port}-{}.localhost:{own}", sandbox.bare())
}

/// A request to a port, as a browser that resolves `*.localhost` by itself would send it.
async fn fetch(sandbox: &Sandbox, port: u16, path: &str, headers: &[(&str, &str)]) -> Answer {
    let client = sandbox.client.with_key(None);
    let mut request = client
        .request(Method::GET, path)
        .header("host", host(sandbox, port));
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    client.send(request).await
}

async fn serve_files(sandbox: &Sandbox, port: u16, content: &str) {
    sandbox.write("/tmp/www/index.html", content.as_bytes()).await;
    sandbox
        .background(&format!(
            "cd /tmp/www && exec python3 -m http.server {port} --bind 127.0.0.1"
        ))
        .await;
}

async fn a_server_inside_is_reached_with_its_token(server: &Server) {
    let sandbox = server.sandbox().await;
    serve_files(&sandbox, 8000, "<h1>hello</h1>").await;
    let (url, token) = access(&sandbox, 8000).await;
    assert_eq!(url, format!("http://{}", host(&sandbox, 8000)));
    for headers in [
        [("x-atoll-token", token.as_str())],
        [("authorization", &format!("Bearer {token}"))],
    ] {
        let page = fetch(&sandbox, 8000, "/", &headers).await.expect(200);
        assert_eq!(page.text(), "<h1>hello</h1>");
        assert_eq!(page.headers["content-type"], "text/html");
    }
    let missing = fetch(&sandbox, 8000, "/nope", &[("x-atoll-token", &token)]).await;
    assert_eq!(missing.status, 404);
    assert!(
        missing.text().contains("File not found"),
        "the guest's own answer passes through: {missing:?}"
    );
    // Ports below 1024 are the guest's own business; this one is its other loopback address.
    sandbox
        .background("cd /tmp/www && exec python3 -m http.server 8001 --bind ::1")
        .await;
    let (_, token) = access(&sandbox, 8001).await;
    fetch(&sandbox, 8001, "/", &[("x-atoll-token", &token)])
        .await
        .expect(200);
}

/// Answers with what it was asked.
const ECHO: &str = "
import http.server
class Echo(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = (self.path + '\\n' + str(self.headers)).encode()
        self.send_response(200)
        self.send_header('content-length', str(len(body)))
        self.end_headers()
        self.wfile.write(body)
http.server.HTTPServer(('127.0.0.1', 8000), Echo).serve_forever()
";

async fn without_the_token_nothing_passes(server: &Server) {
    let sandbox = server.sandbox().await;
    sandbox.write("/tmp/echo.py", ECHO.as_bytes()).await;
    sandbox.background("exec python3 /tmp/echo.py").await;
    let (_, token) = access(&sandbox, 8000).await;
    let wrong = format!("{}x", &token[..token.len() - 1]);
    let key = format!("Bearer {}", server.client().key().unwrap());
    for headers in [
        vec![],
        vec![("x-atoll-token", wrong.as_str())],
        vec![("authorization", key.as_str())],
    ] {
        let refused = fetch(&sandbox, 8000, "/secret", &headers).await;
        refused.refused(401, "invalid_port_token");
    }
    // What opens the door is not shown to who is behind it.
    let both = [
        ("x-atoll-token", token.as_str()),
        ("authorization", key.as_str()),
        ("cookie", "a=b"),
    ];
    let echoed = fetch(&sandbox, 8000, "/path?x=1", &both).await.expect(200).text();
    assert!(echoed.starts_with("/path?x=1\n"), "{echoed}");
    assert!(
        echoed.contains("a=b") && !echoed.contains(&token) && !echoed.contains("e2b_"),
        "{echoed}"
    );
    // A browser brings the token in the URL once and has a cookie from then on.
    let opened = raw_get(&sandbox, &format!("/page?atoll_token={token}&y=2")).await;
    assert!(opened.starts_with("HTTP/1.1 303"), "{opened}");
    assert!(
        opened.to_lowercase().contains("set-cookie: atoll_token=") && opened.contains("/page?y=2"),
        "{opened}"
    );
    let cookie = format!("atoll_token={token}");
    let echoed = fetch(&sandbox, 8000, "/page", &[("cookie", &cookie)])
        .await
        .expect(200)
        .text();
    assert!(!echoed.contains(&token), "{echoed}");
    sandbox.kill().await;
    let gone = fetch(&sandbox, 8000, "/", &[("x-atoll-token", &token)]).await;
    assert!(
        (400..500).contains(&gone.status),
        "a token dies with its sandbox: {gone:?}"
    );
}

/// Without a client that follows redirects.
async fn raw_get(sandbox: &Sandbox, path: &str) -> String {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let mut tcp = tokio::net::TcpStream::connect(sandbox.client.authority())
        .await
        .unwrap();
    let head = format!(
        "GET {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n",
        host(sandbox, 8000)
    );
    tcp.write_all(head.as_bytes()).await.unwrap();
    let mut answer = String::new();
    tcp.read_to_string(&mut answer).await.unwrap();
    answer
}

async fn two_sandboxes_have_two_ports(server: &Server) {
    let (one, two) = (server.sandbox().await, server.sandbox().await);
    serve_files(&one, 8000, "I am one").await;
    serve_files(&two, 8000, "I am two").await;
    let (_, token_one) = access(&one, 8000).await;
    let (_, token_two) = access(&two, 8000).await;
    assert_ne!(token_one, token_two);
    assert_eq!(
        fetch(&one, 8000, "/", &[("x-atoll-token", &token_one)])
            .await
            .expect(200)
            .text(),
        "I am one"
    );
    assert_eq!(
        fetch(&two, 8000, "/", &[("x-atoll-token", &token_two)])
            .await
            .expect(200)
            .text(),
        "I am two"
    );
    fetch(&one, 8000, "/", &[("x-atoll-token", &token_two)])
        .await
        .refused(401, "invalid_port_token");
    one.kill().await;
    assert_eq!(
        fetch(&two, 8000, "/", &[("x-atoll-token", &token_two)])
            .await
            .expect(200)
            .text(),
        "I am two"
    );
}

/// A WebSocket server in forty lines of Python: answers the handshake and sends every short frame back unmasked.
const WEBSOCKET_ECHO: &str = r#"
import base64, hashlib, socket
listener = socket.create_server(('127.0.0.1', 9000))
while True:
    connection, _ = listener.accept()
    head = b''
    while b'\r\n\r\n' not in head:
        head += connection.recv(1024)
    key = next(l.split(b':', 1)[1].strip() for l in head.split(b'\r\n') if l.lower().startswith(b'sec-websocket-key:'))
    accept = base64.b64encode(hashlib.sha1(key + b'258EAFA5-E914-47DA-95CA-C5AB0DC85B11').digest())
    connection.sendall(b'HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n'
                       b'Sec-WebSocket-Accept: ' + accept + b'\r\n\r\n')
    reader = connection.makefile('rb')
    while True:
        first = reader.read(2)
        if len(first) < 2 or first[0] & 15 == 8:
            break
        length = first[1] & 127
        mask = reader.read(4)
        data = bytes(b ^ mask[i % 4] for i, b in enumerate(reader.read(length)))
        connection.sendall(bytes([first[0], length]) + data)
    connection.close()
"#;

async fn a_websocket_passes_through(server: &Server) {
    let sandbox = server.sandbox().await;
    sandbox.write("/tmp/ws.py", WEBSOCKET_ECHO.as_bytes()).await;
    sandbox.background("exec python3 /tmp/ws.py").await;
    let (_, token) = access(&sandbox, 9000).await;
    let host = host(&sandbox, 9000);
    assert!(
        stream::connect(&sandbox.client, &host, "/", &[]).await.is_err(),
        "not without a token"
    );
    let headers = [("x-atoll-token", token.as_str())];
    let mut socket = stream::connect(&sandbox.client, &host, "/chat", &headers)
        .await
        .unwrap();
    for text in ["one", "two", "drei ☃"] {
        socket.send(Message::text(text)).await.unwrap();
        let answer = atoll_proof::wait::within("an echo", Duration::from_secs(20), socket.next()).await;
        assert_eq!(answer.unwrap().unwrap(), Message::text(text));
    }
    socket.close(None).await.unwrap();
}

async fn bodies_stream_through(server: &Server) {
    let sandbox = server.sandbox().await;
    sandbox
        .sh("mkdir -p /tmp/www && head -c 20000000 /dev/urandom > /tmp/www/blob")
        .await
        .ok();
    let expected = sandbox.sh("sha256sum < /tmp/www/blob").await.ok();
    serve_files(&sandbox, 8000, "").await;
    let (_, token) = access(&sandbox, 8000).await;
    let blob = fetch(&sandbox, 8000, "/blob", &[("x-atoll-token", &token)])
        .await
        .expect(200);
    assert_eq!(blob.body.len(), 20_000_000);
    sandbox.write("/tmp/again", &blob.body).await;
    assert_eq!(sandbox.sh("sha256sum < /tmp/again").await.ok(), expected);
}

async fn what_does_not_listen_is_said(server: &Server) {
    let sandbox = server.sandbox().await;
    let ports = sandbox.client.get(&sandbox.path("/ports")).await.ok();
    assert_eq!(
        ports["items"],
        Value::Array(Vec::new()),
        "nothing of ours listens inside"
    );
    let access = sandbox.client.get(&sandbox.path("/ports/8000")).await.ok();
    let token = access["token"].as_str().unwrap();
    fetch(&sandbox, 8000, "/", &[("x-atoll-token", token)])
        .await
        .refused(502, "port_refused");
    for port in ["0", "70000", "http"] {
        sandbox
            .client
            .get(&sandbox.path(&format!("/ports/{port}")))
            .await
            .expect(400)
            .error();
    }
    let client = sandbox.client.with_key(None);
    let nowhere = client
        .request(Method::GET, "/")
        .header("host", "8000-short.localhost");
    client.send(nowhere).await.refused(404, "no_such_port");
}
