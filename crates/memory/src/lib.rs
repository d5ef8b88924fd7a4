//! Who holds how many buffered bytes: the server as a whole, each project, each sandbox. Whoever buffers what others send or
//! ask for takes a permit here first, in front of the APIs and below them. And who holds how many [`Slots`] of something else that
//! is scarce.
//!
//! What must hold: a permit is counted in all places that it concerns or in none, and given back in all of them when it is
//! dropped, however its holder ended. Nothing is remembered of those who hold nothing.

mod json;
mod slots;

use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::Hash;
use std::sync::Arc;

use atoll_types::{Code, Fault, ProjectId, SandboxId};
use bytes::Bytes;

pub use json::json_weight;
pub use slots::{Slot, Slots};

const MIB: u64 = 1024 * 1024;

/// The most bytes that may be buffered at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    pub server: u64,
    pub project: u64,
    pub sandbox: u64,
}

impl Limits {
    /// A quarter of the machine for all, half of that for one project.
    pub fn for_machine(memory_bytes: u64) -> Self {
        let server = (memory_bytes / 4).clamp(256 * MIB, 4096 * MIB);
        Self::within(server)
    }

    /// With what answers may take beyond: an eighth, so that requests that are being received keep nobody from being answered.
    fn for_answers(self) -> Self {
        let more = |limit: u64| limit.saturating_add(limit / 8);
        Self {
            server: more(self.server),
            project: more(self.project),
            sandbox: more(self.sandbox),
        }
    }

    /// The same shares of another whole.
    pub fn within(server: u64) -> Self {
        Self {
            server,
            project: server / 2,
            sandbox: (server / 4).min(128 * MIB),
        }
    }
}

#[derive(Debug, Clone)]
pub struct Memory(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    limits: Limits,
    held: Mutex<Held>,
}

#[derive(Debug, Default)]
struct Held {
    server: u64,
    projects: HashMap<ProjectId, u64>,
    sandboxes: HashMap<SandboxId, u64>,
}

impl Memory {
    pub fn new(limits: Limits) -> Self {
        Self(Arc::new(Inner {
            limits,
            held: Mutex::default(),
        }))
    }

    /// What is held now, by everybody.
    pub fn held(&self) -> u64 {
        self.lock().server
    }

    pub fn limits(&self) -> Limits {
        self.0.limits
    }

