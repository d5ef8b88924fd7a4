//! `atoll run`: a sandbox for one command, gone when it ends.

use serde_json::{Value, json};

use super::{Connection, create_body, exec, exec_body, note_wall, template, text};
use crate::args::{Global, RunArgs, SpecArgs};
use crate::attach::{self, Streams};
use crate::client::Client;
use crate::output::{Error, Output, Result};

pub(crate) async fn run(global: &Global, output: Output, args: RunArgs) -> Result<u8> {
    let connection = Connection::open(global).await?;
    let outcome = in_fresh_sandbox(&connection.client, output, &args).await;
    connection.close().await;
    outcome
}

async fn in_fresh_sandbox(client: &Client, output: Output, args: &RunArgs) -> Result<u8> {
    let mut spec = args.spec.clone();
    let lease = spec.life.timeout.is_none();
    if lease {
        spec.life.timeout = Some(LEASE_MILLIS);
    }
    let sandbox = create(client, output, &spec).await?;
    note_wall(output, &sandbox);
    let id = text(&sandbox, "id");
    let outcome = tokio::select! {
        outcome = attached(client, output, &sandbox, args) => outcome,
        never = renew(client, &id), if lease => match never {},
    };
    // Who asked for a pause instead of an end finds it where it was.
    if outcome.is_err() && rests(client, &id).await {
        return Err(
            Error::new(format!("the time of {id} was over, so it rests")).hint(format!(
                "`atoll resume {id}` lets it go on, `atoll kill {id}` ends it"
            )),
        );
    }
    let ended = client.delete(&format!("/v1/sandboxes/{id}")).await;
    match (outcome, ended) {
        // The sandbox may have been killed under the command: the reason says more than a broken stream.
        (Err(error), Ok(ended)) => Err(explain(error, &ended)),
        (outcome, _) => outcome,
    }
}

/// Whether it is at rest or on its way there.
async fn rests(client: &Client, id: &str) -> bool {
    let Ok(sandbox) = client.get(&format!("/v1/sandboxes/{id}")).await else {
        return false;
    };
    matches!(
        sandbox["state"].as_str(),
        Some("pausing" | "paused" | "stopping" | "stopped")
    )
}

/// Without a timeout of the user's choice the sandbox lives as long as we do: its lifetime is short and renewed, so that
/// it does not outlast us when we are killed.
const LEASE_MILLIS: u64 = 120_000;

/// Never ends by itself.
async fn renew(client: &Client, id: &str) -> std::convert::Infallible {
    let path = format!("/v1/sandboxes/{id}/extend");
    let body = json!({ "timeout_ms": LEASE_MILLIS });
    loop {
        tokio::time::sleep(std::time::Duration::from_millis(LEASE_MILLIS / 4)).await;
        // If it failed, three more tries remain; the sandbox's end is reported by the command's stream.
        let _retried = client.post(&path, &body).await;
    }
}

async fn attached(client: &Client, output: Output, sandbox: &Value, args: &RunArgs) -> Result<u8> {
    let id = &text(sandbox, "id");
    let (argv, env) = if args.argv.is_empty() {
        (
            vec!["/bin/bash".to_owned(), "-l".to_owned()],
            exec::terminal_env(),
        )
    } else {
        (args.argv.clone(), Vec::new())
    };
    let streams = Streams::choose(args.command.no_stdin, args.command.no_tty);
    let env = if streams.tty { exec::terminal_env() } else { env };
    let body = exec_body(&argv, &args.command, &env);
    if output.json {
        let (mut answer, code) = exec::captured(client, id, body, args.command.no_stdin).await?;
        if answer.is_object() {
            answer["isolation"] = sandbox["isolation"].clone();
            answer["tenant_boundary"] = sandbox["tenant_boundary"].clone();
        }
        output.json(&answer);
        return Ok(code);
    }
    attach::run(client, id, body, streams).await
}

/// Creates the sandbox; if it is to be made from `base` and there is no such template yet, builds that first.
pub(crate) async fn create(client: &Client, output: Output, spec: &SpecArgs) -> Result<Value> {
    let body = create_body(spec)?;
    match client.post("/v1/sandboxes", &body).await {
        Err(error) if error.is(atoll_types::Code::TemplateNotFound) && spec.template == "base" => {
            output
                .note("The template `base` is not there yet; building it, once. This takes a minute or two.");
            template::build_base(client, output).await?;
            client.post("/v1/sandboxes", &body).await
        }
        outcome => outcome,
    }
}

fn explain(error: Error, ended: &Value) -> Error {
    match ended["end"]["reason"].as_str() {
        None | Some("killed") => error,
        Some(reason) => {
            let message = text(&ended["end"], "message");
            let mut explained = Error::new(format!("the sandbox ended: {message}"));
            explained.code = Some(reason.to_owned());
            if reason == "out_of_memory" {
                explained = explained.hint("give it more with --memory");
            }
            explained
        }
    }
}
