//! Schedules: kept in memory, written with each change, woken when their time has come.
//!
//! What must hold:
//! - A schedule waits for no other: each has its turns and its tasks, so what one does, or contains, is felt by its owner
//!   alone.
//! - When it is due is found out once for each change, not each time that any schedule is.
//! - Whatever a stored schedule contains, the engine opens, and it can be listed, paused and deleted.
//! - All of them are in memory, so what they hold is bounded, for each and for all of a project. The workflows that they have
//!   started are waited for, and not kept there.

mod listing;

use parking_lot::{Mutex, MutexGuard};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use atoll_store::{WorkflowItem, WorkflowStore};
use atoll_workflow_core::{
    Act, Nanos, Refusal, Scheduler, Start, Waiting, Wake, nanos, stamp, time_text, unstamp,
};
use prost::Message as _;
use temporalio_protos::temporal::api::common::v1::{Payload, Payloads, WorkflowExecution};
use temporalio_protos::temporal::api::enums::v1::{
    WorkflowExecutionStatus as Status, WorkflowIdConflictPolicy as Conflict, WorkflowIdReusePolicy as Reuse,
};
use temporalio_protos::temporal::api::failure::v1::Failure;
use temporalio_protos::temporal::api::history::v1::history_event::Attributes;
use temporalio_protos::temporal::api::schedule::v1 as proto;
use temporalio_protos::temporal::api::workflowservice::v1 as service;
use tokio::sync::{Notify, OwnedMutexGuard};

use crate::cells::Key;
use crate::starts::{Along, Policy};
use crate::{Engine, rights, shares, unavailable};

const KIND: &str = "schedule";
/// How many a namespace may have: they are all in memory.
const MOST: usize = 10_000;
/// How long one rests that could not act, or has to be looked at again.
const REST: Nanos = 1_000_000_000;
/// What somebody may say about a pause.
const MOST_NOTES: usize = 16 * 1024;

type Name = (String, String);

#[derive(Debug, Default)]
pub(crate) struct Schedules {
    all: Mutex<All>,
    /// Who changes a schedule, from decision to disk, one at a time.
    turns: Mutex<HashMap<Name, Arc<tokio::sync::Mutex<()>>>>,
    watched: Mutex<BTreeSet<(String, WorkflowKey)>>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct All {
    schedulers: BTreeMap<Name, Arc<Scheduler>>,
    /// What each holds, and those of each namespace.
    bytes: HashMap<Name, usize>,
    held: HashMap<String, usize>,
    /// When each is to be woken, soonest first; and the same by name.
    line: BTreeSet<(Nanos, Name)>,
    due: HashMap<Name, Nanos>,
}

impl All {
    fn keep(&mut self, name: &Name, scheduler: Arc<Scheduler>, bytes: usize) {
        self.forget(name);
        let bytes = bytes + shares::LEAST;
        self.bytes.insert(name.clone(), bytes);
        *self.held.entry(name.0.clone()).or_default() += bytes;
        self.schedulers.insert(name.clone(), scheduler);
    }

    fn forget(&mut self, name: &Name) {
        self.schedulers.remove(name);
        if let Some(bytes) = self.bytes.remove(name)
            && let Some(held) = self.held.get_mut(&name.0)
        {
            *held -= bytes;
            if *held == 0 {
                self.held.remove(&name.0);
            }
        }
    }

    fn arm(&mut self, name: &Name, at: Option<Nanos>) {
        if let Some(known) = self.due.remove(name) {
            self.line.remove(&(known, name.clone()));
        }
        if let Some(at) = at {
            self.due.insert(name.clone(), at);
            self.line.insert((at, name.clone()));
        }
    }

    /// Those of a namespace that come behind an id.
    fn behind<'a>(
        &'a self,
        namespace: &'a str,
        id: &str,
    ) -> impl Iterator<Item = &'a Arc<Scheduler>> + use<'a> {
        self.schedulers
            .range((namespace.to_owned(), id.to_owned())..)
            .take_while(move |((own, _), _)| own == namespace)
            .map(|(_, scheduler)| scheduler)
    }
}

type WorkflowKey = (String, String, String);

/// The right to change one schedule.
struct Turn<'a> {
    schedules: &'a Schedules,
    name: Name,
    held: Option<OwnedMutexGuard<()>>,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut turns = self.schedules.turns.lock();
        self.held = None;
        // Whoever waits for it holds it too.
        if turns
            .get(&self.name)
            .is_some_and(|turn| Arc::strong_count(turn) == 1)
        {
            turns.remove(&self.name);
        }
    }
}

