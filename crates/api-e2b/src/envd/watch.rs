//! Changes below a directory: as a stream, or gathered for clients that ask now and then.
//!
//! What must hold: a gathering watcher ends with its sandbox, with `RemoveWatcher`, or when nobody asked for a long time,
//! and holds a bounded number of events.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use atoll_guest_protocol::{EntryKind, WatchEvent as Change, WatchKind};
use atoll_sandboxes::Watch;
use atoll_types::SandboxId;
use axum::http::HeaderMap;
use axum::response::Response;
use tokio::task::AbortHandle;

use super::Call;
use super::connect::{self, Code, Error, Kind};
use super::filesystem::missing;
use super::messages::{
    EventType, FilesystemEvent, Nothing, WatchDirResponse, WatchEvent, WatchRequest, Watcher, WatcherEvents,
};

const MOST_EVENTS: usize = 10_000;
const MOST_WATCHERS: usize = 1024;
/// A watcher that nobody asks is forgotten.
const UNASKED: Duration = Duration::from_secs(60 * 60);
/// How long changes that just happened may be on their way from the agent.
const ON_THE_WAY: Duration = Duration::from_millis(3);

#[derive(Debug, Default)]
pub(crate) struct Watchers(Mutex<HashMap<String, Gathering>>);

#[derive(Debug)]
struct Gathering {
    sandbox: SandboxId,
    events: Arc<Mutex<VecDeque<FilesystemEvent>>>,
    asked: Instant,
    task: AbortHandle,
}

