//! Templates: looking them up, and building them in the background with progress.

use std::collections::HashSet;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;

pub use atoll_image::Login as RegistryLogin;
use atoll_image::{DebianOptions, DockerfileOptions, ImageSource, Limits, OciOptions, Progress, Update};
use atoll_store::{Fact, NewFact};
use atoll_types::{
    Code, Fault, NetworkPolicy, Resources, SandboxSpec, StartCommand, TemplateId, TemplateManifest,
};
use futures_util::Stream;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use crate::Sandboxes;
use crate::faults::from_image;
use crate::network::allows_nothing;
use crate::steps::Steps;

#[derive(Debug, Clone)]
pub struct Template {
    pub names: Vec<String>,
    pub manifest: TemplateManifest,
}

#[derive(Debug, Clone)]
pub struct BuildTemplate {
    pub name: String,
    pub from: BuildFrom,
    pub start: BuildStart,
    /// What sandboxes made from it may reach, unless they say so themselves.
    pub network: Option<NetworkPolicy>,
    /// What sandboxes made from it get, unless they say so themselves.
    pub resources: Option<Resources>,
}

/// What sandboxes made from a template start with.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum BuildStart {
    /// Nothing: a sandbox is a computer.
    #[default]
    Nothing,
    /// What the image was made to run, its `ENTRYPOINT` and `CMD`; without them the build fails.
    Image,
    Command(StartCommand),
}

#[derive(Debug, Clone)]
pub enum BuildFrom {
    /// Empty packages: those of `base`.
    Debian {
        suite: Option<String>,
        packages: Vec<String>,
    },
    /// An image in a registry.
    Image {
        reference: String,
        login: Option<RegistryLogin>,
    },
    /// An image in a tar archive (docker-save or OCI layout) that the front end has received into a file of its own.
    /// Never a path that a caller named: callers have no business with the server's files.
    Archive { file: PathBuf },
    /// The build context, a directory that the front end has unpacked an upload into, and the Dockerfile's text.
    Dockerfile {
        context: PathBuf,
        dockerfile: String,
        args: Vec<(String, String)>,
        /// The stage to build; the last one unless said.
        target: Option<String>,
        /// For base images in a registry.
        login: Option<RegistryLogin>,
        /// Run every step again.
        no_cache: bool,
        /// What its `RUN` steps may reach; each is held to its limits on its own. Nothing, unless said.
        network: NetworkPolicy,
    },
}

#[derive(Debug, Clone)]
pub enum BuildEvent {
    /// A stage began or advanced; `done` and `total` are bytes or steps, `total` is 0 when unknown.
    Progress {
        stage: String,
        done: u64,
        total: u64,
    },
    Log(String),
    Done(Box<Template>),
}

/// What a build says while it goes on; the last item is `Done` or an error. Dropping it stops the build, which leaves
/// nothing behind.
pub type BuildStream = Pin<Box<dyn Stream<Item = Result<BuildEvent, Fault>> + Send>>;

/// A template and where its image is.
#[derive(Debug, Clone)]
pub(crate) struct Resolved {
    pub(crate) manifest: TemplateManifest,
    pub(crate) image: PathBuf,
}

impl Sandboxes {
    pub(crate) fn resolve_template(&self, which: &str) -> Result<Resolved, Fault> {
        let found = self.inner.templates.find(which).map_err(|e| from_image(&e))?;
        let manifest = found.ok_or_else(|| no_template(which))?;
        Ok(Resolved {
            image: self.inner.templates.image_path(&manifest),
            manifest,
        })
    }

    pub async fn templates(&self) -> Result<Vec<Template>, Fault> {
        let templates = self.inner.templates.clone();
        let listed = blocking(move || templates.list()).await?;
        Ok(listed
            .into_iter()
            .map(|listed| Template {
                names: listed.names,
                manifest: listed.manifest,
            })
            .collect())
    }

    pub async fn template(&self, which: &str) -> Result<Template, Fault> {
        let manifest = self.resolve_template(which)?.manifest;
        let templates = self.inner.templates.clone();
        let listed = blocking(move || templates.inspect(manifest.id.as_str())).await?;
        Ok(Template {
            names: listed.names,
            manifest: listed.manifest,
        })
    }

    /// Lets another name stand for a template, whatever it stood for before.
    pub async fn name_template(&self, which: &str, name: &str) -> Result<(), Fault> {
        let manifest = self.resolve_template(which)?.manifest;
        let (templates, name) = (self.inner.templates.clone(), name.to_owned());
        blocking(move || templates.name(&name, &manifest.id)).await?;
        self.inner.pools.look_again();
        Ok(())
    }

