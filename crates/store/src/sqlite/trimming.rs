//! Keeping what is left of each project's doings to its size: facts, instances, model calls and ended sandboxes.
//!
//! What must hold:
//! - The oldest goes first, whichever table it is in, and only of the project that has too much.
//! - One transaction looks at a bounded number of rows and takes a bounded time, since whoever else writes waits for it, and the
//!   next one goes on where it stopped.
//! - Facts about who decided what ([`Fact::is_decision`]) stay when others go. They have a bound of their own, and beyond that
//!   the oldest of the kind go that there is most of, so that nobody can push them out with something else.
//! - Sums stay what they were: usage that goes is added to `usage_trimmed`, spending to `model_spent_trimmed`, in the same
//!   transaction.
//! - One fact tells of it, and takes the place of the one before.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use atoll_types::{ProjectId, SandboxId, Timestamp};
use rusqlite::Connection;

use super::models::trimmed::{self, Gone};
use super::{facts, sql};
use crate::{Error, Fact, NewFact, UsageTotal};

/// The most rows that go in one transaction. More than others write meanwhile: as many wait for the writer at most.
const AT_ONCE: usize = 256;
/// The most facts that are looked at for it.
const LOOKED_AT: usize = 2_000;
/// How long rows are removed for. On a busy machine fewer of them go at once.
const TIME: Duration = Duration::from_millis(10);
/// Sandboxes that ended a moment ago may still be written to.
const SETTLED_MILLIS: i64 = 60_000;
const DAY_MILLIS: i64 = 24 * 60 * 60 * 1000;

/// The projects that have more than `most` bytes, or were trimmed without a word about it.
pub(crate) fn oversized(db: &Connection, most: u64) -> Result<Vec<ProjectId>, Error> {
    sql::rows(
        db,
        "SELECT project FROM ledger_sizes WHERE bytes > ?1 OR kept_bytes > ?1 OR untold = 1",
        &[&sql::as_count(most)],
        |row| sql::word(row, "project"),
    )
}

/// Whether there is more to do.
pub(crate) fn trim(db: &Connection, project: &ProjectId, most: u64, now: Timestamp) -> Result<bool, Error> {
    let most = sql::as_count(most);
    let Some(before) = Size::of(db, project)? else {
        return Ok(false);
    };
    let until = Instant::now() + TIME;
    may_go(db, project, || {
        let mut has_moved = false;
        if before.bytes > most {
            has_moved |= trim_oldest(db, project, &before, most, now, until)?;
        }
        if before.kept_bytes > most {
            has_moved |= trim_decisions(db, project, &before, most, until)?;
        }
        let after = Size::of(db, project)?.unwrap_or_default();
        let goes_on = has_moved && (after.bytes > most || after.kept_bytes > most);
        if !goes_on && after.untold {
            tell(db, project, &after, now)?;
        }
        Ok(goes_on)
    })
}

/// Opens the way in which facts of a project can go.
fn may_go<T>(
    db: &Connection,
    project: &ProjectId,
    work: impl FnOnce() -> Result<T, Error>,
) -> Result<T, Error> {
    sql::execute(
        db,
        "INSERT INTO fact_retention (before, project) VALUES (?1, ?2)",
        &[&i64::MAX, &project.as_str()],
    )?;
    let done = work()?;
    sql::execute(db, "DELETE FROM fact_retention", &[])?;
    Ok(done)
}

#[derive(Debug, Default)]
struct Size {
    bytes: i64,
    kept_bytes: i64,
    trimmed_to: i64,
    kept_trimmed_to: i64,
    facts_gone: u64,
    calls_gone: u64,
    instances_gone: u64,
    sandboxes_gone: u64,
    complete_from: Option<Timestamp>,
    told: Option<i64>,
    untold: bool,
}

