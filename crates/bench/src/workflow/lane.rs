//! One lane of the load generator: client, workflow worker and activity worker in one, on a task queue of its own.

use std::time::{Duration, Instant};

use atoll_client::WorkflowClient;
use atoll_client::output::{Error, Result};
use temporalio_protos::temporal::api::command::v1::command::Attributes;
use temporalio_protos::temporal::api::command::v1::{
    Command, CompleteWorkflowExecutionCommandAttributes, ScheduleActivityTaskCommandAttributes,
    StartTimerCommandAttributes,
};
use temporalio_protos::temporal::api::common::v1::{ActivityType, WorkflowType};
use temporalio_protos::temporal::api::enums::v1::CommandType;
use temporalio_protos::temporal::api::taskqueue::v1::TaskQueue;
use temporalio_protos::temporal::api::workflowservice::v1 as service;

use super::Target;

const NAMESPACE: &str = "default";
const MONTH: i64 = 30 * 24 * 3600;

pub(super) struct Lane {
    client: WorkflowClient,
    queue: String,
    count: u64,
}

impl Lane {
    pub(super) async fn open(target: &Target, name: impl Into<String>) -> Result<Self> {
        let client = WorkflowClient::open(&target.url, target.key.as_deref()).await?;
        // Queues of an earlier round may still hold what was left on them.
        let began = jiff::Timestamp::now().as_nanosecond();
        Ok(Self {
            client,
            queue: format!("{}-{began}", name.into()),
            count: 0,
        })
    }

    fn task_queue(&self) -> Option<TaskQueue> {
        Some(TaskQueue {
            name: self.queue.clone(),
            ..Default::default()
        })
    }

    async fn start(&mut self) -> Result<()> {
        self.count += 1;
        let id = format!("{}-{}", self.queue, self.count);
        let request = service::StartWorkflowExecutionRequest {
            namespace: NAMESPACE.to_owned(),
            workflow_id: id.clone(),
            request_id: id,
            workflow_type: Some(WorkflowType {
                name: "Bench".to_owned(),
            }),
            task_queue: self.task_queue(),
            ..Default::default()
        };
        self.client
            .call::<_, service::StartWorkflowExecutionResponse>("StartWorkflowExecution", request)
            .await
            .map(drop)
    }

    /// Takes the next workflow task and answers with one command.
    async fn decide(&mut self, kind: CommandType, attributes: Attributes) -> Result<()> {
        let request = service::PollWorkflowTaskQueueRequest {
            namespace: NAMESPACE.to_owned(),
            task_queue: self.task_queue(),
            identity: "bench".to_owned(),
            ..Default::default()
        };
        let task: service::PollWorkflowTaskQueueResponse =
            self.client.call("PollWorkflowTaskQueue", request).await?;
        if task.task_token.is_empty() {
            return Err(Error::new("there was no workflow task"));
        }
        let request = service::RespondWorkflowTaskCompletedRequest {
            namespace: NAMESPACE.to_owned(),
            task_token: task.task_token,
            identity: "bench".to_owned(),
            commands: vec![Command {
                command_type: i32::from(kind),
                attributes: Some(attributes),
                ..Default::default()
            }],
            ..Default::default()
        };
        self.client
            .call::<_, service::RespondWorkflowTaskCompletedResponse>("RespondWorkflowTaskCompleted", request)
            .await
            .map(drop)
    }

    /// One workflow with one activity, from start to end. How long it took.
    pub(super) async fn workflow(&mut self) -> Result<Duration> {
        let began = Instant::now();
        self.start().await?;
        let activity = ScheduleActivityTaskCommandAttributes {
            activity_id: "1".to_owned(),
            activity_type: Some(ActivityType {
                name: "bench".to_owned(),
            }),
            task_queue: self.task_queue(),
            start_to_close_timeout: Some(seconds(60)),
            ..Default::default()
        };
        self.decide(
            CommandType::ScheduleActivityTask,
            Attributes::ScheduleActivityTaskCommandAttributes(activity),
        )
        .await?;
        let request = service::PollActivityTaskQueueRequest {
            namespace: NAMESPACE.to_owned(),
            task_queue: self.task_queue(),
            identity: "bench".to_owned(),
            ..Default::default()
        };
        let task: service::PollActivityTaskQueueResponse =
            self.client.call("PollActivityTaskQueue", request).await?;
        let request = service::RespondActivityTaskCompletedRequest {
            namespace: NAMESPACE.to_owned(),
            task_token: task.task_token,
            identity: "bench".to_owned(),
            ..Default::default()
        };
        self.client
            .call::<_, service::RespondActivityTaskCompletedResponse>("RespondActivityTaskCompleted", request)
            .await?;
        self.decide(
            CommandType::CompleteWorkflowExecution,
            Attributes::CompleteWorkflowExecutionCommandAttributes(
                CompleteWorkflowExecutionCommandAttributes::default(),
            ),
        )
        .await?;
        Ok(began.elapsed())
    }

    /// One workflow that sleeps for a month.
    pub(super) async fn sleeping_workflow(&mut self) -> Result<()> {
        self.start().await?;
        let timer = StartTimerCommandAttributes {
            timer_id: "1".to_owned(),
            start_to_fire_timeout: Some(seconds(MONTH)),
        };
        self.decide(
            CommandType::StartTimer,
            Attributes::StartTimerCommandAttributes(timer),
        )
        .await
    }
}

fn seconds(seconds: i64) -> prost_wkt_types::Duration {
    prost_wkt_types::Duration { seconds, nanos: 0 }
}
