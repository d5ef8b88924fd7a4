//! A jail that is saved and comes back: with its files, under other ids, and not with its processes.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use atoll_runtime::jail::Jail;
use atoll_runtime::{Error, Instance, InstanceSpec, Kind, Restore, Runtime, SaveKind, SaveSink, SaveSource};
use atoll_types::{DiskBacking, GIB, MIB, Resources};

use crate::house::{House, Traces, before_is_gone, ok, sh, sh_as};

/// Streams as files of a directory.
#[derive(Debug)]
pub(crate) struct Shelf(PathBuf);

impl Shelf {
    pub(crate) fn new(house: &House, name: &str) -> Arc<Self> {
        let dir = house.state.path().join(name);
        std::fs::create_dir(&dir).unwrap();
        Arc::new(Self(dir))
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        std::fs::read(self.0.join("layer")).unwrap()
    }
}

impl SaveSink for Shelf {
    fn stream(&self, name: &str) -> std::io::Result<OwnedFd> {
        Ok(File::create_new(self.0.join(name))?.into())
    }

    fn scratch(&self) -> std::io::Result<File> {
        Err(std::io::Error::other("a jail needs none"))
    }

    fn part(&self, _: &str, _: File) -> std::io::Result<()> {
        Err(std::io::Error::other("a jail has none"))
    }
}

#[async_trait::async_trait]
impl SaveSource for Shelf {
    async fn file(&self, name: &str) -> std::io::Result<File> {
        // Without a name, as a vault gives it.
        let (from, to) = (self.0.join(name), self.0.join("handed out"));
        std::fs::copy(from, &to)?;
        let file = File::open(&to)?;
        std::fs::remove_file(&to)?;
        Ok(file)
    }

    fn names(&self) -> Vec<String> {
        let names = std::fs::read_dir(&self.0).unwrap().flatten();
        names
            .filter_map(|entry| entry.file_name().into_string().ok())
            .collect()
    }
}

impl House {
    pub(crate) fn spec_from(&self, shelf: &Arc<Shelf>, change: impl FnOnce(&mut Resources)) -> InstanceSpec {
        let mut spec = self.spec();
        change(&mut spec.resources);
        spec.restore = Some(Restore {
            kind: SaveKind::Filesystem,
            source: Arc::<Shelf>::clone(shelf),
        });
        spec
    }

    async fn stop(&self, instance: &Instance, name: &str) -> Arc<Shelf> {
        let shelf = Shelf::new(self, name);
        let sink = Arc::<Shelf>::clone(&shelf);
        self.jail
            .save(&instance.id, SaveKind::Filesystem, sink)
            .await
            .unwrap();
        self.jail.destroy(&instance.id).await.unwrap();
        before_is_gone(self, &instance.id);
        shelf
    }
}

/// Makes all kinds of things.
const FURNISH: &str = r#"
set -e
rm /etc/hostname /etc/motd 2>/dev/null || true
rm -r /usr/share/doc
mkdir /usr/share/doc; echo new > /usr/share/doc/only
mv /usr/lib/git-core /usr/lib/moved
mv /etc/apt /srv/apt; touch /srv/apt/more
mkdir -p /work/a/b; echo one > /work/a/b/one
ln /work/a/b/one /work/two; ln /work/two /srv/three
ln -s /etc/passwd /work/link; ln -s nowhere /work/dangling
chmod 666 /work/a/b/one; mkdir -m 1777 /work/pub
touch -d '2001-02-03 04:05:06.789' /work/a/b/one
touch -d '2002-03-04' /work/a
mkfifo -m 600 /work/fifo
python3 - <<'E'
import os, socket
os.mkdir(b'/work/odd')
for n in (b'\xff\xfe', b'new\nline', b' ', b'x'*255, '…'.encode(), b'=', b'-rf'):
    open(b'/work/odd/'+n, 'wb').write(n)
os.mkdir('/work/many')
for i in range(10000): open(f'/work/many/{i}', 'w').write(str(i))
with open('/work/sparse', 'wb') as f:
    f.seek(1 << 30); f.write(b'end')
open('/work/big', 'wb').write(os.urandom(5 << 20))
s = socket.socket(socket.AF_UNIX); s.bind('/work/socket')
d = os.open('/work', os.O_RDONLY)
for i in range(300):
    os.mkdir('deep' * 20, dir_fd=d); d = os.open('deep' * 20, os.O_RDONLY, dir_fd=d)
os.close(os.open('bottom', os.O_CREAT | os.O_WRONLY, dir_fd=d))
E
echo tmp > /tmp/kept; echo shm > /dev/shm/lost; chmod 1775 /
"#;

