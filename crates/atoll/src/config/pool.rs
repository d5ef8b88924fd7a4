//! A warm pool, as the configuration file and the command line write it.

use std::str::FromStr;

use atoll_types::{Isolation, ResourcesAsked};
use serde::{Deserialize, Deserializer};

use super::sizes::{self, Cores};

/// One warm pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Pool {
    /// Name of the template.
    pub(crate) template: String,
    /// How many are kept ready.
    pub(crate) count: usize,
    /// Their size, where it is not that of all; only requests of the same size are served from this pool.
    pub(crate) resources: ResourcesAsked,
    /// Their isolation. Default: the strongest that works.
    pub(crate) isolation: Option<Isolation>,
}

/// As a `[[pool]]` table of the file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PoolTable {
    template: String,
    count: usize,
    memory: Option<String>,
    cpu: Option<Cores>,
    disk: Option<String>,
    disk_backing: Option<String>,
    pids: Option<u32>,
    isolation: Option<Isolation>,
}

impl<'de> Deserialize<'de> for Pool {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        let table = PoolTable::deserialize(deserializer)?;
        let mut pool = Self {
            template: table.template,
            count: table.count,
            resources: ResourcesAsked::default(),
            isolation: table.isolation,
        };
        let settings = [
            ("memory", table.memory),
            ("cpu", table.cpu.map(Cores::into_text)),
            ("disk", table.disk),
            ("disk_backing", table.disk_backing),
            ("pids", table.pids.map(|pids| pids.to_string())),
        ];
        for (name, value) in settings {
            if let Some(value) = value {
                pool.set(name, &value).map_err(serde::de::Error::custom)?;
            }
        }
        Ok(pool)
    }
}

impl Pool {
    fn set(&mut self, name: &str, value: &str) -> std::result::Result<(), String> {
        if name == "isolation" {
            self.isolation = Some(value.parse()?);
        } else if !sizes::set(&mut self.resources, name, value)? {
            return Err(format!(
                "unknown setting `{name}` of a pool; one of {}, isolation",
                sizes::NAMES
            ));
        }
        Ok(())
    }
}

/// `base=4` or `base=4:memory=1G,cpu=2`.
impl FromStr for Pool {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let (head, settings) = text.split_once(':').unwrap_or((text, ""));
        let (template, count) = head
            .split_once('=')
            .filter(|(template, _)| !template.is_empty())
            .ok_or_else(|| format!("`{text}` is not a pool; write for example base=4 or base=4:memory=1G"))?;
        let count = count
            .parse()
            .map_err(|_| format!("`{count}` is not a number of sandboxes"))?;
        let mut pool = Self {
            template: template.to_owned(),
            count,
            resources: ResourcesAsked::default(),
            isolation: None,
        };
        for setting in settings.split(',').filter(|setting| !setting.is_empty()) {
            let (name, value) = setting
                .split_once('=')
                .ok_or_else(|| format!("`{setting}` is not of the form NAME=VALUE"))?;
            pool.set(name.trim(), value.trim())?;
        }
        Ok(pool)
    }
}

#[cfg(test)]
mod tests {
    use atoll_types::{DiskBacking, GIB};

    use super::*;

    #[test]
    fn pools_are_read_from_the_command_line() {
        let pool: Pool = "base=4".parse().unwrap();
        assert_eq!((pool.template.as_str(), pool.count), ("base", 4));
        assert_eq!(pool.resources, ResourcesAsked::default());
        let pool: Pool = "base=2:memory=2G,cpu=1.5,isolation=gvisor".parse().unwrap();
        assert_eq!(pool.resources.memory_bytes, Some(2 * GIB));
        assert_eq!(pool.resources.cpu_millis, Some(1500));
        assert_eq!(pool.isolation, Some(Isolation::Gvisor));
        let pool: Pool = "base=1:disk=20G,disk_backing=disk".parse().unwrap();
        assert_eq!(pool.resources.disk_bytes, Some(20 * GIB));
        assert_eq!(pool.resources.disk_backing, Some(DiskBacking::Disk));
        let wrong = [
            "base",
            "=4",
            "base=x",
            "base=1:color=red",
            "base=1:memory",
            "base=1:disk_backing=tape",
        ];
        for wrong in wrong {
            assert!(wrong.parse::<Pool>().is_err(), "{wrong}");
        }
    }
}
