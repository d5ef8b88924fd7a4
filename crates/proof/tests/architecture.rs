//! The shape of the house, asserted: which crate may know which, who may use what, and how large a room may get.
//!
//! It reads the manifests (through `cargo metadata`) and the sources as text, so it needs no sandbox and runs in well under
//! a second. When it fails, either the code took a wrong turn or `ARCHITECTURE.md` and this file have to change together.

#![allow(clippy::panic, reason = "a test fails by panicking")]

#[path = "../../atoll/build/sources.rs"]
mod embedded;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// The layers, bottom first. A crate may depend on crates of lower layers only; those that decide and those that perform
/// are siblings, because neither may know the other.
const LAYERS: [(&str, &[&str]); 15] = [
    ("tools", &["archive", "confine", "http-rules", "turns"]),
    ("words", &["types", "guest-protocol"]),
    ("identity", &["identity"]),
    (
        "decide, perform",
        &[
            "lifecycle",
            "policy",
            "workflow-core",
            "runtime",
            "image",
            "store",
            "vault",
            "volumes",
            "links",
            "broker",
            "egress",
            "gateway-core",
            "dialects",
            "providers",
            "memory",
        ],
    ),
    ("apart", &["helper"]),
    ("node", &["node"]),
    ("application", &["sandboxes", "models", "workflows"]),
    // Below every API: whoever acts by name, as steps do, asks the application itself.
    ("actions", &["actions"]),
    ("workers", &["steps"]),
    ("front", &["front"]),
    (
        "translate",
        &["api-native", "api-e2b", "api-models", "api-temporal", "scripted"],
    ),
    ("client", &["client"]),
    ("scenarios", &["demo", "bench"]),
    ("programs", &["guest", "jailer", "atoll"]),
    ("proof", &["proof", "fuzz"]),
];

/// Edges that the layers forbid and reason allows.
const EXCEPTIONS: [(&str, &str, &str); 5] = [
    (
        "store",
        "lifecycle",
        "a row is lifecycle's record plus what it belongs to; a copy of its fields would drift",
    ),
    (
        "runtime",
        "jailer",
        "the jailer's arguments are read and written by one type, so that the two programs agree",
    ),
    (
        "egress",
        "policy",
        "the data path asks it about every flow, name and request; a way round through the application would be a second one",
    ),
    (
        "egress",
        "broker",
        "secrets go into a request, and out of its answer, on the data path and nowhere else",
    ),
    (
        "broker",
        "policy",
        "what goes into a request is a grant, as the policy made it; a copy of its fields would drift",
    ),
];

/// What a crate must not know although its layer may: who decides knows no machine, and a machine knows nobody's rights.
const APART: [(&str, &[&str], &str); 2] = [
    (
        "sandboxes",
        &["runtime", "links", "egress", "vault", "volumes", "helper"],
        "control reaches a machine through `node::Node` and nothing else",
    ),
    (
        "node",
        &["store", "identity"],
        "a node knows no rows and no callers: what it is told was decided",
    ),
];

/// Crates that contain `unsafe`, each block with its reasons.
const UNSAFE: [&str; 8] = [
    "confine", "fuzz", "guest", "jailer", "links", "runtime", "vault", "volumes",
];

/// A third-party crate, and who may depend on it.
const OWNED: [(&str, &[&str], &str); 12] = [
    (
        "tonic",
        &["api-temporal", "client"],
        "only a front end, and the client that demo and bench need, know gRPC",
    ),
    ("rusqlite", &["store"], "only the store speaks SQL"),
    (
        "axum",
        &["front", "api-native", "api-e2b", "api-models", "scripted"],
        "only a front end and a stand-in for a provider know HTTP routes",
    ),
    (
        "utoipa",
        &["actions", "api-native"],
        "only Atoll's own API describes its wire, in words that it shares with actions",
    ),
    ("clap", &["atoll"], "only the program reads a command line"),
    (
        "hyper",
        &["front", "egress", "providers"],
        "below a front end nobody knows HTTP, but those who speak it to others: the proxy and the providers",
    ),
    (
        "http",
        &[
            "http-rules",
            "front",
            "api-native",
            "api-e2b",
            "broker",
            "egress",
            "fuzz",
        ],
        "below a front end nobody knows HTTP, but the proxy that reads what guests send and the broker of what goes into it",
    ),
    (
        "reqwest",
        &["client", "demo", "bench", "atoll", "image", "proof"],
        "only clients need a client of everything, but images come from registries",
    ),
    ("oci-client", &["image"], "only images have references"),
    (
        "multer",
        &["front"],
        "bodies in parts are read in one place, within bounds",
    ),
    (
        "landlock",
        &["confine"],
        "there is one place that speaks to the kernel about it",
    ),
    (
        "seccompiler",
        &["confine"],
        "there is one place that speaks to the kernel about it",
    ),
];

