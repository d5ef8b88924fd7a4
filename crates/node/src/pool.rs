//! Warm pools: instances booted ahead, claimed in one step.
//!
//! A pooled instance matches a request exactly (template, tier, size) and was told the name of the sandbox that it will be, so
//! that claiming changes nothing about it. What must hold: a pool never has more than its size ready or booting; whoever claims an instance owns it alone; a pooled
//! instance that dies, or whose template is another one by now, is replaced; refilling waits until a burst of claims is over,
//! so that it does not slow the claimers.

use parking_lot::{Mutex, MutexGuard};
use std::collections::VecDeque;
use std::time::Duration;

use atoll_guest_protocol::{Configure, Network as GuestNetwork, Request};
use atoll_lifecycle::Admitted;
use atoll_runtime::channel::Guest;
use atoll_runtime::{Instance, InstanceSpec};
use atoll_types::{Fault, InstanceId, Isolation, SandboxId, SandboxSpec, TemplateId, TemplateManifest};
use tokio::sync::Notify;

use crate::builds::find_template;
use crate::words::{Claimed, PoolSetting, PoolView, Wanted};
use crate::{LocalNode, entropy, greeting, wall_clock};

/// Boots begin this long after the last claim, unless the pool is empty.
const REFILL_AFTER: Duration = Duration::from_millis(100);

/// How long warming up may take before the instance is pooled as it is.
const WARM_WITHIN: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(crate) struct Pools {
    pools: Vec<Pool>,
}

#[derive(Debug)]
struct Pool {
    setting: PoolSetting,
    state: Mutex<State>,
    wake: Notify,
}

#[derive(Debug, Default)]
struct State {
    /// What the ready instances are; a template that was rebuilt under its name is another one.
    template: Option<(TemplateId, Isolation)>,
    ready: VecDeque<Pooled>,
}

/// An instance without a sandbox, which was told already what the sandbox that claims it will be called.
#[derive(Debug)]
pub(crate) struct Pooled {
    pub(crate) instance: Instance,
    pub(crate) sandbox: SandboxId,
}

impl Pooled {
    fn is_alive(&self) -> bool {
        self.instance.end.borrow().is_none()
    }
}

impl Pool {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

impl Pools {
    pub(crate) fn new(settings: &[PoolSetting]) -> Self {
        let pools = settings
            .iter()
            .map(|setting| Pool {
                setting: setting.clone(),
                state: Mutex::default(),
                wake: Notify::new(),
            })
            .collect();
        Self { pools }
    }

    /// Takes a ready instance of exactly this kind, if there is one.
    fn claim(&self, wanted: &Wanted) -> Option<Pooled> {
        self.pools
            .iter()
            .filter(|pool| pool.setting.resources.with_room_for_disk() == wanted.resources)
            .find_map(|pool| {
                let mut state = pool.state();
                if state.template.as_ref() != Some(&(wanted.template.clone(), wanted.isolation)) {
                    pool.wake.notify_one();
                    return None;
                }
                // The one that ran last: more of it is still in the processor's caches.
                let claimed = std::iter::from_fn(|| state.ready.pop_back()).find(Pooled::is_alive);
                pool.wake.notify_one();
                claimed
            })
    }

    pub(crate) fn views(&self) -> Vec<PoolView> {
        self.pools
            .iter()
            .map(|pool| {
                let state = pool.state();
                PoolView {
                    template: pool.setting.template.clone(),
                    isolation: state.template.as_ref().map(|(_, isolation)| *isolation),
                    ready: state.ready.len(),
                    target: pool.setting.size,
                }
            })
            .collect()
    }

    /// A name may stand for another template now.
    pub(crate) fn look_again(&self) {
        self.pools.iter().for_each(|pool| pool.wake.notify_one());
    }

    fn ready_ids(&self) -> Vec<InstanceId> {
        self.pools
            .iter()
            .flat_map(|pool| {
                pool.state()
                    .ready
                    .iter()
                    .map(|pooled| pooled.instance.id.clone())
                    .collect::<Vec<_>>()
            })
            .collect()
    }

    pub(crate) fn is_pooled(&self, id: &InstanceId) -> bool {
        self.ready_ids().contains(id)
    }
}

fn kind(admitted: &Admitted, template: &TemplateManifest) -> (TemplateId, Isolation) {
    (template.id.clone(), admitted.isolation)
}

impl LocalNode {
    /// Takes a pooled instance; it is held until whoever claimed it speaks of it.
    pub(crate) fn claim_pooled(&self, wanted: &Wanted) -> Option<Claimed> {
        // Under the lock that orphans are looked for under, so that it is never seen to belong to nobody.
        let mut held = self.held();
        let Pooled { instance, sandbox } = self.inner.pools.claim(wanted)?;
        held.insert(instance.id.clone());
        Some(Claimed {
            instance: instance.id,
            sandbox,
        })
    }

    pub(crate) fn start_pools(&self) {
        for index in 0..self.inner.pools.pools.len() {
            let service = self.clone();
            self.inner.tasks.spawn(async move {
                service.keep_full(index).await;
                // The server stops: what is pooled belongs to nobody.
                let ready = std::mem::take(&mut service.inner.pools.pools[index].state().ready);
                service.discard_pooled(ready);
            });
        }
    }

