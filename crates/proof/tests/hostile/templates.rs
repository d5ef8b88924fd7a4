//! Reaching for templates of another project: by every name that they have, at every door that takes one.

use std::time::Duration;

use atoll_proof::stream::{Event, Events};
use atoll_proof::{Answer, Client, Sandbox, Server, Value, json, on_every_tier, wait};
use reqwest::Method;

on_every_tier!(
    with atoll_proof::Options::default().own_templates();
    another_projects_templates,
    what_others_have_built_and_shared,
);

mod counted {
    use super::a_build_counts_as_a_sandbox_of_its_project;

    atoll_proof::on_every_tier!(
        with atoll_proof::Options::default().own_templates().config("max_sandboxes = 1");
        a_build_counts_as_a_sandbox_of_its_project,
    );
}

mod stored {
    use super::a_build_stores_no_more_than_its_project_may;

    atoll_proof::on_every_tier!(
        with atoll_proof::Options::default().own_templates().config("max_storage = \"48M\"");
        a_build_stores_no_more_than_its_project_may,
    );
}

/// What nobody has, by the same two kinds of names.
const NO_NAME: &str = "nothing-here";
const NO_ID: &str = "tpl_aaaaaaaaaaaaaaaaaaaa";

const DOCKERFILE: &str = "FROM base\nCOPY secret /opt/secret\nRUN cat /opt/secret > /opt/made\n";

/// A member of a new project.
async fn member(server: &Server, project: &str) -> Client {
    let operator = server.client();
    operator
        .post("/v1/projects", &json!({"name": project}))
        .await
        .expect(201);
    let body = json!({"name": "member", "project": project});
    let made = operator.post("/v1/keys", &body).await.expect(201).json();
    operator.with_key(made["secret"].as_str())
}

fn context(dockerfile: &str, secret: &str) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (path, content) in [("Dockerfile", dockerfile), ("secret", secret)] {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        builder
            .append_data(&mut header, path, content.as_bytes())
            .unwrap();
    }
    builder.into_inner().unwrap()
}

/// A request for a build of a template of this name.
fn build(client: &Client, query: &[(&str, &str)], context: Vec<u8>) -> reqwest::RequestBuilder {
    client
        .request(Method::POST, "/v1/templates/build-context")
        .query(query)
        .header("content-type", "application/octet-stream")
        .body(context)
}

/// All that is said about a build.
async fn said(client: &Client, name: &str, context: Vec<u8>) -> Vec<Event> {
    let request = build(client, &[("name", name)], context);
    Events::of(client.open(request).await).rest().await
}

#[track_caller]
fn built(events: &[Event]) -> Value {
    let last = events.last().expect("a build says something");
    assert_eq!(last.name, "done", "{events:?}");
    last.data.clone()
}

fn was_cached(events: &[Event]) -> bool {
    let mut lines = events.iter().filter_map(|event| event.data["text"].as_str());
    lines.any(|line| line.ends_with(": cached"))
}

fn text(value: &Value, name: &str) -> String {
    let found = value[name].as_str();
    found
        .unwrap_or_else(|| panic!("no `{name}` in {value}"))
        .to_owned()
}

/// The status and what is said, without what was asked for in it.
fn gist(answer: &Answer, asked: &str) -> (u16, String) {
    let said = answer.text().replace(asked, "…");
    let said = match serde_json::from_str::<Value>(&said) {
        Ok(mut json) => {
            // It is another one each time.
            if let Some(error) = json["error"].as_object_mut() {
                error.remove("request_id");
            }
            json.to_string()
        }
        Err(_) => said,
    };
    (answer.status, said)
}

