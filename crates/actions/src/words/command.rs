//! A command: what to run, how it ended, and its output in one piece.

use std::collections::BTreeMap;
use std::time::Instant;

use atoll_guest_protocol::{CommandState, PtySize};
use atoll_memory::Permit;
use atoll_sandboxes::{ExecEvent, ExecEvents, ExecInput, ExecSpec, Execution, OutputStream};
use atoll_types::{Code, CommandId, Fault};
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use tokio_util::task::AbortOnDropHandle;
use utoipa::ToSchema;

use crate::spelling;

/// How much of each output stream is kept for an answer in one piece.
const CAPTURE_BYTES: usize = 4 * 1024 * 1024;
/// What an answer holds beside the output, written.
const REST_BYTES: usize = 1024;
/// What stands in a readable text for bytes that are none.
const REPLACED: usize = char::REPLACEMENT_CHARACTER.len_utf8();

/// Stdin is handed on in pieces of this size.
const FEED_BYTES: usize = 64 * 1024;

/// The size of a terminal.
#[derive(Debug, Clone, Copy, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PtyRequest {
    #[schema(minimum = 1, maximum = 65535)]
    rows: u16,
    #[schema(minimum = 1, maximum = 65535)]
    cols: u16,
}

impl PtyRequest {
    pub fn into_size(self) -> PtySize {
        PtySize {
            rows: self.rows,
            cols: self.cols,
        }
    }
}

/// A command to run: either `argv` or `cmd`.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ExecRequest {
    /// The program and its arguments.
    #[schema(min_items = 1, examples(json!(["python3", "-c", "print(1)"])))]
    argv: Option<Vec<String>>,
    /// A line for `/bin/sh -c`.
    cmd: Option<String>,
    /// Added to the sandbox's environment.
    #[serde(default)]
    env: BTreeMap<String, String>,
    cwd: Option<String>,
    /// A name, a number, or `user:group`; absent: the template's user.
    user: Option<String>,
    /// What the command reads, to its end. Absent: nothing (over a WebSocket: what the client sends).
    stdin: Option<String>,
    /// Instead of `stdin`, where it is not UTF-8.
    stdin_base64: Option<String>,
    /// The command is killed when it takes longer.
    #[schema(minimum = 1, maximum = 9_007_199_254_740_991_i64)]
    timeout_ms: Option<u64>,
    /// Goes on when nobody is attached; the answer is 202 as soon as it runs.
    #[serde(default)]
    background: bool,
    /// Runs it on a terminal of this size; all its output is then stdout.
    pty: Option<PtyRequest>,
}

/// What to run, and what to feed it.
#[derive(Debug)]
pub struct Run {
    pub spec: ExecSpec,
    pub stdin: Option<Bytes>,
}

impl ExecRequest {
    /// Whether it reads input or has a terminal, so that nobody can join it half way.
    pub fn is_fed(&self) -> bool {
        self.stdin.is_some() || self.stdin_base64.is_some() || self.pty.is_some()
    }

    pub fn into_run(self) -> Result<Run, Fault> {
        let argv: Vec<Vec<u8>> = match (self.argv, self.cmd) {
            (Some(argv), None) if !argv.is_empty() => argv.into_iter().map(String::into_bytes).collect(),
            (None, Some(cmd)) => vec![b"/bin/sh".into(), b"-c".into(), cmd.into_bytes()],
            (Some(_), None) => return Err(Fault::new(Code::InvalidBody, "`argv` is empty")),
            (None, None) => {
                return Err(Fault::new(
                    Code::MissingField,
                    "nothing to run: give `argv` (a list) or `cmd` (a line for /bin/sh)",
                ));
            }
            (Some(_), Some(_)) => {
                return Err(Fault::new(
                    Code::ContradictingFields,
                    "`argv` and `cmd` exclude each other",
                ));
            }
        };
        let stdin = match (self.stdin, self.stdin_base64) {
            (None, None) => None,
            (text, encoded) => Some(Bytes::from(spelling::exactly_one("stdin", text, encoded)?)),
        };
        Ok(Run {
            spec: ExecSpec {
                argv,
                env: self.env.into_iter().collect(),
                cwd: self.cwd.map(String::into_bytes),
                user: self.user,
                pty: self.pty.map(PtyRequest::into_size),
                stdin: stdin.is_some(),
                timeout_millis: self
                    .timeout_ms
                    .map(|millis| spelling::duration("timeout_ms", millis))
                    .transpose()?,
                background: self.background,
                lossless: false,
                idempotency_key: None,
            },
            stdin,
        })
    }
}

