//! The project that does not behave: random attacks, one after the other, by several hands. An attack notes what it should
//! not have got; whether the server survives, answers others in time and gives everything back is looked at elsewhere.
//!
//! What must hold: every attack is bounded in requests, bytes and time, goes to loopback only, and gives back what it made.

mod archives;
mod guests;
mod models;
mod raw;
mod requests;
mod trespass;
mod workflows;

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use tokio::task::JoinSet;

use super::caller::Caller;
use super::random::Random;
use super::world::{HOSTILE, World};

/// So many attacks are under way at once.
const HANDS: usize = 3;
/// No attack takes longer.
const LONGEST: Duration = Duration::from_secs(45);

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Attack {
    Schedules,
    Bodies,
    Slow,
    Silent,
    Tokens,
    Ids,
    Queries,
    Hosts,
    Paths,
    Depth,
    Archives,
    Hangups,
    Limits,
    Providers,
    Workflows,
    Dns,
    Forks,
    Output,
    Door,
}

impl Attack {
    pub(super) const ALL: [Self; 19] = [
        Self::Schedules,
        Self::Bodies,
        Self::Slow,
        Self::Silent,
        Self::Tokens,
        Self::Ids,
        Self::Queries,
        Self::Hosts,
        Self::Paths,
        Self::Depth,
        Self::Archives,
        Self::Hangups,
        Self::Limits,
        Self::Providers,
        Self::Workflows,
        Self::Dns,
        Self::Forks,
        Self::Output,
        Self::Door,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Schedules => "schedules",
            Self::Bodies => "bodies",
            Self::Slow => "slow",
            Self::Silent => "silent",
            Self::Tokens => "tokens",
            Self::Ids => "ids",
            Self::Queries => "queries",
            Self::Hosts => "hosts",
            Self::Paths => "paths",
            Self::Depth => "depth",
            Self::Archives => "archives",
            Self::Hangups => "hangups",
            Self::Limits => "limits",
            Self::Providers => "providers",
            Self::Workflows => "workflows",
            Self::Dns => "dns",
            Self::Forks => "forks",
            Self::Output => "output",
            Self::Door => "door",
        }
    }

    /// What it is, for the report.
    pub(super) fn about(self) -> &'static str {
        match self {
            Self::Schedules => "schedules and crons that never come, or come too often",
            Self::Bodies => "large bodies on every API, with and without a key",
            Self::Slow => "heads and bodies that trickle",
            Self::Silent => "connections that say nothing, or half of something",
            Self::Tokens => "every kind of key and token where it does not belong",
            Self::Ids => "ids and names of other projects",
            Self::Queries => "parameters that do not exist",
            Self::Hosts => "odd Host headers",
            Self::Paths => "paths that lead elsewhere",
            Self::Depth => "deep and broken JSON",
            Self::Archives => "archives that lie",
            Self::Hangups => "hang-ups at every point of a model's stream",
            Self::Limits => "limits that contradict each other, and what has no price",
            Self::Providers => "providers whose address changes",
            Self::Workflows => "namespaces of others, large messages, costly queries",
            Self::Dns => "floods of names from inside a sandbox",
            Self::Forks => "fork bombs inside a sandbox",
            Self::Output => "floods of output that nobody reads",
            Self::Door => "floods of the sandboxes' way to models",
        }
    }

    async fn run(self, hand: &Hand, random: &mut Random) -> u64 {
        match self {
            Self::Schedules => Box::pin(workflows::schedules(hand, random)).await,
            Self::Workflows => Box::pin(workflows::strangers(hand, random)).await,
            Self::Bodies => Box::pin(raw::bodies(hand, random)).await,
            Self::Slow => Box::pin(raw::slow(hand, random)).await,
            Self::Silent => Box::pin(raw::silent(hand, random)).await,
            Self::Hosts => Box::pin(raw::hosts(hand, random)).await,
            Self::Tokens => Box::pin(trespass::tokens(hand, random)).await,
            Self::Ids => Box::pin(trespass::ids(hand, random)).await,
            Self::Queries => Box::pin(requests::queries(hand, random)).await,
            Self::Paths => Box::pin(requests::paths(hand, random)).await,
            Self::Depth => Box::pin(requests::depth(hand, random)).await,
            Self::Archives => Box::pin(archives::archives(hand, random)).await,
            Self::Hangups => Box::pin(models::hangups(hand, random)).await,
            Self::Limits => Box::pin(models::limits(hand, random)).await,
            Self::Providers => Box::pin(models::providers(hand, random)).await,
            Self::Dns => Box::pin(guests::dns(hand, random)).await,
            Self::Forks => Box::pin(guests::forks(hand, random)).await,
            Self::Output => Box::pin(guests::output(hand, random)).await,
            Self::Door => Box::pin(guests::door(hand, random)).await,
        }
    }
}

