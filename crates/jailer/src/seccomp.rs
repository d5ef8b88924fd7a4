//! The jail's system call filter: an allow-list, for the agent and everything it starts.
//!
//! It allows what ordinary programs do ([`ORDINARY`]), and looks at the arguments where those decide. Refusals:
//! - `EPERM` for what exists and is not for the jail;
//! - `ENOSYS` for what programs try first and do without (`clone3`, `io_uring`) and for calls younger than this table, so
//!   that C libraries fall back as they would on an older kernel;
//! - success without effect for setting the core dump limit, which has to stay at 1 (see `inside`), and for setting groups
//!   in the jail of an ordinary user, where the kernel allows it to nobody and there is only one group.

use atoll_confine::seccomp::{self, EAFNOSUPPORT, ENOSYS, EPERM, ORDINARY, RLIMIT_CORE, Verdict};
use libc::{c_long, sock_filter};

use crate::spec::Ids;

/// Every CLONE_NEW* flag that `clone` takes.
const NAMESPACES: u32 = 0x7E02_0000;
/// Faking input on a terminal that one was lent (TIOCSTI), and the console's own tricks (TIOCLINUX).
const TERMINAL_INJECTION: &[u32] = &[0x5412, 0x541C];
/// Docker's: Linux, 32 bit, and either with an old release number; asking. Not those that weaken address layout.
const PERSONALITIES: &[u32] = &[0x0, 0x8, 0x2_0000, 0x2_0008, 0xffff_ffff];
const FAMILIES: &[u32] = &[libc::AF_UNIX as u32, libc::AF_INET as u32, libc::AF_INET6 as u32];
/// The one family of which programs make pairs.
const PAIRS: &[u32] = &[libc::AF_UNIX as u32];
/// NETLINK_ROUTE and NETLINK_SOCK_DIAG.
const NETLINK_PROTOCOLS: &[u32] = &[0, 4];

/// Refused with `ENOSYS` so that callers fall back.
const ABSENT: &[c_long] = &[
    libc::SYS_clone3,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
];

/// The filter, ready to be loaded.
pub fn program(ids: Ids) -> Vec<sock_filter> {
    seccomp::program(|call| verdict(call, ids))
}

fn verdict(call: c_long, ids: Ids) -> Verdict {
    match call {
        libc::SYS_setgroups if ids == Ids::Own => Verdict::Errno(0),
        libc::SYS_clone => Verdict::UnlessBits {
            argument: 0,
            bits: NAMESPACES,
        },
        libc::SYS_socket => Verdict::Socket {
            families: FAMILIES,
            netlink: NETLINK_PROTOCOLS,
        },
        // The kernel makes both sockets, and loads their family's module, before it asks whether they can be a pair.
        libc::SYS_socketpair => Verdict::OneOf {
            argument: 0,
            values: PAIRS,
            errno: EAFNOSUPPORT,
        },
        libc::SYS_ioctl => Verdict::NoneOf {
            argument: 1,
            values: TERMINAL_INJECTION,
            errno: EPERM,
        },
        libc::SYS_personality => Verdict::OneOf {
            argument: 0,
            values: PERSONALITIES,
            errno: EPERM,
        },
        libc::SYS_setrlimit => Verdict::NoneOf {
            argument: 0,
            values: &[RLIMIT_CORE],
            errno: 0,
        },
        libc::SYS_prlimit64 => Verdict::CoreLimit,
        call if ABSENT.contains(&call) => Verdict::Errno(ENOSYS),
        call if ORDINARY.contains(&call) => Verdict::Allow,
        _ => Verdict::Errno(EPERM),
    }
}

#[cfg(test)]
mod tests {
    use atoll_confine::seccomp::{
        AUDIT_ARCH_X86_64, SECCOMP_RET_ALLOW, SECCOMP_RET_KILL_PROCESS, YOUNGEST, errno, simulate,
    };

    use super::*;

    const RANGE: Ids = Ids::Range { base: 1 << 28 };

    fn run(program: &[sock_filter], arch: u32, call: i64, arguments: [u64; 6]) -> u32 {
        simulate(program, arch, call, arguments).unwrap()
    }

    fn check(call: c_long, arguments: &[u64], expected: u32) {
        let mut six = [0; 6];
        six[..arguments.len()].copy_from_slice(arguments);
        let got = run(&program(RANGE), AUDIT_ARCH_X86_64, call, six);
        assert_eq!(got, expected, "call {call} with {arguments:x?}: {got:#x}");
    }

    const ALLOW: u32 = SECCOMP_RET_ALLOW;

    #[test]
    fn every_number_gets_the_verdict_of_the_table() {
        let program = program(RANGE);
        assert!(
            program.len() < 4096,
            "the kernel takes no longer program: {}",
            program.len()
        );
        for call in 0..=1023 {
            let expected = match verdict(call, RANGE) {
                _ if call > YOUNGEST => errno(ENOSYS),
                Verdict::Allow => ALLOW,
                Verdict::Errno(code) => errno(code),
                _ => continue,
            };
            assert_eq!(
                run(&program, AUDIT_ARCH_X86_64, call, [0; 6]),
                expected,
                "call {call}"
            );
        }
    }

