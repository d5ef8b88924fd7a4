//! How much: connections at once, bytes each second, and budgets for the whole life of a sandbox.
//!
//! What must hold: a byte that a guest sends or gets is counted once, at the guest's side, before the next one is read;
//! so a budget can be overrun by what is under way in one turn of each flow, and by no more.

mod bucket;
mod metered;

use parking_lot::Mutex;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use atoll_policy::Decision;
use atoll_types::{EgressVerdict, NetworkLimits, ProjectId};
use tokio::time::Instant;

pub(crate) use bucket::Bucket;
pub(crate) use metered::Metered;

/// What a sandbox has used of its budgets.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Used {
    pub bytes: u64,
    pub connections: u64,
}

/// Why something is refused, in the words of the log: the rule and the reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exhausted {
    /// Too many at once.
    Connections(u64),
    TotalConnections(u64),
    TotalBytes(u64),
    /// To Atoll's own service, at once.
    Service(u64),
    /// Not the sandbox's fault: the host has no room, and others hold less.
    Host,
}

impl Exhausted {
    pub(crate) fn decision(self) -> Decision {
        Decision {
            verdict: EgressVerdict::Denied,
            rule: self.rule().into(),
            reason: self.reason(),
        }
    }

    fn rule(self) -> &'static str {
        match self {
            Self::Connections(_) => "limits.connections",
            Self::TotalConnections(_) => "limits.total_connections",
            Self::TotalBytes(_) => "limits.total_bytes",
            Self::Service(_) => "limits: service",
            Self::Host => "host: connections",
        }
    }

    pub(crate) fn reason(self) -> String {
        match self {
            Self::Connections(limit) => {
                format!("the sandbox has {limit} connections open, which is its limit; close some")
            }
            Self::TotalConnections(limit) => {
                format!("the sandbox has used its budget of {limit} connections; raise it to go on")
            }
            Self::TotalBytes(limit) => {
                format!("the sandbox has used its budget of {limit} bytes; raise it to go on")
            }
            Self::Service(limit) => {
                format!(
                    "the sandbox has {limit} connections to this service open, which is the limit; close some"
                )
            }
            Self::Host => {
                "the host has too many connections, and this sandbox or its project holds many of them; close some"
                    .to_owned()
            }
        }
    }
}

/// The limits of one sandbox and what it uses of them. Lives as long as the sandbox is admitted, over every change of
/// its policy.
#[derive(Debug)]
pub(crate) struct Allowance {
    limits: Mutex<NetworkLimits>,
    /// Where the policy says nothing, and at most.
    most_connections: usize,
    open: AtomicUsize,
    /// When the last one ended.
    last_ended: Mutex<Option<Instant>>,
    bytes: AtomicU64,
    connections: AtomicU64,
    bandwidth: Mutex<Option<Bucket>>,
}

impl Allowance {
    pub(crate) fn new(limits: NetworkLimits, used: Used, most_connections: usize) -> Self {
        let this = Self {
            limits: Mutex::new(limits),
            most_connections,
            open: AtomicUsize::new(0),
            last_ended: Mutex::new(None),
            bytes: AtomicU64::new(used.bytes),
            connections: AtomicU64::new(used.connections),
            bandwidth: Mutex::new(None),
        };
        this.set(limits);
        this
    }

    /// Takes new limits; what was used stays used.
    pub(crate) fn set(&self, limits: NetworkLimits) {
        *self.limits.lock() = limits;
        let mut bandwidth = self.bandwidth.lock();
        let rate = limits.bytes_per_second;
        if bandwidth.as_ref().map(Bucket::rate) != rate {
            *bandwidth = rate.map(Bucket::for_bandwidth);
        }
    }

    pub(crate) fn used(&self) -> Used {
        Used {
            bytes: self.bytes.load(Ordering::Relaxed),
            connections: self.connections.load(Ordering::Relaxed),
        }
    }

    /// How long it has had no connection open: no time at all while it has one, `None` if it never had.
    pub(crate) fn quiet_for(&self) -> Option<Duration> {
        match self.open.load(Ordering::Acquire) {
            0 => self.last_ended.lock().map(|at| at.elapsed()),
            _ => Some(Duration::ZERO),
        }
    }

