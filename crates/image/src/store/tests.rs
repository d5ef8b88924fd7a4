use super::*;
use crate::content::Content;
use crate::progress::Quiet;
use crate::tree::Meta;
use atoll_types::ProjectId;

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

/// By whoever asks.
fn needed(templates: &[&TemplateManifest]) -> Needed {
    let ids: std::collections::HashSet<TemplateId> = templates.iter().map(|of| of.id.clone()).collect();
    Needed {
        anywhere: ids.clone(),
        here: ids,
    }
}

fn blobs(store: &Templates) -> usize {
    store.files(Path::new("blobs")).unwrap().len()
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
    let in_use = needed(&[&first]);
    store.delete("one", &in_use).unwrap();
    assert!(matches!(store.delete("two", &in_use), Err(Error::InUse { .. })));
    store.delete("two", &Needed::default()).unwrap();
    assert!(matches!(
        store.resolve(first.id.as_str()),
        Err(Error::NotFound { .. })
    ));
    assert_eq!(blobs(&store), 1, "the other template has the same image");
    store.delete(other.id.as_str(), &Needed::default()).unwrap();
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
    assert_eq!(store.prune(&needed(&[&old])).unwrap().templates, []);
    let pruned = store.prune(&Needed::default()).unwrap();
    assert_eq!(pruned.templates, std::slice::from_ref(&old.id));
    assert_eq!(pruned.bytes, old.size_bytes, "the cache went before");
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
                    store.prune(&Needed::default()).unwrap();
                }
            });
        }
    });
    let store = Templates::open(dir.path()).unwrap();
    for listed in store.list().unwrap() {
        store.verify(&listed.manifest).unwrap();
    }
}

fn project(n: u8) -> ProjectId {
    ProjectId::from_entropy([n; 20])
}

fn is_missing<T>(outcome: &Result<T>) -> bool {
    matches!(outcome, Err(Error::NotFound { .. }))
}

fn names(store: &Templates) -> Vec<String> {
    let listed = store.list().unwrap().into_iter();
    let mut names: Vec<String> = listed.flat_map(|listed| listed.names).collect();
    names.sort();
    names
}

#[test]
fn a_project_sees_its_own_and_what_is_shared() {
    let dir = tempfile::tempdir().unwrap();
    let store = Templates::open(dir.path()).unwrap();
    let (a, b) = (store.of(&project(1)), store.of(&project(2)));
    let base = add(&store, "base", "root", Some("base"));
    let app = add(&a, "app", "root", Some("app"));
    assert_eq!(a.resolve("app").unwrap(), app);
    assert_eq!(a.resolve(app.id.as_str()).unwrap(), app);
    for other in [&b, &store] {
        assert_eq!(other.find("app").unwrap(), None);
        assert_eq!(other.find(app.id.as_str()).unwrap(), None);
        assert!(is_missing(&other.inspect(app.id.as_str())));
        assert!(is_missing(&other.name("mine", &app.id, Timestamp(3))));
        assert!(is_missing(&other.share(app.id.as_str(), Timestamp(3))));
        assert!(is_missing(&other.unshare("app", Timestamp(3))));
        assert!(is_missing(&other.delete(app.id.as_str(), &Needed::default())));
        assert!(is_missing(&other.delete("app", &Needed::default())));
        assert_eq!(names(other), ["base"]);
        assert_eq!(other.resolve("base").unwrap(), base);
    }
    // What is shared is nobody's to delete, and of no project.
    assert!(is_missing(&b.delete("base", &Needed::default())));
    assert!(is_missing(&b.delete(base.id.as_str(), &Needed::default())));
    let seen = b.inspect("base").unwrap();
    assert_eq!((seen.shared, seen.own), (true, false));
    let seen = a.inspect("app").unwrap();
    assert_eq!((seen.shared, seen.own), (false, true));
    assert_eq!(names(&a), ["app", "base"]);
    // Whatever was made of it while it could be seen finds it.
    assert_eq!(store.known(&app.id).unwrap(), Some(app));
}

