//! A request's JSON, read once and strictly: what a gateway finds in it must be what any provider finds in it.
//!
//! What must hold: a name stands at most once in an object, at any depth, because one reader takes the first of two and
//! another the last. Names that are looked for are spelled as the wire spells them, because some readers do not mind case.
//! Memory is bounded: of a long text its beginning and its length are kept, and the number of values has a limit.

use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt;

use serde::de::{DeserializeSeed, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use crate::PeekError;

/// No conversation has more, and each takes a few dozen bytes while it is looked at.
const MOST_VALUES: usize = 1_000_000;
/// What is kept of a text: names, types and the beginnings of URLs are shorter.
const LONGEST_TEXT: usize = 512;
/// Objects with more fields than this are searched with a set.
const MANY_FIELDS: usize = 16;

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Node<'a> {
    Null,
    Flag(bool),
    Number(Number),
    Text(Text<'a>),
    List(Vec<Self>),
    Object(Fields<'a>),
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Text<'a> {
    /// The beginning.
    pub(crate) start: Cow<'a, str>,
    /// Bytes of the whole.
    pub(crate) len: usize,
}

#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Fields<'a>(Vec<(Cow<'a, str>, Node<'a>)>);

impl<'a> Fields<'a> {
    /// Reads a body, which is one object.
    pub(crate) fn parse(body: &'a [u8]) -> Result<Self, PeekError> {
        let wrong = |error: serde_json::Error| PeekError(error.to_string());
        let mut left = MOST_VALUES;
        let mut deserializer = serde_json::Deserializer::from_slice(body);
        let node = Reader { left: &mut left }
            .deserialize(&mut deserializer)
            .map_err(wrong)?;
        deserializer.end().map_err(wrong)?;
        match node {
            Node::Object(fields) => Ok(fields),
            other => Err(PeekError(format!("it is {}", other.kind()))),
        }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, &Node<'a>)> {
        self.0.iter().map(|(name, node)| (name.as_ref(), node))
    }

    /// A field; one that is `null` is not there.
    pub(crate) fn get(&self, name: &str) -> Option<&Node<'a>> {
        let (_, node) = self.0.iter().find(|(own, _)| own == name)?;
        (*node != Node::Null).then_some(node)
    }

    pub(crate) fn text(&self, name: &str) -> Option<&str> {
        match self.get(name)? {
            Node::Text(text) => Some(&text.start),
            _ => None,
        }
    }

    pub(crate) fn object(&self, name: &str) -> Option<&Self> {
        match self.get(name)? {
            Node::Object(fields) => Some(fields),
            _ => None,
        }
    }

    /// A whole number that is not negative. What is something else is an error: a provider may read it as it likes.
    pub(crate) fn count(&self, name: &str) -> Result<Option<u64>, PeekError> {
        match self.get(name) {
            None => Ok(None),
            Some(Node::Number(number)) if number.is_u64() => Ok(number.as_u64()),
            Some(_) => Err(PeekError(format!("`{name}` is not a whole number"))),
        }
    }

    pub(crate) fn flag(&self, name: &str) -> Result<Option<bool>, PeekError> {
        match self.get(name) {
            None => Ok(None),
            Some(Node::Flag(flag)) => Ok(Some(*flag)),
            Some(_) => Err(PeekError(format!("`{name}` is neither true nor false"))),
        }
    }

    /// Refuses a name that is one of `known` but for its case, which some providers do not mind.
    pub(crate) fn refuse_other_spellings(&self, known: &[&str]) -> Result<(), PeekError> {
        for (name, _) in self.iter() {
            let folded = fold(name);
            if let Some(right) = known
                .iter()
                .find(|known| **known != name && fold(known) == folded)
            {
                return Err(PeekError(format!(
                    "`{}` is spelled `{right}`",
                    name.escape_debug()
                )));
            }
        }
        Ok(())
    }
}

/// As readers fold names that do not mind case: ASCII, and the two letters outside of it that fold into it.
fn fold(name: &str) -> String {
    name.chars()
        .map(|letter| match letter {
            'ſ' => 's',
            '\u{212a}' => 'k',
            other => other.to_ascii_lowercase(),
        })
        .collect()
}

impl Node<'_> {
    fn kind(&self) -> &'static str {
        match self {
            Node::Null => "null",
            Node::Flag(_) => "a boolean",
            Node::Number(_) => "a number",
            Node::Text(_) => "a string",
            Node::List(_) => "a list",
            Node::Object(_) => "an object",
        }
    }

    /// As a value of its own, with long texts shortened: for what is said to the gateway, where nothing is long.
    pub(crate) fn to_value(&self) -> Value {
        match self {
            Node::Null => Value::Null,
            Node::Flag(flag) => (*flag).into(),
            Node::Number(number) => Value::Number(number.clone()),
            Node::Text(text) => text.start.as_ref().into(),
            Node::List(items) => items.iter().map(Node::to_value).collect(),
            Node::Object(fields) => {
                let fields = fields
                    .iter()
                    .map(|(name, node)| (name.to_owned(), node.to_value()));
                Value::Object(fields.collect::<Map<_, _>>())
            }
        }
    }
}

