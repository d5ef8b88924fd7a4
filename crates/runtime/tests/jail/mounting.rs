//! Volumes and inputs in jails.

use std::path::{Path, PathBuf};

use atoll_runtime::{Instance, Mount, MountSource, Runtime};
use atoll_types::MIB;
use atoll_volumes::{Error, Volumes};

use crate::house::{House, Traces, ok, sh, sh_as};
use crate::saving::Shelf;

fn volumes(house: &House) -> Volumes {
    Volumes::open(house.state.path().join("volumes")).unwrap()
}

fn directory(path: &Path, at: &str, read_only: bool) -> Mount {
    Mount {
        source: MountSource::Directory(path.to_owned()),
        path: at.into(),
        read_only,
    }
}

async fn start(house: &House, mounts: Vec<Mount>) -> Instance {
    let mut spec = house.spec();
    spec.mounts = mounts;
    house.jail.start(spec).await.unwrap()
}

fn device(path: &Path) -> String {
    let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let line = table.lines().find(|line| line.contains(path.to_str().unwrap()));
    line.unwrap().split(' ').nth(2).unwrap().to_owned()
}

#[tokio::test]
async fn jails_share_a_volume_and_agree_on_owners() {
    let Some(house) = House::open().filter(House::is_roots) else {
        return;
    };
    let before = Traces::take();
    let volumes = volumes(&house);
    volumes.create("vol_a", 64 * MIB).unwrap();
    let at = volumes.attach("vol_a").unwrap().path;
    let one = start(&house, vec![directory(&at, "/data", false)]).await;
    let two = start(&house, vec![directory(&at, "/mnt/deep/er", false)]).await;
    let three = start(&house, vec![directory(&at, "/data", true)]).await;
    ok(
        &one,
        "echo hello > /data/root; mkdir -m 777 /data/all; chmod 755 /data",
    )
    .await;
    let (said, _) = sh_as(&one, "1000:1001", "echo mine > /data/all/mine; touch /data/no").await;
    assert!(said.contains("Permission denied"), "{said}");
    for (instance, dir) in [(&two, "/mnt/deep/er"), (&three, "/data")] {
        let said = ok(
            instance,
            &format!("cd {dir}; cat root all/mine; stat -c '%u:%g' root all/mine ."),
        )
        .await;
        assert_eq!(said, "hello\nmine\n0:0\n1000:1001\n0:0\n");
    }
    let meta = std::fs::metadata(at.join("all/mine")).unwrap();
    assert_eq!(std::os::unix::fs::MetadataExt::uid(&meta), 1000);
    let (said, _) = sh_as(&two, "1000:1001", "echo more >> /mnt/deep/er/all/mine").await;
    assert_eq!(said, "");
    ok(&two, "mv /mnt/deep/er/root /mnt/deep/er/all/").await;
    assert_eq!(
        ok(&one, "cat /data/all/mine; ls /data").await,
        "mine\nmore\nall\n"
    );

    let (said, _) = sh(&three, "touch /data/x; rm /data/all/mine; chmod 777 /data").await;
    assert_eq!(said.matches("Read-only file system").count(), 3, "{said}");
    let mounts = ok(&one, "grep ' /data ' /proc/self/mountinfo").await;
    assert!(mounts.contains("nosuid") && mounts.contains("nodev"), "{mounts}");
    let (said, _) = sh(&one, "mknod /data/mem c 1 1; mknod /data/disk b 7 0").await;
    assert_eq!(
        said.matches("ot permitted").count() + said.matches("ermission denied").count(),
        2,
        "{said}"
    );
    ok(&one, "cp /usr/bin/id /data/id; chmod 6755 /data/id").await;
    assert_eq!(sh_as(&two, "1000", "/mnt/deep/er/id -u").await.0, "1000\n");

    // Full is full, for the volume only.
    let (said, _) = sh(
        &two,
        "head -c 100M /dev/zero > /mnt/deep/er/fill; echo fine > /tmp/x && cat /tmp/x",
    )
    .await;
    assert!(said.contains("No space left") && said.contains("fine"), "{said}");
    ok(&one, "rm /data/fill; echo again > /data/again").await;

    // It cannot be taken away from under them.
    let was = device(&at);
    assert!(matches!(volumes.detach("vol_a"), Err(Error::Busy { .. })));
    assert!(matches!(volumes.delete("vol_a"), Err(Error::Busy { .. })));
    ok(&one, "echo still > /data/still").await;
    let at = Volumes::open(house.state.path().join("volumes"))
        .unwrap()
        .attach("vol_a")
        .unwrap()
        .path;
    assert_eq!(device(&at), was, "the same filesystem through the same device");
    assert_eq!(std::fs::read(at.join("still")).unwrap(), b"still\n");
    let four = start(&house, vec![directory(&at, "/data", false)]).await;
    assert_eq!(ok(&four, "cat /data/still /data/again").await, "still\nagain\n");
    for instance in [&one, &two, &three, &four] {
        house.jail.destroy(&instance.id).await.unwrap();
    }
    volumes.detach("vol_a").unwrap();
    before.nothing_new(&house, &four.id).await;

    let at = volumes.attach("vol_a").unwrap().path;
    let five = start(&house, vec![directory(&at, "/data", false)]).await;
    assert_eq!(ok(&five, "cat /data/still").await, "still\n");
    house.jail.destroy(&five.id).await.unwrap();
    volumes.delete("vol_a").unwrap();
}

