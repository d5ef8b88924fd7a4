//! The finishing touches that make a Debian root filesystem a sandbox's computer: a normal user with sudo, its own name
//! and hosts, nothing of the machine that it was built on. All edits happen in the tree; no program runs.

use crate::content::Content;
use crate::error::Result;
use crate::tree::{Kind, LastLink, Meta, Mtime, NodeId, Tree};

/// The user that commands run as.
pub(crate) const USER: &str = "user";
pub(crate) const USER_ID: u32 = 1000;
pub(crate) const HOME: &str = "/home/user";
pub(crate) const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
const HOSTNAME: &str = "atoll";
const MAX_CONFIG: u64 = 16 << 20;

pub(crate) fn finish(tree: &mut Tree, built_after: Mtime) -> Result<()> {
    forget_the_builder(tree)?;
    write(tree, "/etc/hostname", 0o644, &format!("{HOSTNAME}\n"))?;
    write(
        tree,
        "/etc/hosts",
        0o644,
        &format!("127.0.0.1 localhost {HOSTNAME}\n::1 localhost ip6-localhost ip6-loopback\n"),
    )?;
    write(tree, "/etc/resolv.conf", 0o644, "")?;
    write(tree, "/etc/machine-id", 0o444, "")?;
    write(tree, "/etc/default/locale", 0o644, "LANG=C.UTF-8\n")?;
    allow_pip(tree)?;
    add_user(tree)?;
    add_yarn(tree)?;
    open_to_user(tree)?;
    settle_times(tree, built_after);
    Ok(())
}

/// Logs, caches and dates that differ from build to build.
fn forget_the_builder(tree: &mut Tree) -> Result<()> {
    for dir in [
        "/var/lib/apt/lists",
        "/var/cache/apt",
        "/var/cache/ldconfig",
        "/tmp",
        "/var/tmp",
        "/run",
    ] {
        tree.clear(dir.as_bytes())?;
    }
    for path in [
        "/var/cache/debconf/templates.dat-old",
        "/var/cache/debconf/config.dat-old",
    ] {
        tree.remove(path.as_bytes())?;
    }
    for (path, id) in tree.walk() {
        let is_file = matches!(tree.node(id).kind, Kind::File(_));
        let backup = [
            &b"/etc/passwd-"[..],
            b"/etc/group-",
            b"/etc/shadow-",
            b"/etc/gshadow-",
        ];
        if is_file && path.starts_with(b"/var/log/") || backup.contains(&&*path) {
            tree.remove(&path)?;
        }
    }
    edit(tree, "/etc/shadow", |line| {
        // The third field is the day of the last change of the password, that is, of the build.
        let mut fields: Vec<&str> = line.split(':').collect();
        if let Some(day) = fields.get_mut(2) {
            *day = "20000";
        }
        fields.join(":")
    })
}

/// In a disposable computer `pip install` may touch the system's Python; Debian's marker only gets in the way.
fn allow_pip(tree: &mut Tree) -> Result<()> {
    let Some(lib) = tree.lookup(b"/usr/lib", LastLink::Follow)? else {
        return Ok(());
    };
    let pythons: Vec<Vec<u8>> = tree
        .entries(lib)
        .into_iter()
        .flat_map(|entries| entries.keys())
        .filter(|name| name.starts_with(b"python3."))
        .map(|name| [b"/usr/lib/", &**name, b"/EXTERNALLY-MANAGED"].concat())
        .collect();
    pythons.iter().try_for_each(|path| tree.remove(path))
}

fn add_user(tree: &mut Tree) -> Result<()> {
    let has = |tree: &Tree, file: &str, prefix: String| -> Result<bool> {
        let text = tree.read(file.as_bytes(), MAX_CONFIG)?.unwrap_or_default();
        Ok(text
            .split(|&b| b == b'\n')
            .any(|line| line.starts_with(prefix.as_bytes())))
    };
    if has(tree, "/etc/passwd", format!("{USER}:"))? {
        return Ok(());
    }
    append(
        tree,
        "/etc/passwd",
        0o644,
        &format!("{USER}:x:{USER_ID}:{USER_ID}::{HOME}:/bin/bash\n"),
    )?;
    append(tree, "/etc/group", 0o644, &format!("{USER}:x:{USER_ID}:\n"))?;
    append(
        tree,
        "/etc/shadow",
        0o640,
        &format!("{USER}:!:20000:0:99999:7:::\n"),
    )?;
    append(tree, "/etc/gshadow", 0o640, &format!("{USER}:!::\n"))?;
    for (file, members_at) in [("/etc/group", 3), ("/etc/gshadow", 3)] {
        edit(tree, file, |line| {
            let fields: Vec<&str> = line.split(':').collect();
            match fields[..] {
                ["sudo", .., members] if fields.len() == members_at + 1 => {
                    let comma = if members.is_empty() { "" } else { "," };
                    format!("{line}{comma}{USER}")
                }
                _ => line.to_owned(),
            }
        })?;
    }
    if tree.lookup(b"/etc/sudoers.d", LastLink::Follow)?.is_some() {
        write(
            tree,
            "/etc/sudoers.d/user",
            0o440,
            &format!("{USER} ALL=(ALL:ALL) NOPASSWD: ALL\n"),
        )?;
    }
    make_home(tree)
}

