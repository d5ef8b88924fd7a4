//! The command line as a person uses it: the same program, as a client of the server under test.

use std::process::{Command, Output, Stdio};

use crate::server::{Server, binary};

impl Server {
    /// `atoll` with the server's address and key in its environment.
    pub fn cli(&self) -> Command {
        let mut command = Command::new(binary());
        command
            .env("ATOLL_URL", self.client().url())
            .env(
                "ATOLL_API_KEY",
                self.client().key().expect("the server's own client has a key"),
            )
            .stdin(Stdio::null());
        command
    }

    /// Runs `atoll` with these arguments to its end.
    pub fn atoll(&self, args: &[&str]) -> Output {
        self.cli().args(args).output().expect("the program runs")
    }
}

/// What a program that succeeded has printed.
#[track_caller]
pub fn printed(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout.clone()).expect("text")
}
