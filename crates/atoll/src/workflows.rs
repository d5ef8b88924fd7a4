//! Durable workflows beside the API: the engine with a database of its own, on an address of its own.
//!
//! Its database is a file of its own, so that a storm of workflow steps does not make sandboxes wait for the disk. The keys
//! are those of the API: a key opens the namespaces of its project. With `[tls]` they are served over TLS, and not otherwise:
//! a client that was not told so cannot let its key out in the open.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use atoll_api_temporal::Access;
use atoll_client::output::{Doing, Error, Result};
use atoll_front::serve;
use atoll_front::{Connections, Front, Guarded, Line, Peer};
use atoll_identity::Identity;
use atoll_store::WorkflowStore;
use atoll_workflows::{Engine, Options};
use futures_util::{Stream, StreamExt as _, stream};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;

#[derive(Debug)]
pub(crate) struct Workflows {
    address: SocketAddr,
    is_secured: bool,
    engine: Engine,
    store: Arc<dyn WorkflowStore>,
    serving: JoinHandle<()>,
}

impl Workflows {
    pub(crate) async fn start(
        listen: SocketAddr,
        tls: Option<TlsAcceptor>,
        data: &Path,
        most_kept: Option<u64>,
        identity: &Identity,
        front: Front,
        stop: CancellationToken,
    ) -> Result<Self> {
        let listener = TcpListener::bind(listen).await.map_err(|error| {
            Error::new(format!("cannot serve workflows on {listen}: {error}"))
                .hint("choose another address with --workflows-listen, or `off`")
        })?;
        let address = listener.local_addr().doing("cannot serve workflows")?;
        let path = data.join("workflows.db");
        let shown = path.clone();
        let store = tokio::task::spawn_blocking(move || atoll_store::sqlite::open_workflows(&path))
            .await
            .doing("opening the database")?
            .doing(format_args!("cannot open the database {}", shown.display()))?;
        let mut options = Options {
            project: identity.default_project().to_string(),
            ..Options::default()
        };
        if let Some(most) = most_kept {
            options.most_kept = most;
        }
        let engine = Engine::open(Arc::clone(&store), options)
            .await
            .doing("cannot take up the workflows")?;
        let served = engine.clone();
        let access = Access::WithKey(Arc::new(identity.clone()));
        let is_secured = tls.is_some();
        let serving = tokio::spawn(async move {
            let stop = stop.cancelled_owned();
            let ended = match tls {
                None => {
                    let connections = places(listener, front.connections.clone())
                        .map(|(stream, line)| Guarded::new(stream, line, false));
                    atoll_api_temporal::serve(served, access, front, connections, stop).await
                }
                Some(tls) => {
                    let connections = secured(listener, front.connections.clone(), tls);
                    atoll_api_temporal::serve(served, access, front, connections, stop).await
                }
            };
            if let Err(error) = ended {
                tracing::error!(%error, "workflows are no longer served");
            }
        });
        tracing::info!(%address, tls = is_secured, "serving workflows");
        Ok(Self {
            address,
            is_secured,
            engine,
            store,
            serving,
        })
    }

    pub(crate) fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Where clients on this machine reach them.
    pub(crate) fn url(&self) -> String {
        let url = crate::server::url_of(self.address);
        match url.strip_prefix("http:") {
            Some(rest) if self.is_secured => format!("https:{rest}"),
            _ => url,
        }
    }

    /// Stops handing out tasks. Everything acknowledged is durable, so workers that still poll are not waited for.
    pub(crate) async fn stop(self) {
        self.engine.close();
        self.serving.abort();
        self.store.close().await;
    }
}

/// Connections that have a place.
fn places(listener: TcpListener, connections: Connections) -> impl Stream<Item = (TcpStream, Line)> + Send {
    let state = (listener, connections);
    stream::unfold(state, async |(listener, connections)| {
        loop {
            let (stream, peer) = serve::accept(&listener).await;
            if let Some(line) = connections.admit(Peer::Address(peer.ip())) {
                return Some(((stream, line), (listener, connections)));
            }
            tracing::debug!(%peer, "a connection was refused");
        }
    })
}

/// A client that dawdles over its handshake holds up no other: it is a stranger, and there are never so many of those.
fn secured(
    listener: TcpListener,
    connections: Connections,
    tls: TlsAcceptor,
) -> impl Stream<Item = Guarded<TlsStream<TcpStream>>> + Send {
    places(listener, connections)
        .map(move |(stream, line)| serve::handshake(tls.clone(), stream, line))
        .buffer_unordered(usize::MAX)
        .filter_map(std::future::ready)
}
