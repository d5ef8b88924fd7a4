//! `approval.request`: a person is asked, in the name of a step of a workflow. The engine keeps the question and tells the answer.

use std::time::Duration;

use atoll_workflows::{Question, Refusal};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::catalogue::Input;
use crate::outcome::{Failure, Outcome};
use crate::perform::Workflow;
use crate::spelling;

/// How long a person may take, if it is not said.
const DEFAULT_LIMIT: Duration = Duration::from_secs(24 * 3600);

/// A question to people.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AskApproval {
    action: Value,
    #[serde(default)]
    reason: String,
    timeout_ms: Option<u64>,
}

impl Input for AskApproval {
    fn read(fields: Map<String, Value>) -> Result<Self, Failure> {
        let read: Self =
            spelling::parse_value(Value::Object(fields)).map_err(|fault| Failure::invalid(fault.message))?;
        match read.timeout_ms {
            Some(0) => Err(Failure::invalid("`timeout_ms` must be a number of at least 1")),
            _ => Ok(read),
        }
    }

    fn schema() -> Value {
        json!({
            "type": "object",
            "description": "A question to people.",
            "properties": {
                "action": {"description": "What is to be approved: any JSON, such as an action and its input."},
                "reason": {"type": "string", "default": "", "description": "What people are told beside it."},
                "timeout_ms": {
                    "type": "integer",
                    "minimum": 1,
                    "description": "Silence for so long means no. Absent: 24 hours.",
                },
            },
            "required": ["action"],
            "additionalProperties": false,
        })
    }
}

pub(crate) async fn ask(workflow: Option<Workflow<'_>>, input: AskApproval) -> Result<Outcome, Failure> {
    let Some(Workflow { engine, step }) = workflow else {
        return Err(Failure::new(
            "NotAsked",
            "only a step of a workflow asks people: its workflow waits for the answer",
        ));
    };
    let question = Question {
        namespace: step.namespace.clone(),
        workflow_id: step.workflow_id.clone(),
        run_id: step.run_id.clone(),
        activity_id: step.activity_id.clone(),
        scheduled_id: step.scheduled_id,
        action: input.action,
        reason: input.reason,
        limit: input.timeout_ms.map_or(DEFAULT_LIMIT, Duration::from_millis),
    };
    let approval = engine.ask_approval(question).await.map_err(|error| Failure {
        again: !matches!(error, Refusal::InvalidArgument(_)),
        ..Failure::new("NotAsked", error.to_string())
    })?;
    tracing::info!(approval = approval.id, "a person is asked");
    match &approval.decision {
        Some(decision) if decision.granted => Ok(Outcome::Done(approval.granted_result(decision))),
        Some(decision) => Err(Failure::new(
            atoll_workflows::DENIED,
            approval.denied_message(decision),
        )),
        None => Ok(Outcome::Asked),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(input: &Value) -> Result<AskApproval, Failure> {
        AskApproval::read(input.as_object().cloned().unwrap_or_default())
    }

    #[test]
    fn a_question_has_an_action_and_a_time() {
        let asked = read(&json!({"action": {"drop": "all"}, "reason": "really?", "timeout_ms": 7})).unwrap();
        assert_eq!((&*asked.reason, asked.timeout_ms), ("really?", Some(7)));
        let asked = read(&json!({"action": null})).unwrap();
        assert_eq!((&*asked.reason, asked.timeout_ms), ("", None));
        for bad in [
            json!({}),
            json!({"action": 1, "reason": 7}),
            json!({"action": 1, "timeout_ms": 0}),
            json!({"action": 1, "timeout_ms": "7"}),
            json!({"action": 1, "to": "Ada"}),
        ] {
            let failure = read(&bad).unwrap_err();
            assert_eq!((&*failure.kind, failure.again), ("InvalidInput", false), "{bad}");
        }
    }

    #[tokio::test]
    async fn nobody_but_a_step_asks() {
        let failure = ask(None, read(&json!({"action": 1})).unwrap()).await.unwrap_err();
        assert_eq!((&*failure.kind, failure.again), ("NotAsked", false));
    }
}
