//! What runs send to each other. A letter leaves the outbox in the commit that records what became of it.

use atoll_workflow_core::{
    CancelRequest, ChildEnd, Delivery, Outgoing, Refusal, SignalRequest, Start, StartChildFailure,
};
use temporalio_protos::temporal::api::common::v1::WorkflowExecution;

use crate::Engine;
use crate::cells::{Key, Slot};
use crate::starts::{Along, Policy, Started};

/// After a failure of our own, how often and how patiently a letter is tried.
const PATIENCE: std::time::Duration = std::time::Duration::from_millis(500);
/// The same where the project has no room for a child.
const NO_ROOM: std::time::Duration = std::time::Duration::from_secs(5);

impl Engine {
    /// Empties the outbox of a run, oldest letter first.
    pub(crate) async fn deliver(self, key: Key, run_id: String) {
        loop {
            let next = self
                .see(&key, &run_id, |slot| Ok(slot.run.state.outbox.first().cloned()))
                .await;
            let letter = match next {
                Ok(Some(letter)) => letter,
                Ok(None) => {
                    if self.stop_posting(&key, &run_id).await {
                        return;
                    }
                    continue;
                }
                Err(Refusal::NotFound(_) | Refusal::NamespaceNotFound(_)) => return,
                Err(error) => {
                    tracing::warn!(run_id, %error, "an outbox could not be read");
                    tokio::time::sleep(PATIENCE).await;
                    continue;
                }
            };
            let Some(body) = letter.body else { return };
            let delivered = Box::pin(self.deliver_one(&key, &run_id, letter.number, body));
            match delivered.await {
                Ok(()) => {}
                Err(Refusal::ResourceExhausted(_)) => tokio::time::sleep(NO_ROOM).await,
                Err(error) => {
                    tracing::warn!(run_id, %error, "a letter could not be delivered");
                    tokio::time::sleep(PATIENCE).await;
                }
            }
            if self.inner.stop.is_cancelled() {
                return;
            }
        }
    }

    /// False if there is a new letter after all.
    async fn stop_posting(&self, key: &Key, run_id: &str) -> bool {
        let mut locked = match self.lock(key).await {
            Ok(locked) => locked,
            // It may stay: then there is somebody to post its letters.
            Err(refusal) => return !matches!(refusal, Refusal::NamespaceDeleting(_)),
        };
        let Ok(run_id) = locked.resolve(run_id).await else {
            return true;
        };
        let Ok(slot) = locked.slot(&run_id) else {
            return true;
        };
        let done = slot.run.state.outbox.is_empty();
        slot.posting = !done;
        done
    }

