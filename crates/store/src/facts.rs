//! The ledger: what happened, once, in order, for good. Metering, audit and metrics read it here.
//!
//! What must hold: `seq` grows with every fact in the order of commits (there is one writer), so that a reader who asks
//! for everything after the last `seq` it saw misses nothing. A kind of fact that this version does not know, written by
//! a newer one, is handed out as [`Fact::Other`] rather than hidden. Facts carry sizes and names, never contents:
//! no output, no argument lists, no secrets.

use atoll_types::{
    ArtifactId, CallOutcome, CommandId, EndReason, InstanceId, Isolation, KeyId, ModelCallId, ModelUsage,
    Preset, ProjectId, Resources, SandboxId, SaveKind, SnapshotId, TemplateId, Timestamp, Usd, VolumeId,
};
use rusqlite::{Connection, Row};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{Error, Store, sql};

/// The most facts in one answer of [`Store::facts_page`].
const MAX_FACTS: usize = 1000;
/// So many are looked at for one answer, wanted or not: whoever asks for rare ones goes on from there.
const LOOKED_AT: usize = 10_000;

/// A fact that is about to be recorded.
#[derive(Debug, Clone, PartialEq)]
pub struct NewFact {
    pub at: Timestamp,
    pub project: ProjectId,
    pub sandbox: Option<SandboxId>,
    pub fact: Fact,
}

/// A fact as it stands in the ledger.
#[derive(Debug, Clone, PartialEq)]
pub struct FactRow {
    pub seq: i64,
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

#[derive(Debug, Clone)]
pub struct FactQuery {
    pub project: ProjectId,
    pub sandbox: Option<SandboxId>,
    /// Only these, as [`Fact::kind`] names them; all when empty.
    pub kinds: Vec<String>,
    /// Only what came after this one; 0 for everything.
    pub after_seq: i64,
    /// At most 1000.
    pub limit: usize,
}

/// A part of the ledger.
#[derive(Debug, Clone, PartialEq)]
pub struct FactPage {
    pub rows: Vec<FactRow>,
    /// What to ask on after; `None` where all has been looked at. There may be more even if this page has none.
    pub next: Option<i64>,
}

/// Whose usage to sum.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Scope {
    Project(ProjectId),
    Sandbox(ProjectId, SandboxId),
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct UsageTotal {
    pub wall_millis: u64,
    pub cpu_micros: u64,
    pub memory_byte_seconds: u64,
    pub disk_byte_seconds: u64,
}

impl UsageTotal {
    /// Both together.
    pub fn plus(self, other: Self) -> Self {
        Self {
            wall_millis: self.wall_millis.saturating_add(other.wall_millis),
            cpu_micros: self.cpu_micros.saturating_add(other.cpu_micros),
            memory_byte_seconds: self.memory_byte_seconds.saturating_add(other.memory_byte_seconds),
            disk_byte_seconds: self.disk_byte_seconds.saturating_add(other.disk_byte_seconds),
        }
    }
}

impl Store {
    /// Records facts that go with no row; those that do are handed to the method that writes the row.
    pub async fn append_facts(&self, facts: Vec<NewFact>) -> Result<(), Error> {
        if facts.is_empty() {
            return Ok(());
        }
        self.write("record facts", move |db| append(db, &facts)).await
    }

    /// The facts of a page, for those who do not go on.
    pub async fn facts(&self, query: FactQuery) -> Result<Vec<FactRow>, Error> {
        Ok(self.facts_page(query).await?.rows)
    }

