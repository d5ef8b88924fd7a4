//! API keys.

use atoll_client::output::{Output, Result};
use atoll_client::{segment, text};
use reqwest::Method;
use serde_json::{Value, json};

use super::relative;
use crate::args::{Global, KeyCommand, WhoseArgs};

pub(crate) async fn run(global: &Global, output: Output, command: KeyCommand) -> Result<()> {
    let client = global.client()?;
    match command {
        KeyCommand::Create { name, whose } => {
            let asked = json!({"name": name, "project": whose.project});
            let answer = client.post("/v1/keys", &asked).await?;
            output.json(&answer);
            output.line(text(&answer, "secret"));
            output.note("This is the only time that the key is shown.");
        }
        KeyCommand::List { whose } => {
            let request = client.request(Method::GET, "/v1/keys").query(&of(&whose));
            let answer = client.json(request).await?;
            let keys = answer["items"].as_array().cloned().unwrap_or_default();
            let rows: Vec<_> = keys
                .iter()
                .map(|key| {
                    let revoked = if key["revoked_at"].is_null() {
                        String::new()
                    } else {
                        relative(key, "revoked_at")
                    };
                    [
                        text(key, "id"),
                        text(key, "name"),
                        text(key, "prefix"),
                        relative(key, "created_at"),
                        revoked,
                    ]
                })
                .collect();
            output.table(["ID", "NAME", "KEY", "CREATED", "REVOKED"], &rows, "no keys");
            output.json(&Value::Array(keys));
        }
        KeyCommand::Revoke { id, whose } => {
            let path = format!("/v1/keys/{}", segment(&id));
            let request = client.request(Method::DELETE, &path).query(&of(&whose));
            let answer = client.json(request).await?;
            output.json(&answer);
            output.line(format_args!("{id} is revoked"));
        }
    }
    Ok(())
}

fn of(whose: &WhoseArgs) -> Vec<(&'static str, &str)> {
    let named = whose.project.as_deref();
    named.map(|project| ("project", project)).into_iter().collect()
}
