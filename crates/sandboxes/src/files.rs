//! Files in a sandbox. All paths are resolved by the guest, inside; nothing here touches the host's filesystem.

use std::sync::Arc;

use atoll_guest_protocol::{Attributes, FileEntry, FileStat, Message, Request, WatchEvent, WriteFile};
use atoll_node::{Incoming, Stream};
use atoll_types::{Code, Fault, SandboxId};
use futures_util::StreamExt as _;

use crate::cell::{Cell, InUse};
use crate::faults::{ANSWER_WITHIN, from_channel, unexpected, unreachable_guest};
use crate::{ByteStream, Caller, FileChange, FileContent, FilePath, Pay, Sandboxes, WriteSpec};

/// The most entries that one listing returns; more is a reason to list less deeply.
const MAX_ENTRIES: usize = 200_000;
/// The most that their paths and names may take: entries are counted and weighed, for a guest that lies makes them large.
const MAX_LISTED: usize = 64 << 20;
/// More than so many are not put in order in passing.
const MANY: usize = 10_000;
/// The longest name in an event of a watch; there are none longer.
const MAX_NAME: usize = 4096;

impl Sandboxes {
    /// A file's metadata and its bytes from `offset`.
    pub async fn read_file(
        &self,
        caller: &Caller,
        id: &SandboxId,
        at: FilePath,
        offset: u64,
        length: Option<u64>,
    ) -> Result<FileContent, Fault> {
        let mut open = self
            .open(
                caller,
                id,
                &Request::ReadFile {
                    path: at.path,
                    user: at.user,
                    offset,
                    length,
                },
            )
            .await?;
        match open.message_soon().await? {
            Some(Message::Stat(stat)) => Ok(FileContent {
                stat,
                body: open.into_bytes(),
            }),
            _ => Err(unexpected()),
        }
    }

    /// Streams `body` into a file. On any error the file is as it was before (`Append` excepted).
    pub async fn write_file(
        &self,
        caller: &Caller,
        id: &SandboxId,
        spec: WriteSpec,
        body: ByteStream,
    ) -> Result<FileStat, Fault> {
        let request = Request::WriteFile(WriteFile {
            path: spec.at.path,
            user: spec.at.user,
            mode: spec.mode,
            write: spec.write,
            parents: spec.parents,
        });
        let mut open = self.open(caller, id, &request).await?;
        open.send_all(body).await?;
        match open.message().await? {
            Some(Message::Stat(stat)) => Ok(stat),
            _ => Err(unexpected()),
        }
    }

    /// Does not follow a final symlink.
    pub async fn stat(&self, caller: &Caller, id: &SandboxId, at: FilePath) -> Result<FileStat, Fault> {
        let mut open = self
            .open(
                caller,
                id,
                &Request::Stat {
                    path: at.path,
                    user: at.user,
                },
            )
            .await?;
        match open.message_soon().await? {
            Some(Message::Stat(stat)) => Ok(stat),
            _ => Err(unexpected()),
        }
    }

    /// What is below a directory, sorted by path; `depth` 1 is the directory itself. What is gathered is paid for with `pay`
    /// before it is kept: guests answer slowly, and many may be asked at once.
    pub async fn list_files(
        &self,
        caller: &Caller,
        id: &SandboxId,
        at: FilePath,
        depth: u32,
        pay: &mut Pay<'_>,
    ) -> Result<Vec<FileEntry>, Fault> {
        if depth == 0 {
            return Err(Fault::new(Code::DepthInvalid, "depth must be at least 1"));
        }
        let mut open = self
            .open(
                caller,
                id,
                &Request::List {
                    path: at.path,
                    user: at.user,
                    depth,
                },
            )
            .await?;
        let mut entries = Vec::new();
        let mut weight = 0;
        while let Some(message) = open.message_soon().await? {
            let Message::Entries(batch) = message else {
                return Err(unexpected());
            };
            // Nothing in it is nothing to wait for: a guest could go on like that for ever.
            if batch.is_empty() {
                return Err(unexpected());
            }
            let more = batch.iter().map(weigh).sum::<usize>();
            weight += more;
            if entries.len() + batch.len() > MAX_ENTRIES || weight > MAX_LISTED {
                return Err(Fault::new(
                    Code::ListingTooLarge,
                    format!(
                        "there are more than {MAX_ENTRIES} entries, or their paths take more than {} MiB",
                        MAX_LISTED >> 20
                    ),
                )
                .hint("list a smaller directory or with less depth, or download it as a tar stream"));
            }
            // The list grows by doubling, so each may take the place of two.
            pay((more + batch.len() * size_of::<FileEntry>()) as u64)?;
            entries.extend(batch);
        }
        if entries.len() < MANY {
            return Ok(in_order(entries));
        }
        let sorting = crate::blocking::run(move || in_order(entries));
        sorting
            .await
            .map_err(|_| Fault::internal("the listing could not be put in order"))
    }

