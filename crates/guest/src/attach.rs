//! A stream that follows a command: its output from the log, its end, and the way back to its stdin and terminal.

use std::collections::VecDeque;

use atoll_guest_protocol::{FRAME_COST, Message};

use crate::command::Fed;
use crate::failure::{Outcome, failure, invalid};
use crate::job::{Context, Gone, Job, Shared, Step};

#[derive(Debug)]
pub(crate) struct Attach {
    command: u32,
    /// Sent first, on the stream that started it.
    started: Option<Message>,
    kill_on_close: bool,
    /// Bytes for stdin that its pipe had no room for; bounded by the stream's window.
    waiting: VecDeque<u8>,
    /// The host said that no more input follows.
    input_over: bool,
}

impl Attach {
    pub(crate) fn new(command: u32, started: Option<Message>, kill_on_close: bool) -> Self {
        Self {
            command,
            started,
            kill_on_close,
            waiting: VecDeque::new(),
            input_over: false,
        }
    }

    /// Moves waiting input on, as far as the command takes it.
    fn feed(&mut self, cx: &mut Context<'_>) {
        while !self.waiting.is_empty() {
            let gone = match cx.shared.commands.get_mut(self.command) {
                None => Fed::Gone,
                Some(command) => command.feed(self.waiting.as_slices().0),
            };
            let done = match gone {
                Fed::Full => return,
                Fed::Took(count) => count,
                Fed::Gone => self.waiting.len(),
            };
            self.waiting.drain(..done);
            cx.consumed(done);
        }
        self.waiting = VecDeque::new();
        if std::mem::take(&mut self.input_over)
            && let Some(command) = cx.shared.commands.get_mut(self.command)
        {
            command.close_stdin();
        }
    }

    /// Sends the next piece of output, or its end.
    fn follow(&mut self, cx: &mut Context<'_>) -> Step {
        let stream = cx.port.id();
        let Shared { commands, out, .. } = &mut *cx.shared;
        let forgotten = || {
            Step::Done(Err(failure(
                atoll_guest_protocol::FailureKind::NotFound,
                "the command was forgotten",
            )))
        };
        let Some(command) = commands.get_mut(self.command) else {
            return forgotten();
        };
        let Some(cursor) = command.reader(stream).map(|reader| reader.cursor) else {
            return forgotten();
        };
        let start = command.log.start();
        let next = if cursor < start {
            let dropped = Message::Dropped {
                bytes: start - cursor,
                next: start,
            };
            if !cx.port.message(out, &dropped) {
                return Step::Wait;
            }
            start
        } else {
            let room = cx.port.data_room();
            if room == 0 {
                return Step::Wait;
            }
            match command.log.read(cursor, room) {
                Some(chunk) => {
                    cx.port.data(out, chunk.sub, chunk.bytes);
                    cursor + chunk.bytes.len() as u64
                }
                None if !command.is_over() || command.untold => return Step::Wait,
                None => {
                    if !cx.port.message(out, &Message::Exited(command.state())) {
                        return Step::Wait;
                    }
                    return Step::Done(Ok(()));
                }
            }
        };
        let held_back = command.is_held_back();
        if let Some(reader) = command.reader(stream) {
            reader.cursor = next;
        }
        if held_back {
            commands.enqueue(self.command);
        }
        Step::Again
    }
}

impl Job for Attach {
    fn step(&mut self, cx: &mut Context<'_>) -> Step {
        if let Some(started) = self.started.take() {
            let news = cx
                .shared
                .commands
                .get_mut(self.command)
                .is_none_or(|command| command.is_news());
            if !news || !cx.message(&started) {
                self.started = Some(started);
                return Step::Wait;
            }
        }
        self.feed(cx);
        self.follow(cx)
    }

    fn data(&mut self, cx: &mut Context<'_>, bytes: &[u8]) -> Outcome {
        cx.consumed(FRAME_COST as usize);
        if bytes.is_empty() {
            self.input_over = true;
        }
        let mut rest = bytes;
        // Straight from the channel's buffer into the pipe, when nothing waits before it.
        if self.waiting.is_empty()
            && !rest.is_empty()
            && let Some(command) = cx.shared.commands.get_mut(self.command)
        {
            let done = match command.feed(rest) {
                Fed::Full => 0,
                Fed::Took(count) => count,
                Fed::Gone => rest.len(),
            };
            rest = &rest[done..];
            cx.consumed(done);
        }
        self.waiting.extend(rest);
        self.feed(cx);
        Ok(())
    }

    fn message(&mut self, cx: &mut Context<'_>, message: Message) -> Outcome {
        let Some(command) = cx.shared.commands.get_mut(self.command) else {
            return Ok(());
        };
        match message {
            Message::Resize(size) => command.resize(size),
            Message::Signal(signal) if (1..=64).contains(&signal) => {
                // It may just have ended; its `Exited` says so.
                let _ = command.signal(signal);
            }
            _ => return Err(invalid("a command takes Resize and Signal only")),
        }
        Ok(())
    }

    fn gone(&mut self, shared: &mut Shared, stream: u32, why: Gone) {
        if why == Gone::Closed
            && self.kill_on_close
            && let Some(command) = shared.commands.get_mut(self.command)
        {
            let _ = command.signal(libc::SIGKILL);
        }
        shared.commands.detach(self.command, stream);
        if why == Gone::Finished && self.kill_on_close {
            shared.commands.forget_unless_read(self.command);
        }
    }
}
