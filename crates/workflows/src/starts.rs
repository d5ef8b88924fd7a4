//! Starting workflows: which run an id means afterwards, and what happens to the one that is there.

use atoll_workflow_core::{CancelRequest, Refusal, Run, SignalRequest, Start, Terminate, Turn, nanos};
use temporalio_protos::temporal::api::common::v1::{Link, Payloads};
use temporalio_protos::temporal::api::enums::v1::{
    WorkflowExecutionStatus as Status, WorkflowIdConflictPolicy as Conflict, WorkflowIdReusePolicy as Reuse,
};
use temporalio_protos::temporal::api::update::v1::Request as UpdateRequest;
use temporalio_protos::temporal::api::workflowservice::v1 as service;

use crate::Engine;
use crate::cells::{Key, Locked, finish};
use crate::namespaces::Hold;
use crate::rights;

/// What to do if the id is taken.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Policy {
    reuse: Reuse,
    conflict: Conflict,
}

impl Policy {
    pub(crate) fn new(reuse: i32, conflict: i32) -> Result<Self, Refusal> {
        let reuse = Reuse::try_from(reuse).unwrap_or_default();
        let conflict = Conflict::try_from(conflict).unwrap_or_default();
        if reuse == Reuse::TerminateIfRunning {
            if conflict != Conflict::Unspecified {
                return Err(Refusal::InvalidArgument(
                    "Invalid WorkflowIDReusePolicy: WORKFLOW_ID_REUSE_POLICY_TERMINATE_IF_RUNNING cannot be used \
                     together with a WorkflowIDConflictPolicy."
                        .to_owned(),
                ));
            }
            return Ok(Self {
                reuse: Reuse::AllowDuplicate,
                conflict: Conflict::TerminateExisting,
            });
        }
        if reuse == Reuse::RejectDuplicate && conflict == Conflict::TerminateExisting {
            return Err(Refusal::InvalidArgument(
                "Invalid WorkflowIDReusePolicy: WORKFLOW_ID_REUSE_POLICY_REJECT_DUPLICATE cannot be used together \
                 with WorkflowIdConflictPolicy WORKFLOW_ID_CONFLICT_POLICY_TERMINATE_EXISTING"
                    .to_owned(),
            ));
        }
        Ok(Self {
            reuse: if reuse == Reuse::Unspecified {
                Reuse::AllowDuplicate
            } else {
                reuse
            },
            conflict,
        })
    }

    pub(crate) fn or(mut self, default: Conflict) -> Self {
        if self.conflict == Conflict::Unspecified {
            self.conflict = default;
        }
        self
    }
}

/// Which run a start request ended up with.
#[derive(Debug, Clone)]
pub(crate) struct Started {
    pub(crate) run_id: String,
    pub(crate) first_run_id: String,
    /// It is there because of this request.
    pub(crate) fresh: bool,
    pub(crate) status: i32,
    /// The first workflow task, if the caller wanted to do it itself.
    pub(crate) eager_task: Option<Box<service::PollWorkflowTaskQueueResponse>>,
}

/// What else happens to the run before it is given to a worker.
#[derive(Debug, Default)]
pub(crate) struct Along {
    pub(crate) signal: Option<SignalRequest>,
    pub(crate) update: Option<UpdateRequest>,
    pub(crate) eager: Option<String>,
}

/// What the id means now, and what may be done about it.
enum Place {
    Free,
    Mine(String),
    Existing(String),
    Replace(String),
}

impl Engine {
    pub(crate) async fn start_run(
        &self,
        start: Start,
        policy: Policy,
        along: Along,
    ) -> Result<Started, Refusal> {
        let inside = self.inner.namespaces.enter(&start.namespace)?;
        self.start_in(inside, start, policy, along).await
    }

    /// The same for who is in the namespace already.
    pub(crate) async fn start_in(
        &self,
        inside: Hold,
        start: Start,
        policy: Policy,
        along: Along,
    ) -> Result<Started, Refusal> {
        start.check(&self.inner.options.limits)?;
        let mut start = start;
        start.search_attributes = self.typed(&start.namespace, start.search_attributes.take())?;
        let engine = self.clone();
        // What a workflow is started with is large; futures that wait for it need not be.
        let placing = Box::pin(async move {
            let key = Key::new(&start.namespace, &start.workflow_id);
            let mut locked = engine.lock_in(inside, &key).await;
            engine.place(&mut locked, start, policy, along).await
        });
        finish(placing).await
    }

