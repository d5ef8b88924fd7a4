//! The configuration file. The doc comments are its reference:
//!
//! ```toml
//! listen = "0.0.0.0:7070"
//! domain = "sandboxes.example.com"
//! isolation = "gvisor"
//!
//! [[pool]]
//! template = "base"
//! count = 4
//! memory = "512M"
//!
//! [network]
//! default = "package-registries"
//! allow_private = ["10.1.0.0/16"]
//! ```
//!
//! A key that is not known is refused.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use atoll_client::output::{Error, Result};
use atoll_providers::Timeouts;
use atoll_types::{Isolation, Preset, parse_bytes};
use serde::{Deserialize, Deserializer};

use super::Pool;
use super::sizes::SandboxTable;
use crate::args::{LogFormat, parse_duration};
use crate::limits::LimitsTable;

/// Where workflows are served, if they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WorkflowsListen {
    Off,
    At(SocketAddr),
}

impl FromStr for WorkflowsListen {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        if text == "off" {
            return Ok(Self::Off);
        }
        let address = text.parse().map(Self::At);
        address.map_err(|_| {
            format!("`{text}` is neither an address with a port, such as 127.0.0.1:7233, nor `off`")
        })
    }
}

impl<'de> Deserialize<'de> for WorkflowsListen {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        String::deserialize(deserializer)?
            .parse()
            .map_err(serde::de::Error::custom)
    }
}
/// How much the server insists on being confined.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Confine {
    Off,
    /// As far as the machine can.
    #[default]
    On,
    /// Entirely, or the server does not start.
    Required,
}

