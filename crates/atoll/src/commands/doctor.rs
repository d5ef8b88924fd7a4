//! `atoll doctor`: looks at this machine and says what works, what does not, and what to do about it.

use std::path::Path;

use atoll_client::output::{Doing, Output, Result};
use atoll_client::{find_in_path, local};
use atoll_image::Templates;
use atoll_links::Links;
use atoll_runtime::probe::Verdict;
use atoll_types::format_bytes;
use serde_json::json;

use crate::args::{DoctorArgs, Global, ServerArgs};
use crate::config::{Config, Confine, RUNSC_VERSION};
use crate::server::Machine;

/// One line of the report.
#[derive(Debug, serde::Serialize)]
struct Check {
    what: String,
    ok: bool,
    found: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    todo: Option<String>,
}

impl Check {
    fn good(what: &str, found: impl Into<String>) -> Self {
        Self {
            what: what.into(),
            ok: true,
            found: found.into(),
            todo: None,
        }
    }

    fn bad(what: &str, found: impl Into<String>, todo: impl Into<String>) -> Self {
        Self {
            what: what.into(),
            ok: false,
            found: found.into(),
            todo: Some(todo.into()),
        }
    }
}

/// Exit code 0 when sandboxes can run here behind some wall, else 1.
pub(crate) async fn run(global: &Global, output: Output, args: DoctorArgs) -> Result<u8> {
    let args = ServerArgs {
        config: args.config,
        templates: std::env::var_os("ATOLL_TEMPLATES").map(Into::into),
        ..ServerArgs::default()
    };
    let config = Config::load(&args, global.data.as_deref())?;
    // The probe starts real instances: in a directory of its own, beside any server that runs.
    let scratch = tempfile::tempdir().doing("cannot make a temporary directory")?;
    let mut probing = config.clone();
    probing.templates = scratch.path().join("templates");
    let machine = Machine::look(&probing, scratch.path()).await?;

    let tiers: Vec<Check> = machine
        .tiers
        .iter()
        .map(|probe| {
            let name = probe.isolation.name();
            match &probe.verdict {
                Verdict::Works { detail, no_disk } => Check::good(
                    name,
                    match no_disk {
                        None => format!("works: {detail}"),
                        Some(why) => format!("works: {detail}; writable layers in memory only: {why}"),
                    },
                ),
                Verdict::Unavailable { reason, remedy } => Check::bad(
                    name,
                    reason,
                    remedy.as_deref().unwrap_or("nothing can be done on this machine"),
                ),
            }
        })
        .collect();
    let usable = tiers.iter().any(|tier| tier.ok);
    let checks = [
        user(),
        runsc(&config).await,
        cgroups(),
        network(&config).await,
        configuration(&config),
        confinement(&config),
        server(&config.data),
        data_dir(&config.data),
        disk(&config.data),
        base_template(&config.templates),
        mmdebstrap(),
    ];

    output.json(&json!({"isolation": tiers, "checks": checks, "usable": usable}));
    output.line("Isolation, strongest first:");
    show(output, &tiers);
    output.line("\nThis machine:");
    show(output, &checks);
    let todo: Vec<&Check> = tiers.iter().chain(&checks).filter(|check| !check.ok).collect();
    if !todo.is_empty() {
        output.line("\nTo do, if you want it:");
        for check in todo {
            output.line(format_args!(
                "  {}: {}",
                check.what,
                check.todo.as_deref().unwrap_or("-")
            ));
        }
    }
    if !usable {
        output.line("\nNo kind of isolation works here: sandboxes cannot be created.");
    }
    Ok(u8::from(!usable))
}

fn show(output: Output, checks: &[Check]) {
    let width = checks
        .iter()
        .map(|check| check.what.len())
        .max()
        .unwrap_or_default();
    for check in checks {
        let mark = if check.ok { "ok " } else { "-- " };
        output.line(format_args!("  {mark} {:width$}   {}", check.what, check.found));
    }
}

