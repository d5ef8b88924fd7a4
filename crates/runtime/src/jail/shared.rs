//! Images mounted once for all jails of this server.
//!
//! A mount that is attached nowhere lives as long as somebody holds its descriptor or a copy of it. The server holds one
//! per image; each jail takes a copy. So all jails of a template read through one page cache, and nothing is mounted on
//! the host: when the server dies, running jails keep their copies and the next server starts a new set.

use parking_lot::Mutex;
use std::collections::VecDeque;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;

use rustix::mount::{OpenTreeFlags, open_tree};

/// An image that nobody started lately is let go; a deleted template must not hold its disk space for ever.
const KEPT: usize = 16;

#[derive(Debug, Default)]
pub(super) struct SharedMounts {
    /// Most recently used first.
    mounts: Mutex<VecDeque<(Key, Arc<OwnedFd>)>>,
}

type Key = (u64, u64);

/// A mount that stays as long as this value does.
#[derive(Debug, Clone)]
pub(super) struct SharedMount(Arc<OwnedFd>);

impl SharedMount {
    /// How another process names it.
    pub(super) fn path(&self) -> PathBuf {
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd()).into()
    }
}

impl SharedMounts {
    /// Gives the mount of an image, mounting it if need be. Its first file says which it is. `None`: this kernel does not share them (before 6.15), or we
    /// may not mount. Blocks for a few milliseconds the first time.
    pub(super) fn get(&self, files: &[PathBuf]) -> Option<SharedMount> {
        let image = files.first()?;
        let metadata = std::fs::metadata(image).ok()?;
        let key = (metadata.dev(), metadata.ino());
        let mut mounts = self.mounts.lock();
        if let Some(at) = mounts.iter().position(|(known, _)| *known == key) {
            let found = mounts.remove(at)?;
            let mount = SharedMount(Arc::clone(&found.1));
            mounts.push_front(found);
            return Some(mount);
        }
        let mount = atoll_jailer::disk::mount_image(files)
            .inspect_err(|error| tracing::debug!(%error, image = %image.display(), "image is not shared between jails"))
            .ok()?;
        let flags =
            OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
        open_tree(&mount, "", flags).ok()?;
        let mount = Arc::new(mount);
        mounts.push_front((key, Arc::clone(&mount)));
        mounts.truncate(KEPT);
        Some(SharedMount(mount))
    }
}
