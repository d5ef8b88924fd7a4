//! Templates: the catalogue of them, whose they are, and building them in the background with progress.
//!
//! What must hold: a project finds its own templates and shared ones, and for all others the answer is that of templates that do not
//! exist. Shared ones are changed by operators alone. Whatever was made of a template goes on, whoever may use it now.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use atoll_image::{Needed, Pruned, Room, Templates};
use atoll_node::{
    BuildEvent, BuildFrom, BuildTemplate, Builder, Template, find_template, from_image, known_template,
    on_templates,
};
use atoll_store::{Fact, NewFact};
use atoll_types::{Code, Fault, ProjectId, Resources, SandboxSpec, TemplateId, TemplateManifest};
use futures_util::Stream;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use crate::{Action, Caller, Sandboxes, UploadRoom};

/// The most templates, names of them, and steps of builds that are cached, that a project has.
const MOST_TEMPLATES: usize = 5000;
/// How often it is looked for templates that nothing is called by any more; they stay for a day.
const COLLECT_EVERY: Duration = Duration::from_secs(60 * 60);

/// What a build says while it goes on; the last item is `Done` or an error. Dropping it stops the build, which leaves
/// nothing behind.
pub type BuildStream = Pin<Box<dyn Stream<Item = Result<BuildEvent, Fault>> + Send>>;

impl Sandboxes {
    /// One that a project may use, by name or id: its own, or a shared one.
    pub(crate) fn usable_template(
        &self,
        project: &ProjectId,
        which: &str,
    ) -> Result<TemplateManifest, Fault> {
        find_template(&self.templates_of(project), which)
    }

    /// What something was made of while it could be used.
    pub(crate) fn template_of(&self, id: &TemplateId) -> Result<TemplateManifest, Fault> {
        known_template(&self.inner.templates, id)
    }

    /// Whether a name or an id is a project's own.
    pub(crate) fn is_own(&self, project: &ProjectId, which: &str) -> Result<bool, Fault> {
        self.templates_of(project).has(which).map_err(|e| from_image(&e))
    }

    /// Whether a name or an id is everybody's.
    pub(crate) fn is_shared(&self, which: &str) -> Result<bool, Fault> {
        self.inner.templates.has(which).map_err(|e| from_image(&e))
    }

    pub async fn template(&self, caller: &Caller, which: &str) -> Result<Template, Fault> {
        let manifest = self.usable_template(caller.project(), which)?;
        let templates = self.templates_of(caller.project());
        let listed = on_templates(move || templates.inspect(manifest.id.as_str())).await?;
        Ok(listed.into())
    }

    /// Who commands run as in what was made of a template, unless they say otherwise.
    pub fn user_of(&self, template: &TemplateId) -> Result<String, Fault> {
        let user = self.template_of(template)?.user;
        Ok(if user.is_empty() { "root".to_owned() } else { user })
    }

    /// Lets another name stand for a template in the caller's project, whatever it stood for there before.
    pub async fn name_template(&self, caller: &Caller, which: &str, name: &str) -> Result<(), Fault> {
        let manifest = self.usable_template(caller.project(), which)?;
        self.check_count(caller.project()).await?;
        let (templates, name, now) = (self.templates_of(caller.project()), name.to_owned(), self.now());
        self.change_templates(caller.project(), move || templates.name(&name, &manifest.id, now))
            .await?;
        self.node().templates_changed();
        Ok(())
    }

    /// Deletes one of the caller's project; where it has none of this name or id, a shared one, which takes an operator.
    pub async fn delete_template(&self, caller: &Caller, which: &str) -> Result<(), Fault> {
        let project = caller.project();
        let manifest = self.usable_template(project, which)?;
        let of_all = !self.is_own(project, which)?;
        let templates = if of_all {
            caller.may(Action::ShareTemplates, None)?;
            self.inner.templates.clone()
        } else {
            self.templates_of(project)
        };
        let (needed, which) = (
            self.needs_templates((!of_all).then_some(project)),
            which.to_owned(),
        );
        self.change_templates(project, move || templates.delete(&which, &needed))
            .await?;
        self.node().templates_changed();
        if self.usable_template(project, manifest.id.as_str()).is_err() {
            self.drop_running_state(project, &manifest.id).await;
        }
        let template = manifest.id;
        self.note_template(caller, Fact::TemplateDeleted { template })
            .await
    }

