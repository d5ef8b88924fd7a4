//! How many tokens a text may have, where nobody has counted them.
//!
//! Two guesses, and neither where a provider's own count is known. [`input_tokens`] is a fair one, for rates and for calls that
//! no budget caps: three bytes to a token. [`most_input_tokens`] is what a reservation rests on, and nothing that a caller
//! writes makes it too small: no tokenizer makes more tokens of a text than the text has bytes.
//!
//! For the fair one, images and files in base64 are not text: providers
//! count them by what they show, so each counts as one image, where the field that holds it says that it is one. A long run
//! anywhere else is text that somebody wrote without a space.

/// Runs of base64 at least this long are no words.
const BLOB: usize = 2048;
/// About what a large image costs at the large providers.
const TOKENS_OF_A_BLOB: u64 = 1600;
const BYTES_PER_TOKEN: u64 = 3;

/// What a picture costs at most at the large providers, who make large ones smaller.
const MOST_OF_A_PICTURE: u64 = 6000;
/// Where a picture counts for many times more tokens, each of which costs less.
const MOST_OF_A_PICTURE_AT_4O_MINI: u64 = 50_000;
/// What providers tell a model about tools at all, and about one that they know themselves.
const TOKENS_OF_A_TOOL: u64 = 1000;
/// The least bytes of sound, in base64, that a token is heard in: 32 tokens are a second, which is 700 bytes at the least.
const BYTES_OF_SOUND_PER_TOKEN: u64 = 16;
/// What a model reads at most, where nobody has said.
const LARGEST_WINDOW: u64 = 1_000_000;
/// A document is compressed, so it holds more than its bytes; this many times more at most.
const LARGEST_COMPRESSION: u64 = 1000;

/// What there is to read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Reading {
    /// Bytes of text.
    pub text: u64,
    pub images: u64,
    /// Bytes of documents that are compressed.
    pub documents: u64,
    /// Bytes of sound.
    pub audio: u64,
    pub tools: u64,
}

/// The most tokens that a model can make of it. `window`: what it reads at most, where that is known.
pub fn most_input_tokens(reading: &Reading, model: &str, window: Option<u64>) -> u64 {
    let picture = if model.contains("4o-mini") {
        MOST_OF_A_PICTURE_AT_4O_MINI
    } else {
        MOST_OF_A_PICTURE
    };
    let tools = match reading.tools {
        0 => 0,
        count => count.saturating_add(1).saturating_mul(TOKENS_OF_A_TOOL),
    };
    let documents = reading
        .documents
        .saturating_mul(LARGEST_COMPRESSION)
        .min(window.unwrap_or(LARGEST_WINDOW).max(reading.documents));
    [
        reading.images.saturating_mul(picture),
        documents,
        reading.audio.div_ceil(BYTES_OF_SOUND_PER_TOKEN),
        tools,
    ]
    .into_iter()
    .fold(reading.text, u64::saturating_add)
}

/// A fair guess for a whole request body.
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
    fn a_reservation_covers_what_a_model_can_make_of_it() {
        let text = Reading {
            text: 1000,
            ..Reading::default()
        };
        assert_eq!(most_input_tokens(&text, "m", None), 1000);
        let picture = Reading { images: 2, ..text };
        assert_eq!(most_input_tokens(&picture, "m", None), 13_000);
        assert_eq!(most_input_tokens(&picture, "gpt-4o-mini", None), 101_000);
        // A small document may hold as much as the model reads; a large one is counted by its size.
        let document = |documents| Reading {
            documents,
            ..Reading::default()
        };
        assert_eq!(most_input_tokens(&document(50_000), "m", Some(200_000)), 200_000);
        assert_eq!(most_input_tokens(&document(50), "m", Some(200_000)), 50_000);
        assert_eq!(
            most_input_tokens(&document(5_000_000), "m", Some(200_000)),
            5_000_000
        );
        assert_eq!(most_input_tokens(&document(50_000), "m", None), LARGEST_WINDOW);
        let most = Reading {
            text: u64::MAX,
            images: u64::MAX,
            documents: u64::MAX,
            audio: u64::MAX,
            tools: u64::MAX,
        };
        assert_eq!(most_input_tokens(&most, "m", None), u64::MAX);
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
