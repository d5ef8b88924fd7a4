//! Instances, in SQLite: written with the facts that they follow from.

use async_trait::async_trait;
use atoll_types::{InstanceId, SandboxId, Timestamp};
use rusqlite::{Connection, Row};

use super::{Sandboxes, page, sql};
use crate::{Error, Fact, InstanceQuery, InstanceRow, InstanceStore, NewFact, Page, UsageTotal};

#[async_trait]
impl InstanceStore for Sandboxes {
    async fn instances(&self, query: InstanceQuery) -> Result<Page<InstanceRow>, Error> {
        self.file
            .read("list instances", move |db| {
                let select = "SELECT * FROM (SELECT *, started_at AS created_at FROM instances)
                              WHERE sandbox = ? AND project = ?";
                let (sandbox, project) = (query.sandbox.as_str(), query.project.as_str());
                page::newest(
                    db,
                    select.to_owned(),
                    vec![&sandbox, &project],
                    query.after.as_ref(),
                    query.limit,
                    read,
                    |row: &InstanceRow| (row.started_at, row.id.as_str()),
                )
            })
            .await
    }
}

/// Writes what a fact says about an instance.
pub(crate) fn note(db: &Connection, new: &NewFact) -> Result<(), Error> {
    let Some(sandbox) = &new.sandbox else {
        return Ok(());
    };
    match &new.fact {
        Fact::SandboxStarted { instance, .. } | Fact::SandboxResumed { instance, .. } => {
            sql::execute(
                db,
                "INSERT INTO instances (id, sandbox, project, isolation, started_at)
                 SELECT ?1, id, project, isolation, ?2 FROM sandboxes WHERE id = ?3",
                &[&instance.as_str(), &new.at.0, &sandbox.as_str()],
            )?;
        }
        Fact::SandboxPaused { .. } => end(db, sandbox, new.at, "paused")?,
        Fact::SandboxStopped { .. } => end(db, sandbox, new.at, "stopped")?,
        Fact::SandboxEnded { end: why } | Fact::SandboxFailed { end: why } => {
            end(db, sandbox, new.at, why.name())?;
        }
        Fact::Usage {
            instance: Some(instance),
            wall_millis,
            cpu_micros,
            memory_byte_seconds,
            disk_byte_seconds,
        } => add(
            db,
            instance,
            &UsageTotal {
                wall_millis: *wall_millis,
                cpu_micros: *cpu_micros,
                memory_byte_seconds: *memory_byte_seconds,
                disk_byte_seconds: *disk_byte_seconds,
            },
        )?,
        _ => {}
    }
    Ok(())
}

fn end(db: &Connection, sandbox: &SandboxId, at: Timestamp, reason: &str) -> Result<(), Error> {
    sql::execute(
        db,
        "UPDATE instances SET ended_at = ?2, reason = ?3 WHERE sandbox = ?1 AND ended_at IS NULL",
        &[&sandbox.as_str(), &at.0, &reason],
    )?;
    Ok(())
}

/// Its last usage comes after its end.
fn add(db: &Connection, instance: &InstanceId, more: &UsageTotal) -> Result<(), Error> {
    // What SQLite cannot add up stays at the most that it can hold.
    sql::execute(
        db,
        "UPDATE instances SET wall_millis = wall_millis + min(?2, 9223372036854775807 - wall_millis),
             cpu_micros = cpu_micros + min(?3, 9223372036854775807 - cpu_micros),
             memory_byte_seconds = memory_byte_seconds + min(?4, 9223372036854775807 - memory_byte_seconds),
             disk_byte_seconds = disk_byte_seconds + min(?5, 9223372036854775807 - disk_byte_seconds)
         WHERE id = ?1",
        &[
            &instance.as_str(),
            &sql::as_count(more.wall_millis),
            &sql::as_count(more.cpu_micros),
            &sql::as_count(more.memory_byte_seconds),
            &sql::as_count(more.disk_byte_seconds),
        ],
    )?;
    Ok(())
}

/// Retention, as for facts.
pub(crate) fn expire(db: &Connection, before: Timestamp, limit: usize) -> Result<(), Error> {
    sql::execute(
        db,
        "DELETE FROM instances WHERE id IN
             (SELECT id FROM instances WHERE ended_at < ?1 ORDER BY ended_at LIMIT ?2)",
        &[&before.0, &sql::as_limit(limit)],
    )?;
    Ok(())
}

fn read(row: &Row<'_>) -> rusqlite::Result<InstanceRow> {
    Ok(InstanceRow {
        id: sql::word(row, "id")?,
        sandbox: sql::word(row, "sandbox")?,
        project: sql::word(row, "project")?,
        isolation: sql::word(row, "isolation")?,
        started_at: sql::time(row, "started_at")?,
        ended_at: sql::maybe_time(row, "ended_at")?,
        reason: row.get("reason")?,
        usage: UsageTotal {
            wall_millis: sql::count(row, "wall_millis")?,
            cpu_micros: sql::count(row, "cpu_micros")?,
            memory_byte_seconds: sql::count(row, "memory_byte_seconds")?,
            disk_byte_seconds: sql::count(row, "disk_byte_seconds")?,
        },
    })
}
