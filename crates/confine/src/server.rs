//! What the server takes away from itself.
//!
//! ```text
//!   atoll server ── shrink ──┬── fork ──> helper: what needs powers (instances, links, mounts, Debian builds)
//!                            └── front ─> everything that listens, parses and keeps: no powers, few files, no programs
//! ```
//! [`shrink`] is for both, and for every program that the helper starts: what none of them ever needs. [`front`] is for the
//! part that speaks with the world.
//!
//! What must hold:
//! - Each layer says whether it is in force. One that this machine cannot have does not keep the others from being put up;
//!   whether that is enough is for the caller to decide.
//! - The layers do not lean on each other: what the filter refuses, the missing capability or Landlock would mostly refuse
//!   too.

use std::path::PathBuf;

use libc::{c_long, sock_filter};

use crate::capabilities as cap;
use crate::error::{Doing, Result};
use crate::landlock::{self, Rules};
use crate::seccomp::{self, ENOSYS, EPERM, ORDINARY, Verdict};
use crate::sys;

/// One wall, and whether it stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layer {
    pub what: &'static str,
    /// What it does, or why it is not there.
    pub stands: std::result::Result<String, String>,
}

impl Layer {
    fn of(what: &'static str, built: Result<String>) -> Self {
        Self {
            what,
            stands: built.map_err(|error| error.to_string()),
        }
    }
}

/// What the helper, and programs that it starts, may need: to own and read files of others (volumes, layers), to become
/// others (jails, sentries, `mmdebstrap`), to mount, to make network namespaces, links and their BPF programs.
const KEPT: u64 = cap::CHOWN
    | cap::DAC_OVERRIDE
    | cap::DAC_READ_SEARCH
    | cap::FOWNER
    | cap::FSETID
    | cap::KILL
    | cap::SETGID
    | cap::SETUID
    | cap::SETPCAP
    | cap::NET_BIND_SERVICE
    | cap::NET_ADMIN
    | cap::NET_RAW
    | cap::IPC_LOCK
    | cap::SYS_CHROOT
    | cap::SYS_PTRACE
    | cap::SYS_ADMIN
    | cap::SYS_RESOURCE
    | cap::MKNOD
    | cap::SETFCAP
    | cap::BPF;

/// What nothing of this server ever does: changing the kernel, the clock or the machine, opening files by number, watching
/// the whole system, keyrings.
const NEVER: &[c_long] = &[
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_iopl,
    libc::SYS_ioperm,
    libc::SYS_acct,
    libc::SYS_quotactl,
    libc::SYS_open_by_handle_at,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_fanotify_init,
    libc::SYS_syslog,
    libc::SYS_lookup_dcookie,
    libc::SYS_vhangup,
    libc::SYS_nfsservctl,
    libc::SYS_uselib,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_keyctl,
    443, // quotactl_fd
];

/// Programs that try it do without.
const ABSENT: &[c_long] = &[
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
];

/// Takes from this process, and from all that it starts, what no part of the server ever needs.
pub fn shrink() -> Vec<Layer> {
    let powerful = sys::permitted_capabilities().unwrap_or(0);
    sys::leave_session_keyring();
    let capabilities = cap::keep_only(KEPT).map(|()| match powerful {
        0 => "none: an ordinary user has none".to_owned(),
        _ => "none that loads modules, reaches hardware, sets the clock or boots".to_owned(),
    });
    let filter = if powerful & cap::SYS_ADMIN == 0 {
        // It would take `no_new_privs`, which programs that the helper starts (`newuidmap`) cannot live with.
        Err(crate::error::Error::new(
            "an ordinary user's helper starts programs that change their user",
        ))
    } else {
        let program = seccomp::program(shrunk);
        sys::load_filter(&program)
            .doing(|| "loading the system call filter")
            .map(|()| "no modules, no kexec, no clock, no keyrings, no io_uring, no perf".to_owned())
    };
    vec![
        Layer::of("bounding set", capabilities),
        Layer::of("deny-list", filter),
    ]
}

