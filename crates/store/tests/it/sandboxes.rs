//! Rows of sandboxes: versions, idempotency, paging, deadlines.

use atoll_lifecycle::{Happening, Input, Policy, step};
use atoll_store::{Error, Fact, FactQuery, Idempotency, Inserted, NewSandbox, SandboxQuery, SandboxRow};
use atoll_types::{EndReason, IdleAction, IdlePolicy, SandboxState, Timestamp};

use crate::support::{Context, T0, sandbox_id};

fn new_row(inserted: Inserted) -> SandboxRow {
    match inserted {
        Inserted::New(row) => row,
        Inserted::Existing(row) => panic!("{} existed", row.id),
    }
}

/// Kills the sandbox and removes its instance, at that time.
async fn end(context: &Context, mut row: SandboxRow, at: Timestamp) -> SandboxRow {
    let kill = Input::Kill {
        reason: EndReason::Killed,
    };
    let instance = row.record.instance.clone().unwrap();
    for input in [kill, Input::Destroyed { instance }] {
        let transition = step(&row.record, input, at).unwrap();
        row.record = transition.next;
        let facts = row.facts(&transition.facts, at);
        row = context.store.sandboxes.update_sandbox(row, facts).await.unwrap();
    }
    row
}

#[tokio::test]
async fn a_row_comes_back_as_it_was_written() {
    let context = Context::new().await;
    let mut new = context.new_sandbox(1, T0);
    new.row.spec.labels = [("a".into(), "1".into())].into();
    new.row.spec.env = [("PATH".into(), "/bin".into())].into();
    new.row.spec.idle = Some(IdlePolicy {
        after_millis: 5000,
        action: IdleAction::Kill,
    });
    new.row.record.policy = Policy::of(&new.row.spec);
    let written = new_row(context.store.sandboxes.insert_sandbox(new).await.unwrap());
    let read = context
        .store
        .sandboxes
        .sandbox(&context.project.id, &written.id)
        .await
        .unwrap();
    assert_eq!(read.as_ref(), Some(&written));
    assert_eq!(written.version, 1);

    let ended = end(&context, written, T0.plus_millis(9)).await;
    let read = context
        .store
        .sandboxes
        .sandbox_of_any_project(&ended.id)
        .await
        .unwrap()
        .unwrap();
    assert_eq!(read, ended);
    assert_eq!(read.record.state, SandboxState::Deleted);
    assert_eq!(read.record.end, Some(EndReason::Killed));

    let facts = context
        .store
        .ledger
        .facts(FactQuery {
            project: context.project.id.clone(),
            sandbox: Some(ended.id.clone()),
            kinds: vec![],
            after_seq: 0,
            limit: 10,
        })
        .await
        .unwrap();
    let facts: Vec<_> = facts.into_iter().map(|row| row.fact).collect();
    assert_eq!(
        facts,
        [Fact::SandboxEnded {
            end: EndReason::Killed
        }]
    );

    let other = crate::support::project_id(99);
    assert_eq!(
        context.store.sandboxes.sandbox(&other, &ended.id).await.unwrap(),
        None
    );
}

#[tokio::test]
async fn the_ledger_tells_a_warm_start_from_a_cold_one() {
    let context = Context::new().await;
    let row = context.new_sandbox(1, T0).row;
    let instance = row.record.instance.clone().unwrap();
    let started = Happening::Started { instance };
    let warm = row.facts(&[Happening::Created, started.clone()], T0);
    let cold = row.facts(&[started], T0.plus_millis(40));
    let start = |fact: &Fact| match fact {
        Fact::SandboxStarted {
            took_millis, warm, ..
        } => (*took_millis, *warm),
        other => panic!("{other:?}"),
    };
    assert_eq!(start(&warm[1].fact), (0, true));
    assert_eq!(start(&cold[0].fact), (40, false));
}