#[test]
fn a_name_of_a_project_hides_everybodys_in_that_project_alone() {
    let dir = tempfile::tempdir().unwrap();
    let store = Templates::open(dir.path()).unwrap();
    let (a, b) = (store.of(&project(1)), store.of(&project(2)));
    let base = add(&store, "base", "root", Some("base"));
    let own = add(&a, "own", "root", Some("base"));
    assert_eq!(a.resolve("base").unwrap(), own);
    assert_eq!(b.resolve("base").unwrap(), base);
    let listed = a.list().unwrap();
    let shared = listed
        .iter()
        .find(|listed| listed.manifest.id == base.id)
        .unwrap();
    assert!(shared.names.is_empty(), "by that name it is another: {shared:?}");
    a.delete("base", &Needed::default()).unwrap();
    assert_eq!(a.resolve("base").unwrap(), base);
}

#[test]
fn who_builds_the_same_does_not_learn_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let store = Templates::open(dir.path()).unwrap();
    let (a, b) = (store.of(&project(1)), store.of(&project(2)));
    let job = Job::new(Arc::new(Quiet));
    let at = |store: &Templates, time| {
        store
            .add(&tree("same"), &recipe("root"), Some("app"), Timestamp(time), &job)
            .unwrap()
    };
    let first = at(&a, 5);
    let second = at(&b, 9);
    assert_eq!((&first.id, &first.digest), (&second.id, &second.digest));
    assert_eq!(
        (first.created_at, second.created_at),
        (Timestamp(5), Timestamp(9))
    );
    assert_eq!(b.inspect("app").unwrap().manifest.created_at, Timestamp(9));
    // Not by what is cached, in either direction.
    a.cache("key", &tree("step"), &job).unwrap();
    assert!(a.cached("key").unwrap().is_some());
    assert_eq!((a.count().unwrap(), b.count().unwrap()), (2, 1));
    assert_eq!(
        (b.cached("key").unwrap(), store.cached("key").unwrap()),
        (None, None)
    );
    // Nor by what goes: what the other one has stays, and as much is told as if there were no other.
    let loses_its_name = add(&b, "new", "root", Some("app"));
    let pruned = b.prune(&Needed::default()).unwrap();
    assert_eq!(pruned.templates, std::slice::from_ref(&second.id));
    assert_eq!(pruned.bytes, second.size_bytes);
    assert!(a.cached("key").unwrap().is_some());
    b.delete(loses_its_name.id.as_str(), &Needed::default()).unwrap();
    a.verify(&first).unwrap();
    a.delete("app", &Needed::default()).unwrap();
    a.prune(&Needed::default()).unwrap();
    assert_eq!((blobs(&store), store.manifests().unwrap()), (0, vec![]));
}

#[test]
fn what_is_shared_is_everybodys_until_it_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let store = Templates::open(dir.path()).unwrap();
    let (a, b) = (store.of(&project(1)), store.of(&project(2)));
    let app = add(&a, "app", "root", Some("app"));
    assert_eq!(a.share("app", Timestamp(7)).unwrap(), app.id);
    assert_eq!(b.resolve("app").unwrap(), app);
    let seen = a.inspect("app").unwrap();
    assert_eq!(
        (seen.shared, seen.own, seen.names),
        (true, true, vec!["app".to_owned()])
    );
    // Again: nothing changes, whoever asks for it.
    assert_eq!(a.share("app", Timestamp(8)).unwrap(), app.id);
    assert_eq!(b.share("app", Timestamp(8)).unwrap(), app.id);
    assert!(!b.inspect("app").unwrap().own);
    // What was built for everybody becomes that of whoever takes it back.
    let tool = add(&store, "tool", "root", Some("tool"));
    a.unshare("tool", Timestamp(9)).unwrap();
    assert_eq!(
        (a.resolve("tool").unwrap(), b.find("tool").unwrap()),
        (tool.clone(), None)
    );
    assert!(is_missing(&a.unshare("tool", Timestamp(9))));
    // What somebody still needs stays, without a reference to it, until nobody does.
    a.unshare(app.id.as_str(), Timestamp(9)).unwrap();
    assert_eq!(
        (b.find("app").unwrap(), b.find(app.id.as_str()).unwrap()),
        (None, None)
    );
    let elsewhere = Needed {
        here: std::collections::HashSet::new(),
        ..needed(&[&app])
    };
    a.delete("app", &elsewhere).unwrap();
    a.prune(&elsewhere).unwrap();
    assert_eq!(a.find(app.id.as_str()).unwrap(), None);
    store.verify(&store.known(&app.id).unwrap().unwrap()).unwrap();
    b.prune(&Needed::default()).unwrap();
    assert_eq!(store.known(&app.id).unwrap(), None);
    a.verify(&tool).unwrap();
}