/// How a command ended.
#[derive(Debug, Clone, Copy, Serialize, ToSchema)]
pub struct ExitView {
    /// Absent if a signal ended it.
    pub exit_code: Option<i32>,
    pub signal: Option<i32>,
    /// Whether it was killed because its `timeout_ms` was over.
    pub timed_out: bool,
}

impl ExitView {
    pub fn of(state: CommandState) -> Self {
        let mut exit = Self {
            exit_code: None,
            signal: None,
            timed_out: false,
        };
        match state {
            CommandState::Running => {}
            CommandState::Exited { code } => exit.exit_code = Some(code),
            CommandState::Signaled { signal } => exit.signal = Some(signal),
            CommandState::TimedOut => exit.timed_out = true,
        }
        exit
    }
}

/// A command that runs.
#[derive(Debug, Serialize, ToSchema)]
pub struct StartedView {
    pub command: String,
    pub pid: u32,
}

/// A command that is over, with the beginning of its output (at most 4 MiB of each stream).
#[derive(Debug, Serialize, ToSchema)]
pub struct ExecResult {
    command: String,
    pid: u32,
    exit_code: Option<i32>,
    signal: Option<i32>,
    timed_out: bool,
    duration_ms: u64,
    /// Readable; where the bytes are not UTF-8, `stdout_base64` has them exactly.
    stdout: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    stdout_base64: Option<String>,
    /// How much the command wrote, which may be more than is kept here.
    stdout_bytes: u64,
    stdout_truncated: bool,
    stderr: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    stderr_base64: Option<String>,
    stderr_bytes: u64,
    stderr_truncated: bool,
}

impl ExecResult {
    fn new(command: &CommandId, pid: u32, state: CommandState, began: Instant) -> Self {
        let exit = ExitView::of(state);
        Self {
            command: command.to_string(),
            pid,
            exit_code: exit.exit_code,
            signal: exit.signal,
            timed_out: exit.timed_out,
            duration_ms: u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX),
            stdout: String::new(),
            stdout_base64: None,
            stdout_bytes: 0,
            stdout_truncated: false,
            stderr: String::new(),
            stderr_base64: None,
            stderr_bytes: 0,
            stderr_truncated: false,
        }
    }
}

/// A command that has begun, and what it is fed.
#[derive(Debug)]
pub struct Attached {
    command: CommandId,
    pid: u32,
    events: ExecEvents,
    began: Instant,
    /// Beside the reading, because a command may write before it has read everything.
    feeding: Option<AbortOnDropHandle<()>>,
    idle_input: Option<ExecInput>,
}

impl Attached {
    /// Fails if the command could not be started.
    pub async fn to(execution: Execution, stdin: Option<Bytes>, began: Instant) -> Result<Self, Fault> {
        let Execution {
            command,
            mut events,
            input,
        } = execution;
        let pid = events.started().await?;
        let mut idle_input = Some(input);
        let feeding = stdin.and_then(|stdin| {
            let input = idle_input.take()?;
            Some(AbortOnDropHandle::new(tokio::spawn(feed(input, stdin))))
        });
        Ok(Self {
            command,
            pid,
            events,
            began,
            feeding,
            idle_input,
        })
    }

