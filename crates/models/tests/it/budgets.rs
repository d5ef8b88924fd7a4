//! Budgets hold, keys limit, and restarts forget nothing.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use atoll_dialects::Dialect;
use atoll_models::{CreateModelKey, Served, SetBudget, SetRoute, Who};
use atoll_types::{BudgetScope, BudgetWindow, Code, ProviderKind, Usd};
use futures_util::StreamExt as _;

use crate::support::{Context, Provider, Reply, events, json, request};

/// Exactly as many tokens as `max_tokens` allows, so that what is reserved is what it costs.
const TEN: &str = r#"{"choices":[{"index":0,"message":{"role":"assistant","content":"x"},"finish_reason":"length"}],"usage":{"prompt_tokens":0,"completion_tokens":10}}"#;
const BODY: &str = r#"{"model":"m1","max_tokens":10,"messages":[]}"#;

fn budget(name: &str, limit: &str, scope: BudgetScope) -> SetBudget {
    SetBudget {
        name: name.into(),
        scope,
        subject: None,
        window: BudgetWindow::Day,
        limit: limit.parse().unwrap(),
        alert_percent: Some(50),
    }
}

async fn call(context: &Context, who: &Who) -> Result<(), atoll_models::Refusal> {
    context
        .models
        .call(who, request(Dialect::Chat, BODY))
        .await
        .map(drop)
}

#[tokio::test(flavor = "multi_thread")]
async fn of_many_calls_at_once_exactly_as_many_pass_as_there_is_money_for() {
    let context = Arc::new(Context::new().await);
    let provider = Provider::start(vec![json(TEN)]).await;
    context
        .provider("p", ProviderKind::Openai, &provider.url, "m*")
        .await;
    // A dollar per million: ten tokens are 0.00001.
    context.price("m1", "0", "1").await;
    let daily = budget("daily", "0.001", BudgetScope::Project);
    context.models.set_budget(&context.project, daily).await.unwrap();
    let mut calls = tokio::task::JoinSet::new();
    for _ in 0..1000 {
        let context = Arc::clone(&context);
        calls.spawn(async move {
            let who = context.who();
            call(&context, &who).await.map_err(|refusal| refusal.fault.code)
        });
    }
    let mut passed = 0;
    while let Some(done) = calls.join_next().await {
        match done.unwrap() {
            Ok(()) => passed += 1,
            Err(code) => assert_eq!(code, Code::BudgetExhausted),
        }
    }
    assert_eq!(passed, 100);
    assert_eq!(
        provider.answered.load(Ordering::SeqCst),
        100,
        "nobody else reached the provider"
    );
    let standing = &context.models.list_budgets(&context.project)[0].standing[0];
    assert_eq!(
        (standing.spent, standing.reserved),
        ("0.001".parse().unwrap(), Usd::ZERO)
    );
}

#[tokio::test]
async fn a_refusal_names_the_budget_and_a_restart_remembers_it() {
    let context = Context::new().await;
    let provider = Provider::start(vec![json(TEN)]).await;
    context
        .provider("p", ProviderKind::Openai, &provider.url, "m*")
        .await;
    context.price("m1", "0", "1").await;
    let per_run = budget("per-run", "0.00001", BudgetScope::Run);
    context
        .models
        .set_budget(&context.project, per_run)
        .await
        .unwrap();
    let of_run = |context: &Context, run: &str| {
        let mut who = context.who();
        who.spender.run = Some(run.into());
        who
    };
    call(&context, &of_run(&context, "one")).await.unwrap();
    let refused = call(&context, &of_run(&context, "one")).await.unwrap_err();
    for words in ["per-run", "run `one`", "$0.00001 is spent", "resets at"] {
        assert!(refused.fault.message.contains(words), "{}", refused.fault.message);
    }
    call(&context, &of_run(&context, "two")).await.unwrap();
    call(&context, &context.who()).await.unwrap();

    context.models.shutdown().await;
    let Context { directory, store, .. } = context;
    store.database.close().await;
    let context = Context::at(directory).await;
    assert!(
        call(&context, &of_run(&context, "one")).await.is_err(),
        "what was spent is spent"
    );
    call(&context, &of_run(&context, "three")).await.unwrap();
}

