//! Connections to providers: kept for the next call, closed when nobody listens, and not used once they are dead.

#![expect(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use atoll_providers::{Blot, Call, Error, Providers, Reach, Ready, Reply, Timeouts};
use atoll_types::{ProjectId, ProviderKind, Timestamp};
use bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

const WHOLE: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}";
const STREAM: &[u8] =
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n";

struct Provider {
    listener: TcpListener,
    base: String,
}

impl Provider {
    async fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let base = format!("http://{}", listener.local_addr().unwrap());
        Self { listener, base }
    }

    async fn accept(&self) -> TcpStream {
        self.listener.accept().await.unwrap().0
    }

    fn call(&self, kind: ProviderKind, key: &[u8], stream: bool) -> Ready {
        let call = Call {
            kind,
            base_url: &self.base,
            path: "/model/a%3A0/converse",
            headers: &[],
            body: Bytes::from_static(b"{}"),
            stream,
        };
        call.with_key(Some(key), Timestamp(1_440_938_160_000)).unwrap()
    }
}

fn providers() -> Providers {
    Providers::new(Timeouts {
        connect: Duration::from_secs(10),
        first_byte: Duration::from_secs(10),
        idle: Duration::from_secs(10),
    })
    .unwrap()
}

fn somebody() -> ProjectId {
    ProjectId::from_entropy([1; 20])
}

/// Reads one request, which has a body of two bytes.
async fn request(stream: &mut TcpStream) -> String {
    let mut seen = Vec::new();
    while !seen.ends_with(b"\r\n\r\n{}") {
        assert_ne!(stream.read_buf(&mut seen).await.unwrap(), 0, "closed");
    }
    String::from_utf8(seen).unwrap()
}

async fn whole(reply: Reply) -> Bytes {
    reply.whole().await.unwrap()
}

#[tokio::test]
async fn a_connection_serves_one_call_after_the_other() {
    let (provider, providers) = (Provider::new().await, providers());
    let served = async {
        let mut stream = provider.accept().await;
        for _ in 0..3 {
            request(&mut stream).await;
            stream.write_all(WHOLE).await.unwrap();
        }
        stream
    };
    let called = async {
        for _ in 0..3 {
            let call = provider.call(ProviderKind::Openai, b"sk", false);
            assert_eq!(
                whole(providers.send(call, &somebody(), None).await.unwrap()).await,
                "{}"
            );
        }
    };
    // With a second connection the server would wait for ever.
    let _open = tokio::join!(served, called);
}

#[tokio::test]
async fn one_that_the_provider_has_closed_is_not_used_again() {
    let (provider, providers) = (Provider::new().await, providers());
    for _ in 0..2 {
        let served = async {
            let mut stream = provider.accept().await;
            request(&mut stream).await;
            stream.write_all(WHOLE).await.unwrap();
            stream.shutdown().await.unwrap();
            // Until the other end has closed it, too, or been told.
            drop(stream);
        };
        let call = provider.call(ProviderKind::Openai, b"sk", false);
        let called = async { whole(providers.send(call, &somebody(), None).await.unwrap()).await };
        let ((), answer) = tokio::join!(served, called);
        assert_eq!(answer, "{}");
    }
}

#[tokio::test]
async fn whoever_stops_listening_closes_the_connection() {
    let (provider, providers) = (Provider::new().await, providers());
    let call = provider.call(ProviderKind::Openai, b"sk", true);
    let sending = tokio::spawn(async move {
        let mut reply = providers.send(call, &somebody(), None).await.unwrap();
        assert_eq!(reply.chunk().await.unwrap().unwrap(), "abc");
        drop(reply);
        providers
    });
    let mut stream = provider.accept().await;
    request(&mut stream).await;
    stream.write_all(STREAM).await.unwrap();
    assert_eq!(stream.read(&mut [0; 16]).await.unwrap(), 0);
    sending.await.unwrap();
}

