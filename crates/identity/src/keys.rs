//! API keys.
//!
//! ```text
//!   e2b_ 9f86d081884c7d659a2feaa0c55ad015 3b0c4e1a      40 digits: 128 random bits, 32 bits of checksum
//!   atl_ 20 + 20 letters                                as earlier versions made them: they stay valid,
//!   e2b_ 88 digits                                      also in hexadecimal
//! ```
//!
//! The form is that of E2B's keys, because its clients are the only ones that look at what a key looks like (`e2b_` and
//! hexadecimal digits): one key opens every API. The checksum tells ours from E2B's own and from those with a typing error,
//! without asking the store.
//!
//! A secret is shown once and stored as a SHA-256 hash: with that much entropy a slow hash would protect nothing. Tokens are
//! derived rather than kept: [`crate::tokens`].

use parking_lot::Mutex;
use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use atoll_types::{Code, Cursor, Fault, KeyId, Page, ProjectId, Timestamp};
use sha2::{Digest as _, Sha256};

use crate::rights::MOST_SCOPES;
use crate::tokens::{KEY_PREFIX, MODEL_KEY_PREFIX, OLD_KEY_PREFIX};
use crate::{Action, Caller, Identity, Role, Scope, entropy};

/// How many keys of a project may work at a time; as many that do not work any more are remembered. More are a program that
/// makes one for each of its requests.
const MOST_KEYS: usize = 1_000;
/// Longer ones are none of ours.
const LONGEST: usize = 100;
/// Hexadecimal digits of a key, and how many of them are its checksum.
const DIGITS: usize = 40;
const CHECK_DIGITS: usize = 8;
/// How many letters the keys of earlier versions have.
const OLD_LENGTH: usize = 44;

/// A key as listed; the secret itself is shown once, when it is made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Key {
    pub id: KeyId,
    pub project: ProjectId,
    pub name: String,
    /// The beginning of the secret, for people to recognise it by.
    pub prefix: String,
    pub role: Role,
    /// What it is restricted to; empty: its role alone says what it may do.
    pub scopes: Vec<Scope>,
    /// The key that it was made with. `None`: the server made it itself, or it is older than this is kept.
    pub made_by: Option<KeyId>,
    pub created_at: Timestamp,
    /// When it stops working by itself.
    pub expires_at: Option<Timestamp>,
    pub revoked_at: Option<Timestamp>,
    /// Not exact: uses are gathered before they are written.
    pub last_used_at: Option<Timestamp>,
}

/// A key to be kept.
#[derive(Debug, Clone)]
pub struct NewKey {
    pub id: KeyId,
    pub project: ProjectId,
    pub name: String,
    /// SHA-256 of the secret.
    pub hash: [u8; 32],
    pub prefix: String,
    pub role: Role,
    pub scopes: Vec<Scope>,
    pub made_by: Option<KeyId>,
    pub created_at: Timestamp,
    pub expires_at: Option<Timestamp>,
}

/// What somebody wants a key to be.
#[derive(Debug, Clone)]
pub struct CreateKey {
    pub project: ProjectId,
    pub name: String,
    /// `None`: [`Role::Member`], so that a key which is made without a thought neither runs the server nor answers for people.
    pub role: Option<Role>,
    pub scopes: Vec<Scope>,
    /// `None`: when the maker's own key expires, if it does.
    pub expires_at: Option<Timestamp>,
}

/// A key that opens models and nothing else. Its limits are kept where models are called.
#[derive(Debug, Clone)]
pub struct ModelKey {
    pub id: KeyId,
    pub project: ProjectId,
    pub expires_at: Option<Timestamp>,
}

/// A secret that nobody has seen yet.
pub struct NewSecret {
    pub text: String,
    /// SHA-256.
    pub hash: [u8; 32],
    /// Its beginning, to be shown in lists.
    pub prefix: String,
}

impl std::fmt::Debug for NewSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NewSecret").finish_non_exhaustive()
    }
}

impl NewSecret {
    pub(crate) fn new(kind: &str) -> Self {
        let first: KeyId = entropy::id();
        let second: KeyId = entropy::id();
        Self::of(kind, format!("{kind}{}{}", first.bare(), second.bare()))
    }

    /// For a key of the API.
    fn for_api() -> Self {
        let random = hex::encode(entropy::bytes::<16>());
        let text = format!("{KEY_PREFIX}{random}{}", checksum(&random));
        Self::of(KEY_PREFIX, text)
    }

    fn of(kind: &str, text: String) -> Self {
        Self {
            hash: hash(&text),
            prefix: text[..kind.len() + 4].to_owned(),
            text,
        }
    }

    /// For a key that opens models and nothing else.
    pub fn for_models() -> Self {
        Self::new(MODEL_KEY_PREFIX)
    }
}

