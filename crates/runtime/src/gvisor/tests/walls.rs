//! The walls around a sentry that we start, held against those that `runsc run` builds.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt;
use std::process::Stdio;

use rustix::process::{Pid, Signal, kill_process};

use super::*;

/// What the host can see of a process.
#[derive(Debug)]
struct Seen {
    pid: u32,
    status: BTreeMap<String, String>,
    /// Of all threads.
    capabilities: BTreeSet<String>,
    namespaces: BTreeMap<String, String>,
    mounts: Vec<String>,
    root: BTreeSet<PathBuf>,
    files: BTreeSet<String>,
    limits: String,
    session: String,
    environment: Vec<u8>,
}

impl Seen {
    fn of(pid: u32) -> Self {
        let at = PathBuf::from(format!("/proc/{pid}"));
        let read = |name: &str| fs::read_to_string(at.join(name)).unwrap();
        let links = |name: &str| -> Vec<(String, String)> {
            let entries = fs::read_dir(at.join(name)).unwrap().flatten();
            entries
                .filter_map(|entry| {
                    let target = fs::read_link(entry.path()).ok()?;
                    let name = entry.file_name().into_string().ok()?;
                    Some((name, target.to_string_lossy().into_owned()))
                })
                .collect()
        };
        let status = |text: &str| -> BTreeMap<String, String> {
            text.lines()
                .filter_map(|line| line.split_once(':'))
                .map(|(name, value)| (name.to_owned(), value.trim().to_owned()))
                .collect()
        };
        let mut capabilities = BTreeSet::new();
        for thread in fs::read_dir(at.join("task")).unwrap().flatten() {
            let status = status(&fs::read_to_string(thread.path().join("status")).unwrap());
            let sets = status
                .iter()
                .filter(|(name, _)| name.starts_with("Cap") || *name == "NoNewPrivs" || *name == "Seccomp");
            capabilities.extend(sets.map(|(name, value)| format!("{name} {value}")));
        }
        let stat = read("stat");
        let stat = stat[stat.rfind(')').unwrap()..].split_whitespace();
        Self {
            pid,
            status: status(&read("status")),
            capabilities,
            namespaces: links("ns").into_iter().collect(),
            mounts: read("mountinfo").lines().map(str::to_owned).collect(),
            root: tree(&at.join("root/"), &at.join("root/")),
            // Sockets and pipes have a number that means nothing.
            files: links("fd")
                .into_iter()
                .map(|(_, target)| target.split('[').next().unwrap().to_owned())
                .collect(),
            limits: read("limits"),
            // The terminal, and who the kernel would rather kill.
            session: format!(
                "{:?} {}",
                stat.skip(5).take(1).collect::<Vec<_>>(),
                read("oom_score_adj")
            ),
            environment: fs::read(at.join("environ")).unwrap(),
        }
    }

    fn set(&self, name: &str) -> u64 {
        u64::from_str_radix(&self.status[name], 16).unwrap()
    }

    /// The namespaces that are not those of this test.
    fn own_namespaces(&self) -> BTreeSet<&str> {
        let foreign = |(name, target): &(&String, &String)| {
            fs::read_link(format!("/proc/self/ns/{name}"))
                .unwrap()
                .as_os_str()
                != target.as_str()
        };
        let own = self.namespaces.iter().filter(foreign);
        own.map(|(name, _)| name.as_str()).collect()
    }
}

/// Every path below `dir`.
fn tree(dir: &Path, root: &Path) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    for entry in fs::read_dir(dir).unwrap().flatten() {
        found.insert(entry.path().strip_prefix(root).unwrap().to_owned());
        if entry.file_type().unwrap().is_dir() {
            found.extend(tree(&entry.path(), root));
        }
    }
    found
}

/// A sandbox process that `runsc run` started; killed at the end.
struct Reference(u32);

