//! Random callers against the scripted provider, thousands of them at once: whatever they write and whenever they hang up, what
//! is booked and reserved is never less than what the provider charges.
//!
//! `ATOLL_TEST_CONVERSATIONS` says how many; each is made from its number, so one that fails can be had again.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use atoll_dialects::Dialect;
use atoll_models::{Served, SetBudget, SetProvider, Who};
use atoll_scripted::script::{self, Bill, Told};
use atoll_types::{BudgetScope, BudgetWindow, ProviderKind, Timestamp, Usd};
use futures_util::StreamExt as _;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use crate::support::{Context, request};

const FEW: u64 = 2000;
const AT_ONCE: usize = 64;
/// Picodollars for a token in, one out, and one search.
const INPUT: i128 = 1_250_000;
const OUTPUT: i128 = 10_000_000;
const SEARCH: i128 = 10_000_000_000;

/// Words by which answers say that they are over, and what was used.
fn words_of(dialect: Dialect) -> &'static [&'static str] {
    match dialect {
        Dialect::Messages => &["message_stop", "message_stop", "message_delta", "usage", "error"],
        Dialect::Responses => &[
            "response.completed",
            "response.failed",
            "response.incomplete",
            "error",
        ],
        _ => &["[DONE]", "finish_reason", "usage", "messageStop", "finishReason"],
    }
}

/// What was charged, by conversation.
#[derive(Default)]
struct Bills {
    by_run: Mutex<HashMap<String, i128>>,
    total: Mutex<i128>,
    requests: AtomicU64,
}

impl Bills {
    fn charge(&self, run: &str, bill: &Bill) {
        let cost = i128::from(bill.input) * INPUT + i128::from(bill.output) * OUTPUT;
        let cost = (cost + i128::from(bill.searches) * SEARCH) * i128::from(bill.times);
        *self.by_run.lock().entry(run.to_owned()).or_default() += cost;
        *self.total.lock() += cost;
        self.requests.fetch_add(1, Ordering::Relaxed);
    }
}

/// A provider that charges when it is asked, and then sends what it has as fast as it is taken.
async fn provide(bills: Arc<Bills>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let bills = Arc::clone(&bills);
            tokio::spawn(async move {
                let _gone = serve(stream, &bills).await;
            });
        }
    });
    url
}

async fn serve(mut stream: TcpStream, bills: &Bills) -> std::io::Result<()> {
    let mut have = Vec::new();
    loop {
        let (path, body) = loop {
            if let Some(found) = whole_request(&mut have) {
                break found;
            }
            if stream.read_buf(&mut have).await? == 0 {
                return Ok(());
            }
        };
        let value: Value = serde_json::from_slice(&body).unwrap();
        let (dialect, named) = match path.split('/').collect::<Vec<_>>()[..] {
            ["", "v1", "chat", "completions"] => (Dialect::Chat, None),
            ["", "v1", "responses"] => (Dialect::Responses, None),
            ["", "v1", "messages"] => (Dialect::Messages, None),
            ["", "v1beta", "models", action] => {
                let (model, method) = action.split_once(':').unwrap();
                (
                    Dialect::Gemini,
                    Some((model.to_owned(), method.starts_with("stream"))),
                )
            }
            ["", "model", model, method] => (
                Dialect::Converse,
                Some((model.to_owned(), method.ends_with("stream"))),
            ),
            _ => panic!("{path}"),
        };
        let (model, streams) = script::asked(named, &value);
        let told = script::answer(dialect, &model, streams, &value);
        if told.bill != Bill::default() {
            bills.charge(&run_of(&value), &told.bill);
        }
        // It was asked, it has answered, and the line is dead.
        if model.ends_with("deep-dead") {
            return Ok(());
        }
        send(&mut stream, told).await?;
    }
}

