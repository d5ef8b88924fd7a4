//! Refusals as gRPC statuses, with the details by which clients tell them apart.

use std::time::Duration;

use atoll_workflow_core::Refusal;
use prost::Message as _;
use prost_wkt_types::Any;
use temporalio_protos::temporal::api::errordetails::v1 as details;
use temporalio_protos::temporal::api::failure::v1::MultiOperationExecutionAborted;
use tonic::{Code, Request, Response, Status};

/// `google.rpc.Status`, which travels beside the status proper.
#[derive(Clone, PartialEq, ::prost::Message)]
struct RpcStatus {
    #[prost(int32, tag = "1")]
    code: i32,
    #[prost(string, tag = "2")]
    message: String,
    #[prost(message, repeated, tag = "3")]
    details: Vec<Any>,
}

pub(crate) fn answer<T>(result: Result<T, Refusal>) -> Result<Response<T>, Status> {
    result.map(Response::new).map_err(|refusal| status(&refusal))
}

fn status(refusal: &Refusal) -> Status {
    let code = code(refusal);
    let message = told(refusal);
    let details: Vec<Any> = detail(refusal).into_iter().collect();
    if details.is_empty() {
        return Status::new(code, message);
    }
    let body = RpcStatus {
        code: code.into(),
        message: message.clone(),
        details,
    };
    Status::with_details(code, message, body.encode_to_vec().into())
}

/// In the words that Temporal's clients know, with what to do about it behind them.
fn told(refusal: &Refusal) -> String {
    match refusal.hint() {
        Some(hint) => format!("{refusal} ({hint})"),
        None => refusal.to_string(),
    }
}

fn code(refusal: &Refusal) -> Code {
    match refusal {
        Refusal::NotFound(_) | Refusal::NamespaceNotFound(_) => Code::NotFound,
        Refusal::NamespaceExists(_)
        | Refusal::AlreadyStarted { .. }
        | Refusal::AlreadyExists(_)
        | Refusal::CancelAlreadyRequested => Code::AlreadyExists,
        Refusal::InvalidArgument(_) | Refusal::QueryFailed { .. } => Code::InvalidArgument,
        Refusal::FailedPrecondition(_) | Refusal::NotReady(_) | Refusal::NamespaceDeleting(_) => {
            Code::FailedPrecondition
        }
        Refusal::ResourceExhausted(_) => Code::ResourceExhausted,
        Refusal::PermissionDenied(_) => Code::PermissionDenied,
        Refusal::DeadlineExceeded(_) => Code::DeadlineExceeded,
        Refusal::Aborted(_) => Code::Aborted,
        Refusal::Unavailable(_) | Refusal::PagesLost => Code::Unavailable,
        Refusal::Unimplemented(_) => Code::Unimplemented,
        Refusal::MultiOperation { start, update } => start
            .as_deref()
            .or(update.as_deref())
            .map_or(Code::Internal, code),
        Refusal::Internal(_) => Code::Internal,
    }
}

fn detail(refusal: &Refusal) -> Option<Any> {
    Some(match refusal {
        Refusal::NotFound(_) => pack("NotFoundFailure", &details::NotFoundFailure::default()),
        Refusal::NamespaceNotFound(namespace) => pack(
            "NamespaceNotFoundFailure",
            &details::NamespaceNotFoundFailure {
                namespace: namespace.clone(),
            },
        ),
        Refusal::NamespaceExists(_) => pack(
            "NamespaceAlreadyExistsFailure",
            &details::NamespaceAlreadyExistsFailure::default(),
        ),
        Refusal::AlreadyStarted {
            request_id,
            run_id,
            first_run_id,
            ..
        } => pack(
            "WorkflowExecutionAlreadyStartedFailure",
            &details::WorkflowExecutionAlreadyStartedFailure {
                start_request_id: request_id.clone(),
                run_id: run_id.clone(),
                first_execution_run_id: first_run_id.clone(),
            },
        ),
        Refusal::CancelAlreadyRequested => pack(
            "CancellationAlreadyRequestedFailure",
            &details::CancellationAlreadyRequestedFailure::default(),
        ),
        Refusal::QueryFailed { failure, .. } => pack(
            "QueryFailedFailure",
            &details::QueryFailedFailure {
                failure: failure.as_deref().cloned(),
            },
        ),
        Refusal::NotReady(_) => pack(
            "WorkflowNotReadyFailure",
            &details::WorkflowNotReadyFailure::default(),
        ),
        Refusal::ResourceExhausted(_) => pack(
            "ResourceExhaustedFailure",
            &details::ResourceExhaustedFailure {
                cause: temporalio_protos::temporal::api::enums::v1::ResourceExhaustedCause::ConcurrentLimit
                    .into(),
                ..Default::default()
            },
        ),
        Refusal::PagesLost => pack(
            "WorkflowTaskCompletionBufferLostFailure",
            &details::WorkflowTaskCompletionBufferLostFailure::default(),
        ),
        Refusal::PermissionDenied(reason) => pack(
            "PermissionDeniedFailure",
            &details::PermissionDeniedFailure {
                reason: reason.clone(),
            },
        ),
        Refusal::MultiOperation { start, update } => pack(
            "MultiOperationExecutionFailure",
            &details::MultiOperationExecutionFailure {
                statuses: vec![operation(start.as_deref()), operation(update.as_deref())],
            },
        ),
        _ => return None,
    })
}

/// How one of several operations ended, if it did not succeed: refused, or given up because another one was.
fn operation(refusal: Option<&Refusal>) -> details::multi_operation_execution_failure::OperationStatus {
    let aborted = || Any {
        type_url: "type.googleapis.com/temporal.api.failure.v1.MultiOperationExecutionAborted".to_owned(),
        value: MultiOperationExecutionAborted::default().encode_to_vec(),
    };
    match refusal {
        Some(refusal) => details::multi_operation_execution_failure::OperationStatus {
            code: code(refusal).into(),
            message: told(refusal),
            details: detail(refusal).into_iter().collect(),
        },
        None => details::multi_operation_execution_failure::OperationStatus {
            code: Code::Aborted.into(),
            message: "Operation was aborted.".to_owned(),
            details: vec![aborted()],
        },
    }
}

fn pack(name: &str, message: &impl prost::Message) -> Any {
    Any {
        type_url: format!("type.googleapis.com/temporal.api.errordetails.v1.{name}"),
        value: message.encode_to_vec(),
    }
}

/// How long the caller is going to wait, if it said so.
pub(crate) fn patience<T>(request: &Request<T>) -> Option<Duration> {
    let text = request.metadata().get("grpc-timeout")?.to_str().ok()?;
    let unit = text.chars().last()?;
    let count: u64 = text.strip_suffix(unit)?.parse().ok()?;
    Some(match unit {
        'H' => Duration::from_secs(count.saturating_mul(3600)),
        'M' => Duration::from_secs(count.saturating_mul(60)),
        'S' => Duration::from_secs(count),
        'm' => Duration::from_millis(count),
        'u' => Duration::from_micros(count),
        'n' => Duration::from_nanos(count),
        _ => return None,
    })
}
