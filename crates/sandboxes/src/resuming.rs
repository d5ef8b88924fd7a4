//! Waking a sandbox that rests: a new instance from what was saved, its identity given anew, then the commit.
//!
//! ```text
//!   Paused ── commit Resuming ── boot from the vault ── configure ── hooks ── commit Running ── drop what was saved
//!                                    └────── any failure or crash: destroy, commit Paused ──────┘
//! ```
//! What must hold: what was saved stays until the commit that says `Running`; whoever is told of success talks to a guest
//! that knows who and when it is.

use std::sync::Arc;

use atoll_lifecycle::Input;
use atoll_node::{Boot, Greeting, Origin, State, identity};
use atoll_store::{SandboxRow, SnapshotRow};
use atoll_types::{Code, Fault, InstanceId, SandboxId, SandboxState, SaveKind, SnapshotId, TemplateManifest};

use crate::cell::Cell;
use crate::faults::{from_channel, from_node, from_store};
use crate::fitness::{fits, has_files_apart};
use crate::guest::Guest;
use crate::replies::Outcome;
use crate::{Caller, Sandbox, Sandboxes, entropy, views};

/// How often a use looks again when others put a sandbox to rest and wake it at the same time.
const TRIES: usize = 16;

impl Sandboxes {
    /// Resumes a paused or starts a stopped sandbox; returns when it runs. It lives for `timeout_millis` from now or, without,
    /// for as long as it had left when it went to rest. Resuming what runs succeeds.
    pub async fn resume(
        &self,
        caller: &Caller,
        id: &SandboxId,
        timeout_millis: Option<u64>,
    ) -> Result<Sandbox, Fault> {
        if timeout_millis.is_some() {
            atoll_lifecycle::admit_timeout(timeout_millis, &self.settings().limits)?;
        }
        let cell = self.cell(caller, id).await?;
        let row = self.wake(&cell, timeout_millis).await?;
        Ok(views::sandbox(row))
    }

    /// Makes it run, whatever rest it is in or on its way to.
    pub(crate) async fn wake(
        &self,
        cell: &Arc<Cell>,
        timeout_millis: Option<u64>,
    ) -> Result<SandboxRow, Fault> {
        for _ in 0..TRIES {
            match cell.record().state {
                SandboxState::Running => return Ok(cell.last_seen()),
                SandboxState::Pausing | SandboxState::Stopping => {
                    let is_over = |row: &SandboxRow| {
                        !matches!(row.record.state, SandboxState::Pausing | SandboxState::Stopping)
                    };
                    cell.seen.wait_for(is_over).await;
                }
                SandboxState::Resuming => {
                    // If the one who woke it fails, whoever waits for that fails with it.
                    if let Some(reply) = cell.reply(&cell.last_seen()) {
                        return self.outcome(cell, reply).await;
                    }
                }
                _ => {
                    // What is left of its last instance goes first.
                    let is_free = |row: &SandboxRow| {
                        row.record.instance.is_none()
                            || !matches!(row.record.state, SandboxState::Paused | SandboxState::Stopped)
                    };
                    cell.seen.wait_for(is_free).await;
                    let input = Input::Resume {
                        instance: entropy::id(),
                        timeout_millis,
                    };
                    match self.attempt(cell, input).await {
                        Ok(reply) => return self.outcome(cell, reply).await,
                        // Somebody else was faster.
                        Err(_)
                            if matches!(
                                cell.record().state,
                                SandboxState::Resuming | SandboxState::Running
                            ) => {}
                        Err(fault) => return Err(fault),
                    }
                }
            }
        }
        Err(Fault::new(
            Code::SandboxContended,
            format!("{} is put to rest and woken again and again by others", cell.id),
        ))
    }

    /// Performs a resume that was decided and committed.
    pub(crate) async fn perform_restore(
        &self,
        cell: &Arc<Cell>,
        instance: InstanceId,
        snapshot: &SnapshotId,
        kind: SaveKind,
    ) -> Outcome {
        let began = std::time::Instant::now();
        let _held = self.hold(instance.clone());
        let outcome = match self.restore_saved(cell, &instance, snapshot, kind).await {
            Ok(()) => {
                let started = Input::Started {
                    instance: instance.clone(),
                };
                self.apply(cell, started).await.and_then(not_at_rest)
            }
            Err(fault) => Err(fault),
        };
        let fault = match outcome {
            Ok(row) => {
                tracing::debug!(sandbox = %cell.id, took = ?began.elapsed(), "resumed");
                return Ok(row);
            }
            Err(fault) => fault,
        };
        tracing::warn!(sandbox = %cell.id, %fault, "a sandbox could not be resumed");
        cell.let_go_of(&instance);
        let failed = Input::ResumeFailed {
            instance,
            why: fault.message.clone(),
        };
        self.record(cell, failed).await;
        Err(fault)
    }

