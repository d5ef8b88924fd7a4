//! Who may call: keys are made, listed and revoked; without one nothing is said.

use atoll_proof::stream::{Received, Session};
use atoll_proof::{Server, json, on_every_tier};

on_every_tier!(
    a_revoked_key_opens_nothing,
    what_a_revoked_key_opened_ends,
    a_project_is_a_world_of_its_own,
    a_key_may_what_its_role_and_scopes_say,
    what_an_expired_key_opened_ends,
    a_session_may_what_its_key_may_from_its_own_pages_alone,
    without_a_key_nothing_is_said,
    secrets_are_not_kept,
    the_log_never_holds_the_admin_key,
);

async fn a_revoked_key_opens_nothing(server: &mut Server) {
    let client = server.client();
    let made = client
        .post("/v1/keys", &json!({"name": "second"}))
        .await
        .expect(201)
        .json();
    let secret = made["secret"].as_str().unwrap().to_owned();
    let other = client.with_key(Some(&secret));
    other.get("/v1/info").await.expect(200);
    let listed = client.get("/v1/keys").await.ok();
    assert_eq!(listed["items"].as_array().unwrap().len(), 2, "{listed}");
    assert!(!listed.to_string().contains(&secret), "a secret is shown once");
    let newest = client.get("/v1/keys?limit=1").await.ok();
    assert_eq!(newest["items"], json!([made["key"]]), "{newest}");
    let next = newest["next"].as_str().unwrap();
    let oldest = client.get(&format!("/v1/keys?limit=1&cursor={next}")).await.ok();
    assert_eq!(oldest["items"], json!([listed["items"][1]]), "{oldest}");
    assert_eq!(oldest.get("next"), None);
    client
        .get("/v1/keys?cursor=elsewhere")
        .await
        .refused(400, "cursor_invalid");

    let id = made["key"]["id"].as_str().unwrap();
    let revoked = client.delete(&format!("/v1/keys/{id}")).await.ok();
    assert!(revoked["revoked_at"].is_string(), "{revoked}");
    other.get("/v1/info").await.refused(401, "invalid_key");
    let sandbox = server.request(&json!({}));
    other
        .post("/v1/sandboxes", &sandbox)
        .await
        .refused(401, "invalid_key");
    client.delete(&format!("/v1/keys/{id}")).await.expect(200);
    client
        .delete("/v1/keys/key_aaaaaaaaaaaaaaaaaaaa")
        .await
        .refused(404, "key_not_found");
    server.kill_9();
    server.start_again().await;
    server
        .client()
        .with_key(Some(&secret))
        .get("/v1/info")
        .await
        .refused(401, "invalid_key");
}

/// A shell of somebody who has left is not left open.
async fn what_a_revoked_key_opened_ends(server: &Server) {
    let client = server.client();
    let sandbox = server.sandbox().await;
    let open = async |name: &str| {
        let made = client
            .post("/v1/keys", &json!({"name": name}))
            .await
            .expect(201)
            .json();
        let id = made["key"]["id"].as_str().unwrap().to_owned();
        let theirs = client.with_key(made["secret"].as_str());
        let mut session = Session::exec(&theirs, &sandbox.id, &json!({"cmd": "echo here; cat"})).await;
        session.until_stdout("here\n").await;
        (id, session)
    };
    let (leaves, mut ends) = open("leaves").await;
    let (_stays, mut goes_on) = open("stays").await;
    client.delete(&format!("/v1/keys/{leaves}")).await.expect(200);
    while ends.next().await != Received::Closed {}
    goes_on.stdin(b"still\n").await;
    goes_on.until_stdout("still\n").await;
}