impl Reference {
    async fn start(bench: &Bench, spec: &InstanceSpec, first_uid: u32) -> Self {
        let dir = bench.state.path().join("reference");
        fs::create_dir(&dir).unwrap();
        let empty = bench.state.path().join("empty");
        let places = bundle::Places {
            empty: &empty,
            guest_image: &bench.config.guest_image,
            dir: &dir,
            disk: &dir,
            layer_size: &bundle::layer_size(&spec.resources, false),
        };
        let bundle = bundle::bundle(spec, &places, first_uid, true);
        fs::write(dir.join("config.json"), bundle.config).unwrap();
        let (stdin, stdout) = Fifos::create(&dir).unwrap().open_for_guest().unwrap();
        let runsc = bench.config.runsc.as_ref().unwrap();
        let done = tokio::process::Command::new(runsc)
            .env_clear()
            .args(launch::flags(runsc, &dir, None))
            .args(["run", "-detach", "-pid-file"])
            .arg(dir.join("pid"))
            .arg("-bundle")
            .arg(&dir)
            .arg("reference")
            .stdin(Stdio::from(stdin))
            .stdout(Stdio::from(stdout))
            .stderr(Stdio::null())
            .status();
        assert!(done.await.unwrap().success(), "{:?}", launch::complaint(&dir));
        let pid = fs::read_to_string(dir.join("pid")).unwrap();
        Self(pid.trim().parse().unwrap())
    }
}

