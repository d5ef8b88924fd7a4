//! What sandboxes rest on, and snapshots that people asked for.

use atoll_lifecycle::{Input, Liveness, step};
use atoll_store::{Error, Fact, FactQuery, Inserted, NewFact, SandboxRow, SnapshotRow, Stores};
use atoll_types::{
    EndReason, Isolation, ProjectId, SandboxState, SaveKind, SnapshotOwner, TemplateId, Timestamp,
};

use crate::support::{Context, T0, instance_id, sandbox_id, snapshot_id};

impl Context {
    async fn running(&self, n: u32) -> SandboxRow {
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

    fn snapshot(&self, n: u32, owner: SnapshotOwner) -> SnapshotRow {
        SnapshotRow {
            id: snapshot_id(n),
            project: self.project.id.clone(),
            owner,
            name: None,
            kind: SaveKind::Memory,
            sandbox: Some(sandbox_id(1)),
            parent: None,
            template: TemplateId::from_entropy([1; 20]),
            isolation: Isolation::Gvisor,
            runtime: "runsc 20250101.0".into(),
            cpu_features: vec!["sse4_2".into(), "avx2".into()],
            spec: self.new_sandbox(1, T0).row.spec,
            total_bytes: 1000,
            stored_bytes: 10,
            created_at: T0.plus_millis(u64::from(n)),
        }
    }

    /// Applies an input and commits it as the application does.
    async fn apply(&self, row: SandboxRow, input: Input, at: Timestamp) -> SandboxRow {
        let transition = step(&row.record, input, at).unwrap();
        let next = SandboxRow {
            record: transition.next,
            ..row
        };
        let facts = next.facts(&transition.facts, at);
        self.store.sandboxes.update_sandbox(next, facts).await.unwrap()
    }

    async fn pausing(&self, n: u32) -> SandboxRow {
        let row = self.running(n).await;
        let (snapshot, kind) = (snapshot_id(n), SaveKind::Memory);
        self.apply(row, Input::Pause { snapshot, kind }, T0).await
    }

    async fn paused(&self, n: u32) -> SandboxRow {
        let pausing = self.pausing(n).await;
        let (row, facts) = saved(pausing, n);
        let snapshot = SnapshotRow {
            sandbox: Some(row.id.clone()),
            ..self.snapshot(n, SnapshotOwner::Sandbox)
        };
        let row = self.store.saved.commit_saved(row, snapshot, facts).await.unwrap();
        let instance = instance_id(n);
        self.apply(row, Input::Destroyed { instance }, T0).await
    }

    async fn hidden(&self, n: u32) -> bool {
        let found = self.store.saved.snapshot(&self.project.id, &snapshot_id(n)).await;
        found.unwrap().is_some()
    }
}

fn saved(row: SandboxRow, n: u32) -> (SandboxRow, Vec<NewFact>) {
    let input = Input::Saved {
        snapshot: snapshot_id(n),
        bytes: 1000,
    };
    let at = T0.plus_millis(40);
    let transition = step(&row.record, input, at).unwrap();
    let next = SandboxRow {
        record: transition.next,
        ..row
    };
    let facts = next.facts(&transition.facts, at);
    (next, facts)
}

async fn kinds(store: &Stores, context: &Context) -> Vec<String> {
    let query = FactQuery {
        project: context.project.id.clone(),
        sandbox: None,
        kinds: vec![],
        after_seq: 0,
        limit: 100,
    };
    let facts = store.ledger.facts(query).await.unwrap();
    facts.into_iter().map(|row| row.fact.kind().to_owned()).collect()
}

#[tokio::test]
async fn a_sandbox_rests_and_comes_back_with_all_that_was_written() {
    let context = Context::new().await;
    let row = context.paused(1).await;
    assert_eq!(row.record.state, SandboxState::Paused);
    let read = context
        .store
        .sandboxes
        .sandbox(&context.project.id, &row.id)
        .await
        .unwrap();
    assert_eq!(read.as_ref(), Some(&row));
    let hidden = context
        .store
        .saved
        .snapshot(&context.project.id, &snapshot_id(1))
        .await
        .unwrap()
        .unwrap();
    assert_eq!(hidden, context.snapshot(1, SnapshotOwner::Sandbox));

    let (instance, timeout_millis) = (instance_id(9), None);
    let resume = Input::Resume {
        instance: instance.clone(),
        timeout_millis,
    };
    let row = context.apply(row, resume, T0.plus_millis(50)).await;
    assert!(context.hidden(1).await, "it is not back yet");
    let row = context
        .apply(row, Input::Started { instance }, T0.plus_millis(80))
        .await;
    assert_eq!(row.record.state, SandboxState::Running);
    assert!(!context.hidden(1).await, "gone in the same transaction");
    assert_eq!(
        kinds(&context.store, &context).await,
        ["sandbox.paused", "sandbox.resumed"]
    );
}

#[tokio::test]
async fn going_to_rest_is_all_or_nothing() {
    let context = Context::new().await;
    let pausing = context.pausing(1).await;
    // Somebody else changed the row meanwhile.
    let (row, facts) = saved(pausing.clone(), 1);
    context
        .store
        .sandboxes
        .update_sandbox(pausing, vec![])
        .await
        .unwrap();
    let snapshot = context.snapshot(1, SnapshotOwner::Sandbox);
    let lost = context.store.saved.commit_saved(row, snapshot, facts).await;
    assert!(matches!(lost, Err(Error::VersionConflict(_))), "{lost:?}");
    assert!(!context.hidden(1).await);
    assert!(kinds(&context.store, &context).await.is_empty());
}

#[tokio::test]
async fn what_a_sandbox_rests_on_goes_when_it_ends_and_no_sooner() {
    let context = Context::new().await;
    let first = context.paused(1).await;
    let other = context.paused(2).await;
    let mut named = context.snapshot(3, SnapshotOwner::User);
    named.sandbox = Some(first.id.clone());
    context.store.saved.insert_snapshot(named, vec![]).await.unwrap();
    let first = context.apply(first, Input::Recover(Liveness::Gone), T0).await;
    assert!(context.hidden(1).await);
    let reason = EndReason::Killed;
    let first = context.apply(first, Input::Kill { reason }, T0).await;
    assert_eq!(first.record.state, SandboxState::Deleted);
    let left = context.store.saved.all_snapshot_ids().await.unwrap();
    assert_eq!(
        std::collections::BTreeSet::from_iter(left),
        [snapshot_id(2), snapshot_id(3)].into(),
        "the other's, and what a user asked for"
    );
    context
        .store
        .saved
        .delete_hidden_snapshot(&snapshot_id(3))
        .await
        .unwrap();
    assert!(context.hidden(3).await, "not hidden");
    context
        .store
        .saved
        .delete_hidden_snapshot(&snapshot_id(2))
        .await
        .unwrap();
    assert!(!context.hidden(2).await);
    drop(other);
}

#[tokio::test]
async fn those_that_rest_count_against_no_limit_but_are_looked_after() {
    let context = Context::new().await;
    let row = context.paused(1).await;
    context.running(2).await;
    let store = &context.store;
    assert_eq!(
        store
            .sandboxes
            .count_live_sandboxes(&context.project.id)
            .await
            .unwrap(),
        1
    );
    assert_eq!(store.sandboxes.live_sandboxes().await.unwrap().len(), 2);

    // Coming back counts.
    let resume = Input::Resume {
        instance: instance_id(9),
        timeout_millis: None,
    };
    let resuming = SandboxRow {
        record: step(&row.record, resume, T0).unwrap().next,
        ..row
    };
    let full = store
        .sandboxes
        .update_sandbox_within(resuming.clone(), vec![], 1)
        .await;
    assert!(
        matches!(full, Err(Error::QuotaExceeded { live: 1, limit: 1 })),
        "{full:?}"
    );
    store
        .sandboxes
        .update_sandbox_within(resuming, vec![], 2)
        .await
        .unwrap();
    assert_eq!(
        store
            .sandboxes
            .count_live_sandboxes(&context.project.id)
            .await
            .unwrap(),
        2
    );
}

#[tokio::test]
async fn every_state_that_has_processes_is_counted() {
    let context = Context::new().await;
    let row = context.running(1).await;
    let direct = rusqlite::Connection::open(context.path()).unwrap();
    for state in SandboxState::ALL {
        direct
            .execute(
                "UPDATE sandboxes SET state = ?2 WHERE id = ?1",
                [row.id.as_str(), state.name()],
            )
            .unwrap();
        let counted = context
            .store
            .sandboxes
            .count_live_sandboxes(&context.project.id)
            .await
            .unwrap();
        assert_eq!(counted == 1, state.holds_instance(), "{state}");
        let live = context.store.sandboxes.live_sandboxes().await.unwrap();
        assert_eq!(live.len() == 1, state.is_live(), "{state}");
    }
}

#[tokio::test]
async fn a_rest_that_was_limited_comes_due() {
    let context = Context::new().await;
    let mut new = context.new_sandbox(1, T0);
    new.row.spec.retention_millis = Some(5000);
    new.row.record.policy = atoll_lifecycle::Policy::of(&new.row.spec);
    let Inserted::New(row) = context.store.sandboxes.insert_sandbox(new).await.unwrap() else {
        panic!("existed");
    };
    let (snapshot, kind) = (snapshot_id(1), SaveKind::Memory);
    let row = context.apply(row, Input::Pause { snapshot, kind }, T0).await;
    assert_eq!(
        context.store.sandboxes.next_due().await.unwrap(),
        None,
        "it is being saved"
    );
    let (row, facts) = saved(row, 1);
    let snapshot = context.snapshot(1, SnapshotOwner::Sandbox);
    context
        .store
        .saved
        .commit_saved(row, snapshot, facts)
        .await
        .unwrap();
    assert_eq!(
        context.store.sandboxes.next_due().await.unwrap(),
        Some(T0.plus_millis(40 + 5000))
    );
}

#[tokio::test]
async fn all_copies_of_a_fork_change_or_none() {
    let context = Context::new().await;
    let mut rows = Vec::new();
    for n in 0..3 {
        let new = context.new_sandbox(n, T0);
        let Inserted::New(row) = context.store.sandboxes.insert_sandbox(new).await.unwrap() else {
            panic!("existed");
        };
        rows.push(row);
    }
    let mut changes: Vec<_> = rows.into_iter().map(|row| (row, vec![context.fact(1)])).collect();
    changes[2].0.version = 9;
    let conflict = context.store.sandboxes.update_sandboxes(changes.clone()).await;
    assert!(matches!(conflict, Err(Error::VersionConflict(_))), "{conflict:?}");
    assert_eq!(context.store.ledger.last_seq().await.unwrap(), 0);
    changes[2].0.version = 1;
    let rows = context.store.sandboxes.update_sandboxes(changes).await.unwrap();
    assert!(rows.iter().all(|row| row.version == 2));
}

#[tokio::test]
async fn names_belong_to_one_snapshot_of_a_project() {
    let context = Context::new().await;
    let store = &context.store;
    let named = |n, name: &str| SnapshotRow {
        name: Some(name.into()),
        ..context.snapshot(n, SnapshotOwner::User)
    };
    store.saved.insert_snapshot(named(1, "a"), vec![]).await.unwrap();
    let taken = store
        .saved
        .insert_snapshot(named(2, "a"), vec![context.fact(1)])
        .await;
    assert!(
        matches!(&taken, Err(Error::NameTaken { what: "snapshot", name }) if name == "a"),
        "{taken:?}"
    );
    assert_eq!(store.ledger.last_seq().await.unwrap(), 0);
    let found = store
        .saved
        .snapshot_by_name(&context.project.id, "a")
        .await
        .unwrap();
    assert_eq!(found, Some(named(1, "a")));

    let other = store
        .identity
        .ensure_project("other", crate::support::project_id(2), T0)
        .await
        .unwrap();
    let theirs = SnapshotRow {
        project: other.id.clone(),
        ..named(3, "a")
    };
    store.saved.insert_snapshot(theirs, vec![]).await.unwrap();
    assert_eq!(
        store.saved.snapshot(&other.id, &snapshot_id(1)).await.unwrap(),
        None
    );

    let gone = store
        .saved
        .delete_snapshot(&context.project.id, &snapshot_id(1), vec![])
        .await;
    assert_eq!(gone.unwrap(), Some(named(1, "a")));
    store.saved.insert_snapshot(named(4, "a"), vec![]).await.unwrap();
}

#[tokio::test]
async fn users_see_and_delete_only_what_they_asked_for() {
    let context = Context::new().await;
    let store = &context.store;
    let project = &context.project.id;
    for n in 1..=5 {
        let row = context.snapshot(n, SnapshotOwner::User);
        store.saved.insert_snapshot(row, vec![]).await.unwrap();
    }
    for (n, owner) in [(6, SnapshotOwner::Sandbox), (7, SnapshotOwner::Template)] {
        let row = context.snapshot(n, owner);
        store.saved.insert_snapshot(row, vec![]).await.unwrap();
    }
    let mut seen = vec![];
    let mut after = None;
    loop {
        let page = store.saved.snapshots(project, after, 2).await.unwrap();
        seen.extend(page.items.into_iter().map(|row| row.id));
        match page.next {
            Some(next) => after = Some(next),
            None => break,
        }
    }
    assert_eq!(seen, [5, 4, 3, 2, 1].map(snapshot_id));
    let all = store.saved.snapshots_of_sandbox(&sandbox_id(1)).await.unwrap();
    assert_eq!(all.len(), 7);
    assert_eq!(
        store.saved.latest_snapshot_of(&sandbox_id(1)).await.unwrap(),
        Some(snapshot_id(5))
    );

    let deleted = Fact::SnapshotDeleted {
        snapshot: snapshot_id(6),
    };
    let fact = NewFact {
        fact: deleted,
        ..context.fact(1)
    };
    let hidden = store
        .saved
        .delete_snapshot(project, &snapshot_id(6), vec![fact])
        .await;
    assert_eq!(hidden.unwrap(), None);
    assert_eq!(store.ledger.last_seq().await.unwrap(), 0, "nothing happened");
    let kept = store
        .saved
        .delete_snapshot(project, &snapshot_id(7), vec![])
        .await;
    assert!(
        matches!(kept, Err(Error::InUse { what: "snapshot", .. })),
        "{kept:?}"
    );

    let template = TemplateId::from_entropy([1; 20]);
    assert_eq!(
        store.saved.templates_of_snapshots().await.unwrap(),
        vec![(project.clone(), template.clone())]
    );
    assert_eq!(
        store.saved.snapshots_of_template(&template).await.unwrap().len(),
        1
    );
    let other = ProjectId::from_entropy([99; 20]);
    for (whose, kept) in [(&other, 0), (project, 1)] {
        let gone = store.saved.delete_snapshots_of_template(whose, &template).await;
        assert_eq!(gone.unwrap().len(), kept);
    }
    for n in 1..=5 {
        store
            .saved
            .delete_snapshot(project, &snapshot_id(n), vec![])
            .await
            .unwrap();
    }
    store.saved.delete_hidden_snapshot(&snapshot_id(6)).await.unwrap();
    assert!(store.saved.templates_of_snapshots().await.unwrap().is_empty());
}
