//! Snapshots: saved state, of sandboxes, by id. The bytes lie in the vault under the same id.
//!
//! What must hold:
//! - A row is written after its bytes are durable, and removed before they are: bytes without a row are garbage, and a
//!   row without bytes is damage.
//! - The hidden snapshot of a resting sandbox exists exactly as long as that sandbox's record names it: it is inserted
//!   in the transaction that puts the sandbox to rest, and removed in the one after which its record does not name it.
//! - Only those that a user asked for are listed, have names, and can be deleted by a user.

use atoll_types::{
    Isolation, ProjectId, SandboxId, SandboxSpec, SaveKind, SnapshotId, SnapshotOwner, TemplateId, Timestamp,
};
use rusqlite::{Connection, Row};

use crate::{Cursor, Error, NewFact, Page, SandboxRow, Store, facts, page, sandboxes, sql};

#[derive(Debug, Clone, PartialEq)]
pub struct SnapshotRow {
    pub id: SnapshotId,
    pub project: ProjectId,
    pub owner: SnapshotOwner,
    /// Unique in its project; only a user's has one.
    pub name: Option<String>,
    pub kind: SaveKind,
    /// The sandbox it was taken of; that may be long gone. `None` for one that was imported or made for a template.
    pub sandbox: Option<SandboxId>,
    /// What that sandbox came from, or its last snapshot before; that may be gone, too.
    pub parent: Option<SnapshotId>,
    /// The template below it.
    pub template: TemplateId,
    pub isolation: Isolation,
    /// What wrote it, and on which processor; what reads it must match.
    pub runtime: String,
    pub cpu_features: Vec<String>,
    /// What the sandbox was asked to be.
    pub spec: SandboxSpec,
    /// As large as it is for whoever restores it.
    pub total_bytes: u64,
    /// What it added to the vault.
    pub stored_bytes: u64,
    pub created_at: Timestamp,
}

/// What a project has on the host's disks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ProjectStorage {
    /// Of every owner: a paused sandbox, too, takes room.
    pub snapshots_bytes: u64,
    /// As last measured.
    pub volumes_bytes: u64,
    /// Equal contents count once.
    pub artifacts_bytes: u64,
}

impl ProjectStorage {
    pub fn total(&self) -> u64 {
        self.snapshots_bytes
            .saturating_add(self.volumes_bytes)
            .saturating_add(self.artifacts_bytes)
    }
}

impl Store {
    /// Refused with [`Error::NameTaken`] if the project has a snapshot of that name.
    pub async fn insert_snapshot(&self, snapshot: SnapshotRow, facts: Vec<NewFact>) -> Result<(), Error> {
        self.write("save the snapshot", move |db| {
            insert(db, &snapshot)?;
            facts::append(db, &facts)
        })
        .await
    }

    /// Puts a sandbox to rest: its row and the hidden snapshot that its record names from now on, or neither.
    pub async fn commit_saved(
        &self,
        row: SandboxRow,
        snapshot: SnapshotRow,
        facts: Vec<NewFact>,
    ) -> Result<SandboxRow, Error> {
        self.write("put the sandbox to rest", move |db| {
            insert(db, &snapshot)?;
            sandboxes::update(db, row, &facts)
        })
        .await
    }

    /// Whomever it belongs to: a caller that asks for a user looks at its owner.
    pub async fn snapshot(&self, project: &ProjectId, id: &SnapshotId) -> Result<Option<SnapshotRow>, Error> {
        let (project, id) = (project.clone(), id.clone());
        self.read("read the snapshot", move |db| {
            sql::row(
                db,
                "SELECT * FROM snapshots WHERE project = ?1 AND id = ?2",
                &[&project.as_str(), &id.as_str()],
                read,
            )
        })
        .await
    }

    /// A snapshot that a user asked for; no other has a name.
    pub async fn snapshot_by_name(
        &self,
        project: &ProjectId,
        name: &str,
    ) -> Result<Option<SnapshotRow>, Error> {
        let (project, name) = (project.clone(), name.to_owned());
        self.read("read the snapshot", move |db| {
            sql::row(
                db,
                "SELECT * FROM snapshots WHERE project = ?1 AND name = ?2 AND owner = 'user'",
                &[&project.as_str(), &name],
                read,
            )
        })
        .await
    }

