use std::collections::BTreeMap;
use std::time::Duration;

use atoll_guest_protocol::{
    EntryKind, FailureKind, FileStat, Message, Request, SUB_MAIN, WatchEvent, WatchKind, WriteFile, WriteMode,
};

use crate::client::{Event, Guest};

fn write_request(path: Vec<u8>, write: WriteMode) -> WriteFile {
    WriteFile {
        path,
        user: None,
        mode: None,
        write,
        parents: true,
    }
}

fn write(
    guest: &mut Guest,
    request: WriteFile,
    content: &[u8],
) -> Result<FileStat, atoll_guest_protocol::Failure> {
    let stream = guest.open(&Request::WriteFile(request));
    guest.send(stream, content);
    guest.send_end(stream);
    match guest.next(stream) {
        Event::Message(Message::Stat(stat)) => guest.end(stream).map(|()| stat),
        Event::End(Err(failure)) => Err(failure),
        other => panic!("unexpected {other:?}"),
    }
}

fn put(guest: &mut Guest, name: &str, content: &[u8]) {
    let path = guest.path(name);
    write(guest, write_request(path, WriteMode::Replace), content).expect("written");
}

fn read(guest: &mut Guest, path: Vec<u8>, offset: u64, length: Option<u64>) -> Result<Vec<u8>, FailureKind> {
    let stream = guest.open(&Request::ReadFile {
        path,
        user: None,
        offset,
        length,
    });
    collect(guest, stream).map_err(|failure| failure.kind)
}

fn collect(guest: &mut Guest, stream: u32) -> Result<Vec<u8>, atoll_guest_protocol::Failure> {
    let mut content = Vec::new();
    loop {
        match guest.next(stream) {
            Event::Data(SUB_MAIN, bytes) => content.extend(bytes),
            Event::Message(Message::Stat(_)) => {}
            Event::End(result) => return result.map(|()| content),
            other => panic!("unexpected {other:?}"),
        }
    }
}

fn get(guest: &mut Guest, name: &str) -> Result<Vec<u8>, FailureKind> {
    let path = guest.path(name);
    read(guest, path, 0, None)
}

fn stat(guest: &mut Guest, path: Vec<u8>) -> Result<FileStat, FailureKind> {
    match guest.ask(&Request::Stat { path, user: None }) {
        Ok(Message::Stat(stat)) => Ok(stat),
        Ok(other) => panic!("unexpected {other:?}"),
        Err(failure) => Err(failure.kind),
    }
}

fn names(guest: &mut Guest) -> String {
    let script = format!("cd {}; find . | sort", guest.home());
    String::from_utf8(guest.run(&script).stdout).expect("text")
}

#[test]
fn files_round_trip() {
    let mut guest = Guest::start();
    let content: Vec<u8> = (0..3_000_000u32).map(|number| (number * 7) as u8).collect();
    put(&mut guest, "deep/er/file", &content);
    assert_eq!(get(&mut guest, "deep/er/file").expect("read"), content);
    let path = guest.path("deep/er/file");
    assert_eq!(
        read(&mut guest, path.clone(), 2_999_990, None)
            .expect("read")
            .len(),
        10
    );
    assert_eq!(
        read(&mut guest, path.clone(), 5, Some(7)).expect("read"),
        content[5..12]
    );
    assert_eq!(
        read(&mut guest, path.clone(), 9_000_000, None).expect("read"),
        b""
    );
    let found = stat(&mut guest, path).expect("there");
    assert_eq!(
        (found.kind, found.size, found.mode),
        (EntryKind::File, 3_000_000, 0o644)
    );
    assert_eq!(found.owner.as_deref(), Some("root"));
    put(&mut guest, "empty", b"");
    assert_eq!(get(&mut guest, "empty").expect("read"), b"");
    assert_eq!(get(&mut guest, "missing"), Err(FailureKind::NotFound));
    assert_eq!(
        read(&mut guest, b"/tmp".to_vec(), 0, None),
        Err(FailureKind::IsADirectory)
    );
    assert!(
        !read(&mut guest, b"/proc/self/status".to_vec(), 0, None)
            .expect("read")
            .is_empty()
    );
}

