use std::time::{Duration, Instant};

use atoll_guest_protocol::{
    CommandState, Configure, Exec, FailureKind, FrameKind, INITIAL_CREDIT, Message, PtySize, Request,
    SUB_STDERR, SUB_STDOUT, Start,
};

use crate::client::{Event, Guest, PROGRAM, exec, shell};

#[test]
fn output_comes_on_two_channels_and_then_the_exit_code() {
    let mut guest = Guest::start();
    let done = guest.run("echo out; echo err >&2; exit 3");
    assert_eq!(done.stdout, b"out\n");
    assert_eq!(done.stderr, b"err\n");
    assert_eq!(done.state, CommandState::Exited { code: 3 });
}

#[test]
fn stdin_is_echoed_until_its_end() {
    let mut guest = Guest::start();
    let mut cat = exec("cat", &["cat"]);
    cat.stdin = true;
    let stream = guest.open(&Request::Exec(cat));
    guest.send(stream, b"hello ");
    guest.send(stream, b"world");
    guest.send_end(stream);
    let done = guest.finish(stream);
    assert_eq!(done.stdout, b"hello world");
}

#[test]
fn a_megabyte_through_stdin_and_back() {
    let mut guest = Guest::start();
    let mut wc = exec("wc", &["wc", "-c"]);
    wc.stdin = true;
    let stream = guest.open(&Request::Exec(wc));
    guest.send(stream, &vec![b'x'; 3_000_000]);
    guest.send_end(stream);
    assert_eq!(guest.finish(stream).stdout, b"3000000\n");
}

#[test]
fn stdin_of_a_program_that_does_not_read_is_thrown_away() {
    let mut guest = Guest::start();
    let mut command = shell("deaf", "exec <&-; sleep 0.3; echo done");
    command.stdin = true;
    let stream = guest.open(&Request::Exec(command));
    assert!(matches!(guest.message(stream), Message::Started { .. }));
    std::thread::sleep(Duration::from_millis(150));
    guest.send(stream, &vec![0; 2_000_000]);
    assert_eq!(guest.finish(stream).stdout, b"done\n");
}

#[test]
fn what_cannot_be_started_is_explained() {
    let mut guest = Guest::start();
    let mut check = |exec: Exec, kind, message: &str| {
        let failure = guest.call(&Request::Exec(exec)).expect_err("refused");
        assert_eq!((failure.kind, failure.message.as_str()), (kind, message));
    };
    check(
        exec("a", &["no-such-program"]),
        FailureKind::NotFound,
        "no such program: no-such-program",
    );
    check(
        exec("b", &["/etc/passwd"]),
        FailureKind::PermissionDenied,
        "cannot execute /etc/passwd: permission denied",
    );
    check(
        Exec {
            user: Some("nobody-here".to_owned()),
            ..exec("c", &["true"])
        },
        FailureKind::NoSuchUser,
        "no such user: nobody-here",
    );
    check(
        Exec {
            cwd: Some(b"/not/there".to_vec()),
            ..exec("d", &["true"])
        },
        FailureKind::NotFound,
        "no such working directory: /not/there",
    );
    check(exec("e", &[]), FailureKind::Invalid, "a command needs a program");
    check(
        exec("f", &["tr\0ue"]),
        FailureKind::Invalid,
        "the program's name contains a zero byte",
    );
    // Nothing of these is listed.
    assert_eq!(guest.ask(&Request::ListCommands), Ok(Message::Commands(vec![])));
}

#[test]
fn a_name_is_taken_until_forgotten() {
    let mut guest = Guest::start();
    let stream = guest.open(&Request::Exec(exec("once", &["true"])));
    guest.finish(stream);
    let again = guest.call(&Request::Exec(exec("once", &["true"])));
    assert_eq!(again.expect_err("taken").kind, FailureKind::AlreadyExists);
    let forget = Request::Forget {
        command: "once".to_owned(),
    };
    assert_eq!(guest.call(&forget), Ok(()));
    assert_eq!(guest.call(&forget).expect_err("gone").kind, FailureKind::NotFound);
    let stream = guest.open(&Request::Exec(exec("once", &["true"])));
    guest.finish(stream);
}

