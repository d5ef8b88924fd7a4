//! The second half of the demo: one durable workflow through all of the product, on a server of its own, which is killed on
//! the way. At its end, the ledger is read as a timeline: what ran, what was refused, what it cost.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use atoll_client::output::{Doing, Error, Result};
use atoll_client::{Client, ServerProcess, WorkflowClient, local, scratch, text};
use serde_json::{Value, json};
use temporalio_protos::temporal::api::common::v1::WorkflowType;
use temporalio_protos::temporal::api::taskqueue::v1::TaskQueue;
use temporalio_protos::temporal::api::workflowservice::v1 as service;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use crate::milliseconds;
use crate::plan::{self, MODEL, REPORT};

const NAMESPACE: &str = "default";
const QUEUE: &str = "demo";
const WORKFLOW: &str = "weekly-report";
/// Whoever runs the demo is the only tenant.
const ARGUMENTS: [&str; 2] = ["--isolation", "jail"];
/// Nothing in the story takes nearly as long.
const PATIENCE: Duration = Duration::from_secs(60);

/// A moment of the timeline.
struct Moment {
    at: jiff::Timestamp,
    what: &'static str,
    line: String,
}

pub(crate) struct Story {
    dir: tempfile::TempDir,
    templates: PathBuf,
    server: ServerProcess,
    /// Follows its script; ends with the story.
    _provider: AbortOnDropHandle<()>,
    /// Plays the workflow; ends with the story.
    _worker: AbortOnDropHandle<()>,
    moments: Vec<Moment>,
}

impl Story {
    /// A server with a scripted model, a price, a budget, and somebody who plays workflows.
    pub(crate) async fn begin(templates: &Path) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")
            .await
            .doing("cannot listen for the scripted model")?;
        let address = listener
            .local_addr()
            .doing("cannot listen for the scripted model")?;
        let provider = atoll_scripted::serve(listener, CancellationToken::new());
        let provider = AbortOnDropHandle::new(tokio::spawn(provider));

