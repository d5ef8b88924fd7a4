//! Work that blocks, on threads that may.

use futures_util::future::Either;
use tokio::task::JoinError;

/// Begins at once; the future tells how it ended. Not for work that hands its results to somebody else on the way.
pub fn run<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> impl Future<Output = Result<T, JoinError>> + Send {
    if crate::testing::is_determined() {
        return Either::Left(std::future::ready(Ok(work())));
    }
    Either::Right(tokio::task::spawn_blocking(work))
}
