//! What a project keeps in everybody's memory, counted in bytes: numbers of things say nothing about how large they are.

use std::collections::HashMap;

use atoll_workflow_core::Refusal;

use crate::Engine;

/// What anything that is kept costs, however small it is.
pub(crate) const LEAST: usize = 1024;

/// What a project may keep of all its schedules.
pub(crate) const SCHEDULES: usize = 64 * 1024 * 1024;
/// The same for its batches.
pub(crate) const BATCHES: usize = 32 * 1024 * 1024;
/// The same for its approvals.
pub(crate) const APPROVALS: usize = 32 * 1024 * 1024;

impl Engine {
    /// What belongs to the project of a namespace, of things that are named by their namespaces.
    pub(crate) fn share<'a>(
        &self,
        namespace: &str,
        things: impl IntoIterator<Item = (&'a str, usize)>,
    ) -> usize {
        let mut ours: HashMap<&str, bool> = HashMap::new();
        things
            .into_iter()
            .filter(|(other, _)| {
                *ours
                    .entry(other)
                    .or_insert_with(|| self.inner.namespaces.are_neighbours(namespace, other))
            })
            .fold(0, |total, (_, bytes)| total.saturating_add(bytes))
    }
}

/// Refuses more than a share.
pub(crate) fn check_share(what: &str, bytes: usize, most: usize) -> Result<(), Refusal> {
    if bytes > most {
        return Err(Refusal::ResourceExhausted(format!(
            "the {what} of this project would have {bytes} bytes, and may have {most}: delete some, or say less in each"
        )));
    }
    Ok(())
}
