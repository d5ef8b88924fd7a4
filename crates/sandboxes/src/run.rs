//! One command in a sandbox of its own, in one step.
//!
//! A pooled instance hears who it is and what to run in one breath, while its row is being committed; so the program starts
//! as early as it can. What must hold: nobody sees a byte of its output before the row is on disk; no command has run in a
//! sandbox that is refused; if the command cannot be started, nothing runs.

use std::sync::Arc;

use atoll_node::Begins;
use atoll_types::{Fault, SandboxId};

use crate::cell::{Cell, InUse};
use crate::exec::{Planned, check_argv};
use crate::guest::Guest;
use crate::{Caller, CreateSandbox, ExecSpec, Execution, Sandbox, Sandboxes};

/// A command that runs in a sandbox which was made for it.
#[derive(Debug)]
pub struct Ran {
    pub sandbox: Sandbox,
    pub execution: Execution,
    pub removal: Option<Removal>,
}

/// Ends the sandbox when it is dropped: with its command, or with whoever waited for that. If the server dies first, the
/// sandbox lives until its timeout.
#[derive(Debug)]
pub struct Removal {
    service: Sandboxes,
    caller: Caller,
    id: SandboxId,
}

impl Drop for Removal {
    fn drop(&mut self) {
        let (service, caller, id) = (self.service.clone(), self.caller.clone(), self.id.clone());
        self.service.inner.tasks.spawn(async move {
            if let Err(fault) = service.kill(&caller, &id).await {
                tracing::warn!(sandbox = %id, %fault, "a sandbox has not ended with its command");
            }
        });
    }
}

impl Sandboxes {
    /// Makes a sandbox and runs a command in it; with `keep`, the sandbox stays when the command is over. A caller who hangs
    /// up does not stop the creation, but then nothing stays that was not to be kept.
    pub async fn run(
        &self,
        caller: &Caller,
        request: CreateSandbox,
        command: ExecSpec,
        keep: bool,
    ) -> Result<Ran, Fault> {
        check_argv(&command.argv)?;
        let service = self.clone();
        let caller = caller.clone();
        let task = self
            .inner
            .tasks
            .spawn(async move { service.run_here(caller, request, command, keep).await });
        task.await
            .map_err(|_| Fault::internal("the creation was interrupted"))?
    }

    async fn run_here(
        &self,
        caller: Caller,
        request: CreateSandbox,
        command: ExecSpec,
        keep: bool,
    ) -> Result<Ran, Fault> {
        let mut waiting = Some(command);
        // Boxed: all the ways to make a sandbox are large together.
        let creating = Box::pin(self.create_here(&caller, request, &mut waiting));
        let (sandbox, begun) = creating.await?;
        let removal = || Removal {
            service: self.clone(),
            caller: caller.clone(),
            id: sandbox.id.clone(),
        };
        let begun = match (begun, waiting) {
            (Some(execution), _) => Ok(execution),
            (None, Some(command)) => self.exec(&caller, &sandbox.id, command).await,
            (None, None) => Err(Fault::internal("a command was lost at the creation")),
        };
        match begun {
            Ok(execution) => Ok(Ran {
                removal: (!keep).then(removal),
                sandbox,
                execution,
            }),
            Err(fault) => {
                drop(removal());
                Err(fault)
            }
        }
    }

    /// A new sandbox was told what to run when it was told who it is.
    pub(crate) async fn begin_greeted(
        &self,
        cell: &Arc<Cell>,
        guest: &Guest,
        command: Planned,
        begins: Begins,
    ) -> Result<Execution, Fault> {
        // Before its end can be heard of.
        self.expect(cell, &command)?;
        self.follow_from_the_first(cell, guest, begins.ends).await;
        let in_use = InUse::new(
            Arc::clone(cell),
            self.store().sandboxes.clone(),
            self.settings().now,
        );
        self.begun(Arc::clone(cell), guest.clone(), in_use, command, begins.command)
            .await
    }
}
