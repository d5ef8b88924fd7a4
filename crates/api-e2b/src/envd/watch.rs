//! Changes below a directory: as a stream, or gathered for clients that ask now and then.
//!
//! What must hold: a gathering watcher ends with its sandbox, with `RemoveWatcher`, or when nobody asked for a long time,
//! and those of one sandbox together hold a bounded number of bytes, which it pays for. When there are more changes, the oldest
//! are given up, and whoever asks next is told.

use parking_lot::{Mutex, MutexGuard};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use atoll_front::Permit;
use atoll_guest_protocol::{EntryKind, WatchEvent as Change, WatchKind};
use atoll_sandboxes::Watch;
use atoll_types::SandboxId;
use axum::http::HeaderMap;
use axum::response::Response;
use prost::Message as _;
use tokio::task::AbortHandle;

use super::Call;
use super::connect::{self, Code, Error, Kind};
use super::filesystem::missing;
use super::messages::{
    EventType, FilesystemEvent, Nothing, WatchDirResponse, WatchEvent, WatchRequest, Watcher, WatcherEvents,
};

const MOST_EVENTS: usize = 10_000;
/// What the events of all watchers of a sandbox may take.
const MOST_BYTES: u64 = 4 * 1024 * 1024;
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
    queue: Arc<Mutex<Queue>>,
    asked: Instant,
    task: AbortHandle,
}

/// What all watchers of a sandbox hold.
type Held = Arc<AtomicU64>;

/// The events that one watcher gathered.
#[derive(Debug)]
struct Queue {
    events: VecDeque<FilesystemEvent>,
    /// Whether some are missing.
    lost: bool,
    permit: Permit,
    /// Of which this one's are the permit's.
    held: Held,
}

impl Queue {
    fn new(permit: Permit, held: Held) -> Self {
        Self {
            events: VecDeque::new(),
            lost: false,
            permit,
            held,
        }
    }

    fn push(&mut self, event: FilesystemEvent) {
        // Writes that nobody has heard of yet are one.
        if self.events.back() == Some(&event) {
            return;
        }
        let weight = weight(&event);
        while self.events.len() >= MOST_EVENTS || !self.has_paid(weight) {
            self.lost = true;
            match self.events.pop_front() {
                Some(oldest) => self.give_back(self::weight(&oldest)),
                // Others hold all of it.
                None => return,
            }
        }
        self.events.push_back(event);
    }

    fn has_paid(&mut self, weight: u64) -> bool {
        let held = self.held.fetch_add(weight, Ordering::Relaxed) + weight;
        let paid = held <= MOST_BYTES && self.permit.grow(weight).is_ok();
        if !paid {
            self.held.fetch_sub(weight, Ordering::Relaxed);
        }
        paid
    }

    fn give_back(&mut self, weight: u64) {
        self.held.fetch_sub(weight, Ordering::Relaxed);
        // Less is never refused.
        let _ = self.permit.set(self.permit.bytes().saturating_sub(weight));
    }

    /// All of them; or, once, that some are missing.
    fn take(&mut self) -> Result<Vec<FilesystemEvent>, Error> {
        if std::mem::take(&mut self.lost) {
            return Err(Error::new(
                Code::ResourceExhausted,
                "more has changed than the watchers of this sandbox may hold, and the oldest changes were given up; ask again \
                 for the latest ones, ask more often, or watch less",
            ));
        }
        let events = std::mem::take(&mut self.events);
        self.give_back(self.permit.bytes());
        Ok(events.into())
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.give_back(self.permit.bytes());
    }
}

/// What an event takes in a queue, which may have twice the room that it needs.
fn weight(event: &FilesystemEvent) -> u64 {
    (2 * size_of::<FilesystemEvent>() + event.encoded_len()) as u64
}

