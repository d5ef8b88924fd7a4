//! A filesystem tree in memory: names and metadata, with contents by reference.
//!
//! Templates are edited here and nowhere else. What must hold: no operation touches the host's filesystem, so no name,
//! link or `..` in a hostile layer can reach outside; symbolic links are followed inside the tree only and `..` stops at
//! its root; every growth is counted against [`Limits`].

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use crate::content::Content;
use crate::erofs::Stack;
use crate::error::{Error, Result, show};

pub(crate) const MAX_NAME: usize = 255;
pub(crate) const MAX_SYMLINK: usize = 4095;
const MAX_LINK_HOPS: u32 = 40;

/// What a tree may grow to. The defaults hold any honest image.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Files, directories and links ever added, removed ones included.
    pub entries: u64,
    /// Levels of directories.
    pub depth: u64,
    /// Sum of the sizes of all files ever added. Holes count: an image has none.
    pub bytes: u64,
    /// Memory for names, link targets and attributes ever added.
    pub memory: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            entries: 2_000_000,
            depth: 256,
            bytes: 32 << 30,
            memory: 512 << 20,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(u32);

impl NodeId {
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

/// Modification time; before 1970 is 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Mtime {
    pub secs: u64,
    pub nanos: u32,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Meta {
    /// Permission bits with setuid, setgid and sticky: at most 0o7777.
    pub mode: u16,
    pub uid: u32,
    pub gid: u32,
    pub mtime: Mtime,
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

impl Meta {
    /// Owned by root, without a time.
    pub fn root(mode: u16) -> Self {
        Self {
            mode: mode & 0o7777,
            ..Self::default()
        }
    }

    #[must_use]
    pub fn owned(mut self, uid: u32, gid: u32) -> Self {
        (self.uid, self.gid) = (uid, gid);
        self
    }
}

pub type Entries = BTreeMap<Box<[u8]>, NodeId>;

#[derive(Debug, Clone)]
pub enum Kind {
    Directory(Entries),
    File(Content),
    Symlink(Box<[u8]>),
    Fifo,
}

#[derive(Debug, Clone)]
pub struct Node {
    pub meta: Meta,
    pub kind: Kind,
    /// The layer that last touched this node: an opaque whiteout spares what its own layer brought.
    layer: u32,
}

/// Whether a symbolic link at the end of a path is followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LastLink {
    Follow,
    Keep,
}

/// Nodes are never freed: a removed one is only unreachable. Two names for one node are hard links.
#[derive(Debug, Clone)]
pub struct Tree {
    /// The image that it was read from: what a layer with its changes would lie on.
    below: Option<Arc<Stack>>,
    nodes: Vec<Node>,
    layer: u32,
    limits: Limits,
    bytes: u64,
    memory: u64,
}

impl Default for Tree {
    fn default() -> Self {
        Self::new(Limits::default())
    }
}

impl Tree {
    pub const ROOT: NodeId = NodeId(0);

    pub fn new(limits: Limits) -> Self {
        let root = Node {
            meta: Meta::root(0o755),
            kind: Kind::Directory(Entries::new()),
            layer: 0,
        };
        Self {
            below: None,
            nodes: vec![root],
            layer: 0,
            limits,
            bytes: 0,
            memory: 0,
        }
    }

    pub(crate) fn below(&self) -> Option<&Arc<Stack>> {
        self.below.as_ref()
    }

    pub(crate) fn set_below(&mut self, image: Arc<Stack>) {
        self.below = Some(image);
    }

