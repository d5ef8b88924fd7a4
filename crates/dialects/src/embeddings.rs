//! Embeddings: texts in, vectors out.

use atoll_types::ModelUsage;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use crate::json::{Built, Fields, only};
use crate::{Result, Untranslatable, usage};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ask {
    pub texts: Vec<String>,
    pub dimensions: Option<u64>,
    /// The caller wants vectors as base64 of little-endian floats.
    pub packed: bool,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    pub vectors: Vec<Vec<f32>>,
    pub usage: Option<ModelUsage>,
}

/// OpenAI's form.
pub fn read_request(body: &[u8]) -> Result<Ask> {
    let mut fields = Fields::parse(body)?;
    fields.ignore(&["model", "user", "providerOptions"]);
    let packed = fields.text("encoding_format")?.as_deref() == Some("base64");
    let dimensions = fields.count("dimensions")?;
    let texts = match fields.take("input") {
        Some(Value::String(text)) => vec![text],
        Some(Value::Array(items)) => strings("input", items)?,
        _ => return fields.refuse("input", "expected a text or a list of texts"),
    };
    fields.end()?;
    Ok(Ask {
        texts,
        dimensions,
        packed,
    })
}

/// The AI SDK's form.
pub fn read_ai_sdk(body: &[u8]) -> Result<Ask> {
    let mut fields = Fields::parse(body)?;
    fields.ignore(&["providerOptions", "headers"]);
    let texts = strings("values", fields.values("values")?)?;
    let dimensions = fields.count("dimensions")?;
    fields.end()?;
    Ok(Ask {
        texts,
        dimensions,
        packed: false,
    })
}

fn strings(field: &str, items: Vec<Value>) -> Result<Vec<String>> {
    let texts = items.into_iter().map(|item| match item {
        Value::String(text) => Ok(text),
        _ => Err(Untranslatable::new(
            field,
            "tokens are of one model only: send texts",
        )),
    });
    texts.collect()
}

pub fn write_openai(ask: &Ask, model: &str) -> Value {
    Built::default()
        .with("model", model)
        .with("input", ask.texts.clone())
        .with("encoding_format", "float")
        .maybe("dimensions", ask.dimensions)
        .into()
}

pub fn write_gemini(ask: &Ask, model: &str) -> Value {
    let requests: Vec<Value> = ask
        .texts
        .iter()
        .map(|text| {
            Built::default()
                .with("model", format!("models/{model}"))
                .with("content", json!({"parts": [{"text": text}]}))
                .maybe("outputDimensionality", ask.dimensions)
                .into()
        })
        .collect();
    only("requests", requests)
}

pub fn read_openai(body: &[u8]) -> Result<Answer> {
    let value: Value = parse(body)?;
    let Some(data) = value["data"].as_array() else {
        return Err(Untranslatable::new("answer.data", "the provider gave no vectors"));
    };
    let vectors = data
        .iter()
        .map(|item| floats(&item["embedding"]))
        .collect::<Result<_>>()?;
    Ok(Answer {
        vectors,
        usage: usage::read_chat(&value["usage"]),
    })
}

/// Gemini does not tell how many tokens it read.
pub fn read_gemini(body: &[u8]) -> Result<Answer> {
    let value: Value = parse(body)?;
    let Some(data) = value["embeddings"].as_array() else {
        return Err(Untranslatable::new(
            "answer.embeddings",
            "the provider gave no vectors",
        ));
    };
    let vectors = data
        .iter()
        .map(|item| floats(&item["values"]))
        .collect::<Result<_>>()?;
    Ok(Answer { vectors, usage: None })
}

fn parse(body: &[u8]) -> Result<Value> {
    serde_json::from_slice(body).map_err(|error| Untranslatable::new("answer", error.to_string()))
}

fn floats(value: &Value) -> Result<Vec<f32>> {
    let bad = || Untranslatable::new("answer.embedding", "the provider's vector is none");
    match value {
        Value::Array(items) => items
            .iter()
            .map(|item| item.as_f64().map(|f| f as f32).ok_or_else(bad))
            .collect(),
        Value::String(packed) => {
            let bytes = STANDARD.decode(packed).map_err(|_| bad())?;
            let (chunks, rest) = bytes.as_chunks::<4>();
            if rest.is_empty() {
                Ok(chunks.iter().map(|four| f32::from_le_bytes(*four)).collect())
            } else {
                Err(bad())
            }
        }
        _ => Err(bad()),
    }
}

pub fn write_openai_answer(answer: &Answer, model: &str, packed: bool) -> Value {
    let data: Vec<Value> = answer
        .vectors
        .iter()
        .enumerate()
        .map(|(index, vector)| {
            let embedding = if packed {
                let bytes: Vec<u8> = vector.iter().flat_map(|number| number.to_le_bytes()).collect();
                STANDARD.encode(bytes).into()
            } else {
                json!(vector)
            };
            Built::default()
                .with("object", "embedding")
                .with("index", index)
                .with("embedding", embedding)
                .into()
        })
        .collect();
    let tokens = answer.usage.unwrap_or_default().total_input();
    Built::default()
        .with("object", "list")
        .with("data", data)
        .with("model", model)
        .with("usage", json!({"prompt_tokens": tokens, "total_tokens": tokens}))
        .into()
}

pub fn write_ai_sdk_answer(answer: &Answer, gateway: &Value) -> Value {
    Built::default()
        .with("embeddings", json!(answer.vectors))
        .maybe(
            "usage",
            answer.usage.map(|usage| json!({"tokens": usage.total_input()})),
        )
        .with("warnings", json!([]))
        .with("providerMetadata", json!({"gateway": gateway}))
        .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_survive_being_packed() {
        let answer = Answer {
            vectors: vec![vec![0.5, -1.25], vec![3.0, 0.1]],
            usage: None,
        };
        for packed in [true, false] {
            let wire = write_openai_answer(&answer, "m", packed).to_string();
            assert_eq!(read_openai(wire.as_bytes()).unwrap().vectors, answer.vectors);
        }
    }

    #[test]
    fn tokens_are_refused_by_name() {
        let refused = read_request(br#"{"model":"m","input":[[1,2]]}"#).unwrap_err();
        assert_eq!(refused.field, "input");
        let ask = read_request(br#"{"model":"m","input":"a","encoding_format":"base64"}"#).unwrap();
        assert_eq!((ask.texts.len(), ask.packed), (1, true));
    }
}
