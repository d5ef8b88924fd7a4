//! What the log of a sandbox is made of: each decision, each end of a flow, each use of a secret.
//!
//! A guest decides how often something happens, so the log must not be a way to fill the host: the first of a kind is
//! told at once, the same again within a second is told once with a count, and beyond a steady number of kinds the rest
//! is told as a mere count. Nothing is lost but detail.

mod window;

use parking_lot::Mutex;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use atoll_policy::Decision;
use atoll_types::{EgressVerdict, ProjectId, SandboxId, SecretRef, Timestamp};
use tokio::sync::Notify;
use tokio::time::Instant;

use window::Window;

/// How long repetitions are gathered.
const GATHER: Duration = Duration::from_secs(1);

/// Something that happened at the way out of a sandbox. Holds names and sizes, never contents: no path and no query, for
/// they may carry secrets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EgressEvent {
    pub sandbox: SandboxId,
    pub project: ProjectId,
    /// Of the last, where it stands for several.
    pub at: Timestamp,
    pub kind: EventKind,
    pub verdict: EgressVerdict,
    pub rule: String,
    pub reason: String,
    pub protocol: EgressProtocol,
    pub host: Option<String>,
    pub address: Option<IpAddr>,
    pub port: u16,
    pub method: Option<String>,
    pub bytes_up: u64,
    pub bytes_down: u64,
    /// How many such events this one stands for.
    pub count: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum EventKind {
    /// A name, a connection or a request was allowed or denied.
    Decided,
    /// A flow that had been allowed is over; its bytes are in the event. `verdict` is `Denied` where it was cut.
    Closed,
    /// It was allowed, but there was nothing at the other end.
    Failed,
    /// A secret went out to `host`.
    SecretUsed(SecretRef),
    /// More happened than is told singly: `count` decisions of `verdict`.
    Unlisted,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EgressProtocol {
    Dns,
    Tls,
    Http,
    Postgres,
    Tcp,
    Udp,
}

impl EgressProtocol {
    pub fn name(self) -> &'static str {
        match self {
            Self::Dns => "dns",
            Self::Tls => "tls",
            Self::Http => "http",
            Self::Postgres => "postgres",
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        }
    }
}

/// Is told what happens. Must not block: it is called from whoever moves the bytes.
pub trait Witness: Send + Sync {
    fn saw(&self, event: EgressEvent);
}

/// An event before it is known whose it is, and when.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Note {
    pub kind: EventKind,
    pub verdict: EgressVerdict,
    pub rule: String,
    pub reason: String,
    pub protocol: EgressProtocol,
    pub host: Option<String>,
    pub address: Option<IpAddr>,
    pub port: u16,
    pub method: Option<String>,
    pub bytes_up: u64,
    pub bytes_down: u64,
}

impl Note {
    /// A decision about something at `host` and `port`.
    pub(crate) fn decided(
        decision: &Decision,
        protocol: EgressProtocol,
        host: Option<&str>,
        address: Option<IpAddr>,
        port: u16,
    ) -> Self {
        Self {
            kind: EventKind::Decided,
            verdict: decision.verdict,
            rule: decision.rule.as_str().to_owned(),
            reason: decision.reason.clone(),
            protocol,
            host: host.map(str::to_owned),
            address,
            port,
            method: None,
            bytes_up: 0,
            bytes_down: 0,
        }
    }
}

/// Whose events these are. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Events {
    source: Arc<Source>,
    collector: Arc<Collector>,
}

#[derive(Debug)]
struct Source {
    sandbox: SandboxId,
    project: ProjectId,
    window: Mutex<Window>,
}

impl Events {
    pub(crate) fn new(sandbox: SandboxId, project: ProjectId, collector: Arc<Collector>) -> Self {
        Self {
            source: Arc::new(Source {
                sandbox,
                project,
                window: Mutex::new(Window::new()),
            }),
            collector,
        }
    }

    pub(crate) fn note(&self, note: Note) {
        let (told, opened) = {
            let mut window = self.source.window.lock();
            let idle = window.is_idle();
            let told = window.note(note, Instant::now());
            (told, idle && !window.is_idle())
        };
        if let Some(note) = told {
            self.collector.tell(&self.source, note, 1);
        }
        if opened {
            self.collector.open.lock().push(Arc::clone(&self.source));
            self.collector.wake.notify_one();
        }
    }

    /// Tells what is still gathered.
    pub(crate) fn flush(&self) {
        self.collector.flush(&self.source);
    }
}

/// Hands events to the witness, the gathered ones a second later.
pub(crate) struct Collector {
    witness: Arc<dyn Witness>,
    /// The windows in which something is, or may yet be, gathered.
    open: Mutex<Vec<Arc<Source>>>,
    wake: Notify,
}

impl std::fmt::Debug for Collector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Collector").finish_non_exhaustive()
    }
}

impl Collector {
    pub(crate) fn new(witness: Arc<dyn Witness>) -> Arc<Self> {
        Arc::new(Self {
            witness,
            open: Mutex::default(),
            wake: Notify::new(),
        })
    }

    /// Runs until it is dropped.
    pub(crate) async fn run(self: Arc<Self>) {
        loop {
            self.wake.notified().await;
            tokio::time::sleep(GATHER).await;
            self.flush_all();
        }
    }

    /// Tells everything that is still gathered.
    pub(crate) fn flush_all(&self) {
        let open = std::mem::take(&mut *self.open.lock());
        for source in open {
            self.flush(&source);
        }
    }

    fn flush(&self, source: &Source) {
        let gathered = source.window.lock().close();
        for (note, count) in gathered {
            self.tell(source, note, count);
        }
    }

    fn tell(&self, source: &Source, note: Note, count: u64) {
        self.witness.saw(EgressEvent {
            sandbox: source.sandbox.clone(),
            project: source.project.clone(),
            at: now(),
            kind: note.kind,
            verdict: note.verdict,
            rule: note.rule,
            reason: note.reason,
            protocol: note.protocol,
            host: note.host,
            address: note.address,
            port: note.port,
            method: note.method,
            bytes_up: note.bytes_up,
            bytes_down: note.bytes_down,
            count,
        });
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        self.flush_all();
    }
}

pub(crate) fn now() -> Timestamp {
    let millis = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_millis());
    Timestamp(i64::try_from(millis).unwrap_or(i64::MAX))
}
