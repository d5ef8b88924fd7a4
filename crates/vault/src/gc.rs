//! Giving back the space of what nobody refers to any more.
//!
//! ```text
//!   manifests ──live?──┬─ no ──> removed
//!                      └─ yes ─> what they refer to ┐
//!   running saves, open readers, commits since ─────┴──> marks per pack:   ████ ████████      ██
//!                                                         no mark at all: pack removed
//!                                                         else: holes for what lies between
//! ```
//! Marks are worked out anew each time, so nothing can be wrong after a crash; a collection that is cut short at any point has
//! only removed what nobody could reach. The order matters: first the manifests go, durably; then, in one critical section, what
//! is not marked is withdrawn from the index; only then are holes punched.
//!
//! A pack may be lent to another program, which reads from it after we have forgotten why ([`crate::Opened::lend`]), even after
//! a crash of ours. It may lose its name, but not be punched while anybody else has it open.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::{self, OpenOptions};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::disk::{allocated, data_between, punch, remove, sync_dir};
use crate::error::{Error, IoContext, Result};
use crate::lease::somebody_has;
use crate::manifest::Manifest;
use crate::pack::{PackId, Place, stored_len};
use crate::state::State;
use crate::{Shared, Vault};

/// What a collection did or, in a dry run, would do.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GcReport {
    /// Ids of the saves that went because they were not live.
    pub saves: Vec<String>,
    pub packs: u64,
    pub holes: u64,
    /// Space that was given back, in allocated blocks.
    pub bytes: u64,
    /// Garbage that stays because the filesystem cannot punch holes, or because somebody reads from the pack that it is in.
    pub kept_bytes: u64,
    /// Saves that are to stay but whose manifests cannot be read. Nobody knows what they refer to, so packs were left
    /// alone; delete them, or bring their manifests back.
    pub blocked_by: Vec<String>,
}

/// What is referred to: by pack, where each chunk begins and ends.
#[derive(Default)]
struct Marks(HashMap<PackId, BTreeMap<u64, u64>>);

impl Marks {
    fn manifest(&mut self, manifest: &Manifest) {
        for chunk in manifest.chunks() {
            let (start, end) = manifest.extent(chunk);
            self.0.entry(chunk.place.pack).or_default().insert(start, end);
        }
    }

    fn place(&mut self, place: &Place, sealed: bool) {
        let end = place.offset + stored_len(place.len, sealed);
        self.0.entry(place.pack).or_default().insert(place.offset, end);
    }

    fn has(&self, place: &Place) -> bool {
        self.0
            .get(&place.pack)
            .is_some_and(|chunks| chunks.contains_key(&place.offset))
    }
}

/// Lets commits be noted for as long as it lives.
struct Watch<'s>(&'s Shared);

impl<'s> Watch<'s> {
    fn start(shared: &'s Shared) -> Self {
        shared.state.lock().collect();
        Self(shared)
    }
}

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        self.0.state.lock().collected();
    }
}

impl Vault {
    /// Removes saves of which `live` says no, and gives back the space of whatever nothing refers to. Saves, reads and
    /// deletes may go on meanwhile. `live` has to look when it is asked, not before: a save whose [`crate::Saved`] still
    /// exists is not asked about.
    pub fn gc(&self, live: &dyn Fn(&str) -> bool, dry_run: bool) -> Result<GcReport> {
        let shared = &*self.shared;
        let _one = shared.collecting.lock();
        let _watch = Watch::start(shared);
        let mut report = GcReport::default();
        let kept = shared.remove_saves(live, dry_run, &mut report)?;

        let mut marks = Marks::default();
        shared.each_manifest(&kept, &mut |id, manifest| match manifest {
            Ok(manifest) => marks.manifest(&manifest),
            // Deleted since it was listed.
            Err(Error::NotFound { .. }) => {}
            Err(error) => {
                tracing::warn!(id, %error, "nothing can be collected while saved state cannot be read");
                report.blocked_by.push(id.to_owned());
            }
        });
        let mut state = shared.state.lock();
        for id in &kept {
            state.note_damaged(id, report.blocked_by.contains(id));
        }
        if !report.blocked_by.is_empty() {
            report.blocked_by.sort_unstable();
            return Ok(report);
        }
        // Listed while no commit can end: what is not here yet belongs to a save that is still running, or is still to come.
        let packs = shared.disk.packs()?;
        let busy = shared.mark_in_use(&state, &mut marks);
        if !dry_run {
            state.withdraw(|place| marks.has(place), |pack| !marks.0.contains_key(pack));
        }
        drop(state);

        for (tag, pack) in packs {
            if busy.contains(&pack) {
                continue;
            }
            let path = shared.disk.pack(tag, pack);
            if let Some(chunks) = marks.0.get(&pack) {
                punch_between(&path, chunks, dry_run, &mut report)?;
            } else {
                report.bytes += allocated(&path)?;
                report.packs += 1;
                if !dry_run {
                    remove(&path)?;
                }
            }
        }
        Ok(report)
    }
}

