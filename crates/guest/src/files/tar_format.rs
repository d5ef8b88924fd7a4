//! Members of an archive as this program writes and takes them: long names and numbers the GNU way when written, both GNU's
//! and pax's when read. What stands in a header is read by [`atoll_archive::format`].

use atoll_archive::format::{self, BLOCK, BadNumber, TypeFlag, padding};

use crate::failure::{Outcome, invalid, show};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) name: Vec<u8>,
    pub(crate) link: Vec<u8>,
    pub(crate) kind: TypeFlag,
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) size: u64,
    pub(crate) modified: i64,
}

impl Header {
    /// Appends the header, with the members for long names before it.
    pub(crate) fn write(&self, out: &mut Vec<u8>) {
        for (kind, long) in [(TypeFlag::LongName, &self.name), (TypeFlag::LongLink, &self.link)] {
            if long.len() > 100 {
                let carrier = Self {
                    name: b"././@LongLink".to_vec(),
                    link: Vec::new(),
                    kind,
                    mode: 0o644,
                    uid: 0,
                    gid: 0,
                    size: long.len() as u64 + 1,
                    modified: 0,
                };
                carrier.write_block(out);
                out.extend_from_slice(long);
                let padding = 1 + padding(carrier.size).len();
                out.resize(out.len() + padding, 0);
            }
        }
        self.write_block(out);
    }

    fn write_block(&self, out: &mut Vec<u8>) {
        let mut block = [0; BLOCK];
        let mut put = |at: usize, bytes: &[u8], most: usize| {
            let length = bytes.len().min(most);
            block[at..at + length].copy_from_slice(&bytes[..length]);
        };
        put(0, &self.name, 100);
        put(100, &number(u64::from(self.mode), 8), 8);
        put(108, &number(u64::from(self.uid), 8), 8);
        put(116, &number(u64::from(self.gid), 8), 8);
        put(124, &number(self.size, 12), 12);
        put(136, &number(self.modified.max(0).unsigned_abs(), 12), 12);
        put(156, &[self.kind.byte()], 1);
        put(157, &self.link, 100);
        put(257, b"ustar  \0", 8);
        format::seal(&mut block);
        out.extend_from_slice(&block);
    }

    /// `None` for a block of zeros, which ends the archive.
    pub(crate) fn parse(block: &[u8; BLOCK]) -> Outcome<Option<Self>> {
        let header = format::Header::parse(block)
            .map_err(|_| invalid("not a tar stream: a header's checksum is wrong"))?;
        let Some(header) = header else {
            return Ok(None);
        };
        // One that does not fit is taken for none.
        let small = |number| fine(number).map(|number| u32::try_from(number).unwrap_or(0));
        Ok(Some(Self {
            name: header.name(),
            link: header.link().to_vec(),
            kind: header.flag(),
            mode: small(header.mode())?,
            uid: small(header.uid())?,
            gid: small(header.gid())?,
            size: fine(header.size())?,
            modified: i64::try_from(header.mtime().unwrap_or(0)).unwrap_or(0),
        }))
    }
}

fn fine(number: Result<u64, BadNumber>) -> Outcome<u64> {
    number.map_err(|bad| match bad {
        BadNumber::Negative | BadNumber::TooLarge => invalid("a tar header carries an impossible number"),
        BadNumber::Malformed => invalid("not a tar stream: a header's number is malformed"),
    })
}

/// Octal, or GNU's binary form where that is too short.
fn number(value: u64, width: usize) -> Vec<u8> {
    let digits = width - 1;
    let octal = format!("{value:0digits$o}\0");
    if octal.len() <= width {
        return octal.into_bytes();
    }
    let mut binary = vec![0; width];
    binary[width - 8..].copy_from_slice(&value.to_be_bytes());
    binary[0] |= 0x80;
    binary
}

/// What a pax record says about the next member, as far as it matters here.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Attributes {
    pub(crate) name: Option<Vec<u8>>,
    pub(crate) link: Option<Vec<u8>>,
    pub(crate) size: Option<u64>,
}

