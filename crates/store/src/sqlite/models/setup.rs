//! What the operator sets for models, in SQLite.

use async_trait::async_trait;
use atoll_types::{BudgetId, KeyId, ProjectId, SecretId, Timestamp, Usd};
use rusqlite::{Connection, Row};

use crate::sqlite::{Models, facts, page, sql};
use crate::{
    Cursor, Error, ModelBudgetRow, ModelGuardsRow, ModelKeyRow, ModelPriceRow, ModelProviderRow,
    ModelRouteRow, ModelSetup, ModelSetupStore, NewFact, Page,
};

#[async_trait]
impl ModelSetupStore for Models {
    async fn model_setup(&self) -> Result<ModelSetup, Error> {
        self.file
            .read("read the model gateway's setup", |db| {
                Ok(ModelSetup {
                    providers: sql::rows(
                        db,
                        "SELECT * FROM model_providers ORDER BY project, name",
                        &[],
                        read_provider,
                    )?,
                    routes: sql::rows(
                        db,
                        "SELECT * FROM model_routes ORDER BY project, name",
                        &[],
                        read_route,
                    )?,
                    prices: sql::rows(
                        db,
                        "SELECT * FROM model_prices ORDER BY project, model",
                        &[],
                        read_price,
                    )?,
                    keys: sql::rows(
                        db,
                        "SELECT * FROM model_keys WHERE revoked_at IS NULL",
                        &[],
                        read_key,
                    )?,
                    budgets: sql::rows(
                        db,
                        "SELECT * FROM model_budgets ORDER BY project, name",
                        &[],
                        read_budget,
                    )?,
                    guards: sql::rows(db, "SELECT * FROM model_guards", &[], read_guards)?,
                })
            })
            .await
    }

    async fn put_model_provider(&self, provider: ModelProviderRow, facts: Vec<NewFact>) -> Result<(), Error> {
        self.file.write("keep the provider", move |db| {
            let holder = sql::row(
                db,
                "SELECT id FROM model_providers WHERE project = ?1 AND name = ?2",
                &[&provider.project.as_str(), &provider.name],
                |row| sql::word::<SecretId>(row, "id"),
            )?;
            if holder.is_some_and(|id| id != provider.id) {
                return Err(Error::NameTaken { what: "provider", name: provider.name });
            }
            sql::execute(
                db,
                "INSERT INTO model_providers (id, project, name, kind, base_url, sealed, serves, responses, created_at, updated_at)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)
                 ON CONFLICT (id) DO UPDATE SET kind = excluded.kind, base_url = excluded.base_url,
                     sealed = excluded.sealed, serves = excluded.serves, responses = excluded.responses,
                     updated_at = excluded.updated_at",
                &[
                    &provider.id.as_str(),
                    &provider.project.as_str(),
                    &provider.name,
                    &provider.kind.name(),
                    &provider.base_url,
                    &provider.sealed,
                    &sql::to_json("a list of models", &provider.serves)?,
                    &provider.responses,
                    &provider.created_at.0,
                    &provider.updated_at.0,
                ],
            )?;
            facts::append(db, &facts)
        })
        .await
    }

    async fn delete_model_provider(
        &self,
        project: &ProjectId,
        name: &str,
        facts: Vec<NewFact>,
    ) -> Result<bool, Error> {
        self.delete_named(
            "DELETE FROM model_providers WHERE project = ?1 AND name = ?2",
            project,
            name,
            facts,
        )
        .await
    }

    async fn put_model_route(&self, route: ModelRouteRow) -> Result<(), Error> {
        self.file.write("keep the route", move |db| {
            sql::execute(
                db,
                "INSERT INTO model_routes (project, name, targets, fallbacks, updated_at) VALUES (?1, ?2, ?3, ?4, ?5)
                 ON CONFLICT (project, name) DO UPDATE SET
                     targets = excluded.targets, fallbacks = excluded.fallbacks, updated_at = excluded.updated_at",
                &[
                    &route.project.as_str(),
                    &route.name,
                    &sql::to_json("targets", &route.targets)?,
                    &sql::to_json("fallbacks", &route.fallbacks)?,
                    &route.updated_at.0,
                ],
            )?;
            Ok(())
        })
        .await
    }

    async fn delete_model_route(&self, project: &ProjectId, name: &str) -> Result<bool, Error> {
        self.delete_named(
            "DELETE FROM model_routes WHERE project = ?1 AND name = ?2",
            project,
            name,
            Vec::new(),
        )
        .await
    }

    async fn put_model_price(&self, price: ModelPriceRow) -> Result<(), Error> {
        self.file.write("keep the price", move |db| {
            sql::execute(
                db,
                "INSERT INTO model_prices (project, model, rates, updated_at) VALUES (?1, ?2, ?3, ?4)
                 ON CONFLICT (project, model) DO UPDATE SET rates = excluded.rates, updated_at = excluded.updated_at",
                &[
                    &price.project.as_str(),
                    &price.model,
                    &sql::to_json("rates", &price.rates)?,
                    &price.updated_at.0,
                ],
            )?;
            Ok(())
        })
        .await
    }

