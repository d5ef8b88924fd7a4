//! Network namespaces of single threads.
//!
//! A thread that has entered one is never given back to a pool: it is either made for one task here, or lives for links
//! alone ([`crate::worker`]).

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::error::{Doing, Error, Result};
use crate::sys;

/// The calling thread's.
pub(crate) const OWN: &str = "/proc/thread-self/ns/net";

/// The calling thread's namespace, which exists as long as this is open.
pub(crate) fn own() -> Result<OwnedFd> {
    File::open(OWN)
        .map(OwnedFd::from)
        .doing(|| "opening a network namespace")
}

pub(crate) fn enter(namespace: BorrowedFd<'_>) -> Result<()> {
    move_into_link_name_space(namespace, Some(LinkNameSpaceType::Network))
        .doing(|| "entering a network namespace")
}

/// Does something in a namespace, on a thread of its own, and waits for it.
pub(crate) fn within<T: Send>(
    namespace: impl AsFd + Sync,
    task: impl FnOnce() -> io::Result<T> + Send,
) -> io::Result<T> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().spawn_scoped(scope, || {
            enter(namespace.as_fd()).map_err(io::Error::other)?;
            task()
        })?;
        thread
            .join()
            .unwrap_or_else(|_| Err(io::Error::other("the thread failed")))
    })
}

/// Makes a namespace, prepared by a thread of its own that ends afterwards. It exists as long as the result is open.
pub(crate) fn new<T: Send>(prepare: impl FnOnce() -> Result<T> + Send) -> Result<(OwnedFd, T)> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().spawn_scoped(scope, || {
            sys::leave_network().doing(|| "making a network namespace")?;
            let prepared = prepare()?;
            Ok((own()?, prepared))
        });
        thread
            .doing(|| "starting a thread for a network namespace")?
            .join()
            .unwrap_or(Err(Error::Closed))
    })
}

/// Sets `/proc/sys/net/<name>` of the calling thread's namespace.
pub(crate) fn set(name: &str, value: &str) -> Result<()> {
    fs::write(format!("/proc/sys/net/{name}"), value).doing(|| format!("setting net/{name} to {value}"))
}

/// Sets what not every kernel has, and what is not needed for safety.
pub(crate) fn try_set(name: &str, value: &str) {
    if let Err(error) = set(name, value) {
        tracing::debug!(%error, "a setting was left as it is");
    }
}

pub(crate) fn has_v6() -> bool {
    fs::exists("/proc/sys/net/ipv6").unwrap_or(false)
}
