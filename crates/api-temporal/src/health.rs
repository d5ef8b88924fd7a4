//! Health, as some SDKs ask for it before they connect.

use tonic::{Request, Response, Status};

use crate::generated::health::health_check_response::ServingStatus;
use crate::generated::health::health_server::Health;
use crate::generated::health::{HealthCheckRequest, HealthCheckResponse};

const SERVICES: [&str; 4] = [
    "",
    "temporal.api.workflowservice.v1.WorkflowService",
    "temporal.api.operatorservice.v1.OperatorService",
    "grpc.health.v1.Health",
];

#[derive(Debug)]
pub(crate) struct Service;

#[tonic::async_trait]
impl Health for Service {
    async fn check(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<HealthCheckResponse>, Status> {
        if !SERVICES.contains(&request.get_ref().service.as_str()) {
            return Err(Status::not_found("unknown service"));
        }
        Ok(Response::new(HealthCheckResponse {
            status: ServingStatus::Serving.into(),
        }))
    }
}
