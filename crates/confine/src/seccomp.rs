//! A compiler of system call filters, and the table of calls that ordinary programs make.
//!
//! The program is a binary search over the call's number rather than the chain that most compilers emit: 10 comparisons
//! instead of up to 300, for the kernel's checker at load time as well as for each call.

use libc::{c_long, sock_filter};

/// What happens to a call, or on what it depends. Arguments are looked at by their low word, which is all that the kernel
/// looks at in those that are decided on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    Allow,
    Errno(u16),
    /// Allowed unless the argument has one of these bits; else `EPERM`.
    UnlessBits {
        argument: u8,
        bits: u32,
    },
    /// Allowed if the argument has all of these bits; else `EPERM`.
    WithBits {
        argument: u8,
        bits: u32,
    },
    /// Allowed if the argument is this; else `EPERM`.
    Is {
        argument: u8,
        value: u32,
    },
    /// Allowed if the argument is one of these; else the errno.
    OneOf {
        argument: u8,
        values: &'static [u32],
        errno: u16,
    },
    /// The errno if the argument is one of these; else allowed.
    NoneOf {
        argument: u8,
        values: &'static [u32],
        errno: u16,
    },
    /// A socket of one of these families, or of netlink with one of these protocols; else `EAFNOSUPPORT`.
    Socket {
        families: &'static [u32],
        netlink: &'static [u32],
    },
    /// A pair of sockets of this family and one of these types; else `EAFNOSUPPORT`.
    Pair {
        family: u32,
        types: &'static [u32],
    },
    /// `prlimit64` that sets the core limit pretends.
    CoreLimit,
}

pub const EPERM: u16 = libc::EPERM as u16;
pub const ENOSYS: u16 = libc::ENOSYS as u16;
pub const EAFNOSUPPORT: u16 = libc::EAFNOSUPPORT as u16;
pub const RLIMIT_CORE: u32 = 4; // of another type in each libc

/// The youngest call that these tables were made with (`file_setattr`, Linux 6.17). Beyond it nothing is known, and callers
/// are told that there is nothing (`ENOSYS`), so that they fall back as they would on an older kernel.
pub const YOUNGEST: c_long = 469;

