//! What the runtime tells the jailer: one jail, as command-line arguments.
//!
//! Both directions live here, so that the two programs cannot drift apart. Everything is a path or a number: the jailer
//! opens its files itself, hence the server can start it with `posix_spawn` and without inheriting descriptors.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

use crate::error::{Error, Result};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spec {
    /// An empty directory of the instance; the tree is put together on it, invisible to the host.
    pub stage: PathBuf,
    /// The agent's standard input and output.
    pub input: PathBuf,
    pub output: PathBuf,
    /// Where the agent's standard error goes.
    pub log: PathBuf,
    /// The agent on the host: the program, or a directory (of a detached mount, say) with `atoll-guest` in it.
    pub agent: PathBuf,
    pub hostname: String,
    pub lower: Lower,
    pub upper: Upper,
    pub ids: Ids,
    /// Files into which the jailer writes `0` to enter its cgroups before anything is charged. On cgroup v1 these are the
    /// `tasks` files: a single thread that moves itself waits for no RCU grace period, `cgroup.procs` does (15 ms here).
    pub cgroups: Vec<PathBuf>,
    /// Size limit of `/dev/shm`.
    pub shm_bytes: u64,
    /// A saved writable layer to begin with.
    pub layer: Option<PathBuf>,
    pub mounts: Vec<Mount>,
    /// A network namespace that is ready for it, loopback and all; needs root. Without one it gets a new one with nothing
    /// but loopback.
    pub network: Option<PathBuf>,
}

/// Something of the host that is seen inside; needs root.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    pub source: MountSource,
    /// Absolute, in the jail; made if missing.
    pub at: PathBuf,
    pub read_only: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MountSource {
    /// Where something is mounted on the host: a volume, or `/proc/<server>/fd/<n>` of a detached mount.
    Tree(PathBuf),
    /// An EROFS image that this jail mounts for itself.
    Image(PathBuf),
}

/// The template below the writable layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Lower {
    /// `/proc/<server>/fd/<n>` of a detached mount that all jails of a template share, page cache included.
    Tree(PathBuf),
    /// An EROFS image that this jail mounts for itself, and the files that hold its data, if others do.
    Image(Vec<PathBuf>),
    /// A plain directory, where an ordinary user may not mount an image.
    Directory(PathBuf),
}

/// The writable layer; its size is the disk limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Upper {
    Memory {
        bytes: u64,
    },
    /// A file with an ext4 filesystem of the wanted size.
    File(PathBuf),
}

/// Which ids of the host stand for those of the jail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ids {
    /// Ids 0 to 65535 of the jail are `base` and up. Needs root.
    Range { base: u32 },
    /// Id 0 of the jail is whoever started the jailer; there is no other.
    Own,
}

/// How many ids a jail has.
pub const RANGE: u32 = 65536;

impl Spec {
    pub fn to_args(&self) -> Vec<OsString> {
        let mut args = Vec::with_capacity(32);
        let mut put = |key: &str, value: &OsStr| {
            args.push(OsString::from(key));
            args.push(value.to_owned());
        };
        put("--stage", self.stage.as_os_str());
        put("--input", self.input.as_os_str());
        put("--output", self.output.as_os_str());
        put("--log", self.log.as_os_str());
        put("--agent", self.agent.as_os_str());
        put("--hostname", OsStr::new(&self.hostname));
        match &self.lower {
            Lower::Tree(path) => put("--lower-tree", path.as_os_str()),
            Lower::Image(files) => files
                .iter()
                .for_each(|path| put("--lower-image", path.as_os_str())),
            Lower::Directory(path) => put("--lower-directory", path.as_os_str()),
        }
        match &self.upper {
            Upper::Memory { bytes } => put("--upper-memory", OsStr::new(&bytes.to_string())),
            Upper::File(path) => put("--upper-file", path.as_os_str()),
        }
        match self.ids {
            Ids::Range { base } => put("--id-base", OsStr::new(&base.to_string())),
            Ids::Own => put("--id-base", OsStr::new("own")),
        }
        for path in &self.cgroups {
            put("--cgroup", path.as_os_str());
        }
        put("--shm-bytes", OsStr::new(&self.shm_bytes.to_string()));
        if let Some(path) = &self.layer {
            put("--layer", path.as_os_str());
        }
        for mount in &self.mounts {
            match &mount.source {
                MountSource::Tree(path) => put("--mount-tree", path.as_os_str()),
                MountSource::Image(path) => put("--mount-image", path.as_os_str()),
            }
            // Of the one just named.
            let access = if mount.read_only {
                "--mount-read-only-at"
            } else {
                "--mount-at"
            };
            put(access, mount.at.as_os_str());
        }
        if let Some(path) = &self.network {
            put("--network", path.as_os_str());
        }
        args
    }

