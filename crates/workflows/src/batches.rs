//! Batches: one thing done to many workflows, those that a query finds or those that are named.
//!
//! ```text
//! running ──> completed        everything was tried; what failed is counted
//!    └──────> failed           somebody stopped it, or its query could not be asked
//! ```
//!
//! What must hold:
//! - It is durable before it is acknowledged, and a restart goes on with it. It begins anew then: what was ended already is
//!   found ended, and signals and resets carry request ids that a run takes once.
//! - Who is in it is decided when it begins, so that what it does changes nothing about that.
//! - All of them are in memory, so what they hold is bounded, for each and for all of a project.

use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::time::Duration;

use atoll_store::{WorkflowItem, WorkflowStore};
use atoll_workflow_core::{Nanos, Refusal, stamp};
use prost::Message as _;
use serde::Deserialize;
use temporalio_protos::temporal::api::batch::v1::{BatchOperationInfo, BatchOperationReset};
use temporalio_protos::temporal::api::common::v1::WorkflowExecution;
use temporalio_protos::temporal::api::common::v1::reset_options::Target;
use temporalio_protos::temporal::api::enums::v1::{BatchOperationState, BatchOperationType, ResetType};
use temporalio_protos::temporal::api::workflowservice::v1 as service;
use temporalio_protos::temporal::api::workflowservice::v1::start_batch_operation_request::Operation;
use tokio_util::sync::CancellationToken;

use crate::namespaces::Hold;
use crate::views::WorkflowName;
use crate::{Engine, shares, unavailable};

const KIND: &str = "batch";
/// How many of a namespace may run at once.
const MOST_RUNNING: usize = 10;
/// How many workflows may be named.
const MOST_NAMED: usize = 1_000;
/// How many workflows one may be about: they are kept in memory while it runs.
const MOST_FOUND: usize = 100_000;
/// How many a namespace may keep to be looked at, running ones among them.
const MOST_KEPT: usize = 1_000;
/// How often what is done is written down.
const NOTE_EVERY: usize = 500;
/// How long one that has ended is kept to be looked at.
const KEPT: Duration = Duration::from_secs(30 * 24 * 3600);
const PAGE: i32 = 1_000;

type Key = (String, String);

#[derive(Debug, Clone, Deserialize)]
struct Batch {
    /// The request, as it came; less what only matters while it runs, once it has ended.
    request: Vec<u8>,
    /// What is done, as the wire numbers it.
    #[serde(skip)]
    kind: i32,
    state: State,
    started_at: Nanos,
    closed_at: Option<Nanos>,
    total: i64,
    complete: i64,
    failed: i64,
    /// Why it was stopped, and by whom.
    stopped: Option<(String, String)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
enum State {
    Running,
    Completed,
    Failed,
}

/// A batch as it is written.
#[derive(Clone, PartialEq, ::prost::Message)]
struct Stored {
    #[prost(bytes = "vec", tag = "1")]
    request: Vec<u8>,
    /// As the wire numbers it.
    #[prost(int32, tag = "2")]
    state: i32,
    #[prost(int64, tag = "3")]
    started_at: i64,
    #[prost(int64, optional, tag = "4")]
    closed_at: Option<i64>,
    #[prost(int64, tag = "5")]
    total: i64,
    #[prost(int64, tag = "6")]
    complete: i64,
    #[prost(int64, tag = "7")]
    failed: i64,
    #[prost(message, optional, tag = "8")]
    stopped: Option<Stopped>,
}

#[derive(Clone, PartialEq, Eq, ::prost::Message)]
struct Stopped {
    #[prost(string, tag = "1")]
    reason: String,
    #[prost(string, tag = "2")]
    identity: String,
}

impl Batch {
    fn new(request: &service::StartBatchOperationRequest, now: Nanos) -> Self {
        Self {
            request: request.encode_to_vec(),
            kind: kind_in(request),
            state: State::Running,
            started_at: now,
            closed_at: None,
            total: 0,
            complete: 0,
            failed: 0,
            stopped: None,
        }
    }

