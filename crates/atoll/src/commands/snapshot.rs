//! Snapshots: create, list, inspect, delete, export, import.

use std::path::Path;

use atoll_client::output::{Output, Result, byte_bar};
use atoll_client::{Client, segment, text, transfer};
use atoll_types::format_bytes;
use reqwest::Method;
use serde_json::{Value, json};

use super::{relative, resolve};
use crate::args::{Global, SnapshotCommand};

pub(crate) async fn run(global: &Global, output: Output, command: SnapshotCommand) -> Result<()> {
    let client = &global.client()?;
    match command {
        SnapshotCommand::Create { sandbox, name, kind } => {
            let id = resolve(client, &sandbox).await?;
            let mut body = json!({});
            if let Some(name) = name {
                body["name"] = json!(name);
            }
            if let Some(kind) = kind.name() {
                body["kind"] = json!(kind);
            }
            let snapshot = client
                .post(&format!("/v1/sandboxes/{id}/snapshots"), &body)
                .await?;
            output.json(&snapshot);
            output.line(text(&snapshot, "id"));
            output.note(describe(&snapshot));
        }
        SnapshotCommand::List => list(client, output).await?,
        SnapshotCommand::Inspect { snapshot } => {
            let snapshot = client.get(&path(&snapshot)).await?;
            // It is for people as it is for programs.
            Output { json: true }.json(&snapshot);
        }
        SnapshotCommand::Delete { snapshot } => {
            client.delete(&path(&snapshot)).await?;
            output.json(&json!({"deleted": snapshot}));
            output.line(format_args!("{snapshot} is deleted"));
        }
        SnapshotCommand::Export { snapshot, file } => export(client, output, &snapshot, &file).await?,
        SnapshotCommand::Import { file, name } => import(client, output, &file, name).await?,
    }
    Ok(())
}

fn path(which: &str) -> String {
    format!("/v1/snapshots/{}", segment(which))
}

fn bytes(value: &Value, field: &str) -> String {
    value[field].as_u64().map_or_else(|| "-".into(), format_bytes)
}

/// `memory, 25.8 MiB, of which 3.1 MiB are new on the disk`
fn describe(snapshot: &Value) -> String {
    format!(
        "{}, {}, of which {} are new on the disk",
        text(snapshot, "kind"),
        bytes(snapshot, "total_bytes"),
        bytes(snapshot, "stored_bytes")
    )
}

async fn list(client: &Client, output: Output) -> Result<()> {
    let snapshots = client.list("/v1/snapshots", &[]).await?;
    let rows: Vec<_> = snapshots
        .iter()
        .map(|snapshot| {
            [
                text(snapshot, "id"),
                text(snapshot, "name"),
                text(snapshot, "kind"),
                text(snapshot, "isolation"),
                bytes(snapshot, "total_bytes"),
                bytes(snapshot, "stored_bytes"),
                relative(snapshot, "created_at"),
                text(snapshot, "sandbox"),
            ]
        })
        .collect();
    output.table(
        [
            "ID",
            "NAME",
            "KEEPS",
            "ISOLATION",
            "SIZE",
            "STORED",
            "TAKEN",
            "SANDBOX",
        ],
        &rows,
        "no snapshots; `atoll snapshot create SANDBOX` takes one",
    );
    output.json(&Value::Array(snapshots));
    Ok(())
}

async fn export(client: &Client, output: Output, which: &str, file: &Path) -> Result<()> {
    let snapshot = client.get(&path(which)).await?;
    let request = client.request(Method::GET, &format!("{}/export", path(which)));
    let response = client.send(request).await?;
    let bar = byte_bar(output, which, snapshot["total_bytes"].as_u64());
    transfer::save(response, file, &bar).await?;
    bar.finish_and_clear();
    if file != Path::new("-") {
        output.json(&json!({"snapshot": snapshot["id"], "file": file}));
        output.line(file.display());
    }
    Ok(())
}

async fn import(client: &Client, output: Output, file: &Path, name: Option<String>) -> Result<()> {
    let (body, bar) = transfer::body_from_path(output, file)?;
    let request = client
        .request(Method::POST, "/v1/snapshots/import")
        .query(&name.map(|name| [("name", name)]))
        .header("content-type", "application/octet-stream")
        .body(body);
    let snapshot = client.json(request).await?;
    bar.finish_and_clear();
    output.json(&snapshot);
    output.line(text(&snapshot, "id"));
    output.note(describe(&snapshot));
    Ok(())
}
