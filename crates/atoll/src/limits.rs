//! The `[limits]` table: what the server holds for whom, and how long it waits.
//!
//! Where nothing is set the machine decides: a quarter of its memory may hold requests that are being received, half of the
//! process's descriptors may be connections.

use std::time::Duration;

use atoll_client::output::{Error, Result};
use atoll_front::{Limits, Patience, connections, memory};
use rustix::process::{Resource, getrlimit};
use serde::Deserialize;

use crate::config::{bytes, duration};

/// Every key is optional.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct LimitsTable {
    /// Memory for requests that are being received, of everybody together, such as `"1G"`. Default: a quarter of the
    /// machine's, from 256 MiB to 4 GiB.
    #[serde(deserialize_with = "bytes")]
    pub(crate) buffered: Option<u64>,
    /// Of one project. Default: half of that.
    #[serde(deserialize_with = "bytes")]
    pub(crate) buffered_per_project: Option<u64>,
    /// Of the calls from, or about, one sandbox. Default: a quarter of the whole, at most 128 MiB.
    #[serde(deserialize_with = "bytes")]
    pub(crate) buffered_per_sandbox: Option<u64>,
    /// Connections to all listeners together. Default: half of the process's descriptors, at most 16384.
    pub(crate) connections: Option<usize>,
    /// Of those, connections on which no key has been shown; the oldest gives way to a new one. Default: a quarter.
    pub(crate) strangers: Option<usize>,
    /// Of those, from one address. Default: an eighth of the whole.
    pub(crate) strangers_per_address: Option<usize>,
    /// Connections of one project. Default: half of the whole.
    pub(crate) connections_per_project: Option<usize>,
    /// Connections from, or to, one sandbox. Default: a sixteenth of the whole.
    pub(crate) connections_per_sandbox: Option<usize>,
    /// How long the head of a request may take, such as `"15s"`. Default: 15 seconds.
    #[serde(deserialize_with = "duration")]
    pub(crate) head_timeout: Option<u64>,
    /// How long a connection is kept without a request. Default: 75 seconds.
    #[serde(deserialize_with = "duration")]
    pub(crate) idle_timeout: Option<u64>,
    /// How long the next piece of a body is waited for that is read as a whole. Default: 15 seconds.
    #[serde(deserialize_with = "duration")]
    pub(crate) body_timeout: Option<u64>,
    /// How many bytes of such a body have to come each second, on the average after that time, such as `"16K"`. Default: 16
    /// KiB.
    #[serde(deserialize_with = "bytes")]
    pub(crate) body_rate: Option<u64>,
    /// How long an upload may stand still that is passed on as it comes. Default: 10 minutes.
    #[serde(deserialize_with = "duration")]
    pub(crate) upload_timeout: Option<u64>,
}

