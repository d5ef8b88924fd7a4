//! The few fields of a request that a gateway has to know, found in the raw bytes, and changes that touch nothing else.

use std::borrow::Cow;
use std::ops::Range;

use bytes::Bytes;
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

/// What every wire's request says somewhere at its top.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Peek {
    pub model: Option<String>,
    pub stream: bool,
    pub max_output: Option<u64>,
    /// How many answers are wanted at once, each as long as that.
    pub choices: u64,
    /// Other prices are to be paid for another speed.
    pub service_tier: Option<String>,
    /// A Chat Completions client asked to be told the usage at the end of the stream.
    pub wants_usage: bool,
    /// `providerOptions.gateway`: what is asked of a gateway in the AI SDK's spelling.
    pub gateway: Option<Value>,
    /// `provider`: the same in OpenRouter's.
    pub provider: Option<Value>,
    /// `models`: fallbacks in OpenRouter's spelling.
    pub models: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the body is not a JSON object as this route expects it: {0}")]
pub struct PeekError(String);

/// Changes to a body that goes on as it came otherwise.
#[derive(Debug, Clone, Copy, Default)]
pub struct Rewrite<'a> {
    pub model: Option<&'a str>,
    /// Chat Completions: have the stream end with the usage.
    pub ask_usage: bool,
    /// Take out what was said to the gateway alone.
    pub strip: bool,
}

#[derive(Deserialize)]
struct Top<'a> {
    #[serde(borrow)]
    model: Option<Cow<'a, str>>,
    stream: Option<bool>,
    max_tokens: Option<u64>,
    max_completion_tokens: Option<u64>,
    max_output_tokens: Option<u64>,
    #[serde(rename = "maxOutputTokens")]
    camel_max: Option<u64>,
    n: Option<u64>,
    service_tier: Option<String>,
    stream_options: Option<StreamOptions>,
    #[serde(rename = "providerOptions")]
    provider_options: Option<ProviderOptions>,
    provider: Option<Value>,
    models: Option<Vec<String>>,
}

#[derive(Deserialize)]
struct StreamOptions {
    include_usage: Option<bool>,
}

#[derive(Deserialize)]
struct ProviderOptions {
    gateway: Option<Value>,
}

/// The same fields as spans of the body.
#[derive(Deserialize)]
struct Spans<'a> {
    #[serde(borrow)]
    model: Option<&'a RawValue>,
    #[serde(borrow)]
    stream_options: Option<&'a RawValue>,
    #[serde(borrow, rename = "providerOptions")]
    provider_options: Option<&'a RawValue>,
    #[serde(borrow)]
    provider: Option<&'a RawValue>,
    #[serde(borrow)]
    models: Option<&'a RawValue>,
}

impl Peek {
    pub fn at(body: &[u8]) -> Result<Self, PeekError> {
        let top: Top<'_> = serde_json::from_slice(body).map_err(|error| PeekError(error.to_string()))?;
        Ok(Self {
            model: top.model.map(Cow::into_owned),
            stream: top.stream.unwrap_or(false),
            max_output: top
                .max_completion_tokens
                .or(top.max_tokens)
                .or(top.max_output_tokens)
                .or(top.camel_max),
            choices: top.n.unwrap_or(1).max(1),
            service_tier: top.service_tier,
            wants_usage: top
                .stream_options
                .and_then(|options| options.include_usage)
                .unwrap_or(false),
            gateway: top.provider_options.and_then(|options| options.gateway),
            provider: top.provider,
            models: top.models.unwrap_or_default(),
        })
    }
}

