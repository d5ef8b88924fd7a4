//! Which tiers work on this machine, found out by trying.
//!
//! What must hold: a tier is called working only after it has done its work once. Nothing here reads the environment;
//! the caller says where tools are.

use std::path::Path;
use std::sync::Arc;

use atoll_types::{InstanceId, Isolation, MIB, Resources};

use crate::agent::Raiser;
use crate::cgroup::Group;
use crate::gvisor::{self, Gvisor};
use crate::jail::{self, Jail};
use crate::{Config, Error, InstanceSpec, Runtime, Runtimes};

/// What was found about one tier.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Probe {
    pub isolation: Isolation,
    pub verdict: Verdict,
}

#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Verdict {
    Works {
        /// Versions and other things worth knowing.
        detail: String,
        /// Why a writable layer cannot be on disk here; `None` when it can.
        no_disk: Option<String>,
    },
    Unavailable {
        reason: String,
        /// What a person can do about it, if anything.
        remedy: Option<String>,
    },
}

impl Probe {
    pub fn works(&self) -> bool {
        matches!(self.verdict, Verdict::Works { .. })
    }
}

/// Tries every tier, strongest first.
pub async fn probe(config: &Config) -> Vec<Probe> {
    let jail = match jail::trial(config).await {
        Ok((detail, no_disk)) => Verdict::Works { detail, no_disk },
        Err(lacking) => Verdict::Unavailable {
            reason: lacking.reason,
            remedy: Some(lacking.remedy),
        },
    };
    vec![
        Probe {
            isolation: Isolation::Microvm,
            verdict: Verdict::Unavailable {
                reason: "this release has no microvm runtime".into(),
                remedy: None,
            },
        },
        Probe {
            isolation: Isolation::Gvisor,
            verdict: match try_gvisor(config).await {
                Ok(detail) => Verdict::Works {
                    detail,
                    no_disk: None,
                },
                Err((reason, remedy)) => Verdict::Unavailable {
                    reason,
                    remedy: Some(remedy.to_owned()),
                },
            },
        },
        Probe {
            isolation: Isolation::Jail,
            verdict: jail,
        },
    ]
}

/// The runtimes that [`probe`] found to work, strongest first.
pub fn runtimes(config: &Arc<Config>, probes: &[Probe]) -> Result<Runtimes, Error> {
    let found = raisers(config, probes)?;
    Ok(found
        .into_iter()
        .map(|raiser| raiser as Arc<dyn Runtime>)
        .collect())
}

/// The same, for a process that leaves it to another to speak with agents.
pub fn raisers(config: &Arc<Config>, probes: &[Probe]) -> Result<Vec<Arc<dyn Raiser>>, Error> {
    let mut found: Vec<Arc<dyn Raiser>> = Vec::new();
    for probe in probes.iter().filter(|probe| probe.works()) {
        match (probe.isolation, &config.runsc) {
            (Isolation::Gvisor, Some(runsc)) => {
                found.push(Arc::new(Gvisor::new(Arc::clone(config), runsc.clone())?));
            }
            (Isolation::Jail, _) => found.push(Arc::new(Jail::new(Arc::clone(config))?)),
            (Isolation::Gvisor | Isolation::Microvm, _) => {}
        }
    }
    Ok(found)
}

/// The detail, or the reason and the remedy: a verdict is a text for people, so errors end here.
async fn try_gvisor(config: &Config) -> Result<String, (String, &'static str)> {
    const INSTALL: &str = "run ./atoll once, which builds the pinned version, or set ATOLL_RUNSC to a runsc";
    let Some(runsc) = &config.runsc else {
        return Err(("no runsc was found".into(), INSTALL));
    };
    let version = gvisor::version(runsc).map_err(|error| (error.to_string(), INSTALL))?;
    if !rustix::process::geteuid().is_root() {
        return Err(("this user is not root".into(), "run the server as root"));
    }
    if !owns_all_uids() {
        return Err((
            "this user namespace has no user ids to give away".into(),
            "run the server outside a user namespace (a container: with the host's)",
        ));
    }
    let id = random_id().map_err(|error| (error.to_string(), "see the reason"))?;
    let limits = Resources {
        memory_bytes: 256 * MIB,
        ..Resources::default()
    };
    let group = Group::create(&config.cgroup_parent, id.as_str(), &limits)
        .map_err(|error| (error.to_string(), "make cgroups available to the server"))?;
    group
        .remove()
        .await
        .map_err(|error| (error.to_string(), "make cgroups available to the server"))?;
    if !config.guest_image.exists() {
        return Err((
            format!("the agent's image {} is missing", config.guest_image.display()),
            "install Atoll completely: the image is made from the atoll-guest binary",
        ));
    }
    trial(config, runsc, id, limits)
        .await
        .map_err(|error| (error.to_string(), "see the reason; `runsc --debug` tells more"))?;
    Ok(format!("{version}, platform systrap"))
}

/// Boots a sandbox whose root is the agent's own image.
async fn trial(config: &Config, runsc: &Path, id: InstanceId, resources: Resources) -> Result<(), Error> {
    let gvisor = Gvisor::new(Arc::new(config.clone()), runsc.to_owned())?;
    let spec = InstanceSpec {
        id: id.clone(),
        image: vec![config.guest_image.clone()],
        resources,
        hostname: "probe".into(),
        restore: None,
        mounts: Vec::new(),
        network: None,
    };
    gvisor.start(spec).await?;
    gvisor.destroy(&id).await
}

fn owns_all_uids() -> bool {
    std::fs::read_to_string("/proc/self/uid_map").is_ok_and(|map| {
        let fields: Vec<_> = map.split_whitespace().collect();
        fields == ["0", "0", "4294967295"]
    })
}

fn random_id() -> Result<InstanceId, getrandom::Error> {
    let mut entropy = [0; 20];
    getrandom::fill(&mut entropy)?;
    Ok(InstanceId::from_entropy(entropy))
}
