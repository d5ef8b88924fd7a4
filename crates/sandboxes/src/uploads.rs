//! What is on its way to a project's storage, and counts as stored meanwhile: uploads, which lie in scratch until they are
//! what they were sent for, or for as long as they are kept there; artifacts, volumes and saves that are being made.
//!
//! What must hold: however many at once, a project stores no more than it may, but for one save: nobody knows before how much of
//! a sandbox is new, so one that begins below the limit may end above it.

use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use atoll_image::Room;
use atoll_types::{Code, Fault, InstanceId, Isolation, ProjectId, format_bytes};

use crate::Sandboxes;
use crate::faults::from_store;

/// What each project has on its way.
#[derive(Debug, Default)]
pub(crate) struct Uploads(Mutex<BTreeMap<ProjectId, OnTheWay>>);

/// Of a project, as long as it has anything on its way.
#[derive(Debug, Default)]
struct OnTheWay {
    bytes: u64,
    /// What was on its way and is stored now. Whoever began before that has not seen it among what was stored.
    stored: u64,
    rooms: usize,
}

/// The room that an upload takes in scratch. It is given back when this is dropped: drop it when the files are gone.
#[derive(Debug)]
pub struct UploadRoom {
    uploads: Arc<Uploads>,
    project: ProjectId,
    /// What the project had stored when the upload began, and may store. `None`: as much as there is.
    quota: Option<(u64, u64)>,
    /// [`OnTheWay::stored`] when it began.
    since: u64,
    taken: AtomicU64,
}

impl Uploads {
    /// So many bytes more for `room`; what its project has on its way then, and what it stored since the room was taken.
    fn add(&self, room: &UploadRoom, bytes: u64) -> (u64, u64) {
        let mut all = self.0.lock();
        let ours = all.entry(room.project.clone()).or_default();
        ours.bytes = ours.bytes.saturating_add(bytes);
        (ours.bytes, ours.stored.saturating_sub(room.since))
    }

    /// What a project has on its way, and what is kept for it in scratch.
    pub(crate) fn of(&self, project: &ProjectId) -> u64 {
        let all = self.0.lock();
        all.get(project).map_or(0, |ours| ours.bytes)
    }
}

impl UploadRoom {
    /// Of a project without a quota. Take it before what is stored is looked up, so that nothing is missed in between.
    fn new(uploads: &Arc<Uploads>, project: &ProjectId) -> Self {
        let mut all = uploads.0.lock();
        let ours = all.entry(project.clone()).or_default();
        ours.rooms += 1;
        Self {
            uploads: Arc::clone(uploads),
            project: project.clone(),
            quota: None,
            since: ours.stored,
            taken: AtomicU64::new(0),
        }
    }

    /// Before so many bytes are written.
    pub fn take(&self, bytes: u64) -> Result<(), Fault> {
        let (on_the_way, since) = self.uploads.add(self, bytes);
        self.taken.fetch_add(bytes, Ordering::Relaxed);
        match self.quota {
            Some((stored, limit)) => {
                let stored = stored.saturating_add(since);
                match stored.saturating_add(on_the_way) > limit {
                    true => Err(Self::refused(stored, on_the_way, limit)),
                    false => Ok(()),
                }
            }
            None => Ok(()),
        }
    }

    /// What was on its way is stored, and counts as that from now on.
    pub(crate) fn stored(self) {
        let mut all = self.uploads.0.lock();
        if let Some(ours) = all.get_mut(&self.project) {
            ours.stored = ours.stored.saturating_add(self.taken.load(Ordering::Relaxed));
        }
    }

    /// For a save of about so many bytes, which is refused if nothing fits any more beside what else is on its way.
    fn take_for_save(&self, bytes: u64) -> Result<(), Fault> {
        let (on_the_way, since) = self.uploads.add(self, bytes);
        self.taken.fetch_add(bytes, Ordering::Relaxed);
        match self.quota {
            Some((stored, limit))
                if stored.saturating_add(since).saturating_add(on_the_way - bytes) >= limit =>
            {
                Err(Self::refused(stored.saturating_add(since), on_the_way, limit))
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
        let mut all = self.uploads.0.lock();
        if let Some(ours) = all.get_mut(&self.project) {
            ours.bytes = ours.bytes.saturating_sub(*self.taken.get_mut());
            ours.rooms -= 1;
            if ours.rooms == 0 {
                all.remove(&self.project);
            }
        }
    }
}

/// What is built is stored as it is built, step by step.
impl Room for UploadRoom {
    fn take(&self, bytes: u64) -> Result<(), Fault> {
        Self::take(self, bytes)
    }

    fn left(&self) -> u64 {
        let (on_the_way, since) = self.uploads.add(self, 0);
        self.quota.map_or(u64::MAX, |(stored, limit)| {
            limit.saturating_sub(stored.saturating_add(since).saturating_add(on_the_way))
        })
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
        let mut room = UploadRoom::new(&self.inner.uploads, project);
        if let Some(limit) = self.settings().max_storage_per_project {
            self.check_storage(project).await?;
            let used = self.store().saved.project_storage(project).await;
            let used = used.map_err(|e| from_store(&e))?.total();
            room.quota = Some((used.saturating_add(self.template_bytes(project).await?), limit));
        }
        Ok(room)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uploads_share_what_their_project_may_store() {
        let uploads = Arc::new(Uploads::default());
        let room = |n: u8, stored: u64| {
            let mut room = UploadRoom::new(&uploads, &ProjectId::from_entropy([n; 20]));
            room.quota = Some((stored, 100));
            room
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
        // Whoever is still at it has not seen what was stored meanwhile.
        let (one, other) = (room(1, 30), room(1, 30));
        one.take(60).unwrap();
        one.stored();
        assert_eq!(uploads.of(&ProjectId::from_entropy([1; 20])), 0);
        other.take(10).unwrap();
        other.take(1).unwrap_err();
        drop(other);
        room(1, 90).take(10).unwrap();
        let mut unlimited = room(3, 0);
        unlimited.quota = None;
        unlimited.take(u64::MAX).unwrap();
    }
}
