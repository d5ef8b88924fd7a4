//! What was asked of models and answered, in SQLite.

use async_trait::async_trait;
use atoll_types::{ModelCallId, ProjectId, Timestamp};

use crate::sqlite::{Models, sql};
use crate::{Error, ModelBodies, ModelBodyStore};

#[async_trait]
impl ModelBodyStore for Models {
    async fn put_model_bodies(
        &self,
        call: ModelCallId,
        project: ProjectId,
        at: Timestamp,
        bodies: ModelBodies,
    ) -> Result<(), Error> {
        self.file
            .write("keep what was asked and answered", move |db| {
                sql::execute(
                db,
                "INSERT OR IGNORE INTO model_bodies (call, project, created_at, request, answer, shortened)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
                &[
                    &call.as_str(),
                    &project.as_str(),
                    &at.0,
                    &bodies.request,
                    &bodies.answer,
                    &bodies.shortened,
                ],
            )?;
                Ok(())
            })
            .await
    }

    async fn model_bodies(
        &self,
        project: &ProjectId,
        call: &ModelCallId,
    ) -> Result<Option<ModelBodies>, Error> {
        let (project, call) = (project.clone(), call.clone());
        self.file
            .read("read what was asked and answered", move |db| {
                sql::row(
                    db,
                    "SELECT request, answer, shortened FROM model_bodies WHERE project = ?1 AND call = ?2",
                    &[&project.as_str(), &call.as_str()],
                    |row| {
                        Ok(ModelBodies {
                            request: row.get("request")?,
                            answer: row.get("answer")?,
                            shortened: row.get("shortened")?,
                        })
                    },
                )
            })
            .await
    }

    async fn trim_model_bodies(&self, before: Timestamp, most: usize) -> Result<usize, Error> {
        self.file
            .write("forget what was asked and answered", move |db| {
                let old = sql::execute(db, "DELETE FROM model_bodies WHERE created_at < ?1", &[&before.0])?;
                let many = sql::execute(
                    db,
                    "DELETE FROM model_bodies WHERE call IN
                     (SELECT call FROM
                      (SELECT call, row_number() OVER (PARTITION BY project ORDER BY created_at DESC) AS age
                       FROM model_bodies)
                      ORDER BY age LIMIT -1 OFFSET ?1)",
                    &[&sql::as_limit(most)],
                )?;
                Ok(old + many)
            })
            .await
    }
}