    /// For `MakeDir`, whether it was new; otherwise true.
    pub async fn change_file(
        &self,
        caller: &Caller,
        id: &SandboxId,
        at: FilePath,
        change: FileChange,
    ) -> Result<bool, Fault> {
        let FilePath { path, user } = at;
        let request = match change {
            FileChange::MakeDir { mode } => Request::MakeDir { path, user, mode },
            FileChange::RenameTo { to } => Request::Rename { from: path, to, user },
            FileChange::Remove { recursive } => Request::Remove {
                path,
                user,
                recursive,
            },
            FileChange::SetMode { mode } => Request::SetMode { path, user, mode },
            FileChange::SetOwner { owner } => Request::SetOwner { path, user, owner },
            FileChange::SetAttributes { prefix, attributes } => Request::SetAttributes {
                path,
                user,
                prefix,
                attributes,
            },
            FileChange::Symlink { target } => Request::Symlink { path, target, user },
        };
        let mut open = self.open(caller, id, &request).await?;
        match open.message().await? {
            Some(Message::Created(new)) => Ok(new),
            None => Ok(true),
            Some(_) => Err(unexpected()),
        }
    }

    /// The extended attributes of files, those whose name begins with `prefix`, without it: one entry for each path.
    pub async fn attributes(
        &self,
        caller: &Caller,
        id: &SandboxId,
        paths: Vec<Vec<u8>>,
        user: Option<String>,
        prefix: &str,
    ) -> Result<Vec<Attributes>, Fault> {
        let asked = paths.len();
        let request = Request::Attributes {
            paths,
            user,
            prefix: prefix.to_owned(),
        };
        let mut open = self.open(caller, id, &request).await?;
        match open.message_soon().await? {
            Some(Message::Attributes(all)) if all.len() == asked => Ok(all),
            _ => Err(unexpected()),
        }
    }

    /// Changes below a path, from the moment that this returns.
    pub async fn watch(
        &self,
        caller: &Caller,
        id: &SandboxId,
        at: FilePath,
        recursive: bool,
    ) -> Result<Watch, Fault> {
        let mut open = self
            .open(
                caller,
                id,
                &Request::Watch {
                    path: at.path,
                    user: at.user,
                    recursive,
                },
            )
            .await?;
        match open.message_soon().await? {
            Some(Message::Watching) => Ok(Watch { open }),
            _ => Err(unexpected()),
        }
    }

    /// A file or directory as a tar stream.
    pub async fn tar_out(&self, caller: &Caller, id: &SandboxId, at: FilePath) -> Result<ByteStream, Fault> {
        let open = self
            .open(
                caller,
                id,
                &Request::TarOut {
                    path: at.path,
                    user: at.user,
                    one_file_system: false,
                },
            )
            .await?;
        // A path that is missing or closed must be an error of this call, not of a body that is half sent.
        let mut pieces = open.into_bytes();
        let first = tokio::time::timeout(ANSWER_WITHIN, pieces.next());
        let first = first.await.map_err(|_| unreachable_guest())?.transpose()?;
        let first = futures_util::stream::iter(first.map(Ok));
        Ok(Box::pin(first.chain(pieces)))
    }

