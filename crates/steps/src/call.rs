//! A step as a request of the API, and the answer as the end of the step.

use atoll_front::Apis;
use atoll_http_rules::segment;
use atoll_identity::Caller;
use atoll_workflows::{Step, StepEnd};
use axum::body::Body;
use axum::http::{Method, Request, StatusCode, header};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Value, json};

use crate::owned;

/// The most that an answer may hold: workflows keep it in their history.
pub(crate) const MOST: usize = 1024 * 1024;

/// How often a sandbox that an attempt before this one has made, and that is lost, is replaced.
const REPLACED: usize = 8;

#[derive(Debug, Clone)]
pub(crate) struct Call {
    method: Method,
    path: String,
    query: Vec<(&'static str, String)>,
    body: Option<Content>,
    idempotency: Option<String>,
    /// Ends what goes on when nobody waits for it any more.
    undo: Option<Box<Self>>,
    /// The answer is the content of a file.
    is_file: bool,
    /// The answer is a sandbox that the step is to make, so one that can be used.
    makes: bool,
}

#[derive(Debug, Clone)]
enum Content {
    Json(Value),
    Bytes(Vec<u8>),
}

pub(crate) fn invalid(message: impl Into<String>) -> StepEnd {
    StepEnd::Failed {
        kind: "InvalidInput".to_owned(),
        message: message.into(),
        again: false,
    }
}

pub(crate) fn too_large() -> StepEnd {
    StepEnd::Failed {
        kind: "TooLarge".to_owned(),
        message: format!("the answer is larger than {MOST} bytes, the most that a step may return"),
        again: false,
    }
}

/// By which an attempt finds what an earlier one made.
fn idempotency_key(step: &Step) -> String {
    format!("{}/{}", step.run_id, step.scheduled_id)
}

/// What to ask of the API.
pub(crate) fn plan(step: &Step, input: Value) -> Result<Call, StepEnd> {
    let Value::Object(mut fields) = input else {
        return Err(invalid("the argument must be a JSON object"));
    };
    if step.name == "sandbox.create" {
        let keep = fields.remove("keep");
        if keep != Some(json!(true)) {
            owned::own(step, &mut fields);
        }
        let mut call = Call::new(Method::POST, "/v1/sandboxes".to_owned(), Some(fields));
        call.idempotency = Some(idempotency_key(step));
        call.makes = true;
        return Ok(call);
    }
    let known = [
        "sandbox.exec",
        "sandbox.write",
        "sandbox.read",
        "sandbox.pause",
        "sandbox.resume",
        "sandbox.snapshot",
        "sandbox.fork",
        "sandbox.delete",
        "artifact.save",
    ];
    if !known.contains(&step.name.as_str()) {
        let known = known.join(", ");
        return Err(StepEnd::Failed {
            kind: "UnknownStep".to_owned(),
            message: format!(
                "there is no step `{}`; there are approval.request, model.call, sandbox.create, {known}",
                step.name
            ),
            again: false,
        });
    }
    let sandbox = text(&mut fields, "sandbox")?.ok_or_else(|| invalid("`sandbox` is missing: its id"))?;
    let at = |rest: &str| format!("/v1/sandboxes/{}{rest}", segment(&sandbox));
    Ok(match step.name.as_str() {
        "sandbox.exec" => {
            // What reads input or has a terminal cannot be joined half way.
            let is_alone = ["stdin", "stdin_base64", "pty"]
                .iter()
                .all(|name| fields.get(*name).is_none_or(Value::is_null));
            let key = idempotency_key(step);
            let mut call = Call::new(Method::POST, at("/exec"), Some(fields));
            if is_alone {
                call.undo = ending(&sandbox, &key);
                call.idempotency = Some(key);
            }
            call
        }
        "sandbox.pause" => Call::new(Method::POST, at("/pause"), Some(fields)),
        "sandbox.resume" => Call::new(Method::POST, at("/resume"), Some(fields)),
        "sandbox.snapshot" => {
            let mut call = Call::new(Method::POST, at("/snapshots"), Some(fields));
            call.idempotency = Some(idempotency_key(step));
            call
        }
        "sandbox.fork" => Call::new(Method::POST, at("/fork"), Some(fields)),
        "artifact.save" => Call::new(Method::POST, at("/artifacts"), Some(fields)),
        "sandbox.delete" => {
            nothing_else(&fields)?;
            Call::new(Method::DELETE, at(""), None)
        }
        "sandbox.read" => {
            let mut call = Call::new(Method::GET, at("/files/content"), None);
            call.query = query(&mut fields, &["path", "user"])?;
            call.is_file = true;
            nothing_else(&fields)?;
            call
        }
        _ => {
            let content = match (
                text(&mut fields, "content")?,
                text(&mut fields, "content_base64")?,
            ) {
                (Some(text), None) => text.into_bytes(),
                (None, Some(encoded)) => STANDARD
                    .decode(encoded)
                    .map_err(|error| invalid(format!("`content_base64` is not base64: {error}")))?,
                _ => return Err(invalid("give either `content` or `content_base64`")),
            };
            let mut call = Call::new(Method::PUT, at("/files/content"), None);
            call.query = query(&mut fields, &["path", "user", "mode"])?;
            call.body = Some(Content::Bytes(content));
            nothing_else(&fields)?;
            call
        }
    })
}

/// A command with a key outlives its request, so it is ended by name.
fn ending(sandbox: &str, key: &str) -> Option<Box<Call>> {
    let id = sandbox.parse().ok()?;
    let command = atoll_sandboxes::keyed_command(&id, key).ok()?;
    let path = format!("/v1/sandboxes/{id}/commands/{command}/signal");
    let mut fields = Map::new();
    fields.insert("signal".to_owned(), json!("SIGKILL"));
    Some(Box::new(Call::new(Method::POST, path, Some(fields))))
}

fn text(fields: &mut Map<String, Value>, name: &str) -> Result<Option<String>, StepEnd> {
    match fields.remove(name) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(_) => Err(invalid(format!("`{name}` must be text"))),
    }
}

