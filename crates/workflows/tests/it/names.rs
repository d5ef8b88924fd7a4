//! A name that is free may be anybody's: whoever has it next gets nothing of what was there before, and whoever had it before
//! gets nothing of what comes.

use atoll_store::WorkflowItem;
use atoll_workflows::{Namespace, Question, digest};
use prost::Message as _;
use serde_json::json;
use temporalio_protos::temporal::api::query::v1::WorkflowQuery;
use temporalio_protos::temporal::api::schedule::v1 as proto;
use temporalio_protos::temporal::api::workflow::v1::NewWorkflowExecutionInfo;

use super::bindings::add_namespace;
use super::*;

const NAME: &str = "shared";
const HOUR: Duration = Duration::from_secs(3600);

/// Polls that nobody ends by waiting.
async fn patient(path: &Path) -> (Engine, Arc<dyn WorkflowStore>) {
    let store = atoll_store::sqlite::open_workflows(path).unwrap();
    let options = Options {
        poll: HOUR,
        long_poll: HOUR,
        ..Options::default()
    };
    (Engine::open(store.clone(), options).await.unwrap(), store)
}

fn id(engine: &Engine) -> String {
    engine.namespace(NAME, "").unwrap().id
}

fn execution(workflow_id: &str) -> Option<common::WorkflowExecution> {
    Some(common::WorkflowExecution {
        workflow_id: workflow_id.to_owned(),
        run_id: String::new(),
    })
}

async fn begin(engine: &Engine, workflow_id: &str) -> Result<String, Refusal> {
    let request = service::StartWorkflowExecutionRequest {
        namespace: NAME.to_owned(),
        workflow_id: workflow_id.to_owned(),
        workflow_type: Some(common::WorkflowType { name: "W".to_owned() }),
        task_queue: queue(),
        ..Default::default()
    };
    Ok(engine.start_workflow(request).await?.run_id)
}

async fn terminate(engine: &Engine, workflow_id: &str) {
    let request = service::TerminateWorkflowExecutionRequest {
        namespace: NAME.to_owned(),
        workflow_execution: execution(workflow_id),
        ..Default::default()
    };
    engine.terminate_workflow(request).await.unwrap();
}

fn ask() -> service::PollWorkflowTaskQueueRequest {
    service::PollWorkflowTaskQueueRequest {
        namespace: NAME.to_owned(),
        task_queue: queue(),
        identity: "worker".to_owned(),
        ..Default::default()
    }
}

async fn schedule(engine: &Engine, schedule_id: &str) {
    let workflow = NewWorkflowExecutionInfo {
        workflow_id: "scheduled".to_owned(),
        workflow_type: Some(common::WorkflowType { name: "W".to_owned() }),
        task_queue: queue(),
        ..Default::default()
    };
    let schedule = proto::Schedule {
        spec: Some(proto::ScheduleSpec {
            cron_string: vec!["0 0 1 1 *".to_owned()],
            ..Default::default()
        }),
        action: Some(proto::ScheduleAction {
            action: Some(proto::schedule_action::Action::StartWorkflow(workflow)),
        }),
        ..Default::default()
    };
    let request = service::CreateScheduleRequest {
        namespace: NAME.to_owned(),
        schedule_id: schedule_id.to_owned(),
        schedule: Some(schedule),
        ..Default::default()
    };
    engine.create_schedule(request).await.unwrap();
}

