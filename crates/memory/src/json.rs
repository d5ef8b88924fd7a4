//! What reading JSON takes.

/// What the parts of a JSON text may take in memory beside the text. An object with one entry is a node with room for eleven,
/// a list with one value has room for four.
const OBJECT_BYTES: u64 = 700;
const LIST_BYTES: u64 = 160;
const VALUE_BYTES: u64 = 64;
const KEY_BYTES: u64 = 64;

/// What reading a JSON text may take beside the text: a short one can stand for many values.
pub fn json_weight(text: &[u8]) -> u64 {
    let (mut weight, mut at) = (0, 0);
    while let Some(byte) = text.get(at) {
        at += 1;
        weight += match byte {
            b'{' => OBJECT_BYTES,
            b'[' => LIST_BYTES,
            b',' => VALUE_BYTES,
            b':' => KEY_BYTES,
            b'"' => {
                at += length_of_text(&text[at..]);
                0
            }
            _ => 0,
        };
    }
    weight
}

/// How long a text is, from behind the mark that begins it to behind the one that ends it.
fn length_of_text(rest: &[u8]) -> usize {
    let mut at = 0;
    while let Some(found) = rest.get(at..).and_then(|rest| memchr::memchr2(b'"', b'\\', rest)) {
        at += found;
        match rest[at] {
            b'"' => return at + 1,
            // Whatever comes behind it is no mark.
            _ => at += 2,
        }
    }
    rest.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_stands_in_texts_weighs_nothing() {
        for (text, weight) in [
            ("", 0),
            ("{}", OBJECT_BYTES),
            (r#"{"a":[]}"#, OBJECT_BYTES + KEY_BYTES + LIST_BYTES),
            (r#""{{[[,,::""#, 0),
            (r#""\"{{,,"[1,2]"#, LIST_BYTES + VALUE_BYTES),
            (r#"["\\",{}]"#, LIST_BYTES + VALUE_BYTES + OBJECT_BYTES),
            (r#"["\\\",{}]"#, LIST_BYTES),
            (r#"["{"#, LIST_BYTES),
            (r#"["\"#, LIST_BYTES),
        ] {
            assert_eq!(json_weight(text.as_bytes()), weight, "{text}");
        }
    }
}
