//! The server: opens the data, finds the walls that work here, takes over what an earlier server left, and serves.

use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use atoll_api_native::MetricsKey;
use atoll_egress::Callers;
use atoll_front::serve::{self, Door};
use atoll_front::{Apis, Front};
use atoll_helper::front::Helper;
use atoll_identity::{CreateKey, Identity, Role};
use atoll_image::Templates;
use atoll_models::Models;
use atoll_runtime::Runtime;
use atoll_runtime::agent::Raiser;
use atoll_runtime::probe::{self, Probe, Verdict};
use atoll_sandboxes::{ListSandboxes, PoolSetting, Sandboxes, Settings, Storage};
use atoll_store::Store;
use atoll_vault::{Vault, VaultKey};
use atoll_volumes::Volumes;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::args::Global;
use crate::assets;
use crate::client::Client;
use crate::config::{Config, DEFAULT_TLS_PORT};
use crate::confinement;
use crate::data::{DataDir, ServerFile, Taken};
use crate::logging;
use crate::output::{Doing, Error, OWN_FAILURE, Output, Result};
use crate::outside;
use crate::parting::Start;
use crate::steps;
use crate::watchdog;
use crate::workflows::Workflows;

/// The default of sandboxes created through the API without a word about their lifetime.
const DEFAULT_TIMEOUT_MILLIS: u64 = 15 * 60 * 1000;

