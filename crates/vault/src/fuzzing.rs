//! What the fuzzer may see: manifests, as they would be read from a damaged disk.

use crate::key::Secrets;
use crate::manifest::{Manifest, decode_body};
use crate::wire::Cursor;

/// Reads the body of a manifest, as if its checksum were right, and writes and reads it again; whether it was one.
pub fn manifest(body: &[u8]) -> bool {
    let secrets = Secrets::new([7; 32], None);
    let Some(manifest) = decode_body(&mut Cursor(body), &secrets) else {
        return false;
    };
    let streams: u64 = manifest
        .streams
        .iter()
        .map(|stream| stream.len())
        .fold(0, u64::saturating_add);
    for chunk in manifest.chunks() {
        let (from, to) = manifest.extent(chunk);
        assert!(from <= to, "a chunk ends before it begins");
    }
    let written = manifest
        .encode(&secrets)
        .expect("without a key it is always written");
    let again = Manifest::decode(written, &manifest.id, &secrets).expect("what was written is read");
    assert_eq!(again.streams, manifest.streams);
    assert_eq!(again.packs, manifest.packs);
    assert_eq!((again.meta, again.durable), (manifest.meta, manifest.durable));
    streams < u64::MAX
}
