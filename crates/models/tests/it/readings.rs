//! What is reserved is for what the provider gets: not for another part of the request, nor for less of it.

use std::sync::atomic::Ordering;
use std::time::Duration;

use atoll_dialects::Dialect;
use atoll_models::{CreateModelKey, Request, Served, SetBudget, SetPrice};
use atoll_store::{FactQuery, ModelRates};
use atoll_types::{BudgetScope, BudgetWindow, Code, ProviderKind, SandboxId, Usd};
use futures_util::StreamExt as _;

use crate::support::{Context, Provider, Reply, events, json, request};

fn usd(text: &str) -> Usd {
    text.parse().unwrap()
}

fn budget(name: &str, scope: BudgetScope, subject: Option<&str>, limit: &str) -> SetBudget {
    SetBudget {
        name: name.into(),
        scope,
        subject: subject.map(str::to_owned),
        window: BudgetWindow::Day,
        limit: usd(limit),
        alert_percent: None,
    }
}

/// A gateway with a budget, and a provider of this kind that says nothing, whose tokens cost a dollar for a million to read.
async fn capped(kind: ProviderKind, model: &str) -> (Context, Provider) {
    let context = Context::new().await;
    let silent = Reply {
        hangs: true,
        ..events(": well\n\n")
    };
    let provider = Provider::start(vec![silent]).await;
    let set = atoll_models::SetProvider {
        responses: Some(true),
        ..context.set_provider("p", kind, &provider.url, "*")
    };
    context.models.set_provider(&context.project, set).await.unwrap();
    let rates = ModelRates {
        input: Some("1".into()),
        output: Some("0".into()),
        audio_input: Some("1".into()),
        ..ModelRates::default()
    };
    let price = SetPrice {
        model: model.into(),
        rates,
    };
    context.models.set_price(&context.project, price).await.unwrap();
    let all = budget("b", BudgetScope::Project, None, "1000");
    context.models.set_budget(&context.project, all).await.unwrap();
    (context, provider)
}

fn reserved(context: &Context) -> Usd {
    let budgets = context.models.list_budgets(&context.project);
    budgets[0]
        .standing
        .first()
        .map_or(Usd::ZERO, |standing| standing.reserved)
}

/// What is set aside for a request while it is under way, or why it is refused.
async fn set_aside(context: &Context, request: Request) -> Result<Usd, (Code, String)> {
    let before = reserved(context);
    match context.models.call(&context.who(), request).await {
        Err(refusal) => Err((refusal.fault.code, refusal.fault.message.clone())),
        Ok(served) => {
            let amount = reserved(context).minus(before);
            drop(served);
            Ok(amount)
        }
    }
}

fn sdk(model: &str, content: &str) -> Request {
    let body = format!(r#"{{"maxOutputTokens":1,"prompt":[{{"role":"user","content":[{content}]}}]}}"#);
    Request {
        model: Some(model.into()),
        stream: Some(true),
        ..request(Dialect::AiSdk, &body)
    }
}

fn chat(model: &str, content: &str) -> Request {
    let body = format!(
        r#"{{"model":"{model}","stream":true,"max_tokens":1,"messages":[{{"role":"user","content":[{content}]}}]}}"#
    );
    request(Dialect::Chat, &body)
}

#[tokio::test]
async fn what_a_translation_sends_is_what_is_reserved_for() {
    let pdf = "A".repeat(4000);
    for (kind, model) in [
        (ProviderKind::Gemini, "gemini-x"),
        (ProviderKind::Anthropic, "claude-x"),
        (ProviderKind::Openai, "gpt-x"),
    ] {
        let (context, provider) = capped(kind, model).await;
        let file = format!(r#"{{"type":"file","mediaType":"application/pdf","data":"{pdf}"}}"#);
        let amount = set_aside(&context, sdk(model, &file)).await.unwrap();
        assert!((usd("1")..usd("1.01")).contains(&amount), "{model}: {amount}");
        let asked = provider.answered.load(Ordering::SeqCst);
        // Beside what is sent on stands what would have been counted.
        let two = r#"{"type":"file","mediaType":"application/pdf","data":"DATA","file":{"file_data":"data:text/plain,x"}}"#;
        let nested =
            r#"{"type":"file","mediaType":"application/pdf","data":{"data":"x","url":"https://x/y.pdf"}}"#;
        for part in [
            two.replace("DATA", &pdf),
            two.replace("DATA", "https://x/y.pdf"),
            nested.to_owned(),
        ] {
            let (code, why) = set_aside(&context, sdk(model, &part)).await.unwrap_err();
            assert_eq!(code, Code::Untranslatable, "{why}");
        }
        let linked = r#"{"type":"file","mediaType":"application/pdf","data":"https://x/y.pdf"}"#;
        let (code, why) = set_aside(&context, sdk(model, linked)).await.unwrap_err();
        assert!(
            matches!(code, Code::Untranslatable | Code::FieldUnpriced),
            "{code}: {why}"
        );
        assert_eq!(
            provider.answered.load(Ordering::SeqCst),
            asked,
            "nobody else was asked"
        );
    }
}

#[tokio::test]
async fn numbers_that_grow_are_counted_as_they_are_sent() {
    let (context, provider) = capped(ProviderKind::Openai, "gpt-x").await;
    let numbers = vec!["1e15"; 5000].join(",");
    let body = format!(
        r#"{{"maxOutputTokens":1,"prompt":[{{"role":"user","content":[{{"type":"text","text":"x"}}]}},
            {{"role":"assistant","content":[{{"type":"tool-call","toolCallId":"a","toolName":"t","input":{{}}}}]}},
            {{"role":"tool","content":[{{"type":"tool-result","toolCallId":"a","toolName":"t","output":{{"type":"json","value":[{numbers}]}}}}]}}]}}"#
    );
    let grows = Request {
        model: Some("gpt-x".into()),
        stream: Some(true),
        ..request(Dialect::AiSdk, &body)
    };
    let amount = set_aside(&context, grows).await.unwrap();
    let sent = provider.last_request();
    let sent = sent.split_once("\r\n\r\n").unwrap().1.len();
    assert!(sent > 2 * body.len(), "{sent}");
    // A picodollar is a millionth of what a token costs here.
    assert!(
        amount.pico() >= i64::try_from(sent).unwrap() * 1_000_000,
        "{amount} for {sent}"
    );
}