/// What has no place in crates that only name or decide: time, tasks, wires.
const NOT_FOR_WORDS_AND_DECISIONS: [&str; 6] =
    ["tokio", "serde_json", "hyper", "axum", "reqwest", "getrandom"];
const WORDS_AND_DECISIONS: [&str; 6] = [
    "types",
    "guest-protocol",
    "lifecycle",
    "policy",
    "gateway-core",
    "workflow-core",
];
const DECISIONS: [&str; 5] = ["lifecycle", "policy", "gateway-core", "dialects", "workflow-core"];

/// Longer files are hard to read and to review.
const MAX_LINES: usize = 800;
/// Files that may be longer, with a reason.
const LONG: [(&str, &str); 0] = [];

#[test]
fn dependencies_point_down() {
    let workspace = Workspace::read();
    let mut wrong = Vec::new();
    for (name, dependencies) in &workspace.crates {
        let Some(mine) = layer_of(name) else {
            wrong.push(format!(
                "crate `{name}` is in no layer: add it to ARCHITECTURE.md and to LAYERS"
            ));
            continue;
        };
        for dependency in dependencies.iter().filter_map(|name| name.strip_prefix("atoll-")) {
            let excepted = EXCEPTIONS
                .iter()
                .any(|(from, to, _)| (*from, *to) == (name.as_str(), dependency));
            if layer_of(dependency).is_none_or(|theirs| theirs >= mine) && !excepted {
                wrong.push(format!(
                    "`{name}` must not depend on `{dependency}`: it is not in a lower layer"
                ));
            }
        }
    }
    for (from, to, reason) in EXCEPTIONS {
        if !workspace.crates[from].contains(&format!("atoll-{to}")) {
            wrong.push(format!(
                "the exception {from} -> {to} ({reason}) is no longer needed"
            ));
        }
    }
    assert_none(&wrong);
}

#[test]
fn control_and_node_are_apart() {
    let workspace = Workspace::read();
    let mut wrong = Vec::new();
    for (name, strangers, reason) in APART {
        for stranger in strangers {
            if workspace.crates[name].contains(&format!("atoll-{stranger}")) {
                wrong.push(format!("`{name}` must not depend on `{stranger}`: {reason}"));
            }
        }
    }
    // Nor by way of another crate that hands them on.
    for (path, text) in workspace.sources("sandboxes") {
        let in_src = path.components().any(|part| part.as_os_str() == "src");
        for stranger in ["LocalNode", "atoll_runtime", "atoll_volumes::", "atoll_vault::"] {
            if in_src && text.contains(stranger) {
                wrong.push(format!("{} names `{stranger}`", path.display()));
            }
        }
    }
    assert_none(&wrong);
}

#[test]
fn words_and_decisions_are_pure() {
    let workspace = Workspace::read();
    let mut wrong = Vec::new();
    for name in WORDS_AND_DECISIONS {
        for dependency in &workspace.crates[name] {
            if NOT_FOR_WORDS_AND_DECISIONS.contains(&dependency.as_str()) {
                wrong.push(format!("`{name}` must not depend on `{dependency}`"));
            }
        }
    }
    let decisions = DECISIONS.into_iter().flat_map(|name| workspace.sources(name));
    for (path, text) in decisions {
        for (needle, what) in [
            ("SystemTime::now", "reads the clock"),
            ("Instant::now", "reads the clock"),
            ("std::fs", "does I/O"),
            // Not all of `std::net`: addresses are words.
            ("TcpListener", "does I/O"),
            ("TcpStream", "does I/O"),
            ("UdpSocket", "does I/O"),
            ("ToSocketAddrs", "does I/O"),
            ("std::env", "reads the environment"),
        ] {
            if text.contains(needle) {
                wrong.push(format!(
                    "{} {what}: a decision depends on its input only",
                    path.display()
                ));
            }
        }
    }
    assert_none(&wrong);
}

/// A caller out of nowhere would be somebody whom nobody has let in.
#[test]
fn no_program_contains_what_is_for_tests() {
    assert_none(&Workspace::read().for_tests);
}

#[test]
fn each_tool_has_its_owner() {
    let workspace = Workspace::read();
    let mut wrong = Vec::new();
    for (name, dependencies) in &workspace.crates {
        for (tool, owners, reason) in OWNED {
            if dependencies.iter().any(|dependency| dependency == tool) && !owners.contains(&name.as_str()) {
                wrong.push(format!("`{name}` depends on `{tool}`, but {reason}"));
            }
        }
    }
    assert_none(&wrong);
}

