//! The service `process.Process`.

use std::sync::Arc;
use std::time::Duration;

use atoll_guest_protocol::CommandState;
use atoll_sandboxes::{ExecEvent, ExecSpec};
use atoll_types::FaultKind;
use axum::extract::Request;
use axum::http::HeaderMap;
use axum::response::Response;
use bytes::Bytes;
use futures_util::StreamExt as _;
use tokio::sync::mpsc;

use super::Call;
use super::connect::{self, Code, Error, Kind};
use super::messages::{
    Event, EventResponse, Input, Nothing, ProcessInfo, ProcessInput, ProcessList, ProcessSelector, Pty,
    SelectRequest, SendInputRequest, SendSignalRequest, StartRequest, StreamInput, StreamInputRequest,
    UpdateRequest,
};
use super::registry::{self, Description, Process};

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
            return Ok(follow(kind, headers, process.subscribe(), deadline));
        }
        "List" => {
            let _: Nothing = call.receive(kind, body).await?;
            return Ok(connect::answer(kind, list(&call).await));
        }
        "Update" => {
            let request: UpdateRequest = call.receive(kind, body).await?;
            let process = running(&call, request.process.as_ref()).await?;
            match request.pty.and_then(|pty| size(&pty)) {
                Some(size) => process.input.lock().await.resize(size).await?,
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
            process.input.lock().await.close().await?;
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
    let permit = registry::pay(call, &config)?;
    let pty = request.pty.as_ref().and_then(size);
    let deadline = connect::timeout(headers);
    let spec = ExecSpec {
        env: environment(call, &config.envs),
        cwd: config
            .cwd
            .clone()
            .filter(|cwd| !cwd.is_empty())
            .map(String::into_bytes),
        user: call.user.clone(),
        pty,
        // Old clients say nothing and may write.
        stdin: pty.is_none() && request.stdin.unwrap_or(true),
        timeout_millis: deadline.map(|deadline| u64::try_from(deadline.as_millis()).unwrap_or(u64::MAX)),
        background: true,
        lossless: true,
        ..ExecSpec::new(std::iter::once(config.cmd.clone()).chain(config.args.iter().cloned()))
    };
    let described = Description {
        tag: request.tag,
        pty: pty.is_some(),
        stdin: pty.is_some() || spec.stdin,
        config,
        permit,
    };
    let executed = call
        .app
        .sandboxes
        .exec(&call.target.caller, &call.target.id, spec)
        .await;
    let mut execution = executed.map_err(|fault| match fault.kind() {
        FaultKind::NotFound if fault.message.contains("user") => Error::new(
            Code::Unauthenticated,
            format!("invalid username: '{}'", call.user.as_deref().unwrap_or_default()),
        ),
        // A program or a directory that is not there is a mistake in the request.
        FaultKind::NotFound | FaultKind::Forbidden => Error::invalid(fault.to_string()),
        _ => fault.into(),
    })?;
    let pid = match execution.events.next().await {
        Some(Ok(ExecEvent::Started { pid })) => pid,
        Some(Err(fault)) => return Err(fault.into()),
        Some(Ok(_)) | None => return Err(Error::new(Code::Internal, "the process did not start")),
    };
    let (_process, updates) = registry::adopt(call, pid, execution, described);
    // The agent ends it when its time is over; its last word says so.
    Ok(follow(kind, headers, updates, None))
}

/// What every process finds in its environment; what the caller says comes last and wins.
fn environment(call: &Call, envs: &std::collections::HashMap<String, String>) -> Vec<(String, String)> {
    let own = [
        ("E2B_SANDBOX", "true".to_owned()),
        ("E2B_SANDBOX_ID", call.target.id.bare().to_owned()),
        ("E2B_TEMPLATE_ID", call.target.sandbox.template.to_string()),
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
    updates: mpsc::Receiver<Result<Event, Error>>,
    deadline: Option<Duration>,
) -> Response {
    let until = deadline.map(|deadline| tokio::time::Instant::now() + deadline);
    let every = connect::keepalive(headers);
    let events = futures_util::stream::unfold(Some(updates), move |updates| async move {
        let mut updates = updates?;
        let pause = tokio::time::Instant::now() + every;
        let wake = until.map_or(pause, |until| until.min(pause));
        let message = |event: Event| Ok(event.into_response());
        match tokio::time::timeout_at(wake, updates.recv()).await {
            Ok(Some(Ok(event))) => {
                let last = matches!(event, Event::End(_));
                Some((message(event), (!last).then_some(updates)))
            }
            Ok(Some(Err(error))) => Some((Err(error), None)),
            Ok(None) => None,
            Err(_) if until == Some(wake) => {
                let error = Error::new(Code::DeadlineExceeded, "the time of this call is over");
                Some((Err(error), None))
            }
            Err(_) => Some((message(Event::Keepalive(Nothing {})), Some(updates))),
        }
    });
    connect::answer_stream::<EventResponse>(kind, events)
}

async fn list(call: &Call) -> Result<ProcessList, Error> {
    let known = call.app.processes.of(&call.target.id);
    let mut permit = call.visit.permit()?;
    let commands = call
        .app
        .sandboxes
        .commands(&call.target.caller, &call.target.id, &mut |bytes| {
            permit.grow(bytes)
        })
        .await?;
    let processes = commands
        .into_iter()
        .filter(|command| command.state == CommandState::Running)
        .map(|command| {
            let known = known.iter().find(|process| process.command == command.id);
            ProcessInfo {
                config: Some(match known {
                    Some(process) => process.config.clone(),
                    None => registry::config_of(&command),
                }),
                pid: command.pid,
                tag: known.and_then(|process| process.tag.clone()),
            }
        })
        .collect();
    Ok(ProcessList { processes })
}

async fn find(call: &Call, selector: Option<&ProcessSelector>) -> Result<Arc<Process>, Error> {
    let selector = selector.and_then(|selector| selector.selector.as_ref());
    registry::find(call, selector).await
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
        process.input.lock().await.write(bytes).await?;
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
