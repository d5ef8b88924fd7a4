//! Starting a sentry ourselves, without `runsc run`. For instances without a gofer; [`super::launch`] does the others.
//!
//! ```text
//!   server ── clone, all namespaces new ──> child: cgroup, empty root, no powers ── exec ──> sentry (runsc boot)
//!     │ maps its user ids                       └── clone ──> unmounts /proc when the sentry says so, and ends
//!     └── it is up? ── links, StartRoot (or Restore) over the control socket ───────────────> agent, or the saved guest
//! ```
//! `runsc run` is a Go program of 80 MB that starts itself twice again: as the sentry, and as a process that unmounts
//! `/proc`. All but the sentry is small work, done here by [`child`] in system calls.
//!
//! What must hold:
//! - The walls are those that `runsc run` would have built, or thicker: the test `walls` compares the two.
//! - Flags and the meaning of descriptors are those of the pinned `runsc` and no stable interface.
//! - The sentry is a child of this server. It is waited for, so that no zombie stays; it does not end with the server.

mod child;
mod layer;

use std::ffi::{CString, OsString};
use std::fs;
use std::io::{self, ErrorKind};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use atoll_types::InstanceId;
use rustix::fs::{Mode, OFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, Resource, Rlimit, WaitId, WaitIdOptions};
use tokio::io::AsyncReadExt;

use crate::cause::Doing;
use crate::cgroup::Group;
use crate::channel::Fifos;
use crate::process::{Handle, Process};
use crate::{Cause, Kind, uids};

/// What to boot.
#[derive(Debug)]
pub(super) struct Order<'a> {
    pub(super) runsc: &'a Path,
    /// The flags that every `runsc` of this instance gets.
    pub(super) flags: Vec<OsString>,
    pub(super) id: &'a InstanceId,
    /// The instance's directory, with `config.json` in it.
    pub(super) dir: &'a Path,
    /// The files of the root's image: the sentry learns from the first how many follow.
    pub(super) root: &'a [PathBuf],
    /// Those of other mounts, one each.
    pub(super) images: &'a [PathBuf],
    pub(super) first_uid: u32,
    /// As much as the guest sees.
    pub(super) memory_bytes: u64,
    /// The size of the writable layer, as [`super::bundle::layer_size`] says it.
    pub(super) layer_size: &'a str,
    /// The directory for the file of a writable layer that is on disk.
    pub(super) disk: Option<&'a Path>,
}

/// A sentry on its way up.
#[derive(Debug)]
pub(super) struct Sentry {
    process: Process,
    /// The child says here why it failed, or the sentry that it is up; until then.
    news: Option<OwnedFd>,
}

impl Sentry {
    pub(super) fn process(&self) -> &Process {
        &self.process
    }

    /// Waits until it can be called.
    pub(super) async fn up(&mut self) -> Result<(), Cause> {
        let Some(news) = &self.news else {
            return Ok(());
        };
        let heard = async {
            let mut pipe = tokio::net::unix::pipe::Receiver::from_owned_fd(news.try_clone()?)?;
            if pipe.read_u8().await? == 0 {
                return Ok::<_, io::Error>(Ok(()));
            }
            let mut failure = [0; child::FAILURE - 1];
            pipe.read_exact(&mut failure).await?;
            Ok(Err(child::explain(failure)))
        };
        match heard.await {
            Ok(up) => up.map(|()| self.news = None),
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => Err(Cause::new(
                Kind::Program,
                "the sentry ended while it was starting",
            )),
            Err(error) => Err(error).doing(|| "waiting for the sentry"),
        }
    }
}

