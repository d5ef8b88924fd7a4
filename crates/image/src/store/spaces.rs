//! Whose templates they are: everybody's, and each project's own.
//!
//! ```text
//! <dir>/names/<name>                      the id that a name stands for, for everybody
//! <dir>/shared/<tpl id>                   a template that everybody may use, and since when
//! <dir>/cache/<key>                       digest of the state after a Dockerfile step of a shared template
//! <dir>/projects/<project>/names/<name>   the same for a project alone
//! <dir>/projects/<project>/owned/<tpl id>
//! <dir>/projects/<project>/cache/<key>
//! ```
//! Images and manifests are what their content is, and are there once, whoever made them. So what is somebody's is a
//! reference, and never a blob: two projects that build the same thing have the same template without knowing of each other.
//!
//! What must hold:
//! - A project sees what it has and what is shared, and nothing else, by no name and no id. Nor does it see that others have the
//!   same: not when they made it, not by what is cached, and not by what deleting it frees.
//! - Its own names come before shared ones, so nobody's name can stand in the way of a project's, and a project's in nobody's.
//! - Nothing that is changed in a project changes what others have.
//! - A reference is there before what it refers to, and goes after the names that lead to it. So whatever dies in between, a
//!   template is never nobody's, and what nobody refers to is garbage.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fs;
use std::path::{Path, PathBuf};

use atoll_types::{ProjectId, TemplateId, TemplateManifest, Timestamp};

use super::{Listed, Templates, check_name, is_digest, read_if_there, sync_dir};
use crate::error::{Error, IoContext, Result};

/// Where references are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Space {
    Shared,
    Of(ProjectId),
}

impl Space {
    fn part(&self, shared: &str, own: &str) -> PathBuf {
        match self {
            Self::Shared => PathBuf::from(shared),
            Self::Of(project) => Path::new("projects").join(project.as_str()).join(own),
        }
    }

    pub(super) fn names(&self) -> PathBuf {
        self.part("names", "names")
    }

    fn owned(&self) -> PathBuf {
        self.part("shared", "owned")
    }

    pub(super) fn cache(&self) -> PathBuf {
        self.part("cache", "cache")
    }
}

/// Templates that sandboxes run on, or snapshots need to come back.
#[derive(Debug, Clone, Default)]
pub struct Needed {
    /// By whoever asks; where everybody's are asked about, by anybody.
    pub here: HashSet<TemplateId>,
    pub anywhere: HashSet<TemplateId>,
}

/// What [`Templates::prune`] removed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pruned {
    pub templates: Vec<TemplateId>,
    pub cache_entries: u64,
    /// The size of images that nothing here refers to any more. Others may still have the same.
    pub bytes: u64,
}

impl Templates {
    /// The same templates as a project sees them: its own, and those that everybody may use. What is changed is its own.
    #[must_use]
    pub fn of(&self, project: &ProjectId) -> Self {
        Self {
            space: Space::Of(project.clone()),
            ..self.clone()
        }
    }

    /// The same templates as everybody sees them. What is changed is everybody's.
    #[must_use]
    pub fn shared(&self) -> Self {
        Self {
            space: Space::Shared,
            ..self.clone()
        }
    }

    /// All that can be seen from here, newest first.
    pub fn list(&self) -> Result<Vec<Listed>> {
        let mut ids: BTreeSet<TemplateId> = self.ids(&self.space)?;
        ids.extend(self.ids(&Space::Shared)?);
        let names = self.names_by_id()?;
        let mut all = Vec::with_capacity(ids.len());
        for id in ids {
            if let Some(manifest) = self.known(&id)? {
                all.push(self.listed(manifest, &names)?);
            }
        }
        all.sort_by(|a, b| {
            let key = |t: &Listed| (std::cmp::Reverse(t.manifest.created_at), t.manifest.id.clone());
            key(a).cmp(&key(b))
        });
        Ok(all)
    }

    /// The template that a name or an id stands for.
    pub fn resolve(&self, wanted: &str) -> Result<TemplateManifest> {
        self.find(wanted)?.ok_or_else(|| not_found(wanted))
    }

