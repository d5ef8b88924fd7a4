//! Who is connected, and who has to leave when there are too many.
//!
//! A connection is a stranger's until a request on it was admitted; then it counts for whoever was admitted.
//!
//! What must hold:
//! - Strangers never take the places of those who are known, neither all places for strangers: when those are full, the stranger
//!   that came first is cut, first among those of the same origin.
//! - Whoever visits what a sandbox shows to everybody stays a stranger, and is not counted for its project: nobody is locked out
//!   of their own project by visitors.
//! - When the server is nearly full, those who have many connections get no more, so that others, and whoever runs the server,
//!   still come in.
//! - A key or session that was revoked ends the connections on which something is open with it, and no others: a proxy may
//!   have used one connection for many, one after the other. The request that revokes gets its answer first.

use parking_lot::{Mutex, MutexGuard};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::hash::Hash;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Weak};
use std::time::Duration;

use atoll_types::{Code, Fault, ProjectId, SandboxId};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::Patience;

/// How many connections there may be at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// In all.
    pub server: usize,
    /// Of those who have shown no key.
    pub strangers: usize,
    /// Of those, from one address (of IPv6, one network of 64 bits).
    pub address: usize,
    /// Of one project.
    pub project: usize,
    /// To, or from, one sandbox.
    pub sandbox: usize,
}

impl Limits {
    /// Half of a process's descriptors, at most so many as a large server needs.
    pub fn for_descriptors(descriptors: u64) -> Self {
        let half = usize::try_from(descriptors / 2).unwrap_or(usize::MAX);
        Self::within(half.clamp(64, 16 * 1024))
    }

    /// The same shares of another whole.
    pub fn within(server: usize) -> Self {
        let server = server.max(8);
        Self {
            server,
            strangers: server / 4,
            address: server / 8,
            project: server / 2,
            sandbox: server / 16,
        }
    }

    /// From so many known connections on, who has many gets no more.
    fn crowded(&self) -> usize {
        self.server - self.server / 4
    }

    /// Who has fewer still comes in then.
    fn small(&self) -> usize {
        (self.server / 16).max(1)
    }
}

/// Where a connection comes from.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Peer {
    Address(IpAddr),
    /// By the cable of a sandbox.
    Sandbox(SandboxId),
}

impl Peer {
    /// Who counts as one.
    fn origin(self) -> Self {
        match self {
            Self::Address(IpAddr::V6(address)) => match address.to_ipv4_mapped() {
                Some(address) => Self::Address(address.into()),
                None => {
                    let network = u128::from(address) & !u128::from(u64::MAX);
                    Self::Address(Ipv6Addr::from(network).into())
                }
            },
            other => other,
        }
    }
}

#[derive(Debug, Clone)]
pub struct Connections(Arc<Table>);

#[derive(Debug)]
struct Table {
    limits: Limits,
    patience: Patience,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    open: usize,
    /// By the order in which they came.
    strangers: BTreeMap<u64, (Peer, CancellationToken)>,
    of_origin: HashMap<Peer, BTreeSet<u64>>,
    of_project: HashMap<ProjectId, usize>,
    of_sandbox: HashMap<SandboxId, usize>,
    /// Strangers that visit a sandbox.
    visitors: HashMap<SandboxId, BTreeSet<u64>>,
    /// The connections that a key was used on lately.
    of_key: HashMap<String, BTreeMap<u64, Weak<Inner>>>,
    /// The last keys that were revoked: one may be looked up before that, and used on a connection after it.
    revoked: Revoked,
}

#[derive(Debug, Default)]
struct Revoked {
    keys: HashSet<String>,
    in_order: VecDeque<String>,
}

impl Revoked {
    fn add(&mut self, key: &str) {
        if !self.keys.insert(key.to_owned()) {
            return;
        }
        self.in_order.push_back(key.to_owned());
        if self.in_order.len() > REVOKED
            && let Some(first) = self.in_order.pop_front()
        {
            self.keys.remove(&first);
        }
    }
}

/// How many revoked keys are remembered: far more than are revoked while a request is being admitted.
const REVOKED: usize = 1024;
/// How long the answer to a revocation may take to be written, before what else is open on its connection ends.
const ANSWERED_WITHIN: Duration = Duration::from_secs(1);

