//! Unpacks a tar stream below a directory, as its bytes arrive.
//!
//! What must hold: nothing is written outside that directory, whatever the archive says. Names are checked, every
//! directory on the way is opened by descriptor without following symlinks (those of the archive and those that were
//! there), files are created new. Memory does not grow with the archive.

use std::ffi::CString;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};

use atoll_archive::format::{BLOCK, TypeFlag, padding};
use atoll_guest_protocol::{FRAME_COST, FailureKind};
use rustix::fs::{AtFlags, Mode, OFlags, Timespec, Timestamps};
use rustix::io::Errno;

use crate::failure::{Outcome, failure, from_errno, from_io, invalid, show};
use crate::files::change::make_directories;
use crate::files::tar_format::{Attributes, Header, safe_components};
use crate::files::{Owner, Place, open_directory};
use crate::job::{Context, Job, Step};

const LONGEST_EXTENSION: u64 = 64 * 1024;

#[derive(Debug)]
pub(crate) struct TarIn {
    unpacker: Unpacker,
    finished: bool,
}

impl TarIn {
    pub(crate) fn open(place: &Place) -> Outcome<Box<dyn Job>> {
        make_directories(&place.path, place.owner, 0o755)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open(&place.path, flags, Mode::empty())
            .map_err(|error| place.failure("cannot unpack into", &error.into()))?;
        Ok(Box::new(Self {
            unpacker: Unpacker::new(root, place.owner),
            finished: false,
        }))
    }
}

impl Job for TarIn {
    fn step(&mut self, _cx: &mut Context<'_>) -> Step {
        match self.finished {
            true => Step::Done(self.unpacker.finish()),
            false => Step::Wait,
        }
    }

    fn data(&mut self, cx: &mut Context<'_>, bytes: &[u8]) -> Outcome {
        if self.finished {
            return Err(invalid("data after the end of the archive"));
        }
        self.finished = bytes.is_empty();
        self.unpacker.take(bytes)?;
        cx.consumed(bytes.len() + FRAME_COST as usize);
        Ok(())
    }
}

#[derive(Debug)]
struct Unpacker {
    root: OwnedFd,
    owner: Option<Owner>,
    state: State,
    /// From extension members, for the next real one.
    attributes: Attributes,
    /// The directory of the last member: most archives stay in one for long.
    parent: Option<(Vec<u8>, OwnedFd)>,
}

#[derive(Debug)]
enum State {
    Header {
        block: Box<[u8; BLOCK]>,
        filled: usize,
    },
    Content {
        what: Content,
        left: u64,
        padding: usize,
    },
    Over,
}

#[derive(Debug)]
enum Content {
    File { file: File, modified: i64 },
    Extension { kind: TypeFlag, bytes: Vec<u8> },
    Skipped,
}

impl State {
    fn header() -> Self {
        Self::Header {
            block: Box::new([0; BLOCK]),
            filled: 0,
        }
    }
}

impl Unpacker {
    fn new(root: OwnedFd, owner: Option<Owner>) -> Self {
        Self {
            root,
            owner,
            state: State::header(),
            attributes: Attributes::default(),
            parent: None,
        }
    }

    fn take(&mut self, mut bytes: &[u8]) -> Outcome {
        while !bytes.is_empty() {
            match &mut self.state {
                State::Over => return Ok(()),
                State::Header { block, filled } => {
                    let count = bytes.len().min(BLOCK - *filled);
                    block[*filled..*filled + count].copy_from_slice(&bytes[..count]);
                    *filled += count;
                    bytes = &bytes[count..];
                    if *filled == BLOCK {
                        self.state = match Header::parse(block)? {
                            None => State::Over,
                            Some(header) => self.begin(header)?,
                        };
                        self.end_if_complete()?;
                    }
                }
                State::Content { what, left, padding } => {
                    let content = bytes.len().min(usize::try_from(*left).unwrap_or(usize::MAX));
                    what.take(&bytes[..content])?;
                    *left -= content as u64;
                    bytes = &bytes[content..];
                    if *left == 0 {
                        let skipped = bytes.len().min(*padding);
                        *padding -= skipped;
                        bytes = &bytes[skipped..];
                    }
                    self.end_if_complete()?;
                }
            }
        }
        Ok(())
    }

    fn finish(&self) -> Outcome {
        match &self.state {
            State::Over | State::Header { filled: 0, .. } => Ok(()),
            State::Header { .. } | State::Content { .. } => Err(invalid("the archive is cut off")),
        }
    }

