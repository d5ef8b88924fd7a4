//! `/v1/secrets`: values that are put into the requests of sandboxes and never shown to anybody.
//!
//! What must hold: a value comes in and does not go out again. The requests that carry one cannot be printed or written,
//! their memory is wiped, and what is said about a mistake in them never repeats what stood there.

use atoll_actions::words::Ports;
use atoll_sandboxes::{SecretView, SetSecret};
use atoll_types::{Code, Injection, SecretBinding};
use axum::extract::State;
use axum::http::StatusCode;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Deserializer, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use zeroize::Zeroizing;

use crate::error::{Answer, Failure};
use crate::extract::{Args, As, At, PrivateJson};
use crate::{App, wire};

pub(crate) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(list_secrets))
        .routes(routes!(set_secret, get_secret, delete_secret))
        .routes(routes!(rotate_secret))
}

/// A secret and where it goes. Give `value`, or `value_base64` where it is not UTF-8.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SetSecretRequest {
    #[serde(default, deserialize_with = "hidden")]
    #[schema(value_type = Option<String>, write_only)]
    value: Option<Zeroizing<String>>,
    #[serde(default, deserialize_with = "hidden")]
    #[schema(value_type = Option<String>, write_only)]
    value_base64: Option<Zeroizing<String>>,
    /// The only names that it is sent to; `*.` and a name for everything below it.
    #[schema(min_items = 1, examples(json!(["api.example.com"])))]
    hosts: Vec<String>,
    /// Empty: 443.
    #[serde(default)]
    ports: Vec<Ports>,
    /// Only requests with one of these methods. Empty: all.
    #[serde(default)]
    methods: Vec<String>,
    /// Only requests to one of these paths, written as in a rule. Empty: all.
    #[serde(default)]
    paths: Vec<String>,
    /// Whether it may also go out over plain HTTP, where everybody on the way can read it.
    #[serde(default)]
    plain_http: bool,
    /// Whether echoes of it are also blotted out in the bodies of answers; in their headers they always are.
    #[serde(default)]
    redact: bool,
    inject: InjectionWords,
    /// It is not used any more from then on. Absent: no end.
    #[schema(format = DateTime)]
    expires_at: Option<String>,
}

/// The shape in which a secret is put into a request: `"bearer"`, `{"header": {"name": "x-api-key"}}`.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
#[schema(as = SecretInjection)]
pub(crate) enum InjectionWords {
    /// As this header, whatever the sandbox sent under that name.
    Header { name: String },
    /// As `Authorization: Bearer`, whatever the sandbox sent there.
    Bearer,
    /// As the password of `Authorization: Basic`, whatever the sandbox sent there.
    Basic { username: String },
    /// As this parameter of the query, whatever the sandbox sent there.
    Query { name: String },
    /// Wherever the sandbox put the placeholder: in a header, in basic authentication, in the query.
    Placeholder,
}

impl InjectionWords {
    pub(crate) fn of(injection: Injection) -> Self {
        match injection {
            Injection::Header { name } => Self::Header { name },
            Injection::Bearer => Self::Bearer,
            Injection::Basic { username } => Self::Basic { username },
            Injection::Query { name } => Self::Query { name },
            Injection::Placeholder => Self::Placeholder,
        }
    }

    pub(crate) fn into_injection(self) -> Injection {
        match self {
            Self::Header { name } => Injection::Header { name },
            Self::Bearer => Injection::Bearer,
            Self::Basic { username } => Injection::Basic { username },
            Self::Query { name } => Injection::Query { name },
            Self::Placeholder => Injection::Placeholder,
        }
    }
}

/// The value that holds from now on. Give `value`, or `value_base64` where it is not UTF-8.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct RotateSecretRequest {
    #[serde(default, deserialize_with = "hidden")]
    #[schema(value_type = Option<String>, write_only)]
    value: Option<Zeroizing<String>>,
    #[serde(default, deserialize_with = "hidden")]
    #[schema(value_type = Option<String>, write_only)]
    value_base64: Option<Zeroizing<String>>,
    /// It is not used any more from then on. Absent: no end.
    #[schema(format = DateTime)]
    expires_at: Option<String>,
}