#[tokio::test]
async fn what_may_be_longer_than_it_looks_is_reserved_for_or_refused() {
    let (context, _provider) = capped(ProviderKind::Gemini, "gemini-x").await;
    let film = r#"{"type":"image_url","image_url":{"url":"https://www.youtube.com/watch?v=1"}}"#;
    let (code, why) = set_aside(&context, chat("gemini-x", film)).await.unwrap_err();
    assert_eq!(code, Code::FieldUnpriced, "{why}");
    let silence = format!(
        r#"{{"type":"image_url","image_url":{{"url":"data:audio/flac;base64,{}"}}}}"#,
        "A".repeat(8000)
    );
    let amount = set_aside(&context, chat("gemini-x", &silence)).await.unwrap();
    assert!((usd("1")..usd("1.01")).contains(&amount), "{amount}");
    // The same model behind another wire.
    let (context, _provider) = capped(ProviderKind::Openai, "google/gemini-x").await;
    let (code, _) = set_aside(&context, chat("google/gemini-x", film))
        .await
        .unwrap_err();
    assert_eq!(code, Code::FieldUnpriced);
    let (context, _provider) = capped(ProviderKind::Openai, "gpt-x").await;
    let picture = set_aside(&context, chat("gpt-x", film)).await.unwrap();
    assert!((usd("0.006")..usd("0.007")).contains(&picture), "{picture}");
}

#[tokio::test]
async fn what_widens_a_model_is_refused_where_a_budget_applies() {
    let body = r#"{"model":"claude-sonnet-4-5","stream":true,"max_tokens":1,"messages":[{"role":"user","content":[
        {"type":"document","source":{"type":"base64","media_type":"application/pdf","data":"JVBERi0xLjQAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"}}]}]}"#;
    let (context, provider) = capped(ProviderKind::Anthropic, "claude-sonnet-4-5").await;
    let with = |beta: &str| Request {
        headers: vec![("anthropic-beta".into(), beta.into())],
        ..request(Dialect::Messages, body)
    };
    let (code, why) = set_aside(&context, with("context-1m-2025-08-07"))
        .await
        .unwrap_err();
    assert_eq!(code, Code::FieldUnpriced);
    assert!(why.contains("context-1m-2025-08-07"), "{why}");
    let amount = set_aside(&context, with("claude-code-20250219")).await.unwrap();
    assert!((usd("0.2")..usd("0.21")).contains(&amount), "{amount}");
    assert_eq!(provider.answered.load(Ordering::SeqCst), 1);
    context.models.delete_budget(&context.project, "b").await.unwrap();
    let served = context
        .models
        .call(&context.who(), with("context-1m-2025-08-07"))
        .await;
    assert!(served.is_ok(), "nobody counts");
}