#[test]
fn replacing_keeps_mode_and_symlinks_and_leaves_nothing_behind() {
    let mut guest = Guest::start();
    put(&mut guest, "real", b"old");
    guest.run(&format!(
        "cd {}; chmod 751 real; chown 12:34 real; ln -s real link; ln -s nowhere dangling",
        guest.home()
    ));
    put(&mut guest, "link", b"new");
    assert_eq!(get(&mut guest, "real").expect("read"), b"new");
    let path = guest.path("real");
    let found = stat(&mut guest, path).expect("there");
    assert_eq!((found.mode, found.uid, found.gid), (0o751, 12, 34));
    let path = guest.path("link");
    let found = stat(&mut guest, path).expect("there");
    assert_eq!(
        (found.kind, found.target),
        (EntryKind::Symlink, Some(b"real".to_vec()))
    );
    put(&mut guest, "dangling", b"made");
    assert_eq!(get(&mut guest, "nowhere").expect("read"), b"made");
    // Broken off in the middle.
    let path = guest.path("half");
    let stream = guest.open(&Request::WriteFile(write_request(path, WriteMode::Replace)));
    guest.send(stream, b"some");
    guest.close(stream);
    assert_eq!(names(&mut guest), ".\n./dangling\n./link\n./nowhere\n./real\n");
}

#[test]
fn appending_creating_and_ownership() {
    let mut guest = Guest::start();
    let path = guest.path("log");
    for line in [b"one\n", b"two\n"] {
        write(&mut guest, write_request(path.clone(), WriteMode::Append), line).expect("appended");
    }
    assert_eq!(get(&mut guest, "log").expect("read"), b"one\ntwo\n");
    let exists = write(&mut guest, write_request(path, WriteMode::CreateNew), b"");
    assert_eq!(exists.expect_err("exists").kind, FailureKind::AlreadyExists);
    for_everybody(&mut guest);
    let path = guest.path("new/of/nobody");
    let request = WriteFile {
        user: Some("nobody".to_owned()),
        mode: Some(0o600),
        ..write_request(path, WriteMode::CreateNew)
    };
    let found = write(&mut guest, request, b"x").expect("created");
    assert_eq!(
        (found.uid, found.mode, found.owner.as_deref()),
        (65534, 0o600, Some("nobody"))
    );
    let path = guest.path("new");
    assert_eq!(stat(&mut guest, path).expect("there").uid, 65534);
}

/// Lets every user make things where the test's files are.
fn for_everybody(guest: &mut Guest) {
    guest.run(&format!("chmod 777 {}", guest.home()));
}

