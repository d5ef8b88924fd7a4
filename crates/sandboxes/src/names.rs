//! Sandboxes by name: found, or made if there is none.
//!
//! ```text
//!   find or create ──> is there one? ──┬── yes: wait until it runs or rests; wake it if it asks for that ──> found
//!         ^                            ├── it is on its way out: wait until it is gone ──┐
//!         │                            └── no ───────────────────────────────────────────┴──> create ──> made
//!         └──────────────────────────────────────────── somebody else got the name first ───────┘
//! ```
//! What must hold: of all living sandboxes of a project, at most one has a name; the store sees to that, in the commit that
//! gives it. So a name means one sandbox at a time, and another one only after that is over; and of all who want the sandbox
//! of a name at once, one makes it and the others find it.

use atoll_identity::Action;
use atoll_types::{Code, Fault, SandboxId, SandboxName, SandboxState};

use crate::create::{idempotency, insert_fault};
use crate::faults::from_store;
use crate::lives::KILL_WITHIN;
use crate::{Caller, CreateSandbox, Sandbox, Sandboxes, views};

/// How often a caller looks again when others make sandboxes of the same name and end them.
const TRIES: usize = 16;

/// The sandbox that has the name which was asked for.
#[derive(Debug, Clone)]
pub enum Obtained {
    Made(Sandbox),
    /// It had the name before.
    Found(Sandbox),
}

impl Sandboxes {
    /// The living sandbox that has the name in `request` or, if there is none, a new one. One that is found is handed over as it
    /// is: of the request its name counts and nothing else. An idempotency key belongs to what it has made, so it finds that
    /// first, whatever has the name now; a request that finds its sandbox by name leaves its key unused.
    pub async fn find_or_create(&self, caller: &Caller, request: CreateSandbox) -> Result<Obtained, Fault> {
        let Some(name) = &request.spec.name else {
            return Err(Fault::new(
                Code::ContradictingFields,
                "only a sandbox that has a name can be there already",
            )
            .hint("give a `name`, or leave out `if_exists`"));
        };
        let mut contended = None;
        for _ in 0..TRIES {
            if !self.has_made(caller, &request).await?
                && let Some(found) = self.obtain(caller, name).await?
            {
                return Ok(Obtained::Found(found));
            }
            match self.create(caller, request.clone()).await {
                Err(taken) if taken.code == Code::NameTaken => contended = Some(taken),
                made => return made.map(Obtained::Made),
            }
        }
        Err(contended.unwrap_or_else(|| Fault::internal("a sandbox was looked for and never made")))
    }

    /// Whether the request comes again, under a key that has made a sandbox.
    async fn has_made(&self, caller: &Caller, request: &CreateSandbox) -> Result<bool, Fault> {
        let Some(key) = &request.idempotency_key else {
            return Ok(false);
        };
        let key = idempotency(key.clone(), &request.spec)?;
        let rows = &self.store().sandboxes;
        let made = rows.sandbox_by_idempotency(caller.project(), key).await;
        Ok(made.map_err(|e| insert_fault(&e))?.is_some())
    }

    /// The living sandbox of this name, as soon as it runs or rests; `None` once the name is free.
    async fn obtain(&self, caller: &Caller, name: &SandboxName) -> Result<Option<Sandbox>, Fault> {
        let rows = &self.store().sandboxes;
        let found = rows.sandbox_named(caller.project(), name).await;
        let Some(id) = found.map_err(|e| from_store(&e))? else {
            return Ok(None);
        };
        caller.may(Action::UseSandbox, Some(&id))?;
        let cell = self.cell(caller, &id).await?;
        let row = cell
            .seen
            .wait_for(|row| row.record.state != SandboxState::Starting)
            .await;
        let wakes = match row.record.state {
            SandboxState::Resuming => true,
            SandboxState::Pausing | SandboxState::Paused | SandboxState::Stopping | SandboxState::Stopped => {
                row.spec.auto_resume
            }
            _ => false,
        };
        if wakes
            && let Err(fault) = self.wake(&cell, None).await
            && cell.seen.borrow().record.end.is_none()
        {
            return Err(fault);
        }
        let row = cell.reachable().await;
        if row.spec.name.as_ref() != Some(name) {
            // It was given another one meanwhile.
            return Ok(None);
        }
        if row.record.end.is_none() {
            // Whoever wants it is about to use it.
            cell.touch(&*self.store().sandboxes, self.now());
            return Ok(Some(views::sandbox(row)));
        }
        let gone = cell.seen.wait_for(|row| !row.record.state.is_live());
        match tokio::time::timeout(KILL_WITHIN, gone).await {
            Ok(_) => Ok(None),
            Err(_) => Err(Fault::new(
                Code::NameTaken,
                format!("{id} has this name and is being deleted, but the host has not let go of it yet"),
            )
            .hint("ask again; the server goes on trying")),
        }
    }

    /// The living sandbox of the caller's project that has this name.
    pub async fn named(&self, caller: &Caller, name: &str) -> Result<SandboxId, Fault> {
        let found = match name.parse::<SandboxName>() {
            Ok(name) => {
                self.store()
                    .sandboxes
                    .sandbox_named(caller.project(), &name)
                    .await
            }
            // Nothing can have it.
            Err(_) => Ok(None),
        };
        found.map_err(|e| from_store(&e))?.ok_or_else(|| {
            Fault::new(
                Code::SandboxNotFound,
                "there is no living sandbox of this name in the project",
            )
            .hint("`atoll ls` shows those that live; ids begin with `sbx_`")
        })
    }
}

/// For whoever wants a name that a living sandbox has.
pub(crate) fn taken(error: &atoll_store::Error) -> Fault {
    Fault::new(Code::NameTaken, error.to_string())
        .hint("choose another name, or use the sandbox that has it; the name is free when that is deleted")
}