    /// Who is to pay: a project, and the sandbox of it that calls, if one does.
    pub fn account(&self, project: &ProjectId, sandbox: Option<&SandboxId>) -> Account {
        Account {
            memory: self.clone(),
            project: project.clone(),
            sandbox: sandbox.cloned(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Held> {
        self.0.held.lock()
    }
}

#[derive(Debug, Clone)]
pub struct Account {
    memory: Memory,
    project: ProjectId,
    sandbox: Option<SandboxId>,
}

impl Account {
    /// A permit for nothing yet.
    pub fn open(&self) -> Permit {
        Permit {
            account: self.clone(),
            bytes: 0,
        }
    }

    fn take(&self, bytes: u64, limits: Limits) -> Result<(), Fault> {
        let mut held = self.memory.lock();
        let of_project = held.projects.get(&self.project).copied().unwrap_or(0);
        let of_sandbox = self
            .sandbox
            .as_ref()
            .and_then(|sandbox| held.sandboxes.get(sandbox).copied())
            .unwrap_or(0);
        if self.sandbox.is_some() && of_sandbox.saturating_add(bytes) > limits.sandbox {
            return Err(caller_holds_too_much("this sandbox", limits.sandbox));
        }
        if of_project.saturating_add(bytes) > limits.project {
            return Err(caller_holds_too_much("this project", limits.project));
        }
        if held.server.saturating_add(bytes) > limits.server {
            return Err(Fault::new(
                Code::ServerBusy,
                format!(
                    "requests and answers on their way hold all of the {} MiB that this server buffers",
                    limits.server / MIB
                ),
            )
            .hint("try again in a moment"));
        }
        held.server += bytes;
        *held.projects.entry(self.project.clone()).or_default() += bytes;
        if let Some(sandbox) = &self.sandbox {
            *held.sandboxes.entry(sandbox.clone()).or_default() += bytes;
        }
        Ok(())
    }

    fn give_back(&self, bytes: u64) {
        let mut held = self.memory.lock();
        held.server = held.server.saturating_sub(bytes);
        lower(&mut held.projects, &self.project, bytes);
        if let Some(sandbox) = &self.sandbox {
            lower(&mut held.sandboxes, sandbox, bytes);
        }
    }
}

fn caller_holds_too_much(who: &str, limit: u64) -> Fault {
    Fault::new(
        Code::TooMuchBuffered,
        format!(
            "requests and answers of {who} on their way hold all of the {} MiB that it may buffer",
            limit / MIB
        ),
    )
    .hint("send fewer or smaller requests at once, and read their answers; who runs the server sets this in `[limits]`")
}

fn lower<K: Hash + Eq + Clone>(held: &mut HashMap<K, u64>, who: &K, bytes: u64) {
    if let Entry::Occupied(mut entry) = held.entry(who.clone()) {
        let left = entry.get().saturating_sub(bytes);
        match left {
            0 => drop(entry.remove()),
            left => *entry.get_mut() = left,
        }
    }
}

/// Some bytes that may be held; they are given back when this is dropped.
#[derive(Debug)]
pub struct Permit {
    account: Account,
    bytes: u64,
}

impl Permit {
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Allows so many bytes more, or says why not; then it is as it was.
    pub fn grow(&mut self, more: u64) -> Result<(), Fault> {
        self.grow_within(more, self.account.memory.0.limits)
    }

    /// The same for an answer, for which there is some room that no request can take.
    pub fn grow_for_answer(&mut self, more: u64) -> Result<(), Fault> {
        self.grow_within(more, self.account.memory.0.limits.for_answers())
    }

    fn grow_within(&mut self, more: u64, limits: Limits) -> Result<(), Fault> {
        if more > 0 {
            self.account.take(more, limits)?;
            self.bytes += more;
        }
        Ok(())
    }

    /// The same bytes, held by this permit until the last copy of them is dropped.
    #[must_use]
    pub fn over(self, bytes: Bytes) -> Bytes {
        Bytes::from_owner(Paid { bytes, _permit: self })
    }

    /// Holds exactly so many bytes.
    pub fn set(&mut self, bytes: u64) -> Result<(), Fault> {
        match bytes.checked_sub(self.bytes) {
            Some(more) => self.grow(more)?,
            None => {
                self.account.give_back(self.bytes - bytes);
                self.bytes = bytes;
            }
        }
        Ok(())
    }
}

/// Bytes with the permit to hold them.
struct Paid {
    bytes: Bytes,
    _permit: Permit,
}

impl AsRef<[u8]> for Paid {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if self.bytes > 0 {
            self.account.give_back(self.bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    pub(crate) fn project(n: u8) -> ProjectId {
        ProjectId::from_entropy([n; 20])
    }

    fn sandbox(n: u8) -> SandboxId {
        SandboxId::from_entropy([n; 20])
    }

    fn memory() -> Memory {
        Memory::new(Limits {
            server: 100,
            project: 60,
            sandbox: 30,
        })
    }

    #[test]
    fn each_limit_is_told_by_its_name() {
        let memory = memory();
        let mut first = memory.account(&project(1), Some(&sandbox(1))).open();
        first.grow(30).unwrap();
        let fault = first.grow(1).unwrap_err();
        assert_eq!(fault.code, Code::TooMuchBuffered);
        assert!(fault.message.contains("sandbox"), "{fault}");
        // Its project goes on without it.
        let mut second = memory.account(&project(1), None).open();
        second.grow(30).unwrap();
        let fault = second.grow(1).unwrap_err();
        assert!(fault.message.contains("project"), "{fault}");
        let mut third = memory.account(&project(2), None).open();
        third.grow(40).unwrap();
        let fault = third.grow(1).unwrap_err();
        assert_eq!(fault.code, Code::ServerBusy);
        drop(first);
        third.grow(20).unwrap();
        assert_eq!(memory.held(), 90);
        drop((second, third));
        assert_eq!(memory.held(), 0);
        assert!(memory.lock().projects.is_empty() && memory.lock().sandboxes.is_empty());
    }

    #[test]
    fn requests_keep_nobody_from_being_answered() {
        let memory = Memory::new(Limits::within(1600));
        let account = memory.account(&project(1), None);
        let (mut request, mut answer) = (account.open(), account.open());
        request.grow(800).unwrap();
        request.grow(1).unwrap_err();
        answer.grow(1).unwrap_err();
        answer.grow_for_answer(100).unwrap();
        answer.grow_for_answer(1).unwrap_err();
        drop(request);
        assert_eq!(memory.held(), 100);
    }

    proptest! {
        #[test]
        fn what_is_held_is_the_sum_of_the_permits(steps in prop::collection::vec((0..3_u8, 0..3_u8, 0..50_u64, any::<bool>()), 1..60)) {
            let memory = memory();
            let mut permits: Vec<Permit> = Vec::new();
            for (of, from, bytes, ends) in steps {
                if ends && !permits.is_empty() {
                    permits.swap_remove(usize::from(of) % permits.len());
                } else {
                    let inside = (from > 0).then(|| sandbox(from));
                    let mut permit = memory.account(&project(of), inside.as_ref()).open();
                    let before = memory.held();
                    match permit.set(bytes) {
                        Ok(()) => permits.push(permit),
                        Err(_) => prop_assert_eq!(memory.held(), before),
                    }
                }
                prop_assert_eq!(memory.held(), permits.iter().map(Permit::bytes).sum::<u64>());
                prop_assert!(memory.held() <= 100);
                prop_assert!(memory.lock().projects.values().all(|held| (1..=60).contains(held)));
                prop_assert!(memory.lock().sandboxes.values().all(|held| (1..=30).contains(held)));
            }
            drop(permits);
            prop_assert_eq!(memory.held(), 0);
        }
    }
}
