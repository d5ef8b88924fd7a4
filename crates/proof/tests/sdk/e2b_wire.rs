//! What E2B's own integration tests of its servers look for and its SDKs do not show: statuses, words and headers of the wire,
//! asked for as those tests ask.

use atoll_proof::{Answer, Client, Server, Value, json, on_every_tier};

on_every_tier!(with atoll_proof::Options::default().own_templates();
    directories_of_processes_are_found_as_there,
    a_user_that_is_not_there_is_no_proof_of_who_asks,
    paths_in_refusals_are_whole,
    the_edge_tells_programs_and_people_what_is_closed,
    traffic_wakes_what_rests_and_only_for_those_who_may,
    pauses_at_once_are_one_pause,
    lists_say_how_many_run,
    snapshots_have_tags,
    a_template_goes_on_where_its_parent_left_off,
    builds_are_called_as_they_were_asked_for,
    what_is_asked_for_is_shown_again,
    names_are_taken_once,
    a_server_without_tls_says_so_in_its_log,
);

struct Made<'a> {
    client: &'a Client,
    id: String,
    token: Option<String>,
    whole: Value,
}

impl<'a> Made<'a> {
    async fn new(server: &'a Server, more: Value) -> Self {
        let mut body = json!({"templateID": "base", "timeout": 120, "secure": true});
        for (name, value) in more.as_object().unwrap() {
            body[name] = value.clone();
        }
        Self::of(
            server,
            server.client().post("/sandboxes", &body).await.expect(201).json(),
        )
    }

    fn of(server: &'a Server, whole: Value) -> Self {
        Self {
            client: server.client(),
            id: whole["sandboxID"].as_str().unwrap().to_owned(),
            token: whole["envdAccessToken"].as_str().map(str::to_owned),
            whole,
        }
    }

    async fn ask(&self, method: &str, path: &str, port: &str, headers: &[(&str, &str)]) -> Answer {
        let mut request = self
            .client
            .with_key(None)
            .request(method.parse().unwrap(), path)
            .header("e2b-sandbox-id", &self.id)
            .header("e2b-sandbox-port", port);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        self.client.send(request).await
    }

    async fn with_token(&self, method: &str, path: &str) -> Answer {
        let token = self.token.as_deref().unwrap();
        self.ask(method, path, "49983", &[("x-access-token", token)])
            .await
    }

    /// What a process says, or why it did not start.
    async fn run(&self, command: &str, more: Value, user: Option<&str>) -> Result<String, Value> {
        use base64::Engine as _;
        let base64 = base64::engine::general_purpose::STANDARD;
        let mut message = json!({"process": {"cmd": "/bin/bash", "args": ["-c", command]}, "stdin": false});
        for (name, value) in more.as_object().unwrap() {
            match name.as_str() {
                "pty" => message["pty"] = value.clone(),
                name => message["process"][name] = value.clone(),
            }
        }
        let payload = message.to_string().into_bytes();
        let mut frame = vec![0];
        frame.extend(u32::try_from(payload.len()).unwrap().to_be_bytes());
        frame.extend(payload);
        let mut request = self
            .client
            .with_key(None)
            .request("POST".parse().unwrap(), "/process.Process/Start")
            .header("e2b-sandbox-id", &self.id)
            .header("e2b-sandbox-port", "49983")
            .header("content-type", "application/connect+json")
            .body(frame);
        if let Some(token) = &self.token {
            request = request.header("x-access-token", token);
        }
        if let Some(user) = user {
            request = request.header(
                "authorization",
                format!("Basic {}", base64.encode(format!("{user}:"))),
            );
        }
        let answer = self.client.send(request).await;
        let mut rest = &answer.body[..];
        let mut said = String::new();
        while rest.len() >= 5 {
            let length = usize::try_from(u32::from_be_bytes(rest[1..5].try_into().unwrap())).unwrap();
            let event: Value = serde_json::from_slice(&rest[5..5 + length]).unwrap();
            if !event["error"].is_null() {
                return Err(event["error"].clone());
            }
            for kind in ["stdout", "pty"] {
                if let Some(data) = event["event"]["data"][kind].as_str() {
                    said.push_str(&String::from_utf8_lossy(&base64.decode(data).unwrap()));
                }
            }
            rest = &rest[5 + length..];
        }
        Ok(said)
    }

