//! COPY and ADD: from one tree to another. The build context is a tree too, so a source cannot lead outside of it.

use std::ffi::OsString;
use std::io::Read;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use atoll_archive::format;
use sha2::{Digest, Sha256};

use super::pattern::{Ignore, glob};
use crate::content::Content;
use crate::error::{Error, IoContext, Result, show};
use crate::layer::{self, Whiteouts};
use crate::progress::Job;
use crate::store::Scratch;
use crate::tree::{Entries, Kind, LastLink, Limits, Meta, Mtime, NodeId, Tree};

/// Reads the names and sizes of a build context; symbolic links stay links, contents stay on disk.
///
/// Of the way down only one path is in memory, and of each directory on it the names that are still to be entered: the
/// context is hostile, and a whole path for each directory would be its to multiply.
pub(super) fn load_context(dir: &Path, ignore: &Ignore, job: &Job) -> Result<Tree> {
    let limits = Limits::default();
    let mut tree = Tree::new(limits);
    let mut here = dir.to_owned();
    let mut parts: Vec<Vec<u8>> = Vec::new();
    let mut room = limits.memory;
    let mut load = |tree: &mut Tree, here: &Path, parts: &mut Vec<Vec<u8>>| {
        load_directory(tree, here, parts, ignore, &mut room, job)
    };
    let mut to_enter = vec![load(&mut tree, &here, &mut parts)?];
    while let Some(names) = to_enter.last_mut() {
        let Some(name) = names.pop() else {
            to_enter.pop();
            parts.pop();
            here.pop();
            continue;
        };
        here.push(&name);
        parts.push(name.into_vec());
        if parts.len() as u64 > limits.depth {
            return Err(Error::Limit {
                what: "the depth of directories in the build context".into(),
                limit: limits.depth,
            });
        }
        to_enter.push(load(&mut tree, &here, &mut parts)?);
    }
    Ok(tree)
}

/// Takes in one directory, whose way from the root is `above`; gives the names of those below to go into. `room` is what
/// is left for the paths of files, each of which is kept to be opened later.
fn load_directory(
    tree: &mut Tree,
    dir: &Path,
    above: &mut Vec<Vec<u8>>,
    ignore: &Ignore,
    room: &mut u64,
    job: &Job,
) -> Result<Vec<OsString>> {
    let mut to_enter = Vec::new();
    for entry in std::fs::read_dir(dir).doing("list", dir)? {
        job.check()?;
        let entry = entry.doing("list", dir)?;
        let (path, name) = (entry.path(), entry.file_name());
        above.push(name.as_bytes().to_vec());
        let out = {
            let borrowed: Vec<&[u8]> = above.iter().map(Vec::as_slice).collect();
            ignore.leaves_out(&borrowed)
        };
        let stat = entry.metadata().doing("read", &path)?;
        let kind = if stat.is_dir() {
            if !out || ignore.has_exceptions() {
                to_enter.push(name);
            }
            Some(Kind::Directory(Entries::new()))
        } else if stat.is_file() {
            *room = room
                .checked_sub(path.as_os_str().len() as u64)
                .ok_or_else(|| Error::Limit {
                    what: "the memory for the paths of the build context".into(),
                    limit: Limits::default().memory,
                })?;
            Some(Kind::File(Content::unopened(&path, stat.len())))
        } else if stat.is_symlink() {
            let target = std::fs::read_link(&path).doing("read", &path)?;
            Some(Kind::Symlink(target.as_os_str().as_bytes().into()))
        } else {
            None
        };
        if let Some(kind) = kind.filter(|_| !out) {
            let meta = Meta {
                mode: (stat.permissions().mode() & 0o7777) as u16,
                mtime: Mtime {
                    secs: u64::try_from(stat.mtime()).unwrap_or(0),
                    nanos: u32::try_from(stat.mtime_nsec()).unwrap_or(0),
                },
                ..Meta::default()
            };
            put_plain(tree, above, meta, kind)?;
        }
        above.pop();
    }
    Ok(to_enter)
}

/// Puts without following links: the context has just been read, so its directories are directories.
fn put_plain(tree: &mut Tree, parts: &[Vec<u8>], meta: Meta, kind: Kind) -> Result<()> {
    let mut dir = Tree::ROOT;
    let (last, above) = parts.split_last().unwrap_or((const { &Vec::new() }, &[]));
    for part in above {
        let known = tree
            .entries(dir)
            .and_then(|entries| entries.get(part.as_slice()))
            .copied();
        dir = match known.filter(|&id| tree.entries(id).is_some()) {
            Some(id) => id,
            None => tree.put_in(dir, part, Meta::root(0o755), Kind::Directory(Entries::new()))?,
        };
    }
    tree.put_in(dir, last, meta, kind).map(drop)
}

