//! Snapshots and forks: state that is kept by name, and copies that go their own ways.

use atoll_proof::{Sandbox, Server, Tier, Value, json, on_every_tier};
use reqwest::Method;

on_every_tier!(
    a_snapshot_is_listed_used_and_deleted,
    what_did_not_change_is_stored_once,
    a_snapshot_travels_as_a_file,
    a_file_cannot_ask_for_a_weaker_wall,
    forks_go_their_own_ways,
    a_fork_is_all_or_none,
    names_and_kinds_are_checked,
    an_idempotency_key_finds_the_first_snapshot,
);

fn keeps_memory(server: &Server) -> bool {
    server.tier == Tier::Gvisor
}

async fn take(sandbox: &Sandbox, body: Value) -> Value {
    sandbox.ask("/snapshots", body).await.expect(201).json()
}

async fn a_snapshot_is_listed_used_and_deleted(server: &Server) {
    let original = server.sandbox().await;
    original.write("/home/user/kept", b"before").await;
    let taken = take(&original, json!({"name": "first"})).await;
    let kind = if keeps_memory(server) {
        "memory"
    } else {
        "filesystem"
    };
    assert_eq!((&taken["name"], &taken["kind"]), (&json!("first"), &json!(kind)));
    assert_eq!(taken["isolation"], server.tier.name());
    assert!(
        taken["runtime"]
            .as_str()
            .is_some_and(|runtime| !runtime.is_empty()),
        "{taken}"
    );
    original.write("/home/user/kept", b"after").await;
    original.assert_works().await;
    let second = take(&original, json!({"kind": "filesystem"})).await;
    assert_eq!(second["parent"], taken["id"]);
    let listed = server.client().get("/v1/snapshots").await.ok();
    assert_eq!(listed["items"].as_array().unwrap().len(), 2);
    assert_eq!(server.client().get("/v1/snapshots/first").await.ok(), taken);
    original.kill().await;

    let again = server.sandbox_with(&json!({"template": "first"})).await;
    assert_eq!(again.read("/home/user/kept").await, b"before");
    let later = server.sandbox_with(&json!({"template": second["id"]})).await;
    assert_eq!(later.read("/home/user/kept").await, b"after");
    server.client().delete("/v1/snapshots/first").await.expect(204);
    server
        .client()
        .get("/v1/snapshots/first")
        .await
        .refused(404, "snapshot_not_found");
    again.assert_works().await;

    // Of one that rests, too.
    again.ask("/pause", json!({})).await.ok();
    let resting = take(&again, json!({"name": "resting"})).await;
    let copied = resting["stored_bytes"].as_u64().unwrap();
    assert!(
        (1..1 << 20).contains(&copied),
        "only the list of its chunks is its own: {copied}"
    );
    again.kill().await;
    let third = server.sandbox_with(&json!({"template": "resting"})).await;
    assert_eq!(third.read("/home/user/kept").await, b"before");
}

async fn what_did_not_change_is_stored_once(server: &Server) {
    let sandbox = server
        .sandbox_with(&json!({"resources": {"disk_backing": "disk", "disk_bytes": 536_870_912}}))
        .await;
    sandbox.sh("head -c 64M /dev/urandom > ~/large").await.ok();
    let first = take(&sandbox, json!({"kind": "filesystem"})).await;
    assert!(first["stored_bytes"].as_u64().unwrap() > 60 << 20, "{first}");
    sandbox
        .sh("head -c 1M /dev/urandom > ~/small; rm -f ~/.cache; mv ~/large ~/renamed")
        .await;
    let second = take(&sandbox, json!({"kind": "filesystem"})).await;
    assert!(second["total_bytes"].as_u64().unwrap() > 64 << 20, "{second}");
    assert!(second["stored_bytes"].as_u64().unwrap() < 5 << 20, "{second}");
}

