//! The loop: frames come in, streams take turns, frames go out.
//!
//! ```text
//!   input FIFO ──> Decoder ──> Core::frame ──> Job::data / message        command pipes ──> Commands::pump_one
//!                                                   │ wakes                       │ wakes
//!   output FIFO <── Output (bounded) <────────── Job::step, one stream after the other
//! ```
//! What must hold:
//! - One thread, and no call that waits except the poller's.
//! - A turn is bounded (`TURN` steps), so that a busy stream delays the others by a few frames only.
//! - Streams step only while the output has room. Commands are read regardless: without a reader they go on, and with
//!   one their log is the bound.
//! - When nothing happens the loop sleeps without a timeout.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use atoll_guest_protocol::{
    Decoder, FailureKind, FrameKind, GENERATION, Hello, Message, Request, Run, Welcome, decode, encode,
};
use rustix::io::Errno;

use crate::failure::{failure, invalid};
use crate::job::{Context, Gone, Job, Shared, Step};
use crate::mux::Port;
use crate::poll::{EventFlags, Token};
use crate::requests;

const MOST_STREAMS: usize = 1024;
const TURN: usize = 16;
/// How much input is read in a row while it fills the buffer.
const READ_TURN: usize = 1 << 20;
/// How many of the longest frames are read at once in a burst: in gVisor one large write costs half of many small ones.
const BURST_FRAMES: usize = 16;
const LONGEST_PING: usize = 64;
/// After a burst, when the agent has been idle for this long, it gives its buffers back.
const REST: Duration = Duration::from_secs(2);

pub(crate) struct Agent {
    input: OwnedFd,
    decoder: Decoder,
    signals: OwnedFd,
    core: Core,
    input_paused: bool,
    output_blocked: bool,
    /// Whether buffers may have grown since they were last given back.
    bursting: bool,
}

struct Core {
    streams: BTreeMap<u32, Stream>,
    ready: VecDeque<u32>,
    shared: Shared,
}

struct Stream {
    port: Port,
    job: Box<dyn Job>,
    queued: bool,
}

impl Agent {
    pub(crate) fn new(input: OwnedFd, signals: OwnedFd, shared: Shared) -> io::Result<Self> {
        shared.poller.add(&input, Token::Input, EventFlags::IN)?;
        shared.poller.add(&signals, Token::Signals, EventFlags::IN)?;
        Ok(Self {
            input,
            decoder: Decoder::with_frames(BURST_FRAMES),
            signals,
            core: Core {
                streams: BTreeMap::new(),
                ready: VecDeque::new(),
                shared,
            },
            input_paused: false,
            output_blocked: false,
            bursting: false,
        })
    }

    /// Serves until the channel is closed, which in a sandbox never happens.
    pub(crate) fn run(mut self) -> io::Result<()> {
        let mut events = Vec::with_capacity(64);
        loop {
            self.core.turn();
            self.flush()?;
            events.clear();
            let timeout = self.timeout();
            self.core.shared.poller.wait(timeout, &mut events)?;
            if events.is_empty() && self.bursting && timeout == Some(REST) {
                self.rest();
            }
            for (token, flags) in events.drain(..) {
                match token {
                    Token::Input => {
                        if !self.read_input()? {
                            return Ok(());
                        }
                    }
                    Token::Output => {} // flushed after the turn
                    Token::Signals => self.take_signals(),
                    Token::Stream(id) => self.core.stream_ready(id, flags),
                    Token::Command(number, end) => {
                        let Shared { commands, wakes, .. } = &mut self.core.shared;
                        commands.became_ready(number, end, flags, wakes);
                    }
                }
            }
            let Shared { commands, wakes, .. } = &mut self.core.shared;
            if let Some(deadline) = commands.next_deadline() {
                let now = Instant::now();
                if deadline <= now {
                    commands.run_deadlines(now, wakes);
                }
            }
        }
    }

    /// How long nothing will happen by itself.
    fn timeout(&self) -> Option<Duration> {
        let shared = &self.core.shared;
        let runnable = !self.core.ready.is_empty() && !shared.out.full();
        if runnable || !shared.wakes.is_empty() || shared.commands.has_work() {
            return Some(Duration::ZERO);
        }
        let deadline = shared
            .commands
            .next_deadline()
            .map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let rest = self.bursting.then_some(REST);
        match (deadline, rest) {
            (Some(deadline), Some(rest)) => Some(deadline.min(rest)),
            (deadline, rest) => deadline.or(rest),
        }
    }