/// Whoever is named acts, with what the kernel lets them do; whoever is not is the owner.
#[test]
fn a_named_user_may_what_they_may() {
    let mut guest = Guest::start();
    for_everybody(&mut guest);
    put(&mut guest, "closed/secret", b"s");
    put(&mut guest, "open", b"o");
    guest.run(&format!(
        "cd {}; chmod 700 closed; chmod 644 open; ln -s closed/secret link; chown nobody:nogroup link -h; \
         mkdir theirs; chown nobody theirs; echo 1 > shared; chown root:7 shared; chmod 660 shared",
        guest.home()
    ));
    let nobody = || Some("nobody".to_owned());
    let denied = |outcome: Result<(), atoll_guest_protocol::Failure>, what: &str| {
        let kind = outcome.expect_err(what).kind;
        assert_eq!(kind, FailureKind::PermissionDenied, "{what}");
    };
    let reading = |guest: &mut Guest, name: &str, user: Option<String>| {
        let path = guest.path(name);
        let stream = guest.open(&Request::ReadFile {
            path,
            user,
            offset: 0,
            length: None,
        });
        collect(guest, stream)
    };
    for name in ["closed/secret", "link", "shared"] {
        denied(reading(&mut guest, name, nobody()).map(drop), name);
        reading(&mut guest, name, None).expect("the owner reads all");
        reading(&mut guest, name, Some("root".to_owned())).expect("root reads all");
    }
    assert_eq!(
        reading(&mut guest, "shared", Some("nobody:7".to_owned())).expect("by group"),
        b"1\n"
    );
    assert_eq!(reading(&mut guest, "open", nobody()).expect("others may"), b"o");
    for mode in [WriteMode::Append, WriteMode::InPlace] {
        for name in ["open", "closed/new", "link"] {
            let request = WriteFile {
                user: nobody(),
                ..write_request(guest.path(name), mode)
            };
            denied(write(&mut guest, request, b"x").map(drop), name);
        }
    }
    let (open, closed, new) = (guest.path("open"), guest.path("closed"), guest.path("closed/new"));
    let user = nobody();
    for request in [
        Request::Stat {
            path: guest.path("closed/secret"),
            user: user.clone(),
        },
        Request::MakeDir {
            path: new.clone(),
            user: user.clone(),
            mode: 0o755,
        },
        Request::Symlink {
            path: new,
            target: b"x".to_vec(),
            user: user.clone(),
        },
        Request::Rename {
            from: guest.path("closed/secret"),
            to: guest.path("theirs/s"),
            user: user.clone(),
        },
        Request::Remove {
            path: guest.path("closed/secret"),
            user: user.clone(),
            recursive: false,
        },
        Request::SetMode {
            path: open.clone(),
            user: user.clone(),
            mode: 0o777,
        },
        Request::SetOwner {
            path: open.clone(),
            user: user.clone(),
            owner: "nobody".to_owned(),
        },
        Request::List {
            path: closed.clone(),
            user: user.clone(),
            depth: 1,
        },
        Request::Watch {
            path: closed.clone(),
            user: user.clone(),
            recursive: false,
        },
        Request::TarOut {
            path: closed,
            user: user.clone(),
            one_file_system: false,
        },
        Request::SetAttributes {
            path: open,
            user: user.clone(),
            prefix: "user.a.".to_owned(),
            attributes: vec![("x".to_owned(), b"1".to_vec())],
        },
    ] {
        let stream = guest.open(&request);
        denied(collect(&mut guest, stream).map(drop), &format!("{request:?}"));
    }
    let archive = tar_out(&mut guest, "closed");
    denied(
        tar_in(&mut guest, "closed/copy", &archive, Some("nobody")),
        "an archive",
    );
    // And what is theirs is theirs, from the first byte to the rename at the end.
    let request = WriteFile {
        user,
        ..write_request(guest.path("theirs/file"), WriteMode::Replace)
    };
    assert_eq!(write(&mut guest, request, b"x").expect("written").uid, 65534);
    // The agent is itself again.
    assert_eq!(get(&mut guest, "closed/secret").expect("read"), b"s");
    assert_eq!(guest.run("id -u; id -g").stdout, b"0\n0\n");
}

#[test]
fn what_is_no_file_never_hangs_the_agent() {
    let mut guest = Guest::start();
    put(&mut guest, "x", b"");
    guest.run(&format!("cd {}; mkfifo fifo; ln -s /dev/zero zero", guest.home()));
    for name in ["fifo", "zero"] {
        assert_eq!(get(&mut guest, name), Err(FailureKind::Invalid), "{name}");
        for mode in [WriteMode::Append, WriteMode::Replace] {
            let path = guest.path(name);
            let failure = write(&mut guest, write_request(path, mode), b"x").expect_err("refused");
            assert_eq!(failure.kind, FailureKind::Invalid);
        }
    }
    assert_eq!(
        read(&mut guest, b"/dev/tty".to_vec(), 0, None).map_err(|_| ()),
        Err(())
    );
    assert_eq!(read(&mut guest, b"".to_vec(), 0, None), Err(FailureKind::Invalid));
    assert_eq!(
        read(&mut guest, b"a\0b".to_vec(), 0, None),
        Err(FailureKind::Invalid)
    );
}

