//! `atoll demo`: the whole path through the product in a few seconds (6 to 7 on two cores, with a release build and the
//! template there): first what a sandbox is ([`Demo`]), then one durable workflow through everything ([`story`]).
//!
//! Each step says what it does, does it through the public API, shows what came back and how long it took. A step that
//! does not show what it should fails the demo.

mod plan;
mod story;

use std::io::IsTerminal;
use std::path::Path;
use std::time::{Duration, Instant};

use atoll_client::output::{Doing, Error, Output, Result};
use atoll_client::template::create_sandbox;
use atoll_client::{Client, text};
use atoll_types::MIB;
use reqwest::Method;
use serde_json::{Value, json};

use story::Story;

/// Plays all of it and cleans up, whatever happens. `began` is when the user asked for it; the story's server takes the
/// templates that are there.
pub async fn play(client: Client, output: Output, began: Instant, templates: &Path) -> Result<()> {
    let mut demo = Demo {
        client,
        output,
        steps: Vec::new(),
        sandboxes: Vec::new(),
    };
    let outcome = demo.play(began, templates).await;
    demo.clean_up().await;
    outcome?;
    output.json(&Value::Array(demo.steps));
    Ok(())
}

struct Demo {
    client: Client,
    output: Output,
    steps: Vec<Value>,
    /// To be removed at the end, whatever happens.
    sandboxes: Vec<String>,
}

impl Demo {
    async fn play(&mut self, began: Instant, templates: &Path) -> Result<()> {
        self.output
            .own_line(style("\n  Atoll: a computer for untrusted code\n", Style::Bold));
        self.step(
            "server",
            "it is up, and says which walls work here",
            began,
            &self.walls().await?,
        );

        let clock = Instant::now();
        let sandbox = create_sandbox(&self.client, self.output, &request(None)).await?;
        let id = text(&sandbox, "id");
        self.sandboxes.push(id.clone());
        let size = format!(
            "{} cpu, {}",
            1,
            atoll_types::format_bytes(sandbox["resources"]["memory_bytes"].as_u64().unwrap_or_default())
        );
        self.step(
            "create",
            "a sandbox of its own",
            clock,
            &format!("{id}, {}, {size}", text(&sandbox, "isolation")),
        );

        let clock = Instant::now();
        let out = self.python(&id, PRIMES).await?;
        self.step(
            "compute",
            "real Python, real work: primes below 200,000",
            clock,
            &out,
        );

        let clock = Instant::now();
        let out = self.files(&id).await?;
        self.step(
            "files",
            "written from outside, read inside, and back",
            clock,
            &out,
        );

        let clock = Instant::now();
        let out = self.port(&id).await?;
        self.step(
            "port",
            "a web server inside, reached over HTTP with a token",
            clock,
            &out,
        );

        let clock = Instant::now();
        let out = self.python(&id, REACH_OUT).await?;
        if out.contains("REACHED") {
            return Err(Error::new(format!("the sandbox reached the network: {out}")));
        }
        self.step(
            "network",
            "it tries to reach the internet and the host",
            clock,
            &out,
        );

        let clock = Instant::now();
        let out = self.hog().await?;
        self.step("memory", "a hog in a sandbox of 128 MiB", clock, &out);

        let clock = Instant::now();
        let out = self.artifact(&id).await?;
        self.step(
            "artifact",
            "saved by name, the sandbox killed, then read",
            clock,
            &out,
        );

        self.state().await?;
        self.story(templates).await?;

        let total = began.elapsed();
        self.output.line(format_args!(
            "  Done in {:.1} s. Next: atoll run -- python3, or atoll server.\n",
            total.as_secs_f64()
        ));
        Ok(())
    }

    fn step(&mut self, name: &str, what: &str, clock: Instant, result: &str) {
        let elapsed = clock.elapsed();
        self.output.own_line(format_args!(
            "  {}  {what}",
            style(&format!("{name:<9}"), Style::Bold)
        ));
        for line in result.lines() {
            self.output.line(format_args!("             {line}"));
        }
        self.output.own_line(style(
            &format!("             {}\n", milliseconds(elapsed)),
            Style::Dim,
        ));
        self.steps.push(
            json!({"step": name, "what": what, "result": result, "ms": elapsed.as_secs_f64() * 1000.0}),
        );
    }

    async fn walls(&self) -> Result<String> {
        let info = self.client.get("/v1/info").await?;
        let tiers = info["tiers"].as_array().cloned().unwrap_or_default();
        let lines: Vec<String> = tiers
            .iter()
            .map(|tier| {
                let note = match (
                    tier["available"] == json!(true),
                    tier["tenant_boundary"] == json!(true),
                ) {
                    (true, true) => "works".to_owned(),
                    (true, false) => "works; not a tenant boundary".to_owned(),
                    (false, _) => format!("no: {}", text(tier, "detail")),
                };
                format!("{:<8} {note}", text(tier, "isolation"))
            })
            .collect();
        Ok(lines.join("\n"))
    }

