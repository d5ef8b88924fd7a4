//! Makes the way out known to the programs inside: who answers names, and whom to trust beside the public authorities.
//!
//! What must hold: nothing here protects anybody. All of it can be undone by whoever is root inside, and then names are not
//! found or certificates not trusted; what may leave is decided on the host.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use atoll_guest_protocol::{FailureKind, Network};

use crate::failure::{Outcome, from_io};

const RESOLVER: &str = "/etc/resolv.conf";
/// The authority alone, for programs that take one beside their own list.
const AUTHORITY: &str = "/etc/ssl/atoll-authority.pem";
/// Where distributions keep the list of all authorities; the first that exists is the one in use.
const BUNDLES: [&str; 5] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
];
/// Programs that bring a list of their own find ours through these.
const BUNDLE_VARIABLES: [&str; 8] = [
    "SSL_CERT_FILE",
    "CURL_CA_BUNDLE",
    "REQUESTS_CA_BUNDLE",
    "PIP_CERT",
    "GIT_SSL_CAINFO",
    "CARGO_HTTP_CAINFO",
    "AWS_CA_BUNDLE",
    "DENO_CERT",
];
const AUTHORITY_VARIABLE: &str = "NODE_EXTRA_CA_CERTS";
const BEGIN: &str = "# begin of the authority of this sandbox\n";
const END: &str = "# end of the authority of this sandbox\n";
/// A list of all authorities has 200 KB.
const LONGEST: u64 = 8 << 20;

/// What was told last, so that the same again costs nothing: in gVisor every look at a file does.
#[derive(Debug, Default)]
pub(crate) struct WayOut {
    told: Option<Network>,
    /// How programs find the authority.
    trusted: Vec<(String, String)>,
    env: Vec<(String, String)>,
}

impl WayOut {
    /// Makes it known to programs that start from now on.
    pub(crate) fn tell(&mut self, network: Network) -> Outcome {
        let files = |network: &Network| (network.nameserver.clone(), network.authority.clone());
        if self.told.as_ref().map(files) != Some(files(&network)) {
            self.told = None;
            match write_files(&network) {
                Ok(trusted) => self.trusted = trusted,
                // A full disk is no reason to end: what programs find until there is room is what they found before.
                Err(failure) if failure.kind == FailureKind::NoSpace => {
                    self.env.clone_from(&network.env);
                    return Ok(());
                }
                Err(failure) => return Err(failure),
            }
        }
        self.env = self.trusted.iter().chain(&network.env).cloned().collect();
        self.told = Some(network);
        Ok(())
    }

    /// For the environment of every command; everything else in it wins over these.
    pub(crate) fn env(&self) -> &[(String, String)] {
        &self.env
    }
}

/// Gives the variables by which programs find the authority.
fn write_files(network: &Network) -> Outcome<Vec<(String, String)>> {
    if !network.nameserver.is_empty() {
        let text = format!("nameserver {}\noptions edns0\n", network.nameserver);
        put(Path::new(RESOLVER), &text)
            .map_err(|error| from_io(format!("cannot write {RESOLVER}"), &error))?;
    }
    let mut env = Vec::new();
    if let Some(authority) = &network.authority {
        let bundle = trust(Path::new("/"), authority)
            .map_err(|error| from_io("cannot add the sandbox's certificate authority", &error))?;
        let bundle = bundle.display().to_string();
        env.extend(BUNDLE_VARIABLES.map(|name| (name.to_owned(), bundle.clone())));
        env.push((AUTHORITY_VARIABLE.to_owned(), AUTHORITY.to_owned()));
    } else {
        distrust(Path::new("/"))
            .map_err(|error| from_io("cannot take back the sandbox's certificate authority", &error))?;
    }
    Ok(env)
}