/// Chunks that come one by one, several at once, and cut in the middle are all heard, in their order.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_chunk_is_slept_through() {
    let (provider, providers) = (Provider::new().await, providers());
    let call = provider.call(ProviderKind::Openai, b"sk", true);
    let reading = tokio::spawn(async move {
        let mut reply = providers.send(call, &somebody(), None).await.unwrap();
        let mut all = Vec::new();
        while let Some(chunk) = reply.chunk().await.unwrap() {
            all.extend_from_slice(&chunk);
        }
        all
    });
    let mut stream = provider.accept().await;
    request(&mut stream).await;
    stream.set_nodelay(true).unwrap();
    stream.write_all(STREAM).await.unwrap();
    let mut expected = b"abc".to_vec();
    for round in 0..2000_u32 {
        let text = format!("{round};");
        let framed = format!("{:x}\r\n{text}\r\n", text.len());
        let (head, tail) = framed.as_bytes().split_at(round as usize % framed.len());
        stream.write_all(head).await.unwrap();
        if round % 3 == 0 {
            tokio::task::yield_now().await;
        }
        stream.write_all(tail).await.unwrap();
        expected.extend_from_slice(text.as_bytes());
    }
    stream.write_all(b"0\r\n\r\n").await.unwrap();
    assert_eq!(reading.await.unwrap(), expected);
}

#[tokio::test]
async fn a_request_to_amazon_is_signed_or_carries_its_key() {
    let (provider, providers) = (Provider::new().await, providers());
    for (key, expected) in [
        (
            b"AKIAIOSFODNN7EXAMPLE:secret:token".as_slice(),
            "authorization: AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20150830/us-east-1/bedrock/aws4_request, \
             SignedHeaders=content-type;host;x-amz-date;x-amz-security-token, Signature=",
        ),
        (
            b"bedrock-api-key-1",
            "authorization: Bearer bedrock-api-key-1\r\n",
        ),
    ] {
        let call = provider.call(ProviderKind::Bedrock, key, false);
        let served = async {
            let mut stream = provider.accept().await;
            let asked = request(&mut stream).await;
            stream.write_all(WHOLE).await.unwrap();
            drop(stream);
            asked
        };
        let (asked, reply) = {
            let whose = somebody();
            tokio::join!(served, providers.send(call, &whose, None))
        };
        assert!(
            asked.starts_with("POST /model/a%3A0/converse HTTP/1.1\r\n"),
            "{asked}"
        );
        assert!(asked.contains(expected), "{asked}");
        assert!(!asked.contains("secret\r\n"), "{asked}");
        drop(reply.unwrap());
    }
}

/// Nobody reaches this machine.
struct NotHere;

impl Reach for NotHere {
    fn name(&self, host: &str) -> Result<(), String> {
        if host == "refused.example" {
            return Err("this name is refused".into());
        }
        Ok(())
    }

    fn address(&self, address: IpAddr) -> Result<(), String> {
        if address.to_canonical().is_loopback() {
            return Err(format!("{address} is refused"));
        }
        Ok(())
    }
}

/// However an address is written, and whatever a name resolves to, it is the address that is asked about.
#[tokio::test]
async fn what_may_not_be_reached_is_not_connected_to() {
    let (provider, providers) = (Provider::new().await, providers());
    let reach: Arc<dyn Reach> = Arc::new(NotHere);
    let port = provider.listener.local_addr().unwrap().port();
    for host in [
        "127.0.0.1",
        "localhost",
        "127.1",
        "2130706433",
        "0x7f000001",
        "[::1]",
        "[::ffff:127.0.0.1]",
    ] {
        let call = Call {
            kind: ProviderKind::Openai,
            base_url: &format!("http://{host}:{port}"),
            path: "/x",
            headers: &[],
            body: Bytes::from_static(b"{}"),
            stream: false,
        };
        let ready = call.with_key(Some(b"sk-secret"), Timestamp(0)).unwrap();
        let error = providers
            .send(ready, &somebody(), Some(&reach))
            .await
            .unwrap_err();
        assert!(
            matches!(&error, Error::OutOfBounds(why) if why.contains("is refused"))
                && !error.may_be_charged(),
            "{host}: {error}"
        );
    }
    // A connection that somebody else has left open is no way round.
    let served = async {
        let mut stream = provider.accept().await;
        request(&mut stream).await;
        stream.write_all(WHOLE).await.unwrap();
        stream
    };
    let call = provider.call(ProviderKind::Openai, b"sk", false);
    let called = async { whole(providers.send(call, &somebody(), None).await.unwrap()).await };
    let (_open, _) = tokio::join!(served, called);
    let call = provider.call(ProviderKind::Openai, b"sk", false);
    assert!(providers.send(call, &somebody(), Some(&reach)).await.is_err());
}

