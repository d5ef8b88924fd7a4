//! Volumes: create, list, inspect, delete, export, import.

use std::path::Path;

use atoll_client::output::{Error, Output, Result, byte_bar};
use atoll_client::{Client, segment, text, transfer};
use atoll_types::format_bytes;
use reqwest::{Method, RequestBuilder};
use serde_json::{Value, json};

use super::relative;
use crate::args::{Global, VolumeCommand};

pub(crate) async fn run(global: &Global, output: Output, command: VolumeCommand) -> Result<()> {
    let client = &global.client()?;
    match command {
        VolumeCommand::Create { name, size, from, .. } => {
            let volume = match (size, from) {
                (None, None) => return Err(Error::new("say how large it is to be, with --size")),
                (None, Some(from)) => seal(client, output, &name, &from).await?,
                (Some(size), from) => create(client, output, &name, size, from.as_deref()).await?,
            };
            output.json(&volume);
            output.line(text(&volume, "id"));
        }
        VolumeCommand::List => list(client, output).await?,
        VolumeCommand::Inspect { volume } => {
            let volume = client.get(&path(&volume)).await?;
            // It is for people as it is for programs.
            Output { json: true }.json(&volume);
        }
        VolumeCommand::Delete { volume } => {
            client.delete(&path(&volume)).await?;
            output.json(&json!({"deleted": volume}));
            output.line(format_args!("{volume} is deleted"));
        }
        VolumeCommand::Export { volume, to } => export(client, output, &volume, &to).await?,
        VolumeCommand::Import { volume, from } => {
            let added = import(client, output, &volume, &from).await?;
            output.json(&added);
            output.line(format_args!(
                "{} files, directories and links are in {volume}",
                text(&added, "entries")
            ));
        }
    }
    Ok(())
}

fn path(which: &str) -> String {
    format!("/v1/volumes/{}", segment(which))
}

/// An empty volume, or one that is filled; one that could not be filled does not stay.
async fn create(
    client: &Client,
    output: Output,
    name: &str,
    size: u64,
    from: Option<&Path>,
) -> Result<Value> {
    let body = json!({"name": name, "size_bytes": size});
    let volume = client.post("/v1/volumes", &body).await?;
    let Some(from) = from else { return Ok(volume) };
    let id = text(&volume, "id");
    if let Err(error) = import(client, output, &id, from).await {
        let _leftover = client.delete(&path(&id)).await;
        return Err(error);
    }
    client.get(&path(&id)).await
}

async fn seal(client: &Client, output: Output, name: &str, from: &Path) -> Result<Value> {
    let request = client
        .request(Method::POST, "/v1/volumes/seal")
        .query(&[("name", name)]);
    send_tar(client, output, request, from).await
}

async fn import(client: &Client, output: Output, which: &str, from: &Path) -> Result<Value> {
    let request = client.request(Method::PUT, &format!("{}/content", path(which)));
    send_tar(client, output, request, from).await
}

/// A directory is packed on the way; a file is taken for an archive.
async fn send_tar(client: &Client, output: Output, request: RequestBuilder, from: &Path) -> Result<Value> {
    let (body, bar) = if from.is_dir() {
        let bar = byte_bar(output, &from.display().to_string(), None);
        let body = transfer::body_from_tar(from.to_owned(), String::new(), bar.clone());
        (body, bar)
    } else {
        transfer::body_from_path(output, from)?
    };
    let request = request.header("content-type", "application/x-tar").body(body);
    let answer = client.json(request).await?;
    bar.finish_and_clear();
    Ok(answer)
}

async fn list(client: &Client, output: Output) -> Result<()> {
    let volumes = client.list("/v1/volumes", &[]).await?;
    let bytes = |volume: &Value, field: &str| volume[field].as_u64().map_or_else(|| "-".into(), format_bytes);
    let rows: Vec<_> = volumes
        .iter()
        .map(|volume| {
            let attached = volume["attached_to"].as_array().into_iter().flatten();
            let attached: Vec<_> = attached.filter_map(Value::as_str).collect();
            let mode = if volume["read_only"] == json!(true) {
                "read-only"
            } else {
                "read-write"
            };
            [
                text(volume, "id"),
                text(volume, "name"),
                mode.to_owned(),
                bytes(volume, "size_bytes"),
                bytes(volume, "used_bytes"),
                relative(volume, "created_at"),
                attached.join(" "),
            ]
        })
        .collect();
    output.table(
        ["ID", "NAME", "MODE", "SIZE", "USED", "CREATED", "ATTACHED TO"],
        &rows,
        "no volumes; `atoll volume create NAME --size 1G` makes one",
    );
    output.json(&Value::Array(volumes));
    Ok(())
}

async fn export(client: &Client, output: Output, which: &str, to: &Path) -> Result<()> {
    let request = client.request(Method::GET, &format!("{}/content", path(which)));
    let response = client.send(request).await?;
    let bar = byte_bar(output, which, None);
    if to.is_dir() || to.to_string_lossy().ends_with('/') {
        transfer::unpack(response, to, None, &bar).await?;
    } else {
        transfer::save(response, to, &bar).await?;
    }
    bar.finish_and_clear();
    if to != Path::new("-") {
        output.json(&json!({"volume": which, "to": to}));
        output.line(to.display());
    }
    Ok(())
}
