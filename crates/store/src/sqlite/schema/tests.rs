//! How files of every age come to the shape of a new one.

use super::*;

const FILES: [Domains; 2] = [MAIN, WORKFLOWS];

fn version(db: &Connection) -> i64 {
    db.pragma_query_value(None, "user_version", |row| row.get(0))
        .unwrap()
}

/// A file as a release with so many steps left it.
fn legacy(steps: usize) -> Connection {
    let mut db = Connection::open_in_memory().unwrap();
    db.pragma_update(None, "foreign_keys", true).unwrap();
    take_legacy(&mut db, &LEGACY[..steps]).unwrap();
    db
}

fn fresh(domains: Domains) -> Connection {
    let mut db = Connection::open_in_memory().unwrap();
    db.pragma_update(None, "foreign_keys", true).unwrap();
    migrate(&mut db, domains).unwrap();
    db
}

fn checked(db: &Connection, domains: Domains) -> Result<(), Error> {
    check(Path::new("a.db"), db, domains)
}

/// Everything that statements can tell apart: tables with their columns in order, what refers to what, indexes, triggers.
fn shape(db: &Connection) -> Vec<String> {
    let mut lines = Vec::new();
    let mut collect = |sql: &str| {
        let mut statement = db.prepare(sql).unwrap();
        let width = statement.column_count();
        let mut rows = statement.query([]).unwrap();
        while let Some(row) = rows.next().unwrap() {
            let cells = (0..width).map(|i| format!("{:?}", row.get::<_, rusqlite::types::Value>(i).unwrap()));
            lines.push(cells.collect::<Vec<_>>().join(" "));
        }
    };
    collect(
        "SELECT 'table', name, wr, strict FROM pragma_table_list WHERE schema = 'main' AND name NOT LIKE 'sqlite%'",
    );
    collect(
        "SELECT 'column', t.name, c.* FROM pragma_table_list AS t, pragma_table_xinfo(t.name) AS c
         WHERE t.schema = 'main' AND t.name NOT LIKE 'sqlite%'",
    );
    collect(
        "SELECT 'reference', t.name, f.* FROM pragma_table_list AS t, pragma_foreign_key_list(t.name) AS f
         WHERE t.schema = 'main'",
    );
    collect("SELECT type, name, tbl_name, sql FROM sqlite_schema WHERE type IN ('index', 'trigger')");
    collect("SELECT 'taken', domain, step FROM migrations");
    collect("SELECT 'file', user_version FROM pragma_user_version");
    collect("SELECT 'file', application_id FROM pragma_application_id");
    lines.sort();
    lines
}

#[test]
fn a_file_of_every_release_comes_to_the_shape_of_a_new_one() {
    for domains in FILES {
        let new = shape(&fresh(domains));
        for steps in 1..=LEGACY.len() {
            let mut db = legacy(steps);
            checked(&db, domains).unwrap();
            migrate(&mut db, domains).unwrap();
            assert_eq!(shape(&db), new, "after {steps} steps");
            // Once more changes nothing.
            checked(&db, domains).unwrap();
            migrate(&mut db, domains).unwrap();
            assert_eq!(shape(&db), new);
        }
    }
}

#[test]
fn a_file_has_the_tables_of_its_own_domains_and_no_others() {
    for domains in FILES {
        let db = fresh(domains);
        for domain in EVERY {
            for table in domain.first_tables {
                let is_there = db.table_exists(None, *table).unwrap();
                assert_eq!(is_there, holds(domains, domain.name), "{table}");
            }
        }
        let mut statement = db
            .prepare("SELECT name FROM pragma_table_list WHERE schema = 'main' AND name NOT LIKE 'sqlite%'")
            .unwrap();
        let names = statement.query_map([], |row| row.get::<_, String>(0)).unwrap();
        for name in names.map(Result::unwrap).filter(|name| name != "migrations") {
            let makes = |step: &&str| step.contains(&format!("CREATE TABLE {name} ("));
            let is_made = domains.iter().any(|domain| domain.steps.iter().any(makes));
            assert!(is_made, "{name} is of no domain of the file");
        }
    }
}

#[test]
fn a_first_start_that_was_cut_short_is_finished_by_the_next() {
    for domains in FILES {
        for made in 0..=domains.len() {
            let mut db = Connection::open_in_memory().unwrap();
            part(&mut db, domains, false).unwrap();
            for domain in &domains[..made] {
                take(&mut db, domain).unwrap();
            }
            checked(&db, domains).unwrap();
            migrate(&mut db, domains).unwrap();
            assert_eq!(shape(&db), shape(&fresh(domains)));
        }
    }
}

