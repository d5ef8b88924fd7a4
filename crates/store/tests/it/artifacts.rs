//! Artifacts: versions of a name, paging, expiry, shared contents.

use atoll_store::{ArtifactKind, ArtifactRow};
use atoll_types::ArtifactId;

use crate::support::{Context, T0, entropy, project_id, sandbox_id};

fn artifact(context: &Context, n: u32, name: &str) -> ArtifactRow {
    ArtifactRow {
        id: ArtifactId::from_entropy(entropy(n)),
        project: context.project.id.clone(),
        name: name.into(),
        sandbox: Some(sandbox_id(1)),
        kind: if n.is_multiple_of(2) {
            ArtifactKind::File
        } else {
            ArtifactKind::Directory
        },
        digest: format!("{:064x}", n % 3),
        size: 1 << 40,
        created_at: T0.plus_millis(u64::from(n)),
        expires_at: (n > 0).then(|| T0.plus_millis(u64::from(n) * 10)),
    }
}

#[tokio::test]
async fn a_name_means_its_newest_version() {
    let context = Context::new().await;
    let (store, project) = (&context.store, &context.project.id);
    for n in 0..6 {
        let name = if n < 4 { "report" } else { "other" };
        store
            .sandboxes
            .insert_artifact(artifact(&context, n, name), vec![])
            .await
            .unwrap();
    }
    let newest = artifact(&context, 3, "report");
    assert_eq!(
        store
            .sandboxes
            .artifact_by_name(project, "report", T0)
            .await
            .unwrap(),
        Some(newest.clone())
    );
    assert_eq!(
        store
            .sandboxes
            .artifact_by_name(&project_id(9), "report", T0)
            .await
            .unwrap(),
        None
    );
    let oldest = artifact(&context, 0, "report");
    assert_eq!(
        store.sandboxes.artifact(project, &oldest.id).await.unwrap(),
        Some(oldest)
    );

    let mut seen = vec![];
    let mut after = None;
    loop {
        let page = store.sandboxes.artifacts(project, None, after, 4).await.unwrap();
        seen.extend(page.items.into_iter().map(|row| row.created_at));
        after = page.next;
        if after.is_none() {
            break;
        }
    }
    assert_eq!(seen.len(), 6);
    assert!(seen.is_sorted_by(|a, b| a > b));
    assert_eq!(
        store
            .sandboxes
            .artifacts(project, Some("other"), None, 10)
            .await
            .unwrap()
            .items
            .len(),
        2
    );

    let deleted = store
        .sandboxes
        .delete_artifact(project, &newest.id, vec![context.fact(1)])
        .await
        .unwrap();
    assert_eq!(deleted.as_ref(), Some(&newest));
    let again = store
        .sandboxes
        .delete_artifact(project, &newest.id, vec![context.fact(1)])
        .await
        .unwrap();
    assert_eq!(again, None);
    assert_eq!(store.ledger.last_seq().await.unwrap(), 1);
    assert_eq!(
        store
            .sandboxes
            .artifact_by_name(project, "report", T0)
            .await
            .unwrap(),
        Some(artifact(&context, 2, "report"))
    );
    // What is over but still there hides nothing: the first is kept for ever.
    assert_eq!(
        store
            .sandboxes
            .artifact_by_name(project, "report", T0.plus_millis(25))
            .await
            .unwrap(),
        Some(artifact(&context, 0, "report"))
    );
}

#[tokio::test]
async fn contents_are_in_use_until_the_last_name_is_gone() {
    let context = Context::new().await;
    let (store, project) = (&context.store, &context.project.id);
    for n in [1, 4] {
        store
            .sandboxes
            .insert_artifact(artifact(&context, n, "a"), vec![])
            .await
            .unwrap();
    }
    let digest = format!("{:064x}", 1);
    let expired = store
        .sandboxes
        .expired_artifacts(T0.plus_millis(10), 10)
        .await
        .unwrap();
    assert_eq!(expired, [artifact(&context, 1, "a")]);
    for (n, in_use_after) in [(1, true), (4, false)] {
        assert!(store.sandboxes.digest_in_use(&digest).await.unwrap());
        let id = artifact(&context, n, "a").id;
        store
            .sandboxes
            .delete_artifact(project, &id, vec![])
            .await
            .unwrap();
        assert_eq!(
            store.sandboxes.digest_in_use(&digest).await.unwrap(),
            in_use_after
        );
    }
}