#[test]
fn a_full_disk_is_reported() {
    let mut guest = Guest::start();
    let mounted = guest.run(&format!(
        "mkdir -p {0}/small && mount -t tmpfs -o size=1m none {0}/small",
        guest.home()
    ));
    if mounted.state != (atoll_guest_protocol::CommandState::Exited { code: 0 }) {
        eprintln!("skipped: no mount here");
        return;
    }
    let path = guest.path("small/file");
    let failure = write(
        &mut guest,
        write_request(path, WriteMode::Replace),
        &vec![1; 5_000_000],
    );
    let left = guest.run(&format!("ls -A {0}/small; umount {0}/small", guest.home()));
    assert_eq!(failure.expect_err("full").kind, FailureKind::NoSpace);
    assert_eq!(left.stdout, b"");
}

#[test]
fn listing_ten_thousand_files_and_odd_names() {
    let mut guest = Guest::start();
    put(&mut guest, "many/x", b"");
    guest.run(&format!(
        "cd {}/many; seq 10000 | xargs touch; mkdir -p sub/sub2; touch sub/sub2/f; ln -s / loop",
        guest.home()
    ));
    let mut odd = guest.path("many/");
    odd.extend(b"odd-\xff\xfe");
    write(&mut guest, write_request(odd.clone(), WriteMode::Replace), b"odd").expect("written");
    let mut list = |depth| {
        let path = guest.path("many");
        let stream = guest.open(&Request::List {
            path,
            user: None,
            depth,
        });
        let mut found = BTreeMap::new();
        loop {
            match guest.next(stream) {
                Event::Message(Message::Entries(entries)) => {
                    found.extend(entries.into_iter().map(|entry| (entry.stat.path.clone(), entry)));
                }
                Event::End(result) => {
                    assert_eq!(result, Ok(()));
                    return found;
                }
                other => panic!("unexpected {other:?}"),
            }
        }
    };
    let shallow = list(1);
    assert_eq!(shallow.len(), 10_004);
    assert_eq!(shallow[&odd].stat.size, 3);
    let deep = list(10);
    assert_eq!(deep.len(), 10_006, "the symlink to / was not followed");
    assert_eq!(deep.values().map(|entry| entry.depth).max(), Some(3));
    assert_eq!(read(&mut guest, odd, 0, None).expect("read"), b"odd");
    let path = guest.path("many/1");
    let failure = guest.call(&Request::List {
        path,
        user: None,
        depth: 1,
    });
    assert_eq!(failure.expect_err("a file").kind, FailureKind::NotADirectory);

    let remove = |path: Vec<u8>, recursive| Request::Remove {
        path,
        user: None,
        recursive,
    };
    let path = guest.path("many");
    let refused = guest
        .call(&remove(path.clone(), false))
        .expect_err("needs recursive");
    assert_eq!(refused.kind, FailureKind::IsADirectory);
    assert_eq!(guest.call(&remove(path.clone(), true)), Ok(()));
    assert_eq!(stat(&mut guest, path.clone()), Err(FailureKind::NotFound));
    assert_eq!(
        guest.call(&remove(path, true)).expect_err("gone").kind,
        FailureKind::NotFound
    );
    assert!(
        stat(&mut guest, b"/usr".to_vec()).is_ok(),
        "the symlink to / was not followed"
    );
}

