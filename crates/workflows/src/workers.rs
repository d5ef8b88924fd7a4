//! Workers and the queues that they poll.

use std::time::Duration;

use atoll_workflow_core::{Refusal, duration, stamp};
use temporalio_protos::temporal::api::enums::v1::{
    BuildIdTaskReachability, DescribeTaskQueueMode, TaskQueueType,
};
use temporalio_protos::temporal::api::taskqueue::v1::{
    PollerInfo, TaskQueueStats, TaskQueueTypeInfo, TaskQueueVersionInfo,
};
use temporalio_protos::temporal::api::workflowservice::v1 as service;

use crate::Engine;
use crate::queues::{Asking, Kind, MOST_STOPPED, MOST_WAITING, QueueKey, What};

impl Engine {
    /// A worker stops: its polls are answered, and what waits for it goes to others.
    pub fn shutdown_worker(
        &self,
        request: service::ShutdownWorkerRequest,
    ) -> Result<service::ShutdownWorkerResponse, Refusal> {
        let _inside = self.inner.namespaces.enter(&request.namespace)?;
        let limits = &self.inner.options.limits;
        limits.check_id("WorkerInstanceKey", &request.worker_instance_key)?;
        if !request.sticky_task_queue.is_empty() {
            let queue = QueueKey {
                namespace: request.namespace.clone(),
                name: request.sticky_task_queue,
                kind: Kind::Workflow,
            };
            for task in self.inner.queues.leave(&queue) {
                if matches!(task.what, What::Workflow { .. }) {
                    self.unstick(task.key, task.run_id);
                }
            }
        }
        let stopped = self.inner.queues.count_stopped();
        let stopped = stopped
            .iter()
            .map(|(namespace, count)| (namespace.as_str(), *count));
        let remember = self.share(&request.namespace, stopped) < MOST_STOPPED;
        self.inner
            .queues
            .release(&request.namespace, &request.worker_instance_key, remember);
        Ok(service::ShutdownWorkerResponse {})
    }

    /// Holds the poll of a worker that has handlers for Nexus among others. There is no way to call them; but a worker whose
    /// poll is refused neither works nor stops.
    pub async fn poll_nexus_task(
        &self,
        request: service::PollNexusTaskQueueRequest,
        wait: Option<Duration>,
    ) -> Result<service::PollNexusTaskQueueResponse, Refusal> {
        let inside = self.inner.namespaces.enter(&request.namespace)?;
        let key = QueueKey {
            namespace: request.namespace,
            name: request.task_queue.unwrap_or_default().name,
            kind: Kind::Nexus,
        };
        self.check_poll(&key.namespace, &key.name, &request.identity)?;
        let asking = Asking {
            identity: request.identity,
            worker: request.worker_instance_key,
            now: self.now(),
            rate: None,
        };
        self.inner
            .queues
            .poll(&inside, &key, &asking, self.poll_time(wait))
            .await;
        Ok(service::PollNexusTaskQueueResponse::default())
    }

    /// What names a queue or a worker is kept for a while, so it may not be long; and a project's polls may not be so many
    /// that others find no room.
    pub(crate) fn check_poll(&self, namespace: &str, queue: &str, identity: &str) -> Result<(), Refusal> {
        let limits = &self.inner.options.limits;
        limits.check_id("TaskQueue", queue)?;
        limits.check_id("Identity", identity)?;
        let waiting = self.inner.queues.waiting();
        if waiting.values().sum::<usize>() < MOST_WAITING {
            return Ok(());
        }
        let each = waiting
            .iter()
            .map(|(namespace, count)| (namespace.as_str(), *count));
        if self.share(namespace, each) >= MOST_WAITING {
            return Err(Refusal::ResourceExhausted(format!(
                "{MOST_WAITING} polls of this project wait already: let workers poll with fewer"
            )));
        }
        Ok(())
    }

    pub fn describe_task_queue(
        &self,
        request: service::DescribeTaskQueueRequest,
    ) -> Result<service::DescribeTaskQueueResponse, Refusal> {
        let _inside = self.inner.namespaces.enter(&request.namespace)?;
        let name = request.task_queue.unwrap_or_default().name;
        if name.is_empty() {
            return Err(Refusal::InvalidArgument(
                "TaskQueue is not set on request.".to_owned(),
            ));
        }
        #[expect(deprecated, reason = "Temporal's command line asks so")]
        if request.api_mode == i32::from(DescribeTaskQueueMode::Enhanced) {
            let asked = match request.task_queue_types.as_slice() {
                [] => vec![
                    i32::from(TaskQueueType::Workflow),
                    i32::from(TaskQueueType::Activity),
                ],
                asked => asked.to_vec(),
            };
            let types_info = asked.into_iter().map(|queue_type| {
                let (pollers, stats) = self.look_at_queue(&request.namespace, &name, queue_type);
                let info = TaskQueueTypeInfo {
                    pollers: if request.report_pollers {
                        pollers
                    } else {
                        Vec::new()
                    },
                    stats: request.report_stats.then_some(stats),
                };
                (queue_type, info)
            });
            // No code is versioned here: all of it is the one without a build id.
            let all = TaskQueueVersionInfo {
                types_info: types_info.collect(),
                task_reachability: if request.report_task_reachability {
                    i32::from(BuildIdTaskReachability::Reachable)
                } else {
                    0
                },
            };
            return Ok(service::DescribeTaskQueueResponse {
                versions_info: [(String::new(), all)].into(),
                ..Default::default()
            });
        }
        let (pollers, stats) = self.look_at_queue(&request.namespace, &name, request.task_queue_type);
        Ok(service::DescribeTaskQueueResponse {
            pollers,
            stats: request.report_stats.then_some(stats),
            ..Default::default()
        })
    }

    fn look_at_queue(
        &self,
        namespace: &str,
        name: &str,
        queue_type: i32,
    ) -> (Vec<PollerInfo>, TaskQueueStats) {
        let kind = match TaskQueueType::try_from(queue_type) {
            Ok(TaskQueueType::Activity) => Kind::Activity,
            Ok(TaskQueueType::Nexus) => Kind::Nexus,
            _ => Kind::Workflow,
        };
        let sight = self.inner.queues.look(&QueueKey {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            kind,
        });
        let pollers = sight
            .pollers
            .into_iter()
            .map(|(identity, poller)| PollerInfo {
                last_access_time: Some(stamp(poller.at)),
                identity,
                rate_per_second: poller.rate,
                ..Default::default()
            })
            .collect();
        let stats = TaskQueueStats {
            approximate_backlog_count: i64::try_from(sight.backlog).unwrap_or(i64::MAX),
            approximate_backlog_age: Some(duration(i64::try_from(sight.oldest.as_nanos()).unwrap_or(0))),
            ..Default::default()
        };
        (pollers, stats)
    }
}
