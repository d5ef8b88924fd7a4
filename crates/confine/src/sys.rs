//! System calls that `rustix` does not wrap, and two calls of the C library's allocator, each as a safe function.
#![expect(unsafe_code, reason = "raw system calls")]

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};

use libc::c_long;

const CAPABILITY_VERSION_3: u32 = 0x2008_0522;

fn check(result: c_long) -> io::Result<c_long> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(result)
}

/// `prctl` with plain numbers; says what came out.
pub fn prctl(option: i32, a: u64, b: u64) -> io::Result<c_long> {
    // SAFETY: callers pass options that take numbers only.
    check(unsafe { libc::syscall(libc::SYS_prctl, option, a, b, 0, 0) })
}

/// Leaves the session keyring of whoever started this process.
pub fn leave_session_keyring() {
    const KEYCTL_JOIN_SESSION_KEYRING: i32 = 1;
    // SAFETY: a null name asks for an anonymous keyring. A kernel without keyrings fails, and has none to leave.
    unsafe { libc::syscall(libc::SYS_keyctl, KEYCTL_JOIN_SESSION_KEYRING, 0, 0, 0, 0) };
}

pub fn permitted_capabilities() -> io::Result<u64> {
    let header = [CAPABILITY_VERSION_3, 0];
    let mut data = [0u32; 6];
    // SAFETY: version 3 writes two `struct __user_cap_data_struct` of three words each, which `data` is.
    check(unsafe { libc::syscall(libc::SYS_capget, header.as_ptr(), data.as_mut_ptr()) })?;
    Ok(u64::from(data[1]) | u64::from(data[4]) << 32)
}

/// Sets permitted, effective and inheritable capabilities to exactly `mask` and none.
pub fn set_capabilities(mask: u64) -> io::Result<()> {
    let header = [CAPABILITY_VERSION_3, 0];
    let (low, high) = (mask as u32, (mask >> 32) as u32);
    let data = [low, low, 0, high, high, 0];
    // SAFETY: version 3 reads two `struct __user_cap_data_struct` of three words each, which `data` is.
    check(unsafe { libc::syscall(libc::SYS_capset, header.as_ptr(), data.as_ptr()) })?;
    Ok(())
}

/// From now on threads share this many heaps. To be called while there is one thread.
pub fn limit_heaps(most: i32) {
    #[cfg(target_env = "gnu")]
    // SAFETY: a number, and no other thread that allocates at the same time. What it does not understand it refuses.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, most);
    }
    #[cfg(not(target_env = "gnu"))]
    let _ = most;
}

/// Gives the kernel back what was freed and is kept for later.
pub fn trim_heaps() {
    #[cfg(target_env = "gnu")]
    // SAFETY: takes the allocator's own locks, and touches nothing that is in use.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Loads a seccomp program for this thread and all that comes from it.
pub fn load_filter(program: &[libc::sock_filter]) -> io::Result<()> {
    let program = libc::sock_fprog {
        len: u16::try_from(program.len()).map_err(io::Error::other)?,
        filter: program.as_ptr().cast_mut(),
    };
    // SAFETY: the kernel copies the program, which is alive and as long as `len` says, and does not write to it.
    check(unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            0,
            &raw const program,
        )
    })?;
    Ok(())
}

/// Landlock's newest generation in this kernel; 0 where there is none.
pub(crate) fn landlock_abi() -> u32 {
    const LANDLOCK_CREATE_RULESET_VERSION: u32 = 1;
    // SAFETY: with this flag the kernel reads no memory.
    let abi = unsafe {
        libc::syscall(
            libc::SYS_landlock_create_ruleset,
            0,
            0,
            LANDLOCK_CREATE_RULESET_VERSION,
        )
    };
    u32::try_from(abi).unwrap_or(0)
}

/// `words` is a `struct landlock_ruleset_attr`, as long as the kernel's generation knows it.
pub(crate) fn landlock_ruleset(words: &[u64]) -> io::Result<OwnedFd> {
    // SAFETY: the kernel reads `size_of_val(words)` bytes.
    let fd = check(unsafe {
        libc::syscall(
            libc::SYS_landlock_create_ruleset,
            words.as_ptr(),
            size_of_val(words),
            0,
        )
    })?;
    // SAFETY: a new descriptor that nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}

pub(crate) fn landlock_allow(ruleset: &OwnedFd, beneath: impl AsFd, access: u64) -> io::Result<()> {
    #[repr(C, packed)]
    struct PathBeneath {
        allowed_access: u64,
        parent_fd: i32,
    }
    const LANDLOCK_RULE_PATH_BENEATH: i32 = 1;
    let rule = PathBeneath {
        allowed_access: access,
        parent_fd: beneath.as_fd().as_raw_fd(),
    };
    // SAFETY: `rule` has the layout of `struct landlock_path_beneath_attr` and is alive.
    check(unsafe {
        libc::syscall(
            libc::SYS_landlock_add_rule,
            ruleset.as_raw_fd(),
            LANDLOCK_RULE_PATH_BENEATH,
            &raw const rule,
            0,
        )
    })?;
    Ok(())
}

pub(crate) fn landlock_restrict(ruleset: &OwnedFd) -> io::Result<()> {
    // SAFETY: plain numbers.
    check(unsafe { libc::syscall(libc::SYS_landlock_restrict_self, ruleset.as_raw_fd(), 0) })?;
    Ok(())
}

/// Which side of [`fork`] this is.
#[derive(Debug)]
pub enum Fork {
    Parent { child: i32 },
    Child,
}

/// Makes a copy of this process. Refused when it has more than one thread: the copy would have one, and whatever the others
/// held would be held for ever.
pub fn fork() -> io::Result<Fork> {
    let threads = std::fs::read_dir("/proc/self/task")?.count();
    if threads != 1 {
        return Err(io::Error::other(format!(
            "this process has {threads} threads and can be copied only while it has one"
        )));
    }
    // SAFETY: there is one thread, so no lock is held by another, and the copy may do anything.
    match check(unsafe { libc::fork() }.into())? {
        0 => Ok(Fork::Child),
        child => Ok(Fork::Parent { child: child as i32 }),
    }
}
