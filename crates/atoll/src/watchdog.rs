//! Says what stalls, and ends the server when it is told to although something does.
//!
//! A few threads run the requests of everybody. One that computes for long without coming back holds up whoever comes next
//! to it, health checks and signals among them, and nothing on those threads could tell. So two plain threads look on:
//!
//! - One asks, every second, how long each worker has been at the same thing, and logs an error if that is too long. What
//!   it is at, it learns from the spans that the thread has entered: requests, and decisions about workflows and schedules
//!   by namespace and name.
//! - One waits for SIGTERM and SIGINT with a runtime of its own. If the server has not ended a while after, it ends the
//!   process. Nothing is lost by that which was acknowledged.

use parking_lot::Mutex;
use std::cell::RefCell;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use atoll_client::output::{Doing as _, Result};
use tokio::runtime::{Handle, RuntimeMetrics};
use tokio::signal::unix::{SignalKind, signal};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Metadata, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;

/// How often is looked.
const ROUND: Duration = Duration::from_secs(1);
/// Nothing that a worker does should take a hundredth of this.
const LONG: Duration = Duration::from_secs(10);
/// How long the server may take to end: more than it allows requests and itself.
const GRACE: Duration = Duration::from_secs(40);
/// The same if something stalls, or it is told twice: what would have ended has ended by then.
const SHORT_GRACE: Duration = Duration::from_secs(5);
/// How much of a label is kept: the names in it are others'.
const LABEL: usize = 500;

/// Starts both. They end with the process.
pub(crate) fn start(runtime: &Handle) -> Result<()> {
    start_with(runtime, LONG, GRACE)
}

fn start_with(runtime: &Handle, long: Duration, grace: Duration) -> Result<()> {
    let stalls = Arc::new(AtomicBool::new(false));
    let (metrics, seen) = (runtime.metrics(), Arc::clone(&stalls));
    thread::Builder::new()
        .name("watchdog".to_owned())
        .spawn(move || {
            let mut watch = Watch::new(long);
            loop {
                thread::sleep(ROUND.min(long / 2));
                let found = watch.look(&metrics, Instant::now());
                seen.store(watch.is_stalled(), Ordering::Relaxed);
                for stall in found {
                    stall.report();
                }
            }
        })
        .doing("cannot start the watchdog")?;
    let (tell, told) = std::sync::mpsc::channel();
    thread::Builder::new()
        .name("watchdog-signals".to_owned())
        .spawn(move || wait_to_end(&stalls, grace, &tell))
        .doing("cannot start the watchdog")?;
    told.recv().doing("cannot start the watchdog")?
}

/// Something that a thread has been at for too long.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Stall {
    /// The thread's name, or which worker it is.
    thread: String,
    what: String,
    since: Duration,
}

impl Stall {
    fn report(&self) {
        tracing::error!(
            thread = self.thread,
            doing = self.what,
            seconds = self.since.as_secs(),
            "a worker is stalled; whatever it is at, others wait for it"
        );
    }
}

/// What was seen of the workers, and said.
struct Watch {
    long: Duration,
    workers: Vec<Worker>,
    /// The next error about the same stall comes when it has lasted twice as long.
    said: Duration,
    stalled: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Worker {
    parked: u64,
    busy: Duration,
    since: Instant,
}

impl Watch {
    const fn new(long: Duration) -> Self {
        Self {
            long,
            workers: Vec::new(),
            said: Duration::ZERO,
            stalled: false,
        }
    }

    const fn is_stalled(&self) -> bool {
        self.stalled
    }

    /// What stalls and was not said yet.
    fn look(&mut self, metrics: &RuntimeMetrics, now: Instant) -> Vec<Stall> {
        let named = stalled_threads(self.long, now);
        let mut found = self.stalled_workers(metrics, now);
        // A worker is known by its number and a thread by what it does, and not which of them is which.
        if !named.is_empty() {
            found = named;
        }
        self.stalled = !found.is_empty();
        let longest = found.iter().map(|stall| stall.since).max().unwrap_or_default();
        if !self.stalled {
            self.said = Duration::ZERO;
        }
        if longest < self.said * 2 {
            return Vec::new();
        }
        self.said = longest;
        found
    }

