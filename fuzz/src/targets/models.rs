//! Conversations with models: what clients ask, and what providers answer, which is not to be trusted either.

use std::sync::LazyLock;

use atoll_dialects::screen::{Action, KNOWN, Screen};
use atoll_dialects::{
    Answer, Ask, Dialect, Event, Peek, ReadStream, Rewrite, Stamp, Watch, WriteStream, ai_sdk, chat,
    converse, embeddings, event_stream, failure, gemini, messages, responses, sse,
};
use bytes::Bytes;
use serde_json::{Value, json};

fn stamp() -> Stamp {
    Stamp {
        id: "call".to_owned(),
        model: "model".to_owned(),
        created: 0,
    }
}

/// Events come out with exactly the bytes that went in, however these are cut.
pub fn sse(input: &[u8]) {
    let split = |piece: usize| {
        let (mut splitter, mut events) = (sse::Splitter::default(), Vec::new());
        for chunk in input.chunks(piece) {
            splitter.push(chunk);
            while let Ok(Some(event)) = splitter.take() {
                events.push(event);
            }
        }
        let rest = splitter.rest();
        (events, rest)
    };
    let (whole, rest) = split(usize::MAX);
    let joined: Vec<u8> = whole
        .iter()
        .chain(&rest)
        .flat_map(|event| event.0.to_vec())
        .collect();
    assert!(
        joined == input,
        "the bytes of events are not the bytes of the stream"
    );
    for event in &whole {
        let data = event.data().map_or(0, |data| data.len());
        assert!(data <= event.0.len());
        for dialect in [Dialect::Chat, Dialect::Responses, Dialect::Messages] {
            Watch::new(dialect).event(event);
        }
    }
    // Where a stream is cut between CR and LF, an event may end before the LF, which then stands before the next.
    if !input.contains(&b'\r') {
        for piece in [1, 3, 64] {
            if input.len() < 8192 || piece > 1 {
                assert!(split(piece).0 == whole, "other events in pieces of {piece}");
            }
        }
    }
}

/// What is written is read as it was; what is read has one line of data.
pub fn event_stream(input: &[u8]) {
    let mut splitter = event_stream::Splitter::default();
    splitter.push(input);
    let mut count = 0;
    while let Ok(Some(event)) = splitter.take() {
        count += 1;
        let lines = event.0.iter().filter(|byte| **byte == b'\n').count();
        assert_eq!(lines, 2, "an event of several lines");
    }
    assert!(
        count <= input.len() / 16,
        "{count} events in {} bytes",
        input.len()
    );
    // As if the checksums were right: the input as the headers and the payload of a message.
    if let Some((first, rest)) = input.split_first() {
        let headers = usize::from(*first).min(rest.len());
        let message = with_checksums(&rest[..headers], &rest[headers..]);
        let mut splitter = event_stream::Splitter::default();
        splitter.push(&message);
        if let Ok(Some(event)) = splitter.take() {
            assert!(event.data().is_some(), "an event without data");
        }
    }
    let name: String = String::from_utf8_lossy(input)
        .chars()
        .filter(char::is_ascii_alphanumeric)
        .take(40)
        .collect();
    let mut written = Vec::new();
    event_stream::write(&mut written, &name, input);
    let mut splitter = event_stream::Splitter::default();
    splitter.push(&written);
    assert!(
        matches!(splitter.take(), Ok(Some(_))),
        "what was written cannot be read"
    );
}

fn with_checksums(headers: &[u8], payload: &[u8]) -> Vec<u8> {
    let length = |bytes: usize| u32::try_from(bytes).unwrap_or(u32::MAX).to_be_bytes();
    let mut out = length(16 + headers.len() + payload.len()).to_vec();
    out.extend_from_slice(&length(headers.len()));
    out.extend_from_slice(&crc32fast::hash(&out).to_be_bytes());
    out.extend_from_slice(headers);
    out.extend_from_slice(payload);
    out.extend_from_slice(&crc32fast::hash(&out).to_be_bytes());
    out
}

