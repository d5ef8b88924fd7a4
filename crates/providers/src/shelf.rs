//! Connections that are open, by project: counted while they are in use, and kept for a while when they are not.
//!
//! What must hold: a connection is used again by the project that it was made for, and by no other. How many a project has
//! open, how many are kept for it, and how many are kept for all, is bounded; where there is no room, the one that was unused
//! for longest goes, of the project for which most are kept.

use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use atoll_types::ProjectId;

/// How long a connection is kept without a call.
pub(crate) const KEPT: Duration = Duration::from_secs(90);
/// How many are kept for one project.
const MOST_KEPT: usize = 512;
/// How many are kept for all.
const MOST_KEPT_OF_ALL: usize = 4096;
/// How many one project may have open, in use or not.
pub(crate) const MOST_OPEN: usize = 4096;

/// Where a connection leads, and on whose behalf it was made.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Place {
    pub(crate) project: ProjectId,
    pub(crate) scheme: String,
    /// Host and port.
    pub(crate) authority: String,
    /// Nobody asked whether it may.
    pub(crate) anywhere: bool,
}

pub(crate) struct Shelf<L> {
    kept: Mutex<Kept<L>>,
    open: Arc<Mutex<HashMap<ProjectId, usize>>>,
}

/// Those that nobody uses.
struct Kept<L> {
    projects: HashMap<ProjectId, OfOne<L>>,
    /// How many there are in all.
    count: usize,
}

/// Those of one project.
struct OfOne<L> {
    /// By where they lead; the newest last.
    places: HashMap<Place, Vec<(Instant, L)>>,
    count: usize,
}

impl<L> Default for Shelf<L> {
    fn default() -> Self {
        let kept = Kept {
            projects: HashMap::new(),
            count: 0,
        };
        Self {
            kept: Mutex::new(kept),
            open: Arc::default(),
        }
    }
}

/// Counts one open connection for as long as it lives.
pub(crate) struct Ticket {
    project: ProjectId,
    open: Arc<Mutex<HashMap<ProjectId, usize>>>,
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut open = self.open.lock();
        if let Some(count) = open.get_mut(&self.project) {
            *count -= 1;
            if *count == 0 {
                open.remove(&self.project);
            }
        }
    }
}

impl<L: Send + 'static> Shelf<L> {
    /// Room for one more connection of a project; one that is kept makes room. `None`: as many are in use as it may have.
    pub(crate) fn enter(&self, project: &ProjectId) -> Option<Ticket> {
        loop {
            {
                let mut open = self.open.lock();
                let count = open.entry(project.clone()).or_default();
                if *count < MOST_OPEN {
                    *count += 1;
                    return Some(Ticket {
                        project: project.clone(),
                        open: Arc::clone(&self.open),
                    });
                }
            }
            // What is taken out is dropped behind the lock, and gives its ticket back.
            let oldest = self.kept().take_oldest(project);
            oldest?;
        }
    }

    /// One that still works.
    pub(crate) fn take(&self, place: &Place, mut is_usable: impl FnMut(&mut L) -> bool) -> Option<L> {
        let mut kept = self.kept();
        while let Some(mut link) = kept.take_newest(place) {
            if is_usable(&mut link) {
                return Some(link);
            }
        }
        None
    }

    pub(crate) fn put(self: &Arc<Self>, place: Place, link: L) {
        let mut kept = self.kept();
        if kept.put(place, link) {
            tokio::spawn(close_old(Arc::downgrade(self)));
        }
    }

    fn kept(&self) -> MutexGuard<'_, Kept<L>> {
        self.kept.lock()
    }
}

impl<L> Kept<L> {
    /// Whether it is the first.
    fn put(&mut self, place: Place, link: L) -> bool {
        let was_empty = self.projects.is_empty();
        let project = place.project.clone();
        let of_one = self.projects.entry(project.clone()).or_insert_with(|| OfOne {
            places: HashMap::new(),
            count: 0,
        });
        of_one
            .places
            .entry(place)
            .or_default()
            .push((Instant::now(), link));
        of_one.count += 1;
        self.count += 1;
        if of_one.count > MOST_KEPT {
            self.take_oldest(&project);
        } else if self.count > MOST_KEPT_OF_ALL {
            let most = self.projects.iter().max_by_key(|(_, of_one)| of_one.count);
            if let Some(most) = most.map(|(project, _)| project.clone()) {
                self.take_oldest(&most);
            }
        }
        was_empty
    }

