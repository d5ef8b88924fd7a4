//! Opening files: our own, older, newer, somebody else's, broken.

use std::path::Path;

use atoll_identity::Role;
use atoll_lifecycle::{Input, step};
use atoll_store::{Error, sqlite};
use atoll_types::{IdleAction, SandboxState, SaveKind, TimeoutAction, Timestamp};
use rusqlite::Connection;

use crate::support::{Context, T0, sandbox_id, snapshot_id};

/// A file as releases left it that had so many steps for all domains.
fn legacy(path: &Path, steps: usize) -> Connection {
    let all = [
        include_str!("../../src/sqlite/schema/legacy/0001-core.sql"),
        include_str!("../../src/sqlite/schema/legacy/0002-state.sql"),
        include_str!("../../src/sqlite/schema/legacy/0003-network.sql"),
        include_str!("../../src/sqlite/schema/legacy/0004-gateway.sql"),
        include_str!("../../src/sqlite/schema/legacy/0005-guards.sql"),
        include_str!("../../src/sqlite/schema/legacy/0006-bodies.sql"),
        include_str!("../../src/sqlite/schema/legacy/0007-workflows.sql"),
        include_str!("../../src/sqlite/schema/legacy/0008-identity.sql"),
        include_str!("../../src/sqlite/schema/legacy/0009-sessions.sql"),
        include_str!("../../src/sqlite/schema/legacy/0010-workflow-bytes.sql"),
        include_str!("../../src/sqlite/schema/legacy/0011-lineage.sql"),
    ];
    let db = Connection::open(path).unwrap();
    for step in &all[..steps] {
        db.execute_batch(step).unwrap();
    }
    db.pragma_update(None, "application_id", 0x4154_4f4c).unwrap();
    db.pragma_update(None, "user_version", i64::try_from(steps).unwrap())
        .unwrap();
    db
}

/// What the first release made, with two sandboxes in it.
fn first_release(path: &Path) {
    let db = legacy(path, 1);
    let spec = r#"{"template":"base","resources":{"cpu_millis":1000,"memory_bytes":1,"disk_bytes":1,
        "disk_backing":"memory","pids":8},"timeout_millis":60000,"idle":{"after_millis":5000,"action":"kill"},
        "env":{},"labels":{},"isolation_floor":null}"#;
    db.execute(
        "INSERT INTO projects VALUES (?1, 'default', 1)",
        [crate::support::project_id(1).as_str()],
    )
    .unwrap();
    for (n, state, ended_at) in [(1, "running", None), (2, "deleted", Some(9))] {
        db.execute(
            "INSERT INTO sandboxes (id, project, template, isolation, spec, state, instance, created_at, started_at,
                 ended_at, deadline, last_used_at, due_at, ending, kill_requested, version)
             VALUES (?1, ?2, 'tpl_aaaaaaaaaaaaaaaaaaaa', 'gvisor', ?3, ?4, ?5, 1, 2, ?6, 60001, 2, 5002, ?7, 0, 3)",
            rusqlite::params![
                sandbox_id(n).as_str(),
                crate::support::project_id(1).as_str(),
                spec,
                state,
                ended_at.is_none().then_some("ins_aaaaaaaaaaaaaaaaaaaa"),
                ended_at,
                ended_at.map(|_| r#"{"reason":"killed"}"#),
            ],
        )
        .unwrap();
    }
}

