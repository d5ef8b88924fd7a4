//! Holds our messages against E2B's own: every field of the services, as the published SDK describes them (2.63.0;
//! `scripts/envd-fields` writes the table from another), is written in JSON, read by our type, and looked for on the wire.

use std::collections::BTreeSet;

use bytes::Buf as _;
use prost::encoding::{WireType, decode_key, decode_varint};
use serde_json::{Value, json};

use super::connect::Wire;
use super::messages::*;

const TABLE: &str = include_str!("fields.txt");

struct Known {
    name: &'static str,
    /// From JSON to the wire; `None` where it cannot be read.
    through: fn(Value) -> Option<Vec<u8>>,
    /// The fields that it always writes.
    writes: fn() -> Vec<String>,
}

fn known<T: Wire>(name: &'static str) -> Known {
    Known {
        name,
        through: |json| Some(serde_json::from_value::<T>(json).ok()?.encode_to_vec()),
        writes: || match serde_json::to_value(T::default()) {
            Ok(Value::Object(fields)) => fields.into_iter().map(|(name, _)| name).collect(),
            other => panic!("{other:?} is no message"),
        },
    }
}

fn all() -> Vec<Known> {
    vec![
        known::<WatchRequest>("filesystem.CreateWatcherRequest"),
        known::<Watcher>("filesystem.CreateWatcherResponse"),
        known::<EntryInfo>("filesystem.EntryInfo"),
        known::<FilesystemEvent>("filesystem.FilesystemEvent"),
        known::<Watcher>("filesystem.GetWatcherEventsRequest"),
        known::<WatcherEvents>("filesystem.GetWatcherEventsResponse"),
        known::<ListDirRequest>("filesystem.ListDirRequest"),
        known::<ListDirResponse>("filesystem.ListDirResponse"),
        known::<PathRequest>("filesystem.MakeDirRequest"),
        known::<EntryResponse>("filesystem.MakeDirResponse"),
        known::<MoveRequest>("filesystem.MoveRequest"),
        known::<EntryResponse>("filesystem.MoveResponse"),
        known::<PathRequest>("filesystem.RemoveRequest"),
        known::<Watcher>("filesystem.RemoveWatcherRequest"),
        known::<PathRequest>("filesystem.StatRequest"),
        known::<EntryResponse>("filesystem.StatResponse"),
        known::<WatchRequest>("filesystem.WatchDirRequest"),
        known::<WatchDirResponse>("filesystem.WatchDirResponse"),
        known::<SelectRequest>("process.CloseStdinRequest"),
        known::<SelectRequest>("process.ConnectRequest"),
        known::<EventResponse>("process.ConnectResponse"),
        known::<ProcessList>("process.ListResponse"),
        known::<Pty>("process.PTY"),
        known::<PtySize>("process.PTY.Size"),
        known::<ProcessConfig>("process.ProcessConfig"),
        known::<ProcessEvent>("process.ProcessEvent"),
        known::<DataEvent>("process.ProcessEvent.DataEvent"),
        known::<EndEvent>("process.ProcessEvent.EndEvent"),
        known::<StartEvent>("process.ProcessEvent.StartEvent"),
        known::<ProcessInfo>("process.ProcessInfo"),
        known::<ProcessInput>("process.ProcessInput"),
        known::<ProcessSelector>("process.ProcessSelector"),
        known::<SendInputRequest>("process.SendInputRequest"),
        known::<SendSignalRequest>("process.SendSignalRequest"),
        known::<StartRequest>("process.StartRequest"),
        known::<EventResponse>("process.StartResponse"),
        known::<StreamInputRequest>("process.StreamInputRequest"),
        known::<StreamInputData>("process.StreamInputRequest.DataEvent"),
        known::<SelectRequest>("process.StreamInputRequest.StartEvent"),
        known::<UpdateRequest>("process.UpdateRequest"),
    ]
}

/// One line of the table.
struct Line {
    owner: &'static str,
    name: &'static str,
    number: u32,
    kind: &'static str,
}

fn lines() -> Vec<Line> {
    let line = |line: &'static str| {
        let mut words = line.splitn(4, ' ');
        let mut word = || words.next().expect("a line has four parts");
        Line {
            owner: word(),
            name: word(),
            number: word().parse().expect("the third is a number"),
            kind: word(),
        }
    };
    TABLE.lines().map(line).collect()
}