    fn end_if_complete(&mut self) -> Outcome {
        if !matches!(
            self.state,
            State::Content {
                left: 0,
                padding: 0,
                ..
            }
        ) {
            return Ok(());
        }
        let State::Content { what, .. } = std::mem::replace(&mut self.state, State::header()) else {
            return Ok(());
        };
        match what {
            Content::File { file, modified } => set_modified(&file, modified),
            Content::Extension { kind, bytes } => self.extend(kind, bytes)?,
            Content::Skipped => {}
        }
        Ok(())
    }

    fn extend(&mut self, kind: TypeFlag, mut bytes: Vec<u8>) -> Outcome {
        if kind == TypeFlag::Pax {
            return self.attributes.take_pax(&bytes);
        }
        while bytes.last() == Some(&0) {
            bytes.pop();
        }
        match kind {
            TypeFlag::LongName => self.attributes.name = Some(bytes),
            _ => self.attributes.link = Some(bytes),
        }
        Ok(())
    }

    /// Creates what the header names and says what its content is for.
    fn begin(&mut self, mut header: Header) -> Outcome<State> {
        let extension = matches!(
            header.kind,
            TypeFlag::LongName | TypeFlag::LongLink | TypeFlag::Pax
        );
        if extension && header.size > LONGEST_EXTENSION {
            return Err(failure(
                FailureKind::TooLarge,
                "a name in the archive is too long",
            ));
        }
        if !extension && header.kind != TypeFlag::PaxGlobal {
            std::mem::take(&mut self.attributes).apply(&mut header);
        }
        let what = match header.kind.of_name(&header.name) {
            TypeFlag::LongName | TypeFlag::LongLink | TypeFlag::Pax => Content::Extension {
                kind: header.kind,
                bytes: Vec::new(),
            },
            TypeFlag::PaxGlobal => Content::Skipped,
            TypeFlag::File => self.file(&header)?,
            TypeFlag::Directory => self.directory(&header)?,
            TypeFlag::Symlink => self.symlink(&header)?,
            TypeFlag::HardLink => self.hard_link(&header)?,
            _ => {
                let name = show(&header.name);
                let text = format!("the member {name} is a device or of another kind that is not unpacked");
                return Err(invalid(text));
            }
        };
        // Links and directories have none, whatever their header says.
        let size = match header.kind {
            TypeFlag::Symlink | TypeFlag::HardLink | TypeFlag::Directory => 0,
            _ => header.size,
        };
        Ok(State::Content {
            what,
            left: size,
            padding: padding(size).len(),
        })
    }

    fn file(&mut self, header: &Header) -> Outcome<Content> {
        let name = self.locate(&header.name)?;
        let Some((parent, name)) = name else {
            return Err(invalid("a file in the archive has no name"));
        };
        let fail = |error: Errno| cannot("write", &header.name, error);
        clear_the_way(parent, &name).map_err(fail)?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(parent, &name, flags, Mode::from_raw_mode(0o600)).map_err(fail)?;
        Owner::give(self.owner, &fd);
        rustix::fs::fchmod(&fd, safe_mode(header.mode)).map_err(fail)?;
        Ok(Content::File {
            file: File::from(fd),
            modified: header.modified,
        })
    }

    fn directory(&mut self, header: &Header) -> Outcome<Content> {
        let owner = self.owner;
        let name = self.locate(&header.name)?;
        if let Some((parent, name)) = name {
            let fail = |error: Errno| cannot("create", &header.name, error);
            let fd = enter(parent, &name, owner).map_err(fail)?;
            rustix::fs::fchmod(&fd, safe_mode(header.mode)).map_err(fail)?;
        }
        Ok(Content::Skipped)
    }

    fn symlink(&mut self, header: &Header) -> Outcome<Content> {
        let owner = self.owner;
        let fail = |error: Errno| cannot("create", &header.name, error);
        let target = CString::new(header.link.as_slice())
            .map_err(|_| invalid("the target of a symlink contains a zero byte"))?;
        let Some((parent, name)) = self.locate(&header.name)? else {
            return Err(invalid("a symlink in the archive has no name"));
        };
        clear_the_way(parent, &name).map_err(fail)?;
        rustix::fs::symlinkat(&target, parent, &name).map_err(fail)?;
        give_itself(parent, &name, owner);
        Ok(Content::Skipped)
    }

