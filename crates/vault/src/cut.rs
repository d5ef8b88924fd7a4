//! Where a stream is cut into chunks.
//!
//! ```text
//!   blocks of 512 bytes   ddddddddddB dddddd 000000000000000000000000 ddddddddddddddddddd...
//!                         └─ data ───┘└data┘└────── zero run ───────┘└─ data, at most 256 KiB
//! ```
//! A chunk ends after a block whose checksum says so, so that inserted or changed data moves only the cuts around it. Saved
//! memory and filesystems change in blocks, which is why whole blocks are looked at rather than every byte: it is several
//! times as fast. A run of at least 16 KiB of zeros is cut out as it is and stored nowhere.
//!
//! What must hold: the cuts depend on the bytes of the stream only, never on how they arrived; they cover the stream without
//! gap or overlap; a data chunk has at most [`MAX`] bytes, and at least [`MIN`] unless the stream or a zero run ends it.

pub(crate) const BLOCK: usize = 512;
pub(crate) const MIN: usize = 16 << 10;
pub(crate) const MAX: usize = 256 << 10;
const ZERO_MIN: usize = 16 << 10;
/// One block in so many ends a chunk: 48 KiB behind the minimum, which makes an average of 64 KiB.
const ODDS: u64 = 96;

/// A piece of the buffer that was scanned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cut {
    pub(crate) start: usize,
    pub(crate) end: usize,
    pub(crate) zero: bool,
}

/// Scans a buffer that grows at its end and, by [`Cutter::rebase`], loses its beginning.
#[derive(Debug, Default)]
pub(crate) struct Cutter {
    /// Where the chunk that is not finished begins.
    start: usize,
    /// What was looked at.
    pos: usize,
    /// Where the zeros that end at `pos` begin.
    zeros: usize,
    /// The chunk that is not finished is a zero run.
    in_zeros: bool,
}

impl Cutter {
    /// Looks at the blocks that are complete.
    pub(crate) fn scan(&mut self, buf: &[u8], cuts: &mut Vec<Cut>) {
        while let Some(block) = buf.get(self.pos..self.pos + BLOCK) {
            let next = self.pos + BLOCK;
            if is_zero(block) {
                if !self.in_zeros && next - self.zeros >= ZERO_MIN {
                    self.cut(self.zeros, false, cuts);
                    self.in_zeros = true;
                }
            } else {
                if self.in_zeros {
                    self.cut(self.pos, true, cuts);
                    self.in_zeros = false;
                }
                self.zeros = next;
                // Nothing is hashed below the minimum: no block can end a chunk there.
                if next - self.start >= MIN && ends_chunk(block) {
                    self.cut(next, false, cuts);
                }
            }
            if !self.in_zeros && next - self.start >= MAX {
                self.cut(next, false, cuts);
                self.zeros = next;
            }
            self.pos = next;
        }
    }

    /// Cuts the zeros seen so far, which need not wait for their end, and says from where on the buffer is still needed.
    pub(crate) fn settle(&mut self, cuts: &mut Vec<Cut>) -> usize {
        if self.in_zeros {
            self.cut(self.pos, true, cuts);
        }
        self.start
    }

    /// The buffer now begins where [`Cutter::settle`] said.
    pub(crate) fn rebase(&mut self) {
        self.pos -= self.start;
        self.zeros = self.zeros.saturating_sub(self.start);
        self.start = 0;
    }

    /// The stream ends with this buffer.
    pub(crate) fn finish(&mut self, buf: &[u8], cuts: &mut Vec<Cut>) {
        self.scan(buf, cuts);
        let rest = &buf[self.pos..];
        if self.in_zeros && !is_zero(rest) {
            self.cut(self.pos, true, cuts);
            self.in_zeros = false;
        }
        let zero = self.in_zeros || is_zero(&buf[self.start..]);
        self.cut(buf.len(), zero, cuts);
    }

    fn cut(&mut self, end: usize, zero: bool, cuts: &mut Vec<Cut>) {
        if end > self.start {
            cuts.push(Cut {
                start: self.start,
                end,
                zero,
            });
            self.start = end;
        }
    }
}

fn ends_chunk(block: &[u8]) -> bool {
    (u64::from(crc32c::crc32c(block)) * ODDS) >> 32 == 0
}

