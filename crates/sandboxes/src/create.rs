//! Making a sandbox: from a pooled instance in one step, or by booting one.
//!
//! ```text
//!   warm:  claim ──┬─ commit row (Running) ─┬─> answer          a crash before the commit leaves an instance
//!                  └─ configure the guest, ─┘                   that no row names: recovery destroys it
//!                     start its command
//!   cold:  ┬─ commit row (Starting) ─┬─┬─ configure        ─┬─> answer
//!          └─ boot the instance     ─┘ └─ commit (Running) ─┘  one after the other if servers, hooks or saved state
//!                                                              decide whether it runs
//! ```
//! What must hold: when the caller is told of success the row says `Running` on disk and the guest has its identity; when
//! it is told of a failure nothing runs.

use std::sync::Arc;

use atoll_lifecycle::{Admitted, Boot, Input, NewRecord, Transition, admit};
use atoll_node::{Boot as BootInstance, Claimed, Greeting, Origin, Wanted, identity};
use atoll_store::{Idempotency, Inserted, NewSandbox, SandboxRow, SnapshotRow};
use atoll_types::{
    Code, EndReason, Fault, InstanceId, Isolation, ProjectId, ResourcesAsked, SandboxId, SandboxSpec,
    SandboxState, SaveKind, SnapshotOwner, TemplateManifest,
};
use sha2::{Digest as _, Sha256};

use crate::cell::Cell;
use crate::exec::Planned;
use crate::faults::{from_channel, from_node, from_store};
use crate::guest::Guest;
use crate::network::Admission;
use crate::secrets::may_lend;
use crate::{Caller, CreateSandbox, ExecSpec, Execution, Sandbox, Sandboxes, entropy, views};

/// More are not made in the microseconds between a look at their number and the commit.
const CLEAR_ROOM: u64 = 16;

/// A sandbox that was decided on and is not written down yet.
struct New {
    row: SandboxRow,
    transition: Transition,
    idempotency: Option<Idempotency>,
    admission: Option<Admission>,
}

impl Sandboxes {
    /// Makes a sandbox and waits until it runs. A caller who hangs up meanwhile does not stop it; the sandbox then lives
    /// until its timeout.
    pub async fn create(&self, caller: &Caller, request: CreateSandbox) -> Result<Sandbox, Fault> {
        let service = self.clone();
        let caller = caller.clone();
        let task = self
            .inner
            .tasks
            .spawn(async move { service.create_here(&caller, request, &mut None).await });
        let (sandbox, _no_command) = task
            .await
            .map_err(|_| Fault::internal("the creation was interrupted"))??;
        Ok(sandbox)
    }

    /// Takes `command` and starts it where that can be done while the sandbox is being made; what it leaves is to be
    /// started when it is made.
    pub(crate) async fn create_here(
        &self,
        caller: &Caller,
        mut request: CreateSandbox,
        command: &mut Option<ExecSpec>,
    ) -> Result<(Sandbox, Option<Execution>), Fault> {
        request.spec.resources = request.resources.over(self.usual_resources());
        may_lend(caller, &request.spec.secrets)?;
        if self.inner.stop.is_cancelled() {
            return Err(Fault::new(Code::ServerStopping, "the server is stopping"));
        }
        let idempotency = request
            .idempotency_key
            .map(|key| idempotency(key, &request.spec))
            .transpose()?;
        if let Some(idempotency) = &idempotency {
            let existing = self
                .store()
                .sandboxes
                .sandbox_by_idempotency(caller.project(), idempotency.clone())
                .await;
            if let Some(row) = existing.map_err(|e| insert_fault(&e))?
                && let Some(sandbox) = self.settled(caller, &row.id).await?
            {
                return Ok((sandbox, None));
            }
        }
        let (mut admitted, template, origin) =
            self.admit_origin(caller, request.spec, request.resources).await?;
        self.name_volumes(caller.project(), &mut admitted.spec).await?;
        admitted.spec.owner = self.owner_of_new(caller, admitted.spec.owner)?;
        if let Some(saved) = origin.as_ref().filter(|saved| saved.kind == SaveKind::Memory) {
            admitted.spec.lineage = saved.spec.lineage.clone().or_else(|| saved.sandbox.clone());
        }
        // A start command that is to see this sandbox's environment cannot have been started ahead, and what is mounted
        // is decided at the start.
        let poolable = origin.is_none()
            && admitted.spec.volumes.is_empty()
            && (template.start.is_none() || admitted.spec.env.is_empty());
        let claimed = if poolable {
            let wanted = Wanted {
                template: template.id.clone(),
                isolation: admitted.isolation,
                resources: admitted.spec.resources,
            };
            self.claim(&wanted).await
        } else {
            None
        };
        let (id, boot) = match &claimed {
            Some((claimed, _)) => (claimed.sandbox.clone(), Boot::Warm(claimed.instance.clone())),
            None => (entropy::id(), Boot::Cold(entropy::id())),
        };
        let transition = atoll_lifecycle::create(
            NewRecord {
                boot,
                policy: atoll_lifecycle::Policy::of(&admitted.spec),
            },
            self.now(),
        );
        let row = SandboxRow {
            id,
            project: caller.project().clone(),
            spec: admitted.spec,
            template: template.id.clone(),
            isolation: admitted.isolation,
            record: transition.next.clone(),
            version: 0,
        };
        let checked = self.check_network(&row).await.and_then(|admission| {
            self.may_have(caller, &row, admission.as_ref())?;
            Ok(admission)
        });
        let admission = match checked {
            Ok(admission) => admission,
            Err(fault) => {
                if let Some((Claimed { instance, .. }, _held)) = claimed {
                    self.discard(row.isolation, instance);
                }
                return Err(fault);
            }
        };
        let new = New {
            row,
            transition,
            idempotency,
            admission,
        };
        match claimed {
            Some((Claimed { instance, .. }, _held)) => {
                // Hooks come before anything else that runs in it, and another may have taken its name.
                let spec = &new.row.spec;
                let may_begin = spec.hooks.on_create.is_empty() && spec.name.is_none();
                let at_once = may_begin && self.has_clear_room(caller.project());
                let command = if at_once { command.take() } else { None };
                self.create_warm(new, instance, &template, command).await
            }
            None => Ok((self.create_cold(new, &template, origin).await?, None)),
        }
    }

