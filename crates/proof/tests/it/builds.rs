//! Templates from Dockerfiles and image archives: built, used, deleted, pruned; through the API and the command line.

use std::io::Write as _;
use std::process::{Command, Stdio};

use atoll_proof::stream::{Event, Events};
use atoll_proof::{Sandbox, Server, Value, json, on_every_tier, printed};
use reqwest::Method;
use reqwest::header::CONTENT_TYPE;

mod pooled {
    use super::a_pool_follows_its_template;

    atoll_proof::on_every_tier!(
        with atoll_proof::Options::default().own_templates().args(&["--pool", "rebuilt=1"]);
        a_pool_follows_its_template,
    );
}

on_every_tier!(
    with atoll_proof::Options::default().own_templates();
    a_dockerfile_becomes_a_template,
    what_is_built_on_a_template_is_a_layer,
    builds_that_fail_say_where,
    an_archive_becomes_a_template,
    lists_of_templates_come_in_pages,
    templates_at_the_command_line,
    a_template_comes_up_running,
);

/// A tar archive of these files.
fn archive(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (path, content) in files {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        builder.append_data(&mut header, path, *content).unwrap();
    }
    builder.into_inner().unwrap()
}

fn sha256(bytes: &[u8]) -> String {
    let mut sum = Command::new("sha256sum")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    sum.stdin.take().unwrap().write_all(bytes).unwrap();
    let output = printed(&sum.wait_with_output().unwrap());
    output.split(' ').next().unwrap().to_owned()
}

/// An image of one layer as `docker save` writes it. Its only file says who made it.
fn docker_save(maker: &str) -> Vec<u8> {
    let layer = archive(&[
        ("etc/maker", maker.as_bytes()),
        ("etc/passwd", b"root:x:0:0::/:/bin/sh\n"),
    ]);
    let config = json!({
        "architecture": "amd64", "os": "linux",
        "config": {"Env": [format!("MAKER={maker}")], "WorkingDir": "/etc", "ExposedPorts": {"8080/tcp": {}}},
        "rootfs": {"type": "layers", "diff_ids": [format!("sha256:{}", sha256(&layer))]},
    });
    let manifest = json!([{"Config": "config.json", "RepoTags": ["tiny:latest"], "Layers": ["layer.tar"]}]);
    archive(&[
        ("config.json", config.to_string().as_bytes()),
        ("layer.tar", &layer),
        ("manifest.json", manifest.to_string().as_bytes()),
    ])
}

/// Sends an archive to be built and returns all that was said about it.
async fn build(server: &Server, route: &str, query: &[(&str, &str)], body: Vec<u8>) -> Vec<Event> {
    let request = server
        .client()
        .request(Method::POST, &format!("/v1/templates/{route}"))
        .query(query)
        .header(CONTENT_TYPE, "application/octet-stream")
        .body(body);
    Events::of(server.client().open(request).await).rest().await
}

/// A pool is filled when its template is there, and anew when its name stands for another.
async fn a_pool_follows_its_template(server: &Server) {
    for maker in ["first", "second"] {
        let dockerfile = format!("FROM base\nENV MAKER={maker}\n");
        let context = archive(&[("Dockerfile", dockerfile.as_bytes())]);
        built(&build(server, "build-context", &[("name", "rebuilt")], context).await);
        let template = server.client().get("/v1/templates/rebuilt").await.ok()["id"].clone();
        // Warm and of this template: not one of what was there before, and not a cold one.
        let sandbox = atoll_proof::wait::until("a warm one", std::time::Duration::from_secs(60), || async {
            let sandbox = server.sandbox_with(&json!({"template": "rebuilt"})).await;
            let facts = sandbox.facts().await;
            let started = facts.iter().find(|fact| fact["kind"] == "sandbox.started");
            let warm = started.is_some_and(|fact| fact["data"]["warm"] == true);
            assert_eq!(sandbox.get().await["template_id"], template);
            if !warm {
                sandbox.kill().await;
            }
            warm.then_some(sandbox)
        })
        .await;
        assert_eq!(sandbox.sh("echo $MAKER").await.ok(), format!("{maker}\n"));
        sandbox.kill().await;
    }
}

/// The template that a build came to.
#[track_caller]
fn built(events: &[Event]) -> Value {
    let last = events.last().expect("a build says something");
    assert_eq!(last.name, "done", "{events:?}");
    last.data.clone()
}

