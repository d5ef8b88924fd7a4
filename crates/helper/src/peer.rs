//! One socket between two processes, calls in both directions, descriptors beside them.
//!
//! ```text
//!   length: u32 │ kind: u8 │ descriptors: u8 │ 0: u16 │ number: u64 │ words (JSON)
//! ```
//! A thread of its own reads, so that an answer arrives also where a caller blocks; it never waits for anybody. Lengths and
//! counts are bounded before anything is allocated. Whatever is not understood ends the conversation.

use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::fmt;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};

use async_trait::async_trait;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::oneshot;

const HEADER: usize = 16;
/// The largest listing of a volume, and more.
const LONGEST: usize = 96 << 20;
const MOST_DESCRIPTORS: usize = 8;

const CALL: u8 = 0;
const ANSWER: u8 = 1;
const NOTE: u8 = 2;

/// Words, and what goes beside them.
#[derive(Debug, Default)]
pub(crate) struct Message {
    pub(crate) words: Vec<u8>,
    pub(crate) files: Vec<OwnedFd>,
}

impl Message {
    pub(crate) fn new(words: &impl Serialize, files: Vec<OwnedFd>) -> io::Result<Self> {
        let words = serde_json::to_vec(words)?;
        Ok(Self { words, files })
    }

    pub(crate) fn read<T: DeserializeOwned>(&self) -> io::Result<T> {
        Ok(serde_json::from_slice(&self.words)?)
    }
}

/// Answers the other side.
#[async_trait]
pub(crate) trait Handler: Send + Sync + 'static {
    async fn call(&self, message: Message) -> io::Result<Message>;

    /// What needs no answer. In order, on the thread that reads: must not block.
    fn note(&self, message: Message);
}

/// This end of the conversation. Clones are the same.
#[derive(Clone)]
pub struct Peer(Arc<Inner>);

struct Inner {
    socket: UnixStream,
    writing: Mutex<()>,
    waiting: Mutex<Waiting>,
    next: AtomicU64,
}

#[derive(Default)]
struct Waiting {
    over: bool,
    callers: HashMap<u64, Caller>,
}

enum Caller {
    Task(oneshot::Sender<Message>),
    Thread(mpsc::SyncSender<Message>),
}

impl fmt::Debug for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Peer").finish_non_exhaustive()
    }
}

/// The two ends of a conversation that is still to begin.
pub fn pair() -> io::Result<(UnixStream, UnixStream)> {
    UnixStream::pair()
}

/// Whether the other half has ended. Killed while something for it is on the way, it resets the connection.
fn is_gone(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionReset | UnexpectedEof)
}

impl Peer {
    pub(crate) fn new(socket: UnixStream) -> Self {
        Self(Arc::new(Inner {
            socket,
            writing: Mutex::default(),
            waiting: Mutex::default(),
            next: AtomicU64::new(1),
        }))
    }

    /// Begins to read. `over` is called once, when the other side is gone.
    pub(crate) fn listen(
        &self,
        handler: Arc<dyn Handler>,
        over: impl FnOnce() + Send + 'static,
    ) -> io::Result<()> {
        let (peer, runtime) = (self.clone(), tokio::runtime::Handle::current());
        std::thread::Builder::new()
            .name("atoll-helper".into())
            .spawn(move || {
                let ended = peer.read_on(&handler, &runtime);
                if let Err(error) = ended
                    && !is_gone(&error)
                {
                    tracing::error!(%error, "the two halves of the server do not understand each other");
                }
                let callers = {
                    let mut waiting = peer.waiting();
                    waiting.over = true;
                    std::mem::take(&mut waiting.callers)
                };
                drop(callers);
                over();
            })?;
        Ok(())
    }

