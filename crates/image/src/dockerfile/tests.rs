use parking_lot::Mutex;
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use atoll_types::{Preset, TemplateManifest, TemplateSource};

use super::*;
use crate::content::Content;
use crate::error::Result;
use crate::fixture::{Archive, gzip};
use crate::progress::Quiet;
use crate::store::Templates;
use crate::tree::{Entries, Kind, LastLink, Meta, Tree};

/// Understands `put PATH TEXT`, `remove PATH` and `fail CODE`, and notes who ran what.
#[derive(Default)]
struct FakeRunner {
    log: Arc<Mutex<Vec<RunCommand>>>,
    alive: Arc<AtomicUsize>,
}

struct FakeSandbox {
    log: Arc<Mutex<Vec<RunCommand>>>,
    alive: Arc<AtomicUsize>,
    changes: Archive,
}

#[async_trait]
impl StepRunner for FakeRunner {
    async fn start(&self, _image: &str) -> Result<Box<dyn BuildSandbox>, String> {
        self.alive.fetch_add(1, Ordering::SeqCst);
        Ok(Box::new(FakeSandbox {
            log: Arc::clone(&self.log),
            alive: Arc::clone(&self.alive),
            changes: Archive::new(),
        }))
    }
}

#[async_trait]
impl BuildSandbox for FakeSandbox {
    async fn run(&mut self, command: RunCommand, output: &Output<'_>) -> Result<i32, String> {
        let script = command.argv.last().cloned().unwrap_or_default();
        self.log.lock().push(command);
        output(format!("running {script}\n").as_bytes());
        let words: Vec<&str> = script.split_whitespace().collect();
        let changes = std::mem::take(&mut self.changes);
        self.changes = match words[..] {
            ["put", path, text] => changes.file(&path[1..], text).file("proc/1/status", "never"),
            ["remove", path] => {
                let (dir, name) = path[1..].rsplit_once('/').unwrap_or(("", &path[1..]));
                let hidden = format!("{dir}/.wh.{name}");
                changes.file(hidden.trim_start_matches('/'), "")
            }
            ["hang"] => std::future::pending().await,
            ["fail", code] => return Ok(code.parse().unwrap()),
            _ => changes,
        };
        Ok(0)
    }

    async fn export(&mut self, archive: &Path) -> Result<Whiteouts, String> {
        fs::write(archive, std::mem::take(&mut self.changes).bytes()).unwrap();
        Ok(Whiteouts::Oci)
    }

    async fn destroy(self: Box<Self>) {}
}

impl Drop for FakeSandbox {
    fn drop(&mut self) {
        self.alive.fetch_sub(1, Ordering::SeqCst);
    }
}

struct Bench {
    dir: tempfile::TempDir,
    store: Templates,
    runner: FakeRunner,
    args: BTreeMap<String, String>,
    target: Option<String>,
    network: Option<NetworkPolicy>,
    start: bool,
}

