//! The ledger: order, immutability, unknown kinds, sums.

use atoll_store::{
    CommandEnd, Fact, FactQuery, ModelCallFact, NetworkDecision, NewFact, Scope, SpendBy, SpendQuery,
    UsageTotal,
};
use atoll_types::{
    ArtifactId, CallOutcome, CommandId, EndReason, InstanceId, Isolation, KeyId, ModelCallId, ModelUsage,
    Preset, Resources, SaveKind, TemplateId, Timestamp, Usd,
};

use crate::support::{Context, T0, instance_id, sandbox_id, snapshot_id, volume_id};

fn everything(context: &Context) -> FactQuery {
    FactQuery {
        project: context.project.id.clone(),
        sandbox: None,
        kinds: vec![],
        after_seq: 0,
        limit: 1000,
    }
}

fn one_of_each() -> Vec<Fact> {
    vec![
        Fact::SandboxCreated {
            template: TemplateId::from_entropy([1; 20]),
            isolation: Isolation::Gvisor,
            resources: Resources::default(),
        },
        Fact::SandboxStarted {
            instance: InstanceId::from_entropy([2; 20]),
            took_millis: 9,
            warm: true,
        },
        Fact::SandboxEnded {
            end: EndReason::TimedOut,
        },
        Fact::SandboxFailed {
            end: EndReason::GuestDied("signal 9".into()),
        },
        Fact::SandboxExtended {
            deadline: Some(Timestamp(5)),
        },
        Fact::SandboxPaused {
            kind: SaveKind::Memory,
            snapshot: snapshot_id(1),
            bytes: 1,
            took_millis: 2,
        },
        Fact::SandboxStopped {
            snapshot: snapshot_id(1),
            bytes: 1,
            took_millis: 2,
        },
        Fact::SandboxSaveFailed { why: "full".into() },
        Fact::SandboxResumed {
            instance: instance_id(1),
            took_millis: 2,
        },
        Fact::SandboxResumeFailed { why: "full".into() },
        Fact::SandboxForked { from: sandbox_id(1) },
        Fact::HookFailed { why: "exit 1".into() },
        Fact::SnapshotCreated {
            snapshot: snapshot_id(1),
            kind: SaveKind::Filesystem,
            total_bytes: 3,
            stored_bytes: 2,
        },
        Fact::SnapshotDeleted {
            snapshot: snapshot_id(1),
        },
        Fact::VolumeCreated {
            volume: volume_id(1),
            name: "data".into(),
            limit_bytes: 9,
        },
        Fact::VolumeDeleted {
            volume: volume_id(1),
            name: "data".into(),
        },
        Fact::CommandStarted {
            command: CommandId::from_entropy([3; 20]),
            program: "python3".into(),
            arguments: 3,
            argument_bytes: 40,
            background: false,
        },
        Fact::CommandExited {
            command: CommandId::from_entropy([3; 20]),
            state: CommandEnd::Exited,
            exit_code: Some(-1),
            signal: None,
            duration_millis: 12,
            bytes_in: 0,
            bytes_out: u64::MAX,
        },
        Fact::Usage {
            instance: None,
            wall_millis: 1,
            cpu_micros: 2,
            memory_byte_seconds: 3,
            disk_byte_seconds: 4,
        },
        Fact::ArtifactSaved {
            artifact: ArtifactId::from_entropy([4; 20]),
            name: "report".into(),
            digest: "00".into(),
            size: 5,
        },
        Fact::ArtifactDeleted {
            artifact: ArtifactId::from_entropy([4; 20]),
            name: "report".into(),
            expired: true,
        },
        Fact::KeyCreated {
            key: KeyId::from_entropy([5; 20]),
            name: "first".into(),
            role: Some("member".into()),
            scopes: vec!["ledger".into()],
            expires_at: Some(T0),
            made_by: Some(KeyId::from_entropy([6; 20])),
        },
        Fact::KeyRevoked {
            key: KeyId::from_entropy([5; 20]),
        },
        Fact::TemplateBuilt {
            template: TemplateId::from_entropy([1; 20]),
            digest: "00".into(),
            size: 6,
        },
        Fact::TemplateDeleted {
            template: TemplateId::from_entropy([1; 20]),
        },
        Fact::TemplateShared {
            template: TemplateId::from_entropy([1; 20]),
        },
        Fact::TemplateUnshared {
            template: TemplateId::from_entropy([1; 20]),
        },
        Fact::NetworkAllowed(NetworkDecision {
            protocol: "tcp".into(),
            host: Some("pypi.org".into()),
            address: Some("2001:db8::1".into()),
            port: 443,
            rule: "preset package-registries: pypi.org".into(),
            reason: "a rule allows it".into(),
            count: 2,
            bytes_up: 3,
            bytes_down: 4,
        }),
        Fact::NetworkDenied(NetworkDecision {
            protocol: "dns".into(),
            host: Some("example.com".into()),
            address: None,
            port: 53,
            rule: "default".into(),
            reason: "no rule allows it".into(),
            count: 1,
            bytes_up: 0,
            bytes_down: 0,
        }),
        Fact::NetworkPolicySet {
            preset: Some(Preset::PackageRegistries),
            rules: 2,
            secrets: vec!["github".into()],
        },
        Fact::SecretSet {
            secret: "github".into(),
        },
        Fact::SecretRotated {
            secret: "github".into(),
        },
        Fact::SecretDeleted {
            secret: "github".into(),
        },
        Fact::SecretUsed {
            secret: "github".into(),
            host: "api.github.com".into(),
            port: 443,
            count: 7,
        },
        Fact::ModelCalled(ModelCallFact {
            call: ModelCallId::from_entropy([1; 20]),
            asked: "smart".into(),
            provider: "anthropic".into(),
            model: "claude".into(),
            outcome: CallOutcome::Done,
            usage: ModelUsage {
                input: 3,
                output: 4,
                ..ModelUsage::default()
            },
            estimated: false,
            cost: Usd::from_pico(1_500_000),
            price_version: Some("v1".into()),
            duration_millis: 12,
            key: None,
            workflow: None,
            run: Some("r".into()),
        }),
        Fact::ModelRefused {
            model: "smart".into(),
            code: "budget".into(),
            reason: "spent".into(),
            count: 3,
        },
        Fact::LedgerTrimmed {
            facts: 1,
            model_calls: 2,
            instances: 3,
            sandboxes: 4,
            through: 5,
            complete_from: T0,
        },
        Fact::BudgetAlert {
            budget: "daily".into(),
            subject: "r".into(),
            spent: Usd::from_pico(8),
            limit: Usd::from_pico(10),
        },
        Fact::BudgetSet {
            budget: "daily".into(),
            limit: Usd::from_pico(10),
        },
        Fact::BudgetDeleted {
            budget: "daily".into(),
        },
        Fact::ProviderSet {
            provider: "anthropic".into(),
        },
        Fact::ProviderDeleted {
            provider: "anthropic".into(),
        },
        Fact::ModelKeyCreated {
            key: KeyId::from_entropy([1; 20]),
            name: "k".into(),
        },
        Fact::ModelKeyRevoked {
            key: KeyId::from_entropy([1; 20]),
        },
        Fact::ApprovalAnswered {
            approval: "apr_x".into(),
            namespace: "default".into(),
            workflow: "w".into(),
            run: "r".into(),
            digest: "sha256:0".into(),
            granted: true,
            by: "Ada".into(),
            key: Some(KeyId::from_entropy([1; 20])),
        },
        Fact::Other {
            kind: "egress.denied".into(),
            data: serde_json::json!({"host": "example.com"}),
        },
        // A known kind in a form that only a newer version understands.
        Fact::Other {
            kind: "key.revoked".into(),
            data: serde_json::json!({"keys": ["a", "b"]}),
        },
    ]
}

