//! Reads a Dockerfile into stages and instructions. Nothing is expanded here: words keep their quotes and variables,
//! since what a variable stands for depends on the instructions before it.
//!
//! What Docker knows and we do not is refused with the line it stands on; only instructions that cannot change what is
//! built (HEALTHCHECK, LABEL, MAINTAINER, STOPSIGNAL, VOLUME) are read and left without effect.

use crate::error::{Error, Result};

/// Each is looked through by those after it.
const MOST_STAGES: usize = 64;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dockerfile {
    /// `ARG` before the first `FROM`: name and default, unexpanded.
    pub args: Vec<(String, Option<String>)>,
    pub stages: Vec<Stage>,
    pub escape: char,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stage {
    pub line: usize,
    pub base: String,
    /// `--platform`, unexpanded.
    pub platform: Option<String>,
    pub name: Option<String>,
    pub steps: Vec<Step>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    pub line: usize,
    /// As written, on one line: for people and for the cache.
    pub text: String,
    pub instruction: Instruction,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Instruction {
    Run(Command),
    Copy(Copy),
    Add(Copy),
    Env(Vec<(String, String)>),
    Arg(Vec<(String, Option<String>)>),
    Workdir(String),
    User(String),
    Cmd(Command),
    Entrypoint(Command),
    Expose(Vec<String>),
    Shell(Vec<String>),
    /// Read and left without effect.
    Noted,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    Shell(String),
    Exec(Vec<String>),
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Copy {
    pub from: Option<String>,
    pub chown: Option<String>,
    pub chmod: Option<String>,
    pub sources: Vec<Source>,
    pub destination: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    Path(String),
    /// A here-document: a file of this name with this text.
    Inline {
        name: String,
        text: String,
        expand: bool,
    },
}

pub fn parse(text: &str) -> Result<Dockerfile> {
    let mut lines = Lines::new(text)?;
    let mut file = Dockerfile {
        args: Vec::new(),
        stages: Vec::new(),
        escape: lines.escape,
    };
    while let Some(logical) = lines.next_logical()? {
        let Logical { line, text, heredocs } = logical;
        let fail = |why: String| Error::Dockerfile { line, why };
        let (word, rest) = text.split_once(char::is_whitespace).unwrap_or((&text, ""));
        let (word, rest) = (word.to_ascii_uppercase(), rest.trim());
        let no_arguments = rest.is_empty() && heredocs.is_empty();
        if no_arguments {
            return Err(fail(format!("{word} needs an argument")));
        }
        if word == "FROM" && file.stages.len() == MOST_STAGES {
            return Err(fail(format!("more than {MOST_STAGES} stages")));
        }
        if word == "FROM" {
            file.stages.push(from(line, rest).map_err(fail)?);
            continue;
        }
        let instruction = instruction(&word, rest, heredocs, file.escape).map_err(fail)?;
        match (file.stages.last_mut(), instruction) {
            (Some(stage), instruction) => stage.steps.push(Step {
                line,
                text: text.clone(),
                instruction,
            }),
            (None, Instruction::Arg(args)) => file.args.extend(args),
            (None, _) => {
                return Err(fail(format!(
                    "{word} before the first FROM; only ARG may stand there"
                )));
            }
        }
    }
    if file.stages.is_empty() {
        return Err(Error::Dockerfile {
            line: 1,
            why: "there is no FROM; begin with for example `FROM base`".into(),
        });
    }
    Ok(file)
}

fn from(line: usize, rest: &str) -> Result<Stage, String> {
    let (flags, rest) = flags(rest, &["platform"])?;
    let words: Vec<&str> = rest.split_whitespace().collect();
    let (base, name) = match words[..] {
        [base] => (base, None),
        [base, keyword, name] if keyword.eq_ignore_ascii_case("as") => {
            (base, Some(name.to_ascii_lowercase()))
        }
        _ => return Err("write FROM as `FROM <image>` or `FROM <image> AS <name>`".into()),
    };
    Ok(Stage {
        line,
        base: base.to_owned(),
        platform: flags.into_iter().find_map(|(_, value)| value),
        name,
        steps: Vec::new(),
    })
}

fn instruction(word: &str, rest: &str, heredocs: Vec<Heredoc>, escape: char) -> Result<Instruction, String> {
    Ok(match word {
        "RUN" => Instruction::Run(run(rest, &heredocs)?),
        "COPY" => Instruction::Copy(copy(rest, heredocs, escape, &["from", "chown", "chmod", "link"])?),
        "ADD" => Instruction::Add(copy(rest, heredocs, escape, &["chown", "chmod", "link"])?),
        "ENV" => Instruction::Env(pairs(rest, escape)?),
        "ARG" => Instruction::Arg(
            words(rest, escape)?
                .into_iter()
                .map(|word| match word.split_once('=') {
                    Some((name, value)) => name_of(name).map(|name| (name, Some(value.to_owned()))),
                    None => name_of(&word).map(|name| (name, None)),
                })
                .collect::<Result<_, _>>()?,
        ),
        "WORKDIR" => Instruction::Workdir(rest.to_owned()),
        "USER" => Instruction::User(rest.to_owned()),
        "CMD" => Instruction::Cmd(command(rest)?),
        "ENTRYPOINT" => Instruction::Entrypoint(command(rest)?),
        "EXPOSE" => Instruction::Expose(words(rest, escape)?),
        "SHELL" => match command(rest)? {
            Command::Exec(argv) if !argv.is_empty() => Instruction::Shell(argv),
            _ => return Err(r#"write SHELL as a JSON array, for example SHELL ["/bin/bash", "-c"]"#.into()),
        },
        "LABEL" => {
            pairs(rest, escape)?;
            Instruction::Noted
        }
        "HEALTHCHECK" | "MAINTAINER" | "STOPSIGNAL" | "VOLUME" => Instruction::Noted,
        "ONBUILD" => return Err("ONBUILD is not supported; write the instruction where it is to run".into()),
        other => {
            let other: String = other.chars().take(40).collect();
            return Err(format!(
                "unknown instruction `{other}`; known are FROM, RUN, COPY, ADD, ENV, ARG, WORKDIR, USER, CMD, \
                 ENTRYPOINT, EXPOSE, LABEL, SHELL"
            ));
        }
    })
}

/// The shell reads here-documents itself; only a bare one is the script.
fn run(rest: &str, heredocs: &[Heredoc]) -> Result<Command, String> {
    let (_, rest) = flags(rest, &[])?;
    if heredocs.is_empty() {
        return command(rest);
    }
    if let [only] = heredocs
        && rest.starts_with("<<")
        && !rest.contains(char::is_whitespace)
    {
        if only.text.starts_with("#!") {
            return Err("a here-document that begins with #! is not supported; name the interpreter: RUN python3 <<EOF".into());
        }
        return Ok(Command::Shell(only.text.clone()));
    }
    let bodies: String = heredocs
        .iter()
        .map(|doc| format!("\n{}{}", doc.text, doc.end))
        .collect();
    Ok(Command::Shell(format!("{rest}{bodies}\n")))
}

fn command(rest: &str) -> Result<Command, String> {
    if rest.starts_with('[')
        && let Ok(argv) = serde_json::from_str::<Vec<String>>(rest)
    {
        return Ok(Command::Exec(argv));
    }
    Ok(Command::Shell(rest.to_owned()))
}

fn copy(rest: &str, heredocs: Vec<Heredoc>, escape: char, known: &[&str]) -> Result<Copy, String> {
    let (flags, rest) = flags(rest, known)?;
    let mut copy = Copy::default();
    for (name, value) in flags {
        let value = match (name.as_str(), value) {
            ("link", _) => continue, // how layers are stored: no difference to the result
            (name, None) => return Err(format!("--{name} needs a value: --{name}=...")),
            (_, Some(value)) => value,
        };
        match name.as_str() {
            "from" => copy.from = Some(value),
            "chown" => copy.chown = Some(value),
            _ => copy.chmod = Some(value),
        }
    }
    let mut all = match command(rest)? {
        Command::Exec(words) => words,
        Command::Shell(rest) => words(&rest, escape)?,
    };
    let mut heredocs = heredocs.into_iter();
    copy.destination = all
        .pop()
        .filter(|_| !all.is_empty())
        .ok_or("name at least one source and a destination")?;
    copy.sources = all
        .into_iter()
        .map(|word| match word.starts_with("<<") {
            true => heredocs.next().map(|doc| Source::Inline {
                name: doc.end.clone(),
                text: doc.text,
                expand: doc.expand,
            }),
            false => Some(Source::Path(word)),
        })
        .collect::<Option<_>>()
        .ok_or("a here-document without a body")?;
    Ok(copy)
}

/// Leading `--name=value` words.
type Flags = Vec<(String, Option<String>)>;

fn flags<'a>(mut rest: &'a str, known: &[&str]) -> Result<(Flags, &'a str), String> {
    let mut flags = Vec::new();
    while let Some(flag) = rest.strip_prefix("--") {
        let (word, after) = flag.split_once(char::is_whitespace).unwrap_or((flag, ""));
        let (name, value) = match word.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (word, None),
        };
        if !known.contains(&name) {
            return Err(format!("--{name} is not supported here"));
        }
        flags.push((name.to_owned(), value));
        rest = after.trim_start();
    }
    Ok((flags, rest))
}

/// `A=1 B="two words"`, or the old form `A one value`.
fn pairs(rest: &str, escape: char) -> Result<Vec<(String, String)>, String> {
    let all = words(rest, escape)?;
    if !all[0].contains('=') {
        let (name, value) = rest
            .split_once(char::is_whitespace)
            .ok_or("write it as NAME=value")?;
        return Ok(vec![(name_of(name)?, value.trim().to_owned())]);
    }
    all.into_iter()
        .map(|word| match word.split_once('=') {
            Some((name, value)) => Ok((name_of(name)?, value.to_owned())),
            None => Err(format!("`{word}` has no value; quote values that have spaces")),
        })
        .collect()
}

fn name_of(name: &str) -> Result<String, String> {
    let name = name.trim_matches(['"', '\'']);
    match name.is_empty() || name.contains(['$', '\0']) {
        true => Err(format!("`{name}` is not a name")),
        false => Ok(name.to_owned()),
    }
}

/// Splits at white space outside of quotes; quotes and escapes stay.
fn words(text: &str, escape: char) -> Result<Vec<String>, String> {
    let mut words = Vec::new();
    let mut word = String::new();
    let mut quote = None;
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match quote {
            None if c.is_whitespace() => {
                if !word.is_empty() {
                    words.push(std::mem::take(&mut word));
                }
                continue;
            }
            None if c == '"' || c == '\'' => quote = Some(c),
            Some(open) if c == open => quote = None,
            _ => {}
        }
        word.push(c);
        if c == escape && quote != Some('\'') {
            word.extend(chars.next());
        }
    }
    if let Some(open) = quote {
        return Err(format!("a quote {open} is not closed"));
    }
    if !word.is_empty() {
        words.push(word);
    }
    Ok(words)
}

fn is_env(text: &str) -> bool {
    let word = text.split_whitespace().next();
    word.is_some_and(|word| word.eq_ignore_ascii_case("ENV"))
}

struct Heredoc {
    end: String,
    text: String,
    expand: bool,
}

struct Logical {
    line: usize,
    text: String,
    heredocs: Vec<Heredoc>,
}

/// Whether the end of what was read lies between quotes.
#[derive(Default)]
struct Quotes {
    open: Option<char>,
}

impl Quotes {
    fn read(&mut self, text: &str, escape: char) {
        let mut chars = text.chars();
        while let Some(c) = chars.next() {
            match self.open {
                None if c == '"' || c == '\'' => self.open = Some(c),
                Some(open) if c == open => self.open = None,
                _ if c == escape && self.open != Some('\'') => drop(chars.next()),
                _ => {}
            }
        }
    }
}

/// Joins continued lines, drops comments, reads here-documents.
struct Lines<'a> {
    lines: std::iter::Peekable<std::iter::Enumerate<std::str::Lines<'a>>>,
    escape: char,
}