async fn names(server: &Server) -> Vec<String> {
    let list = server.client().get("/v1/templates").await.ok();
    let named = list["items"].as_array().unwrap().iter();
    let mut names: Vec<String> = named
        .flat_map(|template| template["names"].as_array().unwrap())
        .map(|name| name.as_str().unwrap().to_owned())
        .collect();
    names.sort();
    names
}

async fn facts_of_kind(server: &Server, kind: &str) -> Vec<Value> {
    let page = server.client().get("/v1/facts?limit=1000").await.ok();
    let all = page["items"].as_array().unwrap().clone();
    all.into_iter()
        .filter(|fact| fact["kind"] == json!(kind))
        .collect()
}

/// By both wires. The first version of E2B's has all of them.
async fn lists_of_templates_come_in_pages(server: &Server) {
    let client = server.client();
    for maker in ["one", "two", "three"] {
        built(&build(server, "build-archive", &[("name", maker)], docker_save(maker)).await);
    }
    let (mut seen, mut cursor) = (Vec::new(), None::<String>);
    loop {
        let mut query = vec![("limit", "1")];
        query.extend(cursor.as_deref().map(|cursor| ("cursor", cursor)));
        let page = client.get_with("/v1/templates", &query).await.ok();
        let items = page["items"].as_array().unwrap();
        assert_eq!(items.len(), 1);
        seen.push(items[0]["id"].clone());
        match page["next"].as_str() {
            Some(next) => cursor = Some(next.to_owned()),
            None => break,
        }
    }
    assert!(seen.len() >= 4, "{seen:?}");
    let ids = |items: &Value, field: &str| -> Vec<Value> {
        let items = items.as_array().unwrap().iter();
        items.map(|item| item[field].clone()).collect()
    };
    let whole = client.get_with("/v1/templates", &[("limit", "100")]).await.ok();
    assert_eq!(ids(&whole["items"], "id"), seen);
    assert_eq!(ids(&client.get("/templates").await.ok(), "templateID"), seen);
    let (mut told, mut token) = (Vec::new(), None::<String>);
    loop {
        let mut query = vec![("limit", "1")];
        query.extend(token.as_deref().map(|token| ("nextToken", token)));
        let page = client.get_with("/v2/templates", &query).await;
        let next = page.headers.get("x-next-token");
        token = next.map(|next| next.to_str().unwrap().to_owned());
        told.extend(ids(&page.ok(), "templateID"));
        if token.is_none() {
            break;
        }
    }
    assert_eq!(told, seen);
    for (list, query) in [("/v1/templates", "cursor"), ("/v2/templates", "nextToken")] {
        client.get_with(list, &[(query, "nothing")]).await.expect(400);
    }
}

async fn a_dockerfile_becomes_a_template(server: &Server) {
    let dockerfile = "ARG WHO=nobody\nFROM base\nARG WHO\nENV GREETED=$WHO\nCOPY greeting.txt /srv/\n\
                      RUN sed -i s/NAME/$WHO/ /srv/greeting.txt && id -un > /srv/by\nWORKDIR /srv\n";
    let context = archive(&[
        ("Dockerfile", dockerfile.as_bytes()),
        ("greeting.txt", b"hello NAME\n"),
    ]);
    let events = build(
        server,
        "build-context",
        &[("name", "greeter"), ("arg", "WHO=world")],
        context,
    )
    .await;
    let template = built(&events);
    assert_eq!(template["names"], json!(["greeter"]));
    assert_eq!(
        (&template["source"]["kind"], &template["workdir"]),
        (&json!("dockerfile"), &json!("/srv"))
    );
    assert!(events.iter().any(|event| event.name == "progress"), "{events:?}");
    assert_eq!(names(server).await, ["base", "greeter"]);

    let sandbox = server.sandbox_with(&json!({"template": "greeter"})).await;
    assert_eq!(
        sandbox.sh("pwd; cat greeting.txt; echo $GREETED").await.ok(),
        "/srv\nhello world\nworld\n"
    );
    assert_eq!(
        sandbox.sh("python3 -c 'print(6 * 7)'").await.ok(),
        "42\n",
        "it is base underneath"
    );
    // In use: the name and the image stay.
    let client = server.client();
    client
        .delete("/v1/templates/greeter")
        .await
        .refused(409, "template_in_use");
    sandbox.kill().await;
    client.delete("/v1/templates/greeter").await.expect(204);
    client
        .get("/v1/templates/greeter")
        .await
        .refused(404, "template_not_found");
    let gone = server.request(&json!({"template": "greeter"}));
    assert_eq!(client.post("/v1/sandboxes", &gone).await.status, 404);
    assert_eq!(names(server).await, ["base"]);
    server.sandbox().await.assert_works().await;
    for kind in ["template.built", "template.deleted"] {
        let facts = facts_of_kind(server, kind).await;
        assert_eq!(facts.len(), 1, "{facts:?}");
        assert_eq!(facts[0]["data"]["template"], template["id"]);
    }
}

