//! Threads that hash and write, shared by all saves of a vault, and the buffers that go back and forth.
//!
//! What must hold: nothing waits for another thing in here, so a job is always done in bounded time; how many jobs there can
//! be is bounded by those who hand them in, each of whom has a few buffers only.

use parking_lot::Mutex;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

/// Gets a buffer of its thread to work in.
pub(crate) type Job = Box<dyn FnOnce(&mut Vec<u8>) + Send>;

/// Buffers kept for the next save.
const SPARE: usize = 8;

#[derive(Debug)]
pub(crate) struct Pool {
    jobs: Sender<Job>,
    spare: Mutex<Vec<Vec<u8>>>,
}

impl Pool {
    pub(crate) fn new() -> std::io::Result<Self> {
        let (jobs, queue) = channel::<Job>();
        let queue = Arc::new(Mutex::new(queue));
        for n in 0..threads() {
            let queue = Arc::clone(&queue);
            // They end when the pool is dropped: nobody sends any more.
            let thread = std::thread::Builder::new().name(format!("vault-{n}"));
            thread.spawn(move || work(&queue))?;
        }
        let spare = Mutex::default();
        Ok(Self { jobs, spare })
    }

    pub(crate) fn run(&self, job: Job) {
        // Cannot fail: a thread ends after the pool only.
        let _ = self.jobs.send(job);
    }

    pub(crate) fn buffer(&self, len: usize) -> Vec<u8> {
        let spare = self.spare.lock().pop();
        match spare {
            Some(mut buffer) => {
                buffer.resize(len, 0);
                buffer
            }
            // Zeros that the kernel has made already.
            None => vec![0; len],
        }
    }

    pub(crate) fn give_back(&self, buffer: Vec<u8>) {
        let mut spare = self.spare.lock();
        if spare.len() < SPARE {
            spare.push(buffer);
        }
    }
}

/// How many threads share one big piece of work.
pub(crate) fn threads() -> usize {
    std::thread::available_parallelism()
        .map_or(2, usize::from)
        .clamp(1, 4)
}

fn work(queue: &Mutex<Receiver<Job>>) {
    let mut scratch = Vec::new();
    loop {
        let job = queue.lock().recv();
        let Ok(job) = job else { return };
        // A job that panics has told its owner by dropping its reply.
        let _ = catch_unwind(AssertUnwindSafe(|| job(&mut scratch)));
    }
}
