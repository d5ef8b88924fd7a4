//! What the operator of a server can set: options on the command line win over the file ([`file`]), and the file over what
//! holds for everybody.

mod file;
mod pool;
mod sizes;

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use atoll_client::output::{Error, Result};
use atoll_client::{find_in_path, local};
use atoll_providers::Timeouts;
use atoll_types::{Isolation, Preset};

use crate::args::{LogFormat, ServerArgs};
use crate::limits::LimitsTable;
use file::{ConfigFile, NetworkTable};

pub(crate) use file::{Confine, Tls, WorkflowsListen, bytes, duration};
pub(crate) use pool::Pool;
pub(crate) use sizes::SandboxSizes;

pub(crate) const DEFAULT_PORT: u16 = 7070;
/// Where clients of workflows look unless they are told.
const WORKFLOWS_PORT: u16 = 7233;
pub(crate) const DEFAULT_TLS_PORT: u16 = 7443;

/// The settings that hold: command line over file over defaults.
#[derive(Debug, Clone)]
pub(crate) struct Config {
    pub(crate) listen: SocketAddr,
    pub(crate) workflows_listen: Option<SocketAddr>,
    pub(crate) domain: String,
    pub(crate) public_scheme: Option<String>,
    pub(crate) public_port: Option<u16>,
    pub(crate) data: PathBuf,
    pub(crate) templates: PathBuf,
    pub(crate) runsc: Option<PathBuf>,
    pub(crate) isolation: Option<Isolation>,
    pub(crate) max_sandboxes: Option<u64>,
    pub(crate) max_storage: Option<u64>,
    pub(crate) min_free_disk: Option<u64>,
    pub(crate) max_workflow_storage: Option<u64>,
    pub(crate) max_ledger: Option<u64>,
    pub(crate) artifact_retention_millis: Option<u64>,
    pub(crate) ledger_retention_millis: Option<u64>,
    pub(crate) vault_key: Option<PathBuf>,
    /// `None`: one of its own in the data directory.
    pub(crate) secrets_key: Option<PathBuf>,
    pub(crate) durable_saves: bool,
    pub(crate) default_timeout_millis: Option<u64>,
    pub(crate) max_timeout_millis: Option<u64>,
    pub(crate) cgroup: String,
    pub(crate) confine: Confine,
    pub(crate) log_format: Option<LogFormat>,
    pub(crate) otlp_endpoint: Option<String>,
    pub(crate) metrics_key: Option<PathBuf>,
    pub(crate) tls: Option<Tls>,
    pub(crate) sizes: SandboxSizes,
    pub(crate) pools: Vec<Pool>,
    pub(crate) network: NetworkConfig,
    pub(crate) limits: LimitsTable,
    pub(crate) model_timeouts: Timeouts,
    pub(crate) keep_model_bodies: Option<Duration>,
    pub(crate) e2b_internet: bool,
    /// Whether the API's own port speaks TLS, too.
    pub(crate) e2b_tls: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NetworkConfig {
    pub(crate) enabled: bool,
    pub(crate) default: Preset,
    pub(crate) allow_private: Vec<String>,
    pub(crate) deny: Vec<String>,
    /// Empty: those of this machine.
    pub(crate) resolvers: Vec<SocketAddr>,
    pub(crate) extra_roots: Option<PathBuf>,
    pub(crate) ready_links: usize,
}

impl From<NetworkTable> for NetworkConfig {
    fn from(table: NetworkTable) -> Self {
        Self {
            enabled: table.enabled.unwrap_or(true),
            default: table.default.unwrap_or(Preset::None),
            allow_private: table.allow_private,
            deny: table.deny,
            resolvers: table.resolvers,
            extra_roots: table.extra_roots,
            ready_links: table.ready_links.unwrap_or(8),
        }
    }
}

impl Config {
    pub(crate) fn load(args: &ServerArgs, data: Option<&Path>) -> Result<Self> {
        let file = match &args.config {
            Some(path) => file::read(path)?,
            None => ConfigFile::default(),
        };
        let data = data
            .map(Path::to_owned)
            .or(file.data)
            .unwrap_or_else(local::default_dir);
        let templates = args
            .templates
            .clone()
            .or(file.templates)
            .unwrap_or_else(|| data.join("templates"));
        let listen = args
            .listen
            .or(file.listen)
            .unwrap_or_else(|| SocketAddr::from((Ipv4Addr::LOCALHOST, DEFAULT_PORT)));
        let e2b_tls = args.e2b || file.e2b.tls.unwrap_or(false);
        Ok(Self {
            listen,
            domain: domain(args.domain.clone().or(file.domain), e2b_tls)?,
            e2b_tls,
            workflows_listen: match args.workflows_listen.or(file.workflows_listen) {
                Some(WorkflowsListen::Off) => None,
                Some(WorkflowsListen::At(address)) => Some(address),
                None => Some(SocketAddr::new(
                    listen.ip(),
                    if listen.port() == 0 { 0 } else { WORKFLOWS_PORT },
                )),
            },
            public_scheme: file.public_scheme,
            public_port: file.public_port,
            runsc: match args.runsc.clone().or(file.runsc) {
                Some(path) if path.as_os_str() == "none" => None,
                Some(path) => Some(path),
                None => find_runsc(),
            },
            isolation: args.isolation.or(file.isolation),
            max_sandboxes: file.max_sandboxes,
            max_storage: file.max_storage,
            min_free_disk: file.min_free_disk,
            max_workflow_storage: file.max_workflow_storage,
            max_ledger: file.max_ledger.map(enough_ledger).transpose()?,
            artifact_retention_millis: file.artifact_retention,
            ledger_retention_millis: file.ledger_retention,
            vault_key: file.vault_key.or_else(|| path_in("ATOLL_VAULT_KEY_FILE")),
            secrets_key: file.secrets_key.or_else(|| path_in("ATOLL_SECRETS_KEY_FILE")),
            durable_saves: file.durable_saves.unwrap_or(true),
            default_timeout_millis: file.default_timeout,
            max_timeout_millis: file.max_timeout,
            cgroup: file.cgroup.unwrap_or_else(|| "atoll".into()),
            confine: file.confine.unwrap_or_default(),
            log_format: args.log_format.or(file.log_format),
            otlp_endpoint: file
                .otlp_endpoint
                .or_else(|| std::env::var("OTEL_EXPORTER_OTLP_ENDPOINT").ok())
                .filter(|url| !url.is_empty()),
            metrics_key: file.metrics_key,
            tls: file.tls,
            sizes: file.sandbox.read()?,
            pools: if args.pool.is_empty() {
                file.pool
            } else {
                args.pool.clone()
            },
            network: file.network.into(),
            limits: file.limits,
            keep_model_bodies: file.models.keep_bodies.map(Duration::from_millis),
            model_timeouts: file.models.into(),
            e2b_internet: file.e2b.internet.unwrap_or(true),
            templates,
            data,
        })
    }

