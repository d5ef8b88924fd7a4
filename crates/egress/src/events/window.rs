//! One second of one sandbox's events.

use std::collections::HashMap;

use atoll_types::EgressVerdict;
use tokio::time::Instant;

use super::{EgressProtocol, EventKind, Note};
use crate::limits::Bucket;

/// Kinds of events that may be told singly each second, on and on.
const STEADY: u64 = 8;
/// The same at once after a quiet time: an installation reaches many hosts in its first second.
const AT_ONCE: u64 = 64;

#[derive(Debug)]
pub(super) struct Window {
    /// What was told in this window, and what came again since.
    seen: HashMap<Key, Option<(Note, u64)>>,
    /// What was not told singly: allowed, denied.
    unlisted: [Unlisted; 2],
    /// For names that were asked for, of which a guest can make up any number, and for everything else.
    singles: [Bucket; 2],
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Unlisted {
    count: u64,
    bytes_up: u64,
    bytes_down: u64,
}

/// What makes two events the same kind. Everything in it came from a bounded set or is bounded in length.
#[derive(Debug, PartialEq, Eq, Hash)]
struct Key {
    kind: EventKind,
    verdict: EgressVerdict,
    rule: String,
    protocol: EgressProtocol,
    host: Option<String>,
    address: Option<std::net::IpAddr>,
    port: u16,
    method: Option<String>,
}

impl Key {
    fn of(note: &Note) -> Self {
        Self {
            kind: note.kind.clone(),
            verdict: note.verdict,
            rule: note.rule.clone(),
            protocol: note.protocol,
            host: note.host.clone(),
            // Of a named host the address is a detail that changes.
            address: note.address.filter(|_| note.host.is_none()),
            port: note.port,
            method: note.method.clone(),
        }
    }
}

impl Window {
    pub(super) fn new() -> Self {
        Self {
            seen: HashMap::new(),
            unlisted: Default::default(),
            singles: [Bucket::new(STEADY, AT_ONCE), Bucket::new(STEADY, AT_ONCE)],
        }
    }

    /// Whether nothing happened since it was closed.
    pub(super) fn is_idle(&self) -> bool {
        self.seen.is_empty() && self.unlisted.iter().all(|unlisted| unlisted.count == 0)
    }

    /// Takes an event; gives it back where it is to be told at once.
    pub(super) fn note(&mut self, note: Note, now: Instant) -> Option<Note> {
        let key = Key::of(&note);
        if let Some(again) = self.seen.get_mut(&key) {
            match again {
                Some((gathered, count)) => {
                    gathered.bytes_up = gathered.bytes_up.saturating_add(note.bytes_up);
                    gathered.bytes_down = gathered.bytes_down.saturating_add(note.bytes_down);
                    gathered.reason = note.reason;
                    gathered.address = note.address;
                    *count += 1;
                }
                None => *again = Some((note, 1)),
            }
            return None;
        }
        let asked_for = note.protocol == EgressProtocol::Dns && note.host.is_some();
        if self.singles[usize::from(!asked_for)].try_take(1, now) {
            self.seen.insert(key, None);
            return Some(note);
        }
        let unlisted = &mut self.unlisted[usize::from(note.verdict == EgressVerdict::Denied)];
        unlisted.count += 1;
        unlisted.bytes_up = unlisted.bytes_up.saturating_add(note.bytes_up);
        unlisted.bytes_down = unlisted.bytes_down.saturating_add(note.bytes_down);
        None
    }

    /// Ends the second: what came again, with how often, and what was not listed. Then everything is new.
    pub(super) fn close(&mut self) -> Vec<(Note, u64)> {
        let mut gathered: Vec<_> = std::mem::take(&mut self.seen).into_values().flatten().collect();
        let unlisted = std::mem::take(&mut self.unlisted);
        gathered.extend(
            [EgressVerdict::Allowed, EgressVerdict::Denied]
                .into_iter()
                .zip(unlisted)
                .filter(|(_, unlisted)| unlisted.count > 0)
                .map(|(verdict, unlisted)| (unlisted.note(verdict), unlisted.count)),
        );
        gathered
    }
}

impl Unlisted {
    fn note(self, verdict: EgressVerdict) -> Note {
        Note {
            kind: EventKind::Unlisted,
            verdict,
            rule: String::new(),
            reason: format!(
                "{} more events came within a second and are not listed singly",
                self.count
            ),
            protocol: EgressProtocol::Tcp,
            host: None,
            address: None,
            port: 0,
            method: None,
            bytes_up: self.bytes_up,
            bytes_down: self.bytes_down,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn note(host: &str, verdict: EgressVerdict) -> Note {
        Note {
            kind: EventKind::Decided,
            verdict,
            rule: "rules[0]".to_owned(),
            reason: String::new(),
            protocol: EgressProtocol::Tls,
            host: Some(host.to_owned()),
            address: None,
            port: 443,
            method: None,
            bytes_up: 1,
            bytes_down: 2,
        }
    }

    #[test]
    fn the_first_is_told_at_once_and_repetitions_together() {
        let now = Instant::now();
        let mut window = Window::new();
        assert!(
            window
                .note(note("a.example", EgressVerdict::Allowed), now)
                .is_some()
        );
        assert!(
            window
                .note(note("a.example", EgressVerdict::Denied), now)
                .is_some()
        );
        for _ in 0..1000 {
            assert!(
                window
                    .note(note("a.example", EgressVerdict::Allowed), now)
                    .is_none()
            );
        }
        let gathered = window.close();
        assert_eq!(gathered.len(), 1);
        assert_eq!(gathered[0].1, 1000);
        assert_eq!(gathered[0].0.bytes_up, 1000);
        assert_eq!(gathered[0].0.bytes_down, 2000);
        assert!(window.is_idle());
        assert!(
            window
                .note(note("a.example", EgressVerdict::Allowed), now)
                .is_some()
        );
    }

    #[test]
    fn made_up_names_do_not_hide_what_else_happens() {
        let now = Instant::now();
        let mut window = Window::new();
        for n in 0..1000 {
            let asked = Note {
                protocol: EgressProtocol::Dns,
                ..note(&format!("{n}.example"), EgressVerdict::Denied)
            };
            window.note(asked, now);
        }
        assert!(
            window
                .note(note("a.example", EgressVerdict::Denied), now)
                .is_some()
        );
    }

    #[test]
    fn a_guest_that_asks_for_ever_new_names_fills_neither_memory_nor_the_log() {
        let mut now = Instant::now();
        let mut window = Window::new();
        let (mut told, mut counted) = (0, 0);
        for second in 0..100 {
            for n in 0..10_000 {
                let host = format!("{second}-{n}.example");
                told += u64::from(window.note(note(&host, EgressVerdict::Denied), now).is_some());
            }
            assert!(window.seen.len() as u64 <= AT_ONCE);
            counted += window.close().iter().map(|(_, count)| count).sum::<u64>();
            now += Duration::from_secs(1);
        }
        assert_eq!(told + counted, 100 * 10_000);
        assert!(told <= AT_ONCE + 100 * STEADY, "{told}");
    }
}
