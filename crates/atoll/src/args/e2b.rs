//! E2B's SDKs.

use clap::{Args, Subcommand, ValueEnum};

/// Connect E2B's SDKs and its command line
#[derive(Debug, Subcommand)]
pub(crate) enum E2bCommand {
    Env(E2bEnvArgs),
}

/// Print the variables by which E2B's SDKs find this server
///
/// For a shell to take in: domain, certificate, key, and what to unset that would lead elsewhere. With a server that was
/// started with --e2b, every version of the SDKs works.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  eval \"$(atoll e2b env)\"
  atoll e2b env --shell fish | source
  atoll e2b env --json")]
pub(crate) struct E2bEnvArgs {
    /// The shell that reads it
    #[arg(long, value_name = "SHELL", default_value = "sh")]
    pub(crate) shell: EnvShell,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum EnvShell {
    Sh,
    Fish,
}
