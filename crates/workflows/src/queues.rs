//! Task queues: what waits for a worker, and the workers that wait.
//!
//! A queue is memory only. What is on it follows from the states of runs, so a restart fills it again; and whoever takes a
//! task asks its run whether it still stands, so a task that is there twice or too late does no harm.
//!
//! What must hold:
//! - A task is handed to a poll that somebody still listens to, or it stays.
//! - A poll that waits costs nothing. What a slow queue hands out is timed for the queue, once, and not for each poll.
//! - A namespace waits for no other one, and has no more queues than it has tasks and polls, but for some that were asked for lately.

use parking_lot::{Mutex, MutexGuard};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use atoll_workflow_core::Nanos;
use tokio::sync::oneshot;

use crate::cells::Key;
use crate::namespaces::Hold;

/// A worker that has not asked for this long is not there any more.
const STICKY_GONE: Duration = Duration::from_secs(10);
/// Workers are listed for this long after they last asked.
const POLLER_SHOWN: Duration = Duration::from_secs(300);
/// How many workers of a queue are listed.
const MOST_POLLERS: usize = 1_000;
/// How many queues of a namespace are remembered on which nothing is and for which nobody waits: anybody may name any number.
const MOST_REMEMBERED: usize = 2_000;
/// How many workers of a project are remembered to have stopped. One that is not waits for its last poll to end by itself.
pub(crate) const MOST_STOPPED: usize = 2_000;
/// How many polls of a project may wait.
pub(crate) const MOST_WAITING: usize = 10_000;
/// Of one queue, so many polls that nobody listens to any more do no harm.
const UNHEARD: usize = 64;
/// The slowest that a queue is timed at.
const SLOWEST: f64 = 0.001;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    Workflow,
    Activity,
    /// Polled by workers that have handlers for Nexus. Nobody can call those here, so nothing is ever put there.
    Nexus,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct QueueKey {
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) kind: Kind,
}

/// Something for a worker: a reference into a run.
#[derive(Debug, Clone)]
pub(crate) struct Task {
    pub(crate) key: Key,
    pub(crate) run_id: String,
    pub(crate) what: What,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum What {
    Workflow { stamp: i64, sticky: bool },
    Activity { scheduled_id: i64, stamp: i64 },
    Query { id: String, sticky: bool },
}

#[derive(Debug, Default)]
struct Queue {
    tasks: VecDeque<(Instant, Task)>,
    waiting: VecDeque<Waiting>,
    pollers: HashMap<String, Poller>,
    last_poll: Option<Instant>,
    /// Its worker has said that it leaves.
    left: bool,
    /// At most this many tasks per second, as its workers ask for.
    rate: Option<f64>,
    next_at: Option<Instant>,
    /// Somebody waits for that time.
    is_timed: bool,
    /// Those who wait are looked through when they are more than this.
    look_at: usize,
}

impl Queue {
    /// Forgets polls that nobody listens to, now and then.
    fn clear(&mut self) {
        if self.waiting.len() > self.look_at.max(UNHEARD) {
            self.waiting.retain(|waiting| !waiting.give.is_closed());
            self.look_at = self.waiting.len() * 2;
        }
    }

    fn is_used(&self) -> bool {
        !self.tasks.is_empty() || self.is_heard()
    }

    fn is_heard(&self) -> bool {
        self.waiting.iter().any(|waiting| !waiting.give.is_closed())
    }

    /// When it may hand something out; never if nothing may be.
    fn opens(&self, now: Instant) -> Option<Instant> {
        match self.rate {
            Some(rate) if rate <= 0.0 => None,
            Some(_) => Some(self.next_at.unwrap_or(now)),
            None => Some(now),
        }
    }

    /// Counts what is handed out.
    fn given(&mut self, now: Instant) {
        if let Some(rate) = self.rate {
            self.next_at = Some(now + Duration::from_secs_f64(1.0 / rate.max(SLOWEST)));
        }
    }

    /// Hands a task to the first who listens; it comes back if nobody does.
    fn give(&mut self, mut task: Task) -> Option<Task> {
        while let Some(waiting) = self.waiting.pop_front() {
            match waiting.give.send(Some(task)) {
                Ok(()) => return None,
                // Nobody listens any more.
                Err(Some(back)) => task = back,
                Err(None) => return None,
            }
        }
        Some(task)
    }

