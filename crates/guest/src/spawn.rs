//! Starts a program: `clone(CLONE_VM | CLONE_VFORK)` on a stack of its own, so that no page table is copied and the
//! child's failure can be read from memory that both share.
//!
//! What must hold in the child, between `clone` and `execve`:
//! - Only raw system calls on memory prepared before: no allocation, no lock, no libc wrapper that touches more than
//!   `errno` (the parent is suspended, so sharing that is harmless).
//! - Privileges fall in this order: bounding set, groups, ids, then (confined) ambient and held capabilities,
//!   no_new_privs, seccomp. A step that fails ends the child; nothing runs with more than was asked.
//! - Every descriptor of the agent is close-on-exec; the child ends up with 0, 1 and 2 only.

use std::ffi::{CString, c_char, c_int, c_void};
use std::os::fd::RawFd;
use std::ptr;

use crate::users::Account;

/// What confined children are locked into; see `--confine`.
#[derive(Debug)]
pub(crate) struct Confinement {
    /// A seccomp program, loaded last. Empty: none was given.
    pub(crate) filter: Vec<libc::sock_filter>,
}

/// Everything the child needs, ready for raw system calls.
#[derive(Debug)]
pub(crate) struct Plan<'a> {
    /// Tried in turn until one is a program.
    pub(crate) candidates: &'a [CString],
    pub(crate) argv: &'a [CString],
    pub(crate) env: &'a [CString],
    pub(crate) directory: &'a CString,
    pub(crate) account: &'a Account,
    /// What becomes 0, 1 and 2.
    pub(crate) stdio: [RawFd; 3],
    /// Whether `stdio[0]` is a terminal to be made the controlling one.
    pub(crate) terminal: bool,
    pub(crate) confinement: Option<&'a Confinement>,
    /// Soft and hard limit of open files.
    pub(crate) open_files: libc::rlimit,
}

/// Where the child was when it failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum Stage {
    Clone,
    Session,
    Stdio,
    Identity,
    Directory,
    Confine,
    Execute,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Failed {
    pub(crate) stage: Stage,
    pub(crate) errno: i32,
    /// Which candidate, for `Execute`.
    pub(crate) candidate: usize,
}

const STACK: usize = 64 * 1024;

/// Keeps the child's stack between spawns: its pages are touched once.
#[derive(Debug)]
pub(crate) struct Spawner {
    stack: Vec<u128>,
    /// Ids to leave alone: switching to oneself needs privileges that a test run may not have.
    own: (u32, u32),
}

struct Child<'a> {
    plan: &'a Plan<'a>,
    argv: *const *const c_char,
    env: *const *const c_char,
    switch_ids: bool,
    stays_itself: bool,
    failed: Option<Failed>,
}

impl Spawner {
    pub(crate) fn new() -> Self {
        let own = (
            rustix::process::getuid().as_raw(),
            rustix::process::getgid().as_raw(),
        );
        Self {
            stack: Vec::new(),
            own,
        }
    }

    /// Returns once the program runs or could not be run. A child that failed was reaped.
    pub(crate) fn spawn(&mut self, plan: &Plan<'_>) -> Result<i32, Failed> {
        let pointers = |strings: &[CString]| -> Vec<*const c_char> {
            strings
                .iter()
                .map(|string| string.as_ptr())
                .chain([ptr::null()])
                .collect()
        };
        let (argv, env) = (pointers(plan.argv), pointers(plan.env));
        let privileged = self.own.0 == 0;
        let stays_itself = self.own == (plan.account.uid, plan.account.gid);
        let mut child = Child {
            plan,
            argv: argv.as_ptr(),
            env: env.as_ptr(),
            switch_ids: privileged || !stays_itself,
            stays_itself,
            failed: None,
        };
        if self.stack.is_empty() {
            self.stack = vec![0; STACK / size_of::<u128>()];
        }
        let top = self.stack.as_mut_ptr_range().end.cast::<c_void>();
        let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
        // SAFETY: `top` is the 16-byte aligned end of a stack that nothing else uses, since CLONE_VFORK suspends this
        // thread until the child has executed or exited. `child` and all it points to outlive that. All signals are
        // blocked, so no handler runs on the borrowed memory. `run_child` keeps to the rules of the module.
        let pid = unsafe { libc::clone(run_child, top, flags, ptr::from_mut(&mut child).cast()) };
        // SAFETY: `child` is alive; the child may have written it through the pointer behind the compiler's back.
        let failed = unsafe { ptr::read_volatile(&raw const child.failed) };
        if pid < 0 {
            return Err(Failed {
                stage: Stage::Clone,
                errno: errno(),
                candidate: 0,
            });
        }
        match failed {
            None => Ok(pid),
            Some(failed) => {
                // SAFETY: plain system call; a null status is allowed.
                unsafe { libc::waitpid(pid, ptr::null_mut(), 0) };
                Err(failed)
            }
        }
    }
}

fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// Runs in the child.
extern "C" fn run_child(argument: *mut c_void) -> c_int {
    // SAFETY: `spawn` passes a `Child` that outlives the call, and is suspended, so nobody else uses it.
    let child = unsafe { &mut *argument.cast::<Child<'_>>() };
    // SAFETY: the caller prepared every pointer of the plan; see the module's rules.
    let Err(failed) = unsafe { become_program(child) };
    // Volatile: the parent reads it after a `clone` that the compiler takes for an ordinary call.
    // SAFETY: as above.
    unsafe { ptr::write_volatile(&raw mut child.failed, Some(failed)) };
    // SAFETY: ends only this child; `_exit` runs no handlers.
    unsafe { libc::_exit(127) }
}

/// # Safety
/// Only in a child of `Spawner::spawn`, with the pointers that it prepared.
unsafe fn become_program(child: &Child<'_>) -> Result<std::convert::Infallible, Failed> {
    let plan = child.plan;
    let check = |stage: Stage, result: libc::c_long| {
        if result < 0 {
            return Err(Failed {
                stage,
                errno: errno(),
                candidate: 0,
            });
        }
        Ok(())
    };
    // SAFETY: all are system calls with plain numbers or with pointers into the plan, which is alive and immutable; the
    // `libc` functions used directly are thin wrappers (one system call, `errno`).
    unsafe {
        check(Stage::Session, libc::syscall(libc::SYS_setsid))?;
        if plan.terminal {
            check(
                Stage::Session,
                libc::syscall(libc::SYS_ioctl, plan.stdio[0], libc::TIOCSCTTY, 0),
            )?;
        }
        for (to, from) in (0..).zip(plan.stdio) {
            check(Stage::Stdio, libc::syscall(libc::SYS_dup3, from, to, 0))?;
        }
        libc::syscall(
            libc::SYS_prlimit64,
            0,
            libc::RLIMIT_NOFILE,
            &raw const plan.open_files,
            ptr::null::<c_void>(),
        );
        if plan.confinement.is_some() {
            // Refused without CAP_SETPCAP: then no_new_privs and the empty sets below are what holds, since with
            // no_new_privs an execve never gains a capability that was not permitted before.
            for capability in 0..64 {
                if libc::syscall(libc::SYS_prctl, libc::PR_CAPBSET_DROP, capability, 0, 0, 0) < 0 {
                    break;
                }
            }
        }
        if child.switch_ids {
            let account = plan.account;
            // A user namespace of one ordinary user forbids it, and maps nobody else to become.
            let grouped = check(
                Stage::Identity,
                libc::syscall(libc::SYS_setgroups, account.groups.len(), account.groups.as_ptr()),
            );
            if !child.stays_itself {
                grouped?;
            }
            check(
                Stage::Identity,
                libc::syscall(libc::SYS_setresgid, account.gid, account.gid, account.gid),
            )?;
            check(
                Stage::Identity,
                libc::syscall(libc::SYS_setresuid, account.uid, account.uid, account.uid),
            )?;
        }
        check(
            Stage::Directory,
            libc::syscall(libc::SYS_chdir, plan.directory.as_ptr()),
        )?;
        if plan.confinement.is_some() {
            check(
                Stage::Confine,
                libc::syscall(
                    libc::SYS_prctl,
                    libc::PR_CAP_AMBIENT,
                    libc::PR_CAP_AMBIENT_CLEAR_ALL,
                    0,
                    0,
                    0,
                ),
            )?;
            const CAPABILITY_VERSION_3: u32 = 0x2008_0522;
            let header = [CAPABILITY_VERSION_3, 0];
            let none = [0u32; 6];
            check(
                Stage::Confine,
                libc::syscall(libc::SYS_capset, header.as_ptr(), none.as_ptr()),
            )?;
            check(
                Stage::Confine,
                libc::syscall(libc::SYS_prctl, libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
            )?;
        }
        let no_signals = 0u64;
        check(
            Stage::Session,
            libc::syscall(
                libc::SYS_rt_sigprocmask,
                libc::SIG_SETMASK,
                &raw const no_signals,
                ptr::null::<c_void>(),
                size_of::<u64>(),
            ),
        )?;
        if let Some(Confinement { filter }) = plan.confinement
            && !filter.is_empty()
        {
            let program = libc::sock_fprog {
                len: filter.len() as u16, // checked when it was loaded
                filter: filter.as_ptr().cast_mut(),
            };
            check(
                Stage::Confine,
                libc::syscall(
                    libc::SYS_prctl,
                    libc::PR_SET_SECCOMP,
                    libc::SECCOMP_MODE_FILTER,
                    &raw const program,
                    0,
                    0,
                ),
            )?;
        }
        // As execvp does: a candidate that may not be executed is remembered, a missing one is not.
        let mut failed = Failed {
            stage: Stage::Execute,
            errno: libc::ENOENT,
            candidate: 0,
        };
        for (index, candidate) in plan.candidates.iter().enumerate() {
            libc::syscall(libc::SYS_execve, candidate.as_ptr(), child.argv, child.env);
            let errno = errno();
            if errno == libc::ENOENT || errno == libc::ENOTDIR {
                continue;
            }
            failed = Failed {
                stage: Stage::Execute,
                errno,
                candidate: index,
            };
            if errno != libc::EACCES {
                break;
            }
        }
        Err(failed)
    }
}
