//! The server under test: this very program as a process of its own, on a small filesystem that can be full, with a clock
//! that can jump, killed and started again at the same addresses.

use std::fs::{self, File};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use atoll_client::output::{Doing, Error, Result};
use atoll_client::{local, scratch};
use rustix::mount::{MountFlags, UnmountFlags};
use rustix::process::Signal;
use tokio::process::{Child, Command};
use tokio::sync::Mutex;

use super::machine;

/// Longer than a start takes on a busy machine.
const START_WITHIN: Duration = Duration::from_secs(90);
/// How long a server that was asked to stop may take.
const STOP_WITHIN: Duration = Duration::from_secs(60);
/// What the filesystem of the data may hold while it is not full.
const ROOM: u64 = 8 << 30;

/// The shim with which a process gets a clock of its own.
const CLOCK: &str = include_str!("clock.c");

/// The directory of one run and all that is in it. Leaves nothing, whatever happened.
#[derive(Debug)]
pub(super) struct Home {
    dir: tempfile::TempDir,
    pub(super) cgroup: String,
    /// Whether the data lies on a filesystem of its own.
    pub(super) own_disk: bool,
    pub(super) own_clock: bool,
}

impl Home {
    pub(super) fn make() -> Result<Self> {
        let dir = scratch()?;
        let mut home = Self {
            cgroup: format!("atoll-soak-{}", std::process::id()),
            dir,
            own_disk: false,
            own_clock: false,
        };
        for name in ["data", "tmp"] {
            fs::create_dir(home.path(name)).doing("cannot make a directory")?;
        }
        home.own_disk = home.mount(ROOM).is_ok();
        home.own_clock = home.make_clock();
        Ok(home)
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(super) fn data(&self) -> PathBuf {
        self.path("data")
    }

    fn mount(&self, bytes: u64) -> std::result::Result<(), String> {
        let options = std::ffi::CString::new(format!("size={bytes},mode=0700")).map_err(|e| e.to_string())?;
        let none = MountFlags::empty();
        rustix::mount::mount("soak", self.data(), "tmpfs", none, options.as_c_str())
            .map_err(|error| error.to_string())
    }

    fn resize(&self, bytes: u64) -> Result<()> {
        let options = std::ffi::CString::new(format!("size={bytes}")).doing("cannot resize")?;
        rustix::mount::mount_remount(self.data(), MountFlags::empty(), options.as_c_str())
            .doing("cannot resize the filesystem of the data")
    }

    /// Leaves no room on the disk but these bytes.
    pub(super) fn fill(&self, but: u64) -> Result<()> {
        let now = rustix::fs::statvfs(self.data()).doing("cannot look at the filesystem of the data")?;
        let used = (now.f_blocks - now.f_bfree) * now.f_frsize;
        self.resize(used + but)
    }

    pub(super) fn free(&self) -> Result<()> {
        self.resize(ROOM)
    }

    /// A C compiler is needed for it.
    fn make_clock(&self) -> bool {
        let source = self.path("clock.c");
        let made = fs::write(&source, CLOCK).is_ok()
            && std::process::Command::new("cc")
                .args(["-shared", "-fPIC", "-O1", "-o"])
                .args([&self.path("clock.so"), &source])
                .arg("-ldl")
                .stderr(Stdio::null())
                .status()
                .is_ok_and(|status| status.success());
        made && self.set_clock(0).is_ok()
    }

    /// So many seconds ahead of everybody else.
    pub(super) fn set_clock(&self, seconds: i64) -> Result<()> {
        let mut options = File::options();
        let file = options.create(true).truncate(false).write(true);
        let file = file.open(self.path("clock")).doing("cannot set the clock")?;
        file.write_all_at(&seconds.to_ne_bytes(), 0)
            .doing("cannot set the clock")
    }

    /// Empties the directory of the data, and all that its server left on the machine.
    pub(super) fn forget(&self) -> Result<()> {
        machine::sweep(&self.data(), &self.cgroup);
        for entry in fs::read_dir(self.data())
            .doing("cannot empty the data")?
            .flatten()
        {
            let path = entry.path();
            let _stays = match entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                true => fs::remove_dir_all(path),
                false => fs::remove_file(path),
            };
        }
        Ok(())
    }

    /// All that the servers of this run have logged.
    pub(super) fn log(&self) -> String {
        fs::read(self.path("server.log")).map_or_else(
            |_| String::new(),
            |bytes| String::from_utf8_lossy(&bytes).into_owned(),
        )
    }
}

impl Home {
    /// Leaves nothing of it. May be said twice.
    pub(super) fn clear(&self) {
        machine::sweep(self.dir.path(), &self.cgroup);
        if self.own_disk {
            let _gone = rustix::mount::unmount(self.data(), UnmountFlags::DETACH);
        }
        let _gone = fs::remove_dir_all(self.dir.path());
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        self.clear();
    }
}

