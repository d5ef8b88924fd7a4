//! A database of one's own, and short ways to make rows.

use std::collections::BTreeMap;
use std::path::PathBuf;

use atoll_lifecycle::{Boot, NewRecord, create};
use atoll_store::{Fact, NewFact, NewSandbox, ProjectRow, SandboxRow, Store};
use atoll_types::{
    Id, InstanceId, Isolation, ProjectId, Resources, SandboxId, SandboxSpec, TemplateId, Timestamp,
};

pub(crate) const T0: Timestamp = Timestamp(1_000_000);

pub(crate) struct Context {
    pub(crate) store: Store,
    pub(crate) project: ProjectRow,
    pub(crate) directory: tempfile::TempDir,
}

impl Context {
    pub(crate) async fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open(&directory.path().join("atoll.db")).unwrap();
        let project = store.ensure_project("default", project_id(1), T0).await.unwrap();
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

pub(crate) fn sandbox_row(project: &ProjectId, n: u32, at: Timestamp) -> SandboxRow {
    let spec = SandboxSpec {
        template: "base".into(),
        resources: Resources::default(),
        timeout_millis: Some(60_000),
        idle: None,
        env: BTreeMap::new(),
        labels: BTreeMap::new(),
        isolation_floor: None,
    };
    let created = create(
        NewRecord {
            boot: Boot::Warm(InstanceId::from_entropy(entropy(n))),
            timeout_millis: spec.timeout_millis,
            idle: spec.idle,
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
        token_hash: Some([7; 32]),
        version: 0,
    }
}
