//! Asking providers until one answers.
//!
//! Another target, or the same once more, is tried only before an answer has begun, only after a failure that is not the
//! caller's fault, only as long as the retry budget lasts and somebody waits for the answer, and only with money of its own
//! where the attempt before it may be charged for.

use std::sync::Arc;
use std::time::{Duration, Instant};

use atoll_gateway_core::Target;
use atoll_providers::{Call, Error, Reply};
use atoll_types::{Code, Fault, ProviderKind};
use bytes::Bytes;
use serde_json::Value;

use crate::faults::Refusal;
use crate::health::{Asked, Sign};
use crate::outgoing::Outgoing;
use crate::settlement::Open;
use crate::work::QUICKER;
use crate::{Models, Request, random};

/// How often one call may be sent.
const MOST_ATTEMPTS: u32 = 5;
/// How often the whole plan is gone through.
const ROUNDS: u32 = 3;
const FIRST_PAUSE: Duration = Duration::from_millis(200);
/// A provider that wants to be left alone for longer is not waited for.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// A provider's refusal.
#[derive(Debug)]
pub struct Upstream {
    pub status: u16,
    /// What it said, on its own wire.
    pub body: Bytes,
    /// Its wire is the client's.
    pub same_wire: bool,
}

/// What is to be done after a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    /// The request itself is at fault.
    GiveUp,
    /// Somebody else may do better.
    Elsewhere,
    /// It may go better later, too.
    Again,
}

impl Models {
    /// `made`: what the first of the targets is to get, where that is known already.
    pub(crate) async fn attempt(
        &self,
        open: &mut Open,
        request: &Arc<Request>,
        targets: &[Target],
        stream: bool,
        mut made: Option<Outgoing>,
    ) -> Result<(Reply, Outgoing), Refusal> {
        let mut last: Option<Refusal> = None;
        for round in 0..ROUNDS {
            let mut again = false;
            for target in targets {
                if open.row.attempts >= MOST_ATTEMPTS
                    || (open.row.attempts > 0 && !self.inner.retries.withdraw(&open.row.project))
                {
                    return Err(last.unwrap_or_else(nobody));
                }
                if open.row.attempts > 0 && (open.is_abandoned() || open.reserve_again().await.is_err()) {
                    return Err(last.unwrap_or_else(nobody));
                }
                match self.try_one(open, request, target, stream, made.take()).await {
                    Ok(answered) => return Ok(answered),
                    Err((refusal, Next::GiveUp)) => return Err(refusal),
                    Err((refusal, next)) => {
                        again |= next == Next::Again;
                        // What a provider said explains more than that another was not asked.
                        if last.as_ref().is_none_or(|last| last.upstream.is_none())
                            || refusal.upstream.is_some()
                        {
                            last = Some(refusal);
                        }
                    }
                }
            }
            let pause = last
                .as_ref()
                .and_then(|last| last.retry_after)
                .unwrap_or(FIRST_PAUSE * 2_u32.pow(round));
            if !again || round + 1 == ROUNDS || pause > LONGEST_PAUSE {
                break;
            }
            let jitter = Duration::from_millis(u64::from(u8::from_le_bytes(random())) / 2);
            tokio::time::sleep(pause + jitter).await;
        }
        Err(last.unwrap_or_else(nobody))
    }

    async fn try_one(
        &self,
        open: &mut Open,
        request: &Arc<Request>,
        target: &Target,
        stream: bool,
        made: Option<Outgoing>,
    ) -> Result<(Reply, Outgoing), (Refusal, Next)> {
        let setup = Arc::clone(&open.setup);
        let project = open.row.project.clone();
        let Some(provider) = setup.providers.get(&target.provider).cloned() else {
            let fault = Fault::new(
                Code::ProviderNotFound,
                format!("there is no provider `{}`", target.provider),
            );
            return Err((fault.into(), Next::Elsewhere));
        };
        let outgoing = match made {
            Some(outgoing) => outgoing,
            None => {
                let bytes = request.body.len();
                let (request, target, limit) = (Arc::clone(request), target.clone(), open.limit);
                let preparing = move || setup.outgoing(&request, &target, stream, limit);
                let prepared = self.apart(&project, bytes, preparing).await;
                prepared
                    .map(|made| made.unwrap_or_else(|| Err(nobody())))
                    .map_err(Refusal::from)
                    .flatten()
                    .map_err(|refusal| (refusal, Next::Elsewhere))?
            }
        };
        let asked = Asked {
            project: &project,
            target,
            speaks: outgoing.speaks,
        };
        if !self.inner.healths.enter(asked, self.now()) {
            let message = format!(
                "provider `{}` has failed too often and is left alone for a moment",
                target.provider
            );
            let fault = Fault::new(Code::ProviderResting, message);
            return Err((fault.into(), Next::Elsewhere));
        }
        let same_wire = outgoing.speaks == request.dialect;
        // Amazon's are signed, with a hash of all that is sent.
        let bytes = match provider.row.kind {
            ProviderKind::Bedrock => outgoing.body.len() / QUICKER,
            _ => 0,
        };
        let (models, request) = (self.clone(), Arc::clone(request));
        let (path, body) = (outgoing.path.clone(), outgoing.body.clone());
        let signing = move || {
            let call = Call {
                kind: provider.row.kind,
                base_url: &provider.row.base_url,
                path: &path,
                headers: if same_wire { &request.headers } else { &[] },
                body,
                stream,
            };
            models.with_key(&provider, call)
        };
        let signed = self.apart(&project, bytes, signing).await;
        let ready = signed.map_err(|fault| (fault.into(), Next::GiveUp))?;
        open.row.attempts += 1;
        let began = Instant::now();
        open.seen.owed = true;
        let sent = match ready {
            Ok(ready) => {
                let reach = self.reach_of(&project);
                self.inner.providers.send(ready, &project, reach).await
            }
            Err(error) => Err(error),
        };
        let millis = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
        let record = |sign: Option<Sign>| {
            if let Some(sign) = sign {
                self.inner.healths.record(asked, sign, self.now());
            }
        };
        match sent {
            Ok(reply) if (200..300).contains(&reply.status) => {
                record(Some(Sign::Works { millis }));
                open.answered_by(target);
                Ok((reply, outgoing))
            }
            Ok(reply) => {
                match reply.status {
                    // Somebody in between has lost patience; the model may have answered.
                    408 | 504 | 524 => open.lost(target),
                    // Who refuses charges nothing.
                    _ => open.seen.owed = false,
                }
                let next = after_status(reply.status);
                record(sign_of_status(reply.status));
                Err((refused(target, reply, same_wire).await, next))
            }
            Err(error) => {
                if error.may_be_charged() {
                    open.lost(target);
                } else {
                    open.seen.owed = false;
                }
                record(sign_of_error(&error));
                Err(failed(target, &error))
            }
        }
    }
}

