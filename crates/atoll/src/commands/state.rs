//! Rest and return, copies, garbage: pause, resume, stop, start, fork, gc.

use atoll_client::output::{Output, Result};
use atoll_client::text;
use atoll_types::format_bytes;
use serde_json::{Value, json};

use super::sandbox::kept;
use super::{Connection, pairs, relative, resolve};
use crate::args::{ForkArgs, GcArgs, Global, PauseArgs, ResumeArgs, StartArgs, StopArgs};

pub(crate) async fn pause(global: &Global, output: Output, args: PauseArgs) -> Result<()> {
    let mut body = json!({});
    if let Some(kind) = args.kind.name() {
        body["kind"] = json!(kind);
    }
    let sandbox = post(global, &args.sandbox, "pause", &body).await?;
    output.json(&sandbox);
    output.line(rested(&sandbox));
    Ok(())
}

pub(crate) async fn stop(global: &Global, output: Output, args: StopArgs) -> Result<()> {
    let sandbox = post(global, &args.sandbox, "stop", &json!({})).await?;
    output.json(&sandbox);
    output.line(rested(&sandbox));
    Ok(())
}

pub(crate) async fn resume(global: &Global, output: Output, args: ResumeArgs) -> Result<()> {
    wake(global, output, &args.sandbox, "resume", args.timeout).await
}

pub(crate) async fn start(global: &Global, output: Output, args: StartArgs) -> Result<()> {
    wake(global, output, &args.sandbox, "start", args.timeout).await
}

async fn wake(global: &Global, output: Output, sandbox: &str, how: &str, timeout: Option<u64>) -> Result<()> {
    let mut body = json!({});
    if let Some(timeout) = timeout {
        body["timeout_ms"] = json!(timeout);
    }
    let sandbox = post(global, sandbox, how, &body).await?;
    output.json(&sandbox);
    let id = text(&sandbox, "id");
    if sandbox["deadline"].is_null() {
        output.line(format_args!("{id} runs"));
    } else {
        output.line(format_args!("{id} runs, ends {}", relative(&sandbox, "deadline")));
    }
    Ok(())
}

async fn post(global: &Global, sandbox: &str, what: &str, body: &Value) -> Result<Value> {
    let client = global.client()?;
    let id = resolve(&client, sandbox).await?;
    client.post(&format!("/v1/sandboxes/{id}/{what}"), body).await
}

/// `sbx_… is paused and keeps memory and files: …`
fn rested(sandbox: &Value) -> String {
    let (id, state) = (text(sandbox, "id"), text(sandbox, "state"));
    match sandbox["saved"]["kind"].as_str() {
        Some(kind) => format!("{id} is {state} and keeps {}", kept(kind)),
        // Somebody was quick to resume it.
        None => format!("{id} is {state}"),
    }
}

pub(crate) async fn fork(global: &Global, output: Output, args: ForkArgs) -> Result<()> {
    let mut body = json!({"count": args.count, "labels": pairs(&args.label)});
    if args.filesystem {
        body["kind"] = json!("filesystem");
    }
    if let Some(timeout) = args.timeout {
        body["timeout_ms"] = json!(timeout);
    }
    let answer = post(global, &args.sandbox, "fork", &body).await?;
    let copies = answer["items"].as_array().cloned().unwrap_or_default();
    for copy in &copies {
        output.line(text(copy, "id"));
    }
    output.json(&Value::Array(copies));
    Ok(())
}

/// Also without a server: a disk may be full just when none can start.
pub(crate) async fn gc(global: &Global, output: Output, args: GcArgs) -> Result<()> {
    let connection = Connection::open(global).await?;
    let body = json!({"dry_run": args.dry_run});
    let outcome = connection.client.post("/v1/gc", &body).await;
    connection.close().await;
    let found = outcome?;
    output.json(&found);
    for (field, what) in [("snapshots", "saved state"), ("volumes", "volume")] {
        for id in found[field].as_array().into_iter().flatten() {
            output.line(format_args!("{what} {}", id.as_str().unwrap_or_default()));
        }
    }
    let size = format_bytes(found["bytes"].as_u64().unwrap_or_default());
    output.line(if args.dry_run {
        format!("{size} could be freed")
    } else {
        format!("{size} freed")
    });
    let unreadable: Vec<_> = found["unreadable"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    if !unreadable.is_empty() {
        output.note(format_args!(
            "note: {} cannot be read; while they are there, space that saved states share stays taken",
            unreadable.join(", ")
        ));
    }
    Ok(())
}
