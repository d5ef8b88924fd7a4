//! Build steps as a Dockerfile. Each step remembers its line, so that a failure can be told to belong to it.

use std::fmt::Write as _;

use serde::Deserialize;
use serde_json::json;

use super::names::Name;
use crate::error::{Answer, Refusal};

/// The user and the directory that steps begin with, and that sandboxes get unless steps say otherwise.
const USER: &str = "user";
const WORKDIR: &str = "/home/user";

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Step {
    r#type: String,
    #[serde(default)]
    pub(crate) args: Vec<String>,
    #[serde(default)]
    pub(crate) force: bool,
    #[serde(rename = "filesHash")]
    pub(crate) files_hash: Option<String>,
    /// These two were done by the client when it packed and uploaded the files.
    #[serde(rename = "forceUpload")]
    _force_upload: Option<bool>,
    #[serde(rename = "resolveSymlinks")]
    _resolve_symlinks: Option<bool>,
}

/// Where a build begins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Origin {
    /// A template, as in our store.
    Template { name: String, begins: Begins },
    /// An image in a registry.
    Image(String),
}

/// As whom and where the first step runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Begins {
    user: String,
    workdir: String,
}

impl Default for Begins {
    fn default() -> Self {
        Self {
            user: USER.to_owned(),
            workdir: WORKDIR.to_owned(),
        }
    }
}

impl Begins {
    /// Where another template's steps left off. What a template of ours does not say is as E2B has it.
    pub(crate) fn where_left(user: &str, workdir: &str) -> Self {
        let or = |said: &str, usual: &str| if said.is_empty() { usual } else { said }.to_owned();
        Self {
            user: or(user, USER),
            workdir: or(workdir, WORKDIR),
        }
    }
}

/// E2B's own images that templates of ours stand for.
const OWN_IMAGES: [(&str, &str); 2] = [
    ("e2bdev/base", "base"),
    ("e2bdev/code-interpreter", "code-interpreter-v1"),
];

impl Origin {
    /// An image that a template of ours may stand for: by E2B's names, or by its own (`ubuntu:22.04`).
    pub(crate) fn stand_in(image: &str) -> Option<String> {
        let (name, _) = image.split_once(':').unwrap_or((image, ""));
        let own = OWN_IMAGES.iter().find(|(own, _)| *own == name);
        match own {
            Some((_, template)) => Some((*template).to_owned()),
            None if image.contains('/') => None,
            None => Name::parse(image).ok().map(|name| name.stored()),
        }
    }
}

/// A COPY, with the archive that it takes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Copied {
    pub(crate) hash: String,
    pub(crate) source: String,
    /// Where to.
    pub(crate) to: String,
    /// Which line it is, from 0.
    pub(crate) line: usize,
    /// The directory of the context that holds what is copied.
    pub(crate) directory: String,
    /// The name that a single file gets; `None`: what is copied keeps its names.
    pub(crate) file_name: Option<String>,
}

#[derive(Debug, Default)]
pub(crate) struct Recipe {
    pub(crate) dockerfile: String,
    pub(crate) copies: Vec<Copied>,
    /// The step of each line.
    lines: Vec<Option<usize>>,
    /// As whom each step runs.
    users: Vec<String>,
}

