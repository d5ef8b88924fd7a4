//! Artifacts: what is kept, by name, after its sandbox is gone.
//!
//! Content lies in `<data>/artifacts/<digest>`, once per digest. What must hold: a row never names content that is not
//! there. So content is written, synced and renamed before its row is committed, rows are deleted before content, and
//! both happen under one lock, so that a save cannot rely on content that a delete is about to remove.

use std::path::PathBuf;

use atoll_guest_protocol::EntryKind;
use atoll_store::{ArtifactKind, ArtifactRow, Fact, NewFact};
use atoll_types::{ArtifactId, Code, Fault, SandboxId};
use futures_util::StreamExt as _;
use sha2::{Digest as _, Sha256};
use tokio::io::AsyncWriteExt as _;

use crate::faults::from_store;
use crate::{Artifact, ByteStream, Caller, Page, Sandboxes, SaveArtifact, UploadRoom, entropy};

impl Sandboxes {
    /// Keeps a file, or a directory as a tar stream, under a name. An older artifact of that name stays, by its id.
    pub async fn save_artifact(
        &self,
        caller: &Caller,
        id: &SandboxId,
        request: SaveArtifact,
    ) -> Result<Artifact, Fault> {
        check_name(&request.name)?;
        // Until its row is there, which counts from then on.
        let room = self.upload_room(caller.project()).await?;
        let retention = request
            .retention_millis
            .or(self.settings().artifact_retention_millis);
        let stat = self.stat(caller, id, request.at.clone()).await?;
        let (kind, body) = match stat.kind {
            EntryKind::Directory => (
                ArtifactKind::Directory,
                self.tar_out(caller, id, request.at).await?,
            ),
            EntryKind::File => (
                ArtifactKind::File,
                self.read_file(caller, id, request.at, 0, None).await?.body,
            ),
            EntryKind::Symlink | EntryKind::Other => {
                return Err(Fault::new(
                    Code::NotAFile,
                    "only files and directories can be saved as artifacts",
                ));
            }
        };
        let (temporary, digest, size) = self.receive(body, &room).await?;
        let now = self.now();
        let row = ArtifactRow {
            id: entropy::id(),
            project: caller.project().clone(),
            name: request.name,
            sandbox: Some(id.clone()),
            kind,
            digest: digest.clone(),
            size,
            created_at: now,
            expires_at: retention.map(|millis| now.plus_millis(millis)),
        };
        let _lock = self.artifact_lock().await;
        let kept = self.content_path(&digest);
        tokio::fs::rename(&temporary, &kept)
            .await
            .map_err(|e| disk("keeping the artifact", &e))?;
        sync_directory(self.artifact_dir()).await?;
        let fact = NewFact {
            at: now,
            project: caller.project().clone(),
            sandbox: Some(id.clone()),
            fact: Fact::ArtifactSaved {
                artifact: row.id.clone(),
                name: row.name.clone(),
                digest,
                size,
            },
        };
        self.store()
            .sandboxes
            .insert_artifact(row.clone(), vec![fact])
            .await
            .map_err(|e| from_store(&e))?;
        room.stored();
        Ok(view(row))
    }

    pub async fn artifacts(
        &self,
        caller: &Caller,
        name: Option<&str>,
        cursor: Option<String>,
        limit: usize,
    ) -> Result<Page<Artifact>, Fault> {
        let cursor = crate::parse_cursor(cursor)?;
        self.expire_artifacts().await?;
        let page = self
            .store()
            .sandboxes
            .artifacts(caller.project(), name, cursor, limit)
            .await
            .map_err(|e| from_store(&e))?;
        Ok(Page {
            items: page.items.into_iter().map(view).collect(),
            next: page.next.map(|c| c.to_string()),
        })
    }

    /// By id (`art_…`) or by name (the newest of that name).
    pub async fn artifact(&self, caller: &Caller, which: &str) -> Result<Artifact, Fault> {
        self.find_artifact(caller, which).await.map(view)
    }

    pub async fn read_artifact(&self, caller: &Caller, which: &str) -> Result<(Artifact, ByteStream), Fault> {
        let row = self.find_artifact(caller, which).await?;
        let path = self.content_path(&row.digest);
        let file = tokio::fs::File::open(&path)
            .await
            .map_err(|e| disk("opening the artifact", &e))?;
        let body = tokio_util::io::ReaderStream::with_capacity(file, 256 * 1024)
            .map(|read| read.map_err(|e| disk("reading the artifact", &e)));
        Ok((view(row), Box::pin(body)))
    }

    pub async fn delete_artifact(&self, caller: &Caller, which: &str) -> Result<(), Fault> {
        let row = self.find_artifact(caller, which).await?;
        self.drop_artifact(row, false).await
    }

    /// Removes what has outlived its retention. Called by the housekeeping loop.
    pub(crate) async fn expire_artifacts(&self) -> Result<usize, Fault> {
        let expired = self
            .store()
            .sandboxes
            .expired_artifacts(self.now(), 100)
            .await
            .map_err(|e| from_store(&e))?;
        let count = expired.len();
        for row in expired {
            self.drop_artifact(row, true).await?;
        }
        Ok(count)
    }

