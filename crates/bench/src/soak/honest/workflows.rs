//! Stories on durable workflows: started, signalled, asked about, scheduled; and people who answer what workflows ask.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use reqwest::Method;
use serde_json::json;
use temporalio_protos::temporal::api::common::v1::{WorkflowExecution, WorkflowType};
use temporalio_protos::temporal::api::schedule::v1 as schedules;
use temporalio_protos::temporal::api::taskqueue::v1::TaskQueue;
use temporalio_protos::temporal::api::workflow::v1::NewWorkflowExecutionInfo;
use temporalio_protos::temporal::api::workflowservice::v1 as service;

use super::player::{ASKS, CALLS, PLAIN, QUEUE, SHORT, write};
use crate::soak::caller::{Caller, End, Told};
use crate::soak::random::Random;

/// How long a workflow may take: tasks of a killed server are given out again after ten seconds.
const PATIENCE: Duration = Duration::from_secs(90);
/// The same for one that waits for a clock which was set back.
const BESIDE_THE_CLOCK: Duration = Duration::from_secs(15);

pub(super) async fn story(caller: &Caller, random: &mut Random) -> Told<()> {
    let id = format!("w-{}", random.word());
    match random.below(5) {
        0 => asks(caller, &id).await,
        1 => scheduled(caller, &id).await,
        2 => one(caller, &id, CALLS, "workflow with a model").await,
        _ => one(caller, &id, PLAIN, "workflow").await,
    }
}

fn queue() -> Option<TaskQueue> {
    Some(TaskQueue {
        name: QUEUE.to_owned(),
        ..Default::default()
    })
}

async fn start(caller: &Caller, id: &str, kind: &str) -> Told<()> {
    let request = service::StartWorkflowExecutionRequest {
        namespace: caller.project.namespace.clone(),
        workflow_id: id.to_owned(),
        request_id: id.to_owned(),
        workflow_type: Some(WorkflowType {
            name: kind.to_owned(),
        }),
        task_queue: queue(),
        input: Some(write(&json!({"word": caller.canary()}))),
        ..Default::default()
    };
    caller.world.board.tell("workflow", caller.project.index, id);
    caller
        .call::<_, service::StartWorkflowExecutionResponse>(
            "start workflow",
            "StartWorkflowExecution",
            request,
            &["AlreadyExists"],
        )
        .await
        .map(drop)
}

/// From start to end; it is signalled on its way, and its result is looked at.
async fn one(caller: &Caller, id: &str, kind: &str, called: &'static str) -> Told<()> {
    let (began, jumps) = (Instant::now(), caller.world.jumps.load(Ordering::Relaxed));
    start(caller, id, kind).await?;
    if kind == PLAIN {
        let request = service::SignalWorkflowExecutionRequest {
            namespace: caller.project.namespace.clone(),
            workflow_execution: Some(execution(id)),
            signal_name: "go".to_owned(),
            request_id: id.to_owned(),
            input: Some(write(&json!(caller.canary()))),
            ..Default::default()
        };
        let signalled = caller.call::<_, service::SignalWorkflowExecutionResponse>(
            "signal workflow",
            "SignalWorkflowExecution",
            request,
            &["NotFound"],
        );
        signalled.await?;
    }
    until_done(caller, id, called, jumps).await?;
    let beside = caller.world.beside.load(Ordering::Relaxed);
    caller.world.tally.answered(called, Some(began.elapsed()), beside);
    let history = caller
        .get(&format!("/v1/workflows/{id}/history"))
        .query(&[("namespace", &caller.project.namespace)]);
    caller.ask("workflow history", history, &[]).await.map(drop)
}

fn execution(id: &str) -> WorkflowExecution {
    WorkflowExecution {
        workflow_id: id.to_owned(),
        ..Default::default()
    }
}

