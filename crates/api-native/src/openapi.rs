//! The OpenAPI document: what the handlers say of themselves, plus what is true of all of them and would be noise on
//! each (errors, the key, the shapes of path parameters).

use utoipa::openapi::path::{Operation, Parameter, ParameterBuilder, ParameterIn, PathItem};
use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityScheme};
use utoipa::openapi::{
    Content, ContentBuilder, InfoBuilder, KnownFormat, ObjectBuilder, OpenApi, Ref, RefOr, Required,
    ResponseBuilder, Schema, SchemaFormat, Type,
};
use utoipa::{PartialSchema as _, ToSchema as _};
use utoipa_axum::router::OpenApiRouter;

use crate::error::{ErrorBody, ErrorDetail};
use crate::{
    App, approvals, artifacts, browser, commands, events, exec, files, gateway, keys, ledger, network, ports,
    projects, run, sandboxes, secrets, server, session, snapshots, templates, transfer, volumes, workflows,
};

const ERROR: &str = "Error";
pub(crate) const KEY: &str = "key";

/// Every route with its documentation.
pub(crate) fn documented() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .merge(sandboxes::routes())
        .merge(ledger::routes())
        .merge(events::routes())
        .merge(exec::routes())
        .merge(run::routes())
        .merge(session::routes())
        .merge(commands::routes())
        .merge(files::routes())
        .merge(transfer::routes())
        .merge(ports::routes())
        .merge(artifacts::routes())
        .merge(templates::routes())
        .merge(snapshots::routes())
        .merge(volumes::routes())
        .merge(network::routes())
        .merge(secrets::routes())
        .merge(workflows::routes())
        .merge(approvals::routes())
        .merge(keys::routes())
        .merge(projects::routes())
        .merge(browser::routes())
        .merge(gateway::routes())
        .merge(server::routes())
}

/// The document that the server serves at `/openapi.json`, from what the handlers say of themselves.
pub(crate) fn complete(mut api: OpenApi) -> OpenApi {
    api.info = InfoBuilder::new()
        .title("Atoll")
        .version(env!("CARGO_PKG_VERSION"))
        .description(Some(
            "Sandboxes for untrusted code. Times are RFC 3339, durations are milliseconds, sizes are bytes. Unknown \
             fields and parameters are refused. The scope that an operation requires of the key is the action that its \
             roles and scopes must allow. Names that are not UTF-8 travel in fields that end in `_base64`.",
        ))
        .license(Some(utoipa::openapi::License::new("Apache-2.0")))
        .build();
    let components = api.components.get_or_insert_default();
    components.schemas.insert(ERROR.into(), ErrorBody::schema());
    components
        .schemas
        .insert("ErrorDetail".into(), ErrorDetail::schema());
    let mut nested = Vec::new();
    ErrorBody::schemas(&mut nested);
    components.schemas.extend(nested);
    let bearer = SecurityScheme::Http(Http::builder().scheme(HttpAuthScheme::Bearer).build());
    components.add_security_scheme(KEY, bearer);
    for (path, item) in &mut api.paths.paths {
        for operation in operations_mut(item) {
            complete_operation(path, operation);
        }
    }
    api
}

/// Adds to an operation what its path and body imply.
fn complete_operation(path: &str, operation: &mut Operation) {
    for name in path
        .split('/')
        .filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'))
    {
        let parameters = operation.parameters.get_or_insert_default();
        parameters.push(path_parameter(path, name));
    }
    if let Some(body) = &mut operation.request_body {
        describe_bytes(&mut body.content);
    }
    for response in operation.responses.responses.values_mut() {
        if let RefOr::T(response) = response {
            describe_bytes(&mut response.content);
        }
    }
    for status in statuses(path, operation) {
        operation
            .responses
            .responses
            .entry(status.to_string())
            .or_insert_with(|| RefOr::T(error_response(status)));
    }
}

