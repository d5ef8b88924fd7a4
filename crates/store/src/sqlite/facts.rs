//! The ledger, in SQLite. Triggers refuse whatever would change a fact.

use async_trait::async_trait;
use atoll_types::{CommandId, ProjectId, SandboxId, Timestamp};
use rusqlite::{Connection, Row};

use super::groups::Groups;
use super::{Ledger, instances, sql, trimming};
use crate::{
    Error, Fact, FactPage, FactQuery, FactRow, LedgerStore, NewFact, Scope, SpendBy, SpendQuery, UsageTotal,
};

/// The most facts in one answer of [`LedgerStore::facts_page`].
const MAX_FACTS: usize = 1000;
/// So many are looked at for one answer, wanted or not: whoever asks for rare ones goes on from there.
const LOOKED_AT: usize = 10_000;

#[async_trait]
impl LedgerStore for Ledger {
    async fn append_facts(&self, facts: Vec<NewFact>) -> Result<(), Error> {
        if facts.is_empty() {
            return Ok(());
        }
        self.file
            .write("record facts", move |db| append(db, &facts))
            .await
    }

    async fn facts_page(&self, query: FactQuery) -> Result<FactPage, Error> {
        self.file
            .read("list facts", move |db| {
                let project = query.project.as_str();
                let limit = query.limit.clamp(1, MAX_FACTS);
                let most = if query.kinds.is_empty() { limit } else { LOOKED_AT };
                let most = sql::as_limit(most);
                // Along the one index or the other, so that what is looked at is what is counted.
                let (sql, whose) = match &query.sandbox {
                    Some(sandbox) => (
                        "SELECT * FROM facts WHERE sandbox = ?1 AND seq > ?2 ORDER BY seq LIMIT ?3",
                        sandbox.as_str(),
                    ),
                    None => (
                        "SELECT * FROM facts WHERE project = ?1 AND seq > ?2 ORDER BY seq LIMIT ?3",
                        project,
                    ),
                };
                let mut statement = db.prepare_cached(sql)?;
                let mut rows = statement.query(rusqlite::params![whose, query.after_seq, most])?;
                let mut page = FactPage {
                    rows: Vec::new(),
                    next: None,
                };
                let (mut looked_at, mut last) = (0, 0);
                while let Some(row) = rows.next()? {
                    // A sandbox is of one project, and its facts are too: nothing of this one is the caller's.
                    if row.get::<_, String>("project")? != project {
                        return Ok(page);
                    }
                    looked_at += 1;
                    last = row.get("seq")?;
                    if !query.kinds.is_empty() && !query.kinds.contains(&row.get("kind")?) {
                        continue;
                    }
                    page.rows.push(read(row)?);
                    if page.rows.len() >= limit {
                        break;
                    }
                }
                if page.rows.len() >= limit || looked_at >= most {
                    page.next = Some(last);
                }
                Ok(page)
            })
            .await
    }

    async fn open_commands(&self, sandbox: &SandboxId) -> Result<Vec<(CommandId, Timestamp)>, Error> {
        let sandbox = sandbox.clone();
        self.file
            .read("find commands without an end", move |db| {
                sql::rows(
                    db,
                    "SELECT data ->> 'command' AS command, at FROM facts
                 WHERE sandbox = ?1 AND kind = 'command.started' AND data ->> 'command' NOT IN
                     (SELECT data ->> 'command' FROM facts WHERE sandbox = ?1 AND kind = 'command.exited')
                 ORDER BY seq",
                    &[&sandbox.as_str()],
                    |row| Ok((sql::word(row, "command")?, sql::time(row, "at")?)),
                )
            })
            .await
    }

    fn ledger_growth(&self, project: Option<&ProjectId>) -> tokio::sync::watch::Receiver<i64> {
        self.file.engine.growth(project.map(ProjectId::as_str))
    }

    async fn last_seq(&self) -> Result<i64, Error> {
        self.file
            .read("find the last fact", |db| {
                let last = sql::row(db, "SELECT max(seq) AS seq FROM facts", &[], |row| {
                    row.get::<_, Option<i64>>("seq")
                })?;
                Ok(last.flatten().unwrap_or(0))
            })
            .await
    }

    async fn usage_total(&self, scope: Scope, from: Timestamp, to: Timestamp) -> Result<UsageTotal, Error> {
        let (Scope::Project(whose) | Scope::Sandbox(whose, _) | Scope::Instance(whose, ..)) = scope.clone();
        self.file
            .sum(&whose, "sum usage", move |db| {
                let (project, sandbox) = match &scope {
                    Scope::Project(project) => (project, None),
                    Scope::Sandbox(project, sandbox) | Scope::Instance(project, sandbox, _) => {
                        (project, Some(sandbox.as_str()))
                    }
                };
                let sums = match sandbox {
                    Some(_) => USAGE_OF_SANDBOX,
                    None => USAGE_OF_PROJECT,
                };
                let sum = |sums: &str, whose: Option<&str>| {
                    let parameters: [&dyn rusqlite::ToSql; 4] = [&project.as_str(), &from.0, &to.0, &whose];
                    sql::row(db, sums, &parameters, read_usage).map(Option::unwrap_or_default)
                };
                // Sums of instances are complete, however many of the facts that they follow from are gone.
                let beside = match &scope {
                    Scope::Project(project) => trimming::usage(db, project, from, to)?,
                    Scope::Sandbox(..) => sum(USAGE_OF_INSTANCES, sandbox)?,
                    Scope::Instance(_, _, instance) => sum(USAGE_OF_INSTANCE, Some(instance.as_str()))?,
                };
                Ok(sum(sums, sandbox)?.plus(beside))
            })
            .await
    }

