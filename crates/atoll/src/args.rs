//! The command line: every subcommand, option and word of help. Doc comments are what users read.

mod e2b;
mod lasting;
mod ledger;
mod models;
mod network;
mod parse;
mod sandboxes;
mod service;
mod state;
mod workflows;

use std::path::PathBuf;

use atoll_client::output::Result;
use atoll_client::{Client, local};
use clap::{Args, Parser, Subcommand};

pub(crate) use e2b::{E2bCommand, E2bEnvArgs, EnvShell};
pub(crate) use lasting::{
    ArtifactCommand, KeepRunningArgs, KeyCommand, ProjectCommand, TemplateBuildArgs, TemplateCommand,
    WhoseArgs,
};
pub(crate) use ledger::{EventsArgs, LedgerArgs, UsageArgs};
pub(crate) use models::{
    BudgetCommand, BudgetSetArgs, GuardCommand, ModelCommand, ModelKeyCommand, PriceCommand, ProviderCommand,
    ProviderSetArgs, ScriptedArgs, SpendArgs,
};
pub(crate) use network::{
    BuildReachArgs, NetCommand, NetExplainArgs, NetLogArgs, NetSetArgs, ReachArgs, SecretCommand,
    SecretRotateArgs, SecretSetArgs, ShapeArgs, TrafficArgs, ValueArgs,
};
pub(crate) use parse::{Mount, SecretGiven, Target, parse_cpu, parse_duration};
pub(crate) use sandboxes::{
    CommandArgs, CpArgs, CreateArgs, ExecArgs, ExtendArgs, InspectArgs, InstancesArgs, KillArgs, LimitArgs,
    LogsArgs, LsArgs, PortArgs, PsArgs, RunArgs, ShellArgs, SpecArgs, StatsArgs, UpdateArgs,
};
pub(crate) use service::{
    BenchArgs, BenchCommand, CompletionsArgs, DemoArgs, DoctorArgs, LogFormat, ServerArgs,
};
pub(crate) use state::{
    ForkArgs, GcArgs, PauseArgs, ResumeArgs, SnapshotCommand, StartArgs, StopArgs, VolumeCommand,
};
pub(crate) use workflows::{ApprovalCommand, DecideArgs, WhichArgs, WorkflowCommand};

/// Subcommands by what people come for; clap itself can only list them in one heap. A test holds it complete.
const HELP: &str = "\
{about}

{usage-heading} {usage}

Start:
  demo        Show what Atoll does, in some seven seconds
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
  inspect     Show everything about a sandbox
  stats       Show what a sandbox uses
  instances   Show each time that a sandbox ran
  extend      Move the end of a sandbox's life
  update      Change name, labels, times and limits of a sandbox
  kill        End sandboxes

State that survives:
  pause       Put a sandbox to rest, to go on later where it was
  resume      Let a paused sandbox go on
  stop        End the processes of a sandbox and keep its files
  start       Start a stopped sandbox on its files
  fork        Make running copies of a running sandbox
  snapshot    Take, list and move snapshots of sandboxes
  volume      Create, fill and attach storage that outlives sandboxes

What leaves them:
  net         Show and change what a sandbox may reach, and what became of its attempts
  secret      Keep secrets that sandboxes use without holding them

Models:
  provider    Name those who serve models, and keep their keys
  model       List and name models, price them, and make keys that may call them
  budget      Cap what calls of models may cost
  spend       Show what calls of models have cost

Durable workflows:
  workflow    See, signal and end durable workflows
  approval    Answer what workflows ask people

Things that last:
  template    Build and manage what sandboxes start from
  artifact    Save, list and fetch files that outlive their sandbox
  key         Create, list and revoke API keys
  project     Create and list projects

What was done:
  usage       Show what sandboxes have used so far: time, CPU, memory, disk
  ledger      Show what happened: every life, command, decision and use, in its order
  events      Show what happens, as it happens