    async fn place(
        &self,
        locked: &mut Locked,
        start: Start,
        policy: Policy,
        along: Along,
    ) -> Result<Started, Refusal> {
        let place = match locked.current().await? {
            None => Place::Free,
            Some(run_id) => occupied(&locked.slot(&run_id)?.run, &start, policy)?,
        };
        match place {
            Place::Mine(run_id) | Place::Existing(run_id)
                if along.signal.is_none() && along.update.is_none() =>
            {
                let run = &locked.slot(&run_id)?.run;
                Ok(Started {
                    fresh: run.state.start_request_id == start.request_id && !start.request_id.is_empty(),
                    first_run_id: run.started().first_execution_run_id.clone(),
                    status: run.state.status,
                    run_id,
                    eager_task: None,
                })
            }
            Place::Mine(run_id) | Place::Existing(run_id) => {
                self.check_room(locked.inside())?;
                let started = locked.decide(&run_id, |slot, turn| {
                    if let Some(signal) = along.signal {
                        slot.run.signal(signal, turn)?;
                    }
                    if let Some(update) = along.update {
                        slot.run.update(update, turn)?;
                    }
                    Ok(Started {
                        run_id: slot.run.state.run_id.clone(),
                        first_run_id: slot.run.started().first_execution_run_id.clone(),
                        fresh: false,
                        status: slot.run.state.status,
                        eager_task: None,
                    })
                })?;
                locked.commit().await?;
                Ok(started)
            }
            Place::Replace(run_id) => {
                self.check_room(locked.inside())?;
                locked.decide(&run_id, |slot, turn| {
                    slot.run.terminate(
                        Terminate {
                            reason: "TerminateIfRunning WorkflowIdReusePolicy".to_owned(),
                            identity: "history-service".to_owned(),
                            ..Default::default()
                        },
                        turn,
                    )
                })?;
                self.begin(locked, start, along).await
            }
            Place::Free => self.begin(locked, start, along).await,
        }
    }

    async fn begin(&self, locked: &mut Locked, start: Start, along: Along) -> Result<Started, Refusal> {
        self.check_room(locked.inside())?;
        let limits = self.inner.options.limits;
        let run_id = locked.fresh_run_id().to_owned();
        let turn = Turn {
            now: locked.now(),
            fresh_run_id: &run_id,
            limits: &limits,
        };
        let mut start = start;
        start.eager = along.eager.is_some() && start.delay == 0 && start.cron.is_empty();
        let eager = along.eager.filter(|_| start.eager);
        let mut run = Run::start_quietly(start, &run_id, turn)?;
        if let Some(signal) = along.signal {
            run.signal(signal, turn)?;
        }
        run.schedule_first_task(turn.now);
        if let Some(update) = along.update {
            run.update(update, turn)?;
        }
        let mut eager_task = None;
        if let Some(identity) = eager
            && let Some(task) = run.state.task.clone()
        {
            let started = run.start_task(task.stamp, &identity, &crate::fresh_id(), turn)?;
            let _ = run.take_effects();
            eager_task = Some(Box::new(self.task_response(&run, &started)));
        }
        let started = Started {
            run_id: run_id.clone(),
            first_run_id: run.started().first_execution_run_id.clone(),
            fresh: true,
            status: run.state.status,
            eager_task,
        };
        locked.add(run);
        locked.commit().await?;
        Ok(started)
    }

    pub async fn start_workflow(
        &self,
        request: service::StartWorkflowExecutionRequest,
    ) -> Result<service::StartWorkflowExecutionResponse, Refusal> {
        let policy = Policy::new(
            request.workflow_id_reuse_policy,
            request.workflow_id_conflict_policy,
        )?
        .or(Conflict::Fail);
        let along = Along {
            eager: request.request_eager_execution.then(|| request.identity.clone()),
            ..Default::default()
        };
        let started = self.start_run(start_of(request), policy, along).await?;
        Ok(start_response(started))
    }

    pub async fn signal_with_start(
        &self,
        request: service::SignalWithStartWorkflowExecutionRequest,
    ) -> Result<service::SignalWithStartWorkflowExecutionResponse, Refusal> {
        let policy = Policy::new(
            request.workflow_id_reuse_policy,
            request.workflow_id_conflict_policy,
        )?
        .or(Conflict::UseExisting);
        if policy.conflict == Conflict::Fail {
            return Err(Refusal::InvalidArgument(
                "Invalid WorkflowIDConflictPolicy: WORKFLOW_ID_CONFLICT_POLICY_FAIL is not supported for this \
                 operation."
                    .to_owned(),
            ));
        }
        if request.signal_name.is_empty() {
            return Err(Refusal::InvalidArgument(
                "SignalName is not set on request.".to_owned(),
            ));
        }
        let signal = SignalRequest {
            name: request.signal_name.clone(),
            input: request.signal_input.clone(),
            header: request.header.clone(),
            identity: request.identity.clone(),
            request_id: format!("{}:signal", request.request_id),
            links: request.links.clone(),
            sender: None,
        };
        let start = Start {
            namespace: request.namespace,
            workflow_id: request.workflow_id,
            workflow_type: request.workflow_type.unwrap_or_default().name,
            task_queue: request.task_queue.unwrap_or_default().name,
            input: request.input,
            execution_timeout: nanos(request.workflow_execution_timeout.as_ref()),
            run_timeout: nanos(request.workflow_run_timeout.as_ref()),
            task_timeout: nanos(request.workflow_task_timeout.as_ref()),
            identity: request.identity,
            request_id: request.request_id,
            retry_policy: request.retry_policy,
            cron: request.cron_schedule,
            memo: request.memo,
            search_attributes: request.search_attributes,
            header: request.header,
            delay: nanos(request.workflow_start_delay.as_ref()),
            user_metadata: request.user_metadata,
            links: request.links,
            priority: request.priority,
            versioning_override: request.versioning_override,
            rights: rights::current(),
            ..Default::default()
        };
        let along = Along {
            signal: Some(signal),
            ..Default::default()
        };
        let started = self.start_run(start, policy, along).await?;
        Ok(service::SignalWithStartWorkflowExecutionResponse {
            run_id: started.run_id,
            first_execution_run_id: started.first_run_id,
            started: started.fresh,
            signal_link: None::<Link>,
        })
    }

