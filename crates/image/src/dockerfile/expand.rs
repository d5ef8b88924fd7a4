//! Variables and quotes in the words of a Dockerfile.

/// How deep `${A:-${B:-…}}` may go, and how long a word may become.
const DEEPEST: usize = 32;
pub(crate) const LONGEST: usize = 256 * 1024;

/// Removes quotes and escapes and puts in the values of variables. An unknown variable is empty, as in a shell.
pub(crate) fn expand(
    word: &str,
    escape: char,
    lookup: &dyn Fn(&str) -> Option<String>,
) -> Result<String, String> {
    within(word, escape, lookup, 0)
}

fn within(
    word: &str,
    escape: char,
    lookup: &dyn Fn(&str) -> Option<String>,
    depth: usize,
) -> Result<String, String> {
    if depth > DEEPEST {
        return Err(format!("variables are nested more than {DEEPEST} deep"));
    }
    let mut out = String::new();
    let mut chars = word.chars().peekable();
    let mut double = false;
    while let Some(c) = chars.next() {
        match c {
            '\'' if !double => loop {
                match chars.next() {
                    None => return Err("a quote ' is not closed".into()),
                    Some('\'') => break,
                    Some(c) => out.push(c),
                }
            },
            '"' => double = !double,
            '$' => {
                out.push_str(&variable(&mut chars, escape, lookup, depth)?);
                if out.len() > LONGEST {
                    return Err(format!(
                        "a word of more than {LONGEST} bytes, with the values of its variables"
                    ));
                }
            }
            c if c == escape => match chars.next() {
                None => out.push(c),
                Some(next) => {
                    if double && !(next == '"' || next == '$' || next == escape) {
                        out.push(c);
                    }
                    out.push(next);
                }
            },
            c => out.push(c),
        }
    }
    match double {
        true => Err("a quote \" is not closed".into()),
        false => Ok(out),
    }
}

type Chars<'a> = std::iter::Peekable<std::str::Chars<'a>>;

fn variable(
    chars: &mut Chars<'_>,
    escape: char,
    lookup: &dyn Fn(&str) -> Option<String>,
    depth: usize,
) -> Result<String, String> {
    if chars.next_if_eq(&'{').is_none() {
        let name = take_name(chars);
        return Ok(match name.is_empty() {
            true => "$".to_owned(),
            false => lookup(&name).unwrap_or_default(),
        });
    }
    let name = take_name(chars);
    let operator = until_brace(chars, escape).ok_or_else(|| format!("${{{name} is not closed"))?;
    apply(&name, &operator, escape, lookup, depth + 1)
}

/// What follows the name in `${name...}`, without the closing brace; braces inside are paired.
fn until_brace(chars: &mut Chars<'_>, escape: char) -> Option<String> {
    let mut inner = String::new();
    let mut depth = 0;
    loop {
        let c = chars.next()?;
        match c {
            '}' if depth == 0 => return Some(inner),
            '}' => depth -= 1,
            '{' => depth += 1,
            _ => {}
        }
        inner.push(c);
        if c == escape {
            inner.push(chars.next()?);
        }
    }
}

fn apply(
    name: &str,
    operator: &str,
    escape: char,
    lookup: &dyn Fn(&str) -> Option<String>,
    depth: usize,
) -> Result<String, String> {
    let value = lookup(name);
    let (value, rest) = match operator.strip_prefix(':') {
        // With a colon, an empty value counts as none.
        Some(rest) => (value.filter(|value| !value.is_empty()), rest),
        None => (value, operator),
    };
    let mut kinds = rest.chars();
    match (name.is_empty(), kinds.next(), value) {
        (true, ..) => Err("`${` without a name".into()),
        (_, None, value) if operator.is_empty() => Ok(value.unwrap_or_default()),
        (_, Some('-'), Some(value)) => Ok(value),
        (_, Some('-'), None) => within(kinds.as_str(), escape, lookup, depth),
        (_, Some('+'), Some(_)) => within(kinds.as_str(), escape, lookup, depth),
        (_, Some('+'), None) => Ok(String::new()),
        (_, Some('?'), Some(value)) => Ok(value),
        (_, Some('?'), None) => Err(format!(
            "{name}: {}",
            within(kinds.as_str(), escape, lookup, depth)?
        )),
        _ => Err(format!(
            "`${{{name}{operator}}}` is not supported; use :-, :+ or :?"
        )),
    }
}

fn take_name(chars: &mut Chars<'_>) -> String {
    let mut name = String::new();
    while let Some(c) = chars.next_if(|c| c.is_ascii_alphanumeric() || *c == '_') {
        name.push(c);
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(word: &str, expected: Result<&str, &str>) {
        let lookup = |name: &str| match name {
            "A" => Some("one two".to_owned()),
            "EMPTY" => Some(String::new()),
            _ => None,
        };
        let actual = expand(word, '\\', &lookup);
        assert_eq!(actual.as_deref().map_err(String::as_str), expected, "{word}");
    }

    #[test]
    fn words_are_expanded_as_docker_does() {
        check("x$A-${A}y", Ok("xone two-one twoy"));
        check("'$A' \"$A\" \\$A $", Ok("$A one two $A $"));
        check(
            "${NO:-d$A} ${EMPTY:-d} ${EMPTY-d}|${A:+set}${NO:+set}",
            Ok("done two d |set"),
        );
        check("${NO:-${EMPTY:-deep}}", Ok("deep"));
        check(r#""a\b\"c""#, Ok(r#"a\b"c"#));
        check("${NO:?is needed}", Err("NO: is needed"));
        check("${A#one}", Err("`${A#one}` is not supported; use :-, :+ or :?"));
        check("${A", Err("${A is not closed"));
        check("'open", Err("a quote ' is not closed"));
        check("$NO", Ok(""));
    }
}
