//! `/v1/gateway/budgets`: caps that hold.

use atoll_models::{BudgetView, SetBudget};
use atoll_types::{BudgetScope, BudgetWindow, Usd};
use axum::extract::State;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::{Deleted, word};
use crate::App;
use crate::error::Answer;
use crate::extract::{As, At, Json};
use crate::wire::time;

pub(super) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(list_budgets))
        .routes(routes!(set_budget, delete_budget))
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SetBudgetRequest {
    /// Dollars: a decimal number in text.
    #[schema(examples("20.00"))]
    limit: String,
    /// When it begins anew, in UTC. Default: `total`, never.
    #[schema(value_type = Option<String>, pattern = "^(day|week|month|total)$")]
    window: Option<BudgetWindow>,
    /// Whose spending it caps; each has its own. Default: the project's.
    #[schema(value_type = Option<String>, pattern = "^(project|key|workflow|run|sandbox)$")]
    scope: Option<BudgetScope>,
    /// The one that it is for, by its id or its name: sandboxes by their id alone. Default: every one of the scope.
    subject: Option<String>,
    /// Tell when so much is spent.
    #[schema(minimum = 1, maximum = 100)]
    alert_percent: Option<u8>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Budget {
    id: String,
    name: String,
    #[schema(value_type = String)]
    scope: BudgetScope,
    subject: Option<String>,
    #[schema(value_type = String)]
    window: BudgetWindow,
    limit: String,
    alert_percent: Option<u8>,
    #[schema(format = DateTime)]
    created_at: String,
    standing: Vec<Standing>,
}

/// How one whom a budget caps stands now.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Standing {
    subject: String,
    spent: String,
    /// Set aside for calls under way.
    reserved: String,
    #[schema(format = DateTime)]
    resets_at: Option<String>,
}

impl Budget {
    fn of(view: BudgetView) -> Self {
        let standing = view.standing.into_iter().map(|standing| Standing {
            subject: standing.subject,
            spent: standing.spent.to_string(),
            reserved: standing.reserved.to_string(),
            resets_at: standing.resets_at.map(time),
        });
        Self {
            id: view.id.to_string(),
            name: view.name,
            scope: view.scope,
            subject: view.subject,
            window: view.window,
            limit: view.limit.to_string(),
            alert_percent: view.alert_percent,
            created_at: time(view.created_at),
            standing: standing.collect(),
        }
    }
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct BudgetList {
    items: Vec<Budget>,
}

/// Lists the budgets and how they stand.
#[utoipa::path(
    get, path = "/v1/gateway/budgets", tag = "models",
    security(("key" = ["models.read"])),
    responses((status = 200, description = "The budgets.", body = BudgetList))
)]
pub(crate) async fn list_budgets(State(app): State<App>, As(caller): As) -> Answer<axum::Json<BudgetList>> {
    let items = app.models.list_budgets(caller.project());
    Ok(axum::Json(BudgetList {
        items: items.into_iter().map(Budget::of).collect(),
    }))
}

/// Sets a budget, or changes it; what was spent stays.
#[utoipa::path(
    put, path = "/v1/gateway/budgets/{budget}", tag = "models",
    security(("key" = ["models.manage"])), request_body = SetBudgetRequest,
    responses((status = 200, description = "The budget.", body = Budget))
)]
pub(crate) async fn set_budget(
    State(app): State<App>,
    As(caller): As,
    At(name): At<String>,
    Json(body): Json<SetBudgetRequest>,
) -> Answer<axum::Json<Budget>> {
    let request = SetBudget {
        name,
        scope: body.scope.unwrap_or(BudgetScope::Project),
        subject: body.subject,
        window: body.window.unwrap_or(BudgetWindow::Total),
        limit: word::<Usd>("limit", &body.limit)?,
        alert_percent: body.alert_percent,
    };
    let view = app.models.set_budget(caller.project(), request).await?;
    Ok(axum::Json(Budget::of(view)))
}

/// Takes a budget away.
#[utoipa::path(
    delete, path = "/v1/gateway/budgets/{budget}", tag = "models",
    security(("key" = ["models.manage"])),
    responses((status = 200, description = "It is gone.", body = Deleted))
)]
pub(crate) async fn delete_budget(
    State(app): State<App>,
    As(caller): As,
    At(name): At<String>,
) -> Answer<axum::Json<Deleted>> {
    app.models.delete_budget(caller.project(), &name).await?;
    Ok(axum::Json(Deleted { deleted: name }))
}
