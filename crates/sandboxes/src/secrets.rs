//! Secrets: kept by the server, sealed in the store, and lent to sandboxes that never hold them.
//!
//! What must hold: a value that came in is sealed before anything else happens to it, and no answer, fact or error has it.
//! A change reaches the sandboxes that run before the caller hears of success.

mod private;

use parking_lot::MutexGuard;
use std::collections::HashMap;

use atoll_broker::{BrokerError, Secret};
use atoll_store::{Fact, NewFact, SecretRow};
use atoll_types::{Code, Fault, ProjectId, SecretBinding, SecretId, SecretUse, Timestamp};
use zeroize::Zeroizing;

use crate::cell::Cell;
use crate::faults::from_store;
use crate::network::settled;
use crate::snapshots::check_name;
use crate::{Action, Caller, Page, Sandboxes, entropy};

pub use private::PrivateSecret;

/// What a project may keep: all of it is held in memory.
const MOST_SECRETS: u64 = 1_000;
/// Sealed, so a little more than their values.
const MOST_BYTES: u64 = 1024 * 1024;

pub struct SetSecret {
    pub name: String,
    pub value: Zeroizing<Vec<u8>>,
    pub binding: SecretBinding,
    /// It is not put into requests any more from then on.
    pub expires_at: Option<Timestamp>,
}

impl std::fmt::Debug for SetSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SetSecret")
            .field("name", &self.name)
            .field("binding", &self.binding)
            .finish_non_exhaustive()
    }
}

/// A secret as callers see it: all but its value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SecretView {
    pub id: SecretId,
    pub name: String,
    pub binding: SecretBinding,
    pub expires_at: Option<Timestamp>,
    pub created_at: Timestamp,
    pub rotated_at: Option<Timestamp>,
}

/// Whether a caller may lend these to a sandbox.
pub(crate) fn may_lend(caller: &Caller, secrets: &[SecretUse]) -> Result<(), Fault> {
    match secrets {
        [] => Ok(()),
        _ => caller.may(Action::UseSecrets, None),
    }
}

impl Sandboxes {
    /// Makes a secret, or replaces the value and the binding of the one with this name.
    pub async fn set_secret(&self, caller: &Caller, request: SetSecret) -> Result<SecretView, Fault> {
        check_name(&request.name)?;
        if request.name.starts_with(private::PREFIX) {
            return Err(Fault::new(
                Code::NameInvalid,
                format!("names that begin with `{}` are the server's own", private::PREFIX),
            ));
        }
        self.put_secret(caller, request).await
    }

    async fn put_secret(&self, caller: &Caller, request: SetSecret) -> Result<SecretView, Fault> {
        atoll_policy::check_binding(&request.binding)?;
        let value = Secret::new(take(request.value)).map_err(|e| from_broker(&e))?;
        let _one_at_a_time = self.inner.secret_lock.lock().await;
        let found = self
            .store()
            .sandboxes
            .secret_by_name(caller.project(), &request.name)
            .await;
        let broker = &self.inner.broker;
        let row = match found.map_err(|e| from_store(&e))? {
            Some(before) => {
                let before_bytes = Some(before.sealed.len());
                let sealed = broker
                    .reseal(caller.project(), &before.id, &before.sealed, &value)
                    .or_else(|_| broker.seal(caller.project(), &before.id, &value));
                let row = SecretRow {
                    sealed: sealed.map_err(|e| from_broker(&e))?,
                    binding: request.binding,
                    expires_at: request.expires_at,
                    rotated_at: Some(self.now()),
                    ..before
                };
                self.has_room(&row, before_bytes).await?;
                let fact = self.secret_fact(&row, |secret| Fact::SecretSet { secret });
                self.store()
                    .sandboxes
                    .update_secret(row.clone(), vec![fact])
                    .await
                    .map_err(|e| from_store(&e))?;
                row
            }
            None => {
                let id: SecretId = entropy::id();
                let row = SecretRow {
                    sealed: broker
                        .seal(caller.project(), &id, &value)
                        .map_err(|e| from_broker(&e))?,
                    id,
                    project: caller.project().clone(),
                    name: request.name,
                    binding: request.binding,
                    expires_at: request.expires_at,
                    created_at: self.now(),
                    rotated_at: None,
                };
                self.has_room(&row, None).await?;
                let fact = self.secret_fact(&row, |secret| Fact::SecretSet { secret });
                self.store()
                    .sandboxes
                    .insert_secret(row.clone(), vec![fact])
                    .await
                    .map_err(|e| from_store(&e))?;
                row
            }
        };
        self.lend(&row).await?;
        Ok(view(row))
    }

