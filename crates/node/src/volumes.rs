//! Volumes on this machine: bytes that outlive instances.
//!
//! What must hold: an upload that stands still is given up, so that nobody holds a thread for ever.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use atoll_types::{Fault, VolumeId};
use atoll_volumes::{
    Entry as VolumeEntry, Kind, Metadata as VolumeMetadata, Volumes, WriteFile as WriteInVolume,
};
use futures_util::StreamExt as _;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::io::{StreamReader, SyncIoBridge};

use crate::faults::from_volumes;
use crate::node::VolumeBytes;
use crate::pieces::{PIECE, Pieces};
use crate::words::{ByteSource, ByteStream, VolumeLook};
use crate::{LocalNode, blocking};

/// An upload that stands still for so long is given up.
const PATIENCE: Duration = Duration::from_secs(60);

#[async_trait]
impl VolumeBytes for LocalNode {
    async fn create_volume(&self, id: &VolumeId, bytes: u64) -> Result<(), Fault> {
        let id = id.to_string();
        self.on_volumes(move |volumes| volumes.create(&id, bytes)).await
    }

    async fn seal_volume(&self, id: &VolumeId, image: &Path) -> Result<(), Fault> {
        let (id, image) = (id.to_string(), image.to_owned());
        self.on_volumes(move |volumes| volumes.seal(&id, &image)).await
    }

    async fn delete_volume(&self, id: &str) -> Result<(), Fault> {
        let id = id.to_owned();
        self.on_volumes(move |volumes| volumes.delete(&id)).await
    }

    async fn volumes(&self) -> Result<Vec<String>, Fault> {
        let found = self.on_volumes(Volumes::list).await?;
        Ok(found.into_iter().map(|(id, _)| id).collect())
    }

    async fn look_at_volume(&self, id: &str) -> Result<VolumeLook, Fault> {
        let id = id.to_owned();
        let (usage, kind) = self
            .on_volumes(move |volumes| Ok((volumes.usage(&id)?, volumes.kind(&id)?)))
            .await?;
        Ok(VolumeLook {
            used_bytes: usage.used,
            on_host_bytes: usage.on_host,
            sealed: kind == Kind::Sealed,
        })
    }

    async fn attach_volume(&self, id: &str) -> Result<(), Fault> {
        let id = id.to_owned();
        self.on_volumes(move |volumes| volumes.attach(&id))
            .await
            .map(drop)
    }

    async fn detach_volume(&self, id: &str) -> Result<(), Fault> {
        let id = id.to_owned();
        self.on_volumes(move |volumes| volumes.detach(&id)).await
    }

    async fn recover_volumes(&self, in_use: Vec<String>) -> Result<(), Fault> {
        self.on_volumes(move |volumes| {
            let in_use: Vec<&str> = in_use.iter().map(String::as_str).collect();
            volumes.recover(&in_use).map(drop)
        })
        .await
    }

    async fn export_volume(&self, id: &VolumeId) -> Result<ByteStream, Fault> {
        let (sender, receiver) = mpsc::channel(4);
        let (volumes, id) = (Arc::clone(&self.inner.volumes), id.to_string());
        tokio::task::spawn_blocking(move || {
            let mut out = io::BufWriter::with_capacity(PIECE, Pieces::new(sender.clone()));
            let exported = volumes.export(&id, &mut out);
            let flushed = io::Write::flush(&mut out);
            if let Err(error) = exported {
                let _ = sender.blocking_send(Err(from_volumes(&error)));
            } else if let Err(error) = flushed {
                let _ = sender.blocking_send(Err(Fault::internal(error.to_string())));
            }
        });
        Ok(Box::pin(ReceiverStream::new(receiver)))
    }

    async fn import_volume(&self, id: &VolumeId, mut archive: ByteSource) -> Result<u64, Fault> {
        let id = id.to_string();
        let tally = self
            .on_volumes(move |volumes| volumes.import(&id, &mut archive))
            .await?;
        Ok(tally.entries)
    }

