//! Starting an instance from what [`super::save`] wrote.
//!
//! ```text
//!   memory:      boot ── a sentry waits ───────────┐
//!                parts are being put together ────┴── Restore ──> Welcome
//!                Hello{restored}, at once; waits in the FIFO ──────^
//!   filesystem:  an ordinary boot; the agent unpacks it before anything else
//! ```
//! A filesystem comes back with times to the second, and without sockets and attributes (`xattr`).
//!
//! What must hold:
//! - What is restored was made by a guest or came from elsewhere. It is read by the sentry, behind all its walls, never by
//!   this server.
//! - The instance gets its own user ids, limits and FIFOs, not those of the one that was saved; `runsc` is told not to
//!   insist (`--restore-spec-validation=ignore`). Sizes of filesystems stay what they were.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use atoll_guest_protocol::{CommandState, Exec, Message, Request};
use atoll_types::{InstanceId, SaveKind};
use bytes::Bytes;
use tokio::io::AsyncReadExt;

use super::control::Control;
use super::launch::{self, Starting};
use super::network::Wire;
use super::save::{MEMORY, PAGES, blocking};
use super::{Gvisor, bundle};
use crate::cause::Doing;
use crate::channel::{Guest, Incoming};
use crate::{Cause, InstanceSpec, Kind, LAYER, Restore, SaveSource, Told};

/// How long the sentry or the agent may take to read gigabytes.
pub(super) const READING: Duration = Duration::from_secs(600);
/// How much of a layer is sent at a time.
const PIECE: usize = 256 * 1024;
/// What of the agent's complaint is passed on.
const LONGEST_COMPLAINT: usize = 2000;

/// How a sentry comes up.
#[derive(Debug, Clone, Copy)]
pub(super) enum Boot {
    /// With the agent started by it.
    Fresh,
    /// It waits for a memory image.
    Blank,
}

impl Gvisor {
    /// What to start for this specification.
    pub(super) fn prepare(spec: &InstanceSpec) -> Result<Boot, Cause> {
        match &spec.restore {
            None => Ok(Boot::Fresh),
            Some(Restore {
                kind: SaveKind::Memory,
                source,
            }) => require(source, &MEMORY).map(|()| Boot::Blank),
            Some(Restore {
                kind: SaveKind::Filesystem,
                source,
            }) => require(source, &[LAYER]).map(|()| Boot::Fresh),
        }
    }
}

/// Says before anything is started that a save is of another sort.
fn require(source: &Arc<dyn SaveSource>, names: &[&str]) -> Result<(), Cause> {
    let has = source.names();
    match names.iter().all(|name| has.iter().any(|has| has == name)) {
        true => Ok(()),
        false => Err(Cause::new(
            Kind::Saved,
            format!(
                "the saved state consists of {}; needed are {} (was it saved by another tier?)",
                has.join(", "),
                names.join(", ")
            ),
        )),
    }
}

async fn parts(source: &Arc<dyn SaveSource>, names: &[&str]) -> Result<Vec<File>, Cause> {
    let mut files = Vec::with_capacity(names.len());
    for name in names {
        // Where in its pages something is, the sentry knows from their metadata.
        let file = match *name {
            PAGES => source.at_least(name).await,
            _ => source.file(name).await,
        };
        files.push(file.doing(|| format!("reading the saved {name}"))?);
    }
    Ok(files)
}

/// Fills a sentry that waits, once both it and the image are there.
pub(super) async fn fill(
    dir: &Path,
    id: &InstanceId,
    starting: &mut Starting,
    wire: &Arc<Wire>,
    source: &Arc<dyn SaveSource>,
) -> Result<(), Cause> {
    let began = Instant::now();
    let created = async {
        starting.up(dir, id).await?;
        tracing::debug!(instance = %id, after = ?began.elapsed(), "a sentry waits for its image");
        Ok::<_, Cause>(())
    };
    let read = async {
        let files = parts(source, &MEMORY).await?;
        tracing::debug!(instance = %id, after = ?began.elapsed(), "the image is there");
        Ok(files)
    };
    let ((), files) = tokio::try_join!(created, read)?;
    let (at, id, wire) = (dir.to_owned(), id.clone(), Arc::clone(wire));
    let filled = blocking(move || {
        let [state, meta, pages] = [0, 1, 2].map(|part: usize| files[part].as_fd());
        Control::connect(&at, &id)?.restore(&wire, &[state, meta, pages], READING)
    });
    let filled = filled.await;
    tracing::debug!(after = ?began.elapsed(), "filled");
    filled.map_err(|cause| cause.with("; ", launch::complaint(dir)))
}

/// Lets the agent unpack a saved layer over its root.
pub async fn apply(guest: &Guest, source: &Arc<dyn SaveSource>) -> Result<(), Cause> {
    let reading = || format!("reading the saved {LAYER}");
    let mut layer = tokio::fs::File::from_std(source.file(LAYER).await.doing(reading)?);
    layer.set_max_buf_size(PIECE);
    let exec = Exec {
        command: "apply-layer".into(),
        argv: vec![bundle::AGENT.into(), "apply-layer".into()],
        env: Vec::new(),
        cwd: None,
        user: Some("0".into()),
        pty: None,
        stdin: true,
        timeout_millis: None,
        log_bytes: 4096,
        wait_for_reader: true,
        // Also: forgotten afterwards.
        kill_on_close: true,
    };
    let stream = guest.open(&Request::Exec(exec)).await?;
    let (mut into, mut from) = stream.split();
    let feed = async {
        let mut piece = vec![0; PIECE];
        loop {
            let count = layer.read(&mut piece).await.doing(reading)?;
            let sent = match count {
                0 => into.send_end().await,
                _ => into.send_data(Bytes::copy_from_slice(&piece[..count])).await,
            };
            // If it does not take more, it says why at the other end.
            if count == 0 || sent.is_err() {
                return Ok(());
            }
        }
    };
    let listen = async {
        let mut said = Vec::new();
        while let Some(incoming) = from.next().await {
            match incoming? {
                Incoming::Data { bytes, .. } if said.len() < LONGEST_COMPLAINT => {
                    said.extend_from_slice(&bytes);
                }
                Incoming::Message(Message::Exited(CommandState::Exited { code: 0 })) => return Ok(()),
                Incoming::Message(Message::Exited(state)) => {
                    let said = String::from_utf8_lossy(&said);
                    // If it has found a disk full, then that of its instance.
                    let said = format!("{} ({state:?})", said.trim());
                    return Err(Told::by(Kind::Agent, &said).into());
                }
                Incoming::Data { .. } | Incoming::Message(_) => {}
            }
        }
        let why = "the agent did not say whether the saved layer was unpacked";
        Err(Cause::new(Kind::Agent, why))
    };
    let applied = tokio::time::timeout(READING, async { tokio::try_join!(feed, listen) });
    applied
        .await
        .map_err(|_| Cause::new(Kind::TimedOut, "unpacking the saved layer takes too long"))?
        .map(drop)
}
