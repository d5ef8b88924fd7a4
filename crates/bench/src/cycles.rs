//! `atoll bench cycles`: one sandbox, paused with its memory and resumed many times. A process in it holds a block of random
//! memory, a tree of files and a counter, and answers on a port. What must hold: each resume finds the counter exactly where
//! it was, memory and files have the sums that were told when they were last changed, and neither the disk nor the server
//! grows. If it does not answer any more, what can be found out about it is kept ([`diagnosis`]).

use std::io::IsTerminal as _;
use std::time::{Duration, Instant};

use atoll_client::output::{Doing, Error, Output, Result, stderr};
use atoll_client::scratch;
use indicatif::ProgressBar;
use reqwest::Method;
use serde_json::{Value, json};

use crate::Place;
use crate::host::{self, SandboxGroup};
use crate::interrupt::Interrupt;
use crate::row::Samples;
use crate::subject::{Subject, create, kill};

mod diagnosis;

/// Holds, counts, sums and changes. Small programs start often; this one must never start again.
const HOLDER: &str = r#"
import hashlib, http.server, os, random, sys
block = bytearray(os.urandom(int(sys.argv[1]) << 20))
tree = "/home/user/tree"
for d in range(5):
    os.makedirs(f"{tree}/{d}", exist_ok=True)
    for f in range(10):
        open(f"{tree}/{d}/{f}", "wb").write(os.urandom(random.randrange(1, 20000)))
count = 0
def memory(): return hashlib.sha256(block).hexdigest()
def files():
    total = hashlib.sha256()
    for d in range(5):
        for f in range(10):
            total.update(open(f"{tree}/{d}/{f}", "rb").read())
    return total.hexdigest()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global count
        count += 1
        answer = {"count": count, "pid": os.getpid()}
        if self.path == "/sums": answer.update(memory=memory(), files=files())
        if self.path == "/change":
            at = random.randrange(len(block) - 65536)
            block[at:at + 65536] = os.urandom(65536)
            open(f"{tree}/{random.randrange(5)}/{random.randrange(10)}", "wb").write(os.urandom(random.randrange(1, 20000)))
            answer.update(memory=memory(), files=files())
        import json
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", 8000), Handler).serve_forever()
"#;

/// So few ports to connect from that those of connections before a restore are used again after it. One of 50,000 would be
/// after some hundred cycles, once.
const FEW_PORTS: &str = "echo 40000 40063 > /proc/sys/net/ipv4/ip_local_port_range";

/// The first cycles fill what is filled once.
const WARM: u64 = 10;
const MIB: u64 = 1 << 20;
/// What allocators keep.
const MEMORY: u64 = 48 * MIB;
const DESCRIPTORS: u64 = 8;
/// What a vault may hold beside one saved state: packs that are not collected yet.
const DISK: u64 = 16 * MIB;

/// What a run is made of.
#[derive(Debug, Clone, Copy)]
pub struct CyclesOptions {
    /// How often it is paused and resumed.
    pub count: u64,
    /// How often memory and files are summed: every so many cycles, at least 1.
    pub every: u64,
    /// How much memory the process holds, in MiB.
    pub hold: u64,
}

/// Exit code 0 when everything was kept and nothing grew, else 1.
pub async fn run(place: &Place, output: Output, options: CyclesOptions) -> Result<u8> {
    crate::base(place)?;
    let group = SandboxGroup::new();
    let dir = scratch()?;
    let config = dir.path().join("config.toml");
    std::fs::write(&config, format!("cgroup = \"{}\"\n", group.name()))
        .doing("cannot write the configuration")?;
    let config = config.display().to_string();
    // From before there is a server that would be left behind.
    let mut interrupt = Interrupt::listen()?;
    let subject = Subject::start(&place.templates, &["--isolation", "gvisor", "--config", &config]).await?;
    let outcome = tokio::select! {
        outcome = Box::pin(cycle(&subject, &group, options)) => outcome,
        () = interrupt.heard() => Err(Error::new("interrupted")),
    };
    subject.stop().await;
    let report = outcome?;
    output.json(&report.json());
    report.print(output);
    Ok(u8::from(!report.met()))
}

