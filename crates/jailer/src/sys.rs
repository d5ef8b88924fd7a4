//! System calls that `rustix` does not wrap, each as a safe function.
#![expect(unsafe_code, reason = "raw system calls")]

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use atoll_confine::sys::{permitted_capabilities, set_capabilities};
use libc::c_long;

pub(crate) const MOUNT_ATTR_RDONLY: u64 = 0x1;
pub(crate) const MOUNT_ATTR_IDMAP: u64 = 0x0010_0000;

/// Which side of [`clone_process`] this is.
pub(crate) enum Fork {
    Parent { child: libc::pid_t },
    Child,
}

fn check(result: c_long) -> io::Result<c_long> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(result)
}

/// Forks into new namespaces and, on cgroup v2, straight into a cgroup.
///
/// The child is a copy with one thread, as after `fork`; this program never has more than one, so it may do anything.
pub(crate) fn clone_process(namespaces: u64, cgroup: Option<BorrowedFd<'_>>) -> io::Result<Fork> {
    const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;
    let mut args = [0u64; 11]; // struct clone_args
    args[0] = namespaces;
    args[4] = libc::SIGCHLD as u64;
    if let Some(cgroup) = cgroup {
        args[0] |= CLONE_INTO_CGROUP;
        args[10] = cgroup.as_raw_fd() as u64;
    }
    // SAFETY: `args` is a whole `struct clone_args` with no stack and no CLONE_VM, CLONE_SETTLS or *_TID flag: the child
    // gets a copy of everything and no pointer is written. `std` keeps no lock that another thread could hold, since
    // there is no other thread.
    match check(unsafe { libc::syscall(libc::SYS_clone3, args.as_ptr(), size_of_val(&args)) })? {
        0 => Ok(Fork::Child),
        child => Ok(Fork::Parent {
            child: child as libc::pid_t,
        }),
    }
}

/// Forks as [`clone_process`] does, with another effective user as the owner of the new user namespace.
///
/// The kernel charges what it counts per user (inotify instances and watches, for one: 128 by default) to the owner too.
/// Were that root, all jails would share root's allowance, and one could use it up for the others and the host.
pub(crate) fn clone_process_as(
    uid: u32,
    namespaces: u64,
    cgroup: Option<BorrowedFd<'_>>,
) -> io::Result<Fork> {
    const UNCHANGED: i32 = -1;
    let set_effective = |uid: u32| {
        // SAFETY: plain numbers. The raw call changes this thread only, and there is no other.
        check(unsafe { libc::syscall(libc::SYS_setresuid, UNCHANGED, uid, UNCHANGED) })
    };
    let capabilities = permitted_capabilities()?;
    set_effective(uid)?;
    // Leaving user 0 clears the effective set; entering a cgroup needs it.
    let forked = set_capabilities(capabilities).and_then(|()| clone_process(namespaces, cgroup));
    if !matches!(forked, Ok(Fork::Child)) {
        set_effective(0)?;
    }
    forked
}

/// Does something in a child process and waits for it. What it complains about goes to stderr.
pub(crate) fn in_a_child(work: impl FnOnce() -> crate::error::Result<()>) -> crate::error::Result<()> {
    use crate::error::{Doing, Error};
    match clone_process(0, None).doing(|| "forking a helper")? {
        Fork::Child => {
            let done = work();
            if let Err(error) = &done {
                eprintln!("{error}");
            }
            #[expect(clippy::exit, reason = "this is the helper, which has done its work")]
            std::process::exit(i32::from(done.is_err()));
        }
        Fork::Parent { child } => {
            let mut status = 0;
            // SAFETY: `status` is alive; `child` is ours and nobody else waits for it.
            check(unsafe { libc::waitpid(child, &raw mut status, 0) }.into())
                .doing(|| "waiting for the helper")?;
            if status != 0 {
                return Err(Error::new("the helper could not mount /proc"));
            }
            Ok(())
        }
    }
}

/// Leaves namespaces, all but shared descriptors.
pub(crate) fn unshare(namespaces: rustix::thread::UnshareFlags) -> rustix::io::Result<()> {
    // SAFETY: no CLONE_FILES among the flags of our callers, so no descriptor changes hands.
    unsafe { rustix::thread::unshare_unsafe(namespaces) }
}