/// `atoll server`: serves until told to stop.
pub(crate) async fn run(global: &Global, config: &Config, start: Start) -> Result<()> {
    let exporter = logging::start(config.log_format, "info", config.otlp_endpoint.as_deref())?;
    confinement::tell(&start.layers);
    watchdog::start(&tokio::runtime::Handle::current())?;
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
        let front = Front::new(config.limits.resolve()?);
        // Listening comes first: a port that is taken is the likeliest mistake.
        let listener = listen(config.listen).await?;
        let address = listener.local_addr().doing("cannot listen")?;

        let secured = match &config.tls {
            Some(tls) => {
                let own = SocketAddr::from((Ipv4Addr::LOCALHOST, DEFAULT_TLS_PORT));
                let listener = listen(tls.listen.unwrap_or(own)).await?;
                Some((listener, crate::tls::acceptor(tls, &config.domain, data.path())?))
            }
            None => None,
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
                Verdict::Works { detail } => {
                    tracing::info!(isolation = %probe.isolation, %detail, "this tier works");
                }
                Verdict::Unavailable { reason, .. } => {
                    tracing::info!(isolation = %probe.isolation, %reason, "this tier does not work");
                }
            }
        }
        let storage = storage(config, data.path(), machine.templates, helper).await?;
        // Sandboxes come to the models by a door of their own, behind which is nothing else of the API.
        let model_door = listen(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).await?;
        let model_address = model_door.local_addr().doing("cannot listen")?;
        let callers = Callers::default();
        let models = (model_address, callers.clone());
        let outside = outside::open(config, data.path(), Some(models), helper).await?;
        let (store, broker) = (storage.store.clone(), Arc::clone(&outside.broker));
        let settings = settings(config, data.path());
        let identity = identity(&store, &settings).await?;
        let sandboxes = Sandboxes::start(
            settings,
            machine.runtimes,
            machine.tiers,
            storage,
            identity.clone(),
            outside,
        )
        .await?;
        let model_settings = atoll_models::Settings {
            timeouts: config.model_timeouts,
            floor: outside::floor(&config.network)?,
            keep_bodies: config.keep_model_bodies,
            now: atoll_sandboxes::wall_clock,
        };
        let models = Models::start(model_settings, store, identity.clone(), broker).await?;

        let (key, has_new_key) = admin_key(&data, &identity).await?;
        let stop = CancellationToken::new();
        let workflows = match config.workflows_listen {
            Some(address) if kind == Kind::Standing => {
                let tls = secured.as_ref().map(|(_, tls)| tls.clone());
                Some(
                    Workflows::start(address, tls, data.path(), &identity, front.clone(), stop.clone())
                        .await?,
                )
            }
            _ => None,
        };
        let engine = workflows.as_ref().map(|workflows| workflows.engine().clone());
        let options = api_options(config, data.path())?;
        let e2b = e2b_options(config, &options);
        let domains = options.port_domains.clone();
        let apis = Apis::new(
            front.clone(),
            domains,
            [
                atoll_api_e2b::api(identity.clone(), sandboxes.clone(), e2b),
                atoll_api_models::api(identity.clone(), models.clone(), sandboxes.clone()),
                // The last: it takes what is left, and says what there is not.
                atoll_api_native::api(
                    identity.clone(),
                    sandboxes.clone(),
                    models.clone(),
                    engine.clone(),
                    options,
                    front.clone(),
                ),
            ],
        );
        if let Some(engine) = engine {
            let steps = steps::work(
                engine,
                identity.clone(),
                sandboxes.clone(),
                models.clone(),
                apis.clone(),
                stop.clone(),
            );
            tokio::spawn(steps);
        }
        tokio::spawn(end_expired(identity.clone(), front.clone(), stop.clone()));
        let for_sandboxes =
            atoll_api_models::sandbox_api(identity.clone(), models.clone(), sandboxes.clone());
        let for_sandboxes = Apis::new(front, Vec::new(), [for_sandboxes]);
        let announced: serve::Callers = Arc::new(move |address| {
            let mut callers = callers.lock().unwrap_or_else(PoisonError::into_inner);
            callers.remove(address)
        });
        let door = serve::serve(
            model_door,
            Door::Sandboxes(announced),
            for_sandboxes,
            stop.clone(),
        );
        let anybody = Door::Anybody { tls: None };
        let plain = serve::serve(listener, anybody, apis.clone(), stop.clone());
        let secured = secured.map(|(listener, tls)| {
            let anybody = Door::Anybody { tls: Some(tls) };
            serve::serve(listener, anybody, apis, stop.clone())
        });
        let serving = tokio::spawn(async move {
            match secured {
                Some(secured) => drop(tokio::join!(plain, door, secured)),
                None => drop(tokio::join!(plain, door)),
            }
        });
        let url = url_of(address);
        let secured = secured_address;
        data.announce(&ServerFile {
            url: url.clone(),
            pid: std::process::id(),
            embedded: kind == Kind::Embedded,
            workflows: workflows.as_ref().map(Workflows::url),
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

/// Ends what `atoll run`s with a data directory of their own left behind when they were killed.
pub(crate) async fn sweep(config: &Config) {
    let Ok(left) = std::fs::read_dir(config.data.join("embedded")) else {
        return;
    };
    for path in left.flatten().map(|entry| entry.path()) {
        // One that is alive holds its lock.
        let Ok(data) = DataDir::take(&path) else { continue };
        match Box::pin(sweep_one(config, &data)).await {
            Ok(()) => drop(std::fs::remove_dir_all(&path)),
            Err(error) => {
                tracing::warn!(%error, path = %path.display(), "cannot clean up after a killed `atoll run`");
            }
        }
    }
}

async fn sweep_one(config: &Config, data: &DataDir) -> Result<()> {
    let machine = Machine::look(config, data.path()).await?;
    let settings = Settings::new(data.path().to_owned());
    let storage = storage(config, data.path(), machine.templates, None).await?;
    let identity = identity(&storage.store, &settings).await?;
    let sandboxes = Sandboxes::start(
        settings,
        machine.runtimes,
        machine.tiers,
        storage,
        identity.clone(),
        outside::open(config, data.path(), None, None).await?,
    )
    .await?;
    let caller = identity.server(identity.default_project().clone());
    let live = sandboxes
        .list(
            &caller,
            ListSandboxes {
                limit: 100,
                ..ListSandboxes::default()
            },
        )
        .await?;
    for sandbox in live.items {
        sandboxes.kill(&caller, &sandbox.id).await?;
    }
    sandboxes.shutdown().await;
    Ok(())
}

/// What this machine offers.
pub(crate) struct Machine {
    pub(crate) runtimes: atoll_runtime::Runtimes,
    pub(crate) tiers: Vec<Probe>,
    pub(crate) templates: Templates,
}

impl Machine {
    /// Finds out in this process.
    pub(crate) async fn look(config: &Config, data: &Path) -> Result<Self> {
        let (raisers, tiers) = Self::raise(config, data).await?;
        Ok(Self {
            runtimes: raisers
                .into_iter()
                .map(|raiser| raiser as Arc<dyn Runtime>)
                .collect(),
            tiers,
            templates: open_templates(config)?,
        })
    }

    /// The same, for a process that leaves it to another to speak with agents.
    pub(crate) async fn raise(config: &Config, data: &Path) -> Result<(Vec<Arc<dyn Raiser>>, Vec<Probe>)> {
        let owned = data.to_owned();
        let assets = tokio::task::spawn_blocking(move || assets::install(&owned))
            .await
            .doing("setting up")??;
        let runtime_config = atoll_runtime::Config {
            state_dir: data.to_owned(),
            guest_binary: assets.guest_binary,
            guest_image: assets.guest_image,
            jailer_binary: assets.jailer_binary,
            runsc: config.runsc.clone(),
            cgroup_parent: config.cgroup.clone(),
        };
        let runtime_config = Arc::new(runtime_config);
        let tiers = probe::probe(&runtime_config).await;
        let raisers = probe::raisers(&runtime_config, &tiers).doing("cannot set up the isolation")?;
        Ok((raisers, tiers))
    }

    /// What the helper has found.
    async fn of(helper: &Helper, config: &Config) -> Result<Self> {
        let (setup, runtimes) = helper.setup().await.doing("cannot set up the isolation")?;
        Ok(Self {
            runtimes,
            tiers: setup.tiers,
            templates: open_templates(config)?.installed_by(Arc::new(helper.clone())),
        })
    }
}

fn open_templates(config: &Config) -> Result<Templates> {
    Templates::open(&config.templates).doing(format_args!(
        "cannot open the templates in {}",
        config.templates.display()
    ))
}

/// Opens everything that outlives a server.
async fn storage(
    config: &Config,
    data: &Path,
    templates: Templates,
    helper: Option<&Helper>,
) -> Result<Storage> {
    if helper.is_none() {
        fresh_scratch(data)?;
    }
    let store = open_store(data).await?;
    let key = config.vault_key.as_deref().map(read_vault_key).transpose()?;
    let dir = data.join("vault");
    let vault = tokio::task::spawn_blocking(move || Vault::open(dir, key))
        .await
        .doing("opening the vault")?
        .doing("cannot open the vault of saved state")?;
    let volumes = match helper {
        Some(helper) => helper.volumes(),
        None => Volumes::open(data.join("volumes")).doing("cannot open the volumes")?,
    };
    Ok(Storage {
        store,
        templates,
        vault,
        volumes,
    })
}

/// An empty directory for what is on its way; a killed server may have left something there in the middle of an upload.
pub(crate) fn fresh_scratch(data: &Path) -> Result<()> {
    let scratch = data.join("scratch");
    let _absent = std::fs::remove_dir_all(&scratch);
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&scratch)
        .doing("cannot create the scratch directory")
}

/// The key is a secret: readable by nobody else, and never on a command line.
fn read_vault_key(path: &Path) -> Result<VaultKey> {
    let doing = || format!("cannot read the vault key {}", path.display());
    VaultKey::parse(&read_private("the vault key", path)?).doing(doing())
}

/// What opens the metrics.
fn read_metrics_key(path: &Path) -> Result<MetricsKey> {
    let text = read_private("the key of the metrics", path)?;
    match std::str::from_utf8(&text).map(str::trim) {
        Ok(secret) if secret.len() >= 16 => Ok(MetricsKey::new(secret)),
        _ => Err(Error::new(format!(
            "the key of the metrics {} has fewer than 16 characters",
            path.display()
        ))
        .hint("make one with: openssl rand -hex 20")),
    }
}

fn read_private(what: &str, path: &Path) -> Result<Vec<u8>> {
    use std::os::unix::fs::MetadataExt as _;
    let doing = || format!("cannot read {what} {}", path.display());
    let file = std::fs::metadata(path).doing(doing())?;
    if file.mode() & 0o077 != 0 {
        return Err(Error::new(format!(
            "{what} {} can be read by others; run: chmod 600 {}",
            path.display(),
            path.display()
        )));
    }
    std::fs::read(path).doing(doing())
}

async fn open_store(data: &Path) -> Result<Store> {
    let path = data.join("atoll.db");
    let shown = path.clone();
    tokio::task::spawn_blocking(move || Store::open(&path))
        .await
        .doing("opening the database")?
        .doing(format_args!("cannot open the database {}", shown.display()))
}

fn settings(config: &Config, data: &Path) -> Settings {
    let mut settings = Settings::new(data.to_owned());
    settings.pools = config
        .pools
        .iter()
        .map(|pool| PoolSetting {
            template: pool.template.clone(),
            size: pool.count,
            resources: pool.resources,
            isolation: pool.isolation,
        })
        .collect();
    settings.limits.default_floor = config.isolation;
    if let Some(longest) = config.max_timeout_millis {
        settings.limits.max_timeout_millis = Some(longest);
    }
    if let Some(most) = config.max_sandboxes {
        settings.max_live_per_project = most;
    }
    settings.max_storage_per_project = config.max_storage;
    if let Some(kept) = config.artifact_retention_millis {
        settings.artifact_retention_millis = Some(kept);
    }
    if let Some(kept) = config.ledger_retention_millis {
        settings.ledger_retention_millis = kept;
    }
    settings.durable_saves = config.durable_saves;
    settings
}

fn api_options(config: &Config, data: &Path) -> Result<atoll_api_native::Options> {
    let mut options = atoll_api_native::Options {
        default_timeout_millis: config.default_timeout_millis.unwrap_or(DEFAULT_TIMEOUT_MILLIS),
        scratch: data.join("scratch"),
        ..atoll_api_native::Options::default()
    };
    if let Some(scheme) = &config.public_scheme {
        options.public_scheme.clone_from(scheme);
    }
    options.public_port = config.public_port;
    if config.domain != "localhost" {
        options.port_domains.insert(0, config.domain.clone());
    }
    options.metrics_key = config.metrics_key.as_deref().map(read_metrics_key).transpose()?;
    Ok(options)
}

/// The same, for E2B's wire. Its SDKs always come by `https` and the domain alone, so a port that is not the usual one
/// is part of the domain.
fn e2b_options(config: &Config, native: &atoll_api_native::Options) -> atoll_api_e2b::Options {
    let public_domain = (config.domain != "localhost").then(|| match config.public_port {
        None | Some(443) => config.domain.clone(),
        Some(port) => format!("{}:{port}", config.domain),
    });
    atoll_api_e2b::Options {
        public_scheme: native.public_scheme.clone(),
        public_domain,
        internet: config.e2b_internet,
        scratch: native.scratch.clone(),
    }
}

/// Who may do what, by the rows of this store.
async fn identity(store: &Store, settings: &Settings) -> Result<Identity> {
    let rows = Arc::new(store.clone());
    Ok(Identity::open(rows, &settings.data_dir, settings.now).await?)
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

/// The key of the local CLI: read, or made on the first start and whenever the file was lost.
async fn admin_key(data: &DataDir, identity: &Identity) -> Result<(String, bool)> {
    if let Some(secret) = data.admin_key()
        && identity.authenticate(&secret).await?.is_some()
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

/// Where clients on this machine reach a server that listens there.
pub(crate) fn url_of(address: SocketAddr) -> String {
    match (address.ip().is_unspecified(), address) {
        (true, SocketAddr::V4(_)) => format!("http://127.0.0.1:{}", address.port()),
        (true, SocketAddr::V6(_)) => format!("http://[::1]:{}", address.port()),
        (false, _) => format!("http://{address}"),
    }
}

/// More open files, no core dumps.
pub(crate) fn raise_limits() {
    raise_file_limit();
    forbid_core_dumps();
}

/// Secrets are in this memory. 1 and not 0: with 0 a `core_pattern` that is a pipe is fed all the same.
fn forbid_core_dumps() {
    let limit = Rlimit {
        current: Some(1),
        maximum: Some(1),
    };
    if let Err(error) = setrlimit(Resource::Core, limit) {
        tracing::warn!(%error, "core dumps of this server cannot be forbidden");
    }
}

/// Each sandbox costs a few descriptors; the default of 1024 ends at some three hundred.
fn raise_file_limit() {
    const WANTED: u64 = 1 << 20;
    let now = getrlimit(Resource::Nofile);
    let most = now.maximum.unwrap_or(u64::MAX);
    let raised = Rlimit {
        current: Some(WANTED.max(most.min(WANTED))),
        maximum: Some(most.max(WANTED)),
    };
    // Root may go beyond the hard limit, others up to it.
    let outcome = setrlimit(Resource::Nofile, raised).or_else(|_| {
        setrlimit(
            Resource::Nofile,
            Rlimit {
                current: Some(most.min(WANTED)),
                maximum: now.maximum,
            },
        )
    });
    if let Err(error) = outcome {
        tracing::warn!(%error, "the limit on open files could not be raised");
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