    async fn state(&self) -> String {
        let info = self
            .client
            .get(&format!("/sandboxes/{}", self.id))
            .await
            .expect(200)
            .json();
        info["state"].as_str().unwrap().to_owned()
    }

    async fn pause(&self, body: Value) -> u16 {
        self.client
            .post(&format!("/sandboxes/{}/pause", self.id), &body)
            .await
            .status
    }

    async fn kill(self) {
        self.client
            .delete(&format!("/sandboxes/{}", self.id))
            .await
            .expect(204);
    }
}

async fn directories_of_processes_are_found_as_there(server: &Server) {
    let made = Made::new(server, json!({})).await;
    made.run("mkdir -p ~/project/user", json!({}), None)
        .await
        .unwrap();
    for (cwd, at) in [
        ("~", "/home/user"),
        ("~/", "/home/user"),
        ("~/project", "/home/user/project"),
        ("project/user", "/home/user/project/user"),
        ("/usr/lib", "/usr/lib"),
        ("", "/home/user"),
    ] {
        let said = made.run("pwd", json!({"cwd": cwd}), None).await;
        assert_eq!(said.as_deref(), Ok(format!("{at}\n").as_str()), "{cwd}");
    }
    let as_root = made.run("id -un; pwd", json!({"cwd": "~"}), Some("root")).await;
    assert_eq!(as_root.as_deref(), Ok("root\n/root\n"));
    let size = json!({"size": {"rows": 24, "cols": 80}});
    let terminal = made
        .run("pwd", json!({"cwd": "~/project", "pty": size}), None)
        .await;
    assert_eq!(terminal.as_deref(), Ok("/home/user/project\r\n"));
    // It says `user`, and is not about one.
    for missing in ["/home/user/none", "~/none", "user"] {
        let error = made.run("pwd", json!({"cwd": missing}), None).await.unwrap_err();
        assert_eq!(error["code"], "invalid_argument", "{missing}: {error}");
    }
    let error = made
        .run("pwd", json!({"cwd": "~root/x"}), None)
        .await
        .unwrap_err();
    assert_eq!(error["code"], "invalid_argument", "{error}");
    made.kill().await;
}

async fn a_user_that_is_not_there_is_no_proof_of_who_asks(server: &Server) {
    let made = Made::new(server, json!({})).await;
    let error = made
        .run("true", json!({}), Some("nobody-here"))
        .await
        .unwrap_err();
    assert_eq!(error["code"], "unauthenticated", "{error}");
    assert_eq!(error["message"], "invalid username: 'nobody-here'");
    let refused = made
        .with_token("GET", "/files?path=x&username=nobody-here")
        .await
        .expect(401)
        .json();
    let message = refused["message"].as_str().unwrap();
    assert!(
        message.starts_with("error looking up user 'nobody-here'"),
        "{message}"
    );
    made.kill().await;
}

async fn paths_in_refusals_are_whole(server: &Server) {
    let made = Made::new(server, json!({})).await;
    for (given, path) in [
        ("demo/test.txt", "/home/user/demo/test.txt"),
        ("~/x", "/home/user/x"),
        ("/none", "/none"),
    ] {
        let link = format!("/files?path={given}&username=user");
        let refused = made.with_token("GET", &link).await.expect(404).json();
        assert_eq!(refused["message"], json!(format!("path '{path}' does not exist")));
    }
    made.kill().await;
}

const BROWSER: (&str, &str) = (
    "user-agent",
    "Mozilla/5.0 (Windows NT 10.0; Win64; x64) Chrome/158 Safari/537.3",
);

