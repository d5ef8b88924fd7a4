//! Who a command runs as, from `/etc/passwd` and `/etc/group` as they are now. No NSS: the agent is static, and what the
//! template's files say is what counts.

use std::cell::RefCell;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::rc::Rc;
use std::sync::OnceLock;

use atoll_guest_protocol::FailureKind;

use crate::failure::{Outcome, failure, invalid};

/// An account to run as, or to own files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Account {
    pub(crate) name: String,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) groups: Vec<u32>,
    pub(crate) home: String,
    pub(crate) shell: String,
}

/// The two files. Kept between requests and read again when they changed: most commands run as the same user, and in
/// gVisor reading both costs as much as a tenth of starting a program.
#[derive(Debug, Default)]
pub(crate) struct Users {
    passwd: String,
    group: String,
    seen: [Seen; 2],
}

/// What changes when a file does.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Seen {
    inode: u64,
    size: u64,
    changed: (i64, i64),
}

impl Seen {
    fn of(path: &str) -> Self {
        fs::metadata(path).map_or_else(
            |_| Self::default(),
            |metadata| Self {
                inode: metadata.ino(),
                size: metadata.len(),
                changed: (metadata.ctime(), metadata.ctime_nsec()),
            },
        )
    }
}

thread_local! {
    static KEPT: RefCell<Rc<Users>> = RefCell::default();
}

const PASSWD: &str = "/etc/passwd";
const GROUP: &str = "/etc/group";

/// Larger files are cut: an account database of a sandbox is small, and a hostile one must not cost memory.
const MOST: u64 = 1024 * 1024;

impl Users {
    pub(crate) fn load() -> Rc<Self> {
        let seen = [Seen::of(PASSWD), Seen::of(GROUP)];
        KEPT.with_borrow_mut(|kept| {
            if kept.seen != seen {
                *kept = Rc::new(Self {
                    passwd: read_text(PASSWD),
                    group: read_text(GROUP),
                    seen,
                });
            }
            kept.clone()
        })
    }

    /// `spec` is a name, a number, or either with `:group`. An empty one is root.
    pub(crate) fn find(&self, spec: &str) -> Outcome<Account> {
        let (user, group) = match spec.split_once(':') {
            Some((user, group)) => (user, Some(group)),
            None => (spec, None),
        };
        let user = if user.is_empty() { "root" } else { user };
        let mut account = self.account(user)?;
        match group {
            // As with `docker run --user a:b`: a named group replaces the supplementary ones.
            Some(group) => {
                account.gid = self.group_id(group)?;
                account.groups = vec![account.gid];
            }
            None => account.groups = self.groups_of(&account.name, account.gid),
        }
        if there_is_only_one() {
            account.uid = rustix::process::getuid().as_raw();
            account.gid = rustix::process::getgid().as_raw();
            account.groups.clear();
        }
        Ok(account)
    }

    pub(crate) fn group_id(&self, group: &str) -> Outcome<u32> {
        self.groups()
            .find(|entry| entry.name == group)
            .map(|entry| entry.gid)
            .or_else(|| parse_id(group))
            .ok_or_else(|| invalid(format!("no such group: {group}")))
    }

    /// `user`, `user:group`, `:group` or numbers, for `chown`: what to change.
    pub(crate) fn owner(&self, spec: &str) -> Outcome<(Option<u32>, Option<u32>)> {
        let (user, group) = match spec.split_once(':') {
            Some((user, group)) => (user, Some(group)),
            None => (spec, None),
        };
        let uid = match user {
            "" => None,
            user => Some(self.account(user)?.uid),
        };
        let gid = match group {
            None | Some("") => None,
            Some(group) => Some(self.group_id(group)?),
        };
        if uid.is_none() && gid.is_none() {
            return Err(invalid("the new owner is empty"));
        }
        Ok((uid, gid))
    }

    pub(crate) fn user_name(&self, uid: u32) -> Option<&str> {
        self.accounts()
            .find(|entry| entry.uid == uid)
            .map(|entry| entry.name)
    }

    pub(crate) fn group_name(&self, gid: u32) -> Option<&str> {
        self.groups()
            .find(|entry| entry.gid == gid)
            .map(|entry| entry.name)
    }

    fn account(&self, user: &str) -> Outcome<Account> {
        let id = parse_id(user);
        let entry = self
            .accounts()
            .find(|entry| entry.name == user)
            .or_else(|| id.and_then(|id| self.accounts().find(|entry| entry.uid == id)));
        let account = |name: &str, uid, gid, home: &str, shell: &str| Account {
            name: name.to_owned(),
            uid,
            gid,
            groups: Vec::new(),
            home: if home.is_empty() { "/" } else { home }.to_owned(),
            shell: if shell.is_empty() { "/bin/sh" } else { shell }.to_owned(),
        };
        match (entry, id) {
            (Some(found), _) => Ok(account(found.name, found.uid, found.gid, found.home, found.shell)),
            (None, _) if user == "root" => Ok(account("root", 0, 0, "/root", "/bin/sh")),
            (None, Some(id)) => Ok(account(user, id, 0, "/", "/bin/sh")),
            (None, None) => Err(failure(FailureKind::NoSuchUser, format!("no such user: {user}"))),
        }
    }

