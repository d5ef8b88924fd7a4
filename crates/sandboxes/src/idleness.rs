//! What counts as use of a sandbox, and the look at one whose idle time is over.
//!
//! ```text
//!   a call, an open stream, a connection to a port ──┐
//!   a command that was started through an API ───────┴──> in use: noted when it begins and ends; its idle time starts anew
//!
//!   its idle time is over ──> look: connections to the world, CPU time ──> `lifecycle` decides: idle, or at work
//! ```
//! Everything else that runs in a sandbox counts by what it does, and not for being there: its agent, its template's start
//! command, servers that a command left behind. Else a template with a server would never be idle.
//!
//! What must hold: nothing is asked of the machine before an idle time is over, so a thousand sandboxes cost nothing while
//! they idle. Metering, which asks the machine anyway, says from where CPU time is counted. Nothing of it is written down: a new
//! server begins to count anew.

use std::time::Duration;

use atoll_lifecycle::{CpuMark, DeadlineKind, Work, next_deadline};
use atoll_types::{Isolation, Timestamp};

use crate::Sandboxes;
use crate::cell::Cell;

/// A machine answers within milliseconds. Other deadlines wait for this one.
const ANSWERED_WITHIN: Duration = Duration::from_secs(5);

impl Sandboxes {
    /// What a sandbox has done of its own, if it is its idle time that is over; `None` where that cannot be told.
    pub(crate) async fn work_of(&self, cell: &Cell, isolation: Isolation) -> Option<Work> {
        match next_deadline(&cell.record()) {
            Some((at, DeadlineKind::Idle)) if at <= self.now() => {}
            _ => return None,
        }
        let guest = cell.instance()?;
        let look = async {
            tokio::join!(
                self.node().usage(isolation, &guest.id),
                self.node().quiet_for(&guest.id),
            )
        };
        let Ok((Ok(usage), quiet_for)) = tokio::time::timeout(ANSWERED_WITHIN, look).await else {
            tracing::warn!(sandbox = %cell.id, "whether it is idle could not be found out, so it stays");
            return None;
        };
        let now = self.now();
        let seen = CpuMark {
            at: now,
            micros: usage.cpu_micros,
        };
        Some(Work {
            connected_at: quiet_for.map(|quiet| before(now, quiet)),
            cpu: (cell.cpu_mark(), seen),
        })
    }
}

fn before(now: Timestamp, ago: Duration) -> Timestamp {
    Timestamp(
        now.0
            .saturating_sub(i64::try_from(ago.as_millis()).unwrap_or(i64::MAX)),
    )
}