    fn rest(&mut self) {
        self.decoder.shrink();
        self.core.shared.out.shrink();
        self.core.shared.commands.shrink();
        self.bursting = false;
    }

    /// Writes what is queued; asks to be told when a full pipe has room again.
    fn flush(&mut self) -> io::Result<()> {
        let shared = &mut self.core.shared;
        if !shared.out.is_empty() {
            let blocked = !shared.out.flush()?;
            if blocked != self.output_blocked {
                let interest = if blocked {
                    EventFlags::OUT
                } else {
                    EventFlags::empty()
                };
                shared.poller.change(shared.out.fd(), Token::Output, interest)?;
                self.output_blocked = blocked;
            }
        }
        self.bursting |= shared.out.is_large() || shared.commands.is_large();
        if self.input_paused && !shared.out.overflowing() {
            shared.poller.change(&self.input, Token::Input, EventFlags::IN)?;
            self.input_paused = false;
            self.take_frames()?;
        }
        Ok(())
    }

    /// `false` at the end of the channel.
    fn read_input(&mut self) -> io::Result<bool> {
        if self.input_paused {
            return Ok(true);
        }
        let mut total = 0;
        while total < READ_TURN {
            let space = self.decoder.space();
            let asked = space.len();
            self.bursting |= asked > 8 * 1024;
            let count = match rustix::io::read(&self.input, space) {
                Ok(0) => return Ok(false),
                Ok(count) => count,
                Err(Errno::AGAIN | Errno::INTR) => return Ok(true),
                Err(error) => return Err(error.into()),
            };
            total += count;
            self.decoder.filled(count);
            self.take_frames()?;
            if count < asked || self.input_paused {
                break;
            }
        }
        Ok(true)
    }

    fn take_frames(&mut self) -> io::Result<()> {
        loop {
            if self.core.shared.out.overflowing() {
                // Answers pile up that nobody reads: ask no further questions.
                let poller = &self.core.shared.poller;
                poller.change(&self.input, Token::Input, EventFlags::empty())?;
                self.input_paused = true;
                return Ok(());
            }
            let Some(run) = self.decoder.next_run() else {
                return Ok(());
            };
            self.core.frame(&run);
        }
    }

    fn take_signals(&mut self) {
        let mut buffer = [0; 128 * 4];
        let _ = rustix::io::read(&self.signals, &mut buffer);
        self.core.shared.commands.reap();
    }
}

impl Core {
    /// Lets commands and streams with something to do take their turns.
    fn turn(&mut self) {
        for _ in 0..TURN {
            let mut idle = true;
            if self.shared.commands.has_work() {
                self.shared.commands.pump_one(&mut self.shared.wakes);
                idle = false;
            }
            self.take_wakes();
            if !self.shared.out.full()
                && let Some(id) = self.ready.pop_front()
            {
                self.step(id);
                idle = false;
            }
            if idle {
                return;
            }
        }
    }

    fn take_wakes(&mut self) {
        while let Some(id) = self.shared.wakes.pop() {
            self.enqueue(id);
        }
    }

    fn enqueue(&mut self, id: u32) {
        if let Some(stream) = self.streams.get_mut(&id)
            && !std::mem::replace(&mut stream.queued, true)
        {
            self.ready.push_back(id);
        }
    }

    fn step(&mut self, id: u32) {
        let Some(stream) = self.streams.get_mut(&id) else {
            return;
        };
        stream.queued = false;
        let mut cx = Context {
            port: &mut stream.port,
            shared: &mut self.shared,
        };
        match stream.job.step(&mut cx) {
            Step::Again => self.enqueue(id),
            Step::Wait => {}
            Step::Done(result) => {
                self.shared.out.end_stream(id, &result);
                self.drop_stream(id, Gone::Finished);
            }
        }
    }

    fn drop_stream(&mut self, id: u32, why: Gone) {
        if let Some(mut stream) = self.streams.remove(&id) {
            stream.job.gone(&mut self.shared, id, why);
        }
    }