fn user() -> Check {
    if rustix::process::geteuid().is_root() {
        Check::good("user", "root")
    } else {
        Check::bad(
            "user",
            "not root: fewer kinds of isolation, limits may not hold",
            "run as root for everything",
        )
    }
}

async fn runsc(config: &Config) -> Check {
    let build = "run ./atoll from the checkout: it builds the right one";
    let Some(path) = &config.runsc else {
        return Check::bad("runsc", "not found", build);
    };
    let version = tokio::process::Command::new(path).arg("--version").output().await;
    let text = version
        .map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
        .unwrap_or_default();
    let version = text
        .lines()
        .next()
        .and_then(|line| line.strip_prefix("runsc version "))
        .unwrap_or("")
        .trim();
    let shown = path.display();
    match version {
        "" => Check::bad("runsc", format!("{shown} does not run"), build),
        RUNSC_VERSION => Check::good("runsc", format!("{version} ({shown})")),
        other => Check::bad(
            "runsc",
            format!("{other} ({shown}); Atoll is tested with {RUNSC_VERSION}"),
            build,
        ),
    }
}

fn cgroups() -> Check {
    let todo = "mount cgroups, or start the machine with them";
    if Path::new("/sys/fs/cgroup/cgroup.controllers").exists() {
        Check::good("cgroups", "version 2")
    } else if Path::new("/sys/fs/cgroup/memory").is_dir() {
        Check::good("cgroups", "version 1")
    } else {
        Check::bad("cgroups", "none: limits cannot be enforced", todo)
    }
}

/// What sandboxes can have of a network: whatever their policy allows, or nothing.
async fn network(config: &Config) -> Check {
    let nothing = "sandboxes work, but reach nothing; those that ask for a network are refused";
    if !config.network.enabled {
        return Check::bad(
            "network",
            format!("switched off in the configuration: {nothing}"),
            "set `enabled = true` in [network]",
        );
    }
    let probed = tokio::task::spawn_blocking(Links::probe).await;
    match probed {
        Ok(Ok(())) => Check::good("network", "works: sandboxes reach what their policy allows"),
        Ok(Err(error)) => Check::bad(
            "network",
            format!("{error}: {nothing}"),
            "run as root on Linux 5.9 or newer that lets root load BPF programs and make network namespaces",
        ),
        Err(_) => Check::bad(
            "network",
            format!("the test broke off: {nothing}"),
            "run `atoll doctor` again",
        ),
    }
}

/// What a server would refuse to start with, as far as files and numbers say.
fn configuration(config: &Config) -> Check {
    let what = "configuration";
    let looked = config
        .limits
        .resolve()
        .map(drop)
        .and_then(|()| crate::server::check_files(config));
    match looked {
        Ok(()) => Check::good(what, "can be used"),
        Err(error) => {
            let todo = error.hint.clone();
            Check::bad(what, error.to_string(), todo.as_deref().unwrap_or("correct it"))
        }
    }
}

/// What a server on this machine takes away from itself; of one that runs, what the kernel says about it.
fn confinement(config: &Config) -> Check {
    let what = "confinement";
    if config.confine == Confine::Off {
        let found = "switched off: whoever controls the server has all its powers";
        return Check::bad(what, found, "set `confine = \"on\"`");
    }
    let layers = atoll_confine::server::survey();
    let (can, cannot): (Vec<_>, Vec<_>) = layers
        .iter()
        .map(|layer| layer.stands.clone())
        .partition(std::result::Result::is_ok);
    let can: Vec<String> = can.into_iter().flatten().collect();
    let cannot: Vec<String> = cannot.into_iter().filter_map(std::result::Result::err).collect();
    let running = local::running_server(&config.data).and_then(|server| Confined::of(server.pid));
    if let Some(running) = &running
        && !running.is_on()
    {
        return Check::bad(
            what,
            format!("the server that runs is NOT confined ({running})"),
            "set `confine = \"on\"` in its configuration, and start it again",
        );
    }
    let running = running.map_or(String::new(), |running| {
        format!("; the server that runs is ({running})")
    });
    if cannot.is_empty() {
        return Check::good(
            what,
            format!("the server can be confined: {}{running}", can.join(", ")),
        );
    }
    Check::bad(
        what,
        format!(
            "the server can be confined in part: {}{running}",
            cannot.join(", ")
        ),
        atoll_confine::landlock::REMEDY,
    )
}

