//! One conversation with everything in it, on every wire and in every direction. Requests are compared after a trip to the
//! neutral form and out again; streams are read, compared with the whole answer, and written on every other wire.

use atoll_types::ModelUsage;
use serde_json::{Value, json};

use crate::sse::Splitter;
use crate::*;

const PIXEL: &str = "iVBORw0KGgo=";

fn tool() -> Value {
    json!({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]})
}

fn chat_request() -> Value {
    json!({
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [
                {"type": "text", "text": "What is this?"},
                {"type": "image_url", "image_url": {"url": format!("data:image/png;base64,{PIXEL}")}},
            ]},
            {"role": "assistant", "content": "A pixel.", "reasoning_details": [
                {"type": "reasoning.text", "text": "I look.", "signature": "c2ln"},
            ], "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{\"city\":\"Bern\"}"}},
            ]},
            {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        ],
        "tools": [{"type": "function", "function": {"name": "weather", "description": "The weather", "parameters": tool()}}],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "parallel_tool_calls": false,
        "max_completion_tokens": 9000,
        "temperature": 0.5,
        "stop": ["END"],
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": tool(), "strict": true}},
        "stream": true,
    })
}

fn messages_request() -> Value {
    json!({
        "model": "m",
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [
            {"role": "user", "content": [
                {"type": "text", "text": "What is this?"},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}},
            ]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "I look.", "signature": "c2ln"},
                {"type": "text", "text": "A pixel."},
                {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Bern"}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "sunny"}]},
            ]},
        ],
        "tools": [{"name": "weather", "description": "The weather", "input_schema": tool()}],
        "tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": true},
        "max_tokens": 9000,
        "temperature": 0.5,
        "stop_sequences": ["END"],
        "output_config": {"format": {"type": "json_schema", "schema": closed_tool()}},
        "stream": true,
    })
}

fn closed_tool() -> Value {
    let mut schema = tool();
    schema["additionalProperties"] = false.into();
    schema
}

fn responses_request() -> Value {
    json!({
        "model": "m",
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": [
                {"type": "input_text", "text": "What is this?"},
                {"type": "input_image", "image_url": format!("data:image/png;base64,{PIXEL}"), "detail": "auto"},
            ]},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "I look."}], "encrypted_content": "c2ln"},
            {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
             "content": [{"type": "output_text", "text": "A pixel.", "annotations": []}]},
            {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "weather", "arguments": "{\"city\":\"Bern\"}"},
            {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
        ],
        "tools": [{"type": "function", "name": "weather", "description": "The weather", "parameters": tool()}],
        "tool_choice": {"type": "function", "name": "weather"},
        "parallel_tool_calls": false,
        "max_output_tokens": 9000,
        "temperature": 0.5,
        "text": {"format": {"type": "json_schema", "name": "answer", "schema": tool(), "strict": true}},
        "store": false,
        "include": ["reasoning.encrypted_content"],
        "stream": true,
    })
}

fn ai_sdk_request() -> Value {
    json!({
        "prompt": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [
                {"type": "text", "text": "What is this?"},
                {"type": "file", "mediaType": "image/png", "data": {"type": "data", "data": PIXEL}},
            ]},
            {"role": "assistant", "content": [
                {"type": "reasoning", "text": "I look.", "providerOptions": {"anthropic": {"signature": "c2ln"}}},
                {"type": "text", "text": "A pixel."},
                {"type": "tool-call", "toolCallId": "call_1", "toolName": "weather", "input": {"city": "Bern"}},
            ]},
            {"role": "tool", "content": [
                {"type": "tool-result", "toolCallId": "call_1", "toolName": "weather", "output": {"type": "text", "value": "sunny"}},
            ]},
        ],
        "tools": [{"type": "function", "name": "weather", "description": "The weather", "inputSchema": tool()}],
        "toolChoice": {"type": "tool", "toolName": "weather"},
        "maxOutputTokens": 9000,
        "temperature": 0.5,
        "stopSequences": ["END"],
        "responseFormat": {"type": "json", "name": "answer", "schema": tool()},
        "providerOptions": {"gateway": {"order": ["a"]}},
    })
}

