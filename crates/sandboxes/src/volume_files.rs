//! Files in volumes, for callers outside of sandboxes.

use atoll_types::{Code, Fault};

pub use atoll_node::{EntryKind, VolumeEntry, VolumeMetadata, WriteInVolume};

use crate::streams::holding;
use crate::{ByteStream, Caller, Pay, Sandboxes};

impl Sandboxes {
    pub async fn volume_entry(
        &self,
        caller: &Caller,
        which: &str,
        path: String,
    ) -> Result<VolumeEntry, Fault> {
        let id = self.volume_row(caller.project(), which).await?.id;
        self.node().volume_entry(&id, path).await
    }

    /// What is below a directory; `depth` 1 is the directory itself. It comes in one piece, so the most that it may take is
    /// paid for before it is asked for.
    pub async fn volume_entries(
        &self,
        caller: &Caller,
        which: &str,
        path: String,
        depth: u32,
        pay: &mut Pay<'_>,
    ) -> Result<Vec<VolumeEntry>, Fault> {
        if depth == 0 {
            return Err(Fault::new(Code::DepthInvalid, "depth must be at least 1"));
        }
        let id = self.volume_row(caller.project(), which).await?.id;
        pay(atoll_node::LARGEST_LISTING)?;
        self.node().volume_entries(&id, path, depth).await
    }

    /// With `parents`, also those above it, and one that is there is fine.
    pub async fn make_dir_in_volume(
        &self,
        caller: &Caller,
        which: &str,
        path: String,
        metadata: VolumeMetadata,
        parents: bool,
    ) -> Result<VolumeEntry, Fault> {
        let id = self.volume_row(caller.project(), which).await?.id;
        self.node().make_dir_in_volume(&id, path, metadata, parents).await
    }

    pub async fn set_metadata_in_volume(
        &self,
        caller: &Caller,
        which: &str,
        path: String,
        metadata: VolumeMetadata,
    ) -> Result<VolumeEntry, Fault> {
        let id = self.volume_row(caller.project(), which).await?.id;
        self.node().set_metadata_in_volume(&id, path, metadata).await
    }

    /// With all that is below.
    pub async fn remove_from_volume(&self, caller: &Caller, which: &str, path: String) -> Result<(), Fault> {
        let id = self.volume_row(caller.project(), which).await?.id;
        self.node().remove_from_volume(&id, path).await
    }

    /// What stands there, and as many bytes as it says.
    pub async fn read_from_volume(
        &self,
        caller: &Caller,
        which: &str,
        path: String,
    ) -> Result<(VolumeEntry, ByteStream), Fault> {
        let id = self.volume_row(caller.project(), which).await?.id;
        let slot = self.transfer(caller.project())?;
        let (entry, bytes) = self.node().read_from_volume(&id, path).await?;
        Ok((entry, holding(slot, bytes)))
    }

    /// Whole or not at all.
    pub async fn write_into_volume(
        &self,
        caller: &Caller,
        which: &str,
        path: String,
        how: WriteInVolume,
        body: ByteStream,
    ) -> Result<VolumeEntry, Fault> {
        let id = self.volume_row(caller.project(), which).await?.id;
        let _slot = self.transfer(caller.project())?;
        self.node().write_into_volume(&id, path, how, body).await
    }
}
