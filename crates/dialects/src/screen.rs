//! Finds personal data in what is asked, before it leaves for a provider.
//!
//! It looks at every text of a request's JSON, on whichever wire, with its escapes undone, and at the names of fields, which in
//! arguments of tools are as much the caller's as what they hold; numbers are not looked at. A pattern alone finds too much, so
//! where a number carries check digits they have to be right.
//!
//! What must hold: without a find not a byte changes. With one, nothing but the texts and names that it was in; names that are
//! redacted stay different from each other. What is found is named
//! by its rule and never repeated. It is no proof: who wants to get something past it writes it in words.
//!
//! Patterns and texts may both be a tenant's, made to take long together. So a text is looked at in windows, and between
//! windows and finds the caller is asked whether to go on ([`Stopped::TooLong`]): no step takes longer than the largest set of
//! patterns on one window. A find belongs to the window that it begins in, and windows overlap: what is found in texts
//! longer than a window is the same as without windows, as long as it is shorter than the overlap. Longer finds may be missed
//! there, or cut short.

use std::ops::Range;

use bytes::Bytes;
use regex::{Regex, RegexSet};

/// What is done about a find.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    Refuse,
    /// `[name of the rule]` is put in its place.
    Redact,
}

/// The rules that are known by name.
pub const KNOWN: [&str; 5] = ["email", "phone", "card", "iban", "ssn"];

/// The longest pattern of an operator's own.
const LONGEST_PATTERN: usize = 1000;
/// The longest name of a rule: it is put into texts in place of what is found.
const LONGEST_NAME: usize = 64;
/// A pattern's program may take this much memory.
const LARGEST_PROGRAM: usize = 256 * 1024;
/// And the program of all patterns together.
const LARGEST_TOGETHER: usize = 1024 * 1024;

/// A text is looked at in pieces of this size.
const WINDOW: usize = 16 * 1024;
/// So much of a piece is looked at again with the next one.
const OVERLAP: usize = 4 * 1024;
/// Beside four times its length, what redacting may make of a text.
const GROWTH: usize = 64 * 1024;

#[derive(Debug, Clone)]
pub struct Screen {
    /// Whether anything matches at all, in one pass.
    any: RegexSet,
    rules: Vec<Rule>,
}

/// Whether what looks right is right.
type Check = fn(&str) -> bool;

#[derive(Debug, Clone)]
struct Rule {
    name: String,
    pattern: Regex,
    is_sound: Check,
    action: Action,
}

/// A text that a rule refuses.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Stopped {
    #[error("the request holds what the rule `{0}` looks for")]
    Found(String),
    #[error("a text of the request is not valid JSON")]
    Unreadable,
    #[error(
        "looking through the request with the rules takes too long, or what they put into it is too long"
    )]
    TooLong,
}

/// A piece of a text.
struct Window {
    start: usize,
    /// Where the next one starts: finds from there on are the next one's. The last one has all.
    next: usize,
    end: usize,
}

/// The last place at or before `at` where a letter begins, or the end of the text.
fn boundary(text: &str, at: usize) -> usize {
    let mut at = at.min(text.len());
    while !text.is_char_boundary(at) {
        at -= 1;
    }
    at
}

fn windows(text: &str) -> impl Iterator<Item = Window> {
    let mut from = Some(0);
    std::iter::from_fn(move || {
        let start = from?;
        let end = boundary(text, start + WINDOW);
        let next = (end < text.len()).then(|| boundary(text, start + WINDOW - OVERLAP));
        from = next;
        Some(Window {
            start,
            next: next.unwrap_or(usize::MAX),
            end,
        })
    })
}