impl Size {
    fn of(db: &Connection, project: &ProjectId) -> Result<Option<Self>, Error> {
        sql::row(
            db,
            "SELECT * FROM ledger_sizes WHERE project = ?1",
            &[&project.as_str()],
            |row| {
                Ok(Self {
                    bytes: row.get("bytes")?,
                    kept_bytes: row.get("kept_bytes")?,
                    trimmed_to: row.get("trimmed_to")?,
                    kept_trimmed_to: row.get("kept_trimmed_to")?,
                    facts_gone: sql::count(row, "facts_gone")?,
                    calls_gone: sql::count(row, "calls_gone")?,
                    instances_gone: sql::count(row, "instances_gone")?,
                    sandboxes_gone: sql::count(row, "sandboxes_gone")?,
                    complete_from: sql::maybe_time(row, "complete_from")?,
                    told: row.get("told")?,
                    untold: row.get("untold")?,
                })
            },
        )
    }
}

/// A row that may go.
enum Old {
    Fact {
        seq: i64,
        usage: Option<(i64, UsageTotal)>,
    },
    Call(Gone),
    Instance(String),
    Sandbox(SandboxId),
}

/// What the triggers have counted: of decisions, or of all else.
fn counted(db: &Connection, project: &ProjectId, decisions: bool) -> Result<i64, Error> {
    let counted = sql::row(
        db,
        "SELECT iif(?2, kept_bytes, bytes) AS counted FROM ledger_sizes WHERE project = ?1",
        &[&project.as_str(), &decisions],
        |row| row.get("counted"),
    )?;
    Ok(counted.unwrap_or(0))
}

/// Removes the oldest rows, but decisions, until few enough are left. Whether any went, or some were found that stay.
fn trim_oldest(
    db: &Connection,
    project: &ProjectId,
    size: &Size,
    most: i64,
    now: Timestamp,
    until: Instant,
) -> Result<bool, Error> {
    let (mut old, looked_to) = old_facts(db, project, size.trimmed_to)?;
    let facts_found = old.len();
    old.extend(old_rows(db, project, now)?);
    // Facts are in order already, and stay so: the sort is stable.
    old.sort_by_key(|(at, _)| *at);
    old.truncate(AT_ONCE);
    let (mut facts, mut calls, mut instances, mut sandboxes) = (0_i64, 0_i64, 0_i64, 0_i64);
    let mut trimmed_to = size.trimmed_to;
    let mut used = BTreeMap::<i64, UsageTotal>::new();
    let mut has_spent = false;
    for (_, row) in old {
        if counted(db, project, false)? <= most {
            break;
        }
        match row {
            Old::Fact { seq, usage } => {
                sql::execute(db, "DELETE FROM facts WHERE seq = ?1", &[&seq])?;
                if let Some((day, more)) = usage {
                    let sum = used.entry(day).or_default();
                    *sum = sum.plus(more);
                }
                trimmed_to = seq;
                facts += 1;
            }
            Old::Call(call) => {
                has_spent |= trimmed::remove(db, project, &call)?;
                calls += 1;
            }
            Old::Instance(id) => {
                sql::execute(db, "DELETE FROM instances WHERE id = ?1", &[&id])?;
                instances += 1;
            }
            Old::Sandbox(id) => {
                sql::execute(db, "DELETE FROM sandboxes WHERE id = ?1", &[&id.as_str()])?;
                sandboxes += 1;
            }
        }
        if Instant::now() >= until {
            break;
        }
    }
    if has_spent {
        trimmed::forget_subjects(db, project)?;
    }
    for (day, sum) in used {
        add_usage(db, project, day, &sum)?;
    }
    if usize::try_from(facts).is_ok_and(|facts| facts == facts_found) {
        trimmed_to = looked_to;
    }
    let any = facts + calls + instances + sandboxes > 0;
    sql::execute(
        db,
        "UPDATE ledger_sizes SET trimmed_to = ?2, facts_gone = facts_gone + ?3, calls_gone = calls_gone + ?4,
             instances_gone = instances_gone + ?5, sandboxes_gone = sandboxes_gone + ?6, untold = untold OR ?7
         WHERE project = ?1",
        &[
            &project.as_str(),
            &trimmed_to,
            &facts,
            &calls,
            &instances,
            &sandboxes,
            &any,
        ],
    )?;
    Ok(any || trimmed_to > size.trimmed_to)
}