#[tokio::test]
async fn of_two_writers_of_one_version_one_wins_and_leaves_its_facts() {
    let context = Context::new().await;
    let row = new_row(
        context
            .store
            .sandboxes
            .insert_sandbox(context.new_sandbox(1, T0))
            .await
            .unwrap(),
    );
    let (one, two) = tokio::join!(
        context
            .store
            .sandboxes
            .update_sandbox(row.clone(), vec![context.fact(1)]),
        context
            .store
            .sandboxes
            .update_sandbox(row.clone(), vec![context.fact(2)]),
    );
    assert_eq!(one.unwrap().version, 2);
    assert!(matches!(two, Err(Error::VersionConflict(id)) if id == row.id));
    assert_eq!(context.store.ledger.last_seq().await.unwrap(), 1);

    let mut unknown = row;
    unknown.id = sandbox_id(77);
    let missing = context.store.sandboxes.update_sandbox(unknown, vec![]).await;
    assert!(matches!(missing, Err(Error::NotFound { .. })));
}

#[tokio::test]
async fn racing_requests_under_one_key_make_one_sandbox() {
    let context = Context::new().await;
    let with_key = |n: u32, request: u8| NewSandbox {
        idempotency: Some(Idempotency {
            key: "order-1".into(),
            request: [request; 32],
        }),
        facts: vec![context.fact(1)],
        ..context.new_sandbox(n, T0)
    };
    let tasks: Vec<_> = (0..20)
        .map(|n| {
            let store = context.store.clone();
            let new = with_key(n, 1);
            tokio::spawn(async move { store.sandboxes.insert_sandbox(new).await.unwrap() })
        })
        .collect();
    let mut made = vec![];
    let mut found = vec![];
    for task in tasks {
        match task.await.unwrap() {
            Inserted::New(row) => made.push(row.id),
            Inserted::Existing(row) => found.push(row.id),
        }
    }
    assert_eq!(made.len(), 1);
    assert_eq!(found.len(), 19);
    assert!(found.iter().all(|id| *id == made[0]));
    assert_eq!(
        context.store.ledger.last_seq().await.unwrap(),
        1,
        "one fact, not twenty"
    );

    let conflict = context.store.sandboxes.insert_sandbox(with_key(30, 2)).await;
    assert!(
        matches!(&conflict, Err(Error::IdempotencyConflict { sandbox, .. }) if *sandbox == made[0]),
        "{conflict:?}"
    );
    let by_key = context
        .store
        .sandboxes
        .sandbox_by_idempotency(&context.project.id, with_key(0, 1).idempotency.unwrap())
        .await
        .unwrap();
    assert_eq!(by_key.unwrap().id, made[0]);
}

#[tokio::test]
async fn what_could_not_be_started_gives_its_key_up() {
    let context = Context::new().await;
    let with_key = |n: u32| NewSandbox {
        idempotency: Some(Idempotency {
            key: "order-1".into(),
            request: [1; 32],
        }),
        ..context.new_sandbox(n, T0)
    };
    let by_key = || {
        context
            .store
            .sandboxes
            .sandbox_by_idempotency(&context.project.id, with_key(0).idempotency.unwrap())
    };
    let Inserted::New(mut first) = context.store.sandboxes.insert_sandbox(with_key(1)).await.unwrap() else {
        panic!("there was none before");
    };
    first.record.end = Some(EndReason::StartFailed("the server was restarted".into()));
    let first = context
        .store
        .sandboxes
        .update_sandbox(first, vec![])
        .await
        .unwrap();
    assert!(by_key().await.unwrap().is_none());
    let Inserted::New(second) = context.store.sandboxes.insert_sandbox(with_key(2)).await.unwrap() else {
        panic!("a creation that failed was taken for one");
    };
    assert_ne!(second.id, first.id);
    assert_eq!(by_key().await.unwrap().unwrap().id, second.id);
    assert!(matches!(
        context.store.sandboxes.insert_sandbox(with_key(3)).await.unwrap(),
        Inserted::Existing(row) if row.id == second.id
    ));
}