/// Adds an authority to the list in use, in place of one that was added before, and gives the list's path.
fn trust(root: &Path, authority: &str) -> io::Result<PathBuf> {
    let bundle = bundle(root);
    let at = below(root, bundle);
    let listed = read_list(&at)?;
    let mut text = without_ours(&listed);
    if !text.is_empty() && !text.ends_with('\n') {
        text.push('\n');
    }
    text.push_str(&ours(authority));
    if text != listed {
        put(&at, &text)?;
    }
    put(&below(root, AUTHORITY), authority)?;
    Ok(PathBuf::from(bundle))
}

/// Takes back what [`trust`] added, and nothing that anybody else did; next to nothing to do where it added nothing. Which list
/// is in use may have changed meanwhile: whoever installs authorities brings one.
fn distrust(root: &Path) -> io::Result<()> {
    let authority = below(root, AUTHORITY);
    if fs::symlink_metadata(&authority).is_err() {
        return Ok(());
    }
    for bundle in BUNDLES {
        let at = below(root, bundle);
        // What cannot be read as a list is none that we have added to.
        let Ok(listed) = read_list(&at) else { continue };
        let text = without_ours(&listed);
        if text.is_empty() && !listed.is_empty() {
            fs::remove_file(&at)?;
        } else if text != listed {
            put(&at, &text)?;
        }
    }
    fs::remove_file(&authority)
}

fn below(root: &Path, path: &str) -> PathBuf {
    root.join(path.trim_start_matches('/'))
}

/// The list in use.
fn bundle(root: &Path) -> &'static str {
    let mut known = BUNDLES.into_iter();
    known
        .find(|path| below(root, path).exists())
        .unwrap_or(BUNDLES[0])
}

fn read_list(at: &Path) -> io::Result<String> {
    match read(at) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(String::new()),
        read => read,
    }
}

fn ours(authority: &str) -> String {
    format!("{BEGIN}{}\n{END}", authority.trim_end())
}

/// What comes after ours is somebody's who added to the list.
fn without_ours(listed: &str) -> String {
    match listed.split_once(BEGIN) {
        None => listed.to_owned(),
        Some((before, rest)) => {
            let after = rest.split_once(END).map_or("", |(_, after)| after);
            format!("{before}{after}")
        }
    }
}

fn read(path: &Path) -> io::Result<String> {
    // Whatever lies there may be a FIFO: opening it must not wait.
    let flags = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
    let file = File::options().read(true).custom_flags(flags).open(path)?;
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(io::Error::other(format!("{} is not a file", path.display())));
    }
    if metadata.len() > LONGEST {
        return Err(io::Error::other(format!("{} is too long", path.display())));
    }
    let mut text = String::new();
    file.take(LONGEST).read_to_string(&mut text)?;
    Ok(text)
}

/// Replaces whatever is there, a symlink too, unless it already says so.
fn put(path: &Path, text: &str) -> io::Result<()> {
    if fs::symlink_metadata(path).is_ok_and(|found| found.is_file())
        && read(path).is_ok_and(|had| had == text)
    {
        return Ok(());
    }
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory)?;
    }
    let mut name = path.as_os_str().to_owned();
    name.push(".atoll-new");
    let new = PathBuf::from(name);
    let _ = fs::remove_file(&new);
    let written = write_new(&new, text).and_then(|()| fs::rename(&new, path));
    written.inspect_err(|_| drop(fs::remove_file(&new)))
}

