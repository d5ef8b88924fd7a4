//! Instances held still and written down: into the vault, or for a moment into files without a name.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Instant;

use async_trait::async_trait;
use atoll_runtime::SaveSource;
use atoll_types::{Code, Fault, InstanceId, Isolation, ProjectId, SaveKind, SnapshotId};
use atoll_vault::Vault;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use crate::faults::{from_runtime, from_vault};
use crate::node::SavedState;
use crate::pieces::{PIECE, Pieces};
use crate::state_files::{FromVault, IntoVault, Parts, Scratch};
use crate::words::{ByteSource, ByteStream, Save, SavedBytes, SavedGarbage, State};
use crate::{LocalNode, blocking};

#[async_trait]
impl SavedState for LocalNode {
    async fn save(&self, wanted: Save) -> Result<SavedBytes, Fault> {
        let began = Instant::now();
        let Save {
            instance,
            isolation,
            snapshot,
            project,
            kind,
            files_apart,
        } = wanted;
        let runtime = self.runtime(isolation)?;
        let save = self
            .inner
            .vault
            .begin(snapshot.as_str(), project.as_str())
            .map_err(|e| from_vault(&e))?;
        let sink = Arc::new(IntoVault::new(save, self.scratch()));
        let mut written = runtime.save(&instance, kind, sink.clone()).await;
        if kind == SaveKind::Memory && files_apart && written.is_ok() {
            // It stands still, so this is the same moment.
            written = runtime.save(&instance, SaveKind::Filesystem, sink.clone()).await;
        }
        let save = Arc::into_inner(sink)
            .ok_or_else(|| Fault::internal("a runtime kept hold of what it saved into"))?
            .into_inner();
        if let Err(error) = written {
            // The reason behind a broken stream is the vault's: a full disk, say.
            let behind = blocking::run(move || save.abort()).await.ok().flatten();
            return Err(behind.map_or_else(|| from_runtime(&error), |e| from_vault(&e)));
        }
        let durable = self.settings().durable_saves;
        let saved = blocking::run(move || save.finish(Vec::new(), durable))
            .await
            .map_err(|_| Fault::internal("a save was interrupted"))?
            .map_err(|e| from_vault(&e))?;
        tracing::debug!(%snapshot, %kind, bytes = saved.total_bytes, stored = saved.stored_bytes,
            took = ?began.elapsed(), "saved");
        Ok(SavedBytes {
            total_bytes: saved.total_bytes,
            stored_bytes: saved.stored_bytes,
        })
    }

    async fn thaw(&self, isolation: Isolation, instance: &InstanceId) -> Result<(), Fault> {
        let thawed = self.runtime(isolation)?.thaw(instance).await;
        thawed.map_err(|e| from_runtime(&e))
    }

    async fn capture(
        &self,
        isolation: Isolation,
        instance: &InstanceId,
        kind: SaveKind,
        captured: &SnapshotId,
    ) -> Result<(), Fault> {
        let parts = Arc::new(Parts::new(self.scratch()));
        let saved = self.runtime(isolation)?.save(instance, kind, parts.clone()).await;
        saved.map_err(|e| from_runtime(&e))?;
        self.captured().insert(captured.clone(), parts);
        Ok(())
    }

    async fn recall(&self, snapshot: &SnapshotId, captured: &SnapshotId) -> Result<(), Fault> {
        let source = self.read_saved(snapshot).await?;
        self.captured().insert(captured.clone(), source);
        Ok(())
    }

    fn release(&self, captured: &SnapshotId) {
        self.captured().remove(captured);
    }

    async fn copy_saved(&self, from: &SnapshotId, to: &SnapshotId) -> Result<SavedBytes, Fault> {
        let (from, to) = (from.to_string(), to.to_string());
        let saved = self.on_vault(move |vault| vault.copy(&from, &to)).await?;
        Ok(SavedBytes {
            total_bytes: saved.total_bytes,
            stored_bytes: saved.stored_bytes,
        })
    }

