//! Where providers may be, and where their keys go.

use std::sync::atomic::Ordering;

use atoll_dialects::Dialect;
use atoll_models::{CreateModelKey, SetProvider, Who};
use atoll_types::{Code, ProjectId, ProviderKind};
use bytes::Bytes;

use crate::support::{Context, OWN, Provider, clock, json, request, whole};

const ANSWER: &str = r#"{"choices":[{"index":0,"message":{"role":"assistant","content":"x"},"finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":1}}"#;
const ASK: &str = r#"{"model":"m1","messages":[]}"#;

/// Whoever may change a provider but does not know its key cannot have it sent elsewhere.
#[tokio::test]
async fn a_key_does_not_move_to_another_place() {
    let context = Context::new().await;
    let (right, wrong) = (
        Provider::start(vec![json(ANSWER)]).await,
        Provider::start(vec![json(ANSWER)]).await,
    );
    context
        .provider("p", ProviderKind::Openai, &right.url, "m*")
        .await;
    let without_key = |kind, url: &str| SetProvider {
        key: None,
        ..context.set_provider("p", kind, url, "m*")
    };
    let deeper = format!("{}/other", right.url);
    for (kind, url) in [
        (ProviderKind::Openai, wrong.url.as_str()),
        (ProviderKind::Openai, &right.url.replace("127.0.0.1", "localhost")),
        (ProviderKind::Openai, &deeper),
        (ProviderKind::Azure, &right.url),
    ] {
        let refused = context
            .models
            .set_provider(&context.project, without_key(kind, url))
            .await
            .unwrap_err();
        assert_eq!(refused.code, Code::ProviderKeyNeeded, "{kind} {url}");
    }
    whole(context.ask(Dialect::Chat, ASK).await).await;
    assert_eq!(
        (
            right.answered.load(Ordering::SeqCst),
            wrong.answered.load(Ordering::SeqCst)
        ),
        (1, 0)
    );
    // What says nothing about where it goes changes without it, and with it everything does.
    let other_names = SetProvider {
        serves: Some(vec!["m1".into()]),
        ..without_key(ProviderKind::Openai, &right.url)
    };
    for change in [
        other_names,
        context.set_provider("p", ProviderKind::Openai, &wrong.url, "m*"),
    ] {
        let view = context
            .models
            .set_provider(&context.project, change)
            .await
            .unwrap();
        assert!(view.has_key);
    }
}

/// Tenants' providers are beyond the floor, however their address is written; the operator's are anywhere.
#[tokio::test]
async fn tenants_reach_neither_this_machine_nor_its_neighbours() {
    let context = Context::new().await;
    let provider = Provider::start(vec![json(ANSWER)]).await;
    let tenant = context
        .store
        .identity
        .ensure_project("tenant", ProjectId::from_entropy([2; 20]), clock())
        .await
        .unwrap()
        .id;
    let mut who = context.who();
    who.spender.project = tenant.clone();
    let port = provider.url.rsplit(':').next().unwrap();
    let own = OWN.to_string();
    let hosts = [
        own.as_str(),
        "127.0.0.1",
        "localhost",
        "127.1",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "169.254.169.254",
        "10.0.0.1",
    ];
    for (at, host) in hosts.into_iter().enumerate() {
        let url = format!("http://{host}:{port}");
        let ask = format!(r#"{{"model":"p{at}/m1","messages":[]}}"#);
        let set = context.set_provider(&format!("p{at}"), ProviderKind::Openai, &url, "-");
        context.models.set_provider(&tenant, set).await.unwrap();
        let refused = context.models.call(&who, request(Dialect::Chat, &ask)).await;
        let refused = refused.err().unwrap();
        assert!(
            refused.fault.message.contains("is refused on this server"),
            "{url}: {}",
            refused.fault.message
        );
        // Counting tokens is a way there, too.
        let set = context.set_provider(&format!("p{at}"), ProviderKind::Anthropic, &url, "-");
        context.models.set_provider(&tenant, set).await.unwrap();
        let refused = context.models.count_tokens(&who, Bytes::from(ask)).await;
        let refused = refused.err().unwrap();
        assert!(
            refused.fault.message.contains("is refused on this server"),
            "{url}: {}",
            refused.fault.message
        );
    }
    assert_eq!(provider.answered.load(Ordering::SeqCst), 0);
    // Nor by a connection that the operator has left open.
    context
        .provider("p", ProviderKind::Openai, &provider.url, "m*")
        .await;
    whole(context.ask(Dialect::Chat, ASK).await).await;
    let set = context.set_provider("p", ProviderKind::Openai, &provider.url, "m*");
    context.models.set_provider(&tenant, set).await.unwrap();
    assert!(
        context
            .models
            .call(&who, request(Dialect::Chat, ASK))
            .await
            .is_err()
    );
    assert_eq!(provider.requests.lock().len(), 1);
}

/// Whatever is asked with a key counts, not only what a model answers.
#[tokio::test]
async fn counting_tokens_counts_against_the_rate() {
    let context = Context::new().await;
    let provider = Provider::start(vec![json(r#"{"input_tokens":7}"#)]).await;
    context
        .provider("p", ProviderKind::Anthropic, &provider.url, "m*")
        .await;
    let request = CreateModelKey {
        name: "ci".into(),
        models: Vec::new(),
        requests_per_minute: Some(3),
        tokens_per_minute: None,
        expires_at: None,
    };
    let (_, secret) = context
        .models
        .create_model_key(&context.project, request)
        .await
        .unwrap();
    let who = Who {
        key: context.key(&secret).await,
        ..context.who()
    };
    let body = Bytes::from_static(ASK.as_bytes());
    assert_eq!(context.models.count_tokens(&who, body.clone()).await.unwrap(), 7);
    // What is refused for another reason counts as well.
    let unknown = Bytes::from_static(br#"{"model":"nobody"}"#);
    assert!(context.models.count_tokens(&who, unknown).await.is_err());
    context.models.take_rate(&who, 0).unwrap();
    let refused = context.models.count_tokens(&who, body).await.unwrap_err();
    assert_eq!(refused.fault.code, Code::RateLimited);
}
