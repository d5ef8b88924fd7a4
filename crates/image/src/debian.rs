//! Templates from Debian packages: `mmdebstrap` makes a root filesystem as a tar archive, the rest happens in the tree.
//!
//! As root, mmdebstrap mounts /proc, /sys and /dev/pts where it works, in the mount namespace it is given, and leaves them
//! there when it is killed. So it gets a mount namespace of its own and works in our scratch directory: killing its
//! process group takes the mounts along, and then the directory can go. That happens when a build is cancelled and,
//! after we were killed ourselves, when the store is opened next. (Not a pid namespace: as process 1 mmdebstrap was
//! seen to stop reading from apt and hang.)

use std::fmt::Debug;
use std::fs::File;
use std::process::Stdio;
use std::sync::Arc;
use std::time::SystemTime;

use async_trait::async_trait;
use atoll_types::{TemplateManifest, TemplateSource, Timestamp};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Command;

use crate::content::Content;
use crate::error::{Error, IoContext, Result};
use crate::layer::{self, Whiteouts};
use crate::machine;
use crate::progress::{Job, Progress, Update};
use crate::store::{Recipe, Scratch, Templates, check_name, end_group};
use crate::tree::{Mtime, Tree};

/// The packages of the default template, `base`.
pub const BASE_PACKAGES: &[&str] = &[
    "build-essential",
    "ca-certificates",
    "curl",
    "gh",
    "git",
    "iproute2",
    "jq",
    "less",
    "nodejs",
    "npm",
    "openssh-client",
    "procps",
    "python-is-python3",
    "python3",
    "python3-pip",
    "python3-venv",
    "socat",
    "sudo",
    "unzip",
    "vim-tiny",
    "wget",
];

