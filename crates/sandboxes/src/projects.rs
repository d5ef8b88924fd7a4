//! Projects: whose everything is. Those of `default`, the project of the first key, run the server: they make the others and
//! what all of them share, templates.
//!
//! What must hold: a key of any other project sees and changes nothing beyond its own, but for using templates.

use atoll_store::ProjectRow;
use atoll_types::{Code, Fault, ProjectId};

use crate::faults::from_store;
use crate::{Caller, Project, Sandboxes, entropy};

const LONGEST_NAME: usize = 63;

impl Sandboxes {
    /// Refuses whoever does not run the server.
    pub fn operators_only(&self, caller: &Caller, what: &str) -> Result<(), Fault> {
        if caller.project == *self.default_project() {
            return Ok(());
        }
        Err(Fault::new(
            Code::OperatorsOnly,
            format!("only a key of the project `default` may {what}"),
        )
        .hint("ask whoever runs this server"))
    }

    pub async fn create_project(&self, caller: &Caller, name: &str) -> Result<Project, Fault> {
        self.operators_only(caller, "create projects")?;
        let fine = (1..=LONGEST_NAME).contains(&name.len())
            && name
                .bytes()
                .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
            && !name.starts_with('-')
            && !name.ends_with('-');
        if !fine {
            return Err(Fault::new(
                Code::ProjectNameInvalid,
                format!(
                    "a project's name has 1 to {LONGEST_NAME} lowercase letters, digits and `-`, which stands neither first nor last"
                ),
            ));
        }
        let new: ProjectId = entropy::id();
        let row = self.store().ensure_project(name, new.clone(), self.now()).await;
        let row = row.map_err(|e| from_store(&e))?;
        if row.id != new {
            return Err(
                Fault::new(Code::ProjectExists, format!("there is a project {name} already"))
                    .hint("`atoll project list` shows those that exist"),
            );
        }
        Ok(view(row))
    }

    /// All of them for whoever runs the server; for others, their own.
    pub async fn projects(&self, caller: &Caller) -> Result<Vec<Project>, Fault> {
        let all = self.store().projects().await.map_err(|e| from_store(&e))?;
        let sees_all = caller.project == *self.default_project();
        Ok(all
            .into_iter()
            .filter(|row| sees_all || row.id == caller.project)
            .map(view)
            .collect())
    }

    /// The project that a request is about: the caller's own, or one that it names and may.
    pub async fn project_named(&self, caller: &Caller, name: Option<&str>) -> Result<ProjectId, Fault> {
        let Some(name) = name else {
            return Ok(caller.project.clone());
        };
        let visible = self.projects(caller).await?;
        let found = visible
            .into_iter()
            .find(|project| project.name == name || project.id.as_str() == name);
        found.map(|project| project.id).ok_or_else(|| {
            Fault::new(Code::ProjectNotFound, format!("there is no project {name}"))
                .hint("`atoll project list` shows those that you can see")
        })
    }
}

fn view(row: ProjectRow) -> Project {
    Project {
        id: row.id,
        name: row.name,
        created_at: row.created_at,
    }
}