/// What this machine lets a server take from itself; nothing is taken.
pub fn survey() -> Vec<Layer> {
    let filters = sys::prctl(libc::PR_GET_SECCOMP, 0, 0)
        .doing(|| "this kernel has no system call filters")
        .map(|_| "system call filters".to_owned());
    let landlock = landlock::check()
        .map(|abi| format!("Landlock {abi}"))
        .map_err(crate::error::Error::new);
    vec![Layer::of("seccomp", filters), Layer::of("Landlock", landlock)]
}

fn shrunk(call: c_long) -> Verdict {
    match call {
        call if NEVER.contains(&call) => Verdict::Errno(EPERM),
        call if ABSENT.contains(&call) => Verdict::Errno(ENOSYS),
        _ => Verdict::Allow,
    }
}

/// What the front sees of the filesystem. A file, or a directory with all that is below it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct View {
    pub read: Vec<PathBuf>,
    pub change: Vec<PathBuf>,
}

/// Confines the part that speaks with the world. `capabilities` are what it may keep. There must be no other thread.
pub fn front(view: &View, capabilities: u64) -> Vec<Layer> {
    let promise = sys::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0)
        .doing(|| "setting no_new_privs")
        .map(|_| "no program gains anything by being started".to_owned());
    let files = restrict(view);
    let memory = sys::prctl(libc::PR_SET_DUMPABLE, 0, 0)
        .doing(|| "closing the memory to others")
        .map(|_| "nobody without power over this process reads it".to_owned());
    let kept = cap::keep_only(capabilities).map(|()| match capabilities {
        0 => "none".to_owned(),
        _ => "none but binding ports below 1024".to_owned(),
    });
    let own = std::process::id();
    let filter = sys::load_filter(&front_filter(own))
        .doing(|| "loading the system call filter")
        .map(|()| "starts no program, makes no unix or raw socket, signals nobody else".to_owned());
    vec![
        Layer::of("no_new_privs", promise),
        Layer::of("Landlock", files),
        Layer::of("memory", memory),
        Layer::of("capabilities", kept),
        Layer::of("seccomp", filter),
    ]
}

fn restrict(view: &View) -> Result<String> {
    let rules = Rules::new()?;
    for path in &view.read {
        rules.allow_if_there(path, landlock::READ)?;
    }
    for path in &view.change {
        rules.allow_if_there(path, landlock::CHANGE)?;
    }
    rules.enforce()?;
    Ok(format!(
        "sees {} places and changes {} of them",
        view.read.len() + view.change.len(),
        view.change.len()
    ))
}

/// Ordinary, and yet not for a server that only serves: starting programs, tracing, signalling, becoming others, making
/// nodes, IPC of the whole machine, priorities.
#[rustfmt::skip]
const NOT_FOR_THE_FRONT: &[c_long] = {
    use libc::*;
    &[
        SYS_fork, SYS_vfork, SYS_execve, SYS_execveat, SYS_ptrace, SYS_process_vm_readv, SYS_process_vm_writev,
        SYS_pidfd_getfd, SYS_kcmp, SYS_pidfd_send_signal, SYS_tkill, SYS_rt_sigqueueinfo, SYS_rt_tgsigqueueinfo,
        SYS_process_madvise, SYS_process_mrelease, SYS_mknod, SYS_mknodat, SYS_setuid, SYS_setgid, SYS_setreuid,
        SYS_setregid, SYS_setresuid, SYS_setresgid, SYS_setgroups, SYS_setfsuid, SYS_setfsgid, SYS_capset,
        SYS_sethostname, SYS_setdomainname, SYS_setpgid, SYS_setsid, SYS_shmget, SYS_shmat, SYS_shmctl, SYS_shmdt,
        SYS_semget, SYS_semop, SYS_semctl, SYS_semtimedop, SYS_msgget, SYS_msgsnd, SYS_msgrcv, SYS_msgctl,
        SYS_mq_open, SYS_mq_unlink, SYS_mq_timedsend, SYS_mq_timedreceive, SYS_mq_notify, SYS_mq_getsetattr,
        SYS_io_setup, SYS_io_destroy, SYS_io_getevents, SYS_io_submit, SYS_io_cancel, SYS_name_to_handle_at,
        SYS_adjtimex, SYS_clock_adjtime, SYS_sched_setparam, SYS_sched_setscheduler, SYS_sched_setattr,
        SYS_setpriority, SYS_ioprio_set, SYS_set_thread_area, SYS_get_thread_area, SYS_remap_file_pages,
        447 /* memfd_secret */,
    ]
};

