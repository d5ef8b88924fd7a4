//! The writable layer of a jail, saved and restored: what a sandbox's filesystem is beyond its template.
//!
//! ```text
//!   server                          atoll-jailer save-layer                        the jail, frozen
//!     │ freezes the cgroup                                                           /dev   devices  (on top)
//!     ├── spawns ──────────────────> enters the jail's mount namespace ───────────>  /dev   layer    (hidden)
//!     │                              takes a copy of that namespace for itself               ├── upper/  <- this
//!     │                              uncovers the layer, in its copy only                    └── work/
//!     │ <── one tar stream ───────── walks upper/
//! ```
//! Restoring is the other direction: the stream is unpacked into `upper/` before the overlay is mounted, charged to the
//! jail's cgroup and stopped by the layer's size.
//!
//! What must hold:
//! - Nothing in the jail can reach the hidden mount: it is covered before the first byte of the guest runs, and the mount
//!   namespace belongs to the host's user namespace.
//! - Only what the guest wrote is saved. What the jailer itself mounts is not: `/dev/shm` is memory and ends with the
//!   jail; `/tmp` is on the layer and is kept. Files beside the agent in `/.atoll` are not kept.
//! - The guest is hostile, and so is a stream: see `atoll_archive`. Attributes other than overlayfs' own (file
//!   capabilities, ACLs) are not kept; capabilities of files do nothing in a jail.

use std::ffi::OsString;
use std::fs::File;
use std::io::{BufReader, BufWriter, ErrorKind, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::ExitCode;

use atoll_archive::{Dialect, Notes, Tally};
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};
use rustix::mount::{MountPropagationFlags, UnmountFlags, mount_change, unmount};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space};

use crate::error::{Doing, Error, Result};
use crate::spec::{Ids, RANGE, Spec, Upper};
use crate::sys::{self, Fork};

/// The first argument of the helper.
pub const SAVE: &str = "save-layer";
/// How the helper ends when there is no room for its output: `ENOSPC`. Any other failure is 1.
pub const FULL: u8 = 28;
/// The directory of the jail under whose mount the layer is hidden.
pub(crate) const HIDDEN_AT: &str = "dev";
/// Directories that the jailer makes in each layer, to mount on.
pub(crate) const NOT_OURS: [&str; 4] = [".atoll", "dev", "proc", "sys"];

/// What the server says to the helper.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Order {
    /// The jail's mount namespace: `/proc/<server>/fd/<n>`, so that it is the right one whatever became of the pid.
    pub namespace: std::path::PathBuf,
    pub ids: Ids,
}

impl Order {
    pub fn to_args(&self) -> Vec<OsString> {
        let ids = match self.ids {
            Ids::Range { base } => base.to_string(),
            Ids::Own => "own".into(),
        };
        vec![SAVE.into(), self.namespace.clone().into(), ids.into()]
    }

    /// Without the leading [`SAVE`].
    fn from_args(mut args: impl Iterator<Item = OsString>) -> Option<Self> {
        let (namespace, ids) = (args.next()?, args.next()?);
        let ids = match ids.to_str()? {
            "own" => Ids::Own,
            base => Ids::Range {
                base: base.parse().ok()?,
            },
        };
        args.next().is_none().then_some(Self {
            namespace: namespace.into(),
            ids,
        })
    }
}

/// The helper. The stream goes to the standard output, a sentence about what went wrong to the standard error.
pub fn main(args: impl Iterator<Item = OsString>) -> ExitCode {
    let saved = Order::from_args(args)
        .ok_or_else(|| Error::new(format!("{SAVE} takes a namespace and the first id, or `own`")))
        .and_then(|order| save(&order));
    match saved {
        Ok(tally) => {
            let (entries, bytes, skipped) = (tally.entries, tally.bytes, tally.skipped.total());
            eprintln!("{entries} entries, {bytes} bytes, {skipped} left out");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error}");
            match error.kind() {
                Some(ErrorKind::StorageFull | ErrorKind::QuotaExceeded) => ExitCode::from(FULL),
                _ => ExitCode::FAILURE,
            }
        }
    }
}

fn save(order: &Order) -> Result<Tally> {
    let upper = find(order)?;
    let out = std::io::stdout()
        .as_fd()
        .try_clone_to_owned()
        .doing(|| "opening the output")?;
    let mut out = BufWriter::with_capacity(256 << 10, File::from(out));
    atoll_archive::pack(upper.as_fd(), dialect(order.ids), ids(order.ids), &mut out)
        .doing(|| "reading the writable layer")
}