    async fn forget(&self, snapshot: &SnapshotId) -> Result<(), Fault> {
        let id = snapshot.to_string();
        self.on_vault(move |vault| match vault.delete(&id) {
            // A save that was cut off has left none.
            Err(atoll_vault::Error::NotFound { .. }) => Ok(()),
            deleted => deleted,
        })
        .await
    }

    async fn saved(&self) -> Result<Vec<String>, Fault> {
        self.on_vault(|vault| vault.ids()).await
    }

    async fn collect_saved(&self, garbage: HashSet<String>, dry_run: bool) -> Result<SavedGarbage, Fault> {
        let report = self
            .on_vault(move |vault| vault.gc(&|id| !garbage.contains(id), dry_run))
            .await?;
        Ok(SavedGarbage {
            saves: report.saves,
            bytes: report.bytes,
            unreadable: report.blocked_by,
        })
    }

    async fn export_saved(&self, snapshot: &SnapshotId, header: Vec<u8>) -> Result<ByteStream, Fault> {
        let (sender, receiver) = mpsc::channel(4);
        let (vault, id) = (self.inner.vault.clone(), snapshot.to_string());
        tokio::task::spawn_blocking(move || {
            let mut out = std::io::BufWriter::with_capacity(PIECE, Pieces::new(sender.clone()));
            let exported = vault.export(&id, &header, &mut out);
            let flushed = std::io::Write::flush(&mut out);
            if let Err(error) = exported {
                let _ = sender.blocking_send(Err(from_vault(&error)));
            } else if let Err(error) = flushed {
                let _ = sender.blocking_send(Err(Fault::internal(error.to_string())));
            }
        });
        Ok(Box::pin(ReceiverStream::new(receiver)))
    }

    async fn import_saved(
        &self,
        mut file: ByteSource,
        snapshot: &SnapshotId,
        project: &ProjectId,
        most: u64,
    ) -> Result<(Vec<u8>, SavedBytes), Fault> {
        let (vault, id, domain) = (
            self.inner.vault.clone(),
            snapshot.to_string(),
            project.to_string(),
        );
        let imported = blocking::run(move || vault.import(&mut file, &id, &domain, most));
        let imported = imported
            .await
            .map_err(|_| Fault::internal("an import was interrupted"))?;
        let (header, saved) = imported.map_err(|error| match &error {
            // Theirs, not ours.
            atoll_vault::Error::Damaged { .. } => Fault::new(Code::SnapshotFileInvalid, error.to_string())
                .hint("export it again, and see that it arrives whole"),
            _ => from_vault(&error),
        })?;
        let saved = SavedBytes {
            total_bytes: saved.total_bytes,
            stored_bytes: saved.stored_bytes,
        };
        Ok((header, saved))
    }
}

impl LocalNode {
    /// What an instance goes on from, as files that a runtime can work with.
    pub(crate) async fn state(&self, state: &State) -> Result<Arc<dyn SaveSource>, Fault> {
        match state {
            State::Saved(snapshot) => self.read_saved(snapshot).await,
            State::Captured(id) => match self.captured().get(id) {
                Some(source) => Ok(Arc::clone(source)),
                None => Err(Fault::internal("what was captured was let go of")),
            },
        }
    }

    /// Begins to read saved state.
    async fn read_saved(&self, snapshot: &SnapshotId) -> Result<Arc<dyn SaveSource>, Fault> {
        let (vault, id) = (self.inner.vault.clone(), snapshot.to_string());
        let opened = blocking::run(move || vault.open_saved(&id))
            .await
            .map_err(|_| Fault::internal("reading saved state was interrupted"))?
            .map_err(|e| from_vault(&e))?;
        Ok(Arc::new(FromVault::new(opened, &self.scratch())))
    }

    async fn on_vault<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Vault) -> Result<T, atoll_vault::Error> + Send + 'static,
    ) -> Result<T, Fault> {
        let vault = self.inner.vault.clone();
        blocking::run(move || work(&vault))
            .await
            .map_err(|_| Fault::internal("work on saved state was interrupted"))?
            .map_err(|e| from_vault(&e))
    }

    fn scratch(&self) -> Scratch {
        Scratch::new(
            self.settings().data_dir.join("scratch"),
            self.inner.vault.is_encrypted(),
        )
    }
}
