//! What each wire asks for, and what has no price.

use super::*;

fn demand(dialect: Dialect, body: &str) -> Demand {
    let fields = Fields::parse(body.as_bytes()).unwrap();
    Demand::of(dialect, &fields, body.len()).unwrap()
}

#[test]
fn each_wire_says_its_limit_in_its_own_way() {
    for (dialect, body, most, choices) in [
        (
            Dialect::Chat,
            r#"{"max_completion_tokens":1,"max_tokens":100000}"#,
            Some(100_000),
            1,
        ),
        (Dialect::Chat, r#"{"max_completion_tokens":7,"n":3}"#, Some(7), 3),
        (Dialect::Chat, r#"{"max_tokens":7,"n":2,"best_of":5}"#, Some(7), 5),
        (Dialect::Chat, r#"{"max_tokens":null}"#, None, 1),
        // Fields of other wires limit nothing.
        (Dialect::Chat, r#"{"max_output_tokens":1}"#, None, 1),
        (
            Dialect::Responses,
            r#"{"max_output_tokens":9,"max_tokens":1}"#,
            Some(9),
            1,
        ),
        (Dialect::Responses, r#"{"max_tokens":1}"#, None, 1),
        (
            Dialect::Messages,
            r#"{"max_tokens":9,"max_completion_tokens":1}"#,
            Some(9),
            1,
        ),
        (
            Dialect::Messages,
            r#"{"max_tokens":9,"thinking":{"type":"enabled","budget_tokens":8}}"#,
            Some(9),
            1,
        ),
        (
            Dialect::AiSdk,
            r#"{"maxOutputTokens":9,"max_tokens":1}"#,
            Some(9),
            1,
        ),
        (Dialect::Embeddings, r#"{"input":[[1,2,3]]}"#, Some(0), 1),
    ] {
        let read = demand(dialect, body);
        assert_eq!((read.max_output, read.choices), (most, choices), "{body}");
    }
}

#[test]
fn what_has_no_price_is_named() {
    use Dialect::{AiSdk, Chat, Embeddings, Messages, Responses};
    for (dialect, body, field) in [
        (Chat, r#"{"plugins":[{"id":"web"}]}"#, "plugins"),
        (Chat, r#"{"web_search_options":{}}"#, "web_search_options"),
        (Chat, r#"{"modalities":["text","image"]}"#, "modalities"),
        (
            Chat,
            r#"{"tools":[{"type":"function"},{"type":"web_search"}]}"#,
            "tools[1].type",
        ),
        (Chat, r#"{"tools":[{"type":["function"]}]}"#, "tools[0]"),
        (
            Chat,
            r#"{"messages":[{"role":"user","content":[{"type":"file","file":{"file_id":"f"}}]}]}"#,
            "messages",
        ),
        (
            Chat,
            r#"{"messages":[{"role":"user","content":[{"type":"video_url"}]}]}"#,
            "messages",
        ),
        (
            Chat,
            r#"{"messages":[{"role":"assistant","audio":{"id":"a"}}]}"#,
            "messages",
        ),
        (Responses, r#"{"background":true}"#, "background"),
        (
            Responses,
            r#"{"previous_response_id":"r"}"#,
            "previous_response_id",
        ),
        (Responses, r#"{"conversation":"c"}"#, "conversation"),
        (Responses, r#"{"prompt":{"id":"p"}}"#, "prompt"),
        (Responses, r#"{"tools":[{"type":"web_search"}]}"#, "tools[0].type"),
        (
            Responses,
            r#"{"tools":[{"type":"code_interpreter"}]}"#,
            "tools[0].type",
        ),
        (Responses, r#"{"tools":[{}]}"#, "tools[0].type"),
        (
            Responses,
            r#"{"input":[{"type":"item_reference","id":"i"}]}"#,
            "input",
        ),
        (
            Responses,
            r#"{"input":[{"role":"user","content":[{"type":"input_file","file_url":"u"}]}]}"#,
            "input",
        ),
        (Chat, r#"{"max_tokens":0}"#, "max_tokens"),
        (
            Messages,
            r#"{"max_tokens":9,"thinking":{"type":"enabled","budget_tokens":10}}"#,
            "thinking.budget_tokens",
        ),
        (Messages, r#"{"speed":"fast"}"#, "speed"),
        (Messages, r#"{"speed":7}"#, "speed"),
        (Messages, r#"{"inference_geo":"us"}"#, "inference_geo"),
        (Messages, r#"{"mcp_servers":[{"url":"x"}]}"#, "mcp_servers"),
        (Messages, r#"{"container":"c"}"#, "container"),
        (
            Messages,
            r#"{"context_management":{"edits":[{"type":"compact_20260112"}]}}"#,
            "context_management",
        ),
        (
            Messages,
            r#"{"tools":[{"type":"web_search_20250305","name":"web_search"}]}"#,
            "tools[0].type",
        ),
        (
            Messages,
            r#"{"tools":[{"type":"code_execution_20250825"}]}"#,
            "tools[0].type",
        ),
        (
            Messages,
            r#"{"messages":[{"role":"user","content":[{"type":"document","source":{"type":"file","file_id":"f"}}]}]}"#,
            "messages",
        ),
        (
            Messages,
            r#"{"messages":[{"role":"user","content":[{"type":"container_upload"}]}]}"#,
            "messages",
        ),
        (
            AiSdk,
            r#"{"prompt":[{"role":"user","content":[{"type":"file","mediaType":"application/pdf","data":"https://x"}]}]}"#,
            "prompt",
        ),
        (Embeddings, r#"{"input":"x","rerank":true}"#, "rerank"),
    ] {
        let read = demand(dialect, body);
        assert_eq!(read.unpriced.map(|it| it.field).as_deref(), Some(field), "{body}");
    }
}

#[test]
fn what_agents_send_has_a_price() {
    for (dialect, body) in [
        (
            Dialect::Messages,
            r#"{"model":"m","max_tokens":5,"stream":true,"thinking":{"type":"adaptive"},"metadata":{"user_id":"u"},
                "system":[{"type":"text","text":"s","cache_control":{"type":"ephemeral","ttl":"1h"}}],"speed":null,
                "context_management":{"edits":[{"type":"clear_thinking_20251015","keep":"all"}]},"mcp_servers":[],
                "tools":[{"name":"Bash","input_schema":{"type":"object"}},{"type":"bash_20250124","name":"bash"}],
                "messages":[{"role":"user","content":"x"},{"role":"assistant","content":[{"type":"thinking","thinking":"t"},
                {"type":"tool_use","id":"1","name":"Bash","input":{"type":"video"}}]},
                {"role":"user","content":[{"type":"tool_result","tool_use_id":"1","content":[{"type":"text","text":"y"}]}]}]}"#,
        ),
        (
            Dialect::Responses,
            r#"{"model":"m","stream":true,"store":false,"instructions":"i","include":["reasoning.encrypted_content"],
                "reasoning":{"effort":"high","summary":"auto"},"prompt_cache_key":"k","background":false,
                "tools":[{"type":"function","name":"f"},{"type":"custom","name":"apply_patch"},{"type":"local_shell"}],
                "input":[{"type":"message","role":"user","content":[{"type":"input_text","text":"x"}]},
                {"type":"reasoning","summary":[],"encrypted_content":"e"},
                {"type":"function_call","call_id":"1","name":"f","arguments":"{}"},
                {"type":"function_call_output","call_id":"1","output":"y"}]}"#,
        ),
        (
            Dialect::Chat,
            r#"{"model":"m","stream":true,"stream_options":{"include_usage":true},"reasoning_effort":"low",
                "tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object"}}}],
                "messages":[{"role":"system","content":"s"},{"role":"assistant","content":null,"tool_calls":[]},
                {"role":"tool","tool_call_id":"1","content":"y"}]}"#,
        ),
    ] {
        assert_eq!(demand(dialect, body).unpriced, None, "{body}");
    }
}

#[test]
fn pictures_count_by_number_and_documents_by_size() {
    let blob = "A".repeat(30_000);
    let of = |dialect, part: &str| {
        let body = format!(r#"{{"messages":[{{"role":"user","content":[{part}]}}]}}"#);
        let read = demand(dialect, &body);
        assert_eq!(read.unpriced, None, "{part:.200}");
        (read.images, read.documents, read.audio, read.text > 30_000)
    };
    let data = 30_000;
    for (dialect, part, found) in [
        (
            Dialect::Chat,
            format!(r#"{{"type":"image_url","image_url":{{"url":"data:image/png;base64,{blob}"}}}}"#),
            (1, 0, 0, false),
        ),
        (
            Dialect::Chat,
            r#"{"type":"image_url","image_url":{"url":"https://x/y.png"}}"#.to_owned(),
            (1, 0, 0, false),
        ),
        // What says that it is a picture and is none.
        (
            Dialect::Chat,
            format!(r#"{{"type":"image_url","image_url":{{"url":"data:application/pdf;base64,{blob}"}}}}"#),
            (0, data + 28, 0, false),
        ),
        (
            Dialect::Chat,
            format!(r#"{{"type":"file","file":{{"file_data":"data:application/pdf;base64,{blob}"}}}}"#),
            (0, data + 28, 0, false),
        ),
        (
            Dialect::Chat,
            format!(r#"{{"type":"input_audio","input_audio":{{"data":"{blob}","format":"wav"}}}}"#),
            (0, 0, data, false),
        ),
        (
            Dialect::Messages,
            format!(
                r#"{{"type":"document","source":{{"type":"base64","media_type":"application/pdf","data":"{blob}"}}}}"#
            ),
            (0, data, 0, false),
        ),
        (
            Dialect::Messages,
            format!(
                r#"{{"type":"image","source":{{"data":"{blob}","type":"base64","media_type":"image/png"}}}}"#
            ),
            (1, 0, 0, false),
        ),
        (
            Dialect::Messages,
            format!(r#"{{"type":"image","source":{{"type":"base64","media_type":"x/y","data":"{blob}"}}}}"#),
            (0, data, 0, false),
        ),
        // Text that pretends.
        (
            Dialect::Messages,
            format!(r#"{{"type":"text","text":"data:image/png;base64,{blob}"}}"#),
            (0, 0, 0, true),
        ),
        (
            Dialect::Messages,
            format!(
                r#"{{"type":"document","source":{{"type":"text","media_type":"text/plain","data":"{blob}"}}}}"#
            ),
            (0, 0, 0, true),
        ),
    ] {
        assert_eq!(of(dialect, &part), found, "{part:.200}");
    }
}

#[test]
fn what_is_foreseen_and_what_is_spoken_is_noticed() {
    let read = demand(
        Dialect::Chat,
        r#"{"prediction":{"type":"content","content":[{"type":"text","text":"0123456789"}]},"modalities":["text","audio"]}"#,
    );
    assert_eq!((read.predicted, read.speaks), (14, true));
}
