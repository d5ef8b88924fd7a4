//! What opens what: every kind of key and token, at every kind of door.
//!
//! The table in `THREAT_MODEL.md` is what is expected; there is no other copy. The test tries every cell of it at a real
//! server and prints what it found in the same form. A credential is shown in every way that any door knows (headers,
//! cookie, query, as the key of a signature), not only in the one that this door asks for: a cell says `yes` if one of
//! them opens it.

#![allow(clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]

mod cast;
mod doors;
mod polls;
mod table;
mod upgrade;

use atoll_proof::{Options, Tier};

use cast::Cast;
use table::Table;

/// A server that serves workflows on this port. Nobody else takes it: the kernel hands out ports round about.
fn with_workflows() -> (u16, Options) {
    let port = std::net::TcpListener::bind("127.0.0.1:0")
        .and_then(|listener| listener.local_addr())
        .unwrap()
        .port();
    let options = Options::default().config(&format!("workflows_listen = \"127.0.0.1:{port}\""));
    (port, options)
}

const PAGE: &str = include_str!("../../../../THREAT_MODEL.md");

/// The tier does not matter: nothing here is decided behind the wall.
#[tokio::test]
async fn every_key_and_token_at_every_door() {
    let (port, options) = with_workflows();
    let options = options.own_templates();
    atoll_proof::on(Tier::Jail, options, async |server| {
        let Some(cast) = Cast::assemble(server, port).await else {
            eprintln!("SKIPPED: sandboxes reach nothing on this machine, so none has a token for models");
            return;
        };
        let mut found = Table::new(cast.shown.iter().map(|(name, _)| (*name).to_owned()));
        for door in doors::all(&cast) {
            let mut row = Vec::new();
            for (_, secret) in &cast.shown {
                row.push(door.try_with(&cast, secret.as_deref()).await);
            }
            found.push(door.name, row);
        }
        found.push("models, from inside a sandbox", cast.asked_inside().await);
        println!("{found}");
        let differs = Table::of_page(PAGE).differences(&found);
        cast.leave().await;
        assert!(
            differs.is_empty(),
            "THREAT_MODEL.md and the server differ:\n{}\nThe server's table:\n{found}",
            differs.join("\n")
        );
    })
    .await;
}
