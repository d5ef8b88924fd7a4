//! Approvals: what workflows ask people. Whoever answers has seen the action: its digest goes with the answer.

use std::io::IsTerminal as _;

use atoll_client::output::{Doing as _, Output, Result};
use atoll_client::{Client, segment, text};
use reqwest::Method;
use serde_json::{Value, json};

use super::relative;
use crate::args::{ApprovalCommand, DecideArgs, Global};

pub(crate) async fn run(global: &Global, output: Output, command: ApprovalCommand) -> Result<()> {
    let client = &global.client()?;
    match command {
        ApprovalCommand::List { all } => list(client, output, all).await?,
        ApprovalCommand::Show { approval } => {
            let found = client.get(&path(&approval)).await?;
            output.json(&found);
            show(output, &found);
        }
        ApprovalCommand::Grant(args) => decide(client, output, args, "grant").await?,
        ApprovalCommand::Deny(args) => decide(client, output, args, "deny").await?,
    }
    Ok(())
}

fn path(id: &str) -> String {
    format!("/v1/approvals/{}", segment(id))
}

async fn list(client: &Client, output: Output, all: bool) -> Result<()> {
    let (mut approvals, mut cursor) = (Vec::new(), None::<String>);
    loop {
        let mut request = client
            .request(Method::GET, "/v1/approvals")
            .query(&[("all", all)]);
        if let Some(cursor) = &cursor {
            request = request.query(&[("cursor", cursor)]);
        }
        let mut answer = client.json(request).await?;
        if let Value::Array(found) = answer["items"].take() {
            approvals.extend(found);
        }
        cursor = answer["next"].as_str().map(str::to_owned);
        if cursor.is_none() {
            break;
        }
    }
    let rows: Vec<_> = approvals
        .iter()
        .map(|approval| {
            [
                text(approval, "id"),
                text(approval, "state"),
                text(approval, "workflow"),
                relative(approval, "asked_at"),
                relative(approval, "deadline"),
                // `show` has all of it.
                text(approval, "reason")
                    .lines()
                    .next()
                    .unwrap_or_default()
                    .to_owned(),
            ]
        })
        .collect();
    output.table(
        ["ID", "STATE", "WORKFLOW", "ASKED", "NO BY", "REASON"],
        &rows,
        "nobody is asked anything",
    );
    output.json(&Value::Array(approvals));
    Ok(())
}

fn show(output: Output, approval: &Value) {
    for (name, value) in [
        ("id", text(approval, "id")),
        ("state", text(approval, "state")),
        ("workflow", text(approval, "workflow")),
        ("digest", text(approval, "digest")),
        ("asked", relative(approval, "asked_at")),
        ("no by", relative(approval, "deadline")),
        ("decided by", text(approval, "decided_by")),
        ("decided with", text(approval, "decided_with")),
        ("note", text(approval, "note")),
    ] {
        output.line(format_args!("{name:<12} {value}"));
    }
    output.line(format_args!("action\n{:#}", approval["action"]));
    // The words of whoever wrote the workflow, who may want them to look like ours: last, and with a mark on each line.
    output.line("reason, as the workflow says");
    for line in text(approval, "reason").lines() {
        output.line(format_args!("  | {line}"));
    }
}

/// Whether the person at the terminal wants it; where there is none, whoever wrote the script does.
fn confirmed(output: Output, verb: &str) -> Result<bool> {
    let asks = std::io::stdin().is_terminal() && std::io::stderr().is_terminal() && !output.json;
    if !asks {
        return Ok(true);
    }
    eprint!("{verb} this action? [y/N] ");
    let mut answer = String::new();
    std::io::stdin()
        .read_line(&mut answer)
        .doing("cannot read the answer")?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}

async fn decide(client: &Client, output: Output, args: DecideArgs, verb: &str) -> Result<()> {
    let digest = match args.digest {
        Some(digest) => digest,
        None => {
            // The action is shown before the answer goes, so that the record of the terminal has it.
            let found = client.get(&path(&args.approval)).await?;
            show(output, &found);
            if !confirmed(output, verb)? {
                output.line("nothing was answered");
                return Ok(());
            }
            text(&found, "digest")
        }
    };
    let by = args.by.or_else(|| std::env::var("USER").ok()).unwrap_or_default();
    let body = json!({"digest": digest, "by": by, "note": args.note});
    let decided = client
        .post(&format!("{}/{verb}", path(&args.approval)), &body)
        .await?;
    output.json(&decided);
    output.line(format_args!("{} is {}", args.approval, text(&decided, "state")));
    Ok(())
}
