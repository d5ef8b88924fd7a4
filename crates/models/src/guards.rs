//! What may not leave for a provider: requests that are too large, models that are blocked, personal data.
//!
//! It is looked at before anything else of a request, so what is refused or redacted here reaches no provider, no row and no
//! log. By default there is nothing to look for.
//!
//! What must hold: patterns are the tenant's, and so is the text, and both may be made to take long together. Patterns of a
//! project's own never run where others wait ([`crate::work`]), and on each text for [`LONGEST`] at most. Guards that were kept
//! and cannot be used any more refuse that project's calls, and nobody else's.

use std::sync::Arc;
use std::time::{Duration, Instant};

use atoll_dialects::screen::{Action, Screen, Stopped};
use atoll_gateway_core::{Pattern, Target, input_tokens};
use atoll_store::{ModelGuards, ModelGuardsRow};
use atoll_types::{Code, Fault, ProjectId};
use bytes::Bytes;

use crate::faults::{Refusal, from_store};
use crate::setup::ProjectSetup;
use crate::work::LONG;
use crate::{Models, Who};

const MOST_RULES: usize = 100;
/// For how long one text may be looked through.
const LONGEST: Duration = Duration::from_secs(5);

/// Whether there is time left to look through a text.
pub(crate) fn in_time() -> impl Fn() -> bool {
    let until = Instant::now() + LONGEST;
    move || Instant::now() < until
}

/// A project's guards, ready for use.
#[derive(Debug)]
pub(crate) struct Guards {
    pub(crate) said: ModelGuards,
    blocked: Vec<Pattern>,
    /// Or why it cannot be used.
    screen: Result<Screen, String>,
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
            screen: Ok(screen),
        })
    }

    /// As they were kept. What was kept was checked; if it cannot be used all the same, calls must not go out unguarded.
    pub(crate) fn kept(said: ModelGuards) -> Self {
        Self::compile(said.clone()).unwrap_or_else(|why| Self {
            said,
            blocked: Vec::new(),
            screen: Err(why),
        })
    }

    pub(crate) fn unusable(&self) -> Option<&str> {
        self.screen.as_ref().err().map(String::as_str)
    }

    /// As how many bytes a text of this size counts to whoever looks through it: with patterns of a project's own, a short one
    /// may take long, too.
    pub(crate) fn weight(&self, size: usize) -> usize {
        let has_own = self.said.screen.iter().any(|rule| rule.pattern.is_some());
        if has_own { size.max(LONG) } else { size }
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
        let _one_at_a_time = self.inner.changing.take(project).await;
        let said = guards.clone();
        let compiled = self
            .apart(project, LONG, || Guards::compile(said))
            .await?
            .map_err(|why| Fault::new(Code::GuardsInvalid, why))?;
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

    /// As how many bytes a body counts to whoever decides about it.
    pub(crate) fn weight(&self, project: &ProjectId, body: &[u8]) -> usize {
        let setup = self.setup(project);
        let guards = setup.guards.as_ref();
        guards.map_or(body.len(), |guards| guards.weight(body.len()))
    }

    /// The body as it may be sent, by the guards that hold now.
    pub(crate) fn guarded_body(&self, who: &Who, body: Bytes) -> Result<Bytes, Refusal> {
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
        let screen = guards.screen.as_ref().map_err(|why| {
            let reason =
                format!("the guards of this project cannot be used any more, so no call goes out: {why}");
            self.note_refusal(who, "", "guard", &reason);
            Fault::new(Code::GuardsUnusable, reason).hint("set them anew with `atoll model guard set`")
        })?;
        if screen.is_empty() {
            return Ok(body);
        }
        screen.apply(&body, in_time()).map_err(|stopped| match stopped {
            Stopped::Found(_) => self.guarded(who, "", Code::GuardRefused, stopped.to_string()),
            Stopped::TooLong => {
                self.note_refusal(who, "", "guard", &stopped.to_string());
                Fault::new(Code::GuardTooSlow, stopped.to_string())
                    .hint("send less at once, or make the project's own patterns simpler: `atoll model guard` shows them")
                    .into()
            }
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

#[cfg(test)]
mod tests {
    use atoll_store::ScreenRule;

    use super::*;

    /// What may take long is not done where others wait.
    #[test]
    fn a_short_text_counts_as_a_long_one_where_patterns_are_the_projects_own() {
        let guards = |name: &str, pattern: Option<&str>| {
            let rule = ScreenRule {
                name: name.into(),
                pattern: pattern.map(str::to_owned),
                redact: false,
            };
            let said = ModelGuards {
                screen: vec![rule],
                ..ModelGuards::default()
            };
            Guards::compile(said).unwrap()
        };
        assert_eq!(guards("own", Some("a[ab]{100}c")).weight(1), LONG);
        assert_eq!(guards("own", Some("a[ab]{100}c")).weight(2 * LONG), 2 * LONG);
        assert_eq!(guards("email", None).weight(1), 1);
    }
}
