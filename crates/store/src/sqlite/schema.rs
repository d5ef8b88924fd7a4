//! The shape of a file: the domains that it holds, each a list of steps that only ever grows.
//!
//! The table `migrations` says which steps of which domain were taken. A step that was released is never edited. A file that
//! has taken more steps than this program knows is refused: guessing at a newer shape would damage it. So is one that holds
//! domains which belong into another file.
//!
//! Earlier releases had one list for all domains ([`LEGACY`], counted by `PRAGMA user_version`), and both files took it whole.
//! Such a file takes what it lacks of that list. Then, in one transaction, the tables of domains that are not its own go, which
//! are empty, and each of its own domains is noted to have taken its first step: that one makes what the list had made.

use std::path::Path;
use std::time::Duration;

use rusqlite::{Connection, OpenFlags, OptionalExtension as _};

use crate::Error;

/// "ATOL": tells our files from other people's.
const APPLICATION_ID: i64 = 0x4154_4f4c;

/// Never edited, never longer.
const LEGACY: [&str; 11] = [
    include_str!("schema/legacy/0001-core.sql"),
    include_str!("schema/legacy/0002-state.sql"),
    include_str!("schema/legacy/0003-network.sql"),
    include_str!("schema/legacy/0004-gateway.sql"),
    include_str!("schema/legacy/0005-guards.sql"),
    include_str!("schema/legacy/0006-bodies.sql"),
    include_str!("schema/legacy/0007-workflows.sql"),
    include_str!("schema/legacy/0008-identity.sql"),
    include_str!("schema/legacy/0009-sessions.sql"),
    include_str!("schema/legacy/0010-workflow-bytes.sql"),
    include_str!("schema/legacy/0011-lineage.sql"),
];

/// The `user_version` of a file whose steps are in `migrations`; programs that count otherwise refuse it.
const BY_DOMAIN: i64 = LEGACY.len() as i64 + 1;

pub(crate) struct Domain {
    name: &'static str,
    steps: &'static [&'static str],
    /// What the first step makes, and the legacy steps made; those that refer to others first.
    first_tables: &'static [&'static str],
}

/// What a file holds, in the order in which it can be made.
pub(crate) type Domains = &'static [&'static Domain];

pub(crate) const MAIN: Domains = &[&IDENTITY, &LEDGER, &SANDBOXES, &SAVED, &MODELS];
pub(crate) const WORKFLOWS: Domains = &[&RUNS];
const EVERY: Domains = &[&IDENTITY, &LEDGER, &SANDBOXES, &SAVED, &MODELS, &RUNS];

static IDENTITY: Domain = Domain {
    name: "identity",
    steps: &[include_str!("schema/identity/0001-keys.sql")],
    first_tables: &["sessions", "keys", "projects"],
};
static LEDGER: Domain = Domain {
    name: "ledger",
    steps: &[
        include_str!("schema/ledger/0001-facts.sql"),
        include_str!("schema/ledger/0002-sizes.sql"),
        include_str!("schema/ledger/0003-kinds.sql"),
    ],
    first_tables: &["fact_retention", "facts"],
};
static SANDBOXES: Domain = Domain {
    name: "sandboxes",
    steps: &[
        include_str!("schema/sandboxes/0001-sandboxes.sql"),
        include_str!("schema/sandboxes/0002-names.sql"),
        include_str!("schema/sandboxes/0003-instances.sql"),
        include_str!("schema/sandboxes/0004-owners.sql"),
        include_str!("schema/sandboxes/0005-sizes.sql"),
    ],
    first_tables: &["network_usage", "secrets", "artifacts", "labels", "sandboxes"],
};
static SAVED: Domain = Domain {
    name: "saved state",
    steps: &[include_str!("schema/saved/0001-saved.sql")],
    first_tables: &["attachments", "volumes", "snapshots"],
};
static MODELS: Domain = Domain {
    name: "models",
    steps: &[
        include_str!("schema/models/0001-gateway.sql"),
        include_str!("schema/models/0002-sizes.sql"),
    ],
    first_tables: &[
        "model_bodies",
        "model_guards",
        "model_calls",
        "model_budgets",
        "model_keys",
        "model_prices",
        "model_routes",
        "model_providers",
    ],
};
static RUNS: Domain = Domain {
    name: "workflows",
    steps: &[
        include_str!("schema/workflows/0001-workflows.sql"),
        include_str!("schema/workflows/0002-written.sql"),
    ],
    first_tables: &[
        "workflow_bytes",
        "workflow_items",
        "workflow_events",
        "workflow_runs",
    ],
};