async fn the_edge_tells_programs_and_people_what_is_closed(server: &Server) {
    let open = Made::new(server, json!({})).await;
    let private = Made::new(server, json!({"network": {"allowPublicTraffic": false}})).await;
    let kind = |answer: &Answer| answer.headers["content-type"].to_str().unwrap().to_owned();
    let wrong = ("e2b-traffic-access-token", "abcd");
    let token = private.whole["trafficAccessToken"].as_str().unwrap();
    let foreign = Made {
        id: "i1a2b3c4d5e6f7g8h9i0j".into(),
        client: server.client(),
        token: None,
        whole: json!({}),
    };
    for (made, header, status, message, title) in [
        (
            &open,
            None,
            502,
            "The sandbox is running but port is not open",
            "no service running on port 3210",
        ),
        (
            &private,
            Some(("e2b-traffic-access-token", token)),
            502,
            "The sandbox is running but port is not open",
            "no service running on port 3210",
        ),
        (
            &private,
            None,
            403,
            "Sandbox is secured with traffic access token. Token header 'e2b-traffic-access-token' is missing",
            "Missing Traffic Access Token",
        ),
        (
            &private,
            Some(wrong),
            403,
            "Sandbox is secured with traffic access token. Provided token in header 'e2b-traffic-access-token' is invalid",
            "Invalid Traffic Access Token",
        ),
        (
            &foreign,
            None,
            502,
            "The sandbox was not found",
            "Sandbox Not Found",
        ),
    ] {
        let headers: Vec<(&str, &str)> = header.into_iter().collect();
        let told = made.ask("GET", "/", "3210", &headers).await.expect(status);
        assert_eq!(kind(&told), "application/json; charset=utf-8");
        let told = told.json();
        assert_eq!(
            (&told["message"], &told["sandboxId"]),
            (&json!(message), &json!(made.id))
        );
        let page = made
            .ask("GET", "/", "3210", &[&headers[..], &[BROWSER]].concat())
            .await
            .expect(status);
        assert_eq!(kind(&page), "text/html; charset=utf-8");
        let page = page.text();
        assert!(page.starts_with("<html") && page.ends_with("</html>"), "{page}");
        assert!(page.contains(title) && page.contains(&made.id), "{page}");
    }
    // What E2B's servers steer their agent by is nobody's, whatever they show.
    let refused = open.with_token("POST", "/init").await.expect(404).text();
    assert!(
        refused.contains("reserved for the E2B control plane"),
        "{refused}"
    );
    open.kill().await;
    private.kill().await;
}

async fn traffic_wakes_what_rests_and_only_for_those_who_may(server: &Server) {
    let sleepy = json!({"timeout": 60, "autoPause": true, "autoResume": {"enabled": true}});
    let made = Made::new(server, sleepy.clone()).await;
    made.with_token("GET", "/health").await.expect(204);
    assert_eq!(made.pause(json!({})).await, 204);
    made.ask("GET", "/health", "49983", &[]).await.expect(403);
    made.ask("GET", "/health", "49983", &[("x-access-token", "wrong")])
        .await
        .expect(403);
    assert_eq!(made.state().await, "paused");
    made.with_token("GET", "/health").await.expect(204);
    let info = made
        .client
        .get(&format!("/sandboxes/{}", made.id))
        .await
        .expect(200)
        .json();
    assert_eq!(info["state"], "running");
    let time = |name: &str| {
        info[name]
            .as_str()
            .unwrap()
            .parse::<jiff::Timestamp>()
            .unwrap()
            .as_second()
    };
    let left = time("endAt") - time("startedAt");
    assert!(
        left >= 300,
        "who was woken by traffic stays for a while: {left} s"
    );
    if server.tier.name() != "jail" {
        // Without its memory it would be another machine that answers.
        assert_eq!(made.pause(json!({"memory": false})).await, 204);
        made.with_token("GET", "/health").await.expect(502);
        made.ask("GET", "/", "8000", &[]).await.expect(502);
        assert_eq!(made.state().await, "paused");
        let connect = format!("/sandboxes/{}/connect", made.id);
        made.client
            .post(&connect, &json!({"timeout": 60}))
            .await
            .expect(201);
    }
    made.kill().await;
    // Nobody needs to show anything where the agent is open to all.
    let mut open = sleepy;
    open["secure"] = json!(false);
    let made = Made::new(server, open).await;
    assert_eq!(made.pause(json!({})).await, 204);
    made.ask("GET", "/health", "49983", &[]).await.expect(204);
    assert_eq!(made.state().await, "running");
    made.kill().await;
}

