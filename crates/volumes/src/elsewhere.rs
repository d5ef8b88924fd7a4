//! Volumes that another process keeps: the server that speaks with the world can neither mount nor own files of others, and
//! asks the one that can. The same calls, as words that can be sent.

use std::ffi::OsString;
use std::fmt::Debug;
use std::io::{self, Read, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::{
    Entry, EntryKind, Error, Kind, Metadata, Mounted, Recovered, Result, Tally, Usage, Volumes, WriteFile,
};

/// The process that keeps them.
pub trait Elsewhere: Debug + Send + Sync {
    fn ask(&self, op: Op, streams: Streams<'_>) -> Result<Answer>;
}

/// What goes along with a call: bytes in, bytes out, and what is told before those.
#[derive(Default)]
pub struct Streams<'a> {
    pub input: Option<&'a mut dyn Read>,
    pub begin: Option<&'a mut dyn FnMut(&Entry)>,
    pub output: Option<&'a mut dyn Write>,
}

impl Debug for Streams<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Streams").finish_non_exhaustive()
    }
}

/// A call of [`Volumes`].
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Op {
    Create {
        id: String,
        bytes: u64,
    },
    Seal {
        id: String,
        image: PathBuf,
    },
    Attach {
        id: String,
    },
    Detach {
        id: String,
    },
    Recover {
        in_use: Vec<String>,
    },
    Delete {
        id: String,
    },
    List,
    Usage {
        id: String,
    },
    Kind {
        id: String,
    },
    Entry {
        id: String,
        path: String,
    },
    Entries {
        id: String,
        path: String,
        depth: u32,
    },
    MakeDir {
        id: String,
        path: String,
        metadata: Metadata,
        parents: bool,
    },
    ReadFile {
        id: String,
        path: String,
    },
    WriteFile {
        id: String,
        path: String,
        how: WriteFile,
    },
    SetMetadata {
        id: String,
        path: String,
        metadata: Metadata,
    },
    Remove {
        id: String,
        path: String,
    },
    Export {
        id: String,
    },
    Import {
        id: String,
    },
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Answer {
    Done,
    Mounted(Mounted),
    Recovered(Recovered),
    Listed(Vec<(String, Kind)>),
    Usage(Usage),
    Kind(Kind),
    Entry(WireEntry),
    Entries(Vec<WireEntry>),
    /// Entries, bytes, and what was skipped: sockets, FIFOs, devices, too long, mounts.
    Tally([u64; 7]),
}

/// Does what was asked, with the volumes of this process.
pub fn perform(volumes: &Volumes, op: Op, streams: Streams<'_>) -> Result<Answer> {
    let Streams { input, begin, output } = streams;
    let mut nothing: &[u8] = &[];
    let input: &mut dyn Read = match input {
        Some(input) => input,
        None => &mut nothing,
    };
    let mut nowhere = io::sink();
    let output: &mut dyn Write = match output {
        Some(output) => output,
        None => &mut nowhere,
    };
    Ok(match op {
        Op::Create { id, bytes } => volumes.create(&id, bytes).map(|()| Answer::Done)?,
        Op::Seal { id, image } => volumes.seal(&id, &image).map(|()| Answer::Done)?,
        Op::Attach { id } => Answer::Mounted(volumes.attach(&id)?),
        Op::Detach { id } => volumes.detach(&id).map(|()| Answer::Done)?,
        Op::Recover { in_use } => {
            let in_use: Vec<&str> = in_use.iter().map(String::as_str).collect();
            Answer::Recovered(volumes.recover(&in_use)?)
        }
        Op::Delete { id } => volumes.delete(&id).map(|()| Answer::Done)?,
        Op::List => Answer::Listed(volumes.list()?),
        Op::Usage { id } => Answer::Usage(volumes.usage(&id)?),
        Op::Kind { id } => Answer::Kind(volumes.kind(&id)?),
        Op::Entry { id, path } => Answer::Entry(WireEntry::of(&volumes.entry(&id, &path)?)),
        Op::Entries { id, path, depth } => {
            let entries = volumes.entries(&id, &path, depth)?;
            Answer::Entries(entries.iter().map(WireEntry::of).collect())
        }
        Op::MakeDir {
            id,
            path,
            metadata,
            parents,
        } => Answer::Entry(WireEntry::of(&volumes.make_dir(&id, &path, metadata, parents)?)),
        Op::ReadFile { id, path } => {
            let begin = |entry: &Entry| {
                if let Some(begin) = begin {
                    begin(entry);
                }
            };
            volumes
                .read_file(&id, &path, begin, output)
                .map(|()| Answer::Done)?
        }
        Op::WriteFile { id, path, how } => {
            Answer::Entry(WireEntry::of(&volumes.write_file(&id, &path, how, input)?))
        }
        Op::SetMetadata { id, path, metadata } => {
            Answer::Entry(WireEntry::of(&volumes.set_metadata(&id, &path, metadata)?))
        }
        Op::Remove { id, path } => volumes.remove(&id, &path).map(|()| Answer::Done)?,
        Op::Export { id } => tally(volumes.export(&id, output)?),
        Op::Import { id } => tally(volumes.import(&id, input)?),
    })
}

fn tally(of: Tally) -> Answer {
    let skipped = of.skipped;
    Answer::Tally([
        of.entries,
        of.bytes,
        skipped.sockets,
        skipped.fifos,
        skipped.devices,
        skipped.too_long,
        skipped.mounts,
    ])
}

/// An [`Entry`] whose paths and times can be any.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct WireEntry {
    path: String,
    kind: EntryKind,
    size: u64,
    mode: u32,
    uid: u32,
    gid: u32,
    /// Accessed, modified, changed: seconds since 1970, and nanoseconds.
    times: [(i64, u32); 3],
    target: Option<String>,
}