/// Knocks at every door that takes a template, with this one.
async fn knock(client: &Client, server: &Server, which: &str) -> Vec<(String, Answer)> {
    let template = server.request(&json!({ "template": which }));
    let mut run = template.clone();
    run["cmd"] = json!("true");
    let from = json!({"templateID": which, "timeout": 60});
    let doors = [
        (Method::GET, format!("/v1/templates/{which}"), json!(null)),
        (Method::DELETE, format!("/v1/templates/{which}"), json!(null)),
        (Method::POST, format!("/v1/templates/{which}/running"), json!({})),
        (Method::POST, format!("/v1/templates/{which}/share"), json!({})),
        (Method::POST, format!("/v1/templates/{which}/unshare"), json!({})),
        (Method::POST, "/v1/sandboxes".to_owned(), template),
        (Method::POST, "/v1/run".to_owned(), run),
        (Method::GET, format!("/templates/{which}"), json!(null)),
        (Method::GET, format!("/templates/aliases/{which}"), json!(null)),
        (Method::GET, format!("/templates/{which}/tags"), json!(null)),
        (Method::DELETE, format!("/templates/{which}"), json!(null)),
        (Method::PATCH, format!("/v2/templates/{which}"), json!({})),
        (
            Method::PATCH,
            format!("/v2/templates/{which}"),
            json!({"public": true}),
        ),
        (
            Method::PATCH,
            format!("/v2/templates/{which}"),
            json!({"public": false}),
        ),
        (
            Method::POST,
            "/templates/tags".to_owned(),
            json!({"target": which, "tags": ["mine"]}),
        ),
        (
            Method::DELETE,
            "/templates/tags".to_owned(),
            json!({"name": which, "tags": ["default"]}),
        ),
        (Method::POST, "/sandboxes".to_owned(), from.clone()),
        (Method::POST, "/v2/sandboxes".to_owned(), from),
    ];
    let mut answers = Vec::new();
    for (method, path, body) in doors {
        let mut request = client.request(method.clone(), &path);
        if !body.is_null() {
            request = request.json(&body);
        }
        let answer = client.send(request).await;
        answers.push((format!("{method} {path} {body}").replace(which, "…"), answer));
    }
    answers
}

/// Every answer is that to what does not exist, and nothing that happened tells of it.
async fn assert_not_there(client: &Client, server: &Server, name: &str, id: &str) {
    assert_opens_nothing(client, server, name, id).await;
    assert_unseen(client, "/v1/facts?limit=1000", name, id).await;
}

/// The same for those who had to do with it, and whose ledger says so.
async fn assert_opens_nothing(client: &Client, server: &Server, name: &str, id: &str) {
    for (which, missing) in [(name, NO_NAME), (id, NO_ID)] {
        let theirs = knock(client, server, which).await;
        let nothing = knock(client, server, missing).await;
        for ((door, answer), (_, expected)) in theirs.iter().zip(&nothing) {
            assert!(answer.status >= 400, "{which} at {door}: {answer:?}");
            assert_eq!(gist(answer, which), gist(expected, missing), "{which} at {door}");
        }
    }
    for list in ["/v1/templates", "/templates", "/v2/templates"] {
        assert_unseen(client, list, name, id).await;
    }
}

async fn assert_unseen(client: &Client, list: &str, name: &str, id: &str) {
    let seen = client.get(list).await.expect(200).text();
    assert!(!seen.contains(id) && !seen.contains(name), "{list}: {seen}");
}

