//! Tells the host what changes below a path, by inotify.
//!
//! What must hold: a directory that appears is watched too, and what was already in it by then is reported; nothing grows
//! without bound: beyond `MOST_WATCHES` directories or `MOST_EVENTS` unsent events the host is told that some were lost.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::CString;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;

use atoll_guest_protocol::{Message, WatchEvent, WatchKind, encode};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use rustix::fs::{Access, AtFlags, CWD, Dir, FileType, Mode, OFlags};
use rustix::io::Errno;

use crate::failure::{Outcome, failure, from_io};
use crate::files::{Place, bytes, open_directory, to_path};
use crate::job::{Context, Job, Shared, Step};
use crate::poll::{EventFlags, Token};

const MOST_WATCHES: usize = 8192;
const MOST_EVENTS: usize = 4096;
const BATCH_BYTES: usize = 32 * 1024;
const SCANS_PER_STEP: usize = 32;

#[derive(Debug)]
pub(crate) struct Watch {
    inotify: OwnedFd,
    place: Place,
    recursive: bool,
    /// Directories (relative to the path) by watch.
    watches: BTreeMap<i32, Vec<u8>>,
    /// Directories that are yet to be watched.
    scans: Vec<Scan>,
    events: VecDeque<WatchEvent>,
    readable: bool,
    announced: bool,
}

#[derive(Debug)]
struct Scan {
    directory: Vec<u8>,
    /// Whether what is found there is news.
    report: bool,
}

impl Watch {
    pub(crate) fn open(place: Place, recursive: bool, stream: u32, shared: &Shared) -> Outcome<Box<dyn Job>> {
        let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)
            .map_err(|error| from_io("cannot watch", &error.into()))?;
        let mut watch = Self {
            inotify,
            place,
            recursive,
            watches: BTreeMap::new(),
            scans: Vec::new(),
            events: VecDeque::new(),
            readable: false,
            announced: false,
        };
        // The top must be there; of what is below, what vanishes meanwhile does not matter.
        watch
            .add(Vec::new())
            .map_err(|error| watch.place.failure("cannot watch", &error.into()))?;
        if watch.recursive {
            watch.scans.push(Scan {
                directory: Vec::new(),
                report: false,
            });
        }
        shared
            .poller
            .watch(&watch.inotify, Token::Stream(stream))
            .map_err(|error| from_io("cannot watch", &error))?;
        Ok(Box::new(watch))
    }

    fn add(&mut self, directory: Vec<u8>) -> Result<(), Errno> {
        let mask = WatchFlags::CREATE
            | WatchFlags::DELETE
            | WatchFlags::MODIFY
            | WatchFlags::CLOSE_WRITE
            | WatchFlags::ATTRIB
            | WatchFlags::MOVED_FROM
            | WatchFlags::MOVED_TO
            | WatchFlags::DELETE_SELF
            | WatchFlags::MOVE_SELF;
        let below = if directory.is_empty() {
            WatchFlags::empty()
        } else {
            WatchFlags::ONLYDIR | WatchFlags::DONT_FOLLOW
        };
        let path = self.absolute(&directory);
        // Linux asks this itself; gVisor lets anybody watch what they can get to.
        rustix::fs::accessat(CWD, &path, Access::READ_OK, AtFlags::EACCESS)?;
        let wd = inotify::add_watch(&self.inotify, path, mask | below)?;
        self.watches.insert(wd, directory);
        Ok(())
    }

    fn absolute(&self, directory: &[u8]) -> std::path::PathBuf {
        match directory {
            b"" => self.place.path.clone(),
            below => to_path([bytes(&self.place.path), b"/", below].concat()),
        }
    }

    fn push(&mut self, kind: WatchKind, name: Vec<u8>, directory: bool) {
        let event = WatchEvent {
            kind,
            name,
            directory,
        };
        // A file written a thousand times is written once.
        if self.events.back() == Some(&event) {
            return;
        }
        if self.events.len() >= MOST_EVENTS {
            self.lost();
            return;
        }
        self.events.push_back(event);
    }

    fn lost(&mut self) {
        if self
            .events
            .back()
            .is_none_or(|event| event.kind != WatchKind::Overflow)
        {
            self.events.push_back(WatchEvent {
                kind: WatchKind::Overflow,
                name: Vec::new(),
                directory: true,
            });
        }
    }

    /// Watches the directories below one; reports what it finds if that is news.
    fn scan(&mut self, scan: &Scan) -> Result<(), Errno> {
        let path = self.absolute(&scan.directory);
        let fd = if scan.directory.is_empty() {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            rustix::fs::open(&path, flags, Mode::empty())?
        } else {
            open_directory(CWD, &CString::new(bytes(&path)).map_err(|_| Errno::INVAL)?)?
        };
        let mut directory = Dir::new(rustix::io::fcntl_dupfd_cloexec(&fd, 3)?)?;
        while let Some(entry) = directory.read() {
            let entry = entry?;
            let name: CString = entry.file_name().to_owned();
            if name == *c"." || name == *c".." {
                continue;
            }
            let kind = match entry.file_type() {
                FileType::Unknown => match rustix::fs::statat(&fd, &name, AtFlags::SYMLINK_NOFOLLOW) {
                    Ok(stat) => FileType::from_raw_mode(stat.st_mode),
                    Err(_) => continue,
                },
                known => known,
            };
            let is_directory = kind == FileType::Directory;
            let path = below(&scan.directory, name.as_bytes());
            if scan.report {
                self.push(WatchKind::Created, path.clone(), is_directory);
            }
            if is_directory {
                self.follow(path, scan.report);
            }
        }
        Ok(())
    }

    /// Watches a directory and has it looked through.
    fn follow(&mut self, directory: Vec<u8>, report: bool) {
        if self.watches.len() >= MOST_WATCHES {
            self.lost();
            return;
        }
        match self.add(directory.clone()) {
            Ok(()) => self.scans.push(Scan { directory, report }),
            Err(Errno::NOSPC | Errno::NOMEM) => self.lost(),
            Err(_) => {} // gone since
        }
    }

    /// Stops watching a directory that moved away, and all below it.
    fn unfollow(&mut self, directory: &[u8]) {
        let inside = |path: &[u8]| {
            path.strip_prefix(directory)
                .is_some_and(|rest| rest.is_empty() || rest[0] == b'/')
        };
        let gone: Vec<i32> = self
            .watches
            .iter()
            .filter(|(_, path)| inside(path))
            .map(|(&wd, _)| wd)
            .collect();
        for wd in gone {
            self.watches.remove(&wd);
            let _ = inotify::remove_watch(&self.inotify, wd);
        }
        self.scans.retain(|scan| !inside(&scan.directory));
    }

    fn read_events(&mut self) -> io::Result<()> {
        let mut buffer = [MaybeUninit::uninit(); 8 * 1024];
        let inotify = self.inotify.try_clone()?;
        let mut reader = inotify::Reader::new(&inotify, &mut buffer);
        // One buffer's worth; more stays in the kernel's queue, which is bounded too.
        loop {
            match reader.next() {
                Ok(event) => {
                    let name = event.file_name().map(std::ffi::CStr::to_bytes);
                    self.take_event(event.wd(), event.events(), name);
                }
                Err(Errno::AGAIN) => {
                    self.readable = false;
                    return Ok(());
                }
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            if reader.is_buffer_empty() {
                return Ok(());
            }
        }
    }

    fn take_event(&mut self, wd: i32, flags: ReadFlags, name: Option<&[u8]>) {
        if flags.contains(ReadFlags::QUEUE_OVERFLOW) {
            return self.lost();
        }
        let Some(directory) = self.watches.get(&wd) else {
            return;
        };
        if flags.contains(ReadFlags::IGNORED) {
            self.watches.remove(&wd);
            return;
        }
        let top = directory.is_empty();
        let path = match name {
            Some(name) => below(directory, name),
            None => directory.clone(),
        };
        let is_directory = flags.contains(ReadFlags::ISDIR);
        if flags.intersects(ReadFlags::DELETE_SELF | ReadFlags::MOVE_SELF) {
            // Below the top its parent tells.
            if top {
                self.push(WatchKind::Removed, Vec::new(), is_directory);
            }
            return;
        }
        if name.is_none() && !top {
            return; // the parent's watch reports the same
        }
        for (flag, kind) in [
            (ReadFlags::CREATE, WatchKind::Created),
            (ReadFlags::MODIFY | ReadFlags::CLOSE_WRITE, WatchKind::Written),
            (ReadFlags::DELETE, WatchKind::Removed),
            (ReadFlags::MOVED_FROM, WatchKind::RenamedFrom),
            (ReadFlags::MOVED_TO, WatchKind::RenamedTo),
            (ReadFlags::ATTRIB, WatchKind::Attributes),
        ] {
            if flags.intersects(flag) {
                self.push(kind, path.clone(), is_directory);
            }
        }
        if self.recursive && is_directory {
            if flags.intersects(ReadFlags::MOVED_FROM | ReadFlags::DELETE) {
                self.unfollow(&path);
            }
            if flags.intersects(ReadFlags::CREATE | ReadFlags::MOVED_TO) {
                // What was moved here whole is one piece of news; what grows in a new directory is not yet known.
                self.follow(path, flags.contains(ReadFlags::CREATE));
            }
        }
    }

    /// Sends as much as one message holds.
    fn send(&mut self, cx: &mut Context<'_>) -> Step {
        let mut held = 0;
        let count = self
            .events
            .iter()
            .take_while(|event| {
                held += event.name.len() + 16;
                held <= BATCH_BYTES
            })
            .count()
            .max(1);
        let batch: Vec<WatchEvent> = self.events.iter().take(count).cloned().collect();
        let payload = encode(&Message::Changed(batch));
        if !cx.port.encoded_message(&mut cx.shared.out, &payload) {
            return Step::Wait;
        }
        self.events.drain(..count);
        Step::Again
    }
}

