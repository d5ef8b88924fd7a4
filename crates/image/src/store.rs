//! The templates of this machine, on disk.
//!
//! ```text
//! <dir>/blobs/<sha256>.erofs      images, and layers on them, named by their own digest, read-only, one for whoever has
//!                                 the same bytes
//! <dir>/indexes/<sha256>.erofs    what a kernel needs beside the files of an image that has several, made when first asked for
//! <dir>/manifests/<tpl id>.json   what makes an image a template; it says nothing of whose it is
//! <dir>/names, shared, cache      what everybody may use of that
//! <dir>/projects/<project>/       what a project has of that: see `spaces.rs`
//! <dir>/tmp/<build>/              what a build has not finished yet, locked by the process that builds
//! <dir>/lock                      held around every change, so that several processes may share a store
//! ```
//! What must hold: a name leads to a manifest, a manifest to a blob, a layer to those that it lies on, and a blob has the
//! digest that its name says; each becomes visible by one rename, after everything below it. A layer names what it lies on
//! by digest, so one digest stands for all files of an image, and is all that anybody else keeps. Whatever a killed process
//! leaves behind lies in `tmp` and goes when the store is opened next.
//!
//! A blob goes when no manifest, no cached step and no build that is under way leads to it (`tmp/<build>/holds-<sha256>`).

mod scratch;
mod spaces;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use atoll_types::{
    Fault, ImageCommand, NetworkPolicy, Resources, StartCommand, TemplateId, TemplateManifest,
    TemplateSource, Timestamp,
};
use serde::Serialize;
use sha2::{Digest, Sha256};

pub use scratch::Scratch;
pub(crate) use scratch::end_group;
use spaces::Space;
pub use spaces::{Needed, Needs, Pruned};

use crate::content::Backing;
use crate::debian::Installer;
use crate::erofs::{Stack, lower_of, read_stack, write_image, write_index, write_layer};
use crate::error::{Error, IoContext, Result};
use crate::oci::{Bound, Reach};
use crate::progress::Job;
use crate::tree::{Limits, Tree};

/// What may be said of a template beside its image, as JSON: lists of templates hold thousands of these.
const MOST_MANIFEST: usize = 64 * 1024;

/// The templates as everybody sees them, or, of [`Templates::of`], as a project does. Cheap to clone. All methods do file
/// work: call them from a thread that may block.
#[derive(Debug, Clone)]
pub struct Templates {
    dir: Arc<Path>,
    /// What is looked for first, and what is changed.
    space: Space,
    /// Where another process has to run what installs Debian packages.
    pub(crate) installer: Option<Arc<dyn Installer>>,
    /// Where registries may lead to.
    pub(crate) reach: Option<Arc<dyn Reach>>,
    /// Who is asked before an image is kept.
    room: Option<Arc<dyn Room>>,
}

/// How much may be stored.
pub trait Room: Send + Sync + std::fmt::Debug {
    /// Before an image of so many bytes is kept. An error is why it may not be.
    fn take(&self, bytes: u64) -> std::result::Result<(), Fault>;

    /// How much could be taken now.
    fn left(&self) -> u64;
}

/// What is to be recorded beside an image.
#[derive(Debug, Clone, Serialize)]
pub struct Recipe {
    pub source: TemplateSource,
    pub env: BTreeMap<String, String>,
    pub workdir: String,
    pub user: String,
    pub start: Option<StartCommand>,
    /// This one too is left out where there is none, see below.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command: Option<ImageCommand>,
    pub exposed_ports: Vec<u16>,
    /// Left out where there is none: the ids of templates are made of this.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkPolicy>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resources: Option<Resources>,
}

/// What may be said of a template beside what is in its image; what is `None` stays as it was.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    pub start: Option<StartCommand>,
    pub network: Option<NetworkPolicy>,
    pub resources: Option<Resources>,
}