fn whole_request(have: &mut Vec<u8>) -> Option<(String, Vec<u8>)> {
    let end = have.windows(4).position(|four| four == b"\r\n\r\n")? + 4;
    let head = String::from_utf8_lossy(&have[..end]).to_lowercase();
    let length = head
        .lines()
        .find_map(|line| line.strip_prefix("content-length: "))?;
    let length: usize = length.trim().parse().unwrap();
    if have.len() < end + length {
        return None;
    }
    let path = String::from_utf8_lossy(&have[..end])
        .split(' ')
        .nth(1)
        .unwrap()
        .to_owned();
    let path = path.split('?').next().unwrap().to_owned();
    let body = have[end..end + length].to_vec();
    have.drain(..end + length);
    Some((path, body))
}

async fn send(stream: &mut TcpStream, told: Told) -> std::io::Result<()> {
    let head = format!(
        "HTTP/1.1 {} Told\r\ncontent-type: {}\r\ntransfer-encoding: chunked\r\n\r\n",
        told.status, told.kind
    );
    stream.write_all(head.as_bytes()).await?;
    for piece in told.pieces {
        let chunk = [format!("{:x}\r\n", piece.len()).as_bytes(), &piece, b"\r\n"].concat();
        stream.write_all(&chunk).await?;
        // Others get their turn, so that what is sent in pieces mostly arrives in pieces.
        for _ in 0..5 {
            tokio::task::yield_now().await;
        }
    }
    stream.write_all(b"0\r\n\r\n").await
}

/// Callers say in their words which conversation it is.
fn run_of(request: &Value) -> String {
    let text = request.to_string();
    let at = text.find("conversation-").unwrap();
    let name = &text[at..];
    let end = name.find('.').unwrap();
    name[..end].to_owned()
}

/// Numbers that look random, and are the same for the same conversation.
struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    fn below(&mut self, count: u64) -> u64 {
        self.next() % count
    }

    fn one_in(&mut self, count: u64) -> bool {
        self.below(count) == 0
    }

    fn of<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        let at = usize::try_from(self.below(items.len() as u64)).unwrap();
        &items[at]
    }
}

