//! File operations as somebody: with the ids, and so with the permissions, of the user that a request names.
//!
//! A request that names nobody comes from the sandbox's owner and is done with the agent's privileges. One that names a
//! user is done with the effective ids of that user, in every step: what the kernel would refuse them it refuses here.
//!
//! What must hold: the agent has one thread, so that the ids of that thread are whoever acts; they are the agent's own again
//! before anything else happens. The real and the saved ids stay the agent's, so nobody can signal or trace it meanwhile. By
//! the effective ids rather than `setfsuid`, which gVisor does not have.

use std::sync::OnceLock;

use atoll_guest_protocol::{Configure, Message, Request};
use rustix::process::{Gid, Uid, getgid, getgroups, getuid};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};

use crate::failure::{Outcome, from_io};
use crate::job::{Context, Gone, Job, Shared, Step};
use crate::poll::EventFlags;
use crate::users::{Account, Users};

/// Somebody else than the agent.
#[derive(Debug, Clone)]
pub(crate) struct Actor {
    name: String,
    uid: Uid,
    gid: Gid,
    groups: Vec<Gid>,
}

impl Actor {
    /// Who acts in a request; `None`: the agent.
    pub(crate) fn of(request: &Request, config: &Configure) -> Outcome<Option<Self>> {
        let Some(named) = acts_as(request) else {
            return Ok(None);
        };
        let spec = if named.is_empty() { &config.user } else { named };
        let account = Users::load().find(spec)?;
        Ok(Self::unless_agent(account))
    }

    fn unless_agent(account: Account) -> Option<Self> {
        let uid = Uid::from_raw(account.uid);
        (uid != getuid()).then(|| Self {
            name: account.name,
            uid,
            gid: Gid::from_raw(account.gid),
            groups: account.groups.into_iter().map(Gid::from_raw).collect(),
        })
    }

    /// Acts from now on until what this returns is dropped.
    pub(crate) fn enter(&self) -> Outcome<Acting> {
        let own = own_groups();
        // From here on it is undone, however far it comes. The user last: with it goes the right to change the others.
        let acting = Acting { own };
        let become_them = || {
            set_thread_groups(&self.groups)?;
            set_thread_res_gid(None::<Gid>, self.gid, None::<Gid>)?;
            set_thread_res_uid(None::<Uid>, self.uid, None::<Uid>)
        };
        match become_them() {
            Ok(()) => Ok(acting),
            Err(error) => Err(from_io(format!("cannot act as {}", self.name), &error.into())),
        }
    }
}

/// While this lives, whoever entered acts.
#[derive(Debug)]
pub(crate) struct Acting {
    own: &'static [Gid],
}

impl Drop for Acting {
    fn drop(&mut self) {
        // Nothing of it can fail: real and saved ids are the agent's, and its capabilities come back with the user. Should
        // it, then the agent goes on with less than it had, never with more.
        let _ = set_thread_res_uid(None::<Uid>, getuid(), None::<Uid>);
        let _ = set_thread_res_gid(None::<Gid>, getgid(), None::<Gid>);
        let _ = set_thread_groups(self.own);
    }
}

fn own_groups() -> &'static [Gid] {
    static OWN: OnceLock<Vec<Gid>> = OnceLock::new();
    OWN.get_or_init(|| getgroups().unwrap_or_default())
}

/// Whom a request about files names.
fn acts_as(request: &Request) -> Option<&str> {
    match request {
        Request::ReadFile { user, .. }
        | Request::Stat { user, .. }
        | Request::List { user, .. }
        | Request::MakeDir { user, .. }
        | Request::Rename { user, .. }
        | Request::Remove { user, .. }
        | Request::SetMode { user, .. }
        | Request::SetOwner { user, .. }
        | Request::Symlink { user, .. }
        | Request::Watch { user, .. }
        | Request::TarOut { user, .. }
        | Request::TarIn { user, .. }
        | Request::Attributes { user, .. }
        | Request::SetAttributes { user, .. } => user.as_deref(),
        Request::WriteFile(write) => write.user.as_deref(),
        // A program is started as its user, which `commands` sees to; the rest touches no files.
        Request::Exec(_)
        | Request::Long { .. }
        | Request::Configure(_)
        | Request::Network(_)
        | Request::Attach { .. }
        | Request::ListCommands
        | Request::Signal { .. }
        | Request::FollowCommands
        | Request::Forget { .. }
        | Request::ListPorts
        | Request::Connect { .. }
        | Request::Usage => None,
    }
}

/// A job that somebody else does.
pub(crate) struct Acted {
    actor: Actor,
    job: Option<Box<dyn Job>>,
}

impl Acted {
    /// Opens it as them already.
    pub(crate) fn open(actor: Actor, open: impl FnOnce() -> Outcome<Box<dyn Job>>) -> Outcome<Box<dyn Job>> {
        let job = {
            let _acting = actor.enter()?;
            open()?
        };
        Ok(Box::new(Self {
            actor,
            job: Some(job),
        }))
    }

    fn as_them<T>(&mut self, act: impl FnOnce(&mut dyn Job) -> T) -> Outcome<Option<T>> {
        let _acting = self.actor.enter()?;
        Ok(self.job.as_mut().map(|job| act(&mut **job)))
    }
}

impl Job for Acted {
    fn step(&mut self, cx: &mut Context<'_>) -> Step {
        match self.as_them(|job| job.step(cx)) {
            Ok(step) => step.unwrap_or(Step::Wait),
            Err(failure) => Step::Done(Err(failure)),
        }
    }

    fn data(&mut self, cx: &mut Context<'_>, bytes: &[u8]) -> Outcome {
        self.as_them(|job| job.data(cx, bytes))?.unwrap_or(Ok(()))
    }

    fn data_run(&mut self, cx: &mut Context<'_>, pieces: &[&[u8]]) -> Outcome {
        self.as_them(|job| job.data_run(cx, pieces))?.unwrap_or(Ok(()))
    }

    fn message(&mut self, cx: &mut Context<'_>, message: Message) -> Outcome {
        self.as_them(|job| job.message(cx, message))?.unwrap_or(Ok(()))
    }

    fn ready(&mut self, flags: EventFlags) {
        if let Some(job) = &mut self.job {
            job.ready(flags);
        }
    }

    fn gone(&mut self, shared: &mut Shared, stream: u32, why: Gone) {
        if let Some(job) = &mut self.job {
            job.gone(shared, stream, why);
        }
    }
}

impl Drop for Acted {
    /// What a job cleans up behind itself it cleans up as them.
    fn drop(&mut self) {
        let _acting = self.actor.enter();
        drop(self.job.take());
    }
}
