//! Who is told that the ledger has grown: whoever looks at all of it, and whoever looks at what one project did.
//!
//! What must hold: the facts of a project wake those who wait for that project's and nobody who waits for another's, however
//! many these are. Whoever subscribes is told of all that is committed afterwards. Nothing is remembered of a project for
//! which nobody waits.

use std::collections::HashMap;

use parking_lot::Mutex;
use rusqlite::Connection;
use tokio::sync::watch;

#[derive(Debug, Default)]
pub(super) struct Growth(Mutex<Told>);

#[derive(Debug, Default)]
struct Told {
    /// The number of the last fact that was committed; 0 in a file without a ledger.
    all: watch::Sender<i64>,
    /// The same, as it was when a project's last one was.
    projects: HashMap<String, watch::Sender<i64>>,
}

impl Growth {
    /// Changes with every growth, or with that of one project's part, to the number of the last fact by then.
    pub(super) fn subscribe(&self, project: Option<&str>) -> watch::Receiver<i64> {
        let mut told = self.0.lock();
        let Some(project) = project else {
            return told.all.subscribe();
        };
        let last = *told.all.borrow();
        let own = told.projects.entry(project.to_owned());
        own.or_insert_with(|| watch::Sender::new(last)).subscribe()
    }

    /// After a commit.
    pub(super) fn tell(&self, connection: &Connection) {
        let last = last_fact(connection);
        let mut told = self.0.lock();
        let known = *told.all.borrow();
        if last <= known {
            return;
        }
        told.projects.retain(|_, own| own.receiver_count() > 0);
        if !told.projects.is_empty() {
            match projects_after(connection, known) {
                Ok(grown) => {
                    for project in grown {
                        if let Some(own) = told.projects.get(&project) {
                            own.send_replace(last);
                        }
                    }
                }
                Err(error) => {
                    tracing::warn!(%error, "whose facts are new cannot be read, so everybody looks");
                    for own in told.projects.values() {
                        own.send_replace(last);
                    }
                }
            }
        }
        told.all.send_replace(last);
    }
}

/// The number of the last fact; 0 when there is none, or it cannot be read.
fn last_fact(connection: &Connection) -> i64 {
    let last = connection
        .prepare_cached("SELECT max(seq) FROM facts")
        .and_then(|mut query| query.query_row([], |row| row.get::<_, Option<i64>>(0)));
    last.ok().flatten().unwrap_or(0)
}

fn projects_after(connection: &Connection, known: i64) -> rusqlite::Result<Vec<String>> {
    // By number: the index by project would be read whole.
    let mut query =
        connection.prepare_cached("SELECT DISTINCT project FROM facts NOT INDEXED WHERE seq > ?1")?;
    let rows = query.query_map([known], |row| row.get(0))?;
    rows.collect()
}
