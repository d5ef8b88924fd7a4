//! What a run came to: what did not come back, what honest callers met, what attacks got, as tables or as JSON.

use atoll_client::output::Output;
use serde::Serialize;
use serde_json::{Value, json};

use super::hostile::Attack;
use super::inventory::{Inventory, UNTOLD};
use super::tally::Sums;

const MIB: f64 = 1_048_576.0;

/// One thing that must hold at the end.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Check {
    pub(super) name: String,
    pub(super) before: String,
    pub(super) after: String,
    pub(super) allowed: String,
    pub(super) met: bool,
}

impl Check {
    pub(super) fn new(
        name: &str,
        before: impl Into<String>,
        after: impl Into<String>,
        allowed: &str,
        met: bool,
    ) -> Self {
        Self {
            name: name.to_owned(),
            before: before.into(),
            after: after.into(),
            allowed: allowed.to_owned(),
            met,
        }
    }
}

/// Each thing of both inventories.
pub(super) fn compare(before: &Inventory, after: &Inventory) -> Vec<Check> {
    let both = before.0.iter().zip(&after.0);
    both.map(|(then, now)| Check {
        name: now.name.to_owned(),
        before: amount(then.count, now.unit),
        after: amount(now.count, now.unit),
        allowed: match now.allowed {
            0 => "the same".to_owned(),
            more => format!("{} more", amount(more, now.unit)),
        },
        met: now.is_back_at(then),
    })
    .collect()
}

pub(super) fn amount(count: u64, unit: &str) -> String {
    match unit {
        _ if count == UNTOLD => "cannot be told".to_owned(),
        "bytes" => format!("{:.1} MiB", count as f64 / MIB),
        _ => count.to_string(),
    }
}

/// Everything that there is to say.
#[derive(Debug)]
pub(super) struct Report<'a> {
    pub(super) seed: u64,
    pub(super) seconds: f64,
    pub(super) left_out: &'a [String],
    pub(super) checks: &'a [Check],
    pub(super) sums: &'a Sums,
}

impl Report<'_> {
    pub(super) fn met(&self) -> bool {
        self.checks.iter().all(|check| check.met) && self.sums.findings.is_empty()
    }

    pub(super) fn print(&self, output: Output) {
        output.json(&self.json());
        let shown = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |ms| format!("{ms:.1}"));
        let rows: Vec<[String; 9]> = self
            .sums
            .asked
            .iter()
            .map(|(kind, asked)| {
                [
                    (*kind).to_owned(),
                    asked.requests.to_string(),
                    asked.failed.to_string(),
                    asked.cut.to_string(),
                    asked.full.to_string(),
                    shown(asked.calm.median()),
                    shown(asked.calm.p99()),
                    shown(asked.beside.median()),
                    shown(asked.beside.p99()),
                ]
            })
            .collect();
        output.line("\nHonest callers (milliseconds; calm: without the hostile project)");
        output.table(
            [
                "WHAT",
                "REQUESTS",
                "FAILED",
                "CUT",
                "FULL",
                "CALM p50",
                "p99",
                "BESIDE p50",
                "p99",
            ],
            &rows,
            "no requests",
        );
        let rows: Vec<[String; 5]> = Attack::ALL
            .iter()
            .filter_map(|attack| {
                let attacked = self.sums.attacks.get(attack.name())?;
                Some([
                    attack.name().to_owned(),
                    attacked.times.to_string(),
                    attacked.moves.to_string(),
                    attacked.findings.to_string(),
                    attack.about().to_owned(),
                ])
            })
            .collect();
        output.line("\nAttacks");
        output.table(["ATTACK", "TIMES", "MOVES", "GOT", ""], &rows, "none");
        let faults: Vec<String> = self
            .sums
            .faults
            .iter()
            .map(|(fault, count)| format!("{fault} {count}x"))
            .collect();
        output.line(format_args!(
            "\nFaults: {}",
            if faults.is_empty() {
                "none".to_owned()
            } else {
                faults.join(", ")
            }
        ));
        let rows: Vec<[String; 5]> = self
            .checks
            .iter()
            .map(|check| {
                [
                    check.name.clone(),
                    check.before.clone(),
                    check.after.clone(),
                    check.allowed.clone(),
                    if check.met { "met" } else { "MISSED" }.to_owned(),
                ]
            })
            .collect();
        output.line("\nBack where it was?");
        output.table(["WHAT", "BEFORE", "AFTER", "ALLOWED", ""], &rows, "not looked at");
        if !self.sums.findings.is_empty() {
            output.line("\nFound");
            for ((what, by), count) in &self.sums.found {
                output.line(format_args!("  {what} ({by}): {count}x"));
                let own = self.sums.findings.iter();
                for finding in own
                    .filter(|finding| finding.what == *what && finding.by == *by)
                    .take(3)
                {
                    output.line(format_args!("      {}", finding.words.replace('\n', " ")));
                }
            }
        }
        for what in self.left_out {
            output.line(format_args!("\nLeft out: {what}"));
        }
        let verdict = if self.met() {
            "everything came back"
        } else {
            "NOT everything came back, or something was found"
        };
        output.line(format_args!(
            "\n{verdict}: {:.0} s, seed {} (--seed {} repeats its choices)",
            self.seconds, self.seed, self.seed
        ));
    }

    fn json(&self) -> Value {
        let honest: Vec<Value> = self
            .sums
            .asked
            .iter()
            .map(|(kind, asked)| {
                json!({
                    "what": kind, "requests": asked.requests, "failed": asked.failed, "cut": asked.cut,
                    "full": asked.full,
                    "calm_p50": asked.calm.median(), "calm_p99": asked.calm.p99(),
                    "beside_p50": asked.beside.median(), "beside_p99": asked.beside.p99(),
                })
            })
            .collect();
        let attacks: Vec<Value> = self
            .sums
            .attacks
            .iter()
            .map(|(name, attacked)| {
                json!({"attack": name, "times": attacked.times, "moves": attacked.moves, "got": attacked.findings})
            })
            .collect();
        let found: Vec<Value> = self
            .sums
            .findings
            .iter()
            .map(|finding| json!({"what": finding.what, "by": finding.by, "words": finding.words}))
            .collect();
        json!({
            "seed": self.seed, "seconds": self.seconds, "met": self.met(), "checks": self.checks,
            "honest": honest, "stories": self.sums.stories, "attacks": attacks, "faults": self.sums.faults, "found": found,
            "searched": self.sums.searched, "left_out": self.left_out,
        })
    }
}
