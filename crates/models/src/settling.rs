//! The gate between calls that are settled and budgets that are summed.
//!
//! What must hold: a call holds the gate of its project from when the books know what it cost until its row says so, and whoever
//! reads what a project has spent holds that gate alone, so that no call is in neither. How long reading takes is up to the
//! project, so there is a gate for each. Nothing is remembered of those whose gate nobody holds.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use atoll_types::ProjectId;
use parking_lot::Mutex;
use tokio::sync::RwLock;

#[derive(Debug, Default)]
pub(crate) struct Settling {
    gates: Mutex<HashMap<ProjectId, Weak<RwLock<()>>>>,
}

impl Settling {
    pub(crate) fn of(&self, project: &ProjectId) -> Arc<RwLock<()>> {
        let mut gates = self.gates.lock();
        if let Some(gate) = gates.get(project).and_then(Weak::upgrade) {
            return gate;
        }
        gates.retain(|_, other| other.strong_count() > 0);
        let gate = Arc::default();
        gates.insert(project.clone(), Arc::downgrade(&gate));
        gate
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_project_that_is_summed_holds_up_itself_alone() {
        let settling = Settling::default();
        let [one, other] = [1, 2].map(|n| ProjectId::from_entropy([n; 20]));
        let summed = settling.of(&one).write_owned().await;
        assert!(settling.of(&one).try_read().is_err());
        let settled = settling.of(&other).try_read_owned();
        assert!(settled.is_ok());
        drop(summed);
        assert!(settling.of(&one).try_read().is_ok());
        drop(settled);
        let _held = settling.of(&one);
        assert_eq!(
            settling.gates.lock().len(),
            1,
            "those that nobody holds are forgotten"
        );
    }
}