impl Identity {
    /// Finds out who holds this secret. `None`: nobody (unknown, revoked or expired).
    pub async fn authenticate(&self, secret: &str) -> Result<Option<Caller>, Fault> {
        let Some(secret) = as_made(secret) else {
            return Ok(None);
        };
        let hash = hash(&secret);
        let (known, generation) = self.inner.known_keys.lookup(&hash);
        let key = match known {
            Some(known) => known,
            None => {
                let Some(row) = self.store().find_active_key(hash).await? else {
                    return Ok(None);
                };
                let known = KnownKey::of(row);
                self.inner
                    .known_keys
                    .remember(hash, &known, generation, self.now());
                known
            }
        };
        if !self.still_works(&key, key.id.as_str()) {
            return Ok(None);
        }
        self.store().note_key_used(&key.id, self.now());
        Ok(Some(key.holder()))
    }

    /// Whether a key, or a session of it, has not expired. When it does, what is open under `id` has to end.
    pub(crate) fn still_works(&self, key: &KnownKey, id: &str) -> bool {
        if key.has_expired(self.now()) {
            return false;
        }
        if let Some(at) = key.expires_at {
            self.inner.known_keys.expires(at, id);
        }
        true
    }

    /// Ids of keys that were used here and have expired since this was asked last: what is open with them has to end.
    pub fn take_expired(&self) -> Vec<String> {
        self.inner.known_keys.take_expired(self.now())
    }

    /// The same for a key that opens models and nothing else. `None`: nobody (unknown, revoked or expired).
    pub async fn authenticate_for_models(&self, secret: &str) -> Result<Option<Caller>, Fault> {
        if !looks_like(secret, MODEL_KEY_PREFIX) {
            return Ok(None);
        }
        let hash = hash(secret);
        let (known, generation) = self.inner.known_keys.lookup(&hash);
        let key = match known {
            Some(known) => known,
            None => {
                let Some(row) = self.store().find_active_model_key(hash).await? else {
                    return Ok(None);
                };
                let known = KnownKey {
                    id: row.id,
                    project: row.project,
                    role: Role::Member,
                    scopes: Arc::default(),
                    expires_at: row.expires_at,
                };
                self.inner
                    .known_keys
                    .remember(hash, &known, generation, self.now());
                known
            }
        };
        if !self.still_works(&key, key.id.as_str()) {
            return Ok(None);
        }
        Ok(Some(Caller::model_key_holder(key.project, key.id)))
    }

    /// A key that is kept elsewhere was revoked.
    pub fn key_was_revoked(&self, id: &KeyId) {
        self.inner.known_keys.forget_key(id);
    }

    /// Makes a key and returns its secret, which cannot be shown again. Nobody makes one that may do more, or works for longer,
    /// than their own.
    pub async fn create_key(&self, caller: &Caller, wanted: CreateKey) -> Result<(Key, String), Fault> {
        caller.may(Action::ManageKeys, None)?;
        let name = wanted.name;
        if name.is_empty() || name.len() > 100 || name.chars().any(char::is_control) {
            return Err(Fault::new(
                Code::KeyNameInvalid,
                "a key's name has 1 to 100 printable characters",
            ));
        }
        if wanted.scopes.len() > MOST_SCOPES {
            return Err(Fault::new(
                Code::KeyScopesInvalid,
                format!("a key has at most {MOST_SCOPES} scopes"),
            ));
        }
        let role = wanted.role.unwrap_or(Role::Member);
        self.check_role(caller, role, &wanted.project)?;
        let now = self.now();
        let expires_at = self.check_expiry(caller, wanted.expires_at)?;
        let secret = NewSecret::for_api();
        let key = NewKey {
            id: entropy::id(),
            project: wanted.project,
            name,
            hash: secret.hash,
            prefix: secret.prefix,
            role,
            scopes: wanted.scopes,
            made_by: caller.key().cloned(),
            created_at: now,
            expires_at,
        };
        // The server's own are never refused: without the admin key nobody could revoke another.
        let most = if key.made_by.is_some() {
            MOST_KEYS
        } else {
            usize::MAX
        };
        let made = self.store().insert_key(key, most).await?;
        let key = made.ok_or_else(|| {
            Fault::new(
                Code::TooManyKeys,
                format!("the project has {MOST_KEYS} keys that work, and may have no more"),
            )
            .hint("revoke keys that nobody uses: `atoll key list` says when each was used last")
        })?;
        Ok((key, secret.text))
    }