    async fn delete_model_price(&self, project: &ProjectId, model: &str) -> Result<bool, Error> {
        self.delete_named(
            "DELETE FROM model_prices WHERE project = ?1 AND model = ?2",
            project,
            model,
            Vec::new(),
        )
        .await
    }

    async fn insert_model_key(
        &self,
        key: ModelKeyRow,
        most: usize,
        facts: Vec<NewFact>,
    ) -> Result<bool, Error> {
        self.file
            .write("create the model key", move |db| {
                let (project, now, most) = (key.project.as_str(), key.created_at.0, sql::as_limit(most));
                let working = sql::row(
                    db,
                    "SELECT count(*) AS working FROM model_keys
                     WHERE project = ?1 AND revoked_at IS NULL AND (expires_at IS NULL OR expires_at > ?2)",
                    &[&project, &now],
                    |row| row.get::<_, i64>("working"),
                )?;
                if working.is_some_and(|working| working >= most) {
                    return Ok(false);
                }
                sql::execute(
                    db,
                    "DELETE FROM model_keys WHERE id IN
                         (SELECT id FROM model_keys
                          WHERE project = ?1 AND (revoked_at IS NOT NULL OR expires_at <= ?2)
                          ORDER BY coalesce(revoked_at, expires_at) DESC, id LIMIT -1 OFFSET ?3)",
                    &[&project, &now, &most],
                )?;
                sql::execute(
                    db,
                    "INSERT INTO model_keys (id, project, name, hash, prefix, models, requests_per_minute,
                     tokens_per_minute, created_at, expires_at, revoked_at)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11)",
                    &[
                        &key.id.as_str(),
                        &key.project.as_str(),
                        &key.name,
                        &key.hash,
                        &key.prefix,
                        &sql::to_json("a list of models", &key.models)?,
                        &key.requests_per_minute.map(sql::as_count),
                        &key.tokens_per_minute.map(sql::as_count),
                        &key.created_at.0,
                        &key.expires_at.map(|at| at.0),
                        &key.revoked_at.map(|at| at.0),
                    ],
                )?;
                facts::append(db, &facts)?;
                Ok(true)
            })
            .await
    }

    async fn model_keys(
        &self,
        project: &ProjectId,
        after: Option<Cursor>,
        limit: usize,
    ) -> Result<Page<ModelKeyRow>, Error> {
        let project = project.clone();
        self.file
            .read("list model keys", move |db| {
                page::newest(
                    db,
                    "SELECT * FROM model_keys WHERE project = ?".to_owned(),
                    vec![&project.as_str()],
                    after.as_ref(),
                    limit,
                    read_key,
                    |row| (row.created_at, row.id.as_str()),
                )
            })
            .await
    }

    async fn model_keys_called(&self, project: &ProjectId, called: &str) -> Result<Vec<KeyId>, Error> {
        let (project, called) = (project.clone(), called.to_owned());
        self.file
            .read("find model keys", move |db| {
                sql::rows(
                    db,
                    // An id is nobody else's name, as far as it matters: it comes first.
                    "SELECT id FROM model_keys WHERE project = ?1 AND (id = ?2 OR (name = ?2 AND revoked_at IS NULL))
                     ORDER BY id = ?2 DESC LIMIT 2",
                    &[&project.as_str(), &called],
                    |row| sql::word::<KeyId>(row, "id"),
                )
            })
            .await
    }

    async fn revoke_model_key(
        &self,
        project: &ProjectId,
        id: &KeyId,
        now: Timestamp,
        facts: Vec<NewFact>,
    ) -> Result<ModelKeyRow, Error> {
        let (project, id) = (project.clone(), id.clone());
        self.file.write("revoke the model key", move |db| {
            let changed = sql::execute(
                db,
                "UPDATE model_keys SET revoked_at = ?3 WHERE project = ?1 AND id = ?2 AND revoked_at IS NULL",
                &[&project.as_str(), &id.as_str(), &now.0],
            )?;
            if changed > 0 {
                facts::append(db, &facts)?;
            }
            let found = sql::row(
                db,
                "SELECT * FROM model_keys WHERE project = ?1 AND id = ?2",
                &[&project.as_str(), &id.as_str()],
                read_key,
            )?;
            found.ok_or_else(|| Error::NotFound {
                what: "model key",
                id: id.to_string(),
            })
        })
        .await
    }

    async fn put_model_budget(&self, budget: ModelBudgetRow, facts: Vec<NewFact>) -> Result<(), Error> {
        self.file.write("keep the budget", move |db| {
            let holder = sql::row(
                db,
                "SELECT id FROM model_budgets WHERE project = ?1 AND name = ?2",
                &[&budget.project.as_str(), &budget.name],
                |row| sql::word::<BudgetId>(row, "id"),
            )?;
            if holder.is_some_and(|id| id != budget.id) {
                return Err(Error::NameTaken { what: "budget", name: budget.name });
            }
            sql::execute(
                db,
                "INSERT INTO model_budgets (id, project, name, scope, subject, window, limit_pico, alert_percent, created_at)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)
                 ON CONFLICT (id) DO UPDATE SET scope = excluded.scope, subject = excluded.subject,
                     window = excluded.window, limit_pico = excluded.limit_pico, alert_percent = excluded.alert_percent",
                &[
                    &budget.id.as_str(),
                    &budget.project.as_str(),
                    &budget.name,
                    &budget.scope.name(),
                    &budget.subject,
                    &budget.window.name(),
                    &budget.limit.pico(),
                    &budget.alert_percent,
                    &budget.created_at.0,
                ],
            )?;
            facts::append(db, &facts)
        })
        .await
    }

    async fn delete_model_budget(
        &self,
        project: &ProjectId,
        name: &str,
        facts: Vec<NewFact>,
    ) -> Result<bool, Error> {
        self.delete_named(
            "DELETE FROM model_budgets WHERE project = ?1 AND name = ?2",
            project,
            name,
            facts,
        )
        .await
    }

    async fn put_model_guards(&self, row: ModelGuardsRow) -> Result<(), Error> {
        self.file.write("keep the guards", move |db| {
            sql::execute(
                db,
                "INSERT INTO model_guards (project, guards, updated_at) VALUES (?1, ?2, ?3)
                 ON CONFLICT (project) DO UPDATE SET guards = excluded.guards, updated_at = excluded.updated_at",
                &[
                    &row.project.as_str(),
                    &sql::to_json("guards", &row.guards)?,
                    &row.updated_at.0,
                ],
            )?;
            Ok(())
        })
        .await
    }
}