/// What programs do that have no power over the machine: what Docker and Podman allow a container without capabilities,
/// minus what only opens the kernel further (`io_uring`, user namespaces, keyrings, `userfaultfd`). Calls whose arguments
/// decide (`clone`, `socket`, `socketpair`, `ioctl`, `personality`, `setrlimit`, `prlimit64`) are not in it.
#[rustfmt::skip]
pub const ORDINARY: &[c_long] = {
    use libc::*;
    &[
        // files
        SYS_read, SYS_write, SYS_open, SYS_close, SYS_stat, SYS_fstat, SYS_lstat, SYS_lseek, SYS_pread64, SYS_pwrite64,
        SYS_readv, SYS_writev, SYS_preadv, SYS_pwritev, SYS_preadv2, SYS_pwritev2, SYS_access, SYS_faccessat,
        SYS_faccessat2, SYS_openat, SYS_openat2, SYS_creat, SYS_close_range, SYS_dup, SYS_dup2, SYS_dup3, SYS_fcntl,
        SYS_flock, SYS_fsync, SYS_fdatasync, SYS_sync, SYS_syncfs, SYS_sync_file_range, SYS_truncate, SYS_ftruncate,
        SYS_fallocate, SYS_fadvise64, SYS_readahead, SYS_getdents, SYS_getdents64, SYS_getcwd, SYS_chdir, SYS_fchdir,
        SYS_rename, SYS_renameat, SYS_renameat2, SYS_mkdir, SYS_mkdirat, SYS_rmdir, SYS_link, SYS_linkat, SYS_unlink,
        SYS_unlinkat, SYS_symlink, SYS_symlinkat, SYS_readlink, SYS_readlinkat, SYS_chmod, SYS_fchmod, SYS_fchmodat,
        SYS_chown, SYS_fchown, SYS_lchown, SYS_fchownat, SYS_umask, SYS_mknod, SYS_mknodat, SYS_utime, SYS_utimes,
        SYS_utimensat, SYS_futimesat, SYS_statfs, SYS_fstatfs, SYS_ustat, SYS_statx, SYS_newfstatat,
        SYS_setxattr, SYS_lsetxattr, SYS_fsetxattr, SYS_getxattr, SYS_lgetxattr, SYS_fgetxattr, SYS_listxattr,
        SYS_llistxattr, SYS_flistxattr, SYS_removexattr, SYS_lremovexattr, SYS_fremovexattr,
        SYS_sendfile, SYS_splice, SYS_tee, SYS_vmsplice, SYS_copy_file_range, SYS_pipe, SYS_pipe2,
        SYS_name_to_handle_at, SYS_io_setup, SYS_io_destroy, SYS_io_getevents, SYS_io_submit, SYS_io_cancel,
        SYS_inotify_init, SYS_inotify_init1, SYS_inotify_add_watch, SYS_inotify_rm_watch,
        452 /* fchmodat2 */, 451 /* cachestat */,
        463, 464, 465, 466 /* setxattrat, getxattrat, listxattrat, removexattrat */,
        468, 469 /* file_getattr, file_setattr */,
        // waiting
        SYS_poll, SYS_ppoll, SYS_select, SYS_pselect6, SYS_epoll_create, SYS_epoll_create1, SYS_epoll_ctl,
        SYS_epoll_ctl_old, SYS_epoll_wait, SYS_epoll_wait_old, SYS_epoll_pwait, SYS_epoll_pwait2, SYS_eventfd,
        SYS_eventfd2, SYS_signalfd, SYS_signalfd4, SYS_timerfd_create, SYS_timerfd_settime, SYS_timerfd_gettime,
        SYS_nanosleep, SYS_clock_nanosleep, SYS_pause, SYS_alarm, SYS_getitimer, SYS_setitimer,
        // memory
        SYS_brk, SYS_mmap, SYS_munmap, SYS_mremap, SYS_mprotect, SYS_madvise, SYS_mincore, SYS_msync, SYS_mlock,
        SYS_mlock2, SYS_munlock, SYS_mlockall, SYS_munlockall, SYS_memfd_create, 447 /* memfd_secret */,
        SYS_membarrier, SYS_remap_file_pages, SYS_pkey_alloc, SYS_pkey_free, SYS_pkey_mprotect, SYS_process_madvise,
        SYS_process_mrelease, 453 /* map_shadow_stack */, 462 /* mseal */, SYS_get_mempolicy, SYS_set_mempolicy,
        SYS_mbind,
        // processes and threads
        SYS_fork, SYS_vfork, SYS_execve, SYS_execveat, SYS_exit, SYS_exit_group, SYS_wait4, SYS_waitid, SYS_kill,
        SYS_tkill, SYS_tgkill, SYS_pidfd_open, SYS_pidfd_send_signal, SYS_pidfd_getfd, SYS_gettid, SYS_getpid,
        SYS_getppid, SYS_getpgid, SYS_getpgrp, SYS_setpgid, SYS_getsid, SYS_setsid, SYS_prctl, SYS_arch_prctl,
        SYS_set_tid_address, SYS_set_robust_list, SYS_get_robust_list, SYS_rseq, SYS_futex, SYS_futex_waitv,
        454, 455, 456 /* futex_wake, futex_wait, futex_requeue */, SYS_restart_syscall, SYS_ptrace, SYS_kcmp,
        SYS_process_vm_readv, SYS_process_vm_writev, SYS_seccomp, SYS_landlock_create_ruleset, SYS_landlock_add_rule,
        SYS_landlock_restrict_self, SYS_set_thread_area, SYS_get_thread_area,
        SYS_sched_yield, SYS_sched_getaffinity, SYS_sched_setaffinity, SYS_sched_getparam, SYS_sched_setparam,
        SYS_sched_getscheduler, SYS_sched_setscheduler, SYS_sched_get_priority_max, SYS_sched_get_priority_min,
        SYS_sched_rr_get_interval, SYS_sched_getattr, SYS_sched_setattr, SYS_getcpu, SYS_getpriority, SYS_setpriority,
        SYS_ioprio_get, SYS_ioprio_set, SYS_getrlimit, SYS_getrusage, SYS_times,
        // signals
        SYS_rt_sigaction, SYS_rt_sigprocmask, SYS_rt_sigpending, SYS_rt_sigqueueinfo, SYS_rt_sigreturn,
        SYS_rt_sigsuspend, SYS_rt_sigtimedwait, SYS_rt_tgsigqueueinfo, SYS_sigaltstack,
        // identity; the kernel decides, by capabilities that the user's processes do not have
        SYS_getuid, SYS_geteuid, SYS_getgid, SYS_getegid, SYS_getresuid, SYS_getresgid, SYS_getgroups, SYS_setuid,
        SYS_setgid, SYS_setreuid, SYS_setregid, SYS_setresuid, SYS_setresgid, SYS_setgroups, SYS_setfsuid,
        SYS_setfsgid, SYS_capget, SYS_capset, SYS_sethostname, SYS_setdomainname,
        // sockets
        SYS_bind, SYS_connect, SYS_listen, SYS_accept, SYS_accept4, SYS_getsockname, SYS_getpeername,
        SYS_getsockopt, SYS_setsockopt, SYS_sendto, SYS_recvfrom, SYS_sendmsg, SYS_recvmsg, SYS_sendmmsg, SYS_recvmmsg,
        SYS_shutdown,
        // System V and POSIX IPC, of the jail's own namespace
        SYS_shmget, SYS_shmat, SYS_shmctl, SYS_shmdt, SYS_semget, SYS_semop, SYS_semctl, SYS_semtimedop, SYS_msgget,
        SYS_msgsnd, SYS_msgrcv, SYS_msgctl, SYS_mq_open, SYS_mq_unlink, SYS_mq_timedsend, SYS_mq_timedreceive,
        SYS_mq_notify, SYS_mq_getsetattr,
        // time and the rest
        SYS_time, SYS_gettimeofday, SYS_clock_gettime, SYS_clock_getres, SYS_timer_create, SYS_timer_settime,
        SYS_timer_gettime, SYS_timer_getoverrun, SYS_timer_delete, SYS_adjtimex, SYS_clock_adjtime, SYS_getrandom,
        SYS_uname, SYS_sysinfo,
    ]
};

