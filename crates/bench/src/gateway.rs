//! Calls of models through the gateway against the same calls without it, with everything on: key, budget, rows, facts.
//!
//! The provider is scripted, in a process of its own on loopback, and answers after twenty milliseconds, where real ones take
//! longer: that is when the row of a call gets to the disk. Calls with and without the gateway take turns in one run. The peer is
//! LiteLLM's proxy, where `ATOLL_BENCH_LITELLM` names its program.

mod streams;

use std::net::SocketAddr;
use std::process::Stdio;
use std::time::{Duration, Instant};

use atoll_client::output::{Doing, Error, Result};
use atoll_client::scratch;
use futures_util::StreamExt as _;
use reqwest::Method;
use serde_json::{Value, json};
use tokio::io::AsyncReadExt as _;
use tokio::process::{Child, Command};
use tokio::task::JoinSet;

use super::host;
use super::row::{Bar, Row, Samples};
use super::subject::Subject;
use super::{Measured, Setting};
use streams::{CHUNKS, Source};

const RATE: u64 = 200;
const BUDGETED: usize = 100;
/// LiteLLM starts only with a key that looks like one.
const LITELLM_KEY: &str = "sk-only-for-this-bench-0123456789abcdefghij";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum GatewayCase {
    Small,
    Large,
    Streams,
    Budget,
    Cpu,
}

impl GatewayCase {
    pub(super) const ALL: [Self; 5] = [Self::Small, Self::Large, Self::Streams, Self::Budget, Self::Cpu];
}

impl Measured for GatewayCase {
    fn rows(self) -> &'static [&'static str] {
        match self {
            Self::Small => &[
                "added latency, 1 KB, 200/s, p50",
                "added latency, 1 KB, 200/s, p99",
            ],
            Self::Large => &["added latency, 200 KB, p50"],
            Self::Streams => &[
                "streams of 50 chunks/s, added to each chunk, p50",
                "streams of 50 chunks/s, CPU for each chunk",
                "streams of 50 chunks/s, memory each",
            ],
            Self::Budget => &["calls that a budget for 100 lets pass, of 10,000 at once"],
            Self::Cpu => &["requests per CPU second"],
        }
    }

    fn is_slow(self) -> bool {
        matches!(self, Self::Streams | Self::Cpu)
    }

    async fn measure(self, setting: &Setting) -> Result<Vec<Row>> {
        let bench = Bench::start(setting).await?;
        let rows = match self {
            Self::Small => {
                bench
                    .latency(
                        self.rows(),
                        1024,
                        setting.rounds(2000),
                        [Bar::AtMost(0.3), Bar::AtMost(2.0)],
                    )
                    .await
            }
            Self::Large => {
                bench
                    .latency(
                        self.rows(),
                        200 * 1024,
                        setting.rounds(500),
                        [Bar::AtMost(1.5), Bar::Shown],
                    )
                    .await
            }
            Self::Streams => bench.streams(self.rows(), setting.rounds(setting.many)).await,
            Self::Budget => bench.budget(self.rows()[0]).await,
            Self::Cpu => bench.cpu(self.rows()[0], setting.rounds(5000)).await,
        };
        bench.server.stop().await;
        rows
    }
}

/// A server with one scripted provider.
struct Bench {
    server: Subject,
    provider: Provider,
    key: String,
    http: reqwest::Client,
}

/// The scripted provider as a process of its own.
struct Provider {
    _process: Child,
    url: String,
}

