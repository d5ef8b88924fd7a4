//! A client on the wire of durable workflows, without an SDK: what the bench loads servers with, and what the workflow of the
//! demo speaks.

use std::time::Duration;

use prost::Message;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Channel, Endpoint};
use tonic_prost::ProstCodec;

use crate::output::{Doing, Error, Result};

/// Longer than a server lets a poll wait.
const LONGEST_CALL: Duration = Duration::from_secs(70);

#[derive(Debug)]
pub struct WorkflowClient {
    grpc: Grpc<Channel>,
    authorization: Option<MetadataValue<Ascii>>,
}

impl WorkflowClient {
    pub async fn open(url: &str, key: Option<&str>) -> Result<Self> {
        let channel = Endpoint::from_shared(url.to_owned())
            .doing("cannot use the server's address")?
            .tcp_nodelay(true)
            .connect()
            .await
            .doing("cannot connect to the server")?;
        let authorization = match key {
            Some(key) => Some(format!("Bearer {key}").parse().doing("cannot use the key")?),
            None => None,
        };
        Ok(Self {
            grpc: Grpc::new(channel),
            authorization,
        })
    }

    /// Calls a method of `WorkflowService`.
    pub async fn call<Q, A>(&mut self, method: &'static str, message: Q) -> Result<A>
    where
        Q: Message + Send + Sync + 'static,
        A: Message + Default + Send + Sync + 'static,
    {
        let path: PathAndQuery = format!("/temporal.api.workflowservice.v1.WorkflowService/{method}")
            .parse()
            .doing("cannot call the server")?;
        let mut request = tonic::Request::new(message);
        request.set_timeout(LONGEST_CALL);
        if let Some(authorization) = &self.authorization {
            request
                .metadata_mut()
                .insert("authorization", authorization.clone());
        }
        self.grpc.ready().await.doing("the server went away")?;
        let answer = self
            .grpc
            .unary(request, path, ProstCodec::<Q, A>::default())
            .await;
        let answer = answer.map_err(|status| Error {
            code: Some(format!("{:?}", status.code())),
            ..Error::new(format!("{method}: {}", status.message()))
        })?;
        Ok(answer.into_inner())
    }
}
