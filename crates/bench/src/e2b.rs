//! The rows of `atoll bench e2b`: what it costs to come with E2B's SDK for Python rather than by our own API.
//!
//! The same is done through the SDK and through the native API, in turn, on sandboxes of the same server. What is "added"
//! is the difference of the medians.

use std::path::Path;
use std::process::Stdio;
use std::time::Instant;

use atoll_client::output::{Doing, Error, Result};
use atoll_client::{Client, local};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use super::peers::millis;
use super::row::{Bar, Row, Samples};
use super::subject::{Subject, create, exec, kill};
use super::{Measured, Setting};

const CLIENT: &str = include_str!("e2b/client.py");
const NATIVE: &str = "native API";
/// The template that the code interpreter's SDK asks for.
const INTERPRETER: &str = "code-interpreter-v1";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum E2bCase {
    Create,
    Run,
    RunCode,
    Rest,
}

impl E2bCase {
    pub(crate) const ALL: [Self; 4] = [Self::Create, Self::Run, Self::RunCode, Self::Rest];

    fn rows(self) -> &'static [&'static str] {
        match self {
            Self::Create => &["e2b_create_warm"],
            Self::Run => &["e2b_run_true_added"],
            Self::RunCode => &["e2b_run_code_warm"],
            Self::Rest => &["e2b_pause_added", "e2b_connect_added"],
        }
    }
}

/// A case, and the Python that has the SDK.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WithSdk<'a> {
    pub(crate) case: E2bCase,
    pub(crate) python: &'a Path,
}

impl Measured for WithSdk<'_> {
    fn rows(self) -> &'static [&'static str] {
        self.case.rows()
    }

    fn is_slow(self) -> bool {
        false
    }

    async fn measure(self, setting: &Setting) -> Result<Vec<Row>> {
        let pool: &[&str] = match self.case {
            E2bCase::Create => &["--pool", "base=4"],
            _ => &[],
        };
        let subject =
            Subject::start(&setting.templates, &[&["--isolation", "gvisor"], pool].concat()).await?;
        let measured = self.measure_on(setting, &subject).await;
        subject.stop().await;
        measured
    }
}

impl WithSdk<'_> {
    async fn measure_on(self, setting: &Setting, subject: &Subject) -> Result<Vec<Row>> {
        let mut sdk = Sdk::start(self.python, subject)?;
        match self.case {
            E2bCase::Create => create_warm(setting, subject, &mut sdk).await,
            E2bCase::Run => run(setting, subject, &mut sdk).await,
            E2bCase::RunCode => run_code(setting, subject, &mut sdk).await,
            E2bCase::Rest => rest(setting, subject, &mut sdk).await,
        }
    }
}

/// The SDK, in a process that stays.
struct Sdk {
    _process: Child,
    asked: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Sdk {
    fn start(python: &Path, subject: &Subject) -> Result<Self> {
        let key = local::read_admin_key(&subject.data).unwrap_or_default();
        let url = subject.client.base().as_str().trim_end_matches('/');
        let mut process = Command::new(python)
            .args(["-u", "-c", CLIENT])
            .env("E2B_API_URL", url)
            .env("E2B_SANDBOX_URL", url)
            .env("E2B_API_KEY", key)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .doing("cannot start Python")?;
        let (Some(asked), Some(answers)) = (process.stdin.take(), process.stdout.take()) else {
            return Err(Error::new("Python has no pipes"));
        };
        Ok(Self {
            _process: process,
            asked,
            answers: BufReader::new(answers).lines(),
        })
    }

    /// Milliseconds that it took, and the sandbox.
    async fn ask(&mut self, request: &Value) -> Result<(f64, String)> {
        let line = format!("{request}\n");
        let missing = || {
            Error::new("the SDK is not there")
                .hint("--python names a Python with the packages `e2b` and `e2b-code-interpreter`")
        };
        self.asked
            .write_all(line.as_bytes())
            .await
            .map_err(|_| missing())?;
        let answer = self.answers.next_line().await.doing("cannot read from Python")?;
        let answer: Value =
            serde_json::from_str(&answer.ok_or_else(missing)?).doing("Python said nonsense")?;
        match (answer["ms"].as_f64(), answer["id"].as_str()) {
            (Some(took), Some(id)) => Ok((took, id.to_owned())),
            _ => Err(Error::new(format!("the SDK failed: {}", answer["error"]))),
        }
    }

    async fn act(&mut self, what: &str, id: &str) -> Result<f64> {
        let (took, _) = self.ask(&json!({"do": what, "id": id})).await?;
        Ok(took)
    }
}

/// Both sides of a comparison; the first round warms up.
#[derive(Debug, Default)]
struct Both {
    sdk: Samples,
    native: Samples,
}

impl Both {
    fn push(&mut self, round: usize, sdk: f64, native: f64) {
        if round > 0 {
            self.sdk.push(sdk);
            self.native.push(native);
        }
    }