    async fn deliver_one(&self, key: &Key, run_id: &str, number: i64, body: Outgoing) -> Result<(), Refusal> {
        let _inside = self.inner.namespaces.enter(&key.namespace)?;
        match body {
            Outgoing::StartChild(initiated_id) => {
                let wanted = self
                    .see(key, run_id, |slot| Ok(slot.run.child_start(initiated_id)))
                    .await?;
                let outcome = match wanted {
                    None => None,
                    Some((start, reuse)) => {
                        let policy = Policy::new(reuse.into(), 0)?;
                        match Box::pin(self.start_beside(key, start, policy)).await {
                            Ok(started) => Some(Ok(started.run_id)),
                            Err(Refusal::AlreadyStarted { .. }) => {
                                Some(Err(StartChildFailure::WorkflowAlreadyExists))
                            }
                            Err(Refusal::NamespaceNotFound(_)) => {
                                Some(Err(StartChildFailure::NamespaceNotFound))
                            }
                            Err(Refusal::InvalidArgument(_)) => Some(Err(StartChildFailure::Unspecified)),
                            Err(error) => return Err(error),
                        }
                    }
                };
                self.change(key.clone(), run_id, move |slot, turn| {
                    slot.run.discard_letter(number);
                    match outcome {
                        Some(Ok(child)) => slot.run.child_started(initiated_id, &child, turn),
                        Some(Err(cause)) => slot.run.child_not_started(initiated_id, cause, turn),
                        None => {}
                    }
                    Ok(())
                })
                .await
            }
            Outgoing::Signal(initiated_id) => {
                let delivery = self.send_signal(key, run_id, initiated_id).await?;
                self.change(key.clone(), run_id, move |slot, turn| {
                    slot.run.discard_letter(number);
                    slot.run.signal_delivered(initiated_id, delivery, turn);
                    Ok(())
                })
                .await
            }
            Outgoing::Cancel(initiated_id) => {
                let delivery = self.send_cancel(key, run_id, initiated_id).await?;
                self.change(key.clone(), run_id, move |slot, turn| {
                    slot.run.discard_letter(number);
                    slot.run.cancel_delivered(initiated_id, delivery, turn);
                    Ok(())
                })
                .await
            }
            Outgoing::Ended(event) => {
                let told = self
                    .see(key, run_id, |slot| {
                        Ok(slot.run.parent().map(|parent| {
                            (
                                parent.clone(),
                                ChildEnd {
                                    initiated_id: parent.initiated_id,
                                    workflow_id: slot.run.state.workflow_id.clone(),
                                    run_id: slot.run.state.run_id.clone(),
                                    workflow_type: slot.run.workflow_type().to_owned(),
                                    event,
                                },
                            )
                        }))
                    })
                    .await?;
                if let Some((parent, end)) = told {
                    let parent_key = Key::new(&parent.namespace, &parent.workflow_id);
                    let heard = self
                        .change(parent_key, &parent.run_id, move |slot, turn| {
                            slot.run.child_ended(&end, turn);
                            Ok(())
                        })
                        .await;
                    settled(heard)?;
                }
                self.done(key, run_id, number).await
            }
            Outgoing::TerminateChild(target) => {
                let child = Key::new(&key.namespace, &target.workflow_id);
                let reason = "by parent close policy";
                let heard = self.stop_chain(child, &target.run_id, true, reason).await;
                settled(heard)?;
                self.done(key, run_id, number).await
            }
            Outgoing::CancelChild(target) => {
                let child = Key::new(&key.namespace, &target.workflow_id);
                let sender = (
                    WorkflowExecution {
                        workflow_id: key.workflow_id.to_string(),
                        run_id: run_id.to_owned(),
                    },
                    target.initiated_id,
                );
                let heard = self
                    .cancel_chain(
                        child,
                        &target.run_id,
                        String::new(),
                        sender,
                        format!("{run_id}:close"),
                    )
                    .await;
                settled(heard)?;
                self.done(key, run_id, number).await
            }
        }
    }

    /// Starts a child, in another namespace perhaps.
    async fn start_beside(&self, key: &Key, start: Start, policy: Policy) -> Result<Started, Refusal> {
        let namespaces = &self.inner.namespaces;
        let _there = namespaces.enter_beside(&key.namespace, &start.namespace)?;
        self.start_run(start, policy, Along::default()).await
    }

    async fn done(&self, key: &Key, run_id: &str, number: i64) -> Result<(), Refusal> {
        self.change(key.clone(), run_id, move |slot, _| {
            slot.run.discard_letter(number);
            Ok(())
        })
        .await
    }

    /// The run that carries on for the one that was started first, if that one has been continued.
    async fn last_of_chain(&self, key: &Key, run_id: &str) -> Result<String, Refusal> {
        let first = self
            .see(key, run_id, |slot| {
                Ok((
                    slot.run.is_running(),
                    slot.run.started().first_execution_run_id.clone(),
                ))
            })
            .await;
        match first {
            Ok((true, _)) => Ok(run_id.to_owned()),
            Ok((false, first)) => {
                self.see(key, "", |slot| {
                    if slot.run.started().first_execution_run_id == first {
                        Ok(slot.run.state.run_id.clone())
                    } else {
                        Err(Refusal::NotFound(
                            "workflow execution already completed".to_owned(),
                        ))
                    }
                })
                .await
            }
            Err(error) => Err(error),
        }
    }

    async fn stop_chain(&self, key: Key, run_id: &str, terminate: bool, reason: &str) -> Result<(), Refusal> {
        let run_id = self.last_of_chain(&key, run_id).await?;
        self.stop_run(key, &run_id, terminate, reason, "history-service", None)
            .await
    }

    async fn cancel_chain(
        &self,
        key: Key,
        run_id: &str,
        reason: String,
        sender: (WorkflowExecution, i64),
        request_id: String,
    ) -> Result<(), Refusal> {
        let run_id = self.last_of_chain(&key, run_id).await?;
        self.change(key, &run_id, move |slot, turn| {
            slot.run.request_cancel(
                CancelRequest {
                    reason,
                    identity: "history-service".to_owned(),
                    request_id,
                    links: Vec::new(),
                    sender: Some(sender),
                },
                turn,
            )
        })
        .await
    }

