//! Clients that do the same in different places: in a sandbox behind Atoll, in raw `runsc`, and behind no wall; straight or
//! through the SOCKS proxy.

use std::process::{Output, Stdio};

use atoll_client::Client;
use atoll_client::output::{Doing, Error, Result};
use tokio::process::Command;

use super::targets::SPLICED;
use super::world::{From, TARGET, World};
use crate::peers::{Bwrap, Runsc};
use crate::subject::exec;

const SCRIPT: &str = include_str!("client.py");
const MANY: &str = "1000000";

/// Where a client runs.
#[derive(Debug, Clone, Copy)]
pub(super) enum Runner<'a> {
    Sandbox { client: &'a Client, id: &'a str },
    Bare { bwrap: &'a Bwrap, from: From },
    Cell(&'a Cell),
}

/// Where a client runs, and how it gets to the target.
#[derive(Debug)]
pub(super) struct Way<'a> {
    world: &'a World,
    runner: Runner<'a>,
    host: &'static str,
    /// Empty: it asks for the name.
    address: &'static str,
    socks: Option<String>,
}

impl<'a> Way<'a> {
    pub(super) fn atoll(world: &'a World, client: &'a Client, id: &'a str, host: &'static str) -> Self {
        Self {
            world,
            runner: Runner::Sandbox { client, id },
            host,
            address: "",
            socks: None,
        }
    }

    /// Without any proxy; on the loopback interface if the client is at home.
    pub(super) fn straight(world: &'a World, runner: Runner<'a>) -> Self {
        let at_home = matches!(runner, Runner::Bare { from: From::Home, .. });
        Self {
            world,
            runner,
            host: SPLICED,
            address: if at_home { "127.0.0.1" } else { TARGET },
            socks: None,
        }
    }

    /// Through the SOCKS proxy; `None` where none is installed.
    pub(super) fn socks(world: &'a World, runner: Runner<'a>) -> Option<Self> {
        let from = match runner {
            Runner::Bare { from, .. } => from,
            Runner::Cell(_) => From::Cell,
            Runner::Sandbox { .. } => return None,
        };
        Some(Self {
            address: TARGET,
            socks: Some(world.socks(from)?),
            ..Self::straight(world, runner)
        })
    }

    /// MB each second of one download.
    pub(super) async fn throughput(&self, bytes: u64) -> Result<f64> {
        let url = format!("https://{}/{bytes}", self.host);
        let mut argv = vec!["/usr/bin/curl", "-sSk", "-o", "/dev/null"];
        argv.extend(["-w", "%{size_download} %{speed_download}", &url]);
        let at = format!("{}:443:{}", self.host, self.address);
        if !self.address.is_empty() {
            argv.extend(["--resolve", &at]);
        }
        if let Some(socks) = &self.socks {
            argv.extend(["--socks5", socks]);
        }
        let answer = self.run(&argv).await?;
        match answer
            .split_once(' ')
            .map(|(size, speed)| (size.parse::<u64>(), speed.parse::<f64>()))
        {
            Some((Ok(size), Ok(speed))) if bytes == size => Ok(speed / 1e6),
            _ => Err(Error::new(format!("the download failed: {answer}"))),
        }
    }

    /// Milliseconds of new connections: TCP, TLS, and the answer to a first request.
    pub(super) async fn connections(&self, count: usize) -> Result<Vec<f64>> {
        self.times("connect", count).await
    }

    /// Milliseconds of requests on one connection.
    pub(super) async fn requests(&self, count: usize) -> Result<Vec<f64>> {
        self.times("request", count).await
    }

    async fn times(&self, mode: &str, count: usize) -> Result<Vec<f64>> {
        let count = count.to_string();
        let answer = self.run(&self.script(mode, &count)).await?;
        serde_json::from_str(&answer).doing("the client printed something else than times")
    }

    pub(super) fn script<'s>(&'s self, mode: &'s str, count: &'s str) -> [&'s str; 8] {
        let socks = self.socks.as_deref().unwrap_or_default();
        [
            "/usr/bin/python3",
            "-c",
            SCRIPT,
            mode,
            self.host,
            self.address,
            socks,
            count,
        ]
    }

    async fn run(&self, argv: &[&str]) -> Result<String> {
        match self.runner {
            Runner::Sandbox { client, id } => exec(client, id, argv).await,
            Runner::Bare { bwrap, from } => {
                let mut command = bwrap.command_in(&self.world.namespace(from));
                command.args(argv);
                output(command).await
            }
            Runner::Cell(cell) => cell.exec(argv).await,
        }
    }
}

/// Raw `runsc` with its own network stack, on a cable of its own.
#[derive(Debug)]
pub(super) struct Cell {
    runsc: Runsc,
    id: String,
}

impl Cell {
    pub(super) async fn start(world: &World, runsc: Runsc) -> Result<Self> {
        world.wire_cell()?;
        let (id, bundle) = runsc.bundle(&["/bin/sleep", MANY])?;
        let path = bundle.join("config.json");
        let text = std::fs::read(&path).doing("cannot prepare raw runsc")?;
        let mut config: serde_json::Value =
            serde_json::from_slice(&text).doing("cannot prepare raw runsc")?;
        for namespace in config["linux"]["namespaces"].as_array_mut().into_iter().flatten() {
            if namespace["type"] == "network" {
                namespace["path"] = world.namespace(From::Cell).to_string_lossy().into();
            }
        }
        std::fs::write(&path, config.to_string()).doing("cannot prepare raw runsc")?;
        let cell = Self { runsc, id };
        let mut command = cell.command();
        command
            .args(["run", "-detach", "-bundle"])
            .arg(&bundle)
            .arg(&cell.id);
        // It keeps what it is given for as long as it lives.
        let status = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .await
            .doing("cannot start raw runsc")?;
        match status.success() {
            true => Ok(cell),
            false => Err(Error::new("raw runsc did not start with a network")),
        }
    }

    fn command(&self) -> Command {
        let mut command = self.runsc.command();
        // The last one counts.
        command.arg("--network=sandbox");
        command
    }

    async fn exec(&self, argv: &[&str]) -> Result<String> {
        let mut command = self.command();
        command.arg("exec").arg(&self.id).args(argv);
        output(command).await
    }

    pub(super) async fn stop(self) {
        self.runsc.kill(&self.id).await;
    }
}

async fn output(mut command: Command) -> Result<String> {
    let Output {
        status,
        stdout,
        stderr,
    } = command
        .stdin(Stdio::null())
        .output()
        .await
        .doing("cannot run a client")?;
    if status.success() {
        return Ok(String::from_utf8_lossy(&stdout).into_owned());
    }
    let why = String::from_utf8_lossy(&stderr).trim().to_owned();
    Err(Error::new(format!("a client failed: {why}")))
}
