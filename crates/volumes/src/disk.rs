//! A volume's disk: an ext4 filesystem in a file with holes, made, mounted, repaired and measured.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::process::{Command, Output};

use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_flag, fsconfig_set_string,
    fsmount, fsopen,
};

use crate::error::{Doing, Error, Result};
use crate::loops::LoopDevice;

/// With a journal and room for something beside it.
pub const LEAST: u64 = 16 << 20;
/// Half of what a file on ext4 can have: below what the file and its metadata come to on any host.
pub const MOST: u64 = 8 << 40;

/// What is used of a volume, and how much there may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Usage {
    /// By files, as the filesystem counts.
    pub used: u64,
    /// The size asked for. The filesystem's own tables come out of it.
    pub limit: u64,
    /// On the host's disk. Freed space is given back there a moment later, unless the volume is detached just then.
    pub on_host: u64,
}

/// Makes the file, synced to the disk.
pub(crate) fn make(file: &Path, bytes: u64) -> io::Result<()> {
    let made = File::options()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(file)?;
    made.set_len(bytes)?;
    // Nothing reserved for root, who is nobody special in there. The file reads as zeros, so there is nothing to discard
    // or initialize.
    let output = run(Command::new("mkfs.ext4")
        .args(["-q", "-F", "-b", "4096", "-m", "0", "-i", "8192"])
        .args([
            "-E",
            "lazy_itable_init=1,lazy_journal_init=1,nodiscard,root_owner=0:0",
        ])
        .arg(file))?;
    if !output.status.success() {
        return Err(io::Error::other(format!(
            "mkfs.ext4 failed: {}",
            complaint(&output)
        )));
    }
    // Whoever a sandbox runs as can put something in, and take away only what is theirs, as in `/tmp`.
    let output = run(Command::new("debugfs")
        .args(["-w", "-R", "set_inode_field <2> mode 041777"])
        .arg(file))?;
    if !output.status.success() {
        return Err(io::Error::other(format!(
            "debugfs failed: {}",
            complaint(&output)
        )));
    }
    made.sync_all()
}

/// Mounts it, attached to nothing yet. The journal is replayed by the kernel; `e2fsck` is asked only if that fails.
pub(crate) fn mount(id: &str, device: &LoopDevice) -> Result<OwnedFd> {
    let options: [(&str, Option<&str>); 4] = [
        // After an error that the kernel could not handle, rather nothing more than something wrong.
        ("errors", Some("remount-ro")),
        // Space freed inside is freed on the host.
        ("discard", None),
        // The file reads as zeros already.
        ("noinit_itable", None),
        ("rw", None),
    ];
    let try_it = || filesystem("ext4", &device.path(), &options, MountAttrFlags::empty());
    match try_it() {
        Ok(mount) => return Ok(mount),
        Err(Errno::UCLEAN | Errno::INVAL | Errno::BADMSG | Errno::IO) => {}
        Err(error) => return Err(error).doing(|| format!("mounting volume {id}")),
    }
    tracing::warn!(volume = id, "cannot be mounted as it is; asking e2fsck");
    let damaged = |why: String| Error::Damaged {
        id: id.to_owned(),
        why,
    };
    let output = run(Command::new("e2fsck").args(["-p", &device.path()])).doing(|| "repairing a volume")?;
    // 1 and 2: errors were found and repaired.
    if !matches!(output.status.code(), Some(0..=2)) {
        return Err(damaged(complaint(&output)));
    }
    try_it().map_err(|error| damaged(error.to_string()))
}

/// Mounts an EROFS image, attached to nothing. Needs a kernel that reads it straight from the file (6.12), or a device.
pub(crate) fn mount_sealed(source: &str) -> rustix::io::Result<OwnedFd> {
    filesystem(
        "erofs",
        source,
        &[("ro", None)],
        MountAttrFlags::MOUNT_ATTR_RDONLY,
    )
}

fn filesystem(
    kind: &str,
    source: &str,
    options: &[(&str, Option<&str>)],
    attributes: MountAttrFlags,
) -> rustix::io::Result<OwnedFd> {
    let context = fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(&context, "source", source)?;
    for (key, value) in options {
        match value {
            Some(value) => fsconfig_set_string(&context, *key, *value)?,
            None => fsconfig_set_flag(&context, *key)?,
        }
    }
    fsconfig_create(&context)?;
    let attributes = attributes
        | MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOATIME;
    fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)
}

/// From the mounted filesystem if there is one, else from what it wrote down when it was last unmounted.
pub(crate) fn usage(image: &Path, mounted: Option<&Path>) -> io::Result<Usage> {
    let file = File::open(image)?;
    let metadata = file.metadata()?;
    let used = match mounted {
        Some(at) => {
            let stat = rustix::fs::statvfs(at)?;
            stat.f_blocks.saturating_sub(stat.f_bfree) * stat.f_frsize
        }
        None => used_of(&file)?,
    };
    Ok(Usage {
        used,
        limit: metadata.len(),
        on_host: metadata.blocks() * 512,
    })
}

/// From ext4's superblock.
fn used_of(file: &File) -> io::Result<u64> {
    let mut block = [0; 1024];
    file.read_exact_at(&mut block, 1024)?;
    let word = |at: usize| {
        u64::from(u32::from_le_bytes([
            block[at],
            block[at + 1],
            block[at + 2],
            block[at + 3],
        ]))
    };
    if block[0x38..0x3a] != [0x53, 0xef] {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "there is no ext4 in it",
        ));
    }
    let all = word(0x4) | word(0x150) << 32;
    let free = word(0xc) | word(0x158) << 32;
    let overhead = word(0x248);
    Ok(all.saturating_sub(free).saturating_sub(overhead) << (10 + word(0x18).min(6)))
}

fn run(command: &mut Command) -> io::Result<Output> {
    let name = command.get_program().to_string_lossy().into_owned();
    command
        .env_clear()
        .env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin")
        .stdin(std::process::Stdio::null())
        .output()
        .map_err(|error| {
            let hint = format!("volumes need {name}; install e2fsprogs");
            io::Error::new(error.kind(), format!("{hint}: {error}"))
        })
}

/// The last of what a program said.
fn complaint(output: &Output) -> String {
    let said = [output.stdout.as_slice(), &output.stderr].concat();
    let tail = &said[said.len().saturating_sub(500)..];
    String::from_utf8_lossy(tail).trim().replace('\n', "; ")
}
