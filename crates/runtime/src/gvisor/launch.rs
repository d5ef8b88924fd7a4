//! From a specification to a sandbox process that comes up: files, cgroup, and whoever starts it. Blocking, about 2 ms.
//!
//! Who starts it is [`boot`], where the sentry needs no gofer. Where it needs one, for a volume, it is `runsc run`, which
//! knows how to start both.
#![expect(
    unsafe_code,
    reason = "the child prepares its cgroup and its mounts between fork and exec"
)]

use std::ffi::{CString, OsString};
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;

use atoll_types::{DiskBacking, InstanceId, Isolation};
use tokio::process::{Child, Command};

use super::boot::{self, Sentry};
use super::control::Control;
use super::network::{self, Wire};
use super::restore::Boot;
use super::save::blocking;
use super::volumes::{self, Volume};
use super::{BOOT, boot_limits, bundle};
use crate::cause::Doing;
use crate::cgroup::Group;
use crate::channel::Fifos;
use crate::instance_dir::{InstanceDirs, Record};
use crate::process::Process;
use crate::{Cause, Config, InstanceSpec, Kind, Network, Told, uids};

/// Where `runsc` writes the pid of the sandbox process, before the agent runs.
const PID_FILE: &str = "pid";

#[derive(Debug)]
pub(super) struct Launched {
    pub(super) dir: PathBuf,
    /// As on disk, except that the process is still to be added.
    pub(super) record: Record,
    pub(super) group: Group,
    pub(super) fifos: Fifos,
    pub(super) starting: Starting,
    /// For an instance that waits for its memory.
    pub(super) wire: Arc<Wire>,
}

/// A sandbox process on its way up.
#[derive(Debug)]
pub(super) enum Starting {
    /// By a `runsc` that ends when that is done.
    Command(Child),
    Sentry {
        sentry: Sentry,
        /// What it is told of its network when the agent is started, if that is still to be done.
        agent: Option<Arc<Wire>>,
    },
}

impl Starting {
    /// Waits until the agent is about to run, or, of an instance that waits for its memory, until it waits.
    pub(super) async fn up(&mut self, dir: &Path, id: &InstanceId) -> Result<(), Cause> {
        let up = match self {
            Self::Command(runsc) => match runsc.wait().await {
                Ok(status) if status.success() => Ok(()),
                Ok(status) => Err(Cause::new(Kind::Program, format!("runsc ended with {status}"))),
                Err(error) => Err(error).doing(|| "waiting for runsc"),
            },
            Self::Sentry { sentry, agent } => match sentry.up().await {
                Ok(()) => match agent.take() {
                    Some(wire) => {
                        let (dir, id) = (dir.to_owned(), id.clone());
                        blocking(move || Control::connect(&dir, &id)?.start(&id, &wire, BOOT)).await
                    }
                    None => Ok(()),
                },
                up => up,
            },
        };
        up.map_err(|cause| cause.with(": ", complaint(dir)))
    }

    /// The sandbox process. `None`: it is gone already.
    pub(super) fn process(&self, dir: &Path) -> Result<Option<Process>, Cause> {
        match self {
            Self::Command(_) => {
                let pid = fs::read_to_string(dir.join(PID_FILE))
                    .doing(|| "reading the pid that runsc should have written")?;
                Ok(pid.trim().parse().ok().and_then(Process::of))
            }
            Self::Sentry { sentry, .. } => Ok(Some(sentry.process().clone())),
        }
    }
}

/// Makes the instance's directory; whoever does has to clean up afterwards. Fails if there is one.
pub(super) fn claim(dirs: &InstanceDirs, spec: &InstanceSpec) -> io::Result<Record> {
    let record = Record {
        id: spec.id.clone(),
        isolation: Isolation::Gvisor,
        image: spec.image.first().cloned().unwrap_or_default(),
        hostname: spec.hostname.clone(),
        resources: spec.resources,
        id_base: None,
        process: None,
    };
    dirs.create(&record, |dir| Fifos::create(dir).map(drop))?;
    Ok(record)
}

