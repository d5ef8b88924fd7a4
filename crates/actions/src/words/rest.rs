//! To rest and back, and copies.

use std::collections::BTreeMap;

use atoll_sandboxes::{ForkSandbox, MAX_COPIES, Sandbox};
use atoll_types::{Fault, SaveKind};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::life::SaveKindName;
use super::sandbox::SandboxView;
use crate::spelling;

#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PauseRequest {
    /// What is kept. Absent: memory where the isolation can, else files; the answer says which.
    kind: Option<SaveKindName>,
}

#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ResumeRequest {
    /// The new lifetime, from now. Absent: what was left when it went to rest or, if nothing was, what it was created with.
    #[schema(minimum = 1, maximum = 9_007_199_254_740_991_i64)]
    timeout_ms: Option<u64>,
}

#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ForkRequest {
    /// How many copies; 1 if absent.
    #[schema(minimum = 1, maximum = 64)]
    count: Option<u64>,
    /// Absent: with memory, refused where the isolation cannot. `filesystem`: copies that start anew on the same files.
    kind: Option<SaveKindName>,
    /// Lifetime of the copies, from now. Absent: as the sandbox was created with.
    #[schema(minimum = 1, maximum = 9_007_199_254_740_991_i64)]
    timeout_ms: Option<u64>,
    /// Added to the labels of the sandbox.
    #[serde(default)]
    labels: BTreeMap<String, String>,
}

#[derive(Debug, Serialize, ToSchema)]
pub struct Copies {
    items: Vec<SandboxView>,
}

impl PauseRequest {
    pub fn into_kind(self) -> Option<SaveKind> {
        self.kind.map(SaveKindName::into_kind)
    }
}

impl ResumeRequest {
    /// The new lifetime in milliseconds.
    pub fn into_timeout(self) -> Result<Option<u64>, Fault> {
        self.timeout_ms
            .map(|millis| spelling::duration("timeout_ms", millis))
            .transpose()
    }
}

impl ForkRequest {
    pub fn into_fork(self) -> Result<ForkSandbox, Fault> {
        let count = spelling::within("count", self.count.unwrap_or(1), 1..=MAX_COPIES as u64)?;
        Ok(ForkSandbox {
            count: usize::try_from(count).unwrap_or(MAX_COPIES),
            kind: self.kind.map(SaveKindName::into_kind),
            timeout_millis: self
                .timeout_ms
                .map(|millis| spelling::duration("timeout_ms", millis))
                .transpose()?,
            labels: spelling::labels(self.labels)?,
        })
    }
}

impl Copies {
    pub fn of(copies: Vec<Sandbox>) -> Self {
        Self {
            items: copies.into_iter().map(SandboxView::of).collect(),
        }
    }
}
