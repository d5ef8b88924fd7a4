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

impl Templates {
    /// All that can be seen from here, newest first.
    pub(crate) fn list(&self) -> Result<Vec<Listed>> {
        self.gather(None, Some)
    }
}

/// By whoever asks.
fn needed(templates: &[&TemplateManifest]) -> Needed {
    let ids: std::collections::HashSet<TemplateId> = templates.iter().map(|of| of.id.clone()).collect();
    Needed {
        anywhere: ids.clone(),
        here: ids,
    }
}

fn cache(store: &Templates, key: &str, tree: &Tree) {
    let job = Job::new(Arc::new(Quiet));
    store.cache(key, tree, &store.scratch().unwrap(), &job).unwrap();
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
    cache(&store, "some-key", &tree("cached"));
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
    let path = store.blob_path(&manifest.digest);
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
    cache(&a, "key", &tree("step"));
    assert!(a.cached("key").unwrap().is_some());
    assert_eq!(
        (a.count().unwrap(), b.count().unwrap()),
        (3, 2),
        "with their names"
    );
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

/// A template that is a layer on another: its tree with one more file.
fn add_on(store: &Templates, below: &TemplateManifest, text: &str, name: &str, now: i64) -> TemplateManifest {
    let mut tree = store.tree(below).unwrap();
    tree.put_file(b"/more", Meta::root(0o644), Content::bytes(text.as_bytes()))
        .unwrap();
    let job = Job::new(Arc::new(Quiet));
    store
        .add(&tree, &recipe("root"), Some(name), Timestamp(now), &job)
        .unwrap()
}

#[test]
fn a_layer_keeps_what_it_lies_on_and_goes_before_it() {
    let dir = tempfile::tempdir().unwrap();
    let store = Templates::open(dir.path()).unwrap();
    let base = add(&store, "base", "root", Some("base"));
    let app = add_on(&store, &base, "1", "app", 1);
    let top = add_on(&store, &app, "2", "top", 1);
    let files = store.image_files(&top.digest).unwrap();
    assert_eq!(files.len(), 3);
    assert_eq!(files[1..], store.image_files(&app.digest).unwrap());
    assert_eq!(files[2..], store.image_files(&base.digest).unwrap());
    let nobody = Needed::default();
    for name in ["base", "app"] {
        store.delete(name, &nobody).unwrap();
        store.prune(&nobody).unwrap();
        store.verify(&top).unwrap();
        assert_eq!(blobs(&store), 3);
    }
    let read = |path: &[u8]| store.tree(&top).unwrap().read(path, 9).unwrap().unwrap();
    assert_eq!(
        (read(b"/file"), read(b"/more")),
        (b"base".to_vec(), b"2".to_vec())
    );
    // What nobody can see is needed all the same by whoever runs on it.
    let sandbox = Needed {
        here: std::collections::HashSet::new(),
        ..needed(&[&top])
    };
    store.delete("top", &sandbox).unwrap();
    assert_eq!(blobs(&store), 3);
    store.prune(&nobody).unwrap();
    assert_eq!(blobs(&store), 0);
}

#[test]
fn a_damaged_lower_file_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let store = Templates::open(dir.path()).unwrap();
    let base = add(&store, "base", "root", Some("base"));
    let app = add_on(&store, &base, "1", "app", 1);
    store.verify(&app).unwrap();
    let path = store.blob_path(&base.digest);
    let mut bytes = fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::remove_file(&path).unwrap();
    fs::write(&path, &bytes).unwrap();
    assert!(matches!(store.verify(&app), Err(Error::Digest { .. })));
    fs::write(&path, &bytes[..4096]).unwrap();
    assert!(store.tree(&app).is_err());
}