    /// That it runs; nobody waits for more. What it reads is fed to it until it has all, or is over.
    pub fn into_background(self) -> StartedView {
        let started = self.view();
        let Self {
            feeding, mut events, ..
        } = self;
        if let Some(feeding) = feeding {
            // Owned by the command: ends when all is written or the command is over.
            tokio::spawn(async move {
                tokio::select! {
                    _ = feeding => {}
                    () = async { while events.next().await.is_some() {} } => {}
                }
            });
        }
        started
    }

    /// What happens to it, and what must live as long as somebody listens.
    pub fn into_events(self) -> (ExecEvents, Fed) {
        let fed = Fed {
            _feeding: self.feeding,
            _idle_input: self.idle_input,
        };
        (self.events, fed)
    }

    pub fn view(&self) -> StartedView {
        StartedView {
            command: self.command.to_string(),
            pid: self.pid,
        }
    }

    /// Its end, with the beginning of its output, within what these permits may hold.
    pub async fn into_result(mut self, [stdout, stderr]: [Permit; 2]) -> Result<Ended, Fault> {
        let (mut stdout, mut stderr) = (Captured::new(stdout), Captured::new(stderr));
        let exit = collect(&mut self.events, &mut stdout, &mut stderr).await?;
        let length = stdout.prepare()? + stderr.prepare()? + REST_BYTES;
        let mut result = ExecResult::new(&self.command, self.pid, exit, self.began);
        (result.stdout_bytes, result.stdout_truncated) = (stdout.total, stdout.is_truncated());
        (result.stderr_bytes, result.stderr_truncated) = (stderr.total, stderr.is_truncated());
        let (of_stdout, of_stderr);
        (result.stdout, result.stdout_base64, of_stdout) = stdout.into_text();
        (result.stderr, result.stderr_base64, of_stderr) = stderr.into_text();
        Ok(Ended {
            result,
            length,
            held: [of_stdout, of_stderr],
        })
    }
}

/// What feeds a command, or keeps its input open.
#[derive(Debug)]
pub struct Fed {
    _feeding: Option<AbortOnDropHandle<()>>,
    _idle_input: Option<ExecInput>,
}

/// A command that is over.
#[derive(Debug)]
pub struct Ended {
    pub result: ExecResult,
    /// How long the result is as JSON, at most.
    pub length: usize,
    /// What its output and the JSON are paid for with.
    pub held: [Permit; 2],
}

/// The guest said what cannot be.
pub fn broken(message: &str) -> Fault {
    Fault::new(Code::GuestProtocol, message)
}

/// Writes all of stdin and closes it. A command that reads no further is none of our business.
pub async fn feed(mut input: ExecInput, mut stdin: Bytes) {
    while !stdin.is_empty() {
        let piece = stdin.split_to(stdin.len().min(FEED_BYTES));
        if input.write(piece).await.is_err() {
            return;
        }
    }
    let _ = input.close().await;
}

async fn collect(
    events: &mut ExecEvents,
    stdout: &mut Captured,
    stderr: &mut Captured,
) -> Result<CommandState, Fault> {
    while let Some(event) = events.next().await {
        match event? {
            ExecEvent::Output { stream, bytes } => match stream {
                OutputStream::Stdout => stdout.take(&bytes)?,
                OutputStream::Stderr => stderr.take(&bytes)?,
            },
            ExecEvent::Exited(state) => return Ok(state),
            // Only of one that was found again, whose log keeps the last of it.
            ExecEvent::Dropped { bytes } => stdout.total += bytes,
            ExecEvent::Started { .. } => {}
        }
    }
    Err(broken("the output ended before the command did"))
}

/// The beginning of a stream, and how long it really was.
#[derive(Debug)]
struct Captured {
    kept: Vec<u8>,
    total: u64,
    permit: Permit,
}

impl Captured {
    fn new(permit: Permit) -> Self {
        Self {
            kept: Vec::new(),
            total: 0,
            permit,
        }
    }

