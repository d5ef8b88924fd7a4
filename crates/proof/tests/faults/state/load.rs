//! A load of everything that changes state, by workers that remember what they were told.

use std::collections::BTreeMap;

use atoll_proof::random::Random;
use atoll_proof::{Client, Sandbox, Server, Tier, Value, json};
use reqwest::Method;

use super::{Alive, Counter, Kind, call};

/// What a sandbox was last acknowledged to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    Running,
    Paused(Kind),
    Stopped,
}

/// What was asked of a sandbox and not answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Doubt {
    Pause(Kind),
    Stop,
    Wake,
    Kill,
}

/// What a sandbox, or a snapshot of one, holds for sure.
#[derive(Debug, Clone, Default)]
pub(super) struct Content {
    pub(super) files: BTreeMap<String, String>,
    /// In its memory.
    pub(super) counter: Option<Counter>,
    /// It sees the volume.
    pub(super) volume: bool,
}

impl Content {
    fn as_kept(&self, kind: Kind) -> Self {
        Self {
            counter: self.counter.clone().filter(|_| kind == Kind::Memory),
            ..self.clone()
        }
    }
}

#[derive(Debug, Clone)]
pub(super) struct Known {
    pub(super) id: String,
    pub(super) state: State,
    pub(super) doubt: Option<Doubt>,
    pub(super) content: Content,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Promise {
    /// Asked for.
    Maybe,
    Kept,
    /// Asked to be deleted.
    Leaving,
}

#[derive(Debug, Clone)]
pub(super) struct Snapshot {
    pub(super) name: String,
    pub(super) promise: Promise,
    pub(super) content: Content,
    /// It was looked into since it was taken.
    pub(super) checked: bool,
}

pub(super) struct Worker {
    number: usize,
    step: usize,
    random: Random,
    tier: Tier,
    create: Value,
    pub(super) client: Client,
    pub(super) sandboxes: Vec<Known>,
    pub(super) snapshots: Vec<Snapshot>,
    /// Label of copies that were asked for and not acknowledged, and how many.
    pub(super) fork: Option<(String, usize)>,
    /// Sandboxes whose end was acknowledged, snapshots whose deletion was.
    pub(super) ended: Vec<String>,
    pub(super) forgotten: Vec<String>,
    pub(super) volume_files: BTreeMap<String, String>,
    /// Acknowledged operations.
    pub(super) told: BTreeMap<&'static str, usize>,
}

pub(super) const VOLUME: &str = "shared";

impl Worker {
    pub(super) fn new(number: usize, server: &Server, random: Random) -> Self {
        Self {
            number,
            step: 0,
            random,
            tier: server.tier,
            // Long enough for the longest run.
            create: server.request(&json!({"timeout_ms": 6 * 3600 * 1000, "labels": {"fork": "none"}})),
            client: server.client().clone(),
            sandboxes: Vec::new(),
            snapshots: Vec::new(),
            fork: None,
            ended: Vec::new(),
            forgotten: Vec::new(),
            volume_files: BTreeMap::new(),
            told: BTreeMap::new(),
        }
    }

    /// Works until the server is gone.
    pub(super) async fn work(mut self) -> Self {
        while self.one().await.is_ok() {
            self.step += 1;
        }
        self.step += 1;
        self
    }

    pub(super) fn chance(&mut self, one_in: u64) -> bool {
        self.random.below(one_in) == 0
    }

    fn name(&self, what: &str) -> String {
        format!("{what}-{}-{}", self.number, self.step)
    }

    fn acknowledged(&mut self, what: &'static str) {
        *self.told.entry(what).or_default() += 1;
    }

    pub(super) fn sandbox(&self, id: &str) -> Sandbox {
        Sandbox {
            client: self.client.clone(),
            id: id.to_owned(),
        }
    }

    fn pick(&mut self, from: usize) -> usize {
        usize::try_from(self.random.below(from as u64)).unwrap()
    }

    async fn post(&self, at: usize, word: &str, body: &Value, status: u16) -> Alive<Value> {
        let sandbox = self.sandbox(&self.sandboxes[at].id);
        let request = self.client.request(Method::POST, &sandbox.path(word)).json(body);
        call(&self.client, request, status).await
    }