    async fn restore_saved(
        &self,
        cell: &Arc<Cell>,
        instance: &InstanceId,
        snapshot: &SnapshotId,
        kind: SaveKind,
    ) -> Result<(), Fault> {
        let row = cell.last_seen();
        let found = self.store().saved.snapshot(&row.project, snapshot).await;
        let saved = found.map_err(|e| from_store(&e))?.ok_or_else(|| {
            Fault::new(
                Code::SavedStateLost,
                format!("what {} was saved as is not there any more", row.id),
            )
        })?;
        let kind = match self.check_fits(&saved) {
            Ok(()) => kind,
            Err(misfit) if has_files_apart(&saved) => {
                let why = format!("{misfit}; it comes back on its files, and its processes start anew");
                tracing::warn!(sandbox = %row.id, why, "memory cannot be used");
                self.append(cell, atoll_store::Fact::SandboxResumeFailed { why });
                let files = SnapshotRow {
                    kind: SaveKind::Filesystem,
                    ..saved.clone()
                };
                self.check_fits(&files)?;
                SaveKind::Filesystem
            }
            Err(misfit) => return Err(misfit),
        };
        let state = State::Saved(saved.id.clone());
        let template = self.boot_saved(&row, instance, Origin { kind, state }).await?;
        tracing::debug!(sandbox = %row.id, "its instance answers");
        let running = self.give_instance(cell, instance.clone());
        self.introduce(cell, &running, &row, &template, kind).await?;
        tracing::debug!(sandbox = %row.id, "it knows its name");
        self.run_resume_hooks(cell, &running, &row).await
    }

    /// Boots an instance for a row from saved parts; says which template is below it.
    pub(crate) async fn boot_saved(
        &self,
        row: &SandboxRow,
        instance: &InstanceId,
        origin: Origin,
    ) -> Result<TemplateManifest, Fault> {
        let template = self.template_of(&row.template)?;
        self.attach_volumes(&row.project, &row.spec).await?;
        let boot = Boot {
            instance: instance.clone(),
            project: Some(row.project.clone()),
            isolation: row.isolation,
            image: template.digest.clone(),
            resources: row.spec.resources,
            hostname: row.id.bare().to_owned(),
            origin: Some(origin),
            volumes: row.spec.volumes.clone(),
            admission: self.admission(row).await?,
        };
        self.node().boot(boot).await?;
        Ok(template)
    }

    /// Tells a guest who it is now, and waits for its servers if they are to be started.
    pub(crate) async fn introduce(
        &self,
        cell: &Arc<Cell>,
        guest: &Guest,
        row: &SandboxRow,
        template: &TemplateManifest,
        kind: SaveKind,
    ) -> Result<(), Fault> {
        // With its memory came its servers; from files alone they are started like the first time.
        let start = match kind {
            SaveKind::Memory => None,
            SaveKind::Filesystem => template.start.as_ref(),
        };
        let greeting = Greeting {
            instance: guest.id.clone(),
            identity: identity(&row.id, &row.spec, template, start),
            admission: self.admission(row).await?,
            command: None,
        };
        let greeted = async {
            self.node().greet(greeting).await?;
            if let Some(ready) = start.and_then(|start| start.ready.as_ref()) {
                self.node().await_ready(&guest.id, ready).await?;
            }
            Ok(())
        };
        match greeted.await {
            Ok(()) => Ok(()),
            Err(failed) => Err(from_node(cell, failed).await),
        }
    }

    /// Runs what the sandbox wants to be run whenever it comes back.
    pub(crate) async fn run_resume_hooks(
        &self,
        cell: &Arc<Cell>,
        guest: &Guest,
        row: &SandboxRow,
    ) -> Result<(), Fault> {
        match self.node().run_hooks(&guest.id, &row.spec.hooks.on_resume).await {
            Ok(Ok(())) => Ok(()),
            // It runs, and that it can be looked into is worth more than the hook.
            Ok(Err(failed)) => {
                let why = failed.fact();
                tracing::warn!(sandbox = %cell.id, why, "a hook failed");
                self.append(cell, atoll_store::Fact::HookFailed { why });
                Ok(())
            }
            Err(error) => Err(from_channel(cell, error).await),
        }
    }

    /// Whether saved state can be used by the runtime that is here now.
    pub(crate) fn check_fits(&self, saved: &SnapshotRow) -> Result<(), Fault> {
        let saves = self.saves(saved.isolation).map_err(|_| {
            Fault::new(
                Code::SnapshotNeedsTier,
                format!(
                    "it was saved on the {} tier, which does not work here",
                    saved.isolation
                ),
            )
            .hint("`atoll doctor` says what is missing")
        })?;
        fits(saved, saves)
    }
}

/// Its instance may have ended before the last word about it was heard.
fn not_at_rest(row: SandboxRow) -> Outcome {
    match row.record.state {
        SandboxState::Paused | SandboxState::Stopped => Err(Fault::new(
            Code::ResumeFailed,
            format!("{} ended while it was being resumed; it rests as before", row.id),
        )
        .hint("resume it again")),
        _ => Ok(row),
    }
}
