//! What a project keeps of its workflows on the disk is held to so many bytes, and there is always a way out.

use atoll_workflows::Namespace;
use temporalio_protos::temporal::api::update::v1 as update;

use super::*;

const MIB: usize = 1024 * 1024;

async fn open_for(path: &Path, most_kept: usize) -> (Engine, Arc<dyn WorkflowStore>) {
    let store = atoll_store::sqlite::open_workflows(path).unwrap();
    let options = Options {
        poll: Duration::from_secs(5),
        long_poll: Duration::from_millis(10),
        most_kept: most_kept as u64,
        ..Options::default()
    };
    (Engine::open(store.clone(), options).await.unwrap(), store)
}

fn payloads(bytes: usize) -> Option<common::Payloads> {
    Some(common::Payloads {
        payloads: vec![common::Payload {
            data: vec![b'x'; bytes],
            ..Default::default()
        }],
    })
}

fn workflow(id: &str) -> Option<common::WorkflowExecution> {
    Some(common::WorkflowExecution {
        workflow_id: id.to_owned(),
        run_id: String::new(),
    })
}

async fn start_in(engine: &Engine, namespace: &str, id: &str, input: usize) -> Result<(), Refusal> {
    let request = service::StartWorkflowExecutionRequest {
        namespace: namespace.to_owned(),
        workflow_id: id.to_owned(),
        workflow_type: Some(common::WorkflowType { name: "W".to_owned() }),
        task_queue: queue(),
        input: payloads(input),
        request_id: format!("start {id}"),
        ..Default::default()
    };
    engine.start_workflow(request).await.map(drop)
}

async fn signal(engine: &Engine, id: &str, bytes: usize) -> Result<(), Refusal> {
    let request = service::SignalWorkflowExecutionRequest {
        namespace: "default".to_owned(),
        workflow_execution: workflow(id),
        signal_name: "s".to_owned(),
        input: payloads(bytes),
        ..Default::default()
    };
    engine.signal_workflow(request).await.map(drop)
}

async fn answer(engine: &Engine, token: &[u8], attributes: Attributes) -> Result<(), Refusal> {
    let request = service::RespondWorkflowTaskCompletedRequest {
        namespace: "default".to_owned(),
        task_token: token.to_vec(),
        commands: vec![command::Command {
            attributes: Some(attributes),
            ..Default::default()
        }],
        identity: "worker".to_owned(),
        ..Default::default()
    };
    engine.complete_workflow_task(request).await.map(drop)
}

fn continued(input: usize) -> Attributes {
    Attributes::ContinueAsNewWorkflowExecutionCommandAttributes(
        command::ContinueAsNewWorkflowExecutionCommandAttributes {
            workflow_type: Some(common::WorkflowType { name: "W".to_owned() }),
            input: payloads(input),
            ..Default::default()
        },
    )
}

fn ended_with_result(bytes: usize) -> Attributes {
    Attributes::CompleteWorkflowExecutionCommandAttributes(
        command::CompleteWorkflowExecutionCommandAttributes {
            result: payloads(bytes),
        },
    )
}

async fn terminate(engine: &Engine, namespace: &str, id: &str) {
    let request = service::TerminateWorkflowExecutionRequest {
        namespace: namespace.to_owned(),
        workflow_execution: workflow(id),
        ..Default::default()
    };
    engine.terminate_workflow(request).await.unwrap();
}

async fn delete(engine: &Engine, id: &str) {
    let request = service::DeleteWorkflowExecutionRequest {
        namespace: "default".to_owned(),
        workflow_execution: workflow(id),
    };
    engine.delete_workflow(request).await.unwrap();
}

#[track_caller]
fn no_room(result: Result<(), Refusal>) {
    match result {
        Err(Refusal::ResourceExhausted(text)) => assert!(text.contains("max_workflow_storage"), "{text}"),
        other => panic!("{other:?}"),
    }
}

