//! Runs of workflows and what belongs to namespaces, in SQLite.

use async_trait::async_trait;
use rusqlite::{Connection, Row, ToSql};

use super::{Workflows, sql};
use crate::{
    Error, OpenWorkflowRun, WorkflowItem, WorkflowItemStore, WorkflowRunRow, WorkflowRunStore,
    WorkflowRunWrite,
};

/// How much history one commit deletes, and one run more.
const DELETED_AT_ONCE: i64 = 16 * 1024 * 1024;
/// What a run costs beside its state and what it is searched by, about; and a batch of events. Databases are counted with
/// these numbers: others need a migration that counts anew.
const RUN: i64 = 2048;
const BATCH: i64 = 64;
/// What a page of items holds, about.
const ITEMS_BYTES: usize = 4 * 1024 * 1024;

#[async_trait]
impl WorkflowRunStore for Workflows {
    async fn write_workflow_runs(&self, runs: Vec<WorkflowRunWrite>) -> Result<i64, Error> {
        self.file
            .write("save the workflow", move |db| {
                let mut grown = 0;
                for run in &runs {
                    grown += write_run(db, run)?;
                }
                Ok(grown)
            })
            .await
    }

    async fn workflow_bytes(&self) -> Result<Vec<(String, i64)>, Error> {
        self.file
            .read("count what workflows keep", |db| {
                sql::rows(db, "SELECT namespace, bytes FROM workflow_bytes", &[], |row| {
                    Ok((row.get(0)?, row.get(1)?))
                })
            })
            .await
    }

    async fn workflow_run(&self, run_id: String) -> Result<Option<WorkflowRunRow>, Error> {
        self.file
            .read("read the workflow", move |db| {
                sql::row(
                    db,
                    "SELECT * FROM workflow_runs WHERE run_id = ?1",
                    &[&run_id],
                    read_run,
                )
            })
            .await
    }

    async fn current_workflow_run(
        &self,
        namespace: String,
        workflow_id: String,
    ) -> Result<Option<WorkflowRunRow>, Error> {
        self.file.read("find the workflow", move |db| {
            sql::row(
                db,
                "SELECT * FROM workflow_runs WHERE namespace = ?1 AND workflow_id = ?2 AND is_current = 1",
                &[&namespace, &workflow_id],
                read_run,
            )
        })
        .await
    }

    async fn workflow_events(&self, run_id: String) -> Result<Vec<Vec<u8>>, Error> {
        self.file
            .read("read the history", move |db| {
                sql::rows(
                    db,
                    "SELECT body FROM workflow_events WHERE run_id = ?1 ORDER BY first_id",
                    &[&run_id],
                    |row| row.get(0),
                )
            })
            .await
    }

    async fn open_workflow_runs(&self) -> Result<Vec<OpenWorkflowRun>, Error> {
        self.file
            .read("find open workflows", |db| {
                sql::rows(
                    db,
                    "SELECT namespace, workflow_id, run_id, is_ready, deadline, COALESCE(written_at, 0)
                 FROM workflow_runs WHERE is_open = 1",
                    &[],
                    |row| {
                        Ok(OpenWorkflowRun {
                            namespace: row.get(0)?,
                            workflow_id: row.get(1)?,
                            run_id: row.get(2)?,
                            is_ready: row.get(3)?,
                            deadline: row.get(4)?,
                            written_at: row.get(5)?,
                        })
                    },
                )
            })
            .await
    }

    async fn has_open_workflow_runs(&self, namespace: String) -> Result<bool, Error> {
        self.file
            .read("find open workflows", move |db| {
                let found = sql::row(
                    db,
                    "SELECT 1 FROM workflow_runs WHERE is_open = 1 AND namespace = ?1 LIMIT 1",
                    &[&namespace],
                    |row| row.get::<_, i64>(0),
                )?;
                Ok(found.is_some())
            })
            .await
    }

