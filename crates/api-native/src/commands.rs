//! `/v1/sandboxes/{id}/commands`: what was started, what it wrote, and signals to it.

use atoll_actions::words::command::ExitView;
use atoll_guest_protocol::CommandState;
use atoll_identity::Caller;
use atoll_sandboxes::{Command, ExecEvent, ExecEvents};
use atoll_types::{Code, CommandId, Fault, SandboxId};
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::stream;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::error::{Answer, Failure};
use crate::exec::Follow;
use crate::extract::{Args, As, At, Json, Paying, wants_events};
use crate::named::Named;
use crate::{App, wire};

pub(crate) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(list_commands))
        .routes(routes!(command_logs))
        .routes(routes!(signal_command))
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum CommandStateName {
    Running,
    Exited,
    Signaled,
    TimedOut,
}

/// A command of a sandbox.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Command)]
pub(crate) struct CommandView {
    id: String,
    /// Readable; what is not UTF-8 is replaced.
    argv: Vec<String>,
    pid: u32,
    pty: bool,
    state: CommandStateName,
    exit_code: Option<i32>,
    signal: Option<i32>,
    #[schema(format = DateTime)]
    started_at: String,
    #[schema(format = DateTime)]
    ended_at: Option<String>,
    /// How much it has written; the log holds the last of it.
    output_bytes: u64,
}

impl CommandView {
    fn of(command: &Command) -> Self {
        let exit = ExitView::of(command.state);
        Self {
            id: command.id.to_string(),
            argv: command
                .argv
                .iter()
                .map(|argument| String::from_utf8_lossy(argument).into_owned())
                .collect(),
            pid: command.pid,
            pty: command.pty,
            state: match command.state {
                CommandState::Running => CommandStateName::Running,
                CommandState::Exited { .. } => CommandStateName::Exited,
                CommandState::Signaled { .. } => CommandStateName::Signaled,
                CommandState::TimedOut => CommandStateName::TimedOut,
            },
            exit_code: exit.exit_code,
            signal: exit.signal,
            started_at: wire::time(command.started_at),
            ended_at: command.ended_at.map(wire::time),
            output_bytes: command.output_bytes,
        }
    }
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct CommandList {
    items: Vec<CommandView>,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct LogsQuery {
    /// Offset in the log; the `id` of the last event seen.
    #[param(minimum = 0, default = 0)]
    from: Option<u64>,
    /// Whether to go on until the command ends; otherwise only what is there.
    #[param(default = false)]
    follow: Option<bool>,
}

/// A signal by number or by name.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum SignalName {
    Number(i32),
    #[schema(examples("SIGTERM"))]
    Name(String),
}

impl SignalName {
    pub(crate) fn into_number(self) -> Answer<i32> {
        let (given, number) = match self {
            Self::Number(number) => (number.to_string(), Some(number)),
            Self::Name(name) => {
                let upper = name.to_ascii_uppercase();
                let short = upper.strip_prefix("SIG").unwrap_or(&upper);
                let number = SIGNALS
                    .iter()
                    .find(|(known, _)| *known == short)
                    .map(|(_, number)| *number);
                (name, number)
            }
        };
        number.filter(|number| (1..=64).contains(number)).ok_or_else(|| {
            Failure::new(
                Code::InvalidSignal,
                format!("`{given}` is not a signal; give a number from 1 to 64 or a name such as SIGTERM"),
            )
        })
    }
}

const SIGNALS: [(&str, i32); 24] = [
    ("HUP", 1),
    ("INT", 2),
    ("QUIT", 3),
    ("ILL", 4),
    ("TRAP", 5),
    ("ABRT", 6),
    ("BUS", 7),
    ("FPE", 8),
    ("KILL", 9),
    ("USR1", 10),
    ("SEGV", 11),
    ("USR2", 12),
    ("PIPE", 13),
    ("ALRM", 14),
    ("TERM", 15),
    ("CHLD", 17),
    ("CONT", 18),
    ("STOP", 19),
    ("TSTP", 20),
    ("TTIN", 21),
    ("TTOU", 22),
    ("URG", 23),
    ("WINCH", 28),
    ("IO", 29),
];

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SignalRequest {
    signal: SignalName,
}

/// Lists the commands of a sandbox.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/commands", tag = "commands",
    security(("key" = ["sandbox.read"])),
    responses((status = 200, description = "Those that run and those whose log is still kept.", body = CommandList))
)]
pub(crate) async fn list_commands(
    State(app): State<App>,
    As(caller): As,
    Paying(visit): Paying,
    Named(id): Named,
) -> Answer<axum::Json<CommandList>> {
    let mut permit = visit.permit()?;
    let commands = app
        .sandboxes
        .commands(&caller, &id, &mut |bytes| permit.grow(bytes))
        .await?;
    Ok(axum::Json(CommandList {
        items: commands.iter().map(CommandView::of).collect(),
    }))
}

