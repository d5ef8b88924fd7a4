//! What a project keeps in everybody's memory, counted in bytes: numbers of things say nothing about how large they are. And
//! what it keeps on everybody's disk of all its workflows.
//!
//! Who has no room left starts nothing, and tells running workflows nothing. Those go on into a reserve beyond that, and when it
//! is used up they can only end, or be ended. Ends and deletions are always possible: they are the way out.

use std::collections::HashMap;
use std::sync::atomic::{AtomicI64, Ordering};

use atoll_workflow_core::Refusal;

use crate::Engine;
use crate::namespaces::Hold;

/// What anything that is kept costs, however small it is.
pub(crate) const LEAST: usize = 1024;

/// What a project may keep of all its schedules.
pub(crate) const SCHEDULES: usize = 64 * 1024 * 1024;
/// The same for its batches.
pub(crate) const BATCHES: usize = 32 * 1024 * 1024;
/// The same for its approvals.
pub(crate) const APPROVALS: usize = 32 * 1024 * 1024;

/// What a project without room may still add at once, to end something.
const LITTLE: i64 = 64 * 1024;

/// What a project keeps on the disk of all its workflows, in bytes. The store counts it in each commit; this follows.
#[derive(Debug, Default)]
pub(crate) struct Kept(AtomicI64);

impl Kept {
    pub(crate) fn add(&self, bytes: i64) {
        self.0.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn bytes(&self) -> i64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// What a commit adds to what is kept.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Growth {
    pub(crate) bytes: i64,
    /// There is a run more.
    pub(crate) new_run: bool,
    /// A worker adds something, and a run goes on afterwards.
    pub(crate) goes_on: bool,
}

impl Engine {
    fn most_kept(&self) -> i64 {
        i64::try_from(self.inner.options.most_kept).unwrap_or(i64::MAX)
    }

    /// Refuses what is new, where the project has no room left. Asked before anything is decided.
    pub(crate) fn check_room(&self, inside: &Hold) -> Result<(), Refusal> {
        let most = self.most_kept();
        if inside.kept().bytes() < most {
            return Ok(());
        }
        Err(full(inside.kept().bytes(), most))
    }

    /// Refuses a commit, where the reserve is used up too; unless it is little and ends something.
    pub(crate) fn check_reserve(&self, inside: &Hold, growth: Growth) -> Result<(), Refusal> {
        let most = self.most_kept();
        let is_way_out = !growth.new_run && !growth.goes_on && growth.bytes <= LITTLE;
        let after = inside.kept().bytes().saturating_add(growth.bytes);
        if is_way_out || after <= most.saturating_add(most / 8) {
            return Ok(());
        }
        Err(full(after, most))
    }

    /// What belongs to the project of a namespace, of things that are named by their namespaces.
    pub(crate) fn share<'a>(
        &self,
        namespace: &str,
        things: impl IntoIterator<Item = (&'a str, usize)>,
    ) -> usize {
        let mut ours: HashMap<&str, bool> = HashMap::new();
        things
            .into_iter()
            .filter(|(other, _)| {
                *ours
                    .entry(other)
                    .or_insert_with(|| self.inner.namespaces.are_neighbours(namespace, other))
            })
            .fold(0, |total, (_, bytes)| total.saturating_add(bytes))
    }
}

fn full(bytes: i64, most: i64) -> Refusal {
    Refusal::ResourceExhausted(format!(
        "the workflows of this project keep {bytes} bytes, and may keep {most}: delete closed workflows, end those that nobody \
         needs, shorten the retention of its namespaces, or have the operator raise max_workflow_storage"
    ))
}

/// Refuses more than a share.
pub(crate) fn check_share(what: &str, bytes: usize, most: usize) -> Result<(), Refusal> {
    if bytes > most {
        return Err(Refusal::ResourceExhausted(format!(
            "the {what} of this project would have {bytes} bytes, and may have {most}: delete some, or say less in each"
        )));
    }
    Ok(())
}
