//! Each time that a sandbox ran.

use atoll_client::output::{Output, Result, duration};
use atoll_client::text;
use serde_json::Value;

use super::{relative, resolve};
use crate::args::{Global, InstancesArgs};

pub(crate) async fn instances(global: &Global, output: Output, args: InstancesArgs) -> Result<()> {
    let client = global.client()?;
    let sandbox = resolve(&client, &args.sandbox).await?;
    let instances = client
        .list(&format!("/v1/sandboxes/{sandbox}/instances"), &[])
        .await?;
    let rows: Vec<_> = instances.iter().map(row).collect();
    output.table(
        ["ID", "STARTED", "ENDED", "WHY", "TIME", "CPU", "MEMORY"],
        &rows,
        "it has not run",
    );
    output.json(&Value::Array(instances));
    Ok(())
}

fn row(instance: &Value) -> [String; 7] {
    let number = |field: &str| instance[field].as_u64().unwrap_or_default();
    [
        text(instance, "id"),
        relative(instance, "started_at"),
        match instance["ended_at"].is_null() {
            true => "runs".to_owned(),
            false => relative(instance, "ended_at"),
        },
        text(instance, "reason"),
        duration(number("wall_ms")),
        duration(number("cpu_micros") / 1000),
        // A gibibyte for an hour.
        format!(
            "{:.3} GiB h",
            number("memory_byte_seconds") as f64 / (3600.0 * GIB)
        ),
    ]
}

const GIB: f64 = (1_u64 << 30) as f64;

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_runs_still_has_no_end() {
        let instance = json!({
            "id": "ins_a", "isolation": "jail", "started_at": null, "ended_at": null, "reason": null,
            "wall_ms": 61_000, "cpu_micros": 1_500_000, "memory_byte_seconds": 1_932_735_283_200_u64,
            "disk_byte_seconds": 0,
        });
        assert_eq!(
            row(&instance),
            ["ins_a", "-", "runs", "", "1m 1s", "1s", "0.500 GiB h"]
        );
    }
}
