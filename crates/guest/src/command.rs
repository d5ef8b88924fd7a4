//! One command: a process group, the descriptors that lead to it, and the log of what it said.
//!
//! ```text
//!   Running ── main process exits ──> Draining ── pipes at end, or quiet for GRACE ──> over (state is set)
//! ```
//! What must hold:
//! - A reader is told of the end only after all output that the main process wrote: [`Command::is_over`] comes last.
//! - Grandchildren that keep the pipes do not delay the end by more than `GRACE`. Their later output is read and thrown
//!   away, up to an allowance, so that a server left in the background is not killed by its own log line.
//! - While `wait_for_reader` holds and someone reads, unread output is never overwritten: its pipe is not read instead.

use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::{Duration, Instant};

use atoll_guest_protocol::{CommandInfo, CommandState, PtySize, SUB_STDERR, SUB_STDOUT};
use rustix::io::Errno;

use crate::log::Log;
use crate::poll::{End, EventFlags};

/// How long the pipes must be quiet after the main process exited.
pub(crate) const GRACE: Duration = Duration::from_millis(60);
/// What may still be read after the exit: more than any pipe held at that moment.
const DRAIN_ALLOWANCE: u64 = 2 * 1024 * 1024;
const DISCARD_ALLOWANCE: u64 = 16 * 1024 * 1024;
/// How much of a command line the list of commands shows.
const SHOWN_ARGV: usize = 4096;

#[derive(Debug)]
pub(crate) struct Command {
    name: String,
    argv: Vec<Vec<u8>>,
    pid: i32,
    started_millis: u64,
    ended_millis: Option<u64>,
    pub(crate) log: Log,
    stdin: Option<Sink>,
    input_bytes: u64,
    sources: Vec<Source>,
    terminal: Option<Rc<OwnedFd>>,
    pub(crate) readers: Vec<Reader>,
    wait_for_reader: bool,
    phase: Phase,
    /// Set when the timeout killed it.
    timed_out: bool,
    /// It is over, but the host that follows ends was not told yet; those who are attached wait for that.
    pub(crate) untold: bool,
    /// Whether those who are attached are to hear at once that it runs.
    pub(crate) announced: bool,
    /// Whether it stands in the queue of commands to be pumped.
    pub(crate) queued: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Running,
    Draining { state: CommandState, from: u64 },
    Over { state: CommandState, discarded: u64 },
}

/// A stream that follows the output.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reader {
    pub(crate) stream: u32,
    pub(crate) cursor: u64,
}

#[derive(Debug)]
struct Sink {
    fd: Rc<OwnedFd>,
    writable: bool,
}

#[derive(Debug)]
struct Source {
    fd: Rc<OwnedFd>,
    end: End,
    readable: bool,
    hung_up: bool,
}

/// What a command is made of, before its process runs.
#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) name: String,
    pub(crate) argv: Vec<Vec<u8>>,
    pub(crate) started_millis: u64,
    pub(crate) stdin: Option<OwnedFd>,
    pub(crate) stdout: Option<OwnedFd>,
    pub(crate) stderr: Option<OwnedFd>,
    pub(crate) terminal: Option<OwnedFd>,
    pub(crate) log_bytes: u32,
    pub(crate) wait_for_reader: bool,
}

/// What came of an attempt to write to a command's stdin.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Fed {
    Took(usize),
    Full,
    /// Nobody reads it any more.
    Gone,
}

/// What a round of reading did.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Pumped {
    pub(crate) more: bool,
    pub(crate) new_output: bool,
    /// Draining, and nothing to read: the grace period begins.
    pub(crate) quiet: bool,
    pub(crate) over: bool,
}

impl Command {
    pub(crate) fn new(parts: Parts) -> Self {
        let terminal = parts.terminal.map(Rc::new);
        let source = |fd: Rc<OwnedFd>, end| Source {
            fd,
            end,
            readable: true,
            hung_up: false,
        };
        let sources = [
            (parts.stdout.map(Rc::new), End::Stdout),
            (parts.stderr.map(Rc::new), End::Stderr),
            (terminal.clone(), End::Terminal),
        ];
        Self {
            name: parts.name,
            argv: parts.argv,
            pid: 0,
            started_millis: parts.started_millis,
            ended_millis: None,
            log: Log::new(parts.log_bytes),
            stdin: parts
                .stdin
                .map(Rc::new)
                .or_else(|| terminal.clone())
                .map(|fd| Sink { fd, writable: true }),
            input_bytes: 0,
            sources: sources
                .into_iter()
                .filter_map(|(fd, end)| Some(source(fd?, end)))
                .collect(),
            terminal,
            readers: Vec::new(),
            wait_for_reader: parts.wait_for_reader,
            phase: Phase::Running,
            timed_out: false,
            untold: false,
            announced: false,
            queued: false,
        }
    }