impl Screen {
    /// Rules as `(name, pattern of one's own, action)`.
    pub fn new<'a>(
        rules: impl IntoIterator<Item = (&'a str, Option<&'a str>, Action)>,
    ) -> Result<Self, String> {
        let mut compiled = Vec::new();
        for (name, own, action) in rules {
            let known: Option<(&str, Check)> = match name {
                "email" => Some((
                    r"(?i)\b[a-z0-9._%+-]{1,64}@(?:[a-z0-9-]{1,63}\.){1,8}[a-z]{2,24}\b",
                    |_| true,
                )),
                "phone" => Some((r"\+[1-9](?:[ .()-]{0,2}[0-9]){7,14}\b", |_| true)),
                "card" => Some((r"\b[0-9](?:[ -]?[0-9]){12,18}\b", has_card_digits)),
                "iban" => Some((r"\b[A-Z]{2}[0-9]{2}(?: ?[A-Z0-9]){11,30}\b", has_iban_digits)),
                "ssn" => Some((r"\b[0-9]{3}-[0-9]{2}-[0-9]{4}\b", is_given_ssn)),
                _ => None,
            };
            let (text, is_sound) = match (known, own) {
                (Some(known), None) => known,
                (None, Some(own)) => (own, (|_| true) as Check),
                (Some(_), Some(_)) => {
                    return Err(format!(
                        "`{name}` is known and takes no pattern; choose another name"
                    ));
                }
                (None, None) => {
                    return Err(format!(
                        "`{name}` is not one of {}: give it a pattern",
                        KNOWN.join(", ")
                    ));
                }
            };
            if name.len() > LONGEST_NAME {
                return Err(format!("the name of a rule has at most {LONGEST_NAME} bytes"));
            }
            if text.len() > LONGEST_PATTERN {
                return Err(format!(
                    "the pattern of `{name}` is longer than {LONGEST_PATTERN} bytes"
                ));
            }
            let pattern = regex::RegexBuilder::new(text)
                .size_limit(LARGEST_PROGRAM)
                .dfa_size_limit(LARGEST_PROGRAM)
                .build();
            let pattern =
                pattern.map_err(|error| format!("the pattern of `{name}` cannot be used: {error}"))?;
            if pattern.is_match("") {
                return Err(format!(
                    "the pattern of `{name}` matches nothing at all, so everything"
                ));
            }
            compiled.push(Rule {
                name: name.to_owned(),
                pattern,
                is_sound,
                action,
            });
        }
        let any = regex::RegexSetBuilder::new(compiled.iter().map(|rule| rule.pattern.as_str()))
            .size_limit(LARGEST_TOGETHER)
            .dfa_size_limit(LARGEST_TOGETHER)
            .build();
        Ok(Self {
            any: any.map_err(|error| format!("the patterns cannot be used together: {error}"))?,
            rules: compiled,
        })
    }

    pub fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    /// The body as it may be sent. `may_go_on` is asked again and again; when it says no, the answer is
    /// [`Stopped::TooLong`].
    pub fn apply(&self, body: &Bytes, may_go_on: impl Fn() -> bool) -> Result<Bytes, Stopped> {
        let most = body.len().saturating_mul(4).saturating_add(GROWTH);
        let mut changed: Vec<u8> = Vec::new();
        let (mut kept, mut at, mut names) = (0, 0, 0);
        while let Some(start) = memchr::memchr(b'"', &body[at..]).map(|found| at + found) {
            let end = end_of_text(body, start).ok_or(Stopped::Unreadable)?;
            at = end;
            if let Some(mut text) = self.screen(&body[start..end], &may_go_on)? {
                let is_name = body[end..].trim_ascii_start().first() == Some(&b':');
                if is_name {
                    names += 1;
                    text.insert_str(text.len() - 1, &format!(" {names}"));
                }
                changed.extend_from_slice(&body[kept..start]);
                changed.extend_from_slice(text.as_bytes());
                kept = end;
                if changed.len() > most {
                    return Err(Stopped::TooLong);
                }
            }
        }
        if kept == 0 {
            return Ok(body.clone());
        }
        changed.extend_from_slice(&body[kept..]);
        Ok(changed.into())
    }

    /// A text with its quotes, changed; `None`: it may stay as it is.
    fn screen(&self, quoted: &[u8], may_go_on: &impl Fn() -> bool) -> Result<Option<String>, Stopped> {
        let plain = &quoted[1..quoted.len() - 1];
        let undone: String;
        let text = if plain.contains(&b'\\') {
            undone = serde_json::from_slice(quoted).map_err(|_| Stopped::Unreadable)?;
            undone.as_str()
        } else {
            std::str::from_utf8(plain).map_err(|_| Stopped::Unreadable)?
        };
        let most = text.len().saturating_mul(4).saturating_add(GROWTH);
        let mut now = std::borrow::Cow::Borrowed(text);
        let mut changed = false;
        for rule in self.matching(text, may_go_on)? {
            let found = rule.finds(&now, may_go_on)?;
            match (found.is_empty(), rule.action) {
                (true, _) => {}
                (false, Action::Refuse) => return Err(Stopped::Found(rule.name.clone())),
                (false, Action::Redact) => {
                    now = redact(&now, &found, &rule.name, most)?.into();
                    changed = true;
                }
            }
        }
        Ok(changed.then(|| serde_json::Value::from(now.into_owned()).to_string()))
    }

    /// The rules whose patterns are in a text, in one pass over it.
    fn matching(&self, text: &str, may_go_on: &impl Fn() -> bool) -> Result<Vec<&Rule>, Stopped> {
        let mut is_in = vec![false; self.rules.len()];
        for window in windows(text) {
            if !may_go_on() {
                return Err(Stopped::TooLong);
            }
            for index in self.any.matches_at(&text[..window.end], window.start) {
                is_in[index] = true;
            }
        }
        let rules = self.rules.iter().zip(is_in);
        Ok(rules.filter(|(_, is_in)| *is_in).map(|(rule, _)| rule).collect())
    }
}