    async fn expired_workflow_runs(
        &self,
        namespace: String,
        closed_before: i64,
        limit: usize,
    ) -> Result<Vec<(String, String)>, Error> {
        self.file.read("find expired workflows", move |db| {
            sql::rows(
                db,
                "SELECT workflow_id, run_id FROM workflow_runs
                 WHERE namespace = ?1 AND is_open = 0 AND COALESCE(closed_at, 9223372036854775807) < ?2 LIMIT ?3",
                &[&namespace, &closed_before, &sql::as_limit(limit)],
                |row| Ok((row.get(0)?, row.get(1)?)),
            )
        })
        .await
    }

    async fn delete_workflow_run(&self, run_id: String) -> Result<Option<i64>, Error> {
        self.file
            .write("delete the workflow", move |db| delete_run(db, &run_id))
            .await
    }

    async fn workflow_namespaces(&self) -> Result<Vec<String>, Error> {
        self.file
            .read("find the namespaces of workflows", |db| {
                // From one name to the next along the index, however many runs each has.
                sql::rows(
                    db,
                    "WITH RECURSIVE used (name) AS (
                     SELECT min(namespace) FROM workflow_runs
                     UNION ALL
                     SELECT (SELECT min(namespace) FROM workflow_runs WHERE namespace > used.name)
                     FROM used WHERE used.name IS NOT NULL
                 )
                 SELECT name FROM used WHERE name IS NOT NULL
                 UNION
                 SELECT namespace FROM workflow_items WHERE namespace <> ''",
                    &[],
                    |row| row.get(0),
                )
            })
            .await
    }

    async fn delete_workflow_runs(&self, namespace: String, limit: usize) -> Result<(usize, i64), Error> {
        self.file
            .write("delete workflows", move |db| {
                let some: Vec<(String, i64)> = sql::rows(
                    db,
                    "SELECT run_id, history_bytes FROM workflow_runs WHERE namespace = ?1 LIMIT ?2",
                    &[&namespace, &sql::as_limit(limit)],
                    |row| Ok((row.get(0)?, row.get(1)?)),
                )?;
                let (mut count, mut bytes, mut freed) = (0, 0_i64, 0);
                for (run_id, history_bytes) in &some {
                    freed += delete_run(db, run_id)?.unwrap_or(0);
                    count += 1;
                    bytes = bytes.saturating_add(*history_bytes);
                    if bytes > DELETED_AT_ONCE {
                        break;
                    }
                }
                Ok((count, freed))
            })
            .await
    }

    async fn delete_workflow_namespace(&self, kind: &'static str, namespace: String) -> Result<(), Error> {
        self.file
            .write("delete the namespace", move |db| {
                sql::execute(
                    db,
                    "DELETE FROM workflow_events
                 WHERE run_id IN (SELECT run_id FROM workflow_runs WHERE namespace = ?1)",
                    &[&namespace],
                )?;
                sql::execute(
                    db,
                    "DELETE FROM workflow_runs WHERE namespace = ?1",
                    &[&namespace],
                )?;
                sql::execute(
                    db,
                    "DELETE FROM workflow_bytes WHERE namespace = ?1",
                    &[&namespace],
                )?;
                sql::execute(
                    db,
                    "DELETE FROM workflow_items WHERE namespace = ?1",
                    &[&namespace],
                )?;
                sql::execute(
                    db,
                    "DELETE FROM workflow_items WHERE kind = ?1 AND namespace = '' AND id = ?2",
                    &[&kind, &namespace],
                )?;
                Ok(())
            })
            .await
    }
}

#[async_trait]
impl WorkflowItemStore for Workflows {
    async fn add_workflow_item(&self, kind: &'static str, item: WorkflowItem) -> Result<bool, Error> {
        self.file
            .write("add the item", move |db| {
                let added = sql::execute(
                    db,
                    "INSERT INTO workflow_items (kind, namespace, id, body) VALUES (?1, ?2, ?3, ?4)
                 ON CONFLICT DO NOTHING",
                    &[&kind, &item.namespace, &item.id, &item.body],
                )?;
                Ok(added > 0)
            })
            .await
    }