/// Bytes are bytes, not lists of numbers; events are described in words, because no schema says what a stream is.
fn describe_bytes<'a>(contents: impl IntoIterator<Item = (&'a String, &'a mut Content)>) {
    for (kind, content) in contents {
        match kind.as_str() {
            "application/octet-stream" | "application/x-tar" => {
                let binary = SchemaFormat::KnownFormat(KnownFormat::Binary);
                let bytes = ObjectBuilder::new()
                    .schema_type(Type::String)
                    .format(Some(binary));
                content.schema = Some(RefOr::T(Schema::Object(bytes.build())));
            }
            "text/event-stream" => content.schema = None,
            _ => {}
        }
    }
}

/// What an operation may answer besides success.
fn statuses(path: &str, operation: &Operation) -> Vec<u16> {
    let mut statuses = vec![500];
    if path.starts_with("/v1/") {
        statuses.extend([401, 403, 429, 503]);
    }
    if path.starts_with("/metrics") {
        statuses.extend([401, 403]);
    }
    // Whatever does not read a parameter refuses it.
    statuses.push(400);
    if path.contains('{') {
        statuses.extend([404, 409, 410]);
    }
    // A query may name a project, or a sandbox.
    let mut parameters = operation.parameters.iter().flatten();
    if path == "/v1/keys" || parameters.any(|parameter| parameter.name == "sandbox") {
        statuses.push(404);
    }
    if path.starts_with("/v1/sandboxes/{id}") {
        statuses.extend([413, 422, 502, 504]);
    }
    if let Some(body) = &operation.request_body {
        // What is named in a body (a template, a snapshot, a volume) may not be there.
        statuses.extend([404, 409, 410, 413, 422, 502, 504]);
        if body.content.contains_key("application/json") {
            statuses.extend([408, 415]);
        }
    }
    if path.starts_with("/v1/workflows") || path.starts_with("/v1/approvals") {
        statuses.extend([404, 409, 422, 504]);
    }
    if path.starts_with("/v1/templates") {
        statuses.extend([422, 502, 504]);
    }
    statuses
}

fn error_response(status: u16) -> utoipa::openapi::Response {
    let description = match status {
        400 => "The request can never work as it stands.",
        401 => "No valid key came with the request.",
        403 => "The key may not do this.",
        404 => "There is no such thing in this project.",
        408 => "The body came too slowly.",
        409 => "The state of the thing does not allow this now.",
        410 => "The thing is gone for good.",
        413 => "It is larger than the server accepts.",
        415 => "The body is not of a kind that this route reads.",
        422 => "This server or machine cannot do it.",
        429 => "A limit of the caller stands in the way.",
        502 => "The sandbox failed or broke its protocol.",
        503 => "Try again later: the server is starting, stopping or busy.",
        504 => "It took longer than allowed.",
        _ => "The server made a mistake.",
    };
    ResponseBuilder::new()
        .description(description)
        .content(
            "application/json",
            ContentBuilder::new()
                .schema(Some(Ref::from_schema_name(ERROR)))
                .build(),
        )
        .build()
}

fn path_parameter(path: &str, name: &str) -> Parameter {
    let text = || ObjectBuilder::new().schema_type(Type::String);
    let id = |prefix: &str| text().pattern(Some(format!("^{prefix}_[a-z0-9]{{20}}$")));
    let (description, schema) = match name {
        "id" if path.ends_with("/keys/{id}") => ("The id of a key.", id("key")),
        "id" => (
            "The id of a sandbox, or the name of a living one.",
            text().pattern(Some(
                "^(sbx_[a-z0-9]{20}|[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)$".to_owned(),
            )),
        ),
        "command" => ("The id of a command.", id("cmd")),
        "port" => (
            "A TCP port inside the sandbox.",
            ObjectBuilder::new()
                .schema_type(Type::Integer)
                .minimum(Some(1))
                .maximum(Some(65535)),
        ),
        "artifact" => ("The id or the name of an artifact.", text().min_length(Some(1))),
        "snapshot" => ("The id or the name of a snapshot.", text().min_length(Some(1))),
        "volume" => ("The id or the name of a volume.", text().min_length(Some(1))),
        "workflow" => ("The id of a workflow.", text().min_length(Some(1))),
        "approval" => ("The id of an approval.", id("apr")),
        "secret" => (
            "The name of a secret.",
            text().min_length(Some(1)).max_length(Some(64)),
        ),
        "provider" => ("The name of a provider of models.", text().min_length(Some(1))),
        "alias" => ("A name that can be called.", text().min_length(Some(1))),
        "model" => (
            "The name of a model, as its provider calls it, or with the provider's name and a slash before it.",
            text().min_length(Some(1)),
        ),
        "budget" => ("The name of a budget.", text().min_length(Some(1))),
        "call" => ("The id of a call of a model.", text().min_length(Some(1))),
        _ => ("The id or the name of a template.", text().min_length(Some(1))),
    };
    ParameterBuilder::new()
        .name(name)
        .parameter_in(ParameterIn::Path)
        .required(Required::True)
        .description(Some(description))
        .schema(Some(Schema::Object(schema.build())))
        .build()
}

