//! Projects: every other object belongs to one.

use atoll_identity::Project;
use atoll_types::{ProjectId, Timestamp};
use rusqlite::{Connection, Row};

use super::sql;
use crate::Error;

pub(crate) fn ensure(db: &Connection, name: &str, new: &ProjectId, now: Timestamp) -> Result<Project, Error> {
    sql::execute(
        db,
        "INSERT INTO projects (id, name, created_at) VALUES (?1, ?2, ?3) ON CONFLICT (name) DO NOTHING",
        &[&new.as_str(), &name, &now.0],
    )?;
    let found = sql::row(db, "SELECT * FROM projects WHERE name = ?1", &[&name], read)?;
    found.ok_or_else(|| Error::NotFound {
        what: "project",
        id: name.to_owned(),
    })
}

pub(crate) fn all(db: &Connection) -> Result<Vec<Project>, Error> {
    sql::rows(db, "SELECT * FROM projects ORDER BY name", &[], read)
}

fn read(row: &Row<'_>) -> rusqlite::Result<Project> {
    Ok(Project {
        id: sql::word(row, "id")?,
        name: row.get("name")?,
        created_at: sql::time(row, "created_at")?,
    })
}
