//! Templates from OCI and Docker images: a registry, an OCI layout directory, or an archive of `docker save`.
//!
//! What must hold: every blob is checked against its digest and size before anything in it is used, every layer against
//! the diff id in the config, and the config against the manifest; so the digest that is recorded vouches for the whole
//! filesystem. No size that an image declares is believed beyond [`OciOptions::limits`].

mod access;
pub(crate) mod format;
mod layout;
mod registry;
#[cfg(test)]
mod tests;
mod unpack;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;

use atoll_types::{ImageCommand, StartCommand, TemplateManifest, TemplateSource, Timestamp};

use crate::content::Content;
use crate::error::{Error, Result};
use crate::machine;
use crate::progress::{Job, Progress};
use crate::store::{Recipe, Scratch, Templates, check_name};
use crate::tree::{Entries, Kind, LastLink, Limits, Meta, Tree};

pub use format::ImageConfig;
pub(crate) use format::architecture;

/// Where an image is.
#[derive(Debug, Clone)]
pub enum ImageSource {
    /// `debian:trixie`, `ghcr.io/owner/name@sha256:…`, `localhost:5000/app`. Plain HTTP is used for loopback only.
    Registry { reference: String, login: Option<Login> },
    /// A directory in the OCI image layout.
    Layout(PathBuf),
    /// A tar archive as `docker save`, `podman save` or `skopeo` write it.
    Archive(PathBuf),
}

/// Where registries may lead a pull to; errors are sentences for people.
pub trait Reach: std::fmt::Debug + Send + Sync {
    /// Whether it is asked about the registry that was named, too.
    fn binds_the_named(&self) -> bool {
        false
    }

    /// Before a name is resolved.
    fn name(&self, host: &str) -> std::result::Result<(), String>;
    /// Before an address is connected to, right before.
    fn address(&self, address: IpAddr) -> std::result::Result<(), String>;
}

/// The same for whoever is not trusted to name a registry.
#[derive(Debug)]
pub(crate) struct Bound(pub(crate) Arc<dyn Reach>);

impl Reach for Bound {
    fn binds_the_named(&self) -> bool {
        true
    }

    fn name(&self, host: &str) -> std::result::Result<(), String> {
        self.0.name(host)
    }

    fn address(&self, address: IpAddr) -> std::result::Result<(), String> {
        self.0.address(address)
    }
}

/// User name and password or token for a registry.
#[derive(Clone)]
pub struct Login {
    /// Whom it is for, as references name it: `ghcr.io`. `None`: the registry of the image; not for Dockerfiles of
    /// strangers, which name what registry they like.
    pub registry: Option<String>,
    pub user: String,
    pub password: String,
}

impl std::fmt::Debug for Login {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Login")
            .field("registry", &self.registry)
            .field("user", &self.user)
            .finish_non_exhaustive()
    }
}

#[derive(Debug, Clone)]
pub struct OciOptions {
    /// What the template is called.
    pub name: String,
    pub source: ImageSource,
    /// Run the image's entrypoint and command as the template's start command. A sandbox is a computer, so by default
    /// nothing is started.
    pub start: bool,
    pub limits: Limits,
    pub now: Timestamp,
}

/// An image whose blobs are all on this machine, verified or to be verified as they are read.
pub(crate) struct FetchedImage {
    pub(crate) reference: String,
    /// Digest of the image's manifest (or config, for archives without one), with `sha256:`.
    pub(crate) digest: String,
    pub(crate) config: ImageConfig,
    pub(crate) layers: Vec<Layer>,
}

pub(crate) struct Layer {
    pub(crate) blob: Content,
    /// SHA-256 in hex to check while unpacking; `None` when it was checked on the way in.
    pub(crate) digest: Option<String>,
    pub(crate) diff_id: String,
}

/// An image as a tree. The scratch directory holds what the tree's contents point to.
pub(crate) struct OpenedImage {
    pub(crate) tree: Tree,
    pub(crate) reference: String,
    pub(crate) digest: String,
    pub(crate) config: ImageConfig,
    pub(crate) scratch: Scratch,
}

impl Templates {
    /// Builds a template from an OCI or Docker image. Cancel-safe.
    pub async fn build_oci(
        &self,
        options: OciOptions,
        progress: Arc<dyn Progress>,
    ) -> Result<TemplateManifest> {
        check_name(&options.name)?;
        let job = Job::new(progress);
        let opened = self.open_image(options.source, options.limits, &job).await?;
        let store = self.clone();
        job.blocking(move |job| {
            let OpenedImage {
                mut tree,
                reference,
                digest,
                config,
                scratch,
            } = opened;
            add_mount_points(&mut tree)?;
            let command = config.command();
            let recipe = Recipe {
                source: TemplateSource::Image { reference, digest },
                env: config.env(),
                workdir: config.workdir(),
                user: config.user(),
                start: start_of(options.start, command.as_ref())?,
                command,
                exposed_ports: config.ports(),
                network: None,
                resources: None,
            };
            let manifest = store.add(&tree, &recipe, Some(&options.name), options.now, job);
            drop(scratch);
            manifest
        })
        .await
    }