#[tokio::test]
async fn a_quota_holds_against_a_crowd() {
    let context = Context::new().await;
    let tasks: Vec<_> = (0..20)
        .map(|n| {
            let store = context.store.clone();
            let new = NewSandbox {
                max_live: Some(5),
                ..context.new_sandbox(n, T0)
            };
            tokio::spawn(async move { store.sandboxes.insert_sandbox(new).await })
        })
        .collect();
    let mut made = 0;
    for task in tasks {
        match task.await.unwrap() {
            Ok(_) => made += 1,
            Err(error) => assert!(
                matches!(error, Error::QuotaExceeded { live: 5, limit: 5 }),
                "{error:?}"
            ),
        }
    }
    assert_eq!(made, 5);
    assert_eq!(
        context
            .store
            .sandboxes
            .count_live_sandboxes(&context.project.id)
            .await
            .unwrap(),
        5
    );
}

#[tokio::test]
async fn pages_neither_repeat_nor_hide_rows_while_others_come_and_go() {
    let context = Context::new().await;
    // Five rows share each millisecond, so the id has to break ties.
    for n in 0..25 {
        let at = T0.plus_millis(u64::from(n) / 5);
        context
            .store
            .sandboxes
            .insert_sandbox(context.new_sandbox(n, at))
            .await
            .unwrap();
    }
    let mut query = SandboxQuery {
        project: context.project.id.clone(),
        labels: vec![],
        owner: None,
        states: vec![],
        after: None,
        limit: 4,
    };
    let mut seen = vec![];
    let mut newcomer = 1000;
    loop {
        let page = context.store.sandboxes.sandboxes(query.clone()).await.unwrap();
        assert!(page.items.len() <= 4);
        seen.extend(page.items.into_iter().map(|row| (row.record.created_at, row.id)));
        newcomer += 1;
        let newer = context.new_sandbox(newcomer, T0.plus_millis(100));
        context.store.sandboxes.insert_sandbox(newer).await.unwrap();
        match page.next {
            // As a caller hands it back.
            Some(next) => query.after = Some(next.to_string().parse().unwrap()),
            None => break,
        }
    }
    assert_eq!(seen.len(), 25);
    assert!(seen.is_sorted_by(|a, b| a > b), "newest first, each once");
}

#[tokio::test]
async fn lists_filter_by_all_labels_and_any_state() {
    let context = Context::new().await;
    for n in 0..8 {
        let mut new = context.new_sandbox(n, T0.plus_millis(u64::from(n)));
        new.row.spec.labels = [
            ("even".into(), (n % 2 == 0).to_string()),
            ("big".into(), (n >= 4).to_string()),
        ]
        .into();
        let row = new_row(context.store.sandboxes.insert_sandbox(new).await.unwrap());
        if n == 6 {
            end(&context, row, T0).await;
        }
    }
    let check = async |labels: &[(&str, &str)], states: &[SandboxState], expected: &[u32]| {
        let page = context
            .store
            .sandboxes
            .sandboxes(SandboxQuery {
                project: context.project.id.clone(),
                labels: labels.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect(),
                owner: None,
                states: states.to_vec(),
                after: None,
                limit: usize::MAX,
            })
            .await
            .unwrap();
        let ids: Vec<_> = page.items.into_iter().map(|row| row.id).collect();
        let expected: Vec<_> = expected.iter().map(|n| sandbox_id(*n)).collect();
        assert_eq!(ids, expected, "{labels:?} {states:?}");
    };
    check(&[("even", "true")], &[], &[6, 4, 2, 0]).await;
    check(&[("even", "true"), ("big", "true")], &[], &[6, 4]).await;
    check(
        &[("even", "true"), ("big", "true")],
        &[SandboxState::Running],
        &[4],
    )
    .await;
    check(
        &[("big", "true")],
        &[SandboxState::Running, SandboxState::Deleted],
        &[7, 6, 5, 4],
    )
    .await;
    check(&[("even", "' OR 1=1 --")], &[], &[]).await;
    assert_eq!(context.store.sandboxes.live_sandboxes().await.unwrap().len(), 7);
}