impl Shared {
    /// Removes the manifests that are not live and says which stay.
    fn remove_saves(
        &self,
        live: &dyn Fn(&str) -> bool,
        dry_run: bool,
        report: &mut GcReport,
    ) -> Result<Vec<String>> {
        let mut kept = Vec::new();
        for id in self.disk.ids()? {
            // In this order: once it is not held any more, `live` knows it.
            let held = self.state.lock().is_held(&id);
            if held || live(&id) {
                kept.push(id);
                continue;
            }
            let path = self.disk.manifest(&id);
            report.bytes += allocated(&path)?;
            if !dry_run {
                remove(&path)?;
                self.state.lock().note_damaged(&id, false);
            }
            report.saves.push(id);
        }
        if !dry_run && !report.saves.is_empty() {
            // A manifest that came back after a power failure must not find its chunks punched.
            sync_dir(&self.disk.manifests_dir())?;
        }
        Ok(kept)
    }

    /// Marks what is in use beyond the manifests that were read, and says which packs are still being made.
    fn mark_in_use(&self, state: &State, marks: &mut Marks) -> HashSet<PackId> {
        let (manifests, running) = state.in_use();
        for manifest in manifests {
            marks.manifest(&manifest);
        }
        let mut busy = HashSet::new();
        for save in running {
            busy.insert(save.pack);
            for place in &save.pins {
                marks.place(place, self.secrets.encrypts());
            }
        }
        busy
    }
}

pub(crate) fn block_size(data: &fs::Metadata) -> u64 {
    data.blksize().max(512)
}

/// What lies between chunks in a file of this length, as far as there are whole blocks in it.
pub(crate) fn gaps(chunks: &BTreeMap<u64, u64>, len: u64, block: u64) -> Vec<(u64, u64)> {
    let end = len.next_multiple_of(block);
    let mut gaps = Vec::new();
    let mut at = 0;
    for (start, stop) in chunks
        .iter()
        .map(|(start, stop)| (*start, *stop))
        .chain([(end, end)])
    {
        if start > at {
            gaps.push((at, start));
        }
        at = at.max(stop);
    }
    gaps.retain(|(from, to)| from.next_multiple_of(block) < to / block * block);
    gaps
}

/// Punches what lies between the chunks that stay. Only whole blocks count as garbage; what is smaller cannot be given back.
fn punch_between(
    path: &Path,
    chunks: &BTreeMap<u64, u64>,
    dry_run: bool,
    report: &mut GcReport,
) -> Result<()> {
    let data = match fs::metadata(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        other => other.doing("look at", path)?,
    };
    let block = block_size(&data);
    let gaps = gaps(chunks, data.len(), block);
    if gaps.is_empty() {
        return Ok(());
    }
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .doing("open", path)?;
    let lent = somebody_has(&file);
    for (from, to) in gaps {
        let garbage = data_between(&file, from.next_multiple_of(block), to / block * block);
        if garbage == 0 {
            continue;
        }
        if lent {
            report.kept_bytes += garbage;
            continue;
        }
        if !dry_run {
            match punch(&file, from, to, path) {
                Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::Unsupported => {
                    report.kept_bytes += garbage;
                    continue;
                }
                other => other?,
            }
        }
        report.holes += 1;
        report.bytes += garbage;
    }
    Ok(())
}
