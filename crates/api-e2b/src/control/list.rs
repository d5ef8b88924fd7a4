//! Lists of sandboxes: filters, order, pages.

use std::collections::BTreeMap;

use atoll_front::query;
use atoll_identity::Caller;
use atoll_sandboxes::{ListSandboxes, Sandbox};
use atoll_types::SandboxState;
use axum::extract::{Json, State};
use axum::http::{HeaderName, HeaderValue};
use axum::response::{IntoResponse, Response};
use serde_json::Value;

use super::names::Name;
use super::read::Query;
use super::view;
use crate::App;
use crate::auth::Auth;
use crate::error::{Answer, Refusal};

pub(crate) const NEXT_TOKEN: HeaderName = HeaderName::from_static("x-next-token");
/// How many of those that were asked for run, on whichever page they are.
const TOTAL_RUNNING: HeaderName = HeaderName::from_static("x-total-running");
const PAGE: usize = 100;

/// What is asked of the list.
#[derive(Debug, Clone, Default)]
struct Wanted {
    labels: BTreeMap<String, String>,
    states: Vec<SandboxState>,
    oldest_first: bool,
    /// Milliseconds; inclusive.
    started_after: Option<i64>,
    /// As in our store.
    template: Option<String>,
}

pub(crate) async fn list(State(app): State<App>, Auth(caller): Auth, query: Query) -> Answer<Response> {
    let query = query.only(&[
        "metadata",
        "state",
        "order",
        "startedAfter",
        "template",
        "limit",
        "nextToken",
    ])?;
    let wanted = wanted(&query)?;
    let (limit, token) = (query.limit()?, query.text("nextToken"));
    let total = total_running(&app, &caller, &wanted).await?;
    let (items, next) = if wanted.oldest_first || wanted.started_after.is_some() || wanted.template.is_some()
    {
        let all = chosen(&app, &caller, &wanted).await?;
        page_of(all, limit, token)?
    } else {
        let request = ListSandboxes {
            labels: wanted.labels,
            owner: None,
            states: wanted.states,
            cursor: token.map(str::to_owned),
            limit,
        };
        let page = app.sandboxes.list(&caller, request).await?;
        (page.items, page.next)
    };
    let views: Vec<Value> = items.iter().map(view::listed).collect();
    let mut response = Json(views).into_response();
    if let Some(next) = next.and_then(|next| HeaderValue::from_str(&next).ok()) {
        response.headers_mut().insert(NEXT_TOKEN, next);
    }
    if let Some(total) = total {
        response.headers_mut().insert(TOTAL_RUNNING, total.into());
    }
    Ok(response)
}

/// `None` where those that run were not asked for.
async fn total_running(app: &App, caller: &Caller, wanted: &Wanted) -> Answer<Option<usize>> {
    let runs = |state: &&SandboxState| view::state(**state) == Some("running");
    let running: Vec<SandboxState> = wanted.states.iter().filter(runs).copied().collect();
    if running.is_empty() {
        return Ok(None);
    }
    let running = Wanted {
        states: running,
        ..wanted.clone()
    };
    Ok(Some(chosen(app, caller, &running).await?.len()))
}

/// The first version: all that run.
pub(crate) async fn running(
    State(app): State<App>,
    Auth(caller): Auth,
    query: Query,
) -> Answer<Json<Vec<Value>>> {
    let query = query.only(&["metadata"])?;
    let wanted = Wanted {
        labels: metadata(&query)?,
        states: states_named("running")?,
        ..Wanted::default()
    };
    let all = chosen(&app, &caller, &wanted).await?;
    Ok(Json(all.iter().map(view::listed).collect()))
}

