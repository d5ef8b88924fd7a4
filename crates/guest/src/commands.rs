//! All commands, by name: starting, finding, reaping, reading, forgetting.
//!
//! What must hold: nothing here grows without bound. At most `MOST_RUNNING` run at once; of those that are over,
//! `MOST_OVER` stay listed and their logs together keep `MOST_LOGGED` bytes, the oldest go first.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use atoll_guest_protocol::{CommandInfo, CommandState, Configure, Exec, FailureKind};
use rustix::pipe::{PipeFlags, pipe_with};

use crate::command::{Alarm, Command, Deadline, GRACE, Parts, Reader};
use crate::environment::Environment;
use crate::failure::{Outcome, failure, from_errno, from_io, invalid, show};
use crate::log::Log;
use crate::poll::{End, EventFlags, Poller, Token};
use crate::spawn::{Confinement, Failed, Plan, Spawner, Stage};
use crate::terminal;
use crate::users::{Account, Users};

const MOST_RUNNING: usize = 1024;
const MOST_OVER: usize = 256;
const MOST_LOGGED: usize = 16 * 1024 * 1024;
/// Ends that wait for a host that follows them but does not read; the oldest of more go untold.
const MOST_UNTOLD: usize = 4096;
const LONGEST_NAME: usize = 256;
/// How long the news that a foreground command runs may wait for its first words, to travel with them. Most commands say
/// something or end sooner, and a message of its own would wake the host just when the program is being loaded.
const UNANNOUNCED: Duration = Duration::from_millis(20);
/// What programs expect of the soft limit; the hard one stays where the runtime put it.
const SOFT_OPEN_FILES: u64 = 1024;

#[derive(Debug)]
pub(crate) struct Commands {
    /// Boxed: a map's node has room for eleven, and one that came and went with each command would be a mapping made and
    /// undone each time.
    all: BTreeMap<u32, Box<Command>>,
    by_name: BTreeMap<String, u32>,
    by_pid: BTreeMap<i32, u32>,
    next: u32,
    deadlines: BTreeSet<Deadline>,
    /// Commands with something to read.
    queue: VecDeque<u32>,
    /// The stream that is told of every end, and the ends that it was not told of yet.
    follower: Option<u32>,
    ends: VecDeque<(u32, CommandInfo)>,
    spawner: Spawner,
    confinement: Option<Confinement>,
    null: OwnedFd,
    open_files: libc::rlimit,
    scratch: Vec<u8>,
}

impl Commands {
    pub(crate) fn new(null: OwnedFd, confinement: Option<Confinement>, hard_open_files: u64) -> Self {
        Self {
            all: BTreeMap::new(),
            by_name: BTreeMap::new(),
            by_pid: BTreeMap::new(),
            next: 0,
            deadlines: BTreeSet::new(),
            queue: VecDeque::new(),
            follower: None,
            ends: VecDeque::new(),
            spawner: Spawner::new(),
            confinement,
            null,
            open_files: libc::rlimit {
                rlim_cur: SOFT_OPEN_FILES.min(hard_open_files),
                rlim_max: hard_open_files,
            },
            scratch: Vec::new(),
        }
    }