    async fn exec(&self, id: &str, body: Value) -> Result<Value> {
        self.client.post(&format!("/v1/sandboxes/{id}/exec"), &body).await
    }

    async fn python(&self, id: &str, code: &str) -> Result<String> {
        let answer = self
            .exec(id, json!({"argv": ["python3", "-c", code], "timeout_ms": 15_000}))
            .await?;
        if answer["exit_code"] != json!(0) {
            return Err(Error::new(format!(
                "Python failed in the sandbox: {}",
                text(&answer, "stderr")
            )));
        }
        Ok(text(&answer, "stdout").trim().to_owned())
    }

    async fn files(&self, id: &str) -> Result<String> {
        const NOTE: &str = "written from outside\n";
        let at = |method: Method, path: &str| {
            let request = self
                .client
                .request(method, &format!("/v1/sandboxes/{id}/files/content"));
            request.query(&[("path", path)])
        };
        self.client
            .send(at(Method::PUT, "/tmp/note.txt").body(NOTE))
            .await?;
        self.python(
            id,
            "open('/tmp/answer.txt', 'w').write(open('/tmp/note.txt').read().upper())",
        )
        .await?;
        let response = self.client.send(at(Method::GET, "/tmp/answer.txt")).await?;
        let answer = response.text().await.doing("the download broke off")?;
        if answer != NOTE.to_uppercase() {
            return Err(Error::new(format!("the file came back as {answer:?}")));
        }
        Ok(format!("{:?} became {:?}", NOTE.trim(), answer.trim()))
    }

    async fn port(&self, id: &str) -> Result<String> {
        self.serve(id, SERVE).await?;
        let (url, answer) = self.ask(id).await?;
        Ok(format!("{url}\n{answer}"))
    }

    /// Starts a web server on port 8000 inside, and waits until it listens.
    async fn serve(&self, id: &str, code: &str) -> Result<()> {
        self.exec(id, json!({"argv": ["python3", "-c", code], "background": true}))
            .await?;
        let began = Instant::now();
        loop {
            let ports = self.client.get(&format!("/v1/sandboxes/{id}/ports")).await?;
            let mut listening = ports["items"].as_array().into_iter().flatten();
            if listening.any(|port| port["port"] == json!(8000)) {
                return Ok(());
            }
            if began.elapsed() > Duration::from_secs(10) {
                return Err(Error::new(
                    "the web server in the sandbox did not start to listen",
                ));
            }
            tokio::time::sleep(Duration::from_millis(30)).await;
        }
    }

    /// What the web server answers; and where it is.
    async fn ask(&self, id: &str) -> Result<(String, String)> {
        let port = self.client.get(&format!("/v1/sandboxes/{id}/ports/8000")).await?;
        let url = text(&port, "url");
        let answer = fetch(&self.client, &url, &text(&port, "token")).await?;
        Ok((url, answer.trim().to_owned()))
    }

    /// State that survives: a process that counts and serves, paused and resumed, then copied. Where the wall cannot
    /// keep memory, what it can keep is said instead.
    async fn state(&mut self) -> Result<()> {
        let sandbox = self.client.post("/v1/sandboxes", &request(None)).await?;
        let id = text(&sandbox, "id");
        self.sandboxes.push(id.clone());
        self.serve(&id, COUNT).await?;
        let before = Count::read(&self.ask(&id).await?.1)?;

        let clock = Instant::now();
        let paused = self
            .client
            .post(&format!("/v1/sandboxes/{id}/pause"), &json!({}))
            .await?;
        let pause = clock.elapsed();
        let kept = text(&paused["saved"], "kind");
        let woken = Instant::now();
        self.client
            .post(&format!("/v1/sandboxes/{id}/resume"), &json!({}))
            .await?;
        let resume = woken.elapsed();
        if kept != "memory" {
            let what = format!(
                "this wall keeps files only; paused in {}, back in {}, processes started anew",
                milliseconds(pause),
                milliseconds(resume)
            );
            self.step("pause", "put to rest, and back", clock, &what);
            return Ok(());
        }
        let after = Count::read(&self.ask(&id).await?.1)?;
        if after.process != before.process || after.count < before.count {
            return Err(Error::new(format!(
                "the counter did not go on: {before:?} before, {after:?} after"
            )));
        }
        let what = format!(
            "it counted to {}; paused in {}, resumed in {}; the same process goes on at {}",
            before.count,
            milliseconds(pause),
            milliseconds(resume),
            after.count
        );
        self.step(
            "pause",
            "a Python that counts and serves, put to rest",
            clock,
            &what,
        );

        let clock = Instant::now();
        let body = json!({"count": 2});
        let answer = self
            .client
            .post(&format!("/v1/sandboxes/{id}/fork"), &body)
            .await?;
        let forked = clock.elapsed();
        let copies: Vec<String> = answer["items"]
            .as_array()
            .into_iter()
            .flatten()
            .map(|copy| text(copy, "id"))
            .collect();
        self.sandboxes.extend(copies.iter().cloned());
        let mut lines = vec![format!(
            "two copies in {}; all three count on",
            milliseconds(forked)
        )];
        for one in std::iter::once(&id).chain(&copies) {
            let now = Count::read(&self.ask(one).await?.1)?;
            if now.process != before.process || now.count < after.count {
                return Err(Error::new(format!("{one} did not go on: {now:?}")));
            }
            lines.push(format!("{one} on host {} is at {}", now.host, now.count));
        }
        self.step(
            "fork",
            "running copies, each with a name of its own",
            clock,
            &lines.join("\n"),
        );
        Ok(())
    }