impl<'a> Lines<'a> {
    fn new(text: &'a str) -> Result<Self> {
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let mut lines = text.lines().enumerate().peekable();
        let mut escape = '\\';
        // Directives are comments at the very top, of the form `# name=value`.
        while let Some((index, line)) = lines.peek() {
            let directive = line
                .trim()
                .strip_prefix('#')
                .and_then(|comment| comment.split_once('='))
                .map(|(name, value)| (name.trim().to_ascii_lowercase(), value.trim()));
            match directive {
                Some((name, value)) if name == "escape" => {
                    escape = match value {
                        "\\" => '\\',
                        "`" => '`',
                        _ => {
                            return Err(Error::Dockerfile {
                                line: index + 1,
                                why: "the escape character must be \\ or `".into(),
                            });
                        }
                    };
                }
                Some((name, _)) if name == "syntax" || name == "check" => {}
                _ => break,
            }
            lines.next();
        }
        Ok(Self { lines, escape })
    }

    fn next_logical(&mut self) -> Result<Option<Logical>> {
        let mut text = String::new();
        let mut first = None;
        for (index, raw) in self.lines.by_ref() {
            let trimmed = raw.trim();
            if trimmed.is_empty() || trimmed.starts_with('#') {
                continue; // in the middle of a continued line too, as Docker has it
            }
            first.get_or_insert(index + 1);
            let part = if text.is_empty() { raw.trim_start() } else { raw };
            match part.trim_end().strip_suffix(self.escape) {
                Some(continued) => text.push_str(continued),
                // What is left out at the end of a value of several lines is not ours to leave out.
                None if is_env(part) || is_env(&text) => {
                    text.push_str(part);
                    break;
                }
                None => {
                    text.push_str(part.trim_end());
                    break;
                }
            }
        }
        let Some(line) = first else { return Ok(None) };
        if is_env(&text) {
            self.rest_of_values(&mut text);
        }
        let text = text.trim().to_owned();
        let heredocs = self.heredocs(line, &text)?;
        Ok(Some(Logical { line, text, heredocs }))
    }

