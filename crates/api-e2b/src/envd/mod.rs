//! What E2B's clients expect on port 49983 of every sandbox: processes, files, health. E2B has an agent there; we answer
//! in its place, with our own agent behind.

pub(crate) mod connect;
mod content;
mod entries;
mod events;
#[cfg(test)]
mod fields;
pub(crate) mod files;
mod filesystem;
mod json;
pub(crate) mod messages;
mod process;
mod watch;

use atoll_front::Visit;
use atoll_identity::Opens;
use atoll_types::SandboxId;
use axum::body::Body;
use axum::extract::{Json, Request};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};

pub(crate) use watch::Watchers;

use crate::auth::{self, Signed};
use crate::edge::{self, Target};
use crate::error::{Answer, Refusal};
use crate::{App, control};

use connect::{Code, Error, Kind};
use files::FileQuery;

/// One call on behalf of whoever may enter a sandbox.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    pub(crate) app: App,
    pub(crate) target: Target,
    /// Who acts in the sandbox, with the permissions that they have there. `None`: its owner, who may all, for the
    /// template's user. Empty: the template's user.
    pub(crate) user: Option<String>,
    /// Who pays for what is received; nothing is before they are admitted.
    pub(crate) visit: Visit,
}

impl Call {
    /// The caller has shown what opens the sandbox.
    fn admit(&self) -> Answer<()> {
        let (caller, sandbox) = (&self.target.caller, &self.target.id);
        // Nobody shows anything there, so whoever comes is a stranger.
        if is_open(&self.target) {
            return Ok(self.visit.welcome(caller.project(), sandbox)?);
        }
        Ok(self.visit.admit_caller(caller)?)
    }

    /// Reads the one message of a unary call or of a call that is answered with a stream.
    async fn receive<T: connect::Wire>(&self, kind: Kind, body: Body) -> Result<T, Error> {
        connect::receive(&self.visit, kind, body).await
    }
}

/// Serves a request to the agent's port of a sandbox that runs, or that wakes when it is used.
pub(crate) async fn serve(app: &App, target: &Target, request: Request) -> Response {
    if request.method() == Method::OPTIONS {
        return any_origin(StatusCode::NO_CONTENT.into_response());
    }
    // With a slash at the end of `E2B_SANDBOX_URL`, clients send two.
    let path = format!("/{}", request.uri().path().trim_start_matches('/'));
    let visit = match Visit::of(request.extensions()) {
        Ok(visit) => visit,
        Err(fault) => return refused(&target.id, fault.into()),
    };
    let call = |user| Call {
        app: app.clone(),
        target: target.clone(),
        user,
        visit,
    };
    let answered = match path.as_str() {
        "/health" => Ok(StatusCode::NO_CONTENT.into_response()),
        // A link may be signed instead, which says who acts. No header does, here.
        "/files" => files::serve(call, app, target, request).await,
        _ => match admitted(app, target, request.headers()) {
            Ok(()) => {
                let call = call(auth::user(request.headers()));
                match call.admit() {
                    Ok(()) => dispatch(call, &path, request).await,
                    Err(refusal) => Err(refusal),
                }
            }
            Err(refusal) => Err(refusal),
        },
    };
    any_origin(answered.unwrap_or_else(|refusal| refused(&target.id, refusal)))
}

/// Whether this is the one path that both the agent and the API have, by which either says that it is there.
pub(crate) fn is_health(path: &str) -> bool {
    path.trim_start_matches('/') == "health"
}

/// Whether a path is one that E2B's servers steer their agent by. Nobody else may, whatever they show.
pub(crate) fn is_reserved(path: &str) -> bool {
    const RESERVED: [&str; 6] = ["init", "freeze", "unfreeze", "collapse", "fsfreeze", "fsthaw"];
    RESERVED.contains(&path.trim_start_matches('/'))
}

/// Whether what a request shows opens the agent.
pub(crate) fn opens(app: &App, target: &Target, headers: &HeaderMap) -> bool {
    admitted(app, target, headers).is_ok()
}

/// Whether a path is one that nobody but the agent has, or [its health](is_health).
pub(crate) fn is_agents(path: &str) -> bool {
    let path = path.trim_start_matches('/');
    is_health(path) || path.starts_with("process.Process/") || path.starts_with("filesystem.Filesystem/")
}

