//! What an instance has consumed, as its runtime reads it off the host (never what the guest claims).

use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// CPU time spent since the instance started, user and system, in microseconds.
    pub cpu_micros: u64,
    /// Memory charged to the instance now.
    pub memory_bytes: u64,
    /// The most memory that was ever charged, where the kernel tells.
    pub memory_peak_bytes: u64,
    /// Processes and threads that exist now, as the host sees them.
    pub pids: u64,
    /// Bytes held by the private writable layer, where the runtime can tell.
    pub disk_bytes: Option<u64>,
    /// How often the kernel killed something in the instance for exceeding its memory.
    pub oom_kills: u64,
}
