//! What is left of a project's doings keeps to its size, and what others have left stays.

use atoll_store::{
    Fact, FactQuery, FactRow, InstanceQuery, ModelCallRow, NewFact, Scope, SpendBy, SpendQuery, UsageTotal,
    sqlite,
};
use atoll_types::{
    BudgetScope, BudgetWindow, CallOutcome, Id, KeyId, ModelCallId, ModelUsage, ProjectId, TemplateId,
    Timestamp, Usd,
};

use crate::support::{Context, T0, entropy, instance_id, project_id, sandbox_id};

const DAY: u64 = 24 * 60 * 60 * 1000;

impl Context {
    async fn second_project(&self) -> ProjectId {
        let made = self.store.identity.ensure_project("other", project_id(2), T0);
        made.await.unwrap().id
    }

    async fn facts_of(&self, project: &ProjectId, after_seq: i64) -> Vec<FactRow> {
        let query = FactQuery {
            project: project.clone(),
            sandbox: None,
            kinds: vec![],
            after_seq,
            limit: 1000,
        };
        self.store.ledger.facts(query).await.unwrap()
    }

    async fn calls_of(&self, project: &ProjectId) -> Vec<ModelCallId> {
        let page = self.store.models.model_calls(project, None, None, 1000).await;
        page.unwrap().items.into_iter().map(|call| call.id).collect()
    }

    /// As the server does it.
    async fn trim(&self, most: u64) {
        for project in self.store.ledger.oversized_ledgers(most).await.unwrap() {
            while self
                .store
                .ledger
                .trim_ledger(&project, most, T0.plus_millis(100 * DAY))
                .await
                .unwrap()
            {}
        }
    }

    /// What the counters say, beside what a count of all rows says.
    fn sizes(&self, project: &ProjectId) -> (i64, i64) {
        let direct = rusqlite::Connection::open(self.path()).unwrap();
        let counted = direct
            .query_row(
                "SELECT bytes + kept_bytes FROM ledger_sizes WHERE project = ?1",
                [project.as_str()],
                |row| row.get(0),
            )
            .unwrap_or(0);
        let there = direct
            .query_row(
                "SELECT (SELECT ifnull(sum(250 + octet_length(data)), 0) FROM facts WHERE project = ?1)
                     + (SELECT 400 * count(*) FROM instances WHERE project = ?1)
                     + (SELECT ifnull(sum(800 + 2 * octet_length(spec)), 0) FROM sandboxes
                        WHERE project = ?1 AND state IN ('deleted', 'failed'))
                     + (SELECT ifnull(sum(500 + octet_length(tags) + octet_length(asked) + octet_length(provider)
                            + octet_length(model) + ifnull(octet_length(workflow), 0) + ifnull(octet_length(run), 0)
                            + ifnull(octet_length(end_user), 0) + ifnull(octet_length(error), 0)), 0)
                        FROM model_calls WHERE project = ?1)",
                [project.as_str()],
                |row| row.get(0),
            )
            .unwrap();
        (counted, there)
    }

    /// A call that has ended, with its fact.
    async fn ended_call(&self, project: &ProjectId, n: u32, at: Timestamp, cost: i64) {
        let opened = call(project, n, at);
        let closed = ModelCallRow {
            outcome: CallOutcome::Failed,
            ended_at: Some(at),
            error: Some("provider `p`: it is out of bounds, and says so with ümlauts".into()),
            provider: "another".into(),
            cost: Usd::from_pico(cost),
            ..opened.clone()
        };
        self.store.models.open_model_call(opened).await.unwrap();
        let fact = NewFact {
            at,
            project: project.clone(),
            sandbox: None,
            fact: Fact::Other {
                kind: "model.called".into(),
                data: n.into(),
            },
        };
        assert!(
            self.store
                .models
                .close_model_call(closed, vec![fact])
                .await
                .unwrap()
        );
    }

    async fn spent(
        &self,
        project: &ProjectId,
        scope: BudgetScope,
        window: BudgetWindow,
        from: Timestamp,
    ) -> i64 {
        let spent = self
            .store
            .models
            .model_spent(project, scope, None, window, from, 100)
            .await;
        spent.unwrap().into_iter().map(|(_, spent)| spent.pico()).sum()
    }
}

