//! Builds the jail's file tree, as drawn in the crate's documentation, and makes it the root.
//!
//! What must hold: everything here runs in a private mount namespace, before any byte of the guest does. Mount points are
//! made in the empty upper layer, never followed through the template: an image in which `/dev` is a symlink to `/etc`
//! gets a plain `/dev`.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{CWD, FileType, Gid, Mode, OFlags, Uid};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags,
    UnmountFlags, fsconfig_create, fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, mount_change,
    move_mount, open_tree, unmount,
};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::error::{Doing, Result};
use crate::spec::{Ids, Lower, Spec, Upper};
use crate::{disk, layer, mounts, sys};

/// Where the agent stands in the jail.
pub const AGENT: &std::ffi::CStr = c"/.atoll/atoll-guest";

/// Hidden: they tell of the host, or have given rights over it before. runc's list, and what else names the host's
/// kernel or hardware.
const MASKED: [&str; 19] = [
    "acpi",
    "asound",
    "cmdline",
    "config.gz",
    "interrupts",
    "iomem",
    "ioports",
    "kallsyms",
    "kcore",
    "key-users",
    "keys",
    "kmsg",
    "latency_stats",
    "sched_debug",
    "scsi",
    "softirqs",
    "timer_list",
    "timer_stats",
    "vmallocinfo",
];
/// Readable, never writable.
const READ_ONLY: [&str; 5] = ["bus", "fs", "irq", "sys", "sysrq-trigger"];

const DEVICES: [(&str, u32, u32); 6] = [
    ("null", 1, 3),
    ("zero", 1, 5),
    ("full", 1, 7),
    ("random", 1, 8),
    ("urandom", 1, 9),
    ("tty", 5, 0),
];

const LINKS: [(&str, &str); 5] = [
    ("fd", "/proc/self/fd"),
    ("stdin", "/proc/self/fd/0"),
    ("stdout", "/proc/self/fd/1"),
    ("stderr", "/proc/self/fd/2"),
    ("ptmx", "pts/ptmx"),
];

const NOSUID: MountAttrFlags = MountAttrFlags::MOUNT_ATTR_NOSUID;
const NODEV: MountAttrFlags = MountAttrFlags::MOUNT_ATTR_NODEV;
const NOEXEC: MountAttrFlags = MountAttrFlags::MOUNT_ATTR_NOEXEC;

/// What of the host the tree needs, taken before the mount namespace is left.
#[derive(Debug)]
pub(crate) struct Sources {
    lower: OwnedFd,
    agent: OwnedFd,
    /// A saved layer, to be unpacked.
    layer: Option<OwnedFd>,
    mounts: Vec<OwnedFd>,
}

impl Sources {
    /// A detached mount may be copied only in the namespace in which it was made: the server's.
    pub(crate) fn open(spec: &Spec, layer: Option<OwnedFd>) -> Result<Self> {
        let lower = match &spec.lower {
            Lower::Tree(path) | Lower::Directory(path) => copy_of(path)?,
            Lower::Image(files) => disk::mount_image(files)?,
        };
        Ok(Self {
            lower,
            agent: copy_of(&spec.agent)?,
            layer,
            mounts: mounts::open(spec)?,
        })
    }
}

/// The user and pid namespace that the tree is for, and who its root is on the host.
#[derive(Debug)]
pub(crate) struct Owner<'a> {
    pub(crate) user_namespace: BorrowedFd<'a>,
    pub(crate) pid_namespace: String,
    pub(crate) ids: Ids,
}

impl Owner<'_> {
    /// The host's id for the jail's `id`, as this process has to name it.
    pub(crate) fn id(&self, id: u32) -> u32 {
        match self.ids {
            Ids::Range { base } => base + id,
            Ids::Own => 0,
        }
    }

    fn give(&self, path: &str) -> Result<()> {
        let root = self.id(0);
        rustix::fs::chown(path, Some(Uid::from_raw(root)), Some(Gid::from_raw(root)))
            .doing(|| format!("giving {path} to the jail's root"))
    }

    fn make_dir(&self, path: &str) -> Result<()> {
        rustix::fs::mkdir(path, Mode::from_raw_mode(0o755)).doing(|| format!("making {path}"))?;
        self.give(path)
    }
}

/// From here on, what this process mounts is its own affair.
pub(crate) fn go_private() -> Result<()> {
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
        .doing(|| "making the mounts private")
}