/// The oldest facts that may go, with the times by which they are compared with others; and the last one that was looked at.
fn old_facts(db: &Connection, project: &ProjectId, after: i64) -> Result<(Vec<(i64, Old)>, i64), Error> {
    let mut statement = db.prepare_cached(
        "SELECT seq, at, kept, iif(kind = 'usage', data, NULL) AS used FROM facts
         WHERE project = ?1 AND seq > ?2 ORDER BY seq LIMIT ?3",
    )?;
    let mut rows = statement.query((project.as_str(), after, sql::as_limit(LOOKED_AT)))?;
    let (mut found, mut looked_to, mut latest) = (Vec::new(), after, i64::MIN);
    while let Some(row) = rows.next()? {
        looked_to = row.get("seq")?;
        if row.get::<_, Option<i64>>("kept")?.is_some() {
            continue;
        }
        let at: i64 = row.get("at")?;
        // Clocks go back now and then; the order of the ledger is that of its numbers.
        latest = latest.max(at);
        let used: Option<String> = row.get("used")?;
        let fact = Old::Fact {
            seq: looked_to,
            usage: used.map(|data| (at - at.rem_euclid(DAY_MILLIS), usage_in(&data))),
        };
        found.push((latest, fact));
        if found.len() >= AT_ONCE {
            break;
        }
    }
    Ok((found, looked_to))
}

/// The oldest of everything else.
fn old_rows(db: &Connection, project: &ProjectId, now: Timestamp) -> Result<Vec<(i64, Old)>, Error> {
    let most = sql::as_limit(AT_ONCE);
    let project_name = project.as_str();
    let calls = trimmed::oldest(db, project, i64::MAX, AT_ONCE)?;
    let mut old: Vec<_> = calls.into_iter().map(|call| (call.at, Old::Call(call))).collect();
    old.extend(sql::rows(
        db,
        "SELECT id, ended_at FROM instances WHERE project = ?1 AND ended_at IS NOT NULL ORDER BY ended_at LIMIT ?2",
        &[&project_name, &most],
        |row| Ok((row.get("ended_at")?, Old::Instance(row.get("id")?))),
    )?);
    old.extend(sql::rows(
        db,
        "SELECT id, ended_at FROM sandboxes
         WHERE project = ?1 AND ended_at < ?2 AND state IN ('deleted', 'failed') ORDER BY ended_at LIMIT ?3",
        &[&project_name, &now.0.saturating_sub(SETTLED_MILLIS), &most],
        |row| Ok((row.get("ended_at")?, Old::Sandbox(sql::word(row, "id")?))),
    )?);
    Ok(old)
}

/// Removes decisions until few enough are left: the oldest of the kind that there is most of. Whether any went.
fn trim_decisions(
    db: &Connection,
    project: &ProjectId,
    size: &Size,
    most: i64,
    until: Instant,
) -> Result<bool, Error> {
    let (mut facts, mut trimmed_to) = (0_i64, size.kept_trimmed_to);
    for _ in 0..AT_ONCE {
        if counted(db, project, true)? <= most {
            break;
        }
        let oldest = sql::row(
            db,
            "SELECT min(seq) AS seq FROM facts INDEXED BY facts_kept WHERE project = ?1 AND kept IS NOT NULL AND kind =
                 (SELECT kind FROM kept_sizes WHERE project = ?1 ORDER BY bytes DESC, kind LIMIT 1)",
            &[&project.as_str()],
            |row| row.get::<_, Option<i64>>("seq"),
        )?;
        let Some(seq) = oldest.flatten() else {
            break;
        };
        sql::execute(db, "DELETE FROM facts WHERE seq = ?1", &[&seq])?;
        facts += 1;
        trimmed_to = trimmed_to.max(seq);
        if Instant::now() >= until {
            break;
        }
    }
    sql::execute(
        db,
        "UPDATE ledger_sizes SET kept_trimmed_to = ?2, facts_gone = facts_gone + ?3, untold = untold OR ?4
         WHERE project = ?1",
        &[&project.as_str(), &trimmed_to, &facts, &(facts > 0)],
    )?;
    Ok(facts > 0)
}