fn call(project: &ProjectId, n: u32, at: Timestamp) -> ModelCallRow {
    ModelCallRow {
        id: Id::from_entropy(entropy(n)),
        project: project.clone(),
        key: Some(KeyId::from_entropy(entropy(1))),
        sandbox: None,
        workflow: None,
        run: Some(format!("run-{}", n % 2)),
        end_user: None,
        tags: vec![],
        dialect: "chat".into(),
        asked: "m".into(),
        provider: "p".into(),
        model: "m".into(),
        streamed: false,
        started_at: at,
        ended_at: None,
        outcome: CallOutcome::Open,
        attempts: 0,
        first_byte_millis: None,
        finish: None,
        error: None,
        usage: ModelUsage::default(),
        estimated: false,
        price_version: None,
        reserved: Usd::ZERO,
        cost: Usd::ZERO,
    }
}

fn decision(project: &ProjectId, n: u64) -> NewFact {
    NewFact {
        at: T0.plus_millis(n),
        project: project.clone(),
        sandbox: None,
        fact: Fact::SecretSet {
            secret: format!("secret-{n}"),
        },
    }
}

#[tokio::test]
async fn the_oldest_of_one_project_go_and_nothing_of_another() {
    let context = Context::new().await;
    let (flooded, other) = (context.project.id.clone(), context.second_project().await);
    for n in 0..300 {
        context.ended_call(&flooded, n, T0.plus_millis(n.into()), 0).await;
    }
    for n in 300..310 {
        context.ended_call(&other, n, T0, 0).await;
    }
    let (before, there) = context.sizes(&flooded);
    assert_eq!(before, there);
    assert!(before > 200_000, "{before}");
    let of_other = (context.facts_of(&other, 0).await, context.calls_of(&other).await);

    context.trim(50_000).await;
    let (size, there) = context.sizes(&flooded);
    assert_eq!(size, there);
    assert!(size <= 50_000 + 500, "{size}: and what says so");
    let (facts, calls) = (
        context.facts_of(&flooded, 0).await,
        context.calls_of(&flooded).await,
    );
    assert!((40..61).contains(&calls.len()), "{}", calls.len());
    assert_eq!(calls[0], Id::from_entropy(entropy(299)), "the newest are there");
    let called = facts
        .iter()
        .filter(|row| row.fact.kind() == "model.called")
        .count();
    assert!(called.abs_diff(calls.len()) <= 1, "as old as the calls: {called}");
    assert_eq!(
        (context.facts_of(&other, 0).await, context.calls_of(&other).await),
        of_other
    );

    // One fact says so, and whoever reads on behind what is gone finds what is left.
    let told: Vec<_> = facts
        .iter()
        .filter_map(|row| match &row.fact {
            Fact::LedgerTrimmed {
                facts,
                model_calls,
                through,
                complete_from,
                ..
            } => Some((*facts, *model_calls, *through, *complete_from)),
            _ => None,
        })
        .collect();
    let gone = 300 - u64::try_from(called).unwrap();
    let calls_gone = 300 - u64::try_from(calls.len()).unwrap();
    assert_eq!(told.len(), 1, "{told:?}");
    assert_eq!((told[0].0, told[0].1), (gone, calls_gone));
    assert_eq!(told[0].2 + 1, facts[0].seq, "nothing is left up to there");
    assert_eq!(
        context.store.ledger.complete_from(&flooded).await.unwrap(),
        Some(told[0].3)
    );
    assert_eq!(told[0].3, T0.plus_millis(gone.max(calls_gone)));
    assert_eq!(context.store.ledger.complete_from(&other).await.unwrap(), None);
    assert_eq!(context.facts_of(&flooded, 3).await, facts);

    // The next time it is another fact in the place of that one.
    for n in 400..500 {
        context.ended_call(&flooded, n, T0.plus_millis(n.into()), 0).await;
    }
    context.trim(50_000).await;
    let facts = context.facts_of(&flooded, 0).await;
    let told = facts.iter().filter(|row| row.fact.kind() == "ledger.trimmed");
    assert_eq!(told.count(), 1);
    assert_eq!(facts.last().unwrap().fact.kind(), "ledger.trimmed");
    assert_eq!(context.sizes(&flooded).0, context.sizes(&flooded).1);

    // A server that starts finds the same sizes.
    context.store.database.close().await;
    let again = sqlite::open(&context.path()).unwrap();
    assert_eq!(again.ledger.oversized_ledgers(60_000).await.unwrap(), []);
    assert_eq!(again.ledger.oversized_ledgers(1000).await.unwrap().len(), 2);
}