/// Who was asked and said nothing may charge for it; who was never asked does not.
#[tokio::test]
async fn what_was_sent_is_told_from_what_was_not() {
    let (provider, providers) = (Provider::new().await, providers());
    let call = provider.call(ProviderKind::Openai, b"sk", false);
    let served = async {
        let mut stream = provider.accept().await;
        request(&mut stream).await;
        drop(stream);
    };
    let whose = somebody();
    let (error, ()) = tokio::join!(providers.send(call, &whose, None), served);
    assert!(error.unwrap_err().may_be_charged());
    let call = provider.call(ProviderKind::Openai, b"sk", false);
    drop(provider);
    assert!(
        !providers
            .send(call, &somebody(), None)
            .await
            .unwrap_err()
            .may_be_charged()
    );
}

/// Projects do not share connections, also where they lead to the same place.
#[tokio::test]
async fn a_connection_serves_one_project_only() {
    let (provider, providers) = (Provider::new().await, providers());
    let mut open = Vec::new();
    for project in [1, 2] {
        let project = ProjectId::from_entropy([project; 20]);
        let call = provider.call(ProviderKind::Openai, b"sk", false);
        let called = async { whole(providers.send(call, &project, None).await.unwrap()).await };
        // One that was left open by the first would not be accepted again.
        let served = async {
            let mut stream = provider.accept().await;
            request(&mut stream).await;
            stream.write_all(WHOLE).await.unwrap();
            stream
        };
        let (stream, _) = tokio::join!(served, called);
        open.push(stream);
    }
}

/// Stands in for what searches an answer for the key.
struct Stars(Vec<u8>);

impl Blot for Stars {
    fn text(&self, text: &str) -> String {
        text.replace("sk-secret", "*********")
    }

    fn piece(&mut self, piece: Bytes) -> Bytes {
        self.0.extend_from_slice(&piece);
        Bytes::new()
    }

    fn rest(&mut self) -> Bytes {
        let held = std::mem::take(&mut self.0);
        self.text(&String::from_utf8(held).unwrap()).into()
    }
}

/// Also what stands in its head, and what is told about an answer of the wrong kind.
#[tokio::test]
async fn whatever_a_provider_says_is_searched_for_its_key() {
    let (provider, providers) = (Provider::new().await, providers());
    for (answer, shown) in [
        (
            "HTTP/1.1 400 No\r\ncontent-length: 14\r\n\r\nfor sk-secret!",
            "for *********!",
        ),
        (
            "HTTP/1.1 200 OK\r\ncontent-type: text/sk-secret\r\ncontent-length: 0\r\n\r\n",
            "text/*********",
        ),
    ] {
        let call = provider
            .call(ProviderKind::Openai, b"sk-secret", false)
            .blotting(Box::new(Stars(Vec::new())));
        let served = async {
            let mut stream = provider.accept().await;
            request(&mut stream).await;
            stream.write_all(answer.as_bytes()).await.unwrap();
        };
        let called = async {
            match providers.send(call, &somebody(), None).await {
                Ok(reply) => String::from_utf8(reply.explanation().await.to_vec()).unwrap(),
                Err(error) => error.to_string(),
            }
        };
        let ((), said) = tokio::join!(served, called);
        assert!(said.contains(shown) && !said.contains("sk-secret"), "{said}");
    }
}
