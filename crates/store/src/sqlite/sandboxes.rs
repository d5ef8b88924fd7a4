//! The rows of sandboxes, in SQLite.
//!
//! What must hold: `due_at` is what [`next_deadline`] says of the record, in every row, always: it is computed whenever the record
//! is written. It is a column so that an index finds what is due.

use async_trait::async_trait;
use atoll_lifecycle::{Policy, Record, next_deadline};
use atoll_types::{OwnedBy, Owner, ProjectId, SandboxId, SandboxName, SandboxSpec, Timestamp};
use rusqlite::{Connection, Row, ToSql};

use super::{Sandboxes, facts, page, snapshots, sql, volumes};
use crate::{
    Error, Idempotency, Inserted, NewFact, NewSandbox, Page, SandboxQuery, SandboxRow, SandboxRowStore,
};

/// As in [`atoll_types::SandboxState::holds_instance`], for statements that an index serves.
macro_rules! with_instance {
    () => {
        "state IN ('starting', 'running', 'pausing', 'resuming', 'stopping', 'deleting')"
    };
}

#[async_trait]
impl SandboxRowStore for Sandboxes {
    async fn insert_sandbox(&self, new: NewSandbox) -> Result<Inserted, Error> {
        self.file
            .write("create the sandbox", move |db| insert(db, new))
            .await
    }

    async fn sandbox_by_idempotency(
        &self,
        project: &ProjectId,
        idempotency: Idempotency,
    ) -> Result<Option<SandboxRow>, Error> {
        let project = project.clone();
        self.file
            .read("look for an idempotency key", move |db| {
                by_idempotency(db, &project, &idempotency)
            })
            .await
    }

    async fn sandbox(&self, project: &ProjectId, id: &SandboxId) -> Result<Option<SandboxRow>, Error> {
        let (project, id) = (project.clone(), id.clone());
        self.file
            .read("read the sandbox", move |db| {
                sql::row(
                    db,
                    "SELECT * FROM sandboxes WHERE id = ?1 AND project = ?2",
                    &[&id.as_str(), &project.as_str()],
                    read,
                )
            })
            .await
    }

    async fn sandbox_named(
        &self,
        project: &ProjectId,
        name: &SandboxName,
    ) -> Result<Option<SandboxId>, Error> {
        let (project, name) = (project.clone(), name.clone());
        self.file
            .read("look for a sandbox's name", move |db| {
                by_name(db, &project, &name)
            })
            .await
    }

    async fn sandbox_of_any_project(&self, id: &SandboxId) -> Result<Option<SandboxRow>, Error> {
        let id = id.clone();
        self.file
            .read("read the sandbox", move |db| {
                sql::row(db, "SELECT * FROM sandboxes WHERE id = ?1", &[&id.as_str()], read)
            })
            .await
    }

    async fn update_sandbox(&self, row: SandboxRow, facts: Vec<NewFact>) -> Result<SandboxRow, Error> {
        self.file
            .write("update the sandbox", move |db| update(db, row, &facts))
            .await
    }

    async fn update_sandboxes(
        &self,
        changes: Vec<(SandboxRow, Vec<NewFact>)>,
    ) -> Result<Vec<SandboxRow>, Error> {
        self.file
            .write("update the sandboxes", move |db| {
                changes
                    .into_iter()
                    .map(|(row, facts)| update(db, row, &facts))
                    .collect()
            })
            .await
    }

    async fn update_sandbox_within(
        &self,
        row: SandboxRow,
        facts: Vec<NewFact>,
        max_live: u64,
    ) -> Result<SandboxRow, Error> {
        self.file
            .write("update the sandbox", move |db| {
                limit_live(db, &row.project, max_live)?;
                update(db, row, &facts)
            })
            .await
    }

    async fn change_sandbox(&self, row: SandboxRow, facts: Vec<NewFact>) -> Result<SandboxRow, Error> {
        self.file
            .write("change the sandbox", move |db| {
                check_name(db, &row)?;
                let row = update(db, row, &facts)?;
                let (id, spec) = (row.id.as_str(), sql::to_json("a spec", &row.spec)?);
                let name = row.spec.name.as_ref().map(SandboxName::as_str);
                let statement = "UPDATE sandboxes SET spec = ?2, name = ?3 WHERE id = ?1";
                sql::execute(db, statement, &[&id, &spec, &name])?;
                sql::execute(db, "DELETE FROM labels WHERE sandbox = ?1", &[&id])?;
                label(db, &row)?;
                Ok(row)
            })
            .await
    }

