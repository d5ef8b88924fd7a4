//! What was found of a sandbox that failed a cycle, kept in a file: afterwards it is torn down, and the next failure may be
//! hours away.
//!
//! It tells in which layer something is stuck: whether the server in the sandbox answers when it is asked again; whether the
//! agent runs a command, and what it says about processes and connections; where each goroutine of the sentry is.

use std::fmt::Write as _;
use std::io::{self, Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use atoll_client::output::{Doing as _, Result};
use rustix::fs::{Mode, OFlags};
use serde_json::Value;

use super::Holder;
use crate::subject::exec;

/// The stacks of a sentry are some hundred kilobytes.
const LONGEST_ANSWER: u64 = 64 << 20;
const PATIENCE: Duration = Duration::from_secs(30);

/// Commands that say what goes on in a sandbox, with nothing but what every template has.
const QUESTIONS: [&str; 3] = [
    "cat /proc/net/tcp /proc/net/tcp6",
    "for p in /proc/[0-9]*; do echo \"$p\"; tr '\\0' ' ' <$p/cmdline | head -c 100; echo; grep -E '^(State|PPid)' $p/status; done",
    "cat /proc/net/snmp /proc/sys/net/ipv4/ip_local_port_range",
];

/// Asks everybody who may know, and says where it is written.
pub(super) async fn write(holder: &Holder<'_>, sandbox: &str) -> Result<PathBuf> {
    let subject = holder.subject;
    let mut text = String::new();
    let mut note = |what: &str, found: String| {
        let _infallible = writeln!(text, "== {what}\n{found}\n");
    };
    let again = holder.ask("/count").await;
    note(
        "asked again",
        again.map_or_else(|error| error.to_string(), |answer| answer.to_string()),
    );
    for question in QUESTIONS {
        let argv = ["sh", "-c", question];
        let asked = exec(&subject.client, sandbox, &argv);
        let told = match tokio::time::timeout(PATIENCE, asked).await {
            Ok(told) => told.unwrap_or_else(|error| error.to_string()),
            Err(_) => "no answer".to_owned(),
        };
        note(question, told);
    }
    for instance in std::fs::read_dir(subject.data.join("instances"))
        .into_iter()
        .flatten()
        .flatten()
    {
        let dir = instance.path();
        let asked = tokio::task::spawn_blocking(move || stacks(&dir)).await;
        let told = asked.map_err(io::Error::other).flatten();
        note(
            "the sentry's stacks",
            told.unwrap_or_else(|error| error.to_string()),
        );
    }
    let log = std::fs::read_to_string(subject.data.with_extension("log"));
    note("the server's log", log.unwrap_or_else(|error| error.to_string()));
    let path = std::env::temp_dir().join(format!("atoll-cycles-{}.txt", std::process::id()));
    std::fs::write(&path, text).doing("cannot write what was found")?;
    Ok(path)
}

/// Where the goroutines are of the sentry whose control socket is in this directory.
fn stacks(dir: &Path) -> io::Result<String> {
    let name = dir.file_name().unwrap_or_default().to_string_lossy();
    // By way of a descriptor: the name of a socket may have 107 bytes, a path has more.
    let opened = rustix::fs::open(
        dir,
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    let at = format!("/proc/self/fd/{}/runsc-{name}.sock", opened.as_raw_fd());
    let mut socket = UnixStream::connect(at)?;
    socket.set_read_timeout(Some(PATIENCE))?;
    socket.write_all(br#"{"method":"debug.Stacks","arg":{}}"#)?;
    let mut answers = serde_json::Deserializer::from_reader(socket.take(LONGEST_ANSWER)).into_iter::<Value>();
    let answer = answers.next().ok_or(io::ErrorKind::UnexpectedEof)??;
    match answer["result"].as_str() {
        Some(stacks) => Ok(stacks.to_owned()),
        None => Err(io::Error::other(answer["err"].to_string())),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn a_sentry_tells_its_stacks_or_why_not() {
        let dir = tempfile::tempdir().unwrap();
        // As deep as the data of a server is.
        let instance = dir.path().join("a".repeat(100)).join("instance");
        std::fs::create_dir_all(&instance).unwrap();
        assert!(stacks(&instance).is_err(), "nobody is there");
        let dir = rustix::fs::open(&instance, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap();
        let at = format!("/proc/self/fd/{}/runsc-instance.sock", dir.as_raw_fd());
        let listener = UnixListener::bind(at).unwrap();
        for (answer, told) in [
            (
                r#"{"success":true,"err":"","result":"goroutine 1"}"#,
                Some("goroutine 1"),
            ),
            (r#"{"success":false,"err":"no","result":null}"#, None),
            ("", None),
        ] {
            let asked = std::thread::scope(|scope| {
                scope.spawn(|| {
                    let (mut peer, _) = listener.accept().unwrap();
                    let mut question = [0; 100];
                    let length = peer.read(&mut question).unwrap();
                    assert_eq!(&question[..length], br#"{"method":"debug.Stacks","arg":{}}"#);
                    peer.write_all(answer.as_bytes()).unwrap();
                });
                stacks(&instance)
            });
            assert_eq!(asked.ok().as_deref(), told);
        }
    }
}
