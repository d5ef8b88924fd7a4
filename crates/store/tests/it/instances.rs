//! Instances: what facts say about each time that a sandbox ran.

use atoll_lifecycle::{Input, InstanceFate, Liveness, step};
use atoll_store::{Fact, Inserted, InstanceQuery, InstanceRow, NewFact, SandboxRow, UsageTotal};
use atoll_types::{EndReason, InstanceId, SaveKind, Timestamp};

use crate::support::{Context, T0, instance_id, project_id, snapshot_id};

struct Life {
    context: Context,
    row: SandboxRow,
    now: Timestamp,
}

impl Life {
    async fn begin() -> Self {
        let context = Context::new().await;
        let mut new = context.new_sandbox(1, T0);
        let happened = [
            atoll_lifecycle::Happening::Created,
            atoll_lifecycle::Happening::Started {
                instance: new.row.record.instance.clone().unwrap(),
            },
        ];
        new.facts = new.row.facts(&happened, T0);
        let Inserted::New(row) = context.store.sandboxes.insert_sandbox(new).await.unwrap() else {
            panic!("it existed");
        };
        Self {
            context,
            row,
            now: T0,
        }
    }

    /// One second later.
    async fn step(&mut self, input: Input) {
        self.now = self.now.plus_millis(1000);
        let transition = step(&self.row.record, input, self.now).unwrap();
        let mut row = self.row.clone();
        row.record = transition.next;
        let facts = row.facts(&transition.facts, self.now);
        self.row = self
            .context
            .store
            .sandboxes
            .update_sandbox(row, facts)
            .await
            .unwrap();
    }

    async fn destroyed(&mut self) {
        let instance = self.row.record.instance.clone().unwrap();
        self.step(Input::Destroyed { instance }).await;
    }

    async fn rest(&mut self, n: u32) {
        let (snapshot, kind) = (snapshot_id(n), SaveKind::Memory);
        self.step(Input::Pause {
            snapshot: snapshot.clone(),
            kind,
        })
        .await;
        self.step(Input::Saved { snapshot, bytes: 1 }).await;
        self.destroyed().await;
    }

    async fn wake(&mut self, n: u32) {
        let instance = instance_id(n);
        self.step(Input::Resume {
            instance: instance.clone(),
            timeout_millis: None,
        })
        .await;
        self.step(Input::Started { instance }).await;
    }

    async fn used(&self, instance: &InstanceId, millis: u64) {
        let fact = NewFact {
            at: self.now,
            project: self.row.project.clone(),
            sandbox: Some(self.row.id.clone()),
            fact: Fact::Usage {
                instance: Some(instance.clone()),
                wall_millis: millis,
                cpu_micros: 2 * millis,
                memory_byte_seconds: u64::MAX,
                disk_byte_seconds: 0,
            },
        };
        self.context.store.ledger.append_facts(vec![fact]).await.unwrap();
    }

    async fn instances(&self) -> Vec<InstanceRow> {
        let query = InstanceQuery {
            project: self.row.project.clone(),
            sandbox: self.row.id.clone(),
            after: None,
            limit: 100,
        };
        self.context.store.sandboxes.instances(query).await.unwrap().items
    }

    async fn ends(&self) -> Vec<(Option<u64>, Option<String>)> {
        let since = |at: Timestamp| at.millis_since(T0) / 1000;
        let rows = self.instances().await.into_iter();
        rows.map(|row| (row.ended_at.map(since), row.reason)).collect()
    }
}

