//! Speed tables, measured on this machine, ours and the peer's in turn within one run: `atoll bench sandbox`, `state`, `egress`,
//! `e2b`, `gateway` and `workflow`. `soak` and `cycles` measure nothing but whether everything comes back where it was.
//!
//! What must hold:
//! - What is measured is a server in a process of its own ([`atoll_client::ServerProcess`]: the program that this is linked
//!   into), asked through its public APIs as any client would.
//! - Ours and the peer's take turns, so that whatever else the machine does, it does to both.
//! - A run leaves nothing behind, also when a row could not be measured.

mod cases;
mod cycles;
mod e2b;
mod egress;
mod gateway;
mod host;
mod interrupt;
mod peers;
mod raw;
mod row;
mod soak;
mod state;
mod subject;
mod workflow;

use std::path::{Path, PathBuf};

use atoll_client::output::{Doing, Error, Output, Result, stderr};
use atoll_client::scratch;
use atoll_image::Templates;

use cases::Case;
use e2b::{E2bCase, WithSdk};
use egress::{EgressCase, InWorld, World};
use gateway::GatewayCase;
use row::Row;
use state::StateCase;
use workflow::{WithPeer, WorkflowCase};

pub use cycles::{CyclesOptions, run as cycles};
pub use soak::{Attack, SoakOptions, parse_attacks, run as soak};

/// Which rows, and how thoroughly.
#[derive(Debug, Clone, Default)]
pub struct Rows {
    /// Fewer rounds, and none of the rows that take minutes.
    pub quick: bool,
    /// Only rows whose name contains one of these; all, if there are none.
    pub only: Vec<String>,
    /// The raw `runsc` to compare with, if it is not the one that sandboxes use.
    pub peer_runsc: Option<PathBuf>,
    /// Print the names of the rows and stop.
    pub list: bool,
}

/// What a server on this machine would find.
#[derive(Debug, Clone)]
pub struct Place {
    /// Where templates are.
    pub templates: PathBuf,
    pub runsc: Option<PathBuf>,
}

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
pub async fn sandbox(place: &Place, output: Output, rows: &Rows, idle_count: usize) -> Result<u8> {
    table(place, output, rows, idle_count, &Case::ALL).await
}

/// Exit code 0 when every bar was met, else 1.
pub async fn state(place: &Place, output: Output, rows: &Rows, paused_count: usize) -> Result<u8> {
    table(place, output, rows, paused_count, &StateCase::ALL).await
}

/// Exit code 0 when every bar was met, else 1.
pub async fn gateway(place: &Place, output: Output, rows: &Rows, streams: usize) -> Result<u8> {
    table(place, output, rows, streams, &GatewayCase::ALL).await
}

/// Exit code 0 when every bar was met, else 1.
pub fn egress(place: &Place, output: Output, rows: &Rows, sandboxes: usize) -> Result<u8> {
    let world = match rows.list {
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
            runtime.block_on(table(place, output, rows, sandboxes, &cases))
        });
        thread
            .join()
            .unwrap_or_else(|_| Err(Error::new("the bench died")))
    })
}

/// Exit code 0 when every bar was met, else 1.
pub async fn e2b(place: &Place, output: Output, rows: &Rows, python: &Path) -> Result<u8> {
    let cases = E2bCase::ALL.map(|case| WithSdk { case, python });
    table(place, output, rows, 0, &cases).await
}

/// Exit code 0 when every bar was met, else 1.
pub async fn workflow(place: &Place, output: Output, rows: &Rows, temporal: Option<&Path>) -> Result<u8> {
    let cases = WorkflowCase::ALL.map(|case| WithPeer { case, temporal });
    table(place, output, rows, 0, &cases).await
}

async fn table<M: Measured>(
    place: &Place,
    output: Output,
    wanted: &Rows,
    many: usize,
    all: &[M],
) -> Result<u8> {
    let cases: Vec<M> = all
        .iter()
        .copied()
        .filter(|case| is_wanted(wanted, *case))
        .collect();
    if wanted.list {
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
    let setting = prepare(place, wanted, many)?;
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
                .filter(|row| wanted.only.is_empty() || named(wanted, &row.name)),
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

fn is_wanted(wanted: &Rows, case: impl Measured) -> bool {
    if wanted.only.is_empty() {
        return !(wanted.quick && case.is_slow());
    }
    case.rows().iter().any(|name| named(wanted, name))
}

fn named(wanted: &Rows, name: &str) -> bool {
    wanted.only.iter().any(|only| name.contains(only.as_str()))
}

/// The root filesystem of `base`, without which nothing can be measured.
fn base(place: &Place) -> Result<PathBuf> {
    let templates = Templates::open(&place.templates).doing("cannot open the templates")?;
    let base = templates
        .find("base")
        .doing("cannot look for the template `base`")?
        .ok_or_else(|| Error::new("the template `base` is not built").hint("atoll template build base"))?;
    let files = templates.image_files(&base.digest);
    // Whom we compare with mount images as they are.
    match &files.doing("cannot read the template `base`")?[..] {
        [image] => Ok(image.clone()),
        _ => Err(Error::new(
            "the template `base` is a layer on another, which only Atoll can mount",
        )),
    }
}

fn prepare(place: &Place, wanted: &Rows, many: usize) -> Result<Setting> {
    Ok(Setting {
        quick: wanted.quick,
        many,
        image: base(place)?,
        templates: place.templates.clone(),
        runsc: wanted.peer_runsc.clone().or_else(|| place.runsc.clone()),
        // Where ours are too: what a peer writes must meet the same disk.
        dir: scratch()?,
    })
}

/// What is going on, on stderr, also with `--json`: a bench takes minutes.
fn progress(text: &str) {
    stderr(format_args!("{text}\n"));
}
