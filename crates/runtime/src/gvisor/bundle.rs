//! The OCI bundle that describes one sandbox to `runsc`.

use std::path::{Path, PathBuf};

use atoll_types::{DiskBacking, MIB, Resources};
use serde_json::{Value, json};

use super::volumes;
use crate::{InstanceSpec, uids};

/// Where the agent stands in a sandbox.
pub(super) const AGENT: &str = "/.atoll/atoll-guest";

const TMP: &str = "/tmp";

/// What root in the sandbox may do *to the sentry*: enough for sudo, package managers, debuggers and mounts of its own.
/// None of these exist on the host. No `CAP_NET_RAW`, no `CAP_SYS_MODULE`, `_RAWIO`, `_BOOT`, `_TIME`.
const CAPABILITIES: [&str; 20] = [
    "CAP_AUDIT_WRITE",
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_DAC_READ_SEARCH",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_IPC_LOCK",
    "CAP_IPC_OWNER",
    "CAP_KILL",
    "CAP_LEASE",
    "CAP_MKNOD",
    "CAP_NET_BIND_SERVICE",
    "CAP_SETFCAP",
    "CAP_SETGID",
    "CAP_SETPCAP",
    "CAP_SETUID",
    "CAP_SYS_ADMIN",
    "CAP_SYS_CHROOT",
    "CAP_SYS_PTRACE",
    "CAP_SYS_RESOURCE",
];

/// The paths that a bundle refers to; all absolute.
#[derive(Debug)]
pub(super) struct Places<'a> {
    /// An empty directory, for what must name one.
    pub(super) empty: &'a Path,
    pub(super) guest_image: &'a Path,
    /// The instance's directory.
    pub(super) dir: &'a Path,
    /// Where the file of a disk-backed writable layer is made, without a name.
    pub(super) disk: &'a Path,
    /// See [`layer_size`].
    pub(super) layer_size: &'a str,
}

/// What the sentry keeps in memory about a file that was written: 2.9 KiB were seen, half of it until its heap is collected.
const BYTES_PER_FILE: u64 = 4096;
/// What it and the guest need for everything else, at least.
const BYTES_FOR_THE_REST: u64 = 64 * MIB;
const LEAST_FILES: u64 = 4096;

/// How large the writable layer may become, as `runsc` wants to hear it; and, if that is one that can limit it, of how many
/// files: no more than what is known about them fits into memory, or the sandbox would end where an error will do.
pub(super) fn layer_size(resources: &Resources, counts_files: bool) -> String {
    let bytes = resources.with_room_for_disk().disk_bytes;
    let files = resources.memory_bytes.saturating_sub(BYTES_FOR_THE_REST) / BYTES_PER_FILE;
    match counts_files {
        true => format!("{bytes};nr_inodes={}", files.max(LEAST_FILES)),
        false => bytes.to_string(),
    }
}

/// What a sandbox is made of.
#[derive(Debug)]
pub(super) struct Bundle {
    /// The contents of `config.json`.
    pub(super) config: Vec<u8>,
    /// The EROFS images that the sentry reads beside that of the root: those of the mounts, in their order.
    pub(super) images: Vec<PathBuf>,
}

/// `by_runsc`: it will be read by `runsc run`, not by a sentry that we start.
pub(super) fn bundle(spec: &InstanceSpec, places: &Places<'_>, first_uid: u32, by_runsc: bool) -> Bundle {
    let resources = &spec.resources;
    let in_memory = resources.memory_bytes / 2;
    let overlay = match resources.disk_backing {
        DiskBacking::Memory => "memory".to_owned(),
        DiskBacking::Disk => format!("dir={}", places.disk.display()),
    };
    let mut mounts = vec![
        json!({"destination": "/proc", "type": "proc", "source": "proc"}),
        json!({"destination": "/dev", "type": "dev", "source": "dev"}),
        json!({"destination": "/dev/pts", "type": "devpts", "source": "devpts"}),
        json!({"destination": "/dev/shm", "type": "tmpfs", "source": "shm",
               "options": ["nosuid", "nodev", "mode=1777", format!("size={in_memory}")]}),
        json!({"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["ro", "nosuid", "noexec", "nodev"]}),
        json!({"destination": "/.atoll", "type": "erofs", "source": places.guest_image, "options": ["ro"]}),
    ];
    // What is lent takes the place of ours.
    mounts.retain(|ours| spec.mounts.iter().all(|lent| ours["destination"] != lent.path));
    mounts.extend(volumes::entries(&spec.mounts, places.dir));
    if by_runsc && resources.disk_backing == DiskBacking::Disk && !volumes::need_gofer(&spec.mounts) {
        // It makes the file of a layer on disk only where a gofer runs, and a gofer runs only for a bind mount.
        mounts.push(
            json!({"destination": "/.atoll-disk", "type": "bind", "source": places.empty,
                           "options": ["bind", "ro"]}),
        );
    }
    let erofs = mounts.iter().filter(|mount| mount["type"] == "erofs");
    let images = erofs.filter_map(|mount| mount["source"].as_str().map(PathBuf::from));
    let images = images.collect();
    // How our `runsc` takes several; a sentry that we start ourselves gets them open.
    let root: Vec<_> = spec.image.iter().map(|file| file.display().to_string()).collect();
    // Files in `/tmp` belong to the writable layer, where there is room for them. gVisor would cover an empty one with a
    // tmpfs in memory, without a limit; the agent takes that away before anything else runs.
    let mut agent = vec![AGENT];
    if spec.mounts.iter().all(|lent| lent.path != TMP) {
        agent.push("--uncover-tmp");
    }
    let ids = json!([{"containerID": 0, "hostID": first_uid, "size": uids::RANGE}]);
    // For `runsc run`; a sentry that we start ourselves is in a namespace of its own.
    let network = match &spec.network {
        Some(network) => json!({"type": "network", "path": network.namespace}),
        None => json!({"type": "network"}),
    };
    let config: Value = json!({
        "ociVersion": "1.0.2",
        "process": {
            "terminal": false,
            "user": {"uid": 0, "gid": 0},
            "args": agent,
            "env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root"],
            "cwd": "/",
            // sudo must work; it gives powers over the sentry only.
            "noNewPrivileges": false,
            "capabilities": {
                "bounding": CAPABILITIES,
                "effective": CAPABILITIES,
                "permitted": CAPABILITIES,
            },
            "rlimits": [
                {"type": "RLIMIT_NOFILE", "soft": 65536, "hard": 65536},
                {"type": "RLIMIT_CORE", "soft": 0, "hard": 0},
            ],
        },
        "root": {"path": places.empty},
        "hostname": spec.hostname,
        "mounts": mounts,
        "annotations": {
            "dev.gvisor.spec.rootfs.source": root.join("\n"),
            "dev.gvisor.spec.rootfs.type": "erofs",
            "dev.gvisor.spec.rootfs.overlay": overlay,
            "dev.gvisor.spec.rootfs.options": format!("size={}", places.layer_size),
        },
        "linux": {
            "namespaces": [
                {"type": "user"}, {"type": "pid"}, {"type": "ipc"}, {"type": "uts"}, {"type": "mount"},
                network,
            ],
            "uidMappings": ids,
            "gidMappings": ids,
        },
    });
    Bundle {
        config: serde_json::to_vec(&config).expect("JSON values always serialize"),
        images,
    }
}