    pub async fn delete_template(&self, which: &str) -> Result<(), Fault> {
        let manifest = self.resolve_template(which)?.manifest;
        let (templates, in_use, which) = (
            self.inner.templates.clone(),
            self.templates_in_use().await?,
            which.to_owned(),
        );
        blocking(move || templates.delete(&which, &|manifest| in_use.contains(&manifest.id))).await?;
        self.inner.pools.look_again();
        self.drop_running_state(&manifest.id).await;
        let fact = NewFact {
            at: self.now(),
            project: self.identity().default_project().clone(),
            sandbox: None,
            fact: Fact::TemplateDeleted {
                template: manifest.id,
            },
        };
        self.store()
            .ledger
            .append_facts(vec![fact])
            .await
            .map_err(|e| crate::faults::from_store(&e))
    }

    /// Removes what no name and no sandbox uses; returns the bytes freed.
    pub async fn prune_templates(&self) -> Result<u64, Fault> {
        let (templates, in_use) = (self.inner.templates.clone(), self.templates_in_use().await?);
        let pruned = blocking(move || templates.prune(&|manifest| in_use.contains(&manifest.id))).await?;
        Ok(pruned.bytes)
    }

    /// What sandboxes run on, and what snapshots need to come back.
    async fn templates_in_use(&self) -> Result<HashSet<TemplateId>, Fault> {
        let of_snapshots = self.store().saved.templates_of_snapshots().await;
        let mut in_use: HashSet<TemplateId> = of_snapshots
            .map_err(|e| crate::faults::from_store(&e))?
            .into_iter()
            .collect();
        in_use.extend(
            self.live()
                .values()
                .map(|cell| cell.seen.borrow().template.clone()),
        );
        Ok(in_use)
    }

    /// The template of these very bytes, under whatever id it has here.
    pub(crate) fn template_with_digest(
        &self,
        id: &TemplateId,
        digest: &str,
    ) -> Result<Option<TemplateId>, Fault> {
        let templates = &self.inner.templates;
        if let Some(manifest) = templates.find(id.as_str()).map_err(|e| from_image(&e))?
            && manifest.digest == digest
        {
            return Ok(Some(manifest.id));
        }
        let listed = templates.list().map_err(|e| from_image(&e))?;
        Ok(listed
            .into_iter()
            .find(|listed| listed.manifest.digest == digest)
            .map(|listed| listed.manifest.id))
    }

    /// Whether a sandbox may ask for this much.
    pub fn check_resources(&self, resources: Resources) -> Result<(), Fault> {
        let spec = SandboxSpec {
            // Any: it is about the size alone.
            template: "any".to_owned(),
            resources,
            timeout_millis: Some(self.settings().limits.min_timeout_millis),
            ..SandboxSpec::default()
        };
        atoll_lifecycle::admit(spec, &self.settings().limits, &self.tiers()).map(drop)
    }

