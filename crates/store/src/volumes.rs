//! Volumes: directories that outlive sandboxes and are shared by them. The bytes lie elsewhere, by id.
//!
//! What must hold:
//! - A name belongs to one volume of its project.
//! - A volume that a sandbox which has not ended was created with cannot be deleted, however the two requests race: the
//!   attachment is written with the sandbox's row, and goes in the transaction in which the sandbox ends.
//! - An attachment names the volume that the name meant when the sandbox was created.

use std::fmt;
use std::str::FromStr;

use atoll_types::{ProjectId, SandboxId, Timestamp, VolumeId, VolumeMount};
use rusqlite::{Connection, Row};

use crate::{Cursor, Error, NewFact, Page, Store, facts, page, sql};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VolumeRow {
    pub id: VolumeId,
    pub project: ProjectId,
    pub name: String,
    pub state: VolumeState,
    /// The most it may hold.
    pub limit_bytes: u64,
    /// What it held when somebody last looked.
    pub used_bytes: u64,
    pub created_at: Timestamp,
}

/// ```text
///   insert ──> Creating ── its directory is there ──> Ready ── delete ──> (no row; then the bytes go)
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum VolumeState {
    /// Named, but its directory may not be there yet. One that is found so after a restart was never promised.
    Creating,
    Ready,
}

/// A volume as a sandbox that has not ended sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attachment {
    pub volume: VolumeId,
    pub path: String,
    pub read_only: bool,
}

impl Store {
    /// Refused with [`Error::NameTaken`] if the project has a volume of that name.
    pub async fn insert_volume(&self, volume: VolumeRow, facts: Vec<NewFact>) -> Result<(), Error> {
        self.write("create the volume", move |db| {
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

    /// By id or by name.
    pub async fn volume(&self, project: &ProjectId, id_or_name: &str) -> Result<Option<VolumeRow>, Error> {
        let (project, id_or_name) = (project.clone(), id_or_name.to_owned());
        self.read("read the volume", move |db| find(db, &project, &id_or_name))
            .await
    }

    /// Newest first.
    pub async fn volumes(
        &self,
        project: &ProjectId,
        after: Option<Cursor>,
        limit: usize,
    ) -> Result<Page<VolumeRow>, Error> {
        let project = project.clone();
        self.read("list volumes", move |db| {
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

    /// Every volume of every project: for recovery, measuring, and to know what on disk is garbage.
    pub async fn all_volumes(&self) -> Result<Vec<VolumeRow>, Error> {
        self.read("list all volumes", |db| {
            sql::rows(db, "SELECT * FROM volumes ORDER BY id", &[], read)
        })
        .await
    }

    /// Forgets a volume and gives back what it was; `None`, and no facts, when there is none. Refused with
    /// [`Error::InUse`] while a sandbox that has not ended was created with it. The caller removes the bytes after this.
    pub async fn delete_volume(
        &self,
        project: &ProjectId,
        id: &VolumeId,
        facts: Vec<NewFact>,
    ) -> Result<Option<VolumeRow>, Error> {
        let (project, id) = (project.clone(), id.clone());
        self.write("delete the volume", move |db| {
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

    pub async fn set_volume_state(&self, id: &VolumeId, state: VolumeState) -> Result<(), Error> {
        let id = id.clone();
        self.write("update the volume", move |db| {
            let changed = sql::execute(
                db,
                "UPDATE volumes SET state = ?2 WHERE id = ?1",
                &[&id.as_str(), &state.name()],
            )?;
            one_or_none(changed, &id)
        })
        .await
    }

    /// Notes how much it holds; a volume that is gone by now is none of our business.
    pub async fn set_volume_used(&self, id: &VolumeId, used_bytes: u64) -> Result<(), Error> {
        let id = id.clone();
        self.write("update the volume", move |db| {
            sql::execute(
                db,
                "UPDATE volumes SET used_bytes = ?2 WHERE id = ?1",
                &[&id.as_str(), &sql::as_count(used_bytes)],
            )?;
            Ok(())
        })
        .await
    }

    pub async fn set_volume_limit(&self, id: &VolumeId, limit_bytes: u64) -> Result<(), Error> {
        let id = id.clone();
        self.write("update the volume", move |db| {
            let changed = sql::execute(
                db,
                "UPDATE volumes SET limit_bytes = ?2 WHERE id = ?1",
                &[&id.as_str(), &sql::as_count(limit_bytes)],
            )?;
            one_or_none(changed, &id)
        })
        .await
    }

    /// What a sandbox sees, by path; nothing when it has ended.
    pub async fn attachments(&self, sandbox: &SandboxId) -> Result<Vec<Attachment>, Error> {
        let sandbox = sandbox.clone();
        self.read("list the volumes of a sandbox", move |db| {
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

    /// The sandboxes that see a volume.
    pub async fn attached_to(&self, volume: &VolumeId) -> Result<Vec<SandboxId>, Error> {
        let volume = volume.clone();
        self.read("list the sandboxes of a volume", move |db| {
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

impl VolumeState {
    pub fn name(self) -> &'static str {
        match self {
            Self::Creating => "creating",
            Self::Ready => "ready",
        }
    }
}

impl fmt::Display for VolumeState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for VolumeState {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "creating" => Ok(Self::Creating),
            "ready" => Ok(Self::Ready),
            other => Err(format!("unknown volume state `{other}`")),
        }
    }
}
