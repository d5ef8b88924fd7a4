//! One request on its way through an API: who pays for it, and what it holds.

use parking_lot::Mutex;
use std::fmt;
use std::sync::{Arc, OnceLock};

use atoll_identity::Caller;
use atoll_types::{Fault, KeyId, ProjectId, SandboxId};
use http::{Extensions, Request};
use http_body::Body;

use crate::body::{self, Held, Metered, Refused, Upload};
use crate::connections::Line;
use crate::download::Download;
use crate::memory::{Account, Permit};
use crate::{Front, Patience};

/// What the head of any request may take; more is paid for.
const USUAL_HEAD: u64 = 4 * 1024;

/// What the head of a request takes, about.
pub(crate) fn head_bytes<B>(request: &Request<B>) -> u64 {
    let headers = request.headers().iter();
    let headers = headers.map(|(name, value)| name.as_str().len() + value.len() + 32);
    let (path, query) = (request.uri().path(), request.uri().query().unwrap_or_default());
    (headers.sum::<usize>() + path.len() + query.len()) as u64
}

/// In the extensions of every request. Nobody outside can put one there; without one no body is read.
#[derive(Debug, Clone)]
pub struct Visit(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    front: Front,
    line: Option<Line>,
    account: OnceLock<Account>,
    /// What its head takes beyond [`USUAL_HEAD`], and the permit for it: parts of it live as long as the request does.
    head: u64,
    head_permit: OnceLock<Permit>,
    kept: Mutex<Vec<Permit>>,
    /// The keys and sessions that it was admitted with.
    used: Mutex<Vec<String>>,
}

impl Visit {
    pub(crate) fn new(front: Front, line: Option<Line>, head: u64) -> Self {
        if let Some(line) = &line {
            line.request_begins();
        }
        Self(Arc::new(Inner {
            front,
            line,
            account: OnceLock::new(),
            head: head.saturating_sub(USUAL_HEAD),
            head_permit: OnceLock::new(),
            kept: Mutex::default(),
            used: Mutex::default(),
        }))
    }

    /// That of a request.
    pub fn of(extensions: &Extensions) -> Result<Self, Fault> {
        let visit = extensions.get::<Self>().cloned();
        visit.ok_or_else(|| Refused::Unpaid.fault())
    }

    /// Who asks is known, and pays from here on: the first who is.
    pub fn admit(&self, project: &ProjectId, sandbox: Option<&SandboxId>) -> Result<(), Fault> {
        if let Some(line) = &self.0.line {
            line.known(project, sandbox)?;
        }
        self.pays(project, sandbox)
    }

    /// Also for the head, which is there already.
    fn pays(&self, project: &ProjectId, sandbox: Option<&SandboxId>) -> Result<(), Fault> {
        let account = || self.0.front.memory.account(project, sandbox);
        let account = self.0.account.get_or_init(account);
        if self.0.head > 0 && self.0.head_permit.get().is_none() {
            let mut permit = account.open();
            permit.grow(self.0.head)?;
            // Whoever was admitted by somebody else meanwhile has paid.
            let _ = self.0.head_permit.set(permit);
        }
        Ok(())
    }

    /// The same for whoever was let in; whoever comes with a key or in a session is let go when that ends.
    pub fn admit_caller(&self, caller: &Caller) -> Result<(), Fault> {
        if let Some(line) = &self.0.line {
            for id in caller
                .key()
                .map(KeyId::as_str)
                .into_iter()
                .chain(caller.session())
            {
                line.used(id)?;
                self.used().push(id.to_owned());
            }
        }
        self.admit(caller.project(), caller.sandbox())
    }

    /// For somebody who showed nothing, where a sandbox is open to everybody: its project pays for what is held, and the
    /// connection stays a stranger's.
    pub fn welcome(&self, project: &ProjectId, sandbox: &SandboxId) -> Result<(), Fault> {
        if let Some(line) = &self.0.line {
            line.visits(sandbox);
        }
        self.pays(project, Some(sandbox))
    }

    /// The sandbox by whose cable the request came.
    pub fn cable(&self) -> Option<&SandboxId> {
        self.0.line.as_ref().and_then(Line::cable)
    }

    /// A key was revoked: what is open with it ends.
    pub fn revoke(&self, key: &str) {
        let own = self.used().iter().filter(|used| *used == key).count();
        let by = self.0.line.as_ref().map(|line| (line, own));
        self.0.front.connections.revoke(key, by);
    }

