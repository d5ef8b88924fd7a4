//! Builds the two static programs that live inside and around sandboxes, so that `atoll` carries them with it and stays
//! one file.
//!
//! They are for another target and profile than `atoll` itself, which cargo cannot express as a dependency; so this runs
//! a nested cargo with a target directory of its own (sharing the outer one would deadlock on its lock).
//! `ATOLL_PREBUILT_GUEST=DIR` takes both programs from a directory instead.

mod sources;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

const TARGET: &str = "x86_64-unknown-linux-musl";
const PROGRAMS: [&str; 2] = ["atoll-guest", "atoll-jailer"];

fn main() {
    let root = Path::new(&var("CARGO_MANIFEST_DIR"))
        .join("../..")
        .canonicalize()
        .expect("the workspace is two levels above this crate");
    for source in sources::sources(&root, &PROGRAMS) {
        println!("cargo::rerun-if-changed={}", source.display());
    }
    // Cargo watches the build script by itself only where nothing else is named.
    println!("cargo::rerun-if-changed=build");
    println!("cargo::rerun-if-env-changed=ATOLL_PREBUILT_GUEST");

    let built = match env::var_os("ATOLL_PREBUILT_GUEST") {
        Some(dir) => PathBuf::from(dir),
        None => build(&root),
    };
    let out = PathBuf::from(var("OUT_DIR"));
    for program in PROGRAMS {
        let from = built.join(program);
        let copied = fs::copy(&from, out.join(program));
        assert!(copied.is_ok(), "cannot copy {}: {copied:?}", from.display());
    }
}

/// Runs the nested cargo; returns the directory of the finished programs.
fn build(root: &Path) -> PathBuf {
    let target_dir = root.join("target/guest");
    let mut cargo = Command::new(var("CARGO"));
    cargo
        .current_dir(root)
        .args(["build", "--profile", "guest", "--target", TARGET]);
    for program in PROGRAMS {
        cargo.args(["-p", program]);
    }
    cargo.arg("--target-dir").arg(&target_dir);
    // What the outer cargo says about this build script must not leak into the inner build. The job server stays.
    for (name, _) in env::vars_os() {
        let name = name.to_string_lossy();
        let foreign = [
            "CARGO_CFG_",
            "CARGO_FEATURE_",
            "CARGO_PKG_",
            "CARGO_MANIFEST_",
            "CARGO_PROFILE_",
            "DEP_",
        ];
        let exact = [
            "CARGO_ENCODED_RUSTFLAGS",
            "CARGO_TARGET_DIR",
            "CARGO_BUILD_TARGET",
            "CARGO_PRIMARY_PACKAGE",
            "CLIPPY_ARGS",
            "RUSTFLAGS",
            "RUSTC",
            "RUSTC_WORKSPACE_WRAPPER",
            "RUSTDOC",
            "TARGET",
            "HOST",
            "PROFILE",
            "OPT_LEVEL",
            "DEBUG",
            "OUT_DIR",
        ];
        if foreign.iter().any(|prefix| name.starts_with(prefix)) || exact.contains(&&*name) {
            cargo.env_remove(&*name);
        }
    }
    let status = cargo.status().expect("cargo runs");
    assert!(
        status.success(),
        "building {PROGRAMS:?} for {TARGET} failed; if the target is missing: rustup target add {TARGET}"
    );
    target_dir.join(TARGET).join("guest")
}

fn var(name: &str) -> String {
    env::var(name).expect("cargo sets it for build scripts")
}
