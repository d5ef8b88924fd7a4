//! `atoll bench`: what was asked for, in the words of the benchmarks.

use std::path::PathBuf;

use atoll_bench::{CyclesOptions, Place, Rows, SoakOptions};
use atoll_client::output::{Output, Result};

use crate::args::{BenchArgs, BenchCommand, Global, ServerArgs};
use crate::config::Config;

/// Runs one of them; the exit code says whether every bar was met.
pub(crate) async fn run(global: &Global, output: Output, command: BenchCommand) -> Result<u8> {
    let place = place(global)?;
    let place = &place;
    match command {
        BenchCommand::Sandbox(args) => {
            let rows = rows(args.rows);
            Box::pin(atoll_bench::sandbox(place, output, &rows, args.idle_count)).await
        }
        BenchCommand::State(args) => {
            let rows = rows(args.rows);
            Box::pin(atoll_bench::state(place, output, &rows, args.paused_count)).await
        }
        BenchCommand::Egress(args) => {
            let rows = rows(args.rows);
            atoll_bench::egress(place, output, &rows, args.sandboxes)
        }
        BenchCommand::Gateway(args) => {
            let rows = rows(args.rows);
            Box::pin(atoll_bench::gateway(place, output, &rows, args.streams)).await
        }
        BenchCommand::E2b(args) => {
            let rows = rows(args.rows);
            Box::pin(atoll_bench::e2b(place, output, &rows, &args.python)).await
        }
        BenchCommand::Workflow(args) => {
            let rows = rows(args.rows);
            let temporal = args.temporal.as_deref();
            Box::pin(atoll_bench::workflow(place, output, &rows, temporal)).await
        }
        BenchCommand::Soak(args) => {
            let options = SoakOptions {
                time_millis: args.time,
                seed: args.seed,
                attacks: args.attacks.to_vec(),
                keep_log: args.keep_log,
            };
            Box::pin(atoll_bench::soak(place, output, &options)).await
        }
        BenchCommand::Cycles(args) => {
            let options = CyclesOptions {
                count: args.count,
                every: args.every,
                hold: args.hold,
            };
            Box::pin(atoll_bench::cycles(place, output, options)).await
        }
    }
}

fn rows(args: BenchArgs) -> Rows {
    Rows {
        quick: args.quick,
        only: args.only,
        peer_runsc: args.peer_runsc,
        list: args.list,
    }
}

/// What a server here would be configured with.
fn place(global: &Global) -> Result<Place> {
    let server = ServerArgs {
        templates: std::env::var_os("ATOLL_TEMPLATES").map(PathBuf::from),
        ..ServerArgs::default()
    };
    let config = Config::load(&server, global.data.as_deref())?;
    Ok(Place {
        templates: config.templates,
        runsc: config.runsc,
    })
}