/// Starts what [`claim`] made room for.
pub(super) fn launch(
    config: &Config,
    dir: PathBuf,
    runsc: &Path,
    spec: &InstanceSpec,
    boot: Boot,
    counts_files: bool,
    mut record: Record,
) -> Result<Launched, Cause> {
    let fifos = Fifos::in_dir(&dir);
    let first_uid = uids::take(&config.state_dir, &spec.id).doing(|| "taking a range of user ids")?;
    record.id_base = Some(first_uid);
    let empty = config.state_dir.join("empty");
    if !empty.exists() {
        fs::create_dir_all(&empty).doing(|| "making an empty directory")?;
    }
    let on_disk = spec.resources.disk_backing == DiskBacking::Disk;
    let disk = dir.join("disk");
    if on_disk {
        fs::create_dir(&disk).doing(|| "making the directory of the writable layer")?;
    }
    let by_runsc = volumes::need_gofer(&spec.mounts) || sidecars(runsc);
    let layer_size = bundle::layer_size(&spec.resources, counts_files);
    let places = bundle::Places {
        empty: &empty,
        guest_image: &config.guest_image,
        dir: &dir,
        disk: &disk,
        layer_size: &layer_size,
    };
    let volumes = volumes::take(&spec.mounts, &dir, first_uid)?;
    let bundle = bundle::bundle(spec, &places, first_uid, by_runsc);
    fs::write(dir.join("config.json"), &bundle.config).doing(|| "writing config.json")?;
    let group = Group::create(
        &config.cgroup_parent,
        spec.id.as_str(),
        &boot_limits(&spec.resources),
    )?;
    let network = spec.network.as_ref();
    let (starting, wire) = if by_runsc {
        let order = Order {
            runsc,
            spec,
            boot,
            dir: &dir,
            disk: on_disk.then_some(&disk),
            first_uid,
            volumes,
        };
        let runsc = run(order, &group, &fifos)?;
        let wire = match boot {
            Boot::Blank => Wire::plug(network)?,
            // It sees to it by itself.
            Boot::Fresh => Wire::LOOPBACK,
        };
        (Starting::Command(runsc), Arc::new(wire))
    } else {
        let mut flags = flags(runsc, &dir, network);
        if matches!(boot, Boot::Blank) {
            flags.push(IGNORE_SPEC.into());
        }
        let order = boot::Order {
            runsc,
            flags,
            id: &spec.id,
            dir: &dir,
            root: &spec.image,
            images: &bundle.images,
            first_uid,
            memory_bytes: spec.resources.memory_bytes,
            layer_size: &layer_size,
            disk: on_disk.then_some(&disk),
        };
        let sentry = boot::start(&order, &group, &fifos)?;
        // While it comes up.
        let wire = Arc::new(Wire::plug(network)?);
        let agent = (!matches!(boot, Boot::Blank)).then(|| Arc::clone(&wire));
        (Starting::Sentry { sentry, agent }, wire)
    };
    Ok(Launched {
        dir,
        record,
        group,
        fifos,
        starting,
        wire,
    })
}

/// What is restored need not be described by the same words as what was saved.
const IGNORE_SPEC: &str = "--restore-spec-validation=ignore";

/// Whether this `runsc` is one of several programs, of which another is the sentry. One built with `go build` is all in one
/// file.
fn sidecars(runsc: &Path) -> bool {
    runsc.with_file_name("gvisor-bin").exists()
}

/// What every `runsc` of an instance is told.
pub(super) fn flags(runsc: &Path, dir: &Path, network: Option<&Network>) -> Vec<OsString> {
    let path = |flag: &str, path: &Path| {
        let mut flag = OsString::from(flag);
        flag.push(path);
        flag
    };
    let mut flags = vec![
        path("--root=", dir),
        path("--log=", &dir.join("runsc.log")),
        path("--panic-log=", &dir.join("panic.log")),
        "--platform=systrap".into(),
        network::flag(network).into(),
        "--ignore-cgroups".into(),
        "--host-uds=none".into(),
        "--net-raw=false".into(),
        // sudo; what it gives is power over the sentry only.
        "--allow-suid".into(),
    ];
    if !sidecars(runsc) {
        flags.push("--sidecar-usage-policy=LEGACY_DEPRECATED_SLOW_EMBEDDED_FALLBACK".into());
    }
    flags
}

/// What `runsc run` needs to know.
struct Order<'a> {
    runsc: &'a Path,
    spec: &'a InstanceSpec,
    boot: Boot,
    dir: &'a Path,
    disk: Option<&'a PathBuf>,
    first_uid: u32,
    volumes: Vec<Volume>,
}

fn run(order: Order<'_>, group: &Group, fifos: &Fifos) -> Result<Child, Cause> {
    let dir = order.dir;
    let meminfo = dir.join("meminfo");
    let kib = order.spec.resources.memory_bytes / 1024;
    fs::write(
        &meminfo,
        format!("MemTotal: {kib} kB\nMemFree: {kib} kB\nMemAvailable: {kib} kB\n"),
    )
    .doing(|| "writing meminfo")?;
    let mut command = Command::new(order.runsc);
    command
        .env_clear()
        .args(flags(order.runsc, dir, order.spec.network.as_ref()));
    if let Some(disk) = order.disk {
        let owner = (
            rustix::fs::Uid::from_raw(order.first_uid),
            rustix::fs::Gid::from_raw(order.first_uid),
        );
        rustix::fs::chown(disk, Some(owner.0), Some(owner.1))
            .doing(|| "giving the writable layer to its uid")?;
        command.arg(format!("--overlay2=root:dir={}", disk.display()));
    }
    match order.boot {
        Boot::Fresh => {
            command.args(["run", "-detach"]);
        }
        Boot::Blank => {
            command.args([IGNORE_SPEC, "create"]);
        }
    }
    command
        .arg("-pid-file")
        .arg(dir.join(PID_FILE))
        .arg("-bundle")
        .arg(dir)
        .arg(order.spec.id.as_str());
    spawn(&mut command, &meminfo, order.volumes, group, fifos)
        .doing(|| format!("starting {}", order.runsc.display()))
}

