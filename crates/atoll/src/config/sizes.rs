//! How large sandboxes are, as the configuration file and the command line write it: of a pool, and of everybody who does not
//! say.

use atoll_client::output::{Error, Result};
use atoll_types::{DiskBacking, Resources, ResourcesAsked, format_bytes, parse_bytes};
use serde::Deserialize;

use crate::args::parse_cpu;

/// The names of what can be set, for messages.
pub(super) const NAMES: &str = "memory, cpu, disk, disk_backing, pids";

/// Sets one of them. `false`: it is none of them.
pub(super) fn set(asked: &mut ResourcesAsked, name: &str, value: &str) -> std::result::Result<bool, String> {
    match name {
        "memory" => asked.memory_bytes = Some(parse_bytes(value)?),
        "cpu" => asked.cpu_millis = Some(parse_cpu(value)?),
        "disk" => asked.disk_bytes = Some(parse_bytes(value)?),
        "disk_backing" => {
            asked.disk_backing = Some(match value {
                "memory" => DiskBacking::Memory,
                "disk" => DiskBacking::Disk,
                _ => return Err(format!("`{value}` is no place for files; one of memory, disk")),
            });
        }
        "pids" => {
            let pids = value.parse();
            asked.pids = Some(pids.map_err(|_| format!("`{value}` is not a number of processes"))?);
        }
        _ => return Ok(false),
    }
    Ok(true)
}

/// `2`, `0.5` or `"0.5"`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(untagged)]
pub(crate) enum Cores {
    Number(f64),
    Text(String),
}

impl Cores {
    pub(super) fn into_text(self) -> String {
        match self {
            Self::Number(cores) => cores.to_string(),
            Self::Text(cores) => cores,
        }
    }
}

/// The `[sandbox]` table: how large a sandbox is whose creator and template do not say, and how large one may be. Every key is
/// optional.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct SandboxTable {
    /// Cores, such as `2` or `0.5`. Default: 2.
    cpu: Option<Cores>,
    /// Such as `"512M"`. Default: `"1G"`.
    memory: Option<String>,
    /// Room for files, such as `"20G"`; it is taken from the server's disk as it is used. Default: `"10G"`.
    disk: Option<String>,
    /// Where those files are: `disk`, or `memory`, where they count as memory. Default: `disk`, where the machine can do that.
    disk_backing: Option<String>,
    /// Processes and threads. Default: 512.
    pids: Option<u32>,
    /// The most that can be asked for. Default: 64 cores.
    max_cpu: Option<Cores>,
    /// The same. Default: `"64G"`.
    max_memory: Option<String>,
    /// The same. Default: `"1024G"`.
    max_disk: Option<String>,
    /// The same. Default: 32768.
    max_pids: Option<u32>,
}

/// What that table says, read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct SandboxSizes {
    pub(crate) usual: ResourcesAsked,
    /// `disk_backing` says nothing here.
    pub(crate) most: ResourcesAsked,
}

impl SandboxTable {
    pub(super) fn read(self) -> Result<SandboxSizes> {
        let mut sizes = SandboxSizes::default();
        let pids = |pids: Option<u32>| pids.map(|pids| pids.to_string());
        let usual = [
            ("cpu", self.cpu.map(Cores::into_text)),
            ("memory", self.memory),
            ("disk", self.disk),
            ("disk_backing", self.disk_backing),
            ("pids", pids(self.pids)),
        ];
        let most = [
            ("cpu", self.max_cpu.map(Cores::into_text)),
            ("memory", self.max_memory),
            ("disk", self.max_disk),
            ("pids", pids(self.max_pids)),
        ];
        let tables = [
            ("", &mut sizes.usual, &usual[..]),
            ("max_", &mut sizes.most, &most[..]),
        ];
        for (prefix, asked, settings) in tables {
            for (name, value) in settings {
                if let Some(value) = value {
                    set(asked, name, value)
                        .map_err(|why| Error::new(format!("`{prefix}{name}` of [sandbox]: {why}")))?;
                }
            }
        }
        sizes.check()?;
        Ok(sizes)
    }
}

impl SandboxSizes {
    /// Nobody is given by default what nobody may ask for.
    fn check(&self) -> Result<()> {
        let usual = self.usual.over(Resources::default());
        let most = &self.most;
        let cores = |millis: u32| format!("{} cores", f64::from(millis) / 1000.0);
        let exceeds = [
            most.cpu_millis
                .filter(|most| usual.cpu_millis > *most)
                .map(|most| ("cpu", cores(usual.cpu_millis), cores(most))),
            most.memory_bytes
                .filter(|most| usual.memory_bytes > *most)
                .map(|most| ("memory", format_bytes(usual.memory_bytes), format_bytes(most))),
            most.disk_bytes
                .filter(|most| usual.disk_bytes > *most)
                .map(|most| ("disk", format_bytes(usual.disk_bytes), format_bytes(most))),
            most.pids
                .filter(|most| usual.pids > *most)
                .map(|most| ("pids", usual.pids.to_string(), most.to_string())),
        ];
        match exceeds.into_iter().flatten().next() {
            Some((name, usual, most)) => Err(Error::new(format!(
                "a sandbox has {usual} unless it asks for something else, which is more than `max_{name}` of [sandbox], {most}"
            ))
            .hint(format!("set `{name}` in [sandbox] too, to at most {most}"))),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use atoll_types::{GIB, MIB};

    use super::*;

    fn read(toml: &str) -> Result<SandboxSizes> {
        toml::from_str::<SandboxTable>(toml).expect(toml).read()
    }

    #[test]
    fn sizes_are_read() {
        assert_eq!(read("").unwrap(), SandboxSizes::default());
        let sizes = read(
            "cpu = 0.5\nmemory = \"512M\"\ndisk = \"20G\"\ndisk_backing = \"memory\"\npids = 64\nmax_cpu = \"4\"\nmax_disk = \"50G\"",
        )
        .unwrap();
        let usual = Resources {
            cpu_millis: 500,
            memory_bytes: 512 * MIB,
            disk_bytes: 20 * GIB,
            disk_backing: DiskBacking::Memory,
            pids: 64,
        };
        assert_eq!(sizes.usual, usual.into());
        assert_eq!(
            (sizes.most.cpu_millis, sizes.most.disk_bytes),
            (Some(4000), Some(50 * GIB))
        );
        assert_eq!(sizes.most.memory_bytes, None);
    }

    #[test]
    fn what_cannot_be_is_refused() {
        for (wrong, named) in [
            ("memory = \"much\"", "`memory`"),
            ("max_cpu = \"many\"", "`max_cpu`"),
            ("disk_backing = \"tape\"", "tape"),
            ("max_disk = \"5G\"", "`max_disk`"),
            ("memory = \"8G\"\nmax_memory = \"4G\"", "`max_memory`"),
        ] {
            let refused = read(wrong).unwrap_err().to_string();
            assert!(refused.contains(named), "{wrong}: {refused}");
        }
        assert!(toml::from_str::<SandboxTable>("max_disk_backing = \"disk\"").is_err());
    }
}