    /// What a reference stands for at its registry now, without pulling the layers.
    pub(crate) async fn resolve_image(
        &self,
        reference: &str,
        login: Option<Login>,
        job: &Job,
    ) -> Result<(String, ImageConfig)> {
        let store = self.clone();
        let scratch = job.blocking(move |_| store.scratch()).await?;
        registry::resolve(reference, login, self.reach.clone(), &scratch, job).await
    }

    pub(crate) async fn open_image(
        &self,
        source: ImageSource,
        limits: Limits,
        job: &Job,
    ) -> Result<OpenedImage> {
        let store = self.clone();
        let scratch = job.blocking(move |_| store.scratch()).await?;
        let (fetched, scratch) = match source {
            ImageSource::Registry { reference, login } => {
                let fetched =
                    registry::pull(&reference, login, self.reach.clone(), limits, &scratch, job).await?;
                (fetched, scratch)
            }
            ImageSource::Layout(dir) => {
                let fetched = job.blocking(move |_| layout::open_directory(&dir)).await?;
                (fetched, scratch)
            }
            ImageSource::Archive(path) => {
                let fetched = job.blocking(move |_| layout::open_archive(&path)).await?;
                (fetched, scratch)
            }
        };
        job.blocking(move |job| {
            let mut tree = Tree::new(limits);
            unpack::layers(&mut tree, &fetched.layers, limits, &scratch, job)?;
            Ok(OpenedImage {
                tree,
                reference: fetched.reference,
                digest: fetched.digest,
                config: fetched.config,
                scratch,
            })
        })
        .await
    }
}

/// The start command of a template that is to start what its image says, or nothing.
pub(crate) fn start_of(wanted: bool, command: Option<&ImageCommand>) -> Result<Option<StartCommand>> {
    if !wanted {
        return Ok(None);
    }
    match command.and_then(ImageCommand::argv) {
        Some(argv) => Ok(Some(StartCommand { argv, ready: None })),
        None => Err(Error::Invalid(
            "there is nothing to start: the image has neither ENTRYPOINT nor CMD".into(),
        )),
    }
}

/// Directories that every runtime mounts something on; images from scratch often have none.
pub(crate) fn add_mount_points(tree: &mut Tree) -> Result<()> {
    for (path, mode) in [
        ("/dev", 0o755),
        ("/etc", 0o755),
        ("/proc", 0o555),
        ("/run", 0o755),
        ("/sys", 0o555),
        ("/tmp", 0o1777),
    ] {
        if tree.lookup(path.as_bytes(), LastLink::Keep)?.is_none() {
            tree.put(path.as_bytes(), Meta::root(mode), Kind::Directory(Entries::new()))?;
        }
    }
    Ok(())
}

impl ImageConfig {
    pub(crate) fn env(&self) -> BTreeMap<String, String> {
        let mut env = BTreeMap::from([("PATH".to_owned(), machine::PATH.to_owned())]);
        for line in &self.config.env {
            if let Some((key, value)) = line.split_once('=') {
                env.insert(key.to_owned(), value.to_owned());
            }
        }
        env
    }

    pub(crate) fn workdir(&self) -> String {
        match self.config.working_dir.as_str() {
            dir if dir.starts_with('/') => dir.to_owned(),
            dir => format!("/{dir}"),
        }
    }

    /// The user without its group.
    pub(crate) fn user(&self) -> String {
        match self.config.user.split(':').next() {
            None | Some("") => "root".to_owned(),
            Some(user) => user.to_owned(),
        }
    }

    pub(crate) fn run(&self) -> &format::RunConfig {
        &self.config
    }

    fn command(&self) -> Option<ImageCommand> {
        let command = ImageCommand {
            entrypoint: self.config.entrypoint.clone().unwrap_or_default(),
            cmd: self.config.cmd.clone().unwrap_or_default(),
        };
        command.argv().is_some().then_some(command)
    }

    /// TCP ports, sorted.
    pub(crate) fn ports(&self) -> Vec<u16> {
        let mut ports: Vec<u16> = self
            .config
            .exposed_ports
            .iter()
            .flat_map(|ports| ports.keys())
            .filter_map(|port| port.strip_suffix("/tcp").unwrap_or(port).parse().ok())
            .collect();
        ports.sort_unstable();
        ports.dedup();
        ports
    }
}
