//! Between `clone` and `exec`: a copy of the server becomes a process from which nothing of the host can be reached.
//!
//! What must hold:
//! - The copy has one thread, and locks that others held are never released in it. So it makes system calls on what was
//!   prepared before, and nothing else: no allocation, no lock, and none of libc's `set*id`, which would wait for
//!   threads that are not there.
//! - Whatever fails, the sentry is not started.
#![expect(unsafe_code, reason = "clone, and system calls without libc's help after it")]

use std::ffi::{CStr, CString, c_char, c_int, c_long, c_ulong, c_void};
use std::io;
use std::os::fd::RawFd;
use std::ptr::null;

use rustix::process::Pid;

use super::super::network;
use crate::Cause;
use crate::cgroup::Entry;

/// New for every sentry; its own user namespace owns them all.
const NAMESPACES: c_int = libc::CLONE_NEWUSER
    | libc::CLONE_NEWNS
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUTS
    | network::NAMESPACE;

/// What the sentry may do in its user namespace: trace the processes in which the guest's code runs. (`runsc run` leaves it
/// power over files too, for those that it shares with a gofer; here there are none.)
const CAPABILITIES: u64 = 1 << 19;

/// How long the report of a failure is. The sentry's own report is a single 0.
pub(super) const FAILURE: usize = 6;

/// What the child does, as a failure of it is called.
#[derive(Debug, Clone, Copy)]
#[repr(u8)]
enum Step {
    Cgroup = 1,
    Ids,
    Root,
    Proc,
    Umounter,
    Capabilities,
    Descriptors,
    Exec,
}

/// What a report means, after its first byte.
pub(super) fn explain([step, errno @ ..]: [u8; FAILURE - 1]) -> Cause {
    const WHAT: [&str; 8] = [
        "entering the cgroup",
        "taking its user ids",
        "making an empty root",
        "mounting /proc",
        "preparing to unmount /proc",
        "giving up capabilities",
        "passing descriptors",
        "executing runsc",
    ];
    let what = usize::from(step).checked_sub(1).and_then(|step| WHAT.get(step));
    Cause::Io {
        what: (*what.unwrap_or(&"starting")).to_owned(),
        source: io::Error::from_raw_os_error(i32::from_le_bytes(errno)),
    }
}

/// Descriptors that the child needs for itself.
#[derive(Debug)]
pub(super) struct Ends {
    pub(super) runsc: RawFd,
    /// Something can be read when its ids are mapped; nothing ever, when they never will be.
    pub(super) go_read: RawFd,
    pub(super) go_written: RawFd,
    /// Something can be read when `/proc` is to go.
    pub(super) proc_read: RawFd,
    /// Where to report.
    pub(super) tell: RawFd,
}

/// Everything that the child needs, made before it is.
#[derive(Debug)]
pub(super) struct Plan<'a> {
    ends: Ends,
    /// Ends with null.
    argv: Vec<*const c_char>,
    /// By the numbers that the sentry gets them by.
    files: Vec<RawFd>,
    /// Room for the same, out of the way.
    moved: Vec<RawFd>,
    entry: &'a Entry,
    stack: Vec<u128>,
}

impl<'a> Plan<'a> {
    pub(super) fn new(ends: Ends, argv: &'a [CString], files: Vec<RawFd>, entry: &'a Entry) -> Self {
        Self {
            ends,
            argv: argv.iter().map(|word| word.as_ptr()).chain([null()]).collect(),
            moved: files.clone(),
            files,
            entry,
            stack: vec![0; 1024],
        }
    }
}

/// Starts the child.
pub(super) fn clone(mut plan: Plan<'_>) -> io::Result<Pid> {
    // SAFETY: as `fork`: a copy of this process, on a copy of this stack. What it may do there, `run` does.
    match unsafe { libc::syscall(libc::SYS_clone, NAMESPACES | libc::SIGCHLD, 0, 0, 0, 0) } {
        0 => {
            let (step, errno) = run(&mut plan);
            let [a, b, c, d] = errno.to_le_bytes();
            let report: [u8; FAILURE] = [1, step as u8, a, b, c, d];
            // SAFETY: the buffer is as long as said; `_exit` runs nothing of the server's.
            unsafe {
                libc::write(plan.ends.tell, report.as_ptr().cast(), report.len());
                libc::_exit(1)
            }
        }
        pid => {
            let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
            pid.filter(|pid| pid.as_raw_nonzero().get() > 0)
                .ok_or_else(io::Error::last_os_error)
        }
    }
}

