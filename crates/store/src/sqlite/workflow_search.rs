//! Finding workflow runs: a tree of conditions becomes one SQL statement with parameters.
//!
//! Who asks chooses the conditions and has made the rows, and few threads read for everybody. So a statement is given up
//! after [`MOST`] steps or time, or when nobody waits for it any more; a page ends where it has [`PAGE_BYTES`]; and
//! no step takes long, because search objects of more than 256 KiB are not looked into, see [`SEARCHED`].

use std::time::Duration;

use async_trait::async_trait;
use rusqlite::ToSql;
use rusqlite::types::{ToSqlOutput, Value, ValueRef};

use super::Workflows;
use super::bounded::{Bounds, Waits, bounded};
use super::workflows::read_run;
use crate::{
    Error, Place, WorkflowColumn, WorkflowField, WorkflowFilter, WorkflowPage, WorkflowRunRow,
    WorkflowSearchStore, WorkflowTest, WorkflowValue,
};

/// A plain list of a million runs takes fewer steps.
const MOST: Bounds = Bounds {
    steps: 50_000_000,
    time: Duration::from_secs(3),
};
/// What is read of the rows of one page.
const PAGE_BYTES: usize = 16 * 1024 * 1024;

impl WorkflowColumn {
    fn sql(self) -> &'static str {
        match self {
            Self::WorkflowId => "workflow_id",
            Self::RunId => "run_id",
            Self::WorkflowType => "workflow_type",
            Self::StartedAt => "started_at",
            Self::ExecutionAt => "execution_at",
            Self::ClosedAt => "closed_at",
            Self::Status => "status",
            Self::TaskQueue => "task_queue",
            // Known once the run has ended, as with those who thought of it.
            Self::HistoryLength => "CASE WHEN closed_at IS NULL THEN NULL ELSE history_length END",
            Self::HistoryBytes => "CASE WHEN closed_at IS NULL THEN NULL ELSE history_bytes END",
            Self::Transitions => "CASE WHEN closed_at IS NULL THEN NULL ELSE transitions END",
            Self::Duration => "(closed_at - execution_at)",
            Self::ParentId => "parent_id",
            Self::ParentRunId => "parent_run_id",
            Self::RootId => "root_id",
            Self::RootRunId => "root_run_id",
        }
    }
}

impl ToSql for WorkflowValue {
    fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
        Ok(match self {
            Self::Text(text) => ToSqlOutput::Borrowed(ValueRef::Text(text.as_bytes())),
            Self::Int(value) => ToSqlOutput::Owned(Value::Integer(*value)),
            Self::Float(value) => ToSqlOutput::Owned(Value::Real(*value)),
            Self::Bool(value) => ToSqlOutput::Owned(Value::Integer(i64::from(*value))),
        })
    }
}

#[async_trait]
impl WorkflowSearchStore for Workflows {
    async fn find_workflow_runs(
        &self,
        namespace: String,
        filter: WorkflowFilter,
        page: WorkflowPage,
        place: Place,
    ) -> Result<(Vec<WorkflowRunRow>, bool), Error> {
        let waits = Waits::default();
        let _waiter = waits.waiter();
        self.file.read("list workflows", move |db| {
            let _place = place;
            let mut query = Query::new(&namespace);
            let condition = query.condition(&filter);
            let mut order: Vec<String> = page
                .order
                .iter()
                .map(|(field, descending)| {
                    format!("{}{}", query.field(field), if *descending { " DESC" } else { "" })
                })
                .collect();
            if order.is_empty() {
                order.push("COALESCE(closed_at, 9223372036854775807) DESC, started_at DESC".to_owned());
            }
            let text = format!(
                "SELECT * FROM workflow_runs WHERE namespace = ?1 AND {condition} ORDER BY {}, run_id LIMIT {} OFFSET {}",
                order.join(", "),
                i64::try_from(page.limit).unwrap_or(i64::MAX).saturating_add(1),
                i64::try_from(page.offset).unwrap_or(i64::MAX)
            );
            bounded(db, "list workflows", MOST, &waits, |db| {
                let mut statement = db.prepare(&text)?;
                let rows = statement.query_map(query.values().as_slice(), read_run)?;
                let (mut found, mut bytes) = (Vec::new(), 0);
                for row in rows {
                    if found.len() >= page.limit || bytes > PAGE_BYTES {
                        return Ok((found, true));
                    }
                    let row = row?;
                    bytes += row.state.len() + row.search.len();
                    found.push(row);
                }
                Ok((found, false))
            })
        })
        .await
    }

