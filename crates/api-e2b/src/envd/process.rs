//! The service `process.Process`.

use std::sync::Arc;
use std::time::Duration;

use atoll_front::Refused;
use atoll_sandboxes::{ExecSpec, Kept, Process, ProcessEvents, ProcessSaid, StartProcess, WhichProcess};
use atoll_types::{Code as FaultCode, FaultKind};
use axum::extract::Request;
use axum::http::HeaderMap;
use axum::response::Response;
use bytes::Bytes;
use futures_util::StreamExt as _;
use prost::Message as _;

use super::Call;
use crate::control::template_id;

use super::connect::{self, Code, Error, Kind};
use super::events::told;
use super::messages::{
    Event, EventResponse, Input, Nothing, ProcessConfig, ProcessInfo, ProcessInput, ProcessList,
    ProcessSelector, Pty, SelectRequest, Selector, SendInputRequest, SendSignalRequest, StartRequest,
    StreamInput, StreamInputRequest, UpdateRequest,
};

/// The longest name that a process may be given.
const TAG_BYTES: usize = 256;

pub(crate) async fn serve(call: Call, kind: Kind, method: &str, request: Request) -> Result<Response, Error> {
    let (parts, body) = request.into_parts();
    let headers = &parts.headers;
    let answer = match method {
        "Start" => return start(&call, kind, headers, call.receive(kind, body).await?).await,
        "Connect" => {
            let request: SelectRequest = call.receive(kind, body).await?;
            let process = find(&call, request.process.as_ref()).await?;
            let deadline = connect::timeout(headers);
            return Ok(follow(kind, headers, process.pty, process.listen(), deadline));
        }
        "List" => {
            let _: Nothing = call.receive(kind, body).await?;
            return Ok(connect::answer_long(kind, list(&call).await).await);
        }
        "Update" => {
            let request: UpdateRequest = call.receive(kind, body).await?;
            let process = running(&call, request.process.as_ref()).await?;
            match request.pty.and_then(|pty| size(&pty)) {
                Some(size) => process.resize(size).await?,
                None => return Err(Error::invalid("`pty.size` is missing")),
            }
            Nothing {}
        }
        "SendInput" => {
            let request: SendInputRequest = call.receive(kind, body).await?;
            let process = running(&call, request.process.as_ref()).await?;
            write(&process, request.input).await?;
            Nothing {}
        }
        "StreamInput" => {
            stream_input(&call, kind, body).await?;
            Nothing {}
        }
        "SendSignal" => {
            let request: SendSignalRequest = call.receive(kind, body).await?;
            if !matches!(request.signal, 9 | 15) {
                return Err(Error::invalid(
                    "`signal` is neither SIGNAL_SIGKILL nor SIGNAL_SIGTERM",
                ));
            }
            let process = running(&call, request.process.as_ref()).await?;
            call.app
                .sandboxes
                .signal(
                    &call.target.caller,
                    &call.target.id,
                    &process.command,
                    request.signal,
                )
                .await?;
            Nothing {}
        }
        "CloseStdin" => {
            let request: SelectRequest = call.receive(kind, body).await?;
            let process = running(&call, request.process.as_ref()).await?;
            if process.pty {
                return Err(Error::new(
                    Code::FailedPrecondition,
                    "cannot close the stdin of a terminal; send Ctrl+D (0x04) instead",
                ));
            }
            process.close_stdin().await?;
            Nothing {}
        }
        other => {
            return Err(Error::new(
                Code::Unimplemented,
                format!("process.Process has no method `{other}`"),
            ));
        }
    };
    Ok(connect::answer(kind, Ok(answer)))
}

async fn start(
    call: &Call,
    kind: Kind,
    headers: &HeaderMap,
    request: StartRequest,
) -> Result<Response, Error> {
    let Some(config) = request.process else {
        return Err(Error::invalid("`process` is missing"));
    };
    if request.tag.as_ref().is_some_and(|tag| tag.len() > TAG_BYTES) {
        return Err(Error::invalid(format!(
            "`tag` may have at most {TAG_BYTES} bytes"
        )));
    }
    let kept = pay(call, &config)?;
    let pty = request.pty.as_ref().and_then(size);
    let deadline = connect::timeout(headers);
    let (cwd, user) = directory(call, config.cwd.as_deref().unwrap_or_default()).await?;
    let spec = ExecSpec {
        env: environment(call, &config.envs),
        cwd,
        user,
        pty,
        // Old clients say nothing and may write.
        stdin: pty.is_none() && request.stdin.unwrap_or(true),
        timeout_millis: deadline.map(|deadline| u64::try_from(deadline.as_millis()).unwrap_or(u64::MAX)),
        ..ExecSpec::new(std::iter::once(config.cmd.clone()).chain(config.args.iter().cloned()))
    };
    let request = StartProcess {
        spec,
        said: said(config),
        tag: request.tag,
        kept,
    };
    let (caller, id) = (&call.target.caller, &call.target.id);
    let started = call.app.processes.start(caller, id, request).await;
    let events = started.map_err(|fault| match (fault.code, fault.kind()) {
        (FaultCode::NoSuchUserInSandbox, _) => Error::new(
            Code::Unauthenticated,
            format!("invalid username: '{}'", call.user.as_deref().unwrap_or_default()),
        ),
        // A program or a directory that is not there is a mistake in the request.
        (_, FaultKind::NotFound | FaultKind::Forbidden) => Error::invalid(fault.to_string()),
        _ => fault.into(),
    })?;
    // The agent ends it when its time is over; its last word says so.
    Ok(follow(kind, headers, pty.is_some(), events, None))
}