#[test]
fn small_changes() {
    let mut guest = Guest::start();
    for_everybody(&mut guest);
    let path = guest.path("a/b/c");
    let make = Request::MakeDir {
        path: path.clone(),
        user: Some("nobody".to_owned()),
        mode: 0o700,
    };
    assert_eq!(guest.ask(&make), Ok(Message::Created(true)));
    assert_eq!(guest.ask(&make), Ok(Message::Created(false)));
    let found = stat(&mut guest, path).expect("there");
    assert_eq!(
        (found.mode, found.uid, found.kind),
        (0o700, 65534, EntryKind::Directory)
    );
    put(&mut guest, "a/file", b"1");
    let (from, to) = (guest.path("a/file"), guest.path("a/b/renamed"));
    let rename = Request::Rename {
        from: from.clone(),
        to: to.clone(),
        user: None,
    };
    assert_eq!(guest.call(&rename), Ok(()));
    assert_eq!(guest.call(&rename).expect_err("gone").kind, FailureKind::NotFound);
    let mode = Request::SetMode {
        path: to.clone(),
        user: None,
        mode: 0o4711,
    };
    assert_eq!(guest.call(&mode), Ok(()));
    let owner = Request::SetOwner {
        path: to.clone(),
        user: None,
        owner: "nobody:7".to_owned(),
    };
    assert_eq!(guest.call(&owner), Ok(()));
    let found = stat(&mut guest, to).expect("there");
    assert_eq!((found.mode & 0o777, found.uid, found.gid), (0o711, 65534, 7));
    let link = Request::Symlink {
        path: from.clone(),
        target: b"b/renamed".to_vec(),
        user: None,
    };
    assert_eq!(guest.call(&link), Ok(()));
    assert_eq!(
        guest.call(&link).expect_err("there").kind,
        FailureKind::AlreadyExists
    );
    assert_eq!(read(&mut guest, from, 0, None).expect("read"), b"1");
    // Relative to the user's home.
    let path = stat(&mut guest, b"etc".to_vec()).expect("there").path;
    assert_eq!(path, b"/etc");
}

#[test]
fn a_watch_sees_new_directories_too() {
    let mut guest = Guest::start();
    put(&mut guest, "w/old/file", b"");
    let path = guest.path("w");
    let stream = guest.open(&Request::Watch {
        path,
        user: None,
        recursive: true,
    });
    assert_eq!(guest.message(stream), Message::Watching);
    guest.run(&format!(
        "cd {}/w; mkdir -p new/er; echo x > new/er/file; echo y >> old/file; mv old/file old/moved; sleep 0.1; \
         echo z > new/er/late; rm old/moved; chmod 700 new",
        guest.home()
    ));
    let mut seen: Vec<WatchEvent> = Vec::new();
    while let Some(event) = guest.next_within(stream, Duration::from_millis(500)) {
        match event {
            Event::Message(Message::Changed(events)) => seen.extend(events),
            other => panic!("unexpected {other:?}"),
        }
    }
    let has = |kind, name: &str| {
        seen.iter()
            .any(|event| event.kind == kind && event.name == name.as_bytes())
    };
    for (kind, name) in [
        (WatchKind::Created, "new"),
        (WatchKind::Created, "new/er"),
        (WatchKind::Created, "new/er/file"),
        (WatchKind::Written, "old/file"),
        (WatchKind::RenamedFrom, "old/file"),
        (WatchKind::RenamedTo, "old/moved"),
        (WatchKind::Created, "new/er/late"),
        (WatchKind::Written, "new/er/late"),
        (WatchKind::Removed, "old/moved"),
        (WatchKind::Attributes, "new"),
    ] {
        assert!(has(kind, name), "{kind:?} {name} in {seen:?}");
    }
    let path = guest.path("missing");
    let missing = guest.call(&Request::Watch {
        path,
        user: None,
        recursive: false,
    });
    assert_eq!(missing.expect_err("missing").kind, FailureKind::NotFound);
}

#[test]
fn a_flooded_watch_stays_bounded() {
    let mut guest = Guest::start();
    put(&mut guest, "w/x", b"");
    let path = guest.path("w");
    let stream = guest.open(&Request::Watch {
        path,
        user: None,
        recursive: true,
    });
    assert_eq!(guest.message(stream), Message::Watching);
    guest.run(&format!(
        "cd {}/w; for i in 1 2 3 4; do seq 5000 | xargs touch; seq 5000 | xargs rm; done",
        guest.home()
    ));
    assert_eq!(guest.run("echo fine").stdout, b"fine\n");
    let mut count = 0;
    while let Some(Event::Message(Message::Changed(events))) =
        guest.next_within(stream, Duration::from_millis(300))
    {
        count += events.len();
    }
    assert!(count > 1000);
}

