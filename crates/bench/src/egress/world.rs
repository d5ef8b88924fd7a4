//! Where `atoll bench egress` takes place: network namespaces of its own, from which nothing leads anywhere else.
//!
//! ```text
//!   plain  a client without any wall  ──┐                    ┌── home ──────────────────────┐
//!   cell   a client in raw runsc  ──────┼── routed, or by ───│ this program, SOCKS proxy,   │──── world
//!                                       │   SOCKS            │ the server under test with   │     names and HTTPS
//!   sandboxes ── Atoll's own links ─────┴── proxied ─────────│ its sandboxes; HTTPS on lo   │
//!                                                            └──────────────────────────────┘
//! ```
//! So each client is one cable away from home, and home one cable away from the world.

use std::fs;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use atoll_client::find_in_path;
use atoll_client::output::{Doing, Error, Result};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::targets::{Identity, Targets};

/// Where everything that clients ask for is.
pub(super) const TARGET: &str = "203.0.113.10";
const NAMES: &str = "203.0.113.53";
const SOCKS_PORT: &str = "1080";
const DANTE: &str = "\
logoutput: /dev/null
internal: 0.0.0.0 port = 1080
external: 192.0.2.1
clientmethod: none
socksmethod: none
user.privileged: root
user.unprivileged: nobody
client pass { from: 0.0.0.0/0 to: 0.0.0.0/0 }
socks pass { from: 0.0.0.0/0 to: 0.0.0.0/0 }
";

/// A namespace, and the cable from it to home (or from home to it).
struct Place {
    name: &'static str,
    at_home: &'static str,
    there: &'static str,
}

const PLAIN: Place = Place {
    name: "plain",
    at_home: "192.0.2.5",
    there: "192.0.2.6",
};
const CELL: Place = Place {
    name: "cell",
    at_home: "192.0.2.9",
    there: "192.0.2.10",
};
const WORLD: Place = Place {
    name: "world",
    at_home: "192.0.2.1",
    there: "192.0.2.2",
};

/// Removed when dropped.
#[derive(Debug)]
pub(crate) struct World {
    namespaces: Namespaces,
    authority: PathBuf,
    targets: [Targets; 2],
    socks: Option<Socks>,
    _dir: tempfile::TempDir,
}

impl World {
    pub(crate) fn build() -> Result<Self> {
        let namespaces = Namespaces::build()?;
        let dir = tempfile::tempdir().doing("cannot make a directory")?;
        let identity = Identity::new()?;
        let authority = dir.path().join("authority.pem");
        fs::write(&authority, identity.authority()).doing("cannot write a certificate")?;
        let outside = namespaces.path(WORLD.name);
        let inside = namespaces.path("home");
        let targets = [
            Targets::start(outside, &identity, TARGET, Some(NAMES))?,
            Targets::start(inside, &identity, "127.0.0.1", None)?,
        ];
        let socks = Socks::start(&namespaces, dir.path())?;
        Ok(Self {
            socks,
            namespaces,
            authority,
            targets,
            _dir: dir,
        })
    }

    /// Moves the calling thread, and whatever it starts, to where the server under test lives.
    pub(crate) fn enter(&self) -> Result<()> {
        enter(&self.namespaces.path("home"))
    }

    /// What a server has to be told to live here.
    pub(super) fn config(&self) -> String {
        format!(
            "[network]\nresolvers = [\"{NAMES}\"]\nextra_roots = \"{}\"\n",
            self.authority.display()
        )
    }

    /// The SOCKS proxy as it is seen from a place; `None` where none is installed.
    pub(super) fn socks(&self, from: From) -> Option<String> {
        let address = match from {
            From::Plain => PLAIN.at_home,
            From::Cell => CELL.at_home,
            From::Home => "127.0.0.1",
        };
        self.socks.as_ref().map(|_| format!("{address}:{SOCKS_PORT}"))
    }

    /// How many connections the servers hold at the moment.
    pub(super) fn open(&self) -> usize {
        self.targets.iter().map(Targets::open).sum()
    }

    pub(super) fn socks_name(&self) -> &'static str {
        self.socks.as_ref().map_or("a SOCKS proxy", |socks| socks.name)
    }

    /// Gives the cell its address, which a `runsc` that was there has taken away.
    pub(super) fn wire_cell(&self) -> Result<()> {
        let (namespace, Place { at_home, there, .. }) = (self.namespaces.name(CELL.name), CELL);
        ip(&format!("-n {namespace} address replace {there}/30 dev eth0"))?;
        ip(&format!("-n {namespace} route replace default via {at_home}"))
    }

    /// For programs that run in a place.
    pub(super) fn namespace(&self, from: From) -> PathBuf {
        self.namespaces.path(match from {
            From::Plain => PLAIN.name,
            From::Cell => CELL.name,
            From::Home => "home",
        })
    }
}

