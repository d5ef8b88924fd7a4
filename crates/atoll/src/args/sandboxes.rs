//! Making sandboxes, and working with one.

use atoll_types::{Isolation, parse_bytes};
use clap::Args;

use super::network::ReachArgs;
use super::parse::{
    Mount, SecretGiven, parse_cpu, parse_duration, parse_mount, parse_pair, parse_secret_use,
};

/// Hard limits; what is not given is the template's, or else the server's default.
#[derive(Debug, Args, Clone, Default)]
pub(crate) struct LimitArgs {
    /// CPU cores, e.g. 0.5 or 2
    #[arg(long, value_parser = parse_cpu, value_name = "CORES", help_heading = "Limits")]
    pub(crate) cpu: Option<u32>,
    /// Memory, e.g. 512M
    #[arg(short, long, value_parser = parse_bytes, value_name = "SIZE", help_heading = "Limits")]
    pub(crate) memory: Option<u64>,
    /// Room for files, e.g. 20G; taken from the server's disk as it is used
    #[arg(long, value_parser = parse_bytes, value_name = "SIZE", help_heading = "Limits")]
    pub(crate) disk: Option<u64>,
    /// Where files are kept: on disk, or in memory, where they count as memory
    #[arg(long, value_name = "WHERE", value_parser = ["memory", "disk"], help_heading = "Limits")]
    pub(crate) disk_backing: Option<String>,
    /// Processes and threads
    #[arg(long, value_name = "COUNT", help_heading = "Limits")]
    pub(crate) pids: Option<u32>,
}

/// What a new sandbox is like.
#[derive(Debug, Args, Clone)]
pub(crate) struct SpecArgs {
    /// What to start from: name or id of a template, or of a snapshot
    #[arg(short, long, default_value = "base", value_name = "NAME")]
    pub(crate) template: String,
    #[command(flatten)]
    pub(crate) limits: LimitArgs,
    #[command(flatten)]
    pub(crate) life: LifeArgs,
    /// The weakest isolation that will do: jail, gvisor or microvm
    #[arg(long, value_name = "TIER")]
    pub(crate) isolation: Option<Isolation>,
    /// What to call it: lowercase letters, digits and dashes; taken wherever its id is
    #[arg(long)]
    pub(crate) name: Option<String>,
    /// Set an environment variable; may be repeated
    #[arg(short, long, value_parser = parse_pair, value_name = "NAME=VALUE")]
    pub(crate) env: Vec<(String, String)>,
    /// Attach a label; may be repeated
    #[arg(short, long, value_parser = parse_pair, value_name = "NAME=VALUE")]
    pub(crate) label: Vec<(String, String)>,
    /// Attach a volume: NAME:/path or NAME:/path:ro; may be repeated
    #[arg(long, value_parser = parse_mount, value_name = "NAME:PATH")]
    pub(crate) volume: Vec<Mount>,
    #[command(flatten)]
    pub(crate) reach: ReachArgs,
    /// Let it use a secret; VARIABLE then holds a placeholder that is replaced on the way out; may be repeated
    #[arg(long, value_parser = parse_secret_use, value_name = "NAME[=VARIABLE]", help_heading = "Network")]
    pub(crate) secret: Vec<SecretGiven>,
    /// A line for the shell, run inside before the sandbox is handed over; may be repeated
    #[arg(long, value_name = "COMMAND")]
    pub(crate) on_create: Vec<String>,
    /// A line for the shell, run inside after every resume and start; may be repeated
    #[arg(long, value_name = "COMMAND")]
    pub(crate) on_resume: Vec<String>,
}

