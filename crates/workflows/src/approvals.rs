//! Approvals: durable questions to people, asked by workflows, each bound to the digest of one exact action.
//!
//! What must hold:
//! - One question for one activity of a run: whoever asks again finds it. An activity is known by the event that scheduled
//!   it. Its id will not do: once an activity is over, its workflow may give the same id to another.
//! - A decision is about the action that was asked about, is durable before its workflow hears of it, and stands.
//! - A yes is good for one activity, however often that is tried.
//! - Silence means no. So does a workflow that has ended, or has taken its question back.
//!
//! They are few, and people are slow: all of them are in memory, and one task looks after them. What they hold is bounded,
//! for each and for all of a project; where a project has too many, those go first that were decided longest ago.

use parking_lot::{Mutex, MutexGuard};
use std::collections::{BTreeMap, HashMap};
use std::ops::Bound;
use std::time::Duration;

use atoll_store::{WorkflowItem, WorkflowStore};
use atoll_workflow_core::{ActivityFinish, Nanos, Refusal, TaskToken};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tokio::sync::Notify;

use crate::activities::Speaker;
use crate::cells::Key;
use crate::steps::{self, IDENTITY, Step};
use crate::{Engine, shares, unavailable};

const KIND: &str = "approval";
/// How many questions of a namespace may be open.
const MOST_OPEN: usize = 10_000;
/// How long a decision is kept to be looked at.
const KEPT: Duration = Duration::from_secs(30 * 24 * 3600);
/// How often questions are looked at whose time is not up.
const ROUND: Duration = Duration::from_secs(1);
/// How many of those are looked at in a round.
const SOME: usize = 100;
/// What an action may hold, as JSON: a person has to read it.
const MOST_BYTES: usize = 64 * 1024;
/// What a person may say about a decision.
const MOST_NOTE: usize = 16 * 1024;
/// What one page of a list may hold, and how many.
const PAGE: usize = 1_000;
const PAGE_BYTES: usize = 4 * 1024 * 1024;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Approval {
    pub id: String,
    pub namespace: String,
    pub workflow_id: String,
    pub run_id: String,
    pub activity_id: String,
    /// The event that scheduled the activity. Zero in what was written before this was known.
    #[serde(default)]
    scheduled_id: i64,
    /// What is to be done, exactly: a JSON text. Taken apart it would be many times larger.
    #[serde(with = "as_json")]
    pub action: String,
    /// Of the action, see [`digest`].
    pub digest: String,
    /// Why, in words for the person.
    pub reason: String,
    pub asked_at: Nanos,
    /// From then on it is a no.
    pub deadline: Nanos,
    pub decision: Option<Decision>,
    /// The workflow has heard of the decision, or does not listen any more.
    told: bool,
    /// The activity that has done what was granted, or tries to.
    #[serde(default)]
    used_by: Option<String>,
    /// The event that scheduled that activity. Zero while there is none, and in what was written before this was known.
    #[serde(default)]
    used_by_event: i64,
}

/// A text that is written as the JSON that it is.
mod as_json {
    use serde::de::Deserializer;
    use serde::ser::{Error as _, Serializer};
    use serde::{Deserialize as _, Serialize as _};
    use serde_json::Value;

    pub(super) fn serialize<S: Serializer>(text: &str, into: S) -> Result<S::Ok, S::Error> {
        let value: Value = serde_json::from_str(text).map_err(S::Error::custom)?;
        value.serialize(into)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
        Value::deserialize(from).map(|value| value.to_string())
    }
}

impl Approval {
    fn bytes(&self) -> usize {
        let decision = self.decision.as_ref();
        shares::LEAST
            + self.action.len()
            + self.reason.len()
            + self.workflow_id.len()
            + self.activity_id.len()
            + decision.map_or(0, |decision| decision.by.len() + decision.note.len())
    }

