//! Reading what goes out: TLS is ended here with a certificate of the sandbox's own authority, each request is asked for,
//! secrets are put in, and the rest streams through.
//!
//! ```text
//!   guest ── TLS (leaf for one name) ──┐                                   ┌── TLS (verified) ── server
//!          ── or plain HTTP ───────────┴─ check ─ policy ─ broker ─ pass ──┴── or plain HTTP ──
//!                                           │        │        │       │
//!                                          400      403      403     502      as JSON, with what to do
//! ```
//! What must hold:
//! - Both sides speak the same: what the server chose is what the guest is offered. Messages are parsed and written anew
//!   by the HTTP library on either side, so what the policy saw is what the server gets, wherever it ends.
//! - Every request names the host that is dialled; it goes there and nowhere else.
//! - Bodies are never held: memory for a connection is bounded by the windows and buffers below.
//! - Everything that a connection started ends with it, also when the future is dropped.
//! - A request that is no longer allowed is cut in both directions, whatever it has become: see [`open`].
//! - Neither paths nor queries, headers or bodies get into logs and events.

mod answer;
mod authority;
mod body;
mod check;
mod connection;
mod leaves;
mod open;
mod replay;
mod reply;
mod route;
mod tasks;
mod tls;
mod upstream;
mod websocket;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use atoll_broker::{Broker, MasterKey, TrustId};
use atoll_policy::Decision;
use bytes::Bytes;
use rustls::server::Acceptor;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::timeout;
use tokio_rustls::LazyConfigAcceptor;

pub(crate) use route::{Route, Undialled};

use connection::Connection;
use leaves::Leaves;
use replay::Replay;
use tasks::Tasks;
use tls::{Offer, Speech, Tls};
use upstream::Upstream;

/// For a handshake, on either side.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// The longest head of a message, and what is read at once of a body.
const HEAD_BYTES: usize = 64 * 1024;
/// With which a client says, without TLS, that it speaks HTTP/2.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n";

/// What is needed to read connections.
#[derive(Debug)]
pub struct InterceptConfig {
    pub key: MasterKey,
    /// A file of certificates in PEM form that servers may be verified with, beside those of this host.
    pub extra_roots: Option<PathBuf>,
}

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InterceptError {
    #[error("cannot use the certificate authorities in {path}: {why}")]
    Roots { path: String, why: String },
    #[error("cannot set up TLS: {0}")]
    Tls(#[from] rustls::Error),
    #[error("cannot issue a certificate: {0}")]
    Certificate(#[from] rcgen::Error),
    #[error("the encryption library refused to work")]
    Library,
}

/// Why a connection was broken off: a request on it is no longer allowed.
#[derive(Debug, thiserror::Error)]
#[error("{}", .0.reason)]
pub(crate) struct Cut(pub(crate) Decision);

/// Reads connections of all sandboxes. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Interceptor {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    broker: Arc<Broker>,
    leaves: Leaves,
    tls: Tls,
}

impl Interceptor {
    pub(crate) fn new(config: &InterceptConfig, broker: Arc<Broker>) -> Result<Self, InterceptError> {
        Ok(Self {
            shared: Arc::new(Shared {
                broker,
                leaves: Leaves::new(config.key.copy()),
                tls: Tls::new(config.extra_roots.as_deref())?,
            }),
        })
    }

    /// The certificate that sandboxes of this lineage must trust.
    pub(crate) fn authority_pem(&self, trust: &TrustId) -> Result<String, InterceptError> {
        self.shared.leaves.pem(trust)
    }

    /// Serves one connection to its end. `prefix` was read from `stream` before.
    pub(crate) async fn serve<S, R>(&self, stream: S, prefix: Bytes, route: R) -> io::Result<()>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
        R: Route,
    {
        let plain = match prefix.starts_with(PREFACE) {
            true => Speech::Http2,
            false => Speech::Http1,
        };
        let stream = Replay::new(prefix, stream);
        let route = Arc::new(route);
        let tasks = Tasks::new();
        let _end = tasks.end_on_drop();
        if route.tls() {
            return self.serve_tls(stream, route, tasks).await;
        }
        let upstream = Upstream::plain(route, tasks, plain);
        Connection::new(self.shared.broker.clone(), upstream)
            .serve(stream)
            .await
    }

    async fn serve_tls<S, R>(&self, stream: Replay<S>, route: Arc<R>, tasks: Tasks) -> io::Result<()>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
        R: Route,
    {
        let start = timeout(HANDSHAKE, LazyConfigAcceptor::new(Acceptor::default(), stream))
            .await
            .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
            .map_err(|error| unshaken(&error))?;
        let hello = start.client_hello();
        if hello
            .server_name()
            .is_some_and(|sni| !sni.eq_ignore_ascii_case(route.name().as_str()))
        {
            return Err(refused(
                "the client asks for another name than it was let through for",
            ));
        }
        let offer =
            Offer::of(&hello).ok_or_else(|| refused("the client speaks neither HTTP/1.1 nor HTTP/2"))?;
        let trust = route.tenant().trust.clone();
        let certified = self
            .shared
            .leaves
            .get(&trust, route.name())
            .map_err(io::Error::other)?;
        // The server first: the guest is offered what the server speaks.
        let upstream = Upstream::tls(route, tasks, &self.shared.tls, &offer).await;
        let config = self.shared.tls.server(certified, &offer, upstream.speech());
        let stream = timeout(HANDSHAKE, start.into_stream(config))
            .await
            .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
            .map_err(|error| unshaken(&error))?;
        Connection::new(self.shared.broker.clone(), upstream)
            .serve(stream)
            .await
    }
}

/// Mostly a program that looks elsewhere for whom to trust than where the authority was put.
fn unshaken(error: &io::Error) -> io::Error {
    let why = format!(
        "the guest did not finish the TLS handshake ({error}); a program with trust settings of its own must be told to \
         trust the sandbox's authority"
    );
    io::Error::new(error.kind(), why)
}

fn refused(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionRefused, why)
}

#[cfg(test)]
mod tests;
