//! Hooks: commands that the server runs in a sandbox at a turn of its life.

use std::time::Duration;

use atoll_guest_protocol::{CommandState, Exec, Message, Request};
use atoll_runtime::channel::{ChannelError, Guest, Incoming};
use atoll_types::{CommandId, Hook};

use crate::entropy;

/// How much of a failed hook's output is repeated to people.
const SHOWN: usize = 2000;
/// The guest kills a hook that takes too long; this is how long it may take to say so.
const GRACE: Duration = Duration::from_secs(10);

/// Why a hook failed.
#[derive(Debug)]
pub struct Failed {
    program: String,
    how: String,
    output: String,
}

impl Failed {
    /// For the ledger, which knows names and never contents.
    pub fn fact(&self) -> String {
        format!("the hook `{}` {}", self.program, self.how)
    }
}

/// For whoever asked.
impl std::fmt::Display for Failed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the hook `{}` {}", self.program, self.how)?;
        match self.output.as_str() {
            "" => Ok(()),
            output => write!(f, ": {output}"),
        }
    }
}

/// Runs the hooks one after the other; the first that fails ends it.
pub(crate) async fn run(guest: &Guest, hooks: &[Hook]) -> Result<Result<(), Failed>, ChannelError> {
    for hook in hooks {
        let limit = Duration::from_millis(hook.timeout_millis) + GRACE;
        let ran = tokio::time::timeout(limit, run_one(guest, hook)).await;
        let (how, output) = match ran {
            Ok(outcome) => match outcome? {
                (CommandState::Exited { code: 0 }, _) => continue,
                (CommandState::Exited { code }, output) => (format!("exited with {code}"), output),
                (CommandState::Signaled { signal }, output) => {
                    (format!("was killed by signal {signal}"), output)
                }
                (CommandState::TimedOut, output) => {
                    (format!("took longer than {} ms", hook.timeout_millis), output)
                }
                (CommandState::Running, output) => ("was lost from sight".into(), output),
            },
            Err(_) => ("did not end, although its time was over".into(), Vec::new()),
        };
        let program = hook.argv.first().cloned().unwrap_or_default();
        return Ok(Err(Failed {
            program,
            how,
            output: printable(&output),
        }));
    }
    Ok(Ok(()))
}

/// How it ended, and the last of what it printed.
async fn run_one(guest: &Guest, hook: &Hook) -> Result<(CommandState, Vec<u8>), ChannelError> {
    let request = Request::Exec(Exec {
        command: entropy::id::<CommandId>().to_string(),
        argv: hook.argv.iter().map(|word| word.as_bytes().to_vec()).collect(),
        env: Vec::new(),
        cwd: None,
        user: None,
        pty: None,
        stdin: false,
        timeout_millis: Some(hook.timeout_millis),
        log_bytes: 64 * 1024,
        wait_for_reader: true,
        kill_on_close: true,
    });
    let mut stream = guest.open(&request).await?;
    let mut output = Vec::new();
    while let Some(incoming) = stream.next().await {
        match incoming? {
            Incoming::Message(Message::Exited(state)) => return Ok((state, output)),
            Incoming::Data { bytes, .. } => {
                output.extend_from_slice(&bytes);
                let excess = output.len().saturating_sub(SHOWN);
                output.drain(..excess);
            }
            Incoming::Message(_) => {}
        }
    }
    Ok((CommandState::Running, output))
}

fn printable(output: &[u8]) -> String {
    let text: String = String::from_utf8_lossy(output)
        .chars()
        .filter(|c| !c.is_control() || *c == '\n')
        .collect();
    text.trim().to_owned()
}
