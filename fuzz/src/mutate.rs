//! Inputs for those who have no coverage to go by: what is known to be interesting, changed a little, again and again.
//!
//! What must hold: an input follows from the seed, its number and the known ones alone, so that a number names it.

/// SplitMix64: small, and good enough to choose with.
#[derive(Debug, Clone)]
pub struct Choice(u64);

impl Choice {
    pub fn new(seed: u64, number: u64) -> Self {
        Self(seed ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Less than `end`; zero where that is nothing.
    pub fn below(&mut self, end: usize) -> usize {
        let end = end as u64;
        usize::try_from(self.number().checked_rem(end).unwrap_or(0)).unwrap_or(0)
    }

    fn of<'a, T: ?Sized>(&mut self, all: &[&'a T]) -> &'a T {
        all[self.below(all.len())]
    }
}

/// Numbers at which lengths and sums go wrong.
const NUMBERS: [u64; 14] = [
    0,
    1,
    2,
    127,
    128,
    255,
    256,
    4096,
    32_767,
    65_535,
    0x7fff_ffff,
    0xffff_ffff,
    0x7fff_ffff_ffff_ffff,
    u64::MAX,
];

/// Pieces of text that parsers look for.
const WORDS: [&[u8]; 44] = [
    b"{",
    b"}",
    b"[",
    b"]",
    b"\"",
    b"\\",
    b":",
    b",",
    b"null",
    b"true",
    b"-1",
    b"1e999",
    b"18446744073709551616",
    b"9223372036854775807",
    b"-9223372036854775808",
    b"0.1",
    b"\\u0000",
    b"\\ud800",
    b"\xff",
    b"\0",
    b"\r\n",
    b"\n\n",
    b"../",
    b"/",
    b"*",
    b"**",
    b"?",
    b"%2e",
    b"%",
    b"@",
    b"+",
    b"-",
    b"#",
    b"$",
    b"${",
    b"'",
    b"(",
    b")",
    b" AND ",
    b" OR ",
    b"data:",
    b"xn--",
    b"\xe2\x80\xa8",
    b"\xc3\xb6",
];

/// One of the known inputs with a few changes.
pub fn input(known: &[Vec<u8>], seed: u64, number: u64, longest: usize) -> Vec<u8> {
    let mut choice = Choice::new(seed, number);
    let nothing = Vec::new();
    let mut bytes = known.get(choice.below(known.len())).unwrap_or(&nothing).clone();
    let most = 1 << choice.below(5);
    let changes = 1 + choice.below(most);
    for _ in 0..changes {
        let other = known.get(choice.below(known.len())).unwrap_or(&nothing);
        change(&mut bytes, other, &mut choice);
        bytes.truncate(longest);
    }
    bytes
}

fn change(bytes: &mut Vec<u8>, other: &[u8], choice: &mut Choice) {
    let at = choice.below(bytes.len() + 1);
    let most = 1 << choice.below(12);
    let end = at + choice.below(bytes.len() - at + 1).min(most);
    match choice.below(11) {
        0 => bytes.truncate(at),
        1 => drop(bytes.drain(at..end)),
        2 => {
            let piece = bytes[at..end].to_vec();
            let to = choice.below(bytes.len() + 1);
            bytes.splice(to..to, piece);
        }
        3 | 4 => {
            let from = choice.below(other.len() + 1);
            let length = choice.below(other.len() - from + 1);
            let piece = other[from..from + length].to_vec();
            let until = if choice.below(2) == 0 { at } else { end };
            bytes.splice(at..until, piece);
        }
        5 => {
            let word = choice.of(&WORDS);
            bytes.splice(at..at, word.iter().copied());
        }
        6 => {
            let number = NUMBERS[choice.below(NUMBERS.len())]
                .wrapping_add(choice.below(3) as u64)
                .wrapping_sub(1);
            let width = 1 << choice.below(4);
            let big = choice.below(2) == 0;
            let piece = if big {
                number.to_be_bytes()[8 - width..].to_vec()
            } else {
                number.to_le_bytes()[..width].to_vec()
            };
            let until = (at + width).min(bytes.len());
            bytes.splice(at..until, piece);
        }
        7 => digits(bytes, at, choice),
        8 => {
            let byte = choice.number().to_le_bytes()[0];
            bytes.splice(at..at, std::iter::repeat_n(byte, 1 << choice.below(10)));
        }
        _ => {
            if let Some(byte) = bytes.get_mut(at) {
                let bits = choice.number().to_le_bytes();
                *byte = if bits[0] & 1 == 0 {
                    *byte ^ (1 << (bits[1] & 7))
                } else {
                    bits[1]
                };
            }
        }
    }
}

/// Another number where one stands.
fn digits(bytes: &mut Vec<u8>, from: usize, choice: &mut Choice) {
    let Some(start) = bytes[from..]
        .iter()
        .position(u8::is_ascii_digit)
        .map(|at| from + at)
    else {
        return;
    };
    let length = bytes[start..]
        .iter()
        .take_while(|byte| byte.is_ascii_digit())
        .count();
    let number = NUMBERS[choice.below(NUMBERS.len())].to_string();
    bytes.splice(start..start + length, number.into_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_names_an_input() {
        let known = [b"hello 12".to_vec(), vec![0; 300], Vec::new()];
        for number in 0..2000 {
            let one = input(&known, 7, number, 512);
            assert_eq!(one, input(&known, 7, number, 512));
            assert!(one.len() <= 512);
        }
        assert_ne!(input(&known, 7, 1, 512), input(&known, 8, 1, 512));
        assert!(input(&[], 1, 1, 10).len() <= 10);
    }
}