    async fn set_sandbox_network(&self, row: SandboxRow, facts: Vec<NewFact>) -> Result<SandboxRow, Error> {
        self.file
            .write("set the network of the sandbox", move |db| {
                let found = sql::row(
                    db,
                    "SELECT * FROM sandboxes WHERE id = ?1",
                    &[&row.id.as_str()],
                    read,
                )?;
                let Some(mut stored) = found else {
                    return Err(Error::NotFound {
                        what: "sandbox",
                        id: row.id.to_string(),
                    });
                };
                if stored.version != row.version {
                    return Err(Error::VersionConflict(row.id));
                }
                stored.version += 1;
                stored.spec.network = row.spec.network;
                stored.spec.secrets = row.spec.secrets;
                sql::execute(
                    db,
                    "UPDATE sandboxes SET spec = ?2, version = ?3 WHERE id = ?1",
                    &[
                        &stored.id.as_str(),
                        &sql::to_json("a spec", &stored.spec)?,
                        &stored.version,
                    ],
                )?;
                facts::append(db, &facts)?;
                Ok(stored)
            })
            .await
    }

    async fn sandboxes(&self, query: SandboxQuery) -> Result<Page<SandboxRow>, Error> {
        self.file.read("list sandboxes", move |db| list(db, &query)).await
    }

    async fn live_sandboxes(&self) -> Result<Vec<SandboxRow>, Error> {
        self.file
            .read("list live sandboxes", |db| {
                sql::rows(
                    db,
                    "SELECT * FROM sandboxes WHERE state NOT IN ('deleted', 'failed') ORDER BY created_at",
                    &[],
                    read,
                )
            })
            .await
    }

    async fn count_live_sandboxes(&self, project: &ProjectId) -> Result<u64, Error> {
        let project = project.clone();
        self.file
            .read("count live sandboxes", move |db| count_live(db, &project))
            .await
    }

    async fn due_sandboxes(&self, now: Timestamp, limit: usize) -> Result<Vec<SandboxRow>, Error> {
        self.file.flush().await?;
        self.file
            .read("find due sandboxes", move |db| {
                sql::rows(
                    db,
                    "SELECT * FROM sandboxes WHERE due_at <= ?1 ORDER BY due_at LIMIT ?2",
                    &[&now.0, &sql::as_limit(limit)],
                    read,
                )
            })
            .await
    }

    async fn next_due(&self) -> Result<Option<Timestamp>, Error> {
        self.file
            .read("find the next deadline", |db| {
                let due = sql::row(
                    db,
                    "SELECT min(due_at) AS due_at FROM sandboxes WHERE due_at IS NOT NULL",
                    &[],
                    |row| sql::maybe_time(row, "due_at"),
                )?;
                Ok(due.flatten())
            })
            .await
    }

    fn note_sandbox_used(&self, id: &SandboxId, at: Timestamp) {
        self.file.touches.sandbox(id, at);
    }

    async fn forget_sandboxes(&self, ended_before: Timestamp, limit: usize) -> Result<usize, Error> {
        self.file
            .write("forget ended sandboxes", move |db| {
                sql::execute(
                    db,
                    "DELETE FROM sandboxes WHERE id IN (
                     SELECT id FROM sandboxes
                     WHERE ended_at < ?1 AND state IN ('deleted', 'failed') ORDER BY ended_at LIMIT ?2)",
                    &[&ended_before.0, &sql::as_limit(limit)],
                )
            })
            .await
    }
}

fn insert(db: &Connection, new: NewSandbox) -> Result<Inserted, Error> {
    let NewSandbox {
        mut row,
        idempotency,
        max_live,
        facts,
    } = new;
    if let Some(idempotency) = &idempotency {
        if let Some(existing) = by_idempotency(db, &row.project, idempotency)? {
            return Ok(Inserted::Existing(existing));
        }
        // Only one that could not be started is not found by its key.
        sql::execute(
            db,
            "UPDATE sandboxes SET idempotency_key = NULL, request_digest = NULL
             WHERE project = ?1 AND idempotency_key = ?2",
            &[&row.project.as_str(), &idempotency.key],
        )?;
    }
    // Whoever wants the sandbox that has this name finds it, however many there are.
    check_name(db, &row)?;
    if let Some(limit) = max_live {
        limit_live(db, &row.project, limit)?;
    }
    row.version = 1;
    let record = &row.record;
    sql::execute(
        db,
        "INSERT INTO sandboxes (id, project, template, isolation, spec, state, instance, created_at, started_at,
             ended_at, deadline, last_used_at, due_at, ending, kill_requested, idempotency_key, request_digest,
             version, saved, saving, hold_off, name, owner)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18, ?19, ?20, ?21,
             ?22, ?23)",
        &[
            &row.id.as_str(),
            &row.project.as_str(),
            &row.template.as_str(),
            &row.isolation.name(),
            &sql::to_json("a spec", &row.spec)?,
            &record.state.name(),
            &record.instance.as_ref().map(|id| id.as_str()),
            &record.created_at.0,
            &record.started_at.map(|at| at.0),
            &record.ended_at.map(|at| at.0),
            &record.deadline.map(|at| at.0),
            &record.last_used_at.0,
            &due_at(record),
            &maybe_json("an end reason", record.end.as_ref())?,
            &record.kill_requested,
            &idempotency.as_ref().map(|i| i.key.as_str()),
            &idempotency.as_ref().map(|i| i.request),
            &row.version,
            &maybe_json("a saved state", record.saved.as_ref())?,
            &maybe_json("a saved state", record.saving.as_ref())?,
            &record.hold_off.map(|at| at.0),
            &row.spec.name.as_ref().map(SandboxName::as_str),
            &row.spec.owner.as_ref().map(Owner::to_string),
        ],
    )?;
    volumes::attach(db, &row.project, &row.id, &row.spec.volumes)?;
    label(db, &row)?;
    facts::append(db, &facts)?;
    Ok(Inserted::New(row))
}

