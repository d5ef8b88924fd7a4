//! Volumes, who sees them, and what a project has on disk.

use atoll_lifecycle::{Input, step};
use atoll_store::{
    ArtifactKind, ArtifactRow, Attachment, Error, Inserted, NewSandbox, ProjectStorage, SandboxRow,
    VolumeRow, VolumeState,
};
use atoll_types::{ArtifactId, EndReason, VolumeMount};

use crate::support::{Context, T0, entropy, instance_id, sandbox_id, volume_id};

impl Context {
    fn volume(&self, n: u32, name: &str) -> VolumeRow {
        VolumeRow {
            id: volume_id(n),
            project: self.project.id.clone(),
            name: name.into(),
            state: VolumeState::Ready,
            limit_bytes: 1000,
            used_bytes: 0,
            created_at: T0.plus_millis(u64::from(n)),
        }
    }

    fn with_volumes(&self, n: u32, mounts: &[(&str, &str)]) -> NewSandbox {
        let mut new = self.new_sandbox(n, T0);
        new.row.spec.volumes = mounts
            .iter()
            .map(|(volume, path)| VolumeMount {
                volume: (*volume).into(),
                path: (*path).into(),
                read_only: *path == "/ro",
            })
            .collect();
        new
    }
}

fn new_row(inserted: Inserted) -> SandboxRow {
    match inserted {
        Inserted::New(row) => row,
        Inserted::Existing(row) => panic!("{} existed", row.id),
    }
}

#[tokio::test]
async fn a_volume_is_found_by_id_and_by_name() {
    let context = Context::new().await;
    let (store, project) = (&context.store, &context.project.id);
    store
        .saved
        .insert_volume(context.volume(1, "data"), vec![])
        .await
        .unwrap();
    let taken = store.saved.insert_volume(context.volume(2, "data"), vec![]).await;
    assert!(
        matches!(taken, Err(Error::NameTaken { what: "volume", .. })),
        "{taken:?}"
    );
    let id = volume_id(1);
    for which in ["data", id.as_str()] {
        let found = store.saved.volume(project, which).await.unwrap();
        assert_eq!(found, Some(context.volume(1, "data")), "{which}");
    }
    assert_eq!(
        store
            .saved
            .volume(&crate::support::project_id(9), "data")
            .await
            .unwrap(),
        None
    );

    store
        .saved
        .insert_volume(context.volume(3, "more"), vec![])
        .await
        .unwrap();
    let page = store.saved.volumes(project, None, 1).await.unwrap();
    assert_eq!(page.items, [context.volume(3, "more")]);
    let page = store.saved.volumes(project, page.next, 1).await.unwrap();
    assert_eq!(page.items, [context.volume(1, "data")]);
    assert_eq!(page.next, None);

    store.saved.set_volume_used(&id, 77).await.unwrap();
    store.saved.set_volume_limit(&id, 99).await.unwrap();
    store
        .saved
        .set_volume_state(&id, VolumeState::Creating)
        .await
        .unwrap();
    let row = store.saved.volume(project, "data").await.unwrap().unwrap();
    assert_eq!(
        (row.used_bytes, row.limit_bytes, row.state),
        (77, 99, VolumeState::Creating)
    );
    let missing = store.saved.set_volume_limit(&volume_id(8), 1).await;
    assert!(matches!(missing, Err(Error::NotFound { what: "volume", .. })));
    assert_eq!(store.saved.all_volumes().await.unwrap().len(), 2);
}

