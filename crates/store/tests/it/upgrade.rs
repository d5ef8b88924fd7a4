//! Opening files: our own, older, newer, somebody else's, broken.

use atoll_store::{Error, Store};
use rusqlite::Connection;

use crate::support::{Context, T0, sandbox_id};

#[tokio::test]
async fn a_database_is_opened_again_with_all_that_was_in_it() {
    let context = Context::new().await;
    context
        .store
        .insert_sandbox(context.new_sandbox(1, T0))
        .await
        .unwrap();
    context.store.close().await;
    let store = Store::open(&context.path()).unwrap();
    assert!(
        store
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
    context.store.close().await;
    let direct = Connection::open(context.path()).unwrap();
    direct.pragma_update(None, "user_version", 999).unwrap();
    drop(direct);
    let before = std::fs::read(context.path()).unwrap();
    let error = Store::open(&context.path()).unwrap_err();
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
    assert!(matches!(Store::open(&theirs), Err(Error::Foreign { .. })));

    let garbage = directory.path().join("garbage.db");
    std::fs::write(&garbage, vec![b'x'; 10_000]).unwrap();
    assert!(matches!(Store::open(&garbage), Err(Error::Open { .. })));

    let nowhere = directory.path().join("missing/atoll.db");
    assert!(matches!(Store::open(&nowhere), Err(Error::Open { .. })));

    // An empty file, as a crash in the middle of the first start leaves it, is as good as none.
    let empty = directory.path().join("empty.db");
    std::fs::write(&empty, b"").unwrap();
    assert!(Store::open(&empty).is_ok());
}