/// How much there is at one moment.
#[derive(Debug, Clone, Copy)]
struct Held {
    memory: u64,
    descriptors: u64,
    vault: u64,
    processes: u64,
}

impl Held {
    /// With the sandbox running and the vault collected.
    async fn look(subject: &Subject, group: &SandboxGroup) -> Result<Self> {
        subject.client.post("/v1/gc", &json!({})).await?;
        let files = std::fs::read_dir(format!("/proc/{}/fd", subject.pid));
        Ok(Self {
            memory: host::resident(subject.pid).unwrap_or_default(),
            descriptors: files.map_or(0, |files| files.count() as u64),
            vault: host::allocated(&subject.data.join("vault")),
            processes: group.processes() as u64,
        })
    }
}

struct Report {
    cycles: u64,
    sums: u64,
    seconds: f64,
    pause: Samples,
    resume: Samples,
    before: Held,
    after: Held,
}

impl Report {
    fn checks(&self) -> [(&'static str, u64, u64, u64); 4] {
        let (before, after) = (self.before, self.after);
        [
            ("memory of the server", before.memory, after.memory, MEMORY),
            ("descriptors", before.descriptors, after.descriptors, DESCRIPTORS),
            ("disk of the vault", before.vault, after.vault, DISK),
            ("processes of the sandbox", before.processes, after.processes, 0),
        ]
    }

    fn met(&self) -> bool {
        self.checks()
            .iter()
            .all(|(_, before, after, more)| *after <= before + more)
    }

    fn json(&self) -> Value {
        let checks: Vec<Value> = self
            .checks()
            .into_iter()
            .map(|(name, before, after, more)| {
                json!({"name": name, "before": before, "after": after, "allowed": more, "met": after <= before + more})
            })
            .collect();
        json!({
            "cycles": self.cycles, "sums": self.sums, "seconds": self.seconds, "met": self.met(), "checks": checks,
            "pause_p50": self.pause.median(), "pause_p99": self.pause.p99(),
            "resume_p50": self.resume.median(), "resume_p99": self.resume.p99(),
        })
    }

    fn print(&self, output: Output) {
        let rows: Vec<[String; 5]> = self
            .checks()
            .into_iter()
            .map(|(name, before, after, more)| {
                let shown = |count: u64| match count > 100_000 {
                    true => format!("{:.1} MiB", count as f64 / MIB as f64),
                    false => count.to_string(),
                };
                let verdict = if after <= before + more { "met" } else { "MISSED" };
                let allowed = if more == 0 {
                    "the same".to_owned()
                } else {
                    format!("{} more", shown(more))
                };
                [
                    name.to_owned(),
                    shown(before),
                    shown(after),
                    allowed,
                    verdict.to_owned(),
                ]
            })
            .collect();
        output.table(["WHAT", "BEFORE", "AFTER", "ALLOWED", ""], &rows, "nothing");
        let ms = |samples: &Samples| {
            format!(
                "{:.1} ms (p99 {:.1})",
                samples.median().unwrap_or_default(),
                samples.p99().unwrap_or_default()
            )
        };
        output.line(format_args!(
            "{} cycles in {:.0} s, the counter right each time, memory and files {} times: pause {}, resume {}",
            self.cycles,
            self.seconds,
            self.sums,
            ms(&self.pause),
            ms(&self.resume)
        ));
    }
}

/// The process in the sandbox, as it is reached.
struct Holder<'a> {
    subject: &'a Subject,
    host: String,
    token: String,
    count: u64,
    pid: u64,
}

