//! What a run wants done goes to the queues.

use atoll_workflow_core::Effect;

use crate::Engine;
use crate::cells::Key;
use crate::queues::{Kind, QueueKey, Task, What};

impl Engine {
    pub(crate) fn dispatch(&self, key: &Key, run_id: &str, effect: Effect) {
        let namespace = key.namespace.to_string();
        let (queue, what) = match effect {
            Effect::WorkflowTask { queue, sticky, stamp } => {
                let queue = QueueKey {
                    namespace,
                    name: queue,
                    kind: Kind::Workflow,
                };
                if sticky && !self.inner.queues.is_alive(&queue) {
                    self.unstick(key.clone(), run_id.to_owned());
                    return;
                }
                (queue, What::Workflow { stamp, sticky })
            }
            Effect::ActivityTask {
                queue,
                scheduled_id,
                stamp,
            } => {
                let queue = QueueKey {
                    namespace,
                    name: queue,
                    kind: Kind::Activity,
                };
                (queue, What::Activity { scheduled_id, stamp })
            }
        };
        let task = Task {
            key: key.clone(),
            run_id: run_id.to_owned(),
            what,
        };
        self.inner.queues.push(&queue, task);
    }

    /// The worker that remembers the workflow is gone: any other may have the task.
    pub(crate) fn unstick(&self, key: Key, run_id: String) {
        let engine = self.clone();
        tokio::spawn(async move {
            let result = engine
                .change(key, &run_id, |slot, turn| {
                    slot.run.clear_sticky(turn);
                    Ok(())
                })
                .await;
            if let Err(error) = result {
                tracing::debug!(run_id, %error, "a workflow task could not be given to another worker");
            }
        });
    }
}
