//! How many tokens a request has, before it is made.

use std::sync::Arc;

use atoll_dialects::{Dialect, Peek};
use atoll_gateway_core::{Target, input_tokens};
use atoll_providers::Call;
use atoll_types::{Code, Fault, ProviderKind};
use bytes::Bytes;
use serde_json::Value;

use crate::faults::Refusal;
use crate::outgoing::Outgoing;
use crate::setup::KnownProvider;
use crate::work::QUICKER;
use crate::{Models, Request, Who, attempts};

/// Who counts the tokens of a request.
enum Counts {
    Nobody {
        guess: u64,
    },
    Provider {
        provider: Arc<KnownProvider>,
        target: Target,
        body: Bytes,
    },
}

impl Models {
    /// About how many tokens a body has.
    pub(crate) async fn estimate(&self, who: &Who, body: &Bytes) -> Result<u64, Fault> {
        let body = body.clone();
        let project = &who.spender.project;
        self.apart(project, body.len() / QUICKER, move || input_tokens(&body))
            .await
    }

    /// How many tokens a request of the Messages wire has: the provider's own count where it counts, else a guess.
    pub async fn count_tokens(&self, who: &Who, body: Bytes) -> Result<u64, Refusal> {
        let estimated = self.estimate(who, &body).await?;
        self.take_rate(who, estimated)?;
        let counted = self.count(who, body).await;
        if let Some(key) = &who.key {
            // Counting costs a request, but no tokens.
            key.correct(estimated, 0);
        }
        counted
    }

    async fn count(&self, who: &Who, body: Bytes) -> Result<u64, Refusal> {
        let project = &who.spender.project;
        let bytes = self.weight(project, &body);
        let (models, of) = (self.clone(), who.clone());
        let decided = self.apart(project, bytes, move || models.who_counts(&of, body));
        let (provider, target, body) = match decided.await?? {
            Counts::Nobody { guess } => return Ok(guess),
            Counts::Provider {
                provider,
                target,
                body,
            } => (provider, target, body),
        };
        let target = &target;
        let call = Call {
            kind: provider.row.kind,
            base_url: &provider.row.base_url,
            path: "/v1/messages/count_tokens",
            headers: &[],
            body,
            stream: false,
        };
        let failed = |error: &atoll_providers::Error| attempts::failed(target, error).0;
        let ready = self.with_key(&provider, call).map_err(|error| failed(&error))?;
        let sent = self
            .inner
            .providers
            .send(ready, project, self.reach_of(project))
            .await;
        let reply = sent.map_err(|error| failed(&error))?;
        if !(200..300).contains(&reply.status) {
            return Err(attempts::refused(target, reply, true).await);
        }
        let body = reply.whole().await.map_err(|error| failed(&error))?;
        let bytes = body.len();
        let reading = move || {
            let value: Value = serde_json::from_slice(&body).unwrap_or_default();
            value["input_tokens"].as_u64()
        };
        let count = self.apart(project, bytes, reading).await?;
        count.ok_or_else(|| {
            let message = format!("provider `{}` did not count", target.provider);
            Fault::new(Code::ProviderFailed, message).into()
        })
    }

    fn who_counts(&self, who: &Who, body: Bytes) -> Result<Counts, Refusal> {
        let request = Request {
            dialect: Dialect::Messages,
            body: self.guarded_body(who, body)?,
            model: None,
            stream: Some(false),
            headers: Vec::new(),
            keep: None,
        };
        let peek = Peek::at(request.dialect, &request.body)?;
        let asked = peek.model.unwrap_or_default();
        self.refuse_unlisted(who, &asked)?;
        let setup = self.setup(&who.spender.project);
        let mut targets = setup
            .catalogue
            .plan(&asked, &Default::default(), |_| Default::default(), 0)?;
        self.refuse_blocked(who, &setup, &asked, &targets)?;
        let target = targets.swap_remove(0);
        let counts = setup
            .providers
            .get(&target.provider)
            .filter(|provider| provider.row.kind == ProviderKind::Anthropic);
        let Some(provider) = counts else {
            let guess = input_tokens(&request.body);
            return Ok(Counts::Nobody { guess });
        };
        let outgoing = Outgoing::prepare(&request, &provider.row, &target, None, false, None)?;
        Ok(Counts::Provider {
            provider: Arc::clone(provider),
            target,
            body: outgoing.body,
        })
    }
}