const FRONT_FAMILIES: &[u32] = &[libc::AF_INET as u32, libc::AF_INET6 as u32];
/// NETLINK_ROUTE: which addresses are the host's own.
const FRONT_NETLINK: &[u32] = &[0];
/// A stream that is connected stays so; a datagram socket of a pair could be pointed at any other.
const STREAMS: &[u32] = &{
    const STREAM: u32 = libc::SOCK_STREAM as u32;
    const CLOEXEC: u32 = libc::SOCK_CLOEXEC as u32;
    const NONBLOCK: u32 = libc::SOCK_NONBLOCK as u32;
    [
        STREAM,
        STREAM | CLOEXEC,
        STREAM | NONBLOCK,
        STREAM | CLOEXEC | NONBLOCK,
    ]
};
/// TIOCSTI and TIOCLINUX.
const TERMINAL_INJECTION: &[u32] = &[0x5412, 0x541C];

/// The front's filter, an allow-list. `own` is its pid.
pub fn front_filter(own: u32) -> Vec<sock_filter> {
    seccomp::program(|call| allowed_to_front(call, own))
}

fn allowed_to_front(call: c_long, own: u32) -> Verdict {
    match call {
        libc::SYS_clone => Verdict::WithBits {
            argument: 0,
            bits: (libc::CLONE_VM | libc::CLONE_THREAD) as u32,
        },
        libc::SYS_clone3 => Verdict::Errno(ENOSYS),
        libc::SYS_kill | libc::SYS_tgkill => Verdict::Is {
            argument: 0,
            value: own,
        },
        libc::SYS_socket => Verdict::Socket {
            families: FRONT_FAMILIES,
            netlink: FRONT_NETLINK,
        },
        libc::SYS_socketpair => Verdict::Pair {
            family: libc::AF_UNIX as u32,
            types: STREAMS,
        },
        libc::SYS_ioctl => Verdict::NoneOf {
            argument: 1,
            values: TERMINAL_INJECTION,
            errno: EPERM,
        },
        libc::SYS_setrlimit | libc::SYS_prlimit64 => Verdict::Allow,
        call if NOT_FOR_THE_FRONT.contains(&call) => Verdict::Errno(EPERM),
        call if ABSENT.contains(&call) => Verdict::Errno(ENOSYS),
        call if ORDINARY.contains(&call) => Verdict::Allow,
        _ => Verdict::Errno(EPERM),
    }
}

#[cfg(test)]
mod tests {
    use crate::seccomp::{AUDIT_ARCH_X86_64, EAFNOSUPPORT, SECCOMP_RET_ALLOW, errno, simulate};

    use super::*;

    fn run(program: &[sock_filter], call: c_long, arguments: &[u64]) -> u32 {
        let mut six = [0; 6];
        six[..arguments.len()].copy_from_slice(arguments);
        simulate(program, AUDIT_ARCH_X86_64, call, six).unwrap()
    }

    #[test]
    fn the_front_starts_traces_and_mounts_nothing() {
        let filter = front_filter(7);
        assert!(filter.len() < 4096, "the kernel takes no longer program");
        for call in [
            libc::SYS_execve,
            libc::SYS_execveat,
            libc::SYS_fork,
            libc::SYS_vfork,
            libc::SYS_ptrace,
            libc::SYS_process_vm_readv,
            libc::SYS_mount,
            libc::SYS_umount2,
            libc::SYS_move_mount,
            libc::SYS_open_tree,
            libc::SYS_fsopen,
            libc::SYS_pivot_root,
            libc::SYS_chroot,
            libc::SYS_setns,
            libc::SYS_unshare,
            libc::SYS_bpf,
            libc::SYS_init_module,
            libc::SYS_kexec_load,
            libc::SYS_mknodat,
            libc::SYS_setuid,
            libc::SYS_pidfd_getfd,
            libc::SYS_pidfd_send_signal,
            libc::SYS_open_by_handle_at,
            libc::SYS_perf_event_open,
            libc::SYS_userfaultfd,
            libc::SYS_keyctl,
        ] {
            assert_eq!(run(&filter, call, &[]), errno(EPERM), "call {call}");
        }
        assert_eq!(run(&filter, libc::SYS_io_uring_setup, &[]), errno(ENOSYS));
    }

