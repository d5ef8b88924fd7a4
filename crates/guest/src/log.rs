//! A command's output, kept for those who attach later: the last bytes of it, with absolute offsets and with the
//! sub-channel each came on, in the order in which they were read.
//!
//! What must hold: memory stays within the limit whatever the pattern of writes (alternating single bytes on stdout and
//! stderr cost their bookkeeping), and offsets never change their meaning when the oldest bytes go.

use std::collections::VecDeque;

/// A run of bytes on one sub-channel, up to the next run's `from`.
#[derive(Debug, Clone, Copy)]
struct Run {
    from: u64,
    sub: u8,
}

const RUN_COST: usize = std::mem::size_of::<Run>();

#[derive(Debug)]
pub(crate) struct Log {
    bytes: VecDeque<u8>,
    runs: VecDeque<Run>,
    /// Offset of the first byte that is kept.
    start: u64,
    limit: usize,
}

/// The next bytes after an offset: all on one sub-channel.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Chunk<'a> {
    pub(crate) sub: u8,
    pub(crate) bytes: &'a [u8],
}

impl Log {
    pub(crate) const LEAST: usize = 64 * 1024;
    pub(crate) const MOST: usize = 8 * 1024 * 1024;

    pub(crate) fn new(limit: u32) -> Self {
        Self {
            bytes: VecDeque::new(),
            runs: VecDeque::new(),
            start: 0,
            limit: (limit as usize).clamp(Self::LEAST, Self::MOST),
        }
    }

    pub(crate) fn start(&self) -> u64 {
        self.start
    }

    pub(crate) fn end(&self) -> u64 {
        self.start + self.bytes.len() as u64
    }

    pub(crate) fn limit(&self) -> usize {
        self.limit
    }

    /// What it takes in memory, nearly.
    pub(crate) fn held(&self) -> usize {
        self.bytes.len() + self.runs.len() * RUN_COST
    }

    /// What the part after `offset` takes of it.
    pub(crate) fn held_from(&self, offset: u64) -> usize {
        let runs = self.runs.len() - self.runs.partition_point(|run| run.from < offset);
        usize::try_from(self.end().saturating_sub(offset)).unwrap_or(usize::MAX) + (runs + 1) * RUN_COST
    }

    /// Appends, dropping the oldest when the limit is reached. `bytes` is at most `LEAST` long.
    pub(crate) fn push(&mut self, sub: u8, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        if self.runs.back().is_none_or(|run| run.sub != sub) {
            self.runs.push_back(Run {
                from: self.end(),
                sub,
            });
        }
        let over = (self.held() + bytes.len()).saturating_sub(self.limit);
        if over > 0 {
            self.drop_oldest(over);
        }
        // Doubling, but never past the limit: VecDeque alone would reserve up to twice as much.
        let wanted = self.bytes.len() + bytes.len();
        if wanted > self.bytes.capacity() {
            let grown = (self.bytes.capacity() * 2).clamp(wanted, self.limit.max(wanted));
            self.bytes.reserve_exact(grown - self.bytes.len());
        }
        self.bytes.extend(bytes);
    }

    /// Frees at least `count` of what is held, as far as there is any.
    fn drop_oldest(&mut self, count: usize) {
        let mut left = count;
        while left > 0 && !self.bytes.is_empty() {
            let run_end = self.runs.get(1).map_or(self.end(), |next| next.from);
            let run_len = usize::try_from(run_end - self.start).unwrap_or(usize::MAX);
            let gone = run_len.min(left);
            self.bytes.drain(..gone);
            self.start += gone as u64;
            left -= gone;
            if gone == run_len && self.runs.len() > 1 {
                self.runs.pop_front();
                left = left.saturating_sub(RUN_COST);
            } else if let Some(first) = self.runs.front_mut() {
                first.from = self.start;
            }
        }
    }

    /// The bytes at `offset`, which must not lie before `start`; `None` at the end.
    pub(crate) fn read(&self, offset: u64, most: usize) -> Option<Chunk<'_>> {
        if offset < self.start || offset >= self.end() {
            return None;
        }
        let index = self
            .runs
            .partition_point(|run| run.from <= offset)
            .checked_sub(1)?;
        let run = self.runs.get(index)?;
        let run_end = self.runs.get(index + 1).map_or(self.end(), |next| next.from);
        let from = usize::try_from(offset - self.start).ok()?;
        let length = usize::try_from(run_end - offset).ok()?.min(most);
        let (head, tail) = self.bytes.as_slices();
        let bytes = match from.checked_sub(head.len()) {
            Some(from) => &tail[from..from + length],
            None => &head[from..head.len().min(from + length)],
        };
        Some(Chunk { sub: run.sub, bytes })
    }

    /// Gives up everything kept; offsets go on.
    pub(crate) fn clear(&mut self) {
        self.start = self.end();
        self.bytes = VecDeque::new();
        self.runs = VecDeque::new();
    }

    /// Gives back room that will not be needed, once the command is over.
    pub(crate) fn settle(&mut self) {
        self.bytes.shrink_to_fit();
        self.runs.shrink_to_fit();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(log: &Log, mut offset: u64) -> Vec<(u8, Vec<u8>)> {
        let mut found: Vec<(u8, Vec<u8>)> = Vec::new();
        while let Some(chunk) = log.read(offset, 1000) {
            offset += chunk.bytes.len() as u64;
            match found.last_mut() {
                Some((sub, bytes)) if *sub == chunk.sub => bytes.extend_from_slice(chunk.bytes),
                _ => found.push((chunk.sub, chunk.bytes.to_vec())),
            }
        }
        assert_eq!(offset, log.end());
        found
    }

    #[test]
    fn keeps_order_and_sub_channels() {
        let mut log = Log::new(0);
        log.push(1, b"ab");
        log.push(1, b"c");
        log.push(2, b"!");
        log.push(1, b"d");
        assert_eq!(
            all(&log, 0),
            vec![(1, b"abc".to_vec()), (2, b"!".to_vec()), (1, b"d".to_vec())]
        );
        assert_eq!(all(&log, 2)[0], (1, b"c".to_vec()));
        assert_eq!(log.read(5, 10), None);
    }

    #[test]
    fn drops_the_oldest_and_keeps_offsets() {
        let mut log = Log::new(0);
        for round in 0..100u8 {
            log.push(1 + round % 2, &[round; 5000]);
        }
        assert_eq!(log.end(), 500_000);
        assert!(log.held() <= Log::LEAST, "{}", log.held());
        assert!(log.start() > 400_000);
        let offset = 99 * 5000 + 17;
        assert_eq!(log.read(offset, 3).expect("kept").bytes, &[99; 3]);
        let kept: usize = all(&log, log.start()).iter().map(|(_, bytes)| bytes.len()).sum();
        assert_eq!(kept as u64, log.end() - log.start());
    }

    #[test]
    fn alternating_single_bytes_stay_bounded() {
        let mut log = Log::new(0);
        for round in 0..300_000u32 {
            log.push((round % 2) as u8, b"x");
        }
        assert!(log.held() <= Log::LEAST);
        assert_eq!(log.end(), 300_000);
        let runs = all(&log, log.start());
        assert!(runs.iter().all(|(_, bytes)| bytes.len() == 1));
    }

    #[test]
    fn clearing_says_where_it_goes_on() {
        let mut log = Log::new(0);
        log.push(1, b"hello");
        log.clear();
        assert_eq!((log.start(), log.end()), (5, 5));
        log.push(2, b"x");
        assert_eq!(all(&log, 5), vec![(2, b"x".to_vec())]);
    }
}
