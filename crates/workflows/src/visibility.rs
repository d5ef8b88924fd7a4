//! Finding workflows: what is searched by, lists and counts.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;

use atoll_store::{WorkflowPage, WorkflowRunRow};
use atoll_workflow_core::{Limits, Nanos, Refusal, State, duration, stamp};
use prost::Message as _;
use serde_json::{Map, Value};
use temporalio_protos::temporal::api::common::v1::{
    Payload, SearchAttributes, WorkflowExecution, WorkflowType,
};
use temporalio_protos::temporal::api::enums::v1::{
    IndexedValueType as Type, WorkflowExecutionStatus as Status,
};
use temporalio_protos::temporal::api::workflow::v1::WorkflowExecutionInfo;
use temporalio_protos::temporal::api::workflowservice::v1 as service;
use temporalio_protos::temporal::api::workflowservice::v1::count_workflow_executions_response::AggregationGroup;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::filter::{self, Query};
use crate::{Engine, unavailable};

const PAGE: usize = 1_000;

/// How many search among runs at once: fewer than there are threads that read the store.
const SEARCHING: usize = 2;

/// Places for those who search among runs.
#[derive(Debug)]
pub(crate) struct Searching {
    places: Arc<Semaphore>,
    turns: Mutex<HashMap<String, Arc<Semaphore>>>,
}

impl Default for Searching {
    fn default() -> Self {
        Self {
            places: Arc::new(Semaphore::new(SEARCHING)),
            turns: Mutex::default(),
        }
    }
}

impl Searching {
    /// One project's place.
    fn turn(&self, project: &str) -> Arc<Semaphore> {
        let mut turns = self.turns.lock();
        if !turns.contains_key(project) {
            // Whoever searches, or waits to, holds it too.
            turns.retain(|_, turn| Arc::strong_count(turn) > 1);
        }
        let turn = turns.entry(project.to_owned());
        Arc::clone(turn.or_insert_with(|| Arc::new(Semaphore::new(1))))
    }
}

/// The right to keep a thread busy.
struct Place {
    _turn: OwnedSemaphorePermit,
    _place: OwnedSemaphorePermit,
}

impl Engine {
    pub(crate) fn parse_query(&self, namespace: &str, text: &str) -> Result<Query, Refusal> {
        filter::parse(text, &|name| self.inner.namespaces.attribute(namespace, name))
    }

    pub(crate) async fn find(
        &self,
        namespace: &str,
        query: Query,
        offset: usize,
        limit: usize,
    ) -> Result<(Vec<WorkflowRunRow>, bool), Refusal> {
        let page = WorkflowPage {
            offset,
            limit,
            order: query.order,
        };
        let place = self.place_to_search(namespace).await?;
        self.inner
            .store
            .find_workflow_runs(namespace.to_owned(), query.filter, page, Box::new(place))
            .await
            .map_err(searched)
    }

    /// Of the few threads that read the store, some are always left to those who go on with workflows; and of the places
    /// for those who search, one is all that a project has at a time. Whoever does the work holds the place, until the end
    /// of it, even if nobody waits for that any more.
    async fn place_to_search(&self, namespace: &str) -> Result<Place, Refusal> {
        let closed = |_| Refusal::Unavailable("the engine is closed".to_owned());
        let project = self.namespace(namespace, "")?.project;
        let turn = self.inner.searching.turn(&project);
        let turn = turn.acquire_owned().await.map_err(closed)?;
        let place = Arc::clone(&self.inner.searching.places);
        let place = place.acquire_owned().await.map_err(closed)?;
        Ok(Place {
            _turn: turn,
            _place: place,
        })
    }

    /// The same attributes, each with its type; refused if they are too large, or not known.
    pub(crate) fn typed(
        &self,
        namespace: &str,
        attributes: Option<SearchAttributes>,
    ) -> Result<Option<SearchAttributes>, Refusal> {
        self.inner
            .options
            .limits
            .check_search_attributes(attributes.as_ref())?;
        self.inner.namespaces.typed(namespace, attributes)
    }

    /// A page of workflows, and where the next one begins.
    pub async fn list_workflows(
        &self,
        namespace: &str,
        query: &str,
        page_size: i32,
        token: &[u8],
    ) -> Result<(Vec<WorkflowExecutionInfo>, Vec<u8>), Refusal> {
        let _inside = self.inner.namespaces.enter(namespace)?;
        let query = self.parse_query(namespace, query)?;
        let limit = usize::try_from(page_size)
            .ok()
            .filter(|size| (1..=PAGE).contains(size))
            .unwrap_or(PAGE);
        let offset = match token {
            [] => 0,
            token => std::str::from_utf8(token)
                .ok()
                .and_then(|text| text.parse().ok())
                .ok_or_else(|| Refusal::InvalidArgument("Invalid NextPageToken.".to_owned()))?,
        };
        let (rows, has_more) = self.find(namespace, query, offset, limit).await?;
        let token = if has_more {
            offset.saturating_add(rows.len()).to_string().into_bytes()
        } else {
            Vec::new()
        };
        Ok((rows.into_iter().map(info).collect(), token))
    }