    /// The certificate to serve TLS with, wherever that is.
    pub(crate) fn certificate(&self) -> Option<Tls> {
        self.tls.clone().or_else(|| self.e2b_tls.then(Tls::default))
    }

    /// For a server inside a CLI command: the same data, an ephemeral port on loopback, no pools.
    pub(crate) fn embedded(data: Option<&Path>) -> Result<Self> {
        let args = ServerArgs {
            listen: Some(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))),
            templates: std::env::var_os("ATOLL_TEMPLATES").map(PathBuf::from),
            // Whoever runs this is the only tenant. Each sandbox says which wall it got.
            isolation: Some(Isolation::Jail),
            ..ServerArgs::default()
        };
        Self::load(&args, data)
    }
}

/// The domain that ports of sandboxes appear under. Clients that verify names take no certificate for `*.localhost`, nor for all
/// below any other name without a dot.
fn domain(given: Option<String>, with_tls: bool) -> Result<String> {
    match given {
        Some(domain) if with_tls && !domain.contains('.') => Err(Error::new(format!(
            "no client takes a certificate for `*.{domain}`: a name below it is needed for TLS"
        ))
        .hint(format!("for example --domain e2b.{domain}"))),
        Some(domain) => Ok(domain),
        None if with_tls => Ok("e2b.localhost".into()),
        None => Ok("localhost".into()),
    }
}

/// A path in a variable of the environment; an empty one is none.
fn path_in(variable: &str) -> Option<PathBuf> {
    std::env::var_os(variable)
        .filter(|path| !path.is_empty())
        .map(PathBuf::from)
}

/// `ATOLL_RUNSC`, then what `./atoll` has built, then the one in `PATH`.
fn find_runsc() -> Option<PathBuf> {
    let given = path_in("ATOLL_RUNSC");
    if given.as_ref().is_some_and(|path| path.as_os_str() == "none") {
        return None;
    }
    let cache = std::env::var_os("ATOLL_CACHE").map(PathBuf::from).or_else(|| {
        if rustix::process::geteuid().is_root() {
            return Some("/var/cache/atoll".into());
        }
        let home = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
        home.or_else(|| std::env::home_dir().map(|home| home.join(".cache")))
            .map(|dir| dir.join("atoll"))
    });
    let cached = cache.map(|dir| dir.join(format!("runsc-{RUNSC_VERSION}")));
    given
        .or_else(|| cached.filter(|path| path.is_file()))
        .or_else(|| find_in_path("runsc"))
}