    /// Where it stands in a list.
    fn place(&self) -> (Nanos, &str) {
        (self.asked_at, &self.id)
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Decision {
    pub granted: bool,
    /// A person's name for themselves, or what decided in their place.
    pub by: String,
    /// The key that they showed, whatever they call themselves. Nothing where nobody decided, or before keys were kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    pub note: String,
    pub at: Nanos,
}

/// What a workflow asks.
#[derive(Debug, Clone)]
pub struct Question {
    pub namespace: String,
    pub workflow_id: String,
    pub run_id: String,
    pub activity_id: String,
    /// The event that scheduled the activity.
    pub scheduled_id: i64,
    pub action: Value,
    pub reason: String,
    pub limit: Duration,
}

/// What a person answers.
#[derive(Debug, Clone)]
pub struct Verdict {
    pub granted: bool,
    /// Of the action that they were shown.
    pub digest: String,
    pub by: String,
    /// The id of the key that they showed.
    pub key: Option<String>,
    pub note: String,
}

#[derive(Debug, Default)]
pub(crate) struct Approvals {
    all: Mutex<BTreeMap<String, Approval>>,
    /// Held while one is changed, so that what was checked still holds when it is written.
    changing: tokio::sync::Mutex<()>,
    decided: Notify,
}

impl Approvals {
    pub(crate) async fn load(store: &dyn WorkflowStore) -> Result<Self, Refusal> {
        let mut all = BTreeMap::new();
        let mut last = None;
        loop {
            let page = store.workflow_items_behind(KIND, last.as_ref()).await;
            let mut page = page.map_err(unavailable)?;
            for item in &page {
                // Without it nothing is granted.
                match serde_json::from_slice::<Approval>(&item.body) {
                    Ok(approval) => drop(all.insert(item.id.clone(), approval)),
                    Err(error) => {
                        tracing::error!(namespace = item.namespace, approval = item.id, %error, "an approval cannot be read and is left out");
                    }
                }
            }
            last = page.pop();
            if last.is_none() {
                break;
            }
        }
        Ok(Self {
            all: Mutex::new(all),
            ..Self::default()
        })
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Approval>> {
        self.all.lock()
    }
}

impl Approvals {
    /// Forgets all of a namespace that nobody is in.
    pub(crate) fn forget(&self, namespace: &str) {
        self.lock().retain(|_, approval| approval.namespace != namespace);
    }

    /// Those of which something is to be told, decided or forgotten; and some of those that wait, behind the given one.
    fn to_look_after(&self, now: Nanos, behind: &str) -> (Vec<String>, Vec<String>) {
        let kept = i64::try_from(KEPT.as_nanos()).unwrap_or(i64::MAX);
        let all = self.lock();
        let presses = |approval: &&Approval| match &approval.decision {
            Some(decision) => !approval.told || now.saturating_sub(decision.at) > kept,
            None => now >= approval.deadline,
        };
        let pressing = all.values().filter(presses).map(|approval| approval.id.clone());
        let open = all
            .range::<str, _>((Bound::Excluded(behind), Bound::Unbounded))
            .filter(|(_, approval)| approval.decision.is_none() && now < approval.deadline)
            .take(SOME)
            .map(|(id, _)| id.clone());
        (pressing.collect(), open.collect())
    }
}

/// SHA-256 over the JSON text with sorted keys and without spaces.
pub fn digest(action: &Value) -> String {
    let mut text = String::new();
    write_canonical(action, &mut text);
    let sum = Sha256::digest(text.as_bytes());
    let hex: String = sum.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{hex}")
}

fn write_canonical(value: &Value, into: &mut String) {
    match value {
        Value::Object(fields) => {
            let sorted: BTreeMap<_, _> = fields.iter().collect();
            into.push('{');
            for (index, (name, value)) in sorted.into_iter().enumerate() {
                if index > 0 {
                    into.push(',');
                }
                into.push_str(&Value::from(name.as_str()).to_string());
                into.push(':');
                write_canonical(value, into);
            }
            into.push('}');
        }
        Value::Array(items) => {
            into.push('[');
            for (index, value) in items.iter().enumerate() {
                if index > 0 {
                    into.push(',');
                }
                write_canonical(value, into);
            }
            into.push(']');
        }
        plain => into.push_str(&plain.to_string()),
    }
}

/// The same for the same activity of the same run, so that asking twice asks once.
fn id_of(question: &Question) -> String {
    let scheduled = question.scheduled_id.to_string();
    name_of([&question.namespace, &question.run_id, &scheduled])
}

/// The same as it was before activities were told apart by their events.
fn former_id_of(question: &Question) -> String {
    name_of([&question.namespace, &question.run_id, &question.activity_id])
}

fn read_cursor(text: &str) -> Result<(Nanos, String), Refusal> {
    let parts = text.split_once('.');
    let place = parts.and_then(|(at, id)| Some((at.parse().ok()?, id.to_owned())));
    place.ok_or_else(|| {
        let hint = "not a cursor of this server; leave it out to begin at the first page";
        Refusal::InvalidArgument(hint.to_owned())
    })
}

fn name_of(parts: [&str; 3]) -> String {
    let mut sum = Sha256::new();
    for part in parts {
        sum.update(part.as_bytes());
        sum.update([0]);
    }
    let alphabet = b"abcdefghijklmnopqrstuvwxyz234567";
    let bare: String = sum
        .finalize()
        .iter()
        .take(20)
        .map(|byte| char::from(alphabet[usize::from(byte & 31)]))
        .collect();
    format!("apr_{bare}")
}

impl Engine {
    /// Asks, or finds what was asked before.
    pub async fn ask_approval(&self, question: Question) -> Result<Approval, Refusal> {
        let action = question.action.to_string();
        let bytes = action.len() + question.reason.len();
        if bytes > MOST_BYTES {
            return Err(Refusal::InvalidArgument(format!(
                "the action and its reason have {bytes} bytes, and may have {MOST_BYTES}: name what is large instead of \
                 spelling it out"
            )));
        }
        let _inside = self.inner.namespaces.enter(&question.namespace)?;
        // Who asks late may mean a namespace that is gone, whose name another has.
        let key = Key::new(&question.namespace, &question.workflow_id);
        self.see(&key, &question.run_id, |_| Ok(())).await?;
        let id = id_of(&question);
        let approvals = &self.inner.approvals;
        let _changing = approvals.changing.lock().await;
        {
            let all = approvals.lock();
            if let Some(known) = all.get(&id) {
                return Ok(known.clone());
            }
            // Asked by a server that knew activities by their ids, and not answered yet: then this is the same activity.
            let former = all.get(&former_id_of(&question)).filter(|known| {
                known.scheduled_id == 0 && !known.told && known.digest == digest(&question.action)
            });
            if let Some(known) = former {
                return Ok(known.clone());
            }
            let open = all
                .values()
                .filter(|other| other.namespace == question.namespace && other.decision.is_none());
            if open.count() >= MOST_OPEN {
                return Err(Refusal::ResourceExhausted(format!(
                    "{MOST_OPEN} approvals wait in this namespace already"
                )));
            }
        }
        let now = self.now();
        let limit = i64::try_from(question.limit.as_nanos()).unwrap_or(i64::MAX);
        let approval = Approval {
            id,
            digest: digest(&question.action),
            namespace: question.namespace,
            workflow_id: question.workflow_id,
            run_id: question.run_id,
            activity_id: question.activity_id,
            scheduled_id: question.scheduled_id,
            action,
            reason: question.reason,
            asked_at: now,
            deadline: now.saturating_add(limit),
            decision: None,
            told: false,
            used_by: None,
            used_by_event: 0,
        };
        self.make_room(&approval).await?;
        self.keep_approval(approval.clone()).await?;
        Ok(approval)
    }

    /// Forgets what was decided, longest ago first, until another one fits into the project's share.
    async fn make_room(&self, new: &Approval) -> Result<(), Refusal> {
        let (mut kept, decided) = {
            let all = self.inner.approvals.lock();
            let each = all.values().map(|one| (one.namespace.as_str(), one.bytes()));
            let kept = self.share(&new.namespace, each) + new.bytes();
            if kept <= shares::APPROVALS {
                return Ok(());
            }
            let mut decided: Vec<_> = all
                .values()
                .filter(|one| {
                    one.told
                        && self
                            .inner
                            .namespaces
                            .are_neighbours(&new.namespace, &one.namespace)
                })
                .filter_map(|one| {
                    Some((
                        one.decision.as_ref()?.at,
                        one.id.clone(),
                        one.namespace.clone(),
                        one.bytes(),
                    ))
                })
                .collect();
            decided.sort_unstable();
            (kept, decided)
        };
        for (_, id, namespace, bytes) in decided {
            if kept <= shares::APPROVALS {
                break;
            }
            self.drop_approval(namespace, id).await?;
            kept -= bytes;
        }
        shares::check_share("approvals", kept, shares::APPROVALS)
    }

    /// Those of a project, oldest first, or those that wait: a page of them behind a cursor, and the cursor of the next.
    pub fn approvals(
        &self,
        project: &str,
        with_decided: bool,
        cursor: Option<&str>,
        limit: usize,
    ) -> Result<(Vec<Approval>, Option<String>), Refusal> {
        let behind = cursor.map(read_cursor).transpose()?;
        let mut own: HashMap<String, bool> = HashMap::new();
        let all = self.inner.approvals.lock();
        let mut places: Vec<(Nanos, &str)> = all
            .values()
            .filter(|approval| with_decided || approval.decision.is_none())
            .filter(|approval| match own.get(&approval.namespace) {
                Some(own) => *own,
                None => {
                    let is_own = self.check_project(project, &approval.namespace).is_ok();
                    own.insert(approval.namespace.clone(), is_own);
                    is_own
                }
            })
            .map(Approval::place)
            .filter(|(at, id)| {
                behind
                    .as_ref()
                    .is_none_or(|(last, last_id)| (at, *id) > (last, last_id.as_str()))
            })
            .collect();
        places.sort_unstable();
        let limit = limit.clamp(1, PAGE);
        let (mut found, mut bytes): (Vec<Approval>, usize) = (Vec::new(), 0);
        for (_, id) in &places {
            let Some(approval) = all.get(*id) else { continue };
            bytes += approval.bytes();
            if found.len() >= limit || (bytes > PAGE_BYTES && !found.is_empty()) {
                break;
            }
            found.push(approval.clone());
        }
        let next = found.last().filter(|_| found.len() < places.len());
        let next = next.map(|last| format!("{}.{}", last.asked_at, last.id));
        Ok((found, next))
    }

    pub fn approval(&self, project: &str, id: &str) -> Result<Approval, Refusal> {
        let found = self.inner.approvals.lock().get(id).cloned();
        found
            .filter(|approval| self.check_project(project, &approval.namespace).is_ok())
            .ok_or_else(|| Refusal::NotFound(format!("there is no approval {id}")))
    }

    /// Grants or denies, once and for all.
    pub async fn decide_approval(
        &self,
        project: &str,
        id: &str,
        verdict: Verdict,
    ) -> Result<Approval, Refusal> {
        let said = verdict.by.len() + verdict.note.len();
        if said > MOST_NOTE {
            return Err(Refusal::InvalidArgument(format!(
                "the note and the name have {said} bytes, and may have {MOST_NOTE}"
            )));
        }
        let changing = self.inner.approvals.changing.lock().await;
        let mut approval = self.approval(project, id)?;
        if let Some(decision) = &approval.decision {
            let word = if decision.granted { "granted" } else { "denied" };
            return Err(Refusal::FailedPrecondition(format!(
                "approval {id} was {word} already, by {}",
                decision.by
            )));
        }
        let now = self.now();
        if now >= approval.deadline {
            return Err(Refusal::FailedPrecondition(format!(
                "the time for approval {id} is up, which means no"
            )));
        }
        if verdict.digest != approval.digest {
            return Err(Refusal::InvalidArgument(format!(
                "approval {id} is about an action with the digest {}, not {}",
                approval.digest, verdict.digest
            )));
        }
        approval.decision = Some(Decision {
            granted: verdict.granted,
            by: verdict.by,
            key: verdict.key,
            note: verdict.note,
            at: now,
        });
        self.keep_approval(approval.clone()).await?;
        drop(changing);
        self.inner.approvals.decided.notify_one();
        Ok(approval)
    }

    /// Takes what was granted for one activity of the run that asked, and for that action alone. The same activity may take it
    /// again, when it is tried again.
    pub async fn use_approval(
        &self,
        project: &str,
        id: &str,
        step: &Step,
        action: &Value,
    ) -> Result<(), Refusal> {
        let _changing = self.inner.approvals.changing.lock().await;
        let mut approval = self.approval(project, id)?;
        let refuse = |why: String| Err(Refusal::FailedPrecondition(why));
        if approval.namespace != step.namespace || approval.run_id != step.run_id {
            return refuse(format!("{id} was given to another run"));
        }
        if !approval
            .decision
            .as_ref()
            .is_some_and(|decision| decision.granted)
        {
            return refuse(format!("{id} was not granted"));
        }
        let asked = digest(action);
        if asked != approval.digest {
            return refuse(format!(
                "{id} was granted for another action: that has the digest {}, this has {asked}",
                approval.digest
            ));
        }
        match approval.used_by.as_deref() {
            Some(_) if approval.used_by_event == step.scheduled_id && step.scheduled_id != 0 => Ok(()),
            Some(user) => refuse(format!("{id} was used by the activity {user} already; ask again")),
            None => {
                approval.used_by = Some(step.activity_id.clone());
                approval.used_by_event = step.scheduled_id;
                self.keep_approval(approval).await
            }
        }
    }

    /// Writes it down, then remembers it.
    async fn keep_approval(&self, approval: Approval) -> Result<(), Refusal> {
        let _inside = self.inner.namespaces.enter(&approval.namespace)?;
        let body = serde_json::to_vec(&approval)
            .map_err(|error| Refusal::Internal(format!("an approval cannot be written: {error}")))?;
        let item = WorkflowItem {
            namespace: approval.namespace.clone(),
            id: approval.id.clone(),
            body,
        };
        let written = self.inner.store.put_workflow_item(KIND, item).await;
        written.map_err(unavailable)?;
        self.inner.approvals.lock().insert(approval.id.clone(), approval);
        Ok(())
    }

    /// Tells workflows what was decided, and decides where nobody does. What was decided does not wait behind what was not,
    /// of which others may have asked a lot; and of that, only some is looked at in each round: it takes the workflow.
    pub(crate) async fn keep_approvals(self) {
        let mut behind = String::new();
        loop {
            tokio::select! {
                () = self.inner.stop.cancelled() => return,
                () = self.inner.approvals.decided.notified() => {}
                () = tokio::time::sleep(ROUND) => {}
            }
            let (pressing, open) = self.inner.approvals.to_look_after(self.now(), &behind);
            behind = open.last().cloned().unwrap_or_default();
            for id in pressing.into_iter().chain(open) {
                let Some(approval) = self.inner.approvals.lock().get(&id).cloned() else {
                    continue;
                };
                match self.look_after(approval).await {
                    // Between two attempts there is nobody to tell; it is told when it asks again.
                    Ok(()) | Err(Refusal::NotFound(_)) => {}
                    // It goes with its namespace.
                    Err(Refusal::NamespaceNotFound(_) | Refusal::NamespaceDeleting(_)) => {}
                    Err(error) => {
                        tracing::warn!(id, %error, "an approval could not be looked after; trying again");
                    }
                }
            }
            if self.inner.stop.is_cancelled() {
                return;
            }
        }
    }

    async fn look_after(&self, approval: Approval) -> Result<(), Refusal> {
        let kept = i64::try_from(KEPT.as_nanos()).unwrap_or(i64::MAX);
        match &approval.decision {
            Some(decision) if approval.told => {
                if self.now().saturating_sub(decision.at) > kept {
                    return self.forget_approval(approval).await;
                }
                Ok(())
            }
            Some(decision) => {
                self.tell(&approval, decision).await?;
                self.change_approval(&approval.id, |approval| approval.told = true)
                    .await
            }
            None if self.now() >= approval.deadline => {
                self.decide_for(&approval.id, "the time limit", false).await
            }
            None => match self.stance(&approval).await? {
                Stance::Waits(_) => Ok(()),
                Stance::TakesBack(_) => {
                    self.decide_for(&approval.id, "the workflow, which took it back", false)
                        .await
                }
                Stance::Gone => {
                    self.decide_for(&approval.id, "the workflow, which went on", true)
                        .await
                }
            },
        }
    }

    /// A no that no person said.
    async fn decide_for(&self, id: &str, by: &str, told: bool) -> Result<(), Refusal> {
        let now = self.now();
        self.change_approval(id, |approval| {
            // A person may have been quicker.
            if approval.decision.is_none() {
                approval.told = told;
                approval.decision = Some(Decision {
                    granted: false,
                    by: by.to_owned(),
                    key: None,
                    note: String::new(),
                    at: now,
                });
            }
        })
        .await?;
        self.inner.approvals.decided.notify_one();
        Ok(())
    }

    async fn change_approval(&self, id: &str, change: impl FnOnce(&mut Approval)) -> Result<(), Refusal> {
        let _changing = self.inner.approvals.changing.lock().await;
        let Some(mut approval) = self.inner.approvals.lock().get(id).cloned() else {
            return Ok(());
        };
        change(&mut approval);
        self.keep_approval(approval).await
    }

    async fn forget_approval(&self, approval: Approval) -> Result<(), Refusal> {
        let _changing = self.inner.approvals.changing.lock().await;
        self.drop_approval(approval.namespace, approval.id).await
    }

    /// Whoever calls this is changing them.
    async fn drop_approval(&self, namespace: String, id: String) -> Result<(), Refusal> {
        let deleted = self
            .inner
            .store
            .delete_workflow_item(KIND, namespace, id.clone())
            .await;
        deleted.map_err(unavailable)?;
        self.inner.approvals.lock().remove(&id);
        Ok(())
    }

    /// Whether the activity that asked still waits.
    async fn stance(&self, approval: &Approval) -> Result<Stance, Refusal> {
        let key = Key::new(&approval.namespace, &approval.workflow_id);
        let seen = self
            .see(&key, &approval.run_id, |slot| {
                let asked = slot.run.state.activities.values().find(|activity| {
                    if approval.scheduled_id == 0 {
                        activity.activity_id == approval.activity_id
                    } else {
                        activity.scheduled_id == approval.scheduled_id
                    }
                });
                Ok(asked.map(|activity| {
                    let token = TaskToken {
                        namespace: approval.namespace.clone(),
                        workflow_id: approval.workflow_id.clone(),
                        run_id: approval.run_id.clone(),
                        scheduled_id: activity.scheduled_id,
                        attempt: activity.attempt,
                        stamp: activity.stamp,
                        activity_id: activity.activity_id.clone(),
                        ..Default::default()
                    };
                    (token, activity.cancel_requested_id != 0)
                }))
            })
            .await;
        match seen {
            Ok(Some((token, true))) => Ok(Stance::TakesBack(token)),
            Ok(Some((token, false))) => Ok(Stance::Waits(token)),
            Ok(None) | Err(Refusal::NotFound(_) | Refusal::NamespaceNotFound(_)) => Ok(Stance::Gone),
            Err(error) => Err(error),
        }
    }

    /// Answers the activity that asked, and none that has its id by now. One that is between two attempts is told when it
    /// asks again.
    async fn tell(&self, approval: &Approval, decision: &Decision) -> Result<(), Refusal> {
        let (token, finish) = match self.stance(approval).await? {
            Stance::Gone => return Ok(()),
            Stance::TakesBack(token) => (token, ActivityFinish::Canceled(None)),
            Stance::Waits(token) if decision.granted => {
                let result = steps::json(approval.granted_result(decision));
                (token, ActivityFinish::Completed(Some(result)))
            }
            Stance::Waits(token) => {
                let failure = steps::failure(DENIED.to_owned(), approval.denied_message(decision), false);
                let finish = ActivityFinish::Failed {
                    failure,
                    heartbeat: None,
                };
                (token, finish)
            }
        };
        self.finish_activity(token, finish, IDENTITY.to_owned(), Speaker::Server)
            .await
    }
}

/// What a workflow's activity fails with when the answer is no: whoever forgets to look cannot go on.
pub const DENIED: &str = "ApprovalDenied";

impl Approval {
    /// What the workflow gets when the answer is yes: a JSON text.
    pub fn granted_result(&self, decision: &Decision) -> Vec<u8> {
        let result = json!({
            "approval": self.id,
            "digest": self.digest,
            "by": decision.by,
            "key": decision.key,
            "note": decision.note,
        });
        result.to_string().into_bytes()
    }

    pub fn denied_message(&self, decision: &Decision) -> String {
        let mut message = format!("{} was denied by {}", self.id, decision.by);
        if !decision.note.is_empty() {
            message.push_str(": ");
            message.push_str(&decision.note);
        }
        message
    }
}

/// What the activity does that asked, and how it is answered.
enum Stance {
    Waits(TaskToken),
    TakesBack(TaskToken),
    Gone,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_depends_on_what_is_said_and_not_on_how() {
        let one: Value = serde_json::from_str(r#"{"b": [1, {"y": "é", "x": null}], "a": true}"#).unwrap();
        let same: Value = serde_json::from_str(r#"{"a":true,"b":[1,{"x":null,"y":"\u00e9"}]}"#).unwrap();
        let other: Value = serde_json::from_str(r#"{"a":true,"b":[1,{"x":null,"y":"e"}]}"#).unwrap();
        assert_eq!(digest(&one), digest(&same));
        assert_ne!(digest(&one), digest(&other));
        assert_eq!(
            digest(&json!({})),
            "sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
        );
    }
}
