//! `atoll bench sandbox`: the speed table, measured on this machine, ours and the peer's in turn within one run.

mod cases;
mod host;
mod peers;
mod row;
mod subject;

use std::path::{Path, PathBuf};

use atoll_image::Templates;

use crate::args::{BenchSandboxArgs, Global, ServerArgs};
use crate::config::Config;
use crate::output::{Doing, Error, Output, Result, stderr};

use cases::Case;
use row::Row;

/// What all cases share.
#[derive(Debug)]
struct Setting {
    quick: bool,
    idle_count: usize,
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

    /// The `runsc` to measure against and with.
    fn runsc(&self) -> Result<&Path> {
        self.runsc.as_deref().ok_or_else(|| {
            Error::new("there is no runsc here").hint("./atoll builds one; or set ATOLL_RUNSC")
        })
    }
}

/// Exit code 0 when every bar was met, else 1.
pub(crate) async fn sandbox(global: &Global, output: Output, args: &BenchSandboxArgs) -> Result<u8> {
    let cases: Vec<Case> = Case::ALL.into_iter().filter(|case| wanted(args, *case)).collect();
    if args.list {
        for case in cases {
            for name in case.rows() {
                Output { json: false }.line(name);
            }
        }
        return Ok(0);
    }
    if cases.is_empty() {
        return Err(
            Error::new("no row has such a name").hint("`atoll bench sandbox --list` prints the names")
        );
    }
    let setting = prepare(global, args)?;
    let mut rows: Vec<Row> = Vec::new();
    for case in cases {
        progress(&format!("measuring {}", case.rows().join(", ")));
        let measured = match Box::pin(case.measure(&setting)).await {
            Ok(measured) => measured,
            // One row that cannot be measured does not hide the others.
            Err(error) => case.failed(&error.to_string()),
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

fn wanted(args: &BenchSandboxArgs, case: Case) -> bool {
    if args.only.is_empty() {
        return !(args.quick && case.is_slow());
    }
    case.rows().iter().any(|name| named(args, name))
}

fn named(args: &BenchSandboxArgs, name: &str) -> bool {
    args.only.iter().any(|only| name.contains(only.as_str()))
}

fn prepare(global: &Global, args: &BenchSandboxArgs) -> Result<Setting> {
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
    Ok(Setting {
        quick: args.quick,
        idle_count: args.idle_count,
        image: templates.image_path(&base),
        templates: config.templates,
        runsc: config.runsc,
        dir: tempfile::tempdir().doing("cannot make a temporary directory")?,
    })
}

/// What is going on, on stderr, also with `--json`: a bench takes minutes.
fn progress(text: &str) {
    stderr(format_args!("{text}\n"));
}
