//! The document that the server serves is OpenAPI 3.1, complete, and true to what is served.

#![allow(clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeSet;

use atoll_proof::{Server, Value, json, on_every_tier};
use reqwest::Method;

on_every_tier!(
    the_document_is_sound,
    what_is_documented_is_served,
    what_is_served_is_as_documented
);

const METHODS: [&str; 5] = ["get", "put", "post", "delete", "patch"];

async fn document(server: &Server) -> Value {
    server.client().with_key(None).get("/openapi.json").await.ok()
}

/// Every operation as `(method, path, operation)`.
fn operations(document: &Value) -> Vec<(&str, &str, &Value)> {
    let paths = document["paths"].as_object().expect("paths");
    let mut found = Vec::new();
    for (path, item) in paths {
        for (method, operation) in item.as_object().expect("a path item") {
            if METHODS.contains(&method.as_str()) {
                found.push((method.as_str(), path.as_str(), operation));
            }
        }
    }
    found
}

async fn the_document_is_sound(server: &Server) {
    let document = document(server).await;
    assert!(
        document["openapi"].as_str().unwrap().starts_with("3.1."),
        "{}",
        document["openapi"]
    );
    assert!(!document["info"]["title"].as_str().unwrap().is_empty());
    assert!(!document["info"]["version"].as_str().unwrap().is_empty());
    let operations = operations(&document);
    assert!(operations.len() >= 35, "{}", operations.len());
    let mut ids = BTreeSet::new();
    for (method, path, operation) in &operations {
        let what = format!("{method} {path}");
        let id = operation["operationId"]
            .as_str()
            .unwrap_or_else(|| panic!("{what} has no operationId"));
        assert!(ids.insert(id), "{id} is used twice");
        assert!(
            !operation["summary"].as_str().unwrap_or_default().is_empty(),
            "{what} has no summary"
        );
        let responses = operation["responses"]
            .as_object()
            .unwrap_or_else(|| panic!("{what} has no responses"));
        assert!(
            responses
                .keys()
                .any(|status| status.starts_with('2') || status == "101"),
            "{what} never succeeds"
        );
        for (status, response) in responses {
            assert!(
                response["description"].is_string(),
                "{what} {status} is not described"
            );
        }
        let named: BTreeSet<&str> = path
            .split('/')
            .filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'))
            .collect();
        let parameters = operation["parameters"].as_array().cloned().unwrap_or_default();
        let documented: BTreeSet<&str> = parameters
            .iter()
            .filter(|parameter| parameter["in"] == "path")
            .map(|parameter| parameter["name"].as_str().unwrap())
            .collect();
        assert_eq!(named, documented, "{what}: path parameters");
        let mut seen = BTreeSet::new();
        for parameter in &parameters {
            assert!(
                parameter["schema"].is_object(),
                "{what}: {parameter} has no schema"
            );
            assert!(
                seen.insert((parameter["in"].to_string(), parameter["name"].to_string())),
                "{what}: {parameter} twice"
            );
            if parameter["in"] == "path" {
                assert_eq!(parameter["required"], true, "{what}: {parameter}");
            }
        }
        if path.starts_with("/v1/") {
            assert!(
                operation["security"]
                    .as_array()
                    .is_some_and(|needs| !needs.is_empty()),
                "{what} needs no key?"
            );
            assert!(
                responses.contains_key("401") && responses.contains_key("400"),
                "{what}"
            );
        }
    }
    assert_references_resolve(&document, &document);
    for (name, schema) in document["components"]["schemas"].as_object().unwrap() {
        let known = ["type", "oneOf", "anyOf", "allOf", "$ref", "enum", "const"];
        assert!(
            known.iter().any(|key| schema.get(key).is_some()),
            "schema {name} says nothing: {schema}"
        );
        if let Some(required) = schema["required"].as_array() {
            for field in required {
                let known = schema["properties"].get(field.as_str().unwrap()).is_some();
                assert!(known, "schema {name} requires {field}, which it does not have");
            }
        }
    }
}

fn assert_references_resolve(document: &Value, part: &Value) {
    match part {
        Value::Object(fields) => {
            if let Some(reference) = fields.get("$ref").and_then(Value::as_str) {
                let pointer = reference
                    .strip_prefix('#')
                    .unwrap_or_else(|| panic!("{reference} leads outside"));
                assert!(document.pointer(pointer).is_some(), "{reference} leads nowhere");
            }
            for value in fields.values() {
                assert_references_resolve(document, value);
            }
        }
        Value::Array(values) => values
            .iter()
            .for_each(|value| assert_references_resolve(document, value)),
        _ => {}
    }
}

