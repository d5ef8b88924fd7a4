//! Budgets hold, keys limit, and restarts forget nothing.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use atoll_dialects::Dialect;
use atoll_models::{CreateModelKey, SetBudget, Who};
use atoll_types::{BudgetScope, BudgetWindow, ProviderKind, Usd};

use crate::support::{Context, Provider, json, request};

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
            Err(code) => assert_eq!(code, "budget_exhausted"),
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
    store.close().await;
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
    assert_eq!(refused.fault.code, "model_unpriced");
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
    let with_key = |secret: &str| {
        let key = context.models.authenticate(secret).unwrap();
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
    let refused = call(&context, &with_key(&secret)).await.unwrap_err();
    assert_eq!(refused.fault.code, "model_not_allowed");
    let request = CreateModelKey {
        models: vec!["m*".into()],
        ..request
    };
    let (row, secret) = context
        .models
        .create_model_key(&context.project, request.clone())
        .await
        .unwrap();
    let who = with_key(&secret);
    call(&context, &who).await.unwrap();
    call(&context, &who).await.unwrap();
    let refused = call(&context, &who).await.unwrap_err();
    assert_eq!(refused.fault.code, "rate_limited");
    assert!(refused.retry_after.is_some());
    context
        .models
        .revoke_model_key(&context.project, &row.id)
        .await
        .unwrap();
    assert!(context.models.authenticate(&secret).is_none());
    let expired = CreateModelKey {
        expires_at: Some(atoll_types::Timestamp(1)),
        ..request
    };
    let (_, secret) = context
        .models
        .create_model_key(&context.project, expired)
        .await
        .unwrap();
    assert!(context.models.authenticate(&secret).is_none());
}