pub(crate) fn has_ledger(domains: Domains) -> bool {
    holds(domains, LEDGER.name)
}

fn holds(domains: Domains, name: &str) -> bool {
    domains.iter().any(|domain| domain.name == name)
}

fn foreign(domains: Domains) -> impl DoubleEndedIterator<Item = &'static Domain> {
    EVERY
        .iter()
        .copied()
        .filter(move |domain| !holds(domains, domain.name))
}

fn cannot_open(path: &Path, source: rusqlite::Error) -> Error {
    Error::Open {
        path: path.to_owned(),
        source: source.into(),
    }
}

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
pub(crate) fn open_writer(path: &Path, domains: Domains) -> Result<Connection, Error> {
    let failed = |source| cannot_open(path, source);
    make_private(path);
    let mut connection = Connection::open(path).map_err(failed)?;
    connection.busy_timeout(Duration::from_secs(5)).map_err(failed)?;
    // Looked at before anything is written.
    check(path, &connection, domains)?;
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
    migrate(&mut connection, domains).map_err(failed)?;
    Ok(connection)
}

/// A database of one connection, which is gone with it.
#[cfg(feature = "testing")]
pub(crate) fn in_memory(domains: Domains) -> Result<Connection, Error> {
    let failed = |source| cannot_open(Path::new(":memory:"), source);
    let mut connection = Connection::open_in_memory().map_err(failed)?;
    connection
        .pragma_update(None, "foreign_keys", true)
        .map_err(failed)?;
    connection.set_prepared_statement_cache_capacity(128);
    migrate(&mut connection, domains).map_err(failed)?;
    Ok(connection)
}

/// Opens a connection that can only read. The writer's has been opened before.
pub(crate) fn open_reader(path: &Path) -> Result<Connection, Error> {
    let failed = |source| cannot_open(path, source);
    let connection = Connection::open_with_flags(
        path,
        OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX,
    )
    .map_err(failed)?;
    connection.busy_timeout(Duration::from_secs(5)).map_err(failed)?;
    // What does not fit into a sorter: a confined server may make no file in /tmp.
    connection
        .pragma_update(None, "temp_store", "MEMORY")
        .map_err(failed)?;
    connection.set_prepared_statement_cache_capacity(128);
    Ok(connection)
}

/// Whether this program understands the file, and may change it. Changes nothing itself.
fn check(path: &Path, connection: &Connection, domains: Domains) -> Result<(), Error> {
    let failed = |source| cannot_open(path, source);
    let newer = |part: &str, found, supported| Error::Newer {
        path: path.to_owned(),
        part: part.to_owned(),
        found,
        supported,
    };
    let misplaced = |domain: &str| Error::Misplaced {
        path: path.to_owned(),
        domain: domain.to_owned(),
    };
    let number = |name| connection.pragma_query_value(None, name, |row| row.get::<_, i64>(0));
    let version = number("user_version").map_err(failed)?;
    let owner = number("application_id").map_err(failed)?;
    let tables: i64 = connection
        .query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))
        .map_err(failed)?;
    if owner != APPLICATION_ID && (owner != 0 || version != 0 || tables != 0) {
        return Err(Error::Foreign {
            path: path.to_owned(),
        });
    }
    if version > BY_DOMAIN {
        return Err(newer("the file", version, BY_DOMAIN));
    }
    if version < BY_DOMAIN {
        for domain in foreign(domains) {
            if is_used(connection, domain).map_err(failed)? {
                return Err(misplaced(domain.name));
            }
        }
        return Ok(());
    }
    for (name, taken) in taken_steps(connection).map_err(failed)? {
        let Some(domain) = EVERY.iter().find(|domain| domain.name == name) else {
            return Err(newer(&name, taken, 0));
        };
        if !holds(domains, domain.name) {
            return Err(misplaced(domain.name));
        }
        let supported = domain.steps.len() as i64;
        if taken > supported {
            return Err(newer(domain.name, taken, supported));
        }
    }
    Ok(())
}