/// Refuses a name that another living sandbox of the project has.
fn check_name(db: &Connection, row: &SandboxRow) -> Result<(), Error> {
    let Some(name) = &row.spec.name else {
        return Ok(());
    };
    match by_name(db, &row.project, name)? {
        Some(id) if id != row.id => Err(Error::NameTaken {
            what: "sandbox",
            name: name.to_string(),
        }),
        _ => Ok(()),
    }
}

fn by_name(db: &Connection, project: &ProjectId, name: &SandboxName) -> Result<Option<SandboxId>, Error> {
    sql::row(
        db,
        "SELECT id FROM sandboxes WHERE project = ?1 AND name = ?2 AND state NOT IN ('deleted', 'failed')",
        &[&project.as_str(), &name.as_str()],
        |row| sql::word(row, "id"),
    )
}

fn label(db: &Connection, row: &SandboxRow) -> Result<(), Error> {
    for (key, value) in &row.spec.labels {
        sql::execute(
            db,
            "INSERT INTO labels (sandbox, key, value) VALUES (?1, ?2, ?3)",
            &[&row.id.as_str(), key, value],
        )?;
    }
    Ok(())
}

pub(crate) fn update(db: &Connection, mut row: SandboxRow, facts: &[NewFact]) -> Result<SandboxRow, Error> {
    let found = sql::row(
        db,
        "SELECT version, last_used_at FROM sandboxes WHERE id = ?1",
        &[&row.id.as_str()],
        |found| Ok((found.get::<_, i64>("version")?, sql::time(found, "last_used_at")?)),
    )?;
    let Some((version, last_used_at)) = found else {
        return Err(Error::NotFound {
            what: "sandbox",
            id: row.id.to_string(),
        });
    };
    if version != row.version {
        return Err(Error::VersionConflict(row.id));
    }
    row.version += 1;
    row.record.last_used_at = row.record.last_used_at.max(last_used_at);
    let record = &row.record;
    sql::execute(
        db,
        "UPDATE sandboxes SET state = ?2, instance = ?3, started_at = ?4, ended_at = ?5, deadline = ?6,
             last_used_at = ?7, due_at = ?8, ending = ?9, kill_requested = ?10, version = ?11, saved = ?12,
             saving = ?13, hold_off = ?14
         WHERE id = ?1",
        &[
            &row.id.as_str(),
            &record.state.name(),
            &record.instance.as_ref().map(|id| id.as_str()),
            &record.started_at.map(|at| at.0),
            &record.ended_at.map(|at| at.0),
            &record.deadline.map(|at| at.0),
            &record.last_used_at.0,
            &due_at(record),
            &maybe_json("an end reason", record.end.as_ref())?,
            &record.kill_requested,
            &row.version,
            &maybe_json("a saved state", record.saved.as_ref())?,
            &maybe_json("a saved state", record.saving.as_ref())?,
            &record.hold_off.map(|at| at.0),
        ],
    )?;
    let rests_on = record.saved.as_ref().map(|saved| &saved.snapshot);
    snapshots::keep_hidden(db, &row.id, rests_on)?;
    if !record.state.is_live() {
        volumes::detach(db, &row.id)?;
    }
    facts::append(db, facts)?;
    Ok(row)
}