async fn pauses_at_once_are_one_pause(server: &Server) {
    let made = Made::new(server, json!({})).await;
    // Something to save, so that all of them come while it goes on.
    made.run("head -c 100000000 /dev/urandom > /tmp/x", json!({}), None)
        .await
        .unwrap();
    let answers = futures_util::future::join_all((0..5).map(|_| made.pause(json!({})))).await;
    // Who comes while it goes on hears of its end; who comes later is told that it is over.
    assert!(
        answers.iter().all(|status| [204, 409].contains(status)),
        "{answers:?}"
    );
    assert!(
        answers.iter().filter(|status| **status == 204).count() >= 2,
        "{answers:?}"
    );
    assert_eq!(made.pause(json!({})).await, 409, "that is another one");
    made.kill().await;
}

async fn lists_say_how_many_run(server: &Server) {
    let mut all = Vec::new();
    for _ in 0..3 {
        all.push(Made::new(server, json!({"metadata": {"list": "how-many"}})).await);
    }
    all[0].pause(json!({})).await;
    let list = async |query: &str| {
        let answer = server
            .client()
            .get(&format!("/v2/sandboxes?metadata=list%3Dhow-many{query}"))
            .await
            .expect(200);
        let total = answer
            .headers
            .get("x-total-running")
            .map(|total| total.to_str().unwrap().to_owned());
        (answer.json().as_array().unwrap().len(), total)
    };
    assert_eq!(list("&limit=1").await, (1, Some("2".into())));
    assert_eq!(list("&state=running").await, (2, Some("2".into())));
    assert_eq!(list("&state=paused").await, (1, None));
    assert_eq!(
        list("&state=running&startedAfter=2000-01-01T00:00:00Z").await,
        (2, Some("2".into()))
    );
    for made in all {
        made.kill().await;
    }
}

async fn snapshots_have_tags(server: &Server) {
    let client = server.client();
    let made = Made::new(server, json!({})).await;
    let take = async |name: &str| {
        let path = format!("/sandboxes/{}/snapshots", made.id);
        client
            .post(&path, &json!({"name": name}))
            .await
            .expect(201)
            .json()
    };
    let listed = async |name: &str| {
        client
            .get(&format!("/snapshots?name={name}"))
            .await
            .expect(200)
            .json()
    };
    let id = |of: &Value| json!([{"snapshotID": of["snapshotID"], "names": of["names"]}]);
    let first = take("snap-tags").await;
    assert_eq!(
        first,
        json!({"snapshotID": "snap-tags:default", "names": ["snap-tags"]})
    );
    let tagged = take("snap-tags:v1").await;
    assert_eq!(
        tagged,
        json!({"snapshotID": "snap-tags:v1", "names": ["snap-tags"]})
    );
    assert_eq!(listed("snap-tags:default").await, id(&first));
    assert_eq!(listed("snap-tags:v1").await, id(&tagged));
    assert_eq!(listed("snap-tags").await, id(&tagged), "the newest");
    assert_eq!(listed("snap-tags:none").await, json!([]));
    let tags = async || client.get("/templates/snap-tags/tags").await.expect(200).json();
    let before = tags().await;
    assert_eq!(before.as_array().unwrap().len(), 2, "{before}");
    // A name that is taken moves to the new one, which is another build.
    assert_eq!(take("snap-tags").await, first);
    let after = tags().await;
    let build = |of: &Value, tag: &str| {
        let found = of.as_array().unwrap().iter().find(|entry| entry["tag"] == tag);
        found.unwrap()["buildID"].clone()
    };
    assert_ne!(build(&before, "default"), build(&after, "default"));
    assert_eq!(build(&before, "v1"), build(&after, "v1"));

    let unnamed = client
        .post(&format!("/sandboxes/{}/snapshots", made.id), &json!({}))
        .await
        .expect(201)
        .json();
    let unnamed = unnamed["snapshotID"]
        .as_str()
        .unwrap()
        .strip_suffix(":default")
        .unwrap()
        .to_owned();
    assert_eq!(
        listed(&unnamed).await[0]["snapshotID"],
        json!(format!("{unnamed}:default"))
    );
    let copy = Made::new(server, json!({"templateID": format!("{unnamed}:default")})).await;
    assert_eq!(
        copy.whole["templateID"],
        json!(unnamed),
        "of the snapshot, and not of its base"
    );
    copy.kill().await;
    let copy = Made::new(server, json!({"templateID": "snap-tags:v1"})).await;
    let info = client
        .get(&format!("/sandboxes/{}", copy.id))
        .await
        .expect(200)
        .json();
    assert_eq!(info["alias"], "snap-tags");
    copy.kill().await;
    for name in [&unnamed, "snap-tags"] {
        client.delete(&format!("/templates/{name}")).await.expect(204);
    }
    client.delete("/templates/snap-tags:v1").await.expect(404);
    made.kill().await;
}

