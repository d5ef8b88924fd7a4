//! E2B's SDKs for Python and JavaScript.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use atoll_proof::{Server, json, on_every_tier};
use tokio::process::Command;

on_every_tier!(with atoll_proof::Options::default().own_templates();
    python_goes_through_every_call,
    javascript_goes_through_every_call,
    a_field_that_is_not_supported_is_named,
    a_sandbox_of_this_wire_opens_to_its_token_only,
);

pub(crate) fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/sdk").join(name)
}

/// What the environment names, or nothing, loudly.
pub(crate) fn installed(variable: &str) -> Vec<PathBuf> {
    let named = std::env::var_os(variable).unwrap_or_default();
    let found: Vec<PathBuf> = std::env::split_paths(&named)
        .filter(|path| !path.as_os_str().is_empty())
        .collect();
    if found.is_empty() {
        eprintln!("SKIPPED: {variable} names no SDK; ./test installs them");
    }
    found
}

pub(crate) async fn run(server: &Server, mut command: Command) {
    let client = server.client();
    command
        .env("E2B_API_URL", client.url())
        .env("E2B_SANDBOX_URL", client.url())
        .env("E2B_API_KEY", e2b_key(client.key().unwrap()))
        .env("ATOLL_TIER", server.tier.name())
        .stdin(Stdio::null())
        .kill_on_drop(true);
    let output = command.output().await.expect("the SDK's interpreter runs");
    let (out, err) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(output.status.success(), "{out}\n{err}");
    assert!(out.trim_end().ends_with("all ok"), "{out}\n{err}");
}

/// The form that some clients insist on.
fn e2b_key(key: &str) -> String {
    let digits: String = key.bytes().map(|byte| format!("{byte:02x}")).collect();
    format!("e2b_{digits}")
}

async fn python_goes_through_every_call(server: &Server) {
    for python in installed("ATOLL_TEST_E2B_PYTHONS") {
        let mut command = Command::new(python);
        command.arg(script("through_e2b.py"));
        run(server, command).await;
    }
}

async fn javascript_goes_through_every_call(server: &Server) {
    for directory in installed("ATOLL_TEST_E2B_NODES") {
        let mut command = Command::new("node");
        command.arg(script("through_e2b.mjs")).arg(directory);
        run(server, command).await;
    }
}

async fn a_field_that_is_not_supported_is_named(server: &Server) {
    let client = server.client();
    for (body, named) in [
        (json!({"templateID": "base", "colour": "red"}), "colour"),
        (
            json!({"templateID": "base", "iam": {"tokens": {"a": {}}}}),
            "iam.tokens",
        ),
        (
            json!({"templateID": "base", "timeout": 0}),
            "Timeout must be greater than 0",
        ),
    ] {
        let answer = client.post("/v2/sandboxes", &body).await.expect(400).json();
        assert_eq!(answer["code"], 400);
        assert!(answer["message"].as_str().unwrap().contains(named), "{answer}");
    }
    let answer = client.get("/sandboxes/nonsense").await.expect(404).json();
    assert_eq!(answer["code"], 404);
}

async fn a_sandbox_of_this_wire_opens_to_its_token_only(server: &Server) {
    let client = server.client();
    let body = json!({"templateID": "base", "timeout": 60});
    let made = client.post("/v2/sandboxes", &body).await.expect(201).json();
    let id = made["sandboxID"].as_str().unwrap();
    let token = made["envdAccessToken"].as_str().unwrap();
    let list = |token: Option<&str>, port: &str| {
        let mut request = client
            .with_key(None)
            .request("POST".parse().unwrap(), "/process.Process/List")
            .header("e2b-sandbox-id", id)
            .header("e2b-sandbox-port", port)
            .header("content-type", "application/json")
            .body("{}");
        if let Some(token) = token {
            request = request.header("x-access-token", token);
        }
        client.send(request)
    };
    list(None, "49983").await.expect(401);
    list(Some("wrong"), "49983").await.expect(401);
    list(Some(token), "49983").await.expect(200);
    // Nobody listens there.
    let closed = list(Some(token), "4444").await.expect(502).json();
    assert!(
        closed["message"].as_str().unwrap().contains("port is not open"),
        "{closed}"
    );
    client.delete(&format!("/sandboxes/{id}")).await.expect(204);
    let gone = list(Some(token), "49983").await.expect(502).json();
    assert!(
        gone["message"].as_str().unwrap().contains("was not found"),
        "{gone}"
    );
}
