//! Gives a pooled instance its identity.

use atoll_guest_protocol::{Configure, Exec, START};
use rustix::fs::{Mode, OFlags};

use crate::failure::Outcome;
use crate::job::Shared;
use crate::users::Users;

const START_LOG: u32 = 256 * 1024;

/// What cannot be set (the clock of a shared kernel, say) is left as it is; an unknown user is an error.
pub(crate) fn apply(configure: Configure, shared: &mut Shared) -> Outcome {
    // What a pool or a saved state was told already is known.
    if !configure.user.is_empty() && configure.user != shared.config.user {
        Users::load().find(&configure.user)?;
    }
    if configure.hostname != shared.config.hostname {
        let _ = rustix::system::sethostname(configure.hostname.as_bytes());
        let _ = name_in_hosts(&configure.hostname);
    }
    set_clock(configure.now_millis);
    let start = configure.start.clone();
    if let Some(network) = configure.network.clone() {
        shared.way_out.tell(network)?;
    }
    shared.config = configure;
    let Some(start) = start else {
        return Ok(());
    };
    if shared.commands.find(START).is_ok() {
        return Ok(()); // configured again: it was started once
    }
    let exec = Exec {
        command: START.to_owned(),
        argv: start.argv.into_iter().map(String::into_bytes).collect(),
        env: Vec::new(),
        cwd: None,
        user: None,
        pty: None,
        stdin: false,
        timeout_millis: None,
        log_bytes: START_LOG,
        wait_for_reader: false,
        kill_on_close: false,
    };
    shared
        .commands
        .start(exec, &shared.config, shared.way_out.env(), &shared.poller)?;
    Ok(())
}

/// sudo and many servers look their own host name up. As few system calls as can be: whoever creates a sandbox waits for
/// them.
fn name_in_hosts(hostname: &str) -> rustix::io::Result<()> {
    const LONGEST: usize = 16 * 1024;
    let flags = OFlags::RDWR | OFlags::APPEND | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = rustix::fs::open("/etc/hosts", flags, Mode::empty())?;
    let mut text = [0; LONGEST];
    let read = rustix::io::read(&file, &mut text)?;
    let text = &text[..read];
    let is_there = text
        .split(u8::is_ascii_whitespace)
        .any(|word| word == hostname.as_bytes());
    if is_there {
        return Ok(());
    }
    let line_end = if matches!(text.last(), None | Some(b'\n')) {
        ""
    } else {
        "\n"
    };
    rustix::io::write(&file, format!("{line_end}127.0.0.1 {hostname}\n").as_bytes())?;
    Ok(())
}

/// Only when it is clearly wrong, as after a restore: setting it back and forth by the channel's delay helps nobody.
fn set_clock(now_millis: u64) {
    const TOLERANCE: u64 = 1000;
    if now_millis == 0 || now_millis.abs_diff(crate::commands::wall_millis()) < TOLERANCE {
        return;
    }
    let Ok(seconds) = i64::try_from(now_millis / 1000) else {
        return;
    };
    let now = rustix::time::Timespec {
        tv_sec: seconds,
        tv_nsec: i64::try_from(now_millis % 1000).unwrap_or(0) * 1_000_000,
    };
    let _ = rustix::time::clock_settime(rustix::time::ClockId::Realtime, now);
}
