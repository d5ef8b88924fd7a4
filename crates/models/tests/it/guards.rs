//! What may not leave for a provider does not reach it.

use atoll_dialects::Dialect;
use atoll_store::{ModelGuards, ModelGuardsRow, ScreenRule};
use atoll_types::{Code, ProviderKind};

use crate::support::{Context, Provider, json, whole};

const ANSWER: &str = r#"{"id":"x","choices":[{"index":0,"message":{"role":"assistant","content":"hi"},"finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":1}}"#;

fn ask(text: &str) -> String {
    format!(r#"{{"model":"m1","messages":[{{"role":"user","content":"{text}"}}]}}"#)
}

fn rule(name: &str, redact: bool) -> ScreenRule {
    ScreenRule {
        name: name.into(),
        pattern: None,
        redact,
    }
}

async fn code(context: &Context, body: &str) -> Code {
    context.ask(Dialect::Chat, body).await.err().unwrap().fault.code
}

#[tokio::test]
async fn guards_hold_and_outlive_the_server() {
    let context = Context::new().await;
    let provider = Provider::start(vec![json(ANSWER)]).await;
    context
        .provider("p", ProviderKind::Openai, &provider.url, "m*")
        .await;
    let guards = ModelGuards {
        max_input_tokens: Some(100),
        blocked: vec!["p/m9*".into()],
        screen: vec![rule("email", true), rule("card", false)],
    };
    context
        .models
        .set_guards(&context.project, guards.clone())
        .await
        .unwrap();
    context.models.shutdown().await;
    let context = Context::at(context.directory).await;
    assert_eq!(context.models.guards(&context.project), guards);

    whole(
        context
            .ask(Dialect::Chat, &ask("write to ann@mail.example.org"))
            .await,
    )
    .await;
    let request = provider.last_request();
    assert!(request.ends_with(&ask("write to [email]")), "{request}");
    let sent = provider.requests.lock().len();
    assert_eq!(
        code(&context, &ask("take 4111 1111 1111 1111")).await,
        Code::GuardRefused
    );
    assert_eq!(
        code(&context, &ask(&"word ".repeat(100))).await,
        Code::InputTooLarge
    );
    let blocked = ask("hello").replace("m1", "m9-large");
    assert_eq!(code(&context, &blocked).await, Code::ModelBlocked);
    assert_eq!(provider.requests.lock().len(), sent, "nothing has left");
}

#[tokio::test]
async fn guards_that_cannot_work_are_refused() {
    let context = Context::new().await;
    for guards in [
        ModelGuards {
            screen: vec![rule("nobody-knows", true)],
            ..ModelGuards::default()
        },
        ModelGuards {
            blocked: vec![String::new()],
            ..ModelGuards::default()
        },
    ] {
        let refused = context
            .models
            .set_guards(&context.project, guards)
            .await
            .unwrap_err();
        assert_eq!(refused.code, Code::GuardsInvalid);
    }
    assert_eq!(context.models.guards(&context.project), ModelGuards::default());
}

/// A release may take fewer patterns than the one before it: that is no reason not to start.
#[tokio::test]
async fn kept_guards_that_cannot_be_used_close_their_project_alone() {
    let context = Context::new().await;
    let provider = Provider::start(vec![json(ANSWER)]).await;
    context
        .provider("p", ProviderKind::Openai, &provider.url, "m*")
        .await;
    let row = ModelGuardsRow {
        project: context.project.clone(),
        guards: ModelGuards {
            screen: (0..40)
                .map(|n| ScreenRule {
                    name: format!("own{n}"),
                    pattern: Some(format!("a[ab]{{{}}}c", 2500 + n)),
                    redact: false,
                })
                .collect(),
            ..ModelGuards::default()
        },
        updated_at: crate::support::clock(),
    };
    let refused = context
        .models
        .set_guards(&context.project, row.guards.clone())
        .await;
    assert_eq!(refused.unwrap_err().code, Code::GuardsInvalid);
    context.store.models.put_model_guards(row).await.unwrap();
    context.models.shutdown().await;
    let context = Context::at(context.directory).await;
    assert_eq!(code(&context, &ask("hello")).await, Code::GuardsUnusable);
    assert!(provider.requests.lock().is_empty(), "nothing has left");
    let own = ModelGuards {
        screen: vec![ScreenRule {
            name: "ticket".into(),
            pattern: Some("T-[0-9]+".into()),
            redact: true,
        }],
        ..ModelGuards::default()
    };
    context.models.set_guards(&context.project, own).await.unwrap();
    whole(context.ask(Dialect::Chat, &ask("see T-12")).await).await;
    assert!(provider.last_request().ends_with(&ask("see [ticket]")));
}
