//! A real server: a child process with its own data directory, port and cgroups, which a test may stop, kill and start
//! again.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::client::Client;
use crate::host;
use crate::leaks::Held;
use crate::ordinary;
use crate::sandbox::Sandbox;
use crate::tier::Tier;
use crate::wait;

/// A server is up, or down, within this time, also on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);
/// How much of the log a failed test shows.
const LOG_LINES: usize = 150;

/// How a server is started. The default is what a user gets.
#[derive(Debug, Clone, Default)]
pub struct Options {
    config: String,
    args: Vec<String>,
    may_fail: bool,
    own_templates: bool,
    ordinary_user: bool,
}

impl Options {
    /// Adds lines to the configuration file.
    #[must_use]
    pub fn config(mut self, lines: &str) -> Self {
        self.config.push_str(lines);
        self.config.push('\n');
        self
    }

    /// Adds arguments to `atoll server`.
    #[must_use]
    pub fn args(mut self, args: &[&str]) -> Self {
        self.args.extend(args.iter().map(|arg| (*arg).to_owned()));
        self
    }

    /// Gives it a template store of its own that holds `base` only, for tests that build, delete and prune.
    #[must_use]
    pub fn own_templates(mut self) -> Self {
        self.own_templates = true;
        self
    }

    /// Runs it as [`ordinary::USER`], to whom its cgroups are delegated.
    #[must_use]
    pub fn by_an_ordinary_user(mut self) -> Self {
        self.ordinary_user = true;
        self.own_templates()
    }

    /// Errors in the server's log are part of the test; otherwise they fail it.
    #[must_use]
    pub fn with_errors(mut self) -> Self {
        self.may_fail = true;
        self
    }
}

#[derive(Debug)]
pub struct Server {
    pub tier: Tier,
    options: Options,
    dir: TempDir,
    cgroup: String,
    env: Vec<(String, String)>,
    running: Option<Running>,
}

#[derive(Debug)]
struct Running {
    child: Child,
    client: Client,
}

impl Server {
    /// Starts a server whose sandboxes get this tier.
    pub async fn start(tier: Tier, options: Options) -> Self {
        let dir = tempfile::Builder::new()
            .prefix("atoll-proof-")
            .tempdir()
            .expect("a temporary directory");
        let cgroup = crate::unique_name();
        let config = format!("cgroup = \"{cgroup}\"\n{}", options.config);
        fs::write(dir.path().join("config.toml"), config).expect("the configuration is written");
        if options.own_templates {
            link_base(&templates(), &dir.path().join("templates"));
        }
        if options.ordinary_user {
            ordinary::hand_over(dir.path(), &cgroup);
        }
        let mut server = Self {
            tier,
            options,
            dir,
            cgroup,
            env: Vec::new(),
            running: None,
        };
        server.begin().await;
        server
    }