#[tokio::test]
async fn every_fact_comes_back_as_it_was_and_in_order() {
    let context = Context::new().await;
    let facts = one_of_each();
    let new = |fact: &Fact| NewFact {
        at: T0,
        project: context.project.id.clone(),
        sandbox: Some(sandbox_id(1)),
        fact: fact.clone(),
    };
    context
        .store
        .ledger
        .append_facts(facts.iter().map(new).collect())
        .await
        .unwrap();
    let read = context.store.ledger.facts(everything(&context)).await.unwrap();
    assert!(read.is_sorted_by(|a, b| a.seq < b.seq));
    for (row, fact) in read.iter().zip(&facts) {
        assert_eq!(row.fact, *fact);
        // The name in the column is the name in the JSON.
        let json = serde_json::to_value(fact).unwrap();
        assert_eq!(json["kind"], fact.kind());
        assert_eq!(serde_json::from_value::<Fact>(json).unwrap(), *fact);
    }
    assert_eq!(read.len(), facts.len());

    let some = FactQuery {
        kinds: vec!["usage".into(), "egress.denied".into()],
        sandbox: Some(sandbox_id(1)),
        ..everything(&context)
    };
    assert_eq!(context.store.ledger.facts(some).await.unwrap().len(), 2);
    let later = FactQuery {
        after_seq: read[3].seq,
        limit: 2,
        ..everything(&context)
    };
    assert_eq!(context.store.ledger.facts(later).await.unwrap(), read[4..6]);
    let elsewhere = FactQuery {
        sandbox: Some(sandbox_id(2)),
        ..everything(&context)
    };
    assert_eq!(context.store.ledger.facts(elsewhere).await.unwrap(), []);
}

