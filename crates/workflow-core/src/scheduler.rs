//! A schedule: when its times come, what is started, and what happens if the last one still runs.
//!
//! ```text
//!   times that have come ──┐
//!   trigger, backfill ─────┴─> waiting ── overlap policy ──> start (then running) ── ended ──> waiting again
//! ```
//!
//! Pure: the caller performs what [`Scheduler::tick`] returns and tells what became of it.
//!
//! What must hold: whatever a schedule contains, each call here ends after a bounded number of steps, see [`Work`]. One that
//! cannot be understood, because an older server has let it in, does nothing and can be looked at, paused and deleted.

use temporalio_protos::temporal::api::enums::v1::ScheduleOverlapPolicy as Overlap;
use temporalio_protos::temporal::api::schedule::v1 as proto;

use crate::refusal::Refusal;
use crate::schedule::{Next, Spec, SpecError};
use crate::search::Work;
use crate::time::{Nanos, nanos, seconds, stamp, unstamp};
use crate::words::enums::WorkflowExecutionStatus as Status;
use crate::words::{common, execution, failure};

const DEFAULT_CATCHUP: Nanos = seconds(365 * 24 * 3600);
const MIN_CATCHUP: Nanos = seconds(10);
const RECENT: usize = 10;
const FUTURE: usize = 10;
/// As many starts may wait; more are dropped and counted.
const MAX_WAITING: usize = 1_000;
/// As many of its workflows are waited for; those beyond run on their own.
const MAX_RUNNING: usize = 1_000;
/// As many ranges of time may be filled at once.
const MAX_BACKFILLS: usize = 100;
/// Steps for all that one call looks at: a few milliseconds. A thousand times of a usual spec take fewer.
const CALL: u32 = 120_000;
/// Steps for the times that a list shows of each schedule.
const GLANCE: u32 = 5_000;
/// A schedule without a time within reach is looked at again after this long, or later.
const LOOK_AGAIN: Nanos = seconds(60);

/// A schedule with everything that is remembered of it.
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct Scheduler {
    #[prost(string, tag = "1")]
    pub namespace: String,
    #[prost(string, tag = "2")]
    pub id: String,
    #[prost(message, optional, tag = "3")]
    pub schedule: Option<proto::Schedule>,
    #[prost(message, optional, tag = "4")]
    pub info: Option<proto::ScheduleInfo>,
    #[prost(message, optional, tag = "5")]
    pub memo: Option<common::Memo>,
    #[prost(message, optional, tag = "6")]
    pub search_attributes: Option<common::SearchAttributes>,
    /// Times up to here have been looked at.
    #[prost(int64, tag = "7")]
    pub looked_until: i64,
    #[prost(message, repeated, tag = "8")]
    pub waiting: Vec<Waiting>,
    /// Counts changes by people: what they read before they change it again.
    #[prost(int64, tag = "9")]
    pub revision: i64,
    #[prost(message, optional, tag = "10")]
    pub last_result: Option<common::Payloads>,
    #[prost(message, optional, tag = "11")]
    pub last_failure: Option<failure::Failure>,
    #[prost(string, tag = "12")]
    pub request_id: String,
    /// What whoever said last what it starts may do, and so what is started at most.
    #[prost(string, tag = "13")]
    pub rights: String,
}

/// A start that has its time, but not its turn.
#[derive(Clone, PartialEq, Eq, ::prost::Message)]
pub struct Waiting {
    #[prost(int64, tag = "1")]
    pub nominal: i64,
    #[prost(int64, tag = "2")]
    pub actual: i64,
    #[prost(int32, tag = "3")]
    pub overlap: i32,
    /// A person asked for it: it does not count against the limit, and a paused schedule does it too.
    #[prost(bool, tag = "4")]
    pub manual: bool,
}

/// When to call [`Scheduler::tick`] next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wake {
    /// A time of the schedule.
    Due(Nanos),
    /// No time was found before this one: look on from there.
    Look(Nanos),
    /// When somebody changes it.
    Never,
}

/// What the caller is to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Act {
    Start(Waiting),
    Cancel(common::WorkflowExecution),
    Terminate(common::WorkflowExecution),
}