    /// Lets every project use a template of this one.
    pub async fn share_template(
        &self,
        caller: &Caller,
        project: &ProjectId,
        which: &str,
    ) -> Result<Template, Fault> {
        caller.may(Action::ShareTemplates, None)?;
        let manifest = self.usable_template(project, which)?;
        let (templates, which, now) = (self.templates_of(project), which.to_owned(), self.now());
        self.change_templates(project, move || templates.share(&which, now))
            .await?;
        self.node().templates_changed();
        let template = manifest.id.clone();
        self.note_template(caller, Fact::TemplateShared { template })
            .await?;
        self.template(caller, manifest.id.as_str()).await
    }

    /// Takes a shared template back into the caller's project. Others find it no more; what they have made of it goes on.
    pub async fn unshare_template(&self, caller: &Caller, which: &str) -> Result<Template, Fault> {
        caller.may(Action::ShareTemplates, None)?;
        let manifest = find_template(&self.inner.templates, which)?;
        let (templates, which, now) = (self.templates_of(caller.project()), which.to_owned(), self.now());
        self.change_templates(caller.project(), move || templates.unshare(&which, now))
            .await?;
        self.node().templates_changed();
        let template = manifest.id.clone();
        self.note_template(caller, Fact::TemplateUnshared { template })
            .await?;
        self.template(caller, manifest.id.as_str()).await
    }

    async fn note_template(&self, caller: &Caller, fact: Fact) -> Result<(), Fault> {
        let fact = NewFact {
            at: self.now(),
            project: caller.project().clone(),
            sandbox: None,
            fact,
        };
        let noted = self.store().ledger.append_facts(vec![fact]).await;
        noted.map_err(|e| crate::faults::from_store(&e))
    }

    /// Removes what no name and no sandbox of the caller's project uses, and what its builds cached; returns the bytes that it
    /// keeps no more. For operators the same of what is shared as well.
    pub async fn prune_templates(&self, caller: &Caller) -> Result<u64, Fault> {
        let project = caller.project();
        let own = self.templates_of(project);
        let mut freed = self.prune_in(project, own, Some(project)).await?;
        if caller.may(Action::ShareTemplates, None).is_ok() {
            freed += self.prune_in(project, self.inner.templates.clone(), None).await?;
        }
        Ok(freed)
    }

    async fn prune_in(
        &self,
        by: &ProjectId,
        templates: Templates,
        project: Option<&ProjectId>,
    ) -> Result<u64, Fault> {
        let needed = self.needs_templates(project);
        let pruned = self
            .change_templates(by, move || templates.prune(&needed))
            .await?;
        self.drop_what_was_kept(project, &pruned).await;
        Ok(pruned.bytes)
    }

    /// What ran of templates that are gone, and was kept so that sandboxes need not start it anew.
    async fn drop_what_was_kept(&self, project: Option<&ProjectId>, pruned: &Pruned) {
        // Those that everybody uses are the operators'.
        let project = project.unwrap_or_else(|| self.identity().default_project());
        for id in &pruned.templates {
            if self.usable_template(project, id.as_str()).is_err() {
                self.drop_running_state(project, id).await;
            }
        }
    }

    /// For threads that may wait: what is needed when they ask.
    fn needs_templates(
        &self,
        project: Option<&ProjectId>,
    ) -> impl Fn() -> atoll_image::Result<Needed> + Send + use<> {
        let (service, project) = (self.clone(), project.cloned());
        let runtime = tokio::runtime::Handle::current();
        move || {
            let needed = runtime.block_on(service.templates_needed(project.as_ref()));
            needed.map_err(atoll_image::Error::Refused)
        }
    }

