//! The server: opens the data, finds the walls that work here, takes over what an earlier server left, and serves.

mod machine;
mod options;
mod storage;
mod sweep;

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use atoll_actions::Actions;
use atoll_client::Client;
use atoll_client::local::{ServerFile, TlsFile};
use atoll_client::output::{Doing, Error, OWN_FAILURE, Output, Result};
use atoll_egress::Callers;
use atoll_front::serve::{self, Door, Spoken};
use atoll_front::{Apis, Front};
use atoll_helper::front::Helper;
use atoll_identity::{CreateKey, Identity, Role};
use atoll_models::Models;
use atoll_node::LocalNode;
use atoll_runtime::probe::Verdict;
use atoll_sandboxes::{BuildJobs, Processes, Sandboxes, Storage};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::{JoinHandle, JoinSet};
use tokio_util::sync::CancellationToken;

use crate::args::Global;
use crate::config::{Config, DEFAULT_TLS_PORT};
use crate::confinement;
use crate::data::{DataDir, Taken};
use crate::logging;
use crate::memory;
use crate::outside;
use crate::parting::Start;
use crate::watchdog;
use crate::workflows::Workflows;

pub(crate) use machine::{Machine, raise_limits};
pub(crate) use options::check_files;
pub(crate) use storage::fresh_scratch;
pub(crate) use sweep::sweep;

/// `atoll server`: serves until told to stop.
pub(crate) async fn run(global: &Global, config: &Config, start: Start) -> Result<()> {
    let exporter = logging::start(config.log_format, "info", config.otlp_endpoint.as_deref())?;
    confinement::tell(&start.layers);
    watchdog::start(&tokio::runtime::Handle::current())?;
    memory::start_trimming()?;
    // Before anything is started, so that an early Ctrl-C does not leave half of it.
    let mut interrupt = signal(SignalKind::interrupt()).doing("cannot watch for Ctrl-C")?;
    let mut terminate = signal(SignalKind::terminate()).doing("cannot watch for termination")?;

    let mut data = start.data;
    let helper = start.helper.map(|socket| Helper::new(socket, leave_with_helper));
    let helper = helper
        .transpose()
        .doing("cannot speak with the server's helper")?;
    match &helper {
        // It has swept already.
        Some(helper) => data.kept_by(helper.clone()),
        None => sweep(config).await,
    }
    let server = Server::start(config, data, Kind::Standing, helper.as_ref()).await?;
    if server.has_new_key {
        // Where it is, and not what it is: whoever reads the log is not always who may use it.
        Output { json: global.json }.note(format_args!(
            "This is the first start. The admin key is in {}, readable by this user alone; `atoll` on this machine \
             finds it there.",
            server.data.path().join("admin.key").display()
        ));
    }
    tracing::info!(
        url = %server.url,
        data = %server.data.path().display(),
        admin_key = %server.data.path().join("admin.key").display(),
        "serving"
    );
    if config.e2b_tls {
        tracing::info!(domain = %config.domain, "serving TLS on the same port; `atoll e2b env` says how E2B's SDKs find it");
    }
    if let Some(address) = server.secured {
        tracing::info!(url = %url_of(address).replacen("http:", "https:", 1), "serving TLS");
    }
    if !config.listen.ip().is_loopback() {
        tracing::warn!(
            listen = %config.listen,
            "this address speaks plain HTTP, so keys travel in clear text: listen on loopback and use `[tls]`, or stand \
             behind a proxy with TLS"
        );
    }
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    tracing::info!("stopping; running sandboxes go on without the server");
    tokio::select! {
        () = server.stop() => {}
        _ = interrupt.recv() => tracing::warn!("stopped at once, as asked twice"),
    }
    if let Some(exporter) = exporter {
        exporter.flush().await;
    }
    Ok(())
}

/// Without its helper a server can do nothing; whoever started it starts another, which takes over the sandboxes.
#[expect(
    clippy::exit,
    reason = "called from the thread that noticed, and there is nothing left to wait for"
)]
fn leave_with_helper() {
    tracing::error!("the server's helper is gone; this server ends, and its sandboxes go on");
    std::process::exit(i32::from(OWN_FAILURE));
}