    /// Whether a sandbox more of this project will not be refused for being one too many, whoever else makes some at this
    /// moment: what is refused must not have run.
    fn has_clear_room(&self, project: &ProjectId) -> bool {
        let live = self.live();
        let own = live.values().filter(|cell| cell.project == *project).count();
        drop(live);
        own as u64 + CLEAR_ROOM < self.most_rows(project)
    }

    /// What a request means: the template below it, and the saved state to begin with if it names a snapshot or the
    /// template comes up running.
    async fn admit_origin(
        &self,
        caller: &Caller,
        mut spec: SandboxSpec,
        asked: ResourcesAsked,
    ) -> Result<(Admitted, TemplateManifest, Option<SnapshotRow>), Fault> {
        let snapshot = match self.usable_template(caller.project(), &spec.template) {
            Ok(template) => {
                if let Some(resources) = template.resources {
                    spec.resources = asked.over(resources);
                }
                let admitted = admit(spec, &self.settings().limits, &self.tiers())?;
                let running = self.running_state(caller.project(), &template, &admitted).await;
                return Ok((admitted, template, running));
            }
            Err(no_template) => match self.find_snapshot(caller.project(), &spec.template).await? {
                Some(snapshot) => snapshot,
                None => return Err(no_template),
            },
        };
        self.check_fits(&snapshot)?;
        // Its files lie where and as large as they were saved.
        let asked = ResourcesAsked {
            disk_bytes: None,
            disk_backing: None,
            ..asked
        };
        spec.resources = asked.over(snapshot.spec.resources);
        for (name, value) in &snapshot.spec.env {
            spec.env.entry(name.clone()).or_insert_with(|| value.clone());
        }
        if snapshot.kind == SaveKind::Memory {
            take_its_volumes(&mut spec, &snapshot)?;
        }
        if spec.hooks.is_empty() {
            spec.hooks = snapshot.spec.hooks.clone();
        }
        if spec.network.is_none() {
            spec.network.clone_from(&snapshot.spec.network);
        }
        let mut admitted = admit(spec, &self.settings().limits, &self.tiers())?;
        let floor = self.floor_of(&admitted.spec);
        if snapshot.isolation < floor {
            return Err(Fault::new(
                Code::SnapshotTierTooWeak,
                format!(
                    "it was saved on the {} tier, below the floor of {floor}",
                    snapshot.isolation
                ),
            )
            .hint(format!(
                "take a snapshot of a sandbox on that tier, or accept less by asking for the floor `{}`",
                snapshot.isolation
            )));
        }
        admitted.isolation = snapshot.isolation;
        let template = self.template_of(&snapshot.template)?;
        Ok((admitted, template, Some(snapshot)))
    }

