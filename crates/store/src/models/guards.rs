//! What may not leave for a provider of models.

use atoll_types::{ProjectId, Timestamp};
use rusqlite::Row;
use serde::{Deserialize, Serialize};

use crate::{Error, Store, sql};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelGuardsRow {
    pub project: ProjectId,
    pub guards: ModelGuards,
    pub updated_at: Timestamp,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelGuards {
    /// Larger requests are refused; by our own estimate.
    pub max_input_tokens: Option<u64>,
    /// Names of models that nobody may call, with wildcards.
    pub blocked: Vec<String>,
    /// Personal data that is looked for.
    pub screen: Vec<ScreenRule>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScreenRule {
    pub name: String,
    /// `None`: the name is that of a rule which is built in.
    pub pattern: Option<String>,
    /// Put its name in place of what is found, instead of refusing the request.
    pub redact: bool,
}

impl Store {
    pub async fn put_model_guards(&self, row: ModelGuardsRow) -> Result<(), Error> {
        self.write("keep the guards", move |db| {
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

pub(crate) fn read_guards(row: &Row<'_>) -> rusqlite::Result<ModelGuardsRow> {
    Ok(ModelGuardsRow {
        project: sql::word(row, "project")?,
        guards: sql::json(row, "guards")?,
        updated_at: sql::time(row, "updated_at")?,
    })
}
