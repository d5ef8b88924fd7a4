//! What is said, part by part: which fields a part of each kind may have, and how what it holds is counted.
//!
//! What must hold: a part says what it holds in one place, and that place is the one that is counted. A field that is not listed
//! may be the one that a provider reads, so a part that has one is not counted at all, but named. What lies elsewhere (a file
//! or an item by its id, a document by its address) cannot be counted.

use super::Demand;
use crate::tree::{Fields, Node, Text};

const MESSAGE: &[&str] = &[
    "type",
    "role",
    "content",
    "name",
    "id",
    "status",
    "phase",
    "end_turn",
    "tool_calls",
    "tool_call_id",
    "function_call",
    "refusal",
    "annotations",
    "audio",
    "reasoning",
    "reasoning_content",
    "reasoning_details",
    "cache_control",
];

/// Pictures that every provider makes smaller, if it reads them; others may have many pages. The last is the AI SDK's word for
/// one that it has not looked at.
const PICTURES: [&str; 7] = [
    "image/png",
    "image/jpeg",
    "image/jpg",
    "image/gif",
    "image/webp",
    "image/heic",
    "image/*",
];

/// The fields of a part of this kind, and the one among them without which an id stands for something that lies elsewhere.
fn known(kind: &str) -> Option<(&'static [&'static str], &'static str)> {
    Some(match kind {
        "text" | "input_text" | "output_text" | "summary_text" | "reasoning_text" => (
            &[
                "type",
                "text",
                "annotations",
                "logprobs",
                "citations",
                "cache_control",
            ],
            "text",
        ),
        "refusal" => (&["type", "refusal"], "refusal"),
        "thinking" => (&["type", "thinking", "signature", "cache_control"], "thinking"),
        "redacted_thinking" => (&["type", "data"], "data"),
        "reasoning" => (
            &["type", "id", "status", "summary", "content", "encrypted_content"],
            "encrypted_content",
        ),
        "tool_use" => (
            &["type", "id", "name", "input", "caller", "cache_control"],
            "name",
        ),
        "function_call" => (
            &[
                "type",
                "id",
                "status",
                "call_id",
                "name",
                "namespace",
                "arguments",
            ],
            "arguments",
        ),
        "custom_tool_call" => (
            &["type", "id", "status", "call_id", "name", "namespace", "input"],
            "input",
        ),
        "local_shell_call" => (&["type", "id", "status", "call_id", "action"], "action"),
        "apply_patch_call" => (&["type", "id", "status", "call_id", "operation"], "operation"),
        "function_call_output"
        | "custom_tool_call_output"
        | "local_shell_call_output"
        | "apply_patch_call_output" => (&["type", "id", "status", "call_id", "name", "output"], "output"),
        "tool_result" => (
            &["type", "tool_use_id", "content", "is_error", "cache_control"],
            "content",
        ),
        "search_result" => (
            &["type", "source", "title", "content", "citations", "cache_control"],
            "content",
        ),
        "image_url" => (&["type", "image_url", "cache_control"], "image_url"),
        "input_image" => (&["type", "image_url", "detail"], "image_url"),
        "image" => (&["type", "source", "cache_control"], "source"),
        "document" => (
            &["type", "source", "title", "context", "citations", "cache_control"],
            "source",
        ),
        "file" => (&["type", "file", "cache_control"], "file"),
        "input_file" => (&["type", "filename", "file_data", "detail"], "file_data"),
        "input_audio" => (&["type", "input_audio", "cache_control"], "input_audio"),
        _ => return None,
    })
}

impl Demand {
    /// A conversation: messages, and on one wire items of other kinds among them.
    pub(super) fn items(&mut self, path: &str, node: Option<&Node<'_>>) {
        match node {
            None | Some(Node::Null | Node::Text(_)) => {}
            Some(Node::List(items)) => {
                // Which one of many it was helps nobody; and paths would be as long as the body.
                for item in items {
                    match item {
                        Node::Text(_) | Node::Null => {}
                        Node::Object(item) => self.item(path, item),
                        _ => self.price_unknown(path, "it holds what is no message"),
                    }
                }
            }
            Some(_) => self.price_unknown(path, "it is no conversation"),
        }
    }

    fn item(&mut self, path: &str, fields: &Fields<'_>) {
        match fields.get("type") {
            None => {}
            Some(Node::Text(kind)) if kind.start == "message" => {}
            Some(_) => return self.part(path, fields),
        }
        if !self.has_only(path, "message", fields, MESSAGE) {
            return;
        }
        // By an id alone, providers find what was said before; an answer that was spoken has one of its own.
        let says_nothing = match fields.get("content") {
            None => true,
            Some(Node::Text(text)) => text.len == 0,
            Some(Node::List(parts)) => parts.is_empty(),
            Some(_) => false,
        };
        if fields.text("role").is_none()
            || fields.get("audio").is_some()
            || (fields.get("id").is_some() && says_nothing)
        {
            self.unseen(path);
        }
        self.parts(path, fields.get("content"));
    }

