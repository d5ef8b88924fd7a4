//! The rows of snapshots, in SQLite.

use async_trait::async_trait;
use atoll_types::{ProjectId, SandboxId, SnapshotId, SnapshotOwner, TemplateId};
use rusqlite::{Connection, Row};

use super::{Saved, facts, page, sandboxes, sql};
use crate::{Cursor, Error, NewFact, Page, ProjectStorage, SandboxRow, SnapshotRow, SnapshotStore};

#[async_trait]
impl SnapshotStore for Saved {
    async fn insert_snapshot(&self, snapshot: SnapshotRow, facts: Vec<NewFact>) -> Result<(), Error> {
        self.file
            .write("save the snapshot", move |db| {
                insert(db, &snapshot)?;
                facts::append(db, &facts)
            })
            .await
    }

    async fn commit_saved(
        &self,
        row: SandboxRow,
        snapshot: SnapshotRow,
        facts: Vec<NewFact>,
    ) -> Result<SandboxRow, Error> {
        self.file
            .write("put the sandbox to rest", move |db| {
                insert(db, &snapshot)?;
                sandboxes::update(db, row, &facts)
            })
            .await
    }

    async fn snapshot(&self, project: &ProjectId, id: &SnapshotId) -> Result<Option<SnapshotRow>, Error> {
        let (project, id) = (project.clone(), id.clone());
        self.file
            .read("read the snapshot", move |db| {
                sql::row(
                    db,
                    "SELECT * FROM snapshots WHERE project = ?1 AND id = ?2",
                    &[&project.as_str(), &id.as_str()],
                    read,
                )
            })
            .await
    }

    async fn snapshot_by_name(&self, project: &ProjectId, name: &str) -> Result<Option<SnapshotRow>, Error> {
        let (project, name) = (project.clone(), name.to_owned());
        self.file
            .read("read the snapshot", move |db| {
                sql::row(
                    db,
                    "SELECT * FROM snapshots WHERE project = ?1 AND name = ?2 AND owner = 'user'",
                    &[&project.as_str(), &name],
                    read,
                )
            })
            .await
    }

    async fn snapshots(
        &self,
        project: &ProjectId,
        after: Option<Cursor>,
        limit: usize,
    ) -> Result<Page<SnapshotRow>, Error> {
        let project = project.clone();
        self.file
            .read("list snapshots", move |db| {
                page::newest(
                    db,
                    "SELECT * FROM snapshots WHERE owner = 'user' AND project = ?".to_owned(),
                    vec![&project.as_str()],
                    after.as_ref(),
                    limit,
                    read,
                    |row| (row.created_at, row.id.as_str()),
                )
            })
            .await
    }

    async fn snapshots_of_sandbox(&self, sandbox: &SandboxId) -> Result<Vec<SnapshotRow>, Error> {
        let sandbox = sandbox.clone();
        self.file
            .read("list the snapshots of a sandbox", move |db| {
                sql::rows(
                    db,
                    "SELECT * FROM snapshots WHERE sandbox = ?1 ORDER BY created_at DESC, id DESC",
                    &[&sandbox.as_str()],
                    read,
                )
            })
            .await
    }

    async fn latest_snapshot_of(&self, sandbox: &SandboxId) -> Result<Option<SnapshotId>, Error> {
        let sandbox = sandbox.clone();
        self.file
            .read("find the last snapshot of a sandbox", move |db| {
                sql::row(
                    db,
                    "SELECT id FROM snapshots WHERE sandbox = ?1 AND owner = 'user'
                 ORDER BY created_at DESC, id DESC LIMIT 1",
                    &[&sandbox.as_str()],
                    |row| sql::word(row, "id"),
                )
            })
            .await
    }

    async fn templates_of_snapshots(&self) -> Result<Vec<(ProjectId, TemplateId)>, Error> {
        self.file
            .read("look for templates of snapshots", move |db| {
                sql::rows(
                    db,
                    "SELECT DISTINCT project, template FROM snapshots WHERE owner <> 'template'",
                    &[],
                    |row| Ok((sql::word(row, "project")?, sql::word(row, "template")?)),
                )
            })
            .await
    }

    async fn snapshots_of_template(&self, template: &TemplateId) -> Result<Vec<SnapshotRow>, Error> {
        let template = template.clone();
        self.file
            .read("list the snapshots of a template", move |db| {
                sql::rows(
                    db,
                    "SELECT * FROM snapshots WHERE owner = 'template' AND template = ?1
                 ORDER BY created_at DESC, id DESC",
                    &[&template.as_str()],
                    read,
                )
            })
            .await
    }

    async fn delete_snapshot(
        &self,
        project: &ProjectId,
        id: &SnapshotId,
        facts: Vec<NewFact>,
    ) -> Result<Option<SnapshotRow>, Error> {
        let (project, id) = (project.clone(), id.clone());
        self.file
            .write("delete the snapshot", move |db| {
                let found = sql::row(
                    db,
                    "SELECT * FROM snapshots WHERE project = ?1 AND id = ?2",
                    &[&project.as_str(), &id.as_str()],
                    read,
                )?;
                let Some(row) = found else { return Ok(None) };
                match row.owner {
                    SnapshotOwner::User => {}
                    // Hidden: nobody knows of it but the sandbox.
                    SnapshotOwner::Sandbox => return Ok(None),
                    SnapshotOwner::Template => {
                        return Err(Error::InUse {
                            what: "snapshot",
                            id: id.to_string(),
                            by: format!("template {}", row.template),
                        });
                    }
                }
                remove(db, &row.id)?;
                facts::append(db, &facts)?;
                Ok(Some(row))
            })
            .await
    }