/// Two projects see nothing of each other; one that does not run the server changes nothing that both use.
async fn a_project_is_a_world_of_its_own(server: &Server) {
    let operator = server.client();
    let made = operator
        .post("/v1/projects", &json!({"name": "team-b"}))
        .await
        .expect(201)
        .json();
    operator
        .post("/v1/projects", &json!({"name": "team-b"}))
        .await
        .refused(409, "project_exists");
    for wrong in ["", "-b", "B", "a/b", &"x".repeat(64)] {
        let answer = operator.post("/v1/projects", &json!({ "name": wrong })).await;
        answer.refused(400, "project_name_invalid");
    }
    let key = operator
        .post("/v1/keys", &json!({"name": "first", "project": "team-b"}))
        .await
        .expect(201)
        .json();
    assert_eq!(key["key"]["project"], made["id"]);
    let team = operator.with_key(key["secret"].as_str());

    let theirs = server.sandbox().await;
    let own = team
        .post("/v1/sandboxes", &server.request(&json!({})))
        .await
        .expect(201)
        .json();
    let own = own["id"].as_str().unwrap();
    let sees = |list: &atoll_proof::Value| -> Vec<String> {
        let items = list["items"].as_array().unwrap();
        items
            .iter()
            .map(|item| item["id"].as_str().unwrap().to_owned())
            .collect()
    };
    assert_eq!(sees(&team.get("/v1/sandboxes").await.ok()), [own]);
    assert_eq!(
        sees(&operator.get("/v1/sandboxes").await.ok()),
        [theirs.id.as_str()]
    );
    // Nor how much others run.
    assert_eq!(team.get("/v1/info").await.ok()["running"], 1);
    assert_eq!(operator.get("/v1/info").await.ok()["running"], 2);
    team.get(&theirs.path("")).await.refused(404, "sandbox_not_found");
    team.delete(&theirs.path(""))
        .await
        .refused(404, "sandbox_not_found");
    operator
        .get(&format!("/v1/sandboxes/{own}"))
        .await
        .refused(404, "sandbox_not_found");
    assert_eq!(
        sees(&team.get("/v1/projects").await.ok()),
        [made["id"].as_str().unwrap()]
    );
    assert_eq!(
        operator.get("/v1/projects").await.ok()["items"]
            .as_array()
            .unwrap()
            .len(),
        2
    );

    team.post("/v1/projects", &json!({"name": "c"}))
        .await
        .refused(403, "operators_only");
    team.post("/v1/keys", &json!({"name": "k", "project": "default"}))
        .await
        .refused(404, "project_not_found");
    team.post("/v1/gc", &json!({}))
        .await
        .refused(403, "operators_only");
    team.delete("/v1/templates/base")
        .await
        .refused(403, "operators_only");
    for shares in ["share", "unshare"] {
        team.post(&format!("/v1/templates/base/{shares}"), &json!({}))
            .await
            .refused(403, "operators_only");
    }
    team.get("/v1/templates/base").await.expect(200);

    team.delete(&format!("/v1/sandboxes/{own}")).await.expect(200);
    // Who made the key may take it back.
    let id = key["key"]["id"].as_str().unwrap();
    operator
        .delete(&format!("/v1/keys/{id}"))
        .await
        .refused(404, "key_not_found");
    operator
        .delete(&format!("/v1/keys/{id}?project=team-b"))
        .await
        .expect(200);
    team.get("/v1/sandboxes").await.refused(401, "invalid_key");
}

async fn without_a_key_nothing_is_said(server: &Server) {
    let sandbox = server.sandbox().await;
    let stranger = server.client().with_key(None);
    for path in [
        "/v1/info",
        "/v1/sandboxes",
        &sandbox.path(""),
        &sandbox.path("/files?path=/"),
        "/v1/keys",
        "/v1/facts",
    ] {
        let refused = stranger.get(path).await;
        let detail = refused.refused(401, "missing_key");
        assert!(detail["hint"].as_str().unwrap().contains("Bearer"), "{detail}");
        assert_eq!(refused.headers["www-authenticate"], "Bearer");
    }
    for key in [
        "nonsense",
        "atl_",
        "atl_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
        "e2b_",
        "e2b_0000000000000000000000000000000000000000",
        &"x".repeat(5000),
    ] {
        let forger = server.client().with_key(Some(key));
        forger.get(&sandbox.path("")).await.refused(401, "invalid_key");
    }
    stranger.get("/healthz").await.expect(200);
    stranger.get("/openapi.json").await.expect(200);
    stranger.get("/docs").await.expect(200);
}

async fn secrets_are_not_kept(server: &Server) {
    let secret = server.client().key().unwrap();
    let sandbox = server
        .sandbox_with(&json!({"env": {"TOKEN": "hidden-value-123"}}))
        .await;
    assert_eq!(sandbox.sh("printf $TOKEN").await.ok(), "hidden-value-123");
    for name in ["atoll.db", "atoll.db-wal"] {
        let bytes = std::fs::read(server.data().join(name)).unwrap_or_default();
        let found = bytes
            .windows(secret.len())
            .any(|window| window == secret.as_bytes());
        assert!(!found, "{name} contains the key itself, not only its hash");
    }
    let mode = |name: &str| {
        use std::os::unix::fs::PermissionsExt as _;
        std::fs::metadata(server.data().join(name))
            .unwrap()
            .permissions()
            .mode()
            & 0o777
    };
    assert_eq!(mode("admin.key"), 0o600);
    assert_eq!(
        mode("atoll.db") & 0o077,
        0,
        "nobody else on the machine reads the database"
    );
}

