//! Names of sandboxes: one living sandbox of a project has one.

use atoll_lifecycle::{Input, step};
use atoll_store::{Error, Idempotency, Inserted, NewSandbox, SandboxRow};
use atoll_types::{EndReason, SandboxName};

use crate::support::{Context, T0, project_id};

fn name(text: &str) -> SandboxName {
    text.parse().unwrap()
}

fn named(context: &Context, n: u32, text: &str) -> NewSandbox {
    let mut new = context.new_sandbox(n, T0);
    new.row.spec.name = Some(name(text));
    new
}

async fn insert(context: &Context, new: NewSandbox) -> Result<SandboxRow, Error> {
    match context.store.sandboxes.insert_sandbox(new).await? {
        Inserted::New(row) => Ok(row),
        Inserted::Existing(row) => panic!("{} existed", row.id),
    }
}

async fn ended(context: &Context, mut row: SandboxRow) -> SandboxRow {
    let reason = EndReason::Killed;
    let instance = row.record.instance.clone().unwrap();
    for input in [Input::Kill { reason }, Input::Destroyed { instance }] {
        row.record = step(&row.record, input, T0).unwrap().next;
        row = context.store.sandboxes.update_sandbox(row, vec![]).await.unwrap();
    }
    row
}

#[tokio::test]
async fn of_many_that_want_a_name_at_once_one_gets_it_and_it_is_free_again_at_its_end() {
    let context = Context::new().await;
    let mut wanting = tokio::task::JoinSet::new();
    for n in 0..8 {
        let (store, new) = (context.store.clone(), named(&context, n, "agent"));
        wanting.spawn(async move { store.sandboxes.insert_sandbox(new).await });
    }
    let outcomes = wanting.join_all().await;
    let (got, refused): (Vec<_>, Vec<_>) = outcomes.into_iter().partition(Result::is_ok);
    assert_eq!((got.len(), refused.len()), (1, 7));
    for error in refused {
        let taken = Error::NameTaken {
            what: "sandbox",
            name: "agent".into(),
        };
        assert_eq!(error.unwrap_err().to_string(), taken.to_string());
    }
    let Some(Ok(Inserted::New(first))) = got.into_iter().next() else {
        panic!("none was made");
    };
    let agent = name("agent");
    let find = || context.store.sandboxes.sandbox_named(&context.project.id, &agent);
    assert_eq!(find().await.unwrap().as_ref(), Some(&first.id));
    // In no other project.
    let elsewhere = context
        .store
        .sandboxes
        .sandbox_named(&project_id(9), &name("agent"))
        .await;
    assert_eq!(elsewhere.unwrap(), None);

    let first = ended(&context, first).await;
    assert_eq!(find().await.unwrap(), None);
    let second = insert(&context, named(&context, 100, "agent")).await.unwrap();
    assert_eq!(find().await.unwrap().as_ref(), Some(&second.id));
    // The record of the first says what it was called.
    let read = context
        .store
        .sandboxes
        .sandbox_of_any_project(&first.id)
        .await
        .unwrap();
    assert_eq!(read.unwrap().spec.name, Some(name("agent")));
}

#[tokio::test]
async fn a_name_is_changed_with_the_rest_of_the_spec_or_not_at_all() {
    let context = Context::new().await;
    let one = insert(&context, named(&context, 1, "one")).await.unwrap();
    let two = insert(&context, named(&context, 2, "two")).await.unwrap();
    let find = async |text: &str| {
        let found = context
            .store
            .sandboxes
            .sandbox_named(&context.project.id, &name(text))
            .await;
        found.unwrap()
    };
    let mut wants = two.clone();
    wants.spec.name = Some(name("one"));
    wants.spec.labels = [("a".into(), "b".into())].into();
    let refused = context
        .store
        .sandboxes
        .change_sandbox(wants, vec![])
        .await
        .unwrap_err();
    assert!(matches!(refused, Error::NameTaken { .. }), "{refused}");
    let read = context
        .store
        .sandboxes
        .sandbox_of_any_project(&two.id)
        .await
        .unwrap();
    assert_eq!(read, Some(two.clone()));

    // Its own name is not another's.
    let mut same = two;
    same.spec.labels = [("a".into(), "b".into())].into();
    let two = context
        .store
        .sandboxes
        .change_sandbox(same, vec![])
        .await
        .unwrap();
    let mut nameless = one;
    nameless.spec.name = None;
    context
        .store
        .sandboxes
        .change_sandbox(nameless, vec![])
        .await
        .unwrap();
    assert_eq!(find("one").await, None);
    let mut renamed = two;
    renamed.spec.name = Some(name("one"));
    let renamed = context
        .store
        .sandboxes
        .change_sandbox(renamed, vec![])
        .await
        .unwrap();
    assert_eq!((find("one").await, find("two").await), (Some(renamed.id), None));
}

#[tokio::test]
async fn a_request_that_comes_again_finds_its_sandbox_and_not_a_taken_name() {
    let context = Context::new().await;
    let with_key = |n| NewSandbox {
        idempotency: Some(Idempotency {
            key: "k".into(),
            request: [7; 32],
        }),
        ..named(&context, n, "agent")
    };
    let first = insert(&context, with_key(1)).await.unwrap();
    let again = context.store.sandboxes.insert_sandbox(with_key(2)).await.unwrap();
    assert_eq!(again, Inserted::Existing(first));
}
