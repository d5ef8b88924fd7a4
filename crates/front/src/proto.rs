//! What a message of protocol buffers takes in memory, found out before it is decoded.
//!
//! An empty message in a list is two bytes on the wire, fewer where they are compressed, and may be a kilobyte once it is
//! decoded. So whoever decodes weighs first: this walks the wire format by a table of those fields that cost more than their
//! bytes.
//!
//! What must hold:
//! - What decoding allocates for lists, maps and boxes is never more than the weight.
//! - Every byte is looked at once, and nothing is kept but where the open messages end.
//! - What is refused as broken here would be refused by whoever decodes, too; so nobody can hide lists behind a mistake.

use std::fmt;

/// As deep as prost decodes.
const DEPTH: usize = 100;

/// A message, by those of its fields that cost more than their bytes.
#[derive(Debug, Clone, Copy)]
pub struct Message {
    /// In the order of their numbers.
    pub fields: &'static [Field],
}

#[derive(Debug, Clone, Copy)]
pub struct Field {
    pub number: u32,
    pub holds: Holds,
    /// What the first value costs in each message that has one: containers begin with room for several.
    pub first: u32,
    /// What each further one costs.
    pub next: u32,
}

#[derive(Debug, Clone, Copy)]
pub enum Holds {
    /// A message, by its place in the table.
    Message(u16),
    Text,
    /// Numbers, of which many may come in one piece.
    Numbers,
}

/// Why a message is not decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unfit {
    /// It would take more than the limit.
    TooHeavy { limit: u64 },
    /// It is not in the format of protocol buffers.
    Broken,
}

impl fmt::Display for Unfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooHeavy { limit } => write!(
                f,
                "the lists of this message would take more than {} KiB of memory; send fewer elements at once",
                limit / 1024
            ),
            Self::Broken => f.write_str("the message is not in the format of protocol buffers"),
        }
    }
}

impl std::error::Error for Unfit {}

struct Open {
    message: usize,
    end: usize,
    /// Which of its fields have come, of the first 64.
    came: u64,
}

/// What `bytes` take decoded, as message `root` of `table`.
pub fn weigh(table: &[Message], root: usize, bytes: &[u8], limit: u64) -> Result<u64, Unfit> {
    let mut weight = bytes.len() as u64;
    let mut at = 0;
    let open = |message: usize, end: usize| Open {
        message,
        end,
        came: 0,
    };
    let mut opened = vec![open(root, bytes.len())];
    while let Some(current) = opened.last_mut() {
        if weight > limit {
            return Err(Unfit::TooHeavy { limit });
        }
        if at == current.end {
            opened.pop();
            continue;
        }
        let (number, kind) = key(bytes, &mut at)?;
        let fields = table
            .get(current.message)
            .map_or(&[][..], |message| message.fields);
        let known = fields.binary_search_by_key(&number, |field| field.number).ok();
        let mut pay = |times: u64| {
            let Some(place) = known else { return };
            let bit = 1_u64.checked_shl(u32::try_from(place).unwrap_or(64)).unwrap_or(0);
            let is_first = current.came & bit == 0;
            current.came |= bit;
            let field = &fields[place];
            let (first, next) = (u64::from(field.first), u64::from(field.next));
            weight += match is_first {
                true => first + next * times.saturating_sub(1),
                false => next * times,
            };
        };
        let end = current.end;
        match kind {
            0 => {
                varint(bytes, &mut at)?;
                pay(1);
            }
            1 | 5 => {
                skip(&mut at, if kind == 1 { 8 } else { 4 }, end)?;
                pay(1);
            }
            2 => {
                let length = varint(bytes, &mut at)?;
                let start = at;
                skip(&mut at, length, end)?;
                match known.map(|place| fields[place].holds) {
                    Some(Holds::Message(message)) => {
                        pay(1);
                        if opened.len() > DEPTH {
                            return Err(Unfit::Broken);
                        }
                        opened.push(open(message.into(), at));
                        at = start;
                    }
                    Some(Holds::Text) => pay(1),
                    // The shortest numbers are a byte each.
                    Some(Holds::Numbers) => pay(length),
                    None => {}
                }
            }
            3 => skip_group(bytes, &mut at, end)?,
            _ => return Err(Unfit::Broken),
        }
        if at > end {
            return Err(Unfit::Broken);
        }
    }
    Ok(weight)
}

fn key(bytes: &[u8], at: &mut usize) -> Result<(u32, u8), Unfit> {
    let key = u32::try_from(varint(bytes, at)?).map_err(|_| Unfit::Broken)?;
    match key >> 3 {
        0 => Err(Unfit::Broken),
        number => Ok((number, (key & 7) as u8)),
    }
}

