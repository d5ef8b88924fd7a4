//! The command line: every subcommand, option and word of help. Doc comments are what users read.

use std::path::PathBuf;

use atoll_types::{Isolation, parse_bytes};
use clap::{Args, Parser, Subcommand, ValueEnum};

/// Subcommands by what people come for; clap itself can only list them in one heap. A test holds it complete.
const HELP: &str = "\
{about}

{usage-heading} {usage}

Start:
  demo        Show what Atoll does, in twenty seconds
  run         Run one command in a fresh sandbox and remove it
  server      Serve the API
  doctor      Say which kinds of isolation work here, and what to do about the rest

Sandboxes:
  create      Make a sandbox
  exec        Run a command in a sandbox
  shell       Open a terminal in a sandbox
  cp          Copy files and directories in and out
  ls          List sandboxes, or the files of one
  ps          List the commands of a sandbox
  logs        Show the output of a command
  port        List listening ports, or print the URL of one
  stats       Show what a sandbox uses
  extend      Move the end of a sandbox's life
  kill        End sandboxes

Things that last:
  template    Build and manage what sandboxes start from
  artifact    Save, list and fetch files that outlive their sandbox
  key         Create, list and revoke API keys

More:
  bench       Measure speed side by side with peers
  completions Print completions for a shell

Options:
{options}
{after-help}";

const EXAMPLES: &str = "\
Examples:
  atoll run -- python3 -c 'print(6 * 7)'
  id=$(atoll create --memory 1G --timeout 30m)
  atoll exec $id -- pip list
  atoll cp ./project $id:/home/user/
  atoll shell $id";

/// Disposable computers for code that agents write, on machines you own.
#[derive(Debug, Parser)]
#[command(name = "atoll", version, help_template = HELP, after_help = EXAMPLES, max_term_width = 110)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Args, Clone)]
pub(crate) struct Global {
    /// Print JSON for programs instead of text for people
    #[arg(long, global = true)]
    pub(crate) json: bool,
    /// The server to talk to [default: the one running on this machine]
    #[arg(
        long,
        global = true,
        env = "ATOLL_URL",
        hide_env_values = true,
        value_name = "URL"
    )]
    pub(crate) url: Option<String>,
    /// API key [default: the admin key of this machine's server]
    #[arg(
        long,
        global = true,
        env = "ATOLL_API_KEY",
        hide_env_values = true,
        value_name = "KEY"
    )]
    pub(crate) key: Option<String>,
    /// Data directory [default: /var/lib/atoll as root, else ~/.local/share/atoll]
    #[arg(
        long,
        global = true,
        env = "ATOLL_DATA",
        hide_env_values = true,
        value_name = "DIR"
    )]
    pub(crate) data: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Server(ServerArgs),
    Run(RunArgs),
    Create(CreateArgs),
    Exec(ExecArgs),
    Shell(ShellArgs),
    Cp(CpArgs),
    Ls(LsArgs),
    Ps(PsArgs),
    Logs(LogsArgs),
    Port(PortArgs),
    Stats(StatsArgs),
    Extend(ExtendArgs),
    Kill(KillArgs),
    #[command(subcommand)]
    Template(TemplateCommand),
    #[command(subcommand)]
    Artifact(ArtifactCommand),
    #[command(subcommand)]
    Key(KeyCommand),
    Doctor(DoctorArgs),
    #[command(subcommand)]
    Bench(BenchCommand),
    Demo(DemoArgs),
    Completions(CompletionsArgs),
}

/// Serve the API
///
/// The first start makes a project and an admin key, which is printed once and kept in DATA/admin.key. Stopping the
/// server does not stop its sandboxes: the next one takes them over.
#[derive(Debug, Args, Clone, Default)]
#[command(after_help = "\
Examples:
  atoll server
  atoll server --listen 0.0.0.0:7070 --domain sandboxes.example.com
  atoll server --pool base=4 --pool base=2:memory=2G,cpu=2
  atoll server --config /etc/atoll.toml")]
