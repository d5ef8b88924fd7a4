//! What sandboxes may reach: show, set, log, explain.

use std::path::Path;
use std::time::Duration;

use atoll_client::output::{Doing, Error, Output, Result};
use atoll_client::{Client, text};
use atoll_types::format_bytes;
use reqwest::Method;
use serde_json::{Value, json};

use super::resolve;
use crate::args::{
    BuildReachArgs, Global, NetCommand, NetExplainArgs, NetLogArgs, NetSetArgs, ReachArgs, SecretGiven,
    Target, TrafficArgs,
};

/// How often a log that is followed is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(500);

pub(crate) async fn run(global: &Global, output: Output, command: NetCommand) -> Result<()> {
    let client = &global.client()?;
    match command {
        NetCommand::Show { sandbox } => {
            let network = client.get(&path(client, &sandbox, "").await?).await?;
            show(output, &network);
        }
        NetCommand::Set(args) => {
            let body = set_body(&args)?;
            let network = client.put(&path(client, &args.sandbox, "").await?, &body).await?;
            show(output, &network);
        }
        NetCommand::Log(args) => log(client, output, &args).await?,
        NetCommand::Explain(args) => explain(client, output, &args).await?,
    }
    Ok(())
}

async fn path(client: &Client, sandbox: &str, below: &str) -> Result<String> {
    let id = resolve(client, sandbox).await?;
    Ok(format!("/v1/sandboxes/{id}/network{below}"))
}

/// The part of a create request that says what the sandbox may reach; `None` leaves it to its template and the operator.
pub(crate) fn reach(args: &ReachArgs) -> Result<Option<Value>> {
    let limits = limits(args.traffic);
    let said = policy(
        args.net.as_deref(),
        &args.allow,
        &args.deny,
        args.net_policy.as_deref(),
    )?;
    match (said, limits) {
        (None, Some(_)) => Err(
            Error::new("limits of the network say nothing about what may be reached")
                .hint("say so with --net or --allow, too"),
        ),
        (said, limits) => Ok(limited(said, limits)),
    }
}

/// The part of a build request that says what its RUN steps may reach; `None` leaves it at nothing.
pub(crate) fn build_reach(args: &BuildReachArgs) -> Result<Option<Value>> {
    policy(
        args.build_net.as_deref(),
        &args.build_allow,
        &[],
        args.build_net_policy.as_deref(),
    )
}

fn limits(args: TrafficArgs) -> Option<Value> {
    let given = [
        ("connections", args.max_connections.map(u64::from)),
        ("bytes_per_second", args.max_bandwidth),
        ("total_bytes", args.max_traffic),
    ];
    let given: serde_json::Map<_, _> = given
        .into_iter()
        .filter_map(|(name, limit)| Some((name.to_owned(), json!(limit?))))
        .collect();
    (!given.is_empty()).then_some(Value::Object(given))
}

fn limited(policy: Option<Value>, limits: Option<Value>) -> Option<Value> {
    let mut policy = policy?;
    if let Some(limits) = limits {
        policy["limits"] = limits;
    }
    Some(policy)
}

fn set_body(args: &NetSetArgs) -> Result<Value> {
    let policy = policy(
        args.preset.as_deref(),
        &args.allow,
        &args.deny,
        args.file.as_deref(),
    )?;
    let policy = limited(policy, limits(args.traffic));
    let mut body = json!({ "policy": policy.unwrap_or_else(|| json!({})) });
    if args.no_secrets || !args.secret.is_empty() {
        body["secrets"] = secrets(&args.secret);
    }
    Ok(body)
}

fn policy(
    preset: Option<&str>,
    allow: &[Target],
    deny: &[Target],
    file: Option<&Path>,
) -> Result<Option<Value>> {
    if let Some(file) = file {
        return read_policy(file).map(Some);
    }
    let rule = |action: &'static str| {
        move |target: &Target| {
            let mut rule = json!({"action": action, "to": target.to});
            if !target.ports.is_empty() {
                rule["ports"] = json!(target.ports);
            }
            rule
        }
    };
    let rules: Vec<Value> = allow
        .iter()
        .map(rule("allow"))
        .chain(deny.iter().map(rule("deny")))
        .collect();
    if preset.is_none() && rules.is_empty() {
        return Ok(None);
    }
    let mut policy = json!({ "rules": rules });
    if let Some(preset) = preset {
        policy["preset"] = json!(preset);
    }
    Ok(Some(policy))
}

