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
//! - Connections count for the project that they were made for, and serve no other ([`crate::shelf`]).

use std::fmt;
use std::future::poll_fn;
use std::net::{IpAddr, SocketAddr};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use atoll_types::ProjectId;
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
use crate::names::Names;
use crate::shelf::{KEPT, MOST_OPEN, Place, Shelf, Ticket};

type Io = MaybeHttpsStream<TokioIo<TcpStream>>;

/// Whatever goes wrong on the way, for a text.
pub(crate) type Failure = Box<dyn std::error::Error + Send + Sync>;

/// How far a request came.
pub(crate) enum Failed {
    /// It may not go there.
    OutOfBounds(String),
    /// As many are open as may be.
    Crowded(usize),
    /// Nobody has heard of it.
    Unsent(Failure),
    /// It may have been read, and acted upon.
    Sent(Failure),
}

/// Connects, and keeps what is not in use.
pub(crate) struct Links {
    tls: Arc<rustls::ClientConfig>,
    names: Names,
    shelf: Arc<Shelf<Link>>,
}

/// Where a request goes, on whose behalf, and where those may go at all; `None`: anywhere.
#[derive(Clone, Copy)]
pub(crate) struct Way<'a> {
    pub(crate) url: &'a Uri,
    pub(crate) project: &'a ProjectId,
    pub(crate) reach: Option<&'a Arc<dyn Reach>>,
}

/// It may not go there.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct OutOfBounds(String);

/// Resolves names to those of their addresses that may be reached.
#[derive(Clone)]
struct Resolve {
    names: Names,
    project: ProjectId,
    reach: Option<Arc<dyn Reach>>,
}

impl tower_service::Service<Name> for Resolve {
    type Response = std::vec::IntoIter<SocketAddr>;
    type Error = Failure;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Failure>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Failure>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, name: Name) -> Self::Future {
        let Self {
            names,
            project,
            reach,
        } = self.clone();
        Box::pin(async move {
            let found = names.look_up(&project, name.as_str().to_owned()).await?;
            let (mut allowed, mut refused) = (Vec::new(), None);
            for address in found {
                match reach.as_ref().map_or(Ok(()), |reach| reach.address(address.ip())) {
                    Ok(()) => allowed.push(address),
                    Err(why) => refused = Some(why),
                }
            }
            match refused {
                Some(why) if allowed.is_empty() => Err(OutOfBounds(why).into()),
                _ => Ok(allowed.into_iter()),
            }
        })
    }
}

/// Why there is no connection: by a rule of ours, or by whatever happened on the way.
fn unconnected(error: Failure) -> Failed {
    let mut next: Option<&(dyn std::error::Error + 'static)> = Some(error.as_ref());
    while let Some(cause) = next {
        if let Some(OutOfBounds(why)) = cause.downcast_ref() {
            return Failed::OutOfBounds(why.clone());
        }
        next = cause.source();
    }
    Failed::Unsent(error)
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
            names: Names::default(),
            shelf: Arc::default(),
        })
    }

    /// Sends a request and waits for the head of its answer. Connecting takes at most `connect`.
    pub(crate) async fn send(
        &self,
        way: Way<'_>,
        mut request: Request<Full<Bytes>>,
        connect: Duration,
    ) -> Result<(Response<()>, Answer), Failed> {
        let place = Place {
            project: way.project.clone(),
            scheme: way.url.scheme_str().unwrap_or_default().to_owned(),
            authority: way.url.authority().map_or("", |at| at.as_str()).to_owned(),
            anywhere: way.reach.is_none(),
        };
        loop {
            let (mut link, is_new) = match self.shelf.take(&place, Link::is_usable) {
                Some(link) => (link, false),
                None => {
                    let ticket = self.shelf.enter(way.project);
                    let ticket = ticket.ok_or(Failed::Crowded(MOST_OPEN))?;
                    // Seldom needed, and large.
                    let connected = Box::pin(self.connect(way, connect, ticket)).await;
                    (connected.map_err(unconnected)?, true)
                }
            };
            match link.ask(request).await {
                Ok(response) => {
                    let (head, body) = response.into_parts();
                    let answer = Answer {
                        body,
                        link: Some(link),
                        place: Some(place),
                        shelf: Arc::downgrade(&self.shelf),
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

    async fn connect(&self, way: Way<'_>, within: Duration, ticket: Ticket) -> Result<Link, Failure> {
        let Way { url, project, reach } = way;
        if let Some(reach) = reach {
            let host = url.host().unwrap_or_default();
            // One that is written as an address is connected to without being resolved.
            match host.trim_matches(['[', ']']).parse::<IpAddr>() {
                Ok(address) => reach.address(address).map_err(OutOfBounds)?,
                Err(_) => reach.name(host).map_err(OutOfBounds)?,
            }
        }
        let mut tcp = HttpConnector::new_with_resolver(Resolve {
            names: self.names.clone(),
            project: project.clone(),
            reach: reach.cloned(),
        });
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
            _ticket: ticket,
        })
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
    /// It is counted.
    _ticket: Ticket,
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
    place: Option<Place>,
    shelf: Weak<Shelf<Link>>,
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
                    let (link, shelf) = (self.link.take(), self.shelf.upgrade());
                    if let Some(((mut link, shelf), place)) = link.zip(shelf).zip(self.place.take())
                        && link.is_usable()
                    {
                        shelf.put(place, link);
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