    fn read_on(&self, handler: &Arc<dyn Handler>, runtime: &tokio::runtime::Handle) -> io::Result<()> {
        loop {
            let (kind, number, message) = self.receive()?;
            match kind {
                CALL => {
                    let (peer, handler) = (self.clone(), Arc::clone(handler));
                    runtime.spawn(async move {
                        let answered = handler.call(message).await;
                        let sent = answered.and_then(|answer| peer.send(ANSWER, number, &answer));
                        if let Err(error) = sent {
                            if !is_gone(&error) {
                                tracing::error!(%error, "a question of the other half cannot be answered");
                            }
                            // Whoever asked must not wait for ever.
                            let _gone = peer.send(ANSWER, number, &Message::default());
                        }
                    });
                }
                ANSWER => match self.waiting().callers.remove(&number) {
                    Some(Caller::Task(caller)) => drop(caller.send(message)),
                    Some(Caller::Thread(caller)) => drop(caller.send(message)),
                    // It does not wait any more.
                    None => {}
                },
                NOTE => handler.note(message),
                _ => return Err(io::ErrorKind::InvalidData.into()),
            }
        }
    }

    /// Asks, and waits for the answer. Our copies of the files are closed by then: the other side may wait for that.
    pub(crate) async fn ask(&self, message: Message) -> io::Result<Message> {
        let (sender, receiver) = oneshot::channel();
        let number = self.expect(Caller::Task(sender))?;
        self.send(CALL, number, &message)?;
        drop(message);
        receiver.await.map_err(|_| gone())
    }

    /// The same for a caller that blocks, also on a thread of the runtime.
    pub(crate) fn ask_blocking(&self, message: Message) -> io::Result<Message> {
        self.begin(message)?.wait()
    }

    /// Asks, and lets the caller do something until the answer is there.
    #[expect(
        clippy::needless_pass_by_value,
        reason = "the files in it are closed here once they are sent"
    )]
    pub(crate) fn begin(&self, message: Message) -> io::Result<Asked> {
        let (sender, receiver) = mpsc::sync_channel(1);
        let number = self.expect(Caller::Thread(sender))?;
        self.send(CALL, number, &message)?;
        Ok(Asked(receiver))
    }

    pub(crate) fn tell(&self, message: &Message) -> io::Result<()> {
        self.send(NOTE, 0, message)
    }

    fn expect(&self, caller: Caller) -> io::Result<u64> {
        let number = self.0.next.fetch_add(1, Ordering::Relaxed);
        let mut waiting = self.waiting();
        if waiting.over {
            return Err(gone());
        }
        waiting.callers.insert(number, caller);
        Ok(number)
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.0.waiting.lock()
    }

    fn send(&self, kind: u8, number: u64, message: &Message) -> io::Result<()> {
        let Message { words, files } = message;
        if words.len() > LONGEST || files.len() > MOST_DESCRIPTORS {
            return Err(io::Error::other("too long a message"));
        }
        let mut header = [0; HEADER];
        header[..4].copy_from_slice(&(words.len() as u32).to_le_bytes());
        header[4] = kind;
        header[5] = files.len() as u8;
        header[8..].copy_from_slice(&number.to_le_bytes());
        let borrowed: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
        let mut beside = SendAncillaryBuffer::new(&mut space);
        if !borrowed.is_empty() && !beside.push(SendAncillaryMessage::ScmRights(&borrowed)) {
            return Err(io::Error::other("too many descriptors"));
        }
        let _turn = self.0.writing.lock();
        let mut socket = &self.0.socket;
        let pieces = [IoSlice::new(&header), IoSlice::new(words)];
        let sent = loop {
            match sendmsg(socket, &pieces, &mut beside, SendFlags::NOSIGNAL) {
                Err(rustix::io::Errno::INTR) => {}
                other => break other?,
            }
        };
        if sent < HEADER {
            socket.write_all(&header[sent..])?;
            return socket.write_all(words);
        }
        socket.write_all(&words[sent - HEADER..])
    }

    fn receive(&self) -> io::Result<(u8, u64, Message)> {
        let mut socket = &self.0.socket;
        let mut header = [0; HEADER];
        let mut files = Vec::new();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
        let mut beside = RecvAncillaryBuffer::new(&mut space);
        let got = loop {
            let mut into = [IoSliceMut::new(&mut header)];
            match recvmsg(socket, &mut into, &mut beside, RecvFlags::CMSG_CLOEXEC) {
                Err(rustix::io::Errno::INTR) => {}
                other => break other?.bytes,
            }
        };
        for message in beside.drain() {
            if let RecvAncillaryMessage::ScmRights(received) = message {
                files.extend(received);
            }
        }
        if got == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        socket.read_exact(&mut header[got..])?;
        let length = u32::from_le_bytes([header[0], header[1], header[2], header[3]]) as usize;
        let number = u64::from_le_bytes(std::array::from_fn(|at| header[8 + at]));
        if length > LONGEST || files.len() != usize::from(header[5]) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut words = vec![0; length];
        socket.read_exact(&mut words)?;
        Ok((header[4], number, Message { words, files }))
    }
}

