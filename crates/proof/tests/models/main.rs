//! The model gateway through the clients that people use, the ledger beside the provider's own count, and kill -9 in the
//! middle.
//!
//! The clients are the published ones, unmodified: `ATOLL_TEST_MODELS_PYTHON` is a Python that has `openai` and `anthropic`,
//! `ATOLL_TEST_MODELS_NODE` directories (`:` between them) in whose `node_modules` are `openai`, `@anthropic-ai/sdk`, `ai` and
//! `@ai-sdk/gateway`, `ATOLL_TEST_MODELS_LANGCHAIN` a Python that has `langchain-openai` and `langchain-anthropic`. `./test`
//! installs them. Without them these tests are skipped, loudly.

#![allow(clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]

mod flood;

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use atoll_proof::{Options, Sandbox, Server, Tier, Value, binary, json, wait};

/// Providers that follow a script, in a process of their own.
struct Scripted {
    child: Child,
    url: String,
}

impl Scripted {
    fn start() -> Self {
        let child = Command::new(binary())
            .args(["scripted-provider", "--listen", "127.0.0.1:0", "--json"])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        // Ended and waited for whenever it goes, also if it never says where it listens.
        let mut scripted = Self {
            child,
            url: String::new(),
        };
        let mut text = String::new();
        for line in BufReader::new(scripted.child.stdout.take().unwrap()).lines() {
            text.push_str(&line.unwrap());
            if let Ok(said) = serde_json::from_str::<Value>(&text) {
                scripted.url = said["url"].as_str().unwrap().to_owned();
                return scripted;
            }
        }
        panic!("the scripted provider did not start: {text}");
    }

    async fn counted(&self) -> Value {
        let answer = reqwest::get(format!("{}/scripted/usage", self.url))
            .await
            .unwrap();
        serde_json::from_slice(&answer.bytes().await.unwrap()).unwrap()
    }
}