    fn take_newest(&mut self, place: &Place) -> Option<L> {
        let links = self.projects.get_mut(&place.project)?.places.get_mut(place)?;
        let (_, link) = links.pop()?;
        self.taken(place);
        Some(link)
    }

    /// The one of a project that was unused for longest.
    fn take_oldest(&mut self, project: &ProjectId) -> Option<L> {
        let of_one = self.projects.get_mut(project)?;
        let oldest = of_one
            .places
            .iter()
            .filter_map(|(place, links)| Some((links.first()?.0, place)))
            .min_by_key(|(since, _)| *since)
            .map(|(_, place)| place.clone())?;
        let (_, link) = of_one.places.get_mut(&oldest)?.remove(0);
        self.taken(&oldest);
        Some(link)
    }

    /// One was taken out there.
    fn taken(&mut self, place: &Place) {
        self.count -= 1;
        let Some(of_one) = self.projects.get_mut(&place.project) else {
            return;
        };
        of_one.count -= 1;
        if of_one.places.get(place).is_some_and(Vec::is_empty) {
            of_one.places.remove(place);
        }
        if of_one.count == 0 {
            self.projects.remove(&place.project);
        }
    }

    /// Closes those that nobody has used for long; whether any are left.
    fn close_old(&mut self) -> bool {
        self.projects.retain(|_, of_one| {
            of_one.places.retain(|_, links| {
                links.retain(|(since, _)| since.elapsed() < KEPT);
                !links.is_empty()
            });
            of_one.count = of_one.places.values().map(Vec::len).sum();
            of_one.count > 0
        });
        self.count = self.projects.values().map(|of_one| of_one.count).sum();
        self.count > 0
    }
}

async fn close_old<L: Send + 'static>(shelf: Weak<Shelf<L>>) {
    loop {
        tokio::time::sleep(KEPT / 3).await;
        if !shelf.upgrade().is_some_and(|shelf| shelf.kept().close_old()) {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(project: u8, host: usize) -> Place {
        Place {
            project: ProjectId::from_entropy([project; 20]),
            scheme: "https".into(),
            authority: format!("h{host}"),
            anywhere: false,
        }
    }

    fn all<L: Send + 'static>(shelf: &Shelf<L>, project: u8) -> usize {
        shelf
            .kept()
            .projects
            .get(&ProjectId::from_entropy([project; 20]))
            .map_or(0, |of_one| of_one.places.values().map(Vec::len).sum())
    }

    #[tokio::test]
    async fn nobody_is_given_what_is_kept_for_another() {
        let shelf = Arc::new(Shelf::default());
        shelf.put(place(1, 0), "first");
        assert_eq!(shelf.take(&place(2, 0), |_| true), None);
        assert_eq!(shelf.take(&place(1, 1), |_| true), None);
        assert_eq!(shelf.take(&place(1, 0), |_| true), Some("first"));
        let kept = shelf.kept();
        assert!(
            kept.projects.is_empty() && kept.count == 0,
            "nothing is left of it"
        );
    }

    #[tokio::test]
    async fn what_is_kept_is_bounded_for_each_and_for_all() {
        let shelf = Arc::new(Shelf::default());
        for host in 0..2 * MOST_KEPT {
            shelf.put(place(1, host), host);
        }
        assert_eq!(all(&shelf, 1), MOST_KEPT);
        assert_eq!(shelf.take(&place(1, 0), |_| true), None, "the oldest went");
        for project in 2..=31 {
            for host in 0..200 {
                shelf.put(place(project, host), host);
            }
        }
        let total: usize = (1..=31).map(|project| all(&shelf, project)).sum();
        assert_eq!((total, shelf.kept().count), (MOST_KEPT_OF_ALL, MOST_KEPT_OF_ALL));
        assert!(all(&shelf, 1) <= 200, "who has most gives way");
        assert!((2..=31).all(|project| all(&shelf, project) > 0));
    }

    #[tokio::test]
    async fn what_is_open_is_bounded_for_each() {
        let shelf = Arc::new(Shelf::default());
        let (one, other) = (place(1, 0), place(2, 0));
        let mut tickets: Vec<_> = (0..MOST_OPEN)
            .map(|_| shelf.enter(&one.project).unwrap())
            .collect();
        assert!(shelf.enter(&one.project).is_none());
        let _of_another = shelf.enter(&other.project).unwrap();
        // One that nobody uses makes room.
        shelf.put(one.clone(), tickets.pop().unwrap());
        tickets.push(shelf.enter(&one.project).unwrap());
        assert!(shelf.enter(&one.project).is_none());
        drop(tickets);
        assert_eq!(shelf.open.lock().len(), 1);
    }
}
