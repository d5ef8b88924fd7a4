//! Who is asking: API keys on the control plane, tokens and signatures in front of a sandbox. Which token opens what is
//! decided in one place, by [`Identity::is_token`](atoll_identity::Identity::is_token).

use atoll_front::Visit;
use atoll_front::extract::bearer;
use atoll_identity::{Caller, looks_like_key};
use atoll_types::Fault;
use axum::extract::{FromRequestParts, MatchedPath, RawPathParams};
use axum::http::request::Parts;
use axum::http::{Extensions, HeaderMap, header};
use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD};
use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq as _;

use crate::control::actions;
use crate::error::{Answer, Refusal};
use crate::{App, edge};

/// The holder of a valid key.
#[derive(Debug)]
pub(crate) struct Auth(pub(crate) Caller);

impl FromRequestParts<App> for Auth {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Answer<Self> {
        let Some(secret) = key(&parts.headers) else {
            return Err(Refusal::unauthorized(
                "no API key: send one of this server's as `X-API-Key` (E2B_API_KEY)",
            ));
        };
        let admitted = app.identity.authenticate(secret).await?;
        match admitted {
            Some(caller) => {
                admit(&parts.extensions, &caller)?;
                may(&caller, parts).await?;
                Ok(Self(caller))
            }
            None => Err(refused(
                "this API key is unknown, was revoked or has expired; `atoll key create` makes one",
                Some(secret).filter(|secret| !looks_like_key(secret)),
            )),
        }
    }
}

/// Whether a caller may do what the route is.
async fn may(caller: &Caller, parts: &mut Parts) -> Answer<()> {
    let path = parts.extensions.get::<MatchedPath>().cloned();
    let path = path.as_ref().map(MatchedPath::as_str).unwrap_or_default();
    let action = actions::of(&parts.method, path)
        .ok_or_else(|| Fault::internal("this route names no action that it is"))?;
    let parameters = RawPathParams::from_request_parts(parts, &()).await.ok();
    let id = parameters.as_ref().and_then(|named| {
        let mut found = named.iter().filter(|(name, _)| *name == "id");
        found.next().filter(|_| path.contains("/sandboxes/{id}"))
    });
    let sandbox = id.and_then(|(_, text)| edge::parse_id(text));
    Ok(caller.may(action, sandbox.as_ref())?)
}

/// Says who pays for what a request holds, now that it is known who asks.
pub(crate) fn admit(extensions: &Extensions, caller: &Caller) -> Answer<Visit> {
    let visit = Visit::of(extensions)?;
    visit.admit_caller(caller)?;
    Ok(visit)
}

/// The key of a request.
pub(crate) fn key(headers: &HeaderMap) -> Option<&str> {
    let named = headers.get("x-api-key").and_then(|value| value.to_str().ok());
    named.or_else(|| bearer(headers)).map(str::trim)
}

/// The user that an in-sandbox request acts as: the name of a Basic header, whose password is empty.
pub(crate) fn user(headers: &HeaderMap) -> Option<String> {
    let value = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, encoded) = value.split_once(' ')?;
    if !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    let decoded = String::from_utf8(STANDARD.decode(encoded.trim()).ok()?).ok()?;
    let (user, _) = decoded.split_once(':')?;
    (!user.is_empty()).then(|| user.to_owned())
}

/// A refusal that also says what was shown, where that is a secret of this server's that belongs elsewhere.
pub(crate) fn refused(why: &str, shown: Option<&str>) -> Refusal {
    match shown.and_then(atoll_identity::kind_of_secret) {
        Some(kind) => Refusal::unauthorized(format!("{why} (what was sent looks like {kind})")),
        None => Refusal::unauthorized(why),
    }
}

/// What a signed link to a file carries.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Signed<'a> {
    /// As the link says it, not as it resolves.
    pub(crate) path: &'a str,
    pub(crate) writes: bool,
    pub(crate) user: &'a str,
    pub(crate) signature: Option<&'a str>,
    /// Seconds since 1970.
    pub(crate) expires: Option<i64>,
}