async fn another_projects_templates(server: &mut Server) {
    let (a, b) = (member(server, "a").await, member(server, "b").await);
    let template = built(&said(&a, "private", context(DOCKERFILE, "hush")).await);
    let (id, digest) = (text(&template, "id"), text(&template, "digest"));
    assert_eq!(template["shared"], json!(false));
    assert!(template["project"].is_string());
    a.post("/templates/tags", &json!({"target": "private", "tags": ["v1"]}))
        .await
        .expect(201);
    let asked = a
        .post("/v3/templates", &json!({"name": "private"}))
        .await
        .expect(202)
        .json();
    let build_id = text(&asked, "buildID");

    assert_not_there(&b, server, "private", &id).await;
    // Operators have projects too: what is another's is not theirs.
    assert_not_there(server.client(), server, "private", &id).await;
    b.get("/templates/aliases/private:v1").await.expect(404);
    let by_digest = b.get(&format!("/v1/templates/{digest}")).await;
    assert!((400..500).contains(&by_digest.status), "{by_digest:?}");

    // Builds: of somebody else's, and on top of something else of theirs.
    let status = format!("/templates/private/builds/{build_id}/status");
    b.get(&status).await.expect(404);
    a.get(&status).await.expect(200);
    let begin = format!("/v2/templates/private/builds/{build_id}");
    b.post(&begin, &json!({"fromTemplate": "base"})).await.expect(404);
    let on_top = said(&b, "mine", context(&format!("FROM {id}\n"), "")).await;
    assert_eq!(on_top.last().unwrap().name, "error", "{on_top:?}");
    let asked = b
        .post("/v3/templates", &json!({"name": "mine"}))
        .await
        .expect(202)
        .json();
    let of = |rest: &str| format!("templates/mine/builds/{}{rest}", text(&asked, "buildID"));
    b.post(&format!("/v2/{}", of("")), &json!({"fromTemplate": "private"}))
        .await
        .expect(202);
    let failed = wait::until("the build to fail", Duration::from_secs(30), || async {
        let status = b.get(&format!("/{}", of("/status"))).await.ok();
        (status["status"] != "building").then_some(status)
    })
    .await;
    assert_eq!(failed["status"], "error", "{failed}");
    assert!(failed.to_string().contains("not found"), "{failed}");
    b.get("/v1/templates/mine")
        .await
        .refused(404, "template_not_found");

    // A snapshot that builds on it, brought by whoever got hold of the file.
    let made = a
        .post("/v1/sandboxes", &server.request(&json!({"template": "private"})))
        .await;
    let sandbox = Sandbox::of(&a, &made.expect(201).json());
    assert_eq!(sandbox.sh("cat /opt/made").await.ok(), "hush");
    sandbox
        .ask("/snapshots", json!({"name": "taken", "kind": "filesystem"}))
        .await
        .expect(201);
    let file = a.get("/v1/snapshots/taken/export").await.expect(200).body;
    let import = async |client: &Client, file: Vec<u8>| {
        let request = client.request(Method::POST, "/v1/snapshots/import?name=brought");
        let request = request.header("content-type", "application/octet-stream");
        client.send(request.body(file)).await
    };
    import(&b, file.clone())
        .await
        .refused(409, "snapshot_needs_template");
    import(&a, file).await.expect(201);
    // In use by its own project.
    a.delete(&format!("/v1/templates/{id}"))
        .await
        .refused(409, "template_in_use");

    // What is everybody's is nobody's to change but an operator's.
    let base = text(&b.get("/v1/templates/base").await.ok(), "id");
    for which in ["base", base.as_str()] {
        for (method, path) in [
            (Method::DELETE, format!("/v1/templates/{which}")),
            (Method::POST, format!("/v1/templates/{which}/share")),
            (Method::POST, format!("/v1/templates/{which}/unshare")),
            (Method::POST, format!("/v1/templates/{which}/running")),
        ] {
            b.send(b.request(method, &path))
                .await
                .refused(403, "operators_only");
        }
        b.delete(&format!("/templates/{which}")).await.expect(403);
        let private = b.request(Method::PATCH, &format!("/v2/templates/{which}"));
        b.send(private.json(&json!({"public": false}))).await.expect(403);
    }
    let shared = build(
        &b,
        &[("name", "base"), ("shared", "true")],
        context("FROM base\n", ""),
    );
    b.send(shared).await.refused(403, "operators_only");
    b.post("/v1/templates/build", &json!({"name": "base", "debian": {}}))
        .await
        .refused(403, "operators_only");

    // A name of one's own hides everybody's, from oneself alone.
    let own = built(&said(&b, "base", context("FROM base\nENV MINE=yes\n", "")).await);
    built(
        &said(
            &b,
            "private",
            context("FROM base\nENV MINE=yes\nENV MORE=1\n", ""),
        )
        .await,
    );
    assert_eq!(
        text(&b.get("/v1/templates/base").await.ok(), "id"),
        text(&own, "id")
    );
    for other in [&a, server.client()] {
        assert_eq!(text(&other.get("/v1/templates/base").await.ok(), "id"), base);
    }
    assert_eq!(text(&a.get("/v1/templates/private").await.ok(), "id"), id);
    b.delete("/v1/templates/base").await.expect(204);
    assert_eq!(text(&b.get("/v1/templates/base").await.ok(), "id"), base);
    b.delete("/v1/templates/private").await.expect(204);

    // Nor by what happened, nor after a server was killed.
    let kinds = |facts: Value| facts.to_string().matches("\"template.").count();
    assert_eq!(kinds(server.client().get("/v1/facts?limit=1000").await.ok()), 0);
    assert!(kinds(a.get("/v1/facts?limit=1000").await.ok()) > 0);
    server.kill_9();
    server.start_again().await;
    let (a, b) = [&a, &b].map(|old| server.client().with_key(old.key())).into();
    assert_not_there(&b, server, "private", &id).await;
    assert_eq!(text(&a.get("/v1/templates/private").await.ok(), "id"), id);
    Sandbox { client: a, ..sandbox }.kill().await;
}