    async fn usage_since(
        &self,
        project: &ProjectId,
        known: (UsageTotal, i64),
    ) -> Result<(UsageTotal, i64), Error> {
        let project = project.clone();
        self.file
            .sum(&project.clone(), "sum usage", move |db| {
                // Some that were not summed yet are gone: then all are summed anew, with those.
                let (known, seen) = if known.1 < trimming::trimmed_to(db, &project)? || known.1 == 0 {
                    let gone = trimming::usage(db, &project, Timestamp(i64::MIN), Timestamp(i64::MAX))?;
                    (gone, 0)
                } else {
                    known
                };
                let project = project.as_str();
                let last = sql::row(
                    db,
                    "SELECT max(seq) AS last FROM facts WHERE project = ?1",
                    &[&project],
                    |row| row.get::<_, Option<i64>>("last"),
                )?;
                let last = last.flatten().unwrap_or(seen).max(seen);
                // All of them along the index of those alone, a few along that of all facts.
                let sums = if seen == 0 {
                    USAGE_OF_PROJECT_UNTIL
                } else {
                    USAGE_OF_PROJECT_BEHIND
                };
                let total = sql::row(db, sums, &[&project, &seen, &last], read_usage)?;
                Ok((known.plus(total.unwrap_or_default()), last))
            })
            .await
    }

    async fn oversized_ledgers(&self, most: u64) -> Result<Vec<ProjectId>, Error> {
        self.file
            .read("find ledgers that are too large", move |db| {
                trimming::oversized(db, most)
            })
            .await
    }

    async fn trim_ledger(&self, project: &ProjectId, most: u64, now: Timestamp) -> Result<bool, Error> {
        let project = project.clone();
        self.file
            .write("trim a ledger", move |db| trimming::trim(db, &project, most, now))
            .await
    }

    async fn complete_from(&self, project: &ProjectId) -> Result<Option<Timestamp>, Error> {
        let project = project.clone();
        self.file
            .read("find out what is gone", move |db| {
                trimming::complete_from(db, &project)
            })
            .await
    }

    async fn expire_facts(&self, before: Timestamp, limit: usize) -> Result<usize, Error> {
        self.file.write("apply retention to the ledger", move |db| {
            sql::execute(
                db,
                "INSERT INTO fact_retention (before) VALUES (?1)",
                &[&before.0],
            )?;
            let gone = sql::execute(
                db,
                "DELETE FROM facts WHERE seq IN (SELECT seq FROM facts WHERE at < ?1 ORDER BY at LIMIT ?2)",
                &[&before.0, &sql::as_limit(limit)],
            )?;
            sql::execute(db, "DELETE FROM fact_retention", &[])?;
            instances::expire(db, before, limit)?;
            trimming::expire(db, before)?;
            Ok(gone)
        })
        .await
    }

    async fn compute_beside(&self, query: SpendQuery) -> Result<Vec<(String, UsageTotal)>, Error> {
        let of_some_calls =
            query.model.is_some() || query.provider.is_some() || query.user.is_some() || query.key.is_some();
        let Some(group) = query.by.group_of_usage().filter(|_| !of_some_calls) else {
            return Ok(Vec::new());
        };
        self.file
            .report(&query.project.clone(), "sum usage by group", move |db| {
                let mut statement = db.prepare_cached(&format!(
                    "SELECT {group} AS bucket, data ->> 'wall_millis', data ->> 'cpu_micros',
                        data ->> 'memory_byte_seconds', data ->> 'disk_byte_seconds'
                 FROM facts WHERE project = ?1 AND at >= ?2 AND at < ?3 AND kind = 'usage'
                     AND (?4 IS NULL OR sandbox = ?4)"
                ))?;
                let sandbox = query.sandbox.as_ref().map(SandboxId::as_str);
                let mut rows =
                    statement.query((query.project.as_str(), query.from.0, query.to.0, sandbox))?;
                let mut groups = Groups::<UsageTotal>::default();
                while let Some(row) = rows.next()? {
                    let sum = groups.of(row.get_ref(0)?.as_str().map_err(rusqlite::Error::from)?);
                    let counts = [
                        &mut sum.wall_millis,
                        &mut sum.cpu_micros,
                        &mut sum.memory_byte_seconds,
                        &mut sum.disk_byte_seconds,
                    ];
                    for (at, sum) in counts.into_iter().enumerate() {
                        let more: Option<i64> = row.get(1 + at)?;
                        *sum = sum.saturating_add(u64::try_from(more.unwrap_or(0)).unwrap_or(0));
                    }
                }
                let mut sums: Vec<_> = groups.into_sums().collect();
                sums.sort_by(|(a, _), (b, _)| a.cmp(b));
                Ok(sums)
            })
            .await
    }
}

