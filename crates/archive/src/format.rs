//! The tar format, as far as it is the same for everybody who reads it: blocks of 512 bytes, their sums and numbers, and the
//! records of PAX headers.
//!
//! Three read archives: [`crate::unpack`] from a stream, `image` from a file in which contents stay where they lie, and
//! `guest` as the bytes arrive. Which names they take, how long an extension may be and what they make of an entry is for
//! each of them to say; what stands in a header is said here.
//!
//! What must hold: no bytes make it panic, nothing is allocated beyond what a block can hold, and a number is what stands
//! there or none at all, never a part of it.

/// Headers are one block, and contents are padded to whole ones.
pub const BLOCK: usize = 512;

const SUM: std::ops::Range<usize> = 148..156;

/// What kind of entry a header begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TypeFlag {
    File,
    HardLink,
    Symlink,
    CharDevice,
    BlockDevice,
    Directory,
    Fifo,
    /// GNU: the content is the name, or the target of the link, of the entry that follows.
    LongName,
    LongLink,
    /// Records about the entry that follows.
    Pax,
    /// Records about all that follow. Programs put comments there.
    PaxGlobal,
    /// A file with holes in GNU's old way.
    OldSparse,
    Other(u8),
}

impl TypeFlag {
    pub fn of(byte: u8) -> Self {
        match byte {
            // Contiguous files, `7`, are files to everybody.
            b'0' | 0 | b'7' => Self::File,
            b'1' => Self::HardLink,
            b'2' => Self::Symlink,
            b'3' => Self::CharDevice,
            b'4' => Self::BlockDevice,
            b'5' => Self::Directory,
            b'6' => Self::Fifo,
            b'L' => Self::LongName,
            b'K' => Self::LongLink,
            b'x' => Self::Pax,
            b'g' => Self::PaxGlobal,
            b'S' => Self::OldSparse,
            other => Self::Other(other),
        }
    }

    pub fn byte(self) -> u8 {
        match self {
            Self::File => b'0',
            Self::HardLink => b'1',
            Self::Symlink => b'2',
            Self::CharDevice => b'3',
            Self::BlockDevice => b'4',
            Self::Directory => b'5',
            Self::Fifo => b'6',
            Self::LongName => b'L',
            Self::LongLink => b'K',
            Self::Pax => b'x',
            Self::PaxGlobal => b'g',
            Self::OldSparse => b'S',
            Self::Other(byte) => byte,
        }
    }

    /// Before POSIX a directory was a file whose name ends with a slash. The name may stand in an extension, so whoever has
    /// read those asks.
    #[must_use]
    pub fn of_name(self, name: &[u8]) -> Self {
        match self {
            Self::File if name.ends_with(b"/") => Self::Directory,
            other => other,
        }
    }
}

/// A block whose sum is not the one that it names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BadSum;

/// Why a field is no number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BadNumber {
    Negative,
    TooLarge,
    Malformed,
}

/// A block that begins an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header<'a>(&'a [u8; BLOCK]);

impl<'a> Header<'a> {
    /// `None` for a block of zeros, which ends an archive.
    pub fn parse(block: &'a [u8; BLOCK]) -> Result<Option<Self>, BadSum> {
        if block.iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        let named = number(&block[SUM]).map_err(|_| BadSum)?;
        let (unsigned, signed) = sums(block);
        // Some programs of old took bytes for signed ones.
        if named == u64::from(unsigned) || i64::try_from(named) == Ok(i64::from(signed)) {
            Ok(Some(Self(block)))
        } else {
            Err(BadSum)
        }
    }

    pub fn flag(&self) -> TypeFlag {
        TypeFlag::of(self.0[156])
    }

    pub fn name(&self) -> Vec<u8> {
        let (prefix, name) = (text(&self.0[345..500]), text(&self.0[..100]));
        // Only in POSIX headers; GNU's have other things there.
        if prefix.is_empty() || &self.0[257..263] != b"ustar\0" {
            name.to_vec()
        } else {
            [prefix, b"/", name].concat()
        }
    }

    pub fn link(&self) -> &'a [u8] {
        text(&self.0[157..257])
    }

    pub fn mode(&self) -> Result<u64, BadNumber> {
        number(&self.0[100..108])
    }

    pub fn uid(&self) -> Result<u64, BadNumber> {
        number(&self.0[108..116])
    }

    pub fn gid(&self) -> Result<u64, BadNumber> {
        number(&self.0[116..124])
    }

    pub fn size(&self) -> Result<u64, BadNumber> {
        number(&self.0[124..136])
    }

    pub fn mtime(&self) -> Result<u64, BadNumber> {
        number(&self.0[136..148])
    }

    /// Major and minor of a device.
    pub fn device(&self) -> (Result<u64, BadNumber>, Result<u64, BadNumber>) {
        (number(&self.0[329..337]), number(&self.0[337..345]))
    }
}

