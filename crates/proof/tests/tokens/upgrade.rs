//! What earlier versions handed out, shown to this one.

use atoll_proof::{Server, json, on_every_tier};
use sha2::{Digest as _, Sha256};

use crate::doors::signed;

on_every_tier!(with atoll_proof::Options::default().own_templates();
    tokens_of_an_earlier_version_open_nothing
);

/// As earlier versions derived their tokens; one was for ports and for the agent.
fn earlier(secret: &[u8], label: &str, about: &str) -> String {
    let mut hasher = Sha256::new();
    hasher.update(secret);
    hasher.update(label);
    hasher.update(about);
    hasher.finalize()[..20]
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

/// A data directory of an earlier version, with a sandbox that goes on.
async fn tokens_of_an_earlier_version_open_nothing(server: &mut Server) {
    let sandbox = server.sandbox().await;
    let volume = server.client().post("/volumes", &json!({"name": "v"})).await;
    let volume = volume.expect(201).json()["volumeID"].as_str().unwrap().to_owned();
    server.kill_9();
    let secret = [7; 32];
    let data = server.data();
    std::fs::remove_file(data.join("tokens.secret")).unwrap();
    std::fs::write(data.join("port-token.secret"), secret).unwrap();
    server.start_again().await;
    assert!(!data.join("port-token.secret").exists());

    let old = format!("atp_{}", earlier(&secret, "port-token\0", &sandbox.id));
    let client = server.client().with_key(None);
    let own = client.authority().rsplit_once(':').unwrap().1;
    let host = |port: u16| format!("{port}-{}.localhost:{own}", sandbox.bare());
    let at = |path: &str| client.request(reqwest::Method::GET, path);
    let port = at("/").header("host", host(8000)).header("x-atoll-token", &old);
    client.send(port).await.refused(401, "invalid_port_token");
    let agent = at("/files?path=/etc/hostname")
        .header("host", host(49983))
        .header("x-access-token", &old);
    client.send(agent).await.expect(401);
    let signature = signed(&format!("/etc/hostname:read::{old}"));
    client
        .get(&format!("/files?path=/etc/hostname&signature={signature}"))
        .await
        .expect(401);
    let models = format!(
        "ats_{}{}",
        sandbox.bare(),
        earlier(&secret, "call-model\0", &sandbox.id)
    );
    client.with_key(Some(&models)).get("/v1/models").await.expect(401);
    let files = format!("atv_{}", earlier(&secret, "volume-token\0", &volume));
    let content = format!("/volumecontent/{volume}/dir?path=/");
    client.with_key(Some(&files)).get(&content).await.expect(401);

    // Whoever asks again is let in, and the sandbox has lost nothing.
    let sandbox = server.again(&sandbox);
    sandbox.assert_works().await;
    let connect = format!("/sandboxes/{}/connect", sandbox.bare());
    let made = server.client().post(&connect, &json!({"timeout": 60})).await.ok();
    let token = made["envdAccessToken"].as_str().unwrap();
    let agent = at("/files?path=/etc/hostname")
        .header("host", host(49983))
        .header("x-access-token", token);
    client.send(agent).await.expect(200);
    server
        .client()
        .delete(&format!("/volumes/{volume}"))
        .await
        .expect(204);
}
