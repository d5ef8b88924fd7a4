//! Serving HTTP: accepts connections and hands requests to the APIs.
//!
//! Without TLS that is HTTP/1.1; with it also HTTP/2, which clients choose in the handshake. Where both may come, the first byte
//! tells: a handshake begins with 22, which no request does. A machine out of file descriptors
//! waits instead of spinning, and at the end open requests get a moment to finish.
//!
//! What must hold: every connection has a place ([`crate::Connections`]) for as long as anybody has it, and every wait for
//! its other end is bounded: for the handshake, for heads, for bodies, for the next request, for an answer to a ping, for room
//! for an answer. HTTP/2 has room of its own for each answer, which a client gives as it likes while it reads all else.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use std::{fmt, io};

use atoll_types::SandboxId;
use axum::Router;
use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::http::Extensions;
use hyper::body::{Body as HttpBody, Bytes, Frame, Incoming, SizeHint};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::Instrument as _;

use crate::apis::{Api, Apis};
use crate::body::Awaited;
use crate::unread::{Unread, Watched};
use crate::visit::head_bytes;
use crate::{Front, Guarded, Limits, Line, Peer, Visit, connections};

/// The largest head of a request.
const HEAD_BYTES: u32 = 64 * 1024;
/// The first byte of TLS.
const TLS_HANDSHAKE: u8 = 22;
/// How long a TLS handshake may take.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// How long the other end of a silent connection of HTTP/2 may take to say that it is there.
const PONG: Duration = Duration::from_secs(20);
/// Requests on one connection of HTTP/2 at a time.
const STREAMS: u32 = 200;
/// Requests that were taken back before they began, and those that we had to refuse: more of them at once end the connection.
const RESETS: usize = 64;
/// How long open requests may go on once the server stops.
const GRACE: Duration = Duration::from_secs(5);

/// Who comes by a listener.
#[derive(Clone)]
pub enum Door {
    Anybody(Spoken),
    /// Only sandboxes: this says which one an address is, once.
    Sandboxes(Callers),
}

/// What is spoken at a listener.
#[derive(Clone)]
pub enum Spoken {
    Plain,
    Tls(TlsAcceptor),
    /// As each client begins.
    Either(TlsAcceptor),
}

/// Takes the sandbox that was announced to come from an address.
pub type Callers = Arc<dyn Fn(&SocketAddr) -> Option<SandboxId> + Send + Sync>;

/// Put into the extensions of requests that came over TLS, so that links back are `https`.
#[derive(Debug, Clone, Copy)]
pub struct Secured;

/// What the client used: this server's own TLS, or `public`, which is what stands in front of it.
pub fn scheme<'a>(extensions: &Extensions, public: &'a str) -> &'a str {
    match extensions.get::<Secured>() {
        Some(Secured) => "https",
        None => public,
    }
}

impl fmt::Debug for Spoken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Plain => "Plain",
            Self::Tls(_) => "Tls",
            Self::Either(_) => "Either",
        })
    }
}

impl fmt::Debug for Door {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Anybody(spoken) => f.debug_tuple("Anybody").field(spoken).finish(),
            Self::Sandboxes(_) => f.write_str("Sandboxes"),
        }
    }
}

impl Door {
    fn peer(&self, address: SocketAddr) -> Option<Peer> {
        match self {
            Self::Anybody(_) => Some(Peer::Address(address.ip())),
            Self::Sandboxes(callers) => callers(&address).map(Peer::Sandbox),
        }
    }
}

