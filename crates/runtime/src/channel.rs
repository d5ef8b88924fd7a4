//! The host's end of a guest channel.

/// A handle to the agent in one instance.
#[derive(Debug, Clone)]
pub struct Guest;
