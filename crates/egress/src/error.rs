//! Why the proxy cannot start. What is refused later is a decision, not an error: see [`crate::EgressEvent`].

use atoll_broker::BrokerError;

use crate::intercept::InterceptError;

pub type Result<T, E = Error> = std::result::Result<T, E>;

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    #[error("cannot listen for the sandboxes' {what}: {source}")]
    Listen {
        what: &'static str,
        source: std::io::Error,
    },
    #[error(transparent)]
    Broker(#[from] BrokerError),
    #[error(transparent)]
    Intercept(#[from] InterceptError),
}
