//! What a runtime knows about an instance on disk: `<state>/instances/<id>/`, shared by all tiers.
//!
//! ```text
//!   <state>/instances/
//!     .new-<id>/           being made; never holds a process
//!     <id>/instance.json   the record, replaced as a whole
//!     <id>/in, out         the channel's FIFOs
//!     <id>/...             whatever the tier needs
//! ```
//! What must hold: a directory appears under its id with its record in it, before the first process starts, and is the
//! last thing to go. So whatever a crash leaves behind is found by listing directories.

use std::fs;
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use atoll_types::{InstanceId, Isolation, Resources};
use serde::{Deserialize, Serialize};

use crate::process::Process;

const NEW: &str = ".new-";
const RECORD: &str = "instance.json";
const MAKING_TAKES_LESS_THAN: Duration = Duration::from_secs(60);

/// The content of `instance.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) id: InstanceId,
    pub(crate) isolation: Isolation,
    pub(crate) image: PathBuf,
    pub(crate) hostname: String,
    pub(crate) resources: Resources,
    /// First of the 65536 ids of the host that belong to it, where the tier gives it a range.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) id_base: Option<u32>,
    /// The process whose end is the instance's end; absent until it is known to run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) process: Option<Process>,
}

/// All instances of one server.
#[derive(Debug, Clone)]
pub(crate) struct InstanceDirs {
    root: PathBuf,
}

impl InstanceDirs {
    /// Also removes what a crash left half-named a while ago.
    pub(crate) fn open(state_dir: &Path) -> io::Result<Self> {
        let dirs = Self {
            root: state_dir.join("instances"),
        };
        fs::create_dir_all(&dirs.root)?;
        dirs.sweep()?;
        Ok(dirs)
    }

    pub(crate) fn dir(&self, id: &InstanceId) -> PathBuf {
        self.root.join(id.as_str())
    }

    /// Makes the directory with its record; `furnish` adds what has to be there from the start. Fails if it exists. On
    /// error nothing is left.
    pub(crate) fn create(
        &self,
        record: &Record,
        furnish: impl FnOnce(&Path) -> io::Result<()>,
    ) -> io::Result<PathBuf> {
        let (new, dir) = (
            self.root.join(format!("{NEW}{}", record.id)),
            self.dir(&record.id),
        );
        // A leftover of a crash under this very id.
        remove_tree(&new)?;
        let made = (|| {
            rustix::fs::mkdir(&new, rustix::fs::Mode::RWXU)?;
            write_new(&new.join(RECORD), record)?;
            furnish(&new)?;
            // Unlike `rename`, never replaces an empty directory that another made meanwhile.
            rustix::fs::renameat_with(
                rustix::fs::CWD,
                &new,
                rustix::fs::CWD,
                &dir,
                rustix::fs::RenameFlags::NOREPLACE,
            )?;
            Ok(())
        })();
        match made {
            Ok(()) => Ok(dir),
            Err(error) => {
                let _ = remove_tree(&new);
                Err(error)
            }
        }
    }

    /// Replaces the record.
    pub(crate) fn update(&self, record: &Record) -> io::Result<()> {
        let dir = self.dir(&record.id);
        let new = dir.join(".instance.json");
        write_new(&new, record)?;
        fs::rename(&new, dir.join(RECORD))
    }

