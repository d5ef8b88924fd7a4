//! A file or a tree as a tar stream, made while it is sent: one open directory per level, one open file.
//!
//! Symlinks are stored, never followed. Devices, sockets and FIFOs are left out, as is what vanishes meanwhile. A file
//! that shrinks while it is read is filled up with zeros, since its size was already said.

use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsFd;

use atoll_archive::format::{BLOCK, TypeFlag, padding};
use atoll_guest_protocol::{MAX_PAYLOAD, SUB_MAIN};
use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, Stat};

use crate::failure::{Outcome, invalid, show};
use crate::files::tar_format::Header;
use crate::files::{Place, bytes, open_directory};
use crate::job::{Context, Job, Step};

/// Entries looked at per step.
const PER_STEP: usize = 64;

pub(crate) struct TarOut {
    place: Place,
    levels: Vec<Level>,
    /// Headers and padding to be sent before anything else.
    pending: Vec<u8>,
    sent: usize,
    file: Option<Body>,
    over: bool,
    /// Set when other filesystems are left out: the device of the root.
    only_device: Option<u64>,
}

struct Level {
    directory: Dir,
    /// Its name in the archive, with a slash at the end.
    prefix: Vec<u8>,
}

struct Body {
    file: File,
    left: u64,
    padding: usize,
}

impl TarOut {
    pub(crate) fn open(place: Place, one_file_system: bool) -> Outcome<Box<dyn Job>> {
        let path = bytes(&place.path);
        let fail = |error: rustix::io::Errno| place.failure("cannot archive", &error.into());
        let c_path = CString::new(path).map_err(|_| invalid("the path contains a zero byte"))?;
        let name = match crate::path::split(path) {
            Some((_, name)) => name.to_vec(),
            None => b".".to_vec(),
        };
        let stat = rustix::fs::statat(CWD, &c_path, AtFlags::SYMLINK_NOFOLLOW).map_err(fail)?;
        let mut tar = Self {
            place,
            levels: Vec::new(),
            pending: Vec::new(),
            sent: 0,
            file: None,
            over: false,
            only_device: one_file_system.then_some(stat.st_dev),
        };
        match tar.add(CWD, &c_path, name, &stat) {
            Ok(true) => Ok(Box::new(tar)),
            Ok(false) => Err(invalid(format!(
                "{} is not a file or directory",
                show(c_path.as_bytes())
            ))),
            Err(error) => Err(tar.place.failure("cannot archive", &error.into())),
        }
    }

    /// Queues a member; `false` if it is of a kind that is left out.
    fn add(
        &mut self,
        parent: impl AsFd,
        file_name: &CString,
        name: Vec<u8>,
        stat: &Stat,
    ) -> Result<bool, rustix::io::Errno> {
        let mut header = Header {
            name,
            link: Vec::new(),
            kind: TypeFlag::File,
            mode: stat.st_mode & 0o7777,
            uid: stat.st_uid,
            gid: stat.st_gid,
            size: 0,
            modified: stat.st_mtime,
        };
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => {
                let flags =
                    OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
                let file = File::from(rustix::fs::openat(&parent, file_name, flags, Mode::empty())?);
                let size = u64::try_from(stat.st_size).unwrap_or(0);
                header.size = size;
                header.write(&mut self.pending);
                self.file = Some(Body {
                    file,
                    left: size,
                    padding: padding(size).len(),
                });
            }
            FileType::Directory => {
                header.kind = TypeFlag::Directory;
                header.name.push(b'/');
                if self.only_device.is_some_and(|device| device != stat.st_dev) {
                    header.write(&mut self.pending);
                    return Ok(true);
                }
                let directory = Dir::new(open_directory(&parent, file_name)?)?;
                header.write(&mut self.pending);
                self.levels.push(Level {
                    directory,
                    prefix: header.name,
                });
            }
            FileType::Symlink => {
                header.kind = TypeFlag::Symlink;
                header.link = rustix::fs::readlinkat(&parent, file_name, Vec::new())?.into_bytes();
                header.write(&mut self.pending);
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Looks at the next entry of the tree.
    fn advance(&mut self) -> io::Result<()> {
        let Some(level) = self.levels.last_mut() else {
            if !self.over {
                self.pending.resize(self.pending.len() + 2 * BLOCK, 0);
                self.over = true;
            }
            return Ok(());
        };
        let Some(entry) = level.directory.read() else {
            self.levels.pop();
            return Ok(());
        };
        let entry = entry?;
        let file_name = entry.file_name().to_owned();
        if file_name == *c"." || file_name == *c".." {
            return Ok(());
        }
        let name = [&level.prefix, file_name.as_bytes()].concat();
        let directory = level.directory.fd()?.try_clone_to_owned()?;
        let Ok(stat) = rustix::fs::statat(&directory, &file_name, AtFlags::SYMLINK_NOFOLLOW) else {
            return Ok(()); // gone since
        };
        match self.add(&directory, &file_name, name, &stat) {
            Ok(_) => Ok(()),
            // Replaced or removed since we looked.
            Err(rustix::io::Errno::NOENT | rustix::io::Errno::LOOP | rustix::io::Errno::NOTDIR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Fills `space` with the next bytes of the archive; 0 means that a step's work found none, or the end.
    fn produce(&mut self, space: &mut [u8]) -> io::Result<usize> {
        let mut filled = 0;
        let mut looked_at = 0;
        while filled < space.len() {
            let room = &mut space[filled..];
            if self.sent < self.pending.len() {
                let count = room.len().min(self.pending.len() - self.sent);
                room[..count].copy_from_slice(&self.pending[self.sent..self.sent + count]);
                self.sent += count;
                filled += count;
                continue;
            }
            self.pending.clear();
            self.sent = 0;
            if let Some(body) = &mut self.file {
                if body.left > 0 {
                    filled += body.read(room)?;
                    continue;
                }
                let padding = body.padding;
                self.pending.resize(padding, 0);
                self.file = None;
                continue;
            }
            if self.over || looked_at == PER_STEP {
                break;
            }
            looked_at += 1;
            self.advance()?;
        }
        Ok(filled)
    }

    fn is_done(&self) -> bool {
        self.over && self.sent == self.pending.len() && self.file.is_none()
    }
}

impl Body {
    fn read(&mut self, room: &mut [u8]) -> io::Result<usize> {
        let most = room.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
        let count = loop {
            match self.file.read(&mut room[..most]) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => break other?,
            }
        };
        let count = if count == 0 {
            room[..most].fill(0);
            most
        } else {
            count
        };
        self.left -= count as u64;
        Ok(count)
    }
}

impl Job for TarOut {
    fn step(&mut self, cx: &mut Context<'_>) -> Step {
        if self.is_done() {
            return Step::Done(Ok(()));
        }
        if cx.port.data_room() == 0 {
            return Step::Wait;
        }
        let (port, out) = (&mut *cx.port, &mut cx.shared.out);
        match port.data_with(out, SUB_MAIN, MAX_PAYLOAD, |space| self.produce(space)) {
            Ok(_) => Step::Again,
            Err(error) => Step::Done(Err(self.place.failure("cannot archive all of", &error))),
        }
    }
}
