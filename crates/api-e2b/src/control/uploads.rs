//! Files for template builds: one archive for each COPY, kept under the hash that the client gives it.
//!
//! What must hold: an upload is taken only with a link that this server made, for the project that it was made for; what
//! arrives is complete or not there; sizes are bounded, and so is what is kept for one project: for a new archive those go
//! that were not asked for the longest. At most until the server starts anew. What is on its way and what is kept counts as the
//! project's storage.

use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path as FilePath, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use atoll_front::Slots;
use atoll_front::extract::At;
use atoll_front::host;
use atoll_front::upload::Incoming;
use atoll_identity::{Caller, Opens};
use atoll_sandboxes::UploadRoom;
use atoll_types::GIB;
use axum::extract::{Json, Request, State};
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use futures_util::StreamExt as _;
use serde_json::json;
use std::io::Write as _;

use super::read::Query;
use super::view;
use crate::App;
use crate::auth::{Auth, admit};
use crate::error::{Answer, Refusal};

/// The most that one archive may hold.
const MOST: u64 = 8 * GIB;
/// The most that the archives of one project may hold together.
const KEPT: u64 = 32 * GIB;
/// How many archives are received at once.
const AT_ONCE: usize = 64;
const OF_A_PROJECT: usize = 8;
/// What nobody has asked for in so long goes: nobody can delete it, and it takes room that others of the project may need.
const UNASKED: Duration = Duration::from_secs(24 * 3600);
/// How long a link to upload to is good for, in seconds.
const GOOD_FOR: i64 = 3600;

/// Archives that are being received, and those that are here.
#[derive(Debug)]
pub(crate) struct Uploads {
    receiving: Slots,
    kept: Kept,
}

impl Default for Uploads {
    fn default() -> Self {
        Self {
            receiving: Slots::new("uploads", AT_ONCE, OF_A_PROJECT),
            kept: Kept::default(),
        }
    }
}

/// The room in their project's storage that archives take which are kept, by where they are.
#[derive(Debug, Default)]
struct Kept(Mutex<HashMap<PathBuf, Arc<UploadRoom>>>);

impl Kept {
    /// Removes an archive that nobody has asked for in so long; `false`: it stays.
    fn forget(&self, path: &FilePath, unasked: Duration) -> bool {
        let mut kept = self.lock();
        let asked = std::fs::metadata(path).and_then(|stat| stat.modified());
        // Where the clock was set back it stays for longer.
        let stays = asked.is_ok_and(|asked| asked.elapsed().map_or(true, |age| age < unasked));
        let removed = || match std::fs::remove_file(path) {
            Ok(()) => true,
            Err(error) => error.kind() == std::io::ErrorKind::NotFound,
        };
        let goes = !stays && removed();
        if goes {
            kept.remove(path);
        }
        goes
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<PathBuf, Arc<UploadRoom>>> {
        self.0.lock()
    }
}

/// Where the archive with this hash is kept for a project.
pub(crate) fn path_of(app: &App, caller: &Caller, hash: &str) -> Answer<PathBuf> {
    let plain = hash.bytes().all(|byte| byte.is_ascii_alphanumeric());
    if hash.is_empty() || hash.len() > 128 || !plain {
        return Err(Refusal::invalid("the hash of the files is not one"));
    }
    let dir = app.options.scratch.join("e2b-files");
    let made = std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&dir);
    made.map_err(|error| {
        Refusal::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            format!("no room for files: {error}"),
        )
    })?;
    Ok(dir.join(format!("{}-{hash}", caller.project())))
}

/// Tells whether the files are here, and where to put them.
pub(crate) async fn link(
    State(app): State<App>,
    Auth(caller): Auth,
    At((id, hash)): At<(String, String)>,
    parts: Parts,
) -> Answer<Response> {
    let present = asked_for(&path_of(&app, &caller, &hash)?);
    let until = view::now_seconds() + GOOD_FOR;
    let proof = app.identity.token(&Opens::Upload {
        project: caller.project().as_str(),
        hash: &hash,
        until,
    });
    let id = percent_encoding::utf8_percent_encode(&id, percent_encoding::NON_ALPHANUMERIC);
    let url = format!(
        "{}/templates/{id}/files/{hash}?project={}&until={until}&proof={proof}",
        origin(&parts),
        caller.project()
    );
    Ok((StatusCode::CREATED, Json(json!({"present": present, "url": url}))).into_response())
}

/// Whether an archive is here; it then counts as used now.
fn asked_for(path: &FilePath) -> bool {
    match std::fs::File::open(path) {
        // Should that fail, it goes earlier than it might.
        Ok(file) => {
            let _ = file.set_modified(std::time::SystemTime::now());
            true
        }
        Err(_) => false,
    }
}