    /// A worker counts when it goes to sleep and wakes, and how long it was busy, after every few tasks. One that is awake
    /// and counts nothing is still at the same task.
    fn stalled_workers(&mut self, metrics: &RuntimeMetrics, now: Instant) -> Vec<Stall> {
        let mut found = Vec::new();
        for number in 0..metrics.num_workers() {
            let parked = metrics.worker_park_unpark_count(number);
            let busy = metrics.worker_total_busy_duration(number);
            let seen = Worker {
                parked,
                busy,
                since: now,
            };
            let Some(known) = self.workers.get_mut(number) else {
                self.workers.push(seen);
                continue;
            };
            let is_asleep = parked % 2 == 1;
            if is_asleep || known.parked != parked || known.busy != busy {
                *known = seen;
                continue;
            }
            let since = now.saturating_duration_since(known.since);
            if since >= self.long {
                found.push(Stall {
                    thread: format!("worker {number}"),
                    what: "something without a name".to_owned(),
                    since,
                });
            }
        }
        found
    }
}

/// Waits for a signal, then for the server to end, then ends it. Says first whether it can.
fn wait_to_end(stalls: &AtomicBool, grace: Duration, tell: &std::sync::mpsc::Sender<Result<()>>) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .doing("cannot watch for signals");
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => {
            let _gone = tell.send(Err(error));
            return;
        }
    };
    runtime.block_on(async {
        let mut terminate = match signal(SignalKind::terminate()).doing("cannot watch for termination") {
            Ok(terminate) => terminate,
            Err(error) => {
                let _gone = tell.send(Err(error));
                return std::future::pending().await;
            }
        };
        let mut interrupt = match signal(SignalKind::interrupt()).doing("cannot watch for Ctrl-C") {
            Ok(interrupt) => interrupt,
            Err(error) => {
                let _gone = tell.send(Err(error));
                return std::future::pending().await;
            }
        };
        let _gone = tell.send(Ok(()));
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        let told = tokio::time::Instant::now();
        loop {
            let grace = if stalls.load(Ordering::Relaxed) {
                grace.min(SHORT_GRACE)
            } else {
                grace
            };
            tokio::select! {
                () = tokio::time::sleep_until(told + grace) => return,
                () = tokio::time::sleep(ROUND) => {}
                _ = terminate.recv() => break,
                _ = interrupt.recv() => break,
            }
        }
        tokio::time::sleep(grace.min(SHORT_GRACE)).await;
    });
    // Whoever stalls may hold what logging needs.
    let said = thread::spawn(|| {
        let doing: Vec<_> = stalled_threads(Duration::ZERO, Instant::now())
            .into_iter()
            .map(|stall| stall.what)
            .collect();
        tracing::error!(
            doing = doing.join("; "),
            "the server did not end by itself and is ended; what was acknowledged is durable"
        );
    });
    let until = Instant::now() + ROUND;
    while !said.is_finished() && Instant::now() < until {
        thread::sleep(Duration::from_millis(10));
    }
    #[expect(
        clippy::exit,
        reason = "whoever would return from here may be what is stalled"
    )]
    std::process::exit(1);
}

/// The threads of this process that have entered spans.
static THREADS: Mutex<Vec<Weak<Thread>>> = Mutex::new(Vec::new());

thread_local! {
    static OWN: RefCell<Option<Arc<Thread>>> = const { RefCell::new(None) };
}

#[derive(Debug)]
struct Thread {
    name: String,
    /// The spans that it is in, the outermost first.
    entered: Mutex<Vec<Entered>>,
}

