//! How many tokens a text may have, where nobody has counted them.
//!
//! For reservations, and for calls whose provider never said; never where a provider's own count is known. Three bytes to a
//! token is generous for prose, code and scripts of three bytes to a letter. Images and files in base64 are not text: providers
//! count them by what they show, so each counts as one image, where the field that holds it says that it is one. A long run
//! anywhere else is text that somebody wrote without a space.

/// Runs of base64 at least this long are no words.
const BLOB: usize = 2048;
/// About what a large image costs at the large providers.
const TOKENS_OF_A_BLOB: u64 = 1600;
const BYTES_PER_TOKEN: u64 = 3;

/// An upper guess for a whole request body.
pub fn input_tokens(body: &[u8]) -> u64 {
    let (mut text, mut blobs, mut at) = (0, 0, 0);
    for run in body.split_inclusive(|byte| !is_of_run(*byte)) {
        if run.len() >= BLOB && is_announced(&body[..at]) {
            blobs += 1;
        } else {
            text += run.len() as u64;
        }
        at += run.len();
    }
    text.div_ceil(BYTES_PER_TOKEN) + blobs * TOKENS_OF_A_BLOB
}

fn is_of_run(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'/' | b'=' | b'-' | b'_')
}

/// Whether what comes next is the value of a field that holds data in base64, plain or as a `data:` URL. A quote inside of
/// a JSON string is escaped, so no text can pretend to be one.
fn is_announced(before: &[u8]) -> bool {
    const FIELDS: [&[u8]; 4] = [b"\"data\"", b"\"url\"", b"\"image_url\"", b"\"file_data\""];
    const LONGEST_TYPE: usize = 120;
    let before = match before.strip_suffix(b";base64,") {
        None => before,
        Some(head) => {
            let near = head.len().saturating_sub(LONGEST_TYPE);
            let Some(quote) = head[near..].iter().rposition(|byte| *byte == b'"') else {
                return false;
            };
            let (before, url) = head.split_at(near + quote + 1);
            if !url.starts_with(b"data:") {
                return false;
            }
            before
        }
    };
    let field = before
        .strip_suffix(b"\"")
        .and_then(|before| before.trim_ascii_end().strip_suffix(b":"))
        .map(<[u8]>::trim_ascii_end);
    field.is_some_and(|field| FIELDS.iter().any(|name| field.ends_with(name)))
}

/// A fair guess for text that a model has written.
pub fn output_tokens(bytes: u64) -> u64 {
    bytes.div_ceil(4)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_counts_by_its_length_and_blobs_by_their_number() {
        assert_eq!(input_tokens(b""), 0);
        assert_eq!(input_tokens(b"one two three"), 5);
        let (long, short) = ([b'A'; 400_000], [b'B'; 3000]);
        let url = br#"{"url" : "data:image/png;base64,"#;
        let body = [url.as_slice(), &long, br#"","data":""#, &short, b"\"}"].concat();
        assert_eq!(input_tokens(&body), 2 * TOKENS_OF_A_BLOB + 14);
    }

    #[test]
    fn text_without_spaces_is_no_image() {
        let long = [b'A'; 30_000];
        for before in [
            br#"{"text":""#.as_slice(),
            br#"{"text":"data:image/png;base64,"#,
            br#"{"text":"\"data\":\""#,
            b"",
        ] {
            let body = [before, &long].concat();
            assert!(
                input_tokens(&body) >= 10_000,
                "{}",
                String::from_utf8_lossy(before)
            );
        }
    }
}