/// What a server is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// It stays until it is stopped, and others may use it.
    Standing,
    /// It lives inside one CLI command.
    Embedded,
}

#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) url: String,
    /// Where TLS is served.
    secured: Option<SocketAddr>,
    /// Whether the admin key was made by this start.
    pub(crate) has_new_key: bool,
    key: String,
    data: DataDir,
    sandboxes: Sandboxes,
    models: Models,
    stop: CancellationToken,
    serving: JoinHandle<()>,
    workflows: Option<Workflows>,
    /// Removed at the end: the data directory of an embedded server that had to make its own.
    temporary: Option<PathBuf>,
}

impl Server {
    pub(crate) async fn start(
        config: &Config,
        data: DataDir,
        kind: Kind,
        helper: Option<&Helper>,
    ) -> Result<Self> {
        raise_limits();
        // What is configured is looked at as a whole before anything is opened or changed.
        let front = Front::new(config.limits.resolve()?);
        let native = options::api_options(config, data.path())?;
        let floor = outside::floor(&config.network)?;
        // Listening comes first: a port that is taken is the likeliest mistake.
        let listener = listen(config.listen).await?;
        let address = listener.local_addr().doing("cannot listen")?;

        // Names below `localhost` lead to both loopback addresses, and some clients try one alone.
        let twin = match config.e2b_tls && address.ip() == Ipv4Addr::LOCALHOST {
            true => also_listen((Ipv6Addr::LOCALHOST, address.port()).into()).await,
            false => None,
        };
        let tls = match config.certificate() {
            Some(tls) => Some(crate::tls::acceptor(&tls, &config.domain, data.path())?),
            None => None,
        };
        // By a port of its own, on which nothing else is spoken; workflows then do as well.
        let secured = match (&config.tls, &tls) {
            (Some(table), Some(tls)) => {
                let own = SocketAddr::from((Ipv4Addr::LOCALHOST, DEFAULT_TLS_PORT));
                Some((listen(table.listen.unwrap_or(own)).await?, tls.clone()))
            }
            _ => None,
        };
        let secured_address = match &secured {
            Some((listener, _)) => Some(listener.local_addr().doing("cannot listen")?),
            None => None,
        };
        let machine = match helper {
            Some(helper) => Machine::of(helper, config).await?,
            None => Machine::look(config, data.path()).await?,
        };
        for probe in &machine.tiers {
            match &probe.verdict {
                Verdict::Works { detail, no_disk } => {
                    tracing::info!(isolation = %probe.isolation, %detail, no_disk, "this tier works");
                }
                Verdict::Unavailable { reason, .. } => {
                    tracing::info!(isolation = %probe.isolation, %reason, "this tier does not work");
                }
            }
        }
        let templates = machine.templates.clone();
        let (store, bytes) = storage::open(config, data.path(), machine.templates, helper).await?;
        // Sandboxes come to the models by a door of their own, behind which is nothing else of the API.
        let model_door = listen(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).await?;
        let model_address = model_door.local_addr().doing("cannot listen")?;
        let callers = Callers::default();
        let models = (model_address, callers.clone());
        let (outside, broker) = outside::open(config, data.path(), Some(models), helper).await?;
        let settings = options::settings(config, data.path(), &machine.tiers);
        let identity = storage::identity(&store, &settings).await?;
        let node = LocalNode::new(
            settings.node(identity.default_project()),
            machine.runtimes,
            machine.tiers,
            bytes,
            outside,
        );
        let storage = Storage {
            store: store.clone(),
            templates,
            broker: Arc::clone(&broker),
        };
        let sandboxes = Sandboxes::start(settings, storage, identity.clone(), Arc::new(node)).await?;
        let model_settings = atoll_models::Settings {
            timeouts: config.model_timeouts,
            floor,
            is_own: atoll_egress::is_own,
            keep_bodies: config.keep_model_bodies,
            now: atoll_sandboxes::wall_clock,
        };
        let models = Models::start(model_settings, store, identity.clone(), broker).await?;

        let (key, has_new_key) = admin_key(&data, &identity).await?;
        let stop = CancellationToken::new();
        let workflows = match config.workflows_listen {
            Some(address) if kind == Kind::Standing => {
                let tls = secured.as_ref().map(|(_, tls)| tls.clone());
                let most_kept = config.max_workflow_storage;
                let front = front.clone();
                let started = Workflows::start(
                    address,
                    tls,
                    data.path(),
                    most_kept,
                    &identity,
                    front,
                    stop.clone(),
                );
                Some(started.await?)
            }
            _ => None,
        };
        let engine = workflows.as_ref().map(|workflows| workflows.engine().clone());
        let e2b = options::e2b_options(config, &native, secured_address);
        let domains = native.port_domains.clone();
        let default_timeout_millis = native.default_timeout_millis;
        let apis = Apis::new(
            front.clone(),
            domains,
            [
                atoll_api_e2b::api(
                    identity.clone(),
                    sandboxes.clone(),
                    Processes::new(sandboxes.clone()),
                    BuildJobs::new(sandboxes.clone()),
                    e2b,
                ),
                atoll_api_models::api(identity.clone(), models.clone(), sandboxes.clone()),
                // The last: it takes what is left, and says what there is not.
                atoll_api_native::api(
                    identity.clone(),
                    sandboxes.clone(),
                    models.clone(),
                    engine.clone(),
                    native,
                    front.clone(),
                ),
            ],
        );
        if let Some(engine) = engine {
            let actions = Actions::new(
                sandboxes.clone(),
                models.clone(),
                front.memory.clone(),
                default_timeout_millis,
            );
            let steps = atoll_steps::work(engine, identity.clone(), sandboxes.clone(), actions, stop.clone());
            tokio::spawn(steps);
        }
        tokio::spawn(end_expired(identity.clone(), front.clone(), stop.clone()));
        let for_sandboxes =
            atoll_api_models::sandbox_api(identity.clone(), models.clone(), sandboxes.clone());
        let for_sandboxes = Apis::new(front, Vec::new(), [for_sandboxes]);
        let announced: serve::Callers = Arc::new(move |address| {
            let mut callers = callers.lock();
            callers.remove(address)
        });
        let mut doors = JoinSet::new();
        let door = Door::Sandboxes(announced);
        doors.spawn(serve::serve(model_door, door, for_sandboxes, stop.clone()));
        let spoken = match tls {
            Some(tls) if config.e2b_tls => Spoken::Either(tls),
            _ => Spoken::Plain,
        };
        let anybody = Door::Anybody(spoken);
        if let Some(listener) = twin {
            let (door, apis, stop) = (anybody.clone(), apis.clone(), stop.clone());
            doors.spawn(serve::serve(listener, door, apis, stop));
        }
        doors.spawn(serve::serve(listener, anybody, apis.clone(), stop.clone()));
        if let Some((listener, tls)) = secured {
            let anybody = Door::Anybody(Spoken::Tls(tls));
            doors.spawn(serve::serve(listener, anybody, apis, stop.clone()));
        }
        let serving = tokio::spawn(async move { while doors.join_next().await.is_some() {} });
        let url = url_of(address);
        let secured = secured_address;
        data.announce(&ServerFile {
            url: url.clone(),
            pid: std::process::id(),
            embedded: kind == Kind::Embedded,
            workflows: workflows.as_ref().map(Workflows::url),
            tls: config.certificate().map(|tls| TlsFile {
                domain: config.domain.clone(),
                port: secured_address
                    .filter(|_| !config.e2b_tls)
                    .unwrap_or(address)
                    .port(),
                authority: tls
                    .certificate
                    .is_none()
                    .then(|| crate::tls::authority(data.path())),
            }),
        })?;
        Ok(Self {
            url,
            secured,
            has_new_key,
            key,
            data,
            sandboxes,
            models,
            stop,
            serving,
            workflows,
            temporary: None,
        })
    }

