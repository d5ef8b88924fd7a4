//! Queries: questions to a workflow's code that leave no trace.
//!
//! If a workflow task is pending, a query goes along with it, so that the answer reflects what has happened before. If
//! not, it is a task of its own: for the worker that remembers the workflow, else for any, with the whole history.
//!
//! What must hold: a query is answered by whoever was given it. A worker names it by a token that anybody could have made
//! up, so the token has to name the very run that was asked, in the namespace of the caller.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use atoll_workflow_core::{Refusal, Run, TaskToken};
use temporalio_protos::temporal::api::common::v1::{Payloads, WorkflowExecution, WorkflowType};
use temporalio_protos::temporal::api::enums::v1::{
    QueryRejectCondition, QueryResultType, TaskQueueKind, WorkflowExecutionStatus as Status,
};
use temporalio_protos::temporal::api::failure::v1::Failure;
use temporalio_protos::temporal::api::history::v1::History;
use temporalio_protos::temporal::api::query::v1::{QueryRejected, WorkflowQuery, WorkflowQueryResult};
use temporalio_protos::temporal::api::taskqueue::v1::TaskQueue;
use temporalio_protos::temporal::api::workflowservice::v1 as service;
use tokio::sync::oneshot;

use crate::Engine;
use crate::cells::Key;
use crate::queues::{Kind, QueueKey, Task, What};

/// How long the worker that remembers the workflow has to take a query.
const STICKY: Duration = Duration::from_secs(3);
const PATIENCE: Duration = Duration::from_secs(10);
/// A workflow whose tasks keep failing cannot answer.
const HOPELESS_ATTEMPT: i32 = 3;

/// What a worker said.
#[derive(Debug, Clone)]
pub(crate) struct Answer {
    result: Option<Payloads>,
    error: Option<(String, Option<Failure>)>,
}

impl From<WorkflowQueryResult> for Answer {
    fn from(result: WorkflowQueryResult) -> Self {
        let failed = result.result_type == i32::from(QueryResultType::Failed);
        Self {
            result: result.answer,
            error: failed.then_some((result.error_message, result.failure)),
        }
    }
}

/// Queries that somebody waits for.
#[derive(Debug, Default, Clone)]
pub(crate) struct Queries {
    open: Arc<Mutex<HashMap<String, Open>>>,
}

#[derive(Debug)]
struct Open {
    query: WorkflowQuery,
    /// Whom it was asked of.
    key: Key,
    /// The run that a worker was told to answer for.
    run_id: Option<String>,
    taken: bool,
    answer: oneshot::Sender<Answer>,
}

impl Queries {
    fn lock(&self) -> parking_lot::MutexGuard<'_, HashMap<String, Open>> {
        self.open.lock()
    }

    fn ask(&self, key: Key, query: WorkflowQuery) -> (Waiter, oneshot::Receiver<Answer>) {
        let id = crate::fresh_id();
        let (answer, receiver) = oneshot::channel();
        let open = Open {
            query,
            key,
            run_id: None,
            taken: false,
            answer,
        };
        self.lock().insert(id.clone(), open);
        let waiter = Waiter {
            queries: self.clone(),
            id,
        };
        (waiter, receiver)
    }

    pub(crate) fn get(&self, id: &str) -> Option<WorkflowQuery> {
        self.lock().get(id).map(|open| open.query.clone())
    }

    /// The query, if it is still open and nobody has taken it.
    fn take(&self, id: &str, run_id: &str) -> Option<WorkflowQuery> {
        let mut all = self.lock();
        let open = all.get_mut(id).filter(|open| !open.taken)?;
        open.taken = true;
        open.run_id = Some(run_id.to_owned());
        Some(open.query.clone())
    }

    fn is_taken(&self, id: &str) -> bool {
        self.lock().get(id).is_none_or(|open| open.taken)
    }

    /// Answers one that went along with a workflow task of the run.
    pub(crate) fn answer(&self, id: &str, answer: Answer) -> bool {
        let open = self.lock().remove(id);
        open.is_some_and(|open| open.answer.send(answer).is_ok())
    }

    /// Answers one that was a task of its own, if the token is that of the task.
    fn answer_task(&self, token: &TaskToken, answer: Answer) -> bool {
        let mut all = self.lock();
        let is_meant = all.get(&token.query_id).is_some_and(|open| {
            open.key == Key::new(&token.namespace, &token.workflow_id)
                && open.run_id.as_ref() == Some(&token.run_id)
        });
        let open = if is_meant {
            all.remove(&token.query_id)
        } else {
            None
        };
        drop(all);
        open.is_some_and(|open| open.answer.send(answer).is_ok())
    }
}

/// Forgets a query when nobody waits for it any more.
struct Waiter {
    queries: Queries,
    id: String,
}

impl Drop for Waiter {
    fn drop(&mut self) {
        self.queries.lock().remove(&self.id);
    }
}

