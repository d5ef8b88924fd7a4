//! `atoll bench sandbox`, `state`, `egress`, `e2b`, `gateway` and `workflow`: speed tables, measured on this machine, ours and the peer's in turn
//! within one run. `soak` and `cycles` measure nothing but whether everything comes back where it was.

mod cases;
mod cycles;
mod e2b;
mod egress;
mod gateway;
mod host;
mod peers;
mod raw;
mod row;
mod soak;
mod state;
mod subject;
mod workflow;

use std::path::{Path, PathBuf};

use atoll_image::Templates;

use crate::args::{
    BenchArgs, BenchCyclesArgs, BenchE2bArgs, BenchEgressArgs, BenchGatewayArgs, BenchSandboxArgs,
    BenchSoakArgs, BenchStateArgs, BenchWorkflowArgs, Global, ServerArgs,
};
use crate::config::Config;
use crate::output::{Doing, Error, Output, Result, stderr};

use cases::Case;
use e2b::{E2bCase, WithSdk};
use egress::{EgressCase, InWorld, World};
use gateway::GatewayCase;
use row::Row;
pub(crate) use soak::{Attack, parse_attacks};
use state::StateCase;
use workflow::{WithPeer, WorkflowCase};

/// Something that is measured in one go and gives one or more rows.
trait Measured: Copy {
    fn rows(self) -> &'static [&'static str];

    /// Left out by `--quick`.
    fn is_slow(self) -> bool;

    /// Starts a server of its own, measures, and leaves nothing behind, also when something went wrong.
    async fn measure(self, setting: &Setting) -> Result<Vec<Row>>;
}

/// What all cases share.
#[derive(Debug)]
struct Setting {
    quick: bool,
    /// How many sandboxes a row about density has.
    many: usize,
    templates: PathBuf,
    /// The root filesystem of `base`, for the peers.
    image: PathBuf,
    runsc: Option<PathBuf>,
    /// For the peers' files.
    dir: tempfile::TempDir,
}

impl Setting {
    fn rounds(&self, full: usize) -> usize {
        if self.quick { (full / 5).max(3) } else { full }
    }

    fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// The `runsc` to measure against.
    fn runsc(&self) -> Result<&Path> {
        self.runsc.as_deref().ok_or_else(|| {
            Error::new("there is no runsc here").hint("./atoll builds one; or set ATOLL_RUNSC")
        })
    }
}

/// Exit code 0 when every bar was met, else 1.
pub(crate) async fn sandbox(global: &Global, output: Output, args: &BenchSandboxArgs) -> Result<u8> {
    table(global, output, &args.rows, args.idle_count, &Case::ALL).await
}

/// Exit code 0 when every bar was met, else 1.
pub(crate) async fn state(global: &Global, output: Output, args: &BenchStateArgs) -> Result<u8> {
    table(global, output, &args.rows, args.paused_count, &StateCase::ALL).await
}

/// Exit code 0 when every bar was met, else 1.
pub(crate) async fn gateway(global: &Global, output: Output, args: &BenchGatewayArgs) -> Result<u8> {
    table(global, output, &args.rows, args.streams, &GatewayCase::ALL).await
}

/// Exit code 0 when every bar was met, else 1.
pub(crate) fn egress(global: &Global, output: Output, args: &BenchEgressArgs) -> Result<u8> {
    let world = match args.rows.list {
        true => Err(Error::new("not needed")),
        false => World::build(),
    };
    let why = world.as_ref().err().map(ToString::to_string).unwrap_or_default();
    let world = world.as_ref().map_err(|_| why.as_str());
    let cases = EgressCase::ALL.map(|case| InWorld { case, world });
    // All threads of a runtime are where the one is that builds it.
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            if let Ok(world) = world {
                world.enter()?;
            }
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .enable_all()
                .build()
                .doing("cannot start")?;
            runtime.block_on(table(global, output, &args.rows, args.sandboxes, &cases))
        });
        thread
            .join()
            .unwrap_or_else(|_| Err(Error::new("the bench died")))
    })
}

/// Exit code 0 when every bar was met, else 1.
pub(crate) async fn e2b(global: &Global, output: Output, args: &BenchE2bArgs) -> Result<u8> {
    let cases = E2bCase::ALL.map(|case| WithSdk {
        case,
        python: &args.python,
    });
    table(global, output, &args.rows, 0, &cases).await
}

