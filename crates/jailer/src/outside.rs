//! The jailer proper: everything that needs the host's rights.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{CWD, Mode, OFlags};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space};

use crate::error::{Doing, Error, Result};
use crate::inside::{self, Stdio};
use crate::layer;
use crate::spec::{Ids, RANGE, Spec};
use crate::sys::{self, Fork};
use crate::tree::{self, Owner, Sources};

/// Builds the jail and starts its agent. Gives the host's pid of the agent. On error nothing runs.
pub fn start(spec: &Spec) -> Result<i32> {
    let own = (
        rustix::process::getuid().as_raw(),
        rustix::process::getgid().as_raw(),
    );
    let into = enter_cgroups(&spec.cgroups)?;
    let stdio = Stdio {
        input: open(&spec.input, OFlags::RDWR)?,
        output: open(&spec.output, OFlags::RDWR)?,
        log: open(&spec.log, OFlags::WRONLY | OFlags::CREATE | OFlags::APPEND)?,
    };
    // From within a user namespace of one's own, the server's descriptors are out of reach.
    let layer = layer::open(spec)?;
    if let Some(network) = &spec.network {
        enter_network(network)?;
    }
    if spec.ids == Ids::Own {
        sys::unshare(UnshareFlags::NEWUSER | UnshareFlags::NEWNS).doing(|| {
            "making a user namespace as an ordinary user (is it switched off by a sysctl, AppArmor or a container?)"
        })?;
        // A group map of one's own is allowed only to those who can no longer drop groups.
        write("/proc/self/setgroups", "deny")?;
        write("/proc/self/uid_map", &format!("0 {} 1", own.0))?;
        write("/proc/self/gid_map", &format!("0 {} 1", own.1))?;
    }
    let sources = Sources::open(spec, layer)?;
    if spec.ids != Ids::Own {
        sys::unshare(UnshareFlags::NEWNS).doing(|| "making a mount namespace")?;
    }
    tree::go_private()?;

    let (from_inside, to_outside) = pipe_with(PipeFlags::CLOEXEC).doing(|| "making a pipe")?;
    let (from_outside, to_inside) = pipe_with(PipeFlags::CLOEXEC).doing(|| "making a pipe")?;
    let namespaces = (libc::CLONE_NEWUSER | libc::CLONE_NEWPID) as u64;
    let cgroup = into.as_ref().map(AsFd::as_fd);
    let forked = match spec.ids {
        Ids::Range { base } => sys::clone_process_as(base, namespaces, cgroup),
        Ids::Own => sys::clone_process(namespaces, cgroup),
    };
    let child = match forked.doing(|| "making user and pid namespaces")? {
        Fork::Parent { child } => child,
        Fork::Child => {
            drop((from_inside, to_inside));
            let Err(error) = inside_main(spec, &stdio, from_outside, to_outside.as_fd());
            let _ = rustix::io::write(&to_outside, error.to_string().as_bytes());
            #[expect(
                clippy::exit,
                reason = "this is the copy of the program that failed to become the agent"
            )]
            std::process::exit(1);
        }
    };
    drop((to_outside, from_outside, stdio));
    let mut inside = File::from(from_inside);
    furnish(spec, &sources, child, &mut inside)
        .and_then(|()| {
            rustix::io::write(&to_inside, b"g").doing(|| "telling the inside to go on")?;
            let mut complaint = String::new();
            inside
                .read_to_string(&mut complaint)
                .doing(|| "waiting for the agent")?;
            if complaint.is_empty() {
                Ok(child)
            } else {
                Err(Error::new(complaint))
            }
        })
        .inspect_err(|_| end(child))
}

fn furnish(spec: &Spec, sources: &Sources, child: i32, inside: &mut File) -> Result<()> {
    map_ids(spec.ids, child)?;
    let user_namespace = open(Path::new(&format!("/proc/{child}/ns/user")), OFlags::RDONLY)?;
    let owner = Owner {
        user_namespace: user_namespace.as_fd(),
        pid_namespace: format!("/proc/{child}/ns/pid"),
        ids: spec.ids,
    };
    tree::build(spec, sources, &owner)?;
    // The inside still uses the host's /proc until it says so.
    let mut word = [0];
    let ready = inside.read(&mut word).doing(|| "waiting for the inside")?;
    if ready == 1 && word[0] == READY {
        return tree::enter();
    }
    let mut complaint = vec![word[0]];
    let _ = inside.read_to_end(&mut complaint);
    Err(Error::new(String::from_utf8_lossy(&complaint)))
}

const READY: u8 = 0;

fn inside_main(
    spec: &Spec,
    stdio: &Stdio,
    from_outside: OwnedFd,
    to_outside: std::os::fd::BorrowedFd<'_>,
) -> Result<std::convert::Infallible> {
    inside::prepare(spec)?;
    rustix::io::write(to_outside, &[READY]).doing(|| "telling the outside")?;
    let mut word = [0];
    let told = File::from(from_outside)
        .read(&mut word)
        .doing(|| "waiting for the outside")?;
    if told == 0 {
        return Err(Error::new("the outside went away"));
    }
    inside::become_agent(spec, stdio)
}

fn map_ids(ids: Ids, child: i32) -> Result<()> {
    let map = match ids {
        Ids::Range { base } => format!("0 {base} {RANGE}"),
        Ids::Own => {
            write(&format!("/proc/{child}/setgroups"), "deny")?;
            "0 0 1".into()
        }
    };
    write(&format!("/proc/{child}/uid_map"), &map)?;
    write(&format!("/proc/{child}/gid_map"), &map)
}

/// Enters what can be entered cheaply; gives the cgroup v2 directory that the child is to be born in.
fn enter_cgroups(files: &[std::path::PathBuf]) -> Result<Option<OwnedFd>> {
    let mut into = None;
    for file in files {
        match file.parent() {
            // v2. Moving a whole process waits for an RCU grace period, being born in the right place does not.
            Some(dir) if file.file_name().is_some_and(|name| name == "cgroup.procs") => {
                into = Some(open(dir, OFlags::RDONLY | OFlags::DIRECTORY)?);
            }
            _ => write(&file.to_string_lossy(), "0")?,
        }
    }
    Ok(into)
}

/// Before there is a user namespace of the jail: its root has no rights over a network that it did not make.
fn enter_network(path: &Path) -> Result<()> {
    let namespace = open(path, OFlags::RDONLY)?;
    move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))
        .doing(|| format!("entering the network namespace {}", path.display()))
}

fn end(child: i32) {
    if let Some(child) = rustix::process::Pid::from_raw(child) {
        let _ = rustix::process::kill_process(child, rustix::process::Signal::KILL);
        let _ = rustix::process::waitpid(Some(child), rustix::process::WaitOptions::empty());
    }
}

fn open(path: &Path, flags: OFlags) -> Result<OwnedFd> {
    rustix::fs::openat(CWD, path, flags | OFlags::CLOEXEC, Mode::from_raw_mode(0o600))
        .doing(|| format!("opening {}", path.display()))
}

/// Files of the kernel take one `write`.
fn write(path: &str, text: &str) -> Result<()> {
    File::options()
        .write(true)
        .open(path)
        .and_then(|mut file| file.write_all(text.as_bytes()))
        .doing(|| format!("writing {text:?} to {path}"))
}