/// The home directory, with what every new user gets.
fn make_home(tree: &mut Tree) -> Result<()> {
    let home = tree.put(
        HOME.as_bytes(),
        Meta::root(0o755).owned(USER_ID, USER_ID),
        Kind::Directory(Default::default()),
    )?;
    let skeleton: Vec<(Box<[u8]>, NodeId)> = match tree.lookup(b"/etc/skel", LastLink::Follow)? {
        Some(dir) => tree
            .entries(dir)
            .into_iter()
            .flatten()
            .map(|(name, id)| (name.clone(), *id))
            .collect(),
        None => Vec::new(),
    };
    for (name, id) in skeleton {
        let node = tree.node(id).clone();
        if let Kind::File(_) = node.kind {
            tree.put_in(home, &name, node.meta.owned(USER_ID, USER_ID), node.kind)?;
        }
    }
    Ok(())
}

/// Corepack comes with npm and knows where Yarn is to be had, which it fetches when it is first used: Debian's own package
/// brings 70 others.
fn add_yarn(tree: &mut Tree) -> Result<()> {
    const COREPACK: &str = "/usr/share/nodejs/corepack/dist/yarn.js";
    if tree.lookup(COREPACK.as_bytes(), LastLink::Keep)?.is_some() {
        tree.put_symlink(b"/usr/local/bin/yarn", COREPACK.as_bytes())?;
    }
    Ok(())
}

/// Where the user installs things for all to find (`npm install -g`, `pip install`) and keeps projects, without sudo. As at E2B,
/// anybody may write there: whoever is in the sandbox may be root in it.
fn open_to_user(tree: &mut Tree) -> Result<()> {
    const ANYBODY: u16 = 0o777;
    tree.make_dirs(b"/usr/local/bin", &Meta::root(0o755))?;
    tree.make_dirs(b"/usr/local/lib", &Meta::root(0o755))?;
    for (path, id) in tree.walk() {
        let below = path == b"/usr/local" || path.starts_with(b"/usr/local/");
        if below && matches!(tree.node(id).kind, Kind::Directory(_)) {
            tree.meta_mut(id).mode = ANYBODY;
        }
    }
    let owned = Meta::root(ANYBODY).owned(USER_ID, USER_ID);
    tree.put(b"/code", owned, Kind::Directory(Default::default()))?;
    Ok(())
}

/// What the build itself wrote gets the time of the newest file that it only unpacked, so that two builds of the same
/// packages are the same image. Times of unpacked files stay: compiled Python refers to them.
fn settle_times(tree: &mut Tree, built_after: Mtime) {
    let all = tree.walk();
    let newest = all
        .iter()
        .map(|(_, id)| tree.node(*id).meta.mtime)
        .filter(|time| *time < built_after)
        .max()
        .unwrap_or_default();
    for (_, id) in all {
        let time = &mut tree.meta_mut(id).mtime;
        if *time >= built_after || *time == Mtime::default() {
            *time = newest;
        }
    }
}

fn write(tree: &mut Tree, path: &str, mode: u16, text: &str) -> Result<()> {
    tree.put_file(path.as_bytes(), Meta::root(mode), Content::bytes(text.as_bytes()))
        .map(drop)
}

fn append(tree: &mut Tree, path: &str, mode: u16, text: &str) -> Result<()> {
    let (meta, mut bytes) = existing(tree, path)?.unwrap_or((Meta::root(mode), Vec::new()));
    bytes.extend_from_slice(text.as_bytes());
    tree.put_file(path.as_bytes(), meta, Content::bytes(bytes))
        .map(drop)
}