impl Scheduler {
    pub fn new(namespace: &str, id: &str, schedule: proto::Schedule, now: Nanos) -> Result<Self, Refusal> {
        let mut scheduler = Self {
            namespace: namespace.to_owned(),
            id: id.to_owned(),
            info: Some(proto::ScheduleInfo {
                create_time: Some(stamp(now)),
                ..Default::default()
            }),
            looked_until: now,
            revision: 1,
            ..Default::default()
        };
        scheduler.schedule = Some(checked(schedule, now)?);
        Ok(scheduler)
    }

    /// One of which nothing is known but that it is there, so that somebody can delete it.
    pub fn unreadable(namespace: &str, id: &str) -> Self {
        Self {
            namespace: namespace.to_owned(),
            id: id.to_owned(),
            ..Default::default()
        }
    }

    fn spec(&self) -> Option<Spec> {
        self.understood().ok()
    }

    /// What it says about when to act, or why that cannot be understood.
    fn understood(&self) -> Result<Spec, SpecError> {
        let spec = self.schedule.as_ref().and_then(|schedule| schedule.spec.as_ref());
        Spec::parse(spec.ok_or_else(|| SpecError("the schedule cannot be read".to_owned()))?)
    }

    /// Why it never acts, if it does not because of what it says.
    pub fn fault(&self, now: Nanos) -> Option<String> {
        let found = self.understood().and_then(|spec| spec.check(now));
        found.err().map(|error| error.to_string())
    }

    fn overlap(&self, wanted: i32) -> Overlap {
        let own = self
            .schedule
            .as_ref()
            .and_then(|schedule| schedule.policies.as_ref())
            .map_or(0, |policies| policies.overlap_policy);
        let policy = if wanted == 0 { own } else { wanted };
        match Overlap::try_from(policy) {
            Ok(Overlap::Unspecified) | Err(_) => Overlap::Skip,
            Ok(policy) => policy,
        }
    }

    fn catchup(&self) -> Nanos {
        let window = self
            .schedule
            .as_ref()
            .and_then(|schedule| schedule.policies.as_ref())
            .map_or(0, |policies| nanos(policies.catchup_window.as_ref()));
        if window == 0 {
            DEFAULT_CATCHUP
        } else {
            window.max(MIN_CATCHUP)
        }
    }

    pub fn is_paused(&self) -> bool {
        self.state().is_some_and(|state| state.paused)
    }

    fn state(&self) -> Option<&proto::ScheduleState> {
        self.schedule.as_ref()?.state.as_ref()
    }

    fn state_mut(&mut self) -> &mut proto::ScheduleState {
        self.schedule
            .get_or_insert_default()
            .state
            .get_or_insert_default()
    }

    fn info_mut(&mut self) -> &mut proto::ScheduleInfo {
        self.info.get_or_insert_default()
    }

    fn is_exhausted(&self) -> bool {
        self.state()
            .is_some_and(|state| state.limited_actions && state.remaining_actions <= 0)
    }

    pub fn wake(&self) -> Wake {
        if self.is_exhausted() {
            return Wake::Never;
        }
        let Some(spec) = self.spec() else {
            return Wake::Never;
        };
        match spec.next(self.looked_until, &self.id, &mut Work::new(CALL)) {
            Next::At { actual, .. } => Wake::Due(actual),
            Next::Never => Wake::Never,
            Next::NotUntil(until) => Wake::Look(until.max(self.looked_until.saturating_add(LOOK_AGAIN))),
        }
    }

    /// The times in between, both included. Refused if they cannot be found with so much work.
    pub fn times(&self, from: Nanos, until: Nanos, limit: usize) -> Result<Vec<(Nanos, Nanos)>, Refusal> {
        let mut work = Work::new(CALL);
        let (times, is_complete) = self.find_times(from, until, limit, &mut work);
        if is_complete { Ok(times) } else { Err(too_long()) }
    }