    /// `None`: there is no such instance. An unreadable record is an error.
    pub(crate) fn read(&self, id: &InstanceId) -> io::Result<Option<Record>> {
        match fs::read(self.dir(id).join(RECORD)) {
            Ok(bytes) => serde_json::from_slice(&bytes).map(Some).map_err(io::Error::from),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The records of a tier. One that cannot be read belongs to nobody and is reported as an id without one, so that
    /// every tier offers to clean it.
    pub(crate) fn list(&self, isolation: Isolation) -> io::Result<Vec<(InstanceId, Option<Record>)>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(&self.root)? {
            let name = entry?.file_name();
            let Some(id) = name.to_str().and_then(|name| name.parse::<InstanceId>().ok()) else {
                continue;
            };
            match self.read(&id) {
                Ok(Some(record)) if record.isolation == isolation => found.push((id, Some(record))),
                Ok(Some(_)) => {}
                Ok(None) | Err(_) => found.push((id, None)),
            }
        }
        Ok(found)
    }

    fn sweep(&self) -> io::Result<()> {
        for entry in fs::read_dir(&self.root)? {
            let entry = entry?;
            // Another process (`atoll doctor`, say) may be making one right now.
            let is_new = entry
                .file_name()
                .to_str()
                .is_some_and(|name| name.starts_with(NEW));
            if is_new && age(&entry.path()) > MAKING_TAKES_LESS_THAN {
                remove_tree(&entry.path())?;
            }
        }
        Ok(())
    }

    pub(crate) fn remove(&self, id: &InstanceId) -> io::Result<()> {
        remove_tree(&self.dir(id))
    }
}

fn write_new(path: &Path, record: &Record) -> io::Result<()> {
    let mut file = fs::File::create(path)?;
    file.write_all(&serde_json::to_vec_pretty(record)?)
    // Not synced: a crash of the machine ends the instance too, and what is left is only to be removed.
}

/// How long ago a file or directory was last changed; none if that cannot be told.
pub(crate) fn age(path: &Path) -> Duration {
    let changed = fs::symlink_metadata(path).and_then(|metadata| metadata.modified());
    changed.map_or(Duration::ZERO, |changed| changed.elapsed().unwrap_or_default())
}

/// Succeeds when there is nothing.
fn remove_tree(path: &Path) -> io::Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(byte: u8) -> Record {
        Record {
            id: InstanceId::from_entropy([byte; 20]),
            isolation: Isolation::Jail,
            image: "/t/root.erofs".into(),
            hostname: "box".into(),
            resources: Resources::default(),
            id_base: Some(1 << 28),
            process: None,
        }
    }

    #[test]
    fn a_directory_comes_with_its_record_and_goes_whole() {
        let state = tempfile::tempdir().unwrap();
        let dirs = InstanceDirs::open(state.path()).unwrap();
        let mut one = record(1);
        let dir = dirs.create(&one, |dir| fs::write(dir.join("in"), "")).unwrap();
        assert!(dir.join("in").exists());
        assert!(dirs.create(&one, |_| Ok(())).is_err(), "twice under one id");
        assert_eq!(dirs.read(&one.id).unwrap(), Some(one.clone()));

        one.hostname = "other".into();
        dirs.update(&one).unwrap();
        assert_eq!(
            dirs.list(Isolation::Jail).unwrap(),
            [(one.id.clone(), Some(one.clone()))]
        );
        assert_eq!(dirs.list(Isolation::Gvisor).unwrap(), []);

        dirs.remove(&one.id).unwrap();
        dirs.remove(&one.id).unwrap();
        assert_eq!(dirs.list(Isolation::Jail).unwrap(), []);
    }

    #[test]
    fn a_failed_start_leaves_no_directory() {
        let state = tempfile::tempdir().unwrap();
        let dirs = InstanceDirs::open(state.path()).unwrap();
        dirs.create(&record(1), |_| Err(io::Error::other("no")))
            .unwrap_err();
        assert_eq!(fs::read_dir(state.path().join("instances")).unwrap().count(), 0);
    }

    #[test]
    fn what_a_crash_leaves_is_found_or_swept() {
        let state = tempfile::tempdir().unwrap();
        let dirs = InstanceDirs::open(state.path()).unwrap();
        let torn = InstanceId::from_entropy([2; 20]);
        fs::create_dir(dirs.dir(&torn)).unwrap();
        fs::write(dirs.dir(&torn).join(RECORD), "{").unwrap();
        let [old, new] = [3, 4].map(|byte| {
            state
                .path()
                .join("instances")
                .join(format!("{NEW}{}", record(byte).id))
        });
        for path in [&old, &new] {
            fs::create_dir(path).unwrap();
        }
        let long_ago = std::time::SystemTime::now() - 2 * MAKING_TAKES_LESS_THAN;
        fs::File::open(&old).unwrap().set_modified(long_ago).unwrap();
        assert_eq!(dirs.list(Isolation::Jail).unwrap(), [(torn, None)]);
        InstanceDirs::open(state.path()).unwrap();
        assert!(!old.exists() && new.exists());
    }
}
