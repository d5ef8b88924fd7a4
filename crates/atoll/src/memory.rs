//! Keeps the server's memory near what it uses.
//!
//! The C library gives every few threads a heap of their own and keeps what was freed in each. After a burst of large
//! requests a server would hold several times what it needs, for ever. So there are no more heaps than threads that work,
//! and what is free in them goes back to the kernel now and then.

use std::thread;
use std::time::Duration;

use atoll_client::output::{Doing as _, Result};
use atoll_confine::sys;

/// How often memory goes back. It takes milliseconds, during which others wait who allocate.
const ROUND: Duration = Duration::from_secs(30);
/// Fewer would make workers wait for each other.
const FEWEST_HEAPS: usize = 2;

/// To be called before there are other threads.
pub(crate) fn limit_heaps() {
    let workers = thread::available_parallelism().map_or(FEWEST_HEAPS, usize::from);
    sys::limit_heaps(i32::try_from(workers.max(FEWEST_HEAPS)).unwrap_or(i32::MAX));
}

/// Starts to give memory back. Ends with the process.
pub(crate) fn start_trimming() -> Result<()> {
    thread::Builder::new()
        .name("memory".to_owned())
        .spawn(|| {
            loop {
                thread::sleep(ROUND);
                sys::trim_heaps();
            }
        })
        .doing("cannot start the thread that gives memory back")?;
    Ok(())
}
