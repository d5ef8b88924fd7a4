//! What clients and workers of durable workflows send. Loops whose length they choose must end: drivers have a limit of time.

#![allow(deprecated, reason = "clients still send what the wire has deprecated")]

use atoll_workflow_core::{
    Completion, Cron, Limits, Run, ScheduleSpec, Scheduler, Start, State, TaskToken, Turn, Wake,
    parse_length, parse_time, validate,
};
use prost::Message as _;
use temporalio_protos::temporal::api::history::v1::History;
use temporalio_protos::temporal::api::schedule::v1 as schedule;
use temporalio_protos::temporal::api::workflowservice::v1 as wire;

use super::texts;

const SECOND: i64 = 1_000_000_000;
const HOUR: i64 = 3600 * SECOND;
const NOW: i64 = 1_700_000_000 * SECOND;

/// A schedule in a form that is easy to change: lines of cron, `every SECONDS PHASE`, `not` before a calendar's hour that is
/// left out, `zone NAME`, `from` and `to` SECONDS.
fn in_words(text: &str) -> schedule::ScheduleSpec {
    let mut spec = schedule::ScheduleSpec::default();
    let seconds = |text: Option<&str>| text.and_then(|text| text.parse().ok()).unwrap_or(0);
    for line in text.lines() {
        let mut words = line.split(' ');
        match words.next() {
            Some("every") => {
                let length = |seconds| Some(prost_wkt_types::Duration { seconds, nanos: 0 });
                spec.interval.push(schedule::IntervalSpec {
                    interval: length(seconds(words.next())),
                    phase: length(seconds(words.next())),
                });
            }
            Some("not") => spec.exclude_calendar.push(schedule::CalendarSpec {
                second: words.next().unwrap_or("*").to_owned(),
                minute: words.next().unwrap_or("*").to_owned(),
                hour: words.next().unwrap_or("*").to_owned(),
                day_of_month: words.next().unwrap_or("*").to_owned(),
                month: words.next().unwrap_or("*").to_owned(),
                ..Default::default()
            }),
            Some("zone") => spec.timezone_name = words.next().unwrap_or_default().to_owned(),
            Some(bound @ ("from" | "to")) => {
                let at = Some(prost_wkt_types::Timestamp {
                    seconds: seconds(words.next()),
                    nanos: 0,
                });
                if bound == "from" {
                    spec.start_time = at;
                } else {
                    spec.end_time = at;
                }
            }
            _ => spec.cron_string.push(line.to_owned()),
        }
    }
    spec
}

/// Whatever a schedule says, it is refused or its next times can be told: they come later and in order.
pub fn schedule(input: &[u8]) {
    let mut plan = match texts(input) {
        Some(texts) => schedule::Schedule {
            spec: Some(in_words(texts[0])),
            ..Default::default()
        },
        None => match schedule::Schedule::decode(input) {
            Ok(plan) => plan,
            Err(_) => return,
        },
    };
    let Some(spec) = &plan.spec else { return };
    if let Ok(parsed) = ScheduleSpec::parse(spec) {
        let canonical = parsed.canonical(spec);
        assert!(
            ScheduleSpec::parse(&canonical).is_ok(),
            "a schedule cannot be read as it is shown: {canonical:?}"
        );
    }
    // What is started does not matter here, but there has to be something.
    plan.action.get_or_insert_with(|| schedule::ScheduleAction {
        action: Some(schedule::schedule_action::Action::StartWorkflow(
            temporalio_protos::temporal::api::workflow::v1::NewWorkflowExecutionInfo {
                workflow_id: "workflow".to_owned(),
                ..Default::default()
            },
        )),
    });
    let Ok(mut scheduler) = Scheduler::new("default", "id", plan, NOW) else {
        return;
    };
    let next = scheduler.wake();
    // What would take too long to find is refused.
    let times = scheduler.times(NOW, NOW + 24 * HOUR, 20).unwrap_or_default();
    assert!(times.len() <= 20);
    for pair in times.windows(2) {
        assert!(pair[0].0 < pair[1].0, "times out of order: {times:?}");
    }
    for (nominal, actual) in &times {
        assert!(actual >= nominal, "acts before its time: {times:?}");
    }
    let _ = scheduler.view(NOW);
    let _ = scheduler.tick(NOW + 60 * SECOND);
    if let (Wake::Due(next), Wake::Due(after)) = (next, scheduler.wake()) {
        assert!(
            after >= next || next <= NOW + 60 * SECOND,
            "the next time went back"
        );
    }
}