    /// The weakest wall that a sandbox may get: what was asked for, or what holds for all who ask for nothing.
    fn floor_of(&self, spec: &SandboxSpec) -> Isolation {
        spec.isolation_floor
            .or(self.settings().limits.default_floor)
            .unwrap_or(Isolation::Gvisor)
    }

    async fn create_warm(
        &self,
        new: New,
        instance: InstanceId,
        template: &TemplateManifest,
        command: Option<ExecSpec>,
    ) -> Result<(Sandbox, Option<Execution>), Fault> {
        let New {
            row,
            transition,
            idempotency,
            admission,
        } = new;
        let (identity, isolation) = (identity(&row.id, &row.spec, template, None), row.isolation);
        let (command, request) = command.map(|spec| Planned::new(spec, entropy::id())).unzip();
        if let Some(admission) = &admission {
            self.node().admit(&instance, admission.clone());
        }
        let greeting = Greeting {
            instance: instance.clone(),
            identity,
            admission,
            command: request,
        };
        // The guest first: it has more to do than the store.
        let (greeted, inserted) = tokio::join!(
            self.node().greet(greeting),
            self.insert(row, &transition, idempotency),
        );
        let cell = match inserted {
            Ok(Ok(cell)) => cell,
            Ok(Err(existing)) => {
                self.discard(isolation, instance);
                let caller = self.identity().server(existing.project);
                let sandbox = self.settled(&caller, &existing.id).await?;
                return Ok((sandbox.ok_or_else(first_failed)?, None));
            }
            Err(fault) => {
                self.discard(isolation, instance);
                return Err(fault);
            }
        };
        let guest = self.give_instance(&cell, instance.clone());
        let begins = match greeted {
            Ok(begins) => begins,
            Err(failed) => {
                let fault = from_node(&cell, failed).await;
                let fate = atoll_lifecycle::InstanceFate::Died(fault.message.clone());
                self.record(&cell, Input::Ended { instance, fate }).await;
                return Err(fault);
            }
        };
        let row = cell.last_seen();
        let finished = match (command, begins) {
            (Some(command), Some(begins)) => {
                self.begin_greeted(&cell, &guest, command, begins).await.map(Some)
            }
            _ => self.run_create_hooks(&cell, &guest, &row).await.map(|()| None),
        };
        match finished {
            Ok(execution) => Ok((views::sandbox(row), execution)),
            Err(fault) => {
                let reason = EndReason::StartFailed(fault.message.clone());
                self.record(&cell, Input::Kill { reason }).await;
                Err(fault)
            }
        }
    }

