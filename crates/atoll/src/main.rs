//! `atoll`: the server and the command line in one program.

mod args;
mod assets;
mod attach;
mod commands;
mod config;
mod confinement;
mod data;
mod limits;
mod logging;
mod memory;
mod otlp;
mod outside;
mod parting;
mod server;
mod tls;
mod watchdog;
mod workflows;

use std::process::ExitCode;

use atoll_client::output::{Doing, OWN_FAILURE, Output, Result};
use clap::{CommandFactory, Parser};

use crate::args::{ArtifactCommand, Cli, Command, Global, ServerArgs};
use crate::config::Config;
use crate::parting::Half;

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are answers, not failures.
            let failed = error.use_stderr();
            let _gone = error.print();
            return ExitCode::from(if failed { OWN_FAILURE } else { 0 });
        }
    };
    let json = cli.global.json;
    let Cli { global, command } = cli;
    let outcome = match command {
        Command::Server(args) => serve(&global, &args),
        command => in_runtime(run(Cli { global, command })),
    };
    match outcome {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            error.report(json);
            ExitCode::from(error.exit)
        }
    }
}

/// A server parts and confines itself first, while this process has one thread.
fn serve(global: &Global, args: &ServerArgs) -> Result<u8> {
    let config = Config::load(args, global.data.as_deref())?;
    server::raise_limits();
    memory::limit_heaps();
    match parting::part(&config)? {
        Half::Front(start) => {
            in_runtime(async { Box::pin(server::run(global, &config, start)).await.map(|()| 0) })
        }
        Half::Helper { data, front } => {
            in_runtime(async { Box::pin(parting::help(&config, &data, front)).await.map(|()| 0) })
        }
    }
}

fn in_runtime(work: impl Future<Output = Result<u8>>) -> Result<u8> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .doing("cannot start")?;
    let outcome = runtime.block_on(work);
    // A thread may still be reading stdin; nothing is lost by not waiting for it.
    runtime.shutdown_background();
    outcome
}

/// Runs one command; returns its exit code.
async fn run(cli: Cli) -> Result<u8> {
    let Cli { global, command } = cli;
    let output = Output { json: global.json };
    let global = &global;
    match command {
        // Not here: it has to begin before there are threads.
        Command::Server(_) => return Ok(OWN_FAILURE),
        Command::Run(args) => return Box::pin(commands::run::run(global, output, args)).await,
        Command::Create(args) => commands::sandbox::create(global, output, args).await?,
        Command::Exec(args) => return commands::exec::exec(global, output, args).await,
        Command::Shell(args) => return commands::exec::shell(global, args).await,
        Command::Cp(args) => Box::pin(commands::cp::cp(global, output, args)).await?,
        Command::Ls(args) => commands::sandbox::ls(global, output, args).await?,
        Command::Ps(args) => commands::exec::ps(global, output, args).await?,
        Command::Logs(args) => return commands::exec::logs(global, output, args).await,
        Command::Port(args) => commands::sandbox::port(global, output, args).await?,
        Command::Inspect(args) => commands::sandbox::inspect(global, output, args).await?,
        Command::Stats(args) => commands::sandbox::stats(global, output, args).await?,
        Command::Instances(args) => commands::instances::instances(global, output, args).await?,
        Command::Extend(args) => commands::sandbox::extend(global, output, args).await?,
        Command::Update(args) => commands::update::update(global, output, args).await?,
        Command::Kill(args) => commands::sandbox::kill(global, output, args).await?,
        Command::Pause(args) => commands::state::pause(global, output, args).await?,
        Command::Resume(args) => commands::state::resume(global, output, args).await?,
        Command::Stop(args) => commands::state::stop(global, output, args).await?,
        Command::Start(args) => commands::state::start(global, output, args).await?,
        Command::Fork(args) => commands::state::fork(global, output, args).await?,
        Command::Snapshot(command) => Box::pin(commands::snapshot::run(global, output, command)).await?,
        Command::Volume(command) => Box::pin(commands::volume::run(global, output, command)).await?,
        Command::Net(command) => Box::pin(commands::net::run(global, output, command)).await?,
        Command::Secret(command) => Box::pin(commands::secret::run(global, output, command)).await?,
        Command::Gc(args) => Box::pin(commands::state::gc(global, output, args)).await?,
        Command::Provider(command) => Box::pin(commands::models::provider(global, output, command)).await?,
        Command::Model(command) => Box::pin(commands::models::model(global, output, command)).await?,
        Command::Budget(command) => Box::pin(commands::models::budget(global, output, command)).await?,
        Command::Spend(args) => Box::pin(commands::models::spend(global, output, args)).await?,
        Command::ScriptedProvider(args) => commands::scripted::run(output, &args).await?,
        Command::Template(command) => Box::pin(commands::template::run(global, output, command)).await?,
        Command::Artifact(command) => artifact(global, output, command).await?,
        Command::Workflow(command) => Box::pin(commands::workflow::run(global, output, command)).await?,
        Command::Approval(command) => Box::pin(commands::approval::run(global, output, command)).await?,
        Command::Key(command) => commands::key::run(global, output, command).await?,
        Command::Project(command) => commands::project::run(global, output, command).await?,
        Command::Usage(args) => commands::ledger::usage(global, output, args).await?,
        Command::Ledger(args) => commands::ledger::ledger(global, output, args).await?,
        Command::Events(args) => commands::events::events(global, output, args).await?,
        Command::E2b(command) => commands::e2b::run(global, output, command).await?,
        Command::Doctor(args) => return Box::pin(commands::doctor::run(global, output, args)).await,
        Command::Bench(command) => return Box::pin(commands::bench::run(global, output, command)).await,
        Command::Demo(_) => Box::pin(commands::demo::run(global, output)).await?,
        Command::Completions(args) => {
            clap_complete::generate(args.shell, &mut Cli::command(), "atoll", &mut std::io::stdout());
        }
    }
    Ok(0)
}

async fn artifact(global: &Global, output: Output, command: ArtifactCommand) -> Result<()> {
    Box::pin(commands::artifact::run(global, output, command)).await
}