/// A request for a file that says nothing of the sandbox: its signature tells which, or the token that comes with it (older
/// SDKs for JavaScript send nothing else).
pub(crate) async fn serve_signed(app: &App, request: Request) -> Response {
    let query = match FileQuery::of(&request) {
        Ok(query) => query,
        Err(refusal) => return any_origin(refusal.into_response()),
    };
    let signed = query.signed(request.method() != Method::GET);
    let id = match (shown(request.headers()), signed.signature) {
        (Some(token), None) => whose(app, token),
        _ => match signer(app, &signed).await {
            Ok(id) => id,
            Err(refusal) => return any_origin(refusal.into_response()),
        },
    };
    let is_signed = signed.signature.is_some();
    match id {
        Some(id) => match Target::find(app, &id).await {
            Some(target) if target.answers(app) => serve(app, &target, request).await,
            Some(_) | None => edge::not_found(&id),
        },
        None if is_signed => any_origin(Refusal::unauthorized("invalid signature").into_response()),
        None => any_origin(Refusal::unauthorized("missing signature query parameter").into_response()),
    }
}

/// How many links are held against the tokens of all sandboxes at once. Whoever knows the server's address may ask for that, so
/// it never takes more than this of the machine; a client that names the sandbox in the link's host needs no search.
const SEARCHES: usize = 2;

/// The places for [such searches](SEARCHES).
#[derive(Debug)]
pub(crate) struct Searches(tokio::sync::Semaphore);

impl Default for Searches {
    fn default() -> Self {
        Self(tokio::sync::Semaphore::new(SEARCHES))
    }
}

impl Searches {
    /// A place to be kept while one goes on, if there is one.
    fn begin(&self) -> Option<tokio::sync::SemaphorePermit<'_>> {
        self.0.try_acquire().ok()
    }
}

/// Whose token a link was signed with. A signature does not tell, so each that lives is tried.
async fn signer(app: &App, signed: &Signed<'_>) -> Answer<Option<SandboxId>> {
    let Some(by) = signed.by() else {
        return Ok(None);
    };
    let Some(_place) = app.searches.begin() else {
        return Err(Refusal::new(
            StatusCode::TOO_MANY_REQUESTS,
            "too many links that name no sandbox are being looked at; use one with the sandbox in its host",
        ));
    };
    let searching = app.clone();
    let found = tokio::task::spawn_blocking(move || {
        let is_it = |sandbox: &SandboxId| by.matches(&searching.identity.token(&Opens::Agent { sandbox }));
        searching.sandboxes.find_living(is_it)
    });
    found
        .await
        .map_err(|_| Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, "the search was interrupted"))
}

/// Which sandbox an agent's token is of, for clients that say nothing else: it says so itself.
pub(crate) fn whose(app: &App, token: &str) -> Option<SandboxId> {
    app.identity.sandbox_of_agent_token(token)
}

/// What the caller shows.
pub(crate) fn shown(headers: &HeaderMap) -> Option<&str> {
    headers
        .get("x-access-token")
        .and_then(|value| value.to_str().ok())
}

/// Whether whoever knows its name may enter (`secure: false`).
fn is_open(target: &Target) -> bool {
    target.extras.as_ref().is_some_and(|extras| extras.open)
}

/// Whether the caller holds the agent's token, or needs none.
fn admitted(app: &App, target: &Target, headers: &HeaderMap) -> Answer<()> {
    let opens = Opens::Agent { sandbox: &target.id };
    match shown(headers) {
        Some(shown) if app.identity.is_token(&opens, shown) => Ok(()),
        _ if is_open(target) => Ok(()),
        shown => Err(auth::refused(
            "unauthorized access, please provide a valid access token or method signing if supported",
            shown,
        )),
    }
}

/// As what a request for a file was let in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Admitted {
    /// By the agent's token, or to a sandbox that needs none.
    Owner,
    /// By a link that was signed with it.
    Link,
}