/// A busy sandbox has a long ledger: who asks for the rare ones does not have all of it read at once.
#[tokio::test]
async fn rare_facts_are_looked_for_in_parts() {
    let context = Context::new().await;
    let usage = |n: u64| NewFact {
        at: T0,
        project: context.project.id.clone(),
        sandbox: Some(sandbox_id(1)),
        fact: Fact::SecretUsed {
            secret: "s".into(),
            host: "h".into(),
            port: 443,
            count: n,
        },
    };
    let rare = NewFact {
        fact: Fact::SecretDeleted { secret: "s".into() },
        ..usage(0)
    };
    let many = |count: u64| (0..count).map(usage).collect::<Vec<_>>();
    context.store.ledger.append_facts(many(24_000)).await.unwrap();
    context
        .store
        .ledger
        .append_facts(vec![rare.clone()])
        .await
        .unwrap();
    context.store.ledger.append_facts(many(10)).await.unwrap();
    let query = |after_seq| FactQuery {
        sandbox: Some(sandbox_id(1)),
        kinds: vec!["secret.deleted".into()],
        after_seq,
        limit: 10,
        ..everything(&context)
    };
    let (mut found, mut after, mut pages) = (Vec::new(), Some(0), 0);
    while let Some(after_seq) = after {
        let page = context.store.ledger.facts_page(query(after_seq)).await.unwrap();
        assert!(
            page.next.is_none_or(|next| next == after_seq + 10_000),
            "{page:?}"
        );
        found.extend(page.rows);
        (after, pages) = (page.next, pages + 1);
    }
    assert_eq!(pages, 3);
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].fact, rare.fact);

    // A page that is full says where it ended, and a stranger is told nothing of how long the ledger is.
    let page = context
        .store
        .ledger
        .facts_page(FactQuery {
            limit: 1,
            ..query(20_000)
        })
        .await;
    let page = page.unwrap();
    assert_eq!((page.rows.len(), page.next), (1, Some(24_001)));
    let stranger = FactQuery {
        project: crate::support::project_id(9),
        ..query(0)
    };
    let page = context.store.ledger.facts_page(stranger).await.unwrap();
    assert_eq!((page.rows.len(), page.next), (0, None));
}

