//! Many streams at once, and how late each chunk of them comes.
//!
//! ```text
//!   source ── a chunk with the time of its writing, every 20 ms, to each ──> (nothing │ the gateway │ a copier) ──> reader
//! ```
//! What must hold: all ways are measured with the same source, the same reader and the same load, one after the other, so
//! that their difference is what the thing in the middle adds. Source and reader do as little as possible, on one thread each:
//! on a small machine they compete with what is measured. The source begins when all streams are open and spreads them over
//! the 20 ms, as callers who do not know each other are spread.

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use atoll_client::output::{Doing, Error, Result};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;

use crate::row::Samples;

/// Milliseconds between two chunks of a stream.
const PERIOD: usize = 20;
/// How many chunks each stream has: five seconds.
pub(super) const CHUNKS: usize = 250;

const HEAD: &str = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
/// Around the time of its writing, in nanoseconds.
const CHUNK: [&str; 2] = [
    "data: {\"id\":\"chatcmpl-bench\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,\"model\":\"clock\",\
     \"choices\":[{\"index\":0,\"delta\":{\"content\":\"@",
    "\"},\"finish_reason\":null}]}\n\n",
];
const DIGITS: usize = 15;
const LAST: &str = "data: {\"id\":\"chatcmpl-bench\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,\"model\":\"clock\",\
                    \"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n\
                    data: {\"id\":\"chatcmpl-bench\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,\"model\":\"clock\",\
                    \"choices\":[],\"usage\":{\"prompt_tokens\":1,\"completion_tokens\":250,\"total_tokens\":251}}\n\n\
                    data: [DONE]\n\n";

/// Somebody who sends streams, on a thread of its own.
#[derive(Debug)]
pub(super) struct Source {
    pub(super) address: SocketAddr,
}

impl Source {
    /// It serves `count` streams, once.
    pub(super) fn start(count: usize, origin: Instant) -> Result<Self> {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").doing("no free port")?;
        let address = listener.local_addr().doing("no free port")?;
        listener.set_nonblocking(true).doing("no free port")?;
        apart("source", move || async move {
            if let Err(error) = send(listener, count, origin).await {
                tracing::error!(%error, "the source of streams failed");
            }
        })?;
        Ok(Self { address })
    }
}

async fn send(listener: std::net::TcpListener, count: usize, origin: Instant) -> io::Result<()> {
    let listener = TcpListener::from_std(listener)?;
    let (opened, mut streams) = mpsc::channel(count);
    let accepting = tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await?;
            let opened = opened.clone();
            tokio::spawn(async move {
                if let Ok(stream) = open(stream).await {
                    let _full = opened.send(stream).await;
                }
            });
        }
        #[allow(unreachable_code, reason = "it says what kind of error the loop ends with")]
        Ok::<_, io::Error>(())
    });
    let mut all = Vec::with_capacity(count);
    while all.len() < count {
        let Some(stream) = streams.recv().await else {
            return Ok(());
        };
        all.push(stream);
    }
    let mut ticks = tokio::time::interval(Duration::from_millis(1));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
    for tick in 0..CHUNKS * PERIOD {
        ticks.tick().await;
        for stream in all.iter().skip(tick % PERIOD).step_by(PERIOD) {
            let now = origin.elapsed().as_nanos();
            put(stream, &format!("{}{now:0DIGITS$}{}", CHUNK[0], CHUNK[1]))?;
        }
    }
    for stream in &all {
        put(stream, LAST)?;
        stream.try_write(b"0\r\n\r\n")?;
    }
    accepting.abort();
    Ok(())
}

/// Reads a request to its end and answers with a head.
async fn open(mut stream: TcpStream) -> io::Result<TcpStream> {
    stream.set_nodelay(true)?;
    let mut read = Vec::new();
    loop {
        if stream.read_buf(&mut read).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let text = String::from_utf8_lossy(&read);
        let Some((head, body)) = text.split_once("\r\n\r\n") else {
            continue;
        };
        let length = head
            .lines()
            .filter_map(|line| line.split_once(": "))
            .find(|(name, _)| name.eq_ignore_ascii_case("content-length"))
            .and_then(|(_, length)| length.parse().ok())
            .unwrap_or(0);
        if body.len() >= length {
            break;
        }
    }
    stream.write_all(HEAD.as_bytes()).await?;
    Ok(stream)
}

