//! Sealed secrets, in SQLite.

use async_trait::async_trait;
use atoll_types::{ProjectId, SecretId};
use rusqlite::{Connection, Row};

use super::{Sandboxes, facts, page, sql};
use crate::{Cursor, Error, NewFact, Page, SecretRow, SecretStore};

#[async_trait]
impl SecretStore for Sandboxes {
    async fn insert_secret(&self, secret: SecretRow, facts: Vec<NewFact>) -> Result<(), Error> {
        self.file
            .write("keep the secret", move |db| {
                if find(db, &secret.project, &secret.name)?.is_some() {
                    return Err(Error::NameTaken {
                        what: "secret",
                        name: secret.name,
                    });
                }
                sql::execute(
                db,
                "INSERT INTO secrets (id, project, name, sealed, binding, created_at, rotated_at, expires_at)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
                &[
                    &secret.id.as_str(),
                    &secret.project.as_str(),
                    &secret.name,
                    &secret.sealed,
                    &sql::to_json("a binding", &secret.binding)?,
                    &secret.created_at.0,
                    &secret.rotated_at.map(|at| at.0),
                    &secret.expires_at.map(|at| at.0),
                ],
            )?;
                facts::append(db, &facts)
            })
            .await
    }

    async fn update_secret(&self, secret: SecretRow, facts: Vec<NewFact>) -> Result<(), Error> {
        self.file
            .write("update the secret", move |db| {
                let changed = sql::execute(
                    db,
                    "UPDATE secrets SET sealed = ?3, binding = ?4, rotated_at = ?5, expires_at = ?6
                 WHERE project = ?1 AND id = ?2",
                    &[
                        &secret.project.as_str(),
                        &secret.id.as_str(),
                        &secret.sealed,
                        &sql::to_json("a binding", &secret.binding)?,
                        &secret.rotated_at.map(|at| at.0),
                        &secret.expires_at.map(|at| at.0),
                    ],
                )?;
                if changed == 0 {
                    return Err(Error::NotFound {
                        what: "secret",
                        id: secret.name,
                    });
                }
                facts::append(db, &facts)
            })
            .await
    }

    async fn secret_by_name(&self, project: &ProjectId, name: &str) -> Result<Option<SecretRow>, Error> {
        let (project, name) = (project.clone(), name.to_owned());
        self.file
            .read("read the secret", move |db| find(db, &project, &name))
            .await
    }

    async fn secret_by_id(&self, id: &SecretId) -> Result<Option<SecretRow>, Error> {
        let id = id.clone();
        self.file
            .read("read the secret", move |db| {
                sql::row(db, "SELECT * FROM secrets WHERE id = ?1", &[&id.as_str()], read)
            })
            .await
    }

    async fn secrets(
        &self,
        project: &ProjectId,
        after: Option<Cursor>,
        limit: usize,
    ) -> Result<Page<SecretRow>, Error> {
        let project = project.clone();
        self.file
            .read("list secrets", move |db| {
                page::newest(
                    db,
                    "SELECT * FROM secrets WHERE project = ?".to_owned(),
                    vec![&project.as_str()],
                    after.as_ref(),
                    limit,
                    read,
                    |row| (row.created_at, row.id.as_str()),
                )
            })
            .await
    }

    async fn secrets_kept(&self, project: &ProjectId) -> Result<(u64, u64), Error> {
        let project = project.clone();
        self.file
            .read("count secrets", move |db| {
                let counted = sql::row(
                    db,
                    "SELECT count(*) AS secrets, total(length(sealed)) AS bytes FROM secrets WHERE project = ?1",
                    &[&project.as_str()],
                    |row| Ok((sql::count(row, "secrets")?, row.get::<_, f64>("bytes")? as u64)),
                )?;
                Ok(counted.unwrap_or_default())
            })
            .await
    }

    async fn all_secrets(&self) -> Result<Vec<SecretRow>, Error> {
        self.file
            .read("list all secrets", |db| {
                sql::rows(db, "SELECT * FROM secrets ORDER BY id", &[], read)
            })
            .await
    }

    async fn delete_secret(
        &self,
        project: &ProjectId,
        id: &SecretId,
        facts: Vec<NewFact>,
    ) -> Result<Option<SecretRow>, Error> {
        let (project, id) = (project.clone(), id.clone());
        self.file
            .write("delete the secret", move |db| {
                let deleted = sql::row(
                    db,
                    "DELETE FROM secrets WHERE project = ?1 AND id = ?2 RETURNING *",
                    &[&project.as_str(), &id.as_str()],
                    read,
                )?;
                if deleted.is_some() {
                    facts::append(db, &facts)?;
                }
                Ok(deleted)
            })
            .await
    }
}

fn find(db: &Connection, project: &ProjectId, name: &str) -> Result<Option<SecretRow>, Error> {
    sql::row(
        db,
        "SELECT * FROM secrets WHERE project = ?1 AND name = ?2",
        &[&project.as_str(), &name],
        read,
    )
}

fn read(row: &Row<'_>) -> rusqlite::Result<SecretRow> {
    Ok(SecretRow {
        id: sql::word(row, "id")?,
        project: sql::word(row, "project")?,
        name: row.get("name")?,
        sealed: row.get("sealed")?,
        binding: sql::json(row, "binding")?,
        expires_at: sql::maybe_time(row, "expires_at")?,
        created_at: sql::time(row, "created_at")?,
        rotated_at: sql::maybe_time(row, "rotated_at")?,
    })
}