impl Drop for Scripted {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A server with scripted providers of every kind and a key that may call them.
async fn gateway(scripted: &Scripted) -> (Server, String) {
    let options = Options::default().config("[models]\nfirst_byte_timeout = \"3s\"\nidle_timeout = \"3s\"");
    let server = Server::start(Tier::Jail, options).await;
    let base = &scripted.url;
    for (name, kind, url) in [
        ("open", "openai", format!("{base}/v1")),
        ("resp", "openai", format!("{base}/v1")),
        ("claude", "anthropic", base.clone()),
        ("gem", "gemini", format!("{base}/v1beta")),
        ("bed", "bedrock", base.clone()),
    ] {
        let serves: &[&str] = if name == "open" { &["scripted-echo"] } else { &[] };
        let responses = name == "resp";
        // At Amazon a request is signed with its key.
        let key = if name == "bed" {
            "AKIASCRIPTEDSCRIPTED:secret"
        } else {
            "scripted-key"
        };
        let body = json!({
            "kind": kind, "base_url": url, "key": key, "serves": serves, "responses": responses,
        });
        put(&server, &format!("/v1/gateway/providers/{name}"), &body).await;
    }
    for role in [
        "echo",
        "full",
        "tool",
        "think",
        "json",
        "shell",
        "slow-100",
        "stream-20",
    ] {
        let body = json!({"input": PRICES.0, "output": PRICES.1});
        put(&server, &format!("/v1/gateway/prices/scripted-{role}"), &body).await;
    }
    let made = server
        .client()
        .post("/v1/gateway/keys", &json!({"name": "proof"}))
        .await
        .ok();
    let key = made["secret"].as_str().unwrap().to_owned();
    (server, key)
}

async fn put(server: &Server, path: &str, body: &Value) -> Value {
    let client = server.client();
    client
        .send(client.request(reqwest::Method::PUT, path).json(body))
        .await
        .ok()
}

async fn run_script(program: &str, script: &Path, dir: &Path) {
    let scripted = Scripted::start();
    let (server, key) = gateway(&scripted).await;
    let (program, url) = (program.to_owned(), server.client().url().to_owned());
    let (script, dir) = (script.to_owned(), dir.to_owned());
    let ran = tokio::task::spawn_blocking(move || {
        Command::new(program)
            .arg(script)
            .current_dir(dir)
            .env("ATOLL_URL", url)
            .env("ATOLL_MODEL_KEY", key)
            .output()
            .unwrap()
    });
    let ran = ran.await.unwrap();
    let (out, err) = (
        String::from_utf8_lossy(&ran.stdout),
        String::from_utf8_lossy(&ran.stderr),
    );
    assert!(ran.status.success(), "{out}\n{err}");
    println!("{out}");
    adds_up(&server, &scripted).await;
    server.finish().await;
}

/// Dollars for a million tokens of a scripted model, in and out. One model has no price, and costs nothing.
const PRICES: (&str, &str) = ("1.25", "10");
const UNPRICED: &str = "scripted-embed";

/// What the ledger says, token by token and to the last picodollar, against what the provider itself has counted.
async fn adds_up(server: &Server, scripted: &Scripted) {
    let counted = scripted.counted().await;
    let (mut tokens, mut picodollars) = (0, 0);
    for model in counted["models"].as_array().unwrap() {
        let (input, output) = (
            model["input"].as_u64().unwrap(),
            model["output"].as_u64().unwrap(),
        );
        tokens += input + output;
        if model["model"] != UNPRICED {
            picodollars += input * 1_250_000 + output * 10_000_000;
        }
    }
    let settled = wait::until(
        "the ledger agrees with the provider",
        Duration::from_secs(10),
        || async {
            let spend = server
                .client()
                .get_with("/v1/gateway/spend", &[("by", "total")])
                .await
                .ok();
            let total = &spend["items"][0];
            let usage = total["usage"]
                .as_object()?
                .iter()
                .filter(|(name, _)| *name != "searches");
            let ours: u64 = usage.filter_map(|(_, count)| count.as_u64()).sum();
            (ours == tokens && pico(total["cost"].as_str()?) == picodollars).then_some(())
        },
    );
    settled.await;
    println!("{tokens} tokens and {picodollars} picodollars, in the ledger and at the provider");
}

/// An amount such as `0.00125`, in picodollars.
fn pico(amount: &str) -> u64 {
    let (whole, part) = amount.split_once('.').unwrap_or((amount, ""));
    format!("{whole}{part:0<12}").parse().unwrap()
}

fn scripts() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/models")
}

fn needs(variable: &str) -> Option<String> {
    let found = std::env::var(variable).ok().filter(|value| !value.is_empty());
    if found.is_none() {
        eprintln!("SKIPPED: {variable} is not set; ./test sets it");
    }
    found
}

#[tokio::test]
async fn the_python_clients_work_unchanged() {
    if let Some(python) = needs("ATOLL_TEST_MODELS_PYTHON") {
        run_script(
            &python,
            &scripts().join("through_python.py"),
            &std::env::temp_dir(),
        )
        .await;
    }
}

#[tokio::test]
async fn langchains_models_work_unchanged() {
    if let Some(python) = needs("ATOLL_TEST_MODELS_LANGCHAIN") {
        run_script(
            &python,
            &scripts().join("through_langchain.py"),
            &std::env::temp_dir(),
        )
        .await;
    }
}

#[tokio::test]
async fn the_javascript_clients_work_unchanged() {
    let Some(dirs) = needs("ATOLL_TEST_MODELS_NODE") else {
        return;
    };
    for dir in dirs.split(':') {
        // Modules are looked for beside the script.
        let script = Path::new(dir).join("through_node.mjs");
        std::fs::copy(scripts().join("through_node.mjs"), &script).unwrap();
        run_script("node", &script, Path::new(dir)).await;
    }
}

