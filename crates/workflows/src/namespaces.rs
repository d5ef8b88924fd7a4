//! Namespaces: worlds of workflows that do not see each other, each with what its workflows may be searched by.
//!
//! A name is used again, by another project perhaps. What must hold:
//! - Of those who ask for a name at once, one gets it: the store says who, and memory follows in the order of the commits.
//! - Whoever does something in a namespace holds it ([`Hold`]) from the moment its name was looked up until all of it is done,
//!   so that a name means the same namespace all the while. Who waits for something lets go when the namespace ends.
//! - A name is free when nobody holds the namespace and nothing is left of it (see `removal`).

use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use atoll_store::{WorkflowItem, WorkflowStore};
use atoll_workflow_core::{Nanos, Refusal};
use prost::Message as _;
use temporalio_protos::temporal::api::common::v1::SearchAttributes;
use temporalio_protos::temporal::api::enums::v1::IndexedValueType as Type;

use tokio::sync::OwnedRwLockReadGuard;
use tokio_util::sync::CancellationToken;

use crate::cells::finish;
use crate::shares::Kept;
use crate::{Engine, Options, fresh_id, removal, unavailable};

pub(crate) const KIND: &str = "namespace";
/// How many a project may have, and what each may hold: all of them are in memory, and looked through often.
const MOST: usize = 1_000;
const MOST_BYTES: usize = 64 * 1024;
/// The same for what it says of itself in words.
const MOST_SAID: usize = 8 * 1024;
const DAY: Nanos = 24 * 3600 * 1_000_000_000;
const HOUR: Nanos = 3600 * 1_000_000_000;

#[derive(Clone, PartialEq, ::prost::Message)]
pub struct Namespace {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, tag = "2")]
    pub id: String,
    #[prost(string, tag = "3")]
    pub description: String,
    #[prost(string, tag = "4")]
    pub owner: String,
    #[prost(btree_map = "string, string", tag = "5")]
    pub data: BTreeMap<String, String>,
    /// How long closed runs are kept, in nanoseconds.
    #[prost(int64, tag = "6")]
    pub retention: i64,
    /// What workflows may be searched by, beside what every workflow has; numbered as on the wire.
    #[prost(btree_map = "string, int32", tag = "7")]
    pub attributes: BTreeMap<String, i32>,
    /// To whom it belongs. Its workflows reach those of other namespaces of the same project only.
    #[prost(string, tag = "8")]
    pub project: String,
    /// Nothing is done in it any more, and what is left of it is being deleted. The name is still taken.
    #[prost(bool, tag = "9")]
    pub deleting: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Namespaces {
    all: RwLock<BTreeMap<String, Known>>,
    /// Held by who registers, changes or ends a namespace, from decision to disk to memory.
    pub(crate) changing: Arc<tokio::sync::Mutex<()>>,
}

#[derive(Debug)]
pub(crate) struct Known {
    pub(crate) namespace: Namespace,
    /// Of all namespaces of its project together.
    pub(crate) kept: Arc<Kept>,
    pub(crate) gate: Gate,
}

/// By which one comes into a namespace.
#[derive(Debug, Clone, Default)]
pub(crate) struct Gate {
    /// Read by who is inside; written by who waits for all to have left.
    pub(crate) inside: Arc<tokio::sync::RwLock<()>>,
    /// Asks those inside to leave. From then on nobody comes in.
    pub(crate) end: CancellationToken,
}

/// The right to act in a namespace. It does not end before this is dropped.
#[derive(Debug)]
pub(crate) struct Hold {
    end: CancellationToken,
    kept: Arc<Kept>,
    _inside: OwnedRwLockReadGuard<()>,
}

impl Hold {
    /// Until the namespace is about to end: who waits does so no longer than this.
    pub(crate) async fn ending(&self) {
        self.end.cancelled().await;
    }

    /// What the namespace's project keeps.
    pub(crate) fn kept(&self) -> &Kept {
        &self.kept
    }
}

#[cfg(test)]
impl Hold {
    /// For what needs to be in some namespace, and it does not matter which.
    pub(crate) fn of_nobody() -> Self {
        let gate = Gate::default();
        Self {
            end: gate.end,
            kept: Arc::default(),
            _inside: gate.inside.try_read_owned().expect("nobody else has it"),
        }
    }
}

impl Known {
    fn new(namespace: Namespace, kept: Arc<Kept>) -> Self {
        Self {
            namespace,
            kept,
            gate: Gate::default(),
        }
    }

    pub(crate) fn is_ending(&self) -> bool {
        self.namespace.deleting || self.gate.end.is_cancelled()
    }