impl Recipe {
    pub(crate) fn new(origin: &Origin, steps: &[Step]) -> Answer<Self> {
        let mut recipe = Self::default();
        let (from, begins) = match origin {
            Origin::Template { name, begins } => (name, begins.clone()),
            Origin::Image(name) => (name, Begins::default()),
        };
        if from.is_empty() || from.chars().any(|c| c.is_whitespace() || c.is_control()) {
            return Err(Refusal::invalid(format!(
                "`{}` names no image",
                from.escape_default()
            )));
        }
        recipe.line(None, &format!("FROM {from}"));
        recipe.line(None, &format!("USER {}", word("user", &begins.user)?));
        recipe.line(None, &format!("WORKDIR {}", line_of(&begins.workdir)?));
        let mut user = begins.user;
        for (index, step) in steps.iter().enumerate() {
            recipe.step(index, step, &mut user)?;
            recipe.users.push(
                step.args
                    .get(1)
                    .filter(|_| step.r#type == "RUN")
                    .unwrap_or(&user)
                    .clone(),
            );
        }
        Ok(recipe)
    }

    fn line(&mut self, step: Option<usize>, text: &str) {
        self.dockerfile.push_str(text);
        self.dockerfile.push('\n');
        // A value may have several.
        self.lines.extend(text.split('\n').map(|_| step));
    }

    fn step(&mut self, index: usize, step: &Step, user: &mut String) -> Answer<()> {
        let at = Some(index);
        let words: Vec<&str> = step.args.iter().map(String::as_str).collect();
        match (step.r#type.as_str(), &words[..]) {
            ("RUN", [command]) => self.line(at, &run(command)),
            ("RUN", [command, other]) => {
                self.line(at, &format!("USER {}", word("user", other)?));
                self.line(at, &run(command));
                self.line(at, &format!("USER {user}"));
            }
            ("COPY", [source, to, rest @ ..]) => self.copy(index, step, source, to, rest, user)?,
            ("ENV", pairs) if pairs.len() % 2 == 0 && !pairs.is_empty() => {
                let mut text = "ENV".to_owned();
                for pair in pairs.chunks(2) {
                    // Writing to a String does not fail.
                    let _ = write!(text, " {}={}", word("name", pair[0])?, quoted(pair[1])?);
                }
                self.line(at, &text);
            }
            ("WORKDIR", [path]) => self.line(at, &format!("WORKDIR {}", line_of(path)?)),
            ("USER", [name]) => {
                *user = word("user", name)?.to_owned();
                self.line(at, &format!("USER {user}"));
            }
            (kind, _) => {
                return Err(Refusal::invalid(format!(
                    "`steps[{index}]` of type `{kind}` with {} arguments is not supported",
                    words.len()
                )));
            }
        }
        Ok(())
    }

    fn copy(
        &mut self,
        index: usize,
        step: &Step,
        source: &str,
        to: &str,
        rest: &[&str],
        user: &str,
    ) -> Answer<()> {
        let Some(hash) = step.files_hash.clone() else {
            return Err(Refusal::invalid(format!("`steps[{index}].filesHash` is missing")));
        };
        let owner = rest.first().filter(|owner| !owner.is_empty());
        let mode = rest.get(1).filter(|mode| !mode.is_empty());
        let directory = format!("copy-{index}");
        let wild = source.contains(['*', '?', '[']);
        // Whether it is a file or a directory is known when the archive is here; a name that ends with `/` is decided now.
        let file_name = (!wild && !to.ends_with('/') && !to.ends_with("/."))
            .then(|| to.rsplit('/').next().unwrap_or(to).to_owned())
            .filter(|name| !matches!(name.as_str(), "" | "." | ".."));
        let mut text = "COPY".to_owned();
        let owner = owner.copied().unwrap_or(user);
        let _ = write!(text, " --chown={}", word("owner", owner)?);
        if let Some(mode) = mode {
            let _ = write!(text, " --chmod={}", word("mode", mode)?);
        }
        // The archive decides where below `to` things go: see `Copied::file_name`.
        let _ = write!(
            text,
            " {}",
            json!([format!("{directory}/"), format!("{}/", to.trim_end_matches('/'))])
        );
        let line = self.lines.len();
        self.line(Some(index), &text);
        self.copies.push(Copied {
            hash,
            source: source.to_owned(),
            to: to.to_owned(),
            line,
            directory,
            file_name,
        });
        Ok(())
    }

    /// The copy of a single file goes to its parent, under its name.
    pub(crate) fn goes_to_parent(&mut self, directory: &str) {
        let Some(copied) = self.copies.iter().find(|copied| copied.directory == directory) else {
            return;
        };
        let to = copied.to.trim_end_matches('/');
        let parent = match to.rsplit_once('/') {
            Some((parent, _)) => format!("{parent}/"),
            None => "./".to_owned(),
        };
        let words = |to: &str| json!([format!("{directory}/"), to]).to_string();
        let (before, after) = (words(&format!("{to}/")), words(&parent));
        let lines = self.dockerfile.lines().enumerate();
        let lines = lines.map(|(number, line)| match number == copied.line {
            true => line.replacen(&before, &after, 1),
            false => line.to_owned(),
        });
        self.dockerfile = lines.map(|line| line + "\n").collect();
    }

    /// As whom a step runs.
    pub(crate) fn user_at(&self, step: usize) -> &str {
        self.users.get(step).map_or(USER, String::as_str)
    }

    /// Which step a line belongs to; `None`: to what precedes the first.
    pub(crate) fn step_at(&self, line: usize) -> Option<usize> {
        self.lines.get(line.checked_sub(1)?).copied().flatten()
    }
}

fn run(command: &str) -> String {
    format!("RUN {}", json!(["/bin/bash", "-l", "-c", command]))
}

/// Something that has to be one word of a Dockerfile.
fn word<'a>(what: &str, text: &'a str) -> Answer<&'a str> {
    let fine = !text.is_empty()
        && text
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "_-.:".contains(c));
    match fine {
        true => Ok(text),
        false => Err(Refusal::invalid(format!(
            "`{}` is not a {what}",
            text.escape_default()
        ))),
    }
}

fn line_of(text: &str) -> Answer<&str> {
    match text.is_empty() || text.contains(['\n', '\r', '\\']) {
        false => Ok(text),
        true => Err(Refusal::invalid(format!(
            "`{}` cannot be used here",
            text.escape_default()
        ))),
    }
}

