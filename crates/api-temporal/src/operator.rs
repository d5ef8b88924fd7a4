//! `OperatorService`: what workflows are searched by, and namespaces.

use atoll_workflow_core::Refusal;
use atoll_workflows::Engine;
use temporalio_protos::temporal::api::operatorservice::v1 as wire;
use tonic::{Request, Response, Status};

use crate::access::Caller;
use crate::generated::operator::operator_service_server::OperatorService;
use crate::status::answer;

#[derive(Debug)]
pub(crate) struct Service {
    engine: Engine,
}

impl Service {
    pub(crate) fn new(engine: Engine) -> Self {
        Self { engine }
    }

    /// The namespace that is meant, if the caller may see it.
    fn admit(&self, caller: &Caller, namespace: String) -> Result<String, Status> {
        let namespace = or_default(namespace);
        answer(caller.check(&self.engine, &namespace))?;
        Ok(namespace)
    }
}

fn or_default(namespace: String) -> String {
    if namespace.is_empty() {
        "default".to_owned()
    } else {
        namespace
    }
}

#[tonic::async_trait]
impl OperatorService for Service {
    async fn add_search_attributes(
        &self,
        request: Request<wire::AddSearchAttributesRequest>,
    ) -> Result<Response<wire::AddSearchAttributesResponse>, Status> {
        let caller = Caller::of(&request)?;
        let mut request = request.into_inner();
        request.namespace = self.admit(&caller, request.namespace)?;
        let added = self
            .engine
            .add_search_attributes(&request.namespace, request.search_attributes)
            .await;
        answer(added.map(|()| wire::AddSearchAttributesResponse {}))
    }

    async fn remove_search_attributes(
        &self,
        request: Request<wire::RemoveSearchAttributesRequest>,
    ) -> Result<Response<wire::RemoveSearchAttributesResponse>, Status> {
        let caller = Caller::of(&request)?;
        let mut request = request.into_inner();
        request.namespace = self.admit(&caller, request.namespace)?;
        let removed = self
            .engine
            .change_namespace(&request.namespace, |namespace| {
                for name in &request.search_attributes {
                    namespace.attributes.remove(name).ok_or_else(|| {
                        Refusal::NotFound(format!("Search attribute {name} doesn't exist."))
                    })?;
                }
                Ok(())
            })
            .await;
        answer(removed.map(|_| wire::RemoveSearchAttributesResponse {}))
    }

    async fn list_search_attributes(
        &self,
        request: Request<wire::ListSearchAttributesRequest>,
    ) -> Result<Response<wire::ListSearchAttributesResponse>, Status> {
        let caller = Caller::of(&request)?;
        let name = self.admit(&caller, request.into_inner().namespace)?;
        let found = self.engine.namespace(&name, "");
        answer(found.map(|namespace| wire::ListSearchAttributesResponse {
            custom_attributes: namespace.attributes.into_iter().collect(),
            system_attributes: self.engine.system_attributes().collect(),
            ..Default::default()
        }))
    }

    async fn delete_namespace(
        &self,
        request: Request<wire::DeleteNamespaceRequest>,
    ) -> Result<Response<wire::DeleteNamespaceResponse>, Status> {
        let caller = Caller::of(&request)?;
        let request = request.into_inner();
        let found = self.engine.namespace(&request.namespace, &request.namespace_id);
        let namespace = answer(found)?.into_inner();
        if !caller.may_see(&namespace) {
            let name = format!("{}{}", request.namespace, request.namespace_id);
            return answer(Err(Refusal::NamespaceNotFound(name)));
        }
        let deleted = self.engine.delete_namespace(&namespace.id).await;
        answer(deleted.map(|()| wire::DeleteNamespaceResponse {
            deleted_namespace: namespace.name,
        }))
    }

    async fn list_clusters(
        &self,
        _: Request<wire::ListClustersRequest>,
    ) -> Result<Response<wire::ListClustersResponse>, Status> {
        Ok(Response::new(wire::ListClustersResponse {
            clusters: vec![wire::ClusterMetadata {
                cluster_name: "active".to_owned(),
                history_shard_count: 1,
                is_connection_enabled: true,
                ..Default::default()
            }],
            next_page_token: Vec::new(),
        }))
    }
}