    pub fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.index()]
    }

    pub fn meta_mut(&mut self, id: NodeId) -> &mut Meta {
        &mut self.nodes[id.index()].meta
    }

    pub(crate) fn arena_len(&self) -> usize {
        self.nodes.len()
    }

    pub fn entries(&self, id: NodeId) -> Option<&Entries> {
        match &self.node(id).kind {
            Kind::Directory(entries) => Some(entries),
            Kind::File(_) | Kind::Symlink(_) | Kind::Fifo => None,
        }
    }

    fn entries_mut(&mut self, id: NodeId) -> &mut Entries {
        match &mut self.nodes[id.index()].kind {
            Kind::Directory(entries) => entries,
            Kind::File(_) | Kind::Symlink(_) | Kind::Fifo => unreachable!("callers hold ids of directories"),
        }
    }

    /// What `path` names, or `None` when nothing is there.
    pub fn lookup(&self, path: &[u8], last: LastLink) -> Result<Option<NodeId>> {
        let mut walk = Walk::new(path);
        while let Some(name) = walk.next_name() {
            match walk.step(self, &name, last == LastLink::Keep && walk.rest.is_empty(), path)? {
                Step::Moved => {}
                Step::Stay(node) => return Ok(Some(node)),
                Step::Missing => return Ok(None),
                Step::NotDirectory(node) if walk.rest.is_empty() => return Ok(Some(node)),
                Step::NotDirectory(_) => return Ok(None),
            }
        }
        Ok(Some(walk.here()))
    }

    /// The content of a small regular file, symbolic links followed.
    pub fn read(&self, path: &[u8], limit: u64) -> Result<Option<Vec<u8>>> {
        match self.lookup(path, LastLink::Follow)? {
            Some(id) => match &self.node(id).kind {
                Kind::File(content) => content.read_to_vec(limit).map(Some),
                Kind::Directory(_) | Kind::Symlink(_) | Kind::Fifo => Ok(None),
            },
            None => Ok(None),
        }
    }

    /// Makes `path` a directory with all its parents, following symbolic links; those that exist stay as they are.
    pub fn make_dirs(&mut self, path: &[u8], meta: &Meta) -> Result<NodeId> {
        let mut walk = Walk::new(path);
        while let Some(name) = walk.next_name() {
            match walk.step(self, &name, false, path)? {
                Step::Moved => {}
                Step::Missing => {
                    let parent = walk.here();
                    let made = self.attach(parent, &name, meta.clone(), Kind::Directory(Entries::new()))?;
                    walk.enter(made);
                }
                Step::Stay(_) | Step::NotDirectory(_) => {
                    return Err(Error::Path {
                        path: show(path),
                        why: "a part of it exists and is not a directory",
                    });
                }
            }
            if walk.stack.len() as u64 > self.limits.depth {
                return Err(Error::Limit {
                    what: format!("the depth of directories at `{}`", show(path)),
                    limit: self.limits.depth,
                });
            }
        }
        let layer = self.layer;
        for &dir in &walk.stack {
            self.nodes[dir.index()].layer = layer;
        }
        Ok(walk.here())
    }

    /// Puts `kind` at `path`, replacing what is there; parents are made as needed. A directory put where one already
    /// is keeps its entries and takes the new metadata.
    pub fn put(&mut self, path: &[u8], meta: Meta, kind: Kind) -> Result<NodeId> {
        let Some((parent, name)) = split_last(path) else {
            return match kind {
                Kind::Directory(_) => {
                    *self.meta_mut(Self::ROOT) = meta;
                    Ok(Self::ROOT)
                }
                Kind::File(_) | Kind::Symlink(_) | Kind::Fifo => Err(Error::Path {
                    path: show(path),
                    why: "the root must stay a directory",
                }),
            };
        };
        let parent = self.make_dirs(parent, &Meta::root(0o755))?;
        self.put_in(parent, name, meta, kind)
    }

    /// [`Tree::put`] of one name in a directory that is known.
    pub fn put_in(&mut self, parent: NodeId, name: &[u8], meta: Meta, kind: Kind) -> Result<NodeId> {
        check_name(name)?;
        if let Kind::Directory(_) = kind
            && let Some(&old) = self.entries(parent).and_then(|entries| entries.get(name))
            && self.entries(old).is_some()
        {
            self.charge(&meta, 0)?;
            let layer = self.layer;
            let node = &mut self.nodes[old.index()];
            (node.meta, node.layer) = (meta, layer);
            return Ok(old);
        }
        self.attach(parent, name, meta, kind)
    }

    pub fn put_file(&mut self, path: &[u8], meta: Meta, content: Content) -> Result<NodeId> {
        self.put(path, meta, Kind::File(content))
    }

    pub fn put_symlink(&mut self, path: &[u8], target: &[u8]) -> Result<NodeId> {
        self.put(path, Meta::root(0o777), Kind::Symlink(target.into()))
    }

    /// Gives `node` another name. Directories have one name only.
    pub fn link(&mut self, path: &[u8], node: NodeId) -> Result<()> {
        if self.entries(node).is_some() {
            return Err(Error::Path {
                path: show(path),
                why: "a hard link to a directory",
            });
        }
        let (parent, name) = split_last(path).ok_or_else(|| Error::Path {
            path: show(path),
            why: "the root must stay a directory",
        })?;
        let parent = self.make_dirs(parent, &Meta::root(0o755))?;
        self.link_in(parent, name, node)
    }

    pub(crate) fn link_in(&mut self, parent: NodeId, name: &[u8], node: NodeId) -> Result<()> {
        check_name(name)?;
        self.charge(&Meta::default(), name.len())?;
        self.nodes[node.index()].layer = self.layer;
        self.entries_mut(parent).insert(name.into(), node);
        Ok(())
    }

    /// Removes what `path` names, with everything below; links are removed, not followed. Nothing there: nothing done.
    pub fn remove(&mut self, path: &[u8]) -> Result<()> {
        let Some((parent, name)) = split_last(path) else {
            self.entries_mut(Self::ROOT).clear();
            return Ok(());
        };
        if let Some(parent) = self.lookup(parent, LastLink::Follow)?
            && self.entries(parent).is_some()
        {
            self.entries_mut(parent).remove(name);
        }
        Ok(())
    }

    /// Empties a directory.
    pub fn clear(&mut self, path: &[u8]) -> Result<()> {
        if let Some(dir) = self.lookup(path, LastLink::Follow)?
            && self.entries(dir).is_some()
        {
            self.entries_mut(dir).clear();
        }
        Ok(())
    }

    /// Everything reachable, parents before children, names in order. Hard links appear once per name.
    pub fn walk(&self) -> Vec<(Vec<u8>, NodeId)> {
        let mut all = Vec::new();
        let mut pending = vec![(Vec::new(), Self::ROOT)];
        while let Some((path, id)) = pending.pop() {
            if let Some(entries) = self.entries(id) {
                for (name, child) in entries.iter().rev() {
                    let mut child_path = path.clone();
                    child_path.push(b'/');
                    child_path.extend_from_slice(name);
                    pending.push((child_path, *child));
                }
            }
            all.push((path, id));
        }
        all
    }

    pub(crate) fn begin_layer(&mut self) {
        self.layer += 1;
    }

    /// Removes `name` from `parent` as a whiteout does: only what lower layers brought.
    pub(crate) fn whiteout(&mut self, parent: NodeId, name: &[u8]) {
        let Some(&child) = self.entries(parent).and_then(|entries| entries.get(name)) else {
            return;
        };
        if self.node(child).layer != self.layer {
            self.entries_mut(parent).remove(name);
        } else if self.entries(child).is_some() {
            self.opaque(child);
        }
    }

    /// Takes a directory of the layers below away from where it is. It is nowhere until [`Tree::place`].
    pub(crate) fn take(&mut self, path: &[u8]) -> Result<Option<NodeId>> {
        let Some((parent, name)) = split_last(path) else {
            return Ok(None);
        };
        let parent = self.lookup(parent, LastLink::Keep)?;
        let Some(parent) = parent.filter(|&id| self.entries(id).is_some()) else {
            return Ok(None);
        };
        let found = self
            .entries(parent)
            .and_then(|entries| entries.get(name))
            .copied();
        let found = found.filter(|&id| self.entries(id).is_some());
        if found.is_some() {
            self.entries_mut(parent).remove(name);
        }
        Ok(found)
    }

    /// Puts a directory that was taken under another name, in place of whatever lies there.
    pub(crate) fn place(&mut self, parent: NodeId, name: &[u8], meta: Meta, taken: NodeId) -> Result<()> {
        check_name(name)?;
        self.charge(&meta, name.len())?;
        let layer = self.layer;
        let node = &mut self.nodes[taken.index()];
        (node.meta, node.layer) = (meta, layer);
        self.entries_mut(parent).insert(name.into(), taken);
        Ok(())
    }

    /// Removes all that lower layers brought into `dir`.
    pub(crate) fn opaque(&mut self, dir: NodeId) {
        let mut pending = vec![dir];
        while let Some(dir) = pending.pop() {
            let Some(entries) = self.entries(dir) else {
                continue;
            };
            let (kept, gone): (Vec<_>, Vec<_>) = entries
                .iter()
                .map(|(name, id)| (name.clone(), *id))
                .partition(|(_, id)| self.node(*id).layer == self.layer);
            for (name, _) in gone {
                self.entries_mut(dir).remove(&name);
            }
            pending.extend(kept.into_iter().map(|(_, id)| id));
        }
    }

    /// Counts the memory of one more name: a node, its name or target, its attributes.
    fn charge(&mut self, meta: &Meta, text: usize) -> Result<()> {
        let attributes: usize = meta
            .xattrs
            .iter()
            .map(|(name, value)| 64 + name.len() + value.len())
            .sum();
        let cost = size_of::<Node>() + 48 + text + attributes;
        self.memory = self.memory.saturating_add(cost as u64);
        if self.memory > self.limits.memory {
            return Err(Error::Limit {
                what: "the memory for names, links and attributes".into(),
                limit: self.limits.memory,
            });
        }
        Ok(())
    }

    fn attach(&mut self, parent: NodeId, name: &[u8], meta: Meta, kind: Kind) -> Result<NodeId> {
        check_name(name)?;
        self.charge(&meta, name.len())?;
        match &kind {
            Kind::File(content) => {
                self.bytes = self.bytes.saturating_add(content.len());
                if self.bytes > self.limits.bytes {
                    return Err(Error::Limit {
                        what: "the size of all files together".into(),
                        limit: self.limits.bytes,
                    });
                }
            }
            Kind::Symlink(target)
                if target.is_empty() || target.len() > MAX_SYMLINK || target.contains(&0) =>
            {
                return Err(Error::Path {
                    path: show(name),
                    why: "a symbolic link's target must have 1 to 4095 bytes and no NUL",
                });
            }
            Kind::Symlink(target) => self.charge(&Meta::default(), target.len())?,
            Kind::Directory(_) | Kind::Fifo => {}
        }
        if self.nodes.len() as u64 >= self.limits.entries {
            return Err(Error::Limit {
                what: "the number of files".into(),
                limit: self.limits.entries,
            });
        }
        let id = NodeId(u32::try_from(self.nodes.len()).map_err(|_| Error::Limit {
            what: "the number of files".into(),
            limit: u64::from(u32::MAX),
        })?);
        let layer = self.layer;
        self.nodes.push(Node { meta, kind, layer });
        self.entries_mut(parent).insert(name.into(), id);
        Ok(id)
    }
}

