//! A small internet of the test's own, in network namespaces, for tests about what leaves a sandbox.
//!
//! ```text
//!   netns home                                netns world
//!   the test, the server (and its sandboxes   203.0.113.10, .20, 2001:db8::10   names, an index, a registry, git, an API
//!   behind its gateway)      ── one cable ──  169.254.169.254, 10.0.0.5         traps where nothing may arrive
//! ```
//! What must hold: neither namespace has another way out, so no test sends a packet off the machine, whatever is broken.
//! What arrived is asked of the world ([`World::seen`]), not of Atoll.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use serde_json::Value;
use tempfile::TempDir;

const SCRIPT: &str = include_str!("../world/world.py");
/// In the world, on its loopback interface.
const ADDRESSES: [&str; 6] = [
    "203.0.113.10/32",
    "203.0.113.20/32",
    "203.0.113.53/32",
    "169.254.169.254/32",
    "10.0.0.5/32",
    "2001:db8::10/128",
];

#[derive(Debug)]
pub struct World {
    names: [String; 2],
    dir: TempDir,
    servers: Child,
}

impl World {
    /// Builds it and moves this thread, and so everything that it starts, into `home`. `None` where that is not possible.
    pub fn enter() -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIPPED: network namespaces need root");
            return None;
        }
        let base = crate::unique_name();
        let [home, world] = [format!("{base}-h"), format!("{base}-w")];
        for name in [&home, &world] {
            ip(&["netns", "add", name]);
            ip(&["-n", name, "link", "set", "lo", "up"]);
        }
        ip(&[
            "-n", &home, "link", "add", "out", "type", "veth", "peer", "name", "in", "netns", &world,
        ]);
        for (name, link, own) in [(&home, "out", "192.0.2.1"), (&world, "in", "192.0.2.2")] {
            ip(&["-n", name, "address", "add", &format!("{own}/30"), "dev", link]);
            ip(&["-n", name, "link", "set", link, "up"]);
        }
        for (name, link, own) in [(&home, "out", "fd77::1/64"), (&world, "in", "fd77::2/64")] {
            ip(&["-n", name, "address", "add", own, "dev", link, "nodad"]);
        }
        for address in ADDRESSES {
            ip(&["-n", &world, "address", "add", address, "dev", "lo"]);
        }
        ip(&["-n", &home, "route", "add", "default", "via", "192.0.2.2"]);
        ip(&["-n", &home, "-6", "route", "add", "default", "via", "fd77::2"]);

        let dir = tempfile::Builder::new()
            .prefix("atoll-world-")
            .tempdir()
            .expect("a temporary directory");
        let script = dir.path().join("world.py");
        fs::write(&script, SCRIPT).expect("the script is written");
        let mut servers = Command::new("nsenter")
            .arg(format!("--net=/run/netns/{world}"))
            .arg("python3")
            .args([&script, dir.path()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("nsenter and python3 are installed");
        let mut line = String::new();
        BufReader::new(servers.stdout.take().expect("a pipe"))
            .read_line(&mut line)
            .expect("the world speaks");
        assert_eq!(line, "ready\n", "the world's servers did not come up");
        let namespace = fs::File::open(format!("/run/netns/{home}")).expect("the namespace was made");
        move_into_link_name_space(
            std::os::fd::AsFd::as_fd(&namespace),
            Some(LinkNameSpaceType::Network),
        )
        .expect("root may enter a namespace");
        Some(Self {
            names: [home, world],
            dir,
            servers,
        })
    }

    /// What a server has to be told to live in this world.
    pub fn config(&self) -> String {
        format!(
            "[network]\nresolvers = [\"203.0.113.53:53\"]\nextra_roots = \"{}\"\n",
            self.authority().display()
        )
    }

    /// Gives the host one more address of its own, while everything runs.
    pub fn give_host(&self, address: &str) {
        let mut words = vec!["-n", &self.names[0], "address", "add", address, "dev", "out"];
        if address.contains(':') {
            // At once, without asking round whether somebody else has it.
            words.push("nodad");
        }
        ip(&words);
    }

    /// The certificate of whoever signs in this world.
    pub fn authority(&self) -> PathBuf {
        self.dir.path().join("ca.pem")
    }

    /// Everything that arrived so far.
    pub fn seen(&self) -> Vec<Value> {
        let text = fs::read_to_string(self.dir.path().join("seen.jsonl")).unwrap_or_default();
        text.lines()
            .map(|line| serde_json::from_str(line).expect("one object a line"))
            .collect()
    }

    /// What arrived of one kind: `dns`, `tls`, `http`, `tcp`, `udp`, `forbidden`.
    pub fn saw(&self, what: &str) -> Vec<Value> {
        self.seen()
            .into_iter()
            .filter(|seen| seen["what"] == what)
            .collect()
    }

    /// The names that somebody asked the world's resolver for.
    pub fn asked(&self) -> Vec<String> {
        self.saw("dns")
            .iter()
            .filter_map(|seen| seen["name"].as_str().map(str::to_owned))
            .collect()
    }

    /// The lines of the world as they are, to be searched for what must not be there.
    pub fn raw(&self) -> String {
        fs::read_to_string(self.dir.path().join("seen.jsonl")).unwrap_or_default()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let _ = self.servers.kill();
        let _ = self.servers.wait();
        for name in &self.names {
            let _ = Command::new("ip").args(["netns", "delete", name]).status();
        }
    }
}

fn ip(args: &[&str]) {
    let output = Command::new("ip")
        .args(args)
        .output()
        .expect("iproute2 is installed");
    assert!(
        output.status.success(),
        "ip {}: {}",
        args.join(" "),
        String::from_utf8_lossy(&output.stderr)
    );
}