fn query(
    fields: &mut Map<String, Value>,
    names: &[&'static str],
) -> Result<Vec<(&'static str, String)>, StepEnd> {
    let mut query = Vec::new();
    for name in names {
        query.extend(text(fields, name)?.map(|value| (*name, value)));
    }
    Ok(query)
}

fn nothing_else(fields: &Map<String, Value>) -> Result<(), StepEnd> {
    match fields.keys().next() {
        Some(unknown) => Err(invalid(format!("`{unknown}` is not a field of this step"))),
        None => Ok(()),
    }
}

impl Call {
    fn new(method: Method, path: String, body: Option<Map<String, Value>>) -> Self {
        Self {
            method,
            path,
            query: Vec::new(),
            body: body.map(|fields| Content::Json(Value::Object(fields))),
            idempotency: None,
            undo: None,
            is_file: false,
            makes: false,
        }
    }

    /// What to ask of the API when the step was told to stop.
    pub(crate) fn take_undo(&mut self) -> Option<Self> {
        self.undo.take().map(|undo| *undo)
    }

    pub(crate) async fn send(self, apis: &Apis, caller: Caller) -> StepEnd {
        let mut call = self;
        let mut number = 1;
        loop {
            number += 1;
            // Under the next key, where a later attempt finds what this one makes now.
            let next = call.makes.then(|| call.numbered(number));
            let end = call.send_once(apis, caller.clone()).await;
            match (next, lost(&end)) {
                (Some(next), Some(_)) if number <= REPLACED => call = next,
                (Some(_), Some(lost)) => return lost,
                _ => return end,
            }
        }
    }

    fn numbered(&self, number: usize) -> Self {
        let base = self.idempotency.as_deref().unwrap_or_default();
        // `RUN/EVENT`, and then the number.
        let base = base.split('/').take(2).collect::<Vec<_>>().join("/");
        Self {
            idempotency: Some(format!("{base}/{number}")),
            ..self.clone()
        }
    }

    async fn send_once(self, apis: &Apis, caller: Caller) -> StepEnd {
        let is_file = self.is_file;
        let request = match self.request(caller) {
            Ok(request) => request,
            Err(error) => return invalid(format!("this cannot be asked of the API: {error}")),
        };
        let response = apis.answer(request).await;
        let status = response.status();
        let body = match axum::body::to_bytes(response.into_body(), MOST).await {
            Ok(body) => body,
            Err(_) => return too_large(),
        };
        if !status.is_success() {
            return failed(status, &body);
        }
        StepEnd::Done(match is_file {
            true => content(&body).to_string().into_bytes(),
            false if body.is_empty() => b"null".to_vec(),
            false => body.to_vec(),
        })
    }

    fn request(self, caller: Caller) -> Result<Request<Body>, axum::http::Error> {
        let mut uri = self.path;
        for (index, (name, value)) in self.query.iter().enumerate() {
            uri.push(if index == 0 { '?' } else { '&' });
            uri.push_str(name);
            uri.push('=');
            uri.push_str(&segment(value));
        }
        let mut request = Request::builder()
            .method(self.method)
            .uri(uri)
            .header(header::HOST, "localhost")
            .extension(caller);
        if let Some(key) = self.idempotency {
            request = request.header("idempotency-key", key);
        }
        match self.body {
            None => request.body(Body::empty()),
            Some(Content::Bytes(bytes)) => request.body(Body::from(bytes)),
            Some(Content::Json(value)) => request
                .header(header::CONTENT_TYPE, "application/json")
                .body(Body::from(value.to_string())),
        }
    }
}

/// What to say of a sandbox that is of no use to who wanted one: an attempt before this one has made it, and it has ended since.
fn lost(end: &StepEnd) -> Option<StepEnd> {
    let StepEnd::Done(body) = end else {
        return None;
    };
    let sandbox: Value = serde_json::from_slice(body).unwrap_or_default();
    let state = sandbox["state"].as_str()?;
    if !matches!(state, "failed" | "deleting" | "deleted") {
        return None;
    }
    let id = sandbox["id"].as_str().unwrap_or_default();
    Some(StepEnd::Failed {
        kind: "SandboxLost".to_owned(),
        message: format!("the sandbox {id} is {state}: it cannot be used"),
        again: true,
    })
}

/// The API's own words. Whether another attempt may help is said by the status.
fn failed(status: StatusCode, body: &[u8]) -> StepEnd {
    let body: Value = serde_json::from_slice(body).unwrap_or_default();
    let error = &body["error"];
    let mut message = error["message"]
        .as_str()
        .unwrap_or("the request failed")
        .to_owned();
    if let Some(hint) = error["hint"].as_str() {
        message = format!("{message} ({hint})");
    }
    let again = status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS;
    StepEnd::Failed {
        kind: error["code"].as_str().unwrap_or("failed").to_owned(),
        message,
        again,
    }
}

fn content(bytes: &[u8]) -> Value {
    match std::str::from_utf8(bytes) {
        Ok(text) => json!({"content": text}),
        Err(_) => json!({"content_base64": STANDARD.encode(bytes)}),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn planned(name: &str, input: Value) -> Result<Call, StepEnd> {
        let step = Step {
            name: name.to_owned(),
            namespace: "default".to_owned(),
            workflow_id: "order 7".to_owned(),
            run_id: "0199".to_owned(),
            activity_id: "an id that comes again".to_owned(),
            scheduled_id: 3,
            ..Step::default()
        };
        plan(&step, input)
    }

    #[test]
    fn a_step_becomes_a_request() {
        let call = planned("sandbox.exec", json!({"sandbox": "sbx_a", "cmd": "ls"})).unwrap();
        assert_eq!(
            (call.method, call.path.as_str()),
            (Method::POST, "/v1/sandboxes/sbx_a/exec")
        );
        assert!(matches!(call.body, Some(Content::Json(body)) if body == json!({"cmd": "ls"})));
        let call = planned("sandbox.read", json!({"sandbox": "../x", "path": "/a b"})).unwrap();
        let caller = Caller::for_test(atoll_types::ProjectId::from_entropy([0; 20]));
        let request = call.request(caller).unwrap();
        assert_eq!(
            request.uri().to_string(),
            "/v1/sandboxes/..%2Fx/files/content?path=%2Fa%20b",
            "an id names nothing but a sandbox"
        );
    }

    #[test]
    fn what_a_workflow_makes_is_its_own_unless_it_is_kept() {
        let made = |input: Value| {
            let call = planned("sandbox.create", input).unwrap();
            assert_eq!(call.idempotency.as_deref(), Some("0199/3"));
            match call.body {
                Some(Content::Json(body)) => body,
                other => panic!("{other:?}"),
            }
        };
        let owned = made(json!({"template": "base", "owner": "workflow:default:0200:another"}));
        assert_eq!(
            owned,
            json!({"template": "base", "owner": "workflow:default:0199:order 7"})
        );
        assert_eq!(made(json!({"keep": true})), json!({}));
    }

    /// Makes a sandbox where the API has, under some keys, sandboxes in these states.
    async fn make(states: &'static [(&'static str, &'static str)]) -> StepEnd {
        let answer = move |request: Request<Body>| async move {
            let key = request.headers()["idempotency-key"].to_str().unwrap().to_owned();
            let known = states.iter().find(|(known, _)| *known == key);
            let state = known.map_or("running", |(_, state)| *state);
            axum::Json(json!({"id": key, "state": state}))
        };
        let api = atoll_front::Api {
            name: "api",
            claims: std::sync::Arc::new(|_| true),
            router: axum::Router::new().fallback(answer),
            write: |response, _, _| response,
        };
        let front = atoll_front::Front::new(atoll_front::Limits::for_machine(1 << 30, 1000));
        let caller = Caller::for_test(atoll_types::ProjectId::from_entropy([0; 20]));
        let call = planned("sandbox.create", json!({})).unwrap();
        call.send(&Apis::new(front, Vec::new(), [api]), caller).await
    }

    #[tokio::test]
    async fn a_sandbox_that_is_lost_is_replaced_and_never_an_answer() {
        let made = |end: StepEnd| match end {
            StepEnd::Done(body) => serde_json::from_slice::<Value>(&body).unwrap()["id"].clone(),
            other => panic!("{other:?}"),
        };
        assert_eq!(made(make(&[]).await), "0199/3");
        assert_eq!(made(make(&[("0199/3", "paused")]).await), "0199/3");
        assert_eq!(made(make(&[("0199/3", "failed")]).await), "0199/3/2");
        // The one that took its place was lost in turn.
        let twice = &[("0199/3", "deleting"), ("0199/3/2", "deleted")];
        assert_eq!(made(make(twice).await), "0199/3/3");
        let never = make(&[
            ("0199/3", "failed"),
            ("0199/3/2", "failed"),
            ("0199/3/3", "failed"),
            ("0199/3/4", "failed"),
            ("0199/3/5", "failed"),
            ("0199/3/6", "failed"),
            ("0199/3/7", "failed"),
            ("0199/3/8", "failed"),
        ])
        .await;
        assert!(
            matches!(&never, StepEnd::Failed { kind, .. } if kind == "SandboxLost"),
            "{never:?}"
        );
    }

    #[test]
    fn what_is_not_a_field_is_refused() {
        for (name, input) in [
            ("sandbox.exec", json!({"cmd": "ls"})),
            ("sandbox.delete", json!({"sandbox": "sbx_a", "force": true})),
            ("sandbox.read", json!({"sandbox": "sbx_a", "path": 7})),
            ("sandbox.write", json!({"sandbox": "sbx_a", "path": "/x"})),
            ("sandbox.boil", json!({"sandbox": "sbx_a"})),
        ] {
            let end = planned(name, input).unwrap_err();
            assert!(
                matches!(end, StepEnd::Failed { again: false, .. }),
                "{name}: {end:?}"
            );
        }
    }
}
