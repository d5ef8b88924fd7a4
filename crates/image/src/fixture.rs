//! Archives for tests, hostile ones included: the `tar` crate refuses to write those through its friendly interface.

use std::io::Write;

use tar::{EntryType, Header};

pub(crate) struct Archive(tar::Builder<Vec<u8>>);

impl Default for Archive {
    fn default() -> Self {
        Self(tar::Builder::new(Vec::new()))
    }
}

impl Archive {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    pub(crate) fn entry(mut self, kind: EntryType, path: &str, link: &str, data: &[u8]) -> Self {
        let mut header = Header::new_gnu();
        header.as_old_mut().name[..path.len()].copy_from_slice(path.as_bytes());
        header.as_old_mut().linkname[..link.len()].copy_from_slice(link.as_bytes());
        header.set_entry_type(kind);
        header.set_mode(0o644);
        header.set_mtime(1_700_000_000);
        header.set_uid(0);
        header.set_gid(0);
        header.set_size(data.len() as u64);
        header.set_cksum();
        self.0.append(&header, data).unwrap();
        self
    }

    pub(crate) fn file(self, path: &str, data: impl AsRef<[u8]>) -> Self {
        self.entry(EntryType::Regular, path, "", data.as_ref())
    }

    pub(crate) fn dir(self, path: &str) -> Self {
        self.entry(EntryType::Directory, path, "", b"")
    }

    pub(crate) fn symlink(self, path: &str, target: &str) -> Self {
        self.entry(EntryType::Symlink, path, target, b"")
    }

    pub(crate) fn hard_link(self, path: &str, target: &str) -> Self {
        self.entry(EntryType::Link, path, target, b"")
    }

    pub(crate) fn bytes(self) -> Vec<u8> {
        self.0.into_inner().unwrap()
    }
}

pub(crate) fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}
