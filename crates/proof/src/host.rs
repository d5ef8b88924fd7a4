//! The machine from outside: processes, mounts, cgroups and directories that belong to one server.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use rustix::process::{Pid, Signal};

/// A field of `/proc/<pid>/status` in bytes, such as `VmRSS` or `VmHWM`.
pub fn status_bytes(pid: u32, field: &str) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

/// How many descriptors a process has open.
pub fn open_files(pid: u32) -> usize {
    fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count)
}

/// Every process that runs (zombies do not), with its command line.
pub fn processes() -> Vec<(u32, String)> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse::<u32>().ok())
        else {
            continue;
        };
        let Ok(line) = fs::read(entry.path().join("cmdline")) else {
            continue;
        };
        if !line.is_empty() {
            let line = String::from_utf8_lossy(&line).replace('\0', " ");
            found.push((pid, line.trim().to_owned()));
        }
    }
    found
}

/// Processes whose command line names this directory.
pub fn processes_naming(dir: &Path) -> Vec<(u32, String)> {
    let dir = dir.display().to_string();
    let own = std::process::id();
    processes()
        .into_iter()
        .filter(|(pid, line)| *pid != own && line.contains(&dir))
        .collect()
}

/// The helper of a server, if it has one.
pub fn helper_of(server: u32) -> Option<u32> {
    let parent = format!("PPid:\t{server}");
    let mut found = fs::read_dir("/proc").ok()?.flatten().filter_map(|entry| {
        let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
        let status = fs::read_to_string(entry.path().join("status")).ok()?;
        let is_it = status.starts_with("Name:\tatoll-helper\n") && status.lines().any(|line| line == parent);
        is_it.then_some(pid)
    });
    found.next()
}

/// Whether a process runs, and is not only waited for.
pub fn runs(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/status"))
        .is_ok_and(|status| !status.lines().any(|line| line.starts_with("State:\tZ")))
}

pub fn kill(pid: u32, signal: Signal) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        // It may have ended by itself.
        let _gone = rustix::process::kill_process(pid, signal);
    }
}

/// Mount points of this namespace at or below a directory.
pub fn mounts_below(dir: &Path) -> Vec<PathBuf> {
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let points = table
        .lines()
        .filter_map(|line| line.split(' ').nth(4).map(PathBuf::from));
    points.filter(|point| point.starts_with(dir)).collect()
}

/// The files of loop devices that lie below a directory.
pub fn loop_devices_below(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/sys/block").into_iter().flatten().flatten() {
        let file = fs::read_to_string(entry.path().join("loop/backing_file")).unwrap_or_default();
        let file = PathBuf::from(file.trim());
        if file.starts_with(dir) {
            found.push(file);
        }
    }
    found
}

/// Where cgroups are mounted here.
pub fn cgroup_hierarchies() -> BTreeSet<PathBuf> {
    let table = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let mut points = BTreeSet::new();
    for line in table.lines() {
        let mut fields = line.split(' ').skip(1);
        if let (Some(point), Some("cgroup" | "cgroup2")) = (fields.next(), fields.next()) {
            points.insert(PathBuf::from(point));
        }
    }
    points
}

/// Whose process it is.
pub fn uid(pid: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    line.split_whitespace().next()?.parse().ok()
}

/// The directories that together are the cgroup `name`, in every hierarchy that is mounted here.
pub fn cgroup_dirs(name: &str) -> Vec<PathBuf> {
    let dirs = cgroup_hierarchies().into_iter().map(|point| point.join(name));
    dirs.filter(|dir| dir.is_dir()).collect()
}

/// The groups below a cgroup, by name, without repetition.
pub fn cgroup_children(name: &str) -> BTreeSet<String> {
    let mut children = BTreeSet::new();
    for dir in cgroup_dirs(name) {
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                children.insert(entry.file_name().to_string_lossy().into_owned());
            }
        }
    }
    children
}

/// The processes in a cgroup and all groups below it.
pub fn cgroup_processes(name: &str) -> BTreeSet<u32> {
    fn collect(dir: &Path, into: &mut BTreeSet<u32>) {
        let procs = fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
        into.extend(procs.lines().filter_map(|line| line.parse::<u32>().ok()));
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                collect(&entry.path(), into);
            }
        }
    }
    let mut pids = BTreeSet::new();
    for dir in cgroup_dirs(name) {
        collect(&dir, &mut pids);
    }
    pids
}

/// Kills everything in a cgroup and waits until it is empty.
pub fn cgroup_kill(name: &str) {
    crate::wait::becomes_true(std::time::Duration::from_secs(10), || {
        let pids = cgroup_processes(name);
        for pid in &pids {
            kill(*pid, Signal::KILL);
        }
        // What a v1 freezer holds still dies only when it goes on.
        for dir in cgroup_dirs(name) {
            thaw(&dir);
        }
        pids.is_empty()
    });
}

fn thaw(dir: &Path) {
    let state = dir.join("freezer.state");
    if state.exists() {
        // It may be gone by now.
        let _gone = fs::write(state, "THAWED");
    }
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            thaw(&entry.path());
        }
    }
}

/// Removes a cgroup and the groups below it; they must be empty.
pub fn cgroup_remove(name: &str) {
    for dir in cgroup_dirs(name) {
        for entry in fs::read_dir(&dir).into_iter().flatten().flatten() {
            let _not_a_group = fs::remove_dir(entry.path());
        }
        let _in_use = fs::remove_dir(&dir);
    }
}

/// What a directory holds, by name; nothing if it is not there.
pub fn names_in(dir: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect()
}

/// The FIFOs at any depth below a directory.
pub fn fifos_below(dir: &Path) -> Vec<PathBuf> {
    use std::os::unix::fs::FileTypeExt;
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => found.extend(fifos_below(&entry.path())),
            Ok(kind) if kind.is_fifo() => found.push(entry.path()),
            _ => {}
        }
    }
    found
}

/// What a file holds, without its holes: the disk of a sandbox may be nothing else.
pub fn data_of(path: &Path) -> std::io::Result<Vec<u8>> {
    use std::os::unix::fs::FileExt as _;
    let file = fs::File::open(path)?;
    let (mut all, mut at) = (Vec::new(), 0);
    while let Ok(start) = rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(at)) {
        at = rustix::fs::seek(&file, rustix::fs::SeekFrom::Hole(start))?;
        let had = all.len();
        all.resize(had + usize::try_from(at - start).expect("it fits into memory"), 0);
        file.read_exact_at(&mut all[had..], start)?;
    }
    Ok(all)
}

/// Every file below a directory; what cannot be read is left out.
pub fn files_below(dir: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(dir) else {
        return Vec::new();
    };
    let mut files = Vec::new();
    for entry in entries.flatten() {
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => files.extend(files_below(&entry.path())),
            Ok(kind) if kind.is_file() => files.push(entry.path()),
            _ => {}
        }
    }
    files
}