/// What is built on a template takes as much as it changes, and is all there: files of the base and of each step, run, mapped,
/// saved and brought back, in a sandbox and in its copy.
async fn what_is_built_on_a_template_is_a_layer(server: &Server) {
    let client = server.client();
    let base = client.get("/v1/templates/base").await.ok();
    assert_eq!(base["layer_bytes"], Value::Null);
    let of = async |name: &str, steps: &str| {
        let dockerfile = format!("FROM base\n{steps}");
        let context = archive(&[("Dockerfile", dockerfile.as_bytes())]);
        built(&build(server, "build-context", &[("name", name)], context).await)
    };
    let own = |template: &Value| template["layer_bytes"].as_u64().unwrap_or(0);
    let nothing = of("nothing", "RUN true\n").await;
    assert!(own(&nothing) < 1 << 20, "{nothing}");
    let mut steps = String::new();
    for step in 0..10 {
        steps += &format!("RUN echo {step} > /opt/step-{step} && cp /bin/true /opt/true-{step}\n");
    }
    steps += "RUN rm -r /opt/step-3 /usr/share/doc && chmod 711 /bin/sleep && mkdir /usr/share/doc && touch /usr/share/doc/new\n";
    // A directory of the base that is renamed, and a file with a hole.
    steps += "RUN mv /usr/share/common-licenses /opt/licenses && truncate -s 1M /opt/hole && echo end >> /opt/hole\n";
    let many = of("many", &steps).await;
    assert!(own(&many) < 2 << 20, "{many}");
    let whole = many["size_bytes"].as_u64().unwrap();
    assert!(whole < base["size_bytes"].as_u64().unwrap() + (4 << 20), "{many}");

    let look = "cat /opt/step-*; for t in /opt/true-*; do $t || echo failed; done; ls /usr/share/doc; stat -c %a /bin/sleep; \
        head -c 9 /opt/licenses/BSD; ls /usr/share/common-licenses 2>&1 | wc -l; cat /opt/hole | tr -d '\\0'; stat -c %s /opt/hole";
    let seen = "0\n1\n2\n4\n5\n6\n7\n8\n9\nnew\n711\nCopyright1\nend\n1048580\n";
    let sandbox = server.sandbox_with(&json!({"template": "many"})).await;
    assert_eq!(sandbox.sh(look).await.ok(), seen);
    sandbox.ask("/pause", json!({})).await.ok();
    sandbox.ask("/resume", json!({})).await.ok();
    assert_eq!(sandbox.sh(look).await.ok(), seen);
    sandbox.kill().await;

    // One on top of that, under the same name: the old one is of no use to anybody, and still what this one lies on.
    let context = archive(&[("Dockerfile", b"FROM many\nRUN rm /opt/true-1\n")]);
    let next = built(&build(server, "build-context", &[("name", "many")], context).await);
    assert_ne!(next["digest"], many["digest"]);
    client.post("/v1/templates/prune", &json!({})).await.ok();
    let sandbox = server.sandbox_with(&json!({"template": "many"})).await;
    assert_eq!(sandbox.sh("ls /opt/true-1 || cat /opt/step-9").await.ok(), "9\n");
    // Nor does it lose its base when that has no name any more.
    client
        .delete("/v1/templates/many")
        .await
        .refused(409, "template_in_use");
    sandbox.kill().await;
    client.delete("/v1/templates/many").await.expect(204);
    client.delete("/v1/templates/nothing").await.expect(204);
    client.post("/v1/templates/prune", &json!({})).await.ok();
}

