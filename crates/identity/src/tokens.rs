//! Tokens: each opens one thing of one sandbox, volume or project, and nothing else.
//!
//! ```text
//!   tokens.secret ── HMAC(purpose) ──> key of that purpose ── HMAC(what it opens) ──> prefix of its kind + 160 bits
//! ```
//!
//! What must hold:
//! - **One purpose, one key.** No two purposes share a key, so that a token of one kind is never one of another, whatever
//!   it is about; whoever holds one learns nothing about others.
//! - **The kind can be seen**, by the prefix, so that a token in the wrong place is refused by its name.
//! - A token follows from what it opens: it can be shown again, needs no row, survives a restart, and opens nothing once
//!   the sandbox or volume is gone, which whoever asks has to look up.
//! - Compared in constant time.

use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use atoll_types::{Fault, ProjectId, SandboxId, VolumeId};
use aws_lc_rs::hmac;
use subtle::ConstantTimeEq as _;

use crate::{Caller, Identity, entropy, looks_like_key};

/// What a token is for. The purpose is part of its derivation and, as a prefix, of its text.
#[derive(Debug, Clone, Copy)]
pub enum Opens<'a> {
    /// What listens on one port of a sandbox. Links for people carry it.
    Port { sandbox: &'a SandboxId, port: u16 },
    /// Processes and files of a sandbox, as whoever the holder says: E2B's agent is opened by it.
    Agent { sandbox: &'a SandboxId },
    /// All ports of a sandbox whose ports are not public, on E2B's wire.
    Traffic { sandbox: &'a SandboxId },
    /// Calls of models, in the name of a sandbox.
    Models { sandbox: &'a SandboxId },
    /// The files of a volume.
    Volume { volume: &'a VolumeId },
    /// An upload of a file for a build, until a time in seconds since 1970.
    Upload {
        project: &'a str,
        hash: &'a str,
        until: i64,
    },
}

pub(crate) const KEY_PREFIX: &str = "e2b_";
pub(crate) const OLD_KEY_PREFIX: &str = "atl_";
pub(crate) const SESSION_PREFIX: &str = "atb_";
pub(crate) const MODEL_KEY_PREFIX: &str = "atm_";
pub(crate) const MODEL_PREFIX: &str = "ats_";
const AGENT_PREFIX: &str = "ate_";

/// How the secrets begin that this server gives out, and what they are.
const KINDS: [(&str, &str); 10] = [
    (OLD_KEY_PREFIX, "an API key"),
    (
        KEY_PREFIX,
        "a key of E2B's own, or one of ours with a typing error",
    ),
    (MODEL_KEY_PREFIX, "a key for models"),
    (SESSION_PREFIX, "the cookie of a session"),
    ("atp_", "the token of a sandbox's port"),
    (AGENT_PREFIX, "the access token of a sandbox's agent (envd)"),
    ("att_", "a traffic access token"),
    (MODEL_PREFIX, "a sandbox's token for models"),
    ("atv_", "the token of a volume"),
    ("atu_", "the proof of an upload link"),
];

/// What a secret is by its looks, in words for a refusal; `None`: nothing of this server's.
pub fn kind_of_secret(secret: &str) -> Option<&'static str> {
    if looks_like_key(secret) {
        return Some("an API key");
    }
    let known = KINDS.iter().find(|(prefix, _)| secret.starts_with(prefix));
    known.map(|(_, what)| *what)
}

impl Opens<'_> {
    /// No purpose is the beginning of another, and none may ever change.
    fn purpose(&self) -> &'static str {
        match self {
            Self::Port { .. } => "port of a sandbox",
            Self::Agent { .. } => "agent of a sandbox",
            Self::Traffic { .. } => "traffic of a sandbox",
            Self::Models { .. } => "models for a sandbox",
            Self::Volume { .. } => "files of a volume",
            Self::Upload { .. } => "upload for a build",
        }
    }

    fn prefix(&self) -> &'static str {
        match self {
            Self::Port { .. } => "atp_",
            Self::Agent { .. } => AGENT_PREFIX,
            Self::Traffic { .. } => "att_",
            Self::Models { .. } => MODEL_PREFIX,
            Self::Volume { .. } => "atv_",
            Self::Upload { .. } => "atu_",
        }
    }
}

