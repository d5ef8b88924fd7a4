//! Long measurements that are broken off leave nothing behind.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use atoll_proof::{host, wait};
use rustix::process::Signal;

const LONG: Duration = Duration::from_secs(120);

/// The directory of the server that a bench has started, once that is up.
fn home_of(bench: &Child) -> Option<PathBuf> {
    let parent = format!("PPid:\t{}", bench.id());
    host::processes().into_iter().find_map(|(pid, line)| {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let data = line.split_once("--data ")?.1.split(' ').next()?.to_owned();
        let is_up = status.lines().any(|line| line == parent) && host::helper_of(pid).is_some();
        is_up.then(|| PathBuf::from(data).parent().map(PathBuf::from))?
    })
}

#[tokio::test]
async fn a_bench_that_is_told_to_end_ends_its_server() {
    for (what, signal) in [
        (["cycles", "--count", "1000000"], Signal::TERM),
        (["cycles", "--count", "1000000"], Signal::INT),
        (["soak", "--time", "1h"], Signal::TERM),
    ] {
        let mut bench = Command::new(atoll_proof::binary())
            .env_remove("ATOLL_URL")
            .env_remove("ATOLL_API_KEY")
            .env("ATOLL_TEMPLATES", atoll_proof::templates())
            .arg("bench")
            .args(what)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let home = wait::until_sync("its server is up", LONG, || home_of(&bench)).await;
        host::kill(bench.id(), signal);
        let status = wait::until_sync("it ends", LONG, || bench.try_wait().unwrap()).await;
        assert!(!status.success(), "{what:?}: {status}");
        let left = || host::processes_naming(&home);
        assert!(
            wait::becomes_true(LONG, || left().is_empty()),
            "{what:?}: {:?}",
            left()
        );
        assert!(!home.exists(), "{what:?}: {}", home.display());
    }
}