fn read_policy(file: &Path) -> Result<Value> {
    let shown = file.display();
    let text = if file == Path::new("-") {
        std::io::read_to_string(std::io::stdin())
    } else {
        std::fs::read_to_string(file)
    };
    let text = text.doing(format_args!("cannot read the policy {shown}"))?;
    serde_json::from_str(&text).doing(format_args!("the policy {shown} is not JSON"))
}

pub(crate) fn secrets(given: &[SecretGiven]) -> Value {
    given
        .iter()
        .map(|given| {
            let mut used = json!({ "secret": given.name });
            if let Some(variable) = &given.variable {
                used["env"] = json!(variable);
            }
            used
        })
        .collect()
}

fn show(output: Output, network: &Value) {
    output.json(network);
    for (name, value) in about(network) {
        output.line(format_args!("{name:<12}{value}"));
    }
}

/// What there is to say about what a sandbox may reach, a line each.
fn about(network: &Value) -> Vec<(&'static str, String)> {
    let policy = &network["policy"];
    let said_by = match network["source"].as_str() {
        Some("template") => "its template",
        Some("default") => "the operator's default",
        _ => "its own",
    };
    let mut lines = vec![("policy", said_by.to_owned())];
    if let Some(preset) = policy["preset"].as_str() {
        lines.push(("preset", preset.to_owned()));
    }
    let rules = policy["rules"].as_array().map_or(&[][..], Vec::as_slice);
    if rules.is_empty() && matches!(policy["preset"].as_str(), None | Some("none")) {
        lines.push(("reaches", "nothing".into()));
    }
    for rule in rules {
        let action = if rule["action"] == "deny" { "deny" } else { "allow" };
        lines.push((action, describe_rule(rule)));
    }
    let limits = &policy["limits"];
    for (field, unit) in [
        ("connections", " connections at once"),
        ("total_connections", " connections in its life"),
    ] {
        if let Some(limit) = limits[field].as_u64() {
            lines.push(("limit", format!("{limit}{unit}")));
        }
    }
    for (field, unit) in [("bytes_per_second", "/s"), ("total_bytes", " in its life")] {
        if let Some(limit) = limits[field].as_u64() {
            lines.push(("limit", format!("{}{unit}", format_bytes(limit))));
        }
    }
    for used in network["secrets"].as_array().into_iter().flatten() {
        let variable = used["env"]
            .as_str()
            .map_or_else(String::new, |env| format!(" in {env}"));
        lines.push(("secret", format!("{}{variable}", text(used, "secret"))));
    }
    let usage = &network["usage"];
    lines.push((
        "so far",
        format!(
            "{} up, {} down, {} connections",
            bytes(usage, "bytes_up"),
            bytes(usage, "bytes_down"),
            text(usage, "connections")
        ),
    ));
    if let Some(why) = network["unavailable"].as_str() {
        lines.push(("unavailable", why.to_owned()));
    }
    lines
}

/// `api.example.com:443,8000-8100 udp, GET POST, /v1/** ("its name")`
fn describe_rule(rule: &Value) -> String {
    let listed = |field: &str, between: &str| {
        let items = rule[field].as_array().into_iter().flatten();
        let items = items.map(|item| item.as_str().map_or_else(|| item.to_string(), str::to_owned));
        items.collect::<Vec<_>>().join(between)
    };
    let mut described = text(rule, "to");
    let ports = listed("ports", ",");
    if !ports.is_empty() {
        // As it is written on the command line.
        described = match described.contains(':') {
            true => format!("[{described}]:{ports}"),
            false => format!("{described}:{ports}"),
        };
    }
    if let Some(protocol) = rule["protocol"].as_str() {
        described = format!("{described} {protocol}");
    }
    for more in [listed("methods", " "), listed("paths", " ")] {
        if !more.is_empty() {
            described = format!("{described}, {more}");
        }
    }
    match rule["name"].as_str() {
        Some(name) => format!("{described} ({name:?})"),
        None => described,
    }
}

fn bytes(value: &Value, field: &str) -> String {
    format_bytes(value[field].as_u64().unwrap_or_default())
}

