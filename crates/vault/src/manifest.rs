//! Manifests: what is saved under an id. They are the only truth; whatever else the vault knows is worked out from them.
//!
//! ```text
//!   "ATOLLVM1"  sealed: 1 byte  [salt: 32 bytes]  body, encrypted when sealed  BLAKE3 of all before: 32 bytes
//!
//!   body:    id, domain, durable, meta, packs: (id, kind)*, streams: (name, length, refs)*
//!   ref:     0, length                            zeros, stored nowhere
//!            1 + number of the pack, offset, length, hash           a chunk; about 42 bytes
//! ```
//! What must hold: a manifest is read back exactly as it was written, under the id that it was written for, or not at all.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use crate::cut;
use crate::error::{Error, IoContext, Result};
use crate::key::{ChunkHash, Domain, Secrets, TAG_LEN, random};
use crate::pack::{Kind, PackId, Place, stored_len};
use crate::wire::{Cursor, put_bytes, put_number};

const MAGIC: &[u8; 8] = b"ATOLLVM1";
const HASH_LEN: usize = 32;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ChunkRef {
    pub(crate) hash: ChunkHash,
    pub(crate) place: Place,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ref {
    Zero(u64),
    Chunk(ChunkRef),
}

impl Ref {
    pub(crate) fn len(&self) -> u64 {
        match self {
            Self::Zero(len) => *len,
            Self::Chunk(chunk) => u64::from(chunk.place.len),
        }
    }
}

/// Appends, so that zeros next to zeros are one.
pub(crate) fn push_ref(refs: &mut Vec<Ref>, new: Ref) {
    match (refs.last_mut(), new) {
        (Some(Ref::Zero(len)), Ref::Zero(more)) => *len = len.saturating_add(more),
        _ => refs.push(new),
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Stream {
    pub(crate) name: String,
    pub(crate) refs: Vec<Ref>,
}

impl Stream {
    pub(crate) fn len(&self) -> u64 {
        self.refs.iter().map(Ref::len).fold(0, u64::saturating_add)
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Manifest {
    pub(crate) id: String,
    pub(crate) domain: Domain,
    /// Every pack that it refers to was on the disk before it was.
    pub(crate) durable: bool,
    pub(crate) meta: Vec<u8>,
    /// The packs it refers to.
    pub(crate) packs: HashMap<PackId, Kind>,
    pub(crate) streams: Vec<Stream>,
}

impl Manifest {
    pub(crate) fn chunks(&self) -> impl Iterator<Item = &ChunkRef> {
        let refs = self.streams.iter().flat_map(|stream| &stream.refs);
        refs.filter_map(|one| match one {
            Ref::Chunk(chunk) => Some(chunk),
            Ref::Zero(_) => None,
        })
    }

    pub(crate) fn is_sealed(&self, pack: PackId) -> bool {
        self.packs.get(&pack).is_some_and(|kind| kind.is_sealed())
    }

    /// The bytes that a chunk takes in its pack.
    pub(crate) fn extent(&self, chunk: &ChunkRef) -> (u64, u64) {
        let len = stored_len(chunk.place.len, self.is_sealed(chunk.place.pack));
        (chunk.place.offset, chunk.place.offset + len)
    }

    pub(crate) fn encode(&self, secrets: &Secrets) -> Result<Vec<u8>> {
        let mut out = MAGIC.to_vec();
        out.push(u8::from(secrets.encrypts()));
        if secrets.encrypts() {
            let salt = random()?;
            out.extend_from_slice(&salt);
            let body = out.len();
            self.encode_body(&mut out);
            secrets
                .manifest_seal(&salt)?
                .seal(0, self.id.as_bytes(), &mut out, body)?;
        } else {
            self.encode_body(&mut out);
        }
        let hash = blake3::hash(&out);
        out.extend_from_slice(hash.as_bytes());
        Ok(out)
    }

    fn encode_body(&self, out: &mut Vec<u8>) {
        put_bytes(out, self.id.as_bytes());
        put_bytes(out, self.domain.name.as_bytes());
        out.push(u8::from(self.durable));
        put_bytes(out, &self.meta);
        let mut numbers = HashMap::new();
        put_number(out, self.packs.len() as u64);
        for (number, (pack, kind)) in (1_u64..).zip(&self.packs) {
            numbers.insert(*pack, number);
            out.extend_from_slice(&pack.0);
            out.push(match kind {
                Kind::Plain => 0,
                Kind::Sealed => 1,
                Kind::Adopted => 2,
            });
        }
        put_number(out, self.streams.len() as u64);
        for stream in &self.streams {
            put_bytes(out, stream.name.as_bytes());
            put_number(out, stream.refs.len() as u64);
            for one in &stream.refs {
                match one {
                    Ref::Zero(len) => {
                        put_number(out, 0);
                        put_number(out, *len);
                    }
                    Ref::Chunk(ChunkRef { hash, place }) => {
                        put_number(out, numbers.get(&place.pack).copied().unwrap_or_default());
                        put_number(out, place.offset);
                        put_number(out, u64::from(place.len));
                        out.extend_from_slice(&hash.0);
                    }
                }
            }
        }
    }

    /// Reads the manifest of `id`: `NotFound` when there is none, `Damaged` when it is not what was written.
    pub(crate) fn load(path: &Path, id: &str, secrets: &Secrets) -> Result<Self> {
        let data = fs::read(path).doing("read", path).map_err(|error| {
            if error.is_not_found() {
                Error::NotFound { id: id.to_owned() }
            } else {
                error
            }
        })?;
        Self::decode(data, id, secrets)
    }

    pub(crate) fn decode(mut data: Vec<u8>, id: &str, secrets: &Secrets) -> Result<Self> {
        let damaged = || Error::damaged(format!("the manifest of `{id}`"));
        let end = data.len().checked_sub(HASH_LEN).ok_or_else(damaged)?;
        if blake3::hash(&data[..end]).as_bytes() != &data[end..] {
            return Err(damaged());
        }
        data.truncate(end);
        let rest = data.strip_prefix(MAGIC).ok_or_else(damaged)?;
        let (sealed, rest) = rest.split_first().ok_or_else(damaged)?;
        let body = match sealed {
            0 => rest,
            1 => {
                let salt: [u8; 32] = *rest.first_chunk().ok_or_else(damaged)?;
                let at = MAGIC.len() + 1 + salt.len();
                if data.len() < at + TAG_LEN {
                    return Err(damaged());
                }
                let seal = secrets.manifest_seal(&salt)?;
                seal.open(0, id.as_bytes(), &mut data[at..]).ok_or_else(damaged)?
            }
            _ => return Err(damaged()),
        };
        let manifest = decode_body(&mut Cursor(body), secrets).ok_or_else(damaged)?;
        if manifest.id == id {
            Ok(manifest)
        } else {
            Err(damaged())
        }
    }
}

pub(crate) fn decode_body(cursor: &mut Cursor<'_>, secrets: &Secrets) -> Option<Manifest> {
    let id = cursor.text()?.to_owned();
    let domain = secrets.domain(cursor.text()?);
    let durable = cursor.byte()? != 0;
    let meta = cursor.bytes()?.to_vec();
    let packs: Vec<(PackId, Kind)> = (0..cursor.count(17)?)
        .map(|_| {
            let pack = PackId(cursor.array()?);
            let kind = match cursor.byte()? {
                0 => Kind::Plain,
                1 => Kind::Sealed,
                2 => Kind::Adopted,
                _ => return None,
            };
            Some((pack, kind))
        })
        .collect::<Option<_>>()?;
    let mut streams = Vec::new();
    for _ in 0..cursor.count(2)? {
        let name = cursor.text()?.to_owned();
        let count = cursor.count(2)?;
        let mut refs = Vec::with_capacity(count);
        for _ in 0..count {
            refs.push(decode_ref(cursor, &packs)?);
        }
        streams.push(Stream { name, refs });
    }
    cursor.0.is_empty().then_some(Manifest {
        id,
        domain,
        durable,
        meta,
        packs: packs.into_iter().collect(),
        streams,
    })
}

fn decode_ref(cursor: &mut Cursor<'_>, packs: &[(PackId, Kind)]) -> Option<Ref> {
    let Some(number) = cursor.number()?.checked_sub(1) else {
        return Some(Ref::Zero(cursor.number()?));
    };
    let (pack, _) = *packs.get(usize::try_from(number).ok()?)?;
    let offset = cursor.number()?;
    let len = u32::try_from(cursor.number()?).ok()?;
    let hash = ChunkHash(cursor.array()?);
    let bounded = len as usize <= cut::MAX && offset < u64::MAX / 2;
    bounded.then_some(Ref::Chunk(ChunkRef {
        hash,
        place: Place { pack, offset, len },
    }))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;
    use crate::key::VaultKey;
    use proptest::prelude::*;

    fn sample(secrets: &Secrets, seed: u8) -> Manifest {
        let pack = PackId([seed; 16]);
        let chunk = |n: u64| {
            Ref::Chunk(ChunkRef {
                hash: ChunkHash([seed; 32]),
                place: Place {
                    pack,
                    offset: n * 70_000,
                    len: 65_536,
                },
            })
        };
        Manifest {
            id: "snap_1".into(),
            domain: secrets.domain("prj"),
            durable: true,
            meta: b"meta".to_vec(),
            packs: [
                (pack, Kind::Sealed),
                (PackId([98; 16]), Kind::Adopted),
                (PackId([99; 16]), Kind::Plain),
            ]
            .into(),
            streams: vec![
                Stream {
                    name: "pages".into(),
                    refs: vec![Ref::Zero(1 << 40), chunk(0), chunk(1)],
                },
                Stream {
                    name: "empty".into(),
                    refs: vec![],
                },
            ],
        }
    }

    #[test]
    fn comes_back_as_it_was_and_only_under_its_id() {
        for master in [None, Some(VaultKey::new([3; 32]))] {
            let secrets = Secrets::new([1; 32], master);
            let manifest = sample(&secrets, 5);
            let data = manifest.encode(&secrets).unwrap();
            let back = Manifest::decode(data.clone(), "snap_1", &secrets).unwrap();
            assert_eq!(back.streams, manifest.streams);
            assert_eq!(back.packs, manifest.packs);
            assert_eq!((back.meta, back.durable), (manifest.meta, true));
            assert!(Manifest::decode(data, "snap_2", &secrets).is_err());
        }
    }

    #[test]
    fn any_changed_or_missing_byte_is_noticed() {
        for master in [None, Some(VaultKey::new([3; 32]))] {
            let secrets = Secrets::new([1; 32], master);
            let data = sample(&secrets, 5).encode(&secrets).unwrap();
            for at in 0..data.len() {
                let mut bad = data.clone();
                bad[at] ^= 0x10;
                assert!(Manifest::decode(bad, "snap_1", &secrets).is_err(), "byte {at}");
                assert!(Manifest::decode(data[..at].to_vec(), "snap_1", &secrets).is_err());
            }
        }
    }

    #[test]
    fn a_sealed_manifest_shows_nothing() {
        let secrets = Secrets::new([1; 32], Some(VaultKey::new([3; 32])));
        let data = sample(&secrets, 5).encode(&secrets).unwrap();
        for word in [&b"snap_1"[..], b"prj", b"meta", b"pages", &[5; 16]] {
            assert!(!data.windows(word.len()).any(|part| part == word));
        }
    }

    proptest! {
        /// A body that somebody made up, with a hash that is right.
        #[test]
        fn a_hostile_body_does_no_harm(
            mut body in prop::collection::vec(any::<u8>(), 0..200),
            keep in 0usize..120,
        ) {
            let secrets = Secrets::new([1; 32], None);
            let mut data = sample(&secrets, 5).encode(&secrets).unwrap();
            data.truncate(keep.max(9));
            data.append(&mut body);
            let hash = blake3::hash(&data);
            data.extend_from_slice(hash.as_bytes());
            let _ = Manifest::decode(data, "snap_1", &secrets);
        }
    }
}