#[tokio::test]
async fn each_time_that_it_runs_is_a_row_that_ends_with_it() {
    let mut life = Life::begin().await;
    let first = life.row.record.instance.clone().unwrap();
    assert_eq!(life.ends().await, [(None, None)]);
    life.used(&first, 7).await;
    life.rest(1).await;
    assert_eq!(life.ends().await, [(Some(2), Some("paused".into()))]);
    life.wake(2).await;
    // What the first one used last is told late.
    life.used(&first, 3).await;
    life.used(&instance_id(2), 5).await;
    let rows = life.instances().await;
    let used = |wall_millis| UsageTotal {
        wall_millis,
        cpu_micros: 2 * wall_millis,
        // As much as fits.
        memory_byte_seconds: i64::MAX as u64,
        disk_byte_seconds: 0,
    };
    assert_eq!((rows[0].usage, rows[1].usage), (used(5), used(10)));
    assert_eq!((&rows[0].id, &rows[1].id), (&instance_id(2), &first));
    assert_eq!(rows[0].isolation, life.row.isolation);

    life.step(Input::Kill {
        reason: EndReason::Killed,
    })
    .await;
    life.destroyed().await;
    let expected = [(Some(7), Some("killed".into())), (Some(2), Some("paused".into()))];
    assert_eq!(life.ends().await, expected);

    // Another project sees nothing, and pages end.
    let query = |project, limit, after| InstanceQuery {
        project,
        sandbox: life.row.id.clone(),
        after,
        limit,
    };
    let store = &life.context.store;
    let others = store
        .sandboxes
        .instances(query(project_id(9), 10, None))
        .await
        .unwrap();
    assert_eq!(others.items, []);
    let own = life.row.project.clone();
    let page = store
        .sandboxes
        .instances(query(own.clone(), 1, None))
        .await
        .unwrap();
    let next = store.sandboxes.instances(query(own, 1, page.next)).await.unwrap();
    assert_eq!((next.items[0].id.clone(), next.next), (first, None));
}

#[tokio::test]
async fn what_was_open_when_the_server_died_goes_on_or_is_lost() {
    let mut life = Life::begin().await;
    life.step(Input::Recover(Liveness::Alive)).await;
    assert_eq!(life.ends().await, [(None, None)]);
    // Killed in the middle of a save, which did not work out.
    life.step(Input::Pause {
        snapshot: snapshot_id(1),
        kind: SaveKind::Memory,
    })
    .await;
    life.step(Input::Recover(Liveness::Alive)).await;
    assert_eq!(life.ends().await, [(None, None)]);
    life.step(Input::Recover(Liveness::Gone)).await;
    life.destroyed().await;
    assert_eq!(life.ends().await, [(Some(5), Some("lost".into()))]);
}

#[tokio::test]
async fn one_that_never_ran_is_none_and_retention_takes_what_ended() {
    let mut life = Life::begin().await;
    life.rest(1).await;
    // A resume that fails is no time that it ran.
    let instance = instance_id(2);
    life.step(Input::Resume {
        instance: instance.clone(),
        timeout_millis: None,
    })
    .await;
    life.step(Input::ResumeFailed {
        instance,
        why: "x".into(),
    })
    .await;
    life.destroyed().await;
    assert_eq!(life.ends().await.len(), 1);
    life.wake(3).await;
    life.step(Input::Ended {
        instance: instance_id(3),
        fate: InstanceFate::OutOfMemory,
    })
    .await;
    life.destroyed().await;
    let reasons =
        |ends: Vec<(_, Option<String>)>| ends.into_iter().map(|(_, why)| why.unwrap()).collect::<Vec<_>>();
    assert_eq!(reasons(life.ends().await), ["out_of_memory", "paused"]);

    let store = &life.context.store;
    // Its own record is forgotten sooner.
    store
        .sandboxes
        .forget_sandboxes(Timestamp(i64::MAX), 10)
        .await
        .unwrap();
    assert_eq!(life.ends().await.len(), 2);
    store
        .ledger
        .expire_facts(T0.plus_millis(3000), 100)
        .await
        .unwrap();
    assert_eq!(reasons(life.ends().await), ["out_of_memory"]);
    store.ledger.expire_facts(Timestamp(i64::MAX), 100).await.unwrap();
    assert_eq!(life.ends().await, []);
}