    async fn count_workflow_runs(
        &self,
        namespace: String,
        filter: WorkflowFilter,
        place: Place,
    ) -> Result<Vec<(i32, i64)>, Error> {
        let waits = Waits::default();
        let _waiter = waits.waiter();
        self.file.read("count workflows", move |db| {
            let _place = place;
            let mut query = Query::new(&namespace);
            let condition = query.condition(&filter);
            let text = format!(
                "SELECT status, COUNT(*) FROM workflow_runs WHERE namespace = ?1 AND {condition} GROUP BY status \
                 ORDER BY status"
            );
            bounded(db, "count workflows", MOST, &waits, |db| {
                let mut statement = db.prepare(&text)?;
                let rows =
                    statement.query_map(query.values().as_slice(), |row| Ok((row.get(0)?, row.get(1)?)))?;
                Ok(rows.collect::<rusqlite::Result<_>>()?)
            })
        })
        .await
    }
}

/// The search object of a row, unless it is too large to look into: whoever writes them allows less, but did not always.
const SEARCHED: &str = "CASE WHEN octet_length(search) <= 262144 THEN search END";

/// A statement in the making. Everything that came from outside is a parameter.
struct Query {
    values: Vec<WorkflowValue>,
}

impl Query {
    fn new(namespace: &str) -> Self {
        Self {
            values: vec![WorkflowValue::Text(namespace.to_owned())],
        }
    }

    fn values(&self) -> Vec<&dyn ToSql> {
        self.values.iter().map(|value| value as &dyn ToSql).collect()
    }

    fn bind(&mut self, value: WorkflowValue) -> String {
        self.values.push(value);
        format!("?{}", self.values.len())
    }

    fn field(&mut self, field: &WorkflowField) -> String {
        match field {
            WorkflowField::Column(column) => format!("({})", column.sql()),
            WorkflowField::Attribute(name) | WorkflowField::List(name) | WorkflowField::Text(name) => {
                let path = self.path(name);
                format!("json_extract({SEARCHED}, {path})")
            }
        }
    }

    fn path(&mut self, name: &str) -> String {
        self.bind(WorkflowValue::Text(format!("$.\"{}\"", name.replace('"', ""))))
    }

    fn condition(&mut self, filter: &WorkflowFilter) -> String {
        match filter {
            WorkflowFilter::All(parts) if parts.is_empty() => "1".to_owned(),
            WorkflowFilter::All(parts) => self.join(parts, " AND "),
            WorkflowFilter::Any(parts) => self.join(parts, " OR "),
            WorkflowFilter::Not(part) => format!("NOT COALESCE({}, 0)", self.condition(part)),
            WorkflowFilter::Is(field @ WorkflowField::List(_), test) => self.list(field, test),
            WorkflowFilter::Is(field @ WorkflowField::Text(_), test) => self.words(field, test),
            WorkflowFilter::Is(field, test) => self.test(field, test),
        }
    }

    fn join(&mut self, parts: &[WorkflowFilter], with: &str) -> String {
        let parts: Vec<_> = parts.iter().map(|part| self.condition(part)).collect();
        format!("({})", parts.join(with))
    }