impl Schedules {
    pub(crate) async fn load(store: &dyn WorkflowStore) -> Result<Self, Refusal> {
        let mut all = All::default();
        let mut last = None;
        loop {
            let page = store.workflow_items_behind(KIND, last.as_ref()).await;
            let mut page = page.map_err(unavailable)?;
            for item in &page {
                let scheduler = Scheduler::decode(item.body.as_slice()).unwrap_or_else(|error| {
                    tracing::error!(
                        namespace = item.namespace, schedule = item.id, %error,
                        "a schedule cannot be read and does nothing; delete it and make it anew"
                    );
                    Scheduler::unreadable(&item.namespace, &item.id)
                });
                let name = (item.namespace.clone(), item.id.clone());
                all.keep(&name, Arc::new(scheduler), item.body.len());
            }
            last = page.pop();
            if last.is_none() {
                break;
            }
        }
        Ok(Self {
            all: Mutex::new(all),
            ..Default::default()
        })
    }

    fn lock(&self) -> MutexGuard<'_, All> {
        self.all.lock()
    }

    async fn turn(&self, name: &Name) -> Turn<'_> {
        let turn = {
            let mut turns = self.turns.lock();
            Arc::clone(turns.entry(name.clone()).or_default())
        };
        let held = turn.lock_owned().await;
        Turn {
            schedules: self,
            name: name.clone(),
            held: Some(held),
        }
    }

    fn get(&self, name: &Name) -> Result<Arc<Scheduler>, Refusal> {
        let all = self.lock();
        all.schedulers
            .get(name)
            .cloned()
            .ok_or_else(|| Refusal::NotFound(format!("schedule {:?} not found", name.1)))
    }

    /// Takes those out of the line whose time has come, and says when the next one's does.
    fn take_due(&self, now: Nanos) -> (Vec<Name>, Option<Nanos>) {
        let mut all = self.lock();
        let mut due = Vec::new();
        while let Some((at, name)) = all.line.first().cloned() {
            if at > now {
                return (due, Some(at));
            }
            all.arm(&name, None);
            due.push(name);
        }
        (due, None)
    }

    /// Forgets all of a namespace that nobody is in.
    pub(crate) fn forget(&self, namespace: &str) {
        let mut all = self.lock();
        let gone: Vec<Name> = all
            .behind(namespace, "")
            .map(|scheduler| (scheduler.namespace.clone(), scheduler.id.clone()))
            .collect();
        for name in gone {
            all.schedulers.remove(&name);
            all.arm(&name, None);
        }
    }

    /// Wakes it later, unless it is gone or somebody has said better.
    fn rest(&self, name: &Name, until: Nanos) {
        let mut all = self.lock();
        if all.schedulers.contains_key(name) && !all.due.contains_key(name) {
            all.arm(name, Some(until));
            drop(all);
            self.changed.notify_one();
        }
    }
}

/// When a schedule is to be woken.
fn due_at(scheduler: &Scheduler, now: Nanos) -> Option<Nanos> {
    let _doing = tracing::debug_span!(
        "find the next time",
        namespace = scheduler.namespace,
        schedule = scheduler.id
    )
    .entered();
    match scheduler.wake() {
        Wake::Due(at) => Some(at),
        // However often that is: it does not press.
        Wake::Look(at) => Some(at.max(now.saturating_add(REST))),
        Wake::Never => None,
    }
}

impl Engine {
    /// Wakes schedules until the engine closes.
    pub(crate) async fn keep_schedules(self) {
        let known: Vec<_> = self
            .inner
            .schedules
            .lock()
            .schedulers
            .clone()
            .into_iter()
            .collect();
        for (name, scheduler) in known {
            self.watch_all(&scheduler);
            let at = due_at(&scheduler, self.now());
            if let Some(at) = at {
                self.inner.schedules.rest(&name, at);
            } else if let Some(fault) = scheduler.fault(self.now()) {
                tracing::warn!(
                    namespace = name.0,
                    schedule = name.1,
                    fault,
                    "a schedule does nothing; change it or delete it"
                );
            }
            tokio::task::yield_now().await;
        }
        loop {
            let (due, next) = self.inner.schedules.take_due(self.now());
            for name in due {
                tokio::spawn(self.clone().wake(name));
            }
            let wait = next.map_or(Duration::from_secs(3600), |at| {
                Duration::from_nanos(u64::try_from(at.saturating_sub(self.now())).unwrap_or(0))
            });
            tokio::select! {
                () = self.inner.stop.cancelled() => return,
                () = self.inner.schedules.changed.notified() => {}
                () = tokio::time::sleep(wait) => {}
            }
        }
    }

