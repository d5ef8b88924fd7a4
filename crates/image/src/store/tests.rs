use super::*;
use crate::content::Content;
use crate::progress::Quiet;
use crate::tree::Meta;

fn recipe(user: &str) -> Recipe {
    Recipe {
        source: TemplateSource::Image {
            reference: "test".into(),
            digest: "sha256:0".into(),
        },
        env: BTreeMap::new(),
        workdir: "/".into(),
        user: user.into(),
        start: None,
        command: None,
        exposed_ports: vec![],
        network: None,
        resources: None,
    }
}

fn tree(text: &str) -> Tree {
    let mut tree = Tree::default();
    tree.put_file(b"/file", Meta::root(0o644), Content::bytes(text.as_bytes()))
        .unwrap();
    tree
}

fn add(store: &Templates, text: &str, user: &str, name: Option<&str>) -> TemplateManifest {
    let job = Job::new(Arc::new(Quiet));
    store
        .add(&tree(text), &recipe(user), name, Timestamp(1), &job)
        .unwrap()
}

fn blobs(store: &Templates) -> usize {
    store.files("blobs").unwrap().len()
}

#[test]
fn the_same_thing_built_twice_is_one_template() {
    let dir = tempfile::tempdir().unwrap();
    let store = Templates::open(dir.path()).unwrap();
    let first = add(&store, "a", "root", Some("one"));
    let again = add(&Templates::open(dir.path()).unwrap(), "a", "root", Some("two"));
    assert_eq!(first, again);
    assert_eq!(store.inspect("one").unwrap().names, ["one", "two"]);
    // Another configuration of the same bytes is another template on the same image.
    let other = add(&store, "a", "user", None);
    assert_ne!(other.id, first.id);
    assert_eq!((other.digest, blobs(&store)), (first.digest.clone(), 1));
    store.verify(&first).unwrap();
    assert_eq!(
        store.tree(&first).unwrap().read(b"/file", 9).unwrap().unwrap(),
        b"a"
    );
}

#[test]
fn settings_make_another_template_of_the_same_image() {
    let dir = tempfile::tempdir().unwrap();
    let store = Templates::open(dir.path()).unwrap();
    let plain = add(&store, "a", "root", Some("one"));
    let network = NetworkPolicy {
        preset: Some(atoll_types::Preset::PackageRegistries),
        ..NetworkPolicy::default()
    };
    let start = StartCommand {
        argv: vec!["serve".into()],
        ready: None,
    };
    let set = |start, network| {
        let settings = Settings {
            start,
            network,
            resources: None,
        };
        store
            .with_settings(&plain, settings, "one", Timestamp(2))
            .unwrap()
    };
    let same = set(None, None);
    assert_eq!(same, plain);
    let reaching = set(None, Some(network.clone()));
    assert_ne!(reaching.id, plain.id);
    assert_eq!(store.resolve("one").unwrap().network, Some(network.clone()));
    let more = Settings {
        start: Some(start.clone()),
        network: None,
        resources: Some(Resources::default()),
    };
    let both = store.with_settings(&reaching, more, "one", Timestamp(2)).unwrap();
    assert_eq!((both.start, both.network), (Some(start), Some(network)));
    assert_eq!(both.resources, Some(Resources::default()));
    assert_eq!(blobs(&store), 1);
}

#[test]
fn deleting_removes_names_then_the_template_then_the_image() {
    let dir = tempfile::tempdir().unwrap();
    let store = Templates::open(dir.path()).unwrap();
    let first = add(&store, "a", "root", Some("one"));
    add(&store, "a", "root", Some("two"));
    let other = add(&store, "a", "user", Some("other"));
    store.delete("one", &|_| true).unwrap();
    assert!(matches!(store.delete("two", &|_| true), Err(Error::InUse { .. })));
    store.delete("two", &|_| false).unwrap();
    assert!(matches!(
        store.resolve(first.id.as_str()),
        Err(Error::NotFound { .. })
    ));
    assert_eq!(blobs(&store), 1, "the other template has the same image");
    store.delete(other.id.as_str(), &|_| false).unwrap();
    assert_eq!((blobs(&store), store.list().unwrap().len()), (0, 0));
}