#[tokio::test]
async fn without_a_price_there_is_no_budget_that_holds() {
    let context = Context::new().await;
    let provider = Provider::start(vec![json(TEN)]).await;
    context
        .provider("p", ProviderKind::Openai, &provider.url, "m*")
        .await;
    call(&context, &context.who()).await.unwrap();
    assert_eq!(context.settled().await.price_version, None, "it is marked so");
    context
        .models
        .set_budget(&context.project, budget("b", "1", BudgetScope::Project))
        .await
        .unwrap();
    let refused = call(&context, &context.who()).await.unwrap_err();
    assert_eq!(refused.fault.code, Code::ModelUnpriced);
}

#[tokio::test]
async fn a_key_opens_what_it_says_for_as_long_as_it_says() {
    let context = Context::new().await;
    let provider = Provider::start(vec![json(TEN)]).await;
    context
        .provider("p", ProviderKind::Openai, &provider.url, "m*")
        .await;
    let request = CreateModelKey {
        name: "ci".into(),
        models: vec!["other".into()],
        requests_per_minute: Some(2),
        tokens_per_minute: None,
        expires_at: None,
    };
    let with_key = async |secret: &str| {
        let key = context.key(secret).await.unwrap();
        let mut who = context.who();
        who.spender.key = Some(key.row.id.clone());
        who.key = Some(key);
        who
    };
    let (_, secret) = context
        .models
        .create_model_key(&context.project, request.clone())
        .await
        .unwrap();
    let refused = call(&context, &with_key(&secret).await).await.unwrap_err();
    assert_eq!(refused.fault.code, Code::ModelNotAllowed);
    let request = CreateModelKey {
        models: vec!["m*".into()],
        ..request
    };
    let (row, secret) = context
        .models
        .create_model_key(&context.project, request.clone())
        .await
        .unwrap();
    let who = with_key(&secret).await;
    call(&context, &who).await.unwrap();
    call(&context, &who).await.unwrap();
    let refused = call(&context, &who).await.unwrap_err();
    assert_eq!(refused.fault.code, Code::RateLimited);
    assert!(refused.retry_after.is_some());
    context
        .models
        .revoke_model_key(&context.project, &row.id)
        .await
        .unwrap();
    assert!(context.key(&secret).await.is_none());
    let expired = CreateModelKey {
        expires_at: Some(atoll_types::Timestamp(1)),
        ..request
    };
    let (_, secret) = context
        .models
        .create_model_key(&context.project, expired)
        .await
        .unwrap();
    assert!(context.key(&secret).await.is_none());
}

/// A budget counts what was under way when it was set.
#[tokio::test]
async fn a_budget_that_is_set_meanwhile_counts_the_calls_under_way() {
    let context = Context::new().await;
    let begin =
        "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"hello\"},\"finish_reason\":null}]}\n\n";
    let silent = Reply {
        hangs: true,
        ..events(begin)
    };
    let provider = Provider::start(vec![silent]).await;
    context
        .provider("p", ProviderKind::Openai, &provider.url, "m*")
        .await;
    context.price("m1", "0", "1").await;
    let ask = r#"{"model":"m1","stream":true,"max_tokens":2000000,"messages":[]}"#;
    let Served::Stream {
        events: mut heard, ..
    } = context.ask(Dialect::Chat, ask).await.unwrap()
    else {
        panic!("a stream was asked for");
    };
    heard.next().await.unwrap();
    let set = |scope| {
        context
            .models
            .set_budget(&context.project, budget("b", "2.5", scope))
    };
    let standing = set(BudgetScope::Project).await.unwrap().standing;
    assert_eq!(
        (standing[0].spent, standing[0].reserved),
        (Usd::ZERO, "2".parse().unwrap())
    );
    let refused = context.ask(Dialect::Chat, ask).await.err().unwrap();
    assert_eq!(refused.fault.code, Code::BudgetExhausted);
    // Also where it is made to count something else, and back.
    assert!(set(BudgetScope::Run).await.unwrap().standing.is_empty());
    let standing = set(BudgetScope::Project).await.unwrap().standing;
    assert_eq!(standing[0].reserved, "2".parse().unwrap());
    drop(heard);
    let row = context.settled().await;
    assert!(row.cost > Usd::ZERO);
    let standing = &context.models.list_budgets(&context.project)[0].standing[0];
    assert_eq!((standing.spent, standing.reserved), (row.cost, Usd::ZERO));
}