/// Coding agents, each as it comes from npm, inside a sandbox that reaches nothing but the gateway and holds no provider's key.
/// Each is told to run a command by its own tool, and says what came of it.
#[tokio::test]
async fn coding_agents_work_in_a_sandbox_without_a_providers_key() {
    const AGENTS: [(&str, &str); 3] = [
        ("claude", "claude/scripted-shell"),
        ("codex", "resp/scripted-shell"),
        ("opencode", "open/scripted-shell"),
    ];
    let scripted = Scripted::start();
    let (server, _) = gateway(&scripted).await;
    if server.client().get("/v1/templates/coding-agents").await.status == 404 {
        eprintln!("SKIPPED: there is no template coding-agents; templates/coding-agents/build makes it");
        server.finish().await;
        return;
    }
    for (agent, model) in AGENTS {
        let wanted = json!({
            "template": "coding-agents", "resources": {"memory_bytes": 2_u64 << 30},
            "network": {"rules": [{"action": "allow", "to": "models.atoll.internal"}]},
        });
        let created = server
            .client()
            .post("/v1/sandboxes", &server.request(&wanted))
            .await
            .json();
        if created["error"]["code"] == "network_unavailable" {
            eprintln!("SKIPPED: sandboxes reach nothing on this machine");
            break;
        }
        let sandbox = Sandbox::of(server.client(), &created);
        let command = "scripted-run: echo $((6 * 7)) > answer; echo made-by-$(whoami)";
        let said = sandbox.run(&["coding-agent", agent, model, command]).await;
        assert!(
            said.stdout.contains("[scripted]") && said.stdout.contains("made-by-user"),
            "{said:?}"
        );
        let file = sandbox.run(&["cat", "answer"]).await;
        assert_eq!(file.stdout, "42\n", "{agent}: {said:?}");
        let environment = sandbox.run(&["env"]).await.stdout;
        assert!(!environment.contains("scripted-key"), "{environment}");
        let calls = server.client().get("/v1/gateway/calls").await.ok();
        assert_eq!(
            calls["items"][0]["sandbox"],
            json!(sandbox.id),
            "{agent}: {calls}"
        );
        println!("{agent}: {}", said.stdout.trim());
        sandbox.kill().await;
    }
    server.finish().await;
}

#[tokio::test]
async fn a_server_that_is_killed_loses_no_money() {
    let scripted = Scripted::start();
    let (mut server, key) = gateway(&scripted).await;
    put(&server, "/v1/gateway/budgets/all", &json!({"limit": "1"})).await;
    let body = json!({
        "model": "open/scripted-stream-20", "stream": true, "max_tokens": 100,
        "messages": [{"role": "user", "content": "count"}],
    });
    let client = server.client().with_key(Some(&key));
    let request = client
        .request(reqwest::Method::POST, "/v1/chat/completions")
        .json(&body);
    let mut answer = client.open(request).await;
    let first = answer.chunk().await.unwrap();
    assert!(first.is_some(), "it has begun");
    let reserved = server.client().get("/v1/gateway/budgets").await.ok();
    assert_ne!(reserved["items"][0]["standing"][0]["reserved"], "0.00");
    server.kill_9();
    server.start_again().await;
    let calls = server.client().get("/v1/gateway/calls").await.ok();
    let call = &calls["items"][0];
    assert_eq!(
        (&call["outcome"], &call["estimated"]),
        (&json!("lost"), &json!(true)),
        "{call}"
    );
    let budgets = server.client().get("/v1/gateway/budgets").await.ok();
    let standing = &budgets["items"][0]["standing"][0];
    assert_eq!(
        (&standing["reserved"], &standing["spent"]),
        (&json!("0.00"), &call["cost"]),
        "{standing}"
    );
    server.finish().await;
}

