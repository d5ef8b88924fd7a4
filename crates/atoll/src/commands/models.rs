//! Providers, models, budgets and what was spent.

use std::io::Read as _;

use atoll_client::output::{Doing, Error, Output, Result};
use atoll_client::{Client, segment, text};
use serde_json::{Value, json};
use zeroize::Zeroizing;

use super::{after, list_of, relative};
use crate::args::{
    BudgetCommand, BudgetSetArgs, Global, GuardCommand, ModelCommand, ModelKeyCommand, PriceCommand,
    ProviderCommand, ProviderSetArgs, SpendArgs,
};

const KINDS: [&str; 4] = ["openai", "azure", "anthropic", "gemini"];
/// More than any key takes.
const MOST: u64 = 64 * 1024;

fn items(answer: &Value) -> Vec<Value> {
    answer["items"].as_array().cloned().unwrap_or_default()
}

async fn delete(client: &Client, output: Output, path: String, name: &str) -> Result<()> {
    let answer = client.delete(&path).await?;
    output.json(&answer);
    output.line(format_args!("{name} is deleted"));
    Ok(())
}

pub(crate) async fn provider(global: &Global, output: Output, command: ProviderCommand) -> Result<()> {
    let client = &global.client()?;
    let path = |name: &str| format!("/v1/gateway/providers/{}", segment(name));
    match command {
        ProviderCommand::Set(args) => {
            let body = provider_body(output, &args)?;
            let answer = client.put(&path(&args.name), &body).await?;
            output.json(&answer);
            output.line(format_args!("{} is at {}", args.name, text(&answer, "base_url")));
            if answer["serves"].as_array().is_some_and(Vec::is_empty) {
                output.note(format_args!(
                    "Call its models as {}/MODEL, or say with --serves which names it serves.",
                    args.name
                ));
            }
        }
        ProviderCommand::List => {
            let answer = client.get("/v1/gateway/providers").await?;
            let rows: Vec<_> = items(&answer)
                .iter()
                .map(|one| {
                    let key = if one["has_key"] == true { "kept" } else { "none" };
                    [
                        text(one, "name"),
                        text(one, "kind"),
                        text(one, "base_url"),
                        key.to_owned(),
                        list_of(&one["serves"]),
                    ]
                })
                .collect();
            output.table(
                ["NAME", "KIND", "ADDRESS", "KEY", "SERVES"],
                &rows,
                "no providers",
            );
            output.json(&answer["items"]);
        }
        ProviderCommand::Delete { name } => delete(client, output, path(&name), &name).await?,
    }
    Ok(())
}

fn provider_body(output: Output, args: &ProviderSetArgs) -> Result<Value> {
    let named = KINDS.contains(&args.name.as_str()).then_some(args.name.as_str());
    let kind = args.kind.as_deref().or(named).unwrap_or("openai");
    let mut body = json!({"kind": kind});
    if let Some(url) = &args.base_url {
        body["base_url"] = json!(url);
    }
    if !args.serves.is_empty() {
        body["serves"] = json!(args.serves);
    }
    if args.responses {
        body["responses"] = json!(true);
    }
    if !args.no_key {
        let mut key = Zeroizing::new(String::new());
        match &args.key_file {
            Some(path) => {
                let file = std::fs::File::open(path).doing(format_args!("cannot read {}", path.display()))?;
                file.take(MOST)
                    .read_to_string(&mut key)
                    .doing("cannot read the key")?;
            }
            None => {
                output.note("Reading the provider's key from standard input (--no-key if it needs none).");
                std::io::stdin()
                    .take(MOST)
                    .read_to_string(&mut key)
                    .doing("cannot read the key")?;
            }
        }
        if key.trim().is_empty() {
            return Err(Error::new("the key is empty").hint("give --no-key for a provider that needs none"));
        }
        body["key"] = json!(key.trim());
    }
    Ok(body)
}

