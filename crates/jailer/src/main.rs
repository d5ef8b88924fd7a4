//! `atoll-jailer`: builds one jail and puts the guest agent into it. See the library for how.
//!
//! Prints `pid <n>` (the agent's pid on the host) and exits with 0, or a sentence and exits with 1.

use std::io::Write;
use std::process::ExitCode;

use atoll_jailer::outside;
use atoll_jailer::spec::Spec;

fn main() -> ExitCode {
    let (line, code) =
        match Spec::from_args(std::env::args_os().skip(1)).and_then(|spec| outside::start(&spec)) {
            Ok(pid) => (format!("pid {pid}\n"), ExitCode::SUCCESS),
            Err(error) => (format!("{error}\n"), ExitCode::FAILURE),
        };
    // Whoever started us may be gone; the jail is there all the same and will be found.
    let _ = std::io::stdout().write_all(line.as_bytes());
    code
}