/// A thousand calls at once against a budget for a hundred: the provider hears of a hundred.
#[tokio::test]
async fn a_budget_holds_when_everybody_calls_at_once() {
    const CALLS: usize = 1000;
    const PAID: usize = 100;
    let scripted = Scripted::start();
    let (server, key) = gateway(&scripted).await;
    // Ten tokens, which the provider always writes: what is reserved is what it costs.
    let price = json!({"input": "0", "output": "10"});
    put(&server, "/v1/gateway/prices/scripted-full", &price).await;
    put(&server, "/v1/gateway/budgets/tight", &json!({"limit": "0.01"})).await;
    let body = json!({
        "model": "open/scripted-full", "max_tokens": 10, "messages": [{"role": "user", "content": "x"}],
    });
    let client = server.client().with_key(Some(&key));
    let mut calls = tokio::task::JoinSet::new();
    for _ in 0..CALLS {
        let (client, body) = (client.clone(), body.clone());
        calls.spawn(async move { client.post("/v1/chat/completions", &body).await.status });
    }
    let statuses = calls.join_all().await;
    let count = |wanted: u16| statuses.iter().filter(|status| **status == wanted).count();
    assert_eq!((count(200), count(402)), (PAID, CALLS - PAID));
    let heard = scripted.counted().await;
    assert_eq!(heard["models"][0]["calls"], json!(PAID), "{heard}");
    let budgets = server.client().get("/v1/gateway/budgets").await.ok();
    let standing = &budgets["items"][0]["standing"][0];
    assert_eq!(
        (&standing["spent"], &standing["reserved"]),
        (&json!("0.01"), &json!("0.00"))
    );
    server.finish().await;
}

/// A budget for each key counts what a project's own key spends, apart from what others do, and reports name it.
#[tokio::test]
async fn a_budget_by_key_caps_a_projects_own_key_too() {
    let scripted = Scripted::start();
    let (server, other) = gateway(&scripted).await;
    // Ten tokens at ten dollars a million, twice.
    let price = json!({"input": "0", "output": "10"});
    put(&server, "/v1/gateway/prices/scripted-full", &price).await;
    let budget = json!({"limit": "0.0002", "scope": "key"});
    put(&server, "/v1/gateway/budgets/each-key", &budget).await;
    let body = json!({
        "model": "open/scripted-full", "max_tokens": 10, "messages": [{"role": "user", "content": "x"}],
    });
    let own = server.client();
    for expected in [200, 200, 402] {
        own.post("/v1/chat/completions", &body).await.expect(expected);
    }
    let other = own.with_key(Some(&other));
    other.post("/v1/chat/completions", &body).await.expect(200);
    let keys = own.get("/v1/keys").await.ok();
    let spend = wait::until("both are in the report", Duration::from_secs(10), || async {
        let spend = own.get_with("/v1/gateway/spend", &[("by", "key")]).await.ok();
        (spend["total"] == "0.0003").then_some(spend)
    });
    let spend = spend.await;
    let spent = |key: &Value| {
        let rows = spend["items"].as_array().unwrap();
        rows.iter()
            .find(|row| row["group"] == *key)
            .map(|row| row["cost"].clone())
    };
    assert_eq!(spent(&keys["items"][0]["id"]), Some(json!("0.0002")), "{spend}");
    server.finish().await;
}

