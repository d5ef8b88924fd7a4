//! The table by which requests are weighed before they are decoded: see `atoll_front::proto`.
//!
//! What a struct takes is reckoned from its descriptor, as prost lays it out: messages lie in their parents, unless that would
//! never end; lists, maps and texts lie beside them. It may come out too large, never too small; a test compares.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{DescriptorProto, FieldDescriptorProto, FileDescriptorSet};

/// A `String` or a `Vec`, and the least that one which holds anything takes beside.
const HEAD: u64 = 24;
const LEAST: u64 = 32;
const MAP: u64 = 48;

/// What a workflow's worker sends as `google.protobuf.Any` is decoded later: one of three messages, whose fields with other
/// messages have numbers of their own.
const CARRIER: (&str, u32) = (".temporal.api.protocol.v1.Message", 5);
const CARRIED: [(u32, &str); 3] = [
    (2, ".temporal.api.update.v1.Outcome"),
    (3, ".temporal.api.update.v1.Request"),
    (4, ".temporal.api.failure.v1.Failure"),
];
const ANY: &str = " any that is carried";
const ANY_VALUE: &str = " value of an any that is carried";

type Found<'a> = BTreeMap<String, &'a DescriptorProto>;

pub(crate) fn table(descriptors: &FileDescriptorSet, services: &[&str]) -> Result<String, std::fmt::Error> {
    let mut messages = Found::new();
    let mut roots = BTreeSet::new();
    for file in &descriptors.file {
        for message in &file.message_type {
            enter(&mut messages, &format!(".{}", file.package()), message);
        }
        if services.iter().any(|service| file.name().ends_with(service)) {
            let methods = file.service.iter().flat_map(|service| &service.method);
            roots.extend(methods.map(|method| method.input_type().to_owned()));
        }
    }
    let mut table = Table {
        messages: &messages,
        places: BTreeMap::new(),
        rows: Vec::new(),
    };
    for root in &roots {
        table.place(root);
    }
    let mut text = String::from("pub(crate) static MESSAGES: &[Message] = &[\n");
    for row in &table.rows {
        writeln!(text, "    Message {{ fields: &[{row}] }},")?;
    }
    text.push_str("];\n\n/// The requests, in the order of their names.\npub(crate) static REQUESTS: &[(&str, usize)] = &[\n");
    for root in &roots {
        writeln!(
            text,
            "    ({:?}, {}),",
            root.trim_start_matches('.'),
            table.places[root]
        )?;
    }
    text.push_str("];\n");
    Ok(text)
}

fn enter<'a>(messages: &mut Found<'a>, scope: &str, message: &'a DescriptorProto) {
    let name = format!("{scope}.{}", message.name());
    for nested in &message.nested_type {
        enter(messages, &name, nested);
    }
    messages.insert(name, message);
}

struct Table<'a> {
    messages: &'a Found<'a>,
    places: BTreeMap<String, usize>,
    rows: Vec<String>,
}

impl Table<'_> {
    /// Where a message is in the table; it is put there if need be.
    fn place(&mut self, name: &str) -> usize {
        if let Some(place) = self.places.get(name) {
            return *place;
        }
        let place = self.rows.len();
        self.places.insert(name.to_owned(), place);
        self.rows.push(String::new());
        let mut fields = BTreeMap::new();
        match name {
            ANY => {
                let value = self.place(ANY_VALUE);
                fields.insert(2, (format!("Message({value})"), 0, 0));
            }
            ANY_VALUE => {
                for (number, message) in CARRIED {
                    let inside = self.place(message);
                    let once = self.size(message, &mut Vec::new());
                    fields.insert(number, (format!("Message({inside})"), once, 0));
                }
            }
            name => {
                let message = self.messages[name];
                for field in &message.field {
                    let number = u32::try_from(field.number()).unwrap_or_default();
                    if let Some(costs) = self.field(name, number, field) {
                        fields.insert(number, costs);
                    }
                }
            }
        }
        let fields = fields.into_iter().map(|(number, (holds, first, next))| {
            format!("Field {{ number: {number}, holds: Holds::{holds}, first: {first}, next: {next} }}")
        });
        self.rows[place] = fields.collect::<Vec<_>>().join(", ");
        place
    }

    /// What a field holds and costs, if it is more than its bytes.
    fn field(&mut self, of: &str, number: u32, field: &FieldDescriptorProto) -> Option<(String, u64, u64)> {
        let repeated = field.label() == Label::Repeated;
        match field.r#type() {
            Type::Message if (of, number) == CARRIER => Some((format!("Message({})", self.place(ANY)), 0, 0)),
            Type::Message | Type::Group => {
                let name = field.type_name();
                let inside = self.place(name);
                let holds = format!("Message({inside})");
                let size = self.size(name, &mut Vec::new());
                let is_map = self.messages[name]
                    .options
                    .as_ref()
                    .is_some_and(|options| options.map_entry());
                Some(match repeated {
                    // Room for four, then for eight of which one stays free, and so on; and texts.
                    _ if is_map => (holds, size * 4 + 2 * LEAST, size * 3 + 2 * LEAST),
                    // A list begins with room for four, unless they are large, and doubles.
                    true => (holds, if size > 1024 { size } else { size * 4 }, size * 2),
                    false if self.is_boxed(of, name) => (holds, size, size),
                    false => (holds, 0, 0),
                })
            }
            Type::String | Type::Bytes if repeated => {
                Some(("Text".to_owned(), HEAD * 4 + LEAST, HEAD * 2 + LEAST))
            }
            _ if repeated => Some(("Numbers".to_owned(), 32, 16)),
            _ => None,
        }
    }

    /// Whether a message would hold itself.
    fn is_boxed(&self, of: &str, name: &str) -> bool {
        fn leads(messages: &Found<'_>, from: &str, to: &str, seen: &mut BTreeSet<String>) -> bool {
            from == to
                || seen.insert(from.to_owned())
                    && messages[from].field.iter().any(|field| {
                        field.label() != Label::Repeated
                            && field.r#type() == Type::Message
                            && leads(messages, field.type_name(), to, seen)
                    })
        }
        leads(self.messages, name, of, &mut BTreeSet::new())
    }

    /// What a struct takes; `within` are those that it lies in.
    fn size(&self, name: &str, within: &mut Vec<String>) -> u64 {
        if within.iter().any(|outer| outer == name) {
            return 8;
        }
        within.push(name.to_owned());
        let message = self.messages[name];
        let mut sum = 0;
        let mut largest = BTreeMap::<i32, u64>::new();
        for field in &message.field {
            let is_map = field.r#type() == Type::Message
                && self.messages[field.type_name()]
                    .options
                    .as_ref()
                    .is_some_and(|options| options.map_entry());
            let size = match field.r#type() {
                _ if is_map => MAP,
                _ if field.label() == Label::Repeated => HEAD,
                Type::Message | Type::Group => self.size(field.type_name(), within) + 8,
                Type::String | Type::Bytes => HEAD,
                _ => 8,
            };
            match field.oneof_index {
                Some(index) => {
                    let most = largest.entry(index).or_default();
                    *most = size.max(*most);
                }
                None => sum += size,
            }
        }
        within.pop();
        sum + largest.values().map(|size| size + 8).sum::<u64>()
    }
}