#[tokio::test]
async fn the_database_itself_refuses_to_change_a_fact() {
    let context = Context::new().await;
    context
        .store
        .ledger
        .append_facts((0..10).map(|n| context.fact(n)).collect())
        .await
        .unwrap();
    // As somebody with the file and a shell would try.
    let direct = rusqlite::Connection::open(context.path()).unwrap();
    for sql in [
        "UPDATE facts SET data = '{}' WHERE seq = 1",
        "DELETE FROM facts WHERE seq = 1",
        "DELETE FROM facts",
        "INSERT OR REPLACE INTO facts (seq, at, project, kind, data) VALUES (1, 0, 'x', 'x', '0')",
    ] {
        let error = direct.execute(sql, []).unwrap_err().to_string();
        assert!(error.contains("append-only"), "{sql}: {error}");
    }
    assert_eq!(
        context
            .store
            .ledger
            .facts(everything(&context))
            .await
            .unwrap()
            .len(),
        10
    );

    // Retention is the documented way, and takes only what is old.
    assert_eq!(
        context
            .store
            .ledger
            .expire_facts(T0.plus_millis(4), 3)
            .await
            .unwrap(),
        3
    );
    assert_eq!(
        context
            .store
            .ledger
            .expire_facts(T0.plus_millis(4), 3)
            .await
            .unwrap(),
        1
    );
    assert_eq!(
        context
            .store
            .ledger
            .expire_facts(T0.plus_millis(4), 3)
            .await
            .unwrap(),
        0
    );
    assert_eq!(
        context.store.ledger.facts(everything(&context)).await.unwrap()[0].seq,
        5
    );
    assert!(
        direct.execute("DELETE FROM facts", []).is_err(),
        "the way is shut again"
    );

    // A number is never given twice, even when the newest facts are gone.
    context
        .store
        .ledger
        .expire_facts(T0.plus_millis(1000), 100)
        .await
        .unwrap();
    context
        .store
        .ledger
        .append_facts(vec![context.fact(1)])
        .await
        .unwrap();
    assert_eq!(context.store.ledger.last_seq().await.unwrap(), 11);
}

#[tokio::test]
async fn usage_is_summed_by_scope_and_time_without_overflow() {
    let context = Context::new().await;
    let usage = |at: u64, n: u32, memory_byte_seconds: u64| NewFact {
        at: T0.plus_millis(at),
        project: context.project.id.clone(),
        sandbox: Some(sandbox_id(n)),
        fact: Fact::Usage {
            instance: None,
            wall_millis: 10,
            cpu_micros: 20,
            memory_byte_seconds,
            disk_byte_seconds: 1 << 30,
        },
    };
    let huge = i64::MAX as u64;
    context
        .store
        .ledger
        .append_facts(vec![
            usage(0, 1, 5),
            usage(1, 1, 6),
            usage(1, 2, 100),
            usage(2, 2, huge),
            usage(3, 2, huge),
            context.fact(1),
        ])
        .await
        .unwrap();
    let sum = async |scope: Scope, from: u64, to: u64| {
        let (from, to) = (T0.plus_millis(from), T0.plus_millis(to));
        context.store.ledger.usage_total(scope, from, to).await.unwrap()
    };
    let project = || Scope::Project(context.project.id.clone());
    let sandbox = |n| Scope::Sandbox(context.project.id.clone(), sandbox_id(n));
    assert_eq!(
        sum(sandbox(1), 0, 10).await,
        UsageTotal {
            wall_millis: 20,
            cpu_micros: 40,
            memory_byte_seconds: 11,
            disk_byte_seconds: 2 << 30,
        }
    );
    assert_eq!(sum(sandbox(1), 1, 2).await.memory_byte_seconds, 6);
    assert_eq!(sum(project(), 0, 2).await.memory_byte_seconds, 111);
    assert_eq!(sum(sandbox(2), 2, 4).await.memory_byte_seconds, 2 * huge);
    assert_eq!(
        sum(project(), 0, 10).await.memory_byte_seconds,
        u64::MAX,
        "saturates"
    );
    assert_eq!(sum(sandbox(3), 0, 10).await, UsageTotal::default());

    // Once summed, only what came later is.
    let project = &context.project.id;
    let since = async |known| context.store.ledger.usage_since(project, known).await.unwrap();
    let (all, seen) = since((UsageTotal::default(), 0)).await;
    assert_eq!((all.wall_millis, all.memory_byte_seconds), (50, u64::MAX));
    let known = (UsageTotal::default(), seen);
    assert_eq!(since(known).await, known);
    context
        .store
        .ledger
        .append_facts(vec![context.fact(2), usage(4, 1, 7)])
        .await
        .unwrap();
    let (later, last) = since(known).await;
    assert_eq!((later.wall_millis, later.memory_byte_seconds), (10, 7));
    assert_eq!(last, seen + 2);
    assert_eq!(all.plus(later).wall_millis, 60);

    // The same sums in the groups of what models cost.
    let query = |by| SpendQuery {
        project: context.project.id.clone(),
        from: T0,
        to: T0.plus_millis(2),
        by,
        model: None,
        provider: None,
        sandbox: None,
        user: None,
        key: None,
    };
    let beside = context
        .store
        .ledger
        .compute_beside(query(SpendBy::Sandbox))
        .await
        .unwrap();
    let memory: Vec<_> = beside
        .iter()
        .map(|(group, used)| (group.as_str(), used.memory_byte_seconds))
        .collect();
    let (one, two) = (sandbox_id(1), sandbox_id(2));
    assert_eq!(memory, [(one.as_str(), 11), (two.as_str(), 100)]);
    let total = context
        .store
        .ledger
        .compute_beside(query(SpendBy::Total))
        .await
        .unwrap();
    assert_eq!((total.len(), total[0].1.memory_byte_seconds), (1, 111));
    for (by, model) in [(SpendBy::Model, None), (SpendBy::Total, Some("m".to_owned()))] {
        let of_calls = SpendQuery { model, ..query(by) };
        assert_eq!(context.store.ledger.compute_beside(of_calls).await.unwrap(), []);
    }
}

