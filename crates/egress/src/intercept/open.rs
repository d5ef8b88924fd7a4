//! The requests that are under way on one connection, and whether they may still be.
//!
//! ```text
//!   admitted ── ticket: held by the request's body, its answer's body, its WebSocket ── the last one dropped: over
//!       │
//!       └── each change of policy or secrets, each expiry ── verdict ── no longer allowed: cut
//! ```
//! What must hold: a request is decided about and entered under one lock, and a change is looked at under the same lock
//! after it is in force. So no change falls between the decision and the opening: either the decision saw it, or the
//! review finds the request.

use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::future::Future;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use atoll_broker::Use;
use atoll_policy::Decision;
use atoll_types::Timestamp;
use hyper::Method;
use tokio::sync::Notify;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

/// All of one connection.
#[derive(Debug, Default)]
pub(super) struct Open {
    entries: Mutex<Entries>,
    /// Told when one was entered that ends at a time of its own.
    pub(super) entered: Notify,
}

#[derive(Debug, Default)]
struct Entries {
    last: u64,
    requests: HashMap<u64, Arc<Request>>,
}

/// What a request is decided by.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) method: Method,
    pub(super) path: String,
    address: Mutex<IpAddr>,
    pub(super) used: Vec<Use>,
    /// Whether its answer is searched for echoes.
    pub(super) redacted: bool,
    expires: Mutex<Option<Timestamp>>,
    cut: CancellationToken,
    why: Mutex<Option<Decision>>,
}

/// Keeps a request in the list. Cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct Ticket(Arc<Entered>);

#[derive(Debug)]
struct Entered {
    open: Arc<Open>,
    number: u64,
    request: Arc<Request>,
}

impl Request {
    pub(super) fn new(method: Method, path: String, address: IpAddr, used: Vec<Use>, redacted: bool) -> Self {
        Self {
            method,
            path,
            address: Mutex::new(address),
            used,
            redacted,
            expires: Mutex::new(None),
            cut: CancellationToken::new(),
            why: Mutex::new(None),
        }
    }

    pub(super) fn address(&self) -> IpAddr {
        *self.address.lock()
    }

    pub(super) fn move_to(&self, address: IpAddr) {
        *self.address.lock() = address;
    }

    pub(super) fn is_cut(&self) -> bool {
        self.cut.is_cancelled()
    }

    pub(super) fn cut(&self, why: Decision) {
        self.why.lock().get_or_insert(why);
        self.cut.cancel();
    }

    /// Then it is to be looked at again, whatever happens until then.
    pub(super) fn ends_at(&self, time: Option<Timestamp>) {
        *self.expires.lock() = time;
    }

    fn expires(&self) -> Option<Timestamp> {
        *self.expires.lock()
    }
}

impl Open {
    /// Nothing is entered and nothing reviewed while this is held.
    pub(super) fn hold(self: &Arc<Self>) -> Held<'_> {
        Held {
            open: self,
            entries: self.entries.lock(),
        }
    }

    /// When the first of them ends by itself.
    pub(super) fn deadline(&self) -> Option<Timestamp> {
        let entries = self.entries.lock();
        entries
            .requests
            .values()
            .filter(|request| !request.is_cut())
            .filter_map(|request| request.expires())
            .min()
    }
}

/// The list while it is held.
pub(super) struct Held<'a> {
    open: &'a Arc<Open>,
    entries: MutexGuard<'a, Entries>,
}

impl Held<'_> {
    pub(super) fn enter(&mut self, request: Request) -> Ticket {
        self.entries.last += 1;
        let number = self.entries.last;
        let request = Arc::new(request);
        if request.expires().is_some() {
            self.open.entered.notify_one();
        }
        self.entries.requests.insert(number, Arc::clone(&request));
        Ticket(Arc::new(Entered {
            open: Arc::clone(self.open),
            number,
            request,
        }))
    }

    pub(super) fn requests(&self) -> impl Iterator<Item = &Arc<Request>> {
        self.entries.requests.values()
    }
}

impl Ticket {
    pub(super) fn request(&self) -> &Request {
        &self.0.request
    }

    /// Completes when it is cut, with the reason.
    pub(super) async fn cut(&self) -> Option<Decision> {
        self.0.request.cut.cancelled().await;
        self.0.request.why.lock().clone()
    }

    pub(super) fn watched(&self) -> Watched {
        Watched {
            cut: Box::pin(self.0.request.cut.clone().cancelled_owned()),
            _ticket: self.clone(),
        }
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        self.open.entries.lock().requests.remove(&self.number);
    }
}

/// A ticket for something that is polled.
#[derive(Debug)]
pub(super) struct Watched {
    cut: Pin<Box<WaitForCancellationFutureOwned>>,
    _ticket: Ticket,
}

impl Watched {
    pub(super) fn poll_cut(&mut self, context: &mut Context<'_>) -> Poll<()> {
        self.cut.as_mut().poll(context)
    }
}