    /// Facts in the order in which they were recorded: as many as were asked for, or those that were found among so many as
    /// one answer may look at.
    pub async fn facts_page(&self, query: FactQuery) -> Result<FactPage, Error> {
        self.read("list facts", move |db| {
            let project = query.project.as_str();
            let limit = query.limit.clamp(1, MAX_FACTS);
            let most = if query.kinds.is_empty() { limit } else { LOOKED_AT };
            let most = sql::as_limit(most);
            // Along the one index or the other, so that what is looked at is what is counted.
            let (sql, whose) = match &query.sandbox {
                Some(sandbox) => (
                    "SELECT * FROM facts WHERE sandbox = ?1 AND seq > ?2 ORDER BY seq LIMIT ?3",
                    sandbox.as_str(),
                ),
                None => (
                    "SELECT * FROM facts WHERE project = ?1 AND seq > ?2 ORDER BY seq LIMIT ?3",
                    project,
                ),
            };
            let mut statement = db.prepare_cached(sql)?;
            let mut rows = statement.query(rusqlite::params![whose, query.after_seq, most])?;
            let mut page = FactPage {
                rows: Vec::new(),
                next: None,
            };
            let (mut looked_at, mut last) = (0, 0);
            while let Some(row) = rows.next()? {
                // A sandbox is of one project, and its facts are too: nothing of this one is the caller's.
                if row.get::<_, String>("project")? != project {
                    return Ok(page);
                }
                looked_at += 1;
                last = row.get("seq")?;
                if !query.kinds.is_empty() && !query.kinds.contains(&row.get("kind")?) {
                    continue;
                }
                page.rows.push(read(row)?);
                if page.rows.len() >= limit {
                    break;
                }
            }
            if page.rows.len() >= limit || looked_at >= most {
                page.next = Some(last);
            }
            Ok(page)
        })
        .await
    }

    /// Commands of a sandbox whose start is in the ledger and whose end is not, with the time of the start.
    pub async fn open_commands(&self, sandbox: &SandboxId) -> Result<Vec<(CommandId, Timestamp)>, Error> {
        let sandbox = sandbox.clone();
        self.read("find commands without an end", move |db| {
            sql::rows(
                db,
                "SELECT data ->> 'command' AS command, at FROM facts
                 WHERE sandbox = ?1 AND kind = 'command.started' AND data ->> 'command' NOT IN
                     (SELECT data ->> 'command' FROM facts WHERE sandbox = ?1 AND kind = 'command.exited')
                 ORDER BY seq",
                &[&sandbox.as_str()],
                |row| Ok((sql::word(row, "command")?, sql::time(row, "at")?)),
            )
        })
        .await
    }

    /// Changes with every growth of the ledger, to the number of its last fact.
    pub fn ledger_growth(&self) -> tokio::sync::watch::Receiver<i64> {
        self.inner.engine.ledger()
    }

    /// The number of the last fact; 0 when there is none.
    pub async fn last_seq(&self) -> Result<i64, Error> {
        self.read("find the last fact", |db| {
            let last = sql::row(db, "SELECT max(seq) AS seq FROM facts", &[], |row| {
                row.get::<_, Option<i64>>("seq")
            })?;
            Ok(last.flatten().unwrap_or(0))
        })
        .await
    }

    /// Sums the usage recorded from `from` (inclusive) to `to` (exclusive).
    pub async fn usage_total(
        &self,
        scope: Scope,
        from: Timestamp,
        to: Timestamp,
    ) -> Result<UsageTotal, Error> {
        self.read("sum usage", move |db| {
            let (project, sandbox) = match &scope {
                Scope::Project(project) => (project, None),
                Scope::Sandbox(project, sandbox) => (project, Some(sandbox.as_str())),
            };
            sql::row(
                db,
                if sandbox.is_some() {
                    USAGE_OF_SANDBOX
                } else {
                    USAGE_OF_PROJECT
                },
                &[&project.as_str(), &from.0, &to.0, &sandbox],
                read_usage,
            )
            .map(Option::unwrap_or_default)
        })
        .await
    }

    /// Sums what a project used in the facts behind `seen`, and says which one is the last of those: whoever remembers both has
    /// only new ones summed the next time.
    pub async fn usage_behind(&self, project: &ProjectId, seen: i64) -> Result<(UsageTotal, i64), Error> {
        let project = project.clone();
        self.read("sum usage", move |db| {
            let project = project.as_str();
            let last = sql::row(
                db,
                "SELECT max(seq) AS last FROM facts WHERE project = ?1",
                &[&project],
                |row| row.get::<_, Option<i64>>("last"),
            )?;
            let last = last.flatten().unwrap_or(seen).max(seen);
            // All of them along the index of those alone, a few along that of all facts.
            let sums = if seen == 0 {
                USAGE_OF_PROJECT_UNTIL
            } else {
                USAGE_OF_PROJECT_BEHIND
            };
            let total = sql::row(db, sums, &[&project, &seen, &last], read_usage)?;
            Ok((total.unwrap_or_default(), last))
        })
        .await
    }

