//! API keys. The secret itself never comes here: only its SHA-256, and the first characters for people to recognise it by.

use atoll_identity::{Key, ModelKey, NewKey, Scope};
use atoll_types::{KeyId, ProjectId, Timestamp};
use rusqlite::{Connection, Row};

use super::{facts, page, sql};
use crate::{Cursor, Error, Fact, NewFact, Page};

/// `None`: there are `most` that work already. Of those that do not work any more, as many of the latest are kept.
pub(crate) fn insert(db: &Connection, key: NewKey, most: usize) -> Result<Option<Key>, Error> {
    let (project, now, most) = (key.project.as_str(), key.created_at.0, sql::as_limit(most));
    let working = sql::row(
        db,
        "SELECT count(*) AS working FROM keys
         WHERE project = ?1 AND revoked_at IS NULL AND (expires_at IS NULL OR expires_at > ?2)",
        &[&project, &now],
        |row| row.get::<_, i64>("working"),
    )?;
    if working.is_some_and(|working| working >= most) {
        return Ok(None);
    }
    sql::execute(
        db,
        "DELETE FROM keys WHERE id IN
             (SELECT id FROM keys WHERE project = ?1 AND (revoked_at IS NOT NULL OR expires_at <= ?2)
              ORDER BY coalesce(revoked_at, expires_at) DESC, id LIMIT -1 OFFSET ?3)
         AND id NOT IN (SELECT key FROM sessions)",
        &[&project, &now, &most],
    )?;
    let scopes: Vec<String> = key.scopes.iter().map(Scope::to_string).collect();
    sql::execute(
        db,
        "INSERT INTO keys (id, project, name, hash, prefix, role, scopes, created_at, expires_at, made_by)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)",
        &[
            &key.id.as_str(),
            &key.project.as_str(),
            &key.name,
            &key.hash,
            &key.prefix,
            &key.role.name(),
            &sql::to_json("a list of scopes", &scopes)?,
            &key.created_at.0,
            &key.expires_at.map(|at| at.0),
            &key.made_by.as_ref().map(KeyId::as_str),
        ],
    )?;
    let created = Fact::KeyCreated {
        key: key.id.clone(),
        name: key.name.clone(),
        role: Some(key.role.name().to_owned()),
        scopes,
        expires_at: key.expires_at,
        made_by: key.made_by.clone(),
    };
    facts::append(db, &[of_project(key.created_at, &key.project, created)])?;
    Ok(Some(Key {
        id: key.id,
        project: key.project,
        name: key.name,
        prefix: key.prefix,
        role: key.role,
        scopes: key.scopes,
        made_by: key.made_by,
        created_at: key.created_at,
        expires_at: key.expires_at,
        revoked_at: None,
        last_used_at: None,
    }))
}

pub(crate) fn find_active(db: &Connection, hash: &[u8; 32]) -> Result<Option<Key>, Error> {
    sql::row(
        db,
        "SELECT * FROM keys WHERE hash = ?1 AND revoked_at IS NULL",
        &[hash],
        read,
    )
}

pub(crate) fn find_active_for_models(db: &Connection, hash: &[u8; 32]) -> Result<Option<ModelKey>, Error> {
    sql::row(
        db,
        "SELECT id, project, expires_at FROM model_keys WHERE hash = ?1 AND revoked_at IS NULL",
        &[hash],
        |row| {
            Ok(ModelKey {
                id: sql::word(row, "id")?,
                project: sql::word(row, "project")?,
                expires_at: sql::maybe_time(row, "expires_at")?,
            })
        },
    )
}

pub(crate) fn of(
    db: &Connection,
    project: &ProjectId,
    after: Option<&Cursor>,
    limit: usize,
) -> Result<Page<Key>, Error> {
    page::newest(
        db,
        "SELECT * FROM keys WHERE project = ?".to_owned(),
        vec![&project.as_str()],
        after,
        limit,
        read,
        |key| (key.created_at, key.id.as_str()),
    )
}

pub(crate) fn one(db: &Connection, project: &ProjectId, id: &KeyId) -> Result<Option<Key>, Error> {
    sql::row(
        db,
        "SELECT * FROM keys WHERE project = ?1 AND id = ?2",
        &[&project.as_str(), &id.as_str()],
        read,
    )
}

/// The time of an earlier revocation stays, and its fact is not repeated.
pub(crate) fn revoke(
    db: &Connection,
    project: &ProjectId,
    id: &KeyId,
    now: Timestamp,
) -> Result<Option<Key>, Error> {
    let changed = sql::execute(
        db,
        "UPDATE keys SET revoked_at = ?3 WHERE project = ?1 AND id = ?2 AND revoked_at IS NULL",
        &[&project.as_str(), &id.as_str(), &now.0],
    )?;
    if changed > 0 {
        let revoked = Fact::KeyRevoked { key: id.clone() };
        facts::append(db, &[of_project(now, project, revoked)])?;
    }
    one(db, project, id)
}

pub(crate) fn touch(db: &Connection, id: &KeyId, at: Timestamp) -> Result<(), Error> {
    sql::execute(
        db,
        "UPDATE keys SET last_used_at = max(coalesce(last_used_at, ?2), ?2) WHERE id = ?1",
        &[&id.as_str(), &at.0],
    )?;
    Ok(())
}

pub(crate) fn read(row: &Row<'_>) -> rusqlite::Result<Key> {
    Ok(Key {
        id: sql::word(row, "id")?,
        project: sql::word(row, "project")?,
        name: row.get("name")?,
        prefix: row.get("prefix")?,
        role: sql::word(row, "role")?,
        scopes: scopes(row)?,
        made_by: sql::maybe_word(row, "made_by")?,
        created_at: sql::time(row, "created_at")?,
        expires_at: sql::maybe_time(row, "expires_at")?,
        revoked_at: sql::maybe_time(row, "revoked_at")?,
        last_used_at: sql::maybe_time(row, "last_used_at")?,
    })
}

fn scopes(row: &Row<'_>) -> rusqlite::Result<Vec<Scope>> {
    let texts: Vec<String> = sql::json(row, "scopes")?;
    let scopes = texts.iter().map(|text| text.parse());
    let scopes: Result<_, atoll_types::Fault> = scopes.collect();
    scopes.map_err(|error| sql::broken("scopes", &error))
}

fn of_project(at: Timestamp, project: &ProjectId, fact: Fact) -> NewFact {
    NewFact {
        at,
        project: project.clone(),
        sandbox: None,
        fact,
    }
}