    /// What sandboxes run on, and what snapshots need to come back: those of a project, or of everybody.
    async fn templates_needed(&self, project: Option<&ProjectId>) -> Result<Needed, Fault> {
        let of_snapshots = self.store().saved.templates_of_snapshots().await;
        let mut all = of_snapshots.map_err(|e| crate::faults::from_store(&e))?;
        let live = self.live();
        all.extend(
            live.values()
                .map(|cell| (cell.project.clone(), cell.seen.borrow().template.clone())),
        );
        let here = all
            .iter()
            .filter(|(of, _)| project.is_none_or(|project| of == project));
        Ok(Needed {
            here: here.map(|(_, template)| template.clone()).collect(),
            anywhere: all.iter().map(|(_, template)| template.clone()).collect(),
        })
    }

    /// Refuses one more to a project that has many: whoever deletes something looks through all that there is.
    async fn check_count(&self, project: &ProjectId) -> Result<(), Fault> {
        let templates = self.templates_of(project);
        match on_templates(move || templates.count()).await? {
            0..MOST_TEMPLATES => Ok(()),
            _ => Err(Fault::new(
                Code::TooManyTemplates,
                format!(
                    "the project has {MOST_TEMPLATES} templates, names of them and cached steps of builds, the most that it \
                     may have"
                ),
            )
            .hint("delete some, or prune them: `atoll template prune` removes what has no name, and what is cached")),
        }
    }

    /// What a project's own templates and its builds' caches take, as if nobody else had the same.
    pub(crate) async fn template_bytes(&self, project: &ProjectId) -> Result<u64, Fault> {
        let templates = self.templates_of(project);
        let images = on_templates(move || templates.images()).await?;
        Ok(images.values().sum())
    }

    /// The template of these very bytes that a project may use, under whatever id it has here.
    pub(crate) fn template_with_digest(
        &self,
        project: &ProjectId,
        id: &TemplateId,
        digest: &str,
    ) -> Result<Option<TemplateId>, Fault> {
        let templates = self.templates_of(project);
        if let Some(manifest) = templates.find(id.as_str()).map_err(|e| from_image(&e))?
            && manifest.digest == digest
        {
            return Ok(Some(manifest.id));
        }
        let same =
            |listed: atoll_image::Listed| (listed.manifest.digest == digest).then_some(listed.manifest.id);
        let found = templates.gather(None, same).map_err(|e| from_image(&e))?;
        Ok(found.into_iter().next())
    }

    /// The longest lifetime that a sandbox may ask for; `None`: any.
    pub fn longest_lifetime(&self) -> Option<u64> {
        self.settings().limits.max_timeout_millis
    }