fn tell(db: &Connection, project: &ProjectId, size: &Size, now: Timestamp) -> Result<(), Error> {
    sql::execute(
        db,
        "DELETE FROM facts WHERE seq = ?1 AND kind = 'ledger.trimmed'",
        &[&size.told],
    )?;
    let fact = Fact::LedgerTrimmed {
        facts: size.facts_gone,
        model_calls: size.calls_gone,
        instances: size.instances_gone,
        sandboxes: size.sandboxes_gone,
        through: size.trimmed_to.max(size.kept_trimmed_to),
        complete_from: size.complete_from.unwrap_or(now),
    };
    let new = NewFact {
        at: now,
        project: project.clone(),
        sandbox: None,
        fact,
    };
    facts::append(db, &[new])?;
    let told = db.last_insert_rowid();
    sql::execute(
        db,
        "UPDATE ledger_sizes SET told = ?2, untold = 0 WHERE project = ?1",
        &[&project.as_str(), &told],
    )?;
    Ok(())
}

fn usage_in(data: &str) -> UsageTotal {
    let data: serde_json::Value = serde_json::from_str(data).unwrap_or_default();
    let count = |name: &str| data[name].as_u64().unwrap_or(0);
    UsageTotal {
        wall_millis: count("wall_millis"),
        cpu_micros: count("cpu_micros"),
        memory_byte_seconds: count("memory_byte_seconds"),
        disk_byte_seconds: count("disk_byte_seconds"),
    }
}

fn add_usage(db: &Connection, project: &ProjectId, day: i64, more: &UsageTotal) -> Result<(), Error> {
    // What SQLite cannot add up stays at the most that it can hold.
    sql::execute(
        db,
        "INSERT INTO usage_trimmed (project, day, wall_millis, cpu_micros, memory_byte_seconds, disk_byte_seconds)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6)
         ON CONFLICT (project, day) DO UPDATE SET
             wall_millis = wall_millis + min(?3, 9223372036854775807 - wall_millis),
             cpu_micros = cpu_micros + min(?4, 9223372036854775807 - cpu_micros),
             memory_byte_seconds = memory_byte_seconds + min(?5, 9223372036854775807 - memory_byte_seconds),
             disk_byte_seconds = disk_byte_seconds + min(?6, 9223372036854775807 - disk_byte_seconds)",
        &[
            &project.as_str(),
            &day,
            &sql::as_count(more.wall_millis),
            &sql::as_count(more.cpu_micros),
            &sql::as_count(more.memory_byte_seconds),
            &sql::as_count(more.disk_byte_seconds),
        ],
    )?;
    Ok(())
}

/// What a project used by facts that were trimmed, on days that began in this time.
pub(crate) fn usage(
    db: &Connection,
    project: &ProjectId,
    from: Timestamp,
    to: Timestamp,
) -> Result<UsageTotal, Error> {
    let days = sql::rows(
        db,
        "SELECT * FROM usage_trimmed WHERE project = ?1 AND day >= ?2 AND day < ?3",
        &[&project.as_str(), &from.0, &to.0],
        |row| {
            Ok(UsageTotal {
                wall_millis: sql::count(row, "wall_millis")?,
                cpu_micros: sql::count(row, "cpu_micros")?,
                memory_byte_seconds: sql::count(row, "memory_byte_seconds")?,
                disk_byte_seconds: sql::count(row, "disk_byte_seconds")?,
            })
        },
    )?;
    Ok(days.into_iter().fold(UsageTotal::default(), UsageTotal::plus))
}

/// Retention, as for facts.
pub(crate) fn expire(db: &Connection, before: Timestamp) -> Result<(), Error> {
    sql::execute(
        db,
        "DELETE FROM usage_trimmed WHERE day < ?1",
        &[&before.0.saturating_sub(DAY_MILLIS)],
    )?;
    Ok(())
}

/// Up to which fact nothing is left to be trimmed.
pub(crate) fn trimmed_to(db: &Connection, project: &ProjectId) -> Result<i64, Error> {
    let size = Size::of(db, project)?;
    Ok(size.map_or(0, |size| size.trimmed_to))
}

pub(crate) fn complete_from(db: &Connection, project: &ProjectId) -> Result<Option<Timestamp>, Error> {
    let size = Size::of(db, project)?;
    Ok(size.and_then(|size| size.complete_from))
}
