//! Names of hosts to addresses, on threads of their own.
//!
//! The system's resolver blocks for as long as a name's own server likes, and cannot be interrupted. What must hold: that
//! costs only whoever asks for such names. A project has few lookups under way, and waits in line with the others for more;
//! a place is held until its thread is back, so there are never more threads than places. Nothing else runs on them.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::sync::Arc;

use atoll_types::ProjectId;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

use crate::link::Failure;

/// Lookups of one project.
const OF_ONE: usize = 8;
/// Lookups of all together.
const OF_ALL: usize = 128;
/// The resolver keeps answers on its stack.
const STACK: usize = 256 * 1024;

/// How a name is looked up; tests bring their own.
type Look = fn(&str) -> std::io::Result<Vec<SocketAddr>>;

#[derive(Debug, Clone)]
pub(crate) struct Names {
    all: Arc<Semaphore>,
    /// Of projects that have lookups under way.
    projects: Arc<Mutex<HashMap<ProjectId, Arc<Semaphore>>>>,
    look: Look,
}

impl Default for Names {
    fn default() -> Self {
        // The port is filled in by who connects.
        Self::with(|name| Ok((name, 0).to_socket_addrs()?.collect()))
    }
}

/// A place in both lines; given back when the lookup is over.
struct Turn {
    _all: OwnedSemaphorePermit,
    _one: OwnedSemaphorePermit,
}

impl Names {
    fn with(look: Look) -> Self {
        Self {
            all: Arc::new(Semaphore::new(OF_ALL)),
            projects: Arc::default(),
            look,
        }
    }

    /// The addresses of a name. Whoever stops waiting leaves the line; a lookup that has begun holds its place to its end.
    pub(crate) async fn look_up(
        &self,
        project: &ProjectId,
        name: String,
    ) -> Result<Vec<SocketAddr>, Failure> {
        let own = self.of(project);
        // First the own line: who waits there stands in nobody else's way.
        let one = own.acquire_owned().await?;
        let all = Arc::clone(&self.all).acquire_owned().await?;
        let turn = Turn { _all: all, _one: one };
        let (tell, told) = oneshot::channel();
        let look = self.look;
        std::thread::Builder::new()
            .name("atoll-names".into())
            .stack_size(STACK)
            .spawn(move || {
                let found = look(&name);
                drop(turn);
                // Who has given up waiting does not want to know.
                drop(tell.send(found));
            })?;
        Ok(told.await??)
    }

    fn of(&self, project: &ProjectId) -> Arc<Semaphore> {
        let mut projects = self.projects.lock();
        if !projects.contains_key(project) {
            // Those that nobody uses are as good as new ones.
            projects.retain(|_, own| Arc::strong_count(own) > 1);
        }
        let own = projects
            .entry(project.clone())
            .or_insert_with(|| Arc::new(Semaphore::new(OF_ONE)));
        Arc::clone(own)
    }
}

#[cfg(test)]
mod tests {
    use parking_lot::{Condvar, Mutex};

    use super::*;

    static OPEN: (Mutex<bool>, Condvar) = (Mutex::new(false), Condvar::new());

    /// `slow…` answers when it is let; everything else at once.
    fn look(name: &str) -> std::io::Result<Vec<SocketAddr>> {
        if name.starts_with("slow") {
            let mut open = OPEN.0.lock();
            while !*open {
                OPEN.1.wait(&mut open);
            }
        }
        Ok(vec!["192.0.2.1:0".parse().unwrap()])
    }

    #[tokio::test]
    async fn names_that_nobody_answers_cost_only_who_asks_for_them() {
        let names = Names::with(look);
        let project = |n| ProjectId::from_entropy([n; 20]);
        let asking: Vec<_> = (0..10 * OF_ALL)
            .map(|n| {
                let names = names.clone();
                tokio::spawn(async move { names.look_up(&project(1), format!("slow{n}")).await })
            })
            .collect();
        while names.of(&project(1)).available_permits() > 0 {
            tokio::task::yield_now().await;
        }
        assert_eq!(names.all.available_permits(), OF_ALL - OF_ONE);
        let found = names.look_up(&project(2), "quick".into()).await.unwrap();
        assert_eq!(found.len(), 1);
        // Who stops waiting leaves the line, and what has begun keeps its place until it is over.
        for one in asking {
            one.abort();
            let _ = one.await;
        }
        assert_eq!(names.all.available_permits(), OF_ALL - OF_ONE);
        *OPEN.0.lock() = true;
        OPEN.1.notify_all();
        names.look_up(&project(1), "slow again".into()).await.unwrap();
        drop(names.of(&project(3)));
        let kept = names.projects.lock().len();
        assert!(kept <= 2, "{kept}");
    }
}