impl Signed<'_> {
    /// What it is held against tokens with, of which there may be many; `None`: no token makes such a signature.
    pub(crate) fn by(&self) -> Option<SignedBy> {
        let encoded = self.signature?.strip_prefix("v1_")?;
        let signature = STANDARD_NO_PAD.decode(encoded).ok()?.try_into().ok()?;
        // What is signed has a colon between its parts: a name with one could be read as a part of the path.
        if self.user.contains(':') {
            return None;
        }
        let operation = if self.writes { "write" } else { "read" };
        let begun = Sha256::new_with_prefix(format!("{}:{operation}:{}:", self.path, self.user));
        let end = self
            .expires
            .map_or_else(String::new, |expires| format!(":{expires}"));
        Some(SignedBy {
            begun,
            end,
            signature,
        })
    }

    /// Whether it was signed with this token; says nothing of its time.
    pub(crate) fn matches(&self, token: &str) -> bool {
        self.by().is_some_and(|by| by.matches(token))
    }

    /// The clients' tests know these sentences.
    pub(crate) fn check(&self, token: &str, now_seconds: i64) -> Answer<()> {
        if self.signature.is_none() {
            return Err(Refusal::unauthorized("missing signature query parameter"));
        }
        if !self.matches(token) {
            return Err(Refusal::unauthorized("invalid signature"));
        }
        if self.expires.is_some_and(|expires| expires < now_seconds) {
            return Err(Refusal::unauthorized("signature is already expired"));
        }
        Ok(())
    }
}

/// A signature, and what was signed up to the token: as long as whoever asks likes, and hashed once.
#[derive(Debug)]
pub(crate) struct SignedBy {
    begun: Sha256,
    end: String,
    signature: [u8; 32],
}

impl SignedBy {
    pub(crate) fn matches(&self, token: &str) -> bool {
        let hash = self.begun.clone().chain_update(token).chain_update(&self.end);
        hash.finalize().as_slice().ct_eq(&self.signature).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signature_is_for_one_path_one_direction_one_user_and_a_time() {
        let text = "/a:read:user:token:100";
        let signature = format!("v1_{}", STANDARD_NO_PAD.encode(Sha256::digest(text)));
        let signed = Signed {
            path: "/a",
            writes: false,
            user: "user",
            signature: Some(&signature),
            expires: Some(100),
        };
        assert_eq!(signed.check("token", 100), Ok(()));
        for wrong in [
            Signed { path: "/b", ..signed },
            Signed {
                writes: true,
                ..signed
            },
            Signed { user: "", ..signed },
            Signed {
                user: "root",
                ..signed
            },
            Signed {
                expires: None,
                ..signed
            },
        ] {
            assert_eq!(wrong.check("token", 0).unwrap_err().message, "invalid signature");
        }
        assert_eq!(
            signed.check("token", 101).unwrap_err().message,
            "signature is already expired"
        );
    }

    /// Whoever shows what cannot be a signature costs no search among sandboxes.
    #[test]
    fn what_cannot_be_a_signature_is_held_against_nothing() {
        let real = format!("v1_{}", STANDARD_NO_PAD.encode([7; 32]));
        let by = |signature| {
            let signed = Signed {
                path: "/a",
                writes: false,
                user: "user",
                signature,
                expires: None,
            };
            signed.by().is_some()
        };
        assert!(by(Some(&real)));
        for wrong in [None, Some(""), Some("v1_"), Some("v1_AAAA"), Some(&real[3..])] {
            assert!(!by(wrong), "{wrong:?}");
        }
    }

    #[test]
    fn a_path_with_colons_is_no_user() {
        let text = "/a:read:root:read::token";
        let signature = format!("v1_{}", STANDARD_NO_PAD.encode(Sha256::digest(text)));
        let signed = Signed {
            path: "/a:read:root",
            writes: false,
            user: "",
            signature: Some(&signature),
            expires: None,
        };
        assert!(signed.matches("token"));
        let other = Signed {
            path: "/a",
            user: "root:read:",
            ..signed
        };
        assert!(!other.matches("token"), "one signature, two meanings");
    }

    #[test]
    fn the_user_is_the_name_without_a_password() {
        let headers = HeaderMap::from_iter([(header::AUTHORIZATION, "Basic cm9vdDo=".parse().unwrap())]);
        assert_eq!(user(&headers).as_deref(), Some("root"));
        let headers = HeaderMap::from_iter([(header::AUTHORIZATION, "Bearer x".parse().unwrap())]);
        assert_eq!(user(&headers), None);
    }
}