#[test]
fn a_name_moves_and_prune_takes_what_lost_its_name() {
    let dir = tempfile::tempdir().unwrap();
    let store = Templates::open(dir.path()).unwrap();
    let old = add(&store, "a", "root", Some("app"));
    let new = add(&store, "b", "root", Some("app"));
    let job = Job::new(Arc::new(Quiet));
    store.cache("some-key", &tree("cached"), &job).unwrap();
    assert!(store.cached("some-key").unwrap().is_some());
    assert_eq!(store.prune(&|m| m.id == old.id).unwrap().templates, []);
    let pruned = store.prune(&|_| false).unwrap();
    assert_eq!(pruned.templates, std::slice::from_ref(&old.id));
    assert_eq!(store.resolve("app").unwrap(), new);
    assert_eq!((blobs(&store), store.cached("some-key").unwrap()), (1, None));
}

#[test]
fn what_a_dead_build_left_goes_and_a_living_one_stays() {
    let dir = tempfile::tempdir().unwrap();
    let store = Templates::open(dir.path()).unwrap();
    let alive = store.scratch().unwrap();
    let dead = dir.path().join("tmp/dead");
    fs::create_dir(&dead).unwrap();
    fs::write(dead.join("image.erofs"), "half").unwrap();
    fs::write(dir.path().join("tmp/dead.lock"), "").unwrap();
    Templates::open(dir.path()).unwrap();
    assert!(alive.path().exists() && !dead.exists());
    let path = alive.path().to_owned();
    drop(alive);
    assert!(!path.exists());
    assert_eq!(fs::read_dir(dir.path().join("tmp")).unwrap().count(), 0);
}

#[test]
fn a_program_of_a_dead_build_is_ended() {
    use std::os::unix::process::{CommandExt, ExitStatusExt};
    let dir = tempfile::tempdir().unwrap();
    let store = Templates::open(dir.path()).unwrap();
    let start = || {
        std::process::Command::new("sleep")
            .arg("60")
            .process_group(0)
            .spawn()
            .unwrap()
    };
    let (mut left, mut other) = (start(), start());
    let scratch = store.scratch().unwrap();
    scratch.owns_process(left.id()).unwrap();
    let lock = fs::read_dir(dir.path().join("tmp"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .find(|path| path.extension().is_some())
        .unwrap();
    let text = fs::read_to_string(lock).unwrap();
    drop(scratch);
    // As if the owner had been killed; the second line is of a process id that somebody else has now.
    fs::write(
        dir.path().join("tmp/dead.lock"),
        format!("{text}{} 1\n", other.id()),
    )
    .unwrap();
    Templates::open(dir.path()).unwrap();
    assert!(left.wait().unwrap().signal().is_some());
    assert!(other.try_wait().unwrap().is_none());
    other.kill().unwrap();
    other.wait().unwrap();
}

#[test]
fn damage_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let store = Templates::open(dir.path()).unwrap();
    let manifest = add(&store, "a", "root", Some("one"));
    let path = store.image_path(&manifest);
    let mut bytes = fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::remove_file(&path).unwrap();
    fs::write(&path, bytes).unwrap();
    assert!(matches!(store.verify(&manifest), Err(Error::Digest { .. })));
}

#[test]
fn names_are_checked_before_they_become_paths() {
    let dir = tempfile::tempdir().unwrap();
    let store = Templates::open(dir.path()).unwrap();
    for bad in [
        "",
        "../x",
        "a/b",
        ".hidden",
        "Upper",
        "-x",
        &"a".repeat(64),
        "tpl_aaaaaaaaaaaaaaaaaaaa",
    ] {
        assert!(matches!(check_name(bad), Err(Error::BadName { .. })), "{bad}");
    }
    assert!(matches!(store.resolve("../lock"), Err(Error::BadName { .. })));
    assert!(matches!(store.resolve("nothing"), Err(Error::NotFound { .. })));
    for good in ["base", "a", "python3.13-slim_x", &"a".repeat(63)] {
        check_name(good).unwrap();
    }
}

#[test]
fn processes_may_share_a_store() {
    let dir = tempfile::tempdir().unwrap();
    std::thread::scope(|scope| {
        for index in 0..8 {
            let dir = dir.path();
            scope.spawn(move || {
                let store = Templates::open(dir).unwrap();
                for round in 0..5 {
                    add(
                        &store,
                        &format!("{}", round % 3),
                        "root",
                        Some(&format!("n{index}")),
                    );
                    store.prune(&|_| false).unwrap();
                }
            });
        }
    });
    let store = Templates::open(dir.path()).unwrap();
    for listed in store.list().unwrap() {
        store.verify(&listed.manifest).unwrap();
    }
}
