//! Projects: whose everything is. Operators, who have keys of `default`, the project of the first key, run the server: they
//! make the others and what all of them share, templates.
//!
//! What must hold: a key of any other project sees and changes nothing beyond its own, but for using templates.

use atoll_types::{Code, Fault, ProjectId, Timestamp};

use crate::{Action, Caller, Identity, entropy};

const LONGEST_NAME: usize = 63;
/// The first project.
pub(crate) const DEFAULT: &str = "default";

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Project {
    pub id: ProjectId,
    pub name: String,
    pub created_at: Timestamp,
}

impl Identity {
    pub async fn create_project(&self, caller: &Caller, name: &str) -> Result<Project, Fault> {
        caller.may(Action::ManageProjects, None)?;
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
        let made = self.store().ensure_project(name, new.clone(), self.now()).await?;
        if made.id != new {
            return Err(
                Fault::new(Code::ProjectExists, format!("there is a project {name} already"))
                    .hint("`atoll project list` shows those that exist"),
            );
        }
        Ok(made)
    }

    /// All of them for whoever runs the server with a key that is not restricted; for others, their own.
    pub async fn projects(&self, caller: &Caller) -> Result<Vec<Project>, Fault> {
        let mut all = self.store().projects().await?;
        if !caller.sees_all_projects() {
            all.retain(|project| project.id == *caller.project());
        }
        Ok(all)
    }

    /// The project that a request is about: the caller's own, or one that it names and may.
    pub async fn project_named(&self, caller: &Caller, name: Option<&str>) -> Result<ProjectId, Fault> {
        let Some(name) = name else {
            return Ok(caller.project().clone());
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