/// The file given with `--config`. Every key is optional.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct ConfigFile {
    /// Address and port of the API and of sandbox ports. Default: `127.0.0.1:7070`.
    pub(crate) listen: Option<SocketAddr>,
    /// Address and port of durable workflows (gRPC, for Temporal's SDKs), or `off`. Default: port 7233 on the address of
    /// `listen`; any free port if that has any.
    pub(crate) workflows_listen: Option<WorkflowsListen>,
    /// Domain under which sandbox ports appear, as `{port}-{sandbox}.{domain}`. Default: `localhost`, which browsers and
    /// curl resolve to this machine by themselves.
    pub(crate) domain: Option<String>,
    /// `https` where a TLS terminator stands in front of the server: what the URLs of sandbox ports begin with. Default:
    /// `http`.
    pub(crate) public_scheme: Option<String>,
    /// The port in the URLs of sandbox ports. Default: the one that the request came to.
    pub(crate) public_port: Option<u16>,
    /// Directory of everything that the server keeps. Default: `/var/lib/atoll` as root, else `~/.local/share/atoll`.
    pub(crate) data: Option<PathBuf>,
    /// Directory of the templates. Servers may share one. Default: `templates` in the data directory.
    pub(crate) templates: Option<PathBuf>,
    /// The `runsc` to use, or `none`. Default: `ATOLL_RUNSC`, then what `./atoll` has built, then the one in `PATH`.
    pub(crate) runsc: Option<PathBuf>,
    /// The weakest isolation of sandboxes whose creator names none; the strongest that works is used. Default: `gvisor`, the
    /// weakest that is a tenant boundary. `jail` is for machines with one tenant.
    pub(crate) isolation: Option<Isolation>,
    /// Sandboxes of one project that live at once, at most. Default: 10000.
    pub(crate) max_sandboxes: Option<u64>,
    /// Disk space that snapshots, resting sandboxes, volumes and artifacts of one project may take, such as `"100G"`.
    /// Default: as much as there is.
    #[serde(deserialize_with = "bytes")]
    pub(crate) max_storage: Option<u64>,
    /// How much of the disk that the data directory is on is kept free of new sandboxes, such as `"10G"`: with less, none is
    /// created or resumed whose files are on disk. What runs writes on. Default: 1 GiB.
    #[serde(deserialize_with = "bytes")]
    pub(crate) min_free_disk: Option<u64>,
    /// Disk space that the workflows of one project may take, running and closed, such as `"100G"`: their histories, payloads
    /// and search attributes. Beyond it nothing is started or signalled; what runs may take an eighth more. Default: 10 GiB.
    #[serde(deserialize_with = "bytes")]
    pub(crate) max_workflow_storage: Option<u64>,
    /// Disk space that what is left of one project's doings may take, such as `"10G"`: facts, model calls, instances and ended
    /// sandboxes. Beyond it the oldest go; facts about keys, secrets, policies, budgets, providers and approvals may take as much
    /// again. Default: 2 GiB.
    #[serde(deserialize_with = "bytes")]
    pub(crate) max_ledger: Option<u64>,
    /// How long artifacts are kept whose creator did not say, such as `"90d"`. Default: 30 days.
    #[serde(deserialize_with = "duration")]
    pub(crate) artifact_retention: Option<u64>,
    /// How long the ledger and the rows of model calls remember, such as `"90d"`; usage that is older is in no sum. Default: 400
    /// days.
    #[serde(deserialize_with = "duration")]
    pub(crate) ledger_retention: Option<u64>,
    /// A file with the key (32 bytes, or 64 hexadecimal digits) that saved state is encrypted with on the disk; readable by
    /// the server's user alone. Default: `ATOLL_VAULT_KEY_FILE`, or no encryption. Losing it loses what was saved.
    pub(crate) vault_key: Option<PathBuf>,
    /// A file with the key (32 bytes, or 64 hexadecimal digits) that secrets are encrypted with in the database; readable
    /// by the server's user alone. Default: `ATOLL_SECRETS_KEY_FILE`, or `secrets.key` in the data directory, which is made
    /// when it is first needed. `ATOLL_SECRETS_KEY` in the environment, the key itself in hexadecimal digits, wins over both. Losing it loses the secrets; keep it away from backups of the rest.
    pub(crate) secrets_key: Option<PathBuf>,
    /// Whether a pause waits until what it saved is on the disk itself. `false` is for benchmarks: a crash of the machine
    /// may then lose what was acknowledged. Default: `true`.
    pub(crate) durable_saves: Option<bool>,
    /// Lifetime of a sandbox whose creator did not say, such as `"15m"`. Default: 15 minutes.
    #[serde(deserialize_with = "duration")]
    pub(crate) default_timeout: Option<u64>,
    /// The longest lifetime that can be asked for, such as `"24h"`. Default: 24 hours.
    #[serde(deserialize_with = "duration")]
    pub(crate) max_timeout: Option<u64>,
    /// Name of the parent of all cgroups of this server. Default: `atoll`.
    pub(crate) cgroup: Option<String>,
    /// Whether the server takes from itself what it does not need: `on` (what this machine can; the log and `atoll doctor`
    /// say what), `required` (it does not start without all of it) or `off`. Default: `on`.
    pub(crate) confine: Option<Confine>,
    /// `pretty`, `plain` or `json`. What is logged is chosen by `ATOLL_LOG`, such as `ATOLL_LOG=atoll=debug`.
    pub(crate) log_format: Option<LogFormat>,
    /// Where traces go: the base URL of an OTLP/HTTP collector. Default: `OTEL_EXPORTER_OTLP_ENDPOINT`.
    pub(crate) otlp_endpoint: Option<String>,
    /// A file with a secret of at least 16 characters that opens `/metrics` and `/metrics/models` and nothing else; readable by
    /// the server's user alone. Default: none, so that only keys of the project `default` open them.
    pub(crate) metrics_key: Option<PathBuf>,
    /// Also serve HTTPS, as E2B's SDKs want it where they find sandboxes by `{port}-{sandbox}.{domain}`.
    pub(crate) tls: Option<Tls>,
    /// How large sandboxes are that do not say, and may be.
    pub(crate) sandbox: SandboxTable,
    /// Sandboxes kept ready to be claimed.
    pub(crate) pool: Vec<Pool>,
    /// What leaves sandboxes.
    pub(crate) network: NetworkTable,
    /// What is held for whom, and how long anybody is waited for.
    pub(crate) limits: LimitsTable,
    /// Calls of models.
    pub(crate) models: ModelsTable,
    /// How E2B's wire differs from our own.
    pub(crate) e2b: E2bTable,
}