impl Rewrite<'_> {
    /// The body with the changes, and every other byte where it was.
    pub fn apply(&self, body: &Bytes) -> Result<Bytes, PeekError> {
        let body = if self.strip { &strip(body)? } else { body };
        let spans: Spans<'_> = serde_json::from_slice(body).map_err(|error| PeekError(error.to_string()))?;
        let mut edits: Vec<(Range<usize>, Vec<u8>)> = Vec::new();
        if let (Some(model), Some(raw)) = (self.model, spans.model) {
            let text = Value::from(model).to_string();
            if raw.get() != text {
                edits.push((span(body, raw), text.into_bytes()));
            }
        }
        if self.ask_usage {
            match spans.stream_options {
                Some(raw) => {
                    let mut options: Value =
                        serde_json::from_str(raw.get()).map_err(|error| PeekError(error.to_string()))?;
                    if options["include_usage"] != true && (options.is_object() || options.is_null()) {
                        options["include_usage"] = true.into();
                        edits.push((span(body, raw), options.to_string().into_bytes()));
                    }
                }
                None => {
                    // Right behind the brace that opens the object; a request has other fields, so a comma follows.
                    let at = body.iter().position(|byte| *byte == b'{').map_or(0, |at| at + 1);
                    edits.push((at..at, br#""stream_options":{"include_usage":true},"#.to_vec()));
                }
            }
        }
        if edits.is_empty() {
            return Ok(body.clone());
        }
        edits.sort_by_key(|(range, _)| range.start);
        let mut out = Vec::with_capacity(body.len() + 64);
        let mut at = 0;
        for (range, text) in edits {
            out.extend_from_slice(&body[at..range.start]);
            out.extend_from_slice(&text);
            at = range.end;
        }
        out.extend_from_slice(&body[at..]);
        Ok(out.into())
    }
}

/// Takes the fields out one after the other: two side by side share a comma.
fn strip(body: &Bytes) -> Result<Bytes, PeekError> {
    let mut body = body.clone();
    loop {
        let spans: Spans<'_> = serde_json::from_slice(&body).map_err(|error| PeekError(error.to_string()))?;
        let own = [
            ("providerOptions", spans.provider_options),
            ("provider", spans.provider),
            ("models", spans.models),
        ];
        let Some((name, raw)) = own.into_iter().find_map(|(name, raw)| Some((name, raw?))) else {
            return Ok(body);
        };
        let range = field(&body, name, span(&body, raw))?;
        body = [&body[..range.start], &body[range.end..]].concat().into();
    }
}

/// Where in the body a value stands, which was borrowed from it.
fn span(body: &[u8], raw: &RawValue) -> Range<usize> {
    let start = raw.get().as_ptr().addr() - body.as_ptr().addr();
    start..start + raw.get().len()
}

/// A field with its name and one of the commas around it.
fn field(body: &[u8], name: &str, value: Range<usize>) -> Result<Range<usize>, PeekError> {
    let odd = || {
        PeekError(format!(
            "the name of `{name}` is written in a way that cannot be taken out"
        ))
    };
    let before = body[..value.start]
        .trim_ascii_end()
        .strip_suffix(b":")
        .ok_or_else(odd)?;
    let before = before.trim_ascii_end().strip_suffix(b"\"").ok_or_else(odd)?;
    let before = before.strip_suffix(name.as_bytes()).ok_or_else(odd)?;
    let start = before.strip_suffix(b"\"").ok_or_else(odd)?.len();
    let behind = body[value.end..].trim_ascii_start();
    if behind.first() == Some(&b',') {
        return Ok(start..body.len() - behind.len() + 1);
    }
    let front = body[..start].trim_ascii_end();
    let start = if front.last() == Some(&b',') {
        front.len() - 1
    } else {
        start
    };
    Ok(start..value.end)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn rewrite(body: &str, rewrite: Rewrite<'_>) -> String {
        let bytes = rewrite.apply(&Bytes::copy_from_slice(body.as_bytes())).unwrap();
        String::from_utf8(bytes.to_vec()).unwrap()
    }

    #[test]
    fn nothing_but_the_named_fields_changes() {
        let body = r#"{ "messages": [{"model":"no"}],  "model" : "a" ,"x":1.50}"#;
        let model = Rewrite {
            model: Some("b\"c"),
            ..Rewrite::default()
        };
        assert_eq!(
            rewrite(body, model),
            r#"{ "messages": [{"model":"no"}],  "model" : "b\"c" ,"x":1.50}"#
        );
        assert_eq!(
            rewrite(
                body,
                Rewrite {
                    model: Some("a"),
                    ..Rewrite::default()
                }
            ),
            body
        );
        let usage = Rewrite {
            ask_usage: true,
            ..Rewrite::default()
        };
        assert!(rewrite(body, usage).starts_with(r#"{"stream_options":{"include_usage":true}, "messages""#));
        assert_eq!(
            rewrite(r#"{"a":1,"stream_options":{"include_usage":false,"z":2}}"#, usage),
            r#"{"a":1,"stream_options":{"include_usage":true,"z":2}}"#
        );
    }

    #[test]
    fn what_is_for_the_gateway_is_taken_out() {
        let strip = Rewrite {
            strip: true,
            ..Rewrite::default()
        };
        for (body, left) in [
            (r#"{"models":["a"],"x":1}"#, r#"{"x":1}"#),
            (r#"{"x":1, "provider": {"order":[]} }"#, r#"{"x":1 }"#),
            (
                r#"{"models":["a"],"provider":{},"providerOptions":{"gateway":{}},"x":1}"#,
                r#"{"x":1}"#,
            ),
            (r#"{"x":1,"models":[],"provider":{}}"#, r#"{"x":1}"#),
        ] {
            let stripped = rewrite(body, strip);
            let value: Value =
                serde_json::from_str(&stripped).unwrap_or_else(|error| panic!("{stripped}: {error}"));
            assert_eq!(value, serde_json::from_str::<Value>(left).unwrap());
        }
    }

    #[test]
    fn what_is_no_object_or_names_a_field_twice_is_refused() {
        for body in [
            "",
            "[]",
            "{",
            r#"{"model":1}"#,
            r#"{"model":"a","model":"b"}"#,
            r#"{"stream":"yes"}"#,
        ] {
            assert!(Peek::at(body.as_bytes()).is_err(), "{body}");
        }
    }

    proptest! {
        #[test]
        fn rewriting_keeps_the_rest(fields in prop::collection::btree_map("[a-z]{1,3}", 0_i32..100, 0..6), at in 0_usize..6) {
            let mut parts: Vec<String> = fields.iter().map(|(name, value)| format!("\"{name}\" : {value}")).collect();
            parts.insert(at.min(parts.len()), r#""model":"x""#.into());
            parts.insert(at.min(parts.len()), r#""providerOptions" :{"gateway":{"a":[1]}}"#.into());
            let body = format!("{{{}}}", parts.join(" , "));
            let written = rewrite(&body, Rewrite { model: Some("y"), ask_usage: true, strip: true });
            let value: Value = serde_json::from_str(&written).unwrap();
            prop_assert_eq!(value["model"].as_str(), Some("y"));
            prop_assert!(value.get("providerOptions").is_none());
            for (name, number) in &fields {
                prop_assert_eq!(value[name].as_i64(), Some(i64::from(*number)));
            }
        }
    }
}
