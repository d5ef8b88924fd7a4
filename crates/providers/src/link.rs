//! Connections to providers: HTTP/1.1, one call at a time on each, kept for the next.
//!
//! ```text
//!   take: one that is kept, or a new one ──> ask ──> head ──> chunk, chunk, … end ──> kept
//! ```
//! What must hold:
//! - Whoever waits for an answer drives its connection, in the same task: a chunk that arrives wakes one task, once.
//! - One that is kept is driven by nobody. Whether the other end has closed it is found out when it is taken.
//! - A request is sent a second time only if nothing of it was sent the first time.
//! - Where a call may not go everywhere, what is asked about is the very address that is connected to, right before; and one
//!   that may go anywhere leaves no connection behind for one that may not.

use std::collections::HashMap;
use std::fmt;
use std::future::poll_fn;
use std::net::{IpAddr, SocketAddr};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::task::AtomicWaker;
use http_body_util::Full;
use hyper::body::{Body as _, Incoming};
use hyper::client::conn::http1::{self, Connection, SendRequest};
use hyper::{Request, Response, Uri};
use hyper_rustls::{HttpsConnector, MaybeHttpsStream};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::connect::dns::Name;
use hyper_util::rt::TokioIo;
use rustls_platform_verifier::BuilderVerifierExt as _;
use tokio::net::TcpStream;
use tower_service::Service as _;

use crate::Reach;

/// How long a connection is kept without a call.
const KEPT: Duration = Duration::from_secs(90);
/// How many are kept to the same place.
const MOST_KEPT: usize = 1024;

type Io = MaybeHttpsStream<TokioIo<TcpStream>>;

/// Whatever goes wrong on the way, for a text.
pub(crate) type Failure = Box<dyn std::error::Error + Send + Sync>;

/// How far a request came.
pub(crate) enum Failed {
    /// Nobody has heard of it.
    Unsent(Failure),
    /// It may have been read, and acted upon.
    Sent(Failure),
}

/// Connects, and keeps what is not in use.
pub(crate) struct Links {
    tls: Arc<rustls::ClientConfig>,
    kept: Arc<Kept>,
}

/// Resolves names to those of their addresses that may be reached.
#[derive(Clone)]
struct Resolve(Option<Arc<dyn Reach>>);

impl tower_service::Service<Name> for Resolve {
    type Response = std::vec::IntoIter<SocketAddr>;
    type Error = Failure;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Failure>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Failure>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, name: Name) -> Self::Future {
        let reach = self.0.clone();
        Box::pin(async move {
            // The port is filled in by who connects.
            let found = tokio::net::lookup_host((name.as_str(), 0)).await?;
            let (mut allowed, mut refused) = (Vec::new(), None);
            for address in found {
                match reach.as_ref().map_or(Ok(()), |reach| reach.address(address.ip())) {
                    Ok(()) => allowed.push(address),
                    Err(why) => refused = Some(why),
                }
            }
            match refused {
                Some(why) if allowed.is_empty() => Err(why.into()),
                _ => Ok(allowed.into_iter()),
            }
        })
    }
}

#[derive(Default)]
struct Kept(Mutex<HashMap<Place, Vec<(Instant, Link)>>>);

/// Where a connection leads, and on whose behalf it was made.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
struct Place {
    scheme: String,
    /// Host and port.
    authority: String,
    /// Nobody asked whether it may.
    anywhere: bool,
}

impl fmt::Debug for Links {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Links").finish_non_exhaustive()
    }
}

impl Links {
    pub(crate) fn new() -> Result<Self, Failure> {
        let tls = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let tls = rustls::ClientConfig::builder_with_provider(tls)
            .with_safe_default_protocol_versions()?
            .with_platform_verifier()?
            .with_no_client_auth();
        Ok(Self {
            tls: Arc::new(tls),
            kept: Arc::default(),
        })
    }

