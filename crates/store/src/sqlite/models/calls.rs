//! The rows of model calls, and sums over them, in SQLite.

use std::collections::HashMap;

use async_trait::async_trait;
use atoll_types::{
    BudgetScope, BudgetWindow, KeyId, ModelCallId, ModelUsage, ProjectId, SandboxId, Timestamp, Usd,
};
use rusqlite::{Row, ToSql};

use super::trimmed;
use crate::sqlite::groups::Groups;
use crate::sqlite::{Models, facts, page, sql};
use crate::{Cursor, Error, ModelCallRow, ModelCallStore, NewFact, Page, SpendBy, SpendQuery, SpendRow};

impl SpendBy {
    /// What the group is, in SQL. Fixed texts: nothing of a caller's ever gets in here.
    const fn expression(self) -> &'static str {
        match self {
            Self::Total => "''",
            Self::Day => "strftime('%Y-%m-%d', created_at / 1000, 'unixepoch')",
            Self::Hour => "strftime('%Y-%m-%dT%H:00:00Z', created_at / 1000, 'unixepoch')",
            Self::Model => "model",
            Self::Provider => "provider",
            Self::Key => "coalesce(key, '')",
            Self::Sandbox => "coalesce(sandbox, '')",
            Self::Workflow => "coalesce(workflow, '')",
            Self::Run => "coalesce(run, '')",
            Self::User => "coalesce(end_user, '')",
            Self::Tag => "tag.value",
        }
    }
}

#[async_trait]
impl ModelCallStore for Models {
    async fn open_model_call(&self, call: ModelCallRow) -> Result<(), Error> {
        self.file
            .write("begin a model call", move |db| insert(db, &call))
            .await
    }

    async fn raise_model_call(&self, id: ModelCallId, reserved: Usd) -> Result<(), Error> {
        self.file
            .write("reserve more for a model call", move |db| {
                sql::execute(
                    db,
                    "UPDATE model_calls SET reserved_pico = ?2 WHERE id = ?1 AND outcome = 'open'",
                    &[&id.as_str(), &reserved.pico()],
                )?;
                Ok(())
            })
            .await
    }

    async fn close_model_call(&self, call: ModelCallRow, facts: Vec<NewFact>) -> Result<bool, Error> {
        self.file
            .write("settle a model call", move |db| {
                let closed = close(db, &call)?;
                if closed {
                    facts::append(db, &facts)?;
                }
                Ok(closed)
            })
            .await
    }

    async fn open_model_calls(&self) -> Result<Vec<ModelCallRow>, Error> {
        self.file
            .read("find model calls without an end", |db| {
                sql::rows(db, "SELECT * FROM model_calls WHERE outcome = 'open'", &[], read)
            })
            .await
    }

    async fn model_call(&self, project: &ProjectId, id: &ModelCallId) -> Result<Option<ModelCallRow>, Error> {
        let (project, id) = (project.clone(), id.clone());
        self.file
            .read("read the model call", move |db| {
                sql::row(
                    db,
                    "SELECT * FROM model_calls WHERE project = ?1 AND id = ?2",
                    &[&project.as_str(), &id.as_str()],
                    read,
                )
            })
            .await
    }

    async fn model_calls(
        &self,
        project: &ProjectId,
        sandbox: Option<&SandboxId>,
        after: Option<Cursor>,
        limit: usize,
    ) -> Result<Page<ModelCallRow>, Error> {
        let (project, sandbox) = (project.clone(), sandbox.cloned());
        let (whose, of_one) = (project.clone(), sandbox.is_some());
        let list = move |db: &rusqlite::Connection| {
            let sandbox = sandbox.as_ref().map(SandboxId::as_str);
            let mut statement = "SELECT * FROM model_calls WHERE project = ?".to_owned();
            let project = project.as_str();
            let mut parameters: Vec<&dyn ToSql> = vec![&project];
            if let Some(sandbox) = &sandbox {
                statement.push_str(" AND sandbox = ?");
                parameters.push(sandbox);
            }
            page::newest(db, statement, parameters, after.as_ref(), limit, read, |row| {
                (row.started_at, row.id.as_str())
            })
        };
        match of_one {
            false => self.file.read("list model calls", list).await,
            // Nothing leads to those of a sandbox but all calls of its project.
            true => self.file.report(&whose, "list model calls", list).await,
        }
    }

