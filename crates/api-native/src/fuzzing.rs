//! What the fuzzer may see: every request of this API, read as its route reads it.

use atoll_actions::words;
use atoll_front::range;
use atoll_types::NetworkPolicy;

use crate::extract::{parse_json, parse_private_json, query};
use crate::{
    approvals, artifacts, commands, files, gateway, keys, ledger, network, projects, run, sandboxes, secrets,
    session, snapshots, templates, transfer, volumes, workflows,
};

/// Reads a body as each of the types, and again with a field that no route knows, which must be refused.
macro_rules! read_bodies {
    ($body:expr, $more:expr; $($type:ty),* $(,)?) => {{
        let mut read = 0;
        $(
            if parse_json::<$type>($body).is_ok() {
                read += 1;
                if let Some(more) = $more {
                    assert!(
                        parse_json::<$type>(more).is_err(),
                        "{} takes fields that it does not know",
                        stringify!($type)
                    );
                }
            }
        )*
        read
    }};
}

/// Reads a body as every route's; how many can do something with it. `more` is the same object with an unknown field.
pub fn bodies(body: &[u8], more: Option<&[u8]>) -> usize {
    let read = read_bodies!(body, more;
        approvals::DecideRequest,
        words::SaveArtifactRequest,
        commands::SignalRequest,
        words::command::ExecRequest,
        files::ChmodRequest,
        files::ChownRequest,
        files::MkdirRequest,
        files::RemoveRequest,
        files::RenameRequest,
        files::SymlinkRequest,
        gateway::budgets::SetBudgetRequest,
        gateway::catalogue::SetModelRequest,
        gateway::catalogue::Rates,
        gateway::guards::Guards,
        gateway::keys::CreateModelKeyRequest,
        keys::CreateKeyRequest,
        network::SetNetworkRequest,
        words::PolicyWords,
        projects::CreateProjectRequest,
        run::RunRequest,
        words::CreateSandboxRequest,
        sandboxes::ExtendRequest,
        words::ForkRequest,
        words::PauseRequest,
        words::ResumeRequest,
        session::FromClient,
        snapshots::CollectRequest,
        snapshots::KeepRunningRequest,
        words::SnapshotRequest,
        templates::request::BuildRequest,
        volumes::CreateVolumeRequest,
        workflows::EndRequest,
        workflows::ResetRequest,
        workflows::SignalRequest,
    );
    // The words are turned into commands, which has limits of its own.
    if let Ok(request) = parse_json::<words::CreateSandboxRequest>(body) {
        let _ = request.into_create(60_000, None);
    }
    if let Ok(request) = parse_json::<words::command::ExecRequest>(body) {
        let _ = request.into_run();
    }
    let private = parse_private_json::<secrets::SetSecretRequest>(body).is_ok();
    let rotated = parse_private_json::<secrets::RotateSecretRequest>(body).is_ok();
    let provider = parse_private_json::<gateway::providers::SetProviderRequest>(body).is_ok();
    read + usize::from(private) + usize::from(rotated) + usize::from(provider)
}

/// A policy as clients write it.
pub fn policy(body: &[u8]) -> Option<NetworkPolicy> {
    Some(parse_json::<words::PolicyWords>(body).ok()?.into_policy())
}

macro_rules! read_queries {
    ($text:expr; $($type:ty),* $(,)?) => {{
        let more = format!("{}{}zz_unknown=1", $text, if $text.is_empty() { "" } else { "&" });
        let mut read = 0;
        $(
            if query::<$type>($text).is_ok() {
                read += 1;
                assert!(
                    query::<$type>(&more).is_err(),
                    "{} takes parameters that it does not know",
                    stringify!($type)
                );
            }
        )*
        read
    }};
}

/// Reads a query as every route's; how many can do something with it.
pub fn queries(text: &str) -> usize {
    read_queries!(text;
        approvals::ApprovalsQuery,
        artifacts::ArtifactsQuery,
        commands::LogsQuery,
        files::ListQuery,
        files::PathQuery,
        files::WatchQuery,
        gateway::calls::CallsQuery,
        gateway::calls::SpendQueryArgs,
        keys::WhoseQuery,
        ledger::FactsQuery,
        network::ExplainQuery,
        network::LogQuery,
        secrets::SecretsQuery,
        session::AttachQuery,
        session::NoQuery,
        snapshots::ImportQuery,
        snapshots::SnapshotsQuery,
        templates::request::ArchiveQuery,
        transfer::ReadQuery,
        transfer::WriteQuery,
        volumes::SealQuery,
        volumes::VolumesQuery,
        workflows::HistoryQuery,
        workflows::ListQuery,
        workflows::OneQuery,
    )
}

/// What a `Range` asks for of a file of this size: from where, and how much.
pub fn range(header: &str, size: u64) -> Option<(u64, u64)> {
    let part = range::parse(header)?.of(size)?;
    Some((part.first, part.length))
}