    pub fn from_args(args: impl IntoIterator<Item = OsString>) -> Result<Self> {
        let mut given = Given::default();
        let mut args = args.into_iter();
        while let Some(key) = args.next() {
            let value = args
                .next()
                .ok_or_else(|| Error::new(format!("{} needs a value", key.display())))?;
            given.put(&key, value)?;
        }
        given.whole()
    }
}

#[derive(Default)]
struct Given {
    stage: Option<PathBuf>,
    input: Option<PathBuf>,
    output: Option<PathBuf>,
    log: Option<PathBuf>,
    agent: Option<PathBuf>,
    hostname: Option<String>,
    lower: Option<Lower>,
    upper: Option<Upper>,
    ids: Option<Ids>,
    cgroups: Vec<PathBuf>,
    shm_bytes: Option<u64>,
    layer: Option<PathBuf>,
    mounts: Vec<Mount>,
    /// What the next `--mount-…at` is about.
    mount_source: Option<MountSource>,
    network: Option<PathBuf>,
}

impl Given {
    fn put(&mut self, key: &OsStr, value: OsString) -> Result<()> {
        let path = || PathBuf::from(value.clone());
        match key.as_bytes() {
            b"--stage" => self.stage = Some(path()),
            b"--input" => self.input = Some(path()),
            b"--output" => self.output = Some(path()),
            b"--log" => self.log = Some(path()),
            b"--agent" => self.agent = Some(path()),
            b"--hostname" => self.hostname = Some(text(key, value)?),
            b"--lower-tree" => self.lower = Some(Lower::Tree(path())),
            b"--lower-image" => match &mut self.lower {
                Some(Lower::Image(files)) => files.push(path()),
                lower => *lower = Some(Lower::Image(vec![path()])),
            },
            b"--lower-directory" => self.lower = Some(Lower::Directory(path())),
            b"--upper-memory" => {
                self.upper = Some(Upper::Memory {
                    bytes: number(key, value)?,
                });
            }
            b"--upper-file" => self.upper = Some(Upper::File(path())),
            b"--id-base" if value == "own" => self.ids = Some(Ids::Own),
            b"--id-base" => {
                let base = u32::try_from(number(key, value)?)
                    .ok()
                    .filter(|base| base.checked_add(RANGE).is_some() && *base >= RANGE)
                    .ok_or_else(|| {
                        Error::new("--id-base leaves no room for a range, or is the host's own")
                    })?;
                self.ids = Some(Ids::Range { base });
            }
            b"--cgroup" => self.cgroups.push(path()),
            b"--shm-bytes" => self.shm_bytes = Some(number(key, value)?),
            b"--layer" => self.layer = Some(path()),
            b"--mount-tree" => self.mount_source = Some(MountSource::Tree(path())),
            b"--mount-image" => self.mount_source = Some(MountSource::Image(path())),
            b"--mount-at" | b"--mount-read-only-at" => {
                let missing = || Error::new(format!("{} without a source before it", key.display()));
                self.mounts.push(Mount {
                    source: self.mount_source.take().ok_or_else(missing)?,
                    at: path(),
                    read_only: key == "--mount-read-only-at",
                });
            }
            b"--network" => self.network = Some(path()),
            _ => return Err(Error::new(format!("unknown argument {}", key.display()))),
        }
        Ok(())
    }