/// Whether the caller holds the agent's token, or a link signed with it.
fn admitted_to_file(app: &App, target: &Target, request: &Request, signed: Signed<'_>) -> Answer<Admitted> {
    if is_open(target) {
        return Ok(Admitted::Owner);
    }
    let opens = Opens::Agent { sandbox: &target.id };
    match shown(request.headers()) {
        Some(shown) if app.identity.is_token(&opens, shown) => Ok(Admitted::Owner),
        Some(shown) => Err(auth::refused(
            "access token present in header but does not match",
            Some(shown),
        )),
        None => {
            signed.check(&app.identity.token(&opens), control::now_seconds())?;
            Ok(Admitted::Link)
        }
    }
}

async fn dispatch(call: Call, path: &str, request: Request) -> Answer<Response> {
    match (request.method(), path) {
        (&Method::GET, "/envs") => return Ok(Json(&call.target.sandbox.spec.env).into_response()),
        (&Method::GET, "/metrics") => {
            let sample = control::sample(&call.app, &call.target.caller, &call.target.sandbox).await?;
            return Ok(Json(sample.for_agent()).into_response());
        }
        _ => {}
    }
    let Some((service, method)) = path.strip_prefix('/').and_then(|path| path.split_once('/')) else {
        return Err(Refusal::not_found(format!("there is nothing at {path}")));
    };
    if request.method() != Method::POST {
        return Err(Refusal::new(
            StatusCode::METHOD_NOT_ALLOWED,
            "calls are made with POST",
        ));
    }
    let Some(kind) = Kind::of(request.headers()) else {
        let message = "the content type is neither JSON nor protocol buffers of the Connect protocol";
        return Err(Refusal::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
    };
    let id = call.target.id.clone();
    let woken = call.target.wake(&call.app).await.map_err(Error::from);
    let response = match (woken, service) {
        (Err(error), _) => Err(error),
        (Ok(()), "process.Process") => process::serve(call, kind, method, request).await,
        (Ok(()), "filesystem.Filesystem") => filesystem::serve(call, kind, method, request).await,
        (Ok(()), other) => Err(Error::new(
            Code::Unimplemented,
            format!("there is no service `{other}`"),
        )),
    };
    Ok(response.unwrap_or_else(|error| match error.gone {
        true => edge::not_found(&id),
        // A stream that could not begin is refused like a unary call: clients understand both.
        false if kind.streams => connect::answer(kind, Err::<messages::Nothing, _>(error)),
        false => error.unary(),
    }))
}

fn refused(id: &atoll_types::SandboxId, refusal: Refusal) -> Response {
    match refusal.status {
        // Its state changed while it was being asked.
        StatusCode::CONFLICT | StatusCode::SERVICE_UNAVAILABLE => edge::not_found(id),
        _ => refusal.into_response(),
    }
}

/// Pages in a browser use the SDK too.
fn any_origin(mut response: Response) -> Response {
    let headers = response.headers_mut();
    for (name, value) in [
        (header::ACCESS_CONTROL_ALLOW_ORIGIN, "*"),
        (header::ACCESS_CONTROL_ALLOW_HEADERS, "*, authorization"),
        (
            header::ACCESS_CONTROL_ALLOW_METHODS,
            "GET, HEAD, POST, PUT, PATCH, DELETE",
        ),
        (header::ACCESS_CONTROL_EXPOSE_HEADERS, "*"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    response
}

/// As E2B's agent writes refusals of its file routes.
fn file_refusal(status: StatusCode, message: impl Into<String>) -> Refusal {
    Refusal::new(status, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strangers_have_few_searches_at_a_time() {
        let searches = Searches::default();
        let begun: Vec<_> = (0..SEARCHES).map(|_| searches.begin()).collect();
        assert!(begun.iter().all(Option::is_some));
        assert!(searches.begin().is_none());
        drop(begun);
        assert!(searches.begin().is_some(), "those that are over have left");
    }

    #[test]
    fn what_steers_the_agent_is_told_from_what_it_serves() {
        for reserved in [
            "/init",
            "//init",
            "/freeze",
            "/unfreeze",
            "/collapse",
            "/fsfreeze",
            "/fsthaw",
        ] {
            assert!(is_reserved(reserved), "{reserved}");
        }
        for served in ["/", "/health", "/files", "/init/x", "/process.Process/Start"] {
            assert!(!is_reserved(served), "{served}");
        }
    }
}
