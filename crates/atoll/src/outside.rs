//! Opens the way out of sandboxes: links, the proxy at their end, and the key that secrets are sealed with.

use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::path::Path;
use std::sync::Arc;

use atoll_broker::{Broker, MasterKey};
use atoll_client::output::{Doing, Result};
use atoll_egress::{Answers, AsDialled, Callers, Egress, InterceptConfig, Service, Sockets};
use atoll_helper::front::Helper;
use atoll_links::{Links, LinksConfig};
use atoll_node::{Outside, Recorder, WayOut};
use atoll_policy::{Decision, Floor, FloorConfig, Name};
use atoll_types::NetworkPolicy;
use rustix::process::{Resource, getrlimit};

use crate::config::{Config, NetworkConfig};

/// May hold the key of the secrets itself, for those who keep no file.
const KEY: &str = "ATOLL_SECRETS_KEY";

/// The name under which sandboxes find the model gateway.
const MODELS: &str = "models.atoll.internal";

/// What the configuration gets wrong is an error; what the machine lacks is a server whose sandboxes reach nothing.
/// With it comes the broker of the secrets, whom the proxy asks. `models` is where the gateway listens for sandboxes, if it does, and where it is told which of them comes.
pub(crate) async fn open(
    config: &Config,
    data: &Path,
    models: Option<(SocketAddr, Callers)>,
    helper: Option<&Helper>,
) -> Result<(Outside, Arc<Broker>)> {
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
    Ok((Outside { way, recorder }, broker))
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

/// Where registries may lead the server to that pulls an image: nowhere below the floor, and not to this machine.
#[derive(Debug)]
pub(crate) struct BeyondFloor(Floor);

impl BeyondFloor {
    pub(crate) fn new(config: &NetworkConfig) -> Result<Self> {
        Ok(Self(floor(config)?))
    }
}

impl atoll_image::Reach for BeyondFloor {
    fn name(&self, host: &str) -> std::result::Result<(), String> {
        // What is no name is asked about as an address, once it is resolved.
        match Name::parse(host) {
            Ok(name) => refused(self.0.name(&name)),
            Err(_) => Ok(()),
        }
    }

    fn address(&self, address: IpAddr) -> std::result::Result<(), String> {
        let address = address.to_canonical();
        let below = self.0.address(address);
        refused(below.or_else(|| self.0.own_address(address, atoll_egress::is_own)))
    }
}

fn refused(decision: Option<Decision>) -> std::result::Result<(), String> {
    match decision {
        None => Ok(()),
        Some(decision) => Err(format!(
            "{}; where it is meant to, list the range in `allow_private` of `[network]`",
            decision.reason
        )),
    }
}

/// Connections of all sandboxes to the outside: two descriptors each, and the API's own connections may take half of all.
fn most_connections(descriptors: Option<u64>) -> usize {
    let most = descriptors.map_or(usize::MAX, |all| usize::try_from(all / 5).unwrap_or(usize::MAX));
    most.clamp(256, 8192)
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
        max_connections: most_connections(getrlimit(Resource::Nofile).current),
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

#[cfg(test)]
mod tests {
    use atoll_image::Reach as _;

    use super::*;

    fn beyond(allow_private: &[&str]) -> BeyondFloor {
        let config = NetworkConfig {
            enabled: true,
            default: atoll_types::Preset::None,
            allow_private: allow_private.iter().map(|range| (*range).to_owned()).collect(),
            deny: Vec::new(),
            resolvers: Vec::new(),
            extra_roots: None,
            ready_links: 0,
        };
        BeyondFloor::new(&config).unwrap()
    }

    #[test]
    fn registries_lead_to_nothing_below_the_floor_unless_the_operator_allows_it() {
        let address = |beyond: &BeyondFloor, text: &str| beyond.address(text.parse().unwrap());
        let strict = beyond(&[]);
        for text in [
            "127.0.0.1",
            "10.1.2.3",
            "169.254.169.254",
            "::1",
            "::ffff:10.1.2.3",
            "64:ff9b::a01:203",
        ] {
            let refused = address(&strict, text).unwrap_err();
            assert!(refused.contains("allow_private"), "{refused}");
        }
        assert!(address(&strict, "93.184.215.14").is_ok());
        assert!(strict.name("localhost").is_err() && strict.name("metadata.google.internal").is_err());
        assert!(strict.name("registry.example").is_ok());

        let lenient = beyond(&["10.1.0.0/16", "127.0.0.1"]);
        assert!(address(&lenient, "10.1.2.3").is_ok());
        assert!(address(&lenient, "127.0.0.1").is_ok());
        assert!(address(&lenient, "10.2.2.3").is_err());
        assert!(address(&lenient, "169.254.169.254").is_err());
    }
}