/// Facts page by page; to the end, or for as long as somebody looks.
async fn log(client: &Client, output: Output, args: &NetLogArgs) -> Result<()> {
    let path = path(client, &args.sandbox, "/log").await?;
    let mut after = 0;
    let mut gathered = Vec::new();
    loop {
        let request = client
            .request(Method::GET, &path)
            .query(&[("denied", args.denied.to_string()), ("after", after.to_string())])
            .query(&[("limit", "1000")]);
        let mut page = client.json(request).await?;
        let Some(Value::Array(items)) = page.get_mut("items").map(Value::take) else {
            break;
        };
        for item in &items {
            after = item["seq"].as_i64().unwrap_or(after);
            output.line(describe(item));
            if args.follow {
                output.json_line(item);
            }
        }
        // There may be more even behind an empty page.
        after = page["next"].as_i64().unwrap_or(after);
        if args.follow {
            if page["next"].is_null() {
                tokio::time::sleep(LOOK_EVERY).await;
            }
            continue;
        }
        gathered.extend(items);
        if page["next"].is_null() {
            break;
        }
    }
    if gathered.is_empty() {
        let nothing = if args.denied { "was refused" } else { "was tried" };
        output.note(format_args!("nothing {nothing} so far"));
    }
    output.json(&Value::Array(gathered));
    Ok(())
}

/// One line of the log.
fn describe(fact: &Value) -> String {
    let (at, data) = (text(fact, "at"), &fact["data"]);
    let times = match data["count"].as_u64() {
        Some(count) if count > 1 => format!(" ({count} times)"),
        _ => String::new(),
    };
    match fact["kind"].as_str().unwrap_or_default() {
        kind @ ("network.allowed" | "network.denied") => {
            let verdict = kind.trim_start_matches("network.");
            let host = data["host"].as_str().or(data["address"].as_str());
            let to = format!("{}:{}", host.unwrap_or("?"), text(data, "port"));
            let moved = match (data["bytes_up"].as_u64(), data["bytes_down"].as_u64()) {
                (Some(0) | None, Some(0) | None) => String::new(),
                _ => format!(
                    ", {} up, {} down",
                    bytes(data, "bytes_up"),
                    bytes(data, "bytes_down")
                ),
            };
            format!(
                "{at}  {verdict:<7}  {:<4}  {to}{times}{moved}  {}: {}",
                text(data, "protocol"),
                text(data, "rule"),
                text(data, "reason")
            )
        }
        "network.policy_set" => {
            let preset = data["preset"].as_str().unwrap_or("no preset");
            format!("{at}  policy         {preset}, {} rules", text(data, "rules"))
        }
        "secret.used" => format!(
            "{at}  secret         {} to {}:{}{times}",
            text(data, "secret"),
            text(data, "host"),
            text(data, "port")
        ),
        // Of a newer server.
        other => format!("{at}  {other}  {data}"),
    }
}