async fn a_snapshot_travels_as_a_file(server: &Server) {
    let sandbox = server.sandbox().await;
    sandbox.write("/home/user/kept", b"far").await;
    take(&sandbox, json!({"name": "travels"})).await;
    let file = server
        .client()
        .get("/v1/snapshots/travels/export")
        .await
        .expect(200)
        .body;
    server.client().delete("/v1/snapshots/travels").await.expect(204);
    server.client().post("/v1/gc", &json!({})).await.ok();

    let import = |file: Vec<u8>, name: &str| {
        let request = server.client().request(Method::POST, "/v1/snapshots/import");
        let request = request
            .query(&[("name", name)])
            .header("content-type", "application/octet-stream");
        server.client().send(request.body(file))
    };
    let imported = import(file.clone(), "arrived").await.expect(201).json();
    assert_eq!(imported["name"], "arrived");
    let there = server.sandbox_with(&json!({"template": "arrived"})).await;
    assert_eq!(there.read("/home/user/kept").await, b"far");

    for (what, broken) in [
        ("cut off", file[..file.len() - 100].to_vec()),
        ("a bit flipped", {
            let mut file = file.clone();
            let middle = file.len() / 2;
            file[middle] ^= 1;
            file
        }),
        ("something else", b"hello".to_vec()),
        ("nothing", Vec::new()),
    ] {
        let answer = import(broken, "broken").await;
        assert!((400..500).contains(&answer.status), "{what}: {answer:?}");
        answer.error();
    }
    server
        .client()
        .get("/v1/snapshots/broken")
        .await
        .refused(404, "snapshot_not_found");
}

/// The file with another description, and the hash over all of it that belongs to it.
fn described(file: &[u8], change: impl FnOnce(&mut Value)) -> Vec<u8> {
    let length = usize::try_from(u32::from_le_bytes(file[12..16].try_into().unwrap())).unwrap();
    let mut header: Value = serde_json::from_slice(&file[16..16 + length]).unwrap();
    change(&mut header);
    let header = serde_json::to_vec(&header).unwrap();
    let mut forged = file[..12].to_vec();
    forged.extend(u32::try_from(header.len()).unwrap().to_le_bytes());
    forged.extend(header);
    forged.extend_from_slice(&file[16 + length..file.len() - 32]);
    let hash = blake3::hash(&forged);
    forged.extend(hash.as_bytes());
    forged
}

/// What a file says of the wall that it was behind does not put anybody behind a weaker one than this server gives.
async fn a_file_cannot_ask_for_a_weaker_wall(server: &Server) {
    let sandbox = server.sandbox().await;
    take(&sandbox, json!({"name": "strong", "kind": "filesystem"})).await;
    let export = server.client().get("/v1/snapshots/strong/export").await;
    let file = export.expect(200).body;
    let import = async |name: &str, change: &dyn Fn(&mut Value)| {
        let request = server.client().request(Method::POST, "/v1/snapshots/import");
        let request = request.query(&[("name", name)]).body(described(&file, change));
        server.client().send(request).await
    };
    import("unchanged", &|_| ()).await.expect(201);
    let weak = |header: &mut Value| {
        header["isolation"] = json!("jail");
        header["spec"]["isolation_floor"] = Value::Null;
    };
    let answer = import("weak", &weak).await;
    match server.tier {
        // There is nothing weaker.
        Tier::Jail => {
            answer.expect(201);
        }
        Tier::Gvisor => {
            answer.refused(409, "snapshot_tier_too_weak");
        }
    }
    let asks = |header: &mut Value| {
        header["isolation"] = json!("jail");
        header["spec"]["isolation_floor"] = json!("gvisor");
    };
    let answer = import("asks", &asks).await;
    assert!((400..500).contains(&answer.status), "{answer:?}");
    answer.error();
}

