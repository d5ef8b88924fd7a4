//! Templates: the catalogue of them, and building them in the background with progress.

use std::collections::HashSet;
use std::pin::Pin;

use atoll_node::{BuildEvent, BuildFrom, BuildTemplate, Template, find_template, from_image, on_templates};
use atoll_store::{Fact, NewFact};
use atoll_types::{Code, Fault, Resources, SandboxSpec, TemplateId, TemplateManifest};
use futures_util::Stream;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use crate::Sandboxes;

/// What a build says while it goes on; the last item is `Done` or an error. Dropping it stops the build, which leaves
/// nothing behind.
pub type BuildStream = Pin<Box<dyn Stream<Item = Result<BuildEvent, Fault>> + Send>>;

impl Sandboxes {
    pub(crate) fn resolve_template(&self, which: &str) -> Result<TemplateManifest, Fault> {
        find_template(&self.inner.templates, which)
    }

    pub async fn templates(&self) -> Result<Vec<Template>, Fault> {
        let templates = self.inner.templates.clone();
        let listed = on_templates(move || templates.list()).await?;
        Ok(listed
            .into_iter()
            .map(|listed| Template {
                names: listed.names,
                manifest: listed.manifest,
            })
            .collect())
    }

    pub async fn template(&self, which: &str) -> Result<Template, Fault> {
        let manifest = self.resolve_template(which)?;
        let templates = self.inner.templates.clone();
        let listed = on_templates(move || templates.inspect(manifest.id.as_str())).await?;
        Ok(Template {
            names: listed.names,
            manifest: listed.manifest,
        })
    }

    /// Lets another name stand for a template, whatever it stood for before.
    pub async fn name_template(&self, which: &str, name: &str) -> Result<(), Fault> {
        let manifest = self.resolve_template(which)?;
        let (templates, name) = (self.inner.templates.clone(), name.to_owned());
        on_templates(move || templates.name(&name, &manifest.id)).await?;
        self.node().templates_changed();
        Ok(())
    }

    pub async fn delete_template(&self, which: &str) -> Result<(), Fault> {
        let manifest = self.resolve_template(which)?;
        let (templates, in_use, which) = (
            self.inner.templates.clone(),
            self.templates_in_use().await?,
            which.to_owned(),
        );
        on_templates(move || templates.delete(&which, &|manifest| in_use.contains(&manifest.id))).await?;
        self.node().templates_changed();
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
        let pruned = on_templates(move || templates.prune(&|manifest| in_use.contains(&manifest.id))).await?;
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
        let service = self.clone();
        self.inner.tasks.spawn(async move {
            let outcome = tokio::select! {
                built = service.build(request, events.clone()) => built,
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

    async fn build(
        &self,
        request: BuildTemplate,
        progress: mpsc::Sender<Result<BuildEvent, Fault>>,
    ) -> Result<Template, Fault> {
        let project = self.identity().default_project().clone();
        let manifest = self.node().build(request, project.clone(), progress).await?;
        let fact = NewFact {
            at: self.now(),
            project,
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

/// Says which of a request's policies a fault is about.
fn of(what: &str, mut fault: Fault) -> Fault {
    fault.message = format!("{what}: {}", fault.message);
    fault
}