/// When a sandbox ends or rests, and what is kept of it.
#[derive(Debug, Args, Clone, Default)]
pub(crate) struct LifeArgs {
    /// Lifetime, e.g. 10m
    #[arg(long, value_parser = parse_duration, value_name = "TIME", help_heading = "Lifetime")]
    pub(crate) timeout: Option<u64>,
    /// What happens when it is over [default: kill]
    #[arg(long, value_parser = ACTIONS, value_name = "kill|pause|stop", hide_possible_values = true,
        help_heading = "Lifetime")]
    pub(crate) on_timeout: Option<String>,
    /// How long nobody may use it while it does no work: no command running, no connection, less than 2 % of a CPU
    #[arg(long, value_parser = parse_duration, value_name = "TIME", help_heading = "Lifetime")]
    pub(crate) idle: Option<u64>,
    /// What happens then [default: kill]
    #[arg(long, value_parser = ACTIONS, value_name = "kill|pause|stop", hide_possible_values = true,
        requires = "idle", help_heading = "Lifetime")]
    pub(crate) on_idle: Option<String>,
    /// A use of it while it rests resumes it, instead of being refused
    #[arg(long, help_heading = "Lifetime")]
    pub(crate) auto_resume: bool,
    /// A pause also keeps files apart from memory, to come back on them where the memory cannot be used
    #[arg(long, help_heading = "Lifetime")]
    pub(crate) fallback_to_files: bool,
    /// Delete it when it has rested this long, e.g. 7d [default: never]
    #[arg(long, value_parser = parse_duration, value_name = "TIME", help_heading = "Lifetime")]
    pub(crate) retention: Option<u64>,
}

/// What may happen to a sandbox whose time is over.
const ACTIONS: [&str; 3] = ["kill", "pause", "stop"];

/// How a command is run.
#[derive(Debug, Args, Clone)]
pub(crate) struct CommandArgs {
    /// Directory to run in
    #[arg(short = 'w', long, value_name = "DIR")]
    pub(crate) workdir: Option<String>,
    /// User to run as
    #[arg(short, long, value_name = "NAME")]
    pub(crate) user: Option<String>,
    /// Kill the command after this long
    #[arg(long, value_parser = parse_duration, value_name = "TIME")]
    pub(crate) command_timeout: Option<u64>,
    /// Do not pass on standard input
    #[arg(short = 'n', long)]
    pub(crate) no_stdin: bool,
    /// Never give the command a terminal, even when there is one
    #[arg(long)]
    pub(crate) no_tty: bool,
}

/// Run one command in a fresh sandbox and remove it
///
/// Standard input, output, terminal and exit code are the command's own. Works without a server: one is started inside
/// this process if none is running.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  atoll run -- python3 -c 'print(6 * 7)'
  cat data.csv | atoll run -- python3 -c 'import sys; print(len(sys.stdin.readlines()))'
  atoll run --memory 2G --cpu 2 -- make -j2
  atoll run --net package-registries -- pip install requests
  atoll run                                   # a shell")]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub(crate) spec: SpecArgs,
    #[command(flatten)]
    pub(crate) command: CommandArgs,
    /// The command; without one, a shell
    #[arg(last = true, value_name = "COMMAND")]
    pub(crate) argv: Vec<String>,
}

/// Make a sandbox and print its id
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  atoll create
  atoll create --template node --memory 1G --timeout 1h --label team=search
  atoll create --timeout 1h --on-timeout pause --auto-resume --retention 7d
  atoll create --template my-snapshot --volume data:/data --volume inputs:/inputs:ro
  atoll create --name my-agent --if-exists return --auto-resume
  atoll create --net none --allow api.example.com --secret example=API_KEY")]
pub(crate) struct CreateArgs {
    #[command(flatten)]
    pub(crate) spec: SpecArgs,
    /// What to do if a living sandbox has the name; `return` prints that one, resumed if it rests and resumes when used
    /// [default: fail]
    #[arg(long, value_parser = ["fail", "return"], value_name = "fail|return", hide_possible_values = true,
        requires = "name")]
    pub(crate) if_exists: Option<String>,
}

/// Run a command in a sandbox
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  atoll exec sbx_k3… -- pip install requests
  atoll exec sbx_k3… --detach -- python3 -m http.server 8000")]