async fn forks_go_their_own_ways(server: &Server) {
    let parent = server.sandbox_with(&json!({"labels": {"line": "one"}})).await;
    parent.write("/home/user/kept", b"common").await;
    let fork = |body| parent.ask("/fork", body);
    let kind = if keeps_memory(server) {
        parent
            .background("i=0; while :; do i=$((i+1)); echo $i > ~/count; sleep 0.05; done")
            .await;
        json!("memory")
    } else {
        fork(json!({"count": 2}))
            .await
            .refused(422, "memory_not_supported");
        json!("filesystem")
    };
    let copies = fork(json!({"count": 3, "kind": kind, "labels": {"copy": "yes"}}))
        .await
        .expect(201)
        .json();
    let copies: Vec<Sandbox> = copies["items"]
        .as_array()
        .unwrap()
        .iter()
        .map(|copy| {
            assert_eq!(copy["labels"], json!({"line": "one", "copy": "yes"}));
            Sandbox::of(server.client(), copy)
        })
        .collect();
    let mut seen = std::collections::BTreeSet::new();
    for sandbox in copies.iter().chain([&parent]) {
        assert_eq!(sandbox.read("/home/user/kept").await, b"common");
        let name = sandbox.sh("hostname").await.ok();
        assert_eq!(name.trim(), sandbox.bare(), "each has a name of its own");
        let random = sandbox.sh("head -c 16 /dev/urandom | od -An -tx1").await.ok();
        assert!(seen.insert(random), "and randomness of its own");
        let port = sandbox.client.get(&sandbox.path("/ports")).await.ok();
        assert!(seen.insert(port.to_string() + &sandbox.id));
        sandbox.write("/home/user/own", sandbox.id.as_bytes()).await;
    }
    for sandbox in copies.iter().chain([&parent]) {
        assert_eq!(sandbox.read("/home/user/own").await, sandbox.id.as_bytes());
        if keeps_memory(server) {
            let before = sandbox.sh("cat ~/count").await.ok();
            atoll_proof::wait::until("it counts on", std::time::Duration::from_secs(30), || async {
                let now = sandbox.sh("cat ~/count").await.ok();
                (!now.is_empty() && now != before).then_some(())
            })
            .await;
        }
    }
}

async fn a_fork_is_all_or_none(server: &Server) {
    let parent = server.sandbox().await;
    let kind = if keeps_memory(server) {
        "memory"
    } else {
        "filesystem"
    };
    for count in [0, 65] {
        let answer = parent.ask("/fork", json!({"count": count, "kind": kind})).await;
        assert_eq!(answer.status, 400, "{answer:?}");
    }
    let gone = server.sandbox().await;
    gone.kill().await;
    let answer = gone.ask("/fork", json!({"kind": kind})).await;
    assert_eq!(answer.status, 410, "{answer:?}");
    assert_eq!(server.list(&[]).await.len(), 1);
    parent.assert_works().await;
}

async fn names_and_kinds_are_checked(server: &Server) {
    let sandbox = server.sandbox().await;
    take(&sandbox, json!({"name": "taken", "kind": "filesystem"})).await;
    let again = |body| sandbox.ask("/snapshots", body);
    again(json!({"name": "taken"})).await.refused(409, "name_taken");
    for bad in ["", "../x", "a b", "snap_x", &"n".repeat(65)] {
        assert_eq!(again(json!({"name": bad})).await.status, 400, "{bad:?}");
    }
    assert_eq!(again(json!({"kind": "soul"})).await.status, 400);
    server
        .client()
        .delete("/v1/snapshots/absent")
        .await
        .refused(404, "snapshot_not_found");
    sandbox.assert_works().await;
}

async fn an_idempotency_key_finds_the_first_snapshot(server: &Server) {
    let sandbox = server.sandbox().await;
    let snap = |key: &'static str| {
        let request = sandbox
            .client
            .request(Method::POST, &sandbox.path("/snapshots"))
            .header("idempotency-key", key)
            .json(&json!({"name": format!("by-{key}")}));
        sandbox.client.send(request)
    };
    // Who comes while it is being taken is asked to come again.
    let once = || async {
        loop {
            let answer = snap("once").await;
            match answer.status {
                429 => assert_eq!(answer.error()["code"], "snapshot_begins"),
                _ => return answer.expect(201).json(),
            }
        }
    };
    let mut taken = futures_util::future::join_all((0..3).map(|_| once())).await;
    taken.push(once().await);
    assert!(taken.iter().all(|one| *one == taken[0]), "{taken:?}");
    let second = snap("twice").await.expect(201).json();
    assert_ne!(second["id"], taken[0]["id"]);
    let listed = server.client().get("/v1/snapshots").await.ok();
    assert_eq!(listed["items"].as_array().unwrap().len(), 2, "{listed}");
}