fn below(directory: &[u8], name: &[u8]) -> Vec<u8> {
    match directory {
        b"" => name.to_vec(),
        directory => [directory, b"/", name].concat(),
    }
}

impl Job for Watch {
    fn step(&mut self, cx: &mut Context<'_>) -> Step {
        for _ in 0..SCANS_PER_STEP {
            let Some(scan) = self.scans.pop() else {
                break;
            };
            match self.scan(&scan) {
                Ok(()) | Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::ACCESS) => {}
                Err(error) => {
                    let failed = failure(
                        atoll_guest_protocol::FailureKind::Io,
                        format!("cannot watch all directories: {}", io::Error::from(error)),
                    );
                    return Step::Done(Err(failed));
                }
            }
        }
        if !self.announced {
            if !self.scans.is_empty() {
                return Step::Again;
            }
            if !cx.message(&Message::Watching) {
                return Step::Wait;
            }
            self.announced = true;
        }
        // Unsent events are not added to while they wait for credit: the kernel's queue coalesces and counts.
        if self.readable
            && self.events.len() < MOST_EVENTS / 2
            && let Err(error) = self.read_events()
        {
            return Step::Done(Err(from_io("cannot watch", &error)));
        }
        if !self.events.is_empty() {
            return self.send(cx);
        }
        match self.readable || !self.scans.is_empty() {
            true => Step::Again,
            false => Step::Wait,
        }
    }

    fn ready(&mut self, flags: EventFlags) {
        self.readable |= flags.contains(EventFlags::IN);
    }
}