#[derive(Debug)]
struct Entered {
    id: Id,
    what: Arc<str>,
    since: Instant,
}

/// Those that have been in the same span for at least so long, without having left all of them in between.
fn stalled_threads(long: Duration, now: Instant) -> Vec<Stall> {
    let mut threads = THREADS.lock();
    threads.retain(|thread| thread.strong_count() > 0);
    let living: Vec<_> = threads.iter().filter_map(Weak::upgrade).collect();
    drop(threads);
    let mut stalls: Vec<_> = living
        .iter()
        .filter_map(|thread| {
            let entered = thread.entered.lock();
            let since = now.saturating_duration_since(entered.first()?.since);
            let what: Vec<_> = entered.iter().map(|span| &*span.what).collect();
            (since >= long).then(|| Stall {
                thread: thread.name.clone(),
                what: what.join(" > "),
                since,
            })
        })
        .collect();
    stalls.sort_by_key(|stall| std::cmp::Reverse(stall.since));
    stalls
}

/// Notes which spans each thread is in.
#[derive(Debug)]
struct Spans;

/// What a span is called, with what it is about.
struct Label(Arc<str>);

/// The layer that goes with the log. Only spans of our own are noted; others would be many.
pub(crate) fn layer<S>() -> impl Layer<S>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    Spans.with_filter(filter_fn(|metadata: &Metadata<'_>| {
        metadata.is_span() && metadata.target().starts_with("atoll")
    }))
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Spans {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        let mut text = Text(span.name().to_owned());
        attributes.record(&mut text);
        span.extensions_mut().insert(Label(text.0.into()));
    }

    fn on_record(&self, id: &Id, record: &Record<'_>, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        let mut extensions = span.extensions_mut();
        if let Some(label) = extensions.get_mut::<Label>() {
            let mut text = Text(label.0.to_string());
            record.record(&mut text);
            label.0 = text.0.into();
        }
    }

    fn on_enter(&self, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        let Some(what) = span.extensions().get::<Label>().map(|label| Arc::clone(&label.0)) else {
            return;
        };
        let entered = Entered {
            id: id.clone(),
            what,
            since: Instant::now(),
        };
        // A thread that ends has nothing to say any more.
        let _ended = OWN.try_with(|own| {
            let mut own = own.borrow_mut();
            let thread = own.get_or_insert_with(|| {
                let current = thread::current();
                let thread = Arc::new(Thread {
                    name: current.name().unwrap_or("without a name").to_owned(),
                    entered: Mutex::default(),
                });
                THREADS.lock().push(Arc::downgrade(&thread));
                thread
            });
            thread.entered.lock().push(entered);
        });
    }

    fn on_exit(&self, id: &Id, _: Context<'_, S>) {
        let _ended = OWN.try_with(|own| {
            if let Some(thread) = own.borrow().as_ref() {
                let mut entered = thread.entered.lock();
                if let Some(place) = entered.iter().rposition(|span| span.id == *id) {
                    entered.remove(place);
                }
            }
        });
    }
}

/// A label in the making.
struct Text(String);

impl Text {
    fn add(&mut self, field: &Field, value: std::fmt::Arguments<'_>) {
        let _infallible = write!(self.0, " {}={value}", field.name());
        if self.0.len() > LABEL {
            let ends = (0..=LABEL).rev().find(|at| self.0.is_char_boundary(*at));
            let end = ends.unwrap_or_default();
            self.0.truncate(end);
        }
    }
}