/// Whether a block says that it is a header. Those of before POSIX do not.
pub fn has_magic(block: &[u8; BLOCK]) -> bool {
    &block[257..262] == b"ustar"
}

/// Writes a block's sum into it, after all else.
pub fn seal(block: &mut [u8; BLOCK]) {
    let (sum, _) = sums(block);
    block[SUM].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
}

/// Of all bytes, with blanks in place of the sum itself.
fn sums(block: &[u8; BLOCK]) -> (u32, i32) {
    let bytes = block.iter().enumerate();
    let bytes = bytes.map(|(at, byte)| if SUM.contains(&at) { b' ' } else { *byte });
    bytes.fold((0, 0), |(unsigned, signed), byte| {
        (unsigned + u32::from(byte), signed + i32::from(byte.cast_signed()))
    })
}

/// The zeros after content of this length.
pub fn padding(length: u64) -> &'static [u8] {
    const ZEROS: [u8; BLOCK] = [0; BLOCK];
    let over = (length % BLOCK as u64) as usize;
    &ZEROS[..(BLOCK - over) % BLOCK]
}

/// A field of a header: octal digits with blanks around them, or as GNU has it for large numbers: a set bit and big-endian
/// bytes, in two's complement. Nothing at all is zero.
pub fn number(field: &[u8]) -> Result<u64, BadNumber> {
    if let Some((first, rest)) = field.split_first()
        && first & 0x80 != 0
    {
        let (high, low) = rest.split_at(rest.len().saturating_sub(8));
        if first & 0x40 != 0 {
            return Err(BadNumber::Negative);
        }
        if *first != 0x80 || high.iter().any(|byte| *byte != 0) {
            return Err(BadNumber::TooLarge);
        }
        return Ok(low.iter().fold(0, |number, byte| number << 8 | u64::from(*byte)));
    }
    let field = text(field);
    let blank = |byte: &u8| *byte == b' ';
    let from = field.iter().take_while(|byte| blank(byte)).count();
    let blanks_behind = field[from..].iter().rev().take_while(|byte| blank(byte)).count();
    let digits = &field[from..field.len() - blanks_behind];
    digits.iter().try_fold(0u64, |number, digit| match digit {
        b'0'..=b'7' => number
            .checked_mul(8)
            .map(|number| number | u64::from(digit - b'0'))
            .ok_or(BadNumber::TooLarge),
        _ => Err(BadNumber::Malformed),
    })
}

/// Up to the first zero.
pub fn text(field: &[u8]) -> &[u8] {
    let end = field.iter().position(|byte| *byte == 0).unwrap_or(field.len());
    &field[..end]
}

/// Why a PAX header cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BadRecord(pub &'static str);

/// The records of a PAX header, `<length> <key>=<value>\n` each, where the length counts itself.
pub fn records(header: &[u8]) -> Records<'_> {
    Records { rest: header }
}

/// See [`records`]. Over after the first that cannot be read.
#[derive(Debug, Clone)]
pub struct Records<'a> {
    rest: &'a [u8],
}

impl<'a> Iterator for Records<'a> {
    type Item = Result<(&'a [u8], &'a [u8]), BadRecord>;

    fn next(&mut self) -> Option<Self::Item> {
        let rest = std::mem::take(&mut self.rest);
        if rest.is_empty() {
            return None;
        }
        Some(first_record(rest).map(|(record, after)| {
            self.rest = after;
            record
        }))
    }
}

type Record<'a> = (&'a [u8], &'a [u8]);

fn first_record(bytes: &[u8]) -> Result<(Record<'_>, &[u8]), BadRecord> {
    // No header is so long that its length has more digits.
    let blank = bytes.iter().take(8).position(|byte| *byte == b' ');
    let blank = blank.ok_or(BadRecord("a PAX record without a length"))?;
    let length = decimal(&bytes[..blank]).and_then(|length| usize::try_from(length).ok());
    let (record, rest) = length
        .filter(|length| *length > blank + 1)
        .and_then(|length| bytes.split_at_checked(length))
        .ok_or(BadRecord("a PAX record with a wrong length"))?;
    let body = record[blank + 1..]
        .strip_suffix(b"\n")
        .ok_or(BadRecord("a PAX record without an end"))?;
    let equals = body.iter().position(|byte| *byte == b'=');
    let equals = equals.ok_or(BadRecord("a PAX record without a value"))?;
    Ok(((&body[..equals], &body[equals + 1..]), rest))
}

/// A record's value that is a whole number.
pub fn decimal(value: &[u8]) -> Option<u64> {
    std::str::from_utf8(value).ok()?.parse().ok()
}

