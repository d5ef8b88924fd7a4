//! Files with holes, as GNU's PAX format 1.0 has them: the content begins with a list of where there is data.
//!
//! ```text
//!   "3\n0\n4096\n1048576\n8192\n2097152\n0\n" padded to 512    count, then offset and length of each piece
//!   [4096 bytes][8192 bytes]                                   the last piece is empty and says where the file ends
//! ```

use std::io::{self, Read};
use std::os::fd::BorrowedFd;

use rustix::fs::SeekFrom;
use rustix::io::Errno;

use crate::format::{BLOCK, padding};
use crate::header::read_whole;
use crate::invalid;

/// A file's data, in order, without overlaps.
pub type Map = Vec<(u64, u64)>;

/// More pieces than a hostile stream may make us remember (16 bytes each).
pub(crate) const MOST_PIECES: u64 = 1 << 20;

/// Where a file has data; `None` if it has no holes worth mentioning.
pub(crate) fn map_of(file: BorrowedFd<'_>, size: u64, blocks: u64) -> io::Result<Option<Map>> {
    if blocks.saturating_mul(512) >= size {
        return Ok(None);
    }
    let (mut map, mut at, mut data) = (Map::new(), 0, 0);
    while at < size {
        let start = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(start) => start.min(size),
            Err(Errno::NXIO) => break,
            // A filesystem that cannot tell.
            Err(Errno::INVAL) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        if start >= size {
            break;
        }
        let end = match rustix::fs::seek(file, SeekFrom::Hole(start)) {
            Ok(end) => end.min(size),
            // Cut off meanwhile.
            Err(Errno::NXIO) => size,
            Err(error) => return Err(error.into()),
        };
        if end <= start || map.len() as u64 + 2 > MOST_PIECES {
            return Ok(None);
        }
        map.push((start, end - start));
        data += end - start;
        at = end;
    }
    if data == size {
        return Ok(None);
    }
    if map.last().is_none_or(|(start, length)| start + length < size) {
        map.push((size, 0));
    }
    Ok(Some(map))
}

/// The list as it stands before the content.
pub(crate) fn text_of(map: &Map) -> Vec<u8> {
    use std::fmt::Write;
    let mut text = format!("{}\n", map.len());
    for (start, length) in map {
        let _ = writeln!(text, "{start}\n{length}");
    }
    let mut text = text.into_bytes();
    text.extend_from_slice(padding(text.len() as u64));
    text
}

/// Reads the list from content of `size` bytes for a file of `real_size`. Gives it and how many bytes it took.
pub fn read_map(input: &mut dyn Read, size: u64, real_size: u64) -> io::Result<(Map, u64)> {
    let mut numbers = Numbers {
        input,
        block: [0; BLOCK],
        at: BLOCK,
        taken: 0,
        most: size,
    };
    let count = numbers.next()?;
    if count > MOST_PIECES {
        return Err(invalid(format!(
            "a file in {count} pieces; at most {MOST_PIECES} are read"
        )));
    }
    let mut map = Map::new();
    for _ in 0..count {
        map.push((numbers.next()?, numbers.next()?));
    }
    let taken = numbers.taken;
    check(&map, size - taken, real_size)?;
    Ok((map, taken))
}

/// Whether a map that somebody sent is one: in order, within a file of `real_size`, and of `data` bytes together.
pub(crate) fn check(map: &Map, data: u64, real_size: u64) -> io::Result<()> {
    let (mut end, mut sum) = (0u64, 0u64);
    for (start, length) in map {
        let next = start
            .checked_add(*length)
            .filter(|next| *start >= end && *next <= real_size);
        end = next.ok_or_else(|| invalid("the list of a file's pieces makes no sense"))?;
        // No more than `real_size`, since they do not overlap.
        sum += length;
    }
    match sum == data {
        true => Ok(()),
        false => Err(invalid("the list of a file's pieces does not fit its content")),
    }
}

struct Numbers<'a> {
    input: &'a mut dyn Read,
    block: [u8; BLOCK],
    at: usize,
    taken: u64,
    most: u64,
}

impl Numbers<'_> {
    fn next(&mut self) -> io::Result<u64> {
        let (mut number, mut digits) = (0u64, 0);
        loop {
            if self.at == BLOCK {
                if self.taken + BLOCK as u64 > self.most {
                    return Err(invalid("the list of a file's pieces is longer than its content"));
                }
                read_whole(self.input, &mut self.block)?;
                self.taken += BLOCK as u64;
                self.at = 0;
            }
            let byte = self.block[self.at];
            self.at += 1;
            match byte {
                b'0'..=b'9' if digits < 19 => {
                    number = number * 10 + u64::from(byte - b'0');
                    digits += 1;
                }
                b'\n' if digits > 0 => return Ok(number),
                _ => return Err(invalid("the list of a file's pieces is damaged")),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_map_survives() {
        let map: Map = (0..200)
            .map(|n| (n * 10_000, 4096))
            .chain([(1 << 40, 0)])
            .collect();
        let text = text_of(&map);
        let size = text.len() as u64 + 200 * 4096;
        let read = read_map(&mut text.as_slice(), size, 1 << 40).unwrap();
        assert_eq!(read, (map, text.len() as u64));
    }

    #[test]
    fn maps_that_lie_are_refused() {
        for (text, size, real) in [
            ("1\n0\n10\n", 512 + 11, 10),
            ("1\n5\n10\n", 512 + 10, 10),
            ("2\n5\n5\n0\n5\n", 512 + 10, 10),
            ("1\n18446744073709551615\n1\n", 513, 10),
            ("9999999\n", 512, 10),
            ("x", 512, 10),
            ("1\n0\n0\n", 100, 10),
        ] {
            let mut block = [0; BLOCK];
            block[..text.len()].copy_from_slice(text.as_bytes());
            assert!(read_map(&mut block.as_slice(), size, real).is_err(), "{text:?}");
        }
    }
}
