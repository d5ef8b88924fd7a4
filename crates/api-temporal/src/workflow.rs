//! `WorkflowService`: one method per call of the wire, in the order in which a worker and a client meet them.

mod lists;
mod names;

use atoll_workflow_core::Refusal;
use atoll_workflows::Engine;
use temporalio_protos::temporal::api::workflowservice::v1 as wire;
use tonic::{Request, Response, Status};

use crate::access::Caller;
use crate::generated::workflow::workflow_service_server::WorkflowService;
use crate::status::{answer, patience};

#[derive(Debug)]
pub(crate) struct Service {
    engine: Engine,
}

impl Service {
    pub(crate) fn new(engine: Engine) -> Self {
        Self { engine }
    }

    /// Lets a request about a namespace through to the engine, if its caller may see that.
    fn admit<T>(&self, request: Request<T>, namespace: impl Fn(&T) -> &String) -> Result<Request<T>, Status> {
        let allowed = Caller::of(&request)?.check(&self.engine, namespace(request.get_ref()));
        answer(allowed)?;
        Ok(request)
    }
}

/// Methods that only pass the message on. `wait` is for those that may take as long as the caller has time.
macro_rules! pass_on {
    ($($method:ident: $request:ident -> $response:ident = $engine:ident $($kind:ident)?;)*) => {
        #[tonic::async_trait]
        impl WorkflowService for Service {
            $(
                async fn $method(
                    &self,
                    request: Request<wire::$request>,
                ) -> Result<Response<wire::$response>, Status> {
                    pass_on!(@call self, request, $engine $($kind)?)
                }
            )*

            async fn get_system_info(
                &self,
                _: Request<wire::GetSystemInfoRequest>,
            ) -> Result<Response<wire::GetSystemInfoResponse>, Status> {
                Ok(Response::new(names::system_info()))
            }

            async fn get_cluster_info(
                &self,
                _: Request<wire::GetClusterInfoRequest>,
            ) -> Result<Response<wire::GetClusterInfoResponse>, Status> {
                Ok(Response::new(names::cluster_info()))
            }

            async fn describe_namespace(
                &self,
                request: Request<wire::DescribeNamespaceRequest>,
            ) -> Result<Response<wire::DescribeNamespaceResponse>, Status> {
                let caller = Caller::of(&request)?;
                let request = request.into_inner();
                let found = self.engine.namespace(&request.namespace, &request.id).and_then(|known| {
                    if caller.may_see(&known) {
                        Ok(names::describe(&known))
                    } else {
                        Err(Refusal::NamespaceNotFound(format!("{}{}", request.namespace, request.id)))
                    }
                });
                answer(found)
            }

            async fn list_namespaces(
                &self,
                request: Request<wire::ListNamespacesRequest>,
            ) -> Result<Response<wire::ListNamespacesResponse>, Status> {
                let caller = Caller::of(&request)?;
                let all = self.engine.namespaces();
                let seen = all.iter().filter(|namespace| caller.may_see(namespace));
                Ok(Response::new(wire::ListNamespacesResponse {
                    namespaces: seen.map(names::describe).collect(),
                    next_page_token: Vec::new(),
                }))
            }

            async fn register_namespace(
                &self,
                request: Request<wire::RegisterNamespaceRequest>,
            ) -> Result<Response<wire::RegisterNamespaceResponse>, Status> {
                let project = Caller::of(&request)?.project();
                let namespace = names::new(request.into_inner(), project);
                let registered = self.engine.register_namespace(namespace).await;
                answer(registered.map(|()| wire::RegisterNamespaceResponse {}))
            }

            async fn update_namespace(
                &self,
                request: Request<wire::UpdateNamespaceRequest>,
            ) -> Result<Response<wire::UpdateNamespaceResponse>, Status> {
                let request = self.admit(request, |request| &request.namespace)?.into_inner();
                let name = request.namespace.clone();
                let changed = self
                    .engine
                    .change_namespace(&name, |namespace| names::change(namespace, request))
                    .await;
                answer(changed.map(|known| names::changed(&known)))
            }

            async fn list_workflow_executions(
                &self,
                request: Request<wire::ListWorkflowExecutionsRequest>,
            ) -> Result<Response<wire::ListWorkflowExecutionsResponse>, Status> {
                let request = self.admit(request, |request| &request.namespace)?.into_inner();
                let listed = self
                    .engine
                    .list_workflows(&request.namespace, &request.query, request.page_size, &request.next_page_token)
                    .await;
                answer(listed.map(|(executions, next_page_token)| wire::ListWorkflowExecutionsResponse {
                    executions,
                    next_page_token,
                }))
            }

            async fn list_open_workflow_executions(
                &self,
                request: Request<wire::ListOpenWorkflowExecutionsRequest>,
            ) -> Result<Response<wire::ListOpenWorkflowExecutionsResponse>, Status> {
                let request = self.admit(request, |request| &request.namespace)?.into_inner();
                let listed = self
                    .engine
                    .list_workflows(
                        &request.namespace,
                        &lists::open(&request),
                        request.maximum_page_size,
                        &request.next_page_token,
                    )
                    .await;
                answer(listed.map(|(executions, next_page_token)| wire::ListOpenWorkflowExecutionsResponse {
                    executions,
                    next_page_token,
                }))
            }

            async fn list_closed_workflow_executions(
                &self,
                request: Request<wire::ListClosedWorkflowExecutionsRequest>,
            ) -> Result<Response<wire::ListClosedWorkflowExecutionsResponse>, Status> {
                let request = self.admit(request, |request| &request.namespace)?.into_inner();
                let listed = self
                    .engine
                    .list_workflows(
                        &request.namespace,
                        &lists::closed(&request),
                        request.maximum_page_size,
                        &request.next_page_token,
                    )
                    .await;
                answer(listed.map(|(executions, next_page_token)| wire::ListClosedWorkflowExecutionsResponse {
                    executions,
                    next_page_token,
                }))
            }

            async fn scan_workflow_executions(
                &self,
                request: Request<wire::ScanWorkflowExecutionsRequest>,
            ) -> Result<Response<wire::ScanWorkflowExecutionsResponse>, Status> {
                let request = self.admit(request, |request| &request.namespace)?.into_inner();
                let listed = self
                    .engine
                    .list_workflows(&request.namespace, &request.query, request.page_size, &request.next_page_token)
                    .await;
                answer(listed.map(|(executions, next_page_token)| wire::ScanWorkflowExecutionsResponse {
                    executions,
                    next_page_token,
                }))
            }

            async fn get_search_attributes(
                &self,
                _: Request<wire::GetSearchAttributesRequest>,
            ) -> Result<Response<wire::GetSearchAttributesResponse>, Status> {
                Ok(Response::new(wire::GetSearchAttributesResponse {
                    keys: self.engine.system_attributes().collect(),
                }))
            }
        }
    };
    (@call $self:ident, $request:ident, $engine:ident) => {{
        let request = $self.admit($request, |request| &request.namespace)?;
        answer($self.engine.$engine(request.into_inner()).await)
    }};
    (@call $self:ident, $request:ident, $engine:ident wait) => {{
        let request = $self.admit($request, |request| &request.namespace)?;
        let wait = patience(&request);
        answer($self.engine.$engine(request.into_inner(), wait).await)
    }};
    (@call $self:ident, $request:ident, $engine:ident now) => {{
        let request = $self.admit($request, |request| &request.namespace)?;
        answer($self.engine.$engine(request.into_inner()))
    }};
}