More:
  e2b         Connect E2B's SDKs and its command line
  gc          Free disk space that nothing refers to any more
  bench       Measure speed side by side with peers
  scripted-provider
              Serve models that follow a script, for tests and demos
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

impl Global {
    pub(crate) fn data_dir(&self) -> PathBuf {
        self.data.clone().unwrap_or_else(local::default_dir)
    }

    /// The server that the options, the environment or this machine's data directory name. `None`: there is none.
    pub(crate) fn find_client(&self) -> Result<Option<Client>> {
        Client::find(self.url.as_deref(), self.key.clone(), &self.data_dir())
    }

    /// The same, for commands that make no sense without a server.
    pub(crate) fn client(&self) -> Result<Client> {
        Client::require(self.url.as_deref(), self.key.clone(), &self.data_dir())
    }
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
    Inspect(InspectArgs),
    Stats(StatsArgs),
    Instances(InstancesArgs),
    Extend(ExtendArgs),
    Update(UpdateArgs),
    Kill(KillArgs),
    Pause(PauseArgs),
    Resume(ResumeArgs),
    Stop(StopArgs),
    Start(StartArgs),
    Fork(ForkArgs),
    #[command(subcommand)]
    Snapshot(SnapshotCommand),
    #[command(subcommand)]
    Volume(VolumeCommand),
    #[command(subcommand)]
    Net(NetCommand),
    #[command(subcommand)]
    Secret(SecretCommand),
    #[command(subcommand)]
    Provider(ProviderCommand),
    #[command(subcommand)]
    Model(ModelCommand),
    #[command(subcommand)]
    Budget(BudgetCommand),
    Spend(SpendArgs),
    #[command(subcommand)]
    Workflow(WorkflowCommand),
    #[command(subcommand)]
    Approval(ApprovalCommand),
    #[command(subcommand)]
    Template(TemplateCommand),
    #[command(subcommand)]
    Artifact(ArtifactCommand),
    #[command(subcommand)]
    Key(KeyCommand),
    #[command(subcommand)]
    Project(ProjectCommand),
    Usage(UsageArgs),
    Ledger(LedgerArgs),
    Events(EventsArgs),
    Doctor(DoctorArgs),
    #[command(subcommand)]
    E2b(E2bCommand),
    Gc(GcArgs),
    #[command(subcommand)]
    Bench(BenchCommand),
    Demo(DemoArgs),
    ScriptedProvider(ScriptedArgs),
    Completions(CompletionsArgs),
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }

    /// clap keeps values by their argument's id: a subcommand's argument that is called like a global one would silently
    /// overwrite it.
    #[test]
    fn no_argument_is_taken_for_a_global_one() {
        fn check(command: &clap::Command, global: &[String], path: &str) {
            for argument in command.get_arguments() {
                let id = argument.get_id().to_string();
                assert!(
                    !global.contains(&id),
                    "`{path}` has an argument with the id `{id}`"
                );
            }
            for below in command.get_subcommands() {
                check(below, global, &format!("{path} {}", below.get_name()));
            }
        }
        let command = Cli::command();
        let global: Vec<String> = command
            .get_arguments()
            .map(|argument| argument.get_id().to_string())
            .filter(|id| !["help", "version"].contains(&id.as_str()))
            .collect();
        assert!(global.contains(&"key".to_owned()), "{global:?}");
        for below in command.get_subcommands() {
            check(below, &global, below.get_name());
        }
    }

    #[test]
    fn the_help_names_every_command() {
        for command in Cli::command().get_subcommands() {
            let name = format!("\n  {}", command.get_name());
            assert!(
                HELP.contains(&format!("{name} ")) || HELP.contains(&format!("{name}\n")),
                "`{}` is missing in the help",
                command.get_name()
            );
        }
    }

    #[test]
    fn the_help_reads_well() {
        insta::assert_snapshot!(Cli::command().term_width(100).render_help());
    }
}
