//! The resolver of every guest, at whatever address it asks.
//!
//! ```text
//!   question ── one name? ── policy.name ──┬── refused: NXDOMAIN, "blocked"         nothing leaves
//!                                          ├── A, AAAA: resolved, floor ──> a synthetic address for the name
//!                                          ├── TXT, MX, SRV, NS, CAA, SOA, NAPTR, CNAME: as upstream has them
//!                                          └── others, HTTPS and SVCB (ECH!) above all: nothing
//!   PTR of a synthetic address ──> its name; of any other: NXDOMAIN
//! ```
//! What must hold: a name that the policy does not allow is never sent anywhere. Each question has one answer of a
//! bounded size, and a sandbox has a bounded number of them a second and under way.

pub(crate) mod answer;
mod names;
mod wire;

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::timeout;

pub(crate) use names::{Names, Target};
pub(crate) use wire::parse;

use crate::Shared;
use crate::datagram::Datagrams;
use crate::tenants::TenantState;
use answer::{Room, answer, busy};

/// The longest question that is read: one name and a few options.
const LONGEST_QUESTION: usize = 1232;
/// How long a connection may be silent, and how many questions may be asked on it.
const SILENCE: Duration = Duration::from_secs(10);
const QUESTIONS_EACH: usize = 256;

/// Answers datagrams until it is dropped.
pub(crate) async fn serve_datagrams(shared: Arc<Shared>, socket: Datagrams) {
    let socket = Arc::new(socket);
    let mut answers = JoinSet::new();
    let mut buffer = vec![0; LONGEST_QUESTION];
    loop {
        let arrival = tokio::select! {
            arrival = socket.receive(&mut buffer) => match arrival {
                Ok(arrival) => arrival,
                Err(error) => {
                    tracing::debug!(%error, "a question could not be received");
                    tokio::time::sleep(Duration::from_millis(10)).await;
                    continue;
                }
            },
            Some(_) = answers.join_next() => continue,
        };
        let Some(tenant) = shared.tenants.of(arrival.source.ip()) else {
            continue;
        };
        let question = &buffer[..arrival.len];
        let reply = {
            let socket = Arc::clone(&socket);
            move |reply: &[u8]| {
                // The guest may be gone; and whoever asks by UDP asks again.
                let _ = socket.send(reply, arrival.destination.ip(), arrival.source);
            }
        };
        let open = Arc::clone(&tenant.questions_open).try_acquire_owned();
        match open {
            Ok(open) if tenant.may_ask() => {
                let question = question.to_vec();
                let shared = Arc::clone(&shared);
                answers.spawn(async move {
                    let _open = open;
                    let answered = tokio::select! {
                        answered = answer(&shared.dialer.resolver, &tenant, &question, Room::Datagram) => answered,
                        () = tenant.gone() => None,
                    };
                    answered.iter().for_each(|answered| reply(answered));
                });
            }
            _ => busy(&tenant, question)
                .iter()
                .for_each(|answered| reply(answered)),
        }
    }
}

/// Answers one question after the other on a guest's connection.
pub(crate) async fn serve_stream(
    shared: &Shared,
    tenant: &TenantState,
    mut stream: TcpStream,
) -> io::Result<()> {
    for _ in 0..QUESTIONS_EACH {
        let question = match timeout(SILENCE, read_question(&mut stream)).await {
            Ok(Ok(Some(question))) => question,
            Ok(Ok(None)) | Err(_) => return Ok(()),
            Ok(Err(error)) => return Err(error),
        };
        let answered = match tenant.questions_open.try_acquire() {
            Ok(_open) if tenant.may_ask() => {
                answer(&shared.dialer.resolver, tenant, &question, Room::Stream).await
            }
            _ => busy(tenant, &question),
        };
        let Some(answered) = answered else {
            return Ok(());
        };
        let len = u16::try_from(answered.len()).map_err(io::Error::other)?;
        let framed = [&len.to_be_bytes()[..], &answered].concat();
        timeout(SILENCE, stream.write_all(&framed))
            .await
            .map_err(io::Error::from)??;
    }
    Ok(())
}

/// `None` where the guest is finished, or asks something longer than any question is.
async fn read_question(stream: &mut TcpStream) -> io::Result<Option<Vec<u8>>> {
    let len = match stream.read_u16().await {
        Ok(len) => usize::from(len),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(error) => return Err(error),
    };
    if len > LONGEST_QUESTION {
        return Ok(None);
    }
    let mut question = vec![0; len];
    stream.read_exact(&mut question).await?;
    Ok(Some(question))
}

#[cfg(test)]
mod tests;