/// Returns only when it fails: what failed, and why.
fn run(plan: &mut Plan<'_>) -> (Step, i32) {
    match steps(plan) {
        Ok(never) => match never {},
        Err((step, error)) => (step, error.raw_os_error().unwrap_or(0)),
    }
}

fn steps(plan: &mut Plan<'_>) -> Result<std::convert::Infallible, (Step, io::Error)> {
    let at = |step| move |error| (step, error);
    wait(&plan.ends).map_err(at(Step::Ids))?;
    plan.entry.enter().map_err(at(Step::Cgroup))?;
    ids().map_err(at(Step::Ids))?;
    root().map_err(at(Step::Root))?;
    proc().map_err(at(Step::Proc))?;
    pivot().map_err(at(Step::Root))?;
    umounter(plan).map_err(at(Step::Umounter))?;
    capabilities().map_err(at(Step::Capabilities))?;
    let runsc = descriptors(plan).map_err(at(Step::Descriptors))?;
    Err((Step::Exec, exec(plan, runsc)))
}

fn check(result: c_long) -> io::Result<c_long> {
    match result {
        0.. => Ok(result),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Waits until its ids are mapped.
fn wait(ends: &Ends) -> io::Result<()> {
    let mut word = 0_u8;
    // SAFETY: system calls on numbers and on a byte that outlives them.
    let heard = unsafe {
        check(libc::close(ends.go_written).into())?;
        check(libc::read(ends.go_read, (&raw mut word).cast(), 1) as c_long)?
    };
    match heard {
        // Whoever would have done it failed, or is gone.
        0 => Err(io::Error::from_raw_os_error(libc::ESRCH)),
        _ => Ok(()),
    }
}

/// Becomes the first of its ids, and leaves the server's groups, session and signals behind.
fn ids() -> io::Result<()> {
    // SAFETY: system calls on numbers, and on a group list of length 0 and a signal set that outlives them. A signal set
    // is valid, and empty, when it is zero.
    unsafe {
        check(libc::syscall(libc::SYS_setgroups, 0, null::<c_void>()))?;
        check(libc::syscall(libc::SYS_setresgid, 0, 0, 0))?;
        check(libc::syscall(libc::SYS_setresuid, 0, 0, 0))?;
        check(libc::setsid().into())?;
        libc::umask(0);
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
        let none: libc::sigset_t = std::mem::zeroed();
        check(libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut()).into())?;
    }
    Ok(())
}

const HARMLESS: c_ulong = libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC;

fn mount(
    source: Option<&CStr>,
    at: &CStr,
    kind: Option<&CStr>,
    flags: c_ulong,
    data: Option<&CStr>,
) -> io::Result<()> {
    let pointer = |text: Option<&CStr>| text.map_or(null(), CStr::as_ptr);
    // SAFETY: every pointer is null or a C string that outlives the call.
    let mounted = unsafe {
        libc::mount(
            pointer(source),
            at.as_ptr(),
            pointer(kind),
            flags,
            pointer(data).cast(),
        )
    };
    check(mounted.into()).map(drop)
}

/// A small filesystem over `/tmp`, with room for `/proc` and nothing else, as the working directory.
fn root() -> io::Result<()> {
    mount(None, c"/", None, libc::MS_REC | libc::MS_SLAVE, None)?;
    mount(
        Some(c"atoll-root"),
        c"/tmp",
        Some(c"tmpfs"),
        HARMLESS,
        Some(c"size=4k,nr_inodes=4,mode=555"),
    )?;
    // SAFETY: both paths are C strings.
    unsafe {
        check(libc::chdir(c"/tmp".as_ptr()).into())?;
        check(libc::mkdir(c"proc".as_ptr(), 0o555).into())?;
    }
    Ok(())
}

/// The sentry looks at its own memory map once, and for directories among its descriptors.
fn proc() -> io::Result<()> {
    let own = mount(
        Some(c"proc"),
        c"proc",
        Some(c"proc"),
        HARMLESS | libc::MS_RDONLY,
        None,
    );
    // Where something hides parts of the host's `/proc`, there is no other; for this moment, that will do.
    own.or_else(|_| mount(Some(c"/proc"), c"proc", None, libc::MS_BIND | libc::MS_REC, None))
}

/// Makes the working directory the root, and everything else unreachable.
fn pivot() -> io::Result<()> {
    let sealed = HARMLESS | libc::MS_REMOUNT | libc::MS_BIND | libc::MS_RDONLY;
    mount(None, c"/tmp", None, sealed, None)?;
    // SAFETY: all paths are C strings.
    unsafe {
        check(libc::syscall(libc::SYS_pivot_root, c".".as_ptr(), c".".as_ptr()))?;
        check(libc::umount2(c".".as_ptr(), libc::MNT_DETACH).into())?;
        check(libc::chdir(c"/".as_ptr()).into())?;
    }
    Ok(())
}

/// The sentry cannot unmount `/proc`, so a process of its own waits for its word. The sentry waits for that one's end before
/// it locks itself in, and only after that is there a guest.
fn umounter(plan: &mut Plan<'_>) -> io::Result<()> {
    let top = plan.stack.as_mut_ptr_range().end.cast::<c_void>();
    let word = (&raw mut plan.ends.proc_read).cast::<c_void>();
    // SAFETY: it shares this memory until `exec` leaves it alone with it, and uses a stack of its own, whose end is aligned,
    // and one number. Its descriptors are its own.
    check(unsafe { libc::clone(unmount, top, libc::CLONE_VM | libc::SIGCHLD, word) }.into()).map(drop)
}

extern "C" fn unmount(proc_read: *mut c_void) -> c_int {
    let mut word = 0_u8;
    // SAFETY: system calls on numbers, a byte and a C string. The pointer is to the number that `umounter` gave, in memory
    // that nobody else has or writes to.
    unsafe {
        // Nothing of the server's may stay open because of this process.
        if libc::dup2(*proc_read.cast::<RawFd>(), 0) != 0
            || libc::syscall(libc::SYS_close_range, 1, u32::MAX, 0) != 0
        {
            libc::_exit(1);
        }
        if libc::read(0, (&raw mut word).cast(), 1) != 1
            || libc::umount2(c"/proc".as_ptr(), libc::MNT_DETACH) != 0
        {
            libc::_exit(1);
        }
        libc::_exit(0)
    }
}

/// `exec` gives root what the bounding set allows and no more.
fn capabilities() -> io::Result<()> {
    for number in 0..64 {
        if CAPABILITIES >> number & 1 == 1 {
            continue;
        }
        // SAFETY: takes numbers only.
        match check(unsafe { libc::prctl(libc::PR_CAPBSET_DROP, number, 0, 0, 0) }.into()) {
            // There are no more.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => break,
            dropped => dropped?,
        };
    }
    // SAFETY: takes numbers only.
    check(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }.into()).map(drop)
}