impl Bench {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = Templates::open(dir.path().join("store")).unwrap();
        fs::create_dir(dir.path().join("context")).unwrap();
        let bench = Self {
            dir,
            store,
            runner: FakeRunner::default(),
            args: BTreeMap::new(),
            target: None,
            network: None,
            start: false,
        };
        bench.add_base();
        bench
    }

    fn add_base(&self) {
        let mut tree = Tree::default();
        let mut put = |path: &str, text: &str| {
            tree.put_file(
                path.as_bytes(),
                Meta::root(0o644),
                Content::bytes(text.as_bytes()),
            )
            .unwrap();
        };
        put(
            "/etc/passwd",
            "root:x:0:0::/root:/bin/sh\napp:x:500:501::/:/bin/sh\n",
        );
        put("/etc/group", "root:x:0:\nstaff:x:600:\n");
        tree.put(b"/proc", Meta::root(0o555), Kind::Directory(Entries::new()))
            .unwrap();
        let recipe = crate::Recipe {
            source: TemplateSource::Debian {
                suite: "test".into(),
                packages: vec![],
            },
            env: [("LANG".to_owned(), "C.UTF-8".to_owned())].into(),
            workdir: "/home/user".into(),
            user: "user".into(),
            start: None,
            command: None,
            exposed_ports: vec![],
            network: None,
            resources: None,
        };
        let job = crate::progress::Job::new(Arc::new(Quiet));
        self.store
            .add(&tree, &recipe, Some("base"), Timestamp(1), &job)
            .unwrap();
    }

    fn context(&self, path: &str, data: impl AsRef<[u8]>) {
        let path = self.dir.path().join("context").join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, data).unwrap();
    }

    async fn build(&self, dockerfile: &str) -> Result<TemplateManifest> {
        self.context("Dockerfile", dockerfile);
        let options = DockerfileOptions {
            name: "app".into(),
            context: self.dir.path().join("context"),
            dockerfile: dockerfile.into(),
            args: self.args.clone(),
            target: self.target.clone(),
            start: self.start,
            no_cache: false,
            network: self.network.clone(),
            login: None,
            now: Timestamp(2),
        };
        let result = self
            .store
            .build_dockerfile(options, &self.runner, Arc::new(Quiet))
            .await;
        assert_eq!(self.runner.alive.load(Ordering::SeqCst), 0, "a sandbox was left");
        let left = fs::read_dir(self.store.dir().join("tmp")).unwrap().count();
        assert_eq!(left, 0, "a build leaves nothing behind");
        result
    }

    fn read(&self, manifest: &TemplateManifest, path: &str) -> Option<String> {
        let tree = self.store.tree(manifest).unwrap();
        let bytes = tree.read(path.as_bytes(), 1000).unwrap()?;
        Some(String::from_utf8(bytes).unwrap())
    }

    fn runs(&self) -> usize {
        self.runner.log.lock().len()
    }

    async fn refused(&self, dockerfile: &str, expected: &str) {
        let error = self.build(dockerfile).await.unwrap_err().to_string();
        assert!(error.contains(expected), "{dockerfile:?}: {error}");
    }
}

#[tokio::test]
async fn what_an_image_runs_is_known_and_started_only_when_asked() {
    let mut bench = Bench::new();
    let command = async |bench: &Bench, text: &str| {
        let built = bench.build(text).await.unwrap();
        assert_eq!(built.start, None);
        let command = built.command.unwrap_or_default();
        (command.entrypoint.join(" "), command.cmd.join(" "))
    };
    let of = |entrypoint: &str, cmd: &str| (entrypoint.to_owned(), cmd.to_owned());
    // In either order; and a stage of its own drops only what it inherits.
    let both = "CMD [\"b\"]\nENTRYPOINT [\"a\"]\n";
    assert_eq!(command(&bench, &format!("FROM base\n{both}")).await, of("a", "b"));
    let inherits = "FROM base AS one\nCMD [\"b\"]\nFROM one\nENTRYPOINT [\"a\"]\n";
    assert_eq!(command(&bench, inherits).await, of("a", ""));
    let twice = "FROM base AS one\nENTRYPOINT [\"a\"]\nCMD [\"b\"]\nFROM one\nCMD [\"c\"]\n";
    assert_eq!(command(&bench, twice).await, of("a", "c"));
    // From a template it is inherited as from an image.
    assert_eq!(command(&bench, "FROM app\nCMD [\"d\"]\n").await, of("a", "d"));

    bench.start = true;
    let built = bench.build(&format!("FROM base\n{both}")).await.unwrap();
    assert_eq!(built.start.unwrap().argv, ["a", "b"]);
    let error = bench.build("FROM base\nENV X=1\n").await.unwrap_err();
    assert!(error.to_string().contains("nothing to start"), "{error}");
}

#[tokio::test]
async fn arguments_before_the_first_from_are_put_in() {
    let bench = Bench::new();
    let text = "ARG A=1\nARG B=$A-2\nFROM base\nARG B\nARG TARGETARCH\nARG TARGETPLATFORM\n\
                ENV B=$B ARCH=$TARGETARCH PLATFORM=$TARGETPLATFORM NONE=$BUILDARCH\n";
    let built = bench.build(text).await.unwrap();
    let architecture = crate::oci::architecture();
    assert_eq!(built.env["B"], "1-2");
    assert_eq!(built.env["ARCH"], architecture);
    assert_eq!(built.env["PLATFORM"], format!("linux/{architecture}"));
    assert_eq!(built.env["NONE"], "", "those that are not asked for stay out");
}