pub(crate) struct ExecArgs {
    /// Name or id of the sandbox, or a beginning of its id that is unique
    pub(crate) sandbox: String,
    #[command(flatten)]
    pub(crate) command: CommandArgs,
    /// Set an environment variable; may be repeated
    #[arg(short, long, value_parser = parse_pair, value_name = "NAME=VALUE")]
    pub(crate) env: Vec<(String, String)>,
    /// Leave the command running and print its id
    #[arg(short, long)]
    pub(crate) detach: bool,
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub(crate) argv: Vec<String>,
}

/// Open a terminal in a sandbox
#[derive(Debug, Args)]
pub(crate) struct ShellArgs {
    pub(crate) sandbox: String,
    /// User to be
    #[arg(short, long, value_name = "NAME")]
    pub(crate) user: Option<String>,
    /// The shell to start
    #[arg(long, default_value = "/bin/bash", value_name = "PROGRAM")]
    pub(crate) shell: String,
}

/// Copy files and directories in and out
///
/// One side is a path in a sandbox, written SANDBOX:PATH. As with cp, a destination that is a directory (or ends in /)
/// receives the source under its own name. `-` is standard input or output.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  atoll cp ./project sbx_k3…:/home/user/
  atoll cp sbx_k3…:/home/user/result.csv .
  tar c src | atoll cp - sbx_k3…:/tmp/src.tar")]
pub(crate) struct CpArgs {
    pub(crate) from: String,
    pub(crate) to: String,
    /// Owner of what is created in the sandbox
    #[arg(short, long, value_name = "NAME")]
    pub(crate) user: Option<String>,
}

/// List sandboxes, or the files of one
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  atoll ls
  atoll ls --label team=search --state running,paused
  atoll ls sbx_k3…:/home/user")]
pub(crate) struct LsArgs {
    /// SANDBOX:PATH to list files instead of sandboxes
    pub(crate) path: Option<String>,
    /// Only sandboxes with this label; may be repeated
    #[arg(short, long, value_parser = parse_pair, value_name = "NAME=VALUE")]
    pub(crate) label: Vec<(String, String)>,
    /// Only those of this owner, or of a kind of owners: workflow, sandbox, key
    #[arg(long, value_name = "OWNER")]
    pub(crate) owner: Option<String>,
    /// Only sandboxes in these states [default: those that live]
    #[arg(short, long, value_delimiter = ',', value_name = "STATE")]
    pub(crate) state: Vec<atoll_types::SandboxState>,
    /// Also those that have ended
    #[arg(short, long)]
    pub(crate) all: bool,
    /// How deep to list files
    #[arg(long, default_value_t = 1, value_name = "LEVELS")]
    pub(crate) depth: u32,
}

/// Show everything about a sandbox
#[derive(Debug, Args)]
pub(crate) struct InspectArgs {
    pub(crate) sandbox: String,
}

/// List the commands of a sandbox
#[derive(Debug, Args)]
pub(crate) struct PsArgs {
    pub(crate) sandbox: String,
}

/// Show the output of a command
#[derive(Debug, Args)]
pub(crate) struct LogsArgs {
    pub(crate) sandbox: String,
    /// Id of the command [default: the one started last]
    pub(crate) command: Option<String>,
    /// Go on until the command ends
    #[arg(short, long)]
    pub(crate) follow: bool,
}

/// List listening ports, or print the URL of one
#[derive(Debug, Args)]
pub(crate) struct PortArgs {
    pub(crate) sandbox: String,
    pub(crate) port: Option<u16>,
}

/// Show what a sandbox uses
#[derive(Debug, Args)]
pub(crate) struct StatsArgs {
    pub(crate) sandbox: String,
}

/// Show each time that a sandbox ran: from when to when, why it ended, what it used
#[derive(Debug, Args)]
#[command(after_help = "Example: atoll instances sbx_k3…")]
pub(crate) struct InstancesArgs {
    pub(crate) sandbox: String,
}

