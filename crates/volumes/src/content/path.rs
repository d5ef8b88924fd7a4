//! Paths in a volume, as callers write them: from its root, with or without a slash in front. Nothing climbs.

use std::ffi::{CStr, OsStr};
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use rustix::io::Errno;

use super::EntryKind;
use crate::error::{Error, Result};

/// The kernel's, for what one call may name; with the byte that ends it.
const LONGEST: usize = 4095;
const LONGEST_NAME: usize = 255;

/// A path without `.`, `..` and empty names.
#[derive(Debug, Clone)]
pub(super) struct Inside(PathBuf);

impl Inside {
    pub(super) fn parse(text: &str) -> Result<Self> {
        let refuse = |why: &'static str| {
            Err(Error::BadPath {
                path: shown(Path::new(text)),
                why: why.into(),
            })
        };
        if text.is_empty() {
            return refuse("it is empty");
        }
        if text.len() > LONGEST {
            return refuse("it is longer than 4095 bytes");
        }
        if text.contains('\0') {
            return refuse("there is a zero byte in it");
        }
        let mut path = PathBuf::new();
        for name in text.split('/') {
            match name {
                "" | "." => {}
                ".." => return refuse("`..` is not followed"),
                name if name.len() > LONGEST_NAME => return refuse("a name in it is longer than 255 bytes"),
                name => path.push(name),
            }
        }
        Ok(Self(path))
    }

    pub(super) fn join(&self, name: &CStr) -> Self {
        Self(self.0.join(OsStr::from_bytes(name.to_bytes())))
    }

    /// From the volume's root.
    pub(super) fn relative(&self) -> &Path {
        if self.0.as_os_str().is_empty() {
            return Path::new(".");
        }
        &self.0
    }

    pub(super) fn absolute(&self) -> PathBuf {
        Path::new("/").join(&self.0)
    }

    /// What it stands in, and its name; nothing for the root.
    pub(super) fn split(&self) -> Option<(&Path, &Path)> {
        let name = Path::new(self.0.file_name()?);
        let parent = self.0.parent().filter(|parent| !parent.as_os_str().is_empty());
        Some((parent.unwrap_or(Path::new(".")), name))
    }

    /// The directories above, the topmost first.
    pub(super) fn above(&self) -> Vec<Self> {
        let mut above: Vec<Self> = self
            .0
            .ancestors()
            .skip(1)
            .map(|path| Self(path.to_owned()))
            .collect();
        above.retain(|path| !path.0.as_os_str().is_empty());
        above.reverse();
        above
    }

    pub(super) fn shown(&self) -> String {
        shown(&self.absolute())
    }

    pub(super) fn invalid(&self, why: &'static str) -> Error {
        Error::BadPath {
            path: self.shown(),
            why: why.into(),
        }
    }

    pub(super) fn wrong(&self, kind: EntryKind) -> Error {
        self.invalid(match kind {
            EntryKind::File => "it is a file",
            EntryKind::Directory => "it is a directory",
            EntryKind::Symlink => "it is a symlink",
            EntryKind::Other => "it is neither a file nor a directory",
        })
    }

    /// What the kernel said about the path, in words for the caller.
    pub(super) fn refused(&self, error: Errno, doing: &str) -> Error {
        match error {
            Errno::NOENT => Error::NoEntry { path: self.shown() },
            Errno::EXIST | Errno::ISDIR => Error::EntryExists { path: self.shown() },
            Errno::NOTDIR => self.invalid("something in it is not a directory"),
            Errno::XDEV => self.invalid("it leads through a link out of the volume"),
            Errno::LOOP => self.invalid("it leads through a link where none is followed, or in circles"),
            Errno::NAMETOOLONG => self.invalid("it is too long"),
            other => self.failed(doing, other.into()),
        }
    }

    pub(super) fn failed(&self, doing: &str, source: io::Error) -> Error {
        Error::Io {
            what: format!("{doing} {} in a volume", self.shown()),
            source,
        }
    }
}

fn shown(path: &Path) -> String {
    let bytes = path.as_os_str().as_bytes();
    String::from_utf8_lossy(&bytes[..bytes.len().min(200)])
        .escape_debug()
        .to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_from_the_root_and_never_climb() {
        for (text, relative) in [
            ("/", "."),
            (".", "."),
            ("a", "a"),
            ("/a//b/./c/", "a/b/c"),
            ("...", "..."),
        ] {
            assert_eq!(
                Inside::parse(text).unwrap().relative(),
                Path::new(relative),
                "{text}"
            );
        }
        let long = "x".repeat(256);
        let longer = "x/".repeat(3000);
        for text in ["", "..", "/..", "a/../b", "a/..", "a\0b", &long, &longer] {
            assert!(
                matches!(Inside::parse(text), Err(Error::BadPath { .. })),
                "{text:?}"
            );
        }
    }

    #[test]
    fn what_is_above_begins_at_the_top() {
        let above: Vec<PathBuf> = Inside::parse("/a/b/c")
            .unwrap()
            .above()
            .iter()
            .map(Inside::absolute)
            .collect();
        assert_eq!(above, [Path::new("/a"), Path::new("/a/b")]);
        assert!(Inside::parse("/a").unwrap().above().is_empty());
    }
}