    fn enter(&self) -> Result<Hold, Refusal> {
        let refused = || Refusal::NamespaceDeleting(self.namespace.name.clone());
        if self.is_ending() {
            return Err(refused());
        }
        let inside = Arc::clone(&self.gate.inside)
            .try_read_owned()
            .map_err(|_| refused())?;
        Ok(Hold {
            end: self.gate.end.clone(),
            kept: Arc::clone(&self.kept),
            _inside: inside,
        })
    }
}

/// What every workflow may be searched by.
pub(crate) const SYSTEM: [(&str, Type); 24] = [
    ("WorkflowId", Type::Keyword),
    ("RunId", Type::Keyword),
    ("WorkflowType", Type::Keyword),
    ("StartTime", Type::Datetime),
    ("ExecutionTime", Type::Datetime),
    ("CloseTime", Type::Datetime),
    ("ExecutionStatus", Type::Keyword),
    ("TaskQueue", Type::Keyword),
    ("HistoryLength", Type::Int),
    ("HistorySizeBytes", Type::Int),
    ("ExecutionDuration", Type::Int),
    ("StateTransitionCount", Type::Int),
    ("ParentWorkflowId", Type::Keyword),
    ("ParentRunId", Type::Keyword),
    ("RootWorkflowId", Type::Keyword),
    ("RootRunId", Type::Keyword),
    ("BuildIds", Type::KeywordList),
    ("BatcherNamespace", Type::Keyword),
    ("BatcherUser", Type::Keyword),
    ("BinaryChecksums", Type::KeywordList),
    ("TemporalChangeVersion", Type::KeywordList),
    ("TemporalScheduledById", Type::Keyword),
    ("TemporalScheduledStartTime", Type::Datetime),
    ("TemporalSchedulePaused", Type::Bool),
];

impl Namespaces {
    pub(crate) async fn load(store: &dyn WorkflowStore, options: &Options) -> Result<Self, Refusal> {
        let mut all = BTreeMap::new();
        for item in store.workflow_items(KIND).await.map_err(unavailable)? {
            let namespace = Namespace::decode(item.body.as_slice())
                .map_err(|_| Refusal::Internal(format!("namespace {} cannot be read", item.id)))?;
            all.insert(item.id, namespace);
        }
        removal::finish_removals(store, &mut all).await?;
        for name in &options.namespaces {
            if !all.contains_key(name) {
                let namespace = Namespace {
                    name: name.clone(),
                    id: fresh_id(),
                    project: options.project.clone(),
                    retention: i64::try_from(options.retention.as_nanos()).unwrap_or(DAY),
                    ..Default::default()
                };
                save(store, &namespace).await?;
                all.insert(name.clone(), namespace);
            }
        }
        let mut bytes: HashMap<_, _> = store
            .workflow_bytes()
            .await
            .map_err(unavailable)?
            .into_iter()
            .collect();
        let mut by_project: HashMap<String, Arc<Kept>> = HashMap::new();
        let known = all.into_iter().map(|(name, namespace)| {
            let kept = by_project.entry(namespace.project.clone()).or_default();
            kept.add(bytes.remove(&name).unwrap_or(0));
            let known = Known::new(namespace, Arc::clone(kept));
            (name, known)
        });
        Ok(Self {
            all: RwLock::new(known.collect()),
            changing: Arc::default(),
        })
    }

