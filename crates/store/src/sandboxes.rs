//! Sandboxes: what each was asked to be, and where its life stands.
//!
//! What must hold:
//! - A row changes only from the version that its writer has read; two that decided on the same version cannot both win.
//!   (A noted use is no decision and does not count as a version; it only ever moves the last use forward.)
//! - `due_at` is what [`atoll_lifecycle::next_deadline`] says of the record, in every row, always: it is computed here
//!   whenever the record is written.
//! - The volumes that a row's spec names are attached from its insertion to its end; the hidden snapshot that its record
//!   names exists, and no other of it does (see [`crate::SnapshotRow`]).
//! - What it was asked to be is as it was at creation, but for what it may reach.
//! - An idempotency key belongs to one sandbox of its project for as long as that row exists. One that could not be started
//!   gives its key up: whoever asks again under it gets another.

use atoll_lifecycle::{Happening, Policy, Record, next_deadline};
use atoll_types::{
    EndReason, Isolation, ProjectId, SandboxId, SandboxSpec, SandboxState, TemplateId, Timestamp,
};
use rusqlite::{Connection, Row, ToSql};

use crate::{Cursor, Error, Fact, NewFact, Page, Store, facts, page, snapshots, sql, volumes};

/// As in [`SandboxState::holds_instance`], for statements that an index serves.
macro_rules! with_instance {
    () => {
        "state IN ('starting', 'running', 'pausing', 'resuming', 'stopping', 'deleting')"
    };
}

#[derive(Debug, Clone, PartialEq)]
pub struct SandboxRow {
    pub id: SandboxId,
    pub project: ProjectId,
    pub spec: SandboxSpec,
    /// The template that `spec.template` meant at creation.
    pub template: TemplateId,
    pub isolation: Isolation,
    /// Where its life stands. Its policy is the spec's.
    pub record: Record,
    /// Counts the changes; the store counts, callers hand back what they read.
    pub version: i64,
}

#[derive(Debug, Clone)]
pub struct NewSandbox {
    /// Its version is ignored.
    pub row: SandboxRow,
    pub idempotency: Option<Idempotency>,
    /// Refuse if the project has this many sandboxes with processes already; those that rest do not count. Exact, however many are created at once.
    pub max_live: Option<u64>,
    pub facts: Vec<NewFact>,
}

/// A caller's promise that requests under one key are one request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Idempotency {
    pub key: String,
    /// SHA-256 of the request, to notice when the promise is broken.
    pub request: [u8; 32],
}

#[derive(Debug, Clone, PartialEq)]
pub enum Inserted {
    New(SandboxRow),
    /// The key was used before, for the same request; nothing was written.
    Existing(SandboxRow),
}

#[derive(Debug, Clone)]
pub struct SandboxQuery {
    pub project: ProjectId,
    /// Every one of these must match.
    pub labels: Vec<(String, String)>,
    /// Any of these; all when empty.
    pub states: Vec<SandboxState>,
    pub after: Option<Cursor>,
    /// At most [`crate::MAX_PAGE`].
    pub limit: usize,
}

impl SandboxRow {
    /// Whether it ended, or is about to, without ever having run.
    pub fn could_not_start(&self) -> bool {
        matches!(self.record.end, Some(EndReason::StartFailed(_)))
    }