fn bytes(value: &Value) -> Vec<u8> {
    value.to_string().into_bytes()
}

/// Every wire reads the conversation as the same thing.
#[test]
fn requests_mean_the_same_on_every_wire() {
    let chat = chat::read_request(&bytes(&chat_request())).unwrap();
    let messages = messages::read_request(&bytes(&messages_request())).unwrap();
    let mut responses = responses::read_request(&bytes(&responses_request())).unwrap();
    let mut sdk = ai_sdk::read_request(&bytes(&ai_sdk_request()), true).unwrap();
    // What a wire has no word for.
    responses.stop.clone_from(&chat.stop);
    sdk.parallel_tools = chat.parallel_tools;
    let strip = |mut ask: Ask| {
        ask.format = Format::Text;
        ask
    };
    assert_eq!(strip(responses), strip(chat.clone()));
    assert_eq!(strip(sdk), strip(chat.clone()));
    assert_eq!(strip(messages), strip(chat));
}

#[test]
fn a_request_survives_the_trip_to_messages_and_back() {
    let ask = chat::read_request(&bytes(&chat_request())).unwrap();
    let written = messages::write_request(&ask, "m", None).unwrap();
    assert_eq!(written, messages_request());
}

#[test]
fn a_request_survives_the_trip_to_chat_and_back() {
    let ask = messages::read_request(&bytes(&messages_request())).unwrap();
    let mut expected = chat_request();
    expected["stream_options"] = json!({"include_usage": true});
    expected["response_format"]["json_schema"]["schema"] = closed_tool();
    // Thinking of another author has no place there.
    expected["messages"][2]
        .as_object_mut()
        .unwrap()
        .remove("reasoning_details");
    assert_eq!(chat::write_request(&ask, "m").unwrap(), expected);
}

#[test]
fn a_request_is_written_for_gemini() {
    let ask = messages::read_request(&bytes(&messages_request())).unwrap();
    let expected = json!({
        "systemInstruction": {"parts": [{"text": "Be brief."}]},
        "contents": [
            {"role": "user", "parts": [{"text": "What is this?"}, {"inlineData": {"mimeType": "image/png", "data": PIXEL}}]},
            {"role": "model", "parts": [
                {"text": "A pixel.", "thoughtSignature": "c2ln"},
                {"functionCall": {"name": "weather", "args": {"city": "Bern"}}},
            ]},
            {"role": "user", "parts": [{"functionResponse": {"name": "weather", "response": {"output": "sunny"}}}]},
        ],
        "tools": [{"functionDeclarations": [{"name": "weather", "description": "The weather", "parametersJsonSchema": tool()}]}],
        "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["weather"]}},
        "generationConfig": {
            "maxOutputTokens": 9000, "temperature": 0.5, "stopSequences": ["END"],
            "responseMimeType": "application/json", "responseJsonSchema": closed_tool(),
        },
    });
    assert_eq!(gemini::write_request(&ask).unwrap(), expected);
}

#[test]
fn a_request_is_written_for_converse() {
    let mut ask = messages::read_request(&bytes(&messages_request())).unwrap();
    ask.parallel_tools = None;
    let expected = json!({
        "system": [{"text": "Be brief."}],
        "messages": [
            {"role": "user", "content": [
                {"text": "What is this?"}, {"image": {"format": "png", "source": {"bytes": PIXEL}}},
            ]},
            {"role": "assistant", "content": [
                {"reasoningContent": {"reasoningText": {"text": "I look.", "signature": "c2ln"}}},
                {"text": "A pixel."},
                {"toolUse": {"toolUseId": "call_1", "name": "weather", "input": {"city": "Bern"}}},
            ]},
            {"role": "user", "content": [
                {"toolResult": {"toolUseId": "call_1", "content": [{"text": "sunny"}], "status": "success"}},
            ]},
        ],
        "toolConfig": {
            "tools": [{"toolSpec": {"name": "weather", "description": "The weather", "inputSchema": {"json": tool()}}}],
            "toolChoice": {"tool": {"name": "weather"}},
        },
        "inferenceConfig": {"maxTokens": 9000, "temperature": 0.5, "stopSequences": ["END"]},
        "outputConfig": {"textFormat": {
            "type": "json_schema", "structure": {"jsonSchema": {"schema": closed_tool().to_string()}},
        }},
    });
    assert_eq!(
        converse::write_request(&ask, "amazon.nova-pro-v1:0", None).unwrap(),
        expected
    );
}

