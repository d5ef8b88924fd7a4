//! What all actors of a run share: the server, the three projects, whether the server is there, and what was noted.

use parking_lot::{Mutex, RwLock};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use atoll_client::output::{Doing, Error, Result};
use atoll_client::{Client, WorkflowClient};
use reqwest::Method;
use serde_json::json;
use temporalio_protos::temporal::api::workflowservice::v1 as service;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::canary::Canaries;
use super::random::Random;
use super::server::Server;
use super::tally::Tally;

/// Two that behave and one that does not.
pub(super) const PROJECTS: [&str; 3] = ["soak-one", "soak-two", "soak-hostile"];
pub(super) const HOSTILE: usize = 2;
/// The key of each project's provider begins with this.
pub(super) const PROVIDER_KEY: &str = "provider-key-";
/// Dollars per million tokens, in and out.
pub(super) const PRICE: &str = "1000";
/// So many ids of each kind are told to the hostile one.
const BOARD: usize = 32;

/// A project and its keys.
#[derive(Debug, Clone)]
pub(super) struct Project {
    pub(super) index: usize,
    pub(super) name: &'static str,
    pub(super) key: String,
    /// For whoever answers what its workflows ask.
    pub(super) approver_key: String,
    /// For models only.
    pub(super) model_key: String,
    /// Where its workflows are.
    pub(super) namespace: String,
}

impl Project {
    /// A model that repeats what it is told. Each project has its own, so that what a provider bills can be told apart.
    pub(super) fn echo(&self) -> String {
        format!("scripted-echo-{}", self.index)
    }

    /// A model that streams.
    pub(super) fn streams(&self) -> String {
        format!("scripted-stream-{}", 20 + self.index)
    }
}

/// The projects as they are on the data of now; other data have others.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) projects: Vec<Project>,
}

