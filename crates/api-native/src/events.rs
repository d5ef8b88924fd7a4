//! The ledger as it grows, as server-sent events.
//!
//! What must hold: an event has the number of its fact as its id, so whoever comes back with the last one that was seen
//! misses nothing and gets nothing twice. A reader pays for what was read ahead for it, and for being there: all else that
//! it has not taken yet stands in the ledger. However fast the ledger grows, a reader causes few queries, each of a bounded size.

use std::collections::VecDeque;
use std::time::Duration;

use atoll_front::Permit;
use atoll_identity::Caller;
use atoll_sandboxes::FactView;
use atoll_types::{Code, Fault, SandboxId};
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use axum::response::sse::Event;
use futures_util::{Stream, stream};
use serde::Deserialize;
use tokio::sync::watch;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::error::{Answer, ErrorDetail, Failure};
use crate::exec::{event, sse};
use crate::extract::{Args, As, Paying};
use crate::ledger::FactItem;
use crate::{App, named};

/// How many facts are read at a time.
const PAGE: usize = 100;
/// What a reader takes by being there, and a fact beside its text.
const READER_BYTES: u64 = 16 * 1024;
const FACT_BYTES: u64 = 256;
/// How soon, at the earliest, a reader looks again: what happens meanwhile is read at once.
const PACE: Duration = Duration::from_millis(50);
/// More names are not needed to choose.
const MOST_KINDS: usize = 64;

pub(crate) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(project_events))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct EventsQuery {
    /// Begins behind the fact of this number; 0 begins at the first. Without it, and without the header `Last-Event-ID`,
    /// only what happens from now on is told.
    #[param(minimum = 0)]
    after: Option<i64>,
    /// Only of these kinds, with commas between them: `sandbox.ended`, or `sandbox.*` for all that begin so.
    kinds: Option<String>,
    /// Only of this sandbox: its id, or the name of one that lives.
    sandbox: Option<String>,
}

/// Tells what happens in the project, as it happens: one event for each fact of the ledger, until you hang up.
///
/// Each event has the fact's number as its `id`, its kind as its name, and the fact as data, as `GET /v1/facts` shows it. To
/// go on after a break, send the last id as `Last-Event-ID`, as browsers do, or as `after`.
#[utoipa::path(
    get, path = "/v1/events", tag = "ledger",
    security(("key" = ["ledger.read"])), params(EventsQuery),
    responses((status = 200, description = "The events.", body = FactItem, content_type = "text/event-stream"))
)]
pub(crate) async fn project_events(
    State(app): State<App>,
    As(caller): As,
    Args(query): Args<EventsQuery>,
    Paying(visit): Paying,
    headers: HeaderMap,
) -> Answer<Response> {
    let wanted = Wanted::new(query.kinds.as_deref())?;
    let last_seen = headers.get("last-event-id").map(|id| {
        let number = id.to_str().ok().and_then(|id| id.trim().parse::<i64>().ok());
        number.ok_or_else(|| {
            let message = "`Last-Event-ID` is not the id of an event of this server";
            Failure::new(Code::CursorInvalid, message)
        })
    });
    let after = match last_seen.transpose()?.or(query.after) {
        Some(after) if after < 0 => {
            return Err(Failure::new(Code::OutOfRange, "`after` must not be negative"));
        }
        Some(after) => after,
        None => *app.sandboxes.ledger_growth(&caller).borrow(),
    };
    let sandbox = match &query.sandbox {
        Some(text) => Some(named::sandbox(&app, &caller, text, Code::InvalidQuery).await?),
        None => None,
    };
    let mut permit = visit.permit()?;
    permit.grow(READER_BYTES)?;
    let reader = Reader {
        growth: app.sandboxes.ledger_growth(&caller),
        app,
        caller,
        sandbox,
        wanted,
        after,
        read: VecDeque::new(),
        permit,
    };
    Ok(sse(reader.events()))
}

