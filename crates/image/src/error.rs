//! Everything that can go wrong while a template is made, kept or removed. A message says what was being done, with
//! which thing, what went wrong and, where something can be done about it, what.

use std::path::{Path, PathBuf};

pub type Result<T, E = Error> = std::result::Result<T, E>;

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    #[error("cannot {doing} `{}`: {source}", path.display())]
    Io {
        doing: &'static str,
        path: PathBuf,
        source: std::io::Error,
    },
    /// A layer that is broken or hostile. Whose fault: whoever made the image.
    #[error("refused layer entry `{entry}`: {why}")]
    Layer { entry: String, why: String },
    #[error("the tar archive `{}` is not valid at byte {offset}: {why}", path.display())]
    Tar { path: PathBuf, offset: u64, why: String },
    #[error("limit reached: {what} is more than {limit}; raise the limit if you trust the source")]
    Limit { what: String, limit: u64 },
    #[error("`{}` is not a usable EROFS image: {why}", path.display())]
    Erofs { path: PathBuf, why: String },
    #[error("`{path}` in the image: {why}")]
    Path { path: String, why: &'static str },
    #[error(
        "`{name}` is not a template name: use 1 to 63 characters of a-z, 0-9, `.`, `_` and `-`, starting with a letter or digit"
    )]
    BadName { name: String },
    #[error("no template `{wanted}`; `atoll template list` shows those that exist")]
    NotFound { wanted: String },
    #[error("template `{id}` is in use{by}; kill those sandboxes first")]
    InUse { id: String, by: String },
    #[error(
        "the template's environment, commands and settings take {bytes} bytes, and may take {most}; put large values into files"
    )]
    TooMuchSaid { bytes: usize, most: usize },
    #[error("{0}")]
    Refused(atoll_types::Fault),
    #[error("the template store is damaged: {why}; rebuild the template")]
    Damaged { why: String },
    #[error("`{program}` is needed to {purpose} but was not found; install it with `{install}`")]
    MissingProgram {
        program: &'static str,
        purpose: &'static str,
        install: &'static str,
    },
    #[error("`{program}` failed ({status}): {tail}")]
    Program {
        program: &'static str,
        status: String,
        tail: String,
    },
    #[error("`{reference}` is not an image reference: {why}")]
    BadReference { reference: String, why: String },
    #[error("cannot pull `{reference}`: {why}")]
    Registry { reference: String, why: String },
    #[error("the image `{image}` is not valid: {why}")]
    BadImage { image: String, why: String },
    #[error(
        "{what} does not match its digest: expected {expected}, got {actual}; the copy is damaged or was tampered with"
    )]
    Digest {
        what: String,
        expected: String,
        actual: String,
    },
    #[error("Dockerfile line {line}: {why}")]
    Dockerfile { line: usize, why: String },
    #[error("Dockerfile line {line}: `{command}` ended with exit code {code}")]
    StepFailed { line: usize, command: String, code: i32 },
    #[error("Dockerfile line {line}: the build sandbox failed: {why}")]
    Runner { line: usize, why: String },
    #[error("{0}")]
    Invalid(String),
    #[error("the build was stopped before it was finished")]
    Stopped,
}

impl Error {
    pub(crate) fn layer(entry: &[u8], why: impl Into<String>) -> Self {
        Self::Layer {
            entry: show(entry),
            why: why.into(),
        }
    }
}

/// Bytes that should be text, made safe to print.
pub(crate) fn show(bytes: &[u8]) -> String {
    let mut text: String = String::from_utf8_lossy(bytes).chars().take(200).collect();
    text = text.escape_debug().to_string();
    text
}

pub(crate) trait IoContext<T> {
    fn doing(self, doing: &'static str, path: &Path) -> Result<T>;
}

impl<T> IoContext<T> for std::io::Result<T> {
    fn doing(self, doing: &'static str, path: &Path) -> Result<T> {
        self.map_err(|source| Error::Io {
            doing,
            path: path.to_owned(),
            source,
        })
    }
}