#[tokio::test]
async fn deadlines_come_due_in_order_and_uses_move_idle_ones() {
    let context = Context::new().await;
    let store = &context.store;
    assert_eq!(store.sandboxes.next_due().await.unwrap(), None);
    for n in 0..3u32 {
        let mut new = context.new_sandbox(n, T0);
        new.row.record.deadline = Some(T0.plus_millis(u64::from(n) * 100 + 1000));
        if n == 0 {
            new.row.spec.idle = Some(IdlePolicy {
                after_millis: 50,
                action: IdleAction::Kill,
            });
            new.row.record.policy = Policy::of(&new.row.spec);
        }
        store.sandboxes.insert_sandbox(new).await.unwrap();
    }
    let due = async |at: u64| -> Vec<_> {
        let rows = store
            .sandboxes
            .due_sandboxes(T0.plus_millis(at), 10)
            .await
            .unwrap();
        rows.into_iter().map(|row| row.id).collect()
    };
    assert_eq!(
        store.sandboxes.next_due().await.unwrap(),
        Some(T0.plus_millis(50))
    );
    assert_eq!(due(49).await, []);
    assert_eq!(due(50).await, [sandbox_id(0)]);

    // A use moves the idle end; an older use does not move it back; no version is spent on it.
    store
        .sandboxes
        .note_sandbox_used(&sandbox_id(0), T0.plus_millis(30));
    store
        .sandboxes
        .note_sandbox_used(&sandbox_id(0), T0.plus_millis(10));
    assert_eq!(due(79).await, []);
    assert_eq!(due(80).await, [sandbox_id(0)]);
    store
        .sandboxes
        .note_sandbox_used(&sandbox_id(0), T0.plus_millis(5));
    assert_eq!(due(80).await, [sandbox_id(0)]);
    let row = store
        .sandboxes
        .sandbox_of_any_project(&sandbox_id(0))
        .await
        .unwrap()
        .unwrap();
    assert_eq!((row.version, row.record.last_used_at), (1, T0.plus_millis(30)));

    // A writer that read before the use does not undo it.
    store
        .sandboxes
        .note_sandbox_used(&sandbox_id(0), T0.plus_millis(60));
    let row = store.sandboxes.update_sandbox(row, vec![]).await.unwrap();
    assert_eq!(row.record.last_used_at, T0.plus_millis(60));
    assert_eq!(due(109).await, []);

    // The timeout wins in the end, and whatever is over is no longer due.
    store
        .sandboxes
        .note_sandbox_used(&sandbox_id(0), T0.plus_millis(990));
    assert_eq!(due(1100).await, [sandbox_id(0), sandbox_id(1)]);
    end(&context, row, T0).await;
    assert_eq!(due(1100).await, [sandbox_id(1)]);
    // One that nobody knows is nothing.
    store.sandboxes.note_sandbox_used(&sandbox_id(99), T0);
    assert_eq!(due(1100).await, [sandbox_id(1)]);
}

#[tokio::test]
async fn retention_forgets_only_what_ended_long_ago() {
    let context = Context::new().await;
    for n in 0..4u32 {
        let mut new = context.new_sandbox(n, T0);
        new.row.spec.labels = [("a".into(), "b".into())].into();
        let row = new_row(context.store.sandboxes.insert_sandbox(new).await.unwrap());
        if n > 0 {
            end(&context, row, T0.plus_millis(u64::from(n))).await;
        }
    }
    let before = T0.plus_millis(3);
    assert_eq!(
        context.store.sandboxes.forget_sandboxes(before, 1).await.unwrap(),
        1
    );
    assert_eq!(
        context
            .store
            .sandboxes
            .forget_sandboxes(before, 10)
            .await
            .unwrap(),
        1
    );
    assert_eq!(
        context
            .store
            .sandboxes
            .forget_sandboxes(before, 10)
            .await
            .unwrap(),
        0
    );
    for (n, there) in [(0, true), (1, false), (2, false), (3, true)] {
        let found = context
            .store
            .sandboxes
            .sandbox_of_any_project(&sandbox_id(n))
            .await
            .unwrap();
        assert_eq!(found.is_some(), there, "{n}");
    }
}
