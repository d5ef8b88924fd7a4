//! What is on its way to a project's storage, and counts as stored meanwhile: uploads, which lie in scratch until they are
//! what they were sent for, or for as long as they are kept there; artifacts, volumes and saves that are being made.
//!
//! What must hold: however many at once, a project stores no more than it may, but for one save: nobody knows before how much of
//! a sandbox is new, so one that begins below the limit may end above it.

use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use atoll_types::{Code, Fault, InstanceId, Isolation, ProjectId, format_bytes};

use crate::Sandboxes;
use crate::faults::from_store;

/// Bytes of all uploads that are not over, by project.
#[derive(Debug, Default)]
pub(crate) struct Uploads(Mutex<BTreeMap<ProjectId, u64>>);

/// The room that an upload takes in scratch. It is given back when this is dropped: drop it when the files are gone.
#[derive(Debug)]
pub struct UploadRoom {
    uploads: Arc<Uploads>,
    project: ProjectId,
    /// What the project had stored when the upload began, and may store. `None`: as much as there is.
    quota: Option<(u64, u64)>,
    taken: AtomicU64,
}

impl Uploads {
    /// So many bytes more; what the project has on its way then.
    fn add(&self, project: &ProjectId, bytes: u64) -> u64 {
        let mut all = self.0.lock();
        let ours = all.entry(project.clone()).or_default();
        *ours = ours.saturating_add(bytes);
        *ours
    }

    /// What a project has on its way, and what is kept for it in scratch.
    pub(crate) fn of(&self, project: &ProjectId) -> u64 {
        let all = self.0.lock();
        all.get(project).copied().unwrap_or(0)
    }

    fn remove(&self, project: &ProjectId, bytes: u64) {
        let mut all = self.0.lock();
        if let Some(ours) = all.get_mut(project) {
            *ours = ours.saturating_sub(bytes);
            if *ours == 0 {
                all.remove(project);
            }
        }
    }
}

impl UploadRoom {
    /// Before so many bytes are written.
    pub fn take(&self, bytes: u64) -> Result<(), Fault> {
        let on_the_way = self.uploads.add(&self.project, bytes);
        self.taken.fetch_add(bytes, Ordering::Relaxed);
        match self.quota {
            Some((stored, limit)) if stored.saturating_add(on_the_way) > limit => {
                Err(Self::refused(stored, on_the_way, limit))
            }
            _ => Ok(()),
        }
    }

    /// For a save of about so many bytes, which is refused if nothing fits any more beside what else is on its way.
    fn take_for_save(&self, bytes: u64) -> Result<(), Fault> {
        let on_the_way = self.uploads.add(&self.project, bytes);
        self.taken.fetch_add(bytes, Ordering::Relaxed);
        match self.quota {
            Some((stored, limit)) if stored.saturating_add(on_the_way - bytes) >= limit => {
                Err(Self::refused(stored, on_the_way, limit))
            }
            _ => Ok(()),
        }
    }

    fn refused(stored: u64, on_the_way: u64, limit: u64) -> Fault {
        Fault::new(
            Code::StorageQuotaExceeded,
            format!(
                "the project uses {} of its {} of storage, and what is on its way would need {} more",
                format_bytes(stored),
                format_bytes(limit),
                format_bytes(on_the_way)
            ),
        )
        .hint(
            "delete snapshots, paused sandboxes, volumes, artifacts or templates, store less at once, or have the operator \
             raise the quota",
        )
    }
}

impl Drop for UploadRoom {
    fn drop(&mut self) {
        self.uploads.remove(&self.project, *self.taken.get_mut());
    }
}

impl Sandboxes {
    /// Room for a save of an instance: as much as it has in memory and files now.
    pub(crate) async fn room_for_save(
        &self,
        project: &ProjectId,
        isolation: Isolation,
        instance: &InstanceId,
    ) -> Result<UploadRoom, Fault> {
        let room = self.upload_room(project).await?;
        if room.quota.is_some() {
            let usage = self.node().usage(isolation, instance).await?;
            room.take_for_save(usage.memory_bytes.saturating_add(usage.disk_bytes.unwrap_or(0)))?;
        }
        Ok(room)
    }

    /// Begins an upload of a project: refused where nothing fits any more.
    pub async fn upload_room(&self, project: &ProjectId) -> Result<UploadRoom, Fault> {
        let quota = match self.settings().max_storage_per_project {
            None => None,
            Some(limit) => {
                self.check_storage(project).await?;
                let used = self.store().saved.project_storage(project).await;
                let used = used.map_err(|e| from_store(&e))?.total();
                Some((used.saturating_add(self.template_bytes(project).await?), limit))
            }
        };
        Ok(UploadRoom {
            uploads: Arc::clone(&self.inner.uploads),
            project: project.clone(),
            quota,
            taken: AtomicU64::new(0),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uploads_share_what_their_project_may_store() {
        let uploads = Arc::new(Uploads::default());
        let room = |n: u8, stored: u64| UploadRoom {
            uploads: Arc::clone(&uploads),
            project: ProjectId::from_entropy([n; 20]),
            quota: Some((stored, 100)),
            taken: AtomicU64::new(0),
        };
        let (one, other) = (room(1, 30), room(1, 30));
        one.take(40).unwrap();
        other.take(30).unwrap();
        let refused = other.take(1).unwrap_err();
        assert_eq!(refused.code, Code::StorageQuotaExceeded);
        // Others have room of their own.
        room(2, 0).take(100).unwrap();
        // What is over makes room.
        drop(one);
        room(1, 30).take(39).unwrap();
        assert_eq!(uploads.of(&ProjectId::from_entropy([1; 20])), 31);
        drop(other);
        assert!(uploads.0.lock().is_empty());
        // A save that is larger than what is left may begin, and no second one beside it.
        let (one, other) = (room(1, 30), room(1, 30));
        one.take_for_save(1000).unwrap();
        other.take_for_save(1).unwrap_err();
        drop((one, other));
        room(1, 99).take_for_save(1).unwrap();
        room(1, 100).take_for_save(0).unwrap_err();
        let mut unlimited = room(3, 0);
        unlimited.quota = None;
        unlimited.take(u64::MAX).unwrap();
    }
}