impl State {
    fn cut(&mut self, id: u64) {
        if let Some((peer, cut)) = self.strangers.get(&id).cloned() {
            cut.cancel();
            self.forget_stranger(id, &peer);
        }
    }

    fn forget_visitor(&mut self, id: u64, sandbox: &SandboxId) {
        if let Some(ids) = self.visitors.get_mut(sandbox) {
            ids.remove(&id);
            if ids.is_empty() {
                self.visitors.remove(sandbox);
            }
        }
    }

    fn forget_key(&mut self, id: u64, key: &str) {
        if let Some(of_key) = self.of_key.get_mut(key) {
            of_key.remove(&id);
            if of_key.is_empty() {
                self.of_key.remove(key);
            }
        }
    }

    fn forget_stranger(&mut self, id: u64, peer: &Peer) -> bool {
        if let Some(ids) = self.of_origin.get_mut(peer) {
            ids.remove(&id);
            if ids.is_empty() {
                self.of_origin.remove(peer);
            }
        }
        self.strangers.remove(&id).is_some()
    }
}

impl Connections {
    pub fn new(limits: Limits, patience: Patience) -> Self {
        Self(Arc::new(Table {
            limits,
            patience,
            state: Mutex::default(),
        }))
    }

    /// Lets a connection in, in place of a stranger where need be. `None`: everybody who is here is known, and there is no room.
    pub fn admit(&self, peer: Peer) -> Option<Line> {
        let (limits, peer) = (self.0.limits, peer.origin());
        let mut state = self.lock();
        let of_peer = match &peer {
            Peer::Address(_) => limits.address,
            Peer::Sandbox(_) => limits.sandbox,
        };
        let oldest_of_peer = state
            .of_origin
            .get(&peer)
            .filter(|ids| ids.len() >= of_peer)
            .and_then(|ids| ids.first().copied());
        if let Some(oldest) = oldest_of_peer {
            state.cut(oldest);
        }
        // Those that were cut are open until they notice, so that `open` may be too large for a moment and never too small.
        if state.strangers.len() >= limits.strangers || state.open >= limits.server {
            let oldest = state.strangers.keys().next().copied();
            if let Some(oldest) = oldest {
                state.cut(oldest);
            } else if state.open >= limits.server {
                return None;
            }
        }
        let id = state.next;
        state.next += 1;
        state.open += 1;
        let cut = CancellationToken::new();
        state.strangers.insert(id, (peer.clone(), cut.clone()));
        state.of_origin.entry(peer.clone()).or_default().insert(id);
        drop(state);
        Some(Line(Arc::new(Inner {
            table: self.clone(),
            id,
            peer,
            cut,
            watch: Mutex::new(Watch {
                opened: Instant::now(),
                last: Instant::now(),
                begun: false,
                over: false,
                active: 0,
                head_since: None,
            }),
            payer: Mutex::default(),
            visited: Mutex::default(),
            keys: Mutex::default(),
        })))
    }

    /// A key opens nothing any longer: connections end on which something is open with it. Where nothing is, they stay: the
    /// next request with it is refused like any other. `by` is the connection of the request that revokes, and how often that
    /// request itself has used the key: if nothing else is open with it there, that connection stays too, and if something is,
    /// it ends when the answer has been written.
    pub fn revoke(&self, key: &str, by: Option<(&Line, usize)>) {
        let used = {
            let mut state = self.lock();
            state.revoked.add(key);
            state.of_key.remove(key).unwrap_or_default()
        };
        for line in used.into_values().filter_map(|line| line.upgrade()).map(Line) {
            let uses = line.forget(key);
            let own = by.filter(|(by, _)| by.0.id == line.0.id);
            match own {
                _ if line.watch().over => line.0.cut.cancel(),
                None if uses > 0 => line.0.cut.cancel(),
                Some((_, own)) if uses > own => {
                    let cut = line.0.cut.clone();
                    tokio::spawn(async move {
                        tokio::time::sleep(ANSWERED_WITHIN).await;
                        cut.cancel();
                    });
                }
                _ => {}
            }
        }
    }