/// Leaves early: most blocks that are not zero show it in their first bytes.
pub(crate) fn is_zero(data: &[u8]) -> bool {
    let (wide, rest) = data.as_chunks::<64>();
    wide.iter()
        .all(|part| part.iter().fold(0, |sum, byte| sum | byte) == 0)
        && rest.iter().all(|byte| *byte == 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Cuts `data`, which arrives in pieces of the given sizes and passes through a buffer of `cap` bytes.
    fn cuts_of(data: &[u8], pieces: &[usize], cap: usize) -> Vec<Cut> {
        let (mut cutter, mut cuts, mut all) = (Cutter::default(), Vec::new(), Vec::<Cut>::new());
        let (mut buf, mut base, mut rest) = (Vec::new(), 0, data);
        let mut sizes = pieces.iter().copied().cycle();
        let mut keep = |cuts: &mut Vec<Cut>, base: usize| {
            for cut in cuts.drain(..) {
                let cut = Cut {
                    start: cut.start + base,
                    end: cut.end + base,
                    ..cut
                };
                match all.last_mut() {
                    Some(last) if last.zero && cut.zero => last.end = cut.end,
                    _ => all.push(cut),
                }
            }
        };
        while !rest.is_empty() {
            let n = sizes
                .next()
                .unwrap_or(1)
                .clamp(1, rest.len())
                .min(cap - buf.len());
            buf.extend_from_slice(&rest[..n]);
            rest = &rest[n..];
            cutter.scan(&buf, &mut cuts);
            if buf.len() == cap {
                let from = cutter.settle(&mut cuts);
                keep(&mut cuts, base);
                buf.drain(..from);
                base += from;
                cutter.rebase();
            }
        }
        cutter.finish(&buf, &mut cuts);
        keep(&mut cuts, base);
        all
    }

    /// Bytes without a pattern.
    fn noise(seed: u64, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        let mut hasher = blake3::Hasher::new();
        hasher.update(&seed.to_le_bytes());
        hasher.finalize_xof().fill(&mut out);
        out
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn cuts_depend_on_the_bytes_only_and_cover_them(
            parts in prop::collection::vec((any::<bool>(), 0u64..4, 0usize..120_000), 0..12),
            pieces in prop::collection::vec(1usize..70_000, 1..5),
            cap in (MAX + BLOCK)..(MAX * 3),
        ) {
            let data: Vec<u8> = parts
                .iter()
                .flat_map(|(zero, seed, len)| if *zero { vec![0; *len] } else { noise(*seed, *len) })
                .collect();
            let whole = cuts_of(&data, &[data.len().max(1)], data.len().max(1) + 1);
            prop_assert_eq!(&cuts_of(&data, &pieces, cap), &whole);
            let mut at = 0;
            for (i, cut) in whole.iter().enumerate() {
                prop_assert_eq!(cut.start, at);
                prop_assert!(cut.end > cut.start);
                at = cut.end;
                let bytes = &data[cut.start..cut.end];
                prop_assert_eq!(cut.zero, bytes.iter().all(|byte| *byte == 0));
                if !cut.zero {
                    prop_assert!(bytes.len() <= MAX);
                    let before_zeros = whole.get(i + 1).is_none_or(|next| next.zero);
                    prop_assert!(bytes.len() >= MIN || before_zeros, "{} at {}", bytes.len(), cut.start);
                }
            }
            prop_assert_eq!(at, data.len());
        }
    }

    #[test]
    fn chunks_average_64_kib() {
        let data = noise(1, 32 << 20);
        let average = data.len() / cuts_of(&data, &[1 << 20], 2 << 20).len();
        assert!((58 << 10..70 << 10).contains(&average), "{average}");
    }

    #[test]
    fn an_inserted_block_moves_only_the_cuts_around_it() {
        let before = noise(2, 8 << 20);
        let mut after = before.clone();
        after.splice(3_000_320..3_000_320, noise(3, BLOCK));
        let names = |data: &[u8]| -> std::collections::HashSet<blake3::Hash> {
            let cuts = cuts_of(data, &[1 << 20], 2 << 20);
            cuts.iter()
                .map(|cut| blake3::hash(&data[cut.start..cut.end]))
                .collect()
        };
        let new = names(&after).difference(&names(&before)).count();
        assert!((1..=5).contains(&new), "{new} new chunks");
    }
}
