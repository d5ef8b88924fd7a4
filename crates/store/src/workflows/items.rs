//! What belongs to a namespace beside its runs, and the namespaces themselves: small things, read when a server starts.

use std::fmt;

use async_trait::async_trait;

use crate::Error;

/// Something small that belongs to a namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkflowItem {
    pub namespace: String,
    pub id: String,
    pub body: Vec<u8>,
}

#[async_trait]
pub trait WorkflowItemStore: fmt::Debug + Send + Sync + 'static {
    /// Only if there is none of that name: `false` if there is.
    async fn add_workflow_item(&self, kind: &'static str, item: WorkflowItem) -> Result<bool, Error>;

    async fn put_workflow_item(&self, kind: &'static str, item: WorkflowItem) -> Result<(), Error>;

    async fn delete_workflow_item(
        &self,
        kind: &'static str,
        namespace: String,
        id: String,
    ) -> Result<(), Error>;

    /// The items of a kind behind one, in order: a page of them, which ends where it is large. An empty one is the last.
    async fn workflow_items_behind(
        &self,
        kind: &'static str,
        behind: Option<&WorkflowItem>,
    ) -> Result<Vec<WorkflowItem>, Error>;

    /// All of them, where they are small.
    async fn workflow_items(&self, kind: &'static str) -> Result<Vec<WorkflowItem>, Error> {
        let mut all: Vec<WorkflowItem> = Vec::new();
        loop {
            let page = self.workflow_items_behind(kind, all.last()).await?;
            if page.is_empty() {
                return Ok(all);
            }
            all.extend(page);
        }
    }
}
