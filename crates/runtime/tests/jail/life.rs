//! It boots, works, is taken over, and goes without a trace.

use std::sync::Arc;
use std::time::Instant;

use atoll_image::{Backing, Content, Limits, Meta, Stack, read_stack, write_index, write_layer};
use atoll_runtime::jail::{self, Jail};
use atoll_runtime::{Error, Runtime};
use atoll_types::{MIB, Resources};

use crate::house::{House, Traces, ok, sh_as};

#[tokio::test]
async fn boots_runs_and_leaves_nothing() {
    let Some(house) = House::open() else { return };
    let before = Traces::take();
    let instance = house.start().await;
    assert_eq!(
        ok(&instance, "echo hello; hostname; id -u").await,
        "hello\nbox\n0\n"
    );
    if rustix::process::geteuid().is_root() {
        assert_eq!(
            sh_as(&instance, "1000:1000", "id -u; id -g").await.0,
            "1000\n1000\n"
        );
    }
    assert_eq!(ok(&instance, "cat /proc/1/comm").await, "atoll-guest\n");
    assert_eq!(ok(&instance, "python3 -c 'print(6*7)'").await, "42\n");
    assert_eq!(ok(&instance, "node -e 'console.log(6*7)'").await, "42\n");
    ok(
        &instance,
        "cd /tmp && git init -q r && mv /usr/lib/git-core /usr/lib/gone && test -d /usr/lib/gone",
    )
    .await;
    ok(&instance, "touch /tmp/a && ln /tmp/a /var/b && mv /var/b /srv/c").await;
    let usage = house.jail.usage(&instance.id).await.unwrap();
    assert!(
        usage.memory_bytes > 0 && usage.pids >= 1 && usage.cpu_micros > 0,
        "{usage:?}"
    );
    assert!(
        usage
            .disk_bytes
            .is_some_and(|bytes| bytes > 0 && bytes < 64 * MIB),
        "{usage:?}"
    );
    assert_eq!(
        house.jail.discover().await.unwrap(),
        std::slice::from_ref(&instance.id)
    );

    house.jail.destroy(&instance.id).await.unwrap();
    house.jail.destroy(&instance.id).await.unwrap();
    let mut end = instance.end.clone();
    end.wait_for(Option::is_some).await.unwrap();
    assert_eq!(house.jail.discover().await.unwrap(), []);
    assert!(matches!(
        house.jail.usage(&instance.id).await,
        Err(Error::NotFound(_))
    ));
    before.nothing_new(&house, &instance.id).await;
}

#[tokio::test]
async fn another_server_adopts_it_with_its_commands() {
    let Some(house) = House::open() else { return };
    let instance = house.start().await;
    ok(
        &instance,
        "echo kept > /tmp/kept; (sleep 60 & echo $! > /tmp/pid)",
    )
    .await;
    let id = instance.id.clone();
    instance.guest.close();
    drop(instance);

    let next = Jail::new(Arc::clone(&house.config)).unwrap();
    assert_eq!(next.discover().await.unwrap(), std::slice::from_ref(&id));
    let instance = next.adopt(&id).await.unwrap();
    assert_eq!(ok(&instance, "cat /tmp/kept").await, "kept\n");
    next.resize(
        &id,
        &Resources {
            pids: 32,
            cpu_millis: 500,
            memory_bytes: 128 * MIB,
            ..Resources::default()
        },
    )
    .await
    .unwrap();
    assert_eq!(ok(&instance, "echo still").await, "still\n");
    next.destroy(&id).await.unwrap();
    assert!(matches!(next.adopt(&id).await, Err(Error::NotFound(_))));
    let mut end = instance.end.clone();
    end.wait_for(Option::is_some).await.unwrap();
}

