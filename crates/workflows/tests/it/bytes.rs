//! What tenants choose the size of is held to so many bytes, each and all of it, now and after the next start.

use atoll_store::WorkflowItem;
use atoll_workflows::{Approval, Question, Verdict, digest};
use prost::Message as _;
use serde_json::json;
use temporalio_protos::temporal::api::schedule::v1 as proto;
use temporalio_protos::temporal::api::update::v1 as update;
use temporalio_protos::temporal::api::workflow::v1::NewWorkflowExecutionInfo;

use super::*;

const MIB: usize = 1024 * 1024;

fn payloads(bytes: usize) -> Option<common::Payloads> {
    Some(common::Payloads {
        payloads: vec![common::Payload {
            data: vec![b'x'; bytes],
            ..Default::default()
        }],
    })
}

async fn open_small(path: &Path) -> (Engine, Arc<dyn WorkflowStore>) {
    let store = atoll_store::sqlite::open_workflows(path).unwrap();
    let options = Options {
        poll: Duration::from_secs(5),
        long_poll: Duration::from_millis(10),
        most_bytes: 4 * MIB,
        ..Options::default()
    };
    (Engine::open(store.clone(), options).await.unwrap(), store)
}

async fn signal(engine: &Engine, id: &str, bytes: usize) -> Result<(), Refusal> {
    let request = service::SignalWorkflowExecutionRequest {
        namespace: "default".to_owned(),
        workflow_execution: Some(common::WorkflowExecution {
            workflow_id: id.to_owned(),
            run_id: String::new(),
        }),
        signal_name: "s".to_owned(),
        input: payloads(bytes),
        ..Default::default()
    };
    engine.signal_workflow(request).await.map(drop)
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_from_the_end_of_a_history_end_where_they_are_large() {
    let place = tempfile::tempdir().unwrap();
    let (engine, store) = open(&place.path().join("db")).await;
    start(&engine, "wf").await;
    for _ in 0..8 {
        signal(&engine, "wf", MIB).await.unwrap();
    }
    let (mut seen, mut token, mut pages) = (Vec::new(), Vec::new(), 0);
    loop {
        let request = service::GetWorkflowExecutionHistoryReverseRequest {
            namespace: "default".to_owned(),
            execution: Some(common::WorkflowExecution {
                workflow_id: "wf".to_owned(),
                run_id: String::new(),
            }),
            next_page_token: token,
            ..Default::default()
        };
        let page = engine.workflow_history_reverse(request).await.unwrap();
        assert!(page.encoded_len() < 4 * MIB);
        seen.extend(
            page.history
                .unwrap()
                .events
                .into_iter()
                .map(|event| event.event_id),
        );
        (token, pages) = (page.next_page_token, pages + 1);
        if token.is_empty() {
            break;
        }
    }
    assert!(pages > 2);
    assert_eq!(seen, (1..=10).rev().collect::<Vec<_>>());
    engine.close();
    store.close().await;
}

fn said(bytes: usize) -> Option<common::SearchAttributes> {
    let value = common::Payload {
        metadata: [("encoding".to_owned(), b"json/plain".to_vec())].into(),
        data: json!("w ".repeat(bytes / 2)).to_string().into_bytes(),
        ..Default::default()
    };
    Some(common::SearchAttributes {
        indexed_fields: [("Said".to_owned(), value)].into(),
    })
}

fn schedule(input: usize) -> proto::Schedule {
    proto::Schedule {
        spec: Some(proto::ScheduleSpec {
            cron_string: vec!["0 0 1 1 *".to_owned()],
            ..Default::default()
        }),
        action: Some(proto::ScheduleAction {
            action: Some(proto::schedule_action::Action::StartWorkflow(
                NewWorkflowExecutionInfo {
                    workflow_id: "scheduled".to_owned(),
                    workflow_type: Some(common::WorkflowType { name: "W".to_owned() }),
                    task_queue: queue(),
                    input: payloads(input),
                    ..Default::default()
                },
            )),
        }),
        ..Default::default()
    }
}

fn create(id: &str, input: usize) -> service::CreateScheduleRequest {
    service::CreateScheduleRequest {
        namespace: "default".to_owned(),
        schedule_id: id.to_owned(),
        schedule: Some(schedule(input)),
        ..Default::default()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_searched_by_is_small_wherever_it_comes_from() {
    let place = tempfile::tempdir().unwrap();
    let (engine, store) = open(&place.path().join("db")).await;
    let text = i32::from(enums::IndexedValueType::Text);
    engine
        .add_search_attributes("default", [("Said".to_owned(), text)])
        .await
        .unwrap();
    let start = |bytes: usize| service::StartWorkflowExecutionRequest {
        namespace: "default".to_owned(),
        workflow_id: format!("wf {bytes}"),
        workflow_type: Some(common::WorkflowType { name: "W".to_owned() }),
        task_queue: queue(),
        search_attributes: said(bytes),
        ..Default::default()
    };
    engine.start_workflow(start(2_000)).await.unwrap();
    let refused = engine.start_workflow(start(4_000)).await.unwrap_err();
    assert!(refused.to_string().contains("exceeds size limit"), "{refused}");
    let (found, _) = engine
        .list_workflows("default", "Said = 'w'", 10, b"")
        .await
        .unwrap();
    assert_eq!(found.len(), 1);

    let task = poll(&engine).await;
    let upsert = Attributes::UpsertWorkflowSearchAttributesCommandAttributes(
        command::UpsertWorkflowSearchAttributesCommandAttributes {
            search_attributes: said(4_000),
        },
    );
    let request = service::RespondWorkflowTaskCompletedRequest {
        namespace: "default".to_owned(),
        task_token: task.task_token,
        commands: vec![command::Command {
            attributes: Some(upsert),
            ..Default::default()
        }],
        ..Default::default()
    };
    let refused = engine.complete_workflow_task(request).await.unwrap_err();
    assert!(refused.to_string().contains("exceeds size limit"), "{refused}");

    let mut request = create("s", 0);
    request.search_attributes = said(4_000);
    let refused = engine.create_schedule(request).await.unwrap_err();
    assert!(refused.to_string().contains("exceeds size limit"), "{refused}");
    let words = format!("Said = '{}'", "w ".repeat(101));
    let refused = engine
        .list_workflows("default", &words, 10, b"")
        .await
        .unwrap_err();
    assert!(refused.to_string().contains("words"), "{refused}");
    engine.close();
    store.close().await;
}

fn signals(job: &str, bytes: usize) -> service::StartBatchOperationRequest {
    service::StartBatchOperationRequest {
        namespace: "default".to_owned(),
        job_id: job.to_owned(),
        reason: "enough".to_owned(),
        visibility_query: "WorkflowId = 'none'".to_owned(),
        operation: Some(Operation::SignalOperation(BatchOperationSignal {
            signal: "go".to_owned(),
            input: payloads(bytes),
            ..Default::default()
        })),
        ..Default::default()
    }
}

fn describe(engine: &Engine, job: &str) -> service::DescribeBatchOperationResponse {
    let request = service::DescribeBatchOperationRequest {
        namespace: "default".to_owned(),
        job_id: job.to_owned(),
    };
    engine.describe_batch(request).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn batches_hold_little_once_they_have_ended() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("db");
    // There is a namespace that it can be of.
    let (engine, store) = open(&path).await;
    engine.close();
    store.close().await;
    let store = atoll_store::sqlite::open_workflows(&path).unwrap();
    // As an earlier version wrote them.
    let former = json!({
        "request": signals("former", 100).encode_to_vec(),
        "state": "Completed", "started_at": 1, "closed_at": i64::MAX / 2, "total": 7, "complete": 6, "failed": 1,
        "stopped": ["why", "who"],
    });
    let item = WorkflowItem {
        namespace: "default".to_owned(),
        id: "former".to_owned(),
        body: former.to_string().into_bytes(),
    };
    store.put_workflow_item("batch", item).await.unwrap();
    store.close().await;

    let (engine, store) = open(&path).await;
    let told = describe(&engine, "former");
    assert_eq!((told.total_operation_count, told.reason.as_str()), (7, "why"));
    assert_eq!(told.operation_type, i32::from(enums::BatchOperationType::Signal));

    let refused = engine.start_batch(signals("large", 3 * MIB)).await.unwrap_err();
    assert!(refused.to_string().contains("bytes"), "{refused}");
    // Many more than would be kept, if all of each were.
    for number in 0..40 {
        let job = format!("job {number}");
        engine.start_batch(signals(&job, MIB)).await.unwrap();
        while describe(&engine, &job).state == i32::from(enums::BatchOperationState::Running) {
            tokio::task::yield_now().await;
        }
    }
    let items = store.workflow_items("batch").await.unwrap();
    assert!(items.iter().map(|item| item.body.len()).sum::<usize>() < MIB);
    engine.close();
    store.close().await;
    let (engine, store) = open(&path).await;
    assert_eq!(
        describe(&engine, "job 7").state,
        i32::from(enums::BatchOperationState::Completed)
    );
    assert_eq!(describe(&engine, "job 7").reason, "enough");
    engine.close();
    store.close().await;
}

/// Asked by an activity that the run does not have, so nobody waits for the answer.
fn question(run_id: &str, number: i64, bytes: usize) -> Question {
    Question {
        namespace: "default".to_owned(),
        workflow_id: "asks".to_owned(),
        run_id: run_id.to_owned(),
        activity_id: "a".to_owned(),
        scheduled_id: number,
        action: json!("x".repeat(bytes)),
        reason: "to see".to_owned(),
        limit: Duration::from_secs(600),
    }
}

fn every_approval(engine: &Engine) -> Vec<Approval> {
    let (mut all, mut cursor): (Vec<Approval>, Option<String>) = (Vec::new(), None);
    loop {
        let (page, next) = engine.approvals("", true, cursor.as_deref(), 1_000).unwrap();
        assert!(page.iter().map(|one| one.action.len()).sum::<usize>() <= 4 * MIB);
        all.extend(page);
        cursor = next;
        if cursor.is_none() {
            return all;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn approvals_of_a_project_have_a_share_and_come_in_pages() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("db");
    let (engine, store) = open(&path).await;
    let run_id = start(&engine, "asks").await;
    let refused = engine
        .ask_approval(question(&run_id, 0, 100_000))
        .await
        .unwrap_err();
    assert!(refused.to_string().contains("bytes"), "{refused}");
    let first = engine.ask_approval(question(&run_id, 1, 60_000)).await.unwrap();
    let long = Verdict {
        granted: true,
        digest: digest(&question(&run_id, 1, 60_000).action),
        by: "somebody".to_owned(),
        key: None,
        note: "n".repeat(MIB),
    };
    let refused = engine.decide_approval("", &first.id, long).await.unwrap_err();
    assert!(refused.to_string().contains("note"), "{refused}");
    // Nobody waits for the answers: they are a no, and those decided longest ago make room. Open ones are looked at in the
    // order of their names, so the first is decided before there are others.
    while engine.approval("", &first.id).unwrap().decision.is_none() {
        tokio::task::yield_now().await;
    }
    for number in 2..600 {
        engine
            .ask_approval(question(&run_id, number, 60_000))
            .await
            .unwrap();
        let waits = || every_approval(&engine).iter().any(|one| one.decision.is_none());
        while number % 100 == 0 && waits() {
            tokio::task::yield_now().await;
        }
    }
    let all = every_approval(&engine);
    assert!(all.iter().map(|one| one.action.len()).sum::<usize>() <= 32 * MIB);
    assert!(all.iter().all(|one| one.id != first.id));
    assert!(all.is_sorted_by_key(|one| one.asked_at));
    assert!(all.len() > 400);
    let (open, _) = engine.approvals("", false, None, 1).unwrap();
    assert!(open.len() <= 1);
    assert!(engine.approvals("", false, Some("x"), 1).is_err());
    assert!(engine.approvals("another", true, None, 1).unwrap().0.is_empty());
    engine.close();
    store.close().await;
    let (engine, store) = open_small(&path).await;
    let action: serde_json::Value = serde_json::from_str(&every_approval(&engine)[0].action).unwrap();
    assert_eq!(action, json!("x".repeat(60_000)));
    engine.close();
    store.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn schedules_of_a_project_have_a_share() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("db");
    let (engine, store) = open(&path).await;
    let refused = engine
        .create_schedule(create("large", 3 * MIB))
        .await
        .unwrap_err();
    assert!(refused.to_string().contains("bytes"), "{refused}");
    let mut made = 0;
    let refused = loop {
        match engine
            .create_schedule(create(&format!("s{made}"), MIB * 3 / 2))
            .await
        {
            Ok(_) => made += 1,
            Err(refused) => break refused,
        }
    };
    assert!(matches!(refused, Refusal::ResourceExhausted(_)), "{refused:?}");
    assert!((40..44).contains(&made), "{made}");
    engine.close();
    store.close().await;
    // Also after a restart, until some are gone.
    let (engine, store) = open(&path).await;
    let more = engine.create_schedule(create("more", MIB)).await;
    assert!(matches!(more, Err(Refusal::ResourceExhausted(_))), "{more:?}");
    let request = service::DeleteScheduleRequest {
        namespace: "default".to_owned(),
        schedule_id: "s0".to_owned(),
        ..Default::default()
    };
    engine.delete_schedule(request).await.unwrap();
    engine.create_schedule(create("more", MIB)).await.unwrap();
    engine.close();
    store.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn runs_that_wait_do_not_fill_the_memory_when_the_server_starts() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("db");
    let (engine, store) = open_small(&path).await;
    for number in 0..16 {
        let id = format!("wf {number}");
        start(&engine, &id).await;
        signal(&engine, &id, MIB).await.unwrap();
        assert!(engine.bytes_in_memory() < 6 * MIB, "{}", engine.bytes_in_memory());
    }
    engine.close();
    store.close().await;
    let (engine, store) = open_small(&path).await;
    assert!(engine.bytes_in_memory() < 6 * MIB, "{}", engine.bytes_in_memory());
    // All of them go on.
    for _ in 0..16 {
        let task = poll(&engine).await;
        complete(&engine, &task.task_token, vec![end()]).await;
    }
    engine.close();
    store.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn updates_that_nobody_waits_for_leave_the_memory() {
    let place = tempfile::tempdir().unwrap();
    let (engine, store) = open_small(&place.path().join("db")).await;
    for number in 0..16 {
        let id = format!("wf {number}");
        start(&engine, &id).await;
        let request = service::UpdateWorkflowExecutionRequest {
            namespace: "default".to_owned(),
            workflow_execution: Some(common::WorkflowExecution {
                workflow_id: id,
                run_id: String::new(),
            }),
            request: Some(update::Request {
                input: Some(update::Input {
                    name: "u".to_owned(),
                    args: payloads(MIB),
                    ..Default::default()
                }),
                ..Default::default()
            }),
            ..Default::default()
        };
        engine.update_workflow(request).await.unwrap();
        assert!(
            engine.bytes_in_memory() < 10 * MIB,
            "{}",
            engine.bytes_in_memory()
        );
    }
    engine.close();
    store.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_schedule_hears_of_workflows_that_have_left_the_memory() {
    let place = tempfile::tempdir().unwrap();
    let (engine, store) = open_small(&place.path().join("db")).await;
    engine.create_schedule(create("s", MIB)).await.unwrap();
    let all = i32::from(enums::ScheduleOverlapPolicy::AllowAll);
    let request = service::PatchScheduleRequest {
        namespace: "default".to_owned(),
        schedule_id: "s".to_owned(),
        patch: Some(proto::SchedulePatch {
            backfill_request: vec![proto::BackfillRequest {
                start_time: Some(atoll_workflow_core::stamp(946_684_800 * SECOND)),
                end_time: Some(atoll_workflow_core::stamp(1_230_768_000 * SECOND)),
                overlap_policy: all,
            }],
            ..Default::default()
        }),
        ..Default::default()
    };
    engine.patch_schedule(request).await.unwrap();
    assert!(engine.bytes_in_memory() < 6 * MIB, "{}", engine.bytes_in_memory());
    let running = async || {
        let request = service::DescribeScheduleRequest {
            namespace: "default".to_owned(),
            schedule_id: "s".to_owned(),
        };
        let info = engine.describe_schedule(request).await.unwrap().info.unwrap();
        info.running_workflows.len()
    };
    assert_eq!(running().await, 10);
    for _ in 0..10 {
        let task = poll(&engine).await;
        complete(&engine, &task.task_token, vec![end()]).await;
    }
    while running().await > 0 {
        tokio::task::yield_now().await;
    }
    engine.close();
    store.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_namespace_is_small_and_keeps_what_has_ended_for_an_hour() {
    let place = tempfile::tempdir().unwrap();
    let (engine, store) = open(&place.path().join("db")).await;
    for retention in [-1, 0, 60 * SECOND] {
        let changed = engine.change_namespace("default", |namespace| {
            namespace.retention = retention;
            Ok(())
        });
        let refused = changed.await.unwrap_err();
        assert!(refused.to_string().contains("one hour"), "{refused}");
    }
    let changed = engine.change_namespace("default", |namespace| {
        namespace.data.insert("much".to_owned(), "x".repeat(10_000));
        Ok(())
    });
    let refused = changed.await.unwrap_err();
    assert!(refused.to_string().contains("bytes"), "{refused}");
    let known = engine.namespace("default", "").unwrap();
    assert!(known.retention > 60 * SECOND && known.data.is_empty());
    assert_eq!(engine.projects().len(), 1);
    engine.close();
    store.close().await;
}
