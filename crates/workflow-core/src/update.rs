//! Updates: requests to a workflow that are accepted or rejected by its code, and answered.
//!
//! ```text
//!   admitted ──> sent with a workflow task ──> accepted (event) ──> completed (event)
//!                                         └──> rejected (no trace)
//! ```
//!
//! Until it is accepted an update lives in memory only. If that is lost the caller sends it again under the same id.

use prost::Message as _;
use prost_wkt_types::Any;

use crate::commands::Bad;
use crate::refusal::Refusal;
use crate::run::{Run, Turn};
use crate::state;
use crate::task::Completion;
use crate::words::enums::WorkflowTaskFailedCause as Cause;
use crate::words::failure::failure::FailureInfo;
use crate::words::failure::{ApplicationFailureInfo, Failure};
use crate::words::protocol::Message;
use crate::words::protocol::message::SequencingId;
use crate::words::{Event, history, update};

/// How many rejections are remembered for callers that come back to ask.
const REJECTIONS: usize = 100;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    Admitted,
    Accepted,
    Completed,
}

#[derive(Debug, Clone, PartialEq)]
pub struct UpdateStatus {
    pub stage: Stage,
    pub outcome: Option<update::Outcome>,
}

/// Updates that were not accepted yet, in the order of their arrival.
#[derive(Debug, Clone, Default)]
pub(crate) struct Registry {
    pending: Vec<Pending>,
    rejected: Vec<(String, Failure)>,
}

#[derive(Debug, Clone)]
struct Pending {
    id: String,
    request: update::Request,
    /// A worker has it with its current task.
    sent: bool,
}

impl Registry {
    pub(crate) fn has_unsent(&self) -> bool {
        self.pending.iter().any(|update| !update.sent)
    }

    /// The task failed: whoever does it next has to be told again.
    pub(crate) fn unsend(&mut self) {
        for update in &mut self.pending {
            update.sent = false;
        }
    }

    fn find(&self, id: &str) -> Option<&Pending> {
        self.pending.iter().find(|update| update.id == id)
    }

    fn remove(&mut self, id: &str) -> Option<Pending> {
        let at = self.pending.iter().position(|update| update.id == id)?;
        Some(self.pending.remove(at))
    }

    fn reject(&mut self, id: String, failure: Failure) {
        if self.rejected.len() >= REJECTIONS {
            self.rejected.remove(0);
        }
        self.rejected.push((id, failure));
    }
}

impl Run {
    /// Admits an update, unless one of this id is known already.
    pub fn update(&mut self, request: update::Request, turn: Turn<'_>) -> Result<(), Refusal> {
        let id = request
            .meta
            .as_ref()
            .map_or(String::new(), |meta| meta.update_id.clone());
        if self.update_status(&id).is_some() {
            return Ok(());
        }
        if !self.is_running() {
            return Err(Refusal::completed());
        }
        turn.limits.check_update(&request)?;
        if self.registry.pending.len() + self.updates_in_flight() >= turn.limits.updates_in_flight {
            return Err(Refusal::ResourceExhausted(format!(
                "limit on number of concurrent in-flight updates has been reached ({})",
                turn.limits.updates_in_flight
            )));
        }
        if self.state.updates.len() >= turn.limits.updates {
            return Err(Refusal::FailedPrecondition(format!(
                "The limit on number of distinct updates in this workflow has been reached ({}). Make sure any \
                 duplicate updates share an Update ID so the server can deduplicate them, and consider rejecting \
                 updates that you aren't going to process",
                turn.limits.updates
            )));
        }
        self.registry.pending.push(Pending {
            id,
            request,
            sent: false,
        });
        self.schedule_speculative_task(turn.now);
        Ok(())
    }

    fn updates_in_flight(&self) -> usize {
        self.state
            .updates
            .values()
            .filter(|update| update.accepted_id != 0 && update.completed_id == 0)
            .count()
    }