    /// A server for one CLI command. If the data directory is in the hands of another such command, this one gets its
    /// own below it, with the same templates.
    pub(crate) async fn embedded(global: &Global) -> Result<Self> {
        let mut config = Config::embedded(global.data.as_deref())?;
        let (data, temporary) = match DataDir::take(&config.data) {
            Ok(data) => (data, None),
            Err(Taken::By { .. }) => {
                let own = config.data.join("embedded").join(std::process::id().to_string());
                let data = DataDir::take(&own).map_err(|taken| taken.into_error(&own))?;
                config.data.clone_from(&own);
                (data, Some(own))
            }
            Err(failed) => return Err(failed.into_error(&config.data)),
        };
        if temporary.is_none() {
            sweep(&config).await;
        }
        let mut server = Self::start(&config, data, Kind::Embedded, None).await?;
        server.temporary = temporary;
        Ok(server)
    }

    pub(crate) fn client(&self) -> Result<Client> {
        Client::new(&self.url, Some(self.key.clone()))
    }

    /// Stops serving. What runs in sandboxes goes on.
    pub(crate) async fn stop(self) {
        self.data.retire();
        self.stop.cancel();
        let _panicked = self.serving.await;
        if let Some(workflows) = self.workflows {
            workflows.stop().await;
        }
        // Something that does not end must not keep the process: sandboxes are durable without us, and so is what model
        // calls have cost.
        let (models, sandboxes) = (self.models, self.sandboxes);
        let shutdown = async {
            models.shutdown().await;
            sandboxes.shutdown().await;
        };
        if tokio::time::timeout(Duration::from_secs(20), shutdown)
            .await
            .is_err()
        {
            tracing::warn!("some work did not end in time and is left to the next server");
        }
        if let Some(path) = self.temporary {
            let _leftover = std::fs::remove_dir_all(path);
        }
    }
}