    async fn model_spent(
        &self,
        project: &ProjectId,
        scope: BudgetScope,
        subject: Option<&str>,
        window: BudgetWindow,
        from: Timestamp,
        most: usize,
    ) -> Result<Vec<(String, Usd)>, Error> {
        let (project, subject) = (project.clone(), subject.map(str::to_owned));
        let column = match scope {
            BudgetScope::Project => "project",
            BudgetScope::Key => "key",
            BudgetScope::Workflow => "workflow",
            BudgetScope::Run => "run",
            BudgetScope::Sandbox => "sandbox",
        };
        self.file
            .sum(&project.clone(), "sum what was spent", move |db| {
                // Row by row, in the order of the index: subjects are names of callers' choosing, and a sorter would hold all
                // rows of all of them.
                let mut statement = db.prepare_cached(&format!(
                    "SELECT {column}, cost_pico FROM model_calls
                     WHERE project = ?1 AND created_at >= ?2 AND outcome != 'open' AND cost_pico > 0
                         AND {column} IS NOT NULL AND (?3 IS NULL OR {column} = ?3)
                     ORDER BY created_at DESC, id DESC"
                ))?;
                let mut rows = statement.query((project.as_str(), from.0, &subject))?;
                let mut spent: HashMap<String, Usd> = HashMap::new();
                let mut add = |subject: &str, cost: i64| {
                    let has_room = spent.len() < most;
                    match spent.get_mut(subject) {
                        // What a provider claims may be so much that a sum of it does not fit.
                        Some(sum) => *sum = Usd::from_pico(sum.pico().saturating_add(cost)),
                        None if has_room => {
                            spent.insert(subject.to_owned(), Usd::from_pico(cost));
                        }
                        None => {}
                    }
                };
                while let Some(row) = rows.next()? {
                    let subject = row.get_ref(0)?.as_str().map_err(rusqlite::Error::from)?;
                    add(subject, row.get(1)?);
                }
                // Of calls that are gone, which were before all of these.
                let subject = subject.as_deref();
                for (subject, cost) in trimmed::spent(db, &project, scope, subject, window, from, most)? {
                    add(&subject, cost);
                }
                Ok(spent.into_iter().collect())
            })
            .await
    }

    async fn expire_model_calls(&self, before: Timestamp, limit: usize) -> Result<usize, Error> {
        self.file
            .write("apply retention to model calls", move |db| {
                trimmed::expire(db, before, limit)
            })
            .await
    }

