//! Template builds of the second version: asked for, given their steps, watched until they are done.
//!
//! ```text
//!   POST /v3/templates ──> waiting ── POST …/builds/{id} ──> building ──┬──> ready
//!                                                                       └──> error
//! ```
//! A template's id on this wire is its name: ours is known only when it is built. Builds live in the memory of the server;
//! one that was going on when it stopped has to be asked for again, and finds its finished steps in the cache.

use std::collections::HashMap;
use std::io::Read as _;
use std::os::fd::AsFd as _;
use std::path::Path as FilePath;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use atoll_archive::{Budget, Dialect, Ids, unpack_within};
use atoll_sandboxes::{BuildEvent, BuildFrom, BuildStart, BuildTemplate, Caller, RegistryLogin};
use atoll_types::{DiskBacking, Fault, GIB, MIB, ReadyCheck, Resources, StartCommand, Timestamp};
use axum::extract::{Json, Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use futures_util::StreamExt as _;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::Semaphore;

use super::names::Name;
use super::read::{Query, Read};
use super::recipe::{Copied, Origin, Recipe, Step};
use super::{network, uploads, view};
use crate::App;
use crate::auth::Auth;
use crate::error::{Answer, Refusal};

/// Builds that are remembered; the oldest go first.
const REMEMBERED: usize = 1000;
/// Lines of one build's log.
const LINES: usize = 100_000;
/// What the archives of one build may hold once unpacked, all of them together.
const UNPACKED: Room = Room {
    stream: 20 * GIB,
    budget: Budget {
        bytes: 16 * GIB,
        entries: 500_000,
        // Below what the image takes, since each COPY has a directory of its own.
        depth: 250,
        private: true,
    },
};
const READY_WITHIN_MILLIS: u64 = 10 * 60 * 1000;

#[derive(Debug, Default)]
pub(crate) struct Builds {
    all: Mutex<HashMap<String, Arc<Build>>>,
    secret: OnceLock<[u8; 32]>,
    /// Each upload that is being received holds one.
    pub(crate) receiving: Receiving,
}

#[derive(Debug)]
pub(crate) struct Receiving(pub(crate) Semaphore);

impl Default for Receiving {
    fn default() -> Self {
        Self(Semaphore::new(uploads::AT_ONCE))
    }
}

impl Builds {
    /// What links for uploads are proved with.
    pub(crate) fn secret(&self) -> &[u8; 32] {
        self.secret.get_or_init(|| {
            let mut secret = [0; 32];
            // Without entropy there are no keys either, and nobody gets this far.
            let _ = getrandom::fill(&mut secret);
            secret
        })
    }

    fn all(&self) -> MutexGuard<'_, HashMap<String, Arc<Build>>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug)]
struct Build {
    id: String,
    name: Name,
    tags: Vec<Name>,
    resources: Resources,
    begun: i64,
    caller: Caller,
    progress: Mutex<Progress>,
}

#[derive(Debug)]
struct Progress {
    status: &'static str,
    log: Vec<Value>,
    reason: Option<Value>,
}

impl Build {
    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn log(&self, level: &str, message: &str) {
        let mut progress = self.progress();
        if progress.log.len() < LINES {
            let at = view::time(Timestamp(view::now_millis()));
            progress
                .log
                .push(json!({"timestamp": at, "level": level, "message": message}));
        }
    }

    fn fail(&self, message: &str, step: Option<&str>) {
        self.log("error", message);
        let mut reason = json!({"message": message, "logEntries": []});
        if let Some(step) = step {
            reason["step"] = step.into();
        }
        let mut progress = self.progress();
        progress.status = "error";
        progress.reason = Some(reason);
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NewTemplate {
    name: Option<String>,
    alias: Option<String>,
    tags: Option<Vec<String>>,
    #[serde(rename = "cpuCount")]
    cpu_count: Option<u32>,
    #[serde(rename = "memoryMB")]
    memory_mb: Option<u64>,
    #[serde(rename = "minFreeDiskMb")]
    min_free_disk_mb: Option<u64>,
    #[serde(rename = "teamID")]
    _team: Option<String>,
}

/// What sandboxes of the template get; what is not said is as usual.
fn resources(request: &NewTemplate) -> Resources {
    let usual = Resources::default();
    let disk_bytes = request.min_free_disk_mb.unwrap_or(0).saturating_mul(MIB);
    let more_disk = disk_bytes > usual.disk_bytes;
    Resources {
        cpu_millis: request
            .cpu_count
            .map_or(usual.cpu_millis, |cores| cores.saturating_mul(1000)),
        memory_bytes: request
            .memory_mb
            .map_or(usual.memory_bytes, |megabytes| megabytes.saturating_mul(MIB)),
        disk_bytes: disk_bytes.max(usual.disk_bytes),
        // As much as that does not belong into memory.
        disk_backing: match more_disk {
            true => DiskBacking::Disk,
            false => usual.disk_backing,
        },
        ..usual
    }
}

pub(crate) async fn request(
    State(app): State<App>,
    Auth(caller): Auth,
    Read(request): Read<NewTemplate>,
) -> Answer<Response> {
    app.sandboxes.operators_only(&caller, super::templates::CHANGE)?;
    let Some(given) = request.name.as_ref().or(request.alias.as_ref()) else {
        return Err(Refusal::invalid("`name` is missing"));
    };
    let name = Name::parse(given)?;
    let resources = resources(&request);
    app.sandboxes.check_resources(resources).map_err(|fault| {
        Refusal::invalid(format!(
            "`cpuCount`, `memoryMB` or `minFreeDiskMb` cannot be had: {fault}"
        ))
    })?;
    let tags: Vec<Name> = request
        .tags
        .unwrap_or_default()
        .iter()
        .map(|tag| Name::parse(&format!("{}:{tag}", name.name)))
        .collect::<Answer<_>>()?;
    let mut entropy = [0; 16];
    getrandom::fill(&mut entropy)
        .map_err(|_| Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, "there is no entropy"))?;
    let id = super::templates::build_id(&hex::encode(entropy));
    let shown: Vec<&str> = std::iter::once(&name)
        .chain(&tags)
        .map(|name| name.tag.as_deref().unwrap_or(super::names::DEFAULT_TAG))
        .collect();
    let answer = json!({
        "templateID": name.name,
        "buildID": id,
        "public": false,
        "names": [name.name],
        "aliases": [name.name],
        "tags": shown,
    });
    let build = Arc::new(Build {
        id: id.clone(),
        name,
        tags,
        resources,
        begun: view::now_millis(),
        caller,
        progress: Mutex::new(Progress {
            status: "waiting",
            log: Vec::new(),
            reason: None,
        }),
    });
    let mut all = app.builds.all();
    if all.len() >= REMEMBERED
        && let Some(oldest) = all
            .values()
            .min_by_key(|build| build.begun)
            .map(|build| build.id.clone())
    {
        all.remove(&oldest);
    }
    all.insert(id, build);
    Ok((StatusCode::ACCEPTED, Json(answer)).into_response())
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Start {
    #[serde(rename = "fromImage")]
    from_image: Option<String>,
    #[serde(rename = "fromTemplate")]
    from_template: Option<String>,
    #[serde(rename = "fromImageRegistry")]
    from_image_registry: Option<ImageRegistry>,
    #[serde(default)]
    force: bool,
    #[serde(default)]
    steps: Vec<Step>,
    #[serde(rename = "startCmd")]
    start_cmd: Option<String>,
    #[serde(rename = "readyCmd")]
    ready_cmd: Option<String>,
}

/// Who to be for the registry of `fromImage`.
#[derive(Deserialize)]
struct ImageRegistry {
    r#type: String,
    username: Option<String>,
    password: Option<String>,
    /// What belongs to the types that are refused, with whatever is secret in it.
    #[serde(flatten)]
    _other: HashMap<String, Value>,
}

impl std::fmt::Debug for ImageRegistry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ImageRegistry")
            .field("type", &self.r#type)
            .finish_non_exhaustive()
    }
}

impl ImageRegistry {
    fn login(&self) -> Answer<RegistryLogin> {
        match (self.r#type.as_str(), &self.username, &self.password) {
            ("registry", Some(user), Some(password)) => Ok(RegistryLogin {
                // Steps name no images, so there is only that of `fromImage`.
                registry: None,
                user: user.clone(),
                password: password.clone(),
            }),
            ("registry", ..) => Err(Refusal::invalid(
                "`fromImageRegistry` needs `username` and `password`",
            )),
            _ => Err(Refusal::unsupported(
                "fromImageRegistry.type",
                "it logs in with a user name and a password, type `registry`",
            )),
        }
    }
}

fn find(app: &App, caller: &Caller, template: &str, build: &str) -> Answer<Arc<Build>> {
    let found = app.builds.all().get(build).cloned();
    found
        .filter(|build| build.caller.project == caller.project && build.name.name == template)
        .ok_or_else(|| Refusal::not_found(format!("Build \"{build}\" of template \"{template}\" not found")))
}

pub(crate) async fn start(
    State(app): State<App>,
    Auth(caller): Auth,
    Path((template, id)): Path<(String, String)>,
    Read(request): Read<Start>,
) -> Answer<StatusCode> {
    let build = find(&app, &caller, &template, &id)?;
    let login = request
        .from_image_registry
        .as_ref()
        .map(ImageRegistry::login)
        .transpose()?;
    let origin = match (&request.from_template, &request.from_image) {
        (Some(template), None) => Origin::Template(Name::parse(template)?.stored()),
        (None, Some(image)) => match Origin::stand_in(image) {
            Some(stored) if app.sandboxes.template(&stored).await.is_ok() => Origin::Template(stored),
            _ => Origin::Image(image.clone()),
        },
        _ => return Err(Refusal::invalid("give either `fromImage` or `fromTemplate`")),
    };
    let recipe = Recipe::new(&origin, &request.steps)?;
    {
        let mut progress = build.progress();
        if progress.status != "waiting" {
            return Err(Refusal::new(
                StatusCode::CONFLICT,
                format!("Build \"{id}\" was started already"),
            ));
        }
        progress.status = "building";
    }
    let no_cache = request.force || request.steps.iter().any(|step| step.force);
    // Ends with the build; the server stops it when it stops itself.
    tokio::spawn(async move {
        if let Origin::Template(name) = &origin
            && app.sandboxes.template(name).await.is_err()
        {
            return build.fail(&format!("template '{name}' not found"), Some("base"));
        }
        perform(&app, &build, recipe, login, no_cache, &request).await;
    });
    Ok(StatusCode::ACCEPTED)
}

async fn perform(
    app: &App,
    build: &Build,
    mut recipe: Recipe,
    login: Option<RegistryLogin>,
    no_cache: bool,
    request: &Start,
) {
    let context = match prepare(app, build, &mut recipe).await {
        Ok(context) => context,
        Err((index, message)) => return build.fail(&message, Some(&(index + 1).to_string())),
    };
    let bash = |command: &str| ["/bin/bash", "-l", "-c", command].map(str::to_owned).to_vec();
    let command = request.start_cmd.as_deref().filter(|command| !command.is_empty());
    let start = command.map(|command| StartCommand {
        argv: bash(command),
        ready: request
            .ready_cmd
            .as_deref()
            .filter(|command| !command.is_empty())
            .map(|command| ReadyCheck::Command {
                argv: bash(command),
                timeout_millis: READY_WITHIN_MILLIS,
            }),
    });
    let starts = start.is_some();
    let asked = BuildTemplate {
        name: build.name.stored(),
        from: BuildFrom::Dockerfile {
            context: context.path().to_owned(),
            dockerfile: recipe.dockerfile.clone(),
            args: Vec::new(),
            target: None,
            login,
            no_cache,
            // Steps install things, as sandboxes may.
            network: network::open(network::reaches_internet(app)),
        },
        start: start.map_or(BuildStart::Nothing, BuildStart::Command),
        network: None,
        resources: Some(build.resources),
    };
    let outcome = follow(app, build, asked).await;
    let finished = match outcome {
        Ok(()) => finish(app, build, starts)
            .await
            .map_err(|fault| (fault, Some("finalize".to_owned()))),
        Err(mut fault) => {
            let step = recipe.step_of(&fault.message);
            if let Some(message) = unknown_user(&fault.message, step.as_deref(), &request.steps) {
                fault.message = message;
            }
            Err((fault, step.or_else(|| Some("base".to_owned()))))
        }
    };
    match finished {
        Ok(()) => {
            build.log("info", "Build finished");
            build.progress().status = "ready";
        }
        Err((fault, step)) => build.fail(&fault.message, step.as_deref()),
    }
}

/// A step as a user that is not there, in the words that clients know.
fn unknown_user(message: &str, step: Option<&str>, steps: &[Step]) -> Option<String> {
    let (_, user) = message.rsplit_once("no such user: ")?;
    let index = step?.parse::<usize>().ok()?.checked_sub(1)?;
    let command = steps.get(index)?.args.first()?;
    Some(format!(
        "failed to run command '{command}': command failed: unauthenticated: invalid username: '{user}'"
    ))
}

async fn follow(app: &App, build: &Build, asked: BuildTemplate) -> Result<(), Fault> {
    let mut events = app.sandboxes.build_template(asked).await?;
    while let Some(event) = events.next().await {
        match event? {
            BuildEvent::Log(line) => build.log("info", &line),
            BuildEvent::Progress { .. } => {}
            BuildEvent::Done(_) => return Ok(()),
        }
    }
    Err(Fault::internal("the build was interrupted"))
}

/// Gives it its other names, and has its server running for those who come.
async fn finish(app: &App, build: &Build, starts: bool) -> Result<(), Fault> {
    let name = build.name.stored();
    if starts {
        match app
            .sandboxes
            .keep_running(&name, Some(build.resources), None)
            .await
        {
            Ok(_) => {}
            // Where memory cannot be kept, each sandbox starts it.
            Err(fault) if fault.code == "memory_not_supported" => {}
            Err(fault) => return Err(fault),
        }
    }
    for tag in &build.tags {
        app.sandboxes.name_template(&name, &tag.stored()).await?;
    }
    Ok(())
}

/// What the steps copy, in a directory that goes with this.
#[derive(Debug)]
struct Context(Option<tempfile::TempDir>);

impl Context {
    fn path(&self) -> &FilePath {
        self.0.as_ref().map_or(FilePath::new(""), tempfile::TempDir::path)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        let directory = self.0.take();
        // Deleting a large tree takes a while, and this is dropped on a thread that serves others.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn_blocking(move || drop(directory));
        }
    }
}

/// What may still be unpacked for a build.
#[derive(Debug, Clone, Copy)]
struct Room {
    /// Bytes of the archives themselves, which may say much and make little.
    stream: u64,
    budget: Budget,
}

/// Lays out what the steps copy; an error names the step.
async fn prepare(app: &App, build: &Build, recipe: &mut Recipe) -> Result<Context, (usize, String)> {
    let first = |error: &dyn std::fmt::Display| (0, format!("the files could not be laid out: {error}"));
    let context = tempfile::Builder::new()
        .prefix("e2b-build-")
        .tempdir_in(&app.options.scratch)
        .map_err(|error| first(&error))?;
    let context = Context(Some(context));
    let mut room = UNPACKED;
    for copied in recipe.copies.clone() {
        let index = copied
            .directory
            .rsplit('-')
            .next()
            .and_then(|digits| digits.parse().ok());
        let index = index.unwrap_or(0);
        let archive =
            uploads::path_of(app, &build.caller, &copied.hash).map_err(|refusal| (index, refusal.message))?;
        let (root, directory) = (context.path().to_owned(), copied.directory.clone());
        let laid = tokio::task::spawn_blocking(move || {
            let done = lay_out(&archive, &root, &copied, &mut room);
            (done, room)
        })
        .await;
        let (done, left) = laid.map_err(|error| first(&error))?;
        room = left;
        match done {
            Ok(true) => recipe.goes_to_parent(&directory),
            Ok(false) => {}
            Err(error) => {
                return Err((index, format!("the files to copy could not be unpacked: {error}")));
            }
        }
    }
    Ok(context)
}

/// Unpacks an archive and puts what is copied of it into its own directory; whether that is a single file. Clients pack
/// just what the source matches, so that what lies below its fixed part is all of it.
fn lay_out(archive: &FilePath, root: &FilePath, copied: &Copied, room: &mut Room) -> std::io::Result<bool> {
    let unpacked = root.join(format!("{}.all", copied.directory));
    let target = root.join(&copied.directory);
    std::fs::create_dir(&unpacked)?;
    let mut file = std::io::BufReader::new(std::fs::File::open(archive)?);
    let packed = std::io::BufRead::fill_buf(&mut file)?.starts_with(&[0x1f, 0x8b]);
    let input: Box<dyn std::io::Read> = match packed {
        true => Box::new(flate2::bufread::MultiGzDecoder::new(file)),
        false => Box::new(file),
    };
    let directory = std::fs::File::open(&unpacked)?;
    let mut input = input.take(room.stream);
    let done = unpack_within(
        directory.as_fd(),
        Dialect::Plain,
        Ids::Own,
        &mut room.budget,
        &mut input,
    );
    room.stream = input.limit();
    match done {
        Err(_) if room.stream == 0 => {
            return Err(std::io::Error::other(
                "the archives of the build are too large together",
            ));
        }
        done => done?,
    };
    let fixed: Vec<&str> = copied
        .source
        .split('/')
        .filter(|part| !matches!(*part, "" | "."))
        .take_while(|part| !part.contains(['*', '?', '[']))
        .collect();
    if fixed.contains(&"..") {
        return Err(std::io::Error::other("the source leads outside the context"));
    }
    // No link is followed on the way: each part must be a directory itself.
    let mut found = unpacked;
    for part in &fixed {
        if !std::fs::symlink_metadata(&found)?.is_dir() {
            return Err(std::io::ErrorKind::NotFound.into());
        }
        found.push(part);
    }
    if std::fs::symlink_metadata(&found)?.is_dir() {
        std::fs::rename(&found, &target)?;
        return Ok(false);
    }
    std::fs::create_dir(&target)?;
    let own_name = fixed.last().copied().unwrap_or("file");
    let name = copied.file_name.as_deref().unwrap_or(own_name);
    std::fs::rename(&found, target.join(name))?;
    Ok(copied.file_name.is_some())
}

pub(crate) async fn status(
    State(app): State<App>,
    Auth(caller): Auth,
    Path((template, id)): Path<(String, String)>,
    query: Query,
) -> Answer<Json<Value>> {
    let query = query.only(&["logsOffset", "limit", "level", "direction", "cursor", "source"])?;
    let build = find(&app, &caller, &template, &id)?;
    let offset = usize::try_from(query.number("logsOffset")?.unwrap_or(0)).unwrap_or(0);
    let limit = query.limit()?;
    let progress = build.progress();
    let entries: Vec<&Value> = progress.log.iter().skip(offset).take(limit).collect();
    let lines: Vec<&Value> = entries.iter().map(|entry| &entry["message"]).collect();
    let mut answer = json!({
        "templateID": template,
        "buildID": id,
        "status": progress.status,
        "logs": lines,
        "logEntries": entries,
    });
    if let Some(reason) = &progress.reason {
        answer["reason"] = reason.clone();
    }
    Ok(Json(answer))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tar archive of one entry, written by hand.
    fn archive(dir: &FilePath, path: &str, kind: u8, records: &str, content: &[u8]) -> std::path::PathBuf {
        let mut bytes = Vec::new();
        let mut block = |flag: u8, name: &str, size: usize, content: &[u8]| {
            let mut header = [0u8; 512];
            let short = &name.as_bytes()[..name.len().min(99)];
            header[..short.len()].copy_from_slice(short);
            header[100..107].copy_from_slice(b"0006755");
            header[124..135].copy_from_slice(format!("{size:011o}").as_bytes());
            header[156] = flag;
            header[257..265].copy_from_slice(b"ustar\x0000");
            header[148..156].fill(b' ');
            let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
            header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
            bytes.extend_from_slice(&header);
            bytes.extend_from_slice(content);
            bytes.resize(bytes.len().next_multiple_of(512), 0);
        };
        let long = record("path", path) + records;
        block(b'x', "PaxHeader", long.len(), long.as_bytes());
        block(kind, path, content.len(), content);
        bytes.extend_from_slice(&[0; 1024]);
        let file = dir.join("archive.tar");
        std::fs::write(&file, bytes).unwrap();
        file
    }

    fn record(key: &str, value: &str) -> String {
        let rest = key.len() + value.len() + 3;
        let mut length = rest + 1;
        while length != rest + length.to_string().len() {
            length = rest + length.to_string().len();
        }
        format!("{length} {key}={value}\n")
    }

    fn copied(index: usize) -> Copied {
        Copied {
            hash: "abc".into(),
            source: ".".into(),
            directory: format!("copy-{index}"),
            file_name: None,
        }
    }

    #[test]
    fn a_login_is_a_name_and_a_password_and_is_not_shown() {
        let read = |json: Value| serde_json::from_value::<ImageRegistry>(json).unwrap();
        let good = read(json!({"type": "registry", "username": "me", "password": "hush"}));
        let login = good.login().unwrap();
        assert_eq!((login.user.as_str(), login.password.as_str()), ("me", "hush"));
        assert!(!format!("{good:?}{login:?}").contains("hush"));
        for bad in [
            json!({"type": "registry", "username": "me"}),
            json!({"type": "aws", "awsAccessKeyId": "x", "awsSecretAccessKey": "hush", "awsRegion": "z"}),
        ] {
            let refusal = read(bad).login().unwrap_err();
            assert!(!refusal.message.contains("hush"));
        }
    }

    /// 16,000 levels: removing them with a recursion would take the stack of the thread, and the server with it.
    #[test]
    fn a_deep_archive_is_refused_before_it_is_there() {
        let dir = tempfile::tempdir().unwrap();
        let path = "a/".repeat(16_000);
        let file = archive(dir.path(), &path, b'5', "", b"");
        let error = lay_out(&file, dir.path(), &copied(0), &mut { UNPACKED }).unwrap_err();
        assert!(error.to_string().contains("levels of directories"), "{error}");
        assert!(!dir.path().join("copy-0.all/a").exists());
    }

    #[test]
    fn all_archives_of_a_build_share_its_room() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().unwrap();
        let file = archive(dir.path(), "f", b'0', "", &[7; 600]);
        let mut room = UNPACKED;
        room.budget.bytes = 1000;
        assert!(!lay_out(&file, dir.path(), &copied(0), &mut room).unwrap());
        let mode = std::fs::metadata(dir.path().join("copy-0/f"))
            .unwrap()
            .permissions()
            .mode();
        assert_eq!(mode & 0o7777, 0o755);
        let error = lay_out(&file, dir.path(), &copied(1), &mut room).unwrap_err();
        assert!(atoll_archive::is_too_much(&error), "{error}");

        let mut room = UNPACKED;
        room.stream = 4000;
        assert!(lay_out(&file, dir.path(), &copied(2), &mut room).is_ok());
        let error = lay_out(&file, dir.path(), &copied(3), &mut room).unwrap_err();
        assert!(error.to_string().contains("too large together"), "{error}");
    }

    #[test]
    fn holes_count() {
        let dir = tempfile::tempdir().unwrap();
        let records: String = [
            ("GNU.sparse.major", "1"),
            ("GNU.sparse.minor", "0"),
            ("GNU.sparse.realsize", "1099511627776"),
        ]
        .map(|(key, value)| record(key, value))
        .concat();
        let mut map = b"1\n0\n0\n".to_vec();
        map.resize(512, 0);
        let file = archive(dir.path(), "holes", b'0', &records, &map);
        let error = lay_out(&file, dir.path(), &copied(0), &mut { UNPACKED }).unwrap_err();
        assert!(atoll_archive::is_too_much(&error), "{error}");
    }
}
