//! Methods and paths of HTTP requests.
//!
//! Servers disagree about what a path means: whether `%2f` separates, whether `..` is resolved before or after
//! decoding, whether `//` is `/`. A path is therefore brought into one form first, and where two servers could
//! understand it differently there is no form: such a path satisfies no rule that is about paths.

use std::borrow::Cow;
use std::cell::Cell;

use crate::error::Problem;
use crate::target::shown;

const MAX_PATH_BYTES: usize = 8192;
const MAX_PATTERN_BYTES: usize = 512;
const MAX_PATTERNS: usize = 64;
const MAX_METHODS: usize = 16;
const MAX_METHOD_BYTES: usize = 32;
/// Steps that one path may cost against all patterns of a policy together. Rules are a tenant's and paths a guest's: with
/// the longest of both a single decision would otherwise take minutes. Policies that people write need some thousands.
const MOST_WORK: u32 = 1 << 20;
/// How much of a rule's patterns is repeated where a person is told about them.
const SHOWN_BYTES: usize = 256;

/// Which requests a rule is about.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Requests {
    /// Empty means all.
    methods: Vec<String>,
    /// Empty means all.
    paths: Vec<Glob>,
}

/// Whether a request is one of those that a rule is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Match {
    Yes,
    No,
    /// Its path can be understood in more than one way; why.
    Unclear(&'static str),
}

impl Requests {
    pub(crate) fn parse(methods: &[String], paths: &[String]) -> Result<Self, Problem> {
        if methods.len() > MAX_METHODS || paths.len() > MAX_PATTERNS {
            return Err(Problem::new(
                format!("it has {} methods and {} paths", methods.len(), paths.len()),
                format!("at most {MAX_METHODS} methods and {MAX_PATTERNS} paths are allowed; split the rule"),
            ));
        }
        if let Some(bad) = methods.iter().find(|method| {
            method.is_empty()
                || method.len() > MAX_METHOD_BYTES
                || !method.bytes().all(|byte| {
                    byte.is_ascii_uppercase() || byte.is_ascii_digit() || matches!(byte, b'-' | b'_')
                })
        }) {
            return Err(Problem::new(
                format!("`{}` is not a method", shown(bad)),
                "write for example GET or POST, in capital letters; leave `methods` out for all",
            ));
        }
        Ok(Self {
            methods: methods.to_vec(),
            paths: paths
                .iter()
                .map(|path| Glob::parse(path))
                .collect::<Result<_, _>>()?,
        })
    }

    /// Whether it is about all requests, so that none has to be read.
    pub(crate) fn are_all(&self) -> bool {
        self.methods.is_empty() && self.paths.is_empty()
    }

    pub(crate) fn matches(&self, method: &str, path: &Path<'_>) -> Match {
        // Some servers take `delete` for `DELETE`.
        if !self.methods.is_empty()
            && !self
                .methods
                .iter()
                .any(|known| known.eq_ignore_ascii_case(method))
        {
            return Match::No;
        }
        match &path.0 {
            _ if self.paths.is_empty() => Match::Yes,
            Err(why) => Match::Unclear(why),
            Ok(segments) => {
                for glob in &self.paths {
                    match glob.matches(segments, &path.1) {
                        Some(true) => return Match::Yes,
                        Some(false) => {}
                        None => return Match::Unclear(TOO_MUCH_WORK),
                    }
                }
                Match::No
            }
        }
    }

    pub(crate) fn describe(&self) -> String {
        let methods = if self.methods.is_empty() {
            "any method".to_owned()
        } else {
            self.methods.join(", ")
        };
        if self.paths.is_empty() {
            return methods;
        }
        let mut said = format!("{methods} on ");
        for (at, glob) in self.paths.iter().enumerate() {
            if said.len() + glob.written.len() > SHOWN_BYTES && at > 0 {
                return format!("{said} and {} more", self.paths.len() - at);
            }
            said.push_str(if at > 0 { ", " } else { "" });
            said.push_str(&glob.written);
        }
        said
    }
}

/// A path as rules see it: its segments in one form, or why there is no such form. A slash at the end does not count.
#[derive(Debug, Clone)]
pub(crate) struct Path<'a>(Result<Vec<Cow<'a, str>>, &'static str>, Work);

impl<'a> Path<'a> {
    pub(crate) fn parse(raw: &'a str) -> Self {
        let form = segments(raw.split('?').next().unwrap_or_default());
        Self(form, Work(Cell::new(MOST_WORK)))
    }
}

/// How many steps are left.
#[derive(Debug, Clone)]
struct Work(Cell<u32>);

impl Work {
    /// `None` where none is left.
    fn step(&self) -> Option<()> {
        self.0.set(self.0.get().checked_sub(1)?);
        Some(())
    }
}