    /// Earlier versions wrote JSON, which no message begins like.
    fn read(body: &[u8]) -> Result<Self, String> {
        let mut batch = if body.first() == Some(&b'{') {
            serde_json::from_slice::<Self>(body).map_err(|error| error.to_string())?
        } else {
            let stored = Stored::decode(body).map_err(|error| error.to_string())?;
            Self {
                request: stored.request,
                kind: 0,
                state: match BatchOperationState::try_from(stored.state) {
                    Ok(BatchOperationState::Running) => State::Running,
                    Ok(BatchOperationState::Completed) => State::Completed,
                    _ => State::Failed,
                },
                started_at: stored.started_at,
                closed_at: stored.closed_at,
                total: stored.total,
                complete: stored.complete,
                failed: stored.failed,
                stopped: stored.stopped.map(|stopped| (stopped.reason, stopped.identity)),
            }
        };
        if batch.closed_at.is_some() {
            batch.lighten();
        }
        batch.kind = kind_in(&batch.request());
        Ok(batch)
    }

    fn write(&self) -> Vec<u8> {
        let stopped = self.stopped.clone();
        let stored = Stored {
            request: self.request.clone(),
            state: self.state(),
            started_at: self.started_at,
            closed_at: self.closed_at,
            total: self.total,
            complete: self.complete,
            failed: self.failed,
            stopped: stopped.map(|(reason, identity)| Stopped { reason, identity }),
        };
        stored.encode_to_vec()
    }

    fn request(&self) -> service::StartBatchOperationRequest {
        service::StartBatchOperationRequest::decode(self.request.as_slice()).unwrap_or_default()
    }

    fn close(&mut self, state: State, now: Nanos) {
        self.state = state;
        self.closed_at = Some(now);
        self.lighten();
    }

    /// Leaves out what nobody is shown.
    fn lighten(&mut self) {
        let mut request = self.request();
        match &mut request.operation {
            Some(Operation::TerminationOperation(one)) => one.details = None,
            Some(Operation::SignalOperation(one)) => (one.input, one.header) = (None, None),
            Some(Operation::ResetOperation(one)) => one.post_reset_operations.clear(),
            _ => {}
        }
        self.request = request.encode_to_vec();
    }

    fn bytes(&self) -> usize {
        let stopped = self.stopped.as_ref();
        let why = stopped.map_or(0, |(reason, identity)| reason.len() + identity.len());
        shares::LEAST + self.request.len() + why
    }