    fn stream_ready(&mut self, id: u32, flags: EventFlags) {
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.job.ready(flags);
            self.enqueue(id);
        }
    }

    fn frame(&mut self, run: &Run<'_>) {
        let frame = &run.first;
        match frame.kind {
            FrameKind::Hello => self.hello(frame.payload),
            FrameKind::Open => self.open(frame.stream, frame.payload),
            FrameKind::Data | FrameKind::Message => self.deliver(run),
            FrameKind::Credit => {
                if let (Some(stream), Ok(more)) =
                    (self.streams.get_mut(&frame.stream), frame.payload.try_into())
                {
                    stream.port.granted(u32::from_le_bytes(more));
                    self.enqueue(frame.stream);
                }
            }
            FrameKind::Close => self.drop_stream(frame.stream, Gone::Closed),
            FrameKind::Ping => {
                let echo = &frame.payload[..frame.payload.len().min(LONGEST_PING)];
                self.shared.out.frame(FrameKind::Pong, 0, 0, echo);
            }
            FrameKind::Welcome | FrameKind::End | FrameKind::Pong => {} // the guest's own words
        }
    }

    /// A new host: nothing of the earlier one's conversation goes on, but commands do.
    fn hello(&mut self, payload: &[u8]) {
        let Ok(hello) = decode::<Hello>(payload) else {
            return;
        };
        let why = if hello.restored {
            Gone::Restored
        } else {
            Gone::Closed
        };
        while let Some((&id, _)) = self.streams.first_key_value() {
            self.drop_stream(id, why);
        }
        self.ready.clear();
        let welcome = Welcome {
            generation: GENERATION,
            nonce: hello.nonce,
        };
        self.shared.out.frame(FrameKind::Welcome, 0, 0, &encode(&welcome));
    }

    fn open(&mut self, id: u32, payload: &[u8]) {
        if id == 0 {
            return;
        }
        let opened = if self.streams.contains_key(&id) {
            self.drop_stream(id, Gone::Closed);
            Err(invalid("the stream was opened twice"))
        } else if self.streams.len() >= MOST_STREAMS {
            Err(failure(
                FailureKind::Busy,
                format!("{MOST_STREAMS} streams are open; close one first"),
            ))
        } else {
            match decode::<Request>(payload) {
                Ok(request) => requests::open(request, id, &mut self.shared),
                Err(error) => Err(invalid(format!("not a request of this generation: {error}"))),
            }
        };
        match opened {
            Ok(job) => {
                let stream = Stream {
                    port: Port::new(id),
                    job,
                    queued: false,
                };
                self.streams.insert(id, stream);
                self.enqueue(id);
            }
            Err(failure) => self.shared.out.end_stream(id, &Err(failure)),
        }
    }

    fn deliver(&mut self, run: &Run<'_>) {
        let frame = &run.first;
        let id = frame.stream;
        // A stream that just ended may still be written to; that is nobody's fault.
        let Some(stream) = self.streams.get_mut(&id) else {
            return;
        };
        let Stream { port, job, .. } = stream;
        let mut lengths = std::iter::once(&frame.payload).chain(&run.more);
        let result = lengths.try_for_each(|payload| port.received(payload.len()));
        let result = result.and_then(|()| {
            let mut cx = Context {
                port,
                shared: &mut self.shared,
            };
            if !run.more.is_empty() {
                let mut pieces = vec![frame.payload];
                pieces.extend(&run.more);
                return job.data_run(&mut cx, &pieces);
            }
            if frame.kind == FrameKind::Data {
                return job.data(&mut cx, frame.payload);
            }
            cx.consumed(frame.payload.len() + atoll_guest_protocol::FRAME_COST as usize);
            match decode::<Message>(frame.payload) {
                Ok(message) => job.message(&mut cx, message),
                Err(error) => Err(invalid(format!("not a message of this generation: {error}"))),
            }
        });
        match result {
            Ok(()) => self.enqueue(id),
            Err(failure) => {
                self.shared.out.end_stream(id, &Err(failure));
                self.drop_stream(id, Gone::Closed);
            }
        }
    }
}