/// What is peeked at is what a full parse finds, and a rewritten body is the same but for what was to change.
pub fn model_peek(input: &[u8]) {
    let body = Bytes::copy_from_slice(input);
    let Ok(peek) = Peek::at(Dialect::Chat, input) else {
        return;
    };
    let Ok(Value::Object(object)) = serde_json::from_slice::<Value>(input) else {
        // An array can be read as if its items were fields in their order; such a body has no names to rewrite.
        assert!(
            !input.trim_ascii_start().starts_with(b"{"),
            "something is peeked at in what cannot be parsed"
        );
        return;
    };
    assert_eq!(peek.model.as_deref(), object.get("model").and_then(Value::as_str));
    assert_eq!(
        peek.stream,
        object.get("stream").and_then(Value::as_bool).unwrap_or(false)
    );
    let rewrite = Rewrite {
        model: Some("other\"model"),
        ask_usage: true,
        limit: None,
        strip: true,
    };
    let Ok(written) = rewrite.apply(&body) else { return };
    let mut expected = object.clone();
    for name in ["providerOptions", "provider", "models"] {
        expected.remove(name);
    }
    if expected.contains_key("model") && !expected["model"].is_null() {
        expected["model"] = json!("other\"model");
    }
    let written: Value = serde_json::from_slice(&written).unwrap_or_else(|error| {
        panic!(
            "a rewritten body is no JSON: {error}: {:?}",
            String::from_utf8_lossy(&written)
        )
    });
    let options = written["stream_options"].clone();
    let options_were_wrong = object
        .get("stream_options")
        .is_some_and(|options| !options.is_object() && !options.is_null());
    assert!(
        options_were_wrong || options["include_usage"] == true,
        "usage is not asked for"
    );
    expected.insert("stream_options".to_owned(), options);
    for (name, value) in &expected {
        assert_eq!(written.get(name), Some(value), "`{name}` was changed");
    }
    assert_eq!(
        written.as_object().map(serde_json::Map::len),
        Some(expected.len()),
        "fields were added or lost"
    );
}

/// On every wire that providers speak; what is written for one has a text form and is not much longer than what was asked.
fn write_everywhere(ask: &Ask, input: &[u8]) {
    let most = 64 * input.len() + 4096;
    let written = [
        chat::write_request(ask, "model"),
        messages::write_request(ask, "model", Some(1000)),
        messages::write_request(ask, "model", None),
        gemini::write_request(ask),
        converse::write_request(ask, "model", Some(1000)),
    ];
    for value in written.into_iter().flatten() {
        let length = value.to_string().len();
        assert!(
            length <= most,
            "a request of {} bytes became one of {length}",
            input.len()
        );
    }
}

/// What one wire says can be said on the others, or is refused; what is written on a wire that is also read, can be read.
pub fn model_request(input: &[u8]) {
    let asked = [
        chat::read_request(input),
        responses::read_request(input),
        messages::read_request(input),
        ai_sdk::read_request(input, false),
        ai_sdk::read_request(input, true),
    ];
    for ask in asked.into_iter().flatten() {
        write_everywhere(&ask, input);
        if let Ok(chat) = chat::write_request(&ask, "model") {
            let again = chat::read_request(chat.to_string().as_bytes());
            assert!(
                again.is_ok(),
                "what is written for chat cannot be read: {again:?}"
            );
        }
        if let Ok(written) = messages::write_request(&ask, "model", Some(1000)) {
            let again = messages::read_request(written.to_string().as_bytes());
            assert!(
                again.is_ok(),
                "what is written for messages cannot be read: {again:?}"
            );
        }
    }
    for ask in [embeddings::read_request(input), embeddings::read_ai_sdk(input)]
        .into_iter()
        .flatten()
    {
        let _ = embeddings::write_openai(&ask, "model");
        let _ = embeddings::write_gemini(&ask, "model");
    }
}

fn write_answer(answer: &Answer, input: &[u8]) {
    let most = 64 * input.len() + 8192;
    for value in [
        chat::write_answer(answer, &stamp()),
        responses::write_answer(answer, &stamp()),
        messages::write_answer(answer, &stamp()),
        ai_sdk::write_answer(answer, &stamp(), "now", &Value::Null),
    ] {
        let length = value.to_string().len();
        assert!(
            length <= most,
            "an answer of {} bytes became one of {length}",
            input.len()
        );
    }
    let again = chat::read_answer(chat::write_answer(answer, &stamp()).to_string().as_bytes());
    assert!(
        again.is_ok(),
        "an answer that was written for chat cannot be read: {again:?}"
    );
    let again = messages::read_answer(messages::write_answer(answer, &stamp()).to_string().as_bytes());
    assert!(
        again.is_ok(),
        "an answer that was written for messages cannot be read: {again:?}"
    );
    // As a stream and back it says the same.
    let collected = Answer::collect(answer.clone().into_events());
    assert_eq!(collected.finish, answer.finish);
    assert_eq!(collected.usage, answer.usage);
}