/// It says where the key is, in a file that only the server's user reads.
async fn the_log_never_holds_the_admin_key(server: &Server) {
    use std::os::unix::fs::MetadataExt as _;
    let file = server.data().join("admin.key");
    let key = std::fs::read_to_string(&file).unwrap();
    let log = server.log();
    assert!(!log.contains(key.trim()), "the key is in the log");
    assert!(log.contains(&file.display().to_string()), "{log}");
    assert_eq!(std::fs::metadata(&file).unwrap().mode() & 0o777, 0o600);
}

/// On every API that takes it.
async fn a_key_may_what_its_role_and_scopes_say(server: &Server) {
    let client = server.client();
    let sandbox = server.sandbox().await;
    let other = server.sandbox().await;
    let key = async |wanted: atoll_proof::Value| {
        let made = client.post("/v1/keys", &wanted).await.expect(201).json();
        assert_eq!(made["key"]["role"], wanted["role"], "{made}");
        client.with_key(made["secret"].as_str())
    };
    let viewer = key(json!({"name": "looks", "role": "viewer"})).await;
    viewer.get(&sandbox.path("")).await.expect(200);
    viewer.get("/v1/facts").await.expect(200);
    for path in ["/exec", "/pause", "/fork"] {
        let answer = viewer.post(&sandbox.path(path), &json!({"argv": ["true"]})).await;
        answer.refused(403, "not_allowed");
    }
    // Nor anything by which more is opened.
    viewer
        .get(&sandbox.path("/ports/80"))
        .await
        .refused(403, "not_allowed");
    viewer
        .get(&sandbox.path("/files/content?path=/etc/hostname"))
        .await
        .refused(403, "not_allowed");
    viewer
        .post("/v1/keys", &json!({"name": "more"}))
        .await
        .refused(403, "not_allowed");
    let bare = sandbox.id.trim_start_matches("sbx_");
    viewer.get(&format!("/sandboxes/{bare}")).await.expect(403);
    viewer.get("/v2/sandboxes").await.expect(200);
    viewer
        .post("/v1/chat/completions", &json!({"model": "m", "messages": []}))
        .await
        .expect(403);

    let one = format!("sandbox:{}", sandbox.id);
    let one = key(json!({"name": "one", "role": "member", "scopes": [one]})).await;
    one.post(&sandbox.path("/exec"), &json!({"argv": ["true"]}))
        .await
        .expect(200);
    one.get(&format!("/sandboxes/{bare}")).await.expect(200);
    for refused in [
        &other.path(""),
        "/v1/sandboxes",
        "/v1/keys",
        "/v1/secrets",
        "/v1/facts",
    ] {
        one.get(refused).await.refused(403, "not_allowed");
    }
    one.post(&sandbox.path("/fork"), &json!({}))
        .await
        .refused(403, "not_allowed");

    let sandboxes = key(json!({"name": "makes", "role": "member", "scopes": ["sandboxes"]})).await;
    let lent = server.request(&json!({"secrets": [{"secret": "github", "env": "TOKEN"}]}));
    sandboxes
        .post("/v1/sandboxes", &lent)
        .await
        .refused(403, "not_allowed");

    let member = key(json!({"name": "works", "role": "member"})).await;
    member
        .post("/v1/keys", &json!({"name": "more", "role": "operator"}))
        .await
        .refused(403, "not_allowed");
    // It is what workers hold: it answers nothing that they ask, nor makes a key that could.
    let yes = json!({"digest": "sha256:00"});
    let question = "/v1/approvals/apr_aaaaaaaaaaaaaaaaaaaa/grant";
    member.post(question, &yes).await.refused(403, "not_allowed");
    member
        .post("/v1/keys", &json!({"name": "more", "role": "approver"}))
        .await
        .refused(403, "not_allowed");
    // One in the project of those who run the server does not say where its providers are, either.
    let provider = json!({"kind": "openai", "base_url": "http://127.0.0.1:1/v1", "key": "k"});
    let set = member.request(reqwest::Method::PUT, "/v1/gateway/providers/inside");
    let set = member.send(set.json(&provider)).await;
    set.refused(403, "operators_only");
    let approver = key(json!({"name": "answers", "role": "approver"})).await;
    assert_ne!(approver.post(question, &yes).await.status, 403);
    let unsaid = client.post("/v1/keys", &json!({"name": "unsaid"})).await;
    assert_eq!(unsaid.expect(201).json()["key"]["role"], "member");
    member
        .post("/v1/gc", &json!({}))
        .await
        .refused(403, "operators_only");
    for wrong in [
        json!({"name": "x", "role": "king"}),
        json!({"name": "x", "scopes": ["all"]}),
        json!({"name": "x", "expires_at": "2001-01-01T00:00:00Z"}),
        json!({"name": "x", "expires_at": "tomorrow"}),
    ] {
        client.post("/v1/keys", &wrong).await.expect(400);
    }
}

