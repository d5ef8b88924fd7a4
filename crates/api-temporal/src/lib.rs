//! Temporal's gRPC on top of the workflow engine: `WorkflowService`, `OperatorService` and health.
//!
//! Every call but health needs an API key, see [`Access`]. Who opens the connections decides whether they are plain or end
//! TLS here.
//!
//! Thin: a method checks what only the wire knows (deadlines, page sizes, names of fields), asks the engine, and turns a
//! refusal into a status with the details that clients look for. A method that is not here answers `UNIMPLEMENTED`, and no
//! capability that the system or a namespace advertises depends on one.

#![allow(
    deprecated,
    reason = "clients still send, and read, what the wire has deprecated"
)]

mod access;
mod connection;
mod health;
mod operator;
mod oversize;
mod status;
mod weighed;
mod workflow;

use std::future::Future;

pub use access::{Access, Keys};

use std::time::Duration;

use atoll_front::{Front, Guarded};
use atoll_workflows::Engine;
use connection::Connection;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_stream::{Stream, StreamExt as _};
use tonic::codec::CompressionEncoding;
use tonic::transport::Server;

mod generated {
    #![allow(
        clippy::all,
        clippy::pedantic,
        clippy::nursery,
        clippy::allow_attributes_without_reason,
        clippy::use_self,
        missing_debug_implementations,
        unreachable_pub,
        reason = "generated from the descriptors"
    )]
    pub(crate) mod workflow {
        tonic::include_proto!("temporal.api.workflowservice.v1");
    }
    pub(crate) mod operator {
        tonic::include_proto!("temporal.api.operatorservice.v1");
    }
    pub(crate) mod health {
        tonic::include_proto!("grpc.health.v1");
    }
}

use crate::oversize::MAX_REQUEST;
use generated::health::health_server::HealthServer;
use generated::operator::operator_service_server::OperatorServiceServer;
use generated::workflow::workflow_service_server::WorkflowServiceServer;

/// More than the largest answer that the engine's limits allow, and what goes around it.
const MAX_ANSWER: usize = 64 * 1024 * 1024;

/// What a health check may carry; anybody may send one.
const MAX_HEALTH: usize = 4 * 1024;
/// Calls on one connection at a time. A worker waits for tasks with many.
const MAX_CALLS: u32 = 1024;
/// The largest head of a call. Strangers send heads, too, and h2 may keep one for as long as its table of names refers to it.
const MAX_HEAD: u32 = 16 * 1024;
/// How often a silent peer is asked whether it is there, and how long it may take to say so.
const PING: Duration = Duration::from_secs(60);
const PONG: Duration = Duration::from_secs(20);
/// Calls that were taken back before they began, and calls that we had to refuse: more of them at once end the connection.
const MAX_RESETS: usize = 128;

/// Serves connections as they come until `stop` is done, then lets requests that are being answered finish.
pub async fn serve<C>(
    engine: Engine,
    access: Access,
    front: Front,
    connections: impl Stream<Item = Guarded<C>> + Send,
    stop: impl Future<Output = ()> + Send,
) -> std::io::Result<()>
where
    C: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let patience = front.patience;
    let incoming = connections.map(move |stream| Ok::<_, std::io::Error>(Connection::new(stream, patience)));
    // Clients compress by default, and do not connect to a server that cannot read it. Answers are not compressed: that is
    // work for the threads that serve everybody, of a size that a tenant chooses.
    let workflow = WorkflowServiceServer::new(workflow::Service::new(engine.clone()))
        .accept_compressed(CompressionEncoding::Gzip)
        .max_decoding_message_size(MAX_REQUEST)
        .max_encoding_message_size(MAX_ANSWER);
    let operator = OperatorServiceServer::new(operator::Service::new(engine))
        .accept_compressed(CompressionEncoding::Gzip);
    let health = HealthServer::new(health::Service)
        .accept_compressed(CompressionEncoding::Gzip)
        .max_decoding_message_size(MAX_HEALTH);
    Server::builder()
        .max_concurrent_streams(MAX_CALLS)
        .http2_max_header_list_size(MAX_HEAD)
        .http2_keepalive_interval(Some(PING))
        .http2_keepalive_timeout(Some(PONG))
        .http2_max_pending_accept_reset_streams(Some(MAX_RESETS))
        .http2_max_local_error_reset_streams(Some(MAX_RESETS))
        .layer(access::Gate { access, front })
        .add_service(workflow)
        .add_service(operator)
        .add_service(health)
        .serve_with_incoming_shutdown(incoming, stop)
        .await
        .map_err(std::io::Error::other)
}
