//! What is given to one namespace, one run, one activity is not for another, whatever that one says.

use atoll_workflow_core::TaskToken;
use atoll_workflows::{Namespace, Question, Step, StepEnd, Verdict, acting_with, digest};
use serde_json::json;
use temporalio_protos::temporal::api::history::v1::history_event::Attributes as Event;
use temporalio_protos::temporal::api::query::v1::WorkflowQuery;
use temporalio_protos::temporal::api::schedule::v1 as schedule;
use temporalio_protos::temporal::api::workflow::v1::NewWorkflowExecutionInfo;

use super::*;

pub(crate) async fn add_namespace(engine: &Engine, name: &str, project: &str) {
    let namespace = Namespace {
        name: name.to_owned(),
        project: project.to_owned(),
        retention: i64::MAX,
        ..Namespace::default()
    };
    engine.register_namespace(namespace).await.unwrap();
}

fn answer(token: &TaskToken, text: &str) -> service::RespondQueryTaskCompletedRequest {
    service::RespondQueryTaskCompletedRequest {
        namespace: token.namespace.clone(),
        task_token: token.encode(),
        completed_type: enums::QueryResultType::Answered.into(),
        query_result: Some(common::Payloads {
            payloads: vec![common::Payload {
                data: text.as_bytes().to_vec(),
                ..Default::default()
            }],
        }),
        ..Default::default()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_query_is_answered_by_whom_it_was_given_to() {
    let place = tempfile::tempdir().unwrap();
    let (engine, store) = open(&place.path().join("db")).await;
    add_namespace(&engine, "theirs", "other").await;
    start(&engine, "wf").await;
    let task = poll(&engine).await;
    complete(&engine, &task.task_token, vec![activity()]).await;
    let request = service::QueryWorkflowRequest {
        namespace: "default".to_owned(),
        execution: Some(common::WorkflowExecution {
            workflow_id: "wf".to_owned(),
            run_id: String::new(),
        }),
        query: Some(WorkflowQuery {
            query_type: "what".to_owned(),
            ..Default::default()
        }),
        ..Default::default()
    };
    let asking = tokio::spawn({
        let engine = engine.clone();
        async move { engine.query_workflow(request, None).await }
    });
    let task = poll(&engine).await;
    assert!(task.query.is_some());
    let token = TaskToken::decode("default", &task.task_token).unwrap();
    assert!(!token.query_id.is_empty());
    // Somebody who has learned its name, from another namespace, or for another workflow or run of the same one.
    let forged = [
        TaskToken {
            namespace: "theirs".to_owned(),
            ..token.clone()
        },
        TaskToken {
            workflow_id: "another".to_owned(),
            ..token.clone()
        },
        TaskToken {
            run_id: "another".to_owned(),
            ..token.clone()
        },
        TaskToken {
            run_id: String::new(),
            ..token.clone()
        },
    ];
    for token in &forged {
        let refused = engine.answer_query(answer(token, "a lie")).unwrap_err();
        assert!(matches!(refused, Refusal::NotFound(_)), "{refused:?}");
    }
    // A token of one namespace is not taken in another either.
    let mut request = answer(&token, "a lie");
    request.namespace = "theirs".to_owned();
    assert!(engine.answer_query(request).is_err());
    engine.answer_query(answer(&token, "the truth")).unwrap();
    let heard = asking.await.unwrap().unwrap().query_result.unwrap();
    assert_eq!(heard.payloads[0].data, b"the truth");
    engine.close();
    store.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_is_stopped_in_its_own_namespace() {
    let place = tempfile::tempdir().unwrap();
    let (engine, store) = open(&place.path().join("db")).await;
    add_namespace(&engine, "theirs", "other").await;
    let stop = |namespace: &str| service::ShutdownWorkerRequest {
        namespace: namespace.to_owned(),
        worker_instance_key: "worker".to_owned(),
        ..Default::default()
    };
    let request = service::PollWorkflowTaskQueueRequest {
        namespace: "default".to_owned(),
        task_queue: queue(),
        worker_instance_key: "worker".to_owned(),
        ..Default::default()
    };
    // Somebody else's worker of the same name stops: this one goes on.
    engine.shutdown_worker(stop("theirs")).unwrap();
    start(&engine, "wf").await;
    let task = engine.poll_workflow_task(request.clone(), None).await.unwrap();
    assert!(!task.task_token.is_empty());
    engine.shutdown_worker(stop("default")).unwrap();
    start(&engine, "another").await;
    let task = engine.poll_workflow_task(request, None).await.unwrap();
    assert!(task.task_token.is_empty());
    engine.close();
    store.close().await;
}

/// An activity for the built-in worker.
fn step_of(activity_id: &str) -> Attributes {
    Attributes::ScheduleActivityTaskCommandAttributes(command::ScheduleActivityTaskCommandAttributes {
        activity_id: activity_id.to_owned(),
        activity_type: Some(common::ActivityType {
            name: "step".to_owned(),
        }),
        task_queue: Some(TaskQueue {
            name: "atoll".to_owned(),
            ..Default::default()
        }),
        start_to_close_timeout: Some(duration(60 * SECOND)),
        ..Default::default()
    })
}

/// Has the workflow schedule an activity for the built-in worker, and takes it.
async fn next_step(engine: &Engine, activity_id: &str) -> Step {
    let task = poll(engine).await;
    complete(engine, &task.task_token, vec![step_of(activity_id)]).await;
    let namespace = engine.namespace("default", "").unwrap();
    engine.next_step(&namespace, "atoll").await.unwrap().unwrap()
}

/// Whatever is between a start and a step: other runs, a child, a schedule, a restart, and workers who may do more.
#[tokio::test(flavor = "multi_thread")]
async fn a_step_knows_what_whoever_started_its_workflow_may_do() {
    const LITTLE: &str = "member workflows";
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("db");
    let (engine, store) = open(&path).await;
    Box::pin(acting_with(LITTLE.to_owned(), start(&engine, "wf"))).await;
    let step = acting_with("member".to_owned(), next_step(&engine, "first")).await;
    assert_eq!(step.rights, LITTLE);
    engine
        .end_step(&step, StepEnd::Done(b"1".to_vec()))
        .await
        .unwrap();

    let task = poll(&engine).await;
    let again = Attributes::ContinueAsNewWorkflowExecutionCommandAttributes(Default::default());
    complete(&engine, &task.task_token, vec![again]).await;
    engine.close();
    store.close().await;
    let (engine, store) = open(&path).await;
    let task = poll(&engine).await;
    let child = Attributes::StartChildWorkflowExecutionCommandAttributes(
        command::StartChildWorkflowExecutionCommandAttributes {
            workflow_id: "child".to_owned(),
            workflow_type: Some(common::WorkflowType { name: "C".to_owned() }),
            parent_close_policy: enums::ParentClosePolicy::Abandon.into(),
            ..Default::default()
        },
    );
    complete(&engine, &task.task_token, vec![child]).await;
    // The child's task, or the one with which the parent hears of it.
    let step = loop {
        let task = poll(&engine).await;
        if task.workflow_execution.as_ref().unwrap().workflow_id == "child" {
            complete(&engine, &task.task_token, vec![step_of("second")]).await;
            let namespace = engine.namespace("default", "").unwrap();
            break engine.next_step(&namespace, "atoll").await.unwrap().unwrap();
        }
        complete(&engine, &task.task_token, vec![end()]).await;
    };
    assert_eq!(
        (step.workflow_id.as_str(), step.rights.as_str()),
        ("child", LITTLE)
    );
    engine.close();
    store.close().await;
}

/// Whoever says last what a schedule starts answers for it.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_schedule_starts_may_do_what_its_owner_may() {
    let place = tempfile::tempdir().unwrap();
    let (engine, store) = open(&place.path().join("db")).await;
    let action = NewWorkflowExecutionInfo {
        workflow_id: "wf".to_owned(),
        workflow_type: Some(common::WorkflowType { name: "W".to_owned() }),
        task_queue: queue(),
        ..Default::default()
    };
    let wanted = schedule::Schedule {
        action: Some(schedule::ScheduleAction {
            action: Some(schedule::schedule_action::Action::StartWorkflow(action)),
        }),
        ..Default::default()
    };
    let create = service::CreateScheduleRequest {
        namespace: "default".to_owned(),
        schedule_id: "s".to_owned(),
        schedule: Some(wanted.clone()),
        ..Default::default()
    };
    let update = service::UpdateScheduleRequest {
        namespace: "default".to_owned(),
        schedule_id: "s".to_owned(),
        schedule: Some(wanted),
        ..Default::default()
    };
    let all = i32::from(enums::ScheduleOverlapPolicy::AllowAll);
    let trigger = service::PatchScheduleRequest {
        namespace: "default".to_owned(),
        schedule_id: "s".to_owned(),
        patch: Some(schedule::SchedulePatch {
            trigger_immediately: Some(schedule::TriggerImmediatelyRequest {
                overlap_policy: all,
                ..Default::default()
            }),
            ..Default::default()
        }),
        ..Default::default()
    };
    let by = |rights: &str| rights.to_owned();
    Box::pin(acting_with(
        by("member sandboxes workflows"),
        engine.create_schedule(create),
    ))
    .await
    .unwrap();
    Box::pin(acting_with(by("member"), engine.patch_schedule(trigger.clone())))
        .await
        .unwrap();
    let step = next_step(&engine, "one").await;
    assert_eq!(step.rights, "member sandboxes workflows");
    // Its id tells the second only, and the next may come within it.
    engine
        .end_step(&step, StepEnd::Done(b"1".to_vec()))
        .await
        .unwrap();
    let task = poll(&engine).await;
    complete(&engine, &task.task_token, vec![end()]).await;
    Box::pin(acting_with(
        by("member workflows"),
        engine.update_schedule(update),
    ))
    .await
    .unwrap();
    Box::pin(acting_with(by("member"), engine.patch_schedule(trigger)))
        .await
        .unwrap();
    assert_eq!(next_step(&engine, "two").await.rights, "member workflows");
    engine.close();
    store.close().await;
}

/// Whoever has a key for workflows, and nothing else, cannot answer in a person's place.
#[tokio::test(flavor = "multi_thread")]
async fn a_step_is_taken_and_answered_by_the_server_alone() {
    let place = tempfile::tempdir().unwrap();
    let (engine, store) = open(&place.path().join("db")).await;
    start(&engine, "wf").await;
    // Not by a worker that would carry it out itself when it schedules it.
    let task = poll(&engine).await;
    let wanted = command::ScheduleActivityTaskCommandAttributes {
        activity_id: "ask".to_owned(),
        activity_type: Some(common::ActivityType {
            name: "approval.request".to_owned(),
        }),
        task_queue: steps_queue(),
        start_to_close_timeout: Some(duration(60 * SECOND)),
        request_eager_execution: true,
        ..Default::default()
    };
    let request = service::RespondWorkflowTaskCompletedRequest {
        namespace: "default".to_owned(),
        task_token: task.task_token,
        commands: vec![command::Command {
            attributes: Some(Attributes::ScheduleActivityTaskCommandAttributes(wanted)),
            ..Default::default()
        }],
        ..Default::default()
    };
    let answered = engine.complete_workflow_task(request).await.unwrap();
    assert_eq!(answered.activity_tasks, []);
    // Nor by one that polls.
    let request = service::PollActivityTaskQueueRequest {
        namespace: "default".to_owned(),
        task_queue: steps_queue(),
        ..Default::default()
    };
    denied(&engine.poll_activity_task(request, None).await);

    let namespace = engine.namespace("default", "").unwrap();
    let asks = engine.next_step(&namespace, "atoll").await.unwrap().unwrap();
    let action = json!({"step": "sandbox.delete", "input": {"sandbox": "one"}});
    let approval = engine.ask_approval(question(&asks, &action)).await.unwrap();
    answer_as_worker(&engine, &asks).await;
    choose_as_worker(&engine).await;
    assert!(!engine.beat_step(&asks).await.unwrap());

    let yes = Verdict {
        granted: true,
        digest: digest(&action),
        by: "a person".to_owned(),
        key: Some("key_theirs".to_owned()),
        note: String::new(),
    };
    engine.decide_approval("", &approval.id, yes).await.unwrap();
    // The yes completes the activity, so that the workflow goes on.
    poll(&engine).await;
    let events = history(&engine, "wf").await;
    let answers = events.into_iter().filter_map(|event| match event.attributes {
        Some(Event::ActivityTaskCompletedEventAttributes(completed)) => completed.result,
        _ => None,
    });
    let answers: Vec<_> = answers.flat_map(|result| result.payloads).collect();
    assert_eq!(answers.len(), 1);
    let answer: serde_json::Value = serde_json::from_slice(&answers[0].data).unwrap();
    assert_eq!(
        (&answer["by"], &answer["key"]),
        (&json!("a person"), &json!("key_theirs"))
    );
    let kept = engine.approval("", &approval.id).unwrap().decision.unwrap();
    assert_eq!(
        kept.key.as_deref(),
        Some("key_theirs"),
        "whatever they call themselves"
    );
    engine.close();
    store.close().await;
}

fn steps_queue() -> Option<TaskQueue> {
    Some(TaskQueue {
        name: "atoll".to_owned(),
        ..Default::default()
    })
}

fn denied<T: std::fmt::Debug>(answer: &Result<T, Refusal>) {
    assert!(matches!(answer, Err(Refusal::PermissionDenied(_))), "{answer:?}");
}

/// Whatever ends an activity or keeps it alive, by its token and by its id.
async fn answer_as_worker(engine: &Engine, step: &Step) {
    let (namespace, task_token) = (step.namespace.clone(), step.token.clone());
    let (workflow_id, activity_id) = (step.workflow_id.clone(), step.activity_id.clone());
    let completed = service::RespondActivityTaskCompletedRequest {
        namespace: namespace.clone(),
        task_token: task_token.clone(),
        ..Default::default()
    };
    denied(&engine.complete_activity(completed).await);
    let completed = service::RespondActivityTaskCompletedByIdRequest {
        namespace: namespace.clone(),
        workflow_id: workflow_id.clone(),
        activity_id: activity_id.clone(),
        ..Default::default()
    };
    denied(&engine.complete_activity_by_id(completed).await);
    let failed = service::RespondActivityTaskFailedRequest {
        namespace: namespace.clone(),
        task_token: task_token.clone(),
        ..Default::default()
    };
    denied(&engine.fail_activity(failed).await);
    let failed = service::RespondActivityTaskFailedByIdRequest {
        namespace: namespace.clone(),
        workflow_id: workflow_id.clone(),
        activity_id: activity_id.clone(),
        ..Default::default()
    };
    denied(&engine.fail_activity_by_id(failed).await);
    let canceled = service::RespondActivityTaskCanceledRequest {
        namespace: namespace.clone(),
        task_token: task_token.clone(),
        ..Default::default()
    };
    denied(&engine.cancel_activity(canceled).await);
    let canceled = service::RespondActivityTaskCanceledByIdRequest {
        namespace: namespace.clone(),
        workflow_id: workflow_id.clone(),
        activity_id: activity_id.clone(),
        ..Default::default()
    };
    denied(&engine.cancel_activity_by_id(canceled).await);
    let alive = service::RecordActivityTaskHeartbeatRequest {
        namespace: namespace.clone(),
        task_token,
        ..Default::default()
    };
    denied(&engine.heartbeat_activity(alive).await);
    let alive = service::RecordActivityTaskHeartbeatByIdRequest {
        namespace,
        workflow_id,
        activity_id,
        ..Default::default()
    };
    denied(&engine.heartbeat_activity_by_id(alive).await);
}

/// Whatever holds an activity up or begins it again.
async fn choose_as_worker(engine: &Engine) {
    use service::{pause_activity_request, reset_activity_request, unpause_activity_request};
    let execution = common::WorkflowExecution {
        workflow_id: "wf".to_owned(),
        run_id: String::new(),
    };
    let pause = service::PauseActivityRequest {
        namespace: "default".to_owned(),
        execution: Some(execution.clone()),
        activity: Some(pause_activity_request::Activity::Id("ask".to_owned())),
        ..Default::default()
    };
    denied(&engine.pause_activity(pause).await);
    let kind = "approval.request".to_owned();
    let unpause = service::UnpauseActivityRequest {
        namespace: "default".to_owned(),
        execution: Some(execution.clone()),
        activity: Some(unpause_activity_request::Activity::Type(kind.clone())),
        ..Default::default()
    };
    denied(&engine.unpause_activity(unpause).await);
    let reset = service::ResetActivityRequest {
        namespace: "default".to_owned(),
        execution: Some(execution),
        activity: Some(reset_activity_request::Activity::Type(kind)),
        ..Default::default()
    };
    denied(&engine.reset_activity(reset).await);
}

fn question(step: &Step, action: &serde_json::Value) -> Question {
    Question {
        namespace: step.namespace.clone(),
        workflow_id: step.workflow_id.clone(),
        run_id: step.run_id.clone(),
        activity_id: step.activity_id.clone(),
        scheduled_id: step.scheduled_id,
        action: action.clone(),
        reason: "to see".to_owned(),
        limit: Duration::from_secs(600),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_approval_is_good_for_one_activity_whatever_the_next_is_called() {
    let place = tempfile::tempdir().unwrap();
    let (engine, store) = open(&place.path().join("db")).await;
    start(&engine, "wf").await;
    let action = json!({"step": "sandbox.delete", "input": {"sandbox": "one"}});

    let asks = next_step(&engine, "ask").await;
    let approval = engine.ask_approval(question(&asks, &action)).await.unwrap();
    let again = engine.ask_approval(question(&asks, &action)).await.unwrap();
    assert_eq!(approval.id, again.id, "one activity asks once");
    let yes = Verdict {
        granted: true,
        digest: digest(&action),
        by: "a person".to_owned(),
        key: Some("key_theirs".to_owned()),
        note: String::new(),
    };
    engine.decide_approval("", &approval.id, yes).await.unwrap();

    // The yes completes the activity that asked, so that the workflow goes on.
    let does = next_step(&engine, "do").await;
    engine
        .use_approval("", &approval.id, &does, &action)
        .await
        .unwrap();
    // The same activity may try again.
    engine
        .use_approval("", &approval.id, &does, &action)
        .await
        .unwrap();
    engine
        .end_step(&does, atoll_workflows::StepEnd::Done(b"{}".to_vec()))
        .await
        .unwrap();

    // Another one, which the workflow gives the same id.
    let does_again = next_step(&engine, "do").await;
    assert_eq!(does.activity_id, does_again.activity_id);
    let refused = engine
        .use_approval("", &approval.id, &does_again, &action)
        .await
        .unwrap_err();
    assert!(refused.to_string().contains("already"), "{refused}");
    engine
        .end_step(&does_again, atoll_workflows::StepEnd::Done(b"{}".to_vec()))
        .await
        .unwrap();

    // Nor does a question by the same id find the answer to the first.
    let other = json!({"step": "sandbox.delete", "input": {"sandbox": "all"}});
    let asks_again = next_step(&engine, "ask").await;
    let second = engine.ask_approval(question(&asks_again, &other)).await.unwrap();
    assert_ne!(second.id, approval.id);
    assert_eq!(second.decision, None);
    assert_eq!(second.action, other.to_string());
    engine.close();
    store.close().await;
}
