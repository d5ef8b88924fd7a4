//! Wildcards: in the sources of COPY, and in `.dockerignore`.

use std::path::Path;

use crate::error::{Error, IoContext, Result, show};
use crate::tree::{LastLink, Tree};

/// The most memory for the paths that one source of COPY matches.
const MOST_FOUND: usize = 256 << 20;
/// Of one `.dockerignore`: each file of the context is held against all of them.
const MOST_RULES: usize = 4096;

/// Whether one path component matches: `*`, `?`, `[a-z]`, `[^x]`, and `\` before a special character.
pub(crate) fn component(pattern: &[u8], name: &[u8]) -> bool {
    // Where to go back to when the part after the last star does not match.
    let (mut p, mut n) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    loop {
        if p < pattern.len() && pattern[p] == b'*' {
            star = Some((p + 1, n));
            p += 1;
            continue;
        }
        if n == name.len() && p == pattern.len() {
            return true;
        }
        if n < name.len()
            && let Some(next) = one(&pattern[p..], name[n])
        {
            (p, n) = (p + next, n + 1);
            continue;
        }
        match star {
            Some((after, at)) if at < name.len() => {
                star = Some((after, at + 1));
                (p, n) = (after, at + 1);
            }
            _ => return false,
        }
    }
}

/// How many bytes of the pattern match this one byte.
fn one(pattern: &[u8], byte: u8) -> Option<usize> {
    match pattern {
        [b'?', ..] => Some(1),
        [b'\\', escaped, ..] => (*escaped == byte).then_some(2),
        [b'[', rest @ ..] => {
            let negated = rest.first() == Some(&b'^');
            let body = &rest[usize::from(negated)..];
            let end = body.iter().skip(1).position(|&b| b == b']')? + 1;
            let (mut found, mut at) = (false, 0);
            while at < end {
                if at + 2 < end && body[at + 1] == b'-' {
                    found |= (body[at]..=body[at + 2]).contains(&byte);
                    at += 3;
                } else {
                    found |= body[at] == byte;
                    at += 1;
                }
            }
            (found != negated).then_some(1 + usize::from(negated) + end + 1)
        }
        [literal, ..] => (*literal == byte).then_some(1),
        [] => None,
    }
}

/// All paths in `tree` that match, in order. A pattern without wildcards is just looked up.
pub(super) fn glob(tree: &Tree, pattern: &[u8]) -> Result<Vec<Vec<u8>>> {
    glob_within(tree, pattern, MOST_FOUND)
}

/// Links that lead back to where they are make each `*` multiply what the one before it found.
fn glob_within(tree: &Tree, pattern: &[u8], most: usize) -> Result<Vec<Vec<u8>>> {
    let mut found = vec![Vec::new()];
    for part in pattern
        .split(|&b| b == b'/')
        .filter(|part| !part.is_empty() && *part != b".")
    {
        let mut next = Vec::new();
        let mut weight = 0;
        for base in found {
            let mut join = |name: &[u8]| {
                weight += size_of::<Vec<u8>>() + base.len() + 1 + name.len();
                match weight > most {
                    true => Err(Error::Limit {
                        what: format!("the memory for what `{}` matches", show(pattern)),
                        limit: most as u64,
                    }),
                    false => Ok([&base, &b"/"[..], name].concat()),
                }
            };
            if !part.iter().any(|b| b"*?[\\".contains(b)) {
                next.push(join(part)?);
            } else if let Some(dir) = tree.lookup(&base, LastLink::Follow)?
                && let Some(entries) = tree.entries(dir)
            {
                for name in entries.keys().filter(|name| component(part, name)) {
                    next.push(join(name)?);
                }
            }
        }
        found = next;
    }
    let mut there = Vec::new();
    for path in found {
        if tree.lookup(&path, LastLink::Follow)?.is_some() {
            there.push(path);
        }
    }
    Ok(there)
}

/// What `.dockerignore` leaves out of the build context.
#[derive(Debug, Default)]
pub(crate) struct Ignore(Vec<Rule>);

#[derive(Debug)]
struct Rule {
    keep: bool,
    parts: Vec<Vec<u8>>,
}

impl Ignore {
    /// Reads the context's `.dockerignore`. Only a plain file of sensible size counts: the context is not trusted, and
    /// a link in it could lead anywhere.
    pub(super) fn load(context: &Path) -> Result<Self> {
        const LONGEST: u64 = 1 << 20;
        let path = context.join(".dockerignore");
        match std::fs::symlink_metadata(&path) {
            Ok(stat) if stat.is_file() && stat.len() <= LONGEST => {}
            _ => return Ok(Self::default()),
        }
        let text = std::fs::read_to_string(&path).doing("read", &path)?;
        let ignore = Self::parse(&text);
        match ignore.0.len() > MOST_RULES {
            true => Err(Error::Limit {
                what: "the number of rules in .dockerignore".into(),
                limit: MOST_RULES as u64,
            }),
            false => Ok(ignore),
        }
    }

    pub(crate) fn parse(text: &str) -> Self {
        let rules = text
            .lines()
            .map(str::trim)
            .filter(|line| !line.is_empty() && !line.starts_with('#'))
            .map(|line| {
                let (keep, pattern) = match line.strip_prefix('!') {
                    Some(rest) => (true, rest.trim()),
                    None => (false, line),
                };
                let mut parts: Vec<Vec<u8>> = Vec::new();
                for part in pattern.split('/').filter(|part| !part.is_empty() && *part != ".") {
                    match part {
                        ".." => drop(parts.pop()),
                        part => parts.push(part.as_bytes().to_vec()),
                    }
                }
                Rule { keep, parts }
            })
            .filter(|rule| !rule.parts.is_empty())
            .map(|mut rule| {
                // A rule about a directory is one about all that is below.
                rule.parts.push(b"**".to_vec());
                rule
            })
            .collect();
        Self(rules)
    }

