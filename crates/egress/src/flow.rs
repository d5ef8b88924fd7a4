//! A guest's TCP connections, from accept to end.
//!
//! ```text
//!   accept ── whose? ── port 53? ──> dns
//!               │
//!             what does the address stand for?
//!               ├── a name ──────── peek ── TLS, HTTP or neither ── does what it says agree? ─┐
//!               ├── forgotten ───── peek ── it must say a name itself ────────────────────────┤
//!               └── a real one ──── rules about addresses only ───────────────────────────────┤
//!                                                                                             │
//!                 refused: RST, or 403 to plain HTTP  <── policy.connect ──┬── dial, splice  <┘
//!                                                                          └── intercept
//! ```
//! ECH: an outer ClientHello is treated as any other. We dial the name that it shows, resolved by ourselves, so what is
//! encrypted inside can at most name another site of the same operator, which is just what an encrypted `Host` can do in
//! any connection that is not intercepted. To refuse it would refuse browsers, which send a pretended one always. Only
//! names that exist for nothing but ECH are refused: behind them may be anybody. Real ECH needs the keys in HTTPS
//! records, and those are not answered to guests.

pub(crate) mod classify;
mod copy;
pub(crate) mod hello;
mod opened;
mod peek;
mod refuse;
#[cfg(test)]
mod tests;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

pub(crate) use copy::Pool;

use crate::Shared;
use crate::events::{EgressProtocol, Note};
use crate::limits::{Opened, Place};
use crate::sever::reset;
use crate::tenants::TenantState;

/// How long no connection is taken after the host had no room for one.
const BREATH: Duration = Duration::from_millis(50);

/// Takes connections until it is dropped; then those that it took end too.
pub(crate) async fn listen(shared: Arc<Shared>, listener: TcpListener) {
    let mut flows = JoinSet::new();
    loop {
        let accepted = loop {
            tokio::select! {
                accepted = listener.accept() => break accepted,
                Some(_) = flows.join_next() => {}
            }
        };
        match accepted {
            Ok((stream, peer)) => {
                if let Some((tenant, held)) = admitted(&shared, &stream, peer) {
                    let shared = Arc::clone(&shared);
                    flows.spawn(async move {
                        let _held = held;
                        serve(&shared, tenant, stream, peer).await;
                    });
                } else {
                    reset(&stream);
                }
            }
            // The connection is gone before it was taken, or the host has no descriptors: either passes.
            Err(error) => {
                tracing::debug!(%error, "a connection could not be taken");
                tokio::time::sleep(BREATH).await;
            }
        }
    }
}

/// Whose connection it is, and what it holds until it ends. Those for whom there is no room are told so at once, for if they
/// waited, others would wait behind them.
fn admitted(
    shared: &Shared,
    stream: &TcpStream,
    peer: SocketAddr,
) -> Option<(Arc<TenantState>, (Opened, Place))> {
    let tenant = shared.tenants.of(peer.ip())?;
    let open = tenant.allowance.open(shared.total.crowded());
    match open.and_then(|open| Ok((open, shared.total.place(&tenant.now().project)?))) {
        Ok(held) => Some((tenant, held)),
        Err(exhausted) => {
            let port = stream
                .local_addr()
                .map_or(0, |local| shared.origin.of(local, peer).port());
            let decision = exhausted.decision();
            tenant
                .events
                .note(Note::decided(&decision, EgressProtocol::Tcp, None, None, port));
            None
        }
    }
}

async fn serve(shared: &Arc<Shared>, tenant: Arc<TenantState>, stream: TcpStream, peer: SocketAddr) {
    let outcome = async {
        let destination = shared.origin.of(stream.local_addr()?, peer);
        crate::dial::prepare(&stream);
        if destination.port() == 53 {
            return crate::dns::serve_stream(shared, &tenant, stream).await;
        }
        // Boxed: most connections spend their lives in a small part of it.
        Box::pin(opened::run(shared, &tenant, stream, destination)).await;
        Ok::<_, io::Error>(())
    };
    tokio::select! {
        outcome = outcome => if let Err(error) = outcome {
            tracing::debug!(%error, "a guest's connection broke");
        },
        // The streams are dropped with the future above.
        () = tenant.gone() => {}
    }
}
