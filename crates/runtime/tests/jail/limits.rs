//! It gets what it was promised, and no more.

use std::time::Duration;

use atoll_runtime::{InstanceEnd, Runtime};
use atoll_types::{DiskBacking, GIB, MIB};

use crate::house::{House, Traces, before_is_gone, first_words, ok, sh, start_sh};

#[tokio::test]
async fn a_jail_does_not_use_up_what_others_are_allowed() {
    let Some(house) = House::open() else { return };
    let (one, two) = (house.start().await, house.start().await);
    let take = "python3 -c 'import ctypes,time\nl=ctypes.CDLL(None)\nn=0\nwhile n<5000 and l.inotify_init1(0)>=0: n+=1\nprint(n, flush=True)\ntime.sleep(1000)'";
    let mut greedy = start_sh(&one, "0", take).await;
    let took = first_words(&mut greedy).await;
    assert!(took.trim().parse::<u32>().is_ok_and(|count| count > 10), "{took}");
    let modest = "python3 -c 'import ctypes; print(ctypes.CDLL(None).inotify_init1(0) >= 0)'";
    assert_eq!(ok(&two, modest).await, "True\n", "{took}");
    drop(greedy);
    for instance in [one, two] {
        house.jail.destroy(&instance.id).await.unwrap();
    }
}

#[tokio::test]
async fn the_disk_is_as_large_as_agreed() {
    let Some(house) = House::open() else { return };
    for backing in [DiskBacking::Memory, DiskBacking::Disk] {
        let before = Traces::take();
        let instance = house
            .start_with(|resources| {
                resources.disk_backing = backing;
                resources.memory_bytes = GIB;
            })
            .await;
        let (said, _) = sh(
            &instance,
            "head -c 100M /dev/zero > /fill; ls -s --block-size=1M /fill",
        )
        .await;
        assert!(said.contains("No space left"), "{backing:?}: {said}");
        let megabytes: u64 = said
            .lines()
            .last()
            .and_then(|line| line.split(' ').next()?.parse().ok())
            .unwrap();
        assert!((50..=64).contains(&megabytes), "{backing:?}: {said}");
        let usage = house.jail.usage(&instance.id).await.unwrap();
        assert!(
            usage
                .disk_bytes
                .is_some_and(|bytes| bytes > 50 * MIB && bytes <= 64 * MIB),
            "{usage:?}"
        );
        let (said, _) = sh(
            &instance,
            "rm /fill; mkdir /many; cd /many; python3 -c 'import os\nfor i in range(200000): open(str(i),\"w\").close()'",
        )
        .await;
        assert!(said.contains("No space left"), "{backing:?}: {said}");
        assert_eq!(
            ok(&instance, "rm -r /many; echo alive > /tmp/x; cat /tmp/x").await,
            "alive\n"
        );
        house.jail.destroy(&instance.id).await.unwrap();
        before.nothing_new(&house, &instance.id).await;
    }
}

#[tokio::test]
async fn a_fork_bomb_stays_within_its_pids() {
    let Some(house) = House::open() else { return };
    let instance = house.start().await;
    let script = "python3 -c 'import os,time\nn=0\ntry:\n  while True:\n    if os.fork()==0: time.sleep(60)\n    n+=1\nexcept OSError as e: print(n, e)'";
    let (said, _) = sh(&instance, script).await;
    assert!(said.contains("Resource temporarily unavailable"), "{said}");
    assert!(house.jail.usage(&instance.id).await.unwrap().pids <= 64);
    house.jail.destroy(&instance.id).await.unwrap();
    before_is_gone(&house, &instance.id);

    let instance = house.start().await;
    let bomb = tokio::time::timeout(Duration::from_secs(2), sh(&instance, ":(){ :|:& };:; sleep 1")).await;
    drop(bomb);
    assert!(house.jail.usage(&instance.id).await.unwrap().pids <= 64);
    house.jail.destroy(&instance.id).await.unwrap();
    before_is_gone(&house, &instance.id);
}

#[tokio::test]
async fn a_memory_hog_ends_the_jail_and_the_end_says_so() {
    let Some(house) = House::open() else { return };
    for script in [
        "python3 -c 'x = bytearray(1 << 30)'",
        // What is written in memory counts as memory.
        "head -c 500M /dev/zero > /dev/shm/x; sleep 5",
    ] {
        let instance = house
            .start_with(|resources| resources.memory_bytes = 96 * MIB)
            .await;
        let _ = sh(&instance, "python3 -c 'x=bytearray(8<<20)'").await;
        assert_eq!(*instance.end.borrow(), None);
        let (said, state) = sh(&instance, script).await;
        if script.contains("shm") && said.contains("No space") {
            // Half of the memory is the limit of /dev/shm; fine too.
            house.jail.destroy(&instance.id).await.unwrap();
            continue;
        }
        let mut end = instance.end.clone();
        let end = tokio::time::timeout(Duration::from_secs(10), end.wait_for(Option::is_some)).await;
        let end = end
            .unwrap_or_else(|_| panic!("no end; {said} {state:?}"))
            .unwrap()
            .clone();
        assert_eq!(end, Some(InstanceEnd::OutOfMemory), "{said} {state:?}");
        house.jail.destroy(&instance.id).await.unwrap();
        before_is_gone(&house, &instance.id);
    }
}