/// The user namespace that a namespace belongs to.
pub(crate) fn owner_of_namespace(namespace: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    const NS_GET_USERNS: u64 = 0xB701;
    // SAFETY: takes no argument.
    let fd = check(unsafe { libc::syscall(libc::SYS_ioctl, namespace.as_raw_fd(), NS_GET_USERNS, 0) })?;
    // SAFETY: a new descriptor that nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}

/// Changes a mount: `set` are MOUNT_ATTR_* flags, `idmap` a user namespace for MOUNT_ATTR_IDMAP.
pub(crate) fn mount_setattr(
    mount: BorrowedFd<'_>,
    set: u64,
    idmap: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    let attr = [set, 0, 0, idmap.map_or(0, |fd| fd.as_raw_fd() as u64)]; // struct mount_attr
    // SAFETY: the path is an empty C string, `attr` a whole `struct mount_attr`; both outlive the call.
    check(unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            attr.as_ptr(),
            size_of_val(&attr),
        )
    })?;
    Ok(())
}

/// Sets the interface flags of `lo` to up and running, in the caller's network namespace.
pub(crate) fn raise_loopback() -> io::Result<()> {
    // SAFETY: plain numbers.
    let socket = check(unsafe {
        libc::syscall(
            libc::SYS_socket,
            libc::AF_INET,
            libc::SOCK_DGRAM | libc::SOCK_CLOEXEC,
            0,
        )
    })?;
    // SAFETY: the kernel just gave us this descriptor; nobody else owns it.
    let socket = unsafe { OwnedFd::from_raw_fd(socket as RawFd) };
    let mut request = [0u8; size_of::<libc::ifreq>()];
    request[..2].copy_from_slice(b"lo");
    let flags = (libc::IFF_UP | libc::IFF_RUNNING) as i16;
    request[libc::IFNAMSIZ..libc::IFNAMSIZ + 2].copy_from_slice(&flags.to_ne_bytes());
    // SAFETY: SIOCSIFFLAGS reads one `struct ifreq`, which `request` is as long as.
    check(unsafe {
        libc::syscall(
            libc::SYS_ioctl,
            socket.as_raw_fd(),
            libc::SIOCSIFFLAGS,
            request.as_mut_ptr(),
        )
    })?;
    Ok(())
}

pub(crate) fn set_limit(resource: i32, value: u64) -> io::Result<()> {
    let limit = libc::rlimit64 {
        rlim_cur: value,
        rlim_max: value,
    };
    // SAFETY: `limit` is alive; a null pointer asks for no old value.
    check(unsafe { libc::syscall(libc::SYS_prlimit64, 0, resource, &raw const limit, 0) })?;
    Ok(())
}

/// One `ioctl` on a loop device with a number as its argument.
pub(crate) fn loop_ioctl(fd: BorrowedFd<'_>, request: u64, argument: u64) -> io::Result<u32> {
    // SAFETY: callers pass LOOP_CTL_GET_FREE, which takes no memory.
    let result = check(unsafe { libc::syscall(libc::SYS_ioctl, fd.as_raw_fd(), request, argument) })?;
    Ok(result as u32)
}

/// `LOOP_CONFIGURE`: `config` is a `struct loop_config`.
pub(crate) fn loop_configure(fd: BorrowedFd<'_>, config: &[u64; 38]) -> io::Result<()> {
    const LOOP_CONFIGURE: u64 = 0x4C0A;
    // SAFETY: the kernel reads a `struct loop_config`, 304 bytes, as long as `config`.
    check(unsafe { libc::syscall(libc::SYS_ioctl, fd.as_raw_fd(), LOOP_CONFIGURE, config.as_ptr()) })?;
    Ok(())
}

/// Becomes `program`; returns only what went wrong.
pub(crate) fn execute(program: &CStr, arguments: &[&CStr]) -> io::Error {
    let mut argv: Vec<_> = arguments.iter().map(|argument| argument.as_ptr()).collect();
    argv.push(std::ptr::null());
    let environment = [std::ptr::null::<libc::c_char>()];
    // SAFETY: both arrays end with a null pointer and point to C strings that outlive the call.
    unsafe { libc::execve(program.as_ptr(), argv.as_ptr(), environment.as_ptr()) };
    io::Error::last_os_error()
}

/// Marks every descriptor above the three standard ones to be closed by `execve`.
pub(crate) fn close_on_exec_from_3() -> io::Result<()> {
    const CLOSE_RANGE_CLOEXEC: u32 = 4;
    // SAFETY: closes nothing now, so no owner loses a descriptor.
    check(unsafe { libc::syscall(libc::SYS_close_range, 3u32, u32::MAX, CLOSE_RANGE_CLOEXEC) })?;
    Ok(())
}

/// Duplicates over one of the standard descriptors.
pub(crate) fn become_standard(from: BorrowedFd<'_>, to: RawFd) -> io::Result<()> {
    // SAFETY: nothing in this program owns 0, 1 or 2; `std` uses them by number.
    check(unsafe { libc::syscall(libc::SYS_dup3, from.as_raw_fd(), to, 0) })?;
    Ok(())
}
