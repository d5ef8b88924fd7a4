//! What the embedded programs are made of. Used by the build script, and by a test that compares it with what cargo says.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// The directories of these packages and of every package of the workspace that they use, and what the workspace as a whole
/// says. `atoll-NAME` lies in `crates/NAME`.
pub(crate) fn sources(root: &Path, programs: &[&str]) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::from([root.join("Cargo.toml"), root.join("Cargo.lock")]);
    let mut open: Vec<String> = programs.iter().map(|&name| name.to_owned()).collect();
    while let Some(package) = open.pop() {
        let directory = root.join("crates").join(package.trim_start_matches("atoll-"));
        let manifest = fs::read_to_string(directory.join("Cargo.toml"));
        let manifest = manifest.expect("a package of the workspace has a manifest");
        if found.insert(directory) {
            open.extend(uses(&manifest));
        }
    }
    found
}

/// The packages of the workspace that a manifest names, except those that only its tests need.
fn uses(manifest: &str) -> Vec<String> {
    let mut section = "";
    let mut named = Vec::new();
    for line in manifest.lines().map(str::trim) {
        if let Some(head) = line.strip_prefix('[') {
            section = head.trim_end_matches(']');
        } else if section.ends_with("dependencies") && !section.ends_with("dev-dependencies") {
            let name = line.split(['.', ' ', '=']).next().unwrap_or_default();
            if name.starts_with("atoll-") {
                named.push(name.to_owned());
            }
        }
    }
    named
}
