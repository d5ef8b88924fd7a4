//! The shape of the database, as a list of steps that only ever grows.
//!
//! `PRAGMA user_version` counts the steps that were taken. A step that was released is never edited. A database that has
//! taken more steps than this program knows is refused: guessing at a newer shape would damage it.

use std::path::Path;
use std::time::Duration;

use rusqlite::{Connection, OpenFlags};

use crate::Error;

/// "ATOL": tells our files from other people's.
const APPLICATION_ID: i64 = 0x4154_4f4c;

const STEPS: &[&str] = &[
    include_str!("schema/0001-core.sql"),
    include_str!("schema/0002-state.sql"),
    include_str!("schema/0003-network.sql"),
    include_str!("schema/0004-gateway.sql"),
    include_str!("schema/0005-guards.sql"),
    include_str!("schema/0006-bodies.sql"),
    include_str!("schema/0007-workflows.sql"),
    include_str!("schema/0008-identity.sql"),
    include_str!("schema/0009-sessions.sql"),
    include_str!("schema/0010-workflow-bytes.sql"),
    include_str!("schema/0011-lineage.sql"),
];

/// Whoever else is on the machine has no business with it. SQLite gives the files beside it the same mode. A file that
/// cannot be made here cannot be opened either, and opening says why.
fn make_private(path: &Path) {
    use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
    let mut options = std::fs::OpenOptions::new();
    if let Ok(file) = options.append(true).create(true).mode(0o600).open(path) {
        let _ = file.set_permissions(std::fs::Permissions::from_mode(0o600));
    }
}

/// Opens the only connection that writes, and brings the file up to date.
pub(crate) fn open_writer(path: &Path) -> Result<Connection, Error> {
    let failed = |source| Error::Open {
        path: path.to_owned(),
        source,
    };
    make_private(path);
    let mut connection = Connection::open(path).map_err(failed)?;
    connection.busy_timeout(Duration::from_secs(5)).map_err(failed)?;
    // Looked at before anything is written.
    check(path, &connection)?;
    connection
        .pragma_update(None, "journal_mode", "WAL")
        .map_err(failed)?;
    // FULL makes each commit wait for the disk; NORMAL would lose the last ones with the power.
    connection
        .pragma_update(None, "synchronous", "FULL")
        .map_err(failed)?;
    connection
        .pragma_update(None, "foreign_keys", true)
        .map_err(failed)?;
    // What a job's savepoint would undo: a file in /tmp otherwise, made and removed by each job.
    connection
        .pragma_update(None, "temp_store", "MEMORY")
        .map_err(failed)?;
    connection
        .pragma_update(None, "journal_size_limit", 64 * 1024 * 1024)
        .map_err(failed)?;
    connection.set_prepared_statement_cache_capacity(128);
    migrate(&mut connection, STEPS).map_err(failed)?;
    Ok(connection)
}

/// A database of one connection, which is gone with it.
#[cfg(feature = "testing")]
pub(crate) fn in_memory() -> Result<Connection, Error> {
    let failed = |source| Error::Open {
        path: ":memory:".into(),
        source,
    };
    let mut connection = Connection::open_in_memory().map_err(failed)?;
    connection
        .pragma_update(None, "foreign_keys", true)
        .map_err(failed)?;
    connection.set_prepared_statement_cache_capacity(128);
    migrate(&mut connection, STEPS).map_err(failed)?;
    Ok(connection)
}

/// Opens a connection that can only read. The writer's has been opened before.
pub(crate) fn open_reader(path: &Path) -> Result<Connection, Error> {
    let failed = |source| Error::Open {
        path: path.to_owned(),
        source,
    };
    let connection = Connection::open_with_flags(
        path,
        OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX,
    )
    .map_err(failed)?;
    connection.busy_timeout(Duration::from_secs(5)).map_err(failed)?;
    connection.set_prepared_statement_cache_capacity(128);
    Ok(connection)
}

fn check(path: &Path, connection: &Connection) -> Result<(), Error> {
    let failed = |source| Error::Open {
        path: path.to_owned(),
        source,
    };
    let number = |name| connection.pragma_query_value(None, name, |row| row.get::<_, i64>(0));
    let taken = number("user_version").map_err(failed)?;
    let owner = number("application_id").map_err(failed)?;
    let tables: i64 = connection
        .query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))
        .map_err(failed)?;
    if owner != APPLICATION_ID && (owner != 0 || taken != 0 || tables != 0) {
        return Err(Error::Foreign {
            path: path.to_owned(),
        });
    }
    let supported = STEPS.len() as i64;
    if taken > supported {
        return Err(Error::Newer {
            path: path.to_owned(),
            found: taken,
            supported,
        });
    }
    Ok(())
}

fn migrate(connection: &mut Connection, steps: &[&str]) -> rusqlite::Result<()> {
    let taken: i64 = connection.pragma_query_value(None, "user_version", |row| row.get(0))?;
    for (number, step) in (1_i64..).zip(steps) {
        if number <= taken {
            continue;
        }
        let transaction = connection.transaction()?;
        transaction.execute_batch(step)?;
        transaction.pragma_update(None, "application_id", APPLICATION_ID)?;
        transaction.pragma_update(None, "user_version", number)?;
        transaction.commit()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_taken_once_in_order_and_whole() {
        let mut db = Connection::open_in_memory().unwrap();
        let version = |db: &Connection| -> i64 {
            db.pragma_query_value(None, "user_version", |row| row.get(0))
                .unwrap()
        };
        let first = "CREATE TABLE a (x); INSERT INTO a VALUES (1);";
        migrate(&mut db, &[first]).unwrap();
        assert_eq!(version(&db), 1);

        // The second works, the third breaks in its middle: only the third is undone.
        let second = "ALTER TABLE a ADD COLUMN y DEFAULT 2;";
        let broken = "CREATE TABLE b (x); INSERT INTO nowhere VALUES (1);";
        assert!(migrate(&mut db, &[first, second, broken]).is_err());
        assert_eq!(version(&db), 2);
        let tables: i64 = db
            .query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))
            .unwrap();
        assert_eq!(tables, 1);

        migrate(&mut db, &[first, second, "CREATE TABLE b (x);"]).unwrap();
        assert_eq!(version(&db), 3);
        let row: (i64, i64) = db
            .query_row("SELECT x, y FROM a", [], |row| Ok((row.get(0)?, row.get(1)?)))
            .unwrap();
        assert_eq!(row, (1, 2));
    }
}