pub(crate) async fn model(global: &Global, output: Output, command: ModelCommand) -> Result<()> {
    let client = &global.client()?;
    match command {
        ModelCommand::List => {
            let answer = client.get("/v1/gateway/models").await?;
            let rows: Vec<_> = items(&answer)
                .iter()
                .map(|one| {
                    let targets: Vec<String> = one["targets"]
                        .as_array()
                        .into_iter()
                        .flatten()
                        .map(|target| format!("{}/{}", text(target, "provider"), text(target, "model")))
                        .collect();
                    [
                        text(one, "name"),
                        targets.join(", "),
                        list_of(&one["fallbacks"]),
                        text(one, "input_per_million"),
                        text(one, "output_per_million"),
                    ]
                })
                .collect();
            output.table(
                ["NAME", "GOES TO", "THEN", "$/M IN", "$/M OUT"],
                &rows,
                "no models; add a provider first",
            );
            output.json(&answer["items"]);
        }
        ModelCommand::Set { name, to, fallback } => {
            let targets = to
                .iter()
                .map(|target| read_target(target))
                .collect::<Result<Vec<_>>>()?;
            let body = json!({"targets": targets, "fallbacks": fallback});
            let answer = client
                .put(&format!("/v1/gateway/models/{}", segment(&name)), &body)
                .await?;
            output.json(&answer);
            output.line(format_args!("{name} can be called"));
        }
        ModelCommand::Delete { name } => {
            delete(
                client,
                output,
                format!("/v1/gateway/models/{}", segment(&name)),
                &name,
            )
            .await?;
        }
        ModelCommand::Price(command) => price(client, output, command).await?,
        ModelCommand::Key(command) => key(client, output, command).await?,
        ModelCommand::Guard(command) => guard(client, output, command).await?,
    }
    Ok(())
}