    /// One workflow through everything, on a server that is killed on the way.
    async fn story(&mut self, templates: &Path) -> Result<()> {
        self.output
            .own_line(style("  And now the whole: a durable workflow\n", Style::Bold));
        let clock = Instant::now();
        let mut story = Story::begin(templates).await?;
        let told = self.tell(&mut story, clock).await;
        story.end().await;
        told
    }

    async fn tell(&mut self, story: &mut Story, clock: Instant) -> Result<()> {
        self.step(
            "server",
            "one of its own, because it will be killed",
            clock,
            "a scripted model (no network, no key), a budget of $0.01 for the workflow",
        );
        let clock = Instant::now();
        let question = story.until_it_asks().await?;
        self.step(
            "workflow",
            "a model writes code, a sandbox runs it, a person is asked",
            clock,
            &format!(
                "{}\nexactly this: {}",
                text(&question, "reason"),
                question["action"]
            ),
        );
        let clock = Instant::now();
        let away = story.kill_and_return().await?;
        let sandbox = story.still_there(&question).await?;
        self.step(
            "kill -9",
            "the server, while the person thinks",
            clock,
            &format!("back after {away}; {sandbox} still runs, the question still stands"),
        );
        let clock = Instant::now();
        let report = story.grant(&question).await?;
        self.step(
            "approval",
            "granted; the workflow goes on where it was",
            clock,
            &report,
        );
        let clock = Instant::now();
        let mut lines = story.timeline().await?;
        lines.push(story.cost().await?);
        self.step(
            "timeline",
            "from the ledger: what ran, what was refused, what it cost",
            clock,
            &lines.join("\n"),
        );
        Ok(())
    }