    /// A creation whose hooks fail is none.
    async fn run_create_hooks(&self, cell: &Arc<Cell>, guest: &Guest, row: &SandboxRow) -> Result<(), Fault> {
        match self.node().run_hooks(&guest.id, &row.spec.hooks.on_create).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(failed)) => Err(Fault::new(Code::HookFailed, failed.to_string())
                .hint("the sandbox was removed; run the hook by hand in one without it to see more")),
            Err(error) => Err(from_channel(cell, error).await),
        }
    }

    async fn create_cold(
        &self,
        new: New,
        template: &TemplateManifest,
        origin: Option<SnapshotRow>,
    ) -> Result<Sandbox, Fault> {
        let New {
            row,
            transition,
            idempotency,
            admission,
        } = new;
        let id = row
            .record
            .instance
            .clone()
            .ok_or_else(|| Fault::internal("a new sandbox names no instance"))?;
        let isolation = row.isolation;
        // From before they are mounted until the sandbox is known to want them.
        let _expected = self.expect_volumes(&row.spec);
        let captured = match &origin {
            Some(saved) => Some(self.recall(&saved.id).await?),
            None => None,
        };
        self.attach_volumes(&row.project, &row.spec).await?;
        let boot = BootInstance {
            instance: id.clone(),
            project: Some(row.project.clone()),
            isolation,
            image: template.digest.clone(),
            resources: row.spec.resources,
            hostname: row.id.bare().to_owned(),
            origin: origin
                .as_ref()
                .zip(captured.as_ref())
                .map(|(saved, captured)| Origin {
                    kind: saved.kind,
                    state: captured.state(),
                }),
            volumes: row.spec.volumes.clone(),
            admission,
        };
        let _held = self.hold(id.clone());
        let (inserted, started) =
            tokio::join!(self.insert(row, &transition, idempotency), self.node().boot(boot));
        drop(captured);
        let cell = match inserted {
            Ok(Ok(cell)) => cell,
            Ok(Err(existing)) => {
                self.discard(isolation, id);
                let caller = self.identity().server(existing.project);
                return self
                    .settled(&caller, &existing.id)
                    .await?
                    .ok_or_else(first_failed);
            }
            Err(fault) => {
                self.discard(isolation, id);
                return Err(fault);
            }
        };
        if let Err(fault) = started {
            let why = fault.message.clone();
            self.record(&cell, Input::StartFailed { why }).await;
            return Err(fault);
        }
        let guest = self.give_instance(&cell, id.clone());
        let row = cell.last_seen();
        let kind = origin.as_ref().map_or(SaveKind::Filesystem, |saved| saved.kind);
        let prepared = async {
            self.introduce(&cell, &guest, &row, template, kind).await?;
            // One that comes from saved state was created before; whoever wants to know of that has hooks for it.
            let from_user = origin
                .as_ref()
                .is_some_and(|saved| saved.owner == SnapshotOwner::User);
            if from_user {
                self.run_resume_hooks(&cell, &guest, &row).await
            } else {
                self.run_create_hooks(&cell, &guest, &row).await
            }
        };
        // With nothing to wait for, that it runs is written down while it is told its name: whoever sees it run speaks to
        // the guest after that.
        let at_once = template.start.is_none() && origin.is_none() && row.spec.hooks.on_create.is_empty();
        let started = Input::Started { instance: id.clone() };
        let written = if at_once {
            let (prepared, written) = tokio::join!(prepared, self.apply(&cell, started));
            if let Err(fault) = prepared {
                let fate = atoll_lifecycle::InstanceFate::Died(fault.message.clone());
                self.record(&cell, Input::Ended { instance: id, fate }).await;
                return Err(fault);
            }
            written
        } else {
            match prepared.await {
                Ok(()) => self.apply(&cell, started).await,
                Err(fault) => Err(fault),
            }
        };
        let row = match written {
            Ok(row) => row,
            Err(fault) => {
                let why = fault.message.clone();
                self.record(&cell, Input::StartFailed { why }).await;
                return Err(fault);
            }
        };
        // A kill may have come between.
        if !row.record.state.is_live() || row.record.end.is_some() {
            return Err(cell.explain_end().await);
        }
        Ok(views::sandbox(row))
    }

    /// Commits a new row and looks after it; the inner error is the row that the idempotency key made before.
    pub(crate) async fn insert(
        &self,
        row: SandboxRow,
        transition: &Transition,
        idempotency: Option<Idempotency>,
    ) -> Result<Result<Arc<Cell>, SandboxRow>, Fault> {
        let facts = row.facts(&transition.facts, self.now());
        // Before the commit, so that whoever learns of the row finds its cell; locked, so that nobody changes it before.
        let cell = Cell::new(row.clone());
        let mut uncommitted = cell.row.lock().await;
        self.live().insert(cell.id.clone(), Arc::clone(&cell));
        // It is needed from now on. Whoever deleted it before did not know.
        if let Err(fault) = self.template_of(&row.template) {
            self.never_was(&cell);
            return Err(fault);
        }
        let max_live = Some(self.most_rows(&row.project));
        let new = NewSandbox {
            row,
            idempotency,
            max_live,
            facts,
        };
        let inserted = self.store().sandboxes.insert_sandbox(new).await;
        if !matches!(inserted, Ok(Inserted::New(_))) {
            self.never_was(&cell);
        }
        match inserted.map_err(|e| insert_fault(&e))? {
            Inserted::New(row) => {
                cell.seen.replace(row.clone());
                *uncommitted = row;
                drop(uncommitted);
                self.mind_deadline(&cell);
                self.end_if_ownerless(&cell);
                Ok(Ok(cell))
            }
            Inserted::Existing(row) => Ok(Err(row)),
        }
    }

    /// Takes back a cell whose row is not there. Whoever came by meanwhile waits for nothing that will ever be.
    fn never_was(&self, cell: &Cell) {
        self.live().remove(&cell.id);
        let mut never = cell.last_seen();
        never.record.state = SandboxState::Deleted;
        cell.seen.replace(never);
    }

    /// For a row that was committed before this server was there.
    pub(crate) fn look_after(&self, row: SandboxRow) -> Arc<Cell> {
        let cell = Cell::new(row);
        self.live().insert(cell.id.clone(), Arc::clone(&cell));
        cell
    }

    /// From now on there is a guest to talk to, and an end to notice.
    pub(crate) fn give_instance(&self, cell: &Arc<Cell>, instance: InstanceId) -> Guest {
        self.node().attend(&cell.id, &instance);
        let guest = self.guest(instance);
        cell.set_instance(guest.clone());
        // The host's counters begin anew with each instance.
        cell.set_metered(crate::cell::Metered::default());
        cell.set_cpu_mark(atoll_lifecycle::CpuMark::NONE);
        self.resume_commands(cell, &guest);
        guest
    }

    /// The sandbox that an idempotency key found, once its creation (by whoever was first) has come to an end; `None` if it
    /// could not be started, which frees the key.
    async fn settled(&self, caller: &Caller, id: &SandboxId) -> Result<Option<Sandbox>, Fault> {
        // Only the winner of a race knows whether it works out.
        let cell = self.cell(caller, id).await?;
        let decided = |row: &SandboxRow| row.record.state != SandboxState::Starting;
        cell.seen.wait_for(decided).await;
        let row = cell.reachable().await;
        Ok((!row.could_not_start()).then(|| views::sandbox(row)))
    }

    /// Takes a pooled instance; it is held until the caller has a row for it.
    async fn claim(&self, wanted: &Wanted) -> Option<(Claimed, Held)> {
        let claimed = self.node().claim(wanted).await?;
        // Before a word is said about it, so that it is never seen to belong to nobody.
        let held = self.hold(claimed.instance.clone());
        Some((claimed, held))
    }

    /// Keeps an instance that no row names from being taken for an orphan.
    pub(crate) fn hold(&self, id: InstanceId) -> Held {
        self.held().insert(id.clone());
        Held {
            service: self.clone(),
            id,
        }
    }

    /// Destroys an instance that nobody got to see.
    pub(crate) fn discard(&self, isolation: Isolation, id: InstanceId) {
        let service = self.clone();
        self.inner
            .tasks
            .spawn(async move { service.node().destroy(isolation, &id).await });
    }
}

