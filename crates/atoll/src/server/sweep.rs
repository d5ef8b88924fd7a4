//! What killed `atoll run`s left behind.

use std::sync::Arc;

use atoll_client::output::Result;
use atoll_node::LocalNode;
use atoll_sandboxes::{ListSandboxes, Sandboxes, Settings, Storage};

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
    let templates = machine.templates.clone();
    let (store, bytes) = storage::open(config, data.path(), machine.templates, None).await?;
    let identity = storage::identity(&store, &settings).await?;
    let (outside, broker) = outside::open(config, data.path(), None, None).await?;
    let node = LocalNode::new(
        settings.node(identity.default_project()),
        machine.runtimes,
        machine.tiers,
        bytes,
        outside,
    );
    let storage = Storage {
        store,
        templates,
        broker,
    };
    let sandboxes = Sandboxes::start(settings, storage, identity.clone(), Arc::new(node)).await?;
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
