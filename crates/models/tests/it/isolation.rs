//! What one address, one caller or one project does costs no other anything: neither a key nor a retry nor a model.

use atoll_dialects::Dialect;
use atoll_models::{Refusal, SetProvider};
use atoll_types::{Code, ProjectId, ProviderKind};
use bytes::Bytes;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use zeroize::Zeroizing;

use crate::support::{Context, Provider, answer, clock, events, json, request, whole};

const ANSWER: &str = r#"{"choices":[{"index":0,"message":{"role":"assistant","content":"x"},"finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":1}}"#;
const ASK: &str = r#"{"model":"m1","messages":[]}"#;

/// A call that its provider holds until the provider was moved, and then wants to be tried again.
#[tokio::test]
async fn a_new_key_does_not_go_to_an_old_address() {
    let context = Context::new().await;
    let old = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let old_url = format!("http://{}", old.local_addr().unwrap());
    let new = Provider::start(vec![json(ANSWER)]).await;
    context.provider("p", ProviderKind::Openai, &old_url, "m*").await;
    let held = async {
        let (mut stream, _) = old.accept().await.unwrap();
        let mut seen = Vec::new();
        while !seen.ends_with(b"}") {
            assert_ne!(stream.read_buf(&mut seen).await.unwrap(), 0, "closed");
        }
        let moved = SetProvider {
            key: Some(Zeroizing::new(b"sk-of-the-new-place".to_vec())),
            ..context.set_provider("p", ProviderKind::Openai, &new.url, "m*")
        };
        context
            .models
            .set_provider(&context.project, moved)
            .await
            .unwrap();
        let busy = b"HTTP/1.1 503 No\r\nretry-after: 0\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
        stream.write_all(busy).await.unwrap();
        String::from_utf8(seen).unwrap()
    };
    let (seen, refused) = tokio::join!(held, context.ask(Dialect::Chat, ASK));
    assert!(seen.contains("Bearer sk-secret\r\n"), "{seen}");
    assert!(refused.is_err());
    // Whatever was sent there once more would wait to be accepted.
    let old = old.into_std().unwrap();
    assert_eq!(
        old.accept().unwrap_err().kind(),
        std::io::ErrorKind::WouldBlock,
        "nothing was sent there again"
    );
    whole(context.ask(Dialect::Chat, ASK).await).await;
    assert!(new.last_request().contains("Bearer sk-of-the-new-place\r\n"));
}

fn said(refused: Refusal) -> String {
    let upstream = refused.upstream.map(|upstream| upstream.body).unwrap_or_default();
    format!(
        "{} {} {}",
        refused.fault.message,
        refused.fault.hint.unwrap_or_default(),
        String::from_utf8_lossy(&upstream)
    )
}