/// Memory comes back with what was mounted in it: the same places, though other volumes may stand there.
fn take_its_volumes(spec: &mut SandboxSpec, snapshot: &SnapshotRow) -> Result<(), Fault> {
    let places = |mounts: &[atoll_types::VolumeMount]| {
        let places = mounts.iter().map(|mount| (mount.path.clone(), mount.read_only));
        places.collect::<std::collections::BTreeSet<_>>()
    };
    if spec.volumes.is_empty() {
        spec.volumes.clone_from(&snapshot.spec.volumes);
    }
    let needed = places(&snapshot.spec.volumes);
    if places(&spec.volumes) == needed {
        return Ok(());
    }
    let needed: Vec<String> = needed.into_iter().map(|(path, _)| path).collect();
    Err(Fault::new(
        Code::SnapshotVolumesDiffer,
        match needed.as_slice() {
            [] => "its memory was saved without volumes, and comes back without".to_owned(),
            paths => format!(
                "its memory was saved with volumes at {}, and needs the same",
                paths.join(", ")
            ),
        },
    )
    .hint("take a snapshot of its files to choose other volumes"))
}

/// See [`Sandboxes::hold`].
#[derive(Debug)]
pub(crate) struct Held {
    service: Sandboxes,
    id: InstanceId,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.service.held().remove(&self.id);
    }
}

pub(crate) fn idempotency(key: String, spec: &SandboxSpec) -> Result<Idempotency, Fault> {
    crate::keyed::check(&key)?;
    let request =
        serde_json::to_vec(spec).map_err(|e| Fault::internal(format!("a spec has no JSON form: {e}")))?;
    Ok(Idempotency {
        key,
        request: Sha256::digest(request).into(),
    })
}

/// For whoever came second under an idempotency key.
fn first_failed() -> Fault {
    Fault::new(
        Code::StartFailed,
        "another request with the same idempotency key came first, and its sandbox could not be started",
    )
    .hint("ask again: the key is free")
}

pub(crate) fn insert_fault(error: &atoll_store::Error) -> Fault {
    match error {
        atoll_store::Error::IdempotencyConflict { .. } => {
            Fault::new(Code::IdempotencyConflict, error.to_string()).hint("use a new key for a new request")
        }
        atoll_store::Error::QuotaExceeded { .. } => Fault::new(Code::TooManySandboxes, error.to_string())
            .hint(
                "kill sandboxes that are no longer needed, wait for builds that go on (each counts as one), or have the \
                 operator raise the limit",
            ),
        atoll_store::Error::NameTaken { .. } => crate::names::taken(error),
        other => from_store(other),
    }
}
