//! A request through any door wakes a sandbox that rests and asks for that, and none wakes one that does not.

use atoll_proof::{Answer, Sandbox, Server, Value, json, on_every_tier};
use reqwest::Method;

on_every_tier!(
    every_door_of_our_own_wakes_what_asks_for_it,
    every_door_of_e2b_wakes_what_asks_for_it,
);

async fn pause(sandbox: &Sandbox) {
    sandbox.ask("/pause", json!({})).await.ok();
}

/// To a port of a sandbox, as a browser that resolves `*.localhost` by itself would send it.
async fn to_port(
    sandbox: &Sandbox,
    port: u16,
    method: Method,
    path: &str,
    headers: &[(&str, &str)],
    body: Option<Value>,
) -> Answer {
    let client = sandbox.client.with_key(None);
    let own = client.authority().rsplit_once(':').unwrap().1;
    let host = format!("{port}-{}.localhost:{own}", sandbox.bare());
    let mut request = client.request(method, path).header("host", host);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    if let Some(body) = body {
        request = request.json(&body);
    }
    client.send(request).await
}

async fn every_door_of_our_own_wakes_what_asks_for_it(server: &Server) {
    let sandbox = server.sandbox_with(&json!({"auto_resume": true})).await;
    let stubborn = server.sandbox().await;
    sandbox.write("/home/user/kept", b"kept").await;
    let token = sandbox.client.get(&sandbox.path("/ports/8000")).await.ok();
    let token = token["token"].as_str().unwrap().to_owned();
    pause(&stubborn).await;
    let get = async |sandbox: &Sandbox, path: &str| sandbox.client.get(&sandbox.path(path)).await;
    for door in [
        "exec", "read", "list", "stat", "commands", "ports", "port", "proxy",
    ] {
        let knock = async |sandbox: &Sandbox| match door {
            "exec" => sandbox.exec(&json!({"cmd": "true"})).await,
            "read" => get(sandbox, "/files/content?path=/home/user/kept").await,
            "list" => get(sandbox, "/files?path=/home/user").await,
            "stat" => get(sandbox, "/files/stat?path=/home/user/kept").await,
            "commands" => get(sandbox, "/commands").await,
            "ports" => get(sandbox, "/ports").await,
            "port" => get(sandbox, "/ports/8000").await,
            // Nobody listens there; it is woken to find that out.
            _ => {
                to_port(
                    sandbox,
                    8000,
                    Method::GET,
                    "/",
                    &[("x-atoll-token", &token)],
                    None,
                )
                .await
            }
        };
        pause(&sandbox).await;
        knock(&sandbox).await;
        assert_eq!(sandbox.state().await, "running", "{door}");
        let refused = knock(&stubborn).await;
        assert!(refused.status >= 400, "{door}: {refused:?}");
        assert_eq!(stubborn.state().await, "paused", "{door}");
    }
    // To look at it is no use of it.
    pause(&sandbox).await;
    for look in ["", "/facts", "/usage", "/instances", "/network"] {
        get(&sandbox, look).await.ok();
    }
    assert_eq!(sandbox.state().await, "paused");
}

async fn every_door_of_e2b_wakes_what_asks_for_it(server: &Server) {
    let asked = json!({
        "templateID": "base", "timeout": 300, "secure": true, "autoPause": true, "autoResume": {"enabled": true},
    });
    let made = server
        .client()
        .post("/sandboxes", &asked)
        .await
        .expect(201)
        .json();
    let id = format!("sbx_{}", made["sandboxID"].as_str().unwrap());
    let sandbox = Sandbox::of(server.client(), &json!({ "id": id }));
    let token = made["envdAccessToken"].as_str().unwrap();
    let shown = [("x-access-token", token)];
    let first = sandbox.get().await["deadline"].as_str().unwrap().to_owned();
    let agent = async |path: &str, headers: &[(&str, &str)], body: Option<Value>| {
        let method = body.as_ref().map_or(Method::GET, |_| Method::POST);
        to_port(&sandbox, 49983, method, path, headers, body).await
    };
    // Knocking without the key wakes nothing.
    pause(&sandbox).await;
    agent("/health", &[], None).await.expect(403);
    agent("/files?path=/etc/hostname", &[], None).await.expect(401);
    assert_eq!(sandbox.state().await, "paused");

    sandbox.ask("/resume", json!({"timeout_ms": 60_000})).await.ok();
    for door in ["health", "files", "processes", "directories", "port"] {
        pause(&sandbox).await;
        match door {
            "health" => agent("/health", &shown, None).await.expect(204),
            "files" => agent("/files?path=/etc/hostname", &shown, None).await.expect(200),
            "processes" => agent("/process.Process/List", &shown, Some(json!({})))
                .await
                .expect(200),
            "directories" => {
                let body = json!({"path": "/etc", "depth": 1});
                agent("/filesystem.Filesystem/ListDir", &shown, Some(body))
                    .await
                    .expect(200)
            }
            // Nobody listens there.
            _ => to_port(&sandbox, 8000, Method::GET, "/", &[], None).await,
        };
        let woken = sandbox.get().await;
        assert_eq!(woken["state"], "running", "{door}");
        // As E2B has it, a whole lifetime begins, though less was left.
        assert!(
            woken["deadline"].as_str().unwrap() > first.as_str(),
            "{door}: {woken}"
        );
    }
}
