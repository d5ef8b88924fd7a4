//! What the fuzzer may see: patterns, words of Dockerfiles, the documents of OCI images, checksums.

use crate::dockerfile::{expand, pattern};
use crate::error::Result;
use crate::oci::format;

/// Whether a `.dockerignore` leaves a path out.
pub fn leaves_out(ignore: &str, path: &[&[u8]]) -> bool {
    pattern::Ignore::parse(ignore).leaves_out(path)
}

/// Whether one component of a path matches a pattern.
pub fn component(pattern: &[u8], name: &[u8]) -> bool {
    pattern::component(pattern, name)
}

/// A word with its variables filled in.
pub fn expand(
    word: &str,
    escape: char,
    lookup: &dyn Fn(&str) -> Option<String>,
) -> std::result::Result<String, String> {
    expand::expand(word, escape, lookup)
}

/// Reads a document as an index, a manifest and a config.
pub fn oci_document(bytes: &[u8]) -> Result<()> {
    let config = format::config("fuzzed", bytes, 1);
    let manifest: format::Manifest = format::parse("fuzzed", "manifest", bytes)?;
    if let Some(manifests) = &manifest.manifests {
        format::choose("fuzzed", manifests)?;
    }
    format::image_parts("fuzzed", manifest)?;
    config.map(drop)
}

/// Makes the checksum of an image's superblock right, whatever it says.
pub fn repair_checksum(image: &mut [u8]) {
    if let Some(block) = image.get_mut(1024..4096) {
        block[4..8].fill(0);
        let checksum = !crc32c::crc32c(block);
        block[4..8].copy_from_slice(&checksum.to_le_bytes());
    }
}