    /// How many are open, and how many of those are strangers'.
    pub fn count(&self) -> (usize, usize) {
        let state = self.lock();
        (state.open, state.strangers.len())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock()
    }
}

/// One connection, for as long as anybody has it.
#[derive(Debug, Clone)]
pub struct Line(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    table: Connections,
    id: u64,
    peer: Peer,
    cut: CancellationToken,
    watch: Mutex<Watch>,
    payer: Mutex<Option<(ProjectId, Option<SandboxId>)>>,
    visited: Mutex<Option<SandboxId>>,
    /// Those that were used on it, and by how many requests that are not over.
    keys: Mutex<BTreeMap<String, usize>>,
}

/// What is waited for.
#[derive(Debug)]
struct Watch {
    opened: Instant,
    /// When the last request ended.
    last: Instant,
    /// Whether there was a request.
    begun: bool,
    /// It is no longer HTTP.
    over: bool,
    /// Requests that are being answered.
    active: usize,
    /// When the first byte of a head came that is not whole yet.
    head_since: Option<Instant>,
}

impl Line {
    /// Cancelled when the connection has to end.
    pub fn cut(&self) -> &CancellationToken {
        &self.0.cut
    }

    /// The sandbox by whose cable it came. Nothing that anybody says makes it another.
    pub fn cable(&self) -> Option<&SandboxId> {
        match &self.0.peer {
            Peer::Sandbox(sandbox) => Some(sandbox),
            Peer::Address(_) => None,
        }
    }

    /// Counts the connection for whoever is known by now; the first who is.
    pub fn known(&self, project: &ProjectId, sandbox: Option<&SandboxId>) -> Result<(), Fault> {
        let mut payer = self.0.payer.lock();
        if payer.is_some() {
            return Ok(());
        }
        let limits = self.0.table.0.limits;
        let mut state = self.0.table.lock();
        let of_sandbox = sandbox.and_then(|id| state.of_sandbox.get(id).copied());
        if of_sandbox.unwrap_or(0) >= limits.sandbox && sandbox.is_some() {
            return Err(too_many("this sandbox", limits.sandbox));
        }
        let of_project = state.of_project.get(project).copied().unwrap_or(0);
        if of_project >= limits.project {
            return Err(too_many("this project", limits.project));
        }
        let known = state.open.saturating_sub(state.strangers.len());
        if known >= limits.crowded() && of_project >= limits.small() {
            return Err(Fault::new(
                Code::ServerCrowded,
                format!(
                    "the server has {known} connections, and keeps the rest for projects with fewer than {}",
                    limits.small()
                ),
            )
            .hint("close some, or use one for several requests"));
        }
        if !state.forget_stranger(self.0.id, &self.0.peer) {
            return Err(Fault::new(
                Code::ServerBusy,
                "this connection was given up for others that came later",
            )
            .hint("connect again"));
        }
        *state.of_project.entry(project.clone()).or_default() += 1;
        if let Some(sandbox) = sandbox {
            *state.of_sandbox.entry(sandbox.clone()).or_default() += 1;
        }
        *payer = Some((project.clone(), sandbox.cloned()));
        Ok(())
    }

    /// Notes which key a request on this connection was admitted with, until it is [`Line::unused`].
    pub fn used(&self, key: &str) -> Result<(), Fault> {
        let mut keys = self.0.keys();
        if let Some(uses) = keys.get_mut(key) {
            *uses += 1;
            return Ok(());
        }
        let mut state = self.0.table.lock();
        if state.revoked.keys.contains(key) {
            return Err(Fault::new(Code::InvalidKey, "this API key was revoked"));
        }
        // What others used before, who came by the same proxy for instance.
        keys.retain(|before, uses| {
            if *uses == 0 {
                state.forget_key(self.0.id, before);
            }
            *uses > 0
        });
        let of_key = state.of_key.entry(key.to_owned()).or_default();
        of_key.insert(self.0.id, Arc::downgrade(&self.0));
        keys.insert(key.to_owned(), 1);
        Ok(())
    }