/// The filter, ready to be loaded.
pub fn program(verdict: impl Fn(c_long) -> Verdict) -> Vec<sock_filter> {
    let mut program = vec![
        load(ARCH),
        jump(BPF_JEQ, AUDIT_ARCH_X86_64, 1, 0),
        ret(SECCOMP_RET_KILL_PROCESS),
        load(NUMBER),
    ];
    program.extend(search(&ranges(verdict)));
    program
}

/// From this number on, up to the next range's.
type Range = (u32, Verdict);

fn ranges(verdict: impl Fn(c_long) -> Verdict) -> Vec<Range> {
    let mut ranges: Vec<Range> = Vec::new();
    let known = (0..=YOUNGEST).map(|call| (call as u32, verdict(call)));
    // Also all of x32, whose numbers have bit 30 set, and negative ones.
    let unknown = std::iter::once((YOUNGEST as u32 + 1, Verdict::Errno(ENOSYS)));
    for (call, verdict) in known.chain(unknown) {
        if ranges.last().is_none_or(|(_, last)| *last != verdict) {
            ranges.push((call, verdict));
        }
    }
    ranges
}

fn search(ranges: &[Range]) -> Vec<sock_filter> {
    match ranges {
        [] => vec![ret(errno(ENOSYS))],
        [(_, verdict)] => leaf(*verdict),
        _ => {
            let (low, high) = ranges.split_at(ranges.len() / 2);
            let low = search(low);
            // Conditional jumps reach 255 instructions, the unconditional one any number.
            let mut code = vec![jump(BPF_JGE, high[0].0, 0, 1), skip(low.len())];
            code.extend(low);
            code.extend(search(high));
            code
        }
    }
}

fn leaf(verdict: Verdict) -> Vec<sock_filter> {
    match verdict {
        Verdict::Allow => vec![ret(SECCOMP_RET_ALLOW)],
        Verdict::Errno(code) => vec![ret(errno(code))],
        Verdict::UnlessBits { argument: at, bits } => vec![
            load(argument(at)),
            jump(BPF_JSET, bits, 0, 1),
            ret(errno(EPERM)),
            ret(SECCOMP_RET_ALLOW),
        ],
        Verdict::WithBits { argument: at, bits } => {
            let mut code = vec![load(argument(at))];
            for bit in (0..32).map(|bit| 1 << bit).filter(|bit| bits & bit != 0) {
                code.extend([jump(BPF_JSET, bit, 1, 0), ret(errno(EPERM))]);
            }
            code.push(ret(SECCOMP_RET_ALLOW));
            code
        }
        Verdict::Is { argument: at, value } => among(at, &[value], SECCOMP_RET_ALLOW, errno(EPERM)),
        Verdict::OneOf {
            argument: at,
            values,
            errno: code,
        } => among(at, values, SECCOMP_RET_ALLOW, errno(code)),
        Verdict::NoneOf {
            argument: at,
            values,
            errno: code,
        } => among(at, values, errno(code), SECCOMP_RET_ALLOW),
        Verdict::Socket { families, netlink } => {
            let mut code = vec![load(argument(0))];
            for family in families {
                code.extend([jump(BPF_JEQ, *family, 0, 1), ret(SECCOMP_RET_ALLOW)]);
            }
            code.extend([
                jump(BPF_JEQ, libc::AF_NETLINK as u32, 1, 0),
                ret(errno(EAFNOSUPPORT)),
            ]);
            code.extend(among(2, netlink, SECCOMP_RET_ALLOW, errno(EAFNOSUPPORT)));
            code
        }
        Verdict::Pair { family, types } => {
            let mut code = vec![
                load(argument(0)),
                jump(BPF_JEQ, family, 1, 0),
                ret(errno(EAFNOSUPPORT)),
            ];
            code.extend(among(1, types, SECCOMP_RET_ALLOW, errno(EAFNOSUPPORT)));
            code
        }
        Verdict::CoreLimit => vec![
            load(argument(1)),
            jump(BPF_JEQ, RLIMIT_CORE, 1, 0),
            ret(SECCOMP_RET_ALLOW),
            // A null pointer in the third argument only asks.
            load(argument(2)),
            jump(BPF_JEQ, 0, 0, 3),
            load(argument(2) + 4),
            jump(BPF_JEQ, 0, 0, 1),
            ret(SECCOMP_RET_ALLOW),
            ret(errno(0)),
        ],
    }
}

