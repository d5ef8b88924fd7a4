//! Budgets as the operator sets and sees them. What they let pass is decided elsewhere ([`crate::admission`]).
//!
//! What must hold: a budget that is changed keeps what was spent against it. One for a key or a sandbox is for one that exists:
//! a slip of the pen would cap nobody.

use atoll_gateway_core::Standing;
use atoll_store::{Fact, ModelBudgetRow};
use atoll_types::{BudgetId, BudgetScope, BudgetWindow, Code, Fault, ProjectId, SandboxId, Timestamp, Usd};

use super::{MOST_BUDGETS, check_name, has_room, missing, shown};
use crate::faults::from_store;
use crate::{Models, Who, fresh};

#[derive(Debug, Clone)]
pub struct SetBudget {
    pub name: String,
    pub scope: BudgetScope,
    pub subject: Option<String>,
    pub window: BudgetWindow,
    pub limit: Usd,
    pub alert_percent: Option<u8>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BudgetView {
    pub id: BudgetId,
    pub name: String,
    pub scope: BudgetScope,
    pub subject: Option<String>,
    pub window: BudgetWindow,
    pub limit: Usd,
    pub alert_percent: Option<u8>,
    pub created_at: Timestamp,
    pub standing: Vec<Standing>,
}

impl Models {
    /// Makes a budget, or changes the one of this name; what was spent stays.
    pub async fn set_budget(&self, project: &ProjectId, request: SetBudget) -> Result<BudgetView, Fault> {
        check_name("budget", &request.name)?;
        if request.limit < Usd::ZERO {
            return Err(Fault::new(Code::BudgetInvalid, "a budget is not negative"));
        }
        if request
            .alert_percent
            .is_some_and(|percent| !(1..=100).contains(&percent))
        {
            return Err(Fault::new(
                Code::BudgetInvalid,
                "an alert is told at 1 to 100 percent",
            ));
        }
        if request.scope == BudgetScope::Project && request.subject.is_some() {
            return Err(Fault::new(
                Code::BudgetInvalid,
                "a budget of the project is of this project",
            ));
        }
        if request
            .subject
            .as_ref()
            .is_some_and(|subject| subject.is_empty() || subject.len() > 200)
        {
            return Err(Fault::new(
                Code::BudgetInvalid,
                "a subject has 1 to 200 characters",
            ));
        }
        let _one_at_a_time = self.inner.changing.take(project).await;
        let setup = self.setup(project);
        let others = setup.budgets.keys().filter(|name| **name != request.name);
        has_room("budgets", others.count(), MOST_BUDGETS)?;
        let before = setup.budgets.get(&request.name).cloned();
        let is_known = before
            .as_ref()
            .is_some_and(|row| (row.scope, &row.subject) == (request.scope, &request.subject));
        let subject = match request.subject {
            // One that was there when the budget was made may be gone by now.
            Some(subject) if !is_known => Some(self.subject(project, request.scope, subject).await?),
            subject => subject,
        };
        let row = ModelBudgetRow {
            id: before.as_ref().map_or_else(fresh, |row| row.id.clone()),
            project: project.clone(),
            name: request.name,
            scope: request.scope,
            subject,
            window: request.window,
            limit: request.limit,
            alert_percent: request.alert_percent,
            created_at: before.map_or_else(|| self.now(), |row| row.created_at),
        };
        let fact = self.fact(
            project,
            Fact::BudgetSet {
                budget: row.name.clone(),
                limit: row.limit,
            },
        );
        self.store()
            .models
            .put_model_budget(row.clone(), vec![fact])
            .await
            .map_err(|e| from_store(&e))?;
        self.enter_budget(row.clone()).await;
        let view = self.budget_view(&row);
        self.change(project, |setup| {
            setup.budgets.insert(row.name.clone(), row);
        });
        Ok(view)
    }

    /// The id of whom a budget is for. Workflows and runs have names that others give them, perhaps later.
    async fn subject(
        &self,
        project: &ProjectId,
        scope: BudgetScope,
        subject: String,
    ) -> Result<String, Fault> {
        match scope {
            BudgetScope::Project | BudgetScope::Workflow | BudgetScope::Run => return Ok(subject),
            BudgetScope::Sandbox => {
                if let Ok(id) = subject.parse::<SandboxId>()
                    && let Some(row) = self
                        .store()
                        .sandboxes
                        .sandbox(project, &id)
                        .await
                        .map_err(|e| from_store(&e))?
                {
                    return Ok(row.id.as_str().to_owned());
                }
            }
            BudgetScope::Key => {
                if let Ok(id) = subject.parse()
                    && self.inner.identity.has_key(project, &id).await?
                {
                    return Ok(subject);
                }
                let called = self.store().models.model_keys_called(project, &subject).await;
                match &called.map_err(|e| from_store(&e))?[..] {
                    [one] => return Ok(one.as_str().to_owned()),
                    [first, ..] if first.as_str() == subject => return Ok(subject),
                    [_, ..] => {
                        let message = format!("there are several keys named `{}`", shown(&subject));
                        return Err(Fault::new(Code::SubjectAmbiguous, message)
                            .hint("name it by its id; `atoll model key list` shows it"));
                    }
                    [] => {}
                }
            }
        }
        let message = format!("there is no {scope} `{}` in this project", shown(&subject));
        let hint = match scope {
            BudgetScope::Sandbox => "name it by its id; `atoll list` shows it",
            _ => "`atoll model key list` shows those that exist; a virtual key goes by its name, too",
        };
        Err(Fault::new(Code::SubjectNotFound, message).hint(hint))
    }

    pub fn list_budgets(&self, project: &ProjectId) -> Vec<BudgetView> {
        self.setup(project)
            .budgets
            .values()
            .map(|row| self.budget_view(row))
            .collect()
    }

    pub async fn delete_budget(&self, project: &ProjectId, name: &str) -> Result<(), Fault> {
        let _one_at_a_time = self.inner.changing.take(project).await;
        let Some(row) = self.setup(project).budgets.get(name).cloned() else {
            return Err(missing("budget", name));
        };
        let fact = self.fact(
            project,
            Fact::BudgetDeleted {
                budget: name.to_owned(),
            },
        );
        self.store()
            .models
            .delete_model_budget(project, name, vec![fact])
            .await
            .map_err(|e| from_store(&e))?;
        self.books().remove(&row.id);
        self.change(project, |setup| {
            setup.budgets.remove(name);
        });
        Ok(())
    }

    /// What a caller may still spend, as far as they may know: what is left of the tightest budget that applies to them;
    /// `None`: none does. Sandboxes and holders of virtual keys hear of budgets of their own alone: what is left of one that
    /// they share says what others spend.
    pub fn left_for(&self, who: &Who) -> Option<Usd> {
        let told: fn(BudgetScope) -> bool = match who.manages() {
            true => |_| true,
            false => |scope| matches!(scope, BudgetScope::Key | BudgetScope::Sandbox),
        };
        self.books().left(&who.spender, told, self.now())
    }

    fn budget_view(&self, row: &ModelBudgetRow) -> BudgetView {
        BudgetView {
            standing: self.books().standing(&row.id, self.now()),
            id: row.id.clone(),
            name: row.name.clone(),
            scope: row.scope,
            subject: row.subject.clone(),
            window: row.window,
            limit: row.limit,
            alert_percent: row.alert_percent,
            created_at: row.created_at,
        }
    }
}