    /// Whether the project may keep a secret as it is to be; `before`: how many bytes it takes now. The caller holds the lock.
    async fn has_room(&self, row: &SecretRow, before: Option<usize>) -> Result<(), Fault> {
        let kept = self.store().sandboxes.secrets_kept(&row.project).await;
        let (secrets, bytes) = kept.map_err(|e| from_store(&e))?;
        if fits((secrets, bytes), before, row.sealed.len()) {
            return Ok(());
        }
        let message = format!("a project has at most {MOST_SECRETS} secrets, of {MOST_BYTES} bytes together");
        Err(Fault::new(Code::TooManySecrets, message).hint("delete secrets that nobody uses"))
    }

    /// Replaces the value; sandboxes that run use the new one from their next request on.
    pub async fn rotate_secret(
        &self,
        caller: &Caller,
        name: &str,
        value: Zeroizing<Vec<u8>>,
        expires_at: Option<Timestamp>,
    ) -> Result<SecretView, Fault> {
        let value = Secret::new(take(value)).map_err(|e| from_broker(&e))?;
        let _one_at_a_time = self.inner.secret_lock.lock().await;
        let before = self.secret_row(caller.project(), name).await?;
        let sealed = self
            .inner
            .broker
            .reseal(caller.project(), &before.id, &before.sealed, &value)
            .map_err(|e| from_broker(&e))?;
        let before_bytes = Some(before.sealed.len());
        let row = SecretRow {
            sealed,
            expires_at,
            rotated_at: Some(self.now()),
            ..before
        };
        self.has_room(&row, before_bytes).await?;
        let fact = self.secret_fact(&row, |secret| Fact::SecretRotated { secret });
        self.store()
            .sandboxes
            .update_secret(row.clone(), vec![fact])
            .await
            .map_err(|e| from_store(&e))?;
        self.lend(&row).await?;
        Ok(view(row))
    }

    pub async fn secret(&self, caller: &Caller, name: &str) -> Result<SecretView, Fault> {
        self.secret_row(caller.project(), name).await.map(view)
    }

    /// Newest first.
    pub async fn secrets(
        &self,
        caller: &Caller,
        cursor: Option<String>,
        limit: usize,
    ) -> Result<Page<SecretView>, Fault> {
        let after = crate::parse_cursor(cursor)?;
        let page = self
            .store()
            .sandboxes
            .secrets(caller.project(), after, limit)
            .await;
        let page = page.map_err(|e| from_store(&e))?;
        Ok(Page {
            items: page.items.into_iter().map(view).collect(),
            next: page.next.map(|cursor| cursor.to_string()),
        })
    }

    /// Sandboxes that were lent it go on without it; requests that need it are refused.
    pub async fn delete_secret(&self, caller: &Caller, name: &str) -> Result<(), Fault> {
        let _one_at_a_time = self.inner.secret_lock.lock().await;
        let row = self.secret_row(caller.project(), name).await?;
        self.drop_secret(&row).await
    }

    /// The caller holds the lock.
    async fn drop_secret(&self, row: &SecretRow) -> Result<(), Fault> {
        let fact = self.secret_fact(row, |secret| Fact::SecretDeleted { secret });
        self.store()
            .sandboxes
            .delete_secret(&row.project, &row.id, vec![fact])
            .await
            .map_err(|e| from_store(&e))?;
        self.inner.broker.forget(&row.id);
        self.readmit_users_of(&row.project, &row.name).await;
        Ok(())
    }

