//! What a jail gets beside its template: a saved layer to begin with, volumes and inputs.
//!
//! Everything is handed to the jailer as a path; what has no name on the host (an unlinked file, a shared mount) as that
//! of a descriptor of ours, which therefore has to stay open until the jailer is done.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use atoll_jailer::spec::{self, Spec};

use super::shared::SharedMount;
use super::{BOOT_WITHIN, Jail, Privilege, blocking};
use crate::cause::Doing;
use crate::{Cause, InstanceSpec, Kind, LAYER, Mount, MountSource, Restore, SaveKind};

/// What the jailer itself mounts on.
const TAKEN: [&str; 4] = ["/proc", "/dev", "/sys", "/.atoll"];
/// A slow disk; unpacking takes a tenth of the time.
const RESTORED_PER_SECOND: u64 = 32 << 20;

#[derive(Debug, Default)]
pub(super) struct Extras {
    layer: Option<File>,
    mounts: Vec<spec::Mount>,
    network: Option<PathBuf>,
    _held: Vec<SharedMount>,
}

impl Extras {
    pub(super) async fn of(jail: &Jail, spec: &InstanceSpec) -> Result<Self, Cause> {
        let mut extras = Self::default();
        if let Some(restore) = &spec.restore {
            extras.layer = Some(layer(restore).await?);
        }
        check(&spec.mounts)?;
        if !spec.mounts.is_empty() && jail.privilege == Privilege::Ordinary {
            return Err(unsupported(
                "volumes and inputs in a jail need a server run by root",
            ));
        }
        if let Some(network) = &spec.network {
            if jail.privilege == Privilege::Ordinary {
                return Err(unsupported("a jail with a network needs a server run by root"));
            }
            extras.network = Some(network.namespace.clone());
        }
        for mount in &spec.mounts {
            let source = match &mount.source {
                MountSource::Directory(path) => spec::MountSource::Tree(path.clone()),
                MountSource::Erofs(image) => {
                    let (mounts, path) = (Arc::clone(&jail.mounts), vec![image.clone()]);
                    let shared = blocking(move || Ok(mounts.get(&path))).await;
                    match shared.doing(|| format!("mounting {}", image.display()))? {
                        Some(shared) => {
                            let source = spec::MountSource::Tree(shared.path());
                            extras._held.push(shared);
                            source
                        }
                        None => spec::MountSource::Image(image.clone()),
                    }
                }
            };
            extras.mounts.push(spec::Mount {
                read_only: mount.read_only || matches!(mount.source, MountSource::Erofs(_)),
                at: mount.path.clone().into(),
                source,
            });
        }
        Ok(extras)
    }

    pub(super) fn add_to(&self, spec: &mut Spec) {
        let of_ours = |file: &File| format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()).into();
        spec.layer = self.layer.as_ref().map(of_ours);
        spec.mounts.clone_from(&self.mounts);
        spec.network.clone_from(&self.network);
    }

    /// How long the start may take.
    pub(super) fn within(&self) -> Duration {
        let bytes = self.layer.as_ref().and_then(|layer| layer.metadata().ok());
        BOOT_WITHIN + Duration::from_secs(bytes.map_or(0, |layer| layer.len() / RESTORED_PER_SECOND))
    }
}

async fn layer(restore: &Restore) -> Result<File, Cause> {
    if restore.kind == SaveKind::Memory {
        let why = "a jail cannot go on from saved memory; restore its filesystem only";
        return Err(Cause::new(Kind::Saved, why));
    }
    if !restore.source.names().iter().any(|name| name == LAYER) {
        let why = "what was saved is not of a jail: it has no stream `layer`";
        return Err(Cause::new(Kind::Saved, why));
    }
    let opened = restore.source.file(LAYER).await;
    opened.doing(|| "what was saved cannot be read")
}

fn unsupported(why: impl Into<String>) -> Cause {
    Cause::new(Kind::Unsupported, why)
}

/// For every tier.
pub(crate) fn check(mounts: &[Mount]) -> Result<(), Cause> {
    for (at, mount) in mounts.iter().enumerate() {
        let path = Path::new(&mount.path);
        let plain = |part: std::path::Component<'_>| {
            matches!(
                part,
                std::path::Component::Normal(_) | std::path::Component::RootDir
            )
        };
        if !path.is_absolute()
            || path.parent().is_none()
            || !path.components().all(plain)
            || mount.path.contains('\0')
        {
            return Err(unsupported(format!(
                "`{}` is not an absolute path of plain names",
                mount.path
            )));
        }
        if let Some(taken) = TAKEN.iter().find(|taken| path.starts_with(taken)) {
            return Err(unsupported(format!(
                "nothing can be mounted on {}: {taken} is the sandbox's own",
                mount.path
            )));
        }
        let within =
            |other: &&Mount| path.starts_with(&other.path) || Path::new(&other.path).starts_with(path);
        if let Some(other) = mounts[..at].iter().find(within) {
            return Err(unsupported(format!(
                "{} and {} lie within each other",
                other.path, mount.path
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mount(path: &str) -> Mount {
        Mount {
            source: MountSource::Directory("/v".into()),
            path: path.into(),
            read_only: false,
        }
    }

    #[test]
    fn mounts_lie_beside_each_other_and_not_on_ours() {
        check(&[mount("/data"), mount("/data2"), mount("/home/user/x")]).unwrap();
        for path in [
            "/", "data", "", "/a/../b", "/proc", "/dev/shm", "/.atoll", "/sys/x",
        ] {
            assert!(check(&[mount(path)]).is_err(), "{path}");
        }
        for (one, two) in [("/a", "/a/b"), ("/a/b", "/a"), ("/a", "/a/")] {
            let error = check(&[mount(one), mount(two)]).unwrap_err();
            assert!(error.to_string().contains("within each other"), "{error}");
        }
    }
}
