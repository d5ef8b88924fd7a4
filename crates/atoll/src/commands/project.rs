//! Projects.

use atoll_client::output::{Output, Result};
use atoll_client::text;
use serde_json::{Value, json};

use super::relative;
use crate::args::{Global, ProjectCommand};

pub(crate) async fn run(global: &Global, output: Output, command: ProjectCommand) -> Result<()> {
    let client = global.client()?;
    match command {
        ProjectCommand::Create { name } => {
            let answer = client.post("/v1/projects", &json!({"name": name})).await?;
            output.json(&answer);
            output.line(text(&answer, "id"));
            output.note(format_args!(
                "`atoll key create --project {name} NAME` makes a key of it."
            ));
        }
        ProjectCommand::List => {
            let answer = client.get("/v1/projects").await?;
            let projects = answer["items"].as_array().cloned().unwrap_or_default();
            let rows: Vec<_> = projects
                .iter()
                .map(|project| {
                    [
                        text(project, "id"),
                        text(project, "name"),
                        relative(project, "created_at"),
                    ]
                })
                .collect();
            output.table(["ID", "NAME", "CREATED"], &rows, "no projects");
            output.json(&Value::Array(projects));
        }
    }
    Ok(())
}
