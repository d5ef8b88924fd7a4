//! Sessions of browsers: a key exchanged for a cookie, so that a page never holds a key.
//!
//! What must hold:
//! - Whoever comes with a session may what its key may, and no more; it ends with its key, by itself after a while, or when
//!   somebody ends it.
//! - The cookie's secret is kept as a hash. Beside it a page needs a second word, which follows from the secret and is in no
//!   cookie: another site can make a browser send the cookie, and cannot know the word.

use atoll_types::{Code, Fault, KeyId, Timestamp};
use subtle::ConstantTimeEq as _;

use crate::keys::{self, KnownKey, NewSecret};
use crate::tokens::SESSION_PREFIX;
use crate::{Caller, Identity};

/// How long a session lasts, in milliseconds.
const LASTS: i64 = 12 * 3600 * 1000;

/// A session to be kept.
#[derive(Debug, Clone)]
pub struct NewSession {
    /// SHA-256 of the cookie's secret.
    pub hash: [u8; 32],
    pub key: KeyId,
    pub created_at: Timestamp,
    pub expires_at: Timestamp,
}

/// What a browser is given.
pub struct Session {
    /// For the cookie.
    pub secret: String,
    /// For how long the browser is to keep it.
    pub lasts_seconds: i64,
    pub word: SessionWord,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session").finish_non_exhaustive()
    }
}

/// What a page of the server's own may know.
#[derive(Debug)]
pub struct SessionWord {
    /// Comes back in a header with whatever changes something.
    pub csrf: String,
    pub expires_at: Timestamp,
}

impl Identity {
    /// Exchanges the caller's key for a session.
    pub async fn begin_session(&self, caller: &Caller) -> Result<Session, Fault> {
        let (Some(key), None) = (caller.key(), caller.session()) else {
            return Err(Fault::new(
                Code::NotAllowed,
                "a session begins with an API key, and not with another session",
            )
            .hint("send the key as `Authorization: Bearer e2b_…`"));
        };
        let secret = NewSecret::new(SESSION_PREFIX);
        let now = self.now();
        let lasts = Timestamp(now.0.saturating_add(LASTS));
        let expires_at = caller.expires_at().map_or(lasts, |at| at.min(lasts));
        let session = NewSession {
            hash: secret.hash,
            key: key.clone(),
            created_at: now,
            expires_at,
        };
        // Of too many of one key the oldest have ended, and may be known.
        let ended = self.store().insert_session(session).await?;
        self.inner.known_keys.forget_sessions(&ended);
        let csrf = self.csrf(&secret.hash);
        Ok(Session {
            secret: secret.text,
            lasts_seconds: (expires_at.0 - now.0).max(0) / 1000,
            word: SessionWord { csrf, expires_at },
        })
    }

    /// Whoever comes with the secret of a session. `None`: nobody (unknown, ended, or its key has).
    pub async fn find_session(&self, secret: &str) -> Result<Option<Caller>, Fault> {
        if !keys::looks_like(secret, SESSION_PREFIX) {
            return Ok(None);
        }
        let hash = keys::hash(secret);
        let (known, generation) = self.inner.known_keys.lookup(&hash);
        let key = match known {
            Some(known) => known,
            None => {
                let Some((row, until)) = self.store().find_session(hash).await? else {
                    return Ok(None);
                };
                let known = KnownKey::of(row).until(until);
                self.inner
                    .known_keys
                    .remember(hash, &known, generation, self.now());
                known
            }
        };
        let session = hex::encode(hash);
        if !self.still_works(&key, &session) {
            return Ok(None);
        }
        self.store().note_key_used(&key.id, self.now());
        Ok(Some(key.holder().in_session(session)))
    }

    /// What a page needs to know of the session that it is in.
    pub fn session_word(&self, caller: &Caller) -> Result<SessionWord, Fault> {
        let hash = caller.session().and_then(|id| hex::decode(id).ok());
        match (hash, caller.expires_at()) {
            (Some(hash), Some(expires_at)) => Ok(SessionWord {
                csrf: self.csrf(&hash),
                expires_at,
            }),
            _ => Err(no_session()),
        }
    }

    /// Whether this is the word of the caller's session.
    pub fn is_csrf(&self, caller: &Caller, shown: &str) -> bool {
        let word = self.session_word(caller);
        word.is_ok_and(|word| word.csrf.as_bytes().ct_eq(shown.as_bytes()).into())
    }

    /// Ends the caller's session, and says which it was: what is open with it has to end.
    pub async fn end_session(&self, caller: &Caller) -> Result<String, Fault> {
        let id = caller.session().ok_or_else(no_session)?;
        let hash = hex::decode(id).ok().and_then(|hash| hash.try_into().ok());
        let hash = hash.ok_or_else(no_session)?;
        let ended = self.store().delete_session(hash).await;
        self.inner.known_keys.forget_sessions(&[hash]);
        ended?;
        Ok(id.to_owned())
    }

    fn csrf(&self, hash: &[u8]) -> String {
        hex::encode(self.inner.token_secret.tag("word of a session", &[hash]))
    }
}

fn no_session() -> Fault {
    Fault::new(
        Code::NoSession,
        "this request came with a key, and not in a session",
    )
    .hint("POST /v1/session begins one")
}
