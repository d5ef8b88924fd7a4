//! Serving HTTP: accepts connections and hands them to the API.
//!
//! Without TLS that is HTTP/1.1; with it also HTTP/2, which clients choose in the handshake. A connection that says nothing for a while is closed, a machine out of file descriptors waits instead of spinning, and
//! at the end open requests get a moment to finish.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::extract::ConnectInfo;
use axum::response::Response;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::Instrument as _;

/// How long a client may take to send the head of a request; also how long an idle connection is kept.
const HEAD_TIMEOUT: Duration = Duration::from_secs(75);
/// How long a TLS handshake may take.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// How long open requests may go on once the server stops.
const GRACE: Duration = Duration::from_secs(5);

/// Serves until `stop` is cancelled and what was going on has ended.
pub(crate) async fn serve(
    listener: TcpListener,
    tls: Option<TlsAcceptor>,
    router: Router,
    stop: CancellationToken,
) {
    let connections = TaskTracker::new();
    loop {
        let (stream, peer) = tokio::select! {
            accepted = accept(&listener) => accepted,
            () = stop.cancelled() => break,
        };
        let api = TowerToHyperService::new(router.clone());
        let is_secured = tls.is_some();
        let service = service_fn(move |mut request: hyper::Request<Incoming>| {
            request.extensions_mut().insert(ConnectInfo(peer));
            if is_secured {
                request.extensions_mut().insert(atoll_api_e2b::Secured);
            }
            // So that the watchdog can say which request stalls. The query may hold secrets.
            let doing =
                tracing::debug_span!("request", method = %request.method(), path = request.uri().path());
            api.call(request).instrument(doing)
        });
        let stop = stop.clone();
        match tls.clone() {
            None => connections.spawn(plain(stream, service, stop)),
            Some(tls) => connections.spawn(secured(tls, stream, service, stop)),
        };
    }
    drop(listener);
    connections.close();
    if tokio::time::timeout(GRACE, connections.wait()).await.is_err() {
        tracing::info!("some requests were still open and are cut off");
    }
}

/// The next connection, whatever becomes of others.
pub(crate) async fn accept(listener: &TcpListener) -> (TcpStream, SocketAddr) {
    loop {
        match listener.accept().await {
            Ok((stream, peer)) => {
                prepare(&stream);
                return (stream, peer);
            }
            Err(error) if is_of_one_connection(&error) => {}
            Err(error) => {
                // Out of descriptors or memory: others must end first.
                tracing::warn!(%error, "cannot accept connections; trying again");
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        }
    }
}

/// What is said over TLS, unless the client does not get that far.
pub(crate) async fn handshake(tls: TlsAcceptor, stream: TcpStream) -> Option<TlsStream<TcpStream>> {
    match tokio::time::timeout(HANDSHAKE, tls.accept(stream)).await {
        Ok(Ok(stream)) => return Some(stream),
        Ok(Err(error)) => tracing::debug!(%error, "a TLS handshake failed"),
        Err(_) => tracing::debug!("a TLS handshake took too long"),
    }
    None
}

async fn plain<S>(stream: TcpStream, service: S, stop: CancellationToken)
where
    S: Service<hyper::Request<Incoming>, Response = Response, Error = Infallible>,
{
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT);
    let connection = builder
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades();
    let mut connection = std::pin::pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = stop.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    // A client that hangs up is its own business.
    if let Err(error) = ended {
        tracing::debug!(%error, "connection ended");
    }
}

async fn secured<S>(tls: TlsAcceptor, stream: TcpStream, service: S, stop: CancellationToken)
where
    S: Service<hyper::Request<Incoming>, Response = Response, Error = Infallible> + Send + 'static,
    S::Future: Send + 'static,
{
    let Some(stream) = handshake(tls, stream).await else {
        return;
    };
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT);
    builder
        .http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(Some(HEAD_TIMEOUT));
    let connection = builder.serve_connection_with_upgrades(TokioIo::new(stream), service);
    let mut connection = std::pin::pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = stop.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "connection ended");
    }
}

/// Answers are often small and always urgent.
fn prepare(stream: &TcpStream) {
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "TCP_NODELAY was refused");
    }
}

fn is_of_one_connection(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset | io::ErrorKind::ConnectionRefused
    )
}

#[cfg(test)]
mod tests {
    use axum::routing::get;

    use super::*;

    #[tokio::test]
    async fn serves_and_stops() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let stop = CancellationToken::new();
        let router = Router::new().route("/", get(|| async { "here" }));
        let server = tokio::spawn(serve(listener, None, router, stop.clone()));
        let text = reqwest::get(format!("http://{address}/"))
            .await
            .unwrap()
            .text()
            .await
            .unwrap();
        assert_eq!(text, "here");
        stop.cancel();
        server.await.unwrap();
        assert!(TcpStream::connect(address).await.is_err());
    }
}