/// A question, on some wire, to somebody who may speak another, with fields that mean well and others that do not.
fn question(dice: &mut Dice, run: &str) -> (Dialect, String) {
    let dialect = *dice.of(&[
        Dialect::Chat,
        Dialect::Chat,
        Dialect::Responses,
        Dialect::Messages,
    ]);
    let provider = match dialect {
        Dialect::Chat => dice.of(&["open", "open", "claude", "gem", "bed"]),
        Dialect::Responses => dice.of(&["resp", "resp", "claude", "open"]),
        _ => dice.of(&["claude", "claude", "open", "gem"]),
    };
    let role = match dice.below(40) {
        0 => "deep-late",
        1 => "deep-dead",
        2 | 3 => "deep-cut",
        4 => "deep-mute",
        5 => "500",
        6..=9 => "echo",
        10..=13 => "full",
        14 | 15 => "think",
        16..=25 => "deep-tool",
        _ => "deep",
    };
    let words = "word ".repeat(usize::try_from(dice.below(40)).unwrap());
    let said = format!("{run}. {words}");
    // Enough for those who say what they say whatever the limit is.
    let most = 100 + dice.below(3000);
    let mut fields: Vec<(&str, Value)> = vec![("model", json!(format!("{provider}/scripted-{role}")))];
    fields.push(match dialect {
        Dialect::Responses => (
            "input",
            json!([{"role": "user", "content": [{"type": "input_text", "text": said}]}]),
        ),
        _ => ("messages", json!([{"role": "user", "content": said}])),
    });
    if dice.below(3) > 0 {
        fields.push(("stream", json!(true)));
    }
    match (dialect, dice.below(5)) {
        (_, 0) => {}
        (Dialect::Chat, 1) => fields.push(("max_completion_tokens", json!(most))),
        (Dialect::Chat, 2) => {
            fields.push(("max_completion_tokens", json!(1)));
            fields.push(("max_tokens", json!(most)));
        }
        (Dialect::Responses, _) => fields.push(("max_output_tokens", json!(most))),
        _ => fields.push(("max_tokens", json!(most))),
    }
    if role == "deep-tool" || dice.one_in(6) {
        // What callers name comes back in answers, among the words of the wire itself.
        let words = words_of(dialect);
        let name = *dice.of(words);
        let schema = json!({"type": "object", "title": dice.of(words), "properties": {}});
        fields.push(match dialect {
            Dialect::Responses => (
                "tools",
                json!([{"type": "function", "name": name, "parameters": schema}]),
            ),
            Dialect::Messages => ("tools", json!([{"name": name, "input_schema": schema}])),
            _ => (
                "tools",
                json!([{"type": "function", "function": {"name": name, "parameters": schema}}]),
            ),
        });
        let (key, value) = (*dice.of(words), *dice.of(words));
        fields.push(match dialect {
            Dialect::Messages => ("metadata", json!({"user_id": value})),
            _ => ("metadata", json!({key: value})),
        });
    } else if dice.one_in(4) {
        let odd: (&str, Value) = match dice.below(16) {
            0 => ("max_tokens", json!(1)),
            1 => ("MAX_TOKENS", json!(100_000)),
            2 => ("max_output_tokens", json!(1)),
            3 => ("n", json!(1 + dice.below(5))),
            4 => (
                "prediction",
                json!({"type": "content", "content": "what I think that it will say"}),
            ),
            5 => ("background", json!(true)),
            6 => ("tools", json!([{"type": "web_search"}])),
            7 => (
                "tools",
                json!([{"type": "web_search_20250305", "name": "web_search"}]),
            ),
            8 => ("previous_response_id", json!("resp_1")),
            9 => ("speed", json!("fast")),
            10 => ("service_tier", json!("priority")),
            11 => ("stream_options", Value::Null),
            12 => ("stream_options", json!({"include_usage": false})),
            13 => ("conversation", json!("conv_1")),
            14 => ("prompt", json!({"id": "pmpt_1"})),
            _ => (
                "messages",
                json!([{"role": "user", "content": [
                    {"type": "file", "file": {"file_id": "file-1"}}, {"type": "text", "text": format!("{run}. x")},
                ]}]),
            ),
        };
        fields.push(odd);
    }
    // As text, because a map would not hold the same name twice.
    let fields: Vec<String> = fields
        .iter()
        .map(|(name, value)| {
            let name = if dice.one_in(50) {
                name.replace('e', "\\u0065")
            } else {
                (*name).to_owned()
            };
            format!("\"{name}\":{value}")
        })
        .collect();
    (dialect, format!("{{{}}}", fields.join(",")))
}

#[derive(Default)]
struct Tally {
    refused: AtomicU64,
    whole: AtomicU64,
    heard: AtomicU64,
    hung_up: AtomicU64,
}