    fn test(&mut self, field: &WorkflowField, test: &WorkflowTest) -> String {
        let name = self.field(field);
        let mut compare = |operator: &str, value: &WorkflowValue| {
            let value = self.bind(value.clone());
            format!("{name} {operator} {value}")
        };
        match test {
            WorkflowTest::Equal(value) => compare("=", value),
            WorkflowTest::NotEqual(value) => compare("!=", value),
            WorkflowTest::Less(value) => compare("<", value),
            WorkflowTest::LessOrEqual(value) => compare("<=", value),
            WorkflowTest::Greater(value) => compare(">", value),
            WorkflowTest::GreaterOrEqual(value) => compare(">=", value),
            WorkflowTest::In(values) | WorkflowTest::NotIn(values) => {
                let not = if matches!(test, WorkflowTest::NotIn(_)) {
                    "NOT "
                } else {
                    ""
                };
                let values: Vec<_> = values.iter().map(|value| self.bind(value.clone())).collect();
                format!("{name} {not}IN ({})", values.join(", "))
            }
            WorkflowTest::Between(low, high) | WorkflowTest::NotBetween(low, high) => {
                let not = if matches!(test, WorkflowTest::NotBetween(..)) {
                    "NOT "
                } else {
                    ""
                };
                let (low, high) = (self.bind(low.clone()), self.bind(high.clone()));
                format!("{name} {not}BETWEEN {low} AND {high}")
            }
            WorkflowTest::StartsWith(prefix) | WorkflowTest::NotStartsWith(prefix) => {
                let operator = if matches!(test, WorkflowTest::StartsWith(_)) {
                    "="
                } else {
                    "!="
                };
                let length = prefix.chars().count();
                let prefix = self.bind(WorkflowValue::Text(prefix.clone()));
                format!("substr({name}, 1, {length}) {operator} {prefix}")
            }
            WorkflowTest::IsNull => format!("{name} IS NULL"),
            WorkflowTest::IsNotNull => format!("{name} IS NOT NULL"),
        }
    }

    fn list(&mut self, field: &WorkflowField, test: &WorkflowTest) -> String {
        let (values, not) = match test {
            WorkflowTest::Equal(value) => (vec![value.clone()], ""),
            WorkflowTest::NotEqual(value) => (vec![value.clone()], "NOT "),
            WorkflowTest::In(values) => (values.clone(), ""),
            WorkflowTest::NotIn(values) => (values.clone(), "NOT "),
            other => return self.test(field, other),
        };
        let WorkflowField::List(name) = field else {
            return "0".to_owned();
        };
        let path = self.path(name);
        let values: Vec<_> = values.into_iter().map(|value| self.bind(value)).collect();
        format!(
            "{not}EXISTS (SELECT 1 FROM json_each({SEARCHED}, {path}) WHERE json_each.value IN ({}))",
            values.join(", ")
        )
    }