    /// What is between quotes goes on to the next line as it stands, where Docker would not take it: it has no way to say that a
    /// value has several lines.
    fn rest_of_values(&mut self, text: &mut String) {
        let mut quotes = Quotes::default();
        quotes.read(text, self.escape);
        while quotes.open.is_some()
            && let Some((_, raw)) = self.lines.next()
        {
            text.push('\n');
            text.push_str(raw);
            quotes.read(raw, self.escape);
        }
    }

    fn heredocs(&mut self, line: usize, text: &str) -> Result<Vec<Heredoc>> {
        let word = text.split_whitespace().next().unwrap_or_default();
        if !["RUN", "COPY", "ADD"]
            .iter()
            .any(|known| word.eq_ignore_ascii_case(known))
        {
            return Ok(Vec::new());
        }
        let mut docs = Vec::new();
        for Marker { end, strip, expand } in markers(text) {
            let mut body = String::new();
            loop {
                let Some((_, raw)) = self.lines.next() else {
                    return Err(Error::Dockerfile {
                        line,
                        why: format!("the here-document has no end; `{end}` is missing"),
                    });
                };
                let raw = if strip { raw.trim_start_matches('\t') } else { raw };
                if raw == end {
                    break;
                }
                body.push_str(raw);
                body.push('\n');
            }
            docs.push(Heredoc {
                end,
                text: body,
                expand,
            });
        }
        Ok(docs)
    }
}