/// Asks, hears as much as it likes of the answer, and is gone.
async fn converse(context: &Context, number: u64, tally: &Tally) {
    let mut dice = Dice(number);
    let run = format!("conversation-{number}");
    let (dialect, body) = question(&mut dice, &run);
    let mut who: Who = context.who();
    who.spender.run = Some(run);
    let call = context.models.call(&who, request(dialect, &body));
    let mut call = Box::pin(call);
    if dice.one_in(6) {
        // Gone before there is an answer, after some steps on the way to it.
        for _ in 0..dice.below(8) {
            if futures_util::poll!(&mut call).is_ready() {
                break;
            }
            tokio::task::yield_now().await;
        }
        tally.hung_up.fetch_add(1, Ordering::Relaxed);
        return;
    }
    match call.await {
        Err(_) => tally.refused.fetch_add(1, Ordering::Relaxed),
        Ok(Served::Whole { .. }) => tally.whole.fetch_add(1, Ordering::Relaxed),
        Ok(Served::Stream { mut events, .. }) => {
            let patience = if dice.one_in(2) { u64::MAX } else { dice.below(14) };
            let mut pieces = 0;
            while pieces < patience && events.next().await.is_some() {
                pieces += 1;
            }
            let heard_all = patience == u64::MAX;
            let count = if heard_all { &tally.heard } else { &tally.hung_up };
            count.fetch_add(1, Ordering::Relaxed)
        }
    };
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_pays_less_than_the_provider_charges() {
    let count = std::env::var("ATOLL_TEST_CONVERSATIONS").map_or(FEW, |count| count.parse().unwrap());
    let context = Arc::new(Context::patient().await);
    let bills = Arc::new(Bills::default());
    let url = provide(Arc::clone(&bills)).await;
    for (name, kind, base, responses) in [
        ("open", ProviderKind::Openai, format!("{url}/v1"), false),
        ("resp", ProviderKind::Openai, format!("{url}/v1"), true),
        ("claude", ProviderKind::Anthropic, url.clone(), false),
        ("gem", ProviderKind::Gemini, format!("{url}/v1beta"), false),
        ("bed", ProviderKind::Bedrock, url.clone(), false),
    ] {
        let set = SetProvider {
            responses: Some(responses),
            ..context.set_provider(name, kind, &base, "-")
        };
        context.models.set_provider(&context.project, set).await.unwrap();
    }
    for role in [
        "deep",
        "deep-late",
        "deep-dead",
        "deep-cut",
        "deep-mute",
        "deep-tool",
        "500",
        "echo",
        "full",
        "think",
    ] {
        context.price(&format!("scripted-{role}"), "1.25", "10").await;
    }
    let budget = SetBudget {
        name: "all".into(),
        scope: BudgetScope::Project,
        subject: None,
        window: BudgetWindow::Total,
        limit: Usd::from_pico(i64::MAX),
        alert_percent: None,
    };
    context.models.set_budget(&context.project, budget).await.unwrap();

    let tally = Arc::new(Tally::default());
    let mut running = tokio::task::JoinSet::new();
    for number in 0..count {
        if running.len() >= AT_ONCE {
            running.join_next().await.unwrap().unwrap();
        }
        let (with, counts) = (Arc::clone(&context), Arc::clone(&tally));
        running.spawn(async move { converse(&with, number, &counts).await });
        if number % 100 == 0 {
            // First what is charged, then what is set against it: in between only more is charged.
            let charged = *bills.total.lock();
            let standing = context.models.list_budgets(&context.project).remove(0).standing;
            let ours: i128 = standing
                .iter()
                .map(|one| i128::from(one.spent.pico()) + i128::from(one.reserved.pico()))
                .sum();
            assert!(
                ours >= charged,
                "{ours} is booked and reserved, {charged} was charged"
            );
        }
    }
    while let Some(done) = running.join_next().await {
        done.unwrap();
    }
    while !context.store.models.open_model_calls().await.unwrap().is_empty() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let booked = context
        .store
        .models
        .model_spent(
            &context.project,
            BudgetScope::Run,
            None,
            BudgetWindow::Total,
            Timestamp(0),
            usize::MAX,
        )
        .await
        .unwrap();
    let booked: HashMap<String, Usd> = booked.into_iter().collect();
    let charged = bills.by_run.lock().clone();
    for (run, charged) in &charged {
        let ours = i128::from(booked.get(run).copied().unwrap_or_default().pico());
        if ours < *charged {
            let number = run.rsplit('-').next().unwrap().parse().unwrap();
            let (dialect, body) = question(&mut Dice(number), run);
            panic!("{run}: {ours} is booked, {charged} was charged: {dialect:?} {body}");
        }
    }
    let total: i128 = booked.values().map(|cost| i128::from(cost.pico())).sum();
    let standing = context
        .models
        .list_budgets(&context.project)
        .remove(0)
        .standing
        .remove(0);
    assert_eq!(
        (i128::from(standing.spent.pico()), standing.reserved),
        (total, Usd::ZERO)
    );
    let number = |count: &AtomicU64| count.load(Ordering::Relaxed);
    println!(
        "{count} conversations: {} refused, {} whole, {} heard to the end, {} hung up; {} requests charged {} picodollars, \
         {total} booked",
        number(&tally.refused),
        number(&tally.whole),
        number(&tally.heard),
        number(&tally.hung_up),
        number(&bills.requests),
        bills.total.lock(),
    );
    assert!(
        number(&bills.requests) * 3 > count,
        "most of them reached the provider"
    );
}
