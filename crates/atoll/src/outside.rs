//! Opens the way out of sandboxes: links, the proxy at their end, and the key that secrets are sealed with.

use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::path::Path;
use std::sync::Arc;

use atoll_broker::{Broker, MasterKey};
use atoll_client::output::{Doing, Result};
use atoll_egress::{Answers, AsDialled, Callers, Egress, InterceptConfig, Service, Sockets};
use atoll_helper::front::Helper;
use atoll_links::{Links, LinksConfig};
use atoll_policy::{Floor, FloorConfig};
use atoll_sandboxes::{Outside, Recorder, WayOut};
use atoll_types::NetworkPolicy;

use crate::config::{Config, NetworkConfig};

/// May hold the key of the secrets itself, for those who keep no file.
const KEY: &str = "ATOLL_SECRETS_KEY";

/// The name under which sandboxes find the model gateway.
const MODELS: &str = "models.atoll.internal";

/// What the configuration gets wrong is an error; what the machine lacks is a server whose sandboxes reach nothing.
/// `models` is where the gateway listens for sandboxes, if it does, and where it is told which of them comes.
pub(crate) async fn open(
    config: &Config,
    data: &Path,
    models: Option<(SocketAddr, Callers)>,
    helper: Option<&Helper>,
) -> Result<Outside> {
    let key = master_key(config, data)?;
    let broker = Arc::new(Broker::new(&key).doing("cannot open the key of the secrets")?);
    let recorder = Arc::new(Recorder::default());
    let service = match models {
        Some((address, callers)) => Some(Service {
            name: MODELS.parse().doing("the name of the model gateway")?,
            address,
            callers,
        }),
        None => None,
    };
    let way = match way_out(&config.network, data, key, &broker, &recorder, service, helper).await? {
        Ok(way) => Ok(way),
        Err(why) => {
            tracing::warn!(why, "sandboxes of this server reach nothing");
            Err(why)
        }
    };
    Ok(Outside {
        way,
        broker,
        recorder,
    })
}

/// What nobody reaches by way of this server but its operator.
pub(crate) fn floor(config: &NetworkConfig) -> Result<Floor> {
    Floor::new(&FloorConfig {
        allow_private: config.allow_private.clone(),
        deny: config.deny.clone(),
        // Also where there is no gateway: nobody else is asked for its name.
        internal: vec![MODELS.parse().doing("the name of the model gateway")?],
    })
    .doing("the configuration of the network is not right")
}

/// The key of the secrets: given, or made when there is none.
pub(crate) fn master_key(config: &Config, data: &Path) -> Result<MasterKey> {
    let given = std::env::var_os(KEY).filter(|key| !key.is_empty());
    let key = match (given, &config.secrets_key) {
        (Some(key), _) => MasterKey::parse(key.as_encoded_bytes(), &format!("the variable {KEY}")),
        (None, Some(path)) => MasterKey::load(path),
        (None, None) => MasterKey::load_or_create(&data.join("secrets.key")),
    };
    key.doing("cannot open the key of the secrets")
}

async fn way_out(
    config: &NetworkConfig,
    data: &Path,
    key: MasterKey,
    broker: &Arc<Broker>,
    recorder: &Arc<Recorder>,
    service: Option<Service>,
    helper: Option<&Helper>,
) -> Result<std::result::Result<WayOut, String>> {
    let models = service.as_ref().map(|service| service.name.clone());
    let floor = floor(config)?;
    if !config.enabled {
        return Ok(Err("it is switched off in the configuration".into()));
    }
    let started = match helper {
        Some(helper) => helper.links().await.map_err(|error| error.to_string()),
        None => {
            let config = LinksConfig {
                state_dir: data.join("network"),
                ready: config.ready_links,
            };
            Links::start(config).await.map_err(|error| error.to_string())
        }
    };
    let (links, sockets) = match started {
        Ok(started) => started,
        Err(error) => return Ok(Err(error)),
    };
    let settings = atoll_egress::Config {
        resolvers: config.resolvers.clone(),
        service,
        ..atoll_egress::Config::new(InterceptConfig {
            key,
            extra_roots: config.extra_roots.clone(),
        })
    };
    let sockets = Sockets {
        tcp4: sockets.tcp4,
        tcp6: sockets.tcp6,
        dns4: sockets.dns4,
        dns6: sockets.dns6,
        udp4: sockets.udp4,
        udp6: sockets.udp6,
        answers: Arc::new(FromGateway(links.clone())),
        origin: Arc::new(AsDialled),
    };
    let egress = Egress::start(settings, sockets, Arc::clone(broker), Arc::clone(recorder) as _)
        .doing("cannot open the way out of sandboxes")?;
    Ok(Ok(WayOut {
        links,
        egress,
        floor,
        default: NetworkPolicy {
            preset: Some(config.default),
            ..NetworkPolicy::default()
        },
        models,
    }))
}

/// Sends to guests from where they wrote to.
struct FromGateway(Links);

impl Answers for FromGateway {
    fn from(&self, address: SocketAddr) -> io::Result<UdpSocket> {
        self.0.answer_from(address)
    }
}
