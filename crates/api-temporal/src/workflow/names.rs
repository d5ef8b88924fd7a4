//! What the server says about itself, and about its namespaces. Only what is true is advertised: SDKs behave accordingly.

use atoll_workflow_core::{Limits, Refusal, duration, nanos};
use atoll_workflows::Namespace;
use temporalio_protos::temporal::api::enums::v1::{ArchivalState, NamespaceState};
use temporalio_protos::temporal::api::namespace::v1 as namespace;
use temporalio_protos::temporal::api::replication::v1::{
    ClusterReplicationConfig, NamespaceReplicationConfig,
};
use temporalio_protos::temporal::api::version::v1::{ReleaseInfo, VersionInfo};
use temporalio_protos::temporal::api::workflowservice::v1 as wire;

/// The release whose behaviour is followed; some clients look at it.
const SERVER_VERSION: &str = "1.32.0";
/// There is one, and it has no name of its own.
const CLUSTER: &str = "active";

pub(super) fn system_info() -> wire::GetSystemInfoResponse {
    wire::GetSystemInfoResponse {
        server_version: SERVER_VERSION.to_owned(),
        capabilities: Some(wire::get_system_info_response::Capabilities {
            signal_and_query_header: true,
            internal_error_differentiation: true,
            activity_failure_include_heartbeat: true,
            supports_schedules: true,
            encoded_failure_attributes: true,
            build_id_based_versioning: false,
            upsert_memo: true,
            eager_workflow_start: true,
            sdk_metadata: true,
            count_group_by_execution_status: true,
            nexus: false,
            ..Default::default()
        }),
    }
}

pub(super) fn cluster_info() -> wire::GetClusterInfoResponse {
    wire::GetClusterInfoResponse {
        supported_clients: [
            ("temporal-cli", "<2.0.0"),
            ("temporal-go", "<2.0.0"),
            ("temporal-java", "<2.0.0"),
            ("temporal-php", "<3.0.0"),
            ("temporal-server", "<2.0.0"),
            ("temporal-typescript", "<2.0.0"),
            ("temporal-ui", "<3.0.0"),
        ]
        .into_iter()
        .map(|(name, versions)| (name.to_owned(), versions.to_owned()))
        .collect(),
        server_version: SERVER_VERSION.to_owned(),
        cluster_id: "00000000-0000-0000-0000-000000000001".to_owned(),
        version_info: Some(VersionInfo {
            current: Some(ReleaseInfo {
                version: SERVER_VERSION.to_owned(),
                ..Default::default()
            }),
            ..Default::default()
        }),
        cluster_name: CLUSTER.to_owned(),
        history_shard_count: 1,
        persistence_store: "sqlite".to_owned(),
        visibility_store: "sqlite".to_owned(),
        ..Default::default()
    }
}

fn info(known: &Namespace) -> namespace::NamespaceInfo {
    let limits = Limits::default();
    let blob = i64::try_from(limits.blob_bytes).unwrap_or(i64::MAX);
    let completion = i64::try_from(limits.completion_bytes).unwrap_or(i64::MAX);
    namespace::NamespaceInfo {
        name: known.name.clone(),
        state: if known.deleting {
            NamespaceState::Deleted.into()
        } else {
            NamespaceState::Registered.into()
        },
        description: known.description.clone(),
        owner_email: known.owner.clone(),
        data: known.data.clone().into_iter().collect(),
        id: known.id.clone(),
        capabilities: Some(namespace::namespace_info::Capabilities {
            eager_workflow_start: true,
            sync_update: true,
            async_update: true,
            worker_poll_complete_on_shutdown: true,
            workflow_task_completion_pagination: true,
            ..Default::default()
        }),
        limits: Some(namespace::namespace_info::Limits {
            blob_size_limit_error: blob,
            memo_size_limit_error: blob,
            workflow_task_completion_size_limit_error: completion,
        }),
        supports_schedules: true,
    }
}

fn config(known: &Namespace) -> namespace::NamespaceConfig {
    namespace::NamespaceConfig {
        workflow_execution_retention_ttl: Some(duration(known.retention)),
        bad_binaries: Some(namespace::BadBinaries::default()),
        history_archival_state: ArchivalState::Disabled.into(),
        visibility_archival_state: ArchivalState::Disabled.into(),
        ..Default::default()
    }
}

fn replication() -> NamespaceReplicationConfig {
    NamespaceReplicationConfig {
        active_cluster_name: CLUSTER.to_owned(),
        clusters: vec![ClusterReplicationConfig {
            cluster_name: CLUSTER.to_owned(),
            ..Default::default()
        }],
        ..Default::default()
    }
}

pub(super) fn describe(known: &Namespace) -> wire::DescribeNamespaceResponse {
    wire::DescribeNamespaceResponse {
        namespace_info: Some(info(known)),
        config: Some(config(known)),
        replication_config: Some(replication()),
        ..Default::default()
    }
}

pub(super) fn new(request: wire::RegisterNamespaceRequest, project: String) -> Namespace {
    Namespace {
        project,
        name: request.namespace,
        id: String::new(),
        description: request.description,
        owner: request.owner_email,
        data: request.data.into_iter().collect(),
        retention: nanos(request.workflow_execution_retention_period.as_ref()),
        ..Default::default()
    }
}

pub(super) fn change(known: &mut Namespace, request: wire::UpdateNamespaceRequest) -> Result<(), Refusal> {
    if request.promote_namespace || !request.delete_bad_binary.is_empty() {
        return Err(Refusal::Unimplemented(
            "promoting a namespace and bad binaries are not supported".to_owned(),
        ));
    }
    if let Some(info) = request.update_info {
        if !info.description.is_empty() {
            known.description = info.description;
        }
        if !info.owner_email.is_empty() {
            known.owner = info.owner_email;
        }
        known.data.extend(info.data);
    }
    let retention = request
        .config
        .and_then(|config| config.workflow_execution_retention_ttl)
        .map_or(0, |length| nanos(Some(&length)));
    if retention != 0 {
        known.retention = retention;
    }
    Ok(())
}

pub(super) fn changed(known: &Namespace) -> wire::UpdateNamespaceResponse {
    wire::UpdateNamespaceResponse {
        namespace_info: Some(info(known)),
        config: Some(config(known)),
        replication_config: Some(replication()),
        ..Default::default()
    }
}
