//! Pass-through, translation, fallback, hostile providers, and what each of them costs.

use std::sync::atomic::Ordering;
use std::time::Duration;

use atoll_dialects::Dialect;
use atoll_gateway_core::Target;
use atoll_models::{Served, SetRoute};
use atoll_store::sqlite::Memory;
use atoll_types::{CallOutcome, Code, ProviderKind, Usd};
use futures_util::StreamExt as _;
use serde_json::Value;

use crate::support::{Context, Provider, Reply, answer, events, json, whole};

const CHAT: &str = r#"{"id":"x","choices":[{"index":0,"message":{"role":"assistant","content":"hi"},"finish_reason":"stop"}],"usage":{"prompt_tokens":100,"completion_tokens":20,"prompt_tokens_details":{"cached_tokens":40}}}"#;
const MESSAGE: &str = r#"{"id":"m","type":"message","role":"assistant","content":[{"type":"text","text":"hi"}],"stop_reason":"end_turn","usage":{"input_tokens":60,"cache_read_input_tokens":40,"output_tokens":20}}"#;
const ASK: &str = r#"{ "model": "m1",  "messages": [{"role":"user","content":"hello"}], "odd": 1.50 }"#;

fn usd(text: &str) -> Usd {
    text.parse().unwrap()
}

#[tokio::test]
async fn bytes_pass_untouched_and_the_money_is_right() {
    let context = Context::new().await;
    let provider = Provider::start(vec![json(CHAT)]).await;
    context
        .provider("p", ProviderKind::Openai, &provider.url, "m*")
        .await;
    context.price("m1", "3", "15").await;
    assert_eq!(whole(context.ask(Dialect::Chat, ASK).await).await, CHAT);
    let request = provider.last_request();
    assert!(request.ends_with(ASK), "{request}");
    assert!(request.starts_with("POST /chat/completions "));
    assert!(request.to_lowercase().contains("authorization: bearer sk-secret"));
    let row = context.settled().await;
    assert_eq!(
        (row.usage.input, row.usage.cache_read, row.usage.output),
        (60, 40, 20)
    );
    // 100 tokens in at 3, 20 out at 15 dollars per million.
    assert_eq!((row.cost, row.outcome), (usd("0.0006"), CallOutcome::Done));
    assert!(row.estimated, "nobody here knows whether `odd` costs something");
    assert!(row.price_version.unwrap().contains("+own."));
    assert_eq!(row.tags, ["test"]);
}

#[tokio::test]
async fn a_call_that_ends_while_the_disk_is_full_is_settled_when_there_is_room() {
    let memory = Memory::open().unwrap();
    let context = Context::on_memory(&memory).await;
    let provider = Provider::start(vec![json(CHAT)]).await;
    context
        .provider("p", ProviderKind::Openai, &provider.url, "m*")
        .await;
    context.price("m1", "3", "15").await;
    // When the provider is asked, the call was written down.
    let fill = async {
        while provider.last_request().is_empty() {
            tokio::task::yield_now().await;
        }
        memory.fill_disk(true);
    };
    let ((), answered) = tokio::join!(fill, context.ask(Dialect::Chat, ASK));
    assert_eq!(whole(answered).await, CHAT);
    for _ in 0..1000 {
        tokio::task::yield_now().await;
    }
    let open = context
        .store
        .models
        .model_calls(&context.project, None, None, 1)
        .await
        .unwrap();
    assert_eq!(open.items[0].outcome, CallOutcome::Open);
    memory.fill_disk(false);
    let row = context.settled().await;
    assert_eq!((row.cost, row.outcome), (usd("0.0006"), CallOutcome::Done));
}

