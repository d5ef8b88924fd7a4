//! Secrets that belong to sandboxes rather than to people: made with a request, gone when no sandbox uses them any more.
//!
//! What must hold:
//! - The same value for the same place is the same secret, so that a request which is repeated means the same. Its name
//!   tells nothing about the value to those who have not the server's own key.
//! - Nobody can name one: their names are the server's own.
//! - One that a request still holds, or a sandbox uses, running or at rest, is never collected.

use atoll_types::{Fault, ProjectId, SecretBinding, SecretUse};
use zeroize::Zeroizing;

use crate::faults::from_store;
use crate::secrets::SetSecret;
use crate::{Caller, Sandboxes};

/// What their names begin with.
pub(crate) const PREFIX: &str = "private-";

/// Keeps a secret until a sandbox uses it.
#[derive(Debug)]
pub struct PrivateSecret {
    service: Sandboxes,
    project: ProjectId,
    name: String,
}

impl PrivateSecret {
    pub fn used(&self) -> SecretUse {
        SecretUse {
            secret: self.name.clone(),
            env: None,
        }
    }
}

impl Drop for PrivateSecret {
    fn drop(&mut self) {
        let mut held = self.service.held_secrets();
        let key = (self.project.clone(), std::mem::take(&mut self.name));
        if let Some(count) = held.get_mut(&key) {
            *count -= 1;
            if *count == 0 {
                held.remove(&key);
            }
        }
        drop(held);
        // The request may have failed.
        self.service.inner.garbage.notify_one();
    }
}

impl Sandboxes {
    /// Makes a secret for the sandboxes of one request, or finds the one that is the same.
    pub async fn lend_privately(
        &self,
        caller: &Caller,
        value: Zeroizing<Vec<u8>>,
        binding: SecretBinding,
    ) -> Result<PrivateSecret, Fault> {
        let name = self.private_name(caller.project(), &value, &binding)?;
        // First held, then looked for: what is held is not collected.
        *self
            .held_secrets()
            .entry((caller.project().clone(), name.clone()))
            .or_default() += 1;
        let lent = PrivateSecret {
            service: self.clone(),
            project: caller.project().clone(),
            name: name.clone(),
        };
        let found = {
            let _no_collection = self.inner.secret_lock.lock().await;
            let found = self
                .store()
                .sandboxes
                .secret_by_name(caller.project(), &name)
                .await;
            found.map_err(|e| from_store(&e))?
        };
        if found.is_none() {
            let request = SetSecret {
                name,
                value,
                binding,
                expires_at: None,
            };
            self.put_secret(caller, request).await?;
        }
        Ok(lent)
    }

    fn private_name(
        &self,
        project: &ProjectId,
        value: &[u8],
        binding: &SecretBinding,
    ) -> Result<String, Fault> {
        let place = serde_json::to_vec(binding).map_err(|error| Fault::internal(error.to_string()))?;
        let parts = [project.as_str().as_bytes(), &place, value];
        Ok(format!("{PREFIX}{}", self.identity().name_of_secret(&parts)))
    }

    /// Deletes those that nothing uses.
    pub(crate) async fn collect_private_secrets(&self) -> Result<(), Fault> {
        let rows = self
            .store()
            .sandboxes
            .all_secrets()
            .await
            .map_err(|e| from_store(&e))?;
        for row in rows.iter().filter(|row| row.name.starts_with(PREFIX)) {
            let _one_at_a_time = self.inner.secret_lock.lock().await;
            let held = self
                .held_secrets()
                .contains_key(&(row.project.clone(), row.name.clone()));
            let used = || {
                self.live()
                    .values()
                    .any(|cell| cell.uses_secret(&row.project, &row.name))
            };
            if !held && !used() {
                self.drop_secret(row).await?;
            }
        }
        Ok(())
    }
}