const TOO_MUCH_WORK: &str =
    "it takes too long to hold the path against all patterns; write fewer or shorter ones";

fn segments(path: &str) -> Result<Vec<Cow<'_, str>>, &'static str> {
    if path.len() > MAX_PATH_BYTES {
        return Err("the path is too long");
    }
    let Some(inside) = path.strip_prefix('/') else {
        return Err("the path does not begin with a slash");
    };
    let inside = inside.strip_suffix('/').unwrap_or(inside);
    if inside.is_empty() {
        // `//` is two empty segments, not the root.
        return if path == "/" {
            Ok(Vec::new())
        } else {
            Err(EMPTY_SEGMENT)
        };
    }
    inside.split('/').map(segment).collect()
}

const EMPTY_SEGMENT: &str = "the path has an empty segment";

fn segment(raw: &str) -> Result<Cow<'_, str>, &'static str> {
    if raw.is_empty() {
        return Err(EMPTY_SEGMENT);
    }
    let decoded = if raw.contains('%') {
        Cow::Owned(decode(raw)?)
    } else {
        Cow::Borrowed(raw)
    };
    for byte in raw.bytes() {
        match byte {
            b'\\' => return Err("the path has a backslash, which some servers read as a slash"),
            b';' => return Err("the path has a semicolon, behind which some servers do not look"),
            b'#' => return Err("the path has a fragment"),
            0..=0x20 | 0x7f => return Err("the path has a control character or a space"),
            0x80.. => return Err("the path has characters that must be percent-encoded"),
            _ => {}
        }
    }
    if matches!(decoded.as_ref(), "." | "..") {
        return Err("the path has a `.` or `..` segment");
    }
    Ok(decoded)
}

/// Decodes everything, because nearly every server does. What could change how the path is cut, or is no text in the end,
/// is refused.
fn decode(raw: &str) -> Result<String, &'static str> {
    let mut decoded = Vec::with_capacity(raw.len());
    let mut rest = raw;
    while let Some((before, behind)) = rest.split_once('%') {
        decoded.extend_from_slice(before.as_bytes());
        let byte = hex(behind).ok_or("the path has a `%` without two hexadecimal digits")?;
        rest = &behind[2..];
        match byte {
            b'/' => return Err("the path has an encoded slash"),
            b'\\' => return Err("the path has an encoded backslash"),
            b';' | b'?' | b'#' => return Err("the path has an encoded semicolon, question mark or hash"),
            0..=0x1f | 0x7f => return Err("the path has an encoded control character"),
            b'%' if hex(rest).is_some() || rest.starts_with('%') => return Err("the path is encoded twice"),
            other => decoded.push(other),
        }
    }
    decoded.extend_from_slice(rest.as_bytes());
    String::from_utf8(decoded).map_err(|_| "the path is not UTF-8 when decoded")
}

fn hex(text: &str) -> Option<u8> {
    let digits = text.get(..2)?;
    digits
        .bytes()
        .all(|byte| byte.is_ascii_hexdigit())
        .then(|| u8::from_str_radix(digits, 16).ok())
        .flatten()
}

/// A pattern for paths: `*` within a segment, `**` for any number of segments, also none.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Glob {
    written: String,
    parts: Vec<Part>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    Any,
    Segment(String),
}

impl Glob {
    fn parse(text: &str) -> Result<Self, Problem> {
        let wrong =
            |why: &str, remedy: &str| Problem::new(format!("the path `{}` {why}", shown(text)), remedy);
        if text.len() > MAX_PATTERN_BYTES {
            return Err(wrong("is too long", "write at most 512 bytes"));
        }
        if !text.starts_with('/') {
            return Err(wrong(
                "does not begin with a slash",
                "write it as in the address bar, for example /simple/**",
            ));
        }
        if text.contains('?') {
            return Err(wrong(
                "has a query",
                "write the path without it; queries are not looked at",
            ));
        }
        if text.to_ascii_lowercase().contains("%2a") {
            return Err(wrong(
                "has an encoded `*`",
                "write `*`, which also matches itself",
            ));
        }
        let segments = segments(text).map_err(|why| {
            wrong(
                &format!("can never be matched: {why}"),
                "write it in its plain form, for example /simple/**",
            )
        })?;
        let parts = segments
            .into_iter()
            .map(|segment| match segment.as_ref() {
                "**" => Ok(Part::Any),
                text if text.contains("**") => Err(wrong(
                    "has `**` within a segment",
                    "write `**` between slashes, or a single `*`",
                )),
                text => Ok(Part::Segment(text.to_owned())),
            })
            .collect::<Result<_, _>>()?;
        Ok(Self {
            written: text.to_owned(),
            parts,
        })
    }