    /// Builds a template in the background.
    pub async fn build_template(&self, request: BuildTemplate) -> Result<BuildStream, Fault> {
        atoll_image::check_name(&request.name).map_err(|e| from_image(&e))?;
        if let Some(network) = &request.network {
            self.check_policy(network)
                .map_err(|fault| of("the template's network", fault))?;
        }
        if let Some(resources) = request.resources {
            self.check_resources(resources)?;
        }
        if let BuildFrom::Dockerfile { network, .. } = &request.from {
            self.check_enforced(network)
                .map_err(|fault| of("the network of the build", fault))?;
        }
        let (events, stream) = mpsc::channel(256);
        let progress: Arc<dyn Progress> = {
            let events = events.clone();
            Arc::new(move |update: Update<'_>| {
                // A reader who lags misses some progress, never the outcome.
                if !update.message.is_empty() {
                    let _ = events.try_send(Ok(BuildEvent::Log(update.message.to_owned())));
                }
                let _ = events.try_send(Ok(BuildEvent::Progress {
                    stage: update.stage.to_owned(),
                    done: update.done,
                    total: update.total,
                }));
            })
        };
        let service = self.clone();
        self.inner.tasks.spawn(async move {
            let outcome = tokio::select! {
                built = service.build(request, progress) => built,
                // Nobody listens any more: dropping the build stops it.
                () = events.closed() => return,
                () = service.inner.stop.cancelled() => {
                    Err(Fault::new(Code::ServerStopping, "the server is stopping"))
                }
            };
            let _ = events
                .send(outcome.map(|template| BuildEvent::Done(Box::new(template))))
                .await;
        });
        Ok(Box::pin(ReceiverStream::new(stream)))
    }

    async fn build(&self, request: BuildTemplate, progress: Arc<dyn Progress>) -> Result<Template, Fault> {
        let templates = &self.inner.templates;
        let name = request.name.clone();
        // Said beside what went wrong, where something did.
        let mut refused = Vec::new();
        let start_image = request.start == BuildStart::Image;
        let built = match request.from {
            BuildFrom::Debian { .. } if start_image => {
                return Err(Fault::new(
                    Code::NothingToStart,
                    "a template of Debian packages has no command of its own to start",
                ));
            }
            BuildFrom::Debian { suite, packages } => {
                let mut options = DebianOptions::base(self.now());
                options.name = request.name;
                if let Some(suite) = suite {
                    options.suite = suite;
                }
                if !packages.is_empty() {
                    options.packages = packages;
                }
                templates.build_debian(options, progress).await
            }
            BuildFrom::Image { reference, login } => {
                let source = ImageSource::Registry { reference, login };
                templates
                    .build_oci(self.oci(request.name, source, start_image), progress)
                    .await
            }
            BuildFrom::Archive { file } => {
                let source = ImageSource::Archive(file);
                templates
                    .build_oci(self.oci(request.name, source, start_image), progress)
                    .await
            }
            BuildFrom::Dockerfile {
                context,
                dockerfile,
                args,
                target,
                login,
                no_cache,
                network,
            } => {
                let stand_in = self.stand_in(network.clone());
                let options = DockerfileOptions {
                    name: request.name,
                    context,
                    dockerfile,
                    args: args.into_iter().collect(),
                    target,
                    start: start_image,
                    no_cache,
                    network: (!allows_nothing(&network)).then_some(network),
                    login,
                    now: self.now(),
                };
                let steps = Steps::new(self, stand_in);
                let built = templates.build_dockerfile(options, &steps, progress).await;
                refused = steps.refused();
                built
            }
        }
        .map_err(|e| explain(from_image(&e), &refused))?;
        let settings = atoll_image::Settings {
            start: match request.start {
                BuildStart::Command(start) => Some(start),
                // That of the image is in what was built.
                BuildStart::Nothing | BuildStart::Image => None,
            },
            network: request.network,
            resources: request.resources,
        };
        let (templates, now) = (templates.clone(), self.now());
        let manifest = blocking(move || templates.with_settings(&built, settings, &name, now)).await?;
        self.inner.pools.look_again();
        let fact = NewFact {
            at: self.now(),
            project: self.identity().default_project().clone(),
            sandbox: None,
            fact: Fact::TemplateBuilt {
                template: manifest.id.clone(),
                digest: manifest.digest.clone(),
                size: manifest.size_bytes,
            },
        };
        self.store()
            .ledger
            .append_facts(vec![fact])
            .await
            .map_err(|e| crate::faults::from_store(&e))?;
        self.template(manifest.id.as_str()).await
    }
}

impl Sandboxes {
    fn oci(&self, name: String, source: ImageSource, start: bool) -> OciOptions {
        OciOptions {
            name,
            source,
            start,
            limits: Limits::default(),
            now: self.now(),
        }
    }
}

/// Says which of a request's policies a fault is about.
fn of(what: &str, mut fault: Fault) -> Fault {
    fault.message = format!("{what}: {}", fault.message);
    fault
}

/// A step that could not reach something seldom says so in these words.
fn explain(fault: Fault, refused: &[String]) -> Fault {
    if refused.is_empty() {
        return fault;
    }
    fault.hint(format!(
        "the build's policy refused {}; what RUN steps may reach is said in `build_network` (--build-net, --build-allow)",
        refused.join(", ")
    ))
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> atoll_image::Result<T> + Send + 'static,
) -> Result<T, Fault> {
    crate::blocking::run(work)
        .await
        .map_err(|_| Fault::internal("a template task failed"))?
        .map_err(|e| from_image(&e))
}

fn no_template(which: &str) -> Fault {
    Fault::new(
        Code::TemplateNotFound,
        format!("there is no template `{}`", which.escape_default()),
    )
    .hint("`atoll template list` shows those that exist; `atoll template build base` makes the default one")
}