impl Engine {
    pub async fn query_workflow(
        &self,
        request: service::QueryWorkflowRequest,
        wait: Option<Duration>,
    ) -> Result<service::QueryWorkflowResponse, Refusal> {
        let inside = self.inner.namespaces.enter(&request.namespace)?;
        let execution = request.execution.unwrap_or_default();
        let key = Key::new(&request.namespace, &execution.workflow_id);
        let query = request
            .query
            .filter(|query| !query.query_type.is_empty())
            .ok_or_else(|| Refusal::InvalidArgument("QueryType is not set on request.".to_owned()))?;
        self.inner.options.limits.check_input(query.query_args.as_ref())?;
        let (waiter, receiver) = self.inner.queries.ask(key.clone(), query);
        {
            let mut locked = self.lock(&key).await?;
            let run_id = locked.resolve(&execution.run_id).await?;
            let slot = locked.slot(&run_id)?;
            if let Some(status) = rejected(&slot.run, request.query_reject_condition) {
                return Ok(service::QueryWorkflowResponse {
                    query_rejected: Some(QueryRejected { status }),
                    ..Default::default()
                });
            }
            match &slot.run.state.task {
                Some(task) if task.attempt >= HOPELESS_ATTEMPT => {
                    return Err(Refusal::NotReady(
                        "Unable to query workflow due to Workflow Task in failed state.".to_owned(),
                    ));
                }
                Some(_) => slot.queries.push(waiter.id.clone()),
                None if slot.run.is_running() && slot.run.state.last_completed_id == 0 => {
                    return Err(Refusal::NotReady(
                        "Workflow task not scheduled/started yet, so the workflow cannot be queried."
                            .to_owned(),
                    ));
                }
                None => self.dispatch_query(&key, &slot.run, &waiter.id),
            }
        }
        let patience = wait.map_or(PATIENCE, |wait| wait.saturating_sub(Duration::from_millis(200)));
        let answered = tokio::select! {
            answered = tokio::time::timeout(patience, receiver) => answered,
            () = inside.ending() => return Err(Refusal::NamespaceDeleting(request.namespace)),
        };
        match answered {
            Ok(Ok(Answer {
                error: Some((message, failure)),
                ..
            })) => Err(Refusal::QueryFailed {
                message,
                failure: failure.map(Box::new),
            }),
            Ok(Ok(answer)) => Ok(service::QueryWorkflowResponse {
                query_result: answer.result,
                ..Default::default()
            }),
            Ok(Err(_)) | Err(_) => Err(Refusal::DeadlineExceeded(
                "no worker answered the query in time: is one polling the workflow's task queue?".to_owned(),
            )),
        }
    }

    pub(crate) fn dispatch_query(&self, key: &Key, run: &Run, id: &str) {
        let queue = |name: &str| QueueKey {
            namespace: key.namespace.to_string(),
            name: name.to_owned(),
            kind: Kind::Workflow,
        };
        let task = |sticky: bool| Task {
            key: key.clone(),
            run_id: run.state.run_id.clone(),
            what: What::Query {
                id: id.to_owned(),
                sticky,
            },
        };
        let own = queue(run.task_queue());
        let sticky = run
            .state
            .sticky
            .as_ref()
            .map(|sticky| queue(&sticky.queue))
            .filter(|sticky| self.inner.queues.is_alive(sticky));
        let Some(sticky) = sticky else {
            self.inner.queues.push(&own, task(false));
            return;
        };
        self.inner.queues.push(&sticky, task(true));
        let fallback = task(false);
        let engine = self.clone();
        let id = id.to_owned();
        tokio::spawn(async move {
            tokio::time::sleep(STICKY).await;
            if !engine.inner.queries.is_taken(&id) {
                engine.inner.queues.push(&own, fallback);
            }
        });
    }

    pub(crate) async fn take_query(
        &self,
        key: Key,
        run_id: &str,
        id: String,
        sticky: bool,
    ) -> Result<service::PollWorkflowTaskQueueResponse, Refusal> {
        let query = self
            .inner
            .queries
            .take(&id, run_id)
            .ok_or_else(|| Refusal::NotFound("the query is not open".to_owned()))?;
        self.see(&key, run_id, |slot| {
            let run = &slot.run;
            let token = TaskToken {
                namespace: run.state.namespace.clone(),
                workflow_id: run.state.workflow_id.clone(),
                run_id: run.state.run_id.clone(),
                query_id: id,
                ..Default::default()
            };
            Ok(service::PollWorkflowTaskQueueResponse {
                task_token: token.encode(),
                workflow_execution: Some(WorkflowExecution {
                    workflow_id: run.state.workflow_id.clone(),
                    run_id: run.state.run_id.clone(),
                }),
                workflow_type: Some(WorkflowType {
                    name: run.workflow_type().to_owned(),
                }),
                previous_started_event_id: run.state.last_started_id,
                attempt: 1,
                history: Some(History {
                    events: if sticky { Vec::new() } else { run.events.clone() },
                }),
                query: Some(query),
                workflow_execution_task_queue: Some(TaskQueue {
                    name: run.task_queue().to_owned(),
                    kind: TaskQueueKind::Normal.into(),
                    normal_name: String::new(),
                }),
                ..Default::default()
            })
        })
        .await
    }

    pub fn answer_query(
        &self,
        request: service::RespondQueryTaskCompletedRequest,
    ) -> Result<service::RespondQueryTaskCompletedResponse, Refusal> {
        let token = TaskToken::decode(&request.namespace, &request.task_token)?;
        let failed = request.completed_type == i32::from(QueryResultType::Failed);
        let answer = Answer {
            result: request.query_result,
            error: failed.then_some((request.error_message, request.failure)),
        };
        if self.inner.queries.answer_task(&token, answer) {
            Ok(service::RespondQueryTaskCompletedResponse {})
        } else {
            Err(Refusal::NotFound(
                "query task not found, or already expired".to_owned(),
            ))
        }
    }
}

fn rejected(run: &Run, condition: i32) -> Option<i32> {
    let status = run.state.status;
    let rejected = match QueryRejectCondition::try_from(condition).unwrap_or_default() {
        QueryRejectCondition::NotOpen => status != i32::from(Status::Running),
        QueryRejectCondition::NotCompletedCleanly => {
            status != i32::from(Status::Running) && status != i32::from(Status::Completed)
        }
        QueryRejectCondition::None | QueryRejectCondition::Unspecified => false,
    };
    rejected.then_some(status)
}