    /// How far an update has come; `None` if there is none of that id.
    pub fn update_status(&self, id: &str) -> Option<UpdateStatus> {
        if let Some(known) = self.state.updates.get(id) {
            if known.completed_id != 0 {
                return Some(UpdateStatus {
                    stage: Stage::Completed,
                    outcome: self.update_outcome(known.completed_id),
                });
            }
            if known.accepted_id != 0 {
                if self.is_running() {
                    return Some(UpdateStatus {
                        stage: Stage::Accepted,
                        outcome: None,
                    });
                }
                return Some(UpdateStatus {
                    stage: Stage::Completed,
                    outcome: Some(failed(unfinished())),
                });
            }
        }
        if let Some((_, failure)) = self.registry.rejected.iter().find(|(known, _)| known == id) {
            return Some(UpdateStatus {
                stage: Stage::Completed,
                outcome: Some(failed(failure.clone())),
            });
        }
        (self.is_running() && self.registry.find(id).is_some()).then_some(UpdateStatus {
            stage: Stage::Admitted,
            outcome: None,
        })
    }

    /// An update of this id is under way, or was completed.
    pub fn knows_update(&self, id: &str) -> bool {
        let completed = self
            .state
            .updates
            .get(id)
            .is_some_and(|update| update.completed_id != 0);
        completed || (self.is_running() && self.update_status(id).is_some())
    }

    fn update_outcome(&self, completed_id: i64) -> Option<update::Outcome> {
        match self.attributes(completed_id) {
            Some(Event::WorkflowExecutionUpdateCompletedEventAttributes(completed)) => {
                completed.outcome.clone()
            }
            _ => None,
        }
    }

    /// Requests that were admitted and not answered when the run ended: the next run of the chain may take them.
    pub fn unanswered_updates(&self) -> Vec<update::Request> {
        self.registry
            .pending
            .iter()
            .map(|update| update.request.clone())
            .collect()
    }

    /// What is in memory only.
    pub fn memory_bytes(&self) -> usize {
        let pending = self.registry.pending.iter();
        let rejected = self.registry.rejected.iter();
        pending.map(|update| update.request.encoded_len()).sum::<usize>()
            + rejected.map(|(_, failure)| failure.encoded_len()).sum::<usize>()
    }

    /// Something about this run is in memory only, and somebody waits for it.
    pub fn has_memory(&self) -> bool {
        self.is_running()
            && (!self.registry.pending.is_empty()
                || self.state.task.as_ref().is_some_and(|task| task.speculative))
    }

    /// What goes along with a workflow task.
    pub(crate) fn send_updates(&mut self, after_event: i64) -> Vec<Message> {
        let mut messages = Vec::new();
        for update in self.registry.pending.iter_mut().filter(|update| !update.sent) {
            update.sent = true;
            messages.push(Message {
                id: format!("{}/request", update.id),
                protocol_instance_id: update.id.clone(),
                sequencing_id: Some(SequencingId::EventId(after_event)),
                body: Some(pack("temporal.api.update.v1.Request", &update.request)),
            });
        }
        messages
    }

    /// Nothing but rejections, which may leave no trace.
    pub(crate) fn leaves_no_trace(&self, completion: &Completion) -> bool {
        completion.commands.is_empty()
            && !completion.force_new
            && self.state.buffered.is_empty()
            && !completion.messages.is_empty()
            && completion
                .messages
                .iter()
                .all(|message| kind(message) == Some("Rejection"))
    }

    pub(crate) fn take_rejections(&mut self, messages: &[Message]) {
        for message in messages {
            if let Some(rejection) = unpack::<update::Rejection>(message, "Rejection") {
                let id = message.protocol_instance_id.clone();
                self.registry.remove(&id);
                self.registry.reject(id, rejection.failure.unwrap_or_default());
            }
        }
    }

    /// A worker that says nothing about an update does not know what it is.
    pub(crate) fn reject_unanswered(&mut self) {
        if !self.is_running() {
            return;
        }
        let ids: Vec<_> = self
            .registry
            .pending
            .iter()
            .filter(|update| update.sent)
            .map(|update| update.id.clone())
            .collect();
        for id in ids {
            self.registry.remove(&id);
            self.registry.reject(
                id,
                application(
                    "Workflow Update is rejected because it wasn't processed by worker. Probably, Workflow Update is \
                     not supported by the worker.",
                    "UnprocessedUpdate",
                ),
            );
        }
    }

