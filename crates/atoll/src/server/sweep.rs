//! What killed `atoll run`s left behind.

use atoll_client::output::Result;
use atoll_sandboxes::{ListSandboxes, Sandboxes, Settings};

use super::{Machine, storage};
use crate::config::Config;
use crate::data::DataDir;
use crate::outside;

/// Ends what `atoll run`s with a data directory of their own left behind when they were killed.
pub(crate) async fn sweep(config: &Config) {
    let Ok(left) = std::fs::read_dir(config.data.join("embedded")) else {
        return;
    };
    for path in left.flatten().map(|entry| entry.path()) {
        // One that is alive holds its lock.
        let Ok(data) = DataDir::take(&path) else { continue };
        match Box::pin(sweep_one(config, &data)).await {
            Ok(()) => drop(std::fs::remove_dir_all(&path)),
            Err(error) => {
                tracing::warn!(%error, path = %path.display(), "cannot clean up after a killed `atoll run`");
            }
        }
    }
}

async fn sweep_one(config: &Config, data: &DataDir) -> Result<()> {
    let machine = Machine::look(config, data.path()).await?;
    let settings = Settings::new(data.path().to_owned());
    let storage = storage::open(config, data.path(), machine.templates, None).await?;
    let identity = storage::identity(&storage.store, &settings).await?;
    let sandboxes = Sandboxes::start(
        settings,
        machine.runtimes,
        machine.tiers,
        storage,
        identity.clone(),
        outside::open(config, data.path(), None, None).await?,
    )
    .await?;
    let caller = identity.server(identity.default_project().clone());
    let live = sandboxes
        .list(
            &caller,
            ListSandboxes {
                limit: 100,
                ..ListSandboxes::default()
            },
        )
        .await?;
    for sandbox in live.items {
        sandboxes.kill(&caller, &sandbox.id).await?;
    }
    sandboxes.shutdown().await;
    Ok(())
}
