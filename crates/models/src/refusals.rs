//! Facts of calls that were refused before they began.
//!
//! Being refused costs a caller nothing, so it is told at once the first time, and then once a minute with how often. What must
//! hold: what is remembered, and what is written, is bounded however many callers are refused however often. Beyond so many
//! callers of a project, the others are told of together.

use std::collections::HashMap;
use std::time::Duration;

use atoll_store::{Fact, NewFact};
use atoll_types::{KeyId, ProjectId, SandboxId};
use parking_lot::Mutex;

use crate::{Models, Who};

/// For how long the same refusal of the same caller is counted before it is told again.
const TOLD_EVERY: Duration = Duration::from_secs(60);
/// Callers of one project that are told of one by one.
const CALLERS: usize = 100;

/// Whom it concerns, and why. Of callers that are told of together, neither key nor sandbox is known.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Which {
    key: Option<KeyId>,
    sandbox: Option<SandboxId>,
    code: &'static str,
}

/// What happened since it was last told.
#[derive(Debug, Default)]
struct Since {
    count: u64,
    model: String,
    reason: String,
}

#[derive(Debug, Default)]
pub(crate) struct Refusals(Mutex<HashMap<ProjectId, HashMap<Which, Since>>>);

impl Refusals {
    /// Which one it belongs to, if it is the first for a while, and is to be told at once; else it is counted.
    fn count(&self, project: &ProjectId, mut which: Which, model: &str, reason: &str) -> Option<Which> {
        let mut all = self.0.lock();
        let of_project = all.entry(project.clone()).or_default();
        if of_project.len() >= CALLERS && !of_project.contains_key(&which) {
            (which.key, which.sandbox) = (None, None);
        }
        if let Some(since) = of_project.get_mut(&which) {
            since.count += 1;
            model.clone_into(&mut since.model);
            reason.clone_into(&mut since.reason);
            return None;
        }
        of_project.insert(which.clone(), Since::default());
        Some(which)
    }

    /// What has been counted; the next one is the first again.
    fn take(&self, project: &ProjectId, which: &Which) -> Option<Since> {
        let mut all = self.0.lock();
        let of_project = all.get_mut(project)?;
        let since = of_project.remove(which);
        if of_project.is_empty() {
            all.remove(project);
        }
        since.filter(|since| since.count > 0)
    }
}

impl Models {
    /// Writes down that the token of a sandbox was shown where it is not good: somebody has taken it elsewhere.
    pub fn note_stray_token(&self, who: &Who, reason: &str) {
        self.note_refusal(who, "", "token", reason);
    }

    /// Writes down that a call was refused.
    pub(crate) fn note_refusal(&self, who: &Who, model: &str, code: &'static str, reason: &str) {
        let model: String = model.chars().take(200).collect();
        let project = who.spender.project.clone();
        let which = Which {
            key: who.spender.key.clone(),
            sandbox: who.spender.sandbox.clone(),
            code,
        };
        let Some(which) = self.inner.refusals.count(&project, which, &model, reason) else {
            return;
        };
        let first = Since {
            count: 1,
            model,
            reason: reason.to_owned(),
        };
        let models = self.clone();
        self.spawn(async move {
            models.tell_refusals(&project, &which, first).await;
            tokio::select! {
                () = models.inner.stopping.cancelled() => {}
                () = tokio::time::sleep(TOLD_EVERY) => {}
            }
            if let Some(more) = models.inner.refusals.take(&project, &which) {
                models.tell_refusals(&project, &which, more).await;
            }
        });
    }

    async fn tell_refusals(&self, project: &ProjectId, which: &Which, since: Since) {
        let fact = NewFact {
            at: self.now(),
            project: project.clone(),
            sandbox: which.sandbox.clone(),
            fact: Fact::ModelRefused {
                model: since.model,
                code: which.code.into(),
                reason: since.reason,
                count: since.count,
            },
        };
        if let Err(error) = self.store().ledger.append_facts(vec![fact]).await {
            tracing::warn!(%error, "refused model calls could not be written down");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn which(n: u8, code: &'static str) -> Which {
        Which {
            key: Some(KeyId::from_entropy([n % 32; 20])),
            sandbox: Some(SandboxId::from_entropy([n / 32; 20])),
            code,
        }
    }

    #[test]
    fn the_same_refusal_is_told_once_and_then_counted() {
        let (refusals, project) = (Refusals::default(), ProjectId::from_entropy([1; 20]));
        let count = |n, code, model| refusals.count(&project, which(n, code), model, "r");
        let first = count(1, "rate", "a").unwrap();
        assert_eq!(count(1, "rate", "b"), None);
        assert_eq!(count(1, "rate", "c"), None);
        assert!(count(2, "rate", "a").is_some(), "another caller");
        assert!(count(1, "budget", "a").is_some(), "for another reason");
        let other = ProjectId::from_entropy([2; 20]);
        assert!(refusals.count(&other, which(1, "rate"), "a", "r").is_some());
        let more = refusals.take(&project, &first).unwrap();
        assert_eq!((more.count, more.model.as_str()), (2, "c"));
        assert!(count(1, "rate", "a").is_some(), "the first again");
        assert!(
            refusals.take(&project, &first).is_none(),
            "which was told at once"
        );
    }

    #[test]
    fn beyond_so_many_callers_they_are_told_of_together_and_other_projects_are_not() {
        let (refusals, project) = (Refusals::default(), ProjectId::from_entropy([1; 20]));
        let told = (0..=255_u8).filter_map(|n| refusals.count(&project, which(n, "rate"), "m", "r"));
        assert_eq!(told.count(), CALLERS + 1);
        let together = Which {
            key: None,
            sandbox: None,
            code: "rate",
        };
        let more = refusals.take(&project, &together).unwrap();
        assert_eq!(more.count, 255 - CALLERS as u64);
        let other = ProjectId::from_entropy([2; 20]);
        assert_eq!(
            refusals.count(&other, which(200, "rate"), "m", "r"),
            Some(which(200, "rate"))
        );
    }
}