/// The secret that all tokens follow from.
pub(crate) struct TokenSecret([u8; 32]);

impl std::fmt::Debug for TokenSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("TokenSecret")
    }
}

const SECRET_FILE: &str = "tokens.secret";
/// What earlier versions derived tokens from, among which one was good for ports and for the agent alike.
const OLD_SECRET_FILE: &str = "port-token.secret";

impl TokenSecret {
    /// Reads it, or makes it. That of an earlier version is not taken over but destroyed: what followed from it is worth
    /// nothing from then on.
    pub(crate) fn open(data_dir: &Path) -> Result<Self, Fault> {
        let path = data_dir.join(SECRET_FILE);
        let failed = |what: &str, error: &io::Error| {
            Fault::internal(format!(
                "{what} the secret of tokens, {}: {error}",
                path.display()
            ))
        };
        let secret = match std::fs::read(&path) {
            Ok(bytes) => bytes.try_into().map_err(|_| {
                Fault::internal(format!(
                    "{} is damaged; remove it to make a new one, after which all tokens are new",
                    path.display()
                ))
            })?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let secret: [u8; 32] = entropy::bytes();
                write_durably(&path, &secret).map_err(|error| failed("writing", &error))?;
                secret
            }
            Err(error) => return Err(failed("reading", &error)),
        };
        let old = data_dir.join(OLD_SECRET_FILE);
        match std::fs::remove_file(&old) {
            Ok(()) => tracing::warn!(
                "every token of sandboxes and volumes was made anew: links to ports and clients of E2B's wire that are \
                 open must ask for theirs again"
            ),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                return Err(Fault::internal(format!(
                    "removing {}, which earlier versions derived tokens from: {error}",
                    old.display()
                )));
            }
        }
        Ok(Self(secret))
    }

    /// Under a key that nothing but this purpose has. The parts cannot run into each other.
    pub(crate) fn tag(&self, purpose: &str, parts: &[&[u8]]) -> [u8; 20] {
        let master = hmac::Key::new(hmac::HMAC_SHA256, &self.0);
        let key = hmac::sign(&master, format!("atoll: {purpose}").as_bytes());
        let mut context = hmac::Context::with_key(&hmac::Key::new(hmac::HMAC_SHA256, key.as_ref()));
        for part in parts {
            context.update(&(part.len() as u64).to_le_bytes());
            context.update(part);
        }
        let mut short = [0; 20];
        short.copy_from_slice(&context.sign().as_ref()[..20]);
        short
    }

    fn token(&self, opens: &Opens<'_>) -> String {
        // These come without a name beside them, so they say whose they are.
        let whose = match opens {
            Opens::Agent { sandbox } | Opens::Models { sandbox } => sandbox.bare(),
            _ => "",
        };
        self.named(opens, whose)
    }

    fn named(&self, opens: &Opens<'_>, whose: &str) -> String {
        let number;
        let parts: &[&[u8]] = match opens {
            Opens::Port { sandbox, port } => {
                number = i64::from(*port).to_le_bytes();
                &[sandbox.as_str().as_bytes(), &number]
            }
            Opens::Agent { sandbox } | Opens::Traffic { sandbox } | Opens::Models { sandbox } => {
                &[sandbox.as_str().as_bytes()]
            }
            Opens::Volume { volume } => &[volume.as_str().as_bytes()],
            Opens::Upload { project, hash, until } => {
                number = until.to_le_bytes();
                &[project.as_bytes(), hash.as_bytes(), &number]
            }
        };
        let tag = hex::encode(self.tag(opens.purpose(), parts));
        format!("{}{whose}{tag}", opens.prefix())
    }
}