    /// Starts the process.
    fn spawn(&self) -> Child {
        assert!(self.running.is_none(), "one server at a time");
        let log = File::options()
            .create(true)
            .append(true)
            .open(self.log_path())
            .expect("the log can be written");
        let mut command = if self.options.ordinary_user {
            ordinary::command(self.dir.path())
        } else {
            Command::new(binary())
        };
        command
            .env_remove("ATOLL_URL")
            .env_remove("ATOLL_API_KEY")
            .env_remove("OTEL_EXPORTER_OTLP_ENDPOINT")
            .env("ATOLL_TEMPLATES", self.templates())
            .arg("--data")
            .arg(self.data())
            .args([
                "server",
                "--listen",
                "127.0.0.1:0",
                "--log-format",
                "plain",
                "--config",
            ])
            .arg(self.dir.path().join("config.toml"))
            .args(&self.options.args)
            .envs(self.env.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a descriptor"))
            .stderr(log);
        if self.tier == Tier::Jail {
            // The strongest tier that works is used; so that it is this one, the others must not.
            command.args(["--runsc", "none", "--isolation", "jail"]);
        }
        command
            .spawn()
            .unwrap_or_else(|error| panic!("{command:?}: {error}"))
    }

    /// Starts the process and waits until it has told where it listens.
    async fn begin(&mut self) {
        let mut child = self.spawn();
        let pid = child.id();
        let announcement = self.data().join("server.json");
        let url = wait::until_sync("the server starts", PATIENCE, || {
            if let Ok(Some(status)) = child.try_wait() {
                panic!("the server ended at once with {status}:\n{}", self.log_tail());
            }
            // The file of a server that was killed is still there, with another pid.
            let server: Value = serde_json::from_slice(&fs::read(&announcement).ok()?).ok()?;
            (server["pid"] == json!(pid)).then(|| server["url"].as_str().expect("a URL").to_owned())
        })
        .await;
        let key = fs::read_to_string(self.data().join("admin.key")).expect("the first start makes a key");
        let client = Client::new(&url, Some(key.trim()));
        self.running = Some(Running { child, client });
    }

    /// Why the tier of this server does not work on this machine.
    pub async fn missing_tier(&self) -> Option<String> {
        let info = self.client().get("/v1/info").await.ok();
        let tiers = info["tiers"].as_array().expect("a list of tiers");
        match tiers
            .iter()
            .find(|tier| tier["isolation"] == json!(self.tier.name()))
        {
            Some(tier) if tier["available"] == json!(true) => None,
            Some(tier) => Some(tier["detail"].to_string()),
            None => Some("the server does not know it".into()),
        }
    }

    /// Asserts that there is something to make sandboxes from, so that its absence is said once and plainly.
    pub(crate) async fn assert_has_base(&self) {
        let found = self.client().get("/v1/templates/base").await.status;
        assert_eq!(
            found,
            200,
            "there is no template `base` in {}; `atoll template build base` makes it, ATOLL_TEMPLATES names another place",
            templates().display()
        );
    }

    fn running(&self) -> &Running {
        self.running.as_ref().expect("the server runs")
    }

    pub fn client(&self) -> &Client {
        &self.running().client
    }

    pub fn pid(&self) -> u32 {
        self.running().child.id()
    }

    pub fn data(&self) -> PathBuf {
        self.dir.path().join("data")
    }

    /// Where its templates are.
    pub fn templates(&self) -> PathBuf {
        if self.options.own_templates {
            self.dir.path().join("templates")
        } else {
            templates()
        }
    }

    /// The parent of all cgroups of this server.
    pub fn cgroup(&self) -> &str {
        &self.cgroup
    }

    // ---- sandboxes

    /// What is asked for unless a test says otherwise: the server's tier, and an end in case the test forgets it.
    pub fn request(&self, more: &Value) -> Value {
        let mut body = json!({"isolation_floor": self.tier.name(), "timeout_ms": 300_000});
        for (name, value) in more.as_object().into_iter().flatten() {
            body[name] = value.clone();
        }
        body
    }

    /// Makes a sandbox with the defaults.
    pub async fn sandbox(&self) -> Sandbox {
        self.sandbox_with(&json!({})).await
    }

    /// Makes a sandbox with these fields of the request.
    pub async fn sandbox_with(&self, more: &Value) -> Sandbox {
        let created = self
            .client()
            .post("/v1/sandboxes", &self.request(more))
            .await
            .expect(201)
            .json();
        assert_eq!(created["isolation"], json!(self.tier.name()), "{created}");
        Sandbox::of(self.client(), &created)
    }

    /// Waits until the only pool holds what it is to hold, and returns it.
    pub async fn until_pool_is_full(&self) -> Value {
        crate::wait::until("the pool is full", Duration::from_secs(30), || async {
            let info = self.client().get("/v1/info").await.ok();
            let pool = info["pools"][0].clone();
            (pool["ready"].is_u64() && pool["ready"] == pool["target"]).then_some(pool)
        })
        .await
    }

    /// The same sandbox through the server as it is now, after a restart.
    pub fn again(&self, sandbox: &Sandbox) -> Sandbox {
        Sandbox {
            client: self.client().clone(),
            id: sandbox.id.clone(),
        }
    }

    /// Every sandbox in these states, page by page; none named: the live ones.
    pub async fn list(&self, states: &[&str]) -> Vec<Value> {
        let mut items = Vec::new();
        let mut cursor = None;
        loop {
            let mut query: Vec<(&str, String)> = states
                .iter()
                .map(|state| ("state", (*state).to_owned()))
                .collect();
            query.push(("limit", "100".into()));
            query.extend(cursor.take().map(|cursor| ("cursor", cursor)));
            let request = self
                .client()
                .request(reqwest::Method::GET, "/v1/sandboxes")
                .query(&query);
            let page = self.client().send(request).await.ok();
            items.extend(page["items"].as_array().expect("a list").iter().cloned());
            match page["next"].as_str() {
                Some(next) => cursor = Some(next.to_owned()),
                None => return items,
            }
        }
    }

    // ---- life and death

    /// Kills the server as a crash would.
    pub fn kill_9(&mut self) {
        let mut running = self.running.take().expect("the server runs");
        let helper = host::helper_of(running.child.id());
        running.child.kill().expect("a child can be killed");
        running.child.wait().expect("a child can be waited for");
        self.until_gone(helper);
    }

    /// A helper goes with its server, a moment later.
    fn until_gone(&self, helper: Option<u32>) {
        let gone = || !helper.is_some_and(host::runs);
        assert!(
            wait::becomes_true(PATIENCE, gone),
            "the server's helper stays:\n{}",
            self.log_tail()
        );
    }

    /// Waits until it has ended by itself.
    pub fn until_ended(&mut self) {
        let mut running = self.running.take().expect("the server runs");
        let ended = wait::becomes_true(PATIENCE, || {
            running
                .child
                .try_wait()
                .expect("a child can be waited for")
                .is_some()
        });
        assert!(ended, "the server goes on:\n{}", self.log_tail());
    }

    /// From now on errors in the log are part of the test.
    pub fn expect_errors(&mut self) {
        self.options.may_fail = true;
    }

    /// Starts it on the same data and kills it after this time, wherever it is then: perhaps before it serves.
    pub async fn start_and_kill(&self, after: Duration) {
        let mut child = self.spawn();
        tokio::time::sleep(after).await;
        child.kill().expect("a child can be killed");
        child.wait().expect("a child can be waited for");
    }

    /// Sets a variable in the environment of whatever is started from now on.
    pub fn env(&mut self, name: &str, value: &str) {
        self.env.push((name.to_owned(), value.to_owned()));
    }

    /// Starts it again on the same data.
    pub async fn start_again(&mut self) {
        self.begin().await;
    }

    /// Asks it to stop and waits until it has.
    pub fn stop(&mut self) -> ExitStatus {
        let mut running = self.running.take().expect("the server runs");
        let helper = host::helper_of(running.child.id());
        host::kill(running.child.id(), Signal::TERM);
        let mut status = None;
        wait::becomes_true(PATIENCE, || {
            status = running.child.try_wait().expect("a child can be waited for");
            status.is_some()
        });
        self.until_gone(helper.filter(|_| status.is_some()));
        status.unwrap_or_else(|| {
            let _ = running.child.kill();
            panic!(
                "the server did not stop within {PATIENCE:?}:\n{}",
                self.log_tail()
            )
        })
    }

    // ---- what it holds

    /// What the instances of this server hold on the machine now.
    pub fn held(&self) -> Held {
        Held::look(
            &self.data(),
            &self.cgroup,
            self.running.as_ref().map(|running| running.child.id()),
        )
    }

    /// Asserts that no instance holds anything.
    pub async fn assert_nothing_held(&self) {
        // A process that was killed takes a moment to be gone.
        let settled = wait::becomes_true(Duration::from_secs(10), || self.held().is_nothing());
        assert!(settled, "left on the machine:\n{}", self.held());
    }

    /// Asserts that the server answers, quickly.
    pub async fn assert_answers(&self) {
        let health = self.client().get("/healthz");
        wait::within("the server answers", Duration::from_secs(5), health)
            .await
            .expect(200);
    }

    /// The most memory that the server ever used, in bytes.
    pub fn peak_memory(&self) -> u64 {
        host::status_bytes(self.pid(), "VmHWM").expect("the server runs")
    }

    /// The memory that the server uses now, in bytes.
    pub fn memory(&self) -> u64 {
        host::status_bytes(self.pid(), "VmRSS").expect("the server runs")
    }

    /// Ends all sandboxes and the server; asserts that nothing is left and that the server never had to log an error.
    pub async fn finish(mut self) {
        if self.running.is_none() {
            self.begin().await;
        }
        for sandbox in self.list(&[]).await {
            Sandbox::of(self.client(), &sandbox).kill().await;
        }
        let pools =
            self.options.args.iter().any(|arg| arg == "--pool") || self.options.config.contains("[[pool]]");
        if !pools {
            self.assert_nothing_held().await;
        }
        let status = self.stop();
        assert!(status.success(), "the server ended with {status}");
        self.assert_nothing_held().await;
        let log = self.log();
        let mut complaints = log
            .lines()
            .filter(|line| line.contains(" ERROR ") || line.contains("panicked"));
        if let Some(line) = complaints.next()
            && !self.options.may_fail
        {
            panic!("the server logged an error: {line}");
        }
    }

    // ---- log

    fn log_path(&self) -> PathBuf {
        self.dir.path().join("server.log")
    }

    /// All that it logged so far.
    pub fn log(&self) -> String {
        fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    fn log_tail(&self) -> String {
        let log = self.log();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(LOG_LINES)..].join("\n")
    }
}

/// Leaves nothing, whatever happened: also after a failed assertion, and for a server that does not answer.
impl Drop for Server {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!(
                "---- log of the {} server\n{}\n----",
                self.tier.name(),
                self.log_tail()
            );
        }
        if let Some(mut running) = self.running.take() {
            let _gone = running.child.kill();
            let _gone = running.child.wait();
        }
        host::cgroup_kill(&self.cgroup);
        for (pid, _) in host::processes_naming(&self.data()) {
            host::kill(pid, Signal::KILL);
        }
        for mount in host::mounts_below(&self.data()) {
            let _gone = rustix::mount::unmount(&mount, rustix::mount::UnmountFlags::DETACH);
        }
        wait::becomes_true(Duration::from_secs(2), || {
            host::cgroup_remove(&self.cgroup);
            host::cgroup_dirs(&self.cgroup).is_empty()
        });
        if std::env::var_os("ATOLL_PROOF_KEEP").is_some() {
            self.dir.disable_cleanup(true);
            eprintln!("kept: {}", self.dir.path().display());
        }
    }
}

