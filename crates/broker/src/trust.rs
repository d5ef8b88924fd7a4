//! Which sandboxes hold the same placeholders and trust the same certificates.

use std::sync::Arc;

/// What a sandbox's placeholders and its certificate authority are derived from; forks keep that of their origin.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct TrustId(Arc<str>);

impl TrustId {
    pub fn new(text: impl Into<Arc<str>>) -> Self {
        Self(text.into())
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}