pass_on! {
    start_workflow_execution: StartWorkflowExecutionRequest -> StartWorkflowExecutionResponse = start_workflow;
    signal_with_start_workflow_execution: SignalWithStartWorkflowExecutionRequest -> SignalWithStartWorkflowExecutionResponse = signal_with_start;
    execute_multi_operation: ExecuteMultiOperationRequest -> ExecuteMultiOperationResponse = update_with_start;
    get_workflow_execution_history: GetWorkflowExecutionHistoryRequest -> GetWorkflowExecutionHistoryResponse = workflow_history wait;
    get_workflow_execution_history_reverse: GetWorkflowExecutionHistoryReverseRequest -> GetWorkflowExecutionHistoryReverseResponse = workflow_history_reverse;
    poll_workflow_task_queue: PollWorkflowTaskQueueRequest -> PollWorkflowTaskQueueResponse = poll_workflow_task wait;
    respond_workflow_task_completed: RespondWorkflowTaskCompletedRequest -> RespondWorkflowTaskCompletedResponse = complete_workflow_task;
    respond_workflow_task_failed: RespondWorkflowTaskFailedRequest -> RespondWorkflowTaskFailedResponse = fail_workflow_task;
    poll_activity_task_queue: PollActivityTaskQueueRequest -> PollActivityTaskQueueResponse = poll_activity_task wait;
    respond_activity_task_completed: RespondActivityTaskCompletedRequest -> RespondActivityTaskCompletedResponse = complete_activity;
    respond_activity_task_completed_by_id: RespondActivityTaskCompletedByIdRequest -> RespondActivityTaskCompletedByIdResponse = complete_activity_by_id;
    respond_activity_task_failed: RespondActivityTaskFailedRequest -> RespondActivityTaskFailedResponse = fail_activity;
    respond_activity_task_failed_by_id: RespondActivityTaskFailedByIdRequest -> RespondActivityTaskFailedByIdResponse = fail_activity_by_id;
    respond_activity_task_canceled: RespondActivityTaskCanceledRequest -> RespondActivityTaskCanceledResponse = cancel_activity;
    respond_activity_task_canceled_by_id: RespondActivityTaskCanceledByIdRequest -> RespondActivityTaskCanceledByIdResponse = cancel_activity_by_id;
    record_activity_task_heartbeat: RecordActivityTaskHeartbeatRequest -> RecordActivityTaskHeartbeatResponse = heartbeat_activity;
    record_activity_task_heartbeat_by_id: RecordActivityTaskHeartbeatByIdRequest -> RecordActivityTaskHeartbeatByIdResponse = heartbeat_activity_by_id;
    pause_activity: PauseActivityRequest -> PauseActivityResponse = pause_activity;
    unpause_activity: UnpauseActivityRequest -> UnpauseActivityResponse = unpause_activity;
    reset_activity: ResetActivityRequest -> ResetActivityResponse = reset_activity;
    signal_workflow_execution: SignalWorkflowExecutionRequest -> SignalWorkflowExecutionResponse = signal_workflow;
    request_cancel_workflow_execution: RequestCancelWorkflowExecutionRequest -> RequestCancelWorkflowExecutionResponse = cancel_workflow;
    terminate_workflow_execution: TerminateWorkflowExecutionRequest -> TerminateWorkflowExecutionResponse = terminate_workflow;
    delete_workflow_execution: DeleteWorkflowExecutionRequest -> DeleteWorkflowExecutionResponse = delete_workflow;
    reset_workflow_execution: ResetWorkflowExecutionRequest -> ResetWorkflowExecutionResponse = reset_workflow;
    describe_workflow_execution: DescribeWorkflowExecutionRequest -> DescribeWorkflowExecutionResponse = describe_workflow;
    query_workflow: QueryWorkflowRequest -> QueryWorkflowResponse = query_workflow wait;
    respond_query_task_completed: RespondQueryTaskCompletedRequest -> RespondQueryTaskCompletedResponse = answer_query now;
    update_workflow_execution: UpdateWorkflowExecutionRequest -> UpdateWorkflowExecutionResponse = update_workflow;
    poll_workflow_execution_update: PollWorkflowExecutionUpdateRequest -> PollWorkflowExecutionUpdateResponse = poll_update;
    count_workflow_executions: CountWorkflowExecutionsRequest -> CountWorkflowExecutionsResponse = count_workflows;
    create_schedule: CreateScheduleRequest -> CreateScheduleResponse = create_schedule;
    describe_schedule: DescribeScheduleRequest -> DescribeScheduleResponse = describe_schedule;
    update_schedule: UpdateScheduleRequest -> UpdateScheduleResponse = update_schedule;
    patch_schedule: PatchScheduleRequest -> PatchScheduleResponse = patch_schedule;
    delete_schedule: DeleteScheduleRequest -> DeleteScheduleResponse = delete_schedule;
    list_schedules: ListSchedulesRequest -> ListSchedulesResponse = list_schedules;
    count_schedules: CountSchedulesRequest -> CountSchedulesResponse = count_schedules;
    list_schedule_matching_times: ListScheduleMatchingTimesRequest -> ListScheduleMatchingTimesResponse = schedule_times;
    start_batch_operation: StartBatchOperationRequest -> StartBatchOperationResponse = start_batch;
    stop_batch_operation: StopBatchOperationRequest -> StopBatchOperationResponse = stop_batch;
    describe_batch_operation: DescribeBatchOperationRequest -> DescribeBatchOperationResponse = describe_batch now;
    list_batch_operations: ListBatchOperationsRequest -> ListBatchOperationsResponse = list_batches now;
    reset_sticky_task_queue: ResetStickyTaskQueueRequest -> ResetStickyTaskQueueResponse = reset_sticky;
    poll_nexus_task_queue: PollNexusTaskQueueRequest -> PollNexusTaskQueueResponse = poll_nexus_task wait;
    shutdown_worker: ShutdownWorkerRequest -> ShutdownWorkerResponse = shutdown_worker now;
    describe_task_queue: DescribeTaskQueueRequest -> DescribeTaskQueueResponse = describe_task_queue now;
}
