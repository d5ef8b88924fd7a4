//! Builds of templates that nobody stays connected for: asked for, begun, and watched by whoever asks how they go.
//!
//! ```text
//!   open ──> Waiting ── begin ──> Building ──┬──> Ready
//!                                            └──> Failed
//! ```
//!
//! What must hold:
//! - A job is begun once, and whatever becomes of its task, it comes to an end that can be asked for.
//! - A job is its project's.
//! - What is kept is bounded: of one log, of one project's jobs, and of all together. What was opened first goes first, and what is
//!   going on goes last.
//! - They live in the server's memory. One that was going on when it stopped has to be asked for again, and finds its finished steps
//!   in the cache.

use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::sync::Arc;

use atoll_identity::Caller;
use atoll_types::{Code, Fault, Resources, TemplateId, Timestamp};
use futures_util::{Stream, StreamExt as _};
use tokio::sync::mpsc;

use crate::{BuildEvent, BuildTemplate, Sandboxes};

/// How much is kept.
#[derive(Debug, Clone, Copy)]
struct Bounds {
    jobs: usize,
    of_a_project: usize,
    /// Of all logs together.
    bytes: usize,
    /// Of one log.
    log_bytes: usize,
}

const BOUNDS: Bounds = Bounds {
    jobs: 1000,
    of_a_project: 250,
    bytes: 128 << 20,
    log_bytes: 8 << 20,
};
/// What a line takes beside its text.
const LINE_BYTES: usize = size_of::<BuildLine>();

/// A build to be opened.
#[derive(Debug, Clone)]
pub struct OpenBuild {
    /// By which it is found again; nobody may guess it.
    pub id: String,
    pub caller: Caller,
    /// What the template is to be called.
    pub name: String,
    /// And what else.
    pub also: Vec<String>,
    /// What its sandboxes get, unless they say so themselves.
    pub resources: Resources,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BuildState {
    Waiting,
    Building,
    Ready,
    Failed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LineLevel {
    Info,
    Error,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BuildLine {
    pub at: Timestamp,
    pub level: LineLevel,
    pub text: String,
}

/// Why a build failed, and in which step, as whoever asked for it counts them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepFailed {
    pub message: String,
    pub step: Option<String>,
}

/// A build is begun once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BegunAlready;

/// How a build goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BuildStatus {
    pub state: BuildState,
    /// A part of what it said.
    pub lines: Vec<BuildLine>,
    pub failure: Option<StepFailed>,
}

#[derive(Debug)]
pub struct BuildJob {
    request: OpenBuild,
    opened: Timestamp,
    bounds: Bounds,
    progress: Mutex<Progress>,
}

#[derive(Debug)]
struct Progress {
    state: BuildState,
    lines: Vec<BuildLine>,
    bytes: usize,
    failure: Option<StepFailed>,
    /// What came of it.
    made: Option<TemplateId>,
}

/// The builds of this server. Cheap to clone; every clone is the same.
#[derive(Debug, Clone)]
pub struct BuildJobs {
    service: Sandboxes,
    all: Arc<Mutex<Jobs>>,
}

#[derive(Debug)]
struct Jobs {
    bounds: Bounds,
    by_id: HashMap<String, Arc<BuildJob>>,
}

impl BuildJobs {
    pub fn new(service: Sandboxes) -> Self {
        let jobs = Jobs {
            bounds: BOUNDS,
            by_id: HashMap::new(),
        };
        Self {
            service,
            all: Arc::new(Mutex::new(jobs)),
        }
    }

    fn all(&self) -> MutexGuard<'_, Jobs> {
        self.all.lock()
    }

    /// Remembers what is to be built, until somebody begins it.
    pub fn open(&self, request: OpenBuild) {
        self.all().open(request, self.service.now());
    }

    /// One of the caller's project.
    pub fn find(&self, caller: &Caller, id: &str) -> Option<Arc<BuildJob>> {
        let found = self.all().by_id.get(id).cloned();
        found.filter(|job| job.request.caller.project() == caller.project())
    }

    /// Does `work` in a task of its own; what it returns is how the build ends.
    pub fn begin<W>(&self, job: &Arc<BuildJob>, work: W) -> Result<(), BegunAlready>
    where
        W: Future<Output = Result<(), StepFailed>> + Send + 'static,
    {
        let clock = self.service.clone();
        job.begin(work, move || clock.now())
    }

