//! Attacks on durable workflows: schedules that never come or come too often, namespaces of others, costly queries.

use std::time::Duration;

use prost::Message;
use serde_json::json;
use temporalio_protos::temporal::api::common::v1::{WorkflowExecution, WorkflowType};
use temporalio_protos::temporal::api::schedule::v1 as schedules;
use temporalio_protos::temporal::api::taskqueue::v1::TaskQueue;
use temporalio_protos::temporal::api::workflow::v1::NewWorkflowExecutionInfo;
use temporalio_protos::temporal::api::workflowservice::v1 as service;

use super::Hand;
use crate::soak::honest::write;
use crate::soak::random::Random;

const PATIENCE: Duration = Duration::from_secs(15);

/// Calls once; what is answered is searched.
async fn call<Q, A>(hand: &Hand, method: &'static str, message: Q) -> Option<A>
where
    Q: Message + Send + Sync + 'static,
    A: Message + Default + Send + Sync + 'static,
{
    let mut wire = hand.caller.wire().await?;
    let answer = tokio::time::timeout(PATIENCE, wire.call::<Q, A>(method, message)).await;
    let answer = answer.ok()?.ok()?;
    hand.world()
        .search(hand.caller.project.index, method, &answer.encode_to_vec());
    Some(answer)
}

fn range(start: i32, end: i32) -> Vec<schedules::Range> {
    vec![schedules::Range { start, end, step: 1 }]
}

/// Every second of every day.
fn always() -> schedules::StructuredCalendarSpec {
    schedules::StructuredCalendarSpec {
        second: range(0, 59),
        minute: range(0, 59),
        hour: range(0, 23),
        day_of_month: range(1, 31),
        month: range(1, 12),
        day_of_week: range(0, 6),
        ..Default::default()
    }
}

fn queue() -> Option<TaskQueue> {
    Some(TaskQueue {
        name: "nobody".to_owned(),
        ..Default::default()
    })
}

fn seconds(seconds: i64) -> Option<prost_wkt_types::Duration> {
    Some(prost_wkt_types::Duration { seconds, nanos: 0 })
}

/// What never comes, what is excluded whenever it comes, and what comes a million times at once.
pub(super) async fn schedules(hand: &Hand, random: &mut Random) -> u64 {
    let interval = |seconds_| schedules::IntervalSpec {
        interval: seconds(seconds_),
        phase: None,
    };
    let cron = |text: &str| schedules::ScheduleSpec {
        cron_string: vec![text.to_owned()],
        ..Default::default()
    };
    let specs = [
        schedules::ScheduleSpec {
            interval: vec![interval(1)],
            exclude_structured_calendar: vec![always()],
            ..Default::default()
        },
        schedules::ScheduleSpec {
            structured_calendar: vec![always()],
            exclude_structured_calendar: vec![always()],
            ..Default::default()
        },
        cron("0 0 30 2 *"),
        cron("0 0 31 4,6,9,11 *"),
        schedules::ScheduleSpec {
            interval: (1..500).map(interval).collect(),
            exclude_structured_calendar: vec![schedules::StructuredCalendarSpec {
                year: range(2000, 2099),
                ..always()
            }],
            ..Default::default()
        },
        schedules::ScheduleSpec {
            structured_calendar: vec![schedules::StructuredCalendarSpec {
                month: range(2, 2),
                day_of_month: range(30, 30),
                ..always()
            }],
            ..Default::default()
        },
    ];
    let mut moves = 0;
    for spec in specs {
        let id = format!("h-{}", random.word());
        let workflow = NewWorkflowExecutionInfo {
            workflow_id: id.clone(),
            workflow_type: Some(WorkflowType {
                name: "Never".to_owned(),
            }),
            task_queue: queue(),
            workflow_run_timeout: seconds(1),
            ..Default::default()
        };
        let schedule = schedules::Schedule {
            spec: Some(spec),
            action: Some(schedules::ScheduleAction {
                action: Some(schedules::schedule_action::Action::StartWorkflow(workflow)),
            }),
            ..Default::default()
        };
        let backfill = random.chance(3).then(|| schedules::SchedulePatch {
            backfill_request: vec![schedules::BackfillRequest {
                start_time: Some(prost_wkt_types::Timestamp { seconds: 0, nanos: 0 }),
                end_time: Some(prost_wkt_types::Timestamp {
                    seconds: 4_000_000_000,
                    nanos: 0,
                }),
                ..Default::default()
            }],
            ..Default::default()
        });
        let namespace = hand.caller.project.namespace.clone();
        let request = service::CreateScheduleRequest {
            namespace: namespace.clone(),
            schedule_id: id.clone(),
            schedule: Some(schedule),
            initial_patch: backfill,
            request_id: id.clone(),
            ..Default::default()
        };
        let _refused: Option<service::CreateScheduleResponse> = call(hand, "CreateSchedule", request).await;
        let request = service::ListScheduleMatchingTimesRequest {
            namespace: namespace.clone(),
            schedule_id: id.clone(),
            start_time: Some(prost_wkt_types::Timestamp { seconds: 0, nanos: 0 }),
            end_time: Some(prost_wkt_types::Timestamp {
                seconds: 4_000_000_000,
                nanos: 0,
            }),
        };
        let _times: Option<service::ListScheduleMatchingTimesResponse> =
            call(hand, "ListScheduleMatchingTimes", request).await;
        let request = service::DeleteScheduleRequest {
            namespace,
            schedule_id: id,
            ..Default::default()
        };
        let _gone: Option<service::DeleteScheduleResponse> = call(hand, "DeleteSchedule", request).await;
        moves += 3;
    }
    // A workflow on a cron that never comes is the same search elsewhere.
    let id = format!("h-{}", random.word());
    let request = service::StartWorkflowExecutionRequest {
        namespace: hand.caller.project.namespace.clone(),
        workflow_id: id.clone(),
        request_id: id.clone(),
        cron_schedule: "0 0 30 2 *".to_owned(),
        workflow_type: Some(WorkflowType {
            name: "Never".to_owned(),
        }),
        task_queue: queue(),
        ..Default::default()
    };
    let _refused: Option<service::StartWorkflowExecutionResponse> =
        call(hand, "StartWorkflowExecution", request).await;
    end(hand, &hand.caller.project.namespace.clone(), &id).await;
    moves + 2
}

async fn end(hand: &Hand, namespace: &str, id: &str) -> bool {
    let request = service::TerminateWorkflowExecutionRequest {
        namespace: namespace.to_owned(),
        workflow_execution: Some(WorkflowExecution {
            workflow_id: id.to_owned(),
            ..Default::default()
        }),
        ..Default::default()
    };
    let ended: Option<service::TerminateWorkflowExecutionResponse> =
        call(hand, "TerminateWorkflowExecution", request).await;
    ended.is_some()
}

/// What belongs to others, by its name; and questions that cost a lot to answer.
pub(super) async fn strangers(hand: &Hand, random: &mut Random) -> u64 {
    let world = hand.world();
    let namespace = world
        .project(usize::from(random.chance(2)))
        .map(|owner| owner.namespace)
        .unwrap_or_default();
    let id = world.board.pick("workflow", random).unwrap_or_default();
    let execution = Some(WorkflowExecution {
        workflow_id: id.clone(),
        ..Default::default()
    });
    let reached = |what: &str| {
        hand.got("somebody else's was reached", format!("{what} in {namespace}"));
    };
    let request = service::ListWorkflowExecutionsRequest {
        namespace: namespace.clone(),
        page_size: 100,
        ..Default::default()
    };
    let listed: Option<service::ListWorkflowExecutionsResponse> =
        call(hand, "ListWorkflowExecutions", request).await;
    if listed.is_some() {
        reached("ListWorkflowExecutions");
    }
    let request = service::GetWorkflowExecutionHistoryRequest {
        namespace: namespace.clone(),
        execution: execution.clone(),
        ..Default::default()
    };
    let told: Option<service::GetWorkflowExecutionHistoryResponse> =
        call(hand, "GetWorkflowExecutionHistory", request).await;
    if told.is_some() {
        reached("GetWorkflowExecutionHistory");
    }
    let request = service::SignalWorkflowExecutionRequest {
        namespace: namespace.clone(),
        workflow_execution: execution,
        signal_name: "go".to_owned(),
        ..Default::default()
    };
    let signalled: Option<service::SignalWorkflowExecutionResponse> =
        call(hand, "SignalWorkflowExecution", request).await;
    if signalled.is_some() {
        reached("SignalWorkflowExecution");
    }
    if end(hand, &namespace, &id).await {
        reached("TerminateWorkflowExecution");
    }
    // Its own namespace, asked what is hard to answer.
    let own = hand.caller.project.namespace.clone();
    let questions = [
        "(".repeat(5000),
        format!("WorkflowId = '{}'", "x".repeat(100_000)),
        vec!["WorkflowType = 'a'"; 2000].join(" OR "),
        "NOT ".repeat(5000) + "WorkflowId = 'a'",
    ];
    for query in questions {
        let request = service::ListWorkflowExecutionsRequest {
            namespace: own.clone(),
            page_size: i32::MAX,
            query,
            ..Default::default()
        };
        let _refused: Option<service::ListWorkflowExecutionsResponse> =
            call(hand, "ListWorkflowExecutions", request).await;
    }
    // And told more than it can hold.
    let id = format!("h-{}", random.word());
    let request = service::StartWorkflowExecutionRequest {
        namespace: own.clone(),
        workflow_id: id.clone(),
        request_id: id.clone(),
        workflow_type: Some(WorkflowType {
            name: "Never".to_owned(),
        }),
        task_queue: queue(),
        input: Some(write(&json!("x".repeat(8 << 20)))),
        workflow_run_timeout: seconds(1),
        ..Default::default()
    };
    let started: Option<service::StartWorkflowExecutionResponse> =
        call(hand, "StartWorkflowExecution", request).await;
    if started.is_some() {
        end(hand, &own, &id).await;
    }
    9
}