fn check_name(name: &[u8]) -> Result<()> {
    let why = if name.is_empty() || name == b"." || name == b".." {
        "not a name"
    } else if name.len() > MAX_NAME {
        "a name of more than 255 bytes"
    } else if name.contains(&0) || name.contains(&b'/') {
        "a name with a NUL or a slash"
    } else {
        return Ok(());
    };
    Err(Error::Path {
        path: show(name),
        why,
    })
}

/// Parent and last name of a path; `None` for the root.
pub(crate) fn split_last(path: &[u8]) -> Option<(&[u8], &[u8])> {
    let end = path.iter().rposition(|&b| b != b'/')? + 1;
    let start = path[..end].iter().rposition(|&b| b == b'/').map_or(0, |i| i + 1);
    match &path[start..end] {
        b"." => split_last(&path[..start]),
        name => Some((&path[..start], name)),
    }
}

/// A position on the way down a path: the directories from the root to here and the names still to go.
struct Walk {
    stack: Vec<NodeId>,
    rest: VecDeque<Box<[u8]>>,
    hops: u32,
}

enum Step {
    Moved,
    /// The last name is a symbolic link that was not to be followed.
    Stay(NodeId),
    Missing,
    NotDirectory(NodeId),
}

impl Walk {
    fn new(path: &[u8]) -> Self {
        Self {
            stack: vec![Tree::ROOT],
            rest: names(path).collect(),
            hops: 0,
        }
    }