    fn take(&mut self, bytes: &[u8]) -> Result<(), Fault> {
        self.total += bytes.len() as u64;
        let bytes = &bytes[..bytes.len().min(CAPTURE_BYTES - self.kept.len())];
        let length = self.kept.len() + bytes.len();
        if length > self.kept.capacity() {
            let room = (self.kept.capacity() * 2).clamp(length, CAPTURE_BYTES);
            self.permit.set(room as u64)?;
            self.kept.reserve_exact(room - self.kept.len());
        }
        self.kept.extend_from_slice(bytes);
        Ok(())
    }

    fn is_truncated(&self) -> bool {
        self.total > self.kept.len() as u64
    }

    /// Pays for what is going to be made of it, and says how long it is as JSON.
    fn prepare(&mut self) -> Result<usize, Fault> {
        // a character that the limit cut in two is no reason to call the whole not UTF-8
        if self.is_truncated()
            && let Err(error) = std::str::from_utf8(&self.kept)
            && error.error_len().is_none()
        {
            self.kept.truncate(error.valid_up_to());
        }
        let (mut text, mut written) = (0, 0);
        for chunk in self.kept.utf8_chunks() {
            text += chunk.valid().len();
            written += chunk.valid().bytes().map(written_length).sum::<usize>();
            if !chunk.invalid().is_empty() {
                text += REPLACED;
                written += REPLACED;
            }
        }
        let mut beside = 0;
        if std::str::from_utf8(&self.kept).is_err() {
            let encoded = self.kept.len().div_ceil(3) * 4;
            // Both spellings, of which the readable one grows by doubling.
            beside = 2 * text + encoded;
            written += encoded;
        }
        self.permit.grow((beside + written) as u64)?;
        Ok(written)
    }

    /// Readable, exactly where that is not the same, and what it is paid for with.
    fn into_text(self) -> (String, Option<String>, Permit) {
        let (text, encoded) = match String::from_utf8(self.kept) {
            Ok(text) => (text, None),
            Err(error) => spelling::readable(error.as_bytes()),
        };
        (text, encoded, self.permit)
    }
}

