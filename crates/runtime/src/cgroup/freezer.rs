//! Holding everything in a group still.
//!
//! ```text
//!   v2   cgroup.freeze in the group itself
//!   v1   a hierarchy of its own; entered only when it is needed, so that starting an instance does not pay for it
//!          <freezer>/<group>   FROZEN ── processes are moved in one by one, each stops as it enters ──> none is left
//! ```
//! What must hold:
//! - When [`Group::freeze`] succeeds nothing in the group runs, whatever it forked meanwhile; when it fails everything
//!   runs.
//! - What is frozen can be killed. On v1 a signal waits until the thaw, so [`Group::kill_all`] thaws after it has sent
//!   one: nothing of the guest's runs in between.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use super::{CgroupError, Group, Hierarchy, PATIENCE, field, is_gone, write};

const LOOK_EVERY: Duration = Duration::from_millis(1);

impl Group {
    /// Stops everything inside and waits until it stands still. Survives this server.
    pub async fn freeze(&self) -> Result<(), CgroupError> {
        let frozen = match self.hierarchy {
            Hierarchy::V2 { root } => freeze_v2(&root.join(&self.relative)).await,
            Hierarchy::V1 { .. } => self.freeze_v1().await,
        };
        if frozen.is_err() {
            let _ = self.thaw();
        }
        frozen
    }

    /// Lets everything go on. Succeeds when nothing stands still, or there is no group.
    pub fn thaw(&self) -> Result<(), CgroupError> {
        let written = match (self.hierarchy, self.freezer()) {
            (Hierarchy::V2 { root }, _) => write(&root.join(&self.relative).join("cgroup.freeze"), 0),
            (_, Some(dir)) => write(&dir.join("freezer.state"), "THAWED"),
            (_, None) => Ok(()),
        };
        match written {
            Err(CgroupError::Io { source, .. }) if is_gone(&source) => Ok(()),
            other => other,
        }
    }

    /// The directory that v1 freezes this group by, whether or not it exists; `None` on v2, or without a freezer.
    pub(super) fn freezer(&self) -> Option<PathBuf> {
        match self.hierarchy {
            Hierarchy::V1 { .. } => freezer_mount().map(|mount| mount.join(&self.relative)),
            Hierarchy::V2 { .. } => None,
        }
    }

    async fn freeze_v1(&self) -> Result<(), CgroupError> {
        let dir = self.freezer().ok_or_else(|| {
            CgroupError::Unavailable(
                "the freezer is not mounted; mount -t cgroup -o freezer freezer /sys/fs/cgroup/freezer"
                    .into(),
            )
        })?;
        match fs::create_dir_all(&dir) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => {
                return Err(CgroupError::io(format!("making cgroup {}", dir.display()), error));
            }
            _ => {}
        }
        // It may have been removed just now; then nobody would come for what was made here.
        if !self.exists() {
            let _ = fs::remove_dir(&dir);
            let gone = io::Error::from(ErrorKind::NotFound);
            return Err(CgroupError::io("freezing a cgroup that is gone", gone));
        }
        let (state, procs) = (dir.join("freezer.state"), dir.join("cgroup.procs"));
        let deadline = Instant::now() + PATIENCE;
        loop {
            // Before anybody enters: who enters stops, and forks no more. Said again each time, as the kernel wants it.
            write(&state, "FROZEN")?;
            let inside = pids_in(&procs)?;
            let mut left = false;
            for pid in self.processes()? {
                if !inside.contains(&pid) && !is_dead(pid) {
                    left = true;
                    // It may have ended just now.
                    match write(&procs, pid) {
                        Err(CgroupError::Io { source, .. }) if source.raw_os_error() == Some(libc::ESRCH) => {
                        }
                        other => other?,
                    }
                }
            }
            if !left && fs::read_to_string(&state).is_ok_and(|state| state.trim() == "FROZEN") {
                return Ok(());
            }
            still_time(deadline, &dir)?;
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }
}

async fn freeze_v2(dir: &Path) -> Result<(), CgroupError> {
    write(&dir.join("cgroup.freeze"), 1)?;
    let deadline = Instant::now() + PATIENCE;
    while field(&dir.join("cgroup.events"), "frozen")? != 1 {
        still_time(deadline, dir)?;
        tokio::time::sleep(LOOK_EVERY).await;
    }
    Ok(())
}

fn still_time(deadline: Instant, dir: &Path) -> Result<(), CgroupError> {
    if Instant::now() < deadline {
        return Ok(());
    }
    let waited = format!("not everything stood still within {} s", PATIENCE.as_secs());
    Err(CgroupError::io(
        format!("freezing cgroup {}", dir.display()),
        io::Error::new(ErrorKind::TimedOut, waited),
    ))
}

fn pids_in(procs: &Path) -> Result<Vec<u32>, CgroupError> {
    let text = fs::read_to_string(procs)
        .map_err(|error| CgroupError::io(format!("reading {}", procs.display()), error))?;
    Ok(text.lines().filter_map(|line| line.parse().ok()).collect())
}

/// Whether only its exit status is left.
fn is_dead(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(')').map_or("", |(_, rest)| rest.trim_start());
    state.is_empty() || state.starts_with(['Z', 'X'])
}

fn freezer_mount() -> Option<&'static Path> {
    static FOUND: OnceLock<Option<PathBuf>> = OnceLock::new();
    let found = FOUND.get_or_init(|| {
        let mounts = fs::read_to_string("/proc/self/mounts").ok()?;
        mounts.lines().find_map(|line| {
            let mut fields = line.split(' ').skip(1);
            let (target, kind, options) = (fields.next()?, fields.next()?, fields.next()?);
            let is_it = kind == "cgroup" && options.split(',').any(|option| option == "freezer");
            is_it.then(|| PathBuf::from(target))
        })
    });
    found.as_deref()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Freezing needs no controller, so a v2 hierarchy that stands beside v1 will do.
    #[tokio::test]
    async fn v2_holds_still_and_what_is_still_can_be_killed() {
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
        let mount = mounts
            .lines()
            .find(|line| line.split(' ').nth(2) == Some("cgroup2"));
        let Some(mount) = mount.and_then(|line| line.split(' ').nth(1)) else {
            eprintln!("SKIPPED: no cgroup2 is mounted");
            return;
        };
        let dir = Path::new(mount).join(format!("atoll-freezer-{}", std::process::id()));
        if let Err(error) = fs::create_dir(&dir) {
            eprintln!("SKIPPED: {} cannot be made: {error}", dir.display());
            return;
        }
        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        write(&dir.join("cgroup.procs"), child.id()).unwrap();
        freeze_v2(&dir).await.unwrap();
        assert_eq!(field(&dir.join("cgroup.events"), "frozen").unwrap(), 1);
        child.kill().unwrap();
        child.wait().unwrap();
        fs::remove_dir(&dir).unwrap();
        assert!(freeze_v2(&dir).await.is_err());
    }
}