impl LimitsTable {
    /// What holds on this machine.
    pub(crate) fn resolve(&self) -> Result<Limits> {
        let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let machine = Limits::for_machine(memory_of_machine(), descriptors);
        let memory = self.buffered.map_or(machine.memory, memory::Limits::within);
        let places = self
            .connections
            .map_or(machine.connections, connections::Limits::within);
        let time = |millis: Option<u64>, default| millis.map_or(default, Duration::from_millis);
        let patience = Patience::default();
        let limits = Limits {
            memory: memory::Limits {
                server: memory.server,
                project: self.buffered_per_project.unwrap_or(memory.project),
                sandbox: self.buffered_per_sandbox.unwrap_or(memory.sandbox),
            },
            connections: connections::Limits {
                server: places.server,
                strangers: self.strangers.unwrap_or(places.strangers),
                address: self.strangers_per_address.unwrap_or(places.address),
                project: self.connections_per_project.unwrap_or(places.project),
                sandbox: self.connections_per_sandbox.unwrap_or(places.sandbox),
            },
            patience: Patience {
                head: time(self.head_timeout, patience.head),
                idle: time(self.idle_timeout, patience.idle),
                body: time(self.body_timeout, patience.body),
                stream: time(self.upload_timeout, patience.stream),
                body_rate: self.body_rate.unwrap_or(patience.body_rate),
            },
        };
        let wait = limits.patience;
        // What follows from another key is that key's fault.
        let none = [
            ("buffered", limits.memory.server == 0, None),
            (
                "buffered_per_project",
                limits.memory.project == 0,
                Self::follows("buffered", self.buffered_per_project.as_ref()),
            ),
            (
                "buffered_per_sandbox",
                limits.memory.sandbox == 0,
                Self::follows("buffered", self.buffered_per_sandbox.as_ref()),
            ),
            (
                "strangers",
                limits.connections.strangers == 0,
                Self::follows("connections", self.strangers.as_ref()),
            ),
            (
                "strangers_per_address",
                limits.connections.address == 0,
                Self::follows("connections", self.strangers_per_address.as_ref()),
            ),
            (
                "connections_per_project",
                limits.connections.project == 0,
                Self::follows("connections", self.connections_per_project.as_ref()),
            ),
            (
                "connections_per_sandbox",
                limits.connections.sandbox == 0,
                Self::follows("connections", self.connections_per_sandbox.as_ref()),
            ),
            ("head_timeout", wait.head.is_zero(), None),
            ("idle_timeout", wait.idle.is_zero(), None),
            ("body_timeout", wait.body.is_zero(), None),
            ("body_rate", wait.body_rate == 0, None),
            ("upload_timeout", wait.stream.is_zero(), None),
        ];
        match none.into_iter().find(|(_, is_none, _)| *is_none) {
            Some((name, _, None)) => Err(Error::new(format!(
                "`limits.{name}` is 0, with which nothing could be served; leave it out for the default"
            ))),
            Some((name, _, Some(from))) => Err(Error::new(format!(
                "`limits.{from}` is too small: `limits.{name}`, which is a part of it, would be 0"
            ))
            .hint(format!("set `{from}` to 16 or more, or `{name}` as well"))),
            None => Ok(limits),
        }
    }

    /// Which key a limit that is not set itself follows from.
    fn follows<T>(from: &'static str, own: Option<&T>) -> Option<&'static str> {
        own.is_none().then_some(from)
    }
}

/// Of the machine, or of the control group that this process is confined to.
fn memory_of_machine() -> u64 {
    let system = rustix::system::sysinfo();
    let machine = (system.totalram as u64).saturating_mul(u64::from(system.mem_unit));
    let confined = || -> Option<u64> {
        let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
        let group = groups.lines().find_map(|line| line.strip_prefix("0::"))?;
        let limit = std::fs::read_to_string(format!("/sys/fs/cgroup{group}/memory.max")).ok()?;
        limit.trim().parse().ok()
    };
    confined().map_or(machine, |limit| limit.min(machine))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_set_holds_and_the_rest_follows_from_it() {
        let table: LimitsTable =
            toml::from_str("buffered = \"64M\"\nconnections = 800\nhead_timeout = \"2s\"\nstrangers = 7")
                .unwrap();
        let limits = table.resolve().unwrap();
        assert_eq!(limits.memory.server, 64 << 20);
        assert_eq!(limits.memory.project, 32 << 20);
        assert_eq!(
            (limits.connections.server, limits.connections.strangers),
            (800, 7)
        );
        assert_eq!(limits.connections.project, 400);
        assert_eq!(limits.patience.head, Duration::from_secs(2));
        assert_eq!(limits.patience.idle, Patience::default().idle);
    }

    #[test]
    fn nothing_is_no_limit() {
        let table: LimitsTable = toml::from_str("strangers = 0").unwrap();
        let error = table.resolve().unwrap_err().to_string();
        assert!(error.contains("limits.strangers"), "{error}");
        assert!(toml::from_str::<LimitsTable>("buffer = \"1G\"").is_err());
        // The key that was set is named, and not one that follows from it.
        let table: LimitsTable = toml::from_str("connections = 3\nstrangers = 10").unwrap();
        let error = table.resolve().unwrap_err().to_string();
        assert!(error.contains("`limits.connections` is too small"), "{error}");
    }

    #[test]
    fn a_machine_has_memory() {
        assert!(memory_of_machine() > 64 << 20);
    }
}
