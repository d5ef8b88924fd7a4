//! Budgets as the operator sets and sees them. What they let pass is decided elsewhere ([`crate::admission`]).
//!
//! What must hold: a budget that is changed keeps what was spent against it.

use atoll_gateway_core::Standing;
use atoll_store::{Fact, ModelBudgetRow};
use atoll_types::{BudgetId, BudgetScope, BudgetWindow, Fault, ProjectId, Timestamp, Usd};

use super::{check_name, missing};
use crate::faults::from_store;
use crate::{Models, fresh};

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
            return Err(Fault::invalid("budget_invalid", "a budget is not negative"));
        }
        if request
            .alert_percent
            .is_some_and(|percent| !(1..=100).contains(&percent))
        {
            return Err(Fault::invalid(
                "budget_invalid",
                "an alert is told at 1 to 100 percent",
            ));
        }
        if request.scope == BudgetScope::Project && request.subject.is_some() {
            return Err(Fault::invalid(
                "budget_invalid",
                "a budget of the project is of this project",
            ));
        }
        if request
            .subject
            .as_ref()
            .is_some_and(|subject| subject.is_empty() || subject.len() > 200)
        {
            return Err(Fault::invalid(
                "budget_invalid",
                "a subject has 1 to 200 characters",
            ));
        }
        let _one_at_a_time = self.inner.setup_lock.lock().await;
        let before = self.setup(project).budgets.get(&request.name).cloned();
        let row = ModelBudgetRow {
            id: before.as_ref().map_or_else(fresh, |row| row.id.clone()),
            project: project.clone(),
            name: request.name,
            scope: request.scope,
            subject: request.subject,
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
            .put_model_budget(row.clone(), vec![fact])
            .await
            .map_err(|e| from_store(&e))?;
        self.enter_budget(row.clone()).await?;
        let view = self.budget_view(&row);
        self.change(project, |setup| {
            setup.budgets.insert(row.name.clone(), row);
        });
        Ok(view)
    }

    pub fn list_budgets(&self, project: &ProjectId) -> Vec<BudgetView> {
        self.setup(project)
            .budgets
            .values()
            .map(|row| self.budget_view(row))
            .collect()
    }

    pub async fn delete_budget(&self, project: &ProjectId, name: &str) -> Result<(), Fault> {
        let _one_at_a_time = self.inner.setup_lock.lock().await;
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
            .delete_model_budget(project, name, vec![fact])
            .await
            .map_err(|e| from_store(&e))?;
        self.books().remove(&row.id);
        self.change(project, |setup| {
            setup.budgets.remove(name);
        });
        Ok(())
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