#[test]
fn converse_remembers_and_thinks_as_it_is_told() {
    let request = json!({
        "model": "m", "max_tokens": 9000, "thinking": {"type": "enabled", "budget_tokens": 2000},
        "system": [{"type": "text", "text": "Long.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
        "messages": [{"role": "user", "content": [
            {"type": "text", "text": "Longer.", "cache_control": {"type": "ephemeral"}},
        ]}],
    });
    let ask = messages::read_request(&bytes(&request)).unwrap();
    let written =
        converse::write_request(&ask, "eu.anthropic.claude-sonnet-4-5-20250929-v1:0", None).unwrap();
    assert_eq!(
        written,
        json!({
            "system": [{"text": "Long."}, {"cachePoint": {"type": "default", "ttl": "1h"}}],
            "messages": [{"role": "user", "content": [{"text": "Longer."}, {"cachePoint": {"type": "default"}}]}],
            "inferenceConfig": {"maxTokens": 9000},
            "additionalModelRequestFields": {"thinking": {"type": "enabled", "budget_tokens": 2000}},
        })
    );
    let other = converse::write_request(&ask, "amazon.nova-pro-v1:0", None);
    assert_eq!(other.unwrap_err().field, "thinking");
}

/// A conversation as Bedrock streams it: text and thinking open unannounced, what was used comes last.
fn converse_stream() -> Vec<u8> {
    let events = [
        ("messageStart", json!({"role": "assistant", "p": "abc"})),
        (
            "contentBlockDelta",
            json!({"contentBlockIndex": 0, "delta": {"reasoningContent": {"text": "Let me "}}}),
        ),
        (
            "contentBlockDelta",
            json!({"contentBlockIndex": 0, "delta": {"reasoningContent": {"text": "see."}}}),
        ),
        (
            "contentBlockDelta",
            json!({"contentBlockIndex": 0, "delta": {"reasoningContent": {"signature": "c2ln"}}}),
        ),
        ("contentBlockStop", json!({"contentBlockIndex": 0})),
        (
            "contentBlockDelta",
            json!({"contentBlockIndex": 1, "delta": {"text": "It is "}}),
        ),
        (
            "contentBlockDelta",
            json!({"contentBlockIndex": 1, "delta": {"text": "sunny."}}),
        ),
        ("contentBlockStop", json!({"contentBlockIndex": 1})),
        (
            "contentBlockStart",
            json!({"contentBlockIndex": 2, "start": {"toolUse": {"toolUseId": "call_1", "name": "weather"}}}),
        ),
        (
            "contentBlockDelta",
            json!({"contentBlockIndex": 2, "delta": {"toolUse": {"input": "{\"city\":"}}}),
        ),
        (
            "contentBlockDelta",
            json!({"contentBlockIndex": 2, "delta": {"toolUse": {"input": "\"Bern\"}"}}}),
        ),
        ("contentBlockStop", json!({"contentBlockIndex": 2})),
        (
            "contentBlockStart",
            json!({"contentBlockIndex": 3, "start": {"toolUse": {"toolUseId": "call_2", "name": "weather"}}}),
        ),
        (
            "contentBlockDelta",
            json!({"contentBlockIndex": 3, "delta": {"toolUse": {"input": "{\"city\":\"Basel\"}"}}}),
        ),
        ("contentBlockStop", json!({"contentBlockIndex": 3})),
        ("messageStop", json!({"stopReason": "tool_use"})),
        (
            "metadata",
            json!({
                "usage": {"inputTokens": 10, "outputTokens": 7, "totalTokens": 22, "cacheReadInputTokens": 5},
                "metrics": {"latencyMs": 700},
            }),
        ),
    ];
    let mut wire = Vec::new();
    for (name, payload) in events {
        event_stream::write(&mut wire, name, payload.to_string().as_bytes());
    }
    wire
}

fn read_converse(wire: &[u8]) -> (Vec<Event>, bool) {
    let mut splitter = event_stream::Splitter::default();
    let (mut reader, mut events) = (converse::Reader::default(), Vec::new());
    for chunk in wire.chunks(11) {
        splitter.push(chunk);
        while let Some(raw) = splitter.take().unwrap() {
            reader.read(&raw.data().unwrap(), &mut events).unwrap();
        }
    }
    let ended = reader.end(&mut events);
    (events, ended)
}

#[test]
fn converse_answers_are_read() {
    let (events, ended) = read_converse(&converse_stream());
    assert!(ended);
    assert_eq!(Answer::collect(events), answer());
    let whole = json!({
        "output": {"message": {"role": "assistant", "content": [
            {"reasoningContent": {"reasoningText": {"text": "Let me see.", "signature": "c2ln"}}},
            {"text": "It is sunny."},
            {"toolUse": {"toolUseId": "call_1", "name": "weather", "input": {"city": "Bern"}}},
            {"toolUse": {"toolUseId": "call_2", "name": "weather", "input": {"city": "Basel"}}},
        ]}},
        "stopReason": "tool_use",
        "usage": {"inputTokens": 10, "outputTokens": 7, "totalTokens": 22, "cacheReadInputTokens": 5},
    });
    assert_eq!(converse::read_answer(&bytes(&whole)).unwrap(), answer());
    let written = json!({"inputTokens": 3, "outputTokens": 4, "cacheWriteInputTokens": 10,
        "cacheDetails": [{"ttl": "1h", "inputTokens": 6}, {"ttl": "5m", "inputTokens": 4}]});
    let usage = usage::read_converse(&written).unwrap();
    assert_eq!((usage.input, usage.cache_write, usage.cache_write_1h), (3, 4, 6));
}

#[test]
fn a_converse_stream_that_fails_or_breaks_off_is_noticed() {
    let wire = converse_stream();
    let (_, ended) = read_converse(&wire[..wire.len() / 2]);
    assert!(!ended);
    let mut failing = Vec::new();
    event_stream::write(&mut failing, "throttlingException", br#"{"message":"too many"}"#);
    let (events, ended) = read_converse(&failing);
    assert_eq!((events, ended), (vec![Event::Failed("too many".into())], false));
}

#[test]
fn what_has_no_place_is_refused_by_name() {
    let chat = |field: &str, value: Value| {
        let mut request = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
        request[field] = value;
        chat::read_request(&bytes(&request)).unwrap_err().field
    };
    assert_eq!(chat("logit_bias", json!({"1": 2})), "logit_bias");
    assert_eq!(chat("n", json!(2)), "n");
    assert_eq!(chat("modalities", json!(["audio"])), "modalities");
    assert_eq!(chat("tools", json!([{"type": "web_search"}])), "tools[0].type");
    let responses = |field: &str, value: Value| {
        let mut request = json!({"model": "m", "input": "hi"});
        request[field] = value;
        responses::read_request(&bytes(&request)).unwrap_err().field
    };
    assert_eq!(
        responses("previous_response_id", json!("resp_1")),
        "previous_response_id"
    );
    assert_eq!(
        responses("tools", json!([{"type": "file_search"}])),
        "tools[0].type"
    );
    let computer = json!({"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "computer_20250124", "name": "computer"}]});
    assert_eq!(
        messages::read_request(&bytes(&computer)).unwrap_err().field,
        "tools[0].type"
    );
    for body in [
        "",
        "[]",
        "{\"messages\":[{\"role\":\"user\"}]}",
        "{\"messages\":{}}",
    ] {
        assert!(chat::read_request(body.as_bytes()).is_err(), "{body}");
        assert!(messages::read_request(body.as_bytes()).is_err(), "{body}");
        assert!(ai_sdk::read_request(body.as_bytes(), false).is_err(), "{body}");
    }
}

fn answer() -> Answer {
    Answer {
        parts: vec![
            Part::Thinking {
                text: "Let me see.".into(),
                signature: Some("c2ln".into()),
            },
            Part::text("It is sunny."),
            Part::Call {
                id: "call_1".into(),
                name: "weather".into(),
                arguments: r#"{"city":"Bern"}"#.into(),
                cache: None,
            },
            Part::Call {
                id: "call_2".into(),
                name: "weather".into(),
                arguments: r#"{"city":"Basel"}"#.into(),
                cache: None,
            },
        ],
        finish: Finish::Tools,
        usage: Some(ModelUsage {
            input: 10,
            cache_read: 5,
            output: 7,
            ..ModelUsage::default()
        }),
    }
}

fn stamp() -> Stamp {
    Stamp {
        id: "abc".into(),
        model: "m".into(),
        created: 1_700_000_000,
    }
}

fn read_all(mut reader: impl ReadStream, wire: &[u8]) -> (Vec<Event>, bool) {
    let mut splitter = Splitter::default();
    let mut events = Vec::new();
    for chunk in wire.chunks(7) {
        splitter.push(chunk);
        while let Some(raw) = splitter.take().unwrap() {
            if let Some(data) = raw.data() {
                reader.read(&data, &mut events).unwrap();
            }
        }
    }
    let ended = reader.end(&mut events);
    (events, ended)
}

fn write_all(mut writer: impl WriteStream, events: &[Event]) -> Vec<u8> {
    let mut out = Vec::new();
    events.iter().for_each(|event| writer.write(event, &mut out));
    out
}

fn data_of(wire: &[u8]) -> Vec<Value> {
    let mut splitter = Splitter::default();
    splitter.push(wire);
    std::iter::from_fn(|| splitter.take().unwrap())
        .filter_map(|raw| serde_json::from_slice(&raw.data()?).ok())
        .collect()
}

#[test]
fn a_stream_of_messages_survives_being_written_and_read() {
    let wire = write_all(messages::Writer::new(stamp()), &answer().into_events());
    let (events, ended) = read_all(messages::Reader::default(), &wire);
    assert!(ended);
    assert_eq!(Answer::collect(events), answer());
}

#[test]
fn a_stream_of_chat_survives_being_written_and_read() {
    let wire = write_all(chat::Writer::new(stamp(), true), &answer().into_events());
    let (events, ended) = read_all(chat::Reader::default(), &wire);
    assert!(ended);
    let mut expected = answer();
    // Providers of this wire do not sign; the signature is for clients, in a field of its own.
    expected.parts[0] = Part::Thinking {
        text: "Let me see.".into(),
        signature: None,
    };
    assert_eq!(Answer::collect(events), expected);
    let signed = data_of(&wire)
        .iter()
        .any(|chunk| chunk["choices"][0]["delta"]["reasoning_details"][0]["signature"] == "c2ln");
    assert!(signed);
}

#[test]
fn a_whole_answer_is_what_its_stream_is() {
    let whole = messages::write_answer(&answer(), &stamp());
    assert_eq!(messages::read_answer(&bytes(&whole)).unwrap(), answer());
    let chat = chat::write_answer(&answer(), &stamp());
    assert_eq!(
        chat["choices"][0]["message"]["reasoning_details"][0]["signature"],
        "c2ln"
    );
    let mut read = chat::read_answer(&bytes(&chat)).unwrap();
    read.parts[0] = answer().parts[0].clone();
    assert_eq!(read, answer());
    let response = responses::write_answer(&answer(), &stamp());
    let events = data_of(&write_all(
        responses::Writer::new(stamp()),
        &answer().into_events(),
    ));
    assert_eq!(events.last().unwrap()["response"], response);
    let numbers: Vec<_> = events
        .iter()
        .map(|event| event["sequence_number"].as_u64().unwrap())
        .collect();
    assert!(
        numbers
            .iter()
            .enumerate()
            .all(|(at, number)| at as u64 == *number)
    );
}

#[test]
fn gemini_answers_are_read() {
    let pieces = [
        json!({"candidates": [{"content": {"parts": [{"text": "Let me see.", "thought": true}]}}]}),
        json!({"candidates": [{"content": {"parts": [{"text": "It is "}]}}]}),
        json!({"candidates": [{"content": {"parts": [{"text": "sunny."}]}}]}),
        json!({"candidates": [{"content": {"parts": [
            {"functionCall": {"name": "weather", "args": {"city": "Bern"}}, "thoughtSignature": "c2ln"},
        ]}, "finishReason": "STOP"}],
        "usageMetadata": {"promptTokenCount": 15, "cachedContentTokenCount": 5, "candidatesTokenCount": 7}}),
    ];
    let mut wire = Vec::new();
    pieces.iter().for_each(|piece| sse::write(&mut wire, None, piece));
    let (events, ended) = read_all(gemini::Reader::default(), &wire);
    assert!(ended);
    let read = Answer::collect(events);
    assert_eq!(read.finish, Finish::Tools);
    assert_eq!(read.usage, answer().usage);
    assert_eq!(read.parts.len(), 4, "{:?}", read.parts);
    assert_eq!(read.parts[1], Part::text("It is sunny."));
    assert_eq!(
        read.parts[2],
        Part::Thinking {
            text: String::new(),
            signature: Some("c2ln".into())
        }
    );
}

#[test]
fn the_ai_sdk_gets_its_parts() {
    let wire = write_all(
        ai_sdk::Writer::new(stamp(), "2026-01-01T00:00:00Z".into(), json!({})),
        &answer().into_events(),
    );
    let types: Vec<String> = data_of(&wire)
        .iter()
        .map(|part| part["type"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(
        types,
        [
            "stream-start",
            "response-metadata",
            "reasoning-start",
            "reasoning-delta",
            "reasoning-end",
            "text-start",
            "text-delta",
            "text-end",
            "tool-input-start",
            "tool-input-delta",
            "tool-input-end",
            "tool-call",
            "tool-input-start",
            "tool-input-delta",
            "tool-input-end",
            "tool-call",
            "finish",
        ]
    );
}

#[test]
fn a_stream_that_breaks_off_is_noticed() {
    let wire = write_all(messages::Writer::new(stamp()), &answer().into_events());
    let (_, ended) = read_all(messages::Reader::default(), &wire[..wire.len() / 2]);
    assert!(!ended);
    let wire = write_all(chat::Writer::new(stamp(), true), &answer().into_events());
    let (events, ended) = read_all(chat::Reader::default(), &wire[..wire.len() / 2]);
    assert!(!ended);
    assert!(!events.iter().any(|event| matches!(event, Event::Finish(_))));
}

/// Watching a stream that passes by finds the same usage as reading it.
#[test]
fn watching_sees_what_reading_reads() {
    let watch = |dialect, wire: &[u8]| {
        let mut watch = Watch::new(dialect);
        let mut splitter = Splitter::default();
        splitter.push(wire);
        let mut only_usage = 0;
        while let Some(raw) = splitter.take().unwrap() {
            only_usage += u32::from(watch.event(&raw));
        }
        (watch.seen, only_usage)
    };
    let events = answer().into_events();
    let (chat, dropped) = watch(
        Dialect::Chat,
        &write_all(chat::Writer::new(stamp(), true), &events),
    );
    assert_eq!((chat.usage, dropped), (answer().usage, 1));
    assert!(chat.finished && chat.written >= 12);
    let (messages, _) = watch(
        Dialect::Messages,
        &write_all(messages::Writer::new(stamp()), &events),
    );
    assert_eq!(messages.usage, answer().usage);
    assert!(messages.finished && messages.written >= 23);
    assert_eq!(messages.reason.as_deref(), Some("tool_use"));
    let (responses, _) = watch(
        Dialect::Responses,
        &write_all(responses::Writer::new(stamp()), &events),
    );
    assert_eq!(responses.usage, answer().usage);
    assert!(responses.finished);
    let half = write_all(messages::Writer::new(stamp()), &events);
    let (cut, _) = watch(Dialect::Messages, &half[..half.len() / 2]);
    assert!(!cut.finished);
}
