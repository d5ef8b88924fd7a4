//! What the operator may set. Defaults work.

use std::path::PathBuf;

use atoll_lifecycle::Limits;
use atoll_node::{PoolSetting, wall_clock};
use atoll_types::{DiskBacking, GIB, ProjectId, Resources, Timestamp};

#[derive(Debug, Clone)]
pub struct Settings {
    /// Everything that this server keeps, but templates, lies below it.
    pub data_dir: PathBuf,
    /// What one sandbox may ask for.
    pub limits: Limits,
    /// How many sandboxes of one project may live at once.
    pub max_live_per_project: u64,
    /// Instances that are booted ahead.
    pub pools: Vec<PoolSetting>,
    /// How often consumption is written to the ledger.
    pub metering_interval_millis: u64,
    /// How long artifacts are kept that name no retention; `None`: until they are deleted.
    pub artifact_retention_millis: Option<u64>,
    pub max_artifact_bytes: u64,
    /// How much snapshots, resting sandboxes, volumes and artifacts of one project may take; `None`: as much as there is.
    pub max_storage_per_project: Option<u64>,
    /// Whether saved state is on the disk itself before a pause is answered. Only benchmarks say no.
    pub durable_saves: bool,
    /// How long the ledger keeps facts.
    pub ledger_retention_millis: u64,
    /// How many bytes of facts, instances, model calls and ended sandboxes are kept of one project; and of facts about decisions as
    /// many again.
    pub max_ledger_bytes: u64,
    /// How long ended sandboxes can still be looked at.
    pub ended_retention_millis: u64,
    /// With less than that free on the disk of the data directory no sandbox with its writable layer there is started: what is
    /// left is for those who run, and for the server.
    pub min_free_disk: u64,
    /// What a sandbox gets of which nothing else is said.
    pub default_resources: Resources,
    /// What a step of a Dockerfile gets.
    pub build_resources: Resources,
    /// The wall clock; tests bring their own.
    pub now: fn() -> Timestamp,
}

impl Settings {
    pub fn new(data_dir: PathBuf) -> Self {
        Self {
            data_dir,
            limits: Limits::default(),
            max_live_per_project: 10_000,
            pools: Vec::new(),
            metering_interval_millis: 60_000,
            artifact_retention_millis: Some(30 * 24 * 60 * 60 * 1000),
            max_artifact_bytes: 64 * GIB,
            max_storage_per_project: None,
            durable_saves: true,
            ledger_retention_millis: 400 * 24 * 60 * 60 * 1000,
            max_ledger_bytes: 2 * GIB,
            ended_retention_millis: 7 * 24 * 60 * 60 * 1000,
            min_free_disk: GIB,
            default_resources: Resources::default(),
            build_resources: Resources {
                cpu_millis: 2000,
                memory_bytes: 2 * GIB,
                disk_bytes: 16 * GIB,
                disk_backing: DiskBacking::Disk,
                pids: 2048,
            },
            now: wall_clock,
        }
    }

    /// What of it is for the node; by the names of this project it finds the templates of its pools.
    pub fn node(&self, operators: &ProjectId) -> atoll_node::Settings {
        atoll_node::Settings {
            data_dir: self.data_dir.clone(),
            limits: self.limits.clone(),
            pools: self.pools.clone(),
            pools_of: operators.clone(),
            durable_saves: self.durable_saves,
            min_free_disk: self.min_free_disk,
            build_resources: self.build_resources,
            now: self.now,
        }
    }
}
