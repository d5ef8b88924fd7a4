//! A sandbox as a test uses it: run things, read and write files, look at it, end it.

use std::collections::BTreeMap;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use reqwest::{Method, RequestBuilder};
use serde_json::{Value, json};

use crate::client::{Answer, Client};
use crate::stream::{Events, Session};
use crate::wait;

/// Any change of state that a test waits for takes less.
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Debug, Clone)]
pub struct Sandbox {
    pub client: Client,
    pub id: String,
}

/// What a command came to.
#[derive(Debug, Clone, PartialEq)]
pub struct Output {
    pub stdout: String,
    pub stderr: String,
    pub code: Option<i64>,
    pub signal: Option<i64>,
    pub timed_out: bool,
    /// The whole answer.
    pub json: Value,
}

impl Output {
    /// Of the answer to `POST exec`.
    pub fn of(json: Value) -> Self {
        let text = |name: &str| json[name].as_str().unwrap_or_default().to_owned();
        Self {
            stdout: text("stdout"),
            stderr: text("stderr"),
            code: json["exit_code"].as_i64(),
            signal: json["signal"].as_i64(),
            timed_out: json["timed_out"] == json!(true),
            json,
        }
    }

    /// Asserts success and returns what was written.
    #[track_caller]
    pub fn ok(self) -> String {
        assert_eq!(self.code, Some(0), "{self:?}");
        self.stdout
    }
}

impl Sandbox {
    /// The sandbox that a create request made.
    #[track_caller]
    pub fn of(client: &Client, created: &Value) -> Self {
        let id = created["id"]
            .as_str()
            .unwrap_or_else(|| panic!("not a sandbox: {created}"));
        Self {
            client: client.clone(),
            id: id.to_owned(),
        }
    }

    /// The id without its prefix, as in host names.
    pub fn bare(&self) -> &str {
        self.id.strip_prefix("sbx_").expect("ids have their prefix")
    }

    /// `/v1/sandboxes/{id}` and what follows it.
    pub fn path(&self, rest: &str) -> String {
        format!("/v1/sandboxes/{}{rest}", self.id)
    }

    // ---- itself

    pub async fn get(&self) -> Value {
        self.client.get(&self.path("")).await.ok()
    }

    pub async fn state(&self) -> String {
        self.get().await["state"]
            .as_str()
            .expect("a sandbox has a state")
            .to_owned()
    }

    /// Waits until it is in a state, and returns its record.
    pub async fn until_state(&self, state: &str) -> Value {
        let what = format!("{} becomes {state}", self.id);
        wait::until(&what, PATIENCE, || async {
            let record = self.get().await;
            (record["state"] == json!(state)).then_some(record)
        })
        .await
    }

    /// `POST` of a wish about the sandbox as a whole: `/pause`, `/fork`.
    pub async fn ask(&self, what: &str, body: Value) -> Answer {
        self.client.post(&self.path(what), &body).await
    }

    pub async fn kill(&self) -> Value {
        self.client.delete(&self.path("")).await.ok()
    }

    // ---- commands

    /// `POST exec` with this body.
    pub async fn exec(&self, body: &Value) -> Answer {
        self.client.post(&self.path("/exec"), body).await
    }

    /// Runs a command with these arguments to its end.
    pub async fn run(&self, argv: &[&str]) -> Output {
        self.run_with(json!({ "argv": argv })).await
    }

    pub async fn run_with(&self, body: Value) -> Output {
        Output::of(self.exec(&body).await.expect(200).json())
    }

    /// A line of shell, as the template's user.
    pub async fn sh(&self, line: &str) -> Output {
        self.run(&["/bin/bash", "-c", line]).await
    }

    /// A line of shell, as root.
    pub async fn root_sh(&self, line: &str) -> Output {
        self.run_with(json!({"argv": ["/bin/bash", "-c", line], "user": "root"}))
            .await
    }

    /// Asserts that the sandbox works, by running something in it.
    pub async fn assert_works(&self) {
        let answer = self.sh("echo $((6 * 7))").await;
        assert_eq!(answer.ok(), "42\n");
    }

    /// Starts a command that goes on by itself, and returns its id.
    pub async fn background(&self, line: &str) -> String {
        let body = json!({"argv": ["/bin/bash", "-c", line], "background": true});
        let started = self.exec(&body).await.expect(202).json();
        started["command"]
            .as_str()
            .expect("a command has an id")
            .to_owned()
    }

    pub async fn commands(&self) -> Vec<Value> {
        let list = self.client.get(&self.path("/commands")).await.ok();
        list["items"].as_array().expect("a list").clone()
    }

    pub async fn command(&self, id: &str) -> Value {
        let all = self.commands().await;
        let found = all.iter().find(|command| command["id"] == json!(id));
        found
            .unwrap_or_else(|| panic!("no command {id} in {all:?}"))
            .clone()
    }

    /// Waits until a command is over, and returns it as listed.
    pub async fn until_ended(&self, command: &str) -> Value {
        wait::until(&format!("{command} ends"), PATIENCE, || async {
            let found = self.command(command).await;
            (found["state"] != json!("running")).then_some(found)
        })
        .await
    }

    /// What a command has written so far.
    pub async fn logs(&self, command: &str) -> String {
        self.client
            .get(&self.path(&format!("/commands/{command}/logs")))
            .await
            .expect(200)
            .text()
    }

    /// Waits until a command has written this.
    pub async fn until_logged(&self, command: &str, text: &str) -> String {
        wait::until(&format!("{command} writes {text:?}"), PATIENCE, || async {
            let logs = self.logs(command).await;
            logs.contains(text).then_some(logs)
        })
        .await
    }