#[tokio::test]
async fn inputs_are_images_that_are_read() {
    let Some(house) = House::open().filter(House::is_roots) else {
        return;
    };
    let dir = house.state.path().join("input");
    std::fs::create_dir(&dir).unwrap();
    std::fs::write(dir.join("file"), "input").unwrap();
    std::os::unix::fs::chown(dir.join("file"), Some(1000), Some(5)).unwrap();
    let image = house.state.path().join("input.erofs");
    let made = std::process::Command::new("mkfs.erofs")
        .args([&image, &dir])
        .output();
    assert!(made.unwrap().status.success());
    let volumes = volumes(&house);
    volumes.seal("vol_in", &image).unwrap();
    let path = volumes.attach("vol_in").unwrap().path;
    let input = |at: &str| Mount {
        source: MountSource::Erofs(path.clone()),
        path: at.into(),
        read_only: false,
    };
    let instance = start(&house, vec![input("/in"), input("/srv/again")]).await;
    let said = ok(
        &instance,
        "cat /in/file /srv/again/file; stat -c ' %u:%g' /in/file",
    )
    .await;
    assert_eq!(said, "inputinput 1000:5\n");
    let (said, _) = sh(&instance, "touch /in/x").await;
    assert!(said.contains("Read-only"), "{said}");
    house.jail.destroy(&instance.id).await.unwrap();
    volumes.delete("vol_in").unwrap();
}

#[tokio::test]
async fn mounts_that_cannot_be_are_refused() {
    let Some(house) = House::open().filter(House::is_roots) else {
        return;
    };
    let volumes = volumes(&house);
    volumes.create("vol_b", 32 * MIB).unwrap();
    let at = volumes.attach("vol_b").unwrap().path;
    let plain = house.state.path().join("plain");
    std::fs::create_dir(&plain).unwrap();
    let none = PathBuf::from("/no/such");
    for (mounts, why) in [
        (vec![directory(&plain, "/data", false)], "nothing is mounted"),
        (vec![directory(&none, "/data", false)], "No such file"),
        (vec![directory(&at, "/proc/x", false)], "own"),
        (vec![directory(&at, "/etc/passwd", false)], "Not a directory"),
        (
            vec![directory(&at, "/a", false), directory(&at, "/a/b", false)],
            "within each other",
        ),
        // A link of the template that leads onto another mount.
        (vec![directory(&at, "/var/run/../x", false)], "plain names"),
    ] {
        let mut spec = house.spec();
        spec.mounts = mounts;
        let error = house.jail.start(spec).await.unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
    // What a restored layer puts in the way leads nowhere else.
    let one = house.start().await;
    ok(&one, "ln -s /dev/shm /shm; ln -s /proc/1/root /up; ln -s ../../../../tmp/in /inside; mkdir /tmp/in; ln -s /nowhere/at/all /dangling").await;
    let shelf = Shelf::new(&house, "links");
    house
        .jail
        .save(
            &one.id,
            atoll_runtime::SaveKind::Filesystem,
            std::sync::Arc::<Shelf>::clone(&shelf) as _,
        )
        .await
        .unwrap();
    house.jail.destroy(&one.id).await.unwrap();
    for (path, why) in [
        ("/shm", "another mount"),
        ("/up/x", "another mount"),
        ("/dangling/x", "File exists"),
    ] {
        let mut spec = house.spec_from(&shelf, |_| {});
        spec.mounts = vec![directory(&at, path, false)];
        let error = house.jail.start(spec).await.unwrap_err().to_string();
        assert!(error.contains(why), "{path}: {error}");
    }
    let mut spec = house.spec_from(&shelf, |_| {});
    spec.mounts = vec![directory(&at, "/inside", false)];
    let two = house.jail.start(spec).await.unwrap();
    ok(&two, "echo x > /tmp/in/x && cat /inside/x").await;
    assert!(at.join("x").exists());
    house.jail.destroy(&two.id).await.unwrap();
    volumes.delete("vol_b").unwrap();
}
