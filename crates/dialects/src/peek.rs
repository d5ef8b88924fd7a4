//! The few fields of a request that a gateway has to know, found in the raw bytes, and changes that touch nothing else.

use std::ops::Range;

use bytes::Bytes;
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::Dialect;
use crate::demand::{self, Demand};
use crate::tree::{Fields, Node};

/// What every wire's request says somewhere at its top.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Peek {
    pub model: Option<String>,
    pub stream: bool,
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
    /// What it may cost.
    pub demand: Demand,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the body is not a JSON object as this route expects it: {0}")]
pub struct PeekError(pub(crate) String);

/// Changes to a body that goes on as it came otherwise.
#[derive(Debug, Clone, Copy, Default)]
pub struct Rewrite<'a> {
    pub model: Option<&'a str>,
    /// Chat Completions: have the stream end with the usage.
    pub ask_usage: bool,
    /// A field and its value that limit the answer, where the request does not.
    pub limit: Option<(&'static str, u64)>,
    /// Take out what was said to the gateway alone.
    pub strip: bool,
}

/// Fields as spans of the body. One that is `null` is there all the same: a second one beside it would be a trap.
#[derive(Deserialize)]
struct Spans<'a> {
    #[serde(borrow, default, deserialize_with = "present")]
    model: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "present")]
    stream_options: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "present")]
    max_tokens: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "present")]
    max_output_tokens: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "present", rename = "providerOptions")]
    provider_options: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "present")]
    provider: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "present")]
    models: Option<&'a RawValue>,
}

fn present<'de: 'a, 'a, D: serde::Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<&'a RawValue>, D::Error> {
    <&RawValue>::deserialize(deserializer).map(Some)
}

impl Peek {
    /// Looks at a body, and refuses one that others may read differently.
    pub fn at(dialect: Dialect, body: &[u8]) -> Result<Self, PeekError> {
        let fields = Fields::parse(body)?;
        let known: Vec<&str> = demand::known(dialect).collect();
        fields.refuse_other_spellings(&known)?;
        let text = |name: &str| match fields.get(name) {
            None => Ok(None),
            // Of a long text only the beginning is kept, and the provider would read all of it.
            Some(Node::Text(text)) if text.start.len() < text.len => {
                Err(PeekError(format!("`{name}` is too long")))
            }
            Some(Node::Text(text)) => Ok(Some(text.start.clone().into_owned())),
            Some(_) => Err(PeekError(format!("`{name}` is not a string"))),
        };
        let wants_usage = match fields.get("stream_options") {
            None => false,
            Some(Node::Object(options)) => options.flag("include_usage")?.unwrap_or(false),
            Some(_) => return Err(PeekError("`stream_options` is not an object".into())),
        };
        let models = match fields.get("models") {
            None => Vec::new(),
            Some(Node::List(names)) => names
                .iter()
                .map(|name| match name {
                    Node::Text(text) if text.start.len() == text.len => Ok(text.start.clone().into_owned()),
                    _ => Err(PeekError("`models` is not a list of names".into())),
                })
                .collect::<Result<_, _>>()?,
            Some(_) => return Err(PeekError("`models` is not a list of names".into())),
        };
        let options = fields.object("providerOptions");
        Ok(Self {
            model: text("model")?,
            stream: fields.flag("stream")?.unwrap_or(false),
            service_tier: text("service_tier")?,
            wants_usage,
            gateway: options
                .and_then(|options| options.get("gateway"))
                .map(Node::to_value),
            provider: fields.get("provider").map(Node::to_value),
            models,
            demand: Demand::of(dialect, &fields, body.len())?,
        })
    }
}

impl Rewrite<'_> {
    /// The body with the changes, and every other byte where it was.
    pub fn apply(&self, body: &Bytes) -> Result<Bytes, PeekError> {
        let body = if self.strip { &strip(body)? } else { body };
        let spans: Spans<'_> = serde_json::from_slice(body).map_err(|error| PeekError(error.to_string()))?;
        let mut edits: Vec<(Range<usize>, Vec<u8>)> = Vec::new();
        // Right behind the brace that opens the object; a request has other fields, so a comma follows.
        let front = body.iter().position(|byte| *byte == b'{').map_or(0, |at| at + 1);
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
                    edits.push((
                        front..front,
                        br#""stream_options":{"include_usage":true},"#.to_vec(),
                    ));
                }
            }
        }
        if let Some((name, most)) = self.limit {
            let there = match name {
                "max_tokens" => spans.max_tokens,
                "max_output_tokens" => spans.max_output_tokens,
                _ => return Err(PeekError(format!("`{name}` limits nothing"))),
            };
            match there {
                Some(raw) => edits.push((span(body, raw), most.to_string().into_bytes())),
                None => edits.push((front..front, format!("\"{name}\":{most},").into_bytes())),
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
        // A second one would stand beside the first, and a provider would mind the last.
        assert_eq!(
            rewrite(
                r#"{"a":1,"stream_options":null,"max_tokens":null}"#,
                Rewrite {
                    limit: Some(("max_tokens", 9)),
                    ..usage
                }
            ),
            r#"{"a":1,"stream_options":{"include_usage":true},"max_tokens":9}"#
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
            assert!(Peek::at(Dialect::Chat, body.as_bytes()).is_err(), "{body}");
        }
    }

    proptest! {
        #[test]
        fn rewriting_keeps_the_rest(fields in prop::collection::btree_map("[a-z]{1,3}", 0_i32..100, 0..6), at in 0_usize..6) {
            let mut parts: Vec<String> = fields.iter().map(|(name, value)| format!("\"{name}\" : {value}")).collect();
            parts.insert(at.min(parts.len()), r#""model":"x""#.into());
            parts.insert(at.min(parts.len()), r#""providerOptions" :{"gateway":{"a":[1]}}"#.into());
            let body = format!("{{{}}}", parts.join(" , "));
            let written = rewrite(&body, Rewrite { model: Some("y"), ask_usage: true, limit: Some(("max_tokens", 5)), strip: true });
            let value: Value = serde_json::from_str(&written).unwrap();
            prop_assert_eq!(value["model"].as_str(), Some("y"));
            prop_assert_eq!(value["max_tokens"].as_i64(), Some(5));
            prop_assert!(value.get("providerOptions").is_none());
            for (name, number) in &fields {
                prop_assert_eq!(value[name].as_i64(), Some(i64::from(*number)));
            }
        }
    }
}