    /// An acceptance or a response takes its place among the commands.
    pub(crate) fn take_message(&mut self, message: &Message, turn: Turn<'_>) -> Result<(), Bad> {
        let bad = |text: &str| {
            Err(Bad::new(
                Cause::BadUpdateWorkflowExecutionMessage,
                format!("BadUpdateWorkflowExecutionMessage: {text}"),
            ))
        };
        let id = message.protocol_instance_id.clone();
        match kind(message) {
            Some("Acceptance") => {
                let Some(acceptance) = unpack::<update::Acceptance>(message, "Acceptance") else {
                    return bad("cannot be read");
                };
                let pending = self.registry.remove(&id);
                let admitted_id = self.state.updates.get(&id).map_or(0, |update| update.admitted_id);
                let request = pending
                    .map(|pending| pending.request)
                    .or(acceptance.accepted_request);
                let Some(request) = request else {
                    return bad(&format!("update {id} not found"));
                };
                let accepted_id = self.append(
                    turn.now,
                    Event::WorkflowExecutionUpdateAcceptedEventAttributes(
                        history::WorkflowExecutionUpdateAcceptedEventAttributes {
                            protocol_instance_id: id.clone(),
                            accepted_request_message_id: acceptance.accepted_request_message_id,
                            accepted_request_sequencing_event_id: acceptance
                                .accepted_request_sequencing_event_id,
                            // One that was admitted by an event is there already.
                            accepted_request: (admitted_id == 0).then_some(request),
                        },
                    ),
                );
                self.state.updates.insert(
                    id,
                    state::Update {
                        accepted_id,
                        completed_id: 0,
                        admitted_id,
                    },
                );
                Ok(())
            }
            Some("Response") => {
                let Some(response) = unpack::<update::Response>(message, "Response") else {
                    return bad("cannot be read");
                };
                let Some(accepted_id) = self
                    .state
                    .updates
                    .get(&id)
                    .filter(|update| update.accepted_id != 0 && update.completed_id == 0)
                    .map(|update| update.accepted_id)
                else {
                    return bad(&format!("update {id} not found"));
                };
                let completed_id = self.append(
                    turn.now,
                    Event::WorkflowExecutionUpdateCompletedEventAttributes(
                        history::WorkflowExecutionUpdateCompletedEventAttributes {
                            meta: response.meta,
                            accepted_event_id: accepted_id,
                            outcome: response.outcome,
                        },
                    ),
                );
                if let Some(update) = self.state.updates.get_mut(&id) {
                    update.completed_id = completed_id;
                }
                Ok(())
            }
            Some("Rejection") => {
                self.take_rejections(std::slice::from_ref(message));
                Ok(())
            }
            _ => bad("unknown message"),
        }
    }

    /// After a restart: updates that a reset has admitted by an event are in the history, and are sent again.
    pub(crate) fn restore_admitted(&mut self) {
        let admitted: Vec<_> = self
            .state
            .updates
            .iter()
            .filter(|(_, update)| update.admitted_id != 0 && update.accepted_id == 0)
            .map(|(id, update)| (id.clone(), update.admitted_id))
            .collect();
        for (id, event) in admitted {
            let Some(Event::WorkflowExecutionUpdateAdmittedEventAttributes(admitted)) =
                self.attributes(event)
            else {
                continue;
            };
            let Some(request) = admitted.request.clone() else {
                continue;
            };
            if self.registry.find(&id).is_none() {
                self.registry.pending.push(Pending {
                    id,
                    request,
                    sent: false,
                });
            }
        }
    }
}

fn failed(failure: Failure) -> update::Outcome {
    update::Outcome {
        value: Some(update::outcome::Value::Failure(failure)),
    }
}

fn application(message: &str, kind: &str) -> Failure {
    crate::words::server_failure(
        message,
        FailureInfo::ApplicationFailureInfo(ApplicationFailureInfo {
            r#type: kind.to_owned(),
            non_retryable: true,
            ..Default::default()
        }),
    )
}

fn unfinished() -> Failure {
    application(
        "Workflow Update failed because the Workflow completed before the Update completed.",
        "AcceptedUpdateCompletedWorkflow",
    )
}

fn kind(message: &Message) -> Option<&str> {
    message
        .body
        .as_ref()?
        .type_url
        .rsplit_once("temporal.api.update.v1.")
        .map(|(_, name)| name)
}

fn unpack<M: prost::Message + Default>(message: &Message, name: &str) -> Option<M> {
    let body = message.body.as_ref()?;
    (kind(message)? == name).then(|| M::decode(body.value.as_slice()).ok())?
}

fn pack(name: &str, message: &impl prost::Message) -> Any {
    Any {
        type_url: format!("type.googleapis.com/{name}"),
        value: message.encode_to_vec(),
    }
}