        let dir = scratch()?;
        let data = dir.path().join("data");
        let server = ServerProcess::start(&data, templates, &ARGUMENTS).await?;
        let client = &server.client;
        let kind = json!({"kind": "openai", "base_url": format!("http://{address}/v1"), "key": "not needed by a script"});
        client.put("/v1/gateway/providers/scripted", &kind).await?;
        let route = json!({"targets": [{"provider": "scripted", "model": MODEL}]});
        client.put(&format!("/v1/gateway/models/{MODEL}"), &route).await?;
        let price = json!({"input": "3", "output": "15"});
        client
            .put(&format!("/v1/gateway/prices/scripted/{MODEL}"), &price)
            .await?;
        let budget = json!({"limit": "0.01", "scope": "workflow", "subject": WORKFLOW});
        client.put("/v1/gateway/budgets/story", &budget).await?;
        let worker = AbortOnDropHandle::new(tokio::spawn(work(data)));
        Ok(Self {
            dir,
            templates: templates.to_owned(),
            server,
            _provider: provider,
            _worker: worker,
            moments: Vec::new(),
        })
    }

    fn data(&self) -> PathBuf {
        self.dir.path().join("data")
    }

    fn client(&self) -> &Client {
        &self.server.client
    }

    fn note(&mut self, what: &'static str, line: impl Into<String>) {
        let at = jiff::Timestamp::now();
        let line = line.into();
        self.moments.push(Moment { at, what, line });
    }

    /// Starts the workflow and follows it until it has a question.
    pub(crate) async fn until_it_asks(&mut self) -> Result<Value> {
        let mut wire = connect(&self.data()).await?;
        let request = service::StartWorkflowExecutionRequest {
            namespace: NAMESPACE.to_owned(),
            workflow_id: WORKFLOW.to_owned(),
            request_id: WORKFLOW.to_owned(),
            workflow_type: Some(WorkflowType {
                name: "WeeklyReport".to_owned(),
            }),
            task_queue: Some(TaskQueue {
                name: QUEUE.to_owned(),
                ..Default::default()
            }),
            ..Default::default()
        };
        wire.call::<_, service::StartWorkflowExecutionResponse>("StartWorkflowExecution", request)
            .await?;
        self.note("workflow", format!("{WORKFLOW} begins"));
        let began = Instant::now();
        loop {
            let asked = self.client().get("/v1/approvals").await?;
            if let Some(question) = asked["items"].as_array().and_then(|items| items.first()) {
                self.note(
                    "approval",
                    format!("a person is asked: {}", text(question, "reason")),
                );
                self.until_written_down(question).await?;
                return Ok(question.clone());
            }
            self.check_running(began).await?;
        }
    }

    /// Refusals of the network are gathered for a second before they are written. A person takes longer to think.
    async fn until_written_down(&self, question: &Value) -> Result<()> {
        let id = text(&question["action"]["input"], "sandbox");
        let began = Instant::now();
        loop {
            let log = self
                .client()
                .list(&format!("/v1/sandboxes/{id}/network/log"), &[])
                .await?;
            if log.iter().any(|fact| fact["kind"] == json!("network.denied")) {
                return Ok(());
            }
            self.check_running(began).await?;
        }
    }

    /// The workflow's state, or why it did not get that far.
    async fn check_running(&self, began: Instant) -> Result<()> {
        let workflow = self.client().get(&format!("/v1/workflows/{WORKFLOW}")).await?;
        let on_its_way = ["running", "completed"].contains(&text(&workflow, "status").as_str());
        if !on_its_way || began.elapsed() > PATIENCE {
            let history = self
                .client()
                .list(&format!("/v1/workflows/{WORKFLOW}/history"), &[])
                .await?;
            let last = history
                .last()
                .map(|event| format!("{} {}", text(event, "type"), text(event, "about")));
            return Err(Error::new(format!(
                "the workflow is {}: {}",
                text(&workflow, "status"),
                last.unwrap_or_default()
            )));
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
        Ok(())
    }

    /// Kills the server as a power cut would, and starts it again on the same data.
    pub(crate) async fn kill_and_return(&mut self) -> Result<String> {
        self.server.process.kill().await.doing("cannot kill the server")?;
        self.note("server", "killed with -9");
        let clock = Instant::now();
        self.server = ServerProcess::start(&self.data(), &self.templates, &ARGUMENTS).await?;
        self.note("server", "back, on the same data");
        Ok(milliseconds(clock.elapsed()))
    }

    /// The sandbox of a question that still stands, and still runs.
    pub(crate) async fn still_there(&self, question: &Value) -> Result<String> {
        let now = self
            .client()
            .get(&format!("/v1/approvals/{}", text(question, "id")))
            .await?;
        let id = text(&question["action"]["input"], "sandbox");
        let sandbox = self.client().get(&format!("/v1/sandboxes/{id}")).await?;
        let (state, asked) = (text(&sandbox, "state"), text(&now, "state"));
        if (state.as_str(), asked.as_str()) != ("running", "waiting") {
            return Err(Error::new(format!(
                "after the kill the sandbox is {state} and the question {asked}"
            )));
        }
        Ok(id)
    }

    /// Answers, and waits for the workflow's end.
    pub(crate) async fn grant(&mut self, question: &Value) -> Result<String> {
        let id = text(question, "id");
        let answer = json!({"digest": question["digest"], "by": "you", "note": "looks right"});
        self.client()
            .post(&format!("/v1/approvals/{id}/grant"), &answer)
            .await?;
        self.note("approval", "granted by you: looks right");
        let began = Instant::now();
        loop {
            let workflow = self.client().get(&format!("/v1/workflows/{WORKFLOW}")).await?;
            if text(&workflow, "status") == "completed" {
                self.note("workflow", format!("{WORKFLOW} is complete"));
                break;
            }
            self.check_running(began).await?;
        }
        // What it made goes with it, soon.
        while !self.client().list("/v1/sandboxes", &[]).await?.is_empty() {
            if began.elapsed() > PATIENCE {
                return Err(Error::new("the sandbox of the workflow outlives it"));
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let request = self
            .client()
            .request(reqwest::Method::GET, &format!("/v1/artifacts/{REPORT}/content"));
        let report = self.client().send(request).await?;
        report.text().await.doing("the download broke off")
    }

    /// What the ledger has, with what only the story knows, in the order in which it happened.
    pub(crate) async fn timeline(&mut self) -> Result<Vec<String>> {
        let facts = self.client().list("/v1/facts", &[]).await?;
        let mut moments: Vec<Moment> = facts.iter().filter_map(moment).collect();
        moments.append(&mut self.moments);
        moments.sort_by_key(|moment| moment.at);
        let Some(first) = moments.iter().position(|moment| moment.what == "workflow") else {
            return Err(Error::new("the ledger does not know of the workflow"));
        };
        let began = moments[first].at;
        let lines = moments[first..].iter().map(|moment| {
            let seconds = moment.at.duration_since(began).as_secs_f64();
            format!("{seconds:>5.2} s  {:<9} {}", moment.what, moment.line)
        });
        Ok(lines.collect())
    }

    /// What it has cost, by the ledger.
    pub(crate) async fn cost(&self) -> Result<String> {
        let request = self.client().request(reqwest::Method::GET, "/v1/gateway/spend");
        let spend = self.client().json(request.query(&[("by", "workflow")])).await?;
        let row = spend["items"].as_array().and_then(|items| items.first());
        let row = row.ok_or_else(|| Error::new("nothing was spent"))?;
        let began = Instant::now();
        let mut cpu = 0.0;
        // The last of it is written behind.
        while cpu == 0.0 && began.elapsed() < Duration::from_secs(5) {
            let usage = self.client().get("/v1/usage").await?;
            cpu = usage["cpu_micros"].as_f64().unwrap_or_default() / 1e6;
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(format!(
            "models: {} call for ${}; sandboxes: {:.2} s of CPU",
            row["calls"],
            text(row, "cost"),
            cpu
        ))
    }

    /// Ends the server and what it holds.
    pub(crate) async fn end(mut self) {
        for sandbox in self.client().list("/v1/sandboxes", &[]).await.unwrap_or_default() {
            let path = format!("/v1/sandboxes/{}", text(&sandbox, "id"));
            let _already_gone = self.client().delete(&path).await;
        }
        if let Some(pid) = rustix::process::Pid::from_raw(self.server.pid.cast_signed()) {
            let _gone = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        let _ended = tokio::time::timeout(Duration::from_secs(30), self.server.process.wait()).await;
    }
}

/// A fact as a line, if it is one for the story.
fn moment(fact: &Value) -> Option<Moment> {
    let data = &fact["data"];
    let (what, line) = match fact["kind"].as_str()? {
        "model.called" => (
            "model",
            format!(
                "{} answers: {} tokens in, {} out, ${}",
                text(data, "asked"),
                data["usage"]["input"],
                data["usage"]["output"],
                text(data, "cost")
            ),
        ),
        "model.refused" => (
            "refused",
            format!(
                "{}: {}",
                text(data, "model"),
                text(data, "reason").split(": ").next().unwrap_or_default()
            ),
        ),
        "sandbox.created" => (
            "sandbox",
            format!("{} on {}", text(fact, "sandbox"), text(data, "isolation")),
        ),
        "sandbox.ended" => ("sandbox", "ended with its workflow".to_owned()),
        "command.exited" => (
            "command",
            format!(
                "exit code {} after {} ms",
                data["exit_code"], data["duration_millis"]
            ),
        ),
        "network.denied" => (
            "refused",
            format!(
                "{} {}: {}",
                text(data, "protocol"),
                data["host"].as_str().unwrap_or(&text(data, "address")),
                text(data, "reason")
            ),
        ),
        "artifact.saved" => (
            "artifact",
            format!("{}, {} bytes", text(data, "name"), data["size"]),
        ),
        _ => return None,
    };
    Some(Moment {
        at: text(fact, "at").parse().ok()?,
        what,
        line,
    })
}

async fn connect(data: &Path) -> Result<WorkflowClient> {
    let server = local::running_server(data).ok_or_else(|| Error::new("the server is away"))?;
    let url = server
        .workflows
        .ok_or_else(|| Error::new("the server serves no workflows"))?;
    WorkflowClient::open(&url, local::read_admin_key(data).as_deref()).await
}

/// Plays workflows: takes a task, decides by the history, answers. Goes on with whichever server is there.
async fn work(data: PathBuf) {
    loop {
        let Ok(mut wire) = connect(&data).await else {
            tokio::time::sleep(Duration::from_millis(20)).await;
            continue;
        };
        while play(&mut wire).await.is_ok() {}
    }
}

async fn play(wire: &mut WorkflowClient) -> Result<()> {
    let request = service::PollWorkflowTaskQueueRequest {
        namespace: NAMESPACE.to_owned(),
        task_queue: Some(TaskQueue {
            name: QUEUE.to_owned(),
            ..Default::default()
        }),
        identity: "demo".to_owned(),
        ..Default::default()
    };
    let task: service::PollWorkflowTaskQueueResponse = wire.call("PollWorkflowTaskQueue", request).await?;
    if task.task_token.is_empty() {
        return Ok(());
    }
    let history = task.history.unwrap_or_default();
    let answer = service::RespondWorkflowTaskCompletedRequest {
        namespace: NAMESPACE.to_owned(),
        task_token: task.task_token,
        identity: "demo".to_owned(),
        commands: plan::decide(&history.events),
        ..Default::default()
    };
    wire.call::<_, service::RespondWorkflowTaskCompletedResponse>("RespondWorkflowTaskCompleted", answer)
        .await
        .map(drop)
}
