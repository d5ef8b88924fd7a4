//! Usage as each wire counts it, taken apart into buckets that do not overlap.

use atoll_types::ModelUsage;
use serde_json::{Value, json};

/// No call uses more; whoever claims it would make sums overflow.
const MOST: u64 = 1_000_000_000_000;

fn at(value: &Value, path: &[&str]) -> u64 {
    let mut value = value;
    for name in path {
        match value.get(name) {
            Some(inner) => value = inner,
            None => return 0,
        }
    }
    // Some write whole numbers as 12.0.
    value
        .as_u64()
        .or_else(|| value.as_f64().map(|number| number.max(0.0) as u64))
        .unwrap_or(0)
        .min(MOST)
}

/// Chat Completions and Embeddings: what is cached and what is audio is part of the prompt, reasoning part of the completion.
pub(crate) fn read_chat(usage: &Value) -> Option<ModelUsage> {
    let usage = usage.as_object().map(|_| usage)?;
    let prompt = at(usage, &["prompt_tokens"]);
    let completion = at(usage, &["completion_tokens"]);
    let cache_read = at(usage, &["prompt_tokens_details", "cached_tokens"]).min(prompt);
    let cache_write = at(usage, &["prompt_tokens_details", "cache_write_tokens"]).min(prompt - cache_read);
    let audio_input =
        at(usage, &["prompt_tokens_details", "audio_tokens"]).min(prompt - cache_read - cache_write);
    let reasoning = at(usage, &["completion_tokens_details", "reasoning_tokens"]).min(completion);
    let audio_output = at(usage, &["completion_tokens_details", "audio_tokens"]).min(completion - reasoning);
    Some(ModelUsage {
        input: prompt - cache_read - cache_write - audio_input,
        cache_read,
        cache_write,
        audio_input,
        output: completion - reasoning - audio_output,
        reasoning,
        audio_output,
        ..ModelUsage::default()
    })
}

pub(crate) fn write_chat(usage: &ModelUsage) -> Value {
    json!({
        "prompt_tokens": usage.total_input(),
        "completion_tokens": usage.total_output(),
        "total_tokens": usage.total(),
        "prompt_tokens_details": {
            "cached_tokens": usage.cache_read,
            "audio_tokens": usage.audio_input,
        },
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning,
            "audio_tokens": usage.audio_output,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    })
}

/// Responses: the same under other names.
pub(crate) fn read_responses(usage: &Value) -> Option<ModelUsage> {
    let usage = usage.as_object().map(|_| usage)?;
    let input = at(usage, &["input_tokens"]);
    let output = at(usage, &["output_tokens"]);
    let cache_read = at(usage, &["input_tokens_details", "cached_tokens"]).min(input);
    let reasoning = at(usage, &["output_tokens_details", "reasoning_tokens"]).min(output);
    Some(ModelUsage {
        input: input - cache_read,
        cache_read,
        output: output - reasoning,
        reasoning,
        ..ModelUsage::default()
    })
}

pub(crate) fn write_responses(usage: &ModelUsage) -> Value {
    json!({
        "input_tokens": usage.total_input(),
        "input_tokens_details": {"cached_tokens": usage.cache_read},
        "output_tokens": usage.total_output(),
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.total(),
    })
}

/// Messages: what is cached comes on top of the input. Streams tell the input first and the output later, each as a sum so
/// far; so what is known already stays where nothing newer is said.
pub(crate) fn read_messages(usage: &Value, before: Option<ModelUsage>) -> Option<ModelUsage> {
    let usage = usage.as_object().map(|_| usage)?;
    let mut read = before.unwrap_or_default();
    let has = |name: &str| usage.get(name).is_some_and(Value::is_number);
    if has("input_tokens") {
        read.input = at(usage, &["input_tokens"]);
    }
    if has("cache_read_input_tokens") {
        read.cache_read = at(usage, &["cache_read_input_tokens"]);
    }
    if has("cache_creation_input_tokens") {
        // Later sums do not repeat how long it is kept for.
        let hour = match usage.get("cache_creation") {
            Some(Value::Object(_)) => at(usage, &["cache_creation", "ephemeral_1h_input_tokens"]),
            _ => read.cache_write_1h,
        };
        let all = at(usage, &["cache_creation_input_tokens"]);
        read.cache_write_1h = hour.min(all);
        read.cache_write = all - read.cache_write_1h;
    }
    if has("output_tokens") {
        let output = at(usage, &["output_tokens"]);
        read.reasoning = at(usage, &["output_tokens_details", "thinking_tokens"]).min(output);
        read.output = output - read.reasoning;
    }
    if let Some(tools) = usage.get("server_tool_use") {
        read.searches = at(tools, &["web_search_requests"]);
    }
    Some(read)
}

pub(crate) fn write_messages(usage: &ModelUsage) -> Value {
    json!({
        "input_tokens": usage.input + usage.audio_input,
        "cache_read_input_tokens": usage.cache_read,
        "cache_creation_input_tokens": usage.cache_write + usage.cache_write_1h,
        "output_tokens": usage.total_output(),
    })
}

