//! Creating sandboxes.

use std::collections::BTreeMap;

use atoll_identity::Caller;
use atoll_sandboxes::{CreateSandbox, Sandbox};
use atoll_types::{ResourcesAsked, SandboxSpec, TimeoutAction, VolumeMount};
use axum::extract::{Json, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::Value;

use super::domain::Domain;
use super::network::{self, NetworkConfig};
use super::read::Read;
use super::{snapshots, view};
use crate::App;
use crate::auth::Auth;
use crate::error::{Answer, Refusal};
use crate::extras::{Extras, LABEL};

/// The body of both versions.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NewSandbox {
    #[serde(rename = "templateID")]
    template: String,
    timeout: Option<i64>,
    #[serde(rename = "autoPause")]
    auto_pause: Option<bool>,
    #[serde(rename = "autoPauseMemory")]
    auto_pause_memory: Option<bool>,
    #[serde(rename = "autoResume")]
    auto_resume: Option<AutoResume>,
    /// Version 1 only: in version 2 every sandbox is.
    secure: Option<bool>,
    allow_internet_access: Option<bool>,
    network: Option<NetworkConfig>,
    metadata: Option<BTreeMap<String, String>>,
    #[serde(rename = "envVars")]
    env_vars: Option<BTreeMap<String, String>>,
    /// For the SDK alone, which starts the gateway itself.
    #[serde(rename = "mcp")]
    _mcp: Option<Value>,
    iam: Option<Iam>,
    #[serde(rename = "volumeMounts")]
    volume_mounts: Option<Vec<Mount>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct AutoResume {
    enabled: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Iam {
    tokens: Option<BTreeMap<String, Value>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Mount {
    name: String,
    path: String,
}

/// Lifetimes of those who name none, in seconds.
const V1_TIMEOUT: i64 = 15;
const V2_TIMEOUT: i64 = 300;

pub(crate) async fn v1(
    State(app): State<App>,
    Auth(caller): Auth,
    domain: Domain,
    headers: HeaderMap,
    Read(request): Read<NewSandbox>,
) -> Answer<Response> {
    let open = !request.secure.unwrap_or(false);
    let sandbox = create(&app, &caller, &headers, request, V1_TIMEOUT, open).await?;
    Ok(created(&app, &domain, &sandbox))
}

pub(crate) async fn v2(
    State(app): State<App>,
    Auth(caller): Auth,
    domain: Domain,
    headers: HeaderMap,
    Read(request): Read<NewSandbox>,
) -> Answer<Response> {
    if request.secure == Some(false) {
        return Err(Refusal::unsupported(
            "secure",
            "every sandbox of this version is secured",
        ));
    }
    let sandbox = create(&app, &caller, &headers, request, V2_TIMEOUT, false).await?;
    Ok(created(&app, &domain, &sandbox))
}

fn created(app: &App, domain: &Domain, sandbox: &Sandbox) -> Response {
    (StatusCode::CREATED, Json(view::created(app, domain, sandbox))).into_response()
}

async fn create(
    app: &App,
    caller: &Caller,
    headers: &HeaderMap,
    request: NewSandbox,
    default_timeout: i64,
    open: bool,
) -> Answer<Sandbox> {
    let template = snapshots::origin(app, caller, &request.template).await?;
    let usual = network::reaches_internet(app);
    let (mut spec, mut asked) = spec(request, template, default_timeout, open, usual)?;
    // Held until the sandbox uses them.
    let lent = asked.lend(app, caller).await?;
    spec.secrets = lent.uses();
    spec.network = asked.policy;
    let idempotency_key = headers
        .get("idempotency-key")
        .and_then(|value| value.to_str().ok())
        .map(str::to_owned);
    let request = CreateSandbox {
        spec,
        resources: ResourcesAsked::default(),
        idempotency_key,
    };
    Ok(app.sandboxes.create(caller, request).await?)
}

fn spec(
    request: NewSandbox,
    template: String,
    default_timeout: i64,
    open: bool,
    usual: bool,
) -> Answer<(SandboxSpec, network::Asked)> {
    let timeout = request.timeout.unwrap_or(default_timeout);
    let auto_pause = request.auto_pause.unwrap_or(false);
    let keeps_memory = request.auto_pause_memory.unwrap_or(true);
    let auto_resume = request.auto_resume.is_some_and(|auto| auto.enabled);
    if !keeps_memory && !auto_pause {
        return Err(Refusal::invalid(
            "`autoPauseMemory` can only be false with `autoPause`",
        ));
    }
    if !keeps_memory && auto_resume {
        return Err(Refusal::invalid(
            "`autoPauseMemory: false` excludes `autoResume`: what was saved without memory does not resume by itself",
        ));
    }
    if request
        .iam
        .and_then(|iam| iam.tokens)
        .is_some_and(|tokens| !tokens.is_empty())
    {
        return Err(Refusal::unsupported("iam.tokens", "it issues no identities"));
    }
    let mut extras = Extras {
        open,
        ..Extras::default()
    };
    let asked = network::ask(request.network, request.allow_internet_access, usual, &mut extras)?;
    if extras.open && extras.private_ports {
        return Err(Refusal::invalid(
            "You cannot create a sandbox without public access unless you enable secure envd access via 'secure' flag.",
        ));
    }
    let mut labels = request.metadata.unwrap_or_default();
    if labels.contains_key(LABEL) {
        return Err(Refusal::invalid(format!(
            "`metadata.{LABEL}` is the server's own"
        )));
    }
    labels.insert(LABEL.to_owned(), extras.to_label());
    let mounts = request.volume_mounts.unwrap_or_default();
    let spec = SandboxSpec {
        template,
        timeout_millis: Some(millis("timeout", timeout)?),
        on_timeout: match (auto_pause, keeps_memory) {
            (false, _) => TimeoutAction::Kill,
            (true, true) => TimeoutAction::Pause,
            (true, false) => TimeoutAction::Stop,
        },
        auto_resume,
        env: request.env_vars.unwrap_or_default(),
        labels,
        volumes: mounts
            .into_iter()
            .map(|mount| VolumeMount {
                volume: mount.name,
                path: mount.path,
                read_only: false,
            })
            .collect(),
        ..SandboxSpec::default()
    };
    Ok((spec, asked))
}

/// A lifetime in seconds that has to be one.
pub(crate) fn millis(field: &str, seconds: i64) -> Answer<u64> {
    match u64::try_from(seconds) {
        Ok(seconds @ 1..) => Ok(seconds.saturating_mul(1000)),
        _ if field == "timeout" => Err(Refusal::invalid("Timeout must be greater than 0")),
        _ => Err(Refusal::invalid(format!("`{field}` must be greater than 0"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &str) -> Answer<SandboxSpec> {
        read_as(json, false)
    }

    fn read_as(json: &str, open: bool) -> Answer<SandboxSpec> {
        let request = serde_json::from_str(json).map_err(|error| Refusal::invalid(error.to_string()))?;
        spec(request, "base".into(), V2_TIMEOUT, open, true).map(|(spec, _)| spec)
    }

    #[test]
    fn private_ports_beside_an_open_agent_are_refused() {
        let private = r#"{"templateID":"base","network":{"allowPublicTraffic":false}}"#;
        assert!(read_as(private, false).is_ok());
        let message = read_as(private, true).unwrap_err().message;
        assert!(message.contains("'secure' flag"), "{message}");
        assert!(read_as(r#"{"templateID":"base"}"#, true).is_ok());
    }

    #[test]
    fn what_the_sdks_send_is_understood() {
        let spec = read(
            r#"{"templateID":"base","timeout":120,"autoPause":true,"autoPauseMemory":true,
                "autoResume":{"enabled":true},"allow_internet_access":false,"metadata":{"a":"b"},"envVars":{"X":"1"},
                "network":{"allowPublicTraffic":false}}"#,
        )
        .unwrap();
        assert_eq!((spec.timeout_millis, spec.auto_resume), (Some(120_000), true));
        assert_eq!(spec.on_timeout, TimeoutAction::Pause);
        let extras = Extras::of(&spec.labels).unwrap();
        assert!(extras.private_ports);
        assert_eq!(spec.labels["a"], "b");
    }

    #[test]
    fn what_cannot_be_served_is_named() {
        for (json, named) in [
            (
                r#"{"templateID":"base","timeout":0}"#,
                "Timeout must be greater than 0",
            ),
            (r#"{"templateID":"base","colour":1}"#, "colour"),
            (r#"{"templateID":"base","autoPauseMemory":false}"#, "autoPause"),
            (r#"{"templateID":"base","iam":{"tokens":{"a":{}}}}"#, "iam.tokens"),
            (
                r#"{"templateID":"base","network":{"egressProxy":{}}}"#,
                "egressProxy",
            ),
            (
                r#"{"templateID":"base","network":{"maskRequestHost":"-https://abcd"}}"#,
                "mask request host is not valid",
            ),
            (
                r#"{"templateID":"base","metadata":{"atoll.e2b":"{}"}}"#,
                "atoll.e2b",
            ),
        ] {
            let message = read(json).unwrap_err().message;
            assert!(message.contains(named), "{message}");
        }
    }
}