    /// Changes a schedule, then does what has become its turn. All of it is durable when this returns.
    async fn change_schedule<T: Send>(
        &self,
        name: &Name,
        change: impl FnOnce(&mut Scheduler, Nanos) -> Result<T, Refusal> + Send,
    ) -> Result<T, Refusal> {
        let _inside = self.inner.namespaces.enter(&name.0)?;
        let _turn = self.inner.schedules.turn(name).await;
        let mut scheduler = Scheduler::clone(&*self.inner.schedules.get(name)?);
        let result = doing(name, || change(&mut scheduler, self.now()))?;
        self.act(&mut scheduler).await;
        self.put_schedule(scheduler).await?;
        Ok(result)
    }

    async fn wake(self, name: Name) {
        match self.change_schedule(&name, |_, _| Ok(())).await {
            // Deleted in the meantime.
            Ok(()) | Err(Refusal::NotFound(_) | Refusal::NamespaceNotFound(_)) => {}
            Err(error) => {
                tracing::warn!(namespace = name.0, schedule = name.1, %error, "a schedule could not act");
                self.inner.schedules.rest(&name, self.now().saturating_add(REST));
            }
        }
    }

    async fn put_schedule(&self, scheduler: Scheduler) -> Result<(), Refusal> {
        let name = (scheduler.namespace.clone(), scheduler.id.clone());
        let item = WorkflowItem {
            namespace: name.0.clone(),
            id: name.1.clone(),
            body: scheduler.encode_to_vec(),
        };
        self.inner
            .store
            .put_workflow_item(KIND, item)
            .await
            .map_err(unavailable)?;
        self.watch_all(&scheduler);
        let bytes = scheduler.encoded_len();
        let at = due_at(&scheduler, self.now());
        {
            let mut all = self.inner.schedules.lock();
            all.keep(&name, Arc::new(scheduler), bytes);
            all.arm(&name, at);
        }
        self.inner.schedules.changed.notify_one();
        Ok(())
    }

    /// Starting is idempotent: a start that was carried out, but not noted before a crash, is found again by its id.
    async fn act(&self, scheduler: &mut Scheduler) {
        let name = (scheduler.namespace.clone(), scheduler.id.clone());
        let now = self.now();
        for act in doing(&name, || scheduler.tick(now)) {
            match act {
                Act::Start(start) => match self.start_scheduled(scheduler, &start).await {
                    Ok((workflow_id, run_id)) => scheduler.started(&start, &workflow_id, &run_id, self.now()),
                    Err(error) => {
                        tracing::warn!(schedule = scheduler.id, %error, "a scheduled workflow did not start");
                    }
                },
                Act::Cancel(target) | Act::Terminate(target) if target.workflow_id.is_empty() => {}
                Act::Cancel(target) => self.stop_scheduled(scheduler, &target, false).await,
                Act::Terminate(target) => self.stop_scheduled(scheduler, &target, true).await,
            }
        }
    }

    async fn stop_scheduled(&self, scheduler: &Scheduler, target: &WorkflowExecution, terminate: bool) {
        let key = Key::new(&scheduler.namespace, &target.workflow_id);
        let reason = "schedule overlap policy";
        let stopped = self
            .stop_run(key, &target.run_id, terminate, reason, "temporal-scheduler", None)
            .await;
        if let Err(error) = stopped {
            tracing::debug!(schedule = scheduler.id, %error, "a scheduled workflow could not be stopped");
        }
    }