    /// What the ledger is told about a transition of this sandbox.
    pub fn facts(&self, happenings: &[Happening], at: Timestamp) -> Vec<NewFact> {
        // A cold sandbox is created in one transition and starts in a later one.
        let warm = happenings.contains(&Happening::Created);
        let fact = |happening: &Happening| match happening.clone() {
            Happening::Created => Fact::SandboxCreated {
                template: self.template.clone(),
                isolation: self.isolation,
                resources: self.spec.resources,
            },
            Happening::Started { instance } => Fact::SandboxStarted {
                instance,
                took_millis: at.millis_since(self.record.created_at),
                warm,
            },
            Happening::Extended { deadline } => Fact::SandboxExtended { deadline },
            Happening::Paused {
                snapshot,
                kind,
                bytes,
                took_millis,
            } => Fact::SandboxPaused {
                kind,
                snapshot,
                bytes,
                took_millis,
            },
            Happening::Stopped {
                snapshot,
                bytes,
                took_millis,
            } => Fact::SandboxStopped {
                snapshot,
                bytes,
                took_millis,
            },
            Happening::SaveFailed { why } => Fact::SandboxSaveFailed { why },
            Happening::Resumed {
                instance,
                took_millis,
            } => Fact::SandboxResumed {
                instance,
                took_millis,
            },
            Happening::ResumeFailed { why } => Fact::SandboxResumeFailed { why },
            Happening::Ended { reason } => Fact::SandboxEnded { end: reason },
            Happening::Failed { reason } => Fact::SandboxFailed { end: reason },
        };
        happenings
            .iter()
            .map(|happening| NewFact {
                at,
                project: self.project.clone(),
                sandbox: Some(self.id.clone()),
                fact: fact(happening),
            })
            .collect()
    }
}

impl Store {
    /// Writes a new sandbox with its labels and facts, or finds the one that its idempotency key made before.
    pub async fn insert_sandbox(&self, new: NewSandbox) -> Result<Inserted, Error> {
        self.write("create the sandbox", move |db| insert(db, new)).await
    }

    /// The sandbox that an idempotency key made; an error when it was made by a different request.
    pub async fn sandbox_by_idempotency(
        &self,
        project: &ProjectId,
        idempotency: Idempotency,
    ) -> Result<Option<SandboxRow>, Error> {
        let project = project.clone();
        self.read("look for an idempotency key", move |db| {
            by_idempotency(db, &project, &idempotency)
        })
        .await
    }

    pub async fn sandbox(&self, project: &ProjectId, id: &SandboxId) -> Result<Option<SandboxRow>, Error> {
        let (project, id) = (project.clone(), id.clone());
        self.read("read the sandbox", move |db| {
            sql::row(
                db,
                "SELECT * FROM sandboxes WHERE id = ?1 AND project = ?2",
                &[&id.as_str(), &project.as_str()],
                read,
            )
        })
        .await
    }

    /// The sandbox, whichever project it belongs to: for port hosts and the server's own loops.
    pub async fn sandbox_of_any_project(&self, id: &SandboxId) -> Result<Option<SandboxRow>, Error> {
        let id = id.clone();
        self.read("read the sandbox", move |db| {
            sql::row(db, "SELECT * FROM sandboxes WHERE id = ?1", &[&id.as_str()], read)
        })
        .await
    }

    /// Writes the record of a row together with facts, if its version is still the one that was read. Gives back the row
    /// as it stands now. What it was asked to be (spec, template, isolation) does not change with this. A hidden snapshot
    /// that the record does not name any more is forgotten with this; the caller removes its bytes.
    pub async fn update_sandbox(&self, row: SandboxRow, facts: Vec<NewFact>) -> Result<SandboxRow, Error> {
        self.write("update the sandbox", move |db| update(db, row, &facts))
            .await
    }

    /// The same for several, all or none: the copies of a fork that come to run together.
    pub async fn update_sandboxes(
        &self,
        changes: Vec<(SandboxRow, Vec<NewFact>)>,
    ) -> Result<Vec<SandboxRow>, Error> {
        self.write("update the sandboxes", move |db| {
            changes
                .into_iter()
                .map(|(row, facts)| update(db, row, &facts))
                .collect()
        })
        .await
    }

    /// The same for a sandbox that is to have processes again: refused if the project has `max_live` of those already.
    pub async fn update_sandbox_within(
        &self,
        row: SandboxRow,
        facts: Vec<NewFact>,
        max_live: u64,
    ) -> Result<SandboxRow, Error> {
        self.write("update the sandbox", move |db| {
            limit_live(db, &row.project, max_live)?;
            update(db, row, &facts)
        })
        .await
    }

