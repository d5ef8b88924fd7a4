//! Everything that this program says. People get aligned tables and short lines, programs get JSON; errors and progress go
//! to stderr so that stdout can be piped.
//!
//! What must hold: names, link targets and messages come from sandboxes, which are hostile, and a terminal obeys what it is
//! sent. So every text for people passes [`harmless`]; only what a command itself printed is passed on as it is.

use std::borrow::Cow;
use std::fmt::{self, Display};
use std::io::{self, IsTerminal, Write};
use std::time::Duration;

use atoll_types::Code;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::Value;

/// The exit code for failures of our own, apart from those of the command that was run.
pub const OWN_FAILURE: u8 = 125;

/// What went wrong, and what to do about it.
#[derive(Debug)]
pub struct Error {
    pub message: String,
    pub hint: Option<String>,
    /// The machine-readable name, where the server gave one.
    pub code: Option<String>,
    /// What this program exits with.
    pub exit: u8,
}

pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub fn new(message: impl Into<String>) -> Self {
        Self {
            message: message.into(),
            hint: None,
            code: None,
            exit: OWN_FAILURE,
        }
    }

    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// For a command that could not be started: the exit code that a shell would have.
    #[must_use]
    pub fn into_start_failure(mut self) -> Self {
        if self.is(Code::NotFoundInSandbox) {
            self.exit = 127;
        } else if self.is(Code::PermissionDeniedInSandbox) {
            self.exit = 126;
        }
        self
    }

    /// Whether the server gave this reason.
    pub fn is(&self, code: Code) -> bool {
        self.code.as_deref() == Some(code.text())
    }

    pub fn report(&self, json: bool) {
        if json {
            let body =
                serde_json::json!({"error": {"code": self.code, "message": self.message, "hint": self.hint}});
            stderr(format_args!("{body}\n"));
            return;
        }
        let (red, plain) = if io::stderr().is_terminal() {
            ("\x1b[31m", "\x1b[0m")
        } else {
            ("", "")
        };
        stderr(format_args!(
            "{red}error:{plain} {}\n",
            harmless(&self.message, LINES)
        ));
        if let Some(hint) = &self.hint {
            stderr(format_args!(" hint: {}\n", harmless(hint, LINES)));
        }
    }
}

impl Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        match &self.hint {
            Some(hint) => write!(f, " ({hint})"),
            None => Ok(()),
        }
    }
}

impl From<atoll_types::Fault> for Error {
    fn from(fault: atoll_types::Fault) -> Self {
        Self {
            message: fault.message,
            hint: fault.hint,
            code: Some(fault.code.text().into()),
            exit: OWN_FAILURE,
        }
    }
}

/// Adds what was being done to an error of the system.
pub trait Doing<T> {
    fn doing(self, what: impl Display) -> Result<T>;
}

impl<T, E: Display> Doing<T> for std::result::Result<T, E> {
    fn doing(self, what: impl Display) -> Result<T> {
        self.map_err(|error| Error::new(format!("{what}: {error}")))
    }
}

/// How results are shown.
#[derive(Debug, Clone, Copy)]
pub struct Output {
    pub json: bool,
}

impl Output {
    /// One line for people; nothing with `--json`.
    pub fn line(self, text: impl Display) {
        if !self.json {
            stdout(format_args!("{}\n", harmless(&text.to_string(), LINES)));
        }
    }

    /// As [`Output::line`], for text that holds nothing but ours, with its colours.
    pub fn own_line(self, text: impl Display) {
        if !self.json {
            stdout(format_args!("{text}\n"));
        }
    }

    /// The result for programs; nothing without `--json`.
    pub fn json(self, value: &Value) {
        if self.json {
            stdout(format_args!("{value:#}\n"));
        }
    }

    /// One of many results for programs, each on a line of its own and as soon as it is there; nothing without `--json`.
    pub fn json_line(self, value: &Value) {
        if self.json {
            stdout(format_args!("{value}\n"));
        }
    }

    /// A note on stderr for people; nothing with `--json`.
    pub fn note(self, text: impl Display) {
        if !self.json {
            stderr(format_args!("{}\n", harmless(&text.to_string(), LINES)));
        }
    }

    /// Rows under headings, columns as wide as they need to be. With no rows it says so.
    pub fn table<const N: usize>(self, headings: [&str; N], rows: &[[String; N]], none: &str) {
        if self.json {
            return;
        }
        if rows.is_empty() {
            stderr(format_args!("{none}\n"));
            return;
        }
        stdout(format_args!("{}", table(headings, rows)));
    }
}

/// What may stand in a text of several lines, and not in the cell of a table.
const LINES: &[char] = &['\n', '\t'];

/// The text without anything that a terminal would obey, or that would turn what stands around it: such characters are
/// written as in source code, but for those to be kept.
pub fn harmless<'a>(text: &'a str, kept: &[char]) -> Cow<'a, str> {
    let harms = |c: char| {
        let turns = matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        (c.is_control() || turns) && !kept.contains(&c)
    };
    if !text.contains(harms) {
        return Cow::Borrowed(text);
    }
    let mut safe = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if harms(c) {
            safe.extend(c.escape_default());
        } else {
            safe.push(c);
        }
    }
    Cow::Owned(safe)
}

fn table<const N: usize>(headings: [&str; N], rows: &[[String; N]]) -> String {
    let mut widths = headings.map(|text| text.chars().count());
    let rows: Vec<_> = rows
        .iter()
        .map(|row| row.each_ref().map(|cell| harmless(cell, &[])))
        .collect();
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    let mut push = |cells: [&str; N]| {
        let mut line = String::new();
        for (cell, width) in cells.iter().zip(widths) {
            line.push_str(cell);
            line.extend(std::iter::repeat_n(' ', width - cell.chars().count() + 3));
        }
        text.push_str(line.trim_end());
        text.push('\n');
    };
    push(headings);
    for row in &rows {
        push(row.each_ref().map(AsRef::as_ref));
    }
    text
}