/// What holds the inodes of an image comes first, and behind it the files that hold the data.
#[tokio::test]
async fn an_image_of_several_files_is_mounted() {
    let Some(house) = House::open() else { return };
    let mut spec = house.spec();
    let lowest = ("0".repeat(64), Backing::open(&spec.image[0]).unwrap());
    let below = Arc::new(Stack::open(vec![lowest.clone()]).unwrap());
    let mut tree = read_stack(&below, Limits::default()).unwrap();
    tree.put_file(b"srv/new", Meta::root(0o644), Content::bytes(*b"new"))
        .unwrap();
    tree.remove(b"etc/passwd").unwrap();
    let (layer, index) = (house.state.path().join("layer"), house.state.path().join("index"));
    let mut file = std::fs::File::create(&layer).unwrap();
    let written = write_layer(&tree, &below, &mut file, |_, _| Ok(()))
        .unwrap()
        .unwrap();
    let files = vec![(written.digest, Backing::open(&layer).unwrap()), lowest];
    let stack = Arc::new(Stack::open(files).unwrap());
    let tree = read_stack(&stack, Limits::default()).unwrap();
    let mut file = std::fs::File::create(&index).unwrap();
    write_index(&tree, &stack, &mut file).unwrap();
    spec.image.splice(0..0, [index, layer]);
    let instance = house.jail.start(spec).await.unwrap();
    let seen = ok(
        &instance,
        "cat /srv/new; ls /etc/passwd || python3 -c 'print(6*7)'",
    )
    .await;
    assert!(seen.ends_with("42\n") && seen.starts_with("new"), "{seen}");
    house.jail.destroy(&instance.id).await.unwrap();
}

#[tokio::test]
async fn what_cannot_start_leaves_nothing() {
    let Some(house) = House::open() else { return };
    let mut spec = house.spec();
    spec.image = vec![house.config.guest_binary.clone()];
    let before = Traces::take();
    let error = house.jail.start(spec.clone()).await.unwrap_err();
    assert!(error.to_string().contains("is not an EROFS image"), "{error}");
    before.nothing_new(&house, &spec.id).await;
}

#[tokio::test]
async fn the_agent_alone_is_enough_for_a_trial() {
    let Some(house) = House::open() else { return };
    let before = Traces::take();
    let (detail, no_disk) = jail::trial(&house.config).await.unwrap();
    assert!(detail.contains("not a tenant boundary"), "{detail}");
    assert_eq!(
        no_disk.is_none(),
        rustix::process::geteuid().is_root(),
        "{no_disk:?}"
    );
    before.nothing_new(&house, &house.spec().id).await;
    assert_eq!(house.jail.discover().await.unwrap(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_at_once() {
    let Some(house) = House::open() else { return };
    let house = Arc::new(house);
    let tasks: Vec<_> = (0..30)
        .map(|_| {
            let house = Arc::clone(&house);
            tokio::spawn(async move {
                let instance = house.start().await;
                assert_eq!(ok(&instance, "echo up").await, "up\n");
                instance.id
            })
        })
        .collect();
    for task in tasks {
        let id = task.await.unwrap();
        house.jail.destroy(&id).await.unwrap();
    }
    assert_eq!(house.jail.discover().await.unwrap(), []);
}

/// Not a test of speed but a look at it: `cargo test --release -- --ignored cold_start --nocapture`.
#[tokio::test]
#[ignore = "a measurement"]
async fn cold_start() {
    let Some(house) = House::open() else { return };
    let (mut ours, mut booted, mut peer, mut idle) = (vec![], vec![], vec![], 0);
    for _ in 0..60 {
        let start = Instant::now();
        let instance = house.start().await;
        booted.push(start.elapsed());
        idle = house.jail.usage(&instance.id).await.unwrap().memory_bytes;
        assert_eq!(ok(&instance, "echo hi").await, "hi\n");
        ours.push(start.elapsed());
        house.jail.destroy(&instance.id).await.unwrap();
        let start = Instant::now();
        let output = tokio::process::Command::new("bwrap")
            .args([
                "--unshare-all",
                "--ro-bind",
                "/",
                "/",
                "--proc",
                "/proc",
                "--dev",
                "/dev",
            ])
            .args(["/bin/sh", "-c", "echo hi"])
            .output()
            .await
            .unwrap();
        assert_eq!(output.stdout, b"hi\n");
        peer.push(start.elapsed());
    }
    for (name, mut times) in [
        ("jail: start", booted),
        ("jail: start + sh -c echo", ours),
        ("bwrap sh -c echo", peer),
    ] {
        times.sort();
        eprintln!(
            "{name:26} p50 {:?}  p90 {:?}  min {:?}",
            times[30], times[54], times[0]
        );
    }
    eprintln!("idle jail: {} KiB", idle / 1024);
}