    /// Hands out what may be by now. The time is given when to go on, if there is more to do.
    fn hand_out(&mut self) -> Option<Instant> {
        while !self.tasks.is_empty() && self.is_heard() {
            let now = Instant::now();
            let opens = self.opens(now)?;
            if opens > now {
                return Some(opens);
            }
            let (at, task) = self.tasks.pop_front()?;
            match self.give(task) {
                None => self.given(now),
                Some(task) => self.tasks.push_front((at, task)),
            }
        }
        None
    }
}

#[derive(Debug)]
struct Waiting {
    give: oneshot::Sender<Option<Task>>,
    worker: String,
}

#[derive(Debug, Clone)]
pub(crate) struct Poller {
    pub(crate) at: Nanos,
    pub(crate) rate: f64,
    seen: Instant,
}

/// What a queue looks like from outside.
#[derive(Debug, Clone, Default)]
pub(crate) struct Sight {
    pub(crate) pollers: Vec<(String, Poller)>,
    pub(crate) backlog: usize,
    pub(crate) oldest: Duration,
}

/// Who asks.
#[derive(Debug, Clone, Default)]
pub(crate) struct Asking {
    pub(crate) identity: String,
    pub(crate) worker: String,
    pub(crate) now: Nanos,
    pub(crate) rate: Option<f64>,
}

/// The queues of one namespace.
#[derive(Debug, Default)]
struct Lines {
    queues: HashMap<(String, Kind), Queue>,
    /// They are looked through when they are more than this.
    look_at: usize,
}

impl Lines {
    fn get(&mut self, key: &QueueKey) -> Option<&mut Queue> {
        self.queues.get_mut(&(key.name.clone(), key.kind))
    }

    fn get_or_make(&mut self, key: &QueueKey) -> &mut Queue {
        if self.queues.len() > self.look_at.max(MOST_REMEMBERED) {
            self.forget_unused();
        }
        self.queues.entry((key.name.clone(), key.kind)).or_default()
    }

    /// Forgets half of those that may be remembered, those first that were asked for longest ago.
    fn forget_unused(&mut self) {
        let unused = self.queues.iter().filter(|(_, queue)| !queue.is_used());
        let mut unused: Vec<_> = unused
            .map(|(name, queue)| (queue.last_poll, name.clone()))
            .collect();
        unused.sort_unstable_by_key(|(last_poll, _)| std::cmp::Reverse(*last_poll));
        for (_, name) in unused.drain(..).skip(MOST_REMEMBERED / 2) {
            self.queues.remove(&name);
        }
        self.look_at = self.queues.len() + MOST_REMEMBERED / 2;
    }

    /// Forgets what has not been asked for in a long time.
    fn sweep(&mut self) {
        self.queues.retain(|_, queue| {
            queue.waiting.retain(|waiting| !waiting.give.is_closed());
            queue.is_used() || queue.last_poll.is_some_and(|at| at.elapsed() < POLLER_SHOWN)
        });
        self.look_at = 0;
    }
}

#[derive(Debug, Default, Clone)]
pub(crate) struct Queues {
    /// By namespace. Its own lock is taken alone, so that nobody waits here for what is done in another namespace.
    all: Arc<Mutex<HashMap<String, Arc<Mutex<Lines>>>>>,
    /// Workers that have said that they stop, by namespace and their own name. Some ask once more afterwards, and would wait
    /// for the answer.
    stopped: Arc<Mutex<HashMap<String, HashMap<String, Instant>>>>,
    /// How many polls of a namespace wait.
    polls: Arc<Mutex<HashMap<String, usize>>>,
}

impl Queues {
    /// Those of a namespace.
    fn of(&self, namespace: &str) -> Arc<Mutex<Lines>> {
        let mut all = self.all.lock();
        match all.get(namespace) {
            Some(lines) => Arc::clone(lines),
            None => Arc::clone(all.entry(namespace.to_owned()).or_default()),
        }
    }

    /// The same if there are any.
    fn known(&self, namespace: &str) -> Option<Arc<Mutex<Lines>>> {
        self.all.lock().get(namespace).cloned()
    }

    pub(crate) fn push(&self, key: &QueueKey, task: Task) {
        self.put(key, task, false);
    }

    /// Puts a task back that could not be taken.
    pub(crate) fn put_back(&self, key: &QueueKey, task: Task) {
        self.put(key, task, true);
    }