    /// What a message, or the result of a tool, holds.
    pub(super) fn parts(&mut self, path: &str, node: Option<&Node<'_>>) {
        match node {
            None | Some(Node::Null | Node::Text(_)) => {}
            Some(Node::List(parts)) => {
                for part in parts {
                    match part {
                        Node::Text(_) | Node::Null => {}
                        Node::Object(part) => self.part(path, part),
                        _ => self.price_unknown(path, "it holds what is no part"),
                    }
                }
            }
            Some(Node::Object(part)) => self.part(path, part),
            Some(Node::Flag(_) | Node::Number(_)) => {}
        }
    }

    fn part(&mut self, path: &str, fields: &Fields<'_>) {
        let Some(Node::Text(kind)) = fields.get("type") else {
            return self.price_unknown(path, "a part does not say of which type it is");
        };
        let kind = kind.start.as_ref();
        let Some((names, holds)) = known(kind) else {
            let shown: String = kind.chars().take(60).collect();
            let why = format!("nobody here knows how a part of type `{shown}` is counted");
            return self.price_unknown(path, &why);
        };
        if !self.has_only(path, kind, fields, names) {
            return;
        }
        let held = fields.get(holds);
        if held.is_none() && fields.get("id").is_some() {
            return self.unseen(path);
        }
        match (kind, held) {
            ("image_url", Some(Node::Object(image))) => {
                if self.has_only(path, kind, image, &["url", "detail"]) {
                    self.detail(path, image);
                    self.picture(path, image.get("url"));
                }
            }
            ("image_url" | "input_image", held) => {
                self.detail(path, fields);
                self.picture(path, held);
            }
            ("image", Some(Node::Object(source))) => self.image(path, source),
            ("document", Some(Node::Object(source))) => self.document(path, source),
            ("file", Some(Node::Object(file))) => {
                if self.has_only(path, kind, file, &["filename", "file_data"]) {
                    self.bytes(path, None, file.get("file_data"));
                }
            }
            ("input_file", held) => {
                self.detail(path, fields);
                self.bytes(path, None, held);
            }
            ("input_audio", Some(Node::Object(audio))) => {
                if self.has_only(path, kind, audio, &["data", "format"]) {
                    self.bytes(path, Some("audio/"), audio.get("data"));
                }
            }
            ("image" | "document" | "file" | "input_audio", _) => self.unseen(path),
            ("reasoning", _) => {
                self.parts(path, fields.get("summary"));
                self.parts(path, fields.get("content"));
            }
            // What a caller's tool was told, and what it had to do, is text whatever its form.
            (
                "tool_use" | "function_call" | "custom_tool_call" | "local_shell_call" | "apply_patch_call",
                _,
            ) => {}
            (_, None | Some(Node::Text(_))) => {}
            (
                "tool_result"
                | "search_result"
                | "function_call_output"
                | "custom_tool_call_output"
                | "local_shell_call_output"
                | "apply_patch_call_output",
                held,
            ) => self.parts(path, held),
            (_, Some(_)) => self.price_unknown(path, "what should be text is something else"),
        }
    }

    /// Whether it has no other fields; else one of them is named.
    fn has_only(&mut self, path: &str, kind: &str, fields: &Fields<'_>, names: &[&str]) -> bool {
        let other = fields
            .iter()
            .find(|(name, node)| **node != Node::Null && !names.contains(name));
        let Some((name, _)) = other else { return true };
        let name: String = name.chars().take(60).collect();
        if matches!(name.as_str(), "file_id" | "file_url") {
            self.unseen(path);
        } else {
            let why = format!("nobody here knows what `{name}` means in a part of type `{kind}`");
            self.price_unknown(path, &why);
        }
        false
    }

    /// How closely a picture is looked at.
    fn detail(&mut self, path: &str, fields: &Fields<'_>) {
        match fields.get("detail") {
            None => {}
            Some(Node::Text(detail)) if matches!(detail.start.as_ref(), "low" | "high" | "auto") => {}
            Some(_) => self.price_unknown(path, "pictures are counted at a `detail` of low, high or auto"),
        }
    }

