//! What a provider is sent for a call: the client's own bytes where both speak the same wire, a translation where not.

use atoll_dialects::{
    Demand, Dialect, Peek, Rewrite, Unpriced, Untranslatable, ai_sdk, chat, converse, embeddings, gemini,
    messages, responses, unpriced_header,
};
use atoll_gateway_core::{Price, Target};
use atoll_store::ModelProviderRow;
use atoll_types::ProviderKind;
use bytes::Bytes;
use serde_json::Value;

use crate::Request;
use crate::faults::Refusal;

#[derive(Debug)]
pub(crate) struct Outgoing {
    pub(crate) path: String,
    pub(crate) body: Bytes,
    /// The wire of the provider; where it is the client's, the answer is passed on untouched.
    pub(crate) speaks: Dialect,
}

impl Outgoing {
    /// `limit`: tokens that the answer is to have at most where nothing else limits it.
    pub(crate) fn prepare(
        request: &Request,
        provider: &ModelProviderRow,
        target: &Target,
        price: Option<&Price>,
        stream: bool,
        limit: Option<u64>,
    ) -> Result<Self, Refusal> {
        let speaks = wire_between(request.dialect, provider)?;
        // Where the table limits the answer nobody else has to, and where it costs nothing nobody wants to.
        let limit = limit.filter(|_| {
            price.is_some_and(|price| price.max_output.is_none() && price.charges_output())
                && !matches!(request.dialect, Dialect::Embeddings | Dialect::AiSdkEmbeddings)
        });
        if speaks == request.dialect {
            let limit = match limit {
                Some(most)
                    if Peek::at(request.dialect, &request.body)?
                        .demand
                        .max_output
                        .is_none() =>
                {
                    Some(most)
                }
                _ => None,
            };
            let field = if speaks == Dialect::Responses {
                "max_output_tokens"
            } else {
                "max_tokens"
            };
            let rewrite = Rewrite {
                model: Some(&target.model),
                ask_usage: speaks == Dialect::Chat && stream,
                limit: limit.map(|most| (field, most)),
                strip: true,
            };
            return Ok(Self {
                path: path(request.dialect, speaks, target, stream)?,
                body: rewrite.apply(&request.body)?,
                speaks,
            });
        }
        let body = translate(request, speaks, target, price, stream, limit)?;
        Ok(Self {
            path: path(request.dialect, speaks, target, stream)?,
            body: body.to_string().into(),
            speaks,
        })
    }
}

/// What a provider is asked for that costs, read from what it will get: a translation takes some of what the client wrote and
/// leaves the rest. With it the translation, where one was made. `asked`: what stands in the client's own bytes. `limit`: as for
/// [`Outgoing::prepare`].
pub(crate) fn demand(
    request: &Request,
    asked: &Demand,
    provider: &ModelProviderRow,
    target: &Target,
    price: &Price,
    stream: bool,
    limit: u64,
) -> Result<(Demand, Option<Outgoing>), Refusal> {
    let (mut demand, mut made) = (asked.clone(), None);
    if wire_between(request.dialect, provider) == Ok(request.dialect) {
        let mut headers = request.headers.iter();
        let beta = headers.find_map(|(name, value)| unpriced_header(name, value, price.max_input));
        demand.unpriced = demand.unpriced.or(beta);
    } else if let Ok(sent) = Outgoing::prepare(request, provider, target, Some(price), stream, Some(limit)) {
        if matches!(request.dialect, Dialect::Embeddings | Dialect::AiSdkEmbeddings) {
            demand.text = demand.text.max(sent.body.len() as u64);
        } else {
            demand = Peek::at(sent.speaks, &sent.body)?.demand;
            // Its names are those that the client knows.
            demand.unpriced = asked.unpriced.clone().or(demand.unpriced);
        }
        made = Some(sent);
    }
    // What cannot be translated is sent to nobody.
    if demand.linked && target.model.to_ascii_lowercase().contains("gemini") {
        demand.unpriced = demand.unpriced.or_else(|| {
            Some(Unpriced {
                field: "messages".into(),
                why: "behind the address of a picture this model finds films, too; send the picture itself"
                    .into(),
            })
        });
    }
    Ok((demand, made))
}

