//! `model.call`: a call of a model, paid for by the workflow. Budgets of the workflow and of its run hold, and the row of the
//! call names both.

use atoll_dialects::Dialect;
use atoll_gateway_core::Spender;
use atoll_identity::{Action, Caller};
use atoll_models::{Models, Refusal, Request, Served, Who};
use atoll_types::{Code, FaultKind};
use atoll_workflows::{Step, StepEnd};
use serde_json::{Map, Value, json};

use crate::call::{MOST, invalid, too_large};

pub(crate) async fn call(models: &Models, step: &Step, caller: &Caller, input: Value) -> StepEnd {
    let request = match plan(input) {
        Ok(request) => request,
        Err(end) => return end,
    };
    // No route asks on the way.
    if let Err(fault) = caller.may(Action::CallModels, None) {
        return failed(&Refusal::from(fault));
    }
    let who = Who {
        spender: Spender {
            project: caller.project().clone(),
            key: None,
            sandbox: None,
            workflow: Some(step.workflow_id.clone()),
            run: Some(step.run_id.clone()),
        },
        key: None,
        tags: Vec::new(),
    };
    match models.call(&who, request).await {
        Ok(Served::Whole { call, body, cost, .. }) if body.len() <= MOST => {
            let Ok(answer) = serde_json::from_slice::<Value>(&body) else {
                return StepEnd::Failed {
                    kind: "ProviderAnswer".to_owned(),
                    message: "the provider's answer is not JSON".to_owned(),
                    again: false,
                };
            };
            let told = json!({"answer": answer, "call": call.as_str(), "cost_usd": cost.to_string()});
            StepEnd::Done(told.to_string().into_bytes())
        }
        Ok(Served::Whole { .. }) => too_large(),
        // `plan` lets no stream through.
        Ok(Served::Stream { .. }) => invalid("a step cannot stream"),
        Err(refusal) => failed(&refusal),
    }
}

/// The body of the wire's own request, and `wire` beside it.
fn plan(input: Value) -> Result<Request, StepEnd> {
    let Value::Object(mut fields) = input else {
        return Err(invalid("the argument must be a JSON object"));
    };
    let wire = match fields.remove("wire") {
        None => "chat".to_owned(),
        Some(Value::String(wire)) => wire,
        Some(_) => return Err(invalid("`wire` must be text")),
    };
    let dialect = match wire.as_str() {
        "chat" => Dialect::Chat,
        "responses" => Dialect::Responses,
        "messages" => Dialect::Messages,
        "embeddings" => Dialect::Embeddings,
        other => {
            return Err(invalid(format!(
                "`{other}` is not a wire; there are chat, responses, messages, embeddings"
            )));
        }
    };
    if is_true(&fields, "stream") {
        return Err(invalid("a step cannot stream; leave `stream` out"));
    }
    Ok(Request {
        dialect,
        body: Value::Object(fields).to_string().into(),
        model: None,
        stream: None,
        headers: Vec::new(),
        keep: None,
    })
}

fn is_true(fields: &Map<String, Value>, name: &str) -> bool {
    fields.get(name) == Some(&Value::Bool(true))
}

/// Tried again where time may help: a provider that is down or busy. Money does not come back by waiting a second.
fn failed(refusal: &Refusal) -> StepEnd {
    let fault = &refusal.fault;
    let busy = matches!(
        fault.kind(),
        FaultKind::Unavailable | FaultKind::TimedOut | FaultKind::LimitExceeded | FaultKind::Internal
    );
    let upstream = refusal.upstream.as_ref().map(|upstream| upstream.status);
    let mut message = fault.message.clone();
    if let Some(hint) = &fault.hint {
        message = format!("{message} ({hint})");
    }
    StepEnd::Failed {
        kind: fault.code.text().to_owned(),
        message,
        again: match upstream {
            Some(status) => status == 429 || status >= 500,
            None => busy && fault.code != Code::BudgetExhausted,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_says_the_wire_and_the_rest_is_the_request() {
        let request = plan(json!({"wire": "messages", "model": "m", "max_tokens": 9})).unwrap();
        assert_eq!(request.dialect, Dialect::Messages);
        let body: Value = serde_json::from_slice(&request.body).unwrap();
        assert_eq!(body, json!({"model": "m", "max_tokens": 9}));
        for bad in [
            json!({"wire": 7}),
            json!({"wire": "smoke"}),
            json!({"stream": true}),
        ] {
            assert!(
                matches!(plan(bad.clone()), Err(StepEnd::Failed { again: false, .. })),
                "{bad}"
            );
        }
    }

    #[test]
    fn only_what_time_may_mend_is_tried_again() {
        let end = |code| failed(&Refusal::from(atoll_types::Fault::new(code, "no")));
        assert!(matches!(
            end(Code::ProviderFailed),
            StepEnd::Failed { again: true, .. }
        ));
        for code in [Code::BudgetExhausted, Code::ProviderRefused] {
            assert!(matches!(end(code), StepEnd::Failed { again: false, .. }));
        }
    }
}