#[tokio::test]
async fn a_volume_outlives_sandboxes_and_no_sandbox_outlives_its_volume() {
    let context = Context::new().await;
    let (store, project) = (&context.store, &context.project.id);
    store
        .saved
        .insert_volume(context.volume(1, "data"), vec![])
        .await
        .unwrap();
    let unknown = store
        .sandboxes
        .insert_sandbox(context.with_volumes(1, &[("data", "/a"), ("nope", "/b")]))
        .await;
    assert!(
        matches!(&unknown, Err(Error::NotFound { what: "volume", id }) if id == "nope"),
        "{unknown:?}"
    );
    assert!(
        store.sandboxes.live_sandboxes().await.unwrap().is_empty(),
        "nothing was written"
    );

    let id = volume_id(1);
    let mounts = [("data", "/a"), (id.as_str(), "/ro")];
    let mut row = new_row(
        store
            .sandboxes
            .insert_sandbox(context.with_volumes(1, &mounts))
            .await
            .unwrap(),
    );
    new_row(
        store
            .sandboxes
            .insert_sandbox(context.with_volumes(2, &[("data", "/a")]))
            .await
            .unwrap(),
    );
    let attachment = |path: &str, read_only| Attachment {
        volume: id.clone(),
        path: path.into(),
        read_only,
    };
    assert_eq!(
        store.saved.attachments(&row.id).await.unwrap(),
        [attachment("/a", false), attachment("/ro", true)]
    );
    assert_eq!(
        store.saved.attached_to(&id).await.unwrap(),
        [sandbox_id(1), sandbox_id(2)]
    );
    let used = store
        .saved
        .delete_volume(project, &id, vec![context.fact(1)])
        .await;
    assert!(
        matches!(&used, Err(Error::InUse { what: "volume", by, .. }) if by.contains("sbx_")),
        "{used:?}"
    );

    // On its way out it still has processes that may write.
    let kill = Input::Kill {
        reason: EndReason::Killed,
    };
    let destroyed = |n| Input::Destroyed {
        instance: instance_id(n),
    };
    row.record = step(&row.record, kill.clone(), T0).unwrap().next;
    row = store.sandboxes.update_sandbox(row, vec![]).await.unwrap();
    assert_eq!(store.saved.attachments(&row.id).await.unwrap().len(), 2);
    row.record = step(&row.record, destroyed(1), T0).unwrap().next;
    row = store.sandboxes.update_sandbox(row, vec![]).await.unwrap();
    assert!(store.saved.attachments(&row.id).await.unwrap().is_empty());
    assert!(
        store.saved.delete_volume(project, &id, vec![]).await.is_err(),
        "the other"
    );

    let mut other = store
        .sandboxes
        .sandbox(project, &sandbox_id(2))
        .await
        .unwrap()
        .unwrap();
    for input in [kill, destroyed(2)] {
        other.record = step(&other.record, input, T0).unwrap().next;
        other = store.sandboxes.update_sandbox(other, vec![]).await.unwrap();
    }
    assert_eq!(store.ledger.last_seq().await.unwrap(), 0);
    let gone = store
        .saved
        .delete_volume(project, &id, vec![context.fact(1)])
        .await
        .unwrap();
    assert_eq!(gone, Some(context.volume(1, "data")));
    assert_eq!(store.ledger.last_seq().await.unwrap(), 1);
    let gone = store
        .saved
        .delete_volume(project, &id, vec![context.fact(1)])
        .await
        .unwrap();
    assert_eq!((gone, store.ledger.last_seq().await.unwrap()), (None, 1));
}

#[tokio::test]
async fn a_race_between_attaching_and_deleting_has_one_winner() {
    let context = Context::new().await;
    for n in 0..20 {
        let (store, name) = (&context.store, format!("v{n}"));
        store
            .saved
            .insert_volume(context.volume(n, &name), vec![])
            .await
            .unwrap();
        let id = volume_id(n);
        let (made, deleted) = tokio::join!(
            store
                .sandboxes
                .insert_sandbox(context.with_volumes(n, &[(&name, "/a")])),
            store.saved.delete_volume(&context.project.id, &id, vec![]),
        );
        assert_ne!(
            made.is_ok(),
            matches!(deleted, Ok(Some(_))),
            "{made:?} {deleted:?}"
        );
    }
}

#[tokio::test]
async fn one_that_is_not_there_yet_cannot_be_attached() {
    let context = Context::new().await;
    let creating = VolumeRow {
        state: VolumeState::Creating,
        ..context.volume(1, "data")
    };
    context.store.saved.insert_volume(creating, vec![]).await.unwrap();
    let early = context
        .store
        .sandboxes
        .insert_sandbox(context.with_volumes(1, &[("data", "/a")]))
        .await;
    assert!(matches!(early, Err(Error::NotFound { .. })), "{early:?}");
}

#[tokio::test]
async fn the_storage_of_a_project_is_summed() {
    let context = Context::new().await;
    let (store, project) = (&context.store, &context.project.id);
    assert_eq!(
        store.saved.project_storage(project).await.unwrap(),
        ProjectStorage::default()
    );
    store
        .saved
        .insert_volume(context.volume(1, "a"), vec![])
        .await
        .unwrap();
    store.saved.set_volume_used(&volume_id(1), 5).await.unwrap();
    let promised = context.volume(1, "a").limit_bytes;
    // The same content under two names is there once.
    for (n, digest) in [(1, "x"), (2, "x"), (3, "y")] {
        let artifact = ArtifactRow {
            id: ArtifactId::from_entropy(entropy(n)),
            project: project.clone(),
            name: "n".into(),
            sandbox: None,
            kind: ArtifactKind::File,
            digest: digest.into(),
            size: 100,
            created_at: T0,
            expires_at: None,
        };
        store.sandboxes.insert_artifact(artifact, vec![]).await.unwrap();
    }
    let used = store.saved.project_storage(project).await.unwrap();
    assert_eq!(
        used,
        ProjectStorage {
            snapshots_bytes: 0,
            volumes_bytes: promised,
            artifacts_bytes: 200
        }
    );
    assert_eq!(used.total(), promised + 200);
}
