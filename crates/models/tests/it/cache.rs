//! Answers are given again to those who ask for it, and to nobody else.

use std::time::Duration;

use atoll_dialects::Dialect;
use atoll_models::{Served, Who};
use atoll_types::{CallOutcome, KeyId, ProjectId, ProviderKind, Usd};

use crate::support::{Context, Provider, answer, events, json, request, whole};

const ASK: &str = r#"{"model":"m1","messages":[{"role":"user","content":"hello"}]}"#;
const ASK_STREAM: &str = r#"{"model":"m1","messages":[{"role":"user","content":"hello"}],"stream":true}"#;
const CHAT: &str = r#"{"choices":[{"index":0,"message":{"role":"assistant","content":"hi"},"finish_reason":"stop"}],"usage":{"prompt_tokens":100,"completion_tokens":20}}"#;
const STREAM: &str = concat!(
    "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"hi\"},\"finish_reason\":\"stop\"}],\"usage\":null}\n\n",
    "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":10,\"completion_tokens\":2}}\n\n",
    "data: [DONE]\n\n",
);

async fn call(context: &Context, who: &Who, body: &str, keep: Option<Duration>) -> (bool, String) {
    let mut request = request(Dialect::Chat, body);
    request.keep = keep;
    let served = context.models.call(who, request).await;
    let cached = match served.as_ref().unwrap() {
        Served::Whole { cached, .. } | Served::Stream { cached, .. } => *cached,
    };
    (cached, whole(served).await)
}

#[tokio::test]
async fn the_same_request_is_answered_again_for_nothing() {
    let context = Context::new().await;
    let provider = Provider::start(vec![json(CHAT)]).await;
    context
        .provider("p", ProviderKind::Openai, &provider.url, "m*")
        .await;
    context.price("m1", "3", "15").await;
    let (who, keep) = (context.who(), Some(Duration::from_secs(60)));
    let first = call(&context, &who, ASK, keep).await;
    assert_eq!((first.0, first.1.as_str()), (false, CHAT));
    assert!(context.settled().await.cost > Usd::ZERO);
    let again = call(&context, &who, ASK, keep).await;
    assert_eq!((again.0, again.1.as_str()), (true, CHAT));
    let row = context.settled().await;
    assert_eq!(
        (row.cost, row.attempts, row.outcome, row.estimated),
        (Usd::ZERO, 0, CallOutcome::Done, false)
    );

    // Whoever does not ask for it, asks for something else or is somebody else gets an answer of their own.
    let mut other = context.who();
    other.spender.key = Some(KeyId::from_entropy([9; 20]));
    let else_asked = ASK.replace("hello", "hello ");
    for (who, body, keep) in [
        (&who, ASK, None),
        (&who, else_asked.as_str(), keep),
        (&other, ASK, keep),
    ] {
        assert!(!call(&context, who, body, keep).await.0);
    }
    assert_eq!(provider.requests.lock().len(), 4);
}

#[tokio::test]
async fn streams_are_given_again_whole_and_only_if_they_were() {
    let context = Context::new().await;
    let cut = STREAM.split_once("data: {\"choices\":[],").unwrap().0;
    let replies = vec![
        answer(
            "400 Bad Request",
            "application/json",
            r#"{"error":{"message":"no"}}"#,
        ),
        events(&cut.replace("\"stop\"", "null")),
        events(STREAM),
    ];
    let provider = Provider::start(replies).await;
    context
        .provider("p", ProviderKind::Openai, &provider.url, "m*")
        .await;
    let (who, keep) = (context.who(), Some(Duration::from_secs(60)));
    let mut failing = request(Dialect::Chat, ASK_STREAM);
    failing.keep = keep;
    assert!(context.models.call(&who, failing).await.is_err());
    let broken = call(&context, &who, ASK_STREAM, keep).await;
    assert!(
        !broken.0 && broken.1.contains("before its answer was complete"),
        "{broken:?}"
    );
    let first = call(&context, &who, ASK_STREAM, keep).await;
    assert!(!first.0 && first.1.ends_with("data: [DONE]\n\n"), "{first:?}");
    let again = call(&context, &who, ASK_STREAM, keep).await;
    assert_eq!(again, (true, first.1));
}

#[tokio::test]
async fn what_was_asked_and_answered_is_kept_where_that_is_wanted() {
    let context = Context::new().await;
    let provider = Provider::start(vec![events(STREAM), json(CHAT)]).await;
    context
        .provider("p", ProviderKind::Openai, &provider.url, "m*")
        .await;
    let secret = ASK_STREAM.replace("hello", "mail a@b.example.org");
    call(&context, &context.who(), &secret, None).await;
    context.models.shutdown().await;
    let row = context.settled().await;
    let kept = context
        .models
        .bodies(&context.project, &row.id)
        .await
        .unwrap()
        .unwrap();
    assert!(
        kept.request.contains("mail [email]") && !kept.request.contains("a@b"),
        "{kept:?}"
    );
    assert!(
        kept.answer.contains(r#""content":"hi""#) && !kept.shortened,
        "{kept:?}"
    );
    let other = ProjectId::from_entropy([3; 20]);
    assert_eq!(context.models.bodies(&other, &row.id).await.unwrap(), None);
    // They go with time.
    let later = row.started_at.plus_millis(10_000);
    assert_eq!(
        context
            .store
            .models
            .trim_model_bodies(row.started_at, 10)
            .await
            .unwrap(),
        0
    );
    assert_eq!(
        context.store.models.trim_model_bodies(later, 10).await.unwrap(),
        1
    );
}
