//! Calls into a running sentry over its control socket: what the `runsc` commands do, without starting a `runsc`.
//!
//! One JSON object each way; descriptors travel beside the question.
//!
//! ```text
//!   {"method": "containerManager.Pause", "arg": {}}  ──────>  <dir>/runsc-<id>.sock
//!   <──────  {"success": true, "err": "", "result": {}}
//! ```
//! This is no stable interface: it belongs to the pinned `runsc`. Names and arguments here are those of its Go structures.
//!
//! What must hold: the other end is the sentry, which a guest may have taken over. Its answers are bounded in length and in
//! time, and nothing but their success and their text is used.

use std::io::{self, BufReader, ErrorKind, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use atoll_types::InstanceId;
use rustix::fs::{Mode, OFlags};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde::Deserialize;
use serde_json::{Value, json};

use super::network::Wire;
use crate::cause::Doing;
use crate::{Cause, Kind};

const LONGEST_ANSWER: u64 = 1 << 20;
const MOST_FILES: usize = 8;

/// A connection to the sentry of one instance. Blocking.
#[derive(Debug)]
pub(super) struct Control {
    socket: UnixStream,
}

#[derive(Debug, Deserialize)]
struct Answer {
    success: bool,
    #[serde(default)]
    err: String,
}

impl Control {
    pub(super) fn connect(dir: &Path, id: &InstanceId) -> Result<Self, Cause> {
        let name = format!("runsc-{id}.sock");
        let connected = || -> io::Result<UnixStream> {
            // By way of a descriptor: the name of a socket may have 107 bytes, a path has more.
            let dir = rustix::fs::open(
                dir,
                OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
                Mode::empty(),
            )?;
            UnixStream::connect(format!("/proc/self/fd/{}/{name}", dir.as_raw_fd()))
        };
        let socket = connected().doing(|| "reaching the sentry")?;
        Ok(Self { socket })
    }

    /// All tasks of the guest stop. Counted: it takes as many [`Control::resume`] to go on.
    pub(super) fn pause(&mut self) -> Result<(), Cause> {
        self.call("containerManager.Pause", &json!({}), &[], Duration::from_secs(30))
    }

    /// Ends one [`Control::pause`]. One too many kills the sentry.
    pub(super) fn resume(&mut self) -> Result<(), Cause> {
        self.call(
            "containerManager.Resume",
            &json!({}),
            &[],
            Duration::from_secs(30),
        )
    }

    /// Writes everything into three files: state, page metadata, pages.
    pub(super) fn checkpoint(&mut self, files: &[BorrowedFd<'_>; 3], within: Duration) -> Result<(), Cause> {
        let arg = json!({
            "metadata": {"compression": "none"},
            "have_pages_file": true,
            // Otherwise the end of a checkpoint, also of a failed one, is the end of the sandbox.
            "Resume": true,
        });
        self.call("containerManager.Checkpoint", &arg, files, within)
    }

    /// Writes the writable layer as a tar archive.
    pub(super) fn tar_layer(
        &mut self,
        id: &InstanceId,
        file: BorrowedFd<'_>,
        within: Duration,
    ) -> Result<(), Cause> {
        let arg = json!({"ContainerID": id.as_str()});
        self.call("Fs.TarRootfsUpperLayer", &arg, &[file], within)
    }

    /// Starts the agent in a sentry that waits.
    pub(super) fn start(&mut self, id: &InstanceId, wire: &Wire, within: Duration) -> Result<(), Cause> {
        self.links(wire, false)?;
        self.call("containerManager.StartRoot", &json!(id.as_str()), &[], within)
    }

    /// Puts what [`Control::checkpoint`] wrote into a sentry that was created and not started, and starts it.
    pub(super) fn restore(
        &mut self,
        wire: &Wire,
        files: &[BorrowedFd<'_>; 3],
        within: Duration,
    ) -> Result<(), Cause> {
        self.links(wire, true)?;
        // In the background: it goes on while pages are still being read.
        let arg = json!({"HavePagesFile": true, "HaveDeviceFile": false, "Background": true});
        self.call("containerManager.Restore", &arg, files, within)
    }

    /// Says which network it has, before it starts.
    fn links(&mut self, wire: &Wire, restore: bool) -> Result<(), Cause> {
        self.call(
            "containerManager.SetNetworkArgs",
            &wire.links(restore),
            &wire.sockets(),
            Duration::from_secs(30),
        )
    }

    fn call(
        &mut self,
        method: &str,
        arg: &Value,
        files: &[BorrowedFd<'_>],
        within: Duration,
    ) -> Result<(), Cause> {
        let answer = (|| {
            let question = serde_json::to_vec(&json!({"method": method, "arg": arg}))?;
            self.socket.set_write_timeout(Some(within))?;
            self.socket.set_read_timeout(Some(within))?;
            self.send(&question, files)?;
            let mut reader = BufReader::new((&self.socket).take(LONGEST_ANSWER));
            let mut json = serde_json::Deserializer::from_reader(&mut reader);
            Answer::deserialize(&mut json).map_err(io::Error::from)
        })();
        match answer {
            Ok(Answer { success: true, .. }) => Ok(()),
            // Sometimes a Go stack follows.
            Ok(Answer { err, .. }) => {
                let first: String = err
                    .lines()
                    .next()
                    .unwrap_or_default()
                    .chars()
                    .take(1000)
                    .collect();
                Err(Cause::said(&format!("{method}: {first}")))
            }
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
                Err(Cause::new(Kind::Program, format!("{method}: the sentry hung up")))
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                let waited = format!("{method}: no answer within {} s", within.as_secs());
                Err(Cause::new(Kind::TimedOut, waited))
            }
            Err(error) => Err(error).doing(|| method),
        }
    }

    fn send(&mut self, question: &[u8], files: &[BorrowedFd<'_>]) -> io::Result<()> {
        if files.is_empty() {
            return self.socket.write_all(question);
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FILES))];
        let mut beside = SendAncillaryBuffer::new(&mut space);
        if !beside.push(SendAncillaryMessage::ScmRights(files)) {
            return Err(io::Error::other("too many files"));
        }
        let slices = [IoSlice::new(question)];
        let sent = sendmsg(&self.socket, &slices, &mut beside, SendFlags::NOSIGNAL)?;
        self.socket.write_all(&question[sent..])
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixListener;

    use super::*;
    use crate::Told;

    /// What a sentry that answers with these bytes makes of a call.
    fn answered(answer: &'static [u8]) -> Result<(), Told> {
        let dir = tempfile::tempdir().unwrap();
        let id = InstanceId::from_entropy([1; 20]);
        let listener = UnixListener::bind(dir.path().join(format!("runsc-{id}.sock"))).unwrap();
        let sentry = std::thread::spawn(move || {
            let (mut peer, _) = listener.accept().unwrap();
            let mut question = [0; 4096];
            let length = peer.read(&mut question).unwrap();
            let _ = peer.write_all(answer);
            String::from_utf8(question[..length].to_vec()).unwrap()
        });
        let file = tempfile::tempfile().unwrap();
        let result = Control::connect(dir.path(), &id).unwrap().call(
            "x.Y",
            &json!({"a": 1}),
            &[file.as_fd()],
            Duration::from_secs(5),
        );
        assert_eq!(sentry.join().unwrap(), r#"{"arg":{"a":1},"method":"x.Y"}"#);
        result.map_err(Told::from)
    }

    #[test]
    fn answers_are_believed_only_when_they_are_whole() {
        assert_eq!(answered(br#"{"success":true,"err":"","result":{}}"#), Ok(()));
        assert_eq!(
            answered(br#"{"success":false,"err":"no","result":null}"#),
            Err(Told::new(Kind::Program, "x.Y: no"))
        );
        let full = "x.Y: write pages: no space left on device";
        assert_eq!(
            answered(br#"{"success":false,"err":"write pages: no space left on device\ngoroutine 1"}"#),
            Err(Told::new(Kind::HostFull, full))
        );
        let hung_up = Err(Told::new(Kind::Program, "x.Y: the sentry hung up"));
        assert_eq!(answered(b""), hung_up);
        assert_eq!(answered(br#"{"success":tr"#), hung_up);
        assert!(answered(b"nonsense").is_err());
    }
}