    /// `None` where there is no work left to find out.
    fn matches(&self, path: &[Cow<'_, str>], work: &Work) -> Option<bool> {
        wildcard(
            &self.parts,
            path,
            |part| *part == Part::Any,
            |part, segment| match part {
                Part::Any => Some(false),
                Part::Segment(pattern) => wildcard(
                    pattern.as_bytes(),
                    segment.as_bytes(),
                    |byte| *byte == b'*',
                    |a, b| Some(a == b),
                    work,
                ),
            },
            work,
        )
    }
}

/// Matches a list against a pattern in which some items stand for any number of others. On a mismatch only the latest of
/// these has to take one more, because what an earlier one could take, it can take too: at most pattern times text steps.
fn wildcard<P, T>(
    pattern: &[P],
    text: &[T],
    any: impl Fn(&P) -> bool,
    same: impl Fn(&P, &T) -> Option<bool>,
    work: &Work,
) -> Option<bool> {
    let (mut p, mut t) = (0, 0);
    let mut retry: Option<(usize, usize)> = None;
    while t < text.len() {
        work.step()?;
        match pattern.get(p) {
            Some(part) if any(part) => {
                retry = Some((p, t));
                p += 1;
                continue;
            }
            Some(part) if same(part, &text[t])? => {
                p += 1;
                t += 1;
                continue;
            }
            _ => {}
        }
        match &mut retry {
            Some((at, taken)) => {
                *taken += 1;
                p = *at + 1;
                t = *taken;
            }
            None => return Some(false),
        }
    }
    Some(pattern[p..].iter().all(any))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn requests(methods: &[&str], paths: &[&str]) -> Requests {
        let owned = |list: &[&str]| list.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        Requests::parse(&owned(methods), &owned(paths)).unwrap()
    }

    #[test]
    fn patterns_match_as_people_expect() {
        for (pattern, path, matches) in [
            ("/", "/", true),
            ("/", "/a", false),
            ("/**", "/", true),
            ("/**", "/a/b", true),
            ("/simple/**", "/simple", true),
            ("/simple/**", "/simple/", true),
            ("/simple/**", "/simple/a/b", true),
            ("/simple/**", "/simplex", false),
            ("/simple/*", "/simple/a", true),
            ("/simple/*", "/simple/a/", true),
            ("/simple/*", "/simple/a/b", false),
            ("/simple/*", "/simple", false),
            ("/a/**/z", "/a/z", true),
            ("/a/**/z", "/a/b/c/z", true),
            ("/a/**/z", "/a/b/c", false),
            ("/**/x/**/y", "/x/x/y/z/y", true),
            ("/repos/me/*.git/**", "/repos/me/x.git/info/refs", true),
            ("/repos/me/*.git/**", "/repos/you/x.git/info/refs", false),
            ("/v*/a*b*c", "/v1/aXbYc", true),
            ("/v*/a*b*c", "/v1/aXbY", false),
            ("/~me", "/%7Eme", true),
            ("/%7eme", "/~me", true),
            ("/a", "/a?b=/../c", true),
            ("/A", "/a", false),
            ("/%61dmin", "/admin", true),
            ("/@me", "/%40me", true),
            ("/a!b", "/a%21b", true),
            ("/a%20b", "/a%20b", true),
            ("/100%25", "/100%25", true),
            ("/b%C3%BCcher", "/b%c3%bccher", true),
        ] {
            let found = requests(&[], &[pattern]).matches("GET", &Path::parse(path));
            assert_eq!(found == Match::Yes, matches, "{pattern} {path}: {found:?}");
        }
    }

    #[test]
    fn a_path_that_can_be_read_in_two_ways_is_unclear() {
        for path in [
            "",
            "*",
            "a",
            "//",
            "//a",
            "/a//b",
            "/a//",
            "/.",
            "/..",
            "/a/../b",
            "/a/./b",
            "/a/%2e%2e/b",
            "/a/.%2E/b",
            "/a/%2e",
            "/a%2fb",
            "/a%2Fb",
            "/a%5cb",
            "/a\\b",
            "/a%00",
            "/a%0a",
            "/a%7f",
            "/a%",
            "/a%2",
            "/a%zz",
            "/a%+1",
            "/a%252f",
            "/a%2541",
            "/a%25%32f",
            "/%c0%af",
            "/%ff",
            "/a%3fb",
            "/a%23b",
            "/..;/b",
            "/a;x=1/b",
            "/a%3bx",
            "/a b",
            "/a\tb",
            "/a\0",
            "/a#b",
            "/ä",
            "http://a.example/b",
        ] {
            let found = requests(&[], &["/**"]).matches("GET", &Path::parse(path));
            assert!(matches!(found, Match::Unclear(_)), "{path:?}: {found:?}");
            // Where the path does not matter, it does not matter.
            assert_eq!(
                requests(&["GET"], &[]).matches("GET", &Path::parse(path)),
                Match::Yes
            );
        }
        let long = format!("/{}", "a".repeat(MAX_PATH_BYTES));
        assert!(matches!(
            requests(&[], &["/**"]).matches("GET", &Path::parse(&long)),
            Match::Unclear(_)
        ));
    }

    #[test]
    fn methods_are_compared_without_case_and_before_paths() {
        let rule = requests(&["GET", "HEAD"], &["/a"]);
        assert_eq!(rule.matches("get", &Path::parse("/a")), Match::Yes);
        assert_eq!(rule.matches("POST", &Path::parse("/a")), Match::No);
        assert_eq!(rule.matches("POST", &Path::parse("/a/..")), Match::No);
        assert_eq!(rule.describe(), "GET, HEAD on /a");
    }

    #[test]
    fn patterns_and_methods_are_strict() {
        let parse = |methods: &[&str], paths: &[&str]| {
            let owned = |list: &[&str]| list.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
            Requests::parse(&owned(methods), &owned(paths))
        };
        for path in [
            "", "a", "/a/../b", "/a?b", "/a**", "/**a/b", "/a//b", "/a%2f", "/a%2a", "/ä", "/a b", "*", "**",
        ] {
            assert!(parse(&[], &[path]).is_err(), "{path}");
        }
        for method in ["", "get", "*", "GET,POST", "GET POST", "GÉT"] {
            assert!(parse(&[method], &[]).is_err(), "{method}");
        }
        assert!(parse(&["GET"; 17], &[]).is_err());
        assert!(parse(&[], &["/a"; 65]).is_err());
        assert!(parse(&[], &[&format!("/{}", "a".repeat(512))]).is_err());
    }

    /// The longest of everything that a tenant and its guest may choose, on purpose so that nothing fits until the end.
    #[test]
    fn a_path_costs_bounded_work_whatever_the_patterns_are() {
        let pattern = format!("/**{}/b", "/a".repeat(250));
        let path = "/a".repeat(4000);
        let hostile = requests(&[], &vec![pattern.as_str(); MAX_PATTERNS]);
        let asked = Path::parse(&path);
        // One decision asks all rules with one path.
        for _ in 0..256 {
            assert!(matches!(hostile.matches("GET", &asked), Match::Unclear(_)));
        }
        assert_eq!(asked.1.0.get(), 0);
        // What people write is far away from that.
        let usual = requests(&[], &["/v1/**", "/api/*/items/**/raw", "/*.tar.gz"]);
        let asked = Path::parse("/api/things/items/a/b/c/d/e/f/raw");
        assert_eq!(usual.matches("GET", &asked), Match::Yes);
        assert!(asked.1.0.get() > MOST_WORK - 1000);
        assert!(hostile.describe().len() < 1024, "{}", hostile.describe().len());
    }

    /// The definition, without cleverness.
    fn slow(pattern: &[u8], text: &[u8]) -> bool {
        match pattern {
            [] => text.is_empty(),
            [b'*', rest @ ..] => (0..=text.len()).any(|taken| slow(rest, &text[taken..])),
            [first, rest @ ..] => text.first() == Some(first) && slow(rest, &text[1..]),
        }
    }

    proptest! {
        #[test]
        fn wildcards_match_by_definition(pattern in "[ab*]{0,8}", text in "[ab]{0,10}") {
            let (pattern, text) = (pattern.as_bytes(), text.as_bytes());
            let found = wildcard(pattern, text, |b| *b == b'*', |a, b| Some(a == b), &Work(Cell::new(MOST_WORK)));
            prop_assert_eq!(found, Some(slow(pattern, text)));
        }

        #[test]
        fn encoding_a_letter_changes_nothing(path in "(/[a-z*@ü]{1,4}){1,3}", upper: bool) {
            let plain: String = path.bytes().map(|b| if b.is_ascii() { char::from(b).to_string() } else { format!("%{b:02x}") }).collect();
            let encoded: String = path.bytes().map(|b| match b {
                b'/' => "/".to_owned(),
                b if upper => format!("%{b:02X}"),
                b => format!("%{b:02x}"),
            }).collect();
            prop_assert_eq!(Path::parse(&plain).0, Path::parse(&encoded).0);
            prop_assert!(Path::parse(&plain).0.is_ok());
        }

        #[test]
        fn no_path_makes_it_panic(path in any::<String>()) {
            let _ = Path::parse(&path);
        }
    }
}