/// Any key of the first project could run the server; workers and agents may have been given one.
#[tokio::test]
async fn of_the_keys_of_earlier_releases_the_servers_own_alone_is_an_operators() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("atoll.db");
    first_release(&path);
    let db = Connection::open(&path).unwrap();
    let (first, other) = (crate::support::project_id(1), crate::support::project_id(2));
    db.execute("INSERT INTO projects VALUES (?1, 'other', 1)", [other.as_str()])
        .unwrap();
    for (n, project, name, revoked_at) in [
        (1, &first, "admin", Some(2)),
        (2, &first, "admin", None),
        (3, &first, "admin", None),
        (4, &first, "worker", None),
        (5, &other, "admin", None),
    ] {
        db.execute(
            "INSERT INTO keys (id, project, name, hash, prefix, created_at, revoked_at)
             VALUES (?1, ?2, ?3, ?4, 'atl_a', ?5, ?6)",
            rusqlite::params![
                atoll_types::KeyId::from_entropy([n; 20]).as_str(),
                project.as_str(),
                name,
                [n; 32],
                n,
                revoked_at,
            ],
        )
        .unwrap();
    }
    drop(db);
    let store = sqlite::open(&path).unwrap();
    let roles = [
        (2, Role::Operator),
        (3, Role::Member),
        (4, Role::Member),
        (5, Role::Member),
    ];
    for (n, role) in roles {
        let key = store.identity.find_active_key([n; 32]).await.unwrap().unwrap();
        assert_eq!(
            (key.role, key.scopes, key.expires_at),
            (role, vec![], None),
            "{n}"
        );
    }
    let revoked = store.identity.keys(&first, None, 100).await.unwrap().items;
    let revoked = revoked.iter().find(|key| key.revoked_at.is_some()).unwrap();
    assert_eq!(revoked.role, Role::Member);
}

/// Earlier releases said in labels which sandboxes belong to a workflow.
#[tokio::test]
async fn what_labels_said_of_owners_is_in_the_row() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("atoll.db");
    first_release(&path);
    let db = Connection::open(&path).unwrap();
    let label = |n: u32, key: &str, value: &str| {
        let spec = format!("$.labels.\"{key}\"");
        let id = sandbox_id(n);
        db.execute(
            "INSERT INTO labels VALUES (?1, ?2, ?3)",
            [id.as_str(), key, value],
        )
        .unwrap();
        db.execute(
            "UPDATE sandboxes SET spec = json_set(spec, ?2, ?3) WHERE id = ?1",
            [id.as_str(), &spec, value],
        )
        .unwrap();
    };
    label(1, "atoll.owner", "workflow");
    label(1, "atoll.workflow", "default:0199:order:7");
    label(1, "team", "search");
    // What nobody could read then means nothing now.
    label(2, "atoll.owner", "workflow");
    label(2, "atoll.workflow", "default");
    drop(db);
    let store = sqlite::open(&path).unwrap();
    let row = async |n| {
        store
            .sandboxes
            .sandbox_of_any_project(&sandbox_id(n))
            .await
            .unwrap()
            .unwrap()
    };
    let one = row(1).await;
    let owner = one.spec.owner.clone().unwrap();
    assert_eq!(owner.to_string(), "workflow:default:0199:order:7");
    assert_eq!(one.spec.labels, [("team".to_owned(), "search".to_owned())].into());
    for (asked, found) in [
        ("workflow", 1),
        ("workflow:default:0199:order:7", 1),
        ("workflow:default:0199:order", 0),
        ("workflow:default:0199:order:77", 0),
        ("key", 0),
    ] {
        let query = atoll_store::SandboxQuery {
            project: crate::support::project_id(1),
            labels: vec![],
            owner: Some(asked.parse().unwrap()),
            states: vec![],
            after: None,
            limit: 10,
        };
        let page = store.sandboxes.sandboxes(query).await.unwrap();
        assert_eq!(page.items.len(), found, "{asked}");
    }
    assert_eq!(row(2).await.spec.owner, None);
    // The one that runs has an instance that has not ended.
    let instances = store
        .sandboxes
        .instances(atoll_store::InstanceQuery {
            project: crate::support::project_id(1),
            sandbox: sandbox_id(1),
            after: None,
            limit: 10,
        })
        .await
        .unwrap();
    assert_eq!(instances.items.len(), 1);
    assert_eq!(
        (instances.items[0].ended_at, instances.items[0].started_at),
        (None, Timestamp(2))
    );
}