    /// Those that users asked for, newest first.
    pub async fn snapshots(
        &self,
        project: &ProjectId,
        after: Option<Cursor>,
        limit: usize,
    ) -> Result<Page<SnapshotRow>, Error> {
        let project = project.clone();
        self.read("list snapshots", move |db| {
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

    /// All that were taken of a sandbox, the hidden one too, newest first.
    pub async fn snapshots_of_sandbox(&self, sandbox: &SandboxId) -> Result<Vec<SnapshotRow>, Error> {
        let sandbox = sandbox.clone();
        self.read("list the snapshots of a sandbox", move |db| {
            sql::rows(
                db,
                "SELECT * FROM snapshots WHERE sandbox = ?1 ORDER BY created_at DESC, id DESC",
                &[&sandbox.as_str()],
                read,
            )
        })
        .await
    }

    /// The last that a user took of a sandbox: the parent of its next.
    pub async fn latest_snapshot_of(&self, sandbox: &SandboxId) -> Result<Option<SnapshotId>, Error> {
        let sandbox = sandbox.clone();
        self.read("find the last snapshot of a sandbox", move |db| {
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

    /// The templates that a user's snapshot or a sandbox at rest needs to come back.
    pub async fn templates_of_snapshots(&self) -> Result<Vec<TemplateId>, Error> {
        self.read("look for templates of snapshots", move |db| {
            sql::rows(
                db,
                "SELECT DISTINCT template FROM snapshots WHERE owner <> 'template'",
                &[],
                |row| sql::word(row, "template"),
            )
        })
        .await
    }

    /// What is kept for a template that comes up running, newest first.
    pub async fn snapshots_of_template(&self, template: &TemplateId) -> Result<Vec<SnapshotRow>, Error> {
        let template = template.clone();
        self.read("list the snapshots of a template", move |db| {
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

    /// Forgets a snapshot that a user asked for and gives back what it was; `None`, and no facts, when there is none.
    /// One that is kept for a template is refused with [`Error::InUse`]. The caller removes the bytes after this.
    pub async fn delete_snapshot(
        &self,
        project: &ProjectId,
        id: &SnapshotId,
        facts: Vec<NewFact>,
    ) -> Result<Option<SnapshotRow>, Error> {
        let (project, id) = (project.clone(), id.clone());
        self.write("delete the snapshot", move |db| {
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

    /// Forgets what was kept for a template and says what it was. The caller removes the bytes after this.
    pub async fn delete_snapshots_of_template(
        &self,
        template: &TemplateId,
    ) -> Result<Vec<SnapshotRow>, Error> {
        let template = template.clone();
        self.write("delete the snapshots of a template", move |db| {
            sql::rows(
                db,
                "DELETE FROM snapshots WHERE owner = 'template' AND template = ?1 RETURNING *",
                &[&template.as_str()],
                read,
            )
        })
        .await
    }

    /// Forgets the hidden snapshot of a sandbox that is about to end, if it is still there. (When the sandbox has ended
    /// or runs again, this has happened already.)
    pub async fn delete_hidden_snapshot(&self, id: &SnapshotId) -> Result<(), Error> {
        let id = id.clone();
        self.write("delete a saved state", move |db| {
            sql::execute(
                db,
                "DELETE FROM snapshots WHERE id = ?1 AND owner = 'sandbox'",
                &[&id.as_str()],
            )?;
            Ok(())
        })
        .await
    }

    /// Every snapshot of every project and owner: what is not among them is garbage in the vault.
    pub async fn all_snapshot_ids(&self) -> Result<Vec<SnapshotId>, Error> {
        self.read("list all snapshots", |db| {
            sql::rows(db, "SELECT id FROM snapshots", &[], |row| sql::word(row, "id"))
        })
        .await
    }

    /// What a project has on disk, for its quota.
    pub async fn project_storage(&self, project: &ProjectId) -> Result<ProjectStorage, Error> {
        let project = project.clone();
        self.read("sum the storage of a project", move |db| {
            let sum = |sql: &str| -> Result<u64, Error> {
                let sum = sql::row(db, sql, &[&project.as_str()], |row| sql::count(row, "bytes"))?;
                Ok(sum.unwrap_or(0))
            };
            Ok(ProjectStorage {
                snapshots_bytes: sum(
                    "SELECT coalesce(sum(stored_bytes), 0) AS bytes FROM snapshots WHERE project = ?1",
                )?,
                volumes_bytes: sum(
                    "SELECT coalesce(sum(used_bytes), 0) AS bytes FROM volumes WHERE project = ?1",
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