    /// When a key that somebody makes expires: when they want, and not later than their own.
    pub fn check_expiry(
        &self,
        caller: &Caller,
        wanted: Option<Timestamp>,
    ) -> Result<Option<Timestamp>, Fault> {
        match (wanted, caller.expires_at()) {
            (Some(at), _) if at <= self.now() => Err(Fault::new(
                Code::KeyExpiryInvalid,
                "a key must expire in the future",
            )),
            (Some(at), Some(own)) if at > own => Err(Fault::new(
                Code::NotAllowed,
                "nobody makes a key that works for longer than their own",
            )
            .hint("leave `expires_at` out, or use a key that does not expire")),
            (wanted, own) => Ok(wanted.or(own)),
        }
    }

    fn check_role(&self, caller: &Caller, role: Role, project: &ProjectId) -> Result<(), Fault> {
        if !caller.role().covers(role) {
            return Err(Fault::new(
                Code::NotAllowed,
                format!("a key with the role {} makes no {role}", caller.role()),
            )
            .hint("nobody makes a key that may do more than their own; ask whoever has one"));
        }
        if role == Role::Operator && project != self.default_project() {
            return Err(Fault::new(
                Code::RoleInvalid,
                "keys with the role operator are of the project `default`",
            )
            .hint("make it a member of its project, or make it in `default`"));
        }
        Ok(())
    }

    /// Newest first.
    pub async fn list_keys(
        &self,
        project: &ProjectId,
        after: Option<Cursor>,
        limit: usize,
    ) -> Result<Page<Key>, Fault> {
        Ok(self.store().keys(project, after, limit).await?)
    }

    /// Whether a project has, or had, a key of this id.
    pub async fn has_key(&self, project: &ProjectId, id: &KeyId) -> Result<bool, Fault> {
        Ok(self.store().key(project, id).await?.is_some())
    }

    /// From now on the key opens nothing. Revoking it again changes nothing. Nobody revokes a key that may do more than
    /// their own.
    pub async fn revoke_key(&self, caller: &Caller, project: &ProjectId, id: &KeyId) -> Result<Key, Fault> {
        caller.may(Action::ManageKeys, None)?;
        let unknown = || {
            Fault::new(Code::KeyNotFound, format!("there is no key {id}"))
                .hint("`atoll key list` shows those that exist")
        };
        let key = self.store().key(project, id).await?.ok_or_else(unknown)?;
        if !caller.role().covers(key.role) {
            return Err(Fault::new(
                Code::NotAllowed,
                format!("a key with the role {} revokes no {}", caller.role(), key.role),
            ));
        }
        let revoked = self.store().revoke_key(project, id, self.now()).await;
        self.inner.known_keys.forget_key(id);
        revoked?.ok_or_else(unknown)
    }
}

/// Keys that were found valid, so that not every request asks the store. This server is the only one on its database, so
/// nothing is revoked behind its back; a revocation forgets what it concerns, and whatever was looked up meanwhile, but no key of
/// anybody else: whoever may revoke something must not make the store work for all. The lock protects the map and its generation
/// together.
#[derive(Debug, Default)]
pub(crate) struct KnownKeys(Mutex<Known>);

#[derive(Debug, Clone)]
pub(crate) struct KnownKey {
    pub(crate) id: KeyId,
    project: ProjectId,
    role: Role,
    scopes: Arc<[Scope]>,
    pub(crate) expires_at: Option<Timestamp>,
}

impl KnownKey {
    pub(crate) fn of(row: Key) -> Self {
        Self {
            id: row.id,
            project: row.project,
            role: row.role,
            scopes: row.scopes.into(),
            expires_at: row.expires_at,
        }
    }

    /// The same, until then at most.
    pub(crate) fn until(mut self, end: Timestamp) -> Self {
        self.expires_at = Some(self.expires_at.map_or(end, |at| at.min(end)));
        self
    }

    fn has_expired(&self, now: Timestamp) -> bool {
        self.expires_at.is_some_and(|at| at <= now)
    }

    pub(crate) fn holder(self) -> Caller {
        Caller::key_holder(self.project, self.role, self.scopes, self.expires_at, self.id)
    }
}

#[derive(Debug, Default)]
struct Known {
    by_hash: HashMap<[u8; 32], KnownKey>,
    /// Counts the revocations.
    generation: u64,
    /// Those in use that expire, the soonest first.
    expiring: BTreeSet<(Timestamp, String)>,
}

impl KnownKeys {
    pub(crate) fn lookup(&self, hash: &[u8; 32]) -> (Option<KnownKey>, u64) {
        let known = self.0.lock();
        (known.by_hash.get(hash).cloned(), known.generation)
    }

    /// Unless something was revoked since `generation` was read, or it has expired.
    pub(crate) fn remember(&self, hash: [u8; 32], key: &KnownKey, generation: u64, now: Timestamp) {
        let mut known = self.0.lock();
        if known.generation == generation && !key.has_expired(now) {
            known.by_hash.insert(hash, key.clone());
        }
    }