impl Provider {
    async fn start() -> Result<Self> {
        let program = std::env::current_exe().doing("cannot find this program")?;
        let mut process = Command::new(program)
            .args(["scripted-provider", "--listen", "127.0.0.1:0", "--json"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .doing("cannot start the scripted provider")?;
        let mut out = process
            .stdout
            .take()
            .ok_or_else(|| Error::new("the scripted provider says nothing"))?;
        let mut said = Vec::new();
        loop {
            let mut buffer = [0; 256];
            let count = out
                .read(&mut buffer)
                .await
                .doing("cannot read from the scripted provider")?;
            said.extend_from_slice(&buffer[..count]);
            if let Ok(value) = serde_json::from_slice::<Value>(&said) {
                let url = value["url"].as_str().unwrap_or_default().to_owned();
                return Ok(Self {
                    _process: process,
                    url,
                });
            }
            if count == 0 {
                return Err(Error::new("the scripted provider ended at once"));
            }
        }
    }
}

impl Bench {
    async fn start(setting: &Setting) -> Result<Self> {
        let provider = Provider::start().await?;
        let server = Subject::start(&setting.templates, &[]).await?;
        let client = &server.client;
        let body =
            json!({"kind": "openai", "base_url": format!("{}/v1", provider.url), "serves": ["scripted-*"]});
        client.put("/v1/gateway/providers/scripted", &body).await?;
        for model in ["scripted-slow-20", "scripted-full", "clock"] {
            client
                .put(
                    &format!("/v1/gateway/prices/{model}"),
                    &json!({"input": "0", "output": "1"}),
                )
                .await?;
        }
        // One that is never reached, so that every call reserves and settles.
        client
            .put("/v1/gateway/budgets/all", &json!({"limit": "1000000"}))
            .await?;
        let key = client.post("/v1/gateway/keys", &json!({"name": "bench"})).await?;
        let http = reqwest::Client::builder()
            .no_proxy()
            .tcp_nodelay(true)
            .pool_max_idle_per_host(4096)
            .build()
            .doing("cannot make a client")?;
        Ok(Self {
            server,
            provider,
            key: key["secret"].as_str().unwrap_or_default().to_owned(),
            http,
        })
    }

    fn gateway(&self) -> String {
        format!("{}v1", self.server.client.base())
    }

    fn gateway_address(&self) -> Option<SocketAddr> {
        let base = self.server.client.base();
        base.socket_addrs(|| None).ok()?.first().copied()
    }

    fn direct(&self) -> String {
        format!("{}/v1", self.provider.url)
    }

    fn request(&self, base: &str, body: &Value) -> reqwest::RequestBuilder {
        self.request_with(base, &self.key, body)
    }

    fn request_with(&self, base: &str, key: &str, body: &Value) -> reqwest::RequestBuilder {
        let url = format!("{base}/chat/completions");
        self.http.request(Method::POST, url).bearer_auth(key).json(body)
    }

    /// Calls at a steady rate, with and without the gateway in turn.
    async fn latency(&self, names: &[&str], size: usize, rounds: usize, bars: [Bar; 2]) -> Result<Vec<Row>> {
        let prompt = "word ".repeat(size / 5);
        let body = json!({"model": "scripted-slow-20", "messages": [{"role": "user", "content": prompt}], "max_tokens": 100});
        let mut calls = JoinSet::new();
        let warm_up = rounds / 10;
        let mut ticks = tokio::time::interval(Duration::from_micros(1_000_000 / (2 * RATE)));
        for round in 0..2 * (rounds + warm_up) {
            ticks.tick().await;
            let through = round % 2 == 1;
            let base = if through { self.gateway() } else { self.direct() };
            let request = self.request(&base, &body);
            calls.spawn(async move {
                let began = Instant::now();
                let answer = request.send().await.doing("a call failed")?;
                let status = answer.status();
                answer.bytes().await.doing("an answer broke off")?;
                if !status.is_success() {
                    return Err(Error::new(format!("a call was answered with {status}")));
                }
                Ok((round / 2 >= warm_up).then(|| (through, began.elapsed().as_secs_f64() * 1000.0)))
            });
        }
        let (mut ours, mut theirs) = (Samples::default(), Samples::default());
        while let Some(done) = calls.join_next().await {
            match done.doing("a call died")?? {
                Some((true, millis)) => ours.push(millis),
                Some((false, millis)) => theirs.push(millis),
                None => {}
            }
        }
        let added =
            |ours: Option<f64>, theirs: Option<f64>| ours.zip(theirs).map(|(ours, theirs)| ours - theirs);
        let figures = [
            added(ours.median(), theirs.median()),
            added(ours.p99(), theirs.p99()),
        ];
        let note = format!(
            "with {:.2} ms, without {:.2} ms, the provider's own 20 ms included",
            ours.median().unwrap_or_default(),
            theirs.median().unwrap_or_default()
        );
        let rows = names.iter().zip(figures).zip(bars);
        Ok(rows
            .map(|((name, figure), bar)| Row::single(name, "ms", figure, bar).note(note.clone()))
            .collect())
    }

    /// Streams at once: how late each chunk is, and what they hold in memory.
    async fn streams(&self, names: &[&str], count: usize) -> Result<Vec<Row>> {
        let origin = Instant::now();
        let gateway = self
            .gateway_address()
            .ok_or_else(|| Error::new("the server has no address"))?;
        let source = Source::start(count, origin)?;
        let direct = streams::read(source.address, &self.key, count, origin).await?;
        let source = Source::start(count, origin)?;
        let copier = streams::copier(source.address)?;
        let copied = streams::read(copier, &self.key, count, origin).await?;
        let source = Source::start(count, origin)?;
        let body = json!({
            "kind": "openai", "base_url": format!("http://{}/v1", source.address), "serves": ["clock"],
        });
        let client = &self.server.client;
        client.put("/v1/gateway/providers/clock", &body).await?;
        let before = host::resident(self.server.pid).unwrap_or_default();
        let cpu_before = host::cpu_millis(self.server.pid).unwrap_or_default();
        let (mut memory, mut ticks) = (Vec::new(), tokio::time::interval(Duration::from_millis(100)));
        let mut reading = std::pin::pin!(streams::read(gateway, &self.key, count, origin));
        let through = loop {
            tokio::select! {
                read = &mut reading => break read?,
                _ = ticks.tick() => memory.extend(host::resident(self.server.pid)),
            }
        };
        let cpu = host::cpu_millis(self.server.pid).unwrap_or_default() - cpu_before;
        let added = |late: &Samples| {
            late.median()
                .zip(direct.median())
                .map(|(late, direct)| late - direct)
        };
        let peak = memory.iter().max().copied().unwrap_or_default();
        let each = peak.saturating_sub(before) as f64 / 1024.0 / count as f64;
        let half = memory.get(memory.len() / 2).copied().unwrap_or_default();
        let note = |late: &Samples| {
            format!(
                "p50 {:.2} ms, p99 {:.2} ms",
                late.median().unwrap_or_default(),
                late.p99().unwrap_or_default()
            )
        };
        let bar = Bar::AtMost(1.0);
        Ok(vec![
            Row::single(names[0], "ms", added(&through), bar)
                .against("a process that only copies bytes", added(&copied), bar)
                .note(format!(
                    "{count} streams; after it was written a chunk arrives: without anything between {}; copied {}; through the gateway {}",
                    note(&direct),
                    note(&copied),
                    note(&through)
                )),
            Row::single(names[1], "µs", Some(cpu * 1000.0 / (count * CHUNKS) as f64), Bar::Shown)
                .note("of the gateway alone, opening and settling the streams included"),
            Row::single(names[2], "KiB", Some(each), Bar::Shown).note(format!(
                "in the second half of the time it grew by {:.1} KiB each",
                peak.saturating_sub(half) as f64 / 1024.0 / count as f64
            )),
        ])
    }

    /// Each call is reserved at exactly what it costs: ten tokens that the provider always writes.
    async fn budget(&self, name: &str) -> Result<Vec<Row>> {
        let client = &self.server.client;
        let limit = format!("{:.5}", BUDGETED as f64 * 0.00001);
        client
            .put("/v1/gateway/budgets/tight", &json!({"limit": limit}))
            .await?;
        let body = json!({"model": "scripted-full", "messages": [{"role": "user", "content": "x"}], "max_tokens": 10});
        let calls = (0..10_000).map(|_| {
            let request = self.request(&self.gateway(), &body);
            async move { request.send().await.map(|answer| answer.status().as_u16()) }
        });
        let statuses: Vec<_> = futures_util::stream::iter(calls)
            .buffer_unordered(1000)
            .collect()
            .await;
        let (mut passed, mut refused) = (0_usize, 0_usize);
        for status in statuses {
            match status.doing("a call failed")? {
                200 => passed += 1,
                402 => refused += 1,
                other => return Err(Error::new(format!("a call was answered with {other}"))),
            }
        }
        client.delete("/v1/gateway/budgets/tight").await?;
        let bar = if passed == BUDGETED {
            Bar::AtMost(100.0)
        } else {
            Bar::AtMost(0.0)
        };
        let note = format!("{passed} passed, {refused} were refused with 402");
        Ok(vec![
            Row::single(name, "calls", Some(passed as f64), bar).note(note),
        ])
    }

    /// As many calls as go, sixteen at a time; the CPU time is that of the gateway alone.
    async fn cpu(&self, name: &str, count: usize) -> Result<Vec<Row>> {
        let ours = self
            .per_cpu_second(&self.gateway(), &self.key, self.server.pid, count)
            .await?;
        let peer = match std::env::var_os("ATOLL_BENCH_LITELLM") {
            Some(program) => {
                let litellm = LiteLlm::start(&program, &self.direct()).await?;
                Some(
                    self.per_cpu_second(&litellm.base, LITELLM_KEY, litellm.pid, count / 10)
                        .await?,
                )
            }
            None => None,
        };
        let bar = Bar::RatioAtLeast(20.0);
        Ok(vec![Row::single(name, "requests", Some(ours), bar).against(
            "LiteLLM proxy, one worker",
            peer,
            bar,
        )])
    }

    async fn per_cpu_second(&self, base: &str, key: &str, pid: u32, count: usize) -> Result<f64> {
        let body = json!({"model": "scripted-slow-20", "messages": [{"role": "user", "content": "word ".repeat(200)}], "max_tokens": 100});
        let run = async |count: usize| -> Result<()> {
            let calls = (0..count).map(|_| {
                let request = self.request_with(base, key, &body);
                async move {
                    let answer = request.send().await.doing("a call failed")?;
                    let status = answer.status();
                    let said = answer.bytes().await.doing("an answer broke off")?;
                    if status.is_success() {
                        return Ok(());
                    }
                    Err(Error::new(format!(
                        "{status}: {}",
                        String::from_utf8_lossy(&said)
                    )))
                }
            });
            let mut calls = futures_util::stream::iter(calls).buffer_unordered(16);
            while let Some(done) = calls.next().await {
                done?;
            }
            Ok(())
        };
        run(50).await?;
        let before = host::cpu_millis(pid).unwrap_or_default();
        run(count).await?;
        let spent = host::cpu_millis(pid).unwrap_or_default() - before;
        Ok(count as f64 * 1000.0 / spent.max(1.0))
    }
}

/// LiteLLM's proxy in front of the same provider, with a key, without a database.
struct LiteLlm {
    _process: Child,
    pid: u32,
    base: String,
    _dir: tempfile::TempDir,
}

impl LiteLlm {
    async fn start(program: &std::ffi::OsStr, provider: &str) -> Result<Self> {
        let dir = scratch()?;
        let config = json!({"model_list": [{"model_name": "scripted-slow-20", "litellm_params": {
            "model": "openai/scripted-slow-20", "api_base": provider, "api_key": "none",
        }}]});
        // JSON is YAML.
        std::fs::write(dir.path().join("config.yaml"), config.to_string())
            .doing("cannot write LiteLLM's configuration")?;
        let port = std::net::TcpListener::bind("127.0.0.1:0")
            .and_then(|free| free.local_addr())
            .doing("no free port")?
            .port();
        let process = Command::new(program)
            .args([
                "--config",
                "config.yaml",
                "--host",
                "127.0.0.1",
                "--num_workers",
                "1",
                "--port",
            ])
            .arg(port.to_string())
            .env("LITELLM_LOCAL_MODEL_COST_MAP", "True")
            .env("LITELLM_LOG", "ERROR")
            .env("LITELLM_MASTER_KEY", LITELLM_KEY)
            .current_dir(dir.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .doing("cannot start LiteLLM")?;
        let pid = process.id().ok_or_else(|| Error::new("LiteLLM ended at once"))?;
        let base = format!("http://127.0.0.1:{port}");
        let began = Instant::now();
        while reqwest::get(format!("{base}/health/liveliness")).await.is_err() {
            if began.elapsed() > Duration::from_secs(180) {
                return Err(Error::new("LiteLLM did not start within three minutes"));
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        Ok(Self {
            _process: process,
            pid,
            base,
            _dir: dir,
        })
    }
}