    fn state(&self) -> i32 {
        i32::from(match self.state {
            State::Running => BatchOperationState::Running,
            State::Completed => BatchOperationState::Completed,
            State::Failed => BatchOperationState::Failed,
        })
    }
}

fn kind_in(request: &service::StartBatchOperationRequest) -> i32 {
    let operation = request.operation.as_ref();
    operation.and_then(kind_of).map_or(0, i32::from)
}

#[derive(Debug, Default)]
pub(crate) struct Batches {
    all: Mutex<BTreeMap<Key, Batch>>,
    /// Held while one is begun or changed.
    changing: tokio::sync::Mutex<()>,
    /// Ends what runs.
    stops: Mutex<BTreeMap<Key, CancellationToken>>,
}

impl Batches {
    pub(crate) async fn load(store: &dyn WorkflowStore) -> Result<Self, Refusal> {
        let mut all = BTreeMap::new();
        let mut last = None;
        loop {
            let page = store.workflow_items_behind(KIND, last.as_ref()).await;
            let mut page = page.map_err(unavailable)?;
            for item in &page {
                match Batch::read(&item.body) {
                    Ok(batch) => drop(all.insert((item.namespace.clone(), item.id.clone()), batch)),
                    Err(error) => {
                        tracing::error!(
                            namespace = item.namespace,
                            job = item.id,
                            error,
                            "a batch cannot be read and is left out"
                        );
                    }
                }
            }
            last = page.pop();
            if last.is_none() {
                break;
            }
        }
        Ok(Self {
            all: Mutex::new(all),
            ..Self::default()
        })
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Key, Batch>> {
        self.all.lock()
    }

    fn stop_of(&self, key: &Key) -> CancellationToken {
        let mut stops = self.stops.lock();
        stops.entry(key.clone()).or_default().clone()
    }

    /// Forgets all of a namespace that nobody is in.
    pub(crate) fn forget(&self, namespace: &str) {
        self.lock().retain(|(own, _), _| own != namespace);
        let mut stops = self.stops.lock();
        stops.retain(|(own, _), _| own != namespace);
    }

    fn find(&self, namespace: &str, job: &str) -> Result<Batch, Refusal> {
        let key = (namespace.to_owned(), job.to_owned());
        let found = self.lock().get(&key).cloned();
        found.ok_or_else(|| Refusal::NotFound(format!("there is no batch operation {job}")))
    }
}

fn kind_of(operation: &Operation) -> Option<BatchOperationType> {
    #[expect(deprecated, reason = "the names that every client knows")]
    Some(match operation {
        Operation::TerminationOperation(_) => BatchOperationType::Terminate,
        Operation::CancellationOperation(_) => BatchOperationType::Cancel,
        Operation::SignalOperation(_) => BatchOperationType::Signal,
        Operation::DeletionOperation(_) => BatchOperationType::Delete,
        Operation::ResetOperation(_) => BatchOperationType::Reset,
        _ => return None,
    })
}

fn identity_of(operation: &Operation) -> String {
    match operation {
        Operation::TerminationOperation(one) => one.identity.clone(),
        Operation::CancellationOperation(one) => one.identity.clone(),
        Operation::SignalOperation(one) => one.identity.clone(),
        Operation::DeletionOperation(one) => one.identity.clone(),
        Operation::ResetOperation(one) => one.identity.clone(),
        _ => String::new(),
    }
}

/// Those that the request names.
fn named(request: &service::StartBatchOperationRequest) -> Vec<WorkflowExecution> {
    #[expect(deprecated, reason = "older clients name them so")]
    let mut all = request.executions.clone();
    all.extend(request.target_executions.iter().map(|target| WorkflowExecution {
        workflow_id: target.business_id.clone(),
        run_id: target.run_id.clone(),
    }));
    all
}

impl Engine {
    pub async fn start_batch(
        &self,
        request: service::StartBatchOperationRequest,
    ) -> Result<service::StartBatchOperationResponse, Refusal> {
        let inside = self.inner.namespaces.enter(&request.namespace)?;
        let missing = |what: &str| Refusal::InvalidArgument(format!("{what} is not set on request."));
        if request.job_id.is_empty() {
            return Err(missing("JobId"));
        }
        if request.reason.is_empty() {
            return Err(missing("Reason"));
        }
        let limits = &self.inner.options.limits;
        limits.check_id("JobId", &request.job_id)?;
        let bytes = request.encoded_len();
        if bytes > limits.blob_bytes {
            return Err(Refusal::InvalidArgument(format!(
                "the request has {bytes} bytes, and a batch operation may have {}: name fewer executions, or send less along",
                limits.blob_bytes
            )));
        }
        let operation = request
            .operation
            .as_ref()
            .ok_or_else(|| missing("Batch operation"))?;
        if kind_of(operation).is_none() {
            return Err(Refusal::Unimplemented(
                "batches terminate, cancel, signal, delete or reset workflows".to_owned(),
            ));
        }
        let named = named(&request);
        match (named.len(), request.visibility_query.is_empty()) {
            (0, true) => return Err(missing("VisibilityQuery or Executions")),
            (0, false) => drop(self.parse_query(&request.namespace, &request.visibility_query)?),
            (1..=MOST_NAMED, true) => {}
            (_, true) => {
                return Err(Refusal::InvalidArgument(format!(
                    "at most {MOST_NAMED} executions may be named"
                )));
            }
            (_, false) => {
                return Err(Refusal::InvalidArgument(
                    "VisibilityQuery and Executions exclude each other.".to_owned(),
                ));
            }
        }
        let batches = &self.inner.batches;
        let key = (request.namespace.clone(), request.job_id.clone());
        let changing = batches.changing.lock().await;
        self.forget_old_batches().await;
        {
            let all = batches.lock();
            if all.contains_key(&key) {
                return Err(Refusal::AlreadyExists(format!(
                    "the batch operation {} was started already",
                    key.1
                )));
            }
            let own = || all.iter().filter(|((namespace, _), _)| *namespace == key.0);
            if own().count() >= MOST_KEPT {
                return Err(Refusal::ResourceExhausted(format!(
                    "{MOST_KEPT} batch operations of this namespace are kept already; they are forgotten {} days after \
                     their end",
                    KEPT.as_secs() / (24 * 3600)
                )));
            }
            let running = own().filter(|(_, batch)| batch.state == State::Running);
            if running.count() >= MOST_RUNNING {
                return Err(Refusal::ResourceExhausted(format!(
                    "{MOST_RUNNING} batch operations run in this namespace already"
                )));
            }
            let kept = all
                .iter()
                .map(|((namespace, _), batch)| (namespace.as_str(), batch.bytes()));
            let kept = self.share(&key.0, kept);
            shares::check_share("batch operations", kept + bytes + shares::LEAST, shares::BATCHES)?;
        }
        let batch = Batch::new(&request, self.now());
        self.keep_batch(&key, batch).await?;
        drop(changing);
        tokio::spawn(self.clone().run_batch(inside, key));
        Ok(service::StartBatchOperationResponse {})
    }