impl Drop for Gathering {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Watchers {
    fn all(&self) -> MutexGuard<'_, HashMap<String, Gathering>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A watch that stands, on what is a directory.
async fn open(call: &Call, request: &WatchRequest) -> Result<(Watch, Vec<u8>), Error> {
    let stat = call.stat(call.at(&request.path)).await;
    let stat = stat.map_err(|fault| missing(&request.path, fault))?;
    let Some(leads) = call.resolve(&stat).await? else {
        return Err(Error::not_found(format!("path not found: {}", request.path)));
    };
    if leads.kind != EntryKind::Directory {
        return Err(Error::invalid(format!(
            "path is not a directory: {}",
            request.path
        )));
    }
    let at = call.exactly(&leads.path);
    let watching = call
        .app
        .sandboxes
        .watch(&call.target.caller, &call.target.id, at, request.recursive);
    Ok((watching.await?, leads.path))
}

/// What a change is called here; `None`: nothing that clients would know.
fn kind_of(kind: WatchKind) -> Option<EventType> {
    match kind {
        WatchKind::Created | WatchKind::RenamedTo => Some(EventType::Create),
        WatchKind::Written => Some(EventType::Write),
        WatchKind::Removed => Some(EventType::Remove),
        WatchKind::RenamedFrom => Some(EventType::Rename),
        WatchKind::Attributes => Some(EventType::Chmod),
        WatchKind::Overflow => None,
    }
}

async fn translate(call: &Call, top: &[u8], change: &Change, with_entry: bool) -> Option<FilesystemEvent> {
    let kind = kind_of(change.kind)?;
    if change.name.is_empty() {
        return None;
    }
    let there = matches!(kind, EventType::Create | EventType::Write | EventType::Chmod);
    let entry = if with_entry && there {
        let path = [top, b"/", &change.name[..]].concat();
        // It may be gone by now.
        call.entry(call.exactly(&path)).await.ok()
    } else {
        None
    };
    Some(FilesystemEvent {
        name: String::from_utf8_lossy(&change.name).into_owned(),
        r#type: kind.into(),
        entry,
    })
}

pub(crate) async fn stream(
    call: Call,
    kind: Kind,
    headers: &HeaderMap,
    request: &WatchRequest,
) -> Result<Response, Error> {
    struct State {
        call: Call,
        watch: Watch,
        top: Vec<u8>,
        waiting: VecDeque<Change>,
        started: bool,
    }
    let (watch, top) = open(&call, request).await?;
    let state = State {
        call,
        watch,
        top,
        waiting: VecDeque::new(),
        started: false,
    };
    let every = connect::keepalive(headers);
    let until = connect::timeout(headers).map(|limit| tokio::time::Instant::now() + limit);
    let with_entry = request.include_entry;
    let events = futures_util::stream::unfold(Some(state), move |state| async move {
        let mut state = state?;
        let message = |event| Ok(WatchDirResponse { event: Some(event) });
        if !std::mem::replace(&mut state.started, true) {
            return Some((message(WatchEvent::Start(Nothing {})), Some(state)));
        }
        loop {
            if let Some(change) = state.waiting.pop_front() {
                match translate(&state.call, &state.top, &change, with_entry).await {
                    Some(event) => {
                        return Some((message(WatchEvent::Filesystem(Box::new(event))), Some(state)));
                    }
                    None => continue,
                }
            }
            let pause = tokio::time::Instant::now() + every;
            let wake = until.map_or(pause, |until| until.min(pause));
            match tokio::time::timeout_at(wake, state.watch.next()).await {
                Ok(Some(Ok(changes))) => state.waiting.extend(changes),
                Ok(Some(Err(fault))) => {
                    let error = Error {
                        gone: true,
                        ..Error::from(fault)
                    };
                    return Some((Err(error), None));
                }
                Ok(None) => return None,
                Err(_) if until == Some(wake) => {
                    let error = Error::new(Code::DeadlineExceeded, "the time of this call is over");
                    return Some((Err(error), None));
                }
                Err(_) => return Some((message(WatchEvent::Keepalive(Nothing {})), Some(state))),
            }
        }
    });
    Ok(connect::answer_stream(kind, events))
}

pub(crate) async fn create(call: Call, request: &WatchRequest) -> Result<Watcher, Error> {
    let (mut watch, top) = open(&call, request).await?;
    let mut entropy = [0; 10];
    getrandom::fill(&mut entropy).map_err(|_| Error::new(Code::Internal, "there is no entropy"))?;
    let id = format!("w{}", hex::encode(entropy));
    let events: Arc<Mutex<VecDeque<FilesystemEvent>>> = Arc::default();
    let (app, sandbox) = (call.app.clone(), call.target.id.clone());
    let with_entry = request.include_entry;
    let (gathered, own_id) = (Arc::clone(&events), id.clone());
    // Ends with the sandbox's run, or when it is dropped from the table.
    let task = tokio::spawn(async move {
        while let Some(Ok(changes)) = watch.next().await {
            for change in changes {
                if let Some(event) = translate(&call, &top, &change, with_entry).await {
                    let mut events = gathered.lock().unwrap_or_else(PoisonError::into_inner);
                    // Writes that nobody has heard of yet are one.
                    if events.len() < MOST_EVENTS && events.back() != Some(&event) {
                        events.push_back(event);
                    }
                }
            }
        }
        call.app.watchers.all().remove(&own_id);
    });
    let mut all = app.watchers.all();
    all.retain(|_, watcher| watcher.asked.elapsed() < UNASKED);
    if all.values().filter(|watcher| watcher.sandbox == sandbox).count() >= MOST_WATCHERS {
        task.abort();
        return Err(Error::new(
            Code::ResourceExhausted,
            format!("this sandbox has {MOST_WATCHERS} watchers already; remove some"),
        ));
    }
    all.insert(
        id.clone(),
        Gathering {
            sandbox,
            events,
            asked: Instant::now(),
            task: task.abort_handle(),
        },
    );
    Ok(Watcher { watcher_id: id })
}

pub(crate) async fn events(call: &Call, id: &str) -> Result<WatcherEvents, Error> {
    let unknown = || Error::not_found(format!("watcher with id {id} not found"));
    let queue = {
        let mut all = call.app.watchers.all();
        let watcher = all
            .get_mut(id)
            .filter(|watcher| watcher.sandbox == call.target.id);
        let watcher = watcher.ok_or_else(unknown)?;
        watcher.asked = Instant::now();
        Arc::clone(&watcher.events)
    };
    let held = |queue: &Mutex<VecDeque<_>>| queue.lock().unwrap_or_else(PoisonError::into_inner).len();
    // What the caller did a moment ago is to be seen: ask the agent something, which it does after what came before, and
    // wait until nothing more arrives.
    call.stat(call.exactly(b"/")).await?;
    loop {
        let before = held(&queue);
        tokio::time::sleep(ON_THE_WAY).await;
        if held(&queue) == before || before >= MOST_EVENTS {
            break;
        }
    }
    let events = std::mem::take(&mut *queue.lock().unwrap_or_else(PoisonError::into_inner));
    Ok(WatcherEvents {
        events: events.into(),
    })
}

pub(crate) fn remove(call: &Call, id: &str) -> Result<Nothing, Error> {
    let mut all = call.app.watchers.all();
    match all.get(id) {
        Some(watcher) if watcher.sandbox == call.target.id => {
            all.remove(id);
            Ok(Nothing {})
        }
        _ => Err(Error::not_found(format!("watcher with id {id} not found"))),
    }
}
