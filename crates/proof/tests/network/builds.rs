//! What a build may reach: its `RUN` steps, under a policy of its own.

use atoll_proof::stream::{Event, Events};
use atoll_proof::{Sandbox, Server, Value, World, json, printed};
use reqwest::header::CONTENT_TYPE;
use reqwest::{Method, RequestBuilder};

use crate::{allow, assert_refused};

in_a_world!(
    steps_reach_what_the_build_allows,
    what_is_read_on_the_way_leaves_no_trace,
    at_the_command_line,
);

const INDEX: &str = "index.example.org";
const TRY: &str = "PYTHONPATH=/opt/py python3 -c 'import tinything; print(tinything.ANSWER)'";

pub(crate) type Files = [(&'static str, Vec<u8>)];

/// A build of these files.
pub(crate) fn request(server: &Server, query: &[(&str, &str)], files: &Files) -> RequestBuilder {
    let mut context = tar::Builder::new(Vec::new());
    for (path, content) in files {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        context
            .append_data(&mut header, path, content.as_slice())
            .unwrap();
    }
    server
        .client()
        .request(Method::POST, "/v1/templates/build-context")
        .query(query)
        .header(CONTENT_TYPE, "application/octet-stream")
        .body(context.into_inner().unwrap())
}

/// Builds and returns all that was said about it.
pub(crate) async fn build(server: &Server, query: &[(&str, &str)], files: &Files) -> Vec<Event> {
    let request = request(server, query, files);
    Events::of(server.client().open(request).await).rest().await
}

/// The template that a build came to.
#[track_caller]
pub(crate) fn built(events: &[Event]) -> Value {
    let last = events.last().expect("a build says something");
    assert_eq!(last.name, "done", "{events:?}");
    last.data.clone()
}

/// Installs a package from the world's index.
fn installing(world: &World, options: &str) -> Vec<(&'static str, Vec<u8>)> {
    let pip = "pip install -q --disable-pip-version-check --retries 0 --no-cache-dir --target /opt/py";
    let text = format!(
        "FROM base\nCOPY world.pem /home/user/\n\
         RUN {pip} --index-url https://{INDEX}/simple {options} tinything\n"
    );
    vec![
        ("Dockerfile", text.into_bytes()),
        ("world.pem", std::fs::read(world.authority()).unwrap()),
    ]
}

async fn facts(server: &Server, kind: &str) -> Vec<Value> {
    let page = server.client().get("/v1/facts?limit=1000").await.ok();
    let items = page["items"].as_array().expect("a list").iter();
    items.filter(|fact| fact["kind"] == kind).cloned().collect()
}

async fn steps_reach_what_the_build_allows(server: &mut Server, world: &World) {
    let files = installing(world, "--cert /home/user/world.pem");
    // Unless it is said, they reach nothing, and the end says what was missing.
    let events = build(server, &[("name", "app")], &files).await;
    let error = events.last().expect("a build says something");
    assert_eq!(error.name, "error", "{events:?}");
    let hint = error.data["hint"].as_str().unwrap_or_default();
    assert!(
        hint.contains(INDEX) && hint.contains("build_network"),
        "{}",
        error.data
    );
    let policy = allow(&["other.example.org"]).to_string();
    let events = build(server, &[("name", "app"), ("build_network", &policy)], &files).await;
    assert_eq!(events.last().unwrap().name, "error", "{events:?}");
    assert_eq!(world.seen(), Vec::<Value>::new());

    let policy = allow(&[INDEX]).to_string();
    let query = [("name", "app"), ("build_network", policy.as_str())];
    let template = built(&build(server, &query, &files).await);
    assert_eq!(template["network"], json!(null), "it is about the build only");
    assert!(world.saw("http").iter().all(|seen| seen["host"] == INDEX));
    let sandbox = server.sandbox_with(&json!({"template": "app"})).await;
    assert_eq!(sandbox.sh(TRY).await.ok().trim(), "42");
    assert_refused(&sandbox, &format!("https://{INDEX}/simple/tinything/")).await;

    // The same again is known; under another policy it is another step, and fails as it did.
    let before = world.seen().len();
    built(&build(server, &query, &files).await);
    let events = build(server, &[("name", "app")], &files).await;
    assert_eq!(events.last().unwrap().name, "error", "{events:?}");
    assert_eq!(world.seen().len(), before);

    // What they tried is in the ledger of the project, under no sandbox.
    for kind in ["network.allowed", "network.denied"] {
        let of_build = atoll_proof::wait::until(kind, std::time::Duration::from_secs(10), || async {
            let found = facts(server, kind).await;
            found
                .into_iter()
                .find(|fact| fact["data"]["host"] == INDEX && fact["sandbox"].is_null())
        })
        .await;
        assert_eq!(of_build["data"]["host"], INDEX);
    }
    sandbox.kill().await;
    server.assert_nothing_held().await;
}

/// The authority that a step had to trust, and where it asked for names, are no part of the template.
async fn what_is_read_on_the_way_leaves_no_trace(server: &mut Server, world: &World) {
    let look = "sha256sum /etc/ssl/certs/ca-certificates.crt; ls -l /etc/resolv.conf; cat /etc/ssl/atoll-authority.pem";
    let plain = server.sandbox().await;
    let before = plain.sh(look).await.stdout;
    let policy = json!({"rules": [{"action": "allow", "to": INDEX, "methods": ["GET"]}]}).to_string();
    let query = [("name", "app"), ("build_network", policy.as_str())];
    built(&build(server, &query, &installing(world, "")).await);
    let sandbox = server.sandbox_with(&json!({"template": "app"})).await;
    assert_eq!(sandbox.sh(TRY).await.ok().trim(), "42");
    let without_times = |text: &str| {
        let kept = text.lines().filter(|line| !line.contains("resolv.conf"));
        kept.map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(
        without_times(&sandbox.sh(look).await.stdout),
        without_times(&before)
    );
}

async fn at_the_command_line(server: &mut Server, world: &World) {
    let dir = tempfile::tempdir().unwrap();
    for (path, content) in installing(world, "--cert /home/user/world.pem") {
        std::fs::write(dir.path().join(path), content).unwrap();
    }
    let context = dir.path().to_str().unwrap();
    let base = ["template", "build", "app", "--dockerfile", context, "--json"];
    let refused = server.atoll(&base);
    let text = String::from_utf8(refused.stderr).unwrap();
    assert!(
        !refused.status.success() && text.contains(INDEX) && text.contains("--build-allow"),
        "{text}"
    );
    let options = [
        "--build-allow",
        INDEX,
        "--net",
        "none",
        "--allow",
        "api.example.org",
    ];
    let limits = ["--max-connections", "4", "--max-traffic", "1M"];
    let all: Vec<&str> = base.into_iter().chain(options).chain(limits).collect();
    let template: Value = serde_json::from_str(&printed(&server.atoll(&all))).unwrap();
    let network = json!({
        "preset": "none",
        "rules": [{"action": "allow", "to": "api.example.org"}],
        "limits": {"connections": 4, "total_bytes": 1_048_576},
    });
    assert_eq!(template["network"], network);
    let shown = printed(&server.atoll(&["template", "inspect", "app"]));
    let shown: Value = serde_json::from_str(&shown).unwrap();
    assert_eq!(shown["network"], network);
    let created = printed(&server.atoll(&[
        "create",
        "--isolation",
        server.tier.name(),
        "--template",
        "app",
        "--json",
    ]));
    let sandbox = Sandbox::of(server.client(), &serde_json::from_str(&created).unwrap());
    assert_eq!(crate::get(&sandbox, "https://api.example.org/").await.0, 200);
}
