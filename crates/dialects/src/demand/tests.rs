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
    use Dialect::{Chat, Embeddings, Messages, Responses};
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
        (Responses, r#"{"instructions":[{"id":"msg_1"}]}"#, "instructions"),
        (
            Chat,
            r#"{"prediction":{"type":"content","content":[{"type":"file","file":{"file_id":"f"}}]}}"#,
            "prediction",
        ),
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

/// A part that says in two places what it holds, or in one that is not known, is what a provider makes of it.
#[test]
fn a_part_holds_what_it_says_in_one_place() {
    use Dialect::{Chat, Messages, Responses};
    let blob = "data:text/plain,x";
    let unseen = |dialect, part: &str| {
        let list = if dialect == Responses { "input" } else { "messages" };
        let body = format!(r#"{{"{list}":[{{"role":"user","content":[{part}]}}]}}"#);
        let read = demand(dialect, &body);
        assert_eq!(read.unpriced.map(|it| it.field).as_deref(), Some(list), "{part}");
    };
    for part in [
        r#"{"type":"input_file","file_data":"DATA","file_url":"https://x/y.pdf"}"#,
        r#"{"type":"input_file","file_data":"DATA","file_id":"f"}"#,
        r#"{"type":"input_file","file":{"file_data":"DATA"},"file_id":"f"}"#,
        r#"{"type":"input_file","file":{"file_data":"DATA"}}"#,
        r#"{"type":"input_file","file_data":"https://x/y.pdf"}"#,
        r#"{"type":"input_file","file_data":["DATA"]}"#,
        r#"{"type":"input_image","file_id":"f"}"#,
        r#"{"type":"input_image","image_url":"https://x/y.png","file_id":"f"}"#,
        r#"{"type":"input_image","image_url":"https://x/y.png","detail":"original"}"#,
        r#"{"type":"input_text","text":"x","image_url":"https://x/y.png"}"#,
        r#"{"type":"input_text","text":{"file_id":"f"}}"#,
    ] {
        unseen(Responses, &part.replace("DATA", blob));
    }
    for part in [
        r#"{"type":"file","file":{"file_data":"DATA","file_id":"f"}}"#,
        r#"{"type":"file","file":{"file_data":"DATA"},"file_id":"f"}"#,
        r#"{"type":"file","file_data":"DATA"}"#,
        r#"{"type":"file","data":"https://x/y.pdf","mediaType":"application/pdf","file":{"file_data":"DATA"}}"#,
        r#"{"type":"file","file":{"file_data":"https://x/y.pdf"}}"#,
        r#"{"image_url":{"url":"DATA"}}"#,
        r#"{"type":null,"image_url":{"url":"DATA"}}"#,
        r#"{"type":"text","text":"x","image_url":{"url":"https://x"}}"#,
        r#"{"type":"image_url","image_url":{"url":"gs://bucket/film.mp4"}}"#,
        r#"{"type":"image_url","image_url":{"url":"https://x","format":"video/mp4"}}"#,
        r#"{"type":"image_url","image_url":{"url":"https://x","detail":"original"}}"#,
        r#"{"type":"image_url"}"#,
        r#"{"type":"input_audio","input_audio":{"data":"https://x/y.mp3","format":"mp3"}}"#,
        r#"{"type":"input_audio","input_audio":{"id":"a"}}"#,
    ] {
        unseen(Chat, &part.replace("DATA", blob));
    }
    for part in [
        r#"{"type":"image","source":{"type":"file","file_id":"f"}}"#,
        r#"{"type":"image","source":{"type":"base64","media_type":"image/png","data":"A","url":"https://x"}}"#,
        r#"{"type":"document","source":{"type":"url","url":"https://x"}}"#,
        r#"{"type":"document","source":{"type":"text","media_type":"text/plain","data":"x","file_id":"f"}}"#,
        r#"{"type":"document","source":{"type":"text","data":"x"},"file_id":"f"}"#,
        r#"{"type":"document","source":{"type":"content","content":[{"type":"document","source":{"type":"url","url":"u"}}]}}"#,
        r#"{"type":"tool_result","tool_use_id":"1","content":[{"type":"document","source":{"type":"url","url":"u"}}]}"#,
        r#"{"type":"search_result","content":[{"type":"document","source":{"type":"url","url":"u"}}]}"#,
        "7",
    ] {
        unseen(Messages, part);
    }
}

/// What an id stands for lies with the provider.
#[test]
fn an_id_without_content_is_not_counted() {
    let read = |item: &str| {
        let body = format!(r#"{{"input":[{{"role":"user","content":"x"}},{item}]}}"#);
        demand(Dialect::Responses, &body).unpriced.map(|it| it.field)
    };
    for item in [
        r#"{"id":"msg_1"}"#,
        r#"{"type":null,"id":"msg_1"}"#,
        r#"{"type":"item_reference","id":"msg_1"}"#,
        r#"{"type":"message","id":"msg_1","role":"user","status":"completed"}"#,
        r#"{"type":"message","id":"msg_1","role":"assistant","content":[]}"#,
        r#"{"role":"user","id":"msg_1","content":""}"#,
        r#"{"content":"x"}"#,
        r#"{"type":"reasoning","id":"rs_1","summary":[]}"#,
        r#"{"type":"reasoning","id":"rs_1","summary":[{"type":"summary_text","text":"x"}]}"#,
        r#"{"type":"function_call","id":"fc_1"}"#,
        r#"{"type":"function_call_output","id":"fc_1","call_id":"1"}"#,
        r#"[{"role":"user","content":"x"}]"#,
    ] {
        assert_eq!(read(item).as_deref(), Some("input"), "{item}");
    }
    for item in [
        r#"{"type":"message","id":"msg_1","role":"assistant","content":[{"type":"output_text","text":"x","annotations":[],"logprobs":[]}]}"#,
        r#"{"type":"reasoning","id":"rs_1","summary":[],"content":null,"encrypted_content":"e"}"#,
        r#"{"type":"function_call","id":"fc_1","call_id":"1","name":"f","arguments":"{}","status":"completed"}"#,
        r#"{"type":"function_call_output","id":"fc_1","call_id":"1","output":[{"type":"input_text","text":"x"}]}"#,
    ] {
        assert_eq!(read(item), None, "{item}");
    }
}

/// As a translation writes it for those wires that nobody asks us on.
#[test]
fn what_is_written_for_gemini_and_bedrock_is_counted() {
    let blob = "A".repeat(1000);
    let gemini = |part: &str| {
        demand(
            Dialect::Gemini,
            &format!(
                r#"{{"contents":[{{"role":"user","parts":[{{"text":"x"}},{part}]}}],"generationConfig":{{"maxOutputTokens":7}},
                    "tools":[{{"functionDeclarations":[{{"name":"a"}},{{"name":"b"}}]}}]}}"#
            ),
        )
    };
    let inline = |media: &str| {
        let read = gemini(&format!(
            r#"{{"inlineData":{{"mimeType":"{media}","data":"{blob}"}}}}"#
        ));
        assert_eq!((read.max_output, read.tools, read.unpriced), (Some(7), 2, None));
        (read.images, read.documents, read.audio, read.text > 1000)
    };
    assert_eq!(inline("image/png"), (1, 0, 0, false));
    assert_eq!(inline("image/tiff"), (0, 1000, 0, false));
    assert_eq!(inline("application/pdf"), (0, 1000, 0, false));
    assert_eq!(inline("audio/flac"), (0, 0, 1000, false));
    assert_eq!(inline("video/mp4"), (0, 0, 1000, false));
    assert_eq!(inline("text/plain"), (0, 0, 0, true));
    let film = gemini(r#"{"fileData":{"fileUri":"https://www.youtube.com/watch?v=1"}}"#);
    assert_eq!(film.unpriced.map(|it| it.field).as_deref(), Some("contents"));
    let read = demand(
        Dialect::Converse,
        &format!(
            r#"{{"messages":[{{"role":"user","content":[{{"image":{{"format":"png","source":{{"bytes":"{blob}"}}}}}},
                {{"document":{{"format":"csv","name":"x","source":{{"bytes":"{blob}"}}}}}},{{"toolResult":{{"content":[
                {{"document":{{"format":"pdf","name":"x","source":{{"bytes":"{blob}"}}}}}}]}}}}]}}],
                "inferenceConfig":{{"maxTokens":9}},"toolConfig":{{"tools":[{{"toolSpec":{{}}}}]}}}}"#
        ),
    );
    assert_eq!(
        (read.images, read.documents, read.max_output, read.tools),
        (1, 1000, Some(9), 1)
    );
    assert!((1000..2000).contains(&read.text) && read.unpriced.is_none());
}
