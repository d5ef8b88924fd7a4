//! The versions of E2B's SDKs that people come with and cannot choose, and the frameworks that pin them, connected as
//! `atoll e2b env` says and in no other way.
//!
//! `ATOLL_TEST_E2B_VERSION_PYTHONS` and `ATOLL_TEST_E2B_VERSION_NODES` name them: two in every run, all of the matrix in
//! COMPATIBILITY.md in `./test --long`, which also names the frameworks (`ATOLL_TEST_E2B_CREWAI` and so on).

use std::path::{Path, PathBuf};
use std::process::Command as Blocking;

use atoll_proof::{Server, Value, on_every_tier, printed};
use tokio::process::Command;

use crate::e2b::{finished, installed, script};

on_every_tier!(with atoll_proof::Options::default().own_templates().args(&["--e2b"]);
    every_version_works_by_the_domain_alone,
    versions_that_know_addresses_work_by_them,
    frameworks_work_with_the_versions_that_they_pin,
);

/// What makes names below `localhost` this machine, where glibc does not.
fn preload(dir: &Path) -> PathBuf {
    let library = dir.join("localhost.so");
    let mut compiler = Blocking::new("cc");
    compiler
        .args(["-shared", "-fPIC", "-o"])
        .arg(&library)
        .arg(script("localhost.c"));
    let output = compiler.output().expect("a C compiler runs: Rust needs one, too");
    assert!(output.status.success(), "{output:?}");
    library
}

/// What a shell has taken in of `atoll e2b env`.
fn connected(server: &Server, dir: &Path, preload: Option<&Path>) -> Vec<(String, String)> {
    let mut told = server.cli();
    told.args(["e2b", "env", "--json"])
        .env("XDG_CACHE_HOME", dir)
        .env("ATOLL_DATA", server.data());
    if let Some(library) = preload {
        told.env("LD_PRELOAD", library);
    }
    let told: Value =
        serde_json::from_str(&printed(&told.output().expect("the program runs"))).expect("JSON");
    let told = told.as_object().expect("an object").iter();
    let mut variables: Vec<(String, String)> = told
        .filter_map(|(name, value)| Some((name.clone(), value.as_str()?.to_owned())))
        .collect();
    if let Some(library) = preload {
        variables.push(("LD_PRELOAD".into(), library.to_str().expect("a path").into()));
    }
    variables
}

async fn run(server: &Server, mut command: Command, variables: &[(String, String)]) {
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("E2B_") {
            command.env_remove(name);
        }
    }
    command
        .envs(variables.iter().cloned())
        .env("ATOLL_TIER", server.tier.name());
    finished(command).await;
}

fn python(interpreter: &Path, name: &str) -> Command {
    let mut command = Command::new(interpreter);
    command.arg(script(name));
    command
}

fn node(directory: &Path) -> Command {
    let mut command = Command::new("node");
    command.arg(script("through_e2b_versions.mjs")).arg(directory);
    command
}

async fn every_version_works_by_the_domain_alone(server: &Server) {
    let dir = tempfile::tempdir().expect("a directory");
    let variables = connected(server, dir.path(), Some(&preload(dir.path())));
    let mut names: Vec<&str> = variables.iter().map(|(name, _)| name.as_str()).collect();
    names.sort_unstable();
    let expected = [
        "E2B_API_KEY",
        "E2B_DOMAIN",
        "LD_PRELOAD",
        "NODE_EXTRA_CA_CERTS",
        "SSL_CERT_FILE",
    ];
    assert_eq!(names, expected, "nothing else is needed");
    for interpreter in installed("ATOLL_TEST_E2B_VERSION_PYTHONS") {
        run(
            server,
            python(&interpreter, "through_e2b_versions.py"),
            &variables,
        )
        .await;
    }
    for directory in installed("ATOLL_TEST_E2B_VERSION_NODES") {
        run(server, node(&directory), &variables).await;
    }
}

/// Where names do not resolve, and with the slash that people put behind an address.
async fn versions_that_know_addresses_work_by_them(server: &Server) {
    let dir = tempfile::tempdir().expect("a directory");
    let mut variables = connected(server, dir.path(), None);
    if !variables.iter().any(|(name, _)| name == "E2B_API_URL") {
        // Names below `localhost` resolve on this machine, so nobody needs addresses.
        let url = server.client().url();
        variables.extend(["E2B_API_URL", "E2B_SANDBOX_URL"].map(|name| (name.to_owned(), url.to_owned())));
    }
    for (name, value) in &mut variables {
        if name.ends_with("_URL") {
            value.push('/');
        }
    }
    let knows = |path: &PathBuf, least: [u32; 2]| version(path).is_none_or(|version| version >= least);
    for interpreter in installed("ATOLL_TEST_E2B_VERSION_PYTHONS") {
        if knows(&interpreter, [2, 7]) {
            run(
                server,
                python(&interpreter, "through_e2b_versions.py"),
                &variables,
            )
            .await;
        }
    }
    for directory in installed("ATOLL_TEST_E2B_VERSION_NODES") {
        if knows(&directory, [2, 8]) {
            run(server, node(&directory), &variables).await;
        }
    }
}

/// The version that a directory is named after; `None`: the newest.
fn version(path: &Path) -> Option<[u32; 2]> {
    let mut names = path.iter().filter_map(|name| name.to_str()?.strip_prefix("e2b-"));
    let numbers = names.next()?.rsplit('-').next()?;
    let mut numbers = numbers.split('.').map(str::parse);
    Some([numbers.next()?.ok()?, numbers.next()?.ok()?])
}

async fn frameworks_work_with_the_versions_that_they_pin(server: &Server) {
    let dir = tempfile::tempdir().expect("a directory");
    let variables = connected(server, dir.path(), Some(&preload(dir.path())));
    for (named, name) in [
        ("ATOLL_TEST_E2B_CREWAI", "through_crewai.py"),
        ("ATOLL_TEST_E2B_OPENAI_AGENTS", "through_openai_agents.py"),
        ("ATOLL_TEST_LANGCHAIN_PYTHONS", "through_langchain.py"),
    ] {
        // Those that are for long runs alone are not missing from others.
        if std::env::var_os(named).is_some() {
            for interpreter in installed(named) {
                run(server, python(&interpreter, name), &variables).await;
            }
        }
    }
}