fn hidden<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Zeroizing<String>>, D::Error> {
    Option::deserialize(deserializer).map(|text: Option<String>| text.map(Zeroizing::new))
}

/// As [`wire::exactly_one`], which may say what it could not read.
fn value(
    text: Option<Zeroizing<String>>,
    encoded: Option<Zeroizing<String>>,
) -> Result<Zeroizing<Vec<u8>>, Failure> {
    match (text, encoded) {
        (Some(mut text), None) => Ok(Zeroizing::new(std::mem::take(&mut *text).into_bytes())),
        (None, Some(encoded)) => match STANDARD.decode(encoded.as_bytes()) {
            Ok(bytes) => Ok(Zeroizing::new(bytes)),
            Err(_) => Err(Failure::new(Code::InvalidBase64, "`value_base64` is not base64")),
        },
        (None, None) => Err(Failure::new(
            Code::MissingField,
            "`value` is missing; give it, or `value_base64` if it is not UTF-8",
        )),
        (Some(_), Some(_)) => Err(Failure::new(
            Code::ContradictingFields,
            "`value` and `value_base64` exclude each other",
        )),
    }
}

impl SetSecretRequest {
    fn into_secret(self, name: String) -> Answer<SetSecret> {
        Ok(SetSecret {
            name,
            value: value(self.value, self.value_base64)?,
            binding: SecretBinding {
                hosts: self.hosts,
                ports: Ports::into_ranges(self.ports),
                methods: self.methods,
                paths: self.paths,
                plain_http: self.plain_http,
                redact: self.redact,
                inject: self.inject.into_injection(),
            },
            expires_at: wire::maybe_time("expires_at", self.expires_at.as_deref())?,
        })
    }
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct SecretsQuery {
    /// `next` of the page before.
    cursor: Option<String>,
    #[param(minimum = 1, maximum = 100, default = 50)]
    limit: Option<u64>,
}

/// A secret without its value, which nobody is shown.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Secret)]
pub(crate) struct SecretItem {
    id: String,
    name: String,
    /// The only names that it is sent to.
    hosts: Vec<String>,
    /// Empty: 443.
    ports: Vec<Ports>,
    methods: Vec<String>,
    paths: Vec<String>,
    plain_http: bool,
    redact: bool,
    inject: InjectionWords,
    #[schema(format = DateTime)]
    created_at: String,
    /// When its value was last replaced.
    #[schema(format = DateTime)]
    rotated_at: Option<String>,
    #[schema(format = DateTime)]
    expires_at: Option<String>,
}

impl SecretItem {
    fn of(secret: SecretView) -> Self {
        let SecretBinding {
            hosts,
            ports,
            methods,
            paths,
            plain_http,
            redact,
            inject,
        } = secret.binding;
        Self {
            id: secret.id.to_string(),
            name: secret.name,
            hosts,
            ports: Ports::of(ports),
            methods,
            paths,
            plain_http,
            redact,
            inject: InjectionWords::of(inject),
            created_at: wire::time(secret.created_at),
            rotated_at: secret.rotated_at.map(wire::time),
            expires_at: secret.expires_at.map(wire::time),
        }
    }
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SecretPage {
    items: Vec<SecretItem>,
    /// Pass it as `cursor` to get what follows; absent at the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    next: Option<String>,
}

/// Keeps a secret under a name, encrypted; one that is there gets this value and this binding. Running sandboxes that may
/// use it use the new value at once.
#[utoipa::path(
    put, path = "/v1/secrets/{secret}", tag = "secrets",
    security(("key" = ["secrets.manage"])), request_body = SetSecretRequest,
    responses((status = 200, description = "It is kept.", body = SecretItem))
)]
pub(crate) async fn set_secret(
    State(app): State<App>,
    As(caller): As,
    At(name): At<String>,
    PrivateJson(body): PrivateJson<SetSecretRequest>,
) -> Answer<axum::Json<SecretItem>> {
    let secret = app.sandboxes.set_secret(&caller, body.into_secret(name)?).await?;
    Ok(axum::Json(SecretItem::of(secret)))
}

