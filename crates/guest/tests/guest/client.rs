//! A small blocking host: enough of the protocol to drive the agent, and to misbehave on purpose.

use std::collections::{BTreeMap, VecDeque};
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use atoll_guest_protocol::{
    CommandState, Decoder, Exec, FILLER_LEN, FRAME_COST, Failure, FrameKind, GENERATION, Hello,
    INITIAL_CREDIT, MAX_PAYLOAD, Message, Request, SUB_STDERR, SUB_STDOUT, Welcome, decode, encode,
    encode_into,
};

pub(crate) const PROGRAM: &str = env!("CARGO_BIN_EXE_atoll-guest");

static NUMBER: AtomicU32 = AtomicU32::new(0);

const PATIENCE: Duration = Duration::from_secs(90);

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Event {
    Data(u8, Vec<u8>),
    Message(Message),
    End(Result<(), Failure>),
}

pub(crate) struct Guest {
    child: Child,
    stdin: ChildStdin,
    stdout: ChildStdout,
    decoder: Decoder,
    next_stream: u32,
    /// What arrived and was not yet asked for; credit is returned when it is.
    inbox: BTreeMap<u32, VecDeque<Event>>,
    /// What we may send, per stream.
    credit: BTreeMap<u32, i64>,
    pub(crate) welcomes: Vec<Welcome>,
    pub(crate) pongs: Vec<Vec<u8>>,
    home: String,
}

/// All that a finished command left.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: Vec<u8>,
    pub(crate) dropped: u64,
    pub(crate) state: CommandState,
}

impl Guest {
    pub(crate) fn start() -> Self {
        let mut guest = Self::silent(&[]);
        guest.hello(1);
        guest
    }

    /// Started, but not yet greeted.
    pub(crate) fn silent(arguments: &[&str]) -> Self {
        // For running all of this inside a sandbox: a program that starts the agent there, with our pipes as its stdio.
        let program = std::env::var("ATOLL_GUEST_PROGRAM");
        let mut command = Command::new(program.as_deref().unwrap_or(PROGRAM));
        command.args(arguments);
        Self::by(command)
    }

    /// Started by a command of the test's own, such as a shell that opens more descriptors.
    pub(crate) fn by(mut command: Command) -> Self {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the agent starts");
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let (stdin, stdout) = (
            child.stdin.take().expect("piped"),
            child.stdout.take().expect("piped"),
        );
        for pipe in [stdin.as_fd(), stdout.as_fd()] {
            let _ = rustix::pipe::fcntl_setpipe_size(pipe, 1 << 20); // as the host's FIFOs
        }
        Self {
            child,
            stdin,
            stdout,
            decoder: Decoder::new(),
            next_stream: 1,
            inbox: BTreeMap::new(),
            credit: BTreeMap::new(),
            welcomes: Vec::new(),
            pongs: Vec::new(),
            home: format!("/tmp/atoll-guest-test-{}-{number}", std::process::id()),
        }
    }

    /// Whether the agent runs here, rather than in a sandbox of `ATOLL_GUEST_PROGRAM`.
    pub(crate) fn is_local() -> bool {
        std::env::var_os("ATOLL_GUEST_PROGRAM").is_none()
    }

    /// A path in this test's own directory, as the agent sees it.
    pub(crate) fn path(&self, name: &str) -> Vec<u8> {
        format!("{}/{name}", self.home).into_bytes()
    }

    pub(crate) fn home(&self) -> &str {
        &self.home
    }

    pub(crate) fn hello(&mut self, nonce: u64) {
        self.raw(&vec![0; FILLER_LEN]);
        let hello = Hello {
            generation: GENERATION,
            nonce,
            restored: false,
        };
        self.frame(FrameKind::Hello, 0, 0, &encode(&hello));
        self.inbox.clear();
        self.credit.clear();
        let deadline = Instant::now() + PATIENCE;
        while self.welcomes.last().is_none_or(|welcome| welcome.nonce != nonce) {
            assert!(self.receive(deadline), "no Welcome");
        }
        self.inbox.clear();
    }

