//! Nothing that a caller does makes a call cheaper than what its provider charges for it.

use std::sync::atomic::Ordering;
use std::time::Duration;

use atoll_dialects::Dialect;
use atoll_gateway_core::Target;
use atoll_models::{Served, SetBudget, SetRoute};
use atoll_store::ModelCallRow;
use atoll_types::{BudgetScope, BudgetWindow, CallOutcome, Code, ProviderKind, Usd};
use futures_util::StreamExt as _;

use crate::support::{Context, Provider, Reply, answer, events, json, request, whole};

const BEGIN: &str =
    "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"hello\"},\"finish_reason\":null}]}\n\n";
const FINISH: &str = "data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n";
const USAGE: &str =
    "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":10,\"completion_tokens\":1000000}}\n\n";
const DONE: &str = "data: [DONE]\n\n";
const ASK: &str = r#"{"model":"m1","stream":true,"max_tokens":2000000,"messages":[]}"#;

fn usd(text: &str) -> Usd {
    text.parse().unwrap()
}

/// A gateway with a budget of this much, and a provider whose model costs nothing to read and a dollar for a million tokens.
async fn capped(limit: Option<&str>, replies: Vec<Reply>) -> (Context, Provider) {
    let context = Context::new().await;
    let provider = Provider::start(replies).await;
    context
        .provider("p", ProviderKind::Openai, &provider.url, "m*")
        .await;
    context.price("m1", "0", "1").await;
    if let Some(limit) = limit {
        let budget = SetBudget {
            name: "b".into(),
            scope: BudgetScope::Project,
            subject: None,
            window: BudgetWindow::Day,
            limit: usd(limit),
            alert_percent: None,
        };
        context.models.set_budget(&context.project, budget).await.unwrap();
    }
    (context, provider)
}

fn standing(context: &Context) -> (Usd, Usd) {
    let budgets = context.models.list_budgets(&context.project);
    budgets[0]
        .standing
        .first()
        .map_or((Usd::ZERO, Usd::ZERO), |standing| {
            (standing.spent, standing.reserved)
        })
}

/// Hears so many pieces and hangs up.
async fn hear(context: &Context, body: &str, pieces: usize) {
    let Served::Stream { mut events, .. } = context.ask(Dialect::Chat, body).await.unwrap() else {
        panic!("a stream was asked for");
    };
    for _ in 0..pieces {
        events.next().await.unwrap();
    }
}

#[tokio::test]
async fn hanging_up_before_the_usage_saves_nothing() {
    for pieces in [0, 1] {
        let text = format!("{BEGIN}{FINISH}{USAGE}{DONE}");
        let (context, provider) = capped(Some("100"), vec![events(&text)]).await;
        hear(&context, ASK, pieces).await;
        let row = context.settled().await;
        assert_eq!((row.cost, row.estimated), (usd("1"), false), "{row:?}");
        assert_eq!(standing(&context), (usd("1"), Usd::ZERO));
        assert_eq!(provider.answered.load(Ordering::SeqCst), 1);
    }
}

/// Also where no budget applies: the model has stopped, so hearing the rest costs nobody anything.
#[tokio::test]
async fn who_hangs_up_at_the_end_is_booked_what_it_cost() {
    let held = Reply {
        hangs: true,
        ..events(&format!("{BEGIN}{FINISH}{USAGE}{DONE}"))
    };
    let (context, _provider) = capped(None, vec![held]).await;
    let Served::Stream { mut events, .. } = context.ask(Dialect::Chat, ASK).await.unwrap() else {
        panic!("a stream was asked for");
    };
    let mut heard = Vec::new();
    while !String::from_utf8_lossy(&heard).contains("finish_reason\":\"stop") {
        heard.extend_from_slice(&events.next().await.unwrap());
    }
    drop(events);
    let row = context.settled().await;
    assert_eq!((row.cost, row.estimated), (usd("1"), false), "{row:?}");
}