/// Serves until `stop` is cancelled and what was going on has ended.
pub async fn serve(listener: TcpListener, door: Door, apis: Apis, stop: CancellationToken) {
    let front = apis.front().clone();
    let connections = TaskTracker::new();
    loop {
        let (stream, address) = tokio::select! {
            accepted = accept(&listener) => accepted,
            () = stop.cancelled() => break,
        };
        let Some(line) = door.peer(address).and_then(|peer| front.connections.admit(peer)) else {
            tracing::debug!(%address, "a connection was refused");
            continue;
        };
        let api = Connected {
            apis: apis.clone(),
            front: front.clone(),
            address,
            line,
            is_secured: false,
            unread: None,
        };
        let stop = stop.clone();
        match &door {
            Door::Anybody(Spoken::Tls(tls)) => connections.spawn(secured(tls.clone(), stream, api, stop)),
            Door::Anybody(Spoken::Either(tls)) => {
                connections.spawn(either(Some(tls.clone()), stream, api, stop))
            }
            Door::Anybody(Spoken::Plain) => connections.spawn(either(None, stream, api, stop)),
            Door::Sandboxes(_) => connections.spawn(plain(stream, api, stop)),
        };
    }
    drop(listener);
    connections.close();
    if tokio::time::timeout(GRACE, connections.wait()).await.is_err() {
        tracing::info!("some requests were still open and are cut off");
    }
}

/// The same for a server that stands in for somebody else's, in demos and benchmarks: nobody shows a key, and all are welcome.
pub async fn serve_all(listener: TcpListener, router: Router, stop: CancellationToken) {
    let most = usize::MAX;
    let mut limits = Limits::for_machine(0, 0);
    limits.connections = connections::Limits {
        server: most,
        strangers: most,
        address: most,
        project: most,
        sandbox: most,
    };
    let api = Api {
        name: "stand-in",
        claims: Arc::new(|_| true),
        router,
        write: |response, _, _| response,
    };
    let apis = Apis::new(Front::new(limits), Vec::new(), [api]);
    serve(listener, Door::Anybody(Spoken::Plain), apis, stop).await;
}