/// The next time comes later.
pub fn cron(input: &[u8]) {
    let Some(texts) = texts(input) else { return };
    let text = texts[0];
    if let Ok(cron) = Cron::parse(text) {
        for (started, now) in [(NOW, NOW), (NOW, NOW + 10 * HOUR), (0, NOW)] {
            if let Some(next) = cron.next_after(started, now) {
                assert!(
                    next > started && next >= now,
                    "{next} is not after {started} and {now}"
                );
            }
        }
    }
    if let Some(length) = parse_length(text) {
        assert!(length >= 0 || text.trim_start().starts_with('-'));
    }
    let _ = parse_time(text);
}

/// A run carries out whatever a worker asks for, or refuses it, and its history is one that workers can read; also after it
/// was stored and loaded, and when its timers have come.
pub fn workflow_task(input: &[u8]) {
    let Ok(request) = wire::RespondWorkflowTaskCompletedRequest::decode(input) else {
        return;
    };
    let limits = Limits::default();
    let turn = |now| Turn {
        now,
        fresh_run_id: "next",
        limits: &limits,
    };
    let start = Start {
        namespace: "default".to_owned(),
        workflow_id: "workflow".to_owned(),
        workflow_type: "Type".to_owned(),
        task_queue: "queue".to_owned(),
        ..Default::default()
    };
    let mut run = Run::start(start, "run", turn(NOW)).expect("a valid start");
    let completion = || {
        Completion {
            commands: request.commands.clone(),
            messages: request.messages.clone(),
            identity: request.identity.clone(),
            return_new: request.return_new_workflow_task,
            force_new: request.force_create_new_workflow_task,
            ..Default::default()
        }
        .with_sticky(request.sticky_attributes.as_ref())
    };
    let mut now = NOW;
    for _ in 0..3 {
        let stamp = run
            .state
            .task
            .as_ref()
            .filter(|task| task.started_id == 0)
            .map(|task| task.stamp);
        if let Some(stamp) = stamp
            && let Ok(task) = run.start_task(stamp, "worker", "", turn(now))
        {
            let _ = run.complete_task(&task.token, completion(), turn(now));
        }
        check(&run);
        let state = State::decode(run.state.encode_to_vec().as_slice()).expect("a state can be stored");
        run = Run::restore(state, run.events.clone());
        now += HOUR;
        run.tick(turn(now));
        check(&run);
        assert!(run.deadline() >= 0, "a deadline before time began");
    }
    if let Some(next) = run.take_successor() {
        check(&next);
    }
}

fn check(run: &Run) {
    if let Err(why) = validate::check(&run.events) {
        panic!("{why}");
    }
}

/// Messages that are handed on or stored: reading them never fails but by an error.
pub fn workflow_history(input: &[u8]) {
    if let Ok(history) = History::decode(input) {
        let _ = validate::check(&history.events);
    }
    if let Ok(token) = TaskToken::decode("default", input) {
        assert_eq!(TaskToken::decode("default", &token.encode()).ok(), Some(token));
    }
    if let Ok(state) = State::decode(input) {
        let _ = state.encode_to_vec();
    }
    let _ = wire::StartWorkflowExecutionRequest::decode(input);
    let _ = wire::ExecuteMultiOperationRequest::decode(input);
}

/// A query is refused or has an answer.
pub fn workflow_query(input: &[u8]) {
    let Some(text) = texts(input).map(|texts| texts[0]) else {
        return;
    };
    let serde_json::Value::Object(object) = serde_json::json!({
        "WorkflowId": "order-1", "CustomKeyword": "a", "CustomInt": 1, "CustomDouble": 0.5, "CustomBool": true,
        "CustomTime": "2026-01-01T00:00:00Z", "CustomList": ["a", "b"], "CustomText": "some words",
    }) else {
        return;
    };
    let asked = atoll_workflows::fuzzing::query(text, &object);
    // Both sides of a pair of brackets say the same.
    let bracketed = format!("({text})");
    if let (Some(one), Some(other)) = (asked, atoll_workflows::fuzzing::query(&bracketed, &object)) {
        assert_eq!(one, other, "brackets change the meaning of {text:?}");
    }
}
