//! Collecting what nobody refers to: saved state without a row, volumes without one, chunks that no snapshot shares.
//!
//! What must hold: rows decide. A collection may come at any time and be interrupted at any point; it never removes what
//! a row names or what is being written.

use std::collections::HashSet;

use atoll_types::Fault;

use crate::Sandboxes;
use crate::faults::from_store;

/// What a collection did, or would do.
#[derive(Debug, Clone, Default)]
pub struct Collected {
    pub dry_run: bool,
    /// Saved states without a row.
    pub snapshots: Vec<String>,
    /// Volumes without a row.
    pub volumes: Vec<String>,
    /// Bytes of disk that came (or would come) free.
    pub bytes: u64,
    /// Snapshots that cannot be read; while they are there, no space can be reclaimed from the vault.
    pub unreadable: Vec<String>,
}

impl Sandboxes {
    /// Removes garbage, or says what there is.
    pub async fn collect_garbage(&self, dry_run: bool) -> Result<Collected, Fault> {
        // In this order: whatever is found now is named by a row or about to be, when those are looked at afterwards.
        let found = self.node().saved().await?;
        let mut wanted: HashSet<String> = self
            .live()
            .values()
            .filter_map(|cell| cell.seen.borrow().record.saving.clone())
            .map(|saving| saving.snapshot.to_string())
            .collect();
        wanted.extend(self.unfinished().iter().cloned());
        let rows = self
            .store()
            .saved
            .all_snapshot_ids()
            .await
            .map_err(|e| from_store(&e))?;
        wanted.extend(rows.into_iter().map(|id| id.to_string()));
        let garbage: HashSet<String> = found.into_iter().filter(|id| !wanted.contains(id)).collect();
        let report = self.node().collect_saved(garbage, dry_run).await?;
        let (volumes, volume_bytes) = self.collect_volumes(dry_run).await?;
        if !dry_run {
            self.collect_private_secrets().await?;
        }
        if !dry_run && (report.bytes > 0 || !volumes.is_empty()) {
            tracing::info!(
                bytes = report.bytes,
                saves = report.saves.len(),
                volumes = volumes.len(),
                "collected garbage"
            );
        }
        Ok(Collected {
            dry_run,
            snapshots: report.saves,
            volumes,
            bytes: report.bytes + volume_bytes,
            unreadable: report.unreadable,
        })
    }

    /// Collects soon after something was dropped, and never twice at once.
    pub(crate) async fn keep_collecting(&self) {
        loop {
            tokio::select! {
                biased;
                () = self.inner.garbage.notified() => {}
                () = self.inner.stop.cancelled() => return,
            }
            // Drops come in bursts.
            tokio::select! {
                biased;
                () = tokio::time::sleep(std::time::Duration::from_secs(2)) => {}
                () = self.inner.stop.cancelled() => return,
            }
            if let Err(fault) = self.collect_garbage(false).await {
                tracing::warn!(%fault, "garbage could not be collected");
            }
        }
    }
}