/// As another user; the jail's root may not give files away.
const FURNISH_MORE: &str = r"
set -e
cp /usr/bin/id /work/pub/id; chmod 6755 /work/pub/id; ln /work/pub/id /work/pub/id2
ln -s x /work/pub/link; mkdir -m 700 /work/pub/private; echo secret > /work/pub/private/file
chmod 000 /work/pub/private
";

/// Says how it all looks.
const LOOK: &str = r#"
test ! -e /etc/hostname && test ! -e /etc/motd && ls /usr/share/doc /usr/lib/moved | md5sum
ls /usr/lib/git-core 2>&1 | head -1; ls -A /srv/apt; ls /etc/apt 2>&1
cat /work/a/b/one /work/two /srv/three
stat -c '%n %F %a %u:%g %h %y' /work /work/a /work/a/b/one /work/two /work/pub/* /work/fifo /work/sparse /tmp/kept
stat -c '%s' /work/a/b/one /work/sparse; stat -c '%a %u:%g' /
stat -c '%N' /work/link /work/dangling
python3 - <<'E'
import os, hashlib
for n in sorted(os.listdir(b'/work/odd')): print(n, open(b'/work/odd/'+n,'rb').read() == n)
print(len(os.listdir('/work/many')), all(open(f'/work/many/{i}').read() == str(i) for i in range(10000)))
print(hashlib.md5(open('/work/big','rb').read()).hexdigest(), os.stat('/work/sparse').st_blocks < 100)
with open('/work/sparse','rb') as f: f.seek(1 << 30); print(f.read())
d = os.open('/work', os.O_RDONLY)
for i in range(300): d = os.open('deep' * 20, os.O_RDONLY, dir_fd=d)
print(os.listdir(d))
E
echo changed > /usr/lib/moved/new && cat /usr/lib/moved/new && rm /usr/lib/moved/new
"#;

#[tokio::test]
async fn files_come_back_as_they_were() {
    let Some(house) = House::open().filter(House::is_roots) else {
        return;
    };
    for (backing, next) in [
        (DiskBacking::Memory, DiskBacking::Memory),
        (DiskBacking::Memory, DiskBacking::Disk),
        (DiskBacking::Disk, DiskBacking::Memory),
    ] {
        let size = |backing| {
            move |resources: &mut Resources| {
                resources.disk_backing = backing;
                resources.disk_bytes = 512 * MIB;
                resources.memory_bytes = GIB;
            }
        };
        let name = format!("{backing:?}-{next:?}");
        let before = Traces::take();
        let one = house.start_with(size(backing)).await;
        ok(&one, FURNISH).await;
        let (said, _) = sh_as(&one, "1000:1001", FURNISH_MORE).await;
        assert_eq!(said, "", "{name}");
        let looked = ok(&one, LOOK).await;
        let shelf = house.stop(&one, &name).await;
        assert!(shelf.bytes().len() < 64 << 20, "{}", shelf.bytes().len());

        let two = house
            .jail
            .start(house.spec_from(&shelf, size(next)))
            .await
            .unwrap();
        assert_eq!(ok(&two, LOOK).await, looked, "{name}");
        ok(
            &two,
            "test ! -e /dev/shm/lost && test ! -e /work/socket && cat /tmp/kept",
        )
        .await;
        // It is as good as the first: it can be written, and saved again.
        let (said, _) = sh_as(
            &two,
            "1000",
            "id -u > /work/a/b/one && cat /work/two; /work/pub/id -u; \
             chmod 700 /work/pub/private && cat /work/pub/private/file",
        )
        .await;
        assert_eq!(said, "1000\n1000\nsecret\n");
        ok(
            &two,
            "rm -r /work/many && rmdir /srv/apt/* 2>/dev/null; echo again > /work/again",
        )
        .await;
        let shelf = house.stop(&two, &format!("{name}-2")).await;
        let three = house
            .jail
            .start(house.spec_from(&shelf, size(next)))
            .await
            .unwrap();
        assert_eq!(
            ok(&three, "cat /work/again; ls /work/many 2>&1; ls /usr/share/doc").await,
            "again\nls: cannot access '/work/many': No such file or directory\nonly\n"
        );
        house.jail.destroy(&three.id).await.unwrap();
        before.nothing_new(&house, &three.id).await;
    }
}

/// Without users of its own, and without moved directories of the template.
#[tokio::test]
async fn files_come_back_to_anybody() {
    let Some(house) = House::open() else { return };
    let one = house.start().await;
    ok(&one, "rm -r /usr/share/doc; mkdir /usr/share/doc; echo x > /usr/share/doc/x; ln /usr/share/doc/x /y; rm /etc/passwd").await;
    let shelf = house.stop(&one, "anybody").await;
    let two = house.jail.start(house.spec_from(&shelf, |_| {})).await.unwrap();
    let said = ok(
        &two,
        "cat /y; ls /usr/share/doc; ls /etc/passwd 2>&1; stat -c '%u %h' /y",
    )
    .await;
    assert_eq!(
        said,
        "x\nx\nls: cannot access '/etc/passwd': No such file or directory\n0 2\n"
    );
    house.jail.destroy(&two.id).await.unwrap();
}

#[tokio::test]
async fn nothing_moves_until_the_thaw() {
    let Some(house) = House::open() else { return };
    let instance = house.start().await;
    let busy = "(while :; do echo >> /tmp/clock; sleep 0.001; done) & while :; do (true); done";
    let _ = sh(
        &instance,
        &format!("setsid sh -c '{busy}' >/dev/null 2>&1 & true"),
    )
    .await;
    let clock = ok(&instance, "sleep 0.2; wc -c < /tmp/clock").await;
    let (one, two) = (Shelf::new(&house, "one"), Shelf::new(&house, "two"));
    house
        .jail
        .save(&instance.id, SaveKind::Filesystem, Arc::<Shelf>::clone(&one) as _)
        .await
        .unwrap();
    tokio::time::sleep(Duration::from_millis(200)).await;
    // Whoever comes next finds it as still as the first, byte for byte.
    let next = Jail::new(Arc::clone(&house.config)).unwrap();
    next.save(&instance.id, SaveKind::Filesystem, Arc::<Shelf>::clone(&two) as _)
        .await
        .unwrap();
    assert!(one.bytes() == two.bytes(), "something was written meanwhile");
    // One that takes over from a server that died meanwhile.
    instance.guest.close();
    let instance = next.adopt(&instance.id).await.unwrap();
    next.thaw(&instance.id).await.unwrap();
    assert_ne!(ok(&instance, "sleep 0.2; wc -c < /tmp/clock").await, clock);
    assert_eq!(*instance.end.borrow(), None);

    // A frozen one can be killed.
    let three = Shelf::new(&house, "three");
    house
        .jail
        .save(&instance.id, SaveKind::Filesystem, three)
        .await
        .unwrap();
    let start = Instant::now();
    house.jail.destroy(&instance.id).await.unwrap();
    assert!(start.elapsed() < Duration::from_secs(2));
    before_is_gone(&house, &instance.id);
    assert!(matches!(
        house.jail.thaw(&instance.id).await,
        Err(Error::NotFound(_))
    ));
}

#[tokio::test]
async fn what_cannot_be_saved_runs_on() {
    #[derive(Debug)]
    struct Full;
    impl SaveSink for Full {
        fn stream(&self, _: &str) -> std::io::Result<OwnedFd> {
            Ok(File::options().write(true).open("/dev/full")?.into())
        }

        fn scratch(&self) -> std::io::Result<File> {
            Err(std::io::ErrorKind::StorageFull.into())
        }

        fn part(&self, _: &str, _: File) -> std::io::Result<()> {
            Err(std::io::ErrorKind::StorageFull.into())
        }
    }
    let Some(house) = House::open() else { return };
    let instance = house.start().await;
    let shelf = Shelf::new(&house, "memory");
    let error = house
        .jail
        .save(&instance.id, SaveKind::Memory, shelf)
        .await
        .unwrap_err();
    assert!(error.to_string().contains("memory cannot be saved"), "{error}");
    assert!(!house.jail.saves().memory);
    let error = house
        .jail
        .save(&instance.id, SaveKind::Filesystem, Arc::new(Full))
        .await
        .unwrap_err();
    assert!(error.to_string().contains("No space left"), "{error}");
    assert_eq!(error.kind(), Kind::HostFull, "{error}");
    assert_eq!(ok(&instance, "echo alive").await, "alive\n");
    // The layer itself stays out of sight.
    let devices = ok(&instance, "ls -A /dev").await;
    assert!(
        !devices.contains("upper") && !devices.contains("work"),
        "{devices}"
    );
    house.jail.destroy(&instance.id).await.unwrap();
}

#[tokio::test]
async fn a_layer_that_does_not_fit_is_refused() {
    let Some(house) = House::open() else { return };
    let one = house
        .start_with(|resources| {
            resources.disk_bytes = 256 * MIB;
            resources.memory_bytes = GIB;
        })
        .await;
    ok(&one, "head -c 100M /dev/urandom > /big").await;
    let shelf = house.stop(&one, "big").await;
    for backing in [DiskBacking::Memory, DiskBacking::Disk] {
        let before = Traces::take();
        let spec = house.spec_from(&shelf, |resources| {
            resources.disk_bytes = 64 * MIB;
            resources.disk_backing = backing;
        });
        let id = spec.id.clone();
        let error = house.jail.start(spec).await.unwrap_err().to_string();
        assert!(error.contains("does not fit into a disk"), "{backing:?}: {error}");
        before.nothing_new(&house, &id).await;
    }
    // In memory it counts as memory.
    let spec = house.spec_from(&shelf, |resources| {
        resources.disk_bytes = 256 * MIB;
        resources.memory_bytes = 64 * MIB;
    });
    let id = spec.id.clone();
    let error = house.jail.start(spec).await.unwrap_err().to_string();
    assert!(error.contains("memory limit"), "{error}");
    before_is_gone(&house, &id);
}

/// A look at the speed: `cargo test --release -- --ignored gigabyte --nocapture`.
#[tokio::test]
#[ignore = "a measurement"]
async fn a_gigabyte() {
    let Some(house) = House::open() else { return };
    let size = |resources: &mut Resources| {
        resources.disk_bytes = 2 * GIB;
        resources.memory_bytes = 4 * GIB;
    };
    for (name, script) in [
        ("idle", "true"),
        (
            "10,000 files",
            "mkdir /m; cd /m; python3 -c 'for i in range(10000): open(str(i), \"w\").write(\"x\")'",
        ),
        ("1 GiB", "head -c 1G /dev/urandom > /big"),
    ] {
        let one = house.start_with(size).await;
        ok(&one, script).await;
        let shelf = Shelf::new(&house, name);
        let start = Instant::now();
        house
            .jail
            .save(&one.id, SaveKind::Filesystem, Arc::<Shelf>::clone(&shelf) as _)
            .await
            .unwrap();
        let saved = start.elapsed();
        house.jail.destroy(&one.id).await.unwrap();
        let spec = house.spec_from(&shelf, size);
        let start = Instant::now();
        let two = house.jail.start(spec).await.unwrap();
        eprintln!(
            "{name:14} save {saved:?}, start again {:?} (with a copy of the stream)",
            start.elapsed()
        );
        house.jail.destroy(&two.id).await.unwrap();
    }
}

#[tokio::test]
async fn hostile_layers_are_refused_or_harmless() {
    let Some(house) = House::open() else { return };
    let victim = house.state.path().join("victim");
    std::fs::write(&victim, "precious").unwrap();
    let shelf = Shelf::new(&house, "hostile");
    let make = |script: &str| {
        let made = std::process::Command::new("python3")
            .args(["-c", &format!("import tarfile,io,sys\nt=tarfile.open(sys.argv[1],'w',format=tarfile.PAX_FORMAT)\n{script}\nt.close()")])
            .arg(shelf.0.join("layer"))
            .status();
        assert!(made.unwrap().success());
    };
    let entry = "def e(name,**k):\n  i=tarfile.TarInfo(name)\n  for a,b in k.items(): setattr(i,a,b)\n  t.addfile(i, io.BytesIO(b'x'*i.size))\n";
    let escape = format!("{entry}e('../../../..{}',size=4)", victim.display());
    let through = format!(
        "{entry}e('d',type=tarfile.SYMTYPE,linkname='{}')\ne('d/victim',size=4)",
        house.state.path().display()
    );
    let redirect = format!(
        "{entry}e('d',type=tarfile.DIRTYPE,mode=0o755,pax_headers={{'SCHILY.xattr.trusted.overlay.redirect':'/../../etc'}})"
    );
    for (script, why) in [
        (escape.as_str(), "climb"),
        (&through, "os error 40"),
        (&redirect, "which is no path"),
        ("pass\nt.fileobj.write(b'garbage'*200)", "not a tar stream"),
    ] {
        make(script);
        let spec = house.spec_from(&shelf, |_| {});
        let id = spec.id.clone();
        let error = house.jail.start(spec).await.unwrap_err().to_string();
        assert!(error.contains(why), "{script}: {error}");
        before_is_gone(&house, &id);
    }
    // Devices and what is the jailer's own are passed over; a link in place of a directory of the template stays a link.
    make(&format!(
        "{entry}e('mem',type=tarfile.CHRTYPE,devmajor=1,devminor=1,mode=0o666)\n\
         e('dev',type=tarfile.SYMTYPE,linkname='/etc')\ne('.atoll/atoll-guest',size=10)\n\
         e('proc/x',size=3)\ne('root',type=tarfile.SYMTYPE,linkname='/etc')\ne('suid',size=3,mode=0o6777,uid=70000)"
    ));
    let instance = house.jail.start(house.spec_from(&shelf, |_| {})).await.unwrap();
    let said = ok(
        &instance,
        "ls -d /mem 2>&1; ls /proc/x 2>&1; readlink /root; stat -c '%a %u' /suid; test -c /dev/null",
    )
    .await;
    assert_eq!(
        said,
        "ls: cannot access '/mem': No such file or directory\nls: cannot access '/proc/x': No such file or directory\n\
         /etc\n6777 65534\n"
    );
    house.jail.destroy(&instance.id).await.unwrap();
    assert_eq!(std::fs::read(&victim).unwrap(), b"precious");
}
