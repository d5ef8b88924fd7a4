//! The service `filesystem.Filesystem`.

use atoll_guest_protocol::EntryKind;
use atoll_sandboxes::FileChange;
use atoll_types::{Fault, FaultKind};
use axum::extract::Request;
use axum::response::Response;
use prost::Message as _;

use super::Call;
use super::connect::{self, Code, Error, Kind};
use super::entries::{ASKED, entry};
use super::messages::{
    EntryInfo, EntryResponse, ListDirRequest, ListDirResponse, MoveRequest, Nothing, PathRequest,
    WatchRequest, Watcher,
};
use super::watch;

pub(crate) async fn serve(call: Call, kind: Kind, method: &str, request: Request) -> Result<Response, Error> {
    let (parts, body) = request.into_parts();
    let answer = match method {
        "Stat" => {
            let request: PathRequest = call.receive(kind, body).await?;
            let entry = call.entry(call.at(&request.path)).await;
            let entry = entry.map_err(|fault| missing(&request.path, fault))?;
            connect::answer(kind, Ok(EntryResponse { entry: Some(entry) }))
        }
        "MakeDir" => {
            let request: PathRequest = call.receive(kind, body).await?;
            connect::answer(kind, make_dir(&call, &request.path).await)
        }
        "Move" => {
            let request: MoveRequest = call.receive(kind, body).await?;
            connect::answer(kind, rename(&call, &request).await)
        }
        "ListDir" => {
            let request: ListDirRequest = call.receive(kind, body).await?;
            connect::answer_long(kind, list_dir(&call, &request).await).await
        }
        "Remove" => {
            let request: PathRequest = call.receive(kind, body).await?;
            connect::answer(kind, remove(&call, &request.path).await)
        }
        "WatchDir" => {
            let request: WatchRequest = call.receive(kind, body).await?;
            watch::stream(call, kind, &parts.headers, &request).await?
        }
        "CreateWatcher" => {
            let request: WatchRequest = call.receive(kind, body).await?;
            connect::answer(kind, watch::create(call, &request).await)
        }
        "GetWatcherEvents" => {
            let request: Watcher = call.receive(kind, body).await?;
            connect::answer(kind, watch::events(&call, &request.watcher_id).await)
        }
        "RemoveWatcher" => {
            let request: Watcher = call.receive(kind, body).await?;
            connect::answer(kind, watch::remove(&call, &request.watcher_id))
        }
        other => {
            return Err(Error::new(
                Code::Unimplemented,
                format!("filesystem.Filesystem has no method `{other}`"),
            ));
        }
    };
    Ok(answer)
}

/// A path that leads nowhere, in the words of the original.
pub(crate) fn missing(path: &str, fault: Fault) -> Error {
    match (fault.kind(), fault.code) {
        (FaultKind::NotFound, _) | (_, atoll_types::Code::NotADirectory) => {
            Error::not_found(format!("path not found: {path}: {}", fault.message))
        }
        _ => fault.into(),
    }
}

async fn change(call: &Call, path: &str, change: FileChange) -> Result<bool, Fault> {
    let (caller, id) = (&call.target.caller, &call.target.id);
    call.app
        .sandboxes
        .change_file(caller, id, call.at(path), change)
        .await
}

async fn make_dir(call: &Call, path: &str) -> Result<EntryResponse, Error> {
    let created = change(call, path, FileChange::MakeDir { mode: 0o755 }).await;
    match created {
        Ok(true) => {}
        Ok(false) => {
            return Err(Error::new(
                Code::AlreadyExists,
                format!("directory already exists: {path}"),
            ));
        }
        Err(fault) if fault.code == atoll_types::Code::AlreadyExists => {
            return Err(Error::invalid(fault.to_string()));
        }
        Err(fault) => return Err(fault.into()),
    }
    let entry = call.entry(call.at(path)).await?;
    Ok(EntryResponse { entry: Some(entry) })
}

async fn rename(call: &Call, request: &MoveRequest) -> Result<EntryResponse, Error> {
    let source = call.stat(call.at(&request.source)).await;
    source.map_err(|fault| missing(&request.source, fault))?;
    if let Some((parent, _)) = request.destination.trim_end_matches('/').rsplit_once('/')
        && !parent.is_empty()
    {
        change(call, parent, FileChange::MakeDir { mode: 0o755 }).await?;
    }
    let to = call.at(&request.destination).path;
    change(call, &request.source, FileChange::RenameTo { to }).await?;
    let entry = call.entry(call.at(&request.destination)).await?;
    Ok(EntryResponse { entry: Some(entry) })
}

async fn remove(call: &Call, path: &str) -> Result<Nothing, Error> {
    match change(call, path, FileChange::Remove { recursive: true }).await {
        Ok(_) => Ok(Nothing {}),
        Err(fault) if fault.kind() == FaultKind::NotFound => Ok(Nothing {}),
        Err(fault) => Err(fault.into()),
    }
}

async fn list_dir(call: &Call, request: &ListDirRequest) -> Result<ListDirResponse, Error> {
    let top = call.stat(call.at(&request.path)).await;
    let top = top.map_err(|fault| missing(&request.path, fault))?;
    // Only the directory that is listed may be a symlink.
    let Some(resolved) = call.resolve(&top).await? else {
        return Err(Error::not_found(format!("path not found: {}", request.path)));
    };
    if resolved.kind != EntryKind::Directory {
        return Err(Error::invalid(format!(
            "path is not a directory: {}",
            request.path
        )));
    }
    // The agent is asked many times, and all that it has said meanwhile is held: what was found, and what is made of it.
    let (mut of_found, mut of_entries) = (call.visit.permit()?, call.visit.permit()?);
    let found = call
        .app
        .sandboxes
        .list_files(
            &call.target.caller,
            &call.target.id,
            call.exactly(&resolved.path),
            request.depth.max(1),
            &mut |bytes| of_found.grow(bytes),
        )
        .await?;
    let mut entries = Vec::new();
    let mut found = found.into_iter();
    loop {
        let asked: Vec<_> = found.by_ref().take(ASKED).collect();
        if asked.is_empty() {
            break;
        }
        let paths = asked.iter().map(|entry| entry.stat.path.clone()).collect();
        let attributes = call.attributes(paths).await?;
        for (found, attributes) in asked.into_iter().zip(attributes) {
            let mut stat = found.stat;
            if let Some(leads) = call.resolve(&stat).await? {
                // Entries are named below what was asked for, not below what it leads to.
                if top.path != resolved.path
                    && let Some(below) = stat.path.strip_prefix(&resolved.path[..])
                {
                    stat.path = [&top.path[..], below].concat();
                }
                let entry = entry(&stat, Some(&leads), attributes);
                of_entries.grow(weight(&entry))?;
                entries.push(entry);
            }
        }
    }
    call.visit.keep(of_entries);
    Ok(ListDirResponse { entries })
}

/// What an entry takes, in a list that may have twice the room that it needs.
fn weight(entry: &EntryInfo) -> u64 {
    let metadata = entry.metadata.len() * 4 * size_of::<String>();
    (2 * size_of::<EntryInfo>() + entry.encoded_len() + metadata) as u64
}
