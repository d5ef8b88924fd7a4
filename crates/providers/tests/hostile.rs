//! Providers that misbehave, each on a socket of its own.

#![expect(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

use std::time::Duration;

use atoll_providers::{Call, Error, Providers, Timeouts};
use atoll_types::{ProjectId, ProviderKind, Timestamp};
use bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

fn providers() -> Providers {
    let short = Duration::from_millis(200);
    Providers::new(Timeouts {
        connect: short,
        first_byte: short,
        idle: short,
    })
    .unwrap()
}

/// Answers every connection with `answer` and then does what `after` says.
async fn serve<F: Future<Output = ()> + Send + 'static>(
    answer: Vec<u8>,
    after: fn(TcpStream) -> F,
) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let answer = answer.clone();
            tokio::spawn(async move {
                let mut seen = Vec::new();
                while !seen.windows(4).any(|four| four == b"\r\n\r\n") {
                    let mut buffer = [0; 4096];
                    match stream.read(&mut buffer).await {
                        Ok(0) | Err(_) => return,
                        Ok(count) => seen.extend_from_slice(&buffer[..count]),
                    }
                }
                if stream.write_all(&answer).await.is_ok() {
                    after(stream).await;
                }
            });
        }
    });
    format!("http://{address}")
}

async fn hold(stream: TcpStream) {
    std::future::pending::<()>().await;
    drop(stream);
}

async fn close(_: TcpStream) {}

async fn ask(base: &str, stream: bool) -> Result<atoll_providers::Reply, Error> {
    let call = Call {
        kind: ProviderKind::Openai,
        base_url: base,
        path: "/chat/completions",
        headers: &[],
        body: Bytes::from_static(b"{}"),
        stream,
    };
    providers()
        .send(
            call.with_key(Some(b"sk-secret"), Timestamp(0))?,
            &ProjectId::from_entropy([1; 20]),
            None,
        )
        .await
}

#[tokio::test]
async fn one_that_says_nothing_is_given_up() {
    let base = serve(Vec::new(), hold).await;
    assert!(matches!(ask(&base, true).await, Err(Error::TooSlow(_))));
}

#[tokio::test]
async fn one_that_is_not_there_is_told_apart() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let base = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    assert!(matches!(ask(&base, true).await, Err(Error::Unreachable(_))));
}

#[tokio::test]
async fn one_that_stalls_in_the_middle_is_given_up() {
    let head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n";
    let base = serve(head.to_vec(), hold).await;
    let mut reply = ask(&base, true).await.unwrap();
    assert_eq!(reply.chunk().await.unwrap().unwrap(), "abc");
    assert!(matches!(reply.chunk().await, Err(Error::Stalled(_))));
}

#[tokio::test]
async fn one_that_breaks_off_is_noticed() {
    let head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{\"a\"";
    let base = serve(head.to_vec(), close).await;
    assert!(matches!(
        ask(&base, false).await.unwrap().whole().await,
        Err(Error::BrokeOff(_))
    ));
}

#[tokio::test]
async fn answers_of_another_kind_are_refused() {
    for (answer, stream) in [
        (
            "HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 0\r\n\r\n",
            false,
        ),
        (
            "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}",
            true,
        ),
        (
            "HTTP/1.1 302 Found\r\nlocation: http://169.254.169.254/\r\ncontent-length: 0\r\n\r\n",
            false,
        ),
        ("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", false),
    ] {
        let base = serve(answer.as_bytes().to_vec(), close).await;
        assert!(
            matches!(ask(&base, stream).await, Err(Error::WrongKind(_))),
            "{answer}"
        );
    }
    let base = serve(b"garbage\r\n\r\n".to_vec(), close).await;
    assert!(matches!(ask(&base, false).await, Err(Error::BrokeOff(_))));
}

#[tokio::test]
async fn an_answer_without_an_end_is_not_held() {
    let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 99999999999\r\n\r\n";
    let base = serve(head.as_bytes().to_vec(), hold).await;
    assert!(matches!(
        ask(&base, false).await.unwrap().whole().await,
        Err(Error::TooLarge(_))
    ));
}

#[tokio::test]
async fn a_refusal_is_an_answer() {
    let head = "HTTP/1.1 429 Too Many\r\nretry-after: 7\r\nx-request-id: r1\r\ncontent-length: 4\r\n\r\nslow";
    let base = serve(head.as_bytes().to_vec(), close).await;
    let reply = ask(&base, false).await.unwrap();
    assert_eq!(
        (reply.status, reply.retry_after),
        (429, Some(Duration::from_secs(7)))
    );
    assert_eq!(reply.request_id.as_deref(), Some("r1"));
    assert_eq!(reply.explanation().await, "slow");
}