/// How copied files are changed on the way.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Change {
    pub(super) owner: Option<(u32, u32)>,
    pub(super) mode: Option<u16>,
}

impl Change {
    fn apply(self, meta: &mut Meta) {
        if let Some((uid, gid)) = self.owner {
            (meta.uid, meta.gid) = (uid, gid);
        }
        if let Some(mode) = self.mode {
            meta.mode = mode;
        }
    }
}

/// One thing to put somewhere: decided first, so that the cache key is known before anything changes.
pub(super) struct Planned {
    /// Absolute, in the destination.
    path: Vec<u8>,
    meta: Meta,
    kind: Kind,
    /// The node it is a hard link of, in the source.
    node: Option<NodeId>,
}

/// What a copy will do. Each item has its whole path, and how deep and how many a hostile image may say: so they are
/// weighed as they are added.
pub(super) struct Plan {
    items: Vec<Planned>,
    weight: u64,
    most: u64,
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            items: Vec::new(),
            weight: 0,
            most: Limits::default().memory,
        }
    }
}

impl Plan {
    fn charge(&mut self, bytes: usize) -> Result<()> {
        self.weight = self.weight.saturating_add(bytes as u64);
        match self.weight > self.most {
            true => Err(Error::Limit {
                what: "the memory for the paths of one COPY or ADD".into(),
                limit: self.most,
            }),
            false => Ok(()),
        }
    }

    fn charge_node(&mut self, from: &Tree, id: NodeId, path: usize) -> Result<()> {
        let node = from.node(id);
        let xattrs: usize = node
            .meta
            .xattrs
            .iter()
            .map(|(name, value)| 64 + name.len() + value.len())
            .sum();
        let target = match &node.kind {
            Kind::Symlink(target) => target.len(),
            Kind::Directory(_) | Kind::File(_) | Kind::Fifo => 0,
        };
        self.charge(size_of::<Planned>() + path + xattrs + target)
    }

    pub(super) fn push(&mut self, item: Planned) {
        self.items.push(item);
    }
}

/// What copying `sources` of `from` to `destination` (absolute) means. `sources` are patterns; `contents` of a directory
/// are copied, not the directory itself.
pub(super) fn plan(
    from: &Tree,
    sources: &[String],
    destination: &str,
    into: &Tree,
    change: Change,
    planned: &mut Plan,
) -> Result<()> {
    let mut found = Vec::new();
    for source in sources {
        let paths = glob(from, source.as_bytes())?;
        if paths.is_empty() {
            return Err(Error::Invalid(format!(
                "`{source}` matches nothing in the build context (or .dockerignore leaves it out)"
            )));
        }
        found.extend(paths);
    }
    let existing = into.lookup(destination.as_bytes(), LastLink::Follow)?;
    let to_directory = destination.ends_with('/') || existing.is_some_and(|id| into.entries(id).is_some());
    if found.len() > 1 && !to_directory && !destination.ends_with('/') {
        return Err(Error::Invalid(format!(
            "several sources need a directory to go to; write `{destination}/`"
        )));
    }
    for path in found {
        let Some(node) = from.lookup(&path, LastLink::Follow)? else {
            continue;
        };
        let base = destination.trim_end_matches('/').as_bytes().to_vec();
        if from.entries(node).is_some() {
            add_tree(from, node, base, change, planned)?;
        } else {
            let name = path.rsplit(|&b| b == b'/').next().unwrap_or_default();
            let target = match to_directory {
                true => [&base, &b"/"[..], name].concat(),
                false => base,
            };
            planned.charge_node(from, node, target.len())?;
            planned.push(one(from, node, target, change));
        }
    }
    Ok(())
}

/// All of a tree, as ADD unpacks it.
pub(super) fn plan_all(from: &Tree, destination: &str, change: Change, planned: &mut Plan) -> Result<()> {
    let base = destination.trim_end_matches('/').as_bytes().to_vec();
    add_tree(from, Tree::ROOT, base, change, planned)
}

pub(super) fn plan_file(path: String, text: String, change: Change) -> Planned {
    let mut meta = Meta::root(0o644);
    change.apply(&mut meta);
    Planned {
        path: path.into_bytes(),
        meta,
        kind: Kind::File(Content::bytes(text.into_bytes())),
        node: None,
    }
}

fn add_tree(from: &Tree, root: NodeId, base: Vec<u8>, change: Change, planned: &mut Plan) -> Result<()> {
    planned.charge_node(from, root, base.len())?;
    let mut pending = vec![(root, base)];
    while let Some((id, path)) = pending.pop() {
        if let Some(entries) = from.entries(id) {
            for (name, child) in entries.iter().rev() {
                planned.charge_node(from, *child, path.len() + 1 + name.len())?;
                pending.push((*child, [&path, &b"/"[..], name].concat()));
            }
        }
        planned.push(one(from, id, path, change));
    }
    Ok(())
}