fn write_new(path: &Path, text: &str) -> io::Result<()> {
    let mut file = File::options().write(true).create_new(true).open(path)?;
    file.write_all(text.as_bytes())?;
    file.set_permissions(fs::Permissions::from_mode(0o644))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    struct Dir(PathBuf);

    impl Dir {
        fn new(name: &str) -> Self {
            let path =
                std::env::temp_dir().join(format!("atoll-guest-network-{}-{name}", std::process::id()));
            let _ = fs::remove_dir_all(&path);
            fs::create_dir_all(&path).expect("a directory");
            Self(path)
        }
    }

    impl Drop for Dir {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn an_authority_joins_the_others_and_is_replaced_by_the_next() {
        let dir = Dir::new("joins");
        let bundle = dir.0.join("etc/ssl/certs/ca-certificates.crt");
        fs::create_dir_all(bundle.parent().expect("a parent")).expect("a directory");
        fs::write(&bundle, "public").expect("a list");
        assert_eq!(trust(&dir.0, "one\n").expect("trusted"), Path::new(BUNDLES[0]));
        assert_eq!(trust(&dir.0, "two\n").expect("trusted"), Path::new(BUNDLES[0]));
        let text = fs::read_to_string(&bundle).expect("a list");
        assert_eq!(text, format!("public\n{BEGIN}two\n{END}"));
        let alone = fs::read_to_string(dir.0.join("etc/ssl/atoll-authority.pem")).expect("a file");
        assert_eq!(alone, "two\n");
        distrust(&dir.0).expect("taken back");
        assert_eq!(fs::read_to_string(&bundle).expect("a list"), "public\n");
        assert!(!dir.0.join("etc/ssl/atoll-authority.pem").exists());
        distrust(&dir.0).expect("nothing to do");
    }

    /// A step of a build may add authorities of its own, in any of the ways that there are.
    #[test]
    fn what_others_add_meanwhile_stays() {
        let dir = Dir::new("others");
        let (later, first) = (
            dir.0.join("etc/ssl/cert.pem"),
            dir.0.join("etc/ssl/certs/ca-certificates.crt"),
        );
        fs::create_dir_all(first.parent().expect("a parent")).expect("a directory");
        fs::write(&later, "public\n").expect("a list");
        assert_eq!(
            trust(&dir.0, "ours\n").expect("trusted"),
            Path::new("/etc/ssl/cert.pem")
        );
        // Somebody adds to the list, and somebody brings another, which is in use from then on.
        let text = fs::read_to_string(&later).expect("a list") + "theirs\n";
        fs::write(&later, text).expect("a list");
        fs::write(&first, "theirs, too\n").expect("a list");
        distrust(&dir.0).expect("taken back");
        assert_eq!(fs::read_to_string(&later).expect("a list"), "public\ntheirs\n");
        assert_eq!(fs::read_to_string(&first).expect("a list"), "theirs, too\n");
        // One that is replaced while it stands in the middle goes to the end.
        trust(&dir.0, "one\n").expect("trusted");
        let text = fs::read_to_string(&first).expect("a list") + "more\n";
        fs::write(&first, text).expect("a list");
        trust(&dir.0, "two\n").expect("trusted");
        let text = fs::read_to_string(&first).expect("a list");
        assert_eq!(text, format!("theirs, too\nmore\n{BEGIN}two\n{END}"));
    }

    #[test]
    fn a_template_without_a_list_gets_one() {
        let dir = Dir::new("none");
        assert_eq!(trust(&dir.0, "one").expect("trusted"), Path::new(BUNDLES[0]));
        distrust(&dir.0).expect("taken back");
        assert!(!dir.0.join("etc/ssl/certs/ca-certificates.crt").exists());
    }

    #[test]
    fn what_lies_in_the_way_is_replaced_and_not_followed_or_waited_for() {
        let dir = Dir::new("way");
        let (at, elsewhere) = (dir.0.join("resolv.conf"), dir.0.join("elsewhere"));
        fs::write(&elsewhere, "untouched").expect("a file");
        symlink(&elsewhere, &at).expect("a link");
        put(&at, "ours").expect("written");
        assert_eq!(fs::read_to_string(&elsewhere).expect("a file"), "untouched");
        assert_eq!(fs::read_to_string(&at).expect("a file"), "ours");
        let fifo = dir.0.join("etc/ssl/certs/ca-certificates.crt");
        fs::create_dir_all(fifo.parent().expect("a parent")).expect("a directory");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &fifo,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::from_raw_mode(0o600),
            0,
        )
        .expect("a FIFO");
        assert!(trust(&dir.0, "one").is_err());
    }
}