    /// Unpacks a tar stream below a directory.
    pub async fn tar_in(
        &self,
        caller: &Caller,
        id: &SandboxId,
        at: FilePath,
        body: ByteStream,
    ) -> Result<(), Fault> {
        let mut open = self
            .open(
                caller,
                id,
                &Request::TarIn {
                    path: at.path,
                    user: at.user,
                },
            )
            .await?;
        open.send_all(body).await?;
        match open.message().await? {
            None => Ok(()),
            Some(_) => Err(unexpected()),
        }
    }

    async fn open(&self, caller: &Caller, id: &SandboxId, request: &Request) -> Result<Open, Fault> {
        let (cell, guest, in_use) = self.enter(caller, id).await?;
        match guest.open(request).await {
            Ok(stream) => Ok(Open {
                cell,
                stream,
                _in_use: in_use,
            }),
            Err(error) => Err(from_channel(&cell, error).await),
        }
    }
}

fn in_order(mut entries: Vec<FileEntry>) -> Vec<FileEntry> {
    entries.sort_by(|a, b| a.stat.path.cmp(&b.stat.path));
    entries
}

/// What an entry takes in memory, nearly.
fn weigh(entry: &FileEntry) -> usize {
    let stat = &entry.stat;
    let names = [&stat.owner, &stat.group].map(|name| name.as_ref().map_or(0, String::len));
    stat.path.len() + stat.target.as_ref().map_or(0, Vec::len) + names[0] + names[1] + size_of::<FileEntry>()
}

/// An operation under way in a guest.
#[derive(Debug)]
struct Open {
    cell: Arc<Cell>,
    stream: Stream,
    _in_use: InUse,
}

impl Open {
    /// As `message`, for what a working agent answers at once.
    async fn message_soon(&mut self) -> Result<Option<Message>, Fault> {
        tokio::time::timeout(ANSWER_WITHIN, self.message())
            .await
            .map_err(|_| unreachable_guest())?
    }

    /// The next message; `None` when the operation ended well.
    async fn message(&mut self) -> Result<Option<Message>, Fault> {
        match self.stream.next().await {
            None => Ok(None),
            Some(Ok(Incoming::Message(message))) => Ok(Some(message)),
            Some(Ok(Incoming::Data { .. })) => Err(unexpected()),
            Some(Err(error)) => Err(from_channel(&self.cell, error).await),
        }
    }

    async fn send_all(&mut self, mut body: ByteStream) -> Result<(), Fault> {
        while let Some(bytes) = body.next().await {
            let sent = self.stream.send_data(bytes?).await;
            if let Err(error) = sent {
                return Err(from_channel(&self.cell, error).await);
            }
        }
        match self.stream.send_end().await {
            Ok(()) => Ok(()),
            Err(error) => Err(from_channel(&self.cell, error).await),
        }
    }

    /// The rest of the stream as bytes.
    fn into_bytes(mut self) -> ByteStream {
        self.stream.widen();
        Box::pin(futures_util::stream::unfold(Some(self), |open| async move {
            let mut open = open?;
            match open.stream.next().await {
                Some(Ok(Incoming::Data { bytes, .. })) => Some((Ok(bytes), Some(open))),
                Some(Ok(Incoming::Message(_))) => Some((Err(unexpected()), None)),
                Some(Err(error)) => Some((Err(from_channel(&open.cell, error).await), None)),
                None => None,
            }
        }))
    }
}

/// Changes as they happen.
#[derive(Debug)]
pub struct Watch {
    open: Open,
}

impl Watch {
    /// Cancel-safe.
    pub async fn next(&mut self) -> Option<Result<Vec<WatchEvent>, Fault>> {
        match self.open.message().await {
            Ok(Some(Message::Changed(events))) => {
                if events.iter().any(|event| event.name.len() > MAX_NAME) {
                    return Some(Err(unexpected()));
                }
                Some(Ok(events))
            }
            Ok(Some(_)) => Some(Err(unexpected())),
            Ok(None) => None,
            Err(fault) => Some(Err(fault)),
        }
    }
}