    /// To a member that was unpacked before; never to what is outside, nor through a symlink.
    fn hard_link(&mut self, header: &Header) -> Outcome<Content> {
        let fail = |error: Errno| cannot("link", &header.name, error);
        let Some((from_parent, from)) = self.locate(&header.link)? else {
            return Err(invalid("a hard link in the archive has no target"));
        };
        let from_parent = from_parent
            .try_clone()
            .map_err(|error| from_io("cannot link", &error))?;
        let Some((parent, name)) = self.locate(&header.name)? else {
            return Err(invalid("a hard link in the archive has no name"));
        };
        clear_the_way(parent, &name).map_err(fail)?;
        rustix::fs::linkat(&from_parent, &from, parent, &name, AtFlags::empty()).map_err(fail)?;
        Ok(Content::Skipped)
    }

    /// The member's directory, created if need be, and its name there. `None` for the root itself.
    fn locate(&mut self, name: &[u8]) -> Outcome<Option<(&OwnedFd, CString)>> {
        let components = safe_components(name)?;
        let Some((last, above)) = components.split_last() else {
            return Ok(None);
        };
        let last = CString::new(*last).map_err(|_| invalid("a member's name contains a zero byte"))?;
        let wanted = above.join(&b'/');
        if self.parent.as_ref().is_none_or(|(known, _)| *known != wanted) {
            let mut here = self
                .root
                .try_clone()
                .map_err(|error| from_io("cannot unpack", &error))?;
            for component in above {
                let component =
                    CString::new(*component).map_err(|_| invalid("a member's name contains a zero byte"))?;
                here = match enter(&here, &component, self.owner) {
                    Ok(below) => below,
                    Err(Errno::LOOP | Errno::NOTDIR) => {
                        let text = format!(
                            "the member {} goes through something that is no directory",
                            show(name)
                        );
                        return Err(invalid(text));
                    }
                    Err(error) => return Err(cannot("create the directory of", name, error)),
                };
            }
            self.parent = Some((wanted, here));
        }
        let (_, parent) = self.parent.as_ref().expect("set above");
        Ok(Some((parent, last)))
    }
}

impl Content {
    fn take(&mut self, bytes: &[u8]) -> Outcome {
        match self {
            Self::File { file, .. } => file
                .write_all(bytes)
                .map_err(|error| from_io("cannot write a file of the archive", &error)),
            Self::Extension { bytes: held, .. } => {
                held.extend_from_slice(bytes);
                Ok(())
            }
            Self::Skipped => Ok(()),
        }
    }
}

/// Opens a directory below `parent`, creating it if it is missing.
fn enter(parent: impl AsFd, name: &CString, owner: Option<Owner>) -> Result<OwnedFd, Errno> {
    match open_directory(&parent, name) {
        Err(Errno::NOENT) => {
            match rustix::fs::mkdirat(&parent, name, Mode::from_raw_mode(0o755)) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(error) => return Err(error),
            }
            let fd = open_directory(&parent, name)?;
            Owner::give(owner, &fd);
            Ok(fd)
        }
        other => other,
    }
}

/// Removes what is in the way of a new file; a directory is not, and is reported by what follows.
fn clear_the_way(parent: &OwnedFd, name: &CString) -> Result<(), Errno> {
    match rustix::fs::unlinkat(parent, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT | Errno::ISDIR | Errno::PERM) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Without set-id bits: an archive does not hand out identities.
fn safe_mode(mode: u32) -> Mode {
    Mode::from_raw_mode(mode & 0o1777)
}

fn give_itself(parent: &OwnedFd, name: &CString, owner: Option<Owner>) {
    if let Some(owner) = owner {
        let (uid, gid) = owner.ids();
        let _ = rustix::fs::chownat(parent, name, uid, gid, AtFlags::SYMLINK_NOFOLLOW);
    }
}

fn set_modified(file: &File, seconds: i64) {
    let at = Timespec {
        tv_sec: seconds,
        tv_nsec: 0,
    };
    let times = Timestamps {
        last_access: at,
        last_modification: at,
    };
    let _ = rustix::fs::futimens(file, &times);
}

fn cannot(attempt: &str, name: &[u8], error: Errno) -> atoll_guest_protocol::Failure {
    from_errno(
        format!("cannot {attempt} the member {}", show(name)),
        io::Error::from(error).raw_os_error().unwrap_or(0),
    )
}