#[tokio::test]
async fn other_platforms_are_refused() {
    let bench = Bench::new();
    let architecture = crate::oci::architecture();
    for platform in [
        &format!("linux/{architecture}"),
        "$BUILDPLATFORM",
        "${TARGETPLATFORM}",
    ] {
        bench
            .build(&format!("FROM --platform={platform} base\n"))
            .await
            .unwrap();
    }
    let other = if architecture == "amd64" { "arm64" } else { "amd64" };
    for platform in [
        &format!("linux/{other}"),
        "windows/amd64",
        "linux/s390x",
        "$UNKNOWN",
    ] {
        let error = bench
            .build(&format!("FROM base\nFROM --platform={platform} base\n"))
            .await
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("line 2") && error.contains("--platform"),
            "{error}"
        );
    }
}

const WHOLE: &str = r#"
ARG BASE=base
FROM ${BASE}
ARG VERSION=1
ENV APP=/srv/app MODE="a b" \
    # a comment in the middle
    SHOUT='$APP'
WORKDIR $APP
COPY --chown=app:staff --chmod=640 src/*.txt conf ./
RUN put /srv/app/made by-run
USER app
RUN ["put", "put /tmp-x exec"]
ADD files.tar.gz /unpacked/
EXPOSE 8080 9000-9002/tcp 53/udp
ENTRYPOINT ["/srv/app/start"]
CMD serve now
"#;

#[tokio::test]
async fn a_whole_dockerfile_is_built() {
    let mut bench = Bench::new();
    bench.start = true;
    bench.context("src/a.txt", "A");
    bench.context("src/b.txt", "B");
    bench.context("src/c.rs", "C");
    bench.context("conf/deep/x", "X");
    bench.context("files.tar.gz", gzip(&Archive::new().file("in/tar", "T").bytes()));
    let built = bench.build(WHOLE).await.unwrap();
    for (path, text) in [
        ("/srv/app/a.txt", Some("A")),
        ("/srv/app/b.txt", Some("B")),
        ("/srv/app/c.rs", None),
        ("/srv/app/deep/x", Some("X")),
        ("/srv/app/made", Some("by-run")),
        ("/unpacked/in/tar", Some("T")),
        ("/proc/1/status", None),
    ] {
        assert_eq!(bench.read(&built, path).as_deref(), text, "{path}");
    }
    let tree = bench.store.tree(&built).unwrap();
    let copied = tree.lookup(b"/srv/app/a.txt", LastLink::Keep).unwrap().unwrap();
    let meta = &tree.node(copied).meta;
    assert_eq!((meta.uid, meta.gid, meta.mode), (500, 600, 0o640));
    let proc = tree.lookup(b"/proc", LastLink::Keep).unwrap().unwrap();
    assert_eq!(tree.node(proc).meta.mode, 0o555);

    assert_eq!((built.user.as_str(), built.workdir.as_str()), ("app", "/srv/app"));
    assert_eq!(
        (built.env["MODE"].as_str(), built.env["SHOUT"].as_str()),
        ("a b", "$APP")
    );
    assert_eq!(
        (built.env["LANG"].as_str(), built.env.contains_key("VERSION")),
        ("C.UTF-8", false)
    );
    assert_eq!(built.exposed_ports, [8080, 9000, 9001, 9002]);
    assert_eq!(
        built.start.as_ref().unwrap().argv,
        ["/srv/app/start", "/bin/sh", "-c", "serve now"]
    );

    let log = bench.runner.log.lock().clone();
    assert_eq!(log[0].argv, ["/bin/sh", "-c", "put /srv/app/made by-run"]);
    assert_eq!(
        (log[0].user.as_str(), log[0].workdir.as_str()),
        ("root", "/srv/app")
    );
    assert_eq!(log[0].env["VERSION"], "1");
    assert_eq!((log[1].argv[0].as_str(), log[1].user.as_str()), ("put", "app"));

    // Again: nothing runs, and it is the same template.
    assert_eq!(bench.build(WHOLE).await.unwrap(), built);
    assert_eq!(bench.runs(), 2);
    // A copied file that differs runs everything after it again.
    bench.context("src/a.txt", "A2");
    let other = bench.build(WHOLE).await.unwrap();
    assert_eq!(bench.read(&other, "/srv/app/a.txt").as_deref(), Some("A2"));
    assert_eq!(bench.runs(), 4);
}

#[tokio::test]
async fn arguments_are_part_of_the_key() {
    let mut bench = Bench::new();
    let file = "FROM base\nARG V=1\nRUN put /v $V\n";
    bench.build(file).await.unwrap();
    bench.build(file).await.unwrap();
    assert_eq!(bench.runs(), 1);
    bench.args.insert("V".into(), "2".into());
    bench.build(file).await.unwrap();
    assert_eq!(bench.runs(), 2);
    assert_eq!(bench.runner.log.lock()[1].env["V"], "2");
}

#[tokio::test]
async fn what_steps_may_reach_is_part_of_the_key() {
    let mut bench = Bench::new();
    let text = "FROM base\nRUN put /x 1\n";
    let mut built = Vec::new();
    for preset in [
        None,
        Some(Preset::PackageRegistries),
        Some(Preset::AllPublic),
        None,
    ] {
        bench.network = preset.map(|preset| NetworkPolicy {
            preset: Some(preset),
            ..NetworkPolicy::default()
        });
        built.push(bench.build(text).await.unwrap());
    }
    assert_eq!(bench.runs(), 3, "the last was known");
    // It is about the build: what came of it is the same.
    assert!(built.iter().all(|manifest| *manifest == built[0]));
    assert_eq!(built[0].network, None);
}

#[tokio::test]
async fn the_resolver_of_a_step_is_its_sandboxs() {
    let bench = Bench::new();
    bench.context("resolv.conf", "base");
    let text = "FROM base\nRUN put /etc/resolv.conf a\nCOPY resolv.conf /etc/\nRUN put /etc/resolv.conf b\n";
    let manifest = bench.build(text).await.unwrap();
    assert_eq!(bench.read(&manifest, "/etc/resolv.conf").as_deref(), Some("base"));
    let manifest = bench
        .build("FROM base\nRUN put /etc/resolv.conf c\n")
        .await
        .unwrap();
    assert_eq!(bench.read(&manifest, "/etc/resolv.conf"), None);
}

#[tokio::test]
async fn what_steps_change_becomes_layers() {
    let bench = Bench::new();
    let base = bench.store.resolve("base").unwrap();
    let built = bench
        .build("FROM base\nRUN put /new 1\nRUN remove /etc/group\n")
        .await
        .unwrap();
    assert_eq!(bench.read(&built, "/new").as_deref(), Some("1"));
    assert_eq!(bench.read(&built, "/etc/group"), None);
    assert!(bench.read(&built, "/etc/passwd").is_some());
    assert_eq!(built.user, "user", "the base template's user stays");
    let files = bench.store.image_files(&built.digest).unwrap();
    assert_eq!(
        files.len(),
        3,
        "two steps, each on what was there before: {files:?}"
    );
    assert_eq!(files[2..], bench.store.image_files(&base.digest).unwrap());
    bench.store.verify(&built).unwrap();
    let sizes: Vec<u64> = files
        .iter()
        .map(|file| fs::metadata(file).unwrap().len())
        .collect();
    assert_eq!(
        (built.size_bytes, built.layer_bytes),
        (sizes.iter().sum(), Some(sizes[0]))
    );
    assert_eq!((base.size_bytes, base.layer_bytes), (sizes[2], None));
}

#[tokio::test]
async fn a_step_that_changes_nothing_adds_nothing() {
    let bench = Bench::new();
    let built = bench
        .build("FROM base\nRUN true\nRUN true again\n")
        .await
        .unwrap();
    assert_eq!(bench.runs(), 2);
    assert_eq!(built.digest, bench.store.resolve("base").unwrap().digest);
}

/// Beyond the most files that an image may have, what lies on the base becomes one layer.
#[tokio::test]
async fn layers_do_not_pile_up_for_ever() {
    let bench = Bench::new();
    let mut text = "FROM base\n".to_owned();
    for step in 0..crate::MAX_FILES + 5 {
        text += &format!("RUN put /file-{step} {step}\n");
    }
    let built = bench.build(&text).await.unwrap();
    let files = bench.store.image_files(&built.digest).unwrap();
    assert_eq!(files.len(), 1 + 6, "{files:?}");
    let base = bench.store.resolve("base").unwrap();
    assert_eq!(files[6..], bench.store.image_files(&base.digest).unwrap());
    for step in 0..crate::MAX_FILES + 5 {
        let text = bench.read(&built, &format!("/file-{step}"));
        assert_eq!(text, Some(step.to_string()));
    }
}

/// A base may be deleted while something is built on it.
#[tokio::test]
async fn a_build_keeps_what_it_builds_on() {
    struct Deleting(FakeRunner, Templates);
    #[async_trait]
    impl StepRunner for Deleting {
        async fn start(&self, image: &str) -> Result<Box<dyn BuildSandbox>, String> {
            let nobody = crate::Needed::default();
            if self.1.find("base").unwrap().is_some() {
                self.1.delete("base", &nobody).unwrap();
            }
            self.1.prune(&nobody).unwrap();
            self.0.start(image).await
        }
    }
    let bench = Bench::new();
    let base = bench.store.resolve("base").unwrap().digest;
    let runner = Deleting(FakeRunner::default(), bench.store.clone());
    let options = DockerfileOptions {
        name: "app".into(),
        context: bench.dir.path().join("context"),
        dockerfile: "FROM base\nRUN put /a 1\nRUN put /b 2\n".into(),
        args: BTreeMap::new(),
        target: None,
        start: false,
        no_cache: false,
        network: None,
        login: None,
        now: Timestamp(2),
    };
    let built = bench
        .store
        .build_dockerfile(options, &runner, Arc::new(Quiet))
        .await;
    let built = built.unwrap();
    bench.store.verify(&built).unwrap();
    assert_eq!(bench.read(&built, "/a").as_deref(), Some("1"));
    assert!(bench.store.blob_path(&base).exists());
    // With what lies on it, it goes.
    let nobody = crate::Needed::default();
    bench.store.prune(&nobody).unwrap();
    assert!(bench.store.blob_path(&base).exists());
    bench.store.delete("app", &nobody).unwrap();
    assert_eq!(fs::read_dir(bench.store.dir().join("blobs")).unwrap().count(), 0);
}

#[tokio::test]
async fn stages_copy_from_each_other_and_unneeded_ones_are_skipped() {
    let mut bench = Bench::new();
    let file = "FROM base AS Build\nRUN put /out/bin compiled\n\
                FROM base AS unused\nRUN fail 9\n\
                FROM scratch AS final\nCOPY --from=build /out /app\nCOPY --from=base /etc/passwd /etc/\n\
                FROM final\nENV X=1\n";
    let built = bench.build(file).await.unwrap();
    assert_eq!(bench.read(&built, "/app/bin").as_deref(), Some("compiled"));
    assert!(bench.read(&built, "/etc/passwd").unwrap().contains("app:"));
    assert_eq!(bench.read(&built, "/etc/group"), None);
    assert_eq!((bench.runs(), built.user.as_str()), (1, "root"));
    bench.target = Some("unused".into());
    bench.refused(file, "ended with exit code 9").await;
}

#[tokio::test]
async fn here_documents_are_files_and_scripts() {
    let bench = Bench::new();
    let file = "FROM base\nENV NAME=world\nRUN <<EOF\nput /a 1\nEOF\n\
                RUN cat <<'E1' > /x\n$literal\nE1\n\
                COPY <<one <<\"two\" /conf/\nhello \"$NAME\"\none\n$NAME\ntwo\n";
    let built = bench.build(file).await.unwrap();
    assert_eq!(bench.read(&built, "/a").as_deref(), Some("1"));
    assert_eq!(
        bench.read(&built, "/conf/one").as_deref(),
        Some("hello \"world\"\n")
    );
    assert_eq!(bench.read(&built, "/conf/two").as_deref(), Some("$NAME\n"));
    let log = bench.runner.log.lock().clone();
    assert_eq!(log[1].argv[2], "cat <<'E1' > /x\n$literal\nE1\n");
}

#[tokio::test]
async fn the_context_ends_where_it_ends() {
    let bench = Bench::new();
    bench.context("in", "inside");
    bench.context("secret.key", "s");
    bench.context(".dockerignore", "*.key\n");
    fs::write(bench.dir.path().join("outside"), "host").unwrap();
    let context = bench.dir.path().join("context");
    std::os::unix::fs::symlink("../outside", context.join("link")).unwrap();
    std::os::unix::fs::symlink("/etc/passwd", context.join("abs")).unwrap();
    // `..` stops at the top of the context, links lead nowhere or stay links.
    bench
        .refused("FROM scratch\nCOPY ../outside /x\n", "matches nothing")
        .await;
    bench
        .refused("FROM scratch\nCOPY link /x\n", "matches nothing")
        .await;
    bench
        .refused("FROM scratch\nCOPY abs /x\n", "matches nothing")
        .await;
    bench
        .refused("FROM scratch\nCOPY secret.key /x\n", ".dockerignore")
        .await;
    let built = bench
        .build("FROM scratch\nCOPY . /all/\nCOPY in ../../../up\n")
        .await
        .unwrap();
    let tree = bench.store.tree(&built).unwrap();
    let link = tree.lookup(b"/all/link", LastLink::Keep).unwrap().unwrap();
    assert!(matches!(&tree.node(link).kind, Kind::Symlink(target) if &**target == b"../outside"));
    assert_eq!(bench.read(&built, "/all/secret.key"), None);
    assert_eq!(bench.read(&built, "/up").as_deref(), Some("inside"));
}

#[tokio::test]
async fn refusals_say_where_and_why() {
    let bench = Bench::new();
    bench.context("a", "1");
    bench.context("b", "2");
    for (file, expected) in [
        ("", "no FROM"),
        ("RUN x\nFROM base", "line 1: RUN before the first FROM"),
        ("FROM base\n\n# c\nFROB x", "line 4: unknown instruction `FROB`"),
        ("FROM base\nONBUILD RUN x", "ONBUILD"),
        (
            "FROM base\nRUN --mount=type=cache,target=/x y",
            "--mount is not supported",
        ),
        (
            "FROM base\nADD https://example.com/x /x",
            "download it with RUN curl",
        ),
        ("FROM base\nCOPY a", "at least one source"),
        ("FROM base\nCOPY a b /x", "write `/x/`"),
        ("FROM base\nCOPY --chown=nobody a /x", "no user `nobody`"),
        ("FROM base\nCOPY --chmod=99 a /x", "octal"),
        ("FROM base\nENV A", "NAME=value"),
        ("FROM base\nENV A=\"x", "not closed"),
        ("FROM base\nEXPOSE http", "not a port"),
        ("FROM base\nSHELL bash", "JSON array"),
        ("FROM base\nWORKDIR", "needs an argument"),
        ("FROM base\nWORKDIR /etc/passwd", "not a directory"),
        ("FROM base AS", "write FROM as"),
        ("FROM $NOTHING", "give its ARG a value"),
        ("FROM base\nRUN <<EOF\nx", "`EOF` is missing"),
        (
            "FROM base\nRUN fail 3",
            "line 2: `RUN fail 3` ended with exit code 3",
        ),
        ("FROM Not/A/Ref!", "neither a template nor an image"),
    ] {
        bench.refused(file, expected).await;
    }
}

#[tokio::test]
async fn a_cancelled_build_leaves_nothing() {
    let bench = Bench::new();
    let before = bench.store.list().unwrap();
    let build = bench.build("FROM base\nRUN put /a 1\nRUN hang\n");
    let deadline = std::time::Duration::from_secs(60);
    tokio::select! {
        result = build => panic!("{result:?}"),
        () = async {
            while bench.runs() < 2 {
                tokio::time::sleep(std::time::Duration::from_millis(5)).await;
            }
        } => {}
        () = tokio::time::sleep(deadline) => panic!("it never came to the second step"),
    }
    assert_eq!(bench.runner.alive.load(Ordering::SeqCst), 0);
    assert_eq!(fs::read_dir(bench.store.dir().join("tmp")).unwrap().count(), 0);
    assert_eq!(bench.store.list().unwrap(), before);
    // The step that was done is not done again.
    bench.build("FROM base\nRUN put /a 1\n").await.unwrap();
    assert_eq!(bench.runs(), 2);
}

/// What a few bytes would make large, or long.
#[tokio::test]
async fn what_grows_without_end_is_refused() {
    let bench = Bench::new();
    bench.add_base();
    let nested = format!("ENV A={}y{}", "${X:-".repeat(20_000), "}".repeat(20_000));
    let doubled = "ENV A=0123456789\n".to_owned() + &"ENV A=$A$A\n".repeat(40);
    let many = "ENV A=$A$A$A$A$A$A$A$A$A$A\n"
        .repeat(9)
        .replacen("$A$A", "0123456789", 1);
    let spread: String = (0..2000).map(|n| format!("ENV B{n}=$A\n")).collect();
    let spread = format!("ENV A={}\n{spread}", "x".repeat(1000));
    let stages: String = (0..70).map(|n| format!("FROM base AS s{n}\n")).collect();
    for (text, why) in [
        (nested, "nested"),
        (doubled, "bytes"),
        (many, "bytes"),
        (spread, "bytes"),
        (format!("RUN true\n{stages}"), "stages"),
    ] {
        let error = bench
            .build(&format!("FROM base\n{text}\n"))
            .await
            .unwrap_err()
            .to_string();
        assert!(error.contains(why), "{why}: {error}");
    }
    // Many ports, again and again.
    let ports: Vec<String> = (0..3)
        .map(|n| format!("{}-{}", 1 + n * 1000, 1000 + n * 1000))
        .collect();
    let made = bench
        .build(&format!(
            "FROM base\nEXPOSE {}\n",
            format!("{} ", ports.join(" ")).repeat(100)
        ))
        .await
        .unwrap();
    assert_eq!(made.exposed_ports.len(), 3000);
}

#[tokio::test]
async fn values_may_have_several_lines() {
    let bench = Bench::new();
    bench.add_base();
    let text = "FROM base\nENV A=\"one  \n# two\\\\\"\"\n\n\\\"three\\\"\" B='b\n$A' C=\"$A\"\nENV D=d\n";
    let made = bench.build(text).await.unwrap();
    let a = "one  \n# two\\\n\n\"three\"";
    assert_eq!((made.env["A"].as_str(), made.env["B"].as_str()), (a, "b\n$A"));
    assert_eq!((made.env["C"].as_str(), made.env["D"].as_str()), ("", "d"));
    let open = bench.build("FROM base\nENV A=\"one\nRUN x\n").await;
    let error = open.unwrap_err().to_string();
    assert!(
        error.contains("line 2") && error.contains("not closed"),
        "{error}"
    );
}

#[test]
fn lines_are_joined_as_docker_does() {
    let file = parse_dockerfile(
        "# escape=`\n# syntax=x\nFROM a `\n\n# c\n AS b\r\nRUN echo \\ `\n  two\nCMD [\"x\",\"y z\"]",
    )
    .unwrap();
    assert_eq!(
        (file.stages[0].base.as_str(), file.stages[0].name.as_deref()),
        ("a", Some("b"))
    );
    let steps: Vec<_> = file.stages[0]
        .steps
        .iter()
        .map(|step| (step.line, &step.instruction))
        .collect();
    let shell = Instruction::Run(Command::Shell("echo \\   two".into()));
    let exec = Instruction::Cmd(Command::Exec(vec!["x".into(), "y z".into()]));
    assert_eq!(steps, [(7, &shell), (9, &exec)]);
}

mod random {
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn no_text_makes_the_parser_panic(text in "(FROM|RUN|COPY|ENV|ARG|ADD|<<|EOF|[ \\n\\\\\"'$={}\\[\\]a-z/.#-]){0,60}") {
            let _either = super::parse_dockerfile(&text);
            let _either = super::parse_dockerfile(&format!("FROM a\n{text}"));
            let _either = super::expand::expand(&text, '\\', &|_| Some("v".into()));
        }
    }
}
