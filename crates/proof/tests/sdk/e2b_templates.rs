//! E2B's SDKs that need a template of their own: the code interpreter and the desktop. Building these templates takes
//! longer than all other tests, so they are tested where they have been built (`templates/*/build`) into the store that
//! the tests use, and skipped elsewhere, loudly.

use atoll_proof::{Server, on_every_tier};
use tokio::process::Command;

use crate::e2b::{installed, run, script};

on_every_tier!(
    the_code_interpreter_goes_through_every_call,
    the_desktop_goes_through_every_call,
);

async fn the_code_interpreter_goes_through_every_call(server: &Server) {
    through(
        server,
        "code-interpreter-v1",
        "ATOLL_TEST_E2B_CODE_INTERPRETER",
        "through_e2b_code_interpreter.py",
    )
    .await;
}

async fn the_desktop_goes_through_every_call(server: &Server) {
    through(
        server,
        "desktop",
        "ATOLL_TEST_E2B_DESKTOP",
        "through_e2b_desktop.py",
    )
    .await;
}

async fn through(server: &Server, template: &str, pythons: &str, name: &str) {
    let known = server.client().get(&format!("/v1/templates/{template}")).await;
    if known.status == 404 {
        eprintln!("SKIPPED: there is no template {template}; templates/*/build makes it");
        return;
    }
    for python in installed(pythons) {
        let mut command = Command::new(python);
        command.arg(script(name));
        run(server, command).await;
    }
}