struct Marker {
    end: String,
    strip: bool,
    expand: bool,
}

/// The `<<END` in a line, outside of quotes.
fn markers(text: &str) -> Vec<Marker> {
    let mut found = Vec::new();
    let mut quote = None;
    let mut rest = text;
    let mut before = ' ';
    while let Some(c) = rest.chars().next() {
        if quote.is_none()
            && before != '<'
            && let Some(after) = rest.strip_prefix("<<")
            && !after.starts_with('<')
        {
            let strip = after.starts_with('-');
            let after = after.strip_prefix('-').unwrap_or(after);
            let quoted = after.chars().next().filter(|c| *c == '"' || *c == '\'');
            let name = after.trim_start_matches(['"', '\'']);
            let len = name
                .find(|c: char| !(c.is_ascii_alphanumeric() || c == '_'))
                .unwrap_or(name.len());
            let starts_well = name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_');
            if starts_well && (quoted.is_none() || name[len..].starts_with(quoted.unwrap_or(' '))) {
                found.push(Marker {
                    end: name[..len].to_owned(),
                    strip,
                    expand: quoted.is_none(),
                });
                rest = &name[len..];
                before = 'x';
                // The closing quote belongs to the marker.
                rest = rest
                    .strip_prefix(['"', '\''])
                    .filter(|_| quoted.is_some())
                    .unwrap_or(rest);
                continue;
            }
        }
        match quote {
            None if c == '"' || c == '\'' => quote = Some(c),
            Some(open) if c == open => quote = None,
            _ => {}
        }
        before = c;
        rest = &rest[c.len_utf8()..];
    }
    found
}
