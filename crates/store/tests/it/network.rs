//! What sandboxes may reach, changed while they live, and what has gone through.

use atoll_store::{Error, Inserted, NetworkTotal, SandboxRow};
use atoll_types::{NetworkPolicy, Preset, SandboxState, SecretUse};

use crate::support::{Context, T0, sandbox_id};

impl Context {
    async fn inserted(&self, n: u32) -> SandboxRow {
        match self
            .store
            .sandboxes
            .insert_sandbox(self.new_sandbox(n, T0))
            .await
            .unwrap()
        {
            Inserted::New(row) => row,
            Inserted::Existing(row) => panic!("{} existed", row.id),
        }
    }
}

fn reaching(row: &SandboxRow, preset: Preset) -> SandboxRow {
    let mut row = row.clone();
    row.spec.network = Some(NetworkPolicy {
        preset: Some(preset),
        ..NetworkPolicy::default()
    });
    row.spec.secrets = vec![SecretUse {
        secret: "github".into(),
        env: Some("TOKEN".into()),
    }];
    row
}

#[tokio::test]
async fn what_a_sandbox_may_reach_changes_and_nothing_else_does() {
    let context = Context::new().await;
    let (store, project) = (&context.store, &context.project.id);
    let row = context.inserted(1).await;
    let mut asked = reaching(&row, Preset::AllPublic);
    asked.spec.template = "other".into();
    asked.record.state = SandboxState::Failed;
    let written = store
        .sandboxes
        .set_sandbox_network(asked.clone(), vec![context.fact(1)])
        .await
        .unwrap();
    assert_eq!(written.spec.network, asked.spec.network);
    assert_eq!(written.spec.secrets, asked.spec.secrets);
    assert_eq!(written.spec.template, row.spec.template);
    assert_eq!(written.record, row.record);
    assert_eq!(written.version, row.version + 1);
    let read = store.sandboxes.sandbox(project, &row.id).await.unwrap();
    assert_eq!(read, Some(written.clone()));
    assert_eq!(store.ledger.last_seq().await.unwrap(), 1);

    // Who decided on what was there before decides again.
    let late = store
        .sandboxes
        .set_sandbox_network(reaching(&row, Preset::None), vec![context.fact(2)])
        .await;
    assert!(matches!(late, Err(Error::VersionConflict(_))), "{late:?}");
    let late = store.sandboxes.update_sandbox(row, vec![]).await;
    assert!(matches!(late, Err(Error::VersionConflict(_))), "{late:?}");
    assert_eq!(store.ledger.last_seq().await.unwrap(), 1);

    // A step of its life keeps what it may reach.
    let stepped = store
        .sandboxes
        .update_sandbox(written.clone(), vec![])
        .await
        .unwrap();
    let read = store
        .sandboxes
        .sandbox(project, &stepped.id)
        .await
        .unwrap()
        .unwrap();
    assert_eq!(read.spec, written.spec);
}

#[tokio::test]
async fn usage_adds_up_and_goes_with_the_sandbox() {
    let context = Context::new().await;
    let store = &context.store;
    let id = context.inserted(1).await.id;
    assert_eq!(
        store.sandboxes.network_usage(&id).await.unwrap(),
        NetworkTotal::default()
    );
    let more = NetworkTotal {
        bytes_up: 1,
        bytes_down: 20,
        connections: 3,
    };
    store.sandboxes.add_network_usage(&id, more).await.unwrap();
    store.sandboxes.add_network_usage(&id, more).await.unwrap();
    let total = NetworkTotal {
        bytes_up: 2,
        bytes_down: 40,
        connections: 6,
    };
    assert_eq!(store.sandboxes.network_usage(&id).await.unwrap(), total);

    let flood = NetworkTotal {
        bytes_up: u64::MAX,
        bytes_down: 0,
        connections: 0,
    };
    store.sandboxes.add_network_usage(&id, flood).await.unwrap();
    let flooded = store.sandboxes.network_usage(&id).await.unwrap();
    assert_eq!((flooded.bytes_up, flooded.bytes_down), (i64::MAX as u64, 40));

    let unknown = sandbox_id(9);
    store.sandboxes.add_network_usage(&unknown, more).await.unwrap();
    assert_eq!(
        store.sandboxes.network_usage(&unknown).await.unwrap(),
        NetworkTotal::default()
    );

    let direct = rusqlite::Connection::open(context.path()).unwrap();
    direct.pragma_update(None, "foreign_keys", true).unwrap();
    direct.execute("DELETE FROM sandboxes", []).unwrap();
    assert_eq!(
        store.sandboxes.network_usage(&id).await.unwrap(),
        NetworkTotal::default()
    );
}
