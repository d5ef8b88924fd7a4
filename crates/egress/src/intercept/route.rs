//! What a connection that is read needs from the flow that it belongs to.

use std::future::Future;
use std::net::IpAddr;
use std::sync::Arc;

use atoll_policy::{Decision, Name};
use atoll_types::SecretRef;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::watch;

use crate::Tenant;

/// One flow, as it is seen from here.
pub(crate) trait Route: Send + Sync + 'static {
    type Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static;

    /// What is dialled, and what each request must name.
    fn name(&self) -> &Name;
    fn port(&self) -> u16;
    fn tls(&self) -> bool;
    /// Who asks, with the policy as it is now.
    fn tenant(&self) -> Arc<Tenant>;
    fn dial(&self) -> impl Future<Output = Result<(Self::Stream, IpAddr), Undialled>> + Send;
    /// A request was allowed or denied.
    fn decided(&self, decision: &Decision, address: Option<IpAddr>, method: &str);
    /// Tells when what [`Route::tenant`] says has changed.
    fn changes(&self) -> watch::Receiver<u64>;
    /// Both ends are about to be dropped: nothing that still waits in them is to be delivered.
    fn sever(&self);
    /// A secret went out.
    fn used(&self, secret: &SecretRef, address: Option<IpAddr>, method: &str);
}

/// Why there is no connection.
#[derive(Debug)]
pub(crate) enum Undialled {
    /// By the policy, which has the last word on the address. The one who dials tells the log.
    Denied(Decision),
    Failed(String),
}
