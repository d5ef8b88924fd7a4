//! What tenants send or have stored costs a bounded amount of work, and stops nobody else.

use atoll_store::WorkflowItem;
use atoll_workflow_core::Scheduler;
use prost::Message as _;
use temporalio_protos::temporal::api::failure::v1::Failure;
use temporalio_protos::temporal::api::schedule::v1 as proto;
use temporalio_protos::temporal::api::workflow::v1::NewWorkflowExecutionInfo;

use super::*;

fn schedule(spec: proto::ScheduleSpec) -> proto::Schedule {
    proto::Schedule {
        spec: Some(spec),
        action: Some(proto::ScheduleAction {
            action: Some(proto::schedule_action::Action::StartWorkflow(
                NewWorkflowExecutionInfo {
                    workflow_id: "scheduled".to_owned(),
                    workflow_type: Some(common::WorkflowType { name: "W".to_owned() }),
                    task_queue: queue(),
                    ..Default::default()
                },
            )),
        }),
        ..Default::default()
    }
}

fn every_second() -> proto::ScheduleSpec {
    proto::ScheduleSpec {
        interval: vec![proto::IntervalSpec {
            interval: Some(duration(SECOND)),
            phase: None,
        }],
        ..Default::default()
    }
}

/// Every second, and every second is excluded.
fn endless() -> proto::ScheduleSpec {
    let all = || "*".to_owned();
    proto::ScheduleSpec {
        exclude_calendar: vec![proto::CalendarSpec {
            second: all(),
            minute: all(),
            hour: all(),
            ..Default::default()
        }],
        ..every_second()
    }
}

async fn put(store: &dyn WorkflowStore, id: &str, body: Vec<u8>) {
    let item = WorkflowItem {
        namespace: "default".to_owned(),
        id: id.to_owned(),
        body,
    };
    store.put_workflow_item("schedule", item).await.unwrap();
}

fn create(id: &str, spec: proto::ScheduleSpec) -> service::CreateScheduleRequest {
    service::CreateScheduleRequest {
        namespace: "default".to_owned(),
        schedule_id: id.to_owned(),
        schedule: Some(schedule(spec)),
        ..Default::default()
    }
}