    /// One more connection; it is open until the answer is dropped. `crowded` where the host is short of connections.
    pub(crate) fn open(self: &Arc<Self>, crowded: Option<usize>) -> Result<Opened, Exhausted> {
        let limits = *self.limits.lock();
        let at_once = limits.connections.map_or(self.most_connections, |limit| {
            self.most_connections.min(limit.try_into().unwrap_or(usize::MAX))
        });
        if limits.total_bytes.is_some_and(|limit| self.used().bytes >= limit) {
            return Err(Exhausted::TotalBytes(limits.total_bytes.unwrap_or_default()));
        }
        let opened = Opened(Arc::clone(self));
        let before = self.open.fetch_add(1, Ordering::Relaxed);
        if before >= at_once {
            return Err(Exhausted::Connections(at_once as u64));
        }
        if crowded.is_some_and(|share| before >= share) {
            return Err(Exhausted::Host);
        }
        let count = |total: u64| match limits.total_connections {
            Some(limit) if total >= limit => None,
            _ => Some(total + 1),
        };
        match self
            .connections
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, count)
        {
            Ok(_) => Ok(opened),
            Err(limit) => Err(Exhausted::TotalConnections(limit)),
        }
    }

    /// Counts `bytes`. The answer is the time before which no more may be moved.
    fn charge(&self, bytes: u64) -> Result<Option<Instant>, Exhausted> {
        let total = self
            .bytes
            .fetch_add(bytes, Ordering::Relaxed)
            .saturating_add(bytes);
        if let Some(limit) = self.limits.lock().total_bytes
            && total > limit
        {
            return Err(Exhausted::TotalBytes(limit));
        }
        Ok(self
            .bandwidth
            .lock()
            .as_mut()
            .and_then(|bucket| bucket.take(bytes, Instant::now())))
    }

    /// The most that should be moved in one turn, so that a narrow bandwidth is a steady trickle.
    fn turn(&self) -> usize {
        self.bandwidth.lock().as_ref().map_or(usize::MAX, |bucket| {
            usize::try_from(bucket.rate() / 8).unwrap_or(usize::MAX).max(512)
        })
    }
}

/// A connection that counts towards the limit until this is dropped.
#[derive(Debug)]
pub(crate) struct Opened(Arc<Allowance>);

impl Drop for Opened {
    fn drop(&mut self) {
        // Noted first: whoever sees that none is open sees when the last one ended.
        *self.0.last_ended.lock() = Some(Instant::now());
        self.0.open.fetch_sub(1, Ordering::Release);
    }
}

/// Counts the bytes of one flow, and holds it to its sandbox's bandwidth and budget.
#[derive(Debug, Clone)]
pub(crate) struct Meter(Arc<Counters>);

#[derive(Debug)]
struct Counters {
    allowance: Arc<Allowance>,
    up: AtomicU64,
    down: AtomicU64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    /// From the guest.
    Up,
    Down,
}

impl Meter {
    pub(crate) fn new(allowance: Arc<Allowance>) -> Self {
        Self(Arc::new(Counters {
            allowance,
            up: AtomicU64::new(0),
            down: AtomicU64::new(0),
        }))
    }

    /// Counts `bytes` that were moved. The answer is the time before which no more may be moved.
    pub(crate) fn count(&self, direction: Direction, bytes: usize) -> Result<Option<Instant>, Exhausted> {
        let counter = match direction {
            Direction::Up => &self.0.up,
            Direction::Down => &self.0.down,
        };
        counter.fetch_add(bytes as u64, Ordering::Relaxed);
        self.0.allowance.charge(bytes as u64)
    }

    /// The most that should be moved before the next [`Meter::count`].
    pub(crate) fn turn(&self) -> usize {
        self.0.allowance.turn()
    }

    pub(crate) fn up(&self) -> u64 {
        self.0.up.load(Ordering::Relaxed)
    }

    pub(crate) fn down(&self) -> u64 {
        self.0.down.load(Ordering::Relaxed)
    }

    pub(crate) fn wrap<S>(&self, stream: S) -> Metered<S> {
        Metered::new(stream, self.clone())
    }
}

/// Connections of all sandboxes together, and which projects they are of.
#[derive(Debug, Clone)]
pub(crate) struct Total(Arc<Places>);

#[derive(Debug)]
struct Places {
    size: usize,
    taken: Mutex<Taken>,
}

#[derive(Debug, Default)]
struct Taken {
    all: usize,
    projects: HashMap<ProjectId, usize>,
}

/// One place of a project, until it is dropped.
#[derive(Debug)]
pub(crate) struct Place {
    total: Total,
    project: ProjectId,
}

impl Total {
    pub(crate) fn new(size: usize) -> Self {
        Self(Arc::new(Places {
            size: size.max(1),
            taken: Mutex::default(),
        }))
    }

    /// A place for a connection. No project has more than half of them; and when three quarters are taken, those who have few
    /// still get some. So one project, however many sandboxes it has, does not shut out the others.
    pub(crate) fn place(&self, project: &ProjectId) -> Result<Place, Exhausted> {
        let Places { size, taken } = &*self.0;
        let mut taken = taken.lock();
        let of_project = taken.projects.get(project).copied().unwrap_or(0);
        let share = match taken.all >= size - size / 4 {
            true => size / 16,
            false => size / 2,
        };
        if taken.all >= *size || of_project >= share.max(1) {
            return Err(Exhausted::Host);
        }
        taken.all += 1;
        *taken.projects.entry(project.clone()).or_default() += 1;
        Ok(Place {
            total: self.clone(),
            project: project.clone(),
        })
    }

