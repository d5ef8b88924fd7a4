//! What sandboxes used, in the groups in which model calls are summed, so that both stand side by side.

use atoll_types::SandboxId;

use crate::facts::{UsageTotal, wide_sum};
use crate::models::calls::{SpendBy, SpendQuery};
use crate::{Error, Store, sql};

impl SpendBy {
    /// The group of a usage fact, in SQL; `None` where sandboxes have no such group.
    const fn group_of_usage(self) -> Option<&'static str> {
        match self {
            Self::Total => Some("''"),
            Self::Day => Some("strftime('%Y-%m-%d', at / 1000, 'unixepoch')"),
            Self::Hour => Some("strftime('%Y-%m-%dT%H:00:00Z', at / 1000, 'unixepoch')"),
            Self::Sandbox => Some("coalesce(sandbox, '')"),
            Self::Model
            | Self::Provider
            | Self::Key
            | Self::Workflow
            | Self::Run
            | Self::User
            | Self::Tag => None,
        }
    }
}

impl Store {
    /// Sums what sandboxes used by the groups of a query for model spending. Empty where there is nothing to set beside it:
    /// by what only calls have, or of some calls only.
    pub async fn compute_beside(&self, query: SpendQuery) -> Result<Vec<(String, UsageTotal)>, Error> {
        let of_some_calls =
            query.model.is_some() || query.provider.is_some() || query.user.is_some() || query.key.is_some();
        let Some(group) = query.by.group_of_usage().filter(|_| !of_some_calls) else {
            return Ok(Vec::new());
        };
        self.read("sum usage by group", move |db| {
            // In two halves each, as in `Store::usage_total`: a sum of many may not fit into one.
            let statement = format!(
                "SELECT sum(wall >> 24), sum(wall & 16777215), sum(cpu >> 24), sum(cpu & 16777215),
                        sum(memory >> 24), sum(memory & 16777215), sum(disk >> 24), sum(disk & 16777215), bucket
                 FROM (SELECT {group} AS bucket, data ->> 'wall_millis' AS wall, data ->> 'cpu_micros' AS cpu,
                              data ->> 'memory_byte_seconds' AS memory, data ->> 'disk_byte_seconds' AS disk
                       FROM facts WHERE project = ?1 AND at >= ?2 AND at < ?3 AND kind = 'usage'
                           AND (?4 IS NULL OR sandbox = ?4))
                 GROUP BY bucket ORDER BY bucket LIMIT 10000"
            );
            let sandbox = query.sandbox.as_ref().map(SandboxId::as_str);
            sql::rows(
                db,
                &statement,
                &[&query.project.as_str(), &query.from.0, &query.to.0, &sandbox],
                |row| {
                    let total = UsageTotal {
                        wall_millis: wide_sum(row, 0)?,
                        cpu_micros: wide_sum(row, 2)?,
                        memory_byte_seconds: wide_sum(row, 4)?,
                        disk_byte_seconds: wide_sum(row, 6)?,
                    };
                    Ok((row.get(8)?, total))
                },
            )
        })
        .await
    }
}