struct Reader<'l> {
    left: &'l mut usize,
}

impl<'de> DeserializeSeed<'de> for Reader<'_> {
    type Value = Node<'de>;

    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<Node<'de>, D::Error> {
        let Some(left) = self.left.checked_sub(1) else {
            return Err(D::Error::custom(format!(
                "it holds more than {MOST_VALUES} values"
            )));
        };
        *self.left = left;
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Reader<'_> {
    type Value = Node<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Node<'de>, E> {
        Ok(Node::Null)
    }

    fn visit_bool<E>(self, flag: bool) -> Result<Node<'de>, E> {
        Ok(Node::Flag(flag))
    }

    fn visit_u64<E>(self, number: u64) -> Result<Node<'de>, E> {
        Ok(Node::Number(number.into()))
    }

    fn visit_i64<E>(self, number: i64) -> Result<Node<'de>, E> {
        Ok(Node::Number(number.into()))
    }

    fn visit_f64<E>(self, number: f64) -> Result<Node<'de>, E> {
        Ok(Number::from_f64(number).map_or(Node::Null, Node::Number))
    }

    fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Node<'de>, E> {
        Ok(Node::Text(Text {
            start: Cow::Borrowed(beginning(text)),
            len: text.len(),
        }))
    }

    fn visit_str<E>(self, text: &str) -> Result<Node<'de>, E> {
        Ok(Node::Text(Text {
            start: Cow::Owned(beginning(text).to_owned()),
            len: text.len(),
        }))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Node<'de>, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element_seed(Reader { left: self.left })? {
            list.push(item);
        }
        Ok(Node::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Node<'de>, A::Error> {
        let mut fields: Vec<(Cow<'de, str>, Node<'de>)> = Vec::new();
        let mut names: HashSet<Cow<'de, str>> = HashSet::new();
        while let Some(name) = entries.next_key_seed(Name)? {
            let is_there = if fields.len() < MANY_FIELDS {
                fields.iter().any(|(other, _)| *other == name)
            } else {
                if names.is_empty() {
                    names.extend(fields.iter().map(|(name, _)| name.clone()));
                }
                !names.insert(name.clone())
            };
            if is_there {
                let shown: String = name.chars().take(100).collect();
                return Err(A::Error::custom(format!(
                    "the name `{}` stands twice in one object",
                    shown.escape_debug()
                )));
            }
            let value = entries.next_value_seed(Reader { left: self.left })?;
            fields.push((name, value));
        }
        Ok(Node::Object(Fields(fields)))
    }
}