impl Rule {
    /// Where what it looks for is in a text; the first place alone where that is enough.
    fn finds(&self, text: &str, may_go_on: &impl Fn() -> bool) -> Result<Vec<Range<usize>>, Stopped> {
        let mut found = Vec::new();
        let mut at = 0;
        for window in windows(text) {
            at = at.max(window.start);
            while at <= window.end {
                if !may_go_on() {
                    return Err(Stopped::TooLong);
                }
                let one = self.pattern.find_at(&text[..window.end], at);
                let Some(one) = one.filter(|one| one.start() < window.next) else {
                    break;
                };
                at = match one.is_empty() {
                    false => one.end(),
                    // Behind the next letter, or the same would be found for ever.
                    true => one.end() + text[one.end()..].chars().next().map_or(1, char::len_utf8),
                };
                if (self.is_sound)(one.as_str()) {
                    found.push(one.range());
                    if self.action == Action::Refuse {
                        return Ok(found);
                    }
                }
            }
        }
        Ok(found)
    }
}

fn redact(text: &str, found: &[Range<usize>], name: &str, most: usize) -> Result<String, Stopped> {
    let grown = text
        .len()
        .saturating_add(found.len().saturating_mul(name.len() + 2));
    if grown > most {
        return Err(Stopped::TooLong);
    }
    let mut redacted = String::with_capacity(grown);
    let mut kept = 0;
    for range in found {
        redacted.push_str(&text[kept..range.start]);
        redacted.push('[');
        redacted.push_str(name);
        redacted.push(']');
        kept = range.end;
    }
    redacted.push_str(&text[kept..]);
    Ok(redacted)
}

/// Behind the closing quote of the text that opens at `start`.
fn end_of_text(body: &[u8], start: usize) -> Option<usize> {
    let mut at = start + 1;
    loop {
        at += memchr::memchr2(b'"', b'\\', &body[at..])?;
        if body[at] == b'"' {
            return Some(at + 1);
        }
        // Whatever is escaped, it is not the end.
        at += 2;
        if at > body.len() {
            return None;
        }
    }
}

fn digits(text: &str) -> impl DoubleEndedIterator<Item = u32> {
    text.chars().filter_map(|letter| letter.to_digit(10))
}

/// Luhn's check digit, as on cards.
fn has_card_digits(text: &str) -> bool {
    let sum: u32 = digits(text)
        .rev()
        .enumerate()
        .map(|(at, digit)| match (at % 2, digit * 2) {
            (0, _) => digit,
            (_, twice) if twice > 9 => twice - 9,
            (_, twice) => twice,
        })
        .sum();
    sum.is_multiple_of(10) && digits(text).any(|digit| digit != 0)
}

/// An IBAN is 1 modulo 97, its first four letters last and letters counted from 10.
fn has_iban_digits(text: &str) -> bool {
    let letters: Vec<char> = text.chars().filter(|letter| !letter.is_whitespace()).collect();
    let moved = letters.iter().skip(4).chain(letters.iter().take(4));
    let rest = moved.fold(0_u32, |rest, letter| match letter.to_digit(36) {
        Some(value @ 0..=9) => (rest * 10 + value) % 97,
        Some(value) => (rest * 100 + value) % 97,
        None => rest,
    });
    rest == 1
}

