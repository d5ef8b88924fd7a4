//! `atoll run`: a sandbox for one command, gone when it ends.

use serde_json::Value;

use super::{Connection, create_body, exec, exec_body, template, text};
use crate::args::{Global, RunArgs, SpecArgs};
use crate::attach::{self, Streams};
use crate::client::Client;
use crate::output::{Output, Result};

pub(crate) async fn run(global: &Global, output: Output, args: RunArgs) -> Result<u8> {
    let connection = Connection::open(global).await?;
    let outcome = in_fresh_sandbox(&connection.client, output, &args).await;
    connection.close().await;
    outcome
}

async fn in_fresh_sandbox(client: &Client, output: Output, args: &RunArgs) -> Result<u8> {
    let sandbox = create(client, output, &args.spec).await?;
    let id = text(&sandbox, "id");
    let outcome = attached(client, output, &id, args).await;
    let ended = client.delete(&format!("/v1/sandboxes/{id}")).await;
    match (outcome, ended) {
        // The sandbox may have been killed under the command: the reason says more than a broken stream.
        (Err(error), Ok(ended)) => Err(explain(error, &ended)),
        (outcome, _) => outcome,
    }
}

async fn attached(client: &Client, output: Output, id: &str, args: &RunArgs) -> Result<u8> {
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
        return exec::captured(client, output, id, body).await;
    }
    attach::run(client, id, body, streams).await
}

/// Creates the sandbox; if it is to be made from `base` and there is no such template yet, builds that first.
pub(crate) async fn create(client: &Client, output: Output, spec: &SpecArgs) -> Result<Value> {
    let body = create_body(spec);
    match client.post("/v1/sandboxes", &body).await {
        Err(error) if error.code.as_deref() == Some("template_not_found") && spec.template == "base" => {
            output
                .note("The template `base` is not there yet; building it, once. This takes a minute or two.");
            template::build_base(client, output).await?;
            client.post("/v1/sandboxes", &body).await
        }
        outcome => outcome,
    }
}

fn explain(error: crate::output::Error, ended: &Value) -> crate::output::Error {
    match ended["end"]["reason"].as_str() {
        None | Some("killed") => error,
        Some(reason) => {
            let message = text(&ended["end"], "message");
            let mut explained = crate::output::Error::new(format!("the sandbox ended: {message}"));
            explained.code = Some(reason.to_owned());
            if reason == "out_of_memory" {
                explained = explained.hint("give it more with --memory");
            }
            explained
        }
    }
}