#[tokio::test]
async fn what_cannot_be_heard_out_costs_what_was_reserved() {
    for text in [
        BEGIN.to_owned(),
        format!("{BEGIN}{FINISH}"),
        // Some tell what they used so far with every piece.
        format!("{USAGE}{BEGIN}"),
    ] {
        let silent = Reply {
            hangs: true,
            ..events(&text)
        };
        let (context, provider) = capped(Some("100"), vec![silent]).await;
        hear(&context, ASK, 1).await;
        let row = context.settled().await;
        assert_eq!((row.cost, row.estimated), (usd("2"), true), "{row:?}");
        assert_eq!(standing(&context), (usd("2"), Usd::ZERO));
        provider.until_abandoned().await;
    }
}

/// Nobody has told what it used: not the provider that answers in one piece, nor the one that answers in many.
#[tokio::test]
async fn an_answer_without_usage_costs_what_was_reserved() {
    let whole_answer =
        r#"{"choices":[{"index":0,"message":{"role":"assistant","content":"x"},"finish_reason":"stop"}]}"#;
    for (body, reply) in [
        (ASK.to_owned(), events(&format!("{BEGIN}{FINISH}{DONE}"))),
        (ASK.replace("true", "false"), json(whole_answer)),
        (ASK.replace("true", "false"), json("{\"half\":")),
        // Who says zero has not counted.
        (
            ASK.to_owned(),
            events(&format!(
                "{BEGIN}{FINISH}{}{DONE}",
                USAGE.replace("10,", "0,").replace("1000000", "0")
            )),
        ),
    ] {
        let (context, _provider) = capped(Some("100"), vec![reply]).await;
        let served = context.ask(Dialect::Chat, &body).await;
        if served.is_ok() {
            whole(served).await;
        }
        let row = context.settled().await;
        assert_eq!((row.cost, row.estimated), (usd("2"), true), "{row:?}");
    }
}