    /// A request is over that has used this key. The key stays known here until another comes: what was a request may have
    /// become something else, which is open with it.
    pub fn unused(&self, key: &str) {
        if let Some(uses) = self.0.keys().get_mut(key) {
            *uses = uses.saturating_sub(1);
        }
    }

    /// Says how many requests used it.
    fn forget(&self, key: &str) -> usize {
        self.0.keys().remove(key).unwrap_or(0)
    }

    /// Comes for what a sandbox shows to everybody. Of too many such visitors of one sandbox, the first is cut.
    pub fn visits(&self, sandbox: &SandboxId) {
        let payer = self.0.payer.lock();
        let mut visited = self.0.visited.lock();
        if payer.is_some() || visited.as_ref() == Some(sandbox) {
            return;
        }
        let most = self.0.table.0.limits.sandbox;
        let mut state = self.0.table.lock();
        if let Some(before) = visited.replace(sandbox.clone()) {
            state.forget_visitor(self.0.id, &before);
        }
        let visitors = state.visitors.entry(sandbox.clone()).or_default();
        let first = (visitors.len() >= most).then(|| visitors.pop_first()).flatten();
        visitors.insert(self.0.id);
        if let Some(first) = first {
            state.cut(first);
        }
    }

    /// What was HTTP has become something else, of which no heads are expected.
    pub fn no_more_heads(&self) {
        self.watch().over = true;
    }

    /// Done once no request has been on the connection for so long.
    pub async fn idle_for(&self, time: Duration) {
        loop {
            let until = {
                let watch = self.watch();
                match watch.active {
                    0 => watch.last.max(watch.opened) + time,
                    _ => Instant::now() + time,
                }
            };
            if until <= Instant::now() {
                return;
            }
            tokio::time::sleep_until(until).await;
        }
    }

    pub(crate) fn request_begins(&self) {
        let mut watch = self.watch();
        watch.begun = true;
        watch.active += 1;
        watch.head_since = None;
    }

    pub(crate) fn request_ends(&self) {
        let mut watch = self.watch();
        watch.active = watch.active.saturating_sub(1);
        watch.last = Instant::now();
    }

    pub(crate) fn bytes_came(&self) {
        let mut watch = self.watch();
        if watch.active == 0 && watch.head_since.is_none() && !watch.over {
            watch.head_since = Some(Instant::now());
        }
    }

    /// How long whoever does not read is waited for.
    pub(crate) fn write_patience(&self) -> Duration {
        self.0.table.0.patience.stream
    }

    /// Until when the head has to be whole. On connections of HTTP/2 bytes come that belong to no request.
    pub(crate) fn head_deadline(&self, is_http1: bool) -> Option<Instant> {
        let watch = self.watch();
        let since = match watch.begun {
            _ if watch.over => None,
            false => Some(watch.opened),
            true => watch.head_since.filter(|_| is_http1 && watch.active == 0),
        };
        Some(since? + self.0.table.0.patience.head)
    }

    fn watch(&self) -> MutexGuard<'_, Watch> {
        self.0.watch.lock()
    }
}

impl Inner {
    fn keys(&self) -> MutexGuard<'_, BTreeMap<String, usize>> {
        self.keys.lock()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let payer = self.payer.get_mut().take();
        let visited = self.visited.get_mut();
        let keys = self.keys.get_mut();
        let mut state = self.table.lock();
        state.open = state.open.saturating_sub(1);
        if let Some(sandbox) = visited.take() {
            state.forget_visitor(self.id, &sandbox);
        }
        for key in std::mem::take(keys).into_keys() {
            state.forget_key(self.id, &key);
        }
        match payer {
            None => drop(state.forget_stranger(self.id, &self.peer)),
            Some((project, sandbox)) => {
                one_less(&mut state.of_project, &project);
                if let Some(sandbox) = sandbox {
                    one_less(&mut state.of_sandbox, &sandbox);
                }
            }
        }
    }
}

fn one_less<K: Hash + Eq>(counts: &mut HashMap<K, usize>, who: &K) {
    if let Some(count) = counts.get_mut(who) {
        *count = count.saturating_sub(1);
        if *count == 0 {
            counts.remove(who);
        }
    }
}