/// Neither time nor cache nor sizes tell that others have built the same; and what operators share is there until it is not.
async fn what_others_have_built_and_shared(server: &Server) {
    let (a, b) = (member(server, "a").await, member(server, "b").await);
    let first = said(&a, "private", context(DOCKERFILE, "guess")).await;
    let theirs = built(&first);
    assert!(!was_cached(&first), "{first:?}");
    let facts = async |client: &Client| client.get("/v1/facts?limit=1000").await.ok()["items"].clone();
    let again = said(&a, "private", context(DOCKERFILE, "guess")).await;
    assert!(was_cached(&again), "one's own steps are cached: {again:?}");

    let guessed = said(&b, "guessed", context(DOCKERFILE, "guess")).await;
    let own = built(&guessed);
    assert!(!was_cached(&guessed), "{guessed:?}");
    assert_eq!(own["names"], json!(["guessed"]));
    assert!(
        text(&own, "created_at") > text(&theirs, "created_at"),
        "{own} {theirs}"
    );
    let facts = facts(&b).await;
    let kinds = facts.as_array().unwrap().iter().map(|fact| text(fact, "kind"));
    assert_eq!(
        kinds.filter(|kind| kind.starts_with("template.")).count(),
        1,
        "{facts}"
    );
    // What one of them has goes, and the other one has what it had.
    b.delete("/v1/templates/guessed").await.expect(204);
    let freed = b.post("/v1/templates/prune", &json!({})).await.ok();
    assert!(freed["freed_bytes"].as_u64().unwrap() > 0, "{freed}");
    let id = text(&theirs, "id");
    b.get(&format!("/v1/templates/{id}"))
        .await
        .refused(404, "template_not_found");
    let again = said(&a, "private", context(DOCKERFILE, "guess")).await;
    assert!(
        was_cached(&again) && built(&again)["id"] == theirs["id"],
        "{again:?}"
    );

    let operator = server.client();
    let share = async |which: &str, project: &str| {
        let path = format!("/v1/templates/{which}/share");
        operator.post(&path, &json!({ "project": project })).await
    };
    share("private", "b").await.refused(404, "template_not_found");
    let shared = share("private", "a").await.ok();
    assert_eq!(
        (&shared["shared"], &shared["project"]),
        (&json!(true), &json!(null))
    );
    let seen = b.get("/v1/templates/private").await.ok();
    assert_eq!(
        (&seen["shared"], &seen["project"], &seen["id"]),
        (&json!(true), &json!(null), &theirs["id"])
    );
    assert_eq!(
        a.get("/v1/templates/private").await.ok()["project"],
        theirs["project"]
    );
    a.delete("/templates/private").await.expect(204);
    a.get("/v1/templates/private").await.expect(200);
    let made = b
        .post("/v1/sandboxes", &server.request(&json!({"template": "private"})))
        .await;
    let sandbox = Sandbox::of(&b, &made.expect(201).json());
    operator
        .delete("/v1/templates/private")
        .await
        .refused(409, "template_in_use");
    sandbox.ask("/stop", json!({})).await.ok();

    let back = operator
        .post("/v1/templates/private/unshare", &json!({}))
        .await
        .ok();
    assert_eq!(
        (&back["shared"], &back["names"]),
        (&json!(false), &json!(["private"]))
    );
    assert_opens_nothing(&b, server, "private", &id).await;
    assert_opens_nothing(&a, server, "private", &id).await;
    // Nobody needs it but a sandbox that was made of it, and which goes on.
    operator.delete("/v1/templates/private").await.expect(204);
    operator.post("/v1/templates/prune", &json!({})).await.ok();
    sandbox.ask("/start", json!({})).await.ok();
    assert_eq!(sandbox.sh("cat /opt/made").await.ok(), "guess");
    sandbox.kill().await;
}