    fn held_secrets(&self) -> MutexGuard<'_, HashMap<(ProjectId, String), usize>> {
        self.inner.held_secrets.lock()
    }

    pub(crate) async fn secret_row(&self, project: &ProjectId, name: &str) -> Result<SecretRow, Fault> {
        let row = self.store().sandboxes.secret_by_name(project, name).await;
        row.map_err(|e| from_store(&e))?.ok_or_else(|| {
            let shown: String = name.chars().take(64).collect();
            Fault::new(Code::SecretNotFound, format!("there is no secret `{shown}`"))
                .hint("`atoll secret list` shows those that exist")
        })
    }

    /// On start: what the store has sealed is held in memory, to be lent.
    pub(crate) async fn load_secrets(&self) -> Result<(), Fault> {
        for row in self
            .store()
            .sandboxes
            .all_secrets()
            .await
            .map_err(|e| from_store(&e))?
        {
            let loaded = self
                .inner
                .broker
                .load(&row.project, &row.id, &row.sealed, row.expires_at);
            if let Err(error) = loaded {
                // The others still work, and requests that need this one are refused.
                tracing::error!(secret = %row.id, %error, "a secret cannot be used");
            }
        }
        Ok(())
    }

    /// Makes a committed value the one that is used.
    async fn lend(&self, row: &SecretRow) -> Result<(), Fault> {
        self.inner
            .broker
            .load(&row.project, &row.id, &row.sealed, row.expires_at)
            .map_err(|e| from_broker(&e))?;
        self.readmit_users_of(&row.project, &row.name).await;
        Ok(())
    }

    /// The binding of a secret is part of the policies of those who use it.
    async fn readmit_users_of(&self, project: &ProjectId, name: &str) {
        let cells: Vec<_> = self.live().values().cloned().collect();
        for cell in cells {
            if !cell.uses_secret(project, name) {
                continue;
            }
            if settled(&cell.seen.borrow()) {
                self.readmit(&cell).await;
                continue;
            }
            // One on its way up may have been given the old binding already; how long it takes is not ours to say.
            let service = self.clone();
            self.inner.tasks.spawn(async move {
                cell.seen.wait_for(settled).await;
                service.readmit(&cell).await;
            });
        }
    }

    async fn readmit(&self, cell: &Cell) {
        let row = cell.row.lock().await;
        if let Some(instance) = cell.instance() {
            self.plug_in_again(&row, &instance.id).await;
        }
    }

    fn secret_fact(&self, row: &SecretRow, fact: impl FnOnce(String) -> Fact) -> NewFact {
        NewFact {
            at: self.now(),
            project: row.project.clone(),
            sandbox: None,
            fact: fact(row.name.clone()),
        }
    }
}

/// Whether a secret may take `now` bytes instead of `before`, in a project that keeps so many of so many bytes.
fn fits((secrets, bytes): (u64, u64), before: Option<usize>, now: usize) -> bool {
    match before {
        // What grows no further is never refused.
        Some(before) if now <= before => true,
        Some(before) => bytes + (now - before) as u64 <= MOST_BYTES,
        None => secrets < MOST_SECRETS && bytes + now as u64 <= MOST_BYTES,
    }
}

/// The one who gets it wipes it.
fn take(mut value: Zeroizing<Vec<u8>>) -> Vec<u8> {
    std::mem::take(&mut *value)
}

fn view(row: SecretRow) -> SecretView {
    SecretView {
        id: row.id,
        name: row.name,
        binding: row.binding,
        expires_at: row.expires_at,
        created_at: row.created_at,
        rotated_at: row.rotated_at,
    }
}

fn from_broker(error: &BrokerError) -> Fault {
    match error {
        BrokerError::Empty | BrokerError::TooLong { .. } => {
            Fault::new(Code::SecretValueInvalid, error.to_string())
        }
        _ => Fault::new(Code::SecretUnusable, error.to_string())
            .hint("is the key that secrets are sealed with still the same?"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_project_keeps_so_many_secrets_and_no_more() {
        assert!(fits((MOST_SECRETS - 1, 0), None, 100));
        assert!(!fits((MOST_SECRETS, 0), None, 100));
        assert!(fits((1, MOST_BYTES - 100), None, 100));
        assert!(!fits((1, MOST_BYTES - 99), None, 100));
        // One that is there can be changed, and made shorter whatever there is.
        assert!(fits((MOST_SECRETS, MOST_BYTES - 50), Some(50), 100));
        assert!(!fits((MOST_SECRETS, MOST_BYTES - 49), Some(50), 100));
        assert!(fits((2 * MOST_SECRETS, 2 * MOST_BYTES), Some(100), 100));
    }
}
