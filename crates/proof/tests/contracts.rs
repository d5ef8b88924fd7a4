//! What others build on, committed as text: a change of it shows in the diff of whoever makes it, or this fails.
//!
//! `ATOLL_WRITE_CONTRACTS=1 cargo nextest run -p atoll-proof --test contracts` writes the files anew.

#![allow(clippy::panic, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use atoll_front::status;
use atoll_types::Code;

const WRITE: &str = "ATOLL_WRITE_CONTRACTS";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Compares with the file in the repository, or writes it when asked to.
fn settle(name: &str, is: &str) {
    let path = root().join(name);
    if std::env::var_os(WRITE).is_some() {
        fs::write(&path, is).expect("the checkout can be written to");
        return;
    }
    let committed = fs::read_to_string(&path).unwrap_or_default();
    if committed == is {
        return;
    }
    let line = committed.lines().zip(is.lines()).position(|(was, is)| was != is);
    let line = line.unwrap_or_else(|| committed.lines().count().min(is.lines().count()));
    panic!(
        "{name} is not what the code says any more, from line {} on:\n  committed: {}\n  now:       {}\n\
         If that is meant, commit what `{WRITE}=1 cargo nextest run -p atoll-proof --test contracts` writes, and say in \
         CHANGELOG.md what it means for users.",
        line + 1,
        committed.lines().nth(line).unwrap_or("(ends)"),
        is.lines().nth(line).unwrap_or("(ends)"),
    );
}

#[test]
fn the_native_api_is_the_committed_one() {
    let document = atoll_api_native::document().unwrap();
    settle("contracts/openapi.json", &format!("{document}\n"));
}

/// The same as `rights.txt`, which a test of `api-native` compares with what is decided, by what can be done.
#[test]
fn the_page_of_rights_is_the_committed_one() {
    let table = source("crates/api-native/src/rights.txt");
    let mut actions: BTreeMap<&str, (&str, &str, Vec<String>)> = BTreeMap::new();
    for line in table.lines().filter(|line| line.starts_with('/')) {
        let (route, rights) = line.split_once(": ").unwrap();
        let (path, method) = route.rsplit_once(' ').unwrap();
        let mut parts = rights.split("; ");
        let (Some(action), Some(roles)) = (parts.next(), parts.next()) else {
            continue;
        };
        let known = actions
            .entry(action)
            .or_insert((roles, parts.next().unwrap_or(""), Vec::new()));
        known.2.push(format!("{method} `{path}`"));
    }
    let mut text = String::from(
        "# What keys may do\n\n\
         An error that refuses something names an action of this list. A key may do it if its role is there and, where the key has\n\
         scopes, one of them is. An action without a scope takes a key without scopes. How keys are made: [README](../README.md#keys).\n\n\
         Written by crates/proof/tests/contracts.rs from what the server decides.\n\n\
         | action | roles | scopes | requests |\n|---|---|---|---|\n",
    );
    for (action, (roles, scopes, routes)) in actions {
        let (roles, scopes) = (roles.replace(' ', ", "), scopes.replace(' ', ", "));
        let scopes = scopes.replace("any, scope", "any");
        writeln!(
            text,
            "| `{action}` | {roles} | {scopes} | {} |",
            routes.join(", ")
        )
        .unwrap();
    }
    settle("docs/rights.md", &text);
}

#[test]
fn the_guest_protocol_is_the_committed_one() {
    let mut text = String::from(
        "// What travels between host and guest: every type that is encoded, in the order in which its fields are.\n\
         // Written by crates/proof/tests/contracts.rs from crates/guest-protocol/src.\n",
    );
    for file in ["lib.rs", "frame.rs", "message.rs"] {
        let source = source(&format!("crates/guest-protocol/src/{file}"));
        let items = items(&source);
        let spoken = items.iter().filter(|item| {
            let head = item.head();
            let is_data = !head.contains("struct ") || item.derives("Serialize");
            let is_told = head.starts_with("pub ") || head.starts_with("const MAGIC");
            is_told && is_data
        });
        for item in spoken {
            write!(text, "\n{}", item.without_comments()).unwrap();
        }
    }
    settle("contracts/guest-protocol.txt", &text);
}