/// Whether a file of the legacy list has rows of a domain.
fn is_used(connection: &Connection, domain: &Domain) -> rusqlite::Result<bool> {
    for table in domain.first_tables {
        if !connection.table_exists(None, *table)? {
            continue;
        }
        let row = format!("SELECT 1 FROM {table} LIMIT 1");
        if connection.query_row(&row, [], |_| Ok(())).optional()?.is_some() {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The last step of each domain in the file.
fn taken_steps(connection: &Connection) -> rusqlite::Result<Vec<(String, i64)>> {
    let mut statement = connection.prepare("SELECT domain, max(step) FROM migrations GROUP BY domain")?;
    let rows = statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?;
    rows.collect()
}

fn migrate(connection: &mut Connection, domains: Domains) -> rusqlite::Result<()> {
    let version: i64 = connection.pragma_query_value(None, "user_version", |row| row.get(0))?;
    if (1..BY_DOMAIN).contains(&version) {
        take_legacy(connection, &LEGACY)?;
    }
    if version < BY_DOMAIN {
        part(connection, domains, version > 0)?;
    }
    for domain in domains {
        take(connection, domain)?;
    }
    Ok(())
}

/// Takes the steps of the list for all domains that the file has not taken yet.
fn take_legacy(connection: &mut Connection, steps: &[&str]) -> rusqlite::Result<()> {
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

/// From now on steps are counted by domain.
fn part(connection: &mut Connection, domains: Domains, is_legacy: bool) -> rusqlite::Result<()> {
    let transaction = connection.transaction()?;
    transaction.execute_batch(
        "CREATE TABLE migrations (
             domain  TEXT NOT NULL,
             step    INTEGER NOT NULL,
             PRIMARY KEY (domain, step)
         ) STRICT, WITHOUT ROWID",
    )?;
    if is_legacy {
        for table in foreign(domains).rev().flat_map(|domain| domain.first_tables) {
            transaction.execute_batch(&format!("DROP TABLE {table}"))?;
        }
        for domain in domains {
            note(&transaction, domain, 1)?;
        }
    }
    transaction.pragma_update(None, "application_id", APPLICATION_ID)?;
    transaction.pragma_update(None, "user_version", BY_DOMAIN)?;
    transaction.commit()
}

/// Takes the steps of a domain that the file has not taken yet.
fn take(connection: &mut Connection, domain: &Domain) -> rusqlite::Result<()> {
    let taken: Option<i64> = connection.query_row(
        "SELECT max(step) FROM migrations WHERE domain = ?1",
        [domain.name],
        |row| row.get(0),
    )?;
    for (number, step) in (1_i64..).zip(domain.steps) {
        if Some(number) <= taken {
            continue;
        }
        let transaction = connection.transaction()?;
        transaction.execute_batch(step)?;
        note(&transaction, domain, number)?;
        transaction.commit()?;
    }
    Ok(())
}

fn note(connection: &Connection, domain: &Domain, step: i64) -> rusqlite::Result<()> {
    connection.execute(
        "INSERT INTO migrations (domain, step) VALUES (?1, ?2)",
        (domain.name, step),
    )?;
    Ok(())
}

#[cfg(test)]
mod tests;
