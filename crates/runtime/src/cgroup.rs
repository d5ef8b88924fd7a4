//! Control groups: one per instance, below a common parent, on cgroup v2 or on separately mounted v1 controllers.
//!
//! What must hold:
//! - A group is made with all its limits before a process enters it, and a process enters before it executes anything
//!   of the guest's.
//! - No limit is left out silently. If a controller is missing or may not be used, [`Group::create`] refuses and says
//!   which and why. Swap is the exception: where the kernel does not account for it, there is none to limit.
//! - [`Group::kill_all`] ends when the group is empty, also against a fork bomb.

mod freezer;
mod hierarchy;
mod usage;

use std::fs;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use atoll_types::Resources;

pub use hierarchy::Hierarchy;

const PERIOD_MICROS: u64 = 100_000;
/// How long to wait for killed processes to be gone. They are within milliseconds, unless the disk hangs.
const PATIENCE: Duration = Duration::from_secs(10);

#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// This machine or this user cannot have groups.
    #[error("cgroups cannot be used: {0}")]
    Unavailable(String),
    #[error("{what}: {source}")]
    Io {
        what: String,
        #[source]
        source: io::Error,
    },
    #[error("processes in cgroup {path} are still there {} s after they were killed", PATIENCE.as_secs())]
    Unkillable { path: PathBuf },
}

impl CgroupError {
    pub(crate) fn io(what: impl Into<String>, source: io::Error) -> Self {
        Self::Io {
            what: what.into(),
            source,
        }
    }
}

/// One instance's group. A value of this type is only its name: dropping it does nothing.
#[derive(Debug, Clone)]
pub struct Group {
    hierarchy: &'static Hierarchy,
    relative: PathBuf,
}

impl Group {
    /// Names a group without looking at it. `parent` may be several directories deep.
    pub fn named(parent: &str, name: &str) -> Result<Self, CgroupError> {
        let relative = Path::new(parent).join(name);
        let plain = |part: std::path::Component<'_>| matches!(part, std::path::Component::Normal(_));
        if name.is_empty() || !relative.components().all(plain) {
            return Err(CgroupError::Unavailable(format!(
                "`{}` is not a relative path of plain names",
                relative.display()
            )));
        }
        Ok(Self {
            hierarchy: Hierarchy::detect()?,
            relative,
        })
    }

    /// Makes the group and sets its limits. Fails if it exists. On error nothing of it is left.
    pub fn create(parent: &str, name: &str, limits: &Resources) -> Result<Self, CgroupError> {
        let group = Self::named(parent, name)?;
        group.make_dirs(parent)?;
        group.resize(limits).inspect_err(|_| group.remove_dirs())?;
        Ok(group)
    }

    fn make_dirs(&self, parent: &str) -> Result<(), CgroupError> {
        for dir in self.dirs() {
            let made = fs::create_dir(&dir).or_else(|error| {
                if error.kind() != ErrorKind::NotFound {
                    return Err(error);
                }
                self.make_parent(parent)?;
                fs::create_dir(&dir)
            });
            if let Err(error) = made {
                if error.kind() != ErrorKind::AlreadyExists {
                    self.remove_dirs();
                }
                return Err(match error.kind() {
                    ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => {
                        CgroupError::Unavailable(format!(
                            "{} cannot be made ({error}); run as root, or have the directory {} delegated to this \
                             user and mounted writable",
                            dir.display(),
                            self.hierarchy.dirs(Path::new(parent))[0].display()
                        ))
                    }
                    _ => CgroupError::io(format!("making cgroup {}", dir.display()), error),
                });
            }
        }
        Ok(())
    }

    /// Makes the parent; on v2 also hands the controllers down to its children.
    fn make_parent(&self, parent: &str) -> io::Result<()> {
        for dir in self.hierarchy.dirs(Path::new(parent)) {
            fs::create_dir_all(&dir)?;
        }
        if let Hierarchy::V2 { root } = self.hierarchy {
            let mut at = root.clone();
            enable_controllers(&at)?;
            for part in Path::new(parent) {
                at.push(part);
                enable_controllers(&at)?;
            }
        }
        Ok(())
    }

    fn dirs(&self) -> Vec<PathBuf> {
        self.hierarchy.dirs(&self.relative)
    }

