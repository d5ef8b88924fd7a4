//! Those who behave. Each actor tells stories of one kind, one after the other: it makes something, uses it, checks what it
//! is told, and takes it away again.

mod e2b;
mod features;
mod models;
mod native;
mod player;
mod workflows;

use std::sync::Arc;

use tokio::task::JoinSet;

pub(super) use e2b::{ENVD, framed, keyed};
pub(super) use native::LIFETIME_MILLIS;
pub(super) use player::write;

use super::caller::{Caller, Told};
use super::random::Random;
use super::world::{HOSTILE, PROJECTS, World};

/// What a story is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Native,
    E2b,
    Models,
    Workflows,
}

impl Kind {
    pub(super) const ALL: [Self; 4] = [Self::Native, Self::E2b, Self::Models, Self::Workflows];

    fn name(self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::E2b => "e2b",
            Self::Models => "models",
            Self::Workflows => "workflows",
        }
    }

    /// A pause between stories at most so long: the machine is to be busy, not drowned.
    fn rest_millis(self) -> u64 {
        match self {
            Self::Native | Self::E2b => 300,
            Self::Models | Self::Workflows => 150,
        }
    }

    async fn tell(self, caller: &Caller, random: &mut Random) -> Told<()> {
        match self {
            Self::Native => Box::pin(native::story(caller, random)).await,
            Self::E2b => Box::pin(e2b::story(caller, random)).await,
            Self::Models => Box::pin(models::story(caller, random)).await,
            Self::Workflows => Box::pin(workflows::story(caller, random)).await,
        }
    }
}

/// Every feature once, for each honest project: what is made once and stays is there afterwards.
pub(super) async fn warm_up(world: &Arc<World>, rounds: u64) {
    let mut players = JoinSet::new();
    play_workflows(world, &mut players);
    let mut stories = JoinSet::new();
    for index in (0..PROJECTS.len()).filter(|index| *index != HOSTILE) {
        for kind in Kind::ALL {
            let world = Arc::clone(world);
            stories.spawn(async move {
                let Some(caller) = Caller::new(&world, index) else {
                    return;
                };
                if kind == Kind::Native {
                    let _noted = Box::pin(native::everything(&caller)).await;
                }
                let mut random = caller.random(&format!("warm-up/{}", kind.name()));
                for _ in 0..rounds {
                    if world.interrupted.is_cancelled() {
                        return;
                    }
                    let _noted = kind.tell(&caller, &mut random).await;
                }
            });
        }
    }
    while stories.join_next().await.is_some() {}
    players.shutdown().await;
}

/// Stories of all kinds for both projects, until the load is over.
pub(super) fn load(world: &Arc<World>, actors: &mut JoinSet<()>) {
    for index in (0..PROJECTS.len()).filter(|index| *index != HOSTILE) {
        for kind in Kind::ALL {
            let world = Arc::clone(world);
            actors.spawn(async move {
                let mut random = Random::of(world.seed, &format!("{index}/{}", kind.name()));
                while !world.is_over() {
                    // Other data have other keys.
                    if let Some(caller) = Caller::new(&world, index) {
                        let told = kind.tell(&caller, &mut random).await;
                        if told.is_ok() {
                            *world.tally.lock().stories.entry(kind.name()).or_default() += 1;
                        }
                    }
                    let rest = random.below(kind.rest_millis());
                    world.rest(rest).await;
                }
            });
        }
    }
}

/// Those who play the workflows of the honest projects. They stay until they are ended.
pub(super) fn play_workflows(world: &Arc<World>, players: &mut JoinSet<()>) {
    for index in (0..PROJECTS.len()).filter(|index| *index != HOSTILE) {
        for part in [player::Part::Workflows, player::Part::Activities] {
            let world = Arc::clone(world);
            players.spawn(async move { player::play(&world, index, part).await });
        }
    }
}