/// The wire on which to ask a provider for what was asked on another.
pub(crate) fn wire_between(asked: Dialect, provider: &ModelProviderRow) -> Result<Dialect, Untranslatable> {
    Ok(match (provider.kind, asked) {
        (ProviderKind::Openai | ProviderKind::Azure, Dialect::Embeddings | Dialect::AiSdkEmbeddings) => {
            Dialect::Embeddings
        }
        (ProviderKind::Gemini, _) => Dialect::Gemini,
        (ProviderKind::Anthropic | ProviderKind::Bedrock, Dialect::Embeddings | Dialect::AiSdkEmbeddings) => {
            return Err(Untranslatable::new("model", "its provider makes no embeddings"));
        }
        (ProviderKind::Anthropic, _) => Dialect::Messages,
        (ProviderKind::Bedrock, _) => Dialect::Converse,
        (ProviderKind::Openai | ProviderKind::Azure, Dialect::Responses) if provider.responses => {
            Dialect::Responses
        }
        (ProviderKind::Openai | ProviderKind::Azure, _) => Dialect::Chat,
    })
}

fn translate(
    request: &Request,
    speaks: Dialect,
    target: &Target,
    price: Option<&Price>,
    stream: bool,
    limit: Option<u64>,
) -> Result<Value, Untranslatable> {
    let body = &request.body;
    let mut ask = match request.dialect {
        Dialect::Embeddings | Dialect::AiSdkEmbeddings => {
            let ask = match request.dialect {
                Dialect::AiSdkEmbeddings => embeddings::read_ai_sdk(body)?,
                _ => embeddings::read_request(body)?,
            };
            return Ok(match speaks {
                Dialect::Gemini => embeddings::write_gemini(&ask, &target.model),
                _ => embeddings::write_openai(&ask, &target.model),
            });
        }
        Dialect::Responses => responses::read_request(body)?,
        Dialect::Messages => messages::read_request(body)?,
        Dialect::AiSdk => ai_sdk::read_request(body, stream)?,
        Dialect::Chat | Dialect::Gemini | Dialect::Converse => chat::read_request(body)?,
    };
    ask.stream = stream;
    ask.max_output = ask.max_output.or(limit);
    let most_output = price.and_then(|price| price.max_output);
    match speaks {
        Dialect::Messages => messages::write_request(&ask, &target.model, most_output),
        Dialect::Converse => converse::write_request(&ask, &target.model, most_output),
        Dialect::Gemini => gemini::write_request(&ask),
        _ => chat::write_request(&ask, &target.model),
    }
}

fn path(asked: Dialect, speaks: Dialect, target: &Target, stream: bool) -> Result<String, Untranslatable> {
    Ok(match speaks {
        Dialect::Responses => "/responses".into(),
        Dialect::Embeddings | Dialect::AiSdkEmbeddings => "/embeddings".into(),
        Dialect::Messages => "/v1/messages".into(),
        Dialect::Chat | Dialect::AiSdk => "/chat/completions".into(),
        Dialect::Converse => {
            let method = if stream { "converse-stream" } else { "converse" };
            format!("/model/{}/{method}", encoded(&target.model))
        }
        Dialect::Gemini => {
            // The name is part of the address there.
            let model = &target.model;
            if !model
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
                || model.contains("..")
            {
                return Err(Untranslatable::new(
                    "model",
                    "its provider knows names of letters, digits, `-`, `_` and `.` only",
                ));
            }
            let method = match (asked, stream) {
                (Dialect::Embeddings | Dialect::AiSdkEmbeddings, _) => "batchEmbedContents",
                (_, true) => "streamGenerateContent?alt=sse",
                (_, false) => "generateContent",
            };
            format!("/models/{model}:{method}")
        }
    })
}

/// A name as one part of a path; those at Amazon have colons and slashes in them.
fn encoded(name: &str) -> String {
    let mut out = String::with_capacity(name.len());
    for byte in name.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => out.push(char::from(byte)),
            other => out.push_str(&format!("%{other:02X}")),
        }
    }
    out
}
