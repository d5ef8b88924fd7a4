//! The workflow of the demo: a script writes code with a model, runs it in a sandbox, asks a person and delivers.
//!
//! It decides by its history alone, as every durable workflow does: played again from the start, it comes to the same point,
//! whichever process plays it. An SDK does the same behind `await`.

use std::collections::HashMap;

use atoll_types::STEPS_QUEUE;
use serde_json::{Value, json};
use temporalio_protos::temporal::api::command::v1::command::Attributes;
use temporalio_protos::temporal::api::command::v1::{
    Command, CompleteWorkflowExecutionCommandAttributes, FailWorkflowExecutionCommandAttributes,
    ScheduleActivityTaskCommandAttributes,
};
use temporalio_protos::temporal::api::common::v1::{ActivityType, Payload, Payloads};
use temporalio_protos::temporal::api::enums::v1::CommandType;
use temporalio_protos::temporal::api::failure::v1::Failure;
use temporalio_protos::temporal::api::history::v1::HistoryEvent;
use temporalio_protos::temporal::api::history::v1::history_event::Attributes as Happened;
use temporalio_protos::temporal::api::taskqueue::v1::TaskQueue;

pub(crate) const MODEL: &str = "scripted-coder";
pub(crate) const REPORT: &str = "demo-report";
const TASK: &str = "Sum up orders.json and write report.md.";
const ORDERS: &str = r#"[{"item": "coral", "count": 3, "price": 12.5}, {"item": "palm", "count": 1, "price": 40},
 {"item": "sand", "count": 200, "price": 0.1}]"#;

/// What the workflow has got back so far.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    /// By the name of the step; `None` while it is under way.
    steps: HashMap<String, Option<Outcome>>,
}

type Outcome = Result<Value, String>;

/// Why the workflow does not go on right now.
#[derive(Debug)]
enum Stop {
    Schedule(Box<ScheduleActivityTaskCommandAttributes>),
    Wait,
    Fail(String),
}

impl Progress {
    pub(crate) fn of(history: &[HistoryEvent]) -> Self {
        let mut steps = HashMap::new();
        let mut names: HashMap<i64, String> = HashMap::new();
        for event in history {
            let (scheduled, outcome) = match &event.attributes {
                Some(Happened::ActivityTaskScheduledEventAttributes(scheduled)) => {
                    names.insert(event.event_id, scheduled.activity_id.clone());
                    steps.insert(scheduled.activity_id.clone(), None);
                    continue;
                }
                Some(Happened::ActivityTaskCompletedEventAttributes(done)) => {
                    (done.scheduled_event_id, Ok(read(done.result.as_ref())))
                }
                Some(Happened::ActivityTaskFailedEventAttributes(failed)) => {
                    let message = failed.failure.as_ref().map(|failure| failure.message.clone());
                    (failed.scheduled_event_id, Err(message.unwrap_or_default()))
                }
                Some(Happened::ActivityTaskTimedOutEventAttributes(late)) => {
                    (late.scheduled_event_id, Err("it took too long".to_owned()))
                }
                _ => continue,
            };
            if let Some(name) = names.get(&scheduled) {
                steps.insert(name.clone(), Some(outcome));
            }
        }
        Self { steps }
    }

    /// What a step came to; unless it has to be done first.
    fn tried(&self, name: &str, activity: &str, input: &Value) -> Result<Outcome, Stop> {
        match self.steps.get(name) {
            Some(Some(outcome)) => Ok(outcome.clone()),
            Some(None) => Err(Stop::Wait),
            None => Err(Stop::Schedule(Box::new(schedule(name, activity, input)))),
        }
    }

    /// The same, where the workflow cannot go on without it.
    fn done(&self, name: &str, activity: &str, input: &Value) -> Result<Value, Stop> {
        self.tried(name, activity, input)?
            .map_err(|why| Stop::Fail(format!("{name}: {why}")))
    }
}