    async fn start_scheduled(
        &self,
        scheduler: &Scheduler,
        start: &Waiting,
    ) -> Result<(String, String), Refusal> {
        let workflow = scheduler
            .new_workflow()
            .cloned()
            .ok_or_else(|| Refusal::InvalidArgument("the schedule has no action".to_owned()))?;
        let workflow_id = scheduler.workflow_id(start);
        let mut attributes = workflow.search_attributes.unwrap_or_default();
        attributes.indexed_fields.insert(
            "TemporalScheduledStartTime".to_owned(),
            json(&format!("{:?}", time_text(start.nominal))),
        );
        attributes.indexed_fields.insert(
            "TemporalScheduledById".to_owned(),
            json(&format!("{:?}", scheduler.id)),
        );
        let start = Start {
            namespace: scheduler.namespace.clone(),
            workflow_id: workflow_id.clone(),
            workflow_type: workflow.workflow_type.unwrap_or_default().name,
            task_queue: workflow.task_queue.unwrap_or_default().name,
            input: workflow.input,
            execution_timeout: nanos(workflow.workflow_execution_timeout.as_ref()),
            run_timeout: nanos(workflow.workflow_run_timeout.as_ref()),
            task_timeout: nanos(workflow.workflow_task_timeout.as_ref()),
            identity: format!("temporal-scheduler-{}-{}", scheduler.namespace, scheduler.id),
            request_id: format!("{}:{}:{}", scheduler.id, start.nominal, start.manual),
            retry_policy: workflow.retry_policy,
            memo: workflow.memo,
            search_attributes: Some(attributes),
            header: workflow.header,
            user_metadata: workflow.user_metadata,
            priority: workflow.priority,
            versioning_override: workflow.versioning_override,
            last_result: scheduler.last_result.clone(),
            continued_failure: scheduler.last_failure.clone(),
            rights: scheduler.rights.clone(),
            ..Default::default()
        };
        let policy = Policy::new(Reuse::AllowDuplicate.into(), Conflict::Fail.into())?;
        let started = self.start_run(start, policy, Along::default()).await?;
        Ok((workflow_id, started.run_id))
    }

    fn watch_all(&self, scheduler: &Scheduler) {
        let running = scheduler
            .info
            .as_ref()
            .map_or(&[][..], |info| info.running_workflows.as_slice());
        for workflow in running {
            let key = (
                scheduler.id.clone(),
                (
                    scheduler.namespace.clone(),
                    workflow.workflow_id.clone(),
                    workflow.run_id.clone(),
                ),
            );
            let mut watched = self.inner.schedules.watched.lock();
            if watched.insert(key.clone()) {
                let name = (scheduler.namespace.clone(), scheduler.id.clone());
                tokio::spawn(self.clone().watch(name, workflow.clone(), key));
            }
        }
    }

    /// Waits for a workflow that a schedule has started, through all of its runs, to end.
    async fn watch(self, name: Name, workflow: WorkflowExecution, watched: (String, WorkflowKey)) {
        let key = Key::new(&name.0, &workflow.workflow_id);
        let signal = self.inner.cells.get(&key).changes();
        let mut changes = signal.subscribe();
        let mut run_id = workflow.run_id.clone();
        let end = loop {
            changes.borrow_and_update();
            let seen = self
                .see(&key, &run_id, |slot| {
                    let run = &slot.run;
                    Ok((
                        run.is_running(),
                        run.state.successor.clone(),
                        Status::try_from(run.state.status).unwrap_or_default(),
                        run.events
                            .last()
                            .filter(|_| !run.is_running())
                            .and_then(|event| event.attributes.clone()),
                    ))
                })
                .await;
            match seen {
                Ok((true, ..)) => {
                    tokio::select! {
                        () = self.inner.stop.cancelled() => return,
                        _ = changes.changed() => {}
                    }
                }
                Ok((false, successor, ..)) if !successor.is_empty() => run_id = successor,
                Ok((false, _, status, last)) => break (status, last),
                // Not yet: it may stay.
                Err(Refusal::NamespaceDeleting(_)) => {
                    tokio::time::sleep(Duration::from_nanos(REST.unsigned_abs())).await;
                }
                Err(_) => break (Status::Unspecified, None),
            }
        };
        let (status, last) = end;
        let (result, failure) = match last {
            Some(Attributes::WorkflowExecutionCompletedEventAttributes(completed)) => {
                (completed.result, None)
            }
            Some(Attributes::WorkflowExecutionFailedEventAttributes(failed)) => (None, failed.failure),
            _ => (None, None),
        };
        // The next one does without what there is no room for.
        let room = shares::SCHEDULES.saturating_sub(self.schedules_share(&name.0));
        let result = result.filter(|result: &Payloads| result.encoded_len() <= room);
        let failure = failure.filter(|failure: &Failure| failure.encoded_len() <= room);
        let noted = self
            .change_schedule(&name, |scheduler, _| {
                scheduler.ended(&workflow, status, result, failure);
                Ok(())
            })
            .await;
        if let Err(error) = noted {
            tracing::debug!(schedule = name.1, %error, "the end of a scheduled workflow could not be noted");
        }
        self.inner.schedules.watched.lock().remove(&watched);
    }