    pub(crate) fn raw(&mut self, bytes: &[u8]) {
        self.stdin.write_all(bytes).expect("the agent reads");
    }

    pub(crate) fn frame(&mut self, kind: FrameKind, sub: u8, stream: u32, payload: &[u8]) {
        let mut bytes = Vec::new();
        encode_into(&mut bytes, kind, sub, stream, payload);
        self.raw(&bytes);
    }

    pub(crate) fn open(&mut self, request: &Request) -> u32 {
        let stream = self.next_stream;
        self.next_stream += 1;
        self.credit.insert(stream, i64::from(INITIAL_CREDIT));
        self.inbox.insert(stream, VecDeque::new());
        self.frame(FrameKind::Open, 0, stream, &encode(request));
        stream
    }

    pub(crate) fn close(&mut self, stream: u32) {
        self.frame(FrameKind::Close, 0, stream, &[]);
        self.inbox.remove(&stream);
    }

    /// Sends bytes as credit allows; stops early if the stream ended.
    pub(crate) fn send(&mut self, stream: u32, bytes: &[u8]) {
        for piece in bytes.chunks(MAX_PAYLOAD) {
            let cost = piece.len() as i64 + i64::from(FRAME_COST);
            let deadline = Instant::now() + PATIENCE;
            while self.credit[&stream] < cost {
                if self.inbox[&stream]
                    .iter()
                    .any(|event| matches!(event, Event::End(_)))
                {
                    return;
                }
                assert!(self.receive(deadline), "no credit came");
            }
            *self.credit.get_mut(&stream).expect("open") -= cost;
            self.frame(FrameKind::Data, 0, stream, piece);
        }
    }

    pub(crate) fn send_end(&mut self, stream: u32) {
        self.frame(FrameKind::Data, 0, stream, &[]);
    }

    pub(crate) fn tell(&mut self, stream: u32, message: &Message) {
        self.frame(FrameKind::Message, 0, stream, &encode(message));
    }

    /// The next thing on a stream. Its credit goes back.
    pub(crate) fn next(&mut self, stream: u32) -> Event {
        self.next_within(stream, PATIENCE).expect("the agent answers")
    }

    pub(crate) fn next_within(&mut self, stream: u32, patience: Duration) -> Option<Event> {
        let deadline = Instant::now() + patience;
        loop {
            if let Some(event) = self.inbox.entry(stream).or_default().pop_front() {
                let cost = match &event {
                    Event::Data(_, bytes) => bytes.len() as u32 + FRAME_COST,
                    Event::Message(message) => encode(message).len() as u32 + FRAME_COST,
                    Event::End(_) => 0,
                };
                if cost > 0 {
                    self.frame(FrameKind::Credit, 0, stream, &cost.to_le_bytes());
                }
                return Some(event);
            }
            if !self.receive(deadline) {
                return None;
            }
        }
    }

    pub(crate) fn message(&mut self, stream: u32) -> Message {
        match self.next(stream) {
            Event::Message(message) => message,
            other => panic!("expected a message, got {other:?}"),
        }
    }

    pub(crate) fn end(&mut self, stream: u32) -> Result<(), Failure> {
        match self.next(stream) {
            Event::End(result) => result,
            other => panic!("expected the end, got {other:?}"),
        }
    }

    /// A request that is answered by nothing but its end.
    pub(crate) fn call(&mut self, request: &Request) -> Result<(), Failure> {
        let stream = self.open(request);
        self.end(stream)
    }

    /// A request that is answered by one message.
    pub(crate) fn ask(&mut self, request: &Request) -> Result<Message, Failure> {
        let stream = self.open(request);
        match self.next(stream) {
            Event::Message(message) => self.end(stream).map(|()| message),
            Event::End(Err(failure)) => Err(failure),
            other => panic!("expected an answer, got {other:?}"),
        }
    }