    pub async fn count_workflows(
        &self,
        request: service::CountWorkflowExecutionsRequest,
    ) -> Result<service::CountWorkflowExecutionsResponse, Refusal> {
        let _inside = self.inner.namespaces.enter(&request.namespace)?;
        let query = self.parse_query(&request.namespace, &request.query)?;
        let place = self.place_to_search(&request.namespace).await?;
        let counts = self
            .inner
            .store
            .count_workflow_runs(request.namespace, query.filter, Box::new(place))
            .await
            .map_err(searched)?;
        let count = counts.iter().map(|(_, count)| count).sum();
        let groups = if query.by_status {
            counts
                .into_iter()
                .map(|(status, count)| AggregationGroup {
                    group_values: vec![status_payload(status)],
                    count,
                })
                .collect()
        } else {
            Vec::new()
        };
        Ok(service::CountWorkflowExecutionsResponse { count, groups })
    }
}

fn searched(error: atoll_store::Error) -> Refusal {
    match error {
        atoll_store::Error::TooMuchWork { .. } => Refusal::InvalidArgument(format!(
            "invalid query: {error}; narrow it, by WorkflowId or StartTime for example, or use fewer conditions"
        )),
        error => unavailable(error),
    }
}

fn status_payload(status: i32) -> Payload {
    let name = match Status::try_from(status).unwrap_or_default() {
        Status::Running => "Running",
        Status::Completed => "Completed",
        Status::Failed => "Failed",
        Status::Canceled => "Canceled",
        Status::Terminated => "Terminated",
        Status::ContinuedAsNew => "ContinuedAsNew",
        Status::TimedOut => "TimedOut",
        Status::Paused => "Paused",
        Status::Unspecified => "Unspecified",
    };
    Payload {
        metadata: [
            ("encoding".to_owned(), b"json/plain".to_vec()),
            ("type".to_owned(), b"Keyword".to_vec()),
        ]
        .into(),
        data: format!("{name:?}").into_bytes(),
        ..Default::default()
    }
}

fn info(row: WorkflowRunRow) -> WorkflowExecutionInfo {
    let state = State::decode(row.state.as_slice()).unwrap_or_default();
    let execution = |(workflow_id, run_id): (String, String)| WorkflowExecution { workflow_id, run_id };
    let closed = row.closed_at.is_some();
    WorkflowExecutionInfo {
        execution: Some(WorkflowExecution {
            workflow_id: row.workflow_id,
            run_id: row.run_id,
        }),
        r#type: Some(WorkflowType {
            name: row.workflow_type,
        }),
        start_time: Some(stamp(row.started_at)),
        close_time: row.closed_at.map(stamp),
        status: row.status,
        // Known when a run has ended, as people who list are used to.
        history_length: if closed { row.history_length } else { 0 },
        parent_execution: row.parent.map(execution),
        execution_time: Some(stamp(row.execution_at)),
        memo: Some(state.memo.unwrap_or_default()),
        search_attributes: Some(state.search_attributes.unwrap_or_default()),
        task_queue: row.task_queue,
        state_transition_count: if closed { row.transitions } else { 0 },
        history_size_bytes: if closed { row.history_bytes } else { 0 },
        execution_duration: row.closed_at.map(|at| duration((at - row.execution_at).max(0))),
        root_execution: row.root.map(execution),
        ..Default::default()
    }
}

/// What a run is searched by, as the JSON object that the store looks into. Times are numbers, so that they compare. Values
/// that are too large, which an earlier version has let in, are left out.
pub(crate) fn search_object(limits: &Limits, attributes: Option<&SearchAttributes>) -> String {
    let Some(attributes) = attributes.filter(|attributes| !attributes.indexed_fields.is_empty()) else {
        return "{}".to_owned();
    };
    let mut object = Map::new();
    for (name, payload) in &attributes.indexed_fields {
        if !limits.may_search(name, payload) {
            continue;
        }
        let Ok(value) = serde_json::from_slice::<Value>(&payload.data) else {
            continue;
        };
        let kind = payload.metadata.get("type").map_or(&[][..], Vec::as_slice);
        let value = match (kind, &value) {
            (b"Datetime", Value::String(text)) => datetime(text).map_or(value.clone(), Value::from),
            (b"KeywordList", Value::String(_)) => Value::Array(vec![value.clone()]),
            (b"KeywordList", _) => value,
            (_, Value::Array(list)) if list.len() == 1 => list[0].clone(),
            _ => value,
        };
        object.insert(name.clone(), value);
    }
    Value::Object(object).to_string()
}

/// A value has to be of the type that its attribute has.
pub(crate) fn check_value(name: &str, kind: Type, payload: &Payload) -> Result<(), Refusal> {
    let Ok(value) = serde_json::from_slice::<Value>(&payload.data) else {
        // Not JSON: nothing that can be searched, as when an attribute is taken away.
        return Ok(());
    };
    let fits = |value: &Value| match kind {
        Type::Int => value.is_i64() || value.is_u64(),
        Type::Double => value.is_number(),
        Type::Bool => value.is_boolean(),
        Type::Datetime => value.as_str().is_some_and(|text| datetime(text).is_some()),
        Type::Keyword | Type::Text => value.is_string(),
        Type::KeywordList => value.is_string() || value.is_array(),
        Type::Unspecified => false,
    };
    let good = match &value {
        Value::Null => true,
        Value::Array(list) => list.iter().all(|value| fits(value) || value.is_null()),
        value => fits(value),
    };
    if good {
        return Ok(());
    }
    Err(Refusal::InvalidArgument(format!(
        "invalid value for search attribute {name} of type {}: {value}",
        crate::namespaces::type_name(kind)
    )))
}

/// RFC 3339, as nanoseconds since 1970.
pub(crate) fn datetime(text: &str) -> Option<Nanos> {
    atoll_workflow_core::parse_time(text)
}