    fn here(&self) -> NodeId {
        self.stack.last().copied().unwrap_or(Tree::ROOT)
    }

    fn enter(&mut self, dir: NodeId) {
        self.stack.push(dir);
    }

    fn next_name(&mut self) -> Option<Box<[u8]>> {
        self.rest.pop_front()
    }

    fn step(&mut self, tree: &Tree, name: &[u8], keep_link: bool, path: &[u8]) -> Result<Step> {
        if name == b".." {
            if self.stack.len() > 1 {
                self.stack.pop();
            }
            return Ok(Step::Moved);
        }
        let Some(&child) = tree.entries(self.here()).and_then(|entries| entries.get(name)) else {
            return Ok(Step::Missing);
        };
        match &tree.node(child).kind {
            Kind::Directory(_) => self.enter(child),
            Kind::Symlink(_) if keep_link => return Ok(Step::Stay(child)),
            Kind::Symlink(target) => {
                self.hops += 1;
                if self.hops > MAX_LINK_HOPS {
                    return Err(Error::Path {
                        path: show(path),
                        why: "too many symbolic links on the way",
                    });
                }
                if target.first() == Some(&b'/') {
                    self.stack.truncate(1);
                }
                for name in names(target).rev() {
                    self.rest.push_front(name);
                }
            }
            Kind::File(_) | Kind::Fifo => return Ok(Step::NotDirectory(child)),
        }
        Ok(Step::Moved)
    }
}

fn names(path: &[u8]) -> impl DoubleEndedIterator<Item = Box<[u8]>> + '_ {
    path.split(|&b| b == b'/')
        .filter(|name| !name.is_empty() && *name != b".")
        .map(Into::into)
}