/// Starts the sentry. Blocking, about 1 ms; it comes up afterwards.
pub(super) fn start(order: &Order<'_>, group: &Group, fifos: &Fifos) -> Result<Sentry, Cause> {
    let runsc = open(order.runsc, OFlags::PATH)?;
    let (proc_read, proc_written) = pipe()?;
    let (go_read, go_written) = pipe()?;
    let (news, told) = pipe()?;
    let entry = group.entry()?;

    let mut given = Given::default();
    given.null()?;
    let log = OFlags::CREATE | OFlags::WRONLY | OFlags::APPEND;
    let mut argv = vec![OsString::from("runsc-sandbox")];
    argv.extend(order.flags.iter().cloned());
    argv.push(given.flag("log-fd", open(&order.dir.join("runsc.log"), log)?));
    argv.push(given.flag("panic-log-fd", open(&order.dir.join("panic.log"), log)?));
    argv.push("boot".into());
    let mut bundle = OsString::from("--bundle=");
    bundle.push(order.dir);
    argv.push(bundle);
    let memory = order.memory_bytes;
    argv.push(format!("--total-memory={memory}").into());
    argv.push(format!("--total-host-memory={memory}").into());
    argv.push(format!("--product-name={}", product_name()).into());
    let mut layers = String::from("--gofer-mount-confs=erofs:memory");
    if let Some(disk) = order.disk {
        layers = "--gofer-mount-confs=erofs:anon".into();
        let file = layer::make(disk).doing(|| "making the file of the writable layer")?;
        argv.push(given.flag("gofer-filestore-fds", file));
    }
    layers.push_str(&format!(":size={}", order.layer_size));
    for image in order.root.iter().chain(order.images) {
        argv.push(given.flag("io-fds", open(image, OFlags::RDONLY)?));
    }
    for _ in order.images {
        layers.push_str(",erofs:none");
    }
    argv.push(layers.into());
    let control = control_socket(order.dir, order.id).doing(|| "making the control socket")?;
    argv.push(given.flag("controller-fd", control));
    argv.push(given.flag("spec-fd", open(&order.dir.join("config.json"), OFlags::RDONLY)?));
    let (stdin, stdout) = fifos.open_for_guest().doing(|| "opening the FIFOs")?;
    let stderr = open(Path::new("/dev/null"), OFlags::RDWR)?;
    for stdio in [stdin, stdout, stderr] {
        argv.push(given.flag("stdio-fds", stdio));
    }
    argv.push(given.flag("proc-mount-sync-fd", proc_written));
    let tell = given.files.len();
    argv.push(given.flag("start-sync-fd", told));
    argv.push(order.id.as_str().into());

    let argv: Vec<CString> = argv
        .into_iter()
        .map(|word| CString::new(word.into_vec()))
        .collect::<Result<_, _>>()
        .map_err(|_| Cause::new(Kind::Unsupported, "a path contains NUL"))?;
    let files: Vec<RawFd> = given.files.iter().map(AsRawFd::as_raw_fd).collect();
    let plan = child::Plan::new(
        child::Ends {
            runsc: runsc.as_raw_fd(),
            go_read: go_read.as_raw_fd(),
            go_written: go_written.as_raw_fd(),
            proc_read: proc_read.as_raw_fd(),
            tell: files[tell],
        },
        &argv,
        files,
        &entry,
    );
    let pid = child::clone(plan).doing(|| "starting the sentry's process")?;
    // It waits for us, so it is there.
    let process = Process::of(pid.as_raw_nonzero().get().unsigned_abs());
    let handle = process.as_ref().and_then(Process::open);
    let (Some(process), Some(handle)) = (process, handle) else {
        drop(go_written);
        let _ = rustix::process::waitid(WaitId::Pid(pid), WaitIdOptions::EXITED);
        return Err(Cause::new(Kind::State, "the sentry's process cannot be watched"));
    };
    reap(pid, handle);
    let mapped = map_ids(pid, order.first_uid).doing(|| "mapping user ids");
    // More locked memory is only faster.
    let unlimited = Rlimit {
        current: None,
        maximum: None,
    };
    let _ = rustix::process::prlimit(Some(pid), Resource::Memlock, unlimited);
    // Without a word the child ends when the last writer of this pipe is gone, which is at the end of this function.
    mapped?;
    rustix::io::write(&go_written, &[0]).doing(|| "telling the sentry's process to go on")?;
    Ok(Sentry {
        process,
        news: Some(news),
    })
}

/// The descriptors that the sentry is born with, by their numbers there.
#[derive(Debug, Default)]
struct Given {
    files: Vec<OwnedFd>,
}

impl Given {
    /// Its own stdin, stdout and stderr lead nowhere.
    fn null(&mut self) -> Result<(), Cause> {
        for flags in [OFlags::RDONLY, OFlags::WRONLY, OFlags::WRONLY] {
            self.files.push(open(Path::new("/dev/null"), flags)?);
        }
        Ok(())
    }

    fn flag(&mut self, name: &str, file: OwnedFd) -> OsString {
        self.files.push(file);
        format!("--{name}={}", self.files.len() - 1).into()
    }
}

fn open(path: &Path, flags: OFlags) -> Result<OwnedFd, Cause> {
    let mode = Mode::from_raw_mode(0o644);
    rustix::fs::open(path, flags | OFlags::CLOEXEC, mode).doing(|| format!("opening {}", path.display()))
}

fn pipe() -> Result<(OwnedFd, OwnedFd), Cause> {
    pipe_with(PipeFlags::CLOEXEC).doing(|| "making a pipe")
}

/// Bound where [`super::control`] looks for it; the sentry listens.
fn control_socket(dir: &Path, id: &InstanceId) -> io::Result<OwnedFd> {
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    // By way of a descriptor: the name of a socket may have 107 bytes, a path has more.
    let dir = rustix::fs::open(
        dir,
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    let name = format!("/proc/self/fd/{}/runsc-{id}.sock", dir.as_raw_fd());
    rustix::net::bind(&socket, &SocketAddrUnix::new(name)?)?;
    Ok(socket)
}

/// Root in the sandbox process is the first of the instance's ids, and nobody here.
fn map_ids(pid: Pid, first: u32) -> io::Result<()> {
    for map in ["uid_map", "gid_map"] {
        let pid = pid.as_raw_nonzero();
        fs::write(format!("/proc/{pid}/{map}"), format!("0 {first} {}", uids::RANGE))?;
    }
    Ok(())
}

/// What a guest reads in `/sys/devices/virtual/dmi/id/product_name`; the sentry could not look it up where it is.
fn product_name() -> String {
    let name = fs::read_to_string("/sys/devices/virtual/dmi/id/product_name");
    name.map_or_else(|_| "unknown".into(), |name| name.trim().to_owned())
}

/// Waits for its end in the background. Its pid is nobody else's until then.
fn reap(pid: Pid, handle: Handle) {
    tokio::spawn(async move {
        if let Err(error) = handle.ended().await {
            tracing::warn!(%error, "the end of a sentry cannot be waited for");
        }
        let _ = rustix::process::waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOHANG);
    });
}