/// Exit code 0 when every bar was met, else 1.
pub(crate) async fn workflow(global: &Global, output: Output, args: &BenchWorkflowArgs) -> Result<u8> {
    let cases = WorkflowCase::ALL.map(|case| WithPeer {
        case,
        temporal: args.temporal.as_deref(),
    });
    table(global, output, &args.rows, 0, &cases).await
}

/// Exit code 0 when everything came back and nothing was found, else 1.
pub(crate) async fn soak(global: &Global, output: Output, args: &BenchSoakArgs) -> Result<u8> {
    soak::run(global, output, args).await
}

/// Exit code 0 when everything was kept and nothing grew, else 1.
pub(crate) async fn cycles(global: &Global, output: Output, args: &BenchCyclesArgs) -> Result<u8> {
    cycles::run(global, output, args).await
}

async fn table<M: Measured>(
    global: &Global,
    output: Output,
    args: &BenchArgs,
    many: usize,
    all: &[M],
) -> Result<u8> {
    let cases: Vec<M> = all.iter().copied().filter(|case| wanted(args, *case)).collect();
    if args.list {
        let names: Vec<&str> = cases.iter().flat_map(|case| case.rows()).copied().collect();
        for name in &names {
            output.line(name);
        }
        output.json(&serde_json::json!(names));
        return Ok(0);
    }
    if cases.is_empty() {
        return Err(Error::new("no row has such a name").hint("--list prints the names"));
    }
    let setting = prepare(global, args, many)?;
    let mut rows: Vec<Row> = Vec::new();
    for case in cases {
        progress(&format!("measuring {}", case.rows().join(", ")));
        let measured = match Box::pin(case.measure(&setting)).await {
            Ok(measured) => measured,
            // One row that cannot be measured does not hide the others.
            Err(error) => case
                .rows()
                .iter()
                .map(|name| Row::failed(name, error.to_string()))
                .collect(),
        };
        for row in &measured {
            if let Some(note) = &row.note {
                progress(&format!("  {}: {note}", row.name));
            }
        }
        rows.extend(
            measured
                .into_iter()
                .filter(|row| args.only.is_empty() || named(args, &row.name)),
        );
    }
    let cells: Vec<_> = rows.iter().map(Row::cells).collect();
    output.table(
        [
            "WHAT",
            "OURS p50 (p99)",
            "PEER p50 (p99)",
            "PEER",
            "RATIO",
            "BAR",
            "",
        ],
        &cells,
        "no rows",
    );
    output.json(&serde_json::to_value(&rows).doing("cannot print the rows")?);
    Ok(u8::from(rows.iter().any(|row| !row.met)))
}

fn wanted(args: &BenchArgs, case: impl Measured) -> bool {
    if args.only.is_empty() {
        return !(args.quick && case.is_slow());
    }
    case.rows().iter().any(|name| named(args, name))
}

fn named(args: &BenchArgs, name: &str) -> bool {
    args.only.iter().any(|only| name.contains(only.as_str()))
}

/// The configuration that holds here, and the root filesystem of `base`.
fn base(global: &Global) -> Result<(Config, PathBuf)> {
    let server = ServerArgs {
        templates: std::env::var_os("ATOLL_TEMPLATES").map(PathBuf::from),
        ..ServerArgs::default()
    };
    let config = Config::load(&server, global.data.as_deref())?;
    let templates = Templates::open(&config.templates).doing("cannot open the templates")?;
    let base = templates
        .find("base")
        .doing("cannot look for the template `base`")?
        .ok_or_else(|| Error::new("the template `base` is not built").hint("atoll template build base"))?;
    let image = templates.image_path(&base);
    Ok((config, image))
}

/// Where templates are, of which `base` is one.
fn templates(global: &Global) -> Result<PathBuf> {
    base(global).map(|(config, _)| config.templates)
}

fn prepare(global: &Global, args: &BenchArgs, many: usize) -> Result<Setting> {
    let (config, image) = base(global)?;
    Ok(Setting {
        quick: args.quick,
        many,
        image,
        templates: config.templates,
        runsc: args.peer_runsc.clone().or(config.runsc),
        // Where ours are too: what a peer writes must meet the same disk.
        dir: crate::child::scratch()?,
    })
}

/// What is going on, on stderr, also with `--json`: a bench takes minutes.
fn progress(text: &str) {
    stderr(format_args!("{text}\n"));
}