/// A value of the environment. `$NAME` in it means what it means in a Dockerfile.
fn quoted(text: &str) -> Answer<String> {
    if text.contains('\r') {
        return Err(Refusal::invalid("a value of ENV has a carriage return"));
    }
    let text = text.replace('\\', "\\\\").replace('"', "\\\"");
    // A line that ends with a backslash would go on: so it ends with the quotes, which begin again.
    Ok(format!("\"{}\"", text.replace("\\\n", "\\\"\"\n")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(kind: &str, args: &[&str]) -> Step {
        Step {
            r#type: kind.into(),
            args: args.iter().map(ToString::to_string).collect(),
            force: false,
            files_hash: (kind == "COPY").then(|| "abc".into()),
            _force_upload: None,
            _resolve_symlinks: None,
        }
    }

    fn base() -> Origin {
        Origin::Template {
            name: "base".into(),
            begins: Begins::default(),
        }
    }

    #[test]
    fn a_template_on_another_goes_on_where_that_left_off() {
        let derived = |user, workdir| {
            let origin = Origin::Template {
                name: "app".into(),
                begins: Begins::where_left(user, workdir),
            };
            Recipe::new(
                &origin,
                &[step("RUN", &["x", "root"]), step("COPY", &["a", "b/", "", ""])],
            )
        };
        let recipe = derived("worker", "/app").unwrap();
        let lines: Vec<&str> = recipe.dockerfile.lines().collect();
        assert_eq!(lines[..3], ["FROM app", "USER worker", "WORKDIR /app"]);
        assert_eq!(lines[5], "USER worker", "as before the step that was another's");
        assert!(lines[6].contains("--chown=worker"), "{}", lines[6]);
        let usual = derived("", "").unwrap();
        assert!(
            usual
                .dockerfile
                .starts_with("FROM app\nUSER user\nWORKDIR /home/user\n")
        );
        assert!(derived("a\nRUN x", "/").is_err() && derived("a", "/\nRUN x").is_err());
    }

    #[test]
    fn steps_become_lines_that_know_them() {
        let steps = [
            step("ENV", &["A", "x \"y\""]),
            step("RUN", &["echo \"hi\"", "root"]),
            step("COPY", &["folder/*", "folder", "", ""]),
            step("COPY", &["a.txt", "b/c.txt", "root", "600"]),
        ];
        let mut recipe = Recipe::new(&base(), &steps).unwrap();
        assert_eq!((recipe.user_at(0), recipe.user_at(1)), ("user", "root"));
        recipe.goes_to_parent("copy-3");
        let expected = r#"FROM base
USER user
WORKDIR /home/user
ENV A="x \"y\""
USER root
RUN ["/bin/bash","-l","-c","echo \"hi\""]
USER user
COPY --chown=user ["copy-2/","folder/"]
COPY --chown=root --chmod=600 ["copy-3/","b/"]
"#;
        assert_eq!(recipe.dockerfile, expected);
        for (line, step) in [(0, None), (1, None), (6, Some(1)), (99, None)] {
            assert_eq!(recipe.step_at(line), step, "{line}");
        }
        assert_eq!(recipe.copies[0].file_name, None);
        assert_eq!(recipe.copies[1].file_name.as_deref(), Some("c.txt"));
    }

    #[test]
    fn nothing_of_a_step_becomes_another_line() {
        for wrong in [
            step("USER", &["root\nRUN x"]),
            step("ENV", &["A", "b\r\nRUN x"]),
            step("WORKDIR", &["/a\nRUN x"]),
            step("ADD", &["a", "b"]),
            step("RUN", &[]),
        ] {
            assert!(Recipe::new(&base(), &[wrong]).is_err());
        }
        let sneaky = Origin::Image("x\nRUN y".into());
        assert!(Recipe::new(&sneaky, &[]).is_err());
    }

    #[test]
    fn a_value_of_several_lines_stays_between_its_quotes() {
        let steps = [
            step("ENV", &["A", "one\ntwo\\\n\nRUN \"x\"", "B", "b"]),
            step("COPY", &["a.txt", "b/c.txt", "", ""]),
        ];
        let mut recipe = Recipe::new(&base(), &steps).unwrap();
        recipe.goes_to_parent("copy-1");
        let lines: Vec<&str> = recipe.dockerfile.lines().skip(3).collect();
        let expected = [
            "ENV A=\"one",
            "two\\\\\"\"",
            "",
            "RUN \\\"x\\\"\" B=\"b\"",
            "COPY --chown=user [\"copy-1/\",\"b/\"]",
        ];
        assert_eq!(lines, expected);
        assert_eq!((recipe.step_at(7), recipe.step_at(8)), (Some(0), Some(1)));
    }

    #[test]
    fn some_images_are_templates_of_ours() {
        assert_eq!(Origin::stand_in("e2bdev/base:latest").as_deref(), Some("base"));
        assert_eq!(Origin::stand_in("ubuntu:22.04").as_deref(), Some("ubuntu.22.04"));
        assert_eq!(Origin::stand_in("docker.io/library/ubuntu"), None);
    }
}