    fn put(&self, key: &QueueKey, task: Task, front: bool) {
        let lines = self.of(&key.namespace);
        let mut lines = lines.lock();
        let queue = lines.get_or_make(key);
        let task = match queue.rate {
            None => queue.give(task),
            Some(_) => Some(task),
        };
        let Some(task) = task else { return };
        if front {
            queue.tasks.push_front((Instant::now(), task));
        } else {
            queue.tasks.push_back((Instant::now(), task));
        }
        self.time(key, queue);
    }

    /// Hands out what a slow queue may, and sees to it that somebody goes on when it may again.
    fn time(&self, key: &QueueKey, queue: &mut Queue) {
        if queue.rate.is_none() || queue.is_timed {
            return;
        }
        let Some(at) = queue.hand_out() else { return };
        // Without a runtime everything ends.
        let Ok(runtime) = tokio::runtime::Handle::try_current() else {
            return;
        };
        queue.is_timed = true;
        let (queues, key) = (self.clone(), key.clone());
        runtime.spawn(async move {
            let mut at = Some(at);
            while let Some(next) = at {
                tokio::time::sleep_until(next.into()).await;
                let Some(lines) = queues.known(&key.namespace) else {
                    return;
                };
                let mut lines = lines.lock();
                let Some(queue) = lines.get(&key) else { return };
                at = queue.hand_out();
                queue.is_timed = at.is_some();
            }
        });
    }

    /// The next task of the queue; `None` when the time is up, the worker leaves or the namespace ends. Cancel-safe: a task
    /// that was given to a poll which is dropped goes back.
    pub(crate) async fn poll(
        &self,
        inside: &Hold,
        key: &QueueKey,
        asking: &Asking,
        wait: Duration,
    ) -> Option<Task> {
        tokio::select! {
            task = self.take(key, asking, wait) => task,
            () = inside.ending() => None,
        }
    }

    async fn take(&self, key: &QueueKey, asking: &Asking, wait: Duration) -> Option<Task> {
        let deadline = Instant::now() + wait;
        if self.has_stopped(&key.namespace, &asking.worker) {
            return None;
        }
        let _counted = Counted::new(self, &key.namespace);
        let mut seat = Seat {
            queues: self,
            key,
            receiver: Some(self.join(key, asking)),
        };
        // It may have stopped before it was in the line to be told.
        if self.has_stopped(&key.namespace, &asking.worker) {
            return None;
        }
        let receiver = seat.receiver.as_mut()?;
        let answer = tokio::time::timeout_at(deadline.into(), receiver).await;
        let task = answer.ok()?.ok()?;
        seat.receiver = None;
        task
    }

    /// Takes a task at once, or a place in the line.
    fn join(&self, key: &QueueKey, asking: &Asking) -> oneshot::Receiver<Option<Task>> {
        let lines = self.of(&key.namespace);
        let mut lines = lines.lock();
        let queue = lines.get_or_make(key);
        let now = Instant::now();
        queue.last_poll = Some(now);
        queue.left = false;
        queue.rate = asking.rate.or(queue.rate);
        if queue.pollers.len() > 64 {
            queue.pollers.retain(|_, poller| poller.seen + POLLER_SHOWN > now);
        }
        if queue.pollers.len() < MOST_POLLERS || queue.pollers.contains_key(&asking.identity) {
            queue.pollers.insert(
                asking.identity.clone(),
                Poller {
                    at: asking.now,
                    rate: asking.rate.unwrap_or(100_000.0),
                    seen: now,
                },
            );
        }
        let (give, receiver) = oneshot::channel();
        queue.clear();
        queue.waiting.push_back(Waiting {
            give,
            worker: asking.worker.clone(),
        });
        if queue.rate.is_none() {
            queue.hand_out();
        } else {
            self.time(key, queue);
        }
        receiver
    }

    /// How many polls wait, by namespace.
    pub(crate) fn waiting(&self) -> MutexGuard<'_, HashMap<String, usize>> {
        self.polls.lock()
    }

    /// Whether the worker of a sticky queue may be expected to take a task.
    pub(crate) fn is_alive(&self, key: &QueueKey) -> bool {
        let Some(lines) = self.known(&key.namespace) else {
            return false;
        };
        let mut lines = lines.lock();
        let Some(queue) = lines.get(key) else {
            return false;
        };
        if queue.left {
            return false;
        }
        queue.is_heard() || queue.last_poll.is_some_and(|at| at.elapsed() < STICKY_GONE)
    }