    /// Ends every run of a namespace's workflow that a schedule or a batch wants ended; the caller says how.
    pub(crate) async fn stop_run(
        &self,
        key: Key,
        run_id: &str,
        terminate: bool,
        reason: &str,
        identity: &str,
        details: Option<Payloads>,
    ) -> Result<(), Refusal> {
        let (reason, identity) = (reason.to_owned(), identity.to_owned());
        self.change(key, run_id, move |slot, turn| {
            if terminate {
                slot.run.terminate(
                    Terminate {
                        reason,
                        details,
                        identity,
                        links: Vec::new(),
                    },
                    turn,
                )
            } else {
                slot.run.request_cancel(
                    CancelRequest {
                        reason,
                        identity,
                        ..Default::default()
                    },
                    turn,
                )
            }
        })
        .await
    }
}

pub(crate) fn start_response(started: Started) -> service::StartWorkflowExecutionResponse {
    service::StartWorkflowExecutionResponse {
        run_id: started.run_id,
        first_execution_run_id: started.first_run_id,
        started: started.fresh,
        status: started.status,
        eager_workflow_task: started.eager_task.map(|task| *task),
        link: None,
    }
}

pub(crate) fn start_of(request: service::StartWorkflowExecutionRequest) -> Start {
    Start {
        namespace: request.namespace,
        workflow_id: request.workflow_id,
        workflow_type: request.workflow_type.unwrap_or_default().name,
        task_queue: request.task_queue.unwrap_or_default().name,
        input: request.input,
        execution_timeout: nanos(request.workflow_execution_timeout.as_ref()),
        run_timeout: nanos(request.workflow_run_timeout.as_ref()),
        task_timeout: nanos(request.workflow_task_timeout.as_ref()),
        identity: request.identity,
        request_id: request.request_id,
        retry_policy: request.retry_policy,
        cron: request.cron_schedule,
        memo: request.memo,
        search_attributes: request.search_attributes,
        header: request.header,
        delay: nanos(request.workflow_start_delay.as_ref()),
        user_metadata: request.user_metadata,
        links: request.links,
        priority: request.priority,
        versioning_override: request.versioning_override,
        completion_callbacks: request.completion_callbacks,
        continued_failure: request.continued_failure,
        last_result: request.last_completion_result,
        rights: rights::current(),
        ..Default::default()
    }
}

/// There is a run of that id: is it in the way?
fn occupied(run: &Run, start: &Start, policy: Policy) -> Result<Place, Refusal> {
    let state = &run.state;
    let known = !start.request_id.is_empty()
        && (state.start_request_id == start.request_id
            || state.attached_request_ids.contains(&start.request_id));
    if known {
        return Ok(Place::Mine(state.run_id.clone()));
    }
    let refused = |text: String| {
        Err(Refusal::AlreadyStarted {
            message: text,
            request_id: state.start_request_id.clone(),
            run_id: state.run_id.clone(),
            first_run_id: run.started().first_execution_run_id.clone(),
        })
    };
    let names = format!("WorkflowId: {}, RunId: {}.", state.workflow_id, state.run_id);
    if run.is_running() {
        return match policy.conflict {
            Conflict::UseExisting => Ok(Place::Existing(state.run_id.clone())),
            Conflict::TerminateExisting => Ok(Place::Replace(state.run_id.clone())),
            Conflict::Fail | Conflict::Unspecified => {
                refused(format!("Workflow execution is already running. {names}"))
            }
        };
    }
    match policy.reuse {
        Reuse::RejectDuplicate => refused(format!(
            "Workflow execution already finished. {names} Workflow Id reuse policy: RejectDuplicate."
        )),
        Reuse::AllowDuplicateFailedOnly if state.status == i32::from(Status::Completed) => refused(format!(
            "Workflow execution already finished successfully. {names} Workflow Id reuse policy: \
             AllowDuplicateFailedOnly."
        )),
        Reuse::AllowDuplicateFailedOnly
        | Reuse::AllowDuplicate
        | Reuse::TerminateIfRunning
        | Reuse::Unspecified => Ok(Place::Free),
    }
}
