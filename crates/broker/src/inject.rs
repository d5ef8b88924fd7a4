//! Putting values into the head of a request.

use atoll_policy::Grant;
use atoll_types::{Injection, SecretRef, Timestamp};
use base64::Engine;
use base64::alphabet;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use http::header::{AUTHORIZATION, HeaderMap, HeaderName, HeaderValue};
use memchr::memmem;
use zeroize::Zeroizing;

use crate::redact::{Redactor, percent_encode};
use crate::{Broker, Lent, Secret};

/// Reads what clients send, with or without the padding; writes it with.
const BASIC: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// What stands for a secret in one sandbox.
pub type Placeholder = (SecretRef, String);

/// A secret that went into a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Use {
    pub secret: SecretRef,
    /// Which of its values.
    pub(crate) version: u64,
}

impl Use {
    fn of(grant: &Grant, held: &Lent) -> Self {
        Self {
            secret: grant.secret.clone(),
            version: held.version,
        }
    }
}

/// The parts of a request's head in which secrets go out.
#[derive(Debug)]
pub struct Head<'a> {
    pub headers: &'a mut HeaderMap,
    pub path: &'a str,
    pub query: Option<String>,
}

/// Why a request cannot go out, in the words of the log and of the answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Denied {
    #[error(
        "the request carries the placeholder of secret `{0}`, which is not bound to this host, port, method and path"
    )]
    Stray(String),
    #[error(
        "the request carries the placeholder of secret `{0}` in a place where it is not replaced; it is in headers, basic authentication and values of the query"
    )]
    Misplaced(String),
    #[error("secret `{0}` has expired or was deleted")]
    Unavailable(String),
    #[error("the value of secret `{0}` cannot stand in a header: it has control characters or line breaks")]
    Unusable(String),
    #[error("secret `{0}` is bound to a header that Atoll keeps to itself")]
    Reserved(String),
}

impl Denied {
    /// How the log names the rule.
    pub fn rule(&self) -> String {
        let (Self::Stray(name)
        | Self::Misplaced(name)
        | Self::Unavailable(name)
        | Self::Unusable(name)
        | Self::Reserved(name)) = self;
        format!("secret: {name}")
    }

    pub fn hint(&self) -> &'static str {
        match self {
            Self::Stray(_) => "send it only where the secret's binding says, or extend the binding",
            Self::Misplaced(_) => "put it into a header or a parameter of the query",
            Self::Unavailable(_) => "set the secret again, or take it from the sandbox",
            Self::Unusable(_) => "set the secret to a single line of printable characters",
            Self::Reserved(_) => "bind it to another header",
        }
    }
}

impl Broker {
    /// Puts the values of `grants` into a request, and makes sure that none of the sandbox's `placeholders` is left in its
    /// head. The answer is which secrets went in.
    pub fn inject(
        &self,
        head: &mut Head<'_>,
        grants: &[&Grant],
        placeholders: &[Placeholder],
        now: Timestamp,
    ) -> Result<Vec<Use>, Denied> {
        let mut used = Vec::new();
        // Placeholders first: an overwriting grant then has the last word on its header.
        let (swapped, put): (Vec<&Grant>, Vec<&Grant>) = grants
            .iter()
            .partition(|grant| matches!(grant.binding.inject, Injection::Placeholder));
        for grant in swapped {
            // One that cannot be had is left in place, and refused below if it is there at all.
            let Some(lent) = self.current(&grant.secret.id, now) else {
                continue;
            };
            for (_, text) in placeholders
                .iter()
                .filter(|(secret, _)| secret.id == grant.secret.id)
            {
                let replaced = head
                    .replace(text.as_bytes(), &lent.value)
                    .map_err(|Invalid| Denied::Unusable(grant.secret.name.clone()))?;
                if replaced {
                    used.push(Use::of(grant, &lent));
                }
            }
        }
        for grant in put {
            let lent = self
                .current(&grant.secret.id, now)
                .ok_or_else(|| Denied::Unavailable(grant.secret.name.clone()))?;
            head.put(&grant.binding.inject, &lent.value)
                .map_err(|error| match error {
                    Unfit::Invalid => Denied::Unusable(grant.secret.name.clone()),
                    Unfit::Reserved => Denied::Reserved(grant.secret.name.clone()),
                })?;
            used.push(Use::of(grant, &lent));
        }
        let decoded = head.decoded();
        for (secret, text) in placeholders {
            if !head.contains(text.as_bytes(), &decoded) {
                continue;
            }
            let name = secret.name.clone();
            return Err(match grants.iter().any(|grant| grant.secret.id == secret.id) {
                true if self.current(&secret.id, now).is_none() => Denied::Unavailable(name),
                true => Denied::Misplaced(name),
                false => Denied::Stray(name),
            });
        }
        Ok(used)
    }