impl std::str::FromStr for Attack {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let names = Self::ALL.map(Self::name).join(", ");
        Self::ALL
            .into_iter()
            .find(|attack| attack.name() == text)
            .ok_or_else(|| format!("`{text}` is no attack; one of {names}"))
    }
}

/// Which attacks a run has: `all`, `none`, a list, or a list behind `-` of those that are left out.
pub fn parse(text: &str) -> Result<Vec<Attack>, String> {
    let listed = |text: &str| -> Result<Vec<Attack>, String> {
        text.split(',').map(|name| name.trim().parse()).collect()
    };
    match text.strip_prefix('-') {
        _ if text == "all" => Ok(Attack::ALL.to_vec()),
        _ if text == "none" => Ok(Vec::new()),
        Some(without) => {
            let without = listed(without)?;
            let all = Attack::ALL.into_iter();
            Ok(all.filter(|attack| !without.contains(attack)).collect())
        }
        None => listed(text),
    }
}

/// Whoever attacks: a caller of the hostile project.
pub(super) struct Hand {
    pub(super) caller: Caller,
    pub(super) attack: Attack,
}

impl Hand {
    pub(super) fn world(&self) -> &Arc<World> {
        &self.caller.world
    }

    /// Notes something that the attack should not have got.
    pub(super) fn got(&self, what: &'static str, words: impl Into<String>) {
        let name = self.attack.name();
        let tally = &self.world().tally;
        tally.lock().attacks.entry(name).or_default().findings += 1;
        tally.found(what, name, words);
    }

    /// A sandbox to attack from, small and short-lived.
    pub(super) async fn sandbox(&self, more: &serde_json::Value) -> Option<String> {
        let mut body = json!({
            "timeout_ms": super::honest::LIFETIME_MILLIS,
            "resources": {"memory_bytes": 256 << 20, "cpu_millis": 500, "pids": 128},
            "env": {"CANARY": self.caller.canary()},
        });
        for (name, value) in more.as_object().into_iter().flatten() {
            body[name] = value.clone();
        }
        let request = self.caller.post("/v1/sandboxes", &body);
        let made = self.caller.attempt("create", request).await?;
        made.json()["id"].as_str().map(str::to_owned)
    }

    pub(super) async fn exec(&self, id: &str, line: &str, timeout_millis: u64) -> Option<serde_json::Value> {
        let body = json!({"cmd": line, "timeout_ms": timeout_millis});
        let request = self.caller.post(&format!("/v1/sandboxes/{id}/exec"), &body);
        let answer = self.caller.attempt("exec", request).await?;
        Some(answer.json())
    }

    pub(super) async fn kill(&self, id: &str) {
        let request = self.caller.delete(&format!("/v1/sandboxes/{id}"));
        let _gone = self.caller.attempt("kill", request).await;
    }
}

/// Every attack once, in its order: the one-minute run must have had them all.
async fn in_turn(world: &Arc<World>, attacks: &[Attack], hand: usize) {
    for attack in attacks.iter().copied().skip(hand).step_by(HANDS) {
        if world.is_over() {
            return;
        }
        let mut random = Random::of(world.seed, &format!("first {}", attack.name()));
        strike(world, attack, &mut random).await;
    }
}

async fn strike(world: &Arc<World>, attack: Attack, random: &mut Random) {
    if !world.is_up() && !world.until_up().await {
        return;
    }
    let Some(caller) = Caller::new(world, HOSTILE) else {
        return;
    };
    let hand = Hand { caller, attack };
    let name = attack.name();
    world.begins(name);
    let moves = tokio::select! {
        () = world.interrupted.cancelled() => 0,
        moves = tokio::time::timeout(LONGEST, attack.run(&hand, random)) => moves.unwrap_or(1),
    };
    world.ends(name);
    world.tally.attacked(name, moves);
}

/// Attacks by all hands until the load is over.
pub(super) fn load(world: &Arc<World>, attacks: &[Attack], actors: &mut JoinSet<()>) {
    if attacks.is_empty() {
        return;
    }
    for hand in 0..HANDS {
        let (world, attacks) = (Arc::clone(world), attacks.to_vec());
        actors.spawn(async move {
            let mut random = Random::of(world.seed, &format!("hostile hand {hand}"));
            in_turn(&world, &attacks, hand).await;
            while !world.is_over() {
                if let Some(attack) = random.one(&attacks).copied() {
                    strike(&world, attack, &mut random).await;
                }
                let rest = random.below(300);
                world.rest(rest).await;
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attacks_are_chosen_by_name() {
        assert_eq!(parse("all").unwrap().len(), Attack::ALL.len());
        assert!(parse("none").unwrap().is_empty());
        assert_eq!(parse("dns, ids").unwrap(), [Attack::Dns, Attack::Ids]);
        let without = parse("-schedules,bodies").unwrap();
        assert_eq!(without.len(), Attack::ALL.len() - 2);
        assert!(!without.contains(&Attack::Schedules));
        assert!(parse("nonsense").is_err());
    }
}
