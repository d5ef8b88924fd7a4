//! Template builds of the second version: asked for, given their steps, watched until they are done.
//!
//! ```text
//!   POST /v3/templates ──> waiting ── POST …/builds/{id} ──> building ──┬──> ready
//!                                                                       └──> error
//! ```
//! A template's id on this wire is its name: ours is known only when it is built. How builds go is remembered below this
//! wire (`atoll_sandboxes::BuildJobs`).

use std::collections::HashMap;
use std::sync::Arc;

use atoll_front::extract::At;
use atoll_identity::Caller;
use atoll_sandboxes::{
    BegunAlready, BuildFrom, BuildJob, BuildLine, BuildStart, BuildState, BuildTemplate, LineLevel,
    OpenBuild, RegistryLogin, StepFailed,
};
use atoll_types::{Code, MIB, ReadyCheck, Resources, StartCommand};
use axum::extract::{Json, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::{Value, json};

use super::names::Name;
use super::read::{Query, Read};
use super::recipe::{Begins, Origin, Recipe, Step};
use super::{build_files as files, network, templates, view};
use crate::App;
use crate::auth::Auth;
use crate::error::{Answer, Refusal};

const READY_WITHIN_MILLIS: u64 = 10 * 60 * 1000;

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
fn resources(request: &NewTemplate, usual: Resources) -> Resources {
    let disk_bytes = request.min_free_disk_mb.unwrap_or(0).saturating_mul(MIB);
    Resources {
        cpu_millis: request
            .cpu_count
            .map_or(usual.cpu_millis, |cores| cores.saturating_mul(1000)),
        memory_bytes: request
            .memory_mb
            .map_or(usual.memory_bytes, |megabytes| megabytes.saturating_mul(MIB)),
        disk_bytes: disk_bytes.max(usual.disk_bytes),
        ..usual
    }
}

pub(crate) async fn request(
    State(app): State<App>,
    Auth(caller): Auth,
    Read(request): Read<NewTemplate>,
) -> Answer<Response> {
    let Some(given) = request.name.as_ref().or(request.alias.as_ref()) else {
        return Err(Refusal::invalid("`name` is missing"));
    };
    let name = Name::parse(given)?;
    let resources = resources(&request, app.sandboxes.usual_resources());
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
    let id = templates::build_id(&hex::encode(entropy));
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
    app.builds.open(OpenBuild {
        id,
        caller,
        name: name.stored(),
        also: tags.iter().map(Name::stored).collect(),
        resources,
    });
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

fn find(app: &App, caller: &Caller, template: &str, build: &str) -> Answer<Arc<BuildJob>> {
    let found = app.builds.find(caller, build);
    found
        .filter(|job| Name::of_stored(&job.request().name).name == template)
        .ok_or_else(|| Refusal::not_found(format!("Build \"{build}\" of template \"{template}\" not found")))
}

pub(crate) async fn start(
    State(app): State<App>,
    Auth(caller): Auth,
    At((template, id)): At<(String, String)>,
    Read(request): Read<Start>,
) -> Answer<StatusCode> {
    let build = find(&app, &caller, &template, &id)?;
    let login = request
        .from_image_registry
        .as_ref()
        .map(ImageRegistry::login)
        .transpose()?;
    let mut missing = None;
    let origin = match (&request.from_template, &request.from_image) {
        (Some(template), None) => match templates::find(&app, &caller, template).await {
            Ok(found) => Origin::Template {
                name: templates::stored(&app, &caller, template).await?,
                begins: Begins::where_left(&found.manifest.user, &found.manifest.workdir),
            },
            // The build says so, as there.
            Err(refusal) if refusal.status == StatusCode::NOT_FOUND => {
                missing = Some(template.clone());
                Origin::Image(Name::parse(template)?.stored())
            }
            Err(refusal) => return Err(refusal),
        },
        (None, Some(image)) => match Origin::stand_in(image) {
            Some(name) if app.sandboxes.template(&caller, &name).await.is_ok() => Origin::Template {
                name,
                begins: Begins::default(),
            },
            _ => Origin::Image(image.clone()),
        },
        _ => return Err(Refusal::invalid("give either `fromImage` or `fromTemplate`")),
    };
    let recipe = Recipe::new(&origin, &request.steps)?;
    let (jobs, job) = (app.builds.clone(), Arc::clone(&build));
    let work = async move {
        if let Some(name) = missing {
            return Err(failed("base", format!("template '{name}' not found")));
        }
        perform(&app, &job, recipe, login, &request).await
    };
    match jobs.begin(&build, work) {
        Ok(()) => Ok(StatusCode::ACCEPTED),
        Err(BegunAlready) => Err(Refusal::new(
            StatusCode::CONFLICT,
            format!("Build \"{id}\" was started already"),
        )),
    }
}

fn failed(step: impl Into<String>, message: String) -> StepFailed {
    let step = Some(step.into());
    StepFailed { message, step }
}

async fn perform(
    app: &App,
    job: &BuildJob,
    mut recipe: Recipe,
    login: Option<RegistryLogin>,
    request: &Start,
) -> Result<(), StepFailed> {
    let asked = job.request();
    let context = files::prepare(app, &asked.caller, &mut recipe)
        .await
        .map_err(|(index, message)| failed((index + 1).to_string(), message))?;
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
    let template = BuildTemplate {
        name: asked.name.clone(),
        shared: false,
        from: BuildFrom::Dockerfile {
            context: context.path().to_owned(),
            dockerfile: recipe.dockerfile.clone(),
            args: Vec::new(),
            target: None,
            login,
            no_cache: request.force || request.steps.iter().any(|step| step.force),
            // Steps install things, as sandboxes may.
            network: network::open(network::reaches_internet(app)),
        },
        start: start.map_or(BuildStart::Nothing, BuildStart::Command),
        network: None,
        resources: Some(asked.resources),
    };
    app.builds.build(job, template).await.map_err(|fault| {
        let index = fault.line.and_then(|line| recipe.step_at(line));
        let step = index.and_then(|index| request.steps.get(index));
        let message = match (fault.code, step, index) {
            (Code::NoSuchUserInSandbox, Some(step), Some(index)) => unknown_user(step, recipe.user_at(index)),
            _ => fault.message,
        };
        // Clients count what they build from as the first.
        let step = index.map_or_else(|| "base".to_owned(), |index| (index + 1).to_string());
        failed(step, message)
    })?;
    let finished = app.builds.finish(job, starts).await;
    finished.map_err(|fault| failed("finalize", fault.message))
}

/// A step as a user that is not there, in the words that clients know.
fn unknown_user(step: &Step, user: &str) -> String {
    let command = step.args.first().map(String::as_str).unwrap_or_default();
    format!("failed to run command '{command}': command failed: unauthenticated: invalid username: '{user}'")
}

pub(crate) async fn status(
    State(app): State<App>,
    Auth(caller): Auth,
    At((template, id)): At<(String, String)>,
    query: Query,
) -> Answer<Json<Value>> {
    let query = query.only(&["logsOffset", "limit", "level", "direction", "cursor", "source"])?;
    if !templates::is_build_id(&id) {
        return Err(Refusal::invalid(format!(
            "`{}` is not a build's id",
            id.escape_default()
        )));
    }
    let build = find(&app, &caller, &template, &id)?;
    let offset = usize::try_from(query.number("logsOffset")?.unwrap_or(0)).unwrap_or(0);
    let limit = query.limit()?;
    let status = build.status(offset, limit);
    let lines: Vec<&str> = status.lines.iter().map(|line| line.text.as_str()).collect();
    let entries: Vec<Value> = status.lines.iter().map(entry).collect();
    let mut answer = json!({
        "templateID": template,
        "buildID": id,
        "status": state_name(status.state),
        "logs": lines,
        "logEntries": entries,
    });
    if let Some(failure) = status.failure {
        answer["reason"] = json!({"message": failure.message, "logEntries": []});
        if let Some(step) = failure.step {
            answer["reason"]["step"] = step.into();
        }
    }
    Ok(Json(answer))
}

fn entry(line: &BuildLine) -> Value {
    let level = match line.level {
        LineLevel::Info => "info",
        LineLevel::Error => "error",
    };
    json!({"timestamp": view::time(line.at), "level": level, "message": line.text})
}

fn state_name(state: BuildState) -> &'static str {
    match state {
        BuildState::Waiting => "waiting",
        BuildState::Building => "building",
        BuildState::Ready => "ready",
        BuildState::Failed => "error",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