impl WireEntry {
    pub fn of(entry: &Entry) -> Self {
        Self {
            path: worded(&entry.path),
            kind: entry.kind,
            size: entry.size,
            mode: entry.mode,
            uid: entry.uid,
            gid: entry.gid,
            times: [entry.accessed, entry.modified, entry.changed].map(seconds),
            target: entry.target.as_deref().map(worded),
        }
    }

    pub fn into_entry(self) -> Entry {
        let [accessed, modified, changed] = self.times.map(moment);
        Entry {
            path: unworded(&self.path),
            kind: self.kind,
            size: self.size,
            mode: self.mode,
            uid: self.uid,
            gid: self.gid,
            accessed,
            modified,
            changed,
            target: self.target.as_deref().map(unworded),
        }
    }
}

/// Bytes that are no text, and the sign itself, as `%` and two digits.
fn worded(path: &Path) -> String {
    let mut text = String::new();
    for chunk in path.as_os_str().as_bytes().utf8_chunks() {
        for character in chunk.valid().chars() {
            match character {
                '%' => text.push_str("%25"),
                other => text.push(other),
            }
        }
        for byte in chunk.invalid() {
            text.push_str(&format!("%{byte:02x}"));
        }
    }
    text
}

fn unworded(text: &str) -> PathBuf {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        rest = tail;
        let digits = tail.get(..2).and_then(|digits| std::str::from_utf8(digits).ok());
        match digits.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            Some(byte) if *first == b'%' => {
                bytes.push(byte);
                rest = &tail[2..];
            }
            _ => bytes.push(*first),
        }
    }
    OsString::from_vec(bytes).into()
}

fn seconds(time: SystemTime) -> (i64, u32) {
    match time.duration_since(UNIX_EPOCH) {
        Ok(since) => (
            i64::try_from(since.as_secs()).unwrap_or(i64::MAX),
            since.subsec_nanos(),
        ),
        Err(before) => {
            let before = before.duration();
            (
                -i64::try_from(before.as_secs()).unwrap_or(i64::MAX),
                before.subsec_nanos(),
            )
        }
    }
}

fn moment((seconds, nanos): (i64, u32)) -> SystemTime {
    let whole = Duration::new(seconds.unsigned_abs(), nanos);
    let time = match seconds < 0 {
        true => UNIX_EPOCH.checked_sub(whole),
        false => UNIX_EPOCH.checked_add(whole),
    };
    time.unwrap_or(UNIX_EPOCH)
}

