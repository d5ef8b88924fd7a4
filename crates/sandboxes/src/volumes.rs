//! Volumes: storage that outlives sandboxes. Attached while a sandbox with processes sees it, let go afterwards.
//!
//! What must hold:
//! - A volume that a sandbox which has not ended was created with cannot be deleted; the store decides, in one
//!   transaction.
//! - A row is there before the bytes and says `Creating` until they are; what is found so after a crash was never
//!   promised to anybody and goes.
//! - Nothing is let go that a sandbox is just about to start with: both happen under one lock.

use parking_lot::MutexGuard;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use atoll_image::{Content, Limits, Tree, Whiteouts};
use atoll_node::from_image;
use atoll_store::{Fact, NewFact, VolumeRow, VolumeState};
use atoll_types::{Code, Fault, ProjectId, SandboxSpec, Timestamp, VolumeId};
use tempfile::TempPath;

use crate::faults::from_store;
use crate::snapshots::check_name;
use crate::streams::holding;
use crate::{ByteStream, Caller, Page, Sandboxes, entropy};

#[derive(Debug, Clone)]
pub struct CreateVolume {
    /// Unique in its project.
    pub name: String,
    /// The most it may hold.
    pub bytes: u64,
}

/// A volume as callers see it.
#[derive(Debug, Clone)]
pub struct Volume {
    pub id: VolumeId,
    pub name: String,
    pub limit_bytes: u64,
    pub used_bytes: u64,
    /// It was sealed from an archive and is only ever read.
    pub read_only: bool,
    /// Sandboxes that see it and have not ended.
    pub attached_to: Vec<atoll_types::SandboxId>,
    pub created_at: Timestamp,
}

/// See [`Sandboxes::expect_volumes`].
pub(crate) struct ExpectedVolumes {
    service: Sandboxes,
    volumes: Vec<String>,
}

impl Drop for ExpectedVolumes {
    fn drop(&mut self) {
        let mut expected = self.service.expected_volumes();
        for volume in &self.volumes {
            if let Some(at) = expected.iter().position(|one| one == volume) {
                expected.swap_remove(at);
            }
        }
    }
}

impl Sandboxes {
    /// Makes an empty volume.
    pub async fn create_volume(&self, caller: &Caller, request: CreateVolume) -> Result<Volume, Fault> {
        self.make_volume(caller, request.name, request.bytes, None).await
    }

    /// Makes a volume that is only ever read, of a tar archive in a file of the front end's own.
    pub async fn seal_volume(
        &self,
        caller: &Caller,
        name: String,
        archive: PathBuf,
    ) -> Result<Volume, Fault> {
        let scratch = self.settings().data_dir.join("scratch");
        let image = crate::blocking::run(move || seal(&archive, &scratch))
            .await
            .map_err(|_| Fault::internal("sealing a volume was interrupted"))??;
        let bytes = image.as_file().metadata().map_or(0, |metadata| metadata.len());
        self.make_volume(caller, name, bytes, Some(image.into_temp_path()))
            .await
    }

    /// Of an image, or empty.
    async fn make_volume(
        &self,
        caller: &Caller,
        name: String,
        limit_bytes: u64,
        image: Option<TempPath>,
    ) -> Result<Volume, Fault> {
        check_name(&name)?;
        // Until its row is there, which counts from then on.
        let room = self.upload_room(caller.project()).await?;
        room.take(limit_bytes)?;
        let row = VolumeRow {
            id: entropy::id(),
            project: caller.project().clone(),
            name,
            state: VolumeState::Creating,
            limit_bytes,
            used_bytes: 0,
            created_at: self.now(),
        };
        let fact = self.volume_fact(
            caller,
            Fact::VolumeCreated {
                volume: row.id.clone(),
                name: row.name.clone(),
                limit_bytes,
            },
        );
        self.store()
            .saved
            .insert_volume(row.clone(), vec![fact])
            .await
            .map_err(|e| store_fault(&e))?;
        room.stored();
        let service = self.clone();
        let id = row.id.clone();
        // To its end, whoever hangs up.
        let work = self.inner.tasks.spawn(async move {
            let made = match image {
                Some(image) => {
                    let sealed = service.node().seal_volume(&id, &image).await;
                    // It is the volume's own file then.
                    sealed.map(|()| drop(image.keep()))
                }
                None => service.node().create_volume(&id, limit_bytes).await,
            };
            match made {
                Ok(()) => service
                    .store()
                    .saved
                    .set_volume_state(&id, VolumeState::Ready)
                    .await
                    .map_err(|e| from_store(&e)),
                Err(fault) => {
                    let _ = service
                        .store()
                        .saved
                        .delete_volume(&row.project, &id, Vec::new())
                        .await;
                    Err(fault)
                }
            }
        });
        work.await
            .map_err(|_| Fault::internal("making a volume was interrupted"))??;
        self.volume(caller, row.id.as_str()).await
    }