    async fn keep_full(&self, index: usize) {
        let pool = &self.inner.pools.pools[index];
        let mut pause = Duration::from_secs(1);
        loop {
            if self.inner.stop.is_cancelled() {
                return;
            }
            let kind = self
                .wanted(pool)
                .ok()
                .map(|(admitted, template)| kind(&admitted, &template));
            let missing = {
                let mut state = pool.state();
                let is_current = state.template == kind;
                let (alive, dead): (VecDeque<_>, VecDeque<_>) = std::mem::take(&mut state.ready)
                    .into_iter()
                    .partition(|pooled| is_current && pooled.is_alive());
                state.ready = alive;
                let missing = pool.setting.size.saturating_sub(state.ready.len());
                drop(state);
                self.discard_pooled(dead);
                missing
            };
            let wait = if missing == 0 {
                Duration::from_secs(30)
            } else {
                match self.boot_one(pool).await {
                    Ok(()) => {
                        pause = Duration::from_secs(1);
                        continue;
                    }
                    Err(fault) => {
                        tracing::warn!(template = pool.setting.template, %fault, "a pool could not be filled; trying again");
                        pause = (pause * 2).min(Duration::from_secs(60));
                        pause
                    }
                }
            };
            tokio::select! {
                biased;
                () = pool.wake.notified() => self.let_the_burst_pass(pool).await,
                () = tokio::time::sleep(wait) => {}
                () = self.inner.stop.cancelled() => return,
            }
        }
    }

    /// Returns when nobody has claimed for a moment, or when nothing is left to claim.
    async fn let_the_burst_pass(&self, pool: &Pool) {
        while !pool.state().ready.is_empty() && !self.inner.stop.is_cancelled() {
            let claimed = tokio::time::timeout(REFILL_AFTER, pool.wake.notified()).await;
            if claimed.is_err() {
                return;
            }
        }
    }

    /// What it is to hold, as its name and the limits stand now.
    fn wanted(&self, pool: &Pool) -> Result<(Admitted, TemplateManifest), Fault> {
        let spec = SandboxSpec {
            template: pool.setting.template.clone(),
            resources: pool.setting.resources,
            timeout_millis: Some(self.settings().limits.min_timeout_millis),
            isolation_floor: pool.setting.isolation,
            ..SandboxSpec::default()
        };
        let admitted = atoll_lifecycle::admit(spec, &self.settings().limits, &self.tiers())?;
        let templates = self.inner.templates.of(&self.settings().pools_of);
        let template = find_template(&templates, &pool.setting.template)?;
        Ok((admitted, template))
    }

    async fn boot_one(&self, pool: &Pool) -> Result<(), Fault> {
        let (admitted, template) = self.wanted(pool)?;
        let kind = kind(&admitted, &template);
        let id: InstanceId = entropy::id();
        let _held = self.hold(id.clone());
        let spec = InstanceSpec {
            id: id.clone(),
            image: self.image(admitted.isolation, &template.digest)?,
            resources: admitted.spec.resources,
            hostname: "atoll".into(),
            restore: None,
            mounts: Vec::new(),
            network: None,
        };
        let instance = self.start_instance(admitted.isolation, spec, None, None).await?;
        let sandbox: SandboxId = entropy::id();
        let prepared = prepare(
            &instance.guest,
            &sandbox,
            &admitted.spec,
            &template,
            self.guest_network(None)?,
        )
        .await;
        if let Err(why) = prepared {
            self.discard(admitted.isolation, id);
            return Err(Fault::internal(why));
        }
        let stale = {
            let mut state = pool.state();
            let stale = if state.template.as_ref() == Some(&kind) {
                VecDeque::new()
            } else {
                state.template = Some(kind);
                std::mem::take(&mut state.ready)
            };
            state.ready.push_back(Pooled { instance, sandbox });
            stale
        };
        self.discard_pooled(stale);
        Ok(())
    }

    fn discard_pooled(&self, pooled: VecDeque<Pooled>) {
        for Pooled { instance, .. } in pooled {
            self.discard(instance.isolation, instance.id);
        }
    }
}

/// Does ahead what does not depend on who claims the instance: it is told who it will be, the servers of its template run,
/// and one program has run, since the first pays for loading the loader and the C library (a template without a shell is as
/// good without).
async fn prepare(
    guest: &Guest,
    sandbox: &SandboxId,
    spec: &SandboxSpec,
    template: &TemplateManifest,
    network: Option<GuestNetwork>,
) -> Result<(), String> {
    let start = template.start.as_ref();
    let request = Request::Configure(Configure {
        now_millis: u64::try_from(wall_clock().0).unwrap_or(0),
        network,
        ..greeting::identity(sandbox, spec, template, start)
    });
    guest.call(&request).await.map_err(|error| error.to_string())?;
    if let Some(ready) = start.and_then(|start| start.ready.as_ref()) {
        greeting::await_ready(guest, ready)
            .await
            .map_err(|error| error.to_string())?
            .map_err(|fault| fault.to_string())?;
    }
    let warmed = greeting::succeeds(guest, &["/bin/sh", "-c", "/bin/true"]);
    let _ = tokio::time::timeout(WARM_WITHIN, warmed).await;
    Ok(())
}