    fn groups_of(&self, user: &str, primary: u32) -> Vec<u32> {
        let mut groups = vec![primary];
        for group in self.groups() {
            let member = group.members.split(',').any(|member| member == user);
            // The kernel takes 65,536; nobody needs more than this, and the list is copied per command.
            if member && !groups.contains(&group.gid) && groups.len() < 256 {
                groups.push(group.gid);
            }
        }
        groups
    }

    fn accounts(&self) -> impl Iterator<Item = PasswdLine<'_>> {
        self.passwd.lines().filter_map(PasswdLine::parse)
    }

    fn groups(&self) -> impl Iterator<Item = GroupLine<'_>> {
        self.group.lines().filter_map(GroupLine::parse)
    }
}

struct PasswdLine<'a> {
    name: &'a str,
    uid: u32,
    gid: u32,
    home: &'a str,
    shell: &'a str,
}

impl<'a> PasswdLine<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        let mut fields = line.split(':');
        let name = fields.next().filter(|name| !name.is_empty())?;
        let _password = fields.next()?;
        let uid = parse_id(fields.next()?)?;
        let gid = parse_id(fields.next()?)?;
        let _comment = fields.next()?;
        Some(Self {
            name,
            uid,
            gid,
            home: fields.next()?,
            shell: fields.next().unwrap_or(""),
        })
    }
}

struct GroupLine<'a> {
    name: &'a str,
    gid: u32,
    members: &'a str,
}

impl<'a> GroupLine<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        let mut fields = line.split(':');
        let name = fields.next().filter(|name| !name.is_empty())?;
        let _password = fields.next()?;
        Some(Self {
            name,
            gid: parse_id(fields.next()?)?,
            members: fields.next().unwrap_or(""),
        })
    }
}

/// The all-ones id means "unchanged" to the kernel and is nobody's.
fn parse_id(text: &str) -> Option<u32> {
    text.parse().ok().filter(|&id| id != u32::MAX)
}

/// The jail of an ordinary user has one id, which everybody in it is: with the home and the name that were asked for.
fn there_is_only_one() -> bool {
    static ONLY_ONE: OnceLock<bool> = OnceLock::new();
    *ONLY_ONE.get_or_init(|| maps_one(&read_text("/proc/self/uid_map")))
}

/// Lines of an id inside, an id outside, and how many follow.
fn maps_one(map: &str) -> bool {
    let mut counts = map.lines().map(|line| line.split_whitespace().nth(2));
    counts.next() == Some(Some("1")) && counts.next().is_none()
}

fn read_text(path: &str) -> String {
    let read = || -> io::Result<Vec<u8>> {
        let file = crate::files::open_regular(path.as_ref())?;
        let mut bytes = Vec::with_capacity(8 * 1024);
        io::Read::read_to_end(&mut io::Read::take(fs::File::from(file), MOST), &mut bytes)?;
        Ok(bytes)
    };
    String::from_utf8_lossy(&read().unwrap_or_default()).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn users() -> Users {
        Users {
            passwd: "root:x:0:0:root:/root:/bin/bash\n\
                     broken line\n\
                     bad:x:nan:5::/:/bin/sh\n\
                     user:x:1000:1000:,,,:/home/user:/bin/bash\n\
                     noshell:x:1001:1001::/srv\n"
                .to_owned(),
            group: "root:x:0:\nsudo:x:27:other,user\nuser:x:1000:\ndocker:x:999:user,user\n".to_owned(),
            seen: Default::default(),
        }
    }

    #[test]
    fn one_id_is_told_from_many() {
        assert!(maps_one("         0      65534          1\n"));
        assert!(!maps_one("         0  268435456      65536\n"));
        assert!(!maps_one("0 1000 1\n1 100000 65536\n"));
        assert!(!maps_one(""));
    }

    #[test]
    fn finds_by_name_and_number_with_groups() {
        let user = users().find("user").expect("there");
        assert_eq!(
            (user.uid, user.gid, user.home.as_str()),
            (1000, 1000, "/home/user")
        );
        assert_eq!(user.groups, vec![1000, 27, 999]);
        assert_eq!(users().find("1000").expect("there"), user);
        assert_eq!(users().find("").expect("root").uid, 0);
        assert_eq!(users().find("noshell").expect("there").shell, "/bin/sh");
    }

    #[test]
    fn a_group_replaces_the_others() {
        let user = users().find("user:sudo").expect("there");
        assert_eq!((user.gid, user.groups), (27, vec![27]));
        assert_eq!(users().find("5000:6000").expect("numbers").gid, 6000);
    }

    #[test]
    fn unknown_names_are_refused_and_unknown_numbers_are_not() {
        assert_eq!(
            users().find("nobody-here").unwrap_err().kind,
            FailureKind::NoSuchUser
        );
        assert_eq!(users().find("bad").unwrap_err().message, "no such user: bad");
        assert!(users().find("4294967295").is_err());
        let stranger = users().find("4242").expect("numbers need no entry");
        assert_eq!(
            (stranger.uid, stranger.gid, stranger.home.as_str()),
            (4242, 0, "/")
        );
    }

    #[test]
    fn owners() {
        assert_eq!(users().owner("user:sudo").expect("ok"), (Some(1000), Some(27)));
        assert_eq!(users().owner(":27").expect("ok"), (None, Some(27)));
        assert_eq!(users().owner("user").expect("ok"), (Some(1000), None));
        assert!(users().owner(":").is_err());
    }
}
