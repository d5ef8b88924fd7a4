//! Sandboxes: create, ls, inspect, stats, extend, port, kill.

use atoll_client::output::{Error, Output, Result};
use atoll_client::{Client, text};
use atoll_types::format_bytes;
use futures_util::StreamExt;
use reqwest::Method;
use serde_json::{Value, json};

use super::{create_body, note_wall, relative, resolve, split_location, wall};
use crate::args::{CreateArgs, ExtendArgs, Global, InspectArgs, KillArgs, LsArgs, PortArgs, StatsArgs};

pub(crate) async fn create(global: &Global, output: Output, args: CreateArgs) -> Result<()> {
    let client = global.client()?;
    let mut body = create_body(&args.spec)?;
    if let Some(what) = args.if_exists {
        body["if_exists"] = json!(what);
    }
    let sandbox = client.post("/v1/sandboxes", &body).await?;
    output.json(&sandbox);
    output.line(text(&sandbox, "id"));
    note_wall(output, &sandbox);
    Ok(())
}

pub(crate) async fn ls(global: &Global, output: Output, args: LsArgs) -> Result<()> {
    let client = global.client()?;
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
    query.extend(args.owner.map(|owner| ("owner".to_owned(), owner)));
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
            [
                text(sandbox, "id"),
                text(sandbox, "name"),
                state(sandbox),
                wall(sandbox),
                text(sandbox, "template"),
                size(&sandbox["resources"]),
                relative(sandbox, "created_at"),
                ends(sandbox),
                labels(&sandbox["labels"]),
            ]
        })
        .collect();
    output.table(
        [
            "ID",
            "NAME",
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

/// The state, with why it ended or what it keeps while it rests.
fn state(sandbox: &Value) -> String {
    let state = text(sandbox, "state");
    let reason = sandbox["end"]["reason"].as_str();
    match reason.or_else(|| sandbox["saved"]["kind"].as_str()) {
        Some(more) => format!("{state} ({more})"),
        None => state,
    }
}

/// When it ended, or will: running at its deadline, at rest when its retention is over.
fn ends(sandbox: &Value) -> String {
    if !sandbox["ended_at"].is_null() {
        return relative(sandbox, "ended_at");
    }
    if sandbox["saved"].is_null() {
        return relative(sandbox, "deadline");
    }
    relative(&sandbox["saved"], "expires_at")
}

pub(crate) async fn inspect(global: &Global, output: Output, args: InspectArgs) -> Result<()> {
    let client = global.client()?;
    let id = resolve(&client, &args.sandbox).await?;
    let sandbox = client.get(&format!("/v1/sandboxes/{id}")).await?;
    output.json(&sandbox);
    for (name, value) in about(&sandbox) {
        output.line(format_args!("{name:<12}{value}"));
    }
    Ok(())
}

/// What there is to say about a sandbox, a line each.
fn about(sandbox: &Value) -> Vec<(&'static str, String)> {
    let span = |field: &str| sandbox[field].as_u64().map(atoll_client::output::duration);
    let mut lines = vec![
        ("id", text(sandbox, "id")),
        ("state", state(sandbox)),
        (
            "template",
            format!("{} ({})", text(sandbox, "template"), text(sandbox, "template_id")),
        ),
        ("isolation", wall(sandbox)),
        ("size", size(&sandbox["resources"])),
        ("created", relative(sandbox, "created_at")),
    ];
    if let Some(name) = sandbox["name"].as_str() {
        lines.insert(1, ("name", name.to_owned()));
    }
    if let Some(owner) = sandbox["owner"].as_str() {
        lines.push(("owner", owner.to_owned()));
    }
    if let Some(message) = sandbox["end"]["message"].as_str() {
        lines.push(("ended", format!("{}: {message}", relative(sandbox, "ended_at"))));
        return lines;
    }
    if sandbox["saved"].is_null() {
        let then = text(sandbox, "on_timeout");
        lines.push((
            "deadline",
            format!("{}, then {then}", relative(sandbox, "deadline")),
        ));
    } else {
        let kept = kept(&text(&sandbox["saved"], "kind"));
        lines.push(("rests since", relative(&sandbox["saved"], "at")));
        lines.push(("keeps", kept.to_owned()));
        lines.push(("expires", relative(&sandbox["saved"], "expires_at")));
    }
    if let Some(after) = sandbox["idle"]["after_ms"].as_u64() {
        let after = atoll_client::output::duration(after);
        lines.push((
            "idle",
            format!("{after}, then {}", text(&sandbox["idle"], "action")),
        ));
    }
    if sandbox["auto_resume"] == json!(true) {
        lines.push(("on use", "resumes by itself".into()));
    }
    if let Some(retention) = span("retention_ms") {
        lines.push(("retention", format!("{retention} at rest, then deleted")));
    }
    for mount in sandbox["volumes"].as_array().into_iter().flatten() {
        let read_only = if mount["read_only"] == json!(true) {
            ", read-only"
        } else {
            ""
        };
        let (volume, path) = (text(mount, "volume"), text(mount, "path"));
        lines.push(("volume", format!("{volume} at {path}{read_only}")));
    }
    if let Some(policy) = sandbox["network"].as_object() {
        let preset = policy.get("preset").and_then(Value::as_str);
        let rules = policy.get("rules").and_then(Value::as_array).map_or(0, Vec::len);
        lines.push((
            "network",
            format!("{}, {rules} rules of its own", preset.unwrap_or("no preset")),
        ));
    }
    for used in sandbox["secrets"].as_array().into_iter().flatten() {
        lines.push(("secret", text(used, "secret")));
    }
    for (when, name) in [("on_create", "on create"), ("on_resume", "on resume")] {
        for hook in sandbox["hooks"][when].as_array().into_iter().flatten() {
            let argv = hook["argv"].as_array().into_iter().flatten();
            let words: Vec<_> = argv.filter_map(Value::as_str).collect();
            lines.push((name, words.join(" ")));
        }
    }
    let labels = labels(&sandbox["labels"]);
    if !labels.is_empty() {
        lines.push(("labels", labels));
    }
    lines
}

/// What `memory` and `filesystem` mean, for people.
pub(crate) fn kept(kind: &str) -> &'static str {
    match kind {
        "memory" => "memory and files: its processes will go on",
        _ => "files: its processes will start anew",
    }
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
    output.json(&answer["items"]);
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
    let client = global.client()?;
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
    let client = global.client()?;
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
    let client = global.client()?;
    let sandbox = resolve(&client, &args.sandbox).await?;
    if let Some(port) = args.port {
        let answer = client
            .get(&format!("/v1/sandboxes/{sandbox}/ports/{port}"))
            .await?;
        output.json(&answer);
        let (url, token) = (text(&answer, "url"), text(&answer, "token"));
        output.line(with_token(&url, &token));
        output.note(format_args!(
            "Whoever has this URL gets in. In a program, send the token as a header instead:\n  curl -H 'X-Atoll-Token: {token}' {url}",
        ));
        return Ok(());
    }
    let answer = client.get(&format!("/v1/sandboxes/{sandbox}/ports")).await?;
    output.json(&answer["items"]);
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

/// The URL that opens in a browser: the parameter is taken out on the way, and becomes a cookie.
fn with_token(url: &str, token: &str) -> String {
    format!("{}/?atoll_token={token}", url.trim_end_matches('/'))
}

pub(crate) async fn kill(global: &Global, output: Output, args: KillArgs) -> Result<()> {
    let client = &global.client()?;
    let ids = if args.all {
        let live = client.list("/v1/sandboxes", &[]).await?;
        live.iter().map(|sandbox| text(sandbox, "id")).collect()
    } else {
        args.sandboxes
    };
    let outcomes: Vec<Result<Value>> = futures_util::stream::iter(ids)
        .map(|sandbox| async move {
            let id = resolve(client, &sandbox).await?;
            client.delete(&format!("/v1/sandboxes/{id}")).await
        })
        .buffer_unordered(16)
        .collect()
        .await;
    let (mut killed, mut failed) = (Vec::new(), Vec::new());
    for outcome in outcomes {
        match outcome {
            Ok(sandbox) => killed.push(sandbox),
            Err(error) => failed.push(error),
        }
    }
    for sandbox in &killed {
        output.line(text(sandbox, "id"));
    }
    output.json(&Value::Array(killed));
    all_or_what_failed(failed)
}

/// The one failure as it is, or all of them in one.
fn all_or_what_failed(mut failed: Vec<Error>) -> Result<()> {
    match failed.len() {
        0 => Ok(()),
        1 => Err(failed.remove(0)),
        count => {
            let each: Vec<String> = failed.iter().map(|error| format!("  {error}")).collect();
            Err(Error::new(format!(
                "{count} were not killed:\n{}",
                each.join("\n")
            )))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_weaker_wall_is_called_what_it_is() {
        let sandbox = json!({"id": "sbx_a", "isolation": "jail", "tenant_boundary": false});
        let lines = about(&sandbox);
        assert!(
            lines.contains(&("isolation", "jail (not a tenant boundary)".into())),
            "{lines:?}"
        );
        assert_eq!(
            wall(&json!({"isolation": "gvisor", "tenant_boundary": true})),
            "gvisor"
        );
    }

    #[test]
    fn every_failure_of_several_is_said() {
        assert!(all_or_what_failed(Vec::new()).is_ok());
        let failures = vec![Error::new("no a").hint("look"), Error::new("no b")];
        let error = all_or_what_failed(failures).unwrap_err();
        assert_eq!(error.message, "2 were not killed:\n  no a (look)\n  no b");
    }

    #[test]
    fn a_resting_sandbox_says_what_it_keeps() {
        let sandbox = json!({
            "id": "sbx_a", "name": "my-agent", "owner": "key:key_a", "state": "paused", "template": "base", "template_id": "tpl_a", "isolation": "gvisor",
            "resources": {"cpu_millis": 1000, "memory_bytes": 536_870_912}, "end": null, "ended_at": null,
            "deadline": null, "on_timeout": "pause", "auto_resume": true, "retention_ms": 604_800_000,
            "saved": {"kind": "memory", "at": null, "expires_at": null}, "idle": {"after_ms": 600_000, "action": "stop"},
            "volumes": [{"volume": "data", "path": "/data", "read_only": true}],
            "hooks": {"on_create": [], "on_resume": [{"argv": ["/bin/sh", "-c", "true"]}]}, "labels": {"a": "b"},
        });
        assert_eq!(state(&sandbox), "paused (memory)");
        let lines: Vec<_> = about(&sandbox)
            .into_iter()
            .map(|(name, value)| format!("{name:<12}{value}"))
            .collect();
        insta::assert_snapshot!(lines.join("\n"), @r"
        id          sbx_a
        name        my-agent
        state       paused (memory)
        template    base (tpl_a)
        isolation   gvisor
        size        1 cpu, 512 MiB
        created     -
        owner       key:key_a
        rests since -
        keeps       memory and files: its processes will go on
        expires     -
        idle        10m, then stop
        on use      resumes by itself
        retention   7d at rest, then deleted
        volume      data at /data, read-only
        on resume   /bin/sh -c true
        labels      a=b
        ");
    }
}
