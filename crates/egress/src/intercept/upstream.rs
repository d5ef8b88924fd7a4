//! The server's side of a connection: dialled once, used for all requests of the client's connection, dialled again when
//! the server has closed it.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use atoll_policy::Decision;
use atoll_types::Code;
use hyper::body::Incoming;
use hyper::client::conn::{TrySendError, http1, http2};
use hyper::{Request, Response};
use hyper_util::rt::{TokioIo, TokioTimer};
use rustls::ClientConfig;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Mutex;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use super::body::Upload;
use super::route::{Route, Undialled};
use super::tasks::Tasks;
use super::tls::{Offer, Speech, Tls, server_name};
use super::{HANDSHAKE, HEAD_BYTES};

/// What may wait here for a guest that does not read: of one answer, and of all on a connection.
const STREAM_WINDOW: u32 = 1024 * 1024;
const CONNECTION_WINDOW: u32 = 2 * 1024 * 1024;
/// How often a server that is silent on HTTP/2 is asked whether it is still there, and how long it may take to answer.
const PING: Duration = Duration::from_secs(30);
const PONG: Duration = Duration::from_secs(20);

/// Why a request was not answered by the server.
#[derive(Debug)]
pub(super) enum Unanswered {
    Denied(Decision),
    /// The guest did not send what it had announced.
    BrokenBody,
    Failed {
        code: Code,
        why: String,
    },
}

impl Unanswered {
    /// It was no longer allowed before there was an answer.
    pub(super) fn cut(why: Option<Decision>) -> Self {
        match why {
            Some(why) => Self::Denied(why),
            None => Self::BrokenBody,
        }
    }
}

pub(super) struct Upstream<R> {
    route: Arc<R>,
    tasks: Tasks,
    speech: Speech,
    /// With which to dial again; `None` for plain HTTP.
    tls: Option<Arc<ClientConfig>>,
    link: Mutex<Option<Result<Link, Unanswered>>>,
}

/// A connection to the server.
#[derive(Debug)]
struct Link {
    sender: Sender,
    address: IpAddr,
    speech: Speech,
}

#[derive(Debug)]
enum Sender {
    Http1(http1::SendRequest<Upload>),
    Http2(http2::SendRequest<Upload>),
}

impl<R: Route> Upstream<R> {
    /// Dials when the first request needs it.
    pub(super) fn plain(route: Arc<R>, tasks: Tasks, speech: Speech) -> Self {
        Self {
            route,
            tasks,
            speech,
            tls: None,
            link: Mutex::new(None),
        }
    }

    /// Dials now, to learn what the server speaks. Where that fails, the first request is told why, in an answer: that
    /// says more than a connection that breaks.
    pub(super) async fn tls(route: Arc<R>, tasks: Tasks, tls: &Tls, offer: &Offer) -> Self {
        let first = connect_tls(&*route, &tasks, tls.client(offer), offer).await;
        let speech = first.as_ref().map_or(offer.fallback(), |link| link.speech);
        Self {
            route,
            tasks,
            speech,
            tls: Some(tls.client(&Offer::only(speech))),
            link: Mutex::new(Some(first)),
        }
    }

    pub(super) fn route(&self) -> &R {
        &self.route
    }

    pub(super) fn tasks(&self) -> &Tasks {
        &self.tasks
    }

    pub(super) fn speech(&self) -> Speech {
        self.speech
    }

    /// Where the requests go; dials if that is not known.
    pub(super) async fn address(&self) -> Result<IpAddr, Unanswered> {
        let mut slot = self.link.lock().await;
        let link = match slot.take() {
            Some(link) => link?,
            None => self.dial().await?,
        };
        let address = link.address;
        *slot = Some(Ok(link));
        Ok(address)
    }

    /// Where the last one went, if it is known.
    pub(super) async fn known_address(&self) -> Option<IpAddr> {
        let slot = self.link.lock().await;
        let link = slot.as_ref()?.as_ref().ok()?;
        Some(link.address)
    }

    /// Sends a request and waits for the head of its answer. `leads_to` is asked before whether it may go where the
    /// connection leads, `reusable` then whether the connection can carry another.
    pub(super) async fn send(
        &self,
        mut request: Request<Upload>,
        leads_to: impl Fn(IpAddr) -> Result<(), Unanswered>,
        reusable: impl Fn(&Response<Incoming>) -> bool,
    ) -> Result<Response<Incoming>, Unanswered> {
        loop {
            let (mut link, fresh) = self.take().await?;
            leads_to(link.address)?;
            match link.sender.send(request).await {
                Ok(response) => {
                    if matches!(link.sender, Sender::Http1(_)) && reusable(&response) {
                        *self.link.lock().await = Some(Ok(link));
                    }
                    return Ok(response);
                }
                // The server had closed the connection before, and has not seen anything of the request.
                Err(mut unsent) => match unsent.take_message() {
                    Some(back) if !fresh => request = back,
                    _ => return Err(self.unanswered(&unsent.into_error())),
                },
            }
        }
    }

