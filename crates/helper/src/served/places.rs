//! Which files of the host the front may name.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Component, Path, PathBuf};

use atoll_runtime::MountSource;
use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags};

use crate::words::Spec;

/// Where templates, volumes and scratch files lie.
#[derive(Debug, Clone)]
pub(super) struct Places {
    templates: PathBuf,
    volumes: PathBuf,
    scratch: PathBuf,
}

/// More than a template has.
const MOST_FILES: usize = 64;

impl Places {
    pub(super) fn new(templates: &Path, data: &Path) -> io::Result<Self> {
        Ok(Self {
            templates: templates.canonicalize()?,
            volumes: data.canonicalize()?.join("volumes"),
            scratch: data.canonicalize()?.join("scratch"),
        })
    }

    /// An instance is made of a template and volumes, and called by a plain name. The template's files, open: their names are in
    /// a directory that the front may change, and could mean something else the next moment.
    pub(super) fn check(&self, spec: &Spec) -> io::Result<Vec<OwnedFd>> {
        if !(1..=MOST_FILES).contains(&spec.image.len()) {
            return Err(io::Error::other("that is no image"));
        }
        let files = spec.image.iter().map(|file| open_below(&self.templates, file));
        let image = files.collect::<io::Result<_>>()?;
        for mount in &spec.mounts {
            let (path, names) = match &mount.source {
                MountSource::Directory(path) => (path, ["mnt"]),
                MountSource::Erofs(path) => (path, ["input.erofs"]),
            };
            let inside = below(&self.volumes, path)?;
            let [volume, last] = inside.as_slice() else {
                return Err(no(path, "is no volume"));
            };
            if !names.contains(&last.as_str()) || volume.starts_with('.') {
                return Err(no(path, "is no volume"));
            }
        }
        let letters = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'.' || byte == b'_';
        if spec.hostname.is_empty() || spec.hostname.len() > 64 || !spec.hostname.bytes().all(letters) {
            return Err(io::Error::other("that is no host name"));
        }
        Ok(image)
    }

    /// An image that is to be sealed lies in the scratch directory itself. (Whether it is still a plain file when it has been
    /// moved away from there, where the front cannot reach it, is asked then.)
    pub(super) fn check_scratch(&self, image: &Path) -> io::Result<()> {
        match below(&self.scratch, image)?.len() {
            1 => open_below(&self.scratch, image).map(drop),
            _ => Err(no(image, "does not lie where images to be sealed do")),
        }
    }
}

/// The plain names that lead from a directory to what is below it.
fn below(root: &Path, path: &Path) -> io::Result<Vec<String>> {
    let inside = path.strip_prefix(root).map_err(|_| no(path, "lies elsewhere"))?;
    let names = inside.components().map(|part| match part {
        Component::Normal(name) => name
            .to_str()
            .map(str::to_owned)
            .ok_or_else(|| no(path, "is no plain name")),
        _ => Err(no(path, "is not a path of plain names")),
    });
    let names: Vec<String> = names.collect::<io::Result<_>>()?;
    match names.is_empty() {
        true => Err(no(path, "names nothing")),
        false => Ok(names),
    }
}

/// Opens a plain file; no link is on the way, nor at its end.
fn open_below(root: &Path, path: &Path) -> io::Result<OwnedFd> {
    let inside: PathBuf = below(root, path)?.iter().collect();
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::openat(CWD, root, flags, Mode::empty())?;
    let straight = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    // A FIFO or a device would do something when it is opened for more.
    let found = rustix::fs::openat2(
        &root,
        &inside,
        OFlags::PATH | OFlags::CLOEXEC,
        Mode::empty(),
        straight,
    )?;
    if !FileType::from_raw_mode(rustix::fs::fstat(&found)?.st_mode).is_file() {
        return Err(no(path, "is not a plain file"));
    }
    Ok(found)
}