    /// The worker of a sticky queue leaves: its tasks go elsewhere.
    pub(crate) fn leave(&self, key: &QueueKey) -> Vec<Task> {
        let Some(lines) = self.known(&key.namespace) else {
            return Vec::new();
        };
        let mut lines = lines.lock();
        let Some(queue) = lines.get(key) else {
            return Vec::new();
        };
        queue.left = true;
        queue.tasks.drain(..).map(|(_, task)| task).collect()
    }

    fn has_stopped(&self, namespace: &str, worker: &str) -> bool {
        let stopped = self.stopped();
        !worker.is_empty()
            && stopped
                .get(namespace)
                .is_some_and(|workers| workers.contains_key(worker))
    }

    fn stopped(&self) -> MutexGuard<'_, HashMap<String, HashMap<String, Instant>>> {
        self.stopped.lock()
    }

    /// How many workers of each namespace are remembered to have stopped.
    pub(crate) fn count_stopped(&self) -> Vec<(String, usize)> {
        let mut stopped = self.stopped();
        stopped.retain(|_, workers| {
            workers.retain(|_, at| at.elapsed() < POLLER_SHOWN);
            !workers.is_empty()
        });
        let each = stopped.iter();
        each.map(|(namespace, workers)| (namespace.clone(), workers.len()))
            .collect()
    }

    /// Answers the polls of a worker that stops, with nothing. Workers of other namespaces may be called the same.
    pub(crate) fn release(&self, namespace: &str, worker: &str, remember: bool) {
        if worker.is_empty() {
            return;
        }
        if remember {
            let mut stopped = self.stopped();
            let workers = stopped.entry(namespace.to_owned()).or_default();
            workers.insert(worker.to_owned(), Instant::now());
        }
        let Some(lines) = self.known(namespace) else {
            return;
        };
        let mut lines = lines.lock();
        for queue in lines.queues.values_mut() {
            if queue.waiting.iter().all(|waiting| waiting.worker != worker) {
                continue;
            }
            let (leaving, staying): (VecDeque<_>, VecDeque<_>) = std::mem::take(&mut queue.waiting)
                .into_iter()
                .partition(|waiting| waiting.worker == worker);
            queue.waiting = staying;
            for waiting in leaving {
                let _ = waiting.give.send(None);
            }
        }
    }

    pub(crate) fn look(&self, key: &QueueKey) -> Sight {
        let Some(lines) = self.known(&key.namespace) else {
            return Sight::default();
        };
        let mut lines = lines.lock();
        let Some(queue) = lines.get(key) else {
            return Sight::default();
        };
        let now = Instant::now();
        queue.pollers.retain(|_, poller| poller.seen + POLLER_SHOWN > now);
        Sight {
            pollers: queue
                .pollers
                .iter()
                .map(|(identity, poller)| (identity.clone(), poller.clone()))
                .collect(),
            backlog: queue.tasks.len(),
            oldest: queue.tasks.front().map_or(Duration::ZERO, |(at, _)| now - *at),
        }
    }

    /// Forgets all of a namespace. Who polls one is answered, with nothing.
    pub(crate) fn forget(&self, namespace: &str) {
        if let Some(lines) = self.all.lock().remove(namespace) {
            lines.lock().queues.clear();
        }
        self.stopped().remove(namespace);
    }

    /// Forgets queues that nobody uses: sticky ones are made by the thousand.
    pub(crate) fn sweep(&self) {
        let all: Vec<_> = self.all.lock().values().cloned().collect();
        for lines in all {
            lines.lock().sweep();
        }
        // Whoever is about to make one there holds it.
        self.all
            .lock()
            .retain(|_, lines| Arc::strong_count(lines) > 1 || !lines.lock().queues.is_empty());
    }
}

/// A poll that waits is counted.
struct Counted<'a> {
    queues: &'a Queues,
    namespace: &'a str,
}

impl<'a> Counted<'a> {
    fn new(queues: &'a Queues, namespace: &'a str) -> Self {
        *queues.waiting().entry(namespace.to_owned()).or_default() += 1;
        Self { queues, namespace }
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        let mut waiting = self.queues.waiting();
        if let Some(count) = waiting.get_mut(self.namespace) {
            *count -= 1;
            if *count == 0 {
                waiting.remove(self.namespace);
            }
        }
    }
}