    /// As [`Templates::resolve`], with all its names.
    pub fn inspect(&self, wanted: &str) -> Result<Listed> {
        let manifest = self.resolve(wanted)?;
        self.listed(manifest, &self.names_by_id()?)
    }

    /// As [`Templates::resolve`], `None` when there is none.
    pub fn find(&self, wanted: &str) -> Result<Option<TemplateManifest>> {
        let found = match self.find_in(&self.space, wanted)? {
            None if self.space != Space::Shared => self.find_in(&Space::Shared, wanted)?,
            found => found,
        };
        found.map_or(Ok(None), |id| self.known(&id))
    }

    /// Whether a name or an id is one of this project, or, seen by everybody, of everybody: what may be changed from here.
    pub fn has(&self, wanted: &str) -> Result<bool> {
        Ok(self.find_in(&self.space, wanted)?.is_some())
    }

    /// How much is referred to from here: templates, and what is cached.
    pub fn count(&self) -> Result<usize> {
        Ok(self.files(&self.space.owned())?.len() + self.files(&self.space.cache())?.len())
    }

    /// The images of what is referred to from here, each with its size: templates, and what is cached.
    pub fn images(&self) -> Result<BTreeMap<String, u64>> {
        let mut digests = self.cached_digests(&self.space)?;
        for id in self.ids(&self.space)? {
            digests.extend(self.known(&id)?.map(|manifest| manifest.digest));
        }
        let sizes = digests.into_iter().filter_map(|digest| {
            let size = fs::metadata(self.blob_path(&digest)).ok()?.len();
            Some((digest, size))
        });
        Ok(sizes.collect())
    }

    /// Lets `name` stand for `id`, whatever it stood for before.
    pub fn name(&self, name: &str, id: &TemplateId, now: Timestamp) -> Result<()> {
        check_name(name)?;
        let _lock = self.lock()?;
        if self.find(id.as_str())?.is_none() {
            return Err(not_found(id.as_str()));
        }
        self.own(id, now)?;
        self.write_file(&self.space.names(), name, id.as_str().as_bytes())
    }

    /// By name: takes the name away, and the template with its last name. By id: removes the template with all its
    /// names. Refused while it is needed here. What others have of it stays theirs; the manifest goes with the last
    /// reference to it, and the image with the last template that has the same bytes.
    pub fn delete(&self, wanted: &str, needed: &Needed) -> Result<()> {
        let _lock = self.lock()?;
        let id = self.find_in(&self.space, wanted)?;
        let id = id.ok_or_else(|| not_found(wanted))?;
        let names = self.names_of(&self.space, &id)?;
        let by_id = wanted == id.as_str();
        if !by_id && names.len() > 1 {
            return self.remove_file(&self.space.names(), wanted);
        }
        if needed.here.contains(&id) {
            return Err(Error::InUse {
                id: id.to_string(),
                by: " by running sandboxes".into(),
            });
        }
        self.disown(&self.space, &id)?;
        self.remove_if_unowned(&id, needed)?;
        self.remove_unused_blobs()
    }

    /// Lets everybody use a template of this project: one by its name under that name, one by its id under all that it has here.
    /// It stays this project's as well. One that everybody may use already stays as it is.
    pub fn share(&self, wanted: &str, now: Timestamp) -> Result<TemplateId> {
        let _lock = self.lock()?;
        let Some(id) = self.find_in(&self.space, wanted)? else {
            let shared = self.find_in(&Space::Shared, wanted)?;
            return shared.ok_or_else(|| not_found(wanted));
        };
        let names = match wanted == id.as_str() {
            true => self.names_of(&self.space, &id)?,
            false => vec![wanted.to_owned()],
        };
        self.shared().own(&id, now)?;
        for name in names {
            self.write_file(&Space::Shared.names(), &name, id.as_str().as_bytes())?;
        }
        Ok(id)
    }

