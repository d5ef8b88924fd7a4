//! Numbers, bytes and text as they lie in a manifest. Reading never trusts a length: what is not there is `None`.

pub(crate) fn put_number(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(number.to_le_bytes()[0] | 0x80);
        number >>= 7;
    }
    out.push(number.to_le_bytes()[0]);
}

pub(crate) fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    put_number(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

/// What is left to be read.
pub(crate) struct Cursor<'d>(pub(crate) &'d [u8]);

impl<'d> Cursor<'d> {
    pub(crate) fn take(&mut self, len: usize) -> Option<&'d [u8]> {
        let (head, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(head)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }

    pub(crate) fn byte(&mut self) -> Option<u8> {
        self.array().map(|[byte]| byte)
    }

    pub(crate) fn number(&mut self) -> Option<u64> {
        let mut number = 0_u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            let part = u64::from(byte & 0x7f);
            if part << shift >> shift != part {
                return None;
            }
            number |= part << shift;
            if byte & 0x80 == 0 {
                return Some(number);
            }
        }
        None
    }

    pub(crate) fn bytes(&mut self) -> Option<&'d [u8]> {
        let len = usize::try_from(self.number()?).ok()?;
        self.take(len)
    }

    pub(crate) fn text(&mut self) -> Option<&'d str> {
        std::str::from_utf8(self.bytes()?).ok()
    }

    /// How many things of at least `size` bytes follow. More than there is room for is refused before anything is
    /// reserved for them.
    pub(crate) fn count(&mut self, size: usize) -> Option<usize> {
        let count = usize::try_from(self.number()?).ok()?;
        (count.checked_mul(size)? <= self.0.len()).then_some(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn numbers_come_back(number: u64) {
            let mut out = Vec::new();
            put_number(&mut out, number);
            let mut cursor = Cursor(&out);
            prop_assert_eq!(cursor.number(), Some(number));
            prop_assert!(cursor.0.is_empty());
        }

        #[test]
        fn noise_is_read_without_harm(noise in prop::collection::vec(any::<u8>(), 0..40)) {
            let _ = Cursor(&noise).number();
            let _ = Cursor(&noise).text();
            prop_assert!(Cursor(&noise).count(4).is_none_or(|count| count * 4 <= noise.len()));
        }
    }
}