/// Ends what is open with keys that have expired, until `stop`.
async fn end_expired(identity: Identity, front: Front, stop: CancellationToken) {
    /// How long after its end a key may still hold something open.
    const ROUND: Duration = Duration::from_secs(1);
    while stop
        .run_until_cancelled(tokio::time::sleep(ROUND))
        .await
        .is_some()
    {
        for ended in identity.take_expired() {
            front.connections.revoke(&ended, None);
        }
    }
}

/// The key of the local CLI: read, or made on the first start and whenever the file was lost, or holds one that does not run
/// the server.
async fn admin_key(data: &DataDir, identity: &Identity) -> Result<(String, bool)> {
    if let Some(secret) = data.admin_key()
        && let Some(holder) = identity.authenticate(&secret).await?
        && holder.role() == Role::Operator
    {
        return Ok((secret, false));
    }
    let project = identity.default_project().clone();
    let wanted = CreateKey {
        project: project.clone(),
        name: "admin".into(),
        role: Some(Role::Operator),
        scopes: Vec::new(),
        expires_at: None,
    };
    let (_, secret) = identity.create_key(&identity.server(project), wanted).await?;
    data.keep_admin_key(&secret)?;
    Ok((secret, true))
}

async fn listen(address: SocketAddr) -> Result<TcpListener> {
    TcpListener::bind(address).await.map_err(|error| {
        let failed = Error::new(format!("cannot listen on {address}: {error}"));
        match error.kind() {
            std::io::ErrorKind::AddrInUse => {
                failed.hint("another program has this port; choose another with --listen 127.0.0.1:PORT")
            }
            std::io::ErrorKind::PermissionDenied => failed.hint("ports below 1024 need root"),
            _ => failed,
        }
    })
}

/// The same where it is a help and no more: there may be no IPv6 on this machine.
async fn also_listen(address: SocketAddr) -> Option<TcpListener> {
    match TcpListener::bind(address).await {
        Ok(listener) => Some(listener),
        Err(error) => {
            tracing::info!(%address, %error, "not listening there; clients that try no other address will not come");
            None
        }
    }
}

/// Where clients on this machine reach a server that listens there.
pub(crate) fn url_of(address: SocketAddr) -> String {
    match (address.ip().is_unspecified(), address) {
        (true, SocketAddr::V4(_)) => format!("http://127.0.0.1:{}", address.port()),
        (true, SocketAddr::V6(_)) => format!("http://[::1]:{}", address.port()),
        (false, _) => format!("http://{address}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_are_told_an_address_they_can_reach() {
        for (listens, url) in [
            ("127.0.0.1:7070", "http://127.0.0.1:7070"),
            ("0.0.0.0:80", "http://127.0.0.1:80"),
            ("[::]:80", "http://[::1]:80"),
            ("10.0.0.5:7070", "http://10.0.0.5:7070"),
        ] {
            assert_eq!(url_of(listens.parse().unwrap()), url);
        }
    }
}