#[tokio::test]
async fn hanging_up_before_the_answer_begins_saves_nothing() {
    let text = r#"{"choices":[{"index":0,"message":{"role":"assistant","content":"x"},"finish_reason":"stop"}],"usage":{"prompt_tokens":0,"completion_tokens":1000000}}"#;
    let (context, provider) = capped(Some("100"), vec![json(text)]).await;
    let body = ASK.replace("true", "false");
    {
        let call = context.ask(Dialect::Chat, &body);
        tokio::pin!(call);
        // It is on its way as soon as it was asked for once.
        assert!(futures_util::poll!(&mut call).is_pending());
    }
    let row = context.settled().await;
    assert_eq!(
        (row.outcome, row.cost, row.estimated),
        (CallOutcome::Cancelled, usd("1"), false),
        "{row:?}"
    );
    assert_eq!(provider.answered.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn the_larger_of_two_limits_is_reserved() {
    let (context, provider) = capped(Some("0.09"), vec![json("{}")]).await;
    for body in [
        r#"{"model":"m1","max_completion_tokens":1,"max_tokens":100000,"messages":[]}"#,
        r#"{"model":"m1","max_tokens":1,"max_completion_tokens":100000,"messages":[]}"#,
        r#"{"model":"m1","max_tokens":1,"n":100000,"messages":[]}"#,
        r#"{"model":"m1","max_output_tokens":1,"maxOutputTokens":1,"max_tokens":100000,"messages":[]}"#,
    ] {
        let code = context.ask(Dialect::Chat, body).await.err().unwrap().fault.code;
        assert!(
            matches!(code, Code::BudgetExhausted | Code::FieldUnpriced),
            "{body}: {code}"
        );
    }
    for body in [
        r#"{"model":"m1","max_tokens":1,"max_tokens":100000,"messages":[]}"#,
        r#"{"model":"m1","max_tokens":1,"max_tok\u0065ns":100000,"messages":[]}"#,
        r#"{"model":"m1","max_tokens":1,"Max_Tokens":100000,"messages":[]}"#,
        r#"{"model":"m1","MODEL":"m2","max_tokens":1,"messages":[]}"#,
        "\u{feff}{\"model\":\"m1\",\"max_tokens\":1,\"messages\":[]}",
        r#"{"model":"m1","max_tokens":1,"messages":[]}{"max_tokens":100000}"#,
        r#"{"model":"m1","max_tokens":-1,"messages":[]}"#,
    ] {
        let code = context.ask(Dialect::Chat, body).await.err().unwrap().fault.code;
        assert_eq!(code, Code::InvalidBody, "{body}");
    }
    assert_eq!(provider.answered.load(Ordering::SeqCst), 0, "nobody was asked");
    assert_eq!(standing(&context), (Usd::ZERO, Usd::ZERO));
}

#[tokio::test]
async fn what_has_no_price_is_refused_where_a_budget_applies_and_marked_where_none_does() {
    const ANSWER: &str = r#"{"status":"completed","output":[],"usage":{"input_tokens":1,"output_tokens":1}}"#;
    let bodies = [
        (
            r#"{"model":"m1","input":"x","max_output_tokens":1,"background":true}"#,
            "background",
        ),
        (
            r#"{"model":"m1","input":"x","max_output_tokens":1,"tools":[{"type":"web_search"}]}"#,
            "tools[0].type",
        ),
        (
            r#"{"model":"m1","input":"x","max_output_tokens":1,"previous_response_id":"r"}"#,
            "previous_response_id",
        ),
        (
            r#"{"model":"m1","input":"x","max_output_tokens":1,"speed":"fast"}"#,
            "speed",
        ),
    ];
    for limit in [Some("1"), None] {
        let (context, provider) = capped(limit, vec![json(ANSWER)]).await;
        let mut with_responses = context.set_provider("p", ProviderKind::Openai, &provider.url, "m*");
        with_responses.responses = Some(true);
        context
            .models
            .set_provider(&context.project, with_responses)
            .await
            .unwrap();
        for (body, field) in bodies {
            let served = context.ask(Dialect::Responses, body).await;
            if limit.is_none() {
                assert_eq!(whole(served).await, ANSWER);
                assert!(context.settled().await.estimated, "{body}");
                continue;
            }
            let refused = served.err().unwrap();
            assert_eq!(
                (refused.fault.code, refused.field.as_deref()),
                (Code::FieldUnpriced, Some(field)),
                "{}",
                refused.fault.message
            );
        }
    }
}

/// What nobody limits is limited by us, in the words of the wire.
#[tokio::test]
async fn an_answer_that_nothing_limits_is_given_a_limit() {
    let text = r#"{"choices":[{"index":0,"message":{"role":"assistant","content":"x"},"finish_reason":"stop"}],"usage":{"prompt_tokens":0,"completion_tokens":1}}"#;
    for (limit, sent) in [(Some("1"), true), (None, false)] {
        let (context, provider) = capped(limit, vec![json(text)]).await;
        whole(
            context
                .ask(Dialect::Chat, r#"{"model":"m1","messages":[]}"#)
                .await,
        )
        .await;
        assert_eq!(provider.last_request().contains(r#""max_tokens":8192"#), sent);
        whole(
            context
                .ask(Dialect::Chat, r#"{"model":"m1","messages":[],"max_tokens":null}"#)
                .await,
        )
        .await;
        assert_eq!(provider.last_request().ends_with(r#""max_tokens":8192}"#), sent);
    }
}

/// An attempt that a provider has read and never answered is paid for, beside the one that was answered.
#[tokio::test]
async fn every_attempt_is_paid_for() {
    let broken = Reply {
        head: String::new(),
        body: Vec::new(),
        hangs: false,
    };
    let text = r#"{"choices":[{"index":0,"message":{"role":"assistant","content":"x"},"finish_reason":"stop"}],"usage":{"prompt_tokens":0,"completion_tokens":1000000}}"#;
    let body = ASK.replace("true", "false");
    for (limit, asked, cost) in [("100", 2, "3"), ("3", 1, "2")] {
        let (context, provider) = capped(Some(limit), vec![broken.clone(), json(text)]).await;
        let served = context.ask(Dialect::Chat, &body).await;
        assert_eq!(served.is_ok(), asked == 2);
        let row = context.settled().await;
        assert_eq!((row.cost, row.estimated), (usd(cost), true), "{row:?}");
        assert_eq!(standing(&context), (usd(cost), Usd::ZERO));
        assert_eq!(provider.answered.load(Ordering::SeqCst), asked);
    }
    // Who refuses charges nothing, but who lost patience with somebody else may.
    for (status, cost) in [("503 No", "0"), ("504 Late", "2")] {
        let refusal = answer(status, "application/json", "{}");
        let works = Provider::start(vec![json(text)]).await;
        let (context, _provider) = capped(Some("100"), vec![refusal]).await;
        context.provider("q", ProviderKind::Openai, &works.url, "-").await;
        let route = SetRoute {
            name: "r".into(),
            targets: vec![(
                Target {
                    provider: "p".into(),
                    model: "m1".into(),
                },
                1,
            )],
            fallbacks: vec!["q/m1".into()],
        };
        context.models.set_route(&context.project, route).await.unwrap();
        whole(context.ask(Dialect::Chat, &body.replace("m1", "r")).await).await;
        assert_eq!(context.settled().await.cost, usd(cost) + usd("1"), "{status}");
    }
}

/// A server that is killed forgets what it heard, but not what it had reserved.
#[tokio::test]
async fn what_a_killed_server_had_reserved_is_spent() {
    let silent = Reply {
        hangs: true,
        ..events(BEGIN)
    };
    let (context, _provider) = capped(Some("100"), vec![silent]).await;
    let served = context.ask(Dialect::Chat, ASK).await.unwrap();
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
    let row: ModelCallRow = context.settled().await;
    assert_eq!((row.outcome, row.cost), (CallOutcome::Lost, usd("2")));
    assert_eq!(standing(&context), (usd("2"), Usd::ZERO));
}

/// Stopping a server does not wait for what nobody listens to.
#[tokio::test]
async fn stopping_ends_what_nobody_listens_to() {
    let silent = Reply {
        hangs: true,
        ..events(BEGIN)
    };
    let (context, _provider) = capped(Some("100"), vec![silent]).await;
    hear(&context, ASK, 1).await;
    tokio::time::timeout(Duration::from_secs(20), context.models.shutdown())
        .await
        .unwrap();
    let row = context.settled().await;
    assert_eq!((row.outcome, row.cost), (CallOutcome::Cancelled, usd("2")));
}

/// Text is counted by its bytes, pictures by their number and documents by what may be in them.
#[tokio::test]
async fn what_is_read_is_reserved_for_at_its_worst() {
    let (context, _provider) = capped(
        Some("1000"),
        vec![Reply {
            hangs: true,
            ..events(BEGIN)
        }],
    )
    .await;
    context.price("m1", "1", "0").await;
    let ask = |content: &str| {
        format!(
            r#"{{"model":"m1","stream":true,"max_tokens":1,"messages":[{{"role":"user","content":{content}}}]}}"#
        )
    };
    let blob = "A".repeat(90_000);
    for (content, least, most) in [
        // Ninety thousand signs are at most as many tokens.
        (format!("\"{}\"", "!?".repeat(45_000)), "0.09", "0.1"),
        (
            format!(r#"[{{"type":"image_url","image_url":{{"url":"data:image/png;base64,{blob}"}}}}]"#),
            "0.006",
            "0.007",
        ),
        (
            r#"[{"type":"image_url","image_url":{"url":"https://images.example/1.png"}}]"#.to_owned(),
            "0.006",
            "0.007",
        ),
        (
            format!(r#"[{{"type":"file","file":{{"file_data":"data:application/pdf;base64,{blob}"}}}}]"#),
            "1",
            "1.1",
        ),
    ] {
        let served = context
            .models
            .call(&context.who(), request(Dialect::Chat, &ask(&content)))
            .await
            .unwrap();
        let (_, reserved) = standing(&context);
        assert!(
            (usd(least)..usd(most)).contains(&reserved),
            "{reserved}: {content:.100}"
        );
        drop(served);
        while standing(&context).1 > Usd::ZERO {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}