    /// Follows a command to its end.
    pub(crate) fn finish(&mut self, stream: u32) -> Outcome {
        let (mut stdout, mut stderr, mut dropped) = (Vec::new(), Vec::new(), 0);
        loop {
            match self.next(stream) {
                Event::Data(SUB_STDOUT, bytes) => stdout.extend(bytes),
                Event::Data(SUB_STDERR, bytes) => stderr.extend(bytes),
                Event::Message(Message::Started { .. }) => {}
                Event::Message(Message::Dropped { bytes, .. }) => dropped += bytes,
                Event::Message(Message::Exited(state)) => {
                    assert_eq!(self.end(stream), Ok(()));
                    return Outcome {
                        stdout,
                        stderr,
                        dropped,
                        state,
                    };
                }
                other => panic!("unexpected {other:?}"),
            }
        }
    }

    pub(crate) fn run(&mut self, script: &str) -> Outcome {
        let name = format!("run-{}", self.next_stream);
        let stream = self.open(&Request::Exec(shell(&name, script)));
        self.finish(stream)
    }

    /// Receives for a while and keeps what comes.
    pub(crate) fn idle(&mut self, time: Duration) {
        let deadline = Instant::now() + time;
        while self.receive(deadline) {}
    }

    /// Whether something arrived on this stream that was not yet asked for.
    pub(crate) fn has_unread(&self, stream: u32) -> bool {
        !self.inbox[&stream].is_empty()
    }

    pub(crate) fn unread(&self, stream: u32) -> usize {
        let length = |event: &Event| match event {
            Event::Data(_, bytes) => bytes.len(),
            _ => 0,
        };
        self.inbox[&stream].iter().map(length).sum()
    }

    /// Waits for bytes and sorts the frames in them; `false` when the time is over.
    fn receive(&mut self, deadline: Instant) -> bool {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = rustix::time::Timespec {
            tv_sec: left.as_secs() as i64,
            tv_nsec: left.subsec_nanos().into(),
        };
        let stdout = self.stdout.as_fd();
        let mut polled = [rustix::event::PollFd::from_borrowed_fd(
            stdout,
            rustix::event::PollFlags::IN,
        )];
        if rustix::event::poll(&mut polled, Some(&timeout)).expect("poll") == 0 {
            return false;
        }
        let count = self.stdout.read(self.decoder.space()).expect("read");
        assert!(count > 0, "the agent is gone");
        self.decoder.filled(count);
        while let Some(frame) = self.decoder.next_frame() {
            let stream = frame.stream;
            let event = match frame.kind {
                FrameKind::Welcome => {
                    self.welcomes.push(decode(frame.payload).expect("a Welcome"));
                    continue;
                }
                FrameKind::Pong => {
                    self.pongs.push(frame.payload.to_vec());
                    continue;
                }
                FrameKind::Credit => {
                    let more = u32::from_le_bytes(frame.payload.try_into().expect("four bytes"));
                    *self.credit.entry(stream).or_default() += i64::from(more);
                    continue;
                }
                FrameKind::Data => Event::Data(frame.sub, frame.payload.to_vec()),
                FrameKind::Message => Event::Message(decode(frame.payload).expect("a message")),
                FrameKind::End => Event::End(decode(frame.payload).expect("an end")),
                other => panic!("the agent sent {other:?}"),
            };
            if let Some(queue) = self.inbox.get_mut(&stream) {
                queue.push_back(event);
            }
        }
        true
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.home);
    }
}

pub(crate) fn exec(name: &str, argv: &[&str]) -> Exec {
    Exec {
        command: name.to_owned(),
        argv: argv.iter().map(|argument| argument.as_bytes().to_vec()).collect(),
        env: Vec::new(),
        cwd: Some(b"/".to_vec()),
        user: None,
        pty: None,
        stdin: false,
        timeout_millis: None,
        log_bytes: 64 * 1024,
        wait_for_reader: true,
        kill_on_close: false,
    }
}

pub(crate) fn shell(name: &str, script: &str) -> Exec {
    exec(name, &["sh", "-c", script])
}
