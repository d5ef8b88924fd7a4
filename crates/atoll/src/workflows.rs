//! Durable workflows beside the API: the engine with a database of its own, on an address of its own.
//!
//! Its database is a file of its own, so that a storm of workflow steps does not make sandboxes wait for the disk. The keys
//! are those of the API: a key opens the namespaces of its project.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use atoll_api_temporal::{Access, Keys};
use atoll_sandboxes::Sandboxes;
use atoll_store::Store;
use atoll_workflows::{Engine, Options};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::output::{Doing, Error, Result};

#[derive(Debug)]
pub(crate) struct Workflows {
    pub(crate) address: SocketAddr,
    engine: Engine,
    store: Store,
    serving: JoinHandle<()>,
}

impl Workflows {
    pub(crate) async fn start(
        listen: SocketAddr,
        data: &Path,
        sandboxes: &Sandboxes,
        stop: CancellationToken,
    ) -> Result<Self> {
        let listener = TcpListener::bind(listen).await.map_err(|error| {
            Error::new(format!("cannot serve workflows on {listen}: {error}"))
                .hint("choose another address with --workflows-listen, or `off`")
        })?;
        let address = listener.local_addr().doing("cannot serve workflows")?;
        let path = data.join("workflows.db");
        let shown = path.clone();
        let store = tokio::task::spawn_blocking(move || Store::open(&path))
            .await
            .doing("opening the database")?
            .doing(format_args!("cannot open the database {}", shown.display()))?;
        let options = Options {
            project: sandboxes.default_project().to_string(),
            ..Options::default()
        };
        let engine = Engine::open(store.clone(), options)
            .await
            .doing("cannot take up the workflows")?;
        let served = engine.clone();
        let access = Access::WithKey(Arc::new(KeysOfTheApi(sandboxes.clone())));
        let serving = tokio::spawn(async move {
            if let Err(error) =
                atoll_api_temporal::serve_on(served, access, listener, stop.cancelled_owned()).await
            {
                tracing::error!(%error, "workflows are no longer served");
            }
        });
        tracing::info!(%address, "serving workflows");
        Ok(Self {
            address,
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

#[derive(Debug)]
struct KeysOfTheApi(Sandboxes);

#[async_trait::async_trait]
impl Keys for KeysOfTheApi {
    async fn project_of(&self, secret: &str) -> std::result::Result<Option<String>, String> {
        match self.0.authenticate(secret).await {
            Ok(caller) => Ok(caller.map(|caller| caller.project.to_string())),
            Err(fault) => Err(fault.to_string()),
        }
    }
}
