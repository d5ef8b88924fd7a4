//! The engine over a real store: what survives a restart, and what reaches whom.

#![allow(
    clippy::panic,
    clippy::unwrap_used,
    deprecated,
    reason = "a test fails by panicking"
)]

mod bindings;
mod bounds;
mod bytes;
mod clock;
mod names;
mod room;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use atoll_store::WorkflowStore;
use atoll_workflow_core::{duration, validate};
use atoll_workflows::{Engine, Options, Refusal};
use temporalio_protos::temporal::api::batch::v1::{
    BatchOperationDeletion, BatchOperationSignal, BatchOperationTermination,
};
use temporalio_protos::temporal::api::command::v1 as command;
use temporalio_protos::temporal::api::command::v1::command::Attributes;
use temporalio_protos::temporal::api::common::v1 as common;
use temporalio_protos::temporal::api::enums::v1 as enums;
use temporalio_protos::temporal::api::history::v1::HistoryEvent;
use temporalio_protos::temporal::api::taskqueue::v1::TaskQueue;
use temporalio_protos::temporal::api::workflowservice::v1 as service;
use temporalio_protos::temporal::api::workflowservice::v1::start_batch_operation_request::Operation;

const SECOND: i64 = 1_000_000_000;

async fn open(path: &Path) -> (Engine, Arc<dyn WorkflowStore>) {
    let store = atoll_store::sqlite::open_workflows(path).unwrap();
    let options = Options {
        poll: Duration::from_secs(5),
        long_poll: Duration::from_secs(5),
        ..Options::default()
    };
    (Engine::open(store.clone(), options).await.unwrap(), store)
}

fn queue() -> Option<TaskQueue> {
    Some(TaskQueue {
        name: "queue".to_owned(),
        ..Default::default()
    })
}

async fn start(engine: &Engine, id: &str) -> String {
    let request = service::StartWorkflowExecutionRequest {
        namespace: "default".to_owned(),
        workflow_id: id.to_owned(),
        workflow_type: Some(common::WorkflowType { name: "W".to_owned() }),
        task_queue: queue(),
        request_id: format!("start {id}"),
        ..Default::default()
    };
    engine.start_workflow(request).await.unwrap().run_id
}

async fn poll(engine: &Engine) -> service::PollWorkflowTaskQueueResponse {
    let request = service::PollWorkflowTaskQueueRequest {
        namespace: "default".to_owned(),
        task_queue: queue(),
        identity: "worker".to_owned(),
        ..Default::default()
    };
    let task = engine.poll_workflow_task(request, None).await.unwrap();
    assert!(!task.task_token.is_empty(), "there was no workflow task");
    task
}

async fn complete(engine: &Engine, token: &[u8], attributes: Vec<Attributes>) {
    let commands = attributes
        .into_iter()
        .map(|attributes| command::Command {
            attributes: Some(attributes),
            ..Default::default()
        })
        .collect();
    let request = service::RespondWorkflowTaskCompletedRequest {
        namespace: "default".to_owned(),
        task_token: token.to_vec(),
        commands,
        identity: "worker".to_owned(),
        ..Default::default()
    };
    engine.complete_workflow_task(request).await.unwrap();
}

fn activity() -> Attributes {
    Attributes::ScheduleActivityTaskCommandAttributes(command::ScheduleActivityTaskCommandAttributes {
        activity_id: "a".to_owned(),
        activity_type: Some(common::ActivityType { name: "A".to_owned() }),
        start_to_close_timeout: Some(duration(60 * SECOND)),
        ..Default::default()
    })
}

fn end() -> Attributes {
    Attributes::CompleteWorkflowExecutionCommandAttributes(
        command::CompleteWorkflowExecutionCommandAttributes::default(),
    )
}

async fn do_activity(engine: &Engine) {
    let request = service::PollActivityTaskQueueRequest {
        namespace: "default".to_owned(),
        task_queue: queue(),
        ..Default::default()
    };
    let task = engine.poll_activity_task(request, None).await.unwrap();
    assert!(!task.task_token.is_empty(), "there was no activity");
    let request = service::RespondActivityTaskCompletedRequest {
        namespace: "default".to_owned(),
        task_token: task.task_token,
        ..Default::default()
    };
    engine.complete_activity(request).await.unwrap();
}

