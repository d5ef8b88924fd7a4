//! The server parts in two before it does anything else: a helper that keeps the powers, and a front that gives them up.
//!
//! ```text
//!   atoll server ── takes the data directory ── shrinks ── forks ──┬── helper: prepares the directory ── ready ──> serves
//!                                                                  └── waits ── sees the few files ── gives up the rest
//! ```
//! What is said between them is told in `atoll_helper`, what is given up in `atoll_confine::server`.
//!
//! What must hold:
//! - There is one thread until both have what they keep.
//! - The front needs no directory that the helper relies on: `instances`, `bin`, `uids`, `volumes`, `network`, `packages`.

use std::io::{Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use atoll_client::output::{Doing, Error, Result};
use atoll_confine::capabilities::NET_BIND_SERVICE;
use atoll_confine::server::{self as walls, Layer, View};
use atoll_confine::sys::{self, Fork};
use atoll_helper::served::{self, Works};
use atoll_links::LinksConfig;
use atoll_sandboxes::Settings;
use atoll_store::{Database, sqlite};
use atoll_volumes::Volumes;
use tokio::signal::unix::{SignalKind, signal};

use crate::config::{Config, Confine, DEFAULT_TLS_PORT};
use crate::confinement;
use crate::data::DataDir;
use crate::server::{self, Machine};
use crate::{logging, outside, tls};

/// What a server begins with.
#[derive(Debug)]
pub(crate) struct Start {
    pub(crate) data: DataDir,
    pub(crate) layers: Vec<Layer>,
    /// To the helper, if there is one.
    pub(crate) helper: Option<UnixStream>,
}

/// Which half this process is.
#[derive(Debug)]
pub(crate) enum Half {
    Front(Start),
    Helper { data: DataDir, front: UnixStream },
}

/// Parts, unless the configuration says not to.
pub(crate) fn part(config: &Config) -> Result<Half> {
    let data = DataDir::take(&config.data).map_err(|taken| taken.into_error(&config.data))?;
    if config.confine == Confine::Off {
        return Ok(Half::Front(Start {
            data,
            layers: Vec::new(),
            helper: None,
        }));
    }
    let mut layers = walls::shrink();
    let (ours, theirs) = atoll_helper::pair().doing("cannot part")?;
    match sys::fork().doing("cannot part")? {
        Fork::Child => {
            drop(ours);
            rustix::thread::set_name(c"atoll-helper").doing("cannot name the helper")?;
            // It notices the end of the front by itself; this is for a front that ends while it cannot look.
            let killed =
                rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
            killed.doing("cannot bind the helper to the server")?;
            Ok(Half::Helper { data, front: theirs })
        }
        Fork::Parent { .. } => {
            drop(theirs);
            wait_until_prepared(&ours)?;
            layers.extend(walls::front(&view(config, data.path()), capabilities(config)));
            if config.confine == Confine::Required {
                layers = confinement::insist(layers)?;
            }
            Ok(Half::Front(Start {
                data,
                layers,
                helper: Some(ours),
            }))
        }
    }
}

/// A word before the conversation begins: nothing, or why there will be none.
fn wait_until_prepared(mut helper: &UnixStream) -> Result<()> {
    let mut length = [0; 4];
    helper
        .read_exact(&mut length)
        .doing("the server's helper ended while it was starting")?;
    let length = u32::from_le_bytes(length);
    if length == 0 {
        return Ok(());
    }
    let mut why = String::new();
    helper
        .take(length.into())
        .read_to_string(&mut why)
        .doing("the server's helper failed")?;
    let (what, hint) = why.split_once('\n').unwrap_or((&why, ""));
    let failed = Error::new(what);
    Err(match hint {
        "" => failed,
        hint => failed.hint(hint),
    })
}

/// The helper: works until the front is gone.
pub(crate) async fn help(config: &Config, data: &DataDir, mut front: UnixStream) -> Result<()> {
    logging::start(config.log_format, "info", None)?;
    // Whoever stops the server stops the front, which needs us to stop in order. Handlers rather than ignored: programs that
    // are started must not inherit it.
    let _interrupt = signal(SignalKind::interrupt()).doing("cannot watch for signals")?;
    let _terminate = signal(SignalKind::terminate()).doing("cannot watch for signals")?;
    let _hangup = signal(SignalKind::hangup()).doing("cannot watch for signals")?;
    if let Err(error) = prepare(config, data.path()).await {
        let why = error.to_string().replace('\n', " ");
        let hint = error.hint.as_deref().unwrap_or_default();
        let words = format!("{why}\n{hint}");
        let _gone = front.write_all(&(words.len() as u32).to_le_bytes());
        let _gone = front.write_all(words.as_bytes());
        return Ok(());
    }
    front.write_all(&[0; 4]).doing("the server is gone")?;
    server::sweep(config).await;
    let (raisers, tiers) = Machine::raise(config, data.path()).await?;
    let works = Works {
        tiers,
        raisers,
        volumes: Volumes::open(data.path().join("volumes")).doing("cannot open the volumes")?,
        links: config.network.enabled.then(|| LinksConfig {
            state_dir: data.path().join("network"),
            ready: config.network.ready_links,
        }),
        packages: data.path().join("packages"),
        templates: config.templates.clone(),
        data: data.path().to_owned(),
    };
    let (over, ended) = tokio::sync::oneshot::channel();
    served::serve(front, works, move || {
        let _gone = over.send(());
    })
    .doing("cannot serve the server")?;
    let _gone = ended.await;
    Ok(())
}

/// Makes what the front could not: it has no power over the data directory itself.
async fn prepare(config: &Config, data: &Path) -> Result<()> {
    server::fresh_scratch(data)?;
    for name in ["artifacts", "vault"] {
        let mut made = std::fs::DirBuilder::new();
        made.recursive(true).mode(0o700);
        made.create(data.join(name))
            .doing(format_args!("cannot create {name}"))?;
    }
    // Only this: what is in there is the front's, and nothing that the front has written is read with powers.
    std::fs::create_dir_all(&config.templates).doing(format_args!(
        "cannot open the templates in {}",
        config.templates.display()
    ))?;
    atoll_sandboxes::prepare(&Settings::new(data.to_owned()))?;
    atoll_identity::prepare(data)?;
    outside::master_key(config, data)?;
    if let Some(tls) = config.certificate() {
        tls::acceptor(&tls, &config.domain, data)?;
    }
    prepare_database(data.join("atoll.db"), |path| Ok(sqlite::open(path)?.database)).await?;
    if config.workflows_listen.is_some() {
        prepare_database(data.join("workflows.db"), |path| {
            Ok(sqlite::open_workflows(path)?)
        })
        .await?;
    }
    Ok(())
}

async fn prepare_database(
    path: PathBuf,
    open: fn(&Path) -> std::result::Result<Arc<dyn Database>, atoll_store::Error>,
) -> Result<()> {
    let shown = path.clone();
    if std::fs::metadata(&path).map_or(0, |found| found.len()) == 0 {
        let database = tokio::task::spawn_blocking(move || open(&path));
        let database = database.await.doing("opening the database")?;
        let database = database.doing(format_args!("cannot open the database {}", shown.display()))?;
        database.close().await;
    }
    // SQLite makes these beside it, which takes power over the directory, and finds them as well.
    for beside in beside(&shown) {
        let mut options = std::fs::OpenOptions::new();
        options.append(true).create(true).mode(0o600);
        options
            .open(&beside)
            .doing(format_args!("cannot create {}", beside.display()))?;
    }
    Ok(())
}

fn beside(database: &Path) -> [PathBuf; 2] {
    ["-wal", "-shm"].map(|suffix| {
        let mut path = database.as_os_str().to_owned();
        path.push(suffix);
        path.into()
    })
}

/// What names and certificates are looked up with, and little else.
const HOST: &[&str] = &[
    "/etc/resolv.conf",
    "/etc/hosts",
    "/etc/host.conf",
    "/etc/nsswitch.conf",
    "/etc/gai.conf",
    "/etc/services",
    "/etc/localtime",
    "/etc/ld.so.cache",
    "/etc/ssl/certs",
    "/etc/ssl/cert.pem",
    "/etc/ssl/openssl.cnf",
    "/etc/pki/tls/certs",
    "/etc/pki/tls/cert.pem",
    "/etc/pki/ca-trust",
    "/etc/ca-certificates",
    "/run/systemd/resolve",
    "/run/NetworkManager/resolv.conf",
    "/run/resolvconf",
    "/usr/lib",
    "/usr/lib64",
    "/usr/share/ca-certificates",
    "/usr/share/zoneinfo",
    "/usr/local/share/ca-certificates",
    "/lib",
    "/lib64",
    "/dev/urandom",
    // How many processors it may use.
    "/proc/self/cgroup",
    "/proc/self/mountinfo",
    "/sys/fs/cgroup",
];

/// What the front sees of this machine.
fn view(config: &Config, data: &Path) -> View {
    let mut read: Vec<PathBuf> = HOST.iter().map(PathBuf::from).collect();
    let of_data = ["secrets.key", "tokens.secret", "admin.key", "tls"];
    read.extend(of_data.map(|name| data.join(name)));
    let configured = [
        &config.vault_key,
        &config.secrets_key,
        &config.metrics_key,
        &config.network.extra_roots,
    ];
    read.extend(configured.into_iter().flatten().cloned());
    let tls = config.tls.iter().flat_map(|tls| [&tls.certificate, &tls.key]);
    read.extend(tls.flatten().cloned());
    let variables = ["SSL_CERT_FILE", "SSL_CERT_DIR"].map(std::env::var_os);
    read.extend(variables.into_iter().flatten().map(PathBuf::from));
    let mut change = vec![PathBuf::from("/dev/null"), config.templates.clone()];
    change.extend(["artifacts", "scratch", "vault"].map(|name| data.join(name)));
    for database in ["atoll.db", "workflows.db"].map(|name| data.join(name)) {
        change.extend(beside(&database));
        change.push(database);
    }
    View { read, change }
}

/// None, unless a port wants one.
fn capabilities(config: &Config) -> u64 {
    let secured = config
        .tls
        .as_ref()
        .map(|tls| tls.listen.map_or(DEFAULT_TLS_PORT, |at| at.port()));
    let ports = [
        Some(config.listen.port()),
        config.workflows_listen.map(|at| at.port()),
        secured,
    ];
    match ports.iter().flatten().any(|port| (1..1024).contains(port)) {
        true => NET_BIND_SERVICE,
        false => 0,
    }
}