    /// What the workflows of a schedule are searched by has a type, as everywhere.
    fn typed_action(&self, namespace: &str, schedule: proto::Schedule) -> Result<proto::Schedule, Refusal> {
        let mut schedule = schedule;
        if let Some(proto::schedule_action::Action::StartWorkflow(workflow)) =
            schedule.action.as_mut().and_then(|action| action.action.as_mut())
        {
            workflow.search_attributes = self.typed(namespace, workflow.search_attributes.take())?;
        }
        Ok(schedule)
    }

    /// What the schedules of a project hold.
    fn schedules_share(&self, namespace: &str) -> usize {
        let all = self.inner.schedules.lock();
        let each = all
            .held
            .iter()
            .map(|(namespace, bytes)| (namespace.as_str(), *bytes));
        self.share(namespace, each)
    }

    /// Refuses what is too large for one, or for all of a project. `former` is what is to be replaced.
    fn check_schedule(&self, name: &Name, bytes: usize, former: usize) -> Result<(), Refusal> {
        let most = self.inner.options.limits.blob_bytes;
        if bytes > most {
            return Err(Refusal::InvalidArgument(format!(
                "the schedule has {bytes} bytes, and may have {most}: send less along"
            )));
        }
        let others = self.schedules_share(&name.0).saturating_sub(former);
        shares::check_share("schedules", others + bytes + shares::LEAST, shares::SCHEDULES)
    }

    pub async fn create_schedule(
        &self,
        request: service::CreateScheduleRequest,
    ) -> Result<service::CreateScheduleResponse, Refusal> {
        let _inside = self.inner.namespaces.enter(&request.namespace)?;
        if request.schedule_id.is_empty() {
            return Err(Refusal::InvalidArgument(
                "ScheduleId is not set on request.".to_owned(),
            ));
        }
        self.inner
            .options
            .limits
            .check_id("ScheduleId", &request.schedule_id)?;
        let bytes = request.encoded_len();
        let name = (request.namespace.clone(), request.schedule_id.clone());
        let _turn = self.inner.schedules.turn(&name).await;
        if let Ok(known) = self.inner.schedules.get(&name) {
            if !request.request_id.is_empty() && known.request_id == request.request_id {
                return Ok(service::CreateScheduleResponse {
                    conflict_token: token(&known),
                });
            }
            return Err(Refusal::AlreadyStarted {
                message: format!("schedule {:?} is already registered", request.schedule_id),
                request_id: known.request_id.clone(),
                run_id: String::new(),
                first_run_id: String::new(),
            });
        }
        if self.inner.schedules.lock().behind(&request.namespace, "").count() >= MOST {
            return Err(Refusal::ResourceExhausted(format!(
                "this namespace has {MOST} schedules, and may have no more: delete some, or use another namespace"
            )));
        }
        self.check_schedule(&name, bytes, 0)?;
        let now = self.now();
        let schedule = self.typed_action(&request.namespace, request.schedule.unwrap_or_default())?;
        let mut scheduler = doing(&name, || {
            Scheduler::new(&request.namespace, &request.schedule_id, schedule, now)
        })?;
        scheduler.memo = request.memo;
        scheduler.request_id = request.request_id;
        scheduler.rights = rights::current();
        scheduler.search_attributes = self.typed(&request.namespace, request.search_attributes)?;
        if let Some(patch) = request.initial_patch {
            doing(&name, || scheduler.patch(&patch, now))?;
        }
        self.act(&mut scheduler).await;
        let conflict_token = token(&scheduler);
        self.put_schedule(scheduler).await?;
        Ok(service::CreateScheduleResponse { conflict_token })
    }

    pub async fn describe_schedule(
        &self,
        request: service::DescribeScheduleRequest,
    ) -> Result<service::DescribeScheduleResponse, Refusal> {
        let _inside = self.inner.namespaces.enter(&request.namespace)?;
        let name = (request.namespace, request.schedule_id);
        // After whatever is being done.
        let _turn = self.inner.schedules.turn(&name).await;
        let scheduler = self.inner.schedules.get(&name)?;
        let now = self.now();
        let (schedule, info) = doing(&name, || scheduler.view(now));
        Ok(service::DescribeScheduleResponse {
            schedule: Some(schedule),
            info: Some(info),
            conflict_token: token(&scheduler),
            memo: Some(scheduler.memo.clone().unwrap_or_default()),
            search_attributes: Some(scheduler.search_attributes.clone().unwrap_or_default()),
        })
    }