fn varint(bytes: &[u8], at: &mut usize) -> Result<u64, Unfit> {
    let mut value = 0;
    for place in 0..10 {
        let byte = *bytes.get(*at).ok_or(Unfit::Broken)?;
        *at += 1;
        value |= u64::from(byte & 0x7f) << (7 * place);
        if byte < 0x80 {
            return Ok(value);
        }
    }
    Err(Unfit::Broken)
}

fn skip(at: &mut usize, length: u64, end: usize) -> Result<(), Unfit> {
    let after = usize::try_from(length)
        .ok()
        .and_then(|length| at.checked_add(length));
    *at = after.filter(|after| *after <= end).ok_or(Unfit::Broken)?;
    Ok(())
}

/// A field of a kind that nobody uses any more, and that is thrown away.
fn skip_group(bytes: &[u8], at: &mut usize, end: usize) -> Result<(), Unfit> {
    let mut depth = 1;
    while depth > 0 {
        match key(bytes, at)?.1 {
            0 => drop(varint(bytes, at)?),
            1 => skip(at, 8, end)?,
            5 => skip(at, 4, end)?,
            2 => {
                let length = varint(bytes, at)?;
                skip(at, length, end)?;
            }
            3 => depth += 1,
            4 => depth -= 1,
            _ => return Err(Unfit::Broken),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A message with itself in a list, as one, texts, and numbers.
    static TABLE: &[Message] = &[Message {
        fields: &[
            Field {
                number: 1,
                holds: Holds::Message(0),
                first: 400,
                next: 200,
            },
            Field {
                number: 2,
                holds: Holds::Message(0),
                first: 0,
                next: 0,
            },
            Field {
                number: 3,
                holds: Holds::Text,
                first: 96,
                next: 48,
            },
            Field {
                number: 4,
                holds: Holds::Numbers,
                first: 32,
                next: 8,
            },
        ],
    }];

    fn weight(bytes: &[u8]) -> Result<u64, Unfit> {
        weigh(TABLE, 0, bytes, 1 << 20).map(|weight| weight - bytes.len() as u64)
    }

    #[test]
    fn what_is_short_on_the_wire_is_weighed_by_what_it_becomes() {
        assert_eq!(weight(b""), Ok(0));
        assert_eq!(weight(&[0x0a, 0].repeat(10)), Ok(400 + 9 * 200));
        assert_eq!(weight(&[0x1a, 0].repeat(10)), Ok(96 + 9 * 48));
        // One in one in one: each has a list of its own.
        assert_eq!(weight(&[0x0a, 4, 0x0a, 2, 0x0a, 0]), Ok(3 * 400));
        // A message that is a part of its parent costs nothing, what is in it does.
        assert_eq!(weight(&[0x12, 4, 0x0a, 0, 0x0a, 0]), Ok(600));
        // Numbers alone and together.
        assert_eq!(weight(&[0x20, 5, 0x20, 6]), Ok(40));
        assert_eq!(weight(&[0x22, 3, 5, 6, 7]), Ok(32 + 2 * 8));
        // Nobody knows these, so nothing is made of them: a text, numbers of both sizes, a group with a group in it.
        assert_eq!(weight(&[0x7a, 2, 0x0a, 0]), Ok(0));
        assert_eq!(weight(&[0x79, 0, 0, 0, 0, 0, 0, 0, 0, 0x7d, 0, 0, 0, 0]), Ok(0));
        assert_eq!(weight(&[0x7b, 0x0a, 0, 0x7b, 0x7c, 0x7c, 0x0a, 0]), Ok(400));
    }

    #[test]
    fn too_much_is_refused_and_so_is_what_is_broken() {
        let refused = weigh(TABLE, 0, &[0x0a, 0].repeat(10_000), 1 << 20).unwrap_err();
        assert_eq!(refused, Unfit::TooHeavy { limit: 1 << 20 });
        for broken in [
            &[0x0a][..],
            &[0x0a, 1],
            &[0x00],
            &[0x0e],
            &[0x7c],
            &[0x7b],
            &[0xff; 11],
            // A message that goes on beyond the end of the one that it is in.
            &[0x0a, 2, 0x0a, 4, 0x0a, 0],
            &[0x0a, 1, 0x20, 1],
        ] {
            assert_eq!(weight(broken), Err(Unfit::Broken), "{broken:?}");
        }
        let mut nested = Vec::new();
        for _ in 0..120 {
            let mut outer = vec![0x12];
            let mut length = nested.len();
            while length > 127 {
                outer.push((length & 127) as u8 | 128);
                length >>= 7;
            }
            outer.push(length as u8);
            outer.append(&mut nested);
            nested = outer;
        }
        assert_eq!(weight(&nested), Err(Unfit::Broken));
    }

    proptest! {
        #[test]
        fn anything_may_come(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = weigh(TABLE, 0, &bytes, 1 << 20);
        }
    }
}
