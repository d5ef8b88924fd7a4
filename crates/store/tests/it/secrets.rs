//! Secrets: names, changes, and what is never shown.

use atoll_store::{Error, SecretRow};
use atoll_types::{Injection, PortRange, SecretBinding};

use crate::support::{Context, T0, project_id, secret_id};

const SEALED: &[u8] = b"not text: \xff\x00";

impl Context {
    fn secret(&self, n: u32, name: &str) -> SecretRow {
        SecretRow {
            id: secret_id(n),
            project: self.project.id.clone(),
            name: name.into(),
            sealed: SEALED.to_vec(),
            binding: SecretBinding {
                hosts: vec!["api.example.com".into()],
                ports: vec![PortRange::new(8000, 8100).unwrap()],
                methods: vec!["GET".into()],
                paths: vec!["/v1/**".into()],
                plain_http: false,
                redact: true,
                inject: Injection::Header {
                    name: "x-api-key".into(),
                },
            },
            expires_at: Some(T0.plus_millis(100)),
            created_at: T0.plus_millis(u64::from(n)),
            rotated_at: None,
        }
    }
}

#[tokio::test]
async fn a_secret_is_found_by_name_and_by_id() {
    let context = Context::new().await;
    let (store, project) = (&context.store, &context.project.id);
    let first = context.secret(1, "github");
    store
        .sandboxes
        .insert_secret(first.clone(), vec![context.fact(1)])
        .await
        .unwrap();
    assert_eq!(store.ledger.last_seq().await.unwrap(), 1);
    let taken = store
        .sandboxes
        .insert_secret(context.secret(2, "github"), vec![context.fact(2)])
        .await;
    assert!(
        matches!(taken, Err(Error::NameTaken { what: "secret", .. })),
        "{taken:?}"
    );
    assert_eq!(store.ledger.last_seq().await.unwrap(), 1, "nothing was written");

    let by_name = store.sandboxes.secret_by_name(project, "github").await.unwrap();
    assert_eq!(by_name.as_ref(), Some(&first));
    assert_eq!(
        store.sandboxes.secret_by_id(&secret_id(1)).await.unwrap(),
        Some(first)
    );
    assert_eq!(
        store
            .sandboxes
            .secret_by_name(&project_id(9), "github")
            .await
            .unwrap(),
        None
    );
    assert_eq!(store.sandboxes.secret_by_id(&secret_id(9)).await.unwrap(), None);

    let second = context.secret(3, "other");
    store
        .sandboxes
        .insert_secret(second.clone(), vec![])
        .await
        .unwrap();
    let page = store.sandboxes.secrets(project, None, 1).await.unwrap();
    assert_eq!(page.items, [second]);
    let page = store.sandboxes.secrets(project, page.next, 1).await.unwrap();
    assert_eq!(page.items, [context.secret(1, "github")]);
    assert_eq!(page.next, None);
    assert_eq!(store.sandboxes.all_secrets().await.unwrap().len(), 2);
}

#[tokio::test]
async fn a_change_keeps_the_identity_and_leaves_its_fact() {
    let context = Context::new().await;
    let (store, project) = (&context.store, &context.project.id);
    store
        .sandboxes
        .insert_secret(context.secret(1, "github"), vec![])
        .await
        .unwrap();
    let mut rotated = context.secret(1, "github");
    rotated.sealed = b"other".to_vec();
    rotated.binding.inject = Injection::Bearer;
    rotated.rotated_at = Some(T0.plus_millis(50));
    rotated.expires_at = None;
    store
        .sandboxes
        .update_secret(rotated.clone(), vec![context.fact(1)])
        .await
        .unwrap();
    let read = store.sandboxes.secret_by_name(project, "github").await.unwrap();
    assert_eq!(read, Some(rotated.clone()));
    assert_eq!(store.ledger.last_seq().await.unwrap(), 1);

    let gone = store
        .sandboxes
        .delete_secret(project, &secret_id(1), vec![context.fact(2)])
        .await
        .unwrap();
    assert_eq!(gone, Some(rotated.clone()));
    let again = store
        .sandboxes
        .delete_secret(project, &secret_id(1), vec![context.fact(3)])
        .await
        .unwrap();
    assert_eq!((again, store.ledger.last_seq().await.unwrap()), (None, 2));
    let late = store
        .sandboxes
        .update_secret(rotated, vec![context.fact(4)])
        .await;
    assert!(
        matches!(late, Err(Error::NotFound { what: "secret", .. })),
        "{late:?}"
    );
    assert_eq!(store.ledger.last_seq().await.unwrap(), 2);
}

#[tokio::test]
async fn another_project_can_neither_change_nor_delete_it() {
    let context = Context::new().await;
    let store = &context.store;
    let secret = context.secret(1, "github");
    store
        .sandboxes
        .insert_secret(secret.clone(), vec![])
        .await
        .unwrap();
    let stranger = SecretRow {
        project: project_id(9),
        ..secret.clone()
    };
    assert!(store.sandboxes.update_secret(stranger, vec![]).await.is_err());
    let gone = store
        .sandboxes
        .delete_secret(&project_id(9), &secret.id, vec![])
        .await
        .unwrap();
    assert_eq!(gone, None);
    let own = store.sandboxes.secrets_kept(&secret.project).await.unwrap();
    assert_eq!(own, (1, secret.sealed.len() as u64));
    let of_stranger = store.sandboxes.secrets_kept(&project_id(9)).await.unwrap();
    assert_eq!(of_stranger, (0, 0));
    assert_eq!(store.sandboxes.all_secrets().await.unwrap(), [secret]);
}

#[tokio::test]
async fn not_even_the_sealed_value_is_shown() {
    let context = Context::new().await;
    let shown = format!("{:?}", context.secret(1, "github"));
    assert!(shown.contains("github"), "{shown}");
    assert!(!shown.contains("sealed") && !shown.contains("255"), "{shown}");
}
