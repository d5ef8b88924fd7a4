//! The worker that is built in: activities on the task queue `atoll` of every namespace, so that a workflow in any language
//! makes and uses sandboxes, and asks people, by calling activities by name.
//!
//! An activity is a request of the API: its argument is what the API's JSON would be, with the sandbox's id beside it, and
//! its result is the answer. The request goes to the API inside this process, as the project that the
//! namespace belongs to; so what holds for requests (limits, quotas, refusals, the ledger) holds for steps.
//!
//! What must hold:
//! - A step acts as the project that its namespace belongs to at that moment. A name passes from one project to another, an
//!   id does not: so a namespace is polled by its id, and a step whose namespace is gone is not carried out.
//! - A step that is tried again finds the sandbox, the command or the snapshot that it made before: its idempotency key is
//!   the run and the event that scheduled it. Another step with the same id makes its own.
//! - What a workflow made goes when the workflow is over, unless it was told to stay ([`owned`]).
//! - A step that was asked to stop, stops: whoever drops a request ends what it does.

mod call;
mod model;
mod owned;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use atoll_front::Apis;
use atoll_identity::{Caller, Identity};
use atoll_models::Models;
use atoll_sandboxes::Sandboxes;
use atoll_types::{ProjectId, STEPS_QUEUE};
use atoll_workflows::{Engine, Namespace, Question, Refusal, Step, StepEnd};
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// How many steps of a project are carried out at once.
const AT_ONCE: usize = 256;
/// How often new namespaces are looked for.
const ROUND: Duration = Duration::from_secs(1);
/// How long a person may take, if the workflow does not say.
const DEFAULT_LIMIT: Duration = Duration::from_secs(24 * 3600);

#[derive(Clone)]
struct Worker {
    engine: Engine,
    identity: Identity,
    apis: Apis,
    models: Models,
    /// Of one project: the steps of another do not wait for these.
    places: Arc<Semaphore>,
    stop: CancellationToken,
}

/// Carries out steps until `stop`.
pub async fn work(
    engine: Engine,
    identity: Identity,
    sandboxes: Sandboxes,
    models: Models,
    apis: Apis,
    stop: CancellationToken,
) {
    let mut places: HashMap<String, Arc<Semaphore>> = HashMap::new();
    let sweeping = tokio::spawn(owned::sweep(
        engine.clone(),
        identity.clone(),
        sandboxes,
        stop.clone(),
    ));
    // By the ids of namespaces.
    let mut pollers: HashMap<String, JoinHandle<()>> = HashMap::new();
    while !stop.is_cancelled() {
        pollers.retain(|_, poller| !poller.is_finished());
        for namespace in engine.namespaces() {
            if namespace.deleting {
                continue;
            }
            let places = places
                .entry(namespace.project.clone())
                .or_insert_with(|| Arc::new(Semaphore::new(AT_ONCE)));
            pollers.entry(namespace.id.clone()).or_insert_with(|| {
                let worker = Worker {
                    engine: engine.clone(),
                    identity: identity.clone(),
                    apis: apis.clone(),
                    models: models.clone(),
                    places: Arc::clone(places),
                    stop: stop.clone(),
                };
                tokio::spawn(worker.poll(namespace))
            });
        }
        tokio::select! {
            () = stop.cancelled() => {}
            () = tokio::time::sleep(ROUND) => {}
        }
    }
    for poller in pollers.into_values() {
        poller.abort();
    }
    let _stopped = sweeping.await;
}

impl Worker {
    /// Takes steps of one namespace until it is gone.
    async fn poll(self, namespace: Namespace) {
        // Of no project that could carry anything out, as in tests of workflows alone.
        if namespace.project.parse::<ProjectId>().is_err() {
            return;
        }
        loop {
            let polled = tokio::select! {
                () = self.stop.cancelled() => return,
                polled = self.engine.next_step(&namespace, STEPS_QUEUE) => polled,
            };
            match polled {
                Ok(Some(step)) => {
                    // Only now: namespaces without steps need no place.
                    let Ok(place) = self.places.clone().acquire_owned().await else {
                        return;
                    };
                    let worker = self.clone();
                    tokio::spawn(async move {
                        Box::pin(worker.carry_out(step)).await;
                        drop(place);
                    });
                }
                Ok(None) => {}
                Err(Refusal::NamespaceNotFound(_)) => return,
                // It may stay.
                Err(Refusal::NamespaceDeleting(_)) => tokio::time::sleep(ROUND).await,
                Err(error) => {
                    tracing::warn!(namespace = namespace.name, %error, "steps cannot be taken; trying again");
                    tokio::time::sleep(ROUND).await;
                }
            }
        }
    }

    /// As the project that the step's namespace belongs to now, with what whoever started the workflow may do.
    fn caller(&self, step: &Step) -> Option<Caller> {
        let project = self.engine.project_of_step(step)?;
        let project = project.parse::<ProjectId>().ok()?;
        self.identity.step(project, &step.rights).ok()
    }