fn wanted(query: &Query) -> Answer<Wanted> {
    let named = query.text("state").unwrap_or("running,paused");
    Ok(Wanted {
        labels: metadata(query)?,
        states: states_named(named)?,
        oldest_first: match query.text("order") {
            None | Some("desc") => false,
            Some("asc") => true,
            Some(other) => return Err(Refusal::invalid(format!("`order` is `{other}`; use asc or desc"))),
        },
        started_after: query
            .text("startedAfter")
            .map(|text| {
                let time: Result<jiff::Timestamp, _> = text.parse();
                time.map(jiff::Timestamp::as_millisecond)
                    .map_err(|_| Refusal::invalid("`startedAfter` is not a time as in RFC 3339"))
            })
            .transpose()?,
        template: query
            .text("template")
            .map(|text| match text.contains(':') {
                true => Err(Refusal::invalid("`template` takes no tag here")),
                false => Name::parse(text).map(|name| name.stored()),
            })
            .transpose()?,
    })
}

fn states_named(names: &str) -> Answer<Vec<SandboxState>> {
    let mut states = Vec::new();
    for name in names.split(',').map(str::trim).filter(|name| !name.is_empty()) {
        let before = states.len();
        let meant = SandboxState::ALL.into_iter();
        states.extend(meant.filter(|state| view::state(*state) == Some(name)));
        if states.len() == before {
            return Err(Refusal::invalid(format!(
                "`state` is `{name}`; use running or paused"
            )));
        }
    }
    Ok(states)
}

/// Clients encode names and values, join them as a query, and encode that once more.
fn metadata(query: &Query) -> Answer<BTreeMap<String, String>> {
    let Some(text) = query.text("metadata") else {
        return Ok(BTreeMap::new());
    };
    let decoded = |text: &str| {
        percent_encoding::percent_decode_str(text)
            .decode_utf8()
            .map(std::borrow::Cow::into_owned)
            .map_err(|_| Refusal::invalid("`metadata` is not UTF-8 once decoded"))
    };
    query::pairs(text)
        .map(|(name, value)| Ok((decoded(&name)?, decoded(&value)?)))
        .collect()
}

/// All that match, in order.
async fn chosen(app: &App, caller: &Caller, wanted: &Wanted) -> Answer<Vec<Sandbox>> {
    let mut found = Vec::new();
    let mut cursor = None;
    loop {
        let request = ListSandboxes {
            labels: wanted.labels.clone(),
            owner: None,
            states: wanted.states.clone(),
            cursor,
            limit: PAGE,
        };
        let page = app.sandboxes.list(caller, request).await?;
        found.extend(page.items);
        cursor = page.next;
        if cursor.is_none() {
            break;
        }
    }
    found.retain(|sandbox| {
        wanted
            .started_after
            .is_none_or(|after| sandbox.created_at.0 >= after)
            && wanted.template.as_ref().is_none_or(|template| {
                sandbox.template.as_str() == template || sandbox.spec.template == *template
            })
    });
    if wanted.oldest_first {
        found.reverse();
    }
    Ok(found)
}

/// The page behind a token, which names the last of the page before.
fn page_of(all: Vec<Sandbox>, limit: usize, token: Option<&str>) -> Answer<(Vec<Sandbox>, Option<String>)> {
    let begin = match token {
        None => 0,
        Some(token) => match all.iter().position(|sandbox| sandbox.id.bare() == token) {
            Some(at) => at + 1,
            None => return Err(Refusal::invalid("`nextToken` is not valid any more; list anew")),
        },
    };
    let left = all.len() - begin;
    let items: Vec<Sandbox> = all.into_iter().skip(begin).take(limit).collect();
    let next = match items.last() {
        Some(last) if left > items.len() => Some(last.id.bare().to_owned()),
        _ => None,
    };
    Ok((items, next))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_is_decoded_as_often_as_it_was_encoded() {
        // As captured: {"k a": "v&1"}, after the outermost decoding.
        let query = Query(vec![("metadata".into(), "k%2520a=v%25261".into())]);
        let found = metadata(&query).unwrap();
        assert_eq!(found, BTreeMap::from([("k a".to_owned(), "v&1".to_owned())]));
    }

    #[test]
    fn states_are_two() {
        let states = states_named("paused").unwrap();
        assert!(states.contains(&SandboxState::Stopped) && !states.contains(&SandboxState::Running));
        assert!(states_named("running,paused").unwrap().len() > states.len());
        assert!(states_named("asleep").is_err());
    }
}
