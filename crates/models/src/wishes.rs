//! What requests ask of a gateway beside the model, in the spellings of the AI SDK and of OpenRouter.
//!
//! Both let a gateway ignore what it does not know. What a caller relies on (that nothing is kept or learned from, that its
//! own key is used) is refused rather than ignored.

use atoll_dialects::Peek;
use atoll_gateway_core::{Sort, Wishes};
use atoll_types::{Code, Fault};
use serde_json::Value;

#[derive(Debug, Default, PartialEq)]
pub(crate) struct Asked {
    pub(crate) wishes: Wishes,
    pub(crate) tags: Vec<String>,
    pub(crate) user: Option<String>,
}

const MOST_NAMES: usize = 20;
const MOST_TAGS: usize = 20;

pub(crate) fn read(peek: &Peek) -> Result<Asked, Fault> {
    let mut asked = Asked::default();
    asked
        .wishes
        .fallbacks
        .extend(peek.models.iter().take(MOST_NAMES).cloned());
    if let Some(provider) = &peek.provider {
        asked.wishes.order = names(provider, "order")?;
        asked.wishes.only = names(provider, "only")?;
        asked.wishes.ignore = names(provider, "ignore")?;
        asked.wishes.sort = match provider["sort"].as_str() {
            Some("price") => Some(Sort::Cost),
            Some("latency" | "throughput") => Some(Sort::Latency),
            _ => None,
        };
        if provider["data_collection"] == "deny" || provider["zdr"] == true {
            return Err(cannot_promise("provider.data_collection"));
        }
    }
    if let Some(gateway) = &peek.gateway {
        asked.wishes.order = names(gateway, "order")?;
        asked.wishes.only = names(gateway, "only")?;
        asked.wishes.fallbacks.extend(names(gateway, "models")?);
        asked.wishes.sort = match gateway["sort"].as_str() {
            Some("cost") => Some(Sort::Cost),
            Some("ttft" | "tps") => Some(Sort::Latency),
            _ => None,
        };
        asked.tags = names(gateway, "tags")?;
        asked.tags.truncate(MOST_TAGS);
        asked.user = gateway["user"]
            .as_str()
            .map(|user| user.chars().take(200).collect());
        for promise in ["zeroDataRetention", "disallowPromptTraining"] {
            if gateway[promise] == true {
                return Err(cannot_promise(promise));
            }
        }
        for field in ["byok", "serviceTier"] {
            if !gateway[field].is_null() {
                return Err(Fault::new(
                    Code::GatewayOptionUnsupported,
                    format!("`providerOptions.gateway.{field}` is not supported by this gateway"),
                ));
            }
        }
    }
    Ok(asked)
}

fn cannot_promise(field: &str) -> Fault {
    Fault::new(
        Code::GatewayOptionUnsupported,
        format!("`{field}` is a promise of the provider's that this gateway cannot check"),
    )
    .hint("choose providers that promise it with `only`, and leave this out")
}

fn names(value: &Value, field: &str) -> Result<Vec<String>, Fault> {
    match &value[field] {
        Value::Null => Ok(Vec::new()),
        Value::Array(items) if items.len() <= MOST_NAMES => items
            .iter()
            .map(|item| match item.as_str() {
                Some(text) if text.len() <= 200 => Ok(text.to_owned()),
                _ => Err(Fault::new(
                    Code::GatewayOptionInvalid,
                    format!("`{field}` is a list of short names"),
                )),
            })
            .collect(),
        _ => Err(Fault::new(
            Code::GatewayOptionInvalid,
            format!("`{field}` is a list of at most {MOST_NAMES} names"),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peek(body: &str) -> Peek {
        Peek::at(atoll_dialects::Dialect::Chat, body.as_bytes()).unwrap()
    }

    #[test]
    fn both_spellings_are_read() {
        let asked = read(&peek(
            r#"{"models":["b"],"provider":{"order":["x"],"ignore":["y"],"sort":"price"}}"#,
        ))
        .unwrap();
        assert_eq!(asked.wishes.fallbacks, ["b"]);
        assert_eq!(
            (asked.wishes.order, asked.wishes.ignore),
            (vec!["x".into()], vec!["y".into()])
        );
        assert_eq!(asked.wishes.sort, Some(Sort::Cost));
        let body = r#"{"providerOptions":{"gateway":{"only":["x"],"models":["c"],"sort":"ttft","tags":["t"],"user":"u","new":1}}}"#;
        let asked = read(&peek(body)).unwrap();
        assert_eq!(
            (asked.wishes.only, asked.wishes.fallbacks),
            (vec!["x".into()], vec!["c".into()])
        );
        assert_eq!(
            (asked.tags, asked.user.as_deref()),
            (vec!["t".to_owned()], Some("u"))
        );
    }

    #[test]
    fn promises_are_not_made_lightly() {
        for body in [
            r#"{"providerOptions":{"gateway":{"zeroDataRetention":true}}}"#,
            r#"{"providerOptions":{"gateway":{"byok":{"openai":[]}}}}"#,
            r#"{"provider":{"data_collection":"deny"}}"#,
            r#"{"provider":{"order":"x"}}"#,
        ] {
            assert!(read(&peek(body)).is_err(), "{body}");
        }
    }
}