async fn a_build_counts_as_a_sandbox_of_its_project(server: &Server) {
    let (a, b) = (member(server, "a").await, member(server, "b").await);
    let create = async |client: &Client| client.post("/v1/sandboxes", &server.request(&json!({}))).await;
    let sandbox = Sandbox::of(&a, &create(&a).await.expect(201).json());
    let waits = || context("FROM base\nRUN echo begun && sleep 1000\n", "");
    let refused = a.send(build(&a, &[("name", "slow")], waits())).await;
    refused.refused(429, "too_many_sandboxes");
    sandbox.kill().await;

    let mut events = Events::of(a.open(build(&a, &[("name", "slow")], waits())).await);
    loop {
        let event = events.next().await.expect("the step says that it has begun");
        assert_ne!(event.name, "error", "{event:?}");
        if event.data["text"] == "begun" {
            break;
        }
    }
    create(&a).await.refused(429, "too_many_sandboxes");
    // It is no affair of others.
    Sandbox::of(&b, &create(&b).await.expect(201).json()).kill().await;
    drop(events);
    let after = wait::until("the place of the build", Duration::from_secs(60), || async {
        let answer = create(&a).await;
        (answer.status == 201).then(|| answer.json())
    })
    .await;
    Sandbox::of(&a, &after).kill().await;
}

/// Each step stores what it changed, and many are as much as one that is large.
async fn a_build_stores_no_more_than_its_project_may(server: &Server) {
    let client = member(server, "a").await;
    let step = |number: u8| format!("RUN head -c 16000000 /dev/urandom > /opt/{number}\n");
    let many: String = (0..20).map(step).collect();
    let events = said(&client, "many", context(&format!("FROM base\n{many}"), "")).await;
    let last = events.last().expect("a build says something");
    assert_eq!(
        (last.name.as_str(), last.data["code"].as_str()),
        ("error", Some("storage_quota_exceeded")),
        "{events:?}"
    );
    let begun = |number: u8| {
        let line = format!("/opt/{number}");
        let mut lines = events.iter().filter_map(|event| event.data["text"].as_str());
        lines.any(|said| said.ends_with(&line))
    };
    assert!(begun(3) && !begun(4), "{events:?}");
    client.get("/v1/templates/many").await.expect(404);
    // What was cached of it counts, until it is pruned.
    let one = context(&format!("FROM base\n{}", step(0)), "");
    let next = said(
        &client,
        "next",
        context("FROM base\nRUN head -c 16000000 /dev/urandom > /x\n", ""),
    )
    .await;
    assert_eq!(
        next.last().unwrap().data["code"],
        "storage_quota_exceeded",
        "{next:?}"
    );
    client.post("/v1/templates/prune", &json!({})).await.ok();
    built(&said(&client, "one", one).await);
}