/// An [`Error`] that can be sent.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Refusal {
    BadId(String),
    NotFound(String),
    Exists(String),
    Size {
        asked: u64,
        least: u64,
        most: u64,
    },
    Busy {
        id: String,
        why: String,
    },
    Full {
        id: String,
        why: String,
    },
    HostFull {
        id: String,
    },
    Damaged {
        id: String,
        why: String,
    },
    Sealed(String),
    Archive {
        id: String,
        why: String,
    },
    BadPath {
        path: String,
        why: String,
    },
    NoEntry {
        path: String,
    },
    EntryExists {
        path: String,
    },
    BrokeOff {
        path: String,
        why: String,
    },
    Io {
        what: String,
        code: Option<i32>,
        why: String,
    },
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        match error {
            Error::BadId(id) => Self::BadId(id),
            Error::NotFound(id) => Self::NotFound(id),
            Error::Exists(id) => Self::Exists(id),
            Error::Size { asked, least, most } => Self::Size { asked, least, most },
            Error::Busy { id, why } => Self::Busy { id, why: why.into() },
            Error::Full { id, why } => Self::Full { id, why },
            Error::HostFull { id } => Self::HostFull { id },
            Error::Damaged { id, why } => Self::Damaged { id, why },
            Error::Sealed(id) => Self::Sealed(id),
            Error::Archive { id, why } => Self::Archive { id, why },
            Error::BadPath { path, why } => Self::BadPath {
                path,
                why: why.into(),
            },
            Error::NoEntry { path } => Self::NoEntry { path },
            Error::EntryExists { path } => Self::EntryExists { path },
            Error::BrokeOff { path, why } => Self::BrokeOff { path, why },
            Error::Io { what, source } => Self::Io {
                what,
                code: source.raw_os_error(),
                why: source.to_string(),
            },
        }
    }
}

impl From<Refusal> for Error {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::BadId(id) => Self::BadId(id),
            Refusal::NotFound(id) => Self::NotFound(id),
            Refusal::Exists(id) => Self::Exists(id),
            Refusal::Size { asked, least, most } => Self::Size { asked, least, most },
            Refusal::Busy { id, why } => Self::Busy { id, why: why.into() },
            Refusal::Full { id, why } => Self::Full { id, why },
            Refusal::HostFull { id } => Self::HostFull { id },
            Refusal::Damaged { id, why } => Self::Damaged { id, why },
            Refusal::Sealed(id) => Self::Sealed(id),
            Refusal::Archive { id, why } => Self::Archive { id, why },
            Refusal::BadPath { path, why } => Self::BadPath {
                path,
                why: why.into(),
            },
            Refusal::NoEntry { path } => Self::NoEntry { path },
            Refusal::EntryExists { path } => Self::EntryExists { path },
            Refusal::BrokeOff { path, why } => Self::BrokeOff { path, why },
            Refusal::Io { what, code, why } => Self::Io {
                what,
                source: code.map_or_else(|| io::Error::other(why), io::Error::from_raw_os_error),
            },
        }
    }
}

/// An answer to another question.
pub(crate) fn confused() -> Error {
    Error::Io {
        what: "asking for a volume".into(),
        source: io::Error::other("the answer was to another question"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_path_and_time_comes_back() {
        for bytes in [
            &b"/plain"[..],
            b"/100%/%zz%25",
            b"/\xff\xfe/\xc3",
            "/ü".as_bytes(),
            b"",
        ] {
            let path = PathBuf::from(OsString::from_vec(bytes.to_vec()));
            assert_eq!(unworded(&worded(&path)), path, "{bytes:x?}");
        }
        for time in [
            UNIX_EPOCH,
            UNIX_EPOCH + Duration::new(1_700_000_000, 5),
            UNIX_EPOCH - Duration::new(86_400, 0),
        ] {
            assert_eq!(moment(seconds(time)), time);
        }
    }
}
