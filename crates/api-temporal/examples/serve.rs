//! The workflow engine on its own, without sandboxes: for tests of the wire against published SDKs.
//!
//! `serve DATABASE ADDRESS`

use std::path::Path;

use atoll_front::{Front, Guarded, Limits, Peer};
use atoll_workflows::{Engine, Options};
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::TcpListenerStream;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    tracing_subscriber::fmt()
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "info".into()),
        )
        .init();
    let mut arguments = std::env::args().skip(1);
    let database = arguments.next().ok_or("usage: serve DATABASE ADDRESS")?;
    let address = arguments.next().ok_or("usage: serve DATABASE ADDRESS")?;
    let mut options = Options::default();
    // As the development server of the people whose tests these are is set up for them.
    if let Ok(events) = std::env::var("SUGGEST_CONTINUE_AS_NEW") {
        options.limits.suggest_events = events.parse()?;
    }
    let store = atoll_store::sqlite::open_workflows(Path::new(&database))?;
    let engine = Engine::open(store.clone(), options).await?;
    let stop = async {
        let _ = tokio::signal::ctrl_c().await;
    };
    let listener = tokio::net::TcpListener::bind(address).await?;
    let front = Front::new(Limits::for_machine(1 << 33, 1 << 14));
    let places = front.connections.clone();
    let connections = TcpListenerStream::new(listener).filter_map(move |connection| {
        let connection = connection.ok()?;
        connection.set_nodelay(true).ok()?;
        let line = places.admit(Peer::Address(connection.peer_addr().ok()?.ip()))?;
        Some(Guarded::new(connection, line, false))
    });
    atoll_api_temporal::serve(
        engine.clone(),
        atoll_api_temporal::Access::Open,
        front,
        connections,
        stop,
    )
    .await?;
    engine.close();
    store.close().await;
    Ok(())
}
