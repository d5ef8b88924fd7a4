//! The form in between: what is asked of a model, and what it answers.

use atoll_types::ModelUsage;
use serde_json::{Number, Value};

#[derive(Debug, Clone, Default, PartialEq)]
pub struct Ask {
    pub system: Vec<TextPart>,
    pub turns: Vec<Turn>,
    pub tools: Vec<Tool>,
    pub tool_choice: Option<ToolChoice>,
    /// Whether several tools may be called at once.
    pub parallel_tools: Option<bool>,
    pub max_output: Option<u64>,
    pub temperature: Option<Number>,
    pub top_p: Option<Number>,
    pub top_k: Option<u64>,
    pub presence_penalty: Option<Number>,
    pub frequency_penalty: Option<Number>,
    pub seed: Option<Number>,
    pub stop: Vec<String>,
    pub format: Format,
    pub thinking: Option<Thinking>,
    /// Whom the caller says that it acts for.
    pub user: Option<String>,
    pub stream: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TextPart {
    pub text: String,
    pub cache: Option<Cache>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Turn {
    pub role: Role,
    pub parts: Vec<Part>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    User,
    Assistant,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Part {
    Text(TextPart),
    Image {
        source: Source,
        cache: Option<Cache>,
    },
    /// A file that is not an image.
    Document {
        source: Source,
        name: Option<String>,
        cache: Option<Cache>,
    },
    Thinking {
        text: String,
        /// By which its author knows it again.
        signature: Option<String>,
    },
    /// Thinking that only its author can read.
    Redacted {
        data: String,
    },
    Call {
        id: String,
        name: String,
        /// JSON, as the model wrote it.
        arguments: String,
        cache: Option<Cache>,
    },
    Result {
        id: String,
        /// Text and images.
        parts: Vec<Self>,
        failed: bool,
        cache: Option<Cache>,
    },
}

impl Part {
    pub fn text(text: impl Into<String>) -> Self {
        Self::Text(TextPart {
            text: text.into(),
            cache: None,
        })
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    Url(String),
    Base64 { media: String, data: String },
}

/// The provider should remember what came up to here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cache {
    Short,
    Hour,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Tool {
    pub name: String,
    pub description: Option<String>,
    pub schema: Value,
    pub strict: Option<bool>,
    pub cache: Option<Cache>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ToolChoice {
    Auto,
    None,
    Required,
    Only(String),
}

#[derive(Debug, Clone, Default, PartialEq)]
pub enum Format {
    #[default]
    Text,
    /// Any JSON.
    Json,
    Schema(Schema),
}

#[derive(Debug, Clone, PartialEq)]
pub struct Schema {
    pub name: Option<String>,
    pub description: Option<String>,
    pub schema: Value,
    pub strict: Option<bool>,
}

/// How much the model may think before it answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Thinking {
    Off,
    /// As much as it finds right.
    Adaptive,
    Tokens(u64),
    Effort(Effort),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Effort {
    Minimal,
    Low,
    Medium,
    High,
    Extra,
    Max,
}

impl Effort {
    pub(crate) const NAMES: [(Self, &'static str); 6] = [
        (Self::Minimal, "minimal"),
        (Self::Low, "low"),
        (Self::Medium, "medium"),
        (Self::High, "high"),
        (Self::Extra, "xhigh"),
        (Self::Max, "max"),
    ];

    pub(crate) fn read(name: &str) -> Option<Self> {
        Self::NAMES
            .iter()
            .find(|(_, known)| *known == name)
            .map(|(effort, _)| *effort)
    }

    pub(crate) fn name(self) -> &'static str {
        Self::NAMES
            .iter()
            .find(|(effort, _)| *effort == self)
            .map_or("medium", |(_, name)| name)
    }

    /// About as many tokens as the large providers give for it.
    pub(crate) fn tokens(self) -> u64 {
        match self {
            Self::Minimal => 1024,
            Self::Low => 2048,
            Self::Medium => 8192,
            Self::High => 16_384,
            Self::Extra | Self::Max => 32_768,
        }
    }

    pub(crate) fn of_tokens(tokens: u64) -> Self {
        [Self::Minimal, Self::Low, Self::Medium]
            .into_iter()
            .find(|effort| tokens <= effort.tokens())
            .unwrap_or(Self::High)
    }
}

/// A whole answer.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Answer {
    pub parts: Vec<Part>,
    pub finish: Finish,
    /// `None`: the provider did not say.
    pub usage: Option<ModelUsage>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Finish {
    #[default]
    Stop,
    /// At one of the texts at which it was told to stop.
    StopText(String),
    Length,
    Tools,
    /// The provider withheld the rest.
    Filter,
    Other(String),
}

/// A piece of an answer that is being written. Blocks do not overlap: one ends before the next opens.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    Open(Opening),
    Text(String),
    Thinking(String),
    Signature(String),
    Arguments(String),
    Close,
    Usage(ModelUsage),
    Finish(Finish),
    /// The provider gave up in the middle.
    Failed(String),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Opening {
    Text,
    Thinking,
    Redacted(String),
    Call { id: String, name: String },
}

/// What an answer says about itself that no provider can know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stamp {
    /// Of the call, without any prefix.
    pub id: String,
    /// The model, as the caller named it.
    pub model: String,
    /// Seconds since the epoch.
    pub created: i64,
}

impl Answer {
    /// The answer that a stream of events was, for those who want it whole.
    pub fn collect(events: impl IntoIterator<Item = Event>) -> Self {
        let mut answer = Self::default();
        for event in events {
            answer.add(event);
        }
        answer
    }

    pub fn add(&mut self, event: Event) {
        match (event, self.parts.last_mut()) {
            (Event::Open(opening), _) => self.parts.push(match opening {
                Opening::Text => Part::text(""),
                Opening::Thinking => Part::Thinking {
                    text: String::new(),
                    signature: None,
                },
                Opening::Redacted(data) => Part::Redacted { data },
                Opening::Call { id, name } => Part::Call {
                    id,
                    name,
                    arguments: String::new(),
                    cache: None,
                },
            }),
            (Event::Text(more), Some(Part::Text(part))) => part.text.push_str(&more),
            (Event::Thinking(more), Some(Part::Thinking { text, .. })) => text.push_str(&more),
            (Event::Signature(more), Some(Part::Thinking { signature, .. })) => {
                signature.get_or_insert_default().push_str(&more);
            }
            (Event::Arguments(more), Some(Part::Call { arguments, .. })) => arguments.push_str(&more),
            (Event::Usage(usage), _) => self.usage = Some(usage),
            (Event::Finish(finish), _) => self.finish = finish,
            _ => {}
        }
    }

    /// The same as events, for those who write streams only.
    pub fn into_events(self) -> Vec<Event> {
        let mut events = Vec::new();
        for part in self.parts {
            match part {
                Part::Text(TextPart { text, .. }) => {
                    events.extend([Event::Open(Opening::Text), Event::Text(text), Event::Close]);
                }
                Part::Thinking { text, signature } => {
                    events.extend([Event::Open(Opening::Thinking), Event::Thinking(text)]);
                    events.extend(signature.map(Event::Signature));
                    events.push(Event::Close);
                }
                Part::Redacted { data } => {
                    events.extend([Event::Open(Opening::Redacted(data)), Event::Close]);
                }
                Part::Call {
                    id, name, arguments, ..
                } => {
                    events.extend([
                        Event::Open(Opening::Call { id, name }),
                        Event::Arguments(arguments),
                        Event::Close,
                    ]);
                }
                // Models do not answer with these.
                Part::Image { .. } | Part::Document { .. } | Part::Result { .. } => {}
            }
        }
        events.extend(self.usage.map(Event::Usage));
        events.push(Event::Finish(self.finish));
        events
    }
}

/// What an assistant's turn says in words alone.
pub(crate) fn texts(parts: &[Part]) -> String {
    parts
        .iter()
        .filter_map(|part| match part {
            Part::Text(part) => Some(part.text.as_str()),
            _ => None,
        })
        .collect()
}

/// `data:image/png;base64,...` taken apart; any other address as it is.
pub(crate) fn source_of_url(url: String) -> Source {
    let parsed = url
        .strip_prefix("data:")
        .and_then(|rest| rest.split_once(','))
        .and_then(|(head, data)| Some((head.strip_suffix(";base64")?, data)));
    match parsed {
        Some((media, data)) => Source::Base64 {
            media: media.split(';').next().unwrap_or_default().to_owned(),
            data: data.to_owned(),
        },
        None => Source::Url(url),
    }
}

pub(crate) fn url_of_source(source: &Source) -> String {
    match source {
        Source::Url(url) => url.clone(),
        Source::Base64 { media, data } => format!("data:{media};base64,{data}"),
    }
}

/// Appends to the last turn where it is of the same role: some wires want roles to alternate.
pub(crate) fn push(turns: &mut Vec<Turn>, role: Role, parts: Vec<Part>) {
    if parts.is_empty() {
        return;
    }
    match turns.last_mut() {
        Some(last) if last.role == role => last.parts.extend(parts),
        _ => turns.push(Turn { role, parts }),
    }
}