/// Gemini: what is cached is part of the prompt; thoughts come on top of the candidates.
pub(crate) fn read_gemini(usage: &Value) -> Option<ModelUsage> {
    let usage = usage.as_object().map(|_| usage)?;
    let prompt = at(usage, &["promptTokenCount"]) + at(usage, &["toolUsePromptTokenCount"]);
    let cache_read = at(usage, &["cachedContentTokenCount"]).min(prompt);
    let audio = |list: &str| -> u64 {
        let parts = usage.get(list).and_then(Value::as_array);
        let audio = parts
            .into_iter()
            .flatten()
            .filter(|part| part["modality"] == "AUDIO");
        audio.map(|part| at(part, &["tokenCount"])).sum()
    };
    let audio_input = audio("promptTokensDetails").min(prompt - cache_read);
    let candidates = at(usage, &["candidatesTokenCount"]);
    let audio_output = audio("candidatesTokensDetails").min(candidates);
    Some(ModelUsage {
        input: prompt - cache_read - audio_input,
        cache_read,
        audio_input,
        output: candidates - audio_output,
        reasoning: at(usage, &["thoughtsTokenCount"]),
        audio_output,
        ..ModelUsage::default()
    })
}

/// Converse: the cache comes on top of the input; what was written for an hour is told apart.
pub(crate) fn read_converse(usage: &Value) -> Option<ModelUsage> {
    let usage = usage.as_object().map(|_| usage)?;
    let written = at(usage, &["cacheWriteInputTokens"]);
    let details = usage.get("cacheDetails").and_then(Value::as_array);
    let for_an_hour = details
        .into_iter()
        .flatten()
        .filter(|detail| detail["ttl"] == "1h");
    let hour = for_an_hour
        .map(|detail| at(detail, &["inputTokens"]))
        .sum::<u64>()
        .min(written);
    Some(ModelUsage {
        input: at(usage, &["inputTokens"]),
        cache_read: at(usage, &["cacheReadInputTokens"]),
        cache_write: written - hour,
        cache_write_1h: hour,
        output: at(usage, &["outputTokens"]),
        ..ModelUsage::default()
    })
}

pub(crate) fn write_ai_sdk(usage: &ModelUsage) -> Value {
    json!({
        "inputTokens": {
            "total": usage.total_input(),
            "noCache": usage.input + usage.audio_input,
            "cacheRead": usage.cache_read,
            "cacheWrite": usage.cache_write + usage.cache_write_1h,
        },
        "outputTokens": {
            "total": usage.total_output(),
            "text": usage.output + usage.audio_output,
            "reasoning": usage.reasoning,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_overlaps_is_taken_apart() {
        let chat = json!({
            "prompt_tokens": 100, "completion_tokens": 50,
            "prompt_tokens_details": {"cached_tokens": 60, "audio_tokens": 5},
            "completion_tokens_details": {"reasoning_tokens": 20},
        });
        let read = read_chat(&chat).unwrap();
        assert_eq!((read.input, read.cache_read, read.audio_input), (35, 60, 5));
        assert_eq!((read.output, read.reasoning), (30, 20));
        let responses = json!({
            "input_tokens": 100, "input_tokens_details": {"cached_tokens": 60},
            "output_tokens": 50, "output_tokens_details": {"reasoning_tokens": 20},
        });
        assert_eq!(read_responses(&responses).unwrap().input, 40);
        let gemini = json!({
            "promptTokenCount": 100, "cachedContentTokenCount": 60, "candidatesTokenCount": 30, "thoughtsTokenCount": 20,
        });
        let read = read_gemini(&gemini).unwrap();
        assert_eq!(
            (read.input, read.cache_read, read.output, read.reasoning),
            (40, 60, 30, 20)
        );
    }

    #[test]
    fn what_comes_on_top_is_added_and_later_sums_win() {
        let first = json!({
            "input_tokens": 40, "cache_read_input_tokens": 60, "cache_creation_input_tokens": 30,
            "cache_creation": {"ephemeral_5m_input_tokens": 10, "ephemeral_1h_input_tokens": 20}, "output_tokens": 1,
        });
        let start = read_messages(&first, None).unwrap();
        let more = json!({"output_tokens": 20, "input_tokens": 40, "cache_creation_input_tokens": 30});
        let more = read_messages(&more, Some(start)).unwrap();
        let end = read_messages(&json!({"output_tokens": 50}), Some(more)).unwrap();
        assert_eq!(
            (
                end.input,
                end.cache_read,
                end.cache_write,
                end.cache_write_1h,
                end.output
            ),
            (40, 60, 10, 20, 50)
        );
        assert_eq!(end.total_input(), 130);
    }

    proptest! {
        /// Whatever a provider claims, no token is counted twice and none is lost.
        #[test]
        fn buckets_add_up_to_the_totals(n in prop::array::uniform6(0_u64..1_000_000)) {
            let [prompt, cached, audio, completion, reasoning, spoken] = n;
            let read = read_chat(&json!({
                "prompt_tokens": prompt, "completion_tokens": completion,
                "prompt_tokens_details": {"cached_tokens": cached, "audio_tokens": audio},
                "completion_tokens_details": {"reasoning_tokens": reasoning, "audio_tokens": spoken},
            })).unwrap();
            prop_assert_eq!(read.total_input(), prompt);
            prop_assert_eq!(read.total_output(), completion);
            prop_assert_eq!(read_chat(&write_chat(&read)).unwrap().total(), prompt + completion);
        }
    }
}
