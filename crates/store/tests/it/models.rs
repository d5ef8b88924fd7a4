//! The model gateway's rows: names, what is kept, what is summed, and what a crash leaves.

use std::sync::Arc;

use atoll_store::{
    Error, Fact, ModelBodies, ModelBudgetRow, ModelCallFact, ModelCallRow, ModelKeyRow, ModelProviderRow,
    ModelRates, ModelRouteRow, ModelTarget, NewFact, SpendBy, SpendQuery, Stores,
};
use atoll_types::{
    BudgetId, BudgetScope, BudgetWindow, CallOutcome, Id, KeyId, ModelCallId, ModelUsage, ProjectId,
    ProviderKind, Timestamp, Usd,
};

use crate::support::{Context, T0, entropy, sandbox_id, secret_id};

fn call_id(n: u32) -> ModelCallId {
    Id::from_entropy(entropy(n))
}

fn key_id(n: u32) -> KeyId {
    Id::from_entropy(entropy(n))
}

impl Context {
    fn provider(&self, n: u32, name: &str) -> ModelProviderRow {
        ModelProviderRow {
            id: secret_id(n),
            project: self.project.id.clone(),
            name: name.into(),
            kind: ProviderKind::Anthropic,
            base_url: "https://api.example.com".into(),
            sealed: Some(vec![0xff, 0]),
            serves: vec!["claude-*".into()],
            responses: false,
            created_at: T0,
            updated_at: T0,
        }
    }

    fn call(&self, n: u32) -> ModelCallRow {
        ModelCallRow {
            id: call_id(n),
            project: self.project.id.clone(),
            key: Some(key_id(1)),
            sandbox: Some(sandbox_id(n % 2)),
            workflow: None,
            run: Some(format!("run-{}", n % 3)),
            end_user: None,
            tags: vec!["all".into(), format!("t{}", n % 2)],
            dialect: "chat".into(),
            asked: "smart".into(),
            provider: "p".into(),
            model: "m".into(),
            streamed: true,
            started_at: T0.plus_millis(u64::from(n)),
            ended_at: None,
            outcome: CallOutcome::Open,
            attempts: 0,
            first_byte_millis: None,
            finish: None,
            error: None,
            usage: ModelUsage::default(),
            estimated: false,
            price_version: None,
            reserved: Usd::from_pico(100),
            cost: Usd::ZERO,
        }
    }

    fn settled(&self, n: u32) -> ModelCallRow {
        ModelCallRow {
            outcome: CallOutcome::Done,
            ended_at: Some(T0.plus_millis(1000)),
            usage: ModelUsage {
                input: 10,
                output: u64::from(n),
                ..ModelUsage::default()
            },
            price_version: Some("v1".into()),
            cost: Usd::from_pico(i64::from(n)),
            attempts: 1,
            ..self.call(n)
        }
    }

    fn called(&self, n: u32) -> NewFact {
        let fact = ModelCallFact {
            call: call_id(n),
            asked: "smart".into(),
            provider: "p".into(),
            model: "m".into(),
            outcome: CallOutcome::Done,
            usage: ModelUsage::default(),
            estimated: false,
            cost: Usd::from_pico(i64::from(n)),
            price_version: None,
            duration_millis: 1,
            key: None,
            workflow: None,
            run: None,
        };
        NewFact {
            at: T0,
            project: self.project.id.clone(),
            sandbox: None,
            fact: Fact::ModelCalled(fact),
        }
    }
}

async fn spend(store: &Stores, context: &Context, by: SpendBy) -> Vec<(String, u64, i64)> {
    let query = SpendQuery {
        project: context.project.id.clone(),
        from: Timestamp(0),
        to: Timestamp(i64::MAX),
        by,
        model: None,
        provider: None,
        sandbox: None,
        user: None,
        key: None,
    };
    let rows = store.models.model_spend(query).await.unwrap();
    rows.into_iter()
        .map(|row| (row.group, row.calls, row.cost.pico()))
        .collect()
}