#[tokio::test]
async fn decisions_stay_when_others_go_and_have_a_bound_of_their_own() {
    let context = Context::new().await;
    let project = context.project.id.clone();
    let append = async |facts| context.store.ledger.append_facts(facts).await.unwrap();
    append((0..5).map(|n| decision(&project, n)).collect()).await;
    append((5..500).map(|n| context.fact(n)).collect()).await;
    context.trim(10_000).await;
    let kinds = async || -> Vec<String> {
        let facts = context.facts_of(&project, 0).await;
        facts.iter().map(|row| row.fact.kind().to_owned()).collect()
    };
    let left = kinds().await;
    assert_eq!(left[..5], ["secret.set"; 5], "{left:?}");
    assert!(left.len() < 60, "{}", left.len());
    assert_eq!(context.sizes(&project).0, context.sizes(&project).1);

    let others = left.iter().filter(|kind| *kind == "test").count();
    append((500..1000).map(|n| decision(&project, n)).collect()).await;
    context.trim(10_000).await;
    let left = kinds().await;
    assert!(left.iter().filter(|kind| *kind == "secret.set").count() < 60);
    assert_eq!(left.iter().filter(|kind| *kind == "test").count(), others);
    assert_eq!(left.iter().filter(|kind| *kind == "ledger.trimmed").count(), 1);
    assert_eq!(context.sizes(&project).0, context.sizes(&project).1);
}

/// Whoever may make one kind of decision, and no other, cannot have the others forgotten.
#[tokio::test]
async fn decisions_of_one_kind_push_out_no_other_kind() {
    let context = Context::new().await;
    let project = context.project.id.clone();
    let of = |n: u64, fact| NewFact {
        at: T0.plus_millis(n),
        project: project.clone(),
        sandbox: None,
        fact,
    };
    let template = || TemplateId::from_entropy(entropy(1));
    let shared = vec![
        of(0, Fact::TemplateShared { template: template() }),
        of(1, Fact::TemplateUnshared { template: template() }),
        of(2, Fact::TemplateDeleted { template: template() }),
    ];
    let append = async |facts| context.store.ledger.append_facts(facts).await.unwrap();
    append(shared).await;
    append((3..6).map(|n| decision(&project, n)).collect()).await;
    let policy = || Fact::NetworkPolicySet {
        preset: None,
        rules: 0,
        secrets: Vec::new(),
    };
    append((6..1000).map(|n| of(n, policy())).collect()).await;
    // And anything else.
    append((1000..2000).map(|n| context.fact(n)).collect()).await;
    context.trim(20_000).await;
    let facts = context.facts_of(&project, 0).await;
    let kinds: Vec<_> = facts.iter().map(|row| row.fact.kind()).collect();
    assert_eq!(
        kinds[..6],
        [
            "template.shared",
            "template.unshared",
            "template.deleted",
            "secret.set",
            "secret.set",
            "secret.set"
        ]
    );
    let policies = kinds.iter().filter(|kind| **kind == "network.policy_set").count();
    assert!((20..80).contains(&policies), "{policies}");
    assert_eq!(context.sizes(&project).0, context.sizes(&project).1);
}