    async fn one(&mut self) -> Alive<()> {
        let count = self.sandboxes.len();
        if count == 0 || (count < 3 && self.chance(5)) {
            return self.create().await;
        }
        if self.snapshots.len() > 1 && self.chance(4) {
            return self.forget().await;
        }
        if self.chance(25) {
            return self.collect().await;
        }
        let at = self.pick(count);
        let known = &self.sandboxes[at];
        let (state, volume) = (known.state, known.content.volume);
        match (state, self.random.below(20)) {
            (State::Running, 0..=1) => self.exec(at).await,
            (State::Running, 2..=5) => self.write(at).await,
            (State::Running, 6..=9) => self.pause(at).await,
            (State::Running, 10..=11) => self.stop(at).await,
            (State::Running, 12..=14) if count < 5 => self.fork(at).await,
            (State::Running, 15..=17) if volume => self.write_volume(at).await,
            (State::Running, 15..=18) | (State::Paused(_), 0..=1) | (State::Stopped, 0) => {
                self.keep(at).await
            }
            (State::Paused(Kind::Memory), 2) if count < 5 => self.fork(at).await,
            (_, 19) => self.kill(at).await,
            (State::Running, _) => self.exec(at).await,
            (State::Paused(_) | State::Stopped, _) => self.wake(at).await,
        }
    }

    async fn create(&mut self) -> Alive<()> {
        let mut body = self.create.clone();
        let mut content = Content::default();
        let from = self.pick(3);
        let source = self
            .snapshots
            .get(from)
            .filter(|kept| kept.promise == Promise::Kept);
        match source.cloned() {
            Some(kept) => {
                body["template"] = json!(kept.name);
                content = kept.content;
            }
            None => content.volume = self.chance(3),
        }
        if content.volume {
            body["volumes"] = json!([{"volume": VOLUME, "path": "/data"}]);
        }
        let request = self.client.request(Method::POST, "/v1/sandboxes").json(&body);
        let created = call(&self.client, request, 201).await?;
        self.acknowledged("create");
        let sandbox = Sandbox::of(&self.client, &created);
        let counts = content.counter.is_some();
        self.sandboxes.push(Known {
            id: sandbox.id.clone(),
            state: State::Running,
            doubt: None,
            content,
        });
        if !counts && !self.chance(3) {
            let counter = Counter::try_start(&sandbox, &self.name("counter")).await?;
            let at = self.sandboxes.len() - 1;
            self.sandboxes[at].content.counter = Some(counter);
        }
        Ok(())
    }

    async fn exec(&mut self, at: usize) -> Alive<()> {
        let sandbox = self.sandbox(&self.sandboxes[at].id);
        if let Some(mut counter) = self.sandboxes[at].content.counter.clone() {
            counter.try_goes_on(&sandbox).await?;
            self.sandboxes[at].content.counter = Some(counter);
        }
        let done = self.post(at, "/exec", &json!({"cmd": "echo hi"}), 200).await?;
        assert_eq!(done["stdout"], "hi\n", "{done}");
        self.acknowledged("exec");
        Ok(())
    }

    async fn put(&mut self, at: usize, path: &str) -> Alive<String> {
        let content =
            format!("{} {}\n", self.name("content"), self.random.next()).repeat(1 + self.pick(4000));
        let sandbox = self.sandbox(&self.sandboxes[at].id);
        let request = self.client.request(Method::PUT, &sandbox.path("/files/content"));
        let request = request.query(&[("path", path)]).body(content.clone());
        call(&self.client, request, 200).await?;
        Ok(content)
    }

    async fn write(&mut self, at: usize) -> Alive<()> {
        let path = format!("/home/user/{}", self.name("file"));
        let content = self.put(at, &path).await?;
        self.sandboxes[at].content.files.insert(path, content);
        self.acknowledged("write");
        Ok(())
    }

    async fn write_volume(&mut self, at: usize) -> Alive<()> {
        let name = self.name("shared");
        let content = self.put(at, &format!("/data/{name}")).await?;
        self.volume_files.insert(name, content);
        self.acknowledged("volume write");
        Ok(())
    }

    async fn pause(&mut self, at: usize) -> Alive<()> {
        let kind = if self.chance(4) {
            Kind::Files
        } else {
            Kind::most(self.tier)
        };
        self.sandboxes[at].doubt = Some(Doubt::Pause(kind));
        let paused = self
            .post(at, "/pause", &json!({"kind": kind.name()}), 200)
            .await?;
        assert_eq!(
            (&paused["state"], &paused["saved"]["kind"]),
            (&json!("paused"), &json!(kind.name()))
        );
        self.sandboxes[at].rests(State::Paused(kind));
        self.acknowledged("pause");
        Ok(())
    }

    async fn stop(&mut self, at: usize) -> Alive<()> {
        self.sandboxes[at].doubt = Some(Doubt::Stop);
        let stopped = self.post(at, "/stop", &json!({}), 200).await?;
        assert_eq!(stopped["state"], "stopped");
        self.sandboxes[at].rests(State::Stopped);
        self.acknowledged("stop");
        Ok(())
    }