/// A step for the built-in worker, by a workflow that is begun for it.
async fn offer_step(engine: &Engine, workflow_id: &str, queue: &str) {
    begin(engine, workflow_id).await.unwrap();
    let task = engine.poll_workflow_task(ask(), None).await.unwrap();
    let wanted =
        Attributes::ScheduleActivityTaskCommandAttributes(command::ScheduleActivityTaskCommandAttributes {
            activity_id: "a".to_owned(),
            activity_type: Some(common::ActivityType {
                name: "step".to_owned(),
            }),
            task_queue: Some(TaskQueue {
                name: queue.to_owned(),
                ..Default::default()
            }),
            start_to_close_timeout: Some(duration(60 * SECOND)),
            ..Default::default()
        });
    let request = service::RespondWorkflowTaskCompletedRequest {
        namespace: NAME.to_owned(),
        task_token: task.task_token,
        commands: vec![command::Command {
            attributes: Some(wanted),
            ..Default::default()
        }],
        ..Default::default()
    };
    engine.complete_workflow_task(request).await.unwrap();
}

/// Until somebody waits at the queue.
async fn until_polled(engine: &Engine, name: &str, kind: enums::TaskQueueType, identity: &str) {
    let request = service::DescribeTaskQueueRequest {
        namespace: NAME.to_owned(),
        task_queue: Some(TaskQueue {
            name: name.to_owned(),
            ..Default::default()
        }),
        task_queue_type: kind.into(),
        ..Default::default()
    };
    loop {
        let seen = engine.describe_task_queue(request.clone()).unwrap().pollers;
        if seen.iter().any(|poller| poller.identity == identity) {
            return;
        }
        tokio::task::yield_now().await;
    }
}