/// Enters the jail's mount namespace and gives the upper directory of its overlay.
fn find(order: &Order) -> Result<OwnedFd> {
    let namespace = rustix::fs::openat(
        CWD,
        &order.namespace,
        OFlags::RDONLY | OFlags::CLOEXEC,
        Mode::empty(),
    )
    .doing(|| "opening the jail's mount namespace")?;
    if order.ids == Ids::Own {
        let owner =
            sys::owner_of_namespace(namespace.as_fd()).doing(|| "finding the jail's user namespace")?;
        move_into_link_name_space(owner.as_fd(), Some(LinkNameSpaceType::User))
            .doing(|| "entering the jail's user namespace")?;
    }
    move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Mount))
        .doing(|| "entering the jail's mount namespace")?;
    // The jail itself must not notice.
    sys::unshare(UnshareFlags::NEWNS).doing(|| "taking a copy of the jail's mounts")?;
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
        .doing(|| "making the copy private")?;
    rustix::process::chdir("/").doing(|| "entering the jail's root")?;
    unmount(HIDDEN_AT, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)
        .doing(|| "uncovering the writable layer")?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let layer =
        rustix::fs::openat(CWD, HIDDEN_AT, flags, Mode::empty()).doing(|| "opening the writable layer")?;
    // An older jail has nothing hidden there: what is uncovered then is a directory of the guest's.
    const TMPFS: u64 = 0x0102_1994;
    const EXT4: u64 = 0xEF53;
    let kind = rustix::fs::fstatfs(&layer)
        .doing(|| "looking at the writable layer")?
        .f_type as u64;
    if kind != TMPFS && kind != EXT4 {
        return Err(Error::new(
            "this jail was started by an older version, which could not save",
        ));
    }
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    rustix::fs::openat2(&layer, "upper", flags, Mode::empty(), resolve)
        .doing(|| "opening the upper directory")
}

pub(crate) fn open(spec: &Spec) -> Result<Option<OwnedFd>> {
    let open = |path: &std::path::PathBuf| {
        rustix::fs::openat(CWD, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
            .doing(|| "opening the saved layer")
    };
    spec.layer.as_ref().map(open).transpose()
}

/// Fills `upper` in the working directory.
pub(crate) fn restore(spec: &Spec, saved: &OwnedFd) -> Result<()> {
    // On cgroup v2 this process is not in the jail's cgroup; who writes has to be, or the host pays for the memory.
    let cgroup = spec
        .cgroups
        .iter()
        .find(|file| file.file_name().is_some_and(|name| name == "cgroup.procs"))
        .and_then(|file| file.parent());
    match cgroup {
        None => fill(spec, saved),
        Some(cgroup) => fill_within(cgroup, spec, saved),
    }
}

fn fill(spec: &Spec, saved: &OwnedFd) -> Result<()> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let upper =
        rustix::fs::openat(CWD, "upper", flags, Mode::empty()).doing(|| "opening the upper directory")?;
    let saved = saved.try_clone().doing(|| "opening the saved layer")?;
    let mut input = BufReader::with_capacity(256 << 10, File::from(saved));
    let filled = atoll_archive::unpack(upper.as_fd(), dialect(spec.ids), ids(spec.ids), &mut input);
    filled.map(drop).map_err(|error| {
        if !atoll_archive::is_full(&error) {
            return Error::new(format!("unpacking the saved layer: {error}"));
        }
        let limit = match &spec.upper {
            Upper::Memory { bytes } => format!("{bytes} bytes"),
            Upper::File(_) => "this size".into(),
        };
        Error::new(format!(
            "what was saved does not fit into a disk of {limit}; ask for a larger one ({error})"
        ))
    })
}

fn fill_within(cgroup: &Path, spec: &Spec, saved: &OwnedFd) -> Result<()> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let cgroup = rustix::fs::openat(CWD, cgroup, flags, Mode::empty()).doing(|| "opening the cgroup")?;
    let (from_child, to_parent) =
        rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).doing(|| "making a pipe")?;
    match sys::clone_process(0, Some(cgroup.as_fd())).doing(|| "forking a helper")? {
        Fork::Child => {
            let said = match fill(spec, saved) {
                Ok(()) => DONE.to_owned(),
                Err(error) => error.to_string(),
            };
            let _ = rustix::io::write(&to_parent, said.as_bytes());
            #[expect(clippy::exit, reason = "this is the helper, which has done its work")]
            std::process::exit(0);
        }
        Fork::Parent { child } => {
            drop(to_parent);
            let mut said = String::new();
            let read = File::from(from_child).read_to_string(&mut said);
            let child = rustix::process::Pid::from_raw(child);
            let _ = rustix::process::waitpid(child, rustix::process::WaitOptions::empty());
            read.doing(|| "waiting for the layer to be restored")?;
            match said.as_str() {
                DONE => Ok(()),
                "" => Err(Error::new(
                    "the restoring of the layer was killed; does it fit into the memory limit?",
                )),
                said => Err(Error::new(said)),
            }
        }
    }
}

const DONE: &str = "done";

fn dialect(ids: Ids) -> Dialect {
    Dialect::Layer {
        notes: match ids {
            Ids::Range { .. } => Notes::Trusted,
            Ids::Own => Notes::User,
        },
        not_ours: &NOT_OURS,
    }
}

fn ids(ids: Ids) -> atoll_archive::Ids {
    match ids {
        Ids::Range { base } => atoll_archive::Ids::Range {
            first: base,
            count: RANGE,
        },
        Ids::Own => atoll_archive::Ids::Own,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_survives_the_command_line() {
        for ids in [Ids::Own, Ids::Range { base: 1 << 28 }] {
            let order = Order {
                namespace: "/proc/1/fd/7".into(),
                ids,
            };
            let mut args = order.to_args().into_iter();
            assert_eq!(args.next().unwrap(), SAVE);
            assert_eq!(Order::from_args(args), Some(order));
        }
        assert_eq!(Order::from_args(["/x".into()].into_iter()), None);
    }
}