fn no(path: &Path, why: &str) -> io::Error {
    io::Error::new(
        io::ErrorKind::PermissionDenied,
        format!("{} {why}", path.display()),
    )
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use atoll_runtime::Mount;
    use atoll_types::{InstanceId, Resources};

    use super::*;

    struct World {
        _dir: tempfile::TempDir,
        templates: PathBuf,
        data: PathBuf,
        places: Places,
    }

    fn world() -> World {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        let (templates, data) = (root.join("templates"), root.join("data"));
        for made in [
            "templates/blobs",
            "data/volumes/vol_1/mnt",
            "data/scratch",
            "data/instances",
        ] {
            fs::create_dir_all(root.join(made)).unwrap();
        }
        for made in [
            "templates/blobs/a",
            "data/volumes/vol_1/input.erofs",
            "data/scratch/image",
            "secret",
        ] {
            fs::write(root.join(made), "x").unwrap();
        }
        let places = Places::new(&templates, &data).unwrap();
        World {
            _dir: dir,
            templates,
            data,
            places,
        }
    }

    fn spec(image: PathBuf, mounts: Vec<MountSource>, hostname: &str) -> Spec {
        Spec {
            id: InstanceId::from_entropy([1; 20]),
            image: vec![image],
            resources: Resources::default(),
            hostname: hostname.into(),
            mounts: mounts
                .into_iter()
                .map(|source| Mount {
                    source,
                    path: "/data".into(),
                    read_only: false,
                })
                .collect(),
            network: false,
            restore: None,
        }
    }

    #[test]
    fn an_instance_is_made_of_templates_and_volumes_only() {
        let World {
            templates,
            data,
            places,
            ..
        } = &world();
        let image = templates.join("blobs/a");
        let check =
            |mounts: Vec<MountSource>| places.check(&spec(image.clone(), mounts, "sandbox")).map(drop);
        let (directory, erofs) = (MountSource::Directory, MountSource::Erofs);
        check(vec![directory(data.join("volumes/vol_1/mnt"))]).unwrap();
        check(vec![erofs(data.join("volumes/vol_1/input.erofs"))]).unwrap();
        for source in [
            directory("/".into()),
            directory("/etc".into()),
            directory(data.clone()),
            directory(data.join("volumes")),
            directory(data.join("volumes/vol_1")),
            directory(data.join("instances")),
            directory(data.join("volumes/vol_1/mnt/..")),
            directory(data.join("volumes/../instances/mnt")),
            directory(data.join("volumes/.new-x/mnt")),
            erofs(data.join("volumes/vol_1/mnt")),
            erofs("/dev/vda".into()),
        ] {
            let shown = format!("{source:?}");
            assert!(check(vec![source]).is_err(), "{shown}");
        }
        for host in ["", "a b", "a\0", "../x", &"x".repeat(65)] {
            assert!(
                places.check(&spec(image.clone(), Vec::new(), host)).is_err(),
                "{host:?}"
            );
        }
    }

    #[test]
    fn a_template_is_a_plain_file_among_templates() {
        let World {
            templates,
            data,
            places,
            ..
        } = &world();
        symlink(data.join("../secret"), templates.join("blobs/link")).unwrap();
        symlink(data, templates.join("door")).unwrap();
        for image in [
            templates.join("blobs/link"),
            templates.join("door/scratch/image"),
            templates.join("blobs"),
            templates.join("blobs/../blobs/a"),
            templates.join("absent"),
            data.join("scratch/image"),
            "/etc/shadow".into(),
            "/dev/null".into(),
        ] {
            let shown = image.display().to_string();
            assert!(
                places.check(&spec(image, Vec::new(), "sandbox")).is_err(),
                "{shown}"
            );
        }
    }

    #[test]
    fn only_scratch_files_are_sealed() {
        let World {
            templates,
            data,
            places,
            ..
        } = &world();
        places.check_scratch(&data.join("scratch/image")).unwrap();
        symlink("/etc/shadow", data.join("scratch/link")).unwrap();
        for image in [
            data.join("scratch/link"),
            data.join("scratch"),
            data.join("scratch/../atoll.db"),
            templates.join("blobs/a"),
            "/etc/shadow".into(),
        ] {
            assert!(places.check_scratch(&image).is_err(), "{}", image.display());
        }
    }
}
