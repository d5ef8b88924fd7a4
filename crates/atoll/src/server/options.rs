//! The operator's configuration in the words of those whom it concerns: sandboxes, and each API.

use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::Path;

use atoll_api_native::MetricsKey;
use atoll_client::output::{Error, Result};
use atoll_runtime::probe::{Probe, Verdict};
use atoll_sandboxes::{PoolSetting, Settings};
use atoll_types::DiskBacking;

use super::storage::read_private;
use crate::config::Config;

/// The default of sandboxes created through the API without a word about their lifetime.
const DEFAULT_TIMEOUT_MILLIS: u64 = 15 * 60 * 1000;

/// `tiers`: what works on this machine, strongest first.
pub(super) fn settings(config: &Config, data: &Path, tiers: &[Probe]) -> Settings {
    let mut settings = Settings::new(data.to_owned());
    // Nothing is asked of the machine by default that it cannot do.
    if tiers.iter().find(|tier| tier.works()).is_some_and(lacks_disk) {
        settings.default_resources.disk_backing = DiskBacking::Memory;
        settings.build_resources.disk_backing = DiskBacking::Memory;
    }
    settings.default_resources = config.sizes.usual.over(settings.default_resources);
    most(&mut settings.limits.cpu_millis, config.sizes.most.cpu_millis);
    most(&mut settings.limits.memory_bytes, config.sizes.most.memory_bytes);
    most(&mut settings.limits.disk_bytes, config.sizes.most.disk_bytes);
    most(&mut settings.limits.pids, config.sizes.most.pids);
    settings.pools = config
        .pools
        .iter()
        .map(|pool| PoolSetting {
            template: pool.template.clone(),
            size: pool.count,
            resources: pool.resources.over(settings.default_resources),
            isolation: pool.isolation,
        })
        .collect();
    settings.limits.default_floor = config.isolation;
    if let Some(longest) = config.max_timeout_millis {
        settings.limits.max_timeout_millis = Some(longest);
    }
    if let Some(most) = config.max_sandboxes {
        settings.max_live_per_project = most;
    }
    settings.max_storage_per_project = config.max_storage;
    if let Some(kept) = config.min_free_disk {
        settings.min_free_disk = kept;
    }
    if let Some(kept) = config.artifact_retention_millis {
        settings.artifact_retention_millis = Some(kept);
    }
    if let Some(kept) = config.ledger_retention_millis {
        settings.ledger_retention_millis = kept;
    }
    if let Some(most) = config.max_ledger {
        settings.max_ledger_bytes = most;
    }
    settings.durable_saves = config.durable_saves;
    settings
}

fn lacks_disk(tier: &Probe) -> bool {
    matches!(&tier.verdict, Verdict::Works { no_disk, .. } if no_disk.is_some())
}

fn most<T: Copy>(range: &mut RangeInclusive<T>, most: Option<T>) {
    if let Some(most) = most {
        *range = *range.start()..=most;
    }
}

pub(super) fn api_options(config: &Config, data: &Path) -> Result<atoll_api_native::Options> {
    let mut options = atoll_api_native::Options {
        default_timeout_millis: config.default_timeout_millis.unwrap_or(DEFAULT_TIMEOUT_MILLIS),
        scratch: data.join("scratch"),
        ..atoll_api_native::Options::default()
    };
    if let Some(scheme) = &config.public_scheme {
        options.public_scheme.clone_from(scheme);
    }
    options.public_port = config.public_port;
    if config.domain != "localhost" {
        options.port_domains.insert(0, config.domain.clone());
    }
    options.metrics_key = config.metrics_key.as_deref().map(read_metrics_key).transpose()?;
    Ok(options)
}

/// The same, for E2B's wire.
pub(super) fn e2b_options(
    config: &Config,
    native: &atoll_api_native::Options,
    secured: Option<SocketAddr>,
) -> atoll_api_e2b::Options {
    atoll_api_e2b::Options {
        public_scheme: native.public_scheme.clone(),
        domains: native.port_domains.clone(),
        public_port: config.public_port,
        // Names below `localhost` alone have no certificate.
        tls_port: secured
            .filter(|_| config.domain != "localhost" && !config.e2b_tls)
            .map(|address| address.port()),
        internet: config.e2b_internet,
        scratch: native.scratch.clone(),
    }
}

/// Whether the files that a configuration names can be used.
pub(crate) fn check_files(config: &Config) -> Result<()> {
    let key = config.metrics_key.as_deref().map(read_metrics_key);
    key.transpose().map(drop)
}

/// What opens the metrics.
fn read_metrics_key(path: &Path) -> Result<MetricsKey> {
    let text = read_private("the key of the metrics", path)?;
    match std::str::from_utf8(&text).map(str::trim) {
        Ok(secret) if secret.len() >= 16 => Ok(MetricsKey::new(secret)),
        _ => Err(Error::new(format!(
            "the key of the metrics {} has fewer than 16 characters",
            path.display()
        ))
        .hint("make one with: openssl rand -hex 20")),
    }
}
