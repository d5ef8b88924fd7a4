//! The rows of volumes and of who sees them, in SQLite.

use async_trait::async_trait;
use atoll_types::{ProjectId, SandboxId, VolumeId, VolumeMount};
use rusqlite::{Connection, Row};

use super::{Saved, facts, page, sql};
use crate::{Attachment, Cursor, Error, NewFact, Page, VolumeRow, VolumeState, VolumeStore};

#[async_trait]
impl VolumeStore for Saved {
    async fn insert_volume(&self, volume: VolumeRow, facts: Vec<NewFact>) -> Result<(), Error> {
        self.file
            .write("create the volume", move |db| {
                if find(db, &volume.project, &volume.name)?.is_some() {
                    return Err(Error::NameTaken {
                        what: "volume",
                        name: volume.name,
                    });
                }
                sql::execute(
                    db,
                    "INSERT INTO volumes (id, project, name, state, limit_bytes, used_bytes, created_at)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
                    &[
                        &volume.id.as_str(),
                        &volume.project.as_str(),
                        &volume.name,
                        &volume.state.name(),
                        &sql::as_count(volume.limit_bytes),
                        &sql::as_count(volume.used_bytes),
                        &volume.created_at.0,
                    ],
                )?;
                facts::append(db, &facts)
            })
            .await
    }

    async fn volume(&self, project: &ProjectId, id_or_name: &str) -> Result<Option<VolumeRow>, Error> {
        let (project, id_or_name) = (project.clone(), id_or_name.to_owned());
        self.file
            .read("read the volume", move |db| find(db, &project, &id_or_name))
            .await
    }

    async fn volumes(
        &self,
        project: &ProjectId,
        after: Option<Cursor>,
        limit: usize,
    ) -> Result<Page<VolumeRow>, Error> {
        let project = project.clone();
        self.file
            .read("list volumes", move |db| {
                page::newest(
                    db,
                    "SELECT * FROM volumes WHERE project = ?".to_owned(),
                    vec![&project.as_str()],
                    after.as_ref(),
                    limit,
                    read,
                    |row| (row.created_at, row.id.as_str()),
                )
            })
            .await
    }

    async fn project_of_volume(&self, id: &VolumeId) -> Result<Option<ProjectId>, Error> {
        let id = id.clone();
        self.file
            .read("read the volume", move |db| {
                let sql = "SELECT * FROM volumes WHERE id = ?1";
                let row = sql::row(db, sql, &[&id.as_str()], read)?;
                Ok(row
                    .filter(|row| row.state == VolumeState::Ready)
                    .map(|row| row.project))
            })
            .await
    }

    async fn all_volumes(&self) -> Result<Vec<VolumeRow>, Error> {
        self.file
            .read("list all volumes", |db| {
                sql::rows(db, "SELECT * FROM volumes ORDER BY id", &[], read)
            })
            .await
    }

    async fn delete_volume(
        &self,
        project: &ProjectId,
        id: &VolumeId,
        facts: Vec<NewFact>,
    ) -> Result<Option<VolumeRow>, Error> {
        let (project, id) = (project.clone(), id.clone());
        self.file
            .write("delete the volume", move |db| {
                let Some(row) = find(db, &project, id.as_str())?.filter(|row| row.id == id) else {
                    return Ok(None);
                };
                let user = sql::row(
                    db,
                    "SELECT sandbox FROM attachments WHERE volume = ?1 LIMIT 1",
                    &[&id.as_str()],
                    |row| row.get::<_, String>("sandbox"),
                )?;
                if let Some(sandbox) = user {
                    return Err(Error::InUse {
                        what: "volume",
                        id: id.to_string(),
                        by: format!("sandbox {sandbox}"),
                    });
                }
                sql::execute(db, "DELETE FROM volumes WHERE id = ?1", &[&id.as_str()])?;
                facts::append(db, &facts)?;
                Ok(Some(row))
            })
            .await
    }

    async fn set_volume_state(&self, id: &VolumeId, state: VolumeState) -> Result<(), Error> {
        let id = id.clone();
        self.file
            .write("update the volume", move |db| {
                let changed = sql::execute(
                    db,
                    "UPDATE volumes SET state = ?2 WHERE id = ?1",
                    &[&id.as_str(), &state.name()],
                )?;
                one_or_none(changed, &id)
            })
            .await
    }