#[test]
fn user_environment_and_directory() {
    let mut guest = Guest::start();
    let configure = Configure {
        env: vec![
            ("A".to_owned(), "configured".to_owned()),
            ("B".to_owned(), "configured".to_owned()),
        ],
        user: "nobody".to_owned(),
        workdir: "/usr".to_owned(),
        start: Some(Start {
            argv: vec![
                "sh".to_owned(),
                "-c".to_owned(),
                "echo started as $USER".to_owned(),
            ],
        }),
        ..Configure::default()
    };
    assert_eq!(guest.call(&Request::Configure(configure)), Ok(()));
    let mut command = shell("env", "echo $A $B $USER $(id -u) $(pwd) $PWD $(id -G)");
    command.cwd = None;
    command.env = vec![("B".to_owned(), "own".to_owned())];
    let stream = guest.open(&Request::Exec(command));
    let done = guest.finish(stream);
    assert_eq!(
        String::from_utf8_lossy(&done.stdout),
        "configured own nobody 65534 /usr /usr 65534\n"
    );
    let attach = Request::Attach {
        command: "start".to_owned(),
        from: 0,
    };
    let stream = guest.open(&attach);
    assert_eq!(guest.finish(stream).stdout, b"started as nobody\n");
}

#[test]
fn signals_reach_the_whole_group() {
    let mut guest = Guest::start();
    let stream = guest.open(&Request::Exec(shell("group", "sleep 100 & echo up; wait")));
    assert!(matches!(guest.message(stream), Message::Started { .. }));
    assert_eq!(guest.next(stream), Event::Data(SUB_STDOUT, b"up\n".to_vec()));
    guest.tell(stream, &Message::Signal(libc::SIGTERM));
    let done = guest.finish(stream);
    assert_eq!(
        done.state,
        CommandState::Signaled {
            signal: libc::SIGTERM
        }
    );
    let late = guest.call(&Request::Signal {
        command: "group".to_owned(),
        signal: libc::SIGTERM,
    });
    assert_eq!(late.expect_err("it is over").kind, FailureKind::NotFound);
}

#[test]
fn signals_by_request() {
    let mut guest = Guest::start();
    let stream = guest.open(&Request::Exec(shell(
        "trap",
        "trap 'echo usr1; exit 5' USR1; echo up; while :; do sleep 0.05; done",
    )));
    assert!(matches!(guest.message(stream), Message::Started { .. }));
    assert_eq!(guest.next(stream), Event::Data(SUB_STDOUT, b"up\n".to_vec()));
    let signal = |signal| Request::Signal {
        command: "trap".to_owned(),
        signal,
    };
    assert_eq!(
        guest.call(&signal(99)).expect_err("no such").kind,
        FailureKind::Invalid
    );
    assert_eq!(guest.call(&signal(libc::SIGUSR1)), Ok(()));
    let done = guest.finish(stream);
    assert_eq!(
        (done.stdout, done.state),
        (b"usr1\n".to_vec(), CommandState::Exited { code: 5 })
    );
}

#[test]
fn time_limits_kill() {
    let mut guest = Guest::start();
    let mut command = shell("slow", "echo begin; sleep 100");
    command.timeout_millis = Some(100);
    let begin = Instant::now();
    let stream = guest.open(&Request::Exec(command));
    let done = guest.finish(stream);
    assert_eq!(
        (done.stdout, done.state),
        (b"begin\n".to_vec(), CommandState::TimedOut)
    );
    assert!(begin.elapsed() < Duration::from_secs(5));
}