/// Numbers that were never given to anybody are no numbers of persons.
fn is_given_ssn(text: &str) -> bool {
    let mut parts = text.split('-');
    let (area, group, serial) = (parts.next(), parts.next(), parts.next());
    !matches!(area, Some("000" | "666"))
        && area.is_some_and(|area| area < "900")
        && group != Some("00")
        && serial != Some("0000")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn screen(action: Action) -> Screen {
        Screen::new(KNOWN.map(|name| (name, None, action))).unwrap()
    }

    fn redacted(body: &str) -> String {
        let body = Bytes::copy_from_slice(body.as_bytes());
        String::from_utf8(screen(Action::Redact).apply(&body, || true).unwrap().to_vec()).unwrap()
    }

    #[test]
    fn what_is_personal_is_found_and_what_only_looks_so_is_not() {
        for (said, sent) in [
            ("write to ann.b+c@mail.example.org now", "write to [email] now"),
            ("call +41 44 668 18 00", "call [phone]"),
            ("pay with 4111 1111 1111 1111.", "pay with [card]."),
            ("pay with 4111 1111 1111 1112.", "pay with 4111 1111 1111 1112."),
            ("to CH93 0076 2011 6238 5295 7", "to [iban]"),
            ("to CH94 0076 2011 6238 5295 7", "to CH94 0076 2011 6238 5295 7"),
            ("ssn 536-90-4399", "ssn [ssn]"),
            ("ssn 000-90-4399", "ssn 000-90-4399"),
            (
                "version 1.2.3-4 at 12:30, 1234567890",
                "version 1.2.3-4 at 12:30, 1234567890",
            ),
        ] {
            assert_eq!(
                redacted(&format!(r#"{{"a":[{{"b":"{said}"}}]}}"#)),
                format!(r#"{{"a":[{{"b":"{sent}"}}]}}"#)
            );
        }
    }

    #[test]
    fn escapes_hide_nothing_and_the_rest_stays() {
        assert_eq!(
            redacted(r#"{ "x" : 1.50, "t":"a\u0040b.org \"q\"" ,"u":"\u00e9"}"#),
            r#"{ "x" : 1.50, "t":"[email] \"q\"" ,"u":"\u00e9"}"#
        );
        // Numbers are not texts.
        let body = r#"{"t":4111111111111111}"#;
        assert_eq!(redacted(body), body);
    }

    #[test]
    fn names_of_fields_are_looked_at_and_stay_apart() {
        assert_eq!(
            redacted(r#"{"input":{"ann@b.org" : 1,"b\u0040b.org":{"name":"c@b.org"}}}"#),
            r#"{"input":{"[email] 1" : 1,"[email] 2":{"name":"[email]"}}}"#
        );
        let body = Bytes::from_static(br#"{"input":{"ann@b.org":1}}"#);
        let stopped = screen(Action::Refuse).apply(&body, || true).unwrap_err();
        assert_eq!(stopped, Stopped::Found("email".into()));
    }

    #[test]
    fn a_refusal_names_the_rule_and_not_the_find() {
        let body = Bytes::from_static(br#"{"t":"a@b.org"}"#);
        let stopped = screen(Action::Refuse).apply(&body, || true).unwrap_err();
        assert_eq!(stopped, Stopped::Found("email".into()));
        assert!(!stopped.to_string().contains("b.org"));
        for broken in [r#"{"t":"a"#, r#"{"t":"a\"#, "{\"t\":\"a\\u12\"}"] {
            let body = Bytes::copy_from_slice(broken.as_bytes());
            assert_eq!(
                screen(Action::Refuse).apply(&body, || true),
                Err(Stopped::Unreadable),
                "{broken}"
            );
        }
    }

    #[test]
    fn rules_of_ones_own_are_checked() {
        let own = Screen::new([("ticket", Some("T-[0-9]+"), Action::Redact)]).unwrap();
        let body = Bytes::from_static(br#"{"t":"see T-12"}"#);
        assert_eq!(
            own.apply(&body, || true).unwrap(),
            br#"{"t":"see [ticket]"}"#.as_slice()
        );
        for (name, pattern) in [
            ("x", Some("(")),
            ("x", Some("a*")),
            ("x", None),
            ("email", Some("a")),
            ("x", Some("(?:[a-z]{1000}){1000}")),
        ] {
            assert!(
                Screen::new([(name, pattern, Action::Refuse)]).is_err(),
                "{name} {pattern:?}"
            );
        }
    }

    /// Each alone is allowed; together they would be a program that takes minutes for a page of text.
    #[test]
    fn patterns_are_limited_together_too() {
        let many: Vec<String> = (0..40).map(|n| format!("a[ab]{{{}}}c", 2500 + n)).collect();
        let rules = |most: usize| {
            let own = many.iter().take(most);
            Screen::new(own.map(|own| ("own", Some(own.as_str()), Action::Refuse))).map(|_| ())
        };
        rules(1).unwrap();
        let why = rules(many.len()).unwrap_err();
        assert!(why.contains("together"), "{why}");
        Screen::new(KNOWN.map(|name| (name, None, Action::Refuse))).unwrap();
    }

    #[test]
    fn whoever_waits_is_asked_between_windows_and_can_stop_it() {
        let asked = std::cell::Cell::new(0);
        let until = |most: usize| {
            let asked = &asked;
            asked.set(0);
            move || {
                asked.set(asked.get() + 1);
                asked.get() < most
            }
        };
        let hard = Screen::new([("hard", Some("a[ab]{2500}c"), Action::Refuse)]).unwrap();
        let body = Bytes::from(format!(r#"{{"t":"{}"}}"#, "ab".repeat(30_000)));
        assert_eq!(hard.apply(&body, until(3)), Err(Stopped::TooLong));
        assert_eq!(asked.get(), 3);
        assert_eq!(hard.apply(&body, until(100)).unwrap(), body);
        // 60,000 letters in steps of 12 KiB, and the name.
        assert_eq!(asked.get(), 6);
        // Finds are steps, too.
        let many = Screen::new([("many", Some("a"), Action::Redact)]).unwrap();
        let body = Bytes::from(format!(r#"{{"t":"{}"}}"#, "a".repeat(1000)));
        assert_eq!(many.apply(&body, until(500)), Err(Stopped::TooLong));
    }

    #[test]
    fn windows_change_nothing_about_what_is_found() {
        let own = Screen::new([("mark", Some(r"\bx[a-z0-9é]{2,90}y\b"), Action::Redact)]).unwrap();
        // Marks everywhere: across the ends of windows, and with letters of two bytes there.
        let marks = |n: usize| format!("{} ", "é".repeat(n % 7));
        let (mut text, mut clean) = (String::new(), String::new());
        for n in 0..3000 {
            text.push_str(&marks(n));
            clean.push_str(&marks(n));
            text.push_str(&format!("xab{}y ", "é".repeat(n % 11)));
            clean.push_str("[mark] ");
        }
        assert!(text.len() > 4 * WINDOW);
        let sent = own
            .apply(&Bytes::from(format!(r#"{{"t":"{text}"}}"#)), || true)
            .unwrap();
        assert_eq!(
            String::from_utf8(sent.to_vec()).unwrap(),
            format!(r#"{{"t":"{clean}"}}"#)
        );
        // The end of a window is not the end of a text, nor its start the start of one.
        for (pattern, is_found) in [("^b", false), ("a$", false), ("^a", true), ("b$", true)] {
            let own = Screen::new([("edge", Some(pattern), Action::Refuse)]).unwrap();
            let text = format!("{}{}", "a".repeat(3 * WINDOW), "b".repeat(3 * WINDOW));
            let found = own.apply(&Bytes::from(format!("\"{text}\"")), || true).is_err();
            assert_eq!(found, is_found, "{pattern}");
        }
        // Finds of nothing come to an end.
        let empty = Screen::new([("edge", Some(r"\b"), Action::Redact)]).unwrap();
        let sent = empty
            .apply(&Bytes::from_static("\"é b\"".as_bytes()), || true)
            .unwrap();
        assert_eq!(sent, "\"[edge]é[edge] [edge]b[edge]\"".as_bytes());
    }

    #[test]
    fn what_is_put_into_a_text_does_not_flood() {
        let name = "n".repeat(LONGEST_NAME);
        let own = Screen::new([(name.as_str(), Some("a"), Action::Redact)]).unwrap();
        let body = Bytes::from(format!(r#"{{"t":"{}"}}"#, "a".repeat(100_000)));
        assert_eq!(own.apply(&body, || true), Err(Stopped::TooLong));
        let body = Bytes::from(format!("[{}\"\"]", "\"a\",".repeat(100_000)));
        assert_eq!(own.apply(&body, || true), Err(Stopped::TooLong));
        let longer = "n".repeat(LONGEST_NAME + 1);
        assert!(Screen::new([(longer.as_str(), Some("a"), Action::Redact)]).is_err());
    }

    proptest! {
        #[test]
        fn any_json_stays_json(texts in prop::collection::vec("\\PC{0,40}", 0..6)) {
            let value = serde_json::json!({"a": texts, "mail": "x@y.org"});
            let body = Bytes::from(value.to_string());
            let sent = screen(Action::Redact).apply(&body, || true).unwrap();
            let read: serde_json::Value = serde_json::from_slice(&sent).unwrap();
            prop_assert_eq!(&read["mail"], "[email]");
            prop_assert_eq!(read["a"].as_array().unwrap().len(), texts.len());
        }
    }
}