    /// Sends a request and waits for the head of its answer. Connecting takes at most `connect`.
    pub(crate) async fn send(
        &self,
        url: &Uri,
        mut request: Request<Full<Bytes>>,
        connect: Duration,
        reach: Option<&Arc<dyn Reach>>,
    ) -> Result<(Response<()>, Answer), Failed> {
        let place = Place {
            scheme: url.scheme_str().unwrap_or_default().to_owned(),
            authority: url.authority().map_or("", |at| at.as_str()).to_owned(),
            anywhere: reach.is_none(),
        };
        loop {
            let (mut link, is_new) = match self.kept.take(&place) {
                Some(link) => (link, false),
                None => {
                    let connected = self.connect(url, connect, reach).await;
                    (connected.map_err(Failed::Unsent)?, true)
                }
            };
            match link.ask(request).await {
                Ok(response) => {
                    let (head, body) = response.into_parts();
                    let answer = Answer {
                        body,
                        link: Some(link),
                        place,
                        kept: Arc::downgrade(&self.kept),
                    };
                    return Ok((Response::from_parts(head, ()), answer));
                }
                Err(mut error) => match error.take_message() {
                    // Closed before anything was sent: as if it had not been kept.
                    Some(unsent) if !is_new => request = unsent,
                    Some(_) => return Err(Failed::Unsent(error.into_error().into())),
                    None => return Err(Failed::Sent(error.into_error().into())),
                },
            }
        }
    }

    async fn connect(
        &self,
        url: &Uri,
        within: Duration,
        reach: Option<&Arc<dyn Reach>>,
    ) -> Result<Link, Failure> {
        if let Some(reach) = reach {
            let host = url.host().unwrap_or_default();
            // One that is written as an address is connected to without being resolved.
            match host.trim_matches(['[', ']']).parse::<IpAddr>() {
                Ok(address) => reach.address(address)?,
                Err(_) => reach.name(host)?,
            }
        }
        let mut tcp = HttpConnector::new_with_resolver(Resolve(reach.cloned()));
        tcp.enforce_http(false);
        tcp.set_nodelay(true);
        tcp.set_keepalive(Some(KEPT));
        let mut connector = HttpsConnector::from((tcp, Arc::clone(&self.tls)));
        let connecting = async {
            poll_fn(|cx| connector.poll_ready(cx)).await?;
            let io = connector.call(url.clone()).await?;
            Ok::<_, Failure>(http1::handshake(io).await?)
        };
        let connected = tokio::time::timeout(within, connecting).await;
        let (sender, driver) = connected.map_err(|_| "no connection in time")??;
        let gate = Arc::new(Gate::default());
        Ok(Link {
            sender,
            driver,
            ended: false,
            waker: Waker::from(Arc::clone(&gate)),
            gate,
        })
    }
}

impl Kept {
    /// One that is still open.
    fn take(&self, place: &Place) -> Option<Link> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let links = all.get_mut(place)?;
        while let Some((_, mut link)) = links.pop() {
            if link.is_usable() {
                return Some(link);
            }
        }
        None
    }

    fn put(self: &Arc<Self>, place: Place, link: Link) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let was_empty = all.is_empty();
        let links = all.entry(place).or_default();
        if links.len() < MOST_KEPT {
            links.push((Instant::now(), link));
        }
        if was_empty {
            tokio::spawn(close_old(Arc::downgrade(self)));
        }
    }

    /// Closes those that nobody has used for long; whether any are left.
    fn close_old(&self) -> bool {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|_, links| {
            links.retain(|(since, _)| since.elapsed() < KEPT);
            !links.is_empty()
        });
        !all.is_empty()
    }
}

async fn close_old(kept: Weak<Kept>) {
    loop {
        tokio::time::sleep(KEPT / 3).await;
        if !kept.upgrade().is_some_and(|kept| kept.close_old()) {
            return;
        }
    }
}