impl Attributes {
    pub(crate) fn take_pax(&mut self, records: &[u8]) -> Outcome {
        let malformed = || invalid("not a tar stream: a pax record is malformed");
        for record in format::records(records) {
            match record.map_err(|_| malformed())? {
                (b"path", name) => self.name = Some(name.to_vec()),
                (b"linkpath", link) => self.link = Some(link.to_vec()),
                (b"size", size) => self.size = Some(format::decimal(size).ok_or_else(malformed)?),
                _ => {}
            }
        }
        Ok(())
    }

    pub(crate) fn apply(self, header: &mut Header) {
        if let Some(name) = self.name {
            header.name = name;
        }
        if let Some(link) = self.link {
            header.link = link;
        }
        if let Some(size) = self.size {
            header.size = size;
        }
    }
}

/// The components of a member's name, none of which leads outside. Empty for the directory itself.
pub(crate) fn safe_components(name: &[u8]) -> Outcome<Vec<&[u8]>> {
    if name.first() == Some(&b'/') {
        return Err(invalid(format!("the member {} has an absolute name", show(name))));
    }
    if name.contains(&0) || name.len() > 4095 {
        return Err(invalid("a member's name is not a name"));
    }
    let components: Vec<&[u8]> = name
        .split(|&byte| byte == b'/')
        .filter(|component| !component.is_empty() && *component != b".")
        .collect();
    if components.contains(&&b".."[..]) {
        return Err(invalid(format!("the member {} would land outside", show(name))));
    }
    Ok(components)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(name: &[u8], size: u64) -> Header {
        Header {
            name: name.to_vec(),
            link: Vec::new(),
            kind: TypeFlag::File,
            mode: 0o640,
            uid: 1000,
            gid: 3_000_000,
            size,
            modified: 1_700_000_000,
        }
    }

    fn parse(bytes: &[u8]) -> Outcome<Option<Header>> {
        Header::parse(bytes.try_into().expect("a block"))
    }

    #[test]
    fn headers_survive_the_round_trip() {
        for size in [0, 1, 511, 1 << 40] {
            let written = header(b"a/\xff", size);
            let mut block = Vec::new();
            written.write(&mut block);
            assert_eq!(parse(&block), Ok(Some(written)));
        }
    }

    #[test]
    fn long_names_go_before_their_member() {
        let name = [b'n'; 300];
        let mut bytes = Vec::new();
        header(&name, 5).write(&mut bytes);
        assert_eq!(bytes.len(), 3 * BLOCK);
        let carrier = parse(&bytes[..BLOCK]).expect("valid").expect("a header");
        assert_eq!((carrier.kind, carrier.size), (TypeFlag::LongName, 301));
        assert_eq!(&bytes[BLOCK..BLOCK + 300], &name);
    }

    #[test]
    fn hostile_headers_are_refused() {
        let mut block = Vec::new();
        header(b"x", 5).write(&mut block);
        block[0] = b'y';
        assert!(parse(&block).is_err(), "wrong checksum");
        assert_eq!(parse(&[0; BLOCK]), Ok(None));
        assert!(parse(&[b'z'; BLOCK]).is_err());
        for size in [
            [0xff; 12],
            [0x80, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            *b"0000000000x\0",
        ] {
            let mut block = [b'x'; BLOCK];
            block[100..136].fill(0);
            block[124..136].copy_from_slice(&size);
            format::seal(&mut block);
            assert!(parse(&block).is_err(), "{size:?}");
        }
    }

    #[test]
    fn pax_records() {
        let mut attributes = Attributes::default();
        attributes
            .take_pax(b"12 path=a/b\n11 size=42\n21 mtime=123456789.5\n")
            .expect("valid");
        assert_eq!(
            (attributes.name, attributes.size),
            (Some(b"a/b".to_vec()), Some(42))
        );
        for bad in [
            &b"x path=a\n"[..],
            b"99 path=a\n",
            b"0 path=a\n",
            b"1 ",
            b"5 abc\n",
            b"12 size=nan!\n",
        ] {
            assert!(Attributes::default().take_pax(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn names_stay_inside() {
        assert_eq!(safe_components(b"./a//b/").expect("fine"), [b"a", b"b"]);
        assert_eq!(safe_components(b".").expect("fine"), [b"" as &[u8]; 0]);
        for bad in [&b"/etc/passwd"[..], b"../x", b"a/../../x", b"a/..", b"a\0b"] {
            assert!(safe_components(bad).is_err(), "{bad:?}");
        }
        assert!(safe_components(b"..a/b..").is_ok());
    }
}
