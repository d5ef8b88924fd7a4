//! The worker that is built in: activities on the task queue `atoll` of every namespace, so that a workflow in any language
//! makes and uses sandboxes, calls models, and asks people, by calling activities by name.
//!
//! An activity is one of the [`Actions`]: its name is the action's, its argument the action's input, its result the action's. It
//! is done by the application itself, as a caller that is made in one place ([`Worker::caller`]); so what holds for requests
//! (rights, limits, quotas, the ledger) holds for steps.
//!
//! What must hold:
//! - A step acts as the project that its namespace belongs to at that moment. A name passes from one project to another, an
//!   id does not: so a namespace is polled by its id, and a step whose namespace is gone is not carried out.
//! - A step that is tried again finds the sandbox, the command or the snapshot that it made before: its idempotency key is
//!   the run and the event that scheduled it. Another step with the same id makes its own.
//! - What a workflow made goes when the workflow is over, unless it was told to stay ([`owned`]).
//! - A step that was asked to stop, stops: whoever drops an action ends what it does, and what would go on is ended by name.

mod owned;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use atoll_actions::{Action, Actions, Context, Failure, Outcome, Undo, Workflow};
use atoll_identity::{Caller, Identity};
use atoll_memory::json_weight;
use atoll_sandboxes::Sandboxes;
use atoll_types::{ProjectId, STEPS_QUEUE};
use atoll_workflows::{Engine, Namespace, Refusal, Step, StepEnd};
use serde_json::{Map, Value, json};
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tracing::Instrument as _;

/// How many steps of a project are carried out at once.
const AT_ONCE: usize = 256;
/// The step that asks people, and needs nobody's yes.
const ASKS: &str = "approval.request";
/// How often new namespaces are looked for.
const ROUND: Duration = Duration::from_secs(1);

#[derive(Clone)]
struct Worker {
    engine: Engine,
    identity: Identity,
    actions: Actions,
    /// Of one project: the steps of another do not wait for these.
    places: Arc<Semaphore>,
    stop: CancellationToken,
}

/// Carries out steps until `stop`.
pub async fn work(
    engine: Engine,
    identity: Identity,
    sandboxes: Sandboxes,
    actions: Actions,
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
                    actions: actions.clone(),
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

    /// As whom a step is carried out: the one place where that is said. As the project that its namespace belongs to now, with
    /// what whoever started the workflow may do.
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
        let span = tracing::info_span!(
            "step",
            name = step.name,
            workflow = step.workflow_id,
            project = %caller.project()
        );
        let mut undo = None;
        let end = tokio::select! {
            end = self.perform(&step, &caller, &mut undo).instrument(span) => end,
            () = self.until_told_to_stop(&step) => Some(StepEnd::Canceled),
            // What is unanswered is tried again by the next server.
            () = self.stop.cancelled() => return,
        };
        if let (Some(StepEnd::Canceled), Some(undo)) = (&end, undo) {
            // What is over, or gone with its sandbox, needs no end.
            let _ended = self.actions.end(&caller, undo).await;
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

    /// How it ended; `None` if that is told later. `undo` is what would go on if this is dropped.
    async fn perform(&self, step: &Step, caller: &Caller, undo: &mut Option<Undo>) -> Option<StepEnd> {
        match self.act(step, caller, undo).await {
            Ok(Outcome::Done(result)) => Some(StepEnd::Done(result)),
            // The engine answers when somebody has decided. Meanwhile this beats, for as long as the activity stands.
            Ok(Outcome::Asked) => match step.heartbeat {
                Some(_) => std::future::pending().await,
                None => None,
            },
            Err(failure) => {
                let Failure { kind, message, again } = failure;
                match again {
                    true => tracing::warn!(%kind, message, "a step failed"),
                    false => tracing::debug!(%kind, message, "a step was refused"),
                }
                Some(StepEnd::Failed {
                    kind: kind.into_owned(),
                    message,
                    again,
                })
            }
        }
    }

    async fn act(&self, step: &Step, caller: &Caller, undo: &mut Option<Undo>) -> Result<Outcome, Failure> {
        let text = step.input.as_deref().unwrap_or(b"{}");
        // What is read of it is there until the step is over.
        let mut held = self.actions.account(caller).open();
        held.grow(text.len() as u64 + json_weight(text))?;
        let input = read(text)?;
        let input = match step.name.as_str() {
            // What is asked about may be named as people like.
            ASKS => input,
            _ => self.approved(step, caller, input).await?,
        };
        let action = Action::read(&step.name, input)?;
        let workflow = Workflow {
            engine: &self.engine,
            step,
        };
        let context = Context {
            caller,
            workflow: Some(workflow),
        };
        *undo = context.undo(&action);
        self.actions.perform(context, action).await
    }

    /// Takes `approval` out of the input. If it is there, it must have been granted to this run for exactly this step.
    async fn approved(
        &self,
        step: &Step,
        caller: &Caller,
        mut input: Map<String, Value>,
    ) -> Result<Map<String, Value>, Failure> {
        let Some(id) = input.remove("approval") else {
            return Ok(input);
        };
        let action = json!({"step": step.name, "input": input});
        let used = self.engine.use_approval(
            caller.project().as_str(),
            id.as_str().unwrap_or_default(),
            step,
            &action,
        );
        used.await.map_err(|error| Failure {
            kind: "NotApproved".into(),
            message: error.to_string(),
            // Not a no: it could not be written down.
            again: matches!(error, Refusal::Unavailable(_)),
        })?;
        Ok(input)
    }
}

fn read(text: &[u8]) -> Result<Map<String, Value>, Failure> {
    match serde_json::from_slice(text) {
        Ok(Value::Object(input)) => Ok(input),
        Ok(_) => Err(Failure::invalid("the argument must be a JSON object")),
        Err(error) => Err(Failure::invalid(format!("the argument is not JSON: {error}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_argument_is_an_object() {
        assert_eq!(read(b"{}").unwrap(), Map::new());
        for bad in [&b"[]"[..], b"7", b"", b"{"] {
            let failure = read(bad).unwrap_err();
            assert_eq!((&*failure.kind, failure.again), ("InvalidInput", false));
        }
    }
}
