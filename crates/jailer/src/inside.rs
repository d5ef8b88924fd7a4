//! The process that becomes the agent: PID 1 of the jail.
//!
//! ```text
//!   clone'd ──> own net, ipc, uts, cgroup namespaces ── ready ──> (outside builds the tree) ── go ──>
//!   uid 0 of the range, no groups ──> no_new_privs ──> Landlock ──> few capabilities ──> seccomp ──> execve
//! ```
//! The agent keeps what it needs to serve a jail with several users (switching ids, files of others, the host name). What
//! it starts for the user has no capability at all; seccomp, Landlock and no_new_privs they share.

use std::os::fd::{AsFd, OwnedFd};

use atoll_confine::{capabilities, sys as confine};
use rustix::thread::UnshareFlags;

use crate::error::{Doing, Result};
use crate::spec::{Ids, Spec};
use crate::{landlock, seccomp, sys, tree};

/// CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID, SETPCAP; SYS_ADMIN for `sethostname` and no more: over the
/// mount namespace it has no say, and seccomp refuses the rest. All of them count within the jail's user namespace only.
const AGENT_CAPABILITIES: u64 = 0b1_1111_1011 | 1 << 21;

/// What the agent will have as 0, 1 and 2.
#[derive(Debug)]
pub(crate) struct Stdio {
    pub(crate) input: OwnedFd,
    pub(crate) output: OwnedFd,
    pub(crate) log: OwnedFd,
}

/// First half: while the outside builds the tree.
pub(crate) fn prepare(spec: &Spec) -> Result<()> {
    let namespaces = UnshareFlags::NEWIPC | UnshareFlags::NEWUTS | UnshareFlags::NEWCGROUP;
    sys::unshare(namespaces).doing(|| "leaving the host's IPC, host name and cgroup namespaces")?;
    if spec.network.is_none() {
        sys::unshare(UnshareFlags::NEWNET).doing(|| "leaving the host's network namespace")?;
        sys::raise_loopback().doing(|| "bringing up the loopback interface")?;
        // No capability inside means that nobody could bind port 80; in a namespace of one's own it is harmless. A kernel
        // without this setting refuses the programs that want it, nothing else.
        let _ = std::fs::write("/proc/sys/net/ipv4/ip_unprivileged_port_start", "0");
    }
    rustix::system::sethostname(spec.hostname.as_bytes())
        .doing(|| format!("setting the host name {}", spec.hostname))
}

/// Second half: the tree is the root. Returns only on failure.
pub(crate) fn become_agent(spec: &Spec, stdio: &Stdio) -> Result<std::convert::Infallible> {
    rustix::process::chdir("/").doing(|| "entering the root")?;
    let (uid, gid) = (rustix::process::Uid::ROOT, rustix::process::Gid::ROOT);
    if let Ids::Range { .. } = spec.ids {
        rustix::thread::set_thread_groups(&[]).doing(|| "leaving the host's groups")?;
    }
    rustix::thread::set_thread_res_gid(gid, gid, gid).doing(|| "becoming group 0 of the jail")?;
    rustix::thread::set_thread_res_uid(uid, uid, uid).doing(|| "becoming user 0 of the jail")?;
    rustix::process::setsid().doing(|| "starting a session")?;
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    confine::leave_session_keyring();
    // 1 and not 0: a core_pattern that is a pipe is run on the host unless the limit is exactly 1.
    sys::set_limit(libc::RLIMIT_CORE as i32, 1).doing(|| "switching core dumps off")?;

    sys::become_standard(stdio.input.as_fd(), 0).doing(|| "setting the agent's stdin")?;
    sys::become_standard(stdio.output.as_fd(), 1).doing(|| "setting the agent's stdout")?;
    sys::become_standard(stdio.log.as_fd(), 2).doing(|| "setting the agent's stderr")?;
    sys::close_on_exec_from_3().doing(|| "closing the rest")?;

    let filter = seccomp::program(spec.ids);
    confine::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0).doing(|| "setting no_new_privs")?;
    landlock::restrict()?;
    drop_capabilities()?;
    confine::load_filter(&filter).doing(|| "loading the seccomp filter")?;
    Err(sys::execute(tree::AGENT, &[tree::AGENT, c"--confine"])).doing(|| "executing the agent")
}

fn drop_capabilities() -> Result<()> {
    capabilities::bound_to(AGENT_CAPABILITIES)?;
    confine::set_capabilities(AGENT_CAPABILITIES).doing(|| "setting the agent's capabilities")
}
