//! Saving a jail: its files, never its memory.
//!
//! ```text
//!   freeze the cgroup ──> atoll-jailer save-layer ── stdout ──> sink, stream "layer" ──> (thaw | destroy)
//! ```
//! What is kept is what was written to the root filesystem, `/tmp` included. What is not: processes, `/dev/shm`, and what
//! lies in volumes, which outlives the jail anyway. How the layer is found and written is told in `atoll_jailer::layer`.
//!
//! What must hold:
//! - From before the first byte is read until thaw or destroy, nothing in the jail runs.
//! - The layer is that of this very jail: its namespace is opened while its process is known to be the one recorded.

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;

use atoll_jailer::layer::{FULL, Order};
use atoll_jailer::spec::Ids;
use atoll_types::InstanceId;

use super::{Jail, blocking, gone};
use crate::cause::Doing;
use crate::{Cause, Error, Kind, LAYER, SaveKind, SaveSink, Told};

impl Jail {
    pub(super) async fn save_layer(
        &self,
        id: &InstanceId,
        kind: SaveKind,
        sink: Arc<dyn SaveSink>,
    ) -> Result<(), Error> {
        let fail = |source| Error::Save {
            id: id.clone(),
            source,
        };
        let record = self.record(id)?;
        if kind == SaveKind::Memory {
            let why =
                "a jail's memory cannot be saved, only its filesystem; ask for `filesystem`, or use gvisor";
            return Err(fail(Cause::new(Kind::Unsupported, why)));
        }
        let process = record
            .process
            .ok_or_else(|| fail(Cause::new(Kind::State, "it has not started yet")))?;
        let group = self.group(id).map_err(|error| fail(error.into()))?;
        group.freeze().await.map_err(|error| fail(error.into()))?;
        let saved = async {
            // Before the check that the process is still the one: then the pid cannot have passed to another.
            let namespace =
                std::fs::File::open(format!("/proc/{}/ns/mnt", process.pid)).doing(|| "its mount namespace");
            process.open().ok_or_else(gone)?;
            let namespace = namespace?;
            let order = Order {
                namespace: format!("/proc/{}/fd/{}", std::process::id(), namespace.as_raw_fd()).into(),
                ids: record.id_base.map_or(Ids::Own, |base| Ids::Range { base }),
            };
            // It may have to wait for a disk.
            let stream = blocking(move || sink.stream(LAYER))
                .await
                .doing(|| "there is no place for it")?;
            run(&self.config.jailer_binary, &order, stream, id).await
        };
        match saved.await {
            Ok(()) => Ok(()),
            Err(cause) => {
                if let Err(error) = group.thaw() {
                    tracing::error!(%error, instance = %id, "a jail that could not be saved stands still");
                }
                Err(fail(cause))
            }
        }
    }

    pub(super) fn let_go_on(&self, id: &InstanceId) -> Result<(), Error> {
        self.record(id)?;
        self.group(id)
            .and_then(|group| group.thaw())
            .map_err(|error| Error::io(format!("letting {id} go on"), error))
    }
}

async fn run(jailer: &Path, order: &Order, stream: OwnedFd, id: &InstanceId) -> Result<(), Cause> {
    let running = || format!("{} could not be run", jailer.display());
    // Not `output`, which would put a pipe of its own in place of the stream. The command goes before the wait: it holds
    // the stream open.
    let child = tokio::process::Command::new(jailer)
        .args(order.to_args())
        .env_clear()
        .stdin(Stdio::null())
        .stdout(Stdio::from(stream))
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .doing(running)?;
    let output = child.wait_with_output().await.doing(running)?;
    let said = String::from_utf8_lossy(&output.stderr);
    let said = said.trim_end();
    if !output.status.success() {
        let kind = match output.status.code() {
            Some(code) if code == i32::from(FULL) => Kind::HostFull,
            _ => Kind::Program,
        };
        let why = match said {
            "" => format!("the helper ended with {}", output.status),
            _ => said.to_owned(),
        };
        return Err(Told::by(kind, &why).into());
    }
    tracing::debug!(instance = %id, layer = said, "saved");
    Ok(())
}
