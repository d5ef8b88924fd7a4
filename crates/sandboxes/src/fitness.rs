//! Whether saved state can be used where it is to be used.

use atoll_node::Saves;
use atoll_store::SnapshotRow;
use atoll_types::{Code, Fault, SaveKind};

/// Whether its files can be used without its memory.
pub(crate) fn has_files_apart(saved: &SnapshotRow) -> bool {
    saved.kind == SaveKind::Memory && saved.spec.fallback_to_files
}

/// Whether it can be used by this runtime on this processor.
pub(crate) fn fits(saved: &SnapshotRow, here: &Saves) -> Result<(), Fault> {
    let misfit = |code: Code, why: String| {
        Fault::new(code, why).hint("use the machine or the runtime version that it was saved with")
    };
    // Files are an archive, which any version of any runtime can read.
    if saved.runtime != here.runtime_version && saved.kind == SaveKind::Memory {
        return Err(misfit(
            Code::SnapshotRuntimeMismatch,
            format!(
                "it was saved by `{}`, but `{}` is what runs here",
                saved.runtime, here.runtime_version
            ),
        ));
    }
    if saved.kind == SaveKind::Memory {
        let missing: Vec<&str> = saved
            .cpu_features
            .iter()
            .filter(|feature| !here.cpu_features.contains(feature))
            .map(String::as_str)
            .collect();
        if !missing.is_empty() {
            return Err(misfit(
                Code::SnapshotCpuMismatch,
                format!(
                    "its programs were started on a CPU with {}, which this one lacks",
                    missing.join(", ")
                ),
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use atoll_types::{Isolation, SandboxSpec, SnapshotOwner, Timestamp};

    use super::*;
    use crate::entropy;

    fn saved(kind: SaveKind, isolation: Isolation) -> SnapshotRow {
        SnapshotRow {
            id: entropy::id(),
            project: entropy::id(),
            owner: SnapshotOwner::User,
            name: None,
            kind,
            sandbox: None,
            parent: None,
            template: entropy::id(),
            isolation,
            runtime: "one".into(),
            cpu_features: vec!["avx".into(), "avx512f".into()],
            spec: SandboxSpec::default(),
            total_bytes: 0,
            stored_bytes: 0,
            created_at: Timestamp(0),
        }
    }

    fn here(version: &str, features: &[&str]) -> Saves {
        Saves {
            memory: true,
            runtime_version: version.into(),
            cpu_features: features.iter().map(|&feature| feature.into()).collect(),
        }
    }

    #[test]
    fn memory_needs_every_feature_of_the_processor_it_was_saved_on() {
        let memory = saved(SaveKind::Memory, Isolation::Gvisor);
        assert!(fits(&memory, &here("one", &["sse2", "avx", "avx512f"])).is_ok());
        let refused = fits(&memory, &here("one", &["sse2", "avx"])).unwrap_err();
        assert_eq!(refused.code, Code::SnapshotCpuMismatch);
        assert!(refused.message.contains("avx512f") && !refused.message.contains("sse2"));
        let files = saved(SaveKind::Filesystem, Isolation::Gvisor);
        assert!(fits(&files, &here("one", &[])).is_ok());
    }

    #[test]
    fn only_files_fit_every_version() {
        let another = here("two", &["avx", "avx512f"]);
        let refused = fits(&saved(SaveKind::Memory, Isolation::Gvisor), &another).unwrap_err();
        assert_eq!(refused.code, Code::SnapshotRuntimeMismatch);
        for tier in [Isolation::Gvisor, Isolation::Jail] {
            assert!(fits(&saved(SaveKind::Filesystem, tier), &another).is_ok());
        }
    }
}