/// What the hostile project knows of the others: names and ids, as they stand in logs and links. None of them has a canary in
/// it: a refusal repeats what was asked for.
#[derive(Debug, Default)]
pub(super) struct Board(Mutex<BTreeMap<&'static str, VecDeque<(usize, String)>>>);

impl Board {
    pub(super) fn tell(&self, kind: &'static str, owner: usize, id: &str) {
        let mut known = self.0.lock();
        let ids = known.entry(kind).or_default();
        if ids.len() >= BOARD {
            ids.pop_front();
        }
        ids.push_back((owner, id.to_owned()));
    }

    /// One of somebody else's.
    pub(super) fn pick(&self, kind: &str, random: &mut Random) -> Option<String> {
        let known = self.0.lock();
        let ids: Vec<&str> = known
            .get(kind)?
            .iter()
            .filter(|(owner, _)| *owner != HOSTILE)
            .map(|(_, id)| id.as_str())
            .collect();
        random.one(&ids).map(|id| (*id).to_owned())
    }
}

#[derive(Debug)]
pub(super) struct World {
    pub(super) seed: u64,
    pub(super) server: Server,
    /// Where the scripted provider is.
    pub(super) provider: String,
    pub(super) canaries: Canaries,
    pub(super) tally: Tally,
    pub(super) board: Board,
    session: RwLock<Arc<Session>>,
    /// Changes whenever the server goes, before it goes.
    epoch: AtomicU64,
    up: watch::Sender<bool>,
    /// The disk is full, or was a moment ago.
    full: AtomicBool,
    /// How often the clock has jumped.
    pub(super) jumps: AtomicU64,
    /// Somebody hostile is at work.
    pub(super) beside: AtomicBool,
    /// The load is over: nobody begins anything new.
    pub(super) over: CancellationToken,
    /// The run was interrupted: everybody leaves.
    pub(super) interrupted: CancellationToken,
    /// Which attacks are under way, for whoever asks what the server chokes on.
    under_way: Mutex<Vec<(&'static str, Instant)>>,
}

impl World {
    pub(super) fn new(seed: u64, server: Server, provider: String) -> Self {
        Self {
            seed,
            server,
            provider,
            canaries: Canaries::plant(seed, PROJECTS.len()),
            tally: Tally::default(),
            board: Board::default(),
            session: RwLock::new(Arc::new(Session { projects: Vec::new() })),
            epoch: AtomicU64::new(0),
            up: watch::Sender::new(false),
            full: AtomicBool::new(false),
            jumps: AtomicU64::new(0),
            beside: AtomicBool::new(false),
            over: CancellationToken::new(),
            interrupted: CancellationToken::new(),
            under_way: Mutex::new(Vec::new()),
        }
    }

    pub(super) fn session(&self) -> Arc<Session> {
        let session = self.session.read();
        Arc::clone(&session)
    }

    pub(super) fn project(&self, index: usize) -> Option<Project> {
        self.session().projects.get(index).cloned()
    }

    pub(super) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::SeqCst)
    }

    pub(super) fn is_up(&self) -> bool {
        *self.up.borrow()
    }

    /// To be said before the server goes.
    pub(super) fn goes_down(&self) {
        self.epoch.fetch_add(1, Ordering::SeqCst);
        self.up.send_replace(false);
    }

    pub(super) fn is_back(&self) {
        self.up.send_replace(true);
    }

    /// Waits until the server is there. `false`: the run was interrupted, or it never came.
    pub(super) async fn until_up(&self) -> bool {
        let mut up = self.up.subscribe();
        tokio::select! {
            () = self.interrupted.cancelled() => false,
            came = up.wait_for(|up| *up) => came.is_ok(),
            () = tokio::time::sleep(Duration::from_secs(180)) => false,
        }
    }

    pub(super) fn is_full(&self) -> bool {
        self.full.load(Ordering::SeqCst)
    }

    pub(super) fn set_full(&self, full: bool) {
        self.full.store(full, Ordering::SeqCst);
    }

    pub(super) fn is_over(&self) -> bool {
        self.over.is_cancelled() || self.interrupted.is_cancelled()
    }

    /// Lets time pass, unless the load is over.
    pub(super) async fn rest(&self, millis: u64) {
        tokio::select! {
            () = self.over.cancelled() => {}
            () = self.interrupted.cancelled() => {}
            () = tokio::time::sleep(Duration::from_millis(millis)) => {}
        }
    }

    pub(super) fn begins(&self, attack: &'static str) {
        let mut now = self.under_way.lock();
        now.push((attack, Instant::now()));
    }

    pub(super) fn ends(&self, attack: &'static str) {
        let mut now = self.under_way.lock();
        if let Some(at) = now.iter().position(|(name, _)| *name == attack) {
            now.remove(at);
        }
    }

    pub(super) fn attacks_under_way(&self) -> String {
        let now = self.under_way.lock();
        let names: Vec<String> = now
            .iter()
            .map(|(name, since)| format!("{name} (for {:.0} s)", since.elapsed().as_secs_f64()))
            .collect();
        match names.is_empty() {
            true => "no attack".to_owned(),
            false => names.join(", "),
        }
    }

    /// Searches an answer for words of others.
    pub(super) fn search(&self, project: usize, what: &str, answer: &[u8]) {
        self.tally.lock().searched += 1;
        if let Some(owner) = self.canaries.strange(project, answer) {
            let words = format!(
                "{} was answered a word of {}: {what}",
                PROJECTS[project], PROJECTS[owner]
            );
            self.tally.found("words crossed projects", what, words);
        }
    }

    /// Makes the projects, their keys, providers, prices, budgets and namespaces on the data of now.
    pub(super) async fn settle(&self) -> Result<()> {
        let admin = Client::new(&self.server.url(), Some(self.server.admin_key()?))?;
        let mut projects = Vec::new();
        for (index, name) in PROJECTS.into_iter().enumerate() {
            admin.post("/v1/projects", &json!({"name": name})).await?;
            let made = admin
                .post("/v1/keys", &json!({"name": "soak", "project": name}))
                .await?;
            let secret = |made: &serde_json::Value| made["secret"].as_str().unwrap_or_default().to_owned();
            let key = secret(&made);
            let wanted = json!({"name": "soak", "project": name, "role": "approver"});
            let approver_key = secret(&admin.post("/v1/keys", &wanted).await?);
            let own = Client::new(&self.server.url(), Some(key.clone()))?;
            for (provider, kind, base) in [
                ("open", "openai", format!("{}/v1", self.provider)),
                ("claude", "anthropic", self.provider.clone()),
            ] {
                let serves: &[&str] = if provider == "open" { &["scripted-*"] } else { &[] };
                let body = json!({
                    "kind": kind, "base_url": base, "serves": serves, "responses": true,
                    "key": format!("{PROVIDER_KEY}{}", self.canaries.of(index)),
                });
                let path = format!("/v1/gateway/providers/{provider}");
                own.put(&path, &body)
                    .await
                    .doing("the scripted provider was refused")?;
            }
            let made = own.post("/v1/gateway/keys", &json!({"name": "soak"})).await?;
            let project = Project {
                index,
                name,
                key,
                approver_key,
                model_key: secret(&made),
                namespace: format!("{name}-space"),
            };
            for model in [project.echo(), project.streams(), "scripted-full".to_owned()] {
                let body = json!({"input": PRICE, "output": PRICE});
                own.put(&format!("/v1/gateway/prices/{model}"), &body).await?;
            }
            // Reached by nobody who behaves; and one that makes every call reserve and settle twice.
            own.put("/v1/gateway/budgets/all", &json!({"limit": "1000000"}))
                .await?;
            own.put(
                "/v1/gateway/budgets/keys",
                &json!({"limit": "1000000", "scope": "key"}),
            )
            .await?;
            let mut wire = WorkflowClient::open(&self.server.workflows_url(), Some(&project.key)).await?;
            let request = service::RegisterNamespaceRequest {
                namespace: project.namespace.clone(),
                description: self.canaries.of(index).to_owned(),
                workflow_execution_retention_period: Some(prost_wkt_types::Duration {
                    seconds: 24 * 3600,
                    nanos: 0,
                }),
                ..Default::default()
            };
            wire.call::<_, service::RegisterNamespaceResponse>("RegisterNamespace", request)
                .await?;
            projects.push(project);
        }
        *self.session.write() = Arc::new(Session { projects });
        Ok(())
    }

    /// As the operator.
    pub(super) fn admin(&self) -> Result<Client> {
        Client::new(&self.server.url(), Some(self.server.admin_key()?))
    }

    /// As a project.
    pub(super) fn client(&self, index: usize) -> Result<Client> {
        let project = self.project(index);
        let project = project.ok_or_else(|| Error::new("there is no such project"))?;
        Client::new(&self.server.url(), Some(project.key))
    }

    /// Frees what nothing refers to.
    pub(super) async fn collect(&self) -> Result<()> {
        let admin = self.admin()?;
        admin.json(admin.request(Method::POST, "/v1/gc")).await.map(drop)
    }
}