/// Others who write wait for it.
#[tokio::test]
async fn a_few_rows_go_at_a_time() {
    let context = Context::new().await;
    let project = context.project.id.clone();
    let append = async |facts| context.store.ledger.append_facts(facts).await.unwrap();
    append((0..1000).map(|n| context.fact(n)).collect()).await;
    append((1000..2000).map(|n| decision(&project, n)).collect()).await;
    let count = || -> usize {
        let direct = rusqlite::Connection::open(context.path()).unwrap();
        direct
            .query_row("SELECT count(*) FROM facts", [], |row| row.get(0))
            .unwrap()
    };
    let (mut left, mut rounds) = (count(), 0);
    loop {
        let goes_on = context.store.ledger.trim_ledger(&project, 10_000, T0);
        let goes_on = goes_on.await.unwrap();
        let now = count();
        assert!(left - now <= 600, "{left} {now}");
        (left, rounds) = (now, rounds + 1);
        if !goes_on {
            break;
        }
    }
    assert!(left < 80 && rounds >= 4, "{left} {rounds}");
}

#[tokio::test]
async fn sums_of_usage_are_what_they_were() {
    let context = Context::new().await;
    let project = context.project.id.clone();
    let new = context.new_sandbox(1, T0);
    context.store.sandboxes.insert_sandbox(new).await.unwrap();
    let of_sandbox = |fact| NewFact {
        at: T0,
        project: project.clone(),
        sandbox: Some(sandbox_id(1)),
        fact,
    };
    let started = of_sandbox(Fact::SandboxStarted {
        instance: instance_id(1),
        took_millis: 1,
        warm: false,
    });
    let usage = |n: u64| NewFact {
        at: T0.plus_millis(n * DAY / 100),
        ..of_sandbox(Fact::Usage {
            instance: Some(instance_id(1)),
            wall_millis: 10,
            cpu_micros: 1,
            memory_byte_seconds: 2,
            disk_byte_seconds: 3,
        })
    };
    let ledger = &context.store.ledger;
    ledger.append_facts(vec![started]).await.unwrap();
    ledger.append_facts((0..250).map(usage).collect()).await.unwrap();
    let scopes = [
        Scope::Project(project.clone()),
        Scope::Sandbox(project.clone(), sandbox_id(1)),
        Scope::Instance(project.clone(), sandbox_id(1), instance_id(1)),
    ];
    let sums = async || {
        let mut sums = Vec::new();
        for scope in &scopes {
            let sum = ledger.usage_total(scope.clone(), Timestamp(0), Timestamp(i64::MAX));
            sums.push(sum.await.unwrap());
        }
        sums
    };
    let before = sums().await;
    assert_eq!(before[0].wall_millis, 2500);
    assert_eq!(before, [before[0]; 3]);
    // Who has summed a part, and who has summed all of it before it goes.
    let half = ledger
        .usage_since(&project, (UsageTotal::default(), 0))
        .await
        .unwrap();
    assert_eq!(half.0, before[0]);
    ledger
        .append_facts((250..500).map(usage).collect())
        .await
        .unwrap();
    let all = ledger.usage_since(&project, half).await.unwrap();
    assert_eq!(all.0.wall_millis, 5000);
    context.trim(20_000).await;
    assert!(context.facts_of(&project, 0).await.len() < 80);
    for known in [(UsageTotal::default(), 0), half, all] {
        assert_eq!(ledger.usage_since(&project, known).await.unwrap().0, all.0);
    }
    assert_eq!(sums().await, [all.0; 3]);
    let instances = InstanceQuery {
        project: project.clone(),
        sandbox: sandbox_id(1),
        after: None,
        limit: 10,
    };
    let instances = context.store.sandboxes.instances(instances).await.unwrap();
    assert_eq!(instances.items.len(), 1, "one that runs stays");

    // Retention takes the days that are over.
    while ledger
        .expire_facts(T0.plus_millis(100 * DAY), 1000)
        .await
        .unwrap()
        > 0
    {}
    let left = ledger.usage_since(&project, (UsageTotal::default(), 0)).await;
    assert_eq!(left.unwrap().0, UsageTotal::default());
}