fn too_many(who: &str, limit: usize) -> Fault {
    Fault::new(
        Code::TooManyConnections,
        format!("{who} has {limit} connections to this server, and may have no more"),
    )
    .hint("close some, or use one for several requests; who runs the server sets this in `[limits]`")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connections() -> Connections {
        let limits = Limits {
            server: 8,
            strangers: 4,
            address: 3,
            project: 4,
            sandbox: 2,
        };
        Connections::new(limits, Patience::default())
    }

    fn from(n: u8) -> Peer {
        Peer::Address(IpAddr::from([10, 0, 0, n]))
    }

    fn project(n: u8) -> ProjectId {
        ProjectId::from_entropy([n; 20])
    }

    #[tokio::test]
    async fn the_oldest_stranger_gives_way() {
        let connections = connections();
        let first: Vec<Line> = (0..3).map(|_| connections.admit(from(1)).unwrap()).collect();
        // A fourth from there: the first of them goes.
        let fourth = connections.admit(from(1)).unwrap();
        let cut = |lines: &[Line]| {
            lines
                .iter()
                .map(|line| line.cut().is_cancelled())
                .collect::<Vec<_>>()
        };
        assert_eq!(cut(&first), [true, false, false]);
        // From elsewhere there is one place, then the oldest of all goes.
        let others: Vec<Line> = (2..4).map(|n| connections.admit(from(n)).unwrap()).collect();
        assert_eq!(cut(&first), [true, true, false]);
        assert_eq!(cut(&others), [false, false]);
        assert_eq!(connections.count().1, 4);
        drop((first, fourth, others));
        assert_eq!(connections.count(), (0, 0));
        assert!(connections.lock().of_origin.is_empty());
    }

    #[tokio::test]
    async fn who_is_known_stays_and_is_counted() {
        let connections = connections();
        let known: Vec<Line> = (0..8)
            .map(|n| {
                let line = connections.admit(from(n)).unwrap();
                line.known(&project(n), None).unwrap();
                line
            })
            .collect();
        assert!(connections.admit(from(9)).is_none());
        assert!(known.iter().all(|line| !line.cut().is_cancelled()));
        drop(known);
        let sandbox = SandboxId::from_entropy([1; 20]);
        let mut lines = Vec::new();
        for expected in [true, true, false] {
            let line = connections.admit(Peer::Sandbox(sandbox.clone())).unwrap();
            assert_eq!(line.known(&project(1), Some(&sandbox)).is_ok(), expected);
            lines.push(line);
        }
        drop(lines);
        assert!(connections.lock().of_sandbox.is_empty() && connections.lock().of_project.is_empty());
    }

    #[tokio::test]
    async fn who_has_few_comes_in_when_others_have_nearly_all() {
        let limits = Limits {
            address: 64,
            ..Limits::within(64)
        };
        let connections = Connections::new(limits, Patience::default());
        let known = |of: u8| {
            let line = connections.admit(from(of)).unwrap();
            line.known(&project(of), None).map(|()| line)
        };
        let mut lines: Vec<Line> = (0..32).map(|_| known(1).unwrap()).collect();
        lines.extend((0..16).map(|_| known(2).unwrap()));
        assert_eq!(known(2).unwrap_err().code, Code::ServerCrowded);
        lines.extend((0..4).map(|_| known(3).unwrap()));
        assert_eq!(known(3).unwrap_err().code, Code::ServerCrowded);
    }

    #[tokio::test]
    async fn visitors_of_a_sandbox_are_strangers_and_give_way_to_each_other() {
        let connections = connections();
        let sandbox = SandboxId::from_entropy([1; 20]);
        let lines: Vec<Line> = (0..3)
            .map(|n| {
                let line = connections.admit(from(n)).unwrap();
                line.visits(&sandbox);
                line.visits(&sandbox);
                line
            })
            .collect();
        let cut: Vec<bool> = lines.iter().map(|line| line.cut().is_cancelled()).collect();
        assert_eq!(cut, [true, false, false]);
        assert!(connections.lock().of_project.is_empty(), "nobody's project pays");
        let owner = connections.admit(from(9)).unwrap();
        owner.known(&project(1), Some(&sandbox)).unwrap();
        drop(lines);
        assert!(connections.lock().visitors.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_revoked_key_ends_what_it_opened() {
        let connections = connections();
        let lines: Vec<Line> = (0..5)
            .map(|n| {
                let line = connections.admit(from(n)).unwrap();
                line.used("key_1").unwrap();
                line
            })
            .collect();
        let [_open, idle, upgraded, own, shared] = [0, 1, 2, 3, 4].map(|n| &lines[n]);
        // Over HTTP/2 a key is used by several requests at once.
        own.used("key_1").unwrap();
        idle.unused("key_1");
        upgraded.unused("key_1");
        upgraded.no_more_heads();
        // A proxy's connection, on which somebody else asks for something now.
        shared.unused("key_1");
        shared.used("key_2").unwrap();
        connections.revoke("key_1", Some((own, 1)));
        let cut = || {
            lines
                .iter()
                .map(|line| line.cut().is_cancelled())
                .collect::<Vec<_>>()
        };
        assert_eq!(cut(), [true, false, true, false, false]);
        // The answer has been written: what else was open there ends.
        tokio::time::sleep(ANSWERED_WITHIN * 2).await;
        assert_eq!(cut(), [true, false, true, true, false]);
        // Whoever was looked up before it was revoked does not come in after.
        assert_eq!(shared.used("key_1").unwrap_err().code, Code::InvalidKey);
        drop(lines);
        assert!(connections.lock().of_key.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn who_revokes_gets_an_answer_and_keys_of_others_are_forgotten() {
        let connections = connections();
        let line = connections.admit(from(1)).unwrap();
        for key in ["a", "b", "c"] {
            line.used(key).unwrap();
            line.unused(key);
        }
        assert_eq!(connections.lock().of_key.keys().collect::<Vec<_>>(), ["c"]);
        line.used("c").unwrap();
        connections.revoke("c", Some((&line, 1)));
        tokio::time::sleep(ANSWERED_WITHIN * 2).await;
        assert!(!line.cut().is_cancelled());
        // Only the last ones are remembered.
        for n in 0..=REVOKED {
            connections.revoke(&n.to_string(), None);
        }
        assert_eq!(connections.lock().revoked.keys.len(), REVOKED);
        assert!(line.used("c").is_ok());
    }

    #[tokio::test]
    async fn a_connection_that_was_cut_is_nobodys() {
        let connections = connections();
        let first = connections.admit(from(1)).unwrap();
        let _others: Vec<Line> = (0..3).map(|_| connections.admit(from(1)).unwrap()).collect();
        assert!(first.cut().is_cancelled());
        assert_eq!(first.known(&project(1), None).unwrap_err().code, Code::ServerBusy);
    }

    #[test]
    fn a_network_of_ipv6_is_one_origin() {
        let origin = |text: &str| Peer::Address(text.parse().unwrap()).origin();
        assert_eq!(origin("2001:db8::1"), origin("2001:db8::ffff:2"));
        assert_ne!(origin("2001:db8::1"), origin("2001:db8:0:1::1"));
        assert_eq!(origin("::ffff:10.0.0.1"), from(1));
    }

    #[tokio::test(start_paused = true)]
    async fn a_head_has_its_time() {
        let connections = connections();
        let head = Patience::default().head;
        let line = connections.admit(from(1)).unwrap();
        let opened = Instant::now();
        assert_eq!(line.head_deadline(true), Some(opened + head));
        line.bytes_came();
        line.request_begins();
        assert_eq!(line.head_deadline(true), None);
        // The body of that request.
        line.bytes_came();
        line.request_ends();
        assert_eq!(line.head_deadline(true), None, "it may be idle");
        tokio::time::advance(head).await;
        line.bytes_came();
        tokio::time::advance(head / 2).await;
        line.bytes_came();
        assert_eq!(line.head_deadline(true), Some(opened + head * 2));
        assert_eq!(line.head_deadline(false), None, "a ping begins no request");
        line.no_more_heads();
        assert_eq!(line.head_deadline(true), None);
    }
}
