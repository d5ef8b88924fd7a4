//! The server on this machine, as its data directory tells of it: where it listens, and the key of its first user.

use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// How the CLI finds the running server.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ServerFile {
    pub url: String,
    pub pid: u32,
    /// Lives only as long as one `atoll run`: others must not rely on it.
    #[serde(default)]
    pub embedded: bool,
    /// Where workflows are served, if they are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workflows: Option<String>,
    /// Where TLS is spoken, if it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls: Option<TlsFile>,
}

/// How clients that want TLS find the server.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct TlsFile {
    pub domain: String,
    pub port: u16,
    /// The certificate of the authority that they have to trust; `None`: the operator's own, which is trusted as it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub authority: Option<PathBuf>,
}

/// Where the data are, unless the user says otherwise.
pub fn default_dir() -> PathBuf {
    if rustix::process::geteuid().is_root() {
        return PathBuf::from("/var/lib/atoll");
    }
    let share = std::env::var_os("XDG_DATA_HOME")
        .map(PathBuf::from)
        .filter(|path| path.is_absolute())
        .or_else(|| std::env::home_dir().map(|home| home.join(".local/share")));
    share.unwrap_or_else(std::env::temp_dir).join("atoll")
}

/// The server that runs on this data directory, if its process is alive.
pub fn running_server(path: &Path) -> Option<ServerFile> {
    let text = fs::read(path.join("server.json")).ok()?;
    let server: ServerFile = serde_json::from_slice(&text).ok()?;
    Path::new(&format!("/proc/{}", server.pid))
        .exists()
        .then_some(server)
}

pub fn read_admin_key(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path.join("admin.key")).ok()?;
    Some(text.trim().to_owned()).filter(|key| !key.is_empty())
}