    /// The process started; until then there is nobody to signal.
    pub(crate) fn runs_as(&mut self, pid: i32) {
        self.pid = pid;
    }

    /// Every descriptor to be watched.
    pub(crate) fn descriptors(&self) -> Vec<(Rc<OwnedFd>, End)> {
        let mut all: Vec<_> = self
            .sources
            .iter()
            .map(|source| (source.fd.clone(), source.end))
            .collect();
        if let (Some(stdin), None) = (&self.stdin, &self.terminal) {
            all.push((stdin.fd.clone(), End::Stdin));
        }
        all
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn pid(&self) -> i32 {
        self.pid
    }

    /// Whether there is anything to tell of it yet.
    pub(crate) fn is_news(&self) -> bool {
        self.announced || self.phase != Phase::Running || self.log.end() > 0
    }

    pub(crate) fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Over { .. })
    }

    pub(crate) fn state(&self) -> CommandState {
        match self.phase {
            Phase::Running | Phase::Draining { .. } => CommandState::Running,
            Phase::Over { state, .. } => state,
        }
    }

    pub(crate) fn info(&self) -> CommandInfo {
        let mut left = SHOWN_ARGV;
        let argv = self
            .argv
            .iter()
            .take(256)
            .map_while(|argument| {
                let shown = argument.len().min(left);
                left -= shown;
                (shown > 0 || argument.is_empty()).then(|| argument[..shown].to_vec())
            })
            .collect();
        CommandInfo {
            command: self.name.clone(),
            pid: self.pid.unsigned_abs(),
            argv,
            state: self.state(),
            started_millis: self.started_millis,
            ended_millis: self.ended_millis,
            pty: self.terminal.is_some(),
            input_bytes: self.input_bytes,
            output_bytes: self.log.end(),
            log_start: self.log.start(),
        }
    }

    /// Signals the process group; `false` if the main process is gone.
    pub(crate) fn signal(&self, signal: i32) -> io::Result<bool> {
        if self.phase != Phase::Running {
            return Ok(false);
        }
        // SAFETY: plain system call. The group exists while its leader is not reaped, so it is ours.
        match unsafe { libc::kill(-self.pid, signal) } {
            0 => Ok(true),
            _ => Err(io::Error::last_os_error()),
        }
    }

    pub(crate) fn time_is_over(&mut self) {
        if self.phase == Phase::Running {
            self.timed_out = true;
            let _ = self.signal(libc::SIGKILL);
        }
    }

    pub(crate) fn resize(&self, size: PtySize) {
        if let Some(terminal) = &self.terminal {
            let _ = crate::terminal::resize(terminal, size);
        }
    }

    /// The main process was reaped.
    pub(crate) fn exited(&mut self, state: CommandState) {
        let state = if self.timed_out {
            CommandState::TimedOut
        } else {
            state
        };
        self.stdin = None;
        self.phase = Phase::Draining {
            state,
            from: self.log.end(),
        };
        // Whatever was written before the exit is readable now, also where no event told of it yet.
        for source in &mut self.sources {
            source.readable = true;
        }
    }

    pub(crate) fn became_ready(&mut self, end: End, flags: EventFlags) {
        let gone = EventFlags::HUP | EventFlags::ERR;
        if flags.intersects(EventFlags::OUT | gone)
            && matches!(end, End::Stdin | End::Terminal)
            && let Some(stdin) = &mut self.stdin
        {
            stdin.writable = true;
        }
        if flags.intersects(EventFlags::IN | EventFlags::RDHUP | gone)
            && let Some(source) = self.sources.iter_mut().find(|source| source.end == end)
        {
            source.readable = true;
            source.hung_up |= flags.intersects(gone);
        }
    }

    /// Input for the command, as much as it takes.
    pub(crate) fn feed(&mut self, bytes: &[u8]) -> Fed {
        let fed = self.write_stdin(bytes);
        if let Fed::Took(count) = fed {
            self.input_bytes += count as u64;
        }
        fed
    }

    fn write_stdin(&mut self, bytes: &[u8]) -> Fed {
        let Some(stdin) = &mut self.stdin else {
            return Fed::Gone;
        };
        if !stdin.writable {
            return Fed::Full;
        }
        loop {
            match rustix::io::write(&*stdin.fd, bytes) {
                Ok(count) => return Fed::Took(count),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    stdin.writable = false;
                    return Fed::Full;
                }
                Err(_) => {
                    self.stdin = None;
                    return Fed::Gone;
                }
            }
        }
    }

    /// End of input: closes the pipe; a terminal gets its end-of-file character.
    pub(crate) fn close_stdin(&mut self) {
        match &self.terminal {
            Some(_) => {
                let _ = self.write_stdin(&[4]);
            }
            None => self.stdin = None,
        }
    }

    /// How much may be read now without losing what someone waits for.
    fn room(&self) -> usize {
        let least = self.readers.iter().map(|reader| reader.cursor).min();
        match least {
            Some(least) if self.wait_for_reader => {
                // Half the log at a time: never a read of a few bytes.
                let half = self.log.limit() / 2;
                if self.log.held_from(least) < half {
                    half - 64
                } else {
                    0
                }
            }
            _ => usize::MAX,
        }
    }

    /// Whether output waits for a reader to make room.
    pub(crate) fn is_held_back(&self) -> bool {
        self.sources.iter().any(|source| source.readable) && self.room() == 0
    }

    /// Reads once from each source that has something.
    pub(crate) fn pump(&mut self, scratch: &mut [u8], now_millis: u64) -> Pumped {
        let mut done = Pumped::default();
        let mut index = 0;
        while index < self.sources.len() {
            let discarding = self.is_over();
            let room = if discarding { usize::MAX } else { self.room() };
            let source = &mut self.sources[index];
            if !source.readable || room == 0 {
                index += 1;
                continue;
            }
            let space = scratch.len().min(room).min(Log::LEAST);
            match rustix::io::read(&*source.fd, &mut scratch[..space]) {
                // A terminal whose last process is gone answers EIO.
                Ok(0) | Err(Errno::IO) => {
                    self.sources.remove(index);
                    continue;
                }
                Ok(count) => {
                    // A pipe that gave less than asked is empty; the next byte brings an event.
                    if count < space && !source.hung_up && source.end != End::Terminal {
                        source.readable = false;
                    }
                    let sub = if source.end == End::Stderr {
                        SUB_STDERR
                    } else {
                        SUB_STDOUT
                    };
                    if discarding {
                        self.discard(count as u64);
                    } else {
                        self.log.push(sub, &scratch[..count]);
                        done.new_output = true;
                    }
                }
                Err(Errno::AGAIN) => source.readable = false,
                Err(Errno::INTR) => {}
                Err(_) => {
                    self.sources.remove(index);
                    continue;
                }
            }
            index += 1;
        }
        let readable = self.sources.iter().any(|source| source.readable);
        done.more = readable && (self.is_over() || self.room() > 0);
        if let Phase::Draining { from, .. } = self.phase {
            if self.sources.is_empty() || self.log.end() - from > DRAIN_ALLOWANCE {
                self.finish(now_millis);
                done.over = true;
            } else {
                done.quiet = !readable;
            }
        }
        done
    }

    /// The grace period is over: reports the end, unless output is still waiting.
    pub(crate) fn grace_is_over(&mut self, now_millis: u64) -> bool {
        let quiet = !self.sources.iter().any(|source| source.readable);
        if quiet && matches!(self.phase, Phase::Draining { .. }) {
            self.finish(now_millis);
            return true;
        }
        false
    }

    fn finish(&mut self, now_millis: u64) {
        if let Phase::Draining { state, .. } = self.phase {
            self.phase = Phase::Over { state, discarded: 0 };
            self.ended_millis = Some(now_millis);
            self.log.settle();
        }
    }

    fn discard(&mut self, count: u64) {
        if let Phase::Over { discarded, .. } = &mut self.phase {
            *discarded += count;
            if *discarded > DISCARD_ALLOWANCE {
                self.sources.clear();
            }
        }
    }

    pub(crate) fn reader(&mut self, stream: u32) -> Option<&mut Reader> {
        self.readers.iter_mut().find(|reader| reader.stream == stream)
    }
}

/// A deadline of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Alarm {
    Timeout,
    Grace,
    Announce,
}

/// When, for which command, and why.
pub(crate) type Deadline = (Instant, u32, Alarm);