    fn row(&self, name: &str, most: f64) -> Row {
        Row::compare(name, "ms", &self.sdk, NATIVE, &self.native, Bar::AtMost(most))
    }

    /// What the SDK takes longer.
    fn added(&self, name: &str, most: f64) -> Row {
        let (sdk, native) = (self.sdk.median(), self.native.median());
        let added = sdk.zip(native).map(|(sdk, native)| sdk - native);
        let mut row =
            Row::single(name, "ms", added, Bar::AtMost(most)).against(NATIVE, native, Bar::AtMost(most));
        row.samples = Some(self.sdk.0.len());
        row.ratio = None;
        row.note(format!("{:.1} ms through the SDK", sdk.unwrap_or_default()))
    }
}

async fn create_warm(setting: &Setting, subject: &Subject, sdk: &mut Sdk) -> Result<Vec<Row>> {
    let client = &subject.client;
    let mut both = Both::default();
    for round in 0..=setting.rounds(50) {
        subject.pools_full().await?;
        let (theirs, id) = sdk.ask(&json!({"do": "create", "template": "base"})).await?;
        sdk.act("kill", &id).await?;
        subject.pools_full().await?;
        let began = Instant::now();
        let id = create(client, &json!({"template": "base"})).await?;
        let ours = millis(began.elapsed());
        kill(client, &id).await?;
        both.push(round, theirs, ours);
    }
    Ok(vec![both.row("e2b_create_warm", 25.0)])
}

async fn run(setting: &Setting, subject: &Subject, sdk: &mut Sdk) -> Result<Vec<Row>> {
    let client = &subject.client;
    let (_, id) = sdk.ask(&json!({"do": "create", "template": "base"})).await?;
    let native = format!("sbx_{id}");
    let mut both = Both::default();
    for round in 0..=setting.rounds(100) {
        let theirs = sdk.act("run", &id).await?;
        let began = Instant::now();
        exec(client, &native, &["/bin/bash", "-l", "-c", "true"]).await?;
        both.push(round, theirs, millis(began.elapsed()));
    }
    Ok(vec![both.added("e2b_run_true_added", 5.0)])
}

async fn run_code(setting: &Setting, subject: &Subject, sdk: &mut Sdk) -> Result<Vec<Row>> {
    if subject
        .client
        .get(&format!("/v1/templates/{INTERPRETER}"))
        .await
        .is_err()
    {
        return Err(Error::new(format!("the template `{INTERPRETER}` is not built"))
            .hint("templates/code-interpreter/build"));
    }
    let (_, id) = sdk
        .ask(&json!({"do": "interpret", "template": INTERPRETER}))
        .await?;
    let mut samples = Samples::default();
    for round in 0..=setting.rounds(100) {
        let took = sdk.act("run_code", &id).await?;
        if round > 0 {
            samples.push(took);
        }
    }
    let row = Row::compare(
        "e2b_run_code_warm",
        "ms",
        &samples,
        "none",
        &Samples::default(),
        Bar::AtMost(15.0),
    );
    Ok(vec![row])
}

async fn rest(setting: &Setting, subject: &Subject, sdk: &mut Sdk) -> Result<Vec<Row>> {
    let client = &subject.client;
    let (_, id) = sdk.ask(&json!({"do": "create", "template": "base"})).await?;
    let own = create(client, &json!({"template": "base"})).await?;
    let (mut paused, mut connected) = (Both::default(), Both::default());
    for round in 0..=setting.rounds(30) {
        let their_pause = sdk.act("pause", &id).await?;
        gone(client, &format!("sbx_{id}")).await?;
        let their_connect = sdk.act("connect", &id).await?;
        let began = Instant::now();
        client
            .post(&format!("/v1/sandboxes/{own}/pause"), &json!({}))
            .await?;
        let our_pause = millis(began.elapsed());
        gone(client, &own).await?;
        let began = Instant::now();
        client
            .post(&format!("/v1/sandboxes/{own}/resume"), &json!({}))
            .await?;
        let our_resume = millis(began.elapsed());
        paused.push(round, their_pause, our_pause);
        connected.push(round, their_connect, our_resume);
    }
    Ok(vec![
        paused.added("e2b_pause_added", 20.0),
        connected.added("e2b_connect_added", 20.0),
    ])
}

/// A pause is answered when it is durable; its processes go a moment later.
async fn gone(client: &Client, id: &str) -> Result<()> {
    while !client.get(&format!("/v1/sandboxes/{id}")).await?["instance"].is_null() {
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    Ok(())
}