pub(crate) struct ServerArgs {
    /// Address and port to listen on [default: 127.0.0.1:7070]
    #[arg(long, value_name = "ADDR:PORT")]
    pub(crate) listen: Option<std::net::SocketAddr>,
    /// Keep sandboxes ready: TEMPLATE=COUNT[:memory=512M,cpu=1,disk=1G,pids=512,isolation=gvisor]; may be repeated
    #[arg(long, value_name = "SPEC")]
    pub(crate) pool: Vec<crate::config::Pool>,
    /// Domain under which sandbox ports are served [default: localhost]
    #[arg(long)]
    pub(crate) domain: Option<String>,
    /// Configuration file; options on the command line win
    #[arg(long, value_name = "FILE.toml")]
    pub(crate) config: Option<PathBuf>,
    /// Where templates are kept, shared between servers [default: DATA/templates]
    #[arg(long, env = "ATOLL_TEMPLATES", hide_env_values = true, value_name = "DIR")]
    pub(crate) templates: Option<PathBuf>,
    /// The weakest isolation of sandboxes whose creator names none; `jail` is for machines with one tenant [default: gvisor]
    #[arg(long, value_name = "TIER")]
    pub(crate) isolation: Option<Isolation>,
    /// The runsc to use, or `none` [default: ATOLL_RUNSC, the cache of ./atoll, PATH]
    #[arg(long, value_name = "PATH")]
    pub(crate) runsc: Option<PathBuf>,
    /// How log lines look [default: pretty on a terminal, else plain]
    #[arg(long, value_name = "FORMAT")]
    pub(crate) log_format: Option<LogFormat>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum LogFormat {
    Pretty,
    Plain,
    Json,
}

/// What a new sandbox is like.
#[derive(Debug, Args, Clone)]
pub(crate) struct SpecArgs {
    /// Template to start from
    #[arg(short, long, default_value = "base", value_name = "NAME")]
    pub(crate) template: String,
    /// CPU cores, e.g. 0.5 or 2
    #[arg(long, value_parser = parse_cpu, value_name = "CORES", help_heading = "Limits")]
    pub(crate) cpu: Option<u32>,
    /// Memory, e.g. 512M
    #[arg(short, long, value_parser = parse_bytes, value_name = "SIZE", help_heading = "Limits")]
    pub(crate) memory: Option<u64>,
    /// Room for files, e.g. 1G
    #[arg(long, value_parser = parse_bytes, value_name = "SIZE", help_heading = "Limits")]
    pub(crate) disk: Option<u64>,
    /// Where files are kept: in memory (fast, counts as memory) or on disk
    #[arg(long, value_name = "WHERE", value_parser = ["memory", "disk"], help_heading = "Limits")]
    pub(crate) disk_backing: Option<String>,
    /// Processes and threads
    #[arg(long, value_name = "COUNT", help_heading = "Limits")]
    pub(crate) pids: Option<u32>,
    /// Lifetime, e.g. 10m; then it is killed
    #[arg(long, value_parser = parse_duration, value_name = "TIME", help_heading = "Limits")]
    pub(crate) timeout: Option<u64>,
    /// Kill it when nobody has used it for this long
    #[arg(long, value_parser = parse_duration, value_name = "TIME", help_heading = "Limits")]
    pub(crate) idle: Option<u64>,
    /// The weakest isolation that will do: jail, gvisor or microvm
    #[arg(long, value_name = "TIER")]
    pub(crate) isolation: Option<Isolation>,
    /// Set an environment variable; may be repeated
    #[arg(short, long, value_parser = parse_pair, value_name = "NAME=VALUE")]
    pub(crate) env: Vec<(String, String)>,
    /// Attach a label; may be repeated
    #[arg(short, long, value_parser = parse_pair, value_name = "NAME=VALUE")]
    pub(crate) label: Vec<(String, String)>,
}

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
  atoll create --template node --memory 1G --timeout 1h --label team=search")]
pub(crate) struct CreateArgs {
    #[command(flatten)]
    pub(crate) spec: SpecArgs,
}

/// Run a command in a sandbox
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  atoll exec sbx_k3… -- pip install requests
  atoll exec sbx_k3… --detach -- python3 -m http.server 8000")]
pub(crate) struct ExecArgs {
    /// Id of the sandbox, or a beginning of it that is unique
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
  atoll ls --label team=search --state running,failed
  atoll ls sbx_k3…:/home/user")]
pub(crate) struct LsArgs {
    /// SANDBOX:PATH to list files instead of sandboxes
    pub(crate) path: Option<String>,
    /// Only sandboxes with this label; may be repeated
    #[arg(short, long, value_parser = parse_pair, value_name = "NAME=VALUE")]
    pub(crate) label: Vec<(String, String)>,
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

/// Move the end of a sandbox's life to this long from now
#[derive(Debug, Args)]
pub(crate) struct ExtendArgs {
    pub(crate) sandbox: String,
    /// For example 30m
    #[arg(value_parser = parse_duration)]
    pub(crate) time: u64,
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

/// Build and manage what sandboxes start from
#[derive(Debug, Subcommand)]
pub(crate) enum TemplateCommand {
    Build(TemplateBuildArgs),
    /// List templates
    List,
    /// Show everything about a template
    Inspect {
        template: String,
    },
    /// Delete a template
    Delete {
        template: String,
    },
    /// Remove what no template and no sandbox uses
    Prune,
}

/// Build a template
///
/// From Debian packages (the default; `base` without further options is the template that `run` uses), from an OCI image,
/// or from a Dockerfile.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  atoll template build base
  atoll template build data --package python3-numpy --package python3-pandas
  atoll template build alpine --image docker.io/library/alpine:3.22
  atoll template build app --dockerfile ./app --start 'python3 -m http.server 8000' --ready-port 8000")]
pub(crate) struct TemplateBuildArgs {
    /// Name of the template
    pub(crate) name: String,
    /// An image: a registry reference, oci:DIR or docker-archive:FILE
    #[arg(long, value_name = "REFERENCE", conflicts_with_all = ["dockerfile", "package", "suite"])]
    pub(crate) image: Option<String>,
    /// A directory with a Dockerfile, or the Dockerfile itself
    #[arg(long, value_name = "PATH", conflicts_with_all = ["package", "suite"])]
    pub(crate) dockerfile: Option<PathBuf>,
    /// The directory that COPY and ADD read [default: that of the Dockerfile]
    #[arg(long, value_name = "DIR", requires = "dockerfile")]
    pub(crate) context: Option<PathBuf>,
    /// A value for an ARG of the Dockerfile; may be repeated
    #[arg(long, value_parser = parse_pair, value_name = "NAME=VALUE", requires = "dockerfile")]
    pub(crate) build_arg: Vec<(String, String)>,
    /// A Debian package on top of those of `base`; may be repeated
    #[arg(long, value_name = "NAME")]
    pub(crate) package: Vec<String>,
    /// Debian suite
    #[arg(long, value_name = "NAME")]
    pub(crate) suite: Option<String>,
    /// A command that every sandbox of this template starts with
    #[arg(long, value_name = "COMMAND")]
    pub(crate) start: Option<String>,
    /// The start command is ready when something listens on this port
    #[arg(long, value_name = "PORT", requires = "start")]
    pub(crate) ready_port: Option<u16>,
}

/// Save, list and fetch files that outlive their sandbox
#[derive(Debug, Subcommand)]
pub(crate) enum ArtifactCommand {
    /// Save a file or directory of a sandbox under a name
    Save {
        /// SANDBOX:PATH
        from: String,
        /// Name to save it under
        name: String,
        /// Keep it this long, e.g. 7d
        #[arg(long, value_parser = parse_duration, value_name = "TIME")]
        keep: Option<u64>,
    },
    /// List artifacts
    List {
        /// Only those of this name
        name: Option<String>,
    },
    /// Fetch an artifact: a file as it is, a directory unpacked
    Get {
        /// Name (the newest of it) or id
        artifact: String,
        /// Where to put it; `-` for standard output [default: its name, here]
        to: Option<PathBuf>,
    },
    /// Delete an artifact
    Delete { artifact: String },
}

/// Create, list and revoke API keys
#[derive(Debug, Subcommand)]
pub(crate) enum KeyCommand {
    /// Create a key and print its secret, once
    Create {
        /// What it is for
        name: String,
    },
    /// List keys
    List,
    /// Revoke a key; requests that use it are refused from now on
    Revoke { key: String },
}

/// Say which kinds of isolation work here, and what to do about the rest
#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {}

/// Measure speed side by side with peers
#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    Sandbox(BenchSandboxArgs),
}

/// Sandboxes against raw runsc, bwrap and cp, in one interleaved run
///
/// Starts a server of its own as a separate process and measures over HTTP. With --json it prints an array of rows
/// {"name","ours","peer","peer_name","unit","ratio","bar","met"}.
#[derive(Debug, Args, Clone)]
pub(crate) struct BenchSandboxArgs {
    /// Fewer rounds, and no row with a thousand sandboxes
    #[arg(long)]
    pub(crate) quick: bool,
    /// Only rows whose name contains this; may be repeated
    #[arg(long, value_name = "NAME")]
    pub(crate) only: Vec<String>,
    /// How many idle sandboxes the density row starts
    #[arg(long, default_value_t = 1000, value_name = "COUNT")]
    pub(crate) idle_count: usize,
    /// Print the names of the rows and stop
    #[arg(long)]
    pub(crate) list: bool,
}

/// Show what Atoll does, in twenty seconds
#[derive(Debug, Args)]
pub(crate) struct DemoArgs {}

/// Print completions for a shell
#[derive(Debug, Args)]
#[command(after_help = "Example: atoll completions bash > /etc/bash_completion.d/atoll")]
pub(crate) struct CompletionsArgs {
    pub(crate) shell: clap_complete::Shell,
}

/// Cores to thousandths of a core.
pub(crate) fn parse_cpu(text: &str) -> Result<u32, String> {
    let cores: f64 = text
        .trim()
        .parse()
        .map_err(|_| format!("`{text}` is not a number of cores; write for example 0.5 or 2"))?;
    if !(0.001..=1024.0).contains(&cores) {
        return Err(format!("`{text}` is not a sensible number of cores"));
    }
    Ok((cores * 1000.0).round() as u32)
}

/// `90s`, `10m`, `1h30m`, `500ms`, `7d` to milliseconds. A bare number is seconds.
pub(crate) fn parse_duration(text: &str) -> Result<u64, String> {
    let bad = || format!("`{text}` is not a time; write for example 90s, 10m, 1h30m or 7d");
    let mut rest = text.trim();
    if let Ok(seconds) = rest.parse::<u64>() {
        return seconds.checked_mul(1000).ok_or_else(bad);
    }
    let mut total: u64 = 0;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit()).ok_or_else(bad)?;
        let number: u64 = rest[..digits].parse().map_err(|_| bad())?;
        rest = &rest[digits..];
        let letters = rest.find(|c: char| c.is_ascii_digit()).unwrap_or(rest.len());
        let scale = match &rest[..letters] {
            "ms" => 1,
            "s" => 1000,
            "m" => 60_000,
            "h" => 3_600_000,
            "d" => 86_400_000,
            _ => return Err(bad()),
        };
        rest = &rest[letters..];
        total = number
            .checked_mul(scale)
            .and_then(|part| total.checked_add(part))
            .ok_or_else(bad)?;
    }
    if text.trim().is_empty() {
        Err(bad())
    } else {
        Ok(total)
    }
}

fn parse_pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err(format!("`{text}` is not of the form NAME=VALUE")),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_help_names_every_command() {
        for command in Cli::command().get_subcommands() {
            let name = format!("\n  {} ", command.get_name());
            assert!(
                HELP.contains(&name),
                "`{}` is missing in the help",
                command.get_name()
            );
        }
    }

    #[test]
    fn the_help_reads_well() {
        insta::assert_snapshot!(Cli::command().term_width(100).render_help());
    }

    #[test]
    fn times_are_read_as_people_write_them() {
        for (text, millis) in [
            ("90s", 90_000),
            ("10m", 600_000),
            ("1h30m", 5_400_000),
            ("500ms", 500),
            ("7d", 604_800_000),
            ("5", 5000),
        ] {
            assert_eq!(parse_duration(text), Ok(millis), "{text}");
        }
        for text in ["", "m", "1x", "-5s", "1h30", "99999999999999999d"] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
    }

    #[test]
    fn cores_are_read() {
        assert_eq!(parse_cpu("0.5"), Ok(500));
        assert_eq!(parse_cpu("2"), Ok(2000));
        assert!(parse_cpu("0").is_err());
        assert!(parse_cpu("NaN").is_err());
    }
}