/// The script, from its beginning to where it stops this time.
fn play(past: &Progress) -> Result<Value, Stop> {
    let ask = json!({"model": MODEL, "messages": [{"role": "user", "content": TASK}], "max_tokens": 200});
    let written = past.done("write code", "model.call", &ask)?;
    let code = program(
        written["answer"]["choices"][0]["message"]["content"]
            .as_str()
            .unwrap_or_default(),
    );

    let policy = json!({"rules": [{"name": "docs", "action": "allow", "to": "docs.example.org"}]});
    let sandbox = json!({"template": "base", "timeout_ms": 300_000, "network": policy});
    let sandbox = past.done("make a sandbox", "sandbox.create", &sandbox)?["id"].clone();
    let file = |path: &str, content: &str| json!({"sandbox": sandbox, "path": path, "content": content});
    past.done("put in orders", "sandbox.write", &file("orders.json", ORDERS))?;
    past.done("put in code", "sandbox.write", &file("report.py", code))?;
    let run = json!({"sandbox": sandbox, "cmd": "python3 report.py", "timeout_ms": 60_000});
    let ran = past.done("run it", "sandbox.exec", &run)?;
    if ran["exit_code"] != json!(0) {
        return Err(Stop::Fail(format!("the code failed: {}", ran["stderr"])));
    }

    // The budget is for one such call.
    let review = json!({"model": MODEL, "messages": [{"role": "user", "content": "Is it right?"}], "max_tokens": 4000});
    let reviewed = past.tried("have it reviewed", "model.call", &review)?;

    let delivery = json!({"sandbox": sandbox, "path": "report.md", "name": REPORT});
    let question = json!({
        "action": {"step": "artifact.save", "input": delivery},
        "reason": "hand out the report?",
        "timeout_ms": 600_000,
    });
    let yes = past.done("ask a person", "approval.request", &question)?;
    let mut approved = delivery;
    approved["approval"] = yes["approval"].clone();
    past.done("deliver", "artifact.save", &approved)?;
    Ok(json!({"said": ran["stdout"], "reviewed": reviewed.is_ok()}))
}

/// What the workflow wants next.
pub(crate) fn decide(history: &[HistoryEvent]) -> Vec<Command> {
    let (kind, attributes) = match play(&Progress::of(history)) {
        Err(Stop::Wait) => return Vec::new(),
        Err(Stop::Schedule(activity)) => (
            CommandType::ScheduleActivityTask,
            Attributes::ScheduleActivityTaskCommandAttributes(*activity),
        ),
        Err(Stop::Fail(message)) => (
            CommandType::FailWorkflowExecution,
            Attributes::FailWorkflowExecutionCommandAttributes(FailWorkflowExecutionCommandAttributes {
                failure: Some(Failure {
                    message,
                    ..Default::default()
                }),
            }),
        ),
        Ok(result) => (
            CommandType::CompleteWorkflowExecution,
            Attributes::CompleteWorkflowExecutionCommandAttributes(
                CompleteWorkflowExecutionCommandAttributes {
                    result: Some(write(&result)),
                },
            ),
        ),
    };
    vec![Command {
        command_type: i32::from(kind),
        attributes: Some(attributes),
        ..Default::default()
    }]
}

/// Without a heartbeat for a second, a step counts as lost with its server and is tried again.
fn schedule(name: &str, activity: &str, input: &Value) -> ScheduleActivityTaskCommandAttributes {
    let seconds = |seconds| Some(prost_wkt_types::Duration { seconds, nanos: 0 });
    ScheduleActivityTaskCommandAttributes {
        activity_id: name.to_owned(),
        activity_type: Some(ActivityType {
            name: activity.to_owned(),
        }),
        task_queue: Some(TaskQueue {
            name: STEPS_QUEUE.to_owned(),
            ..Default::default()
        }),
        input: Some(write(input)),
        start_to_close_timeout: seconds(600),
        heartbeat_timeout: seconds(1),
        ..Default::default()
    }
}

fn write(value: &Value) -> Payloads {
    Payloads {
        payloads: vec![Payload {
            metadata: HashMap::from([("encoding".to_owned(), b"json/plain".to_vec())]),
            data: value.to_string().into_bytes(),
            ..Default::default()
        }],
    }
}

fn read(payloads: Option<&Payloads>) -> Value {
    let first = payloads.and_then(|payloads| payloads.payloads.first());
    first
        .and_then(|payload| serde_json::from_slice(&payload.data).ok())
        .unwrap_or_default()
}

/// The code in an answer: between its fences, if it has some.
fn program(answer: &str) -> &str {
    let Some((_, rest)) = answer.split_once("```python\n") else {
        return answer;
    };
    rest.split_once("```").map_or(rest, |(code, _)| code)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_stops_where_something_is_missing_and_never_asks_twice() {
        let nothing = Progress::default();
        let Err(Stop::Schedule(first)) = play(&nothing) else {
            panic!("the first step is a call");
        };
        assert_eq!(first.activity_id, "write code");
        let mut under_way = Progress::default();
        under_way.steps.insert("write code".to_owned(), None);
        assert!(matches!(play(&under_way), Err(Stop::Wait)));
        under_way
            .steps
            .insert("write code".to_owned(), Some(Err("no money".to_owned())));
        assert!(matches!(play(&under_way), Err(Stop::Fail(why)) if why == "write code: no money"));
    }

    #[test]
    fn code_is_what_is_between_fences() {
        assert_eq!(program("Here:\n```python\nprint(1)\n```\nDone."), "print(1)\n");
        assert_eq!(program("print(1)"), "print(1)");
    }
}
