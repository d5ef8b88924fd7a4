//! Keys: the operator's, the vault's own secret, and what is derived from the two.
//!
//! ```text
//!   secret (vault.json) ─┬─ + domain ──> key of the chunk hashes of that domain     equal data is told apart per domain,
//!                        └─ + domain ──> tag in the names of its packs               so nobody can probe for another's
//!   operator's key ──────┬─ + pack id ──> AES-256-GCM key of one pack      nonce: offset of the chunk in the pack
//!                        ├─ + salt ─────> AES-256-GCM key of one manifest  nonce: 0
//!                        └──────────────> check value in vault.json
//! ```
//! What must hold: no nonce is used twice with a key. A pack id and a salt are random and used for one file; each offset of
//! a pack is written once, by the save that made the pack. Key bytes are never printed and are wiped when dropped.

use std::fmt;
use std::sync::Arc;

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use zeroize::Zeroizing;

use crate::error::{Error, Result};
use crate::pack::PackId;

/// How much longer a sealed chunk is than the plain one.
pub(crate) const TAG_LEN: usize = 16;

type Bytes = Zeroizing<[u8; 32]>;

/// The key under which everything new in a vault is encrypted.
pub struct VaultKey(Bytes);

impl VaultKey {
    pub fn new(bytes: [u8; 32]) -> Self {
        Self(Zeroizing::new(bytes))
    }

    /// Takes the contents of a key file: 32 raw bytes, or 64 hexadecimal digits with white space around them.
    pub fn parse(input: &[u8]) -> Result<Self> {
        let mut bytes = Bytes::default();
        let text = input.trim_ascii();
        if text.len() == 64 && hex::decode_to_slice(text, bytes.as_mut_slice()).is_ok() {
            return Ok(Self(bytes));
        }
        if input.len() != bytes.len() {
            return Err(Error::BadKey);
        }
        bytes.copy_from_slice(input);
        Ok(Self(bytes))
    }

    /// What `vault.json` keeps to recognize the key by. Says nothing about the keys that encrypt.
    pub(crate) fn check_value(&self) -> String {
        hex::encode(derive("atoll vault 1: check value", &[&*self.0]).as_slice())
    }
}

impl fmt::Debug for VaultKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("VaultKey(..)")
    }
}

/// What a vault knows and nobody else does.
#[derive(Debug)]
pub(crate) struct Secrets {
    secret: VaultKey,
    master: Option<VaultKey>,
}

/// Those who share chunks, and how their chunks are hashed.
#[derive(Clone)]
pub(crate) struct Domain {
    pub(crate) name: Arc<str>,
    pub(crate) tag: [u8; 8],
    hash_key: [u8; 32],
}

impl fmt::Debug for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Domain({})", self.name)
    }
}

impl Secrets {
    pub(crate) fn new(secret: [u8; 32], master: Option<VaultKey>) -> Self {
        Self {
            secret: VaultKey::new(secret),
            master,
        }
    }

    pub(crate) fn encrypts(&self) -> bool {
        self.master.is_some()
    }

    pub(crate) fn domain(&self, name: &str) -> Domain {
        let parts: [&[u8]; 2] = [&*self.secret.0, name.as_bytes()];
        let mut tag = [0; 8];
        tag.copy_from_slice(&derive("atoll vault 1: domain tag", &parts)[..8]);
        Domain {
            name: name.into(),
            tag,
            hash_key: *derive("atoll vault 1: chunk hashes", &parts),
        }
    }

    pub(crate) fn pack_seal(&self, pack: PackId) -> Result<Seal> {
        self.seal("atoll vault 1: pack", &pack.0)
    }

    pub(crate) fn manifest_seal(&self, salt: &[u8; 32]) -> Result<Seal> {
        self.seal("atoll vault 1: manifest", salt)
    }

    fn seal(&self, context: &str, what: &[u8]) -> Result<Seal> {
        let master = self.master.as_ref().ok_or(Error::KeyMissing)?;
        let key = derive(context, &[&*master.0, what]);
        UnboundKey::new(&AES_256_GCM, key.as_slice())
            .map(|key| Seal(LessSafeKey::new(key)))
            .map_err(|_| Error::BadKey)
    }
}

impl Domain {
    pub(crate) fn hash(&self, data: &[u8]) -> ChunkHash {
        ChunkHash(*blake3::keyed_hash(&self.hash_key, data).as_bytes())
    }
}

/// The keyed BLAKE3 of a chunk: its name within its domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ChunkHash(pub(crate) [u8; 32]);