async fn register(engine: &Engine, name: &str, project: &str) {
    let namespace = Namespace {
        name: name.to_owned(),
        project: project.to_owned(),
        retention: 3600 * SECOND,
        ..Default::default()
    };
    engine.register_namespace(namespace).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn who_has_no_room_left_starts_nothing_and_can_end_and_delete_everything() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("db");
    let (engine, store) = open_for(&path, 2 * MIB).await;
    start(&engine, "a").await;
    // Two times, because a request may go beyond the limit that nothing had reached before it.
    signal(&engine, "a", MIB).await.unwrap();
    signal(&engine, "a", MIB).await.unwrap();
    no_room(signal(&engine, "a", 1).await);
    no_room(start_in(&engine, "default", "b", 1).await);
    engine.close();
    store.close().await;

    // A restart forgets nothing.
    let (engine, store) = open_for(&path, 2 * MIB).await;
    no_room(signal(&engine, "a", 1).await);
    no_room(start_in(&engine, "default", "b", 1).await);
    let with_start = service::SignalWithStartWorkflowExecutionRequest {
        namespace: "default".to_owned(),
        workflow_id: "a".to_owned(),
        workflow_type: Some(common::WorkflowType { name: "W".to_owned() }),
        task_queue: queue(),
        signal_name: "s".to_owned(),
        ..Default::default()
    };
    no_room(engine.signal_with_start(with_start).await.map(drop));
    let updated = service::UpdateWorkflowExecutionRequest {
        namespace: "default".to_owned(),
        workflow_execution: workflow("a"),
        request: Some(update::Request {
            input: Some(update::Input {
                name: "u".to_owned(),
                ..Default::default()
            }),
            ..Default::default()
        }),
        ..Default::default()
    };
    no_room(engine.update_workflow(updated).await.map(drop));
    // The same start again is not a new one.
    start(&engine, "a").await;
    // Others have room of their own.
    register(&engine, "theirs", "another").await;
    start_in(&engine, "theirs", "b", 1).await.unwrap();

    // What runs goes on into the reserve, and no further; but it can end.
    let task = poll(&engine).await;
    no_room(answer(&engine, &task.task_token, continued(MIB)).await);
    no_room(answer(&engine, &task.task_token, ended_with_result(MIB)).await);
    answer(&engine, &task.task_token, continued(1000)).await.unwrap();
    let task = poll(&engine).await;
    answer(&engine, &task.task_token, end()).await.unwrap();
    assert_eq!(
        ended_with(&history(&engine, "a").await),
        enums::EventType::WorkflowExecutionCompleted
    );
    no_room(start_in(&engine, "default", "b", 1).await);

    // The run that ended last, and the one before it, which has the bytes.
    delete(&engine, "a").await;
    no_room(start_in(&engine, "default", "b", 1).await);
    let runs = engine.list_workflows("default", "", 10, b"").await.unwrap().0;
    assert_eq!(runs.len(), 1);
    let request = service::DeleteWorkflowExecutionRequest {
        namespace: "default".to_owned(),
        workflow_execution: runs[0].execution.clone(),
    };
    engine.delete_workflow(request).await.unwrap();
    start_in(&engine, "default", "b", 1).await.unwrap();
    terminate(&engine, "default", "b").await;
    delete(&engine, "b").await;
    let left = store.workflow_bytes().await.unwrap();
    let ours: Vec<_> = left.iter().filter(|(name, _)| name == "default").collect();
    assert_eq!(ours, [&("default".to_owned(), 0)]);
    engine.close();
    store.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn when_the_reserve_is_used_up_runs_can_only_end() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("db");
    let (engine, store) = open_for(&path, 100 * MIB).await;
    start(&engine, "a").await;
    start(&engine, "b").await;
    for _ in 0..2 {
        signal(&engine, "a", MIB).await.unwrap();
    }
    engine.close();
    store.close().await;
    // The operator has made the limit smaller than what is kept.
    let (engine, store) = open_for(&path, MIB).await;
    for _ in 0..2 {
        let task = poll(&engine).await;
        no_room(answer(&engine, &task.task_token, activity()).await);
        no_room(answer(&engine, &task.task_token, continued(1)).await);
        answer(&engine, &task.task_token, end()).await.unwrap();
    }
    delete(&engine, "b").await;
    delete(&engine, "a").await;
    start(&engine, "c").await;
    engine.close();
    store.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_namespaces_of_a_project_share_its_room_and_give_it_back_when_they_go() {
    let place = tempfile::tempdir().unwrap();
    let (engine, store) = open_for(&place.path().join("db"), MIB).await;
    register(&engine, "one", "p").await;
    register(&engine, "two", "p").await;
    start_in(&engine, "one", "wf", MIB).await.unwrap();
    no_room(start_in(&engine, "two", "wf", 1).await);
    terminate(&engine, "one", "wf").await;
    no_room(start_in(&engine, "two", "wf", 1).await);
    let id = engine.namespace("one", "").unwrap().id;
    engine.delete_namespace(&id).await.unwrap();
    start_in(&engine, "two", "wf", 1).await.unwrap();
    engine.close();
    store.close().await;
}