fn one(from: &Tree, id: NodeId, path: Vec<u8>, change: Change) -> Planned {
    let node = from.node(id);
    let mut meta = node.meta.clone();
    change.apply(&mut meta);
    let kind = match &node.kind {
        Kind::Directory(_) => Kind::Directory(Entries::new()),
        other => other.clone(),
    };
    if let Kind::Symlink(_) = kind {
        meta.mode = node.meta.mode;
    }
    Planned {
        path,
        meta,
        kind,
        node: Some(id),
    }
}

/// A digest of what is planned: everything but times.
pub(super) fn digest(planned: &Plan, job: &Job) -> Result<String> {
    let mut sha = Sha256::new();
    let mut buf = vec![0; 1 << 17];
    for item in &planned.items {
        job.check()?;
        let mut field = |bytes: &[u8]| {
            sha.update((bytes.len() as u64).to_le_bytes());
            sha.update(bytes);
        };
        field(&item.path);
        field(format!("{:o} {} {}", item.meta.mode, item.meta.uid, item.meta.gid).as_bytes());
        match &item.kind {
            Kind::Directory(_) => field(b"dir"),
            Kind::Fifo => field(b"fifo"),
            Kind::Symlink(target) => field(target),
            Kind::File(content) => {
                sha.update(content.len().to_le_bytes());
                content.for_each_piece(&mut buf, |piece| {
                    sha.update(piece);
                    Ok(())
                })?;
            }
        }
    }
    Ok(hex::encode(sha.finalize()))
}

/// Carries the plan out. An existing directory keeps its metadata, unless the copy sets an owner or a mode.
pub(super) fn apply(into: &mut Tree, planned: Plan, change: Change) -> Result<()> {
    let mut linked: std::collections::HashMap<NodeId, NodeId> = std::collections::HashMap::new();
    for Planned {
        path,
        meta,
        kind,
        node,
    } in planned.items
    {
        if let Kind::Directory(_) = kind {
            if let Some(existing) = into.lookup(&path, LastLink::Follow)? {
                if into.entries(existing).is_none() {
                    return Err(Error::Path {
                        path: show(&path),
                        why: "a directory cannot be copied over a file",
                    });
                }
                let root_of_copy = change.owner.is_none() && change.mode.is_none();
                if !root_of_copy && !path.is_empty() {
                    change.apply(into.meta_mut(existing));
                }
                continue;
            }
            into.put(&path, meta, kind)?;
            continue;
        }
        // A file goes to where a symbolic link to a directory points, but replaces a link that stands in its place.
        match node.and_then(|node| linked.get(&node)) {
            Some(&first) => into.link(&path, first)?,
            None => {
                let made = into.put(&path, meta, kind)?;
                if let Some(node) = node {
                    linked.insert(node, made);
                }
            }
        }
    }
    Ok(())
}

/// The files of a local archive that ADD is to unpack; `None` if it is not one.
pub(super) fn read_archive(
    content: &Content,
    scratch: &Scratch,
    number: usize,
    job: &Job,
) -> Result<Option<Tree>> {
    let mut head = [0; 512];
    let have = head.len().min(usize::try_from(content.len()).unwrap_or(512));
    content.read_at(&mut head[..have], 0)?;
    let plain = if head.starts_with(&[0x1f, 0x8b]) {
        let reader = flate2::read::MultiGzDecoder::new(content.opened()?.reader());
        decompress(reader, scratch, number, job)?
    } else if head.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]) {
        let reader = zstd::Decoder::new(content.opened()?.reader()).doing("decompress", content.path())?;
        decompress(reader, scratch, number, job)?
    } else if head.starts_with(b"BZh") || head.starts_with(&[0xfd, b'7', b'z', b'X', b'Z']) {
        return Err(Error::Invalid(format!(
            "ADD cannot unpack `{}`: only tar, tar.gz and tar.zst are supported; decompress it first, or use COPY to take it as it is",
            content.path().display()
        )));
    } else {
        Some(content.opened()?)
    };
    let Some(plain) = plain.filter(|plain| plain.len() >= 512) else {
        return Ok(None);
    };
    plain.read_at(&mut head, 0)?;
    if !format::has_magic(&head) {
        return Ok(None);
    }
    let mut tree = Tree::default();
    layer::apply(&mut tree, plain, Whiteouts::None, |_| job.check())?;
    Ok(Some(tree))
}

