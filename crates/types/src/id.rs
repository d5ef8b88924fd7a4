//! Typed ids. Every id is `prefix_` followed by exactly 20 characters of `[a-z0-9]`.
//!
//! One fixed length, because `runsc` resolves ids by prefix and would call two of different length ambiguous; one
//! alphabet, because the part behind the prefix is also a DNS label (`8080-<bare>.localhost`).

use std::fmt;
use std::marker::PhantomData;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

const ALPHABET: &[u8; 32] = b"abcdefghijkmnpqrstuvwxyz23456789";
/// How many characters follow the prefix: 100 bits, so ids need no coordination to be unique.
const BARE_LEN: usize = 20;

/// What an id names. Implemented by the markers below only.
pub trait Kind {
    const PREFIX: &'static str;
    const NOUN: &'static str;
}

/// An id of one kind; two kinds cannot be mixed up.
pub struct Id<K> {
    text: Box<str>,
    kind: PhantomData<fn() -> K>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdError {
    noun: &'static str,
    prefix: &'static str,
}

impl fmt::Display for IdError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "not a {} id: expected `{}_` followed by {BARE_LEN} characters of a-z and 0-9",
            self.noun, self.prefix
        )
    }
}

impl std::error::Error for IdError {}

impl<K: Kind> Id<K> {
    /// Makes an id from entropy that the caller supplies; the same bytes give the same id.
    pub fn from_entropy(entropy: [u8; BARE_LEN]) -> Self {
        let mut text = String::with_capacity(K::PREFIX.len() + 1 + BARE_LEN);
        text.push_str(K::PREFIX);
        text.push('_');
        text.extend(
            entropy
                .iter()
                .map(|byte| char::from(ALPHABET[usize::from(byte % 32)])),
        );
        Self {
            text: text.into(),
            kind: PhantomData,
        }
    }

    /// The id without its prefix: a valid DNS label.
    pub fn bare(&self) -> &str {
        &self.text[K::PREFIX.len() + 1..]
    }

    /// Rebuilds an id from its bare part, as found in a host name.
    pub fn from_bare(bare: &str) -> Result<Self, IdError> {
        format!("{}_{bare}", K::PREFIX).parse()
    }

    pub fn as_str(&self) -> &str {
        &self.text
    }
}

impl<K: Kind> FromStr for Id<K> {
    type Err = IdError;

    fn from_str(text: &str) -> Result<Self, IdError> {
        let bare = text
            .strip_prefix(K::PREFIX)
            .and_then(|rest| rest.strip_prefix('_'));
        match bare {
            Some(bare)
                if bare.len() == BARE_LEN
                    && bare.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit()) =>
            {
                Ok(Self {
                    text: text.into(),
                    kind: PhantomData,
                })
            }
            _ => Err(IdError {
                noun: K::NOUN,
                prefix: K::PREFIX,
            }),
        }
    }
}

impl<K> Clone for Id<K> {
    fn clone(&self) -> Self {
        Self {
            text: self.text.clone(),
            kind: PhantomData,
        }
    }
}
impl<K> PartialEq for Id<K> {
    fn eq(&self, other: &Self) -> bool {
        self.text == other.text
    }
}
impl<K> Eq for Id<K> {}
impl<K> PartialOrd for Id<K> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl<K> Ord for Id<K> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.text.cmp(&other.text)
    }
}
impl<K> std::hash::Hash for Id<K> {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.text.hash(state);
    }
}
impl<K> fmt::Debug for Id<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}
impl<K> fmt::Display for Id<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}
impl<K> Serialize for Id<K> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.text)
    }
}
impl<'de, K: Kind> Deserialize<'de> for Id<K> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?
            .parse()
            .map_err(serde::de::Error::custom)
    }
}

macro_rules! kinds {
    ($($marker:ident, $alias:ident, $prefix:literal, $noun:literal;)*) => {
        mod kind {
            $(
                #[derive(Debug)]
                pub enum $marker {}
                impl super::Kind for $marker {
                    const PREFIX: &'static str = $prefix;
                    const NOUN: &'static str = $noun;
                }
            )*
        }
        $(pub type $alias = Id<kind::$marker>;)*
    };
}

kinds! {
    Sandbox, SandboxId, "sbx", "sandbox";
    Instance, InstanceId, "ins", "instance";
    Template, TemplateId, "tpl", "template";
    Command, CommandId, "cmd", "command";
    Artifact, ArtifactId, "art", "artifact";
    Project, ProjectId, "prj", "project";
    Key, KeyId, "key", "key";
    Request, RequestId, "req", "request";
    Snapshot, SnapshotId, "snap", "snapshot";
    Volume, VolumeId, "vol", "volume";
    Secret, SecretId, "sec", "secret";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_survives_its_text_form() {
        let id = SandboxId::from_entropy([7; 20]);
        assert_eq!(id.as_str().parse::<SandboxId>().as_ref(), Ok(&id));
        assert_eq!(SandboxId::from_bare(id.bare()).as_ref(), Ok(&id));
    }

    #[test]
    fn anything_else_is_refused() {
        for text in [
            "",
            "sbx_",
            "sbx_short",
            "ins_aaaaaaaaaaaaaaaaaaaa",
            "sbx_AAAAAAAAAAAAAAAAAAAA",
            "sbx_../../../../etc/pass",
        ] {
            assert!(text.parse::<SandboxId>().is_err(), "{text:?}");
        }
    }
}