    /// Builds a template, and keeps what is said meanwhile.
    pub async fn build(&self, job: &BuildJob, request: BuildTemplate) -> Result<(), Fault> {
        let events = self.service.build_template(&job.request.caller, request).await?;
        job.follow(events, || self.service.now()).await
    }

    /// Gives what was built its other names; if it starts something, has that running for those who come.
    pub async fn finish(&self, job: &BuildJob, starts: bool) -> Result<(), Fault> {
        let OpenBuild {
            caller,
            name,
            also,
            resources,
            ..
        } = &job.request;
        if starts {
            let (said, mut lines) = mpsc::channel(256);
            let kept = self
                .service
                .keep_running(caller, name, (*resources).into(), None, Some(said));
            let log = async {
                while let Some(line) = lines.recv().await {
                    job.log(LineLevel::Info, line, self.service.now());
                }
            };
            match tokio::join!(kept, log).0 {
                Ok(_) => {}
                // Where memory cannot be kept, each sandbox starts it.
                Err(fault) if fault.code == Code::MemoryNotSupported => {}
                Err(fault) => return Err(fault),
            }
        }
        for other in also {
            self.service.name_template(caller, name, other).await?;
        }
        let made = self.service.template(caller, name).await?;
        job.progress().made = Some(made.manifest.id);
        Ok(())
    }

    /// The last build of the caller's project that a template came of, of those that were for such a name: the same steps make
    /// the same template, whatever it is to be called.
    pub fn that_made(
        &self,
        caller: &Caller,
        template: &TemplateId,
        is_name: impl Fn(&str) -> bool,
    ) -> Option<String> {
        let all = self.all();
        let own = all.by_id.values().filter(|job| {
            job.request.caller.project() == caller.project()
                && is_name(&job.request.name)
                && job.progress().made.as_ref() == Some(template)
        });
        own.max_by_key(|job| job.opened).map(|job| job.request.id.clone())
    }
}

impl Jobs {
    fn open(&mut self, request: OpenBuild, now: Timestamp) {
        self.make_room(&request.caller);
        let job = BuildJob {
            opened: now,
            bounds: self.bounds,
            progress: Mutex::new(Progress {
                state: BuildState::Waiting,
                lines: Vec::new(),
                bytes: 0,
                failure: None,
                made: None,
            }),
            request,
        };
        self.by_id.insert(job.request.id.clone(), Arc::new(job));
    }

    /// For one more of a caller's project.
    fn make_room(&mut self, caller: &Caller) {
        loop {
            let is_own = |job: &&Arc<BuildJob>| job.request.caller.project() == caller.project();
            let own = self.by_id.values().filter(is_own).count();
            let bytes: usize = self.by_id.values().map(|job| job.progress().bytes).sum();
            let whose: &dyn Fn(&&Arc<BuildJob>) -> bool = if own >= self.bounds.of_a_project {
                &is_own
            } else if self.by_id.len() >= self.bounds.jobs || bytes > self.bounds.bytes {
                &|_| true
            } else {
                return;
            };
            let oldest = self
                .by_id
                .values()
                .filter(whose)
                .min_by_key(|job| job.precedence());
            let Some(id) = oldest.map(|job| job.request.id.clone()) else {
                return;
            };
            self.by_id.remove(&id);
        }
    }
}

