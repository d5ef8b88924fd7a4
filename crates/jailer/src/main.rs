//! `atoll-jailer`: builds one jail and puts the guest agent into it. See the library for how.
//!
//! Prints `pid <n>` (the agent's pid on the host) and exits with 0, or a sentence and exits with 1.
//! With `save-layer` as its first argument it writes the writable layer of a jail to its output instead; see `layer`.

use std::io::Write;
use std::process::ExitCode;

use atoll_jailer::spec::Spec;
use atoll_jailer::{layer, outside};

fn main() -> ExitCode {
    if std::env::args_os().nth(1).is_some_and(|word| word == layer::SAVE) {
        return layer::main(std::env::args_os().skip(2));
    }
    let (line, code) =
        match Spec::from_args(std::env::args_os().skip(1)).and_then(|spec| outside::start(&spec)) {
            Ok(pid) => (format!("pid {pid}\n"), ExitCode::SUCCESS),
            Err(error) => (format!("{error}\n"), ExitCode::FAILURE),
        };
    // Whoever started us may be gone; the jail is there all the same and will be found.
    let _ = std::io::stdout().write_all(line.as_bytes());
    code
}