/// Which kinds somebody wants to hear of.
#[derive(Debug)]
struct Wanted(Vec<String>);

impl Wanted {
    fn new(kinds: Option<&str>) -> Result<Self, Failure> {
        let kinds: Vec<String> = kinds
            .into_iter()
            .flat_map(|kinds| kinds.split(','))
            .map(|kind| kind.trim().to_owned())
            .filter(|kind| !kind.is_empty())
            .collect();
        if kinds.len() > MOST_KINDS {
            let message = format!("`kinds` has {} names, and may have {MOST_KINDS}", kinds.len());
            return Err(Failure::new(Code::OutOfRange, message));
        }
        Ok(Self(kinds))
    }

    fn includes(&self, kind: &str) -> bool {
        let matches = |wanted: &String| match wanted.strip_suffix('*') {
            Some(beginning) => kind.starts_with(beginning),
            None => kind == wanted,
        };
        self.0.is_empty() || self.0.iter().any(matches)
    }
}

struct Reader {
    growth: watch::Receiver<i64>,
    app: App,
    caller: Caller,
    sandbox: Option<SandboxId>,
    wanted: Wanted,
    /// Everything up to this number was read.
    after: i64,
    read: VecDeque<FactView>,
    /// For itself and what was read.
    permit: Permit,
}

impl Reader {
    fn events(self) -> impl Stream<Item = Event> + Send {
        stream::unfold(Some(self), |reader| async move {
            let mut reader = reader?;
            match reader.next().await? {
                Ok(fact) => {
                    let (id, kind) = (fact.seq.to_string(), fact.kind.clone());
                    let told = event(&kind, &FactItem::of(fact)).id(id);
                    Some((told, Some(reader)))
                }
                Err(failure) => Some((event("error", &failure), None)),
            }
        })
    }

    /// Pays for what it holds now.
    fn settle(&mut self) -> Result<(), Fault> {
        let facts = self.read.iter().map(|fact| fact.data.len() as u64 + FACT_BYTES);
        self.permit.set(READER_BYTES + facts.sum::<u64>())
    }

    /// The next fact that is wanted; `None` when the server stops.
    async fn next(&mut self) -> Option<Result<FactView, ErrorDetail>> {
        loop {
            if let Some(fact) = self.read.pop_front() {
                return Some(Ok(fact));
            }
            if let Err(fault) = self.settle() {
                return Some(Err(ErrorDetail::new(&fault, None)));
            }
            // Seen before the read, so that what comes in between is not missed.
            let newest = *self.growth.borrow_and_update();
            if newest <= self.after {
                self.growth.changed().await.ok()?;
                tokio::time::sleep(PACE).await;
                continue;
            }
            // All kinds: what is not wanted is passed over once, and not searched through again with every look.
            let page = self
                .app
                .sandboxes
                .facts(&self.caller, self.sandbox.as_ref(), &[], self.after, PAGE)
                .await;
            match page {
                Ok((page, next)) => {
                    // Without a next one, this page was the last that there was when the newest was looked at.
                    let last = page.last().map_or(0, |fact| fact.seq);
                    self.after = next.unwrap_or(newest.max(last));
                    let wanted = page.into_iter().filter(|fact| self.wanted.includes(&fact.kind));
                    self.read.extend(wanted);
                    if let Err(fault) = self.settle() {
                        return Some(Err(ErrorDetail::new(&fault, None)));
                    }
                }
                Err(fault) => return Some(Err(ErrorDetail::new(&fault, None))),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_chosen_by_name_and_by_beginning() {
        let all = Wanted::new(None).unwrap();
        assert!(all.includes("sandbox.ended"));
        let some = Wanted::new(Some("sandbox.*, command.exited,")).unwrap();
        assert!(some.includes("sandbox.created") && some.includes("command.exited"));
        assert!(!some.includes("command.started") && !some.includes("usage"));
        assert!(Wanted::new(Some(&"a,".repeat(65))).is_err());
    }
}
