//! What the provider bills is held against what was booked: no client's behaviour makes the gateway book less.

use std::sync::Arc;

use atoll_client::output::{Doing, Result};
use serde_json::Value;

use super::faults::KILL;
use super::report::Check;
use super::world::{HOSTILE, PRICE, PROJECTS, World};

/// What calls that a kill of the server cut may have cost at most, each: they are settled at what was sent.
const CUT_CALL: f64 = 0.5;
/// The same for the hostile project, for all that it had under way at one kill.
const CUT_HOSTILE: f64 = 15.0;

/// Dollars that the provider has counted for the models of each project.
async fn billed(world: &World) -> Result<Vec<f64>> {
    let url = format!("{}/scripted/usage", world.provider);
    let client = reqwest::Client::builder()
        .no_proxy()
        .build()
        .doing("cannot ask the provider")?;
    let answer = client.get(url).send().await.doing("cannot ask the provider")?;
    let bytes = answer.bytes().await.doing("cannot ask the provider")?;
    let counted: Value = serde_json::from_slice(&bytes).doing("the provider said nonsense")?;
    let price: f64 = PRICE.parse::<f64>().unwrap_or_default() / 1e6;
    let mut dollars = vec![0.0; PROJECTS.len()];
    for model in counted["models"].as_array().into_iter().flatten() {
        let name = model["model"].as_str().unwrap_or_default();
        let Some(project) = whose(name) else {
            continue;
        };
        let tokens = ["input", "output"].map(|what| model[what].as_f64().unwrap_or_default());
        dollars[project] += tokens.iter().sum::<f64>() * price;
    }
    Ok(dollars)
}

/// Each project calls models of its own.
fn whose(model: &str) -> Option<usize> {
    if model == "scripted-full" {
        return Some(HOSTILE);
    }
    (0..PROJECTS.len()).find(|index| {
        model == format!("scripted-echo-{index}") || model == format!("scripted-stream-{}", 20 + index)
    })
}

pub(super) async fn checks(world: &Arc<World>) -> Result<Vec<Check>> {
    let billed = billed(world).await?;
    let mut checks = Vec::new();
    for (index, billed) in billed.into_iter().enumerate() {
        let spend = world.client(index)?.get("/v1/gateway/spend").await?;
        let booked: f64 = spend["total"]
            .as_str()
            .and_then(|text| text.parse().ok())
            .unwrap_or_default();
        let (kills, cut) = {
            let sums = world.tally.lock();
            let kills = sums.faults.get(KILL).copied().unwrap_or_default();
            let cut: u64 = sums.asked.values().map(|asked| asked.cut).sum();
            (kills as f64, cut as f64)
        };
        let less = match index {
            HOSTILE => kills * CUT_HOSTILE,
            _ => cut * CUT_CALL,
        };
        checks.push(Check::new(
            &format!("booked of what the provider bills {}", PROJECTS[index]),
            format!("${billed:.2}"),
            format!("${booked:.2}"),
            &format!("${less:.2} less"),
            booked + less + 1e-9 >= billed,
        ));
    }
    Ok(checks)
}