    /// Completes when nobody holds any place.
    #[cfg(test)]
    pub(crate) async fn empty(&self) {
        while self.0.taken.lock().all > 0 {
            tokio::task::yield_now().await;
        }
    }

    /// When three quarters are taken, the most that one sandbox may then open: a few greedy ones shall not shut out the
    /// others.
    pub(crate) fn crowded(&self) -> Option<usize> {
        let Places { size, taken } = &*self.0;
        (taken.lock().all > size - size / 4).then_some((size / 64).max(1))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = self.total.0.taken.lock();
        taken.all -= 1;
        if let Entry::Occupied(mut of_project) = taken.projects.entry(self.project.clone()) {
            *of_project.get_mut() -= 1;
            if *of_project.get() == 0 {
                of_project.remove();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allowance(limits: NetworkLimits) -> Arc<Allowance> {
        Arc::new(Allowance::new(limits, Used::default(), 4))
    }

    #[test]
    fn connections_at_once_are_bounded_by_the_policy_and_by_the_operator() {
        let own = allowance(NetworkLimits {
            connections: Some(2),
            ..NetworkLimits::default()
        });
        let first = own.open(None).unwrap();
        let _second = own.open(None).unwrap();
        assert_eq!(own.open(None).unwrap_err(), Exhausted::Connections(2));
        drop(first);
        assert!(own.open(None).is_ok());

        let greedy = allowance(NetworkLimits {
            connections: Some(1000),
            ..NetworkLimits::default()
        });
        let held: Vec<_> = std::iter::from_fn(|| greedy.open(None).ok()).collect();
        assert_eq!(held.len(), 4);
    }

    #[test]
    fn budgets_are_for_life_and_a_refused_connection_costs_nothing() {
        let allowance = allowance(NetworkLimits {
            total_connections: Some(2),
            total_bytes: Some(100),
            ..NetworkLimits::default()
        });
        drop(allowance.open(None).unwrap());
        drop(allowance.open(None).unwrap());
        assert_eq!(allowance.open(None).unwrap_err(), Exhausted::TotalConnections(2));
        assert_eq!(allowance.used().connections, 2);
        allowance.set(NetworkLimits {
            total_bytes: Some(100),
            ..NetworkLimits::default()
        });
        let meter = Meter::new(Arc::clone(&allowance));
        assert_eq!(meter.count(Direction::Up, 60), Ok(None));
        assert_eq!(meter.count(Direction::Down, 40), Ok(None));
        assert_eq!(allowance.open(None).unwrap_err(), Exhausted::TotalBytes(100));
        assert_eq!(meter.count(Direction::Up, 1), Err(Exhausted::TotalBytes(100)));
        assert_eq!((meter.up(), meter.down()), (61, 40));
    }

    #[test]
    fn when_the_host_is_crowded_those_who_hold_little_still_get_more() {
        let allowance = allowance(NetworkLimits::default());
        let _held = allowance.open(Some(1)).unwrap();
        assert_eq!(allowance.open(Some(1)).unwrap_err(), Exhausted::Host);
        assert!(allowance.open(None).is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn it_is_quiet_from_the_end_of_its_last_connection_on() {
        let allowance = allowance(NetworkLimits::default());
        assert_eq!(allowance.quiet_for(), None);
        let (first, second) = (allowance.open(None).unwrap(), allowance.open(None).unwrap());
        assert_eq!(allowance.quiet_for(), Some(Duration::ZERO));
        drop(second);
        let later = Duration::from_secs(5);
        tokio::time::advance(later).await;
        assert_eq!(allowance.quiet_for(), Some(Duration::ZERO), "one is open still");
        drop(first);
        tokio::time::advance(later).await;
        assert_eq!(allowance.quiet_for(), Some(later));
    }

    #[test]
    fn no_project_takes_the_places_of_others() {
        let project = |n: u8| ProjectId::from_entropy([n; 20]);
        let total = Total::new(64);
        let take = |n: u8| -> Vec<Place> { std::iter::from_fn(|| total.place(&project(n)).ok()).collect() };
        let greedy = take(1);
        assert_eq!(greedy.len(), 32);
        assert_eq!(total.crowded(), None);
        let second = take(2);
        assert_eq!(second.len(), 16, "then it is crowded");
        let few: Vec<_> = (3..7).map(take).collect();
        assert!(few.iter().all(|places| places.len() == 4), "{few:?}");
        assert_eq!(total.crowded(), Some(1));
        assert_eq!(take(8).len(), 0, "all are taken");
        drop((greedy, second, few));
        assert!(total.0.taken.lock().projects.is_empty());
        assert_eq!(total.0.taken.lock().all, 0);
        assert_eq!(Total::new(1).place(&project(1)).iter().count(), 1);
    }
}