    #[test]
    fn what_reaches_the_kernel_itself_is_refused() {
        for call in [
            libc::SYS_mount,
            libc::SYS_umount2,
            libc::SYS_pivot_root,
            libc::SYS_move_mount,
            libc::SYS_open_tree,
            libc::SYS_fsopen,
            libc::SYS_fsmount,
            libc::SYS_fsconfig,
            libc::SYS_fspick,
            libc::SYS_mount_setattr,
            libc::SYS_unshare,
            libc::SYS_setns,
            libc::SYS_chroot,
            libc::SYS_modify_ldt,
            libc::SYS_bpf,
            libc::SYS_perf_event_open,
            libc::SYS_userfaultfd,
            libc::SYS_keyctl,
            libc::SYS_add_key,
            libc::SYS_request_key,
            libc::SYS_kexec_load,
            libc::SYS_kexec_file_load,
            libc::SYS_init_module,
            libc::SYS_finit_module,
            libc::SYS_delete_module,
            libc::SYS_open_by_handle_at,
            libc::SYS_acct,
            libc::SYS_swapon,
            libc::SYS_swapoff,
            libc::SYS_reboot,
            libc::SYS_iopl,
            libc::SYS_ioperm,
            libc::SYS_settimeofday,
            libc::SYS_clock_settime,
            libc::SYS_syslog,
            libc::SYS_quotactl,
            libc::SYS_lookup_dcookie,
            libc::SYS_fanotify_init,
            libc::SYS_vhangup,
            libc::SYS_move_pages,
            libc::SYS_migrate_pages,
            libc::SYS_nfsservctl,
            libc::SYS_uselib,
            libc::SYS_sysfs,
        ] {
            check(call, &[], errno(EPERM));
        }
        check(libc::SYS_clone3, &[], errno(ENOSYS));
        check(libc::SYS_io_uring_setup, &[], errno(ENOSYS));
    }

    #[test]
    fn arguments_decide_where_the_number_does_not() {
        check(
            libc::SYS_clone,
            &[(libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD) as u64],
            ALLOW,
        );
        for flag in [
            libc::CLONE_NEWNS,
            libc::CLONE_NEWCGROUP,
            libc::CLONE_NEWUTS,
            libc::CLONE_NEWIPC,
            libc::CLONE_NEWUSER,
            libc::CLONE_NEWPID,
            libc::CLONE_NEWNET,
        ] {
            check(libc::SYS_clone, &[(flag | libc::SIGCHLD) as u64], errno(EPERM));
        }
        check(libc::SYS_ioctl, &[0, libc::TCGETS], ALLOW);
        check(libc::SYS_ioctl, &[0, libc::TIOCSTI], errno(EPERM));
        // The kernel looks at 32 bits of the request, so 32 bits must be looked at here.
        check(libc::SYS_ioctl, &[0, libc::TIOCSTI | 1 << 32], errno(EPERM));
        check(libc::SYS_personality, &[0xffff_ffff], ALLOW);
        check(libc::SYS_personality, &[0x004_0000], errno(EPERM));
    }

    #[test]
    fn sockets_are_of_known_families() {
        for family in [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6] {
            check(libc::SYS_socket, &[family as u64, 1, 0], ALLOW);
        }
        for family in [
            libc::AF_PACKET,
            libc::AF_VSOCK,
            libc::AF_ALG,
            libc::AF_XDP,
            libc::AF_TIPC,
            libc::AF_KEY,
        ] {
            check(libc::SYS_socket, &[family as u64, 1, 0], errno(EAFNOSUPPORT));
            check(libc::SYS_socketpair, &[family as u64, 1, 0], errno(EAFNOSUPPORT));
        }
        check(libc::SYS_socketpair, &[libc::AF_UNIX as u64, 1, 0], ALLOW);
        for family in [libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK, libc::AF_CAN] {
            check(libc::SYS_socketpair, &[family as u64, 1, 0], errno(EAFNOSUPPORT));
        }
        for (protocol, expected) in [
            (0, ALLOW),
            (4, ALLOW),
            (9, errno(EAFNOSUPPORT)),
            (12, errno(EAFNOSUPPORT)),
        ] {
            check(
                libc::SYS_socket,
                &[libc::AF_NETLINK as u64, 3, protocol],
                expected,
            );
        }
    }

    #[test]
    fn the_core_limit_stays() {
        let (core, files) = (4, 7);
        check(libc::SYS_setrlimit, &[core, 1], errno(0));
        check(libc::SYS_setrlimit, &[files, 1], ALLOW);
        check(libc::SYS_prlimit64, &[0, files, 1], ALLOW);
        check(libc::SYS_prlimit64, &[0, core, 0], ALLOW);
        for pointer in [1, 1 << 32, 0x7fff_0000_1000] {
            check(libc::SYS_prlimit64, &[0, core, pointer], errno(0));
        }
    }

    #[test]
    fn an_ordinary_users_jail_has_one_group() {
        check(libc::SYS_setgroups, &[], ALLOW);
        assert_eq!(
            run(&program(Ids::Own), AUDIT_ARCH_X86_64, libc::SYS_setgroups, [0; 6]),
            errno(0)
        );
    }

    #[test]
    fn another_architecture_is_not_interpreted() {
        const I386: u32 = 0x4000_0003;
        assert_eq!(run(&program(RANGE), I386, 1, [0; 6]), SECCOMP_RET_KILL_PROCESS);
        // x32: the same architecture, other numbers.
        check(0x4000_0000 | libc::SYS_execve, &[], errno(ENOSYS));
        check(-1, &[], errno(ENOSYS));
    }
}
