//! What lies on the disk is not what was written there.

use std::path::Path;

use atoll_proof::{MIB, Sandbox, Server, Value, json, on_every_tier};

use super::{
    Counter, Kind, ask, assert_no_leaks, manifests, news, packs, pause, resume, settled, snapshot, vault,
};

// Damage is an error for the operator, too.
on_every_tier!(with atoll_proof::Options::default().with_errors();
    damaged_state_is_refused_and_harms_nobody,
    a_damaged_snapshot_makes_no_sandbox,
);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Damage {
    Flip,
    Truncate,
    Remove,
}

fn damage(path: &Path, how: Damage) {
    let mut bytes = std::fs::read(path).unwrap();
    let middle = bytes.len() / 2;
    match how {
        Damage::Flip => {
            bytes[middle] ^= 1;
            std::fs::write(path, bytes).unwrap();
        }
        Damage::Truncate => std::fs::write(path, &bytes[..middle]).unwrap(),
        Damage::Remove => std::fs::remove_file(path).unwrap(),
    }
}

/// Puts bytes into a sandbox that no other has, so that what is saved of it is for the most part its own.
async fn fill(sandbox: &Sandbox) {
    let made = sandbox
        .sh("head -c 8388608 /dev/urandom > /home/user/random && sync")
        .await;
    made.ok();
    assert_eq!(
        sandbox.stat("/home/user/random").await["size_bytes"],
        json!(8 * MIB)
    );
}

/// Pauses a sandbox and returns the names of its manifest and pack.
async fn pause_and_find(server: &Server, sandbox: &Sandbox) -> (String, String) {
    let before = (manifests(server), packs(server));
    pause(sandbox).await;
    (
        news(&before.0, &manifests(server)),
        news(&before.1, &packs(server)),
    )
}

async fn refused(sandbox: &Sandbox, codes: &[&str]) {
    for word in ["resume", "fork"] {
        let kind = sandbox.get().await["saved"]["kind"].clone();
        let body = if word == "fork" {
            json!({"kind": kind})
        } else {
            json!({})
        };
        let answer = ask(sandbox, word, &body).await;
        let detail = answer.error();
        let code = detail["code"].as_str().unwrap();
        assert!(codes.contains(&code), "{word}: {answer:?}");
        assert_eq!(sandbox.state().await, "paused");
    }
}

async fn damaged_state_is_refused_and_harms_nobody(server: &mut Server) {
    let running = server.sandbox().await;
    let mut other = server.sandbox().await;
    let mut counter = None;
    if Kind::most(server.tier) == Kind::Memory {
        counter = Some(Counter::start(&other, "counter").await);
    }
    other.write("/home/user/note", b"kept").await;
    let cases = [
        ("packs", Damage::Flip, "saved_state_damaged"),
        ("packs", Damage::Truncate, "saved_state_damaged"),
        ("packs", Damage::Remove, "saved_state_damaged"),
        ("manifests", Damage::Flip, "saved_state_damaged"),
        ("manifests", Damage::Truncate, "saved_state_damaged"),
        ("manifests", Damage::Remove, "saved_state_lost"),
    ];
    for (place, how, code) in cases {
        eprintln!("{how:?} one of {place}");
        // Saved first, so that it refers to nothing of the one that is damaged.
        pause(&other).await;
        let victim = server.sandbox().await;
        fill(&victim).await;
        let (manifest, pack) = pause_and_find(server, &victim).await;
        let file = if place == "packs" { pack } else { manifest.clone() };
        damage(&vault(server).join(place).join(file), how);
        refused(&victim, &[code]).await;
        // It is no better after a restart, and the server starts.
        server.kill_9();
        server.start_again().await;
        let (victim, running) = (server.again(&victim), server.again(&running));
        other = server.again(&other);
        assert_eq!(victim.state().await, "paused");
        refused(&victim, &[code]).await;
        running.assert_works().await;
        resume(&other).await;
        assert_eq!(other.read("/home/user/note").await, b"kept");
        if let Some(counter) = &mut counter {
            counter.goes_on(&other).await;
        }
        if place == "manifests" && how != Damage::Remove {
            let garbage: Value = server.client().post("/v1/gc", &json!({})).await.ok();
            assert_eq!(garbage["unreadable"], json!([manifest]), "{garbage}");
        }
        assert_eq!(victim.kill().await["state"], "deleted");
        assert_no_leaks(server).await;
    }
}

async fn a_damaged_snapshot_makes_no_sandbox(server: &mut Server) {
    let sandbox = server.sandbox().await;
    fill(&sandbox).await;
    for kind in [Kind::most(server.tier), Kind::Files] {
        let before = packs(server);
        let id = snapshot(&sandbox, "damaged", kind).await;
        damage(
            &vault(server).join("packs").join(news(&before, &packs(server))),
            Damage::Flip,
        );
        let create = server.request(&json!({"template": "damaged"}));
        let refused = server.client().post("/v1/sandboxes", &create).await;
        refused.refused(500, "saved_state_damaged");
        assert_eq!(settled(server).await.len(), 1, "nothing of it is left");
        // The export is cut short rather than wrong.
        let export = server
            .client()
            .request(reqwest::Method::GET, "/v1/snapshots/damaged/export");
        let got = server.client().try_send(export).await;
        assert!(
            got.is_err(),
            "it was sent as if it were whole: {} bytes",
            got.unwrap().body.len()
        );
        server
            .client()
            .delete(&format!("/v1/snapshots/{id}"))
            .await
            .expect(204);
        sandbox.assert_works().await;
        assert_no_leaks(server).await;
        // Something new, so that the next save has a pack of its own.
        fill(&sandbox).await;
    }
}
