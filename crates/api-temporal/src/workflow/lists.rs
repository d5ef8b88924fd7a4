//! The older lists, of open and of closed workflows, in the words of the list that took their place.

use atoll_workflow_core::{time_text, unstamp};
use temporalio_protos::temporal::api::enums::v1::WorkflowExecutionStatus as Status;
use temporalio_protos::temporal::api::filter::v1 as filter;
use temporalio_protos::temporal::api::workflowservice::v1 as wire;
use wire::list_closed_workflow_executions_request::Filters as Closed;
use wire::list_open_workflow_executions_request::Filters as Open;

pub(super) fn open(request: &wire::ListOpenWorkflowExecutionsRequest) -> String {
    let mut conditions = vec!["ExecutionStatus = 'Running'".to_owned()];
    conditions.extend(started(request.start_time_filter.as_ref()));
    match &request.filters {
        Some(Open::ExecutionFilter(wanted)) => conditions.extend(execution(wanted)),
        Some(Open::TypeFilter(wanted)) => conditions.push(equals("WorkflowType", &wanted.name)),
        None => {}
    }
    conditions.join(" AND ")
}

pub(super) fn closed(request: &wire::ListClosedWorkflowExecutionsRequest) -> String {
    let mut conditions = vec!["ExecutionStatus != 'Running'".to_owned()];
    conditions.extend(started(request.start_time_filter.as_ref()));
    match &request.filters {
        Some(Closed::ExecutionFilter(wanted)) => conditions.extend(execution(wanted)),
        Some(Closed::TypeFilter(wanted)) => conditions.push(equals("WorkflowType", &wanted.name)),
        Some(Closed::StatusFilter(wanted)) => {
            let status = Status::try_from(wanted.status).unwrap_or_default();
            let name = status
                .as_str_name()
                .trim_start_matches("WORKFLOW_EXECUTION_STATUS_");
            conditions.push(equals("ExecutionStatus", &camel(name)));
        }
        None => {}
    }
    conditions.join(" AND ")
}

fn started(times: Option<&filter::StartTimeFilter>) -> Vec<String> {
    let Some(times) = times else { return Vec::new() };
    let bound = |sign: &str, at: Option<&prost_wkt_types::Timestamp>| {
        at.map(|at| format!("StartTime {sign} '{}'", time_text(unstamp(Some(at)))))
    };
    [
        bound(">=", times.earliest_time.as_ref()),
        bound("<=", times.latest_time.as_ref()),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn execution(wanted: &filter::WorkflowExecutionFilter) -> Vec<String> {
    [("WorkflowId", &wanted.workflow_id), ("RunId", &wanted.run_id)]
        .into_iter()
        .filter(|(_, value)| !value.is_empty())
        .map(|(name, value)| equals(name, value))
        .collect()
}

fn equals(name: &str, value: &str) -> String {
    let quoted = value.replace('\\', "\\\\").replace('\'', "''");
    format!("{name} = '{quoted}'")
}

/// `TIMED_OUT` is called `TimedOut` where people search.
fn camel(name: &str) -> String {
    name.split('_')
        .map(|word| {
            let (first, rest) = word.split_at(word.len().min(1));
            format!("{first}{}", rest.to_ascii_lowercase())
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_says_what_it_means_and_nothing_else() {
        let request = wire::ListClosedWorkflowExecutionsRequest {
            filters: Some(Closed::StatusFilter(filter::StatusFilter {
                status: Status::TimedOut.into(),
            })),
            start_time_filter: Some(filter::StartTimeFilter {
                earliest_time: Some(prost_wkt_types::Timestamp::default()),
                latest_time: None,
            }),
            ..Default::default()
        };
        assert_eq!(
            closed(&request),
            "ExecutionStatus != 'Running' AND StartTime >= '1970-01-01T00:00:00Z' AND ExecutionStatus = 'TimedOut'"
        );
        let request = wire::ListOpenWorkflowExecutionsRequest {
            filters: Some(Open::ExecutionFilter(filter::WorkflowExecutionFilter {
                workflow_id: "it's \\ mine".to_owned(),
                run_id: String::new(),
            })),
            ..Default::default()
        };
        assert_eq!(
            open(&request),
            "ExecutionStatus = 'Running' AND WorkflowId = 'it''s \\\\ mine'"
        );
    }
}
