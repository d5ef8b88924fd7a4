//! This very program as a server in a process of its own: measured by the bench, killed by the demo. And what whoever starts
//! programs needs: where they are, and a directory for what they write.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use tokio::process::{Child, Command};

use crate::client::Client;
use crate::local;
use crate::output::{Doing, Error, Result};

const START_WITHIN: Duration = Duration::from_secs(60);

/// Killed when it is dropped.
#[derive(Debug)]
pub struct ServerProcess {
    pub process: Child,
    pub pid: u32,
    pub client: Client,
}

impl ServerProcess {
    /// Starts a server on the given data and templates, and waits until it answers. `arguments` go to `atoll server`. Its log
    /// is beside the data.
    pub async fn start(data: &Path, templates: &Path, arguments: &[&str]) -> Result<Self> {
        let program = std::env::current_exe().doing("cannot find this program")?;
        let log_path = data.with_extension("log");
        let log = std::fs::File::create(&log_path).doing("cannot write a log")?;
        let mut process = Command::new(program)
            .arg("server")
            .args(["--listen", "127.0.0.1:0", "--data"])
            .arg(data)
            .arg("--templates")
            .arg(templates)
            .args(arguments)
            .env("ATOLL_LOG", "warn")
            .env_remove("ATOLL_URL")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .kill_on_drop(true)
            .spawn()
            .doing("cannot start the server")?;
        let pid = process
            .id()
            .ok_or_else(|| Error::new("the server ended at once"))?;
        let began = Instant::now();
        loop {
            // What a killed server left behind names another process.
            let running = local::running_server(data).filter(|server| server.pid == pid);
            if let (Some(server), Some(key)) = (running, local::read_admin_key(data)) {
                let client = Client::new(&server.url, Some(key))?;
                return Ok(Self { process, pid, client });
            }
            let ended = process.try_wait().doing("cannot watch the server")?;
            if ended.is_some() || began.elapsed() > START_WITHIN {
                let log = std::fs::read_to_string(&log_path).unwrap_or_default();
                return Err(Error::new(format!("the server did not start: {}", log.trim())));
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

/// A directory on a real disk, where people keep their data; /tmp may be memory.
pub fn scratch() -> Result<tempfile::TempDir> {
    let var = PathBuf::from("/var/tmp");
    let parent = if var.is_dir() { var } else { std::env::temp_dir() };
    tempfile::Builder::new()
        .prefix("atoll-")
        .tempdir_in(parent)
        .doing("cannot make a directory")
}

/// A program that would be found by its name.
pub fn find_in_path(program: &str) -> Option<PathBuf> {
    std::env::split_paths(&std::env::var_os("PATH")?)
        .map(|dir| dir.join(program))
        .find(|path| path.is_file())
}
