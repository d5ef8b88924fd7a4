//! A schedule: when its times come, what is started, and what happens if the last one still runs.
//!
//! ```text
//!   times that have come ──┐
//!   trigger, backfill ─────┴─> waiting ── overlap policy ──> start (then running) ── ended ──> waiting again
//! ```
//!
//! Pure: the caller performs what [`Scheduler::tick`] returns and tells what became of it.

use temporalio_protos::temporal::api::enums::v1::ScheduleOverlapPolicy as Overlap;
use temporalio_protos::temporal::api::schedule::v1 as proto;

use crate::refusal::Refusal;
use crate::schedule::Spec;
use crate::time::{Nanos, nanos, seconds, stamp, unstamp};
use crate::words::enums::WorkflowExecutionStatus as Status;
use crate::words::{common, execution, failure};

const DEFAULT_CATCHUP: Nanos = seconds(365 * 24 * 3600);
const MIN_CATCHUP: Nanos = seconds(10);
const RECENT: usize = 10;
const FUTURE: usize = 10;
/// As many starts may wait; more are dropped and counted.
const MAX_WAITING: usize = 1_000;

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
        scheduler.schedule = Some(checked(schedule)?);
        Ok(scheduler)
    }

    fn spec(&self) -> Option<Spec> {
        Spec::parse(self.schedule.as_ref()?.spec.as_ref()?).ok()
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

    /// When to call [`Scheduler::tick`] next.
    pub fn next_at(&self) -> Option<Nanos> {
        if self.is_exhausted() {
            return None;
        }
        self.spec()?
            .next(self.looked_until, &self.id)
            .map(|(_, actual)| actual)
    }

    /// The times in between, both included.
    pub fn times(&self, from: Nanos, until: Nanos, limit: usize) -> Vec<(Nanos, Nanos)> {
        let mut times = Vec::new();
        let Some(spec) = self.spec() else { return times };
        let mut after = from - 1;
        while let Some((nominal, actual)) = spec.next(after, &self.id) {
            if nominal > until || times.len() >= limit {
                break;
            }
            times.push((nominal, actual));
            after = nominal;
        }
        times
    }

    /// Looks at the times that have come, and decides about what waits.
    pub fn tick(&mut self, now: Nanos) -> Vec<Act> {
        if let Some(spec) = self.spec() {
            let mut after = self.looked_until;
            while let Some((nominal, actual)) = spec.next(after, &self.id) {
                if actual > now {
                    break;
                }
                after = nominal;
                self.looked_until = nominal;
                if self.is_paused() || self.is_exhausted() {
                    continue;
                }
                if now - actual > self.catchup() {
                    self.info_mut().missed_catchup_window += 1;
                    continue;
                }
                self.wait(Waiting {
                    nominal,
                    actual,
                    overlap: 0,
                    manual: false,
                });
            }
        }
        self.settle()
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
                    acts.extend(running.iter().map(stop));
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
        info.running_workflows.push(execution(workflow_id, run_id));
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
    pub fn patch(&mut self, patch: &proto::SchedulePatch, now: Nanos) {
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
            for (nominal, actual) in self.times(from, until, MAX_WAITING) {
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
    }

    pub fn replace(&mut self, schedule: proto::Schedule, now: Nanos) -> Result<(), Refusal> {
        self.schedule = Some(checked(schedule)?);
        self.info_mut().update_time = Some(stamp(now));
        // Times before the change belong to the old spec.
        self.looked_until = self.looked_until.max(now);
        self.revision += 1;
        Ok(())
    }

    /// The schedule and what is known of it, as people see them.
    pub fn view(&self, now: Nanos) -> (proto::Schedule, proto::ScheduleInfo) {
        let mut schedule = self.schedule.clone().unwrap_or_default();
        if let (Some(spec), Some(shown)) = (self.spec(), schedule.spec.as_mut()) {
            *shown = spec.canonical(shown);
        }
        let mut info = self.info.clone().unwrap_or_default();
        info.future_action_times = self.future(now, FUTURE);
        (schedule, info)
    }

    pub fn future(&self, now: Nanos, limit: usize) -> Vec<prost_wkt_types::Timestamp> {
        let mut limit = limit;
        if let Some(state) = self.state().filter(|state| state.limited_actions) {
            limit = limit.min(usize::try_from(state.remaining_actions).unwrap_or(0));
        }
        self.times(self.looked_until.max(now) + 1, i64::MAX, limit)
            .into_iter()
            .map(|(_, actual)| stamp(actual))
            .collect()
    }
}

fn checked(mut schedule: proto::Schedule) -> Result<proto::Schedule, Refusal> {
    let spec = schedule.spec.get_or_insert_default();
    let parsed = Spec::parse(spec)
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