    #[test]
    fn the_front_makes_threads_and_no_processes() {
        let filter = front_filter(7);
        // What glibc and musl ask for.
        for thread in [0x003d_0f00, 0x007d_0f00] {
            assert_eq!(run(&filter, libc::SYS_clone, &[thread]), SECCOMP_RET_ALLOW);
        }
        let (vm, vfork, chld) = (libc::CLONE_VM, libc::CLONE_VFORK, libc::SIGCHLD);
        for process in [chld, vm | vfork | chld, libc::CLONE_THREAD] {
            assert_eq!(
                run(&filter, libc::SYS_clone, &[process as u64]),
                errno(EPERM),
                "{process:x}"
            );
        }
        assert_eq!(run(&filter, libc::SYS_clone3, &[]), errno(ENOSYS));
    }

    #[test]
    fn the_front_signals_itself_only() {
        let filter = front_filter(7);
        for call in [libc::SYS_kill, libc::SYS_tgkill] {
            assert_eq!(run(&filter, call, &[7, 6]), SECCOMP_RET_ALLOW);
            for other in [0, 1, 8, u64::MAX, (-7_i64).cast_unsigned()] {
                assert_eq!(run(&filter, call, &[other, 9]), errno(EPERM), "{other:x}");
            }
        }
    }

    #[test]
    fn the_front_has_sockets_of_the_internet_and_streams_to_itself() {
        let filter = front_filter(7);
        let socket = |family: i32, kind: i32, protocol: u64| {
            run(&filter, libc::SYS_socket, &[family as u64, kind as u64, protocol])
        };
        for family in [libc::AF_INET, libc::AF_INET6] {
            assert_eq!(socket(family, libc::SOCK_STREAM, 0), SECCOMP_RET_ALLOW);
        }
        assert_eq!(socket(libc::AF_NETLINK, libc::SOCK_RAW, 0), SECCOMP_RET_ALLOW);
        for (family, protocol) in [
            (libc::AF_UNIX, 0),
            (libc::AF_PACKET, 0),
            (libc::AF_ALG, 0),
            (libc::AF_VSOCK, 0),
            (libc::AF_NETLINK, 12),
            (libc::AF_NETLINK, 9),
        ] {
            let refused = socket(family, libc::SOCK_STREAM, protocol);
            assert_eq!(refused, errno(EAFNOSUPPORT), "{family} {protocol}");
        }
        let pair = |family: i32, kind: i32| run(&filter, libc::SYS_socketpair, &[family as u64, kind as u64]);
        let stream = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        assert_eq!(pair(libc::AF_UNIX, stream), SECCOMP_RET_ALLOW);
        assert_eq!(pair(libc::AF_UNIX, libc::SOCK_DGRAM), errno(EAFNOSUPPORT));
        assert_eq!(pair(libc::AF_INET, stream), errno(EAFNOSUPPORT));
    }

    #[test]
    fn what_is_taken_from_all_is_not_needed_to_build_a_sandbox() {
        let filter = seccomp::program(shrunk);
        for call in [
            libc::SYS_clone3,
            libc::SYS_clone,
            libc::SYS_unshare,
            libc::SYS_setns,
            libc::SYS_mount,
            libc::SYS_pivot_root,
            libc::SYS_fsopen,
            libc::SYS_ptrace,
            libc::SYS_bpf,
            libc::SYS_seccomp,
            libc::SYS_execve,
        ] {
            assert_eq!(run(&filter, call, &[]), SECCOMP_RET_ALLOW, "call {call}");
        }
        for call in [
            libc::SYS_init_module,
            libc::SYS_kexec_load,
            libc::SYS_settimeofday,
        ] {
            assert_eq!(run(&filter, call, &[]), errno(EPERM), "call {call}");
        }
        assert_eq!(
            KEPT & (1 << 16 | 1 << 17 | 1 << 22 | 1 << 25),
            0,
            "modules, raw I/O, boot, time"
        );
    }
}
