//! Blotting out what a server echoes: the value itself and the forms in which it may come back.
//!
//! Each byte becomes `*`, so lengths stay as announced. A stream is searched with an overlap: what may be the beginning of
//! a value waits for the next piece, and nothing else waits, so that streamed answers are not held up.
//!
//! This is a net under accidents, not a wall: a server that wants to hand a secret to a sandbox can always write it in
//! another form. The wall is the binding, which says who gets to see it at all.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use base64::Engine;
use base64::engine::general_purpose::{STANDARD_NO_PAD, URL_SAFE_NO_PAD};
use bytes::{Bytes, BytesMut};
use http::header::{HeaderMap, HeaderName, HeaderValue};
use memchr::memmem;
use zeroize::Zeroizing;

use crate::Secret;

/// Shorter ones occur by chance, and blotting those out would damage what has nothing to do with them.
const MIN_BYTES: usize = 8;
const BLOT: u8 = b'*';

/// The forms of one value, made when they are first looked for: they take many times its memory, and most secrets are not
/// under way.
pub(crate) struct Needles {
    value: Arc<Secret>,
    forms: OnceLock<Vec<Needle>>,
}

struct Needle {
    text: Zeroizing<Vec<u8>>,
    /// In small letters.
    folded: Zeroizing<Vec<u8>>,
    /// Of each beginning of `text`: how long its longest proper beginning is that also ends it (Knuth, Morris, Pratt).
    borders: Vec<usize>,
}

impl Needles {
    pub(crate) fn of(value: Arc<Secret>) -> Self {
        Self {
            value,
            forms: OnceLock::new(),
        }
    }

    #[cfg(test)]
    pub(crate) fn are_made(&self) -> bool {
        self.forms.get().is_some()
    }

    fn forms(&self) -> &[Needle] {
        self.forms.get_or_init(|| Needle::all_of(self.value.expose()))
    }
}

impl Needle {
    fn all_of(value: &[u8]) -> Vec<Self> {
        let mut forms = vec![Zeroizing::new(value.to_vec())];
        forms.push(Zeroizing::new(percent_encode(value, b"0123456789ABCDEF")));
        forms.push(Zeroizing::new(percent_encode(value, b"0123456789abcdef")));
        forms.push(Zeroizing::new(hex::encode(value).into_bytes()));
        forms.push(Zeroizing::new(hex::encode_upper(value).into_bytes()));
        forms.push(every_byte(value, b"0123456789ABCDEF"));
        forms.push(every_byte(value, b"0123456789abcdef"));
        if let Some(json) = json_form(value) {
            forms.push(json);
        }
        // Within a longer text that is encoded, as in basic authentication, a value may begin at any of three places. The
        // first and last characters depend on its neighbours and are left out.
        for skew in 0..3 {
            let mut text = Zeroizing::new(Vec::with_capacity(skew + value.len()));
            text.resize(skew, 0);
            text.extend_from_slice(value);
            let inner = [0, 2, 3][skew]..text.len() * 8 / 6;
            for engine in [&STANDARD_NO_PAD, &URL_SAFE_NO_PAD] {
                let encoded = Zeroizing::new(engine.encode(text.as_slice()));
                forms.extend(
                    encoded
                        .as_bytes()
                        .get(inner.clone())
                        .map(|form| Zeroizing::new(form.to_vec())),
                );
            }
        }
        forms.sort_unstable_by(|a, b| a.as_slice().cmp(b.as_slice()));
        forms.dedup_by(|a, b| a.as_slice() == b.as_slice());
        forms.retain(|form| form.len() >= MIN_BYTES);
        forms.into_iter().map(Self::new).collect()
    }

    fn new(text: Zeroizing<Vec<u8>>) -> Self {
        let mut borders = vec![0; text.len()];
        let mut border = 0;
        for at in 1..text.len() {
            while border > 0 && text[at] != text[border] {
                border = borders[border - 1];
            }
            border += usize::from(text[at] == text[border]);
            borders[at] = border;
        }
        let folded = Zeroizing::new(text.to_ascii_lowercase());
        Self {
            text,
            folded,
            borders,
        }
    }

    fn find(&self, data: &[u8], found: &mut Vec<Range<usize>>) {
        find(&self.text, data, found);
    }

    /// Whether it stands in the name of a field, however its letters are written.
    fn is_in_name(&self, name: &str) -> bool {
        name.as_bytes()
            .windows(self.text.len())
            .any(|part| part.eq_ignore_ascii_case(&self.text))
    }

    /// How many bytes at the end of `data` may be the beginning of this.
    fn begun(&self, data: &[u8]) -> usize {
        let from = data.len().saturating_sub(self.text.len() - 1);
        let mut matched = 0;
        for byte in &data[from..] {
            while matched > 0 && (matched == self.text.len() || self.text[matched] != *byte) {
                matched = self.borders[matched - 1];
            }
            matched += usize::from(self.text[matched] == *byte);
        }
        matched
    }
}