fn among(at: u8, values: &[u32], then: u32, otherwise: u32) -> Vec<sock_filter> {
    let mut code = vec![load(argument(at))];
    for value in values {
        code.extend([jump(BPF_JEQ, *value, 0, 1), ret(then)]);
    }
    code.push(ret(otherwise));
    code
}

// The little of BPF that is needed. Offsets are into `struct seccomp_data`.
const NUMBER: u32 = 0;
const ARCH: u32 = 4;
pub const AUDIT_ARCH_X86_64: u32 = 0xC000_003E;
pub const SECCOMP_RET_ALLOW: u32 = 0x7fff_0000;
const SECCOMP_RET_ERRNO: u32 = 0x0005_0000;
pub const SECCOMP_RET_KILL_PROCESS: u32 = 0x8000_0000;
const BPF_LOAD: u16 = 0x20; // LD | W | ABS
const BPF_RETURN: u16 = 0x06; // RET | K
const BPF_JA: u16 = 0x05;
const BPF_JEQ: u16 = 0x15;
const BPF_JGE: u16 = 0x35;
const BPF_JSET: u16 = 0x45;

/// The low word of an argument; the high one follows.
fn argument(index: u8) -> u32 {
    16 + 8 * u32::from(index)
}

/// What a program returns to refuse with an errno.
pub fn errno(code: u16) -> u32 {
    SECCOMP_RET_ERRNO | u32::from(code)
}

fn load(offset: u32) -> sock_filter {
    sock_filter {
        code: BPF_LOAD,
        jt: 0,
        jf: 0,
        k: offset,
    }
}

fn jump(code: u16, k: u32, jt: u8, jf: u8) -> sock_filter {
    sock_filter { code, jt, jf, k }
}

fn skip(count: usize) -> sock_filter {
    sock_filter {
        code: BPF_JA,
        jt: 0,
        jf: 0,
        k: count as u32,
    }
}

fn ret(value: u32) -> sock_filter {
    sock_filter {
        code: BPF_RETURN,
        jt: 0,
        jf: 0,
        k: value,
    }
}

/// Runs a program as the kernel would, and says what comes out; for tests. `None`: it is no program of ours.
pub fn simulate(program: &[sock_filter], arch: u32, call: c_long, arguments: [u64; 6]) -> Option<u32> {
    let mut data = Vec::new();
    data.extend((call as u32).to_le_bytes());
    data.extend(arch.to_le_bytes());
    data.extend([0; 8]);
    for argument in arguments {
        data.extend(argument.to_le_bytes());
    }
    let (mut at, mut word) = (0, 0);
    loop {
        let step = program.get(at)?;
        at += 1;
        let taken = match step.code {
            BPF_LOAD => {
                let bytes = data.get(step.k as usize..)?.get(..4)?;
                word = u32::from_le_bytes(bytes.try_into().ok()?);
                continue;
            }
            BPF_RETURN => return Some(step.k),
            BPF_JA => {
                at += step.k as usize;
                continue;
            }
            BPF_JEQ => word == step.k,
            BPF_JGE => word >= step.k,
            BPF_JSET => word & step.k != 0,
            _ => return None,
        };
        at += usize::from(if taken { step.jt } else { step.jf });
    }
}
