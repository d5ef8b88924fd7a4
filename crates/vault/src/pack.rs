//! Packs: files that hold the new chunks of one save, one after another, plain or sealed. A pack is written once and then
//! only loses chunks, by holes punched into it. What was in a hole may be put there again for whoever the pack is lent to
//! ([`crate::Opened::lend`]); nothing refers to that.
//!
//! A pack is written by us alone, or it is a file that another program wrote a stream into and that was then taken over as it
//! was ([`crate::Growing`]). In such a pack chunks lie where they lay in that stream, and that they are what their hashes say
//! is known only of those that were read since.

use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::error::{Error, IoContext, Result};
use crate::key::{Domain, Seal, Secrets, TAG_LEN, chunk_aad};
use crate::manifest::ChunkRef;

#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct PackId(pub(crate) [u8; 16]);

impl fmt::Display for PackId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}

impl fmt::Debug for PackId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PackId({self})")
    }
}

/// How the chunks of a pack got there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Plain,
    Sealed,
    /// Plain, and written by another program while we hashed them.
    Adopted,
}

impl Kind {
    pub(crate) fn is_sealed(self) -> bool {
        self == Self::Sealed
    }
}

/// Where a chunk lies. `len` is that of the data, not of what is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Place {
    pub(crate) pack: PackId,
    pub(crate) offset: u64,
    pub(crate) len: u32,
}

/// A pack's file name: whose it is, and its id. The domain is in the name so that space can be counted, and garbage told
/// apart, without any manifest that refers to it.
pub(crate) fn file_name(tag: [u8; 8], pack: PackId) -> String {
    format!("{}-{pack}", hex::encode(tag))
}

pub(crate) fn parse_file_name(name: &str) -> Option<([u8; 8], PackId)> {
    let (tag, pack) = name.split_once('-')?;
    let (mut left, mut right) = ([0; 8], [0; 16]);
    hex::decode_to_slice(tag, &mut left).ok()?;
    hex::decode_to_slice(pack, &mut right).ok()?;
    Some((left, PackId(right)))
}

pub(crate) fn stored_len(len: u32, sealed: bool) -> u64 {
    u64::from(len) + if sealed { TAG_LEN as u64 } else { 0 }
}

/// A pack open for reading.
#[derive(Debug)]
pub(crate) struct Pack {
    file: File,
    seal: Option<Seal>,
}

impl Pack {
    pub(crate) fn open(path: &Path, id: PackId, sealed: bool, secrets: &Secrets) -> Result<Self> {
        let file = File::open(path).doing("open", path).map_err(|error| {
            if error.is_not_found() {
                Error::damaged(format!("the vault (pack {id} is missing)"))
            } else {
                error
            }
        })?;
        let seal = sealed.then(|| secrets.pack_seal(id)).transpose()?;
        Ok(Self { file, seal })
    }

    pub(crate) fn sealed(&self) -> bool {
        self.seal.is_some()
    }

    /// Reads chunks that lie one after another into the beginning of `buf`, verified, and says how long they are together.
    pub(crate) fn read(
        &self,
        domain: &Domain,
        run: &[&ChunkRef],
        buf: &mut Vec<u8>,
    ) -> Result<usize, Broken> {
        let Some(first) = run.first() else { return Ok(0) };
        let sealed = self.sealed();
        let stored: u64 = run.iter().map(|chunk| stored_len(chunk.place.len, sealed)).sum();
        let stored = usize::try_from(stored).unwrap_or(usize::MAX);
        if buf.len() < stored {
            buf.resize(stored, 0);
        }
        self.file
            .read_exact_at(&mut buf[..stored], first.place.offset)
            .map_err(|error| Broken {
                chunk: **first,
                error: Some(error),
            })?;
        let (mut from, mut to) = (0, 0);
        for chunk in run {
            let broken = Broken {
                chunk: **chunk,
                error: None,
            };
            let len = chunk.place.len as usize;
            if let Some(seal) = &self.seal {
                // The tag covers the chunk and its hash: hashing once more would say nothing new.
                let sealed = &mut buf[from..from + len + TAG_LEN];
                let aad = chunk_aad(domain, &chunk.hash);
                seal.open(chunk.place.offset, &aad, sealed).ok_or(broken)?;
                buf.copy_within(from..from + len, to);
                from += len + TAG_LEN;
            } else {
                if domain.hash(&buf[from..from + len]) != chunk.hash {
                    return Err(broken);
                }
                from += len;
            }
            to += len;
        }
        Ok(to)
    }
}

/// A chunk that cannot be read, or is not what was written.
#[derive(Debug)]
pub(crate) struct Broken {
    pub(crate) chunk: ChunkRef,
    error: Option<std::io::Error>,
}

impl Broken {
    pub(crate) fn into_error(self, id: &str, path: &Path) -> Error {
        match self.error {
            // Shorter than it was: that is damage, not trouble with the disk.
            Some(error) if error.kind() != std::io::ErrorKind::UnexpectedEof => {
                Error::io(error, "read", path)
            }
            _ => Error::damaged(format!(
                "what is saved as `{id}`: the chunk at byte {} of pack {}",
                self.chunk.place.offset, self.chunk.place.pack
            )),
        }
    }
}
