//! Places among a project's sandboxes for what has no row: builds, whose steps run in instances of their own, and templates that
//! are being brought up to be kept running.
//!
//! What must hold: new rows and places of a project are together never more than it may have. A place is taken first and rows are
//! counted then; a row's cell is there first and places are counted then. So of two who come at once, one sees the other. (A
//! sandbox that wakes at that very moment may be one more: it has its cell already, and its instance not yet.)

use std::collections::BTreeMap;
use std::sync::Arc;

use atoll_types::{Code, Fault, ProjectId};
use parking_lot::Mutex;

use crate::Sandboxes;
use crate::create::insert_fault;

/// The most at a time, of a project and of all together. The image of a build is put together in the server's own memory.
const OF_A_PROJECT: u64 = 16;
const OF_ALL: u64 = 64;

/// How many are taken, by project.
#[derive(Debug, Default)]
pub(crate) struct Places(Mutex<BTreeMap<ProjectId, u64>>);

/// One of them, until it is dropped.
#[derive(Debug)]
pub(crate) struct Place {
    places: Arc<Places>,
    project: ProjectId,
}

impl Places {
    fn of(&self, project: &ProjectId) -> u64 {
        self.0.lock().get(project).copied().unwrap_or(0)
    }

    fn take(self: &Arc<Self>, project: &ProjectId) -> Result<Place, Fault> {
        let mut taken = self.0.lock();
        let of_all: u64 = taken.values().sum();
        let ours = taken.get(project).copied().unwrap_or(0);
        if ours >= OF_A_PROJECT || of_all >= OF_ALL {
            return Err(Fault::new(
                Code::TooManyBuilds,
                format!(
                    "{OF_A_PROJECT} templates of a project are built at a time, and {OF_ALL} of all projects"
                ),
            )
            .hint("try again when one of them is done"));
        }
        taken.insert(project.clone(), ours + 1);
        Ok(Place {
            places: Arc::clone(self),
            project: project.clone(),
        })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = self.places.0.lock();
        if let Some(ours) = taken.get_mut(&self.project) {
            *ours -= 1;
            if *ours == 0 {
                taken.remove(&self.project);
            }
        }
    }
}

impl Sandboxes {
    /// How many sandboxes with instances a project may have, beside what takes places now.
    pub(crate) fn most_rows(&self, project: &ProjectId) -> u64 {
        let most = self.settings().max_live_per_project;
        most.saturating_sub(self.inner.places.of(project))
    }

    /// Takes a place of a project, if it may have one sandbox more.
    pub(crate) fn take_place(&self, project: &ProjectId) -> Result<Place, Fault> {
        let place = self.inner.places.take(project)?;
        let (live, limit) = (
            self.running_of(project) as u64,
            self.settings().max_live_per_project,
        );
        match live + self.inner.places.of(project) > limit {
            true => Err(insert_fault(&atoll_store::Error::QuotaExceeded { live, limit })),
            false => Ok(place),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_given_back_and_a_project_has_only_so_many() {
        let places = Arc::new(Places::default());
        let project = |n: u8| {
            let mut entropy = [0; 20];
            (entropy[0], entropy[1]) = (n % 16, n / 16);
            ProjectId::from_entropy(entropy)
        };
        let mut held: Vec<Place> = (0..OF_A_PROJECT)
            .map(|_| places.take(&project(1)).unwrap())
            .collect();
        assert_eq!(places.take(&project(1)).unwrap_err().code, Code::TooManyBuilds);
        held.push(places.take(&project(2)).unwrap());
        assert_eq!(
            (places.of(&project(1)), places.of(&project(2))),
            (OF_A_PROJECT, 1)
        );
        drop(held.pop());
        assert_eq!(places.of(&project(2)), 0);
        drop(held.pop());
        held.push(places.take(&project(1)).unwrap());
        for other in 3.. {
            match places.take(&project(other)) {
                Ok(place) => held.push(place),
                Err(full) => {
                    assert_eq!((full.code, held.len() as u64), (Code::TooManyBuilds, OF_ALL));
                    break;
                }
            }
        }
        drop(held);
        assert!(places.0.lock().is_empty());
    }
}