impl<'a> Holder<'a> {
    async fn start(subject: &'a Subject, id: &str, mebibytes: u64) -> Result<Self> {
        let client = &subject.client;
        let body = json!({"argv": ["sh", "-c", FEW_PORTS], "user": "root"});
        let limited = client.post(&format!("/v1/sandboxes/{id}/exec"), &body).await?;
        if limited["exit_code"] != json!(0) {
            return Err(Error::new(format!(
                "the sandbox's ports cannot be limited: {limited}"
            )));
        }
        let body = json!({"argv": ["python3", "-c", HOLDER, mebibytes.to_string()], "background": true});
        client.post(&format!("/v1/sandboxes/{id}/exec"), &body).await?;
        let access = client.get(&format!("/v1/sandboxes/{id}/ports/8000")).await?;
        let text = |name: &str| access[name].as_str().unwrap_or_default().to_owned();
        let mut holder = Self {
            subject,
            host: text("url").trim_start_matches("http://").to_owned(),
            token: text("token"),
            count: 0,
            pid: 0,
        };
        let began = Instant::now();
        loop {
            match holder.ask("/count").await {
                Ok(answer) => {
                    holder.pid = answer["pid"].as_u64().unwrap_or_default();
                    holder.count = answer["count"].as_u64().unwrap_or_default();
                    return Ok(holder);
                }
                Err(error) if began.elapsed() > Duration::from_secs(30) => return Err(error),
                Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        }
    }

    async fn ask(&self, path: &str) -> Result<Value> {
        let client = &self.subject.client;
        let request = client
            .request(Method::GET, path)
            .header("host", &self.host)
            .header("x-atoll-token", &self.token)
            .timeout(Duration::from_secs(30));
        client.json(request).await
    }

    /// The counter goes on by one, in the same process: nothing was lost, nothing was done twice.
    async fn next(&mut self, path: &str) -> Result<Value> {
        let answer = self.ask(path).await?;
        let (count, pid) = (answer["count"].as_u64(), answer["pid"].as_u64());
        if count != Some(self.count + 1) || pid != Some(self.pid) {
            return Err(Error::new(format!(
                "the counter of process {} was at {} and then at {answer}",
                self.pid, self.count
            )));
        }
        self.count += 1;
        Ok(answer)
    }
}

async fn cycle(subject: &Subject, group: &SandboxGroup, options: CyclesOptions) -> Result<Report> {
    let client = &subject.client;
    let body = json!({"template": "base", "timeout_ms": 24 * 3600 * 1000_u64,
        "resources": {"memory_bytes": (256 + 2 * options.hold) * MIB}});
    let id = create(client, &body).await?;
    let mut holder = Holder::start(subject, &id, options.hold).await?;
    let bar = match std::io::stderr().is_terminal() {
        true => ProgressBar::new(options.count),
        false => ProgressBar::hidden(),
    };
    let mut sums = holder.next("/sums").await?;
    let (mut pause, mut resume, mut summed) = (Samples::default(), Samples::default(), 0);
    let mut before = Held::look(subject, group).await?;
    let began = Instant::now();
    for round in 1..=options.count {
        let asked = Instant::now();
        let paused = client
            .post(&format!("/v1/sandboxes/{id}/pause"), &json!({"kind": "memory"}))
            .await?;
        pause.push(asked.elapsed().as_secs_f64() * 1000.0);
        if paused["state"] != json!("paused") {
            return Err(Error::new(format!(
                "cycle {round}: the sandbox is {}",
                paused["state"]
            )));
        }
        let asked = Instant::now();
        client
            .post(&format!("/v1/sandboxes/{id}/resume"), &json!({}))
            .await?;
        resume.push(asked.elapsed().as_secs_f64() * 1000.0);
        let whole = round % options.every == 0 || round == options.count;
        let now = match holder.next(if whole { "/sums" } else { "/count" }).await {
            Ok(now) => now,
            Err(error) => {
                let found = diagnosis::write(&holder, &id).await?;
                return Err(Error::new(format!(
                    "cycle {round}: {error}; what was found out about it is in {}",
                    found.display()
                )));
            }
        };
        if whole {
            for what in ["memory", "files"] {
                if now[what] != sums[what] {
                    return Err(Error::new(format!(
                        "cycle {round}: the sum of {what} was {} and is {}",
                        sums[what], now[what]
                    )));
                }
            }
            summed += 1;
            sums = holder.next("/change").await?;
        }
        if round == WARM {
            before = Held::look(subject, group).await?;
        }
        bar.inc(1);
        if bar.is_hidden() && round % 1000 == 0 {
            stderr(format_args!(
                "{round} cycles in {:.0} s\n",
                began.elapsed().as_secs_f64()
            ));
        }
    }
    bar.finish_and_clear();
    let seconds = began.elapsed().as_secs_f64();
    let after = Held::look(subject, group).await?;
    kill(client, &id).await?;
    Ok(Report {
        cycles: options.count,
        sums: summed,
        seconds,
        pause,
        resume,
        before,
        after,
    })
}