    fn read(&self) -> RwLockReadGuard<'_, BTreeMap<String, Known>> {
        self.all.read()
    }

    pub(crate) fn write(&self) -> RwLockWriteGuard<'_, BTreeMap<String, Known>> {
        self.all.write()
    }

    /// The namespace that has this name now, for as long as the answer is held.
    pub(crate) fn enter(&self, name: &str) -> Result<Hold, Refusal> {
        if name.is_empty() {
            return Err(unnamed());
        }
        let all = self.read();
        let known = all.get(name).ok_or_else(|| missing(name))?;
        known.enter()
    }

    /// The same, if it is still the one with this id.
    pub(crate) fn enter_as(&self, name: &str, id: &str) -> Result<Hold, Refusal> {
        let all = self.read();
        let known = all.get(name).filter(|known| known.namespace.id == id);
        known.ok_or_else(|| missing(name))?.enter()
    }

    /// The same, if workflows of the one may reach those of the other. The caller holds the one.
    pub(crate) fn enter_beside(&self, one: &str, other: &str) -> Result<Hold, Refusal> {
        let all = self.read();
        let project = |name| all.get(name).map(|known: &Known| &known.namespace.project);
        if one != other && project(one).is_none_or(|own| project(other) != Some(own)) {
            return Err(missing(other));
        }
        all.get(other).ok_or_else(|| missing(other))?.enter()
    }

    /// Whether workflows of the one may reach those of the other.
    pub(crate) fn are_neighbours(&self, one: &str, other: &str) -> bool {
        let all = self.read();
        let project = |name: &str| all.get(name).map(|known| &known.namespace.project);
        one == other || project(one).is_some_and(|own| project(other) == Some(own))
    }

    pub(crate) fn retentions(&self) -> Vec<(String, Nanos)> {
        self.read()
            .values()
            .map(|known| (known.namespace.name.clone(), known.namespace.retention))
            .collect()
    }

    /// What the project of a namespace keeps.
    pub(crate) fn kept(&self, name: &str) -> Arc<Kept> {
        let all = self.read();
        all.get(name)
            .map_or_else(Arc::default, |known| Arc::clone(&known.kept))
    }

    /// Remembers what was written.
    fn keep(&self, namespace: Namespace) {
        let mut all = self.write();
        match all.get_mut(&namespace.name) {
            Some(known) => known.namespace = namespace,
            None => {
                let neighbour = all
                    .values()
                    .find(|known| known.namespace.project == namespace.project);
                let kept = neighbour.map_or_else(Arc::default, |known| Arc::clone(&known.kept));
                all.insert(namespace.name.clone(), Known::new(namespace, kept));
            }
        }
    }

    /// What an attribute's values are, if the namespace knows it.
    pub(crate) fn attribute(&self, namespace: &str, name: &str) -> Option<Type> {
        if let Some((_, kind)) = SYSTEM.iter().find(|(known, _)| *known == name) {
            return Some(*kind);
        }
        let kind = *self.read().get(namespace)?.namespace.attributes.get(name)?;
        Type::try_from(kind).ok()
    }

    /// The same attributes, each with its type beside its value; refused if one is not known.
    pub(crate) fn typed(
        &self,
        namespace: &str,
        attributes: Option<SearchAttributes>,
    ) -> Result<Option<SearchAttributes>, Refusal> {
        let Some(mut attributes) = attributes else {
            return Ok(None);
        };
        for (name, value) in &mut attributes.indexed_fields {
            let Some(kind) = self.attribute(namespace, name) else {
                return Err(Refusal::InvalidArgument(format!(
                    "Namespace {namespace} has no mapping defined for search attribute {name}"
                )));
            };
            value
                .metadata
                .insert("type".to_owned(), type_name(kind).as_bytes().to_vec());
            crate::visibility::check_value(name, kind, value)?;
        }
        Ok(Some(attributes))
    }
}

fn check_retention(retention: Nanos) -> Result<(), Refusal> {
    if retention < HOUR {
        return Err(Refusal::InvalidArgument(
            "A minimal retention of one hour is needed to keep what has ended long enough to be read."
                .to_owned(),
        ));
    }
    Ok(())
}

pub(crate) fn type_name(kind: Type) -> &'static str {
    match kind {
        Type::Text => "Text",
        Type::Keyword => "Keyword",
        Type::Int => "Int",
        Type::Double => "Double",
        Type::Bool => "Bool",
        Type::Datetime => "Datetime",
        Type::KeywordList => "KeywordList",
        Type::Unspecified => "Unspecified",
    }
}

fn unnamed() -> Refusal {
    Refusal::InvalidArgument("Namespace not set on request.".to_owned())
}

fn missing(name: &str) -> Refusal {
    Refusal::NamespaceNotFound(name.to_owned())
}

fn item(namespace: &Namespace) -> WorkflowItem {
    WorkflowItem {
        namespace: String::new(),
        id: namespace.name.clone(),
        body: namespace.encode_to_vec(),
    }
}

pub(crate) async fn save(store: &dyn WorkflowStore, namespace: &Namespace) -> Result<(), Refusal> {
    let written = store.put_workflow_item(KIND, item(namespace)).await;
    written.map_err(unavailable)
}

fn check_size(namespace: &Namespace) -> Result<(), Refusal> {
    let said = namespace.description.len() + namespace.owner.len();
    let said = namespace
        .data
        .iter()
        .fold(said, |sum, (name, value)| sum + name.len() + value.len());
    if said > MOST_SAID {
        return Err(Refusal::InvalidArgument(format!(
            "the description, owner and data of a namespace would have {said} bytes, and may have {MOST_SAID}"
        )));
    }
    let bytes = namespace.encoded_len();
    if bytes > MOST_BYTES {
        return Err(Refusal::InvalidArgument(format!(
            "what a namespace says of itself, with its search attributes, would have {bytes} bytes, and may have \
             {MOST_BYTES}"
        )));
    }
    Ok(())
}

impl Engine {
    /// Those who have namespaces.
    pub fn projects(&self) -> BTreeSet<String> {
        let all = self.inner.namespaces.read();
        let mut projects = BTreeSet::new();
        for known in all.values() {
            if !projects.contains(&known.namespace.project) {
                projects.insert(known.namespace.project.clone());
            }
        }
        projects
    }

    /// All of them, with those that are being deleted.
    pub fn namespaces(&self) -> Vec<Namespace> {
        let all = self.inner.namespaces.read();
        all.values().map(|known| known.namespace.clone()).collect()
    }

