//! Durable workflows beside the API: the engine with a database of its own, on an address of its own.
//!
//! Its database is a file of its own, so that a storm of workflow steps does not make sandboxes wait for the disk. Callers
//! are not asked for a key yet, so it listens on this machine's own addresses only.

use std::net::SocketAddr;
use std::path::Path;

use atoll_store::Store;
use atoll_workflows::{Engine, Options};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::output::{Doing, Error, Result};

#[derive(Debug)]
pub(crate) struct Workflows {
    engine: Engine,
    store: Store,
    serving: JoinHandle<()>,
}

impl Workflows {
    pub(crate) async fn start(address: SocketAddr, data: &Path, stop: CancellationToken) -> Result<Self> {
        if !address.ip().is_loopback() {
            return Err(Error::new(format!(
                "workflows cannot be served on {address}: callers are not asked for a key yet, so only addresses of this \
                 machine itself are allowed, such as 127.0.0.1:7233"
            )));
        }
        let listener = TcpListener::bind(address)
            .await
            .doing(format_args!("cannot serve workflows on {address}"))?;
        let path = data.join("workflows.db");
        let shown = path.clone();
        let store = tokio::task::spawn_blocking(move || Store::open(&path))
            .await
            .doing("opening the database")?
            .doing(format_args!("cannot open the database {}", shown.display()))?;
        let engine = Engine::open(store.clone(), Options::default())
            .await
            .doing("cannot take up the workflows")?;
        let served = engine.clone();
        let serving = tokio::spawn(async move {
            if let Err(error) = atoll_api_temporal::serve_on(served, listener, stop.cancelled_owned()).await {
                tracing::error!(%error, "workflows are no longer served");
            }
        });
        tracing::info!(%address, "serving workflows");
        Ok(Self {
            engine,
            store,
            serving,
        })
    }

    /// Stops handing out tasks. Everything acknowledged is durable, so workers that still poll are not waited for.
    pub(crate) async fn stop(self) {
        self.engine.close();
        self.serving.abort();
        self.store.close().await;
    }
}