/// What stores promise names no database: another one can stand behind the same traits.
#[test]
fn only_one_module_of_the_store_knows_sqlite() {
    let workspace = Workspace::read();
    let mut wrong = Vec::new();
    for (path, text) in workspace.sources("store") {
        let is_words = path.components().any(|part| part.as_os_str() == "src")
            && !path.components().any(|part| part.as_os_str() == "sqlite")
            && !path.ends_with("sqlite.rs");
        if is_words && text.contains("rusqlite") {
            wrong.push(format!("{} knows rusqlite", path.display()));
        }
    }
    assert_none(&wrong);
}

/// What runs as PID 1 inside the sandbox, or around it, drags none of the server along.
#[test]
fn guest_and_jailer_stand_alone() {
    let workspace = Workspace::read();
    let own = |name: &str| -> Vec<String> {
        workspace.crates[name]
            .iter()
            .filter(|name| name.starts_with("atoll-"))
            .cloned()
            .collect()
    };
    assert_eq!(own("guest"), ["atoll-archive", "atoll-guest-protocol"]);
    assert_eq!(own("jailer"), ["atoll-archive", "atoll-confine"]);
    for name in ["guest", "jailer"] {
        for heavy in ["tokio", "serde_json", "tracing"] {
            assert!(
                !workspace.crates[name].iter().any(|d| d == heavy),
                "`{name}` depends on `{heavy}`"
            );
        }
    }
}

/// Otherwise a change of what they are made of would leave the old ones in the program.
#[test]
fn whatever_the_embedded_programs_use_is_watched() {
    let workspace = Workspace::read();
    let mut used = vec!["guest".to_owned(), "jailer".to_owned()];
    let mut next = 0;
    while let Some(name) = used.get(next).cloned() {
        let own = workspace.crates[&name]
            .iter()
            .filter_map(|name| name.strip_prefix("atoll-"));
        for name in own {
            if !used.iter().any(|known| known == name) {
                used.push(name.to_owned());
            }
        }
        next += 1;
    }
    let mut expected: Vec<PathBuf> = used
        .iter()
        .map(|name| workspace.root.join(crate_dir(name)))
        .collect();
    expected.extend(["Cargo.toml", "Cargo.lock"].map(|name| workspace.root.join(name)));
    expected.sort();
    let watched = embedded::sources(&workspace.root, &["atoll-guest", "atoll-jailer"]);
    assert_eq!(watched.into_iter().collect::<Vec<_>>(), expected);
}

#[test]
fn only_those_listed_contain_unsafe() {
    let workspace = Workspace::read();
    let opt_in = ["unsafe", "_code"].concat();
    let mut found = Vec::new();
    for name in workspace.crates.keys() {
        let mut sources = workspace.sources(name);
        if sources.any(|(_, text)| text.contains(&opt_in)) {
            found.push(name.as_str());
        }
    }
    assert_eq!(
        found, UNSAFE,
        "ARCHITECTURE.md (invariants) and UNSAFE name the crates that may contain unsafe"
    );
}

#[test]
fn every_crate_obeys_the_workspace() {
    let workspace = Workspace::read();
    let mut wrong = Vec::new();
    for name in workspace.crates.keys() {
        let manifest = read(&workspace.root.join(crate_dir(name)).join("Cargo.toml"));
        for line in [
            "[lints]\nworkspace = true",
            "publish.workspace = true",
            "version.workspace = true",
        ] {
            if !manifest.contains(line) {
                wrong.push(format!("the Cargo.toml of {name} lacks {line:?}"));
            }
        }
    }
    assert_none(&wrong);
}

#[test]
fn files_stay_readable() {
    let workspace = Workspace::read();
    let mut wrong = Vec::new();
    for name in workspace.crates.keys() {
        for (path, text) in workspace.sources(name) {
            let lines = text.lines().count();
            let listed = LONG.iter().any(|(long, _)| Path::new(long) == path);
            if lines > MAX_LINES && !listed {
                wrong.push(format!("{} has {lines} lines; split it by theme", path.display()));
            }
            let first = text.lines().next().unwrap_or_default();
            let in_src = path.components().any(|part| part.as_os_str() == "src");
            if in_src && lines > 40 && !first.starts_with("//!") && !path.ends_with("tests.rs") {
                wrong.push(format!("{} does not say first what it is for", path.display()));
            }
        }
    }
    assert_none(&wrong);
}