#[test]
fn a_terminal_has_a_size_and_can_be_resized() {
    let mut guest = Guest::start();
    let mut command = shell("tty", "stty size; read line; echo got $line; stty size; tty; cat");
    command.pty = Some(PtySize { rows: 30, cols: 100 });
    let stream = guest.open(&Request::Exec(command));
    assert!(matches!(guest.message(stream), Message::Started { .. }));
    let mut seen = String::new();
    let wait_for = |guest: &mut Guest, seen: &mut String, wanted: &str| {
        while !seen.contains(wanted) {
            match guest.next(stream) {
                Event::Data(SUB_STDOUT, bytes) => seen.push_str(&String::from_utf8_lossy(&bytes)),
                other => panic!("unexpected {other:?} after {seen}"),
            }
        }
    };
    wait_for(&mut guest, &mut seen, "30 100\r\n");
    guest.tell(stream, &Message::Resize(PtySize { rows: 40, cols: 120 }));
    guest.send(stream, b"line\n");
    wait_for(&mut guest, &mut seen, "got line\r\n40 120\r\n/dev/pts/");
    guest.send_end(stream); // ^D ends `cat`
    assert_eq!(guest.finish(stream).state, CommandState::Exited { code: 0 });
}

#[test]
fn a_log_is_replayed_and_says_what_it_lost() {
    let mut guest = Guest::start();
    let script = "echo one; sleep 0.05; echo two >&2; sleep 0.05; echo three";
    let stream = guest.open(&Request::Exec(shell("replay", script)));
    guest.finish(stream);
    let attach = |command: &str, from| Request::Attach {
        command: command.to_owned(),
        from,
    };
    let stream = guest.open(&attach("replay", 2));
    let expected = [
        Event::Data(SUB_STDOUT, b"e\n".to_vec()),
        Event::Data(SUB_STDERR, b"two\n".to_vec()),
        Event::Data(SUB_STDOUT, b"three\n".to_vec()),
        Event::Message(Message::Exited(CommandState::Exited { code: 0 })),
        Event::End(Ok(())),
    ];
    for event in expected {
        assert_eq!(guest.next(stream), event);
    }

    let mut big = shell("big", "head -c 1000000 /dev/zero; echo end");
    big.wait_for_reader = false;
    let stream = guest.open(&Request::Exec(big));
    guest.finish(stream);
    let stream = guest.open(&attach("big", 0));
    let done = guest.finish(stream);
    assert!(done.stdout.ends_with(b"end\n"));
    assert!(done.stdout.len() <= 64 * 1024);
    assert_eq!(done.dropped + done.stdout.len() as u64, 1_000_004);

    let Ok(Message::Commands(list)) = guest.ask(&Request::ListCommands) else {
        panic!("no list");
    };
    assert_eq!(list.len(), 2);
    assert_eq!(list[1].output_bytes, 1_000_004);
    assert!(list[1].log_start > 900_000);
}

#[test]
fn a_slow_reader_holds_only_its_own_command() {
    let mut guest = Guest::start();
    let slow = guest.open(&Request::Exec(shell("slow", "head -c 20000000 /dev/zero")));
    let flood = guest.open(&Request::Exec(Exec {
        wait_for_reader: false,
        ..exec("flood", &["yes"])
    }));
    guest.idle(Duration::from_millis(300));
    // No credit was returned, so both stopped at their window.
    assert!(
        guest.unread(slow) <= INITIAL_CREDIT as usize,
        "{}",
        guest.unread(slow)
    );
    assert!(guest.unread(flood) <= INITIAL_CREDIT as usize);
    for _ in 0..10 {
        assert_eq!(guest.run("echo quick").stdout, b"quick\n");
    }
    let done = guest.finish(slow);
    assert_eq!(
        (done.stdout.len(), done.dropped),
        (20_000_000, 0),
        "nothing is lost"
    );
    guest.tell(flood, &Message::Signal(libc::SIGKILL));
    let done = guest.finish(flood);
    assert!(done.dropped > 0, "`yes` went on and overwrote its log");
}