/// For a kernel there is one more file, made once, and gone with what it is of.
#[test]
fn kernels_get_an_index() {
    let dir = tempfile::tempdir().unwrap();
    let store = Templates::open(dir.path()).unwrap();
    let base = add(&store, "base", "root", Some("base"));
    assert_eq!(
        store.kernel_files(&base.digest).unwrap(),
        store.image_files(&base.digest).unwrap()
    );
    let app = add_on(&store, &base, "1", "app", 1);
    let files = store.kernel_files(&app.digest).unwrap();
    assert_eq!(files[1..], store.image_files(&app.digest).unwrap());
    let index = fs::read(&files[0]).unwrap();
    assert_eq!(store.kernel_files(&app.digest).unwrap(), files);
    store.prune(&Needed::default()).unwrap();
    assert_eq!(fs::read(&files[0]).unwrap(), index);
    store.delete("app", &Needed::default()).unwrap();
    assert!(!files[0].exists());
}

/// Shared files below a project's own are nobody's storage, and what a project alone has below is its own.
#[test]
fn layers_count_where_they_are() {
    let dir = tempfile::tempdir().unwrap();
    let store = Templates::open(dir.path()).unwrap();
    let a = store.of(&project(1));
    let base = add(&store, "base", "root", Some("base"));
    let app = add_on(&a, &base, "1", "app", 1);
    let counted = |store: &Templates| store.images().unwrap().values().sum::<u64>();
    assert_eq!(counted(&a), app.layer_bytes.unwrap());
    // Other words about a shared image cost nothing.
    let words = a.add_blob(&base.digest, &recipe("user"), Some("words"), Timestamp(1));
    words.unwrap();
    assert_eq!(counted(&a), app.layer_bytes.unwrap());
    a.delete("words", &Needed::default()).unwrap();
    assert_eq!(counted(&store), base.size_bytes);
    store.delete("base", &Needed::default()).unwrap();
    assert_eq!(counted(&a), app.size_bytes);
}

#[test]
fn what_lost_its_name_goes_by_itself_after_a_while() {
    const DAY: i64 = 24 * 60 * 60 * 1000;
    let dir = tempfile::tempdir().unwrap();
    let store = Templates::open(dir.path()).unwrap();
    let base = add(&store, "base", "root", Some("base"));
    let now = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap();
    let now = i64::try_from(now.as_millis()).unwrap();
    let first = add_on(&store, &base, "1", "app", now);
    let second = add_on(&store, &base, "2", "app", now + 1);
    cache(&store, "key", &tree("step"));
    let collect = |needed: &Needed, at| store.collect(needed, Timestamp(at)).unwrap();
    assert_eq!(collect(&Needed::default(), now + DAY - 1), Pruned::default());
    assert_eq!(collect(&needed(&[&first]), now + DAY), Pruned::default());
    let collected = collect(&Needed::default(), now + DAY);
    assert_eq!(collected.templates, std::slice::from_ref(&first.id));
    assert_eq!(
        collected.bytes,
        first.layer_bytes.unwrap(),
        "and not what it lay on"
    );
    store.verify(&second).unwrap();
    // What has a name stays, however old.
    let later = collect(&Needed::default(), now + 8 * DAY);
    assert_eq!((later.templates, later.cache_entries), (vec![], 1));
    assert_eq!(store.cached("key").unwrap(), None);
    store.verify(&second).unwrap();
}

#[derive(Debug)]
struct Left(std::sync::atomic::AtomicU64);

impl Room for Left {
    fn take(&self, bytes: u64) -> std::result::Result<(), Fault> {
        use std::sync::atomic::Ordering::Relaxed;
        self.0
            .fetch_update(Relaxed, Relaxed, |left| left.checked_sub(bytes))
            .map(drop)
            .map_err(|_| Fault::new(atoll_types::Code::StorageQuotaExceeded, "no more"))
    }

    fn left(&self) -> u64 {
        self.0.load(std::sync::atomic::Ordering::Relaxed)
    }
}