/// A question that was asked.
pub(crate) struct Asked(mpsc::Receiver<Message>);

impl Asked {
    pub(crate) fn wait(self) -> io::Result<Message> {
        self.0.recv().map_err(|_| gone())
    }
}

fn gone() -> io::Error {
    io::Error::new(io::ErrorKind::BrokenPipe, "the other half of the server is gone")
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Seek as _;

    use super::*;

    /// Gives everything back: the words, and the files.
    struct Echo;

    #[async_trait]
    impl Handler for Echo {
        async fn call(&self, message: Message) -> io::Result<Message> {
            Ok(message)
        }

        fn note(&self, _: Message) {}
    }

    fn two() -> (Peer, mpsc::Receiver<()>) {
        let (one, other) = pair().unwrap();
        let (one, other) = (Peer::new(one), Peer::new(other));
        let (over, ended) = mpsc::channel();
        one.listen(Arc::new(Echo), || {}).unwrap();
        other
            .listen(Arc::new(Echo), move || {
                let _gone = over.send(());
            })
            .unwrap();
        (one, ended)
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn words_and_files_arrive_whole() {
        let (peer, _ended) = two();
        let long = "x".repeat(3 << 20);
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"beside").unwrap();
        let asked = || Message::new(&long, vec![file.try_clone().unwrap().into()]).unwrap();
        for answer in [
            peer.ask(asked()).await.unwrap(),
            peer.ask_blocking(asked()).unwrap(),
        ] {
            assert_eq!(answer.read::<String>().unwrap(), long);
            let mut file = File::from(answer.files.into_iter().next().unwrap());
            file.rewind().unwrap();
            assert_eq!(io::read_to_string(file).unwrap(), "beside");
        }
        let many: Vec<_> = (0..64)
            .map(|number| {
                let peer = peer.clone();
                tokio::spawn(async move {
                    let answer = peer
                        .ask(Message::new(&number, Vec::new()).unwrap())
                        .await
                        .unwrap();
                    assert_eq!(answer.read::<u32>().unwrap(), number);
                })
            })
            .collect();
        for one in many {
            one.await.unwrap();
        }
    }

    #[tokio::test]
    async fn a_side_that_is_gone_leaves_nobody_waiting() {
        let (one, other) = pair().unwrap();
        let peer = Peer::new(one);
        let (over, ended) = mpsc::channel();
        peer.listen(Arc::new(Echo), move || {
            let _gone = over.send(());
        })
        .unwrap();
        let asked = peer.begin(Message::new(&1, Vec::new()).unwrap()).unwrap();
        drop(other);
        assert!(asked.wait().is_err());
        ended.recv().unwrap();
        assert!(peer.ask(Message::default()).await.is_err());
    }

    #[tokio::test]
    async fn a_message_that_lies_about_itself_ends_the_conversation() {
        for header in [
            // Longer than anything.
            [0xff; HEADER],
            // Of an unknown kind.
            [0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            // With a descriptor that is not there.
            [0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        ] {
            let (one, mut other) = pair().unwrap();
            let peer = Peer::new(one);
            let (over, ended) = mpsc::channel();
            peer.listen(Arc::new(Echo), move || {
                let _gone = over.send(());
            })
            .unwrap();
            other.write_all(&header).unwrap();
            ended.recv().unwrap();
        }
    }
}