/// The name of a build, when it is ready.
async fn built(server: &Server, name: &str, start: Value) -> String {
    let client = server.client();
    let asked = client
        .post("/v3/templates", &json!({"name": name}))
        .await
        .expect(202)
        .json();
    let (template, build) = (
        asked["templateID"].as_str().unwrap(),
        asked["buildID"].as_str().unwrap(),
    );
    client
        .post(&format!("/v2/templates/{template}/builds/{build}"), &start)
        .await
        .expect(202);
    loop {
        let status = format!("/templates/{template}/builds/{build}/status");
        let status = client.get(&status).await.expect(200).json();
        match status["status"].as_str().unwrap() {
            "ready" => return build.to_owned(),
            "error" => panic!("{status}"),
            _ => tokio::time::sleep(std::time::Duration::from_millis(100)).await,
        }
    }
}

fn step(kind: &str, args: &[&str]) -> Value {
    json!({"type": kind, "args": args})
}

async fn a_template_goes_on_where_its_parent_left_off(server: &Server) {
    // A jail's root may not make directories that are another's, so one is used that is there.
    let parent = json!({"fromTemplate": "base", "steps": [step("ENV", &["A", "1"]), step("WORKDIR", &["/tmp"]), step("USER", &["root"])]});
    built(server, "wire-parent", parent).await;
    let child = json!({"fromTemplate": "wire-parent", "steps": [step("ENV", &["B", "2"])]});
    built(server, "wire-child", child).await;
    let made = Made::new(server, json!({"templateID": "wire-child"})).await;
    let said = made.run("id -un; pwd; echo $A$B", json!({}), None).await;
    assert_eq!(said.as_deref(), Ok("root\n/tmp\n12\n"));
    // A home is no working directory.
    let said = made.run("pwd", json!({"cwd": "~"}), None).await;
    assert_eq!(said.as_deref(), Ok("/root\n"));
    made.kill().await;
    for name in ["wire-child", "wire-parent"] {
        server
            .client()
            .delete(&format!("/templates/{name}"))
            .await
            .expect(204);
    }
}

