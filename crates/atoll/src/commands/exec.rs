//! Commands in sandboxes: exec, shell, ps, logs.

use std::io::{IsTerminal, Write};

use atoll_client::output::{Doing, Error, Output, Result};
use atoll_client::{Client, events, from_wire, text};
use atoll_types::format_bytes;
use reqwest::Method;
use serde_json::{Value, json};

use super::{exec_body, relative, resolve};
use crate::args::{CommandArgs, ExecArgs, Global, LogsArgs, PsArgs, ShellArgs};
use crate::attach::{self, Streams, exit_code};

pub(crate) async fn exec(global: &Global, output: Output, args: ExecArgs) -> Result<u8> {
    let client = global.client()?;
    let sandbox = resolve(&client, &args.sandbox).await?;
    let mut body = exec_body(&args.argv, &args.command, &args.env);
    if args.detach {
        body["background"] = json!(true);
        let answer = client
            .post(&format!("/v1/sandboxes/{sandbox}/exec"), &body)
            .await?;
        output.json(&answer);
        output.line(text(&answer, "command"));
        return Ok(0);
    }
    if output.json {
        let (answer, code) = captured(&client, &sandbox, body, args.command.no_stdin).await?;
        output.json(&answer);
        return Ok(code);
    }
    let streams = Streams::choose(args.command.no_stdin, args.command.no_tty);
    attach::run(&client, &sandbox, body, streams).await
}

/// With `--json`: the output is part of the answer, not our own. The input is ours all the same, unless it is a terminal.
pub(crate) async fn captured(
    client: &Client,
    sandbox: &str,
    body: Value,
    no_stdin: bool,
) -> Result<(Value, u8)> {
    let answer = if no_stdin || std::io::stdin().is_terminal() {
        let answer = client.post(&format!("/v1/sandboxes/{sandbox}/exec"), &body).await;
        answer.map_err(Error::into_start_failure)?
    } else {
        match attach::captured(client, sandbox, body).await? {
            Ok(answer) => answer,
            Err(code) => return Ok((Value::Null, code)),
        }
    };
    let code = exit_code(&answer);
    Ok((answer, code))
}

pub(crate) async fn shell(global: &Global, args: ShellArgs) -> Result<u8> {
    let client = global.client()?;
    let sandbox = resolve(&client, &args.sandbox).await?;
    if !std::io::stdin().is_terminal() {
        return Err(
            Error::new("a shell needs a terminal").hint("use `atoll exec SANDBOX -- COMMAND` in scripts")
        );
    }
    let command = CommandArgs {
        workdir: None,
        user: args.user,
        command_timeout: None,
        no_stdin: false,
        no_tty: false,
    };
    let body = exec_body(&[args.shell, "-l".into()], &command, &terminal_env());
    attach::run(
        &client,
        &sandbox,
        body,
        Streams {
            stdin: true,
            tty: true,
        },
    )
    .await
}

/// What programs in a terminal ask about it.
pub(crate) fn terminal_env() -> Vec<(String, String)> {
    let ours = |name: &str| std::env::var(name).ok().map(|value| (name.to_owned(), value));
    let term = ours("TERM").unwrap_or_else(|| ("TERM".into(), "xterm-256color".into()));
    std::iter::once(term).chain(ours("COLORTERM")).collect()
}

pub(crate) async fn ps(global: &Global, output: Output, args: PsArgs) -> Result<()> {
    let client = global.client()?;
    let sandbox = resolve(&client, &args.sandbox).await?;
    let answer = client.get(&format!("/v1/sandboxes/{sandbox}/commands")).await?;
    output.json(&answer["items"]);
    let rows: Vec<_> = answer["items"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|command| {
            [
                text(command, "id"),
                text(command, "pid"),
                state(command),
                relative(command, "started_at"),
                command["output_bytes"]
                    .as_u64()
                    .map(format_bytes)
                    .unwrap_or_default(),
                argv(command),
            ]
        })
        .collect();
    output.table(
        ["ID", "PID", "STATE", "STARTED", "OUTPUT", "COMMAND"],
        &rows,
        "no commands in this sandbox",
    );
    Ok(())
}

fn state(command: &Value) -> String {
    match (
        text(command, "state").as_str(),
        &command["exit_code"],
        &command["signal"],
    ) {
        ("exited", Value::Number(code), _) => format!("exited {code}"),
        ("signaled", _, Value::Number(signal)) => format!("signal {signal}"),
        (state, _, _) => state.to_owned(),
    }
}

/// The command line, short enough for a table.
fn argv(command: &Value) -> String {
    let words: Vec<&str> = command["argv"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    let line = words.join(" ").replace(|c: char| c.is_control(), " ");
    match line.char_indices().nth(60) {
        Some((cut, _)) => format!("{}…", &line[..cut]),
        None => line,
    }
}

pub(crate) async fn logs(global: &Global, output: Output, args: LogsArgs) -> Result<u8> {
    let client = global.client()?;
    let sandbox = resolve(&client, &args.sandbox).await?;
    let command = match args.command {
        Some(command) => command,
        None => last_command(&client, &sandbox).await?,
    };
    let request = client
        .request(
            Method::GET,
            &format!("/v1/sandboxes/{sandbox}/commands/{command}/logs"),
        )
        .query(&[("follow", args.follow)])
        .header("accept", "text/event-stream");
    let mut stream = events(client.send(request).await?);
    let mut gathered = Vec::new();
    let mut code = 0;
    while let Some((name, data)) = futures_util::TryStreamExt::try_next(&mut stream).await? {
        let event = json!({"event": name, "data": data});
        if args.follow {
            output.json_line(&event);
        } else if output.json {
            gathered.push(event);
        }
        match name.as_str() {
            "stdout" | "stderr" if !output.json => write_chunk(&name, &data)?,
            "dropped" => output.note(format_args!(
                "({} bytes of earlier output are gone)",
                text(&data, "bytes")
            )),
            "exited" => code = exit_code(&data),
            "error" => return Err(from_wire(&data)),
            _ => {}
        }
    }
    if !args.follow {
        output.json(&Value::Array(gathered));
    }
    // Only who waits for the end is told how it was.
    Ok(if args.follow { code } else { 0 })
}

/// `{"text"}` or `{"base64"}` to the stream that it came from.
fn write_chunk(stream: &str, data: &Value) -> Result<()> {
    let bytes = match (data["text"].as_str(), data["base64"].as_str()) {
        (Some(text), _) => text.as_bytes().to_vec(),
        (None, Some(encoded)) => from_base64(encoded)?,
        (None, None) => Vec::new(),
    };
    // A reader that has gone away ends us quietly.
    let _gone = match stream {
        "stderr" => std::io::stderr().lock().write_all(&bytes),
        _ => std::io::stdout().lock().write_all(&bytes),
    };
    Ok(())
}

fn from_base64(encoded: &str) -> Result<Vec<u8>> {
    use base64::Engine as _;
    base64::engine::general_purpose::STANDARD
        .decode(encoded)
        .doing("the server sent bad base64")
}

async fn last_command(client: &Client, sandbox: &str) -> Result<String> {
    let answer = client.get(&format!("/v1/sandboxes/{sandbox}/commands")).await?;
    let commands = answer["items"].as_array().cloned().unwrap_or_default();
    let last = commands.iter().max_by_key(|command| text(command, "started_at"));
    last.map(|command| text(command, "id"))
        .ok_or_else(|| Error::new("no command was started in this sandbox"))
}