    pub async fn update_schedule(
        &self,
        request: service::UpdateScheduleRequest,
    ) -> Result<service::UpdateScheduleResponse, Refusal> {
        let _inside = self.inner.namespaces.enter(&request.namespace)?;
        let name = (request.namespace.clone(), request.schedule_id.clone());
        let former = self.inner.schedules.lock().bytes.get(&name).copied().unwrap_or(0);
        self.check_schedule(&name, request.encoded_len(), former)?;
        let attributes = self.typed(&request.namespace, request.search_attributes)?;
        let schedule = self.typed_action(&request.namespace, request.schedule.unwrap_or_default())?;
        let rights = rights::current();
        self.change_schedule(&name, move |scheduler, now| {
            if !request.conflict_token.is_empty() && request.conflict_token != token(scheduler) {
                return Err(Refusal::FailedPrecondition(
                    "mismatched conflict token".to_owned(),
                ));
            }
            if attributes.is_some() {
                scheduler.search_attributes = attributes;
            }
            if request.memo.is_some() {
                scheduler.memo = request.memo;
            }
            scheduler.replace(schedule, now)?;
            scheduler.rights = rights;
            Ok(())
        })
        .await?;
        Ok(service::UpdateScheduleResponse {})
    }

    pub async fn patch_schedule(
        &self,
        request: service::PatchScheduleRequest,
    ) -> Result<service::PatchScheduleResponse, Refusal> {
        let _inside = self.inner.namespaces.enter(&request.namespace)?;
        let name = (request.namespace, request.schedule_id);
        let patch = request.patch.unwrap_or_default();
        if patch.pause.len().max(patch.unpause.len()) > MOST_NOTES {
            return Err(Refusal::InvalidArgument(format!(
                "the reason may have {MOST_NOTES} bytes"
            )));
        }
        self.change_schedule(&name, move |scheduler, now| scheduler.patch(&patch, now))
            .await?;
        Ok(service::PatchScheduleResponse {})
    }

    pub async fn delete_schedule(
        &self,
        request: service::DeleteScheduleRequest,
    ) -> Result<service::DeleteScheduleResponse, Refusal> {
        let _inside = self.inner.namespaces.enter(&request.namespace)?;
        let name = (request.namespace, request.schedule_id);
        let _turn = self.inner.schedules.turn(&name).await;
        self.inner.schedules.get(&name)?;
        self.inner
            .store
            .delete_workflow_item(KIND, name.0.clone(), name.1.clone())
            .await
            .map_err(unavailable)?;
        let mut all = self.inner.schedules.lock();
        all.forget(&name);
        all.arm(&name, None);
        Ok(service::DeleteScheduleResponse {})
    }

    pub async fn schedule_times(
        &self,
        request: service::ListScheduleMatchingTimesRequest,
    ) -> Result<service::ListScheduleMatchingTimesResponse, Refusal> {
        let _inside = self.inner.namespaces.enter(&request.namespace)?;
        let name = (request.namespace, request.schedule_id);
        let scheduler = self.inner.schedules.get(&name)?;
        let from = unstamp(request.start_time.as_ref());
        let until = unstamp(request.end_time.as_ref());
        let times = doing(&name, || scheduler.times(from, until, 1_000))?;
        Ok(service::ListScheduleMatchingTimesResponse {
            start_time: times.into_iter().map(|(_, actual)| stamp(actual)).collect(),
        })
    }
}

/// Says what is being decided, for whoever asks why a thread is busy.
fn doing<T>(name: &Name, decide: impl FnOnce() -> T) -> T {
    tracing::debug_span!("decide", namespace = name.0, schedule = name.1).in_scope(decide)
}

fn token(scheduler: &Scheduler) -> Vec<u8> {
    scheduler.revision.to_be_bytes().to_vec()
}

fn json(text: &str) -> Payload {
    Payload {
        metadata: [("encoding".to_owned(), b"json/plain".to_vec())].into(),
        data: text.as_bytes().to_vec(),
        ..Default::default()
    }
}