    /// The one way in which facts go: retention. Removes at most `limit` facts that are older than `before` and says how
    /// many; call it again while it removes as many as it may.
    pub async fn expire_facts(&self, before: Timestamp, limit: usize) -> Result<usize, Error> {
        self.write("apply retention to the ledger", move |db| {
            sql::execute(
                db,
                "INSERT INTO fact_retention (before) VALUES (?1)",
                &[&before.0],
            )?;
            let gone = sql::execute(
                db,
                "DELETE FROM facts WHERE seq IN (SELECT seq FROM facts WHERE at < ?1 ORDER BY at LIMIT ?2)",
                &[&before.0, &sql::as_limit(limit)],
            )?;
            sql::execute(db, "DELETE FROM fact_retention", &[])?;
            Ok(gone)
        })
        .await
    }
}

/// Sums of the high and the low half of each number: byte-seconds of a busy year exceed what SQLite can add up at once.
macro_rules! usage_sums {
    ($from:literal) => {
        concat!(
            "SELECT sum(wall >> 24), sum(wall & 16777215), sum(cpu >> 24), sum(cpu & 16777215),
                    sum(memory >> 24), sum(memory & 16777215), sum(disk >> 24), sum(disk & 16777215)
             FROM (SELECT data ->> 'wall_millis' AS wall, data ->> 'cpu_micros' AS cpu,
                          data ->> 'memory_byte_seconds' AS memory, data ->> 'disk_byte_seconds' AS disk
                   FROM facts ",
            $from,
            " AND project = ?1 AND kind = 'usage')"
        )
    };
}
const USAGE_OF_PROJECT: &str =
    usage_sums!("INDEXED BY facts_usage WHERE at >= ?2 AND at < ?3 AND ?4 IS NULL");
const USAGE_OF_SANDBOX: &str =
    usage_sums!("INDEXED BY facts_of_sandbox WHERE at >= ?2 AND at < ?3 AND sandbox = ?4");
const USAGE_OF_PROJECT_UNTIL: &str = usage_sums!("INDEXED BY facts_usage WHERE seq > ?2 AND seq <= ?3");
const USAGE_OF_PROJECT_BEHIND: &str = usage_sums!("INDEXED BY facts_of_project WHERE seq > ?2 AND seq <= ?3");

fn read_usage(row: &Row<'_>) -> rusqlite::Result<UsageTotal> {
    Ok(UsageTotal {
        wall_millis: wide_sum(row, 0)?,
        cpu_micros: wide_sum(row, 2)?,
        memory_byte_seconds: wide_sum(row, 4)?,
        disk_byte_seconds: wide_sum(row, 6)?,
    })
}

pub(crate) fn wide_sum(row: &Row<'_>, column: usize) -> rusqlite::Result<u64> {
    let high: Option<i64> = row.get(column)?;
    let low: Option<i64> = row.get(column + 1)?;
    let sum = (i128::from(high.unwrap_or(0)) << 24) + i128::from(low.unwrap_or(0));
    Ok(u64::try_from(sum.max(0)).unwrap_or(u64::MAX))
}

/// Records facts inside of the open transaction.
pub(crate) fn append(db: &Connection, facts: &[NewFact]) -> Result<(), Error> {
    for new in facts {
        let data = sql::to_json("a fact", &new.fact.data()?)?;
        sql::execute(
            db,
            "INSERT INTO facts (at, project, sandbox, kind, data) VALUES (?1, ?2, ?3, ?4, ?5)",
            &[
                &new.at.0,
                &new.project.as_str(),
                &new.sandbox.as_ref().map(SandboxId::as_str),
                &new.fact.kind(),
                &data,
            ],
        )?;
    }
    Ok(())
}

fn read(row: &Row<'_>) -> rusqlite::Result<FactRow> {
    let kind: String = row.get("kind")?;
    Ok(FactRow {
        seq: row.get("seq")?,
        at: sql::time(row, "at")?,
        project: sql::word(row, "project")?,
        sandbox: sql::maybe_word(row, "sandbox")?,
        fact: Fact::from_parts(kind, sql::json(row, "data")?),
    })
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
            Self::SecretSet { .. } => "secret.set",
            Self::SecretRotated { .. } => "secret.rotated",
            Self::SecretDeleted { .. } => "secret.deleted",
            Self::SecretUsed { .. } => "secret.used",
            Self::Other { kind, .. } => kind,
        }
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

    fn from_parts(kind: String, data: Value) -> Self {
        let whole = serde_json::json!({ "kind": &kind, "data": &data });
        serde_json::from_value(whole).unwrap_or(Self::Other { kind, data })
    }
}
