//! Files in volumes, for callers outside of sandboxes.
//!
//! What must hold: an upload that stands still is given up, so that nobody holds a thread for ever.

use std::io;
use std::time::Duration;

use atoll_types::{Code, Fault};
use futures_util::StreamExt as _;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::io::{StreamReader, SyncIoBridge};

pub use atoll_volumes::{
    Entry as VolumeEntry, EntryKind, Metadata as VolumeMetadata, WriteFile as WriteInVolume,
};

use crate::faults::from_volumes;
use crate::{ByteStream, Caller, Pay, Sandboxes};

/// An upload that stands still for so long is given up.
const PATIENCE: Duration = Duration::from_secs(60);
const PIECE: usize = 256 * 1024;

impl Sandboxes {
    pub async fn volume_entry(
        &self,
        caller: &Caller,
        which: &str,
        path: String,
    ) -> Result<VolumeEntry, Fault> {
        let id = self.volume_row(caller.project(), which).await?.id;
        self.on_volumes(move |volumes| volumes.entry(id.as_str(), &path))
            .await
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
        pay(atoll_volumes::LARGEST_LISTING)?;
        self.on_volumes(move |volumes| volumes.entries(id.as_str(), &path, depth))
            .await
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
        self.on_volumes(move |volumes| volumes.make_dir(id.as_str(), &path, metadata, parents))
            .await
    }

    pub async fn set_metadata_in_volume(
        &self,
        caller: &Caller,
        which: &str,
        path: String,
        metadata: VolumeMetadata,
    ) -> Result<VolumeEntry, Fault> {
        let id = self.volume_row(caller.project(), which).await?.id;
        self.on_volumes(move |volumes| volumes.set_metadata(id.as_str(), &path, metadata))
            .await
    }

    /// With all that is below.
    pub async fn remove_from_volume(&self, caller: &Caller, which: &str, path: String) -> Result<(), Fault> {
        let id = self.volume_row(caller.project(), which).await?.id;
        self.on_volumes(move |volumes| volumes.remove(id.as_str(), &path))
            .await
    }

    /// What stands there, and as many bytes as it says.
    pub async fn read_from_volume(
        &self,
        caller: &Caller,
        which: &str,
        path: String,
    ) -> Result<(VolumeEntry, ByteStream), Fault> {
        let id = self.volume_row(caller.project(), which).await?.id;
        let volumes = std::sync::Arc::clone(&self.inner.volumes);
        let (begin, begun) = oneshot::channel();
        let (sender, receiver) = mpsc::channel(4);
        let work = crate::blocking::run(move || {
            let pieces = crate::portable::Pieces::new(sender.clone());
            let mut out = io::BufWriter::with_capacity(PIECE, pieces);
            let begin = |entry: &VolumeEntry| {
                let _ = begin.send(entry.clone());
            };
            let read = volumes.read_file(id.as_str(), &path, begin, &mut out);
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
        self.on_volumes(move |volumes| volumes.write_file(id.as_str(), &path, how, &mut input))
            .await
    }
}
