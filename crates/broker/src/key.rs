//! The operator's key, and what is derived from it.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use aws_lc_rs::hkdf::{HKDF_SHA256, KeyType, Salt};
use zeroize::Zeroizing;

use crate::{BrokerError, TrustId};

const KEY_BYTES: usize = 32;

/// 32 random bytes that the operator keeps. Without them no secret can be opened, and every sandbox has another authority
/// and other placeholders.
pub struct MasterKey(Zeroizing<[u8; KEY_BYTES]>);

impl MasterKey {
    pub fn new(bytes: [u8; KEY_BYTES]) -> Self {
        Self(Zeroizing::new(bytes))
    }

    /// Takes 32 raw bytes, or 64 hexadecimal digits with white space around them. `what` says where they came from.
    pub fn parse(input: &[u8], what: &str) -> Result<Self, BrokerError> {
        let mut bytes = Zeroizing::new([0; KEY_BYTES]);
        let text = input.trim_ascii();
        if text.len() == 2 * KEY_BYTES && hex::decode_to_slice(text, bytes.as_mut_slice()).is_ok() {
            return Ok(Self(bytes));
        }
        if input.len() != KEY_BYTES {
            return Err(BrokerError::NotAKey {
                what: what.to_owned(),
            });
        }
        bytes.copy_from_slice(input);
        Ok(Self(bytes))
    }

    /// Reads a key file, which must belong to the user who runs this and to nobody else.
    pub fn load(path: &Path) -> Result<Self, BrokerError> {
        let failed = |source| key_file("read", path, source);
        let file = File::open(path).map_err(failed)?;
        // Asked of the open file: what is checked is what is read.
        let about = file.metadata().map_err(failed)?;
        let ours = about.uid() == rustix::process::geteuid().as_raw() || about.uid() == 0;
        if !about.is_file() || !ours || about.mode() & 0o077 != 0 {
            return Err(BrokerError::KeyFileOpen {
                path: path.display().to_string(),
            });
        }
        let mut input = Zeroizing::new(Vec::with_capacity(256));
        file.take(256).read_to_end(&mut input).map_err(failed)?;
        Self::parse(&input, &path.display().to_string())
    }

    /// Reads a key file, or makes one with a random key where there is none. Of two that make it at once, both use the
    /// same.
    pub fn load_or_create(path: &Path) -> Result<Self, BrokerError> {
        match Self::load(path) {
            Err(BrokerError::KeyFile { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
            other => return other,
        }
        match create(path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            other => other.map_err(|source| key_file("create", path, source))?,
        }
        Self::load(path)
    }

    /// A second one, wiped by itself. Not `Clone`: there are to be few, and each on purpose.
    pub fn copy(&self) -> Self {
        Self(self.0.clone())
    }

    /// What the private key of a lineage's certificate authority is made of. Not every string of bytes is one; the next
    /// `attempt` gives others.
    pub fn authority(&self, trust: &TrustId, attempt: u8) -> Result<Zeroizing<[u8; 32]>, BrokerError> {
        self.derive("authority", &[trust.as_str(), &attempt.to_string()])
    }

    /// `N` bytes for one purpose. Different labels or parts give independent bytes.
    pub(crate) fn derive<const N: usize>(
        &self,
        label: &str,
        parts: &[&str],
    ) -> Result<Zeroizing<[u8; N]>, BrokerError> {
        // Each part is preceded by its length, so no two lists of parts read the same.
        let mut info = Vec::with_capacity(128);
        for part in std::iter::once(&label).chain(parts) {
            info.extend_from_slice(&u64::try_from(part.len()).unwrap_or(u64::MAX).to_be_bytes());
            info.extend_from_slice(part.as_bytes());
        }
        let mut out = Zeroizing::new([0; N]);
        // Named after where this code once was; with another name no secret that was ever sealed could be opened.
        Salt::new(HKDF_SHA256, b"atoll egress 1")
            .extract(&*self.0)
            .expand(&[&info], Length(N))
            .and_then(|okm| okm.fill(out.as_mut_slice()))
            .map_err(|_| BrokerError::Library)?;
        Ok(out)
    }
}

impl fmt::Debug for MasterKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MasterKey(..)")
    }
}

struct Length(usize);

impl KeyType for Length {
    fn len(&self) -> usize {
        self.0
    }
}

/// Written under another name first: a key file is whole or not there.
fn create(path: &Path) -> io::Result<()> {
    let mut bytes = Zeroizing::new([0; KEY_BYTES]);
    getrandom::fill(bytes.as_mut_slice()).map_err(|error| io::Error::other(error.to_string()))?;
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.new", std::process::id()));
    let draft = path.with_file_name(name);
    let written = write_new(&draft, &bytes).and_then(|()| std::fs::hard_link(&draft, path));
    let _ = std::fs::remove_file(&draft);
    written?;
    if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        File::open(parent)?.sync_all()?;
    }
    Ok(())
}

fn write_new(path: &Path, bytes: &[u8; KEY_BYTES]) -> io::Result<()> {
    let text = Zeroizing::new(hex::encode(bytes));
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)?;
    file.write_all(text.as_bytes())?;
    file.write_all(b"\n")?;
    file.sync_all()
}

fn key_file(doing: &'static str, path: &Path, source: io::Error) -> BrokerError {
    BrokerError::KeyFile {
        doing,
        path: path.display().to_string(),
        source,
    }
}