#[tokio::test]
async fn the_setup_is_kept() {
    let context = Context::new().await;
    let store = &context.store;
    store
        .models
        .put_model_provider(context.provider(1, "a"), vec![])
        .await
        .unwrap();
    let taken = store
        .models
        .put_model_provider(context.provider(2, "a"), vec![])
        .await;
    assert!(
        matches!(taken, Err(Error::NameTaken { what: "provider", .. })),
        "{taken:?}"
    );
    let changed = ModelProviderRow {
        sealed: None,
        serves: vec![],
        ..context.provider(1, "a")
    };
    store
        .models
        .put_model_provider(changed.clone(), vec![])
        .await
        .unwrap();
    let route = ModelRouteRow {
        project: context.project.id.clone(),
        name: "smart".into(),
        targets: vec![ModelTarget {
            provider: "a".into(),
            model: "m".into(),
            weight: 2,
        }],
        fallbacks: vec!["b".into()],
        updated_at: T0,
    };
    store.models.put_model_route(route.clone()).await.unwrap();
    let price = atoll_store::ModelPriceRow {
        project: context.project.id.clone(),
        model: "m".into(),
        rates: ModelRates {
            input: Some("1.5".into()),
            ..ModelRates::default()
        },
        updated_at: T0,
    };
    store.models.put_model_price(price.clone()).await.unwrap();
    let key = ModelKeyRow {
        id: key_id(1),
        project: context.project.id.clone(),
        name: "k".into(),
        hash: [7; 32],
        prefix: "atm_abcd".into(),
        models: vec!["m*".into()],
        requests_per_minute: Some(5),
        tokens_per_minute: None,
        created_at: T0,
        expires_at: None,
        revoked_at: None,
    };
    assert!(
        store
            .models
            .insert_model_key(key.clone(), 1, vec![])
            .await
            .unwrap()
    );
    let budget = ModelBudgetRow {
        id: BudgetId::from_entropy(entropy(1)),
        project: context.project.id.clone(),
        name: "daily".into(),
        scope: BudgetScope::Run,
        subject: None,
        window: BudgetWindow::Day,
        limit: Usd::from_pico(5),
        alert_percent: Some(80),
        created_at: T0,
    };
    store
        .models
        .put_model_budget(budget.clone(), vec![])
        .await
        .unwrap();
    let setup = store.models.model_setup().await.unwrap();
    assert_eq!((setup.providers, setup.routes), (vec![changed], vec![route]));
    assert_eq!(
        (setup.prices, setup.keys, setup.budgets),
        (vec![price], vec![key], vec![budget])
    );

    store
        .models
        .revoke_model_key(&context.project.id, &key_id(1), T0, vec![])
        .await
        .unwrap();
    assert!(store.models.model_setup().await.unwrap().keys.is_empty());
    assert_eq!(
        store
            .models
            .model_keys(&context.project.id, None, 10)
            .await
            .unwrap()
            .items
            .len(),
        1
    );
    assert!(
        store
            .models
            .delete_model_provider(&context.project.id, "a", vec![])
            .await
            .unwrap()
    );
    assert!(
        !store
            .models
            .delete_model_provider(&context.project.id, "a", vec![context.fact(1)])
            .await
            .unwrap()
    );
    assert_eq!(
        store.ledger.last_seq().await.unwrap(),
        0,
        "what is not there leaves no fact"
    );
}

#[tokio::test]
async fn a_call_is_settled_once_and_summed() {
    let context = Context::new().await;
    let store = &context.store;
    for n in 1..=6 {
        store.models.open_model_call(context.call(n)).await.unwrap();
    }
    assert_eq!(store.models.open_model_calls().await.unwrap().len(), 6);
    for n in 1..=5 {
        assert!(
            store
                .models
                .close_model_call(context.settled(n), vec![context.called(n)])
                .await
                .unwrap()
        );
    }
    assert!(
        !store
            .models
            .close_model_call(context.settled(5), vec![context.called(5)])
            .await
            .unwrap(),
        "only once"
    );
    assert_eq!(store.ledger.last_seq().await.unwrap(), 5);
    let found = store
        .models
        .model_call(&context.project.id, &call_id(3))
        .await
        .unwrap();
    assert_eq!(found, Some(context.settled(3)));

    assert_eq!(
        spend(store, &context, SpendBy::Total).await,
        [(String::new(), 5, 15)]
    );
    let by_run = spend(store, &context, SpendBy::Run).await;
    assert_eq!(
        by_run,
        [
            ("run-2".into(), 2, 7),
            ("run-1".into(), 2, 5),
            ("run-0".into(), 1, 3)
        ]
    );
    let by_tag = spend(store, &context, SpendBy::Tag).await;
    assert_eq!(
        by_tag,
        [("all".into(), 5, 15), ("t1".into(), 3, 9), ("t0".into(), 2, 6)]
    );
    assert_eq!(
        spend(store, &context, SpendBy::Day).await,
        [("1970-01-01".into(), 5, 15)]
    );

    let spent = |scope, subject: Option<&'static str>, from| {
        let project = context.project.id.clone();
        async move {
            store
                .models
                .model_spent(&project, scope, subject, BudgetWindow::Total, from, 1)
                .await
                .unwrap()
        }
    };
    let of_run = spent(BudgetScope::Run, Some("run-2"), Timestamp(0)).await;
    assert_eq!(of_run, [("run-2".to_owned(), Usd::from_pico(7))]);
    // Of more subjects than are asked for, those that called last.
    let of_last = spent(BudgetScope::Run, None, Timestamp(0)).await;
    assert_eq!(of_last, [("run-2".to_owned(), Usd::from_pico(7))]);
    let later = spent(BudgetScope::Project, None, T0.plus_millis(4)).await;
    assert_eq!(later[0].1, Usd::from_pico(9));

    let first = store
        .models
        .model_calls(&context.project.id, None, None, 4)
        .await
        .unwrap();
    assert_eq!(first.items.len(), 4);
    let rest = store
        .models
        .model_calls(&context.project.id, None, first.next, 4)
        .await
        .unwrap();
    assert_eq!(rest.items.last().unwrap().id, call_id(1));
    let of_one = store
        .models
        .model_calls(&context.project.id, Some(&sandbox_id(1)), None, 10)
        .await
        .unwrap();
    assert_eq!(of_one.items.len(), 3);
}