/// A virtual key knows of its own calls and of nobody else's, and whatever it asks for counts against its rate.
#[tokio::test]
async fn a_virtual_key_sees_its_own_calls_only() {
    let scripted = Scripted::start();
    let (server, key) = gateway(&scripted).await;
    put(&server, "/v1/gateway/budgets/all", &json!({"limit": "7"})).await;
    put(
        &server,
        "/v1/gateway/budgets/each",
        &json!({"limit": "3", "scope": "key"}),
    )
    .await;
    let body = json!({"model": "open/scripted-echo", "messages": [{"role": "user", "content": "a b c"}]});
    let (project, virtual_key) = (server.client(), server.client().with_key(Some(&key)));
    for _ in 0..3 {
        project.post("/v1/chat/completions", &body).await.expect(200);
    }
    virtual_key.post("/v1/chat/completions", &body).await.expect(200);
    let calls = wait::until("all are written down", Duration::from_secs(10), || async {
        let calls = project.get("/v1/gateway/calls").await.ok();
        let ended = calls["items"]
            .as_array()?
            .iter()
            .filter(|call| call["outcome"] == "done");
        (ended.count() == 4).then_some(calls)
    });
    let calls = calls.await;
    let keys = project.get("/v1/gateway/keys").await.ok();
    let made_with_it = |call: &&Value| call["key"] == keys["items"][0]["id"];
    let items = calls["items"].as_array().unwrap();
    let own = items.iter().find(made_with_it).unwrap();
    let other = items.iter().find(|call| !made_with_it(call)).unwrap();
    let id_of = |call: &Value| call["id"].as_str().unwrap().to_owned();
    let cost = own["cost"].as_str().unwrap().to_owned();
    let found = |id: String| {
        let virtual_key = virtual_key.clone();
        async move {
            virtual_key
                .get_with("/v1/generation", &[("id", &id)])
                .await
                .status
        }
    };
    assert_eq!((found(id_of(own)).await, found(id_of(other)).await), (200, 404));
    let dates = [
        ("start_date", "2020-01-01"),
        ("end_date", "2100-01-01"),
        ("group_by", "model"),
    ];
    let report = virtual_key.get_with("/v1/report", &dates).await.ok();
    assert_eq!(report["results"][0]["request_count"], 1, "{report}");
    let credits = virtual_key.get("/v1/credits").await.ok();
    assert_eq!(credits["total_used"], json!(cost), "{credits}");
    assert!(
        credits["balance"].as_str().unwrap().starts_with("2.99"),
        "{credits}"
    );
    for path in [
        "/v1/gateway/calls",
        "/v1/gateway/spend",
        "/v1/gateway/keys",
        "/v1/gateway/providers",
    ] {
        virtual_key.get(path).await.expect(401);
    }
    let report = project.get_with("/v1/report", &dates).await.ok();
    assert_eq!(report["results"][0]["request_count"], 4, "{report}");

    let narrow = json!({"name": "narrow", "requests_per_minute": 5});
    let made = project.post("/v1/gateway/keys", &narrow).await.ok();
    let narrow = project.with_key(made["secret"].as_str());
    narrow.get("/v1/models").await.expect(200);
    narrow.get("/v4/ai/config").await.expect(200);
    narrow.get("/v1/credits").await.expect(200);
    narrow.get_with("/v1/report", &dates).await.expect(200);
    narrow.post("/v1/messages/count_tokens", &body).await.expect(200);
    for path in ["/v1/models", "/v1/models/open", "/v1/credits", "/v4/ai/config"] {
        narrow.get(path).await.expect(429);
    }
    narrow.post("/v1/messages/count_tokens", &body).await.expect(429);
    server.finish().await;
}

/// Tenants' providers reach neither this machine nor its neighbours; whoever changes one without its key moves no key.
#[tokio::test]
async fn a_tenants_provider_stays_outside() {
    let scripted = Scripted::start();
    let (server, _) = gateway(&scripted).await;
    let operator = server.client();
    operator
        .post("/v1/projects", &json!({"name": "tenant"}))
        .await
        .expect(201);
    let made = operator
        .post("/v1/keys", &json!({"name": "t", "project": "tenant"}))
        .await
        .ok();
    let tenant = operator.with_key(made["secret"].as_str());
    let provider = json!({"kind": "openai", "base_url": format!("{}/v1", scripted.url), "key": "k", "serves": ["scripted-*"]});
    let path = "/v1/gateway/providers/p";
    tenant
        .send(tenant.request(reqwest::Method::PUT, path).json(&provider))
        .await
        .expect(200);
    let body = json!({"model": "scripted-echo", "messages": [{"role": "user", "content": "x"}]});
    let refused = tenant.post("/v1/chat/completions", &body).await.json();
    assert!(
        refused.to_string().contains("is refused on this server"),
        "{refused}"
    );
    let mut moved = provider;
    moved["base_url"] = "https://elsewhere.example/v1".into();
    moved.as_object_mut().unwrap().remove("key");
    let refused = tenant
        .send(tenant.request(reqwest::Method::PUT, path).json(&moved))
        .await
        .json();
    assert_eq!(refused["error"]["code"], "provider_key_needed", "{refused}");
    assert!(scripted.counted().await["models"].as_array().unwrap().is_empty());
    server.finish().await;
}