/// Puts the whole tree together on `spec.stage`; the working directory is its root afterwards.
pub(crate) fn build(spec: &Spec, sources: &Sources, owner: &Owner<'_>) -> Result<()> {
    let layer = layers(spec, sources, owner)?;
    rustix::process::chdir("merged").doing(|| "entering the tree")?;
    agent(sources)?;
    // Where it can be found when the jail is to be saved; the devices come on top.
    attach(&layer, Path::new(layer::HIDDEN_AT))?;
    devices(spec, owner)?;
    proc(owner)?;
    sysfs()?;
    mounts::attach_all(spec, &sources.mounts, owner)
}

/// Makes the working directory the root and lets go of the host's tree.
pub(crate) fn enter() -> Result<()> {
    // Both names being the same puts the old root on top of the new one, from where it is detached: no directory for it
    // is needed inside.
    rustix::process::pivot_root(".", ".").doing(|| "pivot_root")?;
    unmount(".", UnmountFlags::DETACH).doing(|| "detaching the host's tree")?;
    rustix::process::chdir("/").doing(|| "entering the root")
}

/// Gives a copy of the mount of the writable layer.
fn layers(spec: &Spec, sources: &Sources, owner: &Owner<'_>) -> Result<OwnedFd> {
    let layer = match &spec.upper {
        Upper::Memory { bytes } => {
            let inodes = (bytes / 4096).max(16 * 1024);
            let options = [
                ("size", bytes.to_string()),
                ("nr_inodes", inodes.to_string()),
                ("mode", "755".into()),
            ];
            filesystem("tmpfs", &options, &[], NOSUID | NODEV)?
        }
        Upper::File(path) => disk::mount_ext4(path)?,
    };
    let stage = spec.stage.as_path();
    attach(&layer, stage)?;
    rustix::process::chdir(stage).doing(|| format!("entering {}", stage.display()))?;
    for name in ["lower", "upper", "work", "merged"] {
        rustix::fs::mkdir(name, Mode::from_raw_mode(0o755))
            .doing(|| format!("making {name} in the writable layer"))?;
    }
    if let Ids::Range { .. } = owner.ids {
        // Files of the template belong to ids 0 and up; the jail must see them so, and its ids are elsewhere.
        sys::mount_setattr(sources.lower.as_fd(), sys::MOUNT_ATTR_IDMAP, Some(owner.user_namespace))
            .doing(|| "mapping the template's ids (idmapped mounts need Linux 5.19 and a filesystem that supports them)")?;
    }
    attach(&sources.lower, Path::new("lower"))?;
    let mode = rustix::fs::stat("lower")
        .doing(|| "looking at the template's root")?
        .st_mode;
    rustix::fs::chmod("upper", Mode::from_raw_mode(mode & 0o7777)).doing(|| "setting the root's mode")?;
    owner.give("upper")?;
    if let Some(saved) = &sources.layer {
        layer::restore(spec, saved)?;
    }
    for name in layer::NOT_OURS {
        owner.make_dir(&format!("upper/{name}"))?;
    }
    file("upper/.atoll/atoll-guest", b"")?;
    let options = [
        ("source", "atoll".into()),
        ("lowerdir", "lower".into()),
        ("upperdir", "upper".into()),
        ("workdir", "work".into()),
        // Or renaming a directory of the template fails with EXDEV, which not every program expects.
        (
            "redirect_dir",
            if owner.ids == Ids::Own { "nofollow" } else { "on" }.into(),
        ),
        // Whatever this kernel's defaults are: a layer that is saved has to hold whole files, and no more than files.
        ("metacopy", "off".into()),
        ("index", "off".into()),
    ];
    let flags: &[&str] = match owner.ids {
        // An ordinary user may not write the trusted attributes that overlayfs keeps its notes in.
        Ids::Own => &["volatile", "userxattr"],
        // Nothing survives a crash of the host anyway, so nothing needs to reach a disk.
        Ids::Range { .. } => &["volatile"],
    };
    let root = filesystem("overlay", &options, flags, NOSUID | NODEV)?;
    attach(&root, Path::new("merged"))?;
    open_tree(&layer, "", copy_flags() | OpenTreeFlags::AT_EMPTY_PATH)
        .doing(|| "taking a copy of the writable layer's mount")
}

