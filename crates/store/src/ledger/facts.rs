//! What can happen, as the ledger tells it.
//!
//! A kind of fact that this version does not know, written by a newer one, is handed out as [`Fact::Other`] rather than
//! hidden. Facts carry sizes and names, never contents: no output, no argument lists, no secrets.

use atoll_types::{
    ArtifactId, CallOutcome, CommandId, EndReason, InstanceId, Isolation, KeyId, ModelCallId, ModelUsage,
    Preset, ProjectId, Resources, SandboxId, SaveKind, SnapshotId, TemplateId, Timestamp, Usd, VolumeId,
};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::Error;

/// A fact that is about to be recorded.
#[derive(Debug, Clone, PartialEq)]
pub struct NewFact {
    pub at: Timestamp,
    pub project: ProjectId,
    pub sandbox: Option<SandboxId>,
    pub fact: Fact,
}

/// What happened. As JSON: `{"kind": "sandbox.ended", "data": {...}}`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", content = "data")]
pub enum Fact {
    #[serde(rename = "sandbox.created")]
    SandboxCreated {
        template: TemplateId,
        isolation: Isolation,
        resources: Resources,
    },
    #[serde(rename = "sandbox.started")]
    SandboxStarted {
        instance: InstanceId,
        /// From creation to the first answer of its agent.
        took_millis: u64,
        /// Claimed from a warm pool rather than booted.
        warm: bool,
    },
    /// It was asked to end, or its time was over.
    #[serde(rename = "sandbox.ended")]
    SandboxEnded { end: EndReason },
    /// It broke.
    #[serde(rename = "sandbox.failed")]
    SandboxFailed { end: EndReason },
    #[serde(rename = "sandbox.extended")]
    SandboxExtended { deadline: Option<Timestamp> },
    /// Labels, times or limits are others now.
    #[serde(rename = "sandbox.changed")]
    SandboxChanged { fields: Vec<String> },
    /// Its state is kept and its processes are gone.
    #[serde(rename = "sandbox.paused")]
    SandboxPaused {
        kind: SaveKind,
        snapshot: SnapshotId,
        bytes: u64,
        took_millis: u64,
    },
    /// Its files are kept and its processes are gone.
    #[serde(rename = "sandbox.stopped")]
    SandboxStopped {
        snapshot: SnapshotId,
        bytes: u64,
        took_millis: u64,
    },
    /// It was to rest and could not be saved; it runs on.
    #[serde(rename = "sandbox.save_failed")]
    SandboxSaveFailed { why: String },
    #[serde(rename = "sandbox.resumed")]
    SandboxResumed { instance: InstanceId, took_millis: u64 },
    /// It was to come back and could not; it rests on.
    #[serde(rename = "sandbox.resume_failed")]
    SandboxResumeFailed { why: String },
    /// It is a copy of that one.
    #[serde(rename = "sandbox.forked")]
    SandboxForked { from: SandboxId },
    /// A command that the sandbox asked for at a turn of its life did not succeed.
    #[serde(rename = "hook.failed")]
    HookFailed { why: String },
    #[serde(rename = "snapshot.created")]
    SnapshotCreated {
        snapshot: SnapshotId,
        kind: SaveKind,
        total_bytes: u64,
        /// What it added to what was stored already.
        stored_bytes: u64,
    },
    #[serde(rename = "snapshot.deleted")]
    SnapshotDeleted { snapshot: SnapshotId },
    #[serde(rename = "volume.created")]
    VolumeCreated {
        volume: VolumeId,
        name: String,
        limit_bytes: u64,
    },
    #[serde(rename = "volume.deleted")]
    VolumeDeleted { volume: VolumeId, name: String },
    #[serde(rename = "command.started")]
    CommandStarted {
        command: CommandId,
        /// The first of its arguments only.
        program: String,
        arguments: u64,
        argument_bytes: u64,
        background: bool,
    },
    /// Every command that was started has exactly one of these. The numbers are what the agent in the sandbox says:
    /// for people, never for billing.
    #[serde(rename = "command.exited")]
    CommandExited {
        command: CommandId,
        state: CommandEnd,
        exit_code: Option<i32>,
        signal: Option<i32>,
        duration_millis: u64,
        /// What its stdin has taken. Not known, and 0, of one that was lost; like the next.
        bytes_in: u64,
        bytes_out: u64,
    },
    /// What a sandbox consumed since its last fact of this kind.
    #[serde(rename = "usage")]
    Usage {
        /// Which instance of it; facts of earlier versions do not say.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        instance: Option<InstanceId>,
        wall_millis: u64,
        cpu_micros: u64,
        memory_byte_seconds: u64,
        disk_byte_seconds: u64,
    },
    #[serde(rename = "artifact.saved")]
    ArtifactSaved {
        artifact: ArtifactId,
        name: String,
        digest: String,
        size: u64,
    },
    #[serde(rename = "artifact.deleted")]
    ArtifactDeleted {
        artifact: ArtifactId,
        name: String,
        /// Because its retention was over, not because somebody asked.
        expired: bool,
    },
    #[serde(rename = "key.created")]
    KeyCreated {
        key: KeyId,
        name: String,
        /// What follows was not told by earlier releases.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        role: Option<String>,
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        scopes: Vec<String>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        expires_at: Option<Timestamp>,
        /// The key that it was made with; absent where the server made it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        made_by: Option<KeyId>,
    },
    #[serde(rename = "key.revoked")]
    KeyRevoked { key: KeyId },
    #[serde(rename = "template.built")]
    TemplateBuilt {
        template: TemplateId,
        digest: String,
        size: u64,
    },
    #[serde(rename = "template.deleted")]
    TemplateDeleted { template: TemplateId },
    /// Every project may use it from now on.
    #[serde(rename = "template.shared")]
    TemplateShared { template: TemplateId },
    #[serde(rename = "template.unshared")]
    TemplateUnshared { template: TemplateId },
    #[serde(rename = "network.allowed")]
    NetworkAllowed(NetworkDecision),
    #[serde(rename = "network.denied")]
    NetworkDenied(NetworkDecision),
    /// What a sandbox may reach was set anew while it lives.
    #[serde(rename = "network.policy_set")]
    NetworkPolicySet {
        preset: Option<Preset>,
        rules: u64,
        /// The names of those that it may use.
        secrets: Vec<String>,
    },
    #[serde(rename = "secret.set")]
    SecretSet { secret: String },
    /// Its value was replaced.
    #[serde(rename = "secret.rotated")]
    SecretRotated { secret: String },
    #[serde(rename = "secret.deleted")]
    SecretDeleted { secret: String },
    /// It was put into requests of a sandbox.
    #[serde(rename = "secret.used")]
    SecretUsed {
        secret: String,
        host: String,
        port: u16,
        /// How many requests.
        count: u64,
    },
    /// A call of a model has ended, however it did.
    #[serde(rename = "model.called")]
    ModelCalled(ModelCallFact),
    /// A call of a model was refused before it began.
    #[serde(rename = "model.refused")]
    ModelRefused {
        model: String,
        /// Why: `budget`, `rate`, `not_allowed` or `token`.
        code: String,
        reason: String,
        /// How often, since it was last told: a caller who is refused again and again is told of once a minute.
        #[serde(default = "once", skip_serializing_if = "is_once")]
        count: u64,
    },
    /// A share of a budget is spent.
    #[serde(rename = "budget.alert")]
    BudgetAlert {
        budget: String,
        subject: String,
        spent: Usd,
        limit: Usd,
    },
    #[serde(rename = "budget.set")]
    BudgetSet { budget: String, limit: Usd },
    #[serde(rename = "budget.deleted")]
    BudgetDeleted { budget: String },
    #[serde(rename = "provider.set")]
    ProviderSet { provider: String },
    #[serde(rename = "provider.deleted")]
    ProviderDeleted { provider: String },
    #[serde(rename = "model_key.created")]
    ModelKeyCreated { key: KeyId, name: String },
    #[serde(rename = "model_key.revoked")]
    ModelKeyRevoked { key: KeyId },
    /// Somebody has answered what a workflow asked. What it asked for, and what they said about it, is not told here.
    #[serde(rename = "approval.answered")]
    ApprovalAnswered {
        approval: String,
        namespace: String,
        workflow: String,
        run: String,
        /// Of the action that was asked about.
        digest: String,
        granted: bool,
        /// What they call themselves.
        by: String,
        /// The key that they showed.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        key: Option<KeyId>,
    },
    /// The project had more in the ledger than it may, and the oldest had to go. There is one of these at a time, with all that
    /// has gone so far: it takes the place of the one before.
    #[serde(rename = "ledger.trimmed")]
    LedgerTrimmed {
        facts: u64,
        model_calls: u64,
        instances: u64,
        /// Rows of sandboxes that had ended.
        sandboxes: u64,
        /// The last fact that may be gone.
        through: i64,
        /// What is older is not complete.
        complete_from: Timestamp,
    },
    /// A kind, or a form of one, that this version does not know.
    #[serde(untagged)]
    Other { kind: String, data: Value },
}

