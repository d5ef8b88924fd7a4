//! Changing a sandbox that runs or rests.

use atoll_client::output::{Error, Output, Result};
use serde_json::{Map, Value, json};

use super::resolve;
use crate::args::{Global, UpdateArgs};

pub(crate) async fn update(global: &Global, output: Output, args: UpdateArgs) -> Result<()> {
    let body = body(&args);
    if body.is_empty() {
        return Err(Error::new(
            "nothing to change was named; see `atoll update --help`",
        ));
    }
    let client = global.client()?;
    let sandbox = resolve(&client, &args.sandbox).await?;
    let answer = client
        .patch(&format!("/v1/sandboxes/{sandbox}"), &Value::Object(body))
        .await?;
    output.json(&answer);
    output.line(format_args!("{sandbox} is changed"));
    Ok(())
}

/// What is named, in the words of the API.
fn body(args: &UpdateArgs) -> Map<String, Value> {
    let removed = args.remove_label.iter().map(|name| (name.clone(), Value::Null));
    let set = args
        .label
        .iter()
        .map(|(name, value)| (name.clone(), json!(value)));
    let labels: Map<String, Value> = removed.chain(set).collect();
    let limits = [
        ("cpu_millis", args.cpu.map(|cpu| json!(cpu))),
        ("memory_bytes", args.memory.map(|bytes| json!(bytes))),
        ("pids", args.pids.map(|pids| json!(pids))),
    ];
    let limits: Map<String, Value> = given(limits);
    let idle = match (args.idle.as_ref().map(|idle| idle.0), args.on_idle.as_deref()) {
        (None, None) => None,
        (Some(None), _) => Some(Value::Null),
        (after, action) => Some(Value::Object(given([
            ("after_ms", after.flatten().map(|after| json!(after))),
            ("action", action.map(|action| json!(action))),
        ]))),
    };
    let name = args.name.as_deref();
    given([
        (
            "name",
            name.map(|name| if name.is_empty() { Value::Null } else { json!(name) }),
        ),
        ("labels", (!labels.is_empty()).then_some(Value::Object(labels))),
        ("resources", (!limits.is_empty()).then_some(Value::Object(limits))),
        ("timeout_ms", args.timeout.map(|millis| json!(millis))),
        ("on_timeout", args.on_timeout.as_ref().map(|action| json!(action))),
        ("idle", idle),
        ("auto_resume", args.auto_resume.map(|resumes| json!(resumes))),
        ("retention_ms", args.retention.map(|time| json!(time.0))),
    ])
}

fn given<const N: usize>(fields: [(&str, Option<Value>); N]) -> Map<String, Value> {
    let given = fields
        .into_iter()
        .filter_map(|(name, value)| Some((name.to_owned(), value?)));
    given.collect()
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::args::{Cli, Command};

    fn asked(words: &str) -> String {
        let Command::Update(args) = Cli::parse_from(words.split(' ')).command else {
            panic!("another command");
        };
        Value::Object(body(&args)).to_string()
    }

    #[test]
    fn only_what_is_named_is_asked_for() {
        let all = asked(
            "atoll update sbx_a --memory 1G --label a=b --remove-label c --idle never --retention 1d --name b",
        );
        insta::assert_snapshot!(all, @r#"{"idle":null,"labels":{"a":"b","c":null},"name":"b","resources":{"memory_bytes":1073741824},"retention_ms":86400000}"#);
        // What happens then stays, and so does the time.
        insta::assert_snapshot!(asked("atoll update a --idle 20m"), @r#"{"idle":{"after_ms":1200000}}"#);
        insta::assert_snapshot!(asked("atoll update a --on-idle pause"), @r#"{"idle":{"action":"pause"}}"#);
    }
}
