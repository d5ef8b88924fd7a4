//! From a specification to a running `runsc`: files, cgroup, fork, exec. Blocking, about 2 ms.
#![expect(
    unsafe_code,
    reason = "the child prepares its cgroup and its mounts between fork and exec"
)]

use std::ffi::CString;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use atoll_types::{DiskBacking, Isolation};
use tokio::process::{Child, Command};

use super::restore::Boot;
use super::volumes::{self, Volume};
use super::{boot_limits, bundle};
use crate::cgroup::Group;
use crate::channel::Fifos;
use crate::instance_dir::{InstanceDirs, Record};
use crate::{Config, InstanceSpec, uids};

/// Where `runsc` writes the pid of the sandbox process, before the agent runs.
pub(super) const PID_FILE: &str = "pid";

#[derive(Debug)]
pub(super) struct Launched {
    pub(super) dir: PathBuf,
    /// As on disk, except that the process is still to be added.
    pub(super) record: Record,
    pub(super) group: Group,
    pub(super) fifos: Fifos,
    /// The `runsc` that starts the sandbox process and ends.
    pub(super) child: Child,
}

/// Makes the instance's directory; whoever does has to clean up afterwards. Fails if there is one.
pub(super) fn claim(dirs: &InstanceDirs, spec: &InstanceSpec) -> io::Result<Record> {
    let record = Record {
        id: spec.id.clone(),
        isolation: Isolation::Gvisor,
        image: spec.image.clone(),
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
    boot: &Boot,
    mut record: Record,
) -> Result<Launched, String> {
    let say = |what: &str| {
        let what = what.to_owned();
        move |error: io::Error| format!("{what}: {error}")
    };
    let fifos = Fifos::in_dir(&dir);
    let first_uid = uids::take(&config.state_dir, &spec.id).map_err(say("taking a range of user ids"))?;
    record.id_base = Some(first_uid);
    let empty = config.state_dir.join("empty");
    if !empty.exists() {
        fs::create_dir_all(&empty).map_err(say("making an empty directory"))?;
    }
    let disk = dir.join("disk");
    if spec.resources.disk_backing == DiskBacking::Disk {
        fs::create_dir(&disk).map_err(say("making the directory of the writable layer"))?;
        rustix::fs::chown(
            &disk,
            Some(rustix::fs::Uid::from_raw(first_uid)),
            Some(rustix::fs::Gid::from_raw(first_uid)),
        )
        .map_err(|error| format!("giving the writable layer to its uid: {error}"))?;
    }
    let places = bundle::Places {
        empty: &empty,
        guest_image: &config.guest_image,
        dir: &dir,
        disk: &disk,
    };
    let volumes = volumes::take(&spec.mounts, &dir, first_uid)?;
    fs::write(dir.join("config.json"), bundle::config(spec, &places, first_uid))
        .map_err(say("writing config.json"))?;
    let kib = spec.resources.memory_bytes / 1024;
    let meminfo = dir.join("meminfo");
    fs::write(
        &meminfo,
        format!("MemTotal: {kib} kB\nMemFree: {kib} kB\nMemAvailable: {kib} kB\n"),
    )
    .map_err(say("writing meminfo"))?;
    let group = Group::create(
        &config.cgroup_parent,
        spec.id.as_str(),
        &boot_limits(&spec.resources),
    )
    .map_err(|error| error.to_string())?;
    let mut command = command(runsc, spec, boot, &dir, &disk);
    let child = spawn(&mut command, &meminfo, volumes, &group, &fifos)
        .map_err(|error| format!("starting {}: {error}", runsc.display()))?;
    Ok(Launched {
        dir,
        record,
        group,
        fifos,
        child,
    })
}

/// What `runsc` is asked to do.
fn command(runsc: &Path, spec: &InstanceSpec, boot: &Boot, dir: &Path, disk: &Path) -> Command {
    let mut command = Command::new(runsc);
    command
        .env_clear()
        .arg("--root")
        .arg(dir)
        .arg("--log")
        .arg(dir.join("runsc.log"))
        .arg("--panic-log")
        .arg(dir.join("panic.log"))
        .args([
            "--platform=systrap",
            "--network=none",
            "--ignore-cgroups",
            "--host-uds=none",
            "--net-raw=false",
            // sudo; what it gives is power over the sentry only.
            "--allow-suid",
        ]);
    if !runsc.with_file_name("gvisor-bin").exists() {
        // Built with `go build`, all in one file. (A release directory has its parts beside it.)
        command.arg("--sidecar-usage-policy=LEGACY_DEPRECATED_SLOW_EMBEDDED_FALLBACK");
    }
    if spec.resources.disk_backing == DiskBacking::Disk {
        command.arg(format!("--overlay2=root:dir={}", disk.display()));
    }
    match boot {
        Boot::Fresh => {
            command.args(["run", "-detach"]);
        }
        Boot::Blank => {
            command.args(["--restore-spec-validation=ignore", "create"]);
        }
        Boot::Layer(layer, _) => {
            command
                .args(["run", "-detach", "-fs-restore-image-path"])
                .arg(layer);
        }
    }
    command
        .arg("-pid-file")
        .arg(dir.join(PID_FILE))
        .arg("-bundle")
        .arg(dir)
        .arg(spec.id.as_str());
    command
}

fn spawn(
    command: &mut Command,
    meminfo: &Path,
    volumes: Vec<Volume>,
    group: &Group,
    fifos: &Fifos,
) -> io::Result<Child> {
    let (stdin, stdout) = fifos.open_for_guest()?;
    let entry = group.entry().map_err(io::Error::other)?;
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

/// What `runsc` wrote when it failed; empty if it did not.
pub(super) fn complaint(dir: &Path) -> String {
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
    messages.join("; ").chars().take(2000).collect()
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

/// What `runsc --version` says, in one line.
pub fn version(runsc: &Path) -> Result<String, String> {
    let output = std::process::Command::new(runsc)
        .arg("--version")
        .env_clear()
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("{} cannot be run: {error}", runsc.display()))?;
    let text = String::from_utf8_lossy(&output.stdout);
    match text.lines().next() {
        Some(line) if output.status.success() => Ok(line.trim().to_owned()),
        _ => Err(format!(
            "{} --version ended with {}: {}",
            runsc.display(),
            output.status,
            String::from_utf8_lossy(&output.stderr).trim()
        )),
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