/// The version that the suite passes on; `scripts/setup.bash` builds it.
pub(crate) const RUNSC_VERSION: &str = "20260905.5";

/// Less would be gone before anybody could read it; a size without its unit is the likeliest mistake.
const LEAST_LEDGER: u64 = 64 * 1024;

fn enough_ledger(bytes: u64) -> Result<u64> {
    if bytes >= LEAST_LEDGER {
        return Ok(bytes);
    }
    Err(Error::new(format!(
        "`max_ledger` is {bytes} bytes, and must be at least {LEAST_LEDGER}"
    ))
    .hint("write a unit: \"2G\"; what is beyond it is deleted when the server starts"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workflows_are_served_beside_the_api_unless_told_otherwise() {
        let served = |listen: Option<&str>, workflows: Option<&str>| {
            let args = ServerArgs {
                listen: listen.map(|text| text.parse().unwrap()),
                workflows_listen: workflows.map(|text| text.parse().unwrap()),
                ..ServerArgs::default()
            };
            let config = Config::load(&args, None).unwrap();
            config.workflows_listen.map(|address| address.to_string())
        };
        assert_eq!(served(None, None).as_deref(), Some("127.0.0.1:7233"));
        assert_eq!(served(Some("0.0.0.0:80"), None).as_deref(), Some("0.0.0.0:7233"));
        assert_eq!(served(Some("[::1]:0"), None).as_deref(), Some("[::1]:0"));
        assert_eq!(
            served(Some("0.0.0.0:80"), Some("127.0.0.1:9")).as_deref(),
            Some("127.0.0.1:9")
        );
        assert_eq!(served(None, Some("off")), None);
        assert!(toml::from_str::<ConfigFile>("workflows_listen = \"on\"").is_err());
    }

    #[test]
    fn tls_for_e2bs_clients_has_a_domain_that_a_certificate_can_be_for() {
        let load = |e2b: bool, domain: Option<&str>| {
            let args = ServerArgs {
                e2b,
                domain: domain.map(str::to_owned),
                ..ServerArgs::default()
            };
            let config = Config::load(&args, None)?;
            Ok::<_, Error>((config.domain.clone(), config.certificate().is_some()))
        };
        assert_eq!(load(false, None).unwrap(), ("localhost".into(), false));
        assert_eq!(load(true, None).unwrap(), ("e2b.localhost".into(), true));
        assert_eq!(
            load(true, Some("boxes.test")).unwrap(),
            ("boxes.test".into(), true)
        );
        assert_eq!(load(false, Some("boxes")).unwrap(), ("boxes".into(), false));
        let refused = load(true, Some("localhost")).unwrap_err().to_string();
        assert!(refused.contains("*.localhost"), "{refused}");
    }

    #[test]
    fn the_network_is_read() {
        let file: ConfigFile = toml::from_str(
            r#"
            secrets_key = "/etc/atoll/secrets.key"
            [network]
            default = "package-registries"
            allow_private = ["10.1.0.0/16"]
            deny = ["*.internal.example", "203.0.113.0/24"]
            resolvers = ["192.0.2.53", "[2001:db8::53]:5353"]
            extra_roots = "/etc/atoll/roots.pem"
            ready_links = 2
            "#,
        )
        .unwrap();
        assert_eq!(file.secrets_key, Some("/etc/atoll/secrets.key".into()));
        let network = NetworkConfig::from(file.network);
        assert_eq!(
            network,
            NetworkConfig {
                enabled: true,
                default: Preset::PackageRegistries,
                allow_private: vec!["10.1.0.0/16".into()],
                deny: vec!["*.internal.example".into(), "203.0.113.0/24".into()],
                resolvers: vec![
                    "192.0.2.53:53".parse().unwrap(),
                    "[2001:db8::53]:5353".parse().unwrap()
                ],
                extra_roots: Some("/etc/atoll/roots.pem".into()),
                ready_links: 2,
            }
        );
        let default = NetworkConfig::from(NetworkTable::default());
        assert_eq!(
            (default.enabled, default.default, default.ready_links),
            (true, Preset::None, 8)
        );
        for wrong in [
            "[network]\ndefault = \"all\"",
            "[network]\nresolvers = [\"dns.example\"]",
            "[network]\nalow_private = []",
        ] {
            assert!(toml::from_str::<ConfigFile>(wrong).is_err(), "{wrong}");
        }
    }
}