    pub async fn volumes(
        &self,
        caller: &Caller,
        cursor: Option<String>,
        limit: usize,
    ) -> Result<Page<Volume>, Fault> {
        let after = crate::parse_cursor(cursor)?;
        let page = self.store().saved.volumes(caller.project(), after, limit).await;
        let page = page.map_err(|e| from_store(&e))?;
        let mut items = Vec::with_capacity(page.items.len());
        for row in page
            .items
            .into_iter()
            .filter(|row| row.state == VolumeState::Ready)
        {
            items.push(self.look_at_volume(row).await?);
        }
        Ok(Page {
            items,
            next: page.next.map(|cursor| cursor.to_string()),
        })
    }

    /// By id or name.
    pub async fn volume(&self, caller: &Caller, which: &str) -> Result<Volume, Fault> {
        let row = self.volume_row(caller.project(), which).await?;
        self.look_at_volume(row).await
    }

    /// Deletes it with all it holds. Refused while a sandbox that has not ended was created with it.
    pub async fn delete_volume(&self, caller: &Caller, which: &str) -> Result<(), Fault> {
        let row = self.volume_row(caller.project(), which).await?;
        let fact = self.volume_fact(
            caller,
            Fact::VolumeDeleted {
                volume: row.id.clone(),
                name: row.name.clone(),
            },
        );
        let lock = self.volume_lock().await;
        let deleted = self
            .store()
            .saved
            .delete_volume(&row.project, &row.id, vec![fact])
            .await;
        deleted.map_err(|e| store_fault(&e))?;
        let removed = self.node().delete_volume(row.id.as_str()).await;
        drop(lock);
        if let Err(fault) = removed {
            // Without a row it is garbage, and will be collected.
            tracing::warn!(volume = %row.id, %fault, "a volume's bytes could not be removed yet");
            self.inner.garbage.notify_one();
        }
        Ok(())
    }

    /// All that is in it, as a tar archive; possible while sandboxes use it, then as a crash would find it.
    pub async fn export_volume(&self, caller: &Caller, which: &str) -> Result<ByteStream, Fault> {
        let row = self.volume_row(caller.project(), which).await?;
        let slot = self.transfer(caller.project())?;
        Ok(holding(slot, self.node().export_volume(&row.id).await?))
    }

    /// Adds what is in a tar archive; returns how many entries that were.
    pub async fn import_volume(
        &self,
        caller: &Caller,
        which: &str,
        archive: impl Read + Send + 'static,
    ) -> Result<u64, Fault> {
        let row = self.volume_row(caller.project(), which).await?;
        let _slot = self.transfer(caller.project())?;
        self.node().import_volume(&row.id, Box::new(archive)).await
    }

    /// Makes a spec name its volumes by id: a name may mean another one tomorrow.
    pub(crate) async fn name_volumes(
        &self,
        project: &ProjectId,
        spec: &mut SandboxSpec,
    ) -> Result<(), Fault> {
        for mount in &mut spec.volumes {
            let row = self.volume_row(project, &mount.volume).await?;
            mount.volume = row.id.to_string();
        }
        Ok(())
    }

    /// What a sandbox's instance is to see is on the host from now on, until nobody needs it.
    pub(crate) async fn attach_volumes(&self, project: &ProjectId, spec: &SandboxSpec) -> Result<(), Fault> {
        if spec.volumes.is_empty() {
            return Ok(());
        }
        let _lock = self.volume_lock().await;
        for wanted in &spec.volumes {
            let row = self.volume_row(project, &wanted.volume).await?;
            self.node().attach_volume(row.id.as_str()).await?;
        }
        Ok(())
    }

    /// Lets go of volumes that no sandbox with processes sees any more.
    pub(crate) fn volumes_may_rest(&self) {
        self.inner.garbage.notify_one();
    }

    /// Keeps the volumes of a sandbox that is being made from being let go, until it is among the live ones.
    pub(crate) fn expect_volumes(&self, spec: &SandboxSpec) -> ExpectedVolumes {
        let volumes: Vec<String> = spec.volumes.iter().map(|mount| mount.volume.clone()).collect();
        self.expected_volumes().extend(volumes.iter().cloned());
        ExpectedVolumes {
            service: self.clone(),
            volumes,
        }
    }

