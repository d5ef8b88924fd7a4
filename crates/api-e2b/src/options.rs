//! How the wire presents itself.

use std::path::PathBuf;

/// The version of E2B's in-sandbox agent that we answer like; SDKs switch features on by it.
pub(crate) const ENVD_VERSION: &str = "0.6.13";

#[derive(Debug, Clone)]
pub struct Options {
    /// `https` where a TLS terminator stands in front; it is what servers in sandboxes are told.
    pub public_scheme: String,
    /// The domains under which ports of sandboxes appear, the one to tell first.
    pub domains: Vec<String>,
    /// The port by which the world comes; `None`: the one that a request came to.
    pub public_port: Option<u16>,
    /// Where the first domain is served over TLS, if it has a listener of its own.
    pub tls_port: Option<u16>,
    /// Whether sandboxes reach the public internet unless they say otherwise.
    pub internet: bool,
    /// Where uploads for templates are kept. What a killed server left there may be deleted at the next start.
    pub scratch: PathBuf,
}