/// Writes to stdout. A reader that has gone away (`atoll ls | head`) is not an error.
pub fn stdout(text: fmt::Arguments<'_>) {
    let mut out = io::stdout().lock();
    let _gone = out.write_fmt(text).and_then(|()| out.flush());
}

pub fn stderr(text: fmt::Arguments<'_>) {
    let _gone = io::stderr().lock().write_fmt(text);
}

/// A question on stderr, in whatever form results are shown.
pub fn prompt(text: fmt::Arguments<'_>) {
    stderr(text);
}

/// A bar over bytes; invisible unless stderr is a terminal and the size is worth it.
pub fn byte_bar(output: Output, label: &str, total: Option<u64>) -> ProgressBar {
    let small = total.is_some_and(|total| total < 4 * atoll_types::MIB);
    if output.json || small || !io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let (bar, template) = match total {
        Some(total) => (
            ProgressBar::new(total),
            "{msg} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec}",
        ),
        None => (
            ProgressBar::new_spinner(),
            "{spinner} {msg} {bytes} {bytes_per_sec}",
        ),
    };
    bar.set_style(style(template));
    bar.set_message(harmless(label, &[]).into_owned());
    bar.enable_steady_tick(Duration::from_millis(100));
    bar
}

/// A bar over the stages of something long, such as a template build.
#[derive(Debug)]
pub struct Stages {
    output: Output,
    bar: Option<ProgressBar>,
    stage: String,
}

impl Stages {
    pub fn new(output: Output) -> Self {
        let bar = (!output.json && io::stderr().is_terminal()).then(ProgressBar::new_spinner);
        if let Some(bar) = &bar {
            bar.enable_steady_tick(Duration::from_millis(100));
        }
        Self {
            output,
            bar,
            stage: String::new(),
        }
    }

    pub fn progress(&mut self, stage: &str, done: u64, total: u64) {
        match &self.bar {
            Some(bar) => {
                if total == 0 {
                    bar.set_style(style("{spinner} {msg} {elapsed}"));
                } else {
                    let sizes = if total > 100_000 {
                        "{bytes}/{total_bytes}"
                    } else {
                        "{pos}/{len}"
                    };
                    bar.set_style(style(&format!(
                        "{{spinner}} {{msg}} [{{bar:30}}] {sizes} {{elapsed}}"
                    )));
                    bar.set_length(total);
                    bar.set_position(done.min(total));
                }
                bar.set_message(harmless(stage, &[]).into_owned());
            }
            // Without a terminal: one line per stage.
            None if stage != self.stage => self.output.note(format_args!("  {stage}")),
            None => {}
        }
        stage.clone_into(&mut self.stage);
    }

    pub fn log(&self, line: &str) {
        match &self.bar {
            Some(bar) => bar.println(harmless(line.trim_end(), LINES)),
            None => self.output.note(line.trim_end()),
        }
    }

    pub fn finish(self) {
        if let Some(bar) = self.bar {
            bar.finish_and_clear();
        }
    }
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template)
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        .progress_chars("━━┄")
}

/// `3m 20s`, `45s`, `120ms`: two units at most.
pub fn duration(millis: u64) -> String {
    let seconds = millis / 1000;
    match (
        seconds / 86_400,
        seconds / 3600 % 24,
        seconds / 60 % 60,
        seconds % 60,
    ) {
        (0, 0, 0, 0) => format!("{millis}ms"),
        (0, 0, 0, s) => format!("{s}s"),
        (0, 0, m, 0) => format!("{m}m"),
        (0, 0, m, s) => format!("{m}m {s}s"),
        (0, h, 0, _) => format!("{h}h"),
        (0, h, m, _) => format!("{h}h {m}m"),
        (d, 0, _, _) => format!("{d}d"),
        (d, h, _, _) => format!("{d}d {h}h"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_align() {
        let rows = [
            ["sbx_a".to_owned(), "running".to_owned(), String::new()],
            ["sbx_longer".to_owned(), "failed".to_owned(), "x".to_owned()],
        ];
        insta::assert_snapshot!(table(["ID", "STATE", "WHY"], &rows), @r"
        ID           STATE     WHY
        sbx_a        running
        sbx_longer   failed    x
        ");
    }

    #[test]
    fn nothing_that_a_sandbox_says_moves_a_terminal() {
        let rows = [[
            "a\x1b]0;owned\x07\nroot".to_owned(),
            "\u{9b}31m\u{202e}txt".to_owned(),
        ]];
        insta::assert_snapshot!(table(["NAME", "TARGET"], &rows), @r"
        NAME                         TARGET
        a\u{1b}]0;owned\u{7}\nroot   \u{9b}31m\u{202e}txt
        ");
        assert_eq!(
            harmless("two\nlines\tand \x1b[2J", LINES),
            "two\nlines\tand \\u{1b}[2J"
        );
        assert!(matches!(harmless("naïve 中文 \\", &[]), Cow::Borrowed(_)));
    }

    #[test]
    fn durations_read_well() {
        for (millis, text) in [
            (0, "0ms"),
            (45_000, "45s"),
            (200_000, "3m 20s"),
            (3_600_000, "1h"),
            (90_000_000, "1d 1h"),
        ] {
            assert_eq!(duration(millis), text);
        }
    }
}