    /// A command whose events come as they happen.
    pub async fn exec_events(&self, body: &Value) -> Events {
        let request = self.client.request(Method::POST, &self.path("/exec")).json(body);
        Events::of(
            self.client
                .open(request.header("accept", "text/event-stream"))
                .await,
        )
    }

    /// A command over a WebSocket.
    pub async fn session(&self, body: &Value) -> Session {
        Session::exec(&self.client, &self.id, body).await
    }

    /// A command over a WebSocket that runs, and its id.
    pub async fn started(&self, body: &Value) -> (Session, String) {
        let mut session = self.session(body).await;
        let started = session.until("started").await;
        let command = started["command"].as_str().expect("a command has an id");
        let command = command.to_owned();
        (session, command)
    }

    /// A shell on a terminal of this size, with nothing configured but its prompt.
    pub async fn terminal(&self, rows: u16, cols: u16, prompt: &str) -> Session {
        let shell =
            json!({"argv": ["bash", "--norc"], "pty": {"rows": rows, "cols": cols}, "env": {"PS1": prompt}});
        self.started(&shell).await.0
    }

    /// How many processes have a command line that begins like this. For lines that nothing else would have.
    pub async fn count_processes(&self, line: &str) -> usize {
        // The last letter in brackets, so that the one who looks does not find itself.
        let (rest, last) = line.split_at(line.len() - 1);
        let found = self.sh(&format!("pgrep -f '^{rest}[{last}]' | wc -l")).await.ok();
        found.trim().parse().expect("a number")
    }

    pub async fn until_no_process(&self, line: &str) {
        wait::until(&format!("`{line}` is gone"), PATIENCE, || async {
            (self.count_processes(line).await == 0).then_some(())
        })
        .await;
    }

    // ---- files

    fn file(&self, method: Method, route: &str, path: &[u8]) -> RequestBuilder {
        let request = self.client.request(method, &self.path(&format!("/files{route}")));
        match std::str::from_utf8(path) {
            Ok(text) => request.query(&[("path", text)]),
            Err(_) => request.query(&[("path_base64", to_base64(path))]),
        }
    }

    /// `GET files{route}` of a path.
    pub async fn files_get(&self, route: &str, path: impl AsRef<[u8]>, query: &[(&str, &str)]) -> Answer {
        self.client
            .send(self.file(Method::GET, route, path.as_ref()).query(query))
            .await
    }

    /// `PUT files{route}` of a path.
    pub async fn files_put(
        &self,
        route: &str,
        path: impl AsRef<[u8]>,
        query: &[(&str, &str)],
        body: Vec<u8>,
    ) -> Answer {
        self.client
            .send(
                self.file(Method::PUT, route, path.as_ref())
                    .query(query)
                    .body(body),
            )
            .await
    }

    /// `POST files{route}` with this body.
    pub async fn files_post(&self, route: &str, body: &Value) -> Answer {
        self.client
            .post(&self.path(&format!("/files{route}")), body)
            .await
    }

    pub async fn write(&self, path: impl AsRef<[u8]>, content: &[u8]) -> Value {
        self.files_put("/content", path, &[], content.to_vec()).await.ok()
    }

    pub async fn read(&self, path: impl AsRef<[u8]>) -> Vec<u8> {
        self.files_get("/content", path, &[]).await.expect(200).body
    }

    pub async fn stat(&self, path: impl AsRef<[u8]>) -> Value {
        self.files_get("/stat", path, &[]).await.ok()
    }

    pub async fn list(&self, path: impl AsRef<[u8]>, depth: u32) -> Vec<Value> {
        let list = self
            .files_get("", path, &[("depth", &depth.to_string())])
            .await
            .ok();
        list["items"].as_array().expect("a list").clone()
    }

    /// The events of a watch that stands.
    pub async fn watch(&self, path: &str, recursive: bool) -> Events {
        let request = self.file(Method::GET, "/watch", path.as_bytes());
        let request = request.query(&[("recursive", recursive.to_string())]);
        let mut events = Events::of(self.client.open(request).await);
        let first = events.next().await.expect("a watch says that it stands");
        assert_eq!(first.name, "watching");
        events
    }

    // ---- ledger

    /// All facts of the sandbox, oldest first.
    pub async fn facts(&self) -> Vec<Value> {
        let page = self.client.get(&self.path("/facts?limit=1000")).await.ok();
        page["items"].as_array().expect("a list").clone()
    }

    /// Waits until the ledger knows the ends of this many commands, and returns how they ended, by id. Panics when one
    /// ended twice. How long they took is left out: nobody can predict it.
    pub async fn until_exits(&self, count: usize) -> BTreeMap<String, Value> {
        wait::until(&format!("{count} commands have ended"), PATIENCE, || async {
            let mut exits = BTreeMap::new();
            for fact in self.facts().await {
                if fact["kind"] != "command.exited" {
                    continue;
                }
                let mut data = fact["data"].as_object().expect("data").clone();
                data.remove("duration_millis").expect("a duration");
                let id = data.remove("command").expect("whose end it is");
                let id = id.as_str().expect("an id").to_owned();
                let twice = exits.insert(id, Value::Object(data));
                assert_eq!(twice, None, "a command ends once: {fact}");
            }
            (exits.len() >= count).then_some(exits)
        })
        .await
    }
}

pub fn to_base64(bytes: &[u8]) -> String {
    STANDARD.encode(bytes)
}

pub fn from_base64(text: &str) -> Vec<u8> {
    STANDARD
        .decode(text)
        .unwrap_or_else(|error| panic!("not base64 ({error}): {text}"))
}