/// As the JSON mapping writes names.
fn camel_case(name: &str) -> String {
    let mut words = name.split('_');
    let first = words.next().unwrap_or_default().to_owned();
    words.fold(first, |mut name, word| {
        let (head, tail) = word.split_at(1);
        name.push_str(&head.to_uppercase());
        name.push_str(tail);
        name
    })
}

/// A value that is not the default, and what it is on the wire: a number, or something with a length.
fn sample(kind: &str, enums: &[Line]) -> (Value, Option<u64>) {
    if let Some(kind) = kind.strip_prefix("repeated ") {
        return (json!([sample(kind, enums).0]), None);
    }
    if let Some(name) = kind.strip_prefix("enum ") {
        let value = enums
            .iter()
            .find(|line| line.owner == name && line.number != 0)
            .expect("an enum has values");
        return (value.name.into(), Some(value.number.into()));
    }
    match kind {
        "string" => (json!("x"), None),
        "bytes" => (json!("eA=="), None),
        "map" => (json!({"k": "v"}), None),
        "message google.protobuf.Timestamp" => (json!("1970-01-01T00:00:01Z"), None),
        message if message.starts_with("message ") => (json!({}), None),
        "bool" => (json!(true), Some(1)),
        "uint32" => (json!(1), Some(1)),
        "int64" => (json!("1"), Some(1)),
        "sint32" => (json!(1), Some(2)),
        other => panic!("no message here has had a field of type {other} so far"),
    }
}

/// The number of the one field in some bytes, and its value if that is a number.
fn on_the_wire(bytes: &[u8]) -> (u32, Option<u64>) {
    let mut rest = bytes;
    let (number, wire) = decode_key(&mut rest).expect("there is a field");
    let value = decode_varint(&mut rest).expect("a number, or a length");
    match wire {
        WireType::Varint => {
            assert!(!rest.has_remaining(), "one field is there");
            (number, Some(value))
        }
        WireType::LengthDelimited => {
            assert_eq!(rest.remaining() as u64, value, "one field is there");
            (number, None)
        }
        other => panic!("{other:?} is used by nobody here"),
    }
}

#[test]
fn every_field_of_the_published_services_is_where_it_is_expected() {
    let (values, fields): (Vec<Line>, Vec<Line>) = lines().into_iter().partition(|line| line.kind == "value");
    assert!(fields.len() > 80 && values.len() > 10, "the table is whole");
    let known = all();
    for line in &fields {
        let Line {
            owner, name, number, ..
        } = line;
        let message = known.iter().find(|known| known.name == *owner);
        let message = message.unwrap_or_else(|| panic!("nobody here knows {owner}"));
        let (value, expected) = sample(line.kind, &values);
        let json = json!({camel_case(name): value});
        let bytes = (message.through)(json.clone()).unwrap_or_else(|| panic!("{owner} does not read {json}"));
        assert!(!bytes.is_empty(), "{owner} has no `{name}`");
        assert_eq!(on_the_wire(&bytes), (*number, expected), "{owner}.{name}");
    }
    for message in &known {
        let own = fields.iter().filter(|line| line.owner == message.name);
        let published: BTreeSet<String> = own.map(|line| camel_case(line.name)).collect();
        assert!(!published.is_empty(), "{} is published no more", message.name);
        for written in (message.writes)() {
            assert!(
                published.contains(&written),
                "{}.{written} is ours alone",
                message.name
            );
        }
    }
}

#[test]
fn every_value_of_the_published_enums_has_its_number() {
    let known = all();
    let in_field = |owner: &str, field: &str, value: &str| {
        let message = known.iter().find(|known| known.name == owner).unwrap();
        (message.through)(json!({ field: value })).unwrap_or_else(|| panic!("{owner} does not know {value}"))
    };
    for line in lines().iter().filter(|line| line.kind == "value") {
        let bytes = match line.owner {
            "process.Signal" => in_field("process.SendSignalRequest", "signal", line.name),
            "filesystem.FileType" => in_field("filesystem.EntryInfo", "type", line.name),
            "filesystem.EventType" => in_field("filesystem.FilesystemEvent", "type", line.name),
            other => panic!("nobody here knows {other}"),
        };
        match line.number {
            // The default is not written.
            0 => assert!(bytes.is_empty(), "{}", line.name),
            number => assert_eq!(on_the_wire(&bytes).1, Some(number.into()), "{}", line.name),
        }
    }
}