fn agent(sources: &Sources) -> Result<()> {
    sys::mount_setattr(
        sources.agent.as_fd(),
        (NOSUID | NODEV | MountAttrFlags::MOUNT_ATTR_RDONLY).bits().into(),
        None,
    )
    .doing(|| "making the agent read-only")?;
    let stat = rustix::fs::fstat(&sources.agent).doing(|| "looking at the agent")?;
    let at = if FileType::from_raw_mode(stat.st_mode).is_dir() {
        ".atoll"
    } else {
        ".atoll/atoll-guest"
    };
    attach(&sources.agent, Path::new(at))
}

fn devices(spec: &Spec, owner: &Owner<'_>) -> Result<()> {
    let options = [
        ("size", "64k".into()),
        ("nr_inodes", "64".into()),
        ("mode", "755".into()),
        ("uid", owner.id(0).to_string()),
        ("gid", owner.id(0).to_string()),
    ];
    let dev = filesystem("tmpfs", &options, &[], NOSUID | NOEXEC)?;
    attach(&dev, Path::new("dev"))?;
    for (name, major, minor) in DEVICES {
        device(name, rustix::fs::makedev(major, minor))?;
    }
    for (name, target) in LINKS {
        rustix::fs::symlinkat(target, CWD, format!("dev/{name}")).doing(|| format!("linking /dev/{name}"))?;
    }
    for name in ["dev/pts", "dev/shm"] {
        owner.make_dir(name)?;
    }
    // A read-only /dev would keep the mounts below it from nothing: they are mounts of their own.
    let options = [
        ("ptmxmode", "0666".into()),
        ("mode", "0620".into()),
        (
            "gid",
            owner.id(if owner.ids == Ids::Own { 0 } else { 5 }).to_string(),
        ),
        ("max", "1024".into()),
    ];
    let pts = filesystem("devpts", &options, &["newinstance"], NOSUID | NOEXEC)?;
    attach(&pts, Path::new("dev/pts"))?;
    let options = [
        ("size", spec.shm_bytes.to_string()),
        ("nr_inodes", (spec.shm_bytes / 4096).max(1024).to_string()),
        ("mode", "1777".into()),
        ("uid", owner.id(0).to_string()),
        ("gid", owner.id(0).to_string()),
    ];
    let shm = filesystem("tmpfs", &options, &[], NOSUID | NODEV | NOEXEC)?;
    attach(&shm, Path::new("dev/shm"))?;
    read_only(&dev, "/dev")
}

/// A node of our own where we may make one; else the host's, bound.
fn device(name: &str, number: u64) -> Result<()> {
    let path = format!("dev/{name}");
    match rustix::fs::mknodat(
        CWD,
        &path,
        FileType::CharacterDevice,
        Mode::from_raw_mode(0o666),
        number,
    ) {
        Ok(()) => {
            rustix::fs::chmod(&path, Mode::from_raw_mode(0o666)).doing(|| format!("opening {path} to all"))
        }
        Err(Errno::PERM) => {
            file(&path, b"")?;
            let host = copy_of(Path::new(&format!("/dev/{name}")))?;
            sys::mount_setattr(host.as_fd(), (NOSUID | NOEXEC).bits().into(), None)
                .doing(|| format!("restricting {path}"))?;
            attach(&host, Path::new(&path))
        }
        Err(error) => Err(error).doing(|| format!("making {path}")),
    }
}

fn proc(owner: &Owner<'_>) -> Result<()> {
    // `pidns` (Linux 6.17) shows another namespace's processes to one who is not among them.
    let options = [("source", "proc".into()), ("pidns", owner.pid_namespace.clone())];
    match filesystem("proc", &options, &[], NOSUID | NODEV | NOEXEC) {
        Ok(proc) => attach(&proc, Path::new("proc"))?,
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => proc_from_within(owner)?,
        Err(error) => return Err(error),
    }
    for name in READ_ONLY {
        let path = format!("proc/{name}");
        if let Some(copy) = copy_if_there(&path)? {
            read_only(&copy, &path)?;
            attach(&copy, Path::new(&path))?;
        }
    }
    for name in MASKED {
        let path = format!("proc/{name}");
        let kind = match rustix::fs::stat(&path) {
            Ok(stat) => FileType::from_raw_mode(stat.st_mode),
            Err(Errno::NOENT) => continue,
            Err(error) => return Err(error).doing(|| format!("looking at {path}")),
        };
        let cover = if kind.is_dir() {
            filesystem(
                "tmpfs",
                &[("size", "4k".into()), ("nr_inodes", "1".into())],
                &["ro"],
                NOSUID | NODEV | NOEXEC,
            )?
        } else {
            copy_of(Path::new("dev/null"))?
        };
        attach(&cover, Path::new(&path))?;
    }
    Ok(())
}