    async fn wake(&mut self, at: usize) -> Alive<()> {
        let word = match self.sandboxes[at].state {
            State::Stopped => "/start",
            State::Paused(_) | State::Running => "/resume",
        };
        self.sandboxes[at].doubt = Some(Doubt::Wake);
        let woken = self.post(at, word, &json!({}), 200).await?;
        assert_eq!(woken["state"], "running");
        self.sandboxes[at].runs();
        self.acknowledged(if word == "/start" { "start" } else { "resume" });
        Ok(())
    }

    async fn fork(&mut self, at: usize) -> Alive<()> {
        let kind = Kind::most(self.tier);
        let (tag, count) = (self.name("fork"), 1 + self.pick(3));
        self.fork = Some((tag.clone(), count));
        let body = json!({"count": count, "kind": kind.name(), "labels": {"fork": tag}});
        let copies = self.post(at, "/fork", &body, 201).await?;
        self.fork = None;
        let copies = copies["items"].as_array().unwrap();
        assert_eq!(copies.len(), count);
        for copy in copies {
            self.sandboxes.push(Known {
                id: copy["id"].as_str().unwrap().to_owned(),
                state: State::Running,
                doubt: None,
                content: self.sandboxes[at].content.as_kept(kind),
            });
        }
        self.acknowledged("fork");
        Ok(())
    }

    async fn keep(&mut self, at: usize) -> Alive<()> {
        let (state, files_only) = (self.sandboxes[at].state, self.chance(2));
        let kind = match state {
            State::Paused(kind) => kind,
            State::Stopped => Kind::Files,
            State::Running if files_only => Kind::Files,
            State::Running => Kind::most(self.tier),
        };
        let name = self.name("snapshot");
        self.snapshots.push(Snapshot {
            name: name.clone(),
            promise: Promise::Maybe,
            content: self.sandboxes[at].content.as_kept(kind),
            checked: false,
        });
        let body = json!({"name": name, "kind": kind.name()});
        let taken = self.post(at, "/snapshots", &body, 201).await?;
        assert_eq!(taken["kind"], kind.name());
        self.snapshots.last_mut().unwrap().promise = Promise::Kept;
        self.acknowledged("snapshot");
        Ok(())
    }

    async fn forget(&mut self) -> Alive<()> {
        let at = self.pick(self.snapshots.len());
        self.snapshots[at].promise = Promise::Leaving;
        let path = format!("/v1/snapshots/{}", self.snapshots[at].name);
        call(&self.client, self.client.request(Method::DELETE, &path), 204).await?;
        self.forgotten.push(self.snapshots.remove(at).name);
        self.acknowledged("snapshot delete");
        Ok(())
    }

    /// While others save and delete.
    async fn collect(&mut self) -> Alive<()> {
        let request = self.client.request(Method::POST, "/v1/gc").json(&json!({}));
        call(&self.client, request, 200).await?;
        self.acknowledged("gc");
        Ok(())
    }

    async fn kill(&mut self, at: usize) -> Alive<()> {
        self.sandboxes[at].doubt = Some(Doubt::Kill);
        let sandbox = self.sandbox(&self.sandboxes[at].id);
        call(
            &self.client,
            self.client.request(Method::DELETE, &sandbox.path("")),
            200,
        )
        .await?;
        self.ended.push(self.sandboxes.remove(at).id);
        self.acknowledged("kill");
        Ok(())
    }
}

impl Known {
    /// It rests: what is not in what was kept is gone.
    pub(super) fn rests(&mut self, state: State) {
        let kind = match state {
            State::Paused(kind) => kind,
            State::Stopped | State::Running => Kind::Files,
        };
        self.content = self.content.as_kept(kind);
        self.state = state;
        self.doubt = None;
    }

    pub(super) fn runs(&mut self) {
        self.state = State::Running;
        self.doubt = None;
    }

    /// Whether it may be found in this state, and then what it is.
    pub(super) fn explain(&self, row: &Value) -> Option<Found> {
        let kind = match row["saved"]["kind"].as_str() {
            Some("memory") => Kind::Memory,
            _ => Kind::Files,
        };
        let found = match row["state"].as_str()? {
            "running" => Found::Lives(State::Running),
            "paused" => Found::Lives(State::Paused(kind)),
            "stopped" => Found::Lives(State::Stopped),
            "deleted" => Found::Ended,
            _ => return None,
        };
        let possible = match self.doubt {
            None => None,
            Some(Doubt::Pause(kind)) => Some(Found::Lives(State::Paused(kind))),
            Some(Doubt::Stop) => Some(Found::Lives(State::Stopped)),
            Some(Doubt::Wake) => Some(Found::Lives(State::Running)),
            Some(Doubt::Kill) => Some(Found::Ended),
        };
        (found == Found::Lives(self.state) || Some(found) == possible).then_some(found)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Found {
    Lives(State),
    Ended,
}