#[test]
fn without_its_reader_a_waiting_command_goes_on() {
    let mut guest = Guest::start();
    let stream = guest.open(&Request::Exec(shell(
        "left",
        "head -c 5000000 /dev/zero; echo end",
    )));
    assert!(matches!(guest.message(stream), Message::Started { .. }));
    guest.close(stream);
    let attach = Request::Attach {
        command: "left".to_owned(),
        from: 0,
    };
    let stream = guest.open(&attach);
    let done = guest.finish(stream);
    assert!(done.stdout.ends_with(b"end\n"));
    assert_eq!(done.dropped + done.stdout.len() as u64, 5_000_004);
}

#[test]
fn grandchildren_with_the_pipes_do_not_delay_the_end() {
    let mut guest = Guest::start();
    let begin = Instant::now();
    let done = guest.run("(sleep 1; echo late; sleep 30) & echo main");
    assert_eq!(done.stdout, b"main\n");
    assert!(begin.elapsed() < Duration::from_secs(1));
    // A flooding one does not either.
    let done = guest.run("yes & sleep 0.05");
    assert_eq!(done.state, CommandState::Exited { code: 0 });
}

#[test]
fn closing_kills_if_asked_to() {
    let mut guest = Guest::start();
    let mut command = shell("bound", "sleep 100");
    command.kill_on_close = true;
    let stream = guest.open(&Request::Exec(command));
    assert!(matches!(guest.message(stream), Message::Started { .. }));
    guest.close(stream);
    let stream = guest.open(&Request::Attach {
        command: "bound".to_owned(),
        from: 0,
    });
    assert_eq!(
        guest.finish(stream).state,
        CommandState::Signaled {
            signal: libc::SIGKILL
        }
    );
}

#[test]
fn a_new_host_finds_the_commands_of_the_old_one() {
    let mut guest = Guest::start();
    let stream = guest.open(&Request::Exec(shell("kept", "echo one; sleep 0.3; echo two")));
    let mut bound = shell("bound", "sleep 100");
    bound.kill_on_close = true;
    guest.open(&Request::Exec(bound));
    assert!(matches!(guest.message(stream), Message::Started { .. }));
    // The old host dies in the middle of a frame.
    let mut torn = Vec::new();
    atoll_guest_protocol::encode_into(&mut torn, FrameKind::Data, 0, stream, &[7; 60_000]);
    guest.raw(&torn[..31_000]);
    guest.hello(77);
    let attach = |command: &str| Request::Attach {
        command: command.to_owned(),
        from: 0,
    };
    let stream = guest.open(&attach("kept"));
    assert_eq!(guest.finish(stream).stdout, b"one\ntwo\n");
    let stream = guest.open(&attach("bound"));
    assert_eq!(
        guest.finish(stream).state,
        CommandState::Signaled {
            signal: libc::SIGKILL
        }
    );
}

#[test]
fn children_inherit_three_descriptors_and_no_blocked_signal() {
    let mut guest = Guest::start();
    // `ls` itself opens the directory as 3.
    assert_eq!(guest.run("ls /proc/self/fd").stdout, b"0\n1\n2\n3\n");
    let done = guest.run("grep -E 'SigBlk|SigIgn' /proc/self/status");
    let text = String::from_utf8_lossy(&done.stdout).into_owned();
    if text.is_empty() {
        return; // gVisor does not say
    }
    assert!(text.starts_with("SigBlk:\t0000000000000000\n"), "{text}");
    // The real-time signals (32 and up) may be ignored since before our time.
    let ignored = text.trim_end().rsplit('\t').next().expect("a number");
    let ignored = u64::from_str_radix(ignored, 16).expect("hexadecimal");
    assert_eq!(ignored & 0x7fff_ffff, 0, "{text}");
}