    /// Takes a template away from everybody, with all names that it has for them, and makes it this project's. Names that
    /// this project has already stay what they are.
    pub fn unshare(&self, wanted: &str, now: Timestamp) -> Result<TemplateId> {
        let _lock = self.lock()?;
        let id = self.find_in(&Space::Shared, wanted)?;
        let id = id.ok_or_else(|| not_found(wanted))?;
        self.own(&id, now)?;
        for name in self.names_of(&Space::Shared, &id)? {
            if self.named(&self.space, &name)?.is_none() {
                self.write_file(&self.space.names(), &name, id.as_str().as_bytes())?;
            }
        }
        self.disown(&Space::Shared, &id)?;
        Ok(id)
    }

    /// Removes templates without a name that are not needed, what is cached of builds, and then whatever nobody refers to and
    /// nobody needs.
    pub fn prune(&self, needed: &Needed) -> Result<Pruned> {
        let _lock = self.lock()?;
        let before = self.images()?;
        let mut pruned = Pruned::default();
        // Read once: a project may have thousands of both, and everybody waits for the lock.
        let named: BTreeSet<TemplateId> = self.names(&self.space)?.into_values().collect();
        for id in self.ids(&self.space)? {
            if !named.contains(&id) && !needed.here.contains(&id) {
                self.remove_file(&self.space.owned(), id.as_str())?;
                pruned.templates.push(id);
            }
        }
        for key in self.files(&self.space.cache())? {
            self.remove_file(&self.space.cache(), &key)?;
            pruned.cache_entries += 1;
        }
        for manifest in self.manifests()? {
            self.remove_if_unowned(&manifest.id, needed)?;
        }
        let after = self.images()?;
        let gone = before.iter().filter(|(digest, _)| !after.contains_key(*digest));
        pruned.bytes = gone.map(|(_, size)| size).sum();
        self.remove_unused_blobs()?;
        Ok(pruned)
    }

