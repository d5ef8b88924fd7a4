//! Activities that the server itself carries out, in words of our own: whoever performs them needs to know nothing of the
//! wire. Inputs and results are JSON, as every SDK sends it unless it is told otherwise.

use std::time::Duration;

use atoll_workflow_core::{ActivityFinish, Refusal, TaskToken, nanos};
use temporalio_protos::temporal::api::common::v1::{Payload, Payloads};
use temporalio_protos::temporal::api::failure::v1::failure::FailureInfo;
use temporalio_protos::temporal::api::failure::v1::{ApplicationFailureInfo, Failure};
use temporalio_protos::temporal::api::taskqueue::v1::TaskQueue;
use temporalio_protos::temporal::api::workflowservice::v1 as service;

use crate::Engine;
use crate::activities::Speaker;
use crate::cells::Key;
use crate::namespaces::Namespace;

/// Who did it, as histories say.
pub(crate) const IDENTITY: &str = "atoll";

/// Nobody is told more often that somebody is still at it, whatever the workflow wants: each time is a write.
const PACE: Duration = Duration::from_millis(600);

/// An activity that was taken and has to be answered.
#[derive(Debug, Clone, Default)]
pub struct Step {
    pub name: String,
    /// What came with it: one JSON text. Nothing if nothing came.
    pub input: Option<Vec<u8>>,
    pub namespace: String,
    /// Which of all that have had that name.
    pub namespace_id: String,
    pub workflow_id: String,
    pub run_id: String,
    pub activity_id: String,
    /// The event that scheduled it: what tells it from another of the same run with the same id.
    pub scheduled_id: i64,
    /// What it may do at most: what whoever started its workflow might. Empty: nobody has said.
    pub rights: String,
    /// How often it wants to hear that somebody is still at it.
    pub heartbeat: Option<Duration>,
    /// What answers name it by; opaque.
    pub token: Vec<u8>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StepEnd {
    /// With a JSON text.
    Done(Vec<u8>),
    Failed {
        /// A stable name that workflows tell failures apart by.
        kind: String,
        message: String,
        /// Whether another attempt may go better.
        again: bool,
    },
    /// It was told to stop, and has stopped.
    Canceled,
}

impl Engine {
    /// Waits for an activity on a queue of this very namespace: one that comes to have its name is not found. `Ok(None)`:
    /// there was none for a while.
    pub async fn next_step(&self, whose: &Namespace, queue: &str) -> Result<Option<Step>, Refusal> {
        let namespace = whose.name.as_str();
        let _inside = self.inner.namespaces.enter_as(namespace, &whose.id)?;
        let polled = self
            .poll_any_activity(
                service::PollActivityTaskQueueRequest {
                    namespace: namespace.to_owned(),
                    task_queue: Some(TaskQueue {
                        name: queue.to_owned(),
                        ..Default::default()
                    }),
                    identity: IDENTITY.to_owned(),
                    ..Default::default()
                },
                None,
            )
            .await?;
        if polled.task_token.is_empty() {
            return Ok(None);
        }
        let execution = polled.workflow_execution.unwrap_or_default();
        let heartbeat = u64::try_from(nanos(polled.heartbeat_timeout.as_ref())).unwrap_or(0);
        let key = Key::new(namespace, &execution.workflow_id);
        let rights = self
            .see(&key, &execution.run_id, |slot| Ok(slot.run.state.rights.clone()))
            .await?;
        let step = Step {
            name: polled.activity_type.map(|kind| kind.name).unwrap_or_default(),
            input: None,
            namespace: namespace.to_owned(),
            namespace_id: whose.id.clone(),
            workflow_id: execution.workflow_id,
            run_id: execution.run_id,
            activity_id: polled.activity_id,
            scheduled_id: TaskToken::decode(namespace, &polled.task_token)?.scheduled_id,
            rights,
            heartbeat: (heartbeat > 0).then(|| Duration::from_nanos(heartbeat).max(PACE)),
            token: polled.task_token,
        };
        match input(polled.input) {
            Ok(input) => Ok(Some(Step { input, ..step })),
            Err(message) => {
                let end = StepEnd::Failed {
                    kind: "InvalidInput".to_owned(),
                    message,
                    again: false,
                };
                self.end_step(&step, end).await?;
                Ok(None)
            }
        }
    }