    /// Whether any of it exists.
    pub fn exists(&self) -> bool {
        self.dirs().iter().any(|dir| dir.exists())
    }

    fn procs(&self) -> impl Iterator<Item = PathBuf> {
        self.dirs().into_iter().map(|dir| dir.join("cgroup.procs"))
    }

    /// The files to which a process of one thread writes `0` to enter. Write it to all of them.
    ///
    /// On v1 this is `tasks`: a thread that moves itself needs no global lock, whereas `cgroup.procs` waits for an RCU
    /// grace period (measured on an idle machine: 0.1 ms against 10 ms).
    pub fn procs_files(&self) -> Vec<PathBuf> {
        let name = match self.hierarchy {
            Hierarchy::V1 { .. } => "tasks",
            Hierarchy::V2 { .. } => "cgroup.procs",
        };
        self.dirs().into_iter().map(|dir| dir.join(name)).collect()
    }

    /// The way in for a child between `fork` and `exec`.
    pub fn entry(&self) -> Result<Entry, CgroupError> {
        let open = |file: PathBuf| {
            let flags = rustix::fs::OFlags::WRONLY | rustix::fs::OFlags::CLOEXEC;
            rustix::fs::open(&file, flags, rustix::fs::Mode::empty())
                .map_err(|error| CgroupError::io(format!("opening {}", file.display()), error.into()))
        };
        Ok(Entry(
            self.procs_files()
                .into_iter()
                .map(open)
                .collect::<Result<_, _>>()?,
        ))
    }

    /// Moves a process in from outside, with all its threads. What it forks afterwards is born inside.
    pub fn place(&self, pid: u32) -> Result<(), CgroupError> {
        for file in self.procs() {
            write(&file, pid)?;
        }
        Ok(())
    }

    /// Sets the limit of CPU alone; for a group whose limits were set before.
    pub fn limit_cpu(&self, cpu_millis: u32) -> Result<(), CgroupError> {
        let quota = quota_micros(cpu_millis);
        match self.hierarchy {
            Hierarchy::V1 { cpu, .. } => write(&cpu.join(&self.relative).join("cpu.cfs_quota_us"), quota),
            Hierarchy::V2 { root } => {
                let at = root.join(&self.relative).join("cpu.max");
                write(&at, format_args!("{quota} {PERIOD_MICROS}"))
            }
        }
    }

    /// Sets the limits, all but the disk's.
    pub fn resize(&self, limits: &Resources) -> Result<(), CgroupError> {
        let quota = quota_micros(limits.cpu_millis);
        let memory = limits.memory_bytes;
        match self.hierarchy {
            Hierarchy::V1 {
                memory: at,
                cpu,
                pids,
                ..
            } => {
                let at = at.join(&self.relative);
                let (limit, with_swap) = (
                    at.join("memory.limit_in_bytes"),
                    at.join("memory.memsw.limit_in_bytes"),
                );
                // Memory may never exceed memory + swap, so which is written first depends on the direction.
                if with_swap.exists() {
                    if write(&limit, memory).is_err() {
                        write(&with_swap, memory)?;
                        write(&limit, memory)?;
                    }
                    write(&with_swap, memory)?;
                } else {
                    write(&limit, memory)?;
                }
                let cpu = cpu.join(&self.relative);
                write(&cpu.join("cpu.cfs_period_us"), PERIOD_MICROS)?;
                write(&cpu.join("cpu.cfs_quota_us"), quota)?;
                write(&pids.join(&self.relative).join("pids.max"), limits.pids)
            }
            Hierarchy::V2 { root } => {
                let at = root.join(&self.relative);
                write(&at.join("memory.max"), memory)?;
                let swap = at.join("memory.swap.max");
                if swap.exists() {
                    write(&swap, 0)?;
                }
                // One victim would leave a crippled sandbox: all or nothing.
                write(&at.join("memory.oom.group"), 1)?;
                write(&at.join("cpu.max"), format_args!("{quota} {PERIOD_MICROS}"))?;
                write(&at.join("pids.max"), limits.pids)
            }
        }
    }