    async fn delete_snapshots_of_template(
        &self,
        project: &ProjectId,
        template: &TemplateId,
    ) -> Result<Vec<SnapshotRow>, Error> {
        let (project, template) = (project.clone(), template.clone());
        self.file
            .write("delete the snapshots of a template", move |db| {
                sql::rows(
                    db,
                    "DELETE FROM snapshots WHERE owner = 'template' AND project = ?1 AND template = ?2 RETURNING *",
                    &[&project.as_str(), &template.as_str()],
                    read,
                )
            })
            .await
    }

    async fn delete_hidden_snapshot(&self, id: &SnapshotId) -> Result<(), Error> {
        let id = id.clone();
        self.file
            .write("delete a saved state", move |db| {
                sql::execute(
                    db,
                    "DELETE FROM snapshots WHERE id = ?1 AND owner = 'sandbox'",
                    &[&id.as_str()],
                )?;
                Ok(())
            })
            .await
    }

    async fn all_snapshot_ids(&self) -> Result<Vec<SnapshotId>, Error> {
        self.file
            .read("list all snapshots", |db| {
                sql::rows(db, "SELECT id FROM snapshots", &[], |row| sql::word(row, "id"))
            })
            .await
    }

    async fn project_storage(&self, project: &ProjectId) -> Result<ProjectStorage, Error> {
        let project = project.clone();
        self.file
            .read("sum the storage of a project", move |db| {
                let sum = |sql: &str| -> Result<u64, Error> {
                    let sum = sql::row(db, sql, &[&project.as_str()], |row| sql::count(row, "bytes"))?;
                    Ok(sum.unwrap_or(0))
                };
                Ok(ProjectStorage {
                    snapshots_bytes: sum(
                        "SELECT coalesce(sum(stored_bytes), 0) AS bytes FROM snapshots WHERE project = ?1",
                    )?,
                    volumes_bytes: sum(
                        "SELECT coalesce(sum(limit_bytes), 0) AS bytes FROM volumes WHERE project = ?1",
                    )?,
                    artifacts_bytes: sum("SELECT coalesce(sum(size), 0) AS bytes
                     FROM (SELECT DISTINCT digest, size FROM artifacts WHERE project = ?1)")?,
                })
            })
            .await
    }
}

fn insert(db: &Connection, snapshot: &SnapshotRow) -> Result<(), Error> {
    if let Some(name) = &snapshot.name {
        let taken = sql::row(
            db,
            "SELECT 1 FROM snapshots WHERE project = ?1 AND name = ?2 AND owner = 'user'",
            &[&snapshot.project.as_str(), name],
            |_| Ok(()),
        )?;
        if taken.is_some() {
            return Err(Error::NameTaken {
                what: "snapshot",
                name: name.clone(),
            });
        }
    }
    sql::execute(
        db,
        "INSERT INTO snapshots (id, project, owner, name, kind, sandbox, parent, template, isolation, runtime,
             cpu_features, spec, total_bytes, stored_bytes, created_at)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15)",
        &[
            &snapshot.id.as_str(),
            &snapshot.project.as_str(),
            &snapshot.owner.name(),
            &snapshot.name,
            &snapshot.kind.name(),
            &snapshot.sandbox.as_ref().map(SandboxId::as_str),
            &snapshot.parent.as_ref().map(SnapshotId::as_str),
            &snapshot.template.as_str(),
            &snapshot.isolation.name(),
            &snapshot.runtime,
            &sql::to_json("CPU features", &snapshot.cpu_features)?,
            &sql::to_json("a spec", &snapshot.spec)?,
            &sql::as_count(snapshot.total_bytes),
            &sql::as_count(snapshot.stored_bytes),
            &snapshot.created_at.0,
        ],
    )?;
    Ok(())
}

/// Forgets the hidden snapshots of a sandbox but the one that its record names.
pub(crate) fn keep_hidden(
    db: &Connection,
    sandbox: &SandboxId,
    named: Option<&SnapshotId>,
) -> Result<(), Error> {
    sql::execute(
        db,
        "DELETE FROM snapshots WHERE sandbox = ?1 AND owner = 'sandbox' AND id IS NOT ?2",
        &[&sandbox.as_str(), &named.map(SnapshotId::as_str)],
    )?;
    Ok(())
}

fn remove(db: &Connection, id: &SnapshotId) -> Result<(), Error> {
    sql::execute(db, "DELETE FROM snapshots WHERE id = ?1", &[&id.as_str()])?;
    Ok(())
}

fn read(row: &Row<'_>) -> rusqlite::Result<SnapshotRow> {
    Ok(SnapshotRow {
        id: sql::word(row, "id")?,
        project: sql::word(row, "project")?,
        owner: sql::word(row, "owner")?,
        name: row.get("name")?,
        kind: sql::word(row, "kind")?,
        sandbox: sql::maybe_word(row, "sandbox")?,
        parent: sql::maybe_word(row, "parent")?,
        template: sql::word(row, "template")?,
        isolation: sql::word(row, "isolation")?,
        runtime: row.get("runtime")?,
        cpu_features: sql::json(row, "cpu_features")?,
        spec: sql::json(row, "spec")?,
        total_bytes: sql::count(row, "total_bytes")?,
        stored_bytes: sql::count(row, "stored_bytes")?,
        created_at: sql::time(row, "created_at")?,
    })
}