    /// Starts a command and returns its number here. It is refused if its name is taken, also by one that is over.
    pub(crate) fn start(
        &mut self,
        exec: Exec,
        config: &Configure,
        network: &[(String, String)],
        poller: &Poller,
    ) -> Outcome<u32> {
        if exec.command.is_empty() || exec.command.len() > LONGEST_NAME {
            return Err(invalid(format!("a command's id has 1 to {LONGEST_NAME} bytes")));
        }
        if self.by_name.contains_key(&exec.command) {
            return Err(failure(
                FailureKind::AlreadyExists,
                format!("a command with the id {} exists", exec.command),
            ));
        }
        if self.by_pid.len() >= MOST_RUNNING {
            return Err(failure(
                FailureKind::Busy,
                format!("{MOST_RUNNING} commands are running; wait for one to end"),
            ));
        }
        // An empty name is the configured user's, not root's.
        let named = exec.user.as_deref().filter(|user| !user.is_empty());
        let account = Users::load().find(named.unwrap_or(&config.user))?;
        let environment = Environment::new(&account, [network, &config.env, &exec.env], exec.pty.is_some())?;
        let directory = directory_of(&exec, config, &account)?;
        let program = exec
            .argv
            .first()
            .cloned()
            .ok_or_else(|| invalid("a command needs a program"))?;
        let candidates = environment.candidates(&program)?;
        let argv = c_strings(&exec.argv)?;
        let env = environment.strings(directory.as_bytes());

        let Lines { parent, child } = Lines::open(&exec, &account)
            .map_err(|error| from_io("cannot open the command's pipes", &error))?;
        let terminal = parent.terminal.is_some();
        let held: usize = self.all.values().map(|command| command.log.held()).sum();
        let log_bytes = if held > 2 * MOST_LOGGED { 0 } else { exec.log_bytes };
        let number = self.next;
        self.next = self.next.wrapping_add(1);
        let timeout = exec.timeout_millis;
        // All that can be done before the child runs is done before: afterwards both compete for the sentry, and every
        // system call of ours costs the child ten times what it costs here.
        let mut command = Box::new(Command::new(Parts {
            name: exec.command,
            argv: exec.argv,
            started_millis: wall_millis(),
            stdin: parent.stdin,
            stdout: parent.stdout,
            stderr: parent.stderr,
            terminal: parent.terminal,
            log_bytes,
            wait_for_reader: exec.wait_for_reader,
        }));
        for (fd, end) in command.descriptors() {
            watch(poller, &fd, number, end).map_err(|error| from_io("cannot watch the command", &error))?;
        }
        let plan = Plan {
            candidates: &candidates,
            argv: &argv,
            env: &env,
            directory: &directory,
            account: &account,
            stdio: stdio(&child, terminal, &self.null),
            terminal,
            confinement: self.confinement.as_ref(),
            open_files: self.open_files,
        };
        let mut spawned = self.spawner.spawn(&plan);
        let (root, rooted);
        let plan = match spawned {
            // A home that does not exist (`nobody` has such a one) is no reason to fail; a directory that was asked for is.
            Err(Failed {
                stage: Stage::Directory,
                errno: libc::ENOENT | libc::ENOTDIR,
                ..
            }) if exec.cwd.is_none() => {
                root = c"/".to_owned();
                rooted = environment.strings(root.as_bytes());
                let plan = Plan {
                    directory: &root,
                    env: &rooted,
                    ..plan
                };
                spawned = self.spawner.spawn(&plan);
                plan
            }
            _ => plan,
        };
        let pid = match spawned {
            // A script without `#!`: shells run it themselves, so we do.
            Err(Failed {
                stage: Stage::Execute,
                errno: libc::ENOEXEC,
                candidate,
            }) => {
                let shell = c"/bin/sh".to_owned();
                let script = [shell.clone(), candidates[candidate].clone()];
                let argv: Vec<CString> = script.into_iter().chain(argv[1..].iter().cloned()).collect();
                self.spawner.spawn(&Plan {
                    candidates: &[shell],
                    argv: &argv,
                    ..plan
                })
            }
            other => other,
        }
        .map_err(|failed| explain(failed, &program, &directory, &account))?;
        command.runs_as(pid);
        if let Some(millis) = timeout
            && let Some(at) = Instant::now().checked_add(Duration::from_millis(millis))
        {
            self.deadlines.insert((at, number, Alarm::Timeout));
        }
        if exec.kill_on_close && !exec.stdin && !terminal {
            self.deadlines
                .insert((Instant::now() + UNANNOUNCED, number, Alarm::Announce));
        } else {
            command.announced = true;
        }
        self.by_name.insert(command.name().to_owned(), number);
        self.by_pid.insert(pid, number);
        self.all.insert(number, command);
        Ok(number)
    }

    pub(crate) fn find(&self, name: &str) -> Outcome<u32> {
        self.by_name.get(name).copied().ok_or_else(|| {
            failure(
                FailureKind::NotFound,
                format!("no such command: {}", name.chars().take(80).collect::<String>()),
            )
        })
    }

