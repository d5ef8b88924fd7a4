//! Many paths in little memory: each directory's name once, whatever lies below it.
//!
//! A path may have 32 KiB and a tree may have as many directories as it has inodes, so whole paths would cost the product
//! of the two. Here a directory is a number, known by the number of the one above it and its name there.

use std::collections::BTreeMap;
use std::ops::Bound;

/// The root of the tree.
const ROOT: u32 = 0;

/// The times of directories, to be set when all is made.
#[derive(Debug, Default)]
pub(crate) struct Times {
    root: Option<(i64, u32)>,
    /// The path that came last, with the end and the number of each directory on it: the next one shares most of them.
    last: (Vec<u8>, Vec<(usize, u32)>),
    /// By the number of the one above and the name there.
    below: BTreeMap<(u32, Box<[u8]>), Known>,
}

#[derive(Debug)]
struct Known {
    id: u32,
    mtime: Option<(i64, u32)>,
}

/// A directory that is being gone through.
struct Level {
    id: u32,
    path_length: usize,
    /// The name in it that was done last.
    done: Option<Box<[u8]>>,
}

impl Times {
    /// Remembers a time; of directories that are made for the sake of others there is none.
    pub(crate) fn set(&mut self, path: &[u8], mtime: (i64, u32)) {
        if path.is_empty() {
            self.root = Some(mtime);
            return;
        }
        let (last, way) = &mut self.last;
        let shared = path
            .iter()
            .zip(&*last)
            .take_while(|(one, other)| one == other)
            .count();
        while way
            .pop_if(|(end, _)| *end > shared || path.get(*end) != Some(&b'/'))
            .is_some()
        {}
        let (mut at, mut above) = way.last().map_or((0, ROOT), |(end, id)| (end + 1, *id));
        for name in path[at..].split(|byte| *byte == b'/') {
            // More directories than that do not fit anywhere.
            let next = u32::try_from(self.below.len() + 1).unwrap_or(u32::MAX);
            let known = self.below.entry((above, name.into())).or_insert(Known {
                id: next,
                mtime: None,
            });
            at += name.len();
            if at == path.len() {
                known.mtime = Some(mtime);
            }
            above = known.id;
            way.push((at, above));
            at += 1;
        }
        last.clear();
        last.extend_from_slice(path);
    }

    /// Each path with its time.
    pub(crate) fn for_each(&self, mut act: impl FnMut(&[u8], (i64, u32))) {
        if let Some(mtime) = self.root {
            act(b"", mtime);
        }
        let mut path: Vec<u8> = Vec::new();
        let level = |id, path_length| Level {
            id,
            path_length,
            done: None,
        };
        let mut levels = vec![level(ROOT, 0)];
        while let Some(here) = levels.last_mut() {
            let after = match here.done.take() {
                Some(name) => Bound::Excluded((here.id, name)),
                None => Bound::Included((here.id, Box::default())),
            };
            let next = self.below.range((after, Bound::Unbounded)).next();
            let Some(((_, name), known)) = next.filter(|((above, _), _)| *above == here.id) else {
                levels.pop();
                continue;
            };
            path.truncate(here.path_length);
            if !path.is_empty() {
                path.push(b'/');
            }
            path.extend_from_slice(name);
            here.done = Some(name.clone());
            if let Some(mtime) = known.mtime {
                act(&path, mtime);
            }
            levels.push(level(known.id, path.len()));
        }
    }
}

/// Directories that something is remembered in, by number.
#[derive(Debug, Default)]
pub(crate) struct Directories {
    /// The one above and the name; the root is not among them.
    all: Vec<(u32, Box<[u8]>)>,
    /// The numbers of the directories on the way to where we are, as far as they are known.
    way: Vec<Option<u32>>,
}

impl Directories {
    pub(crate) fn enter(&mut self) {
        self.way.push(None);
    }

    pub(crate) fn leave(&mut self) {
        self.way.pop();
    }

    /// The number of the directory where we are, whose path this is.
    pub(crate) fn here(&mut self, path: &[u8]) -> u32 {
        if let Some(Some(known)) = self.way.last() {
            return *known;
        }
        let mut above = ROOT;
        for (known, name) in self.way.iter_mut().zip(path.split(|byte| *byte == b'/')) {
            above = *known.get_or_insert_with(|| {
                self.all.push((above, name.into()));
                u32::try_from(self.all.len()).unwrap_or(u32::MAX)
            });
        }
        above
    }

    /// The path of a name in a directory.
    pub(crate) fn path(&self, directory: u32, name: &[u8]) -> Vec<u8> {
        let mut parts = vec![name];
        let mut at = directory;
        while let Some((above, name)) = at.checked_sub(1).and_then(|index| self.all.get(index as usize)) {
            parts.push(name);
            at = *above;
        }
        parts.reverse();
        parts.join(&b'/')
    }

    #[cfg(test)]
    pub(crate) fn weight(&self) -> usize {
        self.all.iter().map(|(_, name)| name.len()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_come_back_with_their_paths() {
        let mut times = Times::default();
        let paths: [&[u8]; 6] = [b"", b"a", b"a/b/c", b"a-b", b"\xff/x", b"a/b"];
        for (number, path) in paths.iter().enumerate() {
            times.set(path, (number as i64, 7));
        }
        times.set(b"a", (99, 0));
        let mut found = Vec::new();
        times.for_each(|path, mtime| found.push((path.to_vec(), mtime)));
        found.sort();
        let mut expected: Vec<_> = paths
            .iter()
            .enumerate()
            .map(|(number, path)| (path.to_vec(), (number as i64, 7)))
            .collect();
        expected[1].1 = (99, 0);
        expected.sort();
        assert_eq!(found, expected);
    }

    /// 500 directories below one path of 30 KiB: 15 MB if each were remembered by its path.
    #[test]
    fn a_long_path_is_remembered_once() {
        let deep = [&b"d"[..]; 15_000].join(&b'/');
        let mut times = Times::default();
        let mut directories = Directories::default();
        for _ in 0..15_000 {
            directories.enter();
        }
        for number in 0..500 {
            let name = number.to_string().into_bytes();
            times.set(&[&deep, &b"/"[..], &name].concat(), (number, 0));
            let here = directories.here(&deep);
            assert_eq!(directories.path(here, &name), [&deep, &b"/"[..], &name].concat());
        }
        let weight: usize = times.below.keys().map(|(_, name)| name.len()).sum();
        assert!(weight < 32 << 10, "{weight}");
        assert_eq!(directories.weight(), 15_000);
        let mut count = 0;
        times.for_each(|path, mtime| {
            assert_eq!(path, [&deep, &b"/"[..], mtime.0.to_string().as_bytes()].concat());
            count += 1;
        });
        assert_eq!(count, 500);
    }
}
