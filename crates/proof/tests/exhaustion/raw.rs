//! Requests as no client library sends them: announced and not sent, endless, slow, silent.

use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// Whoever has not been answered or cut by then never is.
pub(crate) const NEVER: Duration = Duration::from_secs(60);
/// What an attack sends of a body, at most; far more than is read of it.
const SENT: usize = 12 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Attack {
    /// A gigabyte is announced, and much of it sent.
    Big,
    /// The same without saying how long it is.
    Endless,
    /// A kilobyte is announced, and nothing sent.
    Silent,
    /// A megabyte is announced, and a byte sent now and then.
    Dribbling,
}

pub(crate) const ATTACKS: [Attack; 4] = [Attack::Big, Attack::Endless, Attack::Silent, Attack::Dribbling];

/// A request without a body.
#[derive(Debug, Clone)]
pub(crate) struct Head {
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) headers: Vec<(String, String)>,
}

impl Head {
    fn text(&self, attack: Attack) -> String {
        let mut text = format!("{} {} HTTP/1.1\r\n", self.method, self.path);
        for (name, value) in &self.headers {
            text.push_str(&format!("{name}: {value}\r\n"));
        }
        text.push_str(match attack {
            Attack::Big => "content-length: 1073741824\r\n\r\n",
            Attack::Endless => "transfer-encoding: chunked\r\n\r\n",
            Attack::Silent => "content-length: 1000\r\n\r\n",
            Attack::Dribbling => "content-length: 1048576\r\n\r\n",
        });
        text
    }
}

/// What became of an attack: a status, or that the connection was closed without one.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Outcome {
    Status(u16),
    Closed,
}

impl std::fmt::Display for Outcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Status(status) => status.fmt(f),
            Self::Closed => f.write_str("closed"),
        }
    }
}

/// Sends it, and waits for what comes back.
pub(crate) async fn attack(authority: &str, head: &Head, attack: Attack) -> Outcome {
    let mut tcp = TcpStream::connect(authority).await.unwrap();
    if tcp.write_all(head.text(attack).as_bytes()).await.is_err() {
        return Outcome::Closed;
    }
    let (mut read, mut write) = tcp.split();
    let sending = async {
        match attack {
            Attack::Silent => {}
            Attack::Dribbling => {
                while write.write_all(b" ").await.is_ok() {
                    tokio::time::sleep(Duration::from_millis(300)).await;
                }
            }
            Attack::Big | Attack::Endless => {
                let mut piece = vec![b' '; 1 << 16];
                if attack == Attack::Endless {
                    piece.splice(0..0, *b"10000\r\n");
                    piece.extend_from_slice(b"\r\n");
                }
                let mut left = SENT;
                while left > 0 && write.write_all(&piece).await.is_ok() {
                    left = left.saturating_sub(1 << 16);
                }
            }
        }
        std::future::pending::<()>().await;
    };
    let mut answer = Vec::new();
    let reading = async {
        let mut piece = [0; 1024];
        while !answer.windows(4).any(|end| end == b"\r\n\r\n") {
            match read.read(&mut piece).await {
                Ok(count) if count > 0 => answer.extend_from_slice(&piece[..count]),
                _ => break,
            }
        }
    };
    tokio::select! {
        () = sending => {}
        () = reading => {}
        () = tokio::time::sleep(NEVER) => panic!("{attack:?} on {head:?}: neither answered nor cut"),
    }
    let text = String::from_utf8_lossy(&answer);
    let status = text
        .strip_prefix("HTTP/1.1 ")
        .and_then(|rest| rest.get(..3)?.parse().ok());
    status.map_or(Outcome::Closed, Outcome::Status)
}

/// Waits until the server closes a connection.
pub(crate) async fn until_closed(tcp: &mut TcpStream, what: &str) {
    let mut piece = [0; 1024];
    let closed = async { while matches!(tcp.read(&mut piece).await, Ok(count) if count > 0) {} };
    if tokio::time::timeout(NEVER, closed).await.is_err() {
        panic!("{what}: the server keeps the connection");
    }
}