/// What there is when a server of this version first opens a store belongs to everybody, named or not, as it did.
#[test]
fn what_was_there_before_projects_is_shared() {
    let dir = tempfile::tempdir().unwrap();
    let store = Templates::open(dir.path()).unwrap();
    let old = add(&store, "old", "root", Some("app"));
    let new = add(&store, "new", "root", Some("app"));
    fs::remove_dir_all(dir.path().join("shared")).unwrap();
    // One that was killed while it did this left half of it.
    fs::create_dir(dir.path().join("shared.new")).unwrap();
    fs::write(dir.path().join("shared.new/.half"), "").unwrap();
    let a = Templates::open(dir.path()).unwrap().of(&project(1));
    assert_eq!(a.resolve("app").unwrap(), new);
    assert_eq!(a.inspect(old.id.as_str()).unwrap().manifest, old);
    assert!(!dir.path().join("shared.new").exists());
    // What an older server adds after that has a name and nothing else.
    let late = add(&store, "late", "root", Some("late"));
    fs::remove_file(dir.path().join("shared").join(late.id.as_str())).unwrap();
    assert_eq!(a.resolve(late.id.as_str()).unwrap(), late);
    assert!(a.inspect("late").unwrap().shared);
    store.prune(&Needed::default()).unwrap();
    assert_eq!(a.resolve("late").unwrap(), late);
}

/// A kill between any two steps of publishing leaves it to its project alone, or to nobody.
#[test]
fn half_a_publication_is_nobody_elses() {
    let dir = tempfile::tempdir().unwrap();
    let store = Templates::open(dir.path()).unwrap();
    let (a, b) = (store.of(&project(1)), store.of(&project(2)));
    let app = add(&a, "app", "root", Some("app"));
    let own = dir.path().join("projects").join(project(1).as_str());
    fs::remove_file(own.join("names/app")).unwrap();
    assert_eq!(
        (a.find(app.id.as_str()).unwrap(), b.find(app.id.as_str()).unwrap()),
        (Some(app.clone()), None)
    );
    fs::remove_file(dir.path().join(format!("manifests/{}.json", app.id))).unwrap();
    assert_eq!(
        (a.find(app.id.as_str()).unwrap(), a.list().unwrap()),
        (None, vec![])
    );
    let b = Templates::open(b.dir()).unwrap().of(&project(2));
    assert_eq!(b.list().unwrap(), []);
    a.prune(&Needed::default()).unwrap();
    assert_eq!(
        (blobs(&store), fs::read_dir(own.join("owned")).unwrap().count()),
        (0, 0)
    );
}

#[test]
fn what_is_said_of_a_template_is_bounded_and_nothing_is_left_of_one_that_says_more() {
    let dir = tempfile::tempdir().unwrap();
    let store = Templates::open(dir.path()).unwrap();
    let plain = add(&store, "a", "root", Some("plain"));
    let large = Recipe {
        env: BTreeMap::from([("A".into(), "x".repeat(MOST_MANIFEST))]),
        ..recipe("root")
    };
    let refused = store.add_blob(&plain.digest, &large, Some("large"), Timestamp(1));
    assert!(matches!(refused, Err(Error::TooMuchSaid { .. })), "{refused:?}");
    assert!(store.inspect("large").is_err());
    assert_eq!(store.list().unwrap().len(), 1);
}