#[tokio::test]
async fn budgets_count_calls_whose_rows_are_gone() {
    let context = Context::new().await;
    let project = context.project.id.clone();
    // 2024-02-29, a Thursday, and the days around it; of the last one a part goes, and a part stays.
    let leap = Timestamp(1_709_164_800_000);
    let times = [-40, -3, -1, 0, 1].map(|days: i64| Timestamp(leap.0 + days * DAY as i64));
    let mut n = 0;
    for (at, calls) in times.iter().zip([10, 10, 10, 10, 60]) {
        for _ in 0..calls {
            n += 1;
            context.ended_call(&project, n, at.plus_millis(n.into()), 1).await;
        }
    }
    let week = Timestamp(1_708_905_600_000);
    let month = Timestamp(1_709_251_200_000);
    let spent = async |scope| {
        [
            context.spent(&project, scope, BudgetWindow::Day, times[4]).await,
            context.spent(&project, scope, BudgetWindow::Week, week).await,
            context.spent(&project, scope, BudgetWindow::Month, month).await,
            context
                .spent(&project, scope, BudgetWindow::Total, Timestamp(i64::MIN))
                .await,
        ]
    };
    let expected = [60, 90, 60, 100];
    for scope in [BudgetScope::Project, BudgetScope::Key, BudgetScope::Run] {
        assert_eq!(spent(scope).await, expected, "{scope}");
    }
    context.trim(30_000).await;
    let left = context.calls_of(&project).await.len();
    assert!((10..50).contains(&left), "{left}");
    for scope in [BudgetScope::Project, BudgetScope::Key, BudgetScope::Run] {
        assert_eq!(spent(scope).await, expected, "{scope}");
    }
    // One that is open stays, and retention takes the others with the same care.
    let open = call(&project, 1000, times[0]);
    context.store.models.open_model_call(open).await.unwrap();
    let models = &context.store.models;
    assert_eq!(
        models.expire_model_calls(Timestamp(i64::MAX), 5).await.unwrap(),
        5
    );
    while models.expire_model_calls(Timestamp(i64::MAX), 5).await.unwrap() > 0 {}
    assert_eq!(
        context.calls_of(&project).await,
        [Id::from_entropy(entropy(1000))]
    );
    for scope in [BudgetScope::Project, BudgetScope::Key, BudgetScope::Run] {
        assert_eq!(spent(scope).await, expected, "{scope}");
    }
    // Reports are of rows, and say since when there are all of them.
    let query = SpendQuery {
        project: project.clone(),
        from: Timestamp(0),
        to: Timestamp(i64::MAX),
        by: SpendBy::Total,
        model: None,
        provider: None,
        sandbox: None,
        user: None,
        key: None,
    };
    assert!(
        models
            .model_spend(query)
            .await
            .unwrap()
            .iter()
            .all(|row| row.calls == 0)
    );
    let complete_from = context.store.ledger.complete_from(&project).await.unwrap();
    assert_eq!(complete_from, Some(times[4].plus_millis(n.into()).plus_millis(1)));
}

/// What is counted is about what it takes, rows with chance ids and longer texts more than these: a bound in bytes is one of the file.
#[tokio::test]
async fn the_file_takes_about_what_is_counted_and_freed_pages_are_used_again() {
    let context = Context::new().await;
    let project = context.project.id.clone();
    let pages = || -> (i64, i64) {
        let direct = rusqlite::Connection::open(context.path()).unwrap();
        let value = |name| direct.pragma_query_value(None, name, |row| row.get(0)).unwrap();
        (value("page_count"), value("freelist_count"))
    };
    let empty = pages().0 * 4096;
    for round in 0..6_u32 {
        for n in 0..300 {
            let n = round * 300 + n;
            context.ended_call(&project, n, T0.plus_millis(n.into()), 0).await;
        }
        if round == 0 {
            let (counted, file) = (context.sizes(&project).0, pages().0 * 4096 - empty);
            assert!(counted > file / 2 && counted < file * 3, "{counted} in {file}");
        }
        context.trim(200_000).await;
    }
    let (all, free) = pages();
    assert!(all * 4096 - empty < 1_200_000, "{all} pages, {free} of them free");
}
