//! Servers inside, reached across a restore from ports that were used before it: against a real `runsc`.

use super::saving::{LONG, background, resources};
use super::*;

/// So few ports to connect from that each is soon used again. To hit upon one of 50,000 takes hundreds of restores.
const FEW_PORTS: &str = "echo 40000 40015 > /proc/sys/net/ipv4/ip_local_port_range";
const PORTS: usize = 16;

/// What a server says until it hangs up; with `!` in front of a failure.
async fn reach(guest: &Guest, port: u16) -> String {
    let listen = async {
        let mut stream = guest.open(&Request::Connect { port }).await?;
        let mut said = Vec::new();
        while let Some(incoming) = stream.next().await {
            match incoming? {
                Incoming::Data { bytes, .. } if bytes.is_empty() => break,
                Incoming::Data { bytes, .. } => said.extend_from_slice(&bytes),
                Incoming::Message(_) => {}
            }
        }
        Ok::<_, ChannelError>(said)
    };
    match tokio::time::timeout(LONG, listen).await {
        Ok(Ok(said)) => String::from_utf8_lossy(&said).trim().to_owned(),
        Ok(Err(error)) => format!("!{error}"),
        Err(_) => "!nobody answered".into(),
    }
}

/// Asks until a script prints this.
async fn until(guest: &Guest, script: &str, wanted: &str) {
    let deadline = Instant::now() + LONG;
    loop {
        let said = sh(guest, script).await;
        if said == wanted {
            return;
        }
        assert!(Instant::now() < deadline, "{script}: {said}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ports_used_before_a_restore_are_used_again_after_it() {
    let Some(bench) = Bench::new() else { return };
    let backing = DiskBacking::Memory;
    let parent = bench
        .gvisor
        .start(bench.spec(1, resources(backing)))
        .await
        .unwrap();
    let guest = &parent.guest;
    assert_eq!(sh(guest, FEW_PORTS).await, "");
    // All of them hang up first, so that it is their connections that go into TIME-WAIT.
    for (port, answer) in [
        (7000, "echo here"),
        (
            7001,
            "sh -c 'echo held; while [ ! -e /over ]; do busybox usleep 10000; done'",
        ),
    ] {
        let server = format!("busybox nc -ll -p {port} -e /bin/busybox {answer}");
        background(guest, &format!("server-{port}"), &server).await;
        until(
            guest,
            &format!("busybox netstat -ltn | busybox grep -c :{port}"),
            "1",
        )
        .await;
    }
    for _ in 0..2 * PORTS {
        assert_eq!(reach(guest, 7000).await, "here");
    }
    // And from each port a connection that is open during the save.
    let holder = "busybox sleep 9999 | { busybox nc 127.0.0.1 7001; echo over; } >>/held &";
    let holders = format!("for i in $(busybox seq {PORTS}); do {holder} done; wait");
    background(guest, "holders", &holders).await;
    until(guest, "busybox grep -c held /held", &PORTS.to_string()).await;

    let saved = bench.save(&parent.id, SaveKind::Memory).await;
    bench.gvisor.destroy(&parent.id).await.unwrap();
    let child = bench.bring_back(2, SaveKind::Memory, &saved, backing).await;
    for round in 0..2 * PORTS {
        assert_eq!(reach(&child.guest, 7000).await, "here", "connection {round}");
    }
    assert_eq!(sh(&child.guest, "echo >/over").await, "");
    until(&child.guest, "busybox grep -c over /held", &PORTS.to_string()).await;
    for round in 0..2 * PORTS {
        assert_eq!(reach(&child.guest, 7001).await, "held", "connection {round}");
    }
    bench.gvisor.destroy(&child.id).await.unwrap();
    bench.assert_clean().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn time_wait_ends_with_a_restore_and_loses_nothing() {
    const SENT: usize = 400_000;
    // Of connections to port 7002 (1B5A), those in TIME-WAIT (06).
    const WAITING: &str = "busybox grep -c '0100007F:1B5A 06' /proc/net/tcp";
    let Some(bench) = Bench::new() else { return };
    let backing = DiskBacking::Memory;
    let parent = bench
        .gvisor
        .start(bench.spec(1, resources(backing)))
        .await
        .unwrap();
    let server = format!("busybox nc -ll -p 7002 -e /bin/busybox head -c {SENT} /dev/zero");
    background(&parent.guest, "server", &server).await;
    until(&parent.guest, "busybox netstat -ltn | busybox grep -c :7002", "1").await;
    // Says at once that it has nothing to say, and reads later: the pipe holds less than it is sent.
    let client = "busybox nc 127.0.0.1 7002 </dev/null |
        { while [ ! -e /read ]; do busybox usleep 10000; done; busybox wc -c >/count; }";
    background(&parent.guest, "client", client).await;
    until(&parent.guest, WAITING, "1").await;

    let saved = bench.save(&parent.id, SaveKind::Memory).await;
    bench.gvisor.destroy(&parent.id).await.unwrap();
    let child = bench.bring_back(2, SaveKind::Memory, &saved, backing).await;
    // Much less than the minute that it would take otherwise.
    until(&child.guest, &format!("{WAITING} || true"), "0").await;
    assert_eq!(sh(&child.guest, "echo >/read").await, "");
    until(&child.guest, "busybox cat /count", &SENT.to_string()).await;
    bench.gvisor.destroy(&child.id).await.unwrap();
    bench.assert_clean().await;
}
