//! The stream that tells of every command's end.
//!
//! What must hold: each end is told once, and before anybody who is attached to the command hears of it. So the host can
//! have written an end down by the time its caller knows.

use std::collections::VecDeque;

use atoll_guest_protocol::Message;

use crate::job::{Context, Gone, Job, Shared, Step};
use crate::requests::batches;

#[derive(Debug)]
pub(crate) struct Follow {
    /// What is known at the beginning; ends come after it.
    first: VecDeque<Message>,
}

impl Follow {
    pub(crate) fn open(stream: u32, shared: &mut Shared) -> Box<dyn Job> {
        shared.commands.follow(stream);
        let known = batches(shared.commands.list()).into_iter().map(Message::Commands);
        Box::new(Self {
            first: known.chain([Message::Watching]).collect(),
        })
    }
}

impl Job for Follow {
    fn step(&mut self, cx: &mut Context<'_>) -> Step {
        if let Some(message) = self.first.front() {
            if !cx.message(message) {
                return Step::Wait;
            }
            self.first.pop_front();
            return Step::Again;
        }
        if !cx.shared.commands.is_followed_by(cx.port.id()) {
            return Step::Done(Ok(()));
        }
        let Some(end) = cx.shared.commands.next_end().cloned() else {
            return Step::Wait;
        };
        if !cx.message(&Message::Commands(vec![end])) {
            return Step::Wait;
        }
        let Shared { commands, wakes, .. } = &mut *cx.shared;
        commands.told(wakes);
        Step::Again
    }

    fn gone(&mut self, shared: &mut Shared, stream: u32, _why: Gone) {
        let Shared { commands, wakes, .. } = shared;
        commands.unfollow(stream, wakes);
    }
}
