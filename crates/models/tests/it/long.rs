//! What takes long is done where nobody else waits: on one thread, with the only other one held, everybody who sends and
//! gets little is served.

use std::sync::Arc;
use std::sync::mpsc;

use atoll_dialects::Dialect;
use atoll_types::{BudgetScope, BudgetWindow, Code, ProviderKind};
use parking_lot::Mutex;

use crate::support::{Context, Provider, Reply, events, json, request, whole};

/// Longer than what is worked through in passing.
const MUCH: usize = 200_000;

fn on_one_thread(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(1)
        .build()
        .unwrap();
    runtime.block_on(test);
}

fn ask(text: &str, more: &str) -> String {
    format!(r#"{{"model":"m1","max_tokens":5{more},"messages":[{{"role":"user","content":"{text}"}}]}}"#)
}

fn answered(text: &str) -> String {
    format!(
        r#"{{"id":"m","type":"message","role":"assistant","content":[{{"type":"text","text":"{text}"}}],"stop_reason":"end_turn","usage":{{"input_tokens":1,"output_tokens":1}}}}"#
    )
}

fn streamed(text: &str) -> String {
    [
        r#"{"type":"message_start","message":{"usage":{"input_tokens":1,"output_tokens":1}}}"#.to_owned(),
        r#"{"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}"#.to_owned(),
        format!(
            r#"{{"type":"content_block_delta","index":0,"delta":{{"type":"text_delta","text":"{text}"}}}}"#
        ),
        r#"{"type":"content_block_stop","index":0}"#.to_owned(),
        r#"{"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":1}}"#
            .to_owned(),
        r#"{"type":"message_stop"}"#.to_owned(),
    ]
    .map(|data| format!("data: {data}\n\n"))
    .concat()
}

/// One provider for the model `m1`, and one that gives short answers for `m2`.
async fn with_providers(reply: Reply) -> (Arc<Context>, [Provider; 2]) {
    let context = Context::patient().await;
    let first = Provider::start(vec![reply]).await;
    let second = Provider::start(vec![json(&answered("short"))]).await;
    for (provider, model) in [(&first, "m1"), (&second, "m2")] {
        context
            .provider(model, ProviderKind::Anthropic, &provider.url, model)
            .await;
    }
    (Arc::new(context), [first, second])
}

/// While nobody may work on what is long, the first call does not end, and others do.
async fn is_held(reply: Reply, body: String) {
    let (context, _providers) = with_providers(reply).await;
    let (release, held) = mpsc::channel::<()>();
    let holding = tokio::task::spawn_blocking(move || held.recv());
    let first = tokio::spawn({
        let context = Arc::clone(&context);
        async move { whole(context.ask(Dialect::Chat, &body).await).await }
    });
    // Whoever is served in passing has been by then.
    for _ in 0..20 {
        let body = ask("hello", "").replace("m1", "m2");
        let answer = whole(context.ask(Dialect::Chat, &body).await).await;
        assert!(answer.contains("short"), "{answer}");
    }
    assert!(!first.is_finished(), "it was worked through where others wait");
    release.send(()).unwrap();
    holding.await.unwrap().unwrap();
    let answer = first.await.unwrap();
    assert!(
        answer.contains("short") || answer.contains(&"x".repeat(MUCH)),
        "it came whole"
    );
}

#[test]
fn a_long_request_is_not_translated_where_others_wait() {
    on_one_thread(is_held(json(&answered("short")), ask(&"x".repeat(MUCH), "")));
}

#[test]
fn a_long_answer_is_not_read_where_others_wait() {
    let long = json(&answered(&"x".repeat(MUCH)));
    on_one_thread(is_held(long, ask("hello", "")));
}

#[test]
fn a_long_event_is_not_read_where_others_wait() {
    let long = events(&streamed(&"x".repeat(MUCH)));
    let body = ask("hello", r#","stream":true"#);
    on_one_thread(is_held(long, body));
}

/// With budgets, what a call may cost is read from its translation, before it is admitted.
#[test]
fn who_asks_little_is_told_before_those_who_asked_much() {
    on_one_thread(async {
        let (context, providers) = with_providers(json(&answered("short"))).await;
        context.price("m1", "1", "1").await;
        let budget = atoll_models::SetBudget {
            name: "b".into(),
            scope: BudgetScope::Project,
            subject: None,
            window: BudgetWindow::Total,
            limit: "0.000001".parse().unwrap(),
            alert_percent: None,
        };
        context.models.set_budget(&context.project, budget).await.unwrap();
        let parts = vec![r#"{"type":"text","text":"x"}"#; 20_000].join(",");
        let long = ask("", "").replace(r#""content":"""#, &format!(r#""content":[{parts}]"#));
        let short = ask("hello", "").replace("m1", "nobody-knows-it");
        let told = Arc::new(Mutex::new(Vec::new()));
        let asking = [long.clone(), long.clone(), long, short].map(|body| {
            let (context, told) = (Arc::clone(&context), Arc::clone(&told));
            tokio::spawn(async move {
                let (who, request) = (context.who(), request(Dialect::Chat, &body));
                let asked = context.models.call(&who, request).await;
                let code = asked.err().unwrap().fault.code;
                told.lock().push(code);
            })
        });
        for asked in asking {
            asked.await.unwrap();
        }
        let exhausted = Code::BudgetExhausted;
        assert_eq!(
            *told.lock(),
            [Code::ModelNotFound, exhausted, exhausted, exhausted]
        );
        assert_eq!(providers[0].last_request(), "", "nobody was asked");
    });
}