/// Where a process starts, and as whom. As E2B has it, what is not absolute is below the user's home, which `~` stands for; what
/// is not said is the template's directory.
async fn directory(call: &Call, given: &str) -> Result<(Option<Vec<u8>>, Option<String>), Error> {
    let Some(below) = below_home(given)? else {
        let absolute = Some(given.as_bytes().to_vec()).filter(|path| !path.is_empty());
        return Ok((absolute, call.user.clone()));
    };
    // The agent starts at a home for those that are named alone.
    let named = call.user.clone().filter(|user| !user.is_empty());
    let user = match named {
        Some(user) => user,
        None => call.app.sandboxes.user_of(&call.target.sandbox.template)?,
    };
    Ok((Some(below.as_bytes().to_vec()), Some(user)))
}

/// The part of a path that is below a home; `None`: it is absolute, or empty.
fn below_home(given: &str) -> Result<Option<&str>, Error> {
    let below = match given.strip_prefix('~') {
        None if given.is_empty() || given.starts_with('/') => return Ok(None),
        None => given,
        Some(rest) if rest.is_empty() || rest.starts_with('/') => rest.trim_start_matches('/'),
        Some(_) => {
            return Err(Error::invalid(format!(
                "`cwd` is {}: the home of a user cannot be named this way",
                given.escape_default()
            )));
        }
    };
    Ok(Some(if below.is_empty() { "." } else { below }))
}

/// Lets the sandbox pay for what is remembered of a process.
fn pay(call: &Call, config: &ProcessConfig) -> Result<Box<dyn Kept>, Error> {
    let texts = 2 + config.args.len() + 2 * config.envs.len();
    let weight = config.encoded_len() + texts * 2 * size_of::<String>();
    let mut permit = call.visit.permit()?;
    permit.grow(weight as u64).map_err(Refused::Full)?;
    Ok(Box::new(permit))
}

fn said(config: ProcessConfig) -> ProcessSaid {
    ProcessSaid {
        argv: std::iter::once(config.cmd).chain(config.args).collect(),
        env: config.envs,
        cwd: config.cwd,
    }
}

fn config(said: ProcessSaid) -> ProcessConfig {
    let mut words = said.argv.into_iter();
    ProcessConfig {
        cmd: words.next().unwrap_or_default(),
        args: words.collect(),
        envs: said.env,
        cwd: said.cwd,
    }
}

/// What every process finds in its environment; what the caller says comes last and wins.
fn environment(call: &Call, envs: &std::collections::HashMap<String, String>) -> Vec<(String, String)> {
    let own = [
        ("E2B_SANDBOX", "true".to_owned()),
        ("E2B_SANDBOX_ID", call.target.id.bare().to_owned()),
        ("E2B_TEMPLATE_ID", template_id(&call.target.sandbox).to_owned()),
    ];
    let own = own.into_iter().map(|(name, value)| (name.to_owned(), value));
    own.chain(envs.iter().map(|(name, value)| (name.clone(), value.clone())))
        .collect()
}

fn size(pty: &Pty) -> Option<atoll_guest_protocol::PtySize> {
    let size = pty.size?;
    let cells = |count: u32| u16::try_from(count).unwrap_or(u16::MAX);
    Some(atoll_guest_protocol::PtySize {
        rows: cells(size.rows),
        cols: cells(size.cols),
    })
}

