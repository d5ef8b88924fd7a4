//! How a save or a restore ended, told to those who wait for that very one.
//!
//! What must hold: each attempt has a channel of its own, which exists before anybody can see that the attempt is under way;
//! what is told there is told once, and no later attempt changes it.

use atoll_lifecycle::{Effect, Record};
use atoll_store::SandboxRow;
use atoll_types::{Fault, InstanceId, SandboxState, SnapshotId};
use futures_util::FutureExt as _;
use futures_util::future::Shared;
use tokio::sync::oneshot;

/// The row that it led to, or why it did not work out.
pub(crate) type Outcome = Result<SandboxRow, Fault>;

/// Which one it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Attempt {
    Save(SnapshotId),
    Restore(InstanceId),
}

impl Attempt {
    /// What an effect tries, if anybody may wait for it.
    pub(crate) fn by(effect: &Effect) -> Option<Self> {
        match effect {
            Effect::SaveInstance { snapshot, .. } => Some(Self::Save(snapshot.clone())),
            Effect::RestoreInstance { instance, .. } => Some(Self::Restore(instance.clone())),
            Effect::StartInstance(_)
            | Effect::DestroyInstance(_)
            | Effect::ThawInstance(_)
            | Effect::DropSnapshot(_) => None,
        }
    }

    /// What is under way as long as a record says this.
    pub(crate) fn of(record: &Record) -> Option<Self> {
        match record.state {
            SandboxState::Pausing | SandboxState::Stopping => {
                record.saving.as_ref().map(|it| Self::Save(it.snapshot.clone()))
            }
            SandboxState::Resuming => record.instance.clone().map(Self::Restore),
            SandboxState::Starting
            | SandboxState::Running
            | SandboxState::Paused
            | SandboxState::Stopped
            | SandboxState::Deleting
            | SandboxState::Deleted
            | SandboxState::Failed => None,
        }
    }
}

/// Tells how it ended. Whoever drops it without a word tells that it was interrupted.
#[derive(Debug)]
pub(crate) struct Teller(oneshot::Sender<Outcome>);

/// Hears it, however late.
#[derive(Debug, Clone)]
pub(crate) struct Reply {
    attempt: Attempt,
    told: Shared<oneshot::Receiver<Outcome>>,
}

pub(crate) fn channel(attempt: Attempt) -> (Teller, Reply) {
    let (tell, told) = oneshot::channel();
    let told = told.shared();
    (Teller(tell), Reply { attempt, told })
}

impl Teller {
    /// Effects that nobody can wait for have no teller.
    pub(crate) fn tell_if_asked(teller: Option<Self>, outcome: Outcome) {
        if let Some(Self(tell)) = teller {
            // Nobody may wait any more.
            let _ = tell.send(outcome);
        }
    }
}

impl Reply {
    pub(crate) fn attempt(&self) -> &Attempt {
        &self.attempt
    }

    pub(crate) async fn heard(self) -> Outcome {
        let told = self.told.await;
        told.unwrap_or_else(|_| Err(Fault::internal("the server is stopping")))
    }
}
