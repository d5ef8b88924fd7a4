//! Gives a pooled instance its identity.

use atoll_guest_protocol::{Configure, Exec};

use crate::failure::Outcome;
use crate::job::Shared;
use crate::users::Users;

const START_LOG: u32 = 256 * 1024;
/// The name of the start command.
const START: &str = "start";

/// What cannot be set (the clock of a shared kernel, say) is left as it is; an unknown user is an error.
pub(crate) fn apply(configure: Configure, shared: &mut Shared) -> Outcome {
    if !configure.user.is_empty() {
        Users::load().find(&configure.user)?;
    }
    if !configure.hostname.is_empty() {
        let _ = rustix::system::sethostname(configure.hostname.as_bytes());
    }
    let _ = name_in_hosts(&configure.hostname);
    set_clock(configure.now_millis);
    let _ = std::fs::write("/dev/urandom", configure.seed);
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

/// sudo and many servers look their own host name up. An empty one, which is what a pool knows, writes nothing, but leaves
/// the file in the writable layer, where the real one will find it.
fn name_in_hosts(hostname: &str) -> std::io::Result<()> {
    use std::io::{Read as _, Write as _};
    use std::os::unix::fs::OpenOptionsExt as _;
    const PATH: &str = "/etc/hosts";
    const LONGEST: u64 = 64 * 1024;
    let flags = (rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK)
        .bits()
        .cast_signed();
    let mut file = std::fs::OpenOptions::new()
        .read(true)
        .append(true)
        .custom_flags(flags)
        .open(PATH)?;
    if !file.metadata()?.is_file() {
        return Ok(());
    }
    let mut text = String::new();
    (&mut file).take(LONGEST).read_to_string(&mut text)?;
    if hostname.is_empty() || text.split_whitespace().any(|word| word == hostname) {
        return Ok(());
    }
    let line_end = if text.is_empty() || text.ends_with('\n') {
        ""
    } else {
        "\n"
    };
    file.write_all(format!("{line_end}127.0.0.1 {hostname}\n").as_bytes())
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
