//! Stories on the wires of models: every wire, whole and streamed, and what the project is told about what it spent.

use reqwest::{Method, RequestBuilder};
use serde_json::{Value, json};

use crate::soak::caller::{Caller, Told};
use crate::soak::random::Random;

/// A wire, and how a call looks on it.
#[derive(Debug, Clone, Copy)]
enum Wire {
    Chat,
    Responses,
    Messages,
    AiSdk,
}

const WIRES: [Wire; 4] = [Wire::Chat, Wire::Responses, Wire::Messages, Wire::AiSdk];

pub(super) async fn story(caller: &Caller, random: &mut Random) -> Told<()> {
    for _ in 0..1 + random.below(4) {
        let Some(wire) = random.one(&WIRES).copied() else {
            return Ok(());
        };
        let streamed = random.chance(2);
        let canary = caller.canary();
        let said = format!("{canary} {}", "word ".repeat(1 + random.index(60)));
        let model = match random.below(4) {
            0 => format!("claude/{}", caller.project.echo()),
            1 if streamed => caller.project.streams(),
            _ => caller.project.echo(),
        };
        let kind = wire.name(streamed);
        let answer = caller
            .ask(kind, wire.call(caller, &model, &said, streamed), &[])
            .await?;
        let expected = if model.contains("stream") {
            "scripted"
        } else {
            canary
        };
        if !answer.text().contains(expected) {
            return Err(caller.wrong(kind, format!("the answer lacks {expected}: {}", answer.text())));
        }
    }
    match random.below(6) {
        0 => {
            let body = json!({"model": caller.project.echo(), "input": [caller.canary(), "two words"]});
            let request = keyed(caller, "/v1/embeddings").json(&body);
            caller.ask("embeddings", request, &[]).await?;
        }
        1 => {
            let body = json!({"model": format!("claude/{}", caller.project.echo()), "max_tokens": 5,
                "messages": [{"role": "user", "content": caller.canary()}]});
            let request = keyed(caller, "/v1/messages/count_tokens").json(&body);
            caller.ask("count tokens", request, &[]).await?;
        }
        2 => {
            let listed = caller.get("/v1/gateway/calls").query(&[("limit", "20")]);
            let listed = caller.ask("model reports", listed, &[]).await?.json();
            if let Some(id) = listed["items"][0]["id"].as_str() {
                caller.world.board.tell("model call", caller.project.index, id);
            }
            let spend = caller.get("/v1/gateway/spend");
            caller.ask("model reports", spend, &[]).await?;
        }
        _ => {}
    }
    Ok(())
}

fn keyed(caller: &Caller, path: &str) -> RequestBuilder {
    caller
        .bare(Method::POST, path)
        .bearer_auth(&caller.project.model_key)
}

impl Wire {
    fn name(self, streamed: bool) -> &'static str {
        match (self, streamed) {
            (Self::Chat, false) => "chat",
            (Self::Chat, true) => "chat, streamed",
            (Self::Responses, false) => "responses",
            (Self::Responses, true) => "responses, streamed",
            (Self::Messages, false) => "messages",
            (Self::Messages, true) => "messages, streamed",
            (Self::AiSdk, false) => "AI SDK",
            (Self::AiSdk, true) => "AI SDK, streamed",
        }
    }

    fn call(self, caller: &Caller, model: &str, said: &str, streamed: bool) -> RequestBuilder {
        match self {
            Self::Chat => keyed(caller, "/v1/chat/completions").json(&json!({
                "model": model, "stream": streamed, "max_completion_tokens": 200,
                "messages": [{"role": "user", "content": said}],
            })),
            Self::Responses => keyed(caller, "/v1/responses").json(&json!({
                "model": model, "stream": streamed, "max_output_tokens": 200, "input": said,
            })),
            Self::Messages => keyed(caller, "/v1/messages").json(&json!({
                "model": model, "stream": streamed, "max_tokens": 200,
                "messages": [{"role": "user", "content": said}],
            })),
            Self::AiSdk => keyed(caller, "/v4/ai/language-model")
                .header("ai-language-model-id", model)
                .header("ai-language-model-streaming", streamed.to_string())
                .json(&prompt(said)),
        }
    }
}

fn prompt(said: &str) -> Value {
    json!({"prompt": [{"role": "user", "content": [{"type": "text", "text": said}]}], "maxOutputTokens": 200})
}
