//! Durable workflows for people: list, show, history, signal, cancel, terminate, reset.

use atoll_client::output::{Output, Result};
use atoll_client::{Client, segment, text};
use reqwest::Method;
use serde_json::{Value, json};

use super::relative;
use crate::args::{Global, WhichArgs, WorkflowCommand};

pub(crate) async fn run(global: &Global, output: Output, command: WorkflowCommand) -> Result<()> {
    let client = &global.client()?;
    match command {
        WorkflowCommand::List { query, namespace } => {
            let mut asked = vec![("namespace".to_owned(), namespace.namespace)];
            asked.extend(query.map(|query| ("query".to_owned(), query)));
            list(client, output, &asked).await?;
        }
        WorkflowCommand::Show { which } => show(client, output, &which).await?,
        WorkflowCommand::History { which } => history(client, output, &which).await?,
        WorkflowCommand::Signal { which, signal, input } => {
            let body = json!({"signal": signal, "input": input.map(|text| payload(&text))});
            act(client, &which, "signal", &body).await?;
            done(output, &which, "has the signal");
        }
        WorkflowCommand::Cancel { which, reason } => {
            act(client, &which, "cancel", &json!({"reason": reason})).await?;
            done(output, &which, "is asked to end");
        }
        WorkflowCommand::Terminate { which, reason } => {
            act(client, &which, "terminate", &json!({"reason": reason})).await?;
            done(output, &which, "has ended");
        }
        WorkflowCommand::Reset { which, event, reason } => {
            let body = json!({"event": event, "reason": reason});
            let answer = act(client, &which, "reset", &body).await?;
            output.json(&answer);
            output.line(format_args!(
                "{} goes on from event {event} as run {}",
                which.workflow,
                text(&answer, "run")
            ));
        }
    }
    Ok(())
}

fn path(which: &WhichArgs, what: &str) -> String {
    format!("/v1/workflows/{}{what}", segment(&which.workflow))
}

fn query(which: &WhichArgs) -> Vec<(&'static str, &str)> {
    let mut query = vec![("namespace", which.namespace.namespace.as_str())];
    query.extend(which.run.as_deref().map(|run| ("run", run)));
    query
}

async fn act(client: &Client, which: &WhichArgs, action: &str, body: &Value) -> Result<Value> {
    let request = client
        .request(Method::POST, &path(which, &format!("/{action}")))
        .query(&query(which))
        .json(body);
    client.json(request).await
}

fn done(output: Output, which: &WhichArgs, what: &str) {
    output.json(&json!({"workflow": which.workflow}));
    output.line(format_args!("{} {what}", which.workflow));
}

/// JSON as it is; anything else is a string, so that words need no quotes within quotes.
fn payload(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|_| json!(text))
}

async fn list(client: &Client, output: Output, query: &[(String, String)]) -> Result<()> {
    let workflows = client.list("/v1/workflows", query).await?;
    let rows: Vec<_> = workflows
        .iter()
        .map(|workflow| {
            [
                text(workflow, "id"),
                text(workflow, "type"),
                text(workflow, "status"),
                relative(workflow, "started_at"),
                relative(workflow, "closed_at"),
                text(workflow, "events"),
            ]
        })
        .collect();
    output.table(
        ["ID", "TYPE", "STATUS", "STARTED", "ENDED", "EVENTS"],
        &rows,
        "no workflows",
    );
    output.json(&Value::Array(workflows));
    Ok(())
}

async fn show(client: &Client, output: Output, which: &WhichArgs) -> Result<()> {
    let request = client.request(Method::GET, &path(which, "")).query(&query(which));
    let workflow = client.json(request).await?;
    output.json(&workflow);
    for (name, value) in [
        ("id", text(&workflow, "id")),
        ("run", text(&workflow, "run")),
        ("type", text(&workflow, "type")),
        ("status", text(&workflow, "status")),
        ("task queue", text(&workflow, "task_queue")),
        ("started", relative(&workflow, "started_at")),
        ("ended", relative(&workflow, "closed_at")),
        ("events", text(&workflow, "events")),
    ] {
        output.line(format_args!("{name:<11} {value}"));
    }
    let pending = workflow["activities"]
        .as_array()
        .map(Vec::as_slice)
        .unwrap_or_default();
    if !pending.is_empty() {
        let rows: Vec<_> = pending
            .iter()
            .map(|activity| {
                [
                    text(activity, "id"),
                    text(activity, "type"),
                    text(activity, "state"),
                    text(activity, "attempt"),
                    text(activity, "last_failure"),
                ]
            })
            .collect();
        output.line("");
        output.table(
            ["ACTIVITY", "TYPE", "STATE", "ATTEMPT", "LAST FAILURE"],
            &rows,
            "",
        );
    }
    Ok(())
}

async fn history(client: &Client, output: Output, which: &WhichArgs) -> Result<()> {
    let mut events = Vec::new();
    let mut from = json!(1);
    loop {
        let request = client
            .request(Method::GET, &path(which, "/history"))
            .query(&query(which))
            .query(&[("from", from.to_string()), ("limit", "1000".to_owned())]);
        let mut page = client.json(request).await?;
        if let Value::Array(found) = page["items"].take() {
            events.extend(found);
        }
        from = page["next"].take();
        if from.is_null() {
            break;
        }
    }
    let rows: Vec<_> = events
        .iter()
        .map(|event| {
            [
                text(event, "id"),
                text(event, "at"),
                text(event, "type"),
                text(event, "about"),
            ]
        })
        .collect();
    output.table(["", "AT", "EVENT", "ABOUT"], &rows, "no events");
    output.json(&Value::Array(events));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_need_no_quotes_and_json_stays_json() {
        assert_eq!(payload("yes"), json!("yes"));
        assert_eq!(payload("\"yes\""), json!("yes"));
        assert_eq!(payload("{\"a\": [1]}"), json!({"a": [1]}));
        assert_eq!(payload("7"), json!(7));
    }
}
