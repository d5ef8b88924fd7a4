//! The presets, as data.

use atoll_types::{NetworkRule, PortRange, Preset, RuleAction};

/// Indexes and file hosts of the usual package managers. All serve everybody's packages, so what can be uploaded
/// to them is an account away; reading is what they are here for.
const PACKAGE_REGISTRIES: &[&str] = &[
    // Python
    "pypi.org",
    "files.pythonhosted.org",
    // JavaScript
    "registry.npmjs.org",
    "registry.yarnpkg.com",
    // Rust
    "crates.io",
    "index.crates.io",
    "static.crates.io",
    // Go
    "proxy.golang.org",
    "sum.golang.org",
    // Ruby
    "rubygems.org",
    "index.rubygems.org",
    // Java
    "repo.maven.apache.org",
    "repo1.maven.org",
    // PHP
    "packagist.org",
    "repo.packagist.org",
    // Linux distributions
    "deb.debian.org",
    "security.debian.org",
    "archive.ubuntu.com",
    "security.ubuntu.com",
    "dl-cdn.alpinelinux.org",
];

/// Everything; the floor takes away what is not public.
const ALL_PUBLIC: &[&str] = &["*", "0.0.0.0/0", "::/0"];

/// The rules that a preset stands for, each with the name by which decisions refer to it.
pub(crate) fn rules(preset: Preset) -> Vec<NetworkRule> {
    let (destinations, ports) = match preset {
        Preset::None => (&[][..], Vec::new()),
        Preset::PackageRegistries => (PACKAGE_REGISTRIES, Vec::new()),
        Preset::AllPublic => (ALL_PUBLIC, vec![PortRange::ALL]),
    };
    destinations
        .iter()
        .map(|to| NetworkRule {
            name: Some(format!("preset {preset}: {to}")),
            ports: ports.clone(),
            ..NetworkRule::new(RuleAction::Allow, *to)
        })
        .collect()
}