#[test]
fn the_configuration_is_the_committed_one() {
    let mut text = String::from(
        "// The configuration file: every table, its keys and what they mean, and the words that they can have.\n\
         // Written by crates/proof/tests/contracts.rs from crates/atoll/src/config and what that reads.\n",
    );
    let tables = [
        "crates/atoll/src/config/file.rs",
        "crates/atoll/src/config/pool.rs",
        "crates/atoll/src/config/sizes.rs",
        "crates/atoll/src/limits.rs",
    ];
    for file in tables {
        for item in items(&source(file))
            .iter()
            .filter(|item| item.derives("Deserialize"))
        {
            write!(text, "\n{}", item.0).unwrap();
        }
    }
    for (file, word) in [
        ("crates/atoll/src/args/service.rs", "LogFormat"),
        ("crates/types/src/sandbox.rs", "Isolation"),
        ("crates/types/src/sandbox.rs", "DiskBacking"),
        ("crates/types/src/network.rs", "Preset"),
    ] {
        let source = source(file);
        let found = items(&source)
            .into_iter()
            .find(|item| item.head().ends_with(&format!("enum {word} {{")));
        let item = found.unwrap_or_else(|| panic!("{word} is not in {file} any more"));
        write!(text, "\n{}", item.0).unwrap();
    }
    settle("contracts/configuration.txt", &text);
}

#[test]
fn the_page_of_error_codes_is_the_committed_one() {
    let mut text = String::from(
        "# Error codes\n\n\
         Every error that Atoll answers has a code, which stays, and a message for people, which may change: compare codes, never\n\
         messages. In the native API both are in the body: `{\"error\": {\"code\", \"message\", \"hint\", \"request_id\"}}`.\n\n\
         The statuses are those of the native API and of the workflow service (gRPC). Wires that others made keep their own:\n\
         E2B's API answers 507 where a disk is full, 404 for what is gone and 400 for what is not supported; model clients get 402\n\
         where a budget is exhausted and 502 where a provider is not available.\n\n\
         This page is written from `crates/types/src/code.rs`; `crates/proof/tests/contracts.rs` says how.\n",
    );
    for (section, codes) in Code::SECTIONS {
        write!(
            text,
            "\n## {section}\n\n| code | HTTP | gRPC | meaning | what to do |\n|---|---|---|---|---|\n"
        )
        .unwrap();
        for &code in *codes {
            let (http, grpc) = (status::http(code).as_u16(), status::grpc(code).name);
            let (meaning, remedy) = (code.meaning(), code.remedy());
            writeln!(text, "| `{code}` | {http} | {grpc} | {meaning} | {remedy} |").unwrap();
        }
    }
    settle("docs/errors.md", &text);
}

fn source(file: &str) -> String {
    fs::read_to_string(root().join(file)).unwrap_or_else(|error| panic!("{file}: {error}"))
}

/// A struct, enum, constant or type at the top level of a file, as rustfmt writes it, with its attributes and comments.
struct Item(String);

impl Item {
    /// The line that names it.
    fn head(&self) -> &str {
        let mut lines = self.0.lines();
        lines.find(|line| begins(line)).unwrap_or_default()
    }

    fn derives(&self, what: &str) -> bool {
        let derives = self.0.lines().filter(|line| line.starts_with("#[derive("));
        derives
            .flat_map(|line| line.split(|c: char| !c.is_alphanumeric()))
            .any(|word| word == what)
    }

    fn without_comments(&self) -> String {
        let lines = self.0.lines().filter(|line| !line.trim_start().starts_with("//"));
        lines.map(|line| format!("{line}\n")).collect()
    }
}

fn begins(line: &str) -> bool {
    let line = line
        .strip_prefix("pub(crate) ")
        .or(line.strip_prefix("pub "))
        .unwrap_or(line);
    ["struct ", "enum ", "const ", "type "]
        .iter()
        .any(|word| line.starts_with(word))
        && !line.starts_with("const fn")
}

fn items(source: &str) -> Vec<Item> {
    let (mut items, mut before, mut open) = (Vec::new(), String::new(), None::<String>);
    for line in source.lines() {
        match open.as_mut() {
            Some(item) => {
                item.push_str(line);
                item.push('\n');
                let ends = line == "}" || line.ends_with(';') && !line.trim_start().starts_with("//");
                if ends {
                    items.extend(open.take().map(Item));
                }
            }
            None if begins(line) => {
                let item = format!("{}{line}\n", std::mem::take(&mut before));
                if line.ends_with(';') || line.ends_with("{}") {
                    items.push(Item(item));
                } else {
                    open = Some(item);
                }
            }
            None if line.starts_with("///") || line.starts_with("#[") => {
                before.push_str(line);
                before.push('\n');
            }
            None => before.clear(),
        }
    }
    items
}