    /// What a sandbox gets of which neither its creator nor its template says anything.
    pub fn usual_resources(&self) -> Resources {
        self.settings().default_resources
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

    /// Builds a template in the background: one of the caller's project, unless it is to be everybody's. It counts as one of the
    /// project's sandboxes until it is over, whatever its steps run in.
    pub async fn build_template(
        &self,
        caller: &Caller,
        request: BuildTemplate,
    ) -> Result<BuildStream, Fault> {
        atoll_image::check_name(&request.name).map_err(|e| from_image(&e))?;
        if request.shared {
            caller.may(Action::ShareTemplates, None)?;
        }
        if matches!(request.from, BuildFrom::Debian { .. }) {
            may_install(caller)?;
        }
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
        let room = Arc::new(self.upload_room(caller.project()).await?);
        self.check_count(caller.project()).await?;
        let place = self.take_place(caller.project())?;
        let (events, stream) = mpsc::channel(256);
        let (service, caller) = (self.clone(), caller.clone());
        self.inner.tasks.spawn(async move {
            let outcome = tokio::select! {
                built = service.build(&caller, request, Arc::clone(&room), events.clone()) => built,
                // Nobody listens any more: dropping the build stops it.
                () = events.closed() => Err(Fault::internal("nobody waits for the build")),
                () = service.inner.stop.cancelled() => {
                    Err(Fault::new(Code::ServerStopping, "the server is stopping"))
                }
            };
            // Whoever hears that it is over has the place again.
            drop(place);
            // What its steps stored is there, however it ended.
            if let Some(room) = Arc::into_inner(room) {
                room.stored();
            }
            let _ = events
                .send(outcome.map(|template| BuildEvent::Done(Box::new(template))))
                .await;
        });
        Ok(Box::pin(ReceiverStream::new(stream)))
    }

    async fn build(
        &self,
        caller: &Caller,
        request: BuildTemplate,
        room: Arc<UploadRoom>,
        progress: mpsc::Sender<Result<BuildEvent, Fault>>,
    ) -> Result<Template, Fault> {
        let shared = request.shared;
        let builder = Builder {
            project: caller.project().clone(),
            is_operator: caller.may(Action::ShareTemplates, None).is_ok(),
            room: (!shared).then_some(room as Arc<dyn Room>),
        };
        let manifest = self.node().build(request, builder, progress).await?;
        let template = manifest.id.clone();
        self.note_template(
            caller,
            Fact::TemplateBuilt {
                template: template.clone(),
                digest: manifest.digest.clone(),
                size: manifest.size_bytes,
            },
        )
        .await?;
        if shared {
            self.note_template(caller, Fact::TemplateShared { template })
                .await?;
        }
        self.template(caller, manifest.id.as_str()).await
    }

    /// Removes, now and then, what builds have left behind: templates whose names others have taken, and cached steps that nobody
    /// came by. Looking takes the store's lock and reads all that there is, so not after each build.
    pub(crate) async fn keep_collecting_templates(&self) {
        loop {
            tokio::select! {
                biased;
                () = tokio::time::sleep(COLLECT_EVERY) => {}
                () = self.inner.stop.cancelled() => return,
            }
            let templates = self.inner.templates.clone();
            let projects = on_templates(move || templates.projects()).await;
            let projects = projects.unwrap_or_else(|fault| {
                tracing::warn!(%fault, "who has templates cannot be seen");
                Vec::new()
            });
            for project in projects.into_iter().map(Some).chain([None]) {
                if let Err(fault) = self.collect_templates(project.as_ref()).await {
                    tracing::warn!(%fault, "templates that lost their names stay for now");
                }
            }
        }
    }

    /// Those of a project, or of everybody.
    async fn collect_templates(&self, project: Option<&ProjectId>) -> Result<(), Fault> {
        let templates = match project {
            Some(project) => self.templates_of(project),
            None => self.inner.templates.clone(),
        };
        let (needed, now) = (self.needs_templates(project), self.now());
        let by = project.unwrap_or_else(|| self.identity().default_project());
        let collected = self
            .change_templates(by, move || templates.collect(&needed, now))
            .await?;
        self.drop_what_was_kept(project, &collected).await;
        Ok(())
    }
}

/// Packages are unpacked and their scripts run by the machine itself, with more power than any sandbox has.
fn may_install(caller: &Caller) -> Result<(), Fault> {
    caller.may(Action::ShareTemplates, None).map_err(|_| {
        Fault::new(
            Code::OperatorsOnly,
            "the server itself installs the packages of a Debian template, which takes a key of the project `default` with \
             the role operator",
        )
        .hint("build from a Dockerfile: `FROM base`, and `RUN` as root what installs the packages")
    })
}

/// Says which of a request's policies a fault is about.
fn of(what: &str, mut fault: Fault) -> Fault {
    fault.message = format!("{what}: {}", fault.message);
    fault
}
