//! The first words to a guest, who it is and what it serves, and the wait until it does.

use std::time::Duration;

use atoll_guest_protocol::{CommandState, Configure, Exec, Message, Request, Start};
use atoll_runtime::channel::{ChannelError, Guest, Incoming, Stream, in_time};
use atoll_types::{Code, Fault, ReadyCheck, SandboxId, SandboxSpec, TemplateManifest};

use crate::entropy;
use crate::words::Begins;

/// How often a ready check looks.
const READY_POLL: Duration = Duration::from_millis(20);
/// The most that is kept of what one said.
const MOST_SAID: usize = 4096;

/// Tells a guest who it is and, in the same breath, what to run; waits until it knows who it is.
pub(crate) async fn greet(
    guest: &Guest,
    configure: &Request,
    command: Option<&Request>,
) -> Result<Option<Begins>, ChannelError> {
    in_time(async {
        let configured = guest.open(configure).await?;
        let begins = match command {
            Some(command) => Some(Begins {
                ends: guest.open(&Request::FollowCommands).await?,
                command: guest.open(command).await,
            }),
            None => None,
        };
        configured.answer().await?;
        Ok(begins)
    })
    .await
}

/// Waits until the template's start command is ready to serve, and gives what the check said when it was. The inner result says
/// that it never was.
pub(crate) async fn await_ready(
    guest: &Guest,
    ready: &ReadyCheck,
) -> Result<Result<Vec<u8>, Fault>, ChannelError> {
    let (limit, what) = match ready {
        ReadyCheck::Port { port, timeout_millis } => (*timeout_millis, format!("port {port} to be served")),
        ReadyCheck::Command { argv, timeout_millis } => {
            (*timeout_millis, format!("`{}` to succeed", argv.join(" ")))
        }
    };
    let mut said = Vec::new();
    let wait = async {
        while !is_ready(guest, ready, &mut said).await? {
            tokio::time::sleep(READY_POLL).await;
        }
        Ok(())
    };
    let waited = tokio::time::timeout(Duration::from_millis(limit), wait).await;
    match waited {
        Ok(outcome) => outcome.map(|()| Ok(said)),
        Err(_) => {
            let mut why = format!("the template's start command was not ready: waited {limit} ms for {what}");
            let said = String::from_utf8_lossy(&said);
            if !said.trim().is_empty() {
                why = format!("{why}; the check said last: {}", said.trim());
            }
            Ok(Err(Fault::new(Code::TemplateNotReady, why).hint(
                "run the start command by hand in a sandbox of a template without one, and look at what it prints",
            )))
        }
    }
}

/// `said` is what it says this time.
async fn is_ready(guest: &Guest, ready: &ReadyCheck, said: &mut Vec<u8>) -> Result<bool, ChannelError> {
    match ready {
        ReadyCheck::Port { port, .. } => match guest.call(&Request::ListPorts).await? {
            Some(Message::Ports(ports)) => Ok(ports.iter().any(|listening| listening.port == *port)),
            _ => Ok(false),
        },
        ReadyCheck::Command { argv, .. } => {
            let (mut now, mut stream) = (Vec::new(), run(guest, argv).await?);
            let mut succeeded = false;
            while let Some(incoming) = stream.next().await {
                match incoming? {
                    Incoming::Data { bytes, .. } => {
                        let room = MOST_SAID.saturating_sub(now.len()).min(bytes.len());
                        now.extend_from_slice(&bytes[..room]);
                    }
                    Incoming::Message(Message::Exited(state)) => {
                        succeeded = state == CommandState::Exited { code: 0 };
                        break;
                    }
                    Incoming::Message(_) => {}
                }
            }
            *said = now;
            Ok(succeeded)
        }
    }
}

/// Runs a command of the server's own to its end and says whether it exited with 0.
pub(crate) async fn succeeds(guest: &Guest, argv: &[impl AsRef<str>]) -> Result<bool, ChannelError> {
    let mut stream = run(guest, argv).await?;
    while let Some(incoming) = stream.next().await {
        if let Incoming::Message(Message::Exited(state)) = incoming? {
            return Ok(state == CommandState::Exited { code: 0 });
        }
    }
    Ok(false)
}

async fn run(guest: &Guest, argv: &[impl AsRef<str>]) -> Result<Stream, ChannelError> {
    let request = Request::Exec(Exec {
        command: entropy::id::<atoll_types::CommandId>().to_string(),
        argv: argv
            .iter()
            .map(|word| word.as_ref().as_bytes().to_vec())
            .collect(),
        env: Vec::new(),
        cwd: None,
        user: None,
        pty: None,
        stdin: false,
        timeout_millis: None,
        log_bytes: 4096,
        wait_for_reader: false,
        kill_on_close: true,
    });
    guest.open(&request).await
}

/// Who an instance is to be.
pub fn identity(
    sandbox: &SandboxId,
    spec: &SandboxSpec,
    template: &TemplateManifest,
    start: Option<&atoll_types::StartCommand>,
) -> Configure {
    let env = template
        .env
        .iter()
        .chain(&spec.env)
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect();
    Configure {
        hostname: sandbox.bare().to_owned(),
        env,
        user: template.user.clone(),
        workdir: template.workdir.clone(),
        start: start.map(|start| Start {
            argv: start.argv.clone(),
        }),
        ..Configure::default()
    }
}
