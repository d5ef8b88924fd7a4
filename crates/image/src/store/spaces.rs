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

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use atoll_types::{Cursor, Page, ProjectId, TemplateId, TemplateManifest, Timestamp};

use super::{Listed, Templates, check_name, is_digest, read_if_there, sync_dir};
use crate::error::{Error, IoContext, Result};

/// How long a template stays that nothing is called by and nothing needs: its id may still be asked for.
const SUPERSEDED_FOR: Duration = Duration::from_secs(24 * 60 * 60);
/// How long what a step came to is kept for the next build.
const UNUSED_FOR: Duration = Duration::from_secs(7 * 24 * 60 * 60);

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

/// Who knows what is needed. Asked while the store is locked, before something is removed and after: whatever comes to need it in
/// between makes itself known first, and looks for it then.
pub trait Needs {
    fn needed(&self) -> Result<Needed>;
}

impl Needs for Needed {
    fn needed(&self) -> Result<Needed> {
        Ok(self.clone())
    }
}

impl<F: Fn() -> Result<Needed>> Needs for F {
    fn needed(&self) -> Result<Needed> {
        self()
    }
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

    /// Who has, or had, any of their own.
    pub fn projects(&self) -> Result<Vec<ProjectId>> {
        let projects = self.files(Path::new("projects"))?;
        Ok(projects
            .iter()
            .filter_map(|project| project.parse().ok())
            .collect())
    }

    /// Those that can be seen from here, newest first, behind one of them: so many, and of so many bytes of manifests, but one at
    /// least. No manifest is read for it; how many bytes those have comes along.
    pub fn page(&self, after: Option<&Cursor>, limit: usize, bytes: u64) -> Result<(Page<TemplateId>, u64)> {
        let mut ids: BTreeSet<TemplateId> = self.ids(&self.space)?;
        ids.extend(self.ids(&Space::Shared)?);
        let mut order = Vec::with_capacity(ids.len());
        for id in ids {
            let since = match self.since(&id)? {
                Some(since) => since,
                None => match self.known(&id)? {
                    Some(manifest) => manifest.created_at,
                    None => continue,
                },
            };
            order.push((Reverse(since), id));
        }
        order.sort();
        let after = after.map(|last| (Reverse(last.created_at), last.id.as_str()));
        let behind = order.partition_point(|(since, id)| Some((*since, id.as_str())) <= after);
        let (mut page, mut sum) = (Vec::new(), 0);
        let mut rest = order.into_iter().skip(behind).peekable();
        while let Some((_, id)) = rest.peek() {
            // What was deleted meanwhile has none.
            let size = fs::metadata(self.manifest_path(id)).map_or(0, |file| file.len());
            if page.len() >= limit || (!page.is_empty() && sum + size > bytes) {
                break;
            }
            sum += size;
            page.extend(rest.next());
        }
        let next = page.last().filter(|_| rest.peek().is_some());
        let next = next.map(|(Reverse(since), id)| Cursor {
            created_at: *since,
            id: id.to_string(),
        });
        let items = page.into_iter().map(|(_, id)| id).collect();
        Ok((Page { items, next }, sum))
    }

