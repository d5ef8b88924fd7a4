//! Templates on this machine: built, and found.

use std::path::PathBuf;
use std::sync::Arc;

pub use atoll_image::Login as RegistryLogin;
use atoll_image::{
    DebianOptions, DockerfileOptions, ImageSource, Limits, Listed, OciOptions, Progress, Room, Templates,
    Update,
};
use atoll_types::{
    Code, Fault, NetworkPolicy, ProjectId, Resources, StartCommand, TemplateId, TemplateManifest,
};
use tokio::sync::mpsc;

use crate::LocalNode;
use crate::cables::allows_nothing;
use crate::faults::from_image;
use crate::steps::Steps;

/// A template as a project sees it.
#[derive(Debug, Clone)]
pub struct Template {
    /// What the project may call it.
    pub names: Vec<String>,
    pub manifest: TemplateManifest,
    /// Whether every project may use it.
    pub shared: bool,
    /// Whether it belongs to the project.
    pub own: bool,
}

impl From<Listed> for Template {
    fn from(listed: Listed) -> Self {
        Self {
            names: listed.names,
            manifest: listed.manifest,
            shared: listed.shared,
            own: listed.own,
        }
    }
}

#[derive(Debug, Clone)]
pub struct BuildTemplate {
    pub name: String,
    /// For every project, rather than for the one that builds it.
    pub shared: bool,
    pub from: BuildFrom,
    pub start: BuildStart,
    /// What sandboxes made from it may reach, unless they say so themselves.
    pub network: Option<NetworkPolicy>,
    /// What sandboxes made from it get, unless they say so themselves.
    pub resources: Option<Resources>,
}

/// Who builds.
#[derive(Debug, Clone)]
pub struct Builder {
    pub project: ProjectId,
    /// Whether it runs the server: then it may name any registry. Others may name those that a sandbox could reach.
    pub is_operator: bool,
    /// What the project may still store, unless it is for everybody.
    pub room: Option<Arc<dyn Room>>,
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

impl LocalNode {
    pub(crate) async fn build_template(
        &self,
        request: BuildTemplate,
        builder: Builder,
        events: mpsc::Sender<Result<BuildEvent, Fault>>,
    ) -> Result<TemplateManifest, Fault> {
        let progress: Arc<dyn Progress> = Arc::new(move |update: Update<'_>| {
            // A reader who lags misses some progress, never the outcome.
            if !update.message.is_empty() {
                let _ = events.try_send(Ok(BuildEvent::Log(update.message.to_owned())));
            }
            let _ = events.try_send(Ok(BuildEvent::Progress {
                stage: update.stage.to_owned(),
                done: update.done,
                total: update.total,
            }));
        });
        // As whoever it is for sees them: what it builds on, what is cached, and what it becomes.
        let Builder {
            project,
            is_operator,
            room,
        } = builder;
        let templates = match request.shared {
            true => self.inner.templates.shared(),
            false => self.inner.templates.of(&project),
        };
        let templates = if is_operator { templates } else { templates.bound() };
        let templates = match room.clone() {
            Some(room) => templates.within(room),
            None => templates,
        };
        let name = request.name.clone();
        // Said beside what went wrong, where something did.
        let mut refused = Vec::new();
        let mut user_is_missing = false;
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
                let stand_in = self.stand_in(project.clone(), network.clone());
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
                let steps = Steps::new(self, stand_in, project, room);
                let built = templates.build_dockerfile(options, &steps, progress).await;
                refused = steps.refused();
                user_is_missing = steps.user_is_missing();
                built
            }
        }
        .map_err(|e| {
            let fault = explain(from_image(&e), &refused);
            let code = if user_is_missing {
                Code::NoSuchUserInSandbox
            } else {
                fault.code
            };
            Fault { code, ..fault }
        })?;
        let settings = atoll_image::Settings {
            start: match request.start {
                BuildStart::Command(start) => Some(start),
                // That of the image is in what was built.
                BuildStart::Nothing | BuildStart::Image => None,
            },
            network: request.network,
            resources: request.resources,
        };
        let now = self.now();
        let manifest = on_templates(move || templates.with_settings(&built, settings, &name, now)).await?;
        self.inner.pools.look_again();
        Ok(manifest)
    }

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

/// Work on templates, which blocks.
pub async fn on_templates<T: Send + 'static>(
    work: impl FnOnce() -> atoll_image::Result<T> + Send + 'static,
) -> Result<T, Fault> {
    crate::blocking::run(work)
        .await
        .map_err(|_| Fault::internal("a template task failed"))?
        .map_err(|e| from_image(&e))
}

/// The template of this id or name, as whoever these are for sees them.
pub fn find_template(templates: &Templates, which: &str) -> Result<TemplateManifest, Fault> {
    let found = templates.find(which).map_err(|e| from_image(&e))?;
    found.ok_or_else(|| no_template(which))
}

/// The template that something was made of, whosever it is by now.
pub fn known_template(templates: &Templates, id: &TemplateId) -> Result<TemplateManifest, Fault> {
    let found = templates.known(id).map_err(|e| from_image(&e))?;
    found.ok_or_else(|| no_template(id.as_str()))
}

fn no_template(which: &str) -> Fault {
    Fault::new(
        Code::TemplateNotFound,
        format!("there is no template `{}`", which.escape_default()),
    )
    .hint("`atoll template list` shows those that exist; `atoll template build base --shared` makes the default one")
}