/// A template as people see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    pub manifest: TemplateManifest,
    /// What it is called by whoever looks.
    pub names: Vec<String>,
    /// Whether everybody may use it.
    pub shared: bool,
    /// Whether it belongs to the project that looks.
    pub own: bool,
}

impl Templates {
    /// Opens the store at `dir`, making it if needed and removing what dead builds left.
    pub fn open(dir: impl AsRef<Path>) -> Result<Self> {
        let dir = dir.as_ref();
        for part in [
            "blobs",
            "indexes",
            "manifests",
            "names",
            "cache",
            "projects",
            "tmp",
        ] {
            let path = dir.join(part);
            fs::create_dir_all(&path).doing("make", &path)?;
        }
        let dir = dir.canonicalize().doing("open", dir)?;
        let store = Self {
            dir: dir.into(),
            space: Space::Shared,
            installer: None,
            reach: None,
            room: None,
        };
        let _lock = store.lock()?;
        scratch::remove_abandoned(&store.dir.join("tmp"))?;
        store.share_what_was_nobodys()?;
        Ok(store)
    }

    /// The same templates, for which another process installs Debian packages.
    #[must_use]
    pub fn installed_by(self, installer: Arc<dyn Installer>) -> Self {
        let installer = Some(installer);
        Self { installer, ..self }
    }

    /// The same templates, whose images come from where their registries may lead to.
    #[must_use]
    pub fn reaching(self, reach: Arc<dyn Reach>) -> Self {
        let reach = Some(reach);
        Self { reach, ..self }
    }

    /// The same templates, for whoever is not trusted to name a registry: that, too, must be where registries may lead to.
    #[must_use]
    pub fn bound(self) -> Self {
        let reach = self.reach.map(|reach| Arc::new(Bound(reach)) as Arc<dyn Reach>);
        Self { reach, ..self }
    }

