//! Everything that changes state is asked for at once: one after the other, or refused, and never torn.

use atoll_proof::{Answer, Sandbox, Server, Value, json, on_every_tier};
use futures_util::future::join_all;

use super::{Counter, Kind, ask, assert_no_leaks, settled, snapshots};

on_every_tier!(
    whoever_comes_second_waits_or_is_refused,
    a_kill_ends_whatever_is_under_way,
);

/// All of these at once, and what each came to.
async fn at_once(server: &Server, sandbox: &Sandbox, round: usize) -> Vec<(&'static str, Answer)> {
    let kind = Kind::most(server.tier).name();
    let mut wishes: Vec<(&str, Value)> = vec![
        ("pause", json!({})),
        ("snapshots", json!({"name": format!("one-{round}"), "kind": kind})),
        ("fork", json!({"count": 2, "kind": kind})),
        ("resume", json!({})),
        (
            "snapshots",
            json!({"name": format!("two-{round}"), "kind": "filesystem"}),
        ),
        ("stop", json!({})),
        ("pause", json!({"kind": "filesystem"})),
        ("start", json!({})),
        ("exec", json!({"cmd": "true"})),
    ];
    let count = wishes.len();
    wishes.rotate_left(round % count);
    join_all(
        wishes
            .into_iter()
            .map(|(word, body)| async move { (word, ask(sandbox, word, &body).await) }),
    )
    .await
}

/// Deletes what came of it, and asserts that it is whole: all copies, and snapshots that can be used.
async fn clear(server: &Server, answers: &[(&str, Answer)], allowed: &[u16]) {
    for (word, answer) in answers {
        assert!(allowed.contains(&answer.status), "{word}: {answer:?}");
        if *word == "fork" && answer.status == 201 {
            let copies = answer.json();
            let copies = copies["items"].as_array().unwrap();
            assert_eq!(copies.len(), 2);
            for copy in copies {
                let copy = Sandbox::of(server.client(), copy);
                copy.assert_works().await;
                copy.kill().await;
            }
        }
    }
    for found in snapshots(server).await {
        let copy = server.sandbox_with(&json!({"template": found["id"]})).await;
        assert_eq!(copy.read("/home/user/note").await, b"kept");
        copy.kill().await;
        let path = format!("/v1/snapshots/{}", found["id"].as_str().unwrap());
        server.client().delete(&path).await.expect(204);
    }
}

async fn whoever_comes_second_waits_or_is_refused(server: &mut Server) {
    let sandbox = server.sandbox().await;
    sandbox.write("/home/user/note", b"kept").await;
    for round in 0..9 {
        let answers = at_once(server, &sandbox, round).await;
        clear(server, &answers, &[200, 201, 409]).await;
        assert_eq!(settled(server).await.len(), 1, "only the first is left");
        ask(&sandbox, "resume", &json!({})).await.ok();
        sandbox.assert_works().await;
        assert_eq!(sandbox.read("/home/user/note").await, b"kept");
        // It is not held still by anything that is left over.
        Counter::start(&sandbox, &format!("counter-{round}")).await;
        sandbox.root_sh("pkill -f count.new").await;
    }
    assert_no_leaks(server).await;
}

async fn a_kill_ends_whatever_is_under_way(server: &mut Server) {
    for round in 0..9 {
        let sandbox = server.sandbox().await;
        sandbox.write("/home/user/note", b"kept").await;
        let (answers, killed) = tokio::join!(at_once(server, &sandbox, round), sandbox.kill());
        assert_eq!(killed["state"], "deleted");
        clear(server, &answers, &[200, 201, 409, 410]).await;
        assert!(settled(server).await.is_empty());
    }
    assert_no_leaks(server).await;
    server.assert_nothing_held().await;
}