    fn expected_volumes(&self) -> MutexGuard<'_, Vec<String>> {
        self.inner.expected_volumes.lock()
    }

    /// Volumes that a sandbox with processes sees, or is about to.
    fn volumes_in_use(&self) -> Vec<String> {
        let expected = self.expected_volumes().clone();
        self.live()
            .values()
            .flat_map(|cell| {
                let seen = cell.seen.borrow();
                let volumes = if seen.record.state.holds_instance() || seen.record.instance.is_some() {
                    seen.spec.volumes.clone()
                } else {
                    Vec::new()
                };
                volumes.into_iter().map(|mount| mount.volume)
            })
            .chain(expected)
            .collect()
    }

    /// After a restart: what nobody uses is let go, what was half-made goes.
    pub(crate) async fn recover_volumes(&self) -> Result<(), Fault> {
        let rows = self
            .store()
            .saved
            .all_volumes()
            .await
            .map_err(|e| from_store(&e))?;
        for row in rows.iter().filter(|row| row.state == VolumeState::Creating) {
            let deleted = self
                .store()
                .saved
                .delete_volume(&row.project, &row.id, Vec::new())
                .await;
            deleted.map_err(|e| from_store(&e))?;
        }
        self.node().recover_volumes(self.volumes_in_use()).await
    }

    /// Lets go of what nobody uses, and removes what no row names: their ids, and how much that frees.
    pub(crate) async fn collect_volumes(&self, dry_run: bool) -> Result<(Vec<String>, u64), Fault> {
        let _lock = self.volume_lock().await;
        let found = self.node().volumes().await?;
        if found.is_empty() {
            return Ok((Vec::new(), 0));
        }
        let rows = self
            .store()
            .saved
            .all_volumes()
            .await
            .map_err(|e| from_store(&e))?;
        let in_use = self.volumes_in_use();
        let (mut collected, mut bytes) = (Vec::new(), 0);
        for id in found {
            let row = rows.iter().find(|row| row.id.as_str() == id);
            let usage = self.node().look_at_volume(&id).await;
            if let (Some(row), Ok(usage)) = (row, &usage) {
                let noted = self
                    .store()
                    .saved
                    .set_volume_used(&row.id, usage.on_host_bytes)
                    .await;
                noted.map_err(|e| from_store(&e))?;
            }
            match row {
                None => {
                    bytes += usage.map_or(0, |usage| usage.on_host_bytes);
                    if !dry_run {
                        self.node().delete_volume(&id).await?;
                    }
                    collected.push(id);
                }
                Some(_) if !dry_run && !in_use.contains(&id) => {
                    // Busy is fine: a transfer is under way, or an instance is still going.
                    if let Err(fault) = self.node().detach_volume(&id).await {
                        tracing::debug!(%fault, "a volume stays attached for now");
                    }
                }
                Some(_) => {}
            }
        }
        Ok((collected, bytes))
    }

    pub(crate) async fn volume_row(&self, project: &ProjectId, which: &str) -> Result<VolumeRow, Fault> {
        let found = self
            .store()
            .saved
            .volume(project, which)
            .await
            .map_err(|e| from_store(&e))?;
        found
            .filter(|row| row.state == VolumeState::Ready)
            .ok_or_else(|| {
                Fault::new(Code::VolumeNotFound, format!("there is no volume {which}"))
                    .hint("`atoll volume list` shows those that exist")
            })
    }

    async fn look_at_volume(&self, row: VolumeRow) -> Result<Volume, Fault> {
        let looked = self.node().look_at_volume(row.id.as_str()).await?;
        let attached_to = self.store().saved.attached_to(&row.id).await;
        Ok(Volume {
            id: row.id,
            name: row.name,
            limit_bytes: row.limit_bytes,
            used_bytes: looked.used_bytes,
            read_only: looked.sealed,
            attached_to: attached_to.map_err(|e| from_store(&e))?,
            created_at: row.created_at,
        })
    }

    fn volume_fact(&self, caller: &Caller, fact: Fact) -> NewFact {
        NewFact {
            at: self.now(),
            project: caller.project().clone(),
            sandbox: None,
            fact,
        }
    }

    async fn volume_lock(&self) -> tokio::sync::OwnedMutexGuard<()> {
        Arc::clone(&self.inner.volume_lock).lock_owned().await
    }
}

/// Makes a read-only image of an archive, in a file that goes unless it is kept.
fn seal(archive: &Path, scratch: &Path) -> Result<tempfile::NamedTempFile, Fault> {
    let mut tree = Tree::new(Limits::default());
    let failed = |error: std::io::Error| Fault::internal(format!("writing an image: {error}"));
    Content::whole_file(archive)
        .and_then(|content| atoll_image::apply_layer(&mut tree, content, Whiteouts::None, |_| Ok(())))
        // Where it lies is no business of whoever sent it.
        .map_err(|e| {
            let shown = e.to_string().replace(&*archive.to_string_lossy(), "the archive");
            Fault::new(Code::ArchiveInvalid, shown)
        })?;
    let file = tempfile::NamedTempFile::new_in(scratch).map_err(failed)?;
    let mut out = std::io::BufWriter::with_capacity(1 << 20, file.as_file());
    atoll_image::write_image(&tree, &mut out, |_, _| Ok(())).map_err(|e| from_image(&e))?;
    std::io::Write::flush(&mut out).map_err(failed)?;
    drop(out);
    Ok(file)
}

fn store_fault(error: &atoll_store::Error) -> Fault {
    match error {
        atoll_store::Error::NameTaken { .. } => {
            Fault::new(Code::NameTaken, error.to_string()).hint("choose another name")
        }
        atoll_store::Error::InUse { .. } => Fault::new(Code::VolumeInUse, error.to_string())
            .hint("kill the sandboxes that were created with it first; paused ones count"),
        other => from_store(other),
    }
}
