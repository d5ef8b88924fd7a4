//! What must hold for each thing that reads what strangers send.

pub mod apis;
pub mod files;
pub mod guest;
pub mod models;
pub mod network;
pub mod workflows;

use std::path::Path;

/// A directory for one input; in memory where there is such a place.
fn scratch() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    let made = if memory.is_dir() {
        tempfile::tempdir_in(memory)
    } else {
        tempfile::tempdir()
    };
    made.expect("a directory for scratch can be made")
}

/// A runtime for one input, on this thread.
fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime can be made")
        .block_on(future)
}

/// The same JSON object with a field that nobody knows; `None` if it is no object.
fn with_unknown_field(body: &[u8]) -> Option<Vec<u8>> {
    let value: serde_json::Value = serde_json::from_slice(body).ok()?;
    let object = value.as_object()?;
    let brace = body.iter().position(|byte| *byte == b'{')?;
    let field: &[u8] = if object.is_empty() {
        br#""zz_unknown":1"#
    } else {
        br#""zz_unknown":1,"#
    };
    let mut more = body[..=brace].to_vec();
    more.extend_from_slice(field);
    more.extend_from_slice(&body[brace + 1..]);
    Some(more)
}

/// The input as a few texts, cut at NUL.
fn texts(input: &[u8]) -> Option<Vec<&str>> {
    let text = std::str::from_utf8(input).ok()?;
    Some(text.split('\0').collect())
}
