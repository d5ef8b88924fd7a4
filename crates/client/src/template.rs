//! The template that every sandbox is made from unless it says otherwise, made when it is first needed; and builds, shown as
//! they go.

use atoll_types::Code;
use futures_util::TryStreamExt as _;
use reqwest::{Method, Response};
use serde_json::{Value, json};

use crate::output::{Error, Output, Result, Stages};
use crate::{Client, events, from_wire};

/// The template of sandboxes that name no other.
const BASE: &str = "base";

/// Creates a sandbox; if it is to be made from `base` and there is no such template yet, builds that first.
pub async fn create_sandbox(client: &Client, output: Output, body: &Value) -> Result<Value> {
    match client.post("/v1/sandboxes", body).await {
        Err(error) if error.is(Code::TemplateNotFound) && body["template"] == BASE => {
            output
                .note("The template `base` is not there yet; building it, once. This takes a minute or two.");
            build_base(client, output).await?;
            client.post("/v1/sandboxes", body).await
        }
        outcome => outcome,
    }
}

async fn build_base(client: &Client, output: Output) -> Result<Value> {
    let body = json!({"name": BASE, "shared": true, "debian": {}});
    let request = client.request(Method::POST, "/v1/templates/build").json(&body);
    follow_build(output, client.send(request).await?).await
}

/// Shows the progress of a build; returns the finished template.
pub async fn follow_build(output: Output, response: Response) -> Result<Value> {
    let mut stream = events(response);
    let mut stages = Stages::new(output);
    while let Some((name, data)) = stream.try_next().await? {
        match name.as_str() {
            "progress" => {
                let number = |field: &str| data[field].as_u64().unwrap_or_default();
                stages.progress(
                    data["stage"].as_str().unwrap_or("working"),
                    number("done"),
                    number("total"),
                );
            }
            "log" => stages.log(data["text"].as_str().unwrap_or_default()),
            "done" => {
                stages.finish();
                return Ok(data);
            }
            "error" => {
                stages.finish();
                return Err(from_wire(&data));
            }
            _ => {}
        }
    }
    Err(Error::new("the build broke off").hint("see the log of the server"))
}
