//! A directory's entries, to a depth, in batches. One open directory per level, so that neither a million entries nor a
//! deep tree costs memory.

use std::fs::{self, ReadDir};
use std::io;

use atoll_guest_protocol::{FRAME_COST, FileEntry, Message, encode};

use crate::failure::Outcome;
use crate::files::{Place, Stats};
use crate::job::{Context, Job, Step};

const BATCH_BYTES: usize = 32 * 1024;
/// Per step: about a millisecond.
const BATCH_ENTRIES: usize = 128;

#[derive(Debug)]
pub(crate) struct List {
    levels: Vec<ReadDir>,
    depth: usize,
    stats: Stats,
    /// A batch that waits for credit.
    waiting: Option<Vec<u8>>,
}

impl List {
    pub(crate) fn open(place: &Place, depth: u32) -> Outcome<Box<dyn Job>> {
        let top = fs::read_dir(&place.path).map_err(|error| place.failure("cannot list", &error))?;
        Ok(Box::new(Self {
            levels: vec![top],
            depth: depth.max(1) as usize,
            stats: Stats::default(),
            waiting: None,
        }))
    }

    fn batch(&mut self) -> io::Result<Vec<FileEntry>> {
        let (mut entries, mut held) = (Vec::new(), 0);
        let mut looked_at = 0;
        while held < BATCH_BYTES && looked_at < BATCH_ENTRIES {
            looked_at += 1;
            let level = self.levels.len();
            let Some(directory) = self.levels.last_mut() else {
                break;
            };
            let Some(entry) = directory.next() else {
                self.levels.pop();
                continue;
            };
            let path = entry?.path();
            let Ok(metadata) = fs::symlink_metadata(&path) else {
                continue; // gone since
            };
            if metadata.is_dir()
                && level < self.depth
                && let Ok(below) = read_dir_itself(&path)
            {
                self.levels.push(below);
            }
            let stat = self.stats.with_metadata(&path, &metadata);
            held += stat.path.len() + stat.target.as_ref().map_or(0, Vec::len) + 64;
            entries.push(FileEntry {
                stat,
                depth: u32::try_from(level).unwrap_or(u32::MAX),
            });
        }
        Ok(entries)
    }
}

/// Not what a symlink that took the directory's place points to.
fn read_dir_itself(path: &std::path::Path) -> io::Result<ReadDir> {
    let directory = fs::read_dir(path)?;
    match fs::symlink_metadata(path)?.is_dir() {
        true => Ok(directory),
        false => Err(io::Error::from_raw_os_error(libc::ELOOP)),
    }
}

impl Job for List {
    fn step(&mut self, cx: &mut Context<'_>) -> Step {
        let payload = match self.waiting.take() {
            Some(payload) => payload,
            None if self.levels.is_empty() => return Step::Done(Ok(())),
            // Not before there is credit for a full batch: what is found is sent, not kept.
            None if cx.port.data_room() < 2 * BATCH_BYTES - FRAME_COST as usize => return Step::Wait,
            None => match self.batch() {
                Ok(entries) if entries.is_empty() => return Step::Again,
                Ok(entries) => encode(&Message::Entries(entries)),
                Err(error) => return Step::Done(Err(crate::failure::from_io("cannot list", &error))),
            },
        };
        if cx.port.encoded_message(&mut cx.shared.out, &payload) {
            return Step::Again;
        }
        self.waiting = Some(payload);
        Step::Wait
    }
}
