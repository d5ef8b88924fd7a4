//! What happens to a process, in the words of E2B's agent.

use atoll_guest_protocol::CommandState;
use atoll_sandboxes::{OutputStream, ProcessEvent};
use atoll_types::Fault;

use super::connect::{Code, Error};
use super::messages::{DataEvent, EndEvent, Event, Output, StartEvent};

/// `pty`: whether the process has a terminal.
pub(crate) fn told(pty: bool, heard: Result<ProcessEvent, Fault>) -> Result<Event, Error> {
    match heard {
        Ok(ProcessEvent::Started { pid }) => Ok(Event::Start(StartEvent { pid })),
        Ok(ProcessEvent::Output { stream, bytes }) => {
            let output = match (pty, stream) {
                (true, _) => Output::Pty(bytes),
                (false, OutputStream::Stdout) => Output::Stdout(bytes),
                (false, OutputStream::Stderr) => Output::Stderr(bytes),
            };
            Ok(Event::Data(DataEvent { output: Some(output) }))
        }
        Ok(ProcessEvent::Ended(state)) => last_word(state),
        // The sandbox ended or went to rest, as a machine does that goes away.
        Err(fault) => Err(Error {
            gone: true,
            ..Error::from(fault)
        }),
    }
}

fn last_word(state: CommandState) -> Result<Event, Error> {
    let end = |exit_code, exited, status: String| {
        Ok(Event::End(EndEvent {
            exit_code,
            exited,
            error: (exit_code != 0).then(|| status.clone()),
            status,
        }))
    };
    match state {
        CommandState::Exited { code } => end(code, true, format!("exit status {code}")),
        CommandState::Signaled { signal } => end(-1, false, format!("signal: {}", signal_name(signal))),
        CommandState::TimedOut => Err(Error::new(
            Code::DeadlineExceeded,
            "the process was killed because its time was over",
        )),
        CommandState::Running => Err(Error::new(Code::Internal, "a process that runs has no end")),
    }
}

/// As Go's `os` package says it.
fn signal_name(signal: i32) -> String {
    match signal {
        1 => "hangup".into(),
        2 => "interrupt".into(),
        3 => "quit".into(),
        6 => "aborted".into(),
        9 => "killed".into(),
        11 => "segmentation fault".into(),
        13 => "broken pipe".into(),
        15 => "terminated".into(),
        other => format!("signal {other}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_told_in_the_words_of_the_original() {
        let end = |state| match told(false, Ok(ProcessEvent::Ended(state))) {
            Ok(Event::End(end)) => end,
            other => unreachable!("{other:?} is no end"),
        };
        let exited = end(CommandState::Exited { code: 3 });
        assert_eq!(
            (exited.exit_code, exited.exited, exited.status.as_str()),
            (3, true, "exit status 3")
        );
        assert_eq!(exited.error.as_deref(), Some("exit status 3"));
        let killed = end(CommandState::Signaled { signal: 9 });
        assert_eq!((killed.exit_code, killed.status.as_str()), (-1, "signal: killed"));
        let late = told(false, Ok(ProcessEvent::Ended(CommandState::TimedOut))).unwrap_err();
        assert_eq!((late.code, late.gone), (Code::DeadlineExceeded, false));
        let gone = told(false, Err(Fault::internal("it is gone"))).unwrap_err();
        assert!(gone.gone, "the connection breaks");
    }

    #[test]
    fn a_terminal_has_one_output() {
        for (pty, stream, expected) in [
            (true, OutputStream::Stdout, Output::Pty("x".into())),
            (false, OutputStream::Stdout, Output::Stdout("x".into())),
            (false, OutputStream::Stderr, Output::Stderr("x".into())),
        ] {
            let bytes = "x".into();
            let told = told(pty, Ok(ProcessEvent::Output { stream, bytes }));
            let data = DataEvent {
                output: Some(expected),
            };
            assert_eq!(told.unwrap(), Event::Data(data));
        }
    }
}