    pub(crate) fn get_mut(&mut self, number: u32) -> Option<&mut Command> {
        self.all.get_mut(&number).map(Box::as_mut)
    }

    pub(crate) fn list(&self) -> impl Iterator<Item = CommandInfo> {
        self.all.values().map(|command| command.info())
    }

    pub(crate) fn attach(&mut self, number: u32, stream: u32, from: u64) {
        if let Some(command) = self.all.get_mut(&number) {
            command.readers.push(Reader {
                stream,
                cursor: from.min(command.log.end()),
            });
        }
    }

    /// The stream no longer reads; a command that waited for it goes on.
    pub(crate) fn detach(&mut self, number: u32, stream: u32) {
        if let Some(command) = self.all.get_mut(&number) {
            command.readers.retain(|reader| reader.stream != stream);
            self.enqueue(number);
        }
    }

    pub(crate) fn forget(&mut self, name: &str) -> Outcome {
        let number = self.find(name)?;
        if self.all.get(&number).is_some_and(|command| !command.is_over()) {
            return Err(failure(
                FailureKind::Busy,
                format!("command {name} is still running; signal it first"),
            ));
        }
        self.remove(number);
        Ok(())
    }

    /// Forgets a command whose only reader has heard all of it.
    pub(crate) fn forget_unless_read(&mut self, number: u32) {
        if self
            .all
            .get(&number)
            .is_some_and(|command| command.is_over() && command.readers.is_empty())
        {
            self.remove(number);
        }
    }

    fn remove(&mut self, number: u32) {
        if let Some(command) = self.all.remove(&number) {
            self.by_name.remove(command.name());
        }
    }

    /// A descriptor became ready. The streams to wake are appended to `wakes`.
    pub(crate) fn became_ready(&mut self, number: u32, end: End, flags: EventFlags, wakes: &mut Vec<u32>) {
        let Some(command) = self.all.get_mut(&number) else {
            return;
        };
        command.became_ready(end, flags);
        if matches!(end, End::Stdin | End::Terminal) {
            wakes.extend(command.readers.iter().map(|reader| reader.stream));
        }
        if end != End::Stdin {
            self.enqueue(number);
        }
    }

    pub(crate) fn enqueue(&mut self, number: u32) {
        if let Some(command) = self.all.get_mut(&number)
            && !std::mem::replace(&mut command.queued, true)
        {
            self.queue.push_back(number);
        }
    }

