//! The life of a sandbox after its creation: transitions are decided, committed, and then performed.

use std::sync::Arc;
use std::time::Duration;

use atoll_lifecycle::{Effect, Extension, Input, step};
use atoll_runtime::InstanceEnd;
use atoll_store::{SandboxQuery, SandboxRow};
use atoll_types::{EndReason, Fault, FaultKind, InstanceId, Isolation, SandboxId, SandboxState};

use crate::cell::Cell;
use crate::faults::from_store;
use crate::{Caller, ListSandboxes, Page, Sandbox, Sandboxes, views};

/// How long a caller waits for a kill before it is told that the kill goes on.
const KILL_WITHIN: Duration = Duration::from_secs(30);

impl Sandboxes {
    pub async fn get(&self, caller: &Caller, id: &SandboxId) -> Result<Sandbox, Fault> {
        self.row(caller, id).await.map(views::sandbox)
    }

    pub async fn list(&self, caller: &Caller, request: ListSandboxes) -> Result<Page<Sandbox>, Fault> {
        let states = if request.states.is_empty() {
            SandboxState::ALL
                .into_iter()
                .filter(|state| state.is_live())
                .collect()
        } else {
            request.states
        };
        let query = SandboxQuery {
            project: caller.project.clone(),
            labels: request.labels.into_iter().collect(),
            states,
            after: crate::parse_cursor(request.cursor)?,
            limit: request.limit,
        };
        let page = self.store().sandboxes(query).await.map_err(|e| from_store(&e))?;
        Ok(Page {
            items: page.items.into_iter().map(views::sandbox).collect(),
            next: page.next.map(|cursor| cursor.to_string()),
        })
    }

    /// Ends it; returns when nothing of it is left. Killing what is already gone succeeds.
    pub async fn kill(&self, caller: &Caller, id: &SandboxId) -> Result<Sandbox, Fault> {
        let cell = self.cell(caller, id).await?;
        self.apply(
            &cell,
            Input::Kill {
                reason: EndReason::Killed,
            },
        )
        .await?;
        let mut seen = cell.seen.subscribe();
        let over = tokio::time::timeout(KILL_WITHIN, seen.wait_for(|row| !row.record.state.is_live())).await;
        match over {
            Ok(Ok(row)) => Ok(views::sandbox(row.clone())),
            _ => Err(Fault::new(
                FaultKind::Unavailable,
                "kill_in_progress",
                format!("{id} is being deleted, but the host has not let go of it yet"),
            )
            .hint("the server goes on trying; look at it again later")),
        }
    }

    /// Sets the deadline to `timeout_millis` from now.
    pub async fn extend(
        &self,
        caller: &Caller,
        id: &SandboxId,
        timeout_millis: u64,
    ) -> Result<Sandbox, Fault> {
        atoll_lifecycle::admit_timeout(Some(timeout_millis), &self.settings().limits)?;
        let cell = self.cell(caller, id).await?;
        let row = self
            .apply(&cell, Input::Extend(Extension::For { timeout_millis }))
            .await?;
        self.inner.deadlines.notify_one();
        Ok(views::sandbox(row))
    }

    /// The row of a sandbox of the caller's project.
    pub(crate) async fn row(&self, caller: &Caller, id: &SandboxId) -> Result<SandboxRow, Fault> {
        if let Some(cell) = self.live_cell(id)
            && cell.project == caller.project
        {
            return Ok(cell.last_seen());
        }
        let row = self
            .store()
            .sandbox(&caller.project, id)
            .await
            .map_err(|e| from_store(&e))?;
        row.ok_or_else(|| {
            Fault::not_found("sandbox_not_found", format!("there is no sandbox {id}"))
                .hint("`atoll ls --all` shows those that exist or existed lately")
        })
    }

    /// The sandbox, to apply something to: the one that is looked after or, when it has ended, its record.
    async fn cell(&self, caller: &Caller, id: &SandboxId) -> Result<Arc<Cell>, Fault> {
        // A row that was committed this moment may not be looked after yet.
        for _ in 0..1000 {
            if let Some(cell) = self.live_cell(id)
                && cell.project == caller.project
            {
                return Ok(cell);
            }
            let row = self.row(caller, id).await?;
            if !row.record.state.is_live() {
                return Ok(Cell::new(row));
            }
            tokio::task::yield_now().await;
        }
        Err(Fault::new(
            FaultKind::Unavailable,
            "sandbox_starting",
            format!("{id} is just being created"),
        )
        .hint("try again in a moment"))
    }