    fn image(&mut self, path: &str, source: &Fields<'_>) {
        match source.text("type") {
            Some("base64") => {
                if self.has_only(path, "base64", source, &["type", "media_type", "data"]) {
                    self.bytes(path, source.text("media_type"), source.get("data"));
                }
            }
            Some("url") => {
                if self.has_only(path, "url", source, &["type", "url"]) {
                    self.picture(path, source.get("url"));
                }
            }
            _ => self.unseen(path),
        }
    }

    fn document(&mut self, path: &str, source: &Fields<'_>) {
        match source.text("type") {
            Some("base64") => self.image(path, source),
            Some("text") => match source.get("data") {
                Some(Node::Text(_)) => {
                    self.has_only(path, "text", source, &["type", "media_type", "data"]);
                }
                _ => self.unseen(path),
            },
            Some("content") => {
                if self.has_only(path, "content", source, &["type", "content"]) {
                    self.parts(path, source.get("content"));
                }
            }
            _ => self.unseen(path),
        }
    }

    /// A picture by its address, or with its bytes in it.
    fn picture(&mut self, path: &str, url: Option<&Node<'_>>) {
        match url {
            Some(Node::Text(text)) if is_address(text) => {
                // However large it is, most providers make it smaller.
                self.images += 1;
                self.linked = true;
            }
            Some(Node::Text(text)) if has_data(text) => self.bytes(path, None, url),
            _ => self.unseen(path),
        }
    }

    /// Bytes in base64, plain or as a `data:` URL, which says itself what they are. An address is none.
    pub(super) fn bytes(&mut self, path: &str, media: Option<&str>, data: Option<&Node<'_>>) {
        let Some(Node::Text(data)) = data else {
            return self.unseen(path);
        };
        let told = has_data(data).then(|| {
            let url = &data.start["data:".len()..];
            url.split([';', ',']).next().unwrap_or_default()
        });
        if told.is_none() && data.start.contains(':') {
            return self.unseen(path);
        }
        let bytes = data.len as u64;
        let media = told.or(media).unwrap_or_default().to_ascii_lowercase();
        let held = if PICTURES.contains(&media.as_str()) {
            self.images += 1;
            bytes
        } else if media.starts_with("text/") {
            0
        } else if ["audio/", "video/", "application/ogg", "application/mp4"]
            .iter()
            .any(|kind| media.starts_with(kind))
        {
            self.audio += bytes;
            bytes
        } else {
            self.documents += bytes;
            bytes
        };
        self.text = self.text.saturating_sub(held);
    }

    /// What we wrote for Gemini.
    pub(super) fn gemini_parts(&mut self, contents: Option<&Node<'_>>) {
        for part in objects(contents).flat_map(|content| objects(content.get("parts"))) {
            if let Some(data) = part.object("inlineData") {
                self.bytes("contents", data.text("mimeType"), data.get("data"));
            }
            // Behind an address there may be hours of video.
            if part.get("fileData").is_some() {
                self.unseen("contents");
            }
        }
    }

    /// What we wrote for Bedrock.
    pub(super) fn converse_parts(&mut self, messages: Option<&Node<'_>>) {
        let parts = objects(messages).flat_map(|message| objects(message.get("content")));
        for part in parts {
            self.converse_part(part);
            let inner = part.object("toolResult");
            for part in inner
                .into_iter()
                .flat_map(|result| objects(result.get("content")))
            {
                self.converse_part(part);
            }
        }
    }

    fn converse_part(&mut self, part: &Fields<'_>) {
        for name in ["image", "document"] {
            let Some(file) = part.object(name) else { continue };
            let media = match file.text("format") {
                Some("png" | "jpeg" | "gif" | "webp") => "image/png",
                Some("txt" | "md" | "html" | "csv") => "text/plain",
                _ => "",
            };
            let source = file.object("source");
            self.bytes(
                "messages",
                Some(media),
                source.and_then(|source| source.get("bytes")),
            );
        }
    }
}

/// The objects in a list.
fn objects<'n, 'a>(node: Option<&'n Node<'a>>) -> impl Iterator<Item = &'n Fields<'a>> {
    let items = match node {
        Some(Node::List(items)) => items.as_slice(),
        _ => &[],
    };
    items.iter().filter_map(|item| match item {
        Node::Object(fields) => Some(fields),
        _ => None,
    })
}

fn starts_with(text: &Text<'_>, scheme: &str) -> bool {
    let start = text.start.as_bytes();
    start.len() >= scheme.len() && start[..scheme.len()].eq_ignore_ascii_case(scheme.as_bytes())
}

fn has_data(text: &Text<'_>) -> bool {
    starts_with(text, "data:")
}

fn is_address(text: &Text<'_>) -> bool {
    starts_with(text, "http://") || starts_with(text, "https://")
}