    pub(crate) fn has_work(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Reads from the next command in turn.
    pub(crate) fn pump_one(&mut self, wakes: &mut Vec<u32>) {
        let Some(number) = self.queue.pop_front() else {
            return;
        };
        let Some(command) = self.all.get_mut(&number) else {
            return;
        };
        command.queued = false;
        if self.scratch.is_empty() {
            self.scratch = vec![0; Log::LEAST];
        }
        let pumped = command.pump(&mut self.scratch, wall_millis());
        if pumped.new_output || pumped.over {
            wakes.extend(command.readers.iter().map(|reader| reader.stream));
        }
        if pumped.quiet {
            self.deadlines.retain(|deadline| deadline.1 != number);
            self.deadlines
                .insert((Instant::now() + GRACE, number, Alarm::Grace));
        }
        if pumped.more {
            self.enqueue(number);
        }
        if pumped.over {
            self.settle(number, wakes);
        }
    }

    /// Reaps every child that ended: ours, and those that were left to PID 1.
    pub(crate) fn reap(&mut self) {
        loop {
            let mut status = 0;
            // SAFETY: `status` lives through the call.
            let pid = unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG) };
            if pid <= 0 {
                return;
            }
            let state = if libc::WIFSIGNALED(status) {
                CommandState::Signaled {
                    signal: libc::WTERMSIG(status),
                }
            } else {
                CommandState::Exited {
                    code: libc::WEXITSTATUS(status),
                }
            };
            if let Some(number) = self.by_pid.remove(&pid)
                && let Some(command) = self.all.get_mut(&number)
            {
                command.exited(state);
                self.enqueue(number);
            }
        }
    }

    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.deadlines.first().map(|(at, ..)| *at)
    }

    /// Acts on every deadline that has come.
    pub(crate) fn run_deadlines(&mut self, now: Instant, wakes: &mut Vec<u32>) {
        while let Some((at, number, alarm)) = self.deadlines.first().copied()
            && at <= now
        {
            self.deadlines.pop_first();
            let Some(command) = self.all.get_mut(&number) else {
                continue;
            };
            match alarm {
                Alarm::Timeout => command.time_is_over(),
                Alarm::Announce => {
                    command.announced = true;
                    wakes.extend(command.readers.iter().map(|reader| reader.stream));
                }
                Alarm::Grace => {
                    if command.grace_is_over(wall_millis()) {
                        wakes.extend(command.readers.iter().map(|reader| reader.stream));
                        self.settle(number, wakes);
                    }
                }
            }
        }
    }

    /// A command is over: what is kept of the old ones is brought back into its bounds.
    fn settle(&mut self, number: u32, wakes: &mut Vec<u32>) {
        self.deadlines.retain(|deadline| deadline.1 != number);
        self.announce(number, wakes);
        let over = |command: &Command| command.is_over() && command.readers.is_empty();
        let listed: Vec<u32> = self
            .all
            .iter()
            .filter(|(_, command)| over(command))
            .map(|(number, _)| *number)
            .collect();
        for number in listed.iter().take(listed.len().saturating_sub(MOST_OVER)) {
            self.remove(*number);
        }
        let mut held: usize = self.all.values().map(|command| command.log.held()).sum();
        for number in listed {
            if held <= MOST_LOGGED {
                return;
            }
            if let Some(command) = self.all.get_mut(&number) {
                held -= command.log.held();
                command.log.clear();
            }
        }
    }

    /// From now on this stream is told of every end, instead of whichever was before.
    pub(crate) fn follow(&mut self, stream: u32) {
        self.follower = Some(stream);
    }

    pub(crate) fn is_followed_by(&self, stream: u32) -> bool {
        self.follower == Some(stream)
    }

    /// Nobody waits for the telling of an end any more, unless another stream took over.
    pub(crate) fn unfollow(&mut self, stream: u32, wakes: &mut Vec<u32>) {
        if self.is_followed_by(stream) {
            self.follower = None;
            while !self.ends.is_empty() {
                self.told(wakes);
            }
        }
    }

    fn announce(&mut self, number: u32, wakes: &mut Vec<u32>) {
        if let Some(follower) = self.follower
            && let Some(command) = self.all.get_mut(&number)
        {
            command.untold = true;
            self.ends.push_back((number, command.info()));
            wakes.push(follower);
            if self.ends.len() > MOST_UNTOLD {
                self.told(wakes);
            }
        }
    }

    pub(crate) fn next_end(&self) -> Option<&CommandInfo> {
        self.ends.front().map(|(_, info)| info)
    }

    /// The next end was told: those who are attached to the command may hear of it.
    pub(crate) fn told(&mut self, wakes: &mut Vec<u32>) {
        if let Some((number, _)) = self.ends.pop_front()
            && let Some(command) = self.all.get_mut(&number)
        {
            command.untold = false;
            wakes.extend(command.readers.iter().map(|reader| reader.stream));
        }
    }

    /// Gives back the memory of a burst.
    pub(crate) fn shrink(&mut self) {
        self.scratch = Vec::new();
    }

    pub(crate) fn is_large(&self) -> bool {
        !self.scratch.is_empty()
    }
}

fn watch(poller: &Poller, fd: &OwnedFd, number: u32, end: End) -> io::Result<()> {
    poller.watch(fd, Token::Command(number, end))
}

/// A command's descriptors: ours, and those that the child gets.
#[derive(Debug)]
struct Lines {
    parent: ParentLines,
    child: [Option<OwnedFd>; 3],
}

#[derive(Debug, Default)]
struct ParentLines {
    stdin: Option<OwnedFd>,
    stdout: Option<OwnedFd>,
    stderr: Option<OwnedFd>,
    terminal: Option<OwnedFd>,
}