/// How many bytes JSON spells a byte with.
fn written_length(byte: u8) -> usize {
    match byte {
        b'"' | b'\\' | b'\n' | b'\r' | b'\t' | 0x08 | 0x0c => 2,
        0..0x20 => 6,
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use atoll_memory::{Account, Limits, Memory};
    use atoll_types::{FaultKind, ProjectId};

    use super::*;
    use atoll_front::extract::parse_json;

    fn run(json: &str) -> Result<Run, Fault> {
        parse_json::<ExecRequest>(json.as_bytes())?.into_run()
    }

    #[test]
    fn a_line_runs_in_a_shell_and_a_list_as_it_is() {
        let line = run(r#"{"cmd":"echo $HOME"}"#).unwrap();
        assert_eq!(
            line.spec.argv,
            [b"/bin/sh".to_vec(), b"-c".to_vec(), b"echo $HOME".to_vec()]
        );
        assert!(!line.spec.stdin);
        let list = run(
            r#"{"argv":["a"],"env":{"B":"c"},"cwd":"/d","user":"e","stdin":"f","timeout_ms":1,"background":true,
                "pty":{"rows":2,"cols":3}}"#,
        )
        .unwrap();
        assert_eq!(list.spec.argv, [b"a".to_vec()]);
        assert_eq!(list.spec.env, [("B".to_owned(), "c".to_owned())]);
        assert_eq!(list.spec.cwd.as_deref(), Some(&b"/d"[..]));
        assert_eq!(list.spec.user.as_deref(), Some("e"));
        assert_eq!(list.spec.pty, Some(PtySize { rows: 2, cols: 3 }));
        assert_eq!(list.spec.timeout_millis, Some(1));
        assert!(list.spec.background && list.spec.stdin);
        assert_eq!(list.stdin.as_deref(), Some(&b"f"[..]));
    }

    #[test]
    fn contradictions_are_refused() {
        for bad in [
            "{}",
            r#"{"argv":[]}"#,
            r#"{"argv":["a"],"cmd":"b"}"#,
            r#"{"cmd":"b","stdin":"x","stdin_base64":"eA=="}"#,
            r#"{"cmd":"b","shell":"zsh"}"#,
            r#"{"cmd":"b","pty":{"rows":70000,"cols":1}}"#,
        ] {
            assert_eq!(run(bad).unwrap_err().kind(), FaultKind::Invalid, "{bad}");
        }
    }

    #[test]
    fn ends_are_told_apart() {
        let exit = ExitView::of(CommandState::Exited { code: 3 });
        assert_eq!(
            (exit.exit_code, exit.signal, exit.timed_out),
            (Some(3), None, false)
        );
        let exit = ExitView::of(CommandState::Signaled { signal: 9 });
        assert_eq!(
            (exit.exit_code, exit.signal, exit.timed_out),
            (None, Some(9), false)
        );
        let exit = ExitView::of(CommandState::TimedOut);
        assert_eq!((exit.exit_code, exit.signal, exit.timed_out), (None, None, true));
    }

    /// Of somebody with so many bytes.
    fn account(bytes: u64) -> (Memory, Account) {
        let memory = Memory::new(Limits::within(2 * bytes));
        let account = memory.account(&ProjectId::from_entropy([1; 20]), None);
        (memory, account)
    }

    #[test]
    fn captured_output_is_bounded_and_cut_between_characters() {
        let (_, account) = account(64 << 20);
        let captured = || Captured::new(account.open());
        let mut long = captured();
        long.take(&vec![b'x'; CAPTURE_BYTES - 1]).unwrap();
        long.take("€".as_bytes()).unwrap();
        long.take(b"more").unwrap();
        assert!(long.is_truncated());
        assert_eq!(long.total, CAPTURE_BYTES as u64 + 6);
        assert_eq!(long.prepare().unwrap(), CAPTURE_BYTES - 1);
        let (text, encoded, _) = long.into_text();
        assert_eq!((text.len(), encoded), (CAPTURE_BYTES - 1, None));

        let mut broken = captured();
        broken.take(b"a\xff").unwrap();
        assert_eq!(broken.prepare().unwrap(), 1 + 3 + 4);
        let (text, encoded, _) = broken.into_text();
        assert_eq!((text.as_str(), encoded.as_deref()), ("a\u{fffd}", Some("Yf8=")));
    }

    #[test]
    fn captured_output_is_paid_for_with_what_is_made_of_it() {
        let noise: Vec<u8> = (0..=255).cycle().take(100_000).collect();
        let quiet = vec![0; 100_000];
        let text = "line \"1\"\n\t\u{7f}€\\".repeat(1000).into_bytes();
        for bytes in [noise, quiet, text] {
            let (memory, account) = account(64 << 20);
            let mut captured = Captured::new(account.open());
            for piece in bytes.chunks(1000) {
                captured.take(piece).unwrap();
            }
            assert!(memory.held() >= bytes.len() as u64);
            let length = captured.prepare().unwrap();
            let (text, encoded, held) = captured.into_text();
            let mut result = ExecResult::new(
                &CommandId::from_entropy([1; 20]),
                1,
                CommandState::Exited { code: 0 },
                Instant::now(),
            );
            let made = text.len() + encoded.as_ref().map_or(0, String::len);
            (result.stdout, result.stdout_base64) = (text, encoded);
            let written = serde_json::to_vec(&result).unwrap().len();
            assert!(written <= length + REST_BYTES, "{written} of {length}");
            assert!(written + REST_BYTES >= length, "{written} of {length}");
            assert!(memory.held() >= (made + length) as u64);
            drop(held);
            assert_eq!(memory.held(), 0);
        }
        // Whoever has no room for it is told so.
        let (_, account) = account(1 << 20);
        let mut captured = Captured::new(account.open());
        captured.take(&vec![0; 400_000]).unwrap();
        assert_eq!(captured.prepare().unwrap_err().code, Code::TooMuchBuffered);
        let fault = captured.take(&vec![0; 1 << 20]).unwrap_err();
        assert_eq!(fault.code, Code::TooMuchBuffered);
    }
}