async fn builds_that_fail_say_where(server: &Server) {
    for (dockerfile, said) in [
        ("FROM base\nRUN echo out of luck && exit 3\n", "exit 3"),
        ("FROM base\nCOPY missing.txt /\n", "missing.txt"),
        ("FROM base\nBAKE a cake\n", "BAKE"),
        (
            "FROM no-such-template-or-image:latest\n",
            "no-such-template-or-image",
        ),
    ] {
        let context = archive(&[("Dockerfile", dockerfile.as_bytes())]);
        let events = build(server, "build-context", &[("name", "broken")], context).await;
        let last = events.last().unwrap();
        assert_eq!(last.name, "error", "{dockerfile}: {events:?}");
        assert!(
            last.data["message"].as_str().unwrap().contains(said),
            "{dockerfile}: {last:?}"
        );
    }
    let events = build(
        server,
        "build-archive",
        &[("name", "broken")],
        b"not an archive".to_vec(),
    )
    .await;
    assert_eq!(events.last().unwrap().name, "error", "{events:?}");
    assert_eq!(names(server).await, ["base"]);
    assert_eq!(facts_of_kind(server, "template.built").await, Vec::<Value>::new());
}

async fn an_archive_becomes_a_template(server: &Server) {
    let size = json!({"memory_bytes": 200 << 20}).to_string();
    let query = [("name", "tiny"), ("resources", size.as_str())];
    let template = built(&build(server, "build-archive", &query, docker_save("one")).await);
    assert_eq!(template["source"]["kind"], "image");
    assert_eq!(template["resources"]["memory_bytes"], 200 << 20);
    assert_eq!(
        (
            &template["env"]["MAKER"],
            &template["workdir"],
            &template["exposed_ports"]
        ),
        (&json!("one"), &json!("/etc"), &json!([8080]))
    );
    // There is nothing in it that could be run; files can be looked at all the same.
    let sandbox = server.sandbox_with(&json!({"template": "tiny"})).await;
    assert_eq!(sandbox.read("/etc/maker").await, b"one");
    // The name moves; what was made from the old one stays as it was.
    let second = built(&build(server, "build-archive", &[("name", "tiny")], docker_save("two")).await);
    assert_ne!(second["id"], template["id"]);
    assert_eq!(sandbox.read("/etc/maker").await, b"one");
    let fresh = server.sandbox_with(&json!({"template": "tiny"})).await;
    assert_eq!(fresh.read("/etc/maker").await, b"two");
    // Pruning spares what a sandbox uses, and takes it when that is gone.
    let client = server.client();
    let old = format!("/v1/templates/{}", template["id"].as_str().unwrap());
    client.post("/v1/templates/prune", &json!({})).await.ok();
    client.get(&old).await.expect(200);
    sandbox.kill().await;
    let pruned = client.post("/v1/templates/prune", &json!({})).await.ok();
    assert!(pruned["freed_bytes"].as_u64().unwrap() > 0, "{pruned}");
    client.get(&old).await.refused(404, "template_not_found");
    assert_eq!(fresh.read("/etc/maker").await, b"two");
    let nothing = client.post("/v1/templates/prune", &json!({})).await.ok();
    assert_eq!(nothing["freed_bytes"], 0);
}