fn beginning(text: &str) -> &str {
    let mut end = text.len().min(LONGEST_TEXT);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

struct Name;

impl<'de> DeserializeSeed<'de> for Name {
    type Value = Cow<'de, str>;

    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl<'de> Visitor<'de> for Name {
    type Value = Cow<'de, str>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a name")
    }

    fn visit_borrowed_str<E>(self, name: &'de str) -> Result<Self::Value, E> {
        Ok(Cow::Borrowed(name))
    }

    fn visit_str<E>(self, name: &str) -> Result<Self::Value, E> {
        Ok(Cow::Owned(name.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(body: &str) -> Result<Fields<'_>, String> {
        Fields::parse(body.as_bytes()).map_err(|error| error.to_string())
    }

    #[test]
    fn what_readers_may_read_differently_is_refused() {
        let many: String = (0..40).map(|n| format!(r#""f{n}":{n},"#)).collect();
        for (body, why) in [
            (
                r#"{"max_tokens":1,"max_tokens":100000}"#.to_owned(),
                "stands twice",
            ),
            (
                r#"{"max_tokens":1,"max_tok\u0065ns":100000}"#.to_owned(),
                "stands twice",
            ),
            (r#"{"a":[{"b":{"c":1,"c":2}}]}"#.to_owned(), "stands twice"),
            (format!(r#"{{{many}"f3":1}}"#), "`f3` stands twice"),
            ("\u{feff}{}".to_owned(), "expected value"),
            (r#"{"a":1}{"b":2}"#.to_owned(), "trailing"),
            (r#"{"a":"\ud800"}"#.to_owned(), "hex escape"),
            (r#"{"a":NaN}"#.to_owned(), "expected value"),
            (
                format!("{}1{}", "[".repeat(200), "]".repeat(200)),
                "recursion limit",
            ),
            (
                format!(r#"{{"a":[{}0]}}"#, "0,".repeat(MOST_VALUES)),
                "more than 1000000 values",
            ),
            ("[]".to_owned(), "it is a list"),
        ] {
            let error = parse(&body).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
        assert!(Fields::parse(b"{\"a\":\"\xff\"}").is_err());
    }

    #[test]
    fn names_are_spelled_as_the_wire_spells_them() {
        let known = ["max_tokens", "stream"];
        for body in [
            r#"{"Max_Tokens":1}"#,
            r#"{"max_tokens":1,"MAX_TOKENS":2}"#,
            r#"{"max_to\u212aens":1}"#,
            r#"{"ſtream":true}"#,
        ] {
            assert!(
                parse(body).unwrap().refuse_other_spellings(&known).is_err(),
                "{body}"
            );
        }
        let fine = parse(r#"{"max_tokens":1,"x":{"Stream":1}}"#).unwrap();
        assert!(fine.refuse_other_spellings(&known).is_ok());
    }

    #[test]
    fn numbers_and_flags_are_what_they_must_be() {
        for body in [
            r#"{"n":-1}"#,
            r#"{"n":1e5}"#,
            r#"{"n":"1"}"#,
            r#"{"n":1.5}"#,
            r#"{"n":99999999999999999999}"#,
        ] {
            assert!(parse(body).unwrap().count("n").is_err(), "{body}");
        }
        assert_eq!(parse(r#"{"n":7,"m":null}"#).unwrap().count("n").unwrap(), Some(7));
        assert_eq!(parse(r#"{"m":null}"#).unwrap().count("m").unwrap(), None);
        assert!(parse(r#"{"s":"yes"}"#).unwrap().flag("s").is_err());
    }

    #[test]
    fn of_a_long_text_its_beginning_and_its_length_are_kept() {
        let body = format!(r#"{{"a":"{}","b":"x\n{}"}}"#, "é".repeat(1000), "y".repeat(1000));
        let fields = parse(&body).unwrap();
        let Some(Node::Text(text)) = fields.get("a") else {
            panic!()
        };
        assert_eq!((text.len, text.start.len()), (2000, LONGEST_TEXT));
        let Some(Node::Text(text)) = fields.get("b") else {
            panic!()
        };
        assert_eq!((text.len, text.start.len()), (1002, LONGEST_TEXT));
    }
}