async fn builds_are_called_as_they_were_asked_for(server: &Server) {
    let client = server.client();
    let version =
        |number: &str| json!({"fromTemplate": "base", "steps": [step("ENV", &["VERSION", number])]});
    let first = built(server, "wire-builds", version("1")).await;
    let tag = async |target: &str, tag: &str| {
        let body = json!({"target": target, "tags": [tag]});
        client.post("/templates/tags", &body).await
    };
    let tagged = tag("wire-builds:default", "stable").await.expect(201).json();
    assert_eq!(tagged, json!({"tags": ["stable"], "buildID": first}));
    let second = built(server, "wire-builds", version("2")).await;
    let tagged = tag("wire-builds:default", "newest").await.expect(201).json();
    assert_eq!(tagged["buildID"], json!(second));
    let runs = async |template: &str| {
        let made = Made::new(server, json!({"templateID": template})).await;
        let said = made.run("echo $VERSION", json!({}), None).await;
        made.kill().await;
        said.unwrap()
    };
    for (template, expected) in [
        (format!("wire-builds:{first}"), "1\n"),
        (format!("wire-builds:{second}"), "2\n"),
        ("wire-builds:stable".to_owned(), "1\n"),
        ("wire-builds".to_owned(), "2\n"),
    ] {
        assert_eq!(runs(&template).await, expected, "{template}");
    }
    let tagged = tag(&format!("wire-builds:{first}"), "newest")
        .await
        .expect(201)
        .json();
    assert_eq!(tagged["buildID"], json!(first));
    assert_eq!(runs("wire-builds:newest").await, "1\n");
    let tags = client.get("/templates/wire-builds/tags").await.expect(200).json();
    let of = |name: &str| {
        let found = tags.as_array().unwrap().iter().find(|entry| entry["tag"] == name);
        found.unwrap()["buildID"].clone()
    };
    assert_eq!(
        (of("stable"), of("newest"), of("default")),
        (json!(first), json!(first), json!(second))
    );

    // Nobody else's build, none that never was, and not the tag that a name without one means.
    tag("base:default", "").await.expect(400);
    tag("wire-builds:00000000-0000-4000-8000-000000000000", "x")
        .await
        .expect(404);
    tag(&format!("base:{first}"), "x").await.expect(404);
    let remove = json!({"name": "wire-builds", "tags": ["default"]});
    client
        .send(
            client
                .request("DELETE".parse().unwrap(), "/templates/tags")
                .json(&remove),
        )
        .await
        .expect(400);
    client
        .get("/templates/wire-builds/builds/nonsense/status")
        .await
        .expect(400);
    for name in ["wire-builds:stable", "wire-builds"] {
        client.delete(&format!("/templates/{name}")).await.expect(204);
    }
}

async fn what_is_asked_for_is_shown_again(server: &Server) {
    let client = server.client();
    let base = client.get("/templates/base").await.expect(200).json();
    let network =
        json!({"allowOut": ["8.8.8.8"], "denyOut": ["10.0.0.0/8"], "maskRequestHost": "localhost:${PORT}"});
    let body = json!({"templateID": base["templateID"], "network": network});
    let made = client.post("/v2/sandboxes", &body).await;
    if made.status == 400 {
        eprintln!("SKIPPED: this machine has no network for sandboxes");
        return;
    }
    let made = Made::of(server, made.expect(201).json());
    let info = client
        .get(&format!("/sandboxes/{}", made.id))
        .await
        .expect(200)
        .json();
    assert_eq!(
        info["alias"], "base",
        "what was made by id has a name all the same"
    );
    assert_eq!(info["network"]["allowOut"], json!(["8.8.8.8"]));
    if info["allowInternetAccess"] == json!(true) {
        assert_eq!(info["network"]["denyOut"], json!(["10.0.0.0/8"]));
    }
    made.kill().await;
    // Another team's lists are not this key's.
    client
        .get("/templates?teamID=00000000-0000-0000-0000-000000000000")
        .await
        .expect(400);
    assert_eq!(
        client.with_key(None).get("/health").await.expect(200).text(),
        "Health check successful"
    );
}

async fn names_are_taken_once(server: &Server) {
    let client = server.client();
    let volume = client
        .post("/volumes", &json!({"name": "wire-once"}))
        .await
        .expect(201)
        .json();
    client
        .post("/volumes", &json!({"name": "wire-once"}))
        .await
        .expect(400);
    client
        .delete(&format!("/volumes/{}", volume["volumeID"].as_str().unwrap()))
        .await
        .expect(204);
}

/// What a client that was told no address of sandboxes does: all that it can say of it is that TLS failed.
async fn a_server_without_tls_says_so_in_its_log(server: &Server) {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let said = || server.log().matches("a client speaks TLS").count();
    let before = said();
    for _ in 0..2 {
        let mut stream = tokio::net::TcpStream::connect(server.client().authority())
            .await
            .unwrap();
        stream
            .write_all(b"\x16\x03\x01\x00\x05\x01\x00\x00\x01\x03\r\n\r\n")
            .await
            .unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await.unwrap();
        assert!(answer.starts_with(b"HTTP/1.1 400"), "{answer:?}");
    }
    assert_eq!((before, said()), (0, 1), "once");
}