/// A provider that repeats the key that it was sent tells it to nobody, whatever it says and wherever.
#[tokio::test]
async fn a_key_that_a_provider_repeats_is_not_passed_on() {
    let json = r#"{"error":{"message":"what is sk-secret?"}}"#;
    for (status, body) in [
        ("400 No", json),
        ("400 No", "what is sk-secret?"),
        ("401 No", json),
        ("403 No", json),
        ("404 No", json),
        ("500 No", json),
    ] {
        let context = Context::new().await;
        let provider = Provider::start(vec![answer(status, "application/json", body)]).await;
        for (name, kind) in [
            ("open", ProviderKind::Openai),
            ("claude", ProviderKind::Anthropic),
        ] {
            context.provider(name, kind, &provider.url, "-").await;
            let ask = format!(r#"{{"model":"{name}/m1","messages":[]}}"#);
            let mut heard = said(context.ask(Dialect::Chat, &ask).await.err().unwrap());
            heard.push_str(&context.settled().await.error.unwrap_or_default());
            if kind == ProviderKind::Anthropic {
                let who = context.who();
                let counted = context.models.count_tokens(&who, Bytes::from(ask)).await;
                let refused = counted.unwrap_err();
                let is_about_the_key = matches!(status, "401 No" | "403 No");
                assert_eq!(refused.fault.code == Code::ProviderKeyRefused, is_about_the_key);
                heard.push_str(&said(refused));
            }
            assert!(provider.last_request().contains("sk-secret"));
            assert!(!heard.contains("sk-secret"), "{kind} {status}: {heard}");
        }
    }
}

#[tokio::test]
async fn nor_in_an_answer() {
    let context = Context::new().await;
    let echo = ANSWER.replace("\"x\"", "\"your key is sk-secret.\"");
    let piece = |text: &str| {
        format!(
            "data: {{\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"{text}\"}},\"finish_reason\":null}}]}}\n\n"
        )
    };
    let stream = format!(
        "{}data: {{\"choices\":[{{\"index\":0,\"delta\":{{}},\"finish_reason\":\"stop\"}}]}}\n\ndata: [DONE]\n\n",
        piece("sk-secret, you know")
    );
    let provider = Provider::start(vec![json(&echo), events(&stream), events(&stream)]).await;
    context
        .provider("p", ProviderKind::Openai, &provider.url, "m*")
        .await;
    let heard = whole(context.ask(Dialect::Chat, ASK).await).await;
    assert_eq!(heard, echo.replace("sk-secret", "*********"));
    for dialect in [Dialect::Chat, Dialect::Messages] {
        let ask = r#"{"model":"m1","stream":true,"max_tokens":9,"messages":[{"role":"user","content":"x"}]}"#;
        let served = context.ask(dialect, ask).await;
        let heard = whole(served).await;
        assert!(heard.contains("*********, you know"), "{heard}");
        assert!(!heard.contains("sk-secret"), "{heard}");
    }
}

/// What a caller can bring about alone does not take a model away from the others.
#[tokio::test]
async fn requests_that_are_refused_do_not_rest_a_provider() {
    for status in [
        "400 No", "401 No", "403 No", "404 No", "409 No", "413 No", "422 No",
    ] {
        let context = Context::new().await;
        let refusal = answer(status, "application/json", "{}");
        let provider = Provider::start(vec![refusal]).await;
        context
            .provider("p", ProviderKind::Openai, &provider.url, "m*")
            .await;
        for _ in 0..7 {
            let refused = context.ask(Dialect::Chat, ASK).await.err().unwrap();
            assert_ne!(refused.fault.code, Code::ProviderResting, "{status}");
        }
    }
    let context = Context::new().await;
    let provider = Provider::start(vec![answer("500 No", "application/json", "{}")]).await;
    context
        .provider("p", ProviderKind::Openai, &provider.url, "m*")
        .await;
    let mut codes = Vec::new();
    for _ in 0..7 {
        codes.push(context.ask(Dialect::Chat, ASK).await.err().unwrap().fault.code);
    }
    assert!(codes.contains(&Code::ProviderResting), "{codes:?}");
}

/// What is refused by a rule of ours will be refused again, so nobody's retries are spent on it.
#[tokio::test]
async fn what_is_out_of_bounds_is_not_tried_again() {
    let context = Context::new().await;
    let tenant = context
        .store
        .identity
        .ensure_project("tenant", ProjectId::from_entropy([2; 20]), clock())
        .await
        .unwrap()
        .id;
    let mut who = context.who();
    who.spender.project = tenant.clone();
    for (at, host) in ["127.0.0.1", "localhost"].into_iter().enumerate() {
        let url = format!("http://{host}:9");
        let set = context.set_provider(&format!("p{at}"), ProviderKind::Openai, &url, "-");
        context.models.set_provider(&tenant, set).await.unwrap();
        let ask = format!(r#"{{"model":"p{at}/m1","messages":[]}}"#);
        // As often as it is asked: it does not rest either.
        for _ in 0..7 {
            let refused = context.models.call(&who, request(Dialect::Chat, &ask)).await;
            let message = refused.err().unwrap().fault.message;
            assert!(message.contains("is refused on this server"), "{message}");
        }
    }
    context.models.shutdown().await;
    let calls = context
        .store
        .models
        .model_calls(&tenant, None, None, 100)
        .await
        .unwrap()
        .items;
    assert_eq!(calls.len(), 14);
    assert!(calls.iter().all(|call| call.attempts == 1));
}
