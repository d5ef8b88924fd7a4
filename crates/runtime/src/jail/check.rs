//! Whether jails can be built on this machine: first by looking, then by building one.
//!
//! What must hold: whatever is lacking is said apart from what to do about it, so that doctor, a refusal and the API can each
//! put the two where they belong.

use std::sync::Arc;

use atoll_types::{DiskBacking, InstanceId, Resources};

use super::{Jail, Privilege};
use crate::cgroup::{CgroupError, Group, Hierarchy};
use crate::{Config, InstanceSpec, Runtime};

/// Why there can be no jails here, and what a person can do about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lacking {
    pub reason: String,
    pub remedy: String,
}

impl Lacking {
    fn new(reason: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self {
            reason: reason.into(),
            remedy: remedy.into(),
        }
    }

    /// Of a jail that could not be built although everything seems to be there.
    fn of_trial(error: impl std::fmt::Display) -> Self {
        Self::new(
            error.to_string(),
            "see the reason; the kernel's log (dmesg) may tell more",
        )
    }
}

impl std::fmt::Display for Lacking {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}; {}", self.reason, self.remedy)
    }
}

/// Whether jails can be built here, by looking: what to know about them, or why not and what to do.
pub fn check(config: &Config) -> Result<String, Lacking> {
    let landlock = atoll_jailer::landlock::check()
        .map_err(|reason| Lacking::new(reason, atoll_jailer::landlock::REMEDY))?;
    if !config.jailer_binary.exists() {
        let reason = format!("{} is missing", config.jailer_binary.display());
        return Err(Lacking::new(reason, "build or install atoll-jailer"));
    }
    let filesystems = std::fs::read_to_string("/proc/filesystems").unwrap_or_default();
    has_filesystems(&filesystems, Privilege::own())?;
    if std::fs::read_to_string("/proc/sys/user/max_user_namespaces").is_ok_and(|max| max.trim() == "0") {
        return Err(Lacking::new(
            "user namespaces are switched off",
            "allow some: sysctl user.max_user_namespaces=10000",
        ));
    }
    let cgroups =
        "run as root, or have a cgroup of all controllers delegated to this user and mounted writable";
    limits_hold(config).map_err(|error| {
        Lacking::new(
            format!("CPU, memory and process limits cannot be enforced: {error}"),
            cgroups,
        )
    })?;
    let version = match Hierarchy::detect().map_err(|error| Lacking::new(error.to_string(), cgroups))? {
        Hierarchy::V1 { .. } => "v1",
        Hierarchy::V2 { .. } => "v2",
    };
    let ids = match Privilege::own() {
        Privilege::Root => "own id range",
        Privilege::Ordinary => {
            "run by an ordinary user: one id, template extracted, writable layer in memory only"
        }
    };
    Ok(format!(
        "not a tenant boundary: shares the host's kernel; {ids}, seccomp, Landlock {landlock}, cgroup {version}"
    ))
}

/// Root mounts images and so needs their filesystem; an ordinary user's are extracted.
fn has_filesystems(known: &str, privilege: Privilege) -> Result<(), Lacking> {
    let needed: &[&str] = match privilege {
        Privilege::Root => &["erofs", "overlay"],
        Privilege::Ordinary => &["overlay"],
    };
    let missing = needed
        .iter()
        .find(|name| !known.split_whitespace().any(|word| word == **name));
    match missing {
        None => Ok(()),
        Some(name) => Err(Lacking::new(
            format!("this kernel has no {name} filesystem, or its module is not loaded"),
            format!("load it: modprobe {name}"),
        )),
    }
}

/// [`check`], and then proof: boots a jail around the agent alone and destroys it, once with its writable layer on disk and
/// once in memory, if it has to. Also says why it cannot be on disk, if so. Takes some 10 ms.
pub async fn trial(config: &Config) -> Result<(String, Option<String>), Lacking> {
    let detail = check(config)?;
    let no_disk = match try_once(config, DiskBacking::Disk).await {
        Ok(()) => None,
        Err(lacking) => {
            try_once(config, DiskBacking::Memory).await?;
            Some(lacking.reason)
        }
    };
    Ok((detail, no_disk))
}

async fn try_once(config: &Config, disk_backing: DiskBacking) -> Result<(), Lacking> {
    let mut entropy = [0; 20];
    getrandom::fill(&mut entropy).map_err(Lacking::of_trial)?;
    let spec = InstanceSpec {
        id: InstanceId::from_entropy(entropy),
        image: vec![config.guest_image.clone()],
        resources: Resources {
            disk_backing,
            ..Resources::default()
        },
        hostname: "trial".into(),
        restore: None,
        mounts: Vec::new(),
        network: None,
    };
    let jail = Jail::new(Arc::new(config.clone())).map_err(Lacking::of_trial)?;
    let instance = jail.start(spec).await.map_err(Lacking::of_trial)?;
    jail.destroy(&instance.id).await.map_err(Lacking::of_trial)
}

/// Makes a cgroup with limits and removes it.
fn limits_hold(config: &Config) -> Result<(), CgroupError> {
    let name = format!("probe-{}", std::process::id());
    let group = Group::create(&config.cgroup_parent, &name, &Resources::default())?;
    for dir in group.procs_files().iter().filter_map(|file| file.parent()) {
        std::fs::remove_dir(dir)
            .map_err(|error| CgroupError::io(format!("removing {}", dir.display()), error))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_comes_with_what_to_do() {
        let all = "nodev\ttmpfs\n\terofs\nnodev\toverlay\n";
        assert_eq!(has_filesystems(all, Privilege::Root), Ok(()));
        let without = has_filesystems("nodev\toverlay\n", Privilege::Root).unwrap_err();
        assert_eq!(without.remedy, "load it: modprobe erofs");
        assert!(!without.reason.contains("modprobe"), "{without}");
        assert_eq!(
            has_filesystems("nodev\toverlay\n", Privilege::Ordinary),
            Ok(()),
            "an ordinary user mounts no images"
        );
    }

    #[tokio::test]
    async fn a_probe_says_what_to_do_about_a_jail_that_cannot_be() {
        use crate::probe::{Verdict, probe};
        let state = tempfile::tempdir().unwrap();
        let config = Config {
            state_dir: state.path().to_owned(),
            guest_binary: state.path().join("absent"),
            guest_image: state.path().join("absent"),
            jailer_binary: state.path().join("absent"),
            runsc: None,
            cgroup_parent: "atoll-test-absent".into(),
        };
        let probes = probe(&config).await;
        let jail = probes
            .iter()
            .find(|probe| probe.isolation == atoll_types::Isolation::Jail);
        match &jail.unwrap().verdict {
            Verdict::Unavailable { remedy: Some(_), .. } => {}
            other => panic!("{other:?}"),
        }
    }
}