    /// By name, or by id; also one that is being deleted.
    pub fn namespace(&self, name: &str, id: &str) -> Result<Namespace, Refusal> {
        if name.is_empty() && id.is_empty() {
            return Err(unnamed());
        }
        let all = self.inner.namespaces.read();
        let found = if name.is_empty() {
            all.values().find(|known| known.namespace.id == id)
        } else {
            all.get(name)
        };
        found
            .map(|known| known.namespace.clone())
            .ok_or_else(|| missing(if name.is_empty() { id } else { name }))
    }

    pub async fn register_namespace(&self, namespace: Namespace) -> Result<(), Refusal> {
        if namespace.name.is_empty() {
            return Err(unnamed());
        }
        check_retention(namespace.retention)?;
        self.inner.options.limits.check_id("Namespace", &namespace.name)?;
        let namespace = Namespace {
            id: fresh_id(),
            deleting: false,
            ..namespace
        };
        check_size(&namespace)?;
        let engine = self.clone();
        finish(async move {
            let namespaces = &engine.inner.namespaces;
            let _changing = namespaces.changing.lock().await;
            {
                let all = namespaces.read();
                if let Some(known) = all.get(&namespace.name) {
                    let own = known.namespace.project == namespace.project;
                    return Err(if own && known.is_ending() {
                        Refusal::NamespaceDeleting(namespace.name)
                    } else {
                        Refusal::NamespaceExists(namespace.name)
                    });
                }
                let own = all
                    .values()
                    .filter(|other| other.namespace.project == namespace.project);
                if own.count() >= MOST {
                    return Err(Refusal::ResourceExhausted(format!(
                        "this project has {MOST} namespaces, and may have no more: delete some"
                    )));
                }
            }
            let added = engine.inner.store.add_workflow_item(KIND, item(&namespace)).await;
            if !added.map_err(unavailable)? {
                return Err(Refusal::NamespaceExists(namespace.name));
            }
            namespaces.keep(namespace);
            Ok(())
        })
        .await
    }

    /// Changes a namespace, all or nothing.
    pub async fn change_namespace(
        &self,
        name: &str,
        change: impl FnOnce(&mut Namespace) -> Result<(), Refusal> + Send,
    ) -> Result<Namespace, Refusal> {
        let meant = self.namespace(name, "")?;
        let changing = Arc::clone(&self.inner.namespaces.changing).lock_owned().await;
        let mut namespace = {
            let all = self.inner.namespaces.read();
            let known = all.get(name).filter(|known| known.namespace.id == meant.id);
            let known = known.ok_or_else(|| missing(name))?;
            if known.is_ending() {
                return Err(Refusal::NamespaceDeleting(name.to_owned()));
            }
            known.namespace.clone()
        };
        let before = namespace.retention;
        change(&mut namespace)?;
        if namespace.retention != before {
            check_retention(namespace.retention)?;
        }
        check_size(&namespace)?;
        let engine = self.clone();
        finish(async move {
            save(&*engine.inner.store, &namespace).await?;
            engine.inner.namespaces.keep(namespace.clone());
            drop(changing);
            Ok(namespace)
        })
        .await
    }

    /// Adds what workflows of a namespace may be searched by. Adding the same again does nothing.
    pub async fn add_search_attributes(
        &self,
        namespace: &str,
        attributes: impl IntoIterator<Item = (String, i32)> + Send,
    ) -> Result<(), Refusal> {
        let attributes: Vec<_> = attributes.into_iter().collect();
        self.change_namespace(namespace, move |namespace| {
            for (name, kind) in attributes {
                if Type::try_from(kind).is_ok_and(|kind| kind != Type::Unspecified) {
                    if SYSTEM.iter().any(|(known, _)| *known == name) {
                        return Err(Refusal::InvalidArgument(format!(
                            "Search attribute {name} is reserved by system."
                        )));
                    }
                    if namespace
                        .attributes
                        .get(&name)
                        .is_some_and(|known| *known != kind)
                    {
                        return Err(Refusal::AlreadyExists(format!(
                            "Search attribute {name} already exists with another type."
                        )));
                    }
                    namespace.attributes.insert(name, kind);
                } else {
                    return Err(Refusal::InvalidArgument(format!(
                        "Unable to parse search attribute type: {kind}"
                    )));
                }
            }
            Ok(())
        })
        .await?;
        Ok(())
    }
}

/// What every workflow may be searched by, as the wire numbers the types.
pub(crate) fn system_attributes() -> impl Iterator<Item = (String, i32)> {
    SYSTEM
        .into_iter()
        .map(|(name, kind)| (name.to_owned(), i32::from(kind)))
}

impl Engine {
    pub fn system_attributes(&self) -> impl Iterator<Item = (String, i32)> + use<> {
        system_attributes()
    }
}
