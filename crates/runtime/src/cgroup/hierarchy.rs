//! Where the groups of this machine are, on cgroup v2 or v1.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use super::CgroupError;

/// Where this machine keeps its groups.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Hierarchy {
    /// One mount per controller.
    V1 {
        memory: PathBuf,
        cpu: PathBuf,
        cpuacct: PathBuf,
        pids: PathBuf,
    },
    /// One mount for all.
    V2 { root: PathBuf },
}

impl Hierarchy {
    /// Reads the mount table, until it was found in it.
    pub fn detect() -> Result<&'static Self, CgroupError> {
        static FOUND: OnceLock<Hierarchy> = OnceLock::new();
        if let Some(found) = FOUND.get() {
            return Ok(found);
        }
        let mounts = fs::read_to_string("/proc/self/mounts")
            .map_err(|error| CgroupError::Unavailable(format!("cannot read /proc/self/mounts: {error}")))?;
        let found = Self::from_mounts(&mounts, |root| {
            fs::read_to_string(root.join("cgroup.controllers")).unwrap_or_default()
        })?;
        Ok(FOUND.get_or_init(|| found))
    }

    fn from_mounts(mounts: &str, v2_controllers: impl Fn(&Path) -> String) -> Result<Self, CgroupError> {
        let mut v1: [(&str, Option<PathBuf>); 4] =
            [("memory", None), ("cpu", None), ("cpuacct", None), ("pids", None)];
        for line in mounts.lines() {
            let mut fields = line.split(' ').skip(1);
            let (Some(target), Some(kind), Some(options)) = (fields.next(), fields.next(), fields.next())
            else {
                continue;
            };
            match kind {
                "cgroup2" => {
                    let root = PathBuf::from(target);
                    let offered = v2_controllers(&root);
                    let has = |name: &str| offered.split_whitespace().any(|offer| offer == name);
                    if ["memory", "cpu", "pids"].into_iter().all(has) {
                        return Ok(Self::V2 { root });
                    }
                }
                "cgroup" => {
                    for (name, place) in &mut v1 {
                        if options.split(',').any(|option| option == *name) {
                            place.get_or_insert_with(|| PathBuf::from(target));
                        }
                    }
                }
                _ => {}
            }
        }
        match v1 {
            [
                (_, Some(memory)),
                (_, Some(cpu)),
                (_, Some(cpuacct)),
                (_, Some(pids)),
            ] => Ok(Self::V1 {
                memory,
                cpu,
                cpuacct,
                pids,
            }),
            missing => {
                let names: Vec<_> = missing
                    .iter()
                    .filter(|(_, place)| place.is_none())
                    .map(|(name, _)| *name)
                    .collect();
                Err(CgroupError::Unavailable(format!(
                    "neither a cgroup v2 mount with the memory, cpu and pids controllers nor v1 mounts of all of \
                     them were found (v1 lacks: {}); mount cgroup2 at /sys/fs/cgroup or enable the controllers",
                    names.join(", ")
                )))
            }
        }
    }

    /// The distinct directories that together hold the group `relative`.
    pub(super) fn dirs(&self, relative: &Path) -> Vec<PathBuf> {
        let mut dirs: Vec<PathBuf> = match self {
            Self::V1 {
                memory,
                cpu,
                cpuacct,
                pids,
            } => [memory, cpu, cpuacct, pids]
                .into_iter()
                .map(|mount| mount.join(relative))
                .collect(),
            Self::V2 { root } => vec![root.join(relative)],
        };
        dirs.dedup();
        dirs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_are_understood() {
        let v1 = "cgroup /sys/fs/cgroup/cpu cgroup rw,relatime,cpu 0 0\n\
                  cgroup /sys/fs/cgroup/cpuacct cgroup rw,relatime,cpuacct 0 0\n\
                  cgroup /sys/fs/cgroup/memory cgroup rw,relatime,memory 0 0\n\
                  cgroup /sys/fs/cgroup/pids cgroup rw,relatime,pids 0 0\n\
                  cgroup2 /sys/fs/cgroup/unified cgroup2 rw,relatime 0 0\n";
        assert_eq!(
            Hierarchy::from_mounts(v1, |_| String::new()).unwrap(),
            Hierarchy::V1 {
                memory: "/sys/fs/cgroup/memory".into(),
                cpu: "/sys/fs/cgroup/cpu".into(),
                cpuacct: "/sys/fs/cgroup/cpuacct".into(),
                pids: "/sys/fs/cgroup/pids".into(),
            }
        );
        let joined = v1
            .replace(
                "/cgroup/cpu cgroup rw,relatime,cpu ",
                "/cgroup/cpu,cpuacct cgroup rw,cpu,cpuacct ",
            )
            .replace(
                "cgroup /sys/fs/cgroup/cpuacct cgroup rw,relatime,cpuacct 0 0\n",
                "",
            );
        let found = Hierarchy::from_mounts(&joined, |_| String::new()).unwrap();
        assert_eq!(found.dirs(Path::new("x")).len(), 3, "{found:?}");
        let v2 = "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n";
        assert_eq!(
            Hierarchy::from_mounts(v2, |_| "cpuset cpu io memory pids\n".into()).unwrap(),
            Hierarchy::V2 {
                root: "/sys/fs/cgroup".into()
            }
        );
        let error = Hierarchy::from_mounts(v2, |_| "cpu pids".into()).unwrap_err();
        assert!(error.to_string().contains("v1 lacks: memory"), "{error}");
    }
}