impl Visit for Text {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field, format_args!("{value}"));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        self.add(field, format_args!("{value:?}"));
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};
    use std::sync::mpsc;

    use rustix::process::{Pid, Signal, kill_process};
    use tracing_subscriber::layer::SubscriberExt as _;

    use super::*;

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap()
    }

    /// Keeps a worker until somebody lets go. Returns when it has it.
    fn stall(runtime: &tokio::runtime::Runtime, named: bool) -> mpsc::Sender<()> {
        let (release, released) = mpsc::channel();
        let (begin, begun) = mpsc::channel();
        runtime.spawn(async move {
            let subscriber = tracing_subscriber::registry().with(layer());
            tracing::subscriber::with_default(subscriber, || {
                let span = if named {
                    tracing::debug_span!("decide", namespace = "theirs", schedule = "endless")
                } else {
                    tracing::Span::none()
                };
                let _doing = span.entered();
                begin.send(()).unwrap();
                let _released = released.recv();
            });
        });
        begun.recv().unwrap();
        release
    }

    #[test]
    fn a_stalled_worker_is_named() {
        let runtime = runtime();
        let metrics = runtime.metrics();
        let release = stall(&runtime, true);
        let about_it = |stalls: Vec<Stall>| {
            let mut own = stalls.into_iter().filter(|stall| stall.what.contains("endless"));
            own.next()
        };
        let mut watch = Watch::new(LONG);
        let now = Instant::now();
        assert_eq!(about_it(watch.look(&metrics, now)), None);
        let later = |seconds: u64| now + Duration::from_secs(seconds);
        let said = about_it(watch.look(&metrics, later(15))).unwrap();
        assert_eq!(said.what, "decide namespace=theirs schedule=endless");
        assert!(said.since >= Duration::from_secs(14), "{said:?}");
        assert!(watch.is_stalled());
        // Not every second, but when it has become worse.
        assert_eq!(about_it(watch.look(&metrics, later(16))), None);
        assert!(about_it(watch.look(&metrics, later(60))).is_some());
        release.send(()).unwrap();
        // The thread has left it when the runtime has ended.
        drop(runtime);
        assert_eq!(about_it(stalled_threads(Duration::ZERO, later(99))), None);
    }

    #[test]
    fn a_worker_that_is_at_something_without_a_name_is_noticed_and_one_that_sleeps_is_not() {
        let runtime = runtime();
        let metrics = runtime.metrics();
        let release = stall(&runtime, false);
        let mut watch = Watch::new(LONG);
        let now = Instant::now();
        assert_eq!(watch.stalled_workers(&metrics, now), []);
        // The other worker may still be on its way to sleep at the first look, never for as long as it takes to see it there.
        let asleep = |number: usize| metrics.worker_park_unpark_count(number) % 2 == 1;
        while !(asleep(0) || asleep(1)) {
            thread::yield_now();
        }
        let stalls = watch.stalled_workers(&metrics, now + Duration::from_secs(15));
        assert_eq!(stalls.len(), 1, "{stalls:?}");
        assert_eq!(stalls[0].since, Duration::from_secs(15));
        release.send(()).unwrap();
    }

    const STALLED: &str = "ATOLL_TEST_STALLED";

    /// Not a test of its own: the process that the next one ends.
    #[test]
    fn a_process_all_of_whose_workers_are_stalled() {
        if std::env::var_os(STALLED).is_none() {
            return;
        }
        let runtime = runtime();
        start_with(
            runtime.handle(),
            Duration::from_millis(100),
            Duration::from_millis(300),
        )
        .unwrap();
        let _held = [stall(&runtime, true), stall(&runtime, false)];
        // By now nothing on the runtime can hear a signal.
        println!("\nall workers are held");
        loop {
            thread::park();
        }
    }

    #[test]
    fn a_signal_ends_a_server_that_is_stalled() {
        use std::io::{BufRead as _, BufReader};
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "--nocapture",
                "watchdog::tests::a_process_all_of_whose_workers_are_stalled",
            ])
            .env(STALLED, "1")
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut lines = lines.map_while(std::io::Result::ok);
        assert!(lines.any(|line| line == "all workers are held"));
        kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
        let status = child.wait().unwrap();
        assert_eq!(status.code(), Some(1), "{status:?}");
    }
}