#[tokio::test]
async fn commands_are_open_from_their_start_to_their_end() {
    let context = Context::new().await;
    let command = |n: u8| CommandId::from_entropy([n; 20]);
    let started = |n: u8| Fact::CommandStarted {
        command: command(n),
        program: "true".into(),
        arguments: 0,
        argument_bytes: 4,
        background: true,
    };
    let exited = |n: u8| Fact::CommandExited {
        command: command(n),
        state: CommandEnd::TimedOut,
        exit_code: None,
        signal: None,
        duration_millis: 1,
        bytes_in: 0,
        bytes_out: 0,
    };
    let of = |sandbox: u32, at: u64, fact: Fact| NewFact {
        at: T0.plus_millis(at),
        project: context.project.id.clone(),
        sandbox: Some(sandbox_id(sandbox)),
        fact,
    };
    let facts = vec![
        of(1, 0, started(1)),
        of(1, 5, started(2)),
        of(1, 6, started(3)),
        of(1, 7, exited(3)),
        of(1, 8, exited(1)),
        of(2, 9, started(4)),
    ];
    context.store.ledger.append_facts(facts).await.unwrap();
    let open = context.store.ledger.open_commands(&sandbox_id(1)).await.unwrap();
    assert_eq!(open, [(command(2), T0.plus_millis(5))]);
    assert_eq!(
        context.store.ledger.open_commands(&sandbox_id(3)).await.unwrap(),
        []
    );
}

#[tokio::test]
async fn growth_is_told_to_those_whose_facts_are_new() {
    let context = Context::new().await;
    let other = atoll_types::ProjectId::from_entropy([7; 20]);
    let ledger = &context.store.ledger;
    let mut all = ledger.ledger_growth(None);
    let mut own = ledger.ledger_growth(Some(&context.project.id));
    let mut others = ledger.ledger_growth(Some(&other));
    ledger.append_facts(vec![context.fact(1)]).await.unwrap();
    own.changed().await.unwrap();
    all.changed().await.unwrap();
    let seq = ledger.last_seq().await.unwrap();
    assert_eq!((*own.borrow_and_update(), *all.borrow_and_update()), (seq, seq));
    assert!(!others.has_changed().unwrap(), "nothing of it is new");
    // Whoever comes later knows how far the ledger is, and hears of both their own and, in one commit, of others'.
    let late = ledger.ledger_growth(Some(&other));
    assert!(*late.borrow() <= seq);
    let foreign = NewFact {
        project: other.clone(),
        ..context.fact(2)
    };
    ledger.append_facts(vec![foreign, context.fact(3)]).await.unwrap();
    others.changed().await.unwrap();
    own.changed().await.unwrap();
    all.changed().await.unwrap();
    let seq = ledger.last_seq().await.unwrap();
    assert_eq!((*own.borrow(), *others.borrow(), *all.borrow()), (seq, seq, seq));
    assert_eq!(*late.borrow(), seq);
}