/// A place in the line. If it is dropped with a task in it, the task goes back to the front.
struct Seat<'a> {
    queues: &'a Queues,
    key: &'a QueueKey,
    receiver: Option<oneshot::Receiver<Option<Task>>>,
}

impl Drop for Seat<'_> {
    fn drop(&mut self) {
        if let Some(mut receiver) = self.receiver.take() {
            receiver.close();
            if let Ok(Some(task)) = receiver.try_recv() {
                self.queues.put(self.key, task, true);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key() -> QueueKey {
        QueueKey {
            namespace: "n".to_owned(),
            name: "q".to_owned(),
            kind: Kind::Activity,
        }
    }

    fn task(number: i64) -> Task {
        Task {
            key: Key::new("n", "w"),
            run_id: "r".to_owned(),
            what: What::Activity {
                scheduled_id: number,
                stamp: 0,
            },
        }
    }

    fn asking(rate: Option<f64>) -> Asking {
        Asking {
            rate,
            ..Asking::default()
        }
    }

    #[tokio::test]
    async fn a_slow_queue_hands_out_at_its_pace() {
        let queues = Queues::default();
        for number in 0..3 {
            queues.push(&key(), task(number));
        }
        let (key, asking) = (key(), asking(Some(1_000.0)));
        let inside = Hold::of_nobody();
        let polls = (0..3).map(|_| queues.poll(&inside, &key, &asking, Duration::from_secs(60)));
        let mut taken = Vec::new();
        for poll in polls {
            taken.push(poll.await.expect("a task").what);
        }
        assert_eq!(taken.len(), 3);
        assert!(queues.waiting().is_empty());
    }

    #[tokio::test]
    async fn polls_of_a_queue_that_hands_out_nothing_wait_without_being_looked_at() {
        let queues = Queues::default();
        queues.push(&key(), task(1));
        let (key, never) = (key(), asking(Some(0.0)));
        let inside = Hold::of_nobody();
        let mut poll = std::pin::pin!(queues.poll(&inside, &key, &never, Duration::from_secs(60)));
        let waits =
            std::future::poll_fn(|context| std::task::Poll::Ready(poll.as_mut().poll(context).is_pending()));
        assert!(waits.await);
        assert_eq!(queues.waiting().get("n"), Some(&1));
        assert!(!queues.of("n").lock().get(&key).unwrap().is_timed);
        // Until some worker asks for more.
        let faster = asking(Some(1_000.0));
        let other = queues.poll(&inside, &key, &faster, Duration::from_millis(1));
        let (first, second) = tokio::join!(poll, other);
        assert!(first.is_some() && second.is_none());
    }

    #[tokio::test]
    async fn queues_that_nobody_uses_are_forgotten_and_others_are_not() {
        let queues = Queues::default();
        let named = |name: String| QueueKey { name, ..key() };
        let (inside, asking) = (Hold::of_nobody(), asking(None));
        queues.push(&named("with a task".to_owned()), task(1));
        let heard = named("heard".to_owned());
        let mut poll = std::pin::pin!(queues.poll(&inside, &heard, &asking, Duration::from_secs(60)));
        std::future::poll_fn(|context| std::task::Poll::Ready(poll.as_mut().poll(context).is_pending()))
            .await;
        for number in 0..3 * MOST_REMEMBERED {
            let key = named(format!("q{number}"));
            assert!(
                queues
                    .poll(&inside, &key, &asking, Duration::ZERO)
                    .await
                    .is_none()
            );
            let known = queues.of("n").lock().queues.len();
            assert!(known <= MOST_REMEMBERED + 3, "{known}");
        }
        assert_eq!(queues.look(&named("with a task".to_owned())).backlog, 1);
        assert!(queues.is_alive(&heard) && queues.is_alive(&named(format!("q{}", 3 * MOST_REMEMBERED - 1))));
        assert!(!queues.is_alive(&named("q0".to_owned())));
        queues.push(&heard, task(2));
        assert!(poll.await.is_some());
        // Nothing is kept of a namespace in which nothing is.
        queues.forget("n");
        drop(queues.of("m"));
        queues.sweep();
        assert!(queues.all.lock().is_empty());
    }
}