/// Removes what was not asked for the longest until `more` bytes fit into what a project may keep; what was removed. A build
/// that is using an archive has it open.
fn make_room(dir: &FilePath, project: &str, more: u64, most: u64) -> std::io::Result<Vec<PathBuf>> {
    let prefix = format!("{project}-");
    let mut kept = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(&prefix)
            && let Ok(stat) = entry.metadata()
        {
            kept.push((stat.modified()?, stat.len(), entry.path()));
        }
    }
    kept.sort_unstable();
    let mut total: u64 = kept.iter().map(|(_, size, _)| size).sum();
    let mut removed = Vec::new();
    for (_, size, path) in kept {
        if total.saturating_add(more) <= most {
            break;
        }
        std::fs::remove_file(&path)?;
        removed.push(path);
        total -= size;
    }
    Ok(removed)
}

/// The address that a request came to.
fn origin(parts: &Parts) -> String {
    let forwarded = parts
        .headers
        .get("x-forwarded-proto")
        .and_then(|value| value.to_str().ok());
    let secured =
        parts.extensions.get::<atoll_front::serve::Secured>().is_some() || forwarded == Some("https");
    let host = host::authority(&parts.uri, &parts.headers).unwrap_or_default();
    format!("{}://{host}", if secured { "https" } else { "http" })
}

pub(crate) async fn receive(
    State(app): State<App>,
    At((_, hash)): At<(String, String)>,
    query: Query,
    request: Request,
) -> Answer<StatusCode> {
    let query = query.only(&["project", "until", "proof"])?;
    let project = query.text("project").unwrap_or_default();
    let until = query.number("until")?.unwrap_or(0);
    let given = query.text("proof").unwrap_or_default();
    let Some(caller) = app.identity.check_upload(project, &hash, until, given) else {
        return Err(Refusal::unauthorized(
            "this link is not good, or not any more; ask for a new one",
        ));
    };
    let _slot = app.uploads.receiving.take(caller.project())?;
    let visit = admit(request.extensions(), &caller)?;
    let room = Arc::new(app.sandboxes.upload_room(caller.project()).await?);
    let to = path_of(&app, &caller, &hash)?;
    let dir = to.parent().map(FilePath::to_path_buf).unwrap_or_default();
    let body = Incoming::new(&visit, request.into_body());
    let project = caller.project().as_str();
    save(body, dir, to.clone(), project, room, &app.uploads.kept).await?;
    let app = Arc::downgrade(&app.0);
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(UNASKED).await;
            // With the server goes all of it.
            if app
                .upgrade()
                .is_none_or(|app| app.uploads.kept.forget(&to, UNASKED))
            {
                return;
            }
        }
    });
    Ok(StatusCode::OK)
}

async fn save(
    body: Incoming,
    dir: PathBuf,
    to: PathBuf,
    project: &str,
    taken: Arc<UploadRoom>,
    kept: &Kept,
) -> Answer<()> {
    let failed = |error: &dyn std::fmt::Display| {
        Refusal::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            format!("the files could not be kept: {error}"),
        )
    };
    let mut file = tempfile::NamedTempFile::new_in(&dir).map_err(|error| failed(&error))?;
    let counted = Arc::clone(&taken);
    let mut pieces = pin!(body.kept(move |bytes| counted.take(bytes)));
    let mut room = MOST;
    while let Some(piece) = pieces.next().await {
        let piece = piece?;
        room = room
            .checked_sub(piece.len() as u64)
            .ok_or_else(|| Refusal::new(StatusCode::PAYLOAD_TOO_LARGE, "the files are too large"))?;
        // A piece is some tens of kilobytes, into the page cache.
        file.write_all(&piece).map_err(|error| failed(&error))?;
    }
    let removed = make_room(&dir, project, MOST - room, KEPT).map_err(|error| failed(&error))?;
    // One lock for the file and its room, so that of two with the same hash the one that stays is counted.
    let mut kept = kept.lock();
    for path in removed {
        kept.remove(&path);
    }
    file.persist(&to).map_err(|error| failed(&error.error))?;
    kept.insert(to, taken);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, SystemTime};

    #[test]
    fn what_was_not_asked_for_the_longest_goes_first() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        for (age, name) in [(4, "a-1"), (3, "a-2"), (2, "b-1"), (1, "a-3")] {
            std::fs::write(path(name), [0; 100]).unwrap();
            let file = std::fs::File::open(path(name)).unwrap();
            file.set_modified(SystemTime::now() - Duration::from_secs(age * 60))
                .unwrap();
        }
        let here = || ["a-1", "a-2", "a-3", "b-1"].map(|name| path(name).exists());
        assert!(make_room(dir.path(), "a", 100, 400).unwrap().is_empty());
        assert_eq!(here(), [true; 4]);
        assert!(asked_for(&path("a-1")));
        assert_eq!(make_room(dir.path(), "a", 200, 400).unwrap(), [path("a-2")]);
        assert_eq!(here(), [true, false, true, true]);
        make_room(dir.path(), "a", 400, 400).unwrap();
        assert_eq!(here(), [false, false, false, true]);
        assert!(!asked_for(&path("a-1")));

        let kept = Kept::default();
        assert!(!kept.forget(&path("b-1"), UNASKED) && path("b-1").exists());
        assert!(kept.forget(&path("b-1"), Duration::from_secs(60)) && !path("b-1").exists());
        assert!(kept.forget(&path("b-1"), UNASKED), "it is gone already");
    }
}