    fn unanswered(&self, error: &hyper::Error) -> Unanswered {
        if error.is_user() {
            return Unanswered::BrokenBody;
        }
        Unanswered::Failed {
            code: Code::UpstreamFailed,
            why: format!("{} did not answer as expected: {error}", self.route.name()),
        }
    }

    /// A connection that is ready for a request, and whether it is new.
    async fn take(&self) -> Result<(Link, bool), Unanswered> {
        let mut slot = self.link.lock().await;
        if let Some(link) = slot.take() {
            let mut link = link?;
            if link.sender.ready().await {
                *slot = link.share().map(Ok);
                return Ok((link, false));
            }
        }
        let link = self.dial().await?;
        *slot = link.share().map(Ok);
        Ok((link, true))
    }

    async fn dial(&self) -> Result<Link, Unanswered> {
        if let Some(tls) = &self.tls {
            return connect_tls(&*self.route, &self.tasks, tls.clone(), &Offer::only(self.speech)).await;
        }
        let (stream, address) = dial(&*self.route).await?;
        shake_hands(stream, address, self.speech, &self.tasks).await
    }
}

impl Link {
    /// HTTP/2 carries many requests at once.
    fn share(&self) -> Option<Self> {
        match &self.sender {
            Sender::Http1(_) => None,
            Sender::Http2(sender) => Some(Self {
                sender: Sender::Http2(sender.clone()),
                address: self.address,
                speech: self.speech,
            }),
        }
    }
}

impl Sender {
    async fn ready(&mut self) -> bool {
        match self {
            // The answer before has been read by now, so this does not wait for the guest.
            Self::Http1(sender) => sender.ready().await.is_ok(),
            Self::Http2(sender) => sender.ready().await.is_ok(),
        }
    }

    async fn send(
        &mut self,
        request: Request<Upload>,
    ) -> Result<Response<Incoming>, TrySendError<Request<Upload>>> {
        match self {
            Self::Http1(sender) => sender.try_send_request(request).await,
            Self::Http2(sender) => sender.try_send_request(request).await,
        }
    }
}

async fn dial<R: Route>(route: &R) -> Result<(R::Stream, IpAddr), Unanswered> {
    route.dial().await.map_err(|error| match error {
        Undialled::Denied(decision) => Unanswered::Denied(decision),
        Undialled::Failed(why) => Unanswered::Failed {
            code: Code::UpstreamUnreachable,
            why: format!("{}: {why}", route.name()),
        },
    })
}

async fn connect_tls<R: Route>(
    route: &R,
    tasks: &Tasks,
    config: Arc<ClientConfig>,
    offer: &Offer,
) -> Result<Link, Unanswered> {
    let (stream, address) = dial(route).await?;
    let failed = |why: String| Unanswered::Failed {
        code: Code::UpstreamTlsFailed,
        why: format!("cannot set up TLS with {}: {why}", route.name()),
    };
    let name = server_name(route.name()).map_err(|error| failed(error.to_string()))?;
    let stream = timeout(HANDSHAKE, TlsConnector::from(config).connect(name, stream))
        .await
        .map_err(|_| failed("it took too long".to_owned()))?
        .map_err(|error| failed(error.to_string()))?;
    let chosen = stream.get_ref().1.alpn_protocol();
    let speech = offer
        .chosen(chosen)
        .ok_or_else(|| failed("it does not speak what the client speaks".to_owned()))?;
    shake_hands(stream, address, speech, tasks).await
}

async fn shake_hands<S>(stream: S, address: IpAddr, speech: Speech, tasks: &Tasks) -> Result<Link, Unanswered>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let io = TokioIo::new(stream);
    let failed = |error: hyper::Error| Unanswered::Failed {
        code: Code::UpstreamFailed,
        why: format!("the server did not begin as expected: {error}"),
    };
    let sender = match speech {
        Speech::Http1 => {
            let (sender, connection) = http1::Builder::new()
                .max_buf_size(HEAD_BYTES)
                .preserve_header_case(true)
                .handshake(io)
                .await
                .map_err(failed)?;
            tasks.spawn(connection.with_upgrades());
            Sender::Http1(sender)
        }
        Speech::Http2 => {
            let (sender, connection) = http2::Builder::new(tasks.clone())
                .timer(TokioTimer::new())
                .initial_stream_window_size(STREAM_WINDOW)
                .initial_connection_window_size(CONNECTION_WINDOW)
                .max_header_list_size(u32::try_from(HEAD_BYTES).unwrap_or(u32::MAX))
                .max_send_buf_size(HEAD_BYTES)
                .keep_alive_interval(PING)
                .keep_alive_timeout(PONG)
                .handshake(io)
                .await
                .map_err(failed)?;
            tasks.spawn(connection);
            Sender::Http2(sender)
        }
    };
    Ok(Link {
        sender,
        address,
        speech,
    })
}
