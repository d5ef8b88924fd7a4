//! Reading histories: page by page, as they grow, from either end.

use std::time::Duration;

use atoll_workflow_core::Refusal;
use prost::Message as _;
use temporalio_protos::temporal::api::enums::v1::HistoryEventFilterType;
use temporalio_protos::temporal::api::history::v1::{History, HistoryEvent};
use temporalio_protos::temporal::api::workflowservice::v1 as service;

use crate::Engine;
use crate::cells::Key;
use crate::views::WorkflowName;

const PAGE: usize = 1_000;
const PAGE_BYTES: usize = 3 * 1024 * 1024;

/// Where a reader is. Opaque to it. It names the run, so that a reader stays with it when the next one begins.
#[derive(Clone, PartialEq, Eq, ::prost::Message)]
pub(crate) struct HistoryToken {
    #[prost(string, tag = "1")]
    pub(crate) run_id: String,
    #[prost(int64, tag = "2")]
    pub(crate) next_id: i64,
    /// The reader is a worker that has the pending task, which may not be in the history.
    #[prost(bool, tag = "3")]
    pub(crate) with_virtual: bool,
}

/// A look at a history.
struct Look {
    run_id: String,
    running: bool,
    events: Vec<HistoryEvent>,
    /// There are more behind these.
    more: bool,
}

impl Engine {
    pub async fn workflow_history(
        &self,
        request: service::GetWorkflowExecutionHistoryRequest,
        wait: Option<Duration>,
    ) -> Result<service::GetWorkflowExecutionHistoryResponse, Refusal> {
        let inside = self.inner.namespaces.enter(&request.namespace)?;
        let execution = request.execution.unwrap_or_default();
        let mut token = read_token(&request.next_page_token)?.unwrap_or(HistoryToken {
            run_id: execution.run_id,
            next_id: 1,
            with_virtual: false,
        });
        let first_look = request.next_page_token.is_empty();
        let key = Key::new(&request.namespace, &execution.workflow_id);
        let close_only = request.history_event_filter_type == i32::from(HistoryEventFilterType::CloseEvent);
        let page = usize::try_from(request.maximum_page_size)
            .ok()
            .filter(|size| (1..=PAGE).contains(size))
            .unwrap_or(PAGE);
        // Who waits for more does not keep the workflow in memory.
        let signal = self.inner.cells.get(&key).changes();
        let mut changes = signal.subscribe();
        let deadline = tokio::time::Instant::now() + self.hold(wait);
        loop {
            changes.borrow_and_update();
            let look = self.look(&key, &token, page, close_only).await?;
            token.run_id.clone_from(&look.run_id);
            let nothing_new = if close_only {
                look.running
            } else {
                look.running && look.events.is_empty() && !first_look
            };
            if request.wait_new_event && nothing_new {
                let waited = tokio::select! {
                    waited = tokio::time::timeout_at(deadline, changes.changed()) => waited,
                    () = inside.ending() => return Err(Refusal::NamespaceDeleting(request.namespace)),
                };
                if waited.is_ok() {
                    continue;
                }
                // Come back with the same token.
                return Ok(response(Vec::new(), Some(&token)));
            }
            if close_only {
                let events = if look.running { Vec::new() } else { look.events };
                return Ok(response(events, None));
            }
            token.next_id = look
                .events
                .last()
                .map_or(token.next_id, |event| event.event_id + 1);
            let goes_on = look.more || (request.wait_new_event && look.running);
            return Ok(response(look.events, goes_on.then_some(&token)));
        }
    }

    /// How long a reader is kept waiting: it gets its answer before it loses its patience.
    fn hold(&self, wait: Option<Duration>) -> Duration {
        let usual = self.inner.options.long_poll;
        wait.map_or(usual, |wait| {
            usual.min(wait.saturating_sub(Duration::from_secs(1)).max(wait / 2))
        })
    }

