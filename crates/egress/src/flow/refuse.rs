//! How a guest is told no.

use std::io;
use std::time::Duration;

use atoll_policy::Decision;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// How long and how much a guest may still send after it was told.
const FAREWELL: Duration = Duration::from_secs(2);
const FAREWELL_BYTES: u64 = 64 * 1024;

/// A whole answer to a request in plain HTTP: which rule refused it and why.
fn http_answer(decision: &Decision) -> Vec<u8> {
    let body = serde_json::json!({
        "error": {
            "code": atoll_types::Code::EgressDenied.text(),
            "message": decision.reason,
            "rule": decision.rule.as_str(),
        }
    })
    .to_string();
    // A rule's name is somebody's text; in a header only what cannot end it may stand.
    let rule: String = decision
        .rule
        .as_str()
        .chars()
        .map(|c| if c.is_ascii_graphic() || c == ' ' { c } else { '?' })
        .collect();
    format!(
        "HTTP/1.1 403 Forbidden\r\ncontent-type: application/json\r\ncontent-length: {}\r\nx-atoll-denied: {rule}\r\nconnection: close\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

/// Answers a request in plain HTTP and closes. What the guest is still sending is read away for a moment, because to
/// close over unread bytes would take the answer back.
pub(super) async fn answer_http(mut stream: TcpStream, decision: &Decision) {
    let farewell = async {
        stream.write_all(&http_answer(decision)).await?;
        stream.shutdown().await?;
        let mut rest = (&mut stream).take(FAREWELL_BYTES);
        tokio::io::copy(&mut rest, &mut tokio::io::sink()).await?;
        Ok::<_, io::Error>(())
    };
    let _ = timeout(FAREWELL, farewell).await;
}