    /// The project that a step is carried out for, as it is now. `None`: its namespace is gone, or about to be.
    pub fn project_of_step(&self, step: &Step) -> Option<String> {
        let found = self.namespace(&step.namespace, "").ok()?;
        (found.id == step.namespace_id && !found.deleting).then_some(found.project)
    }

    /// Says that somebody is still at it. Whether it should stop.
    pub async fn beat_step(&self, step: &Step) -> Result<bool, Refusal> {
        let token = TaskToken::decode(&step.namespace, &step.token)?;
        let answer = self.heartbeat(token, None, Speaker::Server).await?;
        Ok(answer.cancel_requested)
    }

    pub async fn end_step(&self, step: &Step, end: StepEnd) -> Result<(), Refusal> {
        let token = TaskToken::decode(&step.namespace, &step.token)?;
        let finish = match end {
            StepEnd::Done(result) => ActivityFinish::Completed(Some(json(result))),
            StepEnd::Failed { kind, message, again } => ActivityFinish::Failed {
                failure: failure(kind, message, again),
                heartbeat: None,
            },
            StepEnd::Canceled => ActivityFinish::Canceled(None),
        };
        self.finish_activity(token, finish, IDENTITY.to_owned(), Speaker::Server)
            .await
    }

    /// Whether the workflow that this run belongs to still goes on, in this run or in one that followed it. `None`: there is
    /// no such namespace in the project.
    pub async fn goes_on(
        &self,
        project: &str,
        namespace: &str,
        workflow_id: &str,
        run_id: &str,
    ) -> Result<Option<bool>, Refusal> {
        if self.check_project(project, namespace).is_err() {
            return Ok(None);
        }
        let Ok(_inside) = self.inner.namespaces.enter(namespace) else {
            return Ok(None);
        };
        let key = Key::new(namespace, workflow_id);
        let look = async |run_id: &str| {
            let seen = self
                .see(&key, run_id, |slot| {
                    Ok((
                        slot.run.is_running(),
                        slot.run.started().first_execution_run_id.clone(),
                    ))
                })
                .await;
            match seen {
                Ok(seen) => Ok(Some(seen)),
                Err(Refusal::NotFound(_)) => Ok(None),
                Err(error) => Err(error),
            }
        };
        let Some((running, first)) = look(run_id).await? else {
            return Ok(Some(false));
        };
        if running {
            return Ok(Some(true));
        }
        let latest = look("").await?;
        Ok(Some(latest.is_some_and(|(running, its_first)| {
            running && its_first == first
        })))
    }
}

/// The one JSON text that came with an activity.
fn input(payloads: Option<Payloads>) -> Result<Option<Vec<u8>>, String> {
    let mut payloads = payloads.unwrap_or_default().payloads.into_iter();
    let (first, second) = (payloads.next(), payloads.next());
    if second.is_some() {
        return Err("this activity takes one argument".to_owned());
    }
    let Some(payload) = first else {
        return Ok(None);
    };
    match payload.metadata.get("encoding").map(Vec::as_slice) {
        Some(b"json/plain") => Ok(Some(payload.data)),
        Some(b"binary/null") => Ok(None),
        other => Err(format!(
            "this activity takes JSON (`json/plain`), and was given `{}`",
            String::from_utf8_lossy(other.unwrap_or_default())
        )),
    }
}

pub(crate) fn json(data: Vec<u8>) -> Payloads {
    Payloads {
        payloads: vec![Payload {
            metadata: [("encoding".to_owned(), b"json/plain".to_vec())].into(),
            data,
            ..Default::default()
        }],
    }
}

pub(crate) fn failure(kind: String, message: String, again: bool) -> Failure {
    Failure {
        message,
        source: IDENTITY.to_owned(),
        failure_info: Some(FailureInfo::ApplicationFailureInfo(ApplicationFailureInfo {
            r#type: kind,
            non_retryable: !again,
            ..Default::default()
        })),
        ..Default::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_json_text_or_nothing_comes_in() {
        assert_eq!(input(None), Ok(None));
        assert_eq!(input(Some(json(b"{}".to_vec()))), Ok(Some(b"{}".to_vec())));
        let mut two = json(b"1".to_vec());
        two.payloads.extend(json(b"2".to_vec()).payloads);
        assert!(input(Some(two)).unwrap_err().contains("one argument"));
        let mut other = json(b"x".to_vec());
        other.payloads[0]
            .metadata
            .insert("encoding".to_owned(), b"binary/plain".to_vec());
        assert!(input(Some(other)).unwrap_err().contains("binary/plain"));
    }
}
