//! What a group has used, and how often it wanted more than it may.

use std::fs;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};

use atoll_types::Usage;

use super::{CgroupError, Group, Hierarchy, field, number};

impl Group {
    pub fn usage(&self) -> Result<Usage, CgroupError> {
        let oom_kills = self.oom_kills()?;
        Ok(match self.hierarchy {
            Hierarchy::V1 {
                memory,
                cpuacct,
                pids,
                ..
            } => {
                let memory = memory.join(&self.relative);
                Usage {
                    cpu_micros: number(&cpuacct.join(&self.relative).join("cpuacct.usage"))? / 1000,
                    memory_bytes: number(&memory.join("memory.usage_in_bytes"))?,
                    memory_peak_bytes: number(&memory.join("memory.max_usage_in_bytes"))?,
                    pids: number(&pids.join(&self.relative).join("pids.current"))?,
                    disk_bytes: None,
                    oom_kills,
                }
            }
            Hierarchy::V2 { root } => {
                let at = root.join(&self.relative);
                let memory_bytes = number(&at.join("memory.current"))?;
                Usage {
                    cpu_micros: field(&at.join("cpu.stat"), "usage_usec")?,
                    memory_bytes,
                    memory_peak_bytes: number(&at.join("memory.peak")).unwrap_or(memory_bytes),
                    pids: number(&at.join("pids.current"))?,
                    disk_bytes: None,
                    oom_kills,
                }
            }
        })
    }

    /// How often the kernel killed a process in here for exceeding the memory limit.
    pub fn oom_kills(&self) -> Result<u64, CgroupError> {
        match self.hierarchy {
            Hierarchy::V1 { memory, .. } => field(
                &memory.join(&self.relative).join("memory.oom_control"),
                "oom_kill",
            ),
            Hierarchy::V2 { root } => field(&root.join(&self.relative).join("memory.events"), "oom_kill"),
        }
    }

    /// How often the kernel refused to make a process or thread in here because there were too many.
    pub fn pids_refused(&self) -> Result<u64, CgroupError> {
        let mount = match self.hierarchy {
            Hierarchy::V1 { pids, .. } => pids,
            Hierarchy::V2 { root } => root,
        };
        field(&mount.join(&self.relative).join("pids.events"), "max")
    }

    /// A descriptor that becomes readable whenever memory is short; `None` on v2, where the kernel kills the whole group
    /// by itself.
    pub fn oom_event(&self) -> io::Result<Option<OwnedFd>> {
        let Hierarchy::V1 { memory, .. } = self.hierarchy else {
            return Ok(None);
        };
        let at = memory.join(&self.relative);
        let control = fs::File::open(at.join("memory.oom_control"))?;
        let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
        let event = rustix::event::eventfd(0, flags)?;
        let order = format!("{} {}", event.as_raw_fd(), control.as_raw_fd());
        fs::OpenOptions::new()
            .write(true)
            .open(at.join("cgroup.event_control"))?
            .write_all(order.as_bytes())?;
        Ok(Some(event))
    }
}