    /// Whether a path, given by its components, is left out: the last rule that speaks of it or of a directory above
    /// it decides.
    pub(crate) fn leaves_out(&self, path: &[&[u8]]) -> bool {
        let mut out = false;
        for rule in &self.0 {
            if out == rule.keep && matches(&rule.parts, path) {
                out = !rule.keep;
            }
        }
        out
    }

    /// Whether something below a directory that is left out may be kept.
    pub(super) fn has_exceptions(&self) -> bool {
        self.0.iter().any(|rule| rule.keep)
    }
}

/// Whether the parts of a pattern match the parts of a path. As in [`component`], only the last `**` is ever gone back to,
/// because an earlier one could match nothing more: patterns and paths are hostile, and trying all ways takes for ever.
fn matches(pattern: &[Vec<u8>], path: &[&[u8]]) -> bool {
    let (mut p, mut n) = (0, 0);
    let mut any: Option<(usize, usize)> = None;
    loop {
        match pattern.get(p) {
            Some(part) if part == b"**" => {
                any = Some((p + 1, n));
                p += 1;
                continue;
            }
            None if n == path.len() => return true,
            Some(part) if path.get(n).is_some_and(|name| component(part, name)) => {
                (p, n) = (p + 1, n + 1);
                continue;
            }
            _ => {}
        }
        match any {
            Some((after, at)) if at < path.len() => {
                any = Some((after, at + 1));
                (p, n) = (after, at + 1);
            }
            _ => return false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn components_match() {
        for (pattern, name, expected) in [
            ("*", "", true),
            ("*.rs", "a.rs", true),
            ("*.rs", "a.rst", false),
            ("a*b*c", "aXbYbZc", true),
            ("a*b*c", "aXbYbZ", false),
            ("?[a-c]x", "1bx", true),
            ("[^a]", "a", false),
            ("[^a]", "b", true),
            ("\\*", "*", true),
            ("\\*", "x", false),
            ("[", "x", false),
            ("[]", "x", false),
            ("", "x", false),
        ] {
            assert_eq!(
                component(pattern.as_bytes(), name.as_bytes()),
                expected,
                "{pattern} {name}"
            );
        }
    }

    #[test]
    fn ignoring_follows_the_last_rule() {
        let ignore = Ignore::parse(
            "# comment\n/target\n**/*.log\n!keep.log\nnode_modules/\ndocs/*\n!docs/README.md\n",
        );
        for (path, out) in [
            ("target/debug/x", true),
            ("src/target", false),
            ("a/b/c.log", true),
            ("c.log", true),
            ("keep.log", false),
            ("node_modules/x/y", true),
            ("docs/a", true),
            ("docs/README.md", false),
            ("docs", false),
        ] {
            let parts: Vec<&[u8]> = path.split('/').map(str::as_bytes).collect();
            assert_eq!(ignore.leaves_out(&parts), out, "{path}");
        }
    }

    #[test]
    fn any_number_of_directories_match() {
        for (pattern, path, expected) in [
            ("**", "a/b", true),
            ("**/b", "b", true),
            ("a/**/b", "a/b", true),
            ("a/**/b", "a/x/b/y/b", true),
            ("a/**/b/**/c", "a/b/x/b/c", true),
            ("a/**/b/**/c", "a/c/b", false),
            ("**/a/b", "a/a/b", true),
            ("**/a/**", "x/a", true),
        ] {
            let pattern_parts: Vec<Vec<u8>> =
                pattern.split('/').map(|part| part.as_bytes().to_vec()).collect();
            let parts: Vec<&[u8]> = path.split('/').map(str::as_bytes).collect();
            assert_eq!(matches(&pattern_parts, &parts), expected, "{pattern} {path}");
        }
    }

    /// Would not end in this life if every way to match were tried.
    #[test]
    fn a_hostile_pattern_is_soon_decided() {
        let ignore = Ignore::parse(&format!("{}b", "**/a/".repeat(200)));
        let path = vec![&b"a"[..]; 250];
        assert!(!ignore.leaves_out(&path));
    }

    #[test]
    fn links_in_circles_do_not_multiply_for_ever() {
        let mut tree = Tree::default();
        for name in ["/a", "/b", "/c"] {
            tree.put_symlink(name.as_bytes(), b"/").unwrap();
        }
        let found = |pattern: &str| glob_within(&tree, pattern.as_bytes(), 1 << 20);
        assert_eq!(found("*/*").unwrap().len(), 9);
        let error = found(&"*/".repeat(30)).unwrap_err();
        assert!(error.to_string().contains("matches"), "{error}");
    }

    #[test]
    fn rules_are_few() {
        let context = tempfile::tempdir().unwrap();
        std::fs::write(context.path().join(".dockerignore"), "x\n".repeat(MOST_RULES)).unwrap();
        assert!(Ignore::load(context.path()).is_ok());
        std::fs::write(context.path().join(".dockerignore"), "x\n".repeat(MOST_RULES + 1)).unwrap();
        assert!(Ignore::load(context.path()).is_err());
    }
}
