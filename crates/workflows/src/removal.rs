//! The end of a namespace.
//!
//! ```text
//! open ──> ending     nobody comes in, who waits is sent away, and all have left
//!   ^        ├──────> deleting     durable: nothing was open, and what is left goes; a restart goes on with it
//!   └────────┘ a workflow is open     └──> gone     the last of it goes with the name, in one commit
//! ```
//!
//! What must hold: when a name is free, nothing is left that the next namespace of that name could come to: not on disk, not
//! in memory, and nobody who still waits.

use std::collections::BTreeMap;
use std::time::Duration;

use atoll_store::WorkflowStore;
use atoll_workflow_core::Refusal;

use crate::cells::finish;
use crate::namespaces::{Gate, KIND, Namespace, save};
use crate::{Engine, unavailable};

/// How many runs go at once: those who write meanwhile get their turn in between.
const SOME: usize = 500;
/// How long the store is left alone that could not delete.
const REST: Duration = Duration::from_secs(1);

/// Ends what a server before this one has begun to delete, and what earlier versions left behind names that were free.
pub(crate) async fn finish_removals(
    store: &dyn WorkflowStore,
    all: &mut BTreeMap<String, Namespace>,
) -> Result<(), Refusal> {
    let mut ended: Vec<String> = all
        .values()
        .filter(|namespace| namespace.deleting)
        .map(|namespace| namespace.name.clone())
        .collect();
    let used = store.workflow_namespaces().await.map_err(unavailable)?;
    ended.extend(used.into_iter().filter(|name| !all.contains_key(name)));
    for name in ended {
        tracing::info!(namespace = name, "deleting what is left of a namespace");
        delete_runs(store, &name, |_| ()).await?;
        delete_rest(store, &name).await?;
        all.remove(&name);
    }
    Ok(())
}

/// What may be much of it, piece by piece.
async fn delete_runs(store: &dyn WorkflowStore, name: &str, freed: impl Fn(i64)) -> Result<(), Refusal> {
    loop {
        let deleted = store.delete_workflow_runs(name.to_owned(), SOME).await;
        let (runs, bytes) = deleted.map_err(unavailable)?;
        freed(bytes);
        if runs == 0 {
            return Ok(());
        }
    }
}

/// What is left, and the namespace with it.
async fn delete_rest(store: &dyn WorkflowStore, name: &str) -> Result<(), Refusal> {
    let deleted = store.delete_workflow_namespace(KIND, name.to_owned()).await;
    deleted.map_err(unavailable)
}

impl Engine {
    /// Deletes a namespace that has no open workflows, with everything in it. Its name is free when this returns, and not
    /// before; what has begun is finished even if the caller goes away.
    pub async fn delete_namespace(&self, id: &str) -> Result<(), Refusal> {
        let engine = self.clone();
        let id = id.to_owned();
        finish(async move {
            let namespace = engine.end_namespace(&id).await?;
            engine.forget_contents(&namespace.name);
            engine.free_name(&namespace.name).await
        })
        .await
    }