    async fn carry_out(&self, step: Step) {
        let Some(caller) = self.caller(&step) else {
            tracing::info!(
                step = step.name,
                namespace = step.namespace,
                "a step of nobody is not carried out"
            );
            return;
        };
        let mut undo = None;
        let end = tokio::select! {
            end = self.perform(&step, &caller, &mut undo) => end,
            () = self.until_told_to_stop(&step) => Some(StepEnd::Canceled),
            // What is unanswered is tried again by the next server.
            () = self.stop.cancelled() => return,
        };
        if let (Some(StepEnd::Canceled), Some(undo)) = (&end, undo) {
            // What is over, or gone with its sandbox, needs no end.
            let _ended = undo.send(&self.apis, caller.clone()).await;
        }
        let Some(end) = end else {
            return;
        };
        // What was done is not done again because the disk was full when it was to be written down.
        loop {
            let error = match self.engine.end_step(&step, end.clone()).await {
                // It timed out meanwhile, or its workflow is over.
                Ok(()) | Err(Refusal::NotFound(_)) => return,
                Err(error) => error,
            };
            tracing::warn!(step = step.name, workflow = step.workflow_id, %error, "a step could not be answered");
            if !matches!(error, Refusal::Unavailable(_)) {
                return;
            }
            tokio::select! {
                () = self.stop.cancelled() => return,
                () = tokio::time::sleep(ROUND) => {}
            }
        }
    }

    /// Beats as often as the workflow wants to hear it.
    async fn until_told_to_stop(&self, step: &Step) {
        let Some(limit) = step.heartbeat else {
            return std::future::pending().await;
        };
        loop {
            tokio::time::sleep(limit / 3).await;
            match self.engine.beat_step(step).await {
                Ok(false) => {}
                Ok(true) | Err(Refusal::NotFound(_)) => return,
                Err(error) => tracing::warn!(%error, "a step's heartbeat was lost"),
            }
        }
    }

    /// How it ended; `None` if that is told later. `undo` ends what would go on if this is dropped.
    async fn perform(&self, step: &Step, caller: &Caller, undo: &mut Option<call::Call>) -> Option<StepEnd> {
        let input = match step.input.as_deref().map(serde_json::from_slice::<Value>) {
            None => json!({}),
            Some(Ok(input)) if input.is_object() => input,
            Some(Ok(_)) => return Some(call::invalid("the argument must be a JSON object")),
            Some(Err(error)) => return Some(call::invalid(format!("the argument is not JSON: {error}"))),
        };
        if step.name == "approval.request" {
            return self.ask(step, caller, input).await;
        }
        let input = match self.approved(step, caller, input).await {
            Ok(input) => input,
            Err(end) => return Some(end),
        };
        if step.name == "model.call" {
            return Some(model::call(&self.models, step, caller, input).await);
        }
        Some(match call::plan(step, input) {
            Ok(mut call) => {
                *undo = call.take_undo();
                call.send(&self.apis, caller.clone()).await
            }
            Err(end) => end,
        })
    }

    /// Takes `approval` out of the input. If it is there, it must have been granted to this run for exactly this step.
    async fn approved(&self, step: &Step, caller: &Caller, mut input: Value) -> Result<Value, StepEnd> {
        let Some(id) = input.as_object_mut().and_then(|fields| fields.remove("approval")) else {
            return Ok(input);
        };
        let action = json!({"step": step.name, "input": input});
        let used = self.engine.use_approval(
            caller.project().as_str(),
            id.as_str().unwrap_or_default(),
            step,
            &action,
        );
        match used.await {
            Ok(()) => Ok(input),
            Err(error) => Err(StepEnd::Failed {
                kind: "NotApproved".to_owned(),
                message: error.to_string(),
                // Not a no: it could not be written down.
                again: matches!(error, Refusal::Unavailable(_)),
            }),
        }
    }

    async fn ask(&self, step: &Step, caller: &Caller, mut input: Value) -> Option<StepEnd> {
        let Some(fields) = input.as_object_mut() else {
            return Some(call::invalid("the argument must be a JSON object"));
        };
        let (action, reason, limit) = (
            fields.remove("action"),
            fields.remove("reason").unwrap_or_else(|| json!("")),
            fields.remove("timeout_ms"),
        );
        if let Some(unknown) = fields.keys().next() {
            return Some(call::invalid(format!(
                "`{unknown}` is not a field of approval.request"
            )));
        }
        let (Some(action), Some(reason)) = (action, reason.as_str()) else {
            return Some(call::invalid(
                "approval.request wants `action`, and `reason` as text",
            ));
        };
        let limit = match limit.as_ref().map(Value::as_u64) {
            None => DEFAULT_LIMIT,
            Some(Some(millis)) if millis > 0 => Duration::from_millis(millis),
            Some(_) => return Some(call::invalid("`timeout_ms` must be a number of at least 1")),
        };
        let asked = self
            .engine
            .ask_approval(Question {
                namespace: step.namespace.clone(),
                workflow_id: step.workflow_id.clone(),
                run_id: step.run_id.clone(),
                activity_id: step.activity_id.clone(),
                scheduled_id: step.scheduled_id,
                action,
                reason: reason.to_owned(),
                limit,
            })
            .await;
        let approval = match asked {
            Ok(approval) => approval,
            Err(error) => {
                return Some(StepEnd::Failed {
                    kind: "NotAsked".to_owned(),
                    message: error.to_string(),
                    again: !matches!(error, Refusal::InvalidArgument(_)),
                });
            }
        };
        tracing::info!(approval = approval.id, project = %caller.project(), "a person is asked");
        match &approval.decision {
            Some(decision) if decision.granted => Some(StepEnd::Done(approval.granted_result(decision))),
            Some(decision) => Some(StepEnd::Failed {
                kind: atoll_workflows::DENIED.to_owned(),
                message: approval.denied_message(decision),
                again: false,
            }),
            // The engine answers when somebody has decided. Meanwhile this beats, for as long as the activity stands.
            None => match step.heartbeat {
                Some(_) => std::future::pending().await,
                None => None,
            },
        }
    }
}