/// What became of a sandbox's attempts to reach something; equal ones in a row are one fact with their number.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkDecision {
    /// What was looked at: `tcp`, `udp`, `dns` or `http`.
    pub protocol: String,
    /// The name that was asked for, where there was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    pub port: u16,
    /// What made the decision, as [`atoll_types::NetworkRule::name`] and the presets name it.
    pub rule: String,
    pub reason: String,
    pub count: u64,
    pub bytes_up: u64,
    pub bytes_down: u64,
}

/// What a call of a model was and what it cost.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelCallFact {
    pub call: ModelCallId,
    pub asked: String,
    pub provider: String,
    pub model: String,
    pub outcome: CallOutcome,
    pub usage: ModelUsage,
    pub estimated: bool,
    pub cost: Usd,
    /// `None`: the model has no price.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub price_version: Option<String>,
    pub duration_millis: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<KeyId>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workflow: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run: Option<String>,
}

const fn once() -> u64 {
    1
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands out references")]
const fn is_once(count: &u64) -> bool {
    *count == 1
}

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CommandEnd {
    Exited,
    /// Ended by a signal.
    Signaled,
    /// Killed because its own timeout was over.
    TimedOut,
    /// Its sandbox ended first, or forgot it before anybody asked how it ended.
    Lost,
}

impl Fact {
    /// The stable name of what happened.
    pub fn kind(&self) -> &str {
        match self {
            Self::SandboxCreated { .. } => "sandbox.created",
            Self::SandboxStarted { .. } => "sandbox.started",
            Self::SandboxEnded { .. } => "sandbox.ended",
            Self::SandboxFailed { .. } => "sandbox.failed",
            Self::SandboxExtended { .. } => "sandbox.extended",
            Self::SandboxChanged { .. } => "sandbox.changed",
            Self::SandboxPaused { .. } => "sandbox.paused",
            Self::SandboxStopped { .. } => "sandbox.stopped",
            Self::SandboxSaveFailed { .. } => "sandbox.save_failed",
            Self::SandboxResumed { .. } => "sandbox.resumed",
            Self::SandboxResumeFailed { .. } => "sandbox.resume_failed",
            Self::SandboxForked { .. } => "sandbox.forked",
            Self::HookFailed { .. } => "hook.failed",
            Self::SnapshotCreated { .. } => "snapshot.created",
            Self::SnapshotDeleted { .. } => "snapshot.deleted",
            Self::VolumeCreated { .. } => "volume.created",
            Self::VolumeDeleted { .. } => "volume.deleted",
            Self::CommandStarted { .. } => "command.started",
            Self::CommandExited { .. } => "command.exited",
            Self::Usage { .. } => "usage",
            Self::ArtifactSaved { .. } => "artifact.saved",
            Self::ArtifactDeleted { .. } => "artifact.deleted",
            Self::KeyCreated { .. } => "key.created",
            Self::KeyRevoked { .. } => "key.revoked",
            Self::TemplateBuilt { .. } => "template.built",
            Self::TemplateDeleted { .. } => "template.deleted",
            Self::TemplateShared { .. } => "template.shared",
            Self::TemplateUnshared { .. } => "template.unshared",
            Self::NetworkAllowed(_) => "network.allowed",
            Self::NetworkDenied(_) => "network.denied",
            Self::NetworkPolicySet { .. } => "network.policy_set",
            Self::ModelCalled(_) => "model.called",
            Self::ModelRefused { .. } => "model.refused",
            Self::BudgetAlert { .. } => "budget.alert",
            Self::BudgetSet { .. } => "budget.set",
            Self::BudgetDeleted { .. } => "budget.deleted",
            Self::ProviderSet { .. } => "provider.set",
            Self::ProviderDeleted { .. } => "provider.deleted",
            Self::ModelKeyCreated { .. } => "model_key.created",
            Self::ModelKeyRevoked { .. } => "model_key.revoked",
            Self::ApprovalAnswered { .. } => "approval.answered",
            Self::LedgerTrimmed { .. } => "ledger.trimmed",
            Self::SecretSet { .. } => "secret.set",
            Self::SecretRotated { .. } => "secret.rotated",
            Self::SecretDeleted { .. } => "secret.deleted",
            Self::SecretUsed { .. } => "secret.used",
            Self::Other { kind, .. } => kind,
        }
    }

    /// It says who may do what, or who allowed it; or what is not in the ledger any more. Of these there are few, and nobody
    /// can push them out by doing much else, not even with decisions of another kind.
    pub fn is_decision(&self) -> bool {
        matches!(
            self,
            Self::KeyCreated { .. }
                | Self::KeyRevoked { .. }
                | Self::TemplateDeleted { .. }
                | Self::TemplateShared { .. }
                | Self::TemplateUnshared { .. }
                | Self::NetworkPolicySet { .. }
                | Self::SecretSet { .. }
                | Self::SecretRotated { .. }
                | Self::SecretDeleted { .. }
                | Self::BudgetSet { .. }
                | Self::BudgetDeleted { .. }
                | Self::ProviderSet { .. }
                | Self::ProviderDeleted { .. }
                | Self::ModelKeyCreated { .. }
                | Self::ModelKeyRevoked { .. }
                | Self::ApprovalAnswered { .. }
                | Self::LedgerTrimmed { .. }
        )
    }

    /// Everything about it but its kind.
    pub fn data(&self) -> Result<Value, Error> {
        let broken = |detail: String| Error::Corrupt {
            what: "a fact",
            detail,
        };
        match serde_json::to_value(self).map_err(|error| broken(error.to_string()))? {
            Value::Object(mut parts) => Ok(parts.remove("data").unwrap_or(Value::Null)),
            other => Err(broken(format!("not an object: {other}"))),
        }
    }

    pub(crate) fn from_parts(kind: String, data: Value) -> Self {
        let whole = serde_json::json!({ "kind": &kind, "data": &data });
        serde_json::from_value(whole).unwrap_or(Self::Other { kind, data })
    }
}
