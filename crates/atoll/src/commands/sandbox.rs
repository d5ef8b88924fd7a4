//! Sandboxes: create, ls, stats, extend, port, kill.

use atoll_types::format_bytes;
use futures_util::{StreamExt, TryStreamExt};
use reqwest::Method;
use serde_json::{Value, json};

use super::{create_body, relative, resolve, split_location, text};
use crate::args::{CreateArgs, ExtendArgs, Global, KillArgs, LsArgs, PortArgs, StatsArgs};
use crate::client::Client;
use crate::output::{Output, Result};

pub(crate) async fn create(global: &Global, output: Output, args: CreateArgs) -> Result<()> {
    let client = Client::require(global)?;
    let sandbox = client.post("/v1/sandboxes", &create_body(&args.spec)).await?;
    output.json(&sandbox);
    output.line(text(&sandbox, "id"));
    if sandbox["tenant_boundary"] == json!(false) {
        output.note(format_args!(
            "note: isolation {} is not a tenant boundary",
            text(&sandbox, "isolation")
        ));
    }
    Ok(())
}

pub(crate) async fn ls(global: &Global, output: Output, args: LsArgs) -> Result<()> {
    let client = Client::require(global)?;
    if let Some((sandbox, path)) = args
        .path
        .as_deref()
        .map(|path| split_location(path).unwrap_or((path, "")))
    {
        let sandbox = resolve(&client, sandbox).await?;
        return files(&client, output, &sandbox, path, args.depth).await;
    }
    let mut query: Vec<(String, String)> = args
        .label
        .iter()
        .map(|(name, value)| ("label".into(), format!("{name}={value}")))
        .collect();
    let states = if args.all {
        atoll_types::SandboxState::ALL.to_vec()
    } else {
        args.state
    };
    query.extend(states.iter().map(|state| ("state".to_owned(), state.to_string())));
    let sandboxes = client.list("/v1/sandboxes", &query).await?;
    let rows: Vec<_> = sandboxes
        .iter()
        .map(|sandbox| {
            let state = match sandbox["end"]["reason"].as_str() {
                Some(reason) => format!("{} ({reason})", text(sandbox, "state")),
                None => text(sandbox, "state"),
            };
            let ends = if sandbox["ended_at"].is_null() {
                "deadline"
            } else {
                "ended_at"
            };
            [
                text(sandbox, "id"),
                state,
                text(sandbox, "isolation"),
                text(sandbox, "template"),
                size(&sandbox["resources"]),
                relative(sandbox, "created_at"),
                relative(sandbox, ends),
                labels(&sandbox["labels"]),
            ]
        })
        .collect();
    output.table(
        [
            "ID",
            "STATE",
            "ISOLATION",
            "TEMPLATE",
            "SIZE",
            "CREATED",
            "ENDS",
            "LABELS",
        ],
        &rows,
        "no sandboxes; `atoll create` makes one",
    );
    output.json(&Value::Array(sandboxes));
    Ok(())
}

fn size(resources: &Value) -> String {
    let cores = resources["cpu_millis"].as_f64().unwrap_or_default() / 1000.0;
    format!(
        "{cores} cpu, {}",
        format_bytes(resources["memory_bytes"].as_u64().unwrap_or_default())
    )
}

fn labels(labels: &Value) -> String {
    let pairs = labels.as_object().into_iter().flatten();
    pairs
        .map(|(name, value)| format!("{name}={}", value.as_str().unwrap_or_default()))
        .collect::<Vec<_>>()
        .join(" ")
}

async fn files(client: &Client, output: Output, sandbox: &str, path: &str, depth: u32) -> Result<()> {
    let path = if path.is_empty() { "." } else { path };
    let request = client
        .request(Method::GET, &format!("/v1/sandboxes/{sandbox}/files"))
        .query(&[("path", path), ("depth", &depth.to_string())]);
    let answer = client.json(request).await?;
    output.json(&answer);
    let mut rows: Vec<_> = answer["items"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|entry| {
            let mut name = text(entry, "path");
            if let Some(target) = entry["target"].as_str() {
                name = format!("{name} -> {target}");
            }
            [
                text(entry, "mode"),
                text(entry, "owner"),
                text(entry, "kind"),
                entry["size_bytes"].as_u64().map(format_bytes).unwrap_or_default(),
                relative(entry, "modified_at"),
                name,
            ]
        })
        .collect();
    rows.sort_by(|a, b| a[5].cmp(&b[5]));
    output.table(
        ["MODE", "OWNER", "KIND", "SIZE", "CHANGED", "PATH"],
        &rows,
        "empty",
    );
    Ok(())
}