    /// The times in between, and whether these are all, up to the limit.
    fn find_times(
        &self,
        from: Nanos,
        until: Nanos,
        limit: usize,
        work: &mut Work,
    ) -> (Vec<(Nanos, Nanos)>, bool) {
        let mut times = Vec::new();
        let Some(spec) = self.spec() else {
            return (times, true);
        };
        let mut after = from.saturating_sub(1);
        while times.len() < limit {
            if work.is_spent() {
                return (times, false);
            }
            match spec.next(after, &self.id, work) {
                Next::At { nominal, actual } if nominal <= until => {
                    times.push((nominal, actual));
                    after = nominal;
                }
                Next::NotUntil(known) if known < until => after = known,
                Next::At { .. } | Next::NotUntil(_) | Next::Never => break,
            }
        }
        (times, true)
    }

    /// Looks at the times that have come, and decides about what waits. If more have come than can be looked at in one call,
    /// those that nothing would come of are passed over, and the others are left to the next call.
    pub fn tick(&mut self, now: Nanos) -> Vec<Act> {
        if let Some(spec) = self.spec() {
            self.look(&spec, now);
        }
        self.settle()
    }

    fn look(&mut self, spec: &Spec, now: Nanos) {
        let is_idle = self.is_paused() || self.is_exhausted();
        let too_late = now.saturating_sub(self.catchup());
        if is_idle {
            self.pass_over(spec, now);
        }
        let mut work = Work::new(CALL);
        loop {
            if work.is_spent() {
                if is_idle || self.waiting.len() >= MAX_WAITING {
                    self.looked_until = self.looked_until.max(now);
                } else if self.looked_until < too_late {
                    self.pass_over(spec, too_late);
                }
                return;
            }
            match spec.next(self.looked_until, &self.id, &mut work) {
                Next::At { nominal, actual } if actual <= now => {
                    self.looked_until = nominal;
                    if is_idle {
                        continue;
                    }
                    if actual < too_late {
                        self.info_mut().missed_catchup_window += 1;
                    } else {
                        self.wait(Waiting {
                            nominal,
                            actual,
                            overlap: 0,
                            manual: false,
                        });
                    }
                }
                Next::NotUntil(until) if self.looked_until < now => self.looked_until = until.min(now),
                Next::At { .. } | Next::NotUntil(_) | Next::Never => return,
            }
        }
    }

    /// Nothing comes of the times before this one. Those whose jitter reaches beyond it still count.
    fn pass_over(&mut self, spec: &Spec, until: Nanos) {
        let sure = until.saturating_sub(spec.jitter());
        self.looked_until = self.looked_until.max(sure);
    }

    fn wait(&mut self, start: Waiting) {
        if self.waiting.len() >= MAX_WAITING {
            self.info_mut().buffer_dropped += 1;
        } else {
            self.waiting.push(start);
        }
    }

    /// Decides which of the waiting starts have their turn.
    fn settle(&mut self) -> Vec<Act> {
        let mut acts = Vec::new();
        let running = self.info_mut().running_workflows.clone();
        let mut busy = !running.is_empty();
        let mut stopping = None;
        let mut kept: Vec<Waiting> = Vec::new();
        for start in std::mem::take(&mut self.waiting) {
            if !start.manual && (self.is_paused() || self.is_exhausted()) {
                continue;
            }
            let overlap = self.overlap(start.overlap);
            if overlap == Overlap::AllowAll || !busy {
                busy = busy || overlap != Overlap::AllowAll;
                if !start.manual {
                    let state = self.state_mut();
                    state.remaining_actions -= i64::from(state.limited_actions);
                }
                acts.push(Act::Start(start));
                continue;
            }
            match overlap {
                Overlap::BufferOne if kept.is_empty() => kept.push(start),
                Overlap::BufferAll => kept.push(start),
                Overlap::CancelOther | Overlap::TerminateOther => {
                    let stop = |execution: &common::WorkflowExecution| {
                        if overlap == Overlap::CancelOther {
                            Act::Cancel(execution.clone())
                        } else {
                            Act::Terminate(execution.clone())
                        }
                    };
                    // Each is stopped once, however many wait for it to end.
                    if stopping.replace(overlap) != Some(overlap) {
                        acts.extend(running.iter().map(stop));
                    }
                    self.info_mut().overlap_skipped += i64::try_from(kept.len()).unwrap_or(0);
                    kept.clear();
                    kept.push(start);
                }
                _ => self.info_mut().overlap_skipped += 1,
            }
        }
        self.info_mut().buffer_size = i64::try_from(kept.len()).unwrap_or(0);
        self.waiting = kept;
        acts
    }