async fn what_an_expired_key_opened_ends(server: &Server) {
    let client = server.client();
    let sandbox = server.sandbox().await;
    let soon = std::time::SystemTime::now() + std::time::Duration::from_secs(4);
    let soon = jiff::Timestamp::try_from(soon).unwrap().to_string();
    let made = client
        .post("/v1/keys", &json!({"name": "leaves", "expires_at": soon}))
        .await
        .expect(201)
        .json();
    let theirs = client.with_key(made["secret"].as_str());
    let mut session = Session::exec(&theirs, &sandbox.id, &json!({"cmd": "echo here; cat"})).await;
    session.until_stdout("here\n").await;
    while session.next().await != Received::Closed {}
    theirs.get("/v1/info").await.refused(401, "invalid_key");
}

async fn a_session_may_what_its_key_may_from_its_own_pages_alone(server: &Server) {
    use reqwest::Method;
    let client = server.client();
    let made = client
        .post("/v1/keys", &json!({"name": "browser", "role": "member"}))
        .await
        .expect(201)
        .json();
    let key = client.with_key(made["secret"].as_str());
    let begun = key.open(key.request(Method::POST, "/v1/session")).await;
    assert_eq!(begun.status(), 201);
    let cookie = begun.headers()["set-cookie"].to_str().unwrap().to_owned();
    for attribute in ["HttpOnly", "SameSite=Strict", "Path=/", "Max-Age="] {
        assert!(cookie.contains(attribute), "{cookie}");
    }
    assert!(!cookie.contains("Secure"), "this is plain HTTP: {cookie}");
    let cookie = cookie.split(';').next().unwrap().to_owned();
    let word = begun.json::<atoll_proof::Value>().await.unwrap();
    let csrf = word["csrf"].as_str().unwrap().to_owned();
    assert_eq!(word["role"], "member");

    let page = client.with_key(None);
    let origin = page.url().trim_end_matches('/').to_owned();
    let ask = async |method: Method, path: &str, more: &[(&str, &str)]| {
        let mut request = page.request(method, path).header("cookie", &cookie);
        for (name, value) in more {
            request = request.header(*name, *value);
        }
        page.send(request).await
    };
    let own = [("origin", origin.as_str()), ("x-atoll-csrf", csrf.as_str())];
    ask(Method::GET, "/v1/info", &[]).await.expect(200);
    assert_eq!(ask(Method::GET, "/v1/session", &[]).await.ok()["csrf"], csrf);
    // Exactly what the key may.
    ask(Method::POST, "/v1/templates/base/unshare", &own)
        .await
        .refused(403, "operators_only");
    let missing = "/v1/keys/key_aaaaaaaaaaaaaaaaaaaa";
    ask(Method::DELETE, missing, &own)
        .await
        .refused(404, "key_not_found");
    for (headers, code) in [
        (&[][..], "wrong_origin"),
        (&own[1..], "wrong_origin"),
        (&own[..1], "wrong_csrf"),
        (&[own[0], ("x-atoll-csrf", "0")][..], "wrong_csrf"),
        (&[("origin", "null"), own[1]][..], "wrong_origin"),
        (
            &[("origin", "http://8080-sbx.localhost"), own[1]][..],
            "wrong_origin",
        ),
    ] {
        ask(Method::DELETE, missing, headers).await.refused(403, code);
    }
    // A page elsewhere may not even look, nor open a shell.
    ask(Method::GET, "/v1/info", &[("origin", "http://evil.example")])
        .await
        .refused(403, "wrong_origin");
    ask(Method::GET, "/v1/info", &[("upgrade", "websocket")])
        .await
        .refused(403, "wrong_origin");
    // Other APIs know no cookies, and a session begins no other.
    ask(Method::GET, "/sandboxes", &[]).await.expect(401);
    ask(Method::GET, "/v1/models", &[]).await.expect(401);
    ask(Method::POST, "/v1/session", &own)
        .await
        .refused(403, "not_allowed");

    ask(Method::DELETE, "/v1/session", &own).await.expect(204);
    ask(Method::GET, "/v1/info", &[])
        .await
        .refused(401, "invalid_session");
    // And with its key.
    let begun = key.open(key.request(Method::POST, "/v1/session")).await;
    let cookie = begun.headers()["set-cookie"].to_str().unwrap().to_owned();
    let id = made["key"]["id"].as_str().unwrap();
    client.delete(&format!("/v1/keys/{id}")).await.expect(200);
    let ended = page
        .request(Method::GET, "/v1/info")
        .header("cookie", cookie.split(';').next().unwrap());
    page.send(ended).await.refused(401, "invalid_session");
}