/// The next connection, whatever becomes of others.
pub async fn accept(listener: &TcpListener) -> (TcpStream, SocketAddr) {
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
pub async fn handshake(
    tls: TlsAcceptor,
    stream: TcpStream,
    line: Line,
) -> Option<Guarded<TlsStream<TcpStream>>> {
    let accepted = tokio::select! {
        accepted = tokio::time::timeout(HANDSHAKE, tls.accept(stream)) => accepted,
        () = line.cut().cancelled() => return None,
    };
    match accepted {
        Ok(Ok(stream)) => {
            let is_http1 = stream.get_ref().1.alpn_protocol() != Some(b"h2");
            return Some(Guarded::new(stream, line, is_http1));
        }
        Ok(Err(error)) => tracing::debug!(%error, "a TLS handshake failed"),
        Err(_) => tracing::debug!("a TLS handshake took too long"),
    }
    None
}

/// The APIs as one connection finds them.
#[derive(Clone)]
struct Connected {
    apis: Apis,
    front: Front,
    address: SocketAddr,
    line: Line,
    is_secured: bool,
    /// Over HTTP/2.
    unread: Option<Unread>,
}

impl Connected {
    async fn answer(self, request: Request<Incoming>) -> Result<Response<Answer>, Infallible> {
        let visit = Visit::new(self.front.clone(), Some(self.line), head_bytes(&request));
        let silence = self.front.patience.stream;
        let mut request = request.map(|body| Body::new(Awaited::new(body, silence)));
        let extensions = request.extensions_mut();
        extensions.insert(ConnectInfo(self.address));
        extensions.insert(visit.clone());
        if self.is_secured {
            extensions.insert(Secured);
        }
        // So that the watchdog can say which request stalls. The query may hold secrets.
        let doing = tracing::debug_span!("request", method = %request.method(), path = request.uri().path());
        let response = self.apis.answer(request).instrument(doing).await;
        Ok(response.map(|body| Answer {
            body: match &self.unread {
                Some(unread) => Answered::Watched(unread.watch(body)),
                None => Answered::Plain(body),
            },
            _visit: visit,
        }))
    }
}

/// The body of an answer; the request is over when it is.
struct Answer {
    body: Answered,
    _visit: Visit,
}

enum Answered {
    Plain(Body),
    Watched(Watched<Body>),
}

impl HttpBody for Answer {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        match &mut self.body {
            Answered::Plain(body) => Pin::new(body).poll_frame(context),
            Answered::Watched(body) => Pin::new(body).poll_frame(context),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.body {
            Answered::Plain(body) => body.is_end_stream(),
            Answered::Watched(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.body {
            Answered::Plain(body) => body.size_hint(),
            Answered::Watched(body) => body.size_hint(),
        }
    }
}

/// By TLS or not: whoever says nothing is waited for as long as for a request.
async fn either(tls: Option<TlsAcceptor>, stream: TcpStream, api: Connected, stop: CancellationToken) {
    let mut first = [0];
    let peeked = tokio::select! {
        peeked = tokio::time::timeout(api.front.patience.idle, stream.peek(&mut first)) => peeked,
        () = api.line.cut().cancelled() => return,
        () = stop.cancelled() => return,
    };
    match peeked {
        Ok(Ok(1)) if first[0] == TLS_HANDSHAKE => match tls {
            Some(tls) => secured(tls, stream, api, stop).await,
            None => {
                say_that_there_is_no_tls(&api);
                // An answer in plain text is what TLS clients tell best: "wrong version number".
                plain(stream, api, stop).await;
            }
        },
        Ok(Ok(1)) => plain(stream, api, stop).await,
        Ok(Ok(_)) => {}
        Ok(Err(error)) => tracing::debug!(%error, "connection ended"),
        Err(_) => tracing::debug!("a connection on which nothing came was closed"),
    }
}

/// Once: whoever configured the client looks here when it says no more than that TLS failed.
fn say_that_there_is_no_tls(api: &Connected) {
    static SAID: std::sync::Once = std::sync::Once::new();
    SAID.call_once(|| {
        tracing::warn!(
            address = %api.address,
            "a client speaks TLS, and this server does not: E2B's clients do that where E2B_SANDBOX_URL is not set; start the \
             server with --e2b, or set what `atoll e2b env` prints"
        );
    });
}

async fn plain(stream: TcpStream, api: Connected, stop: CancellationToken) {
    let stream = Guarded::new(stream, api.line.clone(), true);
    http1(stream, api, stop).await;
}

async fn http1<S>(stream: Guarded<S>, api: Connected, stop: CancellationToken)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let line = api.line.clone();
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .max_header_size(HEAD_BYTES as usize)
        // It runs from the end of one request to the whole head of the next; a head that has begun has less time.
        .header_read_timeout(api.front.patience.idle);
    let service = service_fn(move |request| api.clone().answer(request));
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
    // It may go on as something else.
    line.no_more_heads();
    // A client that hangs up is its own business.
    if let Err(error) = ended {
        tracing::debug!(%error, "connection ended");
    }
}

async fn secured(tls: TlsAcceptor, stream: TcpStream, mut api: Connected, stop: CancellationToken) {
    api.is_secured = true;
    let Some(stream) = handshake(tls, stream, api.line.clone()).await else {
        return;
    };
    if stream.is_http1() {
        http1(stream, api, stop).await;
    } else {
        http2(stream, api, stop).await;
    }
}

async fn http2<S>(stream: Guarded<S>, mut api: Connected, stop: CancellationToken)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let patience = api.front.patience;
    let unread = api.unread.insert(Unread::default()).clone();
    let mut builder = auto::Builder::new(TokioExecutor::new()).http2_only();
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_header_list_size(HEAD_BYTES)
        .max_concurrent_streams(STREAMS)
        .max_pending_accept_reset_streams(RESETS)
        .max_local_error_reset_streams(RESETS)
        .keep_alive_interval(Some(patience.idle))
        .keep_alive_timeout(PONG);
    let line = api.line.clone();
    let service = service_fn(move |request| api.clone().answer(request));
    let connection = builder.serve_connection(TokioIo::new(stream), service);
    let mut connection = std::pin::pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = stop.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
        () = line.idle_for(patience.idle) => {
            connection.as_mut().graceful_shutdown();
            // All that is left of answers is what h2 has taken.
            match tokio::time::timeout(patience.stream, connection).await {
                Ok(ended) => ended,
                Err(_) => return tracing::debug!("what is left of answers was not read in time"),
            }
        }
        () = unread.for_long(patience.stream) => {
            return tracing::debug!("an answer was not read in time");
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
    use parking_lot::Mutex;
    use std::collections::HashMap;

    use axum::routing::get;
    use tokio::time::Instant;

    use super::*;

    const LARGE: usize = 1 << 20;

    fn anybody() -> Door {
        Door::Anybody(Spoken::Plain)
    }

    fn apis() -> Apis {
        let api = Api {
            name: "test",
            claims: Arc::new(|_| true),
            router: Router::new()
                .route("/", get(|| async { "here" }))
                .route("/large", get(|| async { vec![b'x'; LARGE] })),
            write: |response, _, _| response,
        };
        let front = Front::new(Limits::for_machine(1 << 30, 1000));
        Apis::new(front, Vec::new(), [api])
    }

    /// Asks for `/` on one connection, and reads until its end.
    async fn ask(mut stream: TcpStream) -> String {
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
        let mut answer = String::new();
        let head = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
        // Whoever is not let in may notice at either.
        if stream.write_all(head).await.is_ok() {
            let _cut = stream.read_to_string(&mut answer).await;
        }
        answer
    }

    #[tokio::test]
    async fn serves_and_stops() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let stop = CancellationToken::new();
        let server = tokio::spawn(serve(listener, anybody(), apis(), stop.clone()));
        let answer = ask(TcpStream::connect(address).await.unwrap()).await;
        assert!(answer.ends_with("here"), "{answer}");
        stop.cancel();
        server.await.unwrap();
        assert!(TcpStream::connect(address).await.is_err());
    }

    /// TLS for which there is no certificate: it is spoken, and fails.
    fn no_certificate() -> TlsAcceptor {
        use tokio_rustls::rustls::server::ResolvesServerCertUsingSni;
        use tokio_rustls::rustls::{ServerConfig, crypto};
        let provider = Arc::new(crypto::aws_lc_rs::default_provider());
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_cert_resolver(Arc::new(ResolvesServerCertUsingSni::new()));
        TlsAcceptor::from(Arc::new(config))
    }

    #[tokio::test(start_paused = true)]
    async fn at_one_door_each_client_speaks_as_it_begins() {
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let stop = CancellationToken::new();
        let door = Door::Anybody(Spoken::Either(no_certificate()));
        let server = tokio::spawn(serve(listener, door, apis(), stop.clone()));
        let answer = ask(TcpStream::connect(address).await.unwrap()).await;
        assert!(answer.ends_with("here"), "{answer}");

        let mut client = TcpStream::connect(address).await.unwrap();
        // The head of a handshake that says nothing, and what TLS says to that: an alert.
        client.write_all(&[22, 3, 1, 0, 4, 1, 0, 0, 0]).await.unwrap();
        let mut answer = Vec::new();
        let _cut = client.read_to_end(&mut answer).await;
        assert_eq!(answer.first(), Some(&21), "{answer:?}");

        // Whoever says nothing is not waited for without end, nor does it keep the server.
        let mut silent = TcpStream::connect(address).await.unwrap();
        assert_eq!(silent.read(&mut [0]).await.unwrap(), 0);
        let _silent = TcpStream::connect(address).await.unwrap();
        stop.cancel();
        server.await.unwrap();
    }

    #[tokio::test]
    async fn only_announced_sandboxes_come_by_their_door() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let announced: Arc<Mutex<HashMap<SocketAddr, SandboxId>>> = Arc::default();
        let callers: Callers = {
            let announced = Arc::clone(&announced);
            Arc::new(move |address| announced.lock().remove(address))
        };
        let stop = CancellationToken::new();
        tokio::spawn(serve(listener, Door::Sandboxes(callers), apis(), stop.clone()));
        assert_eq!(ask(TcpStream::connect(address).await.unwrap()).await, "");

        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let own = socket.local_addr().unwrap();
        let sandbox = atoll_types::SandboxId::from_entropy([1; 20]);
        announced.lock().insert(own, sandbox);
        let answer = ask(socket.connect(address).await.unwrap()).await;
        assert!(answer.ends_with("here"), "{answer}");
        assert!(announced.lock().is_empty());
        stop.cancel();
    }

    /// A client of HTTP/2 that gives room for answers as it likes.
    struct Client(tokio::io::DuplexStream);

    impl Client {
        /// With a room for each answer.
        async fn connect(room: u32) -> (Self, tokio::task::JoinHandle<()>) {
            let (client, server) = tokio::io::duplex(1 << 22);
            let apis = apis();
            let front = apis.front().clone();
            let line = front
                .connections
                .admit(Peer::Address([127, 0, 0, 1].into()))
                .unwrap();
            let api = Connected {
                apis,
                front,
                address: "127.0.0.1:1".parse().unwrap(),
                line: line.clone(),
                is_secured: true,
                unread: None,
            };
            let server = Guarded::new(server, line, false);
            let serving = tokio::spawn(http2(server, api, CancellationToken::new()));
            let mut client = Self(client);
            let mut hello = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
            hello.extend([0, 0, 6, 4, 0, 0, 0, 0, 0, 0, 4]);
            hello.extend(room.to_be_bytes());
            client.send(&hello).await;
            (client, serving)
        }

        async fn send(&mut self, bytes: &[u8]) {
            use tokio::io::AsyncWriteExt as _;
            let _cut = self.0.write_all(bytes).await;
        }

        async fn ask(&mut self, stream: u32, path: &str) {
            let mut head = vec![0x82, 0x87, 0x04, u8::try_from(path.len()).unwrap()];
            head.extend(path.as_bytes());
            head.extend([0x01, 1, b'x']);
            let mut frame = vec![0, 0, u8::try_from(head.len()).unwrap(), 1, 5];
            frame.extend(stream.to_be_bytes());
            frame.extend(head);
            self.send(&frame).await;
        }

        async fn give_room(&mut self, stream: u32, bytes: u32) {
            let mut frame = vec![0, 0, 4, 8, 0];
            frame.extend(stream.to_be_bytes());
            frame.extend(bytes.to_be_bytes());
            self.send(&frame).await;
        }

        /// Reads, and answers pings, until the answer is whole or the connection ends; how much of an answer came.
        async fn read(&mut self, most: usize) -> Option<usize> {
            use tokio::io::AsyncReadExt as _;
            let mut came = 0;
            while came < most {
                let mut head = [0; 9];
                self.0.read_exact(&mut head).await.ok()?;
                let length = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
                let mut payload = vec![0; length];
                self.0.read_exact(&mut payload).await.ok()?;
                match (head[3], head[4]) {
                    (0, _) => came += length,
                    (6, 0) => {
                        let pong = [&[0, 0, 8, 6, 1, 0, 0, 0, 0], &payload[..]].concat();
                        self.send(&pong).await;
                    }
                    _ => {}
                }
            }
            Some(came)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_for_which_there_is_no_room_is_given_up() {
        // Never any; a byte; and so much that all but the end of a large answer is taken by h2.
        for (room, path, least) in [
            (0, "/", 600),
            (1, "/large", 600),
            (LARGE as u32 - 1, "/large", 675),
        ] {
            let (mut client, serving) = Client::connect(room).await;
            let began = Instant::now();
            client.ask(1, path).await;
            client.give_room(0, LARGE as u32).await;
            assert_eq!(client.read(LARGE).await, None);
            serving.await.unwrap();
            let waited = began.elapsed().as_secs();
            assert!((least..=1300).contains(&waited), "{room}: {waited}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn who_reads_slowly_gets_the_whole_answer() {
        let (mut client, serving) = Client::connect(65_535).await;
        client.ask(1, "/large").await;
        let mut left = LARGE;
        let mut room = 65_535;
        loop {
            left -= client.read(room.min(left)).await.unwrap();
            if left == 0 {
                break;
            }
            // It says that it is there all the while.
            let nothing = tokio::time::timeout(Duration::from_secs(300), client.read(1)).await;
            assert!(nothing.is_err());
            room = 100_000;
            client.give_room(0, 100_000).await;
            client.give_room(1, 100_000).await;
        }
        drop(client);
        serving.await.unwrap();
    }
}