/// What a sandbox finds when its policy names the gateway: an address, a token of its own, and an end to both.
#[tokio::test]
async fn a_sandbox_calls_models_with_a_token_that_dies_with_it() {
    let scripted = Scripted::start();
    let (server, _) = gateway(&scripted).await;
    let allowed = json!({"network": {"rules": [{"action": "allow", "to": "models.atoll.internal"}]}});
    let created = server
        .client()
        .post("/v1/sandboxes", &server.request(&allowed))
        .await
        .json();
    if created["error"]["code"] == "network_unavailable" {
        eprintln!("SKIPPED: sandboxes reach nothing on this machine");
        server.finish().await;
        return;
    }
    let sandbox = Sandbox::of(server.client(), &created);
    let script = r#"
import json, os, urllib.request
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", headers={
    "authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json",
}, data=json.dumps({"model": "scripted-echo", "messages": [{"role": "user", "content": "from inside"}]}).encode())
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
print(os.environ["OPENAI_API_KEY"])
"#;
    let said = sandbox.run(&["python3", "-c", script]).await;
    let mut lines = said.stdout.lines();
    assert_eq!(lines.next(), Some("[scripted] from inside"), "{said:?}");
    let token = lines.next().unwrap().to_owned();
    let calls = server.client().get("/v1/gateway/calls").await.ok();
    assert_eq!(calls["items"][0]["sandbox"], json!(sandbox.id), "{calls}");
    // It opens nothing else, and nothing at all afterwards.
    let outside = server.client().with_key(Some(&token));
    outside.get("/v1/sandboxes").await.expect(401);
    outside.get("/v1/gateway/spend").await.expect(401);
    let body = json!({"model": "scripted-echo", "messages": [{"role": "user", "content": "x"}]});
    // Nor is it good anywhere but inside: not outside, and not in another sandbox; both are written down.
    outside.post("/v1/chat/completions", &body).await.expect(401);
    let created = server
        .client()
        .post("/v1/sandboxes", &server.request(&allowed))
        .await;
    let other = Sandbox::of(server.client(), &created.expect(201).json());
    let stolen = script.replace("os.environ[\"OPENAI_API_KEY\"]", &format!("\"{token}\""));
    let said = other.run(&["python3", "-c", &stolen]).await;
    assert!(said.stderr.contains("401"), "{said:?}");
    for (of, reason) in [
        (&sandbox, "its token was used from outside of it".to_owned()),
        (
            &other,
            format!("the token of {} was used from this sandbox", sandbox.id),
        ),
    ] {
        wait::until("it is written down", Duration::from_secs(10), || async {
            let facts = server.client().get(&of.path("/facts")).await.ok();
            let mut facts = facts["items"].as_array()?.iter();
            facts.find(|fact| {
                fact["kind"] == "model.refused"
                    && fact["data"]["code"] == "token"
                    && fact["data"]["reason"] == json!(reason)
            })?;
            Some(())
        })
        .await;
    }
    let calls = server.client().get("/v1/gateway/calls").await.ok();
    assert_eq!(calls["items"].as_array().unwrap().len(), 1, "{calls}");
    other.kill().await;
    sandbox.kill().await;
    outside.post("/v1/chat/completions", &body).await.expect(401);
    server.finish().await;
}