fn tar_out(guest: &mut Guest, name: &str) -> Vec<u8> {
    let path = guest.path(name);
    let stream = guest.open(&Request::TarOut {
        path,
        user: None,
        one_file_system: false,
    });
    collect(guest, stream).expect("archived")
}

fn tar_in(
    guest: &mut Guest,
    name: &str,
    archive: &[u8],
    user: Option<&str>,
) -> Result<(), atoll_guest_protocol::Failure> {
    let path = guest.path(name);
    let user = user.map(str::to_owned);
    let stream = guest.open(&Request::TarIn { path, user });
    guest.send(stream, archive);
    guest.send_end(stream);
    guest.end(stream)
}

#[test]
fn a_tree_survives_tar_out_and_in() {
    let mut guest = Guest::start();
    let long = "long-name-".repeat(15);
    put(&mut guest, "tree/a", &vec![7; 300_000]);
    put(&mut guest, &format!("tree/{long}/{long}"), b"deep");
    guest.run(&format!(
        "cd {}/tree; mkdir empty; ln -s ../a link; ln -s {long} {long}-link; chmod 750 a; touch -d @1000000000 a; mkfifo fifo; \
         touch \"$(printf 'odd-\\377')\"",
        guest.home()
    ));
    let archive = tar_out(&mut guest, "tree");
    // What GNU tar makes of it.
    put(&mut guest, "archive.tar", &archive);
    let listed = guest.run(&format!("tar tvf {}/archive.tar | wc -l", guest.home()));
    assert_eq!(
        (listed.stdout.as_slice(), listed.stderr.as_slice()),
        (&b"8\n"[..], &b""[..])
    );

    for_everybody(&mut guest);
    assert_eq!(tar_in(&mut guest, "copy", &archive, Some("nobody")), Ok(()));
    let same = guest.run(&format!(
        "cd {0}; rm tree/fifo; diff -r --no-dereference tree copy/tree; stat -c '%a %Y %u' copy/tree/a",
        guest.home()
    ));
    assert_eq!(String::from_utf8_lossy(&same.stdout), "750 1000000000 65534\n");
    // And the other way round: formats of GNU tar, with hard links.
    for format in ["gnu", "pax", "ustar --exclude=*-link --exclude=long*"] {
        let made = guest.run(&format!(
            "cd {0}; ln -f tree/a tree/hard; tar cf made.tar --format={format} tree; rm -rf back",
            guest.home()
        ));
        assert_eq!(String::from_utf8_lossy(&made.stderr), "");
        let archive = get(&mut guest, "made.tar").expect("read");
        assert_eq!(tar_in(&mut guest, "back", &archive, None), Ok(()), "{format}");
        let same = guest.run(&format!(
            "cd {0}; diff -r --no-dereference tree back/tree",
            guest.home()
        ));
        if !format.starts_with("ustar") {
            assert_eq!(String::from_utf8_lossy(&same.stdout), "", "{format}");
        }
    }
    // One file alone.
    let archive = tar_out(&mut guest, "tree/a");
    assert_eq!(tar_in(&mut guest, "alone", &archive, None), Ok(()));
    assert_eq!(get(&mut guest, "alone/a").expect("read").len(), 300_000);
    let cut = tar_in(&mut guest, "cut", &archive[..100_000], None);
    assert_eq!(cut.expect_err("cut off").kind, FailureKind::Invalid);
    assert_eq!(
        tar_in(&mut guest, "junk", &[b'x'; 5000], None)
            .expect_err("junk")
            .kind,
        FailureKind::Invalid
    );
}

