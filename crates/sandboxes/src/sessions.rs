//! The instances that a sandbox has had: each time that it ran.

use atoll_store::{InstanceQuery, InstanceRow};
use atoll_types::{Fault, SandboxId};

use crate::faults::from_store;
use crate::{Caller, Page, Sandboxes};

impl Sandboxes {
    /// Newest first. Like facts, they outlast the sandbox's own record; of one that never was there are none.
    pub async fn instances(
        &self,
        caller: &Caller,
        sandbox: &SandboxId,
        cursor: Option<String>,
        limit: usize,
    ) -> Result<Page<InstanceRow>, Fault> {
        let query = InstanceQuery {
            project: caller.project().clone(),
            sandbox: sandbox.clone(),
            after: crate::parse_cursor(cursor)?,
            limit,
        };
        let page = self
            .store()
            .sandboxes
            .instances(query)
            .await
            .map_err(|e| from_store(&e))?;
        Ok(Page {
            items: page.items,
            next: page.next.map(|cursor| cursor.to_string()),
        })
    }
}