impl BuildJob {
    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock()
    }

    pub fn request(&self) -> &OpenBuild {
        &self.request
    }

    /// Who goes first when there is no room.
    fn precedence(&self) -> (bool, Timestamp) {
        (self.progress().state == BuildState::Building, self.opened)
    }

    /// The template that came of it.
    pub fn made(&self) -> Option<TemplateId> {
        self.progress().made.clone()
    }

    /// How it goes, with at most `limit` lines from the `offset`th on.
    pub fn status(&self, offset: usize, limit: usize) -> BuildStatus {
        let progress = self.progress();
        let lines = progress.lines.iter().skip(offset).take(limit);
        BuildStatus {
            state: progress.state,
            lines: lines.cloned().collect(),
            failure: progress.failure.clone(),
        }
    }

    fn begin<W>(
        self: &Arc<Self>,
        work: W,
        now: impl Fn() -> Timestamp + Send + Sync + 'static,
    ) -> Result<(), BegunAlready>
    where
        W: Future<Output = Result<(), StepFailed>> + Send + 'static,
    {
        {
            let mut progress = self.progress();
            if progress.state != BuildState::Waiting {
                return Err(BegunAlready);
            }
            progress.state = BuildState::Building;
        }
        let mut ending = Ending {
            job: Arc::clone(self),
            now,
            outcome: None,
        };
        tokio::spawn(async move {
            ending.outcome = Some(work.await);
            drop(ending);
        });
        Ok(())
    }

    async fn follow(
        &self,
        mut events: impl Stream<Item = Result<BuildEvent, Fault>> + Unpin,
        now: impl Fn() -> Timestamp,
    ) -> Result<(), Fault> {
        while let Some(event) = events.next().await {
            match event? {
                BuildEvent::Log(text) => self.log(LineLevel::Info, text, now()),
                BuildEvent::Progress { .. } => {}
                BuildEvent::Done(_) => return Ok(()),
            }
        }
        Err(Fault::internal("the build was interrupted"))
    }

    fn log(&self, level: LineLevel, text: String, at: Timestamp) {
        let mut progress = self.progress();
        let most = self.bounds.log_bytes;
        let weight = LINE_BYTES + text.len();
        let text = match progress.bytes {
            // What went wrong is always told.
            bytes if bytes + weight <= most || level == LineLevel::Error => text,
            bytes if bytes <= most => {
                // Nothing but errors comes after it.
                progress.bytes = most + 1;
                "the log is longer than what is kept of it; the rest is left out".to_owned()
            }
            _ => return,
        };
        progress.bytes += LINE_BYTES + text.len();
        progress.lines.push(BuildLine { at, level, text });
    }

    fn end(&self, outcome: Result<(), StepFailed>, at: Timestamp) {
        let (level, text) = match &outcome {
            Ok(()) => (LineLevel::Info, "Build finished"),
            Err(failure) => (LineLevel::Error, failure.message.as_str()),
        };
        self.log(level, text.to_owned(), at);
        let mut progress = self.progress();
        progress.state = match outcome {
            Ok(()) => BuildState::Ready,
            Err(_) => BuildState::Failed,
        };
        progress.failure = outcome.err();
    }
}

/// Ends a job when its task ends, however that is.
struct Ending<N: Fn() -> Timestamp> {
    job: Arc<BuildJob>,
    now: N,
    outcome: Option<Result<(), StepFailed>>,
}

impl<N: Fn() -> Timestamp> Drop for Ending<N> {
    fn drop(&mut self) {
        let interrupted = || {
            Err(StepFailed {
                message: "the build was interrupted".to_owned(),
                step: None,
            })
        };
        let outcome = self.outcome.take().unwrap_or_else(interrupted);
        self.job.end(outcome, (self.now)());
    }
}

#[cfg(test)]
mod tests {
    use futures_util::stream;

    use super::*;

    const SMALL: Bounds = Bounds {
        jobs: 4,
        of_a_project: 3,
        bytes: 10_000,
        log_bytes: 1000,
    };

    fn jobs() -> Jobs {
        Jobs {
            bounds: SMALL,
            by_id: HashMap::new(),
        }
    }

    fn open(jobs: &mut Jobs, id: &str, caller: &Caller, at: i64) -> Arc<BuildJob> {
        let request = OpenBuild {
            id: id.to_owned(),
            caller: caller.clone(),
            name: "t".into(),
            also: Vec::new(),
            resources: Resources::default(),
        };
        jobs.open(request, Timestamp(at));
        Arc::clone(&jobs.by_id[id])
    }

    fn ids(jobs: &Jobs) -> Vec<&str> {
        let mut ids: Vec<&str> = jobs.by_id.keys().map(String::as_str).collect();
        ids.sort_unstable();
        ids
    }

    fn caller(number: u8) -> Caller {
        Caller::for_test(atoll_types::ProjectId::from_entropy([number; 20]))
    }

    fn log(job: &BuildJob, text: &str) {
        job.log(LineLevel::Info, text.to_owned(), Timestamp(1));
    }