#[tokio::test]
async fn what_the_first_release_left_goes_on() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("atoll.db");
    first_release(&path);
    let store = sqlite::open(&path).unwrap();
    let live = store.sandboxes.live_sandboxes().await.unwrap();
    assert_eq!(live.len(), 1);
    let row = live[0].clone();
    assert_eq!(row.record.state, SandboxState::Running);
    assert_eq!(row.record.policy.on_timeout, TimeoutAction::Kill);
    assert_eq!(row.record.policy.idle.unwrap().action, IdleAction::Kill);
    assert_eq!(
        (row.record.saved.as_ref(), row.record.saving.as_ref()),
        (None, None)
    );
    assert_eq!(store.sandboxes.next_due().await.unwrap(), Some(Timestamp(5002)));
    assert!(store.saved.all_snapshot_ids().await.unwrap().is_empty());

    // It can do what is new.
    let (snapshot, kind) = (snapshot_id(1), SaveKind::Memory);
    let pausing = step(&row.record, Input::Pause { snapshot, kind }, Timestamp(3)).unwrap();
    let row = atoll_store::SandboxRow {
        record: pausing.next,
        ..row
    };
    let row = store.sandboxes.update_sandbox(row, vec![]).await.unwrap();
    let read = store.sandboxes.sandbox_of_any_project(&row.id).await.unwrap();
    assert_eq!(read, Some(row));

    // Opening it once more changes nothing.
    store.database.close().await;
    let again = sqlite::open(&path).unwrap();
    assert_eq!(again.sandboxes.live_sandboxes().await.unwrap().len(), 1);
}

#[tokio::test]
async fn a_database_is_opened_again_with_all_that_was_in_it() {
    let context = Context::new().await;
    context
        .store
        .sandboxes
        .insert_sandbox(context.new_sandbox(1, T0))
        .await
        .unwrap();
    context.store.database.close().await;
    let store = sqlite::open(&context.path()).unwrap();
    assert!(
        store
            .sandboxes
            .sandbox_of_any_project(&sandbox_id(1))
            .await
            .unwrap()
            .is_some()
    );
    let direct = Connection::open(context.path()).unwrap();
    let mode: String = direct
        .pragma_query_value(None, "journal_mode", |row| row.get(0))
        .unwrap();
    assert_eq!(mode, "wal");
}

#[tokio::test]
async fn a_newer_database_is_refused_and_left_alone() {
    let context = Context::new().await;
    context.store.database.close().await;
    let direct = Connection::open(context.path()).unwrap();
    direct.pragma_update(None, "user_version", 999).unwrap();
    drop(direct);
    let before = std::fs::read(context.path()).unwrap();
    let error = sqlite::open(&context.path()).unwrap_err();
    assert!(matches!(error, Error::Newer { found: 999, .. }));
    assert!(error.to_string().contains("newer Atoll"), "{error}");
    assert_eq!(std::fs::read(context.path()).unwrap(), before);
}

#[tokio::test]
async fn what_is_not_ours_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let theirs = directory.path().join("theirs.db");
    Connection::open(&theirs)
        .unwrap()
        .execute_batch("CREATE TABLE t (x)")
        .unwrap();
    assert!(matches!(sqlite::open(&theirs), Err(Error::Foreign { .. })));

    let garbage = directory.path().join("garbage.db");
    std::fs::write(&garbage, vec![b'x'; 10_000]).unwrap();
    assert!(matches!(sqlite::open(&garbage), Err(Error::Open { .. })));

    let nowhere = directory.path().join("missing/atoll.db");
    assert!(matches!(sqlite::open(&nowhere), Err(Error::Open { .. })));

    // An empty file, as a crash in the middle of the first start leaves it, is as good as none.
    let empty = directory.path().join("empty.db");
    std::fs::write(&empty, b"").unwrap();
    assert!(sqlite::open(&empty).is_ok());
}