/// However calls end while budgets are set, each budget counts each call once.
#[tokio::test(flavor = "multi_thread")]
async fn no_call_falls_between_the_books_and_the_rows() {
    let context = Arc::new(Context::new().await);
    let provider = Provider::start(vec![json(TEN)]).await;
    context
        .provider("p", ProviderKind::Openai, &provider.url, "m*")
        .await;
    context.price("m1", "0", "1").await;
    let mut calls = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let context = Arc::clone(&context);
        calls.spawn(async move {
            for _ in 0..25 {
                let who = context.who();
                call(&context, &who).await.unwrap();
            }
        });
    }
    for n in 0..40 {
        let name = format!("b{}", n % 10);
        let scope = if n % 3 == 0 {
            BudgetScope::Run
        } else {
            BudgetScope::Project
        };
        let set = budget(&name, "1000", scope);
        context.models.set_budget(&context.project, set).await.unwrap();
    }
    for n in 0..10 {
        let set = budget(&format!("b{n}"), "1000", BudgetScope::Project);
        context.models.set_budget(&context.project, set).await.unwrap();
    }
    while let Some(done) = calls.join_next().await {
        done.unwrap();
    }
    context.models.shutdown().await;
    for budget in context.models.list_budgets(&context.project) {
        let standing = &budget.standing[0];
        assert_eq!(
            (standing.spent, standing.reserved),
            ("0.002".parse().unwrap(), Usd::ZERO),
            "{}",
            budget.name
        );
    }
}

#[tokio::test]
async fn a_budget_is_for_somebody_who_exists() {
    let context = Context::new().await;
    let create = |name: &str| CreateModelKey {
        name: name.into(),
        models: Vec::new(),
        requests_per_minute: None,
        tokens_per_minute: None,
        expires_at: None,
    };
    let (key, secret) = context
        .models
        .create_model_key(&context.project, create("ci"))
        .await
        .unwrap();
    let set = |scope, subject: &str| {
        let set = SetBudget {
            subject: Some(subject.into()),
            ..budget("b", "1", scope)
        };
        context.models.set_budget(&context.project, set)
    };
    for (scope, subject) in [
        (BudgetScope::Key, "nobody"),
        (BudgetScope::Key, "key_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"),
        (BudgetScope::Sandbox, "nobody"),
        (BudgetScope::Sandbox, "sbx_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"),
    ] {
        let refused = set(scope, subject).await.unwrap_err();
        assert_eq!(refused.code, Code::SubjectNotFound, "{scope} {subject}");
    }
    let id = key.id.as_str().to_owned();
    for subject in ["ci", id.as_str()] {
        let view = set(BudgetScope::Key, subject).await.unwrap();
        assert_eq!(view.subject.as_deref(), Some(id.as_str()), "{subject}");
    }
    let who = Who {
        key: context.key(&secret).await,
        ..context.who()
    };
    let mut with_key = who.clone();
    with_key.spender.key = Some(key.id.clone());
    assert_eq!(context.models.left_for(&who), None);
    assert_eq!(context.models.left_for(&with_key), Some("1".parse().unwrap()));
    let tighter = budget("all", "0.5", BudgetScope::Project);
    context
        .models
        .set_budget(&context.project, tighter)
        .await
        .unwrap();
    // What is left of a budget that is shared tells what others spend, so it is told to the project alone.
    assert_eq!(context.models.left_for(&with_key), Some("1".parse().unwrap()));
    assert_eq!(context.models.left_for(&who), None);
    assert_eq!(
        context.models.left_for(&context.who()),
        Some("0.5".parse().unwrap())
    );
    // One whose key is gone can still be changed, and a name that two keys share means neither.
    context
        .models
        .revoke_model_key(&context.project, &key.id)
        .await
        .unwrap();
    set(BudgetScope::Key, &id).await.unwrap();
    let refused = set(BudgetScope::Key, "ci").await.unwrap_err();
    assert_eq!(refused.code, Code::SubjectNotFound);
    for workflow in ["nightly", "soon"] {
        set(BudgetScope::Workflow, workflow).await.unwrap();
    }
}

