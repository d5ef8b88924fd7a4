//! What a server holds on the machine, so that a test can say "nothing" or "the same as before".

use std::fmt;
use std::path::Path;

use crate::host;

/// Everything on the host that belongs to the instances of one server; the server itself is not in it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Held {
    /// In the server's cgroups, or naming its data directory on their command line.
    pub processes: Vec<(u32, String)>,
    pub cgroups: Vec<String>,
    pub mounts: Vec<String>,
    /// By the files that they are of.
    pub loop_devices: Vec<String>,
    pub instances: Vec<String>,
    pub uid_ranges: Vec<String>,
    pub fifos: Vec<String>,
}

impl Held {
    pub(crate) fn look(data: &Path, cgroup: &str, server: Option<u32>) -> Self {
        let mut processes = host::processes_naming(data);
        for pid in host::cgroup_processes(cgroup) {
            if !processes.iter().any(|(known, _)| *known == pid) {
                processes.push((pid, "(in a cgroup of the server)".into()));
            }
        }
        let helper = server.and_then(host::helper_of);
        processes.retain(|(pid, _)| Some(*pid) != server && Some(*pid) != helper);
        let shown = |paths: Vec<std::path::PathBuf>| -> Vec<String> {
            paths.iter().map(|path| path.display().to_string()).collect()
        };
        let instances = data.join("instances");
        Self {
            processes,
            cgroups: host::cgroup_children(cgroup).into_iter().collect(),
            // A server that runs keeps its gateway, whether anybody is behind it or not.
            mounts: shown(host::mounts_below(data))
                .into_iter()
                .filter(|path| server.is_none() || !path.ends_with("/network/gateway"))
                .collect(),
            loop_devices: shown(host::loop_devices_below(data)),
            fifos: shown(host::fifos_below(&instances))
                .into_iter()
                .filter(|path: &String| !path.contains("/.new-"))
                .collect(),
            // A directory that a killed server had not named yet is removed by a later one, once it is surely nobody's.
            instances: host::names_in(&instances)
                .into_iter()
                .filter(|name| !name.starts_with(".new-"))
                .collect(),
            uid_ranges: host::names_in(&data.join("uids")).into_iter().collect(),
        }
    }

    pub fn is_nothing(&self) -> bool {
        *self == Self::default()
    }
}

impl fmt::Display for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (pid, line) in &self.processes {
            writeln!(f, "  process {pid}: {line}")?;
        }
        for (what, names) in [
            ("cgroup", &self.cgroups),
            ("mount", &self.mounts),
            ("loop device", &self.loop_devices),
            ("instance directory", &self.instances),
            ("range of user ids", &self.uid_ranges),
            ("FIFO", &self.fifos),
        ] {
            for name in names {
                writeln!(f, "  {what} {name}")?;
            }
        }
        Ok(())
    }
}