    /// The id of the workflow that a start makes.
    pub fn workflow_id(&self, start: &Waiting) -> String {
        let base = self
            .new_workflow()
            .map_or(String::new(), |workflow| workflow.workflow_id.clone());
        let keep = self
            .schedule
            .as_ref()
            .and_then(|schedule| schedule.policies.as_ref())
            .is_some_and(|policies| policies.keep_original_workflow_id);
        if keep {
            return base;
        }
        let whole = start.nominal.div_euclid(seconds(1));
        let at = jiff::Timestamp::from_second(whole).map_or(String::new(), |at| at.to_string());
        format!("{base}-{at}")
    }

    pub fn new_workflow(&self) -> Option<&crate::words::workflow::NewWorkflowExecutionInfo> {
        match self.schedule.as_ref()?.action.as_ref()?.action.as_ref()? {
            proto::schedule_action::Action::StartWorkflow(workflow) => Some(workflow),
        }
    }

    /// A start was carried out.
    pub fn started(&mut self, start: &Waiting, workflow_id: &str, run_id: &str, now: Nanos) {
        let info = self.info_mut();
        info.action_count += 1;
        if info.running_workflows.len() < MAX_RUNNING {
            info.running_workflows.push(execution(workflow_id, run_id));
        }
        info.recent_actions.push(proto::ScheduleActionResult {
            schedule_time: Some(stamp(start.actual)),
            actual_time: Some(stamp(now)),
            start_workflow_result: Some(execution(workflow_id, run_id)),
            start_workflow_status: Status::Running.into(),
        });
        if info.recent_actions.len() > RECENT {
            info.recent_actions.remove(0);
        }
    }

    /// A workflow that was started has ended. What waits for it has its turn with the next tick.
    pub fn ended(
        &mut self,
        workflow: &common::WorkflowExecution,
        status: Status,
        result: Option<common::Payloads>,
        failure: Option<failure::Failure>,
    ) {
        let pause_on_failure = self
            .schedule
            .as_ref()
            .and_then(|schedule| schedule.policies.as_ref())
            .is_some_and(|policies| policies.pause_on_failure);
        let info = self.info_mut();
        info.running_workflows.retain(|running| running != workflow);
        for action in &mut info.recent_actions {
            if action.start_workflow_result.as_ref() == Some(workflow) {
                action.start_workflow_status = status.into();
            }
        }
        match status {
            Status::Completed => {
                self.last_result = result;
                self.last_failure = None;
            }
            Status::Failed | Status::TimedOut => {
                let failed = if status == Status::Failed {
                    "failure"
                } else {
                    "timeout"
                };
                let message = failure
                    .as_ref()
                    .map_or(String::new(), |failure| failure.message.clone());
                self.last_failure = failure;
                if pause_on_failure {
                    let id = workflow.workflow_id.clone();
                    let state = self.state_mut();
                    state.paused = true;
                    state.notes = format!("paused due to workflow {failed}: {id}: {message}");
                }
            }
            _ => {}
        }
    }

    /// A person changes how it runs, not what it is.
    pub fn patch(&mut self, patch: &proto::SchedulePatch, now: Nanos) -> Result<(), Refusal> {
        if patch.backfill_request.len() > MAX_BACKFILLS {
            return Err(Refusal::InvalidArgument(format!(
                "at most {MAX_BACKFILLS} backfills may be asked for at once"
            )));
        }
        let mut work = Work::new(CALL);
        if let Some(trigger) = &patch.trigger_immediately {
            let at = match unstamp(trigger.scheduled_time.as_ref()) {
                0 => now,
                at => at,
            };
            self.wait(Waiting {
                nominal: at,
                actual: at,
                overlap: trigger.overlap_policy,
                manual: true,
            });
        }
        for backfill in &patch.backfill_request {
            let from = unstamp(backfill.start_time.as_ref());
            let until = unstamp(backfill.end_time.as_ref());
            let (times, is_complete) = self.find_times(from, until, MAX_WAITING, &mut work);
            if !is_complete {
                return Err(too_long());
            }
            for (nominal, actual) in times {
                self.wait(Waiting {
                    nominal,
                    actual,
                    overlap: backfill.overlap_policy,
                    manual: true,
                });
            }
        }
        if !patch.pause.is_empty() {
            let state = self.state_mut();
            state.paused = true;
            state.notes.clone_from(&patch.pause);
        }
        if !patch.unpause.is_empty() {
            let state = self.state_mut();
            state.paused = false;
            state.notes.clone_from(&patch.unpause);
        }
        self.revision += 1;
        Ok(())
    }