/// Every documented route is routed: without a key it says 401, not 404.
async fn what_is_documented_is_served(server: &Server) {
    let document = document(server).await;
    let stranger = server.client().with_key(None);
    for (method, path, operation) in operations(&document) {
        let concrete = path
            .replace("{port}", "80")
            .replace("{command}", "cmd_aaaaaaaaaaaaaaaaaaaa")
            .replace("{artifact}", "a")
            .replace("{template}", "a")
            .replace("{snapshot}", "a")
            .replace("{volume}", "a")
            .replace("{secret}", "a")
            .replace("{provider}", "a")
            .replace("{alias}", "a")
            .replace("{model}", "a/b")
            .replace("{budget}", "a")
            .replace("{call}", "a")
            .replace(
                "{id}",
                if path.ends_with("/keys/{id}") {
                    "key_aaaaaaaaaaaaaaaaaaaa"
                } else {
                    "sbx_aaaaaaaaaaaaaaaaaaaa"
                },
            );
        let method: Method = method.to_uppercase().parse().unwrap();
        let answer = stranger.send(stranger.request(method.clone(), &concrete)).await;
        match path.starts_with("/v1/") || path.starts_with("/metrics") {
            true => drop(answer.refused(401, "missing_key")),
            false => assert_eq!(answer.status, 200, "{method} {concrete}: {answer:?}"),
        }
        let documented = operation["responses"].as_object().unwrap();
        assert!(
            documented.contains_key(&answer.status.to_string()),
            "{method} {path}: {} is not documented",
            answer.status
        );
    }
}

/// What the main answers look like, checked against their schemas: no field more, no field less.
async fn what_is_served_is_as_documented(server: &Server) {
    let document = document(server).await;
    let sandbox = server.sandbox().await;
    sandbox.background("sleep 1000").await;
    sandbox.write("/tmp/file", b"x").await;
    let secret = json!({"value": "s3cr3t", "hosts": ["api.example.com"], "ports": [443, "8000-8100"],
        "inject": {"header": {"name": "x-api-key"}}});
    let client = server.client();
    let set = client.request(Method::PUT, "/v1/secrets/token").json(&secret);
    let secret = client.send(set).await.ok();
    check(&document, "put", "/v1/secrets/{secret}", "200", &secret);
    for (path, concrete, body) in [
        (
            "/v1/gateway/providers/{provider}",
            "/v1/gateway/providers/openai",
            json!({"kind": "openai", "key": "sk-secret"}),
        ),
        (
            "/v1/gateway/models/{alias}",
            "/v1/gateway/models/smart",
            json!({"targets": [{"provider": "openai", "model": "gpt-5"}], "fallbacks": ["openai/gpt-4o"]}),
        ),
        (
            "/v1/gateway/prices/{model}",
            "/v1/gateway/prices/openai/gpt-5",
            json!({"input": "1", "output": "2.5"}),
        ),
        (
            "/v1/gateway/budgets/{budget}",
            "/v1/gateway/budgets/daily",
            json!({"limit": "20", "window": "day", "scope": "key", "alert_percent": 80}),
        ),
        (
            "/v1/gateway/guards",
            "/v1/gateway/guards",
            json!({"blocked": ["gpt-3*"], "screen": [{"name": "email", "action": "redact"}]}),
        ),
    ] {
        let set = client.request(Method::PUT, concrete).json(&body);
        check(&document, "put", path, "200", &client.send(set).await.ok());
    }
    let key = client.post("/v1/gateway/keys", &json!({"name": "ci"})).await;
    check(
        &document,
        "post",
        "/v1/gateway/keys",
        "201",
        &key.expect(201).json(),
    );
    let exec = sandbox.exec(&json!({"cmd": "true"})).await.ok();
    check(&document, "post", "/v1/sandboxes/{id}/exec", "200", &exec);
    for (path, concrete) in [
        ("/v1/info", "/v1/info".to_owned()),
        ("/v1/sandboxes", "/v1/sandboxes".into()),
        ("/v1/sandboxes/{id}", sandbox.path("")),
        ("/v1/sandboxes/{id}/metrics", sandbox.path("/metrics")),
        ("/v1/sandboxes/{id}/facts", sandbox.path("/facts")),
        ("/v1/sandboxes/{id}/usage", sandbox.path("/usage")),
        ("/v1/sandboxes/{id}/commands", sandbox.path("/commands")),
        ("/v1/sandboxes/{id}/files", sandbox.path("/files?path=/tmp")),
        (
            "/v1/sandboxes/{id}/files/stat",
            sandbox.path("/files/stat?path=/tmp/file"),
        ),
        ("/v1/sandboxes/{id}/ports", sandbox.path("/ports")),
        ("/v1/sandboxes/{id}/ports/{port}", sandbox.path("/ports/80")),
        ("/v1/sandboxes/{id}/network", sandbox.path("/network")),
        ("/v1/sandboxes/{id}/network/log", sandbox.path("/network/log")),
        (
            "/v1/sandboxes/{id}/network/explain",
            sandbox.path("/network/explain?url=https://pypi.org/simple/"),
        ),
        ("/v1/templates", "/v1/templates".into()),
        ("/v1/templates/{template}", "/v1/templates/base".into()),
        ("/v1/artifacts", "/v1/artifacts".into()),
        ("/v1/secrets", "/v1/secrets".into()),
        ("/v1/secrets/{secret}", "/v1/secrets/token".into()),
        ("/v1/keys", "/v1/keys".into()),
        ("/v1/facts", "/v1/facts".into()),
        ("/v1/gateway/providers", "/v1/gateway/providers".into()),
        ("/v1/gateway/models", "/v1/gateway/models".into()),
        ("/v1/gateway/prices", "/v1/gateway/prices".into()),
        ("/v1/gateway/budgets", "/v1/gateway/budgets".into()),
        ("/v1/gateway/keys", "/v1/gateway/keys".into()),
        ("/v1/gateway/guards", "/v1/gateway/guards".into()),
        ("/v1/gateway/calls", "/v1/gateway/calls".into()),
        ("/v1/gateway/spend", "/v1/gateway/spend?by=sandbox".into()),
    ] {
        check(
            &document,
            "get",
            path,
            "200",
            &server.client().get(&concrete).await.ok(),
        );
    }
    let refusal = server
        .client()
        .get("/v1/sandboxes/sbx_aaaaaaaaaaaaaaaaaaaa")
        .await;
    check(&document, "get", "/v1/sandboxes/{id}", "404", &refusal.json());
}