fn spawn(
    command: &mut Command,
    meminfo: &Path,
    volumes: Vec<Volume>,
    group: &Group,
    fifos: &Fifos,
) -> io::Result<Child> {
    let (stdin, stdout) = fifos.open_for_guest()?;
    let entry = group.entry()?;
    let meminfo = CString::new(meminfo.as_os_str().as_bytes())?;
    command
        .stdin(Stdio::from(stdin))
        .stdout(Stdio::from(stdout))
        .stderr(Stdio::null());
    // SAFETY: between fork and exec only async-signal-safe things happen: `enter`, `show_meminfo` and `attach` are system
    // calls on values that were made before the fork; none allocates or locks.
    unsafe {
        command.pre_exec(move || {
            entry.enter()?;
            show_meminfo(&meminfo)?;
            volumes.iter().try_for_each(Volume::attach)
        });
    }
    command.spawn()
}

/// In a mount namespace of its own, replaces `/proc/meminfo` by a file that states the guest's limit.
fn show_meminfo(file: &CString) -> io::Result<()> {
    let check = |result: libc::c_int| match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    };
    let none = std::ptr::null();
    // SAFETY: the calling process has one thread; all pointers are to NUL-terminated strings that outlive the calls.
    unsafe {
        check(libc::unshare(libc::CLONE_NEWNS))?;
        check(libc::mount(
            none,
            c"/".as_ptr(),
            none,
            libc::MS_REC | libc::MS_PRIVATE,
            none.cast(),
        ))?;
        check(libc::mount(
            file.as_ptr(),
            c"/proc/meminfo".as_ptr(),
            none,
            libc::MS_BIND,
            none.cast(),
        ))
    }
}

/// What `runsc` wrote when it failed, if it did.
pub(super) fn complaint(dir: &Path) -> Option<Told> {
    let text = fs::read_to_string(dir.join("runsc.log")).unwrap_or_default();
    let messages: Vec<String> = text
        .lines()
        .map(|line| {
            serde_json::from_str::<serde_json::Value>(line)
                .ok()
                .and_then(|value| value.get("msg")?.as_str().map(str::to_owned))
                .unwrap_or_else(|| line.to_owned())
        })
        .collect();
    let all = messages.join("; ");
    (!all.is_empty()).then(|| Told::by_host(&all))
}

/// Why a sandbox process ended, as far as it told.
pub(super) fn post_mortem(dir: &Path) -> String {
    use std::io::Read;
    let mut text = Vec::new();
    if let Ok(file) = fs::File::open(dir.join("panic.log")) {
        let _ = file.take(4096).read_to_end(&mut text);
    }
    match String::from_utf8_lossy(&text)
        .lines()
        .find(|line| !line.trim().is_empty())
    {
        Some(line) => format!("the sandbox process failed: {line}"),
        None => "the sandbox process ended".into(),
    }
}

/// Whether this version, as [`version`] says it, can limit how many files a writable layer holds; only ours can.
pub(super) fn counts_files(version: &str) -> bool {
    let ours = version.rsplit(' ').next().and_then(|word| word.split_once('.'));
    let (Some(day), Some(build)) = ours.map_or((None, None), |(day, build)| {
        (day.parse::<u32>().ok(), build.parse::<u32>().ok())
    }) else {
        return false;
    };
    (day, build) >= (20_260_905, 5)
}

/// What `runsc --version` says, in one line.
pub fn version(runsc: &Path) -> Result<String, Cause> {
    let output = std::process::Command::new(runsc)
        .arg("--version")
        .env_clear()
        .stdin(Stdio::null())
        .output()
        .doing(|| format!("{} cannot be run", runsc.display()))?;
    let text = String::from_utf8_lossy(&output.stdout);
    match text.lines().next() {
        Some(line) if output.status.success() => Ok(line.trim().to_owned()),
        _ => Err(Cause::said(&format!(
            "{} --version ended with {}: {}",
            runsc.display(),
            output.status,
            String::from_utf8_lossy(&output.stderr).trim()
        ))),
    }
}

/// The processor's features, as far as saved memory depends on them; in order.
pub(super) fn cpu_features(runsc: &Path) -> Vec<String> {
    let output = std::process::Command::new(runsc)
        .arg("cpu-features")
        .env_clear()
        .stdin(Stdio::null())
        .output();
    let text = output.map_or_else(|_| Vec::new(), |output| output.stdout);
    let text = String::from_utf8_lossy(&text);
    let mut features: Vec<String> = text
        .split(|c: char| c == ',' || c.is_whitespace())
        .filter(|feature| !feature.is_empty())
        .map(str::to_owned)
        .collect();
    features.sort_unstable();
    features
}
