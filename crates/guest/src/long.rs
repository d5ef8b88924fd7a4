//! A request that comes in pieces because it is too long for one frame.

use atoll_guest_protocol::{FRAME_COST, MAX_REQUEST, Message, decode};

use crate::failure::{Outcome, invalid};
use crate::job::{Context, Gone, Job, Shared, Step};
use crate::poll::EventFlags;
use crate::requests;

/// Gathers the request, then is the job that serves it.
pub(crate) struct Long {
    stream: u32,
    length: usize,
    gathered: Vec<u8>,
    served_by: Option<Box<dyn Job>>,
}

impl Long {
    pub(crate) fn open(length: u32, stream: u32) -> Outcome<Box<dyn Job>> {
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        if length > MAX_REQUEST {
            return Err(invalid(format!("a request of {length} bytes is too long")));
        }
        Ok(Box::new(Self {
            stream,
            length,
            gathered: Vec::new(),
            served_by: None,
        }))
    }
}

impl Job for Long {
    fn step(&mut self, cx: &mut Context<'_>) -> Step {
        match &mut self.served_by {
            Some(job) => job.step(cx),
            None => Step::Wait,
        }
    }

    fn data(&mut self, cx: &mut Context<'_>, bytes: &[u8]) -> Outcome {
        if let Some(job) = &mut self.served_by {
            return job.data(cx, bytes);
        }
        cx.consumed(bytes.len() + FRAME_COST as usize);
        if self.gathered.len() + bytes.len() > self.length || bytes.is_empty() {
            return Err(invalid("the request is not as long as announced"));
        }
        self.gathered.extend_from_slice(bytes);
        if self.gathered.len() == self.length {
            let gathered = std::mem::take(&mut self.gathered);
            let request = decode(&gathered).map_err(|_| invalid("the request cannot be read"))?;
            self.served_by = Some(requests::open(request, self.stream, cx.shared)?);
            cx.shared.wakes.push(self.stream);
        }
        Ok(())
    }

    fn message(&mut self, cx: &mut Context<'_>, message: Message) -> Outcome {
        match &mut self.served_by {
            Some(job) => job.message(cx, message),
            None => Err(invalid("the request has not come yet")),
        }
    }

    fn ready(&mut self, flags: EventFlags) {
        if let Some(job) = &mut self.served_by {
            job.ready(flags);
        }
    }

    fn gone(&mut self, shared: &mut Shared, stream: u32, why: Gone) {
        if let Some(job) = &mut self.served_by {
            job.gone(shared, stream, why);
        }
    }
}
