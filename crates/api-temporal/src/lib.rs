pub mod wf { tonic::include_proto!("temporal.api.workflowservice.v1"); }