    pub async fn stop_batch(
        &self,
        request: service::StopBatchOperationRequest,
    ) -> Result<service::StopBatchOperationResponse, Refusal> {
        let _inside = self.inner.namespaces.enter(&request.namespace)?;
        let limits = &self.inner.options.limits;
        limits.check_id("Reason", &request.reason)?;
        limits.check_id("Identity", &request.identity)?;
        let key = (request.namespace, request.job_id);
        let _changing = self.inner.batches.changing.lock().await;
        let mut batch = self.inner.batches.find(&key.0, &key.1)?;
        if batch.state != State::Running {
            return Err(Refusal::NotFound(format!(
                "the batch operation {} has ended already",
                key.1
            )));
        }
        batch.close(State::Failed, self.now());
        batch.stopped = Some((request.reason, request.identity));
        self.keep_batch(&key, batch).await?;
        self.inner.batches.stop_of(&key).cancel();
        Ok(service::StopBatchOperationResponse {})
    }

    pub fn describe_batch(
        &self,
        request: service::DescribeBatchOperationRequest,
    ) -> Result<service::DescribeBatchOperationResponse, Refusal> {
        let _inside = self.inner.namespaces.enter(&request.namespace)?;
        let batch = self.inner.batches.find(&request.namespace, &request.job_id)?;
        let asked = batch.request();
        let operation = asked.operation.as_ref();
        let (reason, identity) = batch.stopped.clone().unwrap_or_else(|| {
            let identity = operation.map(identity_of).unwrap_or_default();
            (asked.reason.clone(), identity)
        });
        Ok(service::DescribeBatchOperationResponse {
            operation_type: batch.kind,
            job_id: request.job_id,
            state: batch.state(),
            start_time: Some(stamp(batch.started_at)),
            close_time: batch.closed_at.map(stamp),
            total_operation_count: batch.total,
            complete_operation_count: batch.complete,
            failure_operation_count: batch.failed,
            identity,
            reason,
            query: asked.visibility_query,
            executions: asked.target_executions,
        })
    }