async fn explain(client: &Client, output: Output, args: &NetExplainArgs) -> Result<()> {
    let path = path(client, &args.sandbox, "/explain").await?;
    let mut request = client.request(Method::GET, &path).query(&[("url", &args.target)]);
    if let Some(method) = &args.method {
        request = request.query(&[("method", method)]);
    }
    let answer = client.json(request).await?;
    output.json(&answer);
    output.line(format_args!(
        "{} by {}: {}",
        text(&answer, "verdict"),
        text(&answer, "rule"),
        text(&answer, "reason")
    ));
    let lines = |field: &str| {
        let items = answer[field].as_array().into_iter().flatten();
        items
            .filter_map(Value::as_str)
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    for step in lines("steps") {
        output.line(format_args!("  {step}"));
    }
    if answer["inspected"] == json!(true) {
        output.line("Atoll reads such requests.");
    }
    let secrets = lines("secrets");
    if !secrets.is_empty() {
        output.line(format_args!("Put into the request: {}", secrets.join(", ")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command};

    fn set(options: &[&str]) -> Value {
        let words = ["atoll", "net", "set", "sbx_k3"]
            .into_iter()
            .chain(options.iter().copied());
        match Cli::parse_from(words).command {
            Command::Net(NetCommand::Set(args)) => set_body(&args).unwrap(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn options_become_a_policy() {
        insta::assert_snapshot!(set(&["--preset", "none"]), @r#"{"policy":{"preset":"none","rules":[]}}"#);
        insta::assert_snapshot!(
            set(&["--allow", "a.example:443,8000-8100", "--allow", "10.0.0.0/8", "--deny", "*.b.example", "--no-secrets"]),
            @r#"{"policy":{"rules":[{"action":"allow","ports":[443,"8000-8100"],"to":"a.example"},{"action":"allow","to":"10.0.0.0/8"},{"action":"deny","to":"*.b.example"}]},"secrets":[]}"#
        );
        insta::assert_snapshot!(
            set(&["--preset", "all-public", "--secret", "a=TOKEN", "--secret", "b"]),
            @r#"{"policy":{"preset":"all-public","rules":[]},"secrets":[{"env":"TOKEN","secret":"a"},{"secret":"b"}]}"#
        );
        insta::assert_snapshot!(
            set(&["--preset", "all-public", "--max-connections", "8", "--max-bandwidth", "10M", "--max-traffic", "1G"]),
            @r#"{"policy":{"limits":{"bytes_per_second":10485760,"connections":8,"total_bytes":1073741824},"preset":"all-public","rules":[]}}"#
        );
        let beside_a_file = [
            "atoll",
            "net",
            "set",
            "sbx_k3",
            "--file",
            "x",
            "--max-traffic",
            "1G",
        ];
        assert!(Cli::try_parse_from(beside_a_file).is_err());
        let nothing = Cli::try_parse_from(["atoll", "net", "set", "sbx_k3"]);
        assert!(nothing.is_err(), "what it may reach must be said");
        let unknown = Cli::try_parse_from(["atoll", "net", "set", "sbx_k3", "--preset", "everything"]);
        assert!(unknown.unwrap_err().to_string().contains("package-registries"));
    }

    #[test]
    fn a_policy_comes_from_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("policy.json");
        std::fs::write(&file, r#"{"limits": {"connections": 3}}"#).unwrap();
        let path = file.to_str().unwrap();
        insta::assert_snapshot!(set(&["--file", path]), @r#"{"policy":{"limits":{"connections":3}}}"#);
        std::fs::write(&file, "limits:").unwrap();
        let error = read_policy(&file).unwrap_err();
        assert!(error.message.contains("policy.json is not JSON"), "{error}");
    }

    #[test]
    fn what_holds_reads_well() {
        let network = json!({
            "policy": {"preset": "package-registries", "rules": [
                {"action": "allow", "to": "api.example.com", "ports": [443, "8000-8100"], "methods": ["GET", "HEAD"],
                 "paths": ["/v1/**"], "name": "the API"},
                {"action": "deny", "to": "2001:db8::/32", "ports": [123], "protocol": "udp"},
            ], "limits": {"connections": 8, "total_bytes": 1_073_741_824_u64}},
            "source": "sandbox",
            "secrets": [{"secret": "github", "env": "GITHUB_TOKEN"}, {"secret": "other"}],
            "usage": {"bytes_up": 2048, "bytes_down": 0, "connections": 7},
        });
        let lines: Vec<_> = about(&network)
            .into_iter()
            .map(|(name, value)| format!("{name:<12}{value}"))
            .collect();
        insta::assert_snapshot!(lines.join("\n"), @r#"
        policy      its own
        preset      package-registries
        allow       api.example.com:443,8000-8100, GET HEAD, /v1/** ("the API")
        deny        [2001:db8::/32]:123 udp
        limit       8 connections at once
        limit       1 GiB in its life
        secret      github in GITHUB_TOKEN
        secret      other
        so far      2 KiB up, 0 B down, 7 connections
        "#);
    }

    #[test]
    fn the_log_reads_well() {
        let fact = |kind: &str, data: Value| json!({"seq": 1, "at": "2026-01-31T12:00:00.000Z", "kind": kind, "data": data});
        let decision = json!({"protocol": "tcp", "host": "pypi.org", "address": "192.0.2.1", "port": 443,
            "rule": "preset package-registries: pypi.org", "reason": "the preset allows it", "count": 3,
            "bytes_up": 100, "bytes_down": 2048});
        let refused = json!({"protocol": "dns", "host": "example.com", "port": 53, "rule": "default",
            "reason": "no rule allows it", "count": 1, "bytes_up": 0, "bytes_down": 0});
        let lines = [
            fact(
                "network.policy_set",
                json!({"preset": "package-registries", "rules": 2, "secrets": []}),
            ),
            fact("network.allowed", decision),
            fact("network.denied", refused),
            fact(
                "secret.used",
                json!({"secret": "github", "host": "api.github.com", "port": 443, "count": 2}),
            ),
        ];
        let lines: Vec<_> = lines.iter().map(describe).collect();
        insta::assert_snapshot!(lines.join("\n"), @r"
        2026-01-31T12:00:00.000Z  policy         package-registries, 2 rules
        2026-01-31T12:00:00.000Z  allowed  tcp   pypi.org:443 (3 times), 100 B up, 2 KiB down  preset package-registries: pypi.org: the preset allows it
        2026-01-31T12:00:00.000Z  denied   dns   example.com:53  default: no rule allows it
        2026-01-31T12:00:00.000Z  secret         github to api.github.com:443 (2 times)
        ");
    }
}
