//! What the machine holds on behalf of one server: processes, cgroups, mounts, loop devices, namespaces, links. Looked at
//! from outside, through `/proc` and `/sys`; and taken away by force when a run ends early.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::mount::UnmountFlags;
use rustix::process::{Pid, Signal};

/// How long processes that were killed may take to be gone.
pub(super) const GONE_WITHIN: Duration = Duration::from_secs(5);

pub(super) fn kill(pid: u32, signal: Signal) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        // It may have ended by itself.
        let _gone = rustix::process::kill_process(pid, signal);
    }
}

/// How many entries a directory of `/proc` has, such as `fd` or `task`.
pub(super) fn count(pid: u32, what: &str) -> u64 {
    fs::read_dir(format!("/proc/{pid}/{what}")).map_or(0, |entries| entries.count() as u64)
}

/// Where cgroups are mounted here.
fn hierarchies() -> BTreeSet<PathBuf> {
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

fn cgroup_dirs(name: &str) -> Vec<PathBuf> {
    let dirs = hierarchies().into_iter().map(|point| point.join(name));
    dirs.filter(|dir| dir.is_dir()).collect()
}

/// The groups below a cgroup, in whichever hierarchy.
pub(super) fn cgroups(name: &str) -> BTreeSet<String> {
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
fn cgroup_processes(name: &str) -> BTreeSet<u32> {
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

/// Processes of a server's sandboxes: in its cgroup, or with its directory on their command line.
pub(super) fn processes(dir: &Path, cgroup: &str, server: u32) -> BTreeSet<u32> {
    let mut found = cgroup_processes(cgroup);
    let named = dir.display().to_string();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        if String::from_utf8_lossy(&line).contains(&named) {
            found.insert(pid);
        }
    }
    found.remove(&server);
    found.remove(&std::process::id());
    found
}

/// Mount points below a directory, not the directory itself.
pub(super) fn mounts_below(dir: &Path) -> Vec<PathBuf> {
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let points = table
        .lines()
        .filter_map(|line| line.split(' ').nth(4).map(PathBuf::from));
    points
        .filter(|point| point.starts_with(dir) && point != dir)
        .collect()
}

/// Loop devices whose file lies below a directory.
pub(super) fn loops_below(dir: &Path) -> u64 {
    let mut found = 0;
    for entry in fs::read_dir("/sys/block").into_iter().flatten().flatten() {
        let file = fs::read_to_string(entry.path().join("loop/backing_file")).unwrap_or_default();
        // What was deleted under it is marked so.
        found += u64::from(file.trim().starts_with(&*dir.to_string_lossy()));
    }
    found
}

/// What is left of a server that has ended, in words; nothing is an empty list.
pub(super) fn left(dir: &Path, cgroup: &str) -> Vec<String> {
    let processes = processes(dir, cgroup, 0);
    let mut left: Vec<String> = processes
        .iter()
        .map(|pid| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let line = String::from_utf8_lossy(&line).replace('\0', " ");
            format!("process {pid} ({})", line.chars().take(60).collect::<String>())
        })
        .collect();
    let counts = [
        ("cgroups", cgroups(cgroup).len() as u64),
        ("mounts", mounts_below(dir).len() as u64),
        ("loop devices", loops_below(dir)),
    ];
    left.extend(
        counts
            .into_iter()
            .filter(|(_, count)| *count > 0)
            .map(|(what, count)| format!("{count} {what}")),
    );
    left
}

/// Network namespaces that threads of a process are in, and the links in them, apart from those of this process's own.
pub(super) fn links(pid: u32) -> (u64, u64) {
    let own = fs::read_link("/proc/self/ns/net").unwrap_or_default();
    let mut namespaces = BTreeSet::new();
    let mut links = 0;
    for task in fs::read_dir(format!("/proc/{pid}/task"))
        .into_iter()
        .flatten()
        .flatten()
    {
        let namespace = fs::read_link(task.path().join("ns/net")).unwrap_or_default();
        if namespace != own && namespaces.insert(namespace) {
            let table = fs::read_to_string(task.path().join("net/dev")).unwrap_or_default();
            links += table.lines().skip(2).count() as u64;
        }
    }
    (namespaces.len() as u64, links)
}

/// Takes away all that a server and its sandboxes may have left on the machine, but for files.
pub(super) fn sweep(dir: &Path, cgroup: &str) {
    let began = Instant::now();
    loop {
        for group in cgroup_dirs(cgroup) {
            thaw(&group);
        }
        let left = processes(dir, cgroup, 0);
        for pid in &left {
            kill(*pid, Signal::KILL);
        }
        if left.is_empty() || began.elapsed() > GONE_WITHIN {
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    // What was mounted last goes first.
    for point in mounts_below(dir).into_iter().rev() {
        let _gone = rustix::mount::unmount(&point, UnmountFlags::DETACH);
    }
    for group in cgroup_dirs(cgroup) {
        for entry in fs::read_dir(&group).into_iter().flatten().flatten() {
            let _not_a_group = fs::remove_dir(entry.path());
        }
        let _in_use = fs::remove_dir(&group);
    }
}

/// Who is frozen does not die.
fn thaw(dir: &Path) {
    for (file, word) in [("freezer.state", "THAWED"), ("cgroup.freeze", "0")] {
        if dir.join(file).exists() {
            let _gone = fs::write(dir.join(file), word);
        }
    }
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            thaw(&entry.path());
        }
    }
}
