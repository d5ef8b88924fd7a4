//! Projects and keys; and many writers at once.

use atoll_identity::{NewKey, Role, Scope};
use atoll_store::FactQuery;
use atoll_types::{KeyId, Timestamp};

use crate::support::{Context, T0, project_id, sandbox_id};

#[tokio::test]
async fn a_project_is_made_once() {
    let context = Context::new().await;
    let again = context
        .store
        .identity
        .ensure_project("default", project_id(2), T0)
        .await
        .unwrap();
    assert_eq!(again, context.project);
    let other = context
        .store
        .identity
        .ensure_project("other", project_id(3), T0)
        .await
        .unwrap();
    assert_eq!(
        context.store.identity.projects().await.unwrap(),
        [context.project.clone(), other.clone()]
    );
}

#[tokio::test]
async fn a_project_has_so_many_keys_and_remembers_as_many_that_are_over() {
    let context = Context::new().await;
    let store = &context.store;
    let insert = async |n: u8| {
        let key = NewKey {
            id: KeyId::from_entropy([n; 20]),
            project: context.project.id.clone(),
            name: format!("key {n}"),
            hash: [n; 32],
            prefix: "atoll_ab".into(),
            role: Role::Member,
            scopes: Vec::new(),
            made_by: None,
            created_at: Timestamp(i64::from(n)),
            // One expires by itself when the fourth is made.
            expires_at: (n == 1).then_some(Timestamp(4)),
        };
        store.identity.insert_key(key, 2).await.unwrap()
    };
    assert!(insert(1).await.is_some() && insert(2).await.is_some());
    assert_eq!(insert(3).await, None);
    let mut last = insert(4).await.unwrap();
    for n in 5..10 {
        assert_eq!(insert(n).await, None);
        let revoked = store
            .identity
            .revoke_key(&context.project.id, &last.id, Timestamp(i64::from(n)));
        assert!(revoked.await.unwrap().is_some());
        last = insert(n).await.unwrap();
    }
    let kept = store
        .identity
        .keys(&context.project.id, None, 100)
        .await
        .unwrap()
        .items;
    let names: Vec<_> = kept.iter().map(|key| key.name.as_str()).collect();
    assert_eq!(names, ["key 9", "key 8", "key 7", "key 2"]);
}

#[tokio::test]
async fn a_revoked_key_is_not_found_any_more() {
    let context = Context::new().await;
    let store = &context.store;
    let key = |n: u8| NewKey {
        id: KeyId::from_entropy([n; 20]),
        project: context.project.id.clone(),
        name: format!("key {n}"),
        hash: [n; 32],
        prefix: "atoll_ab".into(),
        role: Role::Viewer,
        scopes: vec![Scope::Ledger, Scope::Sandbox(sandbox_id(n.into()))],
        made_by: None,
        created_at: T0,
        expires_at: Some(Timestamp(i64::from(n))),
    };
    let first = store.identity.insert_key(key(1), 10).await.unwrap().unwrap();
    let second = NewKey {
        made_by: Some(first.id.clone()),
        ..key(2)
    };
    store.identity.insert_key(second, 10).await.unwrap().unwrap();
    let second = store.identity.find_active_key([2; 32]).await.unwrap().unwrap();
    assert_eq!(
        (&first.made_by, &second.made_by),
        (&None, &Some(first.id.clone()))
    );
    let same_secret = NewKey {
        id: KeyId::from_entropy([3; 20]),
        ..key(1)
    };
    assert!(store.identity.insert_key(same_secret, 10).await.is_err());
    assert_eq!(
        store.identity.find_active_key([1; 32]).await.unwrap(),
        Some(first.clone())
    );
    assert_eq!(store.identity.find_active_key([9; 32]).await.unwrap(), None);

    store.identity.note_key_used(&first.id, Timestamp(20));
    store.identity.note_key_used(&first.id, Timestamp(10));
    // Written along with whatever is written next.
    let same = store
        .identity
        .ensure_project("default", context.project.id.clone(), T0);
    assert_eq!(same.await.unwrap(), context.project);
    let used = store.identity.find_active_key([1; 32]).await.unwrap().unwrap();
    assert_eq!(used.last_used_at, Some(Timestamp(20)));

    let project = &context.project.id;
    for _ in 0..2 {
        let revoked = store
            .identity
            .revoke_key(project, &first.id, Timestamp(30))
            .await
            .unwrap()
            .unwrap();
        assert_eq!(revoked.revoked_at, Some(Timestamp(30)));
    }
    assert_eq!(
        store.ledger.last_seq().await.unwrap(),
        3,
        "revoking twice is one fact"
    );
    assert_eq!(store.identity.find_active_key([1; 32]).await.unwrap(), None);
    let kept = store.identity.keys(project, None, 100).await.unwrap();
    assert_eq!(kept.items.len(), 2);
    let foreign = store.identity.revoke_key(&project_id(9), &first.id, T0).await;
    assert_eq!(foreign.unwrap(), None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_writers_and_readers_at_once_lose_nothing() {
    let context = Context::new().await;
    let mut tasks = vec![];
    for writer in 0..50 {
        let store = context.store.clone();
        let facts: Vec<_> = (0..20).map(|n| context.fact(writer * 100 + n)).collect();
        let project = context.project.id.clone();
        tasks.push(tokio::spawn(async move {
            for fact in facts {
                store.ledger.append_facts(vec![fact]).await.unwrap();
                // What was acknowledged can be read.
                let read = store
                    .ledger
                    .facts(FactQuery {
                        project: project.clone(),
                        sandbox: None,
                        kinds: vec![],
                        after_seq: 0,
                        limit: 1,
                    })
                    .await
                    .unwrap();
                assert_eq!(read.len(), 1);
            }
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!(context.store.ledger.last_seq().await.unwrap(), 1000);
}