/// The operations of a path with their methods, as far as we use methods.
pub(crate) fn operations(item: &PathItem) -> impl Iterator<Item = (&'static str, &Operation)> {
    [
        ("GET", &item.get),
        ("PUT", &item.put),
        ("POST", &item.post),
        ("PATCH", &item.patch),
        ("DELETE", &item.delete),
    ]
    .into_iter()
    .filter_map(|(method, operation)| Some((method, operation.as_ref()?)))
}

fn operations_mut(item: &mut PathItem) -> impl Iterator<Item = &mut Operation> {
    [
        &mut item.get,
        &mut item.put,
        &mut item.post,
        &mut item.patch,
        &mut item.delete,
    ]
    .into_iter()
    .flatten()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_operation_says_what_it_may_answer() {
        let api = complete(documented().into_openapi());
        let mut ids = BTreeSet::new();
        for (path, item) in &api.paths.paths {
            for (method, operation) in operations(item) {
                let name = format!("{method} {path}");
                let id = operation.operation_id.clone().unwrap_or_default();
                assert!(ids.insert(id.clone()), "{name}: operation id {id} is used twice");
                assert!(operation.summary.is_some(), "{name} has no summary");
                assert!(operation.tags.is_some(), "{name} has no tag");
                let has = |status: &str| operation.responses.responses.contains_key(status);
                assert!(has("500"), "{name}");
                assert!(
                    operation
                        .responses
                        .responses
                        .keys()
                        .any(|status| status < &"300".to_owned()),
                    "{name} never succeeds"
                );
                if path.starts_with("/v1/") {
                    assert!(has("400") && has("401") && has("429") && has("503"), "{name}");
                    assert!(operation.security.is_some(), "{name}");
                }
                if path.contains('{') {
                    assert!(has("404"), "{name}");
                }
                let declared: BTreeSet<_> = operation
                    .parameters
                    .iter()
                    .flatten()
                    .filter(|parameter| parameter.parameter_in == ParameterIn::Path)
                    .map(|parameter| format!("{{{}}}", parameter.name))
                    .collect();
                let used: BTreeSet<_> = path
                    .split('/')
                    .filter(|part| part.starts_with('{'))
                    .map(str::to_owned)
                    .collect();
                assert_eq!(declared, used, "{name}");
            }
        }
        assert!(ids.len() >= 50, "only {} operations", ids.len());
    }

    #[test]
    fn the_document_is_openapi_3_1_and_whole() {
        let text = serde_json::to_string(&complete(documented().into_openapi())).unwrap();
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(json["openapi"], "3.1.0");
        assert_eq!(json["components"]["securitySchemes"]["key"]["scheme"], "bearer");
        let mut wanted = BTreeSet::new();
        references(&json, &mut wanted);
        for name in wanted {
            assert!(
                !json["components"]["schemas"][&name].is_null(),
                "schema {name} is missing"
            );
        }
        assert_eq!(
            json["components"]["schemas"]["CreateSandboxRequest"]["additionalProperties"],
            serde_json::Value::Bool(false)
        );
    }

    fn references(json: &serde_json::Value, found: &mut BTreeSet<String>) {
        match json {
            serde_json::Value::Object(fields) => {
                for (name, value) in fields {
                    match (name.as_str(), value.as_str()) {
                        ("$ref", Some(target)) => {
                            found.insert(target.rsplit('/').next().unwrap_or_default().to_owned());
                        }
                        _ => references(value, found),
                    }
                }
            }
            serde_json::Value::Array(items) => items.iter().for_each(|item| references(item, found)),
            _ => {}
        }
    }
}
