//! Between columns and words: reading ids, times and JSON out of rows, and writing them.

use std::fmt::Display;
use std::str::FromStr;

use atoll_types::Timestamp;
use rusqlite::types::Type;
use rusqlite::{Connection, Row, ToSql};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::Error;

/// Reads a column whose text form is a word of ours: an id, a state.
pub(crate) fn word<T: FromStr<Err: Display>>(row: &Row<'_>, column: &str) -> rusqlite::Result<T> {
    let text: String = row.get(column)?;
    text.parse().map_err(|error| broken(column, &error))
}

pub(crate) fn maybe_word<T: FromStr<Err: Display>>(
    row: &Row<'_>,
    column: &str,
) -> rusqlite::Result<Option<T>> {
    let text: Option<String> = row.get(column)?;
    text.map(|text| text.parse().map_err(|error| broken(column, &error)))
        .transpose()
}

pub(crate) fn time(row: &Row<'_>, column: &str) -> rusqlite::Result<Timestamp> {
    Ok(Timestamp(row.get(column)?))
}

pub(crate) fn maybe_time(row: &Row<'_>, column: &str) -> rusqlite::Result<Option<Timestamp>> {
    Ok(row.get::<_, Option<i64>>(column)?.map(Timestamp))
}

pub(crate) fn json<T: DeserializeOwned>(row: &Row<'_>, column: &str) -> rusqlite::Result<T> {
    let text: String = row.get(column)?;
    serde_json::from_str(&text).map_err(|error| broken(column, &error))
}

pub(crate) fn maybe_json<T: DeserializeOwned>(row: &Row<'_>, column: &str) -> rusqlite::Result<Option<T>> {
    let text: Option<String> = row.get(column)?;
    text.map(|text| serde_json::from_str(&text).map_err(|error| broken(column, &error)))
        .transpose()
}

/// Counts are `u64` for us and `i64` for SQLite.
pub(crate) fn count(row: &Row<'_>, column: &str) -> rusqlite::Result<u64> {
    let value: i64 = row.get(column)?;
    u64::try_from(value).map_err(|error| broken(column, &error))
}

pub(crate) fn as_count(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

pub(crate) fn as_limit(limit: usize) -> i64 {
    i64::try_from(limit).unwrap_or(i64::MAX)
}

pub(crate) fn to_json<T: Serialize>(what: &'static str, value: &T) -> Result<String, Error> {
    serde_json::to_string(value).map_err(|error| Error::Corrupt {
        what,
        detail: error.to_string(),
    })
}

pub(crate) fn broken(column: &str, error: &dyn Display) -> rusqlite::Error {
    rusqlite::Error::FromSqlConversionFailure(0, Type::Text, format!("{column}: {error}").into())
}

/// All rows of a statement whose text is fixed.
pub(crate) fn rows<T>(
    connection: &Connection,
    sql: &str,
    parameters: &[&dyn ToSql],
    read: impl FnMut(&Row<'_>) -> rusqlite::Result<T>,
) -> Result<Vec<T>, Error> {
    let mut statement = connection.prepare_cached(sql)?;
    let rows = statement.query_map(parameters, read)?;
    Ok(rows.collect::<rusqlite::Result<_>>()?)
}

/// The first row, if there is one.
pub(crate) fn row<T>(
    connection: &Connection,
    sql: &str,
    parameters: &[&dyn ToSql],
    read: impl FnOnce(&Row<'_>) -> rusqlite::Result<T>,
) -> Result<Option<T>, Error> {
    let mut statement = connection.prepare_cached(sql)?;
    let mut rows = statement.query(parameters)?;
    Ok(rows.next()?.map(read).transpose()?)
}

/// Runs a statement and says how many rows it changed.
pub(crate) fn execute(connection: &Connection, sql: &str, parameters: &[&dyn ToSql]) -> Result<usize, Error> {
    Ok(connection.prepare_cached(sql)?.execute(parameters)?)
}
