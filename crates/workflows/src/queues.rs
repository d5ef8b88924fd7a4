//! Task queues: what waits for a worker, and the workers that wait.
//!
//! A queue is memory only. What is on it follows from the states of runs, so a restart fills it again; and whoever takes a
//! task asks its run whether it still stands, so a task that is there twice or too late does no harm.
//!
//! What must hold: a task is handed to a poll that somebody still listens to, or it stays.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
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
/// How many workers are remembered to have stopped. One that is not waits for its last poll to end by itself.
const MOST_STOPPED: usize = 10_000;

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

#[derive(Debug, Default, Clone)]
pub(crate) struct Queues {
    all: Arc<Mutex<HashMap<QueueKey, Queue>>>,
    /// Workers that have said that they stop, by namespace and their own name. Some ask once more afterwards, and would wait
    /// for the answer.
    stopped: Arc<Mutex<HashMap<(String, String), Instant>>>,
}

impl Queues {
    fn lock(&self) -> MutexGuard<'_, HashMap<QueueKey, Queue>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn push(&self, key: &QueueKey, task: Task) {
        self.put(key, task, false);
    }

    /// Puts a task back that could not be taken.
    pub(crate) fn put_back(&self, key: &QueueKey, task: Task) {
        self.put(key, task, true);
    }

    fn put(&self, key: &QueueKey, task: Task, front: bool) {
        let mut all = self.lock();
        let queue = all.entry(key.clone()).or_default();
        let mut task = task;
        if queue.rate.is_none() {
            while let Some(waiting) = queue.waiting.pop_front() {
                match waiting.give.send(Some(task)) {
                    Ok(()) => return,
                    // Nobody listens any more.
                    Err(Some(back)) => task = back,
                    Err(None) => return,
                }
            }
        }
        if front {
            queue.tasks.push_front((Instant::now(), task));
        } else {
            queue.tasks.push_back((Instant::now(), task));
        }
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
        loop {
            let (receiver, pause) = self.join(key, asking);
            let limit = pause.map_or(deadline, |until| until.min(deadline));
            let mut seat = Seat {
                queues: self,
                key,
                receiver: Some(receiver),
            };
            // It may have stopped before it was in the line to be told.
            if self.has_stopped(&key.namespace, &asking.worker) {
                return None;
            }
            let answer = match seat.receiver.as_mut() {
                Some(receiver) => tokio::time::timeout_at(limit.into(), receiver).await,
                None => return None,
            };
            match answer {
                Ok(Ok(task)) => {
                    seat.receiver = None;
                    return task;
                }
                Ok(Err(_)) => return None,
                Err(_) if Instant::now() >= deadline => return None,
                // The queue is slowed down: look again.
                Err(_) => {}
            }
        }
    }

    /// Takes a task at once, or a place in the line. The time is given when a slow queue may be asked again.
    fn join(&self, key: &QueueKey, asking: &Asking) -> (oneshot::Receiver<Option<Task>>, Option<Instant>) {
        let mut all = self.lock();
        let queue = all.entry(key.clone()).or_default();
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
        let mut pause = None;
        if let Some(rate) = queue.rate {
            let open_at = queue.next_at.unwrap_or(now);
            if open_at > now || rate <= 0.0 {
                pause = Some(open_at.max(now + Duration::from_millis(20)));
            } else if !queue.tasks.is_empty() {
                queue.next_at = Some(now + Duration::from_secs_f64(1.0 / rate.max(0.001)));
            } else {
                pause = Some(now + Duration::from_millis(50));
            }
        }
        if pause.is_none()
            && let Some((_, task)) = queue.tasks.pop_front()
        {
            // The receiver is in our hands: this cannot fail.
            let _ = give.send(Some(task));
            return (receiver, None);
        }
        queue.waiting.retain(|waiting| !waiting.give.is_closed());
        queue.waiting.push_back(Waiting {
            give,
            worker: asking.worker.clone(),
        });
        (receiver, pause)
    }

    /// Whether the worker of a sticky queue may be expected to take a task.
    pub(crate) fn is_alive(&self, key: &QueueKey) -> bool {
        let mut all = self.lock();
        let Some(queue) = all.get_mut(key) else {
            return false;
        };
        if queue.left {
            return false;
        }
        queue.waiting.retain(|waiting| !waiting.give.is_closed());
        !queue.waiting.is_empty() || queue.last_poll.is_some_and(|at| at.elapsed() < STICKY_GONE)
    }

    /// The worker of a sticky queue leaves: its tasks go elsewhere.
    pub(crate) fn leave(&self, key: &QueueKey) -> Vec<Task> {
        let mut all = self.lock();
        let Some(queue) = all.get_mut(key) else {
            return Vec::new();
        };
        queue.left = true;
        queue.tasks.drain(..).map(|(_, task)| task).collect()
    }

    fn has_stopped(&self, namespace: &str, worker: &str) -> bool {
        let stopped = self.stopped.lock().unwrap_or_else(PoisonError::into_inner);
        !worker.is_empty() && stopped.contains_key(&(namespace.to_owned(), worker.to_owned()))
    }

    /// Answers the polls of a worker that stops, with nothing. Workers of other namespaces may be called the same.
    pub(crate) fn release(&self, namespace: &str, worker: &str) {
        if worker.is_empty() {
            return;
        }
        let mut stopped = self.stopped.lock().unwrap_or_else(PoisonError::into_inner);
        stopped.retain(|_, at| at.elapsed() < POLLER_SHOWN);
        if stopped.len() < MOST_STOPPED {
            stopped.insert((namespace.to_owned(), worker.to_owned()), Instant::now());
        }
        drop(stopped);
        let mut all = self.lock();
        let queues = all.iter_mut().filter(|(key, _)| key.namespace == namespace);
        for (_, queue) in queues {
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
        let mut all = self.lock();
        let Some(queue) = all.get_mut(key) else {
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
        self.lock().retain(|key, _| key.namespace != namespace);
        let mut stopped = self.stopped.lock().unwrap_or_else(PoisonError::into_inner);
        stopped.retain(|(own, _), _| own != namespace);
    }

    /// Forgets queues that nobody uses: sticky ones are made by the thousand.
    pub(crate) fn sweep(&self) {
        self.lock().retain(|_, queue| {
            queue.waiting.retain(|waiting| !waiting.give.is_closed());
            !queue.tasks.is_empty()
                || !queue.waiting.is_empty()
                || queue.last_poll.is_some_and(|at| at.elapsed() < POLLER_SHOWN)
        });
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