/// A checkout works wherever it lies; a path of the machine on which something was written does not.
#[test]
fn no_file_names_a_place_on_somebodys_machine() {
    let workspace = Workspace::read();
    let root = workspace.root.display().to_string();
    let needles = [
        root,
        ["/work", "/main"].concat(),
        ["/work", "/shared"].concat(),
        ["/opt", "/dev"].concat(),
    ];
    let mut wrong = Vec::new();
    for path in workspace.files() {
        // What is not text names nothing.
        let Ok(text) = std::fs::read_to_string(workspace.root.join(&path)) else {
            continue;
        };
        for needle in needles.iter().filter(|needle| needle.len() > 4) {
            if let Some(line) = text.lines().position(|line| line.contains(needle.as_str())) {
                wrong.push(format!("{}:{} contains {needle}", path.display(), line + 1));
            }
        }
    }
    assert_none(&wrong);
}

#[test]
fn the_code_map_names_every_crate() {
    let workspace = Workspace::read();
    let map = read(&workspace.root.join("ARCHITECTURE.md"));
    for name in workspace.crates.keys() {
        assert!(
            map.contains(&format!("| `{name}` |")),
            "the code map of ARCHITECTURE.md does not name `{name}`"
        );
    }
}

fn layer_of(name: &str) -> Option<usize> {
    LAYERS.iter().position(|(_, crates)| crates.contains(&name))
}

/// From the root. What fuzzes lies where those who fuzz look for it.
fn crate_dir(name: &str) -> PathBuf {
    match name {
        "fuzz" => name.into(),
        _ => Path::new("crates").join(name),
    }
}

fn assert_none(wrong: &[String]) {
    assert!(wrong.is_empty(), "\n  {}\n", wrong.join("\n  "));
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

struct Workspace {
    root: PathBuf,
    /// Name without `atoll-`, and what it depends on; dev-dependencies do not count.
    crates: BTreeMap<String, Vec<String>>,
    /// Those that ask another crate for what it has for tests, and not in tests alone.
    for_tests: Vec<String>,
}

impl Workspace {
    fn read() -> Self {
        let output = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
            .args([
                "metadata",
                "--no-deps",
                "--format-version",
                "1",
                "--offline",
                "--manifest-path",
            ])
            .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml"))
            .output()
            .expect("cargo runs");
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        let metadata: Value = serde_json::from_slice(&output.stdout).expect("cargo metadata is JSON");
        let crates = metadata["packages"]
            .as_array()
            .into_iter()
            .flatten()
            .map(|package| {
                let name = package["name"].as_str().expect("a package has a name");
                let dependencies = package["dependencies"].as_array().into_iter().flatten();
                let dependencies = dependencies.filter(|dependency| dependency["kind"] != "dev");
                let names =
                    dependencies.filter_map(|dependency| dependency["name"].as_str().map(str::to_owned));
                (
                    name.strip_prefix("atoll-").unwrap_or(name).to_owned(),
                    names.collect(),
                )
            });
        let packages = metadata["packages"].as_array().into_iter().flatten();
        let for_tests = packages.filter(|package| {
            let mut dependencies = package["dependencies"].as_array().into_iter().flatten();
            dependencies.any(|dependency| {
                let features = dependency["features"].as_array();
                dependency["kind"] != "dev" && features.is_some_and(|list| list.contains(&"testing".into()))
            })
        });
        let for_tests = for_tests.map(|package| package["name"].to_string()).collect();
        Self {
            for_tests,
            crates: crates.collect(),
            root: metadata["workspace_root"]
                .as_str()
                .expect("there is a workspace")
                .into(),
        }
    }

    /// The Rust files of a crate, by path from the root.
    fn sources(&self, name: &str) -> impl Iterator<Item = (PathBuf, String)> {
        let crate_dir = crate_dir(name);
        let files = self.files().into_iter();
        let of_crate = files.filter(move |path| {
            path.starts_with(&crate_dir) && path.extension().is_some_and(|extension| extension == "rs")
        });
        of_crate.map(|path| (path.clone(), read(&self.root.join(path))))
    }

    /// Everything that is, or would be, in version control.
    fn files(&self) -> Vec<PathBuf> {
        let output = Command::new("git")
            .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
            .current_dir(&self.root)
            .output()
            .expect("git runs");
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        let names = String::from_utf8(output.stdout).expect("file names are text");
        // A file that somebody has just removed is still listed.
        names
            .split_terminator('\0')
            .map(PathBuf::from)
            .filter(|path| self.root.join(path).is_file())
            .collect()
    }
}