    /// Lowers the memory limit, if what is used fits below it: `false` if not. Never kills anybody for it.
    pub fn lower_memory(&self, limit: u64) -> Result<bool, CgroupError> {
        match self.hierarchy {
            Hierarchy::V1 { memory: at, .. } => {
                let at = at.join(&self.relative);
                // Refused where it does not fit.
                if write(&at.join("memory.limit_in_bytes"), limit).is_err() {
                    return Ok(false);
                }
                let with_swap = at.join("memory.memsw.limit_in_bytes");
                if with_swap.exists() {
                    write(&with_swap, limit)?;
                }
            }
            Hierarchy::V2 { root } => {
                let at = root.join(&self.relative);
                let stat = at.join("memory.stat");
                let files = field(&stat, "active_file")? + field(&stat, "inactive_file")?;
                if number(&at.join("memory.current"))?.saturating_sub(files) > limit / 20 * 19 {
                    return Ok(false);
                }
                write(&at.join("memory.max"), limit)?;
            }
        }
        Ok(true)
    }

    /// The processes inside, as the host numbers them.
    pub fn processes(&self) -> Result<Vec<u32>, CgroupError> {
        let mut found = Vec::new();
        for file in self.procs() {
            match fs::read_to_string(&file) {
                Ok(text) => found.extend(text.lines().filter_map(|line| line.parse::<u32>().ok())),
                Err(error) if is_gone(&error) => {}
                Err(error) => return Err(CgroupError::io(format!("reading {}", file.display()), error)),
            }
        }
        found.sort_unstable();
        found.dedup();
        Ok(found)
    }

    /// Kills everything inside and waits until it is gone. Succeeds at once when there is nothing.
    pub async fn kill_all(&self) -> Result<(), CgroupError> {
        let deadline = Instant::now() + PATIENCE;
        let mut pause = Duration::from_micros(500);
        match self.hierarchy {
            Hierarchy::V2 { root } => {
                let _ = write(&root.join(&self.relative).join("cgroup.kill"), 1);
            }
            // v1 has no such file. Nothing can be born while we shoot, so the loop below ends.
            Hierarchy::V1 { pids, .. } => {
                let _ = write(&pids.join(&self.relative).join("pids.max"), 0);
            }
        }
        loop {
            let processes = self.processes()?;
            if processes.is_empty() {
                return Ok(());
            }
            for pid in processes {
                // 0 stands for a process of another pid namespace, which cannot be named from here.
                if let Some(pid) = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw) {
                    let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
                }
            }
            // Who stands still dies only when he goes on.
            if self.freezer().is_some() {
                let _ = self.thaw();
            }
            if Instant::now() > deadline {
                return Err(CgroupError::Unkillable {
                    path: self.relative.clone(),
                });
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_millis(50));
        }
    }

    /// Removes the empty group; waits a while for the kernel to notice that it is empty. Succeeds when there is none.
    pub async fn remove(&self) -> Result<(), CgroupError> {
        let deadline = Instant::now() + PATIENCE;
        let mut pause = Duration::from_micros(500);
        for dir in self.dirs().into_iter().chain(self.freezer()) {
            loop {
                match fs::remove_dir(&dir) {
                    Ok(()) => break,
                    Err(error) if error.kind() == ErrorKind::NotFound => break,
                    Err(error) if error.raw_os_error() == Some(libc::EBUSY) && Instant::now() < deadline => {
                        tokio::time::sleep(pause).await;
                        pause = (pause * 2).min(Duration::from_millis(50));
                    }
                    Err(error) => {
                        return Err(CgroupError::io(
                            format!("removing cgroup {}", dir.display()),
                            error,
                        ));
                    }
                }
            }
        }
        Ok(())
    }

    fn remove_dirs(&self) {
        for dir in self.dirs() {
            let _ = fs::remove_dir(dir);
        }
    }
}

fn quota_micros(cpu_millis: u32) -> u64 {
    (u64::from(cpu_millis) * PERIOD_MICROS / 1000).max(1000)
}

/// Open files through which the calling process enters a group.
#[derive(Debug)]
pub struct Entry(Vec<OwnedFd>);

impl Entry {
    /// Moves the calling thread in, which must be its process's only one. Async-signal-safe: neither allocates nor locks.
    pub fn enter(&self) -> io::Result<()> {
        for file in &self.0 {
            rustix::io::write(file, b"0")?;
        }
        Ok(())
    }
}

