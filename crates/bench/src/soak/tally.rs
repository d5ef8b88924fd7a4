//! What was asked and what came of it: requests of honest callers by kind, with how long they took with and without a
//! hostile neighbour; attacks; faults; and everything that must not have happened.

use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::time::Duration;

use crate::row::Samples;

/// So many findings of one kind are kept in words; the rest are counted.
const KEPT: usize = 8;

/// Requests of honest callers of one kind.
#[derive(Debug, Default, Clone)]
pub(super) struct Asked {
    pub(super) requests: u64,
    /// Answered otherwise than they should have been, with the server there and room on the disk.
    pub(super) failed: u64,
    /// Cut by a kill of the server, and asked again.
    pub(super) cut: u64,
    /// Refused because the disk was full, and asked again.
    pub(super) full: u64,
    /// Milliseconds, without a hostile neighbour and with one.
    pub(super) calm: Samples,
    pub(super) beside: Samples,
}

/// One kind of attack.
#[derive(Debug, Default, Clone)]
pub(super) struct Attacked {
    pub(super) times: u64,
    /// Requests, connections and commands that it was made of.
    pub(super) moves: u64,
    pub(super) findings: u64,
}

/// Something that must not happen.
#[derive(Debug, Clone)]
pub(super) struct Finding {
    /// What kind of thing, in a word or two.
    pub(super) what: &'static str,
    /// Who was at it: the attack or the story.
    pub(super) by: String,
    pub(super) words: String,
}

#[derive(Debug, Default)]
pub(super) struct Sums {
    pub(super) asked: BTreeMap<&'static str, Asked>,
    pub(super) stories: BTreeMap<&'static str, u64>,
    pub(super) attacks: BTreeMap<&'static str, Attacked>,
    pub(super) faults: BTreeMap<&'static str, u64>,
    pub(super) findings: Vec<Finding>,
    /// By kind and author, with those that are not kept.
    pub(super) found: BTreeMap<(&'static str, String), u64>,
    /// Answers that were searched for words of others.
    pub(super) searched: u64,
    /// How long the server took to say that it is there, in milliseconds.
    pub(super) health: Samples,
    pub(super) peak_memory: u64,
}

#[derive(Debug, Default)]
pub(super) struct Tally(Mutex<Sums>);

impl Tally {
    pub(super) fn lock(&self) -> MutexGuard<'_, Sums> {
        self.0.lock()
    }

    pub(super) fn answered(&self, kind: &'static str, took: Option<Duration>, beside: bool) {
        let mut sums = self.lock();
        let asked = sums.asked.entry(kind).or_default();
        asked.requests += 1;
        if let Some(took) = took {
            let samples = if beside {
                &mut asked.beside
            } else {
                &mut asked.calm
            };
            samples.push(took.as_secs_f64() * 1000.0);
        }
    }

    pub(super) fn cut(&self, kind: &'static str) {
        self.lock().asked.entry(kind).or_default().cut += 1;
    }

    pub(super) fn full(&self, kind: &'static str) {
        self.lock().asked.entry(kind).or_default().full += 1;
    }

    /// An honest request that was not answered as it should have been.
    pub(super) fn failed(&self, kind: &'static str, words: String) {
        {
            let mut sums = self.lock();
            let asked = sums.asked.entry(kind).or_default();
            asked.requests += 1;
            asked.failed += 1;
        }
        self.found("an honest request failed", kind, words);
    }

    pub(super) fn attacked(&self, attack: &'static str, moves: u64) {
        let mut sums = self.lock();
        let attacked = sums.attacks.entry(attack).or_default();
        attacked.times += 1;
        attacked.moves += moves;
    }

    pub(super) fn fault(&self, fault: &'static str) {
        *self.lock().faults.entry(fault).or_default() += 1;
    }

    pub(super) fn found(&self, what: &'static str, by: &str, words: impl Into<String>) {
        let mut sums = self.lock();
        let count = sums.found.entry((what, by.to_owned())).or_default();
        *count += 1;
        let keep = *count <= KEPT as u64;
        if keep {
            let mut words = words.into();
            if words.len() > 600 {
                let end = (0..=600).rev().find(|end| words.is_char_boundary(*end));
                words.truncate(end.unwrap_or_default());
                words.push('…');
            }
            sums.findings.push(Finding {
                what,
                by: by.to_owned(),
                words,
            });
        }
    }
}