    /// Sends everybody away, and makes it durable that the namespace is being deleted; or lets them in again.
    async fn end_namespace(&self, id: &str) -> Result<Namespace, Refusal> {
        let namespaces = &self.inner.namespaces;
        let has_open = async |name: &str| {
            let open = self.inner.store.has_open_workflow_runs(name.to_owned()).await;
            open.map_err(unavailable)
        };
        let refused = |name: &str| {
            Err(Refusal::FailedPrecondition(format!(
                "namespace {name} has open workflows: terminate them first"
            )))
        };
        let namespace = self.namespace("", id)?;
        let name = &namespace.name;
        // So that workers are not disturbed in vain.
        if has_open(name).await? {
            return refused(name);
        }
        let gate = {
            let _changing = namespaces.changing.lock().await;
            let all = namespaces.write();
            let known = all.get(name).filter(|known| known.namespace.id == id);
            let known = known.ok_or_else(|| Refusal::NamespaceNotFound(name.clone()))?;
            if known.is_ending() {
                return Err(Refusal::NamespaceDeleting(name.clone()));
            }
            known.gate.end.cancel();
            known.gate.clone()
        };
        // Everybody has left: nothing changes any more.
        drop(gate.inside.write().await);
        let _changing = namespaces.changing.lock().await;
        let decided = async {
            if has_open(name).await? {
                return refused(name);
            }
            // As it is by now: it may have been changed while it was asked whether it may go.
            let namespace = Namespace {
                deleting: true,
                ..self.namespace(name, "")?
            };
            save(&*self.inner.store, &namespace).await?;
            Ok(namespace)
        };
        let decided = decided.await;
        let mut all = namespaces.write();
        if let Some(known) = all.get_mut(name) {
            match &decided {
                Ok(namespace) => known.namespace = namespace.clone(),
                Err(_) => known.gate = Gate::default(),
            }
        }
        drop(all);
        if decided.is_err() {
            self.resume_batches(Some(name));
        }
        decided
    }

    /// What memory holds of it. Nobody is in it, so nothing is added meanwhile.
    fn forget_contents(&self, name: &str) {
        let inner = &self.inner;
        inner.cells.forget(name);
        inner.queues.forget(name);
        inner.schedules.forget(name);
        inner.approvals.forget(name);
        inner.batches.forget(name);
    }

    async fn free_name(&self, name: &str) -> Result<(), Refusal> {
        let (store, namespaces) = (&*self.inner.store, &self.inner.namespaces);
        loop {
            let kept = namespaces.kept(name);
            let deleted = async {
                delete_runs(store, name, |bytes| kept.add(-bytes)).await?;
                let _changing = namespaces.changing.lock().await;
                delete_rest(store, name).await?;
                namespaces.write().remove(name);
                Ok(())
            };
            let Err(error) = deleted.await else {
                return Ok(());
            };
            tracing::warn!(namespace = name, %error, "a namespace could not be deleted; trying again");
            tokio::select! {
                () = self.inner.stop.cancelled() => return Err(error),
                () = tokio::time::sleep(REST) => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use atoll_workflow_core::Start;

    use super::*;
    use crate::Options;
    use crate::starts::{Along, Policy};

    #[tokio::test(flavor = "multi_thread")]
    async fn a_namespace_where_something_began_meanwhile_stays_as_it_was() {
        let place = tempfile::tempdir().unwrap();
        let store = atoll_store::sqlite::open_workflows(&place.path().join("db")).unwrap();
        let engine = Engine::open(store.clone(), Options::default()).await.unwrap();
        let namespaces = &engine.inner.namespaces;
        let inside = namespaces.enter("default").unwrap();
        let id = engine.namespace("default", "").unwrap().id;
        let deleting = tokio::spawn({
            let engine = engine.clone();
            async move { engine.delete_namespace(&id).await }
        });
        inside.ending().await;
        let refused = namespaces.enter("default").unwrap_err();
        assert!(matches!(refused, Refusal::NamespaceDeleting(_)), "{refused:?}");
        assert!(!deleting.is_finished(), "it waits for those inside");
        let start = Start {
            namespace: "default".to_owned(),
            workflow_id: "wf".to_owned(),
            workflow_type: "W".to_owned(),
            task_queue: "queue".to_owned(),
            ..Default::default()
        };
        let policy = Policy::new(0, 0).unwrap();
        engine
            .start_in(inside, start, policy, Along::default())
            .await
            .unwrap();
        let refused = deleting.await.unwrap().unwrap_err();
        assert!(matches!(refused, Refusal::FailedPrecondition(_)), "{refused:?}");
        let _inside = namespaces.enter("default").unwrap();
        let (found, _) = engine.list_workflows("default", "", 10, b"").await.unwrap();
        assert_eq!(found.len(), 1);
        engine.close();
        store.close().await;
    }
}