fn find(needle: &[u8], data: &[u8], found: &mut Vec<Range<usize>>) {
    let mut from = 0;
    while let Some(at) = data.get(from..).and_then(|rest| memmem::find(rest, needle)) {
        // Another one that begins within this one is broken with it.
        found.push(from + at..from + at + needle.len());
        from += at + needle.len();
    }
}

/// What is blotted out of one answer.
#[derive(Clone, Default)]
pub struct Redactor(Vec<Arc<Needles>>);

impl std::fmt::Debug for Redactor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Redactor({} secrets)", self.0.len())
    }
}

impl Redactor {
    pub(crate) fn add(&mut self, needles: Arc<Needles>) {
        self.0.push(needles);
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn needles(&self) -> impl Iterator<Item = &Needle> {
        self.0.iter().flat_map(|needles| needles.forms())
    }

    /// All places are looked for before any is blotted out: they may overlap.
    fn found(&self, data: &[u8]) -> Vec<Range<usize>> {
        let mut found = Vec::new();
        for needle in self.needles() {
            needle.find(data, &mut found);
        }
        found
    }

    fn begun(&self, data: &[u8]) -> usize {
        self.needles().map(|needle| needle.begun(data)).max().unwrap_or(0)
    }

    /// Fields whose name holds a value are left out whole: a name has no letters to spare. On the way it may have lost its
    /// capitals, and what became of a name (a cookie's, a host's) stands in values, too: so letters count as equal in either case.
    pub fn headers(&self, headers: &mut HeaderMap) {
        let telling: Vec<HeaderName> = headers
            .keys()
            .filter(|name| self.needles().any(|needle| needle.is_in_name(name.as_str())))
            .cloned()
            .collect();
        for name in telling {
            headers.remove(name);
        }
        for value in headers.values_mut() {
            let folded = Zeroizing::new(value.as_bytes().to_ascii_lowercase());
            let mut found = Vec::new();
            for needle in self.needles() {
                find(&needle.folded, &folded, &mut found);
            }
            if found.is_empty() {
                continue;
            }
            let mut text = value.as_bytes().to_vec();
            blot(&mut text, found);
            *value = HeaderValue::from_bytes(&text).unwrap_or(HeaderValue::from_static("*"));
        }
    }

    /// A text that is there in one piece.
    pub fn text(&self, text: &str) -> String {
        let mut bytes = text.as_bytes().to_vec();
        let found = self.found(&bytes);
        blot(&mut bytes, found);
        String::from_utf8(bytes)
            .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
    }

    pub fn scanner(self) -> Scanner {
        Scanner {
            redactor: self,
            held: BytesMut::new(),
        }
    }
}

fn blot(data: &mut [u8], found: Vec<Range<usize>>) {
    for range in found {
        data[range].fill(BLOT);
    }
}

/// Blots out of a stream.
#[derive(Debug)]
pub struct Scanner {
    redactor: Redactor,
    /// The end of what came so far, which may be the beginning of a value. Shorter than the longest form of one.
    held: BytesMut,
}

impl Scanner {
    /// What may be passed on now; nothing, perhaps.
    pub fn push(&mut self, piece: Bytes) -> Bytes {
        if self.held.is_empty() {
            let found = self.redactor.found(&piece);
            if found.is_empty() && self.redactor.begun(&piece) == 0 {
                return piece;
            }
        }
        self.held.extend_from_slice(&piece);
        let found = self.redactor.found(&self.held);
        blot(&mut self.held, found);
        let begun = self.redactor.begun(&self.held);
        let whole = self.held.len() - begun;
        self.held.split_to(whole).freeze()
    }

    /// What was held back, at the end of the stream.
    pub fn finish(&mut self) -> Bytes {
        self.held.split().freeze()
    }

    pub fn holds(&self) -> bool {
        !self.held.is_empty()
    }
}

/// All but what never needs it, as in a query.
pub(crate) fn percent_encode(value: &[u8], digits: &[u8; 16]) -> Vec<u8> {
    let mut out = Vec::with_capacity(value.len() * 3);
    for byte in value {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(byte) {
            out.push(*byte);
        } else {
            out.extend([
                b'%',
                digits[usize::from(byte >> 4)],
                digits[usize::from(byte & 15)],
            ]);
        }
    }
    out
}

/// Every byte, as some encoders do.
fn every_byte(value: &[u8], digits: &[u8; 16]) -> Zeroizing<Vec<u8>> {
    let encoded = value.iter().flat_map(|byte| {
        [
            b'%',
            digits[usize::from(byte >> 4)],
            digits[usize::from(byte & 15)],
        ]
    });
    Zeroizing::new(encoded.collect())
}

fn json_form(value: &[u8]) -> Option<Zeroizing<Vec<u8>>> {
    let quoted = Zeroizing::new(serde_json::to_string(std::str::from_utf8(value).ok()?).ok()?);
    let inner = quoted.strip_prefix('"')?.strip_suffix('"')?;
    Some(Zeroizing::new(inner.as_bytes().to_vec()))
}

#[cfg(test)]
mod tests {
    use base64::engine::general_purpose::{STANDARD, URL_SAFE};
    use proptest::prelude::*;

    use super::*;