/// Sums of the high and the low half of each number: byte-seconds of a busy year exceed what SQLite can add up at once.
macro_rules! usage_sums {
    ($from:literal) => {
        concat!(
            "SELECT sum(wall >> 24), sum(wall & 16777215), sum(cpu >> 24), sum(cpu & 16777215),
                    sum(memory >> 24), sum(memory & 16777215), sum(disk >> 24), sum(disk & 16777215)
             FROM (SELECT data ->> 'wall_millis' AS wall, data ->> 'cpu_micros' AS cpu,
                          data ->> 'memory_byte_seconds' AS memory, data ->> 'disk_byte_seconds' AS disk
                   FROM facts ",
            $from,
            " AND project = ?1 AND kind = 'usage')"
        )
    };
}
macro_rules! instance_sums {
    ($which:literal) => {
        concat!(
            "SELECT sum(wall_millis >> 24), sum(wall_millis & 16777215), sum(cpu_micros >> 24),
                    sum(cpu_micros & 16777215), sum(memory_byte_seconds >> 24), sum(memory_byte_seconds & 16777215),
                    sum(disk_byte_seconds >> 24), sum(disk_byte_seconds & 16777215)
             FROM instances WHERE project = ?1 AND ",
            $which
        )
    };
}
const USAGE_OF_PROJECT: &str =
    usage_sums!("INDEXED BY facts_usage WHERE at >= ?2 AND at < ?3 AND ?4 IS NULL");
/// What no instance has in its own sums, as earlier releases told it.
const USAGE_OF_SANDBOX: &str = usage_sums!(
    "INDEXED BY facts_of_sandbox WHERE at >= ?2 AND at < ?3 AND sandbox = ?4 AND data ->> 'instance' IS NULL"
);
/// That of the instances which began in this time.
const USAGE_OF_INSTANCES: &str = instance_sums!("started_at >= ?2 AND started_at < ?3 AND sandbox = ?4");
const USAGE_OF_INSTANCE: &str = instance_sums!("?2 < ?3 AND id = ?4");
const USAGE_OF_PROJECT_UNTIL: &str = usage_sums!("INDEXED BY facts_usage WHERE seq > ?2 AND seq <= ?3");
const USAGE_OF_PROJECT_BEHIND: &str = usage_sums!("INDEXED BY facts_of_project WHERE seq > ?2 AND seq <= ?3");

fn read_usage(row: &Row<'_>) -> rusqlite::Result<UsageTotal> {
    Ok(UsageTotal {
        wall_millis: wide_sum(row, 0)?,
        cpu_micros: wide_sum(row, 2)?,
        memory_byte_seconds: wide_sum(row, 4)?,
        disk_byte_seconds: wide_sum(row, 6)?,
    })
}

fn wide_sum(row: &Row<'_>, column: usize) -> rusqlite::Result<u64> {
    let high: Option<i64> = row.get(column)?;
    let low: Option<i64> = row.get(column + 1)?;
    let sum = (i128::from(high.unwrap_or(0)) << 24) + i128::from(low.unwrap_or(0));
    Ok(u64::try_from(sum.max(0)).unwrap_or(u64::MAX))
}

/// Records facts inside of the open transaction.
pub(crate) fn append(db: &Connection, facts: &[NewFact]) -> Result<(), Error> {
    for new in facts {
        let data = sql::to_json("a fact", &new.fact.data()?)?;
        sql::execute(
            db,
            "INSERT INTO facts (at, project, sandbox, kind, data, kept) VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
            &[
                &new.at.0,
                &new.project.as_str(),
                &new.sandbox.as_ref().map(SandboxId::as_str),
                &new.fact.kind(),
                &data,
                &new.fact.is_decision().then_some(1),
            ],
        )?;
        instances::note(db, new)?;
    }
    Ok(())
}

fn read(row: &Row<'_>) -> rusqlite::Result<FactRow> {
    let kind: String = row.get("kind")?;
    Ok(FactRow {
        seq: row.get("seq")?,
        at: sql::time(row, "at")?,
        project: sql::word(row, "project")?,
        sandbox: sql::maybe_word(row, "sandbox")?,
        fact: Fact::from_parts(kind, sql::json(row, "data")?),
    })
}

impl SpendBy {
    /// The group of a usage fact, in SQL; `None` where sandboxes have no such group.
    const fn group_of_usage(self) -> Option<&'static str> {
        match self {
            Self::Total => Some("''"),
            Self::Day => Some("strftime('%Y-%m-%d', at / 1000, 'unixepoch')"),
            Self::Hour => Some("strftime('%Y-%m-%dT%H:00:00Z', at / 1000, 'unixepoch')"),
            Self::Sandbox => Some("coalesce(sandbox, '')"),
            Self::Model
            | Self::Provider
            | Self::Key
            | Self::Workflow
            | Self::Run
            | Self::User
            | Self::Tag => None,
        }
    }
}