    async fn hog(&mut self) -> Result<String> {
        let body = request(Some(128 * MIB));
        let sandbox = self.client.post("/v1/sandboxes", &body).await?;
        let id = text(&sandbox, "id");
        self.sandboxes.push(id.clone());
        let outcome = self
            .exec(&id, json!({"argv": ["python3", "-c", HOG], "timeout_ms": 10_000}))
            .await;
        // Who is killed depends on the wall: the whole sandbox, or the process that went too far.
        let began = Instant::now();
        while began.elapsed() < Duration::from_secs(3) {
            let now = self.client.get(&format!("/v1/sandboxes/{id}")).await?;
            if let Some(reason) = now["end"]["reason"].as_str() {
                return Ok(format!("{reason}: {}", text(&now["end"], "message")));
            }
            if let Ok(answer) = &outcome
                && !answer["signal"].is_null()
            {
                return Ok(format!(
                    "the process was killed with signal {}; the sandbox lives on",
                    answer["signal"]
                ));
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Err(Error::new(format!("nothing stopped the hog: {outcome:?}")))
    }

    async fn artifact(&mut self, id: &str) -> Result<String> {
        let name = format!("demo-{}", &id[id.len() - 6..]);
        let body = json!({"name": name, "path": "/tmp/answer.txt", "retention_ms": 3_600_000});
        self.client
            .post(&format!("/v1/sandboxes/{id}/artifacts"), &body)
            .await?;
        self.client.delete(&format!("/v1/sandboxes/{id}")).await?;
        let gone = self.client.get(&format!("/v1/sandboxes/{id}")).await?;
        let request = self
            .client
            .request(Method::GET, &format!("/v1/artifacts/{name}/content"));
        let content = self
            .client
            .send(request)
            .await?
            .text()
            .await
            .doing("the download broke off")?;
        self.client.delete(&format!("/v1/artifacts/{name}")).await?;
        Ok(format!(
            "the sandbox is {}; {name} still reads {:?}",
            text(&gone, "state"),
            content.trim()
        ))
    }

    async fn clean_up(&self) {
        for id in &self.sandboxes {
            let _already_gone = self.client.delete(&format!("/v1/sandboxes/{id}")).await;
        }
    }
}

/// What the counter in a sandbox says of itself.
#[derive(Debug)]
struct Count {
    count: u64,
    process: String,
    host: String,
}

impl Count {
    fn read(answer: &str) -> Result<Self> {
        let mut words = answer.split_whitespace();
        let count = words.next().and_then(|word| word.parse().ok());
        match (count, words.next(), words.next()) {
            (Some(count), Some(process), Some(host)) => Ok(Self {
                count,
                process: process.into(),
                host: host.into(),
            }),
            _ => Err(Error::new(format!("the counter answered {answer:?}"))),
        }
    }
}

/// A sandbox like any other, but that it goes soon if the demo is killed.
fn request(memory_bytes: Option<u64>) -> Value {
    let mut body = json!({"template": "base", "timeout_ms": 300_000});
    if let Some(bytes) = memory_bytes {
        body["resources"] = json!({"memory_bytes": bytes});
    }
    body
}

/// Asks a sandbox's port as a browser would. The name is under `localhost`, which not every resolver knows, so the
/// connection goes to the server's own address and the name into the `Host` header.
async fn fetch(client: &Client, url: &str, token: &str) -> Result<String> {
    let parsed = reqwest::Url::parse(url).doing("the server gave a bad URL")?;
    let host = match (parsed.host_str(), parsed.port()) {
        (Some(host), Some(port)) => format!("{host}:{port}"),
        (host, _) => host.unwrap_or_default().to_owned(),
    };
    let response = reqwest::Client::builder()
        .no_proxy()
        .build()
        .doing("cannot set up HTTP")?
        .get(client.base().clone())
        .header("host", host)
        .header("x-atoll-token", token)
        .send()
        .await
        .doing("the port did not answer")?;
    let status = response.status();
    let body = response.text().await.doing("the port did not answer")?;
    if status.is_success() {
        Ok(body)
    } else {
        Err(Error::new(format!("the port answered {status}: {body}")))
    }
}

#[derive(Clone, Copy)]
enum Style {
    Bold,
    Dim,
}

fn style(text: &str, style: Style) -> String {
    if !std::io::stdout().is_terminal() {
        return text.to_owned();
    }
    let code = match style {
        Style::Bold => 1,
        Style::Dim => 2,
    };
    format!("\x1b[{code}m{text}\x1b[0m")
}

fn milliseconds(elapsed: Duration) -> String {
    match elapsed.as_secs_f64() * 1000.0 {
        ms if ms < 10.0 => format!("{ms:.1} ms"),
        ms if ms < 10_000.0 => format!("{ms:.0} ms"),
        ms => format!("{:.1} s", ms / 1000.0),
    }
}

const PRIMES: &str = "
n = 200_000
sieve = bytearray([1]) * n
for i in range(2, 448):
    if sieve[i]:
        sieve[i * i::i] = bytes(len(range(i * i, n, i)))
primes = [i for i in range(2, n) if sieve[i]]
print(f'{len(primes)} primes, the last three: {primes[-3:]}')
";

const SERVE: &str = "
import http.server, platform
class Hello(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = f'hello from inside, kernel {platform.release()}'.encode()
        self.send_response(200)
        self.send_header('content-length', str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass
http.server.HTTPServer(('127.0.0.1', 8000), Hello).serve_forever()
";

/// Says how far it is, which process it is (by a number that no other has), and on which host.
const COUNT: &str = "
import http.server, secrets, socket, threading, time
count, process = 0, secrets.token_hex(4)
def go():
    global count
    while True:
        count += 1
        time.sleep(0.01)
threading.Thread(target=go, daemon=True).start()
class Say(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = f'{count} {process} {socket.gethostname()}'.encode()
        self.send_response(200)
        self.send_header('content-length', str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass
http.server.HTTPServer(('127.0.0.1', 8000), Say).serve_forever()
";

/// Every connection ends at the gateway, so only an answer means that somebody was reached.
const REACH_OUT: &str = "
import socket
for name, address in [('1.1.1.1, the internet', ('1.1.1.1', 80)), ('169.254.169.254, cloud metadata', ('169.254.169.254', 80))]:
    try:
        s = socket.create_connection(address, 2)
        s.sendall(f'GET / HTTP/1.0\\r\\nHost: {address[0]}\\r\\n\\r\\n'.encode())
        answer = s.recv(65536)
        if answer and b'x-atoll-denied' not in answer:
            print(f'{name}: REACHED')
        else:
            print(f'{name}: refused')
    except OSError as e:
        print(f'{name}: {e}')
";

const HOG: &str = "
hoard = []
while True:
    hoard.append(bytearray(8 << 20))
";