    async fn model_spend(&self, query: SpendQuery) -> Result<Vec<SpendRow>, Error> {
        let project = query.project.clone();
        self.file
            .report(&project, "sum model calls", move |db| {
                let tags = if query.by == SpendBy::Tag {
                    ", json_each(tags) AS tag"
                } else {
                    ""
                };
                // In the order of the index, so that nothing is sorted, and of too many groups those are told that called last.
                let statement = format!(
                    "SELECT {} AS bucket, input, cache_read, cache_write, cache_write_1h, audio_input, output, reasoning,
                         audio_output, searches, cost_pico, price_version IS NULL AS unpriced, estimated,
                         outcome = 'failed' AS failed
                     FROM model_calls INDEXED BY model_calls_newest{tags}
                     WHERE project = ?1 AND created_at >= ?2 AND created_at < ?3 AND outcome != 'open'
                         AND (?4 IS NULL OR model = ?4) AND (?5 IS NULL OR provider = ?5)
                         AND (?6 IS NULL OR sandbox = ?6) AND (?7 IS NULL OR end_user = ?7)
                         AND (?8 IS NULL OR model_calls.key = ?8)
                     ORDER BY created_at DESC, model_calls.id DESC",
                    query.by.expression(),
                );
                let mut statement = db.prepare_cached(&statement)?;
                let mut rows = statement.query((
                    query.project.as_str(),
                    query.from.0,
                    query.to.0,
                    &query.model,
                    &query.provider,
                    query.sandbox.as_ref().map(SandboxId::as_str),
                    &query.user,
                    query.key.as_ref().map(KeyId::as_str),
                ))?;
                let mut groups = Groups::<SpendRow>::default();
                while let Some(row) = rows.next()? {
                    let bucket = row.get_ref(0)?.as_str().map_err(rusqlite::Error::from)?;
                    add(groups.of(bucket), row)?;
                }
                let named = |(group, sums)| SpendRow { group, ..sums };
                let mut rows: Vec<SpendRow> = groups.into_sums().map(named).collect();
                match query.by {
                    SpendBy::Day | SpendBy::Hour => rows.sort_by(|a, b| a.group.cmp(&b.group)),
                    _ => rows.sort_by(|a, b| (b.cost, &a.group).cmp(&(a.cost, &b.group))),
                }
                Ok(rows)
            })
            .await
    }
}

/// Adds a call to a sum. What providers claim may be so much that it does not fit.
fn add(sum: &mut SpendRow, row: &Row<'_>) -> rusqlite::Result<()> {
    let count = |column: usize| row.get::<_, i64>(column).map(i64::cast_unsigned);
    let usage = &mut sum.usage;
    let counts = [
        &mut usage.input,
        &mut usage.cache_read,
        &mut usage.cache_write,
        &mut usage.cache_write_1h,
        &mut usage.audio_input,
        &mut usage.output,
        &mut usage.reasoning,
        &mut usage.audio_output,
        &mut usage.searches,
    ];
    for (at, sum) in counts.into_iter().enumerate() {
        *sum = sum.saturating_add(count(1 + at)?);
    }
    sum.cost = Usd::from_pico(sum.cost.pico().saturating_add(row.get(10)?));
    sum.calls += 1;
    sum.unpriced += count(11)?;
    sum.estimated += count(12)?;
    sum.failed += count(13)?;
    Ok(())
}

fn insert(db: &rusqlite::Connection, call: &ModelCallRow) -> Result<(), Error> {
    let usage = &call.usage;
    sql::execute(
        db,
        "INSERT INTO model_calls (id, project, key, sandbox, workflow, run, end_user, tags, dialect, asked, provider,
             model, streamed, created_at, ended_at, outcome, attempts, first_byte_millis, finish, error, input,
             cache_read, cache_write, cache_write_1h, audio_input, output, reasoning, audio_output, searches, estimated,
             price_version, reserved_pico, cost_pico)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18, ?19, ?20, ?21, ?22,
             ?23, ?24, ?25, ?26, ?27, ?28, ?29, ?30, ?31, ?32, ?33)",
        &[
            &call.id.as_str(),
            &call.project.as_str(),
            &call.key.as_ref().map(KeyId::as_str),
            &call.sandbox.as_ref().map(SandboxId::as_str),
            &call.workflow,
            &call.run,
            &call.end_user,
            &sql::to_json("tags", &call.tags)?,
            &call.dialect,
            &call.asked,
            &call.provider,
            &call.model,
            &call.streamed,
            &call.started_at.0,
            &call.ended_at.map(|at| at.0),
            &call.outcome.name(),
            &call.attempts,
            &call.first_byte_millis.map(sql::as_count),
            &call.finish,
            &call.error,
            &sql::as_count(usage.input),
            &sql::as_count(usage.cache_read),
            &sql::as_count(usage.cache_write),
            &sql::as_count(usage.cache_write_1h),
            &sql::as_count(usage.audio_input),
            &sql::as_count(usage.output),
            &sql::as_count(usage.reasoning),
            &sql::as_count(usage.audio_output),
            &sql::as_count(usage.searches),
            &call.estimated,
            &call.price_version,
            &call.reserved.pico(),
            &call.cost.pico(),
        ],
    )?;
    Ok(())
}