    /// Decides, commits, and has the effects performed by a task of the server's own.
    pub(crate) async fn apply(&self, cell: &Arc<Cell>, input: Input) -> Result<SandboxRow, Fault> {
        let service = self.clone();
        let cell = Arc::clone(cell);
        let task = self
            .inner
            .tasks
            .spawn(async move { service.apply_here(&cell, input).await });
        task.await
            .map_err(|_| Fault::internal("a transition was interrupted"))?
    }

    async fn apply_here(&self, cell: &Arc<Cell>, input: Input) -> Result<SandboxRow, Fault> {
        let mut row = cell.row.lock().await;
        row.record.last_used_at = row.record.last_used_at.max(cell.record().last_used_at);
        let transition = step(&row.record, input, self.now()).map_err(Fault::from)?;
        if transition.changes(&row.record) {
            let next = SandboxRow {
                record: transition.next.clone(),
                ..row.clone()
            };
            let facts = next.facts(&transition.facts, self.now());
            let saved = self
                .store()
                .update_sandbox(next, facts)
                .await
                .map_err(|e| from_store(&e))?;
            if saved.record.state != row.record.state {
                tracing::info!(sandbox = %cell.id, from = %row.record.state, to = %saved.record.state, end = ?saved.record.end, "state changed");
            }
            *row = saved.clone();
            cell.seen.send_replace(saved);
        }
        let now = row.clone();
        drop(row);
        if !now.record.state.is_live() {
            self.live().remove(&cell.id);
        }
        for effect in transition.effects {
            match effect {
                // Creation performs the start itself, where its outcome is awaited.
                Effect::StartInstance(_) => {}
                Effect::DestroyInstance(instance) => self.destroy_later(cell, now.isolation, instance),
            }
        }
        Ok(now)
    }

    /// Destroys an instance in the background and records that it is gone; tries until it works.
    fn destroy_later(&self, cell: &Arc<Cell>, isolation: Isolation, instance: InstanceId) {
        let service = self.clone();
        let cell = Arc::clone(cell);
        self.inner.tasks.spawn(async move {
            service.meter(&cell).await;
            if let Some(running) = cell.instance.get()
                && running.id == instance
            {
                running.guest.close();
            }
            service.destroy_surely(isolation, &instance).await;
            // Boxed: this future is part of the task that `apply` spawned.
            if let Err(fault) = Box::pin(service.apply_here(&cell, Input::Destroyed { instance })).await {
                tracing::error!(sandbox = %cell.id, %fault, "the end of a sandbox could not be recorded");
            }
        });
    }

    /// Destroys an instance, however often it takes.
    pub(crate) async fn destroy_surely(&self, isolation: Isolation, instance: &InstanceId) {
        let mut pause = Duration::from_millis(50);
        loop {
            let destroyed = match self.runtime(isolation) {
                Ok(runtime) => runtime.destroy(instance).await.map_err(|error| error.to_string()),
                Err(fault) => Err(fault.to_string()),
            };
            let Err(error) = destroyed else { return };
            tracing::error!(%instance, error, "an instance could not be destroyed; trying again");
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = self.inner.stop.cancelled() => return,
            }
            pause = (pause * 2).min(Duration::from_secs(30));
        }
    }

    /// Notices the end of a sandbox's instance.
    pub(crate) fn watch_end(&self, cell: &Arc<Cell>) {
        let Some(instance) = cell.instance.get() else {
            return;
        };
        let mut end = instance.end.clone();
        let service = self.clone();
        let cell = Arc::clone(cell);
        self.inner.tasks.spawn(async move {
            let fate = tokio::select! {
                end = end.wait_for(Option::is_some) => match end.as_deref() {
                    Ok(Some(InstanceEnd::OutOfMemory)) => atoll_lifecycle::InstanceFate::OutOfMemory,
                    Ok(Some(InstanceEnd::Died(why))) => atoll_lifecycle::InstanceFate::Died(why.clone()),
                    _ => return,
                },
                () = service.inner.stop.cancelled() => return,
            };
            if let Err(fault) = service.apply_here(&cell, Input::Ended { fate }).await {
                tracing::error!(sandbox = %cell.id, %fault, "the end of an instance could not be recorded");
            }
        });
    }
}