    /// Reads a body of at most `limit` bytes, for whoever was admitted.
    pub async fn read<B>(&self, body: B, limit: usize) -> Result<Held, Refused>
    where
        B: Body,
        B::Error: fmt::Display,
    {
        let account = self.0.account.get().ok_or(Refused::Unpaid)?;
        body::read(body, limit, self.0.front.patience, account).await
    }

    /// The same for a reader that gathers messages by itself; `weigh` says what so many bytes cost it.
    pub fn meter<B>(&self, body: B, weigh: fn(u64) -> u64) -> Result<Metered<B>, Refused> {
        let account = self.0.account.get().ok_or(Refused::Unpaid)?;
        Ok(Metered::new(body, self.0.front.patience, account, weigh))
    }

    /// A body that is kept as it comes; it must keep coming.
    pub fn upload<B>(&self, body: B) -> Upload<B> {
        Upload::new(body, self.0.front.patience)
    }

    /// An answer whose maker holds a place meanwhile; whoever asks must keep reading it.
    pub fn download<S>(&self, bytes: S) -> Download<S> {
        Download::new(bytes, self.0.front.patience)
    }

    /// How long whoever asks is waited for.
    pub fn patience(&self) -> Patience {
        self.0.front.patience
    }

    /// The same payer, for what outlives the request and its connection.
    pub fn apart(&self) -> Self {
        let account = match self.0.account.get() {
            Some(account) => OnceLock::from(account.clone()),
            None => OnceLock::new(),
        };
        Self(Arc::new(Inner {
            front: self.0.front.clone(),
            line: None,
            account,
            head: 0,
            head_permit: OnceLock::new(),
            kept: Mutex::default(),
            used: Mutex::default(),
        }))
    }

    /// A permit for nothing yet.
    pub fn permit(&self) -> Result<Permit, Refused> {
        let account = self.0.account.get().ok_or(Refused::Unpaid)?;
        Ok(account.open())
    }

    /// Keeps a permit until what the request held is no longer needed: until its answer is there as a whole, or was written.
    pub fn keep(&self, permit: Permit) {
        self.kept().push(permit);
    }

    /// The answer is there: what the request held is no longer needed.
    pub fn answered(&self) {
        self.kept().clear();
    }

    fn used(&self) -> parking_lot::MutexGuard<'_, Vec<String>> {
        self.0.used.lock()
    }

    fn kept(&self) -> parking_lot::MutexGuard<'_, Vec<Permit>> {
        self.0.kept.lock()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Some(line) = &self.line {
            for id in self.used.get_mut() {
                line.unused(id);
            }
            line.request_ends();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Limits;

    #[tokio::test]
    async fn nobody_is_read_before_they_are_known() {
        let front = Front::new(Limits::for_machine(1 << 30, 1000));
        let visit = front.visit(None);
        let refused = visit.read("body".to_owned(), 100).await.unwrap_err();
        assert!(matches!(refused, Refused::Unpaid), "{refused}");
        visit.admit(&ProjectId::from_entropy([1; 20]), None).unwrap();
        let held = visit.read("body".to_owned(), 100).await.unwrap();
        assert_eq!(held.as_ref(), b"body");
        visit.keep(held.into_permit());
        assert!(front.memory.held() > 0);
        visit.answered();
        assert_eq!(front.memory.held(), 0);
    }

    #[test]
    fn a_large_head_is_paid_for_as_long_as_its_request_is_there() {
        const HEAD: u64 = 60_000;
        let front = Front::new(Limits::for_machine(1 << 30, 1000));
        let request = Request::get("/?x").header("large", "x".repeat(60_000)).body(());
        let head = head_bytes(&request.unwrap());
        assert!(head > HEAD);
        let project = ProjectId::from_entropy([1; 20]);
        let small = Visit::new(front.clone(), None, USUAL_HEAD);
        small.admit(&project, None).unwrap();
        assert_eq!(front.memory.held(), 0);
        let large = Visit::new(front.clone(), None, head);
        assert_eq!(front.memory.held(), 0, "nobody is known to pay");
        large.admit(&project, None).unwrap();
        large.admit(&project, None).unwrap();
        large.answered();
        assert_eq!(front.memory.held(), head - USUAL_HEAD);
        let mut refused = None;
        let many: Vec<_> = (0..10_000)
            .map(|_| Visit::new(front.clone(), None, head))
            .collect();
        for visit in &many {
            refused = visit.admit(&project, None).err().or(refused);
        }
        assert_eq!(refused.unwrap().code, atoll_types::Code::TooMuchBuffered);
        drop((large, many));
        assert_eq!(front.memory.held(), 0);
    }
}