    async fn look(
        &self,
        key: &Key,
        token: &HistoryToken,
        page: usize,
        close_only: bool,
    ) -> Result<Look, Refusal> {
        self.see(key, &token.run_id, |slot| {
            let run = &slot.run;
            let from = if close_only {
                run.last_event_id()
            } else {
                token.next_id.max(1)
            };
            let from = usize::try_from(from - 1).unwrap_or(0).min(run.events.len());
            let mut bytes = 0;
            let mut events: Vec<HistoryEvent> = Vec::new();
            let mut more = false;
            for event in &run.events[from..] {
                bytes += event.encoded_len();
                if events.len() >= page || (bytes > PAGE_BYTES && !events.is_empty()) {
                    more = true;
                    break;
                }
                events.push(event.clone());
            }
            if token.with_virtual && !more {
                events.extend(run.virtual_events());
            }
            Ok(Look {
                run_id: run.state.run_id.clone(),
                running: run.is_running(),
                events,
                more,
            })
        })
        .await
    }

    /// Events from this id on, at most so many, and whether there are more.
    pub(crate) async fn events_from(
        &self,
        name: &WorkflowName,
        from: i64,
        limit: usize,
    ) -> Result<(Vec<HistoryEvent>, bool), Refusal> {
        let _inside = self.inner.namespaces.enter(&name.namespace)?;
        let token = HistoryToken {
            run_id: name.run.clone(),
            next_id: from,
            with_virtual: false,
        };
        let key = Key::new(&name.namespace, &name.id);
        let look = self.look(&key, &token, limit.clamp(1, PAGE), false).await?;
        Ok((look.events, look.more))
    }

    pub async fn workflow_history_reverse(
        &self,
        request: service::GetWorkflowExecutionHistoryReverseRequest,
    ) -> Result<service::GetWorkflowExecutionHistoryReverseResponse, Refusal> {
        let _inside = self.inner.namespaces.enter(&request.namespace)?;
        let execution = request.execution.unwrap_or_default();
        let key = Key::new(&request.namespace, &execution.workflow_id);
        let token = read_token(&request.next_page_token)?;
        let page = usize::try_from(request.maximum_page_size)
            .ok()
            .filter(|size| (1..=PAGE).contains(size))
            .unwrap_or(PAGE);
        let run_id = token
            .as_ref()
            .map_or(execution.run_id, |token| token.run_id.clone());
        self.see(&key, &run_id, |slot| {
            let run = &slot.run;
            let end = token.map_or(run.last_event_id(), |token| token.next_id);
            let end = usize::try_from(end).unwrap_or(0).min(run.events.len());
            let (mut bytes, mut events): (usize, Vec<HistoryEvent>) = (0, Vec::new());
            for event in run.events[..end].iter().rev().take(page) {
                bytes += event.encoded_len();
                if bytes > PAGE_BYTES && !events.is_empty() {
                    break;
                }
                events.push(event.clone());
            }
            let start = end - events.len();
            let token = (start > 0).then(|| HistoryToken {
                run_id: run.state.run_id.clone(),
                next_id: i64::try_from(start).unwrap_or(0),
                with_virtual: false,
            });
            Ok(service::GetWorkflowExecutionHistoryReverseResponse {
                history: Some(History { events }),
                next_page_token: token.map(|token| token.encode_to_vec()).unwrap_or_default(),
            })
        })
        .await
    }
}

fn read_token(bytes: &[u8]) -> Result<Option<HistoryToken>, Refusal> {
    if bytes.is_empty() {
        return Ok(None);
    }
    HistoryToken::decode(bytes)
        .map(Some)
        .map_err(|_| Refusal::InvalidArgument("Invalid NextPageToken.".to_owned()))
}

fn response(
    events: Vec<HistoryEvent>,
    token: Option<&HistoryToken>,
) -> service::GetWorkflowExecutionHistoryResponse {
    service::GetWorkflowExecutionHistoryResponse {
        history: Some(History { events }),
        next_page_token: token.map(prost::Message::encode_to_vec).unwrap_or_default(),
        ..Default::default()
    }
}