async fn guard(client: &Client, output: Output, command: GuardCommand) -> Result<()> {
    const PATH: &str = "/v1/gateway/guards";
    let answer = match command {
        GuardCommand::Show => client.get(PATH).await?,
        GuardCommand::Set {
            max_input,
            block,
            refuse,
            redact,
        } => {
            let rule = |rule: &String, action: &str| match rule.split_once('=') {
                Some((name, pattern)) => json!({"name": name, "pattern": pattern, "action": action}),
                None => json!({"name": rule, "action": action}),
            };
            let refused = refuse.iter().map(|one| rule(one, "refuse"));
            let screen: Vec<Value> = refused
                .chain(redact.iter().map(|one| rule(one, "redact")))
                .collect();
            let body = json!({"max_input_tokens": max_input, "blocked": block, "screen": screen});
            client.put(PATH, &body).await?
        }
    };
    let mut rows = Vec::new();
    if let Some(most) = answer["max_input_tokens"].as_u64() {
        rows.push([
            "input".to_owned(),
            format!("over {most} tokens"),
            "refuse".to_owned(),
        ]);
    }
    for name in answer["blocked"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
    {
        rows.push(["model".to_owned(), name.to_owned(), "refuse".to_owned()]);
    }
    for rule in answer["screen"].as_array().into_iter().flatten() {
        let name = text(rule, "name");
        let what = rule["pattern"]
            .as_str()
            .map_or(name.clone(), |pattern| format!("{name}: {pattern}"));
        rows.push(["text".to_owned(), what, text(rule, "action")]);
    }
    output.table(["OF", "WHAT", "ACTION"], &rows, "nothing is guarded against");
    output.json(&answer);
    Ok(())
}

fn read_target(text: &str) -> Result<Value> {
    let bad = || Error::new(format!("`{text}` is not PROVIDER/MODEL or PROVIDER/MODEL=WEIGHT"));
    let (target, weight) = match text.rsplit_once('=') {
        Some((target, weight)) => (target, weight.parse::<u32>().map_err(|_| bad())?),
        None => (text, 1),
    };
    let (provider, model) = target.split_once('/').ok_or_else(bad)?;
    Ok(json!({"provider": provider, "model": model, "weight": weight}))
}

async fn price(client: &Client, output: Output, command: PriceCommand) -> Result<()> {
    match command {
        PriceCommand::Set {
            model,
            input,
            output: out,
            cache_read,
            cache_write,
        } => {
            let body =
                json!({"input": input, "output": out, "cache_read": cache_read, "cache_write": cache_write});
            let answer = client
                .put(&format!("/v1/gateway/prices/{}", segment(&model)), &body)
                .await?;
            output.json(&answer);
            output.line(format_args!("{model} has a price"));
        }
        PriceCommand::List => {
            let answer = client.get("/v1/gateway/prices").await?;
            let rows: Vec<_> = items(&answer)
                .iter()
                .map(|one| {
                    let rate = |name: &str| text(&one["rates"], name);
                    [
                        text(one, "model"),
                        rate("input"),
                        rate("output"),
                        rate("cache_read"),
                        rate("cache_write"),
                    ]
                })
                .collect();
            output.note(format_args!("price table {}", text(&answer, "version")));
            output.table(
                ["MODEL", "$/M IN", "$/M OUT", "CACHE READ", "CACHE WRITE"],
                &rows,
                "no prices of your own",
            );
            output.json(&answer);
        }
        PriceCommand::Delete { model } => {
            delete(
                client,
                output,
                format!("/v1/gateway/prices/{}", segment(&model)),
                &model,
            )
            .await?;
        }
    }
    Ok(())
}

async fn key(client: &Client, output: Output, command: ModelKeyCommand) -> Result<()> {
    match command {
        ModelKeyCommand::Create {
            name,
            allow,
            requests,
            tokens,
            expires,
        } => {
            let mut body = json!({
                "name": name, "models": allow, "requests_per_minute": requests, "tokens_per_minute": tokens,
            });
            if let Some(millis) = expires {
                body["expires_at"] = json!(after(millis)?);
            }
            let answer = client.post("/v1/gateway/keys", &body).await?;
            output.json(&answer);
            output.line(text(&answer, "secret"));
            output.note("This is the only time that the key is shown.");
        }
        ModelKeyCommand::List => {
            let keys = client.list("/v1/gateway/keys", &[]).await?;
            let rows: Vec<_> = keys
                .iter()
                .map(|one| {
                    let ends = if one["revoked_at"].is_null() {
                        relative(one, "expires_at")
                    } else {
                        "revoked".into()
                    };
                    [
                        text(one, "id"),
                        text(one, "name"),
                        text(one, "prefix"),
                        list_of(&one["models"]),
                        ends,
                    ]
                })
                .collect();
            output.table(["ID", "NAME", "KEY", "MODELS", "ENDS"], &rows, "no keys");
            output.json(&Value::Array(keys));
        }
        ModelKeyCommand::Revoke { id } => {
            let answer = client
                .delete(&format!("/v1/gateway/keys/{}", segment(&id)))
                .await?;
            output.json(&answer);
            output.line(format_args!("{id} is revoked"));
        }
    }
    Ok(())
}

pub(crate) async fn budget(global: &Global, output: Output, command: BudgetCommand) -> Result<()> {
    let client = &global.client()?;
    let path = |name: &str| format!("/v1/gateway/budgets/{}", segment(name));
    match command {
        BudgetCommand::Set(args) => {
            let BudgetSetArgs {
                name,
                limit,
                window,
                scope,
                subject,
                alert,
            } = args;
            let body = json!({
                "limit": limit.trim_start_matches('$'), "window": window, "scope": scope, "subject": subject,
                "alert_percent": alert,
            });
            let answer = client.put(&path(&name), &body).await?;
            output.json(&answer);
            output.line(format_args!(
                "{name}: ${} a {}",
                text(&answer, "limit"),
                text(&answer, "window")
            ));
        }
        BudgetCommand::List => {
            let answer = client.get("/v1/gateway/budgets").await?;
            let rows: Vec<_> = items(&answer)
                .iter()
                .flat_map(|one| {
                    let row = |subject: String, spent: String, reserved: String| {
                        [
                            text(one, "name"),
                            text(one, "scope"),
                            subject,
                            text(one, "limit"),
                            text(one, "window"),
                            spent,
                            reserved,
                        ]
                    };
                    let standing = one["standing"].as_array().cloned().unwrap_or_default();
                    if standing.is_empty() {
                        return vec![row(text(one, "subject"), "0.00".into(), "0.00".into())];
                    }
                    let rows = standing.iter();
                    rows.map(|now| row(text(now, "subject"), text(now, "spent"), text(now, "reserved")))
                        .collect()
                })
                .collect();
            let head = ["NAME", "SCOPE", "WHOSE", "LIMIT", "WINDOW", "SPENT", "RESERVED"];
            output.table(head, &rows, "no budgets");
            output.json(&answer["items"]);
        }
        BudgetCommand::Delete { name } => delete(client, output, path(&name), &name).await?,
    }
    Ok(())
}

pub(crate) async fn spend(global: &Global, output: Output, args: SpendArgs) -> Result<()> {
    let client = &global.client()?;
    if let Some(id) = &args.call {
        return one_call(client, output, id).await;
    }
    if args.calls {
        let query: Vec<(String, String)> = args
            .sandbox
            .into_iter()
            .map(|id| ("sandbox".to_owned(), id))
            .collect();
        let calls = client.list("/v1/gateway/calls", &query).await?;
        let rows: Vec<_> = calls
            .iter()
            .map(|one| {
                let tokens = |names: &[&str]| -> String {
                    names
                        .iter()
                        .filter_map(|name| one["usage"][name].as_u64())
                        .sum::<u64>()
                        .to_string()
                };
                [
                    text(one, "id"),
                    relative(one, "started_at"),
                    format!("{}/{}", text(one, "provider"), text(one, "model")),
                    text(one, "outcome"),
                    tokens(&[
                        "input",
                        "cache_read",
                        "cache_write",
                        "cache_write_1h",
                        "audio_input",
                    ]),
                    tokens(&["output", "reasoning", "audio_output"]),
                    text(one, "cost"),
                ]
            })
            .collect();
        output.table(
            ["CALL", "WHEN", "MODEL", "OUTCOME", "IN", "OUT", "COST $"],
            &rows,
            "no calls",
        );
        output.json(&Value::Array(calls));
        return Ok(());
    }
    let mut query = vec![("by", args.by.clone())];
    if let Some(millis) = args.last {
        let at = jiff::Timestamp::now()
            .as_millisecond()
            .saturating_sub(i64::try_from(millis).unwrap_or(i64::MAX));
        let at = jiff::Timestamp::from_millisecond(at).doing("--last is too long ago")?;
        query.push(("from", at.to_string()));
    }
    query.extend(args.sandbox.map(|id| ("sandbox", id)));
    let request = client
        .request(reqwest::Method::GET, "/v1/gateway/spend")
        .query(&query);
    let answer = client.json(request).await?;
    let rows: Vec<_> = items(&answer)
        .iter()
        .map(|one| {
            let tokens = |names: &[&str]| -> String {
                names
                    .iter()
                    .filter_map(|name| one["usage"][name].as_u64())
                    .sum::<u64>()
                    .to_string()
            };
            let mut notes = Vec::new();
            for (field, note) in [
                ("unpriced", "without a price"),
                ("estimated", "estimated"),
                ("failed", "failed"),
            ] {
                if one[field].as_u64().unwrap_or(0) > 0 {
                    notes.push(format!("{} {note}", one[field]));
                }
            }
            [
                text(one, "group"),
                text(one, "calls"),
                tokens(&[
                    "input",
                    "cache_read",
                    "cache_write",
                    "cache_write_1h",
                    "audio_input",
                ]),
                tokens(&["output", "reasoning", "audio_output"]),
                text(one, "cost"),
                seconds(one["compute"]["wall_ms"].as_u64().unwrap_or(0), 1000),
                seconds(one["compute"]["cpu_us"].as_u64().unwrap_or(0), 1_000_000),
                notes.join(", "),
            ]
        })
        .collect();
    let head = args.by.to_uppercase();
    output.table(
        [
            head.as_str(),
            "CALLS",
            "IN",
            "OUT",
            "COST $",
            "SANDBOX TIME",
            "CPU TIME",
            "",
        ],
        &rows,
        "nothing was spent",
    );
    output.line(format_args!("total ${}", text(&answer, "total")));
    if let Some(from) = answer["complete_from"].as_str() {
        output.line(format_args!(
            "what was called before {from} may be missing: the ledger keeps so much of it"
        ));
    }
    output.json(&answer);
    Ok(())
}

async fn one_call(client: &Client, output: Output, id: &str) -> Result<()> {
    let call = client.get(&format!("/v1/gateway/calls/{}", segment(id))).await?;
    for name in [
        "started_at",
        "asked",
        "provider",
        "model",
        "outcome",
        "error",
        "finish",
        "cost",
        "sandbox",
        "workflow",
        "run",
    ] {
        if !call[name].is_null() {
            output.line(format_args!("{name:<10}  {}", text(&call, name)));
        }
    }
    match &call["bodies"] {
        Value::Null => {
            output
                .note("What was asked and answered is not kept; `keep_bodies` in `[models]` turns that on.");
        }
        bodies => {
            output.line(format_args!(
                "\n{}\n\n{}",
                text(bodies, "request"),
                text(bodies, "answer")
            ));
            if bodies["shortened"] == true {
                output.note("Shortened.");
            }
        }
    }
    output.json(&call);
    Ok(())
}

/// A time in seconds; nothing where there was none.
fn seconds(count: u64, per_second: u64) -> String {
    if count == 0 {
        return String::new();
    }
    format!(
        "{}.{} s",
        count / per_second,
        count % per_second * 10 / per_second
    )
}
