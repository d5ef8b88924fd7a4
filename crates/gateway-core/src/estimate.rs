//! How many tokens a text may have, where nobody has counted them.
//!
//! Two guesses, and neither where a provider's own count is known. [`input_tokens`] is a fair one, for rates and for calls that
//! no budget caps: three bytes to a token. [`most_input_tokens`] is what a reservation rests on, and nothing that a caller
//! writes makes it too small: no tokenizer makes more tokens of a text than the text has bytes.
//!
//! For the fair one, images and files in base64 are not text: providers
//! count them by what they show, so each counts as one image, where what stands around it says that it is one. A long run
//! anywhere else is text that somebody wrote without a space, or text in base64.

/// Runs of base64 at least this long are no words.
const BLOB: usize = 2048;
/// About what a large image costs at the large providers.
const TOKENS_OF_A_BLOB: u64 = 1600;
const BYTES_PER_TOKEN: u64 = 3;

/// What a picture costs at most at the large providers, who make large ones smaller.
const MOST_OF_A_PICTURE: u64 = 6000;
/// Where a picture counts for many times more tokens, each of which costs less.
const MOST_OF_A_PICTURE_AT_4O_MINI: u64 = 50_000;
/// Where a picture may be looked at as it is: ten thousand patches, and models that count a patch two and a half times.
const MOST_OF_A_PICTURE_IN_FULL: u64 = 25_000;
/// The first version of OpenAI's that does so.
const LOOKS_IN_FULL: (u32, u32) = (5, 4);
/// Where no number of patches is known at which a picture is made smaller: 12 megapixels counted 14,364 tokens. Five times a
/// large photograph.
const MOST_OF_A_PICTURE_AT_ANY_SIZE: u64 = 60_000;
/// The first version of OpenAI's where that was seen.
const LOOKS_AT_ANY_SIZE: (u32, u32) = (5, 6);
/// What providers tell a model about tools at all, and about one that they know themselves.
const TOKENS_OF_A_TOOL: u64 = 1000;
/// What a model reads at most, where nobody has said.
const LARGEST_WINDOW: u64 = 1_000_000;
/// A document is compressed, and its pages may share what they show, so it holds more than its bytes; so does sound: an hour
/// of silence is a few bytes. This many times more at most.
const LARGEST_COMPRESSION: u64 = 10_000;

/// What there is to read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Reading {
    /// Bytes of text.
    pub text: u64,
    pub images: u64,
    /// Bytes of documents that are compressed.
    pub documents: u64,
    /// Bytes of sound, which is compressed, too.
    pub audio: u64,
    pub tools: u64,
}

/// The most tokens that a model can make of it. `window`: what it reads at most, where that is known.
pub fn most_input_tokens(reading: &Reading, model: &str, window: Option<u64>) -> u64 {
    let tools = match reading.tools {
        0 => 0,
        count => count.saturating_add(1).saturating_mul(TOKENS_OF_A_TOOL),
    };
    let packed = reading.documents.saturating_add(reading.audio);
    let unpacked = packed
        .saturating_mul(LARGEST_COMPRESSION)
        .min(window.unwrap_or(LARGEST_WINDOW).max(packed));
    [
        reading.images.saturating_mul(most_of_a_picture(model)),
        unpacked,
        tools,
    ]
    .into_iter()
    .fold(reading.text, u64::saturating_add)
}

fn most_of_a_picture(model: &str) -> u64 {
    if model.contains("4o-mini") {
        return MOST_OF_A_PICTURE_AT_4O_MINI;
    }
    // `openai/gpt-5.4-mini-2026-03-05`
    let version = model
        .rsplit_once("gpt-")
        .and_then(|(_, rest)| rest.split('-').next())
        .unwrap_or_default();
    let (major, minor) = version.split_once('.').unwrap_or((version, "0"));
    let (major, minor) = (major.parse().unwrap_or(0), minor.parse().unwrap_or(0));
    match (major, minor) {
        version if version >= LOOKS_AT_ANY_SIZE => MOST_OF_A_PICTURE_AT_ANY_SIZE,
        version if version >= LOOKS_IN_FULL => MOST_OF_A_PICTURE_IN_FULL,
        _ => MOST_OF_A_PICTURE,
    }
}