#[tokio::test]
async fn a_question_on_one_wire_is_answered_from_another() {
    let context = Context::new().await;
    let claude = Provider::start(vec![json(MESSAGE)]).await;
    context
        .provider("claude", ProviderKind::Anthropic, &claude.url, "c*")
        .await;
    let body = r#"{"model":"c1","messages":[{"role":"system","content":"be brief"},{"role":"user","content":"hello"}]}"#;
    let chat: Value = serde_json::from_str(&whole(context.ask(Dialect::Chat, body).await).await).unwrap();
    assert_eq!(chat["choices"][0]["message"]["content"], "hi");
    assert_eq!(chat["usage"]["prompt_tokens"], 100);
    assert_eq!(chat["usage"]["prompt_tokens_details"]["cached_tokens"], 40);
    assert_eq!(chat["model"], "c1");
    let request = claude.last_request();
    assert!(
        request.starts_with("POST /v1/messages ") && request.contains("x-api-key: sk-secret"),
        "{request}"
    );
    assert!(request.contains(r#""max_tokens":4096"#), "{request}");

    let openai = Provider::start(vec![json(CHAT)]).await;
    context
        .provider("openai", ProviderKind::Openai, &openai.url, "g*")
        .await;
    let body = r#"{"model":"g1","max_tokens":5,"messages":[{"role":"user","content":"hello"}]}"#;
    let message: Value =
        serde_json::from_str(&whole(context.ask(Dialect::Messages, body).await).await).unwrap();
    assert_eq!(message["content"][0]["text"], "hi");
    assert_eq!(
        (
            message["usage"]["input_tokens"].as_u64(),
            message["usage"]["cache_read_input_tokens"].as_u64()
        ),
        (Some(60), Some(40))
    );
    let body = r#"{"model":"g1","input":"hello"}"#;
    let response: Value =
        serde_json::from_str(&whole(context.ask(Dialect::Responses, body).await).await).unwrap();
    assert_eq!(response["output"][0]["content"][0]["text"], "hi");
    let refused = context
        .ask(
            Dialect::Responses,
            r#"{"model":"g1","input":"x","previous_response_id":"r"}"#,
        )
        .await;
    let refused = refused.err().unwrap();
    assert_eq!(refused.field.as_deref(), Some("previous_response_id"));
}

#[tokio::test]
async fn a_stream_ends_with_the_usage_only_for_those_who_asked() {
    let context = Context::new().await;
    let text = concat!(
        "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"hi\"},\"finish_reason\":null}],\"usage\":null}\n\n",
        "data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}],\"usage\":null}\n\n",
        "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":10,\"completion_tokens\":2}}\n\n",
        "data: [DONE]\n\n",
    );
    let provider = Provider::start(vec![events(text)]).await;
    context
        .provider("p", ProviderKind::Openai, &provider.url, "m*")
        .await;
    let body = r#"{"model":"m1","stream":true,"messages":[]}"#;
    let heard = whole(context.ask(Dialect::Chat, body).await).await;
    assert!(
        !heard.contains("prompt_tokens") && heard.ends_with("[DONE]\n\n"),
        "{heard}"
    );
    assert!(
        provider
            .last_request()
            .contains(r#""stream_options":{"include_usage":true}"#)
    );
    let row = context.settled().await;
    assert_eq!((row.usage.input, row.usage.output, row.estimated), (10, 2, false));
    let body = r#"{"model":"m1","stream":true,"stream_options":{"include_usage":true},"messages":[]}"#;
    assert_eq!(whole(context.ask(Dialect::Chat, body).await).await, text);
}

#[tokio::test]
async fn another_is_asked_when_one_fails_and_nobody_when_the_request_is_wrong() {
    let context = Context::new().await;
    let broken = Provider::start(vec![answer(
        "500 Oops",
        "application/json",
        r#"{"error":{"message":"no"}}"#,
    )])
    .await;
    let works = Provider::start(vec![json(CHAT)]).await;
    context
        .provider("broken", ProviderKind::Openai, &broken.url, "-")
        .await;
    context
        .provider("works", ProviderKind::Openai, &works.url, "-")
        .await;
    let target = |provider: &str| Target {
        provider: provider.into(),
        model: "m".into(),
    };
    let route = SetRoute {
        name: "smart".into(),
        targets: vec![(target("broken"), 1)],
        fallbacks: vec!["works/m".into()],
    };
    context.models.set_route(&context.project, route).await.unwrap();
    let body = r#"{"model":"smart","messages":[]}"#;
    assert_eq!(whole(context.ask(Dialect::Chat, body).await).await, CHAT);
    let row = context.settled().await;
    assert_eq!(
        (row.asked.as_str(), row.provider.as_str(), row.attempts),
        ("smart", "works", 2)
    );
    assert!(works.last_request().contains(r#""model":"m""#));

    let picky = Provider::start(vec![answer(
        "400 No",
        "application/json",
        r#"{"error":{"message":"bad field"}}"#,
    )])
    .await;
    context
        .provider("broken", ProviderKind::Openai, &picky.url, "-")
        .await;
    let refused = context.ask(Dialect::Chat, body).await.err().unwrap();
    assert_eq!(refused.upstream.as_ref().unwrap().status, 400);
    assert!(refused.fault.message.contains("bad field"));
    assert_eq!(
        works.answered.load(Ordering::SeqCst),
        1,
        "a request that is wrong is wrong everywhere"
    );
    let row = context.settled().await;
    assert_eq!((row.outcome, row.cost), (CallOutcome::Failed, Usd::ZERO));
}

#[tokio::test]
async fn hostile_providers_end_in_clear_errors_and_right_money() {
    let context = Context::new().await;
    let cut = "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"usage\":{\"input_tokens\":50,\"output_tokens\":1}}}\n\n\
               event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"delta\":{\"type\":\"text_delta\",\"text\":\"twelve bytes\"}}\n\n";
    let provider = Provider::start(vec![
        events(cut),
        Reply {
            hangs: true,
            ..events("data: {\"choi")
        },
        events(&format!("data: {}", "x".repeat(10 * 1024 * 1024))),
        json("{\"half\": "),
        answer("200 OK", "text/html", "<h1>"),
    ])
    .await;
    context
        .provider("p", ProviderKind::Anthropic, &provider.url, "m*")
        .await;
    context.price("m1", "1", "1").await;
    let body = r#"{"model":"m1","stream":true,"max_tokens":9,"messages":[{"role":"user","content":"x"}]}"#;

    let heard = whole(context.ask(Dialect::Messages, body).await).await;
    assert!(
        heard.starts_with(cut) && heard.contains("event: error"),
        "{heard}"
    );
    let row = context.settled().await;
    assert_eq!((row.outcome, row.estimated), (CallOutcome::Failed, true));
    assert_eq!(
        (row.usage.input, row.usage.output),
        (50, 3),
        "what was told is kept, what was not is guessed"
    );
    assert_eq!(row.cost, usd("0.000053"));

    let heard = whole(context.ask(Dialect::Messages, body).await).await;
    assert!(heard.contains("sent nothing for"), "{heard}");
    let heard = whole(context.ask(Dialect::Messages, body).await).await;
    assert!(
        heard.contains("more than 4194304 bytes") && heard.len() < 1000,
        "{}",
        heard.len()
    );
    let body = r#"{"model":"m1","max_tokens":9,"messages":[{"role":"user","content":"x"}]}"#;
    for wanted in ["not JSON", "text/html"] {
        let refused = context.ask(Dialect::Messages, body).await.err().unwrap();
        assert!(
            refused.fault.message.contains(wanted),
            "{}",
            refused.fault.message
        );
    }
}

#[tokio::test]
async fn who_hangs_up_is_heard_by_the_provider_and_pays_for_what_was_said() {
    let context = Context::new().await;
    let begin = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"0123456789abcdef\"},\"finish_reason\":null}]}\n\n";
    let provider = Provider::start(vec![Reply {
        hangs: true,
        ..events(begin)
    }])
    .await;
    context
        .provider("p", ProviderKind::Openai, &provider.url, "m*")
        .await;
    context.price("m1", "1", "2").await;
    let body = r#"{"model":"m1","stream":true,"messages":[]}"#;
    let Served::Stream { mut events, .. } = context.ask(Dialect::Chat, body).await.unwrap() else {
        panic!("a stream was asked for");
    };
    assert_eq!(events.next().await.unwrap(), begin);
    drop(events);
    tokio::time::timeout(Duration::from_secs(5), provider.until_abandoned())
        .await
        .unwrap();
    let row = context.settled().await;
    assert_eq!((row.outcome, row.estimated), (CallOutcome::Cancelled, true));
    assert_eq!(row.usage.output, 4);
    assert!(row.cost > Usd::ZERO);
}

#[tokio::test]
async fn a_killed_gateways_calls_are_settled_by_the_next() {
    let context = Context::new().await;
    let provider = Provider::start(vec![Reply {
        hangs: true,
        ..events("data: {\"a\":1}\n\n")
    }])
    .await;
    context
        .provider("p", ProviderKind::Openai, &provider.url, "m*")
        .await;
    context.price("m1", "1", "2").await;
    let body = r#"{"model":"m1","stream":true,"messages":[]}"#;
    let served = context.ask(Dialect::Chat, body).await.unwrap();
    // Killed: nothing that is in memory gets to say a word.
    let Context {
        models,
        store,
        project,
        directory,
        ..
    } = context;
    let _never_dropped = std::mem::ManuallyDrop::new(served);
    drop((models, store, project));
    let context = Context::at(directory).await;
    let row = context.settled().await;
    assert_eq!((row.outcome, row.estimated), (CallOutcome::Lost, true));
    assert!(row.cost > Usd::ZERO, "what was sent is paid for");
    assert!(context.store.models.open_model_calls().await.unwrap().is_empty());
}

#[tokio::test]
async fn an_unknown_model_and_a_bad_body_are_refused_by_name() {
    let context = Context::new().await;
    for (body, code) in [
        (r#"{"model":"nobody","messages":[]}"#, Code::ModelNotFound),
        (r#"{"messages":[]}"#, Code::ModelMissing),
        (r#"{"model":"#, Code::InvalidBody),
        (
            r#"{"model":"a","providerOptions":{"gateway":{"zeroDataRetention":true}}}"#,
            Code::GatewayOptionUnsupported,
        ),
    ] {
        assert_eq!(
            context.ask(Dialect::Chat, body).await.err().unwrap().fault.code,
            code
        );
    }
}