/// Waits for the end of a workflow. One that waits for a clock which was set back since is ended and forgiven: its time has
/// not come.
async fn until_done(caller: &Caller, id: &str, called: &'static str, jumps: u64) -> Told<()> {
    let began = Instant::now();
    loop {
        let request = caller
            .get(&format!("/v1/workflows/{id}"))
            .query(&[("namespace", &caller.project.namespace)]);
        let now = caller.ask("describe workflow", request, &[]).await?.json();
        match now["status"].as_str().unwrap_or_default() {
            "completed" => return Ok(()),
            "running" if began.elapsed() < patience(caller, jumps) => {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            "running" => {
                terminate(caller, id).await;
                if caller.world.jumps.load(Ordering::Relaxed) != jumps {
                    return Err(End::Over);
                }
                return Err(caller.wrong(called, format!("it does not end: {now}")));
            }
            other => return Err(caller.wrong(called, format!("it is {other}: {now}"))),
        }
        if caller.world.interrupted.is_cancelled() {
            return Err(End::Over);
        }
    }
}

fn patience(caller: &Caller, jumps: u64) -> Duration {
    match caller.world.jumps.load(Ordering::Relaxed) == jumps {
        true => PATIENCE,
        false => BESIDE_THE_CLOCK,
    }
}

async fn terminate(caller: &Caller, id: &str) {
    let request = service::TerminateWorkflowExecutionRequest {
        namespace: caller.project.namespace.clone(),
        workflow_execution: Some(execution(id)),
        ..Default::default()
    };
    let _gone = caller
        .call::<_, service::TerminateWorkflowExecutionResponse>(
            "terminate workflow",
            "TerminateWorkflowExecution",
            request,
            &["NotFound"],
        )
        .await;
}

/// A workflow that asks a person, and the person.
async fn asks(caller: &Caller, id: &str) -> Told<()> {
    let jumps = caller.world.jumps.load(Ordering::Relaxed);
    start(caller, id, ASKS).await?;
    let began = Instant::now();
    let question = loop {
        let asked = caller.ask("approvals", caller.get("/v1/approvals"), &[]).await?;
        let asked = asked.json();
        let own = asked["items"].as_array().into_iter().flatten();
        if let Some(question) = own.into_iter().find(|question| question["workflow"] == json!(id)) {
            break question.clone();
        }
        if began.elapsed() > patience(caller, jumps) {
            terminate(caller, id).await;
            if caller.world.jumps.load(Ordering::Relaxed) != jumps {
                return Err(End::Over);
            }
            return Err(caller.wrong("approvals", format!("{id} never asks")));
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    let approval = question["id"].as_str().unwrap_or_default();
    caller
        .world
        .board
        .tell("approval", caller.project.index, approval);
    let digest = question["digest"].as_str().unwrap_or_default();
    caller.world.board.tell("digest", caller.project.index, digest);
    let body = json!({"digest": digest, "by": caller.canary(), "note": caller.canary()});
    let path = format!("/v1/approvals/{approval}/grant");
    let request = caller
        .bare(Method::POST, &path)
        .bearer_auth(&caller.project.approver_key)
        .json(&body);
    caller.ask("approvals", request, &[404, 409]).await?;
    until_done(caller, id, "workflow with a person", jumps).await
}

/// A schedule that starts a workflow every second, until it has.
async fn scheduled(caller: &Caller, id: &str) -> Told<()> {
    let jumps = caller.world.jumps.load(Ordering::Relaxed);
    let workflow = NewWorkflowExecutionInfo {
        workflow_id: id.to_owned(),
        workflow_type: Some(WorkflowType {
            name: SHORT.to_owned(),
        }),
        task_queue: queue(),
        input: Some(write(&json!({"word": caller.canary()}))),
        ..Default::default()
    };
    let schedule = schedules::Schedule {
        spec: Some(schedules::ScheduleSpec {
            interval: vec![schedules::IntervalSpec {
                interval: Some(prost_wkt_types::Duration { seconds: 1, nanos: 0 }),
                phase: None,
            }],
            ..Default::default()
        }),
        action: Some(schedules::ScheduleAction {
            action: Some(schedules::schedule_action::Action::StartWorkflow(workflow)),
        }),
        ..Default::default()
    };
    let request = service::CreateScheduleRequest {
        namespace: caller.project.namespace.clone(),
        schedule_id: id.to_owned(),
        schedule: Some(schedule),
        request_id: id.to_owned(),
        ..Default::default()
    };
    caller
        .call::<_, service::CreateScheduleResponse>(
            "schedules",
            "CreateSchedule",
            request,
            &["AlreadyExists"],
        )
        .await?;
    caller.world.board.tell("schedule", caller.project.index, id);
    let began = Instant::now();
    let mut acted = false;
    while !acted && began.elapsed() < patience(caller, jumps) && !caller.world.interrupted.is_cancelled() {
        tokio::time::sleep(Duration::from_millis(200)).await;
        let request = service::DescribeScheduleRequest {
            namespace: caller.project.namespace.clone(),
            schedule_id: id.to_owned(),
        };
        let now = caller
            .call::<_, service::DescribeScheduleResponse>("schedules", "DescribeSchedule", request, &[])
            .await?;
        acted = now.info.is_some_and(|info| info.action_count > 0);
    }
    let request = service::DeleteScheduleRequest {
        namespace: caller.project.namespace.clone(),
        schedule_id: id.to_owned(),
        ..Default::default()
    };
    caller
        .call::<_, service::DeleteScheduleResponse>("schedules", "DeleteSchedule", request, &["NotFound"])
        .await?;
    // A clock that was set back makes it wait.
    if acted || caller.world.jumps.load(Ordering::Relaxed) != jumps {
        return Ok(());
    }
    Err(caller.wrong("schedules", format!("{id} did not act within {PATIENCE:?}")))
}