/// `None` when it does not decompress: then it is no archive, and ADD takes it as it is.
fn decompress(mut from: impl Read, scratch: &Scratch, number: usize, job: &Job) -> Result<Option<Content>> {
    let limit = Limits::default().bytes;
    let path = scratch.path().join(format!("add-{number}.tar"));
    let mut out = std::fs::File::create(&path).doing("write", &path)?;
    let mut buf = vec![0; 1 << 17];
    let mut total = 0;
    loop {
        job.check()?;
        let n = match from.read(&mut buf) {
            Ok(0) => break,
            Ok(n) => n,
            Err(_) => return Ok(None),
        };
        total += n as u64;
        if total > limit {
            return Err(Error::Limit {
                what: "the size of an unpacked archive".into(),
                limit,
            });
        }
        std::io::Write::write_all(&mut out, &buf[..n]).doing("write", &path)?;
    }
    Content::whole_file(&path).map(Some)
}

/// `user[:group]` by name or number, as the image's own files say.
pub(super) fn owner(tree: &Tree, text: &str) -> Result<(u32, u32)> {
    let (user, group) = match text.split_once(':') {
        Some((user, group)) => (user, Some(group)),
        None => (text, None),
    };
    let find = |file: &str, name: &str, id_at: usize| -> Result<Option<Vec<String>>> {
        let bytes = tree.read(file.as_bytes(), 16 << 20)?.unwrap_or_default();
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let found = text
            .lines()
            .map(|line| line.split(':').map(str::to_owned).collect::<Vec<_>>())
            .find(|fields| fields.first().is_some_and(|first| first == name) && fields.len() > id_at);
        Ok(found)
    };
    let unknown =
        |what: &str, name: &str| Error::Invalid(format!("the image has no {what} `{name}`; give a number"));
    let number = |text: &str| text.parse::<u32>().ok();
    let (uid, own_group) = match number(user) {
        Some(uid) => (uid, uid),
        None => {
            let fields = find("/etc/passwd", user, 3)?.ok_or_else(|| unknown("user", user))?;
            match (number(&fields[2]), number(&fields[3])) {
                (Some(uid), Some(gid)) => (uid, gid),
                _ => return Err(unknown("user", user)),
            }
        }
    };
    let gid = match group {
        None => own_group,
        Some(group) => match number(group) {
            Some(gid) => gid,
            None => find("/etc/group", group, 2)?
                .and_then(|fields| number(&fields[2]))
                .ok_or_else(|| unknown("group", group))?,
        },
    };
    Ok((uid, gid))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 100 files below 100 directories with long names: 25 KB each as whole paths.
    fn deep() -> Tree {
        let mut tree = Tree::default();
        let mut dir = Tree::ROOT;
        let put = |tree: &mut Tree, dir, name: &[u8], kind| tree.put_in(dir, name, Meta::root(0o755), kind);
        for _ in 0..100 {
            dir = put(&mut tree, dir, &[b'd'; 255], Kind::Directory(Entries::new())).unwrap();
        }
        for index in 0..100 {
            put(
                &mut tree,
                dir,
                format!("{index}").as_bytes(),
                Kind::File(Content::bytes(Vec::new())),
            )
            .unwrap();
        }
        tree
    }

    #[test]
    fn a_plan_is_weighed() {
        let tree = deep();
        let mut usual = Plan::default();
        plan_all(&tree, "/to", Change::default(), &mut usual).unwrap();
        assert_eq!(usual.items.len(), 201);
        let paths: usize = usual.items.iter().map(|item| item.path.len()).sum();
        assert!(usual.weight > paths as u64 && paths > 3 << 20);

        let mut small = Plan {
            most: 1 << 20,
            ..Plan::default()
        };
        let error = plan_all(&tree, "/to", Change::default(), &mut small).unwrap_err();
        assert!(error.to_string().contains("memory for the paths"), "{error}");
        let held: usize = small.items.iter().map(|item| item.path.len()).sum();
        assert!(held <= 1 << 20);
        let error = plan(&tree, &["/".into()], "/to", &tree, Change::default(), &mut small).unwrap_err();
        assert!(error.to_string().contains("memory for the paths"), "{error}");
    }

    #[test]
    fn a_context_may_not_be_endlessly_deep() {
        let dir = tempfile::tempdir().unwrap();
        let job = Job::new(std::sync::Arc::new(crate::progress::Quiet));
        let inner = dir.path().join("a/".repeat(255));
        std::fs::create_dir_all(&inner).unwrap();
        std::fs::write(inner.join("file"), "x").unwrap();
        let tree = load_context(dir.path(), &Ignore::default(), &job).unwrap();
        let file = format!("{}file", "a/".repeat(255));
        assert!(tree.lookup(file.as_bytes(), LastLink::Keep).unwrap().is_some());
        std::fs::create_dir_all(inner.join("a/a")).unwrap();
        let error = load_context(dir.path(), &Ignore::default(), &job).unwrap_err();
        assert!(error.to_string().contains("depth"), "{error}");
    }
}