    /// What is wanted of these, or of all, one after the other: however many there are, one manifest is in memory at a time.
    pub fn gather<T>(
        &self,
        ids: Option<Vec<TemplateId>>,
        mut pick: impl FnMut(Listed) -> Option<T>,
    ) -> Result<Vec<T>> {
        let ids = match ids {
            Some(ids) => ids,
            None => self.page(None, usize::MAX, u64::MAX)?.0.items,
        };
        let names = self.names_by_id()?;
        let mut picked = Vec::new();
        for id in ids {
            if let Some(manifest) = self.known(&id)? {
                picked.extend(pick(self.listed(manifest, &names)?));
            }
        }
        Ok(picked)
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

    /// How much there is here: templates, their names, and what is cached.
    pub fn count(&self) -> Result<usize> {
        let mut count = 0;
        for part in [self.space.owned(), self.space.names(), self.space.cache()] {
            count += self.files(&part)?.len();
        }
        Ok(count)
    }

    /// The images of what is referred to from here, and what they lie on, each file with its size: templates, and what is cached.
    pub fn images(&self) -> Result<BTreeMap<String, u64>> {
        let mut digests = self.with_lower(self.digests(&self.space)?)?;
        if self.space != Space::Shared {
            // What everybody has below them costs nobody anything.
            let shared = self.with_lower(self.digests(&Space::Shared)?)?;
            digests.retain(|digest| !shared.contains(digest));
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
    pub fn delete(&self, wanted: &str, needed: &dyn Needs) -> Result<()> {
        let _lock = self.lock()?;
        let id = self.find_in(&self.space, wanted)?;
        let id = id.ok_or_else(|| not_found(wanted))?;
        let names = self.names_of(&self.space, &id)?;
        let by_id = wanted == id.as_str();
        if !by_id && names.len() > 1 {
            return self.remove_file(&self.space.names(), wanted);
        }
        if needed.needed()?.here.contains(&id) {
            return Err(Error::InUse {
                id: id.to_string(),
                by: " by running sandboxes".into(),
            });
        }
        self.disown(&self.space, &id)?;
        self.remove_unowned(vec![id], needed)?;
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
    pub fn prune(&self, needed: &dyn Needs) -> Result<Pruned> {
        self.remove_older(None, needed)
    }

    /// The same, of what has not been asked for in a while: builds that others have taken the names of, and steps that no build
    /// has come by. So that neither has to be pruned by hand.
    pub fn collect(&self, needed: &dyn Needs, now: Timestamp) -> Result<Pruned> {
        self.remove_older(Some(now), needed)
    }

    /// `None`: all, however young.
    fn remove_older(&self, now: Option<Timestamp>, needs: &dyn Needs) -> Result<Pruned> {
        let old = |since: Timestamp, kept_for: Duration| {
            let kept_for = i64::try_from(kept_for.as_millis()).unwrap_or(i64::MAX);
            now.is_none_or(|now| now.0.saturating_sub(since.0) >= kept_for)
        };
        let _lock = self.lock()?;
        let before = self.images()?;
        let needed = needs.needed()?;
        let mut pruned = Pruned::default();
        // Read once: a project may have thousands of both, and everybody waits for the lock.
        let named: BTreeSet<TemplateId> = self.names(&self.space)?.into_values().collect();
        for id in self.ids(&self.space)? {
            let made = self.since_in(&self.space, &id)?.unwrap_or(Timestamp(0));
            if old(made, SUPERSEDED_FOR) && !named.contains(&id) && !needed.here.contains(&id) {
                self.remove_file(&self.space.owned(), id.as_str())?;
                pruned.templates.push(id);
            }
        }
        let cache = self.space.cache();
        for key in self.files(&cache)? {
            if old(modified(&self.dir.join(&cache).join(&key))?, UNUSED_FOR) {
                self.remove_file(&cache, &key)?;
                pruned.cache_entries += 1;
            }
        }
        let all = self.manifests()?.into_iter().map(|manifest| manifest.id);
        self.remove_unowned(all.collect(), needs)?;
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

    /// Removes those of these manifests that nobody refers to and nobody needs. The caller holds the lock.
    fn remove_unowned(&self, ids: Vec<TemplateId>, needs: &dyn Needs) -> Result<()> {
        let (needed, spaces) = (needs.needed()?.anywhere, self.spaces()?);
        let mut removed = Vec::new();
        'next: for id in ids {
            if needed.contains(&id) {
                continue;
            }
            for space in &spaces {
                if self.is_in(space, &id)? {
                    continue 'next;
                }
            }
            let said = read_if_there(&self.manifest_path(&id))?;
            self.remove_file(Path::new("manifests"), &format!("{id}.json"))?;
            removed.extend(said.map(|said| (id, said)));
        }
        if removed.is_empty() {
            return Ok(());
        }
        let needed = needs.needed()?.anywhere;
        for (id, said) in removed.into_iter().filter(|(id, _)| needed.contains(id)) {
            self.write_file(Path::new("manifests"), &format!("{id}.json"), said.as_bytes())?;
        }
        Ok(())
    }

    /// A manifest as it is seen from here: made when it was made here, whoever made the same before.
    pub(super) fn as_seen(&self, mut manifest: TemplateManifest) -> Result<TemplateManifest> {
        if let Some(since) = self.since(&manifest.id)? {
            manifest.created_at = since;
        }
        Ok(manifest)
    }

    /// Since when a template is here, as its reference says.
    fn since(&self, id: &TemplateId) -> Result<Option<Timestamp>> {
        for space in [&self.space, &Space::Shared] {
            if let Some(since) = self.since_in(space, id)? {
                return Ok(Some(since));
            }
        }
        Ok(None)
    }

    fn since_in(&self, space: &Space, id: &TemplateId) -> Result<Option<Timestamp>> {
        let since = read_if_there(&self.dir.join(space.owned()).join(id.as_str()))?;
        Ok(since.and_then(|text| text.trim().parse().ok()).map(Timestamp))
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

    /// The images of what is referred to from there: templates, and what is cached.
    fn digests(&self, space: &Space) -> Result<BTreeSet<String>> {
        let mut digests = self.cached_digests(space)?;
        for id in self.ids(space)? {
            digests.extend(self.known(&id)?.map(|manifest| manifest.digest));
        }
        Ok(digests)
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

/// When a file was written, or [`Templates::cached`] came by it.
fn modified(path: &Path) -> Result<Timestamp> {
    let modified = fs::metadata(path)
        .and_then(|metadata| metadata.modified())
        .doing("look at", path)?;
    let since = modified.duration_since(UNIX_EPOCH).unwrap_or_default();
    Ok(Timestamp(i64::try_from(since.as_millis()).unwrap_or(i64::MAX)))
}

fn not_found(wanted: &str) -> Error {
    Error::NotFound {
        wanted: wanted.to_owned(),
    }
}