/// Replaces the value of a secret and nothing else. Running sandboxes that may use it use the new value at once.
#[utoipa::path(
    post, path = "/v1/secrets/{secret}/rotate", tag = "secrets",
    security(("key" = ["secrets.manage"])), request_body = RotateSecretRequest,
    responses((status = 200, description = "The new value holds.", body = SecretItem))
)]
pub(crate) async fn rotate_secret(
    State(app): State<App>,
    As(caller): As,
    At(name): At<String>,
    PrivateJson(body): PrivateJson<RotateSecretRequest>,
) -> Answer<axum::Json<SecretItem>> {
    let expires_at = wire::maybe_time("expires_at", body.expires_at.as_deref())?;
    let value = value(body.value, body.value_base64)?;
    let secret = app
        .sandboxes
        .rotate_secret(&caller, &name, value, expires_at)
        .await?;
    Ok(axum::Json(SecretItem::of(secret)))
}

/// Lists secrets without their values, newest first.
#[utoipa::path(
    get, path = "/v1/secrets", tag = "secrets",
    security(("key" = ["secrets.read"])), params(SecretsQuery),
    responses((status = 200, description = "A page of them.", body = SecretPage))
)]
pub(crate) async fn list_secrets(
    State(app): State<App>,
    As(caller): As,
    Args(query): Args<SecretsQuery>,
) -> Answer<axum::Json<SecretPage>> {
    let limit = wire::within("limit", query.limit.unwrap_or(50), 1..=100)?;
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    let page = app.sandboxes.secrets(&caller, query.cursor, limit).await?;
    Ok(axum::Json(SecretPage {
        items: page.items.into_iter().map(SecretItem::of).collect(),
        next: page.next,
    }))
}

/// Shows a secret without its value.
#[utoipa::path(
    get, path = "/v1/secrets/{secret}", tag = "secrets",
    security(("key" = ["secrets.read"])),
    responses((status = 200, description = "The secret.", body = SecretItem))
)]
pub(crate) async fn get_secret(
    State(app): State<App>,
    As(caller): As,
    At(name): At<String>,
) -> Answer<axum::Json<SecretItem>> {
    let secret = app.sandboxes.secret(&caller, &name).await?;
    Ok(axum::Json(SecretItem::of(secret)))
}

/// Deletes a secret. Sandboxes that may use it go on without it.
#[utoipa::path(
    delete, path = "/v1/secrets/{secret}", tag = "secrets",
    security(("key" = ["secrets.manage"])),
    responses((status = 204, description = "It is gone."))
)]
pub(crate) async fn delete_secret(
    State(app): State<App>,
    As(caller): As,
    At(name): At<String>,
) -> Answer<StatusCode> {
    app.sandboxes.delete_secret(&caller, &name).await?;
    Ok(StatusCode::NO_CONTENT)
}

#[cfg(test)]
mod tests {
    use atoll_types::{PortRange, Timestamp};

    use super::*;
    use crate::extract::{parse_json, parse_private_json};

    fn read(text: &str) -> Answer<SetSecret> {
        parse_private_json::<SetSecretRequest>(text.as_bytes())?.into_secret("github".into())
    }

    #[test]
    fn a_value_and_its_binding_arrive() {
        let secret = read(
            r#"{"value":"s3\u0063ret","hosts":["api.example.com"],"ports":[8443],"methods":["GET"],"paths":["/v1/**"],
                "plain_http":true,"redact":true,"inject":{"basic":{"username":"git"}},
                "expires_at":"2023-11-14T22:13:20.120Z"}"#,
        );
        let secret = secret.unwrap_or_else(|failure| panic!("{}", failure.fault().message));
        assert_eq!(secret.value.as_slice(), b"s3cret");
        assert_eq!(secret.expires_at, Some(Timestamp(1_700_000_000_120)));
        assert_eq!(
            secret.binding,
            SecretBinding {
                hosts: vec!["api.example.com".into()],
                ports: vec![PortRange::single(8443).unwrap()],
                methods: vec!["GET".into()],
                paths: vec!["/v1/**".into()],
                plain_http: true,
                redact: true,
                inject: Injection::Basic {
                    username: "git".into()
                },
            }
        );
        let exact = read(r#"{"value_base64":"/w==","hosts":["a.example"],"inject":"bearer"}"#);
        assert_eq!(exact.ok().map(|secret| secret.value.to_vec()), Some(vec![0xff]));
    }

