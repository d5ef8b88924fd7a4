//! What an attacker has who controls the front of a server: confines itself as the front does, then tries to get out, and
//! says what came of it.
//!
//! `atoll-proof-confined OWN READABLE PID SOCKET`: a directory that is ours to change, a file to be read, a process and a
//! unix socket that are somebody else's. Prints one JSON object: for each attempt `null` if it succeeded, or the number of
//! the error.

use std::fs;
use std::io;
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::symlink;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;

use atoll_confine::server::{self, View};
use rustix::fs::{CWD, FileType, Mode};
use rustix::mount::MountFlags;
use rustix::net::{AddressFamily, SocketType, ipproto};
use rustix::process::{Pid, PidfdFlags, Signal};
use rustix::thread::ThreadNameSpaceType;
use serde_json::{Map, Value, json};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [own, readable, pid, socket] = arguments.as_slice() else {
        println!("{}", json!({"usage": null}));
        return;
    };
    let (own, pid) = (PathBuf::from(own), pid.parse().ok().and_then(Pid::from_raw));
    let view = View {
        read: vec![readable.into()],
        change: vec![own.clone()],
    };
    let mut layers = server::shrink();
    layers.extend(server::front(&view, 0));
    let standing = layers
        .iter()
        .map(|layer| (layer.what.to_owned(), json!(layer.stands.is_ok())));
    let standing: Map<String, Value> = standing.collect();
    let tried: Map<String, Value> = attempts(&own, Path::new(readable), pid, Path::new(socket))
        .into_iter()
        .map(|(name, outcome)| {
            (
                name.to_owned(),
                outcome.map_or_else(|error| number(&error), |()| Value::Null),
            )
        })
        .collect();
    println!("{}", json!({"layers": standing, "tried": tried}));
}

fn number(error: &io::Error) -> Value {
    error
        .raw_os_error()
        .map_or_else(|| json!(error.to_string()), |code| json!(code))
}

type Attempts = Vec<(&'static str, io::Result<()>)>;

fn attempts(own: &Path, readable: &Path, pid: Option<Pid>, socket: &Path) -> Attempts {
    let pid = || pid.ok_or_else(|| io::Error::other("no process was named"));
    let inside = own.join("file");
    let link = own.join("link");
    let mut tried: Attempts = vec![
        // What it is for still works.
        (
            "change its own files",
            fs::write(&inside, "mine").and_then(|()| fs::rename(&inside, own.join("other"))),
        ),
        ("read what it was given", fs::read(readable).map(drop)),
        ("serve", serve()),
        ("have threads", std::thread::Builder::new().spawn(|| {}).map(drop)),
        // And nothing else.
        ("read /etc/shadow", fs::read("/etc/shadow").map(drop)),
        (
            "read /etc/shadow by a link",
            symlink("/etc/shadow", &link)
                .and_then(|()| fs::read(&link))
                .map(drop),
        ),
        ("list /root", fs::read_dir("/root").map(drop)),
        ("write to /etc", fs::write("/etc/atoll-proof", "x")),
        ("write to /tmp", fs::write("/tmp/atoll-proof-outside", "x")),
        ("change what it may read", fs::write(readable, "x")),
        (
            "change the kernel's settings",
            fs::File::options()
                .write(true)
                .open("/proc/sys/vm/drop_caches")
                .map(drop),
        ),
        (
            "open the memory of another",
            fs::File::open("/proc/1/mem").map(drop),
        ),
        (
            "open a namespace of another",
            fs::File::open("/proc/1/ns/mnt").map(drop),
        ),
        ("start a program", Command::new("/bin/true").spawn().map(drop)),
        ("make a raw socket", raw(AddressFamily::INET)),
        ("make a packet socket", raw(AddressFamily::PACKET)),
        ("connect to a unix socket", UnixStream::connect(socket).map(drop)),
        ("send to a unix socket", UnixDatagram::pair().map(drop)),
    ];
    let mount = rustix::mount::mount("none", own, "tmpfs", MountFlags::empty(), None);
    tried.push(("mount", mount.map_err(Into::into)));
    tried.push((
        "change its root",
        rustix::process::chroot(own).map_err(Into::into),
    ));
    let module = rustix::system::init_module(&[0; 64], c"");
    tried.push(("load a module", module.map_err(Into::into)));
    let node = rustix::fs::mknodat(CWD, own.join("sda"), FileType::BlockDevice, Mode::RUSR, 0x800);
    tried.push(("make a device", node.map_err(Into::into)));
    tried.push((
        "signal another process",
        pid().and_then(|pid| Ok(rustix::process::kill_process(pid, Signal::KILL)?)),
    ));
    // Signal 0 does nothing but ask.
    tried.push((
        "signal all",
        rustix::process::test_kill_process_group(Pid::INIT).map_err(Into::into),
    ));
    tried.push((
        "signal by descriptor",
        pid().and_then(|pid| {
            let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty())?;
            Ok(rustix::process::pidfd_send_signal(pidfd, Signal::KILL)?)
        }),
    ));
    tried.push((
        "enter the namespaces of the host",
        Pid::from_raw(1)
            .ok_or_else(|| io::Error::other("no init"))
            .and_then(|init| {
                let pidfd = rustix::process::pidfd_open(init, PidfdFlags::empty())?;
                Ok(rustix::thread::move_into_thread_name_spaces(
                    std::os::fd::AsFd::as_fd(&pidfd),
                    ThreadNameSpaceType::MOUNT,
                )?)
            }),
    ));
    tried.push((
        "trace another process",
        pid().and_then(|pid| {
            let pid = nix::unistd::Pid::from_raw(pid.as_raw_nonzero().get());
            nix::sys::ptrace::seize(pid, nix::sys::ptrace::Options::empty()).map_err(Into::into)
        }),
    ));
    let user = rustix::thread::set_thread_uid(rustix::process::Uid::from_raw(12345));
    tried.push(("become another user", user.map_err(Into::into)));
    tried
}

/// Listens, connects and accepts.
fn serve() -> io::Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let _client = TcpStream::connect(listener.local_addr()?)?;
    listener.accept().map(drop)
}

fn raw(family: AddressFamily) -> io::Result<()> {
    let made = rustix::net::socket(family, SocketType::RAW, Some(ipproto::ICMP));
    made.map(drop).map_err(Into::into)
}
