//! One lane of the load generator: client, workflow worker and activity worker in one, on a task queue of its own.

use std::time::{Duration, Instant};

use prost::Message;
use temporalio_protos::temporal::api::command::v1::command::Attributes;
use temporalio_protos::temporal::api::command::v1::{
    Command, CompleteWorkflowExecutionCommandAttributes, ScheduleActivityTaskCommandAttributes,
    StartTimerCommandAttributes,
};
use temporalio_protos::temporal::api::common::v1::{ActivityType, WorkflowType};
use temporalio_protos::temporal::api::enums::v1::CommandType;
use temporalio_protos::temporal::api::taskqueue::v1::TaskQueue;
use temporalio_protos::temporal::api::workflowservice::v1 as service;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Channel, Endpoint};
use tonic_prost::ProstCodec;

use super::Target;
use crate::output::{Doing, Error, Result};

const NAMESPACE: &str = "default";
const MONTH: i64 = 30 * 24 * 3600;

pub(super) struct Lane {
    grpc: Grpc<Channel>,
    authorization: Option<MetadataValue<Ascii>>,
    queue: String,
    count: u64,
}

impl Lane {
    pub(super) async fn open(target: &Target, name: impl Into<String>) -> Result<Self> {
        let channel = Endpoint::from_shared(target.url.clone())
            .doing("cannot use the server's address")?
            .tcp_nodelay(true)
            .connect()
            .await
            .doing("cannot connect to the server")?;
        let authorization = match &target.key {
            Some(key) => Some(format!("Bearer {key}").parse().doing("cannot use the key")?),
            None => None,
        };
        // Queues of an earlier round may still hold what was left on them.
        let began = jiff::Timestamp::now().as_nanosecond();
        Ok(Self {
            grpc: Grpc::new(channel),
            authorization,
            queue: format!("{}-{began}", name.into()),
            count: 0,
        })
    }

    async fn call<Q, A>(&mut self, method: &'static str, message: Q) -> Result<A>
    where
        Q: Message + Send + Sync + 'static,
        A: Message + Default + Send + Sync + 'static,
    {
        let path: PathAndQuery = format!("/temporal.api.workflowservice.v1.WorkflowService/{method}")
            .parse()
            .doing("cannot call the server")?;
        let mut request = tonic::Request::new(message);
        request.set_timeout(Duration::from_secs(70));
        if let Some(authorization) = &self.authorization {
            request
                .metadata_mut()
                .insert("authorization", authorization.clone());
        }
        self.grpc.ready().await.doing("the server went away")?;
        let answer = self
            .grpc
            .unary(request, path, ProstCodec::<Q, A>::default())
            .await;
        let answer = answer.map_err(|status| Error::new(format!("{method}: {}", status.message())))?;
        Ok(answer.into_inner())
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
        self.call::<_, service::StartWorkflowExecutionResponse>("StartWorkflowExecution", request)
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
            self.call("PollWorkflowTaskQueue", request).await?;
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
        self.call::<_, service::RespondWorkflowTaskCompletedResponse>("RespondWorkflowTaskCompleted", request)
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
            self.call("PollActivityTaskQueue", request).await?;
        let request = service::RespondActivityTaskCompletedRequest {
            namespace: NAMESPACE.to_owned(),
            task_token: task.task_token,
            identity: "bench".to_owned(),
            ..Default::default()
        };
        self.call::<_, service::RespondActivityTaskCompletedResponse>(
            "RespondActivityTaskCompleted",
            request,
        )
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
