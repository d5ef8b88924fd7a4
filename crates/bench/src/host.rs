//! What the host says about processes, cgroups and disks: memory and CPU of the server, memory charged to a peer, what
//! sandboxes hold.

use std::fs;
use std::path::{Path, PathBuf};

/// Resident memory of a process, in bytes.
pub(crate) fn resident(pid: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find(|line| line.starts_with("VmRSS:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib * 1024)
}

/// CPU time that a process has spent, in milliseconds.
pub(crate) fn cpu_millis(pid: u32) -> Option<f64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name may contain anything, but ends with the last parenthesis.
    let fields: Vec<&str> = stat[stat.rfind(')')? + 2..].split_whitespace().collect();
    let ticks: f64 = fields.get(11)?.parse::<f64>().ok()? + fields.get(12)?.parse::<f64>().ok()?;
    let per_second = rustix::param::clock_ticks_per_second() as f64;
    Some(ticks / per_second * 1000.0)
}

/// A cgroup of our own in which a peer's memory is counted; removed when dropped.
#[derive(Debug)]
pub(crate) struct MemoryGroup {
    path: PathBuf,
    usage: &'static str,
}

impl MemoryGroup {
    /// `None` where we may not make one.
    pub(crate) fn new() -> Option<Self> {
        let name = format!("atoll-bench-{}", std::process::id());
        let candidates = [
            ("/sys/fs/cgroup/memory", "memory.usage_in_bytes"),
            ("/sys/fs/cgroup", "memory.current"),
        ];
        candidates.into_iter().find_map(|(parent, usage)| {
            let path = Path::new(parent).join(&name);
            fs::create_dir(&path).ok()?;
            let group = Self { path, usage };
            group.bytes().is_some().then_some(group)
        })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn bytes(&self) -> Option<u64> {
        fs::read_to_string(self.path.join(self.usage))
            .ok()?
            .trim()
            .parse()
            .ok()
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        let _busy = fs::remove_dir(&self.path);
    }
}

/// The cgroup below which a server under test keeps its sandboxes; removed when dropped.
#[derive(Debug)]
pub(crate) struct SandboxGroup {
    name: String,
}

impl SandboxGroup {
    pub(crate) fn new() -> Self {
        Self {
            name: format!("atoll-bench-{}", std::process::id()),
        }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// How many processes there are in it.
    pub(crate) fn processes(&self) -> usize {
        let below = format!("/{}/", self.name);
        let mut count = 0;
        for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
            let groups = fs::read_to_string(entry.path().join("cgroup")).unwrap_or_default();
            count += usize::from(groups.contains(&below));
        }
        count
    }

    /// Bytes charged to the sandboxes that are in it.
    pub(crate) fn memory(&self) -> u64 {
        let mut bytes = 0;
        for (dir, usage) in [
            ("/sys/fs/cgroup/memory", "memory.usage_in_bytes"),
            ("/sys/fs/cgroup", "memory.current"),
        ] {
            let each = fs::read_dir(Path::new(dir).join(&self.name));
            for group in each.into_iter().flatten().flatten() {
                let text = fs::read_to_string(group.path().join(usage)).unwrap_or_default();
                bytes += text.trim().parse::<u64>().unwrap_or_default();
            }
        }
        bytes
    }
}

impl Drop for SandboxGroup {
    fn drop(&mut self) {
        // On v1 there is one per controller.
        let controllers = fs::read_dir("/sys/fs/cgroup").into_iter().flatten().flatten();
        let roots = controllers.map(|entry| entry.path());
        for root in roots.chain([PathBuf::from("/sys/fs/cgroup")]) {
            let _absent = fs::remove_dir(root.join(&self.name));
        }
    }
}

/// Bytes that the files of a directory take up on the disk.
pub(crate) fn allocated(dir: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt as _;
    let mut bytes = 0;
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        match entry.metadata() {
            Ok(data) if data.is_dir() => bytes += allocated(&entry.path()),
            Ok(data) => bytes += data.blocks() * 512,
            Err(_) => {}
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    #[test]
    fn this_process_can_be_measured() {
        let pid = std::process::id();
        assert!(super::resident(pid).is_some_and(|bytes| bytes > 100_000));
        assert!(super::cpu_millis(pid).is_some());
    }
}