fn list(db: &Connection, query: &SandboxQuery) -> Result<Page<SandboxRow>, Error> {
    let project = query.project.as_str();
    let states: Vec<&str> = query.states.iter().map(|state| state.name()).collect();
    let mut sql = "SELECT * FROM sandboxes AS s WHERE project = ?".to_owned();
    let mut parameters: Vec<&dyn ToSql> = vec![&project];
    if !states.is_empty() {
        sql.push_str(" AND state IN (");
        sql.push_str(&vec!["?"; states.len()].join(", "));
        sql.push(')');
        parameters.extend(states.iter().map(|state| state as &dyn ToSql));
    }
    // All of a kind have the same beginning; `;` is what follows `:`.
    let (from, to) = match &query.owner {
        None => Default::default(),
        Some(OwnedBy::One(owner)) => (owner.to_string(), owner.to_string()),
        Some(OwnedBy::Kind(kind)) => (format!("{}:", kind.name()), format!("{};", kind.name())),
    };
    if query.owner.is_some() {
        sql.push_str(" AND owner >= ? AND owner <= ?");
        parameters.extend([&from as &dyn ToSql, &to]);
    }
    for (key, value) in &query.labels {
        sql.push_str(" AND EXISTS (SELECT 1 FROM labels WHERE sandbox = s.id AND key = ? AND value = ?)");
        parameters.push(key);
        parameters.push(value);
    }
    page::newest(
        db,
        sql,
        parameters,
        query.after.as_ref(),
        query.limit,
        read,
        |row| (row.record.created_at, row.id.as_str()),
    )
}

fn by_idempotency(
    db: &Connection,
    project: &ProjectId,
    idempotency: &Idempotency,
) -> Result<Option<SandboxRow>, Error> {
    let found = sql::row(
        db,
        "SELECT * FROM sandboxes WHERE project = ?1 AND idempotency_key = ?2",
        &[&project.as_str(), &idempotency.key],
        |row| Ok((read(row)?, row.get::<_, Vec<u8>>("request_digest")?)),
    )?;
    match found {
        Some((row, _)) if row.could_not_start() => Ok(None),
        Some((row, digest)) if digest != idempotency.request => Err(Error::IdempotencyConflict {
            key: idempotency.key.clone(),
            sandbox: row.id,
        }),
        found => Ok(found.map(|(row, _)| row)),
    }
}

fn count_live(db: &Connection, project: &ProjectId) -> Result<u64, Error> {
    let live = sql::row(
        db,
        concat!(
            "SELECT count(*) AS live FROM sandboxes WHERE project = ?1 AND ",
            with_instance!()
        ),
        &[&project.as_str()],
        |row| sql::count(row, "live"),
    )?;
    Ok(live.unwrap_or(0))
}

fn limit_live(db: &Connection, project: &ProjectId, limit: u64) -> Result<(), Error> {
    let live = count_live(db, project)?;
    if live >= limit {
        return Err(Error::QuotaExceeded { live, limit });
    }
    Ok(())
}

/// Moves the last use of a sandbox forward, and its next deadline with it.
pub(crate) fn touch(db: &Connection, id: &SandboxId, at: Timestamp) -> Result<(), Error> {
    let found = sql::row(db, "SELECT * FROM sandboxes WHERE id = ?1", &[&id.as_str()], read)?;
    // It may have been forgotten since.
    let Some(SandboxRow { mut record, .. }) = found else {
        return Ok(());
    };
    if record.last_used_at >= at {
        return Ok(());
    }
    record.last_used_at = at;
    sql::execute(
        db,
        "UPDATE sandboxes SET last_used_at = ?2, due_at = ?3 WHERE id = ?1",
        &[&id.as_str(), &at.0, &due_at(&record)],
    )?;
    Ok(())
}

fn due_at(record: &Record) -> Option<i64> {
    next_deadline(record).map(|(at, _)| at.0)
}

fn maybe_json<T: serde::Serialize>(what: &'static str, value: Option<&T>) -> Result<Option<String>, Error> {
    value.map(|value| sql::to_json(what, value)).transpose()
}

fn read(row: &Row<'_>) -> rusqlite::Result<SandboxRow> {
    let spec: SandboxSpec = sql::json(row, "spec")?;
    let record = Record {
        state: sql::word(row, "state")?,
        instance: sql::maybe_word(row, "instance")?,
        created_at: sql::time(row, "created_at")?,
        started_at: sql::maybe_time(row, "started_at")?,
        ended_at: sql::maybe_time(row, "ended_at")?,
        deadline: sql::maybe_time(row, "deadline")?,
        policy: Policy::of(&spec),
        last_used_at: sql::time(row, "last_used_at")?,
        hold_off: sql::maybe_time(row, "hold_off")?,
        saved: sql::maybe_json(row, "saved")?,
        saving: sql::maybe_json(row, "saving")?,
        end: sql::maybe_json(row, "ending")?,
        kill_requested: row.get("kill_requested")?,
    };
    Ok(SandboxRow {
        id: sql::word(row, "id")?,
        project: sql::word(row, "project")?,
        spec,
        template: sql::word(row, "template")?,
        isolation: sql::word(row, "isolation")?,
        record,
        version: row.get("version")?,
    })
}
