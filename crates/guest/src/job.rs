//! What a stream does after it was opened, one small piece at a time.
//!
//! The loop calls [`Job::step`] on streams that may have something to do, in turn, and only while the output queue has
//! room. A step does a bounded piece of work (about one frame) and says whether there is more; a job that waits is woken
//! by credit, by bytes of the host, by its descriptor, or by name through [`Shared::wake`].

use std::collections::VecDeque;

use atoll_guest_protocol::{Configure, FRAME_COST, MAX_PAYLOAD, Message, encode};

use crate::commands::Commands;
use crate::failure::{Outcome, invalid};
use crate::mux::{Output, Port};
use crate::network::WayOut;
use crate::poll::{EventFlags, Poller};

/// Everything that streams share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) out: Output,
    pub(crate) poller: Poller,
    pub(crate) commands: Commands,
    /// What the host configured; empty before it did.
    pub(crate) config: Configure,
    pub(crate) way_out: WayOut,
    /// Streams to be stepped soon.
    pub(crate) wakes: Vec<u32>,
}

pub(crate) struct Context<'a> {
    pub(crate) port: &'a mut Port,
    pub(crate) shared: &'a mut Shared,
}

impl Context<'_> {
    pub(crate) fn consumed(&mut self, cost: usize) {
        self.port.consumed(&mut self.shared.out, cost);
    }

    /// Lets the host send more ahead; for jobs that keep nothing of what they get.
    pub(crate) fn widen(&mut self) {
        self.port.widen(&mut self.shared.out);
    }

    /// Sends a message if there is credit for it.
    #[must_use]
    pub(crate) fn message(&mut self, message: &Message) -> bool {
        self.port.message(&mut self.shared.out, message)
    }
}

#[derive(Debug)]
pub(crate) enum Step {
    /// There may be more to do at once.
    Again,
    /// Nothing until something happens.
    Wait,
    /// The stream is over.
    Done(Outcome),
}

pub(crate) trait Job {
    fn step(&mut self, cx: &mut Context<'_>) -> Step;

    /// `Data` of the host; empty means that no more follows. Credit is the job's to return, `FRAME_COST` included.
    fn data(&mut self, cx: &mut Context<'_>, bytes: &[u8]) -> Outcome {
        cx.consumed(bytes.len() + FRAME_COST as usize);
        Err(invalid("this stream takes no data"))
    }

    /// Several `Data` frames that came together, none of them empty; for jobs that take them better at once.
    fn data_run(&mut self, cx: &mut Context<'_>, pieces: &[&[u8]]) -> Outcome {
        pieces.iter().try_for_each(|bytes| self.data(cx, bytes))
    }

    fn message(&mut self, cx: &mut Context<'_>, message: Message) -> Outcome {
        let _ = (cx, message);
        Err(invalid("this stream takes no such message"))
    }

    /// The stream's descriptor became ready.
    fn ready(&mut self, flags: EventFlags) {
        let _ = flags;
    }

    /// The stream is no more. Called once, before the job is dropped with what it owns.
    fn gone(&mut self, shared: &mut Shared, stream: u32, why: Gone) {
        let _ = (shared, stream, why);
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Gone {
    /// The job said so.
    Finished,
    /// The host closed it, broke its rules, or was replaced by another.
    Closed,
    /// It belonged to the life before a restore; nobody hung up.
    Restored,
}

/// A few messages, then success.
#[derive(Debug, Default)]
pub(crate) struct Answer {
    payloads: VecDeque<Vec<u8>>,
}

impl Answer {
    /// Messages that would not fit a frame are the caller's to batch; one that does not is left out.
    pub(crate) fn of(messages: impl IntoIterator<Item = Message>) -> Box<dyn Job> {
        Box::new(Self {
            payloads: messages
                .into_iter()
                .map(|message| encode(&message))
                .filter(|payload| payload.len() <= MAX_PAYLOAD)
                .collect(),
        })
    }

    pub(crate) fn nothing() -> Box<dyn Job> {
        Box::new(Self::default())
    }
}

impl Job for Answer {
    fn step(&mut self, cx: &mut Context<'_>) -> Step {
        match self.payloads.pop_front() {
            None => Step::Done(Ok(())),
            Some(payload) if cx.port.encoded_message(&mut cx.shared.out, &payload) => Step::Again,
            Some(payload) => {
                self.payloads.push_front(payload);
                Step::Wait
            }
        }
    }
}
