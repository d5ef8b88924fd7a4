//! Artifacts: what outlives its sandbox.

use std::path::{Path, PathBuf};

use atoll_client::output::{Error, Output, Result, byte_bar};
use atoll_client::{Client, segment, text, transfer};
use atoll_types::format_bytes;
use reqwest::Method;
use serde_json::{Value, json};

use super::{relative, resolve, split_location};
use crate::args::{ArtifactCommand, Global};

pub(crate) async fn run(global: &Global, output: Output, command: ArtifactCommand) -> Result<()> {
    let client = global.client()?;
    match command {
        ArtifactCommand::Save { from, name, keep } => {
            let (sandbox, path) = split_location(&from)
                .ok_or_else(|| Error::new(format!("`{from}` is not of the form SANDBOX:PATH")))?;
            let sandbox = resolve(&client, sandbox).await?;
            let mut body = json!({"name": name, "path": path});
            if let Some(keep) = keep {
                body["retention_ms"] = json!(keep);
            }
            let artifact = client
                .post(&format!("/v1/sandboxes/{sandbox}/artifacts"), &body)
                .await?;
            output.json(&artifact);
            output.line(text(&artifact, "id"));
        }
        ArtifactCommand::List { name } => {
            let query: Vec<_> = name.into_iter().map(|name| ("name".to_owned(), name)).collect();
            let artifacts = client.list("/v1/artifacts", &query).await?;
            let rows: Vec<_> = artifacts
                .iter()
                .map(|artifact| {
                    [
                        text(artifact, "id"),
                        text(artifact, "name"),
                        text(artifact, "kind"),
                        format_bytes(artifact["size_bytes"].as_u64().unwrap_or_default()),
                        relative(artifact, "created_at"),
                        relative(artifact, "expires_at"),
                        text(artifact, "sandbox"),
                    ]
                })
                .collect();
            let headings = ["ID", "NAME", "KIND", "SIZE", "SAVED", "EXPIRES", "SANDBOX"];
            output.table(headings, &rows, "no artifacts; `atoll artifact save` keeps one");
            output.json(&Value::Array(artifacts));
        }
        ArtifactCommand::Get { artifact, to } => get(&client, output, &artifact, to).await?,
        ArtifactCommand::Delete { artifact } => {
            let answer = client
                .delete(&format!("/v1/artifacts/{}", segment(&artifact)))
                .await?;
            output.json(&answer);
            output.line(format_args!("{artifact} is deleted"));
        }
    }
    Ok(())
}

async fn get(client: &Client, output: Output, which: &str, to: Option<PathBuf>) -> Result<()> {
    let path = format!("/v1/artifacts/{}", segment(which));
    let artifact = client.get(&path).await?;
    let directory = artifact["kind"] == "directory";
    let name = text(&artifact, "name");
    // Names are free text: only its last part is a file name, and never a hidden way out.
    let own = Path::new(&name)
        .file_name()
        .map_or_else(|| PathBuf::from("artifact"), PathBuf::from);
    let to = match to {
        None => own,
        Some(to) if to.is_dir() => to.join(own),
        Some(to) => to,
    };
    let response = client
        .send(client.request(Method::GET, &format!("{path}/content")))
        .await?;
    let bar = byte_bar(output, &name, artifact["size_bytes"].as_u64());
    let to_stdout = to == Path::new("-");
    if directory && !to_stdout {
        let parent = to
            .parent()
            .filter(|parent| !parent.as_os_str().is_empty())
            .unwrap_or(Path::new("."));
        let last = to.file_name().map(|name| name.to_string_lossy().into_owned());
        transfer::unpack(response, parent, last, &bar).await?;
    } else {
        transfer::save(response, &to, &bar).await?;
    }
    bar.finish_and_clear();
    if !to_stdout {
        output.json(&artifact);
        output.line(to.display());
    }
    Ok(())
}
