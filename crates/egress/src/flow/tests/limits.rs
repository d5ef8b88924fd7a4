//! How much.

use super::*;

/// A policy for `a.example` at `port` with these limits.
fn limited(port: u16, limits: &serde_json::Value) -> serde_json::Value {
    let mut policy = allow("a.example", &[port]);
    policy["limits"] = limits.clone();
    policy
}

/// Where the guest finds the server.
async fn known(world: &World, server: &Server) -> SocketAddr {
    let address = world.address_of(GUEST, "a.example.").await.unwrap();
    SocketAddr::new(address, server.port)
}

async fn open(world: &World, server: &Server) -> (TcpStream, TcpStream) {
    let mut guest = world.connect_name(GUEST, "a.example.", server.port).await;
    let hello = hello_for("a.example");
    guest.write_all(&hello).await.unwrap();
    let mut served = server.accept().await;
    read(&mut served, hello.len()).await;
    (guest, served)
}

#[tokio::test]
async fn connections_at_once() {
    let (world, server) = world().await;
    world.admit(GUEST, &limited(server.port, &json!({ "connections": 2 })));
    let (first, first_served) = open(&world, &server).await;
    let _second = open(&world, &server).await;
    assert!(is_turned_away(&world, GUEST, known(&world, &server).await).await);
    let event = world
        .seen
        .find(|event| event.verdict == EgressVerdict::Denied)
        .await;
    assert_eq!(event.rule, "limits.connections");
    drop((first, first_served));
    // Its end is noticed when it is told.
    world.seen.find(|event| event.kind == EventKind::Closed).await;
    loop {
        let Ok(mut again) = world.try_connect(GUEST, known(&world, &server).await).await else {
            continue;
        };
        if again.write_all(&hello_for("a.example")).await.is_ok()
            && tokio::select! {
                _ = server.accept() => true,
                _ = again.readable() => false,
            }
        {
            break;
        }
    }
}

#[tokio::test]
async fn where_a_project_has_half_of_the_hosts_room_it_gets_no_more() {
    let world = World::sized(Timeouts::default(), 8).await;
    let server = Server::start().await;
    world.resolver.address_for("a.example", "127.0.0.1");
    world.admit(GUEST, &allow("a.example", &[server.port]));
    let mut held = Vec::new();
    for _ in 0..4 {
        held.push(open(&world, &server).await);
    }
    assert!(is_turned_away(&world, GUEST, known(&world, &server).await).await);
    let event = world
        .seen
        .find(|event| event.verdict == EgressVerdict::Denied)
        .await;
    assert_eq!(event.rule, "host: connections");
    held.clear();
    world.egress.inner.shared.total.empty().await;
    open(&world, &server).await;
}

#[tokio::test]
async fn a_budget_of_bytes_for_life() {
    let (world, server) = world().await;
    let budget = json!({ "total_bytes": 100_000 });
    world.admit(GUEST, &limited(server.port, &budget));
    let (mut guest, mut served) = open(&world, &server).await;
    served.write_all(&[1; 50_000]).await.unwrap();
    read(&mut guest, 50_000).await;
    // More than is left: both sides learn that it is over.
    let _ = served.write_all(&[2; 200_000]).await;
    let mut rest = Vec::new();
    assert!(guest.read_to_end(&mut rest).await.is_err());
    assert!(rest.len() < 60_000, "{}", rest.len());
    let event = world
        .seen
        .find(|event| event.kind == EventKind::Closed && event.verdict == EgressVerdict::Denied)
        .await;
    assert_eq!(event.rule, "limits.total_bytes");
    // No more connections, also under a new policy with the same budget.
    world.admit(GUEST, &limited(server.port, &budget));
    assert!(is_turned_away(&world, GUEST, known(&world, &server).await).await);
    assert!(world.egress.used(GUEST.source()).unwrap().bytes >= 100_000);
    // With a larger one it goes on.
    world.admit(
        GUEST,
        &limited(server.port, &json!({ "total_bytes": 100_000_000 })),
    );
    open(&world, &server).await;
}

#[tokio::test]
async fn a_budget_of_connections_for_life() {
    let (world, server) = world().await;
    world.admit(GUEST, &limited(server.port, &json!({ "total_connections": 2 })));
    drop(open(&world, &server).await);
    drop(open(&world, &server).await);
    assert!(is_turned_away(&world, GUEST, known(&world, &server).await).await);
    let event = world
        .seen
        .find(|event| event.verdict == EgressVerdict::Denied)
        .await;
    assert_eq!(event.rule, "limits.total_connections");
}

#[tokio::test]
async fn idle_and_half_closed_connections_end() {
    let short = std::time::Duration::from_millis(30);
    let (world, server) = world_with(Timeouts {
        half_closed: short,
        ..Timeouts::default()
    })
    .await;
    world.admit(GUEST, &allow("a.example", &[server.port]));
    let (mut guest, mut served) = open(&world, &server).await;
    guest.shutdown().await.unwrap();
    assert_eq!(served.read(&mut [0; 1]).await.unwrap(), 0);
    assert!(is_reset(&mut guest).await);

    let (world, server) = world_with(Timeouts {
        idle: short,
        ..Timeouts::default()
    })
    .await;
    world.admit(GUEST, &allow("a.example", &[server.port]));
    let (mut guest, mut served) = open(&world, &server).await;
    assert!(is_reset(&mut guest).await);
    assert!(is_reset(&mut served).await);
    let event = world.seen.find(|event| event.kind == EventKind::Closed).await;
    assert_eq!(event.verdict, EgressVerdict::Allowed);
}

#[tokio::test]
async fn flows_that_nobody_reads_hold_bounded_memory_and_hinder_nobody() {
    let (world, server) = world().await;
    world.admit(GUEST, &allow("a.example", &[server.port]));
    let tenant = world.egress.inner.shared.tenants.of(GUEST.source()).unwrap();
    let large = tenant.buffers.available_permits();
    // So many that all large buffers are in use by flows whose guest does not read.
    let mut stuck = Vec::new();
    while tenant.buffers.available_permits() > 0 {
        let (guest, served) = open(&world, &server).await;
        // Until nothing more fits in between.
        loop {
            tokio::select! {
                biased;
                writable = served.writable() => {
                    writable.unwrap();
                    let _ = served.try_write(&[0; 65_536]);
                }
                () = settled(&tenant.buffers, large - stuck.len() - 1) => break,
            }
        }
        stuck.push((guest, served));
    }
    let (mut guest, mut served) = open(&world, &server).await;
    served.write_all(&[9; 300_000]).await.unwrap();
    assert_eq!(read(&mut guest, 300_000).await, [9; 300_000]);
    drop(stuck);
    let all = std::sync::Arc::clone(&tenant.buffers);
    let _all = all.acquire_many(u32::try_from(large).unwrap()).await.unwrap();
}

/// Completes when so few are left, and the rest of the world has had its turn.
async fn settled(buffers: &tokio::sync::Semaphore, left: usize) {
    loop {
        tokio::task::yield_now().await;
        if buffers.available_permits() <= left {
            return;
        }
    }
}