pub fn model_answer(input: &[u8]) {
    let answers = [
        chat::read_answer(input),
        messages::read_answer(input),
        gemini::read_answer(input),
        converse::read_answer(input),
    ];
    for answer in answers.into_iter().flatten() {
        write_answer(&answer, input);
    }
    for dialect in [
        Dialect::Chat,
        Dialect::Responses,
        Dialect::Messages,
        Dialect::Embeddings,
    ] {
        let mut watch = Watch::new(dialect);
        watch.body(input);
    }
    for answer in [embeddings::read_openai(input), embeddings::read_gemini(input)]
        .into_iter()
        .flatten()
    {
        let _ = embeddings::write_openai_answer(&answer, "model", true);
        let _ = embeddings::write_openai_answer(&answer, "model", false);
        let _ = embeddings::write_ai_sdk_answer(&answer, &Value::Null);
    }
}

fn writers() -> Vec<Box<dyn WriteStream>> {
    vec![
        Box::new(chat::Writer::new(stamp(), true)),
        Box::new(responses::Writer::new(stamp())),
        Box::new(messages::Writer::new(stamp())),
        Box::new(ai_sdk::Writer::new(stamp(), "now".to_owned(), Value::Null)),
    ]
}

/// The first byte says which provider; the rest is its stream. What is written for clients is a stream of whole events.
pub fn model_stream(input: &[u8]) {
    let Some((which, stream)) = input.split_first() else {
        return;
    };
    let mut readers: [Box<dyn ReadStream>; 4] = [
        Box::new(chat::Reader::default()),
        Box::new(messages::Reader::default()),
        Box::new(gemini::Reader::default()),
        Box::new(converse::Reader::default()),
    ];
    let reader = &mut readers[usize::from(which & 3)];
    let mut splitter = sse::Splitter::default();
    splitter.push(stream);
    let mut events: Vec<Event> = Vec::new();
    while let Ok(Some(raw)) = splitter.take() {
        for dialect in [Dialect::Chat, Dialect::Responses, Dialect::Messages] {
            Watch::new(dialect).event(&raw);
        }
        if let Some(data) = raw.data()
            && reader.read(&data, &mut events).is_err()
        {
            break;
        }
    }
    reader.end(&mut events);
    let finishes = events
        .iter()
        .filter(|event| matches!(event, Event::Finish { .. }))
        .count();
    assert!(finishes <= 1, "a stream ends {finishes} times");
    if finishes == 1 {
        assert!(
            matches!(events.last(), Some(Event::Finish { .. })),
            "something follows the end"
        );
    }
    let most = 512 * stream.len() + 16_384;
    for mut writer in writers() {
        let mut out = Vec::new();
        for event in &events {
            writer.write(event, &mut out);
        }
        assert!(
            out.len() <= most,
            "a stream of {} bytes became one of {}",
            stream.len(),
            out.len()
        );
        let mut splitter = sse::Splitter::default();
        splitter.push(&out);
        while let Ok(Some(_)) = splitter.take() {}
        assert_eq!(splitter.rest(), None, "an event was written in part");
    }
    write_answer(&Answer::collect(events), stream);
    let _ = failure(Dialect::Chat, &String::from_utf8_lossy(stream));
}

/// Whether two values have the same shape, texts aside.
fn same_shape(one: &Value, other: &Value) -> bool {
    match (one, other) {
        (Value::String(_), Value::String(_)) => true,
        (Value::Array(one), Value::Array(other)) => {
            one.len() == other.len() && one.iter().zip(other).all(|(one, other)| same_shape(one, other))
        }
        (Value::Object(one), Value::Object(other)) => {
            // Names of fields may be redacted, too.
            one.iter()
                .all(|(name, one)| other.get(name).is_none_or(|other| same_shape(one, other)))
        }
        _ => one == other,
    }
}

/// With or without a find, JSON stays JSON of the same shape.
pub fn screen(input: &[u8]) {
    let body = Bytes::copy_from_slice(input);
    // Compiled once: that takes longer than all that is done with it.
    static ALL_KNOWN: LazyLock<Screen> = LazyLock::new(|| {
        let rules = KNOWN.map(|name| (name, None, Action::Redact));
        Screen::new(rules).expect("the known rules can be used together")
    });
    let Ok(screened) = ALL_KNOWN.apply(&body, || true) else {
        return;
    };
    let Ok(before) = serde_json::from_slice::<Value>(input) else {
        return;
    };
    let after = serde_json::from_slice::<Value>(&screened);
    assert!(
        after.is_ok_and(|after| same_shape(&before, &after)),
        "screening changed more than texts"
    );
    // A pattern of a tenant's own, as long as it may be.
    if let Ok(own) = std::str::from_utf8(input) {
        let own: String = own.chars().take(200).collect();
        if let Ok(screen) = Screen::new([("own", Some(own.as_str()), Action::Redact)]) {
            let text = br#"{"a":"some text of 123 letters aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"}"#;
            let _ = screen.apply(&Bytes::from_static(text), || true);
        }
    }
}