    /// Shares all that is there in a store from before there were projects in it, at once or not at all: everybody could use it.
    /// The caller holds the lock.
    pub(super) fn share_what_was_nobodys(&self) -> Result<()> {
        let shared = self.dir.join(Space::Shared.owned());
        if shared.is_dir() {
            return Ok(());
        }
        let staged = self.dir.join("shared.new");
        match fs::remove_dir_all(&staged) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(error).doing("remove", &staged);
            }
            _ => {}
        }
        fs::create_dir(&staged).doing("make", &staged)?;
        for manifest in self.manifests()? {
            let path = staged.join(manifest.id.as_str());
            fs::write(&path, manifest.created_at.0.to_string()).doing("write", &path)?;
        }
        sync_dir(&staged)?;
        fs::rename(&staged, &shared).doing("make", &shared)?;
        sync_dir(&self.dir)
    }

    /// Refers to a template from here, if nothing does yet. The caller holds the lock.
    pub(super) fn own(&self, id: &TemplateId, now: Timestamp) -> Result<()> {
        let part = self.space.owned();
        match self.dir.join(&part).join(id.as_str()).exists() {
            true => Ok(()),
            false => self.write_file(&part, id.as_str(), now.0.to_string().as_bytes()),
        }
    }

    /// Takes all names of a template away, then the reference itself.
    fn disown(&self, space: &Space, id: &TemplateId) -> Result<()> {
        for name in self.names_of(space, id)? {
            self.remove_file(&space.names(), &name)?;
        }
        self.remove_file(&space.owned(), id.as_str())
    }

    fn remove_if_unowned(&self, id: &TemplateId, needed: &Needed) -> Result<()> {
        if needed.anywhere.contains(id) {
            return Ok(());
        }
        for space in self.spaces()? {
            if self.is_in(&space, id)? {
                return Ok(());
            }
        }
        self.remove_file(Path::new("manifests"), &format!("{id}.json"))
    }

    /// A manifest as it is seen from here: made when it was made here, whoever made the same before.
    pub(super) fn as_seen(&self, mut manifest: TemplateManifest) -> Result<TemplateManifest> {
        for space in [&self.space, &Space::Shared] {
            let since = read_if_there(&self.dir.join(space.owned()).join(manifest.id.as_str()))?;
            if let Some(since) = since.and_then(|text| text.trim().parse().ok()) {
                manifest.created_at = Timestamp(since);
                break;
            }
        }
        Ok(manifest)
    }

    fn listed(
        &self,
        manifest: TemplateManifest,
        names: &BTreeMap<TemplateId, Vec<String>>,
    ) -> Result<Listed> {
        Ok(Listed {
            names: names.get(&manifest.id).cloned().unwrap_or_default(),
            shared: self.is_in(&Space::Shared, &manifest.id)?,
            own: self.space != Space::Shared && self.is_in(&self.space, &manifest.id)?,
            manifest: self.as_seen(manifest)?,
        })
    }

    /// The id that a name or an id stands for in one space.
    fn find_in(&self, space: &Space, wanted: &str) -> Result<Option<TemplateId>> {
        match wanted.parse::<TemplateId>() {
            Ok(id) => Ok(self.is_in(space, &id)?.then_some(id)),
            Err(_) => {
                check_name(wanted)?;
                self.named(space, wanted)
            }
        }
    }

    fn named(&self, space: &Space, name: &str) -> Result<Option<TemplateId>> {
        let path = self.dir.join(space.names()).join(name);
        let Some(text) = read_if_there(&path)? else {
            return Ok(None);
        };
        text.trim().parse().map(Some).map_err(|_| Error::Damaged {
            why: format!("`{}` does not hold a template id", path.display()),
        })
    }

    /// Whether a template is referred to from there. A shared name is enough: servers from before there were projects, which may
    /// use the same store, write nothing else.
    fn is_in(&self, space: &Space, id: &TemplateId) -> Result<bool> {
        let owned = self.dir.join(space.owned()).join(id.as_str());
        Ok(owned.exists() || (*space == Space::Shared && !self.names_of(space, id)?.is_empty()))
    }

    /// All that is referred to from there.
    fn ids(&self, space: &Space) -> Result<BTreeSet<TemplateId>> {
        let owned = self.files(&space.owned())?;
        let mut ids: BTreeSet<TemplateId> = owned.iter().filter_map(|id| id.parse().ok()).collect();
        if *space == Space::Shared {
            ids.extend(self.names(space)?.into_values());
        }
        Ok(ids)
    }

    /// What each name in a space stands for.
    fn names(&self, space: &Space) -> Result<BTreeMap<String, TemplateId>> {
        let mut all = BTreeMap::new();
        for name in self.files(&space.names())? {
            if let Ok(Some(id)) = self.named(space, &name) {
                all.insert(name, id);
            }
        }
        Ok(all)
    }

    fn names_of(&self, space: &Space, id: &TemplateId) -> Result<Vec<String>> {
        let names = self.names(space)?.into_iter();
        Ok(names.filter(|(_, of)| of == id).map(|(name, _)| name).collect())
    }

    /// What each template is called from here: a name of this project hides everybody's.
    fn names_by_id(&self) -> Result<BTreeMap<TemplateId, Vec<String>>> {
        let mut names = self.names(&Space::Shared)?;
        names.extend(self.names(&self.space)?);
        let mut by_id: BTreeMap<TemplateId, Vec<String>> = BTreeMap::new();
        for (name, id) in names {
            by_id.entry(id).or_default().push(name);
        }
        Ok(by_id)
    }

    pub(super) fn cached_digests(&self, space: &Space) -> Result<BTreeSet<String>> {
        let part = space.cache();
        let mut digests = BTreeSet::new();
        for key in self.files(&part)? {
            digests
                .extend(read_if_there(&self.dir.join(&part).join(key))?.filter(|digest| is_digest(digest)));
        }
        Ok(digests)
    }

    /// Everybody's, and that of each project which has or had something here.
    pub(super) fn spaces(&self) -> Result<Vec<Space>> {
        let projects = self.files(Path::new("projects"))?;
        let projects = projects.iter().filter_map(|id| id.parse().ok()).map(Space::Of);
        Ok(std::iter::once(Space::Shared).chain(projects).collect())
    }
}

fn not_found(wanted: &str) -> Error {
    Error::NotFound {
        wanted: wanted.to_owned(),
    }
}