impl std::hash::Hash for ChunkHash {
    /// It is a hash already, and one that outsiders cannot choose.
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        state.write_u64(self.0.first_chunk().map_or(0, |head| u64::from_le_bytes(*head)));
    }
}

/// Seals what belongs to one file.
#[derive(Debug)]
pub(crate) struct Seal(LessSafeKey);

impl Seal {
    /// Encrypts `data[from..]` in place and appends the tag. A `counter` is good for one call per seal.
    pub(crate) fn seal(&self, counter: u64, aad: &[u8], data: &mut Vec<u8>, from: usize) -> Result<()> {
        let tag = self
            .0
            .seal_in_place_separate_tag(nonce(counter), Aad::from(aad), &mut data[from..])
            .map_err(|_| Error::damaged("the encryption library"))?;
        data.extend_from_slice(tag.as_ref());
        Ok(())
    }

    /// Decrypts in place; `None` when it is not what was sealed.
    pub(crate) fn open<'d>(&self, counter: u64, aad: &[u8], data: &'d mut [u8]) -> Option<&'d mut [u8]> {
        self.0.open_in_place(nonce(counter), Aad::from(aad), data).ok()
    }
}

/// Binds a chunk to those whose it is and to its name.
pub(crate) fn chunk_aad(domain: &Domain, hash: &ChunkHash) -> Vec<u8> {
    [domain.name.as_bytes(), &hash.0].concat()
}

fn nonce(counter: u64) -> Nonce {
    let mut bytes = [0; 12];
    bytes[4..].copy_from_slice(&counter.to_be_bytes());
    Nonce::assume_unique_for_key(bytes)
}

/// Parts before the last have a fixed length, so no two lists of parts read the same.
fn derive(context: &str, parts: &[&[u8]]) -> Bytes {
    let mut hasher = blake3::Hasher::new_derive_key(context);
    for part in parts {
        hasher.update(part);
    }
    Zeroizing::new(*hasher.finalize().as_bytes())
}

pub(crate) fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|error| Error::Io {
        doing: "read",
        path: "/dev/urandom".into(),
        source: std::io::Error::other(error.to_string()),
    })?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    #[test]
    fn a_key_is_32_bytes_or_64_digits_and_never_shown() {
        let raw = VaultKey::parse(&[0xab; 32]).unwrap();
        let text = VaultKey::parse(format!(" {}\n", "aB".repeat(32)).as_bytes()).unwrap();
        assert_eq!(raw.check_value(), text.check_value());
        assert_ne!(raw.check_value(), VaultKey::new([0xac; 32]).check_value());
        for bad in [&[1; 31][..], &[1; 33], b"", "zz".repeat(32).as_bytes()] {
            assert!(matches!(VaultKey::parse(bad), Err(Error::BadKey)));
        }
        let shown = format!(
            "{raw:?} {:?}",
            Secrets::new([7; 32], Some(VaultKey::new([0xab; 32])))
        );
        assert!(
            !shown.contains("171") && !shown.contains("ab, ") && !shown.contains('7'),
            "{shown}"
        );
    }

    #[test]
    fn what_is_sealed_opens_only_as_itself() {
        let secrets = Secrets::new([7; 32], Some(VaultKey::new([9; 32])));
        let seal = secrets.pack_seal(PackId([1; 16])).unwrap();
        let mut data = b"kept|secret".to_vec();
        seal.seal(5, b"who", &mut data, 5).unwrap();
        assert_eq!(&data[..5], b"kept|");
        let mut sealed = data[5..].to_vec();
        assert_eq!(sealed.len(), 6 + TAG_LEN);
        assert_ne!(&sealed[..6], b"secret");
        let other = secrets.pack_seal(PackId([2; 16])).unwrap();
        assert!(seal.open(6, b"who", &mut sealed.clone()).is_none());
        assert!(seal.open(5, b"whom", &mut sealed.clone()).is_none());
        assert!(other.open(5, b"who", &mut sealed.clone()).is_none());
        assert_eq!(seal.open(5, b"who", &mut sealed).unwrap(), b"secret");
    }

    #[test]
    fn domains_hash_apart() {
        let secrets = Secrets::new([7; 32], None);
        let (a, b) = (secrets.domain("a"), secrets.domain("b"));
        assert_ne!(a.hash(b"same"), b.hash(b"same"));
        assert_ne!(a.tag, b.tag);
        assert_ne!(
            a.hash(b"same"),
            Secrets::new([8; 32], None).domain("a").hash(b"same")
        );
    }
}
