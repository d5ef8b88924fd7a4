//! E2B's options for what leaves a sandbox: what they mean there is what arrives here.

use atoll_proof::{Sandbox, Server, Value, World, json};
use reqwest::Method;

use crate::{assert_refused, get};

in_a_world!(
    sandboxes_reach_the_internet_unless_they_say_otherwise,
    what_is_allowed_wins_over_what_is_denied,
    headers_are_put_in_on_the_way_out,
    what_a_running_sandbox_reaches_is_replaced,
);

const VALUE: &str = "a-token-that-only-the-host-sees-5150";

/// A sandbox as E2B's SDKs ask for it, which trusts whoever signs in the world.
async fn made(server: &Server, world: &World, mut body: Value) -> Sandbox {
    body["templateID"] = json!("base");
    let made = server
        .client()
        .post("/v2/sandboxes", &body)
        .await
        .expect(201)
        .json();
    let sandbox = Sandbox {
        client: server.client().clone(),
        id: format!("sbx_{}", made["sandboxID"].as_str().unwrap()),
    };
    let authority = std::fs::read(world.authority()).unwrap();
    sandbox.write("/home/user/world.pem", &authority).await;
    sandbox
}

async fn put(sandbox: &Sandbox, body: &Value) {
    let path = format!("/sandboxes/{}/network", sandbox.bare());
    let request = sandbox.client.request(Method::PUT, &path).json(body);
    sandbox.client.send(request).await.expect(204);
}

async fn assert_reaches(sandbox: &Sandbox, rest: &str) {
    let (status, body) = get(sandbox, rest).await;
    assert_eq!(status, 200, "{rest}: {body}");
}

async fn sandboxes_reach_the_internet_unless_they_say_otherwise(server: &mut Server, world: &World) {
    let open = made(server, world, json!({"allow_internet_access": true})).await;
    assert_reaches(&open, "https://api.example.org/").await;
    // What is never public stays closed.
    assert_refused(&open, "http://10.0.0.5/").await;
    assert_refused(&open, "http://169.254.169.254/").await;
    let shown = server
        .client()
        .get(&format!("/sandboxes/{}", open.bare()))
        .await
        .ok();
    assert_eq!(shown["allowInternetAccess"], true);
    let closed = made(server, world, json!({"allow_internet_access": false})).await;
    assert_refused(&closed, "https://api.example.org/").await;
    let shown = server
        .client()
        .get(&format!("/sandboxes/{}", closed.bare()))
        .await
        .ok();
    assert_eq!(shown["allowInternetAccess"], false);
    // Our own wire allows nothing by itself.
    assert_refused(&server.sandbox_with(&json!({})).await, "https://api.example.org/").await;
}

async fn what_is_allowed_wins_over_what_is_denied(server: &mut Server, world: &World) {
    let network = json!({"denyOut": ["0.0.0.0/0"], "allowOut": ["api.example.org", "203.0.113.20"]});
    let listed = made(server, world, json!({"network": network})).await;
    assert_reaches(&listed, "https://api.example.org/").await;
    assert_reaches(&listed, "http://203.0.113.20/").await;
    assert_refused(&listed, "http://203.0.113.10/").await;
    assert_refused(&listed, "https://bulk.example.org/").await;

    let network = json!({"denyOut": ["203.0.113.0/24"], "allowOut": ["203.0.113.20/32"]});
    let but = made(server, world, json!({"network": network})).await;
    assert_reaches(&but, "http://203.0.113.20/").await;
    assert_refused(&but, "http://203.0.113.10/").await;
    // By whatever name.
    assert_refused(&but, "http://bulk.example.org/").await;
    assert_reaches(&but, "http://other.example.org/").await;
}

async fn headers_are_put_in_on_the_way_out(server: &mut Server, world: &World) {
    let transform = json!({"transform": {"headers": {"X-Token": VALUE}}});
    let network = json!({"rules": {"api.example.org": [transform]}});
    let sandbox = made(server, world, json!({"network": network, "metadata": {"a": "b"}})).await;
    let token = |path: &str| {
        let seen = world.saw("http");
        let found = seen.iter().rev().find(|one| one["path"] == path);
        found.expect("it arrived")["headers"]["x-token"].clone()
    };
    // The request is read, so the sandbox trusts whoever reads it.
    sandbox
        .sh("curl -sS -m 20 -o /dev/null https://api.example.org/one")
        .await
        .ok();
    assert_eq!(token("/one"), VALUE);
    assert_reaches(&sandbox, "https://bulk.example.org/two").await;
    assert_eq!(token("/two"), Value::Null);
    // Not where everybody on the way could read it.
    sandbox
        .sh("curl -sS -m 20 -o /dev/null http://api.example.org/three")
        .await;
    assert!(
        !world
            .raw()
            .contains(&format!("/three\",\"headers\":{{\"x-token\":\"{VALUE}"))
    );
    assert!(
        !server
            .client()
            .get("/v1/secrets")
            .await
            .ok()
            .to_string()
            .contains(VALUE)
    );
    // It goes with the sandbox.
    let count = async || {
        server.client().get("/v1/secrets").await.ok()["items"]
            .as_array()
            .unwrap()
            .len()
    };
    assert_eq!(count().await, 1);
    sandbox.kill().await;
    atoll_proof::wait::until(
        "the header's value to be gone",
        std::time::Duration::from_secs(20),
        || async { (count().await == 0).then_some(()) },
    )
    .await;
}

async fn what_a_running_sandbox_reaches_is_replaced(server: &mut Server, world: &World) {
    let sandbox = made(server, world, json!({})).await;
    assert_reaches(&sandbox, "http://203.0.113.10/").await;
    put(&sandbox, &json!({"denyOut": ["203.0.113.10"]})).await;
    assert_refused(&sandbox, "http://203.0.113.10/").await;
    assert_reaches(&sandbox, "http://203.0.113.20/").await;
    put(&sandbox, &json!({})).await;
    assert_reaches(&sandbox, "http://203.0.113.10/").await;
    put(&sandbox, &json!({"allow_internet_access": false})).await;
    assert_refused(&sandbox, "http://203.0.113.20/").await;
}
