//! The machine's clock was wrong, and is set right while the server is down: what workers had is given out again after its own
//! time, and a workflow goes on.

use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use super::*;

/// How far ahead the machine's clock is.
static AHEAD: AtomicI64 = AtomicI64::new(0);

fn wall() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    i64::try_from(since.as_nanos()).unwrap() + AHEAD.load(Ordering::Relaxed)
}

async fn open_at(path: &Path, ahead: i64) -> (Engine, Arc<dyn WorkflowStore>) {
    AHEAD.store(ahead, Ordering::Relaxed);
    let store = atoll_store::sqlite::open_workflows(path).unwrap();
    let options = Options {
        poll: Duration::from_secs(30),
        wall,
        ..Options::default()
    };
    (Engine::open(store.clone(), options).await.unwrap(), store)
}

async fn start_with_short_tasks(engine: &Engine, id: &str) {
    let request = service::StartWorkflowExecutionRequest {
        namespace: "default".to_owned(),
        workflow_id: id.to_owned(),
        workflow_type: Some(common::WorkflowType { name: "W".to_owned() }),
        task_queue: queue(),
        workflow_task_timeout: Some(duration(SECOND)),
        ..Default::default()
    };
    engine.start_workflow(request).await.unwrap();
}

/// An hour is carried over a restart; two days are not.
#[tokio::test(flavor = "multi_thread")]
async fn nobody_waits_as_long_as_the_clock_was_wrong() {
    for ahead in [3600 * SECOND, 48 * 3600 * SECOND] {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("db");
        let (engine, store) = open_at(&path, ahead).await;
        // A worker has the task of one, and dies.
        start_with_short_tasks(&engine, "taken").await;
        let _lost = poll(&engine).await;
        engine.close();
        store.close().await;

        let (engine, store) = open_at(&path, 0).await;
        let task = poll(&engine).await;
        assert_eq!(task.attempt, 2, "it timed out");
        complete(&engine, &task.task_token, vec![end()]).await;
        assert_eq!(
            ended_with(&history(&engine, "taken").await),
            enums::EventType::WorkflowExecutionCompleted
        );
        engine.close();
        store.close().await;

        // An activity of another ends after the restart.
        let (engine, store) = open_at(&path, ahead).await;
        start(&engine, "waits").await;
        let task = poll(&engine).await;
        complete(&engine, &task.task_token, vec![activity()]).await;
        engine.close();
        store.close().await;

        let (engine, store) = open_at(&path, 0).await;
        do_activity(&engine).await;
        let task = poll(&engine).await;
        complete(&engine, &task.task_token, vec![end()]).await;
        assert_eq!(
            ended_with(&history(&engine, "waits").await),
            enums::EventType::WorkflowExecutionCompleted
        );
        engine.close();
        store.close().await;
    }
}