impl Drop for Gathering {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Watchers {
    fn all(&self) -> MutexGuard<'_, HashMap<String, Gathering>> {
        self.0.lock()
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

pub(crate) async fn create(mut call: Call, request: &WatchRequest) -> Result<Watcher, Error> {
    let (mut watch, top) = open(&call, request).await?;
    // It goes on when the request and its connection are over.
    call.visit = call.visit.apart();
    let mut entropy = [0; 10];
    getrandom::fill(&mut entropy).map_err(|_| Error::new(Code::Internal, "there is no entropy"))?;
    let id = format!("w{}", hex::encode(entropy));
    let (app, sandbox) = (call.app.clone(), call.target.id.clone());
    let permit = call.visit.permit()?;
    let mut all = app.watchers.all();
    all.retain(|_, watcher| watcher.asked.elapsed() < UNASKED);
    let mut of_sandbox = all.values().filter(|watcher| watcher.sandbox == sandbox);
    let held = match of_sandbox.next() {
        Some(watcher) => Arc::clone(&watcher.queue.lock().held),
        None => Held::default(),
    };
    if of_sandbox.count() + 1 >= MOST_WATCHERS {
        return Err(Error::new(
            Code::ResourceExhausted,
            format!("this sandbox has {MOST_WATCHERS} watchers already; remove some"),
        ));
    }
    let queue = Arc::new(Mutex::new(Queue::new(permit, held)));
    let with_entry = request.include_entry;
    let (gathered, own_id) = (Arc::clone(&queue), id.clone());
    // Ends with the sandbox's run, or when it is dropped from the table.
    let task = tokio::spawn(async move {
        while let Some(Ok(changes)) = watch.next().await {
            for change in changes {
                if change.kind == WatchKind::Overflow {
                    gathered.lock().lost = true;
                } else if let Some(event) = translate(&call, &top, &change, with_entry).await {
                    gathered.lock().push(event);
                }
            }
        }
        call.app.watchers.all().remove(&own_id);
    });
    all.insert(
        id.clone(),
        Gathering {
            sandbox,
            queue,
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
        Arc::clone(&watcher.queue)
    };
    let held = |queue: &Mutex<Queue>| {
        let queue = queue.lock();
        (queue.events.len(), queue.lost)
    };
    // What the caller did a moment ago is to be seen: ask the agent something, which it does after what came before, and
    // wait until nothing more arrives.
    call.stat(call.exactly(b"/")).await?;
    loop {
        let before = held(&queue);
        tokio::time::sleep(ON_THE_WAY).await;
        if held(&queue) == before || before.1 {
            break;
        }
    }
    let events = queue.lock().take()?;
    Ok(WatcherEvents { events })
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

#[cfg(test)]
mod tests {
    use super::*;

    fn event(number: usize, bytes: usize) -> FilesystemEvent {
        FilesystemEvent {
            name: format!("{number}{}", "x".repeat(bytes)),
            ..FilesystemEvent::default()
        }
    }

    #[test]
    fn all_watchers_of_a_sandbox_share_what_they_may_hold() {
        let limits = atoll_front::Limits::for_machine(1 << 30, 1000);
        let front = atoll_front::Front::new(limits);
        let project = atoll_types::ProjectId::from_entropy([1; 20]);
        let account = front.memory.account(&project, None);
        let held = Held::default();
        let mut first = Queue::new(account.open(), Arc::clone(&held));
        let mut second = Queue::new(account.open(), Arc::clone(&held));
        for number in 0..100 {
            first.push(event(number, 100_000));
        }
        assert!(first.lost && front.memory.held() <= MOST_BYTES);
        second.push(event(0, 100_000));
        assert!(second.lost && second.events.is_empty());
        // It is told once, then come the latest.
        assert_eq!(first.take().unwrap_err().code, Code::ResourceExhausted);
        let events = first.take().unwrap();
        assert!((35..=45).contains(&events.len()), "{}", events.len());
        assert_eq!(events.last(), Some(&event(99, 100_000)));
        assert_eq!((front.memory.held(), held.load(Ordering::Relaxed)), (0, 0));
        // Small ones are counted, and those that say the same are one.
        for number in 0..MOST_EVENTS * 2 {
            second.push(event(number / 2, 0));
        }
        assert!(second.events.len() <= MOST_EVENTS && !second.events.is_empty());
        assert!(front.memory.held() >= second.events.len() as u64 * 100);
        drop(second);
        assert_eq!((front.memory.held(), held.load(Ordering::Relaxed)), (0, 0));
    }
}