async fn history(engine: &Engine, id: &str) -> Vec<HistoryEvent> {
    let request = service::GetWorkflowExecutionHistoryRequest {
        namespace: "default".to_owned(),
        execution: Some(common::WorkflowExecution {
            workflow_id: id.to_owned(),
            run_id: String::new(),
        }),
        ..Default::default()
    };
    let events = engine
        .workflow_history(request, None)
        .await
        .unwrap()
        .history
        .unwrap()
        .events;
    validate::check(&events).unwrap();
    events
}

fn ended_with(events: &[HistoryEvent]) -> enums::EventType {
    enums::EventType::try_from(events.last().unwrap().event_type).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_step_survives_a_restart() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("db");
    // Each engine does one step and is gone, without a word.
    let (engine, store) = open(&path).await;
    start(&engine, "wf").await;
    engine.close();
    store.close().await;

    let (engine, store) = open(&path).await;
    let task = poll(&engine).await;
    complete(&engine, &task.task_token, vec![activity()]).await;
    engine.close();
    store.close().await;

    let (engine, store) = open(&path).await;
    do_activity(&engine).await;
    engine.close();
    store.close().await;

    let (engine, _store) = open(&path).await;
    let task = poll(&engine).await;
    complete(&engine, &task.task_token, vec![end()]).await;
    let events = history(&engine, "wf").await;
    assert_eq!(ended_with(&events), enums::EventType::WorkflowExecutionCompleted);
    assert_eq!(events.len(), 11);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_timer_that_was_due_while_the_server_was_down_fires() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("db");
    let (engine, store) = open(&path).await;
    start(&engine, "wf").await;
    let task = poll(&engine).await;
    let timer = Attributes::StartTimerCommandAttributes(command::StartTimerCommandAttributes {
        timer_id: "t".to_owned(),
        start_to_fire_timeout: Some(duration(SECOND / 10)),
    });
    complete(&engine, &task.task_token, vec![timer]).await;
    engine.close();
    store.close().await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    let (engine, _store) = open(&path).await;
    let task = poll(&engine).await;
    complete(&engine, &task.task_token, vec![end()]).await;
    assert_eq!(
        ended_with(&history(&engine, "wf").await),
        enums::EventType::WorkflowExecutionCompleted
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_child_is_started_and_its_parent_hears_how_it_ended() {
    let place = tempfile::tempdir().unwrap();
    let (engine, _store) = open(&place.path().join("db")).await;
    start(&engine, "parent").await;
    let task = poll(&engine).await;
    let child = Attributes::StartChildWorkflowExecutionCommandAttributes(
        command::StartChildWorkflowExecutionCommandAttributes {
            workflow_id: "child".to_owned(),
            workflow_type: Some(common::WorkflowType { name: "C".to_owned() }),
            ..Default::default()
        },
    );
    complete(&engine, &task.task_token, vec![child]).await;
    // The child's task, and those with which the parent hears of its start and its end, in whatever order they come.
    for _ in 0..4 {
        let task = poll(&engine).await;
        let id = task.workflow_execution.unwrap().workflow_id;
        let heard = history(&engine, "parent")
            .await
            .iter()
            .any(|event| event.event_type == i32::from(enums::EventType::ChildWorkflowExecutionCompleted));
        let last = id == "child" || heard;
        complete(&engine, &task.task_token, if last { vec![end()] } else { vec![] }).await;
        if id == "parent" && heard {
            break;
        }
    }
    assert_eq!(
        ended_with(&history(&engine, "parent").await),
        enums::EventType::WorkflowExecutionCompleted
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_poll_loses_no_task() {
    let place = tempfile::tempdir().unwrap();
    let (engine, _store) = open(&place.path().join("db")).await;
    let waiting = engine.clone();
    let dropped = tokio::spawn(async move { poll(&waiting).await });
    tokio::time::sleep(Duration::from_millis(50)).await;
    dropped.abort();
    let _ = dropped.await;
    start(&engine, "wf").await;
    poll(&engine).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_start_again_finds_the_run_and_another_is_refused() {
    let place = tempfile::tempdir().unwrap();
    let (engine, _store) = open(&place.path().join("db")).await;
    let first = start(&engine, "wf").await;
    assert_eq!(start(&engine, "wf").await, first);
    let request = service::StartWorkflowExecutionRequest {
        namespace: "default".to_owned(),
        workflow_id: "wf".to_owned(),
        workflow_type: Some(common::WorkflowType { name: "W".to_owned() }),
        task_queue: queue(),
        request_id: "another".to_owned(),
        ..Default::default()
    };
    let refused = engine.start_workflow(request).await.unwrap_err();
    assert!(refused.to_string().contains("already running"), "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn workflows_are_found_by_what_they_are() {
    let place = tempfile::tempdir().unwrap();
    let (engine, _store) = open(&place.path().join("db")).await;
    for number in 0..5 {
        start(&engine, &format!("wf-{number}")).await;
    }
    let task = poll(&engine).await;
    complete(&engine, &task.task_token, vec![end()]).await;
    let count = |query: &'static str| {
        let engine = engine.clone();
        async move {
            let (found, _) = engine.list_workflows("default", query, 100, &[]).await.unwrap();
            found.len()
        }
    };
    assert_eq!(count("").await, 5);
    assert_eq!(count("ExecutionStatus = 'Running'").await, 4);
    assert_eq!(
        count("ExecutionStatus != 'Running' AND WorkflowType = 'W'").await,
        1
    );
    assert_eq!(
        count("WorkflowId STARTS_WITH 'wf-' AND NOT (WorkflowId IN ('wf-1', 'wf-2'))").await,
        3
    );
    assert_eq!(
        count("CloseTime IS NULL OR StartTime < '2020-01-01T00:00:00Z'").await,
        4
    );
    assert!(
        engine
            .list_workflows("default", "Nonsense = 1", 10, &[])
            .await
            .is_err()
    );
    let (page, token) = engine.list_workflows("default", "", 2, &[]).await.unwrap();
    let (rest, _) = engine.list_workflows("default", "", 10, &token).await.unwrap();
    assert_eq!((page.len(), rest.len()), (2, 3));
}

async fn batch(engine: &Engine, job: &str, operation: Operation) -> service::DescribeBatchOperationResponse {
    let request = service::StartBatchOperationRequest {
        namespace: "default".to_owned(),
        job_id: job.to_owned(),
        reason: "enough".to_owned(),
        visibility_query: "ExecutionStatus = 'Running'".to_owned(),
        operation: Some(operation),
        ..Default::default()
    };
    engine.start_batch(request.clone()).await.unwrap();
    assert!(
        matches!(engine.start_batch(request).await, Err(Refusal::AlreadyExists(_))),
        "a job has one name"
    );
    loop {
        let told = engine
            .describe_batch(service::DescribeBatchOperationRequest {
                namespace: "default".to_owned(),
                job_id: job.to_owned(),
            })
            .unwrap();
        if told.state != i32::from(enums::BatchOperationState::Running) {
            return told;
        }
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_batch_reaches_all_that_its_query_finds() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("workflows.db");
    let (engine, _) = open(&path).await;
    for id in ["a", "b", "c"] {
        start(&engine, id).await;
    }
    let signal = Operation::SignalOperation(BatchOperationSignal {
        signal: "go".to_owned(),
        ..Default::default()
    });
    let told = batch(&engine, "signals", signal).await;
    assert_eq!(
        (told.total_operation_count, told.complete_operation_count),
        (3, 3)
    );
    let told = batch(
        &engine,
        "ends",
        Operation::TerminationOperation(BatchOperationTermination::default()),
    )
    .await;
    assert_eq!(
        (told.complete_operation_count, told.failure_operation_count),
        (3, 0)
    );
    let none = batch(
        &engine,
        "again",
        Operation::TerminationOperation(BatchOperationTermination::default()),
    )
    .await;
    assert_eq!(none.total_operation_count, 0);
    engine.close();
    drop(engine);

    // What was done is known after a restart, and is not done again.
    let (engine, _) = open(&path).await;
    let list = service::ListBatchOperationsRequest {
        namespace: "default".to_owned(),
        page_size: 2,
        ..Default::default()
    };
    let page = engine.list_batches(list.clone()).unwrap();
    assert_eq!(page.operation_info[0].job_id, "again");
    let rest = engine
        .list_batches(service::ListBatchOperationsRequest {
            next_page_token: page.next_page_token,
            ..list
        })
        .unwrap();
    assert_eq!(rest.operation_info[0].job_id, "signals");
    let stopped = engine
        .stop_batch(service::StopBatchOperationRequest {
            namespace: "default".to_owned(),
            job_id: "ends".to_owned(),
            ..Default::default()
        })
        .await;
    assert!(
        matches!(stopped, Err(Refusal::NotFound(_))),
        "it has ended: {stopped:?}"
    );
    let refused = engine
        .start_batch(service::StartBatchOperationRequest {
            namespace: "default".to_owned(),
            job_id: "nobody".to_owned(),
            reason: "none".to_owned(),
            operation: Some(Operation::DeletionOperation(BatchOperationDeletion::default())),
            ..Default::default()
        })
        .await;
    assert!(matches!(refused, Err(Refusal::InvalidArgument(_))), "{refused:?}");
}

/// With a poll that would otherwise take an hour: the test hangs if the worker is not let go.
#[tokio::test]
async fn a_worker_that_stops_is_answered_on_every_queue() {
    let directory = tempfile::tempdir().unwrap();
    let options = Options {
        poll: Duration::from_secs(3600),
        ..Options::default()
    };
    let store = atoll_store::sqlite::open_workflows(&directory.path().join("db")).unwrap();
    let engine = Engine::open(store, options).await.unwrap();
    let nexus = |engine: Engine| async move {
        let request = service::PollNexusTaskQueueRequest {
            namespace: "default".to_owned(),
            task_queue: queue(),
            worker_instance_key: "worker".to_owned(),
            ..Default::default()
        };
        engine.poll_nexus_task(request, None).await.unwrap()
    };
    let early = tokio::spawn(nexus(engine.clone()));
    tokio::task::yield_now().await;
    let stop = service::ShutdownWorkerRequest {
        namespace: "default".to_owned(),
        worker_instance_key: "worker".to_owned(),
        ..Default::default()
    };
    engine.shutdown_worker(stop).unwrap();
    assert!(early.await.unwrap().task_token.is_empty());
    assert!(
        nexus(engine).await.task_token.is_empty(),
        "one more poll, sent before it knew"
    );
}

#[tokio::test]
async fn a_queue_is_described_as_old_and_new_clients_ask() {
    let dir = tempfile::tempdir().unwrap();
    let (engine, _) = open(&dir.path().join("workflows.db")).await;
    start(&engine, "a").await;
    let request = service::DescribeTaskQueueRequest {
        namespace: "default".to_owned(),
        task_queue: queue(),
        report_stats: true,
        report_pollers: true,
        ..Default::default()
    };
    let old = engine.describe_task_queue(request.clone()).unwrap();
    assert_eq!(old.stats.unwrap().approximate_backlog_count, 1);
    poll(&engine).await;
    let new = engine
        .describe_task_queue(service::DescribeTaskQueueRequest {
            api_mode: i32::from(enums::DescribeTaskQueueMode::Enhanced),
            ..request
        })
        .unwrap();
    let unversioned = &new.versions_info[""].types_info;
    let workflows = &unversioned[&i32::from(enums::TaskQueueType::Workflow)];
    assert_eq!(workflows.pollers[0].identity, "worker");
    assert_eq!(workflows.stats.as_ref().unwrap().approximate_backlog_count, 0);
    assert!(
        unversioned[&i32::from(enums::TaskQueueType::Activity)]
            .pollers
            .is_empty()
    );
}