/// The program under test.
pub fn binary() -> PathBuf {
    if let Some(path) = std::env::var_os("ATOLL_BIN") {
        return path.into();
    }
    let target = workspace().join("target");
    let built = ["release", "debug"].map(|profile| target.join(profile).join("atoll"));
    let newest = built
        .iter()
        .max_by_key(|path| path.metadata().and_then(|found| found.modified()).ok());
    newest.filter(|path| path.exists()).cloned().unwrap_or_else(|| {
        panic!(
            "there is no {}; build it with `cargo build --release -p atoll`, or set ATOLL_BIN",
            built[0].display()
        )
    })
}

/// The templates that all tests share: immutable, and expensive to build.
pub fn templates() -> PathBuf {
    if let Some(path) = std::env::var_os("ATOLL_TEMPLATES") {
        return path.into();
    }
    let cache =
        std::env::var_os("ATOLL_CACHE").map_or_else(|| PathBuf::from("/var/cache/atoll"), PathBuf::from);
    cache.join("templates")
}

/// Makes a store that holds the template `base` of another one. Its image is not copied where a link will do: images are
/// never written to.
fn link_base(from: &Path, to: &Path) {
    let read = |path: PathBuf| {
        fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    };
    let id = read(from.join("names/base"));
    let manifest = format!("manifests/{}.json", id.trim());
    let found: Value = serde_json::from_str(&read(from.join(&manifest))).expect("a manifest is JSON");
    let image = format!("blobs/{}.erofs", found["digest"].as_str().expect("a digest"));
    for dir in ["names", "manifests", "blobs"] {
        fs::create_dir_all(to.join(dir)).expect("a directory");
    }
    for file in ["names/base", &manifest] {
        fs::copy(from.join(file), to.join(file)).expect("a small file is copied");
    }
    if fs::hard_link(from.join(&image), to.join(&image)).is_err() {
        fs::copy(from.join(&image), to.join(&image)).expect("the image is copied");
    }
}

fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .ancestors()
        .nth(2)
        .expect("the crate lies in crates/")
}