/// The names of all groups below `parent`; none if it does not exist.
pub fn list(parent: &str) -> Result<Vec<String>, CgroupError> {
    let mut names = Vec::new();
    for dir in Hierarchy::detect()?.dirs(Path::new(parent)) {
        let entries = match fs::read_dir(&dir) {
            Ok(entries) => entries,
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            Err(error) => return Err(CgroupError::io(format!("listing {}", dir.display()), error)),
        };
        for entry in entries.flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir())
                && let Ok(name) = entry.file_name().into_string()
            {
                names.push(name);
            }
        }
    }
    names.sort_unstable();
    names.dedup();
    Ok(names)
}

fn enable_controllers(dir: &Path) -> io::Result<()> {
    let file = dir.join("cgroup.subtree_control");
    let enabled = fs::read_to_string(&file)?;
    if ["memory", "cpu", "pids"]
        .into_iter()
        .all(|name| enabled.split_whitespace().any(|word| word == name))
    {
        return Ok(());
    }
    fs::write(&file, "+memory +cpu +pids").map_err(|error| {
        io::Error::new(
            error.kind(),
            format!(
                "{error}: the controllers memory, cpu and pids cannot be enabled in {} (a cgroup that itself holds \
                 processes cannot hand controllers down; use another cgroup parent)",
                file.display()
            ),
        )
    })
}

/// cgroup files take one `write` each, and want no newline.
fn write(file: &Path, value: impl std::fmt::Display) -> Result<(), CgroupError> {
    let text = value.to_string();
    let fail = |error: rustix::io::Errno| {
        CgroupError::io(format!("writing {text} to {}", file.display()), error.into())
    };
    let flags = rustix::fs::OFlags::WRONLY | rustix::fs::OFlags::CLOEXEC;
    let fd = rustix::fs::open(file, flags, rustix::fs::Mode::empty()).map_err(fail)?;
    // Lowering a limit of memory takes as long as reclaiming it does, and any signal breaks that off.
    rustix::io::retry_on_intr(|| rustix::io::write(&fd, text.as_bytes())).map_err(fail)?;
    Ok(())
}

fn number(file: &Path) -> Result<u64, CgroupError> {
    let fail = |error| CgroupError::io(format!("reading {}", file.display()), error);
    let text = fs::read_to_string(file).map_err(fail)?;
    text.trim().parse().map_err(|_| {
        fail(io::Error::new(
            ErrorKind::InvalidData,
            format!("`{}` is no number", text.trim()),
        ))
    })
}

/// The number behind `key` in a file of `key value` lines.
fn field(file: &Path, key: &str) -> Result<u64, CgroupError> {
    let fail = |error| CgroupError::io(format!("reading {}", file.display()), error);
    let text = fs::read_to_string(file).map_err(fail)?;
    text.lines()
        .find_map(|line| line.strip_prefix(key)?.strip_prefix(' ')?.trim().parse().ok())
        .ok_or_else(|| {
            fail(io::Error::new(
                ErrorKind::InvalidData,
                format!("no field `{key}`"),
            ))
        })
}

fn is_gone(error: &io::Error) -> bool {
    error.kind() == ErrorKind::NotFound || error.raw_os_error() == Some(libc::ENODEV)
}

#[cfg(test)]
mod tests {
    use atoll_types::Usage;

    use super::*;

    #[test]
    fn names_cannot_climb() {
        for name in ["", "..", "/etc", "a/../../b"] {
            assert!(Group::named("atoll-test", name).is_err(), "{name:?}");
        }
    }