    async fn set_volume_used(&self, id: &VolumeId, used_bytes: u64) -> Result<(), Error> {
        let id = id.clone();
        self.file
            .write("update the volume", move |db| {
                sql::execute(
                    db,
                    "UPDATE volumes SET used_bytes = ?2 WHERE id = ?1",
                    &[&id.as_str(), &sql::as_count(used_bytes)],
                )?;
                Ok(())
            })
            .await
    }

    async fn set_volume_limit(&self, id: &VolumeId, limit_bytes: u64) -> Result<(), Error> {
        let id = id.clone();
        self.file
            .write("update the volume", move |db| {
                let changed = sql::execute(
                    db,
                    "UPDATE volumes SET limit_bytes = ?2 WHERE id = ?1",
                    &[&id.as_str(), &sql::as_count(limit_bytes)],
                )?;
                one_or_none(changed, &id)
            })
            .await
    }

    async fn attachments(&self, sandbox: &SandboxId) -> Result<Vec<Attachment>, Error> {
        let sandbox = sandbox.clone();
        self.file
            .read("list the volumes of a sandbox", move |db| {
                sql::rows(
                    db,
                    "SELECT * FROM attachments WHERE sandbox = ?1 ORDER BY path",
                    &[&sandbox.as_str()],
                    |row| {
                        Ok(Attachment {
                            volume: sql::word(row, "volume")?,
                            path: row.get("path")?,
                            read_only: row.get("read_only")?,
                        })
                    },
                )
            })
            .await
    }

    async fn attached_to(&self, volume: &VolumeId) -> Result<Vec<SandboxId>, Error> {
        let volume = volume.clone();
        self.file
            .read("list the sandboxes of a volume", move |db| {
                sql::rows(
                    db,
                    "SELECT DISTINCT sandbox FROM attachments WHERE volume = ?1 ORDER BY sandbox",
                    &[&volume.as_str()],
                    |row| sql::word(row, "sandbox"),
                )
            })
            .await
    }
}

/// Writes down which volumes a new sandbox sees, inside of the transaction that writes its row.
pub(crate) fn attach(
    db: &Connection,
    project: &ProjectId,
    sandbox: &SandboxId,
    mounts: &[VolumeMount],
) -> Result<(), Error> {
    for mount in mounts {
        let found = find(db, project, &mount.volume)?.filter(|row| row.state == VolumeState::Ready);
        let Some(volume) = found else {
            return Err(Error::NotFound {
                what: "volume",
                id: mount.volume.clone(),
            });
        };
        sql::execute(
            db,
            "INSERT INTO attachments (sandbox, path, volume, read_only) VALUES (?1, ?2, ?3, ?4)",
            &[
                &sandbox.as_str(),
                &mount.path,
                &volume.id.as_str(),
                &mount.read_only,
            ],
        )?;
    }
    Ok(())
}

/// Lets go of the volumes of a sandbox that ends.
pub(crate) fn detach(db: &Connection, sandbox: &SandboxId) -> Result<(), Error> {
    sql::execute(
        db,
        "DELETE FROM attachments WHERE sandbox = ?1",
        &[&sandbox.as_str()],
    )?;
    Ok(())
}

/// An id comes before a name that looks like one.
fn find(db: &Connection, project: &ProjectId, id_or_name: &str) -> Result<Option<VolumeRow>, Error> {
    sql::row(
        db,
        "SELECT * FROM volumes WHERE project = ?1 AND (id = ?2 OR name = ?2) ORDER BY id = ?2 DESC LIMIT 1",
        &[&project.as_str(), &id_or_name],
        read,
    )
}

fn one_or_none(changed: usize, id: &VolumeId) -> Result<(), Error> {
    if changed == 0 {
        return Err(Error::NotFound {
            what: "volume",
            id: id.to_string(),
        });
    }
    Ok(())
}

fn read(row: &Row<'_>) -> rusqlite::Result<VolumeRow> {
    Ok(VolumeRow {
        id: sql::word(row, "id")?,
        project: sql::word(row, "project")?,
        name: row.get("name")?,
        state: sql::word(row, "state")?,
        limit_bytes: sql::count(row, "limit_bytes")?,
        used_bytes: sql::count(row, "used_bytes")?,
        created_at: sql::time(row, "created_at")?,
    })
}
