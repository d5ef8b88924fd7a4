//! A caller of one project: asks, waits out kills and full disks, notes how long it took, and looks for words of others in
//! every answer.

use std::sync::Arc;
use std::time::{Duration, Instant};

use atoll_client::WorkflowClient;
use atoll_client::output::Error;
use bytes::Bytes;
use prost::Message;
use reqwest::{Method, RequestBuilder};
use serde_json::Value;

use super::random::Random;
use super::world::{Project, World};

/// Longer than anything that behaves takes, on a machine that is busy with attacks.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long a caller asks again because of kills and full disks.
const AGAIN_FOR: Duration = Duration::from_secs(240);

/// Why a story goes no further. What there was to say was noted.
#[derive(Debug)]
pub(super) enum End {
    /// The run is over, or the data were lost with all that was on them.
    Over,
    Failed,
}

pub(super) type Told<T> = std::result::Result<T, End>;

/// What came back.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) status: u16,
    pub(super) body: Bytes,
}

impl Answer {
    pub(super) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }

    pub(super) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub(super) fn is_success(&self) -> bool {
        (200..300).contains(&self.status)
    }
}

#[derive(Debug, Clone)]
pub(super) struct Caller {
    pub(super) world: Arc<World>,
    pub(super) project: Project,
    http: reqwest::Client,
}

impl Caller {
    /// `None`: the projects are not there.
    pub(super) fn new(world: &Arc<World>, index: usize) -> Option<Self> {
        let http = reqwest::Client::builder()
            .no_proxy()
            .tcp_nodelay(true)
            .connect_timeout(Duration::from_secs(20))
            .timeout(PATIENCE)
            .build()
            .ok()?;
        Some(Self {
            world: Arc::clone(world),
            project: world.project(index)?,
            http,
        })
    }

    pub(super) fn canary(&self) -> &str {
        self.world.canaries.of(self.project.index)
    }

    /// A request with the project's key.
    pub(super) fn request(&self, method: Method, path: &str) -> RequestBuilder {
        self.bare(method, path).bearer_auth(&self.project.key)
    }

    /// A request without one.
    pub(super) fn bare(&self, method: Method, path: &str) -> RequestBuilder {
        let url = format!("{}{path}", self.world.server.url());
        self.http.request(method, url)
    }

    pub(super) fn get(&self, path: &str) -> RequestBuilder {
        self.request(Method::GET, path)
    }

    pub(super) fn post(&self, path: &str, body: &Value) -> RequestBuilder {
        self.request(Method::POST, path).json(body)
    }

    pub(super) fn put(&self, path: &str, body: &Value) -> RequestBuilder {
        self.request(Method::PUT, path).json(body)
    }

    pub(super) fn delete(&self, path: &str) -> RequestBuilder {
        self.request(Method::DELETE, path)
    }

