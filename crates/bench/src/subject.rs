//! The server under test: this very program as a process of its own, measured through its public API only.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use atoll_client::output::{Error, Result};
use atoll_client::{Client, ServerProcess, events, from_wire, scratch};
use futures_util::TryStreamExt;
use reqwest::Method;
use serde_json::{Value, json};
use tokio::process::Child;

use super::peers::{ECHO, millis};

#[derive(Debug)]
pub(crate) struct Subject {
    process: Child,
    pub(crate) pid: u32,
    pub(crate) client: Client,
    /// Its data directory.
    pub(crate) data: PathBuf,
    /// Holds the data and is removed with it.
    _dir: tempfile::TempDir,
}

impl Subject {
    /// Starts a server on fresh data with the given templates. `arguments` go to `atoll server`.
    pub(crate) async fn start(templates: &Path, arguments: &[&str]) -> Result<Self> {
        let dir = scratch()?;
        let data = dir.path().join("data");
        let server = ServerProcess::start(&data, templates, arguments).await?;
        Ok(Self {
            pid: server.pid,
            process: server.process,
            client: server.client,
            data,
            _dir: dir,
        })
    }

    /// Kills every sandbox, then the server.
    pub(crate) async fn stop(mut self) {
        if let Ok(live) = self.client.list("/v1/sandboxes", &[]).await {
            let client = &self.client;
            let _ended: Vec<()> =
                futures_util::StreamExt::collect(futures_util::StreamExt::buffer_unordered(
                    futures_util::stream::iter(live.into_iter().map(|sandbox| async move {
                        let id = sandbox["id"].as_str().unwrap_or_default().to_owned();
                        let _gone = kill(client, &id).await;
                    })),
                    16,
                ))
                .await;
        }
        if let Some(pid) = rustix::process::Pid::from_raw(self.pid.cast_signed()) {
            let _gone = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        let _ended = tokio::time::timeout(Duration::from_secs(30), self.process.wait()).await;
    }

    /// Waits until every pool is full.
    pub(crate) async fn pools_full(&self) -> Result<()> {
        let began = Instant::now();
        loop {
            let info = self.client.get("/v1/info").await?;
            let pools = info["pools"].as_array().cloned().unwrap_or_default();
            if !pools.is_empty()
                && pools
                    .iter()
                    .all(|pool| pool["ready"].as_u64() >= pool["target"].as_u64())
            {
                return Ok(());
            }
            if began.elapsed() > Duration::from_secs(30) {
                return Err(Error::new("the pools did not fill within 30 seconds"));
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

pub(crate) async fn create(client: &Client, body: &Value) -> Result<String> {
    let sandbox = client.post("/v1/sandboxes", body).await?;
    sandbox["id"]
        .as_str()
        .map(str::to_owned)
        .ok_or_else(|| Error::new("the server gave no id"))
}

pub(crate) async fn kill(client: &Client, id: &str) -> Result<()> {
    client.delete(&format!("/v1/sandboxes/{id}")).await.map(|_| ())
}

/// Milliseconds from the create request to the first byte of output of a command in the sandbox; and the sandbox.
pub(crate) async fn create_to_first_byte(client: &Client, body: &Value) -> Result<(f64, String)> {
    let began = Instant::now();
    let id = create(client, body).await?;
    Ok((first_byte(client, &id, began).await?, id))
}

/// The same in one request.
pub(crate) async fn run_to_first_byte(client: &Client, body: &Value) -> Result<(f64, String)> {
    let began = Instant::now();
    let body = json!({ "sandbox": body, "command": { "argv": ECHO }, "keep": true });
    let heard = listen(client, "/v1/run", &body, began).await?;
    let id = heard.created.ok_or_else(|| Error::new("the server gave no id"))?;
    Ok((heard.first_byte, id))
}

/// Runs a command in the sandbox; milliseconds from `began` to its first byte of output.
pub(crate) async fn first_byte(client: &Client, id: &str, began: Instant) -> Result<f64> {
    let path = format!("/v1/sandboxes/{id}/exec");
    let heard = listen(client, &path, &json!({ "argv": ECHO }), began).await?;
    Ok(heard.first_byte)
}

struct Heard {
    first_byte: f64,
    created: Option<String>,
}

async fn listen(client: &Client, path: &str, body: &Value, began: Instant) -> Result<Heard> {
    let request = client
        .request(Method::POST, path)
        .header("accept", "text/event-stream")
        .json(body);
    let mut stream = events(client.send(request).await?);
    let (mut elapsed, mut created) = (None, None);
    while let Some((name, data)) = stream.try_next().await? {
        match name.as_str() {
            "stdout" if elapsed.is_none() => elapsed = Some(millis(began.elapsed())),
            "created" => created = data["id"].as_str().map(str::to_owned),
            "error" => return Err(from_wire(&data)),
            _ => {}
        }
    }
    let first_byte = elapsed.ok_or_else(|| Error::new("the command printed nothing"))?;
    Ok(Heard { first_byte, created })
}

/// Runs a command to its end; returns its stdout.
pub(crate) async fn exec(client: &Client, id: &str, argv: &[&str]) -> Result<String> {
    let answer = client
        .post(&format!("/v1/sandboxes/{id}/exec"), &json!({ "argv": argv }))
        .await?;
    if answer["exit_code"] != json!(0) {
        return Err(Error::new(format!("{argv:?} failed in the sandbox: {answer}")));
    }
    Ok(answer["stdout"].as_str().unwrap_or_default().to_owned())
}