impl Models {
    /// Whether there was one; without, there are no facts either.
    async fn delete_named(
        &self,
        statement: &'static str,
        project: &ProjectId,
        name: &str,
        facts: Vec<NewFact>,
    ) -> Result<bool, Error> {
        let (project, name) = (project.clone(), name.to_owned());
        self.file
            .write("delete from the model gateway's setup", move |db: &Connection| {
                let deleted = sql::execute(db, statement, &[&project.as_str(), &name])? > 0;
                if deleted {
                    facts::append(db, &facts)?;
                }
                Ok(deleted)
            })
            .await
    }
}

fn read_provider(row: &Row<'_>) -> rusqlite::Result<ModelProviderRow> {
    Ok(ModelProviderRow {
        id: sql::word(row, "id")?,
        project: sql::word(row, "project")?,
        name: row.get("name")?,
        kind: sql::word(row, "kind")?,
        base_url: row.get("base_url")?,
        sealed: row.get("sealed")?,
        serves: sql::json(row, "serves")?,
        responses: row.get("responses")?,
        created_at: sql::time(row, "created_at")?,
        updated_at: sql::time(row, "updated_at")?,
    })
}

fn read_route(row: &Row<'_>) -> rusqlite::Result<ModelRouteRow> {
    Ok(ModelRouteRow {
        project: sql::word(row, "project")?,
        name: row.get("name")?,
        targets: sql::json(row, "targets")?,
        fallbacks: sql::json(row, "fallbacks")?,
        updated_at: sql::time(row, "updated_at")?,
    })
}

fn read_price(row: &Row<'_>) -> rusqlite::Result<ModelPriceRow> {
    Ok(ModelPriceRow {
        project: sql::word(row, "project")?,
        model: row.get("model")?,
        rates: sql::json(row, "rates")?,
        updated_at: sql::time(row, "updated_at")?,
    })
}

fn read_key(row: &Row<'_>) -> rusqlite::Result<ModelKeyRow> {
    let count = |column: &str| -> rusqlite::Result<Option<u64>> {
        let value: Option<i64> = row.get(column)?;
        Ok(value.and_then(|value| u64::try_from(value).ok()))
    };
    Ok(ModelKeyRow {
        id: sql::word(row, "id")?,
        project: sql::word(row, "project")?,
        name: row.get("name")?,
        hash: row.get("hash")?,
        prefix: row.get("prefix")?,
        models: sql::json(row, "models")?,
        requests_per_minute: count("requests_per_minute")?,
        tokens_per_minute: count("tokens_per_minute")?,
        created_at: sql::time(row, "created_at")?,
        expires_at: sql::maybe_time(row, "expires_at")?,
        revoked_at: sql::maybe_time(row, "revoked_at")?,
    })
}

fn read_budget(row: &Row<'_>) -> rusqlite::Result<ModelBudgetRow> {
    Ok(ModelBudgetRow {
        id: sql::word(row, "id")?,
        project: sql::word(row, "project")?,
        name: row.get("name")?,
        scope: sql::word(row, "scope")?,
        subject: row.get("subject")?,
        window: sql::word(row, "window")?,
        limit: Usd::from_pico(row.get("limit_pico")?),
        alert_percent: row.get("alert_percent")?,
        created_at: sql::time(row, "created_at")?,
    })
}

fn read_guards(row: &Row<'_>) -> rusqlite::Result<ModelGuardsRow> {
    Ok(ModelGuardsRow {
        project: sql::word(row, "project")?,
        guards: sql::json(row, "guards")?,
        updated_at: sql::time(row, "updated_at")?,
    })
}