    #[expect(clippy::needless_pass_by_value, reason = "the shape of all calls of the wire")]
    pub fn list_batches(
        &self,
        request: service::ListBatchOperationsRequest,
    ) -> Result<service::ListBatchOperationsResponse, Refusal> {
        let _inside = self.inner.namespaces.enter(&request.namespace)?;
        let offset: usize = match request.next_page_token.as_slice() {
            [] => 0,
            token => std::str::from_utf8(token)
                .ok()
                .and_then(|text| text.parse().ok())
                .ok_or_else(|| Refusal::InvalidArgument("Invalid NextPageToken.".to_owned()))?,
        };
        let size = usize::try_from(request.page_size)
            .ok()
            .filter(|size| *size > 0)
            .unwrap_or(100)
            .min(1_000);
        let mut found: Vec<(Nanos, BatchOperationInfo)> = self
            .inner
            .batches
            .lock()
            .range((request.namespace.clone(), String::new())..)
            .take_while(|((namespace, _), _)| *namespace == request.namespace)
            .map(|((_, job), batch)| (batch.started_at, info(job, batch)))
            .collect();
        found.sort_by_key(|(started_at, _)| std::cmp::Reverse(*started_at));
        let more = found.len() > offset.saturating_add(size);
        Ok(service::ListBatchOperationsResponse {
            operation_info: found
                .into_iter()
                .skip(offset)
                .take(size)
                .map(|(_, info)| info)
                .collect(),
            next_page_token: if more {
                offset.saturating_add(size).to_string().into_bytes()
            } else {
                Vec::new()
            },
        })
    }

    /// Goes on with what a restart has interrupted; or, in one namespace, a deletion that did not come about.
    pub(crate) fn resume_batches(&self, namespace: Option<&str>) {
        let running: Vec<Key> = self
            .inner
            .batches
            .lock()
            .iter()
            .filter(|(key, batch)| {
                batch.state == State::Running && namespace.is_none_or(|namespace| key.0 == namespace)
            })
            .map(|(key, _)| key.clone())
            .collect();
        for key in running {
            if let Ok(inside) = self.inner.namespaces.enter(&key.0) {
                tokio::spawn(self.clone().run_batch(inside, key));
            }
        }
    }

    /// Writes it down, then remembers it.
    async fn keep_batch(&self, key: &Key, batch: Batch) -> Result<(), Refusal> {
        let item = WorkflowItem {
            namespace: key.0.clone(),
            id: key.1.clone(),
            body: batch.write(),
        };
        let written = self.inner.store.put_workflow_item(KIND, item).await;
        written.map_err(unavailable)?;
        self.inner.batches.lock().insert(key.clone(), batch);
        Ok(())
    }

    /// Changes one that runs; `false` if it does not any more.
    async fn change_batch(&self, key: &Key, change: impl FnOnce(&mut Batch)) -> Result<bool, Refusal> {
        let _changing = self.inner.batches.changing.lock().await;
        let mut batch = self.inner.batches.find(&key.0, &key.1)?;
        if batch.state != State::Running {
            return Ok(false);
        }
        change(&mut batch);
        self.keep_batch(key, batch).await?;
        Ok(true)
    }

    async fn forget_old_batches(&self) {
        let kept = i64::try_from(KEPT.as_nanos()).unwrap_or(i64::MAX);
        let before = self.now().saturating_sub(kept);
        let old: Vec<Key> = self
            .inner
            .batches
            .lock()
            .iter()
            .filter(|(_, batch)| batch.closed_at.is_some_and(|at| at < before))
            .map(|(key, _)| key.clone())
            .collect();
        for key in old {
            let gone = self
                .inner
                .store
                .delete_workflow_item(KIND, key.0.clone(), key.1.clone());
            if gone.await.is_ok() {
                self.inner.batches.lock().remove(&key);
            }
        }
    }