async fn listed(engine: &Engine) -> Vec<String> {
    let request = service::ListSchedulesRequest {
        namespace: "default".to_owned(),
        ..Default::default()
    };
    let found = engine.list_schedules(request).await.unwrap().schedules;
    found.into_iter().map(|entry| entry.schedule_id).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stored_schedule_that_never_matches_stops_nothing_and_can_be_deleted() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("db");
    // As a server that looked at nothing has left them.
    let (engine, store) = open(&path).await;
    engine.close();
    let poisoned = Scheduler {
        namespace: "default".to_owned(),
        id: "endless".to_owned(),
        schedule: Some(schedule(endless())),
        looked_until: 1_700_000_000 * SECOND,
        ..Default::default()
    };
    put(&*store, "endless", poisoned.encode_to_vec()).await;
    put(&*store, "garbage", vec![0xff; 100]).await;
    store.close().await;

    let (engine, store) = open(&path).await;
    assert_eq!(listed(&engine).await, ["endless", "garbage"]);
    let refused = engine
        .create_schedule(create("another", endless()))
        .await
        .unwrap_err();
    assert!(refused.to_string().contains("never matches"), "{refused}");
    // Others act meanwhile.
    engine
        .create_schedule(create("good", every_second()))
        .await
        .unwrap();
    poll(&engine).await;
    for id in ["endless", "garbage"] {
        let request = service::DescribeScheduleRequest {
            namespace: "default".to_owned(),
            schedule_id: id.to_owned(),
        };
        let info = engine.describe_schedule(request).await.unwrap().info.unwrap();
        assert!(!info.invalid_schedule_error.is_empty());
        let request = service::PatchScheduleRequest {
            namespace: "default".to_owned(),
            schedule_id: id.to_owned(),
            patch: Some(proto::SchedulePatch {
                pause: "it is wrong".to_owned(),
                ..Default::default()
            }),
            ..Default::default()
        };
        engine.patch_schedule(request).await.unwrap();
        let request = service::DeleteScheduleRequest {
            namespace: "default".to_owned(),
            schedule_id: id.to_owned(),
            ..Default::default()
        };
        engine.delete_schedule(request).await.unwrap();
    }
    assert_eq!(listed(&engine).await, ["good"]);
    engine.close();
    store.close().await;
    let (engine, store) = open(&path).await;
    assert_eq!(listed(&engine).await, ["good"]);
    engine.close();
    store.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_of_schedules_follow_each_other() {
    let place = tempfile::tempdir().unwrap();
    let (engine, store) = open(&place.path().join("db")).await;
    let far = proto::ScheduleSpec {
        cron_string: vec!["0 0 1 1 *".to_owned()],
        ..Default::default()
    };
    for number in 0..5 {
        let id = format!("s{number}");
        engine.create_schedule(create(&id, far.clone())).await.unwrap();
    }
    let (mut seen, mut token) = (Vec::new(), Vec::new());
    loop {
        let request = service::ListSchedulesRequest {
            namespace: "default".to_owned(),
            maximum_page_size: 2,
            next_page_token: token,
            ..Default::default()
        };
        let page = engine.list_schedules(request).await.unwrap();
        assert!(page.schedules.len() <= 2);
        assert!(page.schedules.iter().all(|entry| {
            let info = entry.info.as_ref().unwrap();
            info.future_action_times.len() == 5
        }));
        seen.extend(page.schedules.into_iter().map(|entry| entry.schedule_id));
        token = page.next_page_token;
        if token.is_empty() {
            break;
        }
    }
    assert_eq!(seen, ["s0", "s1", "s2", "s3", "s4"]);
    let request = service::CountSchedulesRequest {
        namespace: "default".to_owned(),
        query: "ScheduleId > 's1'".to_owned(),
    };
    assert_eq!(engine.count_schedules(request).await.unwrap().count, 3);
    engine.close();
    store.close().await;
}

/// A failure with as many causes as a message can carry.
fn deep() -> Failure {
    let mut failure = Failure::default();
    for depth in 0..95 {
        failure = Failure {
            message: format!("cause {depth}"),
            cause: Some(Box::new(failure)),
            ..Default::default()
        };
    }
    // It comes through the wire.
    let bytes = service::RespondActivityTaskFailedRequest {
        failure: Some(failure),
        ..Default::default()
    }
    .encode_to_vec();
    let came = service::RespondActivityTaskFailedRequest::decode(bytes.as_slice()).unwrap();
    came.failure.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failure_with_many_causes_can_be_read_again() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("db");
    let (engine, store) = open(&path).await;
    start(&engine, "wf").await;
    let task = poll(&engine).await;
    let mut once = activity();
    if let Attributes::ScheduleActivityTaskCommandAttributes(wanted) = &mut once {
        wanted.retry_policy = Some(common::RetryPolicy {
            maximum_attempts: 1,
            ..Default::default()
        });
    }
    complete(&engine, &task.task_token, vec![once]).await;
    let request = service::PollActivityTaskQueueRequest {
        namespace: "default".to_owned(),
        task_queue: queue(),
        ..Default::default()
    };
    let task = engine.poll_activity_task(request, None).await.unwrap();
    let request = service::RespondActivityTaskFailedRequest {
        namespace: "default".to_owned(),
        task_token: task.task_token,
        failure: Some(deep()),
        ..Default::default()
    };
    engine.fail_activity(request).await.unwrap();
    engine.close();
    store.close().await;

    let (engine, store) = open(&path).await;
    let task = poll(&engine).await;
    complete(&engine, &task.task_token, vec![end()]).await;
    assert_eq!(
        ended_with(&history(&engine, "wf").await),
        enums::EventType::WorkflowExecutionCompleted
    );
    engine.close();
    store.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_largest_query_is_answered() {
    let place = tempfile::tempdir().unwrap();
    let (engine, store) = open(&place.path().join("db")).await;
    start(&engine, "wf").await;
    let conditions = vec!["RunId != 'x'"; 150].join(" AND ");
    let values = vec!["'wf'"; 1_500].join(",");
    let (open_nots, close_nots) = ("NOT (".repeat(20), ")".repeat(20));
    let query = format!("{conditions} AND {open_nots}WorkflowId IN ({values}){close_nots}");
    let (found, _) = engine.list_workflows("default", &query, 10, b"").await.unwrap();
    assert_eq!(found.len(), 1);
    // Beyond the end is nothing, and no error.
    let far = usize::MAX.to_string();
    let (found, token) = engine
        .list_workflows("default", "", 1000, far.as_bytes())
        .await
        .unwrap();
    assert!(found.is_empty() && token.is_empty());
    let refused = engine
        .list_workflows("default", &"NOT ".repeat(15_000), 10, b"")
        .await
        .unwrap_err();
    assert!(matches!(refused, Refusal::InvalidArgument(_)), "{refused:?}");
    engine.close();
    store.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_and_messages_are_matched_in_one_pass() {
    let place = tempfile::tempdir().unwrap();
    let (engine, store) = open(&place.path().join("db")).await;
    start(&engine, "wf").await;
    let task = poll(&engine).await;
    // Each command names a message that is not there: looking through all of them each time would take minutes.
    let commands = (0..50_000).map(|number| command::Command {
        attributes: Some(Attributes::ProtocolMessageCommandAttributes(
            command::ProtocolMessageCommandAttributes {
                message_id: format!("none {number}"),
            },
        )),
        ..Default::default()
    });
    let messages = (0..50_000).map(|number| temporalio_protos::temporal::api::protocol::v1::Message {
        id: format!("some {number}"),
        protocol_instance_id: "unknown".to_owned(),
        ..Default::default()
    });
    let request = service::RespondWorkflowTaskCompletedRequest {
        namespace: "default".to_owned(),
        task_token: task.task_token,
        commands: commands.collect(),
        messages: messages.collect(),
        ..Default::default()
    };
    // What becomes of the task is not the point.
    let _ = engine.complete_workflow_task(request).await;
    // One that asks for more than a history can hold is over.
    start(&engine, "more").await;
    let mut task = poll(&engine).await;
    while task.workflow_execution.as_ref().unwrap().workflow_id != "more" {
        task = poll(&engine).await;
    }
    let command = command::Command {
        attributes: Some(Attributes::ProtocolMessageCommandAttributes(Default::default())),
        ..Default::default()
    };
    let request = service::RespondWorkflowTaskCompletedRequest {
        namespace: "default".to_owned(),
        task_token: task.task_token,
        commands: vec![command; 60_000],
        ..Default::default()
    };
    let _ = engine.complete_workflow_task(request).await;
    assert_ne!(
        ended_with(&history(&engine, "more").await),
        enums::EventType::WorkflowTaskCompleted
    );
    engine.close();
    store.close().await;
}
