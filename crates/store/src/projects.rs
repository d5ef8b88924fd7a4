//! Projects: every other object belongs to one.

use atoll_types::{ProjectId, Timestamp};
use rusqlite::Row;

use crate::{Error, Store, sql};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProjectRow {
    pub id: ProjectId,
    pub name: String,
    pub created_at: Timestamp,
}

impl Store {
    /// The project of that name; `new` gives the id it gets if there is none yet.
    pub async fn ensure_project(
        &self,
        name: &str,
        new: ProjectId,
        now: Timestamp,
    ) -> Result<ProjectRow, Error> {
        let name = name.to_owned();
        self.write("create the project", move |db| {
            sql::execute(
                db,
                "INSERT INTO projects (id, name, created_at) VALUES (?1, ?2, ?3) ON CONFLICT (name) DO NOTHING",
                &[&new.as_str(), &name, &now.0],
            )?;
            let found = sql::row(db, "SELECT * FROM projects WHERE name = ?1", &[&name], read)?;
            found.ok_or(Error::NotFound {
                what: "project",
                id: name,
            })
        })
        .await
    }

    pub async fn project(&self, id: &ProjectId) -> Result<Option<ProjectRow>, Error> {
        let id = id.clone();
        self.read("read the project", move |db| {
            sql::row(db, "SELECT * FROM projects WHERE id = ?1", &[&id.as_str()], read)
        })
        .await
    }

    /// All of them, by name.
    pub async fn projects(&self) -> Result<Vec<ProjectRow>, Error> {
        self.read("list projects", |db| {
            sql::rows(db, "SELECT * FROM projects ORDER BY name", &[], read)
        })
        .await
    }
}

fn read(row: &Row<'_>) -> rusqlite::Result<ProjectRow> {
    Ok(ProjectRow {
        id: sql::word(row, "id")?,
        name: row.get("name")?,
        created_at: sql::time(row, "created_at")?,
    })
}
