//! What leaves a sandbox, and with which secrets: on every tier, against real servers in a world of the test's own
//! ([`atoll_proof::World`]).
//!
//! What must hold: what arrived is asked of the world. A refusal that Atoll reports proves nothing.

#![allow(clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]

/// Makes one test per tier of each function `async fn name(server: &mut Server, world: &World)`.
macro_rules! in_a_world {
    ($($name:ident),+ $(,)?) => {
        mod gvisor {
            $(#[tokio::test] async fn $name() {
                $crate::visit(atoll_proof::Tier::Gvisor, super::$name).await;
            })+
        }
        mod jail {
            $(#[tokio::test] async fn $name() {
                $crate::visit(atoll_proof::Tier::Jail, super::$name).await;
            })+
        }
    };
}

mod attacks;
mod builds;
mod changes;
mod e2b;
mod names;
mod open;
mod packages;
mod proxy;
mod requests;
mod secrets;

use atoll_proof::{Answer, Options, Sandbox, Server, Tier, Value, World, json};
use reqwest::Method;

async fn visit(tier: Tier, test: impl AsyncFnOnce(&mut Server, &World)) {
    let Some(world) = World::enter() else { return };
    let options = Options::default().config(&world.config()).own_templates();
    atoll_proof::on(tier, options, async |server: &mut Server| {
        test(server, &world).await;
    })
    .await;
}

/// A policy with one allow for each of these.
fn allow(targets: &[&str]) -> Value {
    let rules: Vec<Value> = targets
        .iter()
        .map(|to| json!({"action": "allow", "to": to}))
        .collect();
    json!({ "rules": rules })
}

/// A sandbox with this policy, which trusts whoever signs in the world.
async fn sandbox(server: &Server, world: &World, network: Value) -> Sandbox {
    sandbox_with(server, world, json!({ "network": network })).await
}

async fn sandbox_with(server: &Server, world: &World, request: Value) -> Sandbox {
    let sandbox = server.sandbox_with(&request).await;
    let authority = std::fs::read(world.authority()).unwrap();
    sandbox.write("/home/user/world.pem", &authority).await;
    sandbox
}

/// `curl` that gives up soon, and trusts the world. Prints the status and then the body.
fn curl(rest: &str) -> String {
    format!("curl -sS -m 20 --cacert /home/user/world.pem -w '\\n%{{http_code}}' {rest}")
}

/// What `curl` got; asserts that it got something.
async fn get(sandbox: &Sandbox, rest: &str) -> (u16, String) {
    let out = sandbox.sh(&curl(rest)).await.ok();
    let (body, status) = out.rsplit_once('\n').expect("a status is printed last");
    (status.parse().unwrap(), body.to_owned())
}

/// Asserts that a request does not get through, one way or another, and gives what `curl` printed.
async fn assert_refused(sandbox: &Sandbox, rest: &str) -> String {
    let output = sandbox.sh(&curl(rest)).await;
    let refused = output.code != Some(0) || output.stdout.trim_end().ends_with("403");
    assert!(refused, "{rest} got through: {output:?}");
    format!("{}{}", output.stdout, output.stderr)
}

async fn set_network(sandbox: &Sandbox, body: &Value) -> Answer {
    let request = sandbox.client.request(Method::PUT, &sandbox.path("/network"));
    sandbox.client.send(request.json(body)).await
}

async fn set_secret(server: &Server, name: &str, body: &Value) -> Value {
    let request = server
        .client()
        .request(Method::PUT, &format!("/v1/secrets/{name}"));
    server.client().send(request.json(body)).await.ok()
}

/// The facts about a sandbox's network, oldest first, once they are written.
async fn log(sandbox: &Sandbox) -> Vec<Value> {
    let page = sandbox
        .client
        .get(&sandbox.path("/network/log?limit=1000"))
        .await
        .ok();
    page["items"].as_array().expect("a list").clone()
}

/// Waits for a fact about the network that fits.
async fn until_logged(sandbox: &Sandbox, what: &str, fits: impl Fn(&Value) -> bool) -> Value {
    atoll_proof::wait::until(what, std::time::Duration::from_secs(20), || async {
        log(sandbox).await.into_iter().find(|fact| fits(fact))
    })
    .await
}