#[test]
fn what_there_is_no_room_for_is_not_kept() {
    let dir = tempfile::tempdir().unwrap();
    let store = Templates::open(dir.path()).unwrap();
    let base = add(&store, "base", "root", Some("base"));
    let within = store
        .clone()
        .within(Arc::new(Left(std::sync::atomic::AtomicU64::new(base.size_bytes))));
    let job = Job::new(Arc::new(Quiet));
    // A layer that changes nothing takes nothing, and a step takes what it changed.
    cache(&within, "same", &store.tree(&base).unwrap());
    cache(&within, "step", &tree("a"));
    let refused = within.cache("next", &tree("b"), &store.scratch().unwrap(), &job);
    assert!(matches!(refused, Err(Error::Refused(_))), "{refused:?}");
    let refused = within.add(&tree("c"), &recipe("root"), Some("c"), Timestamp(1), &job);
    assert!(matches!(refused, Err(Error::Refused(_))), "{refused:?}");
    assert_eq!((blobs(&store), store.cached("next").unwrap()), (2, None));
    assert!(store.find("c").unwrap().is_none());
    assert_eq!(store.files(Path::new("tmp")).unwrap(), Vec::<String>::new());
}

#[test]
fn pages_follow_each_other_and_hold_so_many_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let store = Templates::open(dir.path()).unwrap();
    let (a, job) = (store.of(&project(1)), Job::new(Arc::new(Quiet)));
    for n in 0..7 {
        // Two at a time, so that the id counts, too.
        let (name, at) = (format!("app-{n}"), Timestamp(n / 2));
        let recipe = recipe(&name);
        a.add(&tree("same"), &recipe, Some(&name), at, &job).unwrap();
    }
    add(&store, "shared", "root", Some("base"));
    let all: Vec<_> = a.list().unwrap().into_iter().map(|one| one.manifest.id).collect();
    assert_eq!(all.len(), 8);
    let pages = |limit, bytes| {
        let (mut seen, mut lengths, mut after) = (Vec::new(), Vec::new(), None);
        loop {
            let (page, sum) = a.page(after.as_ref(), limit, bytes).unwrap();
            assert!(sum > 0 && (sum <= bytes || page.items.len() == 1));
            lengths.push(page.items.len());
            seen.extend(page.items);
            after = page.next;
            if after.is_none() {
                return (seen, lengths);
            }
        }
    };
    assert_eq!(pages(3, u64::MAX), (all.clone(), vec![3, 3, 2]));
    assert_eq!(pages(8, u64::MAX), (all.clone(), vec![8]));
    let (page, of_two) = a.page(None, 2, u64::MAX).unwrap();
    assert_eq!(page.items, all[..2]);
    let (seen, lengths) = pages(100, of_two);
    assert_eq!(seen, all);
    assert!(lengths.iter().all(|length| *length <= 2), "{lengths:?}");
    assert_eq!(pages(100, 1), (all.clone(), vec![1; 8]));
    let of_some = a.gather(Some(all[..2].to_vec()), |one| one.names.first().cloned());
    assert_eq!(of_some.unwrap().len(), 2);
}

/// Whoever came to need it while it was being deleted is asked for again.
#[test]
fn what_is_needed_meanwhile_stays() {
    let dir = tempfile::tempdir().unwrap();
    let store = Templates::open(dir.path()).unwrap();
    for prune in [false, true] {
        let app = add(&store, "app", "root", Some("app"));
        let asked = std::cell::Cell::new(0);
        let needs = || {
            asked.set(asked.get() + 1);
            // Not when it is decided, but before it is over.
            Ok(match asked.get() {
                1 | 2 => Needed::default(),
                _ => needed(&[&app]),
            })
        };
        match prune {
            false => store.delete("app", &needs).unwrap(),
            true => {
                store.delete("app", &needed(&[&app]).only_elsewhere()).unwrap();
                drop(store.prune(&needs).unwrap());
            }
        }
        assert_eq!(store.known(&app.id).unwrap().as_ref(), Some(&app));
        store.verify(&app).unwrap();
        assert!(store.find("app").unwrap().is_none());
        store.prune(&Needed::default()).unwrap();
        assert_eq!((store.known(&app.id).unwrap(), blobs(&store)), (None, 0));
    }
}

impl Needed {
    fn only_elsewhere(mut self) -> Self {
        self.here.clear();
        self
    }
}