/// Gives every file its number; everything else ends with `exec`. Returns `runsc`.
fn descriptors(plan: &mut Plan<'_>) -> io::Result<RawFd> {
    let count = plan.files.len() as c_int;
    // SAFETY: system calls on numbers.
    unsafe {
        for (moved, file) in plan.moved.iter_mut().zip(&plan.files) {
            *moved = check(libc::fcntl(*file, libc::F_DUPFD_CLOEXEC, count).into())? as RawFd;
        }
        let runsc = check(libc::fcntl(plan.ends.runsc, libc::F_DUPFD_CLOEXEC, count).into())? as RawFd;
        plan.ends.tell = check(libc::fcntl(plan.ends.tell, libc::F_DUPFD_CLOEXEC, count).into())? as RawFd;
        for (number, moved) in (0..).zip(&plan.moved) {
            check(libc::dup2(*moved, number).into())?;
        }
        check(libc::syscall(
            libc::SYS_close_range,
            count,
            u32::MAX,
            libc::CLOSE_RANGE_CLOEXEC,
        ))?;
        Ok(runsc)
    }
}

fn exec(plan: &Plan<'_>, runsc: RawFd) -> io::Error {
    let environment: [*const c_char; 1] = [null()];
    // SAFETY: both lists end with null, and consist of C strings that outlive the call.
    unsafe {
        libc::syscall(
            libc::SYS_execveat,
            runsc,
            c"".as_ptr(),
            plan.argv.as_ptr(),
            environment.as_ptr(),
            libc::AT_EMPTY_PATH,
        );
    }
    io::Error::last_os_error()
}