    pub fn replace(&mut self, schedule: proto::Schedule, now: Nanos) -> Result<(), Refusal> {
        self.schedule = Some(checked(schedule, now)?);
        self.info_mut().update_time = Some(stamp(now));
        // Times before the change belong to the old spec.
        self.looked_until = self.looked_until.max(now);
        self.revision += 1;
        Ok(())
    }

    /// The schedule and what is known of it, as people see them.
    pub fn view(&self, now: Nanos) -> (proto::Schedule, proto::ScheduleInfo) {
        let (schedule, mut info) = self.view_with(now, FUTURE, CALL);
        info.invalid_schedule_error = self.fault(now).unwrap_or_default();
        (schedule, info)
    }

    /// The same in less detail, as one of many.
    pub fn glance(&self, now: Nanos, times: usize) -> (proto::Schedule, proto::ScheduleInfo) {
        self.view_with(now, times, GLANCE)
    }

    fn view_with(&self, now: Nanos, times: usize, steps: u32) -> (proto::Schedule, proto::ScheduleInfo) {
        let mut schedule = self.schedule.clone().unwrap_or_default();
        if let (Some(spec), Some(shown)) = (self.spec(), schedule.spec.as_mut()) {
            *shown = spec.canonical(shown);
        }
        let mut info = self.info.clone().unwrap_or_default();
        info.future_action_times = self.future(now, times, &mut Work::new(steps));
        (schedule, info)
    }

    fn future(&self, now: Nanos, limit: usize, work: &mut Work) -> Vec<prost_wkt_types::Timestamp> {
        let mut limit = limit;
        if let Some(state) = self.state().filter(|state| state.limited_actions) {
            limit = limit.min(usize::try_from(state.remaining_actions).unwrap_or(0));
        }
        let from = self.looked_until.max(now).saturating_add(1);
        self.find_times(from, i64::MAX, limit, work)
            .0
            .into_iter()
            .map(|(_, actual)| stamp(actual))
            .collect()
    }
}

fn too_long() -> Refusal {
    Refusal::InvalidArgument(
        "the schedule has too few times in this range, or excludes too many, for all of it to be searched at once: \
         ask for a shorter range"
            .to_owned(),
    )
}

fn checked(mut schedule: proto::Schedule, now: Nanos) -> Result<proto::Schedule, Refusal> {
    let spec = schedule.spec.get_or_insert_default();
    let parsed = Spec::parse(spec)
        .and_then(|parsed| parsed.check(now).map(|()| parsed))
        .map_err(|error| Refusal::InvalidArgument(format!("Invalid schedule spec: {error}")))?;
    *spec = parsed.canonical(spec);
    let policies = schedule.policies.get_or_insert_default();
    if policies.overlap_policy == 0 {
        policies.overlap_policy = Overlap::Skip.into();
    }
    if nanos(policies.catchup_window.as_ref()) == 0 {
        policies.catchup_window = Some(crate::duration(DEFAULT_CATCHUP));
    }
    schedule.state.get_or_insert_default();
    let workflow = match schedule.action.as_ref().and_then(|action| action.action.as_ref()) {
        Some(proto::schedule_action::Action::StartWorkflow(workflow)) => workflow,
        None => {
            return Err(Refusal::InvalidArgument(
                "StartWorkflow is the only supported action.".to_owned(),
            ));
        }
    };
    if workflow.workflow_id.is_empty() {
        return Err(Refusal::InvalidArgument(
            "WorkflowId is not set on request.".to_owned(),
        ));
    }
    Ok(schedule)
}