/// Reads what a command wrote, as plain bytes or, with `Accept: text/event-stream`, as the events of `exec`.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/commands/{command}/logs", tag = "commands",
    security(("key" = ["sandbox.use"])), params(LogsQuery),
    responses((status = 200, description = "Stdout and stderr in the order of writing.", content(
        (String = "text/plain"), (String = "text/event-stream"))))
)]
pub(crate) async fn command_logs(
    State(app): State<App>,
    As(caller): As,
    Named(id): Named,
    At((_, command)): At<(String, CommandId)>,
    headers: HeaderMap,
    Args(query): Args<LogsQuery>,
) -> Answer<Response> {
    let from = query.from.unwrap_or(0);
    let until = match query.follow.unwrap_or(false) {
        true => None,
        false => Some(written(&app, &caller, &id, &command).await?),
    };
    let execution = app.sandboxes.attach(&caller, &id, &command, from).await?;
    if wants_events(&headers) {
        let follow = Follow::new(execution.events, from);
        let follow = match until {
            Some(until) => follow.until(until),
            None => follow,
        };
        return Ok(follow.keeping(execution.input));
    }
    let headers = [
        (header::CONTENT_TYPE, "text/plain; charset=utf-8"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    ];
    let body = Body::from_stream(plain(execution.events, execution.input, from, until));
    Ok((headers, body).into_response())
}

/// How much a command has written: where its log ends for those who do not follow.
async fn written(app: &App, caller: &Caller, id: &SandboxId, command: &CommandId) -> Answer<u64> {
    match app.sandboxes.command(caller, id, command).await? {
        Some(known) => Ok(known.output_bytes),
        None => Err(Fault::new(
            Code::CommandNotFound,
            format!("sandbox {id} has no command {command}"),
        )
        .into()),
    }
}

/// The output alone; `kept` lives as long as it is being read.
fn plain<K: Send>(
    events: ExecEvents,
    kept: K,
    from: u64,
    until: Option<u64>,
) -> impl stream::Stream<Item = Result<Bytes, Fault>> + Send {
    stream::unfold(
        (events, kept, from),
        move |(mut events, kept, mut position)| async move {
            loop {
                if until.is_some_and(|until| position >= until) {
                    return None;
                }
                match events.next().await? {
                    Ok(ExecEvent::Output { bytes, .. }) => {
                        position += bytes.len() as u64;
                        return Some((Ok(bytes), (events, kept, position)));
                    }
                    Ok(ExecEvent::Dropped { bytes }) => position += bytes,
                    Ok(ExecEvent::Started { .. }) => {}
                    Ok(ExecEvent::Exited(_)) => return None,
                    Err(fault) => return Some((Err(fault), (events, kept, position))),
                }
            }
        },
    )
}

/// Sends a signal to a command and its children.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/commands/{command}/signal", tag = "commands",
    security(("key" = ["sandbox.use"])), request_body = SignalRequest,
    responses((status = 204, description = "It was sent."))
)]
pub(crate) async fn signal_command(
    State(app): State<App>,
    As(caller): As,
    Named(id): Named,
    At((_, command)): At<(String, CommandId)>,
    Json(body): Json<SignalRequest>,
) -> Answer<StatusCode> {
    let signal = body.signal.into_number()?;
    app.sandboxes.signal(&caller, &id, &command, signal).await?;
    Ok(StatusCode::NO_CONTENT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::extract::parse_json;

    #[test]
    fn signals_go_by_number_or_name() {
        let signal = |json: &str| parse_json::<SignalRequest>(json.as_bytes())?.signal.into_number();
        assert_eq!(signal(r#"{"signal":15}"#).ok(), Some(15));
        assert_eq!(signal(r#"{"signal":"SIGKILL"}"#).ok(), Some(9));
        assert_eq!(signal(r#"{"signal":"hup"}"#).ok(), Some(1));
        for bad in [
            r#"{"signal":0}"#,
            r#"{"signal":65}"#,
            r#"{"signal":"SIGNAL"}"#,
            r#"{"signal":true}"#,
            r#"{"signal":15,"force":true}"#,
        ] {
            assert!(signal(bad).is_err(), "{bad}");
        }
    }
}