fn model_key(context: &Context, n: u8) -> ModelKeyRow {
    ModelKeyRow {
        id: key_id(n.into()),
        project: context.project.id.clone(),
        name: format!("k{}", n / 2),
        hash: [n; 32],
        prefix: "atm_abcd".into(),
        models: vec![],
        requests_per_minute: None,
        tokens_per_minute: None,
        created_at: T0.plus_millis(n.into()),
        expires_at: None,
        revoked_at: None,
    }
}

/// Of as many as want to be the last, one is: the count and the row are one transaction.
#[tokio::test]
async fn a_project_has_so_many_model_keys_and_no_more_however_many_are_made_at_once() {
    let context = Context::new().await;
    let models = &context.store.models;
    let making: Vec<_> = (0..20)
        .map(|n| {
            let (models, key) = (Arc::clone(models), model_key(&context, n));
            tokio::spawn(async move { models.insert_model_key(key, 5, vec![]).await.unwrap() })
        })
        .collect();
    let mut made = 0;
    for one in making {
        made += u32::from(one.await.unwrap());
    }
    assert_eq!(made, 5);
    // One that is revoked makes room, and of those that were, so many are remembered.
    for n in 20..40 {
        let all = models.model_keys(&context.project.id, None, 100).await.unwrap();
        let working = all.items.iter().find(|key| key.revoked_at.is_none()).unwrap();
        let now = T0.plus_millis(100 + u64::from(n));
        models
            .revoke_model_key(&context.project.id, &working.id, now, vec![])
            .await
            .unwrap();
        let next = ModelKeyRow {
            created_at: now,
            ..model_key(&context, n)
        };
        assert!(models.insert_model_key(next, 5, vec![]).await.unwrap());
    }
    let all = models.model_keys(&context.project.id, None, 100).await.unwrap();
    assert_eq!(
        all.items.len(),
        10,
        "five that work, and the last five that do not"
    );
}

#[tokio::test]
async fn model_keys_come_in_pages_and_are_found_by_id_and_name() {
    let context = Context::new().await;
    let (models, project) = (&context.store.models, &context.project.id);
    for n in 0..5 {
        assert!(
            models
                .insert_model_key(model_key(&context, n), 9, vec![])
                .await
                .unwrap()
        );
    }
    let (mut seen, mut after) = (Vec::new(), None);
    loop {
        let page = models.model_keys(project, after, 2).await.unwrap();
        assert!(page.items.len() <= 2);
        seen.extend(page.items.into_iter().map(|key| key.id));
        after = page.next;
        if after.is_none() {
            break;
        }
    }
    assert_eq!(seen, [4, 3, 2, 1, 0].map(key_id), "the newest first, each once");
    let called = async |called: &str| models.model_keys_called(project, called).await.unwrap();
    assert_eq!(called("k2").await, [key_id(4)]);
    assert_eq!(called("k1").await.len(), 2);
    assert_eq!(called(key_id(3).as_str()).await, [key_id(3)]);
    models
        .revoke_model_key(project, &key_id(4), T0, vec![])
        .await
        .unwrap();
    assert!(called("k2").await.is_empty(), "a name is good while its key is");
    assert_eq!(called(key_id(4).as_str()).await, [key_id(4)]);
    let other = ProjectId::from_entropy(entropy(9));
    assert!(models.model_keys(&other, None, 9).await.unwrap().items.is_empty());
}

#[tokio::test]
async fn a_project_with_many_bodies_leaves_others_theirs() {
    let context = Context::new().await;
    let (own, other) = (context.project.id.clone(), ProjectId::from_entropy([7; 20]));
    let identity = &context.store.identity;
    identity.ensure_project("other", other.clone(), T0).await.unwrap();
    let models = &context.store.models;
    let keep = async |n: u32, project: &ProjectId| {
        let bodies = ModelBodies {
            request: "{}".into(),
            answer: "{}".into(),
            shortened: false,
        };
        let at = T0.plus_millis(n.into());
        let call = ModelCallRow {
            project: project.clone(),
            ..context.call(n)
        };
        models.open_model_call(call).await.unwrap();
        models
            .put_model_bodies(call_id(n), project.clone(), at, bodies)
            .await
            .unwrap();
    };
    // The older ones are those of the project that has few.
    for n in 0..2 {
        keep(n, &own).await;
    }
    for n in 2..22 {
        keep(n, &other).await;
    }
    assert_eq!(models.trim_model_bodies(T0, 6).await.unwrap(), 16);
    for (n, project, kept) in [
        (0, &own, true),
        (1, &own, true),
        (17, &other, false),
        (18, &other, true),
    ] {
        let found = models.model_bodies(project, &call_id(n)).await.unwrap();
        assert_eq!(found.is_some(), kept, "{n}");
    }
}