/// A place from which a client looks at the world.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum From {
    Plain,
    Cell,
    Home,
}

/// A plain SOCKS proxy.
#[derive(Debug)]
struct Socks {
    name: &'static str,
    process: Child,
}

impl Socks {
    /// Dante, which is the faster one, or else microsocks; `None` where neither is installed.
    fn start(namespaces: &Namespaces, dir: &Path) -> Result<Option<Self>> {
        let (name, mut command) = if let Some(program) = find_in_path("danted") {
            let config = dir.join("danted.conf");
            fs::write(&config, DANTE).doing("cannot configure dante")?;
            let mut command = namespaces.command("home", program);
            command.arg("-f").arg(config);
            ("dante", command)
        } else if let Some(program) = find_in_path("microsocks") {
            let mut command = namespaces.command("home", program);
            command.args(["-i", "0.0.0.0", "-p", SOCKS_PORT]);
            ("microsocks", command)
        } else {
            return Ok(None);
        };
        let process = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .doing("cannot start a SOCKS proxy")?;
        Ok(Some(Self { name, process }))
    }
}

impl Drop for Socks {
    fn drop(&mut self) {
        // Dante takes its children with it only if it is asked to go.
        if let Some(pid) = rustix::process::Pid::from_raw(self.process.id().cast_signed()) {
            let _gone = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        let _gone = self.process.wait();
    }
}

pub(super) fn enter(namespace: &Path) -> Result<()> {
    let file = fs::File::open(namespace).doing("cannot open a namespace")?;
    move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))
        .doing("cannot enter a namespace")
}

#[derive(Debug)]
struct Namespaces {
    prefix: String,
    made: Vec<String>,
}

impl Namespaces {
    fn build() -> Result<Self> {
        if !rustix::process::geteuid().is_root() {
            return Err(Error::new("network namespaces need root"));
        }
        let mut this = Self {
            prefix: format!("atoll-bench-{}", std::process::id()),
            made: Vec::new(),
        };
        this.make("home")?;
        for Place { name, at_home, there } in [PLAIN, CELL, WORLD] {
            this.make(name)?;
            let (home, far) = (this.name("home"), this.name(name));
            ip(&format!(
                "-n {home} link add {name} type veth peer name eth0 netns {far}"
            ))?;
            for (namespace, link, address) in [(&home, name, at_home), (&far, "eth0", there)] {
                ip(&format!("-n {namespace} address add {address}/30 dev {link}"))?;
                ip(&format!("-n {namespace} link set {link} up"))?;
            }
            ip(&format!("-n {far} route add default via {at_home}"))?;
        }
        let (home, world) = (this.name("home"), this.name(WORLD.name));
        ip(&format!("-n {home} route add default via {}", WORLD.there))?;
        for address in [TARGET, NAMES] {
            ip(&format!("-n {world} address add {address}/32 dev lo"))?;
        }
        let mut forward = this.command("home", "sysctl");
        run(forward.args(["-q", "-w", "net.ipv4.ip_forward=1"]))?;
        Ok(this)
    }

    fn make(&mut self, name: &str) -> Result<()> {
        let name = self.name(name);
        ip(&format!("netns add {name}"))?;
        ip(&format!("-n {name} link set lo up"))?;
        self.made.push(name);
        Ok(())
    }

    fn name(&self, name: &str) -> String {
        format!("{}-{name}", self.prefix)
    }

    fn path(&self, name: &str) -> PathBuf {
        Path::new("/run/netns").join(self.name(name))
    }

    fn command(&self, place: &str, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        let mut net = std::ffi::OsString::from("--net=");
        net.push(self.path(place));
        command.arg(net).arg(program);
        command
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        for name in &self.made {
            let _gone = ip(&format!("netns delete {name}"));
        }
    }
}

fn ip(arguments: &str) -> Result<()> {
    run(Command::new("ip").args(arguments.split(' ')))
}

fn run(command: &mut Command) -> Result<()> {
    let output = command.output().doing("cannot make a network")?;
    if output.status.success() {
        return Ok(());
    }
    let why = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(Error::new(format!("cannot make a network: {command:?}: {why}")))
}