/// Move the end of a sandbox's life to this long from now
#[derive(Debug, Args)]
pub(crate) struct ExtendArgs {
    pub(crate) sandbox: String,
    /// For example 30m
    #[arg(value_parser = parse_duration)]
    pub(crate) time: u64,
}

/// Change name, labels, times and limits of a sandbox
///
/// What is not named stays as it is. The disk is as large as it was made.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  atoll update sbx_k3… --memory 2G --cpu 2
  atoll update sbx_k3… --name my-agent
  atoll update my-agent --label stage=review --remove-label draft
  atoll update sbx_k3… --timeout 2h --on-timeout pause --auto-resume true
  atoll update sbx_k3… --idle never")]
pub(crate) struct UpdateArgs {
    /// Name or id of the sandbox, or a beginning of its id that is unique
    pub(crate) sandbox: String,
    /// CPU cores, e.g. 0.5 or 2
    #[arg(long, value_parser = parse_cpu, value_name = "CORES", help_heading = "Limits")]
    pub(crate) cpu: Option<u32>,
    /// Memory, e.g. 512M
    #[arg(short, long, value_parser = parse_bytes, value_name = "SIZE", help_heading = "Limits")]
    pub(crate) memory: Option<u64>,
    /// Processes and threads
    #[arg(long, value_name = "COUNT", help_heading = "Limits")]
    pub(crate) pids: Option<u32>,
    /// Lifetime from now, e.g. 10m; of one that rests, from its next resume
    #[arg(long, value_parser = parse_duration, value_name = "TIME", help_heading = "Lifetime")]
    pub(crate) timeout: Option<u64>,
    /// What happens when it is over
    #[arg(long, value_parser = ACTIONS, value_name = "kill|pause|stop", hide_possible_values = true,
        help_heading = "Lifetime")]
    pub(crate) on_timeout: Option<String>,
    /// How long nobody may use it while it does no work, or `never` to wait for ever
    #[arg(long, value_parser = parse_span, value_name = "TIME", help_heading = "Lifetime")]
    pub(crate) idle: Option<Span>,
    /// What happens then; without --idle, when the idle time that it has is over
    #[arg(long, value_parser = ACTIONS, value_name = "kill|pause|stop", hide_possible_values = true,
        help_heading = "Lifetime")]
    pub(crate) on_idle: Option<String>,
    /// Whether a use of it while it rests resumes it
    #[arg(long, value_name = "true|false", help_heading = "Lifetime")]
    pub(crate) auto_resume: Option<bool>,
    /// Delete it when it has rested this long, e.g. 7d, or `never`
    #[arg(long, value_parser = parse_span, value_name = "TIME", help_heading = "Lifetime")]
    pub(crate) retention: Option<Span>,
    /// What to call it from now on; empty for nothing
    #[arg(long)]
    pub(crate) name: Option<String>,
    /// Set a label; may be repeated
    #[arg(short, long, value_parser = parse_pair, value_name = "NAME=VALUE")]
    pub(crate) label: Vec<(String, String)>,
    /// Remove a label; may be repeated
    #[arg(long, value_name = "NAME")]
    pub(crate) remove_label: Vec<String>,
}

/// A time in milliseconds, or `never`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Span(pub(crate) Option<u64>);

fn parse_span(text: &str) -> Result<Span, String> {
    match text {
        "never" => Ok(Span(None)),
        time => parse_duration(time).map(|millis| Span(Some(millis))),
    }
}

/// End sandboxes
#[derive(Debug, Args)]
pub(crate) struct KillArgs {
    #[arg(required_unless_present = "all", value_name = "SANDBOX")]
    pub(crate) sandboxes: Vec<String>,
    /// Every live sandbox of the project
    #[arg(long, conflicts_with = "sandboxes")]
    pub(crate) all: bool,
}