/// The name of a tool comes back in the answer, and is not its end.
#[tokio::test]
async fn a_word_of_the_callers_ends_no_answer() {
    let begin = "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"usage\":{\"input_tokens\":9,\"output_tokens\":1}}}\n\n\
        event: content_block_start\ndata: {\"type\":\"content_block_start\",\"index\":0,\"content_block\":{\"type\":\"tool_use\",\"id\":\"t\",\"name\":\"message_stop\",\"input\":{}}}\n\n";
    let end = "event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"tool_use\"},\"usage\":{\"output_tokens\":1000000}}\n\n\
        event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n";
    let body = r#"{"model":"claude-x","stream":true,"max_tokens":2000000,"tools":[{"name":"message_stop","input_schema":{"type":"object"}}],
        "messages":[{"role":"user","content":"x"}]}"#;
    for (told, cost, estimated) in [
        // It falls silent, so nobody has told what was used.
        (
            Reply {
                hangs: true,
                ..events(begin)
            },
            "2",
            true,
        ),
        (events(&format!("{begin}{end}")), "1", false),
    ] {
        let provider = Provider::start(vec![told]).await;
        let context = Context::new().await;
        context
            .provider("p", ProviderKind::Anthropic, &provider.url, "*")
            .await;
        context.price("claude-x", "0", "1").await;
        let all = budget("b", BudgetScope::Project, None, "100");
        context.models.set_budget(&context.project, all).await.unwrap();
        let Served::Stream { mut events, .. } = context.ask(Dialect::Messages, body).await.unwrap() else {
            panic!("a stream was asked for");
        };
        events.next().await.unwrap();
        drop(events);
        let row = context.settled().await;
        assert_eq!((row.cost, row.estimated), (usd(cost), estimated), "{row:?}");
    }
}

/// What a project has and spends is told to those who may see it anyway, and of a budget of one's own.
#[tokio::test]
async fn a_refusal_tells_nobody_elses_amounts() {
    let context = Context::new().await;
    let provider = Provider::start(vec![json("{}")]).await;
    context
        .provider("p", ProviderKind::Openai, &provider.url, "m*")
        .await;
    context.price("m1", "0", "1").await;
    let key = CreateModelKey {
        name: "ci".into(),
        models: vec!["m*".into()],
        requests_per_minute: None,
        tokens_per_minute: None,
        expires_at: None,
    };
    let (row, secret) = context
        .models
        .create_model_key(&context.project, key)
        .await
        .unwrap();
    let sandbox = SandboxId::from_entropy([3; 20]);
    let mut with_key = context.who();
    with_key.key = context.key(&secret).await;
    with_key.spender.key = Some(row.id.clone());
    let mut guest = context.who();
    guest.spender.sandbox = Some(sandbox.clone());
    guest.spender.run = Some("r".into());
    let owner = context.who();
    for (scope, subject, told) in [
        (BudgetScope::Project, None, [true, false, false]),
        (BudgetScope::Key, Some(row.id.as_str()), [false, true, false]),
        (BudgetScope::Sandbox, None, [false, false, true]),
        (BudgetScope::Run, None, [false, false, false]),
    ] {
        let set = budget("secret-plan", scope, subject, "0.00123");
        context.models.set_budget(&context.project, set).await.unwrap();
        for (who, told) in [&owner, &with_key, &guest].into_iter().zip(told) {
            let body = r#"{"model":"m1","max_tokens":4567,"messages":[]}"#;
            let Err(refused) = context.models.call(who, request(Dialect::Chat, body)).await else {
                continue;
            };
            let said = format!("{} {:?}", refused.fault.message, refused.fault.hint);
            assert_eq!(refused.fault.code, Code::BudgetExhausted, "{said}");
            assert!(said.contains("resets at"), "{said}");
            for words in ["0.00123", "0.004567", "secret-plan"] {
                assert_eq!(said.contains(words), told, "{scope:?}: {said}");
            }
        }
    }
    // Whoever keeps the books is told everything.
    let facts = || async {
        let query = FactQuery {
            project: context.project.clone(),
            sandbox: None,
            kinds: Vec::new(),
            after_seq: 0,
            limit: 100,
        };
        format!("{:?}", context.store.ledger.facts(query).await.unwrap())
    };
    while !facts().await.contains("secret-plan") {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn a_price_is_of_one_model() {
    let context = Context::new().await;
    for model in ["scripted-*", "*", "p/m*"] {
        let price = SetPrice {
            model: model.into(),
            rates: ModelRates {
                input: Some("1".into()),
                ..ModelRates::default()
            },
        };
        let refused = context
            .models
            .set_price(&context.project, price)
            .await
            .unwrap_err();
        assert_eq!(refused.code, Code::ModelNameInvalid);
        assert!(
            refused.message.contains("not of a pattern"),
            "{}",
            refused.message
        );
    }
    assert!(context.models.list_prices(&context.project).1.is_empty());
}