/// A fair guess for a whole request body.
pub fn input_tokens(body: &[u8]) -> u64 {
    let (mut text, mut blobs, mut at) = (0, 0, 0);
    for run in body.split_inclusive(|byte| !is_of_run(*byte)) {
        if run.len() >= BLOB && is_announced(&body[..at], &body[at + run.len() - 1..]) {
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

/// Kinds of data that are no text.
const DATA: [&[u8]; 6] = [
    b"image/",
    b"audio/",
    b"video/",
    b"application/pdf",
    b"application/vnd.",
    b"application/msword",
];
/// What stands beside data is no longer than this.
const NEAR: usize = 1024;

/// Whether a run is the value of a field that holds data in base64, plain or as a `data:` URL, and that is no text. `behind`
/// begins with what ended the run. A quote inside of a JSON string is escaped, so no text can pretend to be a field.
fn is_announced(before: &[u8], behind: &[u8]) -> bool {
    const FIELDS: [&[u8]; 4] = [b"\"data\"", b"\"url\"", b"\"image_url\"", b"\"file_data\""];
    const LONGEST_TYPE: usize = 120;
    let is_field = |before: &[u8]| {
        let field = before
            .strip_suffix(b"\"")
            .and_then(|before| before.trim_ascii_end().strip_suffix(b":"))
            .map(<[u8]>::trim_ascii_end);
        field.is_some_and(|field| FIELDS.iter().any(|name| field.ends_with(name)))
    };
    let Some(head) = before.strip_suffix(b";base64,") else {
        return is_field(before) && stands_beside_data(before, behind);
    };
    let near = head.len().saturating_sub(LONGEST_TYPE);
    let Some(quote) = head[near..].iter().rposition(|byte| *byte == b'"') else {
        return false;
    };
    let (before, url) = head.split_at(near + quote + 1);
    let Some(kind) = url.strip_prefix(b"data:") else {
        return false;
    };
    let kind = kind.to_ascii_lowercase();
    is_field(before) && DATA.iter().any(|data| kind.starts_with(data))
}

/// Whether the object around a value, or the one around that, says that it is no text, and neither says that it is.
fn stands_beside_data(before: &[u8], behind: &[u8]) -> bool {
    let before = &before[before.len().saturating_sub(NEAR)..];
    let behind = &behind[..behind.len().min(NEAR)];
    let Some(closed) = behind.iter().position(|byte| *byte == b'}') else {
        return false;
    };
    // What was closed before is another object.
    let opened = before
        .iter()
        .rposition(|byte| *byte == b'}')
        .map_or(0, |at| at + 1);
    let around = [&before[opened..], &behind[..closed]];
    let says = |word: &[u8]| {
        around.iter().any(|text| {
            text.windows(word.len() + 1)
                .any(|it| it[0] == b'"' && &it[1..] == word)
        })
    };
    !says(b"text") && (says(b"format\"") || DATA.iter().any(|data| says(data)))
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
        let source = br#""},{"type":"base64","media_type":"image/png","data":""#;
        let body = [url.as_slice(), &long, source, &short, b"\"}"].concat();
        assert_eq!(input_tokens(&body), 2 * TOKENS_OF_A_BLOB + 29);
    }

    #[test]
    fn what_is_no_text_says_so() {
        let run = String::from_utf8(vec![b'A'; 30_000]).unwrap();
        for (body, is_text) in [
            (r#"{"file_data":"data:application/pdf;base64,RUN"}"#, false),
            (r#"{"file_data":"data:text/plain;base64,RUN"}"#, true),
            (
                r#"{"file_data":"data:Text/Plain;charset=utf-8;base64,RUN"}"#,
                true,
            ),
            (r#"{"file_data":"data:;base64,RUN"}"#, true),
            (r#"{"file_data":"data:application/json;base64,RUN"}"#, true),
            (r#"{"url":"data:IMAGE/png;base64,RUN"}"#, false),
            (r#"{"data":"RUN","format":"wav"}"#, false),
            (r#"{"media_type":"image/png","data":"RUN"}"#, false),
            (r#"{"media_type":"text/plain","data":"RUN"}"#, true),
            (r#"{"type":"text","data":"RUN","media_type":"text/plain"}"#, true),
            (
                r#"{"title":"image/png","source":{"type":"text","data":"RUN"}}"#,
                true,
            ),
            (r#"{"text":"image/png"},{"data":"RUN"}"#, true),
            (r#"{"data":"RUN"},{"media_type":"image/png"}"#, true),
            (
                r#"{"type":"file","mediaType":"image/png","data":{"type":"data","data":"RUN"}}"#,
                false,
            ),
            (r#"{"data":"RUN"}"#, true),
            (r#"{"data":"RUN""#, true),
        ] {
            let body = body.replace("RUN", &run);
            assert_eq!(input_tokens(body.as_bytes()) >= 10_000, is_text, "{body:.100}");
        }
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
        for (model, tokens) in [
            ("gpt-4o-mini", 101_000),
            ("gpt-5.3-codex", 13_000),
            ("gpt-5-2025-08-07", 13_000),
            ("gpt-5.4", 51_000),
            ("openai/gpt-5.10-mini-2027-01-01", 121_000),
            ("gpt-5.6-luna", 121_000),
            ("gpt-6", 121_000),
            ("gpt-image", 13_000),
        ] {
            assert_eq!(most_input_tokens(&picture, model, None), tokens, "{model}");
        }
        // A small document may hold as much as the model reads; a large one is counted by its size.
        let document = |documents| Reading {
            documents,
            ..Reading::default()
        };
        assert_eq!(most_input_tokens(&document(50_000), "m", Some(200_000)), 200_000);
        assert_eq!(most_input_tokens(&document(10), "m", Some(200_000)), 100_000);
        assert_eq!(
            most_input_tokens(&document(5_000_000), "m", Some(200_000)),
            5_000_000
        );
        assert_eq!(most_input_tokens(&document(50_000), "m", None), LARGEST_WINDOW);
        // Nine hours of silence are a few kilobytes.
        let silence = Reading {
            audio: 20_000,
            ..Reading::default()
        };
        assert_eq!(most_input_tokens(&silence, "m", Some(128_000)), 128_000);
        assert_eq!(most_input_tokens(&silence, "m", None), LARGEST_WINDOW);
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