#[test]
fn hostile_archives_stay_inside() {
    let mut guest = Guest::start();
    put(&mut guest, "outside/victim", b"untouched");
    let home = guest.home().to_owned();
    let python = |guest: &mut Guest, members: &str| {
        let script = format!(
            "cd {home}; rm -rf evil.tar inside; python3 -c \"\nimport tarfile, io\n\
             t = tarfile.open('evil.tar', 'w')\n\
             def add(name, type=tarfile.REGTYPE, link='', data=b'evil'):\n  \
             i = tarfile.TarInfo(name); i.type = type; i.linkname = link\n  \
             i.size = len(data) if type == tarfile.REGTYPE else 0\n  \
             t.addfile(i, io.BytesIO(data))\n{members}\nt.close()\""
        );
        let made = guest.run(&script);
        assert_eq!(String::from_utf8_lossy(&made.stderr), "");
        get(guest, "evil.tar").expect("made")
    };
    let attacks = [
        "add('../outside/victim')",
        "add('a/../../outside/victim')",
        "add('/tmp/atoll-guest-evil')",
        "add('link', tarfile.SYMTYPE, '../outside'); add('link/victim')",
        "add('d', tarfile.SYMTYPE, '..'); add('d', tarfile.DIRTYPE); add('d/outside/victim')",
        "add('hard', tarfile.LNKTYPE, '../outside/victim'); add('hard')",
        "add('s', tarfile.SYMTYPE, '../outside'); add('h', tarfile.LNKTYPE, 's/victim'); add('h')",
        "add('null', tarfile.CHRTYPE)",
        "add('fifo', tarfile.FIFOTYPE)",
    ];
    for attack in attacks {
        let archive = python(&mut guest, attack);
        let refused = tar_in(&mut guest, "inside", &archive, None).expect_err(attack);
        assert!(
            matches!(refused.kind, FailureKind::Invalid | FailureKind::NotADirectory),
            "{attack}: {refused:?}"
        );
        assert_eq!(
            get(&mut guest, "outside/victim").expect("there"),
            b"untouched",
            "{attack}"
        );
    }
    // A symlink is replaced by the file of its name, not written through.
    let archive = python(
        &mut guest,
        "add('v', tarfile.SYMTYPE, '../outside/victim'); add('v')",
    );
    assert_eq!(tar_in(&mut guest, "inside", &archive, None), Ok(()));
    assert_eq!(get(&mut guest, "inside/v").expect("there"), b"evil");
    assert_eq!(get(&mut guest, "outside/victim").expect("there"), b"untouched");
}

#[test]
fn written_in_place_the_file_stays_the_same_one() {
    let mut guest = Guest::start();
    put(&mut guest, "first", b"something long");
    let (first, second) = (guest.path("first"), guest.path("second"));
    let name = |path: &[u8]| String::from_utf8(path.to_vec()).expect("text");
    std::fs::hard_link(name(&first), name(&second)).expect("linked");
    write(&mut guest, write_request(first, WriteMode::InPlace), b"short").expect("written");
    assert_eq!(get(&mut guest, "second").expect("read"), b"short");
}

#[test]
fn attributes_are_replaced_below_their_prefix() {
    let mut guest = Guest::start();
    put(&mut guest, "noted", b"x");
    let path = guest.path("noted");
    let set = |prefix: &str, pairs: &[(&str, &str)]| Request::SetAttributes {
        path: path.clone(),
        user: None,
        prefix: prefix.to_owned(),
        attributes: pairs
            .iter()
            .map(|(name, value)| ((*name).to_owned(), value.as_bytes().to_vec()))
            .collect(),
    };
    guest
        .call(&set("user.a.", &[("x", "1"), ("y", "2")]))
        .expect("set");
    guest.call(&set("user.b.", &[("x", "3")])).expect("set");
    guest.call(&set("user.a.", &[("y", "4")])).expect("set");
    let missing = guest.path("missing");
    let stream = guest.open(&Request::Attributes {
        paths: vec![path.clone(), missing],
        user: None,
        prefix: "user.a.".to_owned(),
    });
    match guest.next(stream) {
        Event::Message(Message::Attributes(found)) => {
            assert_eq!(found, [vec![("y".to_owned(), b"4".to_vec())], Vec::new()]);
        }
        other => panic!("unexpected {other:?}"),
    }
    guest.end(stream).expect("it ends well");
}