/// The process, as it is now.
#[derive(Debug)]
pub(super) struct Server {
    child: Mutex<Option<Child>>,
    pid: AtomicU32,
    /// How many servers there were.
    starts: AtomicU64,
    pub(super) home: Home,
    templates: PathBuf,
    pub(super) listen: SocketAddr,
    pub(super) workflows: SocketAddr,
}

impl Server {
    pub(super) fn new(home: Home, templates: &Path) -> Result<Self> {
        let (listen, workflows) = (free_port()?, free_port()?);
        // Short, so that nobody who hangs is waited for until after the run. The scripted provider of all projects is on this
        // machine.
        let config = format!(
            "cgroup = \"{}\"\nworkflows_listen = \"{workflows}\"\n\
             [network]\nallow_private = [\"127.0.0.1\"]\n\
             [models]\nfirst_byte_timeout = \"20s\"\nidle_timeout = \"20s\"\n",
            home.cgroup
        );
        fs::write(home.path("config.toml"), config).doing("cannot write the configuration")?;
        Ok(Self {
            child: Mutex::new(None),
            pid: AtomicU32::new(0),
            starts: AtomicU64::new(0),
            templates: templates.to_owned(),
            home,
            listen,
            workflows,
        })
    }

    pub(super) fn pid(&self) -> u32 {
        self.pid.load(Ordering::Relaxed)
    }

    pub(super) fn url(&self) -> String {
        format!("http://{}", self.listen)
    }

    pub(super) fn workflows_url(&self) -> String {
        format!("http://{}", self.workflows)
    }

    /// The key of the operator.
    pub(super) fn admin_key(&self) -> Result<String> {
        local::read_admin_key(&self.home.data()).ok_or_else(|| Error::new("the server kept no admin key"))
    }

    pub(super) async fn start(&self) -> Result<()> {
        let program = std::env::current_exe().doing("cannot find this program")?;
        let home = &self.home;
        let log = File::options()
            .create(true)
            .append(true)
            .open(home.path("server.log"))
            .doing("cannot write a log")?;
        let mut command = Command::new(program);
        command
            .arg("server")
            .args(["--isolation", "jail", "--log-format", "plain", "--listen"])
            .arg(self.listen.to_string())
            .arg("--data")
            .arg(home.data())
            .arg("--templates")
            .arg(&self.templates)
            .arg("--config")
            .arg(home.path("config.toml"))
            .env("ATOLL_LOG", "warn")
            .env("TMPDIR", home.path("tmp"))
            .env_remove("ATOLL_URL")
            .env_remove("ATOLL_API_KEY")
            .env_remove("OTEL_EXPORTER_OTLP_ENDPOINT")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .kill_on_drop(true)
            // Ctrl-C is for the soak, which ends the server when it has looked at it.
            .process_group(0);
        if home.own_clock {
            command
                .env("LD_PRELOAD", home.path("clock.so"))
                .env("ATOLL_TEST_CLOCK", home.path("clock"));
        }
        let mut child = command.spawn().doing("cannot start the server")?;
        let pid = child.id().ok_or_else(|| Error::new("the server ended at once"))?;
        let began = Instant::now();
        loop {
            let there = local::running_server(&home.data()).is_some_and(|server| server.pid == pid);
            if there && local::read_admin_key(&home.data()).is_some() {
                break;
            }
            let ended = child.try_wait().doing("cannot watch the server")?;
            if ended.is_some() || began.elapsed() > START_WITHIN {
                let _gone = child.kill().await;
                let log = home.log();
                let tail: Vec<&str> = log.lines().rev().take(5).collect();
                let why = tail.into_iter().rev().collect::<Vec<_>>().join("\n");
                return Err(Error::new(format!("the server did not start: {why}")));
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        self.pid.store(pid, Ordering::Relaxed);
        self.starts.fetch_add(1, Ordering::Relaxed);
        *self.child.lock().await = Some(child);
        Ok(())
    }

    /// As a crash would.
    pub(super) async fn kill(&self) {
        if let Some(mut child) = self.child.lock().await.take() {
            let _gone = child.kill().await;
        }
    }

    /// Asks it to stop. `false`: it did not, or not with success.
    pub(super) async fn stop(&self) -> bool {
        let Some(mut child) = self.child.lock().await.take() else {
            return false;
        };
        machine::kill(self.pid(), Signal::TERM);
        match tokio::time::timeout(STOP_WITHIN, child.wait()).await {
            Ok(Ok(status)) => status.success(),
            _ => {
                let _gone = child.kill().await;
                false
            }
        }
    }

    /// Whether the process ended although nobody ended it.
    pub(super) async fn died(&self) -> Option<String> {
        let mut child = self.child.lock().await;
        let status = child.as_mut()?.try_wait().ok().flatten()?;
        *child = None;
        Some(status.to_string())
    }
}

/// Nobody else takes it soon: the kernel hands out ports round about.
fn free_port() -> Result<SocketAddr> {
    TcpListener::bind("127.0.0.1:0")
        .and_then(|listener| listener.local_addr())
        .doing("no free port")
}