/// Workflows that were there before anybody counted what they keep.
#[tokio::test]
async fn what_workflows_keep_is_counted_once_for_those_that_were_there() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("workflows.db");
    {
        let db = legacy(&path, 7);
        db.execute_batch(
            "INSERT INTO workflow_runs (run_id, namespace, workflow_id, is_current, status, workflow_type, task_queue,
                 started_at, execution_at, history_length, history_bytes, transitions, search, is_open, is_ready, state)
             VALUES ('r1', 'one', 'a', 1, 1, 'W', 'q', 1, 1, 1, 1, 1, '{\"ä\":1}', 1, 0, zeroblob(1000)),
                    ('r2', 'one', 'b', 1, 1, 'W', 'q', 1, 1, 1, 1, 1, '{}', 1, 0, zeroblob(10)),
                    ('r3', 'two', 'a', 1, 1, 'W', 'q', 1, 1, 1, 1, 1, '{}', 1, 0, zeroblob(10));
             INSERT INTO workflow_events VALUES ('r1', 1, zeroblob(5000)), ('r1', 2, zeroblob(50)), ('r3', 1, x'00');",
        )
        .unwrap();
    }
    let store = sqlite::open_workflows(&path).unwrap();
    let run = |rest: i64| 2048 + rest;
    let one = run(1000 + 8) + 64 + 5000 + 64 + 50 + run(10 + 2);
    let mut counted = store.workflow_bytes().await.unwrap();
    counted.sort();
    let two = run(10 + 2) + 64 + 1;
    assert_eq!(counted, [("one".to_owned(), one), ("two".to_owned(), two)]);

    // What is deleted frees what was counted for it, and nothing is left in the end.
    let freed = store.delete_workflow_run("r1".to_owned()).await.unwrap();
    assert_eq!(freed, Some(one - run(10 + 2)));
    assert_eq!(store.delete_workflow_run("r1".to_owned()).await.unwrap(), None);
    let (runs, freed) = store.delete_workflow_runs("one".to_owned(), 10).await.unwrap();
    assert_eq!((runs, freed), (1, run(10 + 2)));
    let left = store.workflow_bytes().await.unwrap();
    assert!(left.contains(&("one".to_owned(), 0)), "{left:?}");
    store
        .delete_workflow_namespace("namespace", "one".to_owned())
        .await
        .unwrap();
    assert_eq!(store.workflow_bytes().await.unwrap(), [("two".to_owned(), two)]);
    store.close().await;
}

/// Every row of every table, as text.
fn rows(db: &Connection, tables: &[&str]) -> Vec<String> {
    let mut all = Vec::new();
    for table in tables {
        let mut statement = db.prepare(&format!("SELECT * FROM {table}")).unwrap();
        let columns: Vec<String> = statement.column_names().into_iter().map(str::to_owned).collect();
        let mut rows = statement.query([]).unwrap();
        while let Some(row) = rows.next().unwrap() {
            let cells = columns.iter().map(|name| {
                let value: rusqlite::types::Value = row.get(name.as_str()).unwrap();
                format!("{name}={value:?}")
            });
            all.push(format!("{table} {}", cells.collect::<Vec<_>>().join(" ")));
        }
    }
    all.sort();
    all
}

const IN_MAIN: [&str; 20] = [
    "projects",
    "keys",
    "sessions",
    "sandboxes",
    "labels",
    "artifacts",
    "secrets",
    "network_usage",
    "snapshots",
    "volumes",
    "attachments",
    "model_providers",
    "model_routes",
    "model_prices",
    "model_keys",
    "model_budgets",
    "model_calls",
    "model_guards",
    "model_bodies",
    "facts",
];
/// What came with the count of bytes.
const SIZES: [&str; 4] = [
    "kept_sizes",
    "ledger_sizes",
    "model_spent_trimmed",
    "usage_trimmed",
];
const IN_WORKFLOWS: [&str; 4] = [
    "workflow_runs",
    "workflow_events",
    "workflow_items",
    "workflow_bytes",
];

