//! Namespaces: worlds of workflows that do not see each other, each with what its workflows may be searched by.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;

use atoll_store::{Store, WorkflowItem};
use atoll_workflow_core::{Nanos, Refusal};
use prost::Message as _;
use temporalio_protos::temporal::api::common::v1::SearchAttributes;
use temporalio_protos::temporal::api::enums::v1::IndexedValueType as Type;

use crate::{Engine, Options, fresh_id, unavailable};

const KIND: &str = "namespace";
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
}

#[derive(Debug, Default)]
pub(crate) struct Namespaces {
    all: RwLock<BTreeMap<String, Namespace>>,
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
    pub(crate) async fn load(store: &Store, options: &Options) -> Result<Self, Refusal> {
        let mut all = BTreeMap::new();
        for item in store.workflow_items(KIND).await.map_err(unavailable)? {
            let namespace = Namespace::decode(item.body.as_slice())
                .map_err(|_| Refusal::Internal(format!("namespace {} cannot be read", item.id)))?;
            all.insert(item.id, namespace);
        }
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
        Ok(Self {
            all: RwLock::new(all),
        })
    }

    fn read(&self) -> RwLockReadGuard<'_, BTreeMap<String, Namespace>> {
        self.all.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn check(&self, name: &str) -> Result<(), Refusal> {
        if name.is_empty() {
            return Err(Refusal::InvalidArgument(
                "Namespace not set on request.".to_owned(),
            ));
        }
        if self.read().contains_key(name) {
            Ok(())
        } else {
            Err(Refusal::NamespaceNotFound(name.to_owned()))
        }
    }

    /// Whether workflows of the one may reach those of the other.
    pub(crate) fn are_neighbours(&self, one: &str, other: &str) -> bool {
        let all = self.read();
        let project = |name| all.get(name).map(|namespace: &Namespace| &namespace.project);
        one == other || project(one).is_some_and(|own| project(other) == Some(own))
    }

    pub(crate) fn retentions(&self) -> Vec<(String, Nanos)> {
        self.read()
            .values()
            .map(|namespace| (namespace.name.clone(), namespace.retention))
            .collect()
    }

    /// What an attribute's values are, if the namespace knows it.
    pub(crate) fn attribute(&self, namespace: &str, name: &str) -> Option<Type> {
        if let Some((_, kind)) = SYSTEM.iter().find(|(known, _)| *known == name) {
            return Some(*kind);
        }
        let kind = *self.read().get(namespace)?.attributes.get(name)?;
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

async fn save(store: &Store, namespace: &Namespace) -> Result<(), Refusal> {
    let item = WorkflowItem {
        namespace: String::new(),
        id: namespace.name.clone(),
        body: namespace.encode_to_vec(),
    };
    store.put_workflow_item(KIND, item).await.map_err(unavailable)
}

impl Engine {
    /// Those who have namespaces.
    pub fn projects(&self) -> BTreeSet<String> {
        let all = self.inner.namespaces.read();
        let mut projects = BTreeSet::new();
        for namespace in all.values() {
            if !projects.contains(&namespace.project) {
                projects.insert(namespace.project.clone());
            }
        }
        projects
    }

    pub fn namespaces(&self) -> Vec<Namespace> {
        self.inner.namespaces.read().values().cloned().collect()
    }

    /// By name, or by id.
    pub fn namespace(&self, name: &str, id: &str) -> Result<Namespace, Refusal> {
        if name.is_empty() && id.is_empty() {
            return Err(Refusal::InvalidArgument(
                "Namespace not set on request.".to_owned(),
            ));
        }
        let all = self.inner.namespaces.read();
        let found = if name.is_empty() {
            all.values().find(|namespace| namespace.id == id)
        } else {
            all.get(name)
        };
        found
            .cloned()
            .ok_or_else(|| Refusal::NamespaceNotFound(if name.is_empty() { id } else { name }.to_owned()))
    }

    pub async fn register_namespace(&self, namespace: Namespace) -> Result<(), Refusal> {
        if namespace.name.is_empty() {
            return Err(Refusal::InvalidArgument(
                "Namespace not set on request.".to_owned(),
            ));
        }
        check_retention(namespace.retention)?;
        self.inner.options.limits.check_id("Namespace", &namespace.name)?;
        {
            let all = self.inner.namespaces.read();
            if all.contains_key(&namespace.name) {
                return Err(Refusal::NamespaceExists(namespace.name));
            }
            let own = all.values().filter(|other| other.project == namespace.project);
            if own.count() >= MOST {
                return Err(Refusal::ResourceExhausted(format!(
                    "this project has {MOST} namespaces, and may have no more: delete some"
                )));
            }
        }
        let namespace = Namespace {
            id: fresh_id(),
            ..namespace
        };
        self.put_namespace(namespace).await
    }

    /// Changes a namespace, all or nothing.
    pub async fn change_namespace(
        &self,
        name: &str,
        change: impl FnOnce(&mut Namespace) -> Result<(), Refusal> + Send,
    ) -> Result<Namespace, Refusal> {
        let mut namespace = self.namespace(name, "")?;
        let before = namespace.clone();
        change(&mut namespace)?;
        if namespace.retention != before.retention {
            check_retention(namespace.retention)?;
        }
        self.put_namespace(namespace.clone()).await?;
        Ok(namespace)
    }

    async fn put_namespace(&self, namespace: Namespace) -> Result<(), Refusal> {
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
        save(&self.inner.store, &namespace).await?;
        let mut all = self
            .inner
            .namespaces
            .all
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        all.insert(namespace.name.clone(), namespace);
        Ok(())
    }

    /// Forgets a namespace that has no open workflows; its closed runs go with it.
    pub async fn delete_namespace(&self, name: &str) -> Result<(), Refusal> {
        self.inner.namespaces.check(name)?;
        let open = self.inner.store.open_workflow_runs().await.map_err(unavailable)?;
        if open.iter().any(|run| run.namespace == name) {
            return Err(Refusal::FailedPrecondition(format!(
                "namespace {name} has open workflows: terminate them first"
            )));
        }
        self.inner
            .store
            .delete_workflow_item(KIND, String::new(), name.to_owned())
            .await
            .map_err(unavailable)?;
        self.inner
            .namespaces
            .all
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(name);
        loop {
            let closed = self
                .inner
                .store
                .expired_workflow_runs(name.to_owned(), i64::MAX, 500)
                .await
                .map_err(unavailable)?;
            if closed.is_empty() {
                return Ok(());
            }
            for (_, run_id) in closed {
                self.inner
                    .store
                    .delete_workflow_run(run_id)
                    .await
                    .map_err(unavailable)?;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
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
