//! Contents of volumes and saved state on their way to clients, or from them. The machine's end of each has a thread, for as
//! long as the client takes to read or write, and the same threads do all other work with files: so there are only so many.

use atoll_memory::{Slot, Slots};
use atoll_types::{Fault, ProjectId};
use futures_util::StreamExt as _;

use crate::{ByteStream, Sandboxes};

/// Of all projects, and of one. All together are few of the 512 threads that there are.
const AT_ONCE: usize = 128;
const OF_A_PROJECT: usize = 32;

pub(crate) fn slots() -> Slots {
    Slots::new("transfers of volumes and snapshots", AT_ONCE, OF_A_PROJECT)
}

impl Sandboxes {
    /// A place for a transfer, until it is dropped.
    pub(crate) fn transfer(&self, project: &ProjectId) -> Result<Slot, Fault> {
        self.inner.streams.take(project)
    }
}

/// The same bytes, with their place until the last of them was read.
pub(crate) fn holding(slot: Slot, bytes: ByteStream) -> ByteStream {
    Box::pin(bytes.inspect(move |_| {
        let _until_then = &slot;
    }))
}
