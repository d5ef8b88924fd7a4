//! What this machine offers a server: the walls that work here, and as many open files as it may have.

use std::path::Path;
use std::sync::Arc;

use atoll_client::output::{Doing, Result};
use atoll_helper::front::Helper;
use atoll_image::Templates;
use atoll_runtime::Runtime;
use atoll_runtime::agent::Raiser;
use atoll_runtime::probe::{self, Probe};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::assets;
use crate::config::Config;
use crate::outside::BeyondFloor;

/// What this machine offers.
pub(crate) struct Machine {
    pub(crate) runtimes: atoll_runtime::Runtimes,
    pub(crate) tiers: Vec<Probe>,
    pub(crate) templates: Templates,
}

impl Machine {
    /// Finds out in this process.
    pub(crate) async fn look(config: &Config, data: &Path) -> Result<Self> {
        let (raisers, tiers) = Self::raise(config, data).await?;
        Ok(Self {
            runtimes: raisers
                .into_iter()
                .map(|raiser| raiser as Arc<dyn Runtime>)
                .collect(),
            tiers,
            templates: open_templates(config)?,
        })
    }

    /// The same, for a process that leaves it to another to speak with agents.
    pub(crate) async fn raise(config: &Config, data: &Path) -> Result<(Vec<Arc<dyn Raiser>>, Vec<Probe>)> {
        let owned = data.to_owned();
        let assets = tokio::task::spawn_blocking(move || assets::install(&owned))
            .await
            .doing("setting up")??;
        let runtime_config = atoll_runtime::Config {
            state_dir: data.to_owned(),
            guest_binary: assets.guest_binary,
            guest_image: assets.guest_image,
            jailer_binary: assets.jailer_binary,
            runsc: config.runsc.clone(),
            cgroup_parent: config.cgroup.clone(),
        };
        let runtime_config = Arc::new(runtime_config);
        let tiers = probe::probe(&runtime_config).await;
        let raisers = probe::raisers(&runtime_config, &tiers).doing("cannot set up the isolation")?;
        Ok((raisers, tiers))
    }

    /// What the helper has found.
    pub(super) async fn of(helper: &Helper, config: &Config) -> Result<Self> {
        let (setup, runtimes) = helper.setup().await.doing("cannot set up the isolation")?;
        Ok(Self {
            runtimes,
            tiers: setup.tiers,
            templates: open_templates(config)?.installed_by(Arc::new(helper.clone())),
        })
    }
}

fn open_templates(config: &Config) -> Result<Templates> {
    let templates = Templates::open(&config.templates).doing(format_args!(
        "cannot open the templates in {}",
        config.templates.display()
    ))?;
    Ok(templates.reaching(Arc::new(BeyondFloor::new(&config.network)?)))
}

/// More open files, no core dumps.
pub(crate) fn raise_limits() {
    raise_file_limit();
    forbid_core_dumps();
}

/// Secrets are in this memory. 1 and not 0: with 0 a `core_pattern` that is a pipe is fed all the same.
fn forbid_core_dumps() {
    let limit = Rlimit {
        current: Some(1),
        maximum: Some(1),
    };
    if let Err(error) = setrlimit(Resource::Core, limit) {
        tracing::warn!(%error, "core dumps of this server cannot be forbidden");
    }
}

/// Each sandbox costs a few descriptors; the default of 1024 ends at some three hundred.
fn raise_file_limit() {
    const WANTED: u64 = 1 << 20;
    let now = getrlimit(Resource::Nofile);
    let most = now.maximum.unwrap_or(u64::MAX);
    let raised = Rlimit {
        current: Some(WANTED.max(most.min(WANTED))),
        maximum: Some(most.max(WANTED)),
    };
    // Root may go beyond the hard limit, others up to it.
    let outcome = setrlimit(Resource::Nofile, raised).or_else(|_| {
        setrlimit(
            Resource::Nofile,
            Rlimit {
                current: Some(most.min(WANTED)),
                maximum: now.maximum,
            },
        )
    });
    if let Err(error) = outcome {
        tracing::warn!(%error, "the limit on open files could not be raised");
    }
}