    fn whole(self) -> Result<Spec> {
        fn need<T>(name: &str, value: Option<T>) -> Result<T> {
            value.ok_or_else(|| Error::new(format!("{name} is missing")))
        }
        Ok(Spec {
            stage: need("--stage", self.stage)?,
            input: need("--input", self.input)?,
            output: need("--output", self.output)?,
            log: need("--log", self.log)?,
            agent: need("--agent", self.agent)?,
            hostname: need("--hostname", self.hostname)?,
            lower: need("--lower-…", self.lower)?,
            upper: need("--upper-…", self.upper)?,
            ids: need("--id-base", self.ids)?,
            cgroups: self.cgroups,
            shm_bytes: need("--shm-bytes", self.shm_bytes)?,
            layer: self.layer,
            mounts: self.mounts,
            network: self.network,
        })
    }
}

fn text(key: &OsStr, value: OsString) -> Result<String> {
    String::from_utf8(value.into_vec()).map_err(|_| Error::new(format!("{} is not text", key.display())))
}

fn number(key: &OsStr, value: OsString) -> Result<u64> {
    text(key, value)?
        .parse()
        .map_err(|_| Error::new(format!("{} is not a number", key.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> Spec {
        Spec {
            stage: "/s/instances/ins_a/root".into(),
            input: "/s/in".into(),
            output: "/s/out".into(),
            log: "/s/log".into(),
            agent: "/s/atoll-guest".into(),
            hostname: "box".into(),
            lower: Lower::Tree("/proc/1/fd/7".into()),
            upper: Upper::Memory { bytes: 1 << 30 },
            ids: Ids::Range { base: 0x1000_0000 },
            cgroups: vec!["/cg/memory/a/tasks".into(), "/cg/cpu/a/tasks".into()],
            shm_bytes: 64,
            layer: Some("/proc/1/fd/9".into()),
            mounts: vec![
                Mount {
                    source: MountSource::Tree("/v/mnt".into()),
                    at: OsString::from_vec(b"/d\xff".to_vec()).into(),
                    read_only: false,
                },
                Mount {
                    source: MountSource::Image("/v/in.erofs".into()),
                    at: "/in".into(),
                    read_only: true,
                },
            ],
            network: Some("/proc/1/fd/11".into()),
        }
    }

    #[test]
    fn a_spec_survives_the_command_line() {
        for (lower, upper, ids) in [
            (spec().lower, spec().upper, spec().ids),
            (
                Lower::Image(vec![
                    OsString::from_vec(b"/\xff,:\\".to_vec()).into(),
                    "/data".into(),
                ]),
                Upper::File("/s/disk".into()),
                Ids::Own,
            ),
            (Lower::Directory("/d".into()), spec().upper, Ids::Own),
        ] {
            let spec = Spec {
                lower,
                upper,
                ids,
                ..spec()
            };
            assert_eq!(Spec::from_args(spec.to_args()).unwrap(), spec);
        }
    }

    #[test]
    fn a_range_never_covers_the_hosts_own_ids() {
        for base in ["0", "1000", "65535", "4294967295", "4294901761", "-1", "x"] {
            let mut args = spec().to_args();
            let at = args.iter().position(|arg| arg == "--id-base").unwrap();
            args[at + 1] = base.into();
            assert!(Spec::from_args(args).is_err(), "{base}");
        }
    }

    #[test]
    fn a_missing_or_unknown_argument_is_named() {
        let error = Spec::from_args(["--stage".into(), "/x".into()]).unwrap_err();
        assert!(error.to_string().contains("--input"), "{error}");
        let error = Spec::from_args(["--what".into(), "/x".into()]).unwrap_err();
        assert!(error.to_string().contains("--what"), "{error}");
    }
}