    fn redactor(values: &[&str]) -> Redactor {
        let mut redactor = Redactor::default();
        for value in values {
            let value = Secret::new(value.as_bytes().to_vec()).unwrap();
            redactor.add(Arc::new(Needles::of(Arc::new(value))));
        }
        redactor
    }

    fn through(scanner: &mut Scanner, pieces: &[&[u8]]) -> Vec<u8> {
        let mut out = Vec::new();
        for piece in pieces {
            out.extend_from_slice(&scanner.push(Bytes::copy_from_slice(piece)));
        }
        out.extend_from_slice(&scanner.finish());
        out
    }

    #[test]
    fn a_value_is_blotted_out_in_all_its_forms() {
        let value = "s3cr3t/\"value\"+x";
        let redactor = redactor(&[value]);
        for form in [
            value.to_owned(),
            "s3cr3t%2F%22value%22%2Bx".to_owned(),
            "s3cr3t%2f%22value%22%2bx".to_owned(),
            r#"s3cr3t/\"value\"+x"#.to_owned(),
            hex::encode(value),
            hex::encode_upper(value),
            value.bytes().map(|byte| format!("%{byte:02X}")).collect(),
            value.bytes().map(|byte| format!("%{byte:02x}")).collect(),
        ] {
            let text = format!("before {form} after {form}");
            let out = through(&mut redactor.clone().scanner(), &[text.as_bytes()]);
            let stars = "*".repeat(form.len());
            assert_eq!(
                String::from_utf8(out).unwrap(),
                format!("before {stars} after {stars}")
            );
        }
        for user in ["", "u", "us", "user"] {
            for engine in [&STANDARD, &URL_SAFE] {
                let text = engine.encode(format!("{user}:{value}:more"));
                let out = through(&mut redactor.clone().scanner(), &[text.as_bytes()]);
                assert_eq!(out.len(), text.len());
                let blotted = out.iter().filter(|byte| **byte == BLOT).count();
                assert!(blotted >= value.len() * 8 / 6 - 3, "{user} {blotted}");
            }
        }
    }

    #[test]
    fn headers_are_blotted_out_and_short_values_left_alone() {
        let redactor = redactor(&["0123456789abcdef", "abc"]);
        let mut headers = HeaderMap::new();
        headers.insert(
            "location",
            HeaderValue::from_static("/x?key=0123456789abcdef&y=abc"),
        );
        headers.insert("x-other", HeaderValue::from_static("abc"));
        // As what was made a name on its way.
        headers.insert(
            "set-cookie",
            HeaderValue::from_static("S=0123456789ABCDEF; Path=/Abc"),
        );
        redactor.headers(&mut headers);
        assert_eq!(headers["set-cookie"], "S=****************; Path=/Abc");
        assert_eq!(headers["location"], "/x?key=****************&y=abc");
        assert_eq!(headers["x-other"], "abc");
    }

    #[test]
    fn a_field_whose_name_holds_a_value_is_left_out() {
        let redactor = redactor(&["AbCdEf012345"]);
        let mut headers = HeaderMap::new();
        for name in ["x-abcdef012345", "abcdef012345", "x-abcdef012345-y", "x-abcdef"] {
            headers.append(name, HeaderValue::from_static("1"));
            headers.append(name, HeaderValue::from_static("2"));
        }
        redactor.headers(&mut headers);
        assert_eq!(headers.keys().collect::<Vec<_>>(), ["x-abcdef"]);
    }

    #[test]
    fn only_what_may_be_a_beginning_waits() {
        let mut scanner = redactor(&["aab-aab-aac"]).scanner();
        assert_eq!(
            scanner.push(Bytes::from_static(b"data: hello\n\n")),
            "data: hello\n\n"
        );
        assert_eq!(scanner.push(Bytes::from_static(b"x aab-aab-aa")), "x ");
        assert!(scanner.holds());
        assert_eq!(scanner.push(Bytes::from_static(b"b")), "aab-");
        assert_eq!(scanner.push(Bytes::from_static(b"-aac.")), "***********.");
        assert!(!scanner.holds());
    }

    proptest! {
        /// However a stream is cut, it comes out as if it had come in one piece, and no value is in it.
        #[test]
        fn cuts_do_not_matter(
            text in "[ab]{0,3}(abababab|[ab]{0,6}|bbabbabbab){0,12}",
            cuts in proptest::collection::vec(1usize..9, 0..80),
        ) {
            let redactor = redactor(&["abababab", "bbabbabbab"]);
            let mut whole = text.clone().into_bytes();
            let found = redactor.found(&whole);
            blot(&mut whole, found);
            let mut pieces = Vec::new();
            let mut rest = text.as_bytes();
            for cut in cuts {
                let (piece, after) = rest.split_at(cut.min(rest.len()));
                pieces.push(piece);
                rest = after;
            }
            pieces.push(rest);
            let out = through(&mut redactor.scanner(), &pieces);
            prop_assert_eq!(out.len(), whole.len());
            for value in ["abababab", "bbabbabbab"] {
                prop_assert!(memmem::find(&out, value.as_bytes()).is_none());
            }
        }
    }
}