/// A record's value that is a time: seconds since 1970, and nanoseconds that count forward from there also before it.
pub fn time(value: &[u8]) -> Option<(i64, u32)> {
    let text = std::str::from_utf8(value).ok()?;
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let seconds: i64 = whole.parse().ok()?;
    let mut nanos = 0;
    for digit in fraction.chars().chain(std::iter::repeat('0')).take(9) {
        nanos = nanos * 10 + digit.to_digit(10)?;
    }
    if whole.starts_with('-') && nanos > 0 {
        return Some((seconds.checked_sub(1)?, 1_000_000_000 - nanos));
    }
    Some((seconds, nanos))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_whole_or_none() {
        for (field, read) in [
            (&b"0000644\0"[..], Ok(0o644)),
            (b"   644 \0", Ok(0o644)),
            (b"644\0junk", Ok(0o644)),
            (b"\0\0\0\0\0\0\0\0", Ok(0)),
            (b"        ", Ok(0)),
            (b"77777777777 ", Ok((1 << 33) - 1)),
            (b"777777777777", Ok((1 << 36) - 1)),
            (b"12 34\0\0\0", Err(BadNumber::Malformed)),
            (b"644\t\0\0\0\0", Err(BadNumber::Malformed)),
            (b"+644\0\0\0\0", Err(BadNumber::Malformed)),
            (b"648\0\0\0\0\0", Err(BadNumber::Malformed)),
            (b"\x80\0\0\0\0\0\0\x07", Ok(7)),
            (b"\x80\0\0\0\xff\xff\xff\xff\xff\xff\xff\xff", Ok(u64::MAX)),
            (b"\x80\0\0\x01\0\0\0\0\0\0\0\0", Err(BadNumber::TooLarge)),
            (b"\x81\0\0\0\0\0\0\x07", Err(BadNumber::TooLarge)),
            (&[0xff; 12], Err(BadNumber::Negative)),
        ] {
            assert_eq!(number(field), read, "{field:?}");
        }
        assert_eq!(number(&[b'7'; 30]), Err(BadNumber::TooLarge));
    }

    #[test]
    fn sums_of_either_kind_are_taken_and_no_others() {
        let mut block = [0; BLOCK];
        assert_eq!(Header::parse(&block), Ok(None));
        block[..4].copy_from_slice(b"a\xff\xfe\x80");
        seal(&mut block);
        assert_eq!(Header::parse(&block).unwrap().unwrap().name(), b"a\xff\xfe\x80");
        let signed = format!("{:06o}\0 ", sums(&block).1);
        block[SUM].copy_from_slice(signed.as_bytes());
        assert!(Header::parse(&block).is_ok());
        block[0] = b'b';
        assert_eq!(Header::parse(&block), Err(BadSum));
        assert_eq!(Header::parse(&[b'z'; BLOCK]), Err(BadSum));
    }

    #[test]
    fn a_prefix_is_one_in_posix_headers_only() {
        let mut block = [0; BLOCK];
        block[..1].copy_from_slice(b"n");
        block[345..348].copy_from_slice(b"d/e");
        for (magic, name) in [(b"ustar\x0000", &b"d/e/n"[..]), (b"ustar  \0", b"n")] {
            block[257..265].copy_from_slice(magic);
            seal(&mut block);
            assert!(has_magic(&block));
            assert_eq!(Header::parse(&block).unwrap().unwrap().name(), name);
        }
    }

    #[test]
    fn flags_are_bytes_and_back() {
        for byte in 0..=u8::MAX {
            let flag = TypeFlag::of(byte);
            assert_eq!(TypeFlag::of(flag.byte()), flag);
        }
        assert_eq!(TypeFlag::of(b'7').of_name(b"a/"), TypeFlag::Directory);
        assert_eq!(TypeFlag::of(b'2').of_name(b"a/"), TypeFlag::Symlink);
    }

    #[test]
    fn records_are_whole_or_the_last() {
        let whole: Vec<_> = records(b"12 path=a/b\n11 size=42\n4 =\n").collect();
        assert_eq!(
            whole,
            [
                Ok((&b"path"[..], &b"a/b"[..])),
                Ok((b"size", b"42")),
                Ok((b"", b""))
            ]
        );
        for bad in [
            &b"99 a=b\n"[..],
            b"0 a=b\n",
            b"6 a=bX",
            b"x a=b\n",
            b"5 ab\n",
            b"1 ",
            b"2 ",
            b"3 \n",
            b"00000012 path=a/b\n",
        ] {
            let read: Vec<_> = records(bad).collect();
            assert!(matches!(read.as_slice(), [Err(_)]), "{bad:?}: {read:?}");
        }
    }

    proptest::proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(proptest::num::u8::ANY, BLOCK)) {
            let mut block: [u8; BLOCK] = bytes.try_into().unwrap();
            seal(&mut block);
            let header = Header::parse(&block).unwrap().unwrap();
            let _ = (header.flag(), header.name(), header.link(), header.device());
            let _ = (header.mode(), header.uid(), header.gid(), header.size(), header.mtime());
            let _ = records(&block).count();
            let _ = (time(&block), decimal(&block));
        }
    }
}
