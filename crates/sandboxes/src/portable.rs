//! Snapshots as one file, to another machine and back.
//!
//! What must hold: an imported file is as trustworthy as the one who brings it, and no more: what it says of itself is
//! checked against this machine before a row exists, its lengths are bounded, and its bytes belong to the importing
//! project alone.

use std::io::Read;

use atoll_node::SavedBytes;
use atoll_store::SnapshotRow;
use atoll_types::{Code, Fault, Isolation, SandboxSpec, SaveKind, SnapshotId, SnapshotOwner, TemplateId};
use serde::{Deserialize, Serialize};

use crate::snapshots::{Unfinished, check_name};
use crate::streams::holding;
use crate::{ByteStream, Caller, Sandboxes, Snapshot, entropy};

/// What an exported file says of itself.
#[derive(Debug, Serialize, Deserialize)]
struct Header {
    version: u32,
    kind: SaveKind,
    name: Option<String>,
    template: TemplateId,
    /// SHA-256 of the template's image: what it is, whatever its name is here.
    template_digest: String,
    isolation: Isolation,
    runtime: String,
    cpu_features: Vec<String>,
    spec: SandboxSpec,
}

const VERSION: u32 = 1;

impl Sandboxes {
    /// The snapshot as one file.
    pub async fn export_snapshot(&self, caller: &Caller, which: &str) -> Result<ByteStream, Fault> {
        let row = self.snapshot_row(caller.project(), which).await?;
        let template = self.template_of(&row.template)?;
        let header = Header {
            version: VERSION,
            kind: row.kind,
            name: row.name,
            template: row.template,
            template_digest: template.digest,
            isolation: row.isolation,
            runtime: row.runtime,
            cpu_features: row.cpu_features,
            spec: row.spec,
        };
        let header = serde_json::to_vec(&header)
            .map_err(|e| Fault::internal(format!("a snapshot's description has no JSON form: {e}")))?;
        let slot = self.transfer(caller.project())?;
        Ok(holding(slot, self.node().export_saved(&row.id, header).await?))
    }

    /// Takes in what `export_snapshot` made, here or elsewhere.
    pub async fn import_snapshot(
        &self,
        caller: &Caller,
        name: Option<String>,
        file: impl Read + Send + 'static,
    ) -> Result<Snapshot, Fault> {
        if let Some(name) = &name {
            check_name(name)?;
        }
        self.check_storage(caller.project()).await?;
        let id: SnapshotId = entropy::id();
        let _unfinished = Unfinished::new(self, &id);
        let most = self.settings().max_artifact_bytes;
        let imported = self
            .node()
            .import_saved(Box::new(file), &id, caller.project(), most);
        let (header, saved) = imported.await?;
        let row = self.describe_import(caller, &id, name, &header, &saved);
        match row {
            Ok(row) => self.commit_snapshot(row).await,
            Err(fault) => {
                let _ = self.node().forget(&id).await;
                self.inner.garbage.notify_one();
                Err(fault)
            }
        }
    }

    /// The row of imported bytes, if this machine can do anything with them.
    fn describe_import(
        &self,
        caller: &Caller,
        id: &SnapshotId,
        name: Option<String>,
        header: &[u8],
        saved: &SavedBytes,
    ) -> Result<SnapshotRow, Fault> {
        let unreadable = |why: String| {
            Fault::new(
                Code::SnapshotFileInvalid,
                format!("this is not a snapshot of ours: {why}"),
            )
        };
        let header: Header = serde_json::from_slice(header).map_err(|e| unreadable(e.to_string()))?;
        if header.version != VERSION {
            return Err(unreadable(format!(
                "it has version {}, this server knows {VERSION}",
                header.version
            )));
        }
        let template = self
            .template_with_digest(caller.project(), &header.template, &header.template_digest)?
            .ok_or_else(|| {
                Fault::new(
                    Code::SnapshotNeedsTemplate,
                    format!(
                        "it builds on template {} (sha256 {}), which is not here",
                        header.template, header.template_digest
                    ),
                )
                .hint("build or copy that template first; its digest must be the same")
            })?;
        if header.kind == SaveKind::Memory && !header.spec.volumes.is_empty() {
            return Err(Fault::new(
                Code::SnapshotNeedsVolumes,
                "its memory was saved with volumes, which do not travel with it",
            )
            .hint("export a snapshot of its files (`--filesystem`) and the volumes instead"));
        }
        // What it was asked to be is admitted like a request of today, so that no file can ask for more.
        let admitted = atoll_lifecycle::admit(header.spec, &self.settings().limits, &self.tiers())?;
        // Nor for less: a sandbox made of it would stand behind the wall that the file names.
        if header.isolation < admitted.isolation {
            return Err(Fault::new(
                Code::SnapshotTierTooWeak,
                format!(
                    "it was saved on the {} tier, and this server gives sandboxes {}",
                    header.isolation, admitted.isolation
                ),
            )
            .hint("export a snapshot of a sandbox on that tier"));
        }
        let name = name.or(header.name);
        if let Some(name) = &name {
            check_name(name)?;
        }
        let row = SnapshotRow {
            id: id.clone(),
            project: caller.project().clone(),
            owner: SnapshotOwner::User,
            name,
            kind: header.kind,
            sandbox: None,
            parent: None,
            template,
            isolation: header.isolation,
            runtime: header.runtime,
            cpu_features: header.cpu_features,
            spec: SandboxSpec {
                // Volumes stay behind.
                volumes: Vec::new(),
                // Who wrote the file does not say what may leave this machine, or with which of its secrets.
                network: None,
                secrets: Vec::new(),
                lineage: None,
                name: None,
                owner: None,
                ..admitted.spec
            },
            total_bytes: saved.total_bytes,
            stored_bytes: saved.stored_bytes,
            created_at: self.now(),
        };
        self.check_fits(&row)?;
        Ok(row)
    }
}