fn after_status(status: u16) -> Next {
    match status {
        // Not for this caller to mend, but another provider may have another key, or the model.
        401..=404 => Next::Elsewhere,
        408 | 409 | 425 | 429 | 500..=599 => Next::Again,
        _ => Next::GiveUp,
    }
}

/// What a refusal tells about who refuses. Whoever may call can have a request refused, so that says nothing.
fn sign_of_status(status: u16) -> Option<Sign> {
    matches!(status, 408 | 429 | 500..=599).then_some(Sign::Fails)
}

fn sign_of_error(error: &Error) -> Option<Sign> {
    match error {
        Error::Unreachable(_) | Error::TooSlow(_) | Error::Stalled(_) | Error::BrokeOff(_) => {
            Some(Sign::Fails)
        }
        // Ours, or an answer to what the caller sent.
        Error::Unusable(_)
        | Error::OutOfBounds(_)
        | Error::Crowded(_)
        | Error::WrongKind(_)
        | Error::TooLarge(_) => None,
    }
}

pub(crate) async fn refused(target: &Target, reply: Reply, same_wire: bool) -> Refusal {
    let (status, retry_after) = (reply.status, reply.retry_after);
    let body = reply.explanation().await;
    let said = explanation(&body);
    let whom = format!("provider `{}`", target.provider);
    let fault = match status {
        // The caller's own key is fine, and the provider may repeat ours in its complaint.
        401 | 403 => {
            let message = format!("{whom} does not accept the key that this gateway has for it");
            let fault = Fault::new(Code::ProviderKeyRefused, message);
            return fault.hint("`atoll provider set` replaces it").into();
        }
        404 => Fault::new(Code::ModelNotFound, format!("{whom}: {said}")),
        413 => Fault::new(Code::ProviderRefusedSize, format!("{whom}: {said}")),
        429 => Fault::new(Code::ProviderRateLimited, format!("{whom}: {said}")),
        400..=499 => Fault::new(Code::ProviderRefused, format!("{whom}: {said}")),
        _ => Fault::new(Code::ProviderFailed, format!("{whom}: {said}")),
    };
    let upstream = Some(Box::new(Upstream {
        status,
        body,
        same_wire,
    }));
    Refusal {
        retry_after,
        upstream,
        ..fault.into()
    }
}

pub(crate) fn failed(target: &Target, error: &Error) -> (Refusal, Next) {
    let message = format!("provider `{}`: {error}", target.provider);
    let (code, next) = match error {
        Error::TooSlow(_) | Error::Stalled(_) => (Code::ProviderTimedOut, Next::Elsewhere),
        Error::Unusable(_) => (Code::ProviderUnusable, Next::Elsewhere),
        // It will not be allowed the next time either.
        Error::OutOfBounds(_) => (Code::ProviderFailed, Next::Elsewhere),
        Error::Crowded(_) => (Code::TooManyConnections, Next::GiveUp),
        Error::WrongKind(_) | Error::TooLarge(_) => (Code::ProviderFailed, Next::Elsewhere),
        Error::Unreachable(_) | Error::BrokeOff(_) => (Code::ProviderFailed, Next::Again),
    };
    (Fault::new(code, message).into(), next)
}

fn nobody() -> Refusal {
    Fault::new(Code::ProviderFailed, "no provider could be asked").into()
}

/// What a provider says about a refusal, however it spells it.
fn explanation(body: &[u8]) -> String {
    let value: Value = serde_json::from_slice(body).unwrap_or_default();
    let said = value["error"]["message"]
        .as_str()
        .or_else(|| value["message"].as_str())
        .or_else(|| value["error"].as_str())
        .or_else(|| value[0]["error"]["message"].as_str())
        .map(str::to_owned)
        .unwrap_or_else(|| String::from_utf8_lossy(body).into_owned());
    let said: String = said.chars().filter(|c| !c.is_control()).take(500).collect();
    if said.trim().is_empty() {
        "it gave no reason".into()
    } else {
        said
    }
}