#[tokio::test]
async fn a_key_that_may_do_nothing_is_not_made() {
    let context = Context::new().await;
    for (requests, tokens) in [(Some(0), None), (None, Some(0)), (Some(0), Some(0))] {
        let request = CreateModelKey {
            name: "none".into(),
            models: Vec::new(),
            requests_per_minute: requests,
            tokens_per_minute: tokens,
            expires_at: None,
        };
        let refused = context.models.create_model_key(&context.project, request).await;
        assert_eq!(refused.unwrap_err().code, Code::KeyRateInvalid);
    }
}

#[tokio::test]
async fn a_name_stands_for_what_exists() {
    let context = Context::new().await;
    context
        .provider("p", ProviderKind::Openai, "http://127.0.0.1:9", "m*")
        .await;
    let set = |name: &str, fallback: &str| {
        let route = SetRoute {
            name: name.into(),
            targets: vec![(
                atoll_gateway_core::Target {
                    provider: "p".into(),
                    model: "m1".into(),
                },
                1,
            )],
            fallbacks: vec![fallback.into()],
        };
        context.models.set_route(&context.project, route)
    };
    for fallback in ["nosuch", "nosuch/m1", "fast"] {
        let refused = set("slow", fallback).await.unwrap_err();
        assert_eq!(refused.code, Code::NotFound, "{fallback}");
    }
    for (name, fallback) in [("fast", "m2"), ("slow", "fast"), ("slow", "p/any")] {
        set(name, fallback).await.unwrap();
    }
}

/// Whatever one project sets is copied at each change and looked through by each call.
#[tokio::test]
async fn a_project_sets_so_much_and_no_more() {
    let context = Context::new().await;
    let served = |name: &str, patterns: Vec<String>| {
        let mut request = context.set_provider(name, ProviderKind::Openai, "http://127.0.0.1:1", "x");
        request.serves = Some(patterns);
        context.models.set_provider(&context.project, request)
    };
    let patterns = |most: usize| (0..most).map(|n| format!("m{n}-*")).collect::<Vec<_>>();
    assert_eq!(
        served("p", patterns(101)).await.unwrap_err().code,
        Code::SetupTooLarge
    );
    assert_eq!(
        served("p", vec!["*a".repeat(9)]).await.unwrap_err().code,
        Code::ModelNameInvalid
    );
    for n in 0..10 {
        served(&format!("p{n}"), patterns(100)).await.unwrap();
    }
    assert_eq!(
        served("p10", patterns(1)).await.unwrap_err().code,
        Code::SetupTooLarge
    );
    // What is there can be set again.
    served("p9", patterns(100)).await.unwrap();
    for n in 10..100 {
        served(&format!("p{n}"), Vec::new()).await.unwrap();
    }
    assert_eq!(
        served("p100", Vec::new()).await.unwrap_err().code,
        Code::SetupTooLarge
    );
    for n in 0..=100 {
        let one = budget(&format!("b{n}"), "1", BudgetScope::Run);
        let set = context.models.set_budget(&context.project, one).await;
        assert_eq!(
            set.err().map(|fault| fault.code),
            (n == 100).then_some(Code::SetupTooLarge)
        );
    }
}
