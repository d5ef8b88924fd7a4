//! The templates of this machine, on disk.
//!
//! ```text
//! <dir>/blobs/<sha256>.erofs      images, named by their own digest, read-only, one for whoever has the same bytes
//! <dir>/manifests/<tpl id>.json   what makes an image a template; it says nothing of whose it is
//! <dir>/names, shared, cache      what everybody may use of that
//! <dir>/projects/<project>/       what a project has of that: see `spaces.rs`
//! <dir>/tmp/<build>/              what a build has not finished yet, locked by the process that builds
//! <dir>/lock                      held around every change, so that several processes may share a store
//! ```
//! What must hold: a name leads to a manifest, a manifest to a blob, and a blob has the digest that its name says; each
//! becomes visible by one rename, after everything below it. Whatever a killed process leaves behind lies in `tmp` and
//! goes when the store is opened next.

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
    ImageCommand, NetworkPolicy, Resources, StartCommand, TemplateId, TemplateManifest, TemplateSource,
    Timestamp,
};
use serde::Serialize;
use sha2::{Digest, Sha256};

pub use scratch::Scratch;
pub(crate) use scratch::end_group;
use spaces::Space;
pub use spaces::{Needed, Pruned};

use crate::content::Backing;
use crate::debian::Installer;
use crate::erofs::{Written, read_tree, write_image};
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
        for part in ["blobs", "manifests", "names", "cache", "projects", "tmp"] {
            let path = dir.join(part);
            fs::create_dir_all(&path).doing("make", &path)?;
        }
        let dir = dir.canonicalize().doing("open", dir)?;
        let store = Self {
            dir: dir.into(),
            space: Space::Shared,
            installer: None,
            reach: None,
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

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The image file of a template: what a runtime mounts.
    pub fn image_path(&self, manifest: &TemplateManifest) -> PathBuf {
        self.blob_path(&manifest.digest)
    }

    pub fn blob_path(&self, digest: &str) -> PathBuf {
        self.dir.join("blobs").join(format!("{digest}.erofs"))
    }

    /// The template's filesystem, to look into or to build on.
    pub fn tree(&self, manifest: &TemplateManifest) -> Result<Tree> {
        self.blob_tree(&manifest.digest)
    }

    pub(crate) fn blob_tree(&self, digest: &str) -> Result<Tree> {
        read_tree(&Backing::open(&self.blob_path(digest))?, Limits::default())
    }

    /// Reads the whole image and compares it with its digest.
    pub fn verify(&self, manifest: &TemplateManifest) -> Result<()> {
        let path = self.image_path(manifest);
        let mut file = File::open(&path).doing("open", &path)?;
        let mut sha = Sha256::new();
        let mut buf = vec![0; 1 << 20];
        loop {
            match file.read(&mut buf).doing("read", &path)? {
                0 => break,
                n => sha.update(&buf[..n]),
            }
        }
        let actual = hex::encode(sha.finalize());
        if actual != manifest.digest {
            return Err(Error::Digest {
                what: format!("the image of template `{}`", manifest.id),
                expected: manifest.digest.clone(),
                actual,
            });
        }
        Ok(())
    }

    /// A directory for a build, removed when dropped or, after a crash, when the store is opened next.
    pub fn scratch(&self) -> Result<Scratch> {
        let _lock = self.lock()?;
        Scratch::new(&self.dir.join("tmp"))
    }

    /// Writes `tree` as an image and makes it a template, all or nothing. The same tree and recipe give the same
    /// template: then nothing but the name changes.
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
        let (staged, written) = stage_image(&scratch, tree, job)?;
        let _lock = self.lock()?;
        job.check()?;
        self.adopt_blob(&staged, &written.digest)?;
        self.publish(&written.digest, recipe, name, now)
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
        let blob = self.blob_path(digest);
        let size_bytes = fs::metadata(&blob).doing("read the size of", &blob)?.len();
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
                    size_bytes,
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
        let digest = read_if_there(&self.dir.join(self.space.cache()).join(key))?;
        Ok(digest.filter(|digest| is_digest(digest) && self.blob_path(digest).exists()))
    }

    /// Keeps `tree` as the build state for `key`.
    pub(crate) fn cache(&self, key: &str, tree: &Tree, job: &Job) -> Result<String> {
        let scratch = self.scratch()?;
        let (staged, written) = stage_image(&scratch, tree, job)?;
        let _lock = self.lock()?;
        self.adopt_blob(&staged, &written.digest)?;
        self.write_file(&self.space.cache(), key, written.digest.as_bytes())?;
        Ok(written.digest)
    }

    /// Moves a finished image to its place. The caller holds the lock.
    fn adopt_blob(&self, staged: &Path, digest: &str) -> Result<()> {
        let path = self.blob_path(digest);
        if path.exists() {
            return Ok(());
        }
        fs::rename(staged, &path).doing("move the finished image to", &path)?;
        sync_dir(&self.dir.join("blobs"))
    }

    /// Whosever it is: for what was made of it while it could be seen.
    pub fn known(&self, id: &TemplateId) -> Result<Option<TemplateManifest>> {
        let path = self.dir.join("manifests").join(format!("{id}.json"));
        let Some(text) = read_if_there(&path)? else {
            return Ok(None);
        };
        serde_json::from_str(&text)
            .map(Some)
            .map_err(|error| Error::Damaged {
                why: format!("`{}` is not readable: {error}", path.display()),
            })
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
        for blob in self.files(Path::new("blobs"))? {
            if blob
                .strip_suffix(".erofs")
                .is_some_and(|digest| !used.contains(digest))
            {
                self.remove_file(Path::new("blobs"), &blob)?;
            }
        }
        Ok(())
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

fn stage_image(scratch: &Scratch, tree: &Tree, job: &Job) -> Result<(PathBuf, Written)> {
    let path = scratch.path().join("image.erofs");
    let file = File::create(&path).doing("write", &path)?;
    let mut out = std::io::BufWriter::with_capacity(1 << 20, file);
    let mut reported = 0;
    let written = write_image(tree, &mut out, |done, total| {
        if done >= reported + (4 << 20) || done == total {
            reported = done;
            return job.report("writing image", done, total, "");
        }
        Ok(())
    })?;
    let file = out
        .into_inner()
        .map_err(std::io::IntoInnerError::into_error)
        .doing("write", &path)?;
    file.set_permissions(fs::Permissions::from_mode(0o444))
        .and_then(|()| file.sync_all())
        .doing("write", &path)?;
    Ok((path, written))
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