fn close(db: &rusqlite::Connection, call: &ModelCallRow) -> Result<bool, Error> {
    let usage = &call.usage;
    let changed = sql::execute(
        db,
        "UPDATE model_calls SET provider = ?2, model = ?3, ended_at = ?4, outcome = ?5, attempts = ?6,
             first_byte_millis = ?7, finish = ?8, error = ?9, input = ?10, cache_read = ?11, cache_write = ?12,
             cache_write_1h = ?13, audio_input = ?14, output = ?15, reasoning = ?16, audio_output = ?17, searches = ?18,
             estimated = ?19, price_version = ?20, cost_pico = ?21
         WHERE id = ?1 AND outcome = 'open'",
        &[
            &call.id.as_str(),
            &call.provider,
            &call.model,
            &call.ended_at.map(|at| at.0),
            &call.outcome.name(),
            &call.attempts,
            &call.first_byte_millis.map(sql::as_count),
            &call.finish,
            &call.error,
            &sql::as_count(usage.input),
            &sql::as_count(usage.cache_read),
            &sql::as_count(usage.cache_write),
            &sql::as_count(usage.cache_write_1h),
            &sql::as_count(usage.audio_input),
            &sql::as_count(usage.output),
            &sql::as_count(usage.reasoning),
            &sql::as_count(usage.audio_output),
            &sql::as_count(usage.searches),
            &call.estimated,
            &call.price_version,
            &call.cost.pico(),
        ],
    )?;
    Ok(changed > 0)
}

/// A sum in two halves, in the first two columns; as much as fits.
fn read_usage(row: &Row<'_>) -> rusqlite::Result<ModelUsage> {
    Ok(ModelUsage {
        input: sql::count(row, "input")?,
        cache_read: sql::count(row, "cache_read")?,
        cache_write: sql::count(row, "cache_write")?,
        cache_write_1h: sql::count(row, "cache_write_1h")?,
        audio_input: sql::count(row, "audio_input")?,
        output: sql::count(row, "output")?,
        reasoning: sql::count(row, "reasoning")?,
        audio_output: sql::count(row, "audio_output")?,
        searches: sql::count(row, "searches")?,
    })
}

fn read(row: &Row<'_>) -> rusqlite::Result<ModelCallRow> {
    let millis: Option<i64> = row.get("first_byte_millis")?;
    Ok(ModelCallRow {
        id: sql::word(row, "id")?,
        project: sql::word(row, "project")?,
        key: sql::maybe_word(row, "key")?,
        sandbox: sql::maybe_word(row, "sandbox")?,
        workflow: row.get("workflow")?,
        run: row.get("run")?,
        end_user: row.get("end_user")?,
        tags: sql::json(row, "tags")?,
        dialect: row.get("dialect")?,
        asked: row.get("asked")?,
        provider: row.get("provider")?,
        model: row.get("model")?,
        streamed: row.get("streamed")?,
        started_at: sql::time(row, "created_at")?,
        ended_at: sql::maybe_time(row, "ended_at")?,
        outcome: sql::word(row, "outcome")?,
        attempts: row.get("attempts")?,
        first_byte_millis: millis.and_then(|millis| u64::try_from(millis).ok()),
        finish: row.get("finish")?,
        error: row.get("error")?,
        usage: read_usage(row)?,
        estimated: row.get("estimated")?,
        price_version: row.get("price_version")?,
        reserved: Usd::from_pico(row.get("reserved_pico")?),
        cost: Usd::from_pico(row.get("cost_pico")?),
    })
}