/// A socket that is read takes a chunk at once.
fn put(stream: &TcpStream, text: &str) -> io::Result<()> {
    let framed = format!("{:x}\r\n{text}\r\n", text.len());
    if stream.try_write(framed.as_bytes())? == framed.len() {
        return Ok(());
    }
    Err(io::ErrorKind::WriteZero.into())
}

/// Somebody in the middle who does nothing but copy bytes, with as many threads as the gateway has: what this machine takes for
/// it in any case.
pub(super) fn copier(to: SocketAddr) -> Result<SocketAddr> {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").doing("no free port")?;
    let address = listener.local_addr().doing("no free port")?;
    listener.set_nonblocking(true).doing("no free port")?;
    tokio::spawn(async move {
        let listener = TcpListener::from_std(listener)?;
        loop {
            let (mut near, _) = listener.accept().await?;
            tokio::spawn(async move {
                let mut far = TcpStream::connect(to).await?;
                near.set_nodelay(true)?;
                far.set_nodelay(true)?;
                tokio::io::copy_bidirectional(&mut near, &mut far).await
            });
        }
        #[allow(unreachable_code, reason = "it says what kind of error the loop ends with")]
        Ok::<_, io::Error>(())
    });
    Ok(address)
}

/// Reads `count` streams at once, on a thread of its own: by how many milliseconds each chunk is late.
pub(super) async fn read(to: SocketAddr, key: &str, count: usize, origin: Instant) -> Result<Samples> {
    let body = r#"{"model":"clock","stream":true,"stream_options":{"include_usage":true},"max_tokens":300,
        "messages":[{"role":"user","content":"go"}]}"#;
    let request = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: {to}\r\nauthorization: Bearer {key}\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let (done, result) = tokio::sync::oneshot::channel();
    apart("reader", move || async move {
        let mut readers = JoinSet::new();
        for _ in 0..count {
            let request = request.clone();
            readers.spawn(async move { read_one(to, &request, origin).await });
        }
        let mut late = Samples::default();
        let all = async {
            while let Some(read) = readers.join_next().await {
                late.0.extend(read.doing("a stream died")??);
            }
            Ok::<_, Error>(late)
        };
        let _nobody = done.send(all.await);
    })?;
    result.await.doing("the reader died")?
}

async fn read_one(to: SocketAddr, request: &str, origin: Instant) -> Result<Vec<f64>> {
    let mut stream = TcpStream::connect(to).await.doing("cannot connect")?;
    stream
        .write_all(request.as_bytes())
        .await
        .doing("cannot ask for a stream")?;
    let mut late = Vec::with_capacity(CHUNKS);
    let mut buffer = Vec::with_capacity(4096);
    loop {
        if stream.read_buf(&mut buffer).await.doing("a stream broke off")? == 0 {
            break;
        }
        let now = origin.elapsed().as_nanos();
        let mut done = 0;
        while let Some(at) = memchr::memchr(b'@', &buffer[done..]).map(|at| done + at + 1) {
            let Some(digits) = buffer.get(at..at + DIGITS) else {
                break;
            };
            let sent: u128 = std::str::from_utf8(digits)
                .ok()
                .and_then(|digits| digits.parse().ok())
                .ok_or_else(|| Error::new("a chunk came back changed"))?;
            late.push(now.saturating_sub(sent) as f64 / 1e6);
            done = at + DIGITS;
        }
        if memchr::memmem::find(&buffer[done..], b"[DONE]").is_some() {
            break;
        }
        // What may be the beginning of a time is kept.
        let keep = memchr::memchr(b'@', &buffer[done..])
            .map_or_else(|| buffer.len().saturating_sub(8).max(done), |at| done + at);
        buffer.drain(..keep);
    }
    if late.len() == CHUNKS {
        return Ok(late);
    }
    Err(Error::new(format!(
        "a stream had {} chunks instead of {CHUNKS}: {}",
        late.len(),
        String::from_utf8_lossy(&buffer)
    )))
}

/// Runs something on a thread and a runtime of its own.
fn apart<F, W>(name: &str, work: W) -> Result<()>
where
    W: FnOnce() -> F + Send + 'static,
    F: Future<Output = ()>,
{
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .doing("cannot start")?;
    std::thread::Builder::new()
        .name(name.into())
        .spawn(move || runtime.block_on(work()))
        .doing("cannot start a thread")?;
    Ok(())
}