    /// The same with the spec and its labels, some of which may be changed later.
    pub async fn change_sandbox(&self, row: SandboxRow, facts: Vec<NewFact>) -> Result<SandboxRow, Error> {
        self.write("change the sandbox", move |db| {
            let row = update(db, row, &facts)?;
            let (id, spec) = (row.id.as_str(), sql::to_json("a spec", &row.spec)?);
            sql::execute(db, "UPDATE sandboxes SET spec = ?2 WHERE id = ?1", &[&id, &spec])?;
            sql::execute(db, "DELETE FROM labels WHERE sandbox = ?1", &[&id])?;
            label(db, &row)?;
            Ok(row)
        })
        .await
    }

    /// Writes what a sandbox may reach, and with which secrets, as the row's spec says it. Under the same condition as
    /// [`Store::update_sandbox`], and nothing else of the row is written.
    pub async fn set_sandbox_network(
        &self,
        row: SandboxRow,
        facts: Vec<NewFact>,
    ) -> Result<SandboxRow, Error> {
        self.write("set the network of the sandbox", move |db| {
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

    /// Newest first.
    pub async fn sandboxes(&self, query: SandboxQuery) -> Result<Page<SandboxRow>, Error> {
        self.read("list sandboxes", move |db| list(db, &query)).await
    }

    /// Every sandbox that may hold something on the host, of all projects: what a restarted server has to look after.
    pub async fn live_sandboxes(&self) -> Result<Vec<SandboxRow>, Error> {
        self.read("list live sandboxes", |db| {
            sql::rows(
                db,
                "SELECT * FROM sandboxes WHERE state NOT IN ('deleted', 'failed') ORDER BY created_at",
                &[],
                read,
            )
        })
        .await
    }

    /// Those that have processes, as limits count them.
    pub async fn count_live_sandboxes(&self, project: &ProjectId) -> Result<u64, Error> {
        let project = project.clone();
        self.read("count live sandboxes", move |db| count_live(db, &project))
            .await
    }

    /// Sandboxes whose next deadline has come, the longest overdue first. Noted uses are taken into account.
    pub async fn due_sandboxes(&self, now: Timestamp, limit: usize) -> Result<Vec<SandboxRow>, Error> {
        self.flush().await?;
        self.read("find due sandboxes", move |db| {
            sql::rows(
                db,
                "SELECT * FROM sandboxes WHERE due_at <= ?1 ORDER BY due_at LIMIT ?2",
                &[&now.0, &sql::as_limit(limit)],
                read,
            )
        })
        .await
    }

    /// When to look for due sandboxes next, unless something changes before.
    pub async fn next_due(&self) -> Result<Option<Timestamp>, Error> {
        self.read("find the next deadline", |db| {
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

    /// Notes a use of the sandbox: moves the end of its idle time. Returns at once; written with a later batch, lost if
    /// the server dies before (see [`atoll_lifecycle::Liveness`] for why that is fine).
    pub fn note_sandbox_used(&self, id: &SandboxId, at: Timestamp) {
        self.inner.touches.sandbox(id, at);
    }

    /// Retention: forgets at most `limit` sandboxes that ended before that time, with their labels, commands and
    /// idempotency keys, and says how many. Their facts stay.
    pub async fn forget_sandboxes(&self, ended_before: Timestamp, limit: usize) -> Result<usize, Error> {
        self.write("forget ended sandboxes", move |db| {
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
    if let Some(limit) = max_live {
        limit_live(db, &row.project, limit)?;
    }
    row.version = 1;
    let record = &row.record;
    sql::execute(
        db,
        "INSERT INTO sandboxes (id, project, template, isolation, spec, state, instance, created_at, started_at,
             ended_at, deadline, last_used_at, due_at, ending, kill_requested, idempotency_key, request_digest,
             version, saved, saving, hold_off)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18, ?19, ?20, ?21)",
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
        ],
    )?;
    volumes::attach(db, &row.project, &row.id, &row.spec.volumes)?;
    label(db, &row)?;
    facts::append(db, &facts)?;
    Ok(Inserted::New(row))
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
