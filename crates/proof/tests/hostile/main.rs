//! Bad input and hostile guests: each attack on every tier.
//!
//! What must hold after each of them: the answer was a clear error or a killed sandbox, the server answers and has not
//! grown, the neighbour has noticed nothing, the attacker can be killed, and nothing of it is left on the machine.

#![allow(clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]

mod agent;
mod exhaustion;
mod floods;
mod kernel;
mod neighbours;
mod paths;
mod requests;
mod templates;

use std::time::Duration;

use atoll_proof::wait::within;
use atoll_proof::{MIB, Sandbox, Server, Value, json};

/// How much the server may grow under any attack.
const ALLOWANCE: u64 = 64 * MIB;

/// An attacker and a neighbour who must not notice.
struct Scene<'a> {
    server: &'a Server,
    attacker: Sandbox,
    neighbour: Sandbox,
    memory: u64,
    /// The output of something that the neighbour does all the while.
    ticking: String,
}

impl<'a> Scene<'a> {
    async fn new(server: &'a Server) -> Self {
        Self::with(server, &json!({})).await
    }

    /// With these fields of the attacker's create request.
    async fn with(server: &'a Server, request: &Value) -> Self {
        let neighbour = server.sandbox().await;
        let ticking = neighbour
            .background("while :; do echo tick; sleep 0.2; done")
            .await;
        neighbour.until_logged(&ticking, "tick").await;
        let attacker = server.sandbox_with(request).await;
        attacker.assert_works().await;
        Self {
            server,
            attacker,
            neighbour,
            memory: server.memory(),
            ticking,
        }
    }

    /// Asserts that the attack stayed where it was. The attacker may be dead; if so, its record says why.
    async fn assert_unharmed(&self) {
        self.server.assert_answers().await;
        within(
            "the neighbour works",
            Duration::from_secs(30),
            self.neighbour.assert_works(),
        )
        .await;
        assert_eq!(self.neighbour.command(&self.ticking).await["state"], "running");
        let grown = self.server.peak_memory().saturating_sub(self.memory);
        assert!(grown < ALLOWANCE, "the server grew by {} MiB", grown / MIB);
        let record = self.attacker.get().await;
        match record["state"].as_str() {
            Some("running") => {}
            Some("deleting" | "deleted" | "failed") => {
                assert!(
                    record["end"]["reason"].is_string(),
                    "it ended without a reason: {record}"
                );
            }
            _ => panic!("in a state that should not last: {record}"),
        }
        let ended = within(
            "the attacker is killed",
            Duration::from_secs(30),
            self.attacker.kill(),
        )
        .await;
        assert_eq!(ended["state"], "deleted", "{ended}");
    }

    /// Asserts that the attacker's own sandbox still works, after an attack that should have come to nothing.
    async fn assert_attacker_works(&self) {
        within(
            "the attacker's sandbox works",
            Duration::from_secs(30),
            self.attacker.assert_works(),
        )
        .await;
    }

    /// Something that may kill its own sandbox, or be refused; it must only come to an end. `None`: it ended with the
    /// sandbox, or could not be started.
    async fn attack(&self, body: &Value) -> Option<atoll_proof::Output> {
        let answer = within(
            "the attack comes to an end",
            Duration::from_secs(60),
            self.attacker.exec(body),
        )
        .await;
        if answer.status == 200 {
            return Some(atoll_proof::Output::of(answer.json()));
        }
        answer.error();
        assert_ne!(answer.status, 500, "{answer:?}");
        None
    }
}