/// A stream of what happens to a process, with signs of life when nothing does.
fn follow(
    kind: Kind,
    headers: &HeaderMap,
    pty: bool,
    events: ProcessEvents,
    deadline: Option<Duration>,
) -> Response {
    let until = deadline.map(|deadline| tokio::time::Instant::now() + deadline);
    let every = connect::keepalive(headers);
    let events = futures_util::stream::unfold(Some(events), move |events| async move {
        let mut events = events?;
        let pause = tokio::time::Instant::now() + every;
        let wake = until.map_or(pause, |until| until.min(pause));
        let message = |event: Event| Ok(event.into_response());
        match tokio::time::timeout_at(wake, events.recv()).await {
            Ok(Some(heard)) => match told(pty, heard) {
                Ok(last @ Event::End(_)) => Some((message(last), None)),
                Ok(event) => Some((message(event), Some(events))),
                Err(error) => Some((Err(error), None)),
            },
            Ok(None) => None,
            Err(_) if until == Some(wake) => {
                let error = Error::new(Code::DeadlineExceeded, "the time of this call is over");
                Some((Err(error), None))
            }
            Err(_) => Some((message(Event::Keepalive(Nothing {})), Some(events))),
        }
    });
    connect::answer_stream::<EventResponse>(kind, events)
}

async fn list(call: &Call) -> Result<ProcessList, Error> {
    let (caller, id) = (&call.target.caller, &call.target.id);
    let mut permit = call.visit.permit()?;
    let pay = &mut |bytes| permit.grow(bytes);
    let listed = call.app.processes.list(caller, id, pay).await?;
    let processes = listed.into_iter().map(|process| ProcessInfo {
        config: Some(config(process.said)),
        pid: process.pid,
        tag: process.tag,
    });
    let list = ProcessList {
        processes: processes.collect(),
    };
    // Until the answer that is made of it is there.
    call.visit.keep(permit);
    Ok(list)
}

async fn find(call: &Call, selector: Option<&ProcessSelector>) -> Result<Arc<Process>, Error> {
    let (which, none) = match selector.and_then(|selector| selector.selector.as_ref()) {
        Some(Selector::Pid(pid)) => (
            WhichProcess::Pid(*pid),
            format!("process with pid {pid} not found"),
        ),
        Some(Selector::Tag(tag)) => (
            WhichProcess::Tag(tag.clone()),
            format!("process with tag {tag} not found"),
        ),
        None => return Err(Error::invalid("`process` names neither a pid nor a tag")),
    };
    let (caller, id) = (&call.target.caller, &call.target.id);
    let keep = |said: &ProcessSaid| pay(call, &config(said.clone()));
    let found = call.app.processes.find(caller, id, &which, keep).await?;
    found.ok_or_else(|| Error::not_found(none))
}

/// One that has not ended.
async fn running(call: &Call, selector: Option<&ProcessSelector>) -> Result<Arc<Process>, Error> {
    let process = find(call, selector).await?;
    match process.is_over() {
        false => Ok(process),
        true => Err(Error::not_found(format!(
            "process with pid {} not found",
            process.pid
        ))),
    }
}

async fn write(process: &Process, input: Option<ProcessInput>) -> Result<(), Error> {
    let bytes: Bytes = match input.and_then(|input| input.input) {
        Some(Input::Stdin(_)) if process.pty => {
            return Err(Error::invalid(
                "it has a terminal; send `pty` rather than `stdin`",
            ));
        }
        Some(Input::Pty(_)) if !process.pty => {
            return Err(Error::invalid(
                "it has no terminal; send `stdin` rather than `pty`",
            ));
        }
        Some(Input::Stdin(bytes) | Input::Pty(bytes)) => bytes,
        None => return Err(Error::invalid("`input` is missing")),
    };
    if !process.stdin {
        return Err(Error::new(
            Code::Internal,
            "the process was started without stdin",
        ));
    }
    if !bytes.is_empty() {
        process.write(bytes).await?;
    }
    Ok(())
}

async fn stream_input(call: &Call, kind: Kind, body: axum::body::Body) -> Result<(), Error> {
    let mut messages = std::pin::pin!(connect::receive_all::<StreamInputRequest>(
        &call.visit,
        kind,
        body
    )?);
    let mut process = None;
    while let Some(message) = messages.next().await {
        match (message?.event, &process) {
            (Some(StreamInput::Start(start)), _) => {
                process = Some(running(call, start.process.as_ref()).await?);
            }
            (Some(StreamInput::Data(data)), Some(process)) => write(process, data.input).await?,
            (Some(StreamInput::Data(_)), None) => {
                return Err(Error::invalid("the first message must be `start`"));
            }
            (Some(StreamInput::Keepalive(_)) | None, _) => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_absolute_is_below_a_home() {
        for (given, below) in [
            ("", None),
            ("/", None),
            ("/srv/~", None),
            ("~", Some(".")),
            ("~/", Some(".")),
            ("~/x/y", Some("x/y")),
            ("~//x", Some("x")),
            ("x", Some("x")),
            ("../x", Some("../x")),
        ] {
            assert_eq!(below_home(given).unwrap(), below, "{given}");
        }
        assert_eq!(below_home("~root/x").unwrap_err().code, Code::InvalidArgument);
    }
}