    /// Asks as somebody honest: a success is owed. A request that was cut by a kill is asked again, and is then also answered
    /// well by `again`: what was asked before may have been done.
    pub(super) async fn ask(
        &self,
        kind: &'static str,
        request: RequestBuilder,
        again: &[u16],
    ) -> Told<Answer> {
        let (world, tally) = (&self.world, &self.world.tally);
        let began = Instant::now();
        let mut attempt = 0;
        loop {
            attempt += 1;
            let Some(this) = request.try_clone() else {
                tally.failed(kind, "the request cannot be repeated".to_owned());
                return Err(End::Failed);
            };
            if !world.is_up() && !world.until_up().await {
                return Err(End::Over);
            }
            let (epoch, full, asked) = (world.epoch(), world.is_full(), Instant::now());
            let about = about(&this);
            let answer = self.send(this).await;
            let full = full || world.is_full();
            let late = began.elapsed() > AGAIN_FOR;
            if self.data_are_others() {
                return Err(End::Over);
            }
            match answer {
                Ok(answer) if answer.is_success() || attempt > 1 && again.contains(&answer.status) => {
                    world.search(self.project.index, kind, &answer.body);
                    let took = (attempt == 1 && !full).then(|| asked.elapsed());
                    let beside = world.beside.load(std::sync::atomic::Ordering::Relaxed);
                    tally.answered(kind, took, beside);
                    return Ok(answer);
                }
                // What is under way when the server stops may be told so.
                Ok(_) | Err(_) if world.epoch() != epoch && !late => {
                    tally.cut(kind);
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                Ok(answer) if full && (answer.status >= 500 || answer.status == 429) && !late => {
                    tally.full(kind);
                    world.rest(200).await;
                }
                Ok(answer) => {
                    world.search(self.project.index, kind, &answer.body);
                    if world.interrupted.is_cancelled() {
                        return Err(End::Over);
                    }
                    let words = format!(
                        "{about}: {} {}{}",
                        answer.status,
                        answer.text(),
                        self.moment(attempt, asked)
                    );
                    tally.failed(kind, words);
                    return Err(End::Failed);
                }
                Err(error) if full && !late => {
                    tally.full(kind);
                    tracing::debug!(%error, "while the disk was full");
                    world.rest(200).await;
                }
                Err(error) => {
                    if world.interrupted.is_cancelled() {
                        return Err(End::Over);
                    }
                    tally.failed(kind, format!("{about}: {error}{}", self.moment(attempt, asked)));
                    return Err(End::Failed);
                }
            }
            if world.interrupted.is_cancelled() {
                return Err(End::Over);
            }
        }
    }

    /// The circumstances of a failure.
    fn moment(&self, attempt: u32, asked: Instant) -> String {
        format!(
            " [{} after {:.1} s, attempt {attempt}, beside {}]",
            self.project.name,
            asked.elapsed().as_secs_f64(),
            self.world.attacks_under_way()
        )
    }

    /// Whether the server was given other data since.
    fn data_are_others(&self) -> bool {
        self.world
            .project(self.project.index)
            .is_none_or(|now| now.key != self.project.key)
    }

    /// Asks once, for whatever comes; what comes is searched.
    pub(super) async fn attempt(&self, what: &str, request: RequestBuilder) -> Option<Answer> {
        let answer = self.send(request).await.ok()?;
        self.world.search(self.project.index, what, &answer.body);
        Some(answer)
    }

    async fn send(&self, request: RequestBuilder) -> std::result::Result<Answer, String> {
        let answer = request.send().await.map_err(|error| chain(&error))?;
        let status = answer.status().as_u16();
        let body = answer.bytes().await.map_err(|error| chain(&error))?;
        Ok(Answer { status, body })
    }

    /// Notes that an honest answer was not what it should have been.
    pub(super) fn wrong(&self, kind: &'static str, words: impl Into<String>) -> End {
        if self.data_are_others() || self.world.interrupted.is_cancelled() {
            return End::Over;
        }
        let words = format!("{} [{}]", words.into(), self.project.name);
        self.world.tally.failed(kind, words);
        End::Failed
    }

    /// A connection of the project to where workflows are.
    pub(super) async fn wire(&self) -> Option<WorkflowClient> {
        let url = self.world.server.workflows_url();
        WorkflowClient::open(&url, Some(&self.project.key)).await.ok()
    }

    /// Calls a method of workflows as [`Caller::ask`] does. `again` names codes that are well where it was asked before.
    pub(super) async fn call<Q, A>(
        &self,
        kind: &'static str,
        method: &'static str,
        message: Q,
        again: &[&str],
    ) -> Told<A>
    where
        Q: Message + Clone + Send + Sync + 'static,
        A: Message + Default + Send + Sync + 'static,
    {
        let (world, tally) = (&self.world, &self.world.tally);
        let began = Instant::now();
        let mut attempt = 0;
        loop {
            attempt += 1;
            if !world.is_up() && !world.until_up().await {
                return Err(End::Over);
            }
            let (epoch, full, asked) = (world.epoch(), world.is_full(), Instant::now());
            let answer = match self.wire().await {
                Some(mut wire) => tokio::time::timeout(PATIENCE, wire.call::<Q, A>(method, message.clone()))
                    .await
                    .unwrap_or_else(|_| Err(Error::new("it took too long"))),
                None => Err(Error::new("cannot connect")),
            };
            let full = full || world.is_full();
            let late = began.elapsed() > AGAIN_FOR;
            if self.data_are_others() {
                return Err(End::Over);
            }
            match answer {
                Ok(answer) => {
                    world.search(self.project.index, kind, &answer.encode_to_vec());
                    let took = (attempt == 1 && !full).then(|| asked.elapsed());
                    let beside = world.beside.load(std::sync::atomic::Ordering::Relaxed);
                    tally.answered(kind, took, beside);
                    return Ok(answer);
                }
                Err(error) if attempt > 1 && again.contains(&error.code.as_deref().unwrap_or_default()) => {
                    tally.answered(kind, None, false);
                    return Ok(A::default());
                }
                Err(_) if world.epoch() != epoch && !late => {
                    tally.cut(kind);
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                Err(_) if full && !late => {
                    tally.full(kind);
                    world.rest(200).await;
                }
                Err(error) => {
                    if world.interrupted.is_cancelled() {
                        return Err(End::Over);
                    }
                    let moment = self.moment(attempt, asked);
                    tally.failed(kind, format!("{error} {:?}{moment}", error.code));
                    return Err(End::Failed);
                }
            }
            if world.interrupted.is_cancelled() {
                return Err(End::Over);
            }
        }
    }

    pub(super) fn random(&self, actor: &str) -> Random {
        Random::of(self.world.seed, &format!("{}/{actor}", self.project.name))
    }
}

/// Method and path of a request, for a note about it.
fn about(request: &RequestBuilder) -> String {
    let built = request.try_clone().and_then(|request| request.build().ok());
    built.map_or_else(String::new, |request| {
        format!("{} {}", request.method(), request.url().path())
    })
}

/// An error with what caused it.
fn chain(error: &reqwest::Error) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}