/// What the kernel says of a process that should be confined.
struct Confined {
    capabilities: u64,
    filters: u32,
    no_new_privileges: bool,
}

impl Confined {
    fn of(pid: u32) -> Option<Self> {
        Self::read(&std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?)
    }

    /// `/proc/<pid>/status`.
    fn read(status: &str) -> Option<Self> {
        let of = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name))?;
            Some(line.trim())
        };
        Some(Self {
            capabilities: u64::from_str_radix(of("CapEff:")?, 16).ok()?,
            filters: of("Seccomp_filters:").or_else(|| of("Seccomp:"))?.parse().ok()?,
            no_new_privileges: of("NoNewPrivs:")? == "1",
        })
    }

    fn is_on(&self) -> bool {
        self.filters > 0 && self.no_new_privileges
    }
}

impl std::fmt::Display for Confined {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            capabilities,
            filters,
            no_new_privileges,
        } = self;
        write!(
            f,
            "{} capabilities, {filters} system call filters, no_new_privs {}",
            capabilities.count_ones(),
            if *no_new_privileges { "on" } else { "off" }
        )
    }
}

fn server(dir: &Path) -> Check {
    match local::running_server(dir) {
        Some(server) => Check::good("server", format!("{} (pid {})", server.url, server.pid)),
        None => Check::good("server", "not running; `atoll run` brings its own"),
    }
}

fn data_dir(dir: &Path) -> Check {
    let shown = dir.display().to_string();
    // The nearest directory that exists is the one whose permissions decide.
    let nearest = dir
        .ancestors()
        .find(|path| path.exists())
        .unwrap_or(Path::new("/"));
    if rustix::fs::access(nearest, rustix::fs::Access::WRITE_OK).is_ok() {
        Check::good("data", shown)
    } else {
        Check::bad(
            "data",
            format!("{shown} cannot be written"),
            "choose another directory with --data",
        )
    }
}

fn disk(dir: &Path) -> Check {
    const ENOUGH: u64 = 4 * atoll_types::GIB;
    let nearest = dir
        .ancestors()
        .find(|path| path.exists())
        .unwrap_or(Path::new("/"));
    match rustix::fs::statvfs(nearest) {
        Ok(stat) => {
            let free = stat.f_bavail.saturating_mul(stat.f_frsize);
            if free >= ENOUGH {
                Check::good("disk", format!("{} free", format_bytes(free)))
            } else {
                Check::bad(
                    "disk",
                    format!("{} free", format_bytes(free)),
                    "a template needs a few GiB: make room",
                )
            }
        }
        Err(error) => Check::bad("disk", error.to_string(), "choose another directory with --data"),
    }
}

fn base_template(dir: &Path) -> Check {
    let todo = "`atoll template build base --shared`; `atoll run` does it by itself when needed";
    if !dir.is_dir() {
        return Check::bad("base", "the template `base` is not built", todo);
    }
    match Templates::open(dir).and_then(|templates| templates.find("base")) {
        Ok(Some(manifest)) => Check::good(
            "base",
            format!("{} ({})", manifest.id, format_bytes(manifest.size_bytes)),
        ),
        Ok(None) => Check::bad("base", "the template `base` is not built", todo),
        Err(error) => Check::bad("base", error.to_string(), "look at the directory of templates"),
    }
}

fn mmdebstrap() -> Check {
    match find_in_path("mmdebstrap") {
        Some(path) => Check::good("mmdebstrap", path.display().to_string()),
        None => Check::bad(
            "mmdebstrap",
            "not found: templates cannot be built from Debian packages",
            "apt-get install mmdebstrap",
        ),
    }
}
