//! The ledger for people and programs: usage summed from it, and its records.

use atoll_client::output::{Output, Result, duration};
use atoll_client::{Client, text};
use atoll_types::GIB;
use reqwest::Method;
use serde_json::Value;

use super::resolve;
use crate::args::{Global, LedgerArgs, UsageArgs};

/// As many as the API gives at once.
pub(super) const PAGE: u64 = 1000;

pub(crate) async fn usage(global: &Global, output: Output, args: UsageArgs) -> Result<()> {
    let client = global.client()?;
    let path = path(&client, args.sandbox.as_deref(), "usage").await?;
    let usage = client.get(&path).await?;
    output.json(&usage);
    for line in sums(&usage) {
        output.line(line);
    }
    Ok(())
}

pub(crate) async fn ledger(global: &Global, output: Output, args: LedgerArgs) -> Result<()> {
    let client = global.client()?;
    let path = path(&client, args.sandbox.as_deref(), "facts").await?;
    let mut after = args.after;
    let mut left = args.limit.unwrap_or(u64::MAX);
    let mut gathered = Vec::new();
    let mut shown = false;
    while left > 0 {
        let request = client.request(Method::GET, &path).query(&[
            ("after", after.to_string()),
            ("limit", left.min(PAGE).to_string()),
        ]);
        let mut page = client.json(request).await?;
        let Some(Value::Array(facts)) = page.get_mut("items").map(Value::take) else {
            break;
        };
        left -= left.min(facts.len() as u64);
        for fact in &facts {
            shown = true;
            output.line(describe(fact));
        }
        if output.json {
            gathered.extend(facts);
        }
        match page["next"].as_i64() {
            Some(next) => after = next,
            None => break,
        }
    }
    if !shown {
        output.note("nothing is in the ledger there");
    }
    output.json(&Value::Array(gathered));
    Ok(())
}

async fn path(client: &Client, sandbox: Option<&str>, what: &str) -> Result<String> {
    Ok(match sandbox {
        Some(sandbox) => format!("/v1/sandboxes/{}/{what}", resolve(client, sandbox).await?),
        None => format!("/v1/{what}"),
    })
}

fn sums(usage: &Value) -> [String; 4] {
    let number = |field: &str| usage[field].as_u64().unwrap_or_default();
    let stretch = |field: &str| number(field) as f64 / GIB as f64 / 3600.0;
    [
        format!("time     {}", duration(number("wall_ms"))),
        format!("cpu      {:.2} s", number("cpu_micros") as f64 / 1e6),
        format!("memory   {:.4} GiB hours", stretch("memory_byte_seconds")),
        format!("disk     {:.4} GiB hours", stretch("disk_byte_seconds")),
    ]
}

/// Number, time, kind, sandbox and what else there is to say, on one line.
pub(super) fn describe(fact: &Value) -> String {
    let sandbox = text(fact, "sandbox");
    let sandbox = if sandbox.is_empty() { "-" } else { &sandbox };
    let line = format!(
        "{:>8}  {}  {:<20}  {:<24}  {}",
        text(fact, "seq"),
        text(fact, "at"),
        text(fact, "kind"),
        sandbox,
        fact["data"]
    );
    line.trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn sums_and_records_read_well() {
        let usage = json!({
            "wall_ms": 5_400_000_u64, "cpu_micros": 12_345_678_u64,
            "memory_byte_seconds": GIB * 1800, "disk_byte_seconds": 0,
        });
        insta::assert_snapshot!(sums(&usage).join("\n"), @r"
        time     1h 30m
        cpu      12.35 s
        memory   0.5000 GiB hours
        disk     0.0000 GiB hours
        ");
        let fact = json!({
            "seq": 7, "at": "2026-01-02T03:04:05.678Z", "kind": "command_ended", "sandbox": "sbx_a", "data": {"code": 0},
        });
        insta::assert_snapshot!(describe(&fact), @r#"       7  2026-01-02T03:04:05.678Z  command_ended         sbx_a                     {"code":0}"#);
    }
}