/// Puts a row into every one of these tables, with something in every column.
fn fill(db: &Connection, tables: &[&str]) {
    db.pragma_update(None, "foreign_keys", false).unwrap();
    for table in tables {
        let mut statement = db
            .prepare("SELECT name, type FROM pragma_table_info(?1)")
            .unwrap();
        let columns: Vec<(String, String)> = statement
            .query_map([table], |row| Ok((row.get(0)?, row.get(1)?)))
            .unwrap()
            .collect::<Result<_, _>>()
            .unwrap();
        let names: Vec<_> = columns.iter().map(|(name, _)| name.as_str()).collect();
        let values: Vec<_> = columns
            .iter()
            .map(|(name, kind)| match kind.as_str() {
                "INTEGER" => "7".to_owned(),
                "BLOB" => "x'0707'".to_owned(),
                _ => format!("'{name} of {table}'"),
            })
            .collect();
        let insert = format!(
            "INSERT INTO {table} ({}) VALUES ({})",
            names.join(", "),
            values.join(", ")
        );
        db.execute(&insert, []).unwrap();
    }
}

fn tables(db: &Connection) -> Vec<String> {
    let mut statement = db
        .prepare(
            "SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite%' ORDER BY name",
        )
        .unwrap();
    let names = statement.query_map([], |row| row.get(0)).unwrap();
    names.collect::<Result<_, _>>().unwrap()
}

/// Every row is as it was; columns that came since are empty.
fn assert_kept(now: &[String], then: &[String]) {
    assert_eq!(now.len(), then.len());
    for (now, then) in now.iter().zip(then) {
        let more = now
            .strip_prefix(then.as_str())
            .unwrap_or_else(|| panic!("{then} is {now}"));
        assert!(
            more.split_whitespace().all(|cell| cell.ends_with("=Null")),
            "{now}"
        );
    }
}

/// The files of the last release that had one list of steps, with something in every table that each of them used.
#[tokio::test]
async fn both_files_of_the_last_release_keep_every_row_and_lose_the_tables_that_were_not_theirs() {
    let directory = tempfile::tempdir().unwrap();
    let (main, workflows) = (
        directory.path().join("atoll.db"),
        directory.path().join("workflows.db"),
    );
    let db = legacy(&main, 11);
    fill(&db, &IN_MAIN);
    let main_rows = rows(&db, &IN_MAIN);
    drop(db);
    let db = legacy(&workflows, 11);
    fill(&db, &IN_WORKFLOWS);
    let workflow_rows = rows(&db, &IN_WORKFLOWS);
    drop(db);

    // A file under the other's name is refused before anything is changed.
    let before = [std::fs::read(&main).unwrap(), std::fs::read(&workflows).unwrap()];
    let refused = sqlite::open(&workflows).unwrap_err();
    assert!(matches!(refused, Error::Misplaced { .. }), "{refused}");
    let refused = sqlite::open_workflows(&main).unwrap_err();
    assert!(matches!(refused, Error::Misplaced { .. }), "{refused}");
    assert_eq!(
        before,
        [std::fs::read(&main).unwrap(), std::fs::read(&workflows).unwrap()]
    );

    // The second time there is nothing left to do.
    for _ in 0..2 {
        sqlite::open(&main).unwrap().database.close().await;
        sqlite::open_workflows(&workflows).unwrap().close().await;
        let db = Connection::open(&main).unwrap();
        assert_kept(&rows(&db, &IN_MAIN), &main_rows);
        let mut kept = [
            &IN_MAIN[..],
            &["fact_retention", "instances", "migrations"],
            &SIZES,
        ]
        .concat();
        kept.sort_unstable();
        assert_eq!(tables(&db), kept);
        let db = Connection::open(&workflows).unwrap();
        assert_kept(&rows(&db, &IN_WORKFLOWS), &workflow_rows);
        let mut kept = [&IN_WORKFLOWS[..], &["migrations"]].concat();
        kept.sort_unstable();
        assert_eq!(tables(&db), kept);
    }
}
