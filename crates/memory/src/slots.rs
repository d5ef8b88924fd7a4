//! Places for work that holds something scarce for as long as a client likes, such as a thread and room on the disk: a few for
//! each project, so that no project waits for another one.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;

use atoll_types::{Code, Fault, ProjectId};

/// Cheap to clone; every clone is the same.
#[derive(Debug, Clone)]
pub struct Slots(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    /// What they are for, as in "8 uploads".
    what: &'static str,
    server: usize,
    project: usize,
    taken: Mutex<HashMap<ProjectId, usize>>,
}

/// One place, until it is dropped.
#[derive(Debug)]
pub struct Slot {
    slots: Slots,
    project: ProjectId,
}

impl Slots {
    pub fn new(what: &'static str, server: usize, project: usize) -> Self {
        Self(Arc::new(Inner {
            what,
            server,
            project,
            taken: Mutex::default(),
        }))
    }

    pub fn take(&self, project: &ProjectId) -> Result<Slot, Fault> {
        let Inner { what, server, .. } = *self.0;
        let mut taken = self.0.taken.lock();
        let of_project = taken.get(project).copied().unwrap_or(0);
        let refuse = |whose: &str, count: usize| {
            Fault::new(
                Code::TooManyUploads,
                format!("{count} {what}{whose} are under way already"),
            )
            .hint("try again when one of them is done")
        };
        if of_project >= self.0.project {
            return Err(refuse(" of this project", of_project));
        }
        let all: usize = taken.values().sum();
        if all >= server {
            return Err(refuse("", all));
        }
        *taken.entry(project.clone()).or_default() += 1;
        Ok(Slot {
            slots: self.clone(),
            project: project.clone(),
        })
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut taken = self.slots.0.taken.lock();
        if let Some(count) = taken.get_mut(&self.project) {
            *count -= 1;
            if *count == 0 {
                taken.remove(&self.project);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_project_takes_its_own_places_only() {
        let project = |n| ProjectId::from_entropy([n; 20]);
        let slots = Slots::new("uploads", 3, 2);
        let first = slots.take(&project(1)).unwrap();
        let _second = slots.take(&project(1)).unwrap();
        let refused = slots.take(&project(1)).unwrap_err();
        assert_eq!(refused.message, "2 uploads of this project are under way already");
        let _other = slots.take(&project(2)).unwrap();
        assert!(slots.take(&project(3)).is_err(), "the server has three");
        drop(first);
        slots.take(&project(1)).unwrap();
    }
}
