//! Reading the ledger: what was used, and what happened.

use clap::Args;

/// Show what sandboxes have used so far: time, CPU, memory, disk
///
/// Summed from the ledger, so it includes those that are gone. A sandbox's id shows that one alone.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  atoll usage                     # the whole project
  atoll usage sbx_k3…
  atoll usage --json")]
pub(crate) struct UsageArgs {
    /// Only this sandbox; one that has ended needs its whole id
    pub(crate) sandbox: Option<String>,
}

/// Show what happened: every life, command, decision and use, in its order
///
/// Each record has a number; `--after` goes on behind one that was seen.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  atoll ledger                    # the whole project, from the beginning
  atoll ledger sbx_k3…
  atoll ledger --after 41250 --limit 100 --json")]
pub(crate) struct LedgerArgs {
    /// Only this sandbox; one that has ended needs its whole id
    pub(crate) sandbox: Option<String>,
    /// Only what came after the record of this number
    #[arg(long, value_name = "NUMBER", default_value_t = 0, hide_default_value = true, value_parser = clap::value_parser!(i64).range(0..))]
    pub(crate) after: i64,
    /// At most so many [default: all]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) limit: Option<u64>,
}

/// Show what happens, as it happens
///
/// `--follow` shows what happens from now on, or from `--after` on; `--after` alone shows what came since, and ends. A connection
/// that breaks is made again, and nothing is missed.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  atoll events --follow
  atoll events --follow --kind 'sandbox.*' --kind command.exited
  atoll events --after 41250      # what came since, then ends
  atoll events --follow --json | jq .kind")]
pub(crate) struct EventsArgs {
    /// Only this sandbox; one that has ended needs its whole id
    pub(crate) sandbox: Option<String>,
    /// Go on with what happens next, until interrupted
    #[arg(long, short)]
    pub(crate) follow: bool,
    /// Only what came after the event of this number
    #[arg(long, value_name = "NUMBER", required_unless_present = "follow", value_parser = clap::value_parser!(i64).range(0..))]
    pub(crate) after: Option<i64>,
    /// Only events of this kind, or of all that begin so: `sandbox.*`; may be given several times
    #[arg(long = "kind", value_name = "KIND")]
    pub(crate) kinds: Vec<String>,
}