fn check(document: &Value, method: &str, path: &str, status: &str, value: &Value) {
    let response = &document["paths"][path][method]["responses"][status];
    let schema = &response["content"]["application/json"]["schema"];
    assert!(
        schema.is_object(),
        "{method} {path} {status} has no JSON schema: {response}"
    );
    assert_matches(document, schema, value, &format!("{method} {path}"));
}

/// As much of JSON Schema as the document uses.
fn assert_matches(document: &Value, schema: &Value, value: &Value, at: &str) {
    if let Some(reference) = schema["$ref"].as_str() {
        let target = document.pointer(reference.strip_prefix('#').unwrap()).unwrap();
        return assert_matches(document, target, value, at);
    }
    for keyword in ["oneOf", "anyOf"] {
        if let Some(choices) = schema[keyword].as_array() {
            let fits = |choice: &Value| {
                std::panic::catch_unwind(|| assert_matches(document, choice, value, at)).is_ok()
            };
            assert!(choices.iter().any(fits), "{at}: {value} fits none of {choices:?}");
            return;
        }
    }
    if let Some(parts) = schema["allOf"].as_array() {
        parts
            .iter()
            .for_each(|part| assert_matches(document, part, value, at));
    }
    if let Some(allowed) = schema["enum"].as_array() {
        assert!(allowed.contains(value), "{at}: {value} is none of {allowed:?}");
    }
    let types: Vec<&str> = match &schema["type"] {
        Value::String(one) => vec![one],
        Value::Array(many) => many.iter().filter_map(Value::as_str).collect(),
        _ => return,
    };
    let actual = match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(number) if number.is_f64() => "number",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    };
    assert!(types.contains(&actual), "{at}: {value} is not of type {types:?}");
    match value {
        Value::Object(fields) => {
            for required in schema["required"].as_array().into_iter().flatten() {
                assert!(
                    fields.contains_key(required.as_str().unwrap()),
                    "{at}: {required} is missing in {value}"
                );
            }
            let Some(properties) = schema["properties"].as_object() else {
                return;
            };
            for (name, field) in fields {
                let property = properties
                    .get(name)
                    .unwrap_or_else(|| panic!("{at}: `{name}` is not documented"));
                assert_matches(document, property, field, &format!("{at}.{name}"));
            }
        }
        Value::Array(items) => {
            for item in items {
                assert_matches(document, &schema["items"], item, &format!("{at}[]"));
            }
        }
        _ => {}
    }
}
