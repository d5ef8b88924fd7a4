//! Raw `runsc checkpoint` and `runsc restore` of a Python process, as a person with a shell would use them.
//!
//! The process holds random bytes in memory, waits for lines and answers each: so a restore can be measured to the moment
//! at which the process does something again, as ours is, and not only to the moment at which the command returns.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Instant;

use atoll_client::output::{Doing, Error, Result};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, ChildStdin, ChildStdout};

use super::peers::{Runsc, millis};

/// Its first argument is how many MB it holds.
const HOLD: &str = "
import os, sys
blob = os.urandom(int(sys.argv[1]) * 1000 * 1000)
print('ready', flush=True)
for line in sys.stdin:
    print(line, end='', flush=True)
";

/// A container of raw runsc with the process in it; killed when dropped.
#[derive(Debug)]
pub(crate) struct Held {
    id: String,
    bundle: PathBuf,
    argv: Vec<String>,
    input: ChildStdin,
    output: ChildStdout,
}

/// How long a restore took.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Restored {
    /// Until the process answered.
    pub(crate) answered: f64,
    /// Until `runsc restore` returned.
    pub(crate) returned: f64,
}

impl Held {
    /// Starts the process and waits until it holds what it is to hold.
    pub(crate) async fn start(runsc: &Runsc, megabytes: usize) -> Result<Self> {
        let argv = ["/usr/bin/python3", "-c", HOLD, &megabytes.to_string()].map(str::to_owned);
        let (mut held, _) = Self::launch(runsc, argv.to_vec(), |command| {
            command.arg("run");
        })
        .await?;
        held.line().await?;
        Ok(held)
    }

    /// Milliseconds of a checkpoint, which ends the container unless `leave_running`. With `durable`, all of it is
    /// brought to the disk.
    pub(crate) async fn checkpoint(
        &self,
        runsc: &Runsc,
        image: &Path,
        durable: bool,
        leave_running: bool,
    ) -> Result<f64> {
        let mut command = runsc.command();
        command.arg("checkpoint");
        if leave_running {
            command.arg("-leave-running");
        }
        command.arg("-image-path").arg(image).arg(&self.id);
        let began = Instant::now();
        let output = command
            .stdin(Stdio::null())
            .output()
            .await
            .doing("cannot run runsc checkpoint")?;
        if !output.status.success() {
            return Err(Error::new(format!(
                "runsc checkpoint failed: {}",
                String::from_utf8_lossy(&output.stderr).trim()
            )));
        }
        if durable {
            let image = image.to_owned();
            tokio::task::spawn_blocking(move || sync(&image))
                .await
                .doing("syncing")?
                .doing("cannot sync a checkpoint")?;
        }
        Ok(millis(began.elapsed()))
    }

    /// A new container from a checkpoint of this one.
    pub(crate) async fn restore(&self, runsc: &Runsc, image: &Path) -> Result<(Self, Restored)> {
        let (mut held, began) = Self::launch(runsc, self.argv.clone(), |command| {
            command.args(["restore", "-image-path"]).arg(image);
        })
        .await?;
        let returned = millis(began.elapsed());
        held.input
            .write_all(b"again\n")
            .await
            .doing("cannot talk to raw runsc")?;
        let line = held.line().await?;
        let answered = millis(began.elapsed());
        if line != "again\n" {
            return Err(Error::new(format!("a restored process answered {line:?}")));
        }
        Ok((held, Restored { answered, returned }))
    }

    /// Returns when the command has; also says when that began, for the bundle is not part of it.
    async fn launch(
        runsc: &Runsc,
        argv: Vec<String>,
        how: impl FnOnce(&mut tokio::process::Command),
    ) -> Result<(Self, Instant)> {
        let words: Vec<&str> = argv.iter().map(String::as_str).collect();
        let (id, bundle) = runsc.bundle(&words)?;
        let errors = bundle.join("stderr");
        let log = std::fs::File::create(&errors).doing("cannot prepare raw runsc")?;
        let mut command = runsc.command();
        how(&mut command);
        command
            .args(["-detach", "-pid-file"])
            .arg(bundle.join("pid"))
            .arg("-bundle")
            .arg(&bundle)
            .arg(&id);
        let began = Instant::now();
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .doing("cannot start raw runsc")?;
        let (input, output) = streams(&mut child)?;
        let held = Self {
            id,
            bundle,
            argv,
            input,
            output,
        };
        let status = child.wait().await.doing("cannot wait for raw runsc")?;
        if status.success() {
            return Ok((held, began));
        }
        let why = std::fs::read_to_string(&errors).unwrap_or_default();
        Err(Error::new(format!("raw runsc failed: {}", why.trim())))
    }

    async fn line(&mut self) -> Result<String> {
        let mut line = Vec::new();
        while line.last() != Some(&b'\n') {
            let got = self
                .output
                .read_buf(&mut line)
                .await
                .doing("cannot read from raw runsc")?;
            if got == 0 {
                return Err(Error::new("a process in raw runsc ended early"));
            }
        }
        Ok(String::from_utf8_lossy(&line).into_owned())
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // `runsc delete --force` takes two seconds for what this does at once; its notes go with the directory.
        let pid = std::fs::read_to_string(self.bundle.join("pid")).unwrap_or_default();
        let Ok(pid) = pid.trim().parse() else { return };
        // After a checkpoint the number may be somebody else's.
        let command = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let ours = String::from_utf8_lossy(&command).contains(&*self.bundle.to_string_lossy());
        if let Some(pid) = rustix::process::Pid::from_raw(pid).filter(|_| ours) {
            let _gone = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
    }
}

fn streams(child: &mut Child) -> Result<(ChildStdin, ChildStdout)> {
    child
        .stdin
        .take()
        .zip(child.stdout.take())
        .ok_or_else(|| Error::new("raw runsc has no pipes"))
}

fn sync(dir: &Path) -> std::io::Result<()> {
    for entry in std::fs::read_dir(dir)? {
        std::fs::File::open(entry?.path())?.sync_all()?;
    }
    std::fs::File::open(dir)?.sync_all()
}
