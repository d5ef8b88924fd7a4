//! The names of artifacts, in SQLite.

use async_trait::async_trait;
use atoll_types::{ArtifactId, ProjectId, SandboxId, Timestamp};
use rusqlite::{Row, ToSql};

use super::{Sandboxes, facts, page, sql};
use crate::{ArtifactRow, ArtifactStore, Cursor, Error, NewFact, Page};

#[async_trait]
impl ArtifactStore for Sandboxes {
    async fn insert_artifact(&self, artifact: ArtifactRow, facts: Vec<NewFact>) -> Result<(), Error> {
        self.file.write("save the artifact", move |db| {
            sql::execute(
                db,
                "INSERT INTO artifacts (id, project, name, sandbox, kind, digest, size, created_at, expires_at)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)",
                &[
                    &artifact.id.as_str(),
                    &artifact.project.as_str(),
                    &artifact.name,
                    &artifact.sandbox.as_ref().map(SandboxId::as_str),
                    &artifact.kind.name(),
                    &artifact.digest,
                    &sql::as_count(artifact.size),
                    &artifact.created_at.0,
                    &artifact.expires_at.map(|at| at.0),
                ],
            )?;
            facts::append(db, &facts)?;
            Ok(())
        })
        .await
    }

    async fn artifact(&self, project: &ProjectId, id: &ArtifactId) -> Result<Option<ArtifactRow>, Error> {
        let (project, id) = (project.clone(), id.clone());
        self.file
            .read("read the artifact", move |db| {
                sql::row(
                    db,
                    "SELECT * FROM artifacts WHERE project = ?1 AND id = ?2",
                    &[&project.as_str(), &id.as_str()],
                    read,
                )
            })
            .await
    }

    async fn artifact_by_name(
        &self,
        project: &ProjectId,
        name: &str,
        now: Timestamp,
    ) -> Result<Option<ArtifactRow>, Error> {
        let (project, name) = (project.clone(), name.to_owned());
        self.file.read("read the artifact", move |db| {
            sql::row(
                db,
                "SELECT * FROM artifacts WHERE project = ?1 AND name = ?2 AND (expires_at IS NULL OR expires_at > ?3)
                 ORDER BY created_at DESC, id DESC LIMIT 1",
                &[&project.as_str(), &name, &now.0],
                read,
            )
        })
        .await
    }

    async fn artifacts(
        &self,
        project: &ProjectId,
        name: Option<&str>,
        after: Option<Cursor>,
        limit: usize,
    ) -> Result<Page<ArtifactRow>, Error> {
        let (project, name) = (project.clone(), name.map(str::to_owned));
        self.file
            .read("list artifacts", move |db| {
                let project = project.as_str();
                let mut sql = "SELECT * FROM artifacts WHERE project = ?".to_owned();
                let mut parameters: Vec<&dyn ToSql> = vec![&project];
                if let Some(name) = &name {
                    sql.push_str(" AND name = ?");
                    parameters.push(name);
                }
                page::newest(db, sql, parameters, after.as_ref(), limit, read, |row| {
                    (row.created_at, row.id.as_str())
                })
            })
            .await
    }

    async fn expired_artifacts(&self, now: Timestamp, limit: usize) -> Result<Vec<ArtifactRow>, Error> {
        self.file
            .read("find expired artifacts", move |db| {
                sql::rows(
                    db,
                    "SELECT * FROM artifacts WHERE expires_at <= ?1 ORDER BY expires_at LIMIT ?2",
                    &[&now.0, &sql::as_limit(limit)],
                    read,
                )
            })
            .await
    }

    async fn delete_artifact(
        &self,
        project: &ProjectId,
        id: &ArtifactId,
        facts: Vec<NewFact>,
    ) -> Result<Option<ArtifactRow>, Error> {
        let (project, id) = (project.clone(), id.clone());
        self.file
            .write("delete the artifact", move |db| {
                let deleted = sql::row(
                    db,
                    "DELETE FROM artifacts WHERE project = ?1 AND id = ?2 RETURNING *",
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

    async fn digest_in_use(&self, digest: &str) -> Result<bool, Error> {
        let digest = digest.to_owned();
        self.file
            .read("look for a digest", move |db| {
                let found = sql::row(
                    db,
                    "SELECT 1 FROM artifacts WHERE digest = ?1 LIMIT 1",
                    &[&digest],
                    |_| Ok(()),
                )?;
                Ok(found.is_some())
            })
            .await
    }
}

fn read(row: &Row<'_>) -> rusqlite::Result<ArtifactRow> {
    Ok(ArtifactRow {
        id: sql::word(row, "id")?,
        project: sql::word(row, "project")?,
        name: row.get("name")?,
        sandbox: sql::maybe_word(row, "sandbox")?,
        kind: sql::word(row, "kind")?,
        digest: row.get("digest")?,
        size: sql::count(row, "size")?,
        created_at: sql::time(row, "created_at")?,
        expires_at: sql::maybe_time(row, "expires_at")?,
    })
}