/// The `[models]` table: how long providers of models are waited for. Every key is optional.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct ModelsTable {
    /// Until a connection is made, such as `"10s"`. Default: 10 seconds.
    #[serde(deserialize_with = "duration")]
    pub(crate) connect_timeout: Option<u64>,
    /// From a request to the beginning of its answer. A model that is not streamed thinks before it answers. Default: 10
    /// minutes.
    #[serde(deserialize_with = "duration")]
    pub(crate) first_byte_timeout: Option<u64>,
    /// Between two pieces of an answer. Default: 2 minutes.
    #[serde(deserialize_with = "duration")]
    pub(crate) idle_timeout: Option<u64>,
    /// For how long to keep what was asked and answered, such as `"7d"`: redacted and shortened, for `atoll spend --call`.
    /// Default: it is not kept.
    #[serde(deserialize_with = "duration")]
    pub(crate) keep_bodies: Option<u64>,
}

impl From<ModelsTable> for Timeouts {
    fn from(table: ModelsTable) -> Self {
        let default = Self::default();
        let or = |millis: Option<u64>, default| millis.map_or(default, Duration::from_millis);
        Self {
            connect: or(table.connect_timeout, default.connect),
            first_byte: or(table.first_byte_timeout, default.first_byte),
            idle: or(table.idle_timeout, default.idle),
        }
    }
}

/// The `[e2b]` table. Every key is optional.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct E2bTable {
    /// Whether sandboxes that E2B's SDKs make, and the steps of their template builds, reach the public internet unless the
    /// request says otherwise, as they do at E2B: what the preset `all-public` allows. With `false`, the template and
    /// `default` of `[network]` decide, as for everybody else. Default: `true`.
    pub(crate) internet: Option<bool>,
    /// Whether the API's own port speaks TLS beside plain HTTP, for the domain and all below it, which every version of E2B's
    /// SDKs wants: with the certificate of `[tls]`, else with one of the local authority. The domain is then `e2b.localhost`
    /// unless it is named. `atoll e2b env` says how clients find it. Default: `false`; `atoll server --e2b` is the same as `true`.
    pub(crate) tls: Option<bool>,
}

/// The `[network]` table. Every key is optional.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct NetworkTable {
    /// Whether sandboxes can reach anything at all. Default: `true`, where the machine can (`atoll doctor` says so).
    pub(crate) enabled: Option<bool>,
    /// What a sandbox may reach of which neither its creator nor its template says anything: `none`, `package-registries` or
    /// `all-public`. Default: `none`.
    pub(crate) default: Option<Preset>,
    /// Ranges of addresses that sandboxes may be allowed to reach although they are not public, such as `"10.1.0.0/16"`.
    /// A sandbox still needs a rule that allows them. Default: none.
    pub(crate) allow_private: Vec<String>,
    /// Names (`"*.example.com"` for all below one) and ranges of addresses that no sandbox reaches, whatever its rules say.
    /// Default: none beside those that are built in.
    pub(crate) deny: Vec<String>,
    /// The resolvers that names are looked up with, such as `"192.0.2.53"` or `"192.0.2.53:5353"`. Default: those of this
    /// machine.
    #[serde(deserialize_with = "resolvers")]
    pub(crate) resolvers: Vec<SocketAddr>,
    /// A file with certificates (PEM) of authorities to trust beside the public ones, where Atoll itself speaks TLS to a
    /// server. Default: none.
    pub(crate) extra_roots: Option<PathBuf>,
    /// How many links are kept ready for sandboxes that come. Default: 8.
    pub(crate) ready_links: Option<usize>,
}

