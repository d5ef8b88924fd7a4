//! What a template's start command says and does until it is ready, for whoever builds the template.
//!
//! What must hold: it is the guest that talks. A line is cut, lines that nobody reads are lost, and what is kept for an error is a
//! short end.

use atoll_guest_protocol::{CommandState, Message, Request, START};
use atoll_node::{Failed, Incoming, Node};

use atoll_types::{Code, Fault, InstanceId, StartCommand};
use futures_util::FutureExt as _;
use tokio::sync::mpsc;

use crate::running::not_started;

const LONGEST_LINE: usize = 4096;
/// What an error tells of its output.
const LONGEST_END: usize = 2000;
/// How much of what it had said before it was ready is read after that.
const MOST_LEFT: usize = 256 * 1024;

/// Waits until the start command is ready, and passes on what it says. One that fails before that is an error at once; one that
/// ends well may have left a server behind.
pub(crate) async fn watch(
    node: &dyn Node,
    instance: &InstanceId,
    start: &StartCommand,
    to: Option<mpsc::Sender<String>>,
) -> Result<(), Fault> {
    let attach = Request::Attach {
        command: START.to_owned(),
        from: 0,
    };
    let opened = node.open(instance, &attach).await;
    let mut stream = opened.map_err(|error| not_started(Failed::Guest(error)))?;
    let mut said = Said::new(to);
    let ready = async {
        match &start.ready {
            Some(ready) => node.await_ready(instance, ready).await,
            None => Ok(Vec::new()),
        }
    };
    tokio::pin!(ready);
    let mut ended = false;
    let outcome = loop {
        tokio::select! {
            biased;
            outcome = &mut ready => break outcome,
            incoming = stream.next(), if !ended => match incoming {
                Some(Ok(Incoming::Data { bytes, .. })) => said.hear("start", &bytes),
                Some(Ok(Incoming::Message(Message::Exited(state)))) => {
                    ended = true;
                    if state != (CommandState::Exited { code: 0 }) {
                        said.finish("start");
                        return Err(said.explain(failed(&state)));
                    }
                }
                Some(Ok(Incoming::Message(_))) => {}
                // That it is gone is seen by whoever waits for it.
                Some(Err(_)) | None => ended = true,
            },
        }
    };
    let mut left = MOST_LEFT;
    while let Some(Some(Ok(Incoming::Data { bytes, .. }))) = stream.next().now_or_never() {
        said.hear("start", &bytes);
        left = left.saturating_sub(bytes.len());
        if left == 0 {
            break;
        }
    }
    said.finish("start");
    match outcome {
        Ok(by_the_check) => {
            said.hear("ready", &by_the_check);
            said.finish("ready");
            Ok(())
        }
        Err(failed) => Err(said.explain(not_started(failed))),
    }
}

fn failed(state: &CommandState) -> Fault {
    let how = match state {
        CommandState::Exited { code } => format!("exited with {code}"),
        CommandState::Signaled { signal } => format!("was ended by signal {signal}"),
        _ => "ended".to_owned(),
    };
    Fault::new(
        Code::TemplateStartFailed,
        format!("the template's start command {how} before it was ready"),
    )
}

/// Bytes that become lines.
struct Said {
    to: Option<mpsc::Sender<String>>,
    line: Vec<u8>,
    end: Vec<u8>,
}

impl Said {
    fn new(to: Option<mpsc::Sender<String>>) -> Self {
        Self {
            to,
            line: Vec::new(),
            end: Vec::new(),
        }
    }

    fn hear(&mut self, who: &str, bytes: &[u8]) {
        self.end.extend_from_slice(bytes);
        let surplus = self.end.len().saturating_sub(LONGEST_END);
        self.end.drain(..surplus);
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            let room = LONGEST_LINE.saturating_sub(self.line.len()).min(piece.len());
            self.line.extend_from_slice(&piece[..room]);
            if piece.ends_with(b"\n") {
                self.finish(who);
            }
        }
    }

    /// Passes on what there is of a line.
    fn finish(&mut self, who: &str) {
        let line = std::mem::take(&mut self.line);
        let text = String::from_utf8_lossy(&line);
        let text = text.trim_end();
        if let Some(to) = self.to.as_ref().filter(|_| !text.is_empty()) {
            let _nobody_keeps_up = to.try_send(format!("[{who}] {text}"));
        }
    }

    /// The same fault, and what was said before it.
    fn explain(&self, fault: Fault) -> Fault {
        let end = String::from_utf8_lossy(&self.end);
        match end.trim() {
            "" => fault,
            end => fault.hint(format!("the start command said last: {end}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_comes_in_lines_that_end_somewhere() {
        let (to, mut lines) = mpsc::channel(3);
        let mut said = Said::new(Some(to));
        said.hear("start", b"one\ntw");
        said.hear("start", b"o\n\n");
        said.hear("start", &vec![b'x'; 3 * LONGEST_LINE]);
        said.hear("start", b"\nlost: nobody has read the others");
        said.finish("start");
        assert_eq!(lines.try_recv().unwrap(), "[start] one");
        assert_eq!(lines.try_recv().unwrap(), "[start] two");
        assert_eq!(lines.try_recv().unwrap().len(), "[start] ".len() + LONGEST_LINE);
        assert!(lines.try_recv().is_err());
        let fault = said.explain(failed(&CommandState::Exited { code: 3 }));
        assert_eq!(fault.code, Code::TemplateStartFailed);
        assert!(fault.message.contains("exited with 3"), "{fault:?}");
        let hint = fault.hint.unwrap();
        assert!(
            hint.ends_with("have read the others") || hint.ends_with("has read the others"),
            "{hint}"
        );
        assert!(hint.len() < LONGEST_END + 100);
    }
}
