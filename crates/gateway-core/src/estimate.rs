//! How many tokens a text may have, where nobody has counted them.
//!
//! For reservations, and for calls whose provider never said; never where a provider's own count is known. Three bytes to a
//! token is generous for prose, code and scripts of three bytes to a letter. Long runs without a space (images and files in
//! base64) are not text: providers count them by what they show, so each counts as one image.

/// Runs of base64 at least this long are no words.
const BLOB: usize = 2048;
/// About what a large image costs at the large providers.
const TOKENS_OF_A_BLOB: u64 = 1600;
const BYTES_PER_TOKEN: u64 = 3;

/// An upper guess for a whole request body.
pub fn input_tokens(body: &[u8]) -> u64 {
    let (mut text, mut blobs) = (0, 0);
    for run in body.split_inclusive(|byte| !is_of_run(*byte)) {
        if run.len() >= BLOB {
            blobs += 1;
        } else {
            text += run.len() as u64;
        }
    }
    text.div_ceil(BYTES_PER_TOKEN) + blobs * TOKENS_OF_A_BLOB
}

fn is_of_run(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'/' | b'=' | b'-' | b'_')
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
        let image = [b"see ".as_slice(), &[b'A'; 400_000], b" and ", &[b'B'; 3000]].concat();
        assert_eq!(input_tokens(&image), 2 * TOKENS_OF_A_BLOB + 3);
    }
}