/// HTTPS beside plain HTTP.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Tls {
    /// Address and port. Default: `127.0.0.1:7443`.
    pub(crate) listen: Option<SocketAddr>,
    /// A PEM file with the certificate and what leads to its authority, for the domain and `*.` of it. Default: one that a
    /// local authority signs, which clients must be told to trust: `tls/ca.pem` in the data directory.
    pub(crate) certificate: Option<PathBuf>,
    /// The PEM file with its key.
    pub(crate) key: Option<PathBuf>,
}

pub(super) fn read(path: &Path) -> Result<ConfigFile> {
    let text = std::fs::read_to_string(path)
        .map_err(|e| Error::new(format!("cannot read the configuration {}: {e}", path.display())))?;
    toml::from_str(&text).map_err(|e| {
        Error::new(format!(
            "the configuration {} is not right: {}",
            path.display(),
            e.to_string().trim_end()
        ))
    })
}

pub(crate) fn bytes<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> std::result::Result<Option<u64>, D::Error> {
    let text = String::deserialize(deserializer)?;
    parse_bytes(&text).map(Some).map_err(serde::de::Error::custom)
}

/// Addresses with or without a port.
fn resolvers<'de, D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Vec<SocketAddr>, D::Error> {
    let read = |text: String| {
        let address = text
            .parse()
            .or_else(|_| text.parse::<IpAddr>().map(|address| SocketAddr::new(address, 53)));
        address.map_err(|_| {
            serde::de::Error::custom(format!(
                "`{text}` is not the address of a resolver; write for example 192.0.2.53 or [2001:db8::53]:5353"
            ))
        })
    };
    let texts: Vec<String> = Vec::deserialize(deserializer)?;
    texts.into_iter().map(read).collect()
}

pub(crate) fn duration<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> std::result::Result<Option<u64>, D::Error> {
    let text = String::deserialize(deserializer)?;
    parse_duration(&text).map(Some).map_err(serde::de::Error::custom)
}

#[cfg(test)]
mod tests {
    use atoll_types::{DiskBacking, MIB};

    use super::*;

    #[test]
    fn the_file_is_read_and_unknown_keys_are_refused() {
        let file: ConfigFile = toml::from_str(
            r#"
            listen = "0.0.0.0:80"
            default_timeout = "15m"
            isolation = "gvisor"
            [[pool]]
            template = "base"
            count = 3
            memory = "256M"
            cpu = 2
            disk_backing = "disk"
            "#,
        )
        .unwrap();
        assert_eq!(file.pool[0].resources.disk_backing, Some(DiskBacking::Disk));
        assert_eq!(file.default_timeout, Some(900_000));
        assert_eq!(file.pool[0].resources.memory_bytes, Some(256 * MIB));
        assert_eq!(file.pool[0].resources.cpu_millis, Some(2000));
        let wrong = toml::from_str::<ConfigFile>("lissten = \"x\"")
            .unwrap_err()
            .to_string();
        assert!(wrong.contains("lissten") && wrong.contains("listen"), "{wrong}");
    }

    #[test]
    fn a_server_is_confined_unless_told_otherwise() {
        let confine = |text: &str| toml::from_str::<ConfigFile>(text).map(|file| file.confine);
        assert_eq!(confine("").unwrap().unwrap_or_default(), Confine::On);
        for (word, meant) in [
            ("on", Confine::On),
            ("off", Confine::Off),
            ("required", Confine::Required),
        ] {
            assert_eq!(confine(&format!("confine = \"{word}\"")).unwrap(), Some(meant));
        }
        for wrong in ["confine = true", "confine = \"maybe\""] {
            assert!(confine(wrong).is_err(), "{wrong}");
        }
    }
}