    /// Wherever somebody misplaces a value, and whatever is wrong with the body around it.
    #[test]
    fn no_refusal_repeats_a_value() {
        let binding = r#""hosts":["a.example"],"inject":"bearer""#;
        for (text, named) in [
            (r#""s3cr3t""#.to_owned(), "struct SetSecretRequest"),
            (r#"["s3cr3t"]"#.to_owned(), "struct SetSecretRequest"),
            (format!(r#"{{"value":["s3cr3t"],{binding}}}"#), "value"),
            (format!(r#"{{"value":{{"s3cr3t":1}},{binding}}}"#), "value"),
            (format!(r#"{{"value":57337,{binding}}}"#), "value"),
            (
                format!(r#"{{"value_base64":"s3cr3t!",{binding}}}"#),
                "value_base64",
            ),
            (
                format!(r#"{{"value":"s3cr3t","value_base64":"czNjcjN0",{binding}}}"#),
                "value_base64",
            ),
            (format!(r#"{{"value":"s3cr3t","colour":1,{binding}}}"#), "colour"),
            (format!(r#"{{"value":"s3cr3t" {binding}}}"#), "line 1"),
            (format!(r#"{{"value":"s3cr3t,{binding}}}"#), "line 1"),
            (
                r#"{"value":"x","hosts":"s3cr3t","inject":"bearer"}"#.to_owned(),
                "hosts",
            ),
            (
                r#"{"value":"x","hosts":[],"inject":"s3cr3t"}"#.to_owned(),
                "inject",
            ),
            (
                r#"{"value":"x","hosts":[],"inject":{"basic":"s3cr3t"}}"#.to_owned(),
                "inject",
            ),
            (
                r#"{"value":"x","hosts":[],"ports":["s3cr3t"],"inject":"bearer"}"#.to_owned(),
                "ports[0]",
            ),
            (
                r#"{"value":"x","hosts":[],"ports":["s3, expected s3cr3t"],"inject":"bearer"}"#.to_owned(),
                "ports[0]",
            ),
            (
                r#"{"value":"x","hosts":[],"inject":"bearer","expires_at":"s3cr3t"}"#.to_owned(),
                "expires_at",
            ),
            (format!("{{{binding}}}"), "value"),
        ] {
            let Err(failure) = read(&text) else {
                panic!("{text} was accepted");
            };
            let said = format!("{} {:?}", failure.fault().message, failure.fault().hint);
            for hidden in ["s3cr3t", "57337", "czNj"] {
                assert!(!said.contains(hidden), "{text}: {said}");
            }
            assert!(said.contains(named), "{text}: {said}");
        }
    }

    #[test]
    fn a_rotation_carries_a_value_and_nothing_else() {
        let read = |text: &str| parse_private_json::<RotateSecretRequest>(text.as_bytes());
        assert!(read(r#"{"value":"x"}"#).is_ok());
        assert!(read(r#"{"value":"x","hosts":[]}"#).is_err());
    }

    #[test]
    fn injections_are_told_apart_and_strict() {
        for text in [
            r#"{"header":{"name":"x-api-key"}}"#,
            r#""bearer""#,
            r#"{"basic":{"username":"git"}}"#,
            r#"{"query":{"name":"key"}}"#,
            r#""placeholder""#,
        ] {
            let injection = parse_json::<InjectionWords>(text.as_bytes())
                .unwrap()
                .into_injection();
            assert_eq!(injection, serde_json::from_str::<Injection>(text).unwrap());
            assert_eq!(
                serde_json::to_string(&InjectionWords::of(injection)).unwrap(),
                text
            );
        }
        for text in [
            r#"{"bearer":{"name":"x"}}"#,
            r#""header""#,
            r#"{"cookie":{"name":"x"}}"#,
            r#"{"header":{"name":"x","prefix":"y"}}"#,
        ] {
            assert!(parse_json::<InjectionWords>(text.as_bytes()).is_err(), "{text}");
        }
    }
}
