//! Sessions of browsers. The secret itself never comes here: only its SHA-256.

use atoll_identity::{Key, NewSession};
use atoll_types::Timestamp;
use rusqlite::Connection;

use super::{keys, sql};
use crate::Error;

/// Of more, the oldest end.
const OF_A_KEY: i64 = 100;

/// The hashes of those that have ended for it.
pub(crate) fn insert(db: &Connection, session: &NewSession) -> Result<Vec<[u8; 32]>, Error> {
    sql::execute(
        db,
        "DELETE FROM sessions WHERE expires_at <= ?1",
        &[&session.created_at.0],
    )?;
    let ended = sql::rows(
        db,
        "DELETE FROM sessions WHERE hash IN
             (SELECT hash FROM sessions WHERE key = ?1 ORDER BY created_at DESC LIMIT -1 OFFSET ?2)
         RETURNING hash",
        &[&session.key.as_str(), &(OF_A_KEY - 1)],
        |row| row.get("hash"),
    )?;
    sql::execute(
        db,
        "INSERT INTO sessions (hash, key, created_at, expires_at) VALUES (?1, ?2, ?3, ?4)",
        &[
            &session.hash,
            &session.key.as_str(),
            &session.created_at.0,
            &session.expires_at.0,
        ],
    )?;
    Ok(ended)
}

pub(crate) fn find(db: &Connection, hash: &[u8; 32]) -> Result<Option<(Key, Timestamp)>, Error> {
    let until = sql::row(
        db,
        "SELECT expires_at FROM sessions WHERE hash = ?1",
        &[hash],
        |row| sql::time(row, "expires_at"),
    )?;
    let key = sql::row(
        db,
        "SELECT * FROM keys WHERE id = (SELECT key FROM sessions WHERE hash = ?1) AND revoked_at IS NULL",
        &[hash],
        keys::read,
    )?;
    Ok(key.zip(until))
}

pub(crate) fn delete(db: &Connection, hash: &[u8; 32]) -> Result<(), Error> {
    sql::execute(db, "DELETE FROM sessions WHERE hash = ?1", &[hash])?;
    Ok(())
}