    /// What to blot out of answers. Not only what went out with this very request: a server may show what it was sent
    /// before.
    pub fn redactor(&self, grants: &[Grant]) -> Redactor {
        let mut redactor = Redactor::default();
        for grant in grants {
            if let Some(needles) = self.needles(&grant.secret.id) {
                redactor.add(needles);
            }
        }
        redactor
    }
}

/// Whether one of the placeholders stands in these fields.
pub fn carries(fields: &HeaderMap, placeholders: &[Placeholder]) -> bool {
    fields.values().any(|value| {
        placeholders
            .iter()
            .any(|(_, text)| memmem::find(value.as_bytes(), text.as_bytes()).is_some())
    })
}

struct Invalid;

enum Unfit {
    Invalid,
    Reserved,
}

impl Head<'_> {
    fn put(&mut self, injection: &Injection, value: &Secret) -> Result<(), Unfit> {
        let value = value.expose();
        let (name, text) = match injection {
            Injection::Header { name } => {
                let name = HeaderName::from_bytes(name.as_bytes()).map_err(|_| Unfit::Reserved)?;
                if is_reserved(&name) {
                    return Err(Unfit::Reserved);
                }
                (name, value.to_vec())
            }
            Injection::Bearer => (AUTHORIZATION, [b"Bearer ", value].concat()),
            Injection::Basic { username } => {
                let pair = Zeroizing::new([username.as_bytes(), b":", value].concat());
                (
                    AUTHORIZATION,
                    format!("Basic {}", BASIC.encode(pair.as_slice())).into_bytes(),
                )
            }
            Injection::Query { name } => {
                self.put_query(name, value);
                return Ok(());
            }
            // Replaced where the guest put it, see `replace`.
            Injection::Placeholder => return Ok(()),
        };
        let value = sensitive(text).map_err(|Invalid| Unfit::Invalid)?;
        // Takes the place of all that the guest sent under this name.
        self.headers.insert(name, value);
        Ok(())
    }

    fn put_query(&mut self, name: &str, value: &[u8]) {
        let query = self.query.take().unwrap_or_default();
        let mut kept: Vec<&str> = query
            .split('&')
            .filter(|pair| {
                let key = pair.split('=').next().unwrap_or_default();
                !pair.is_empty() && percent_decode(key) != name.as_bytes()
            })
            .collect();
        let added = format!("{}={}", encode(name.as_bytes()), encode(value));
        kept.push(&added);
        self.query = Some(kept.join("&"));
    }

    /// Whether there was one.
    fn replace(&mut self, placeholder: &[u8], value: &Secret) -> Result<bool, Invalid> {
        let value = value.expose();
        let mut replaced = false;
        for (name, text) in self.headers.iter_mut() {
            if let Some(new) = swap(text.as_bytes(), placeholder, value) {
                *text = sensitive(new)?;
                replaced = true;
            } else if name == AUTHORIZATION
                && let Some(pair) = basic(text)
                && let Some(pair) = swap(&pair, placeholder, value).map(Zeroizing::new)
            {
                *text = sensitive(format!("Basic {}", BASIC.encode(pair.as_slice())).into_bytes())?;
                replaced = true;
            }
        }
        if let Some(query) = &self.query {
            let mut found = false;
            let pairs: Vec<String> = query
                .split('&')
                .map(|pair| {
                    let parts = pair.split_once('=');
                    match parts
                        .and_then(|(key, old)| Some((key, swap(&percent_decode(old), placeholder, value)?)))
                    {
                        Some((key, new)) => {
                            found = true;
                            format!("{key}={}", encode(&Zeroizing::new(new)))
                        }
                        None => pair.to_owned(),
                    }
                })
                .collect();
            if found {
                self.query = Some(pairs.join("&"));
                replaced = true;
            }
        }
        Ok(replaced)
    }

    /// What has to be decoded before it can be searched. Once for all placeholders: there may be many, and a long query.
    fn decoded(&self) -> Vec<Zeroizing<Vec<u8>>> {
        let pairs = self.headers.get_all(AUTHORIZATION).iter().filter_map(basic);
        let path = Zeroizing::new(percent_decode(self.path));
        let query = self
            .query
            .as_deref()
            .map(|query| Zeroizing::new(percent_decode(query)));
        pairs.chain([path]).chain(query).collect()
    }

    fn contains(&self, placeholder: &[u8], decoded: &[Zeroizing<Vec<u8>>]) -> bool {
        let within = |text: &[u8]| memmem::find(text, placeholder).is_some();
        self.headers.values().any(|value| within(value.as_bytes())) || decoded.iter().any(|text| within(text))
    }
}