    /// Holds the namespace all the while: the workflows that it names are those of this namespace and of no later one.
    async fn run_batch(self, inside: Hold, key: Key) {
        let stop = self.inner.batches.stop_of(&key);
        let ended = tokio::select! {
            () = self.inner.stop.cancelled() => return,
            () = inside.ending() => return,
            () = stop.cancelled() => Ok(true),
            ended = self.work_through(&key) => ended,
        };
        let state = match ended {
            Ok(_) => State::Completed,
            Err(error) => {
                tracing::warn!(namespace = key.0, job = key.1, %error, "a batch operation failed");
                State::Failed
            }
        };
        let now = self.now();
        let closed = self.change_batch(&key, |batch| batch.close(state, now)).await;
        if let Err(error) = closed {
            tracing::warn!(namespace = key.0, job = key.1, %error, "the end of a batch operation was not written; the next start tries again");
        }
        let mut stops = self.inner.batches.stops.lock();
        stops.remove(&key);
    }

    async fn work_through(&self, key: &Key) -> Result<bool, Refusal> {
        let request = self.inner.batches.find(&key.0, &key.1)?.request();
        let Some(operation) = &request.operation else {
            return Ok(true);
        };
        let targets = match named(&request) {
            named if named.is_empty() => self.found_by(&key.0, &request.visibility_query).await?,
            named => named,
        };
        let total = i64::try_from(targets.len()).unwrap_or(i64::MAX);
        let (mut complete, mut failed) = (0, 0);
        self.change_batch(key, |batch| {
            (batch.total, batch.complete, batch.failed) = (total, 0, 0);
        })
        .await?;
        let pause = (request.max_operations_per_second > 0.0)
            .then(|| Duration::from_secs_f32((1.0 / request.max_operations_per_second).min(3600.0)));
        for (count, target) in targets.into_iter().enumerate() {
            match self.apply(key, &request.reason, operation, target.clone()).await {
                Ok(()) => complete += 1,
                Err(error) => {
                    tracing::debug!(job = key.1, workflow = target.workflow_id, %error, "a batch operation could not do one");
                    failed += 1;
                }
            }
            if (count + 1) % NOTE_EVERY == 0 {
                self.change_batch(key, |batch| (batch.complete, batch.failed) = (complete, failed))
                    .await?;
            }
            if let Some(pause) = pause {
                tokio::time::sleep(pause).await;
            }
        }
        self.change_batch(key, |batch| (batch.complete, batch.failed) = (complete, failed))
            .await
    }

    async fn found_by(&self, namespace: &str, query: &str) -> Result<Vec<WorkflowExecution>, Refusal> {
        let (mut all, mut token) = (Vec::new(), Vec::new());
        loop {
            let (page, next) = self.list_workflows(namespace, query, PAGE, &token).await?;
            all.extend(page.into_iter().filter_map(|info| info.execution));
            if all.len() > MOST_FOUND {
                return Err(Refusal::InvalidArgument(format!(
                    "more than {MOST_FOUND} workflows match: narrow the query, by StartTime for example, and start several"
                )));
            }
            if next.is_empty() {
                return Ok(all);
            }
            token = next;
        }
    }

