//! A database of one's own, and short ways to make rows.

use std::path::PathBuf;

use atoll_identity::Project;
use atoll_lifecycle::{Boot, NewRecord, Policy, create};
use atoll_store::{Fact, NewFact, NewSandbox, SandboxRow, Stores, sqlite};
use atoll_types::{
    Id, InstanceId, Isolation, ProjectId, SandboxId, SandboxSpec, SecretId, SnapshotId, TemplateId,
    Timestamp, VolumeId,
};

pub(crate) const T0: Timestamp = Timestamp(1_000_000);

pub(crate) struct Context {
    pub(crate) store: Stores,
    pub(crate) project: Project,
    pub(crate) directory: tempfile::TempDir,
}

impl Context {
    pub(crate) async fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let store = sqlite::open(&directory.path().join("atoll.db")).unwrap();
        let project = store
            .identity
            .ensure_project("default", project_id(1), T0)
            .await
            .unwrap();
        Self {
            store,
            project,
            directory,
        }
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.directory.path().join("atoll.db")
    }

    pub(crate) fn new_sandbox(&self, n: u32, at: Timestamp) -> NewSandbox {
        NewSandbox {
            row: sandbox_row(&self.project.id, n, at),
            idempotency: None,
            max_live: None,
            facts: vec![],
        }
    }

    pub(crate) fn fact(&self, n: u64) -> NewFact {
        NewFact {
            at: T0.plus_millis(n),
            project: self.project.id.clone(),
            sandbox: None,
            fact: Fact::Other {
                kind: "test".into(),
                data: n.into(),
            },
        }
    }
}

pub(crate) fn entropy(n: u32) -> [u8; 20] {
    // The alphabet has 32 letters: five bits each.
    std::array::from_fn(|i| if i < 7 { (n >> (5 * i) & 31) as u8 } else { 0 })
}

pub(crate) fn project_id(n: u32) -> ProjectId {
    Id::from_entropy(entropy(n))
}

pub(crate) fn sandbox_id(n: u32) -> SandboxId {
    Id::from_entropy(entropy(n))
}

pub(crate) fn snapshot_id(n: u32) -> SnapshotId {
    Id::from_entropy(entropy(n))
}

pub(crate) fn volume_id(n: u32) -> VolumeId {
    Id::from_entropy(entropy(n))
}

pub(crate) fn secret_id(n: u32) -> SecretId {
    Id::from_entropy(entropy(n))
}

pub(crate) fn instance_id(n: u32) -> InstanceId {
    Id::from_entropy(entropy(n))
}

pub(crate) fn sandbox_row(project: &ProjectId, n: u32, at: Timestamp) -> SandboxRow {
    let spec = SandboxSpec {
        template: "base".into(),
        timeout_millis: Some(60_000),
        ..SandboxSpec::default()
    };
    let created = create(
        NewRecord {
            boot: Boot::Warm(InstanceId::from_entropy(entropy(n))),
            policy: Policy::of(&spec),
        },
        at,
    );
    SandboxRow {
        id: sandbox_id(n),
        project: project.clone(),
        spec,
        template: TemplateId::from_entropy([1; 20]),
        isolation: Isolation::Gvisor,
        record: created.next,
        version: 0,
    }
}