/// For older kernels: a helper that is born into the pid namespace, keeps our rights, mounts and is gone.
fn proc_from_within(owner: &Owner<'_>) -> Result<()> {
    let namespace = rustix::fs::open(
        &*owner.pid_namespace,
        OFlags::RDONLY | OFlags::CLOEXEC,
        Mode::empty(),
    )
    .doing(|| "opening the jail's pid namespace")?;
    move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::ProcessID))
        .doing(|| "having children in the jail's pid namespace")?;
    sys::in_a_child(|| {
        let proc = filesystem("proc", &[("source", "proc".into())], &[], NOSUID | NODEV | NOEXEC)?;
        attach(&proc, Path::new("proc"))
    })
}

/// Not the host's `/sys`: only what C libraries and language runtimes count processors with.
fn sysfs() -> Result<()> {
    let sys = filesystem(
        "tmpfs",
        &[
            ("size", "64k".into()),
            ("nr_inodes", "32".into()),
            ("mode", "755".into()),
        ],
        &[],
        NOSUID | NODEV | NOEXEC,
    )?;
    attach(&sys, Path::new("sys"))?;
    for name in ["sys/devices", "sys/devices/system", "sys/devices/system/cpu"] {
        rustix::fs::mkdir(name, Mode::from_raw_mode(0o755)).doing(|| format!("making {name}"))?;
    }
    for name in ["online", "possible", "present"] {
        if let Ok(text) = std::fs::read(format!("/sys/devices/system/cpu/{name}")) {
            file(&format!("sys/devices/system/cpu/{name}"), &text)?;
        }
    }
    read_only(&sys, "/sys")
}

fn filesystem(
    kind: &str,
    options: &[(&str, String)],
    flags: &[&str],
    attributes: MountAttrFlags,
) -> Result<OwnedFd> {
    let context = fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC).doing(|| format!("opening filesystem {kind}"))?;
    for (key, value) in options {
        fsconfig_set_string(&context, *key, value.as_str())
            .doing(|| format!("{kind}: setting {key}={value}"))?;
    }
    for flag in flags {
        fsconfig_set_flag(&context, *flag).doing(|| format!("{kind}: setting {flag}"))?;
    }
    fsconfig_create(&context).doing(|| format!("making a {kind}{}", complaint(&context)))?;
    fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes).doing(|| format!("mounting a {kind}"))
}

/// What the filesystem itself says went wrong.
fn complaint(context: &OwnedFd) -> String {
    let mut buffer = [0u8; 256];
    match rustix::io::read(context, &mut buffer) {
        Ok(length) => format!(" ({})", String::from_utf8_lossy(&buffer[..length]).trim_end()),
        Err(_) => String::new(),
    }
}

fn attach(mount: &OwnedFd, at: &Path) -> Result<()> {
    move_mount(mount, "", CWD, at, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
        .doing(|| format!("mounting on {}", at.display()))
}

fn read_only(mount: &OwnedFd, name: &str) -> Result<()> {
    sys::mount_setattr(mount.as_fd(), sys::MOUNT_ATTR_RDONLY, None)
        .doing(|| format!("making {name} read-only"))
}

fn copy_flags() -> OpenTreeFlags {
    OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC
}

/// A detached copy of the mount at `path`, from `path` down.
pub(crate) fn copy_of(path: &Path) -> Result<OwnedFd> {
    open_tree(CWD, path, copy_flags()).doing(|| format!("taking a copy of the mount at {}", path.display()))
}

fn copy_if_there(path: &str) -> Result<Option<OwnedFd>> {
    match open_tree(CWD, path, copy_flags()) {
        Ok(copy) => Ok(Some(copy)),
        Err(Errno::NOENT) => Ok(None),
        Err(error) => Err(error).doing(|| format!("taking a copy of the mount at {path}")),
    }
}

fn file(path: &str, content: &[u8]) -> Result<()> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let fd = rustix::fs::open(path, flags, Mode::from_raw_mode(0o644)).doing(|| format!("making {path}"))?;
    rustix::io::write(&fd, content).doing(|| format!("writing {path}"))?;
    Ok(())
}