fn write_durably(path: &Path, secret: &[u8]) -> io::Result<()> {
    let temporary = path.with_extension("tmp");
    let mut options = std::fs::OpenOptions::new();
    let mut file = options
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&temporary)?;
    file.write_all(secret)?;
    file.sync_all()?;
    std::fs::rename(&temporary, path)
}

/// Whose a token says it is, between its prefix and its 160 bits.
fn named_in(shown: &str, prefix: &str) -> Option<SandboxId> {
    let rest = shown.strip_prefix(prefix)?;
    SandboxId::from_bare(rest.get(..rest.len().checked_sub(40)?)?).ok()
}

/// Somebody has shown the token of something.
#[derive(Debug)]
pub struct Proof {
    sandbox: Option<SandboxId>,
}

impl Proof {
    /// Whom it makes of its holder: somebody who acts for the project that the thing belongs to, which whoever has looked for
    /// the thing knows.
    pub fn acting_for(self, project: ProjectId) -> Caller {
        Caller::token_holder(project, self.sandbox)
    }
}

impl Identity {
    /// The token that opens this. Whether who asks may have it is the caller's to know.
    pub fn token(&self, opens: &Opens<'_>) -> String {
        self.inner.token_secret.token(opens)
    }

    /// Whether what somebody shows is the token that opens this. Says nothing about whether it is still there.
    pub fn is_token(&self, opens: &Opens<'_>, shown: &str) -> bool {
        let is = |token: String| bool::from(token.as_bytes().ct_eq(shown.as_bytes()));
        match opens {
            // Those of before did not say whose they are; clients that were given one hold on to it.
            Opens::Agent { .. } => is(self.token(opens)) || is(self.inner.token_secret.named(opens, "")),
            _ => is(self.token(opens)),
        }
    }

    /// The same, for who then acts with it.
    pub fn prove(&self, opens: &Opens<'_>, shown: &str) -> Option<Proof> {
        let sandbox = match opens {
            Opens::Port { sandbox, .. }
            | Opens::Agent { sandbox }
            | Opens::Traffic { sandbox }
            | Opens::Models { sandbox } => Some((*sandbox).clone()),
            Opens::Volume { .. } | Opens::Upload { .. } => None,
        };
        self.is_token(opens, shown).then_some(Proof { sandbox })
    }

    /// Which sandbox a token for models is of. Says nothing about whether that still lives.
    pub fn sandbox_of_model_token(&self, shown: &str) -> Option<SandboxId> {
        let sandbox = named_in(shown, MODEL_PREFIX)?;
        let right = self.is_token(&Opens::Models { sandbox: &sandbox }, shown);
        right.then_some(sandbox)
    }

    /// Which sandbox's agent a token opens. Says nothing about whether that still lives.
    pub fn sandbox_of_agent_token(&self, shown: &str) -> Option<SandboxId> {
        let sandbox = named_in(shown, AGENT_PREFIX)?;
        let right = self.is_token(&Opens::Agent { sandbox: &sandbox }, shown);
        right.then_some(sandbox)
    }

    /// Whoever comes by a link for an upload that was made here, for it, and for now.
    pub fn check_upload(&self, project: &str, hash: &str, until: i64, proof: &str) -> Option<Caller> {
        let proof = self.prove(&Opens::Upload { project, hash, until }, proof)?;
        let in_time = until >= self.now().0.div_euclid(1000);
        let project = project.parse().ok().filter(|_| in_time)?;
        Some(proof.acting_for(project))
    }

    /// Whoever comes to a sandbox by its own door. What opens the door, if anything has to, is the front end's to check.
    pub fn visitor(&self, project: ProjectId, sandbox: SandboxId) -> Caller {
        Caller::token_holder(project, Some(sandbox))
    }

    /// A name that follows from what is to be kept secret and tells nothing of it.
    pub fn name_of_secret(&self, parts: &[&[u8]]) -> String {
        hex::encode(self.inner.token_secret.tag("name of a private secret", parts))
    }
}

