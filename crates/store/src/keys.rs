//! API keys. The secret itself never comes here: only its SHA-256, and the first characters for people to recognise it by.

use atoll_types::{KeyId, ProjectId, Timestamp};
use rusqlite::{Connection, Row};

use crate::{Error, NewFact, Store, facts, sql};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyRow {
    pub id: KeyId,
    pub project: ProjectId,
    pub name: String,
    /// The beginning of the secret, as shown in lists.
    pub prefix: String,
    pub created_at: Timestamp,
    pub revoked_at: Option<Timestamp>,
    /// Not exact: uses are gathered before they are written.
    pub last_used_at: Option<Timestamp>,
}

#[derive(Debug, Clone)]
pub struct NewKey {
    pub id: KeyId,
    pub project: ProjectId,
    pub name: String,
    /// SHA-256 of the secret.
    pub hash: [u8; 32],
    pub prefix: String,
    pub created_at: Timestamp,
}

impl Store {
    pub async fn insert_key(&self, key: NewKey, facts: Vec<NewFact>) -> Result<KeyRow, Error> {
        self.write("create the key", move |db| {
            sql::execute(
                db,
                "INSERT INTO keys (id, project, name, hash, prefix, created_at) VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
                &[
                    &key.id.as_str(),
                    &key.project.as_str(),
                    &key.name,
                    &key.hash,
                    &key.prefix,
                    &key.created_at.0,
                ],
            )?;
            facts::append(db, &facts)?;
            Ok(KeyRow {
                id: key.id,
                project: key.project,
                name: key.name,
                prefix: key.prefix,
                created_at: key.created_at,
                revoked_at: None,
                last_used_at: None,
            })
        })
        .await
    }

    /// The key with that hash, unless it was revoked.
    pub async fn find_active_key(&self, hash: [u8; 32]) -> Result<Option<KeyRow>, Error> {
        self.read("find the key", move |db| {
            sql::row(
                db,
                "SELECT * FROM keys WHERE hash = ?1 AND revoked_at IS NULL",
                &[&hash],
                read,
            )
        })
        .await
    }

    /// All keys of a project, revoked ones too, oldest first.
    pub async fn keys(&self, project: &ProjectId) -> Result<Vec<KeyRow>, Error> {
        let project = project.clone();
        self.read("list keys", move |db| {
            sql::rows(
                db,
                "SELECT * FROM keys WHERE project = ?1 ORDER BY created_at, id",
                &[&project.as_str()],
                read,
            )
        })
        .await
    }

    /// Revokes a key; the time of an earlier revocation stays, and its facts are not repeated.
    pub async fn revoke_key(
        &self,
        project: &ProjectId,
        id: &KeyId,
        now: Timestamp,
        facts: Vec<NewFact>,
    ) -> Result<KeyRow, Error> {
        let (project, id) = (project.clone(), id.clone());
        self.write("revoke the key", move |db| {
            let changed = sql::execute(
                db,
                "UPDATE keys SET revoked_at = ?3 WHERE project = ?1 AND id = ?2 AND revoked_at IS NULL",
                &[&project.as_str(), &id.as_str(), &now.0],
            )?;
            if changed > 0 {
                facts::append(db, &facts)?;
            }
            let found = sql::row(
                db,
                "SELECT * FROM keys WHERE project = ?1 AND id = ?2",
                &[&project.as_str(), &id.as_str()],
                read,
            )?;
            found.ok_or_else(|| Error::NotFound {
                what: "key",
                id: id.to_string(),
            })
        })
        .await
    }

    /// Notes a use of the key. Returns at once; written with a later batch, lost if the server dies before.
    pub fn note_key_used(&self, id: &KeyId, at: Timestamp) {
        self.inner.touches.key(id, at);
    }
}

pub(crate) fn touch(db: &Connection, id: &KeyId, at: Timestamp) -> Result<(), Error> {
    sql::execute(
        db,
        "UPDATE keys SET last_used_at = max(coalesce(last_used_at, ?2), ?2) WHERE id = ?1",
        &[&id.as_str(), &at.0],
    )?;
    Ok(())
}

fn read(row: &Row<'_>) -> rusqlite::Result<KeyRow> {
    Ok(KeyRow {
        id: sql::word(row, "id")?,
        project: sql::word(row, "project")?,
        name: row.get("name")?,
        prefix: row.get("prefix")?,
        created_at: sql::time(row, "created_at")?,
        revoked_at: sql::maybe_time(row, "revoked_at")?,
        last_used_at: sql::maybe_time(row, "last_used_at")?,
    })
}