    fn words(&mut self, field: &WorkflowField, test: &WorkflowTest) -> String {
        let (value, not) = match test {
            WorkflowTest::Equal(WorkflowValue::Text(value)) => (value, ""),
            WorkflowTest::NotEqual(WorkflowValue::Text(value)) => (value, "NOT "),
            other => return self.test(field, other),
        };
        let name = self.field(field);
        let words: Vec<_> = value
            .split_whitespace()
            .map(|word| {
                let word = self.bind(WorkflowValue::Text(format!(" {} ", word.to_lowercase())));
                format!("instr(' ' || lower({name}) || ' ', {word}) > 0")
            })
            .collect();
        if words.is_empty() {
            return "0".to_owned();
        }
        format!("{not}COALESCE({}, 0)", words.join(" OR "))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Instant;

    use super::*;
    use rusqlite::Connection;

    #[test]
    fn a_statement_without_an_end_is_given_up() {
        let db = Connection::open_in_memory().unwrap();
        let endless =
            "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n";
        let ask = |db: &Connection| Ok(db.query_row(endless, [], |row| row.get::<_, i64>(0))?);
        let waits = Waits::default();
        let few = Bounds {
            steps: 1_000_000,
            ..MOST
        };
        let given_up = bounded(&db, "count", few, &waits, ask).unwrap_err();
        assert!(matches!(given_up, Error::TooMuchWork { .. }), "{given_up:?}");
        // The next one starts anew.
        let ask = |db: &Connection| Ok(db.query_row("SELECT 1", [], |row| row.get::<_, i64>(0))?);
        assert_eq!(bounded(&db, "count", few, &waits, ask).unwrap(), 1);
    }

    #[test]
    fn a_statement_is_given_up_when_it_takes_too_long_or_nobody_waits() {
        let db = Connection::open_in_memory().unwrap();
        let slow = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n";
        let ask = |db: &Connection| Ok(db.query_row(slow, [], |row| row.get::<_, i64>(0))?);
        let any = Bounds {
            steps: u64::MAX,
            ..MOST
        };
        let waits = Waits::default();
        let begun = Instant::now();
        let given_up = bounded(&db, "count", any, &waits, ask).unwrap_err();
        assert!(matches!(given_up, Error::TooMuchWork { .. }), "{given_up:?}");
        assert!(begun.elapsed() < MOST.time * 3);
        drop(waits.waiter());
        let begun = Instant::now();
        bounded(&db, "count", any, &waits, ask).unwrap_err();
        assert!(begun.elapsed() < MOST.time / 2);
    }

    fn run(id: &str, search: String) -> crate::WorkflowRunWrite {
        crate::WorkflowRunWrite {
            row: WorkflowRunRow {
                run_id: id.to_owned(),
                namespace: "n".to_owned(),
                workflow_id: id.to_owned(),
                is_current: true,
                status: 1,
                workflow_type: "W".to_owned(),
                task_queue: "q".to_owned(),
                started_at: 1,
                execution_at: 1,
                closed_at: None,
                history_length: 1,
                history_bytes: 1,
                transitions: 1,
                parent: None,
                root: None,
                search,
                state: Vec::new(),
            },
            is_new: true,
            is_open: true,
            is_ready: false,
            deadline: None,
            written_at: 0,
            events: None,
        }
    }

    #[tokio::test]
    async fn what_is_too_large_is_not_looked_into_and_a_place_is_held_to_the_end() {
        let directory = tempfile::tempdir().unwrap();
        let store = crate::sqlite::open_workflows(&directory.path().join("db")).unwrap();
        let said = |words: usize| format!("{{\"Said\":\"{}\"}}", "word ".repeat(words));
        let runs = vec![run("small", said(10)), run("large", said(100_000))];
        store.write_workflow_runs(runs).await.unwrap();
        let field = WorkflowField::Text("Said".to_owned());
        let filter = WorkflowFilter::Is(field, WorkflowTest::Equal(WorkflowValue::Text("word".to_owned())));
        let page = WorkflowPage {
            limit: 10,
            ..WorkflowPage::default()
        };
        let place = Arc::new(());
        let (found, _) = store
            .find_workflow_runs(
                "n".to_owned(),
                filter.clone(),
                page.clone(),
                Box::new(Arc::clone(&place)),
            )
            .await
            .unwrap();
        let found: Vec<_> = found.iter().map(|row| row.run_id.as_str()).collect();
        assert_eq!(found, ["small"]);
        let counts = store
            .count_workflow_runs("n".to_owned(), filter, Box::new(Arc::clone(&place)))
            .await
            .unwrap();
        assert_eq!(counts, [(1, 1)]);
        // Both are there all the same.
        let all = WorkflowFilter::All(Vec::new());
        let (found, _) = store
            .find_workflow_runs("n".to_owned(), all, page, Box::new(()))
            .await
            .unwrap();
        assert_eq!(found.len(), 2);
        store.close().await;
        assert_eq!(Arc::strong_count(&place), 1);
    }
}