/// One connection.
struct Link {
    sender: SendRequest<Full<Bytes>>,
    driver: Connection<Io, Full<Bytes>>,
    /// The driver has come to its end and is not to be asked again.
    ended: bool,
    gate: Arc<Gate>,
    /// Knocks at the gate.
    waker: Waker,
}

impl Link {
    async fn ask(
        &mut self,
        request: Request<Full<Bytes>>,
    ) -> Result<Response<Incoming>, hyper::client::conn::TrySendError<Request<Full<Bytes>>>> {
        let mut answer = pin!(self.sender.try_send_request(request));
        poll_fn(|cx| {
            if !self.ended {
                self.ended = Pin::new(&mut self.driver).poll(cx).is_ready();
            }
            answer.as_mut().poll(cx)
        })
        .await
    }

    fn is_usable(&mut self) -> bool {
        if !self.ended {
            let nobody = &mut Context::from_waker(Waker::noop());
            self.ended = Pin::new(&mut self.driver).poll(nobody).is_ready();
        }
        !self.ended && self.sender.is_ready()
    }

    /// The next piece of an answer. Whoever gets one comes again for the next.
    fn poll_piece(
        &mut self,
        body: &mut Incoming,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<hyper::body::Frame<Bytes>, hyper::Error>>> {
        self.gate.close(cx.waker());
        loop {
            if !self.ended {
                let driver = Pin::new(&mut self.driver);
                self.ended = driver.poll(&mut Context::from_waker(&self.waker)).is_ready();
            }
            // Only the driver brings something, and it was asked just now.
            let nobody = &mut Context::from_waker(Waker::noop());
            let piece = Pin::new(&mut *body).poll_frame(nobody);
            if self.gate.open() || piece.is_ready() {
                return piece;
            }
        }
    }
}

/// Wakes the task that waits for an answer, but not while that task is itself busy with it: driver and body wake each other
/// with every piece, and each time the whole task would be run once more for nothing.
#[derive(Default)]
struct Gate {
    task: AtomicWaker,
    closed: AtomicBool,
    knocked: AtomicBool,
}

impl Gate {
    fn close(&self, waker: &Waker) {
        self.task.register(waker);
        self.closed.store(true, Ordering::SeqCst);
    }

    /// Opens it; whether nobody has knocked since it was closed. Otherwise it is closed again, and everything is to be looked
    /// at once more.
    fn open(&self) -> bool {
        self.closed.store(false, Ordering::SeqCst);
        let knocked = self.knocked.swap(false, Ordering::SeqCst);
        if knocked {
            self.closed.store(true, Ordering::SeqCst);
        }
        !knocked
    }
}

impl Wake for Gate {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.knocked.store(true, Ordering::SeqCst);
        if !self.closed.load(Ordering::SeqCst) {
            self.task.wake();
        }
    }
}

/// The rest of an answer. Dropping it before its end closes the connection.
pub(crate) struct Answer {
    body: Incoming,
    /// `None` once it is kept for others.
    link: Option<Link>,
    place: Place,
    kept: Weak<Kept>,
}

impl Answer {
    /// The next chunk; `None` at the end.
    pub(crate) fn poll_chunk(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, hyper::Error>>> {
        let Some(link) = &mut self.link else {
            return Poll::Ready(None);
        };
        loop {
            match std::task::ready!(link.poll_piece(&mut self.body, cx)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(chunk) => return Poll::Ready(Some(Ok(chunk))),
                    // Trailers: nobody needs them.
                    Err(_) => continue,
                },
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                None => {
                    let (link, kept) = (self.link.take(), self.kept.upgrade());
                    if let Some((mut link, kept)) = link.zip(kept)
                        && link.is_usable()
                    {
                        kept.put(std::mem::take(&mut self.place), link);
                    }
                    return Poll::Ready(None);
                }
            }
        }
    }

    pub(crate) fn size_hint(&self) -> Option<u64> {
        self.body.size_hint().exact()
    }
}