    async fn volume_entry(&self, id: &VolumeId, path: String) -> Result<VolumeEntry, Fault> {
        let id = id.to_string();
        self.on_volumes(move |volumes| volumes.entry(&id, &path)).await
    }

    async fn volume_entries(
        &self,
        id: &VolumeId,
        path: String,
        depth: u32,
    ) -> Result<Vec<VolumeEntry>, Fault> {
        let id = id.to_string();
        self.on_volumes(move |volumes| volumes.entries(&id, &path, depth))
            .await
    }

    async fn make_dir_in_volume(
        &self,
        id: &VolumeId,
        path: String,
        metadata: VolumeMetadata,
        parents: bool,
    ) -> Result<VolumeEntry, Fault> {
        let id = id.to_string();
        self.on_volumes(move |volumes| volumes.make_dir(&id, &path, metadata, parents))
            .await
    }

    async fn set_metadata_in_volume(
        &self,
        id: &VolumeId,
        path: String,
        metadata: VolumeMetadata,
    ) -> Result<VolumeEntry, Fault> {
        let id = id.to_string();
        self.on_volumes(move |volumes| volumes.set_metadata(&id, &path, metadata))
            .await
    }

    async fn remove_from_volume(&self, id: &VolumeId, path: String) -> Result<(), Fault> {
        let id = id.to_string();
        self.on_volumes(move |volumes| volumes.remove(&id, &path)).await
    }

    async fn read_from_volume(
        &self,
        id: &VolumeId,
        path: String,
    ) -> Result<(VolumeEntry, ByteStream), Fault> {
        let (volumes, id) = (Arc::clone(&self.inner.volumes), id.to_string());
        let (begin, begun) = oneshot::channel();
        let (sender, receiver) = mpsc::channel(4);
        let work = blocking::run(move || {
            let mut out = io::BufWriter::with_capacity(PIECE, Pieces::new(sender.clone()));
            let begin = |entry: &VolumeEntry| {
                let _ = begin.send(entry.clone());
            };
            let read = volumes.read_file(&id, &path, begin, &mut out);
            let read = read.map_err(|e| from_volumes(&e)).and_then(|()| {
                io::Write::flush(&mut out).map_err(|error| Fault::internal(error.to_string()))
            });
            if let Err(fault) = &read {
                let _ = sender.blocking_send(Err(fault.clone()));
            }
            read
        });
        match begun.await {
            Ok(entry) => Ok((entry, Box::pin(ReceiverStream::new(receiver)))),
            Err(_) => match work.await {
                Ok(Err(fault)) => Err(fault),
                _ => Err(Fault::internal("reading from a volume was interrupted")),
            },
        }
    }

    async fn write_into_volume(
        &self,
        id: &VolumeId,
        path: String,
        how: WriteInVolume,
        body: ByteStream,
    ) -> Result<VolumeEntry, Fault> {
        let id = id.to_string();
        let pieces = futures_util::stream::unfold(Some(body), |body| async move {
            let mut body = body?;
            match tokio::time::timeout(PATIENCE, body.next()).await {
                Ok(None) => None,
                Ok(Some(Ok(piece))) => Some((Ok(piece), Some(body))),
                Ok(Some(Err(fault))) => Some((Err(io::Error::other(fault.to_string())), None)),
                Err(_) => Some((Err(io::Error::other("it stands still")), None)),
            }
        });
        let mut input = SyncIoBridge::new(StreamReader::new(Box::pin(pieces)));
        self.on_volumes(move |volumes| volumes.write_file(&id, &path, how, &mut input))
            .await
    }
}

impl LocalNode {
    pub(crate) async fn on_volumes<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Volumes) -> atoll_volumes::Result<T> + Send + 'static,
    ) -> Result<T, Fault> {
        let volumes = Arc::clone(&self.inner.volumes);
        blocking::run(move || work(&volumes))
            .await
            .map_err(|_| Fault::internal("work on a volume was interrupted"))?
            .map_err(|e| from_volumes(&e))
    }
}
