//! `model.call`: a call of a model. What a workflow asks for is paid for by the workflow: its budgets and those of its run hold,
//! and the row of the call names both.

use atoll_dialects::Dialect;
use atoll_gateway_core::Spender;
use atoll_identity::Caller;
use atoll_models::{Models, Refusal, Request, Served, Who};
use atoll_types::{Code, FaultKind};
use atoll_workflows::Step;
use serde_json::{Map, Value, json};

use crate::catalogue::Input;
use crate::outcome::{Failure, MOST};

/// The body of a wire's own request, and `wire` beside it.
#[derive(Debug)]
pub struct CallModel {
    dialect: Dialect,
    body: Map<String, Value>,
}

const WIRES: [(&str, Dialect); 4] = [
    ("chat", Dialect::Chat),
    ("responses", Dialect::Responses),
    ("messages", Dialect::Messages),
    ("embeddings", Dialect::Embeddings),
];

impl Input for CallModel {
    fn read(mut fields: Map<String, Value>) -> Result<Self, Failure> {
        let wire = match fields.remove("wire") {
            None => WIRES[0].0.to_owned(),
            Some(Value::String(wire)) => wire,
            Some(_) => return Err(Failure::invalid("`wire` must be text")),
        };
        let Some((_, dialect)) = WIRES.into_iter().find(|(name, _)| *name == wire) else {
            let known = WIRES.map(|(name, _)| name).join(", ");
            return Err(Failure::invalid(format!(
                "`{wire}` is not a wire; there are {known}"
            )));
        };
        if fields.get("stream") == Some(&Value::Bool(true)) {
            return Err(Failure::invalid("a step cannot stream; leave `stream` out"));
        }
        Ok(Self {
            dialect,
            body: fields,
        })
    }

    fn schema() -> Value {
        json!({
            "type": "object",
            "description": "The request as the wire has it, and which wire that is.",
            "properties": {
                "wire": {
                    "type": "string",
                    "enum": WIRES.map(|(name, _)| name),
                    "default": WIRES[0].0,
                },
                "model": {"type": "string", "description": "The name of the model."},
            },
            "additionalProperties": true,
        })
    }
}

pub(crate) async fn call(
    models: &Models,
    caller: &Caller,
    step: Option<&Step>,
    input: CallModel,
) -> Result<Value, Failure> {
    let request = Request {
        dialect: input.dialect,
        body: Value::Object(input.body).to_string().into(),
        model: None,
        stream: None,
        headers: Vec::new(),
        keep: None,
    };
    match models.call(&who(caller, step), request).await {
        Ok(Served::Whole { call, body, cost, .. }) if body.len() <= MOST => {
            let Ok(answer) = serde_json::from_slice::<Value>(&body) else {
                return Err(Failure::new(
                    "ProviderAnswer",
                    "the provider's answer is not JSON",
                ));
            };
            Ok(json!({"answer": answer, "call": call.as_str(), "cost_usd": cost.to_string()}))
        }
        Ok(Served::Whole { .. }) => Err(Failure::too_large()),
        // `read` lets no stream through.
        Ok(Served::Stream { .. }) => Err(Failure::invalid("a step cannot stream")),
        Err(refusal) => Err(failed(&refusal)),
    }
}

fn who(caller: &Caller, step: Option<&Step>) -> Who {
    Who {
        spender: Spender {
            project: caller.project().clone(),
            key: caller.key().cloned(),
            sandbox: caller.sandbox().cloned(),
            workflow: step.map(|step| step.workflow_id.clone()),
            run: step.map(|step| step.run_id.clone()),
        },
        key: None,
        tags: Vec::new(),
    }
}

/// Tried again where time may help: a provider that is down or busy. Money does not come back by waiting a second.
fn failed(refusal: &Refusal) -> Failure {
    let fault = &refusal.fault;
    let busy = matches!(
        fault.kind(),
        FaultKind::Unavailable | FaultKind::TimedOut | FaultKind::LimitExceeded | FaultKind::Internal
    );
    let upstream = refusal.upstream.as_ref().map(|upstream| upstream.status);
    Failure {
        kind: fault.code.text().into(),
        message: fault.to_string(),
        again: match upstream {
            Some(status) => status == 429 || status >= 500,
            None => busy && fault.code != Code::BudgetExhausted,
        },
    }
}

#[cfg(test)]
mod tests {
    use atoll_types::ProjectId;

    use super::*;

    fn read(input: &Value) -> Result<CallModel, Failure> {
        CallModel::read(input.as_object().cloned().unwrap_or_default())
    }

    #[test]
    fn the_wire_is_said_and_the_rest_is_the_request() {
        let call = read(&json!({"wire": "messages", "model": "m", "max_tokens": 9})).unwrap();
        assert_eq!(call.dialect, Dialect::Messages);
        assert_eq!(Value::Object(call.body), json!({"model": "m", "max_tokens": 9}));
        assert_eq!(read(&json!({})).unwrap().dialect, Dialect::Chat);
        for bad in [
            json!({"wire": 7}),
            json!({"wire": "smoke"}),
            json!({"stream": true}),
        ] {
            let failure = read(&bad).unwrap_err();
            assert_eq!((&*failure.kind, failure.again), ("InvalidInput", false), "{bad}");
        }
    }

    #[test]
    fn only_what_time_may_mend_is_tried_again() {
        let end = |code| failed(&Refusal::from(atoll_types::Fault::new(code, "no")));
        assert!(end(Code::ProviderFailed).again);
        for code in [Code::BudgetExhausted, Code::ProviderRefused] {
            assert!(!end(code).again);
        }
    }

    #[test]
    fn whoever_asks_pays() {
        let project = ProjectId::from_entropy([1; 20]);
        let step = Step {
            workflow_id: "order 7".to_owned(),
            run_id: "0199".to_owned(),
            ..Step::default()
        };
        let paid = who(&Caller::step_for_test(project.clone()), Some(&step)).spender;
        assert_eq!(
            (paid.workflow.as_deref(), paid.run.as_deref()),
            (Some("order 7"), Some("0199"))
        );
        assert_eq!((&paid.project, paid.key), (&project, None));
        let paid = who(&Caller::for_test(project), None).spender;
        assert!(paid.key.is_some() && paid.workflow.is_none() && paid.run.is_none());
    }
}
