//! The first thing that people run.

use std::process::Command;

/// With a data directory of its own; what it finds wrong, it says with its exit code.
#[test]
fn the_demo_runs_to_its_end() {
    let dir = tempfile::tempdir().unwrap();
    let output = Command::new(atoll_proof::binary())
        .env_remove("ATOLL_URL")
        .env_remove("ATOLL_API_KEY")
        .env("ATOLL_TEMPLATES", atoll_proof::templates())
        .arg("--data")
        .arg(dir.path())
        .arg("demo")
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}