#[test]
fn steps_are_taken_once_in_order_and_whole() {
    const FIRST: &str = "CREATE TABLE a (x); INSERT INTO a VALUES (1);";
    // The second works, the third breaks in its middle: only the third is undone.
    const SECOND: &str = "ALTER TABLE a ADD COLUMN y DEFAULT 2;";
    const BROKEN: &str = "CREATE TABLE b (x); INSERT INTO nowhere VALUES (1);";
    fn domain(steps: &'static [&'static str]) -> Domain {
        Domain {
            name: "letters",
            steps,
            first_tables: &["a"],
        }
    }
    let mut db = Connection::open_in_memory().unwrap();
    part(&mut db, &[], false).unwrap();
    let last = |db: &Connection| taken_steps(db).unwrap();
    take(&mut db, &domain(&[FIRST])).unwrap();
    assert_eq!(last(&db), [("letters".to_owned(), 1)]);
    assert!(take(&mut db, &domain(&[FIRST, SECOND, BROKEN])).is_err());
    assert_eq!(last(&db), [("letters".to_owned(), 2)]);
    assert!(!db.table_exists(None, "b").unwrap());
    take(&mut db, &domain(&[FIRST, SECOND, "CREATE TABLE b (x);"])).unwrap();
    assert_eq!(last(&db), [("letters".to_owned(), 3)]);
    let row: (i64, i64) = db
        .query_row("SELECT x, y FROM a", [], |row| Ok((row.get(0)?, row.get(1)?)))
        .unwrap();
    assert_eq!(row, (1, 2));
}

#[test]
fn a_file_under_another_ones_name_is_refused() {
    // Of an earlier release, with something in it.
    let db = legacy(LEGACY.len());
    db.execute_batch("INSERT INTO workflow_items VALUES ('namespace', '', 'default', x'00')")
        .unwrap();
    let error = checked(&db, MAIN).unwrap_err();
    assert!(
        matches!(&error, Error::Misplaced { domain, .. } if domain == "workflows"),
        "{error}"
    );
    checked(&db, WORKFLOWS).unwrap();
    assert_eq!(version(&db), 11, "looking changes nothing");

    let db = legacy(1);
    db.execute_batch("INSERT INTO projects VALUES ('prj_1', 'default', 1)")
        .unwrap();
    let error = checked(&db, WORKFLOWS).unwrap_err();
    assert!(
        matches!(&error, Error::Misplaced { domain, .. } if domain == "identity"),
        "{error}"
    );
    checked(&db, MAIN).unwrap();

    // Of this one, even empty.
    assert!(matches!(
        checked(&fresh(MAIN), WORKFLOWS),
        Err(Error::Misplaced { .. })
    ));
    assert!(matches!(
        checked(&fresh(WORKFLOWS), MAIN),
        Err(Error::Misplaced { .. })
    ));
}

#[test]
fn a_file_that_has_taken_more_steps_than_are_known_is_refused() {
    for (domain, step) in [("ledger", 99), ("clusters", 1)] {
        let db = fresh(MAIN);
        db.execute("INSERT INTO migrations VALUES (?1, ?2)", (domain, step))
            .unwrap();
        let error = checked(&db, MAIN).unwrap_err();
        assert!(
            matches!(&error, Error::Newer { part, found, .. } if part == domain && *found == step),
            "{error}"
        );
    }
    let db = fresh(MAIN);
    db.pragma_update(None, "user_version", BY_DOMAIN + 1).unwrap();
    assert!(matches!(checked(&db, MAIN), Err(Error::Newer { .. })));
}

/// What programs with the one list for all domains compare with the number of steps that they know.
#[test]
fn an_earlier_release_refuses_a_new_file() {
    for domains in FILES {
        assert!(version(&fresh(domains)) > LEGACY.len() as i64);
    }
}

/// A server that may make no file in /tmp sorts all the same.
#[test]
fn nobody_keeps_what_is_sorted_in_files() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.db");
    let writer = open_writer(&path, MAIN).unwrap();
    let reader = open_reader(&path).unwrap();
    for db in [writer, reader] {
        let store: i64 = db
            .pragma_query_value(None, "temp_store", |row| row.get(0))
            .unwrap();
        assert_eq!(store, 2, "in memory");
    }
}