#[test]
fn confined_children_have_no_capabilities() {
    if !Guest::is_local() {
        return; // a matter of how the agent is started
    }
    let mut guest = Guest::silent(&["--confine"]);
    guest.hello(1);
    let done = guest.run("grep -E '^(Cap|NoNewPrivs)' /proc/self/status");
    let text = String::from_utf8_lossy(&done.stdout).into_owned();
    assert_eq!(text.matches("0000000000000000").count(), 5, "{text}");
    assert!(text.contains("NoNewPrivs:\t1"), "{text}");
}

#[test]
fn confined_children_run_under_the_filter() {
    if !Guest::is_local() {
        return;
    }
    // if (nr == mkdir || nr == mkdirat) return EPERM; return ALLOW;
    let load_number = (0x20u16, 0u8, 0u8, 0u32);
    let program = [
        load_number,
        (0x15, 2, 0, libc::SYS_mkdir as u32),
        (0x15, 1, 0, libc::SYS_mkdirat as u32),
        (0x06, 0, 0, libc::SECCOMP_RET_ALLOW),
        (0x06, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
    ];
    let bytes: Vec<u8> = program
        .iter()
        .flat_map(|(code, jt, jf, k)| [&code.to_ne_bytes()[..], &[*jt, *jf], &k.to_ne_bytes()].concat())
        .collect();
    let path = format!("/tmp/atoll-guest-filter-{}", std::process::id());
    std::fs::write(&path, bytes).expect("written");
    let mut command = std::process::Command::new("sh");
    let script = format!("exec {PROGRAM} --confine --seccomp-fd 9 9<{path}");
    command.args(["-c", &script]);
    let mut guest = Guest::by(command);
    guest.hello(1);
    let done =
        guest.run("mkdir /tmp/atoll-guest-must-not-be; grep ^Seccomp: /proc/self/status; ls /proc/self/fd");
    std::fs::remove_file(&path).expect("removed");
    assert_eq!(String::from_utf8_lossy(&done.stdout), "Seccomp:\t2\n0\n1\n2\n3\n");
    let complaint = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(complaint.contains("Operation not permitted"), "{complaint}");
}

#[test]
fn nonsense_ends_the_stream_and_nothing_else() {
    let mut guest = Guest::start();
    guest.raw(b"garbage \xA7\x01\x11\x0F and more");
    guest.frame(FrameKind::Open, 0, 500, &[0xff; 40]);
    assert_eq!(guest.run("echo fine").stdout, b"fine\n");
    let stream = guest.open(&Request::Exec(shell("s", "sleep 5")));
    assert!(matches!(guest.message(stream), Message::Started { .. }));
    guest.frame(FrameKind::Message, 0, stream, &[0xff, 0xff]);
    assert_eq!(
        guest.end(stream).expect_err("malformed").kind,
        FailureKind::Invalid
    );
    // More than the window.
    let mut cat = shell("t", "sleep 5");
    cat.stdin = true;
    let stream = guest.open(&Request::Exec(cat));
    assert!(matches!(guest.message(stream), Message::Started { .. }));
    for _ in 0..10 {
        guest.frame(FrameKind::Data, 0, stream, &vec![0; 60_000]);
    }
    assert_eq!(
        guest.end(stream).expect_err("overspent").kind,
        FailureKind::Invalid
    );
    guest.frame(FrameKind::Ping, 0, 0, b"still there?");
    assert_eq!(guest.run("echo fine").stdout, b"fine\n");
    assert_eq!(guest.pongs, [b"still there?".to_vec()]);
}

#[test]
fn too_many_streams_are_refused_not_kept() {
    let mut guest = Guest::start();
    let stream = guest.open(&Request::Exec(shell("sleeper", "sleep 30")));
    assert!(matches!(guest.message(stream), Message::Started { .. }));
    let attach = Request::Attach {
        command: "sleeper".to_owned(),
        from: 0,
    };
    let streams: Vec<u32> = (0..1100).map(|_| guest.open(&attach)).collect();
    let last = *streams.last().expect("some");
    assert_eq!(guest.end(last).expect_err("too many").kind, FailureKind::Busy);
    guest.hello(2);
    assert_eq!(guest.run("echo fine").stdout, b"fine\n");
}

#[test]
fn nothing_stays_a_zombie() {
    let mut guest = Guest::start();
    // As PID 1 the agent also inherits the grandchildren.
    for _ in 0..5 {
        guest.run("(true &); (sleep 0.05 &); true");
    }
    std::thread::sleep(Duration::from_millis(200));
    let zombies =
        guest.run("awk -v parent=$PPID '$3 == \"Z\" && $4 == parent' /proc/[0-9]*/stat 2>/dev/null");
    assert_eq!(String::from_utf8_lossy(&zombies.stdout), "");
}

#[test]
fn every_end_is_told_once_to_whoever_follows_and_before_anybody_else() {
    let mut guest = Guest::start();
    let early = guest.open(&Request::Exec(shell("early", "echo four")));
    guest.finish(early);
    let mut waits = exec("waits", &["cat"]);
    waits.stdin = true;
    let waiting = guest.open(&Request::Exec(waits));
    assert!(matches!(guest.message(waiting), Message::Started { .. }));

    let follower = guest.open(&Request::FollowCommands);
    let Message::Commands(known) = guest.message(follower) else {
        panic!("first, all that are known")
    };
    let known: Vec<_> = known
        .iter()
        .map(|info| (info.command.as_str(), info.state, info.output_bytes))
        .collect();
    assert_eq!(
        known,
        [
            ("early", CommandState::Exited { code: 0 }, 5),
            ("waits", CommandState::Running, 0)
        ]
    );
    assert_eq!(guest.message(follower), Message::Watching);

    // One that is forgotten with its stream is told of all the same.
    let mut brief = shell("brief", "exit 7");
    brief.kill_on_close = true;
    let brief = guest.open(&Request::Exec(brief));
    guest.finish(brief);
    assert!(
        guest.has_unread(follower),
        "the attached stream was told before the one that follows"
    );
    guest.send(waiting, b"hello");
    guest.send_end(waiting);
    guest.finish(waiting);
    let mut told = Vec::new();
    for _ in 0..2 {
        let Message::Commands(ended) = guest.message(follower) else {
            panic!("then each that ends")
        };
        told.extend(ended);
    }
    let told: Vec<_> = told
        .iter()
        .map(|info| {
            (
                info.command.as_str(),
                info.state,
                info.input_bytes,
                info.output_bytes,
            )
        })
        .collect();
    assert_eq!(
        told,
        [
            ("brief", CommandState::Exited { code: 7 }, 0, 0),
            ("waits", CommandState::Exited { code: 0 }, 5, 5)
        ]
    );
    assert!(!guest.has_unread(follower));

    // A later follower takes over, and nobody waits for the earlier one.
    let later = guest.open(&Request::FollowCommands);
    assert!(matches!(guest.message(later), Message::Commands(_)));
    assert_eq!(guest.message(later), Message::Watching);
    assert_eq!(guest.run("exit 1").state, CommandState::Exited { code: 1 });
    assert!(matches!(guest.message(later), Message::Commands(_)));
    guest.close(later);
    assert_eq!(guest.run("exit 2").state, CommandState::Exited { code: 2 });
}

#[test]
fn an_end_of_file_typed_for_the_host_is_no_input() {
    let mut guest = Guest::start();
    let mut cat = exec("cat", &["cat"]);
    cat.pty = Some(PtySize { rows: 10, cols: 40 });
    let stream = guest.open(&Request::Exec(cat));
    guest.send(stream, b"abc\n");
    guest.send_end(stream);
    guest.finish(stream);
    let Ok(Message::Commands(listed)) = guest.ask(&Request::ListCommands) else {
        panic!("a list")
    };
    assert_eq!(listed[0].input_bytes, 4);
}
