//! Schedules as they are listed and counted, by a query.
//!
//! What must hold: what a list looks at is bounded, and others get their turn meanwhile.

use std::sync::Arc;

use atoll_store::WorkflowFilter;
use atoll_workflow_core::{Limits, Nanos, Refusal, Scheduler};
use prost::Message as _;
use temporalio_protos::temporal::api::schedule::v1 as proto;
use temporalio_protos::temporal::api::workflowservice::v1 as service;

use crate::Engine;

const LISTED: usize = 5;
/// How many are looked at before others get their turn.
const AT_ONCE: usize = 32;
/// What those may hold that is looked into, so many bytes: some milliseconds.
const EFFORT: usize = 256 * 1024;
/// What one page of a list may hold.
const PAGE_BYTES: usize = 4 * 1024 * 1024;

impl Engine {
    /// The first ones behind an id that fit a query, in their order.
    async fn matching_schedules(
        &self,
        namespace: &str,
        query: &str,
        after: &str,
        limit: usize,
    ) -> Result<Vec<Arc<Scheduler>>, Refusal> {
        let _inside = self.inner.namespaces.enter(namespace)?;
        let filter = self
            .parse_query(namespace, &query.replace("ScheduleId", "WorkflowId"))?
            .filter;
        let all: Vec<_> = self
            .inner
            .schedules
            .lock()
            .behind(namespace, after)
            .cloned()
            .collect();
        let all_fit = matches!(&filter, WorkflowFilter::All(parts) if parts.is_empty());
        let limits = &self.inner.options.limits;
        let (mut matching, mut effort) = (Vec::new(), 0);
        for scheduler in all {
            if matching.len() >= limit {
                break;
            }
            if scheduler.id == after {
                continue;
            }
            if all_fit {
                matching.push(scheduler);
                continue;
            }
            let attributes = scheduler.search_attributes.as_ref();
            let bytes = attributes.map_or(0, prost::Message::encoded_len);
            effort += EFFORT / AT_ONCE + bytes * (1 + query.len() / 64);
            if crate::filter::fits(&filter, &searched(limits, &scheduler)) {
                matching.push(scheduler);
            }
            if effort >= EFFORT {
                effort = 0;
                tokio::task::yield_now().await;
            }
        }
        Ok(matching)
    }

    pub async fn list_schedules(
        &self,
        request: service::ListSchedulesRequest,
    ) -> Result<service::ListSchedulesResponse, Refusal> {
        let now = self.now();
        let after = String::from_utf8(request.next_page_token)
            .map_err(|_| Refusal::InvalidArgument("Invalid NextPageToken.".to_owned()))?;
        let limit = usize::try_from(request.maximum_page_size)
            .ok()
            .filter(|size| *size > 0)
            .unwrap_or(100)
            .min(1_000);
        let mut page = self
            .matching_schedules(&request.namespace, &request.query, &after, limit + 1)
            .await?;
        let mut has_more = page.len() > limit;
        page.truncate(limit);
        let (mut schedules, mut bytes) = (Vec::new(), 0);
        for (count, scheduler) in page.iter().enumerate() {
            let entry = entry(scheduler, now);
            bytes += entry.encoded_len();
            if bytes > PAGE_BYTES && count > 0 {
                has_more = true;
                break;
            }
            schedules.push(entry);
            if count % AT_ONCE == AT_ONCE - 1 {
                tokio::task::yield_now().await;
            }
        }
        let token = match schedules.last() {
            Some(last) if has_more => last.schedule_id.clone().into_bytes(),
            _ => Vec::new(),
        };
        Ok(service::ListSchedulesResponse {
            schedules,
            next_page_token: token,
        })
    }

    pub async fn count_schedules(
        &self,
        request: service::CountSchedulesRequest,
    ) -> Result<service::CountSchedulesResponse, Refusal> {
        let matching = self
            .matching_schedules(&request.namespace, &request.query, "", usize::MAX)
            .await?;
        Ok(service::CountSchedulesResponse {
            count: i64::try_from(matching.len()).unwrap_or(i64::MAX),
            groups: Vec::new(),
        })
    }
}

/// What a schedule is searched by.
fn searched(limits: &Limits, scheduler: &Scheduler) -> serde_json::Map<String, serde_json::Value> {
    let object = crate::visibility::search_object(limits, scheduler.search_attributes.as_ref());
    let mut object: serde_json::Map<_, _> = serde_json::from_str(&object).unwrap_or_default();
    object.insert("TemporalSchedulePaused".to_owned(), scheduler.is_paused().into());
    object.insert("WorkflowId".to_owned(), scheduler.id.clone().into());
    object
}

fn entry(scheduler: &Scheduler, now: Nanos) -> proto::ScheduleListEntry {
    let (schedule, info) = scheduler.glance(now, LISTED);
    let state = schedule.state.unwrap_or_default();
    let workflow_type = scheduler
        .new_workflow()
        .and_then(|workflow| workflow.workflow_type.clone())
        .unwrap_or_default();
    let recent = info.recent_actions.len().saturating_sub(LISTED);
    proto::ScheduleListEntry {
        schedule_id: scheduler.id.clone(),
        memo: Some(scheduler.memo.clone().unwrap_or_default()),
        search_attributes: Some(scheduler.search_attributes.clone().unwrap_or_default()),
        info: Some(proto::ScheduleListInfo {
            spec: schedule.spec,
            workflow_type: Some(workflow_type),
            notes: state.notes,
            paused: state.paused,
            recent_actions: info.recent_actions[recent..].to_vec(),
            future_action_times: info.future_action_times,
            ..Default::default()
        }),
    }
}