impl Lines {
    fn open(exec: &Exec, account: &Account) -> io::Result<Self> {
        if let Some(size) = exec.pty {
            let pair = terminal::open(size, account)?;
            return Ok(Self {
                parent: ParentLines {
                    terminal: Some(pair.master),
                    ..ParentLines::default()
                },
                child: [Some(pair.slave), None, None],
            });
        }
        let mut parent = ParentLines::default();
        let mut child = [None, None, None];
        if exec.stdin {
            let (read, write) = half_nonblocking_pipe(Ours::Write)?;
            child[0] = Some(read);
            parent.stdin = Some(write);
        }
        let (read, write) = half_nonblocking_pipe(Ours::Read)?;
        parent.stdout = Some(read);
        child[1] = Some(write);
        let (read, write) = half_nonblocking_pipe(Ours::Read)?;
        parent.stderr = Some(read);
        child[2] = Some(write);
        Ok(Self { parent, child })
    }
}

/// What the child's 0, 1 and 2 are made from: a terminal serves as all three.
fn stdio(child: &[Option<OwnedFd>; 3], terminal: bool, null: &OwnedFd) -> [i32; 3] {
    let raw = |index: usize| {
        let fd = child[index].as_ref();
        let fd = fd.or(if terminal { child[0].as_ref() } else { None });
        fd.unwrap_or(null).as_raw_fd()
    };
    [raw(0), raw(1), raw(2)]
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Ours {
    Read,
    Write,
}

/// Our end does not block; the child's does, as programs expect.
fn half_nonblocking_pipe(ours: Ours) -> io::Result<(OwnedFd, OwnedFd)> {
    let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
    let end = if ours == Ours::Read { &read } else { &write };
    rustix::io::ioctl_fionbio(end, true)?;
    Ok((read, write))
}

fn directory_of(exec: &Exec, config: &Configure, account: &Account) -> Outcome<CString> {
    let named = exec.user.as_deref().is_some_and(|user| !user.is_empty());
    let base = if config.workdir.is_empty() || named {
        &account.home
    } else {
        &config.workdir
    };
    let path = crate::path::absolute(base.as_bytes(), exec.cwd.as_deref().unwrap_or(b"."))?;
    CString::new(path).map_err(|_| invalid("the working directory contains a zero byte"))
}

fn c_strings(arguments: &[Vec<u8>]) -> Outcome<Vec<CString>> {
    arguments
        .iter()
        .map(|argument| {
            CString::new(argument.as_slice())
                .map_err(|_| invalid("an argument of the command contains a zero byte"))
        })
        .collect()
}

/// Says what could not be done, with whom and where.
fn explain(
    failed: Failed,
    program: &[u8],
    directory: &CString,
    account: &Account,
) -> atoll_guest_protocol::Failure {
    let program = show(&program[..program.len().min(200)]);
    let directory = show(directory.as_bytes());
    match (failed.stage, failed.errno) {
        (Stage::Clone, libc::EAGAIN) => failure(FailureKind::Busy, "too many processes in the sandbox"),
        (Stage::Clone, errno) => from_errno(format!("cannot start {program}"), errno),
        (Stage::Session | Stage::Stdio, errno) => {
            from_errno(format!("cannot prepare a session for {program}"), errno)
        }
        (Stage::Identity, errno) => from_errno(
            format!(
                "cannot become user {} ({}:{})",
                account.name, account.uid, account.gid
            ),
            errno,
        ),
        (Stage::Directory, libc::ENOENT) => failure(
            FailureKind::NotFound,
            format!("no such working directory: {directory}"),
        ),
        (Stage::Directory, errno) => from_errno(format!("cannot enter the directory {directory}"), errno),
        (Stage::Confine, errno) => from_errno(format!("cannot confine {program}"), errno),
        (Stage::Execute, libc::ENOENT | libc::ENOTDIR) => {
            failure(FailureKind::NotFound, format!("no such program: {program}"))
        }
        (Stage::Execute, libc::E2BIG) => failure(FailureKind::TooLarge, "argument list too long"),
        (Stage::Execute, errno) => from_errno(format!("cannot execute {program}"), errno),
    }
}

pub(crate) fn wall_millis() -> u64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}