fn edit(tree: &mut Tree, path: &str, line: impl Fn(&str) -> String) -> Result<()> {
    let Some((meta, bytes)) = existing(tree, path)? else {
        return Ok(());
    };
    let text = String::from_utf8_lossy(&bytes);
    let edited: String = text.lines().map(|old| line(old) + "\n").collect();
    tree.put_file(path.as_bytes(), meta, Content::bytes(edited.into_bytes()))
        .map(drop)
}

fn existing(tree: &Tree, path: &str) -> Result<Option<(Meta, Vec<u8>)>> {
    let Some(id) = tree.lookup(path.as_bytes(), LastLink::Follow)? else {
        return Ok(None);
    };
    let bytes = tree.read(path.as_bytes(), MAX_CONFIG)?.unwrap_or_default();
    Ok(Some((tree.node(id).meta.clone(), bytes)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_debian_root_becomes_a_computer_with_a_user() {
        let mut tree = Tree::default();
        for (path, text) in [
            ("/etc/passwd", "root:x:0:0:root:/root:/bin/bash\n"),
            ("/etc/group", "root:x:0:\nsudo:x:27:\n"),
            ("/etc/gshadow", "root:*::\nsudo:*::\n"),
            ("/etc/shadow", "root:*:20772:0:99999:7:::\n"),
            ("/etc/skel/.bashrc", "# skel"),
            ("/etc/sudoers.d/README", ""),
            ("/var/log/dpkg.log", "today"),
            ("/usr/lib/python3.13/EXTERNALLY-MANAGED", ""),
            ("/usr/local/share/fonts/README", ""),
            ("/usr/share/nodejs/corepack/dist/yarn.js", ""),
        ] {
            write(&mut tree, path, 0o644, text).unwrap();
        }
        let package_time = Mtime { secs: 500, nanos: 0 };
        let skel = tree
            .lookup(b"/etc/skel/.bashrc", LastLink::Keep)
            .unwrap()
            .unwrap();
        tree.meta_mut(skel).mtime = package_time;
        finish(&mut tree, Mtime { secs: 1000, nanos: 0 }).unwrap();

        let read =
            |path: &str| String::from_utf8(tree.read(path.as_bytes(), 9999).unwrap().unwrap()).unwrap();
        assert!(read("/etc/passwd").ends_with("user:x:1000:1000::/home/user:/bin/bash\n"));
        assert_eq!(read("/etc/group"), "root:x:0:\nsudo:x:27:user\nuser:x:1000:\n");
        assert_eq!(read("/etc/gshadow"), "root:*::\nsudo:*::user\nuser:!::\n");
        assert!(read("/etc/shadow").starts_with("root:*:20000:"));
        assert_eq!(read("/home/user/.bashrc"), "# skel");
        assert_eq!(read("/etc/sudoers.d/user"), "user ALL=(ALL:ALL) NOPASSWD: ALL\n");
        let sudoers = tree
            .lookup(b"/etc/sudoers.d/user", LastLink::Keep)
            .unwrap()
            .unwrap();
        let meta = &tree.node(sudoers).meta;
        assert_eq!((meta.mode, meta.uid, meta.mtime), (0o440, 0, package_time));
        let meta = |path: &str| {
            let found = tree.lookup(path.as_bytes(), LastLink::Keep).unwrap();
            let meta = &tree.node(found.expect(path)).meta;
            (meta.mode, meta.uid)
        };
        for open in [
            "/usr/local",
            "/usr/local/bin",
            "/usr/local/lib",
            "/usr/local/share/fonts",
        ] {
            assert_eq!(meta(open), (0o777, 0), "{open}");
        }
        assert_eq!(meta("/code"), (0o777, USER_ID));
        assert_eq!(meta("/usr/local/share/fonts/README"), (0o644, 0));
        assert_eq!(meta("/usr/share"), (0o755, 0));
        let yarn = tree.lookup(b"/usr/local/bin/yarn", LastLink::Follow).unwrap();
        let corepack = tree
            .lookup(b"/usr/share/nodejs/corepack/dist/yarn.js", LastLink::Keep)
            .unwrap();
        assert_eq!(yarn, corepack);
        for gone in ["/var/log/dpkg.log", "/usr/lib/python3.13/EXTERNALLY-MANAGED"] {
            assert!(tree.lookup(gone.as_bytes(), LastLink::Keep).unwrap().is_none());
        }
    }
}
