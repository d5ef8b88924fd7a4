//! API keys.

use atoll_client::output::{Output, Result};
use atoll_client::{segment, text};
use reqwest::Method;
use serde_json::{Value, json};

use super::{after, list_of, relative};
use crate::args::{Global, KeyCommand, WhoseArgs};

pub(crate) async fn run(global: &Global, output: Output, command: KeyCommand) -> Result<()> {
    let client = global.client()?;
    match command {
        KeyCommand::Create {
            name,
            role,
            scope,
            expires,
            whose,
        } => {
            let mut asked = json!({"name": name, "project": whose.project, "role": role, "scopes": scope});
            if let Some(millis) = expires {
                asked["expires_at"] = json!(after(millis)?);
            }
            let answer = client.post("/v1/keys", &asked).await?;
            output.json(&answer);
            output.line(text(&answer, "secret"));
            output.note("This is the only time that the key is shown.");
        }
        KeyCommand::List { whose } => {
            let keys = client.list("/v1/keys", &of(&whose)).await?;
            let rows: Vec<_> = keys
                .iter()
                .map(|key| {
                    let ends = match key["revoked_at"].is_null() {
                        true => relative(key, "expires_at"),
                        false => "revoked".into(),
                    };
                    [
                        text(key, "id"),
                        text(key, "name"),
                        text(key, "prefix"),
                        text(key, "role"),
                        list_of(&key["scopes"]),
                        relative(key, "created_at"),
                        ends,
                    ]
                })
                .collect();
            output.table(
                ["ID", "NAME", "KEY", "ROLE", "SCOPES", "CREATED", "ENDS"],
                &rows,
                "no keys",
            );
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

fn of(whose: &WhoseArgs) -> Vec<(String, String)> {
    let named = whose.project.clone();
    named
        .map(|project| ("project".into(), project))
        .into_iter()
        .collect()
}