    async fn apply(
        &self,
        (namespace, job): &Key,
        reason: &str,
        operation: &Operation,
        target: WorkflowExecution,
    ) -> Result<(), Refusal> {
        let namespace = namespace.clone();
        let request_id = format!("batch {job} {}", target.workflow_id);
        let done = match operation.clone() {
            Operation::TerminationOperation(one) => self
                .terminate_workflow(service::TerminateWorkflowExecutionRequest {
                    namespace,
                    workflow_execution: Some(target),
                    reason: reason.to_owned(),
                    details: one.details,
                    identity: one.identity,
                    ..Default::default()
                })
                .await
                .map(drop),
            Operation::CancellationOperation(one) => self
                .cancel_workflow(service::RequestCancelWorkflowExecutionRequest {
                    namespace,
                    workflow_execution: Some(target),
                    reason: reason.to_owned(),
                    identity: one.identity,
                    request_id,
                    ..Default::default()
                })
                .await
                .map(drop),
            Operation::SignalOperation(one) => self
                .signal_workflow(service::SignalWorkflowExecutionRequest {
                    namespace,
                    workflow_execution: Some(target),
                    signal_name: one.signal,
                    input: one.input,
                    header: one.header,
                    identity: one.identity,
                    request_id,
                    ..Default::default()
                })
                .await
                .map(drop),
            Operation::DeletionOperation(_) => self
                .delete_workflow(service::DeleteWorkflowExecutionRequest {
                    namespace,
                    workflow_execution: Some(target),
                })
                .await
                .map(drop),
            Operation::ResetOperation(one) => {
                self.reset_one(namespace, reason, request_id, target, one).await
            }
            _ => Err(Refusal::Unimplemented("this batch operation".to_owned())),
        };
        match done {
            // It is as it should be, though others were faster, or this batch before a restart.
            Err(Refusal::NotFound(_) | Refusal::CancelAlreadyRequested)
                if !matches!(
                    operation,
                    Operation::SignalOperation(_) | Operation::ResetOperation(_)
                ) =>
            {
                Ok(())
            }
            done => done,
        }
    }

    async fn reset_one(
        &self,
        namespace: String,
        reason: &str,
        request_id: String,
        target: WorkflowExecution,
        reset: BatchOperationReset,
    ) -> Result<(), Refusal> {
        let name = WorkflowName {
            namespace: namespace.clone(),
            id: target.workflow_id.clone(),
            run: target.run_id.clone(),
        };
        let options = reset.options.unwrap_or_default();
        #[expect(deprecated, reason = "older clients say it so")]
        let (kind, reapply) = (
            ResetType::try_from(reset.reset_type).unwrap_or_default(),
            reset.reset_reapply_type.max(options.reset_reapply_type),
        );
        let point = match (options.target, kind) {
            (Some(Target::WorkflowTaskId(id)), _) => id,
            (Some(Target::FirstWorkflowTask(())), _) | (None, ResetType::FirstWorkflowTask) => {
                self.task_ends(&name).await?.0
            }
            (Some(Target::LastWorkflowTask(())), _) | (None, ResetType::LastWorkflowTask) => {
                self.task_ends(&name).await?.1
            }
            _ => {
                return Err(Refusal::Unimplemented(
                    "a batch resets to the first or the last workflow task, or to one by its id".to_owned(),
                ));
            }
        };
        self.reset_workflow(service::ResetWorkflowExecutionRequest {
            namespace,
            workflow_execution: Some(target),
            reason: reason.to_owned(),
            workflow_task_finish_event_id: point,
            request_id,
            identity: reset.identity,
            reset_reapply_type: reapply,
            reset_reapply_exclude_types: options.reset_reapply_exclude_types,
            post_reset_operations: reset.post_reset_operations,
        })
        .await
        .map(drop)
    }

    /// The events that end its first and its last workflow task.
    async fn task_ends(&self, name: &WorkflowName) -> Result<(i64, i64), Refusal> {
        let (mut first, mut last, mut from) = (None, None, Some(1));
        while let Some(start) = from {
            let (events, next) = self.view_history(name, start, 1_000).await?;
            for event in events {
                if event.kind == "WorkflowTaskCompleted" {
                    first = first.or(Some(event.id));
                    last = Some(event.id);
                }
            }
            from = next;
        }
        first.zip(last).ok_or_else(|| {
            Refusal::FailedPrecondition(format!("no workflow task of {} has been completed", name.id))
        })
    }
}

fn info(job: &str, batch: &Batch) -> BatchOperationInfo {
    BatchOperationInfo {
        job_id: job.to_owned(),
        state: batch.state(),
        start_time: Some(stamp(batch.started_at)),
        close_time: batch.closed_at.map(stamp),
        operation_type: batch.kind,
    }
}