    async fn drop_artifact(&self, row: ArtifactRow, expired: bool) -> Result<(), Fault> {
        let _lock = self.artifact_lock().await;
        let fact = NewFact {
            at: self.now(),
            project: row.project.clone(),
            sandbox: row.sandbox.clone(),
            fact: Fact::ArtifactDeleted {
                artifact: row.id.clone(),
                name: row.name.clone(),
                expired,
            },
        };
        self.store()
            .sandboxes
            .delete_artifact(&row.project, &row.id, vec![fact])
            .await
            .map_err(|e| from_store(&e))?;
        if !self
            .store()
            .sandboxes
            .digest_in_use(&row.digest)
            .await
            .map_err(|e| from_store(&e))?
        {
            remove_if_there(self.content_path(&row.digest)).await?;
        }
        Ok(())
    }

    async fn find_artifact(&self, caller: &Caller, which: &str) -> Result<ArtifactRow, Fault> {
        let found = match which.parse::<ArtifactId>() {
            Ok(id) => self.store().sandboxes.artifact(caller.project(), &id).await,
            Err(_) => {
                self.store()
                    .sandboxes
                    .artifact_by_name(caller.project(), which, self.now())
                    .await
            }
        };
        let found = found.map_err(|e| from_store(&e))?;
        found
            .filter(|row| row.expires_at.is_none_or(|at| at > self.now()))
            .ok_or_else(|| {
                Fault::new(
                    Code::ArtifactNotFound,
                    format!("there is no artifact `{}`", which.escape_default()),
                )
                .hint("`atoll artifact list` shows those that exist")
            })
    }

    /// Writes a stream to a temporary file, synced; returns its path, digest and size.
    async fn receive(
        &self,
        mut body: ByteStream,
        room: &UploadRoom,
    ) -> Result<(Temporary, String, u64), Fault> {
        let path = self
            .artifact_dir()
            .join(format!("tmp-{}", entropy::id::<ArtifactId>().bare()));
        let temporary = Temporary(path);
        let mut file = tokio::fs::File::create(&temporary.0)
            .await
            .map_err(|e| disk("writing the artifact", &e))?;
        let mut hasher = Sha256::new();
        let mut size = 0_u64;
        while let Some(bytes) = body.next().await {
            let bytes = bytes?;
            size += bytes.len() as u64;
            if size > self.settings().max_artifact_bytes {
                return Err(Fault::new(
                    Code::ArtifactTooLarge,
                    format!(
                        "artifacts may have at most {}",
                        atoll_types::format_bytes(self.settings().max_artifact_bytes)
                    ),
                ));
            }
            room.take(bytes.len() as u64)?;
            hasher.update(&bytes);
            file.write_all(&bytes)
                .await
                .map_err(|e| disk("writing the artifact", &e))?;
        }
        settle(&mut file)
            .await
            .map_err(|e| disk("writing the artifact", &e))?;
        Ok((temporary, hex::encode(hasher.finalize()), size))
    }

    fn content_path(&self, digest: &str) -> PathBuf {
        self.artifact_dir().join(digest)
    }
}

/// Waits until everything is on the disk. A write is done in the background, and how the last one went is told by `flush` alone:
/// `sync_all` would say that what was written is safe, of however little that is.
async fn settle(file: &mut tokio::fs::File) -> std::io::Result<()> {
    file.flush().await?;
    file.sync_all().await
}

/// A file that is removed unless it was renamed away.
#[derive(Debug)]
struct Temporary(PathBuf);

impl AsRef<std::path::Path> for Temporary {
    fn as_ref(&self) -> &std::path::Path {
        &self.0
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

async fn remove_if_there(path: PathBuf) -> Result<(), Fault> {
    match tokio::fs::remove_file(&path).await {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(disk("removing the artifact", &error))
        }
        _ => Ok(()),
    }
}

async fn sync_directory(path: PathBuf) -> Result<(), Fault> {
    let sync = async { tokio::fs::File::open(path).await?.sync_all().await };
    sync.await.map_err(|e| disk("keeping the artifact", &e))
}

fn disk(what: &str, error: &std::io::Error) -> Fault {
    if error.kind() == std::io::ErrorKind::StorageFull {
        return Fault::new(Code::ServerDiskFull, format!("{what}: the server's disk is full"));
    }
    Fault::internal(format!("{what}: {error}"))
}

fn check_name(name: &str) -> Result<(), Fault> {
    let fine = !name.is_empty()
        && name.len() <= 200
        && name
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
        && !name.starts_with("art_")
        && name != "."
        && name != "..";
    if fine {
        return Ok(());
    }
    Err(Fault::new(
        Code::ArtifactNameInvalid,
        "an artifact's name has 1 to 200 characters of letters, digits, `.`, `_` and `-`, and does not begin with `art_`",
    ))
}

fn view(row: ArtifactRow) -> Artifact {
    Artifact {
        id: row.id,
        name: row.name,
        sandbox: row.sandbox,
        directory: row.kind == ArtifactKind::Directory,
        digest: row.digest,
        size_bytes: row.size,
        created_at: row.created_at,
        expires_at: row.expires_at,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_disk_that_is_full_at_the_last_write_is_told() {
        let full = tokio::fs::OpenOptions::new().write(true).open("/dev/full").await;
        let mut full = full.unwrap();
        full.write_all(b"all of it").await.unwrap();
        let told = settle(&mut full).await.unwrap_err();
        assert_eq!(told.kind(), std::io::ErrorKind::StorageFull);
    }
}