    async fn put_workflow_item(&self, kind: &'static str, item: WorkflowItem) -> Result<(), Error> {
        self.file
            .write("save the item", move |db| {
                sql::execute(
                    db,
                    "INSERT INTO workflow_items (kind, namespace, id, body) VALUES (?1, ?2, ?3, ?4)
                 ON CONFLICT DO UPDATE SET body = excluded.body",
                    &[&kind, &item.namespace, &item.id, &item.body],
                )?;
                Ok(())
            })
            .await
    }

    async fn delete_workflow_item(
        &self,
        kind: &'static str,
        namespace: String,
        id: String,
    ) -> Result<(), Error> {
        self.file
            .write("delete the item", move |db| {
                sql::execute(
                    db,
                    "DELETE FROM workflow_items WHERE kind = ?1 AND namespace = ?2 AND id = ?3",
                    &[&kind, &namespace, &id],
                )?;
                Ok(())
            })
            .await
    }

    async fn workflow_items_behind(
        &self,
        kind: &'static str,
        behind: Option<&WorkflowItem>,
    ) -> Result<Vec<WorkflowItem>, Error> {
        let (namespace, id) = behind.map_or((String::new(), String::new()), |item| {
            (item.namespace.clone(), item.id.clone())
        });
        self.file
            .read("read the items", move |db| {
                let mut statement = db.prepare_cached(
                    "SELECT namespace, id, body FROM workflow_items
                 WHERE kind = ?1 AND (namespace, id) > (?2, ?3) ORDER BY namespace, id",
                )?;
                let rows = statement.query_map([kind, namespace.as_str(), id.as_str()], |row| {
                    Ok(WorkflowItem {
                        namespace: row.get(0)?,
                        id: row.get(1)?,
                        body: row.get(2)?,
                    })
                })?;
                let (mut items, mut bytes) = (Vec::new(), 0);
                for item in rows {
                    let item = item?;
                    bytes += item.body.len() + item.id.len() + item.namespace.len();
                    items.push(item);
                    if bytes > ITEMS_BYTES {
                        break;
                    }
                }
                Ok(items)
            })
            .await
    }
}

/// How many bytes are free now. None: it was not there.
fn delete_run(db: &Connection, run_id: &str) -> Result<Option<i64>, Error> {
    let run = sql::row(
        db,
        "SELECT namespace, ?2 + length(state) + octet_length(search) FROM workflow_runs WHERE run_id = ?1",
        &[&run_id, &RUN],
        |row| Ok((row.get::<_, String>(0)?, row.get::<_, i64>(1)?)),
    )?;
    let events = sql::row(
        db,
        "SELECT COALESCE(sum(?2 + length(body)), 0) FROM workflow_events WHERE run_id = ?1",
        &[&run_id, &BATCH],
        |row| row.get::<_, i64>(0),
    )?;
    sql::execute(db, "DELETE FROM workflow_events WHERE run_id = ?1", &[&run_id])?;
    sql::execute(db, "DELETE FROM workflow_runs WHERE run_id = ?1", &[&run_id])?;
    let Some((namespace, bytes)) = run else {
        return Ok(None);
    };
    let freed = bytes + events.unwrap_or(0);
    count(db, &namespace, -freed)?;
    Ok(Some(freed))
}

/// Notes that a namespace keeps so many bytes more, or less.
fn count(db: &Connection, namespace: &str, bytes: i64) -> Result<(), Error> {
    sql::execute(
        db,
        "INSERT INTO workflow_bytes (namespace, bytes) VALUES (?1, ?2)
         ON CONFLICT DO UPDATE SET bytes = bytes + excluded.bytes",
        &[&namespace, &bytes],
    )?;
    Ok(())
}

