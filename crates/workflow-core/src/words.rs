//! The messages that this crate speaks, under short names.

pub(crate) use temporalio_protos::temporal::api::command::v1 as command;
pub(crate) use temporalio_protos::temporal::api::common::v1 as common;
pub(crate) use temporalio_protos::temporal::api::deployment::v1 as deployment;
pub(crate) use temporalio_protos::temporal::api::enums::v1 as enums;
pub(crate) use temporalio_protos::temporal::api::failure::v1 as failure;
pub(crate) use temporalio_protos::temporal::api::history::v1 as history;
pub(crate) use temporalio_protos::temporal::api::protocol::v1 as protocol;
pub(crate) use temporalio_protos::temporal::api::sdk::v1 as sdk;
pub(crate) use temporalio_protos::temporal::api::taskqueue::v1 as taskqueue;
pub(crate) use temporalio_protos::temporal::api::update::v1 as update;
pub(crate) use temporalio_protos::temporal::api::workflow::v1 as workflow;

pub(crate) use history::HistoryEvent;
pub(crate) use history::history_event::Attributes as Event;

/// A failure that the server itself reports.
pub(crate) fn server_failure(
    message: impl Into<String>,
    info: failure::failure::FailureInfo,
) -> failure::Failure {
    failure::Failure {
        message: message.into(),
        source: "Server".to_owned(),
        failure_info: Some(info),
        ..Default::default()
    }
}

pub(crate) fn execution(workflow_id: &str, run_id: &str) -> common::WorkflowExecution {
    common::WorkflowExecution {
        workflow_id: workflow_id.to_owned(),
        run_id: run_id.to_owned(),
    }
}

pub(crate) fn queue(name: &str) -> taskqueue::TaskQueue {
    taskqueue::TaskQueue {
        name: name.to_owned(),
        kind: enums::TaskQueueKind::Normal.into(),
        normal_name: String::new(),
    }
}
