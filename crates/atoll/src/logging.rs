//! Structured logs of the server: for people on a terminal, for machines otherwise. `ATOLL_LOG` chooses what is logged,
//! in the syntax of `RUST_LOG`.

use std::io::{self, IsTerminal};

use atoll_client::output::{Error, Result};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, Registry, fmt};

use crate::args::LogFormat;
use crate::otlp;
use crate::watchdog;

type BoxedLayer = Box<dyn Layer<Registry> + Send + Sync>;

/// Starts logging to stderr, and to a collector if one is given. Returns what must be flushed at the end.
pub(crate) fn start(
    format: Option<LogFormat>,
    default: &str,
    otlp_endpoint: Option<&str>,
) -> Result<Option<otlp::Exporter>> {
    let filter = match std::env::var("ATOLL_LOG") {
        Ok(text) => EnvFilter::try_new(&text).map_err(|e| {
            Error::new(format!("ATOLL_LOG=`{text}` is not a filter: {e}"))
                .hint("write for example atoll=debug")
        })?,
        Err(_) => EnvFilter::new(default),
    };
    let terminal = io::stderr().is_terminal();
    let format = format.unwrap_or(if terminal {
        LogFormat::Pretty
    } else {
        LogFormat::Plain
    });
    let lines = fmt::layer().with_writer(io::stderr).with_ansi(terminal);
    let lines: BoxedLayer = match format {
        LogFormat::Pretty => lines.compact().with_target(false).boxed(),
        LogFormat::Plain => lines.boxed(),
        LogFormat::Json => lines.json().flatten_event(true).boxed(),
    };
    let (layer, exporter) = match otlp_endpoint {
        Some(endpoint) => {
            let (layer, exporter) = otlp::start(endpoint)?;
            (Some(layer), Some(exporter))
        }
        None => (None, None),
    };
    let layers: Vec<BoxedLayer> = std::iter::once(lines.with_filter(filter).boxed())
        .chain(layer)
        .chain([watchdog::layer().boxed()])
        .collect();
    tracing_subscriber::registry().with(layers).init();
    Ok(exporter)
}