async fn is_empty(engine: &Engine, store: &dyn WorkflowStore) -> bool {
    let (runs, _) = engine.list_workflows(NAME, "", 10, b"").await.unwrap();
    let schedules = service::ListSchedulesRequest {
        namespace: NAME.to_owned(),
        ..Default::default()
    };
    let schedules = engine.list_schedules(schedules).await.unwrap().schedules;
    let batches = service::ListBatchOperationsRequest {
        namespace: NAME.to_owned(),
        ..Default::default()
    };
    let batches = engine.list_batches(batches).unwrap().operation_info;
    let used = store.workflow_namespaces().await.unwrap();
    runs.is_empty() && schedules.is_empty() && batches.is_empty() && !used.contains(&NAME.to_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_step_is_done_for_the_namespace_it_came_from() {
    let place = tempfile::tempdir().unwrap();
    let (engine, store) = patient(&place.path().join("db")).await;
    add_namespace(&engine, NAME, "victim").await;
    let theirs = engine.namespace(NAME, "").unwrap();
    offer_step(&engine, "one", "first").await;
    let step = engine.next_step(&theirs, "first").await.unwrap().unwrap();
    assert_eq!(engine.project_of_step(&step).as_deref(), Some("victim"));
    terminate(&engine, "one").await;
    // The built-in worker waits for the next one when the namespace goes.
    let waiting = tokio::spawn({
        let (engine, theirs) = (engine.clone(), theirs.clone());
        async move { engine.next_step(&theirs, "atoll").await }
    });
    until_polled(&engine, "atoll", enums::TaskQueueType::Activity, "atoll").await;
    engine.delete_namespace(&theirs.id).await.unwrap();
    add_namespace(&engine, NAME, "mallory").await;
    assert!(!matches!(waiting.await.unwrap(), Ok(Some(_))));

    offer_step(&engine, "two", "atoll").await;
    let refused = engine.next_step(&theirs, "atoll").await.unwrap_err();
    assert!(matches!(refused, Refusal::NamespaceNotFound(_)), "{refused:?}");
    assert_eq!(
        engine.project_of_step(&step),
        None,
        "what was taken before is nobody's"
    );
    let hers = engine.namespace(NAME, "").unwrap();
    let step = engine.next_step(&hers, "atoll").await.unwrap().unwrap();
    assert_eq!(engine.project_of_step(&step).as_deref(), Some("mallory"));
    engine.close();
    store.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_has_the_name_next_finds_nothing() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("db");
    let (engine, store) = patient(&path).await;
    add_namespace(&engine, NAME, "alice").await;
    // A question, a schedule, closed runs, a batch.
    offer_step(&engine, "asks", "atoll").await;
    let whose = engine.namespace(NAME, "").unwrap();
    let step = engine.next_step(&whose, "atoll").await.unwrap().unwrap();
    let question = Question {
        namespace: step.namespace.clone(),
        workflow_id: step.workflow_id.clone(),
        run_id: step.run_id.clone(),
        activity_id: step.activity_id.clone(),
        scheduled_id: step.scheduled_id,
        action: json!({"secret": "hers"}),
        reason: String::new(),
        limit: HOUR,
    };
    let approval = engine.ask_approval(question.clone()).await.unwrap();
    assert_eq!(approval.digest, digest(&json!({"secret": "hers"})));
    schedule(&engine, "reports").await;
    let batch = service::StartBatchOperationRequest {
        namespace: NAME.to_owned(),
        job_id: "job".to_owned(),
        reason: "to see".to_owned(),
        executions: execution("asks").into_iter().collect(),
        operation: Some(Operation::TerminationOperation(
            BatchOperationTermination::default(),
        )),
        // The next one would be in an hour: it runs when the namespace goes.
        max_operations_per_second: 0.0001,
        ..Default::default()
    };
    engine.start_batch(batch).await.unwrap();
    let over = service::GetWorkflowExecutionHistoryRequest {
        namespace: NAME.to_owned(),
        execution: execution("asks"),
        wait_new_event: true,
        history_event_filter_type: enums::HistoryEventFilterType::CloseEvent.into(),
        ..Default::default()
    };
    engine.workflow_history(over, None).await.unwrap();
    assert!(!is_empty(&engine, &*store).await);

    engine.delete_namespace(&whose.id).await.unwrap();
    let refused = begin(&engine, "late").await.unwrap_err();
    assert!(matches!(refused, Refusal::NamespaceNotFound(_)), "{refused:?}");
    add_namespace(&engine, NAME, "mallory").await;
    assert!(is_empty(&engine, &*store).await);
    assert_eq!(engine.approvals("mallory", true, None, 100).unwrap().0, []);
    assert!(engine.approval("mallory", &approval.id).is_err());
    // A step that asks late does not put its question before the new owner.
    engine.ask_approval(question).await.unwrap_err();
    assert_eq!(engine.approvals("mallory", true, None, 100).unwrap().0, []);
    // The same id is a workflow that there was never one of.
    let refused = history_of(&engine, "asks").await.unwrap_err();
    assert!(matches!(refused, Refusal::NotFound(_)), "{refused:?}");
    begin(&engine, "asks").await.unwrap();
    assert_eq!(history_of(&engine, "asks").await.unwrap().len(), 2);
    engine.close();
    store.close().await;
    let (engine, store) = patient(&path).await;
    assert_eq!(engine.namespace(NAME, "").unwrap().project, "mallory");
    assert_eq!(history_of(&engine, "asks").await.unwrap().len(), 2);
    engine.close();
    store.close().await;
}

async fn history_of(engine: &Engine, workflow_id: &str) -> Result<Vec<HistoryEvent>, Refusal> {
    let request = service::GetWorkflowExecutionHistoryRequest {
        namespace: NAME.to_owned(),
        execution: execution(workflow_id),
        ..Default::default()
    };
    let found = engine.workflow_history(request, None).await?;
    Ok(found.history.unwrap().events)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_schedule_does_not_outlive_its_namespace() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("db");
    let (engine, store) = patient(&path).await;
    add_namespace(&engine, NAME, "mallory").await;
    schedule(&engine, "ghost").await;
    engine.delete_namespace(&id(&engine)).await.unwrap();
    add_namespace(&engine, NAME, "alice").await;
    let patch = service::PatchScheduleRequest {
        namespace: NAME.to_owned(),
        schedule_id: "ghost".to_owned(),
        patch: Some(proto::SchedulePatch {
            trigger_immediately: Some(proto::TriggerImmediatelyRequest::default()),
            ..Default::default()
        }),
        ..Default::default()
    };
    let refused = engine.patch_schedule(patch).await.unwrap_err();
    assert!(matches!(refused, Refusal::NotFound(_)), "{refused:?}");
    assert!(is_empty(&engine, &*store).await);
    engine.close();
    store.close().await;
    let (engine, store) = patient(&path).await;
    assert!(is_empty(&engine, &*store).await);
    engine.close();
    store.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_waits_is_sent_away_before_the_name_is_free() {
    let place = tempfile::tempdir().unwrap();
    let (engine, store) = patient(&place.path().join("db")).await;
    add_namespace(&engine, NAME, "mallory").await;
    begin(&engine, "closed").await.unwrap();
    terminate(&engine, "closed").await;
    let polling = tokio::spawn({
        let engine = engine.clone();
        async move { engine.poll_workflow_task(ask(), None).await }
    });
    let activities = tokio::spawn({
        let engine = engine.clone();
        let request = service::PollActivityTaskQueueRequest {
            namespace: NAME.to_owned(),
            task_queue: queue(),
            identity: "worker".to_owned(),
            ..Default::default()
        };
        async move { engine.poll_activity_task(request, None).await }
    });
    until_polled(&engine, "queue", enums::TaskQueueType::Workflow, "worker").await;
    until_polled(&engine, "queue", enums::TaskQueueType::Activity, "worker").await;
    // A question to a workflow that has ended, which the one who polls has and does not answer.
    let asking = tokio::spawn({
        let engine = engine.clone();
        let request = service::QueryWorkflowRequest {
            namespace: NAME.to_owned(),
            execution: execution("closed"),
            query: Some(WorkflowQuery {
                query_type: "what".to_owned(),
                ..Default::default()
            }),
            ..Default::default()
        };
        async move { engine.query_workflow(request, Some(HOUR)).await }
    });
    let task = polling.await.unwrap().unwrap();
    assert!(task.query.is_some());
    let polling = tokio::spawn({
        let engine = engine.clone();
        let request = service::PollWorkflowTaskQueueRequest {
            identity: "another".to_owned(),
            ..ask()
        };
        async move { engine.poll_workflow_task(request, None).await }
    });
    until_polled(&engine, "queue", enums::TaskQueueType::Workflow, "another").await;
    engine.delete_namespace(&id(&engine)).await.unwrap();
    add_namespace(&engine, NAME, "alice").await;
    begin(&engine, "pay").await.unwrap();
    let told = asking.await.unwrap().unwrap_err();
    assert!(matches!(told, Refusal::NamespaceDeleting(_)), "{told:?}");
    assert!(polling.await.unwrap().unwrap().task_token.is_empty());
    assert!(activities.await.unwrap().unwrap().task_token.is_empty());
    let task = engine.poll_workflow_task(ask(), None).await.unwrap();
    assert_eq!(
        task.workflow_execution,
        Some(common::WorkflowExecution {
            workflow_id: "pay".to_owned(),
            run_id: task.workflow_execution.clone().unwrap().run_id,
        })
    );
    engine.close();
    store.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_and_a_deletion_at_once_exclude_each_other() {
    let place = tempfile::tempdir().unwrap();
    let (engine, store) = patient(&place.path().join("db")).await;
    let (mut deleted, mut refused) = (0, 0);
    for round in 0..40 {
        add_namespace(&engine, NAME, "mallory").await;
        let id = id(&engine);
        let delete = tokio::spawn({
            let (engine, id) = (engine.clone(), id.clone());
            async move { engine.delete_namespace(&id).await }
        });
        let starts: Vec<_> = (0..4)
            .map(|number| {
                let engine = engine.clone();
                tokio::spawn(async move {
                    // Sooner or later, so that all orders come up.
                    for _ in 0..round * number {
                        tokio::task::yield_now().await;
                    }
                    let id = format!("wf{number}");
                    begin(&engine, &id).await.map(|_| id)
                })
            })
            .collect();
        let mut started = Vec::new();
        for start in starts {
            started.extend(start.await.unwrap());
        }
        if delete.await.unwrap().is_ok() {
            deleted += 1;
            assert_eq!(started, Vec::<String>::new(), "acknowledged, and gone");
        } else {
            refused += 1;
            assert!(!started.is_empty(), "refused without a reason");
            for workflow_id in started {
                terminate(&engine, &workflow_id).await;
            }
            engine.delete_namespace(&id).await.unwrap();
        }
        assert!(engine.namespace(NAME, "").is_err());
        let used = store.workflow_namespaces().await.unwrap();
        assert!(!used.contains(&NAME.to_owned()), "{used:?}");
    }
    assert_eq!(deleted + refused, 40);
    engine.close();
    store.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn of_those_who_want_a_name_at_once_one_gets_it() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("db");
    let (engine, store) = patient(&path).await;
    let mut owners = Vec::new();
    for round in 0..50 {
        let name = format!("race{round}");
        let register = |project: &str| {
            let namespace = Namespace {
                name: name.clone(),
                project: project.to_owned(),
                retention: i64::MAX,
                ..Namespace::default()
            };
            let engine = engine.clone();
            tokio::spawn(async move { engine.register_namespace(namespace).await })
        };
        let (one, other) = (register("alice"), register("mallory"));
        let owner = match (one.await.unwrap(), other.await.unwrap()) {
            (Ok(()), Err(Refusal::NamespaceExists(_))) => "alice",
            (Err(Refusal::NamespaceExists(_)), Ok(())) => "mallory",
            other => panic!("{other:?}"),
        };
        assert_eq!(engine.namespace(&name, "").unwrap().project, owner);
        owners.push((name, owner));
    }
    engine.close();
    store.close().await;
    let (engine, store) = patient(&path).await;
    for (name, owner) in owners {
        assert_eq!(engine.namespace(&name, "").unwrap().project, owner);
    }
    engine.close();
    store.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deletion_that_was_cut_short_is_finished_by_the_next_server() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("db");
    let (engine, store) = patient(&path).await;
    for name in [NAME, "left behind"] {
        add_namespace(&engine, name, "alice").await;
    }
    begin(&engine, "closed").await.unwrap();
    terminate(&engine, "closed").await;
    schedule(&engine, "reports").await;
    let request = service::StartWorkflowExecutionRequest {
        namespace: "left behind".to_owned(),
        workflow_id: "open".to_owned(),
        workflow_type: Some(common::WorkflowType { name: "W".to_owned() }),
        task_queue: queue(),
        ..Default::default()
    };
    engine.start_workflow(request).await.unwrap();
    // As the one that was killed has left it: it had said so, and had not come far.
    let namespace = Namespace {
        deleting: true,
        ..engine.namespace(NAME, "").unwrap()
    };
    let item = WorkflowItem {
        namespace: String::new(),
        id: NAME.to_owned(),
        body: namespace.encode_to_vec(),
    };
    store.put_workflow_item("namespace", item).await.unwrap();
    // And as earlier versions have: the name is free, and what was behind it is not gone.
    store
        .delete_workflow_item("namespace", String::new(), "left behind".to_owned())
        .await
        .unwrap();
    engine.close();
    store.close().await;

    let (engine, store) = patient(&path).await;
    for name in [NAME, "left behind"] {
        let missing = engine.namespace(name, "").unwrap_err();
        assert!(matches!(missing, Refusal::NamespaceNotFound(_)), "{missing:?}");
    }
    assert_eq!(store.workflow_namespaces().await.unwrap(), Vec::<String>::new());
    add_namespace(&engine, NAME, "mallory").await;
    assert!(is_empty(&engine, &*store).await);
    engine.close();
    store.close().await;
}