    /// The same templates, for whoever may not store more than there is room for. Each step of a build stores what it changed.
    #[must_use]
    pub fn within(self, room: Arc<dyn Room>) -> Self {
        let room = Some(room);
        Self { room, ..self }
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The files of an image, from the top down: what gVisor mounts.
    pub fn image_files(&self, digest: &str) -> Result<Vec<PathBuf>> {
        let lower = self.lower(digest)?;
        let digests = std::iter::once(digest).chain(lower.iter().map(String::as_str));
        Ok(digests.map(|digest| self.blob_path(digest)).collect())
    }

    /// The same for the kernel: if there are several, a plain image before them, in which there is all but the data.
    pub fn kernel_files(&self, digest: &str) -> Result<Vec<PathBuf>> {
        let mut files = self.image_files(digest)?;
        if files.len() > 1 {
            let index = self.dir.join("indexes").join(format!("{digest}.erofs"));
            if !index.exists() {
                self.make_index(digest, &index)?;
            }
            files.insert(0, index);
        }
        Ok(files)
    }

    fn make_index(&self, digest: &str, index: &Path) -> Result<()> {
        let scratch = self.scratch()?;
        let path = scratch.path().join("index.erofs");
        let tree = self.blob_tree(digest)?;
        let below = tree
            .below()
            .ok_or_else(|| Error::Invalid("a tree of no image".into()))?;
        let file = File::create(&path).doing("write", &path)?;
        let mut out = std::io::BufWriter::with_capacity(1 << 20, file);
        write_index(&tree, below, &mut out)?;
        seal(out).doing("write", &path)?;
        let _lock = self.lock()?;
        // It may have gone while this was made; then nobody would take the index away.
        match self.blob_path(digest).exists() {
            true => fs::rename(&path, index).doing("move the finished index to", index),
            false => Err(Error::Damaged {
                why: format!("image {digest} is gone"),
            }),
        }
    }

    pub(crate) fn blob_path(&self, digest: &str) -> PathBuf {
        self.dir.join("blobs").join(format!("{digest}.erofs"))
    }

    /// The digests of what an image lies on, from the top down. What is not there lies on nothing; whoever wants to read it will
    /// see.
    fn lower(&self, digest: &str) -> Result<Vec<String>> {
        match Backing::open(&self.blob_path(digest)) {
            Ok(top) => lower_of(&top),
            Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    }

    /// The template's filesystem, to look into or to build on.
    pub fn tree(&self, manifest: &TemplateManifest) -> Result<Tree> {
        self.blob_tree(&manifest.digest)
    }

    pub(crate) fn blob_tree(&self, digest: &str) -> Result<Tree> {
        let mut files = Vec::new();
        for digest in std::iter::once(digest.to_owned()).chain(self.lower(digest)?) {
            let file = Backing::open(&self.blob_path(&digest))?;
            files.push((digest, file));
        }
        read_stack(&Arc::new(Stack::open(files)?), Limits::default())
    }

    /// Reads all files of the image and compares them with their digests.
    pub fn verify(&self, manifest: &TemplateManifest) -> Result<()> {
        let check = |digest: &str| {
            let path = self.blob_path(digest);
            let actual = digest_of(&path)?;
            if actual != digest {
                return Err(Error::Digest {
                    what: format!("the image of template `{}`", manifest.id),
                    expected: digest.to_owned(),
                    actual,
                });
            }
            Ok(())
        };
        // Before what it says of others is believed.
        check(&manifest.digest)?;
        self.lower(&manifest.digest)?
            .iter()
            .try_for_each(|lower| check(lower))
    }

    /// A directory for a build, removed when dropped or, after a crash, when the store is opened next.
    pub fn scratch(&self) -> Result<Scratch> {
        let _lock = self.lock()?;
        Scratch::new(&self.dir.join("tmp"))
    }

    /// Writes `tree` as an image, or as a layer on the one that it was read from, and makes it a template, all or nothing. The
    /// same tree and recipe give the same template: then nothing but the name changes.
    pub(crate) fn add(
        &self,
        tree: &Tree,
        recipe: &Recipe,
        name: Option<&str>,
        now: Timestamp,
        job: &Job,
    ) -> Result<TemplateManifest> {
        name.map_or(Ok(()), check_name)?;
        let scratch = self.scratch()?;
        let staged = self.stage(&scratch, tree, job)?;
        let _lock = self.lock()?;
        job.check()?;
        self.adopt(&staged)?;
        self.publish(&staged.digest, recipe, name, now)
    }

    /// Keeps an image from going as long as this directory is there, if it is still there itself.
    pub(crate) fn hold(&self, digest: &str, by: &Scratch) -> Result<bool> {
        let _lock = self.lock()?;
        if !self.blob_path(digest).exists() {
            return Ok(false);
        }
        by.hold(digest)?;
        Ok(true)
    }

    /// As [`Templates::add`], for an image that is in the store already.
    pub(crate) fn add_blob(
        &self,
        digest: &str,
        recipe: &Recipe,
        name: Option<&str>,
        now: Timestamp,
    ) -> Result<TemplateManifest> {
        name.map_or(Ok(()), check_name)?;
        let _lock = self.lock()?;
        self.publish(digest, recipe, name, now)
    }

    /// The same image with other settings, where they are given, under this name: another template.
    pub fn with_settings(
        &self,
        manifest: &TemplateManifest,
        settings: Settings,
        name: &str,
        now: Timestamp,
    ) -> Result<TemplateManifest> {
        let recipe = Recipe {
            source: manifest.source.clone(),
            env: manifest.env.clone(),
            workdir: manifest.workdir.clone(),
            user: manifest.user.clone(),
            start: settings.start.or_else(|| manifest.start.clone()),
            command: manifest.command.clone(),
            exposed_ports: manifest.exposed_ports.clone(),
            network: settings.network.or_else(|| manifest.network.clone()),
            resources: settings.resources.or(manifest.resources),
        };
        self.add_blob(&manifest.digest, &recipe, Some(name), now)
    }

    /// The caller holds the lock.
    fn publish(
        &self,
        digest: &str,
        recipe: &Recipe,
        name: Option<&str>,
        now: Timestamp,
    ) -> Result<TemplateManifest> {
        let mut sizes = Vec::new();
        for file in self.image_files(digest)? {
            sizes.push(fs::metadata(&file).doing("read the size of", &file)?.len());
        }
        let id = template_id(digest, recipe)?;
        let manifest = match self.known(&id)? {
            Some(known) => {
                self.own(&id, now)?;
                known
            }
            None => {
                let manifest = TemplateManifest {
                    id,
                    digest: digest.to_owned(),
                    size_bytes: sizes.iter().sum(),
                    layer_bytes: (sizes.len() > 1).then(|| sizes[0]),
                    created_at: now,
                    source: recipe.source.clone(),
                    env: recipe.env.clone(),
                    workdir: recipe.workdir.clone(),
                    user: recipe.user.clone(),
                    start: recipe.start.clone(),
                    command: recipe.command.clone(),
                    exposed_ports: recipe.exposed_ports.clone(),
                    network: recipe.network.clone(),
                    resources: recipe.resources,
                };
                let json = serde_json::to_vec_pretty(&manifest).map_err(|error| Error::Damaged {
                    why: format!("a manifest cannot be written: {error}"),
                })?;
                if json.len() > MOST_MANIFEST {
                    return Err(Error::TooMuchSaid {
                        bytes: json.len(),
                        most: MOST_MANIFEST,
                    });
                }
                // Before the manifest: a template is somebody's from its first moment on.
                self.own(&manifest.id, now)?;
                self.write_file(Path::new("manifests"), &format!("{}.json", manifest.id), &json)?;
                manifest
            }
        };
        if let Some(name) = name {
            self.write_file(&self.space.names(), name, manifest.id.as_str().as_bytes())?;
        }
        self.as_seen(manifest)
    }

    /// The digest of a build state that was cached from here, and whose image is still there. What others have cached is not
    /// looked at: that a step need not be run would tell what they have built, and what came of it would be theirs to say.
    pub(crate) fn cached(&self, key: &str) -> Result<Option<String>> {
        let path = self.dir.join(self.space.cache()).join(key);
        let digest = read_if_there(&path)?;
        let digest = digest.filter(|digest| is_digest(digest) && self.blob_path(digest).exists());
        if digest.is_some() {
            // It was of use: it stays longer. One that has just gone is noticed when it is held.
            let file = File::options().append(true).open(&path);
            let _ = file.and_then(|file| file.set_modified(std::time::SystemTime::now()));
        }
        Ok(digest)
    }

    /// Keeps `tree` as the build state for `key`.
    pub(crate) fn cache(&self, key: &str, tree: &Tree, by: &Scratch, job: &Job) -> Result<String> {
        let scratch = self.scratch()?;
        let staged = self.stage(&scratch, tree, job)?;
        let _lock = self.lock()?;
        self.adopt(&staged)?;
        by.hold(&staged.digest)?;
        self.write_file(&self.space.cache(), key, staged.digest.as_bytes())?;
        Ok(staged.digest)
    }

    /// Writes an image for which there is room. One that others have, too, takes the same.
    fn stage(&self, scratch: &Scratch, tree: &Tree, job: &Job) -> Result<Staged> {
        let staged = Staged::write(scratch, tree, job)?;
        if let (Some(room), Some(file)) = (&self.room, &staged.file) {
            let bytes = fs::metadata(file).doing("read the size of", file)?.len();
            room.take(bytes).map_err(Error::Refused)?;
        }
        Ok(staged)
    }

    /// Moves a finished image to its place. The caller holds the lock.
    fn adopt(&self, staged: &Staged) -> Result<()> {
        let path = self.blob_path(&staged.digest);
        if let Some(file) = staged.file.as_ref().filter(|_| !path.exists()) {
            fs::rename(file, &path).doing("move the finished image to", &path)?;
            sync_dir(&self.dir.join("blobs"))?;
        }
        // Whoever builds holds what it builds on, so this is somebody who removed files by hand.
        match self
            .image_files(&staged.digest)?
            .iter()
            .find(|file| !file.exists())
        {
            None => Ok(()),
            Some(gone) => Err(Error::Damaged {
                why: format!("`{}`, which an image lies on, is gone", gone.display()),
            }),
        }
    }

    /// Whosever it is: for what was made of it while it could be seen.
    pub fn known(&self, id: &TemplateId) -> Result<Option<TemplateManifest>> {
        let path = self.manifest_path(id);
        let Some(text) = read_if_there(&path)? else {
            return Ok(None);
        };
        serde_json::from_str(&text)
            .map(Some)
            .map_err(|error| Error::Damaged {
                why: format!("`{}` is not readable: {error}", path.display()),
            })
    }

    fn manifest_path(&self, id: &TemplateId) -> PathBuf {
        self.dir.join("manifests").join(format!("{id}.json"))
    }

    fn manifests(&self) -> Result<Vec<TemplateManifest>> {
        let mut all = Vec::new();
        for file in self.files(Path::new("manifests"))? {
            let id = file.strip_suffix(".json").and_then(|id| id.parse().ok());
            if let Some(id) = id
                && let Some(manifest) = self.known(&id)?
            {
                all.push(manifest);
            }
        }
        Ok(all)
    }

    /// The names of what lies there; none where the directory is not there yet.
    fn files(&self, part: &Path) -> Result<Vec<String>> {
        let dir = self.dir.join(part);
        let mut all = Vec::new();
        let entries = match fs::read_dir(&dir) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(all),
            entries => entries.doing("list", &dir)?,
        };
        for entry in entries {
            if let Ok(name) = entry.doing("list", &dir)?.file_name().into_string()
                && !name.starts_with('.')
            {
                all.push(name);
            }
        }
        all.sort();
        Ok(all)
    }

    /// Needs the lock, or a blob that another process has just adopted could go.
    fn remove_unused_blobs(&self) -> Result<()> {
        let mut used: BTreeSet<String> = self.manifests()?.into_iter().map(|m| m.digest).collect();
        for space in self.spaces()? {
            used.extend(self.cached_digests(&space)?);
        }
        used.extend(scratch::held(&self.dir.join("tmp"))?);
        let used = self.with_lower(used)?;
        for part in ["indexes", "blobs"].map(Path::new) {
            for file in self.files(part)? {
                if file
                    .strip_suffix(".erofs")
                    .is_some_and(|digest| !used.contains(digest))
                {
                    self.remove_file(part, &file)?;
                }
            }
        }
        Ok(())
    }

    /// These images with all that they lie on.
    fn with_lower(&self, mut images: BTreeSet<String>) -> Result<BTreeSet<String>> {
        let mut lower = BTreeSet::new();
        for digest in &images {
            match self.lower(digest) {
                Ok(those) => lower.extend(those),
                // What cannot be used keeps nothing. What cannot be read now is another matter.
                Err(Error::Erofs { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        images.append(&mut lower);
        Ok(images)
    }

    fn lock(&self) -> Result<File> {
        let path = self.dir.join("lock");
        let file = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)
            .doing("open", &path)?;
        file.lock().doing("lock", &path)?;
        Ok(file)
    }

    fn write_file(&self, part: &Path, name: &str, bytes: &[u8]) -> Result<()> {
        let dir = self.dir.join(part);
        self.make(part)?;
        let staged = dir.join(format!(".{name}.new"));
        let mut file = File::create(&staged).doing("write", &staged)?;
        file.write_all(bytes)
            .and_then(|()| file.sync_all())
            .doing("write", &staged)?;
        let path = dir.join(name);
        fs::rename(&staged, &path).doing("write", &path)?;
        sync_dir(&dir)
    }

    /// Makes a directory that is not there yet, durably, with those above it.
    fn make(&self, part: &Path) -> Result<()> {
        let dir = self.dir.join(part);
        if dir.is_dir() {
            return Ok(());
        }
        fs::create_dir_all(&dir).doing("make", &dir)?;
        part.ancestors()
            .skip(1)
            .try_for_each(|above| sync_dir(&self.dir.join(above)))
    }

    fn remove_file(&self, part: &Path, name: &str) -> Result<()> {
        let dir = self.dir.join(part);
        let path = dir.join(name);
        match fs::remove_file(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            other => other.doing("remove", &path),
        }?;
        sync_dir(&dir)
    }
}

/// Names as people may give them to templates.
pub fn check_name(name: &str) -> Result<()> {
    let ok = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let bytes = name.as_bytes();
    if (1..=63).contains(&bytes.len())
        && ok(bytes[0])
        && bytes.iter().all(|&b| ok(b) || b"._-".contains(&b))
        && name.parse::<TemplateId>().is_err()
    {
        return Ok(());
    }
    Err(Error::BadName {
        name: name.chars().take(80).collect(),
    })
}

/// An image that is not in its place yet.
struct Staged {
    digest: String,
    /// `None`: it is one that is there already.
    file: Option<PathBuf>,
}

impl Staged {
    /// A layer on the image that the tree was read from; where that has as many as it may have, on the lowest of its files,
    /// so that they become one. The whole, where there is nothing to lie on.
    fn write(scratch: &Scratch, tree: &Tree, job: &Job) -> Result<Self> {
        let path = scratch.path().join("image.erofs");
        let file = File::create(&path).doing("write", &path)?;
        let mut out = std::io::BufWriter::with_capacity(1 << 20, file);
        let mut reported = 0;
        let progress = |done, total| {
            if done >= reported + (4 << 20) || done == total {
                reported = done;
                return job.report("writing image", done, total, "");
            }
            Ok(())
        };
        let below = match tree.below() {
            Some(below) if !below.takes_another() => Some(Arc::new(below.lowest()?)),
            below => below.cloned(),
        };
        let written = match below.filter(|below| below.takes_another()) {
            None => write_image(tree, &mut out, progress)?,
            Some(below) => match write_layer(tree, &below, &mut out, progress)? {
                Some(written) => written,
                None => {
                    let digest = below.digest().to_owned();
                    return Ok(Self { digest, file: None });
                }
            },
        };
        seal(out).doing("write", &path)?;
        Ok(Self {
            digest: written.digest,
            file: Some(path),
        })
    }
}

/// Nobody writes to a finished image, and it is on the disk before it gets its name.
fn seal(out: std::io::BufWriter<File>) -> std::io::Result<()> {
    let file = out.into_inner().map_err(std::io::IntoInnerError::into_error)?;
    file.set_permissions(fs::Permissions::from_mode(0o444))?;
    file.sync_all()
}

fn digest_of(path: &Path) -> Result<String> {
    let mut file = File::open(path).doing("open", path)?;
    let mut sha = Sha256::new();
    let mut buf = vec![0; 1 << 20];
    loop {
        match file.read(&mut buf).doing("read", path)? {
            0 => return Ok(hex::encode(sha.finalize())),
            n => sha.update(&buf[..n]),
        }
    }
}

fn template_id(digest: &str, recipe: &Recipe) -> Result<TemplateId> {
    let recipe = serde_json::to_vec(recipe).map_err(|error| Error::Damaged {
        why: format!("a recipe cannot be written: {error}"),
    })?;
    let hash = Sha256::new()
        .chain_update(digest)
        .chain_update([0])
        .chain_update(recipe)
        .finalize();
    let mut entropy = [0; 20];
    entropy.copy_from_slice(&hash[..20]);
    Ok(TemplateId::from_entropy(entropy))
}

pub(crate) fn is_digest(text: &str) -> bool {
    text.len() == 64
        && text
            .bytes()
            .all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

fn read_if_there(path: &Path) -> Result<Option<String>> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).doing("read", path),
    }
}

fn sync_dir(dir: &Path) -> Result<()> {
    File::open(dir).and_then(|dir| dir.sync_all()).doing("sync", dir)
}
