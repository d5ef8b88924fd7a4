//! What happens, as it happens.

use std::time::Duration;

use atoll_client::output::{Error, Output, Result};
use atoll_client::{Client, text};
use futures_util::TryStreamExt as _;
use reqwest::Method;
use serde_json::Value;

use super::ledger::{PAGE, describe};
use super::resolve;
use crate::args::{EventsArgs, Global};

/// How long until a connection is made again that broke.
const AGAIN: Duration = Duration::from_secs(1);

pub(crate) async fn events(global: &Global, output: Output, args: EventsArgs) -> Result<()> {
    let client = global.client()?;
    let sandbox = match &args.sandbox {
        Some(sandbox) => Some(resolve(&client, sandbox).await?),
        None => None,
    };
    let mut wish = Wish {
        sandbox,
        kinds: args.kinds.join(","),
        after: args.after,
    };
    if !args.follow {
        return until_now(&client, output, &wish).await;
    }
    follow(&client, output, &mut wish).await?;
    loop {
        output.note("the connection broke; going on where it was");
        tokio::time::sleep(AGAIN).await;
        if let Err(error) = follow(&client, output, &mut wish).await {
            output.note(error);
        }
    }
}

struct Wish {
    sandbox: Option<String>,
    kinds: String,
    after: Option<i64>,
}

impl Wish {
    fn includes(&self, fact: &Value) -> bool {
        let kind = text(fact, "kind");
        let matches = |wanted: &str| match wanted.trim().strip_suffix('*') {
            Some(beginning) => kind.starts_with(beginning),
            None => kind == wanted.trim(),
        };
        self.kinds.is_empty() || self.kinds.split(',').any(matches)
    }
}

/// What is in the ledger already.
async fn until_now(client: &Client, output: Output, wish: &Wish) -> Result<()> {
    let path = match &wish.sandbox {
        Some(id) => format!("/v1/sandboxes/{id}/facts"),
        None => "/v1/facts".to_owned(),
    };
    let mut after = wish.after.unwrap_or_default();
    loop {
        let query = [("after", after.to_string()), ("limit", PAGE.to_string())];
        let page = client
            .json(client.request(Method::GET, &path).query(&query))
            .await?;
        for fact in page["items"].as_array().into_iter().flatten() {
            if wish.includes(fact) {
                show(output, fact);
            }
        }
        match page["next"].as_i64() {
            Some(next) => after = next,
            None => return Ok(()),
        }
    }
}

/// Ends when the connection does; the error is of one that was never made, or of the server.
async fn follow(client: &Client, output: Output, wish: &mut Wish) -> Result<()> {
    let mut query = Vec::new();
    query.extend(wish.after.map(|after| ("after", after.to_string())));
    query.extend(wish.sandbox.clone().map(|sandbox| ("sandbox", sandbox)));
    if !wish.kinds.is_empty() {
        query.push(("kinds", wish.kinds.clone()));
    }
    let response = client
        .send(client.request(Method::GET, "/v1/events").query(&query))
        .await?;
    let mut stream = atoll_client::events(response);
    while let Ok(Some((kind, fact))) = stream.try_next().await {
        if kind == "error" {
            return Err(Error::new(text(&fact, "message")));
        }
        wish.after = fact["seq"].as_i64().or(wish.after);
        show(output, &fact);
    }
    Ok(())
}

fn show(output: Output, fact: &Value) {
    output.line(describe(fact));
    output.json_line(fact);
}
