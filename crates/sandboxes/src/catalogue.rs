//! The catalogue of templates: read in parts, and changed by a few of each project at a time.
//!
//! What must hold: what is read of it at once is bounded, or of a few bytes for each template, and whoever asks knows how much it
//! is before. Changes wait for a lock of the whole store in threads that all other work with files needs, too, so those of a
//! project wait for their turn before, without a thread; and one whose caller has gone away has its turn until it is over.

use atoll_image::Templates;
use atoll_node::{Template, on_templates};
use atoll_turns::Turns;
use atoll_types::{Cursor, Fault, Page, ProjectId, TemplateId};

use crate::{Caller, Sandboxes};

/// Changes that wait for the lock: of a project, and of all.
const OF_A_PROJECT: usize = 2;
const AT_ONCE: usize = 32;
/// What the manifests of a page have at most, unless it is of one.
const PAGE_BYTES: u64 = 512 * 1024;

pub(crate) fn turns() -> Turns<ProjectId> {
    Turns::new(OF_A_PROJECT, AT_ONCE)
}

/// Changes the catalogue.
pub(crate) async fn change<T: Send + 'static>(
    turns: &Turns<ProjectId>,
    project: &ProjectId,
    work: impl FnOnce() -> atoll_image::Result<T> + Send + 'static,
) -> Result<T, Fault> {
    let turn = turns.take(project).await;
    on_templates(move || {
        let _until_it_is_over = turn;
        work()
    })
    .await
}

impl Sandboxes {
    pub(crate) fn templates_of(&self, project: &ProjectId) -> Templates {
        self.inner.templates.of(project)
    }

    /// Which templates the caller may use, newest first, and how many bytes their descriptions have.
    pub async fn template_page(
        &self,
        caller: &Caller,
        after: Option<Cursor>,
        limit: usize,
    ) -> Result<(Page<TemplateId>, u64), Fault> {
        let templates = self.templates_of(caller.project());
        on_templates(move || templates.page(after.as_ref(), limit, PAGE_BYTES)).await
    }

    /// What is wanted of these, or of all that the caller may use, newest first: one after the other, so `T` is to be small, or
    /// paid for. The first refusal is the answer.
    pub async fn gather_templates<T: Send + 'static>(
        &self,
        caller: &Caller,
        ids: Option<Vec<TemplateId>>,
        mut pick: impl FnMut(Template) -> Result<Option<T>, Fault> + Send + 'static,
    ) -> Result<Vec<T>, Fault> {
        let templates = self.templates_of(caller.project());
        let picked = on_templates(move || {
            let mut refused = None;
            let picked = templates.gather(ids, |listed| match refused {
                None => pick(listed.into()).unwrap_or_else(|fault| {
                    refused = Some(fault);
                    None
                }),
                Some(_) => None,
            });
            Ok(refused.map_or(Ok(picked?), Err))
        });
        picked.await?
    }

    /// For what changes the catalogue in the name of a project.
    pub(crate) async fn change_templates<T: Send + 'static>(
        &self,
        project: &ProjectId,
        work: impl FnOnce() -> atoll_image::Result<T> + Send + 'static,
    ) -> Result<T, Fault> {
        change(&self.inner.template_turns, project, work).await
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, mpsc};
    use std::time::Duration;

    use parking_lot::Mutex;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    /// One project's changes wait for the store's lock, and their callers have gone away.
    #[test]
    fn changes_that_wait_for_the_lock_leave_threads_to_others() {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .max_blocking_threads(OF_A_PROJECT + 1)
            .enable_time()
            .build()
            .unwrap();
        runtime.block_on(async {
            let turns = Arc::new(turns());
            let [one, other] = [1, 2].map(|n| ProjectId::from_entropy([n; 20]));
            let (lock, locked) = mpsc::channel::<()>();
            let locked = Arc::new(Mutex::new(locked));
            let (waits, mut waiting) = tokio::sync::mpsc::unbounded_channel();
            let mut callers = Vec::new();
            for _ in 0..20 {
                let (turns, one) = (Arc::clone(&turns), one.clone());
                let (locked, waits) = (Arc::clone(&locked), waits.clone());
                callers.push(tokio::spawn(async move {
                    let waited = change(&turns, &one, move || {
                        let _ = waits.send(());
                        let _ = locked.lock().recv();
                        Ok(())
                    });
                    waited.await
                }));
            }
            // As many wait as may; then all callers hang up.
            for _ in 0..OF_A_PROJECT {
                waiting.recv().await.unwrap();
            }
            for caller in callers {
                caller.abort();
                let _ = caller.await;
            }
            let others = tokio::time::timeout(LONG, change(&turns, &other, || Ok(7))).await;
            let own = tokio::time::timeout(Duration::from_millis(10), turns.take(&one)).await;
            drop(lock);
            assert!(matches!(others, Ok(Ok(7))), "no thread is left");
            assert!(own.is_err(), "the turns are held until the changes are over");
            tokio::time::timeout(LONG, change(&turns, &one, || Ok(())))
                .await
                .unwrap()
                .unwrap();
        });
    }
}