/// By how many bytes what is kept has grown.
fn write_run(db: &Connection, run: &WorkflowRunWrite) -> Result<i64, Error> {
    let row = &run.row;
    let split = |pair: &Option<(String, String)>| match pair {
        Some((id, run_id)) => (Some(id.clone()), Some(run_id.clone())),
        None => (None, None),
    };
    let size = |bytes: usize| i64::try_from(bytes).unwrap_or(i64::MAX);
    let mut grown = RUN + size(row.state.len()) + size(row.search.len());
    if run.is_new {
        let (parent_id, parent_run_id) = split(&row.parent);
        let (root_id, root_run_id) = split(&row.root);
        let values: [&dyn ToSql; 23] = [
            &row.run_id,
            &row.namespace,
            &row.workflow_id,
            &row.is_current,
            &row.status,
            &row.workflow_type,
            &row.task_queue,
            &row.started_at,
            &row.execution_at,
            &row.closed_at,
            &row.history_length,
            &row.history_bytes,
            &row.transitions,
            &parent_id,
            &parent_run_id,
            &root_id,
            &root_run_id,
            &row.search,
            &run.is_open,
            &run.is_ready,
            &run.deadline,
            &row.state,
            &run.written_at,
        ];
        sql::execute(
            db,
            "INSERT INTO workflow_runs (run_id, namespace, workflow_id, is_current, status, workflow_type, task_queue,
                started_at, execution_at, closed_at, history_length, history_bytes, transitions, parent_id,
                parent_run_id, root_id, root_run_id, search, is_open, is_ready, deadline, state,
                written_at)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18, ?19, ?20, ?21, ?22,
                ?23)",
            &values,
        )?;
    } else {
        let before = sql::row(
            db,
            "SELECT ?2 + length(state) + octet_length(search) FROM workflow_runs WHERE run_id = ?1",
            &[&row.run_id, &RUN],
            |row| row.get::<_, i64>(0),
        )?;
        grown -= before.unwrap_or(0);
        let changed = sql::execute(
            db,
            "UPDATE workflow_runs SET is_current = ?2, status = ?3, execution_at = ?4, closed_at = ?5,
                history_length = ?6, history_bytes = ?7, transitions = ?8, search = ?9, is_open = ?10, is_ready = ?11,
                deadline = ?12, state = ?13, written_at = ?14
             WHERE run_id = ?1",
            &[
                &row.run_id,
                &row.is_current,
                &row.status,
                &row.execution_at,
                &row.closed_at,
                &row.history_length,
                &row.history_bytes,
                &row.transitions,
                &row.search,
                &run.is_open,
                &run.is_ready,
                &run.deadline,
                &row.state,
                &run.written_at,
            ],
        )?;
        if changed == 0 {
            return Err(Error::NotFound {
                what: "workflow run",
                id: row.run_id.clone(),
            });
        }
    }
    if let Some((first_id, body)) = &run.events {
        sql::execute(
            db,
            "INSERT INTO workflow_events (run_id, first_id, body) VALUES (?1, ?2, ?3)",
            &[&row.run_id, first_id, body],
        )?;
        grown += BATCH + size(body.len());
    }
    count(db, &row.namespace, grown)?;
    Ok(grown)
}

pub(crate) fn read_run(row: &Row<'_>) -> rusqlite::Result<WorkflowRunRow> {
    let pair = |id: Option<String>, run: Option<String>| Some((id?, run?));
    Ok(WorkflowRunRow {
        run_id: row.get("run_id")?,
        namespace: row.get("namespace")?,
        workflow_id: row.get("workflow_id")?,
        is_current: row.get("is_current")?,
        status: row.get("status")?,
        workflow_type: row.get("workflow_type")?,
        task_queue: row.get("task_queue")?,
        started_at: row.get("started_at")?,
        execution_at: row.get("execution_at")?,
        closed_at: row.get("closed_at")?,
        history_length: row.get("history_length")?,
        history_bytes: row.get("history_bytes")?,
        transitions: row.get("transitions")?,
        parent: pair(row.get("parent_id")?, row.get("parent_run_id")?),
        root: pair(row.get("root_id")?, row.get("root_run_id")?),
        search: row.get("search")?,
        state: row.get("state")?,
    })
}
