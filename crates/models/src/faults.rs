//! Why a call cannot be served, in one form for every wire.

use std::time::Duration;

use atoll_dialects::{PeekError, Untranslatable};
use atoll_gateway_core::{Exhausted, NoRoute};
use atoll_types::{BudgetScope, Code, Fault, KeyId, ModelCallId, SandboxId, Timestamp};

use crate::{Upstream, Who};

/// A fault, and what a front end can tell beside it.
#[derive(Debug)]
pub struct Refusal {
    pub fault: Box<Fault>,
    /// The call, where it had begun.
    pub call: Option<ModelCallId>,
    pub retry_after: Option<Duration>,
    /// The field of the request that is at fault.
    pub field: Option<String>,
    /// What the provider said, where it was the provider who refused.
    pub upstream: Option<Box<Upstream>>,
}

impl From<Fault> for Refusal {
    fn from(fault: Fault) -> Self {
        Self {
            fault: Box::new(fault),
            call: None,
            retry_after: None,
            field: None,
            upstream: None,
        }
    }
}

impl From<Untranslatable> for Refusal {
    fn from(error: Untranslatable) -> Self {
        let fault = Fault::new(Code::Untranslatable, error.to_string());
        Self {
            field: Some(error.field),
            ..fault.into()
        }
    }
}

impl From<PeekError> for Refusal {
    fn from(error: PeekError) -> Self {
        Fault::new(Code::InvalidBody, error.to_string()).into()
    }
}

impl From<NoRoute> for Refusal {
    fn from(error: NoRoute) -> Self {
        let fault = Fault::new(Code::ModelNotFound, error.to_string());
        let hint = match error {
            NoRoute::Unknown { .. } => {
                "`atoll model list` shows what can be called; `provider/model` names one directly"
            }
            NoRoute::Excluded { .. } => "leave out `only`, `ignore` or `order`",
        };
        fault.hint(hint).into()
    }
}

/// As told to anybody: what a project has and spends is not for whoever may call a model.
impl From<Box<Exhausted>> for Refusal {
    fn from(refused: Box<Exhausted>) -> Self {
        if !refused.is_known {
            return unknown();
        }
        let message = format!(
            "a budget of the project does not allow this call; {}",
            resets(&refused)
        );
        Fault::new(Code::BudgetExhausted, message)
            .hint("ask for fewer tokens (`max_tokens`), use a cheaper model, or ask whoever manages the project's budgets")
            .into()
    }
}

impl Refusal {
    /// A budget does not allow a call. Whose own budget it is, is told the amounts; and whoever may see all of them anyway.
    pub(crate) fn exhausted(refused: Box<Exhausted>, who: &Who) -> Self {
        if !refused.is_known {
            return unknown();
        }
        let spender = &who.spender;
        let is_own = match refused.budget.scope {
            BudgetScope::Key => spender.key.as_ref().map(KeyId::as_str) == Some(&refused.subject),
            BudgetScope::Sandbox => spender.sandbox.as_ref().map(SandboxId::as_str) == Some(&refused.subject),
            BudgetScope::Project | BudgetScope::Workflow | BudgetScope::Run => false,
        };
        if !is_own && !who.manages() {
            return refused.into();
        }
        Fault::new(Code::BudgetExhausted, standing(&refused))
            .hint("ask for fewer tokens (`max_tokens`), use a cheaper model, or raise the budget with `atoll budget set`")
            .into()
    }
}

fn unknown() -> Refusal {
    let message = "what was spent of a budget of the project is not known yet, so calls under it wait";
    let fault = Fault::new(Code::BudgetUnknown, message);
    Refusal {
        retry_after: Some(crate::SUMMED_AGAIN),
        ..fault
            .hint("try again in a moment; the server's log says why")
            .into()
    }
}

/// How the budget stands that does not allow a call.
pub(crate) fn standing(refused: &Exhausted) -> String {
    let Exhausted {
        budget,
        subject,
        spent,
        reserved,
        wanted,
        ..
    } = refused;
    let whose = match budget.scope {
        BudgetScope::Project => "the project".to_owned(),
        scope => format!("{scope} `{subject}`"),
    };
    format!(
        "the budget `{}` of {whose} does not allow this call: of ${} a {}, ${spent} is spent and ${reserved} reserved by calls \
         under way, and this one may cost up to ${wanted}; {}",
        budget.name,
        budget.limit,
        budget.window,
        resets(refused),
    )
}

fn resets(refused: &Exhausted) -> String {
    refused.resets_at.map_or_else(
        || "it never resets".to_owned(),
        |at| format!("it resets at {}", time(at)),
    )
}

/// `2026-01-31T00:00:00Z`: budgets reset at midnight.
fn time(at: Timestamp) -> String {
    jiff::Timestamp::from_millisecond(at.0).map_or_else(|_| at.0.to_string(), |at| at.to_string())
}

pub(crate) fn from_store(error: &atoll_store::Error) -> Fault {
    match error {
        atoll_store::Error::NameTaken { .. } => Fault::new(Code::NameTaken, error.to_string()),
        atoll_store::Error::NotFound { .. } => Fault::new(Code::NotFound, error.to_string()),
        atoll_store::Error::TooMuchWork { .. } => Fault::new(
            Code::OutOfRange,
            "there are too many calls in this time to go through them in 10 seconds",
        )
        .hint("ask for a shorter time, with `from` and `to`"),
        error => {
            tracing::error!(%error, "the store failed");
            Fault::internal(format!("the server's database failed: {error}"))
        }
    }
}
