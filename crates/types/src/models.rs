//! Calls of models: whom they go to, what they used, how they ended, and what caps them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// What a call used, in buckets that never overlap: a token is counted in exactly one. Wires disagree about which of their
/// numbers contain which; whoever reads one takes them apart.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelUsage {
    /// Read by the model, and not from a cache.
    pub input: u64,
    /// Read from the provider's cache.
    pub cache_read: u64,
    /// Written to the provider's cache for the usual short time.
    pub cache_write: u64,
    /// Written to the provider's cache for an hour.
    pub cache_write_1h: u64,
    pub audio_input: u64,
    /// Written by the model for the caller.
    pub output: u64,
    /// Written by the model for itself; billed as output.
    pub reasoning: u64,
    pub audio_output: u64,
    /// Searches of the web that the provider made.
    pub searches: u64,
}

impl ModelUsage {
    /// Everything that the model was given to read.
    pub fn total_input(&self) -> u64 {
        [
            self.input,
            self.cache_read,
            self.cache_write,
            self.cache_write_1h,
            self.audio_input,
        ]
        .into_iter()
        .fold(0, u64::saturating_add)
    }

    /// Everything that the model wrote.
    pub fn total_output(&self) -> u64 {
        self.output
            .saturating_add(self.reasoning)
            .saturating_add(self.audio_output)
    }

    pub fn total(&self) -> u64 {
        self.total_input().saturating_add(self.total_output())
    }
}

/// Which wire a provider speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProviderKind {
    /// Chat Completions, Responses and Embeddings, at OpenAI or at any of the many that speak like it.
    Openai,
    /// The same at Azure: another header carries the key.
    Azure,
    Anthropic,
    Gemini,
    /// Converse, at Amazon.
    Bedrock,
}

/// How a call ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CallOutcome {
    /// Still under way.
    Open,
    Done,
    /// No provider gave an answer, or one broke off.
    Failed,
    /// The caller hung up.
    Cancelled,
    /// The server died meanwhile.
    Lost,
}

/// Whose spending a budget caps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BudgetScope {
    Project,
    Key,
    Workflow,
    Run,
    Sandbox,
}

/// When a budget begins anew. Days, weeks (from Monday) and months are those of UTC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BudgetWindow {
    Day,
    Week,
    Month,
    /// Never.
    Total,
}

macro_rules! named {
    ($($type:ident, $noun:literal { $($variant:ident = $name:literal),* $(,)? })*) => {$(
        impl $type {
            pub const ALL: &'static [Self] = &[$(Self::$variant),*];

            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                }
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.name())
            }
        }

        impl FromStr for $type {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                Self::ALL.iter().copied().find(|one| one.name() == text).ok_or_else(|| {
                    let names: Vec<_> = Self::ALL.iter().map(|one| one.name()).collect();
                    format!("unknown {}: use one of {}", $noun, names.join(", "))
                })
            }
        }
    )*};
}

named! {
    ProviderKind, "kind of provider" { Openai = "openai", Azure = "azure", Anthropic = "anthropic", Gemini = "gemini", Bedrock = "bedrock" }
    CallOutcome, "outcome" { Open = "open", Done = "done", Failed = "failed", Cancelled = "cancelled", Lost = "lost" }
    BudgetScope, "scope" { Project = "project", Key = "key", Workflow = "workflow", Run = "run", Sandbox = "sandbox" }
    BudgetWindow, "window" { Day = "day", Week = "week", Month = "month", Total = "total" }
}
