//! What happens once, before the loop: as few system calls as will do, because a cold start waits for them.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use atoll_guest_protocol::Configure;
use rustix::fs::{Mode, OFlags};
use rustix::process::{Resource, Rlimit};

use crate::agent::Agent;
use crate::commands::Commands;
use crate::job::Shared;
use crate::mux::Output;
use crate::network::WayOut;
use crate::poll::{EventFlags, Poller, Token};
use crate::spawn::Confinement;

#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Options {
    confine: bool,
    uncover_tmp: bool,
    seccomp_fd: Option<RawFd>,
}

impl Options {
    pub(crate) fn parse(arguments: &[String]) -> io::Result<Self> {
        let mut options = Self::default();
        let mut arguments = arguments.iter();
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                "--confine" => options.confine = true,
                "--uncover-tmp" => options.uncover_tmp = true,
                "--seccomp-fd" => {
                    let fd = arguments
                        .next()
                        .and_then(|fd| fd.parse().ok())
                        .filter(|&fd| fd > 2);
                    options.seccomp_fd =
                        Some(fd.ok_or_else(|| refuse("--seccomp-fd needs a descriptor above 2"))?);
                }
                other => return Err(refuse(&format!("unknown argument {other}"))),
            }
        }
        if options.seccomp_fd.is_some() && !options.confine {
            return Err(refuse("--seccomp-fd makes sense only with --confine"));
        }
        Ok(options)
    }
}

fn refuse(message: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, message.to_owned())
}

pub(crate) fn agent(options: &Options) -> io::Result<Agent> {
    if options.uncover_tmp {
        uncover_tmp()?;
    }
    // The filter's descriptor first: it may stand where the channel would be moved to.
    let confinement = match options.confine {
        true => Some(Confinement {
            filter: options.seccomp_fd.map_or(Ok(Vec::new()), read_filter)?,
        }),
        false => None,
    };
    let null = rustix::fs::open(
        "/dev/null",
        OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOCTTY,
        Mode::empty(),
    )?;
    let input = take_channel(0, &null)?;
    let output = take_channel(1, &null)?;
    // Whatever the runtime left open is not for children.
    // SAFETY: plain system call; it closes nothing.
    unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) };
    // SAFETY: plain system calls.
    unsafe {
        libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0);
        libc::umask(0o022);
        // A Rust program that started us may ignore it, and every command would inherit that.
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
    }
    let signals = block_signals()?;
    let poller = Poller::new()?;
    poller.add(&output, Token::Output, EventFlags::empty())?;
    let shared = Shared {
        out: Output::new(output),
        poller,
        commands: Commands::new(null, confinement, raise_open_files()),
        config: Configure::default(),
        way_out: WayOut::default(),
        wakes: Vec::new(),
    };
    Agent::new(input, signals, shared)
}

/// Takes away what the runtime has mounted over an empty `/tmp`, so that files there lie on the writable layer.
fn uncover_tmp() -> io::Result<()> {
    // SAFETY: plain system call on a string that lives for ever. Nobody else runs yet who could be there.
    if unsafe { libc::umount2(c"/tmp".as_ptr(), libc::MNT_DETACH) } == 0 {
        return Ok(());
    }
    match io::Error::last_os_error() {
        // It was not empty, so nothing was mounted; or there is none.
        error if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOENT)) => Ok(()),
        error => Err(error),
    }
}

/// Moves an end of the channel away from where children would find it, and puts `/dev/null` there.
fn take_channel(fd: RawFd, null: &OwnedFd) -> io::Result<OwnedFd> {
    // SAFETY: 0 and 1 are open, as the runtime's contract says; if not, the calls fail and we say so.
    let standard = unsafe { BorrowedFd::borrow_raw(fd) };
    let moved = rustix::io::fcntl_dupfd_cloexec(standard, 3)?;
    rustix::io::ioctl_fionbio(&moved, true)?;
    // SAFETY: plain system call on open descriptors; whoever used `fd` before has no claim to it.
    if unsafe { libc::dup2(null.as_raw_fd(), fd) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(moved)
}

/// Blocks every signal, for good: nothing that anyone sends interrupts the agent, and children, who get an empty mask,
/// inherit no changed disposition. Ended children are told of by a descriptor.
fn block_signals() -> io::Result<OwnedFd> {
    // SAFETY: the sets are initialised by the calls that fill them, and live through those that read them.
    let fd = unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const all, std::ptr::null_mut());
        let mut children: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut children);
        libc::sigaddset(&raw mut children, libc::SIGCHLD);
        libc::signalfd(-1, &raw const children, libc::SFD_NONBLOCK | libc::SFD_CLOEXEC)
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: just made, and nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The agent holds descriptors for many streams; returns the hard limit, which children keep.
fn raise_open_files() -> u64 {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let hard = limit.maximum.unwrap_or(u64::MAX);
    if limit.current != limit.maximum {
        let _ = rustix::process::setrlimit(
            Resource::Nofile,
            Rlimit {
                current: limit.maximum,
                maximum: limit.maximum,
            },
        );
    }
    hard
}

/// Reads an array of `struct sock_filter` in the machine's own layout, and closes the descriptor.
fn read_filter(fd: RawFd) -> io::Result<Vec<libc::sock_filter>> {
    const LONGEST: usize = 4096; // BPF_MAXINSNS
    // SAFETY: the runtime opened it for us; nobody else here knows its number.
    let mut file = std::fs::File::from(unsafe { OwnedFd::from_raw_fd(fd) });
    let mut bytes = Vec::new();
    io::Read::read_to_end(
        &mut io::Read::take(&mut file, 8 * (LONGEST as u64 + 1)),
        &mut bytes,
    )?;
    let filter: Vec<libc::sock_filter> = bytes
        .chunks_exact(8)
        .map(|word| libc::sock_filter {
            code: u16::from_ne_bytes([word[0], word[1]]),
            jt: word[2],
            jf: word[3],
            k: u32::from_ne_bytes([word[4], word[5], word[6], word[7]]),
        })
        .collect();
    if filter.is_empty() || filter.len() > LONGEST || bytes.len() % 8 != 0 {
        return Err(refuse("the seccomp program is empty, too long or cut off"));
    }
    Ok(filter)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(arguments: &[&str]) -> io::Result<Options> {
        let owned: Vec<String> = arguments.iter().map(|&argument| argument.to_owned()).collect();
        Options::parse(&owned)
    }

    #[test]
    fn arguments() {
        assert_eq!(parse(&[]).expect("valid"), Options::default());
        let confined = parse(&["--confine", "--seccomp-fd", "5"]).expect("valid");
        assert_eq!((confined.confine, confined.seccomp_fd), (true, Some(5)));
        assert!(!confined.uncover_tmp && parse(&["--uncover-tmp"]).expect("valid").uncover_tmp);
        assert!(
            parse(&["--seccomp-fd", "5"]).is_err(),
            "never silently unfiltered"
        );
        assert!(parse(&["--confine", "--seccomp-fd", "1"]).is_err());
        assert!(parse(&["--help"]).is_err());
    }
}