#[cfg(test)]
mod tests {
    use sha2::{Digest as _, Sha256};

    use super::*;

    const SANDBOX: &str = "sbx_abcdefghijkmnpqrstuv";

    fn all<'a>(sandbox: &'a SandboxId, volume: &'a VolumeId) -> Vec<Opens<'a>> {
        vec![
            Opens::Port { sandbox, port: 80 },
            Opens::Port { sandbox, port: 81 },
            Opens::Agent { sandbox },
            Opens::Traffic { sandbox },
            Opens::Models { sandbox },
            Opens::Volume { volume },
            Opens::Upload {
                project: "p",
                hash: "h1",
                until: 1,
            },
            Opens::Upload {
                project: "ph",
                hash: "1",
                until: 1,
            },
        ]
    }

    /// Without the prefix, which anybody can exchange.
    fn tags(secret: &TokenSecret) -> Vec<String> {
        let (sandbox, volume) = (
            SANDBOX.parse().unwrap(),
            "vol_abcdefghijkmnpqrstuv".parse().unwrap(),
        );
        let tokens = all(&sandbox, &volume)
            .into_iter()
            .map(|opens| secret.token(&opens));
        tokens.map(|token| token[token.len() - 40..].to_owned()).collect()
    }

    #[test]
    fn no_token_is_one_of_another_kind() {
        let tags = tags(&TokenSecret([7; 32]));
        for (at, tag) in tags.iter().enumerate() {
            assert!(!tags[at + 1..].contains(tag), "{at} is another, too");
        }
        let (sandbox, volume) = (
            SANDBOX.parse().unwrap(),
            "vol_abcdefghijkmnpqrstuv".parse().unwrap(),
        );
        for opens in all(&sandbox, &volume) {
            let token = TokenSecret([7; 32]).token(&opens);
            assert!(kind_of_secret(&token).is_some(), "{token}");
        }
    }

    #[test]
    fn the_token_of_an_agent_says_whose_it_is() {
        let sandbox: SandboxId = SANDBOX.parse().unwrap();
        let opens = Opens::Agent { sandbox: &sandbox };
        let secret = TokenSecret([7; 32]);
        let token = secret.token(&opens);
        assert_eq!(named_in(&token, AGENT_PREFIX), Some(sandbox.clone()));
        assert_eq!(named_in(&token, MODEL_PREFIX), None);
        let before = secret.named(&opens, "");
        assert_eq!(named_in(&before, AGENT_PREFIX), None);
        assert!(token.ends_with(before.strip_prefix(AGENT_PREFIX).unwrap()));
        for wrong in ["", "ate_", "ate_abcdefghijkmnpqrstuv", "ate_\u{e9}"] {
            assert_eq!(named_in(wrong, AGENT_PREFIX), None, "{wrong}");
        }
    }

    #[test]
    fn the_secret_of_an_earlier_version_opens_nothing_and_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let old = [9; 32];
        std::fs::write(dir.path().join(OLD_SECRET_FILE), old).unwrap();
        let secret = TokenSecret::open(dir.path()).unwrap();
        assert!(!dir.path().join(OLD_SECRET_FILE).exists());
        for label in ["port-token\0", "call-model\0", "volume-token\0"] {
            for about in [SANDBOX, "vol_abcdefghijkmnpqrstuv"] {
                let mut hasher = Sha256::new();
                hasher.update(old);
                hasher.update(label);
                hasher.update(about);
                let before = hex::encode(&hasher.finalize()[..20]);
                assert!(!tags(&secret).contains(&before), "{label}");
            }
        }
        assert_ne!(secret.0, old);
        assert_eq!(TokenSecret::open(dir.path()).unwrap().0, secret.0, "it stays");
        std::fs::write(dir.path().join(SECRET_FILE), b"short").unwrap();
        let damaged = TokenSecret::open(dir.path()).unwrap_err();
        assert!(damaged.message.contains("damaged"), "{damaged:?}");
    }
}