    /// Waits until a job has ended.
    async fn ended(job: &BuildJob) -> BuildStatus {
        loop {
            let status = job.status(0, 100);
            if !matches!(status.state, BuildState::Waiting | BuildState::Building) {
                return status;
            }
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn a_job_is_begun_once_and_says_how_it_ended() {
        let mut jobs = jobs();
        let job = open(&mut jobs, "a", &caller(1), 1);
        assert_eq!(job.status(0, 9).state, BuildState::Waiting);
        let (go, gone) = tokio::sync::oneshot::channel();
        let logging = Arc::clone(&job);
        let work = async move {
            log(&logging, "one");
            log(&logging, "two");
            gone.await.unwrap()
        };
        job.begin(work, || Timestamp(5)).unwrap();
        assert_eq!(job.status(0, 9).state, BuildState::Building);
        let again = job.begin(async { Ok(()) }, || Timestamp(5));
        assert_eq!(again, Err(BegunAlready));
        let failed = StepFailed {
            message: "no such file".into(),
            step: Some("2".into()),
        };
        go.send(Err(failed.clone())).unwrap();
        let status = ended(&job).await;
        assert_eq!((status.state, status.failure), (BuildState::Failed, Some(failed)));
        let texts: Vec<&str> = status.lines.iter().map(|line| line.text.as_str()).collect();
        assert_eq!(texts, ["one", "two", "no such file"]);
        let page = job.status(1, 1).lines;
        assert_eq!((page.len(), page[0].text.as_str()), (1, "two"));
    }

    #[tokio::test]
    async fn a_task_that_breaks_off_ends_its_job() {
        let mut jobs = jobs();
        let job = open(&mut jobs, "a", &caller(1), 1);
        job.begin(async { panic!("by mistake") }, || Timestamp(5))
            .unwrap();
        let status = ended(&job).await;
        assert_eq!(status.state, BuildState::Failed);
        assert!(status.failure.unwrap().message.contains("interrupted"));
    }

    #[tokio::test]
    async fn what_a_build_says_is_kept_and_a_stream_that_breaks_off_is_a_failure() {
        let mut jobs = jobs();
        let job = open(&mut jobs, "a", &caller(1), 1);
        let events = stream::iter([Ok(BuildEvent::Log("one".into()))]);
        let fault = job.follow(events, || Timestamp(7)).await.unwrap_err();
        assert_eq!(fault.code, Code::Internal);
        let lines = job.status(0, 9).lines;
        let expected = BuildLine {
            at: Timestamp(7),
            level: LineLevel::Info,
            text: "one".into(),
        };
        assert_eq!(lines, [expected]);
    }

    #[test]
    fn a_log_is_cut_and_says_so_but_tells_what_went_wrong() {
        let mut jobs = jobs();
        let job = open(&mut jobs, "a", &caller(1), 1);
        for _ in 0..1000 {
            log(&job, "x");
        }
        job.end(
            Err(StepFailed {
                message: "no such file".into(),
                step: None,
            }),
            Timestamp(2),
        );
        let lines = job.status(0, 9999).lines;
        assert!(lines.len() < 50, "{}", lines.len());
        let last: Vec<&str> = lines[lines.len() - 2..]
            .iter()
            .map(|line| line.text.as_str())
            .collect();
        assert!(last[0].contains("left out"), "{last:?}");
        assert_eq!(last[1], "no such file");
    }

    #[test]
    fn the_oldest_go_first_and_those_that_are_going_on_last() {
        let mut jobs = jobs();
        let (one, two) = (caller(1), caller(2));
        let first = open(&mut jobs, "a", &one, 1);
        first.progress().state = BuildState::Building;
        open(&mut jobs, "b", &one, 2);
        open(&mut jobs, "c", &one, 3);
        // As many as a project may have: its own oldest that is not going on.
        open(&mut jobs, "d", &one, 4);
        assert_eq!(ids(&jobs), ["a", "c", "d"]);
        open(&mut jobs, "e", &two, 5);
        // As many as there may be.
        open(&mut jobs, "f", &two, 6);
        assert_eq!(ids(&jobs), ["a", "d", "e", "f"]);
        // Too many bytes together.
        let talks = open(&mut jobs, "g", &two, 7);
        talks.progress().bytes = SMALL.bytes + 1;
        open(&mut jobs, "h", &one, 8);
        assert_eq!(ids(&jobs), ["a", "h"], "until what is too long has gone");
    }
}