    async fn send_signal(&self, key: &Key, run_id: &str, initiated_id: i64) -> Result<Delivery, Refusal> {
        let wanted = self
            .see(key, run_id, |slot| {
                Ok(slot.run.outgoing_signal(initiated_id).cloned())
            })
            .await?;
        let Some(wanted) = wanted else {
            return Ok(Delivery::NotFound);
        };
        let namespaces = &self.inner.namespaces;
        let there = match namespaces.enter_beside(&key.namespace, &wanted.namespace) {
            Err(Refusal::NamespaceNotFound(_)) => return Ok(Delivery::NamespaceNotFound),
            entered => entered?,
        };
        if self.check_room(&there).is_err() {
            return Ok(Delivery::TooMany);
        }
        let sender = WorkflowExecution {
            workflow_id: key.workflow_id.to_string(),
            run_id: run_id.to_owned(),
        };
        let target = wanted.workflow_execution.unwrap_or_default();
        let target_key = Key::new(&wanted.namespace, &target.workflow_id);
        let only_child_of = wanted.child_workflow_only.then(|| sender.workflow_id.clone());
        let signal = SignalRequest {
            name: wanted.signal_name,
            input: wanted.input,
            header: wanted.header,
            identity: "history-service".to_owned(),
            request_id: format!("{run_id}:{initiated_id}"),
            links: Vec::new(),
            sender: Some(sender),
        };
        let sent = self
            .change(target_key, &target.run_id, move |slot, turn| {
                check_child(slot, only_child_of.as_deref())?;
                slot.run.signal(signal, turn)
            })
            .await;
        delivery(sent)
    }

    async fn send_cancel(&self, key: &Key, run_id: &str, initiated_id: i64) -> Result<Delivery, Refusal> {
        let wanted = self
            .see(key, run_id, |slot| {
                Ok(slot.run.outgoing_cancel(initiated_id).cloned())
            })
            .await?;
        let Some(wanted) = wanted else {
            return Ok(Delivery::NotFound);
        };
        let namespaces = &self.inner.namespaces;
        let _there = match namespaces.enter_beside(&key.namespace, &wanted.namespace) {
            Err(Refusal::NamespaceNotFound(_)) => return Ok(Delivery::NamespaceNotFound),
            entered => entered?,
        };
        let target = wanted.workflow_execution.unwrap_or_default();
        let target_key = Key::new(&wanted.namespace, &target.workflow_id);
        let sender = WorkflowExecution {
            workflow_id: key.workflow_id.to_string(),
            run_id: run_id.to_owned(),
        };
        let only_child_of = wanted.child_workflow_only.then(|| sender.workflow_id.clone());
        let request = CancelRequest {
            reason: wanted.reason,
            identity: "history-service".to_owned(),
            request_id: format!("{run_id}:{initiated_id}"),
            links: Vec::new(),
            sender: Some((sender, initiated_id)),
        };
        let sent = self
            .change(target_key, &target.run_id, move |slot, turn| {
                check_child(slot, only_child_of.as_deref())?;
                slot.run.request_cancel(request, turn)
            })
            .await;
        delivery(sent)
    }
}

fn check_child(slot: &Slot, parent: Option<&str>) -> Result<(), Refusal> {
    let is_child = parent.is_none_or(|parent| {
        slot.run
            .parent()
            .is_some_and(|actual| actual.workflow_id == parent)
    });
    if is_child {
        Ok(())
    } else {
        Err(Refusal::NotFound(
            "the workflow is not a child of the sender".to_owned(),
        ))
    }
}

/// Whoever is gone, or has ended, needs not hear any more.
fn settled(heard: Result<(), Refusal>) -> Result<(), Refusal> {
    match heard {
        Err(Refusal::NotFound(_) | Refusal::NamespaceNotFound(_) | Refusal::CancelAlreadyRequested) => Ok(()),
        other => other,
    }
}

fn delivery(sent: Result<(), Refusal>) -> Result<Delivery, Refusal> {
    match sent {
        Ok(()) | Err(Refusal::CancelAlreadyRequested) => Ok(Delivery::Done),
        Err(Refusal::NotFound(_)) => Ok(Delivery::NotFound),
        Err(Refusal::NamespaceNotFound(_)) => Ok(Delivery::NamespaceNotFound),
        Err(Refusal::InvalidArgument(_) | Refusal::ResourceExhausted(_)) => Ok(Delivery::TooMany),
        Err(error) => Err(error),
    }
}
