//! What may not leave for a provider: requests that are too large, models that are blocked, personal data.
//!
//! It is looked at before anything else of a request, so what is refused or redacted here reaches no provider, no row and no
//! log. By default there is nothing to look for.

use std::sync::Arc;

use atoll_dialects::screen::{Action, Screen, Stopped};
use atoll_gateway_core::{Pattern, Target, input_tokens};
use atoll_store::{ModelGuards, ModelGuardsRow};
use atoll_types::{Code, Fault, ProjectId};
use bytes::Bytes;

use crate::faults::{Refusal, from_store};
use crate::setup::ProjectSetup;
use crate::{Models, Who};

const MOST_RULES: usize = 100;
/// Bodies from this size on are not screened in passing.
const LONG: usize = 64 * 1024;

/// A project's guards, ready for use.
#[derive(Debug)]
pub(crate) struct Guards {
    pub(crate) said: ModelGuards,
    blocked: Vec<Pattern>,
    screen: Screen,
}

impl Guards {
    pub(crate) fn compile(said: ModelGuards) -> Result<Self, String> {
        if said.blocked.len() > MOST_RULES || said.screen.len() > MOST_RULES {
            return Err(format!("there are at most {MOST_RULES} of each"));
        }
        let blocked = said
            .blocked
            .iter()
            .map(|name| name.parse())
            .collect::<Result<_, _>>()?;
        let rules = said.screen.iter().map(|rule| {
            let action = if rule.redact {
                Action::Redact
            } else {
                Action::Refuse
            };
            (rule.name.as_str(), rule.pattern.as_deref(), action)
        });
        let screen = Screen::new(rules)?;
        Ok(Self {
            said,
            blocked,
            screen,
        })
    }

    /// Whether one of the names under which a model would be called is blocked.
    fn blocks(&self, asked: &str, targets: &[Target]) -> Option<String> {
        let full = |target: &Target| format!("{}/{}", target.provider, target.model);
        let names = targets
            .iter()
            .flat_map(|target| [target.model.clone(), full(target)]);
        std::iter::once(asked.to_owned())
            .chain(names)
            .find(|name| self.blocked.iter().any(|pattern| pattern.matches(name)))
    }
}

impl Models {
    /// What a project guards against.
    pub fn guards(&self, project: &ProjectId) -> ModelGuards {
        let setup = self.setup(project);
        setup
            .guards
            .as_ref()
            .map(|guards| guards.said.clone())
            .unwrap_or_default()
    }

    /// Replaces a project's guards.
    pub async fn set_guards(&self, project: &ProjectId, guards: ModelGuards) -> Result<(), Fault> {
        let compiled = Guards::compile(guards.clone()).map_err(|why| Fault::new(Code::GuardsInvalid, why))?;
        let _one_at_a_time = self.inner.setup_lock.lock().await;
        let row = ModelGuardsRow {
            project: project.clone(),
            guards,
            updated_at: self.now(),
        };
        self.store()
            .models
            .put_model_guards(row)
            .await
            .map_err(|e| from_store(&e))?;
        self.change(project, |setup| setup.guards = Some(Arc::new(compiled)));
        Ok(())
    }

    /// The body as it may be sent. Patterns are the tenant's, and so is the text: what may take long does so where nobody
    /// else waits for it.
    pub(crate) async fn guarded_body(&self, who: &Who, body: Bytes) -> Result<Bytes, Refusal> {
        let screens = self.setup(&who.spender.project);
        let screens = screens
            .guards
            .as_ref()
            .is_some_and(|guards| !guards.screen.is_empty());
        if !screens || body.len() < LONG {
            return self.guard(who, body);
        }
        let (models, who) = (self.clone(), who.clone());
        let guarded = self
            .inner
            .runtime
            .spawn_blocking(move || models.guard(&who, body));
        guarded
            .await
            .map_err(|_| Fault::internal("the request could not be screened"))?
    }

    fn guard(&self, who: &Who, body: Bytes) -> Result<Bytes, Refusal> {
        let setup = self.setup(&who.spender.project);
        let Some(guards) = &setup.guards else {
            return Ok(body);
        };
        if let Some(most) = guards.said.max_input_tokens
            && input_tokens(&body) > most
        {
            let reason =
                format!("the request is estimated at more than the {most} tokens that a guard allows");
            return Err(self.guarded(who, "", Code::InputTooLarge, reason));
        }
        if guards.screen.is_empty() {
            return Ok(body);
        }
        guards.screen.apply(&body).map_err(|stopped| match stopped {
            Stopped::Found(_) => self.guarded(who, "", Code::GuardRefused, stopped.to_string()),
            Stopped::Unreadable => Fault::new(Code::InvalidBody, stopped.to_string()).into(),
        })
    }

    pub(crate) fn refuse_blocked(
        &self,
        who: &Who,
        setup: &ProjectSetup,
        asked: &str,
        targets: &[Target],
    ) -> Result<(), Refusal> {
        match setup
            .guards
            .as_ref()
            .and_then(|guards| guards.blocks(asked, targets))
        {
            None => Ok(()),
            Some(name) => {
                let reason = format!("the model `{name}` is blocked by a guard of this project");
                Err(self.guarded(who, asked, Code::ModelBlocked, reason))
            }
        }
    }

    fn guarded(&self, who: &Who, model: &str, code: Code, reason: String) -> Refusal {
        self.note_refusal(who, model, "guard", &reason);
        Fault::new(code, reason)
            .hint("`atoll model guard` shows what is guarded against")
            .into()
    }
}