impl Drop for Reference {
    fn drop(&mut self) {
        let pid = i32::try_from(self.0).ok().and_then(Pid::from_raw);
        let _ = kill_process(pid.unwrap(), Signal::KILL);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn walls_are_those_of_runsc_or_thicker() {
    let Some(bench) = Bench::new() else { return };
    // Somebody forgot to say that this is not to be inherited.
    let forgotten = bench.state.path().join("forgotten");
    fs::write(&forgotten, "").unwrap();
    let _open = rustix::io::dup(fs::File::open(&forgotten).unwrap()).unwrap();

    // With its layer on disk `runsc run` would start a gofer, too.
    let resources = Resources {
        disk_backing: DiskBacking::Memory,
        ..Resources::default()
    };
    let spec = bench.spec(20, resources);
    let instance = bench.gvisor.start(spec.clone()).await.unwrap();
    assert_eq!(sh(&instance.guest, "echo up").await, "up");
    let record = bench.gvisor.dirs.read(&spec.id).unwrap().unwrap();
    let first_uid = record.id_base.unwrap();
    let ours = Seen::of(record.process.unwrap().pid);
    let reference = Reference::start(&bench, &spec, first_uid).await;
    let theirs = Seen::of(reference.0);

    // Nobody on the host, in no group.
    let ids = [first_uid; 4].map(|id| id.to_string()).join("\t");
    for name in ["Uid", "Gid"] {
        assert_eq!(ours.status[name], ids, "{name}");
        let map = fs::read_to_string(format!("/proc/{}/{}_map", ours.pid, name.to_lowercase())).unwrap();
        let map: Vec<_> = map.split_whitespace().collect();
        assert_eq!(map, ["0", &first_uid.to_string(), &uids::RANGE.to_string()]);
    }
    assert_eq!(ours.status["Groups"], "");

    // No power but to trace its own processes, in every thread, and no way to more.
    for name in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert_eq!(ours.set(name) & !theirs.set(name), 0, "{name}");
    }
    let all = ours.capabilities.iter().map(String::as_str).collect::<Vec<_>>();
    let (none, trace) = ("0000000000000000", "0000000000080000");
    assert_eq!(
        all,
        [
            &format!("CapAmb {none}"),
            &format!("CapBnd {trace}"),
            &format!("CapEff {trace}"),
            &format!("CapInh {none}"),
            &format!("CapPrm {trace}"),
            "NoNewPrivs 1",
            "Seccomp 2",
        ]
    );
    for name in [
        "Seccomp_filters",
        "SigIgn",
        "Umask",
        "Speculation_Store_Bypass",
        "THP_enabled",
    ] {
        assert_eq!(ours.status[name], theirs.status[name], "{name}");
    }
    let owner = |seen: &Seen| fs::metadata(format!("/proc/{}/mem", seen.pid)).unwrap().uid();
    assert_eq!(owner(&ours), owner(&theirs), "dumpable");

    // Namespaces of its own, the first process in them.
    assert_eq!(ours.own_namespaces(), theirs.own_namespaces());
    for name in ["user", "mnt", "pid", "ipc", "uts", "net"] {
        assert!(ours.own_namespaces().contains(name), "{name}");
        assert_ne!(ours.namespaces[name], theirs.namespaces[name], "{name}");
    }
    for name in ["NSpid", "NSpgid", "NSsid"] {
        assert_eq!(ours.status[name].split('\t').nth(1), Some("1"), "{name}");
        assert_eq!(theirs.status[name].split('\t').nth(1), Some("1"), "{name}");
    }

    // An empty root that cannot be written, and nothing else mounted.
    assert_eq!(ours.root, BTreeSet::from(["proc".into()]));
    assert!(ours.root.is_subset(&theirs.root), "{:?}", theirs.root);
    assert_eq!(ours.mounts.len(), 1, "{:?}", ours.mounts);
    assert!(
        ours.mounts[0].contains(" / / ro,nosuid,nodev,noexec"),
        "{:?}",
        ours.mounts
    );
    let cwd = fs::read_link(format!("/proc/{}/cwd", ours.pid)).unwrap();
    assert_eq!(cwd, Path::new("/"));

    // Nothing inherited.
    let dirs = [
        bench.gvisor.dirs.dir(&spec.id),
        bench.state.path().join("reference"),
    ];
    let known = |seen: &Seen, dir: &Path| -> BTreeSet<String> {
        let dir = dir.to_str().unwrap();
        let files = seen.files.iter().map(|file| file.replace(dir, "<dir>"));
        // Before it is in its root, or from there.
        files.map(|file| file.replace("/dev/null", "/null")).collect()
    };
    let (files, expected) = (known(&ours, &dirs[0]), known(&theirs, &dirs[1]));
    assert!(files.is_subset(&expected), "{files:?} {expected:?}");
    assert!(!files.iter().any(|file| file.contains("forgotten")), "{files:?}");
    assert_eq!(ours.environment, b"");
    assert_eq!(ours.limits, theirs.limits);
    assert_eq!(ours.session, theirs.session);

    // No copy of this process is left with it, and none when it is gone.
    let own = fs::read_link("/proc/self/exe").unwrap();
    let group = bench.gvisor.group(&spec.id).unwrap();
    let mut members = 0;
    for pid in fs::read_to_string(&group.procs_files()[0]).unwrap().lines() {
        let exe = fs::read_link(format!("/proc/{pid}/exe")).unwrap();
        assert_ne!(exe, own);
        members += 1;
    }
    assert!(members > 0);
    bench.gvisor.destroy(&spec.id).await.unwrap();
    let gone = async {
        while Path::new(&format!("/proc/{}", ours.pid)).exists() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(5), gone).await.unwrap();
    drop(reference);
}

#[tokio::test(flavor = "multi_thread")]
async fn whatever_stops_a_sentry_is_named() {
    let Some(mut bench) = Bench::new() else { return };
    let text = bench.state.path().join("no-runsc");
    fs::write(&text, "not a program").unwrap();
    bench.gvisor.runsc = text;
    let error = bench.gvisor.start(bench.spec(21, Resources::default())).await;
    let error = error.unwrap_err().to_string();
    assert!(error.contains("executing runsc: Permission denied"), "{error}");
    bench.assert_clean().await;
    // One that ends at once.
    bench.gvisor.runsc = in_path("busybox").unwrap();
    let error = bench.gvisor.start(bench.spec(22, Resources::default())).await;
    let error = error.unwrap_err().to_string();
    assert!(error.contains("ended while it was starting"), "{error}");
    bench.assert_clean().await;
    // An image that is none.
    bench.gvisor.runsc = bench.config.runsc.clone().unwrap();
    let mut spec = bench.spec(23, Resources::default());
    spec.image = vec![bench.state.path().join("no-runsc")];
    let error = bench.gvisor.start(spec).await.unwrap_err().to_string();
    assert!(error.contains("the superblock cannot be read"), "{error}");
    bench.assert_clean().await;
}
