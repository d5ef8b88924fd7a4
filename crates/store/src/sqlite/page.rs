//! One page of a list, in SQLite.

use atoll_types::Timestamp;
use rusqlite::{Connection, Row, ToSql};

use super::sql;
use crate::{Cursor, Error, MAX_PAGE, Page};

/// One page of what `select`, which ends inside of its `WHERE`, finds with `parameters`. `place` says where a row stands
/// in the list.
pub(crate) fn newest<'a, T>(
    db: &Connection,
    mut select: String,
    mut parameters: Vec<&'a dyn ToSql>,
    after: Option<&'a Cursor>,
    limit: usize,
    read: fn(&Row<'_>) -> rusqlite::Result<T>,
    place: impl Fn(&T) -> (Timestamp, &str),
) -> Result<Page<T>, Error> {
    // At least one row, so that following cursors always ends; one more than asked for, to know whether there are more.
    let limit = limit.clamp(1, MAX_PAGE);
    let one_more = sql::as_limit(limit + 1);
    if let Some(cursor) = after {
        select.push_str(" AND (created_at, id) < (?, ?)");
        parameters.push(&cursor.created_at.0);
        parameters.push(&cursor.id);
    }
    select.push_str(" ORDER BY created_at DESC, id DESC LIMIT ?");
    let parameters: Vec<&dyn ToSql> = parameters.into_iter().chain([&one_more as &dyn ToSql]).collect();
    let mut items = sql::rows(db, &select, &parameters, read)?;
    let more = items.len() > limit;
    items.truncate(limit);
    let next = items.last().filter(|_| more).map(|last| {
        let (created_at, id) = place(last);
        Cursor {
            created_at,
            id: id.to_owned(),
        }
    });
    Ok(Page { items, next })
}
