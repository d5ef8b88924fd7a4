//! After a restart: rows are compared with what runs, and made to agree.

use std::collections::BTreeMap;

use atoll_lifecycle::{Input, Liveness};
use atoll_node::{Greeting, identity};
use atoll_store::{Fact, SandboxRow, Scope};
use atoll_types::{Fault, InstanceId, Isolation, SandboxState, Timestamp};
use futures_util::StreamExt as _;

use crate::Sandboxes;
use crate::cell::{Cell, Metered};
use crate::faults::from_store;

/// Instances taken over, or destroyed, at a time.
const AT_ONCE: usize = 16;
/// A guest that works answers within milliseconds; one that does not must not hold up the others.
const TOLD_WITHIN: std::time::Duration = std::time::Duration::from_secs(2);

impl Sandboxes {
    /// Adopts what runs, ends what is gone, destroys what nobody owns.
    pub(crate) async fn recover(&self) -> Result<(), Fault> {
        let mut found: BTreeMap<InstanceId, Isolation> = BTreeMap::new();
        for (isolation, _) in &self.node().offer().saves {
            for id in self.node().discover(*isolation).await? {
                found.insert(id, *isolation);
            }
        }
        let rows = self
            .store()
            .sandboxes
            .live_sandboxes()
            .await
            .map_err(|e| from_store(&e))?;
        let (rows_total, found_total) = (rows.len(), found.len());
        let mut pairs = Vec::new();
        for row in rows {
            let here = row.record.instance.as_ref().and_then(|id| found.remove(id));
            pairs.push((row, here));
        }
        let orphans = found.len();
        let recoveries = pairs.into_iter().map(|(row, here)| self.recover_one(row, here));
        let failures: Vec<Fault> = futures_util::stream::iter(recoveries)
            .buffer_unordered(AT_ONCE)
            .filter_map(|outcome| async { outcome.err() })
            .collect()
            .await;
        if let Some(fault) = failures.into_iter().next() {
            return Err(fault);
        }
        self.recover_volumes().await?;
        let cells: Vec<_> = self.live().values().cloned().collect();
        for cell in &cells {
            self.end_if_ownerless(cell);
        }
        let running = cells
            .iter()
            .filter_map(|cell| Some(cell.instance()?.id))
            .collect();
        self.node().recovered(&running).await;
        // What was being saved when the last server went.
        self.inner.garbage.notify_one();
        futures_util::stream::iter(found)
            .for_each_concurrent(AT_ONCE, |(id, isolation)| async move {
                self.node().destroy(isolation, &id).await;
            })
            .await;
        if rows_total + found_total > 0 {
            tracing::info!(rows = rows_total, instances = found_total, orphans, "recovered");
        }
        Ok(())
    }

    async fn recover_one(&self, row: SandboxRow, here: Option<Isolation>) -> Result<(), Fault> {
        let (adopted, liveness) = match (here, &row.record.instance, row.record.state) {
            (
                Some(isolation),
                Some(id),
                SandboxState::Running | SandboxState::Pausing | SandboxState::Stopping,
            ) => match self.node().adopt(isolation, id).await {
                Liveness::Alive => (Some(id.clone()), Liveness::Alive),
                lost => {
                    tracing::warn!(sandbox = %row.id, "a running sandbox could not be taken over");
                    (None, lost)
                }
            },
            _ => (None, Liveness::Gone),
        };
        let metered = self.metered_so_far(&row).await?;
        let open = self.store().ledger.open_commands(&row.id).await;
        let open = open.map_err(|e| from_store(&e))?;
        let cell = self.look_after(row);
        cell.commands.restore(open);
        if let Some(instance) = adopted {
            self.plug_in_again(&cell.last_seen(), &instance).await;
            self.tell_its_name(&cell.last_seen(), &instance).await;
            self.give_instance(&cell, instance);
        }
        cell.set_metered(metered);
        if matches!(liveness, Liveness::Gone) {
            self.meter_the_dead(&cell).await;
        }
        self.apply(&cell, Input::Recover(liveness)).await?;
        Ok(())
    }

    /// A server that died may have written down that a sandbox runs before its guest was told who it is. Telling it again
    /// changes nothing.
    async fn tell_its_name(&self, row: &SandboxRow, instance: &InstanceId) {
        let Ok(template) = self.template_of(&row.template) else {
            return;
        };
        let greeting = Greeting {
            instance: instance.clone(),
            identity: identity(&row.id, &row.spec, &template, None),
            admission: self.admission(row).await.ok().flatten(),
            command: None,
        };
        let told = tokio::time::timeout(TOLD_WITHIN, self.node().greet(greeting)).await;
        if !matches!(told, Ok(Ok(_))) {
            tracing::warn!(sandbox = %row.id, "a sandbox that was taken over could not be told its name");
        }
    }

    /// What one consumed that died while no server ran, as far as the host still knows. When it died nobody does, so no time
    /// is counted.
    async fn meter_the_dead(&self, cell: &Cell) {
        let row = cell.last_seen();
        if let Some(instance) = &row.record.instance
            && let Ok(usage) = self.node().usage(row.isolation, instance).await
            && let cpu_micros @ 1.. = usage.cpu_micros.saturating_sub(cell.metered().cpu_micros)
        {
            self.append(
                cell,
                Fact::Usage {
                    instance: Some(instance.clone()),
                    wall_millis: 0,
                    cpu_micros,
                    memory_byte_seconds: 0,
                    disk_byte_seconds: 0,
                },
            );
        }
    }

    async fn metered_so_far(&self, row: &SandboxRow) -> Result<Metered, Fault> {
        // Counters of the host begin anew with each instance.
        let Some(instance) = row.record.instance.clone() else {
            return Ok(Metered::default());
        };
        let scope = Scope::Instance(row.project.clone(), row.id.clone(), instance);
        let since = row.record.started_at.unwrap_or(row.record.created_at);
        let total = self
            .store()
            .ledger
            .usage_total(scope, since, Timestamp(i64::MAX))
            .await
            .map_err(|e| from_store(&e))?;
        Ok(Metered {
            wall_millis: total.wall_millis,
            cpu_micros: total.cpu_micros,
            memory_bytes: 0,
        })
    }
}