/// What nobody reads in a sandbox; a third of the size otherwise.
const LEFT_OUT: &[&str] = &[
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
    "path-exclude=/usr/share/man/*/*",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/lintian/*",
    "path-exclude=/usr/share/locale/*",
    "path-include=/usr/share/locale/locale.alias",
    "path-exclude=/usr/bin/*-lto-dump*",
];

/// The lines by which mmdebstrap tells its stage, in order.
const STAGES: &[&str] = &[
    "running apt-get update",
    "downloading packages",
    "extracting archives",
    "installing essential",
    "installing remaining",
    "cleaning package lists",
    "creating tarball",
    "done",
];

#[derive(Debug, Clone)]
pub struct DebianOptions {
    /// What the template is called.
    pub name: String,
    pub suite: String,
    /// On top of a minimal system with apt.
    pub packages: Vec<String>,
    pub now: Timestamp,
}

impl DebianOptions {
    /// The default template.
    pub fn base(now: Timestamp) -> Self {
        Self {
            name: "base".into(),
            suite: "trixie".into(),
            packages: BASE_PACKAGES.iter().map(ToString::to_string).collect(),
            now,
        }
    }
}

/// Another process, which may do what installing packages takes.
#[async_trait]
pub trait Installer: Debug + Send + Sync {
    /// Writes a root filesystem with the packages as a tar archive. Dropping the future stops it.
    async fn install(&self, options: &DebianOptions, out: File, progress: Arc<dyn Progress>) -> Result<()>;
}

impl Templates {
    /// Does the same as an [`Installer`] in this process, whose store this is.
    pub async fn install_debian(
        &self,
        options: &DebianOptions,
        mut out: File,
        progress: Arc<dyn Progress>,
    ) -> Result<()> {
        check_words(options)?;
        let job = Job::new(progress);
        let store = self.clone();
        let scratch = job.blocking(move |_| store.scratch()).await?;
        run_mmdebstrap(options, &scratch, &job).await?;
        job.blocking(move |_| {
            let path = scratch.path().join("root.tar");
            let mut whole = File::open(&path).doing("open", &path)?;
            std::io::copy(&mut whole, &mut out).doing("hand over", &path)?;
            Ok(())
        })
        .await
    }

    /// Builds a template from Debian packages. Needs `mmdebstrap` and a way to a Debian mirror. Cancel-safe.
    pub async fn build_debian(
        &self,
        options: DebianOptions,
        progress: Arc<dyn Progress>,
    ) -> Result<TemplateManifest> {
        check_name(&options.name)?;
        check_words(&options)?;
        let job = Job::new(progress);
        let (store, scratch) = {
            let store = self.clone();
            job.blocking(move |_| store.scratch().map(|scratch| (store, scratch)))
                .await?
        };
        let started = SystemTime::now();
        match &self.installer {
            None => run_mmdebstrap(&options, &scratch, &job).await?,
            Some(installer) => {
                let path = scratch.path().join("root.tar");
                let out = File::create(&path).doing("write", &path)?;
                let report = job.clone();
                let progress: Arc<dyn Progress> = Arc::new(move |update: Update<'_>| {
                    // Whether to go on is asked in between.
                    let _ = report.report(update.stage, update.done, update.total, update.message);
                });
                installer.install(&options, out, progress).await?;
            }
        }
        job.blocking(move |job| {
            let archive = Content::whole_file(&scratch.path().join("root.tar"))?;
            let total = archive.len();
            let mut tree = Tree::default();
            layer::apply(&mut tree, archive, Whiteouts::None, |done| {
                job.report("reading files", done, total, "")
            })?;
            machine::finish(&mut tree, mtime(started))?;
            let recipe = Recipe {
                source: TemplateSource::Debian {
                    suite: options.suite,
                    packages: options.packages,
                },
                env: [("LANG", "C.UTF-8"), ("PATH", machine::PATH)]
                    .map(|(key, value)| (key.to_owned(), value.to_owned()))
                    .into(),
                workdir: machine::HOME.into(),
                user: machine::USER.into(),
                start: None,
                command: None,
                exposed_ports: Vec::new(),
                network: None,
                resources: None,
            };
            store.add(&tree, &recipe, Some(&options.name), options.now, job)
        })
        .await
    }
}

/// Suite and packages become arguments of a program that runs as root: only what such words look like passes.
fn check_words(options: &DebianOptions) -> Result<()> {
    let word = |text: &str, also: &[u8]| {
        text.as_bytes().first().is_some_and(u8::is_ascii_alphanumeric)
            && text
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || also.contains(&b))
    };
    if !word(&options.suite, b"-.") {
        return Err(Error::Invalid(format!(
            "`{}` is not a Debian suite; write for example trixie",
            options.suite
        )));
    }
    match options.packages.iter().find(|package| !word(package, b"+-.:=~/")) {
        Some(bad) => Err(Error::Invalid(format!(
            "`{bad}` is not the name of a Debian package"
        ))),
        None => Ok(()),
    }
}

async fn run_mmdebstrap(options: &DebianOptions, scratch: &Scratch, job: &Job) -> Result<()> {
    let path = scratch.path().join("root.tar");
    let out = File::create(&path).doing("write", &path)?;
    let mut command = mmdebstrap(scratch)?;
    command.args(["--variant=minbase", "--format=tar", "--skip=output/dev"]);
    if !options.packages.is_empty() {
        command.arg(format!("--include={}", options.packages.join(",")));
    }
    command.args(LEFT_OUT.iter().map(|option| format!("--dpkgopt={option}")));
    command.args(["--", &options.suite, "-"]);
    command
        .stdin(Stdio::null())
        .stdout(out)
        .stderr(Stdio::piped())
        .process_group(0);
    let mut child = command.spawn().doing("start", "mmdebstrap".as_ref())?;
    let mut group = Group(child.id());
    child.id().map_or(Ok(()), |pid| scratch.owns_process(pid))?;
    let mut tail = Tail::default();
    let mut done = 0;
    if let Some(stderr) = child.stderr.take() {
        let mut lines = BufReader::new(stderr).split(b'\n');
        while let Some(line) = lines
            .next_segment()
            .await
            .doing("read from", "mmdebstrap".as_ref())?
        {
            let line = String::from_utf8_lossy(&line);
            let line = line.trim();
            let message = line.strip_prefix("I: ").unwrap_or(line);
            if let Some(stage) = STAGES.iter().position(|stage| message.starts_with(stage)) {
                done = stage as u64;
            }
            job.report("installing packages", done, STAGES.len() as u64, message)?;
            tail.push(line);
        }
    }
    let status = child.wait().await.doing("wait for", "mmdebstrap".as_ref())?;
    group.0 = None;
    if !status.success() {
        return Err(Error::Program {
            program: "mmdebstrap",
            status: status.to_string(),
            tail: tail.text(),
        });
    }
    Ok(())
}

/// The program with its namespaces. An ordinary user's mmdebstrap makes its own.
fn mmdebstrap(scratch: &Scratch) -> Result<Command> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    if !std::env::split_paths(&path).any(|dir| dir.join("mmdebstrap").is_file()) {
        return Err(Error::MissingProgram {
            program: "mmdebstrap",
            purpose: "build a template from Debian packages",
            install: "apt-get install mmdebstrap",
        });
    }
    if !rustix::process::geteuid().is_root() {
        return Ok(Command::new("mmdebstrap"));
    }
    let mut command = Command::new("unshare");
    command
        .args([
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "--",
            "mmdebstrap",
        ])
        .env("TMPDIR", scratch.path());
    Ok(command)
}

/// Ends a process group when the build is given up.
struct Group(Option<u32>);

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(leader) = self.0 {
            end_group(leader);
        }
    }
}

/// The last lines of a program's output: what an error message quotes.
#[derive(Default)]
struct Tail(std::collections::VecDeque<String>);

impl Tail {
    fn push(&mut self, line: &str) {
        if line.is_empty() {
            return;
        }
        if self.0.len() == 12 {
            self.0.pop_front();
        }
        self.0.push_back(line.chars().take(400).collect());
    }

    fn text(&self) -> String {
        // Errors and what precedes them say more than the cleaning up that follows.
        let from = self
            .0
            .iter()
            .position(|line| line.starts_with("E: "))
            .unwrap_or(0);
        let lines: Vec<&str> = self
            .0
            .iter()
            .skip(from.saturating_sub(3))
            .map(String::as_str)
            .collect();
        lines.join("\n")
    }
}

fn mtime(time: SystemTime) -> Mtime {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    Mtime {
        secs: since.as_secs(),
        nanos: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_words_become_arguments() {
        let mut options = DebianOptions::base(Timestamp(0));
        assert!(check_words(&options).is_ok());
        options.packages.push("python3=3.13.5-1".into());
        assert!(check_words(&options).is_ok());
        for bad in ["--aptopt=x", "a,b", "", "a b", "?essential", "$(id)"] {
            options.packages = vec![bad.into()];
            assert!(check_words(&options).is_err(), "{bad}");
        }
        options.packages.clear();
        options.suite = "--setup-hook=x".into();
        assert!(check_words(&options).is_err());
    }
}