    /// The kernel breaks off what takes long at any signal, and the server's threads get some.
    #[test]
    #[expect(unsafe_code, reason = "a handler of a signal, and a signal for one thread")]
    fn a_write_that_a_signal_breaks_off_is_done_again() {
        use std::io::{Read as _, Write as _};
        use std::os::unix::fs::OpenOptionsExt as _;
        use std::os::unix::thread::JoinHandleExt as _;
        use std::sync::atomic::{AtomicBool, Ordering};

        static CAUGHT: AtomicBool = AtomicBool::new(false);
        extern "C" fn caught(_: libc::c_int) {
            CAUGHT.store(true, Ordering::SeqCst);
        }
        // SAFETY: the handler does nothing but store a flag; without flags, system calls that it interrupts are not restarted.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = caught as *const () as libc::sighandler_t;
            assert_eq!(
                libc::sigaction(libc::SIGUSR2, &raw const action, std::ptr::null_mut()),
                0
            );
        }
        // A pipe that is full stands for a limit that takes its time.
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("limit");
        let (kind, mode) = (
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
        );
        rustix::fs::mknodat(rustix::fs::CWD, &path, kind, mode, 0).unwrap();
        let mut pipe = fs::File::options()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(&path)
            .unwrap();
        while pipe.write(&[b'x'; 4096]).is_ok() {}
        let (tell, told) = std::sync::mpsc::channel();
        let writer = std::thread::spawn(move || {
            tell.send(rustix::thread::gettid()).unwrap();
            write(&path, 268_435_456)
        });
        let doing = format!(
            "/proc/self/task/{}/syscall",
            told.recv().unwrap().as_raw_nonzero()
        );
        let writes = format!("{} ", libc::SYS_write);
        while !fs::read_to_string(&doing).unwrap().starts_with(&writes) {
            std::thread::yield_now();
        }
        // SAFETY: the thread is there until it is joined.
        let sent = unsafe { libc::pthread_kill(writer.as_pthread_t(), libc::SIGUSR2) };
        assert_eq!(sent, 0);
        while !CAUGHT.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        let mut read = Vec::new();
        // Ends where there is nothing more for now.
        let _for_now = pipe.read_to_end(&mut read);
        writer.join().unwrap().unwrap();
        let _for_now = pipe.read_to_end(&mut read);
        assert!(read.ends_with(b"x268435456"), "it was written, and once");
    }

    /// Whether this user can make groups; says so when not.
    fn usable() -> bool {
        match Group::create("atoll-test-probe", "probe", &Resources::default()) {
            Ok(group) => {
                group.remove_dirs();
                for dir in group.hierarchy.dirs(Path::new("atoll-test-probe")) {
                    let _ = fs::remove_dir(dir);
                }
                true
            }
            Err(error) => {
                eprintln!("SKIPPED: {error}");
                false
            }
        }
    }

    #[tokio::test]
    async fn a_group_limits_counts_kills_and_goes() {
        if !usable() {
            return;
        }
        let parent = format!("atoll-test-{}", std::process::id());
        let group = Group::create(&parent, "one", &Resources::default()).unwrap();
        let again = Group::create(&parent, "one", &Resources::default());
        assert!(again.is_err());
        assert!(group.exists(), "a second create must not remove the first");
        // It waits to be placed before it has children: those would not be in the group, and outlive the test.
        let mut child = std::process::Command::new("sh")
            .args(["-c", "read _; while :; do sleep 60 & sleep 0.01; done"])
            .stdin(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        group.place(child.id()).unwrap();
        let mut go = child.stdin.take().unwrap();
        std::io::Write::write_all(&mut go, b"\n").unwrap();
        let larger = Resources {
            memory_bytes: 1 << 30,
            ..Resources::default()
        };
        group.resize(&larger).unwrap();
        group.resize(&Resources::default()).unwrap();
        let busy = |usage: &Usage| usage.cpu_micros > 0 && usage.memory_bytes > 0 && usage.pids > 1;
        let mut usage = group.usage().unwrap();
        let deadline = Instant::now() + Duration::from_secs(20);
        while !busy(&usage) {
            assert!(Instant::now() < deadline, "{usage:?}");
            tokio::time::sleep(Duration::from_millis(5)).await;
            usage = group.usage().unwrap();
        }
        assert_eq!(usage.oom_kills, 0);
        assert_eq!(list(&parent).unwrap(), ["one"]);
        let reaper = std::thread::spawn(move || child.wait());
        group.kill_all().await.unwrap();
        reaper.join().unwrap().unwrap();
        group.remove().await.unwrap();
        group.remove().await.unwrap();
        assert!(!group.exists());
        for dir in group.hierarchy.dirs(Path::new(&parent)) {
            fs::remove_dir(dir).unwrap();
        }
    }
}