    pub(crate) fn expires(&self, at: Timestamp, id: &str) {
        let mut known = self.0.lock();
        known.expiring.insert((at, id.to_owned()));
    }

    /// Those that have expired are known no longer.
    fn take_expired(&self, now: Timestamp) -> Vec<String> {
        let mut known = self.0.lock();
        let mut expired = Vec::new();
        while let Some((at, _)) = known.expiring.first()
            && *at <= now
        {
            expired.extend(known.expiring.pop_first().map(|(_, id)| id));
        }
        if !expired.is_empty() {
            known.by_hash.retain(|_, key| !key.has_expired(now));
        }
        expired
    }

    /// The key was revoked, and its sessions with it.
    fn forget_key(&self, id: &KeyId) {
        let mut known = self.0.lock();
        known.by_hash.retain(|_, key| key.id != *id);
        known.generation += 1;
    }

    /// Sessions have ended.
    pub(crate) fn forget_sessions(&self, hashes: &[[u8; 32]]) {
        if hashes.is_empty() {
            return;
        }
        let mut known = self.0.lock();
        for hash in hashes {
            known.by_hash.remove(hash);
        }
        known.generation += 1;
    }
}

/// Whether this may be a key of the API: it has the form, and no typing error that can be seen.
pub fn looks_like_key(secret: &str) -> bool {
    as_made(secret).is_some()
}

/// A key as it was made, however it is written; `None`: it is none of ours.
fn as_made(shown: &str) -> Option<Cow<'_, str>> {
    if looks_like(shown, OLD_KEY_PREFIX) {
        return Some(shown.into());
    }
    let digits = shown.strip_prefix(KEY_PREFIX)?;
    match digits.len() {
        DIGITS => {
            let (random, check) = digits.split_at_checked(DIGITS - CHECK_DIGITS)?;
            (checksum(random) == check).then_some(shown.into())
        }
        length if length == 2 * OLD_LENGTH => {
            let text = String::from_utf8(hex::decode(digits).ok()?).ok()?;
            text.starts_with(OLD_KEY_PREFIX).then_some(text.into())
        }
        _ => None,
    }
}

/// Anybody can compute it: it finds mistakes, and protects nothing.
fn checksum(random: &str) -> String {
    let mut hasher = Sha256::new();
    hasher.update("atoll: checksum of a key\0");
    hasher.update(random);
    hex::encode(&hasher.finalize()[..CHECK_DIGITS / 2])
}

/// Whether a secret might be one of this kind.
pub(crate) fn looks_like(secret: &str, prefix: &str) -> bool {
    secret.starts_with(prefix) && secret.len() <= LONGEST
}

pub(crate) fn hash(secret: &str) -> [u8; 32] {
    Sha256::digest(secret.as_bytes()).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_one_for_every_client_and_knows_its_typing_errors() {
        let made: Vec<String> = (0..100).map(|_| NewSecret::for_api().text).collect();
        for (at, key) in made.iter().enumerate() {
            // What E2B's clients ask for, with the length that its own keys have.
            let digits = key.strip_prefix("e2b_").unwrap();
            assert_eq!(digits.len(), 40);
            assert!(
                digits
                    .bytes()
                    .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')),
                "{key}"
            );
            assert_eq!(as_made(key).as_deref(), Some(key.as_str()));
            assert!(!made[at + 1..].contains(key), "twice");
            for position in 4..key.len() {
                let mut wrong = key.clone().into_bytes();
                wrong[position] = if wrong[position] == b'0' { b'1' } else { b'0' };
                assert_eq!(as_made(str::from_utf8(&wrong).unwrap()), None);
            }
        }
        for none in [
            "e2b_",
            "e2b_0000000000000000000000000000000000000000",
            "e2b_ffffffffffffffffffffffffffffffffffffffffff",
            "e2b_é23456789012345678901234567890123456789",
            "atm_x",
            "",
        ] {
            assert_eq!(as_made(none), None, "{none}");
        }
        // The random part alone says which key it is.
        assert_eq!(as_made(&made[0].to_uppercase()), None);
    }

    #[test]
    fn keys_of_earlier_versions_stay_valid_in_both_forms() {
        let old = NewSecret::new(OLD_KEY_PREFIX).text;
        assert_eq!(old.len(), OLD_LENGTH);
        assert_eq!(as_made(&old).as_deref(), Some(old.as_str()));
        let in_hex = format!("e2b_{}", hex::encode(&old));
        assert_eq!(as_made(&in_hex).as_deref(), Some(old.as_str()));
        let other = format!("e2b_{}", hex::encode("x".repeat(OLD_LENGTH)));
        assert_eq!(as_made(&other), None);
        assert_eq!(as_made(&format!("{old}{}", "x".repeat(LONGEST))), None);
    }
}