pub(crate) async fn stats(global: &Global, output: Output, args: StatsArgs) -> Result<()> {
    let client = Client::require(global)?;
    let sandbox = resolve(&client, &args.sandbox).await?;
    let metrics = client.get(&format!("/v1/sandboxes/{sandbox}/metrics")).await?;
    output.json(&metrics);
    let bytes = |field: &str| metrics[field].as_u64().map_or_else(|| "-".into(), format_bytes);
    output.line(format_args!(
        "cpu      {:.2} s",
        metrics["cpu_micros"].as_f64().unwrap_or_default() / 1e6
    ));
    output.line(format_args!(
        "memory   {} (most: {})",
        bytes("memory_bytes"),
        bytes("memory_peak_bytes")
    ));
    output.line(format_args!("disk     {}", bytes("disk_bytes")));
    output.line(format_args!("pids     {}", text(&metrics, "pids")));
    if metrics["oom_kills"].as_u64().unwrap_or_default() > 0 {
        output.line(format_args!(
            "killed for memory: {} times",
            text(&metrics, "oom_kills")
        ));
    }
    Ok(())
}

pub(crate) async fn extend(global: &Global, output: Output, args: ExtendArgs) -> Result<()> {
    let client = Client::require(global)?;
    let sandbox = resolve(&client, &args.sandbox).await?;
    let body = json!({"timeout_ms": args.time});
    let answer = client
        .post(&format!("/v1/sandboxes/{sandbox}/extend"), &body)
        .await?;
    output.json(&answer);
    output.line(format_args!("{sandbox} ends {}", relative(&answer, "deadline")));
    Ok(())
}

pub(crate) async fn port(global: &Global, output: Output, args: PortArgs) -> Result<()> {
    let client = Client::require(global)?;
    let sandbox = resolve(&client, &args.sandbox).await?;
    if let Some(port) = args.port {
        let answer = client
            .get(&format!("/v1/sandboxes/{sandbox}/ports/{port}"))
            .await?;
        output.json(&answer);
        output.line(text(&answer, "url"));
        if !output.json {
            output.note(format_args!(
                "Send the token with each request, as a header or in the URL:\n  curl -H 'X-Atoll-Token: {}' {}",
                text(&answer, "token"),
                text(&answer, "url")
            ));
        }
        return Ok(());
    }
    let answer = client.get(&format!("/v1/sandboxes/{sandbox}/ports")).await?;
    output.json(&answer);
    let rows: Vec<_> = answer["items"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|port| [text(port, "port"), text(port, "address"), text(port, "url")])
        .collect();
    output.table(
        ["PORT", "ADDRESS", "URL"],
        &rows,
        "nothing listens in this sandbox",
    );
    Ok(())
}

pub(crate) async fn kill(global: &Global, output: Output, args: KillArgs) -> Result<()> {
    let client = &Client::require(global)?;
    let ids = if args.all {
        let live = client.list("/v1/sandboxes", &[]).await?;
        live.iter().map(|sandbox| text(sandbox, "id")).collect()
    } else {
        let mut ids = Vec::new();
        for sandbox in &args.sandboxes {
            ids.push(resolve(client, sandbox).await?);
        }
        ids
    };
    let killed: Vec<Value> = futures_util::stream::iter(ids)
        .map(|id| async move { client.delete(&format!("/v1/sandboxes/{id}")).await })
        .buffer_unordered(16)
        .try_collect()
        .await?;
    for sandbox in &killed {
        output.line(text(sandbox, "id"));
    }
    output.json(&Value::Array(killed));
    Ok(())
}
