//! Watching files: what happens arrives as it happens.

use atoll_proof::stream::Events;
use atoll_proof::{Server, json, on_every_tier};

on_every_tier!(changes_arrive, below_too_if_asked, watching_nothing_is_refused);

/// Reads on until an event of this kind and name came.
async fn expect(events: &mut Events, kind: &str, name: &str) -> serde_json::Value {
    let mut seen = Vec::new();
    loop {
        let event = events
            .next()
            .await
            .unwrap_or_else(|| panic!("the watch ended before {kind} {name}; seen: {seen:?}"));
        assert_eq!(event.name, "changed", "{event:?}");
        if event.data["kind"] == json!(kind) && event.data["name"] == json!(name) {
            return event.data;
        }
        seen.push(event.data);
    }
}

async fn changes_arrive(server: &Server) {
    let sandbox = server.sandbox().await;
    sandbox.sh("mkdir /tmp/w").await.ok();
    let mut events = sandbox.watch("/tmp/w", false).await;
    sandbox.sh("echo hello > /tmp/w/a").await.ok();
    expect(&mut events, "created", "a").await;
    expect(&mut events, "written", "a").await;
    sandbox.sh("mv /tmp/w/a /tmp/w/b").await.ok();
    expect(&mut events, "renamed_from", "a").await;
    expect(&mut events, "renamed_to", "b").await;
    sandbox.sh("chmod 600 /tmp/w/b").await.ok();
    expect(&mut events, "attributes", "b").await;
    sandbox.sh("rm /tmp/w/b; mkdir /tmp/w/dir").await.ok();
    expect(&mut events, "removed", "b").await;
    let made = expect(&mut events, "created", "dir").await;
    assert_eq!(made["directory"], true);
    sandbox.write("/tmp/w/api", b"x").await;
    loop {
        let event = events.next().await.unwrap();
        if event.data["name"] == "api" {
            break;
        }
    }
}

async fn below_too_if_asked(server: &Server) {
    let sandbox = server.sandbox().await;
    sandbox.sh("mkdir -p /tmp/w/old/deep").await.ok();
    let mut events = sandbox.watch("/tmp/w", true).await;
    sandbox.sh("touch /tmp/w/old/deep/file").await.ok();
    expect(&mut events, "created", "old/deep/file").await;
    // A directory that is made later is watched from then on.
    sandbox.sh("mkdir -p /tmp/w/new/er").await.ok();
    expect(&mut events, "created", "new").await;
    // Made so quickly after its parent that nobody watched yet: it is told all the same.
    expect(&mut events, "created", "new/er").await;
    sandbox.sh("echo x > /tmp/w/new/er/file").await.ok();
    expect(&mut events, "written", "new/er/file").await;
}

async fn watching_nothing_is_refused(server: &Server) {
    let sandbox = server.sandbox().await;
    let refused = sandbox.files_get("/watch", "/no/such/dir", &[]).await;
    assert_eq!(refused.status, 404, "{refused:?}");
    // A watch that is left behind does not keep the sandbox from ending.
    let events = sandbox.watch("/tmp", true).await;
    sandbox.kill().await;
    let rest = events.rest().await;
    if let Some(last) = rest.last() {
        assert_eq!(last.name, "error", "{rest:?}");
    }
}