async fn templates_at_the_command_line(server: &Server) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tiny.tar");
    std::fs::write(&file, docker_save("cli")).unwrap();
    let image = format!("docker-archive:{}", file.display());
    let told = printed(&server.atoll(&["template", "build", "tiny", "--image", &image]));
    assert!(told.starts_with("tiny: tpl_"), "{told}");
    for (word, shared) in [("share", true), ("unshare", false)] {
        printed(&server.atoll(&["template", word, "tiny"]));
        let shown = printed(&server.atoll(&["template", "inspect", "tiny"]));
        let shown: Value = serde_json::from_str(&shown).unwrap();
        assert_eq!(shown["shared"], json!(shared), "{shown}");
        assert!(shown["project"].is_string(), "it stays the project's: {shown}");
    }
    let context = dir.path().join("app");
    std::fs::create_dir(&context).unwrap();
    std::fs::write(context.join("note"), "copied").unwrap();
    std::fs::write(
        context.join("Dockerfile"),
        "FROM tiny\nARG TEXT\nENV TEXT=$TEXT\nCOPY note /etc/note\n",
    )
    .unwrap();
    let app = context.to_str().unwrap();
    let told = printed(&server.atoll(&[
        "template",
        "build",
        "app",
        "--dockerfile",
        app,
        "--build-arg",
        "TEXT=given",
        "--memory",
        "300M",
        "--json",
    ]));
    let template: Value = serde_json::from_str(&told).unwrap();
    assert_eq!(template["env"]["TEXT"], "given", "{template}");
    assert_eq!(template["resources"]["memory_bytes"], 300 << 20, "{template}");

    let listed = printed(&server.atoll(&["template", "list"]));
    for name in ["base", "tiny", "app"] {
        assert!(listed.contains(name), "{name} in {listed}");
    }
    let shown: Value =
        serde_json::from_str(&printed(&server.atoll(&["template", "inspect", "app"]))).unwrap();
    assert_eq!(shown, template);
    let created = printed(&server.atoll(&[
        "create",
        "--isolation",
        server.tier.name(),
        "--template",
        "app",
        "--json",
    ]));
    let created: Value = serde_json::from_str(&created).unwrap();
    assert_eq!(created["resources"], template["resources"]);
    let sandbox = Sandbox::of(server.client(), &created);
    assert_eq!(sandbox.read("/etc/note").await, b"copied");

    let in_use = server.atoll(&["template", "delete", "app"]);
    let text = String::from_utf8(in_use.stderr).unwrap();
    assert!(!in_use.status.success() && text.contains("in use"), "{text}");
    sandbox.kill().await;
    printed(&server.atoll(&["template", "delete", "app"]));
    printed(&server.atoll(&["template", "delete", "tiny"]));
    let gone = server.atoll(&["template", "inspect", "app"]);
    assert!(!gone.status.success() && gone.stdout.is_empty(), "{gone:?}");
    assert_eq!(names(server).await, ["base"]);
    let freed = printed(&server.atoll(&["template", "prune"]));
    assert!(freed.contains("freed"), "{freed}");
    let broken = server.atoll(&[
        "template",
        "build",
        "x",
        "--image",
        "docker-archive:/no/such/file",
    ]);
    let text = String::from_utf8(broken.stderr).unwrap();
    assert!(
        !broken.status.success() && text.contains("/no/such/file"),
        "{text}"
    );
}

async fn a_template_comes_up_running(server: &Server) {
    let start = json!({"argv": ["python3", "-m", "http.server", "--bind", "127.0.0.1", "8123"], "ready": {"port": 8123}});
    let context = archive(&[("Dockerfile", b"FROM base\nWORKDIR /etc\n")]);
    let query = [("name", "serving"), ("start", &start.to_string())];
    built(&build(server, "build-context", &query, context).await);
    let keep = || {
        server
            .client()
            .post("/v1/templates/serving/running", &Value::Null)
    };
    if server.tier == atoll_proof::Tier::Jail {
        keep().await.refused(422, "memory_not_supported");
        return;
    }
    server
        .client()
        .post("/v1/templates/base/running", &Value::Null)
        .await
        .refused(400, "template_has_no_start");
    let kept = keep().await.expect(201).json();
    assert_eq!(kept["kind"], "memory");
    server.assert_nothing_held().await;

    let mut pids = std::collections::BTreeSet::new();
    for _ in 0..2 {
        let sandbox = server.sandbox_with(&json!({"template": "serving"})).await;
        let answer = sandbox
            .sh("curl -s http://127.0.0.1:8123/hostname; hostname; pgrep -f http.serve[r]")
            .await
            .ok();
        let lines: Vec<&str> = answer.lines().collect();
        assert_eq!(
            lines[lines.len() - 2],
            sandbox.bare(),
            "an identity of its own: {answer}"
        );
        pids.insert(lines[lines.len() - 1].to_owned());
        sandbox.kill().await;
    }
    assert_eq!(pids.len(), 1, "they are copies of one process: {pids:?}");
    // What its start command must see is started after it.
    let own = server
        .sandbox_with(&json!({"template": "serving", "env": {"X": "y"}}))
        .await;
    assert!(
        own.sh("tr '\\0' '\\n' < /proc/$(pgrep -f http.serve[r])/environ")
            .await
            .ok()
            .contains("X=y")
    );
    own.kill().await;
    server.client().delete("/v1/templates/serving").await.expect(204);
    let left = server.client().post("/v1/gc", &json!({})).await.ok();
    assert_eq!(left["unreadable"], json!([]));
    server
        .client()
        .get(&format!("/v1/snapshots/{}", kept["id"].as_str().unwrap()))
        .await
        .refused(404, "snapshot_not_found");
}