/// What frames a message or concerns one connection only is written by Atoll.
fn is_reserved(name: &HeaderName) -> bool {
    matches!(
        name.as_str(),
        "connection"
            | "content-length"
            | "expect"
            | "host"
            | "keep-alive"
            | "proxy-connection"
            | "te"
            | "trailer"
            | "transfer-encoding"
            | "upgrade"
    )
}

/// Kept out of the tables of HTTP/2 and out of debug output.
fn sensitive(text: Vec<u8>) -> Result<HeaderValue, Invalid> {
    let mut value = HeaderValue::from_maybe_shared(bytes::Bytes::from(text)).map_err(|_| Invalid)?;
    value.set_sensitive(true);
    Ok(value)
}

/// What is in basic authentication.
fn basic(value: &HeaderValue) -> Option<Zeroizing<Vec<u8>>> {
    let (scheme, rest) = value.as_bytes().split_at_checked(6)?;
    if !scheme.eq_ignore_ascii_case(b"basic ") {
        return None;
    }
    BASIC.decode(rest.trim_ascii()).ok().map(Zeroizing::new)
}

fn swap(text: &[u8], old: &[u8], new: &[u8]) -> Option<Vec<u8>> {
    let mut at = memmem::find(text, old)?;
    let mut out = Vec::with_capacity(text.len() + new.len());
    let mut rest = text;
    loop {
        out.extend_from_slice(&rest[..at]);
        out.extend_from_slice(new);
        rest = &rest[at + old.len()..];
        match memmem::find(rest, old) {
            Some(next) => at = next,
            None => break,
        }
    }
    out.extend_from_slice(rest);
    Some(out)
}

fn encode(text: &[u8]) -> String {
    String::from_utf8_lossy(&percent_encode(text, b"0123456789ABCDEF")).into_owned()
}

fn percent_decode(text: &str) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        rest = after;
        let decoded = match (byte, after.first_chunk::<2>()) {
            (b'%', Some(digits)) => hex::decode(digits).ok().and_then(|bytes| bytes.first().copied()),
            (b'+', _) => Some(b' '),
            _ => None,
        };
        if byte == b'%' && decoded.is_some() {
            rest = &after[2..];
        }
        out.push(decoded.unwrap_or(byte));
    }
    out
}
